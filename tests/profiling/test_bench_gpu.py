"""The benchmark on a real device: every version that needs no peer is right, and times are plausible."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import bindings
from profiling import bench, cases, once, ours, protocol
from profiling.ncu import parse

pytestmark = pytest.mark.gpu


def test_a_short_run(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    few = ["--blocks", "1", "--samples", "5", "--ops", "hc_gate,shared_gate", "--json", str(path)]
    assert bench.main(few) in (0, 1), "1: too few samples to reach a target"
    record = json.loads(path.read_text())
    assert record["host"]["gpu"] == torch.cuda.get_device_name()
    for run in record["runs"]:
        assert run["error"] is None
        assert run["served_by"].startswith("cute sm_")
        assert run["host"]["launch function"]["median"] > 0
        versions = {v["name"]: v for v in run["versions"]}
        for version in versions.values():
            assert version["error"] is None, version
            assert 0.05 < version["hot"]["median"] < version["cold"]["median"] < 1000
        assert versions["empty kernel"]["cold"]["median"] < versions["ours"]["cold"]["median"]
        kernels = versions["ours"]["kernels"]
        assert kernels is None or len(kernels) == 1, "one launch a call"


def test_a_capture_is_what_a_replay_computes() -> None:
    device = protocol.CudaDevice()
    x = torch.ones(4, device=device.device)
    graph = device.capture(lambda: x * 2, count=3)
    x.fill_(5.0)
    device.flush()
    timing = device.time(graph)
    device.synchronize()
    assert graph.result.tolist() == [10.0] * 4
    assert timing() > 0


def test_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert once.main(["--ops", "hc_gate,gdn_packed_decode", "--rows", "2"]) == 0
    assert "profiled gdn_packed_decode, 2 row(s)" in capsys.readouterr().out


@pytest.mark.parametrize("rows", [1, 12])
def test_what_a_profiler_gets_of_hc_mix_is_what_is_served(rows: int) -> None:
    """One launch, of the same bits."""
    case = cases.make("hc_mix", rows, torch.device("cuda:0"))
    (out,) = case.outs.values()
    with bindings.backend("cute"):
        expected = ours.graph_call(case)().clone()
        out.fill_(float("nan"))
        captured = protocol.capture(once.mix_call(case))
    captured.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)
    if captured.kernels is None:
        pytest.skip("the bits are the same; the driver's bindings do not tell a graph's kernels")
    assert [parse.short_name(name) for name in captured.kernels] == ["HcMix"]
