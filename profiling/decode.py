"""One rank's decode step with the model's real shapes: the chain of boundaries, GDN and MoE tails that the
kernels serve.

Each layer is an attention block (GDN on three layers in four) and an MoE block, each between an HC read and
an HC write. What lies inside a block and is not one of the operators is a pointwise stand-in, so that the
boundary is what is seen. The embedding that the model adds before layer 1 is a stand-in too; it keeps the
write before it unfused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bindings import ModelConfig, ops
from bindings.hyper import HCState, HyperConnection

LAYERS = 48
BOUNDARIES = ("separate", "fused")
"""How a write prepares the next read: its norm alone, and the gate runs beside the block; or its gate too."""

EXPERT_ROWS = 16
"""Rows of expert output for each token: what its slots name, and padding that no slot does."""


def is_gdn(layer: int) -> bool:
    """Three GDN layers, then one of full attention, repeated."""
    return layer % 4 != 3


@dataclass(frozen=True)
class Gdn:
    """One GDN layer's parameters and its recurrent state, which a step updates."""

    A_log: Tensor
    dt_bias: Tensor
    state: Tensor


@dataclass(frozen=True)
class Moe:
    """One MoE block's tail: the shared expert's gate, and stand-ins for what routing and the experts give."""

    gate_weight: Tensor
    expert_scale: Tensor
    permuted_idx: Tensor
    expert_weights: Tensor


class DecodeChain:
    """Seeded weights and inputs of one decode step, and the step itself.

    tokens: T, one row each. Every boundary has weights of its own, 13.1 MB for its mix: 1.3 GB at 48 layers,
    as a model has, so a step finds them outside the caches. The same seed gives the same values on one kind
    of device. boundary: of BOUNDARIES; the results are the same bits.
    """

    def __init__(
        self,
        layers: int,
        tokens: int = 1,
        device: torch.device | None = None,
        seed: int = 0,
        gate_stream: str = "side",
        config: ModelConfig | None = None,
        boundary: str = BOUNDARIES[0],
    ) -> None:
        self.config = s = config or ModelConfig()
        self.boundary = boundary
        self.layers, self.tokens = layers, tokens
        self.device = device or torch.device("cpu")
        generator = torch.Generator(device=self.device).manual_seed(seed)

        def uniform(*shape: int, low: float, high: float, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            values = torch.empty(shape, device=self.device, dtype=torch.float32)
            return values.uniform_(low, high, generator=generator).to(dtype)

        def connection(writes: bool) -> HyperConnection:
            return HyperConnection(
                norm_weight=uniform(s.width, low=-0.3, high=0.3),
                inject_weight=uniform(s.streams, s.width, low=-0.05, high=0.05) if writes else None,
                w_down=uniform(s.low_rank, s.width, low=-0.03, high=0.03),
                w_up=uniform(s.width, s.low_rank, low=-0.2, high=0.2),
                streams=s.streams,
                gate_stream=gate_stream,
            )

        self.connections = [connection(writes=True) for _ in range(2 * layers)]
        self.final = connection(writes=False)
        self.residual = uniform(tokens, s.width, low=-3.0, high=3.0)
        self.embedding = uniform(tokens, s.width, low=-1.0, high=1.0)
        # One slot more than rows: a pool is never exactly full.
        pool = (tokens + 1, s.value_heads, s.head_dim, s.head_dim)
        self.slots = torch.arange(tokens, 0, -1, dtype=torch.int32, device=self.device)
        fp32 = torch.float32
        self.gdn = {
            layer: Gdn(
                A_log=uniform(s.value_heads, low=-4.0, high=1.0, dtype=fp32),
                dt_bias=uniform(s.value_heads, low=-4.0, high=4.0, dtype=fp32),
                state=uniform(*pool, low=-0.5, high=0.5, dtype=s.state_dtype),
            )
            for layer in range(layers)
            if is_gdn(layer)
        }
        order = torch.rand(tokens, EXPERT_ROWS, device=self.device, generator=generator).argsort(1)
        first = torch.arange(tokens, device=self.device).unsqueeze(1) * EXPERT_ROWS
        permuted_idx = (first + order[:, : s.top_k]).to(torch.int32).flatten()

        def moe() -> Moe:
            weights = uniform(tokens, s.top_k, low=0.0, high=1.0, dtype=fp32)
            return Moe(
                gate_weight=uniform(s.hidden, low=-0.05, high=0.05),
                expert_scale=uniform(EXPERT_ROWS, 1, low=-2.0, high=2.0),
                permuted_idx=permuted_idx,
                expert_weights=(weights / weights.sum(1, keepdim=True)).to(s.expert_weight_dtype),
            )

        self.moe = [moe() for _ in range(layers)]
        self._initial = {layer: gdn.state.clone() for layer, gdn in self.gdn.items()}
        if self.device.type == "cuda":  # kernels read weights before they wait for what runs before them
            torch.cuda.synchronize(self.device)

    def reset(self) -> None:
        """Sets the recurrent states back, so that the next step repeats the first one."""
        for layer, gdn in self.gdn.items():
            gdn.state.copy_(self._initial[layer])

    def outcome(self, x: Tensor) -> list[Tensor]:
        """Copies of everything that a step produced: its output and the recurrent states."""
        return [x.clone(), *(gdn.state.clone() for gdn in self.gdn.values())]

    def expected_calls(self) -> dict[str, int]:
        """Calls of each operator in one step."""
        writes, updates = 2 * self.layers, int(self.layers > 1)
        # the write before the final mixer, which has no gate, and the one before the embedding prepare none
        gates = writes - updates - 1 if self.boundary == "fused" else 0
        return {
            "grouped_gemma_rmsnorm": 1 + updates,
            "hc_gate": writes - gates,
            "hc_mix": writes + 1,
            "hc_apply": updates,
            "hc_apply_norm": writes - updates - gates,
            "hc_boundary": gates,
            "gdn_packed_decode": len(self.gdn),
            "shared_gate": self.layers,
            "moe_finalize": self.layers,
        }

    def step(self, progress: Callable[[int], None] | None = None) -> Tensor:
        """One token of every row through all layers: the final mixer's [T, H]. Calls progress(layer)."""
        state = HCState.start(self.residual)
        following = [*self.connections[1:], self.final]
        for layer in range(self.layers):
            if layer == 1:
                state = state.with_residual(state.residual + self.embedding)
            for half, block in enumerate((self._attention, self._moe)):
                boundary = 2 * layer + half
                reader = None if layer == 0 and half == 1 and self.layers > 1 else following[boundary]
                x, state = self.connections[boundary].read(state)
                inject = reader.inject_weight if reader is not None and self.boundary == "fused" else None
                state = self.connections[boundary].write(block(layer, x), state, reader, inject)
            if progress is not None:
                progress(layer)
        return self.final.final_read(state)

    def _attention(self, layer: int, x: Tensor) -> Tensor:
        gdn = self.gdn.get(layer)
        if gdn is None:
            return torch.tanh(x)
        heads = self.config.value_heads
        # A row of x is as wide as a packed q, k, v row; a and b are views into it, rows apart, as a fused
        # projection leaves them.
        out = ops.gdn_packed_decode(
            x, x[:, :heads], x[:, 16 : 16 + heads], gdn.A_log, gdn.dt_bias, gdn.state, self.slots
        ).flatten(1)
        return torch.cat([out, x[:, out.shape[1] :]], dim=1)

    def _moe(self, layer: int, x: Tensor) -> Tensor:
        moe = self.moe[layer]
        gate = ops.shared_gate(x, moe.gate_weight)
        experts = (x.unsqueeze(1) * moe.expert_scale).flatten(0, 1)
        return ops.moe_finalize(experts, moe.permuted_idx, moe.expert_weights, torch.tanh(x), gate)
