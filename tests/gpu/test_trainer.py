"""The Trainer's captured steps: transformers.Trainer's losses in float32; in bf16 with dropout the same bits again."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import transformers
from gpu_engine import engine_rows

from token_files import arrow_rows, collator
from tunesmith import Trainer

LAYERS = 2
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
    dropout: float,
    width: int | None = None,
    resume: str | None = None,
    **options: Any,
) -> Any:
    """A finished Trainer; the same start for all."""
    transformers.set_seed(0)
    config = transformers.BertConfig(
        num_hidden_layers=LAYERS, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, num_labels=2
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
        train_dataset=arrow_rows(engine_rows("mrpc", "train", 640)),
        eval_dataset=arrow_rows(engine_rows("mrpc", "validation", 64)),
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


@pytest.mark.parametrize(("accumulation", "peer"), [(1, transformers.Trainer), (2, Plain)])
def test_float32_steps_are_those_of_the_peer(tmp_path: Path, accumulation: int, peer: Any) -> None:
    ours, theirs = (
        run(kind, tmp_path / kind.__module__, 0.0, gradient_accumulation_steps=accumulation) for kind in (Trainer, peer)
    )
    assert replayed(ours) > 0
    for number, limit in (("loss", 1e-5), ("grad_norm", 1e-4), ("learning_rate", 1e-12), ("eval_loss", 1e-5)):
        assert apart(ours, theirs, number) < limit, number
    assert weights_apart(ours, theirs) < 1e-4


def test_bf16_steps_with_dropout_have_the_same_bits_uncaptured_and_resumed(tmp_path: Path) -> None:
    saving = {"bf16": True, "save_strategy": "steps", "save_steps": 37}
    one = run(Trainer, tmp_path / "one", 0.1, **saving)
    assert replayed(one) > 0
    eager = run(Uncaptured, tmp_path / "eager", 0.1, bf16=True)
    again = run(Trainer, tmp_path / "again", 0.1, resume=str(tmp_path / "one" / "checkpoint-37"), **saving)
    for other in (eager, again):
        assert apart(one, other, "loss") == 0
        assert weights_apart(one, other) == 0


def test_a_model_made_by_model_init_is_fused_and_captured_on_the_device(tmp_path: Path) -> None:
    """Speed-ups are chosen when it is there already: its copies in half precision lie beside the weights."""

    class Initialised(Trainer):
        def __init__(self, model: Any, *given: Any, **options: Any) -> None:
            super().__init__(None, *given, model_init=lambda: copy.deepcopy(model), **options)

        def _make_engine(self) -> Any:
            engine = super()._make_engine()
            chosen = self._speed_ups
            assert chosen is not None
            assert chosen.fused is not None
            assert {t.device.type for t in chosen.fused.copies.values()} == {"cuda"}
            assert engine.graphs is not None
            return engine

    given, made = (run(kind, tmp_path / kind.__name__, 0.0, bf16=True) for kind in (Trainer, Initialised))
    losses = [[line["loss"] for line in t.state.log_history if "loss" in line] for t in (given, made)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert len(losses[0]) == STEPS
