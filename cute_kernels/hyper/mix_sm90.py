"""The matrix products of the HC mix by mma.sync, for SM90: weights are the M side, rows of x the N side.

A warp takes whole slabs of K of the down projection, and one tile of 16 rows and one part of K of the up
projection. Weights of the up projection are in registers before the inner activations arrive.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.device import vector
from cute_kernels.device.math import select
from cute_kernels.device.warp_mma import ldmatrix4, mma16816
from cute_kernels.hyper.mix_plan import SLAB, MixPlan


def swizzled(base: Int32, row, chunk) -> Int32:
    """The address of a 16-byte chunk of a 128-byte row, rows counted from a multiple of 1024 bytes."""
    return base + row * 128 + ((chunk ^ (row % 8)) * 16)


def transposed(values: list, quarter) -> list:
    """Of four lanes with four values each, value i of lane j becomes value j of lane i."""
    for bit in (1, 2):
        upper = (quarter & bit) != 0
        for i in (0, 1, 2, 3):
            if not i & bit:
                sent = select(upper, values[i], values[i | bit])
                received = cute.arch.shuffle_sync_bfly(sent, offset=bit)
                values[i] = select(upper, received, values[i])
                values[i | bit] = select(upper, values[i | bit], received)
    return values


class WarpMma:
    """One plan's products."""

    def __init__(self, plan: MixPlan):
        self.plan = plan
        self.tiles = plan.bucket // 8
        self.down_tiles = -(-plan.down_rows // 16)
        self.per_warp = -(-plan.down_slabs // plan.warps)
        self.exact = plan.down_slabs % plan.warps == 0
        self.steps = plan.up_steps // plan.parts

    def start(self, smem, warp) -> None:
        """Nothing to set up."""

    started = end = lambda self, *args: None

    def load(self, normed: cute.Tensor, first_slab, warp, lane) -> list:
        """Starts to load a warp's slabs of x, 16 bytes a lane. Columns past T repeat the last row: they are
        computed and never looked at."""
        p = self.plan
        if p.staged:
            return []
        rows, quarter = normed.shape[0], lane % 4
        row = vector.row_of(normed, select(lane // 4 < rows, lane // 4, rows - 1), p.width, 16)
        loaded = []
        for j in range(self.per_warp):
            slab = warp + j * p.warps
            if not self.exact:
                slab = select(slab < p.down_slabs, slab, 0)
            for half in range(2):
                chunk = cute.make_rmem_tensor((8,), normed.element_type)
                vector.load(chunk, row, (first_slab + slab) * 8 + half * 4 + quarter, 16)
                loaded.append(cute.recast_tensor(chunk, Int32))
        return loaded

    def fragments(self, loaded: list, lane) -> list:
        """B fragments of what was loaded: four lanes exchange their chunks."""
        found = []
        for words in loaded:
            pairs = transposed([words[i] for i in range(4)], lane % 4)
            found += [(pairs[0], pairs[1]), (pairs[2], pairs[3])]
        return found

    @cute.jit
    def down(self, smem, held: list, warp, lane):
        """This warp's sums over its slabs, into smem.part[:, :, warp]."""
        p, part = self.plan, smem.part
        acc = cute.make_rmem_tensor((4, self.tiles, self.down_tiles), Float32)
        acc.fill(0.0)
        for j in cutlass.range_constexpr(self.per_warp):
            slab = warp + j * p.warps
            if const_expr(self.exact):
                self.await_slab(smem, slab)
                self.down_slab(smem, held[j * 4 : j * 4 + 4], acc, slab, lane)
            else:
                if slab < p.down_slabs:
                    self.await_slab(smem, slab)
                    self.down_slab(smem, held[j * 4 : j * 4 + 4], acc, slab, lane)
        cute.arch.sync_threads()  # all weights are read: the sums take their place
        for m in cutlass.range_constexpr(self.down_tiles):
            for half in cutlass.range_constexpr(2):
                row = m * 16 + half * 8 + lane // 4
                if (row < p.down_rows) & (warp < p.splits):
                    for t in cutlass.range_constexpr(self.tiles):
                        for i in cutlass.range_constexpr(2):
                            part[row, t * 8 + 2 * (lane % 4) + i, warp] = acc[2 * half + i, t, m]

    def await_slab(self, smem, slab) -> None:
        cute.arch.mbarrier_wait(smem.bars + slab, 0)
        if self.plan.staged:
            cute.arch.mbarrier_wait(smem.x_bars + slab // self.plan.x_box, 0)

    def down_slab(self, smem, held: list, acc: cute.Tensor, slab, lane) -> None:
        """Adds one slab of K."""
        p = self.plan
        for s in range(SLAB // 16):
            b = self.columns(smem.x_base, slab * p.bucket, s, lane) if p.staged else [held[s]]
            for m in range(self.down_tiles):
                row = m * 16 + lane % 16
                if p.down_rows % 16:
                    row = select(row < p.down_rows, row, p.down_rows - 1)
                a = ldmatrix4(swizzled(smem.pool_base, slab * p.down_rows + row, 2 * s + lane // 16))
                for t in range(self.tiles):
                    self.multiply(acc, t, m, a, b[t], smem.dtype)

    def columns(self, base: Int32, first_row, step, lane) -> list:
        """B fragments of one step of K for all columns of a slab, two tiles of eight at a time."""
        found = []
        for t in range(self.tiles // 2):
            row = t * 16 + lane // 16 * 8 + lane % 8
            r = ldmatrix4(swizzled(base, first_row + row, 2 * step + lane // 8 % 2))
            found += [(r[0], r[1]), (r[2], r[3])]
        return found

    def multiply(self, acc: cute.Tensor, t: int, m: int, a, b, dtype) -> None:
        total = mma16816([acc[i, t, m] for i in range(4)], a, b, dtype)
        for i in range(4):
            acc[i, t, m] = total[i]

    def hold(self, smem, warp, lane) -> list:
        """A fragments of this warp's tile and part of the up projection."""
        p = self.plan
        step = 16 // p.streams
        tile, part = self.share(warp)
        row = (lane % 16) // step * p.up_hidden + tile * step + lane % step
        found = []
        for s in range(self.steps):
            k = part * self.steps + s
            found.append(
                ldmatrix4(swizzled(smem.up_base, (k // 4) * p.up_rows + row, 2 * (k % 4) + lane // 16))
            )
        return found

    def share(self, warp):
        """(tile, part) of a warp; an idle one repeats the first part."""
        part = warp // self.plan.up_tiles
        return warp % self.plan.up_tiles, select(part < self.plan.parts, part, 0)

    @cute.jit
    def up(self, smem, held: list, warp, lane):
        """This warp's sums, into smem.sums[:, :, part]."""
        p = self.plan
        step, sums = 16 // p.streams, smem.sums
        tile, part = self.share(warp)
        acc = cute.make_rmem_tensor((4, max(2, self.tiles), 1), Float32)
        acc.fill(0.0)
        if const_expr(self.tiles == 1):
            # two steps a load, in two chains
            for s in cutlass.range_constexpr(0, self.steps, 2):
                k = part * self.steps + s
                if const_expr(s + 1 < self.steps):
                    k = k + lane // 16
                r = ldmatrix4(
                    swizzled(smem.inner_base, (k // 4) * p.bucket + lane % 8, 2 * (k % 4) + lane // 8 % 2)
                )
                self.multiply(acc, 0, 0, held[s], (r[0], r[1]), smem.dtype)
                if const_expr(s + 1 < self.steps):
                    self.multiply(acc, 1, 0, held[s + 1], (r[2], r[3]), smem.dtype)
            for i in cutlass.range_constexpr(4):
                acc[i, 0, 0] = acc[i, 0, 0] + acc[i, 1, 0]
        else:
            for s in cutlass.range_constexpr(self.steps):
                k = part * self.steps + s
                b = self.columns(smem.inner_base, (k // 4) * p.bucket, k % 4, lane)
                for t in cutlass.range_constexpr(self.tiles):
                    self.multiply(acc, t, 0, held[s], b[t], smem.dtype)
        if warp < p.up_tiles * p.parts:
            for half in cutlass.range_constexpr(2):
                i16 = half * 8 + lane // 4
                row = i16 // step * p.up_hidden + tile * step + i16 % step
                for t in cutlass.range_constexpr(self.tiles):
                    for i in cutlass.range_constexpr(2):
                        sums[row, t * 8 + 2 * (lane % 4) + i, part] = acc[2 * half + i, t, 0]
