"""The `tunesmith` command: a table of verbs, each imported when it is called; errors become one line and an exit code."""

from __future__ import annotations

import errno
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, TextIO

from tunesmith import __version__
from tunesmith.errors import (
    ConfigError,
    StoppedBySignal,
    TunesmithError,
    name_the_extra,
    nearest,
)

VERBS: dict[str, dict[str, str]] = {
    "Train": {
        "train": "fine-tune a model on labeled text; continue a run that was stopped",
        "plan": "estimate time, memory and disk of a run",
        "search": "search for better option values",
        "demo": "train the bundled model on the bundled sample data",
        "resume": "alias of train: `tunesmith resume RUN` continues a run",
    },
    "Analyze": {
        "audit": "find duplicates, leaks and label errors in data files",
        "report": "write the report page and curves of a run, print the diagnosis",
        "compare": "compare runs, with the uncertainty of the difference",
        "board": "watch and compare runs in the browser",
        "doctor": "check a run folder, or show versions and devices",
    },
    "Use the model": {
        "predict": "label new rows with a trained model",
        "evaluate": "score a trained model on labeled rows",
        "export": "convert the model to ONNX",
        "serve": "serve a trained model over HTTP",
        "push": "upload a trained model to the Hugging Face Hub",
    },
}
"""Title -> verb -> help. A verb is in `tunesmith/cli/<verb>.py`."""

ALIASES = {"resume": "train"}

_ENVIRONMENT_ERRORS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EMFILE,
    errno.ENFILE,
    errno.EIO,
    errno.ENOMEM,
)


def entry() -> None:
    """Run the console script."""
    prepare_streams()
    os.environ["MPLBACKEND"] = "agg"  # a command opens no window, and matplotlib fails if the variable is invalid
    code = main(sys.argv[1:])
    for number in (signal.SIGINT, signal.SIGTERM):  # the work is done: a signal must not change its exit code
        signal.signal(number, signal.SIG_IGN)
    sys.exit(code)


def main(argv: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    debug = "--debug" in argv
    words = [word for word in argv if word != "--debug"]
    try:
        with _notes_on_stderr(debug):
            code = run_command(words, debug=debug)
        sys.stdout.flush()
        return code
    except SystemExit as stop:  # argparse after --help
        return stop.code if isinstance(stop.code, int) else 0
    except BrokenPipeError:  # the reader (`| head`) has gone
        drop(sys.stdout)
        return 141
    except BaseException as error:  # PanicException of Rust libraries is not an Exception
        if debug and not isinstance(error, KeyboardInterrupt):
            import traceback

            traceback.print_exc()
        code, text = explain(error, debug=debug)
        try:
            print(f"tunesmith: {text}", file=sys.stderr, flush=True)
        except OSError:  # stderr may be a file on the full disk: the exit code must still show the reason
            drop(sys.stderr)
        try:
            sys.stdout.flush()
        except OSError:
            drop(sys.stdout)
        return code


def run_command(words: Sequence[str], *, debug: bool = False) -> int:
    """Find the verb, parse its arguments and run it."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0 if words else 2
    if words[0] in ("-V", "--version", "version"):
        print(f"tunesmith {__version__}")
        return 0
    verb, rest = words[0], words[1:]
    known = list_verbs()
    if verb not in known:
        raise ConfigError(
            f"unknown {'flag' if verb.startswith('-') else 'command'} {verb!r}", fix=_verb_hint(verb, known)
        )
    try:
        module = load_verb(verb)
        args = make_parser(verb, module).read(rest)
        args.debug = debug
        return int(module.run(args))
    except ModuleNotFoundError as error:
        name_the_extra(error, f"tunesmith {verb}")
        raise


def list_verbs() -> dict[str, str]:
    """Return all verbs with their help."""
    return {verb: text for verbs in VERBS.values() for verb, text in verbs.items()}


def load_verb(verb: str) -> Any:
    """Return the module of a verb, with `add_arguments(parser)` and `run(args) -> int`."""
    return import_module(f"tunesmith.cli.{ALIASES.get(verb, verb)}")


def make_parser(verb: str, module: Any) -> Any:
    """Return the parser of a verb, with the arguments its module adds."""
    from tunesmith.cli.parser import Parser

    text = module.__doc__ or list_verbs()[verb]
    parser = Parser(prog=f"tunesmith {verb}", description=text.strip().split("\n\n")[0])
    module.add_arguments(parser)
    parser.add_argument("--version", action="version", version=f"tunesmith {__version__}", help="Show the version.")
    parser.add_argument("--debug", action="store_true", help="Show the traceback of an error.")
    return parser


def overview() -> str:
    """Return the text of `tunesmith --help`."""
    lines = [
        "usage: tunesmith <command> [options]",
        "",
        "Fine-tune pretrained encoders on labeled text and text pairs.",
    ]
    for title, verbs in VERBS.items():
        lines += ["", f"{title}:", *(f"  {verb:<12}{text}" for verb, text in verbs.items())]
    lines += [
        "",
        "First steps:",
        "  tunesmith train --train_file pairs.csv",
        "  tunesmith demo",
        "",
        "`tunesmith <command> --help` lists its options. --version and --debug (tracebacks) always work.",
        "Exit codes: 0 done, 2 usage or config, 3 data, 4 environment, 5 run damaged or changed,",
        "            6 numerics, 7 worker died, 130/143 stopped by a signal.",
    ]
    return "\n".join(lines)


def explain(error: BaseException, *, debug: bool = False) -> tuple[int, str]:
    """Return the exit code and message of an error."""
    if isinstance(error, KeyboardInterrupt):
        return 130, "stopped by Ctrl-C"
    if isinstance(error, StoppedBySignal):
        return error.exit_code, str(error)
    if isinstance(error, TunesmithError):
        return error.exit_code, f"error: {error}"
    again = "" if debug else ". Run again with --debug for the traceback"
    kind = type(error).__name__
    if isinstance(error, MemoryError) or kind == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error):
        return 4, f"error: out of memory: use a smaller batch or --max_seq_length{again}"
    reason = " ".join(str(error).split()) or "no message"
    if kind == "PanicException":
        # the Rust core of a tokenizer: a bad tokenizer.json, or a text on which its patterns fail
        return 3, f"error: the tokenizer failed: {reason[:300]}{again}"
    if isinstance(error, RuntimeError) and reason.startswith("Symlink loop"):
        return 4, f"error: a link leads to itself: {reason.partition('from ')[2][:300]}"
    if isinstance(error, OSError) and error.errno in _ENVIRONMENT_ERRORS:
        where = f" ({error.filename})" if error.filename else ""
        return 4, f"error: {error.strerror}{where}{again}"
    return 1, f"error: unexpected {kind}: {reason[:500].rstrip('.')}{again}"


def _verb_hint(verb: str, known: dict[str, str]) -> str:
    hit = nearest(verb, tuple(known))
    if hit is not None:
        return f"Did you mean `tunesmith {hit}`?"
    if verb.startswith("-"):
        return "The command comes first, such as `tunesmith train --train_file pairs.csv`"
    return f"Commands: {', '.join(known)}"


@contextmanager
def _notes_on_stderr(debug: bool) -> Iterator[None]:
    """Print our own warnings to stderr, one line each, while the command runs."""
    logger = logging.getLogger("tunesmith")
    level = logger.level
    handler = logging.StreamHandler()
    handler.setLevel(logging.DEBUG if debug else logging.WARNING)
    handler.setFormatter(logging.Formatter("tunesmith: note: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG if debug else logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


# Standard streams: stdout and stderr may be closed, full, broken or ASCII only.


def prepare_streams() -> None:
    """Make both streams usable. Open descriptors 0 to 2, so that our files never get descriptors that libraries print to."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    sys.stdout, sys.stderr = (stream or io.StringIO() for stream in (sys.stdout, sys.stderr))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def drop(stream: TextIO) -> None:
    """Redirect a stream to the null device, so that the flush at exit does not fail again."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def raise_on_sigterm() -> None:
    """Let SIGTERM raise StoppedBySignal, so that temporary files are removed."""

    def stop(number: int, frame: object) -> None:
        raise StoppedBySignal(number, "nothing was written")

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, stop)
