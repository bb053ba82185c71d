"""Which transport the ranks of a rendezvous use. The ranks agree: what one cannot use, none uses."""

from __future__ import annotations

import importlib
from collections import Counter
from dataclasses import dataclass

import torch

from collectives.errors import SymmetricMismatch, TransportUnavailable, ranks_text
from collectives.rendezvous import TIMEOUT_S, Rendezvous
from collectives.transports.base import Transport

_CLASSES = {"shm": "ShmTransport", "cuda_ipc": "CudaIpcTransport", "nvshmem": "NvshmemTransport"}

NAMES = ("auto", *_CLASSES)
"""What `select` can be asked for. `auto` takes the first of the others that serves."""


@dataclass(frozen=True)
class Selection:
    """The chosen transport, and why: each transport that was looked at, with a reason."""

    transport: Transport
    requested: str
    reasons: tuple[tuple[str, str], ...]

    def explain(self) -> str:
        """Several lines for a person."""
        head = f"transport {self.transport.name} (asked for: {self.requested})"
        return "\n".join([head, *(f"  {name}: {reason}" for name, reason in self.reasons)])


@dataclass(frozen=True)
class _Answer:
    """What one rank says: what it was asked for, and for each candidate its obstacle and its place."""

    requested: str
    device: str
    candidates: dict[str, tuple[str | None, str | None]]


def select(
    requested: str, device: torch.device | str, rendezvous: Rendezvous, *, timeout_s: float = TIMEOUT_S
) -> Selection:
    """The transport `requested`, or for `auto` the first that serves every rank, for memory on `device`.

    Collective. Raises on every rank: SymmetricMismatch where ranks ask for different transports or kinds of
    device, ValueError for an unknown one, TransportUnavailable where none serves, with the reasons.
    """
    device = torch.device(device)
    names = tuple(_CLASSES) if requested == "auto" else tuple(n for n in _CLASSES if n == requested)
    looked = {name: _look(_class(name), device) for name in names}
    answers: list[_Answer] = rendezvous.all_gather(
        _Answer(requested, device.type, looked), timeout_s, "the choice of a transport"
    )
    for field in ("requested", "device"):
        _require_alike(field, [str(getattr(answer, field)) for answer in answers])
    if not names:
        raise ValueError(f"transport: got {requested!r}, allowed {', '.join(NAMES)}")
    reasons: list[tuple[str, str]] = []
    for name in names:
        reason = _refusal([answer.candidates[name] for answer in answers])
        if reason is None:
            served = f"serves {device.type} memory of all {rendezvous.world_size} ranks"
            transport = _class(name).create(device, rendezvous, timeout_s)
            return Selection(transport, requested, (*reasons, (name, served)))
        reasons.append((name, reason))
    raise TransportUnavailable(
        f"transport {requested!r}, {device.type} memory of {rendezvous.world_size} ranks: "
        + "; ".join(f"{name}: {reason}" for name, reason in reasons)
    )


def _class(name: str) -> type[Transport]:
    found: type[Transport] = getattr(
        importlib.import_module(f"collectives.transports.{name}"), _CLASSES[name]
    )
    return found


def _look(transport: type[Transport], device: torch.device) -> tuple[str | None, str | None]:
    obstacle = transport.obstacle(device)
    return obstacle, None if obstacle else transport.place()


def _refusal(said: list[tuple[str | None, str | None]]) -> str | None:
    """Why a candidate does not serve all ranks, or None."""
    obstacles: dict[str, list[int]] = {}
    for rank, (obstacle, _) in enumerate(said):
        if obstacle is not None:
            obstacles.setdefault(obstacle, []).append(rank)
    if obstacles:
        everyone = len(obstacles) == 1 and len(next(iter(obstacles.values()))) == len(said)
        return "; ".join(
            text if everyone else f"{ranks_text(ranks)}: {text}" for text, ranks in obstacles.items()
        )
    places = [place for _, place in said]
    apart = [rank for rank, place in enumerate(places) if place != places[0]]
    return f"{ranks_text(apart)} and rank 0 are not in one place: host, namespaces, user" if apart else None


def _require_alike(what: str, values: list[str]) -> None:
    common, count = Counter(values).most_common(1)[0]
    if count < len(values):
        ranks = [rank for rank, value in enumerate(values) if value != common]
        others = ", ".join(f"rank {rank} {values[rank]!r}" for rank in ranks)
        raise SymmetricMismatch(f"the choice of a transport: {what}: {others}, the rest {common!r}", ranks)
