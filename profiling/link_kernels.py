# mypy: ignore-errors
"""Between GPUs, in device code: what lines ranks up before a sample, and what measures the link.

    line up     one warp a rank. Ranks tell rank 0 that they are here; when all are, it tells each to go, and
                goes itself once that word has had its time on the way: `delay`, in cycles, which ping-pong
                measured. So ranks leave within what the link's latency varies by; from a plain barrier the
                last one to arrive leaves a whole latency before the others.
    ping-pong   one thread on each of two ranks: a word there, a word back, and so on. The time of all but
                the first rounds, in nanoseconds and in cycles.

A rank's buffer holds 32-bit words, LINE bytes apart: [0..N-1] who has arrived (rank 0's), [N] go, [N + 1]
ping-pong. Words count up and are never reset; the counts lie in device memory, so a launch takes no number
from the host. Waits are bounded by the device's clock; state[1] tells that one expired, and later ones expire
at once. Accesses are relaxed, of system scope: no other data is published by them.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.device import args, system
from cute_kernels.device.math import select

LINE = 128
BYTES = 64 * LINE
"""Of a rank's buffer: every lane has a word to look at."""
WARM_ROUNDS = 64
POLLS_A_LOOK = 256


class _Waits:
    @cute.jit
    def wait(self, address: Int64, value: Int32, active, timeout: Int64):
        """Until the word of every active lane is `value`; whether that took longer than `timeout` ns. The
        whole warp calls."""
        waits, late, polls, start = cute.arch.vote_ballot_sync(active), Int32(0), Int32(0), Int64(0)
        while waits != 0:
            got = system.load4(address)
            waits = cute.arch.vote_ballot_sync(active & (got != value))
            polls += 1
            if polls % POLLS_A_LOOK == 0:
                now = system.nanoseconds()
                start = select(start == 0, now, start)
                if now - start > timeout:
                    late, waits = Int32(1), Int32(0)
        return late


class LineUp(_Waits):
    """Run-time arguments: peers [N] int64, addresses of all ranks' buffers; state [2] int32, this rank's own:
    how often, and whether a wait expired; rank; delay in cycles; timeout in ns."""

    def __init__(self, world: int):
        self.world = world

    @cute.jit
    def __call__(
        self,
        peers: cute.Tensor,
        state: cute.Tensor,
        rank: Int32,
        delay: Int64,
        timeout: Int64,
        stream: cuda.CUstream,
    ):
        self.kernel(peers, state, rank, delay, timeout).launch(
            grid=(1, 1, 1), block=(32, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, peers: cute.Tensor, state: cute.Tensor, rank: Int32, delay: Int64, timeout: Int64):
        lane = cute.arch.lane_idx()
        round_, timeout = state[0] + 1, select(state[1] != 0, Int64(0), timeout)
        other = (lane > 0) & (lane < self.world)
        own, first = peers[rank], peers[0]
        if (rank != 0) & (lane == 0):
            system.store4(first + Int64(rank) * LINE, round_)
        word = select(rank == 0, lane, Int32(self.world))
        waits = select(rank == 0, Int32(other), Int32(lane == 0)) != 0
        late = self.wait(own + Int64(word) * LINE, round_, waits, timeout)
        if rank == 0:
            if other:
                system.store4(peers[lane] + Int64(self.world * LINE), round_)
            start = cute.arch.clock64()
            now = start
            while now - start < delay:
                now = cute.arch.clock64()
        cute.arch.sync_warp()
        if lane == 0:
            state[0] = round_
            if late != 0:
                state[1] = 1


class PingPong(_Waits):
    """Run-time arguments: peers, state as LineUp (state[0] counts rounds); rank, other: the two that play,
    the lower serves; rounds to be timed; timeout in ns of a wait; taken [2] int64: nanoseconds and cycles of
    them."""

    def __init__(self, world: int):
        self.world = world

    @cute.jit
    def __call__(
        self,
        peers: cute.Tensor,
        state: cute.Tensor,
        taken: cute.Tensor,
        rank: Int32,
        other: Int32,
        rounds: Int32,
        timeout: Int64,
        stream: cuda.CUstream,
    ):
        self.kernel(peers, state, taken, rank, other, rounds, timeout).launch(
            grid=(1, 1, 1), block=(32, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        peers: cute.Tensor,
        state: cute.Tensor,
        taken: cute.Tensor,
        rank: Int32,
        other: Int32,
        rounds: Int32,
        timeout: Int64,
    ):
        lane = cute.arch.lane_idx()
        place = Int64((self.world + 1) * LINE)
        own, there, one = peers[rank] + place, peers[other] + place, lane == 0
        count, last = state[0], state[0] + WARM_ROUNDS + rounds
        warm, late = count + WARM_ROUNDS, Int32(0)
        ns, clock = system.nanoseconds(), cute.arch.clock64()
        timeout = select(state[1] != 0, Int64(0), timeout)
        while count != last:
            count += 1
            if (rank < other) & one:
                system.store4(there, count)
            late = self.wait(own, count, one, timeout)
            if (rank > other) & one:
                system.store4(there, count)
            if count == warm:
                ns, clock = system.nanoseconds(), cute.arch.clock64()
            if late != 0:
                last = count
        ns, clock = system.nanoseconds() - ns, cute.arch.clock64() - clock
        if one:
            taken[0] = ns
            taken[1] = clock
            state[0] = count
            if late != 0:
                state[1] = 1


def build(target: str, *, kind: str, world: int):
    """The kernel of a kind, "line up" or "ping-pong", for a world of that many ranks."""
    if kind not in ("line up", "ping-pong") or not 2 <= world <= 32:
        raise ValueError(f"kind, world: got {kind!r}, {world}; allowed 'line up', 'ping-pong'; 2 to 32")
    peers, state = args.dense("int64", world), args.dense("int32", 2)
    if kind == "line up":
        return LineUp(world), (peers, state, Int32(0), Int64(0), Int64(0), args.current_stream())
    numbers = (Int32(0), Int32(1), Int32(1), Int64(0))
    return PingPong(world), (peers, state, args.dense("int64", 2), *numbers, args.current_stream())
