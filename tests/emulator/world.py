"""The collective kernel in the emulator: the ranks of a world, in this process or in several."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import emulator
from bindings import reference
from collectives.layout import Layout
from cute_kernels.moe import config

HIDDEN, TOP_K = 64, 3
TIMEOUT_NS = 30_000_000_000


@functools.cache
def compiled(target: str, world: int, norm: bool, hidden: int = HIDDEN) -> Callable[..., Any]:
    """The finalize-and-all-reduce kernel. With a device open."""
    import cutlass.cute as cute

    from cute_kernels.moe import finalize_all_reduce as module

    params = dict(world=world, hidden=hidden, top_k=TOP_K, weight_dtype="fp32", shared=True, gated=True)
    entry, fake = module.build(target, **params, norm=norm, dtype="bf16", prefetch=False)
    return cute.compile(entry, *fake, options=f"--enable-tvm-ffi --gpu-arch {target}")


@dataclass
class Rank:
    """One rank's own memory, and its buffer in the symmetric heap."""

    buffer: Tensor
    parts: int
    max_tokens: int
    rounds: Tensor = field(init=False)
    poison: Tensor = field(init=False)
    record: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.rounds = torch.zeros(self.max_tokens * self.parts, dtype=torch.int32)
        self.poison = torch.zeros(4, dtype=torch.int32)
        self.record = torch.zeros(16, dtype=torch.int32)


class World:
    """Ranks of one process on one emulated device."""

    def __init__(
        self,
        device: emulator.Device,
        target: str,
        n: int,
        max_tokens: int = 2,
        hidden: int = HIDDEN,
        norm: bool = False,
    ):
        self.device, self.target, self.n, self.norm, self.hidden = device, target, n, norm, hidden
        self.layout = Layout(n, max_tokens, hidden)
        parts = config.parts(target, hidden)
        buffers = [torch.zeros(self.layout.nbytes, dtype=torch.uint8) for _ in range(n)]
        self.ranks = [Rank(b, parts, max_tokens) for b in buffers]
        self.peers = torch.tensor([b.data_ptr() for b in buffers], dtype=torch.int64)
        for i, rank in enumerate(self.ranks):
            device.register(rank.buffer, f"buffer of rank {i}")
            device.register(rank.record, f"record of rank {i}")

    def inputs(self, seed: int, T: int = 1) -> list[dict[str, Tensor]]:
        """Every rank's tensors of a round."""
        g = torch.Generator().manual_seed(seed)
        out = []
        for _ in range(self.n):
            idx = torch.randint(-1, 4, (T * TOP_K,), generator=g, dtype=torch.int32)
            out.append(
                {
                    "expert_out": torch.randn(4, self.hidden, generator=g).bfloat16(),
                    "permuted_idx": idx,
                    "expert_weights": torch.randn(T, TOP_K, generator=g),
                    "shared_out": torch.randn(T, self.hidden, generator=g).bfloat16(),
                    "shared_gate": torch.rand(T, generator=g),
                }
            )
        return out

    def call(
        self,
        rank: int,
        tensors: dict[str, Tensor],
        out: Tensor,
        weight: Tensor | None,
        timeout: int = TIMEOUT_NS,
    ) -> None:
        """Launches one rank's kernel: between `together`, to run with the others."""
        own = self.ranks[rank]
        function = compiled(self.target, self.n, self.norm, self.hidden)
        fixed = (
            self.peers,
            own.rounds,
            own.poison,
            rank,
            self.layout.max_tokens,
            own.record.data_ptr(),
            timeout,
        )
        function(*tensors.values(), weight, out, *fixed, 1e-6, 0.0)

    def rounds(self, seed: int, count: int, T: int = 1) -> list[tuple[list[Tensor], Tensor]]:
        """Rounds of all ranks, each on a stream of its own, so that a rank may run ahead as far as the
        protocol lets it: every round's results, and the expected one."""
        given = [self.inputs(count * seed + i, T) for i in range(count)]
        weight = None
        if self.norm:
            weight = torch.randn(self.hidden, generator=torch.Generator().manual_seed(seed)).bfloat16()
        empty = torch.full((T, self.hidden), float("nan"), dtype=torch.bfloat16)
        outs = [[empty.clone() for _ in range(self.n)] for _ in given]
        with self.device.together():
            for tensors, results in zip(given, outs, strict=True):
                for rank in range(self.n):
                    with self.device.stream(rank):
                        self.call(rank, tensors[rank], results[rank], weight)
        return [(results, expected(tensors)) for tensors, results in zip(given, outs, strict=True)]

    def round(self, seed: int, T: int = 1) -> tuple[list[Tensor], Tensor]:
        """One round of all ranks at once."""
        return self.rounds(seed, 1, T)[0]


def expected(given: list[dict[str, Tensor]]) -> Tensor:
    """The sum of the rank-local results in rank order, rounded once."""
    total = torch.zeros(given[0]["shared_out"].shape)
    for tensors in given:
        total = total + reference.moe_finalize(**tensors).float()
    return total.bfloat16()


@contextmanager
def world(target: str, n: int, **options: Any) -> Iterator[World]:
    """A device with a world on it; options of emulator.device, and of World."""
    own = {k: options.pop(k) for k in ("max_tokens", "hidden", "norm") if k in options}
    with emulator.device(target, **options) as device:
        yield World(device, target, n, **own)
