"""Python commands that start at once: forked from a process that has torch, transformers and tunesmith imported already.

`warm_python()` gives a command that takes the words of python (`-m module`, `-c code`, a script) and runs them in a fork of
that process: a real process with its own arguments, environment, folder, standard streams and exit code. Signals sent to
the command reach it, and it ends with the command. The process id that it sees is not the one of the command: what asserts
process ids, process groups, start-up or imports starts `sys.executable` itself. With BLANK_PICTURES=1 in its environment
a command saves blank pictures (`pictures.py`), with SMALL_EMBEDDED=FOLDER it has that embedded model (`small_embedded.py`).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import pkgutil
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from pathlib import Path
from typing import Any

AT_IMPORT = ("HF_", "TRANSFORMERS_", "OMP_NUM_THREADS", "PYTHONHASHSEED", "PYTHONUTF8", "PYTHONIOENCODING", "LD_")
"""Variables that libraries read while they are imported: a command for which one of them is another starts cold."""
SETTINGS = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "BLANK_PICTURES": "1"}
ENVIRONMENT = {**os.environ, **SETTINGS}

COMMAND = r"""#!{python} -IS
import array, json, os, signal, socket, sys
python, address, expected, prefixes = {python!r}, {address!r}, {expected!r}, {prefixes!r}
words = {{"tunesmith": ["-m", "tunesmith"], "torchrun": ["-m", "torch.distributed.run"]}}.get(os.path.basename(sys.argv[0]), [])
words += sys.argv[1:]
environment = dict(os.environ)
while words[:1] in (["-u"], ["-P"]):
    environment["PYTHONUNBUFFERED" if words.pop(0) == "-u" else "PYTHONSAFEPATH"] = "1"
known = words[:1] in (["-m"], ["-c"]) or (words and not words[0].startswith("-"))
if not known or {{k: v for k, v in environment.items() if k.startswith(prefixes)}} != expected:
    os.execve(python, [python, *words], environment)
server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
server.connect(address)
request = json.dumps([words, os.getcwd(), environment], ensure_ascii=False).encode("utf-8", "surrogateescape")
streams = []
for stream in range(3):
    try:
        os.fstat(stream)
        streams.append(stream)
    except OSError:
        pass
held = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
head = len(request).to_bytes(8, "big") + bytes(stream in streams for stream in range(3))
server.sendmsg([head], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", streams))])
server.sendall(request)
pid = int.from_bytes(server.recv(8), "big")
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, frame: os.kill(pid, number))
signal.pthread_sigmask(signal.SIG_SETMASK, held)
code = int(server.recv(64) or b"-9")
if code >= 0:
    os._exit(code)
signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
os.kill(os.getpid(), -code)
"""


@functools.cache
def warm_python() -> str:
    """The command. The folder it lies in has `python`, `tunesmith` and `torchrun`, for a PATH."""
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    address = str(folder / "socket")
    expected = {k: v for k, v in ENVIRONMENT.items() if k.startswith(AT_IMPORT)}
    text = COMMAND.format(python=sys.executable, address=address, expected=expected, prefixes=AT_IMPORT)
    for name in ("python", "tunesmith", "torchrun"):
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o755)
    server = subprocess.Popen(
        [sys.executable, __file__, address],
        env=ENVIRONMENT | {"PYTHONWARNINGS": "ignore"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n", "the warm process did not start"

    def close() -> None:
        server.communicate()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(close)
    return str(folder / "python")


IMPORTED = (
    *("accelerate.commands.launch", "datasets", "matplotlib.pyplot", "sklearn.metrics", "torch.distributed.run"),
    *("transformers.trainer", "transformers.models.auto.modeling_auto", "transformers.models.bert.modeling_bert"),
    *(
        "sklearn.tree",
        "tunesmith.cli.console",
        "tunesmith.cli.main",
        "tunesmith.cli.train",
        "tunesmith.trainer.trainer",
    ),
    *("tunesmith.data.audit", "tunesmith.config.load", "tunesmith.training.evaluation", "PIL.PngImagePlugin"),
)
"""What commands import. None of it starts a thread."""
ROOMS = ("data", "inference", "metrics", "models", "pipeline", "report", "speedups")
"""Rooms of which a training command imports most modules, each when it gets there."""


def import_all() -> None:
    """Imports, and makes what the first run of a process makes: else each fork would do it again."""
    for name in IMPORTED:
        importlib.import_module(name)
    for room in ROOMS:
        package = importlib.import_module(f"tunesmith.{room}")
        for module in pkgutil.iter_modules(package.__path__, f"tunesmith.{room}."):
            if not module.name.endswith(("_kernel", "_kernels")):  # those need triton
                importlib.import_module(module.name)
    render = importlib.import_module("tunesmith.report.render")
    filters = {"score": render.score_text, "title_of": render.score_title}
    render.page_template("page.html.j2", **filters)
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("bert")


def serve(address: str) -> list[str]:
    """Forks for each request until stdin ends. Comes back in a child, with the words it is to run."""
    gc.disable()
    import_all()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen(64)
    gc.collect()
    gc.enable()
    gc.freeze()  # a collection in a child does not touch, and so copy, the pages of all modules
    os.write(1, b"ready\n")
    running: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as ready:
        ready.register(0, selectors.EVENT_READ)
        ready.register(listener, selectors.EVENT_READ)
        wake, written = os.pipe()
        os.set_blocking(written, False)
        ready.register(wake, selectors.EVENT_READ)
        signal.set_wakeup_fd(written)
        before = signal.signal(signal.SIGCHLD, lambda number, frame: None)
        while True:
            for key, _ in ready.select():
                if key.fd == 0:
                    for pid in running:
                        os.kill(pid, signal.SIGKILL)
                    os._exit(0)
                elif key.fd == wake:
                    os.read(wake, 4096)
                    answer_ended(ready, running)
                elif key.fileobj is listener:
                    client = listener.accept()[0]
                    request, streams = receive(client)
                    pid = os.fork()
                    if pid == 0:
                        signal.set_wakeup_fd(-1)
                        signal.signal(signal.SIGCHLD, before)
                        for held in (listener, client, *running.values()):
                            held.close()
                        os.close(wake)
                        os.close(written)
                        ready.close()
                        return become(request, streams)
                    for stream in streams.values():
                        os.close(stream)
                    running[pid] = client
                    ready.register(client, selectors.EVENT_READ, pid)
                    client.sendall(pid.to_bytes(8, "big"))
                elif key.data in running:  # the command is gone
                    os.kill(key.data, signal.SIGKILL)
                    ready.unregister(key.fileobj)


def answer_ended(ready: Any, running: dict[int, socket.socket]) -> None:
    """Sends each command the exit code of its process."""
    for pid, client in list(running.items()):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            del running[pid]
            if client in ready.get_map():
                ready.unregister(client)
            with contextlib.suppress(OSError):
                client.sendall(str(os.waitstatus_to_exitcode(status)).encode())
            client.close()


def receive(client: socket.socket) -> tuple[Any, dict[int, int]]:
    """A request (words, folder, environment) and the standard streams that came with it, by their number there."""
    head, found, _, _ = socket.recv_fds(client, 11, 3)
    numbers = [n for n in range(3) if head[8 + n]]
    size, text = int.from_bytes(head[:8], "big"), b""
    while len(text) < size:
        text += client.recv(size - len(text))
    return json.loads(text.decode("utf-8", "surrogateescape")), dict(zip(numbers, found, strict=True))


def become(request: Any, streams: dict[int, int]) -> list[str]:
    """Takes over folder, environment and streams of a command; gives its words."""
    words, folder, environment = request
    for number in range(3):
        os.close(number)
    for number, stream in streams.items():
        os.dup2(stream, number)
    for stream in streams.values():
        if stream not in streams:
            os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if environment.get("BLANK_PICTURES"):
        importlib.import_module("pictures").blank_pictures()
    if environment.get("SMALL_EMBEDDED"):
        importlib.import_module("small_embedded").replace_embedded(Path(environment["SMALL_EMBEDDED"]))
    unbuffered = bool(environment.get("PYTHONUNBUFFERED"))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        shown = None
        if number in streams:
            shown = open(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False,  # noqa: SIM115
                         errors="backslashreplace" if number == 2 else "strict")  # fmt: skip
        if shown is not None and number:
            shown.reconfigure(write_through=unbuffered or number == 2, line_buffering=number == 2 or shown.isatty())
        setattr(sys, name, shown)
        setattr(sys, f"__{name}__", shown)
    warnings.resetwarnings()
    warnings.simplefilter("ignore", ResourceWarning)
    for category in (ImportWarning, PendingDeprecationWarning, DeprecationWarning):
        warnings.simplefilter("ignore", category)
    for option in filter(None, environment.get("PYTHONWARNINGS", "").split(",")):
        warnings._setoption(option)  # type: ignore[attr-defined]
    sys.path[:] = [p for p in sys.path if p != str(Path(__file__).parent)]
    more = [p for p in environment.get("PYTHONPATH", "").split(os.pathsep) if p]
    sys.path[:0] = [p for p in more if p not in sys.path]
    return list(words)


def run(words: list[str]) -> None:
    """What python does with these words."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if words[0] == "-m":
        sys.argv = words[1:]
        if not os.environ.get("PYTHONSAFEPATH"):
            sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        return
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, "")
        code = compile(words[1], "<string>", "exec")
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        vars(main)["__file__"] = os.path.abspath(words[0])
        code = compile(Path(words[0]).read_bytes(), words[0], "exec")
    exec(code, vars(main))


def leave(code: Any) -> None:
    """Ends the process as `sys.exit(code)` does, but leaves the memory of the modules to the kernel."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit((code or 0) & 255)


if __name__ == "__main__":
    command = serve(sys.argv[1])
    try:
        run(command)
        leave(0)
    except SystemExit as end:
        leave(end.code)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        leave(1)
