"""Export of a trained model as an ONNX graph, measured against the original before it is published.

int8 weights are quantized for each tensor, then for each channel if that is not within the tolerance. If neither is, nothing is
published.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tunesmith import __version__
from tunesmith.config.load import load_config
from tunesmith.data.batches import padding_of
from tunesmith.data.rows import input_columns
from tunesmith.data.tokenize import encode_texts
from tunesmith.errors import ConfigError, NumericsError, ResourceError, TunesmithError, short_text
from tunesmith.files import disk_error, make_folder, write_new
from tunesmith.inference.model_folder import (
    GRAPH_FILE,
    INSTALL_RUNTIME,
    GraphFacts,
    ModelFacts,
    describe_model,
    model_folder_of,
)
from tunesmith.inference.onnx_network import GraphNetwork, load_onnx
from tunesmith.inference.predictor import Predictor
from tunesmith.inference.tables import probabilities_of, remove_leftovers
from tunesmith.inference.torch_network import TorchNetwork
from tunesmith.labels import LabelMap, Task, choose_labels
from tunesmith.metrics.paired import PairedResult, compare_predictions
from tunesmith.metrics.table import Score, greater_is_better
from tunesmith.models.load import load_model
from tunesmith.pipeline.inputs import read_run_data
from tunesmith.runs.folder import RunDir, publish_folder

MAX_ROWS = 5_000
"""Rows the export is measured on, at most."""
FLOAT_LIMIT = 1e-4
SIGNIFICANCE = 0.05
Logits = npt.NDArray[np.float32]
Say = Callable[[str], None]


@dataclass(frozen=True)
class EvidenceRows:
    """Labeled texts of one split, by column."""

    split: str
    texts: list[list[str]]
    labels: npt.NDArray[Any]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Tolerance:
    """The largest drop of the score that int8 may cause, and the minimum share of equal labels (not for regression)."""

    max_drop: float = 0.005
    min_agreement: float = 0.99


@dataclass(frozen=True)
class Checked:
    """One candidate compared with the original. `refused` is the reason not to publish it, or None."""

    name: str
    rows: int
    split: str
    max_difference: float
    agreement: float
    score: Score
    original: Score
    paired: PairedResult
    refused: str | None


@dataclass
class Export:
    """An export. `tried` are the candidates that were measured, the published one last; sizes are in bytes."""

    to: str
    network: TorchNetwork
    facts: ModelFacts
    source: Path
    output: Path
    rows: EvidenceRows
    may: Tolerance
    say: Say
    tried: list[Checked] = field(default_factory=list)
    size: int = 0

    @property
    def checked(self) -> Checked:
        """The published candidate."""
        return self.tried[-1]

    def __post_init__(self) -> None:
        self.original_size = _weight_bytes(self.source)
        self.int8 = self.to.endswith("int8")
        self.model = load_model(self.source, self.facts.labels).model.eval()  # without our speedups, for tracing
        self.graph = _graph_facts(self.to, self.network, self.model.config)
        self.say(f"Measuring on {len(self.rows):,} {self.rows.split} rows.")
        self.original = logits_of(self.network, self.rows.texts)

    def fill(self, folder: Path) -> None:
        """Write the complete folder; raise a NumericsError if no candidate is good enough."""
        describe_model(self.model, self.network.tokenizer, self.facts)(folder)
        file = folder / GRAPH_FILE
        file.parent.mkdir()
        self.say("Writing the ONNX graph.")
        for name in self._write_candidates(file, folder / "scratch"):
            self.tried.append(self._measure(name, folder))
            if self.checked.refused is None:
                break
        else:
            reasons = "; ".join(f"{one.name}: {one.refused}" for one in self.tried)
            fix = "Use --to onnx, or allow more with --max_drop and --min_agreement."
            raise NumericsError(f"no {self.to} export is as good as the original ({reasons})", fix=fix)
        shutil.rmtree(folder / "scratch", ignore_errors=True)
        self.size = _weight_bytes(file.parent)
        card = self.source / "README.md"
        start = card.read_text(encoding="utf-8") if card.is_file() else f"# {self.to} export\n"
        write_new(folder / "README.md", self._card(start).encode())
        write_new(folder / "requirements.txt", runtime_requirements().encode())
        measured = {
            "tried": [asdict(one) for one in self.tried],
            "bytes": self.size,
            "original_bytes": self.original_size,
        }
        replace(self.graph, measured=measured).write(folder)

    def _write_candidates(self, file: Path, scratch: Path) -> Iterator[str]:
        """Write one graph after the other to `file` and yield its name."""
        names = ["input_ids", "attention_mask", *(["token_type_ids"] if self.graph.has_types else [])]
        if not self.int8:
            write_onnx(self.model, names, file)
            yield self.to
            return
        scratch.mkdir()
        write_onnx(self.model, names, scratch / "float.onnx")
        _strip_shapes(scratch / "float.onnx")
        for name, quantize in QUANTIZATIONS.items():
            quantize(scratch / "float.onnx", file)
            yield name

    def _measure(self, name: str, folder: Path) -> Checked:
        import torch

        graph = load_onnx(folder / GRAPH_FILE, torch.get_num_threads())
        found = logits_of(GraphNetwork(folder, self.graph, graph, self.facts.long_texts), self.rows.texts)
        may = self.may if self.int8 else None
        checked = check_candidate(name, found, self.original, self.rows, self.facts, may)
        self.say(f"{name}: {checked.refused or 'accepted'}")
        return checked

    def _card(self, model_card: str) -> str:
        """Return the model's card with its metadata, followed by the measurements and how to use the export."""
        model_card = re.sub(r"(?m)^library_name: .*$", "library_name: onnx", model_card, count=1)
        return CARD.format(
            start=model_card.partition("## Use\n")[0].rstrip(),
            format=self.to,
            rows=len(self.rows),
            split=self.rows.split,
            table=_table_of(self.tried),
            size=self.size / 1e6,
            original_size=self.original_size / 1e6,
            install=INSTALL_RUNTIME,
            folder=self.output.name,
            example=self.facts.example,
        )


def export_model_to(
    path: str | Path,
    to: str,
    output: Path,
    rows: EvidenceRows,
    *,
    may: Tolerance = Tolerance(),  # noqa: B008
    say: Say = lambda line: None,
) -> Export:
    """Write `output`, complete or not at all. Raise a NumericsError if no candidate is good enough."""
    predictor = Predictor.load(path, use_cpu=True)
    network = predictor.network
    if not isinstance(network, TorchNetwork):
        raise ConfigError("is an exported folder", where=str(path), fix="Pass the run, or its model/ folder.")
    source = model_folder_of(path).folder
    facts = replace(predictor.facts, max_length=network.max_length)
    export = Export(to, network, facts, source, output, rows, may, say)
    needed = export.original_size * (3 if export.int8 else 1)
    make_folder(output.parent)
    remove_leftovers(output)
    try:
        publish_folder(output, export.fill, {"kind": "export"}, bytes_needed=needed)
    except TunesmithError:
        raise
    except Exception as error:  # onnx and onnxruntime report a full disk with exceptions that have no errno
        if shutil.disk_usage(output.parent).free > needed and "space" not in str(error):
            raise
        raise disk_error(OSError(errno.ENOSPC, ""), output, needed) from error
    return export


def _graph_facts(to: str, network: TorchNetwork, config: Any) -> GraphFacts:
    tokenizer = network.tokenizer
    if not getattr(tokenizer, "is_fast", False):
        problem = f"{type(tokenizer).__name__} has no tokenizer.json, which is required without transformers"
        raise ConfigError(problem, fix="Serve the model folder itself.")
    padding = padding_of(tokenizer)
    segments = getattr(config, "type_vocab_size", None)
    return GraphFacts(
        format=to,
        max_length=network.max_length,
        vocab_size=network.vocab_size,
        has_types=network.has_types,
        pairs=not network.has_types or not segments or segments > max(tokenizer("a", "a")["token_type_ids"]),
        pad_token_id=padding.pad_token_id,
        pad_token_type_id=padding.pad_token_type_id,
        padding_side=padding.side,
        truncation_side=tokenizer.truncation_side,
        split_special_tokens=bool(tokenizer.split_special_tokens),
    )


def _weight_bytes(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.iterdir() if f.suffix in (".onnx", ".safetensors", ".data"))


# Rows to measure on


def rows_of_run(run: RunDir, facts: ModelFacts) -> EvidenceRows:
    """Read labeled test rows, or validation rows if there are none, from the files in run.yaml."""
    config = load_config(run.config_file)
    try:
        bundle = read_run_data(config, {}, lambda what, done, total: None, need_weights=False).bundle
    except ConfigError as error:
        problem = f"the rows of the run cannot be read again ({error.problem})"
        raise ConfigError(problem, where=str(run.path), fix="Set --test_file.") from None
    assert facts.text_columns is not None
    for split in ("test", *(name for name in bundle.splits if name.startswith("validation"))):
        if (part := bundle.splits.get(split)) is not None:
            texts = [part[name][:] for name in input_columns(facts.text_columns)]
            if len(rows := _labeled(split, texts, np.asarray(part["labels"]))):
                return rows
    raise ConfigError("has no labeled test or validation row", where=str(run.path), fix="Set --test_file.")


def rows_of_file(test_file: str, facts: ModelFacts) -> EvidenceRows:
    """Read rows from a file: for a model folder that is not in its run."""
    rows = _labeled("test", *facts.read_labeled(Path(test_file)))
    if not len(rows):
        raise ConfigError("has no labeled row", where=test_file)
    return rows


def _labeled(split: str, texts: list[list[str]], labels: npt.NDArray[Any]) -> EvidenceRows:
    known = np.isfinite(labels) if labels.dtype.kind == "f" else labels >= 0
    known = known.all(axis=1) if known.ndim == 2 else known
    rows = np.flatnonzero(known)[:MAX_ROWS]
    return EvidenceRows(split, [[column[k] for k in rows] for column in texts], labels[rows])


# Comparison with the original


def logits_of(network: TorchNetwork | GraphNetwork, texts: list[list[str]]) -> Logits:
    """Return the logits of texts in memory, in order."""
    rows, _ = encode_texts(network.encoder, texts, has_types=network.has_types)
    return network.logits(rows)


def check_candidate(
    name: str, found: Logits, original: Logits, rows: EvidenceRows, facts: ModelFacts, may: Tolerance | None
) -> Checked:
    """Compare logits with those of the original model. `may` is None for float, which must be equal to FLOAT_LIMIT."""
    labels = facts.labels
    ours, theirs = probabilities_of(original, labels.task), probabilities_of(found, labels.task)
    scale = np.maximum(1.0, np.abs(ours)) if labels.task is Task.REGRESSION else 1.0
    apart = np.abs(theirs - ours) / scale
    suite = facts.suite()
    metric = suite.metric_for_best_model
    scored = np.nan_to_num(found)
    checked = Checked(
        name=name,
        rows=len(rows),
        split=rows.split,
        max_difference=float(np.nanmax(apart)) if np.isfinite(apart).any() else float("inf"),
        agreement=float((_decisions(theirs, labels) == _decisions(ours, labels)).mean()),
        score=suite.compute_with_intervals(scored, rows.labels)[metric],
        original=suite.compute_with_intervals(original, rows.labels)[metric],
        paired=compare_predictions(original, scored, rows.labels, task=labels.task, metric=metric),
        refused="some logits are NaN or inf" if not np.isfinite(found).all() else None,
    )
    if checked.refused is None:
        reason = _float_problem(checked) if may is None else _quantized_problem(checked, labels.task, may)
        checked = replace(checked, refused=reason)
    return checked


def _float_problem(checked: Checked) -> str | None:
    if checked.max_difference > FLOAT_LIMIT:
        return f"probabilities differ by up to {checked.max_difference:.1e}; the limit is {FLOAT_LIMIT:.0e}"
    return f"{(1 - checked.agreement):.2%} of the labels differ" if checked.agreement < 1 else None


def _quantized_problem(checked: Checked, task: Task, may: Tolerance) -> str | None:
    paired = checked.paired
    if paired.difference is None or paired.p_value is None:
        return f"{paired.metric} is undefined on these {checked.rows} rows"
    loss = -paired.difference if greater_is_better(paired.metric) else paired.difference
    if loss > may.max_drop:
        return f"{paired.metric} drops by {loss:.4f}; --max_drop is {may.max_drop:g}"
    if loss > 0 and paired.p_value < SIGNIFICANCE:
        return f"{paired.metric} drops by {loss:.4f}, which is significant (p = {paired.p_value:.3f})"
    if checked.agreement < may.min_agreement and task is not Task.REGRESSION:
        return f"{checked.agreement:.2%} of the labels are equal; --min_agreement is {may.min_agreement:g}"
    return None


def _decisions(probabilities: npt.NDArray[np.float64], labels: LabelMap) -> npt.NDArray[Any]:
    """Return what must agree: the class, each label, or the rounded value."""
    if labels.task is Task.REGRESSION:
        return np.asarray(np.round(probabilities[:, 0], 3))
    return np.asarray(choose_labels(probabilities, labels.task, labels.thresholds)).reshape(-1)


def _table_of(candidates: list[Checked]) -> str:
    """Return the candidates as a Markdown table."""
    lines = [
        "| Candidate | Max. difference of probabilities | Equal labels | Score | Original | Difference | Result |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in candidates:
        paired = one.paired
        gap = "" if paired.difference is None else f"{paired.difference:+.4f} [{paired.low:+.4f}, {paired.high:+.4f}]"
        lines.append(
            f"| {one.name} | {one.max_difference:.1e} | {one.agreement:.2%} | {one.score.text()} | {one.original.text()} | "
            f"{gap} | {one.refused or 'accepted'} |"
        )
    return "\n".join(lines)


# Quantization


def _strip_shapes(graph: Path) -> None:
    """Remove stored shapes, which are wrong after the quantizer has transposed weights; they are inferred again."""
    import onnx

    model = onnx.load(str(graph))
    del model.graph.value_info[:]
    onnx.save(model, str(graph))


def _quantize(graph: Path, to: Path, *, per_channel: bool) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with _quiet():
        # reduce_range (7-bit weights): CPUs without VNNI add two u8 x s8 products in 16 bits, which 8 bits overflow.
        quantize_dynamic(
            graph,
            to,
            op_types_to_quantize=["MatMul", "Gemm"],
            per_channel=per_channel,
            reduce_range=True,
            weight_type=QuantType.QInt8,
        )


QUANTIZATIONS: dict[str, Callable[[Path, Path], None]] = {
    "dynamic": partial(_quantize, per_channel=False),
    "dynamic per channel": partial(_quantize, per_channel=True),
}
"""The int8 candidates, in the order to try."""


# Card and requirements


CARD = """\
{start}

## Export: {format}

Measured on {rows:,} {split} rows before this folder was written. Candidates are tried in this order until one is accepted.
Differences are export minus original, with a 95% interval of a paired test.

{table}

Size: {size:,.1f} MB (original {original_size:,.1f} MB).

## Use

{install}

```python
from tunesmith import Predictor

Predictor.load("{folder}").predict({example})
```
"""


RUNTIME_PACKAGES = ("numpy", "onnxruntime", "prometheus-client", "starlette", "tokenizers", "uvicorn")
UNUSED_PACKAGES = ("huggingface-hub",)
"""tokenizers requires it for downloads, which are not used."""


def runtime_requirements() -> str:
    """Return a requirements.txt for `pip install --no-deps` with all packages that an export needs, at their versions here."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    pins: dict[str, str] = {}
    left = list(RUNTIME_PACKAGES)
    while left:
        name = canonicalize_name(left.pop())
        if name in pins or name in UNUSED_PACKAGES:
            continue
        pins[name] = version(name)
        needed = [Requirement(text) for text in requires(name) or ()]
        left += [each.name for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
    lines = [
        "# pip install --no-deps --no-compile -r requirements.txt",
        f"tunesmith=={__version__}",
        *(f"{name}=={pins[name]}" for name in sorted(pins)),
    ]
    return "\n".join(lines) + "\n"


SAMPLE_SHAPE = (3, 13)
"""Rows and tokens of the traced batch: both above 1, since a size of 1 would be taken for a constant."""


def write_onnx(model: Any, input_names: list[str], path: Path) -> None:
    """Write the graph of the model's logits. The weights are inside the file below 2 GB."""
    try:
        import onnxscript  # noqa: F401
        from transformers.exporters.configs import OnnxConfig
        from transformers.exporters.exporter_onnx import OnnxExporter
    except ImportError as error:
        fix = "Run: pip install 'tunesmith[export]'"
        raise ResourceError(f"exporting needs {error.name or 'onnxscript'}, which is not installed", fix=fix) from None
    import torch

    rows, length = SAMPLE_SHAPE
    ids = torch.arange(rows * length).reshape(rows, length) % max(model.config.vocab_size - 10, 2) + 1
    inputs = {name: torch.zeros_like(ids) for name in input_names}
    inputs["input_ids"] = ids.clamp(max=model.config.vocab_size - 1)
    inputs["attention_mask"] = (torch.arange(length)[None] < torch.tensor([[length], [7], [4]])).long()
    model.eval()
    with _quiet(), torch.no_grad():
        try:
            exporter: Any = OnnxExporter
            program = exporter().export(model, inputs, config=OnnxConfig(dynamic=True))
        except Exception as error:  # whatever the tracer raises, the model cannot be exported
            problem = f"{type(model).__name__} cannot be written as ONNX ({short_text(error)})"
            raise ConfigError(problem, fix="Serve the model folder itself, or report the architecture.") from error
        program.save(str(path))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporters, which print and warn about their internals."""
    logging.disable(logging.WARNING)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
