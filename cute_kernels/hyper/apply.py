"""HC apply: the block's output enters every residual stream through that stream's gate.

    a[t, c]      = 2 * sigmoid(sum over s of partials[t, s, c] / C)
    out[t, c, i] = act(fma(a[t, c], block[t, i], residual[t, c, i]))

Shapes      block [T, H] act, residual, out [T, W] act with W = C*H, partials [T, 8, C] fp32; H a multiple
            of 8.
Work        one CTA a (row, stream): grid (T, C). The stream is one span (device/span.py): at H = 2560, 320
            threads of 8 elements on SM90, 160 of 16 where vectors are 32 bytes. Every thread forms the gate
            itself from 8 broadcast loads: cheaper than a barrier. out may be residual itself: each element
            is read and written by one thread.
Bytes       a row: 2H (C times, from L2 after the first) + 2W + 32C read, 2W written.
Rounding    fp32, once to act at the store.
PDL         all inputs are written by predecessors: everything is loaded after the dependency wait.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass.cute as cute

from cute_kernels.device import args, vector
from cute_kernels.device.pdl import await_predecessors, release_dependents
from cute_kernels.hyper.steps import SPLITS, combine, stream_gate, stream_span


class HcApply:
    """One specialisation: target, hidden size, streams, vector width."""

    def __init__(self, target: str, hidden: int, streams: int, vec_bytes: int):
        self.hidden, self.streams, self.vec_bytes = hidden, streams, vec_bytes
        self.span = stream_span(target, hidden)

    @cute.jit
    def __call__(
        self,
        block: cute.Tensor,
        residual: cute.Tensor,
        partials: cute.Tensor,
        out: cute.Tensor,
        stream: cuda.CUstream,
    ):
        rows = block.shape[0]
        if rows > 0:
            self.kernel(block, residual, partials, out).launch(
                grid=(rows, self.streams, 1), block=(self.span.threads, 1, 1), stream=stream, use_pdl=True
            )

    @cute.kernel
    def kernel(self, block: cute.Tensor, residual: cute.Tensor, partials: cute.Tensor, out: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        t, c, _ = cute.arch.block_idx()
        span, dtype, width = self.span, residual.element_type, self.streams * self.hidden
        release_dependents()

        await_predecessors()
        b, r = vector.span_fragment(span, dtype), vector.span_fragment(span, dtype)
        vector.load_span(
            b, vector.row_of(block, t, self.hidden, self.vec_bytes), 0, tid, span, self.vec_bytes
        )
        vector.load_span(r, vector.row_of(residual, t, width, self.vec_bytes), c, tid, span, self.vec_bytes)
        combined = combine(stream_gate(partials, t, c, self.streams), b, r, dtype)
        vector.store_span(
            combined, vector.row_of(out, t, width, self.vec_bytes), c, tid, span, self.vec_bytes
        )


def build(target: str, *, dtype: str, hidden: int, streams: int, vec_bytes: int):
    """For `streams` streams of `hidden` elements; run-time arguments (block, residual, partials, out)."""
    rows, width = args.rows(), streams * hidden
    return HcApply(target, hidden, streams, vec_bytes), (
        args.dense(dtype, rows, hidden, align=vec_bytes),
        args.dense(dtype, rows, width, align=vec_bytes),
        args.dense("fp32", rows, SPLITS, streams),
        args.dense(dtype, rows, width, align=vec_bytes),
        args.current_stream(),
    )
