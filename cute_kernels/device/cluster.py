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


def sync() -> None:
    """Every CTA's `store_to` before it is seen after it (release, acquire at cluster scope)."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
