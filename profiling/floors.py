"""The yardsticks beside every comparison: an empty kernel, kernels that only read, copies."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from bindings.targets import target_of, vector_bytes
from profiling.cases import Check

COPY_BYTES = 4 << 30

READ_SHAPES = ((1, 320), (1, 160), (2, 160), (5, 64), (10, 32))
"""(CTAs a row, threads a CTA) of the reading kernel: the fastest of them is the floor."""


@cache
def compiled(target: str, **params: Any) -> Callable[..., None]:
    """A kernel of floor_kernels.py. Needs the compiler."""
    import cutlass.cute as cute

    from profiling import floor_kernels

    entry, arguments = floor_kernels.build(target, **params)
    kernel: Callable[..., None] = cute.compile(
        entry, *arguments, options=f"--enable-tvm-ffi --gpu-arch {target}"
    )
    return kernel


def _target(device: torch.device) -> str:
    target = target_of(device)
    if target is None:
        raise ValueError(f"device: got {device}, a GPU of a supported target is needed")
    return target


def empty(device: torch.device) -> Callable[[], None]:
    """A launch of nothing: what any kernel pays."""
    kernel, out = compiled(_target(device), kind="empty"), torch.zeros(1, device=device)
    return lambda: kernel(out)


def read(x: Tensor, weight: Tensor, ctas: int, threads: int) -> Callable[[], Tensor]:
    """A kernel that reads x[T, H] and weight[H] (16-bit) with `ctas` CTAs a row and writes one value."""
    target = _target(x.device)
    out = torch.zeros(1, dtype=torch.int32, device=x.device)
    x32, weight32 = x.view(torch.int32), weight.view(torch.int32)
    kernel = compiled(
        target, kind="read", words=x32.shape[1], ctas=ctas, threads=threads, vec_bytes=vector_bytes(target)
    )

    def call() -> Tensor:
        kernel(x32, weight32, out)
        return out

    return call


def folded(x: Tensor, weight: Tensor, stride: int, words: int) -> int:
    """What the reading kernel leaves: the fold of the first row's vectors 0, stride, 2*stride, ... of
    `words` words, as a signed 32-bit number."""
    vectors = (x[0].view(torch.int32) ^ weight.view(torch.int32)).view(-1, words)
    total = int(vectors[::stride].long().sum())
    return (total + 2**31) % 2**32 - 2**31


def check_read(x: Tensor, weight: Tensor, ctas: int, threads: int, out: Tensor) -> Check:
    """Whether `out` is what the reading kernel must leave; an error, which is 0 or 1; what was got."""
    got = int(out.item())
    expected = folded(x, weight, ctas * threads, vector_bytes(_target(x.device)) // 4)
    return Check(got == expected, float(got != expected), f"got {got}, expected {expected}")


def copy(count: int, device: torch.device) -> Callable[[], Tensor]:
    """A device-to-device copy of `count` bytes by a kernel that streams: it reads and writes as many.

    Not `copy_`: captured, that is a memcpy node, which a copy engine serves at two thirds of the bandwidth.
    """
    source = torch.empty(count // 4, dtype=torch.int32, device=device).random_()
    to = torch.empty_like(source)
    return lambda: torch.neg(source, out=to)


def products(normed: Tensor, w_down: Tensor, w_up: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
    """The two GEMMs of a mix as torch runs them, and nothing between or after them."""
    inner = normed[:, : w_up.shape[1]].contiguous()
    return lambda: (torch.nn.functional.linear(normed, w_down), torch.nn.functional.linear(inner, w_up))
