"""Journals of known cause, for the tests of curves, diagnosis and report: shapes as seen in real fine-tuning runs."""

from __future__ import annotations

import math
import random
from typing import Any

from tunesmith.events import (
    EpochStarted,
    Evaluated,
    Event,
    Improved,
    NonFinite,
    RunEnded,
    RunStarted,
    StepDone,
)

CONFIG: dict[str, Any] = {
    "learning_rate": 5e-5,
    "num_train_epochs": 3.0,
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 1,
    "warmup_steps": 0,
    "max_grad_norm": 1.0,
    "weight_decay": 0.0,
    "eval_strategy": "epoch",
}


def make_run(
    train: list[float],
    validation: list[float],
    *,
    accuracy: list[float] | None = None,
    train_accuracy: list[float] | None = None,
    start: float = 0.69,
    steps_per_epoch: int = 100,
    noise: float = 0.2,
    n: int = 408,
    train_rows: int = 1600,
    seed: int = 0,
    planned_epochs: int | None = None,
    ended: str | None = "completed",
    nan_after: int | None = None,
    train_sample: bool = True,
    metric: str = "accuracy",
    rate: float = 5e-5,
) -> list[Event]:
    """Make one epoch per value: `train` and `validation` are losses at the end of each epoch; steps are noisy around `train`."""
    pick = random.Random(seed)
    epochs = len(train)
    total = steps_per_epoch * (planned_epochs or epochs)
    events: list[Event] = [
        RunStarted("run", 0, total, float(steps_per_epoch), planned_epochs or epochs, train_rows, 1.7e9)
    ]
    best, step = -math.inf, 0
    for epoch in range(epochs):
        events.append(EpochStarted(epoch, step))
        low = train[epoch - 1] if epoch else start
        for k in range(1, steps_per_epoch + 1):
            step += 1
            if nan_after is not None and step > nan_after:
                events += [
                    _step(step, step / steps_per_epoch, None, None, total, rate),
                    NonFinite(step, "loss", "loss", (3, 4)),
                ]
                return [*events, RunEnded(step, "NumericsError", 1.7e9)]
            mean = low + (train[epoch] - low) * k / steps_per_epoch
            loss = max(1e-4, mean * (1 + noise * pick.gauss(0, 1)))
            events.append(_step(step, step / steps_per_epoch, loss, 1.5 + pick.random(), total, rate))
        score = (accuracy or [0.7] * epochs)[epoch]
        done = epoch + 1.0
        if train_sample:
            seen = (train_accuracy or [min(1.0, 1 - t * 0.5) for t in train])[epoch]
            events.append(Evaluated(step, done, "train_sample", {"loss": train[epoch], metric: seen}, 256, 0.4))
        events.append(Evaluated(step, done, "validation", {"loss": validation[epoch], metric: score}, n, 0.9))
        if score > best:
            best = score
            events.append(Improved(step, metric, score))
    return [*events, RunEnded(step, ended, 1.7e9 + 754)] if ended else events


def _step(step: int, epoch: float, loss: float | None, norm: float | None, total: int, rate: float) -> StepDone:
    return StepDone(step, epoch, loss, norm, rate * (1 - step / total), 16, 850, 880, 0.05)


HOSTILE = (
    "<script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "</script><script>document.title='owned'</script>",
    "{{7*7}} {% for x in y %}",
    "'\"><svg onload=document.title='owned'>",
    "<!-- <script> --> ]]> &lt;b&gt;",
    "javascript:document.title='owned'",
    "\u202eright to left\u202c \x00\x1b[31m \ud800 end",
)
_FIRST = ("The company", "A spokesman", "The ministry", "Shares of the bank", "The court", "Officials")
_VERB = ("said on Monday", "reported", "denied", "confirmed late yesterday", "announced", "declined to say")
_REST = (
    "that profit rose 12 percent",
    "it would close the plant",
    "two people were hurt",
    "talks would go on",
    "prices fell",
)


def make_folder(path: Any, events: list[Event], *, rows: int = 408, hostile: bool = False, seed: int = 0) -> Any:
    """Write a run folder like `tunesmith train` and `predict`; `hostile` adds markup to every text and name."""
    import json
    from pathlib import Path

    import pyarrow as pa
    import pyarrow.parquet as pq

    from tunesmith.runs.event_log import Journal

    folder = Path(path)
    with Journal(folder / "journal.jsonl") as journal:
        for event in events:
            journal.append(event)
    pick = random.Random(seed)
    labels = [HOSTILE[0], HOSTILE[2]] if hostile else ["not_equivalent", "equivalent"]
    texts = [HOSTILE[4], "sentence2"] if hostile else ["sentence1", "sentence2"]
    table: dict[str, list[Any]] = {"row": list(range(rows)), "split": ["validation"] * rows, texts[0]: [], texts[1]: []}
    table |= {"label": [], "prediction": [], f"prob_{labels[0]}": [], f"prob_{labels[1]}": [], "truncated": []}
    for row in range(rows):
        first = f"{pick.choice(_FIRST)} {pick.choice(_VERB)} {pick.choice(_REST)}"
        second = (
            f"{pick.choice(_FIRST)} {pick.choice(_VERB)} {pick.choice(_REST)}, according to people who saw the papers."
        )
        truth = int(pick.random() < 0.68)
        sure = min(0.999, max(0.501, pick.gauss(0.9, 0.12)))
        said = truth if pick.random() < 0.55 + 0.38 * sure - (0.25 if truth == 0 else 0) else 1 - truth
        table[texts[0]].append(HOSTILE[row % len(HOSTILE)] if hostile else first)
        table[texts[1]].append(second)
        table["label"].append(labels[truth])
        table["prediction"].append(labels[said])
        table[f"prob_{labels[said]}"].append(sure)
        table[f"prob_{labels[1 - said]}"].append(1 - sure)
        table["truncated"].append(row % 9 == 0)
    if hostile:
        table[texts[0]] = [t.encode("utf-8", "replace").decode() for t in table[texts[0]]]
    pq.write_table(pa.table(table), folder / "predictions.parquet")
    counts = {"train": {labels[0]: 1194, labels[1]: 2474}, "validation": {labels[0]: 129, labels[1]: 279}}
    summary = {
        "columns": {"text": texts, "label": HOSTILE[1] if hostile else "label"},
        "task": "binary",
        "labels": labels,
        "rows": {"train": 3668, "validation": 408},
        "label_counts": counts,
        "truncation": {"train": {"rows": 3668, "rows_cut": 37, "tokens_cut": 411, "max_length": 96}},
    }
    (folder / "data_summary.json").write_text(json.dumps(summary))
    words = ["tunesmith", "train", "--train_file", "it's pairs.csv", "--num_train_epochs", "4"] + [
        *HOSTILE[:3]
    ] * hostile
    environment = {
        "python": "3.11.9",
        "platform": "Linux",
        "cpus": 2,
        "packages": {"torch": "2.13.0"},
        "command": words,
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    name = json.dumps(HOSTILE[2] + HOSTILE[1]) if hostile else "mrpc-bert-base"
    (folder / "run.yaml").write_text(
        f"run_name: {name}\nmodel_name_or_path: bert-base-uncased\nlearning_rate: 5e-5\nnum_train_epochs: 4\n"
        "per_device_train_batch_size: 16\ntrain_file: pairs.csv\n"
    )
    return folder


def make_gallery(root: Any) -> list[str]:
    """Write runs with every kind of name, task, verdict and end; return the names of the folders."""
    import json

    good: dict[str, Any] = {"accuracy": [0.78, 0.85, 0.86], "train_accuracy": [0.8, 0.87, 0.9], "steps_per_epoch": 30}
    kinds: dict[str, list[Event]] = {
        "healthy": make_run([0.5, 0.3, 0.25], [0.45, 0.36, 0.33], **good),
        "reviews_of_the_last_quarter.cleaned_twice.all-MiniLM-L6-v2.lr2e-5.seed42_final_final": make_run(
            [0.5, 0.2, 0.05], [0.45, 0.5, 0.8], **good
        ),
        "diverged": make_run([0.5, 0.3], [0.45, 0.4], steps_per_epoch=30, nan_after=41),
        "stopped": make_run([0.5], [0.5], steps_per_epoch=30, planned_epochs=3, ended="SIGINT"),
        "interrupted": make_run([0.6], [0.6], steps_per_epoch=30, planned_epochs=3, ended=None),
        "running": make_run([0.6], [0.6], steps_per_epoch=30, planned_epochs=3, ended=None),
        "regression": make_run([0.9, 0.5], [0.8, 0.7], accuracy=[0.5, 0.6], steps_per_epoch=30, metric="pearson"),
        "multilabel": make_run([0.3, 0.2], [0.3, 0.25], accuracy=[0.5, 0.6], steps_per_epoch=30, metric="f1_micro"),
        "intents-with-77-classes": make_run(
            [3.0, 1.0], [2.5, 1.2], accuracy=[0.4, 0.7], start=4.3, steps_per_epoch=30, metric="f1_macro"
        ),
        "damaged": make_run([0.5], [0.5], steps_per_epoch=5),
    }
    for name, events in kinds.items():
        folder = make_folder(root / name, events, rows=60)
        file = folder / "run.yaml"
        file.write_text(file.read_text().replace("mrpc-bert-base", name))
        summary = json.loads((folder / "data_summary.json").read_text())
        tasks = {"regression": "regression", "multilabel": "multilabel", "intents-with-77-classes": "multiclass"}
        summary["task"] = tasks.get(name, "binary")
        if summary["task"] != "binary":
            summary["labels"] = [
                f"label_{k}" for k in range(77 if "intents" in name else 1 if name == "regression" else 6)
            ]
            summary["label_counts"] = {}
        (folder / "data_summary.json").write_text(json.dumps(summary))
    accuracy = {"value": 0.86, "low": 0.82, "high": 0.89, "n": 408}
    (root / "healthy" / "metrics.json").write_text(json.dumps({"validation": {"accuracy": accuracy}}))
    (root / "interrupted" / ".lock").touch()
    (root / "damaged" / "journal.jsonl").write_text('{"event": "StepDone"}\n')
    return list(kinds)


TOPICS = (
    "account_closed_without_notice", "card_arrival", "cash_withdrawal_not_recognised", "exchange_rate", "lost_or_stolen_card",
    "passcode_forgotten", "pending_transfer", "refund_not_showing_up", "top_up_failed", "verify_my_identity", "visa", "other",
    "why_was_my_payment_declined", "country_support",
)  # fmt: skip


def make_split_folder(path: Any, *, kind: str, rows: int = 300, seed: int = 0) -> Any:
    """Write a run with 14 classes ("many") or a regression ("values"), with test and validation rows, metrics and warnings."""
    import json

    import pyarrow as pa
    import pyarrow.parquet as pq

    many = kind == "many"
    metric = "f1_macro" if many else "pearson"
    folder = make_folder(
        path, make_run([1.5, 0.9, 0.6], [1.4, 1.1, 1.0], accuracy=[0.4, 0.6, 0.65], metric=metric), seed=seed
    )
    pick = random.Random(seed)
    names = list(TOPICS) if many else []
    table: dict[str, list[Any]] = {k: [] for k in ("split", "row", "text", "label", "prediction", "truncated")}
    table |= {f"prob_{name}": [] for name in names}
    for split in ("validation", "test"):
        for row in range(rows):
            text = f"{pick.choice(_FIRST)} {pick.choice(_VERB)} {' '.join(pick.choices(_REST, k=pick.randint(1, 6)))}"
            truth: Any = min(int(pick.expovariate(0.3)), len(names) - 1) if many else round(pick.uniform(0, 5), 1)
            if many:
                said = truth if pick.random() < 0.7 else pick.randrange(len(names))
                sure = pick.uniform(0.3, 0.99)
                for k, name in enumerate(names):
                    table[f"prob_{name}"].append(sure if k == said else (1 - sure) / (len(names) - 1))
                shown = (names[truth], names[said])
            else:
                shown = (truth, 0.6 * truth + 1 + pick.gauss(0, 0.5))
            for column, value in zip(table, (split, row, text, *shown, row % 7 == 0), strict=False):
                table[column].append(value)
    pq.write_table(pa.table(table), folder / "predictions.parquet")
    score = {"value": 0.65, "low": 0.61, "high": 0.69, "n": rows, "method": "wilson"}
    both = {"accuracy" if many else "spearmanr": score, metric: {**score, "value": 0.6}, "matthews_correlation": score}
    both |= {"loss": {"value": 1.02, "low": None, "high": None, "n": rows, "method": "mean"}}
    baselines = {"TF-IDF + linear model": {metric: {**score, "value": 0.55, "n": 100}}}
    (folder / "metrics.json").write_text(
        json.dumps({"validation": both, "test": both, "baselines": {"validation": baselines, "test": baselines}})
    )
    advice = ["Raise --max_seq_length to 512: the model supports that many."]
    found = [
        {
            "code": "cut_rows",
            "severity": "warning",
            "evidence": "75 rows are truncated at 128 tokens.",
            "advice": advice,
        },
        {"code": "split_leak", "severity": "error", "evidence": "149 test rows are in train.", "advice": []},
    ]
    counts = {name: 300 // (k + 1) for k, name in enumerate(names)}
    summary = {
        "columns": {"text": ["text"], "label": "label"},
        "task": "multiclass" if many else "regression",
        "labels": names,
        "rows": {"train": 3668, "validation": rows, "test": rows},
        "label_counts": {"train": counts, "test": counts} if many else {},
        "truncation": {"train": {"rows": 3668, "rows_cut": 37, "tokens_cut": 411, "max_length": 96}},
        "notes": [
            f"Note number {k} about /some/long/path/of/a/file/that/was/read_without_headers.csv." for k in range(8)
        ],
        "findings": found,
        "recipe": ["learning_rate 0.0001: from the hidden size of the model (384)"],
    }
    (folder / "data_summary.json").write_text(json.dumps(summary))
    return folder
