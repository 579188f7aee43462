"""One trained model -> one exported folder, measured before it is published and refused when it is not as good."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tunesmith.data.batches import padding_of
from tunesmith.data.tokenize import make_token_rows
from tunesmith.data.tokens import pad_rows
from tunesmith.errors import ConfigError, NumericsError
from tunesmith.inference.checked import (
    Checked,
    EvidenceRows,
    Tolerance,
    check_float,
    check_quantised,
    logits_of,
    rows_per_second,
    table_of,
)
from tunesmith.inference.facts import GraphFacts, ModelFacts, describe_model, model_folder_of
from tunesmith.inference.folder_card import export_card, runtime_requirements
from tunesmith.inference.graph_network import GraphNetwork, load_onnx, load_openvino, report_nothing
from tunesmith.inference.predictor import Network, Predictor
from tunesmith.inference.quantised import Feed, candidates, strip_shapes
from tunesmith.inference.torch_network import TorchNetwork
from tunesmith.models.load import load_model
from tunesmith.models.onnx_graph import write_onnx
from tunesmith.runs.manifest import write_sealed
from tunesmith.runs.writing import make_folder, write_new

CALIBRATION_BATCH = 16
SENSITIVITY_ROWS = 64
Say = Callable[[str], None]


@dataclass(frozen=True)
class Exported:
    """What was published, and what was measured before."""

    folder: Path
    checked: Checked
    tried: list[Checked]
    bytes: int
    original_bytes: int
    speed: dict[str, float]


@dataclass(frozen=True)
class _Original:
    """The original, loaded once: our predictor with its speed-ups, and the plain module that is exported."""

    predictor: Predictor
    torch_network: TorchNetwork
    model: Any
    facts: ModelFacts
    rows: EvidenceRows
    threads: int
    scratch: Path
    say: Say

    def network(self, graph_facts: GraphFacts, graph: Path) -> GraphNetwork:
        """A graph that is not published yet, in its own runtime."""
        infer = (load_openvino if graph_facts.engine == "openvino" else load_onnx)(graph, self.threads)
        return GraphNetwork(self.scratch / "folder", graph_facts, infer, self.facts.long_texts)


def export_model_to(
    path: str | Path,
    to: str,
    output: Path,
    rows: EvidenceRows,
    *,
    may: Tolerance = Tolerance(),  # noqa: B008
    say: Say = lambda line: None,
) -> Exported:
    """Writes `output`, complete or not at all. A NumericsError carries the table of what was tried."""
    import torch

    report_nothing()
    predictor = Predictor.load(path, use_cpu=True)
    network = predictor.network
    if not isinstance(network, TorchNetwork):
        raise ConfigError("is an exported folder", where=str(path), fix="Give the run, or its model/ folder.")
    if to.endswith("int8") and not rows.calibration:
        raise ConfigError("int8 is calibrated on training rows, and there are none", fix="Give --train_file.")
    facts = replace(predictor.facts, max_length=network.max_length)
    folder = model_folder_of(path).folder
    model = load_model(folder, facts.labels).model.eval()
    make_folder(output.parent)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".export-") as scratch:
        job = _Original(predictor, network, model, facts, rows, torch.get_num_threads(), Path(scratch), say)
        return _export(job, to, output, folder, may)


def _export(job: _Original, to: str, output: Path, source: Path, may: Tolerance) -> Exported:
    built = job.scratch / "folder"
    built.mkdir()
    describe_model(job.model, job.torch_network.tokenizer, job.facts)(built)
    original = logits_of(job.torch_network, job.rows.texts)
    job.say(f"measuring on {len(job.rows):,} {job.rows.split} rows")
    graph_facts: GraphFacts | None = None
    if to == "torch":
        shutil.copyfile(source / "model.safetensors", built / "model.safetensors")
        tokenizer = job.torch_network.tokenizer
        runtime, longest = job.torch_network.runtime, job.torch_network.max_length
        found: Network = TorchNetwork(
            job.model, tokenizer, runtime, padding_of(tokenizer), longest, job.facts.long_texts
        )
        tried = [check_float(to, logits_of(found, job.rows.texts), original, job.rows, job.facts)]
    else:
        graph_facts = _graph_facts(job, to)
        graph = built / graph_facts.graph
        graph.parent.mkdir()
        found, tried = _write_graph(job, graph_facts, graph, original, may)
    if tried[-1].refused is not None:
        problem = f"no {to} export is as good as the original: {tried[-1].refused}\n{table_of(tried)}\n"
        raise NumericsError(problem, fix="Use a float format, or allow more with --max_drop and --min_agreement.")
    speed = rows_per_second({"tunesmith": job.torch_network, to: found}, job.rows.texts)
    return _publish(job, to, output, source, graph_facts, tried, speed)


def _write_graph(
    job: _Original, facts: GraphFacts, graph: Path, original: Any, may: Tolerance
) -> tuple[Network, list[Checked]]:
    """Writes the graph of the wanted format; the candidates that were measured, the last one is on disk."""
    plain = job.scratch / "float.onnx" if facts.format != "onnx" else graph
    job.say("writing the ONNX graph")
    write_onnx(job.model, ["input_ids", "attention_mask", *(["token_type_ids"] if facts.has_types else [])], plain)
    if not facts.format.endswith("int8"):
        if facts.format == "openvino":
            _to_openvino(plain, graph)
        network = job.network(facts, graph)
        return network, [check_float(facts.format, logits_of(network, job.rows.texts), original, job.rows, job.facts)]
    strip_shapes(plain)
    tried: list[Checked] = []
    openvino = facts.engine == "openvino"
    some = [column[:SENSITIVITY_ROWS] for column in job.rows.calibration]
    before = logits_of(job.torch_network, some)

    def change(quantised: Path) -> float:
        answers = logits_of(job.network(replace(facts, format="onnx"), quantised), some)
        return float(np.abs(answers - before).mean())

    for candidate in candidates(plain, _calibration_feed(job, facts), change, job.scratch, static_only=openvino):
        quantised = job.scratch / "quantised.onnx" if openvino else graph
        candidate.write(quantised)
        if openvino:
            _to_openvino(quantised, graph)
        network = job.network(facts, graph)
        answers = logits_of(network, job.rows.texts)
        tried.append(check_quantised(candidate.name, answers, original, job.rows, job.facts, may))
        job.say(f"{candidate.name}: {tried[-1].refused or 'accepted'}")
        if tried[-1].refused is None:
            break
    return network, tried


def _to_openvino(source: Path, graph: Path) -> None:
    import openvino

    openvino.save_model(openvino.convert_model(str(source)), str(graph), compress_to_fp16=False)


def _calibration_feed(job: _Original, facts: GraphFacts) -> Feed:
    encoder = job.torch_network.encoder
    rows = make_token_rows(encoder.encode(job.rows.calibration), has_types=facts.has_types).in_windows(encoder.windows)
    fill = {"input_ids": facts.pad_token_id, "token_type_ids": facts.pad_token_type_id}
    order = np.argsort(rows.lengths, kind="stable")
    feed = []
    for start in range(0, len(order), CALIBRATION_BATCH):
        some = order[start : start + CALIBRATION_BATCH]
        feed.append(pad_rows(rows.take(some), int(rows.lengths[some].max()), fill, facts.padding_side))
    return feed


def _graph_facts(job: _Original, to: str) -> GraphFacts:
    tokenizer, network = job.torch_network.tokenizer, job.torch_network
    if not getattr(tokenizer, "is_fast", False):
        problem = f"{type(tokenizer).__name__} has no tokenizer.json, which a runtime without transformers needs"
        raise ConfigError(problem, fix="Use --to torch.")
    padding = padding_of(tokenizer)
    segments = getattr(job.model.config, "type_vocab_size", None)
    return GraphFacts(
        format=to,
        max_length=network.max_length,
        vocab_size=network.vocab_size,
        has_types=network.has_types,
        pairs=not network.has_types or not segments or segments > max(tokenizer("a", "a")["token_type_ids"]),
        pad_token_id=padding.pad_token_id,
        pad_token_type_id=padding.pad_token_type_id,
        padding_side=padding.side,
        truncation_side=tokenizer.truncation_side,
        split_special_tokens=bool(tokenizer.split_special_tokens),
    )


def _publish(
    job: _Original,
    to: str,
    output: Path,
    source: Path,
    facts: GraphFacts | None,
    tried: list[Checked],
    speed: dict[str, float],
) -> Exported:
    built = job.scratch / "folder"
    weights = [file for file in built.rglob("*") if file.suffix in (".onnx", ".bin", ".xml", ".safetensors", ".data")]
    size = sum(file.stat().st_size for file in weights)
    before = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    done = Exported(output, tried[-1], tried, size, before, speed)
    measured = {
        "tried": [one.to_json() for one in tried],
        "bytes": size,
        "original_bytes": before,
        "rows_per_second": speed,
        "threads": job.threads,
    }
    if facts is not None:
        replace(facts, measured=measured).write(built)
        write_new(built / "requirements.txt", runtime_requirements(facts.engine).encode())
    card = source / "README.md"
    text = card.read_text(encoding="utf-8") if card.is_file() else ""
    write_new(built / "README.md", export_card(text, done, to, job.threads, job.facts, facts).encode())

    def fill(folder: Path) -> None:
        for file in sorted(built.iterdir()):
            file.rename(folder / file.name)

    write_sealed(output, fill, {"kind": "export"}, bytes_needed=0)
    return done
