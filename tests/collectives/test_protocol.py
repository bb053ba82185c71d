"""The push protocol on the host, state by state: markers, phases, counters, the bound."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from collectives.host_push import NEGATIVE_ZEROS, Expired, HostChannel, payload, rank_sum
from collectives.layout import Layout
from tests.collectives.conftest import in_threads

HIDDEN = 16


class Ranks:
    """Channels over plain memory."""

    def __init__(self, n: int, max_tokens: int = 4, timeout_s: float = 5.0):
        self.layout = Layout(n, max_tokens, HIDDEN)
        self.memory = [torch.zeros(self.layout.nbytes, dtype=torch.uint8) for _ in range(n)]
        self.channels = [
            HostChannel(self.layout, rank, self.memory.__getitem__, timeout_s) for rank in range(n)
        ]

    def slots(self, rank: int) -> torch.Tensor:
        """[phase, source, row, word] of a rank's buffer."""
        n, rows = self.layout.world_size, self.layout.max_tokens
        return self.memory[rank].view(torch.int32).view(2, n, rows, HIDDEN // 2)

    def exchange(self, x: list[torch.Tensor]) -> list[torch.Tensor]:
        results = in_threads(len(x), lambda rank: self.channels[rank].exchange(x[rank]))
        assert not [r for r in results if isinstance(r, Exception)]
        return results


def rows(*values: float) -> torch.Tensor:
    return torch.tensor(values).bfloat16().view(-1, 1).expand(len(values), HIDDEN).contiguous()


def test_layout_is_phases_by_sources_by_rows() -> None:
    layout = Layout(4, 32, 2560)
    assert (layout.slot_bytes, layout.nbytes) == (32 * 2560 * 2, 2 * 4 * 32 * 2560 * 2)


def test_a_word_of_two_positive_zeros_is_sent_as_negative_ones_and_no_other_is_changed() -> None:
    words = torch.tensor([0, 1, 0x10000, -0x80000000, 0x8000, -0x7FFF8000, 0x7FC0], dtype=torch.int64)
    x = words.to(torch.int32).view(1, -1).view(torch.bfloat16)
    sent = payload(x)
    assert sent[0, 0] == NEGATIVE_ZEROS == np.int32(-0x7FFF8000)
    assert (sent[0, 1:] == words[1:].to(torch.int32).numpy()).all()
    assert (sent != 0).all()


def test_zeros_of_any_sign_sum_to_positive_zero() -> None:
    negative = np.full((1, 2, 1), NEGATIVE_ZEROS)
    assert rank_sum(negative, torch.bfloat16).view(torch.int16).tolist() == [[0, 0]]


def test_the_sum_is_in_rank_order() -> None:
    ranks = Ranks(4)
    x = [rows(v) for v in (2.0**100, 1.0, -(2.0**100), 1.0)]  # in another order: 0 or 2
    assert ranks.exchange(x)[2].unique().tolist() == [1.0]


def test_a_round_lives_in_its_phase_and_leaves_every_slot_empty() -> None:
    ranks = Ranks(2)
    for turn in range(4):
        seen: list[torch.Tensor] = []
        done = threading.Event()

        def look(turn: int = turn, seen: list[torch.Tensor] = seen, done: threading.Event = done) -> None:
            seen.append(ranks.slots(0).clone())
            done.set()

        ranks.channels[1].delay = look  # rank 1 has pushed and rank 0 has not yet
        ranks.channels[0].delay = None
        started = threading.Thread(target=lambda: ranks.channels[1].exchange(rows(2.0, 3.0)))
        started.start()
        assert done.wait(5)
        ranks.channels[0].exchange(rows(1.0, 1.0))
        started.join(5)
        full = (seen[0] != 0).all(-1)
        assert full.nonzero().tolist() == [[turn & 1, 1, 0], [turn & 1, 1, 1]]
        assert not any(memory.any() for memory in ranks.memory)


def test_rows_count_for_themselves() -> None:
    ranks = Ranks(2)
    for count in (1, 3, 2, 4, 1):
        results = ranks.exchange([rows(*[1.0] * count), rows(*[2.0] * count)])
        assert all(r.unique().tolist() == [3.0] for r in results)
    assert ranks.channels[0].rounds.tolist() == ranks.channels[1].rounds.tolist() == [5, 3, 2, 1]


def test_counters_pass_two_to_the_32() -> None:
    ranks = Ranks(2)
    for channel in ranks.channels:
        channel.rounds[:] = 2**32 - 2
    for turn in range(5):
        results = ranks.exchange([rows(float(turn)), rows(1.0)])
        assert results[0].unique().tolist() == [turn + 1.0]
    assert ranks.channels[0].rounds[0] == 3


def test_a_wait_is_bounded_and_names_who_is_missing() -> None:
    ranks = Ranks(4, timeout_s=0.1)
    start = time.monotonic()
    results = in_threads(4, lambda rank: ranks.channels[rank].exchange(rows(1.0)) if rank in (0, 2) else None)
    assert 0.09 < time.monotonic() - start < 2
    for rank in (0, 2):
        assert isinstance(results[rank], Expired)
        assert (results[rank].missing, results[rank].epoch) == ([1, 3], 0)


def test_one_missing_word_is_missing() -> None:
    """Nothing is taken for a payload before all of its words are there."""
    ranks = Ranks(2, timeout_s=0.1)
    sent = payload(rows(1.0))
    ranks.slots(0)[0, 1, 0] = torch.from_numpy(sent[0])
    ranks.slots(0)[0, 1, 0, 3] = 0
    with pytest.raises(Expired) as caught:
        ranks.channels[0].exchange(rows(1.0))
    assert caught.value.missing == [1]


def test_a_peer_a_round_ahead_does_no_harm() -> None:
    """It has pushed round n+1 before this rank has looked at round n."""
    ranks = Ranks(2)
    ready, results = threading.Event(), []
    ranks.channels[0].delay = lambda: ready.wait(5) and None

    def ahead() -> None:
        results.append(ranks.channels[1].exchange(rows(1.0)))
        ranks.channels[1].delay = ready.set
        results.append(ranks.channels[1].exchange(rows(2.0)))

    peer = threading.Thread(target=ahead)
    peer.start()
    mine = [ranks.channels[0].exchange(rows(float(v))) for v in (10, 20)]
    peer.join(5)
    assert [m.unique().tolist() for m in (*mine, *results)] == [[11.0], [22.0]] * 2


@pytest.mark.parametrize("n", [2, 4, 8])
def test_ranks_that_come_at_different_times(n: int) -> None:
    ranks, rounds = Ranks(n), 60
    jitter = [np.random.default_rng(rank) for rank in range(n)]

    def of_rank(rank: int) -> list[float]:
        ranks.channels[rank].delay = lambda: time.sleep(jitter[rank].uniform(0, 1e-3))
        return [float(ranks.channels[rank].exchange(rows(float(t % 16 + rank)))[0, 0]) for t in range(rounds)]

    want = [float(n * (t % 16) + n * (n - 1) // 2) for t in range(rounds)]
    want = [float(torch.tensor(v).bfloat16()) for v in want]
    assert in_threads(n, of_rank) == [want] * n
    assert not any(memory.any() for memory in ranks.memory)
