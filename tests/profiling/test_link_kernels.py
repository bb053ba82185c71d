"""The kernels between GPUs, on two ranks of one emulated device: who waits for whom, and what is counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import emulator
from bindings import link, targets
from profiling import link_kernels
from profiling.link_kernels import BYTES, LINE, WARM_ROUNDS

pytestmark = pytest.mark.skipif(
    link.compiler() is None, reason="needs a C compiler, which the emulator is built with"
)
N, NEVER = 2, 10**13


class Ranks:
    """Two ranks, their words and their counts."""

    def __init__(self, device: emulator.Device, target: str, kind: str) -> None:
        cute = pytest.importorskip("cutlass.cute", reason="the compiler is not installed")
        entry, fake = link_kernels.build(target, kind=kind, world=N)
        self.kernel = cute.compile(entry, *fake, options=f"--enable-tvm-ffi --gpu-arch {target}")
        self.device = device
        self.buffers = [torch.zeros(BYTES, dtype=torch.uint8) for _ in range(N)]
        self.peers = torch.tensor([b.data_ptr() for b in self.buffers], dtype=torch.int64)
        self.states = [torch.zeros(2, dtype=torch.int32) for _ in range(N)]
        for rank in range(N):
            device.register(self.buffers[rank], f"words of rank {rank}")

    def run(self, call: Callable[[int], None], ranks: range = range(N)) -> None:
        with self.device.together():
            for rank in ranks:
                with self.device.stream(rank):
                    call(rank)

    def word(self, rank: int, place: int) -> int:
        return int(self.buffers[rank].view(torch.int32)[place * LINE // 4])


@pytest.mark.parametrize("target", targets.TARGETS)
def test_ranks_line_up_again_and_again(target: str) -> None:
    with emulator.device(target, resident=8) as device:
        ranks = Ranks(device, target, "line up")

        def call(rank: int, timeout: int = NEVER) -> None:
            ranks.kernel(ranks.peers, ranks.states[rank], rank, 100, timeout)

        for times in (1, 2, 3):
            ranks.run(call)
            assert [state.tolist() for state in ranks.states] == [[times, 0]] * N
            assert ranks.word(0, 1) == times, "rank 1 has arrived"
            assert ranks.word(1, N) == times, "rank 1 was told to go"


@pytest.mark.parametrize("alone", range(N))
def test_a_rank_that_does_not_come_is_noticed(alone: int) -> None:
    with emulator.device("sm_90a", resident=8) as device:
        ranks = Ranks(device, "sm_90a", "line up")

        def call(rank: int) -> None:
            ranks.kernel(ranks.peers, ranks.states[rank], rank, 100, 1000)

        ranks.run(call, range(alone, alone + 1))
        assert ranks.states[alone].tolist() == [1, 1]


@pytest.mark.parametrize("target", targets.TARGETS)
def test_ping_pong_counts_its_rounds(target: str) -> None:
    with emulator.device(target, resident=8) as device:
        ranks = Ranks(device, target, "ping-pong")
        taken: list[Any] = [torch.zeros(2, dtype=torch.int64) for _ in range(N)]

        def call(rank: int) -> None:
            ranks.kernel(ranks.peers, ranks.states[rank], taken[rank], rank, 1 - rank, 8, NEVER)

        for times in (1, 2):
            ranks.run(call)
            count = times * (WARM_ROUNDS + 8)
            assert [state.tolist() for state in ranks.states] == [[count, 0]] * N
            assert [ranks.word(rank, N + 1) for rank in range(N)] == [count] * N
            assert all(int(t[0]) > 0 and int(t[1]) > 0 for t in taken)


@pytest.mark.parametrize(("kind", "world"), [("barrier", 2), ("line up", 1), ("line up", 33)])
def test_what_cannot_be_built(kind: str, world: int) -> None:
    pytest.importorskip("cutlass.cute", reason="the compiler is not installed")
    with pytest.raises(ValueError, match="kind, world: got"):
        link_kernels.build("sm_90a", kind=kind, world=world)
