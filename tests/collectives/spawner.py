"""Starts ranks as processes of their own, gives them commands, kills some and starts them again.

torchrun ends all of its workers when one dies, so it cannot show what the others do then.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60.0


class Rank:
    """One process."""

    def __init__(self, rank: int, world_size: int, port: int, device: str):
        self.rank = rank
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (lives as long as the process)
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.collectives.worker", *map(str, (rank, world_size, port)), device],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def send(self, do: str, **arguments: Any) -> None:
        """A command; its answer is to be fetched."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(dict(do=do, **arguments)) + "\n")
        self.process.stdin.flush()

    def answer(self, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """The next answer. Fails the test if none comes, with what the process said."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            line = f"nothing in {timeout_s:g} s"
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            return found
        self._log.seek(0)
        raise AssertionError(f"rank {self.rank} answered {line!r}\n{self._log.read()[-4000:]}")

    def kill(self) -> None:
        """SIGKILL; returns once the process is gone."""
        self.process.kill()
        self.process.wait()

    def leave(self) -> int:
        """Lets the process come to its end; its exit code."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(PATIENCE_S)


class Ranks:
    """A world, and the store where it meets, which is the test's own process's. device: "cpu", "cuda:0" for
    all ranks, or "cuda" for a GPU a rank. The rank to kill is never 0."""

    def __init__(self, world_size: int, device: str):
        self.world_size, self.device = world_size, device
        self.victim = world_size // 2
        self.survivors = [rank for rank in range(world_size) if rank != self.victim]
        self.server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._ever: list[Rank] = []
        self.of: dict[int, Rank] = {}

    def start(self, *ranks: int) -> None:
        """Starts processes for these ranks, in place of dead ones."""
        for rank in ranks:
            self.of[rank] = Rank(rank, self.world_size, self.server.port, self.device_of(rank))
            self._ever.append(self.of[rank])
        for rank in ranks:
            assert self.of[rank].answer() == dict(ready=True)

    def device_of(self, rank: int) -> str:
        """Where a rank runs."""
        return f"cuda:{rank}" if self.device == "cuda" else self.device

    def all(self, do: str, *, but: tuple[int, ...] = (), **arguments: Any) -> dict[int, dict[str, Any]]:
        """A command to all ranks at once, and their answers."""
        ranks = [rank for rank in self.of if rank not in but]
        for rank in ranks:
            self.of[rank].send(do, **arguments)
        return {rank: self.of[rank].answer() for rank in ranks}

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in self._ever:
            one.kill()
