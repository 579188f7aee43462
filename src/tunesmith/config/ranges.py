"""The numbers and words that options accept, as types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal


@dataclass(frozen=True)
class Range:
    """The numbers that an option accepts; None: no limit but `check.LARGEST_NUMBER`. `share`: from 0, below 1."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    share: bool = False
    whole_from_one: bool = False
    """Below 1 a share, from 1 on a number of steps: 1.5 is neither."""


FromOne = Annotated[int, Range(at_least=1)]
FromZero = Annotated[int, Range(at_least=0)]
NotNegative = Annotated[float, Range(at_least=0)]
Positive = Annotated[float, Range(above=0)]
Share = Annotated[float, Range(share=True)]
Steps = Annotated[int | float, Range(above=0, whole_from_one=True)]
Seed = Annotated[int, Range(at_least=0, at_most=2**32 - 1)]  # NumPy takes no larger seed
GlueTaskName = Literal["cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb", "wnli"]
AutoOnOff = Literal["auto", "on", "off"]
