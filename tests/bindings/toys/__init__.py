"""Puts `toy_kernels` on the import path, and runs code in new interpreters that find it too."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from bindings.store import Store

ROOT = Path(__file__).resolve().parents[3]
PATH = str(Path(__file__).parent)
ADD = "toy_kernels.add"
RESOURCES = "toy_kernels.resources"

if PATH not in sys.path:
    sys.path.append(PATH)


def python(code: str, *argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a new interpreter at the root of the project."""
    path = os.pathsep.join(filter(None, (str(ROOT), PATH, os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), *argv],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=250,
    )


def entry_directory(root: Path) -> Path:
    """The only entry's."""
    (name,) = Store(root).names()
    return root / name
