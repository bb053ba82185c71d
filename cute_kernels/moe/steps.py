"""The rank-local finalize of one vector of a row, written once: alone and fused it gives the same bits."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32
from cutlass.memory import SmemAllocator

from cute_kernels.device import vector
from cute_kernels.device.async_copy import copy16_or_zero, wait_all
from cute_kernels.device.math import fma, select
from cute_kernels.moe import config


class Finalize:
    """A thread's part: one vector of 8 elements on SM90, of 16 where vectors are 32 bytes.

    A row is `vecs` vectors over `parts` CTAs of `threads` threads. The K + 1 vectors of a thread pass through
    shared memory of its own: all in flight at once, no registers, no barrier.
    """

    def __init__(self, target: str, hidden: int, top_k: int, shared: bool, gated: bool, threads: int):
        self.hidden, self.top_k, self.shared, self.gated, self.threads = (
            hidden,
            top_k,
            shared,
            gated,
            threads,
        )
        self.elems = config.elements(target, hidden)
        self.chunks = self.elems // 8  # 16-byte copies a vector
        self.sources = top_k + shared
        self.vecs = hidden // self.elems
        self.parts = -(-self.vecs // threads)

    def routing(self, permuted_idx: cute.Tensor, expert_weights: cute.Tensor, t) -> tuple[list, list]:
        """Row t's K indices and its K weights as fp32: broadcast loads."""
        slots = vector.row_of(permuted_idx, t, self.top_k, 4)
        weights = vector.row_of(expert_weights, t, self.top_k, expert_weights.element_type.width // 8)
        idx = [slots[k] for k in range(self.top_k)]
        return idx, [weights[k].to(Float32) for k in range(self.top_k)]

    def stage(self, smem: SmemAllocator, dtype) -> cute.Tensor:
        """Shared memory for a vector of every source, a thread."""
        shape = (8, self.threads, self.chunks, max(self.sources, 1))
        return smem.allocate_tensor(dtype, cute.make_layout(shape), byte_alignment=16)

    def fetch(
        self,
        stage: cute.Tensor,
        expert_out: cute.Tensor,
        shared_out,
        idx: list,
        weight: list,
        t,
        tid,
        vec,
        active,
    ) -> None:
        """Starts the copies of vector `vec` of all sources; a dropped slot's copy reads nothing and fills
        zeros, and its weight becomes 0."""
        if self.shared:
            self._copy(stage[None, tid, None, self.top_k], shared_out, t, vec, active)
        for k in range(self.top_k):
            kept = (idx[k] >= 0) & (idx[k] < expert_out.shape[0])
            self._copy(stage[None, tid, None, k], expert_out, select(kept, idx[k], 0), vec, kept & active)
            # a dropped slot then adds 0 * 0: its own weight may be NaN
            weight[k] = select(kept, weight[k], Float32(0.0))

    def reduce(self, stage: cute.Tensor, weight: list, gate: Float32, tid) -> cute.Tensor:
        """Waits for the copies; the finalized vector in the activation dtype."""
        wait_all()
        acc = [Float32(0.0)] * self.elems
        for k in range(self.top_k):
            e = self._staged(stage, tid, k)
            for i in range(self.elems):
                acc[i] = fma(e[i], weight[k], acc[i])
        wide = cute.make_rmem_tensor((self.elems,), Float32)
        for i in range(self.elems):
            wide[i] = acc[i]
        result = cute.make_rmem_tensor((self.elems,), stage.element_type)
        result.store(wide.load().to(stage.element_type))  # routed
        if self.shared:
            routed, s = result.load().to(Float32), self._staged(stage, tid, self.top_k)
            for i in range(self.elems):
                wide[i] = fma(gate, s[i], routed[i])  # ungated: 1 * s is exact, so this is routed + shared
            result.store(wide.load().to(stage.element_type))
        return result

    def put(self, stage: cute.Tensor, x: cute.Tensor, tid) -> None:
        """Thread `tid`'s vector to where its first source was, for another thread to `take` after a
        barrier."""
        chunks = cute.make_tensor(x.iterator, cute.make_layout((8, self.chunks)))
        for j in range(self.chunks):
            stage[None, tid, j, 0].store(chunks[None, j].load())

    def take(self, stage: cute.Tensor, tid) -> cute.Tensor:
        """What thread `tid` has `put`."""
        x = cute.make_rmem_tensor((self.elems,), stage.element_type)
        chunks = cute.make_tensor(x.iterator, cute.make_layout((8, self.chunks)))
        for j in range(self.chunks):
            chunks[None, j].store(stage[None, tid, j, 0].load())
        return x

    def _copy(self, slot: cute.Tensor, source: cute.Tensor, row, vec, keep) -> None:
        """Vector `vec` of a row of `source` into a thread's slot of shared memory, or zeros."""
        src = vector.row_of(source, row, self.hidden, 16)
        for j in range(self.chunks):
            copy16_or_zero(
                slot[None, j].iterator, cute.local_tile(src, (8,), (vec * self.chunks + j,)).iterator, keep
            )

    def _staged(self, stage: cute.Tensor, tid, source: int) -> list:
        """A thread's vector of one source, as fp32 values."""
        chunks = [stage[None, tid, j, source].load().to(Float32) for j in range(self.chunks)]
        return [chunk[i] for chunk in chunks for i in range(8)]
