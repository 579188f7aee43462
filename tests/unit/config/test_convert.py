"""Text becomes the type of its option, or a sentence says why not."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from tunesmith.config.load import convert, describe


@pytest.mark.parametrize(
    ("value", "hint", "wanted"),
    [
        ("1e-5", float, 1e-5),
        ("5E-5", float, 5e-5),
        (".5", float, 0.5),
        (3, float, 3.0),
        ("8", int, 8),
        ("-1", int, -1),
        ("10_000", int, 10_000),
        ("no", str, "no"),
        ("0123", str, "0123"),
        ("null", str | None, "null"),
        ("", str | None, None),
        ("none", int | None, None),
        ("Null", bool | None, None),
        ("none", Literal["minimal", "none"] | None, "none"),
        ("YES", bool, True),
        ("off", bool, False),
        (True, bool, True),
        (False, Literal["no", "steps"], "no"),
        (True, Literal["auto", "on", "off"], "on"),
        ("0.1", int | float, 0.1),
        ("100", int | float, 100),
        ("true", bool | str | None, True),
        ("runs/a", bool | str | None, "runs/a"),
        ("a, b", tuple[str, ...], ("a", "b")),
        ("", tuple[str, ...], ()),
        (["a,b"], tuple[str, ...], ("a,b",)),
        ("balanced", Literal["balanced"] | tuple[float, ...] | None, "balanced"),
        (["1", "2.5"], Literal["balanced"] | tuple[float, ...] | None, (1.0, 2.5)),
        ('{"power": 2, "x": "1e-7"}', dict[str, Any], {"power": 2, "x": 1e-7}),
        ({"cycle": "true"}, dict[str, Any], {"cycle": True}),
    ],
)
def test_a_value_becomes_the_type_of_its_option(value: Any, hint: Any, wanted: Any) -> None:
    found = convert(value, hint)
    assert found == wanted
    assert type(found) is type(wanted)


@pytest.mark.parametrize(
    ("value", "hint", "message"),
    [
        ("0123", int, "expected a whole number, got '0123'. Write 123"),
        ("1e3", int, "expected a whole number, got '1e3'. Write 1000"),
        (8.0, int, "expected a whole number, got 8.0. Write 8"),
        ("8.5", int, "expected a whole number, got '8.5'"),
        (True, int, "expected a whole number, got True"),
        (True, float, "expected a number, got True"),
        ("0x10", int, "expected a whole number, got '0x10'"),
        ("nan", float, "expected a number, got 'nan'"),
        (float("inf"), float, "expected a number, got inf"),
        ("0,5", float, "expected a number, got '0,5'"),
        ("007", float, "expected a number, got '007'. Write 7"),
        ("maybe", bool, "expected true or false, got 'maybe'"),
        (1, bool, "expected true or false, got 1"),
        (None, float, "expected a number, got nothing"),
        (5, str, "expected text, got 5"),
        ("x", Literal["no", "steps", "epoch"], "expected no, steps or epoch, got 'x'"),
        ([1, "x"], tuple[float, ...], "expected a list of numbers, got [1, 'x']"),
        ([["a"]], tuple[str, ...], "expected a list of names, got [['a']]"),
        ("{", dict[str, Any], "expected a mapping of names to numbers, got '{'"),
        ({"a": {"b": 1}}, dict[str, Any], "expected a mapping of names to numbers, got {'a': {'b': 1}}"),
        ("9" * 5000, int, "expected a whole number, got '" + "9" * 76 + "..."),
    ],
)
def test_a_wrong_value_is_refused_with_what_was_expected(value: Any, hint: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        convert(value, hint)
    assert str(caught.value) == message


def test_a_type_is_described_in_words() -> None:
    assert describe(int | float | None) == "a number"
    assert describe(Literal["balanced"] | tuple[float, ...] | None) == "balanced or a list of numbers"
