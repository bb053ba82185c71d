"""What the fused kernel and its callers agree on: plain Python, loads without the compiler."""

from __future__ import annotations

WORLDS = (2, 4, 8)
"""Ranks that the kernel is built for."""

MAX_CLUSTER = 8
THREADS = (64, 128, 256, 512)
MAX_HIDDEN = MAX_CLUSTER * THREADS[-1] * 8
MAX_TOP_K = 32
STAGE_BYTES = 226 * 1024
"""Of the 227 KiB of shared memory that a CTA can have; the norm takes at most 512 bytes."""

RECORD_STATE, RECORD_EPOCH, RECORD_MISSING = 0, 1, 2
"""Of the record, int32 words in host memory that the device can write: whether a wait expired, in which
round, and from RECORD_MISSING on a word a rank, 1 for those that were missing."""


def elements(target: str, hidden: int) -> int:
    """bf16 elements that a thread owns of a row."""
    return 8 if target == "sm_90a" or hidden % 16 else 16


def threads(target: str, hidden: int) -> int:
    """Threads of a CTA: the fewest with which a row fits one cluster. hidden: a multiple of 8, at most
    MAX_HIDDEN."""
    vecs = hidden // elements(target, hidden)
    return next(n for n in THREADS if -(-vecs // n) <= MAX_CLUSTER)


def parts(target: str, hidden: int) -> int:
    """CTAs of a row."""
    return -(-hidden // (elements(target, hidden) * threads(target, hidden)))


def most_slots(hidden: int) -> int:
    """The largest top-k with which a CTA's vectors, the shared expert's too, fit its shared memory."""
    return min(MAX_TOP_K, STAGE_BYTES // (16 * threads("sm_90a", hidden)) - 1)  # on other targets the same


def norm_fits(target: str, hidden: int) -> bool:
    """Whether the norm epilogue is built for rows of `hidden`: those of which a thread of the norm kernel
    owns one vector, so that both sum in one order."""
    return hidden <= 512 * elements(target, hidden)
