"""torch's all-reduces of a rank's row: NCCL's, and the one-shot and two-shot kernels of symmetric memory.

They need peers: a process group of two ranks or more on devices of their own, with NCCL, which torchrun
starts. The case `all_reduce` has `x` [T, H] of this rank; each rank calls its peer in the same order. NCCL
adds up in an order of its own and in 16 bits, symmetric memory's kernels in fp32, so neither has the bits
of the contract.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, distributed

from profiling.cases import Case
from profiling.peers import Peer

PACKAGE = "torch (NCCL, symmetric memory)"
OP = "all_reduce"
ONE_SHOT_BYTES = 512 << 10
"""What symmetric memory's one-shot kernel is made for; its own users take the two-shot one above."""

Prepared = Callable[[], Mapping[str, Tensor]]


def group() -> distributed.ProcessGroup:
    """The default process group; RuntimeError where it is none that these can run on."""
    if not (distributed.is_available() and distributed.is_initialized()):
        raise RuntimeError("no process group: start under torchrun with two ranks or more")
    if distributed.get_world_size() < 2:
        raise RuntimeError("the process group has one rank; two or more are needed")
    found = distributed.group.WORLD
    if found is None or distributed.get_backend() != "nccl":
        raise RuntimeError(f"the process group's backend is {distributed.get_backend()}, nccl is needed")
    return found


def nccl(case: Case) -> Prepared:
    """In place on a copy of the row, as an engine does with a block's output."""
    x = case.args["x"]
    held = torch.empty_like(x)

    def call() -> Mapping[str, Tensor]:
        held.copy_(x)
        distributed.all_reduce(held)
        return {OP: held}

    return call


def symmetric(kernel: str) -> Callable[[Case], Prepared]:
    """One of symmetric memory's kernels on a copy of the row in a symmetric buffer."""

    def prepare(case: Case) -> Prepared:
        from torch.distributed import _symmetric_memory

        x, members = case.args["x"], group()
        held = _symmetric_memory.empty(*x.shape, dtype=x.dtype, device=x.device)
        _symmetric_memory.rendezvous(held, members.group_name)
        reduce = getattr(torch.ops.symm_mem, kernel)

        def call() -> Mapping[str, Tensor]:
            held.copy_(x)
            return {OP: reduce(held, "sum", members.group_name)}

        return call

    return prepare


def small(case: Case) -> str | None:
    """What the one-shot kernel refuses."""
    count = case.args["x"].numel() * case.args["x"].element_size()
    return f"takes at most {ONE_SHOT_BYTES} bytes" if count > ONE_SHOT_BYTES else None


def peers() -> list[Peer]:
    """RuntimeError outside a process group with NCCL."""
    group()
    return [
        Peer("NCCL all_reduce", OP, nccl, allowance=8.0),
        Peer("torch one_shot_all_reduce", OP, symmetric("one_shot_all_reduce"), small, allowance=4.0),
        Peer("torch two_shot_all_reduce", OP, symmetric("two_shot_all_reduce_"), allowance=4.0),
    ]
