"""A training run from config to report, in order: what `tunesmith train`, `finetune(df)` and every trial of a search run.

Nothing here imports torch at module level: errors in the options, the data or the name of the model are reported within a
second or two, before the heavy libraries load and before a run folder is made.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.config.load import load_config
from tunesmith.config.options import RunConfig, dump_config, to_dict
from tunesmith.config.validate import DATA_SOURCES
from tunesmith.errors import CheckpointError, ConfigError
from tunesmith.events import Event, RunEnded, RunStarted
from tunesmith.pipeline.identity import choose_folder, finished_error, is_finished
from tunesmith.pipeline.inputs import is_installed, read_run_data, refuse_what_is_not_built
from tunesmith.pipeline.watch import RunEnding, RunResult, Watch
from tunesmith.runs.environment import describe_environment, read_launch
from tunesmith.runs.event_log import read_journal
from tunesmith.runs.folder import RunDir, require_own_folder
from tunesmith.runs.lock import RunLock
from tunesmith.runs.manifest import retire
from tunesmith.runs.writing import write_file

if TYPE_CHECKING:
    from tunesmith.pipeline.prepare import Prepared
    from tunesmith.training.evaluation import Predictions
    from tunesmith.training.loop import Evaluate
    from tunesmith.training.run_writer import RunWriter
    from tunesmith.training.state import TrainState

INPUTS = (
    *("model_name_or_path", "tokenizer_name", "dataset_name"),
    *("train_file", "validation_file", "test_file", "labels_file"),
)
"""Options that may name a folder or file which the run reads."""


def finetune(
    config: RunConfig | None = None,
    *,
    train_data: Any = None,
    validation_data: Any = None,
    test_data: Any = None,
    watch: Watch | None = None,
    use_test: bool = True,
    ending: RunEnding | None = None,
    **options: Any,
) -> RunResult:
    """Train, evaluate and export one run; resume it if its folder contains an unfinished one.

    Data comes from the files or names in the config, or as a Dataset, DatasetDict, DataFrame or list of dicts. Without
    `use_test` the test examples are neither predicted nor scored. `ending`: see `RunEnding`.
    """
    data = {"train": train_data, "validation": validation_data, "test": test_data}
    config = _complete(config, options, has_data=train_data is not None)
    refuse_what_is_not_built(config, one_of_many=ending is not None)
    watch = watch or Watch()
    config, note = choose_folder(config, in_memory=train_data is not None)
    run, launch = RunDir(config.run_folder), read_launch()
    is_main = launch.rank == 0
    if is_main:
        if note is not None:
            watch.say(note)
        _require_folder(config, run)
    read = partial(read_run_data, config, data, use_test=use_test)
    # Several ranks read one after the other: the first builds the table that the others find.
    found = read(progress=watch.progress) if launch.world == 1 else None
    with RunLock(run.lock_file) if is_main else nullcontext():
        from tunesmith.pipeline.prepare import prepare, start_runtime
        from tunesmith.training.distributed import rank_watch

        runtime = start_runtime(config)
        heard = watch if runtime.is_main else Watch()
        with rank_watch(runtime):
            prepared = prepare(config, runtime, lambda: found or read(progress=heard.progress), heard)
            return train_run(run, prepared, heard, ending)


def _complete(config: RunConfig | None, options: dict[str, Any], *, has_data: bool) -> RunConfig:
    """The config with the options over it, checked like a command line."""
    given = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    if given or config is None:
        config = load_config(None, given, need_data=not has_data, start=config)
    named = next((name for name in DATA_SOURCES if getattr(config, name) is not None), None)
    if has_data and named not in (None, "task_name"):
        raise ConfigError(f"both train_data and {named} are set", fix="Set one source of training data.")
    if config.seeds > 1 or (config.folds is not None and config.fold is None):
        raise ConfigError(
            "folds and seeds train several runs, and finetune trains one",
            fix="Call tunesmith.pipeline.folds.run_repeats(config, Watch()), or set one fold.",
        )
    return config


def _require_folder(config: RunConfig, run: RunDir) -> None:
    if config.resume_from_checkpoint and is_finished(run):
        raise finished_error(run, same=True)
    require_own_folder(run, {name: getattr(config, name) for name in INPUTS}, cache=config.cache_dir)
    if config.resume_from_checkpoint and not run.checkpoints():
        raise CheckpointError(
            "contains no checkpoint to resume from",
            where=str(run.path),
            fix="Omit --resume_from_checkpoint to start the run, or set --output_dir to the folder of the run.",
        )


def train_run(run: RunDir, prepared: Prepared, watch: Watch, ending: RunEnding | None = None) -> RunResult:
    """Train in this folder, then evaluate, export and report; resume an unfinished run that is there."""
    from tunesmith.inference.model_folder import describe_model
    from tunesmith.pipeline.plan import announce_plan
    from tunesmith.training.distributed import RankRoster
    from tunesmith.training.run_writer import RunWriter

    config, state, plan = prepared.config, prepared.state, prepared.plan
    ending = ending or RunEnding()
    keeper = RunWriter(
        run,
        state,
        prepared.identity,
        plan=plan,
        describe=describe_model(state.model, prepared.tokenizer, prepared.facts),
        keep_checkpoints=config.save_total_limit or 10**9,
        keep_best=plan.metric is not None and config.load_best_model_at_end is not False,
        allow_changed=config.allow_changed_data,
        listeners=[*watch.listeners, announce_plan(prepared, watch.say), *_make_trackers(run, prepared)]
        if prepared.runtime.is_main
        else [],
    )
    watch.plan(plan.num_steps, float(plan.epoch_ends[0]))
    seen: dict[int, Predictions] = {}
    evaluate = _make_evaluate(prepared, watch, keeper, seen) if "validation" in prepared.tokenized else None
    with keeper.stop, keeper.ending_well(RankRoster.gather(prepared.runtime)):
        _begin(run, prepared, keeper)
        for event in keeper.train(prepared.batches, evaluate):
            if ending.enough(event):
                break
        keeper.stop.raise_at_once()
        return _finish(run, prepared, keeper, watch, ending, seen)


def _begin(run: RunDir, prepared: Prepared, keeper: RunWriter) -> None:
    """Start or resume. A run that is refused keeps its run.yaml: `tunesmith resume` uses it."""
    plan, is_main, fresh = prepared.plan, prepared.runtime.is_main, not run.checkpoints()
    if is_main:
        _refuse_another_run(run, prepared)
        if fresh:
            _write_start(run, prepared)
    rows, epochs = len(prepared.rows("train")), plan.fraction(plan.num_steps)
    run_id, per_epoch = prepared.identity.run_id, float(plan.epoch_ends[0])
    keeper.begin(RunStarted(run_id, 0, plan.num_steps, per_epoch, epochs, rows, time.time()))
    if is_main and not fresh:
        _write_start(run, prepared)


def _refuse_another_run(run: RunDir, prepared: Prepared) -> None:
    """Refuse to overwrite a finished run, or results of a different config that left no checkpoint to compare with."""
    events = read_journal(run.journal_file) if run.journal_file.exists() else []
    started = next((e.run_id for e in events if isinstance(e, RunStarted)), None)
    same = started == prepared.identity.run_id
    if is_finished(run):
        raise finished_error(run, same=same)
    if run.checkpoints():
        return  # stopped: the checkpoints say whether it is the same run
    if any(isinstance(e, RunEnded) and e.finished for e in events[-1:]):
        raise finished_error(run, same=same)
    results = [p.name for p in (*run.folders, *run.result_files, run.report_file) if p.exists()]
    if results and not same:
        kind = "of a different config" if events else f"without their event log ({run.journal_file.name})"
        raise CheckpointError(
            f"contains results ({', '.join(results[:3])}) {kind}",
            where=str(run.path),
            fix="Set a different --output_dir, or remove the folder to train again.",
        )


def _write_start(run: RunDir, prepared: Prepared) -> None:
    from tunesmith.pipeline.results import write_data_summary

    write_file(run.config_file, dump_config(prepared.config).encode())
    environment = {"run_id": prepared.identity.run_id, "device": str(prepared.runtime.device), **describe_environment()}
    write_file(run.environment_file, json.dumps(environment, indent=1).encode())
    write_data_summary(run, prepared)


def _make_trackers(run: RunDir, prepared: Prepared) -> list[Callable[[Event], None]]:
    """The trackers of report_to, as one listener."""
    config, plan = prepared.config, prepared.plan
    names = [name for name in config.report_to if name != "none"]
    if not names:
        return []
    from tunesmith.pipeline.trackers import TrackerArguments, Trackers, lines_every

    known = ("tensorboard", "wandb", "trackio", "mlflow")
    names = [n for n in known if is_installed(n)] if "all" in names else names
    arguments = TrackerArguments(to_dict(config), str(run.path), "tunesmith", config.name)
    every = lines_every(
        "steps",
        config.logging_steps,
        num_steps=plan.num_steps,
        steps_per_epoch=float(plan.epoch_ends[0]),
    )
    return [Trackers(names, arguments, prepared.state.model, every, plan.num_steps)]


def _make_evaluate(prepared: Prepared, watch: Watch, keeper: RunWriter, seen: dict[int, Predictions]) -> Evaluate:
    """A function that evaluates the validation split and a sample of the training examples.

    `seen` receives the predictions for the validation split of the last step and of the best one, by step.
    """
    from tunesmith.metrics.evidence import rows_to_keep
    from tunesmith.pipeline.results import make_counter, row_events
    from tunesmith.training.evaluation import predict_rows

    parts = {"validation": prepared.rows("validation")}
    sample = prepared.train_sample()
    if sample is not None:
        parts["train_sample"] = sample
    total = sum(len(rows) for rows in parts.values())
    constant = prepared.constant()
    most = rows_to_keep(keeper.plan.evaluate.count(keeper.plan.num_steps))

    def evaluate(state: TrainState) -> dict[str, tuple[dict[str, float | None], int]]:
        found, kept = {}, list[Event]()
        count = make_counter(watch.progress, "evaluating", total)

        def after(rows: int) -> None:
            if state.runtime.world == 1:  # several ranks would have to agree after each batch
                keeper.stop.interrupt()
            count(rows)

        with prepared.speedups.whole():
            for name, rows in parts.items():
                result = predict_rows(
                    state.model,
                    rows,
                    prepared.speedups.collate,
                    state.runtime,
                    max_rows=prepared.evaluation_rows,
                    objective=state.objective,
                    on_batch=after,
                )
                metrics = prepared.suite.compute(result.logits, result.labels)
                found[name] = ({"loss": result.loss, **metrics}, len(rows))
                kept += row_events(state.step, name, constant, result, most)
                if name == "validation":
                    for step in seen.keys() - {state.progress.step}:
                        del seen[step]
                    seen[state.step] = result
        if state.runtime.is_main:
            for event in kept:
                keeper.on(event)
        return found

    return evaluate


def _finish(
    run: RunDir,
    prepared: Prepared,
    keeper: RunWriter,
    watch: Watch,
    ending: RunEnding,
    seen: dict[int, Predictions],
) -> RunResult:
    """Score the best weights, write the model folder and the results, end the event log, then draw the report."""
    from tunesmith.pipeline.results import (
        draw_and_explain,
        final_weights,
        move_thresholds,
        predict_splits,
        score_splits,
        settle_weights,
        with_ending,
        write_card,
        write_model,
        write_results,
    )

    config, state, is_main = prepared.config, prepared.state, prepared.runtime.is_main
    best_step = state.progress.step if keeper.keep_best else None
    known = seen.get(best_step or state.step) if ending.change is RunEnding.change else None
    with keeper.best_weights() as best:
        settle_weights(prepared, best, ending.change)
        weights = final_weights(prepared)
        predictions = predict_splits(prepared, watch.progress, known)
    prepared = with_ending(run, move_thresholds(prepared, predictions, watch.say), ending)
    scores = score_splits(prepared, predictions) | ending.scores
    diagnosis: list[str] = []
    if is_main:
        assert keeper.journal is not None
        keeper.journal.settle()  # raises if the run folder was replaced meanwhile
        write_results(run, prepared, predictions, scores)
        card = write_card(prepared, scores, steps=state.step, best_step=best_step)
        write_model(run, prepared, weights, card)
        keeper.end("early_stopping" if state.step < keeper.plan.num_steps else "completed")
        diagnosis = draw_and_explain(run) if watch.pages else []
        if not watch.pages or (config.save_strategy is None and config.save_total_limit == 1):
            for folder in (*run.checkpoints(), run.best):
                if folder.is_dir():
                    retire(folder)  # a finished run cannot be resumed: model/ has the best weights
    prepared.runtime.barrier()
    warnings = tuple(finding.line() for finding in prepared.bundle.findings if finding.severity != "info")
    return RunResult(run, scores, state.step, best_step, tuple(diagnosis), warnings)
