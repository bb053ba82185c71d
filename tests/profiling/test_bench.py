"""The benchmark from its command line to its files, on a device with a told clock; and without a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bindings
from profiling import acceptance, bench, cases, floors, ours, peers, protocol
from profiling.bench import AGAIN, OURS, SEPARATE
from profiling.cases import Case, Check
from profiling.peers import Peer, torch_eager
from tests.profiling.fake import FakeDevice

COLD = {OURS: 4.0, AGAIN: 4.1, "empty kernel": 2.5, "torch eager": 40.0, "copy, 4 GiB": 2000.0}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """A CPU whose calls take what COLD says, 6 microseconds if it says nothing; a call's name is told at
    its capture."""
    names: dict[int, str] = {}
    kept: list[Any] = []  # so that no two calls share an id
    capture = bench.capture

    def named(device: FakeDevice, case: Case, version: bench.Version) -> None:
        make = version.make

        def made() -> Callable[[], Any]:
            call = make()
            kept.append(call)
            names[id(call)] = version.name
            return call

        version.make = made
        capture(device, case, version)

    def cost(call: Callable[[], Any], seen: int) -> float:
        return COLD.get(names[id(call)], 6.0)

    def read(x: Tensor, weight: Tensor, ctas: int, threads: int) -> Callable[[], Tensor]:
        value = floors.folded(x, weight, ctas * threads, 4)
        return lambda: torch.tensor([value], dtype=torch.int32)

    def check_read(x: Tensor, weight: Tensor, ctas: int, threads: int, out: Tensor) -> Check:
        return Check(int(out) == floors.folded(x, weight, ctas * threads, 4), 0.0, "")

    monkeypatch.setattr(bench, "capture", named)
    monkeypatch.setattr(floors, "empty", lambda device: lambda: None)
    monkeypatch.setattr(floors, "read", read)
    monkeypatch.setattr(floors, "check_read", check_read)
    monkeypatch.setattr(floors, "COPY_BYTES", 1 << 16)
    monkeypatch.setattr(ours, "compiled_call", ours.graph_call)
    monkeypatch.setattr(peers, "discover", partial(peers.discover, ["profiling.peers.torch_eager"]))
    monkeypatch.setattr(
        protocol, "host", lambda device, calls, settings, tick: {c: [[9.0]] * 3 for c in calls}
    )
    return FakeDevice(cost, idle=True)


def run(told: FakeDevice, tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    path = tmp_path / "bench.json"
    few = ("--blocks", "2", "--samples", "3", "--json", str(path))
    options = bench.parse([*arguments, *few])
    with torch.inference_mode(), bindings.backend("reference"):
        code = bench.bench(options, told)
    return code, json.loads(path.read_text())


def test_no_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_a_gpu_of_no_target(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    monkeypatch.setattr(bench, "target_of", lambda device: None)
    assert bench.main(["--quick"]) == 2
    assert "Some GPU is none of sm_90a, sm_100a, sm_103a" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ops", "hc_gate,nothing"], "nothing: not among hc_gate,"),
        (["--rows", "0"], "argument --rows: got 0, allowed positive integers, separated by commas"),
        (["--rows", "1,one"], "argument --rows: got 1,one, allowed positive integers"),
        (["--blocks", "0"], "blocks: got 0"),
        (["--json", "/no/such/folder/f.json"], "no folder /no/such/folder"),
        (["--json", "/tmp"], "/tmp is a folder"),
        (["--counters", "--ops", "hc_gate_apply_norm,hc_gate"], "got hc_gate_apply_norm, allowed "),
    ],
)
def test_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        bench.parse(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_plan() -> None:
    whole = bench.plan(bench.parse([]))
    assert [(op, rows) for op, rows in whole if op == "gdn_packed_decode"] == [
        ("gdn_packed_decode", rows) for rows in (1, 64, 256)
    ]
    assert [rows for op, rows in whole if op == "hc_mix"] == [1, 4, 8, 16, 32]
    assert {rows for op, rows in whole if op not in ("gdn_packed_decode", "hc_mix")} == {1}
    assert bench.plan(bench.parse(["--ops", "hc_gate", "--rows", "1,4"])) == [("hc_gate", 1), ("hc_gate", 4)]


def test_settings() -> None:
    assert bench.parse([]).settings == protocol.Settings()
    quick = bench.parse(["--quick", "--samples", "5"]).settings
    assert (quick.blocks, quick.samples) == (2, 5)


def test_record(told: FakeDevice, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, record = run(told, tmp_path, "--ops", "hc_gate", "--peers")
    assert code == 0, "a missing peer is no failure"
    assert record["schema"] == 1
    assert record["command"].endswith("--samples 3 --json bench.json")
    assert record["settings"]["blocks"] == 2
    assert record["settings"]["flush_bytes"] == 512 << 20
    assert record["host"]["versions"]["torch"] == torch.__version__
    (entry,) = record["runs"]
    assert (entry["op"], entry["rows"], entry["error"]) == ("hc_gate", 1, None)
    assert entry["served_by"].startswith("reference")
    versions = {v["name"]: v for v in entry["versions"]}
    assert list(versions) == [OURS, AGAIN, "empty kernel", "torch eager"]
    for name, version in versions.items():
        assert version["cold"]["samples"] == [[COLD[name]] * 3] * 2
        assert version["cold"]["median"] == COLD[name]
        assert version["error"] is None
        assert version["kernels"] == ["kernel"]
    assert versions[OURS]["hot"]["calls"] == 200
    assert versions[OURS]["hot"]["median"] == 4.0 / 200
    assert versions["torch eager"]["hot"]["calls"] == 37
    assert versions["torch eager"]["worst_error_of_allowed"] <= 4
    assert entry["noise"]["cold"] == pytest.approx(1 - 4.0 / 4.1)
    assert set(entry["host"]) == {"ops", "ops, out=", "torch.ops", "torch.ops .out", "launch function"}
    assert entry["host"]["ops"]["median"] == 9.0
    verdicts = {(j["metric"], j["version"]): j["verdict"] for j in record["acceptance"]}
    assert verdicts == {("cold", OURS): "MISSING", ("host", "ops"): "PASS", ("host", "ops, out="): "PASS"}
    said = capsys.readouterr().out
    assert "[1/1] hc_gate, 1 row(s)" in said
    assert "noise floor, the same call captured twice: 2.44%" in said
    assert "A/A noise floor: cold 2.44%" in said
    assert "MISSING (no cold times of sglang hc_combine_gate)" in said


def test_ours_is_timed_against_itself_first(told: FakeDevice, tmp_path: Path) -> None:
    """The floor is known before anything else is timed, and its raw samples are kept."""
    _, record = run(told, tmp_path, "--ops", "hc_gate", "--no-host", "--peers")
    again = record["runs"][0]["again"]["cold"]
    assert {name: timing["samples"] for name, timing in again.items()} == {
        OURS: [[4.0] * 3] * 2,
        AGAIN: [[4.1] * 3] * 2,
    }
    timed = [graph for what, graph in told.log if what == "time"]
    first = 2 * (2 * 3 + protocol.WARMUP_ROUNDS)
    assert len({id(graph) for graph in timed[:first]}) == 2
    assert len({id(graph) for graph in timed[first : 2 * first]}) == 4


def test_the_floor_is_the_larger_of_both_runs(
    told: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = 2 * 3 + protocol.WARMUP_ROUNDS
    cost = told.cost

    def quiet_later(call: Callable[[], Any], seen: int) -> float:
        taken = cost(call, seen)
        return 4.0 if taken == COLD[AGAIN] and seen >= first else taken

    monkeypatch.setattr(told, "cost", quiet_later)
    _, record = run(told, tmp_path, "--ops", "hc_gate", "--no-host")
    assert record["runs"][0]["noise"]["cold"] == pytest.approx(1 - 4.0 / 4.1)


@pytest.mark.parametrize(("other", "shown"), [(4.05, "~1.012"), (4.2, "1.050")])
def test_nothing_is_claimed_under_the_noise(
    told: FakeDevice,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    other: float,
    shown: str,
) -> None:
    monkeypatch.setitem(COLD, "torch eager", other)
    run(told, tmp_path, "--ops", "hc_gate", "--no-host", "--peers")
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("    torch eager"))
    assert shown in line.split()


def test_every_piece_of_work(told: FakeDevice, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, record = run(told, tmp_path, "--rows", "1", "--peers")
    assert [entry["op"] for entry in record["runs"]] == list(cases.CASES)
    for entry in record["runs"]:
        assert entry["error"] is None
        assert all(v["error"] is None and v["cold"] for v in entry["versions"]), entry["versions"]
        assert entry["versions"][-1]["name"] == "torch eager"
    asked = [t for t in acceptance.TARGETS if t.rows == 1]
    assert len(record["acceptance"]) == len(asked)
    assert "FAIL" not in {j["verdict"] for j in record["acceptance"]}
    assert f"[{len(cases.CASES)}/{len(cases.CASES)}]" in capsys.readouterr().out


def test_floors_are_judged(told: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COLD, "read floor 5x64", 3.5)
    code, record = run(told, tmp_path, "--ops", "shared_gate", "--no-host")
    (line,) = record["acceptance"]
    assert (code, line["verdict"], line["against"]) == (1, "FAIL", "read floor 5x64")
    assert line["ratio"] == pytest.approx(3.5 / 4.0)
    monkeypatch.setitem(COLD, "read floor 5x64", 3.7)
    code, record = run(told, tmp_path, "--ops", "shared_gate", "--no-host")
    assert (code, record["acceptance"][0]["verdict"]) == (0, "PASS")
    assert record["runs"][0]["host"] == {}


def test_tiles_and_copies(told: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "COPY_FROM_ROWS", 2)
    code, record = run(
        told, tmp_path, "--ops", "gdn_packed_decode", "--rows", "2", "--gdn-tiles", "8,32", "--no-host"
    )
    assert code == 0
    versions = {v["name"]: v for v in record["runs"][0]["versions"]}
    assert {"tile 8", "tile 32", "copy, 4 GiB", "copy, same bytes"} <= set(versions)
    assert versions["copy, same bytes"]["bytes"] == 2 * 2 * 12 * 128 * 128 * 4
    assert versions["copy, 4 GiB"]["hot"] is None
    assert all(v["error"] is None for v in versions.values())


def test_gate_then_apply_norm(told: FakeDevice, tmp_path: Path) -> None:
    code, record = run(told, tmp_path, "--ops", "hc_gate_apply_norm", "--peers")
    assert code == 0
    assert [v["name"] for v in record["runs"][0]["versions"]] == [OURS, AGAIN, "empty kernel", "torch eager"]
    assert record["runs"][0]["host"] == {}


def test_boundary_stands_beside_its_two_launches(told: FakeDevice, tmp_path: Path) -> None:
    code, record = run(told, tmp_path, "--ops", "hc_boundary", "--peers", "--no-host")
    versions = [v["name"] for v in record["runs"][0]["versions"]]
    assert versions == [OURS, AGAIN, SEPARATE, "empty kernel", "torch eager"]
    assert all(v["error"] is None for v in record["runs"][0]["versions"])
    assert [j["against"] for j in record["acceptance"]] == [SEPARATE]
    assert code == 0


def eager(change: Callable[[Tensor], Tensor], name: str = "another", **given: Any) -> Peer:
    peer = next(peer for peer in torch_eager.peers() if peer.op == "hc_gate")

    def prepare(case: Case) -> Callable[[], dict[str, Tensor]]:
        call = peer.prepare(case)
        return lambda: {name: change(value) for name, value in call().items()}

    return Peer(name, "hc_gate", prepare, **given)


def found(*offered: Peer) -> Callable[[], peers.Found]:
    return lambda: peers.Found(offered, {})


def test_peers_may_be_left_out(told: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offered = [eager(lambda x: x, name, allowance=4.0) for name in ("one, slow", "one, fast", "another")]
    monkeypatch.setattr(peers, "discover", found(*offered))
    left = ("--ops", "hc_gate", "--peers", "--no-host", "--without", "one,nothing")
    versions = run(told, tmp_path, *left)[1]["runs"][0]["versions"]
    assert [v["name"] for v in versions] == [OURS, AGAIN, "empty kernel", "another"]


def test_a_wrong_peer_is_not_timed(told: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "discover", found(eager(lambda x: x * 1.01)))
    code, record = run(told, tmp_path, "--ops", "hc_gate", "--peers", "--no-host")
    version = record["runs"][0]["versions"][-1]
    assert version["error"].startswith("wrong result: hc_gate.sum")
    assert version["cold"] is None
    assert code == 0, "ours is right"
    assert record["runs"][0]["versions"][0]["cold"] is not None


def test_a_peer_that_raises_stops_nothing(
    told: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(x: Tensor) -> Tensor:
        raise RuntimeError("nvcc is missing")

    monkeypatch.setattr(peers, "discover", found(eager(broken, "broken"), eager(lambda x: x, allowance=4.0)))
    code, record = run(told, tmp_path, "--ops", "hc_gate", "--peers", "--no-host")
    first, second = record["runs"][0]["versions"][-2:]
    assert first["error"] == "RuntimeError: nvcc is missing"
    assert second["cold"] is not None
    assert code == 0


def test_a_peer_may_refuse(told: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "discover", found(eager(lambda x: x, refuses=lambda case: "takes no rows")))
    _, record = run(told, tmp_path, "--ops", "hc_gate", "--peers", "--no-host")
    assert [v["name"] for v in record["runs"][0]["versions"]] == [OURS, AGAIN, "empty kernel"]


def test_ours_wrong_fails(
    told: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ours.graph_call
    monkeypatch.setattr(ours, "graph_call", lambda case: lambda: call(case)().mul_(1.5))
    code, record = run(told, tmp_path, "--ops", "hc_gate")
    assert code == 1
    assert record["runs"][0]["versions"][0]["cold"] is None
    assert record["acceptance"][0]["verdict"] == "FAIL"
    assert "FAILED hc_gate 1" in capsys.readouterr().out


def test_a_run_that_breaks_leaves_the_others(
    told: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(case: Case) -> str:
        if case.op == "hc_gate":
            raise RuntimeError("gone")
        return "cute"

    monkeypatch.setattr(ours, "served_by", broken)
    code, record = run(told, tmp_path, "--ops", "hc_gate,shared_gate", "--no-host")
    first, second = record["runs"]
    assert code == 1
    assert "RuntimeError: gone" in first["error"]
    assert second["error"] is None
    assert {j["verdict"] for j in record["acceptance"] if j["op"] == "hc_gate"} == {"FAIL"}


def test_files_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    bench.write(path, {"a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        bench.write(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1}
