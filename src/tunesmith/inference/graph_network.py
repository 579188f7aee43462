"""An exported graph as a network: onnxruntime or OpenVINO, tokenizers and numpy; no torch, no transformers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from tunesmith.data.tokenize import ChunkEncoder, LongTexts, RustEncoder, TokenEncoder, load_plain_tokenizer
from tunesmith.data.tokens import TokenRows, length_batches, mean_by_row, pad_rows
from tunesmith.errors import ConfigError, short_text
from tunesmith.inference.facts import GraphFacts

TOKENS_AT_ONCE = 2048
Infer = Callable[[dict[str, npt.NDArray[Any]]], npt.NDArray[np.float32]]


class GraphNetwork:
    """The graph, its tokenizer, and how rows become its inputs."""

    def __init__(self, folder: Path, facts: GraphFacts, infer: Infer, long_texts: LongTexts = "head") -> None:
        tokenizer = load_plain_tokenizer(
            folder / "tokenizer.json",
            truncation_side=facts.truncation_side,
            split_special_tokens=facts.split_special_tokens,
        )
        self.folder = folder
        self.facts = facts
        self.name = f"{facts.engine} on cpu"
        self.has_types = facts.has_types
        self.max_length = facts.max_length
        self.special = tokenizer.special
        self.encoder: TokenEncoder = RustEncoder(tokenizer, facts.max_length, long_texts)
        self.chunks = ChunkEncoder(self.encoder, has_types=facts.has_types)
        self._infer = infer

    @property
    def vocab_size(self) -> int:
        """Number of token embeddings."""
        return self.facts.vocab_size

    def answer(
        self, rows: TokenRows, *, max_rows: int | None = None, on_batch: Callable[[int], None] | None = None
    ) -> npt.NDArray[np.float32]:
        """Logits of each row, in input order."""
        if self.encoder.windows is not None and rows.lengths.max(initial=0) > self.max_length:
            parts, owners = rows.in_windows(self.encoder.windows).all_windows()
            return mean_by_row(self.answer(parts, max_rows=max_rows, on_batch=on_batch), owners)
        fill = {"input_ids": self.facts.pad_token_id, "token_type_ids": self.facts.pad_token_type_id}
        logits: npt.NDArray[np.float32] | None = None
        for indices in length_batches(rows.lengths, max_rows=max_rows, max_tokens=TOKENS_AT_ONCE):
            width = max(int(rows.lengths[indices].max()), 1)
            found = self._infer(pad_rows(rows.take(indices), width, fill, self.facts.padding_side))
            if logits is None:
                logits = np.full((len(rows), found.shape[-1]), np.nan, dtype=np.float32)
            logits[indices] = found
            if on_batch is not None:
                on_batch(len(indices))
        return np.zeros((0, 0), dtype=np.float32) if logits is None else logits

    def require_segments(self, text_columns: int) -> None:
        """A ConfigError when the model cannot take so many texts a row."""
        if text_columns == 2 and not self.facts.pairs:
            raise ConfigError("the model has no segment for the second text of a pair", where=str(self.folder))


def load_graph_network(
    folder: Path, facts: GraphFacts, *, threads: int | None = None, long_texts: LongTexts = "head"
) -> GraphNetwork:
    """The graph of a verified folder, on the CPU; `threads` defaults to OMP_NUM_THREADS, else to all cores."""
    if threads is None:
        threads = int(os.environ.get("OMP_NUM_THREADS") or 0) or len(os.sched_getaffinity(0))
    load = load_openvino if facts.engine == "openvino" else load_onnx
    return GraphNetwork(folder, facts, load(folder / facts.graph, threads), long_texts)


def report_nothing() -> None:
    """Turns off the telemetry of onnxruntime and OpenVINO; call it before either is imported."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    sys.modules.setdefault("openvino_telemetry", ModuleType("openvino_telemetry"))


def load_onnx(graph: Path, threads: int) -> Infer:
    """The graph in onnxruntime."""
    report_nothing()
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the classes of onnxruntime are not public
        raise ConfigError(f"onnxruntime cannot load it ({short_text(error)})", where=str(graph)) from None
    names = {value.name for value in session.get_inputs()}

    def infer(inputs: dict[str, npt.NDArray[Any]]) -> npt.NDArray[np.float32]:
        given = {name: value for name, value in inputs.items() if name in names}
        return np.asarray(session.run(["logits"], given)[0], dtype=np.float32)

    return infer


def load_openvino(graph: Path, threads: int) -> Infer:
    """The graph in OpenVINO, computed in float32 where it is not int8."""
    report_nothing()
    import openvino

    settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    try:
        compiled = openvino.Core().compile_model(str(graph), "CPU", settings)
    except RuntimeError as error:
        raise ConfigError(f"OpenVINO cannot load it ({short_text(error)})", where=str(graph)) from None
    request = compiled.create_infer_request()
    names = {name for port in compiled.inputs for name in port.names}

    def infer(inputs: dict[str, npt.NDArray[Any]]) -> npt.NDArray[np.float32]:
        given = {name: value for name, value in inputs.items() if name in names}
        return np.array(request.infer(given)[compiled.output("logits")], dtype=np.float32)

    return infer
