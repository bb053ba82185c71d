"""What stands behind a communicator: how its ranks meet, first and after a failure, and what they share."""

from __future__ import annotations

import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from collectives import checks, launch
from collectives.engines import DeviceEngine, Engine, HostEngine
from collectives.errors import CollectiveError, SymmetricMismatch
from collectives.heap import LocalHeap, SymmetricBuffer, SymmetricHeap
from collectives.launch import Form
from collectives.layout import Layout
from collectives.rendezvous import TIMEOUT_S, Rendezvous, StoreRendezvous
from collectives.transports.select import select
from cute_kernels.moe import config

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store

    from collectives.communicator import Communicator

MAX_TOKENS = 32
"""Rows that one launch reduces at most; calls with more take several."""

MAX_SECONDS = 1e9

LOADED = "the loading of a communicator's kernels"


@dataclass(frozen=True)
class Start:
    """What ranks compare before anything is mapped. place: the same for ranks on one device."""

    place: tuple[Any, ...]
    hidden: int
    max_tokens: int
    top_k: int

    @staticmethod
    def of(device: torch.device, layout: Layout, top_k: int) -> Start:
        return Start(_place(device), layout.hidden, layout.max_tokens, top_k)

    def agree(self, rendezvous: Rendezvous, meeting_s: float) -> int:
        """How many ranks share this one's device. Raises SymmetricMismatch where sizes differ."""
        what = "the start of a communicator"
        all_ranks: list[Start] = rendezvous.all_gather(self, meeting_s, what)
        for name in ("hidden", "max_tokens", "top_k"):
            values = [getattr(one, name) for one in all_ranks]
            common, _ = Counter(values).most_common(1)[0]
            if ranks := [rank for rank, value in enumerate(values) if value != common]:
                others = ", ".join(f"rank {rank} {values[rank]}" for rank in ranks)
                raise SymmetricMismatch(f"{what}: {name}: {others}, the rest {common}", ranks)
        return sum(one.place == self.place for one in all_ranks)


@dataclass
class Meeting:
    """How the ranks of several processes meet, first and again."""

    rendezvous: Rendezvous
    store: Store | None
    name: str
    requested: str
    start: Start
    explanation: str

    def again(self, heap: SymmetricHeap, group: ProcessGroup | None, meeting_s: float) -> Rendezvous:
        """A new rendezvous and the memory mapped among its ranks: step by step what `_connected` does, since
        a restarted process is there."""
        old = self.rendezvous
        if group is not None:
            rendezvous: Rendezvous = StoreRendezvous.of_group(group, meeting_s)
        elif self.store is not None:
            rendezvous = StoreRendezvous.join(self.store, old.rank, old.world_size, meeting_s, self.name)
        else:
            raise CollectiveError(
                "reset: got neither a group nor, at construction, a store, allowed with one"
            )
        chosen = select(self.requested, heap.device, rendezvous, timeout_s=meeting_s)
        if chosen.transport.name != heap.transport.name:
            raise CollectiveError(
                f"reset: the ranks now get the transport {chosen.transport.name}, allowed "
                f"{heap.transport.name}, on which this rank's memory is: restart every rank"
            )
        chosen.transport.close()
        self.start.agree(rendezvous, meeting_s)
        heap.timeout_s = meeting_s
        heap.rejoin(rendezvous)
        self.rendezvous, self.explanation = rendezvous, chosen.explain()
        return rendezvous


class World:
    """What the ranks of one process share: their memory and how they meet. members: one, or all virtual
    ranks."""

    def __init__(self, heap: SymmetricHeap | LocalHeap, meeting: Meeting | None):
        self.heap, self.meeting = heap, meeting
        self.members: list[Communicator] = []
        self._lock = threading.Lock()

    def explain(self) -> str:
        return f"transport {self.heap.transport.name}" if self.meeting is None else self.meeting.explanation

    def reset(self, caller: Communicator, group: ProcessGroup | None, meeting_s: float) -> None:
        if self.meeting is None:
            with self._lock:
                if any(m._failure is not None or m.engine.expired() for m in self.members):
                    self._clear()
            return
        assert isinstance(self.heap, SymmetricHeap)
        caller.engine.quiesce()
        rendezvous = self.meeting.again(self.heap, group, meeting_s)
        self._clear()
        rendezvous.barrier(meeting_s, LOADED)

    def _clear(self) -> None:
        for member in self.members:
            member.engine.quiesce()
        for member in self.members:
            member.engine.clear()
            member._failure = None

    def close(self, collective: bool) -> None:
        if not any(member._open for member in self.members):
            return
        for member in self.members:
            member._open = False
            member.engine.quiesce()
        self.heap.close(collective=collective)


def make_engine(
    layout: Layout,
    rank: int,
    top_k: int,
    device: torch.device,
    buffers: dict[str, SymmetricBuffer],
    timeout_s: float,
    sharing: int,
    forms: Sequence[Form],
    provider: launch.Provider | None,
) -> Engine:
    if device.type == "cpu":
        views: dict[str, Callable[[int], Tensor]] = {name: b.view for name, b in buffers.items()}
        return HostEngine(layout, rank, views, timeout_s)
    memory = {name: (b.local, b.peers) for name, b in buffers.items()}
    engine = DeviceEngine(layout, rank, top_k, device, memory, timeout_s, sharing, provider)
    engine.load(forms)
    return engine


def checked(
    n: int,
    hidden: int,
    max_tokens: int,
    top_k: int,
    timeout_s: float,
    forms: Sequence[Form],
    meeting_s: float = TIMEOUT_S,
    name: str = "communicator",
) -> tuple[Layout, float]:
    if not isinstance(n, int) or n not in config.WORLDS:
        allowed = ", ".join(map(str, config.WORLDS))
        checks.fail("Communicator", "world size", repr(n), f"{allowed}")
    checks.whole("Communicator", "hidden", hidden, 8, config.MAX_HIDDEN, 8)
    checks.whole("Communicator", "max_tokens", max_tokens, 1, MAX_TOKENS)
    checks.whole("Communicator", "top_k", top_k, 1, config.MAX_TOP_K)
    if top_k > (most := config.most_slots(hidden)):
        checks.fail("Communicator", "top_k", top_k, f"at most {most} with hidden = {hidden}")
    seconds("Communicator", "meeting_s", meeting_s)
    if not isinstance(name, str) or not name.isprintable():
        checks.fail("Communicator", "name", repr(name), "a printable string")
    if not isinstance(forms, Sequence) or not all(isinstance(form, Form) for form in forms):
        checks.fail("Communicator", "forms", repr(forms), "a sequence of Form")
    return Layout(n, max_tokens, hidden), seconds("Communicator", "timeout_s", timeout_s)


def seconds(op: str, name: str, value: float) -> float:
    """A duration: a bound that is none, or that a kernel cannot count in nanoseconds, would be a hang."""
    if not 0 < checks.scalar(op, name, value) <= MAX_SECONDS:
        checks.fail(op, name, repr(value), f"a number above 0, at most {MAX_SECONDS:g}")
    return float(value)


def device_of(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        checks.fail("Communicator", "device", repr(device), "cpu or cuda")
    if found.type == "cpu":
        return torch.device("cpu")  # without an index, as tensors have it
    if found.type != "cuda":
        checks.fail("Communicator", "device", found, "cpu or cuda")
    if (found.index or 0) >= (count := torch.cuda.device_count()):
        checks.fail("Communicator", "device", found, f"one of this process's {count} CUDA devices, or cpu")
    if found == torch.device("cuda"):  # no index
        return torch.device("cuda", torch.cuda.current_device())
    return found


def _place(device: torch.device) -> tuple[Any, ...]:
    """What two ranks have in common that run on the same device."""
    if device.type == "cuda":
        return socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)
    return socket.gethostname(), os.getpid()
