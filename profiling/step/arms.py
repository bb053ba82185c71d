"""The two arms of the step. `Unfused`: every published separate launch, or torch's where none is published.
`Fused`: ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bindings import ops
from bindings.hyper import HCState, HyperConnection
from bindings.registry import ModelConfig
from profiling.cases import Case
from profiling.peers import Found, Peer
from profiling.step.model import Gdn

PUBLISHED = {
    "grouped_gemma_rmsnorm": "sglang grouped norm",
    "hc_mix": "sglang Triton hc_mix",
    "hc_gate_apply_norm": "sglang hc_combine_split + norm",
    "hc_gate": "sglang hc_combine_gate",
    "hc_apply": "sglang hc_combine_apply",
    "gdn_packed_decode": "sglang Triton GDN, tile 32",
}
"""The peer that the unfused arm calls for a piece of work. Of GDN's tiles, 32 is its authors' choice on
Hopper."""


GATES = ("boundary", "beside")
"""Where the fused arm's gate runs: in the launch of the boundary before it, or on a stream beside the
block."""


class Alone:
    """In place of a communicator where none can be had: a rank's own part is the sum."""

    name = "none: all-reduces left out of both arms"
    fuses = False
    added = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True)
class Communicator:
    """One of `collectives`, as the arms use it. added: over loopback, how often it adds up the rank's own
    part."""

    comm: Any
    name: str
    added: int
    fuses = True

    def all_reduce(self, x: Tensor) -> Tensor:
        result: Tensor = self.comm.all_reduce(x)
        return result


class Fused:
    """This package's operators, through the calls that a model makes."""

    name = "fused"

    def __init__(self, comm: Alone | Communicator, gate: str = GATES[0]) -> None:
        self.comm, self.gate = comm, gate

    def start(self, residual: Tensor) -> HCState:
        return HCState.start(residual)

    def residual(self, state: HCState) -> Tensor:
        return state.residual

    def read(self, at: HyperConnection, state: HCState) -> tuple[Tensor, HCState]:
        return at.read(state)

    def write(
        self, at: HyperConnection, block: Tensor, state: HCState, following: HyperConnection | None
    ) -> HCState:
        if self.gate == "beside" or following is None or following.inject_weight is None:
            return at.write(block, state, next_norm=following)
        return at.write(block, state, next_norm=following, next_inject=following.inject_weight)

    def final(self, at: HyperConnection, state: HCState) -> Tensor:
        return at.final_read(state)

    def gdn(self, qkv: Tensor, a: Tensor, b: Tensor, weights: Gdn, state: Tensor, slots: Tensor) -> Tensor:
        return ops.gdn_packed_decode(qkv, a, b, weights.A_log, weights.dt_bias, state, slots)

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.comm.all_reduce(x)

    def tail(
        self, x: Tensor, experts: Tensor, slots: Tensor, weights: Tensor, shared: Tensor, gate_weight: Tensor
    ) -> Tensor:
        gate = ops.shared_gate(x, gate_weight)
        if isinstance(self.comm, Communicator):
            result: Tensor = self.comm.comm.moe_finalize_all_reduce(experts, slots, weights, shared, gate)
            return result
        return ops.moe_finalize(experts, slots, weights, shared, gate)

    def describe(self) -> dict[str, str]:
        """What carries out each piece of work."""
        tail = "moe_finalize_all_reduce" if self.comm.fuses else "moe_finalize"
        return {
            "boundary": f"bindings.hyper.HyperConnection, gate {self.gate}",
            "gdn": "bindings.ops.gdn_packed_decode",
            "tail": f"bindings.ops.shared_gate, {tail}",
            "all_reduce": self.comm.name,
        }


@dataclass(frozen=True)
class Open:
    """The unfused arm's state between layers. normed: None until the next read."""

    residual: Tensor
    normed: Tensor | None = None


class Unfused:
    """Separate launches, each by its published kernel where the package is here, else by torch.

    An expert tail is what an engine without a fused one runs: finalize, the gate, a multiply-add, the
    all-reduce. Its finalize is this package's kernel without the shared expert, for no published one can be
    had without its engine; it has the fewest launches and reads the least that a finalize can.
    """

    name = "unfused"

    def __init__(self, comm: Alone | Communicator, found: Found, model: ModelConfig) -> None:
        self.comm, self.model = comm, model
        self.peers = {op: self._choose(found, op) for op in PUBLISHED}

    @staticmethod
    def _choose(found: Found, op: str) -> Peer:
        offered = {peer.name: peer for peer in found.of(op)}
        return offered.get(PUBLISHED[op]) or offered["torch eager"]

    def _call(self, op: str, outs: Mapping[str, Callable[[], Tensor]], **args: Any) -> Mapping[str, Tensor]:
        case = Case(op, 1, args, {name: make() for name, make in outs.items()}, 0, lambda rows, results: {})
        return self.peers[op].prepare(case)()

    def start(self, residual: Tensor) -> Open:
        return Open(residual)

    def residual(self, state: Open) -> Tensor:
        return state.residual

    def _normed(self, at: HyperConnection, state: Open) -> Tensor:
        if state.normed is not None:
            return state.normed
        x = state.residual
        args = {"x": x, "weight": at.norm_weight, "eps": at.eps, "group_size": at.hidden}
        out = {"out": lambda: torch.empty_like(x)}
        return self._call("grouped_gemma_rmsnorm", out, **args)["grouped_gemma_rmsnorm"]

    def read(self, at: HyperConnection, state: Open) -> tuple[Tensor, Open]:
        normed = self._normed(at, state)
        return self._mix(at, normed), Open(state.residual, normed)

    def _mix(self, at: HyperConnection, normed: Tensor) -> Tensor:
        out = {"out": lambda: normed.new_empty(1, at.hidden)}
        weights = {"w_down": at.w_down, "w_up": at.w_up, "streams": at.streams}
        return self._call("hc_mix", out, normed=normed, **weights)["hc_mix"]

    def write(
        self, at: HyperConnection, block: Tensor, state: Open, following: HyperConnection | None
    ) -> Open:
        residual, normed = state.residual, state.normed
        assert normed is not None, "a write comes after a read"
        weight = at.inject_weight
        if following is None:
            partials = self._call("hc_gate", {}, normed=normed, inject_weight=weight)["hc_gate.sum"]
            if partials.dim() == 2:  # torch's has no splits
                partials = partials.unsqueeze(1)
            known = {"block": block, "residual": residual, "partials": partials}
            out = {"out": lambda: torch.empty_like(residual)}
            return Open(self._call("hc_apply", out, **known)["hc_apply"])
        outs = dict.fromkeys(("combined_out", "normed_out"), lambda: torch.empty_like(residual))
        args: dict[str, Any] = {
            "normed": normed,
            "inject_weight": weight,
            "block": block,
            "residual": residual,
        }
        args |= {"norm_weight": following.norm_weight, "eps": following.eps}
        done = self._call("hc_gate_apply_norm", outs, **args)
        return Open(done["hc_apply_norm.combined"], done["hc_apply_norm.normed"])

    def final(self, at: HyperConnection, state: Open) -> Tensor:
        return self._mix(at, self._normed(at, state))

    def gdn(self, qkv: Tensor, a: Tensor, b: Tensor, weights: Gdn, state: Tensor, slots: Tensor) -> Tensor:
        rows = {"mixed_qkv": qkv, "a": a, "b": b, "A_log": weights.A_log, "dt_bias": weights.dt_bias}
        heads, dim = state.shape[1:3]
        out = {"out": lambda: qkv.new_empty(1, 1, heads, dim)}
        return self._call("gdn_packed_decode", out, **rows, state=state, state_indices=slots)[
            "gdn_packed_decode"
        ]

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.comm.all_reduce(x)

    def tail(
        self, x: Tensor, experts: Tensor, slots: Tensor, weights: Tensor, shared: Tensor, gate_weight: Tensor
    ) -> Tensor:
        routed = ops.moe_finalize(experts, slots, weights)
        gate = torch.sigmoid(functional.linear(x, gate_weight.unsqueeze(0)))
        return self.comm.all_reduce(torch.addcmul(routed, gate, shared))

    def describe(self) -> dict[str, str]:
        """What carries out each piece of work."""
        return {
            **{op: peer.name for op, peer in self.peers.items()},
            "tail": "moe_finalize without shared, torch linear, sigmoid, addcmul, all-reduce",
            "all_reduce": self.comm.name,
        }
