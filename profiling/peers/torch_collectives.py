"""torch's all-reduces: NCCL's, and the one-shot and two-shot kernels of symmetric memory.

They need peers: a process group of two ranks or more on devices of their own, with NCCL, which torchrun
starts. NCCL adds up in an order of its own and in 16 bits, symmetric memory's kernels in fp32, so neither has
the bits of the contract. Of symmetric memory's kernels those with NVLink multicast are left out.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, distributed

from profiling.peers import Reducer

PACKAGE = "torch (NCCL, symmetric memory)"
ONE_SHOT_BYTES = 512 << 10
"""What symmetric memory's one-shot kernel is made for; its own users take the two-shot one above."""

Taken = tuple[Tensor, Callable[[], Tensor]]


def group() -> distributed.ProcessGroup:
    """The default process group; RuntimeError where it is none that these can run on."""
    if not (distributed.is_available() and distributed.is_initialized()):
        raise RuntimeError("no process group: start under torchrun with two ranks or more")
    if distributed.get_world_size() < 2:
        raise RuntimeError("the process group has one rank; two or more are needed")
    found = distributed.group.WORLD
    backend = distributed.get_backend_config()
    if found is None or "nccl" not in backend:
        raise RuntimeError(f"the process group's backend is {backend}, nccl is needed")
    return found


def nccl(like: Tensor) -> Taken:
    """In place, as an engine has it on a block's output."""
    held = torch.empty_like(like)

    def call() -> Tensor:
        distributed.all_reduce(held)
        return held

    return held, call


def symmetric(kernel: str) -> Callable[[Tensor], Taken]:
    """One of symmetric memory's kernels, on memory that a block's last kernel would write to."""

    def take(like: Tensor) -> Taken:
        from torch.distributed import _symmetric_memory

        name = group().group_name
        held = _symmetric_memory.empty(*like.shape, dtype=like.dtype, device=like.device)
        _symmetric_memory.rendezvous(held, name)
        reduce = getattr(torch.ops.symm_mem, kernel)

        def call() -> Tensor:
            result: Tensor = reduce(held, "sum", name)
            return result

        return held, call

    return take


def small(like: Tensor) -> str | None:
    """What the one-shot kernel refuses."""
    count = like.numel() * like.element_size()
    return f"takes at most {ONE_SHOT_BYTES} bytes" if count > ONE_SHOT_BYTES else None


def reducers() -> list[Reducer]:
    """RuntimeError outside a process group with NCCL."""
    group()
    return [
        Reducer("NCCL all_reduce", nccl, in_place=True),
        Reducer("torch one_shot_all_reduce", symmetric("one_shot_all_reduce"), in_place=False, refuses=small),
        Reducer("torch two_shot_all_reduce", symmetric("two_shot_all_reduce_"), in_place=True),
    ]
