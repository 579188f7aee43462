"""Events of a run, and findings about data and curves. The event log contains one JSON object per event.

Wall-clock values are only in fields named `time` or `seconds`; everything else is bit-identical after a resume.
A NaN or infinite number is written as null: a curve shows a gap, never a made-up 0.0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import partial
from typing import Any, Literal, get_args


@dataclass(frozen=True, slots=True)
class RunStarted:
    """The first event of a run. `step` is 0, or the step from which a resumed run continues."""

    run_id: str
    step: int
    num_steps: int
    steps_per_epoch: float
    num_epochs: float
    train_rows: int
    time: float = 0.0


@dataclass(frozen=True, slots=True)
class Resumed:
    """The run resumes from a verified checkpoint; `skipped` names each newer invalid one, with the reason."""

    step: int
    checkpoint: str
    skipped: tuple[str, ...] = ()
    time: float = 0.0


@dataclass(frozen=True, slots=True)
class EpochStarted:
    """An epoch starts. `epoch` counts from 0; `step` is the number of completed steps."""

    epoch: int
    step: int


@dataclass(frozen=True, slots=True)
class StepDone:
    """One optimizer step. `loss` and `grad_norm` are None if NaN or infinite; `epoch` includes the completed fraction."""

    step: int
    epoch: float
    loss: float | None
    grad_norm: float | None
    learning_rate: float
    examples: int
    tokens: int
    padded_tokens: int
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Metrics of one split after `step` steps. `split` is "validation", "train_sample" or a name that the user chose."""

    step: int
    epoch: float
    split: str
    metrics: dict[str, float | None]
    n: int
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RowsEvaluated:
    """The loss and prediction of each example (`metrics/evidence.py`); precedes the `Evaluated` of the same evaluation."""

    step: int
    split: str
    rows: str


@dataclass(frozen=True, slots=True)
class Improved:
    """The tracked metric is the best so far."""

    step: int
    metric: str
    value: float


@dataclass(frozen=True, slots=True)
class NonFinite:
    """The update of this step was skipped because of a NaN or infinite tensor. `rows` are row numbers of the training set."""

    step: int
    what: str
    tensor: str
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MicroBatchSplit:
    """After an out-of-memory error, the micro-batch was split and the step repeated; the result is the same."""

    step: int
    rows_before: int
    rows_after: int


@dataclass(frozen=True, slots=True)
class SafePoint:
    """A step and its evaluation are complete: the only moment at which a checkpoint may be written."""

    step: int


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint was published."""

    step: int
    path: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Note:
    """A message for the user."""

    step: int
    text: str


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The end of a run. `reason`: completed, early_stopping, SIGTERM, SIGINT, break, or the class name of an error."""

    step: int
    reason: str
    time: float = 0.0

    @property
    def finished(self) -> bool:
        """Return whether the run completed; otherwise it was stopped, or an error ended it."""
        return self.reason in ("completed", "early_stopping")


Event = (
    RunStarted
    | Resumed
    | EpochStarted
    | StepDone
    | Evaluated
    | RowsEvaluated
    | Improved
    | NonFinite
    | MicroBatchSplit
    | SafePoint
    | Saved
    | Note
    | RunEnded
)

WALL_CLOCK = ("time", "seconds")
"""Field names whose values differ between two otherwise identical runs."""

_BY_NAME = {cls.__name__: cls for cls in get_args(Event)}


def finite_or_none(value: float) -> float | None:
    """Return the value; None if it is NaN or infinite."""
    return value if math.isfinite(value) else None


def _clean(value: Any) -> Any:
    if isinstance(value, float):
        return finite_or_none(value)
    if isinstance(value, dict):
        return {k: _clean(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(v) for v in value]
    return value


def to_json(event: Event) -> dict[str, Any]:
    """Return a dict that `json.dumps(..., allow_nan=False)` accepts; the key "event" contains the class name."""
    kind = type(event)
    return {"event": kind.__name__, **{name: _clean(getattr(event, name)) for name in _FIELDS[kind]}}


def from_json(data: Any) -> Event:
    """Return the event that `to_json` wrote. Unknown fields (of newer versions) are ignored.

    An unknown event is a KeyError; a missing field or a wrong type is a ValueError.
    """
    if not isinstance(data, dict):
        raise ValueError("it is not a JSON object")
    cls = _BY_NAME[str(data["event"])]
    values = {}
    for name, (check, is_needed) in _FIELDS[cls].items():
        if name in data:
            try:
                values[name] = check(data[name])
            except (TypeError, ValueError):
                raise ValueError(f"{name} of {cls.__name__} is {str(data[name])[:40]!r}") from None
        elif is_needed:
            raise ValueError(f"{cls.__name__} has no {name}")
    event: Event = cls(**values)
    return event


def _of_type(kind: type | tuple[type, ...], value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, kind):
        raise ValueError
    return value


def _whole(value: Any, low: int = -(2**63), high: int = 2**63) -> int:
    if not low <= _of_type(int, value) < high:
        raise ValueError
    return int(value)


def _finite(value: Any) -> float | None:
    """Return a number; None for null, NaN and infinities."""
    try:
        return value if value is not None and math.isfinite(_of_type((int, float), value)) else None
    except OverflowError:
        return None


def _real(value: Any) -> float:
    found = _finite(value)
    return math.nan if found is None else found


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "int": _whole,
    "float": _real,
    "float | None": _finite,
    "str": partial(_of_type, str),
    "tuple[str, ...]": lambda value: tuple(_of_type(str, v) for v in value),
    "tuple[int, ...]": lambda value: tuple(_whole(v) for v in value),
    "dict[str, float | None]": lambda value: {k: _finite(v) for k, v in _of_type(dict, value).items()},
}
_FIELDS = {
    cls: {
        f.name: (
            partial(_whole, low=0, high=2**53) if f.name == "step" else _CHECKS[str(f.type)],
            f.default is MISSING and f.default_factory is MISSING,
        )
        for f in fields(cls)
    }
    for cls in get_args(Event)
}

# --- findings ---------------------------------------------------------------------------------------------------------

Severity = Literal["info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A fact about data or curves. `code` is stable, `evidence` a sentence with numbers, `advice` next actions, best first."""

    code: str
    severity: Severity
    evidence: str
    advice: tuple[str, ...] = ()
    confidence: float | None = None
    numbers: dict[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        """Return one line: severity, evidence, and the best action."""
        return f"{self.severity.capitalize()}: {' '.join((self.evidence, *self.advice[:1]))}"

    @property
    def doubt(self) -> str:
        """Return verdicts that are nearly as likely, such as ", or label noise"; empty if there are none."""
        return "".join(f", or {code.replace('_', ' ')}" for code in self.numbers.get("close") or ())

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict for `from_json`."""
        return {**asdict(self), "advice": list(self.advice)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Finding:
        """Return the finding that `to_json` wrote."""
        return cls(**{**data, "advice": tuple(data["advice"])})


def describe_findings(findings: list[Finding]) -> list[str]:
    """Return verdict and evidence of each finding, followed by its advice, one line each."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.code.replace('_', ' ')}{finding.doubt}: {finding.evidence}")
        lines += [f"  -> {advice}" for advice in finding.advice]
    return lines
