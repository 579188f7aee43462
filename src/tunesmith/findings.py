"""A finding: something true about the data or the curves, with its evidence and what to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """`code` is stable and short; `evidence` is a sentence with numbers; `advice` are next actions, best first."""

    code: str
    severity: Severity
    evidence: str
    advice: tuple[str, ...] = ()
    confidence: float | None = None
    numbers: dict[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        """One line for a person: how serious, what, and the best thing to do."""
        return f"{self.severity.capitalize()}: {' '.join((self.evidence, *self.advice[:1]))}"

    @property
    def doubt(self) -> str:
        """Verdicts that are nearly as likely: ", or label noise"; "" if there are none."""
        return "".join(f", or {code.replace('_', ' ')}" for code in self.numbers.get("close") or ())

    def to_json(self) -> dict[str, Any]:
        """A plain dict; `from_json` gives an equal finding back."""
        return {
            "code": self.code,
            "severity": self.severity,
            "evidence": self.evidence,
            "advice": list(self.advice),
            "confidence": self.confidence,
            "numbers": self.numbers,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Finding:
        """The finding that `to_json` wrote."""
        return cls(**{**data, "advice": tuple(data["advice"])})


def describe_findings(findings: list[Finding]) -> list[str]:
    """Return verdict and evidence of each finding, followed by its advice, one line each."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.code.replace('_', ' ')}{finding.doubt}: {finding.evidence}")
        lines += [f"  -> {advice}" for advice in finding.advice]
    return lines
