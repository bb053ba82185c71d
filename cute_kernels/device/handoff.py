"""Values handed from CTA to CTA through global memory, where a cluster's shared memory does not reach.

A 64-bit word carries 32 bits of payload and the epoch of the launch in one access, so that no fence and no
flag is needed: a reader that finds the epoch has found the payload. Who polls bounds it: a writer may never
come.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, Int64


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
