"""Which pages watch what. One task follows a run however many pages show it; a slow page gets the newest state only."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from tunesmith.serve.follow import LiveRun
from tunesmith.serve.runs import RunIndex

log = logging.getLogger(__name__)

MAX_STREAMS = 100
HEARTBEAT_SECONDS = 15.0
INTERVAL_SECONDS = 0.7
BUSY_SHARE, LONGEST_SECONDS = 0.25, 4.0
"""The share of one core that following one run may take: a journal of a million lines is drawn less often (one update
of it takes 0.7 s), but never less often than every few seconds."""
VERDICT_SECONDS = 0.3
"""Spent at most on diagnosing runs of the list, each time it is made: 200 runs (5 s of CPU) have theirs in half a minute."""
KEEP_SECONDS = 120.0
MOST_KEPT = 6


class Channel:
    """The newest message of one source, and those who wait for the next."""

    def __init__(self, produce: Callable[[], bytes | None]) -> None:
        self._produce = produce
        self.message: bytes | None = None
        self.version = 0
        self.watchers = 0
        self.closed = False
        self.left_at = time.monotonic()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def watch(self) -> AsyncGenerator[bytes]:
        """Messages as they come, the newest first; an empty comment now and then keeps the connection known to be alive."""
        self.watchers += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._follow())
        seen = 0
        try:
            yield b"retry: 1000\n\n"
            while not self.closed:
                changed = self._changed
                if self.version > seen and self.message is not None:
                    seen = self.version
                    yield self.message
                    continue
                try:
                    await asyncio.wait_for(changed.wait(), HEARTBEAT_SECONDS)
                except TimeoutError:
                    yield b": still here\n\n"
        finally:
            self.watchers -= 1
            self.left_at = time.monotonic()

    async def _follow(self) -> None:
        while self.watchers:
            began = time.monotonic()
            try:
                message = await asyncio.to_thread(self._produce)
            except Exception:  # a damaged file must not end the following: it may be written again
                log.exception("a run could not be read")
                message = None
            spent = time.monotonic() - began
            if message is not None:
                self.message, self.version = message, self.version + 1
                before, self._changed = self._changed, asyncio.Event()
                before.set()
            await asyncio.sleep(max(INTERVAL_SECONDS, min(spent / BUSY_SHARE, LONGEST_SECONDS)))

    async def close(self) -> None:
        """Stops following the source and ends every stream of it."""
        self.closed = True
        self._changed.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


class Channels:
    """All channels: the list of runs, and one for each run that is looked at."""

    def __init__(self, index: RunIndex) -> None:
        self.index = index
        self._streams = 0
        self._rows: list[dict[str, Any]] | None = None
        self._list = Channel(self._poll_list)
        self._runs: dict[str, tuple[LiveRun, Channel]] = {}

    @property
    def is_full(self) -> bool:
        """Whether another page would be one too many."""
        return self._streams >= MAX_STREAMS

    def live(self, run_id: str) -> LiveRun | None:
        """The followed run; None unless a page showed it in the last minutes."""
        found = self._runs.get(run_id)
        return found[0] if found else None

    def stream_list(self) -> AsyncGenerator[bytes]:
        """Messages about the list of runs."""
        return self._counted(self._list)

    def stream_run(self, run_id: str) -> AsyncGenerator[bytes]:
        """Messages about one run, which must exist."""
        return self._counted(self._channel(run_id))

    async def close(self) -> None:
        """Ends all streams, so that the server can stop."""
        for channel in [self._list, *(c for _, c in self._runs.values())]:
            await channel.close()

    async def _counted(self, channel: Channel) -> AsyncGenerator[bytes]:
        self._streams += 1
        try:
            async with aclosing(channel.watch()) as messages:
                async for message in messages:
                    yield message
        finally:
            self._streams -= 1

    def _channel(self, run_id: str) -> Channel:
        now = time.monotonic()
        idle = sorted((c.left_at, k) for k, (_, c) in self._runs.items() if not c.watchers)
        crowd = len(idle) - MOST_KEPT
        for left_at, key in idle:
            if now - left_at > KEEP_SECONDS or crowd > 0:
                del self._runs[key]
                crowd -= 1
        if run_id not in self._runs:
            run = self.index.find(run_id)
            assert run is not None
            live = LiveRun(run)
            self._runs[run_id] = (live, Channel(lambda: _poll_run(live)))
        return self._runs[run_id][1]

    def _poll_list(self) -> bytes | None:
        rows = [row.to_json() for row in self.index.rows(seconds=VERDICT_SECONDS)]
        if rows == self._rows:
            return None
        self._rows = rows
        return encode_message("runs", rows)


def _poll_run(live: LiveRun) -> bytes | None:
    return encode_message("run", live.snapshot()) if live.poll() else None


def encode_message(kind: str, data: Any) -> bytes:
    """One Server-Sent Event. JSON is ASCII here and holds no line break, so no text can end the message."""
    return f"event: {kind}\ndata: {json.dumps(data, allow_nan=False, separators=(',', ':'))}\n\n".encode("ascii")
