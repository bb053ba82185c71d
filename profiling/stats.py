"""Statistics of timing samples: order statistics only, because what disturbs a timing adds to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

Blocks = Sequence[Sequence[float]]
"""Samples as they were taken: blocks, each a sequence of samples."""


@dataclass(frozen=True)
class Summary:
    """Median and 10/90 percentiles (linear interpolation between the neighbouring order statistics)."""

    median: float
    p10: float
    p90: float
    count: int

    def to_json(self) -> dict[str, float | int]:
        return asdict(self)


def flat(blocks: Blocks) -> list[float]:
    """All samples, in the order taken."""
    return [sample for block in blocks for sample in block]


def summarise(samples: Sequence[float]) -> Summary:
    """The summary of at least one finite sample; ValueError otherwise."""
    values = np.asarray(samples, dtype=np.float64)
    if not values.size or not np.isfinite(values).all():
        raise ValueError(f"samples: got {values.size}, not all finite; at least one finite sample is needed")
    p10, median, p90 = (float(p) for p in np.percentile(values, (10, 50, 90)))
    return Summary(median, p10, p90, int(values.size))


def ratios(numerator: Blocks, denominator: Blocks) -> list[list[float]]:
    """numerator / denominator sample by sample. Pairs were taken side by side, so what drifts over a run
    cancels.

    ValueError where the two are not of one shape.
    """
    if [len(block) for block in numerator] != [len(block) for block in denominator]:
        raise ValueError("samples: the two versions were not sampled in pairs")
    return [
        [above / below for above, below in zip(*blocks, strict=True)]
        for blocks in zip(numerator, denominator, strict=True)
    ]


def noise(first: Blocks, second: Blocks) -> float:
    """The noise floor that one version, timed twice in a run, shows: how far the median ratio of a block
    strays from 1, at most. A difference of medians below this means nothing."""
    return max(abs(summarise(block).median - 1.0) for block in ratios(first, second))
