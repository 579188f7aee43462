"""Seeded hostile files: values of wrong types, links, pipes, devices, and huge, nested, truncated or corrupted content."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import pickle
import random
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

RAW = "@@raw:"
"""Prefix of strings that are written into JSON without quotes."""

DEEP = RAW + "[" * 100_000 + "]" * 100_000
VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 7, 10**9, -(10**9), 2**31, 2**53, 2**63, 10**30, 10**400),
    *(0.5, -0.0, 1e-320, 1e308, -1e308),
    *(f"{RAW}{word}" for word in ["NaN", "Infinity", "-Infinity", "+-e", "1e999", "-", "1_0", "0x10", "nul", "'a'"]),
    *(RAW, "", " ", "text", "1", "NaN", "null", "true", "..", "../..", "../watched/victim.txt", "~", "~root", "/"),
    *("/etc/passwd", "\n", "a\nb", "\r", "\x00", "\x1b[31m\x07", "\ud800", "\u202e\u2028\ufeff", "\U0001f600"),
    *("%s%n{0}{x!r}", "a" * 300, "x" * 1_000_000, "=1+1", "<script>alert(1)</script>", "evil/repo", "os.system"),
    *("__class__", "file:///etc/passwd"),
    *([], {}, [None], [[]], [1, "a"], {"a": 1}, {"": ""}, {"value": "x"}, {"__class__": "os"}, list(range(3000)), DEEP),
    *(RAW + '{"a":' * 50_000 + "1" + "}" * 50_000, RAW + "9" * 5_000, RAW + "1" * 400 + ".5", RAW + '"\\ud800"'),
)
NAMES = (
    *("..x", "~", "-rf", "a\nb", " ", "\u202e", "checkpoint-", "checkpoint-007", "checkpoint--1", "checkpoint-\u0663"),
    *("checkpoint-99999999999999999999", ".tmp-model-1", ".tmp-old-model-1", ".tmp-journal-x", "x" * 200, "model."),
    *("é", "pytorch_model.bin", "evil.py", "sitecustomize.py", "events.out", ".lock~", "checkpoint-3x", ".git"),
)


def pick_value(rng: random.Random) -> Any:
    """Return an invalid value."""
    return rng.choice(VALUES)


def dump_json(value: Any, **options: Any) -> bytes:
    """Return JSON with raw parts inserted; lone surrogates are escaped or sometimes written as bytes."""
    text = json.dumps(value, **options)
    while (start := text.find(f'"{RAW}')) >= 0:
        end = start + 1
        while text[end] != '"':
            end += 2 if text[end] == "\\" else 1
        text = text[:start] + json.loads(text[start : end + 1]).removeprefix(RAW) + text[end + 1 :]
    return text.encode("utf-8", "surrogatepass")


def mutate_tree(rng: random.Random, data: Any) -> Any:
    """Return the data with one random value, name or entry changed."""
    if isinstance(data, dict) and data and rng.random() < 0.9:
        key = rng.choice(list(data))
        kind = rng.random()
        if kind < 0.1:
            return {k: v for k, v in data.items() if k != key}
        if kind < 0.2:
            name = str(pick_value(rng))[:1000].removeprefix(RAW)
            return {**data, name: pick_value(rng)}
        if kind < 0.6 or not isinstance(data[key], (dict, list)):
            return {**data, key: pick_value(rng)}
        return {**data, key: mutate_tree(rng, data[key])}
    if isinstance(data, list) and data and rng.random() < 0.8:
        at = rng.randrange(len(data))
        return [*data[:at], mutate_tree(rng, data[at]), *data[at + 1 :]]
    return pick_value(rng)


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """Return the bytes truncated, flipped, shuffled, or in a different encoding."""
    at = rng.randrange(len(data) + 1)
    kinds: tuple[Callable[[], bytes], ...] = (
        lambda: data[:at],
        lambda: b"",
        lambda: data[at:],
        lambda: flip(rng, data, 1),
        lambda: flip(rng, data, 20),
        lambda: (
            data[:at]
            + rng.choice((b"\0", b"\xff\xfe", b"\xed\xa0\x80", b"\x1b[2J", b"\r", b'"', b"\n\n", b"[{", b"\x1a"))
            + data[at:]
        ),
        lambda: data + data,
        lambda: data.rstrip(b"\n"),
        lambda: b"\xef\xbb\xbf" + data,
        lambda: data.decode("latin-1").encode("utf-16"),
        lambda: data[:at] + b"[" * 200_000 + data[at:],
        lambda: data[:at] + b"x" * 3_000_000 + data[at:],
        lambda: data.replace(b"\n", b" "),
        lambda: bytes(rng.randrange(256) for _ in range(200)),
        lambda: gzip.compress(data),
        lambda: gzip.compress(bytes(50_000_000)),
        lambda: bytes(2_000_000),
        lambda: pickle.dumps(Payload()),
    )
    return rng.choice(kinds)()


def flip(rng: random.Random, data: bytes, count: int) -> bytes:
    """Flip some bits."""
    found = bytearray(data)
    for _ in range(count if found else 0):
        found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
    return bytes(found)


class Payload:
    """Object that creates a file when it is unpickled."""

    def __reduce__(self) -> Any:
        return (os.system, ("touch ../canary",))


def mutate_lines(rng: random.Random, data: bytes) -> bytes:
    """Return JSON Lines with a line changed, or with lines removed, repeated or reordered."""
    lines = data.splitlines(keepends=True)
    if not lines:
        return data
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(lines))
        kind = rng.random()
        if kind < 0.75:
            try:
                lines[at] = dump_json(mutate_tree(rng, json.loads(lines[at]))) + b"\n"
            except (ValueError, RecursionError):
                lines[at] = mutate_bytes(rng, lines[at])
        elif kind < 0.85:
            lines[at] = mutate_bytes(rng, lines[at])
        elif kind < 0.9:
            lines.insert(at, lines[at])
        elif kind < 0.95:
            rng.shuffle(lines)
        else:
            del lines[at]
        if not lines:
            break
    return b"".join(lines)


def mutate_cells(rng: random.Random, data: bytes) -> bytes:
    """Return a delimited file with one cell or name replaced."""
    lines = data.split(b"\n")
    at = 0 if rng.random() < 0.3 else rng.randrange(len(lines))
    mark = rng.choice((b",", b"\t"))
    cells = lines[at].split(mark)
    value = str(pick_value(rng)).removeprefix(RAW).encode("utf-8", "surrogatepass")
    quoted = b'"' + value.replace(b'"', b'""') + b'"' if rng.random() < 0.6 else value
    cells[rng.randrange(len(cells))] = quoted
    lines[at] = mark.join(cells)
    return b"\n".join(lines)


def mutate_text(rng: random.Random, data: bytes) -> bytes:
    """Return `name: value` lines (YAML) with a value or name replaced, or structure added."""
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    name = lines[at].partition(b":")[0]
    value = pick_value(rng)
    if rng.random() < 0.15:
        call = "!!python/object/apply:os.system ['touch ../canary']"
        value = RAW + rng.choice((call, "&a [*a]", "*a", "{a: {b: {c: {d: 1}}}}", "|\n  x", "- a"))
    lines[at] = name + b": " + dump_json(value)
    if rng.random() < 0.1:
        lines[at] = str(pick_value(rng)).removeprefix(RAW).encode("utf-8", "surrogatepass") + b": 1"
    return b"\n".join(lines)


def by_content(path: Path, rng: random.Random) -> None:
    """Change a file's content according to its type, or as bytes."""
    info = os.lstat(path)
    if not stat.S_ISREG(info.st_mode) or info.st_size > 10**8:  # an earlier change replaced it
        return
    data = path.read_bytes()
    ways = {".json": _as_json, ".jsonl": mutate_lines, ".csv": mutate_cells, ".tsv": mutate_cells}
    ways |= {".yaml": mutate_text, ".lock": _as_json}
    way = ways.get(path.suffix or path.name)
    made = way(rng, data) if way is not None and rng.random() < 0.75 else mutate_bytes(rng, data)
    path.write_bytes(reseal(made) if path.name == "MANIFEST.json" and rng.random() < 0.6 else made)


def reseal(data: bytes) -> bytes:
    """Return a manifest with a valid hash of itself, as an attacker could write it."""
    try:
        body = {k: v for k, v in json.loads(data).items() if k != "self"}
        body["self"] = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        return json.dumps(body).encode()
    except (ValueError, AttributeError, RecursionError):
        return data


def _as_json(rng: random.Random, data: bytes) -> bytes:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return mutate_bytes(rng, data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        found = mutate_tree(rng, found)
    return dump_json(found)


def by_node(path: Path, rng: random.Random, watched: Path) -> None:
    """Replace a file or folder with something else."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    targets = ("victim.txt", "folder", "folder/inner.json", "new.txt", "folder/new", "victim.json")
    kind = rng.randrange(10)
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        path.mkdir()
        (path / "inside").write_text("x")
    elif kind == 2:
        os.mkfifo(path)
    elif kind == 3:
        _make_socket(path)
    elif kind == 4:
        _make_device(path, rng)
    elif kind == 5:
        path.symlink_to(rng.choice(("/dev/zero", "/dev/stdin", "/proc/self/mem", path.name, "/dev/null", "/")))
    elif kind == 6:
        with path.open("wb") as file:
            file.truncate(rng.choice((5_000_000, 3 * 10**9, 2**40)))
    elif kind < 9:
        path.symlink_to(watched / rng.choice(targets))
    # otherwise it is removed


def _make_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # socket paths have at most 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def _make_device(path: Path, rng: random.Random) -> None:
    number = rng.choice(((1, 5), (1, 3), (1, 8), (5, 0)))  # zero, null, random, tty
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(*number))
    except PermissionError:
        os.mkfifo(path)


def mutate(path: Path, rng: random.Random, watched: Path) -> str:
    """Change one file and return a name for the change."""
    if not os.path.lexists(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        by_node(path, rng, watched)
        return f"{path.name}: put there"
    if path.is_dir() and not path.is_symlink():
        if rng.random() < 0.5:
            by_node(path, rng, watched)
            return f"{path.name}: replaced"
        name = rng.choice(NAMES)
        by_node(path / name, rng, watched)
        return f"{path.name}: {name!r} put in"
    if rng.random() < 0.3:
        by_node(path, rng, watched)
        return f"{path.name}: replaced"
    by_content(path, rng)
    return f"{path.name}: changed"
