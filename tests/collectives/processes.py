"""A process that is one rank, under torchrun: where it runs, and what it asks of the others over gloo."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from collectives.communicator import Communicator
from collectives.launch import Form
from tests.harness import assert_same_bits

HIDDEN, TOKENS, TOP_K = 2560, 32, 10
BF16, FP32 = torch.bfloat16, torch.float32

FORMS = [
    Form(w, s, n)
    for w, s, n in [
        ("bf16", "gated", False),
        ("fp32", "gated", False),
        ("fp32", "plain", False),
        ("fp32", "none", False),
        ("bf16", "plain", False),
        ("fp32", "gated", True),
    ]
]


class World:
    """This process among the ranks."""

    def __init__(self, device: str, transport: str = "auto"):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        if transport != "auto" and torch.cuda.device_count() < self.size:
            pytest.skip(f"needs a GPU a rank: {self.size}, found {torch.cuda.device_count()}")
        if transport == "nvshmem" and importlib.util.find_spec("nvshmem") is None:
            pytest.skip("needs nvshmem4py-cu13, of the extra `nvshmem`")
        if device == "cuda":
            device = f"cuda:{int(os.environ['LOCAL_RANK']) % torch.cuda.device_count()}"
            torch.cuda.set_device(device)
        self.device, self.transport = device, transport
        self.store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)

    def open(self, name: str, **changed: Any) -> Communicator:
        arguments: dict[str, Any] = dict(
            hidden=HIDDEN,
            max_tokens=TOKENS,
            top_k=TOP_K,
            transport=self.transport,
            device=self.device,
            store=self.store,
            name=f"{name} {self.device[:4]} {self.transport}",
            forms=FORMS,
            timeout_s=20.0,
        )
        return Communicator.from_process_group(**(arguments | changed))

    def gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def put(self, value: Tensor) -> Tensor:
        return value.to(self.device)

    def settle(self, comm: Communicator) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()
        comm.check()

    def same_everywhere(self, result: Tensor, expected: Tensor, what: str) -> None:
        """This rank's bits are the expected ones, every rank's are this rank's."""
        words = result.cpu().contiguous().view(torch.int16).numpy()
        everyone = self.gather(words.tobytes())
        assert_same_bits(result.cpu(), expected.cpu(), what)
        assert all(one == everyone[0] for one in everyone), what


CPU = [pytest.param(("cpu", "auto"), id="cpu", marks=pytest.mark.cpu)]
GPUS = [
    pytest.param(("cuda", "auto"), id="cuda", marks=pytest.mark.gpu),
    pytest.param(("cuda", "cuda_ipc"), id="cuda_ipc", marks=pytest.mark.multi_gpu),
    pytest.param(("cuda", "nvshmem"), id="nvshmem", marks=pytest.mark.multi_gpu),
]


def rank_sum(terms: list[Tensor]) -> Tensor:
    """The contract's sum: in rank order, in fp32 from +0.0, rounded once."""
    total = torch.zeros(terms[0].shape, device=terms[0].device)
    for term in terms:
        total = total + term.float()
    return total.to(terms[0].dtype)
