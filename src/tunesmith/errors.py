"""The exceptions of this package, as a tree. Each has the exit code of the command line.

TunesmithError
  ConfigError (2)      wrong flag or option
  DataError (3)        unusable data
  ResourceError (4)    disk, memory, permission, lock
    MissingPackage
  CheckpointError (5)  damaged or different run
  NumericsError (6)    NaN or inf
  WorkerError (7)      a worker or rank died
  StoppedBySignal (130, 143)
"""

from __future__ import annotations


class TunesmithError(ValueError):
    """Base class. The message consists of `where` (place), the problem and `fix` (what to do)."""

    exit_code = 1

    def __init__(self, problem: str, *, where: str | None = None, fix: str | None = None) -> None:
        self.problem = problem
        self.where = where
        self.fix = fix
        super().__init__(self.line())

    def line(self) -> str:
        """Return the message as one line."""
        text = f"{self.where}: {self.problem}" if self.where else self.problem
        if self.fix:
            text = f"{text} {self.fix}" if text.endswith("?") else f"{text.rstrip('.')}. {self.fix}"
        return text


class ConfigError(TunesmithError):
    """A flag, an option or a combination of them is wrong. `problems` lists all of them."""

    exit_code = 2

    def __init__(
        self,
        problem: str,
        *,
        where: str | None = None,
        fix: str | None = None,
        problems: tuple[str, ...] = (),
    ) -> None:
        super().__init__(problem, where=where, fix=fix)
        self.problems = problems


class DataError(TunesmithError):
    """The data can't be used; `where` is `file:row:column` as far as known."""

    exit_code = 3


class ResourceError(TunesmithError):
    """Disk, memory, permissions or a lock prevent the work."""

    exit_code = 4


class MissingPackage(ResourceError, ImportError):
    """A package is missing that an extra of tunesmith installs."""


class CheckpointError(TunesmithError):
    """The run on disk is damaged, or was started with different data or options."""

    exit_code = 5


class NumericsError(TunesmithError):
    """A loss, gradient or weight is NaN or infinite."""

    exit_code = 6


class WorkerError(TunesmithError):
    """A data-loader worker or a rank died."""

    exit_code = 7


class StoppedBySignal(TunesmithError):
    """A signal stopped the run after its state was saved. The exit code is 130 for SIGINT, 143 for SIGTERM."""

    def __init__(self, signal_number: int, problem: str) -> None:
        names = {2: "Ctrl-C", 15: "SIGTERM"}
        super().__init__(f"stopped by {names.get(signal_number, f'signal {signal_number}')} {problem}")
        self.exit_code = 128 + signal_number


TRAINING_MODULES = (
    "accelerate", "datasets", "jinja2", "matplotlib", "pandas", "pyarrow", "python_calamine",
    "safetensors", "scipy", "sklearn", "torch", "tqdm", "transformers", "yaml",
)  # fmt: skip
BROUGHT_BY = {
    **dict.fromkeys(TRAINING_MODULES, "'tunesmith[train]'"),
    **dict.fromkeys(("onnxruntime", "tokenizers"), "'tunesmith[runtime]'"),
    "huggingface_hub": "huggingface_hub",
}
"""Module -> the argument of `pip install` that provides it."""


def name_the_extra(error: ModuleNotFoundError, where: str, otherwise: str = "") -> None:
    """Raise a MissingPackage with the command to run if an extra provides the module."""
    module = (error.name or "").partition(".")[0]
    if module in BROUGHT_BY:
        raise MissingPackage(
            f"needs {module}, which is not installed",
            where=where,
            fix=f"Run: pip install {BROUGHT_BY[module]}{otherwise}",
        ) from None


def nearest(name: str, known: list[str] | tuple[str, ...]) -> str | None:
    """Return the shortest known name that starts with this one, else the most similar one, or None."""
    from difflib import get_close_matches

    longer = [k for k in known if len(name) > 3 and k.lower().startswith(name.lower())]
    if longer:
        return min(longer, key=len)
    found = get_close_matches(name.lower(), [k.lower() for k in known], n=1, cutoff=0.6)
    return next((k for k in known if k.lower() == found[0]), None) if found else None


def did_you_mean(name: str, known: list[str] | tuple[str, ...]) -> str | None:
    """Return "Did you mean 'x'?", or None if no known name is similar."""
    hit = nearest(name, known)
    return f"Did you mean {hit!r}?" if hit else None


def first_few(texts: list[str] | tuple[str, ...], most: int) -> str:
    """Return `a, b and 3 more`: at most this many texts, separated by commas."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def short_text(error: BaseException) -> str:
    """Return the message of a library's error as one line of at most 160 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else f"{text[:157]}..."
