"""flashinfer's published GDN decode over a pool of states with keys innermost.

It takes q, k and v apart, which are views of the packed rows here, and reads and writes the pool by slot
index. An index below 0 gives a row of zeros; it has no upper bound on an index.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from profiling.cases import Case
from profiling.peers import Peer

PACKAGE = "flashinfer (GDN decode)"


def refuses(case: Case) -> str | None:
    """Activations of 16 bits, an fp32 or bf16 state of head dimension 128."""
    state = case.args["state"]
    if state.shape[-1] != 128:
        return f"takes a head dimension of 128, not {state.shape[-1]}"
    if state.dtype not in (torch.float32, torch.bfloat16):
        return f"takes no {state.dtype} state"
    return None


def peers() -> list[Peer]:
    from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose as decode

    def prepare(case: Case) -> Callable[[], Mapping[str, Tensor]]:
        args, out = case.args, case.outs["out"]
        state, qkv = args["state"], args["mixed_qkv"]
        heads, dim = state.shape[1:3]
        keys = (qkv.shape[1] - heads * dim) // 2
        q, k, v = (
            part.unflatten(1, (-1, dim)).unsqueeze(1) for part in qkv.split([keys, keys, heads * dim], dim=1)
        )
        a, b = args["a"].unsqueeze(1), args["b"].unsqueeze(1)

        def call() -> Mapping[str, Tensor]:
            decode(
                q=q,
                k=k,
                v=v,
                state=None,
                A_log=args["A_log"],
                a=a,
                dt_bias=args["dt_bias"],
                b=b,
                scale=dim**-0.5,
                output=out,
                use_qk_l2norm=True,
                initial_state=state,
                initial_state_indices=args["state_indices"],
            )
            return {"gdn_packed_decode": out, "gdn_packed_decode.state": state}

        return call

    return [Peer("flashinfer GDN", "gdn_packed_decode", prepare, refuses, allowance=4.0)]
