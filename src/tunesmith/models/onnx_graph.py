"""A plain model as an ONNX graph with free batch and length, through `transformers.exporters`."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tunesmith.errors import ConfigError, ResourceError, short_text

SAMPLE_SHAPE = (3, 13)
"""Rows and tokens of the traced batch: both above 1, since a size of 1 would be taken for a constant."""


def write_onnx(model: Any, input_names: list[str], path: Path) -> None:
    """Writes the graph of the model's logits. The weights are inside the file below 2 GB."""
    try:
        import onnxscript  # noqa: F401
        from transformers.exporters.configs import OnnxConfig
        from transformers.exporters.exporter_onnx import OnnxExporter
    except ImportError as error:
        fix = "Run: pip install 'tunesmith[export]'"
        raise ResourceError(f"exporting needs {error.name or 'onnxscript'}, which is not installed", fix=fix) from None
    import torch

    rows, length = SAMPLE_SHAPE
    ids = torch.arange(rows * length).reshape(rows, length) % max(model.config.vocab_size - 10, 2) + 1
    inputs = {name: torch.zeros_like(ids) for name in input_names}
    inputs["input_ids"] = ids.clamp(max=model.config.vocab_size - 1)
    inputs["attention_mask"] = (torch.arange(length)[None] < torch.tensor([[length], [7], [4]])).long()
    model.eval()
    with _quiet_export(), torch.no_grad():
        try:
            exporter: Any = OnnxExporter
            program = exporter().export(model, inputs, config=OnnxConfig(dynamic=True))
        except Exception as error:  # whatever the tracer raises, the model cannot be exported
            problem = f"{type(model).__name__} cannot be written as ONNX ({short_text(error)})"
            raise ConfigError(problem, fix="Serve the model folder itself, or report the architecture.") from error
        program.save(str(path))


@contextmanager
def _quiet_export() -> Iterator[None]:
    """The exporters print and warn about their own internals."""
    logging.disable(logging.WARNING)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
