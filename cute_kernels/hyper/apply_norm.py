"""HC apply fused with the next norm: one layer boundary in one launch.

    a[t, c]           = 2 * sigmoid(sum over s of partials[t, s, c] / C)
    combined[t, c, i] = act(fma(a[t, c], block[t, i], residual[t, c, i]))
    normed[t, c]      = act(combined[t, c] * rsqrt(mean(combined[t, c]^2) + eps) * (1 + norm_weight[c]))

Shapes      block [T, H] act, residual, combined, normed [T, W] act with W = C*H, partials [T, 8, C] fp32,
            norm_weight [W] act; H a multiple of 8.
Work        one CTA a (row, stream): grid (T, C), the stream one span (device/span.py): at H = 2560, 320
            threads of 8 elements on SM90, 160 of 16 where vectors are 32 bytes. The two steps are those of
            apply.py and norm.py, in the same spans: the same bits as the two launches. combined may be
            residual itself: each element is read and written by one thread.
Bytes       a row: 2H (C times, from L2 after the first) + 2W + 32C read, 4W written; 2W weight bytes once.
Rounding    combined: fp32, once to act. normed: from the *rounded* combined, fp32, once to act.
PDL         norm_weight is loaded before the dependency wait: no predecessor writes it. Everything else
            after it.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32

from cute_kernels.device import args, vector
from cute_kernels.device.pdl import await_predecessors, release_dependents
from cute_kernels.hyper.steps import SPLITS, combine, gemma_rmsnorm, stream_gate, stream_span


class HcApplyNorm:
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
        norm_weight: cute.Tensor,
        combined: cute.Tensor,
        normed: cute.Tensor,
        eps: Float32,
        stream: cuda.CUstream,
    ):
        rows = block.shape[0]
        if rows > 0:
            self.kernel(block, residual, partials, norm_weight, combined, normed, eps).launch(
                grid=(rows, self.streams, 1), block=(self.span.threads, 1, 1), stream=stream, use_pdl=True
            )

    @cute.kernel
    def kernel(
        self,
        block: cute.Tensor,
        residual: cute.Tensor,
        partials: cute.Tensor,
        norm_weight: cute.Tensor,
        combined: cute.Tensor,
        normed: cute.Tensor,
        eps: Float32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        t, c, _ = cute.arch.block_idx()
        span, dtype, width = self.span, residual.element_type, self.streams * self.hidden
        release_dependents()

        w = vector.span_fragment(span, dtype)
        vector.load_span(
            w, vector.row_of(norm_weight, 0, width, self.vec_bytes), c, tid, span, self.vec_bytes
        )
        await_predecessors()
        b, r = vector.span_fragment(span, dtype), vector.span_fragment(span, dtype)
        vector.load_span(
            b, vector.row_of(block, t, self.hidden, self.vec_bytes), 0, tid, span, self.vec_bytes
        )
        vector.load_span(r, vector.row_of(residual, t, width, self.vec_bytes), c, tid, span, self.vec_bytes)
        x = combine(stream_gate(partials, t, c, self.streams), b, r, dtype)
        vector.store_span(x, vector.row_of(combined, t, width, self.vec_bytes), c, tid, span, self.vec_bytes)
        y = gemma_rmsnorm(x, w, eps, span)
        vector.store_span(y, vector.row_of(normed, t, width, self.vec_bytes), c, tid, span, self.vec_bytes)


def build(target: str, *, dtype: str, hidden: int, streams: int, vec_bytes: int):
    """For `streams` streams of `hidden` elements; run-time arguments as `HcApplyNorm.__call__`, no stream."""
    rows, width = args.rows(), streams * hidden
    wide = args.dense(dtype, rows, width, align=vec_bytes)
    return HcApplyNorm(target, hidden, streams, vec_bytes), (
        args.dense(dtype, rows, hidden, align=vec_bytes),
        wide,
        args.dense("fp32", rows, SPLITS, streams),
        args.dense(dtype, width, align=vec_bytes),
        wide,
        wide,
        Float32(1e-6),
        args.current_stream(),
    )
