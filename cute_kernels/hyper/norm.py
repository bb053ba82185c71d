"""Grouped Gemma RMSNorm: each stream of a row normalised on its own.

    out[t, g] = act(x[t, g] * rsqrt(mean(x[t, g]^2) + eps) * (1 + weight[g]))     g < G = W / group_size

Shapes      x, out [T, W] act, weight [W] act; group_size a multiple of 8 that divides W.
Work        one CTA a (row, group): grid (T, G). The group is one span (device/span.py): at 2560, 320
            threads of 8 elements on SM90, 160 of 16 where vectors are 32 bytes. x stays in registers
            between the sum of squares and the product, so it is read once; out may be x itself, since a CTA
            has read its whole group before it writes any of it.
Bytes       a row: 2W read + 2W written; the 2W weight bytes come from L2 after the first row.
Rounding    fp32 throughout, once to act at the store.
Order       the sum of squares runs along a thread's elements, then butterfly, then a fixed tree over the
            warps.
PDL         weight is loaded before the dependency wait: no predecessor writes it. x after it.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32

from cute_kernels.device import args, vector
from cute_kernels.device.pdl import await_predecessors, release_dependents
from cute_kernels.hyper.steps import gemma_rmsnorm, stream_span


class GroupedGemmaRmsnorm:
    """One specialisation: target, row width, group size, vector width."""

    def __init__(self, target: str, width: int, group_size: int, vec_bytes: int):
        self.width, self.vec_bytes = width, vec_bytes
        self.groups = width // group_size
        self.span = stream_span(target, group_size)

    @cute.jit
    def __call__(
        self, x: cute.Tensor, weight: cute.Tensor, out: cute.Tensor, eps: Float32, stream: cuda.CUstream
    ):
        rows = x.shape[0]
        if rows > 0:
            self.kernel(x, weight, out, eps).launch(
                grid=(rows, self.groups, 1), block=(self.span.threads, 1, 1), stream=stream, use_pdl=True
            )

    @cute.kernel
    def kernel(self, x: cute.Tensor, weight: cute.Tensor, out: cute.Tensor, eps: Float32):
        tid, _, _ = cute.arch.thread_idx()
        t, g, _ = cute.arch.block_idx()
        span, dtype = self.span, x.element_type
        release_dependents()

        w = vector.span_fragment(span, dtype)
        vector.load_span(
            w, vector.row_of(weight, 0, self.width, self.vec_bytes), g, tid, span, self.vec_bytes
        )
        await_predecessors()
        v = vector.span_fragment(span, dtype)
        vector.load_span(v, vector.row_of(x, t, self.width, self.vec_bytes), g, tid, span, self.vec_bytes)
        y = gemma_rmsnorm(v, w, eps, span)
        vector.store_span(y, vector.row_of(out, t, self.width, self.vec_bytes), g, tid, span, self.vec_bytes)


def build(target: str, *, dtype: str, width: int, group_size: int, vec_bytes: int):
    """For rows of `width` elements in groups of `group_size`; run-time arguments (x, weight, out, eps)."""
    rows = args.rows()
    return GroupedGemmaRmsnorm(target, width, group_size, vec_bytes), (
        args.dense(dtype, rows, width, align=vec_bytes),
        args.dense(dtype, width, align=vec_bytes),
        args.dense(dtype, rows, width, align=vec_bytes),
        Float32(1e-6),
        args.current_stream(),
    )
