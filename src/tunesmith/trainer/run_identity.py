"""What a Trainer's checkpoint belongs to: what a resume compares before its first step. docs/concepts/reliability.md lists the fields.

A dataset that cannot be hashed is compared by the rows that were used. Beside each row goes a mark of 8 bytes, made where the
row is read (a worker, or this process). A checkpoint keeps the marks of at most 65,536 rows, or one mark for all rows of a
stream so far. A resume reads some used rows again before its first step, and compares every other one when it is used again;
the skipped part of a stream is read anyway and compared whole.
"""

from __future__ import annotations

import base64
import hashlib
import json
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from tunesmith.data.tokenize import padded_fingerprint
from tunesmith.models.families import has_adapters
from tunesmith.runs.environment import package_versions
from tunesmith.trainer.arguments import trainer_log
from tunesmith.trainer.content import MARK_BYTES, code_of, content_of, is_arrow_dataset, item_mark, settings_of
from tunesmith.training.checkpoint import Identity, content_mark
from tunesmith.training.run_writer import Wording
from tunesmith.training.state import generators_untouched

if TYPE_CHECKING:
    from tunesmith.trainer.facade import Trainer

MOST_MARKS = 65_536
READ_AGAIN = 256
"""Used rows read again before the first step of a resume; 1% of the rows where that is more."""
Indices = npt.NDArray[np.int64]


@dataclass
class MarkedCollate:
    """A collator whose batches travel with the marks of their rows. Runs where the rows are read."""

    collate: Any

    def __call__(self, items: Any) -> tuple[Any, bytes]:
        marks = b"".join(item_mark(item) or bytes(MARK_BYTES) for item in items)
        return self.collate(items), marks


def can_mark(loader: Any) -> bool:
    """Whether the rows of a loader can be marked as they are read. Rows in Arrow are hashed before the run instead."""
    if not isinstance(loader, DataLoader) or (loader.batch_sampler is None and loader.batch_size is None):
        return False
    keeps_workers = loader.num_workers > 0 and loader.persistent_workers
    return not keeps_workers and not is_arrow_dataset(loader.dataset)


def marked_iterator(loader: Any) -> Iterator[Any]:
    """Batches as (features, marks). The loader itself is not changed."""
    plain = loader.collate_fn
    loader.collate_fn = MarkedCollate(plain)
    try:
        return iter(loader)
    finally:
        loader.collate_fn = plain


@dataclass
class UsedRows:
    """The marks of the rows used so far, by this process and those before it."""

    count: int | None
    """Rows of the dataset; None for a stream."""
    changed: Callable[[str, bool], None]
    """Called with what differs from before a resume, and whether that is certain."""
    varies: bool = False
    """The same row was seen with two contents within one process: rows are random, and not compared."""
    stream: tuple[int, int, str] | None = None
    """(epoch, batches of it that were used, a mark of them all)."""
    _expected: tuple[int, int, str] | None = None
    _marks: npt.NDArray[np.uint64] = field(init=False)
    _earlier: npt.NDArray[np.bool_] = field(init=False)
    """Whether a mark is from before the resume and was not compared yet."""

    def __post_init__(self) -> None:
        self._stride = max(1, -(-(self.count or 0) // MOST_MARKS))
        size = -(-(self.count or 0) // self._stride)
        self._marks, self._earlier = np.zeros(size, dtype=np.uint64), np.zeros(size, dtype=bool)

    @property
    def wants_marks(self) -> bool:
        """Whether marks of the next epoch are of use: not once every row has one and none is left to be compared."""
        done = self.count is not None and bool(self._marks.all()) and not self._earlier.any()
        return not self.varies and not done

    def note(self, rows: Indices, marks: bytes) -> None:
        """Takes the marks of rows that are about to be used, and compares them with those from before a resume."""
        found = np.frombuffer(marks, dtype=np.uint64)
        if self.varies or len(found) != len(rows):
            return
        kept = rows % self._stride == 0
        at, found = rows[kept] // self._stride, found[kept]
        differs = (self._marks[at] != 0) & (found != 0) & (self._marks[at] != found)
        if differs.any():
            self.varies = True
            old = differs & self._earlier[at]
            if old.any():
                row = int(rows[kept][old][0])
                self.changed(f"row {row} of the training data is not what it was, or depends on the epoch", False)
        self._marks[at], self._earlier[at] = found, False

    def note_batch(self, epoch: int, number: int, marks: bytes) -> None:
        """Takes the marks of batch `number` (from 0) of an epoch of a stream."""
        before = self.stream[2] if self.stream is not None and number else ""
        self.stream = (epoch, number + 1, hashlib.sha256(before.encode() + marks).hexdigest()[:32])
        if self._expected is not None and self._expected[:2] == self.stream[:2]:
            expected, self._expected = self._expected, None
            if expected != self.stream:
                self.changed(f"the {number + 1} batches before the checkpoint are not what they were", True)

    def end_epoch(self, epoch: int) -> None:
        """Checks at the end of an epoch of a stream that all batches before the checkpoint were read."""
        if self._expected is not None and self._expected[0] == epoch:
            wanted, self._expected = self._expected[1], None
            self.changed(f"the training data ended before batch {wanted}, which the checkpoint had reached", True)

    def read_again(self, dataset: Any) -> str | None:
        """Reads some used rows again; what changed, in words. A row that differs between two reads is random, not changed."""
        used = np.flatnonzero(self._marks)
        wanted = max(READ_AGAIN, (self.count or 0) // 100)
        for at in used[:: max(1, -(-len(used) // wanted))] if not self.varies else ():
            row = int(at) * self._stride
            mark = _number(item_mark(dataset[row]))
            if mark and mark != self._marks[at]:
                if mark == _number(item_mark(dataset[row])):
                    return f"row {row} of the training data is not what it was when it was used"
                self.varies = True
                return None
            self._earlier[at] = False
        return None

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint."""
        marks = base64.b64encode(self._marks.tobytes()).decode() if self._marks.any() and not self.varies else ""
        return {"count": self.count, "varies": self.varies, "marks": marks, "stream": self.stream}

    def restore(self, stored: Mapping[str, Any], *, with_stream: bool) -> None:
        """Takes what a checkpoint kept. Marks of another number of rows are of no use: that change was reported before."""
        if stored.get("count") != self.count:
            return
        self.varies = bool(stored["varies"])
        marks = np.frombuffer(base64.b64decode(stored["marks"]), dtype=np.uint64)
        if len(marks) == len(self._marks):
            self._marks, self._earlier = marks.copy(), marks != 0
        if with_stream and stored["stream"] is not None:
            epoch, batches, mark = stored["stream"]
            self._expected = (int(epoch), int(batches), str(mark))


def _number(mark: bytes | None) -> int:
    return int(np.frombuffer(mark or bytes(MARK_BYTES), dtype=np.uint64)[0])


def compare_used_rows(
    used: UsedRows | None, stored: dict[str, Any] | None, loader: Any, *, with_stream: bool
) -> str | None:
    """Takes over the marks of a checkpoint and reads some of its rows again: what differs, if anything does."""
    if used is None or stored is None:
        return None
    used.restore(stored, with_stream=with_stream)
    if not can_mark(loader) or used.count is None:
        return None
    with generators_untouched():
        found = used.read_again(loader.dataset)
    used.varies = used.varies or found is not None
    return found


MATHS_NAMES = """
    seed data_seed train_sampling_strategy dataloader_drop_last length_column_name ignore_data_skip remove_unused_columns
    learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps warmup_ratio optim optim_args optim_target_modules
    weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm label_smoothing_factor neftune_noise_alpha
    average_tokens_across_devices bf16 fp16 tf32 torch_compile use_liger_kernel label_names
"""
MATHS = tuple(MATHS_NAMES.split())
"""Arguments that decide about the weights: another value is another experiment, and refused."""
REPORTED = ("num_train_epochs", "max_steps", "metric_for_best_model", "greater_is_better")
"""Arguments that a script may change to train longer or to evaluate otherwise. The schedule, or what is best, depends on
them, so that is reported."""
IDLE_CONFIG = ("architectures", "dtype", "torch_dtype", "transformers_version", "problem_type", "id2label", "label2id")
"""Entries of a model's config that change by loading, saving or the first batch; labels are compared by themselves."""
WORDING = Wording(
    "Put it back, set Trainer.allow_changed_data = True to resume all the same, or load the weights with from_pretrained "
    "and start a new run.",
    "train(resume_from_checkpoint=True) resumes from here",
    option="",
)
OVERRIDES = ("compute_loss", "training_step", "get_train_dataloader", "create_optimizer", "create_scheduler")


def trainer_identity(trainer: Trainer, dataset: Any, model_mark: str, run_id: str, rows_per_step: int) -> Identity:
    """The identity of a run. `dataset` is what the loader reads; `model_mark` is from before any speed-up."""
    args, collator, data = trainer.args, trainer.data_collator, content_of(dataset)
    config: dict[str, Any] = {
        "rows_per_step": rows_per_step,
        **{name: _plain(getattr(args, name)) for name in MATHS if hasattr(args, name)},
        "the training data": content_mark(data),
        "the model": model_mark,
        "adapters": has_adapters(trainer.model),
        "the collator": content_mark(settings_of(collator)),
        "the tokenizer": tokenizer_mark(trainer.processing_class or getattr(collator, "tokenizer", None)),
    }
    labels = getattr(getattr(trainer.model, "config", None), "id2label", None) or {}
    names = {"names": [str(labels[k]) for k in sorted(labels)]}
    return Identity(run_id, data, config, names, {**package_versions(), **_reported(trainer, dataset)})


def _reported(trainer: Trainer, dataset: Any) -> dict[str, str | None]:
    """What may differ but is reported: length, evaluation, device, and code, of which only the user knows what it means."""
    own = {name: getattr(trainer, name) for name in OVERRIDES if trainer.overrides(name)}
    code = {
        "the collator": trainer.data_collator,
        "compute_loss_func": trainer.compute_loss_func,
        "compute_metrics": trainer.compute_metrics,
        "the dataset": getattr(type(dataset), "__getitem__", getattr(type(dataset), "__iter__", None)),
        "the dataset's transform": (getattr(dataset, "format", None) or {}).get("format_kwargs", {}).get("transform"),
        **own,
    }
    marks = {f"the code of {name}": content_mark(text) for name, value in code.items() if (text := code_of(value))}
    if str(getattr(trainer.args.eval_strategy, "value", trainer.args.eval_strategy)) != "no":
        marks["the evaluation data"] = content_mark(content_of(trainer.eval_dataset))
    reported = {name: str(getattr(trainer.args, name)) for name in REPORTED}
    return {**reported, **marks, "device": trainer.runtime.device.type, "python": platform.python_version()}


def model_mark(model: Any) -> str:
    """A hash of what a model computes, without its weights, which the checkpoint holds."""
    config: Any = getattr(model, "config", None)
    settings = config.to_dict() if hasattr(config, "to_dict") else {}
    kept = {k: v for k, v in settings.items() if k not in IDLE_CONFIG and not k.startswith("_")}
    modules = [f"{n} {type(m).__name__.removeprefix('FSDP')}({m.extra_repr()})" for n, m in model.named_modules()]
    weights = [f"{n} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for n, p in model.named_parameters()]
    frozen = [frozen_content(model)] if has_adapters(model) else []  # a checkpoint of adapters has no other weights
    text = json.dumps([kept, modules, weights, *frozen], sort_keys=True, default=str)
    return content_mark(re.sub(r" at 0x[0-9a-f]+", "", text))


def frozen_content(model: Any) -> str:
    """A hash of all weights of a model that are not trained. With fsdp all processes call it."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            digest.update(name.encode())
            digest.update(weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def tokenizer_mark(processor: Any) -> str | None:
    """A hash of a tokenizer's or processor's settings; None where it cannot be known."""
    try:
        if isinstance(processor, PreTrainedTokenizerBase):
            return content_mark(padded_fingerprint(processor, processor.model_max_length))
        return content_mark(processor.to_json_string()) if hasattr(processor, "to_json_string") else None
    except Exception as error:  # a tokenizer of the user's own may lack any of it
        trainer_log.debug("the tokenizer is not compared on resume: %s", error)
        return None


def _plain(value: Any) -> Any:
    plain = value.value if isinstance(value, Enum) else value
    simple = isinstance(plain, (str, int, float, bool, type(None)))
    return plain if simple else json.loads(json.dumps(plain, default=str))
