"""The audit of the rows of all splits: labels, duplicates and leaks, text that reveals the label, drift between splits, and
the share of the text that the tokenizer or truncation loses.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tunesmith.data.rows import Columns, Ints, Part
from tunesmith.errors import DataError, first_few
from tunesmith.events import Finding, Severity
from tunesmith.labels import LabelMap, Task


def audit_rows(parts: Mapping[str, Part], columns: Columns, labels: LabelMap) -> list[Finding]:
    """Return findings, most serious first. Texts are compared as " ".join(text.lower().split())."""
    ordered = {"train": parts["train"], **parts} if "train" in parts else dict(parts)
    ids = {split: label_ids(part) for split, part in ordered.items()}
    findings = check_labels(ids, labels)
    if not sum(map(len, ordered.values())):
        return findings
    survey = survey_texts(ordered, list(columns.text), rendered=bool(columns.rendered))
    findings += find_overlaps(ordered, survey, labels, ids)
    train = ordered.get("train", ())
    if isinstance(train, Part) and len(train):
        known = (*columns.text, *columns.rendered, columns.label, "labels")
        others = [*columns.rendered, *(name for name in train.source.column_names if name not in known)]
        sample = sample_rows(train, [*columns.text, *others[:20]], MOST_ROWS)
        characters = survey.of("train", survey.characters)[sample.rows]
        folds = survey.of("train", survey.equal)[sample.rows].sum(axis=1) % FOLDS
        findings += find_giveaways(sample, characters, folds, ids["train"][sample.rows], labels, columns)
        classes = labels.task in (Task.BINARY, Task.MULTICLASS)
        for split in [s for s in ordered if s != "train" and classes and len(ids[s]) >= FEWEST_DRIFT_ROWS]:
            findings += _compare_labels(split, ids["train"], ids[split], labels)
    return sort_findings(findings)


def sort_findings(findings: list[Finding]) -> list[Finding]:
    """Sort findings, most serious first."""
    return sorted(findings, key=lambda finding: ("error", "warning", "info").index(finding.severity))


def require_clean(findings: Sequence[Finding], *, strict: bool) -> None:
    """Raise a DataError that lists every warning, if `strict`."""
    bad = [finding for finding in findings if finding.severity != "info"]
    if strict and bad:
        listed = "".join(f"\n  {finding.code}: {finding.evidence}" for finding in bad)
        problem = f"the audit has {len(bad)} warning{'s' * (len(bad) > 1)}, and --strict_data is set:{listed}"
        raise DataError(problem, fix="Correct the data, or omit --strict_data")


FEWEST_DRIFT_ROWS = 30
LABEL_DISTANCE = 0.1


def _compare_labels(split: str, train: Ints, other: Ints, labels: LabelMap) -> list[Finding]:
    """Compare the shares of the labels (total variation distance)."""
    one, two = train[train >= 0], other[other >= 0]
    if not len(one) or not len(two):
        return []
    shares = [np.bincount(ids, minlength=len(labels)) / len(ids) for ids in (one, two)]
    distance = float(np.abs(shares[0] - shares[1]).sum() / 2)
    noise = float(np.sqrt(shares[0] * (1 - shares[0]) * (1 / len(one) + 1 / len(two))).sum())
    top = int(np.abs(shares[0] - shares[1]).argmax())
    of_train, of_split = f"{shares[0][top]:.1%} of train", f"{shares[1][top]:.1%} of {split}"
    what = f"The label distribution differs: {labels.names[top]!r} is {of_train} and {of_split}"
    if distance < max(LABEL_DISTANCE, 2 * noise):
        return []
    evidence = f"{what} (distance {distance:.2f}; {noise:.2f} expected by chance)."
    advice = (f"Sample {split} from the same source as train, or use a metric that does not depend on class shares.",)
    return [Finding("label_drift", "warning", evidence, advice, numbers={"split": split, "distance": distance})]


RARE_ROWS = 10
IMBALANCE_SHARE = 0.8
SHOWN = 4


def label_ids(part: Part) -> Ints:
    """Return the encoded labels: ids, numbers, or a 0/1 vector per row."""
    column = part.labels()
    if hasattr(column.type, "value_type"):
        return np.asarray(column.flatten().to_numpy(zero_copy_only=False).reshape(len(column), -1))
    ids: Ints = column.to_numpy(zero_copy_only=False)
    return ids.astype(np.int32) if ids.dtype == np.int64 else ids


def check_labels(ids: Mapping[str, Ints], labels: LabelMap) -> list[Finding]:
    """Find rare labels in train, and one that most rows have."""
    if labels.task is Task.REGRESSION or "train" not in ids:
        return []
    counts = count_labels_of(ids["train"], labels)
    findings = _rare(counts, labels)
    if labels.task is Task.MULTILABEL:
        return findings
    top = int(counts.argmax())
    share = float(counts[top] / max(counts.sum(), 1))
    if share >= IMBALANCE_SHARE:
        evidence = f"{share:.1%} of train rows have the label {labels.names[top]!r}."
        steps = ("Judge by macro F1 or MCC, not accuracy.", "Try class weights (--class_weights balanced).")
        findings.append(Finding("imbalance", "warning", evidence, steps, numbers={"share": share}))
    return findings


def count_labels_of(ids: Ints, labels: LabelMap) -> Ints:
    """Count the rows of each label."""
    if labels.task is Task.MULTILABEL:
        return np.asarray(ids.sum(axis=0) if len(ids) else np.zeros(len(labels)), dtype=np.int64)
    return np.bincount(ids[ids >= 0], minlength=len(labels))


def _rare(counts: Ints, labels: LabelMap) -> list[Finding]:
    rare = [(name, int(n)) for name, n in zip(labels.names, counts, strict=True) if n < RARE_ROWS]
    if not rare:
        return []
    shown = first_few([f"{name!r} ({n})" for name, n in rare], 8)
    evidence = f"Labels with fewer than {RARE_ROWS} train rows: {shown}."
    advice = ("Add rows, merge labels, or correct the label if it is a typing error.",)
    return [Finding("rare_labels", "warning", evidence, advice, numbers={"labels": dict(rare)})]


MOST_ROWS = 20_000
FEWEST_ROWS = 40
FOLDS = 5
LARGE_SHARE, COLUMN_SHARE = 0.5, 0.8
"""Features and columns that remove at least this share of the constant baseline's errors are reported."""
_WORD = re.compile(r"\w+|[^\w\s]+")
_DIGITS = re.compile(r"\d+(?:\.\d+)?")


def find_giveaways(
    sample: RowSample, characters: Ints, folds: Ints, ids: Ints, labels: LabelMap, columns: Columns
) -> list[Finding]:
    """Find text lengths, ids, dates, words and columns that predict the label. Equal texts are in one fold of `folds`."""
    regression = labels.task is Task.REGRESSION
    known = np.isfinite(ids) if regression else ids >= 0
    if labels.task is Task.MULTILABEL or known.sum() < FEWEST_ROWS or len(np.unique(ids[known])) < 2:
        return []
    text = columns.text
    ratio = characters[:, :1] / np.maximum(characters[:, -1:], 1)
    features = {"Text length": np.concatenate([characters, ratio], axis=1)}
    if not columns.rendered:  # these are features of the single columns
        places = [column_features(sample.columns[name]) for name in text]
        features["An id or date in the text"] = np.concatenate(places, axis=1)
    cells_of = {f"Column {name!r}": cells for name, cells in sample.columns.items() if name not in text}
    features |= {name: column_features(cells) for name, cells in cells_of.items()}
    findings = []
    for name, values in features.items():
        score, constant = judge_features(values[known], ids[known], folds[known], regression=regression)
        of_column = name in cells_of
        if (score - constant) / max(1 - constant, 1e-9) < (COLUMN_SHARE if of_column else LARGE_SHARE):
            continue
        numbers = {"feature": name, "score": score, "constant": constant}
        says = f"R2 {score:.2f}" if regression else f"{score:.1%} of the labels"
        few = of_column and len({str(cell) for cell in cells_of[name]}) <= max(2 * len(labels), 10)
        if few and name not in map("Column {!r}".format, columns.rendered):
            evidence = f"{name} repeats the label ({says}). The model does not use this column."
            findings.append(Finding("column_repeats_label", "info", evidence, numbers=numbers))
            continue
        evidence = f"{name} is enough to predict {says}."
        advice = "Check how the rows were collected: the model may learn the source of a row instead of its meaning."
        findings.append(Finding("label_giveaway", "warning", evidence, (advice,), numbers=numbers))
    return [*findings, *_markers(sample, ids, labels, text)]


def judge_features(values: Ints, ids: Ints, folds: Ints, *, regression: bool) -> tuple[float, float]:
    """Return the cross-validated accuracy (R2 for numbers) of a decision tree, and that of a constant."""
    from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

    kind = DecisionTreeRegressor if regression else DecisionTreeClassifier
    predicted = np.zeros(len(ids), dtype=np.float64 if regression else ids.dtype)
    for fold in np.unique(folds):
        here = folds == fold
        if here.all() or len(np.unique(ids[~here])) < 2:
            return 0.0, 0.0
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The number of unique classes")  # many classes are fine here
            tree = kind(max_leaf_nodes=64, min_samples_leaf=max(5, len(ids) // 500), random_state=0)
            predicted[here] = tree.fit(values[~here], ids[~here]).predict(values[here])
    if regression:
        return float(1 - ((ids - predicted) ** 2).mean() / max(float(ids.var()), 1e-12)), 0.0
    return float((predicted == ids).mean()), float(np.bincount(ids).max() / len(ids))


MARKER_SHARE, MARKER_ELSEWHERE = 0.95, 0.02
MOST_MARKED = 100
"""With more classes, words are not searched."""


def _markers(sample: RowSample, ids: Ints, labels: LabelMap, text: Sequence[str]) -> list[Finding]:
    """Find words and signs such as POS and + that nearly all rows of a class have, anywhere or as the first or last one, and
    hardly any other row, for all classes except one."""
    if labels.task is Task.REGRESSION or len(labels) > MOST_MARKED:
        return []
    counts: dict[int, Counter[str]] = {}
    cells = zip(*(map(str, sample.columns[name]) for name in text), strict=True)
    for label, row in zip(ids.tolist(), cells, strict=True):
        words = _WORD.findall(" ".join(f"{cell[:2_000]} {cell[2_000:][-100:]}" for cell in row))
        if label >= 0 and words:
            ends = (f"{words[0]} at the start", f"{words[-1]} at the end")
            counts.setdefault(label, Counter()).update({*words, *ends})
    rows = {label: int((ids == label).sum()) for label in counts}
    every = sum(counts.values(), Counter())
    found: dict[int, str] = {}
    for label, own in counts.items():
        least, most = MARKER_SHARE * rows[label], MARKER_ELSEWHERE * (sum(rows.values()) - rows[label])
        marks = [word for word, count in own.items() if count >= least and every[word] - count <= most]
        if marks:
            found[label] = min(marks, key=lambda word: (every[word] - own[word], -own[word], word))
    if len(found) < max(1, len(counts) - 1):
        return []
    shown = first_few([f"{word!r} for {labels.names[label]!r}" for label, word in found.items()], SHOWN)
    evidence = f"The text contains the label: a single word identifies it in at least {MARKER_SHARE:.0%} of the rows ({shown})."
    advice = ("Remove the word if it was added with the label: the model learns it instead of the text.",)
    numbers = {"feature": "marker words", "words": {labels.names[label]: word for label, word in found.items()}}
    return [Finding("label_giveaway", "warning", evidence, advice, numbers=numbers)]


def column_features(cells: Sequence[Any]) -> Ints:
    """Return the first and last number of each cell, all digits as one number, and a code for the other words."""
    texts = ["" if cell is None else str(cell)[:2_000] for cell in cells]
    numbers = [_DIGITS.findall(text) or ["-1"] for text in texts]
    ends = [np.array([float(found[at][:15]) for found in numbers]) for at in (0, -1)]
    digits = np.array([float("".join(found)[:15].replace(".", "")) for found in numbers])
    words = [re.sub(r"\d+", "", text) for text in texts]
    codes = {word: code for code, word in enumerate(dict.fromkeys(words))}
    code = np.array([codes[word] for word in words], dtype=np.float64)
    return np.stack([*ends, digits, code if len(codes) <= len(cells) // 4 else np.zeros(len(cells))], axis=1)


LEAK_SHARE = 0.01
"""With this share of (nearly) equal rows in train, the score of a split is too optimistic."""
REPEAT_SHARE = 0.2
CONTRADICTION_SHARE = 0.005
CONSTANT_SHARE = 0.05
SHOWN_ROWS = 10


def find_overlaps(
    parts: Mapping[str, Part], survey: TextSurvey, labels: LabelMap, ids: Mapping[str, Ints]
) -> list[Finding]:
    """Find repeats, leaks, contradictions, and empty and constant texts."""
    findings: list[Finding] = []
    equal = {split: survey.of(split, survey.equal) for split in parts}
    near = {split: survey.of(split, survey.near) for split in parts}
    unordered = {split: row_keys(np.sort(rows, axis=1)) for split, rows in near.items()}
    for split, part in parts.items():
        if split != "train" and "train" in parts:
            agree = _agreement(unordered[split], unordered["train"], ids[split], ids["train"], labels)
            findings += _leaks((split, part), equal, unordered, agree=agree)
        findings += _repeats((split, part), equal[split], near[split])
        findings += _constant((split, part), equal[split], survey.of(split, survey.characters))
    return findings + _contradictions(parts, equal, ids, labels)


def _agreement(like: Ints, train: Ints, ids: Ints, train_ids: Ints, labels: LabelMap) -> bool:
    """Return whether near-duplicates of train rows (equal keys) share their label more often than by chance."""
    if labels.task not in (Task.BINARY, Task.MULTICLASS):
        return True
    keys, first = np.unique(train, return_index=True)
    place = np.minimum(np.searchsorted(keys, like), len(keys) - 1)
    there = (keys[place] == like) & (ids >= 0)
    if there.sum() < 10:
        return True
    given, seen = ids[there], train_ids[first[place[there]]]
    share, chance = float((given == seen).mean()), float(np.bincount(given).max() / len(given))
    return share > chance + 2 * float(np.sqrt(chance * (1 - chance) / len(given)))


def _leaks(where: Split, equal: Mapping[str, Ints], near: Mapping[str, Ints], *, agree: bool) -> list[Finding]:
    """Find rows that are also in train, equal or nearly equal. `agree`: near-duplicates share the label of the train row."""
    split, part = where
    whole = np.isin(row_keys(np.sort(equal[split], axis=1)), row_keys(np.sort(equal["train"], axis=1)))
    nearly = np.isin(near[split], near["train"]) & ~whole
    leaked = whole | nearly
    if not leaked.any():
        return []
    numbers = {
        "split": split,
        "rows": len(part),
        "equal_rows": int(whole.sum()),
        "near_rows": int(nearly.sum()),
        "shared_rows": int(np.isin(equal[split], np.unique(equal["train"])).any(axis=1).sum()),
        "first": _first(part, leaked),
    }
    evidence = (
        f"{leaked.sum():,} of {len(part):,} {split} rows are in train{' or nearly so' * bool(nearly.any())}: "
        f"{whole.sum():,} equal, {nearly.sum():,} nearly equal (first: {_shown(part, leaked)})."
    )
    advice = (f"Remove them from train or from {split}: the {split} score is too optimistic.",)
    serious = int((leaked if agree else whole).sum())
    severity: Severity = "warning" if serious >= max(3, LEAK_SHARE * len(part)) else "info"
    return [Finding("split_leak", severity, evidence, advice, numbers=numbers)]


def _repeats(where: Split, exact: Ints, like: Ints) -> list[Finding]:
    repeated, near = (first_equal(row_keys(rows)) < np.arange(len(rows)) for rows in (exact, like))
    near &= ~repeated
    many = repeated.sum() >= REPEAT_SHARE * len(repeated) and len(repeated) >= 20
    findings = []
    if repeated.any():
        advice = "Remove unintended repeats: they weigh more than other rows."
        what = "repeat the text of an earlier row"
        findings.append(_of_rows("duplicate_rows", "warning" if many else "info", where, repeated, what, advice))
    if near.any():
        what, advice = "nearly repeat the text of an earlier row", "Check whether these rows are copies."
        findings.append(_of_rows("near_duplicate_rows", "info", where, near, what, advice))
    return findings


Split = tuple[str, Part]
"""A split name and its rows."""


def _of_rows(code: str, severity: Severity, where: Split, rows: Ints, what: str, advice: str) -> Finding:
    """Return a finding about the rows of a split for which `rows` is true."""
    split, part = where
    numbers = {"split": split, "rows": int(rows.sum()), "of": len(rows), "first": _first(part, rows)}
    evidence = f"{numbers['rows']:,} of {len(rows):,} {split} rows {what} (first: {_shown(part, rows)})."
    return Finding(code, severity, evidence, (advice,), numbers=numbers)


def _constant(where: Split, rows: Ints, characters: Ints) -> list[Finding]:
    """Find empty texts, and one text that fills a large share of its column."""
    findings = []
    empty = (characters == 0).any(axis=1)
    if empty.any():
        advice = "Fill them in or remove them: a model can only guess there."
        findings.append(_of_rows("empty_text", "warning", where, empty, "have an empty text", advice))
    for column in range(rows.shape[1]):
        texts, counts = np.unique(rows[:, column], return_counts=True)
        top = int(counts.max(initial=0))
        if top >= max(20, CONSTANT_SHARE * len(rows)):
            same = rows[:, column] == texts[counts.argmax()]
            what = "have one and the same text" + ("" if rows.shape[1] == 1 else f" as text {column + 1}")
            advice = "Check that the text column is the right one, and whether this text is a placeholder."
            severity: Severity = "warning" if rows.shape[1] == 1 or top == len(rows) else "info"
            findings.append(_of_rows("constant_text", severity, where, same, what, advice))
    return findings


def _contradictions(
    parts: Mapping[str, Part], rows: Mapping[str, Ints], ids: Mapping[str, Ints], labels: LabelMap
) -> list[Finding]:
    """Find labeled rows with equal texts and different labels (or numbers that are far apart), across all splits."""
    group = first_equal(np.concatenate([row_keys(found) for found in rows.values()]))
    given, apart, what = np.concatenate([ids[split] for split in rows]), 0.0, "a different label"
    if labels.task is Task.MULTILABEL:
        known, what = np.isfinite(given).all(axis=1), "different labels"
        given = np.unique(given, axis=0, return_inverse=True)[1].reshape(-1)
    elif labels.task is Task.REGRESSION:
        known = np.isfinite(given)
        apart = float(given[known].std()) if known.any() else 0.0
        what = f"a number more than {apart:.2g} away (a standard deviation)"
    else:
        known = given >= 0
    low = np.where(known, given, given[known].max(initial=0))
    high = np.where(known, given, given[known].min(initial=0))
    np.minimum.at(low, group[known], given[known])
    np.maximum.at(high, group[known], given[known])
    wrong = (high - low > apart)[group] & known
    findings, at = [], 0
    for split, found in rows.items():
        here = wrong[at : at + len(found)]
        at += len(found)
        if here.any():
            severity: Severity = "warning" if here.sum() >= CONTRADICTION_SHARE * len(found) else "info"
            text = f"have the same text as another row but {what}"
            advice = "Decide which label is right: no model can get both."
            findings.append(_of_rows("contradicting_labels", severity, (split, parts[split]), here, text, advice))
    return findings


def row_keys(rows: Ints) -> Ints:
    """Return one key per row; text numbers fit 31 bits, so two of them fit one int64."""
    if rows.shape[1] == 1:
        return rows[:, 0]
    wide = rows.astype(np.int64)
    keys: Ints = (wide[:, 0] << 31) | wide[:, 1]
    return keys


def _first(part: Part, rows: Ints) -> list[str]:
    """Return the places in the file of the first rows for which `rows` is true."""
    return [part.where(row) for row in np.flatnonzero(rows)[:SHOWN_ROWS]]


def _shown(part: Part, rows: Ints) -> str:
    return ", ".join(_first(part, rows)[:3])


MOST_TOKENIZED = 3_000
UNKNOWN_SHARE = 0.01
CUT_SHARE = 0.1


def check_tokens(texts: Sequence[str], tokenizer: Any) -> list[Finding]:
    """Find texts that the tokenizer cannot represent."""
    if not texts:
        return []
    ids = tokenizer(texts, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
    counts = np.array([len(row) for row in ids])
    unknown = np.zeros(len(ids), np.int64)
    if tokenizer.unk_token_id is not None:
        unknown = np.array([row.count(tokenizer.unk_token_id) for row in ids])
    share = float(unknown.sum() / max(counts.sum(), 1))
    lost = float((unknown * 2 > counts).mean())
    if share < UNKNOWN_SHARE and lost < UNKNOWN_SHARE:
        return []
    words = Counter(word for at in np.flatnonzero(unknown)[:200] for word in texts[at].split())
    ids = tokenizer(list(words), add_special_tokens=False, verbose=False)["input_ids"]
    lacking = [word for word, found in zip(words, ids, strict=True) if tokenizer.unk_token_id in found]
    shown = ", ".join(repr(word[:20]) for word in sorted(lacking, key=lambda word: -words[word])[:5])
    evidence = f"{share:.1%} of the tokens are unknown to the tokenizer, and {lost:.1%} of the rows mostly so: {shown}."
    advice = ("Use a model whose tokenizer knows this text, such as a multilingual one.",)
    return [Finding("unknown_tokens", "warning", evidence, advice, numbers={"share": share, "rows": lost})]


def check_cut(lengths: Ints, length: int, limit: int | None) -> list[Finding]:
    """Report how much `length` truncates rows of these lengths in tokens; `limit` is the maximum of the model."""
    over = np.maximum(lengths - length, 0)
    if not over.any():
        return []
    cut, share, lost = int((over > 0).sum()), float((over > 0).mean()), float(over.sum() / lengths.sum())
    rows = f"{cut:,} of {len(lengths):,} rows"
    evidence = f"{rows} are longer than {length} tokens and are truncated; {lost:.1%} of all tokens are lost."
    longest = int(np.quantile(lengths, 0.99))
    if limit is not None and length >= limit:
        advice = f"The model supports at most {limit}; --long_texts sets which part of a longer row it sees."
    elif limit is not None and limit < longest:
        advice = f"Raise --max_seq_length to {limit}: the model supports that many."
    else:
        advice = f"Raise --max_seq_length to {longest}: 99% of the rows fit then."
    severity: Severity = "warning" if share >= CUT_SHARE and lost >= CUT_SHARE else "info"
    numbers = {"rows": cut, "share": share, "tokens_lost": lost, "length": length}
    return [Finding("cut_rows", severity, evidence, (advice,), numbers=numbers)]


GRAM = 5
"""Letters per shingle; spaces and punctuation are ignored."""
BANDS, BAND_ROWS = 16, 3
HASHES = BANDS * BAND_ROWS
NEAR = 29
"""Equal MinHash values at which two texts are nearly equal: an estimated Jaccard similarity of 0.6."""
MOST_BYTES = 4_096
"""Number of bytes of each text that are compared for near-duplicates."""
BLOCK_BYTES = 1 << 20
_CHUNK = 100_000
_IS_LETTER = np.array([byte >= 128 or chr(byte).isalnum() for byte in range(256)])


@dataclass
class TextSurvey:
    """Facts about each text. Text numbers: split after split, column after column, row after row.

    Texts are compared as `" ".join(text.lower().split())`.
    """

    shapes: dict[str, tuple[int, int]]
    """Split -> (first text number, rows)."""
    columns: int
    characters: Ints
    equal: Ints
    """Number of the first equal text, or of the text itself."""
    near: Ints
    """Number of the first nearly equal text, or of the text itself."""

    def of(self, split: str, values: Ints) -> Ints:
        """Return (rows, columns) of a split, from one value per text."""
        first, rows = self.shapes[split]
        return values[first : first + rows * self.columns].reshape(self.columns, rows).T


def survey_texts(parts: Mapping[str, Part], text: Sequence[str], *, rendered: bool = False) -> TextSurvey:
    """Read every text once; without the column names of `rendered` texts, which would make all of them similar."""
    shapes, at = {}, 0
    for split, part in parts.items():
        shapes[split] = (at, len(part))
        at += len(part) * len(text)
    tables = (table.column(name) for part in parts.values() for name in text for table in part.scan([name]))
    found = [_survey(cells) for column in tables for cells in _pieces(column, rendered=rendered)]
    keys, characters, signatures = (np.concatenate(values) for values in zip(*found, strict=True))
    equal = first_equal(keys)
    return TextSurvey(shapes, len(text), characters, equal, find_near(equal, signatures))


def _pieces(column: Any, *, rendered: bool) -> Iterator[Any]:
    """Yield the cells in lower case with single spaces, in pieces of about BLOCK_BYTES."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for chunk in column.chunks if hasattr(column, "chunks") else [column]:
        step = max(1, int(len(chunk) * BLOCK_BYTES / max(chunk.nbytes, 1)))
        for at in range(0, len(chunk), step):
            cells = pc.utf8_lower(chunk.slice(at, step).cast(pa.large_string()))
            if rendered:
                cells = pc.replace_substring_regex(cells, pattern=r"(?m)^.*?: ", replacement="")
            spaced = pc.replace_substring_regex(cells, pattern=r"[\s\v\x1c-\x1f\x85\pZ]+", replacement=" ")
            yield pc.utf8_trim(spaced, characters=" ")


def _survey(cells: Any) -> tuple[Ints, Ints, Ints]:
    """Return keys, characters and signatures of some texts."""
    import pyarrow.compute as pc

    offsets = np.frombuffer(cells.buffers()[1], np.int64)[cells.offset : cells.offset + len(cells) + 1]
    data = cells.buffers()[2]
    raw = np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]] if data is not None else np.empty(0, np.uint8)
    offsets = offsets - offsets[0]
    hashes = (hashlib.blake2b(cell.encode(), digest_size=8).digest() for cell in cells.to_pylist())
    keys = np.frombuffer(b"".join(hashes), np.uint64)
    is_letter = _IS_LETTER[raw]
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(is_letter)])[offsets]
    characters = pc.utf8_length(cells).to_numpy(zero_copy_only=False).astype(np.int32)
    return keys, characters, sign_texts(raw[is_letter], starts, keys)


def sign_texts(data: Ints, offsets: Ints, keys: Ints) -> Ints:
    """Return the MinHash values of the shingles of each text, 16 bits each; texts without shingles use their key."""
    grams = np.zeros(max(len(data) - GRAM + 1, 0), np.uint32)
    for place in range(GRAM):
        grams = grams * np.uint32(0x01000193) + data[place : place + len(grams)]
    grams = (grams ^ (grams >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    grams ^= grams >> np.uint32(13)
    starts = offsets[:-1]
    ends = np.maximum(np.minimum(offsets[1:], starts + MOST_BYTES) - (GRAM - 1), starts)
    some = np.flatnonzero(ends > starts)
    bounds = np.stack([starts[some], ends[some]], axis=1).reshape(-1)
    grams = np.append(grams, np.uint32(0))  # reduceat accepts no bound at the end
    rng = np.random.default_rng(20_261_117)
    signatures = np.empty((len(keys), HASHES), np.uint16)
    for column in range(HASHES):
        factor, shift = rng.integers(0, 1 << 32, 2, dtype=np.uint32)
        signatures[:, column] = (keys * np.uint64(factor | np.uint32(1))) >> np.uint64(48)
        if len(some):
            least = np.minimum.reduceat(grams * (factor | np.uint32(1)) + shift, bounds)[::2]
            signatures[some, column] = (least * np.uint32(0x9E3779B1)) >> np.uint32(16)
    return signatures


@dataclass(frozen=True)
class RowSample:
    """Rows of a part: `rows` are their positions, ascending; `columns` are their cells."""

    rows: Ints
    columns: dict[str, list[Any]]


def sample_rows(part: Part, names: list[str], most: int) -> RowSample:
    """Return at most `most` rows, evenly spread over the part."""
    count = len(part)
    rows = np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))
    table = part.source.dataset.select(rows if part.rows is None else part.rows[rows])
    cells = table.select_columns(names).with_format("arrow")[:] if names else None
    return RowSample(rows, {name: cells.column(name).to_pylist() for name in names} if cells is not None else {})


def find_near(equal: Ints, signatures: Ints) -> Ints:
    """Return the first nearly equal text for each text, or the text itself.

    Each text is compared with the first and the previous text in its buckets.
    """
    own = np.arange(len(equal))
    different = np.flatnonzero(equal == own)
    near = own.copy()
    for band in range(0, HASHES, BAND_ROWS):
        key = np.zeros(len(different), np.uint64)
        for column in range(band, band + BAND_ROWS):
            key = (key << np.uint64(16)) | signatures[different, column]
        order = np.argsort(key, kind="stable")
        same = np.append(False, key[order][1:] == key[order][:-1])
        numbers, later = different[order], np.flatnonzero(same)
        first = np.maximum.accumulate(np.where(same, 0, np.arange(len(same))))
        for earlier in (later - 1, first[later]):
            for at in range(0, len(later), _CHUNK):
                one, two = numbers[earlier[at : at + _CHUNK]], numbers[later[at : at + _CHUNK]]
                close = (signatures[one] == signatures[two]).sum(axis=1) >= NEAR
                near[two[close]] = np.minimum(near[two[close]], one[close])
    near = near[equal]
    while (near[near] != near).any():
        near = near[near]
    return near


def first_equal(keys: Ints) -> Ints:
    """Return for each key the place of its first occurrence."""
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    found: Ints = first[inverse]
    return found
