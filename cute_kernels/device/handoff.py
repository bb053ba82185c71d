"""Values handed from CTA to CTA: through the shared memory of a cluster, and through global memory.

Through global memory a 64-bit word carries 32 bits of payload and the epoch of the launch in one access, so
that no fence and no flag is needed: a reader that finds the epoch has found the payload.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64


def remote(address: Int32, rank) -> Int32:
    """The address, in the cluster's window, of a shared memory address in the CTA of a rank."""
    return cute.arch.inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Int32],
        read_only_args=[address, Int32(rank)],
    )


def send(value: Float32, address: Int32, barrier: Int32) -> None:
    """A value into a peer's shared memory; it counts 4 bytes on the peer's barrier when it is there."""
    cute.arch.inline_ptx(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [{$r0}], {$r1}, [{$r2}];",
        read_only_args=[address, value, barrier],
    )


def publish(payload: Int32, epoch: Int32, address: Int64) -> None:
    """Payload and epoch in one store."""
    cute.arch.inline_ptx(
        "{ .reg .b64 w; mov.b64 w, {{$r0}, {$r1}}; st.relaxed.gpu.global.b64 [{$r2}], w; }",
        read_only_args=[payload, epoch, address],
    )


def poll2(address: Int64, wanted, epoch: Int32) -> tuple:
    """Two neighbouring words as (payload, epoch, payload, epoch), each read as a whole, the two not at once;
    where nothing is wanted nothing is read and the epoch is as expected."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; .reg .b64 v, w; setp.ne.s32 p, {$r1}, 0; mov.b64 v, {{$r2}, {$r2}}; mov.b64 w, v; "
        "@p ld.relaxed.gpu.global.v2.b64 {v, w}, [{$r0}]; "
        "mov.b64 {{$w0}, {$w1}}, v; mov.b64 {{$w2}, {$w3}}, w; }",
        write_only_types=[Int32] * 4,
        read_only_args=[address, Int32(wanted), epoch],
    )
