"""Sums over lanes, warps and CTAs. The order is fixed by the shape alone, so equal inputs give equal bits."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass.memory import SmemAllocator

from cute_kernels.device.math import select


def lanes_sum(value: Float32, lanes: int = 32) -> Float32:
    """Sum over each aligned group of `lanes` lanes, in every lane: an xor butterfly, wide partner first."""
    return cute.arch.warp_reduction_sum(value, threads_in_group=lanes)


def lanes_sum_each(values: list, lanes: int = 32) -> Float32:
    """Sum each of 2^k values over each aligned group of `lanes` = 2^n lanes.

    Lane l receives the sum of values[l % lanes >> (n - k)]. Each of the first k butterfly steps also halves
    what a lane carries: 2^k - 1 + n - k shuffles in place of n * 2^k. Every sum is the tree of `lanes_sum`.
    """
    lane = cute.arch.lane_idx()
    offset = lanes // 2
    while len(values) > 1:
        half = len(values) // 2
        upper = (lane & offset) != 0
        kept = [select(upper, values[half + i], values[i]) for i in range(half)]
        sent = [select(upper, values[i], values[half + i]) for i in range(half)]
        values = [k + cute.arch.shuffle_sync_bfly(s, offset=offset) for k, s in zip(kept, sent)]
        offset //= 2
    return lanes_sum(values[0], 2 * offset)


def pairwise_sum(values: list) -> Float32:
    """Sum of a Python list of values as a balanced tree: the shortest dependent chain."""
    while len(values) > 1:
        paired = [values[i] + values[i + 1] for i in range(0, len(values) - 1, 2)]
        values = paired + values[len(values) - 1 :] if len(values) % 2 else paired
    return values[0]


def _padding(warps: int) -> int:
    """The compiler loads the last three of 4k + 3 neighbours as four: the fourth has to hold something."""
    return 1 if warps % 4 == 3 else 0


def warp_scratch(warps: int) -> cute.Tensor:
    """fp32 in shared memory for the `cta_sum` of `warps` warps."""
    return SmemAllocator().allocate_tensor(Float32, cute.make_layout((warps + _padding(warps),)), 16)


@cute.jit
def cta_sum(value: Float32, scratch: cute.Tensor, warps: int) -> Float32:
    """Sum over the CTA, in every thread. `scratch`: `warp_scratch(warps)`."""
    value = lanes_sum(value)
    if const_expr(warps > 1):
        tid, _, _ = cute.arch.thread_idx()
        if cute.arch.lane_idx() == 0:
            scratch[tid // 32] = value
        if const_expr(_padding(warps)):
            if tid == 1:
                scratch[warps] = Float32(0.0)
        cute.arch.sync_threads()
        value = pairwise_sum([scratch[i] for i in range(warps)])
    return value
