"""Make the data of bench/recipes.py: token ids of every task for each model, in a folder small enough to copy to a GPU machine.

    .venv/bin/python bench/recipe_tasks.py --model ../shared/models/granite-embedding-30m-english

The machine with a GPU then needs no text, tokenizer or `datasets`. Only the token embeddings that a task uses are kept, in half
precision; `unpack_model` restores the model folder with zeros for the others, which doesn't change training. Examples with an
empty text are excluded (CR has one).

Held-out tasks derived from others: `sickneg` (does the second sentence contradict the first? 15% do), `newsline` (forty words
from the middle of a post), `r8head` (the first ten words of a report), `newspair` (are two passages from the same newsgroup?),
`late` (reports of R8, then forty words of a post), `rare5` (`sickneg` with 5% contradictions). Development regressions, so that
`sts` stays held-out: `overlap` (the share of words that the sentences of MRPC have in common) and `subjshare` (the share of
subjective sentences among four of SUBJ). The files are never committed.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("SHARED_DIR", ROOT.parent / "shared")) / "data"
PACK = ROOT / "scratch" / "recipes_data"
CHOSEN_ON = ("mrpc", "trec", "subj", "subjshare", "overlap")
"""Development tasks: the rules of `auto` were chosen on these."""
OUTSIDE = ("sections", "short_sections", "rare_games", "sizes", "same_source", "fortunes")
"""Written by bench/outside_tasks.py (SHARED_DIR=scratch/outside), not in ../shared."""
FURTHER = ("gloss_kinds", "gloss_above", "gloss_near", "speech_year", "speech_party", "film_stars")
"""More development tasks from bench/outside_tasks.py."""
UNSEEN = ("whale_next", "tweet_stars", "editorial_stars", "product_stars")
"""Held-out tasks from bench/outside_tasks.py."""
GROUP = 64
"""Number of values that share a scale in a model packed as int8."""
Row = tuple[tuple[str, ...], str]
"""One text or two, and the label."""


def _table(file: Path) -> list[Row]:
    """Read a TSV without quoting; the label is `label` or `score`, the texts are all other columns except ids."""
    with file.open(encoding="utf-8", newline="") as lines:
        found = list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    names = [n for n in found[0] if n not in ("idx", "id", "label", "score")]
    rows = [(tuple(r[n] for n in names), r.get("label") or r["score"]) for r in found]
    return [row for row in rows if all(text.strip() for text in row[0])]


def _plain(folder: str, kind: str = "") -> Callable[[str], list[Row]]:
    return lambda split: _table(SHARED / folder / f"{split}{kind}.tsv")


def _sick_negation(split: str) -> list[Row]:
    rows = _table(SHARED / "sick" / f"{split}_entailment.tsv")
    return [(texts, "yes" if label == "contradiction" else "no") for texts, label in rows]


def _rare(split: str) -> list[Row]:
    """Return `sickneg` with 5% contradictions."""
    rows = _sick_negation(split)
    others, rare = ([row for row in rows if row[1] == label] for label in ("no", "yes"))
    kept = np.random.default_rng(0).permutation(len(rare))[: len(others) // 19]
    return [*others, *(rare[i] for i in kept)]


def _middle(text: str, words: int) -> str:
    """Return this many words from the middle of a text."""
    found = text.split()
    start = max(0, (len(found) - words) // 2)
    return " ".join(found[start : start + words])


def _news_lines(split: str) -> list[Row]:
    return [((_middle(texts[0], 40),), label) for texts, label in _table(SHARED / "news6" / f"{split}.tsv")]


def _r8_heads(split: str) -> list[Row]:
    return [((" ".join(texts[0].split()[:10]),), label) for texts, label in _table(SHARED / "r8" / f"{split}.tsv")]


def _late(split: str) -> list[Row]:
    """Return two or three reports of R8 plus forty words of a newsgroup post, whose group is the label: the signal comes last."""
    reports, rng = [texts[0] for texts, _ in _table(SHARED / "r8" / f"{split}.tsv")], np.random.default_rng(3)
    return [
        ((" ".join([*(str(rng.choice(reports)) for _ in range(rng.integers(2, 4))), texts[0]]),), label)
        for texts, label in _news_lines(split)
    ]


def _news_pairs(split: str) -> list[Row]:
    """Return each post in two pairs: with a post of the same group and with a post of a different one."""
    rows, rng = _news_lines(split), np.random.default_rng(1)
    by_label: dict[str, list[int]] = {}
    for i, (_, label) in enumerate(rows):
        by_label.setdefault(label, []).append(i)
    made: list[Row] = []
    for i, (texts, label) in enumerate(rows):
        others = [i_ for name, found in by_label.items() if name != label for i_ in found]
        for answer, pool in (("same", [j for j in by_label[label] if j != i]), ("other", others)):
            made.append(((texts[0], rows[int(rng.choice(pool))][0][0]), answer))
    return made


def _pairs_of(folder: str, texts_with_label: str) -> Callable[[str], list[Row]]:
    """Return pairs of single texts, labeled with whether their labels match (half do) or with the second text's label."""

    def make(split: str) -> list[Row]:
        rows, rng = _table(SHARED / folder / f"{split}.tsv"), np.random.default_rng(1)
        rows = [((_middle(texts[0], 40),), label) for texts, label in rows]
        made: list[Row] = []
        for i, (texts, label) in enumerate(rows):
            others = [j for j in rng.integers(len(rows), size=50) if j != i]
            want = i % 2 == 0
            second = next((j for j in others if (rows[j][1] == label) == want), others[0])
            if texts_with_label == "second":
                second = others[0]
            same = "same" if rows[second][1] == label else "other"
            made.append(((texts[0], rows[second][0][0]), same if texts_with_label == "both" else rows[second][1]))
        return made

    return make


def _overlap(split: str) -> list[Row]:
    """Return MRPC pairs with the share of words in both sentences, as a score from 1 to 5."""
    made: list[Row] = []
    for texts, _ in _table(SHARED / "mrpc" / f"{split}.tsv"):
        one, other = (set(text.lower().split()) for text in texts)
        made.append((texts, f"{1 + 4 * len(one & other) / len(one | other):.3f}"))
    return made


def _subjective_share(split: str) -> list[Row]:
    """Return groups of four sentences, a random number of them subjective; the score is their share, independent of length."""
    rows, rng = _table(SHARED / "subj" / f"{split}.tsv"), np.random.default_rng(2)
    pools = [[texts[0] for texts, label in rows if label == name] for name in ("objective", "subjective")]
    made: list[Row] = []
    for _ in range(min(len(rows), 4000)):
        kinds = rng.random(4) < rng.random()
        made.append(((" ".join(str(rng.choice(pools[int(kind)])) for kind in kinds),), str(kinds.mean())))
    return made


TASKS: dict[str, Callable[[str], list[Row]]] = {
    **{name: _plain(name) for name in ("mrpc", "trec", "subj", "cr", "r8", "news6")},
    "sick": _plain("sick", "_entailment"),
    "sts": _plain("sick", "_relatedness"),
    "sickneg": _sick_negation,
    "newsline": _news_lines,
    "r8head": _r8_heads,
    "newspair": _news_pairs,
    "rare5": _rare,
    "overlap": _overlap,
    **{f"{name}same": _pairs_of(name, "both") for name in ("trec", "cr", "subj", "r8")},
    **{f"{name}second": _pairs_of(name, "second") for name in ("trec", "cr", "subj", "r8")},
    "late": _late,
    "subjshare": _subjective_share,
    **{name: _plain(name) for name in (*OUTSIDE, *FURTHER, *UNSEEN)},
}
LOOKED_AT = ("cr", "sick", "sts", "r8", "news6")
NEW = ("sickneg", "newsline", "r8head", "newspair")
REGRESSION = ("sts", "sizes", "overlap", "subjshare", "speech_year", "gloss_near")


def pack_task(task: str, tokenizer: Any, length: int, out: Path, most: int | None) -> npt.NDArray[np.int64]:
    """Write token ids and labels of both splits, at most `most` examples each; return the ids that occur."""
    arrays: dict[str, Any] = {}
    names: list[str] = []
    for split in ("train", "test"):
        rows = TASKS[task](split)
        rows = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))[:most]] if most else rows
        ids = tokenizer(*zip(*(texts for texts, _ in rows), strict=True), truncation=True, max_length=length)
        ids = ids["input_ids"]
        arrays[f"{split}_ids"] = np.concatenate([np.asarray(r, dtype=np.uint16) for r in ids])
        arrays[f"{split}_lengths"] = np.asarray([len(r) for r in ids], dtype=np.uint16)
        names = names or sorted({label for _, label in rows})
        labels = [float(label) if task in REGRESSION else names.index(label) for _, label in rows]
        arrays[f"{split}_labels"] = np.asarray(labels, dtype=np.float32 if task in REGRESSION else np.int64)
    pair = len(rows[0][0]) == 2
    arrays["about"] = np.frombuffer(json.dumps({"names": names, "pair": pair}).encode(), dtype=np.uint8)
    out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(out, **arrays)
    print(f"{out.parent.name} {task}: {len(arrays['train_lengths'])} / {len(arrays['test_lengths'])} rows", flush=True)
    return np.union1d(arrays["train_ids"], arrays["test_ids"]).astype(np.int64)


def pack_model(folder: Path, ids: npt.NDArray[np.int64], special: dict[str, Any], out: Path, *, int8: int) -> None:
    """Write the model with only these ids' embeddings: in half precision, or as integers up to `int8` with a scale per GROUP."""
    import torch
    from safetensors.torch import load_file

    stored = load_file(folder / "model.safetensors")
    weights = {name: value.half() for name, value in stored.items() if value.is_floating_point()}
    name = next(n for n in weights if n.endswith("word_embeddings.weight"))
    weights[name] = weights[name][torch.from_numpy(ids)]
    arrays: dict[str, Any] = {"kept_ids": ids.astype(np.int32)}
    for name, value in weights.items():
        if int8 and value.ndim == 2 and value.shape[1] % GROUP == 0:
            groups = value.float().reshape(-1, GROUP)
            scales = groups.abs().amax(1, keepdim=True).clamp_min(1e-9) / int8
            arrays[f"{name}:int8"] = (groups / scales).round().to(torch.int8).reshape(value.shape).numpy()
            arrays[f"{name}:scales"] = scales.half().numpy()
        else:
            arrays[name] = value.numpy()
    out.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(out / "packed.npz", **arrays)
    for file in ("config.json", "tokenizer.json"):
        shutil.copy(folder / file, out / file)
    (out / "special.json").write_text(json.dumps(special), encoding="utf-8")


def unpack_model(packed: Path, out: Path) -> Path:
    """Restore a model folder from the output of `pack_model`."""
    import torch
    from safetensors.torch import save_file

    stored, weights = np.load(packed / "packed.npz"), dict[str, Any]()
    for name in stored.files:
        if name.endswith(":int8"):
            plain, values = name.removesuffix(":int8"), stored[name]
            whole = values.reshape(-1, GROUP) * stored[f"{plain}:scales"].astype(np.float32)
            weights[plain] = torch.from_numpy(whole.reshape(values.shape)).half()
        elif not name.endswith(":scales"):
            weights[name] = torch.from_numpy(stored[name])
    kept = weights.pop("kept_ids").long()
    config = json.loads((packed / "config.json").read_text(encoding="utf-8"))
    name = next(n for n in weights if n.endswith("word_embeddings.weight"))
    whole = torch.zeros(config["vocab_size"], weights[name].shape[1], dtype=weights[name].dtype)
    whole[kept] = weights[name]
    out.mkdir(parents=True, exist_ok=True)
    save_file({**weights, name: whole}, out / "model.safetensors", metadata={"format": "pt"})
    for file in ("config.json", "tokenizer.json"):
        shutil.copy(packed / file, out / file)
    return out


def main() -> None:
    """Write the folder and print its size."""
    from tunesmith.data.tokenize import USUAL_LENGTH, longest_allowed
    from tunesmith.models.files import find_embedded, load_tokenizer, position_limit
    from tunesmith.models.load import read_model_config

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", type=Path, help="model folders [the bundled all-MiniLM-L6-v2]")
    parser.add_argument(
        "--tasks", nargs="+", default=[t for t in TASKS if t not in (*OUTSIDE, *FURTHER, *UNSEEN)], choices=tuple(TASKS)
    )
    parser.add_argument(
        "--length", type=int, help="tokens per example [default of a run]; set more for recipes that truncate"
    )
    parser.add_argument("--most_rows", type=int, help="maximum examples per split, for a smaller folder")
    parser.add_argument(
        "--int8",
        type=int,
        nargs="?",
        const=127,
        default=0,
        help="round the matrices, for a smaller folder (granite's are int8 already); values below 127 compress better",
    )
    parser.add_argument("--output", type=Path, default=PACK)
    args = parser.parse_args()
    shutil.rmtree(args.output, ignore_errors=True)
    for folder in args.model or [find_embedded()]:
        name = folder.name if args.model else "all-MiniLM-L6-v2"
        tokenizer = load_tokenizer(folder)
        limit = position_limit(read_model_config(folder))
        length = longest_allowed(tokenizer, model_max=limit, asked=None, usual=USUAL_LENGTH)
        length = args.length or length
        out = args.output / name
        special = {"pad": tokenizer.pad_token_id, "sep": tokenizer.sep_token_id}
        special["types"] = "token_type_ids" in tokenizer.model_input_names
        used = [pack_task(task, tokenizer, length, out / f"{task}.npz", args.most_rows) for task in args.tasks]
        ids = np.unique(np.concatenate([*used, np.arange(5), [tokenizer.pad_token_id, tokenizer.unk_token_id]]))
        pack_model(folder, ids, special, out, int8=args.int8)
        print(f"{name}: rows of up to {length} tokens, {len(ids)} of {len(tokenizer)} embeddings kept", flush=True)
    size = sum(file.stat().st_size for file in args.output.rglob("*") if file.is_file())
    print(f"{args.output}: {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
