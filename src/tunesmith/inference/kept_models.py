"""The models that a service has loaded: found again by their files, loaded again when those were replaced."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tunesmith.errors import TunesmithError
from tunesmith.inference.bodies import BadRequest
from tunesmith.inference.model_folder import is_graph_folder
from tunesmith.runs.folder import RunDir
from tunesmith.runs.writing import folder_version

MAX_MODELS = 2


def load_run_predictor(run: RunDir) -> Any:
    """The run's model on the CPU: the GPU is left to the training."""
    from tunesmith.inference.predictor import Predictor

    for name in ("transformers", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return Predictor.load(run.path, use_cpu=True)


def model_home(run: RunDir) -> Path:
    """The folder with the model: model/ of a run, or an exported folder itself."""
    return run.path if is_graph_folder(run.path) else run.model


def model_marks(run: RunDir) -> tuple[tuple[Any, ...], ...]:
    """A signature of the files of model/, which changes when one is replaced; empty when there are none."""
    try:
        return folder_version(model_home(run))
    except OSError:
        return ()


class KeptModels:
    """At most two loaded models. `reload_aside`: a replaced one is loaded by a thread of its own while the old one answers."""

    def __init__(
        self,
        load: Callable[[RunDir], Any] = load_run_predictor,
        *,
        reload_aside: bool = False,
        on_reload: Callable[[str | None], None] = lambda problem: None,
    ) -> None:
        self._load = load
        self._aside = reload_aside
        self._on_reload = on_reload
        self._loading: tuple[Any, ...] | None = None
        self._refused: tuple[Any, ...] | None = None
        self._lock = threading.Lock()
        self._first = threading.Lock()
        self._kept: OrderedDict[tuple[Any, ...], Any] = OrderedDict()

    def get(self, run: RunDir) -> Any:
        """The loaded model; loaded again when its folder or a file in it was replaced."""
        marks = model_marks(run)
        key = (str(run.path), *marks)
        with self._lock:
            before = next((model for known, model in self._kept.items() if known[0] == key[0]), None)
            if key not in self._kept and self._aside and before is not None:
                # Without marks the folder is gone, perhaps between the two renames of its replacement.
                if marks and key not in (self._loading, self._refused):
                    self._loading = key
                    threading.Thread(target=self._load_aside, args=(run, key), daemon=True).start()
                return before
        if not marks:
            raise BadRequest(409, "the run has no finished model")
        with self._first:  # a request that comes while the model is loaded waits for it, and loads no second one
            if key not in self._kept:
                self._keep(key, self._load(run))
            self._kept.move_to_end(key)
            return self._kept[key]

    def _load_aside(self, run: RunDir, key: tuple[Any, ...]) -> None:
        """Loads a replaced model; one that cannot be loaded leaves the old one in place."""
        try:
            model = self._load(run)
        except Exception as error:
            self._refused = key
            self._on_reload(error.line() if isinstance(error, TunesmithError) else type(error).__name__)
        else:
            with self._lock:
                self._keep(key, model)
            self._on_reload(None)
        finally:
            self._loading = None

    def _keep(self, key: tuple[Any, ...], model: Any) -> None:
        for old in [k for k in self._kept if k[0] == key[0]]:
            del self._kept[old]
        while len(self._kept) >= MAX_MODELS:
            self._kept.popitem(last=False)
        self._kept[key] = model
