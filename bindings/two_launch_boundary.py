"""hc_boundary by the kernels of its two halves, for shapes whose splits and streams do not nest in one CTA.

The halves are dispatched like any call: what serves `hc_apply_norm` and `hc_gate` at this shape serves here,
so the bits are theirs.
"""

from __future__ import annotations

from torch import Tensor


def hc_boundary(
    block: Tensor,
    residual: Tensor,
    partials: Tensor,
    norm_weight: Tensor,
    inject_weight: Tensor,
    combined: Tensor,
    normed: Tensor,
    next_partials: Tensor,
    eps: float,
) -> None:
    """Writes the last three tensors; arguments as `bindings.ops.hc_boundary`."""
    from bindings import ops  # which is built on the dispatcher, as this is one of its paths

    outs = {"combined_out": combined, "normed_out": normed}
    ops.hc_apply_norm(block, residual, partials, norm_weight, eps, **outs)
    ops.hc_gate(normed, inject_weight, out=next_partials)
