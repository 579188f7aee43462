"""What a run will need, measured before it is started: time, memory, disk."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Forecast:
    """Seconds by phase, the most memory held at once, bytes left on disk; measured, then scaled to all rows and steps."""

    device: str
    steps: int
    peak_bytes: int
    disk_bytes: int
    start_seconds: float
    step_seconds: float
    evaluation_seconds: float
    finish_seconds: float

    @property
    def seconds(self) -> float:
        """All of it, from the start of the process to its end."""
        return self.start_seconds + self.step_seconds + self.evaluation_seconds + self.finish_seconds

    def to_json(self) -> dict[str, Any]:
        """A plain dict with the sum in it."""
        return {**asdict(self), "seconds": self.seconds}
