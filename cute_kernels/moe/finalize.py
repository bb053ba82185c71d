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
import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass.memory import SmemAllocator

from cute_kernels.device import args, vector
from cute_kernels.device.math import select
from cute_kernels.device.pdl import await_predecessors, release_dependents
from cute_kernels.moe.steps import Finalize

THREADS = 64


class MoeFinalize:
    """One specialisation: target, hidden size, top-k, shared expert and gate or not, vector width."""

    def __init__(self, target: str, hidden: int, top_k: int, shared: bool, gated: bool, vec_bytes: int):
        self.step = Finalize(target, hidden, top_k, shared, gated, THREADS)
        self.vec_bytes = vec_bytes

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
                grid=(rows, self.step.parts, 1),
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

        step = self.step
        vec = part * THREADS + tid
        active = vec < step.vecs
        vec = select(active, vec, 0)  # an idle thread's copies read nothing, and it stores nothing
        idx, weight = step.routing(permuted_idx, expert_weights, t)
        gate = Float32(1.0)
        if const_expr(step.gated):
            gate = shared_gate[t]
        stage = step.stage(SmemAllocator(), out.element_type)
        step.fetch(stage, expert_out, shared_out, idx, weight, t, tid, vec, active)
        result = step.reduce(stage, weight, gate, tid)
        if active:
            vector.store(result, vector.row_of(out, t, step.hidden, self.vec_bytes), vec, self.vec_bytes)


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
