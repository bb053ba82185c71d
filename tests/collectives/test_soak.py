"""Many rounds between processes that have a GPU each."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from bindings import ops
from collectives.launch import Form
from tests.collectives.processes import FP32, GPUS, HIDDEN, TOP_K, World, rank_sum
from tests.draw import Draw, finalize

ranked = pytest.mark.torchrun


@ranked
@pytest.mark.timeout(240)
@pytest.mark.parametrize("world", GPUS[1:], indirect=True)
def test_a_hundred_thousand_rounds(world: World) -> None:
    """Graphs of rounds of both operators, each behind a delay of up to 20 us, whose counters pass 2^32 on the
    way; results are compared on the GPU."""
    rounds, a_graph = 100_000, 50
    skew = random.Random(world.rank)
    with world.open("soak", forms=(Form(),)) as comm:
        kinds = []
        for i in range(8):
            inputs = [
                finalize(Draw(f"soak {i} {r}"), 1 + i % 3, H=HIDDEN, K=TOP_K, weight_dtype=FP32)
                for r in range(world.size)
            ]
            placed = [{name: world.put(value) for name, value in one.items()} for one in inputs]
            total = rank_sum([ops.moe_finalize(**one) for one in placed])
            kinds.append((placed[world.rank], total, rank_sum([total] * world.size)))
        for channel in comm.engine.channels.values():  # type: ignore[attr-defined]
            channel.rounds.fill_(-rounds // 4)  # of uint32
        graphs, outs = [], []
        for _ in range(2):
            graph, held = torch.cuda.CUDAGraph(), []
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                for n in range(a_graph // 2):
                    own, total, of_totals = kinds[n % len(kinds)]
                    torch.cuda._sleep(skew.randrange(40_000))  # up to 20 us
                    fused = comm.moe_finalize_all_reduce(**own)
                    torch.cuda._sleep(skew.randrange(40_000))
                    held += [(fused, total), (comm.all_reduce(fused), of_totals)]
                found = torch.cat([one.view(-1) for one, _ in held])
            graphs.append((graph, found))
            outs.append((held, torch.cat([want.view(-1) for _, want in held])))
        wrong = torch.zeros((), dtype=torch.int64, device=world.device)
        dist.barrier()
        for turn in range(rounds // a_graph):
            graph, found = graphs[turn % 2]
            found.zero_()
            graph.replay()
            wrong += (found.view(torch.int16) != outs[turn % 2][1].view(torch.int16)).sum()
            if turn % 50 == 49:
                world.settle(comm)
        world.settle(comm)
        assert wrong.item() == 0
        counts = comm.engine.channels["moe"].rounds.flatten()  # type: ignore[attr-defined]
        assert int(counts[0]) == rounds // 2 - rounds // 4
