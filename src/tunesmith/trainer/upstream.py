"""What the façade takes from transformers, in one place and as Any: half of it has no types, and those it has change."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import hyperparameter_search as _search
from transformers import modelcard as _modelcard
from transformers import trainer as _trainer
from transformers import trainer_callback as _callback
from transformers import trainer_pt_utils as _parts
from transformers import trainer_utils as _utils
from transformers import utils as _transformers_utils
from transformers.integrations import integration_utils as _integrations
from transformers.integrations import neftune as _neftune
from transformers.loss import loss_utils as _losses
from transformers.models.auto import modeling_auto as _auto


def _any(value: object) -> Any:
    return value


library = _any(transformers)
parts = _any(_parts)
utils = _any(_utils)
neftune = _any(_neftune)
search = _any(_search)
losses = _any(_losses)
logging = _any(_transformers_utils.logging)
trainer_log = logging.get_logger("transformers.trainer")
"""The logger that `log_level` and `log_level_replica` of the arguments set."""

DataCollatorWithPadding = library.DataCollatorWithPadding
PreTrainedModel = library.PreTrainedModel
PreTrainedTokenizerBase = library.PreTrainedTokenizerBase
default_data_collator = library.default_data_collator
enable_full_determinism = library.enable_full_determinism
get_scheduler = library.get_scheduler
set_seed = library.set_seed

CallbackHandler = _any(_callback).CallbackHandler
DefaultFlowCallback = _any(_callback).DefaultFlowCallback
ExportableState = _any(_callback).ExportableState
PrinterCallback = _any(_callback).PrinterCallback
ProgressCallback = _any(_callback).ProgressCallback
TrainerCallback = _any(_callback).TrainerCallback
TrainerControl = _any(_callback).TrainerControl
TrainerState = _any(_callback).TrainerState
TrainingSummary = _any(_modelcard).TrainingSummary

get_reporting_integration_callbacks = _any(_integrations).get_reporting_integration_callbacks
can_return_loss = _any(_transformers_utils).can_return_loss
find_labels = _any(_transformers_utils).find_labels
has_length = utils.has_length
speed_metrics = utils.speed_metrics
headless_models = frozenset(n for n in _any(_auto).MODEL_MAPPING_NAMES.values() if isinstance(n, str))

is_optimizer_factory = _any(_trainer).is_optimizer_factory
optimizer_class_and_options = _any(_trainer).Trainer.get_optimizer_cls_and_kwargs


def is_arrow_dataset(dataset: Any) -> bool:
    """Whether this is a map-style `datasets.Dataset` (known by what it can do: its library is not imported for it)."""
    return hasattr(dataset, "remove_columns") and hasattr(dataset, "data") and bool(has_length(dataset))


def progress_callback() -> Any:
    """The progress bar for a terminal or a notebook."""
    if not _any(_transformers_utils).is_in_notebook():
        return ProgressCallback
    from transformers.utils.notebook import NotebookProgressCallback

    return NotebookProgressCallback
