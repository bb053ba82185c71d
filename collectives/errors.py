"""The errors that the collectives raise on purpose. Messages name ranks, what was given and what is
allowed."""

from __future__ import annotations

from collections.abc import Sequence


class CollectiveError(RuntimeError):
    """Base of the package's errors."""


class CollectiveTimeout(CollectiveError):  # noqa: N818
    """Ranks did not contribute to a round in time. The communicator is poisoned from then on.

    rank: who raises; missing: who did not arrive, ascending; epoch: the round.
    """

    def __init__(self, rank: int, missing: Sequence[int], epoch: int):
        self.rank, self.missing, self.epoch = rank, sorted(missing), epoch
        super().__init__(f"rank {rank}: {ranks_text(self.missing)} did not arrive in round {epoch}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.rank, self.missing, self.epoch)


class CommunicatorPoisoned(CollectiveError):  # noqa: N818
    """A round timed out before; until `reset()` the communicator refuses calls."""


class RendezvousTimeout(CollectiveError):  # noqa: N818
    """Ranks did not come to a host-side meeting in time. rank: who raises; missing: who did not come,
    ascending; what: the meeting."""

    def __init__(self, rank: int, missing: Sequence[int], what: str, timeout_s: float):
        self.rank, self.missing, self.what, self.timeout_s = rank, sorted(missing), what, timeout_s
        super().__init__(f"rank {rank}: {ranks_text(self.missing)} did not come to {what} in {timeout_s:g} s")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.rank, self.missing, self.what, self.timeout_s)


class SymmetricMismatch(CollectiveError):  # noqa: N818
    """Ranks asked for different symmetric memory. Raised on every rank, before anything is mapped.

    ranks: those that differ from the rest, ascending.
    """

    def __init__(self, message: str, ranks: Sequence[int]):
        self.message, self.ranks = message, sorted(ranks)
        super().__init__(message)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.message, self.ranks)


class TransportUnavailable(CollectiveError):  # noqa: N818
    """No transport, or not the one that was asked for, serves these ranks and this device; says why."""


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 2`, `ranks 0, 1 and 3`."""
    ranks = sorted(ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(str(r) for r in ranks[:-1])} and {ranks[-1]}"
