"""Each transport's own promises: names in /dev/shm, device memory given back, NVSHMEM's bookkeeping; and
which is chosen."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from collectives.errors import CollectiveError, SymmetricMismatch, TransportUnavailable
from collectives.heap import SymmetricHeap
from collectives.rendezvous import SoloRendezvous, ThreadRendezvous
from collectives.transports import cuda_ipc, nvshmem, select, shm
from collectives.transports.cuda_ipc import CudaIpcTransport
from collectives.transports.nvshmem import NvshmemTransport
from collectives.transports.shm import ShmTransport, sweep
from tests.collectives.conftest import free_device_memory, in_heaps, in_threads


def names(pid: int | None = None) -> list[str]:
    """Names of shared memory that this user's processes, or one of them, have."""
    found = (path.name for path in shm.DIRECTORY.glob(f"flashnext-{os.geteuid()}-*"))
    return sorted(name for name in found if pid is None or name.split("-")[2] == str(pid))


ALLOCATES = """
import sys
from collectives.transports.shm import ShmTransport
segment = ShmTransport().allocate(4096, "crash", None)
segment.export(3)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def allocator() -> Iterator[subprocess.Popen[str]]:
    """A process that has made a segment that nobody has mapped."""
    process = subprocess.Popen(
        [sys.executable, "-c", ALLOCATES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()
    sweep()


@pytest.mark.cpu
class TestShm:
    def test_a_name_says_whose_it_is_and_goes_once_all_have_mapped(self) -> None:
        def of_heap(heap: SymmetricHeap) -> object:
            segment = heap.transport.allocate(100, "the/moe buffer", None)
            handles = heap.rendezvous.all_gather(segment.export(5))
            named = names(os.getpid())
            heap.rendezvous.barrier()
            segment.map(handles, heap.rendezvous.rank)
            heap.rendezvous.barrier()
            segment.all_mapped()
            heap.rendezvous.barrier()
            left = names(os.getpid())
            segment.free()
            return named, left

        for named, left in in_heaps(2, ShmTransport, of_heap):
            assert len(named) == 2
            assert all(name.endswith("-g5-the_moe_buffer") for name in named)
            assert left == []

    def test_views_outlive_what_they_were_made_of(self) -> None:
        def of_heap(heap: SymmetricHeap) -> torch.Tensor:
            with heap.allocate(4096, "x") as buffer:
                buffer.local.fill_(heap.rendezvous.rank + 1)
                heap.rendezvous.barrier()
                return buffer.view(1 - heap.rendezvous.rank)

        views = in_heaps(2, ShmTransport, of_heap)
        gc.collect()
        assert [view.sum().item() for view in views] == [2 * 4096, 4096]

    def test_a_dropped_heap_gives_everything_back(self) -> None:
        def of_heap(heap: SymmetricHeap) -> None:
            heap.allocate(1 << 20, "x")
            heap.transport.allocate(1 << 20, "never mapped", None)

        maps = Path("/proc/self/maps")
        descriptors = len(os.listdir("/proc/self/fd"))
        in_heaps(2, ShmTransport, of_heap)
        gc.collect()
        assert names(os.getpid()) == []
        assert "/dev/shm/" not in maps.read_text()
        assert len(os.listdir("/proc/self/fd")) == descriptors

    def test_what_a_killed_process_left_is_swept(self, allocator: subprocess.Popen[str]) -> None:
        (left,) = names(allocator.pid)
        ShmTransport()  # its owner lives
        assert names(allocator.pid) == [left]
        allocator.send_signal(signal.SIGKILL)
        allocator.wait()
        assert names(allocator.pid) == [left]
        ShmTransport()
        assert names(allocator.pid) == []

    def test_a_process_that_ends_leaves_nothing(self, allocator: subprocess.Popen[str]) -> None:
        assert len(names(allocator.pid)) == 1
        assert allocator.stdin is not None
        allocator.stdin.close()
        assert allocator.wait(30) == 0
        assert names(allocator.pid) == []

    def test_foreign_names_are_left_alone(self) -> None:
        others = [shm.DIRECTORY / f"flashnext-{os.geteuid() + 1}-1-x", shm.DIRECTORY / f"other-{os.getpid()}"]
        try:
            for path in others:
                path.touch()
            sweep()
            assert all(path.exists() for path in others)
        finally:
            for path in others:
                path.unlink()

    def test_a_name_that_was_taken_over_is_not_mapped(self) -> None:
        transport = ShmTransport()
        segment, other = transport.allocate(4096, "x", None), transport.allocate(4096, "y", None)
        handle = segment.export(0)
        assert isinstance(handle, shm._Handle)
        forged = shm._Handle(handle.path, handle.inode + 1, handle.nbytes)
        with pytest.raises(CollectiveError, match="is not the segment that its rank made"):
            other.map([forged, other.export(0)], 1)
        segment.free()
        with pytest.raises(FileNotFoundError):
            other.map([handle, other.export(0)], 1)
        other.free()

    def test_a_full_dev_shm_is_an_error_at_the_allocation(self) -> None:
        stat = os.statvfs(shm.DIRECTORY)
        with pytest.raises(OSError, match=r"No space left|File too large"):
            ShmTransport().allocate(stat.f_frsize * (stat.f_blocks + 1), "x", None)
        assert names(os.getpid()) == []


@pytest.mark.gpu
class TestCudaIpc:
    def test_memory_is_its_own_and_comes_back(self) -> None:
        torch.zeros(1, device="cuda")
        cached, before = torch.cuda.memory_reserved(), free_device_memory()
        size = 64 << 20
        segment = CudaIpcTransport("cuda:0").allocate(size, "x", None)
        assert torch.cuda.memory_reserved() == cached
        assert before - free_device_memory() >= size
        assert segment.local.data_ptr() % cuda_ipc.PAGE == 0
        segment.free()
        segment.free()
        assert free_device_memory() == before
        segment = CudaIpcTransport("cuda:0").allocate(size, "x", None)
        del segment
        gc.collect()
        assert free_device_memory() == before

    def test_too_much_memory_is_an_error_of_the_package(self) -> None:
        with pytest.raises(CollectiveError, match=r"cudaMalloc of \d+ bytes: cudaErrorMemoryAllocation"):
            CudaIpcTransport("cuda:0").allocate(1 << 50, "x", None)
        assert torch.ones(2, device="cuda").sum().item() == 2  # the error does not stick

    def test_the_thread_keeps_its_device(self) -> None:
        CudaIpcTransport("cuda:0").allocate(16, "x", None).free()
        assert torch.cuda.current_device() == 0

    def test_a_device_that_is_not_there_is_an_obstacle(self) -> None:
        obstacle = CudaIpcTransport.obstacle(torch.device("cuda", 99))
        assert obstacle is not None
        assert "there is no cuda:99" in obstacle


class Core:
    """Stands in for nvshmem.core: the calls that the transport makes, on host memory. One a process; here
    one a rank."""

    pes: dict[int, Core]

    def __init__(self, rank: int, world: dict[int, Core], initialised: tuple[int, int] | None = None):
        self.rank, self.world, self.pe = rank, world, initialised
        self.memory: list[np.ndarray[Any, Any]] = []
        self.freed = 0

    def init_status(self) -> int:
        return 0 if self.pe is None else 2

    def get_version(self) -> str:
        return "3"

    def my_pe(self) -> int:
        assert self.pe is not None
        return self.pe[0]

    def n_pes(self) -> int:
        assert self.pe is not None
        return self.pe[1]

    def get_unique_id(self, empty: bool) -> Any:
        value = np.zeros(4, np.int32) if empty else np.arange(4, dtype=np.int32) + 100
        return types.SimpleNamespace(_data=value)

    def init(self, device: Any, uid: Any, rank: int, nranks: int, initializer_method: str) -> None:
        assert uid._data.tolist() == [100, 101, 102, 103]
        assert initializer_method == "uid"
        self.pe = rank, nranks

    def buffer(self, nbytes: int, except_on_del: bool) -> Any:
        self.memory.append(np.zeros(nbytes, np.uint8))
        return types.SimpleNamespace(handle=self.memory[-1].ctypes.data, index=len(self.memory) - 1)

    def get_peer_buffer(self, buffer: Any, pe: int) -> Any:
        if pe == 3:
            raise Exception("Failed to retrieve peer buffer")  # as the package does
        return types.SimpleNamespace(handle=self.world[pe].memory[buffer.index].ctypes.data)

    def free(self, buffer: Any) -> None:
        self.freed += 1


@pytest.mark.cpu
class TestNvshmem:
    """What the transport makes of nvshmem4py's calls. The package itself needs several GPUs."""

    @pytest.fixture(autouse=True)
    def no_cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import threading

        self.own = threading.local()

        def tensor_at(address: int, nbytes: int) -> torch.Tensor:
            for core in self.own.core.world.values():
                for memory in core.memory:
                    if memory.ctypes.data == address:
                        return torch.from_numpy(memory)
            raise AssertionError(hex(address))

        device = types.ModuleType("cuda.core")
        device.Device = lambda index: types.SimpleNamespace(set_current=lambda: None)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "cuda.core", device)
        monkeypatch.setattr(nvshmem, "_core", lambda: self.own.core)
        monkeypatch.setattr(nvshmem, "tensor_at", tensor_at)

    def world(
        self, n: int, initialised: dict[int, tuple[int, int]] | None = None, used: int | None = None
    ) -> Any:
        cores: dict[int, Core] = {}
        for rank in range(n):
            cores[rank] = Core(rank, cores, (initialised or {}).get(rank))
        meetings = ThreadRendezvous.world(used or n)

        def of_rank(rank: int) -> Any:
            self.own.core = cores[rank]
            transport = NvshmemTransport.create(torch.device("cuda", 0), meetings[rank], 10)
            transport.device = torch.device("cpu")  # where Core's memory is
            heap = SymmetricHeap(transport, meetings[rank])
            with heap.allocate(64, "x") as buffer:
                heap.rendezvous.barrier()
                for i in range(n):
                    buffer.view(i)[rank] = rank + 1
                heap.rendezvous.barrier()
                held = buffer.local[:n].tolist()
                heap.rendezvous.barrier()
            with pytest.raises(CollectiveError, match="transport nvshmem cannot replace a rank"):
                heap.rejoin(meetings[rank])
            heap.allocate(64, "y").close(
                collective=False
            )  # a free is collective: this one is left to NVSHMEM
            return held, cores[rank].freed

        return in_threads(used or n, of_rank)

    def test_initialises_once_and_maps_every_pe(self) -> None:
        assert self.world(3) == [([1, 2, 3], 1)] * 3

    def test_uses_what_is_initialised(self) -> None:
        assert self.world(2, {0: (0, 2), 1: (1, 2)}) == [([1, 2], 1)] * 2

    @pytest.mark.parametrize(
        ("initialised", "message"),
        [
            ({0: (0, 2)}, "some ranks have initialised NVSHMEM before"),
            ({0: (1, 2), 1: (0, 2)}, "rank 0 of 2 is PE 1 of 2"),
            ({0: (0, 4), 1: (1, 4)}, "rank 0 of 2 is PE 0 of 4"),
        ],
    )
    def test_ranks_and_pes_are_the_same(self, initialised: dict[int, tuple[int, int]], message: str) -> None:
        first, second = self.world(2, initialised)
        assert isinstance(first, TransportUnavailable)
        assert isinstance(second, TransportUnavailable)
        assert message in str(first)

    def test_a_pe_out_of_reach_is_named_on_every_rank(self) -> None:
        results = self.world(4)
        assert all("rank 3's memory is not in this GPU's NVLink domain" in str(result) for result in results)


@pytest.mark.cpu
class TestSelect:
    @staticmethod
    def choose(requested: list[str], device: list[str], places: list[str] | None = None) -> list[Any]:
        meetings = ThreadRendezvous.world(len(requested))
        return in_threads(
            len(requested),
            lambda rank: select.select(requested[rank], device[rank], meetings[rank], timeout_s=10),
        )

    @pytest.mark.parametrize("requested", ["auto", "shm"])
    def test_cpu_processes_get_shared_memory_and_the_reason(self, requested: str) -> None:
        for chosen in self.choose([requested] * 2, ["cpu"] * 2):
            assert isinstance(chosen.transport, ShmTransport)
            assert chosen.explain() == (
                f"transport shm (asked for: {requested})\n  shm: serves cpu memory of all 2 ranks"
            )

    def test_what_serves_no_rank_says_why(self) -> None:
        for error in self.choose(["cuda_ipc"] * 2, ["cpu"] * 2):
            assert isinstance(error, TransportUnavailable)
            assert str(error) == (
                "transport 'cuda_ipc', cpu memory of 2 ranks: cuda_ipc: serves cuda, not cpu"
            )

    @pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a CUDA device")
    def test_auto_lists_every_reason(self) -> None:
        (error, _) = self.choose(["auto"] * 2, ["cuda:0"] * 2)
        assert isinstance(error, TransportUnavailable)
        for name in ("shm: serves cpu, not cuda", "cuda_ipc: ", "nvshmem: "):
            assert name in str(error)

    def test_ranks_ask_for_the_same(self) -> None:
        for error in self.choose(["shm", "shm", "auto"], ["cpu"] * 3):
            assert isinstance(error, SymmetricMismatch)
            assert error.ranks == [2]
            assert "requested: rank 2 'auto', the rest 'shm'" in str(error)
        for error in self.choose(["auto"] * 3, ["cpu", "cuda:0", "cpu"]):
            assert isinstance(error, SymmetricMismatch)
            assert error.ranks == [1]

    def test_an_unknown_name_lists_the_known(self) -> None:
        for error in self.choose(["pigeon"] * 2, ["cpu"] * 2):
            assert isinstance(error, ValueError)
            assert str(error) == "transport: got 'pigeon', allowed auto, shm, cuda_ipc, nvshmem"

    def test_an_obstacle_of_one_rank_is_that_of_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        said = iter([None, "not today", None])
        monkeypatch.setattr(ShmTransport, "obstacle", classmethod(lambda cls, device: next(said)))
        results = self.choose(["shm"] * 3, ["cpu"] * 3)
        assert all("not today" in str(error) and "rank " in str(error) for error in results)

    def test_ranks_of_another_place_are_named(self) -> None:
        said: list[tuple[str | None, str | None]] = [(None, "here"), (None, "there"), (None, "here")]
        assert select._refusal(said) == "rank 1 and rank 0 are not in one place: host, namespaces, user"
        assert select._refusal(said[::2]) is None
        assert select._refusal([("x", None)] * 2) == "x"

    def test_places_of_one_machine_are_equal(self) -> None:
        for transport in (ShmTransport, CudaIpcTransport):
            assert transport.place() == transport.place()
            assert transport.place()

    @pytest.mark.parametrize("name", [name for name in select.NAMES if name != "auto"])
    def test_names_agree(self, name: str) -> None:
        assert select._class(name).name == name


@pytest.mark.cpu
def test_the_document_lists_every_transport() -> None:
    document = (Path(__file__).parents[2] / "docs" / "collectives.md").read_text()
    rows = set(re.findall(r"^\| `(\w+)` \|", document, re.M))
    assert rows == {*select.NAMES, "local", "loopback"} - {"auto"}


@pytest.mark.gpu
def test_one_gpu_is_served_by_cuda_ipc() -> None:
    chosen = select.select("auto", "cuda:0", SoloRendezvous(0, 4))
    assert isinstance(chosen.transport, CudaIpcTransport)
    assert chosen.explain().splitlines() == [
        "transport cuda_ipc (asked for: auto)",
        "  shm: serves cpu, not cuda",
        "  cuda_ipc: serves cuda memory of all 4 ranks",
    ]
