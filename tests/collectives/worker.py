"""One rank of a world that a test kills ranks of: takes commands as JSON lines, answers each with one.

python -m tests.collectives.worker RANK WORLD_SIZE PORT DEVICE
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.communicator import Communicator
from collectives.errors import CollectiveError, CollectiveTimeout, CommunicatorPoisoned
from collectives.launch import Form
from collectives.rendezvous import StoreRendezvous
from tests.draw import Draw

HIDDEN, TOKENS, TOP_K = 256, 4, 2
TIMEOUT_S = {"cpu": 4.0, "cuda": 1.5}  # a busy machine runs four processes on its cores by turns
FORM = Form("fp32", "gated")


def say(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def drawn(i: int, rank: int, rows: int) -> Tensor:
    return Draw(f"round {i} rank {rank}").uniform(rows, HIDDEN, scale=3, dtype=torch.bfloat16)


def summed(terms: list[Tensor]) -> Tensor:
    """The contract's sum: in rank order, fp32 from +0.0, one rounding."""
    total = torch.zeros(terms[0].shape)
    for term in terms:
        total = total + term.float()
    return total.bfloat16()


class Worker:
    """The commands."""

    def __init__(self, rank: int, world_size: int, port: int, device: str):
        self.rank, self.world_size, self.device = rank, world_size, device
        if device != "cpu":
            torch.cuda.set_device(device)
        self.store = dist.TCPStore("127.0.0.1", port, is_master=False)
        self.comm: Communicator | None = None
        self.i = 0

    @property
    def sizes(self) -> dict[str, Any]:
        return dict(
            hidden=HIDDEN,
            max_tokens=TOKENS,
            top_k=TOP_K,
            timeout_s=TIMEOUT_S[self.device.split(":")[0]],
            device=self.device,
            forms=(FORM,),
        )

    def start(self) -> dict[str, Any]:
        """As an engine starts: a process group, and the store for later."""
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("group", self.store),
            rank=self.rank,
            world_size=self.world_size,
        )
        self.comm = Communicator.from_process_group(store=self.store, **self.sizes)
        return dict(explain=self.comm.explain())

    def join(self, meeting_s: float = 30, die_in: str = "") -> dict[str, Any]:
        """As a restarted process starts. die_in: a step of the mapping in which it kills itself."""
        if die_in:
            from collectives.transports import shm

            setattr(shm._ShmSegment, die_in, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        try:
            self.comm = Communicator.from_store(
                self.store, self.rank, self.world_size, meeting_s=meeting_s, **self.sizes
            )
        except CollectiveError as error:
            return dict(error=type(error).__name__, text=str(error), missing=getattr(error, "missing", None))
        return {}

    def reset(self, meeting_s: float = 30) -> dict[str, Any]:
        assert self.comm is not None
        try:
            self.comm.reset(meeting_s=meeting_s)
        except CollectiveError as error:
            return dict(error=type(error).__name__, text=str(error), missing=getattr(error, "missing", None))
        return {}

    def rounds(self, n: int, first: int) -> dict[str, Any]:
        """Checked rounds of both kinds."""
        good = 0
        for i in range(first, first + n):
            good += self.all_reduce(i) and (i % 2 == 0 or self.fused(i))
        return dict(good=good)

    def all_reduce(self, i: int) -> bool:
        assert self.comm is not None
        rows = 1 + i % TOKENS
        terms = [drawn(i, rank, rows) for rank in range(self.world_size)]
        result = self.comm.all_reduce(terms[self.rank].to(self.device))
        self.settle()
        return torch.equal(result.cpu(), summed(terms))

    def fused(self, i: int) -> bool:
        from bindings.reference import moe_finalize
        from tests.draw import finalize

        assert self.comm is not None
        inputs = [
            finalize(
                Draw(f"moe {i} rank {rank}"), 1 + i % TOKENS, H=HIDDEN, K=TOP_K, weight_dtype=torch.float32
            )
            for rank in range(self.world_size)
        ]
        own = {name: t.to(self.device) for name, t in inputs[self.rank].items()}
        result = self.comm.moe_finalize_all_reduce(**own)
        self.settle()
        return torch.equal(result.cpu(), summed([moe_finalize(**one) for one in inputs]))

    def settle(self) -> None:
        assert self.comm is not None
        if self.device != "cpu":
            torch.cuda.synchronize()
        self.comm.check()

    def stall_after_push(self) -> dict[str, Any]:
        """Starts a round and stops between its push and its wait (CPU), or in its wait (GPU). Does not
        return."""
        assert self.comm is not None
        x = drawn(0, self.rank, 1).to(self.device)
        if self.device == "cpu":

            def stall() -> None:
                say(pushed=True)
                time.sleep(1000)

            self.comm.engine.channels["plain"].delay = stall  # type: ignore[attr-defined]
            self.comm.all_reduce(x)
        else:
            self.comm.all_reduce(x)
            time.sleep(0.3)  # of the bound; the push takes microseconds
            say(pushed=True)
            time.sleep(1000)
        return {}

    def sum_of_stalled(self) -> dict[str, Any]:
        """The round that another rank pushed into before it died."""
        assert self.comm is not None
        terms = [drawn(0, rank, 1) for rank in range(self.world_size)]
        result = self.comm.all_reduce(terms[self.rank].to(self.device))
        self.settle()
        return dict(good=torch.equal(result.cpu(), summed(terms)))

    def capture(self) -> dict[str, Any]:
        """A graph of two rounds, replayed once."""
        assert self.comm is not None
        self.x = drawn(1, self.rank, 1).to(self.device)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.y = self.comm.all_reduce(self.x)
            self.z = self.comm.all_reduce(self.y)
        return self.replay(1)

    def replay(self, n: int) -> dict[str, Any]:
        once = summed([drawn(1, rank, 1) for rank in range(self.world_size)])
        good = 0
        for _ in range(n):
            self.z.zero_()
            self.graph.replay()
            self.settle()
            good += torch.equal(self.z.cpu(), summed([once] * self.world_size))
        return dict(good=good)

    def expect_timeout(self, by: str = "all_reduce") -> dict[str, Any]:
        """A round that a rank does not come to, then two calls on the poisoned communicator."""
        assert self.comm is not None
        x = drawn(2, self.rank, 1).to(self.device)
        start = time.monotonic()
        try:
            if by == "replay":
                self.graph.replay()
            elif by == "fused":
                self.fused(1)  # of two rows, each with one round behind it: which reports is open
            else:
                self.comm.all_reduce(x)
            self.settle()
        except CollectiveTimeout as error:
            answer = dict(rank=error.rank, missing=error.missing, epoch=error.epoch)
        else:
            return dict(error="no timeout")
        answer["took"] = time.monotonic() - start
        poisoned = []
        for call in (lambda: self.comm.all_reduce(x), self.comm.check):
            try:
                call()
            except CommunicatorPoisoned as error:
                poisoned.append(str(error))
        return answer | dict(poisoned=poisoned)

    def descriptors(self) -> dict[str, Any]:
        """What this process holds, between two meetings of all ranks, so that none is at work."""
        self.store_barrier()
        mapped = Path("/proc/self/maps").read_text().count("flashnext")
        held = dict(open=len(os.listdir("/proc/self/fd")), mapped=mapped)
        if self.device != "cpu":
            torch.cuda.synchronize()
            self.store_barrier()
            held["free"] = torch.cuda.mem_get_info()[0]
        self.store_barrier()
        return held

    def store_barrier(self) -> None:
        StoreRendezvous.join(self.store, self.rank, self.world_size, name="test").barrier()

    def close(self) -> dict[str, Any]:
        if self.comm is not None:
            self.comm.close()
        return {}


def main() -> None:
    rank, world_size, port = map(int, sys.argv[1:4])
    torch.set_num_threads(1)
    worker = Worker(rank, world_size, port, sys.argv[4])
    say(ready=True)
    for line in sys.stdin:
        command = json.loads(line)
        do: Callable[..., dict[str, Any]] = getattr(worker, command.pop("do"))
        say(**do(**command))


if __name__ == "__main__":
    main()
