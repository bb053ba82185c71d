"""Worlds of virtual ranks in one process: threads on the CPU, streams on a GPU; and what they must
compute."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from bindings import reference
from bindings.targets import target_of
from collectives.communicator import Communicator
from collectives.launch import Form
from tests.collectives.conftest import in_threads

HIDDEN, TOP_K, MAX_TOKENS = 2560, 10, 32
FORMS = (Form(), Form(norm=True), Form("bf16", "plain"), Form("fp32", "none"))
"""What the fused tests use; each is a kernel to load a world."""

PLACES = [
    pytest.param("cpu", id="cpu", marks=pytest.mark.cpu),
    pytest.param("cuda:0", id="cuda", marks=pytest.mark.gpu),
]


class World:
    """N virtual ranks on a device."""

    def __init__(self, n: int, device: str, **options: Any):
        if device != "cpu" and target_of(torch.device(device)) is None:
            pytest.skip(f"no kernels are built for sm_{torch.cuda.get_device_capability(device)}")
        given = dict(hidden=HIDDEN, max_tokens=MAX_TOKENS, top_k=TOP_K, timeout_s=20.0, forms=FORMS)
        self.n, self.device = n, torch.device(device)
        self.ranks = Communicator.local_world(n, device, **{**given, **options})
        self.on_gpu = self.device.type == "cuda"
        self.streams = [torch.cuda.Stream(self.device) for _ in range(n)] if self.on_gpu else []

    def enqueue(
        self, of_rank: Callable[[Communicator], Any], ranks: Sequence[int] | None = None
    ) -> list[Any]:
        """`of_rank` on every rank or some: its result, or what it raises, a rank. On a GPU nothing is waited
        for."""
        chosen = range(self.n) if ranks is None else ranks

        def guarded(rank: int) -> Any:
            if rank not in chosen:
                return None
            if not self.on_gpu:
                return of_rank(self.ranks[rank])
            with torch.cuda.stream(self.streams[rank]):
                try:
                    return of_rank(self.ranks[rank])
                except Exception as error:
                    return error

        return in_threads(self.n, guarded) if not self.on_gpu else [guarded(rank) for rank in range(self.n)]

    def run(self, of_rank: Callable[[Communicator], Any], ranks: Sequence[int] | None = None) -> list[Any]:
        """`enqueue`, with the device idle before and after; results on the CPU, errors raised."""
        self.synchronize()
        results = self.enqueue(of_rank, ranks)
        self.synchronize()
        for result in results:
            if isinstance(result, Exception):
                raise result
        return [r.cpu() if isinstance(r, Tensor) else r for r in results]

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def put(self, values: Sequence[Any]) -> list[Any]:
        """Tensors, or structures of them, to the device."""
        if isinstance(values, Tensor):
            return values.to(self.device)  # type: ignore[return-value]
        return [None if v is None else self.put(v) for v in values]

    def start_rounds_at(self, count: int) -> None:
        """As if `count` rounds had gone by."""
        for comm in self.ranks:
            for channel in comm.engine.channels.values():  # type: ignore[attr-defined]
                if self.on_gpu:
                    channel.rounds.fill_(count - 2**32 if count >= 2**31 else count)
                else:
                    channel.rounds[:] = count
        self.synchronize()

    def rounds(self, rank: int, channel: str) -> list[int]:
        """The counters of a rank's rows, modulo 2^32."""
        found = self.ranks[rank].engine.channels[channel].rounds  # type: ignore[attr-defined]
        values = found.view(MAX_TOKENS, -1)[:, 0].tolist() if self.on_gpu else found.tolist()
        return [int(value) % 2**32 for value in values]

    def full_words(self) -> int:
        """Words that are not empty, in all buffers of all ranks."""
        self.synchronize()
        return sum(
            int((buffer.local.view(torch.int32) != 0).sum()) for buffer in self.ranks[0]._world.heap.buffers
        )


@functools.cache
def world(n: int, device: str) -> World:
    """A world that tests share: they leave it healthy. That of 4 has all forms."""
    return World(n, device, forms=FORMS if n == 4 else FORMS[:1])


def rank_sum(parts: Sequence[Tensor]) -> Tensor:
    """The contract's sum: fp32, in rank order, from +0.0, one rounding."""
    total = torch.zeros(parts[0].shape, dtype=torch.float32)
    for part in parts:
        total = total + part.float()
    return total.to(parts[0].dtype)


def finalized(inputs: Sequence[Sequence[Tensor | None]]) -> Tensor:
    """The fused operator by its reference: every rank's finalize, then the sum."""
    return rank_sum([reference.moe_finalize(*one) for one in inputs])


def same_bits(got: Tensor, want: Tensor) -> bool:
    """Bit for bit, but for the payloads of NaNs."""
    equal = got.view(torch.int16) == want.view(torch.int16)
    return got.shape == want.shape and bool((equal | (got.isnan() & want.isnan())).all())


def draw(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """bf16 data: "normal", "zeros" (of both signs), "bits" (any 16 bits: NaN, Inf, subnormals), "halves"
    (words of which one half is a zero), "tiny" (subnormals alone)."""
    normal = torch.randn(shape, generator=generator).bfloat16()
    if kind == "normal":
        return normal
    signs = torch.randint(0, 2, shape, generator=generator).bool()
    zeros = torch.where(signs, 0.0, -0.0).bfloat16()
    if kind == "zeros":
        return zeros
    if kind == "halves":
        return torch.where(torch.rand(shape, generator=generator) < 0.5, zeros, normal)
    if kind == "tiny":
        return torch.randint(-0x7F, 0x80, shape, generator=generator).to(torch.int16).view(torch.bfloat16)
    assert kind == "bits"
    return torch.randint(-(2**15), 2**15, shape, generator=generator).to(torch.int16).view(torch.bfloat16)


KINDS = ("normal", "zeros", "bits", "halves", "tiny")


def moe_inputs(
    rows: int, form: Form, generator: torch.Generator, kind: str = "normal", dropped: float = 0.2
) -> list[Tensor | None]:
    """One rank's arguments of the fused call."""
    experts = 2 * rows * TOP_K
    idx = torch.randperm(experts, generator=generator)[: rows * TOP_K].int()
    out = torch.rand(rows * TOP_K, generator=generator) < dropped
    idx[out] = torch.where(torch.rand(int(out.sum()), generator=generator) < 0.5, -1, experts + 7).int()
    weights = torch.rand(rows, TOP_K, generator=generator)
    return [
        draw(kind, (experts, HIDDEN), generator),
        idx,
        weights.float() if form.weight_dtype == "fp32" else weights.bfloat16(),
        None if form.shared == "none" else draw(kind, (rows, HIDDEN), generator),
        torch.rand(rows, generator=generator) if form.shared == "gated" else None,
    ]
