"""The layer-boundary harness: a chain of boundaries of every kind, through states and as the plain sequence
of operators.

The plain sequence normalises before every read, runs on one stream and carries nothing but the residual.
Prepared norms, fused writes and the gate's own stream may not change a bit of the result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from bindings import ops
from bindings.hyper import HCState, HyperConnection

STREAMS, RANK = 4, 16
EPS = 1e-5
DTYPES = [torch.bfloat16, torch.float16]
ROWS = [0, 1, 3, 33]
CPU = torch.device("cpu")

# What happens to the residual between a write and the next read.
CHAINS = {
    "plain": ["plain"] * 4,
    "ple": ["plain", "ple", "plain", "plain"],
    "cut": ["plain", "cut", "plain", "cut"],
    "unprepared": ["bare"] * 3,
    "mixed": ["plain", "ple", "cut", "plain", "plain", "bare", "ple"],
}


def random(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int, scale: float = 1.0
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator) * 2 - 1).mul_(scale).to(dtype).to(device)


def connection(
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    hidden: int = 64,
    inject: bool = True,
    **options: object,
) -> HyperConnection:
    width = STREAMS * hidden
    return HyperConnection(
        norm_weight=random((width,), dtype, device, seed, 0.3),
        inject_weight=random((STREAMS, width), dtype, device, seed + 1, 0.05) if inject else None,
        w_down=random((RANK, width), dtype, device, seed + 2, 0.05),
        w_up=random((width, RANK), dtype, device, seed + 3, 0.2),
        eps=EPS,
        streams=STREAMS,
        **options,
    )


def block(x: Tensor) -> Tensor:
    """Stands for a layer's block: pointwise, so that the boundary is what is tested."""
    return x * 0.5 + x.abs()


@dataclasses.dataclass
class Chain:
    """A chain of boundaries with its weights and inputs, and the two ways to run it."""

    kinds: list[str]
    connections: list[HyperConnection]
    final: HyperConnection
    residual: Tensor
    update: Tensor
    fused: bool = False
    """Whether writes prepare the next gate too, where the next read follows at once."""

    @classmethod
    def make(
        cls,
        kind: str,
        dtype: torch.dtype,
        rows: int,
        device: torch.device = CPU,
        hidden: int = 64,
        seed: int = 0,
        fused: bool = False,
        **kw: object,
    ) -> Chain:
        kinds = CHAINS[kind]
        return cls(
            kinds=kinds,
            connections=[connection(dtype, device, seed + 10 * i, hidden, **kw) for i in range(len(kinds))],
            final=connection(dtype, device, seed + 999, hidden, inject=False, **kw),
            residual=random((rows, STREAMS * hidden), dtype, device, seed + 5, 3.0),
            update=random((rows, STREAMS * hidden), dtype, device, seed + 6, 0.5),
            fused=fused,
        )

    def plain(self) -> Tensor:
        """The unfused sequence."""

        def mix(by: HyperConnection, residual: Tensor) -> tuple[Tensor, Tensor]:
            normed = ops.grouped_gemma_rmsnorm(residual, by.norm_weight, by.eps, group_size=by.hidden)
            return normed, ops.hc_mix(normed, by.w_down, by.w_up, streams=STREAMS)

        residual = self.residual
        for kind, by in zip(self.kinds, self.connections, strict=True):
            normed, x = mix(by, residual)
            residual = ops.hc_apply(block(x), residual, ops.hc_gate(normed, by.inject_weight))
            if kind == "ple":
                residual = residual + self.update
        return mix(self.final, residual)[1]

    def steps(self) -> Iterator[Tensor | None]:
        """The same through states, yielding after each boundary; the last item is the result."""
        following = [*self.connections[1:], self.final]
        state = HCState.start(self.residual)
        for kind, by, reader in zip(self.kinds, self.connections, following, strict=True):
            x, state = by.read(state)
            reader = reader if kind == "plain" else None
            inject = reader.inject_weight if reader is not None and self.fused else None
            state = by.write(block(x), state, next_norm=reader, next_inject=inject)
            assert state.gate_partials is None
            assert (state.next_partials is None) == (inject is None)
            assert (state.normed is None) == (kind != "plain")
            if kind == "ple":
                state = state.with_residual(state.residual + self.update)
            elif kind == "cut":
                state = HCState.from_wire(state.to_wire())
            yield None
        yield self.final.final_read(state)

    def run(self) -> Tensor:
        return list(self.steps())[-1]


def assert_same(got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    assert torch.equal(got.view(torch.int16), expected.view(torch.int16))
