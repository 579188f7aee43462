"""The secret in the board's address. It is kept for this user alone, so that open pages survive a restart."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from tunesmith.errors import ResourceError
from tunesmith.run.writing import replacing


def token_file() -> Path:
    """Where the token of this user lies."""
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "tunesmith" / "board-token"


def key_file() -> Path:
    """Where the key of the prediction service lies: its callers are not those who may see the board."""
    return token_file().with_name("serve-key")


def load_token(file: Path | None = None, *, new: bool = False) -> str:
    """The token, made on first use; with `new` another one, which closes the door on every page opened before."""
    path = file or token_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not new and path.is_file() and not path.is_symlink():
            info = path.stat()
            known = path.read_text(encoding="ascii", errors="replace").strip()
            # A file that others can read is no secret any more, and one of another user's never was ours.
            if len(known) >= 32 and not info.st_mode & 0o077 and info.st_uid == os.getuid():
                return known
        token = secrets.token_urlsafe(32)
        path.unlink(missing_ok=True)  # a link, or one that others could read
        with replacing(path, mode=0o600) as out:
            out.write(token.encode())
    except OSError as error:
        raise ResourceError(
            f"the board's token cannot be kept ({error.strerror})",
            where=str(path),
            fix="Set XDG_STATE_HOME to a folder of yours.",
        ) from None
    return token
