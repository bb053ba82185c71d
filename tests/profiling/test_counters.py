"""What the emulator counts: one kernel in it, and the record, its table and exit code with a stand-in."""

from __future__ import annotations

import contextlib
import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import bindings
from bindings import compiler, emulated, link, ops
from profiling import bench, counters


@pytest.mark.skipif(not compiler.available(), reason="needs the compiler (nvidia-cutlass-dsl)")
@pytest.mark.skipif(link.compiler() is None, reason="needs a C compiler, which the emulator is built with")
def test_a_kernel_in_the_emulator() -> None:
    entry = counters.count("shared_gate", 2, "sm_100a")
    assert entry["error"] is None
    assert entry["launches"] == 1
    assert entry["bytes"] == 2 * (2 * 2560 + 4) + 2 * 2560
    counted = entry["counters"]
    assert counted["read_bytes"] == 2 * 2 * 2 * 2560, "each row's CTA reads the row and the weight"
    assert counted["written_bytes"] == 2 * 4
    assert counted["bank_conflicts"] == 0
    assert counted["instructions"] > 0


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """An emulator that runs the reference and says that each call took two launches."""
    told = types.SimpleNamespace(launches=[], targets=[])

    @contextlib.contextmanager
    def options(target: str) -> Iterator[None]:
        told.targets.append(target)
        yield

    def launch(n: int) -> types.SimpleNamespace:
        names = counters.COUNTERS.values()
        return types.SimpleNamespace(**{name: n * (i + 1) for i, name in enumerate(names)})

    gate = ops.shared_gate

    def shared_gate(x: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
        told.launches += [launch(10), launch(1)]
        return gate(x, weight, out=out)

    monkeypatch.setattr(emulated, "options", options)
    monkeypatch.setattr(emulated, "device", lambda: told)
    backend = bindings.backend
    monkeypatch.setattr(bindings, "backend", lambda name: backend("reference"))
    monkeypatch.setattr(ops, "shared_gate", shared_gate)
    return told


def run(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    path = tmp_path / "counters.json"
    code = bench.main(["--counters", "--json", str(path), *arguments])
    return code, json.loads(path.read_text())


def test_record(stand_in: types.SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, record = run(tmp_path, "--ops", "shared_gate", "--targets", "sm_90a,sm_103a", "--rows", "1,3")
    assert code == 0
    assert record["kind"] == "counters"
    assert [(k["op"], k["rows"], k["target"]) for k in record["kernels"]] == [
        ("shared_gate", 1, "sm_90a"),
        ("shared_gate", 3, "sm_90a"),
        ("shared_gate", 1, "sm_103a"),
        ("shared_gate", 3, "sm_103a"),
    ]
    assert record["kernels"][1]["counters"] == {
        "instructions": 11,
        "read_bytes": 22,
        "tma_read_bytes": 33,
        "read_sectors": 44,
        "unique_read_sectors": 55,
        "written_bytes": 66,
        "written_sectors": 77,
        "unique_written_sectors": 88,
        "bank_conflicts": 99,
        "barrier_waits": 110,
        "matrix_flops": 121,
    }
    assert record["kernels"][1]["launches"] == 2
    assert stand_in.targets == ["sm_90a"] * 2 + ["sm_103a"] * 2
    assert "shared_gate  3     sm_103a  2" in capsys.readouterr().out


def test_a_wrong_kernel_fails(
    stand_in: types.SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gate = ops.shared_gate
    monkeypatch.setattr(ops, "shared_gate", lambda x, weight, *, out: gate(x, weight, out=out).mul_(2))
    code, record = run(tmp_path, "--ops", "shared_gate", "--targets", "sm_90a")
    assert code == 1
    assert record["kernels"][0]["error"].startswith("wrong result: shared_gate")
    assert "FAILED shared_gate, 1, sm_90a: wrong result" in capsys.readouterr().out


def test_one_that_cannot_run_leaves_the_others(
    stand_in: types.SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **options: Any) -> None:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(ops, "hc_gate", broken)
    code, record = run(tmp_path, "--ops", "hc_gate,shared_gate", "--targets", "sm_90a")
    assert code == 1
    assert [k["error"] for k in record["kernels"]] == ["RuntimeError: no C compiler", None]


def test_targets_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.parse(["--counters", "--targets", "sm_80"])
    assert "sm_80: not among sm_90a" in capsys.readouterr().err


def test_command(stand_in: types.SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "counters.json"
    arguments = ["shared_gate", "--target", "sm_103a", "--rows", "1,3", "--json", str(path)]
    assert counters.main(arguments) == 0
    record = json.loads(path.read_text())
    assert record["command"] == "python -m profiling.counters " + " ".join(arguments[:-1]) + f" {path}"
    assert [(k["op"], k["rows"], k["target"]) for k in record["kernels"]] == [
        ("shared_gate", 1, "sm_103a"),
        ("shared_gate", 3, "sm_103a"),
    ]
    assert "shared_gate  3" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["hc_gat"], ["--rows", "0"], ["--rows", "a"], ["--target", "sm_80"]])
def test_bad_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        counters.main(arguments)
    assert error.value.code == 2
    assert "allowed" in (told := capsys.readouterr().err) or "choose from" in told


@pytest.mark.parametrize(("name", "said"), [("", "is a folder"), ("none/f.json", "no folder")])
def test_where_no_file_can_be(
    name: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Told before anything is counted."""
    with pytest.raises(SystemExit):
        counters.main(["shared_gate", "--json", str(tmp_path / name)])
    assert said in capsys.readouterr().err
