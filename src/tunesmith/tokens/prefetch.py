"""Items prepared by a thread before they are asked for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any


def prefetched(items: Iterator[Any], prepare: Callable[[Any], Any], ahead: int = 2) -> Iterator[Any]:
    """The items, each prepared by a thread up to `ahead` before it is asked for; errors arrive where the item would."""
    ready: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=ahead)
    stopped = threading.Event()

    def put(message: tuple[str, Any]) -> None:
        while not stopped.is_set():
            try:
                ready.put(message, timeout=0.1)
            except queue.Full:
                continue
            return

    def work() -> None:
        try:
            for item in items:
                if stopped.is_set():
                    return
                put(("item", prepare(item)))
            put(("end", None))
        except BaseException as error:
            put(("error", error))

    thread = threading.Thread(target=work, name="tunesmith-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            kind, value = ready.get()
            if kind == "end":
                return
            if kind == "error":
                raise value
            yield value
    finally:
        stopped.set()
        thread.join(timeout=5)
