"""The bench of several ranks: what is compared is right on every rank, samples are the slowest rank's, and it
is refused where it cannot run."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bindings
from collectives.communicator import Communicator
from collectives.rendezvous import ThreadRendezvous
from profiling import acceptance, bench, protocol, ranks, world
from profiling.acceptance import AGAIN, OURS, UNFUSED
from profiling.acceptance import LINK as FLOOR
from profiling.collective import ADDCMUL, FINALIZE, GATED, OP
from profiling.peers import Reducer
from profiling.ranks import SUM
from tests.collectives.conftest import in_threads
from tests.profiling.fake import FakeDevice

N, ROOT = 2, Path(__file__).resolve().parents[2]
LINK = {"one_way_us": 0.7, "samples": {"0-1": [0.7]}, "rounds": 10, "cycles": 1400}


def slowest(*samples: protocol.Samples) -> list[protocol.Samples]:
    """What each of the ranks with these samples gets."""
    meetings = ThreadRendezvous.world(len(samples))

    def of_rank(rank: int) -> protocol.Samples:
        group = world.World(rank, len(samples), meet(meetings[rank]), FakeDevice(lambda call, seen: 1.0))
        found = group.slowest(samples[rank])
        assert group.by_rank["a"] == [2.0, 5.0]
        return found

    return in_threads(len(samples), of_rank)


def meet(rendezvous: ThreadRendezvous) -> Callable[[Any, str], list[Any]]:
    return lambda value, what: rendezvous.all_gather(value, 10.0, what)


def test_the_slowest_rank_counts() -> None:
    one = {"a": [[1.0, 2.0], [2.0, 9.0]], "b": [[1.0, 1.0], [1.0, 1.0]]}
    two = {"a": [[5.0, 1.0], [5.0, 8.0]], "b": [[0.5, 3.0], [1.0, 1.0]]}
    for found in slowest(one, two):
        assert found == {"a": [[5.0, 2.0], [5.0, 9.0]], "b": [[1.0, 3.0], [1.0, 1.0]]}


def test_ranks_that_time_different_versions_are_found() -> None:
    found = slowest({"a": [[1.0]]}, {"b": [[1.0]]})
    assert all(isinstance(one, RuntimeError) and "other versions" in str(one) for one in found)


def test_ranks_agree_on_an_error() -> None:
    meetings = ThreadRendezvous.world(N)

    def of_rank(rank: int) -> str | None:
        group = world.World(rank, N, meet(meetings[rank]), FakeDevice(lambda call, seen: 1.0))
        assert group.agreed(None) is None
        return group.agreed("broken" if rank == 1 else None)

    assert in_threads(N, of_rank) == ["rank 1: broken"] * N


class Board:
    """Sums up what the ranks bring, between threads: stands in for another's all-reduce."""

    def __init__(self, rank: int, meetings: list[ThreadRendezvous], name: str, in_place: bool) -> None:
        self.meet, self.name, self.in_place = meet(meetings[rank]), name, in_place

    def reducer(self, spoil: float = 0.0) -> Reducer:
        def take(like: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
            held = torch.empty_like(like)

            def call() -> Tensor:
                total = sum(one.float() for one in self.meet(held.clone(), self.name))
                result = (total + spoil).to(like.dtype)
                return held.copy_(result) if self.in_place else result

            return held, call

        return Reducer(self.name, take, self.in_place)


def run(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    *arguments: str,
    cost: Callable[[Any, int], float] = lambda call, seen: 5.0,
    spoil: float = 0.0,
) -> list[tuple[dict[str, Any], int]]:
    """The bench on virtual ranks, each a thread; each one's record and exit code."""
    monkeypatch.setenv("WORLD_SIZE", str(N))
    few = ("--blocks", "2", "--samples", "2", "--json", str(tmp_path / "ranks.json"))
    options = bench.parse([*arguments, *few])
    meetings, boards, offered = (ThreadRendezvous.world(N) for _ in range(3))
    comms = Communicator.local_world(N, "cpu", hidden=2560, max_tokens=32, top_k=10)
    reducers: dict[int, tuple[Reducer, ...]] = {}

    real = ranks.versions_of
    monkeypatch.setattr(ranks, "versions_of", lambda work, comm, _: real(work, comm, reducers[comm.rank]))

    def of_rank(rank: int) -> tuple[dict[str, Any], int]:
        reducers[rank] = (
            Board(rank, boards, "NCCL all_reduce", in_place=True).reducer(),
            Board(rank, offered, "torch one_shot_all_reduce", in_place=False).reducer(spoil),
        )
        group = world.World(rank, N, meet(meetings[rank]), FakeDevice(cost, idle=True))
        with torch.inference_mode(), bindings.backend("reference"):
            return ranks.bench(options, group, comms[rank], LINK)

    found = in_threads(N, of_rank)
    comms[0].close()
    for one in found:
        if isinstance(one, Exception):
            raise one
    return found


def by_name(record: dict[str, Any], op: str, rows: int = 1) -> dict[str, Any]:
    found = next(r for r in record["runs"] if (r["op"], r["rows"]) == (op, rows))
    return {v["name"]: v for v in found["versions"]}


def test_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (_, code), (second, _) = run(monkeypatch, tmp_path, "--rows", "1,3")
    written = json.loads((tmp_path / "ranks.json").read_text())
    assert written["kind"] == "ranks"
    assert (written["ranks"], written["link"]) == (N, LINK)
    assert [(r["op"], r["rows"], r["ranks"]) for r in written["runs"]] == [
        (op, rows, N) for op in (SUM, OP) for rows in (1, 3)
    ]
    assert not [v["error"] for r in written["runs"] for v in r["versions"] if v["error"]]
    assert code == 1, "equal times are 1.5 times as fast as nothing"
    own = {k: v for k, v in written.items() if k in ("runs", "acceptance")}
    assert own == {k: v for k, v in second.items() if k in own}, "every rank has the same record"
    assert list(by_name(written, SUM)) == [OURS, AGAIN, "NCCL all_reduce", "torch one_shot_all_reduce"]
    fused = by_name(written, OP)
    names = [f"{UNFUSED}{name}" for name in ("NCCL all_reduce", "torch one_shot_all_reduce")]
    assert list(fused) == [OURS, AGAIN, GATED, ADDCMUL, *names, FINALIZE, FLOOR]
    assert fused[FLOOR]["hot"]["median"] == pytest.approx(fused[FINALIZE]["hot"]["median"] + 0.7)
    assert fused[FLOOR]["cold"] is None
    hot = next(r for r in written["runs"] if r["op"] == OP)["by_rank"]["hot"]
    assert [len(medians) for medians in hot.values()] == [N] * (len(fused) - 1)


def test_a_wrong_all_reduce_is_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (record, _), _ = run(monkeypatch, tmp_path, "--rows", "1", spoil=math.pi)
    for op, name in ((SUM, ""), (OP, UNFUSED)):
        spoilt = by_name(record, op)[f"{name}torch one_shot_all_reduce"]
        assert spoilt["error"].startswith("rank 0: wrong result")
        assert spoilt["cold"] is None
        assert by_name(record, op)[f"{name}NCCL all_reduce"]["cold"]


@pytest.mark.parametrize(
    ("fused", "finalize", "nccl", "failed"),
    [
        (3.0, 1.7, 4.6, []),
        (3.0, 1.7, 4.4, [UNFUSED, UNFUSED]),
        (3.0, 1.5, 4.6, [FLOOR]),
    ],
)
def test_judgement(fused: float, finalize: float, nccl: float, failed: list[str]) -> None:
    def version(name: str, us: float, cold: bool = True) -> dict[str, object]:
        timing = {"median": us, "p10": us, "p90": us, "samples": [[us] * 3]}
        return {"name": name, "bytes": 1, "error": None, "cold": timing if cold else None, "hot": timing}

    versions = [
        version(OURS, fused),
        version(ADDCMUL, 0.1),  # with our own all-reduce: not what is asked about
        version(UNFUSED + "NCCL all_reduce", nccl),
        version(UNFUSED + "torch one_shot_all_reduce", 9.0),
        version(FLOOR, 0.7 + finalize, cold=False),
    ]
    judged = acceptance.judge_run(
        {"op": OP, "rows": 1, "error": None, "noise": {}, "versions": versions}, ranks.TARGETS
    )
    assert [j.metric for j in judged] == ["cold", "hot", "hot"]
    assert [j.against for j in judged if j.verdict == "FAIL" and j.against == FLOOR] == [
        name for name in failed if name == FLOOR
    ]
    assert sum(j.verdict == "FAIL" for j in judged) == len(failed)


@pytest.mark.parametrize(
    ("size", "arguments", "message"),
    [
        (1, ["--ops", SUM], "torchrun --nproc-per-node N"),
        (1, ["--ops", f"{SUM},{OP}"], "profiling.collective"),
        (2, ["--ops", "hc_gate"], "under torchrun the work is that of several ranks: --ops all_reduce,"),
        (3, [], "got 3 processes, allowed 2, 4, 8"),
        (2, [], "no CUDA device"),
    ],
)
def test_refusals(
    size: int,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(size))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_ranks_need_a_gpu_each(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    waited: list[float] = []
    monkeypatch.setattr(world.time, "sleep", waited.append)
    for local, said in ((0, "4 ranks need a GPU each, 1 here"), (3, "")):
        monkeypatch.setenv("LOCAL_RANK", str(local))
        assert bench.main([]) == 2
        err = capsys.readouterr().err
        assert said in err
        assert bool(err) == bool(said), "one process a host speaks"
        assert bool(waited) != bool(said), "and the others let it"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ops", f"{SUM},hc_gate"], "one kind a run"),
        (["--ops", SUM, "--rows", "33"], "got 33, allowed 1 to 32"),
        (["--ops", OP, "--counters"], "--counters"),
    ],
)
def test_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        bench.parse(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_torchrun_chooses_the_work_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert bench.parse([]).ops == world.RANKED
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert not bench.parse([]).ranked


@pytest.mark.parametrize(("rank", "speaks"), [(0, True), (1, False)])
def test_one_of_the_ranks_speaks(monkeypatch: pytest.MonkeyPatch, rank: int, speaks: bool) -> None:
    told: list[str] = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    for name in world.MULTICAST_OFF:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: told.append(f"device {device}"))
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda backend, timeout: told.append(backend)
    )
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: told.append("gone"))
    with world.joined() as first:
        assert first is speaks
        assert world.os.environ["NCCL_NVLS_ENABLE"] == "0"
    assert told == [f"device {rank}", "cpu:gloo,cuda:nccl", "gone"]
    monkeypatch.setenv("WORLD_SIZE", "1")
    with world.joined() as first:
        assert first


def test_samples_that_were_not_lined_up_are_none() -> None:
    def late() -> None:
        raise RuntimeError("another rank did not come")

    group = world.World(0, 1, lambda value, what: [value], FakeDevice(lambda call, seen: 1.0), check=late)
    with pytest.raises(RuntimeError, match="did not come"):
        group.slowest({"a": [[1.0]]})


@pytest.mark.parametrize(("seconds", "code"), [(0.05, 1), (30.0, 0)])
def test_what_hangs_is_ended(seconds: float, code: int) -> None:
    wait = f"import time\nfrom profiling import world\nwith world.bounded({seconds}, 'this'): time.sleep(0.5)"
    ran = subprocess.run([sys.executable, "-c", wait], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert ran.returncode == code
    assert ("profiling: this took more than 0 s; ended" in ran.stderr) == bool(code)


def test_silence(capsys: pytest.CaptureFixture[str]) -> None:
    for silent in (True, False):
        with world.quiet(silent):
            print(f"silent: {silent}")
    assert capsys.readouterr().out == "silent: False\n"
