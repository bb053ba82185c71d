"""The steps HC kernels compose, each written once: fused and separate kernels give the same bits."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int64
from cutlass.memory import SmemAllocator

from cute_kernels.device import vector
from cute_kernels.device.convert import narrow, widen
from cute_kernels.device.math import fma, rsqrt, sigmoid
from cute_kernels.device.reduce import cta_sum, lanes_sum_each, pairwise_sum, warp_scratch
from cute_kernels.device.span import Span

SPLITS = 8
MAX_THREADS = 512
MAX_GATE_THREADS = 256


def stream_span(target: str, hidden: int) -> Span:
    """One stream of a row, as apply and norm own it."""
    return Span.of(target, hidden, MAX_THREADS)


def split_span(target: str, width: int) -> Span:
    """One split of a row, as the gate owns it."""
    return Span.of(target, width // SPLITS, MAX_GATE_THREADS)


def stream_gate(partials: cute.Tensor, t, c, streams: int) -> Float32:
    """a[t, c] = 2 * sigmoid(sum over s of partials[t, s, c] / C), summed s = 0..7, by every thread."""
    row = vector.row_of(partials, t, SPLITS * streams, 16)
    logit = row[c]
    for s in range(1, SPLITS):
        logit = logit + row[s * streams + c]
    # multiplying by 1 / C is exact where C is a power of two; elsewhere a correctly rounded division
    mean = logit * (1.0 / streams) if streams & (streams - 1) == 0 else logit / Float32(streams)
    return Float32(2.0) * sigmoid(mean)


def combine(gate: Float32, block: cute.Tensor, residual: cute.Tensor, dtype) -> cute.Tensor:
    """act(fma(gate, block, residual)) element by element: one rounding, at the conversion."""
    out = cute.make_rmem_tensor(residual.layout, dtype)
    narrow([fma(gate, b, r) for b, r in zip(widen(block), widen(residual))], out)
    return out


def inverse_rms(x: cute.Tensor, eps: Float32, span: Span) -> Float32:
    """rsqrt(mean(x^2) + eps) over the CTA's span, in every thread. A CTA-wide barrier."""
    square = Float32(0.0)
    for value in widen(x):
        square = fma(value, value, square)
    total = cta_sum(square, warp_scratch(span.warps), span.warps)
    return rsqrt(fma(total, 1.0 / span.extent, eps))


def gemma_scale(x: cute.Tensor, weight: cute.Tensor, r: Float32) -> cute.Tensor:
    """act(x * r * (1 + weight)): one rounding, at the conversion."""
    out = cute.make_rmem_tensor(x.layout, x.element_type)
    narrow([value * r * (w + 1.0) for value, w in zip(widen(x), widen(weight))], out)
    return out


def gemma_rmsnorm(x: cute.Tensor, weight: cute.Tensor, eps: Float32, span: Span) -> cute.Tensor:
    """act(x * rsqrt(mean(x^2) + eps) * (1 + weight)) over the CTA's span."""
    return gemma_scale(x, weight, inverse_rms(x, eps, span))


def dot_each(x: cute.Tensor, weights: list) -> list:
    """A thread's part of the dot product of x with each stream's weight, along its elements."""
    xf = widen(x)
    sums = []
    for weight in weights:
        acc = Float32(0.0)
        for value, w in zip(xf, widen(weight)):
            acc = fma(value, w, acc)
        sums.append(acc)
    return sums


def store_split(sums: list, partials: cute.Tensor, t, split, first, thread, span: Span, streams: int) -> None:
    """Adds up the `dot_each` of one split and stores partials[t, split, first + i] for its i-th value.

    `thread`: of the split's span.threads threads, whole warps, all of which call this. Butterfly over the
    warp, then one thread a value adds the warps' sums in a fixed tree. Uses barrier 1.
    """
    slots = 1 << (len(sums) - 1).bit_length()  # rounded up for the halving butterfly
    total = lanes_sum_each(sums + [Float32(0.0)] * (slots - len(sums)))
    scratch = SmemAllocator().allocate_tensor(Float32, cute.make_layout((span.warps, slots)), 16)
    row = vector.row_of(partials, Int64(t) * SPLITS + split, streams, 4)
    _store_split(total, scratch, row, first, thread, slots, len(sums), span.warps)


@cute.jit
def _store_split(
    total: Float32,
    scratch: cute.Tensor,
    row: cute.Tensor,
    first,
    thread,
    slots: Constexpr,
    values: Constexpr,
    warps: Constexpr,
):
    lane, lanes = cute.arch.lane_idx(), 32 // slots
    # lane l of each warp has the warp's sum of value l // lanes
    if lane % lanes == 0:
        scratch[thread // 32, lane // lanes] = total
    cute.arch.barrier(barrier_id=1, number_of_threads=warps * 32)
    if thread < values:
        row[first + thread] = pairwise_sum([scratch[k, thread] for k in range(warps)])
