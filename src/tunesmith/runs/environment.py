"""The surroundings of this process: versions, machine, commit, launcher variables, the Hub, and faults injected by tests."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar

from tunesmith.errors import ConfigError, did_you_mean, short_text

T = TypeVar("T")
HUB_SECONDS = 4.0
"""How long the Hub may take for its first answer: a wrong name is reported within 5 s (`datasets` alone tries for 25 s)."""
PACKAGES = "tunesmith torch transformers accelerate datasets tokenizers safetensors numpy pyarrow"
_FIX = (
    "Start it with torchrun or accelerate launch, which set these variables, or unset RANK, LOCAL_RANK and WORLD_SIZE."
)


def package_versions() -> dict[str, str | None]:
    """Installed versions of the packages a result depends on; None where one is missing."""
    return {name: _version_of(name) for name in PACKAGES.split()}


@cache
def _version_of(name: str) -> str | None:
    """Read once in a process: a package's metadata is a file of up to 50 kB."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def describe_environment() -> dict[str, Any]:
    """A JSON-ready description of this process's surroundings."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "packages": package_versions(),
        "command": [os.path.basename(sys.argv[0]), *sys.argv[1:]],
        "folder": os.getcwd(),
        "commit": current_commit(),
    }


def current_commit(folder: Path | None = None) -> str | None:
    """Return the commit that is checked out; None outside of git. `rev-parse` runs nothing that a repository configures."""
    words = ["git", "-C", str(folder or Path.cwd()), "rev-parse", "--verify", "--quiet", "HEAD"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=5, check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip()


@dataclass(frozen=True)
class Launch:
    """This process is rank `rank` of `world`."""

    rank: int
    world: int


def read_launch(environ: Mapping[str, str] | None = None) -> Launch:
    """Rank and number of ranks; 0 of 1 without a launcher. A ConfigError for variables that make no sense together."""
    given = os.environ if environ is None else environ
    world = _number(given, "WORLD_SIZE", 1, low=1)
    rank = _number(given, "RANK", 0)
    _number(given, "LOCAL_RANK", 0)
    _number(given, "MASTER_PORT", 0, high=65535)
    if rank >= world:
        raise ConfigError(f"RANK is {rank} and WORLD_SIZE {given.get('WORLD_SIZE', 'not set')}", fix=_FIX)
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if not given.get(name)]
    if world > 1 and missing:
        raise ConfigError(f"WORLD_SIZE is {world}, but {', '.join(missing)} is not set", fix=_FIX)
    return Launch(rank, world)


def _number(given: Mapping[str, str], name: str, default: int, *, low: int = 0, high: int = 1_000_000) -> int:
    text = given.get(name, "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and low <= int(text) <= high):
        raise ConfigError(f"the variable {name} is {text[:60]!r}, not a number from {low}", fix=_FIX)
    return int(text)


def answer_within(seconds: float, work: Callable[[], T]) -> T:
    """What `work` returns or raises; a TimeoutError after this many seconds, whatever it hangs in.

    The call runs in a daemon thread: Ctrl-C works meanwhile, and a call that never returns does not keep the process alive.
    """
    box: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            box.append(work())
        except BaseException as error:  # a panic of a Rust library is not an Exception
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True, name="tunesmith-answer")
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure[0]
    if not box:
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    return box[0]


def ask_hub(
    kind: Literal["model", "dataset"],
    name: str,
    revision: str | None,
    token: str | None,
    known: Callable[[], list[str]],
) -> Any:
    """What the Hub knows of a repository; ConnectionError when it does not answer in time. `known` are names to suggest."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    ask = getattr(HfApi(token=token), f"{kind}_info")
    try:
        return answer_within(HUB_SECONDS, lambda: ask(name, revision=revision, timeout=HUB_SECONDS))
    except GatedRepoError:
        raise ConfigError(
            f"the {kind} {name} asks for permission", fix="Get access on its page and log in with `hf auth login`."
        ) from None
    except RepositoryNotFoundError:
        raise ConfigError(
            f"there is {'no folder and ' if kind == 'model' else ''}no Hub {kind} named {name!r}",
            fix=did_you_mean(name, known()) or f"Private {kind}s need a token: `hf auth login`.",
        ) from None
    except RevisionNotFoundError:
        raise ConfigError(f"the {kind} {name} has no revision {revision!r}") from None
    except Exception as error:  # of httpx, httpx2 or the socket: the class differs by version
        raise ConnectionError(f"the Hub cannot be reached: {short_text(error)}") from error


_counts: dict[str, int] = {}


def fault_point(name: str) -> None:
    """A point that a test can name: on its n-th passage the process does kill, term, int, enospc, eio, sleep or raise."""
    wanted = os.environ.get("TUNESMITH_FAULT")
    if not wanted:
        _counts.clear()  # the next fault that is asked for in this process counts from 1
        return
    point, action, count = [*wanted.split(":"), "1"][:3]
    if point != name:
        return
    _counts[name] = _counts.get(name, 0) + 1
    if _counts[name] == int(count):
        _ACTIONS[action]()


def _raise_os_error(number: int) -> None:
    raise OSError(number, os.strerror(number))


def _raise() -> None:
    raise RuntimeError("a fault requested by TUNESMITH_FAULT")


_ACTIONS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "int": lambda: os.kill(os.getpid(), signal.SIGINT),
    "enospc": lambda: _raise_os_error(28),
    "eio": lambda: _raise_os_error(5),
    "sleep": lambda: time.sleep(600),
    "raise": _raise,
}


@contextlib.contextmanager
def library_bars_off(library: ModuleType, *, except_on_a_terminal: bool = False) -> Iterator[None]:
    """`library` is `datasets` or `huggingface_hub.utils`; bars that were off before stay off."""
    if library.are_progress_bars_disabled() or (except_on_a_terminal and sys.stderr.isatty()):
        yield
        return
    library.disable_progress_bars()
    try:
        yield
    finally:
        library.enable_progress_bars()
