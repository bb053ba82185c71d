"""HC boundary: apply, the next norm, and the next gate's partial logits in one launch.

    combined[t, c], normed[t, c]   as apply_norm.py
    next_partials[t, s, k]         = dot(normed[t, s*W/8 : (s+1)*W/8], inject_weight[k, same])   as gate.py

Shapes      block [T, H] act, residual, combined, normed [T, W] act with W = C*H, partials, next_partials
            [T, 8, C] fp32, norm_weight [W], inject_weight [C, W] act; H and W / 8 multiples of 8, C a
            divisor of 8, H at most 4096 and W at most 16384: a thread owns one vector of each span.
Work        one CTA a (row, split, half of the gate's streams): grid (T, 8, 2). A stream is 8 / C splits, so
            a CTA forms combined and its norm over the split's whole stream, as the separate kernels do, in
            their spans (device/span.py); then the gate's part of its own split and streams. Forming a
            stream several times over costs less than what an SM has to take in otherwise: with one CTA a
            stream 35 KB reach each of four SMs at C = 4, H = 2560, here 17.5 KB each of 16 (one row on an
            H200: 1.2 against 1.35 us hot, some 2 % cold).
            On SM90 at H = 2560, C = 4 the spans nest: 320 threads of 8 elements are two splits of 160, and
            a thread takes its normed values to the gate in registers. Elsewhere (where vectors are 32
            bytes, 160 threads of 16 elements, and 96 a split, of which the last 16 idle) the row of normed
            values passes through shared memory. Every step is that of the separate kernels: the same bits.
Bytes       a row: 2H + 2W + 32C read, 4W + 32C written; 2W + 2CW weight bytes once.
Rounding    combined: fp32, once to act. normed: from the *rounded* combined, once to act. The gate reads the
            *rounded* normed; fp32.
PDL         norm_weight and inject_weight are loaded before the dependency wait: no predecessor writes them.
            Everything else after it. Several CTAs read what one of them writes next to: no output may be an
            input.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass.memory import SmemAllocator

from cute_kernels.device import args, vector
from cute_kernels.device.pdl import await_predecessors, release_dependents
from cute_kernels.device.span import Span
from cute_kernels.hyper.steps import (
    SPLITS,
    combine,
    dot_each,
    gemma_scale,
    inverse_rms,
    split_span,
    store_split,
    stream_gate,
    stream_span,
)


class HcBoundary:
    """One specialisation: target, hidden size, streams, vector width."""

    def __init__(self, target: str, hidden: int, streams: int, vec_bytes: int):
        self.hidden, self.streams, self.vec_bytes = hidden, streams, vec_bytes
        self.splits = SPLITS // streams  # of one stream
        self.halves = 2 if streams > 1 else 1
        stream, split = stream_span(target, hidden), split_span(target, streams * hidden)
        if self.splits * streams != SPLITS or stream.passes > 1 or split.passes > 1:
            raise ValueError(f"hidden, streams: got {hidden}, {streams}; see Shapes")
        self.nested = stream.elems == split.elems and stream.exact and split.exact
        # Threads beyond the stream's hold zeros, which change no sum.
        self.span = Span(hidden, stream.elems, max(stream.threads, split.threads))
        self.split = split

    @cute.jit
    def __call__(
        self,
        block: cute.Tensor,
        residual: cute.Tensor,
        partials: cute.Tensor,
        norm_weight: cute.Tensor,
        inject_weight: cute.Tensor,
        combined: cute.Tensor,
        normed: cute.Tensor,
        next_partials: cute.Tensor,
        eps: Float32,
        stream: cuda.CUstream,
    ):
        rows = block.shape[0]
        if rows > 0:
            self.kernel(
                block, residual, partials, norm_weight, inject_weight, combined, normed, next_partials, eps
            ).launch(
                grid=(rows, SPLITS, self.halves),
                block=(self.span.threads, 1, 1),
                stream=stream,
                use_pdl=True,
            )

    @cute.kernel
    def kernel(
        self,
        block: cute.Tensor,
        residual: cute.Tensor,
        partials: cute.Tensor,
        norm_weight: cute.Tensor,
        inject_weight: cute.Tensor,
        combined: cute.Tensor,
        normed: cute.Tensor,
        next_partials: cute.Tensor,
        eps: Float32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        t, s, half = cute.arch.block_idx()
        span, split, dtype = self.span, self.split, residual.element_type
        width, vec_bytes = self.streams * self.hidden, self.vec_bytes
        c, within = s // self.splits, s % self.splits
        # the split's threads: those that own its elements if the spans nest, else the first ones
        part = tid - within * split.threads if const_expr(self.nested) else tid
        mine = (part >= 0) & (part < split.threads)
        per = self.streams // self.halves
        release_dependents()

        w = vector.span_fragment(span, dtype)
        weights = [vector.span_fragment(split, dtype) for _ in range(per)]
        scales = mine if const_expr(self.nested) else True  # has values to scale by the norm weight
        if scales:
            vector.load_span(w, vector.row_of(norm_weight, 0, width, vec_bytes), c, tid, span, vec_bytes)
        if mine:
            for k in cutlass.range_constexpr(per):
                row = vector.row_of(inject_weight, half * per + k, width, vec_bytes)
                vector.load_span(weights[k], row, s, part, split, vec_bytes)
        await_predecessors()
        b, r = vector.span_fragment(span, dtype), vector.span_fragment(span, dtype)
        vector.load_span(b, vector.row_of(block, t, self.hidden, vec_bytes), 0, tid, span, vec_bytes)
        vector.load_span(r, vector.row_of(residual, t, width, vec_bytes), c, tid, span, vec_bytes)
        x = combine(stream_gate(partials, t, c, self.streams), b, r, dtype)

        # one CTA stores each element: of a split where spans nest, else of a stream
        stores = (half == 0) & (mine if const_expr(self.nested) else within == 0)
        if stores:
            row = vector.row_of(combined, t, width, vec_bytes)
            vector.store_span(x, row, c, tid, span, vec_bytes)
        scale = inverse_rms(x, eps, span)
        row = vector.row_of(normed, t, width, vec_bytes)
        if const_expr(self.nested):
            if mine:
                y = gemma_scale(x, w, scale)
                if half == 0:
                    vector.store_span(y, row, c, tid, span, vec_bytes)
                self.gate(y, weights, next_partials, t, s, half * per, part)
        else:
            y = gemma_scale(x, w, scale)
            if stores:
                vector.store_span(y, row, c, tid, span, vec_bytes)
            values = SmemAllocator().allocate_tensor(dtype, cute.make_layout((self.hidden,)), 32)
            if tid < span.vecs:
                cute.autovec_copy(y[None, 0], cute.local_tile(values, (span.elems,), (tid,)))
            cute.arch.sync_threads()
            if mine:
                z = vector.span_fragment(split, dtype)
                z.fill(0)
                if part < split.vecs:
                    at = within * split.vecs + part
                    cute.autovec_copy(cute.local_tile(values, (split.elems,), (at,)), z[None, 0])
                self.gate(z, weights, next_partials, t, s, half * per, part)

    def gate(self, y, weights: list, next_partials: cute.Tensor, t, s, first, part) -> None:
        """The next gate's partial logits of the CTA's split and streams; by the split's threads."""
        store_split(dot_each(y, weights), next_partials, t, s, first, part, self.split, self.streams)


def build(target: str, *, dtype: str, hidden: int, streams: int, vec_bytes: int):
    """For `streams` streams of `hidden` elements; run-time arguments as `HcBoundary.__call__`, no stream."""
    rows, width = args.rows(), streams * hidden
    wide = args.dense(dtype, rows, width, align=vec_bytes)
    partials = args.dense("fp32", rows, SPLITS, streams)
    return HcBoundary(target, hidden, streams, vec_bytes), (
        args.dense(dtype, rows, hidden, align=vec_bytes),
        wide,
        partials,
        args.dense(dtype, width, align=vec_bytes),
        args.dense(dtype, streams, width, align=vec_bytes),
        wide,
        wide,
        partials,
        Float32(1e-6),
        args.current_stream(),
    )
