"""What needs no Hub; tests/hub has the real clients against a server."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

from tunesmith.data import hub
from tunesmith.data.hub import load_from_hub
from tunesmith.errors import ConfigError, DataError, ResourceError, TunesmithError


@pytest.mark.parametrize("name", ["", "../etc", "a/b/c", "two words", "https://huggingface.co/datasets/glue"])
def test_what_cannot_be_a_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is not the name of a Hub dataset"):
        load_from_hub(name)


def test_without_a_copy_and_without_permission_nothing_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "ask_hub", lambda *_: pytest.fail("the Hub was asked"))
    with pytest.raises(ResourceError, match=r"glue \(mrpc\) is not on this machine and downloads are not allowed"):
        load_from_hub("glue", "mrpc", allow_download=False, cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (ValueError("BuilderConfig 'mrcp' not found. Available: ['mrpc', 'sst2']"), ConfigError, "mean 'mrpc'"),
        (DatasetNotFoundError("gated"), ConfigError, "gated"),
        (DatasetGenerationError("x"), DataError, "cannot be read"),
        (ConnectionError("reset"), ResourceError, "was interrupted"),
        (OSError(errno.ENOSPC, "No space left on device"), ResourceError, "No space left"),
        (KeyError("odd"), DataError, "KeyError"),
    ],
)
def test_every_failure_is_one_line_of_the_right_kind(error: Exception, kind: type[TunesmithError], words: str) -> None:
    told = hub._explain(error, "nyu-mll/glue", "mrcp")
    assert type(told) is kind
    assert words in str(told)
    assert "\n" not in str(told)
