"""What others compute for the same work, as plugins: a module here is one package's share, found only where
it imports.

A plugin has `PACKAGE`, a name for messages, and `peers()`, or for all-reduces `reducers()`, which imports the
package and returns what it offers. A peer maps a case of ours to its own arguments and names its results as
ours are; it is checked against float64 before it is timed. Peers are for measuring: nothing of theirs is part
of this project.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from bindings.tolerance import Exact
from profiling.cases import Case


def _anything(case: Case) -> str | None:
    return None


@dataclass(frozen=True)
class Peer:
    """One implementation by others of one piece of work.

    op: the piece, as in `cases.CASES`. prepare: makes the call for a case; it may allocate, the call
    returns the results by name. refuses: why it cannot take a case, or None. allowance: by how much its
    errors may exceed the contract's tolerance; 2 lets a result be the other of the two nearest values.
    exact: what it computes by design where that is not the contract.
    """

    name: str
    op: str
    prepare: Callable[[Case], Callable[[], Mapping[str, Tensor]]]
    refuses: Callable[[Case], str | None] = _anything
    allowance: float = 2.0
    exact: Callable[[Case], Callable[[list[int], Mapping[str, Tensor]], dict[str, Exact]]] | None = None


@dataclass(frozen=True)
class Reducer:
    """An all-reduce by others.

    take: for tensors like the one given, memory that a rank's part is to be written to and the call that adds
    up and returns the sum. in_place: the call overwrites that memory. refuses: why it cannot take such a
    tensor, or None. Every rank makes and calls it in the same order.
    """

    name: str
    take: Callable[[Tensor], tuple[Tensor, Callable[[], Tensor]]]
    in_place: bool
    refuses: Callable[[Tensor], str | None] = lambda like: None


def at_most(rows: int) -> Callable[[Case], str | None]:
    """Refuses a case of more rows."""
    return lambda case: f"takes at most {rows} rows" if case.rows > rows else None


class Found(NamedTuple):
    """peers, reducers: those of every plugin that imports. missing: by package, why it gave none."""

    peers: tuple[Peer, ...]
    missing: dict[str, str]
    reducers: tuple[Reducer, ...] = ()

    def of(self, op: str) -> list[Peer]:
        """The peers of one piece of work."""
        return [peer for peer in self.peers if peer.op == op]


def plugins() -> list[str]:
    """Module names of the plugins."""
    return sorted(f"{__name__}.{info.name}" for info in pkgutil.iter_modules(__path__))


def discover(modules: Iterable[str] | None = None) -> Found:
    """Every peer that this host can run. A package that is absent or fails to import is reported, never an
    error."""
    peers: list[Peer] = []
    reducers: list[Reducer] = []
    missing: dict[str, str] = {}
    for name in plugins() if modules is None else modules:
        module: Any = importlib.import_module(name)
        try:
            if hasattr(module, "reducers"):
                reducers += module.reducers()
            else:
                peers += module.peers()
        except Exception as error:  # whatever a foreign package does when it is imported
            missing[module.PACKAGE] = f"{type(error).__name__}: {error}"
    return Found(tuple(peers), missing, tuple(reducers))
