"""The chain of tests/ops/chain.py: launched back to back, captured or not, against itself run with a wait
after every launch. More than 10,000 producers and consumers each, while the data changes."""

from __future__ import annotations

import pytest
import torch

from tests.harness import Backend
from tests.ops.chain import LAUNCHES, Chain

STRETCH = 50
"""Iterations between comparisons; even, so that two alternating sets end where as many sets as iterations
do."""

STRETCHES = 26

assert STRETCH * STRETCHES * LAUNCHES > 10_000

sets = pytest.mark.parametrize("sets", [STRETCH, 2], ids=["fresh-buffers", "two-buffers"])
T = pytest.mark.parametrize("T", [1, 4])


def synchronised(chain: Chain, backend: Backend) -> None:
    chain.run(STRETCH, backend.name, after=torch.cuda.synchronize)
    torch.cuda.synchronize()


@T
def test_buffers_may_be_reused(T: int, backend: Backend) -> None:
    """A few iterations with two sets of buffers give what they give when all results are kept."""
    few, fresh, reused = 4, Chain(T, 4, backend.device), Chain(T, 2, backend.device)
    before = fresh.results["normed"].clone()
    for stretch in range(2):
        fresh.run(few, backend.name)
        reused.run(few, backend.name)
        reused.assert_equal(fresh, f"stretch {stretch}")
        assert all(x.isfinite().all() for x in fresh.results.values())
        assert (fresh.results["normed"] != before).float().mean() > 0.5, "the data does not change"
        before = fresh.results["normed"].clone()


@pytest.mark.gpu
@T
@sets
def test_eager(T: int, sets: int, gpu_backend: Backend) -> None:
    """Launches queue up behind a kernel that only waits, so that they then run back to back."""
    chain = Chain(T, sets, gpu_backend.device)
    expected = Chain(T, STRETCH, gpu_backend.device)
    for stretch in range(STRETCHES):
        torch.cuda._sleep(20_000_000)
        chain.run(STRETCH, gpu_backend.name)
        synchronised(expected, gpu_backend)
        chain.assert_equal(expected, f"stretch {stretch}")


@pytest.mark.gpu
@T
@sets
def test_captured(T: int, sets: int, gpu_backend: Backend) -> None:
    """A stretch in one graph, with the change of its inputs at the end, replayed."""
    chain = Chain(T, sets, gpu_backend.device)
    expected = Chain(T, STRETCH, gpu_backend.device)
    chain.run(STRETCH, gpu_backend.name)  # warms up, and is the first stretch
    synchronised(expected, gpu_backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain.run(STRETCH, gpu_backend.name)
    for stretch in range(1, STRETCHES):
        graph.replay()
        synchronised(expected, gpu_backend)
        chain.assert_equal(expected, f"replay {stretch}")


@pytest.mark.gpu
def test_replays_back_to_back(gpu_backend: Backend) -> None:
    """Replays queued without a wait between them: a graph's first kernels follow the last ones of the replay
    before."""
    chain, expected = (Chain(1, 2, gpu_backend.device) for _ in range(2))
    for each in (chain, expected):
        each.run(STRETCH, gpu_backend.name)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain.run(STRETCH, gpu_backend.name)
    for _ in range(STRETCHES):
        graph.replay()
    for _ in range(STRETCHES):
        synchronised(expected, gpu_backend)
    torch.cuda.synchronize()
    chain.assert_equal(expected, "replays")


@pytest.mark.gpu
def test_two_streams(gpu_backend: Backend) -> None:
    """Two chains at once, each on a stream of its own: kernels share nothing between calls."""
    chains = [Chain(T, STRETCH, gpu_backend.device, seed=1) for T in (1, 4)]
    expected = [Chain(T, STRETCH, gpu_backend.device, seed=1) for T in (1, 4)]
    streams = [torch.cuda.Stream(gpu_backend.device) for _ in chains]
    torch.cuda.synchronize()
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)
        for chain, stream in zip(chains, streams, strict=True):
            with torch.cuda.stream(stream):
                chain.run(STRETCH, gpu_backend.name)
        torch.cuda.synchronize()
        for chain, alone in zip(chains, expected, strict=True):
            synchronised(alone, gpu_backend)
            chain.assert_equal(alone, f"T = {chain.T}")


@pytest.mark.gpu
@pytest.mark.sanitizer
def test_chain_under_a_sanitizer(gpu_backend: Backend) -> None:
    """Few iterations, so that a sanitizer is done in time: every kernel with the others' results as its
    inputs."""
    chain, expected = Chain(1, 2, gpu_backend.device), Chain(1, 2, gpu_backend.device)
    chain.run(2, gpu_backend.name)
    expected.run(2, gpu_backend.name, after=torch.cuda.synchronize)
    chain.assert_equal(expected, "two iterations")
