"""Colours of a picture, light and dark. Every line colour has a contrast of at least 3:1 on its background."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

ThemeName = Literal["light", "dark"]


@dataclass(frozen=True, slots=True)
class Theme:
    """`runs` are the line colours, in order; the first two are training and validation when one run is drawn."""

    background: str
    text: str
    muted: str
    grid: str
    runs: tuple[str, ...]

    def side(self, name: Literal["train", "validation"]) -> str:
        """The colour of everything measured on training rows, or on validation rows."""
        return self.runs[0 if name == "train" else 1]

    def run(self, index: int) -> str:
        """The colour of the run at `index`; colours come again after the last."""
        return self.runs[index % len(self.runs)]


THEMES: dict[ThemeName, Theme] = {
    "light": Theme(
        background="#ffffff",
        text="#1c2430",
        muted="#5b6675",
        grid="#e6e9ee",
        runs=("#2b6cb0", "#c2410c", "#15803d", "#7e3aac", "#a16207", "#be185d", "#0f766e", "#4b5563"),
    ),
    "dark": Theme(
        background="#161b22",
        text="#e6edf3",
        muted="#9aa7b5",
        grid="#2a323d",
        runs=("#6cb2f7", "#ff9d5c", "#5fd08a", "#c99bf2", "#e3c04f", "#f78fb8", "#4fd1c5", "#a8b3c0"),
    ),
}


def darken(svg: bytes) -> bytes:
    """A picture drawn in the light theme, in the colours of the dark one."""
    light, dark = THEMES["light"], THEMES["dark"]
    pairs = [(light.background, dark.background), (light.text, dark.text), (light.muted, dark.muted)]
    pairs += [(light.grid, dark.grid), *zip(light.runs, dark.runs, strict=True)]
    colors = {a.encode(): b.encode() for a, b in pairs}
    return re.sub(rb"#[0-9a-f]{6}\b", lambda found: colors.get(found[0], found[0]), svg)
