"""Whole scripts: the course's, with one import changed; and the same run on one rank and on two."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distributed.launching import free_port
from scripts import run_script

COURSE = """
import json, sys
from pathlib import Path
import numpy as np
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, TrainingArguments
from transformers import Trainer

shared, out = Path(sys.argv[1]), sys.argv[2]
checkpoint = str(shared / "models" / "paraphrase-MiniLM-L3-v2")
files = {split: str(shared / "data" / "mrpc" / f"{split}.parquet") for split in ("train", "validation")}
raw_datasets = load_dataset("parquet", data_files=files, cache_dir=out + "/cache")
for split in raw_datasets:
    raw_datasets[split] = raw_datasets[split].shuffle(seed=1).select(range(160)).flatten_indices()
tokenizer = AutoTokenizer.from_pretrained(checkpoint)


def tokenize_function(example):
    return tokenizer(example["sentence1"], example["sentence2"], truncation=True)


tokenized_datasets = raw_datasets.map(tokenize_function, batched=True)
data_collator = DataCollatorWithPadding(tokenizer=tokenizer)


def compute_metrics(eval_preds):
    logits, labels = eval_preds
    predictions = np.argmax(logits, axis=-1)
    return {"accuracy": float((predictions == labels).mean())}


training_args = TrainingArguments(
    out, eval_strategy="epoch", num_train_epochs=1, report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="epoch",
    gradient_accumulation_steps=2, per_device_train_batch_size=8, learning_rate=1e-4,
)
model = AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=2)
trainer = Trainer(
    model,
    training_args,
    train_dataset=tokenized_datasets["train"],
    eval_dataset=tokenized_datasets["validation"],
    data_collator=data_collator,
    processing_class=tokenizer,
    compute_metrics=compute_metrics,
)
result = trainer.train()
predictions = trainer.predict(tokenized_datasets["validation"])
trainer.save_model(out + "/model")
print(json.dumps({
    "steps": result.global_step,
    "loss": result.training_loss,
    "shapes": [predictions.predictions.shape, predictions.label_ids.shape],
    "labels": predictions.label_ids.tolist(),
    "metrics": predictions.metrics,
    "history": trainer.state.log_history,
    "files": sorted(p.name for p in Path(out, "model").iterdir()),
}))
"""


def result_of(text: str, folder: Path, *words: str, launcher: tuple[str, ...] = ()) -> dict[str, Any]:
    """The JSON line that a script prints; with a launcher it runs in new processes."""
    folder.mkdir()
    file = folder / "script.py"
    file.write_text(text)
    if launcher:
        command = [sys.executable, *launcher, str(file), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        out = done.stdout
    else:
        out = run_script(file, *words)
    result: dict[str, Any] = json.loads(next(x for x in reversed(out.splitlines()) if x.startswith('{"')))
    return result


@pytest.mark.slow
def test_the_course_script_works_with_one_import_changed(tmp_path: Path, shared: Path) -> None:
    changed = COURSE.replace("from transformers import Trainer\n", "from tunesmith import Trainer\n")
    assert changed != COURSE
    theirs = result_of(COURSE, tmp_path / "theirs", str(shared), str(tmp_path / "theirs" / "out"))
    ours = result_of(changed, tmp_path / "ours", str(shared), str(tmp_path / "ours" / "out"))
    assert ours["shapes"] == theirs["shapes"] == [[160, 2], [160]]
    assert ours["labels"] == theirs["labels"]
    assert ours["steps"] == theirs["steps"] == 10
    assert ours["metrics"].keys() == theirs["metrics"].keys()
    assert [list(e) for e in ours["history"]] == [list(e) for e in theirs["history"]]
    assert abs(ours["metrics"]["test_accuracy"] - theirs["metrics"]["test_accuracy"]) < 0.08
    expected = {f for f in theirs["files"] if f != "training_args.bin"}
    assert set(ours["files"]) == expected | {"training_args.json"}


RANKS = """
import json, sys
import numpy as np
import torch
sys.path.insert(0, sys.argv[2])
from conftest import tiny_bert
from trainer_toys import Accuracy, Regression, RegressionDataset, arguments
from tunesmith import Trainer

world = int(sys.argv[3])
torch.manual_seed(0)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(1, 8), torch.nn.Linear(8, 1)

    def forward(self, input_x, labels=None):
        y = self.outer(torch.tanh(self.inner(input_x[:, None])))[:, 0]
        return (y,) if labels is None else (torch.nn.functional.mse_loss(y, labels), y)


trainer = Trainer(
    Net(),
    arguments(
        sys.argv[1], per_device_train_batch_size=8 // world, gradient_accumulation_steps=2, logging_steps=1, num_train_epochs=2,
        eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True, learning_rate=0.02,
    ),
    train_dataset=RegressionDataset(length=32),
    eval_dataset=RegressionDataset(length=16, seed=1),
    compute_metrics=Accuracy(),
)
trainer.train()
output = trainer.predict(RegressionDataset(length=19, seed=2))
if trainer.is_world_process_zero():
    print(json.dumps({
        "losses": [e["loss"] for e in trainer.state.log_history if "loss" in e],
        "evaluations": [e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e],
        "predictions": output.predictions.tolist(),
        "labels": output.label_ids.tolist(),
        "best": trainer.state.best_global_step,
    }))
"""


@pytest.mark.slow
def test_two_ranks_of_four_equal_one_rank_of_eight(tmp_path: Path) -> None:
    tests = str(Path(__file__).parents[1])
    one = result_of(RANKS, tmp_path / "one", str(tmp_path / "one" / "out"), tests, "1")
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port()))
    two = result_of(RANKS, tmp_path / "two", str(tmp_path / "two" / "out"), tests, "2", launcher=launcher)
    assert np.allclose(one["losses"], two["losses"], atol=1e-6)
    assert len(one["losses"]) == 4
    assert np.allclose(one["evaluations"], two["evaluations"], atol=1e-6)
    assert np.allclose(one["predictions"], two["predictions"], atol=1e-5)
    assert one["labels"] == two["labels"]
    assert one["best"] == two["best"]
    assert sorted(p.name for p in (tmp_path / "one" / "out").iterdir()) == sorted(
        p.name for p in (tmp_path / "two" / "out").iterdir()
    )
