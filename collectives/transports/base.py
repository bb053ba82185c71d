"""What a transport is: memory of one rank that the other ranks can store to.

A `Segment` is one rank's part of a symmetric buffer. Its life, in step on all ranks (`heap` keeps them in
step):

    transport.allocate     this rank's memory
    segment.clear          zeroes: every word is the empty marker
    segment.export         a handle, picklable, that goes to the other ranks
    segment.map            the others' handles become addresses in this process
    segment.all_mapped     every rank has mapped: names that only served the mapping go away
    segment.unmap          the others' memory is out of reach again; `map` may follow, with new handles
    segment.free           this rank's memory is given back

`unmap` and `free` may be called in any state, any number of times. A segment that is dropped gives its
memory back too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from collectives.errors import CollectiveError
from collectives.rendezvous import Rendezvous


class Segment(ABC):
    """One rank's memory, and its view of the other ranks'."""

    local: Tensor
    """uint8 [nbytes], on the transport's device."""

    def clear(self) -> None:
        """Zeroes this rank's memory; complete on return."""
        self.local.zero_()
        if self.local.is_cuda:
            torch.cuda.current_stream(self.local.device).synchronize()

    @abstractmethod
    def export(self, generation: int) -> object:
        """A handle for the other ranks; called anew for each generation. May replace `local` by fresh
        memory."""

    @abstractmethod
    def map(self, handles: Sequence[object], rank: int) -> list[int]:
        """Addresses of every rank's memory as this process sees it; handles in rank order, `rank` its own."""

    def all_mapped(self) -> None:  # noqa: B027 (most have nothing to do)
        """Every rank has mapped."""

    @abstractmethod
    def view(self, rank: int) -> Tensor:
        """uint8 [nbytes] over rank `rank`'s memory, while mapped. For tests and host code."""

    @abstractmethod
    def unmap(self) -> None:
        """The other ranks' memory is out of reach. Views of it must not be used any more."""

    @abstractmethod
    def free(self, together: bool = False) -> None:
        """Gives this rank's memory back. together: every rank does so now."""


class Transport(ABC):
    """A way to reach other ranks' memory, on one device."""

    name: str
    can_rejoin: bool = True
    """Whether a rank that died can be replaced (`SymmetricHeap.rejoin`)."""

    device: torch.device

    @classmethod
    def obstacle(cls, device: torch.device) -> str | None:
        """Why this process cannot use the transport for memory of `device`, or None. Touches no peer."""
        return None

    @classmethod
    def place(cls) -> str | None:
        """What all ranks must have in common, as text (the same host, say), or None."""
        return None

    @classmethod
    def create(cls, device: torch.device, rendezvous: Rendezvous, timeout_s: float) -> Transport:
        """The transport for ranks that all have no obstacle and are in one place. Collective."""
        raise NotImplementedError(f"{cls.__name__} serves no ranks of their own processes")

    @abstractmethod
    def allocate(self, nbytes: int, label: str, slot_bytes: int | None) -> Segment:
        """This rank's memory. label: for names that a person may see. slot_bytes: see
        `SymmetricHeap.allocate`."""

    def close(self) -> None:  # noqa: B027 (most have nothing to do)
        """Gives back what the transport itself holds, once its segments are freed."""


class _Span:
    """Device memory as the CUDA array interface describes it. Owns nothing."""

    def __init__(self, address: int, nbytes: int):
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def tensor_at(address: int, nbytes: int) -> Tensor:
    """A uint8 tensor over device memory that something else owns, on the device where that memory is."""
    tensor: Tensor = torch.as_tensor(_Span(address, nbytes))
    if tensor.data_ptr() != address:
        raise CollectiveError("torch copied device memory that it was to wrap")
    return tensor
