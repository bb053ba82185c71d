"""The demo on a GPU: the captured step holds the kernels that it has to, and replays them right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from profiling import demo
from profiling.decode import LAYERS


@pytest.mark.gpu
def test_on_a_gpu_the_graph_holds_the_published_launches(tmp_path: Path) -> None:
    path = tmp_path / "demo.json"
    assert demo.main(["--device", "cuda", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert result["layers"] == LAYERS
    assert result["launches"]["hc_apply_norm"] == result["graph_kernels"]["hc_apply_norm"] == 95
    assert result["launches"]["gdn_packed_decode"] == result["graph_kernels"]["gdn_packed_decode"] == 36
    assert result["launches"]["moe_finalize"] == result["graph_kernels"]["moe_finalize"] == 48
    assert all(report["ok"] and report["backend"] == "cute" for report in result["ops"].values())
    assert 0 < result["latency"]["graph_ms"] < result["latency"]["eager_ms"]


@pytest.mark.gpu
def test_on_a_gpu_a_fused_boundary_takes_the_gate_along(tmp_path: Path) -> None:
    path = tmp_path / "demo.json"
    assert demo.main(["--device", "cuda", "--layers", "4", "--boundary", "fused", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    for op, count in {"hc_boundary": 6, "hc_apply_norm": 1, "hc_gate": 2}.items():
        assert result["launches"][op] == result["graph_kernels"][op] == count
