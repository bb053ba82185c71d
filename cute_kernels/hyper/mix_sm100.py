"""The matrix products of the HC mix by tcgen05.mma, for SM100 and SM103: weights are the M side, rows of x
the N side.

    warps 0 to 3    take the sums out of tensor memory, 16 rows of a tile of 64 each
    warp 4          owns the tensor memory and issues the MMAs, M = 64, N = bucket, K = 16
    warp 5          issues the copies (mix.py)

Operands are slabs of 64 elements of K with the 128-byte swizzle, K-major, which is how TMA leaves them. A
tile of 64 rows may be larger than the rows that a CTA owns: the MMA then also multiplies what lies behind
them in shared memory, into rows of tensor memory that nobody takes out. Tensor memory holds the sums of the
down projection in its first N columns, and tile i of the up projection in the N columns behind tile i - 1.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

from cute_kernels.hyper.mix_plan import SLAB, MixPlan

TILE = 64
MMA_WARP = 4


def _fence(which: str) -> None:
    """Orders tcgen05 operations with a barrier: "after_thread_sync" or "before_thread_sync"."""
    cute.arch.inline_ptx(f"tcgen05.fence::{which};")


def load_rows(address: Int32, columns: int) -> tuple:
    """A warp's 16 rows of tensor memory, waited for: value 4*j + 2*h + i of a lane is row 8*h + lane / 4,
    column 8*j + 2*(lane % 4) + i. One piece of assembly, or the compiler moves registers before the wait.
    address: the lane in its upper half, the column in its lower one."""
    count = columns // 2
    registers = ", ".join(f"{{$w{i}}}" for i in range(count))
    return cute.arch.inline_ptx(
        f"tcgen05.ld.sync.aligned.16x256b.x{columns // 8}.b32 {{{registers}}}, [{{$r0}}]; "
        "tcgen05.wait::ld.sync.aligned;",
        write_only_types=[Float32] * count,
        read_only_args=[address],
    )


class TensorMma:
    """One plan's products."""

    def __init__(self, plan: MixPlan):
        self.plan = plan
        used = plan.bucket * (1 + plan.up_tiles)
        self.allocated = max(32, 1 << (used - 1).bit_length())

    def product(self, dtype) -> cute.TiledMma:
        """M = 64 by N = bucket, both operands from shared memory, K-major."""
        shape = (TILE, self.plan.bucket, 16)
        majors = OperandMajorMode.K, OperandMajorMode.K
        op = tcgen05.MmaF16BF16Op(
            dtype, Float32, shape, tcgen05.CtaGroup.ONE, tcgen05.OperandSource.SMEM, *majors
        )
        return cute.make_tiled_mma(op)

    def slabs(self, address: cute.Pointer, rows: int, count: int, stride: int, dtype) -> cute.Tensor:
        """Slabs as the MMA's operand: ((rows, 16), 1, steps of K, slabs). stride: rows between slabs."""
        layout = cute.make_layout(
            ((rows, 16), 1, SLAB // 16, count), stride=((SLAB, 1), 0, 16, stride * SLAB)
        )
        return cute.make_tensor(cute.recast_ptr(address, cute.make_swizzle(3, 4, 3), dtype), layout)

    def sums(self, mma: cute.TiledMma, smem, tile: int) -> cute.Tensor:
        """The accumulators in tensor memory: tile 0 is the down projection's, those behind it the up
        projection's."""
        like = mma.make_fragment_C(mma.partition_shape_C((TILE, self.plan.bucket)))
        return cute.make_tensor(smem.accumulators + tile * self.plan.bucket, like.layout)

    @cute.jit
    def start(self, smem, warp):
        """Allocates tensor memory; its address goes to shared memory."""
        if warp == MMA_WARP:
            cute.arch.alloc_tmem(self.allocated, smem.tensor_memory)
            cute.arch.relinquish_tmem_alloc_permit()

    def started(self, smem) -> None:
        """After a barrier of the CTA: everybody learns the address."""
        _fence("after_thread_sync")
        smem.accumulators = cute.arch.retrieve_tmem_ptr(Float32, 16, smem.tensor_memory)

    @cute.jit
    def end(self, smem, warp):
        """After a barrier of the CTA behind the last load."""
        if warp == MMA_WARP:
            _fence("after_thread_sync")
            cute.arch.dealloc_tmem(smem.accumulators, self.allocated)

    def load(self, normed: cute.Tensor, first_slab, warp, lane) -> list:
        """Nothing: the activations pass through shared memory."""
        return []

    def fragments(self, loaded: list, lane) -> list:
        return []

    def hold(self, smem, warp, lane) -> list:
        """Nothing: the MMA reads weights from shared memory."""
        return []

    @cute.jit
    def down(self, smem, held: list, warp, lane):
        """The sums over the CTA's slabs, into smem.part[:, :, 0]."""
        p = self.plan
        if warp == MMA_WARP:
            self.issue_down(smem)
        if warp < 4:
            cute.arch.mbarrier_wait(smem.down_done, 0)
            self.take(smem, 0, smem.part, 0, p.down_rows)

    def issue_down(self, smem) -> None:
        p = self.plan
        mma = self.product(smem.dtype)
        a = mma.make_fragment_A(self.slabs(smem.pool, TILE, p.down_slabs, p.down_stride, smem.dtype))
        b = mma.make_fragment_B(self.slabs(smem.x_pointer, p.bucket, p.down_slabs, p.bucket, smem.dtype))
        acc = self.sums(mma, smem, 0)
        for s in range(p.down_slabs):
            cute.arch.mbarrier_wait(smem.bars + s, 0)
            if s % p.x_box == 0:
                cute.arch.mbarrier_wait(smem.x_bars + s // p.x_box, 0)
            if s == 0:
                _fence("after_thread_sync")
            for k in range(SLAB // 16):
                mma.set(tcgen05.Field.ACCUMULATE, s + k > 0)
                cute.gemm(mma, acc, a[None, None, k, s], b[None, None, k, s], acc)
        self.commit(smem.down_done)

    @cute.jit
    def up(self, smem, held: list, warp, lane):
        """The products with the inner activations, into smem.sums[:, :, 0]."""
        p = self.plan
        if warp == MMA_WARP:
            self.issue_up(smem)
        if warp < 4:
            cute.arch.mbarrier_wait(smem.up_done, 0)
            for tile in cutlass.range_constexpr(p.up_tiles):
                rows = min(TILE, p.up_rows - tile * TILE)
                self.take(smem, 1 + tile, smem.sums, tile * TILE, rows)

    def issue_up(self, smem) -> None:
        p = self.plan
        mma = self.product(smem.dtype)
        _fence("after_thread_sync")
        b = mma.make_fragment_B(self.slabs(smem.inner, p.bucket, p.up_slabs, p.bucket, smem.dtype))
        for tile in range(p.up_tiles):
            address = smem.up_pointer + tile * TILE * SLAB * 2
            a = mma.make_fragment_A(self.slabs(address, TILE, p.up_slabs, p.up_rows, smem.dtype))
            acc = self.sums(mma, smem, 1 + tile)
            for step in range(p.up_steps):
                k, s = step % (SLAB // 16), step // (SLAB // 16)
                mma.set(tcgen05.Field.ACCUMULATE, step > 0)
                cute.gemm(mma, acc, a[None, None, k, s], b[None, None, k, s], acc)
        self.commit(smem.up_done)

    def commit(self, barrier) -> None:
        """The barrier completes when the MMAs issued so far have."""
        with cute.arch.elect_one():
            tcgen05.commit(barrier)

    @cute.jit
    def take(
        self,
        smem,
        tile: cutlass.Constexpr,
        to: cute.Tensor,
        first: cutlass.Constexpr,
        rows: cutlass.Constexpr,
    ):
        """The first `rows` rows of a tile, from tensor memory to rows first, first + 1, ... of `to`."""
        tid, _, _ = cute.arch.thread_idx()
        warp, lane = tid // 32, tid % 32
        _fence("after_thread_sync")
        taken = load_rows(
            smem.accumulators.toint() + tile * self.plan.bucket + (warp << 21), self.plan.bucket
        )
        for half in cutlass.range_constexpr(2):
            row = warp * 16 + half * 8 + lane // 4
            if row < rows:
                for i in cutlass.range_constexpr(self.plan.bucket // 4):
                    column = i // 2 * 8 + 2 * (lane % 4) + i % 2
                    to[first + row, column, 0] = taken[i // 2 * 4 + half * 2 + i % 2]
        _fence("before_thread_sync")
