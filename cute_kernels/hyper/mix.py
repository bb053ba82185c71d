"""HC mix: the low-rank mix of the residual streams, in one launch or in two.

    t[r]    = act(silu(dot(normed, w_down[r]) / C))
    m[c, i] = sigmoid(dot(t, w_up[c*H + i]))
    out[i]  = act(sum over c of m[c, i] * normed[c, i] / C)

Shapes      normed [T, W] act with W = C*H, w_down [R, W], w_up [W, R], out [T, H]; T at most the bucket N
            (8, 16 or 32: the columns of the MMA, a kernel each), workspace int64 (mix_plan.py).
Work        a cooperative grid of clusters (but see Two). A cluster owns `down_rows` rows of w_down, and its
            CTAs split K; a CTA also owns `up_hidden` hidden elements of all C streams. All weights of a CTA
            fit its shared memory: one warp issues every copy at the start (TMA: slabs of 128 bytes of K;
            w_down's with an mbarrier each), so memory sees one stream of reads. A box of w_up takes the rows
            of all streams.
            1. the CTA's part of dot(normed, w_down): weights are the M side of the MMA, rows of normed the N
               side (mix_sm90.py: mma.sync by all warps; mix_sm100.py: tcgen05.mma into tensor memory);
            2. partial sums go to the CTA of the cluster that owns the column, by st.async and an mbarrier;
            3. it adds them, applies silu and publishes pairs of values, each with the launch's epoch in
               one 64-bit word (device/handoff.py): no fence, no flag, nothing to be zeroed;
            4. every CTA polls the words of the T rows, each until it is there, puts them into shared memory,
               multiplies by its rows of w_up (SM90 has them in registers by then), and finishes its outputs.
Bytes       2*(R*W + W*R): each weight once, by construction; the activations once a cluster and again for
            the outputs; 4*T*R of words a CTA.
Rounding    twice: t, and the result. Sums fp32.
Order       fixed by the shapes, the target and the bucket: slabs of K within a warp, warps, CTAs of the
            cluster by rank; no atomics.
Waiting     CTAs wait for each other, so all must be resident: the launch is cooperative, and fails where they
            do not fit. No two calls may use the workspace at once. It starts as zeros, except for the
            record's address; every call writes all words of inner activations, those of rows past T too.
            Each CTA keeps the epoch, one higher every call, in a word of its own.
Bound       Every POLLS_A_LOOK-th poll is followed by a look at the clock and at the workspace's poison word.
            After mix_plan.WAIT_NS a thread sets that word, names who is missing in the host's record, and
            goes on with NaNs in place of what did not come: they reach every output that depends on it, no
            CTA is left waiting, and later launches that miss something find the poison, and leave the record
            alone. The waits at mbarriers have no bound of their own: a copy ends, and what the CTAs of a
            cluster, which start together, send each other needs nobody else, or a wait that is bounded.
Two         Where the grid cannot be resident as a whole ("split"), steps 1 to 3 are one launch and step 4 is
            the next: the same code and the same bits, and no CTA waits for one outside of its cluster. What
            the polls look for is there when they start. The second launch alone counts the epoch. Both wait
            for their predecessors before they read what may be theirs: the first releases the second before
            its own wait, so the second may start beside the kernel before the first.
Overlap     the next launch may start while this one polls. It reads its epoch and publishes only behind its
            dependency wait, when this launch has completed: no word changes that is still polled, and a word
            holds this launch's epoch or the one before's, so epochs may wrap. A kernel in between that is
            launched with PDL and skips its own wait breaks this: the next launch may then overwrite words
            that are still polled, and the wait expires; of two launches the next call has the same epoch
            until the second has counted it, so its values may be taken for this one's.
PDL         w_down is read before the dependency wait: no predecessor writes it. All else after, w_up too,
            which would delay what the down projection needs. A CTA may have to wait for tensor memory that
            others on its SM hold, so it releases the next launch when it has its own: older CTAs never wait
            for newer ones, which wait for them.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cute_kernels.device import args, cluster, system
from cute_kernels.device.handoff import poll2, publish
from cute_kernels.device.math import fma, select, sigmoid
from cute_kernels.device.pdl import await_predecessors, release_dependents
from cute_kernels.hyper import mix_plan
from cute_kernels.hyper.mix_plan import LAUNCHES, SLAB, MixPlan
from cute_kernels.hyper.mix_sm90 import WarpMma, swizzled

POLLS_A_LOOK = 16  # at the clock
NANS = 0x7FFF7FFF  # two, of either dtype


class Smem:
    """A CTA's shared memory, as tensors and as addresses. part [down_rows, N, splits], later sums [up_rows,
    N, parts], and the inner activations lie where the weights of the down projection were."""

    def __init__(self, p: MixPlan, dtype):
        swizzle = cute.make_swizzle(3, 4, 3)
        smem = SmemAllocator()
        pool = smem.allocate(p.pool_bytes, 1024)
        up = smem.allocate(p.up_bytes, 1024)
        x = smem.allocate(p.x_bytes, 1024) if p.staged else up
        if p.tail_bytes:
            smem.allocate(p.tail_bytes, 1024)
        self.dtype = dtype
        self.down = cute.make_tensor(
            cute.recast_ptr(pool, swizzle, dtype),
            cute.make_layout((p.down_rows, SLAB, p.down_slabs), stride=(SLAB, 1, p.down_stride * SLAB)),
        )
        self.up = cute.make_tensor(
            cute.recast_ptr(up, swizzle, dtype),
            cute.make_layout(
                (p.up_hidden, p.streams, SLAB, p.up_slabs),
                stride=(SLAB, p.up_hidden * SLAB, 1, p.up_rows * SLAB),
            ),
        )
        self.x = cute.make_tensor(
            cute.recast_ptr(x, swizzle, dtype),
            cute.make_layout(
                (p.bucket, SLAB, p.x_box, p.x_boxes),
                stride=(SLAB, 1, p.bucket * SLAB, p.x_box * p.bucket * SLAB),
            ),
        )
        self.pool, self.up_pointer, self.x_pointer, self.inner = pool, up, x, pool + p.inner_offset
        self.pool_base, self.up_base, self.x_base = pool.toint(), up.toint(), x.toint()
        self.inner_base = self.pool_base + p.inner_offset
        fp32 = cute.recast_ptr(pool, dtype=Float32)
        self.part = cute.make_tensor(
            fp32,
            cute.make_layout(
                (p.down_rows, p.bucket, p.splits), stride=(1, p.part_stride, p.part_stride * p.bucket)
            ),
        )
        self.sums = cute.make_tensor(
            fp32,
            cute.make_layout(
                (p.up_rows, p.bucket, p.parts), stride=(1, p.sum_stride, p.sum_stride * p.bucket)
            ),
        )
        self.received = smem.allocate_tensor(
            Float32, cute.make_layout((p.down_rows, p.columns, p.cluster)), 16
        )
        self.bars = smem.allocate_array(Int64, num_elems=p.down_slabs + 4 + p.x_boxes)
        self.x_bars = self.bars + p.down_slabs + 4
        self.up_bar, self.received_bar, self.down_done, self.up_done = (
            self.bars + p.down_slabs + i for i in range(4)
        )
        self.tensor_memory = smem.allocate_array(Int32, num_elems=1)


class HcMix:
    """One specialisation: the plan, the matrix products of the target, and one of mix_plan.LAUNCHES."""

    def __init__(self, plan: MixPlan, launch: str):
        if launch not in LAUNCHES:
            raise ValueError(f"launch: got {launch!r}, one of {', '.join(LAUNCHES)} is allowed")
        self.plan, self.launch = plan, launch
        if plan.tensor_memory:
            from cute_kernels.hyper.mix_sm100 import TensorMma

            self.mma = TensorMma(plan)
            self.copy_warp = 5
        else:
            self.mma = WarpMma(plan)
            self.copy_warp = 0

    @cute.jit
    def __call__(
        self,
        normed: cute.Tensor,
        w_down: cute.Tensor,
        w_up: cute.Tensor,
        out: cute.Tensor,
        workspace: cute.Tensor,
        stream: cuda.CUstream,
    ):
        p = self.plan
        rows = normed.shape[0]
        if rows > 0:
            boxes = self.boxes(normed, w_down, w_up)
            halves = ((True, False), (False, True)) if self.launch == "split" else ((True, True),)
            for has_down, has_up in halves:
                self.kernel(*boxes, normed, out, workspace, has_down, has_up).launch(
                    grid=(p.grid, 1, 1),
                    block=(p.threads, 1, 1),
                    cluster=(p.cluster if has_down else 1, 1, 1),
                    min_blocks_per_mp=1,
                    preferred_smem_carveout=100,
                    stream=stream,
                    use_pdl=True,
                    cooperative=self.launch == "cooperative",
                )

    def boxes(self, normed: cute.Tensor, w_down: cute.Tensor, w_up: cute.Tensor) -> list:
        """The TMA atoms and tensors: a slab of a cluster's rows of w_down, one of a CTA's rows of w_up (those
        of all streams), a few of all rows of normed. What lies outside a tensor is filled with zeros."""
        p, swizzle = self.plan, cute.make_swizzle(3, 4, 3)
        streams_apart = cute.make_tensor(
            w_up.iterator,
            cute.make_layout(
                (p.hidden, p.streams, p.low_rank), stride=(p.low_rank, p.hidden * p.low_rank, 1)
            ),
        )
        slabs_apart = cute.make_tensor(
            normed.iterator,
            cute.make_layout((normed.shape[0], SLAB, p.width // SLAB), stride=(p.width, 1, SLAB)),
        )
        found = []
        for tensor, box, stride in (
            (w_down, (p.down_rows, SLAB), (SLAB, 1)),
            (streams_apart, (p.up_hidden, p.streams, SLAB), (SLAB, p.up_hidden * SLAB, 1)),
            (slabs_apart, (p.bucket, SLAB, p.x_box), (SLAB, 1, p.bucket * SLAB)),
        ):
            layout = cute.make_composed_layout(swizzle, 0, cute.make_layout(box, stride=stride))
            found += cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, layout, box)
        return found

    @cute.kernel
    def kernel(
        self,
        down_atom: cute.CopyAtom,
        down: cute.Tensor,
        up_atom: cute.CopyAtom,
        up: cute.Tensor,
        x_atom: cute.CopyAtom,
        x: cute.Tensor,
        normed: cute.Tensor,
        out: cute.Tensor,
        workspace: cute.Tensor,
        has_down: cutlass.Constexpr,
        has_up: cutlass.Constexpr,
    ):
        p = self.plan
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp, lane = cute.arch.make_warp_uniform(tid // 32), tid % 32
        rank, group = cta % p.cluster, cta // p.cluster
        first_slab = rank * p.down_slabs
        rows, dtype = normed.shape[0], out.element_type
        smem = Smem(p, dtype)

        if warp == self.copy_warp:
            if lane == 0:
                self.start_barriers(smem, has_down, has_up)
            cute.arch.sync_warp()
            if const_expr(has_down):
                tile = cute.local_tile(down, (p.down_rows, SLAB), (group, None))
                self.copy_slabs(down_atom, tile, smem.down, first_slab, p.down_slabs, smem.bars, 1)
        self.mma.start(smem, warp)
        if const_expr(not p.tensor_memory):
            release_dependents()
        cute.arch.sync_threads()
        if const_expr(p.tensor_memory):
            release_dependents()
        self.mma.started(smem)
        if const_expr(has_down):
            cute.arch.cluster_arrive_relaxed()  # the barriers are published by their own fence
        await_predecessors()

        # What the down projection needs comes first: memory serves in order, and w_up would be in its way.
        loaded = self.mma.load(normed, first_slab, warp, lane) if const_expr(has_down) else []
        counter = cute.recast_tensor(workspace, Int32)
        last_epoch = counter[cta]
        streams = self.load_streams(normed, rows, cta, tid) if const_expr(has_up) else []
        cute.arch.sync_warp()
        if warp == self.copy_warp:
            if const_expr(has_down and p.staged):
                tile = cute.local_tile(x, (p.bucket, SLAB, p.x_box), (0, 0, None))
                self.copy_slabs(x_atom, tile, smem.x, rank * p.x_boxes, p.x_boxes, smem.x_bars, 1)
            if const_expr(has_up):
                tile = cute.local_tile(up, (p.up_hidden, p.streams, SLAB), (cta, 0, None))
                self.copy_slabs(up_atom, tile, smem.up, 0, p.up_slabs, smem.up_bar, 0)
        held = self.mma.fragments(loaded, lane)

        if const_expr(has_down):
            self.mma.down(smem, held, warp, lane)
            cute.arch.sync_threads()
        epoch = last_epoch + 1
        if const_expr(has_down):
            cute.arch.cluster_wait()
            self.send_sums(smem, rank, tid)
            self.publish_inner(smem, workspace, rank, group, epoch, tid)

        if const_expr(has_up):
            cute.arch.mbarrier_wait(smem.up_bar, 0)
            held = self.mma.hold(smem, warp, lane)
            self.gather_inner(smem, workspace, rows, epoch, warp, tid)
            cute.arch.sync_threads()
            if tid == 0:
                counter[cta] = epoch
            self.mma.up(smem, held, warp, lane)
            cute.arch.sync_threads()
        self.mma.end(smem, warp)
        if const_expr(has_up):
            self.finish(smem, streams, out, rows, cta, tid)

    def start_barriers(self, smem: Smem, has_down: bool, has_up: bool) -> None:
        """One thread's: every barrier, and the bytes that those of this launch wait for. Each is used at most
        once, in phase 0."""
        p = self.plan
        x_boxes = p.x_boxes if p.staged else 0
        waiting = [smem.bars + s for s in range(p.down_slabs)] + [smem.x_bars + i for i in range(x_boxes)]
        for bar in (*waiting, smem.up_bar, smem.received_bar, smem.down_done, smem.up_done):
            cute.arch.mbarrier_init(bar, 1)
        cute.arch.mbarrier_init_fence()
        if has_down:
            for s in range(p.down_slabs):
                cute.arch.mbarrier_arrive_and_expect_tx(smem.bars + s, p.down_rows * SLAB * 2)
            for i in range(x_boxes):
                cute.arch.mbarrier_arrive_and_expect_tx(smem.x_bars + i, p.x_box * p.bucket * SLAB * 2)
        rest = ((smem.up_bar, p.up_bytes, has_up), (smem.received_bar, p.received_bytes, has_down))
        for bar, count, awaited in rest:
            if awaited:
                cute.arch.mbarrier_arrive_and_expect_tx(bar, count)

    def copy_slabs(self, atom, tile, to, first, count: int, bars, bar_step: int) -> None:
        """A warp's: `count` slabs from the first of `tile`, to consecutive slabs of shared memory."""
        box = cute.rank(to) - 1
        to, source = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(to, 0, box), cute.group_modes(tile, 0, box)
        )
        for s in range(count):
            cute.copy(atom, source[None, first + s], to[None, s], tma_bar_ptr=bars + s * bar_step)

    def outputs(self) -> int:
        """Passes of the CTA over its bucket * up_hidden outputs."""
        return -(-self.plan.bucket * self.plan.up_hidden // self.plan.threads)

    def output(self, index: int, rows, cta, tid) -> tuple:
        """(row, hidden element within the CTA's, whether it exists) of a thread's index-th output."""
        p = self.plan
        at = index * p.threads + tid
        row, h = at // p.up_hidden, at % p.up_hidden
        return row, h, (row < rows) & (cta * p.up_hidden + h < p.hidden)

    def load_streams(self, normed: cute.Tensor, rows, cta, tid) -> list:
        """The streams' elements behind a thread's outputs; an output that does not exist reads some other."""
        p = self.plan
        found = []
        for i in range(self.outputs()):
            row, h, exists = self.output(i, rows, cta, tid)
            row, h = select(exists, row, 0), select(exists, cta * p.up_hidden + h, 0)
            found.append([normed[row, c * p.hidden + h] for c in range(p.streams)])
        return found

    @cute.jit
    def send_sums(self, smem, rank, tid):
        """The CTA's sums over its slabs, added over the warps, to the owners of their columns."""
        p = self.plan
        count = p.down_rows * p.bucket
        base, bar = smem.received.iterator.toint(), smem.received_bar.toint()
        for i in cutlass.range_constexpr(-(-count // p.threads)):
            at = i * p.threads + tid
            if at < count:
                row, column = at % p.down_rows, at // p.down_rows
                total = smem.part[row, column, 0]
                for s in cutlass.range_constexpr(1, p.splits):
                    total = total + smem.part[row, column, s]
                slot = (rank * p.columns + column % p.columns) * p.down_rows + row
                owner = column // p.columns
                cluster.send(total, cluster.remote(base + slot * 4, owner), cluster.remote(bar, owner))

    @cute.jit
    def publish_inner(self, smem, workspace: cute.Tensor, rank, group, epoch, tid):
        """The inner activations of this CTA's columns and this cluster's rows of w_down."""
        p = self.plan
        count = p.down_rows * p.columns
        base = workspace.iterator.toint() + Int64(p.header_words * 8)
        for i in cutlass.range_constexpr(-(-count // p.threads)):
            at = i * p.threads + tid
            if at // 32 * 32 < count:  # whole warps: lanes exchange values
                cute.arch.mbarrier_wait(smem.received_bar, 0)
                place = select(at < count, at, 0)
                row, column = place % p.down_rows, place // p.down_rows
                total = smem.received[row, column, 0]
                for k in cutlass.range_constexpr(1, p.cluster):
                    total = total + smem.received[row, column, k]
                mean = total * (1.0 / p.streams)
                values = cute.make_rmem_tensor((2,), Float32)
                values[0] = mean * sigmoid(mean)
                values[1] = cute.arch.shuffle_sync_bfly(values[0], offset=1)
                pair = cute.make_rmem_tensor((2,), smem.dtype)
                pair.store(values.load().to(smem.dtype))
                index = group * p.down_rows + row
                if (at < count) & (row % 2 == 0) & (index < p.low_rank):
                    word = (rank * p.columns + column) * p.words + index // 2
                    publish(cute.recast_tensor(pair, Int32)[0], epoch, base + Int64(word * 8))

    @cute.jit
    def gather_inner(self, smem, workspace: cute.Tensor, rows, epoch, warp, tid):
        """The inner activations of all rows, when they are there, into shared memory as slabs of K. Columns
        past T keep what was there: they are computed and never looked at."""
        p = self.plan
        per_row = p.words // 2  # pairs of words
        count = rows * per_row
        passes = -(-p.bucket * per_row // p.threads)
        got = cute.make_rmem_tensor((2, passes), Int32)
        wanted = cute.make_rmem_tensor((passes,), Int32)
        got.fill(0)
        for i in cutlass.range_constexpr(passes):
            wanted[i] = select(i * p.threads + tid < count, Int32(1), Int32(0))
        base = workspace.iterator.toint() + Int64(p.header_words * 8)
        if warp * 32 < count:
            # whole warps: the loop ends for all lanes at once
            waits, late, own, polls, start = Int32(1), Int32(0), Int32(0), Int32(0), Int64(0)
            while waits != 0:
                found = [
                    poll2(base + Int64((i * p.threads + tid) * 16), wanted[i], epoch) for i in range(passes)
                ]
                pending = Boolean(False)
                for i in cutlass.range_constexpr(passes):
                    first, first_epoch, second, second_epoch = found[i]
                    got[0, i] = select(wanted[i] != 0, first, got[0, i])
                    got[1, i] = select(wanted[i] != 0, second, got[1, i])
                    # which of the two is missing, for the report: 1 or 2
                    second_lacks = select(second_epoch != epoch, Int32(2), Int32(0))
                    wanted[i] = select(first_epoch != epoch, Int32(1), second_lacks)
                    pending = pending | (wanted[i] != 0)
                waits = cute.arch.vote_ballot_sync(pending)
                polls += 1
                if polls % POLLS_A_LOOK == 0:
                    now = system.nanoseconds()
                    start = select(start == 0, now, start)
                    over, poisoned = self.expired(workspace, now - start)
                    own = cute.arch.vote_ballot_sync(over)
                    stop = own | cute.arch.vote_ballot_sync(poisoned)
                    late, waits = select(stop != 0, waits, late), select(stop != 0, Int32(0), waits)
            if late != 0:
                self.report(workspace, got, wanted, own, tid)
            for i in cutlass.range_constexpr(passes):
                at = i * p.threads + tid
                if at < count:
                    row, k = at // per_row, at % per_row  # k: four elements
                    place = swizzled(0, k // 16 * p.bucket + row, k % 16 // 2) + k % 2 * 8
                    words = cute.make_tensor(
                        cute.recast_ptr(smem.inner + place, dtype=Int32), cute.make_layout(2)
                    )
                    words[0], words[1] = got[0, i], got[1, i]
            if const_expr(p.tensor_memory):
                cute.arch.fence_proxy("async.shared", space="cta")  # the MMA reads them by that proxy

    @cute.jit
    def expired(self, workspace: cute.Tensor, waited) -> tuple[Boolean, Boolean]:
        """Whether this wait is too long, and whether another one was."""
        control = self.plan.control
        limit = workspace[control + mix_plan.LIMIT]
        limit = select(limit == 0, Int64(mix_plan.WAIT_NS), limit)
        poison = system.load4(workspace.iterator.toint() + Int64((control + mix_plan.POISON) * 8))
        return waited > limit, poison != 0

    @cute.jit
    def report(self, workspace: cute.Tensor, got: cute.Tensor, wanted: cute.Tensor, own, tid):
        """What did not come becomes NaNs. own: not 0 if it was this wait that expired; then the record names
        a CTA that is missing. What a wait that the poison ended lacks may only have been late."""
        p = self.plan
        for i in cutlass.range_constexpr(cute.size(wanted)):
            if wanted[i] != 0:
                got[0, i], got[1, i] = Int32(NANS), Int32(NANS)
                at = i * p.threads + tid
                row, k = at // (p.words // 2), at % (p.words // 2)  # k: four elements, of two words
                element = k * 4 + (wanted[i] - 1) * 2
                cta = element // p.down_rows * p.cluster + row // p.columns
                record = workspace[p.control + mix_plan.RECORD]
                if (own != 0) & (record != 0):
                    system.store4(record, cta + 1)
        system.store4(workspace.iterator.toint() + Int64((p.control + mix_plan.POISON) * 8), 1)

    @cute.jit
    def finish(self, smem, streams: list, out: cute.Tensor, rows, cta, tid):
        """The streams' mean, through their gates."""
        p = self.plan
        for i in cutlass.range_constexpr(self.outputs()):
            row, h, exists = self.output(i, rows, cta, tid)
            if exists:
                total = Float32(0.0)
                for c in cutlass.range_constexpr(p.streams):
                    logit = smem.sums[c * p.up_hidden + h, row, 0]
                    for k in cutlass.range_constexpr(1, p.parts):
                        logit = logit + smem.sums[c * p.up_hidden + h, row, k]
                    total = fma(sigmoid(logit), streams[i][c].to(Float32), total)
                out[row, cta * p.up_hidden + h] = (total * (1.0 / p.streams)).to(smem.dtype)


def build(target: str, *, dtype: str, hidden: int, streams: int, low_rank: int, bucket: int, launch: str):
    """For up to `bucket` rows; run-time arguments (normed, w_down, w_up, out, workspace). launch: of
    mix_plan.LAUNCHES. Raises ValueError for another, and where the shapes have no plan."""
    plan = mix_plan.plan(hidden, streams, low_rank, bucket, target)
    if isinstance(plan, str):
        raise ValueError(f"H, C, R: got {hidden}, {streams}, {low_rank}, but {plan}")
    rows = args.rows()
    return HcMix(plan, launch), (
        args.dense(dtype, rows, plan.width),
        args.dense(dtype, low_rank, plan.width),
        args.dense(dtype, plan.width, low_rank),
        args.dense(dtype, rows, hidden),
        args.dense("int64", plan.workspace_words),
        args.current_stream(),
    )
