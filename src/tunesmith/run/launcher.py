"""What a launcher (torchrun, accelerate launch) said about this process, checked before anything is made of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from tunesmith.errors import ConfigError

_FIX = (
    "Start it with torchrun or accelerate launch, which set these variables, or unset RANK, LOCAL_RANK and WORLD_SIZE."
)


@dataclass(frozen=True)
class Launch:
    """This process is rank `rank` of `world`."""

    rank: int
    world: int


def read_launch(environ: Mapping[str, str] | None = None) -> Launch:
    """Rank and number of ranks; 0 of 1 without a launcher. A ConfigError for variables that cannot be meant."""
    given = os.environ if environ is None else environ
    world = _number(given, "WORLD_SIZE", 1, low=1)
    rank = _number(given, "RANK", 0)
    _number(given, "LOCAL_RANK", 0)
    _number(given, "MASTER_PORT", 0, high=65535)
    if rank >= world:
        raise ConfigError(f"RANK is {rank} and WORLD_SIZE {given.get('WORLD_SIZE', 'not set')}", fix=_FIX)
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if not given.get(name)]
    if world > 1 and missing:
        raise ConfigError(f"WORLD_SIZE is {world}, but {', '.join(missing)} is not set", fix=_FIX)
    return Launch(rank, world)


def _number(given: Mapping[str, str], name: str, default: int, *, low: int = 0, high: int = 1_000_000) -> int:
    text = given.get(name, "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and low <= int(text) <= high):
        raise ConfigError(f"the variable {name} is {text[:60]!r}, not a number from {low}", fix=_FIX)
    return int(text)
