"""Puts `toy_kernels` on the import path."""

from __future__ import annotations

import sys
from pathlib import Path

PATH = str(Path(__file__).parent)
ADD = "toy_kernels.add"
RESOURCES = "toy_kernels.resources"

if PATH not in sys.path:
    sys.path.append(PATH)
