"""Ranks that are processes, one a GPU: how they meet, how their samples are taken, and what their link takes.

torchrun starts them. A sample of a version is one of every rank, and what counts is the slowest rank's time:
a step goes on when all are through. It is taken so:

1. each rank enqueues what `prepare` puts back and the flush of its caches;
2. the ranks are lined up on the device (link_kernels.py), behind the flush and outside the timed interval:
   the hosts are ahead by then, and no rank's time holds the wait for another's flush. Rank 0 tells the others
   to go and waits as long as that word takes, so they start within what the link's latency varies by;
3. event, replay, event, as for one rank.

What is left of the skew: a rank that starts s earlier than another measures s more and the other s less, so
the slowest rank's time is too long by it, never too short, and the ranks' medians, which are kept
(`by_rank`), differ by about 2 s. Versions take turns in the same order on all ranks. A hot graph's calls keep
the ranks in step themselves.

NVLink multicast stays off, in what is measured here and in NCCL, torch and NVSHMEM, unless the environment
says otherwise.
"""

from __future__ import annotations

import contextlib
import io
import os
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch import Tensor

from bindings.targets import TARGETS, target_of
from profiling import protocol, stats
from profiling.protocol import Graph, Samples, Timing

RANKED = ("all_reduce", "moe_finalize_all_reduce")
"""Work that several ranks do together."""
SIZES = (2, 4, 8)
MAX_ROWS = 32
MULTICAST_OFF = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
MEETING_S = 120.0
SPEAKS_WITHIN_S = 5.0  # between the starts of a host's processes
WAIT_NS = 5_000_000_000
ROUNDS, REPEATS = 2000, 7
"""Of ping-pong: words there and back, and how often that is measured."""
PAUSE_CYCLES = 20_000_000
"""Some 10 ms, in which a host launches a long graph."""


def size() -> int:
    """How many processes torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def obstacle() -> str | None:
    """Why torchrun's processes cannot be ranks here, the same on all ranks of a host; None where they can."""
    if size() not in SIZES:
        return f"got {size()} processes, allowed {', '.join(map(str, SIZES))}"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    here = int(os.environ.get("LOCAL_WORLD_SIZE", str(size())))
    if here > (found := torch.cuda.device_count()):
        return f"{here} ranks need a GPU each, {found} here"
    local = int(os.environ["LOCAL_RANK"])
    if target_of(torch.device("cuda", local)) is None:
        return f"{torch.cuda.get_device_name(local)} is none of {', '.join(TARGETS)}"
    return None


def speaks() -> bool:
    """Whether this process is the one of its host that says what stands in the way. The others wait before
    they leave: torchrun ends all when one has ended, and the reason would be lost."""
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    if not first:
        time.sleep(SPEAKS_WITHIN_S)
    return first


@contextlib.contextmanager
def joined() -> Iterator[bool]:
    """Within, torchrun's processes are a process group on a GPU each; whether this one is to speak. Without
    them, alone."""
    if size() == 1:
        yield True
        return
    for name, value in MULTICAST_OFF.items():
        os.environ.setdefault(name, value)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=MEETING_S))
    try:
        yield torch.distributed.get_rank() == 0
    except Exception:  # the others may be anywhere, and a library's closing would wait for them
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    with bounded(MEETING_S, "the end of the process group"):
        torch.distributed.destroy_process_group()


@contextlib.contextmanager
def quiet(silent: bool) -> Iterator[None]:
    """Within, what is printed is lost if `silent`: one of the ranks speaks."""
    with contextlib.redirect_stdout(io.StringIO()) if silent else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def bounded(seconds: float, what: str) -> Iterator[None]:
    """Ends the process, and with it torchrun's others, if what is within takes longer: a rank may wait inside
    a library's kernel for one that does not come."""

    def end() -> None:
        print(f"profiling: {what} took more than {seconds:.0f} s; ended", file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@dataclass
class World:
    """This rank among the others.

    meet: every rank's value, in rank order. device: what samples are taken on. line_up: enqueues what
    lines the ranks up behind a pause, in which the hosts get ahead. check: raises where they were not.
    by_rank: medians of what `slowest` was given last, by version, of every rank."""

    rank: int
    size: int
    meet: Callable[[Any, str], list[Any]]
    device: protocol.Device
    line_up: Callable[[], None] = lambda: None
    check: Callable[[], None] = lambda: None
    by_rank: dict[str, list[float]] = field(default_factory=dict)

    def slowest(self, samples: Samples) -> Samples:
        """Sample by sample the time of the rank that took longest; the same on all ranks. Collective."""
        self.check()
        everyone: list[Samples] = self.meet(samples, "samples")
        if differing := [r for r, one in enumerate(everyone) if list(one) != list(samples)]:
            raise RuntimeError(f"ranks {differing} timed other versions than rank {self.rank}")
        self.by_rank = {
            name: [round(statistics.median(stats.flat(one[name])), 4) for one in everyone] for name in samples
        }
        return {
            name: [
                [max(taken) for taken in zip(*blocks, strict=True)]
                for blocks in zip(*(one[name] for one in everyone), strict=True)
            ]
            for name in samples
        }

    def agreed(self, error: str | None) -> str | None:
        """The first rank's error of all ranks', the same on all; None where none has one. Collective."""
        for rank, said in enumerate(self.meet(error, "outcomes")):
            if said is not None:
                return f"rank {rank}: {said}"
        return None


@cache
def _compiled(target: str, kind: str, world: int) -> Callable[..., None]:
    import cutlass.cute as cute

    from profiling import link_kernels

    entry, arguments = link_kernels.build(target, kind=kind, world=world)
    kernel: Callable[..., None] = cute.compile(
        entry, *arguments, options=f"--enable-tvm-ffi --gpu-arch {target}"
    )
    return kernel


class Link:
    """The ranks' words in one another's memory. peers: addresses of every rank's."""

    def __init__(self, device: torch.device, rank: int, size: int, peers: Tensor) -> None:
        target = target_of(device)
        if target is None:
            raise ValueError(f"device: got {device}, a GPU of a supported target is needed")
        self.rank, self.size, self._peers = rank, size, peers
        self._line_up = _compiled(target, "line up", size)
        self._ping_pong = _compiled(target, "ping-pong", size)
        self._lined, self._played = (torch.zeros(2, dtype=torch.int32, device=device) for _ in range(2))
        self._taken = torch.zeros(2, dtype=torch.int64, device=device)
        self.delay = 0

    def line_up(self) -> None:
        """Enqueues the start line."""
        self._line_up(self._peers, self._lined, self.rank, self.delay, WAIT_NS)

    def line_up_later(self) -> None:
        """Enqueues a pause and the start line."""
        torch.cuda._sleep(PAUSE_CYCLES)
        self.line_up()

    def check(self) -> None:
        """RuntimeError where a wait has expired: another rank did not come. Waits for the device."""
        if int(self._lined[1]) or int(self._played[1]):
            raise RuntimeError(f"rank {self.rank}: another rank did not come within {WAIT_NS / 1e9:.0f} s")

    def measure(self, meet: Callable[[Any, str], list[Any]]) -> dict[str, Any]:
        """The one-way latency between rank 0 and each other rank, the same record on all ranks, and from then
        on the delay of the start line. Collective."""
        found: dict[str, list[float]] = {}
        cycles: list[float] = []
        for other in range(1, self.size):
            taken = []
            if self.rank == 0:
                self._played[0] = 0  # each pair counts from the start
            for _ in range(REPEATS):
                meet(None, "ping-pong")
                if self.rank in (0, other):
                    theirs = other if self.rank == 0 else 0
                    self._ping_pong(
                        self._peers, self._played, self._taken, self.rank, theirs, ROUNDS, WAIT_NS
                    )
                taken.append([value / (2 * ROUNDS) for value in self._taken.tolist()])
            first = meet(taken, "ping-pong")[0]
            found[f"0-{other}"] = [round(ns / 1e3, 4) for ns, _ in first]
            cycles += [c for _, c in first]
        self.check()
        self.delay = round(statistics.median(cycles))
        median = statistics.median([us for samples in found.values() for us in samples])
        return {"one_way_us": median, "samples": found, "rounds": ROUNDS, "cycles": self.delay}


class LinedUp(protocol.CudaDevice):
    """The current CUDA device; the ranks are lined up before every interval that is timed."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self.link = link

    def time(self, graph: Graph) -> Timing:
        self.link.line_up()
        return super().time(graph)


@contextlib.contextmanager
def meeting(device: torch.device) -> Iterator[tuple[World, dict[str, Any]]]:
    """This rank's `World` within the default process group, and what its link takes (`Link.measure`).
    Collective."""
    from collectives.heap import SymmetricHeap
    from collectives.rendezvous import StoreRendezvous
    from collectives.transports.select import select
    from profiling import link_kernels

    rendezvous = StoreRendezvous.of_group()
    chosen = select("auto", device, rendezvous, timeout_s=MEETING_S)
    heap = SymmetricHeap(chosen.transport, rendezvous, timeout_s=MEETING_S)

    def meet(value: Any, what: str) -> list[Any]:
        return rendezvous.all_gather(value, MEETING_S, what)

    try:
        buffer = heap.allocate(link_kernels.BYTES, "line", torch.int32)
        link = Link(device, rendezvous.rank, rendezvous.world_size, buffer.peers)
        found = link.measure(meet)
        here = rendezvous.rank, rendezvous.world_size
        yield World(*here, meet, LinedUp(link), link.line_up_later, link.check), found
    except BaseException:
        heap.close(collective=False)
        raise
    heap.close()
