"""What a run will need, measured before it is started: time, memory, disk."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

SHORT_RUN = 0.2


@dataclass(frozen=True)
class Forecast:
    """Seconds by phase, the most memory held at once, bytes left on disk; measured, then scaled to all rows and steps."""

    device: str
    steps: int
    peak_bytes: int
    disk_bytes: int
    start_seconds: float
    once_seconds: float
    step_seconds: float
    evaluation_seconds: float
    finish_seconds: float

    @property
    def seconds(self) -> float:
        """All of it, from the start of the process to its end."""
        begin = self.start_seconds + self.once_seconds
        return begin + self.step_seconds + self.evaluation_seconds + self.finish_seconds

    @property
    def is_short(self) -> bool:
        """Whether starting takes much of it. A machine that has done so once does it faster: files and kernels are cached."""
        return self.start_seconds + self.once_seconds > SHORT_RUN * self.seconds

    def to_json(self) -> dict[str, Any]:
        """A plain dict with the sum in it."""
        return {**asdict(self), "seconds": self.seconds}
