"""Compare SetFit with `tunesmith train` on a few examples per class: same encoder, examples, test set and process.

    .venv/bin/python bench/recipes.py --per_class --sizes 8 16 64 --tasks cr r8 newsline sick --recipes auto setfit

The recipe `setfit` is SetFit's documented procedure in plain PyTorch, because its library doesn't accept token ids: learning
rate 2e-5, warmup 0.1, weight decay 0.01, 16 pairs per step, one epoch over all pairs with the rarer kind repeated, cosine
similarity against 1 or 0, mean pooling, then logistic regression on the embeddings. Six classes with 64 examples each make 7,680
steps; `setfit` trains as many as fit into the time of `auto` in the same process, and at least FEWEST_STEPS. `setfit_library` is
the SetFit library (1.2) with its defaults and that number of steps, on texts decoded from the token ids. It needs `setfit` and
sentence-transformers.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

FEWEST_STEPS, TIMED_STEPS = 300, 20
PAIRS, RATE, WARMUP, DECAY = 16, 2e-5, 0.1, 0.01


def pick_rows(labels: npt.NDArray[Any], each: int, seed: int) -> npt.NDArray[np.int64]:
    """Return `each` examples of every class (all if a class has fewer), in seeded order."""
    rng = np.random.default_rng(seed)
    found = [rng.permutation(np.flatnonzero(labels == label))[:each] for label in np.unique(labels)]
    return rng.permutation(np.concatenate(found))


def all_pairs(labels: npt.NDArray[Any], seed: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return all pairs of examples (also each with itself) in random order, the rarer kind repeated, and whether labels match."""
    rng, rows = np.random.default_rng(seed), np.arange(len(labels))
    pairs = np.concatenate([np.stack(np.triu_indices(len(labels), 1), 1), np.stack([rows, rows], 1)])
    same = labels[pairs[:, 0]] == labels[pairs[:, 1]]
    kinds = [rng.permutation(np.flatnonzero(same == kind)) for kind in (True, False)]
    most = max(map(len, kinds))
    order = rng.permutation(np.concatenate([np.resize(kind, most) for kind in kinds]))
    return pairs[order], same[order]


def train_setfit(
    unit: dict[str, Any], rows: Any, task: Any, folder: Path, runtime: Any, seconds: float
) -> dict[str, Any]:
    """Run SetFit's procedure until all pairs were used or `seconds` are over; return the test score and the cost."""
    import torch
    from torch.nn import functional

    from tunesmith.data.batches import evaluation_batches, make_batch
    from tunesmith.metrics.table import make_suite
    from tunesmith.models.load import load_model
    from tunesmith.training.state import seed_everything

    splits, labels, padding = task
    began = time.perf_counter()
    seed_everything(unit["seed"])
    model: Any = load_model(folder, labels).model.base_model.to(runtime.device)
    first = model.config.model_type == "roberta"  # granite-embedding pools the first token

    def embed(batch: Any) -> Any:
        inputs = runtime.move(batch).inputs
        with runtime.autocast():
            hidden = model(**inputs).last_hidden_state.float()
        if first:
            return hidden[:, 0]
        mask = inputs["attention_mask"].unsqueeze(-1).float()
        return (hidden * mask).sum(1) / mask.sum(1)

    pairs, same = all_pairs(rows.labels, unit["seed"])
    every = steps = -(-len(pairs) // PAIRS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    model.train()
    step = 0
    while step < steps:
        warm = max(1.0, WARMUP * steps)
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(step / warm, (steps - step) / max(1.0, steps - warm))
        some = slice(PAIRS * step, PAIRS * (step + 1))
        vectors = embed(make_batch(rows, pairs[some].T.reshape(-1), padding))
        wanted = torch.from_numpy(same[some]).to(vectors)
        loss = functional.mse_loss(functional.cosine_similarity(*vectors.chunk(2)), wanted)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step == TIMED_STEPS:
            loss.item()
            taken = (time.perf_counter() - began) / step
            steps = min(every, max(FEWEST_STEPS, round(seconds / taken)))
    model.eval()

    def embed_all(some: Any) -> Any:
        found = torch.empty(len(some), model.config.hidden_size, device=runtime.device)
        with torch.no_grad():
            for batch in evaluation_batches(some, padding, max_rows=64):
                found[torch.from_numpy(batch.rows).to(found.device)] = embed(batch)
        return found

    weights, bias = fit_logistic(embed_all(rows), torch.from_numpy(rows.labels).to(runtime.device), len(labels))
    taken = time.perf_counter() - began
    logits = (embed_all(splits["test"]) @ weights.T + bias).cpu().numpy()
    score = make_suite(labels.task).compute(logits, splits["test"].labels)["accuracy"]
    about = {"recipe": "setfit", "score": score, "n": len(splits["test"]), "steps": steps, "steps_of_all_pairs": every}
    return {**about, "seconds": round(taken, 3)}


def fit_logistic(features: Any, labels: Any, classes: int) -> Any:
    """Fit a logistic regression with scikit-learn's default penalty (C = 1)."""
    import torch

    features = features.double()
    weights = torch.zeros(classes, features.shape[1], dtype=torch.double, device=features.device, requires_grad=True)
    bias = torch.zeros(classes, dtype=torch.double, device=features.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights, bias], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Any:
        optimizer.zero_grad()
        logits = features @ weights.T + bias
        found = torch.nn.functional.cross_entropy(logits, labels, reduction="sum") + weights.square().sum() / 2
        found.backward()
        return found

    optimizer.step(loss)
    return weights.detach().float(), bias.detach().float()


def train_library(
    unit: dict[str, Any], rows: Any, task: Any, folder: Path, runtime: Any, seconds: float
) -> dict[str, Any]:
    """Run the library until all pairs are used or about `seconds` are over, with at least FEWEST_STEPS; steps are timed first."""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer, models
    from setfit import SetFitModel, Trainer, TrainingArguments
    from sklearn.linear_model import LogisticRegression
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import logging

    from tunesmith.metrics.calibration import expected_calibration_error
    from tunesmith.training.state import seed_everything

    logging.set_verbosity_error()
    splits, labels, _ = task
    named = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **named)
    tokenizer.save_pretrained(str(folder))
    width = json.loads((folder / "config.json").read_text(encoding="utf-8"))["hidden_size"]

    def texts_of(some: Any) -> list[str]:
        column = some.columns["input_ids"].take(np.arange(len(some)))
        return [tokenizer.decode([int(i) for i in ids[1:-1]], clean_up_tokenization_spaces=False) for ids in column]

    data = Dataset.from_dict({"text": texts_of(rows), "label": [int(label) for label in rows.labels]})

    def train(steps: int) -> tuple[Any, float]:
        seed_everything(unit["seed"])
        body = models.Transformer(str(folder), max_seq_length=512)
        encoder = SentenceTransformer(modules=[body, models.Pooling(width)], device=str(runtime.device)).float()
        model = SetFitModel(model_body=encoder, model_head=LogisticRegression())
        quiet = {"report_to": "none", "save_strategy": "no", "show_progress_bar": False}
        settings = TrainingArguments(output_dir=str(folder / "setfit"), max_steps=steps, seed=unit["seed"], **quiet)
        began = time.perf_counter()
        Trainer(model=model, args=settings, train_dataset=data).train()
        return model, time.perf_counter() - began

    every = -(-len(all_pairs(rows.labels, 0)[0]) // PAIRS)
    short, long = (train(steps)[1] for steps in (TIMED_STEPS, 2 * TIMED_STEPS))
    fitting = round(max(0.0, seconds - short) / max((long - short) / TIMED_STEPS, 1e-4)) + TIMED_STEPS
    steps = min(every, max(FEWEST_STEPS, fitting))
    model, taken = train(steps)
    table = np.asarray(model.predict_proba(texts_of(splits["test"]), as_numpy=True, show_progress_bar=False))
    gold = splits["test"].labels
    score = float(np.mean(np.asarray(model.model_head.classes_)[table.argmax(1)] == gold))
    whole = np.zeros((len(gold), len(labels)))
    whole[:, model.model_head.classes_] = table
    about = {"recipe": "setfit_library", "score": score, "ece": expected_calibration_error(whole, gold), "n": len(gold)}
    return {**about, "steps": steps, "steps_of_all_pairs": every, "seconds": round(taken, 3)}
