"""`tunesmith audit`: check examples, tokens and labels of a config's data; write suspected label errors to a review file.

Labels are checked with TF-IDF, or with TF-IDF and vectors of the frozen encoder. A model that was fitted without an example
predicts its label.
"""

from __future__ import annotations

import csv
import io
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tunesmith.config.options import RunConfig
from tunesmith.data.audit import sample_rows, sort_findings
from tunesmith.data.read import DataBundle
from tunesmith.data.rows import Ints, Part, cell_text
from tunesmith.events import Finding, Severity
from tunesmith.files import write_new
from tunesmith.labels import LabelMap, Task
from tunesmith.metrics.calibration import LabelNoise, estimate_label_noise
from tunesmith.metrics.paired import compare_predictions
from tunesmith.metrics.table import softmax
from tunesmith.models.files import position_limit, read_config_file
from tunesmith.pipeline.inputs import RunData, audit_texts, load_run_tokenizer, read_run_data
from tunesmith.pipeline.train import RunObserver

LabelJudge = Literal["words", "probe", "off"]
MOST_JUDGED = {"words": 20_000, "probe": 10_000}
"""Maximum number of labels to check; of more, an even sample."""
FEWEST_JUDGED = 50
MOST_TRIED, COLUMN_SPACE, FOLDS = 2_000, 32, 5
"""Rows with which unused columns are tried, TF-IDF features of a column, and folds."""
MOST_TOKENS, BATCH_ROWS = 128, 32
"""Maximum length of a text for the frozen encoder, and its batch size."""


@dataclass(frozen=True)
class AuditResult:
    """The findings of an audit, most serious first. `review_file` is None if it wasn't requested or no label is suspicious.

    `notes` describe how the files were read.
    """

    findings: list[Finding]
    notes: tuple[str, ...]
    rows: dict[str, int]
    review_file: str | None


def audit_files(
    config: RunConfig, *, labels: LabelJudge, review_file: str | None, observer: RunObserver
) -> AuditResult:
    """Read and audit the data; check training labels by the method `labels`. Only `review_file` is written."""
    data = read_run_data(config, {}, observer.progress, need_weights=labels == "probe")
    bundle = data.bundle
    tokenizer = load_run_tokenizer(config, data.folder)
    limit = position_limit(read_config_file(data.folder))
    findings = [*bundle.findings, *audit_texts(bundle, tokenizer, asked=config.max_seq_length, limit=limit)]
    findings += _suggest_columns(data)
    wrote = None
    if labels != "off":
        suspicious, wrote = _judge(data, tokenizer, labels, review_file, observer)
        findings += suspicious
    return AuditResult(sort_findings(findings), bundle.notes, {s: len(p) for s, p in bundle.parts.items()}, wrote)


MOST_COLUMNS = 8
"""Unused columns that are tried, at most."""


def _suggest_columns(data: RunData) -> list[Finding]:
    """Report each unused column that helps a linear model of TF-IDF features on held-out rows, if the interval is above 0.

    A column that reveals the label is not suggested.
    """
    bundle, labels = data.bundle, data.bundle.labels
    columns, part = bundle.columns, bundle.parts["train"]
    told = {finding.numbers.get("feature") for finding in bundle.findings}
    used = (*columns.text, *columns.named, columns.label, *part.source.label_parts(columns.label), "labels")
    unused = [n for n in part.source.column_names if n not in used and f"Column {n!r}" not in told][:MOST_COLUMNS]
    checked = _labeled_rows(bundle, MOST_TRIED)
    if not unused or not checked.are_enough:
        return []
    if np.sort(np.bincount(checked.ids))[-2] < FOLDS:
        return []
    ids, source = checked.ids, checked.part.source
    cells = source.dataset.select(checked.numbers).select_columns(unused).with_format(None)[:]
    words = word_space([" ".join(row) for row in checked.texts])
    without = _cross_validate(words, ids, len(labels))
    findings = []
    for name in unused:
        with suppress(TypeError):  # lists
            values = list(map(cell_text, cells[name]))
            extra = word_space(values, COLUMN_SPACE)
            extra *= 0.5 * words.std() / max(float(extra.std()), 1e-12)
            found = _cross_validate(np.concatenate([words, extra], axis=1), ids, len(labels))
            gain = compare_predictions(without, found, ids, task=labels.task)
            if gain.low is None or gain.high is None or gain.difference is None or gain.low <= 0:
                continue
            points = f"{100 * gain.difference:+.1f} points ({100 * gain.low:.1f} to {100 * gain.high:.1f})"
            evidence = (
                f"Column {name!r} is not used. It changes the accuracy of a linear model of TF-IDF features by {points}, "
                f"in {FOLDS}-fold cross-validation on {len(ids):,} train rows ({len(unused)} columns tried). "
                "Your model was not measured."
            )
            advice = f"Try --text_column_names {','.join((*columns.named, name))}."
            measured = {"column": name, "difference": gain.difference, "low": gain.low, "high": gain.high}
            findings.append(Finding("unused_column", "info", evidence, (advice,), numbers=measured))
    return findings


def _cross_validate(features: Ints, ids: Ints, classes: int) -> Ints:
    """Return the held-out predictions of ridge classifiers, one-hot.

    Leave-one-out would predict the rarer of two classes if the features are uninformative.
    """
    from sklearn.linear_model import RidgeClassifierCV
    from sklearn.model_selection import StratifiedKFold, cross_val_predict

    largest = float(np.linalg.norm(features, 2)) ** 2 + 1e-9
    model = RidgeClassifierCV(alphas=largest * np.logspace(-4, 1, 11))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The least populated class")
        found = cross_val_predict(model, features, ids, cv=StratifiedKFold(FOLDS, shuffle=True, random_state=0))
    predicted: Ints = np.eye(classes)[found]
    return predicted


def _judge(
    data: RunData, tokenizer: Any, method: LabelJudge, review_file: str | None, observer: RunObserver
) -> tuple[list[Finding], str | None]:
    labels = data.bundle.labels
    checked = _labeled_rows(data.bundle, MOST_JUDGED[method])
    if not checked.are_enough:
        return [], None
    ids = checked.ids
    features = word_space([" ".join(row) for row in checked.texts])
    if method == "probe":
        frozen = embed_rows(data.folder, tokenizer, labels, checked.texts, observer)
        # TF-IDF has half the weight.
        sides = (frozen / max(float(frozen.std()), 1e-12), 0.5 * features / max(float(features.std()), 1e-12))
        features = np.concatenate(sides, axis=1)
    suspects, noise = find_label_errors(features, ids, labels)
    where = review_file if suspects else None
    if where is not None:
        write_new(Path(where), format_review(suspects, checked, data.bundle.columns.text))
    how = "TF-IDF" if method == "words" else "frozen features and TF-IDF"
    return describe_suspects(suspects, checked, method=how, review=where, noise=noise), where


@dataclass(frozen=True)
class CheckedRows:
    """Labeled rows of a part; `numbers` are their rows in the file."""

    part: Part
    numbers: Ints
    texts: list[Sequence[str]]
    ids: Ints
    labels: LabelMap

    @property
    def are_enough(self) -> bool:
        """Return whether a model can be cross-validated."""
        return len(self.ids) >= FEWEST_JUDGED and len(np.unique(self.ids)) > 1


def _labeled_rows(bundle: DataBundle, most: int) -> CheckedRows:
    """Return an even sample of the labeled training rows; none unless each has one class."""
    part, names, labels = bundle.parts["train"], list(bundle.columns.text), bundle.labels
    if labels.task not in (Task.BINARY, Task.MULTICLASS):
        return CheckedRows(part, np.empty(0, np.int64), [], np.empty(0), labels)
    sample = sample_rows(part, names, most)
    ids = part.labels().to_numpy(zero_copy_only=False)[sample.rows]
    known = ids >= 0
    texts = list(zip(*(sample.columns[name] for name in names), strict=True))
    rows = sample.rows[known]
    numbers = rows if part.rows is None else part.rows[rows]
    return CheckedRows(part, numbers, [row for row, good in zip(texts, known, strict=True) if good], ids[known], labels)


def embed_rows(
    folder: Path, tokenizer: Any, labels: LabelMap, texts: Sequence[Sequence[str]], observer: RunObserver
) -> Ints:
    """Return one vector of the frozen encoder per row: the mean token vector of a text; for pairs, difference and product.

    Each text is computed once.
    """
    import torch

    from tunesmith.models.load import load_model

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(folder, labels, ignore_mismatched_sizes=True, new_head=True).model
    bare = model.base_model.to(device).eval()
    known = {text: number for number, text in enumerate(dict.fromkeys(t for row in texts for t in row))}
    every = list(known)
    order = np.argsort([len(text) for text in every], kind="stable")
    vectors: Ints | None = None
    with torch.inference_mode():
        for at in range(0, len(every), BATCH_ROWS):
            some = order[at : at + BATCH_ROWS]
            batch = tokenizer(
                [every[i] for i in some], padding=True, truncation=True, max_length=MOST_TOKENS, return_tensors="pt"
            ).to(device)
            hidden = bare(**batch).last_hidden_state.float()
            mask = batch["attention_mask"][..., None]
            mean = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1).clamp_min(1))
            vectors = np.zeros((len(every), mean.shape[1]), np.float32) if vectors is None else vectors
            vectors[some] = mean.cpu().numpy()
            observer.progress("reading with the frozen model", min(at + BATCH_ROWS, len(every)), len(every))
    assert vectors is not None
    sides = [vectors[[known[row[side]] for row in texts]] for side in range(len(texts[0]))]
    return sides[0] if len(sides) == 1 else np.concatenate([np.abs(sides[0] - sides[1]), sides[0] * sides[1]], axis=1)


WORD_FEATURES = 2**15
WORD_SPACE = 256
SURE = 0.2
"""Rows are suspected label errors if their label has less than this share of its and the next label's probability."""


@dataclass(frozen=True)
class Suspect:
    """A suspected label error. `row` counts from 0 within the split; `given` and `other` are the probabilities of its label and
    of the suggested one.
    """

    row: int
    suggested: int
    given: float
    other: float


def find_label_errors(features: Ints, ids: Ints, labels: LabelMap) -> tuple[list[Suspect], LabelNoise | None]:
    """Return suspected label errors, the most likely ones first, and the estimated share of wrong labels.

    Each row is judged by a model of the linear probe that was fitted without it. The suspected errors of a first fit are excluded
    from the second one.
    """
    import torch

    from tunesmith.pipeline.probe import fit_linear

    rows, given = torch.from_numpy(features), torch.from_numpy(ids)
    first = fit_linear(rows, given, labels.task, len(labels)).held_out.numpy()
    kept = np.setdiff1d(np.arange(len(ids)), [one.row for one in rank_suspects(first, ids)])
    fitted = fit_linear(rows[kept], given[kept], labels.task, len(labels))
    logits = fitted.logits(rows).numpy()
    logits[kept] = fitted.held_out.numpy()
    return rank_suspects(logits, ids), estimate_label_noise([(first, ids)], len(labels))


def rank_suspects(logits: Ints, ids: Ints) -> list[Suspect]:
    """Return suspected label errors, the most likely ones first."""
    rows, probabilities = np.arange(len(ids)), softmax(logits)
    own = probabilities[rows, ids]
    probabilities[rows, ids] = -1.0
    top = probabilities.argmax(axis=1)
    other = probabilities[rows, top]
    # Ranked by the probability of the label: its share, which decides how many there are, found fewer planted errors.
    places = np.argsort(own, kind="stable")[: int((own < SURE * (own + other)).sum())]
    return [Suspect(int(r), int(top[r]), float(own[r]), float(other[r])) for r in places]


def word_space(texts: Sequence[str], size: int = WORD_SPACE) -> Ints:
    """Return TF-IDF features of words, word pairs and parts of words, hashed to `size` numbers per text."""
    from sklearn.feature_extraction.text import HashingVectorizer, TfidfTransformer
    from sklearn.pipeline import FeatureUnion, make_pipeline
    from sklearn.utils.extmath import randomized_svd

    options: dict[str, Any] = {"n_features": WORD_FEATURES, "alternate_sign": False, "dtype": np.float32}
    words = HashingVectorizer(ngram_range=(1, 2), token_pattern=r"(?u)\b\w+\b", **options)
    pieces = HashingVectorizer(analyzer="char_wb", ngram_range=(3, 4), **options)
    union = FeatureUnion(
        [(n, make_pipeline(v, TfidfTransformer(sublinear_tf=True))) for n, v in (("w", words), ("p", pieces))]
    )
    table = union.fit_transform(texts)
    size = min(size, min(table.shape) - 1, len(texts) - 1)
    if size < 1:
        return np.zeros((len(texts), 1), np.float32)
    left, values, _ = randomized_svd(table, size, n_iter=1, random_state=0)
    space: Ints = (left * values).astype(np.float32)
    return space


WARN_SHARE = 0.08
"""Share of suspected label errors that is reported as a warning."""


def describe_suspects(
    suspects: Sequence[Suspect],
    checked: CheckedRows,
    *,
    method: str,
    review: str | None,
    noise: LabelNoise | None = None,
) -> list[Finding]:
    """Return one finding about all suspected errors; `review` is the review file, `noise` the estimated share of wrong labels."""
    if not suspects:
        return []
    part, rows, ids, labels = checked.part, checked.numbers, checked.ids, checked.labels
    share = len(suspects) / len(rows)
    sampled = "" if len(rows) == len(part) else f" (an even sample of {len(part):,})"
    first = suspects[0]
    kind = f"{labels.names[ids[first.row]]} instead of {labels.names[first.suggested]}"
    evidence = (
        f"{len(suspects):,} of {len(rows):,} train rows{sampled} have a suspected label error, found by cross-validation "
        f"({method}); the strongest: {part.source.where(int(rows[first.row]))}, {kind}."
    )
    step = f"Read them in {review}, correct the column label, and train with --labels_file {review}."
    advice = (step if review else "Write them out with `tunesmith audit --review_file review.csv` and read them.",)
    severity: Severity = "warning" if share >= WARN_SHARE else "info"
    numbers: dict[str, Any] = {"rows": len(suspects), "judged": len(rows), "share": share, "method": method}
    if noise is not None and noise.is_precise:
        evidence, numbers["label_noise"] = f"{evidence} About {noise.text()} are wrong.", noise.to_json()
        severity = "warning" if noise.is_noisy else severity
    return [Finding("suspicious_labels", severity, evidence, advice, numbers=numbers)]


def format_review(suspects: Sequence[Suspect], checked: CheckedRows, columns: Sequence[str]) -> bytes:
    """Return the review file: line, texts, label, suggested_label and reason, the most likely errors first."""
    lines = checked.part.source.line_numbers(checked.numbers)
    out = io.StringIO(newline="")
    table = csv.writer(out, lineterminator="\n")
    table.writerow(["line", *columns, "label", "suggested_label", "why"])
    for one in suspects:
        given, other = checked.labels.names[checked.ids[one.row]], checked.labels.names[one.suggested]
        why = f"a model fitted without this row predicts {other} with {one.other:.0%} and {given} with {one.given:.0%}"
        table.writerow([int(lines[one.row]), *checked.texts[one.row], given, other, why])
    return out.getvalue().encode("utf-8", "backslashreplace")
