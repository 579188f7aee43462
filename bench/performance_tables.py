"""Write the tables of docs/research/performance.md from the JSON files next to it (called by bench/performance_plot.py)."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).resolve().parents[1] / "docs" / "research" / "performance"
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
Record = dict[str, Any]


def read_record(name: str, folder: Path = RECORDS) -> Record | None:
    """What a bench script wrote; None when it was not run."""
    file = folder / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def render_page(text: str, folder: Path = RECORDS) -> str:
    """The page with every table made anew."""
    return _TABLE.sub(lambda m: f"{m[1]}{render_table(m[2], read_record(m[2], folder))}\n{m[3]}", text)


def render_table(name: str, record: Record | None) -> str:
    """One table with what it takes to repeat it."""
    if record is None:
        return "*Not measured yet.*"
    lines = MAKERS[name.split("_")[0]](record)
    return "\n".join([describe(record), "", *lines])


def describe(record: Record) -> str:
    """Date, machine, versions, command."""
    versions = record.get("versions", record)
    parts = [record["date"], record.get("machine", record.get("device", ""))]
    parts += [f"{name} {versions[name]}" for name in ("python", "torch", "transformers") if name in versions]
    if record.get("commit"):
        parts.append(f"commit {record['commit']}")
    text = ", ".join(parts) + "."
    if record.get("command"):
        text += f" `{record['command']}`"
    return text + (f" **{record['note'][0].upper()}{record['note'][1:]}.**" if record.get("note") else "")


def make_table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Markdown lines; all columns but the first are numbers."""
    marks = ["---", *["---:"] * (len(head) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (head, marks, *rows)]


def engine_table(record: Record) -> list[str]:
    """Steps beside the Trainer; the GPU's file has another form."""
    if "batches" in record:
        return gpu_table(record)
    rows = [
        [f"batch {one['batch']}, {one['name']}", f"{one['step_ms']:,.1f}", f"{one['ratio']:.2f}"]
        for one in record["results"]
    ]
    return make_table(["", "ms a step", "times ours"], rows)


CONTESTANTS = {
    "tunesmith": "tunesmith",
    "our_bf16": "tunesmith's Trainer",
    "trainer_bf16": "transformers.Trainer, bf16",
    "trainer_fp32": "transformers.Trainer, fp32",
    "trainer_bf16_compile": "transformers.Trainer, bf16, compiled",
}


def gpu_table(record: Record) -> list[str]:
    """Steps, whole jobs and memory of bench/engine_gpu.py."""
    rows = []
    for batch, found in record["batches"].items():
        ours = found["tunesmith"]
        for kind, one in found.items():
            rows.append(
                [
                    f"batch {batch}, {CONTESTANTS[kind]}",
                    f"{one['step_ms']:.2f}",
                    f"{one['step_ms'] / ours['step_ms']:.2f}",
                    *(("", "") if "job" not in one else (f"{one['job_s']:.1f}", f"{one['job_s'] / ours['job_s']:.2f}")),
                    f"{one['peak_gb']:.2f}",
                    f"{ours['peak_gb'] / one['peak_gb']:.2f}",
                    f"{one['held_gb']:.2f}",
                ]
            )
    head = ["", "ms a step", "times ours", "whole job s", "times ours", "peak GB", "ours of it", "held GB"]
    each = {batch: 100 * found["tunesmith"]["share_of_matrix_rate"] for batch, found in record["batches"].items()}
    shares = ", ".join(f"{share:.1f}% at batch {batch}" for batch, share in each.items())
    rate = f"{record['matrix_rate'] / 1e12:.0f} TFLOP/s, the rate of a large product in the same run"
    return [*make_table(head, rows), "", f"The engine's real tokens take {shares} of {rate}."]


def predict_table(record: Record) -> list[str]:
    """Prediction."""
    rows = [
        [
            f"{one['work']}, {one['name']}",
            f"{one['rows']:,}",
            f"{one['seconds']:,.2f}",
            f"{one['rows_per_second']:,.1f}",
            f"{one['ratio']:.2f}",
            f"{one['difference']:.0e}",
        ]
        for one in record["results"]
    ]
    return make_table(["", "rows", "seconds", "rows/s", "times ours", "largest difference"], rows)


def sweep_table(record: Record) -> list[str]:
    """Cost against batch size and length."""
    rows = [
        [
            f"{one['sweep']} {one['value']}",
            f"{one['tunesmith_ms']:,.2f}",
            f"{one['trainer_ms']:,.2f}",
            f"{one['ratio']:.2f}",
        ]
        for one in record["results"]
    ]
    return make_table(["", "ours, ms a step", "Trainer, ms a step", "ratio"], rows)


def rows_table(record: Record) -> list[str]:
    """Cost against data size."""
    rows = [
        [
            f"{one['rows']:,} rows, {one['name']}",
            f"{one['step_ms']:.2f}",
            f"{one['order_s']:.3f}" if one["name"] == "tunesmith" else "",
            f"{one['anonymous_mb']:,}",
            f"{one['memory_mb']:,}",
        ]
        for one in record["results"]
    ]
    return make_table(["", "ms a step", "order of an epoch, s", "anonymous MB", "peak MB"], rows)


def families_table(record: Record) -> list[str]:
    """Steps of bench/families_gpu.py: our Trainer beside the faster precision of transformers' one."""
    if "results" in record:
        return _families_cpu(record["results"])
    kinds = {"ours": "ours bf16, ms", "ours_fp32": "ours fp32, ms", "trainer_bf16": "Trainer bf16, ms"}
    kinds["trainer_fp32"] = "Trainer fp32, ms"
    lines = {f"{s}, batch {b}": one for s, batches in record["shapes"].items() for b, one in batches.items()}
    kinds = {kind: name for kind, name in kinds.items() if any(kind in one["ms"] for one in lines.values())}
    rows = [
        [name, *(f"{one['ms'][kind]:.2f}" if kind in one["ms"] else "" for kind in kinds), f"{one['ratio']:.2f}"]
        for name, one in lines.items()
    ]
    failed = [
        f"{shape} fails under autocast in the forward pass of transformers itself, so under both: {why}."
        for shape, why in record.get("failed", {}).items()
    ]
    return [
        *make_table(["", *kinds.values(), "faster of both by our faster"], rows),
        *(["", *failed] if failed else []),
    ]


def parity_table(record: Record) -> list[str]:
    """Steps of bench/parity_gpu.py: the two Trainers in turns."""
    rows = []
    for one in record["results"]:
        numbers = [f"{one['ms'][name]:.1f}" for name in ("ours", "theirs")]
        low, high = one["quartiles"]
        rows.append([f"{one['case']}, {one['precision']}", *numbers, f"{one['ratio']:.2f}", f"{low:.2f} to {high:.2f}"])
    return make_table(["", "ours, ms", "Trainer, ms", "times ours, neighbouring turns", "half of them"], rows)


def _families_cpu(results: list[dict[str, Any]]) -> list[str]:
    """Steps of bench/families_cpu.py, in processor time."""
    rows = []
    for one in results:
        numbers = [f"{one[f'{name}_processor_ms']:,.0f}" for name in ("ours", "theirs")]
        rows.append([f"{one['shape']}, batch {one['batch']}", *numbers, f"{one['ratio']:.2f}"])
    return make_table(["", "ours, processor ms", "Trainer, processor ms", "times ours"], rows)


def encoder_table(record: Record) -> list[str]:
    """What bench/encoder_walk.py found: one line a path, those that could not be made tiny behind them."""
    looked = [one for one in record["types"] if "failed" not in one]
    paths: dict[tuple[str, str], list[Record]] = {}
    for one in sorted(looked, key=lambda one: (one["gpu"], one["gpu_why"] or "")):
        paths.setdefault((one["gpu"], (one["gpu_why"] or "").split(" (")[0]), []).append(one)
    rows = [
        [path, why, ", ".join(one["type"] for one in some), f"{min(one['digits'] for one in some):.1f}"]
        for (path, why), some in paths.items()
    ]
    wide = ", ".join(one["type"] for one in looked if one["buckets"] < 5)
    failed = [f"{one['type']} ({one['failed']})" for one in record["types"] if "failed" in one]
    return [
        *make_table(["on a GPU", "why", "types", "fewest digits of a fast step"], rows),
        *("", f"Their answer depends on how far rows are padded, so it is not changed: {wide}."),
        *("", f"Not made tiny by the script: {'; '.join(failed) or 'none'}."),
    ]


def walk_table(record: Record) -> list[str]:
    """What bench/encoder_walk.py found on a GPU: one line a path."""
    paths: dict[tuple[str, str], list[Record]] = {}
    for one in (one for one in record["types"] if "failed" not in one):
        path = ("packed, " if one["packed"] else "padded, ") + ("captured" if one["captured"] else "as transformers")
        paths.setdefault((path, _why_uncaptured(one["why"] or "")), []).append(one)
    rows = []
    for (path, why), some in sorted(paths.items()):
        ratio = f"{statistics.median(one['plain_ms'] / one['ms'] for one in some):.1f}" if not why else ""
        names, digits = ", ".join(one["type"] for one in some), min(one["digits"] for one in some)
        rows.append([f"{path} ({len(some)})", why, names, f"{digits:.1f}", ratio])
    return make_table(["path", "why", "types", "fewest digits", "plain step by ours, median"], rows)


def _why_uncaptured(text: str) -> str:
    """What ends a capture, in words."""
    known = {"random numbers on the host": "draws on the host", "Generator": "seeds a generator"}
    found = (said for part, said in known.items() if part in text)
    return next(found, "reads from the device") if text else ""


def start_table(record: Record) -> list[str]:
    """Whole commands of bench/start_up.py, phase by phase."""
    commands = record["commands"]
    phases = list(dict.fromkeys(phase for one in commands.values() for phase in one["phases"]))
    rows = [[phase, *(_seconds(one["phases"].get(phase)) for one in commands.values())] for phase in phases]
    rows += [["**in all**", *(_seconds(one["in_all"]) for one in commands.values())]]
    rows += [["all but training", *(_seconds(one["fixed"]) for one in commands.values())]]
    if any("first" in one for one in commands.values()):
        rows += [["the first time", *(f"{one['first']:.1f}" if "first" in one else "" for one in commands.values())]]
    return make_table(["seconds (processor seconds)", *(one["name"] for one in commands.values())], rows)


def _seconds(took: dict[str, float] | None) -> str:
    return "" if took is None else f"{took['clock']:.1f} ({took['processor']:.1f})"


MAKERS: dict[str, Callable[[Record], list[str]]] = {
    "engine": engine_table,
    "predict": predict_table,
    "sweep": sweep_table,
    "rows": rows_table,
    "families": families_table,
    "parity": parity_table,
    "encoder": encoder_table,
    "start": start_table,
    "walk": walk_table,
}
