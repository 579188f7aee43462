"""A training run from config to report, in order: `tunesmith train`, `finetune(df)` and every trial of a search run this.

    finetune    config, run folder, data; then device, precision and ranks, decided once
    prepare     tokens, model, recipe, speedups, identity, plan
    train_run   the steps, event by event; scores, predictions, model folder, report

Nothing here imports torch at module level: errors in the options, the data or the name of the model are reported within a
second or two, before the heavy libraries load and before a run folder is made.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tunesmith.config.options import RunConfig
from tunesmith.events import Event, RunStarted
from tunesmith.pipeline.inputs import (
    RunData,
    audit_tokens,
    choose_folder,
    complete_config,
    log_data,
    read_run_data,
    refuse_another_run,
    require_usable,
    tokenize_run,
)
from tunesmith.runs.folder import RunDir, RunLock, delete_folder, read_launch

if TYPE_CHECKING:
    from tunesmith.metrics.table import Score
    from tunesmith.pipeline.prepare import Prepared
    from tunesmith.pipeline.results import RunResult
    from tunesmith.training.distributed import Runtime
    from tunesmith.training.run_writer import RunWriter

Log = Callable[[str], None]
ShowProgress = Callable[[str, int, int], None]
"""Called with (what, done, total), in examples, or in bytes while a file is read."""

PAIR_STAGE = "pair warm-up"
"""Name of the pair warm-up in progress bars."""


def make_counter(progress: ShowProgress, what: str, total: int) -> Callable[[int], None]:
    """Return a function to be called with the number of examples of each batch."""
    done = 0

    def count(rows: int) -> None:
        nonlocal done
        done += rows
        progress(what, min(done, total), total)

    return count


@dataclass
class RunObserver:
    """Receives the messages and events of a run. `plan` is called with (total steps, steps per epoch) before the first event.

    Without `pages`, no curves and no report are drawn, as in a search over many runs.
    """

    log: Log = lambda text: None
    progress: ShowProgress = lambda what, done, total: None
    plan: Callable[[int, float], None] = lambda num_steps, steps_per_epoch: None
    listeners: list[Callable[[Event], None]] = field(default_factory=list)
    pages: bool = True
    start_steps: int | None = None
    """Maximum number of pair warm-up steps: `tunesmith plan` times a few of them."""


@dataclass(frozen=True)
class RunEnding:
    """Changes to the end of a run: `enough` stops training after an event, and `change` modifies the model before it is scored.

    `thresholds`, `lines` (after those of the recipe) and `scores` (after those of the splits) are stored with the run.
    """

    enough: Callable[[Event], bool] = lambda event: False
    change: Callable[[Any], None] | None = None
    thresholds: tuple[float, ...] | None = None
    lines: tuple[str, ...] = ()
    scores: dict[str, dict[str, Score]] = field(default_factory=dict)


def finetune(
    config: RunConfig | None = None,
    *,
    train_data: Any = None,
    validation_data: Any = None,
    test_data: Any = None,
    observer: RunObserver | None = None,
    use_test: bool = True,
    ending: RunEnding | None = None,
    **options: Any,
) -> RunResult:
    """Train, evaluate and export one run; resume it if its folder contains an unfinished one.

    Data comes from the files or names in the config, or as a Dataset, DatasetDict, DataFrame or list of dicts. Without
    `use_test`, test examples are neither predicted nor scored.
    """
    data = {"train": train_data, "validation": validation_data, "test": test_data}
    in_memory, launch = train_data is not None, read_launch()
    is_main = launch.rank == 0
    observer = observer if observer is not None and is_main else RunObserver()
    config = complete_config(config, options, in_memory=in_memory, one_of_many=ending is not None)
    config = choose_folder(config, observer.log, in_memory=in_memory)
    run = require_usable(config) if is_main else RunDir(config.run_folder)
    read = partial(read_run_data, config, data, observer.progress, use_test=use_test)
    # Several ranks read one after the other: the first builds the table that the others find.
    found = read() if launch.world == 1 else None
    with RunLock(run.lock_file) if is_main else nullcontext():
        from tunesmith.pipeline.prepare import start_runtime
        from tunesmith.training.distributed import watch_ranks
        from tunesmith.training.state import only_training_thread

        runtime = start_runtime(config)
        with only_training_thread(), watch_ranks(runtime):
            prepared = prepare(config, runtime, lambda: found or read(), observer)
            return train_run(run, prepared, observer, ending or RunEnding())


def prepare(config: RunConfig, runtime: Runtime, read: Callable[[], RunData], observer: RunObserver) -> Prepared:
    """Return everything that is needed before the first step. Problems with the input are found here."""
    from tunesmith.data.batches import padding_of
    from tunesmith.inference.model_folder import ModelFacts
    from tunesmith.pipeline import prepare as steps
    from tunesmith.pipeline.probe import LoadedRun
    from tunesmith.pipeline.recipe import choose_recipe
    from tunesmith.training.loop import require_agreement

    with runtime.main_first():
        data = read()
        log_data(observer.log, data)
        tokens = tokenize_run(config, data, observer.progress)
    data = audit_tokens(data, tokens, observer.log, asked=config.max_seq_length)
    bundle, splits = data.bundle, {split: part.rows for split, part in tokens.splits.items()}
    suite = steps.make_run_suite(config, bundle.labels)
    loaded, runtime, why_float32 = steps.load_run_model(config, data, runtime)
    padding = padding_of(tokens.tokenizer)
    run = LoadedRun(tokens.config, loaded, bundle, splits, padding, suite, runtime, observer)
    if data.gold is not None:
        from tunesmith.pipeline.gold import correct_labels

        run = correct_labels(run, data.gold)
    settled = choose_recipe(run, tokens.decision)  # the only place where options change
    run = replace(run, config=settled.config)
    speedups = steps.speed_up(run)
    state = steps.make_state(run, speedups)
    steps.log_model(run, speedups, why_float32)
    batches = steps.make_batches(run, speedups)
    identity = steps.make_identity(run.config, data, tokens, runtime, batches.sampling)
    require_agreement(runtime, {**identity.config, "the data": identity.data, "the labels": identity.labels})
    on_gpu, has_validation = runtime.device.type == "cuda", "validation" in splits
    plan = steps.make_plan(run.config, batches, suite, has_validation=has_validation, on_gpu=on_gpu)
    columns, names, long_texts = bundle.columns, tuple(suite.names), tokens.long_texts
    facts = ModelFacts(bundle.labels, columns.named, columns.label, tokens.length, names, long_texts)
    return steps.Prepared(
        config=run.config,
        runtime=runtime,
        bundle=run.bundle,
        tokenized={split: replace(part, rows=run.splits[split]) for split, part in tokens.splits.items()},
        tokenizer=tokens.tokenizer,
        padding=padding,
        facts=facts,
        suite=suite,
        speedups=speedups,
        state=state,
        batches=batches,
        plan=plan,
        identity=identity,
        settled=settled,
    )


def train_run(run: RunDir, prepared: Prepared, observer: RunObserver, ending: RunEnding) -> RunResult:
    """Train in this folder, or resume an unfinished run that is there; then evaluate, export and report."""
    from tunesmith.pipeline import results
    from tunesmith.training.checkpoint import contiguous, load_weights, require_finite

    config, plan, state, runtime = prepared.config, prepared.plan, prepared.state, prepared.runtime
    writer = _make_writer(run, prepared, observer)
    evaluation = results.Evaluation(prepared, observer.progress, writer) if "validation" in prepared.tokenized else None
    per_epoch = float(plan.epoch_ends[0])
    observer.plan(plan.num_steps, per_epoch)
    with writer.recording():
        if runtime.is_main:
            refuse_another_run(run, prepared.identity.run_id)
        run_id, rows, epochs = prepared.identity.run_id, len(prepared.rows("train")), plan.fraction(plan.num_steps)
        writer.begin(RunStarted(run_id, 0, plan.num_steps, per_epoch, epochs, rows, time.time()))
        if runtime.is_main:  # a refused run keeps its run.yaml, because `tunesmith resume` uses it
            results.write_start(run, prepared)
        for event in writer.train(prepared.batches, evaluation):
            if ending.enough(event):
                break
        writer.stop.raise_immediately()
        best_step = state.progress.step if writer.keep_best else None
        with writer.best_weights() as best:
            prepared.speedups.close()
            if best is not None:
                load_weights(state.model, best)
            if ending.change is not None:
                ending.change(state.model)
            weights = contiguous(state.model.state_dict())
            require_finite(weights, state.step)
            known = evaluation.predictions if evaluation is not None and ending.change is None else {}
            predictions = results.predict_splits(prepared, observer.progress, known.get(best_step or state.step))
        prepared = results.move_thresholds(prepared, predictions, observer.log)
        prepared = results.with_ending(run, prepared, ending)
        scores = results.score_splits(prepared, predictions) | ending.scores
        diagnosis: list[str] = []
        if runtime.is_main:
            assert writer.journal is not None
            writer.journal.sync()  # raises if the run folder was replaced meanwhile
            results.write_results(run, prepared, predictions, scores)
            card = results.write_card(prepared, scores, steps=state.step, best_step=best_step)
            results.write_model(run, prepared, weights, card, results.held_out_examples(prepared, predictions))
            writer.end("early_stopping" if state.step < plan.num_steps else "completed")
            diagnosis = results.draw_and_explain(run, writer.stop.run_is_complete) if observer.pages else []
            writer.stop.run_is_complete()
            if not observer.pages or (config.save_strategy is None and config.save_total_limit == 1):
                for folder in run.checkpoints():
                    delete_folder(folder)  # a finished run cannot be resumed: model/ has the best weights
        runtime.barrier()
    warnings = tuple(finding.line() for finding in prepared.bundle.findings if finding.severity != "info")
    return results.RunResult(run, scores, state.step, best_step, tuple(diagnosis), warnings)


def _make_writer(run: RunDir, prepared: Prepared, observer: RunObserver) -> RunWriter:
    """Return the writer of event log and checkpoints; on rank 0 it passes events to the observer and to trackers."""
    from tunesmith.inference.model_folder import describe_model
    from tunesmith.training.run_writer import RunWriter

    config, plan, state = prepared.config, prepared.plan, prepared.state
    listeners = list(observer.listeners)
    names = [name for name in config.report_to if name != "none"] if prepared.runtime.is_main else []
    if names:
        from tunesmith.pipeline.trackers import Trackers

        listeners.append(Trackers(names, config, plan, state.model))
    return RunWriter(
        run,
        state,
        prepared.identity,
        plan=plan,
        describe=describe_model(state.model, prepared.tokenizer, prepared.facts),
        keep_checkpoints=config.save_total_limit or 10**9,
        keep_best=plan.metric is not None and config.load_best_model_at_end is not False,
        allow_changed=config.allow_changed_data,
        listeners=listeners,
    )
