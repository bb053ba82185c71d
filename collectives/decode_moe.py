"""The decode step's MoE tail: routed experts and the shared branch on two streams, joined in one kernel.

    moe = DecodeMoE(comm, DecodeMoEConfig(tensor_parallel=4), gate_weight=w)
    y = moe(x, routed=experts, shared=shared_expert)

Whether a model may take this path is resolved once, from its config; what depends on the call is looked at in
the call. Every other call gets the general path, which finalizes, then sums, on one stream: the same bits.
Tokens and weights may be fp16 there; what then stands in for the finalize, which is bf16's, is its torch
reference in fp16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from collectives import checks, launch
from collectives.communicator import Communicator

Routed = tuple[Tensor, Tensor, Tensor]
"""expert_out [P, H], permuted_idx [T*K] int32, expert_weights [T, K]: not yet finalized."""

FAMILIES = (9, 10)
"""Major compute capabilities that the kernel is built for."""


@dataclass(frozen=True)
class DecodeMoEConfig:
    """What decides, once, whether a model may take the path; the defaults are the model's that it was made
    for.

    capability: of the GPU; None: that of the communicator's device, which a CPU has none of. max_tokens:
    calls with more tokens take the general path; at most the communicator's.
    """

    hidden: int = 2560
    experts: int = 512
    top_k: int = 10
    dtype: torch.dtype = torch.bfloat16
    tensor_parallel: int = 4
    expert_parallel: int = 1
    attention_data_parallel: int = 1
    lora: bool = False
    speculative_decoding: bool = False
    two_batch_overlap: bool = False
    moe_context_parallel_all_gather: bool = False
    capability: tuple[int, int] | None = None
    max_tokens: int = 1


class Guard(NamedTuple):
    """One condition of the path, and what a config has."""

    condition: str
    holds: bool
    got: object


def guards(config: DecodeMoEConfig, device: torch.device) -> tuple[Guard, ...]:
    """Every condition that a config is held to, in order."""
    capability = config.capability
    if capability is None and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
    off = ("lora", "speculative_decoding", "two_batch_overlap", "moe_context_parallel_all_gather")
    return (
        Guard("hidden is 2560", config.hidden == 2560, config.hidden),
        Guard("experts are 512", config.experts == 512, config.experts),
        Guard("top_k is 10", config.top_k == 10, config.top_k),
        Guard("dtype is torch.bfloat16", config.dtype is torch.bfloat16, config.dtype),
        Guard("capability is 9.x or 10.x", capability is not None and capability[0] in FAMILIES, capability),
        Guard("tensor_parallel is 2, 4 or 8", config.tensor_parallel in (2, 4, 8), config.tensor_parallel),
        Guard("expert_parallel is 1", config.expert_parallel == 1, config.expert_parallel),
        Guard(
            "attention_data_parallel is 1",
            config.attention_data_parallel == 1,
            config.attention_data_parallel,
        ),
        *(Guard(f"{name} is off", not getattr(config, name), getattr(config, name)) for name in off),
    )


class DecodeMoE:
    """One MoE block's tail on one rank.

    gate_weight: [H], of the shared expert's gate; None: the shared expert enters ungated. norm_weight: [H],
    for the norm of the sum; both of the tokens' dtype. routing_complete: see
    `Communicator.moe_finalize_all_reduce`; the fused path's alone. eligible, reason: what the config came to.

    Raises ValueError for arguments, and where config and communicator disagree.
    """

    def __init__(
        self,
        comm: Communicator,
        config: DecodeMoEConfig,
        *,
        gate_weight: Tensor | None = None,
        norm_weight: Tensor | None = None,
        eps: float = 1e-6,
        weight_offset: float = 0.0,
        routing_complete: bool = False,
    ):
        for name, theirs in (("hidden", comm.hidden), ("top_k", comm.top_k)):
            if getattr(config, name) != theirs:
                checks.fail(
                    "DecodeMoE", f"config.{name}", getattr(config, name), f"{theirs}, the communicator's"
                )
        if config.tensor_parallel != comm.world_size:
            got, theirs = config.tensor_parallel, comm.world_size
            checks.fail("DecodeMoE", "config.tensor_parallel", got, f"{theirs}, the communicator's ranks")
        checks.whole("DecodeMoE", "config.max_tokens", config.max_tokens, 1, comm.max_tokens)
        for name, weight in (("gate_weight", gate_weight), ("norm_weight", norm_weight)):
            if weight is not None:
                of_weight = f"(H,) with H = {comm.hidden}"
                checks.tensor("DecodeMoE", name, weight, (comm.hidden,), checks.ACT, comm.device, of_weight)
        checks.scalar("DecodeMoE", "eps", eps, at_least=0.0)
        checks.scalar("DecodeMoE", "weight_offset", weight_offset)
        if not isinstance(routing_complete, bool):
            checks.fail("DecodeMoE", "routing_complete", repr(routing_complete), "True or False")
        self.comm, self.config = comm, config
        self.gate_weight, self.norm_weight = gate_weight, norm_weight
        self.eps, self.weight_offset, self.routing_complete = eps, weight_offset, routing_complete
        failed = next((g for g in guards(config, comm.device) if not g.holds), None)
        self.eligible = failed is None
        self.reason = "every guard holds" if failed is None else f"{failed.condition}: got {failed.got}"
        self._finalize = launch.resolve(launch.FINALIZE_OP)
        self._finalize_fp16 = launch.resolve(launch.FINALIZE)
        self._gate = launch.resolve(launch.SHARED_GATE_OP)

    def takes(self, x: Tensor) -> str:
        """Why a call with these tokens takes the path it takes: "fused", or the condition that it does not
        meet."""
        if not self.eligible:
            return self.reason
        if not 1 <= x.shape[0] <= self.config.max_tokens:
            return f"tokens are 1 to {self.config.max_tokens}: got {x.shape[0]}"
        if x.dtype is not torch.bfloat16:
            return f"dtype is torch.bfloat16: got {x.dtype}"
        return "fused"

    def __call__(
        self,
        x: Tensor,
        routed: Callable[[Tensor], Routed],
        shared: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """x [T, H] bf16 or fp16, the tokens of all ranks alike -> [T, H], the block's output summed over
        ranks.

        routed: gives the rank's expert rows. shared: gives the rank's part of the shared expert [T, H]; on
        the fused path it runs on a stream of its own, with the gate, beside `routed`. Raises ValueError for
        arguments, and as `Communicator.moe_finalize_all_reduce`.
        """
        self._check(x, routed, shared)
        if self.takes(x) != "fused":
            return self._general(x, routed, shared)
        side = self.comm.side_stream if shared is not None else None
        if side is None:
            expert_out, permuted_idx, expert_weights = self._routed(x, routed)
            shared_out, gate = self._branch(x, shared)
        else:
            main = torch.cuda.current_stream(self.comm.device)
            side.wait_stream(main)
            try:
                with torch.cuda.stream(side):
                    shared_out, gate = self._branch(x, shared)
                expert_out, permuted_idx, expert_weights = self._routed(x, routed)
            finally:
                main.wait_stream(side)  # a capture must not be left with a stream that never joined
            for made in (shared_out, gate):
                if made is not None:
                    made.record_stream(main)
        return self.comm.moe_finalize_all_reduce(
            expert_out,
            permuted_idx,
            expert_weights,
            shared_out,
            gate,
            self.norm_weight,
            self.eps,
            weight_offset=self.weight_offset,
            routing_complete=self.routing_complete,
        )

    def _check(self, x: Tensor, routed: object, shared: object) -> None:
        if not (isinstance(x, Tensor) and x.device == self.comm.device and x.dtype in checks.ACT) or (
            x.dim() != 2 or x.shape[1] != self.comm.hidden
        ):
            hidden = self.comm.hidden
            got = f"{x.dtype} {tuple(x.shape)} on {x.device}" if isinstance(x, Tensor) else repr(x)
            allowed = f"(T, H) with H = {hidden}, bf16 or fp16, on {self.comm.device}"
            checks.fail("DecodeMoE", "x", got, allowed)
        if not callable(routed):
            checks.fail("DecodeMoE", "routed", repr(routed), "a function of the tokens")
        if shared is not None and not callable(shared):
            checks.fail("DecodeMoE", "shared", repr(shared), "a function of the tokens, or None")

    def _routed(self, x: Tensor, routed: Callable[[Tensor], Routed]) -> Routed:
        """The rank's expert rows, for as many tokens as there are."""
        made: Any = routed(x)
        if not isinstance(made, (tuple, list)) or len(made) != 3:
            got = f"{len(made)} values" if isinstance(made, (tuple, list)) else f"a {type(made).__name__}"
            allowed = "expert_out, permuted_idx and expert_weights"
            checks.fail("DecodeMoE", "routed", f"{got} from it", allowed)
        expert_out, permuted_idx, expert_weights = made
        rows = expert_weights.shape[:1] if isinstance(expert_weights, Tensor) else x.shape[:1]
        if rows != x.shape[:1]:
            got = f"expert_weights of shape {tuple(expert_weights.shape)} from it"
            checks.fail("DecodeMoE", "routed", got, f"(T, K) with T = {x.shape[0]} of x")
        return expert_out, permuted_idx, expert_weights

    def _branch(
        self, x: Tensor, shared: Callable[[Tensor], Tensor] | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """The shared expert's rows and its gate."""
        if shared is None:
            return None, None
        gate = None if self.gate_weight is None else self._gate(x, self.gate_weight)
        shared_out: Any = shared(x)
        if not isinstance(shared_out, Tensor):  # None would leave the shared expert out
            got = f"a {type(shared_out).__name__} from it"
            checks.fail("DecodeMoE", "shared", got, "the shared expert's rows (T, H)")
        return shared_out, gate

    def _general(
        self, x: Tensor, routed: Callable[[Tensor], Routed], shared: Callable[[Tensor], Tensor] | None
    ) -> Tensor:
        shared_out, gate = self._branch(x, shared)
        tensors = (*self._routed(x, routed), shared_out, gate)
        if x.dtype is torch.float16:
            comm = self.comm
            checks.finalize_inputs("DecodeMoE", tensors, comm.hidden, comm.top_k, comm.device, x.dtype)
            local = self._finalize_fp16(*tensors)
        else:
            local = self._finalize(*tensors)
        return self.comm.all_reduce(
            local, norm_weight=self.norm_weight, eps=self.eps, weight_offset=self.weight_offset
        )
