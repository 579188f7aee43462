"""Hostile run folders, model folders, caches, configs and data files against every verb that reads them.

`python tests/faults/fuzz.py --cases 10000 --seed 0` prints a table; `--case 0:17` repeats one case and shows all of it.
A case holds when the exit code is from the table (never 1), it took under 30 s and 2 GB, nothing outside of what the verb may
write has changed (content, mode, time, links), and no planted code ran. Everything is imported once; a case is a fork.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import hashlib
import importlib
import io
import json
import os
import random
import re
import resource
import select
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faults.fork_server import import_all
from faults.hostile import mutate
from patience import patient
from tiny_model import save_tiny_bert, sentences

SECONDS, BYTES, ADDRESSES = 30.0, 2 * 10**9, 3 * 10**9
CODES = (0, 2, 3, 4, 5, 6, 7)
RUN_FILES = (
    *("journal.jsonl",) * 6,
    *("run.yaml", "environment.json", "metrics.json", "data_summary.json", "predictions.parquet") * 2,
    *(".lock", "model", "best", "report.html", "curves.png", "curves.svg", "README.md", ".report.html.tmp", "."),
    *("model/tunesmith.json", "model/config.json", "model/MANIFEST.json", "model/model.safetensors"),
)
MODEL_FILES = ("config.json",) * 4 + ("tokenizer.json", "tokenizer_config.json", "model.safetensors", ".") * 2
CHECKPOINT_FILES = ("MANIFEST.json", "MANIFEST.json", ".", "*", "*")
EXTRA = {"auto_map": {"AutoConfig": "evil.Evil", "AutoTokenizer": ["evil.Evil", None], "AutoModel": "evil.Evil"}}
EVIL = "import pathlib\npathlib.Path('../canary').write_text('ran')\nclass Evil: pass\n"
GIT = "[core]\n\trepositoryformatversion = 0\n\tbare = false\n\tfsmonitor = touch ../canary\n\thooksPath = ../hooks\n"
TOKEN, PORT = "t" * 43, 4321


@dataclass
class Outcome:
    """How one case ended. `problems` is empty when everything held."""

    case: str
    verb: str
    changes: list[str]
    argv: list[str]
    code: int | None = None
    seconds: float = 0.0
    peak: int = 0
    problems: list[str] = field(default_factory=list)
    log: str = ""


@dataclass
class Room:
    """Where cases happen: `good` holds what they begin with, `case` is made anew each time under one name."""

    root: Path

    @property
    def good(self) -> Path:
        return self.root / "good"

    @property
    def case(self) -> Path:
        return self.root / "case"

    @property
    def watched(self) -> Path:
        return self.root / "watched"

    def train_words(self, out: str, *more: str) -> list[str]:
        """A training of two steps."""
        at = self.case
        files = ["--train_file", f"{at}/data/train.csv", "--validation_file", f"{at}/data/other.csv"]
        steps = [
            "--max_steps",
            "6",
            "--save_strategy",
            "steps",
            "--save_steps",
            "2",
            "--per_device_train_batch_size",
            "4",
        ]
        folders = ["--model_name_or_path", f"{at}/model", "--cache_dir", f"{at}/cache", "--output_dir", f"{at}/{out}"]
        return ["train", *files, *steps, *folders, "--use_cpu", "--disable_tqdm", *more]

    def prepare(self) -> None:
        """Everything good: model, data in each format, two finished runs, one that was killed, a cache, configs."""
        self.fresh(())
        self.watch()
        run_child(self, lambda: save_tiny_bert(self.case / "model") and 0)
        write_data(self.case / "data")
        for words, fault in (
            (self.train_words("run"), ""),
            (self.train_words("other", "--seed", "7"), ""),
            (self.train_words("half"), "step.end:kill:5"),
        ):
            ended = run_verb(self, words, {"TUNESMITH_FAULT": fault} if fault else {})
            assert ended.code == (-9 if fault else 0), ended.log
        names = {"train_file": f"{self.case}/data/train.csv", "model_name_or_path": f"{self.case}/model"}
        names |= {"output_dir": f"{self.case}/new", "max_steps": 2, "learning_rate": 5e-5, "use_cpu": True}
        names |= {
            "per_device_train_batch_size": 4,
            "cache_dir": f"{self.case}/cache",
            "run_name": "x",
            "disable_tqdm": True,
        }
        names |= {"lr_scheduler_kwargs": {}, "max_seq_length": 16, "num_train_epochs": 1, "warmup_ratio": 0.1}
        config = self.case / "config"
        config.mkdir()
        (config / "c.yaml").write_text("".join(f"{k}: {json.dumps(v)}\n" for k, v in names.items()))
        shutil.copytree(self.case, self.good, symlinks=True)

    def watch(self) -> None:
        """The folder that nobody may touch."""
        shutil.rmtree(self.watched, ignore_errors=True)
        (self.watched / "folder").mkdir(parents=True)
        for name in ("victim.txt", "victim.json", "folder/inner.json"):
            (self.watched / name).write_text('{"kept": "as it is"}\n')
        (self.watched / "link").symlink_to("victim.txt")

    def fresh(self, parts: tuple[str, ...]) -> None:
        """An empty case with copies of some good parts, and traps in the current folder."""
        shutil.rmtree(self.case, ignore_errors=True)
        for name in ("cwd", "tmp", "home", "out"):
            (self.case / name).mkdir(parents=True)
        for name in parts:
            shutil.copytree(self.good / name, self.case / name, symlinks=True)
        git = self.case / "cwd" / ".git"
        (git / "refs" / "heads").mkdir(parents=True)
        (git / "objects").mkdir()
        (git / "HEAD").write_text("ref: refs/heads/main\n")
        (git / "refs" / "heads" / "main").write_text("1" * 40 + "\n")
        (git / "config").write_text(GIT)
        for name in ("evil.py", "sitecustomize.py", "usercustomize.py"):
            (self.case / "cwd" / name).write_text(EVIL)


def write_data(folder: Path) -> None:
    """The same rows as csv, tsv, jsonl, json, parquet, arrow and gz."""
    import gzip

    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    rows = [{"text": text, "label": "good" if good else "bad"} for text, good in sentences(24)]
    lines = [f"{row['text']},{row['label']}" for row in rows]
    (folder / "train.csv").write_text("\n".join(["text,label", *lines]) + "\n")
    (folder / "other.csv").write_text("\n".join(["text,label", *lines[:8]]) + "\n")
    (folder / "train.tsv").write_text("\n".join(["text\tlabel", *(line.replace(",", "\t") for line in lines)]) + "\n")
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "train.json").write_text(json.dumps(rows))
    (folder / "train.csv.gz").write_bytes(gzip.compress((folder / "train.csv").read_bytes()))
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, folder / "train.parquet")
    with pa.OSFile(str(folder / "train.arrow"), "wb") as out, pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table)


# Cases: which parts are copied, what is changed in them, the command, and what it may write.


@dataclass
class Plan:
    """One case. `may` names what the verb may change below the case folder; `call` runs instead of a command line."""

    verb: str
    parts: tuple[str, ...]
    targets: list[Path]
    argv: list[str]
    may: tuple[str, ...] = ("tmp",)
    call: Callable[[], int] | None = None


def make_plan(room: Room, rng: random.Random) -> Plan:
    """A verb with a command, and what of its input will be hostile."""
    at = room.case
    verbs = {"doctor": 18, "report": 19, "compare": 8, "board": 10, "serve": 5, "resume": 4}
    verbs |= {"predict": 10, "evaluate": 8, "train": 22}
    verb = rng.choices(list(verbs), list(verbs.values()))[0]
    run = [at / "run" / rng.choice(RUN_FILES) for _ in range(rng.choice((1, 1, 1, 2, 4)))]
    kind = rng.choice(("csv", "tsv", "jsonl", "json", "parquet", "arrow", "csv.gz"))
    file = at / "data" / f"train.{kind}"
    model = [at / "model" / rng.choice(MODEL_FILES) for _ in range(rng.choice((1, 1, 2)))]
    if verb == "doctor":
        half = rng.random() < 0.4
        name = "half" if half else "run"
        words = [verb, f"{at}/{name}", *rng.choice(([], ["--json"], ["--repair"]))]
        targets = [at / name / t.relative_to(at / "run") for t in run] + [checkpoint(room, name, rng)] * (
            rng.random() < 0.4
        )
        return Plan(verb, (name,), targets, words, (name, "tmp") if "--repair" in words else ("tmp",))
    if verb == "report":
        out = rng.choice(([], ["--json"], ["-o", f"{at}/out/page.html"]))
        targets = [*run, *([at / "out" / "page.html"] if "-o" in out and rng.random() < 0.3 else [])]
        return Plan(verb, ("run",), targets, [verb, f"{at}/run", *out], ("run", "out", "tmp"))
    if verb == "compare":
        more = rng.choice(([], ["--json"], ["-o", f"{at}/out/page.html"]))
        return Plan(verb, ("run", "other"), run, [verb, f"{at}/run", f"{at}/other", *more], ("out", "tmp"))
    if verb == "board":
        return Plan(verb, ("run", "other"), run, [], ("tmp",), lambda: asyncio.run(watch_board(at, rng)))
    if verb == "serve":
        return Plan(verb, ("run",), run, [], ("tmp",), lambda: asyncio.run(ask_service(at / "run")))
    if verb == "resume":
        targets = [at / "half" / t.relative_to(at / "run") for t in run[:2]]
        targets = rng.choice((targets, [checkpoint(room, "half", rng)], [*targets, checkpoint(room, "half", rng)]))
        return Plan(verb, ("half", "data", "model", "cache"), targets, [verb, f"{at}/half"], ("half", "cache", "tmp"))
    if verb in ("predict", "evaluate"):
        targets = rng.choice(([file], run, [at / "run" / "model" / m.relative_to(at / "model") for m in model]))
        words = [verb, f"{at}/run", "--use_cpu", "--input" if verb == "predict" else "--test_file", str(file)]
        if verb == "predict":
            out = at / "out" / f"new.{rng.choice(('csv', 'tsv', 'jsonl', 'parquet'))}"
            words += ["--output", str(out)]
            targets = [*targets, *([out] if rng.random() < 0.1 else [])]
        return Plan(verb, ("run", "data"), targets, words, ("out", "tmp", "home"))
    return plan_training(room, rng, file, model)


def plan_training(room: Room, rng: random.Random, file: Path, model: list[Path]) -> Plan:
    """`train` with hostile data, model, config, cache, output folder or repository."""
    at = room.case
    what = rng.choice(("data", "data", "model", "config", "config", "cache", "output", "git"))
    if what == "config":
        config = at / "config" / "c.yaml"
        return Plan(
            "train",
            ("data", "model", "cache", "config"),
            [config],
            ["train", str(config)],
            ("new", "cache", "tmp", "cwd"),
        )
    words = ["train", "--train_file", str(file), "--model_name_or_path", f"{at}/model", "--cache_dir", f"{at}/cache"]
    words += ["--max_steps", "2", "--per_device_train_batch_size", "4", "--use_cpu", "--disable_tqdm"]
    words += ["--output_dir", f"{at}/new"]
    parts: tuple[str, ...] = ("data", "model", "cache")
    targets = {
        "data": [file],
        "model": model,
        "cache": cached(room, rng),
        "git": [at / "cwd/.git" / rng.choice(("HEAD", "config", ".", "refs/heads/main", "packed-refs"))],
    }
    if what == "output":
        name = rng.choice(("new", "run", "half"))
        words[-1] = f"{at}/{name}"
        parts = (*parts, *([name] if name != "new" else []))
        targets["output"] = [at / name / rng.choice(RUN_FILES) for _ in range(2)]
    return Plan("train", parts, targets[what], words, (Path(words[-1]).name, "cache", "tmp"))


def checkpoint(room: Room, name: str, rng: random.Random) -> Path:
    """A file of a checkpoint."""
    folders = sorted((room.good / name).glob("checkpoint-*"))
    folder = rng.choice(folders)
    wanted = rng.choice(CHECKPOINT_FILES)
    found = rng.choice(sorted(p.name for p in folder.iterdir())) if wanted == "*" else wanted
    return room.case / name / folder.name / found


def cached(room: Room, rng: random.Random) -> list[Path]:
    """Some files of the cache."""
    files = sorted(p for p in (room.good / "cache").rglob("*"))
    return [room.case / "cache" / rng.choice(files).relative_to(room.good / "cache") for _ in range(2)]


def run_case(room: Room, name: str) -> Outcome:
    """Makes the case anew from its name, runs it, and checks all that must hold."""
    rng = random.Random(name)
    plan = make_plan(room, rng)
    room.fresh(plan.parts)
    changes = []
    for target in plan.targets:
        with contextlib.suppress(OSError):  # an earlier change replaced the folder
            changes.append(mutate(target, rng, room.watched))
    if rng.random() < 0.05 and (room.case / "model" / "config.json").is_file():
        file = room.case / "model" / "config.json"
        with contextlib.suppress(ValueError, RecursionError):
            file.write_text(json.dumps({**json.loads(file.read_text()), **EXTRA}))
            (file.parent / "evil.py").write_text(EVIL)
    may = (*plan.may, "home/tunesmith")  # the user's own cache: the hashes of large files
    before = {**snapshot(room.watched), **snapshot(room.case, may)}
    ended = run_child(room, plan.call) if plan.call is not None else run_verb(room, plan.argv)
    ended.case, ended.verb, ended.changes, ended.argv = name, plan.verb, changes, plan.argv
    after = {**snapshot(room.watched), **snapshot(room.case, may)}
    ended.problems = list(problems_of(ended))
    if before != after:
        touched = sorted({*before.items()} ^ {*after.items()})
        ended.problems.append(f"touched {[k for k, _ in touched][:4]}")
        room.watch()
    if (room.case / "canary").exists():
        ended.problems.append("planted code ran")
    return ended


def problems_of(ended: Outcome) -> Iterator[str]:
    """What an exit code, a time, a size and a log say by themselves."""
    if ended.code is None:
        yield f"still running after {SECONDS:.0f} s"
    elif ended.code not in CODES:
        yield f"exit code {ended.code}"
    elif "Traceback" in ended.log:
        yield "a traceback"
    if ended.peak > BYTES:
        yield f"{ended.peak / 1e9:.1f} GB"
    if "out of memory" in ended.log:
        yield "asked for more memory than there is"


def snapshot(folder: Path, but: tuple[str, ...] = ()) -> dict[str, tuple[Any, ...]]:
    """Every path below a folder: kind and mode, size, time, target, content."""
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


# Running: a fork with its own folder, limits and log.


def run_verb(room: Room, argv: list[str], env: dict[str, str] | None = None) -> Outcome:
    """One command line."""

    def call() -> int:
        os.environ.update(env or {})
        from tunesmith.cli.main import main

        return main([*argv, *(["--debug"] if "FUZZ_DEBUG" in os.environ else [])])

    return run_child(room, call)


def run_child(room: Room, call: Callable[[], int]) -> Outcome:
    """Forks, limits, waits; gives exit code (None: killed for its time), seconds, largest resident size and log."""
    log = room.root / "log"
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _be_child(room, log, call)
    handle = os.pidfd_open(pid)
    try:
        timed_out = not select.select([handle], [], [], patient(SECONDS))[0]
    finally:
        os.close(handle)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    code = None if timed_out else os.waitstatus_to_exitcode(status)
    text = log.read_text(errors="replace")
    return Outcome("", "", [], [], code, time.monotonic() - started, usage.ru_maxrss * 1024, [], text)


def _be_child(room: Room, log: Path, call: Callable[[], int]) -> None:
    code = 99
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setpgid(0, 0)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(room.case / "cwd")
        os.environ.update(HOME=f"{room.case}/home", TMPDIR=f"{room.case}/tmp", XDG_CACHE_HOME=f"{room.case}/home")
        tempfile.tempdir = None
        used = int(re.findall(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[0]) * 1024
        resource.setrlimit(resource.RLIMIT_AS, (used + ADDRESSES, used + ADDRESSES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        code = call()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


# The board and the service, asked as ASGI apps: what a browser would ask.


async def watch_board(folder: Path, rng: random.Random) -> int:
    """Asks for every page; 1 when one fails, hangs, or the sound run is lost beside the hostile one."""
    from tunesmith.inference.board import Board
    from tunesmith.inference.security import Access
    from tunesmith.inference.server import make_app

    board = Board(folder)
    app = make_app(board, Access.for_port(TOKEN, PORT, ()))
    bad = 0
    for path, wanted in (
        ("/", 200),
        ("/events", 200),
        ("/runs/other", 200),
        ("/runs/run", None),
        ("/runs/run/events", None),
        *rng.choice(
            (
                (),
                (),
                (("/runs/run/report", None),),
                (("/compare?run=run&run=other", None),),
                (("/runs/run/classify", None),),
            )
        ),
    ):
        body = b'{"texts": ["good film"]}' if path.endswith("classify") else b""
        status, text = await ask(app, path, body)
        lost = path in ("/", "/events") and b"other" not in text
        if status >= 500 or wanted not in (None, status) or lost:
            bad = 1
            print(path, status, "the other run is lost" if lost else text[:300])
    board.close()
    board.stop()
    return bad


async def ask_service(folder: Path) -> int:
    """`/health` and `/predict` of one hostile model."""
    from tunesmith.errors import TunesmithError
    from tunesmith.inference.security import Access
    from tunesmith.inference.server import make_app
    from tunesmith.inference.service import PredictionService
    from tunesmith.runs.folder import RunDir

    try:
        service = PredictionService(RunDir(folder))
    except TunesmithError as error:
        return error.exit_code
    app = make_app(service, Access.for_port(TOKEN, PORT, ()))
    found = [await ask(app, path, body) for path, body in (("/health", b""), ("/predict", b'{"texts": ["good film"]}'))]
    service.stop()
    bad = [(status, text[:300]) for status, text in found if status >= 500 and status != 503]
    print(*bad)
    return int(bool(bad))


async def ask(app: Any, path: str, body: bytes = b"") -> tuple[int, bytes]:
    """Status and body; of a stream what comes first. 599 when nothing came."""
    headers = {"host": f"127.0.0.1:{PORT}", "cookie": f"tunesmith-{PORT}={TOKEN}", "origin": f"http://127.0.0.1:{PORT}"}
    headers |= {
        "authorization": f"Bearer {TOKEN}",
        "content-type": "application/json",
        "content-length": str(len(body)),
    }
    name, _, query = path.partition("?")
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST" if body else "GET"}
    scope |= {
        "path": name,
        "raw_path": name.encode(),
        "query_string": query.encode(),
        "scheme": "http",
        "root_path": "",
    }
    scope |= {"headers": [(k.encode(), v.encode()) for k, v in headers.items()], "client": ("127.0.0.1", 1)}
    scope |= {"server": ("127.0.0.1", PORT)}
    status, text, done, sent = 599, b"", asyncio.Event(), False

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status, text
        status = message.get("status", status)
        text += message.get("body", b"")
        if b"data:" in text and name.endswith("events"):
            done.set()

    task = asyncio.create_task(app(scope, receive, send))
    waiter = asyncio.create_task(done.wait())
    finished, _ = await asyncio.wait((task, waiter), timeout=10, return_when=asyncio.FIRST_COMPLETED)
    for one in (task, waiter):
        one.cancel()
    errors = await asyncio.gather(task, waiter, return_exceptions=True)
    broken = [e for e in errors if isinstance(e, Exception)]
    if broken or not finished:
        return 599, repr(broken).encode() or b"no answer"
    return status, text


# The table.


def warm_up(room: Room) -> None:
    """Learns in a fork which modules each verb imports, and imports them here: a case pays for its work alone."""
    names = room.root / "modules"
    at = room.case
    words = ["doctor", "report", "compare", "predict", "evaluate"]
    room.fresh(("run", "other", "data", "model", "cache"))

    def learn() -> int:
        from tunesmith.cli.main import main

        for verb in words:
            more = {
                "compare": [f"{at}/other"],
                "predict": ["--input", f"{at}/data/train.csv", "--output", f"{at}/out/x.csv"],
            }
            more |= {"evaluate": ["--test_file", f"{at}/data/train.parquet"]}
            assert main([verb, f"{at}/run", *more.get(verb, [])]) == 0, verb
        assert asyncio.run(watch_board(at, random.Random(0))) == 0
        assert main(room.train_words("new")) == 0
        names.write_text("\n".join(m for m in sys.modules if not m.startswith(("__", "evil"))))
        return 0

    ended = run_child(room, learn)
    assert ended.code == 0, ended.log
    for name in names.read_text().split("\n"):
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    from tunesmith.cli.main import main

    with contextlib.redirect_stdout(io.StringIO()):  # fonts and templates are read once, here
        for more in (
            ["report", f"{at}/run"],
            ["compare", f"{at}/run", f"{at}/other", "-o", f"{at}/out/x"],
        ):
            assert main(more) == 0
    gc.collect()
    gc.freeze()


def print_table(outcomes: list[Outcome], seconds: float) -> None:
    """Cases by verb and exit code, the slowest, the largest, and each failure with its seed."""
    verbs = sorted({o.verb for o in outcomes})
    codes = sorted({o.code for o in outcomes}, key=lambda c: 999 if c is None else c)
    print(
        f"\n{'verb':<10}{'cases':>7}"
        + "".join(f"{'hang' if c is None else c:>7}" for c in codes)
        + "     mean   slowest  largest  failed"
    )
    for verb in [*verbs, "all"]:
        part = [o for o in outcomes if verb in (o.verb, "all")]
        counts = Counter(o.code for o in part)
        row = f"{verb:<10}{len(part):>7}" + "".join(f"{counts[c]:>7}" for c in codes)
        slow, large = max(o.seconds for o in part), max(o.peak for o in part)
        mean = sum(o.seconds for o in part) / len(part)
        print(f"{row}  {mean:5.2f} s  {slow:6.1f} s  {large / 1e9:4.1f} GB  {sum(bool(o.problems) for o in part):>6}")
    print(f"{len(outcomes)} cases in {seconds:.0f} s ({seconds / max(1, len(outcomes)):.3f} s a case)")


def main() -> int:
    """Runs the cases; 0 when all of them hold."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=150)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--case", action="append", help="SEED:NUMBER, repeated with all it prints")
    parser.add_argument("--keep", action="store_true", help="leave the folder of the last case")
    args = parser.parse_args()
    os.environ.update({"FUZZ_DEBUG": "1"} if args.case else {})
    import_all()
    os.environ.update(HF_HOME="/nonexistent")
    shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    room = Room(Path(tempfile.mkdtemp(prefix="tunesmith-fuzz-", dir=shm)))
    outcomes: list[Outcome] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the table so far, and nothing left behind
    try:
        room.prepare()
        warm_up(room)
        started = time.monotonic()
        for name in args.case or [f"{args.seed}:{k}" for k in range(args.first, args.first + args.cases)]:
            ended = run_case(room, name)
            outcomes.append(ended)
            if ended.problems or args.case:
                words = " ".join(ended.argv).replace(str(room.case), "CASE")
                print(
                    f"{name} {ended.verb}: {'; '.join(ended.problems) or 'holds'} | {ended.changes} | {words}",
                    flush=True,
                )
                lines = ended.log if args.case else "\n".join(ended.log.strip().splitlines()[-2:])[-400:]
                print(f"    exit {ended.code}, {ended.seconds:.1f} s: {lines}", flush=True)
    finally:
        if outcomes:
            print_table(outcomes, time.monotonic() - started)
        if args.keep:
            print(room.root)
        else:
            shutil.rmtree(room.root, ignore_errors=True)
    return int(any(o.problems for o in outcomes))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # libraries that were imported and never used complain at exit
