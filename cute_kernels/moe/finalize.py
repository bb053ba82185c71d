"""Rank-local MoE finalize: gather a token's expert rows, weight and sum them, add the gated shared expert.

    acc     = fma(expert_out[idx[t, k]], w[t, k], acc)      k = 0..K-1, skipping idx < 0 and idx >= P
    routed  = bf16(acc)
    out[t]  = bf16(fma(gate[t], shared[t], routed))         ungated: gate = 1; routed, without shared

Shapes      expert_out [P, H] bf16, permuted_idx [T*K] int32, expert_weights [T, K] bf16 or fp32, shared_out
            [T, H] bf16 or absent, shared_gate [T] fp32 or absent, out [T, H] bf16; H a multiple of 8.
Work        grid (T, parts): a CTA of 64 threads owns 64 vectors of one row (8 elements each on SM90, 16
            where vectors are 32 bytes), so one token at H = 2560 spreads over 5 CTAs (3). Every thread
            reads the K indices and weights itself (broadcast loads), then has all its K + 1 vectors in
            flight at once by cp.async; a dropped slot's copy fills zeros and reads nothing. out may be
            shared_out itself: each element is read and written by one thread.
Bytes       a row: (valid slots + shared + out) * 2H + K * (4 + weight bytes), the latter once a CTA.
Rounding    twice, both deliberate: routed to bf16, then the sum with the shared expert to bf16.
Order       k ascending in one fma chain an element; no atomics.
PDL         predecessors write every input: all loads stand after the dependency wait.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass.memory import SmemAllocator

from cute_kernels.device import args, vector
from cute_kernels.device.async_copy import copy16_or_zero, wait_all
from cute_kernels.device.math import fma, select
from cute_kernels.device.pdl import await_predecessors, release_dependents

THREADS = 64


class MoeFinalize:
    """One specialisation: target, hidden size, top-k, shared expert and gate or not, vector width."""

    def __init__(self, target: str, hidden: int, top_k: int, shared: bool, gated: bool, vec_bytes: int):
        self.hidden, self.top_k, self.shared, self.gated, self.vec_bytes = (
            hidden,
            top_k,
            shared,
            gated,
            vec_bytes,
        )
        self.elems = 8 if target == "sm_90a" or hidden % 16 else 16
        self.chunks = self.elems // 8  # 16-byte copies a vector
        self.sources = top_k + shared
        self.vecs = hidden // self.elems
        self.parts = -(-self.vecs // THREADS)

    @cute.jit
    def __call__(
        self,
        expert_out: cute.Tensor,
        permuted_idx: cute.Tensor,
        expert_weights: cute.Tensor,
        shared_out: cute.Tensor | None,
        shared_gate: cute.Tensor | None,
        out: cute.Tensor,
        stream: cuda.CUstream,
    ):
        rows = out.shape[0]
        if rows > 0:
            self.kernel(expert_out, permuted_idx, expert_weights, shared_out, shared_gate, out).launch(
                grid=(rows, self.parts, 1),
                block=(THREADS, 1, 1),
                min_blocks_per_mp=1,  # or the compiler, after occupancy, serialises the loads
                stream=stream,
                use_pdl=True,
            )

    @cute.kernel
    def kernel(
        self,
        expert_out: cute.Tensor,
        permuted_idx: cute.Tensor,
        expert_weights: cute.Tensor,
        shared_out: cute.Tensor | None,
        shared_gate: cute.Tensor | None,
        out: cute.Tensor,
    ):
        tid, _, _ = cute.arch.thread_idx()
        t, part, _ = cute.arch.block_idx()
        release_dependents()
        await_predecessors()

        dtype = out.element_type
        vec = part * THREADS + tid
        active = vec < self.vecs
        vec = select(active, vec, 0)  # an idle thread's copies read nothing, and it stores nothing
        slots = vector.row_of(permuted_idx, t, self.top_k, 4)
        weights = vector.row_of(expert_weights, t, self.top_k, expert_weights.element_type.width // 8)
        idx = [slots[k] for k in range(self.top_k)]
        weight = [weights[k].to(Float32) for k in range(self.top_k)]
        gate = Float32(1.0)
        if const_expr(self.gated):
            gate = shared_gate[t]

        # A thread's vectors pass through shared memory of its own: K + 1 in flight, no registers, no barrier.
        stage = SmemAllocator().allocate_tensor(
            dtype, cute.make_layout((8, THREADS, self.chunks, self.sources)), byte_alignment=16
        )
        if const_expr(self.shared):
            self.fetch(stage[None, tid, None, self.top_k], shared_out, t, vec, active)
        for k in cutlass.range_constexpr(self.top_k):
            kept = (idx[k] >= 0) & (idx[k] < expert_out.shape[0])
            self.fetch(stage[None, tid, None, k], expert_out, select(kept, idx[k], 0), vec, kept & active)
            # a dropped slot then adds 0 * 0: its own weight may be NaN
            weight[k] = select(kept, weight[k], Float32(0.0))
        wait_all()

        acc = [Float32(0.0)] * self.elems
        for k in cutlass.range_constexpr(self.top_k):
            e = self.staged(stage, tid, k)
            for i in cutlass.range_constexpr(self.elems):
                acc[i] = fma(e[i], weight[k], acc[i])
        wide = cute.make_rmem_tensor((self.elems,), Float32)
        for i in cutlass.range_constexpr(self.elems):
            wide[i] = acc[i]
        result = cute.make_rmem_tensor((self.elems,), dtype)
        result.store(wide.load().to(dtype))  # routed
        if const_expr(self.shared):
            routed, s = result.load().to(Float32), self.staged(stage, tid, self.top_k)
            for i in cutlass.range_constexpr(self.elems):
                wide[i] = fma(gate, s[i], routed[i])  # ungated: 1 * s is exact, so this is routed + shared
            result.store(wide.load().to(dtype))
        if active:
            vector.store(result, vector.row_of(out, t, self.hidden, self.vec_bytes), vec, self.vec_bytes)

    def fetch(self, slot: cute.Tensor, source: cute.Tensor, row, vec, keep) -> None:
        """Vector `vec` of a row of `source` into a thread's slot of shared memory, or zeros."""
        src = vector.row_of(source, row, self.hidden, 16)
        for j in range(self.chunks):
            copy16_or_zero(
                slot[None, j].iterator, cute.local_tile(src, (8,), (vec * self.chunks + j,)).iterator, keep
            )

    def staged(self, stage: cute.Tensor, tid, source: int) -> list:
        """A thread's vector of one source, as fp32 values."""
        chunks = [stage[None, tid, j, source].load().to(Float32) for j in range(self.chunks)]
        return [chunk[i] for chunk in chunks for i in range(8)]


def build(
    target: str, *, hidden: int, top_k: int, weight_dtype: str, shared: bool, gated: bool, vec_bytes: int
):
    """For `top_k` slots of `hidden` elements; run-time arguments as `MoeFinalize.__call__`, no stream."""
    rows = args.rows()
    row = args.dense("bf16", rows, hidden, align=vec_bytes)
    return MoeFinalize(target, hidden, top_k, shared, gated, vec_bytes), (
        args.dense("bf16", args.rows(), hidden, align=vec_bytes),
        args.dense("int32", args.rows()),
        args.dense(weight_dtype, rows, top_k),
        row if shared else None,
        args.dense("fp32", rows) if gated else None,
        row,
        args.current_stream(),
    )
