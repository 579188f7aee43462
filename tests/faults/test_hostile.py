"""Rows 29 to 31: malicious files are refused in one line or loaded correctly, quickly, without running code or opening sockets.

Row 32 (config files) is in tests/unit/config/test_load.py; row 34 is banned by ruff (pyproject.toml).
"""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import struct
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from data_loading import load_data
from faults.trials import Ended, engine, new_seed, run, size
from patience import patient
from tunesmith.data.read import read_source
from tunesmith.errors import ConfigError, DataError
from tunesmith.models.files import read_tensor_header
from unit.data.messy_files import pick, sentence, sheet, table

SECONDS = 6.0
"""The target is 2 s on an idle machine; CI shares its cores."""


@pytest.fixture
def model(lab: Any) -> Iterator[Path]:
    """Return a copy of a good model folder."""
    path = lab.root / "hostile"
    shutil.copytree(lab.root / "model", path)
    yield path
    shutil.rmtree(path)


def load(model: Path, codes: tuple[int, ...] = (2,)) -> Ended:
    """Load the folder; assert an exit code, an error of one line, and that no connection was tried."""
    log = model.parent / "connects.log"
    trace = {"strace": ["-e", "trace=connect"], "strace_log": log} if shutil.which("strace") else {}
    ended = run("faults.engine_trial:load_folder", (str(model), "word1 word2"), **trace)
    assert ended.code in codes, f"{ended.code}: {ended.log[-1500:]}"
    assert "Traceback" not in ended.log
    assert ended.seconds[0] < patient(SECONDS)
    if trace:
        assert "AF_INET" not in log.read_text()
    return ended


def tensor_file(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(start: int, end: int, shape: list[int] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - start) // 4] if shape is None else shape, "data_offsets": [start, end]}


HOSTILE = {
    "empty": b"",
    "short": b"\x08\x00\x00",
    "length 2^63": tensor_file({}, length=2**63),
    "length of the file": tensor_file({"a": entry(0, 8)}, b"8" * 8, length=10**6),
    "not JSON": tensor_file(b"{not json at all"),
    "not an object": tensor_file(b"[1, 2, 3]"),
    "not UTF-8": tensor_file(b'{"a\xff": 1}'),
    "overlap": tensor_file({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)),
    "hole": tensor_file({"a": entry(0, 8), "b": entry(12, 20)}, bytes(20)),
    "offset 2^64": tensor_file({"a": entry(0, 2**64)}, bytes(8)),
    "negative offset": tensor_file({"a": entry(-8, 0, [2])}, bytes(8)),
    "shape that overflows": tensor_file({"a": entry(0, 8, [2**32, 2**32])}, bytes(8)),
    "negative side": tensor_file({"a": entry(0, 8, [-1, -2])}, bytes(8)),
    "side true": tensor_file(b'{"a": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}', bytes(4)),
    "unknown dtype": tensor_file({"a": entry(0, 8, [2], "F99")}, bytes(8)),
    "duplicate key": tensor_file(b'{"a": %s, "a": %s}' % ((json.dumps(entry(0, 8)).encode(),) * 2), bytes(8)),
    "trailing bytes": tensor_file({"a": entry(0, 8)}, bytes(9)),
    "missing bytes": tensor_file({"a": entry(0, 8)}, bytes(7)),
    "200,000 entries": tensor_file(
        {f"tensor number {i}": entry(4 * i, 4 * i + 4) for i in range(200_000)}, bytes(800_000)
    ),
    "60,000 entries": tensor_file({f"t{i}": entry(4 * i, 4 * i + 4) for i in range(60_000)}, bytes(240_000)),
    "deep": tensor_file(b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
    "entry is a list": tensor_file({"a": [1, 2]}),
    "git-lfs pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0123456789\nsize 12\n",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_safetensors_file_is_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(HOSTILE[name])
    with pytest.raises(ConfigError, match=r"model\.safetensors: is not a safetensors file"):
        read_tensor_header(file)


def test_pipes_devices_and_links_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "passwd").symlink_to("/etc/passwd")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("pipe", "passwd", "zero", "loop", "missing"):
        with pytest.raises(ConfigError, match="is not a safetensors file"):
            read_tensor_header(tmp_path / name)


def test_mutated_safetensors_load_right_or_are_refused(tmp_path: Path) -> None:
    """The library loads every mutated file that tunesmith accepts, with the tensors of its header."""
    import numpy as np
    from safetensors import SafetensorError
    from safetensors.numpy import load, save

    seed = new_seed()
    rng = random.Random(seed)
    good = save({"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(4)}, {"format": "pt"})
    file = tmp_path / "m.safetensors"
    file.write_bytes(good)
    read_tensor_header(file)
    passed = refused = 0
    for trial in range(size(full=100_000, ci=1_000)):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(data))
            kind = rng.randrange(4)
            if kind == 0:
                data[at] = rng.randrange(256)
            elif kind == 1:
                del data[at : at + rng.randrange(1, 9)]
            elif kind == 2:
                data[at:at] = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 9)))
            else:
                data[at] ^= 1 << rng.randrange(8)
            if not data:
                data = bytearray(b"\0")
        file.write_bytes(bytes(data))
        try:
            read_tensor_header(file)
        except ConfigError:
            refused += 1
            continue
        passed += 1
        try:
            loaded = load(bytes(data))
        except SafetensorError:
            continue  # stricter than tunesmith: the loader reports the error in one line
        length = int.from_bytes(data[:8], "little")
        named = [n for n in json.loads(bytes(data[8 : 8 + length])) if n != "__metadata__"]
        assert sorted(loaded) == sorted(named), f"seed {seed}, trial {trial}"
    assert passed
    assert refused


def test_hostile_weights_exit_with_2(model: Path) -> None:
    for name in ("length 2^63", "duplicate key", "hole", "200,000 entries"):
        (model / "model.safetensors").write_bytes(HOSTILE[name])
        assert "is not a safetensors file" in load(model).last_line


class Payload:
    """Object that creates a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return (open, (str(self.canary), "w"))


PICKLES = ["pytorch_model.bin", "optimizer.pt", "training_args.bin", "tokenizer.pkl", "vocab.npy", "model.safetensors"]


@pytest.mark.parametrize("name", PICKLES)
def test_pickle_in_a_model_folder_is_not_read(model: Path, name: str) -> None:
    canary = model.parent / "canary"
    payload = pickle.dumps(Payload(canary))
    (model / name).write_bytes(payload)
    load(model, (2,) if name == "model.safetensors" else (0,))
    assert not canary.exists()
    if name != "model.safetensors":
        (model / "model.safetensors").unlink()
        ended = load(model)
        assert "safetensors" in ended.last_line
    assert not canary.exists()


def test_pickles_in_a_run_folder_are_not_read(bench: Any, folder: Path) -> None:
    engine(folder, env={"TUNESMITH_FAULT": "step.end:kill:6"})
    canary = bench.root / "canary"
    for name in PICKLES[:-1]:
        (folder / "checkpoint-6" / name).write_bytes(pickle.dumps(Payload(canary)))
    bench.same_as_whole(folder)
    assert not canary.exists()


CODE = "import pathlib\npathlib.Path({canary!r}).write_text('ran')\nclass Evil: pass\n"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"auto_map": {"AutoConfig": "evil.Evil", "AutoModelForSequenceClassification": "evil.Evil"}}, "auto_map"),
        ({"num_hidden_layers": 10**6}, "layers"),
        ({"hidden_size": 10**9}, "parameters"),
        ({"vocab_size": 10**12}, "vocab_size"),
        ({"intermediate_size": -4}, "intermediate_size"),
        ({"hidden_size": "many"}, "hidden_size"),
    ],
)
def test_hostile_config_is_refused(model: Path, change: dict[str, Any], says: str) -> None:
    canary = model.parent / "canary"
    (model / "evil.py").write_text(CODE.format(canary=str(canary)))
    file = model / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    assert says in load(model).last_line
    assert not canary.exists()


@pytest.mark.parametrize(
    "change",
    [
        {"_attn_implementation_internal": "evil/repo"},
        {"_attn_implementation": "evil/repo"},
        {"attn_implementation": "evil/repo"},
        {"_experts_implementation_internal": "evil/repo"},
        {"text_config": {"_attn_implementation_internal": "evil/repo"}},
        {"quantization_config": {"quant_method": "evil"}},
        {"transformers_weights": "evil.bin"},
        {"_name_or_path": "evil/repo"},
        {"architectures": ["os.system"]},
        {"model_type": "../../evil"},
        {"problem_type": "evil"},
    ],
)
def test_config_cannot_reach_code_or_network(model: Path, change: dict[str, Any]) -> None:
    canary = model.parent / "canary"
    (model / "evil.py").write_text(CODE.format(canary=str(canary)))
    (model / "evil.bin").write_bytes(pickle.dumps(Payload(canary)))
    file = model / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    load(model, (0, 2))
    assert not canary.exists()


def test_tokenizer_with_code_is_refused(model: Path) -> None:
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}))
    assert "auto_map" in load(model).last_line


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"version": "1.0", "model": {"type": "evil"}}', "\x00" * 100],
    ids=["cut", "list", "type", "zeros"],
)
def test_damaged_tokenizer_file_is_refused(model: Path, text: str) -> None:
    (model / "tokenizer.json").write_text(text)
    assert "tokenizer" in load(model).last_line


def test_endless_tokenizer_pattern_is_stopped(model: Path) -> None:
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": 0, "content": "[PAD]", "special": True, **dict.fromkeys(flags, False)}],
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {"[PAD]": 0, "[UNK]": 1}, "unk_token": "[UNK]"},
    }
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    (model / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]", "unk_token": "[UNK]"})
    )
    ended = run("faults.engine_trial:load_folder", (str(model), "a" * 40_000 + "b"), timeout=40)
    assert ended.code in (2, 3), ended.log[-1500:]


def test_symlink_out_of_the_folder_reveals_nothing(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to("/etc/passwd")
    assert "root:" not in load(model).log


def read(path: Path) -> Any:
    return read_source(path, name="train").dataset


def table_or_error(path: Path) -> str:
    """Return "table", or the error, which must be one line."""
    try:
        return "table" if read(path).num_rows else "no rows"
    except DataError as error:
        return str(error) if "\n" not in str(error) else "several lines"


def rewrite(path: Path, sheet_xml: str) -> None:
    """Replace the cells of a good workbook."""
    sheet({"text": sentence, "label": pick("a", "b")}, rows=5)(path)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name).decode() for name in archive.namelist()}
    main = 'xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"'
    parts["xl/worksheets/sheet1.xml"] = f"<worksheet {main}><sheetData>{sheet_xml}</sheetData></worksheet>"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in parts.items():
            archive.writestr(name, text)


def row(number: int, *cells: tuple[str, str]) -> str:
    inside = "".join(f'<c r="{ref}" t="inlineStr"><is><t>{text}</t></is></c>' for ref, text in cells)
    return f'<row r="{number}">{inside}</row>'


SHEET_HEAD = (
    row(1, ("A1", "text"), ("B1", "label")) + row(2, ("A2", "one"), ("B2", "x")) + row(3, ("A3", "two"), ("B3", "y"))
)


@pytest.mark.parametrize(
    "cells",
    [
        SHEET_HEAD + row(1_048_576, ("XFD1048576", "far")),
        SHEET_HEAD + row(4, ("ZZZZZZ99999999999", "bad")),
        SHEET_HEAD + row(4, ("A0", "zero")),
        SHEET_HEAD + row(4, ("é4", "bad")),
        SHEET_HEAD
        + row(4, ("A4", "x")).replace('t="inlineStr"', 't="s"').replace("<is><t>x</t></is>", "<v>99999999999</v>"),
    ],
    ids=["far corner", "long reference", "row zero", "no reference", "shared string out of range"],
)
def test_hostile_cell_is_read_or_reported_once(cells: str, tmp_path: Path) -> None:
    path = tmp_path / "x.xlsx"
    rewrite(path, cells)
    began = time.monotonic()
    assert table_or_error(path).startswith((str(path), "table"))
    assert time.monotonic() - began < patient(30)


def test_cell_in_the_last_row_of_the_table_columns_is_read(tmp_path: Path) -> None:
    rewrite(tmp_path / "x.xlsx", SHEET_HEAD + row(200_000, ("A200000", "last"), ("B200000", "x")))
    source = read_source(tmp_path / "x.xlsx", name="train")
    assert source.dataset["text"][:] == ["one", "two", "last"]
    assert source.where(2).endswith(":200000")


def test_zip_bomb_is_refused_quickly(tmp_path: Path) -> None:
    rewrite(tmp_path / "x.xlsx", SHEET_HEAD + row(4, ("A4", "a" * 100_000_000)))
    began = time.monotonic()
    with pytest.raises(DataError, match=r"unpacks to 100,.* bytes"):
        read(tmp_path / "x.xlsx")
    assert time.monotonic() - began < patient(10)


def test_damaged_spreadsheets_give_a_table_or_one_error(tmp_path: Path) -> None:
    sheet({"text": sentence, "label": pick("a", "b")}, rows=20)(tmp_path / "good.xlsx")
    good = (tmp_path / "good.xlsx").read_bytes()
    rng = random.Random(0)
    for case in range(12):
        data = bytearray(good)
        for _ in range(rng.choice((1, 1, 3))):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        if case % 5 == 0:
            data = data[: rng.randrange(4, len(data))]
        path = tmp_path / f"{case}.xlsx"
        path.write_bytes(bytes(data))
        assert table_or_error(path).startswith((str(path), "table"))


@pytest.mark.parametrize("nested", [False, True], ids=["texts", "lists of texts"])
def test_parquet_dictionary_bomb_is_refused(nested: bool, tmp_path: Path) -> None:
    """A text of 300 KB in a dictionary with 16,384 references expands to 5 GB from less than a megabyte."""
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 16_384, pa.int32()), pa.array(["a" * 300_000]))
    if nested:
        texts = pa.ListArray.from_arrays(pa.array(range(16_385), pa.int32()), texts)
    labels = pa.array(["x", "y"] * 8_192)
    pq.write_table(pa.table({"text": texts, "label": labels}), tmp_path / "x.parquet", compression="zstd")
    assert (tmp_path / "x.parquet").stat().st_size < 10_000
    with pytest.raises(DataError, match=r"unpacks to .* over the limit"):
        read(tmp_path / "x.parquet")


BOMBS: dict[str, Callable[[Path, pa.Table], None]] = {
    "arrow": lambda path, rows: feather.write_feather(rows, path, compression="zstd"),
    "parquet": lambda path, rows: pq.write_table(
        rows, path, compression="zstd", use_dictionary=False, column_encoding={"text": "DELTA_BYTE_ARRAY"}
    ),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_other_repeated_texts_are_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"x.{kind}"
    BOMBS[kind](path, pa.table({"text": ["a" * 10_000] * 20_000, "label": ["x", "y"] * 10_000}))
    assert path.stat().st_size < 1_000_000
    with pytest.raises(DataError, match=r"unpacks to .* over the limit"):
        read(path)


def test_repeated_numbers_are_refused(tmp_path: Path) -> None:
    rows = 8_000_000
    table = pa.table({"text": pa.nulls(rows, pa.string()), "label": pa.nulls(rows, pa.int64())})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=rows)
    with pytest.raises(DataError, match=r"unpacks to .* over the limit"):
        read(tmp_path / "x.parquet")


def test_thousand_columns_are_read_within_seconds(tmp_path: Path) -> None:
    columns: dict[str, Any] = {f"c{k}": (lambda i, k=k: f"v{i * k}") for k in range(1_000)}
    table({"text": sentence, "label": pick("a", "b"), **columns}, rows=50)(tmp_path / "x.csv")
    began = time.monotonic()
    found = load_data(train_file=tmp_path / "x.csv", cache_dir=tmp_path)
    assert time.monotonic() - began < patient(15)
    assert any(note.startswith("Not used: 'c0', 'c1'") and "and 992 more (" in note for note in found.notes)
