"""sglang's published mix of the residual streams, one persistent Triton kernel.

It takes at most sixteen rows and adds up the down projection with atomics, so its bits differ from run to
run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from profiling.cases import MODEL, Case
from profiling.peers import Peer, at_most

PACKAGE = "sglang (mix)"

ROWS = 16


def peers() -> list[Peer]:
    from sglang.kernels.ops.gemm.hc_mix import fused_hc_mix

    def mix(case: Case) -> Callable[[], Mapping[str, Tensor]]:
        normed, down, up = (case.args[n] for n in ("normed", "w_down", "w_up"))
        return lambda: {"hc_mix": fused_hc_mix(normed, down, up, MODEL.streams, MODEL.hidden)}

    return [Peer("sglang Triton hc_mix", "hc_mix", mix, at_most(ROWS))]
