"""A rank is killed: the others' waits expire and name it, calls are refused, and after a reset with a
restarted process rounds are good again. Nothing stays behind."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from collectives.transports import shm
from tests.collectives.spawner import Ranks
from tests.collectives.worker import TIMEOUT_S

N, VICTIM = 4, 2
SURVIVORS = [rank for rank in range(N) if rank != VICTIM]

DEVICES = [pytest.param("cpu", marks=pytest.mark.cpu), pytest.param("cuda:0", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(N, request.param) as world:
        world.start(*range(N))
        yield world


def good(answers: dict[int, dict[str, Any]], n: int) -> None:
    assert {rank: answer.get("good") for rank, answer in answers.items()} == dict.fromkeys(answers, n)


def expect_timeouts(ranks: Ranks, epoch: int, by: str = "all_reduce") -> None:
    bound = TIMEOUT_S[ranks.device]
    for rank, answer in ranks.all("expect_timeout", but=(VICTIM,), by=by).items():
        assert (answer["rank"], answer["missing"], answer["epoch"]) == (rank, [VICTIM], epoch)
        assert bound * 0.9 < answer["took"] < bound + 8
        assert len(answer["poisoned"]) == 2
        assert all(
            f"rank {VICTIM} did not arrive in round {epoch}; reset() " in text for text in answer["poisoned"]
        )


def restart(ranks: Ranks) -> None:
    """A new process for the victim meets the survivors."""
    for rank in SURVIVORS:
        ranks.of[rank].send("reset")
    ranks.start(VICTIM)
    ranks.of[VICTIM].send("join")
    assert [ranks.of[rank].answer() for rank in range(N)] == [{}] * N


def names() -> list[str]:
    return [path.name for path in shm.DIRECTORY.glob(f"flashnext-{os.geteuid()}-*")]


def leave(ranks: Ranks) -> None:
    assert ranks.all("close") == {rank: {} for rank in ranks.of}
    pids = [str(one.process.pid) for one in ranks._ever]
    assert not [name for name in names() if name.split("-")[2] in pids]
    assert [ranks.of[rank].leave() for rank in range(N)] == [0] * N


def test_killed_before_its_push(ranks: Ranks) -> None:
    transport = "shm" if ranks.device == "cpu" else "cuda_ipc"
    assert all(f"transport {transport}" in answer["explain"] for answer in ranks.all("start").values())
    good(ranks.all("rounds", n=6, first=0), 6)
    ranks.of[VICTIM].kill()
    # Rows have rounds of their own: six calls of 1 to 4 rows were the first row's rounds 0 to 5.
    expect_timeouts(ranks, epoch=6)
    restart(ranks)
    good(ranks.all("rounds", n=100, first=7), 100)
    leave(ranks)


def test_killed_after_its_push(ranks: Ranks) -> None:
    """Its last vector is whole in the others' slots: they finish that round, and miss it in the next."""
    ranks.all("start")
    good(ranks.all("rounds", n=2, first=0), 2)
    ranks.of[VICTIM].send("stall_after_push")
    assert ranks.of[VICTIM].answer() == dict(pushed=True)
    ranks.of[VICTIM].kill()
    good(ranks.all("sum_of_stalled", but=(VICTIM,)), True)
    expect_timeouts(ranks, epoch=3)
    restart(ranks)
    good(ranks.all("rounds", n=100, first=0), 100)
    leave(ranks)


def test_killed_in_the_fused_path_and_again_after_the_restart(ranks: Ranks) -> None:
    ranks.all("start")
    good(ranks.all("rounds", n=2, first=0), 2)
    ranks.of[VICTIM].kill()
    expect_timeouts(ranks, epoch=1, by="fused")  # of the two calls one was fused too
    restart(ranks)
    good(ranks.all("rounds", n=5, first=0), 5)
    ranks.of[VICTIM].kill()
    expect_timeouts(ranks, epoch=5)
    restart(ranks)
    good(ranks.all("rounds", n=100, first=0), 100)
    leave(ranks)


def test_a_restart_that_does_not_come_is_named_and_may_come_later(ranks: Ranks) -> None:
    ranks.all("start")
    ranks.of[VICTIM].kill()
    expect_timeouts(ranks, epoch=0)
    for answer in ranks.all("reset", but=(VICTIM,), meeting_s=4).values():
        assert (answer["error"], answer["missing"]) == ("RendezvousTimeout", [VICTIM])
    # still poisoned, and still bounded
    for answer in ranks.all("reset", but=(VICTIM,), meeting_s=0.2).values():
        assert VICTIM in answer["missing"]
    restart(ranks)
    good(ranks.all("rounds", n=10, first=0), 10)
    leave(ranks)


@pytest.mark.gpu
def test_a_captured_graph_ends_too_and_serves_again_after_the_reset() -> None:
    with Ranks(N, "cuda:0") as ranks:
        ranks.start(*range(N))
        ranks.all("start")
        good(ranks.all("capture"), 1)
        good(ranks.all("replay", n=5), 5)
        ranks.of[VICTIM].kill()
        expect_timeouts(ranks, epoch=12, by="replay")
        restart(ranks)
        ranks.of[VICTIM].send("capture")
        good(ranks.all("replay", but=(VICTIM,), n=1), 1)
        assert ranks.of[VICTIM].answer() == dict(good=1)
        good(ranks.all("replay", n=100), 100)
        leave(ranks)


@pytest.mark.cpu
def test_killed_while_memory_is_mapped() -> None:
    """The dead process's name stays in /dev/shm; the one that takes its place removes it."""
    with Ranks(N, "cpu") as ranks:
        ranks.start(*range(N))
        for rank in range(N):
            ranks.of[rank].send("join", meeting_s=5, die_in="map" if rank == VICTIM else "")
        for rank in SURVIVORS:
            answer = ranks.of[rank].answer()
            assert (answer["error"], answer["missing"]) == ("RendezvousTimeout", [VICTIM])
        assert ranks.of[VICTIM].process.wait(10) == -9
        victim = str(ranks.of[VICTIM].process.pid)
        assert [name.split("-")[2] for name in names() if name.split("-")[2] == victim] == [victim]
        ranks.start(VICTIM)
        assert ranks.all("join") == {rank: {} for rank in range(N)}
        assert not [name for name in names() if name.split("-")[2] == victim]
        good(ranks.all("rounds", n=5, first=0), 5)
        leave(ranks)


def test_resets_leak_neither_descriptors_nor_memory(ranks: Ranks) -> None:
    ranks.all("start")
    ranks.all("reset")
    good(ranks.all("rounds", n=2, first=0), 2)
    before = ranks.all("descriptors")
    for _ in range(3):
        assert ranks.all("reset") == {rank: {} for rank in range(N)}
        good(ranks.all("rounds", n=2, first=0), 2)
    assert ranks.all("descriptors") == before
    leave(ranks)


@pytest.mark.gpu
def test_a_killed_process_leaves_no_device_memory() -> None:
    before = torch.cuda.mem_get_info()[0]
    with Ranks(N, "cuda:0") as ranks:
        ranks.start(*range(N))
        ranks.all("start")
        good(ranks.all("rounds", n=1, first=0), 1)
        ranks.of[VICTIM].kill()
        restart(ranks)
        good(ranks.all("rounds", n=1, first=0), 1)
        leave(ranks)
    deadline = time.monotonic() + 10
    while torch.cuda.mem_get_info()[0] != before:
        assert time.monotonic() < deadline, (before, torch.cuda.mem_get_info()[0])
        time.sleep(0.1)
