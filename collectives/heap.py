"""Symmetric memory: the same buffer on every rank, each rank with the addresses of all.

Allocation is collective. What is asked for is compared on all ranks before any memory is taken, and each
later step is agreed on: either every rank gets its buffer, or every rank raises.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor

from collectives.errors import CollectiveError, SymmetricMismatch, ranks_text
from collectives.rendezvous import TIMEOUT_S, Rendezvous
from collectives.transports.base import Segment, Transport
from collectives.transports.local import LocalTransport

CLOSE_S = 10.0
"""How long closing waits for the other ranks to let go of this rank's memory."""

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class _Request:
    """What one rank asks for. Field by field the same on all ranks, or a mismatch."""

    name: str
    nbytes: int
    dtype: str
    device: str
    transport: str
    slot_bytes: int | None


class SymmetricBuffer:
    """One rank's part of symmetric memory, and where the others' parts are. Made by a heap."""

    def __init__(
        self, owner: _Owner, request: _Request, segment: Segment, rank: int, addresses: Sequence[int]
    ):
        self._owner, self._request, self._segment = owner, request, segment
        self.rank, self.world_size, self.nbytes = rank, len(addresses), request.nbytes
        self.name = request.name
        self._peers = torch.tensor(list(addresses), dtype=torch.int64, device=segment.local.device)
        self._open = True

    @property
    def local(self) -> Tensor:
        """uint8 [nbytes]: this rank's memory. Zeros at first. Valid until `close`."""
        self._check_open()
        return self._segment.local

    @property
    def peers(self) -> Tensor:
        """int64 [world_size] on the buffer's device: the address of every rank's memory, as this rank sees
        it. The same tensor for the buffer's life; `SymmetricHeap.rejoin` rewrites it."""
        self._check_open()
        return self._peers

    def view(self, rank: int) -> Tensor:
        """uint8 [nbytes] over rank `rank`'s memory; not to be kept beyond `close` or `rejoin`."""
        self._check_open()
        return self._segment.view(rank)

    @property
    def closed(self) -> bool:
        """Whether the memory was given back."""
        return not self._open

    def close(self, *, collective: bool = True) -> None:
        """Gives the memory back. Collective; a rank that does not come is waited for CLOSE_S, then done
        without. collective=False: at once, for when the other ranks are known to be gone."""
        self._owner._close([self], collective)

    def _check_open(self) -> None:
        if not self._open:
            raise CollectiveError(f"the symmetric buffer {self.name!r} is closed")

    def _point_at(self, addresses: Sequence[int]) -> None:
        self._peers.copy_(torch.tensor(list(addresses), dtype=torch.int64))

    def _let_go(self) -> None:
        """Unmaps the other ranks' memory. Until then kernels that use it must have ended; a graph replayed by
        mistake then finds its own memory."""
        _synchronize(self._peers.device)
        self._point_at([self._segment.local.data_ptr()] * self.world_size)
        _synchronize(self._peers.device)
        self._segment.unmap()

    def __enter__(self) -> SymmetricBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(collective=error is None)


class _Owner:
    """What makes buffers and closes them."""

    def __init__(self, transport: Transport):
        self.transport = transport
        self._buffers: list[SymmetricBuffer] = []

    @property
    def device(self) -> torch.device:
        """Where the memory is."""
        return self.transport.device

    @property
    def buffers(self) -> tuple[SymmetricBuffer, ...]:
        """The open buffers, in the order of their allocation."""
        return tuple(self._buffers)

    def close(self, *, collective: bool = True) -> None:
        """Closes every buffer, as `SymmetricBuffer.close` does."""
        self._close(list(self._buffers), collective)
        self.transport.close()

    def _close(self, buffers: list[SymmetricBuffer], collective: bool) -> None:
        buffers = [one for one in buffers if one._open]
        for one in buffers:
            one._open = False
            self._buffers.remove(one)
            _logged(one._let_go)
        together = bool(buffers) and collective and self._all_let_go()
        for one in buffers:
            _logged(partial(one._segment.free, together))

    def _all_let_go(self) -> bool:
        """Whether every rank is done with this rank's memory, and closes its own."""
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(collective=error is None)

    def _request(self, name: str, nbytes: int, dtype: str, slot_bytes: int | None) -> _Request:
        return _Request(name, nbytes, dtype, self.device.type, self.transport.name, slot_bytes)


class SymmetricHeap(_Owner):
    """Symmetric memory of the ranks of a rendezvous, one a process. All methods are collective.

    Captured graphs may hold a buffer's addresses: `peers` keeps its own, and on CUDA so does `local`, also
    over `rejoin`.
    """

    def __init__(self, transport: Transport, rendezvous: Rendezvous, *, timeout_s: float = TIMEOUT_S):
        super().__init__(transport)
        self.rendezvous, self.timeout_s = rendezvous, timeout_s

    def allocate(
        self, nbytes: int, name: str, dtype: torch.dtype | str = torch.uint8, slot_bytes: int | None = None
    ) -> SymmetricBuffer:
        """A zeroed buffer of `nbytes` on every rank.

        name, dtype: what it is for; compared, like nbytes and the kind of device. slot_bytes: bytes that one
        source rank writes in a round, which `loopback` needs. Raises SymmetricMismatch, on every rank and
        before anything is allocated, naming the ranks that differ; CollectiveError, on every rank, where one
        cannot allocate or map; RendezvousTimeout where one does not come.
        """
        request = self._request(name, nbytes, str(dtype).removeprefix("torch."), slot_bytes)
        self._compare(request)

        def allocate() -> tuple[Segment, object]:
            segment = self.transport.allocate(nbytes, name, slot_bytes)
            try:
                segment.clear()
                return segment, segment.export(self.rendezvous.generation)
            except BaseException:
                segment.free()
                raise

        made, failure = _attempt(allocate)
        segment = made[0] if made else None
        try:
            addresses = self._connect(request, segment, made[1] if made else None, failure)
            assert segment is not None
            buffer = SymmetricBuffer(self, request, segment, self.rendezvous.rank, addresses)
        except BaseException:
            if segment is not None:
                segment.free()
            raise
        self._buffers.append(buffer)
        return buffer

    def rejoin(self, rendezvous: Rendezvous) -> None:
        """Maps every buffer anew among the ranks of a new rendezvous, of the same rank and world size, and
        zeroes it.

        For survivors of a failure, whose kernels must have ended. A restarted process makes a heap and
        allocates the same buffers in the same order instead; the two meet step by step. If it fails, it may
        be called again.
        """
        old = self.rendezvous
        if (rendezvous.rank, rendezvous.world_size) != (old.rank, old.world_size):
            got = f"rank {rendezvous.rank} of {rendezvous.world_size}"
            raise ValueError(f"rendezvous: got {got}, allowed rank {old.rank} of {old.world_size}")
        if not self.transport.can_rejoin:
            raise CollectiveError(
                f"the transport {self.transport.name} cannot replace a rank: restart every rank"
            )
        self.rendezvous = rendezvous
        for buffer in self._buffers:
            buffer._let_go()
        for buffer in self._buffers:
            segment = buffer._segment
            self._compare(buffer._request)

            def export(segment: Segment = segment) -> object:
                segment.clear()
                return segment.export(rendezvous.generation)

            handle, failure = _attempt(export)
            buffer._point_at(self._connect(buffer._request, segment, handle, failure))
            _synchronize(self.device)

    def __enter__(self) -> SymmetricHeap:
        return self

    def _all_let_go(self) -> bool:
        if self.rendezvous.broken:
            return False
        try:
            self.rendezvous.barrier(CLOSE_S, "the closing of symmetric memory")
        except CollectiveError as error:
            log.warning("%s", error)
            return False
        return True

    def _compare(self, request: _Request) -> None:
        nbytes = request.nbytes
        invalid = not isinstance(nbytes, int) or isinstance(nbytes, bool) or nbytes < 1
        what = f"the allocation of {request.name!r}"
        answers = self.rendezvous.all_gather(request, self.timeout_s, what)
        differences, ranks = _differences(answers)
        if differences:
            raise SymmetricMismatch(f"{what}: {'; '.join(differences)}", ranks)
        if invalid:
            raise ValueError(f"nbytes: got {nbytes!r}, allowed an integer >= 1")

    def _connect(
        self, request: _Request, segment: Segment | None, handle: object, failure: Exception | None
    ) -> list[int]:
        handles = self._agree(handle, failure, f"the allocation of {request.name!r}")
        assert segment is not None
        mapped, failure = _attempt(lambda: segment.map(handles, self.rendezvous.rank))
        self._agree(None, failure, f"the mapping of {request.name!r}")
        segment.all_mapped()
        assert mapped is not None
        return mapped

    def _agree(self, value: Any, failure: Exception | None, what: str) -> list[Any]:
        """Every rank's value, or on every rank an error that says on which it failed."""
        said = f"{type(failure).__name__}: {failure}" if failure is not None else None
        answers = self.rendezvous.all_gather((value, said), self.timeout_s, what)
        failures = [f"rank {rank}: {said}" for rank, (_, said) in enumerate(answers) if said is not None]
        if failures:
            raise CollectiveError(f"{what} failed on {'; '.join(failures)}") from failure
        return [value for value, _ in answers]


class LocalHeap(_Owner):
    """Symmetric memory of N virtual ranks inside one process, on one device."""

    def __init__(self, world_size: int, device: torch.device | str):
        if world_size < 1:
            raise ValueError(f"world_size: got {world_size}, allowed at least 1")
        super().__init__(LocalTransport(device))
        self.world_size = world_size

    def allocate(
        self, nbytes: int, name: str, dtype: torch.dtype | str = torch.uint8, slot_bytes: int | None = None
    ) -> list[SymmetricBuffer]:
        """The buffers of all ranks, in rank order, zeroed."""
        if nbytes < 1:
            raise ValueError(f"nbytes: got {nbytes!r}, allowed an integer >= 1")
        request = self._request(name, nbytes, str(dtype).removeprefix("torch."), slot_bytes)
        segments = [self.transport.allocate(nbytes, name, slot_bytes) for _ in range(self.world_size)]
        handles = [segment.export(0) for segment in segments]
        buffers = [
            SymmetricBuffer(self, request, segment, rank, segment.map(handles, rank))
            for rank, segment in enumerate(segments)
        ]
        _synchronize(self.device)
        self._buffers += buffers
        return buffers

    def __enter__(self) -> LocalHeap:
        return self


def _differences(requests: Sequence[_Request]) -> tuple[list[str], list[int]]:
    """For each field that is not the same everywhere a text, and the ranks that differ from the commonest
    value, of equally common ones the lowest rank's."""
    texts, ranks = [], set()
    for one in fields(_Request):
        values = [getattr(request, one.name) for request in requests]
        common, count = Counter(values).most_common(1)[0]
        if count == len(values):
            continue
        differing: dict[Any, list[int]] = {}
        for rank, value in enumerate(values):
            if value != common:
                differing.setdefault(value, []).append(rank)
                ranks.add(rank)
        others = [f"{ranks_text(found)} {value!r}" for value, found in differing.items()]
        texts.append(f"{one.name}: {', '.join(others)}, the rest {common!r}")
    return texts, sorted(ranks)


def _attempt(step: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """A step's result, or its error, which the other ranks must hear of first."""
    try:
        return step(), None
    except Exception as error:
        return None, error


def _logged(step: Callable[[], None]) -> None:
    """For closing: what cannot be given back (a lost CUDA context, say) does not keep the rest."""
    try:
        step()
    except RuntimeError as error:
        log.warning("closing symmetric memory: %s", error)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
