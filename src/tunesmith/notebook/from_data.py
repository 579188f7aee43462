"""`tunesmith.finetune`: a table, texts and labels, a file or a config -> a trained model that predicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tunesmith.config.schema import RunConfig
from tunesmith.errors import ConfigError, DataError, name_the_extra
from tunesmith.notebook.live_view import LiveView, in_notebook
from tunesmith.reading.ready_commands import as_called
from tunesmith.session.from_config import finetune
from tunesmith.session.watch import RunResult, Watch


def finetune_data(
    data: Any = None,
    labels: Any = None,
    *,
    config: RunConfig | None = None,
    train_data: Any = None,
    validation_data: Any = None,
    test_data: Any = None,
    watch: Watch | None = None,
    **options: Any,
) -> RunResult:
    """Trains, evaluates and exports one run; resumes it if its folder holds an unfinished one.

    `data` is a DataFrame, a dict of lists, a Dataset or DatasetDict, a list of dicts, an array of rows, a file name, or a
    RunConfig; with `labels`, it is the texts alone. `validation_data` and `test_data` take the same tables. `options` are
    the options of `tunesmith train` under the same names. Progress is shown in the terminal or the notebook cell;
    `watch=Watch()` shows nothing.
    """
    if isinstance(data, RunConfig):
        data, config = None, data
    elif isinstance(data, (str, Path)):
        data, options["train_file"] = None, data
    if data is not None and train_data is not None:
        raise ConfigError("train_data is given twice", fix="Give the training rows once.")
    rows = train_data if data is None else data
    try:
        if labels is not None:
            from tunesmith.reading.in_memory import labelled_table

            rows = labelled_table(rows, labels)
        tables = {"train_data": rows, "validation_data": validation_data, "test_data": test_data}
        return _train(config, watch, **tables, **options)
    except ModuleNotFoundError as error:
        name_the_extra(error, "finetune")
        raise
    except DataError as error:
        fix = None if error.fix is None else as_called(error.fix, in_memory=rows is not None)
        if fix == error.fix:
            raise
        raise DataError(error.problem, where=error.where, fix=fix) from None


def _train(config: RunConfig | None, watch: Watch | None, **given: Any) -> RunResult:
    """The run with its progress shown where the code runs."""
    if watch is not None:
        return finetune(config, watch=watch, **given)
    if in_notebook():
        view = LiveView()
        try:
            return finetune(config, watch=view.watch(), **given)
        finally:
            view.draw(now=True)
    from tunesmith.cli.console import Console

    console = Console()
    try:
        return finetune(config, watch=console.watch(), **given)
    finally:
        console.close()
