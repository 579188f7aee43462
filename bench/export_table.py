"""Nine families exported to each format, on 1,000 rows: largest difference of a probability, equal labels, size, speed.

python bench/export_table.py [--formats onnx openvino] [--families bert roberta ...] [--rows 1000]
The models are random and small (two layers of 64), with one WordPiece tokenizer: an export either computes what the model
computes or it does not. `--run RUN` measures a trained run instead, with its own rows, in every format.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
FAMILIES = ("bert", "roberta", "xlm-roberta", "distilbert", "electra", "mpnet", "deberta-v2", "modernbert", "albert")


def main() -> int:
    """Prints one table; 1 when a row was refused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", nargs="+", default=["onnx"])
    parser.add_argument("--families", nargs="+", default=list(FAMILIES))
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--run")
    args = parser.parse_args()
    print(
        "| model | format | rows | max abs dp | labels equal | MB | ours rows/s | export rows/s | seconds | verdict |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    refused = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in ["run"] if args.run else args.families:
            for to in args.formats:
                refused += not show(name, to, Path(folder), args)
    return int(refused > 0)


def show(name: str, to: str, folder: Path, args: argparse.Namespace) -> bool:
    """One row of the table."""
    from tunesmith.errors import TunesmithError
    from tunesmith.export.evidence_rows import rows_of_run
    from tunesmith.export.exporting import export_model_to
    from tunesmith.predict.facts import model_folder_of, read_facts
    from tunesmith.run.layout import RunDir

    start = time.perf_counter()
    try:
        if args.run:
            home = model_folder_of(args.run).folder
            source, rows = args.run, rows_of_run(RunDir(Path(args.run)), read_facts(home, {}))
        else:
            source, rows = make_family(folder / name, name, args.rows)
        done = export_model_to(source, to, folder / f"{name}-{to}", rows)
    except TunesmithError as error:
        print(f"| {name} | {to} | | | | | | | {time.perf_counter() - start:.0f} | {str(error)[:300]} |", flush=True)
        return False
    one, speed = done.checked, done.speed
    print(
        f"| {name} | {to} | {one.rows} | {one.max_difference:.1e} | {one.agreement:.2%} | {done.bytes / 1e6:.1f} | "
        f"{speed['tunesmith']:,.0f} | {speed[to]:,.0f} | {time.perf_counter() - start:.0f} | {one.name} accepted |",
        flush=True,
    )
    return True


def make_family(folder: Path, name: str, count: int) -> tuple[Path, Any]:
    """A random classifier of three labels and rows labelled by itself."""
    from transformers import AutoConfig, AutoModelForSequenceClassification, BertTokenizerFast, set_seed

    from tiny_model import WORDS, sentences
    from tunesmith.export.evidence_rows import EvidenceRows
    from tunesmith.labels import LabelMap
    from tunesmith.predict.facts import ModelFacts
    from tunesmith.predict.predictor import Predictor

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
    return folder, EvidenceRows("generated", [texts[:count]], np.asarray(answers), [texts[count:]])


if __name__ == "__main__":
    raise SystemExit(main())
