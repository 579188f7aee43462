"""Options that the config knows and this build cannot carry out: refused, never passed over in silence."""

from __future__ import annotations

import importlib.util

from tunesmith.config.load import raise_problems
from tunesmith.config.schema import RunConfig
from tunesmith.errors import ConfigError
from tunesmith.ranks.sharding_options import read_sharding

_FIXES = {
    "config_name": "Leave it out: the config of the model is used.",
    "torch_compile": "Leave it out: the exact speed-ups are on by themselves.",
    "save_only_model": "Leave it out: a checkpoint holds all that a resume needs; model/ holds the weights alone.",
    "weights_only": "Give --model_name_or_path RUN/best instead, to start from those weights.",
    "eval_on_start": "Leave it out, or run `tunesmith evaluate` on the model first.",
}


def refuse_what_is_not_built(config: RunConfig, *, one_of_many: bool = False) -> None:
    """A ConfigError with every option asked for that has no effect in `tunesmith train`.

    `one_of_many`: the run is one of those that `--recipe best` consists of.
    """
    problems = [f"--{name} is not built in. {fix}" for name, fix in _FIXES.items() if getattr(config, name)]
    problems += [
        f"--report_to {name} needs the package {name}. pip install 'tunesmith[trackers]', or leave it out: "
        "journal.jsonl has every number."
        for name in config.report_to
        if name not in ("none", "all") and not is_installed(name)
    ]
    if config.recipe == "best" and not one_of_many:
        problems.append(
            "--recipe best trains several models. Use `tunesmith train`, or run_best of tunesmith.tuning.best_model."
        )
    elif config.time_budget is not None and not one_of_many:
        problems.append(
            "--time_budget is not built in for a single run. It is for --recipe best and `tunesmith search`."
        )
    if isinstance(config.resume_from_checkpoint, str):
        problems.append(
            "--resume_from_checkpoint FOLDER is not built in. Leave FOLDER out: the newest sound checkpoint is taken."
        )
    try:
        read_sharding(config.fsdp, config.fsdp_config)
    except ConfigError as error:
        problems += error.problems or (error.line(),)
    raise_problems(problems)


def is_installed(package: str) -> bool:
    """Whether a package can be imported; a mere folder of that name (W&B makes ./wandb) is none."""
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None
