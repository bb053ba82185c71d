"""sglang's published packed GDN decode, a Triton kernel, with its value tile forced.

Its own choice is a tile of 32 value rows on Hopper, and on Blackwell 8 for one row of the model's shape. It
rounds sigmoid(b) to b's dtype, where the contract keeps fp32; it is checked against that definition. It has
no upper bound on a slot index.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from bindings import reference
from bindings.tolerance import Exact, to_numpy
from profiling.cases import Case, Results, gdn_rows
from profiling.peers import Peer

PACKAGE = "sglang (GDN decode)"

TILES = (4, 8, 16, 32)
SOFTPLUS_LINEAR_ABOVE = 20.0


def exact(case: Case) -> Callable[[list[int], Results], dict[str, Exact]]:
    """The contract in float64, sigmoid(b) rounded to b's dtype apart."""

    def of(rows: list[int], results: Results) -> dict[str, Exact]:
        some = {name: value.cpu() for name, value in gdn_rows(case.args, case.extra["initial"], rows).items()}
        beta = torch.sigmoid(some["b"].float()).to(some["b"].dtype).double()
        x = some["a"].double() + some["dt_bias"].double()
        softplus = torch.where(x <= SOFTPLUS_LINEAR_ABOVE, torch.log1p(torch.exp(x)), x)
        decay = torch.exp(-torch.exp(some["A_log"].double()) * softplus)
        heads, dim = some["state"].shape[1:3]
        keys = (some["mixed_qkv"].shape[1] - heads * dim) // 2
        q, k, v = (
            part.reshape(len(rows), -1, dim)
            for part in some["mixed_qkv"].double().split([keys, keys, heads * dim], dim=1)
        )
        out, state = reference.gdn_step(q, k, v, decay, beta, some["state"].double(), dim**-0.5)
        return {
            "gdn_packed_decode": Exact(to_numpy(out.unsqueeze(1))),
            "gdn_packed_decode.state": Exact(to_numpy(state)),
        }

    return of


def peers() -> list[Peer]:
    from sglang.kernels.ops.attention.fla.fused_recurrent import (
        fused_recurrent_gated_delta_rule_packed_decode_kernel as kernel,
    )

    def prepare(tile: int) -> Callable[[Case], Callable[[], Mapping[str, Tensor]]]:
        def of(case: Case) -> Callable[[], Mapping[str, Tensor]]:
            args, out = case.args, case.outs["out"]
            state, qkv = args["state"], args["mixed_qkv"]
            rows, (heads, dim) = case.rows, state.shape[1:3]
            key_heads = (qkv.shape[1] - heads * dim) // (2 * dim)
            grid = (dim // tile, rows * heads)

            def call() -> Mapping[str, Tensor]:
                kernel[grid](
                    mixed_qkv=qkv,
                    a=args["a"],
                    b=args["b"],
                    A_log=args["A_log"],
                    dt_bias=args["dt_bias"],
                    o=out,
                    h0=state,
                    ht=state,
                    ssm_state_indices=args["state_indices"],
                    scale=dim**-0.5,
                    stride_mixed_qkv_tok=qkv.stride(0),
                    stride_a_tok=args["a"].stride(0),
                    stride_b_tok=args["b"].stride(0),
                    stride_init_state_token=state.stride(0),
                    stride_final_state_token=state.stride(0),
                    stride_indices_seq=args["state_indices"].stride(0),
                    H=key_heads,
                    HV=heads,
                    K=dim,
                    V=dim,
                    BK=dim,
                    BV=tile,
                    SOFTPLUS_THRESHOLD=SOFTPLUS_LINEAR_ABOVE,
                    USE_QK_L2NORM_IN_KERNEL=True,
                    num_warps=1,
                    num_stages=3,
                )
                return {"gdn_packed_decode": out, "gdn_packed_decode.state": state}

            return call

        return of

    return [
        Peer(f"sglang Triton GDN, tile {tile}", "gdn_packed_decode", prepare(tile), exact=exact)
        for tile in TILES
    ]
