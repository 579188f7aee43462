"""transformers' callbacks around the engine's events."""

from __future__ import annotations

from typing import Any

from tunesmith.trainer.attributes import TrainerAttributes
from tunesmith.trainer.upstream import (
    CallbackHandler,
    DefaultFlowCallback,
    ExportableState,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    get_reporting_integration_callbacks,
    progress_callback,
)


class CallbackPart(TrainerAttributes):
    """The methods of a Trainer that deal with callbacks."""

    def add_callback(self, callback: Any) -> None:
        """Adds a callback, given as an object or a class."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Removes a callback and returns it; None when it is not there."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Removes a callback."""
        self.callback_handler.remove_callback(callback)

    def _make_handler(self, callbacks: list[Any] | None) -> None:
        """Default flow, trackers, the user's own, then progress or printing: transformers' order."""
        trackers = get_reporting_integration_callbacks(self.args.report_to)
        given = [DefaultFlowCallback, *trackers, *(callbacks or [])]
        self.callback_handler = CallbackHandler(
            given, self.model, self.processing_class, self.optimizer, self.lr_scheduler
        )
        self.add_callback(PrinterCallback if self.args.disable_tqdm else progress_callback())

    def _fresh_state(self) -> Any:
        """An empty TrainerState that knows the stateful callbacks."""
        stateful = [c for c in [*self.callback_handler.callbacks, self.control] if isinstance(c, ExportableState)]
        return TrainerState(
            is_local_process_zero=self.is_local_process_zero(),
            is_world_process_zero=self.is_world_process_zero(),
            stateful_callbacks=stateful,
        )

    def _tell(self, event: str, **extra: Any) -> None:
        """Calls one event of all callbacks and keeps the control they return."""
        self.control = getattr(self.callback_handler, event)(self.args, self.state, self.control, **extra)

    def _listens(self, event: str) -> bool:
        """Whether any callback does something at this event."""
        default = getattr(TrainerCallback, event)
        return any(getattr(type(c), event, default) is not default for c in self.callback_handler.callbacks)


def new_control() -> Any:
    """A TrainerControl with nothing asked for."""
    return TrainerControl()
