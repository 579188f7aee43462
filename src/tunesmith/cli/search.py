"""Search for better option values with Optuna. The same command resumes a search or joins it from another process.

Accepts the options of `tunesmith train`. Needs `pip install 'tunesmith[search]'`.
"""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING

from tunesmith.cli.parser import add_config_arguments, add_flags, config_from_args
from tunesmith.errors import ConfigError

if TYPE_CHECKING:
    from tunesmith.tuning.search import SearchResult

SHOWN = 5
"""Number of trials in the table on stdout; search.json has all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the search and all options of a run."""
    section = parser.add_argument_group("Search")
    flags = {
        "--trials N": "Number of trials over all processes. Default: 40.",
        "--no_prune": "Train every trial to its end. Default: end a trial that is behind the median.",
    }
    add_flags(section, flags, trials=40)
    text = "Search space: learning_rate=1e-5..3e-4, pooling=mean,first. "
    text += "Default: learning rate, epochs, batch size, decay, warmup."
    section.add_argument("--vary", nargs="+", action="extend", default=[], metavar="NAME=VALUES", help=text)
    add_config_arguments(parser, unsupported=("folds", "fold", "seeds"))


def run(args: argparse.Namespace) -> int:
    """Search, print the best trials and return the exit code."""
    from tunesmith.runs.folder import read_launch

    config = config_from_args(args)
    if read_launch().world > 1:
        raise ConfigError(
            "a search trains in one process", fix="Start the command once per device, without a launcher."
        )
    from tunesmith.cli.train import with_console
    from tunesmith.tuning.search import SearchPlan, read_space, search_options

    plan = SearchPlan(read_space(args.vary, config), args.trials, not args.no_prune)
    print_search(with_console(config, lambda observer: search_options(config, plan, observer)))
    return 0


def print_search(found: SearchResult) -> None:
    """Print the best trials, the best one compared with the first, and the next commands."""
    done = [one for one in found.trials if one.state == "complete" and one.value is not None]
    counts = {state: sum(one.state == state for one in found.trials) for state in ("complete", "pruned", "failed")}
    print(f"\n{', '.join(f'{n} {state}' for state, n in counts.items())}; {found.seconds:.0f} s")
    for one in sorted(done, key=lambda one: (-(one.value or 0.0), one.number))[:SHOWN]:
        options = ", ".join(f"{name} {value}" for name, value in one.options.items()) or "your config"
        print(f"  trial {one.number:<4} {found.metric} {abs(one.value or 0.0):.4f}  {options}")
    if found.best:
        print("\nThe best score is optimistic because these examples selected the trial. Confirm it on a test set.")
    left = [one.number for one in found.trials if one.state == "running"]
    if not found.finished:
        print(f"\nunfinished trials: {len(left)}. The time budget is spent; resume with a larger --time_budget")
    if found.best is None:
        print("\nno trial was completed")
        return
    folder = shlex.quote(str(found.path))
    print(f"\nfolder: {found.path}   (search.json, trial-{found.best}/model)\nnext:")
    print(f"  tunesmith evaluate {folder} --test_file labeled.csv   (the best trial)")
    print(f"  tunesmith report {folder}\n  tunesmith board {folder}")
    if found.best:
        print(f"  tunesmith compare {folder}/trial-0 {folder}/trial-{found.best}")
