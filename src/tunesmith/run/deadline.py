"""Work of somebody else's code that may never come back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def answer_within(seconds: float, work: Callable[[], T]) -> T:
    """What `work` gives or raises; a TimeoutError after so many seconds, whatever it hangs in.

    The call runs in a daemon thread: Ctrl-C is heard meanwhile, and an endless call cannot hold the process.
    """
    box: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            box.append(work())
        except BaseException as error:  # a panic of a Rust library is no Exception
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True, name="tunesmith-answer")
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure[0]
    if not box:
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    return box[0]
