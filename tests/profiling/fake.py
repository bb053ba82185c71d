"""A device whose time is told beforehand: no GPU, no waiting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


def overwrite(old: Any, new: Any) -> None:
    """What a replay does to the memory that its capture returned."""
    if isinstance(old, torch.Tensor):
        if old is not new:
            old.copy_(new)
    elif isinstance(old, dict):
        for name, value in old.items():
            overwrite(value, new[name])
    elif isinstance(old, tuple):
        for a, b in zip(old, new, strict=True):
            overwrite(a, b)


@dataclass
class FakeGraph:
    """A call to repeat."""

    call: Callable[[], Any]
    count: int
    result: Any
    kernels: list[str] | None = None

    def replay(self) -> None:
        for _ in range(self.count):
            overwrite(self.result, self.call())


@dataclass
class FakeDevice:
    """Keeps a clock in microseconds. cost(call, times timed so far) is what one call takes; a timing read
    before `synchronize` is an error. idle: timed replays do nothing, and those of many calls make one."""

    cost: Callable[[Callable[[], Any], int], float]
    idle: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    flush_bytes: int = 512 << 20
    log: list[tuple[str, Any]] = field(default_factory=list)
    timed: dict[int, int] = field(default_factory=dict)
    synchronized: int = 0

    def capture(self, call: Callable[[], Any], count: int = 1) -> FakeGraph:
        self.log.append(("capture", count))
        return FakeGraph(call, 1 if self.idle else count, call(), ["kernel"])

    def flush(self) -> None:
        self.log.append(("flush", None))

    def time(self, graph: FakeGraph) -> Callable[[], float]:
        self.log.append(("time", graph))
        seen = self.timed[id(graph)] = self.timed.get(id(graph), -1) + 1
        if not self.idle:
            graph.replay()
        taken = self.cost(graph.call, seen) * graph.count
        queued = self.synchronized

        def read() -> float:
            assert self.synchronized > queued, "read before the device was waited for"
            return taken

        return read

    def synchronize(self) -> None:
        self.synchronized += 1
        self.log.append(("synchronize", None))
