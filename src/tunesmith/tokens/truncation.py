"""What the model does not see of the rows, in words: tokens that were cut, and rows without any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TruncationCount:
    """What `max_length` cut off in one split. `by_side`: tokens cut of each text; None when the tokenizer cannot tell."""

    rows: int
    rows_cut: int
    tokens_cut: int
    by_side: tuple[int, ...] | None
    max_length: int
    unread: int = 0
    """Rows with a text so long that its end was never tokenized: the tokens in it are not counted."""

    def sentence(self, split: str) -> str:
        """One line for a person."""
        if not self.rows_cut:
            return f"{split}: no row is longer than {self.max_length} tokens"
        share = 100 * self.rows_cut / self.rows
        sides = f" ({' + '.join(str(n) for n in self.by_side)})" if self.by_side and len(self.by_side) > 1 else ""
        return (
            f"{split}: {self.rows_cut} of {self.rows} rows ({share:.1f}%) were cut at {self.max_length} tokens, "
            f"{'at least ' if self.unread else ''}{self.tokens_cut}{sides} tokens lost"
        )


def describe_empty(what: str, rows: Sequence[int]) -> str:
    """One line about rows without a token of their own."""
    count = "1 row has" if len(rows) == 1 else f"{len(rows):,} rows have"
    return (
        f"Warning: {what}: {count} no token of text (first: row {rows[0] + 1}): the model sees nothing of them. "
        "Remove them, or look for characters that the tokenizer drops."
    )
