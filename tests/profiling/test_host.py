"""What a result says of where it was taken."""

from __future__ import annotations

import platform
import re

import pytest
import torch

from profiling import host, once


def test_a_host_without_gpu() -> None:
    about = host.describe(torch.device("cpu"))
    assert about["gpu"] is None
    assert about["nvml"] == {}
    assert about["versions"]["python"] == platform.python_version()
    assert about["versions"]["torch"] == torch.__version__
    assert set(about) == {"system", "machine", "cpus", "versions", "gpu", "nvml"}, (
        "nothing that names the machine"
    )


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "python -m profiling.bench"),
        (
            ["--json", "/a/b/out.json", "--rows", "1,2"],
            "python -m profiling.bench --json out.json --rows 1,2",
        ),
        (["--json", "results/out.json"], "python -m profiling.bench --json results/out.json"),
    ],
)
def test_command(arguments: list[str], line: str) -> None:
    assert host.command("profiling.bench", arguments) == line


def test_command_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    line = "torchrun --nproc-per-node 4 -m profiling.bench --peers"
    assert host.command("profiling.bench", ["--peers"]) == line


def test_today() -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", host.today())


def test_once_without_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert once.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        once.main(["--ops", "hc_gate_apply_norm"])
