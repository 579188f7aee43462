"""Time limits that also work on a busy machine."""

from __future__ import annotations

import os
from pathlib import Path


def patient(seconds: float) -> float:
    """Scale a time limit for an idle machine by the current load."""
    running = int(Path("/proc/loadavg").read_text().split()[3].split("/")[0])
    load = max(os.getloadavg()[0], running)
    return seconds * max(1.0, 2.0 * load / (os.cpu_count() or 1))
