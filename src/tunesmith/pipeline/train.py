"""A training run from config to report, in order: `tunesmith train`, `finetune(df)` and every trial of a search run this.

`finetune` reads the data and prepares the run (prepare.py), `train_run` trains and finishes it (results.py).

Nothing here imports torch at module level: errors in the options, the data or the name of the model are reported within a
second or two, before the heavy libraries load and before a run folder is made.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.config.load import load_config
from tunesmith.config.options import RunConfig, dump_config
from tunesmith.config.validate import DATA_SOURCES
from tunesmith.errors import CheckpointError, ConfigError, DataError
from tunesmith.events import Event, RunEnded, RunStarted
from tunesmith.files import write_file
from tunesmith.labels import Task
from tunesmith.pipeline.identity import choose_folder, finished_error, is_finished
from tunesmith.pipeline.inputs import read_run_data, refuse_what_is_not_built
from tunesmith.runs.event_log import read_journal
from tunesmith.runs.folder import RunDir, describe_environment, read_launch, require_own_folder
from tunesmith.runs.lock import RunLock

if TYPE_CHECKING:
    from tunesmith.inference.predictor import Predictor
    from tunesmith.metrics.intervals import Score
    from tunesmith.pipeline.prepare import Prepared
    from tunesmith.training.run_writer import RunWriter

INPUTS = (
    *("model_name_or_path", "tokenizer_name", "dataset_name"),
    *("train_file", "validation_file", "test_file", "labels_file"),
)
"""Options that may name a folder or file which the run reads."""


Log = Callable[[str], None]
ShowProgress = Callable[[str, int, int], None]
"""Called with (what, done, in all): rows, or bytes while a file is read."""


PAIR_STAGE = "pair warm-up"
"""The name under which the steps of the pair warm-up are shown as progress."""


@dataclass
class RunObserver:
    """Receives the messages and events of a run. `plan` is called with (total steps, steps per epoch) before the first event.

    Without `pages` no curves and no report are drawn at the end, as in a search over many runs.
    """

    log: Log = lambda text: None
    progress: ShowProgress = lambda what, done, total: None
    plan: Callable[[int, float], None] = lambda num_steps, steps_per_epoch: None
    listeners: list[Callable[[Event], None]] = field(default_factory=list)
    pages: bool = True
    start_steps: int | None = None
    """Steps of a pair start at most: `tunesmith plan` times a few and forecasts the others."""


@dataclass(frozen=True)
class RunEnding:
    """`enough` ends training after an event, with the weights as they are; `change` is given the model before it is scored.

    `thresholds`, `lines` (in addition to the recipe's) and `scores` (in addition to those of the splits) are stored with the run.
    """

    enough: Callable[[Event], bool] = lambda event: False
    change: Callable[[Any], None] = lambda model: None
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
    `use_test` the test examples are neither predicted nor scored. `ending`: see `RunEnding`.
    """
    data = {"train": train_data, "validation": validation_data, "test": test_data}
    config = _complete(config, options, has_data=train_data is not None)
    refuse_what_is_not_built(config, one_of_many=ending is not None)
    config, note = choose_folder(config, in_memory=train_data is not None)
    run, launch = RunDir(config.run_folder), read_launch()
    is_main = launch.rank == 0
    observer = observer if observer is not None and is_main else RunObserver()
    if is_main:
        if note is not None:
            observer.log(note)
        _require_folder(config, run)
    read = partial(read_run_data, config, data, observer.progress, use_test=use_test)
    # Several ranks read one after the other: the first builds the table that the others find.
    found = read() if launch.world == 1 else None
    with RunLock(run.lock_file) if is_main else nullcontext():
        from tunesmith.pipeline.prepare import prepare, start_runtime
        from tunesmith.training.distributed import watch_ranks

        runtime = start_runtime(config)
        with watch_ranks(runtime):
            prepared = prepare(config, runtime, lambda: found or read(), observer)
            return train_run(run, prepared, observer, ending)


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
            fix="Call tunesmith.pipeline.folds.run_repeats(config, RunObserver()), or set one fold.",
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


def train_run(run: RunDir, prepared: Prepared, observer: RunObserver, ending: RunEnding | None = None) -> RunResult:
    """Train in this folder, then evaluate, export and report; resume an unfinished run that is there."""
    from tunesmith.pipeline.results import Evaluation, finish_run

    ending = ending or RunEnding()
    writer = _make_writer(run, prepared, observer)
    evaluation = Evaluation(prepared, observer, writer) if "validation" in prepared.tokenized else None
    observer.plan(prepared.plan.num_steps, float(prepared.plan.epoch_ends[0]))
    with writer.recording():
        _begin(run, prepared, writer)
        for event in writer.train(prepared.batches, evaluation):
            if ending.enough(event):
                break
        writer.stop.raise_immediately()
        known = evaluation.predictions if evaluation is not None and ending.change is RunEnding.change else {}
        return finish_run(prepared, observer, writer, ending, known)


def _make_writer(run: RunDir, prepared: Prepared, observer: RunObserver) -> RunWriter:
    """Return the writer of event log and checkpoints; on rank 0 it passes events to the observer and to trackers."""
    from tunesmith.inference.model_folder import describe_model
    from tunesmith.pipeline.plan import announce_plan
    from tunesmith.training.run_writer import RunWriter

    config, plan, state = prepared.config, prepared.plan, prepared.state
    listeners: list[Callable[[Event], None]] = []
    if prepared.runtime.is_main:
        listeners = [*observer.listeners, announce_plan(prepared, observer.log)]
        names = [name for name in config.report_to if name != "none"]
        if names:
            from tunesmith.pipeline.trackers import make_trackers

            listeners.append(make_trackers(names, config, plan, state.model))
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


def _begin(run: RunDir, prepared: Prepared, writer: RunWriter) -> None:
    """Start or resume. A run that is refused keeps its run.yaml: `tunesmith resume` uses it."""
    plan, is_main, fresh = prepared.plan, prepared.runtime.is_main, not run.checkpoints()
    if is_main:
        _refuse_another_run(run, prepared)
        if fresh:
            _write_start(run, prepared)
    rows, epochs = len(prepared.rows("train")), plan.fraction(plan.num_steps)
    run_id, per_epoch = prepared.identity.run_id, float(plan.epoch_ends[0])
    writer.begin(RunStarted(run_id, 0, plan.num_steps, per_epoch, epochs, rows, time.time()))
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


SHOWN_METRICS = 4
"""Metrics shown with the loss in what a notebook shows; the report has them all."""


@dataclass(frozen=True)
class RunResult:
    """What a run ended with. `scores[split][metric]` has value, interval and n; `diagnosis` is in lines."""

    run: RunDir
    scores: dict[str, dict[str, Score]]
    steps: int
    best_step: int | None
    diagnosis: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    """What the audit of the data warns of, in lines."""

    @cached_property
    def predictor(self) -> Predictor:
        """The trained model, loaded when it is first used."""
        from tunesmith.inference.predictor import Predictor

        return Predictor.load(self.run.path)

    def predict(self, texts: Any) -> list[Any]:
        """The label of each text, in input order: a name, a list of names (multilabel) or a number (regression).

        `texts` is a list of texts or pairs, a Series, an array, or a table that has the text columns of the training data.
        """
        return self.predictor.predict(*self._text_columns(texts).values())

    def predict_proba(self, texts: Any) -> Any:
        """Return one row of probabilities per text, in the order of `classes_`; the number itself for regression."""
        table = self.predictor.probabilities(*self._text_columns(texts).values())
        labels = self.predictor.facts.labels
        return table if labels.task is Task.REGRESSION else table[:, labels.class_order]

    @property
    def classes_(self) -> list[str]:
        """Sorted label names, as in scikit-learn: the columns of `predict_proba`."""
        return self.predictor.classes_

    @property
    def labels(self) -> tuple[str, ...]:
        """Label names in the order of the model's `id2label`."""
        return self.predictor.facts.labels.names

    def evaluate(self, data: Any, labels: Any = None) -> dict[str, Score]:
        """Every metric with its interval on labeled rows: a table as for training, or texts and their labels."""
        from tunesmith.data.read import read_labelled
        from tunesmith.data.rows import Columns
        from tunesmith.data.tables import columns_table
        from tunesmith.metrics.table import make_suite

        facts = self.predictor.facts
        text, label = tuple(facts.text_columns or ()), facts.label_column or "label"
        if labels is not None:
            data = columns_table({**self._text_columns(data), label: labels})
        dataset = read_labelled(data, columns=Columns(text, label, facts.labels.task), labels=facts.labels)
        found = [list(dataset[name]) for name in text]
        logits = self.predictor.predict_texts(iter([found])).logits
        known = facts.labels
        suite = make_suite(
            known.task, names=facts.metrics, positive_name=known.positive_name, thresholds=known.thresholds
        )
        scores = suite.compute_with_intervals(logits, dataset.with_format("numpy")["labels"][:])
        if next(iter(scores.values())).n == 0:
            raise DataError("no row has a label", fix="Pass labeled rows.")
        return scores

    def report(self) -> Path:
        """The page about this run, drawn again; open it in a browser."""
        from tunesmith.report.build import build_report
        from tunesmith.report.render import write_report

        return write_report(build_report(self.run), self.run.report_file)

    def _text_columns(self, texts: Any) -> dict[str, list[str]]:
        """The texts under the names of the training columns; the wrong number of texts a row is refused."""
        from tunesmith.data.tables import text_columns_of

        names = tuple(self.predictor.facts.text_columns or ())
        has = set(texts) if isinstance(texts, Mapping) else set(getattr(texts, "columns", ()))
        if has and set(names) <= has:
            texts = {name: texts[name] for name in names}
        columns = text_columns_of(texts)
        if len(columns) != len(names):
            raise ValueError(
                f"got {len(columns)} texts per row; the model was trained on {len(names)} ({', '.join(names)})"
            )
        return dict(zip(names, columns.values(), strict=True))

    def __repr__(self) -> str:
        split = "test" if "test" in self.scores else next(iter(self.scores), None)
        score = next(((k, v) for k, v in self.scores[split].items()), None) if split is not None else None
        text = f", {split} {score[0]} {score[1].text()}" if score is not None else ""
        return f"RunResult({str(self.run.path)!r}, {self.steps} steps{text})"

    def _repr_html_(self) -> str:
        """Scores, diagnosis and curves, as a notebook shows them."""
        splits = list(self.scores)
        metrics = list(dict.fromkeys(m for found in self.scores.values() for m in found))
        shown = [*[m for m in metrics if m != "loss"][:SHOWN_METRICS], *[m for m in metrics if m == "loss"]]
        head = "".join(f"<th style='text-align:left'>{escape(s)}</th>" for s in ("", *splits))
        rows = "".join(
            f"<tr><td>{escape(self._title(metric))}</td>"
            + "".join(
                f"<td>{escape(self.scores[s][metric].text()) if metric in self.scores[s] else ''}</td>" for s in splits
            )
            + "</tr>"
            for metric in shown
        )
        said = "".join(
            f"<div style='margin-left:{1.2 if line.startswith(' ') else 0}em'>{escape(line.strip())}</div>"
            for line in self.diagnosis
        )
        return (
            f"<div><b>{escape(self.run.name)}</b> &middot; {self.steps} steps, weights of step "
            f"{self.best_step or self.steps} &middot; <code>{escape(str(self.run.report_file))}</code>"
            f"<table><tr>{head}</tr>{rows}</table>{said}{self._picture()}</div>"
        )

    def _title(self, metric: str) -> str:
        return next(found[metric].title(metric) for found in self.scores.values() if metric in found)

    def _picture(self) -> str:
        if not self.run.curves_svg.is_file():
            return ""
        data = base64.b64encode(self.run.curves_svg.read_bytes()).decode()
        return f"<img alt='learning curves' style='max-width:100%' src='data:image/svg+xml;base64,{data}'>"
