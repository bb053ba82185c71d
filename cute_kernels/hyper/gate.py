"""HC gate: eight partial dot products of a normed row with each stream's inject weight.

    partials[t, s, c] = dot(normed[t, s*W/8 : (s+1)*W/8], inject_weight[c, same])        s = 0..7, c = 0..C-1

Shapes      normed [T, W] act, inject_weight [C, W] act, partials [T, 8, C] fp32; W a multiple of 64.
Work        one CTA a (row, split): grid (T, 8). A split is one span (device/span.py): at W = 10240, 160
            threads of 8 elements on SM90, 96 of 16 (the last 16 idle) where vectors are 32 bytes. A thread
            accumulates all C streams, so the row is read once. Butterfly over the warp, then the first C
            threads add the warps' sums in a fixed tree.
Bytes       a row: 2W read + 32C written; the 2CW weight bytes come from L2 after the first row.
Rounding    none but fp32 arithmetic: products of 16-bit values are exact in fp32 and added by fma.
Order       no atomics, no workspace; the order of the sums depends on W, C and the target alone.
PDL         inject_weight is loaded before the dependency wait: no predecessor writes it. normed after it.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute

from cute_kernels.device import args, vector
from cute_kernels.device.pdl import await_predecessors, release_dependents
from cute_kernels.hyper.steps import SPLITS, dot_each, split_span, store_split


class HcGate:
    """One specialisation: target, row width, streams, vector width."""

    def __init__(self, target: str, width: int, streams: int, vec_bytes: int):
        self.width, self.streams, self.vec_bytes = width, streams, vec_bytes
        self.span = split_span(target, width)

    @cute.jit
    def __call__(
        self, normed: cute.Tensor, inject_weight: cute.Tensor, partials: cute.Tensor, stream: cuda.CUstream
    ):
        rows = normed.shape[0]
        if rows > 0:
            self.kernel(normed, inject_weight, partials).launch(
                grid=(rows, SPLITS, 1), block=(self.span.threads, 1, 1), stream=stream, use_pdl=True
            )

    @cute.kernel
    def kernel(self, normed: cute.Tensor, inject_weight: cute.Tensor, partials: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        t, s, _ = cute.arch.block_idx()
        span = self.span
        release_dependents()

        weights = []
        for c in cutlass.range_constexpr(self.streams):
            w = vector.span_fragment(span, inject_weight.element_type)
            vector.load_span(
                w, vector.row_of(inject_weight, c, self.width, self.vec_bytes), s, tid, span, self.vec_bytes
            )
            weights.append(w)
        await_predecessors()
        x = vector.span_fragment(span, normed.element_type)
        vector.load_span(
            x, vector.row_of(normed, t, self.width, self.vec_bytes), s, tid, span, self.vec_bytes
        )
        store_split(dot_each(x, weights), partials, t, s, 0, tid, span, self.streams)


def build(target: str, *, dtype: str, width: int, streams: int, vec_bytes: int):
    """For `streams` streams, rows of `width`; run-time arguments (normed, inject_weight, partials)."""
    rows = args.rows()
    return HcGate(target, width, streams, vec_bytes), (
        args.dense(dtype, rows, width, align=vec_bytes),
        args.dense(dtype, streams, width, align=vec_bytes),
        args.dense("fp32", rows, SPLITS, streams),
        args.current_stream(),
    )
