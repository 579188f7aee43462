"""The errors a user can meet. Each carries the exit code the command line ends with."""

from __future__ import annotations


class TunesmithError(ValueError):
    """Problem, where, what to do: `where` is put in front of the message, `fix` behind it."""

    exit_code = 1

    def __init__(self, problem: str, *, where: str | None = None, fix: str | None = None) -> None:
        self.problem = problem
        self.where = where
        self.fix = fix
        super().__init__(self.line())

    def line(self) -> str:
        """The one line a person reads."""
        text = f"{self.where}: {self.problem}" if self.where else self.problem
        if self.fix:
            text = f"{text} {self.fix}" if text.endswith("?") else f"{text.rstrip('.')}. {self.fix}"
        return text


class ConfigError(TunesmithError):
    """A flag, a config key or a combination of them is wrong. `problems` lists all of them."""

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
    """The data cannot be used as it is; `where` is `file:row:column` as far as known."""

    exit_code = 3


class ResourceError(TunesmithError):
    """Disk, memory, permission or a lock prevents the work."""

    exit_code = 4


class MissingPackage(ResourceError, ImportError):
    """A package that an extra of tunesmith brings is not installed."""


class CheckpointError(TunesmithError):
    """The run on disk is damaged, or it was made from other data or another config."""

    exit_code = 5


class NumericsError(TunesmithError):
    """A loss, gradient or weight is NaN or infinite."""

    exit_code = 6


class WorkerError(TunesmithError):
    """A data-loader worker or a rank died."""

    exit_code = 7


class StoppedBySignal(TunesmithError):
    """The run was asked to stop, saved its state and ended: 130 for SIGINT, 143 for SIGTERM."""

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
"""Module -> what pip installs to bring it."""


def name_the_extra(error: ModuleNotFoundError, where: str, otherwise: str = "") -> None:
    """Raises a MissingPackage with the command to run, if the module is one that an extra brings."""
    module = (error.name or "").partition(".")[0]
    if module in BROUGHT_BY:
        raise MissingPackage(
            f"needs {module}, which is not installed",
            where=where,
            fix=f"Run: pip install {BROUGHT_BY[module]}{otherwise}",
        ) from None


def nearest(name: str, known: list[str] | tuple[str, ...]) -> str | None:
    """The known name a person most likely meant, or None."""
    from difflib import get_close_matches

    found = get_close_matches(name.lower(), [k.lower() for k in known], n=1, cutoff=0.6)
    return next((k for k in known if k.lower() == found[0]), None) if found else None


def did_you_mean(name: str, known: list[str] | tuple[str, ...]) -> str | None:
    """The sentence "Did you mean 'x'?", or None when nothing is near."""
    hit = nearest(name, known)
    return f"Did you mean {hit!r}?" if hit else None


def first_few(texts: list[str] | tuple[str, ...], most: int) -> str:
    """`a, b and 3 more`: the texts with commas between, at most this many."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def short_text(error: BaseException) -> str:
    """What an error of a library says, on one line of at most 160 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else f"{text[:157]}..."
