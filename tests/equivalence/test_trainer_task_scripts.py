"""A multi-label and a regression script written for transformers.Trainer: with one import changed, the same numbers."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts import run_script
from tiny_model import BAD, GOOD, save_tiny_bert, sentences

MULTI_LABEL = """
import json
import sys

import numpy as np
from datasets import load_dataset
from sklearn.metrics import accuracy_score, f1_score, roc_auc_score
from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainingArguments
from transformers import Trainer

data, model, out = sys.argv[1:]
names = ["good", "bad", "long"]
raw = load_dataset("csv", data_files={n: f"{data}/multi-{n}.csv" for n in ("train", "validation")}, cache_dir=f"{out}/../cache")
tokenizer = AutoTokenizer.from_pretrained(model)


def preprocess(part):
    rows = tokenizer(part["text"], truncation=True, max_length=32)
    rows["labels"] = [[float(part[n][i]) for n in names] for i in range(len(part["text"]))]
    return rows


rows = raw.map(preprocess, batched=True, remove_columns=raw["train"].column_names)
rows.set_format("torch")


def compute_metrics(p):
    logits = p.predictions[0] if isinstance(p.predictions, tuple) else p.predictions
    chances = 1 / (1 + np.exp(-logits))
    chosen = (chances >= 0.5).astype(int)
    return {
        "f1": f1_score(p.label_ids, chosen, average="micro"),
        "roc_auc": roc_auc_score(p.label_ids, chances, average="micro"),
        "accuracy": accuracy_score(p.label_ids, chosen),
    }


args = TrainingArguments(
    out, eval_strategy="epoch", save_strategy="epoch", learning_rate=4e-3, per_device_train_batch_size=8,
    per_device_eval_batch_size=8, num_train_epochs=3, weight_decay=0.01, load_best_model_at_end=True,
    metric_for_best_model="f1", logging_steps=4, report_to="none", use_cpu=True, train_sampling_strategy="sequential",
)
trainer = Trainer(
    AutoModelForSequenceClassification.from_pretrained(
        model, problem_type="multi_label_classification", num_labels=3, id2label=dict(enumerate(names)),
        label2id={n: i for i, n in enumerate(names)},
    ),
    args, train_dataset=rows["train"], eval_dataset=rows["validation"], processing_class=tokenizer,
    compute_metrics=compute_metrics,
)
trainer.train()
found = trainer.predict(rows["validation"])
print("FOUND " + json.dumps({
    "history": trainer.state.log_history, "best": [trainer.state.best_global_step, trainer.state.best_metric],
    "evaluated": trainer.evaluate(), "predictions": found.predictions.tolist(), "labels": found.label_ids.tolist(),
    "dtype": str(found.label_ids.dtype), "metrics": found.metrics, "problem": trainer.model.config.problem_type,
}))
"""

REGRESSION = """
import json
import sys

import numpy as np
from datasets import load_dataset
from scipy.stats import pearsonr, spearmanr
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, TrainingArguments
from transformers import Trainer

data, model, out = sys.argv[1:]
raw = load_dataset("csv", data_files={n: f"{data}/pairs-{n}.csv" for n in ("train", "validation")}, cache_dir=f"{out}/../cache")
tokenizer = AutoTokenizer.from_pretrained(model)
rows = raw.map(lambda part: tokenizer(part["sentence1"], part["sentence2"], truncation=True), batched=True)
rows = rows.rename_column("score", "label")


def compute_metrics(p):
    predictions = np.squeeze(p.predictions)
    return {
        "pearson": float(pearsonr(predictions, p.label_ids)[0]),
        "spearmanr": float(spearmanr(predictions, p.label_ids)[0]),
        "mse": float(((predictions - p.label_ids) ** 2).mean()),
    }


args = TrainingArguments(
    out, eval_strategy="steps", eval_steps=5, save_steps=5, learning_rate=2e-3, per_device_train_batch_size=8,
    num_train_epochs=3, load_best_model_at_end=True, metric_for_best_model="mse", greater_is_better=False,
    logging_steps=5, report_to="none", use_cpu=True, train_sampling_strategy="sequential", lr_scheduler_type="cosine",
)
trainer = Trainer(
    AutoModelForSequenceClassification.from_pretrained(model, num_labels=1),
    args, train_dataset=rows["train"], eval_dataset=rows["validation"], processing_class=tokenizer,
    data_collator=DataCollatorWithPadding(tokenizer), compute_metrics=compute_metrics,
)
trainer.train()
found = trainer.predict(rows["validation"])
print("FOUND " + json.dumps({
    "history": trainer.state.log_history, "best": [trainer.state.best_global_step, trainer.state.best_metric],
    "evaluated": trainer.evaluate(), "predictions": found.predictions.tolist(), "labels": found.label_ids.tolist(),
    "dtype": str(found.label_ids.dtype), "metrics": found.metrics, "problem": trainer.model.config.problem_type,
}))
"""


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentences with three labels that may all be true, pairs with a score of 0 to 5, and a model for each."""
    folder = tmp_path_factory.mktemp("tasks")
    calm = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    save_tiny_bert(folder / "multi", labels=("good", "bad", "long"), **calm)
    save_tiny_bert(folder / "pairs", labels=("score",), **calm)
    for name, count, seed in (("train", 52, 0), ("validation", 21, 1)):
        texts = [text for text, _ in sentences(2 * count, seed)]
        rows: list[dict[str, Any]] = []
        for first, second in zip(texts[::2], texts[1::2], strict=True):
            words = f"{first} {second}".split()
            found = [any(w in words for w in GOOD), any(w in words for w in BAD), len(words) > 14]
            rows.append({"text": " ".join(words), **dict(zip(("good", "bad", "long"), map(int, found), strict=True))})
        write(folder / f"multi-{name}.csv", rows)
        # a correlation of predictions that hardly differ is all rounding: good and bad words are easy to learn
        rng = np.random.default_rng(seed)
        rated = sentences(2 * count, seed + 5)
        pairs = [(rated[i], rated[j]) for i, j in rng.permutation(2 * count).reshape(-1, 2)]
        write(
            folder / f"pairs-{name}.csv",
            [{"sentence1": a, "sentence2": b, "score": 2.25 * x + 2.25 * y + 0.25} for (a, x), (b, y) in pairs],
        )
    return folder


def run(place: Path, script: str, task: str, kind: str) -> dict[str, Any]:
    file = place / f"{task}-{kind}.py"
    file.write_text(script)
    out = run_script(file, str(place), str(place / task), str(place / f"{task}-{kind}"))
    line = next(x for x in out.splitlines() if x.startswith("FOUND "))
    found: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
    return found


def differ(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Fails where one of the numbers, or the name of one, is another; times and the work counted are left out."""
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        if not any(word in name for word in ("runtime", "per_second", "total_flos")):
            # ranks and correlations ask which of two nearly equal scores is larger, which is a matter of rounding at first
            ranks = any(word in name for word in ("pearson", "spearman", "roc_auc"))
            assert ours[name] == pytest.approx(value, abs=5e-3 if ranks else 1e-5, rel=1e-4), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "script", "problem", "dtype"),
    [
        ("multi", MULTI_LABEL, "multi_label_classification", "float32"),
        ("pairs", REGRESSION, "regression", "float32"),
    ],
    ids=["multi-label", "regression"],
)
def test_the_script_gives_the_same_losses_and_metrics(
    place: Path, task: str, script: str, problem: str, dtype: str
) -> None:
    changed = script.replace("from transformers import Trainer\n", "from tunesmith import Trainer\n")
    assert changed != script
    theirs, ours = run(place, script, task, "theirs"), run(place, changed, task, "ours")
    assert ours["problem"] == theirs["problem"] == problem
    assert ours["dtype"] == theirs["dtype"] == dtype
    assert ours["labels"] == theirs["labels"]
    assert ours["best"][0] == theirs["best"][0]
    assert len(ours["history"]) == len(theirs["history"])
    for mine, their in zip(ours["history"], theirs["history"], strict=True):
        differ(their, mine)
    for part in ("evaluated", "metrics"):
        differ(theirs[part], ours[part])
    np.testing.assert_allclose(ours["predictions"], theirs["predictions"], atol=2e-4)
    losses = [entry["loss"] for entry in ours["history"] if "loss" in entry]
    assert losses[-1] < 0.8 * losses[0], "the run must have learned something for the comparison to mean anything"
