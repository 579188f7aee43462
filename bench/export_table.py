"""Compare exports with the original: largest difference in probability, equal labels, score, size, and speed.

    python bench/export_table.py                                    # nine architectures, 1,000 examples, onnx
    python bench/export_table.py --runs RUN RUN --formats onnx onnx-int8 [--json FILE]

The nine models have random weights, two layers of 64, and the same WordPiece tokenizer. `--runs` measures trained runs on their
test examples. `Predictor` and each export take turns (best of 3, wall-clock and CPU time); OMP_NUM_THREADS sets the number of
threads of both.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
FAMILIES = ("bert", "roberta", "xlm-roberta", "distilbert", "electra", "mpnet", "deberta-v2", "modernbert", "albert")


SPEED_ROWS = 256
HEAD = (
    "model", "format", "kept", "rows", "max abs dp", "labels equal", "score", "original score", "MB", "original MB",
    "rows/s", "ours rows/s", "x ours", "CPU ms", "ours CPU ms", "x ours in CPU time",
)  # fmt: skip


def main() -> int:
    """Print a table; return 1 if an export was refused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", nargs="+", default=["onnx"])
    parser.add_argument("--families", nargs="+", default=list(FAMILIES))
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--runs", nargs="+", type=Path, default=[])
    parser.add_argument("--json", type=Path, help="write the table as JSON")
    args = parser.parse_args()
    print("| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD), flush=True)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.runs or args.families:
            source, rows = rows_of(name) if args.runs else make_family(Path(folder) / name, name, args.rows)
            trace_once(Path(folder) / f"{source.name}.onnx")
            for to in args.formats:
                found.append(export_row(source, rows, to, Path(folder) / f"{source.name}-{to}"))
                print("| " + " | ".join(str(found[-1].get(key, "")) for key in HEAD) + " |", flush=True)
                if args.json:
                    args.json.write_text(json.dumps({"threads": threads(), "rows": found}, indent=1) + "\n")
    return int(any("refused" in row for row in found))


def rows_of(run: Path) -> tuple[Path, Any]:
    """Return a run with its test examples."""
    from tunesmith.inference.export import rows_of_run
    from tunesmith.inference.model_folder import model_folder_of, read_facts
    from tunesmith.runs.folder import RunDir

    return run, rows_of_run(RunDir(run), read_facts(model_folder_of(run).folder))


def trace_once(graph: Path) -> None:
    """Trace the model once for all formats; a trace takes half a minute."""
    from tunesmith.inference import export
    from tunesmith.inference.export import write_onnx

    def write(model: Any, names: list[str], path: Path) -> None:
        if not graph.exists():
            write_onnx(model, names, graph)
        shutil.copyfile(graph, path)

    export.write_onnx = write


def export_row(source: Path, rows: Any, to: str, output: Path) -> dict[str, Any]:
    """Export a run and return its table row; `refused` contains the reason if the export was not written."""
    from tunesmith.errors import TunesmithError
    from tunesmith.inference.export import export_model_to
    from tunesmith.inference.predictor import Predictor

    start = time.perf_counter()
    try:
        done = export_model_to(source, to, output, rows)
    except TunesmithError as error:
        return {"model": source.name, "format": to, "kept": "refused", "refused": str(error)}
    one = done.checked
    os.environ["OMP_NUM_THREADS"] = str(threads())  # as many for onnxruntime as for torch
    networks = {"ours": Predictor.load(source, use_cpu=True).network, to: Predictor.load(output).network}
    speed = rows_per_second(networks, rows.texts)
    taken = rows_per_second(networks, rows.texts, clock=time.process_time)
    shutil.rmtree(output)
    values = (
        source.name, to, one.name, one.rows, f"{one.max_difference:.1e}", f"{one.agreement:.2%}", one.score.text(),
        one.original.text(), round(done.size / 1e6, 1), round(done.original_size / 1e6, 1), round(speed[to]),
        round(speed["ours"]), round(speed[to] / speed["ours"], 2),
        round(1000 / taken[to], 2), round(1000 / taken["ours"], 2), round(taken[to] / taken["ours"], 2),
    )  # fmt: skip
    tried = [{"name": each.name, "agreement": each.agreement, "refused": each.refused} for each in done.tried]
    return dict(zip(HEAD, values, strict=True)) | {"tried": tried, "seconds": round(time.perf_counter() - start)}


def rows_per_second(
    networks: dict[str, Any], texts: list[list[str]], *, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Return examples per second from text to logits: the best of three turns, which alternate to share other load."""
    from tunesmith.inference.export import logits_of

    some = [column[:SPEED_ROWS] for column in texts]
    best = dict.fromkeys(networks, float("inf"))
    for network in networks.values():
        logits_of(network, [column[:8] for column in some])
    for _ in range(3):
        for name, network in networks.items():
            start = clock()
            logits_of(network, some)
            best[name] = min(best[name], clock() - start)
    return {name: len(some[0]) / seconds for name, seconds in best.items()}


def threads() -> int:
    """Return the number of threads of both runtimes."""
    import torch

    return torch.get_num_threads()


def make_family(folder: Path, name: str, count: int) -> tuple[Path, Any]:
    """Return a random three-class model and examples labeled with its own predictions."""
    from transformers import AutoConfig, AutoModelForSequenceClassification, BertTokenizerFast, set_seed

    from tiny_model import WORDS, sentences
    from tunesmith.inference.export import EvidenceRows
    from tunesmith.inference.model_folder import ModelFacts
    from tunesmith.inference.predictor import Predictor
    from tunesmith.labels import LabelMap

    labels = LabelMap.for_classes(["a", "b", "c"])
    if not folder.exists():
        folder.mkdir(parents=True)
        (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n", encoding="utf-8")
        types = name in ("bert", "electra", "albert")
        names = ["input_ids", "attention_mask", *(["token_type_ids"] if types else [])]
        tokenizer = BertTokenizerFast(vocab=str(folder / "vocab.txt"), model_max_length=64, model_input_names=names)
        sizes: dict[str, Any] = {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 128,
        }
        if name == "distilbert":
            sizes = {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128}
        elif name == "deberta-v2":
            sizes |= {"relative_attention": True, "position_buckets": 16, "pos_att_type": ["p2c", "c2p"]}
            sizes |= {
                "norm_rel_ebd": "layer_norm",
                "share_att_key": True,
                "position_biased_input": False,
                "type_vocab_size": 0,
            }
        elif name == "modernbert":
            sizes |= {
                "num_hidden_layers": 4,
                "local_attention": 8,
                "bos_token_id": 2,
                "eos_token_id": 3,
                "cls_token_id": 2,
            }
            sizes |= {"sep_token_id": 3}
        elif name in ("electra", "albert"):
            sizes |= {"embedding_size": 32}
        config = AutoConfig.for_model(
            name, vocab_size=len(WORDS), max_position_embeddings=66, pad_token_id=0, id2label=labels.id2label,
            label2id=labels.label2id, **sizes,
        )  # fmt: skip
        set_seed(0)
        model = AutoModelForSequenceClassification.from_config(config)
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.data.normal_(std=0.2)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        ModelFacts(labels, ("text",), "label", 64).write(folder)
    texts = [text for text, _ in sentences(count + 128, 11)]
    answers = Predictor.load(folder, use_cpu=True).probabilities(texts[:count]).argmax(axis=1)
    return folder, EvidenceRows("generated", [texts[:count]], np.asarray(answers))


if __name__ == "__main__":
    raise SystemExit(main())
