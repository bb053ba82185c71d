"""The shared expert's gate, in FP32 to the end.

    out[t] = sigmoid(dot(x[t], weight))

Shapes      x [T, H] act, weight [H] act, out [T] fp32; H a multiple of 8.
Work        one CTA a row: grid (T). The row is one span (device/span.py): at H = 2560, 320 threads of 8
            elements on SM90, 160 of 16 where vectors are 32 bytes.
Bytes       a row: 2H read + 4 written; the 2H weight bytes come from L2 after the first row.
Rounding    none but fp32 arithmetic; never rounded to act.
Order       fma along a thread's elements, butterfly over the warp, a fixed tree over the warps.
PDL         weight is loaded before the dependency wait: no predecessor writes it. x after it.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32

from cute_kernels.device import args, vector
from cute_kernels.device.math import fma, sigmoid
from cute_kernels.device.pdl import await_predecessors, release_dependents
from cute_kernels.device.reduce import cta_sum, warp_scratch
from cute_kernels.device.span import Span

MAX_THREADS = 512


class SharedGate:
    """One specialisation: target, hidden size, vector width."""

    def __init__(self, target: str, hidden: int, vec_bytes: int):
        self.hidden, self.vec_bytes = hidden, vec_bytes
        self.span = Span.of(target, hidden, MAX_THREADS)

    @cute.jit
    def __call__(self, x: cute.Tensor, weight: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
        rows = x.shape[0]
        if rows > 0:
            self.kernel(x, weight, out).launch(
                grid=(rows, 1, 1), block=(self.span.threads, 1, 1), stream=stream, use_pdl=True
            )

    @cute.kernel
    def kernel(self, x: cute.Tensor, weight: cute.Tensor, out: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        t, _, _ = cute.arch.block_idx()
        span, dtype = self.span, x.element_type
        release_dependents()

        w = vector.span_fragment(span, dtype)
        vector.load_span(
            w, vector.row_of(weight, 0, self.hidden, self.vec_bytes), 0, tid, span, self.vec_bytes
        )
        await_predecessors()
        v = vector.span_fragment(span, dtype)
        vector.load_span(v, vector.row_of(x, t, self.hidden, self.vec_bytes), 0, tid, span, self.vec_bytes)

        xf, wf = v.load().to(Float32), w.load().to(Float32)
        dot = Float32(0.0)
        for i in cutlass.range_constexpr(span.elems * span.passes):
            dot = fma(xf[i], wf[i], dot)
        dot = cta_sum(dot, warp_scratch(span.warps), span.warps)
        if tid == 0:
            out[t] = sigmoid(dot)


def build(target: str, *, dtype: str, hidden: int, vec_bytes: int):
    """The gate for rows of `hidden` elements; run-time arguments (x, weight, out)."""
    rows = args.rows()
    return SharedGate(target, hidden, vec_bytes), (
        args.dense(dtype, rows, hidden, align=vec_bytes),
        args.dense(dtype, hidden, align=vec_bytes),
        args.dense("fp32", rows),
        args.current_stream(),
    )
