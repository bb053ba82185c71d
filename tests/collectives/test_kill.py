"""A rank is killed: the others' waits expire and name it, calls are refused, and after a reset with a
restarted process rounds are good again. Nothing stays behind."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from collectives.transports import shm
from tests.collectives.conftest import alone_on_the_gpu, free_device_memory
from tests.collectives.spawner import Ranks
from tests.collectives.worker import TIMEOUT_S

N = 4
SHARED = [pytest.param("cuda:0", marks=pytest.mark.gpu)]
APART = [pytest.param("cuda", id="cuda-apart", marks=pytest.mark.multi_gpu)]  # a GPU a rank
DEVICES = [pytest.param("cpu", marks=pytest.mark.cpu), *SHARED, *APART]


@contextmanager
def started(device: str) -> Iterator[Ranks]:
    n = N if device != "cuda" or torch.cuda.device_count() >= N else 2
    with Ranks(n, device) as world:
        world.start(*range(n))
        yield world


@pytest.fixture(params=DEVICES)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with started(request.param) as world:
        yield world


def good(answers: dict[int, dict[str, Any]], n: int) -> None:
    assert {rank: answer.get("good") for rank, answer in answers.items()} == dict.fromkeys(answers, n)


def expect_timeouts(ranks: Ranks, epoch: int, by: str = "all_reduce") -> None:
    bound = TIMEOUT_S[ranks.device.split(":")[0]]
    for rank, answer in ranks.all("expect_timeout", but=(ranks.victim,), by=by).items():
        assert (answer["rank"], answer["missing"], answer["epoch"]) == (rank, [ranks.victim], epoch)
        assert bound * 0.9 < answer["took"] < bound + 8
        assert len(answer["poisoned"]) == 2
        assert all(
            f"rank {ranks.victim} did not arrive in round {epoch}; reset() " in text
            for text in answer["poisoned"]
        )


def restart(ranks: Ranks) -> None:
    """A new process for the victim meets the survivors."""
    for rank in ranks.survivors:
        ranks.of[rank].send("reset")
    ranks.start(ranks.victim)
    ranks.of[ranks.victim].send("join")
    assert [ranks.of[rank].answer() for rank in range(ranks.world_size)] == [{}] * ranks.world_size


def names() -> list[str]:
    return [path.name for path in shm.DIRECTORY.glob(f"flashnext-{os.geteuid()}-*")]


def leave(ranks: Ranks) -> None:
    assert ranks.all("close") == {rank: {} for rank in ranks.of}
    pids = [str(one.process.pid) for one in ranks._ever]
    assert not [name for name in names() if name.split("-")[2] in pids]
    assert [ranks.of[rank].leave() for rank in range(ranks.world_size)] == [0] * ranks.world_size


def test_killed_before_its_push(ranks: Ranks) -> None:
    transport = "shm" if ranks.device == "cpu" else "cuda_ipc"
    assert all(f"transport {transport}" in answer["explain"] for answer in ranks.all("start").values())
    good(ranks.all("rounds", n=6, first=0), 6)
    ranks.of[ranks.victim].kill()
    # Rows have rounds of their own: six calls of 1 to 4 rows were the first row's rounds 0 to 5.
    expect_timeouts(ranks, epoch=6)
    restart(ranks)
    good(ranks.all("rounds", n=100, first=7), 100)
    leave(ranks)


def test_killed_after_its_push(ranks: Ranks) -> None:
    """Its last vector is whole in the others' slots: they finish that round, and miss it in the next."""
    ranks.all("start")
    good(ranks.all("rounds", n=2, first=0), 2)
    ranks.of[ranks.victim].send("stall_after_push")
    assert ranks.of[ranks.victim].answer() == dict(pushed=True)
    ranks.of[ranks.victim].kill()
    good(ranks.all("sum_of_stalled", but=(ranks.victim,)), True)
    expect_timeouts(ranks, epoch=3)
    restart(ranks)
    good(ranks.all("rounds", n=100, first=0), 100)
    leave(ranks)


def test_killed_in_the_fused_path_and_again_after_the_restart(ranks: Ranks) -> None:
    ranks.all("start")
    good(ranks.all("rounds", n=2, first=0), 2)
    ranks.of[ranks.victim].kill()
    expect_timeouts(ranks, epoch=1, by="fused")  # of the two calls one was fused too
    restart(ranks)
    good(ranks.all("rounds", n=5, first=0), 5)
    ranks.of[ranks.victim].kill()
    expect_timeouts(ranks, epoch=5)
    restart(ranks)
    good(ranks.all("rounds", n=100, first=0), 100)
    leave(ranks)


def test_a_restart_that_does_not_come_is_named_and_may_come_later(ranks: Ranks) -> None:
    ranks.all("start")
    ranks.of[ranks.victim].kill()
    expect_timeouts(ranks, epoch=0)
    for answer in ranks.all("reset", but=(ranks.victim,), meeting_s=4).values():
        assert (answer["error"], answer["missing"]) == ("RendezvousTimeout", [ranks.victim])
    # still poisoned, and still bounded
    for answer in ranks.all("reset", but=(ranks.victim,), meeting_s=0.2).values():
        assert ranks.victim in answer["missing"]
    restart(ranks)
    good(ranks.all("rounds", n=10, first=0), 10)
    leave(ranks)


@pytest.mark.parametrize("ranks", SHARED + APART, indirect=True)
def test_a_captured_graph_ends_too_and_serves_again_after_the_reset(ranks: Ranks) -> None:
    ranks.all("start")
    good(ranks.all("capture"), 1)
    good(ranks.all("replay", n=5), 5)
    ranks.of[ranks.victim].kill()
    expect_timeouts(ranks, epoch=12, by="replay")
    restart(ranks)
    ranks.of[ranks.victim].send("capture")
    good(ranks.all("replay", but=(ranks.victim,), n=1), 1)
    assert ranks.of[ranks.victim].answer() == dict(good=1)
    good(ranks.all("replay", n=100), 100)
    leave(ranks)


@pytest.mark.cpu
def test_killed_while_memory_is_mapped() -> None:
    """The dead process's name stays in /dev/shm; the one that takes its place removes it."""
    with started("cpu") as ranks:
        for rank in range(ranks.world_size):
            ranks.of[rank].send("join", meeting_s=5, die_in="map" if rank == ranks.victim else "")
        for rank in ranks.survivors:
            answer = ranks.of[rank].answer()
            assert (answer["error"], answer["missing"]) == ("RendezvousTimeout", [ranks.victim])
        assert ranks.of[ranks.victim].process.wait(10) == -9
        victim = str(ranks.of[ranks.victim].process.pid)
        left = [name for name in names() if name.split("-")[2] == victim]
        assert len(left) < 2  # another process of this user may have removed it by now
        ranks.start(ranks.victim)
        assert ranks.all("join") == {rank: {} for rank in range(ranks.world_size)}
        assert not [name for name in names() if name.split("-")[2] == victim]
        good(ranks.all("rounds", n=5, first=0), 5)
        leave(ranks)


def test_resets_leak_neither_descriptors_nor_memory(ranks: Ranks) -> None:
    if ranks.device != "cpu":
        alone_on_the_gpu()
    ranks.all("start")
    ranks.all("reset")
    good(ranks.all("rounds", n=2, first=0), 2)
    before = ranks.all("descriptors")
    for _ in range(3):
        assert ranks.all("reset") == {rank: {} for rank in range(ranks.world_size)}
        good(ranks.all("rounds", n=2, first=0), 2)
    assert ranks.all("descriptors") == before
    leave(ranks)


@pytest.mark.gpu
def test_a_killed_process_leaves_no_device_memory() -> None:
    before = free_device_memory()
    with started("cuda:0") as ranks:
        ranks.all("start")
        good(ranks.all("rounds", n=1, first=0), 1)
        ranks.of[ranks.victim].kill()
        restart(ranks)
        good(ranks.all("rounds", n=1, first=0), 1)
        leave(ranks)
    deadline = time.monotonic() + 10
    while (free := free_device_memory()) != before:
        assert time.monotonic() < deadline, (before, free)
        time.sleep(0.1)
