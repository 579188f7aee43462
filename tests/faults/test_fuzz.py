"""Commands read hostile run folders, model folders, caches, configs and data files.

A case passes if the exit code is documented (never 1), time and memory stay within bounds, only the command's output has changed
(content, mode, time, links), and no planted code ran. TUNESMITH_FAULT_SEED selects other cases.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import json
import os
import random
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from faults.mutations import mutate
from faults.trials import Ended, memory_folder, run, size
from patience import patient
from tiny_model import save_tiny_bert, sentences
from unit.data.messy_files import sheet

BYTES, ADDRESSES = 2 * 10**9, 3 * 10**9
CODES = (0, 2, 3, 4, 5, 6, 7)
RUN_FILES = (
    *("journal.jsonl",) * 6,
    *("run.yaml", "environment.json", "metrics.json", "data_summary.json", "predictions.parquet") * 2,
    *(".lock", "model", "best", "report.html", "curves.png", "curves.svg", "README.md", ".report.html.tmp", "."),
    *("model/tunesmith.json", "model/config.json", "model/MANIFEST.json", "model/model.safetensors"),
)
MODEL_FILES = ("config.json",) * 4 + ("tokenizer.json", "tokenizer_config.json", "model.safetensors", ".") * 2
EXTRA = {"auto_map": {"AutoConfig": "evil.Evil", "AutoTokenizer": ["evil.Evil", None], "AutoModel": "evil.Evil"}}
EVIL = "import pathlib\npathlib.Path('../canary').write_text('ran')\nclass Evil: pass\n"
GIT = "[core]\n\trepositoryformatversion = 0\n\tbare = false\n\tfsmonitor = touch ../canary\n\thooksPath = ../hooks\n"
WEIGHTS = {"doctor": 18, "report": 19, "compare": 8, "board": 10, "serve": 5, "resume": 4}
WEIGHTS |= {"predict": 10, "evaluate": 8, "train": 22}
TOKEN, PORT = "t" * 43, 4321
COMPARE = "/compare?run=run&run=other"
PAGES = ("/", "/events", "/runs/other", "/runs/run", "/runs/run/events", "/runs/run/report", COMPARE)


@dataclass
class Plan:
    """One case: the parts it copies, the files that become hostile, the command, and the folders it may change."""

    parts: tuple[str, ...]
    targets: list[Path]
    argv: Any
    may: tuple[str, ...] = ()
    call: str = "tunesmith.cli.main:main"


class Arena:
    """Folders: `good` contains the input of all cases, `case` the current one; `watched` must not change."""

    def __init__(self, root: Path) -> None:
        self.good, self.case, self.watched = root / "good", root / "case", root / "watched"

    def prepare(self) -> None:
        """Write a model, data in each format, two finished runs, a killed one, a cache and a config."""
        self.fresh(())
        at = self.case
        save_tiny_bert(at / "model")
        write_data(at / "data")
        for words, fault in (
            (self.train_words("run"), ""),
            (self.train_words("other", "--seed", "7"), ""),
            (self.train_words("half"), "step.end:kill:5"),
        ):
            ended = self.start(Plan((), [], words), {"TUNESMITH_FAULT": fault})
            assert ended.code == (-9 if fault else 0), ended.log
        values = {"train_file": f"{at}/data/train.csv", "model_name_or_path": f"{at}/model", "cache_dir": f"{at}/cache"}
        values |= {"output_dir": f"{at}/new", "run_name": "x", "max_seq_length": 16}
        numbers = {"max_steps": 2, "learning_rate": 5e-5, "per_device_train_batch_size": 4, "warmup_ratio": 0.1}
        values |= numbers | {"num_train_epochs": 1, "use_cpu": True, "disable_tqdm": True}
        (at / "config").mkdir()
        (at / "config" / "c.yaml").write_text("".join(f"{k}: {json.dumps(v)}\n" for k, v in values.items()))
        shutil.copytree(at, self.good, symlinks=True)

    def train_words(self, out: str, *more: str, steps: int = 6, file: str = "train.csv") -> list[str]:
        at = self.case
        return [
            *("train", "--train_file", f"{at}/data/{file}", "--validation_file", f"{at}/data/other.csv"),
            *("--max_steps", str(steps), "--save_strategy", "steps", "--save_steps", "2"),
            *("--per_device_train_batch_size", "4", "--use_cpu", "--disable_tqdm", *more),
            *("--model_name_or_path", f"{at}/model", "--cache_dir", f"{at}/cache", "--output_dir", f"{at}/{out}"),
        ]

    def fresh(self, parts: tuple[str, ...]) -> None:
        """Make an empty case with copies of good parts, files to watch, and traps in the current folder."""
        shutil.rmtree(self.watched, ignore_errors=True)
        (self.watched / "folder").mkdir(parents=True)
        for name in ("victim.txt", "victim.json", "folder/inner.json"):
            (self.watched / name).write_text('{"kept": "as it is"}\n')
        (self.watched / "link").symlink_to("victim.txt")
        shutil.rmtree(self.case, ignore_errors=True)
        for name in ("cwd/.git/refs/heads", "cwd/.git/objects", "tmp", "home", "out"):
            (self.case / name).mkdir(parents=True)
        for name in parts:
            shutil.copytree(self.good / name, self.case / name, symlinks=True)
        git = self.case / "cwd" / ".git"
        (git / "HEAD").write_text("ref: refs/heads/main\n")
        (git / "refs" / "heads" / "main").write_text("1" * 40 + "\n")
        (git / "config").write_text(GIT)
        for name in ("evil.py", "sitecustomize.py", "usercustomize.py"):
            (self.case / "cwd" / name).write_text(EVIL)

    def start(self, plan: Plan, env: dict[str, str]) -> Ended:
        home, tmp = f"{self.case}/home", f"{self.case}/tmp"
        env = {"HOME": home, "XDG_CACHE_HOME": home, "TMPDIR": tmp, "HF_HOME": "/nonexistent", **env}
        return run(plan.call, plan.argv, env=env, cwd=self.case / "cwd", memory=ADDRESSES, timeout=30)


def write_data(folder: Path) -> None:
    """Write the same rows in each format."""
    folder.mkdir()
    rows = [{"text": text, "label": "good" if good else "bad"} for text, good in sentences(24)]
    lines = ["text,label", *(f"{row['text']},{row['label']}" for row in rows)]
    (folder / "train.csv").write_text("\n".join(lines) + "\n")
    (folder / "other.csv").write_text("\n".join(lines[:9]) + "\n")
    (folder / "train.tsv").write_text("\n".join(lines).replace(",", "\t") + "\n")
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "train.json").write_text(json.dumps(rows))
    (folder / "train.csv.gz").write_bytes(gzip.compress((folder / "train.csv").read_bytes()))
    sheet({name: (lambda i, name=name: rows[i][name]) for name in rows[0]}, rows=len(rows))(folder / "train.xlsx")
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, folder / "train.parquet")
    with pa.OSFile(str(folder / "train.arrow"), "wb") as out, pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table)


def make_plan(arena: Arena, rng: random.Random) -> Plan:
    """Choose a command and the part of its input that becomes hostile."""
    at = arena.case
    verb = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    names = [rng.choice(RUN_FILES) for _ in range(rng.choice((1, 1, 1, 2, 4)))]
    in_run = [at / "run" / name for name in names]
    in_model = [rng.choice(MODEL_FILES) for _ in range(rng.choice((1, 1, 2)))]
    file = f"train.{rng.choice(('csv', 'tsv', 'jsonl', 'json', 'parquet', 'arrow', 'xlsx', 'csv.gz'))}"
    page = rng.choice(([], ["--json"], ["-o", f"{at}/out/page.html"]))
    if verb == "doctor":
        name = rng.choice(("half", "run"))
        more = rng.choice(([], ["--json"]))
        targets = [at / name / n for n in names] + [checkpoint_file(arena, name, rng)] * (rng.random() < 0.4)
        return Plan((name,), targets, [verb, f"{at}/{name}", *more])
    if verb == "report":
        return Plan(("run",), in_run, [verb, f"{at}/run", *page], ("run", "out"))
    if verb == "compare":
        return Plan(("run", "other"), in_run, [verb, f"{at}/run", f"{at}/other", *page], ("out",))
    if verb == "board":
        return Plan(("run", "other"), in_run, str(at), call="faults.test_fuzz:ask_board")
    if verb == "serve":
        return Plan(("run",), in_run, f"{at}/run", call="faults.test_fuzz:ask_service")
    if verb == "resume":
        targets = rng.choice(([at / "half" / n for n in names[:2]], [checkpoint_file(arena, "half", rng)]))
        return Plan(("half", "data", "model", "cache"), targets, [verb, f"{at}/half"], ("half", "cache"))
    if verb in ("predict", "evaluate"):
        targets = rng.choice(([at / "data" / file], in_run, [at / "run" / "model" / name for name in in_model]))
        words = [verb, f"{at}/run", "--use_cpu", "--input" if verb == "predict" else "--test_file", f"{at}/data/{file}"]
        if verb == "predict":
            words += ["--output", f"{at}/out/new.{rng.choice(('csv', 'tsv', 'jsonl', 'parquet'))}"]
        return Plan(("run", "data"), targets, words, ("out", "home"))
    what = rng.choice(("data", "data", "model", "config", "config", "cache", "output", "git"))
    parts: tuple[str, ...] = ("data", "model", "cache")
    if what == "config":
        config = at / "config" / "c.yaml"
        return Plan((*parts, "config"), [config], ["train", str(config)], ("new", "cache", "cwd"))
    out = rng.choice(("new", "run", "half")) if what == "output" else "new"
    cached = sorted((arena.good / "cache").rglob("*"))
    targets = {
        "data": [at / "data" / file],
        "model": [at / "model" / name for name in in_model],
        "cache": [at / rng.choice(cached).relative_to(arena.good) for _ in range(2)],
        "git": [at / "cwd/.git" / rng.choice(("HEAD", "config", ".", "refs/heads/main", "packed-refs"))],
        "output": [at / out / rng.choice(RUN_FILES) for _ in range(2)],
    }[what]
    parts += (out,) if out != "new" else ()
    return Plan(parts, targets, arena.train_words(out, steps=2, file=file), (out, "cache"))


def checkpoint_file(arena: Arena, name: str, rng: random.Random) -> Path:
    folder = rng.choice(sorted((arena.good / name).glob("checkpoint-*")))
    file = rng.choice(("MANIFEST.json", ".", *sorted(p.name for p in folder.iterdir())))
    return arena.case / name / folder.name / file


def problems_of(arena: Arena, name: str) -> tuple[list[str], str]:
    """Make a case from its name and run it; return all problems and the log."""
    rng = random.Random(name)
    plan = make_plan(arena, rng)
    arena.fresh(plan.parts)
    changes = []
    for target in plan.targets:
        with contextlib.suppress(OSError):  # an earlier change replaced the folder
            changes.append(mutate(target, rng, arena.watched))
    config = arena.case / "model" / "config.json"
    if rng.random() < 0.05 and config.is_file():
        with contextlib.suppress(ValueError, RecursionError):
            config.write_text(json.dumps({**json.loads(config.read_text()), **EXTRA}))
            (config.parent / "evil.py").write_text(EVIL)
    may = (*plan.may, "tmp", "home/tunesmith")  # the last one is the user's cache of hashes
    before = {**snapshot(arena.watched), **snapshot(arena.case, may)}
    ended = arena.start(plan, {})
    after = {**snapshot(arena.watched), **snapshot(arena.case, may)}
    found = []
    if ended.code not in CODES:
        found.append(f"exit code {ended.code} (None: still running)")
    if "Traceback" in ended.log:
        found.append("a traceback")
    if ended.peak > BYTES or "out of memory" in ended.log:
        found.append(f"{ended.peak / 1e9:.1f} GB")
    if before != after:
        found.append(f"touched {sorted({path for path, _ in {*before.items()} ^ {*after.items()}})[:4]}")
    if (arena.case / "canary").exists():
        found.append("planted code ran")
    return found, f"{name}: {changes} | {plan.argv}\n{ended.log[-1500:]}"


def snapshot(folder: Path, but: tuple[str, ...] = ()) -> dict[str, tuple[Any, ...]]:
    """Return every path below a folder with type and mode, size, time, target and content."""
    found: dict[str, tuple[Any, ...]] = {}
    left = {str(folder / name) for name in but}

    def walk(path: str) -> None:
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.path in left:
                    continue
                info = entry.stat(follow_symlinks=False)
                kind = stat.S_IFMT(info.st_mode)
                content = os.readlink(entry.path) if kind == stat.S_IFLNK else ""
                if kind == stat.S_IFREG and info.st_size < 100_000:
                    content = hashlib.sha256(Path(entry.path).read_bytes()).hexdigest()
                shown = 0 if kind == stat.S_IFDIR and any(n.startswith(entry.path) for n in left) else info.st_mtime_ns
                found[entry.path] = (info.st_mode, info.st_size if kind == stat.S_IFREG else 0, shown, content)
                if kind == stat.S_IFDIR:
                    walk(entry.path)

    walk(str(folder))
    return found


def ask_board(folder: str) -> int:
    """Ask for every page; 1 if one fails, or if the intact run is missing from the list."""
    from tunesmith.inference.board import Board
    from tunesmith.inference.server import Access, make_app

    board = Board(Path(folder))
    app = make_app(board, Access.for_port(TOKEN, PORT, ()))
    bad = 0
    for path, (status, text) in asyncio.run(ask_all(app, dict.fromkeys(PAGES, b""))).items():
        lost = path == "/events" and b"other" not in text
        if status >= 500 or (status != 200 and "run=run" not in path and "/runs/run" not in path) or lost:
            bad = 1
            print(path, status, lost, text[:300])
    board.close()
    return bad


def ask_service(folder: str) -> int:
    """Ask for `/health` and a prediction of a hostile model."""
    from tunesmith.errors import TunesmithError
    from tunesmith.inference.server import Access, make_app
    from tunesmith.inference.service import PredictionService

    try:
        service = PredictionService(folder)
    except TunesmithError as error:
        return error.exit_code
    app = make_app(service, Access.for_port(TOKEN, PORT, ()))

    answers = asyncio.run(ask_all(app, {"/health": b"", "/predict": b'{"texts": ["good film"]}'}))
    bad = [answer for answer in answers.values() if answer[0] >= 500 and answer[0] != 503]
    print(*bad)
    return int(bool(bad))


async def ask_all(app: Any, bodies: dict[str, bytes]) -> dict[str, tuple[int, bytes]]:
    return {path: await ask(app, path, body) for path, body in bodies.items()}


async def ask(app: Any, path: str, body: bytes = b"") -> tuple[int, bytes]:
    """Return status and body of a request, or the start of a stream; 599 without a response."""
    host = f"127.0.0.1:{PORT}"
    headers = {"host": host, "cookie": f"tunesmith-{PORT}={TOKEN}", "origin": f"http://{host}"}
    headers |= {
        "authorization": f"Bearer {TOKEN}",
        "content-type": "application/json",
        "content-length": str(len(body)),
    }
    name, _, query = path.partition("?")
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "root_path": ""}
    scope |= {
        "method": "POST" if body else "GET",
        "path": name,
        "raw_path": name.encode(),
        "query_string": query.encode(),
    }
    scope |= {"client": ("127.0.0.1", 1), "server": ("127.0.0.1", PORT)}
    scope |= {"headers": [(key.encode(), value.encode()) for key, value in headers.items()]}
    status, text, done = 599, b"", asyncio.Event()
    parts = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if not parts:
            await asyncio.Event().wait()
        return parts.pop()

    async def send(message: dict[str, Any]) -> None:
        nonlocal status, text
        status = message.get("status", status)
        text += message.get("body", b"")
        if b"data:" in text and path.endswith("events"):
            done.set()

    task, waiter = asyncio.create_task(app(scope, receive, send)), asyncio.create_task(done.wait())
    finished, _ = await asyncio.wait((task, waiter), timeout=patient(10), return_when=asyncio.FIRST_COMPLETED)
    task.cancel()
    waiter.cancel()
    errors = [e for e in await asyncio.gather(task, waiter, return_exceptions=True) if isinstance(e, Exception)]
    return (599, repr(errors).encode()) if errors or not finished else (status, text)


@pytest.fixture(scope="module")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    root = memory_folder("fuzz", tmp_path_factory.mktemp("fuzz"))
    try:
        arena = Arena(root)
        arena.prepare()
        yield arena
    finally:
        shutil.rmtree(root, ignore_errors=True)


@pytest.mark.slow
def test_hostile_input_is_refused_and_touches_nothing(arena: Arena) -> None:
    seed = os.environ.get("TUNESMITH_FAULT_SEED", "ci")
    failed = []
    for number in range(size(full=10_000, ci=25)):
        problems, log = problems_of(arena, f"{seed}:{number}")
        if problems:
            failed.append(f"{problems}\n{log}")
    assert failed == []
