"""How times are taken: three phases, each interleaving all versions of one piece of work.

cold    One captured CUDA graph a version. Before every timed replay max(512 MiB, 4 x L2) is written,
        outside the timed interval, so that inputs come from device memory and the host is ahead of the
        device when the interval starts.
hot     The same work many times back to back in one graph, right after an untimed replay of that graph; the
        time is divided by the count. Caches are warm, launches overlap as in a long graph.
host    What an eager call costs the calling thread: calls without waiting for the device, few enough for
        its queue to hold.

Versions take turns sample by sample, in an order that rotates and alternates in direction, and ratios are
formed pair by pair (stats.ratios): a drift of clocks or of the host meets all versions alike. A cold time
contains the cost of launching a graph between two events, which an empty kernel timed beside it shows.
Replays of one version must not differ in their work: `prepare`, when given, puts back before every sample
what a replay changes.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

MIN_FLUSH_BYTES = 512 << 20
WARMUP_ROUNDS = 3

Call = Callable[[], Any]
Timing = Callable[[], float]
"""A timing that was enqueued; after `Device.synchronize` it gives the microseconds."""
Samples = dict[str, list[list[float]]]
"""Microseconds by version: blocks of samples."""


@dataclass(frozen=True)
class Settings:
    """Numbers of the protocol; the defaults are what results are published with.

    hot_target_us: a hot graph repeats its work at most `hot_calls` times, and fewer where that would take
    longer than this; work that could not be repeated `hot_calls_min` times in it is not timed hot.
    host_calls: eager calls between two waits, at most what the device queues.
    """

    blocks: int = 7
    samples: int = 31
    hot_calls: int = 200
    hot_calls_min: int = 10
    hot_target_us: float = 1500.0
    host_blocks: int = 15
    host_calls: int = 200

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ValueError(f"{name}: got {value}, at least 1")

    def hot_count(self, cold_us: float) -> int:
        """Repetitions in a hot graph of work that takes `cold_us` from cold; 0: too long for one."""
        count = min(self.hot_calls, int(self.hot_target_us / cold_us))
        return count if count >= min(self.hot_calls_min, self.hot_calls) else 0


class Graph(Protocol):
    """Captured work. result: what its last call returned, memory that every replay writes. kernels: mangled
    names of what a replay launches, in no order; None where the driver does not tell."""

    @property
    def result(self) -> Any: ...

    @property
    def kernels(self) -> list[str] | None: ...

    def replay(self) -> None: ...


class Device(Protocol):
    """What the protocol asks of a device; all but `capture` and `synchronize` enqueue and return."""

    @property
    def device(self) -> torch.device: ...

    @property
    def flush_bytes(self) -> int: ...

    def capture(self, call: Call, count: int = 1) -> Graph: ...

    def flush(self) -> None: ...

    def time(self, graph: Graph) -> Timing: ...

    def synchronize(self) -> None: ...


@dataclass(frozen=True)
class CudaGraph:
    """A `Graph` of CUDA's."""

    graph: torch.cuda.CUDAGraph
    result: Any
    kernels: list[str] | None

    def replay(self) -> None:
        self.graph.replay()


class CudaDevice:
    """The current CUDA device and stream."""

    def __init__(self) -> None:
        index = torch.cuda.current_device()
        self.device = torch.device("cuda", index)
        self.flush_bytes = max(MIN_FLUSH_BYTES, 4 * torch.cuda.get_device_properties(index).L2_cache_size)
        self._flushed = torch.empty(self.flush_bytes, dtype=torch.uint8, device=self.device)

    def capture(self, call: Call, count: int = 1) -> CudaGraph:
        """`count` calls in one graph. Two calls come first, outside: first calls compile, load and
        allocate."""
        return capture(call, count)

    def flush(self) -> None:
        self._flushed.zero_()

    def time(self, graph: Graph) -> Timing:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        return lambda: start.elapsed_time(end) * 1e3

    def synchronize(self) -> None:
        torch.cuda.synchronize()


def capture(call: Call, count: int = 1) -> CudaGraph:
    """`count` calls in one graph of the current device, after two calls outside of it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
        call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    result = None
    # The watchdog thread of a process group asks the driver while this one captures.
    mode = "thread_local" if _in_group() else "global"
    with no_collection(), torch.cuda.graph(graph, capture_error_mode=mode):
        for _ in range(count):
            result = call()
    kernels = _kernels(graph) if count == 1 else None
    graph.instantiate()
    return CudaGraph(graph, result, kernels)


def _in_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _kernels(graph: torch.cuda.CUDAGraph) -> list[str] | None:
    from profiling.graphs import kernel_names

    try:
        return kernel_names(graph)
    except Exception:  # a note beside the timing: whatever the driver's bindings do, the timing goes on
        return None


def order(names: Sequence[str], turn: int) -> list[str]:
    """The versions in the order of their turn: rotated by one each time, every other cycle backwards, so that
    each comes equally often in every place (the first after a wait is some 0.2 us faster)."""
    cycle, shift = divmod(turn, len(names))
    rotated = [*names[shift:], *names[:shift]]
    return rotated[::-1] if cycle % 2 else rotated


@contextmanager
def no_collection() -> Iterator[None]:
    """Without the garbage collector: its pauses would fall on whatever version is running, and a graph that
    it destroys would end the capture of another."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def interleaved(
    device: Device,
    names: Sequence[str],
    take: Callable[[str], Timing],
    blocks: int,
    samples: int,
    progress: Call | None = None,
) -> Samples:
    """`blocks` x `samples` timings of every version, one of each a turn. Calls `progress` after every
    block."""
    result: Samples = {name: [] for name in names}
    with no_collection():
        for turn in range(WARMUP_ROUNDS):
            for name in order(names, turn):
                take(name)
            device.synchronize()
        for block in range(blocks):
            for taken in result.values():
                taken.append([])
            for sample in range(samples):
                timings = [(name, take(name)) for name in order(names, block * samples + sample)]
                device.synchronize()
                for name, timing in timings:
                    result[name][-1].append(timing())
            if progress is not None:
                progress()
    return result


def cold(
    device: Device,
    graphs: Mapping[str, Graph],
    settings: Settings,
    prepare: Call | None = None,
    progress: Call | None = None,
) -> Samples:
    """Times of single replays with nothing of theirs in the caches."""

    def take(name: str) -> Timing:
        if prepare is not None:
            prepare()
        device.flush()
        return device.time(graphs[name])

    return interleaved(device, list(graphs), take, settings.blocks, settings.samples, progress)


def hot(
    device: Device,
    graphs: Mapping[str, Graph],
    counts: Mapping[str, int],
    settings: Settings,
    prepare: Call | None = None,
    progress: Call | None = None,
) -> Samples:
    """Times a call within graphs of `counts` calls. The untimed replay before each also keeps the device
    busy while the host submits the timed one, which for a long graph takes longer than its first kernels."""

    def take(name: str) -> Timing:
        if prepare is not None:
            prepare()
        graphs[name].replay()
        timing, count = device.time(graphs[name]), counts[name]
        return lambda: timing() / count

    return interleaved(device, list(graphs), take, settings.blocks, settings.samples, progress)


def host(
    device: Device,
    calls: Mapping[str, Call],
    settings: Settings,
    progress: Call | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Samples:
    """Microseconds that an eager call keeps its thread; a block holds one sample, the mean of `host_calls`
    calls."""
    result: Samples = {name: [] for name in calls}
    with no_collection():
        for turn in range(-WARMUP_ROUNDS, settings.host_blocks):
            for name in order(list(calls), turn):
                call, repeat = calls[name], itertools.repeat(None, settings.host_calls)
                device.synchronize()
                start = clock()
                for _ in repeat:
                    call()
                elapsed = clock() - start
                if turn >= 0:
                    result[name].append([elapsed / settings.host_calls * 1e6])
            device.synchronize()
            if progress is not None and turn >= 0:
                progress()
    return result
