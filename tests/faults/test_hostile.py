"""Rows 29 to 31: files made to harm. Refused in one line or loaded right; no code runs, no socket opens, no time is lost.

Row 32 (config files) is in tests/unit/config/test_load.py; row 34 in tests/contracts/test_own_code.py.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from faults.trials import Ended, Server, memory_folder, seed_of, size
from patience import patient
from tunesmith.errors import ConfigError
from tunesmith.models.files import check_tensor_file

SECONDS = 6.0
"""The target is 2 s on an idle machine; CI shares its cores."""


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    root = memory_folder("hostile", tmp_path_factory.mktemp("hostile"))
    server = Server(root)
    try:
        assert server.run("model", {"folder": str(root / "good")}).code == 0
        ended = server.run("load", {"folder": str(root / "good"), "text": "word1 word2"})
        assert ended.code == 0, ended.log
        yield server, root
    finally:
        server.close()
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def model(loader: tuple[Server, Path]) -> Iterator[Path]:
    path = loader[1] / "model"
    shutil.copytree(loader[1] / "good", path)
    yield path
    shutil.rmtree(path)


def load(loader: tuple[Server, Path], model: Path, text: str = "word1 word2", code: int | None = 2) -> Ended:
    """Loads the folder; asserts a refusal in one line, and that no connection was tried."""
    log = loader[1] / "connects.log"
    trace = {"strace": ["-e", "trace=connect"], "strace_log": str(log)} if shutil.which("strace") else {}
    ended = loader[0].run("load", {"folder": str(model), "text": text}, **trace)
    assert ended.code == code, f"{ended.code}: {ended.log[-1500:]}"
    assert "Traceback" not in ended.log
    assert ended.seconds[0] is not None
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
def test_row_29_a_hostile_safetensors_file_is_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(HOSTILE[name])
    with pytest.raises(ConfigError, match=r"model\.safetensors: is not a safetensors file"):
        check_tensor_file(file)


def test_row_29_pipes_devices_and_links_elsewhere_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "passwd").symlink_to("/etc/passwd")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("pipe", "passwd", "zero", "loop", "missing"):
        with pytest.raises(ConfigError, match="is not a safetensors file"):
            check_tensor_file(tmp_path / name)


def test_row_29_mutated_files_load_right_or_are_refused(tmp_path: Path) -> None:
    """Random changes of a good file: what our check lets through, the library loads, with the tensors that the header names."""
    import numpy as np
    from safetensors import SafetensorError
    from safetensors.numpy import load, save

    seed = seed_of("row_29")
    rng = random.Random(seed)
    good = save({"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(4)}, {"format": "pt"})
    file = tmp_path / "m.safetensors"
    file.write_bytes(good)
    check_tensor_file(file)
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
            check_tensor_file(file)
        except ConfigError:
            refused += 1
            continue
        passed += 1
        try:
            loaded = load(bytes(data))
        except SafetensorError:
            continue  # stricter than ours: an error that the loader turns into one line
        length = int.from_bytes(data[:8], "little")
        named = [n for n in json.loads(bytes(data[8 : 8 + length])) if n != "__metadata__"]
        assert sorted(loaded) == sorted(named), f"seed {seed}, trial {trial}"
    assert passed
    assert refused


def test_row_29_hostile_weights_in_a_model_folder_end_with_exit_2(loader: tuple[Server, Path], model: Path) -> None:
    for name in ("length 2^63", "duplicate key", "hole", "200,000 entries"):
        (model / "model.safetensors").write_bytes(HOSTILE[name])
        assert "is not a safetensors file" in load(loader, model).last_line


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return (open, (str(self.canary), "w"))


PICKLES = [
    *(
        "pytorch_model.bin",
        "model.pt",
        "model.pth",
        "optimizer.pt",
        "scheduler.pt",
        "rng_state.pth",
        "training_args.bin",
    ),
    *("custom_checkpoint_0.pkl", "tokenizer.pkl", "vocab.npy", "scaler.pt", "flax_model.msgpack", "model.safetensors"),
]


@pytest.mark.parametrize("name", PICKLES)
def test_row_30_no_pickle_is_ever_read(loader: tuple[Server, Path], model: Path, name: str) -> None:
    canary = loader[1] / "canary"
    payload = pickle.dumps(Payload(canary))
    (model / name).write_bytes(payload)
    load(loader, model, code=2 if name == "model.safetensors" else 0)
    assert not canary.exists()
    if name != "model.safetensors":
        (model / "model.safetensors").unlink()
        ended = load(loader, model)
        assert "safetensors" in ended.last_line
    assert not canary.exists()


def test_row_30_pickles_in_a_run_folder_are_not_touched(bench: Any, folder: Path) -> None:
    bench.server.engine(folder, env={"TUNESMITH_FAULT": "step.end:kill:6"})
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
def test_row_31_a_hostile_config_is_refused_before_anything_is_allocated(
    loader: tuple[Server, Path], model: Path, change: dict[str, Any], says: str
) -> None:
    canary = loader[1] / "canary"
    (model / "evil.py").write_text(CODE.format(canary=str(canary)))
    file = model / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    assert says in load(loader, model).last_line
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
def test_row_31_a_config_cannot_reach_for_code_or_the_network(
    loader: tuple[Server, Path], model: Path, change: dict[str, Any]
) -> None:
    canary = loader[1] / "canary"
    (model / "evil.py").write_text(CODE.format(canary=str(canary)))
    (model / "evil.bin").write_bytes(pickle.dumps(Payload(canary)))
    file = model / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    log = loader[1] / "connects.log"
    trace = {"strace": ["-e", "trace=connect"], "strace_log": str(log)} if shutil.which("strace") else {}
    ended = loader[0].run("load", {"folder": str(model), "text": "word1"}, **trace)
    assert ended.code in (0, 2), ended.log
    assert "AF_INET" not in (log.read_text() if trace else "")
    assert not canary.exists()


def test_row_31_a_tokenizer_with_code_is_refused(loader: tuple[Server, Path], model: Path) -> None:
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}))
    assert "auto_map" in load(loader, model).last_line


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"version": "1.0", "model": {"type": "evil"}}', "\x00" * 100],
    ids=["cut", "list", "type", "zeros"],
)
def test_row_31_a_damaged_tokenizer_file_is_refused(loader: tuple[Server, Path], model: Path, text: str) -> None:
    (model / "tokenizer.json").write_text(text)
    assert "tokenizer" in load(loader, model).last_line


def test_row_31_a_pattern_that_never_ends_is_cut_off(loader: tuple[Server, Path], model: Path) -> None:
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": 0,
                "content": "[PAD]",
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
        ],
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
    ended = loader[0].run("load", {"folder": str(model), "text": "a" * 40_000 + "b"}, timeout=40)
    assert ended.code in (2, 3), ended.log[-1500:]


def test_row_31_a_symlink_out_of_the_folder_gives_nothing_away(loader: tuple[Server, Path], model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to("/etc/passwd")
    assert "root:" not in load(loader, model).log
