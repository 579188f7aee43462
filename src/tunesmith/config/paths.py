"""Names of files and folders that cannot be used, told before anything is read or made."""

from __future__ import annotations

from collections.abc import Iterator

from tunesmith.config.schema import PATH_OPTIONS, RunConfig, list_options


def find_path_problems(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """(option, what is wrong, what to do) for each."""
    for name in list_options():
        value = getattr(config, name)
        texts = (value,) if isinstance(value, str) else value if isinstance(value, tuple) else ()
        if any(isinstance(text, str) and not _is_text(text) for text in texts):
            yield name, "is not UTF-8 text, or holds a NUL character", "Use another name"
        elif name in PATH_OPTIONS and isinstance(value, str) and value.startswith("~"):
            yield name, f"{value.split('/')[0]} is no home folder", "Write the path out, or ./~name"
    asked = config.run_name
    if asked is None or config.output_dir is not None:
        return
    if not asked.strip() or asked in (".", "..") or any(c in "/\\" or not c.isprintable() for c in asked):
        fix = "Use one name without slashes, or say where the folder goes with --output_dir"
        yield "run_name", f"{asked!r} cannot be the name of a folder in runs/", fix


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text
