"""What a service counts, in the text format that Prometheus reads."""

from __future__ import annotations

import threading
from collections import Counter

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Upper bounds of the histogram of answer times."""


class ServiceCounters:
    """Requests by route and status, their seconds, rows; any thread may count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._buckets = [0] * (len(SECONDS) + 1)
        self._seconds = 0.0
        self._rows = 0
        self._reloads = 0

    def count_request(self, route: str, status: int, seconds: float, rows: int = 0) -> None:
        """One answered request."""
        with self._lock:
            self._requests[route, status] += 1
            if route == "/predict" and status == 200:
                self._buckets[sum(seconds > bound for bound in SECONDS)] += 1
                self._seconds += seconds
                self._rows += rows

    def count_reload(self) -> None:
        """The model was replaced."""
        with self._lock:
            self._reloads += 1

    def text(self, *, waiting: int, ready: bool) -> str:
        """All counters."""
        with self._lock:
            lines = ["# TYPE tunesmith_requests_total counter"]
            lines += [
                f'tunesmith_requests_total{{route="{route}",status="{status}"}} {count}'
                for (route, status), count in sorted(self._requests.items())
            ]
            lines.append("# TYPE tunesmith_predict_seconds histogram")
            total = 0
            for bound, count in zip((*map(str, SECONDS), "+Inf"), self._buckets, strict=True):
                total += count
                lines.append(f'tunesmith_predict_seconds_bucket{{le="{bound}"}} {total}')
            lines += [f"tunesmith_predict_seconds_sum {self._seconds:.6f}", f"tunesmith_predict_seconds_count {total}"]
            single = {"rows_total": self._rows, "reloads_total": self._reloads}
            for name, value in single.items():
                lines += [f"# TYPE tunesmith_{name} counter", f"tunesmith_{name} {value}"]
            for name, value in {"waiting_requests": waiting, "ready": int(ready)}.items():
                lines += [f"# TYPE tunesmith_{name} gauge", f"tunesmith_{name} {value}"]
        return "\n".join(lines) + "\n"
