"""`resolve_model` with the real `huggingface_hub` client against a Hub on loopback. Each `client` is a process of its own."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from patience import patient

pytestmark = pytest.mark.slow
FILES = ["config.json", "model.safetensors", "tokenizer_config.json", "vocab.txt"]
NOBODY = "http://127.0.0.1:9"


def test_only_safe_files_are_fetched_once_and_work_without_the_hub(hub: Any, client: Any, call: Any) -> None:
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


def test_a_cut_connection_is_one_line_and_the_next_try_goes_on(hub: Any, client: Any, call: Any) -> None:
    hub.cut["model.safetensors"] = 50
    [broken] = client(call("files", "some/model"))
    assert broken.error == "ResourceError"
    assert broken.line.startswith("the download of the model some/model was interrupted")
    assert "\n" not in broken.line
    hub.cut.clear()
    hub.seen.clear()
    unused, whole = client(call("files", "some/model", allow_download=False), call("files", "some/model"))
    assert unused.error == "ResourceError"  # nothing half-cached is used
    assert "is not (completely) on this machine and downloads are not allowed" in unused.line
    assert whole.value == FILES
    assert len(hub.downloads()) == 1  # the other files were kept


def test_wrong_names_pickles_and_revisions_are_one_line_within_five_seconds(client: Any, call: Any) -> None:
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


def test_a_hub_that_never_answers_is_given_up_within_five_seconds(client: Any, call: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes the connection, then says nothing
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        [answer] = client(call("files", "some/model"), HF_ENDPOINT=endpoint)
    assert answer.error == "ResourceError"
    assert "no answer within 4 s" in answer.line
    assert answer.seconds < patient(5)
