"""Uploads with the real client: models pushed by a Trainer can be loaded from the Hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from patience import patient

SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch
from conftest import tiny_bert, token_lists
from datasets import Dataset
from transformers import AutoModelForSequenceClassification
from tunesmith import Trainer, TrainingArguments

data = token_lists(16)
rows = Dataset.from_dict({**data, "attention_mask": [[1] * len(r) for r in data["input_ids"]]})
pad = lambda batch: {
    "input_ids": torch.nn.utils.rnn.pad_sequence([torch.tensor(r["input_ids"]) for r in batch], True),
    "attention_mask": torch.nn.utils.rnn.pad_sequence([torch.tensor(r["attention_mask"]) for r in batch], True),
    "labels": torch.tensor([r["labels"] for r in batch]),
}
options = json.loads(sys.argv[3])
trainer = Trainer(
    tiny_bert(),
    TrainingArguments(sys.argv[2], use_cpu=True, report_to="none", max_steps=4, save_steps=2, disable_tqdm=True, **options),
    train_dataset=rows,
    data_collator=pad,
)
trainer.train()
commit = trainer.push_to_hub(finetuned_from="some/model", tasks="text-classification", language="en", tags=["toy"])
back = AutoModelForSequenceClassification.from_pretrained(trainer.hub_model_id)
same = all(torch.equal(a, b) for a, b in zip(back.state_dict().values(), trainer.model.state_dict().values(), strict=True))
print(json.dumps({"same": same, "id": trainer.hub_model_id, "url": commit.commit_url, "message": commit.commit_message}))
"""


def push(hub: Any, folder: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))}
    clean |= {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "OMP_NUM_THREADS": "1",
    }
    words = [str(Path(__file__).parents[1]), str(folder / "line"), json.dumps(options)]
    command = [sys.executable, "-c", SCRIPT, *words]
    return subprocess.run(command, env=clean, capture_output=True, text=True, check=False, timeout=patient(300))


@pytest.mark.slow
def test_push_to_hub_uploads_loadable_model(hub: Any, tmp_path: Path) -> None:
    done = push(hub, tmp_path, push_to_hub=True, hub_token="hf_secret", hub_strategy="checkpoint")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    repo = hub.repos[("models", "me/line")]
    assert found == {
        "same": True,
        "id": "me/line",
        "url": f"{hub.url}/me/line/commit/{repo.sha}",
        "message": "End of training",
    }
    files = set(repo.files)
    assert {"README.md", "config.json", "model.safetensors", "training_args.json"} <= files
    assert {"last-checkpoint/model.safetensors", "last-checkpoint/trainer_state.json"} <= files
    assert not [f for f in files if f.startswith(("checkpoint-", ".lock", ".tmp-"))]
    assert repo.commits[-1] == "End of training"
    assert "Training in progress, step 2" in repo.commits
    card = repo.files["README.md"].decode()
    assert "- toy" in card
    assert "language:\n- en" in card
    assert "base_model: some/model" in card
    assert not [f for f, data in repo.files.items() if b"hf_secret" in data]


@pytest.mark.slow
def test_push_without_token_fails(hub: Any, tmp_path: Path) -> None:
    done = push(hub, tmp_path, hub_model_id="some/model")
    assert done.returncode != 0
    assert "401" in done.stderr
    assert hub.repos[("models", "some/model")].commits == []


def test_push_command_uploads_model_folder_and_card(hub: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    use = 'pipeline("text-classification", "model")'
    config = {"model_type": "bert", "id2label": {"0": "no", "1": "yes"}}
    for name, data in {"config.json": json.dumps(config), "README.md": f"# Scores\n\naccuracy 0.9\n{use}"}.items():
        (folder / name).write_text(data)
    (folder / "model.safetensors").write_bytes(hub.repos[("models", "some/model")].files["model.safetensors"])
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))}
    clean |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}

    def push_folder(repo: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tunesmith", "push", str(folder), repo]
        return subprocess.run(
            command, env=clean | environment, capture_output=True, text=True, check=False, timeout=patient(120)
        )

    done = push_folder("me/pushed", HF_TOKEN="hf_secret")
    assert done.returncode == 0, done.stderr
    repo = hub.repos[("models", "me/pushed")]
    assert done.stdout.strip() == f"{hub.url}/me/pushed/commit/{repo.sha}"
    assert {"README.md", "config.json", "model.safetensors"} <= set(repo.files)
    card = repo.files["README.md"].decode()
    assert "accuracy 0.9" in card
    assert 'pipeline("text-classification", "me/pushed")' in card
    assert 'snapshot_download("me/pushed")' in card
    refused = push_folder("me/other")
    assert (refused.returncode, "hf auth login" in refused.stderr) == (4, True)
    assert push_folder("no-name", HF_TOKEN="hf_secret").returncode == 2
