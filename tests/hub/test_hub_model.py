"""`resolve_model` with the real `huggingface_hub` client against a Hub on loopback. Each `client` is a separate process."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from hub.conftest import call
from patience import patient

pytestmark = pytest.mark.slow
FILES = ["config.json", "model.safetensors", "tokenizer_config.json", "vocab.txt"]
NOBODY = "http://127.0.0.1:9"


def test_safe_files_are_downloaded_once_and_work_offline(hub: Any, client: Any) -> None:
    [cold] = client(call("files", "some/model"))
    assert cold.value == FILES
    assert not any(word in line for line in hub.downloads() for word in (".bin", ".py", "onnx"))
    hub.seen.clear()
    [warm] = client(call("files", "some/model"))
    assert warm.value == FILES
    assert hub.downloads() == []
    hub.seen.clear()
    [offline] = client(call("files", "some/model"), HF_HUB_OFFLINE="1")
    [forbidden] = client(call("files", "some/model", allow_download=False))
    assert hub.seen == []
    [unreachable] = client(call("files", "some/model"), HF_ENDPOINT=NOBODY)
    assert offline.value == forbidden.value == unreachable.value == FILES


def test_dropped_connection_raises_and_retry_resumes(hub: Any, client: Any) -> None:
    hub.cut["model.safetensors"] = 50
    [broken] = client(call("files", "some/model"))
    assert broken.error == "ResourceError"
    assert broken.line.startswith("the download of the model some/model was interrupted")
    assert "\n" not in broken.line
    hub.cut.clear()
    hub.seen.clear()
    unused, whole = client(call("files", "some/model", allow_download=False), call("files", "some/model"))
    assert unused.error == "ResourceError"  # incomplete files are not used
    assert "is not (completely) on this machine and downloads are not allowed" in unused.line
    assert whole.value == FILES
    assert len(hub.downloads()) == 1  # the other files were kept


def test_wrong_name_pickle_or_revision_fails_quickly(client: Any) -> None:
    wrong, pickles, revision = client(
        call("files", "bert-base-uncasd"), call("files", "some/pickles"), call("files", "some/model", revision="v9")
    )
    assert {a.error for a in (wrong, pickles, revision)} == {"ConfigError"}
    assert wrong.line == (
        "there is no folder and no Hub model named 'bert-base-uncasd'. Did you mean 'bert-base-uncased'?"
    )
    assert "some/pickles: has its weights only as pytorch_model.bin, a pickle" in pickles.line
    assert "model.safetensors" in pickles.line
    assert revision.line == "the model some/model has no revision 'v9'"
    [down] = client(call("files", "some/model"), HF_ENDPOINT=NOBODY)
    assert down.error == "ResourceError"
    assert "is not (completely) on this machine and the Hub cannot be reached" in down.line
    assert max(a.seconds for a in (wrong, pickles, revision, down)) < patient(5)


def test_silent_hub_times_out_within_five_seconds(client: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts the connection but never responds
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        [answer] = client(call("files", "some/model"), HF_ENDPOINT=endpoint)
    assert answer.error == "ResourceError"
    assert "no answer within 4 s" in answer.line
    assert answer.seconds < patient(5)
