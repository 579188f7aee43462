"""What a launcher asks for and the engine does not do is said before anything starts."""

from __future__ import annotations

import logging

import pytest

from tunesmith.errors import ConfigError
from tunesmith.training.distributed import make_runtime


@pytest.mark.parametrize("name", ["DeepSpeed", "FSDP"])
def test_launcher_requesting_sharding_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(f"ACCELERATE_USE_{name.upper()}", "true")
    with pytest.raises(ConfigError, match=rf"the launcher requests {name}.*tunesmith.Trainer"):
        make_runtime(use_cpu=True)


def test_mixed_precision_of_the_launcher_is_not_passed_over_in_silence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with caplog.at_level(logging.WARNING):
        assert make_runtime(use_cpu=True).precision == "no"
    assert "mixed precision (bf16) is not used" in caplog.text


def test_one_process_needs_no_others() -> None:
    runtime = make_runtime(use_cpu=True)
    assert (runtime.rank, runtime.world, runtime.is_main) == (0, 1, True)
    assert runtime.gather_objects("a") == ["a"]
    assert runtime.largest(3) == 3
