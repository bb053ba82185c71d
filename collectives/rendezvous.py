"""How ranks meet on the host: exchange small Python objects, wait for one another, meet again after a
failure.

A meeting is bounded by a timeout, and its error names the ranks that did not come. Nothing here is on the
path of a round: rounds meet in device memory. Objects are pickled, so a store is trusted as far as the
processes that write it.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from collectives.errors import CollectiveError, RendezvousTimeout

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

TIMEOUT_S = 60.0
"""How long ranks wait for one another where the caller names no timeout."""

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.0005, 0.02
_GONE = "gone"


class Rendezvous(ABC):
    """`world_size` ranks, of which this is `rank`. Every rank makes the same calls in the same order. After a
    meeting that failed the ranks are out of step, so all later ones fail too, at once."""

    generation: int = 0
    """How often the ranks have met anew after a failure."""

    def __init__(self, rank: int, world_size: int):
        _check_rank(rank, world_size)
        self.rank, self.world_size = rank, world_size
        self._failure: CollectiveError | None = None

    def all_gather(self, value: Any, timeout_s: float = TIMEOUT_S, what: str = "a meeting") -> list[Any]:
        """Every rank's `value`, in rank order.

        what: names the meeting in errors. Raises RendezvousTimeout, naming the ranks that did not come, or
        CollectiveError where the means to meet failed.
        """
        if self._failure is not None:
            raise CollectiveError(f"rank {self.rank}: no {what}: {self._failure}") from self._failure
        try:
            return self._all_gather(value, timeout_s, what)
        except CollectiveError as error:
            self._failure = error
            raise

    def barrier(self, timeout_s: float = TIMEOUT_S, what: str = "a barrier") -> None:
        """Returns once every rank has called it. Raises as `all_gather`."""
        self.all_gather(None, timeout_s, what)

    @property
    def broken(self) -> bool:
        """Whether a meeting failed."""
        return self._failure is not None

    @abstractmethod
    def _all_gather(self, value: Any, timeout_s: float, what: str) -> list[Any]: ...


class SoloRendezvous(Rendezvous):
    """One real rank of a world that is only pretended: every rank says what this one says."""

    def _all_gather(self, value: Any, timeout_s: float, what: str) -> list[Any]:
        return [value] * self.world_size


class ThreadRendezvous(Rendezvous):
    """Ranks that are threads of one process; `world` makes all of them."""

    def __init__(self, rank: int, world_size: int, board: _Board):
        super().__init__(rank, world_size)
        self._board, self._sequence = board, 0

    @staticmethod
    def world(world_size: int) -> list[ThreadRendezvous]:
        """One a rank."""
        board = _Board()
        return [ThreadRendezvous(rank, world_size, board) for rank in range(world_size)]

    def _all_gather(self, value: Any, timeout_s: float, what: str) -> list[Any]:
        board, sequence = self._board, self._sequence
        self._sequence += 1
        with board.changed:
            meeting = board.meetings.setdefault(sequence, {})
            meeting[self.rank] = value
            # This rank has left the last meeting, so all came to it, so all have left the one before.
            board.meetings.pop(sequence - 2, None)
            board.changed.notify_all()
            if not board.changed.wait_for(lambda: len(meeting) == self.world_size, timeout_s):
                missing = [rank for rank in range(self.world_size) if rank not in meeting]
                raise RendezvousTimeout(self.rank, missing, what, timeout_s)
            return [meeting[rank] for rank in range(self.world_size)]


class _Board:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.meetings: dict[int, dict[int, Any]] = {}


class StoreRendezvous(Rendezvous):
    """Ranks that share a key-value store (TCPStore, FileStore, HashStore, PrefixStore of these), each
    through a client of its own.

    scope: a prefix of the keys, the same on every rank and used by nothing else in that store.
    generation: 0, or what `join` arrived at.
    """

    def __init__(self, store: Store, rank: int, world_size: int, scope: str, generation: int = 0):
        super().__init__(rank, world_size)
        self._store, self._scope, self.generation = store, scope, generation
        self._sequence = 0

    def _all_gather(self, value: Any, timeout_s: float, what: str) -> list[Any]:
        base = f"{self._scope}/{self._sequence}"
        keys = [f"{base}/{rank}" for rank in range(self.world_size)]
        with _failures_named(what):
            self._store.set(keys[self.rank], pickle.dumps(value))  # type: ignore[arg-type]  # takes bytes too
            values = [pickle.loads(v) for v in _wait(self._store, self.rank, keys, timeout_s, what)]
            if self._sequence:  # all came here, so all have read the meeting before
                self._store.delete_key(f"{self._scope}/{self._sequence - 1}/{self.rank}")
        self._sequence += 1
        return values

    @staticmethod
    def of_group(group: ProcessGroup | None = None, timeout_s: float = TIMEOUT_S) -> StoreRendezvous:
        """Over the store that a process group was made with (None: the default group). Its device and backend
        do not matter, and a dead rank shows as a timeout that names it. Collective: waits as `join`, and a
        rank that gave up may come again."""
        return StoreRendezvous.join(*member_of(group), timeout_s, "process group")

    @staticmethod
    def join(
        store: Store, rank: int, world_size: int, timeout_s: float = TIMEOUT_S, name: str = "communicator"
    ) -> StoreRendezvous:
        """Waits until every rank has joined; returns the rendezvous of a new generation.

        Survivors of a failure and restarted processes call this alike: the generation's number is kept in the
        store, whose server must outlive the ranks (a launcher's, not a rank's). name: the same on all ranks,
        another for each communicator of one store. Raises RendezvousTimeout naming who did not join.

        A rank that dies while it joins, or gives up, and comes again meets the others in this generation or a
        later one, never half in each: who met its dead incarnation times out, naming it, and joins again.
        """
        _check_rank(rank, world_size)
        root, what = f"flashnext/{name}", f"the meeting of {name!r}"
        me, deadline = uuid.uuid4().hex, time.monotonic() + timeout_s
        with _failures_named(what):
            while True:
                current = store.compare_set(f"{root}/generation", "", "0")  # what the key then holds
                scope = f"{root}/{int(current) + 1}"
                keys = [f"{scope}/arrived/{r}" for r in range(world_size)]
                store.set(keys[rank], me)
                try:
                    arrived = _wait(store, rank, keys, deadline - time.monotonic(), what, timeout_s)
                except RendezvousTimeout:
                    store.set(keys[rank], _GONE)
                    raise
                # Sealed once: of a rank that came twice, one incarnation is in the roster.
                proposal = json.dumps([one.decode() for one in arrived])
                roster = json.loads(store.compare_set(f"{scope}/roster", "", proposal))
                store.compare_set(f"{root}/generation", current.decode(), str(int(current) + 1))
                if roster[rank] == me:
                    return StoreRendezvous(store, rank, world_size, scope, int(current) + 1)


def member_of(group: ProcessGroup | None) -> tuple[Store, int, int]:
    """The store that a process group was made with (None: the default group), this process's rank in it, and
    its size. Raises ValueError for what is no group of this process."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError("group: got torch.distributed uninitialised, allowed after init_process_group")
    given = dist.group.WORLD if group is None else group
    if not isinstance(given, dist.ProcessGroup) or dist.get_rank(given) < 0:
        raise ValueError("group: got one without this process, allowed one that it is a member of")
    return _store_of(given), dist.get_rank(given), dist.get_world_size(given)


def _check_rank(rank: int, world_size: int) -> None:
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"rank: got {rank} of {world_size}, allowed 0 <= rank < world_size")


def _store_of(group: ProcessGroup) -> Store:
    if hasattr(group, "get_group_store"):  # not in every version of torch
        return group.get_group_store()
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_process_group_store(group)


def _wait(
    store: Store, rank: int, keys: Sequence[str], timeout_s: float, what: str, said_s: float | None = None
) -> list[bytes]:
    """The keys' values once all are there. Missing is who was not there at any time: not who came and gave
    up.

    Polls: a blocking wait holds the client's lock against other threads, cannot be interrupted, and does not
    say which key is missing."""
    deadline, pause = time.monotonic() + timeout_s, _FIRST_PAUSE_S
    came: set[int] = set()
    while True:
        late = time.monotonic() >= deadline
        there = [r for r, key in enumerate(keys) if r in came or store.check([key])]
        if len(there) > len(came):
            came |= {r for r in there if r not in came and store.get(keys[r]) != _GONE.encode()}
        if len(came) == len(keys):
            values = [store.get(key) for key in keys]
            if _GONE.encode() not in values:
                return values
        if late:
            missing = [r for r in range(len(keys)) if r not in came]
            gave_up = [r for r in came if store.get(keys[r]) == _GONE.encode()]
            raise RendezvousTimeout(rank, missing or gave_up, what, timeout_s if said_s is None else said_s)
        time.sleep(pause)
        pause = min(pause * 1.5, _LAST_PAUSE_S)


@contextlib.contextmanager
def _failures_named(what: str) -> Iterator[None]:
    """A store's own failure (its server is gone, say) becomes an error of this package."""
    try:
        yield
    except CollectiveError:
        raise
    except RuntimeError as error:
        raise CollectiveError(f"{what}: the store failed: {error}") from error
