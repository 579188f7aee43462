# ruff: noqa: E402
"""Modules that the fork server imports before the first trial, so that a trial takes a second."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import warnings

os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", MPLBACKEND="Agg")
warnings.simplefilter("ignore")

import torch

torch.set_num_threads(1)
with contextlib.suppress(RuntimeError):
    torch.set_num_interop_threads(1)
for name in (
    *("pytest", "accelerate", "datasets", "matplotlib.pyplot", "sklearn.metrics", "transformers.trainer"),
    *("transformers.models.auto.modeling_auto", "transformers.models.bert.modeling_bert"),
    *("tunesmith.cli.main", "tunesmith.cli.train", "tunesmith.cli.console", "tunesmith.pipeline.train"),
    *("tunesmith.trainer", "tunesmith.report.build", "tunesmith.report.build", "tunesmith.inference.predictor"),
    *("tunesmith.inference.board", "tunesmith.inference.service", "tunesmith.cli.doctor", "faults.trials"),
):
    importlib.import_module(name)

from faults import engine_trial
from pictures import blank_pictures

if os.environ.get("TUNESMITH_FAULT_TRIALS") != "full":
    blank_pictures()
engine_trial.warm_up()
gc.collect()
gc.freeze()  # garbage collection in a child then doesn't copy the pages of all modules
