"""What the command lines here share: saying things at once, a progress bar, files that are written whole."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BAR = 24


def say(text: str = "", end: str = "\n") -> None:
    """Prints without waiting for a full buffer."""
    print(text, end=end, flush=True)


@contextmanager
def phase(text: str, total: int = 0) -> Iterator[Callable[[], None]]:
    """Says what runs and how long it took; the function it gives reports one step of `total`.

    On a terminal a bar fills where the total is known; elsewhere every step is a dot."""
    done = 0
    bar = total > 0 and sys.stdout.isatty()

    def drawn() -> str:
        filled = round(BAR * min(done, total) / total)
        return f"\r  {text} [{'#' * filled}{'.' * (BAR - filled)}] {done}/{total}"

    def tick() -> None:
        nonlocal done
        done += 1
        say(drawn() if bar else ".", end="")

    say(drawn() if bar else f"  {text} ", end="")
    start = time.perf_counter()
    yield tick
    say(f" {time.perf_counter() - start:.1f} s")


def no_file(path: Path) -> str | None:
    """Why no file can be written there, asked before the work whose result it is to hold; None if one can."""
    if path.is_dir():
        return f"{path} is a folder"
    return None if path.parent.is_dir() else f"no folder {path.parent}"


def write(path: Path, record: Mapping[str, Any], indent: int | None = None) -> None:
    """Writes a JSON file whole or not at all; ValueError for what is no JSON."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(json.dumps(record, allow_nan=False, indent=indent) + "\n")
    os.replace(temporary, path)
