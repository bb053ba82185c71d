"""Ranks that arrive at different times, round after round, every result checked on the device."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from collectives.launch import Form
from tests.collectives.virtual import HIDDEN, World, draw, finalized, moe_inputs, rank_sum, world

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
ROUNDS_A_GRAPH = 50
CYCLES_A_US = 1900  # of the SM clock, roughly: delays need not be exact


def graphs_of(
    w: World, seed: int, max_delay_us: float
) -> tuple[list[torch.cuda.CUDAGraph], list[Tensor], Any]:
    """A graph a rank of ROUNDS_A_GRAPH rounds, plain and fused in turn, of 1 to 3 rows, each behind a delay
    of its own; and a count of wrong elements a rank, which a replay adds to."""
    draws, delays = torch.Generator().manual_seed(seed), random.Random(seed)
    rounds = []
    for turn in range(ROUNDS_A_GRAPH):
        rows, plain = 1 + turn % 3, turn % 2 == 0
        if plain:
            given = [draw("halves", (rows, HIDDEN), draws) for _ in range(w.n)]
            rounds.append((plain, w.put(given), rank_sum(given).to(DEVICE)))
        else:
            inputs = [moe_inputs(rows, Form(), draws) for _ in range(w.n)]
            rounds.append((plain, w.put(inputs), finalized(inputs).to(DEVICE)))
    graphs = []
    wrong = [torch.zeros((), dtype=torch.int64, device=DEVICE) for _ in range(w.n)]
    wants = torch.cat([want for _, _, want in rounds])
    w.synchronize()
    for comm in w.ranks:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=w.streams[comm.rank]):
            outs = []
            for plain, inputs, _ in rounds:
                torch.cuda._sleep(int(delays.uniform(0, max_delay_us) * CYCLES_A_US))
                mine = inputs[comm.rank]
                outs.append(comm.all_reduce(mine) if plain else comm.moe_finalize_all_reduce(*mine))
            wrong[comm.rank] += (torch.cat(outs) != wants).sum()
        graphs.append(graph)
    w.synchronize()
    return graphs, wrong, (rounds, wants)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("n", "rounds", "max_delay_us"), [(4, 100_000, 20), (2, 10_000, 20), (8, 10_000, 20)]
)
def test_delays_of_microseconds(n: int, rounds: int, max_delay_us: float) -> None:
    w = world(n, DEVICE)
    sets = [graphs_of(w, seed, max_delay_us) for seed in range(2)]  # other values and delays in each
    w.start_rounds_at(2**32 - rounds // 4)  # the counters of each channel's rows pass 2^32 on the way
    for turn in range(rounds // ROUNDS_A_GRAPH):
        graphs = sets[turn % 2][0]
        for rank in range(n):
            with torch.cuda.stream(w.streams[rank]):
                graphs[rank].replay()
        if turn % 50 == 49:
            w.synchronize()
            for comm in w.ranks:
                comm.check()
    w.synchronize()
    for comm in w.ranks:
        comm.check()
    assert [[int(count) for count in wrong] for _, wrong, _ in sets] == [[0] * n] * 2
    expected = (2**32 - rounds // 4 + rounds // 2) % 2**32  # row 0 is in every round, of which half are plain
    assert w.rounds(0, "plain")[0] == w.rounds(n - 1, "moe")[0] == expected
    assert w.full_words() == 0


@pytest.mark.timeout(120)
def test_delays_of_milliseconds() -> None:
    """500 rounds with delays up to 5 ms."""
    w = world(4, DEVICE)
    graphs, wrong, _kept = graphs_of(w, 7, 5000)
    for _ in range(500 // ROUNDS_A_GRAPH):
        for rank in range(4):
            with torch.cuda.stream(w.streams[rank]):
                graphs[rank].replay()
    w.synchronize()
    for comm in w.ranks:
        comm.check()
    assert [int(count) for count in wrong] == [0] * 4
