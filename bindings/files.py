"""Whether a file that a command is to write at its end can be written, found out before its work."""

from __future__ import annotations

import os
from pathlib import Path


def obstacle(path: Path) -> str | None:
    """Why a file cannot be written, or None. One that is there keeps its contents; one that is not is not
    left behind."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        try:
            descriptor = os.open(path, flags)
        except FileNotFoundError:
            descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
            os.unlink(path)
        os.close(descriptor)
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    return None
