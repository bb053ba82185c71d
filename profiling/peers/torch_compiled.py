"""torch, compiled: the same functions as torch_eager.py through torch.compile, its default backend, shapes
fixed.

Of moe_finalize torch 2.11 on an H200 gives results that the check refuses, so they are not timed: they are as
without the rounding in the middle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from profiling.cases import Case
from profiling.peers import Peer, torch_eager

PACKAGE = "torch.compile"


def _compiled(eager: Peer, function: Callable[..., Any], backend: str) -> Peer:
    def prepare(case: Case) -> Callable[[], Mapping[str, Tensor]]:
        # One program a case: a case's shapes are all it ever sees. Without the option its fused kernels would
        # leave out roundings in the middle, which are part of the contract.
        options: Any = {"emulate_precision_casts": True} if backend == "inductor" else None
        compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=False, options=options)
        args = case.args
        return lambda: torch_eager.results(case, compiled(**args))

    return Peer("torch.compile", eager.op, prepare, eager.refuses, eager.allowance)


def peers(backend: str = "inductor") -> list[Peer]:
    """One for every piece of work. ImportError without Triton, which the default backend generates for."""
    if backend == "inductor":
        import torch._inductor.config
        import triton as triton  # the reason in `Found.missing` where it is not here

        torch._inductor.config.compile_threads = 1  # no pool of processes beside what is timed on the host

    return [_compiled(eager, torch_eager.FUNCTIONS[eager.op], backend) for eager in torch_eager.peers()]
