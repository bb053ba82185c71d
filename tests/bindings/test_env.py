"""`python -m bindings.env`: complete, discreet, and never failing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bindings import env


def run(**variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bindings.env"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | variables,
    )


def test_command(tmp_path: Path) -> None:
    """Exit code 0, every section, the versions, the settings."""
    result = run(FLASHNEXT_CACHE_DIR=str(tmp_path), FLASHNEXT_BACKEND="reference")
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    titles = [line for line in lines if not line.startswith(" ")]
    assert titles == [title for title, _ in env.SECTIONS]
    assert f"  torch: {torch.__version__}" in lines
    assert "  backend: reference (FLASHNEXT_BACKEND=reference)" in lines
    assert f"  FLASHNEXT_CACHE_DIR: {tmp_path}" in lines
    for name in env.PACKAGES:
        assert any(line.startswith(f"  {name}: ") for line in lines)
    assert sum(str(tmp_path) in line for line in lines) >= 2  # the variable, and the cache that follows it


def test_a_backend_that_there_is_not() -> None:
    (line,) = [x for x in run(FLASHNEXT_BACKEND="foo").stdout.splitlines() if x.startswith("  backend:")]
    assert line == (
        "  backend: foo (FLASHNEXT_BACKEND=foo): none of auto, cute, emulator, reference, "
        "so every call is refused"
    )


def test_names_nobody(tmp_path: Path) -> None:
    """No home directory, host name, token or device serial."""
    home = str(tmp_path)
    secrets = {
        "PYTORCH_TOKEN": "hunter2",
        "TORCH_API_KEY": "hunter3",
        "CUDA_VISIBLE_DEVICES": "GPU-8932f937-d72c-4106-hunter4,MIG-hunter5/1/2",
    }
    result = run(HOME=home, FLASHNEXT_CACHE_DIR=f"{home}/kernels", **secrets)
    assert home not in result.stdout
    assert "FLASHNEXT_CACHE_DIR: ~/kernels" in result.stdout
    assert "hunter" not in result.stdout
    assert "CUDA_VISIBLE_DEVICES: GPU-(serial),MIG-(serial)" in result.stdout
    assert "UUID" not in result.stdout
    assert os.uname().nodename not in re.findall(r"[\w.-]+", result.stdout)


def test_every_section_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is broken says so in its place, and the rest is there."""

    def broken() -> Any:
        yield "before", "kept"
        raise OSError("libcuda is from another age")

    for index, (title, _) in enumerate(env.SECTIONS):
        sections = list(env.SECTIONS)
        sections[index] = (title, broken)
        monkeypatch.setattr(env, "SECTIONS", tuple(sections))
        text = env.report()
        assert "  before: kept\n  unavailable: OSError: libcuda is from another age" in text
        monkeypatch.undo()
        for other, _ in env.SECTIONS:
            assert other in text


def test_without_driver_or_management_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "Driver\n  unavailable: ModuleNotFoundError" in env.report()


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name, capability, size and target of each device."""

    class Properties:
        name, major, minor, multi_processor_count, total_memory = "NVIDIA H200", 9, 0, 132, 150_000_000_000

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    monkeypatch.setattr("bindings.targets.target_of", lambda device: "sm_90a")
    assert "  cuda:0: NVIDIA H200, sm_90, 132 SMs, 140 GiB, target sm_90a\n" in env.report()
