"""What goes wrong inside transformers or tokenizers while they read a folder becomes an error that names it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tunesmith.errors import ConfigError, ResourceError, TunesmithError, short_text


@contextmanager
def naming(what: str, folder: Path) -> Iterator[None]:
    """A ConfigError "FOLDER: WHAT (reason)" for any failure inside: also a panic in Rust, which is no Exception."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError, TunesmithError):
        raise
    except BaseException as error:
        kind = type(error).__name__
        if kind == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error):
            raise ResourceError(f"{what}: out of memory", where=str(folder)) from error
        if kind.startswith("StrictDataclass"):  # a field of the config, read by any library
            what, folder = "cannot be used", folder / "config.json"
        raise ConfigError(f"{what} ({kind}: {short_text(error)})", where=str(folder)) from error
