"""What the tests of the collectives share: worlds of threads, and the choice between pytest and torchrun.

Tests marked `torchrun` run inside every process of `torchrun ... -m pytest`, in step; all others run under
plain pytest only.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from collectives.heap import SymmetricHeap
from collectives.rendezvous import ThreadRendezvous
from collectives.transports.base import Transport
from tests.collectives.processes import CPU, GPUS, World

HERE = Path(__file__).parent
UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): a limit, where pytest-timeout is installed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    out = [item for item in ours if (item.get_closest_marker("torchrun") is not None) != UNDER_TORCHRUN]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in set(out)]


def alone_on_the_gpu() -> None:
    """For tests that compare free bytes exactly: skips beside the other workers of pytest-xdist, whose
    allocations are on the same GPU."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("counts the free bytes of a GPU that other workers use: runs without -n")


def free_device_memory() -> int:
    """Bytes free on the current GPU once its work is done, `alone_on_the_gpu`."""
    alone_on_the_gpu()
    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info()[0])


def in_threads(n: int, of_rank: Callable[[int], Any]) -> list[Any]:
    """What `of_rank` returns, or the exception that it raises, for each rank; each in a thread of its own."""
    results: list[Any] = [None] * n

    def run(rank: int) -> None:
        try:
            results[rank] = of_rank(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return results


def in_heaps(
    n: int,
    transport: Callable[[], Transport],
    of_heap: Callable[[SymmetricHeap], Any],
    timeout_s: float = 10.0,
) -> list[Any]:
    """As `in_threads`, each rank with a heap."""
    meetings = ThreadRendezvous.world(n)
    return in_threads(
        n, lambda rank: of_heap(SymmetricHeap(transport(), meetings[rank], timeout_s=timeout_s))
    )


@pytest.fixture(scope="session")
def group() -> Iterator[None]:
    dist.init_process_group("gloo")
    yield
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=CPU + GPUS)
def world(request: pytest.FixtureRequest, group: None) -> World:
    return World(*request.param)
