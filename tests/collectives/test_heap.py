"""Symmetric memory: what the ranks see of one another, mismatches, failures on one rank, closing, meeting
anew."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch

from collectives.errors import CollectiveError, RendezvousTimeout, SymmetricMismatch
from collectives.heap import LocalHeap, SymmetricBuffer, SymmetricHeap
from collectives.rendezvous import SoloRendezvous, ThreadRendezvous
from collectives.transports.base import Segment, Transport
from collectives.transports.cuda_ipc import CudaIpcTransport
from collectives.transports.local import LocalTransport
from collectives.transports.loopback import LoopbackTransport
from collectives.transports.shm import ShmTransport
from tests.collectives.conftest import in_heaps, in_threads

Maker = Callable[[], Transport]

# Threads of one process stand in for processes; test_torchrun and test_kill have real ones.
TRANSPORTS = [
    pytest.param(lambda: LocalTransport("cpu"), id="local", marks=pytest.mark.cpu),
    pytest.param(ShmTransport, id="shm", marks=pytest.mark.cpu),
    pytest.param(lambda: LocalTransport("cuda:0"), id="local-cuda", marks=pytest.mark.gpu),
    pytest.param(lambda: CudaIpcTransport("cuda:0"), id="cuda_ipc", marks=pytest.mark.gpu),
]


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> Maker:
    maker: Maker = request.param
    return maker


def exchange(heap: SymmetricHeap, buffer: SymmetricBuffer) -> list[int]:
    """Each rank writes its number + 1 to every rank, at its own place; what this rank then holds."""
    rank, n = heap.rendezvous.rank, heap.rendezvous.world_size
    heap.rendezvous.barrier()
    for i in range(n):
        buffer.view(i)[16 * rank] = rank + 1
    if heap.device.type == "cuda":
        torch.cuda.synchronize()
    heap.rendezvous.barrier()
    held: list[int] = buffer.local[: 16 * n : 16].tolist()
    heap.rendezvous.barrier()
    return held


@pytest.mark.parametrize("n", [1, 2, 4])
def test_what_one_rank_writes_the_others_read(transport: Maker, n: int) -> None:
    def of_heap(heap: SymmetricHeap) -> object:
        rank = heap.rendezvous.rank
        with heap.allocate(4096, "first") as a, heap.allocate(100, "second", torch.bfloat16) as b:
            assert not a.local.any()
            assert not b.local.any()
            assert (a.nbytes, b.local.numel(), a.world_size, a.rank) == (4096, 100, n, rank)
            assert a.peers.dtype is torch.int64
            assert a.peers.device.type == a.local.device.type
            assert a.peers[rank].item() == a.local.data_ptr() == a.view(rank).data_ptr()
            assert a.local.data_ptr() % 256 == 0 or heap.device.type == "cpu"
            held = exchange(heap, a)
            assert not b.local.any()
            return held

    assert in_heaps(n, transport, of_heap) == [list(range(1, n + 1))] * n


def test_a_mismatch_names_the_ranks_that_differ_on_every_rank(transport: Maker) -> None:
    def of_heap(heap: SymmetricHeap) -> object:
        rank = heap.rendezvous.rank
        heap.allocate(
            2048 if rank == 2 else 1024, "moe", dtype=torch.float32 if rank in (0, 2) else torch.bfloat16
        )
        return None

    results = in_heaps(5, transport, of_heap)
    assert {type(result) for result in results} == {SymmetricMismatch}
    assert [result.ranks for result in results] == [[0, 2]] * 5
    assert {str(result) for result in results} == {
        "the allocation of 'moe': nbytes: rank 2 2048, the rest 1024; "
        "dtype: ranks 0 and 2 'float32', the rest 'bfloat16'"
    }


def test_nothing_is_allocated_before_the_ranks_agree() -> None:
    made: list[int] = []

    class Counting(LocalTransport):
        def allocate(self, nbytes: int, label: str, slot_bytes: int | None) -> Segment:
            made.append(nbytes)
            return super().allocate(nbytes, label, slot_bytes)

    def of_heap(heap: SymmetricHeap) -> object:
        with pytest.raises(SymmetricMismatch):
            heap.allocate(64 + heap.rendezvous.rank, "x")
        mismatched = len(made)
        heap.rendezvous.barrier()
        with heap.allocate(64, "x"):  # the heap still works
            return mismatched

    assert in_heaps(2, lambda: Counting("cpu"), of_heap) == [0, 0]
    assert made == [64, 64]


def test_another_kind_of_device_or_transport_is_a_mismatch() -> None:
    meetings = ThreadRendezvous.world(3)
    makers: list[Maker] = [lambda: LocalTransport("cpu"), ShmTransport, ShmTransport]
    results = in_threads(3, lambda r: SymmetricHeap(makers[r](), meetings[r]).allocate(64, "x"))
    assert all("transport: rank 0 'local', the rest 'shm'" in str(result) for result in results)
    meetings = ThreadRendezvous.world(2)
    makers = [lambda: LocalTransport("cpu"), lambda: LocalTransport("meta")]
    results = in_threads(2, lambda r: SymmetricHeap(makers[r](), meetings[r]).allocate(64, "x"))
    assert all("device: rank 1 'meta', the rest 'cpu'" in str(result) for result in results)


@pytest.mark.parametrize("nbytes", [0, -1, 1.5, True, None])
def test_a_size_that_is_none_is_refused_on_every_rank(nbytes: object) -> None:
    results = in_heaps(2, lambda: LocalTransport("cpu"), lambda heap: heap.allocate(nbytes, "x"))  # type: ignore[arg-type]
    assert [str(result) for result in results] == [f"nbytes: got {nbytes!r}, allowed an integer >= 1"] * 2


@pytest.mark.parametrize("step", ["allocate", "export", "map"])
def test_what_fails_on_one_rank_fails_on_all_and_leaves_nothing(step: str) -> None:
    live: list[Segment] = []

    class Failing(ShmTransport):
        def allocate(self, nbytes: int, label: str, slot_bytes: int | None) -> Segment:
            if step == "allocate" and self.fails:
                raise MemoryError("no room")
            segment = super().allocate(nbytes, label, slot_bytes)
            live.append(segment)
            if self.fails and step != "allocate":

                def fail(*arguments: object) -> object:
                    raise OSError("no luck")

                setattr(segment, step, fail)
            return segment

    def of_heap(heap: SymmetricHeap) -> object:
        assert isinstance(heap.transport, Failing)
        heap.transport.fails = heap.rendezvous.rank == 1
        with pytest.raises(CollectiveError) as caught:
            heap.allocate(4096, "x")
        assert heap.buffers == ()
        heap.transport.fails = False
        with heap.allocate(4096, "x") as buffer:
            exchange(heap, buffer)
        return str(caught.value)

    told = "MemoryError: no room" if step == "allocate" else "OSError: no luck"
    what = "mapping" if step == "map" else "allocation"
    assert in_heaps(3, Failing, of_heap) == [f"the {what} of 'x' failed on rank 1: {told}"] * 3
    assert all(segment.local.numel() == 0 for segment in live)


def test_a_rank_that_does_not_come_is_named() -> None:
    def of_heap(heap: SymmetricHeap) -> object:
        return heap.allocate(64, "x") if heap.rendezvous.rank else None

    results = in_heaps(3, ShmTransport, of_heap, timeout_s=0.3)
    assert [str(r) for r in results[1:]] == [
        f"rank {r}: rank 0 did not come to the allocation of 'x' in 0.3 s" for r in (1, 2)
    ]


def test_a_closed_buffer_is_refused(transport: Maker) -> None:
    def of_heap(heap: SymmetricHeap) -> object:
        buffer = heap.allocate(64, "x")
        other = heap.allocate(64, "y")
        buffer.close()
        buffer.close()
        assert buffer.closed
        assert heap.buffers == (other,)
        for use in (lambda: buffer.local, lambda: buffer.peers, lambda: buffer.view(0)):
            with pytest.raises(CollectiveError, match="'x' is closed"):
                use()
        assert other.local.numel() == 64
        heap.close()
        return other.closed

    assert in_heaps(2, transport, of_heap) == [True, True]


def test_closing_waits_for_the_others_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collectives.heap.CLOSE_S", 0.4)

    def of_heap(heap: SymmetricHeap) -> float:
        buffer = heap.allocate(64, "x")
        if heap.rendezvous.rank == 0:
            return 0.0
        start = time.monotonic()
        buffer.close()
        first = time.monotonic() - start
        heap.close()  # the ranks are known to be out of step: no second wait
        return first if time.monotonic() - start - first < 0.2 else -1.0

    _, waited = in_heaps(2, lambda: LocalTransport("cpu"), of_heap)
    assert 0.4 <= waited < 3


def test_an_error_inside_a_with_block_closes_at_once() -> None:
    def of_heap(heap: SymmetricHeap) -> float:
        buffer = heap.allocate(64, "x")
        start = time.monotonic()
        if heap.rendezvous.rank == 1:
            with pytest.raises(KeyError), buffer:
                raise KeyError
        return time.monotonic() - start

    assert max(in_heaps(2, ShmTransport, of_heap)) < 2


def test_ranks_meet_anew(transport: Maker) -> None:
    """Rank 1 is replaced: the others keep their heaps, it starts afresh and allocates the same in the same
    order."""
    n = 3
    first, second = ThreadRendezvous.world(n), ThreadRendezvous.world(n)

    def of_rank(rank: int) -> object:
        heap = SymmetricHeap(transport(), first[rank])
        buffers = [heap.allocate(4096, "a"), heap.allocate(64, "b")]
        exchange(heap, buffers[0])
        buffers[1].local.fill_(7)  # to be gone afterwards
        peers = [b.peers.data_ptr() for b in buffers]
        memory = [b.local.data_ptr() for b in buffers]
        if rank == 1:
            heap = SymmetricHeap(transport(), second[rank])
            buffers = [heap.allocate(4096, "a"), heap.allocate(64, "b")]
        else:
            heap.rejoin(second[rank])
            assert [b.peers.data_ptr() for b in buffers] == peers
            if heap.device.type == "cuda":  # captured graphs hold them
                assert [b.local.data_ptr() for b in buffers] == memory
        assert not any(b.local.any() for b in buffers)
        assert all(b.peers[rank].item() == b.local.data_ptr() for b in buffers)
        return exchange(heap, buffers[0]), buffers[1].local.any().item()

    assert in_threads(n, of_rank) == [([1, 2, 3], False)] * n


def test_a_failed_meeting_points_at_own_memory_and_may_be_repeated() -> None:
    first, second, third = (ThreadRendezvous.world(2) for _ in range(3))

    def of_rank(rank: int) -> object:
        heap = SymmetricHeap(LocalTransport("cpu"), first[rank], timeout_s=0.3)
        buffer = heap.allocate(64, "a")
        if rank == 0:
            with pytest.raises(RendezvousTimeout) as caught:
                heap.rejoin(second[rank])
            assert caught.value.missing == [1]
            assert buffer.peers.tolist() == [buffer.local.data_ptr()] * 2
        heap.timeout_s = 10
        heap.rejoin(third[rank])
        return exchange(heap, buffer)

    assert in_threads(2, of_rank) == [[1, 2]] * 2


def test_only_the_same_world_is_rejoined() -> None:
    heap = SymmetricHeap(LoopbackTransport("cpu"), SoloRendezvous(1, 2))
    with pytest.raises(ValueError, match="rendezvous: got rank 0 of 2, allowed rank 1 of 2"):
        heap.rejoin(SoloRendezvous(0, 2))

    class Fixed(LocalTransport):
        name, can_rejoin = "fixed", False

    with pytest.raises(CollectiveError, match="transport fixed cannot replace a rank"):
        SymmetricHeap(Fixed("cpu"), SoloRendezvous(0, 1)).rejoin(SoloRendezvous(0, 1))


class TestLoopback:
    def test_a_store_to_a_peer_fills_the_own_slot_of_that_peer(self) -> None:
        n, rank, slot, phases = 4, 1, 32, 2
        heap = SymmetricHeap(LoopbackTransport("cpu"), SoloRendezvous(rank, n))
        buffer = heap.allocate(phases * n * slot, "x", slot_bytes=slot)
        base = buffer.local.data_ptr()
        for phase in range(phases):
            own = [address - base + (phase * n + rank) * slot for address in buffer.peers.tolist()]
            assert own == [(phase * n + i) * slot for i in range(n)]

    def test_needs_the_size_of_a_slot_and_has_no_peers(self) -> None:
        heap = SymmetricHeap(LoopbackTransport("cpu"), SoloRendezvous(0, 2))
        with pytest.raises(CollectiveError, match="slot_bytes: got None"):
            heap.allocate(64, "x")
        buffer = heap.allocate(64, "x", slot_bytes=16)
        assert buffer.view(0).data_ptr() == buffer.local.data_ptr()
        with pytest.raises(ValueError, match="no other rank has memory"):
            buffer.view(1)


DEVICES = [pytest.param("cpu", marks=pytest.mark.cpu), pytest.param("cuda:0", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
class TestLocalHeap:
    def test_all_ranks_reach_one_another(self, device: str) -> None:
        with LocalHeap(3, device) as heap:
            buffers = heap.allocate(256, "x", torch.bfloat16)
            assert [b.rank for b in buffers] == [0, 1, 2]
            assert not any(b.local.any() for b in buffers)
            for b in buffers:
                assert b.peers.tolist() == [other.local.data_ptr() for other in buffers]
                for i in range(3):
                    b.view(i)[b.rank] = 10 + b.rank
            assert all(b.local[:4].tolist() == [10, 11, 12, 0] for b in buffers)
        assert all(b.closed for b in buffers)

    def test_sizes_are_checked(self, device: str) -> None:
        with pytest.raises(ValueError, match="world_size: got 0"):
            LocalHeap(0, device)
        with pytest.raises(ValueError, match="nbytes: got 0"):
            LocalHeap(2, device).allocate(0, "x")


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_loads_neither_torch_nor_cuda() -> None:
    run(
        "import sys, collectives\n"
        "assert not {'torch', 'numpy', 'cutlass', 'bindings'} & set(sys.modules), sorted(sys.modules)\n"
        "assert not any(name.startswith('cuda') for name in sys.modules)\n"
        "from collectives import *\n"
        "assert 'cutlass' not in sys.modules\n"
        "for name in collectives.__all__: assert getattr(collectives, name).__name__ == name\n"
    )


def test_cuda_and_nvshmem_need_not_be_installed() -> None:
    run(
        "import sys; sys.modules.update(dict.fromkeys(('cuda', 'cuda.bindings', 'nvshmem')))\n"
        "import torch\n"
        "from collectives import *\n"
        "from collectives.transports.cuda_ipc import CudaIpcTransport\n"
        "from collectives.transports.nvshmem import NvshmemTransport\n"
        "assert 'cuda-python' in CudaIpcTransport.obstacle(torch.device('cuda:0'))\n"
        "assert 'nvshmem4py-cu13' in NvshmemTransport.obstacle(torch.device('cuda:0'))\n"
    )


def test_an_unknown_name_is_an_attribute_error() -> None:
    import collectives

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        collectives.nothing  # noqa: B018
