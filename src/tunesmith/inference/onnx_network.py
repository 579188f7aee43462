"""An exported ONNX graph as a network: needs onnxruntime, tokenizers and numpy, but neither torch nor transformers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tunesmith.data.batches import TokenRows, length_batches, pad_rows
from tunesmith.data.tokenize import LongTexts, RustEncoder, TokenEncoder, load_plain_tokenizer
from tunesmith.errors import ConfigError, ResourceError, TunesmithError, short_text
from tunesmith.inference.model_folder import GRAPH_FILE, GraphFacts, ModelFacts, read_graph_facts

TOKENS_AT_ONCE = 2048
Infer = Callable[[dict[str, npt.NDArray[Any]]], npt.NDArray[np.float32]]


class GraphNetwork:
    """A graph with its tokenizer and batching."""

    def __init__(
        self, folder: Path, facts: GraphFacts, infer: Infer, long_texts: LongTexts = "head", *, rendered: bool = False
    ) -> None:
        tokenizer = load_plain_tokenizer(
            folder / "tokenizer.json",
            truncation_side=facts.truncation_side,
            split_special_tokens=facts.split_special_tokens,
        )
        self.folder = folder
        self.facts = facts
        self.name = "onnxruntime on cpu"
        self.has_types = facts.has_types
        self.max_length = facts.max_length
        self.special = tokenizer.special
        self.encoder: TokenEncoder = RustEncoder(tokenizer, facts.max_length, long_texts, rendered=rendered)
        self._infer = infer

    @property
    def vocab_size(self) -> int:
        """Number of token embeddings."""
        return self.facts.vocab_size

    def logits(
        self, rows: TokenRows, *, max_rows: int | None = None, on_batch: Callable[[int], None] | None = None
    ) -> npt.NDArray[np.float32]:
        """Return the logits of each row, in input order."""
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
        """Raise a ConfigError if the model doesn't support this many texts per row."""
        if text_columns == 2 and not self.facts.pairs:
            raise ConfigError("the model does not support text pairs", where=str(self.folder))


def load_graph_network(folder: Path, facts: ModelFacts) -> GraphNetwork:
    """Load the graph of a verified folder on the CPU, with OMP_NUM_THREADS threads or one per core."""
    graph = read_graph_facts(folder)
    threads = int(os.environ.get("OMP_NUM_THREADS") or 0) or len(os.sched_getaffinity(0))
    infer = load_onnx(folder / GRAPH_FILE, threads)
    return GraphNetwork(folder, graph, infer, facts.long_texts, rendered=facts.rendered)


def load_onnx(graph: Path, threads: int) -> Infer:
    """Return a function that runs the graph in onnxruntime."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # errors are raised, and reported once
    try:
        session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the exception classes of onnxruntime are not public
        raise _graph_error("load", error, graph) from None
    names = {value.name for value in session.get_inputs()}

    def infer(inputs: dict[str, npt.NDArray[Any]]) -> npt.NDArray[np.float32]:
        given = {name: value for name, value in inputs.items() if name in names}
        try:
            return np.asarray(session.run(["logits"], given)[0], dtype=np.float32)
        except Exception as error:
            raise _graph_error("run", error, graph) from None

    return infer


def _graph_error(action: str, error: Exception, graph: Path) -> TunesmithError:
    if isinstance(error, MemoryError) or "alloc" in str(error):
        fix = (
            "Use shorter texts or a machine with more memory. If the graph is from an unknown source, export it again."
        )
        return ResourceError(f"onnxruntime is out of memory ({short_text(error)})", where=str(graph), fix=fix)
    return ConfigError(f"onnxruntime cannot {action} it ({short_text(error)})", where=str(graph))
