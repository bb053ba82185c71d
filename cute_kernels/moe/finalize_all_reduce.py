"""Finalize, one-shot all-reduce over N ranks and optional RMSNorm of a row, in one launch; or the plain sum.

    x     = the rank-local finalize (steps.py), or x itself
    push  x into slot [n & 1][rank] of every rank's buffer, a word of two +0.0 as two -0.0; n is the round
    wait  until no 32-bit word of this rank's own slots [n & 1][0..N-1] is empty (+0.0)
    s     = act(0 + x_0 + x_1 + ... + x_{N-1})                      fp32, in rank order
    out   = s, or act(s * rsqrt(mean(s^2) + eps) * (norm_weight + weight_offset))
    mark  those slots empty again

Shapes      as finalize.py, and norm_weight [H], out [T, H]; plain: x [T, H] bf16 or fp16. peers [N] int64,
            the addresses of all ranks' buffers, [2][N][capacity][H] each; rounds [capacity, parts] int32,
            poison [4] int32: this rank's own. T is the same on all ranks, at most capacity.
Work        grid (parts, T), a row a cluster: at H = 2560, 5 CTAs of 2 x 64 threads on SM90, 3 where vectors
            are 32 bytes. Of a CTA's two halves one gathers and finalizes, a vector a thread, into shared
            memory; meanwhile the other loads addresses and counters and executes the release below, then
            takes the vectors over, pushes, polls, sums, stores and marks. An exchanging thread owns its
            vector's place in all slots. So a vector's round is an affair of N threads, one a rank, and none
            waits for another of its own rank, but in the norm. A warp polls together: its loop ends for all
            lanes at once, so no lane is missing in what follows. No CTA leaves early, none waits at a
            barrier that another might not reach.
Bytes       finalize.py's, without the store; N * 2H pushed, N * 2H polled, N * 2H marked.
Rounding    finalize.py's two, the sum's one, the norm's one.
Order       finalize.py's; ranks ascending; the norm's sum as hyper/steps.py (the warps' sums through
            distributed shared memory, then one fixed tree).
PDL         norm_weight is loaded before the dependency wait, and with `prefetch` the indices and weights.
            All else after it. Dependents are released after the poll: earlier, CTAs that wait for this
            kernel could fill a GPU on which a peer's kernel has yet to start.

Rounds      A CTA counts its row's rounds in device memory: its threads read the counter, thread 0 advances
            it behind a CTA barrier. So a captured graph replays, no CTA waits for another, and a row that a
            call leaves out keeps its counter, on all ranks alike. Modulo 2^32; n & 1 runs on.
Payload     A word is written by one thread, into an empty slot, and read by one. Relaxed suffices: the word
            itself says that it is there, nothing else is read on its word, and aligned words are single-copy
            atomic. The reader's last look has all words at once; none changes before the reader empties it.
Reuse       Thread A of rank i empties a word in round n, thread C' of rank j fills it in round n + 2, and
            A's store must come first. Between them are B (rank i, round n + 1) and C (rank j, round n + 1):
              A: empties the word                         A before B: stream order; the dependency wait makes
              B: fence.release.sys, then pushes           it good for memory too
              C: sees B's push, then fence.acquire.sys    B's push, seen by C, synchronises the two fences
              C': fills the word                          C before C': stream order
            So A's store happens before the fill. Without the release B's relaxed push might be seen before
            A's store is: the kernel boundary orders A and B for rank i, not for j. The release takes half a
            microsecond on an H200, which the gather hides; every thread that pushes executes it itself. The
            acquire is one cache invalidation. The markers come after the result.
Barrier     There is none at the end of a round. A rank pushes round n + 2 only after it has seen every
            rank's push of n + 1, which each sends after it has emptied round n's slots. So nobody is more
            than one round ahead, two phases suffice, and a slot is empty when it is filled.
Bound       Every POLLS_A_LOOK-th look that fails is followed by one at the clock, so a round that is met in
            time hardly reads it. On expiry a warp writes the missing ranks and the round to the record in
            host memory, sets the poison flag and goes on to the end without output or markers; later kernels
            find the flag, push and poll nothing, and end.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from cute_kernels.device import args, cluster, system, vector
from cute_kernels.device.math import fma, rsqrt, select
from cute_kernels.device.pdl import await_predecessors, release_dependents
from cute_kernels.device.reduce import lanes_sum, pairwise_sum
from cute_kernels.device.span import Span
from cute_kernels.hyper.steps import MAX_THREADS
from cute_kernels.moe import config
from cute_kernels.moe.steps import Finalize

VEC_BYTES = 16
POLLS_A_LOOK = 16  # at the clock
NEGATIVE_ZEROS = -0x7FFF8000  # 0x80008000: two bf16 -0.0


class FinalizeAllReduce:
    """One specialisation: target, ranks, hidden size; what is summed (top_k 0: x itself), norm or not.

    prefetch: the indices and weights are complete before the kernel starts. bounded: False leaves the
    deadline out, to measure what it costs."""

    def __init__(
        self,
        target: str,
        world: int,
        hidden: int,
        top_k: int,
        shared: bool,
        gated: bool,
        norm: bool,
        prefetch: bool,
        bounded: bool,
    ):
        self.world, self.hidden, self.norm = world, hidden, norm
        self.prefetch, self.bounded, self.finalizes = prefetch, bounded, top_k > 0
        self.threads = config.threads(target, hidden)
        self.step = Finalize(target, hidden, top_k, shared, gated, self.threads)
        self.parts, self.warps = self.step.parts, self.threads // 32
        self.norm_warps = Span.of(target, hidden, MAX_THREADS).warps
        if norm and not config.norm_fits(target, hidden):
            raise ValueError(f"hidden: got {hidden}, allowed with a norm what config.norm_fits allows")

    @cute.jit
    def __call__(
        self,
        expert_out: cute.Tensor,
        permuted_idx: cute.Tensor | None,
        expert_weights: cute.Tensor | None,
        shared_out: cute.Tensor | None,
        shared_gate: cute.Tensor | None,
        norm_weight: cute.Tensor | None,
        out: cute.Tensor,
        peers: cute.Tensor,
        rounds: cute.Tensor,
        poison: cute.Tensor,
        rank: Int32,
        capacity: Int32,
        record: Int64,
        timeout: Int64,
        eps: Float32,
        weight_offset: Float32,
        stream: cuda.CUstream,
    ):
        rows = out.shape[0]
        if rows > 0:
            self.kernel(
                expert_out,
                permuted_idx,
                expert_weights,
                shared_out,
                shared_gate,
                norm_weight,
                out,
                peers,
                rounds,
                poison,
                rank,
                capacity,
                record,
                timeout,
                eps,
                weight_offset,
            ).launch(
                grid=(self.parts, rows, 1),
                block=(2 * self.threads, 1, 1),
                cluster=(self.parts, 1, 1),
                min_blocks_per_mp=1,
                stream=stream,
                use_pdl=True,
            )

    @cute.kernel
    def kernel(
        self,
        expert_out: cute.Tensor,
        permuted_idx: cute.Tensor | None,
        expert_weights: cute.Tensor | None,
        shared_out: cute.Tensor | None,
        shared_gate: cute.Tensor | None,
        norm_weight: cute.Tensor | None,
        out: cute.Tensor,
        peers: cute.Tensor,
        rounds: cute.Tensor,
        poison: cute.Tensor,
        rank: Int32,
        capacity: Int32,
        record: Int64,
        timeout: Int64,
        eps: Float32,
        weight_offset: Float32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        part, t, _ = cute.arch.block_idx()
        step, world, chunks, smem = self.step, self.world, self.step.chunks, SmemAllocator()
        if const_expr(self.norm):
            cluster.announce()
        place, exchanges = tid % self.threads, tid < self.threads
        vec = part * self.threads + place
        active = vec < step.vecs
        vec = select(active, vec, 0)
        idx, weight = [], []
        if const_expr(self.finalizes and self.prefetch):
            idx, weight = step.routing(permuted_idx, expert_weights, t)
        gain = cute.make_rmem_tensor((step.elems,), out.element_type)
        if const_expr(self.norm):
            vector.load(gain, vector.row_of(norm_weight, 0, self.hidden, VEC_BYTES), vec, VEC_BYTES)
        await_predecessors()

        stage = step.stage(smem, out.element_type)
        counter = t * self.parts + part
        epoch, poisoned, own = Int32(0), Int32(0), Int64(0)
        bases = [Int64(0) for i in range(world)]
        if exchanges:
            epoch, own = rounds[counter], peers[rank]
            # relaxed, as its store: a kernel of the other channel may set it meanwhile
            poisoned = system.load4(poison.iterator.toint())
            bases = [peers[i] for i in range(world)]
            system.fence_release()
        else:
            self.contribute(
                stage,
                expert_out,
                permuted_idx,
                expert_weights,
                shared_out,
                shared_gate,
                idx,
                weight,
                t,
                place,
                vec,
                active,
            )
        cute.arch.sync_threads()
        x = step.take(stage, place)
        active = active & exchanges

        # Bytes from a buffer's base to this thread's vector in source slot 0 of the round's phase, and from
        # one source slot to the next.
        slot = Int64(capacity) * (self.hidden * 2)
        mine = Int64(t) * (self.hidden * 2) + Int64(vec) * (step.elems * 2) + Int64(epoch & 1) * world * slot
        healthy = cute.arch.vote_ballot_sync(active & (poisoned == 0))
        sends = active & (healthy != 0)
        words = cute.recast_tensor(x, Int32)
        if sends:
            for i in cutlass.range_constexpr(world):
                for c in cutlass.range_constexpr(chunks):
                    sent = [
                        select(words[4 * c + j] == 0, Int32(NEGATIVE_ZEROS), words[4 * c + j])
                        for j in range(4)
                    ]
                    system.store16(bases[i] + mine + Int64(rank) * slot + 16 * c, sent)

        received = cute.make_rmem_tensor((4 * chunks, world), Int32)
        waits, late, polls, start = healthy, Int32(0), Int32(0), Int64(0)
        while waits != 0:
            for i in cutlass.range_constexpr(world):
                for c in cutlass.range_constexpr(chunks):
                    got = system.load16(own + mine + i * slot + 16 * c)
                    for j in cutlass.range_constexpr(4):
                        received[4 * c + j, i] = got[j]
            empty = Boolean(False)
            for i in cutlass.range_constexpr(world):
                for j in cutlass.range_constexpr(4 * chunks):
                    empty = empty | (received[j, i] == 0)
            waits = cute.arch.vote_ballot_sync(empty & active)
            if const_expr(self.bounded):
                polls += 1
                if polls % POLLS_A_LOOK == 0:
                    now = system.nanoseconds()
                    start = select(start == 0, now, start)
                    if now - start > timeout:
                        late, waits = waits, Int32(0)
        system.fence_acquire()
        if const_expr(self.bounded):
            if late != 0:
                self.report(received, poison, record, epoch, active)
        if exchanges:
            release_dependents()
        done = active & (late == 0) & (healthy != 0)

        total = [Float32(0.0)] * step.elems
        for i in cutlass.range_constexpr(world):
            source = cute.recast_tensor(received[None, i], out.element_type).load().to(Float32)
            for e in cutlass.range_constexpr(step.elems):
                total[e] = total[e] + source[e]
        wide = cute.make_rmem_tensor((step.elems,), Float32)
        for e in cutlass.range_constexpr(step.elems):
            wide[e] = total[e]
        result = cute.make_rmem_tensor((step.elems,), out.element_type)
        result.store(wide.load().to(out.element_type))
        if const_expr(self.norm):
            self.normalise(smem, result, gain, eps, weight_offset, tid, part, active, exchanges)
        if done:
            vector.store(result, vector.row_of(out, t, self.hidden, VEC_BYTES), vec, VEC_BYTES)
            for i in cutlass.range_constexpr(world):
                for c in cutlass.range_constexpr(chunks):
                    system.store16(own + mine + i * slot + 16 * c, [0] * 4)
        cute.arch.sync_threads()  # every thread has read the counter
        if tid == 0:
            rounds[counter] = epoch + 1

    @cute.jit
    def contribute(
        self,
        stage: cute.Tensor,
        expert_out: cute.Tensor,
        permuted_idx: cute.Tensor | None,
        expert_weights: cute.Tensor | None,
        shared_out: cute.Tensor | None,
        shared_gate: cute.Tensor | None,
        idx: list,
        weight: list,
        t,
        place,
        vec,
        active,
    ):
        """A thread's vector of the rank's contribution, into shared memory."""
        step = self.step
        if const_expr(self.finalizes):
            if const_expr(not self.prefetch):
                idx, weight = step.routing(permuted_idx, expert_weights, t)
            gate = Float32(1.0)
            if const_expr(step.gated):
                gate = shared_gate[t]
            cute.arch.fence_acq_rel_cta()  # or the compiler spreads these loads over the copies
            step.fetch(stage, expert_out, shared_out, idx, weight, t, place, vec, active)
            step.put(stage, step.reduce(stage, weight, gate, place), place)
        else:
            x = cute.make_rmem_tensor((step.elems,), stage.element_type)
            vector.load(x, vector.row_of(expert_out, t, self.hidden, VEC_BYTES), vec, VEC_BYTES)
            step.put(stage, x, place)

    @cute.jit
    def report(self, received: cute.Tensor, poison: cute.Tensor, record: Int64, epoch, active):
        """Writes down which sources a lane still misses, and refuses all later rounds. The whole warp
        calls."""
        for i in cutlass.range_constexpr(self.world):
            missing = Boolean(False)
            for j in cutlass.range_constexpr(4 * self.step.chunks):
                missing = missing | (received[j, i] == 0)
            if active & missing:
                system.store4(record + 4 * (config.RECORD_MISSING + i), 1)
        system.store4(record + 4 * config.RECORD_EPOCH, epoch)
        system.store4(poison.iterator.toint(), 1)
        system.fence()
        cute.arch.sync_warp()  # the state comes after every lane's words
        system.store4(record + 4 * config.RECORD_STATE, 1)

    @cute.jit
    def normalise(
        self,
        smem: SmemAllocator,
        x: cute.Tensor,
        gain: cute.Tensor,
        eps: Float32,
        weight_offset: Float32,
        tid,
        part,
        active,
        exchanges,
    ):
        """x <- x * rsqrt(mean(x^2) + eps) * (gain + weight_offset) over the row, in the order of
        hyper/steps.py: fma along a vector, butterfly over a warp, a fixed tree over the row's warps."""
        scratch = smem.allocate_tensor(Float32, cute.make_layout((self.parts * self.warps,)), 16)
        xf, wf = x.load().to(Float32), gain.load().to(Float32)
        square = Float32(0.0)
        for e in cutlass.range_constexpr(self.step.elems):
            square = fma(xf[e], xf[e], square)
        square = lanes_sum(select(active, square, Float32(0.0)))
        lane, warp = cute.arch.lane_idx(), part * self.warps + tid // 32
        cluster.await_announced()
        if exchanges & (lane < self.parts):
            cluster.store_to(scratch.iterator + warp, lane, square)
        cluster.sync()
        sums = scratch.load()
        total = pairwise_sum([sums[i] for i in range(self.norm_warps)])
        r = rsqrt(fma(total, 1.0 / self.hidden, eps))
        x.store((xf * r * (wf + weight_offset)).to(x.element_type))


def build(
    target: str,
    *,
    world: int,
    hidden: int,
    top_k: int,
    weight_dtype: str,
    shared: bool,
    gated: bool,
    norm: bool,
    dtype: str = "bf16",
    prefetch: bool = False,
    bounded: bool = True,
):
    """For `world` ranks and rows of `hidden` elements; run-time arguments as `FinalizeAllReduce.__call__`, no
    stream. top_k 0: the plain sum, whose x stands in the place of expert_out."""
    rows = args.rows()
    row = args.dense(dtype, rows, hidden, align=VEC_BYTES)
    kernel = FinalizeAllReduce(target, world, hidden, top_k, shared, gated, norm, prefetch, bounded)
    finalizes = top_k > 0
    return kernel, (
        args.dense(dtype, args.rows(), hidden, align=VEC_BYTES) if finalizes else row,
        args.dense("int32", args.rows()) if finalizes else None,
        args.dense(weight_dtype, rows, top_k) if finalizes else None,
        row if shared else None,
        args.dense("fp32", rows) if gated else None,
        args.dense(dtype, hidden, align=VEC_BYTES) if norm else None,
        row,
        args.dense("int64", world),
        args.dense("int32", args.rows()),
        args.dense("int32", 4),
        Int32(0),
        Int32(1),
        Int64(0),
        Int64(0),
        Float32(1e-6),
        Float32(0.0),
        args.current_stream(),
    )
