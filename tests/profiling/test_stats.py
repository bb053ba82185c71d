"""Statistics on samples whose answers are known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiling import stats

times = st.floats(0.5, 1e4)


def test_summary_of_known_samples() -> None:
    assert stats.summarise([3.0, 1.0, 2.0, 5.0, 4.0]) == stats.Summary(3.0, 1.4, 4.6, 5)
    assert stats.summarise([7.0]) == stats.Summary(7.0, 7.0, 7.0, 1)


def test_one_outlier_moves_no_statistic_far() -> None:
    calm = stats.summarise([1.0] * 99)
    assert stats.summarise([1.0] * 98 + [1e9]) == calm


@pytest.mark.parametrize("samples", [[], [1.0, float("nan")], [float("inf")]])
def test_unusable_samples(samples: list[float]) -> None:
    with pytest.raises(ValueError, match="finite"):
        stats.summarise(samples)


@given(st.lists(st.lists(times, min_size=2, max_size=5), min_size=1, max_size=4), st.floats(0.1, 10))
def test_pairing_cancels_drift(drift: list[list[float]], factor: float) -> None:
    """However a host drifts, a version that is always `factor` times as slow is so in every pair."""
    slow = [[factor * sample for sample in block] for block in drift]
    assert stats.flat(stats.ratios(slow, drift)) == pytest.approx([factor] * len(stats.flat(drift)))


def test_pairs_must_match() -> None:
    with pytest.raises(ValueError, match="pairs"):
        stats.ratios([[1.0, 2.0]], [[1.0], [2.0]])
    with pytest.raises(ValueError, match="pairs"):
        stats.ratios([[1.0]], [[1.0], [2.0]])


def test_noise_is_the_worst_block() -> None:
    base = [[10.0, 10.0, 10.0]] * 3
    again = [[10.0, 10.1, 9.9], [10.5, 10.5, 10.5], [9.8, 9.8, 30.0]]
    assert stats.noise(base, base) == 0.0
    assert stats.noise(again, base) == pytest.approx(0.05)


def test_noise_is_below_a_single_sample_scatter() -> None:
    rng = np.random.default_rng(0)
    first, second = (10 + rng.normal(0, 0.5, (7, 31))).tolist(), (10 + rng.normal(0, 0.5, (7, 31))).tolist()
    assert 0 < stats.noise(first, second) < 0.05
