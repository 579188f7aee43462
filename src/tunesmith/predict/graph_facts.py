"""`export.json` of an exported folder: which graph it holds, and what is needed to feed it without transformers."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tunesmith.errors import ConfigError
from tunesmith.files import BadFile, read_json
from tunesmith.run.writing import write_new

EXPORT_FILE = "export.json"
GRAPHS = {
    "onnx": "onnx/model.onnx",
    "onnx-int8": "onnx/model.onnx",
    "openvino": "openvino/openvino_model.xml",
    "openvino-int8": "openvino/openvino_model.xml",
}
"""Format -> the graph, where optimum, sentence-transformers and text-embeddings-inference look for it."""
FORMATS = (*GRAPHS, "torch")
"""What a model can be exported to."""


@dataclass(frozen=True)
class GraphFacts:
    """How texts become the inputs of a graph."""

    format: str
    max_length: int
    vocab_size: int
    has_types: bool
    pairs: bool
    """Whether the model can be given the second segment of a pair."""
    pad_token_id: int
    pad_token_type_id: int
    padding_side: str
    truncation_side: str
    split_special_tokens: bool
    measured: dict[str, Any] = field(default_factory=dict)
    """What was measured before the folder was written."""

    @property
    def graph(self) -> str:
        """The path of the graph inside the folder."""
        return GRAPHS[self.format]

    @property
    def engine(self) -> str:
        """The package that computes the graph."""
        return "openvino" if self.format.startswith("openvino") else "onnxruntime"

    @property
    def installing(self) -> str:
        """What a card says about the packages that answer from the folder."""
        also = " openvino" if self.engine == "openvino" else ""
        return (
            f"It needs no torch: `pip install 'tunesmith[runtime]'{also}`, or, at the versions it was measured with and smaller, "
            "`pip install --no-deps --no-compile -r requirements.txt`."
        )

    def write(self, folder: Path) -> None:
        """Writes `export.json` into a new folder."""
        write_new(folder / EXPORT_FILE, json.dumps(asdict(self), indent=1, ensure_ascii=False).encode())


def read_graph_facts(folder: Path) -> GraphFacts:
    """The facts of an exported folder; damage is a ConfigError."""
    file = folder / EXPORT_FILE
    try:
        found = GraphFacts(**read_json(file, follow=True))
        if found.format not in GRAPHS or not 1 <= found.max_length <= 1_000_000 or found.vocab_size < 1:
            raise BadFile("names no known graph")
    except (OSError, BadFile, TypeError, ValueError) as error:
        raise ConfigError(f"cannot be used ({error})", where=str(file)) from None
    return found


def is_graph_folder(folder: Path) -> bool:
    """Whether `tunesmith export` wrote this folder."""
    return (folder / EXPORT_FILE).is_file()
