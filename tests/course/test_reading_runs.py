"""Rows 2, 20, 22 and 23 of the course: datasets from the Hub, reading curves, trackers, more encoders."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from patience import patient
from synthetic_runs import CONFIG, make_run
from tunesmith import Trainer, TrainingArguments, curves_from_events, diagnose_curves

pytestmark = pytest.mark.slow


HUB = """
import importlib.util, json, os, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("hub_server", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules["hub_server"] = module
spec.loader.exec_module(module)
data = Path(sys.argv[2])
hub = module.Hub()
card = "---\\nconfigs:\\n- config_name: mrpc\\n  data_files:\\n" + "".join(
    f"  - split: {s}\\n    path: mrpc/{s}-*\\n" for s in ("train", "validation", "test")) + "---\\n"
files = {f"mrpc/{s}-00000-of-00001.parquet": (data / f"{s}.parquet").read_bytes() for s in ("train", "validation", "test")}
hub.add("datasets", "nyu-mll/glue", {"README.md": card.encode(), **files})
hub.renamed[("datasets", "glue")] = "nyu-mll/glue"
with module.serve(hub):
    os.environ["HF_ENDPOINT"] = hub.url
    from tunesmith import load_dataset
    first = load_dataset("glue", "mrpc")
    seen = len(hub.downloads())
print("FIRST", json.dumps({k: len(v) for k, v in first.items()}), first["train"].features["label"].names, seen)
"""
AGAIN = 'from tunesmith import load_dataset; print("AGAIN", load_dataset("glue", "mrpc")["validation"].num_rows)'


def test_row_2_glue_mrpc_loads_by_name_and_offline(shared: Path, tmp_path: Path) -> None:
    """tunesmith resolves the old name, which `datasets` 5.2 with huggingface_hub 1.x no longer accepts."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    clean |= {"HF_HOME": str(tmp_path / "hf"), "PYTHONWARNINGS": "ignore"}
    server = Path(__file__).parents[1] / "hub" / "server.py"
    words = [sys.executable, "-c", HUB, str(server), str(shared / "data" / "mrpc")]
    first = subprocess.run(words, env=clean, capture_output=True, text=True, timeout=patient(180), check=False)
    assert first.returncode == 0, first.stderr[-2000:]
    assert '{"train": 3668, "validation": 408, "test": 1725}' in first.stdout
    assert "['not_equivalent', 'equivalent']" in first.stdout
    env = clean | {"HF_HUB_OFFLINE": "1"}
    again = subprocess.run(
        [sys.executable, "-c", AGAIN], env=env, capture_output=True, text=True, timeout=patient(120), check=False
    )
    assert "AGAIN 408" in again.stdout, again.stderr[-2000:]


SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "healthy": (
        {"train": [0.48, 0.32, 0.22], "validation": [0.44, 0.38, 0.39], "accuracy": [0.79, 0.84, 0.85]},
        {},
    ),
    "overfitting": (
        {"train": [0.30, 0.10, 0.02], "validation": [0.42, 0.55, 0.80], "accuracy": [0.82, 0.83, 0.81]},
        {},
    ),
    "underfitting": (
        {"train": [0.632, 0.63, 0.629], "validation": [0.632, 0.631, 0.63], "accuracy": [0.68, 0.68, 0.68]},
        {"learning_rate": 5e-7},
    ),
    "erratic": (
        {
            "train": [0.55, 0.5, 0.45, 0.4, 0.38, 0.36],
            "validation": [0.5, 0.75, 0.46, 0.8, 0.45, 0.78],
            "accuracy": [0.76, 0.6, 0.8, 0.58, 0.8, 0.6],
        },
        {"learning_rate": 5e-4},
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_row_20_diagnosis_distinguishes_curve_shapes(shape: str) -> None:
    run, config = SHAPES[shape]
    curves = curves_from_events(make_run(**run))
    verdict = diagnose_curves(curves, CONFIG | config, label_counts={"equivalent": 2474, "not_equivalent": 1194})[0]
    assert verdict.code == shape, verdict.evidence
    assert any(character.isdigit() for character in verdict.evidence)
    assert verdict.advice


def test_row_22_tracker_works_offline(checkpoint: str, tokenizer: Any, tokenized_datasets: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding

    args = TrainingArguments(
        str(tmp_path / "out"), max_steps=2, logging_steps=1, report_to="tensorboard", use_cpu=True, disable_tqdm=True,
        save_strategy="no",
    )  # fmt: skip
    Trainer(
        AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=2),
        args,
        train_dataset=tokenized_datasets["train"].select(range(16)),
        data_collator=DataCollatorWithPadding(tokenizer),
    ).train()
    assert list((tmp_path / "out").rglob("events.out.tfevents*"))


@pytest.mark.parametrize("family", ["bert", "distilbert", "roberta", "electra"])
def test_row_23_each_encoder_with_classification_head_trains(family: str, tmp_path: Path) -> None:
    from datasets import Dataset
    from transformers import AutoConfig, AutoModelForSequenceClassification

    sizes = {
        "vocab_size": 160,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    if family == "distilbert":
        sizes = {"vocab_size": 160, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}
    extra = {"embedding_size": 32} if family == "electra" else {"pad_token_id": 1} if family == "roberta" else {}
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(family, **sizes, **extra, num_labels=2))
    rows = Dataset.from_dict({"input_ids": [[5, 6, 7, 8]] * 16, "attention_mask": [[1] * 4] * 16, "label": [0, 1] * 8})
    args = TrainingArguments(
        str(tmp_path), max_steps=2, report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no"
    )
    assert Trainer(model, args, train_dataset=rows).train().global_step == 2
