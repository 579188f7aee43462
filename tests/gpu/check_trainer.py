"""Captured steps under the façade on a GPU: run by hand there, `python tests/gpu/check_trainer.py [--layers 2]`.

From scratch/tokens (bench/token_ids.py). BERT-base's width with random weights. Prints a line a check, ends with 1 if one failed:
float32 without dropout beside transformers.Trainer (losses of 60 steps 1e-5, weights 1e-4); in two micro-batches beside the plain
step, as transformers adds the means of micro-batches up (printed: how far it is with one whole batch, and how far from itself
when that is padded further); in bf16 with dropout the same bits captured, uncaptured, and resumed in the middle.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from check_graphs import check, failures

from token_files import ArrowRows, collator, engine_rows
from tunesmith import Trainer

STEPS = 60


class Uncaptured(Trainer):
    """Its steps run as they are."""

    def _make_engine(self) -> Any:
        engine = super()._make_engine()
        assert engine.graphs is not None, "nothing would have been captured"
        engine.graphs.off = True
        return engine


class Plain(Trainer):
    """Padded, uncaptured, every layer as transformers wrote it."""

    use_speed_ups = False


def run(
    kind: Any,
    folder: Path,
    layers: int,
    dropout: float,
    width: int | None = None,
    resume: str | None = None,
    **options: Any,
) -> Any:
    """A finished Trainer; the same start for all."""
    transformers.set_seed(0)
    config = transformers.BertConfig(
        num_hidden_layers=layers, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, num_labels=2
    )
    given = {"max_steps": STEPS, "warmup_steps": 5, "weight_decay": 0.01, "eval_strategy": "steps", "eval_steps": 25}
    arguments = transformers.TrainingArguments(
        str(folder),
        train_sampling_strategy="sequential",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        **{"save_strategy": "no", "per_device_train_batch_size": 8, **given, **options},
    )
    trainer = kind(
        transformers.BertForSequenceClassification(config),
        arguments,
        train_dataset=ArrowRows(engine_rows("mrpc", "train", 640)),
        eval_dataset=ArrowRows(engine_rows("mrpc", "validation", 64)),
        data_collator=collator(width),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def apart(one: Any, other: Any, name: str) -> float:
    """The largest difference of a number that is logged, as a share of its largest value where that is above 1."""
    logs = [[line[name] for line in t.state.log_history if name in line] for t in (one, other)]
    assert len(logs[0]) == len(logs[1]) >= 2, (len(logs[0]), len(logs[1]))
    return max(abs(a - b) for a, b in zip(*logs, strict=True)) / max(1.0, *logs[1])


def weights_apart(one: Any, other: Any) -> float:
    """The largest difference of a weight."""
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)


def replayed(trainer: Any) -> int:
    """How many shapes were captured."""
    graphs = trainer._engine.graphs
    assert len(graphs) == 0, "captured steps outlive the run"
    return 0 if graphs.off else int(graphs._captures)


def main() -> None:
    """Prints a line a check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    layers = parser.parse_args().layers
    torch.backends.cuda.matmul.allow_tf32 = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for accumulation, peer in ((1, transformers.Trainer), (2, Plain)):
            options = {"gradient_accumulation_steps": accumulation}
            ours = run(Trainer, folder / f"a{accumulation}", layers, 0.0, **options)
            theirs = run(peer, folder / f"b{accumulation}", layers, 0.0, **options)
            print(
                f"     {accumulation} micro-batches: {replayed(ours)} captures, loss {ours.state.log_history[0]['loss']}"
            )
            check(f"float32, {accumulation} micro-batches: captured at all", float(replayed(ours) == 0), 0)
            for number, limit in (("loss", 1e-5), ("grad_norm", 1e-4), ("learning_rate", 1e-12), ("eval_loss", 1e-5)):
                check(f"float32, {accumulation} micro-batches: {number}", apart(ours, theirs, number), limit)
            check(f"float32, {accumulation} micro-batches: weights", weights_apart(ours, theirs), 1e-4)
        whole, wider = (
            run(transformers.Trainer, folder / f"c{width}", layers, 0.0, width, per_device_train_batch_size=16)
            for width in (None, 64)
        )
        print(
            f"     one batch of 16 rows by transformers: loss {apart(ours, whole, 'loss'):.2g} from our two of 8, "
            f"{apart(whole, wider, 'loss'):.2g} from itself padded to 64"
        )
        saving = {"bf16": True, "save_strategy": "steps", "save_steps": 37}
        one = run(Trainer, folder / "one", layers, 0.1, **saving)
        eager = run(Uncaptured, folder / "eager", layers, 0.1, bf16=True)
        check("bf16, dropout: captured at all", float(replayed(one) == 0), 0)
        check("bf16, dropout: uncaptured, losses", apart(one, eager, "loss"), 0)
        check("bf16, dropout: uncaptured, weights", weights_apart(one, eager), 0)
        again = run(Trainer, folder / "again", layers, 0.1, resume=str(folder / "one" / "checkpoint-37"), **saving)
        check("bf16, dropout: resumed at 37, losses", apart(one, again, "loss"), 0)
        check("bf16, dropout: resumed at 37, weights", weights_apart(one, again), 0)
    if failures:
        raise SystemExit(f"{len(failures)} checks failed: {', '.join(failures)}")
    print("all checks passed")


if __name__ == "__main__":
    main()
