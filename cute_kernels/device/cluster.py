"""Clusters: a value to every CTA of the cluster through distributed shared memory, and the barrier around
it."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32


def announce() -> None:
    """This CTA has started. A `broadcast` needs every CTA to have: `await_announced` before the first."""
    cute.arch.cluster_arrive_relaxed()


def await_announced() -> None:
    """Every CTA of the cluster has started, so its shared memory may be written."""
    cute.arch.cluster_wait()


def store_to(address, cta, value: Float32) -> None:
    """`value` into the shared memory of CTA `cta` of the cluster, where `address` is in this CTA's."""
    cute.arch.inline_ptx(
        "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, {$r0}, {$r1}; "
        "st.shared::cluster.f32 [remote], {$r2}; }",
        read_only_args=[address.toint(), Int32(cta), Float32(value)],
    )


def remote(address: Int32, cta) -> Int32:
    """The address, in the cluster's window, of a shared memory address in CTA `cta`."""
    return cute.arch.inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Int32],
        read_only_args=[address, Int32(cta)],
    )


def send(value: Float32, address: Int32, barrier: Int32) -> None:
    """`value` into a CTA's shared memory; it counts 4 bytes on a barrier there when it has come. Both
    addresses are `remote` ones of that CTA."""
    cute.arch.inline_ptx(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [{$r0}], {$r1}, [{$r2}];",
        read_only_args=[address, value, barrier],
    )


def sync() -> None:
    """Every CTA's `store_to` before it is seen after it (release, acquire at cluster scope)."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
