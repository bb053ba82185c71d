"""Access to memory that other GPUs and processes write: system scope, 16 bytes at a time, and its clock.

Each of the four 32-bit words of an access is single-copy atomic; the 16 bytes together are not. Addresses are
64-bit integers, as peers' buffers come. The statements are volatile: none is dropped, repeated or moved past
another one.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, Int64


def load16(address: Int64) -> tuple:
    """Four 32-bit words, relaxed: each access goes to memory's point of coherence, never to a stale cache."""
    return cute.arch.inline_ptx(
        "ld.relaxed.sys.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[Int64(address)],
    )


def store16(address: Int64, words) -> None:
    """Four 32-bit words, relaxed."""
    cute.arch.inline_ptx(
        "st.relaxed.sys.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[Int64(address), *[Int32(word) for word in words]],
    )


def load4(address: Int64) -> Int32:
    """One 32-bit word, relaxed."""
    return cute.arch.inline_ptx(
        "ld.relaxed.sys.global.b32 {$w0}, [{$r0}];",
        write_only_types=[Int32],
        read_only_args=[Int64(address)],
    )


def store4(address: Int64, word) -> None:
    """One 32-bit word, relaxed; host memory too."""
    cute.arch.inline_ptx(
        "st.relaxed.sys.global.b32 [{$r0}], {$r1};", read_only_args=[Int64(address), Int32(word)]
    )


def fence() -> None:
    """fence.acq_rel.sys: what this thread read and wrote before it comes, for every observer, before what it
    reads and writes after it."""
    cute.arch.fence_acq_rel_sys()


def fence_release() -> None:
    """fence.release.sys: what happened before it is seen by whoever sees a later store of this thread and
    then acquires."""
    cute.arch.inline_ptx("fence.release.sys;")


def fence_acquire() -> None:
    """fence.acquire.sys: the other half, after the load that saw the store."""
    cute.arch.inline_ptx("fence.acquire.sys;")


def nanoseconds() -> Int64:
    """The device's clock, %globaltimer. It runs on while the SM clock changes; its step is up to 1 us."""
    return cute.arch.globaltimer()
