"""transformers' callbacks around the engine's events, and checkpoints that callbacks change in `on_save`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.keep.checkpoint import PIECES
from tunesmith.keep.weight_files import holds, is_weights
from tunesmith.ranks.sharding import is_sharded
from tunesmith.run.ledger import watch
from tunesmith.trainer.saving import TRAINER_STATE
from tunesmith.trainer.upstream import (
    CallbackHandler,
    DefaultFlowCallback,
    ExportableState,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    get_reporting_integration_callbacks,
    speed_metrics,
    trainer_log,
)

if TYPE_CHECKING:
    from tunesmith.trainer.facade import Trainer


def make_handler(trainer: Trainer, callbacks: list[Any] | None) -> Any:
    """Default flow, trackers, the user's own: transformers' order."""
    trackers = get_reporting_integration_callbacks(trainer.args.report_to)
    given = [DefaultFlowCallback, *trackers, *(callbacks or [])]
    return CallbackHandler(given, trainer.model, trainer.processing_class, trainer.optimizer, trainer.lr_scheduler)


def fresh_state(trainer: Trainer) -> Any:
    """An empty TrainerState that knows the stateful callbacks."""
    return TrainerState(
        is_local_process_zero=trainer.is_local_process_zero(),
        is_world_process_zero=trainer.is_world_process_zero(),
        stateful_callbacks=_stateful(trainer),
    )


def tell(trainer: Trainer, event: str, **extra: Any) -> None:
    """Calls one event of all callbacks and keeps the control they return."""
    call = getattr(trainer.callback_handler, event)
    trainer.control = call(trainer.args, trainer.state, trainer.control, **extra)


def listens(trainer: Trainer, event: str) -> bool:
    """Whether any callback does something at this event."""
    default = getattr(TrainerCallback, event)
    return any(getattr(type(c), event, default) is not default for c in trainer.callback_handler.callbacks)


def _stateful(trainer: Trainer) -> list[Any]:
    return [c for c in [*trainer.callback_handler.callbacks, trainer.control] if isinstance(c, ExportableState)]


def export_callback_states(trainer: Trainer) -> None:
    """Puts the state of every stateful callback into `state.stateful_callbacks`."""
    found: dict[str, Any] = {}
    for callback in _stateful(trainer):
        name = type(callback).__name__
        if name in found:
            found[name] = [*(found[name] if isinstance(found[name], list) else [found[name]]), callback.state()]
        else:
            found[name] = callback.state()
    trainer.state.stateful_callbacks = found


def load_callback_states(trainer: Trainer) -> None:
    """Restores counters of stateful callbacks; with restore_callback_states_from_checkpoint, their arguments too."""
    whole = trainer.args.restore_callback_states_from_checkpoint
    for name, stored in trainer.state.stateful_callbacks.items():
        mine = [c for c in [*trainer.callback_handler.callbacks, trainer.control] if type(c).__name__ == name]
        if not mine:
            trainer_log.warning(f"The checkpoint holds the state of a callback that this run does not have: {name}")
        for callback, data in zip(mine, stored if isinstance(stored, list) else [stored], strict=False):
            if callback is trainer.control and not whole:
                continue
            values = {**(data.get("args", {}) if whole else {}), **data.get("attributes", {})}
            for key, value in values.items():
                setattr(callback, key, value)


def add_log_line(trainer: Trainer, logs: dict[str, float], start_time: float | None) -> None:
    """A line of `state.log_history`, which is passed to the callbacks."""
    state = trainer.state
    if state.epoch is not None:
        logs["epoch"] = state.epoch
    if trainer.args.include_num_input_tokens_seen != "no":
        logs["num_input_tokens_seen"] = state.num_input_tokens_seen
        if start_time is not None:
            tokens = state.num_input_tokens_seen - trainer._initial_num_input_tokens_seen
            logs.update(speed_metrics("train", start_time, num_tokens=tokens))
    state.log_history.append({**logs, "step": state.global_step})
    tell(trainer, "on_log", logs=logs)


def new_control() -> Any:
    """A TrainerControl with nothing asked for."""
    return TrainerControl()


@contextlib.contextmanager
def sealing_again(folder: Path, model: Any) -> Iterator[None]:
    """Inside, callbacks may change a checkpoint: it is sealed as they leave it, and what they changed is logged."""
    before = watch(folder)
    yield
    if not folder.is_dir():
        return
    try:
        changed = before.changed()
        if not changed:
            return
        same = not is_sharded(model) and holds(folder, model)
        altered = [n for n in changed if n in (*PIECES, TRAINER_STATE) or (is_weights(n) and not same)]
        before.seal(changed, altered=altered)
    except OSError as error:
        trainer_log.warning("%s was changed by a callback and cannot be sealed again: %s", folder, error)
        return
    what = ", ".join(changed[:5]) + (", ..." if len(changed) > 5 else "")
    effect = f"; a resume from it is not exact because of {', '.join(altered)}" if altered else ""
    trainer_log.warning("%s was changed by a callback and is sealed as it is now: %s%s", folder, what, effect)
