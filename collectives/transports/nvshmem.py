"""NVSHMEM through nvshmem4py: several GPUs, of several hosts where one NVLink domain spans them.

NVSHMEM is used for its memory alone: kernels store through the addresses that it maps, and call none of its
device functions. Its own calls are collective and not bounded in time: a rank that dies within one leaves
the others waiting there. It has a fixed set of processes, so a rank that died cannot be replaced; all have
to start anew. It is initialised once a process, by whoever comes first, and stays so until the process ends.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from collectives.errors import CollectiveError, TransportUnavailable
from collectives.rendezvous import Rendezvous
from collectives.transports.base import Segment, Transport, tensor_at


class NvshmemTransport(Transport):
    """NVSHMEM's symmetric heap. Every rank of the rendezvous is a PE, and there are no other PEs."""

    name = "nvshmem"
    can_rejoin = False

    def __init__(self, device: torch.device):
        self.device = device

    @classmethod
    def obstacle(cls, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"serves cuda, not {device.type}"
        if importlib.util.find_spec("nvshmem") is None:
            return "the package nvshmem4py-cu13 is not installed (pip install 'flashnext-kernels[nvshmem]')"
        try:
            _core().get_version()  # loads NVSHMEM's host library
        except Exception as error:  # the package raises whatever its loaders do
            return f"NVSHMEM does not load: {type(error).__name__}: {error}"
        return None

    @classmethod
    def create(cls, device: torch.device, rendezvous: Rendezvous, timeout_s: float) -> Transport:
        index = torch.cuda.current_device() if device.index is None else device.index
        device = torch.device("cuda", index)
        core = _core()
        status = core.init_status()
        initialised = rendezvous.all_gather(int(status) != 0, timeout_s, "the start of NVSHMEM")
        if any(initialised) and not all(initialised):
            raise TransportUnavailable("nvshmem: some ranks have initialised NVSHMEM before, others have not")
        if not any(initialised):
            _initialise(core, index, rendezvous, timeout_s)
        pe = core.my_pe(), core.n_pes()
        if pe != (rendezvous.rank, rendezvous.world_size):
            raise TransportUnavailable(
                f"nvshmem: rank {rendezvous.rank} of {rendezvous.world_size} is PE {pe[0]} of {pe[1]}; "
                "ranks and PEs have to be the same"
            )
        return cls(device)

    def allocate(self, nbytes: int, label: str, slot_bytes: int | None) -> Segment:
        return _NvshmemSegment(nbytes)


class _NvshmemSegment(Segment):
    def __init__(self, nbytes: int):
        # Dropped unfreed it stays with NVSHMEM, since a free is collective and a finalizer is not.
        self._buffer = _core().buffer(nbytes, except_on_del=False)
        self._nbytes, self._addresses = nbytes, [0]
        self.local = tensor_at(int(self._buffer.handle), nbytes)

    def export(self, generation: int) -> object:
        return None

    def map(self, handles: Sequence[object], rank: int) -> list[int]:
        own = int(self._buffer.handle)
        self._addresses = [own if i == rank else self._peer(i) for i in range(len(handles))]
        return list(self._addresses)

    def _peer(self, rank: int) -> int:
        try:
            return int(_core().get_peer_buffer(self._buffer, rank).handle)
        except Exception as error:  # NvshmemError is a bare Exception
            raise CollectiveError(
                f"rank {rank}'s memory is not in this GPU's NVLink domain: {error}"
            ) from error

    def view(self, rank: int) -> Tensor:
        return tensor_at(self._addresses[rank], self._nbytes)

    def unmap(self) -> None:
        self._addresses = []

    def free(self, together: bool = False) -> None:
        buffer, self._buffer = self._buffer, None
        self.local = torch.empty(0, dtype=torch.uint8)
        if buffer is not None and together:
            _core().free(buffer)


def _initialise(core: Any, index: int, rendezvous: Rendezvous, timeout_s: float) -> None:
    import numpy as np
    from cuda.core import Device

    first = rendezvous.rank == 0
    uid = core.get_unique_id(empty=not first)
    raw = uid._data.view(np.int8)
    raw[...] = np.frombuffer(
        rendezvous.all_gather(raw.tobytes() if first else b"", timeout_s, "the start of NVSHMEM")[0], np.int8
    ).reshape(raw.shape)
    device = Device(index)
    device.set_current()
    core.init(
        device=device,
        uid=uid,
        rank=rendezvous.rank,
        nranks=rendezvous.world_size,
        initializer_method="uid",
    )


def _core() -> Any:
    import nvshmem.core

    return nvshmem.core
