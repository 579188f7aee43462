"""What may be asked for about FSDP, by each of the three ways to ask, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tunesmith.errors import ConfigError
from tunesmith.training.sharding import Sharding, read_sharding, sharding_of_launcher

LAUNCHER = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_OFFLOAD_PARAMS": "false", "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_FORWARD_PREFETCH": "false", "FSDP_USE_ORIG_PARAMS": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_SYNC_MODULE_STATES": "true", "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
}  # fmt: skip
"""What `accelerate launch --use_fsdp` of 1.15 sets when nothing else is said."""


@pytest.mark.parametrize(
    ("asked", "config", "expected"),
    [
        (None, None, None),
        ("", {}, None),
        (False, {"min_num_params": 0, "xla": False}, None),
        (True, None, Sharding()),
        ("full_shard auto_wrap", None, Sharding()),
        (["shard_grad_op"], None, Sharding(False)),
        (True, {"reshard_after_forward": "false"}, Sharding(False)),
        (True, {"fsdp_transformer_layer_cls_to_wrap": "BertLayer, Other"}, Sharding(layers=("BertLayer", "Other"))),
        (True, {"transformer_layer_cls_to_wrap": ["BertLayer"], "version": 2}, Sharding(layers=("BertLayer",))),
        (True, {"auto_wrap_policy": "NO_WRAP"}, Sharding(layers=())),
        (True, {"backward_prefetch": "backward_pre", "cpu_ram_efficient_loading": True}, Sharding()),
    ],
)
def test_what_is_asked_for_is_read_in_transformers_words(asked: Any, config: Any, expected: Sharding | None) -> None:
    assert read_sharding(asked, config) == expected


@pytest.mark.parametrize(
    ("asked", "config", "message"),
    [
        ("offload", None, "fsdp offload is not supported. Nothing is moved to host memory"),
        ("hybrid_shard", None, "fsdp hybrid_shard is not supported. Use full_shard"),
        ("no_shard", None, "fsdp no_shard is not supported. Leave fsdp out"),
        ("ful_shard", None, "fsdp 'ful_shard' is not known. Did you mean 'full_shard'?"),
        (True, {"cpu_offload": True}, "fsdp_config cpu_offload is not supported"),
        (True, {"activation_checkpointing": True}, "Use gradient_checkpointing"),
        (True, {"state_dict_type": "SHARDED_STATE_DICT"}, "Use FULL_STATE_DICT"),
        (True, {"auto_wrap_policy": "SIZE_BASED_WRAP"}, "Use TRANSFORMER_BASED_WRAP"),
        (True, {"version": 1}, "fsdp_config version 1 is not supported. Use 2"),
        (True, {"xla": True}, "There is no XLA here"),
        (True, {"reshard_after_forwards": True}, "Did you mean 'reshard_after_forward'?"),
        (None, {"reshard_after_forwards": False}, "fsdp_config has no 'reshard_after_forwards'. Did you mean"),
        (None, {"reshard_after_forward": True}, "fsdp_config sets reshard_after_forward, but fsdp is off"),
        (True, "/nowhere.json", "fsdp_config /nowhere.json: is not a JSON file of options"),
    ],
)
def test_what_is_not_done_is_refused_by_name_with_what_to_use(asked: Any, config: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_sharding(asked, config)
    assert message in caught.value.line()


def test_options_may_come_from_a_json_file(tmp_path: Path) -> None:
    file = tmp_path / "fsdp.json"
    file.write_text(json.dumps({"fsdp_reshard_after_forward": False}))
    assert read_sharding(True, str(file)) == Sharding(False)


def test_the_launcher_s_own_defaults_and_choices_are_understood() -> None:
    assert sharding_of_launcher({}) is None
    assert sharding_of_launcher(LAUNCHER) == Sharding()
    assert sharding_of_launcher(LAUNCHER | {"FSDP_SHARDING_STRATEGY": "2"}) == Sharding(False)
    two = LAUNCHER | {"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false"}
    assert sharding_of_launcher(two) == Sharding(False)
    layers = LAUNCHER | {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_TRANSFORMER_CLS_TO_WRAP": "BertLayer"}
    assert sharding_of_launcher(layers) == Sharding(layers=("BertLayer",))
    with pytest.raises(ConfigError, match=r"the launcher asks for .*hybrid_shard is not supported"):
        sharding_of_launcher(LAUNCHER | {"FSDP_SHARDING_STRATEGY": "HYBRID_SHARD"})
