"""Every kernel in one chain, each reading what others wrote just before, or several launches before.

One iteration is three layer boundaries around a GDN decode and an MoE finalize of matching shapes. Kernels
that are launched before their predecessors are done read stale data here if they wait too little, and a
buffer that is used again too early is overwritten while it is read: completion is not transitive unless every
block of every kernel waits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import bindings
from bindings import ops
from tests.draw import BF16, Draw
from tests.harness import assert_same_bits

H, C, HK, HV, D, K = 1536, 4, 4, 12, 128, 8
W, QKV = C * H, (2 * HK + HV) * D
POOL = 16
RESULTS = ("partials", "decoded", "combined", "middle", "inner", "gate", "routed", "merged", "between")
RESULTS = (*RESULTS, "joined", "normed", "next")
LAUNCHES = 9
"""Launches an iteration."""


class Chain:
    """Buffers and inputs of a chain of T rows.

    sets: iteration i writes its results to set i % sets: as many sets as iterations keep every result, two
    reuse memory as early as the data flow allows.
    """

    def __init__(self, T: int, sets: int, device: str, seed: int = 0) -> None:
        draw = Draw(f"chain-{T}-{seed}")
        self.T, self.sets = T, sets

        def uniform(*shape: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> Tensor:
            return draw.uniform(*shape, scale=scale, dtype=dtype).to(device)

        self.inject, self.norm_weight = uniform(C, W, scale=0.05), uniform(W, scale=0.3)
        self.gate_weight = uniform(H, scale=0.05)
        self.A_log = uniform(HV, scale=2, dtype=torch.float32)
        self.dt_bias = uniform(HV, dtype=torch.float32)
        self.state_indices = torch.arange(1, T + 1, dtype=torch.int32, device=device)
        slots = torch.randint(-1, T * C, (POOL, T * K), generator=draw.generator, dtype=torch.int32)
        # What changes between replays; iterations take turns with it.
        self.slots = slots.to(device)
        self.expert_weights = uniform(POOL, T, K, scale=0.5, dtype=torch.float32)
        self.residuals = uniform(POOL, T, W, scale=3)
        # What the chain carries.
        self.state = uniform(T + 2, HV, D, D, scale=0.5, dtype=torch.float32)
        self.carry = uniform(T, W, scale=2)
        shapes = {
            "partials": (8, C), "decoded": (1, HV, D), "combined": (W,), "middle": (W,), "inner": (8, C),
            "gate": (4,), "routed": (H,), "merged": (W,), "between": (W,), "joined": (W,), "normed": (W,),
            "next": (8, C),
        }  # fmt: skip
        wide = ("partials", "inner", "gate", "next")
        self.results = {
            name: torch.zeros(sets, T, *shape, device=device, dtype=torch.float32 if name in wide else BF16)
            for name, shape in shapes.items()
        }

    def iterate(self, i: int, normed: Tensor, after: Callable[[], None]) -> Tensor:
        """Iteration i from the normed rows of the one before; its own are returned. `after` follows every
        launch."""
        r = {name: values[i % self.sets] for name, values in self.results.items()}
        block = r["decoded"].view(self.T, H)
        gate = r["gate"].view(-1)[: self.T]  # a set of its own starts on 16 bytes
        turn = i % POOL
        ops.hc_gate(normed, self.inject, out=r["partials"])
        after()
        packed, a, b, _ = normed.split([QKV, HV, HV, W - QKV - 2 * HV], dim=1)
        weights, state = (self.A_log, self.dt_bias), (self.state, self.state_indices)
        ops.gdn_packed_decode(packed, a, b, *weights, *state, out=r["decoded"])
        after()
        ops.hc_apply(block, self.residuals[turn], r["partials"], out=r["combined"])
        after()
        ops.grouped_gemma_rmsnorm(r["combined"], self.norm_weight, group_size=H, out=r["middle"])
        after()
        ops.hc_gate(r["middle"], self.inject, out=r["inner"])
        after()
        ops.shared_gate(block, self.gate_weight, out=gate)
        after()
        experts, slots, shares = r["combined"].view(-1, H), self.slots[turn], self.expert_weights[turn]
        ops.moe_finalize(experts, slots, shares, block, gate, out=r["routed"])
        after()
        merged = (r["routed"], r["combined"], r["inner"], self.norm_weight)
        ops.hc_apply_norm(*merged, combined_out=r["merged"], normed_out=r["between"])
        after()
        joined = (block, r["merged"], r["inner"], self.norm_weight, self.inject)
        outs = {"combined_out": r["joined"], "normed_out": r["normed"], "partials_out": r["next"]}
        ops.hc_boundary(*joined, **outs)
        after()
        return r["normed"]

    def run(self, iterations: int, backend: str, after: Callable[[], None] = lambda: None) -> None:
        """A stretch of iterations from what the last stretch carried over; then the inputs change."""
        normed = self.carry
        with bindings.backend(backend):
            for i in range(iterations):
                normed = self.iterate(i, normed, after)
        self.carry.copy_(normed)
        for changing in (self.slots, self.expert_weights, self.residuals):
            changing.copy_(changing.roll(1, 0))

    def assert_equal(self, other: Chain, what: str) -> None:
        """Every result that both hold (of the last iterations, where one has fewer sets), and what is carried
        over."""
        assert_same_bits(self.carry, other.carry, f"{what}: carried rows")
        assert_same_bits(self.state, other.state, f"{what}: state")
        for name in RESULTS:
            mine, theirs = self.results[name], other.results[name]
            kept = min(self.sets, other.sets)
            assert_same_bits(mine[-kept:], theirs[-kept:], f"{what}: {name}")
