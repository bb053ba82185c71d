"""Weights and states of one rank's decode step, seeded, and the step as a sequence of blocks that an arm
carries out.

Shapes are the model's at tensor parallelism 4. What its published facts leave open is taken as in models of
its kind: attention of 4 query heads and 1 key head of 256 a rank, a sigmoid gate on its output, a quarter
of a head rotated, a convolution of four taps before GDN. Embedding and output head are not part of the
step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from bindings import ModelConfig
from bindings.hyper import HyperConnection
from profiling.decode import is_gdn
from profiling.step import frame

TAPS = 4


@dataclass(frozen=True)
class Shape:
    """Sizes of the step. experts and layers shrink it; the width of an expert and of the shared one is a
    rank's."""

    layers: int = 48
    experts: int = 512
    context: int = 8192
    expert_width: int = 160
    query_heads: int = 4
    attention_dim: int = 256
    rotary: int = 64
    model: ModelConfig = field(default_factory=ModelConfig)

    @property
    def gdn_layers(self) -> int:
        return sum(is_gdn(layer) for layer in range(self.layers))

    @property
    def bytes(self) -> int:
        """Of all weights, roughly what the device must hold."""
        m = self.model
        moe = 3 * (self.experts + 1) * self.expert_width * m.hidden + self.experts * m.hidden
        mix = 2 * (2 * m.low_rank + m.streams + 1) * m.width
        cache = 2 * self.context * self.attention_dim
        return 2 * self.layers * (moe + mix + cache + 15 * 2**20)


@dataclass(frozen=True)
class Gdn:
    """projection: rows of qkv, z, b and a, [.., H]; conv: [4, qkv]; norm: [D]; out: [H, Hv*D]."""

    projection: Tensor
    conv: Tensor
    A_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    out: Tensor


@dataclass(frozen=True)
class Attention:
    """projection: q heads, their gates, k, v, [.., H]; norms [D]; out: [H, heads*D]."""

    projection: Tensor
    q_norm: Tensor
    k_norm: Tensor
    out: Tensor


@dataclass(frozen=True)
class Moe:
    """router: [E, H]; up: [E + 1, 2*F, H]; down: [E + 1, H, F], the last of both the shared expert's, which
    runs in the launches of the routed ones; shared_gate: [H]."""

    router: Tensor
    up: Tensor
    down: Tensor
    shared_gate: Tensor


@dataclass
class State:
    """What one arm's step changes: recurrent and convolution states, key and value caches, by layer."""

    gdn: dict[int, Tensor]
    conv: dict[int, Tensor]
    keys: dict[int, Tensor]
    values: dict[int, Tensor]

    def tensors(self) -> list[Tensor]:
        return [t for held in (self.gdn, self.conv, self.keys, self.values) for t in held.values()]

    def clone(self) -> State:
        return State(
            *(
                {layer: t.clone() for layer, t in held.items()}
                for held in (self.gdn, self.conv, self.keys, self.values)
            )
        )

    def copy_(self, other: State) -> None:
        """Takes over another's values, in place: captured graphs hold these tensors."""
        for mine, theirs in zip(self.tensors(), other.tensors(), strict=True):
            mine.copy_(theirs)


class Arm(Protocol):
    """How one side computes what is compared. Everything else is the frame's, and the same."""

    name: str

    def read(self, at: HyperConnection, state: Any) -> tuple[Tensor, Any]: ...

    def write(
        self, at: HyperConnection, block: Tensor, state: Any, following: HyperConnection | None
    ) -> Any: ...

    def start(self, residual: Tensor) -> Any: ...

    def residual(self, state: Any) -> Tensor: ...

    def final(self, at: HyperConnection, state: Any) -> Tensor: ...

    def gdn(
        self, qkv: Tensor, a: Tensor, b: Tensor, weights: Gdn, state: Tensor, slots: Tensor
    ) -> Tensor: ...

    def all_reduce(self, x: Tensor) -> Tensor: ...

    def tail(
        self, x: Tensor, experts: Tensor, slots: Tensor, weights: Tensor, shared: Tensor, gate_weight: Tensor
    ) -> Tensor: ...


Routing = tuple[Tensor, Tensor]


class StepModel:
    """Seeded weights of a rank's step, and the step. One token. added: how often an all-reduce adds up the
    rank's own part, as over loopback; weights are scaled by it."""

    def __init__(self, shape: Shape, device: torch.device, seed: int = 0, added: int = 1) -> None:
        self.shape, self.device = shape, device
        m = shape.model
        generator = torch.Generator(device=device).manual_seed(seed)

        def weight(*size: int, fan_in: int | None = None, gain: float = 1.0) -> Tensor:
            """Uniform, of variance gain**2 / fan_in."""
            bound = gain * math.sqrt(3.0 / (fan_in or size[-1]))
            values = torch.empty(size, dtype=m.dtype, device=device)
            return values.uniform_(-bound, bound, generator=generator)

        def near(value: float, *size: int, by: float = 0.2, dtype: torch.dtype = m.dtype) -> Tensor:
            values = torch.empty(size, dtype=torch.float32, device=device)
            return values.uniform_(value - by, value + by, generator=generator).to(dtype)

        def connection(writes: bool = True) -> HyperConnection:
            return HyperConnection(
                norm_weight=near(0.0, m.width),
                inject_weight=weight(m.streams, m.width) if writes else None,
                w_down=weight(m.low_rank, m.width, gain=2.0),
                w_up=weight(m.width, m.low_rank, gain=2.0),
                streams=m.streams,
            )

        heads, dim = m.value_heads, m.head_dim
        self.qkv = (2 * m.key_heads + heads) * dim
        attention_rows = (2 * shape.query_heads + 2) * shape.attention_dim
        fp32 = torch.float32
        loud = 8.0 / added  # blocks change the residual by more than its roundings

        def gdn() -> Gdn:
            return Gdn(
                projection=weight(self.qkv + heads * dim + 2 * heads, m.hidden),
                conv=weight(TAPS, self.qkv, fan_in=TAPS),
                A_log=near(0.5, heads, by=0.5, dtype=fp32),
                dt_bias=near(-4.0, heads, by=1.5, dtype=fp32),
                norm=near(1.0, dim),
                out=weight(m.hidden, heads * dim, gain=loud),
            )

        def attention() -> Attention:
            return Attention(
                projection=weight(attention_rows, m.hidden),
                q_norm=near(1.0, shape.attention_dim),
                k_norm=near(1.0, shape.attention_dim),
                out=weight(m.hidden, shape.query_heads * shape.attention_dim, gain=loud),
            )

        def moe() -> Moe:
            E, F, H = shape.experts, shape.expert_width, m.hidden
            return Moe(
                router=weight(E, H, gain=2.0),
                up=weight(E + 1, 2 * F, H),
                down=weight(E + 1, H, F, gain=loud),
                shared_gate=weight(H),
            )

        self.connections = [connection() for _ in range(2 * shape.layers)]
        self.final = connection(writes=False)
        self.attention = [gdn() if is_gdn(layer) else attention() for layer in range(shape.layers)]
        self.moe = [moe() for _ in range(shape.layers)]
        self.residual_in = near(0.0, 1, m.width, by=1.0)
        self.embedding = near(0.0, 1, m.width, by=1.0)
        self.slots = torch.ones(1, dtype=m.index_dtype, device=device)  # of two: a pool is never exactly full
        self.order = torch.arange(m.top_k, dtype=torch.int32, device=device)
        self.position = shape.context - 1
        half = shape.rotary // 2
        frequencies = 1e-4 ** (torch.arange(half, device=device) / half)
        self.angles = (self.position * frequencies).float().remainder(2 * math.pi)
        layers = range(shape.layers)
        self.state = State(
            gdn={i: near(0.0, 2, heads, dim, dim, by=0.3, dtype=m.state_dtype) for i in layers if is_gdn(i)},
            conv={i: near(0.0, TAPS - 1, self.qkv, by=1.0) for i in layers if is_gdn(i)},
            keys={i: near(0.0, shape.context, shape.attention_dim, by=1.0) for i in layers if not is_gdn(i)},
            values={
                i: near(0.0, shape.context, shape.attention_dim, by=1.0) for i in layers if not is_gdn(i)
            },
        )
        if device.type == "cuda":  # kernels read weights before they wait for what runs before them
            torch.cuda.synchronize(device)

    def expected(self) -> dict[str, int]:
        """Launches in one step of what the project fuses: boundaries with a norm, expert tails, GDN."""
        writes = 2 * self.shape.layers - int(self.shape.layers > 1)
        return {"boundary": writes, "tail": self.shape.layers, "gdn": self.shape.gdn_layers}

    def layer(
        self,
        arm: Arm,
        number: int,
        state: Any,
        held: State,
        routing: Routing | None = None,
        chosen: Callable[[Routing], None] | None = None,
    ) -> Any:
        """One layer, both of its blocks. routing: instead of the router's own choice; chosen: is told the
        router's."""
        at, between = self.connections[2 * number : 2 * number + 2]
        last = number == self.shape.layers - 1
        following = self.final if last else self.connections[2 * number + 2]
        x, state = arm.read(at, state)
        block = self._gdn if is_gdn(number) else self._attention
        state = arm.write(at, arm.all_reduce(block(arm, number, x, held)), state, between)
        x, state = arm.read(between, state)
        out = self._moe(arm, number, x, routing, chosen)
        # Layer 1's input is updated by the embedding, so the write before it prepares no norm.
        return arm.write(between, out, state, None if number == 0 and not last else following)

    def step(
        self,
        arm: Arm,
        held: State,
        routings: Sequence[Routing] | None = None,
        seen: Callable[[Tensor, Tensor], None] | None = None,
        chosen: Callable[[Routing], None] | None = None,
    ) -> Tensor:
        """The whole step: the final mixer's [1, H]. seen: is told the residual before and after every
        layer."""
        state = arm.start(self.residual_in)
        for number in range(self.shape.layers):
            if number == 1:
                state = arm.start(arm.residual(state) + self.embedding)
            before = arm.residual(state)
            state = self.layer(arm, number, state, held, routings[number] if routings else None, chosen)
            if seen is not None:
                seen(before, arm.residual(state))
        return arm.final(self.final, state)

    def _gdn(self, arm: Arm, number: int, x: Tensor, held: State) -> Tensor:
        w = self.attention[number]
        assert isinstance(w, Gdn)
        heads = self.shape.model.value_heads
        gated = heads * self.shape.model.head_dim
        row, z, b, a = functional.linear(x, w.projection).split([self.qkv, gated, heads, heads], dim=1)
        qkv = frame.conv_update(row, held.conv[number], w.conv)
        out = arm.gdn(qkv, a, b, w, held.gdn[number], self.slots)
        return functional.linear(frame.gated_norm(out.flatten(1), z, w.norm), w.out)

    def _attention(self, arm: Arm, number: int, x: Tensor, held: State) -> Tensor:
        w = self.attention[number]
        assert isinstance(w, Attention)
        row = functional.linear(x, w.projection)
        keys, values = held.keys[number], held.values[number]
        out = frame.attend(row, w.q_norm, w.k_norm, self.angles, keys, values, self.position)
        return functional.linear(out, w.out)

    def _moe(
        self,
        arm: Arm,
        number: int,
        x: Tensor,
        routing: Routing | None,
        chosen: Callable[[Routing], None] | None,
    ) -> Tensor:
        w = self.moe[number]
        own = frame.route(functional.linear(x, w.router), self.shape.model.top_k)
        if chosen is not None:
            chosen(own)
        ids, weights = routing or own
        rows = frame.experts(x, ids, w.up, w.down)
        shared = self.shape.model.top_k
        return arm.tail(x, rows[:shared], self.order, weights, rows[shared:], w.shared_gate)
