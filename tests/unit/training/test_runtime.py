"""What a launcher asks for and the engine does not do is said before anything starts."""

from __future__ import annotations

import logging

import pytest

from tunesmith.errors import ConfigError
from tunesmith.training.runtime import make_runtime


def test_deepspeed_asked_for_by_the_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ConfigError, match="DeepSpeed was asked for by the launcher"):
        make_runtime(use_cpu=True)


def test_fsdp_of_the_launcher_is_taken_and_on_one_rank_it_is_said_to_do_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with caplog.at_level(logging.WARNING):
        assert make_runtime(use_cpu=True).sharding is None
    assert "fsdp has no effect on one rank" in caplog.text
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    with pytest.raises(ConfigError, match=r"the launcher asks for .* offload_params is not supported"):
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
