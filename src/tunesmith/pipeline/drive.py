"""One run from the first step to the files it leaves: starts or resumes, trains, evaluates, exports, explains."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from tunesmith.config.schema import dump_config, to_dict
from tunesmith.errors import CheckpointError
from tunesmith.events import Event, RunEnded, RunStarted
from tunesmith.inference.facts import describe_model
from tunesmith.metrics.evidence import rows_to_keep
from tunesmith.pipeline.finish import (
    make_counter,
    move_thresholds,
    predict_splits,
    row_events,
    score_splits,
    settle_weights,
    with_ending,
    write_data_summary,
    write_results,
    writing_model,
)
from tunesmith.pipeline.inputs import is_installed
from tunesmith.pipeline.planning import announce_plan, make_plan
from tunesmith.pipeline.prepare import Prepared
from tunesmith.pipeline.run_pages import draw_and_explain, write_card
from tunesmith.pipeline.watch import RunEnding, RunResult, Watch
from tunesmith.runs.environment import describe_environment
from tunesmith.runs.event_log import read_journal
from tunesmith.runs.folder import RunDir
from tunesmith.runs.writing import write_file
from tunesmith.training.distributed import RankRoster
from tunesmith.training.evaluation import Predictions, predict_rows
from tunesmith.training.loop import Evaluate
from tunesmith.training.run_writer import RunKeeper
from tunesmith.training.schedule import Plan
from tunesmith.training.state import TrainState


def _write_start(run: RunDir, prepared: Prepared) -> None:
    config = prepared.config
    write_file(run.config_file, dump_config(config).encode())
    environment = {"run_id": prepared.identity.run_id, "device": str(prepared.runtime.device), **describe_environment()}
    write_file(run.environment_file, json.dumps(environment, indent=1).encode())
    write_data_summary(run, prepared)


def _refuse_another_run(run: RunDir, prepared: Prepared) -> None:
    """A finished run is not written over, nor are results of another config that no checkpoint is left of."""
    whole = run.model.is_dir() and run.environment_file.is_file() and run.report_file.is_file()
    if run.checkpoints() and not whole:
        return  # stopped, maybe on its way out (the report is written last): the checkpoints say whether it is the same run
    events = read_journal(run.journal_file) if run.journal_file.exists() else []
    ended = bool(events) and isinstance(events[-1], RunEnded) and events[-1].finished
    if run.checkpoints() and not ended:
        return
    results = [p for p in (*run.folders, *run.result_files, run.report_file) if p.exists()]
    started = next((e.run_id for e in events if isinstance(e, RunStarted)), None)
    same = started == prepared.identity.run_id
    if ended or (results and not same):
        what = "a finished run" if ended else f"results ({', '.join(p.name for p in results[:3])})"
        raise CheckpointError(
            f"holds {what} of {'this very' if same else 'another'} config",
            where=str(run.path),
            fix="Give another --output_dir, or remove the folder to train again."
            + (f" `tunesmith report {run.path}` writes the page." if ended and not run.report_file.exists() else ""),
        )


def train_run(run: RunDir, prepared: Prepared, watch: Watch, ending: RunEnding | None = None) -> RunResult:
    """Trains what was prepared, in this folder; resumes an unfinished run that is there."""
    state = prepared.state
    has_validation = "validation" in prepared.tokenized
    on_gpu = prepared.runtime.device.type == "cuda"
    plan = make_plan(prepared.config, prepared.batches, prepared.suite, has_validation=has_validation, on_gpu=on_gpu)
    describe = describe_model(state.model, prepared.tokenizer, prepared.facts)
    keeper = RunKeeper(
        run,
        state,
        prepared.identity,
        plan=plan,
        describe=describe,
        keep_checkpoints=prepared.config.save_total_limit or 10**9,
        keep_best=plan.metric is not None and prepared.config.load_best_model_at_end is not False,
        allow_changed=prepared.config.allow_changed_data,
        listeners=_make_listeners(run, prepared, plan, watch) if prepared.runtime.is_main else [],
    )
    rows = len(prepared.rows("train"))
    per_epoch = plan.epoch_ends[0]
    epochs = plan.fraction(plan.num_steps)
    started = RunStarted(prepared.identity.run_id, 0, plan.num_steps, float(per_epoch), epochs, rows, time.time())
    watch.plan(plan.num_steps, float(per_epoch))
    seen: dict[int, Predictions] = {}
    evaluate = _make_evaluate(prepared, watch, keeper, seen) if has_validation else None
    with keeper.stop, keeper.ending_well(RankRoster.gather(prepared.runtime)):
        _begin(run, prepared, keeper, started)
        ending = ending or RunEnding()
        for event in keeper.train(plan, prepared.batches, keeper.wants_read_back, evaluate):
            if ending.enough(event):
                break
        keeper.stop.raise_at_once()
        return _finish(run, prepared, keeper, watch, ending, seen)


def _make_listeners(run: RunDir, prepared: Prepared, plan: Plan, watch: Watch) -> list[Callable[[Event], None]]:
    return [*watch.listeners, announce_plan(prepared, plan, watch.say), *_make_trackers(run, prepared, plan)]


def _make_trackers(run: RunDir, prepared: Prepared, plan: Plan) -> list[Callable[[Event], None]]:
    """The trackers that report_to asks for, as one listener."""
    config = prepared.config
    names = [name for name in config.report_to if name != "none"]
    if not names:
        return []
    from tunesmith.trainer.trackers import TrackerArguments, Trackers, lines_every

    known = ("tensorboard", "wandb", "trackio", "mlflow")
    names = [n for n in known if is_installed(n)] if "all" in names else names
    arguments = TrackerArguments(to_dict(config), str(run.path), config.project, config.name)
    per_epoch = float(plan.epoch_ends[0])
    every = lines_every(
        config.logging_strategy, config.logging_steps, num_steps=plan.num_steps, steps_per_epoch=per_epoch
    )
    return [Trackers(names, arguments, prepared.state.model, every, plan.num_steps)]


def _begin(run: RunDir, prepared: Prepared, keeper: RunKeeper, started: RunStarted) -> None:
    """Starts or resumes. A run that is refused keeps its own run.yaml: `tunesmith resume` uses that."""
    main, fresh = prepared.runtime.is_main, not run.checkpoints()
    if main:
        _refuse_another_run(run, prepared)
        if fresh:
            _write_start(run, prepared)
    keeper.begin(started)
    if main and not fresh:
        _write_start(run, prepared)


def _make_evaluate(prepared: Prepared, watch: Watch, keeper: RunKeeper, seen: dict[int, Predictions]) -> Evaluate:
    """Metrics of the validation split and of the training sample. Alone, a process gives it up when a signal comes.

    `seen` holds the predictions for the validation split of the last step and of the best one, by step.
    """
    alone = prepared.runtime.world == 1  # several ranks would have to agree on it after each batch
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
            if alone:
                keeper.stop.interrupt()
            count(rows)

        with prepared.strategies.whole():
            for name, rows in parts.items():
                result = predict_rows(
                    state.model,
                    rows,
                    prepared.strategies.collate,
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
    keeper: RunKeeper,
    watch: Watch,
    ending: RunEnding,
    seen: dict[int, Predictions],
) -> RunResult:
    state, main = prepared.state, prepared.runtime.is_main
    early = state.step < keeper.plan.num_steps
    diagnosis: Sequence[str] = ()
    best_step = state.progress.step if keeper.keep_best else None
    known = seen.get(best_step or state.step) if ending.change is RunEnding.change else None
    with ExitStack() as ends:
        with keeper.best_weights() as best:
            settle_weights(prepared, best, ending.change)
            finish_model = ends.enter_context(writing_model(run, prepared))
            predictions = predict_splits(prepared, watch.progress, known)
        prepared = with_ending(run, move_thresholds(prepared, predictions, watch.say), ending)
        scores = score_splits(prepared, predictions) | ending.scores
        if main:
            write_results(run, prepared, predictions, scores)
            card = write_card(prepared, scores, name=prepared.config.name, steps=state.step, best_step=best_step)
            finish_model(prepared, card)
    if main:
        keeper.end("early_stopping" if early else "completed")
        diagnosis = draw_and_explain(run) if watch.pages else ()
    prepared.runtime.barrier()
    warnings = tuple(finding.line() for finding in prepared.bundle.findings if finding.severity != "info")
    return RunResult(run, scores, state.step, best_step, tuple(diagnosis), warnings)
