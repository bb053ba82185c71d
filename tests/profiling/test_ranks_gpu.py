"""Two ranks on GPUs of their own: the bench and the decode step as torchrun starts them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from profiling.acceptance import LINK, OURS, UNFUSED
from profiling.collective import OP

pytestmark = pytest.mark.multi_gpu

ROOT = Path(__file__).resolve().parents[2]


def torchrun(tmp_path: Path, module: str, *arguments: str) -> dict[str, Any]:
    """What two ranks write; whether times are met is not asked."""
    path = tmp_path / "result.json"
    start = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    few = ("--blocks", "1", "--samples", "3", "--json", str(path))
    ran = subprocess.run(
        [*start, "-m", module, *arguments, *few], capture_output=True, text=True, cwd=ROOT, timeout=280
    )
    assert path.exists(), ran.stdout + ran.stderr
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def test_every_version_is_right_and_timed(tmp_path: Path) -> None:
    record = torchrun(tmp_path, "profiling.bench", "--rows", "1,32", "--peers")
    assert record["missing_peers"] == {}
    assert 0.1 < record["link"]["one_way_us"] < 20
    for run in record["runs"]:
        names = [v["name"] for v in run["versions"]]
        assert {v["name"]: v["error"] for v in run["versions"] if v["error"]} == {}
        assert OURS in names
        assert all(v["cold"] for v in run["versions"] if v["name"] != LINK)
        assert all(v["hot"] for v in run["versions"])
        if run["op"] == OP:
            assert sum(name.startswith(UNFUSED) for name in names) == 3


def test_a_small_step(tmp_path: Path) -> None:
    size = ("--layers", "4", "--experts", "16", "--context", "256")
    record = torchrun(tmp_path, "profiling.decode_step", *size)
    assert record["failures"] == []
    assert record["shape"]["ranks"] == 2
    assert [len(medians) for medians in record["by_rank"]["cold"].values()] == [2, 2, 2]
