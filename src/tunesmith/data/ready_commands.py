"""Commands that answer a question about a file, each one line to copy. `as_typed` adapts them to the user's own command."""

from __future__ import annotations

import re
import shlex
from codecs import BOM_UTF8
from collections.abc import Sequence

_TRAIN = "tunesmith train --train_file "
_READY = re.compile(re.escape(_TRAIN) + r"('[^']*'|\S+)( --\w+)?")
_CALL = re.compile(_READY.pattern.removesuffix("( --\\w+)?") + r"(?: --\w+(?: (?!--)(?:'[^']*'|[^\s(]+))?)*")
_SWITCHES = {"true": "True", "false": "False"}
_LABELLING = ("predict", "evaluate")
_HOW_TO_READ = (" --encoding", " --delimiter", " --quoting", " --sheet_name")
"""The flags of train that predict and evaluate take as well."""


def train_with(origin: str, flags: str = "") -> str:
    """The command on the same file with more flags."""
    return f"{_TRAIN}{shlex.quote(origin)} {flags}".rstrip()


def train_after(change: str, origin: str, *, suffix: str = ".csv") -> str:
    """The command on a copy of the file that the program `change` writes."""
    given, file = shlex.quote(origin), f"named{suffix}"
    made = f"zcat {given} | {change}" if origin.endswith((".gz", ".gzip")) else f"{change} {given}"
    return f"{made} > {file} && {_TRAIN}{file}"


def train_with_header(names: Sequence[str], delimiter: str, origin: str, *, replace: bool) -> str:
    """The command on a copy with these column names in its first line, or in front of it."""
    line = ("\\t" if delimiter == "\t" else delimiter).join(names)
    change = f"sed '1s/.*/{line}/'" if replace else f"sed {_without_mark(origin)}'1i {line}'"
    return train_after(change, origin, suffix=".tsv" if delimiter == "\t" else ".csv")


def _without_mark(origin: str) -> str:
    """The sed expression that removes a byte order mark, which would end up below the new header."""
    try:
        with open(origin, "rb") as file:
            return r"-e '1s/^\xEF\xBB\xBF//' -e " if file.read(3) == BOM_UTF8 else ""
    except OSError:
        return ""


def rewrite_csv(reader: str) -> str:
    """A program for `train_after` that writes the rows as RFC 4180, read with these arguments of `csv.reader`."""
    code = f"import csv, sys; csv.writer(sys.stdout).writerows(csv.reader(open(sys.argv[1], newline=str()), {reader}))"
    return f"python -c {shlex.quote(code)}"


def as_typed(message: str, words: Sequence[str]) -> str:
    """The message with its commands in the user's own form: `words` replace the plain call of train."""

    def retype(found: re.Match[str]) -> str:
        flag = found[2] or ""
        if words[0] in _LABELLING and flag and flag not in _HOW_TO_READ:
            return found[0]
        if not found[1].startswith("named."):
            return f"tunesmith {shlex.join(words)}{flag}"
        values = {word: word.rpartition("=")[2] for word in words}
        old = next((word for word, value in values.items() if _is_changed(shlex.quote(value), message)), None)
        if old is None:  # the file is named in a config
            return f"tunesmith {shlex.join(words)} --train_file {found[1]}{flag}"
        new = old.removesuffix(values[old]) + found[1]
        return f"tunesmith {shlex.join([new if word == old else word for word in words])}{flag}"

    return _READY.sub(retype, message) if words else message


def _is_changed(file: str, message: str) -> bool:
    """Whether a command of `train_after` in the message reads this file."""
    return f" {file} > named." in message or f"zcat {file} | " in message


def as_called(message: str, *, in_memory: bool) -> str:
    """The message with ready commands as calls of `finetune`: `finetune(data, label_column_name="queue")`."""

    def call(found: re.Match[str]) -> str:
        file, *words = shlex.split(found[0])[3:]
        if file.startswith("named."):
            return found[0]
        given = ["data" if in_memory else repr(file)]
        for at, word in enumerate(words):
            if word.startswith("--"):
                value = words[at + 1] if at + 1 < len(words) and not words[at + 1].startswith("--") else "true"
                given.append(f"{word[2:]}={_SWITCHES.get(value, repr(value))}")
        return f"finetune({', '.join(given)})"

    return _CALL.sub(call, message)
