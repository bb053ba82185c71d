"""Captured on every rank: replays, eager calls between them, other streams, a rank that does not replay."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from collectives.communicator import Communicator
from collectives.decode_moe import DecodeMoE, DecodeMoEConfig
from collectives.errors import CollectiveError, CollectiveTimeout, CommunicatorPoisoned
from collectives.launch import Form
from tests.collectives.virtual import HIDDEN, World, draw, finalized, moe_inputs, rank_sum, same_bits, world

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
REPLAYS, EAGER_EVERY, VARIANTS = 1000, 50, 16


def capture(w: World, of_rank) -> tuple[list[torch.cuda.CUDAGraph], list[Tensor]]:  # type: ignore[no-untyped-def]
    """A graph a rank, each captured on its rank's stream, and what the captured calls returned."""
    graphs, results = [], []
    for comm in w.ranks:
        graph = torch.cuda.CUDAGraph()
        w.synchronize()
        with torch.cuda.graph(graph, stream=w.streams[comm.rank]):
            results.append(of_rank(comm))
        graphs.append(graph)
    w.synchronize()
    return graphs, results


def test_a_thousand_replays_with_changed_inputs_and_eager_calls_between() -> None:
    w, random = world(4, DEVICE), torch.Generator().manual_seed(1)
    variants = [[moe_inputs(2, Form(), random) for _ in range(4)] for _ in range(VARIANTS)]
    there = [w.put(one) for one in variants]
    wants = [finalized(one).to(DEVICE) for one in variants]
    inputs = [[t.clone() for t in there[0][rank]] for rank in range(4)]
    eager = w.put([draw("normal", (3, HIDDEN), random) for _ in range(4)])
    eager_want = rank_sum([t.cpu() for t in eager]).to(DEVICE)
    w.run(lambda comm: comm.moe_finalize_all_reduce(*inputs[comm.rank]))
    graphs, outs = capture(w, lambda comm: comm.moe_finalize_all_reduce(*inputs[comm.rank]))
    # whatever the loop uses is loaded now: a lazy load would wait for ranks that wait for this thread
    (eager[0] != eager_want).sum().add_((outs[0] != wants[0]).sum())
    others = [torch.cuda.Stream(DEVICE) for _ in range(4)]
    wrong = [torch.zeros((), dtype=torch.int64, device=DEVICE) for _ in range(4)]
    w.synchronize()
    for turn in range(REPLAYS):
        variant = turn % VARIANTS
        streams = (
            others if (turn // 100) % 2 else w.streams
        )  # a hundred on the capture's, a hundred on others
        if turn % 100 == 0:
            w.synchronize()  # rounds of one rank must follow one another
        for rank, comm in enumerate(w.ranks):
            with torch.cuda.stream(streams[rank]):
                for mine, new in zip(inputs[rank], there[variant][rank], strict=True):
                    mine.copy_(new)
                graphs[rank].replay()
                wrong[rank] += (outs[rank] != wants[variant]).sum()
                if turn % EAGER_EVERY == 0:
                    wrong[rank] += (
                        comm.moe_finalize_all_reduce(*there[variant][rank]) != wants[variant]
                    ).sum()
                    wrong[rank] += (comm.all_reduce(eager[rank]) != eager_want).sum()
    w.synchronize()
    for comm in w.ranks:
        comm.check()
    assert [int(count) for count in wrong] == [0] * 4
    assert w.full_words() == 0


def test_a_graph_without_its_peers_ends_in_an_error_and_serves_again_after_a_reset() -> None:
    """Twenty rounds in a graph: the first waits its time out, the others leave at once."""
    w, random = World(2, DEVICE, timeout_s=0.3, forms=()), torch.Generator().manual_seed(2)
    try:
        x = w.put([draw("normal", (1, HIDDEN), random) for _ in range(2)])
        outs = [[torch.empty_like(x[0]) for _ in range(20)] for _ in range(2)]

        def twenty(comm: Communicator) -> None:
            for out in outs[comm.rank]:
                comm.all_reduce(x[comm.rank], out=out)

        w.run(lambda comm: comm.all_reduce(x[comm.rank]))
        graphs, _ = capture(w, twenty)
        start = time.perf_counter()
        for _ in range(3):
            with torch.cuda.stream(w.streams[0]):
                graphs[0].replay()
        w.synchronize()
        assert 0.25 < time.perf_counter() - start < 0.6
        with pytest.raises(CollectiveTimeout) as caught:
            w.ranks[0].check()
        assert (caught.value.missing, caught.value.epoch) == ([1], 1)
        with pytest.raises(CommunicatorPoisoned):
            w.ranks[0].all_reduce(x[0])
        w.ranks[0].reset()
        for _ in range(5):
            w.synchronize()
            for rank in range(2):
                with torch.cuda.stream(w.streams[rank]):
                    graphs[rank].replay()
        w.synchronize()
        for rank, comm in enumerate(w.ranks):
            comm.check()
            want = rank_sum([t.cpu() for t in x])
            assert all(same_bits(out.cpu(), want) for out in outs[rank])
    finally:
        w.ranks[0].close()


def test_a_first_use_inside_a_capture_is_refused() -> None:
    w = World(2, DEVICE, forms=())
    try:
        inputs = w.put(moe_inputs(1, Form(), torch.Generator().manual_seed(3)))
        stream, graph = torch.cuda.Stream(DEVICE), torch.cuda.CUDAGraph()
        with pytest.raises(CollectiveError, match=r"first use of Form.* inside a CUDA-graph capture"):  # noqa: SIM117
            with torch.cuda.graph(graph, stream=stream):
                w.ranks[0].moe_finalize_all_reduce(*inputs)
    finally:
        w.ranks[0].close()


def test_decode_moe_on_two_streams_is_captured_and_has_the_general_paths_bits() -> None:
    w, random = world(4, DEVICE), torch.Generator().manual_seed(4)
    inputs = w.put([moe_inputs(1, Form(), random) for _ in range(4)])
    x = w.put([draw("normal", (1, HIDDEN), random)])[0]
    gate_weight = w.put([draw("normal", (HIDDEN,), random)])[0]
    fused = [DecodeMoE(comm, DecodeMoEConfig(), gate_weight=gate_weight) for comm in w.ranks]
    general = [DecodeMoE(comm, DecodeMoEConfig(lora=True), gate_weight=gate_weight) for comm in w.ranks]
    assert [m.takes(x) for m in fused] == ["fused"] * 4
    assert [m.takes(x) for m in general] == ["lora is off: got True"] * 4

    def call(moes: list[DecodeMoE]):  # type: ignore[no-untyped-def]
        def of_rank(comm: Communicator) -> Tensor:
            mine = inputs[comm.rank]
            # each branch allocates and computes, so that an order between the streams that is missing shows
            return moes[comm.rank](
                x, routed=lambda _: (mine[0] * 1, mine[1], mine[2]), shared=lambda _: mine[3] * 1
            )

        return of_rank

    want = w.run(call(general))[0]
    assert all(same_bits(result, want) for result in w.run(call(fused)))
    graphs, outs = capture(w, call(fused))
    for _ in range(50):
        for rank in range(4):
            outs[rank].zero_()
        w.synchronize()
        for rank in range(4):
            with torch.cuda.stream(w.streams[rank]):
                graphs[rank].replay()
        w.synchronize()
        assert all(same_bits(out.cpu(), want) for out in outs)
    for comm in w.ranks:
        comm.check()
