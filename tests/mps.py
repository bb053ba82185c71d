"""CUDA's multi-process service, for tests of processes that share a GPU through it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

CLIENT = "import torch; torch.ones(1, device='cuda').sum().item()"


@pytest.fixture
def mps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], dict[str, str]]]:
    """Starts the service, and says what reaches it: a client's environment. Skips where its daemon does not
    start; that it serves a first client is asserted."""
    names = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
    environment = {name: str(tmp_path_factory.mktemp("mps")) for name in names}
    # A client owns its connections to the device, and four clients with conftest.py's 32 are one too many.
    environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"
    if "CUDA_VISIBLE_DEVICES" in os.environ:  # the service sees these alone, and its clients number them anew
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(torch.cuda.device_count())))

    def control(*arguments: str, said: str = "") -> int:
        done = subprocess.run(
            ["nvidia-cuda-mps-control", *arguments],
            env={**os.environ, **{name: environment[name] for name in names}},
            input=said,
            text=True,
            stdout=subprocess.DEVNULL,  # the service would keep a pipe of ours open
            stderr=subprocess.DEVNULL,
            timeout=20,
            check=False,
        )
        return done.returncode

    def start() -> dict[str, str]:
        if shutil.which("nvidia-cuda-mps-control") is None or control("-d"):
            pytest.skip("nvidia-cuda-mps-control does not start here")
        # One client alone, so that the server is up when several come at once.
        words = [sys.executable, "-c", CLIENT]
        first = subprocess.run(
            words, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=False
        )
        assert first.returncode == 0, first.stderr[-2000:]
        return environment

    yield start
    for log in sorted(Path(environment[names[1]]).glob("*.log")):
        print(f"{log.name}: {log.read_text(errors='replace')[-3000:]}")  # shown if the test failed
    pid = Path(environment[names[0]]) / "nvidia-cuda-mps-control.pid"
    if pid.exists():
        try:
            control(said="quit -t 5\n")
        except subprocess.TimeoutExpired:
            os.kill(int(pid.read_text()), signal.SIGKILL)
