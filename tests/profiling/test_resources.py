"""The guard of what kernels use: which differences it names, how it is updated, and that the committed file
is whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bindings import precompile, targets
from profiling import resources


def row(
    registers: int = 32, spills: int | None = 0, instructions: dict[str, int] | None = None
) -> dict[str, Any]:
    counted = {"total": 100, "LDG.128": 4} if instructions is None else instructions
    return {
        "kernel": "hc_gate",
        "target": "sm_90a",
        "module": "cute_kernels.hyper.gate",
        "params": {"width": 10240, "dtype": "bf16"},
        "registers": registers,
        "spill_bytes": spills,
        "stack": 0,
        "smem": 80,
        "threads": 160,
        "instructions": counted,
    }


KEY = "sm_90a hc_gate cute_kernels.hyper.gate dtype=bf16,width=10240"


def test_a_kernel_is_known_by_what_it_was_built_from() -> None:
    assert resources.table([row()]) == {
        KEY: {
            "registers": 32,
            "spill_bytes": 0,
            "stack": 0,
            "smem": 80,
            "instructions": {"LDG.128": 4, "total": 100},
        }
    }


@pytest.mark.parametrize(
    ("found", "lines"),
    [
        ([row()], []),
        ([row(registers=33)], [f"{KEY}: registers 32 -> 33"]),
        ([row(spills=8)], [f"{KEY}: spill_bytes 0 -> 8"]),
        (
            [row(instructions={"total": 104, "LDG.128": 4, "SHFL": 4})],
            [f"{KEY}: total 100 -> 104, SHFL 0 -> 4"],
        ),
        ([row(instructions={}, spills=None)], []),
        ([], [f"{KEY}: is no longer built"]),
        ([row(), row() | {"kernel": "other"}], [f"{KEY.replace('hc_gate ', 'other ')}: is new"]),
    ],
    ids=["same", "registers", "spills", "instructions", "not counted here", "gone", "new"],
)
def test_differences(found: list[dict[str, Any]], lines: list[str]) -> None:
    assert resources.differences(resources.table([row()]), resources.table(found)) == lines


def run(tmp_path: Path, reports: object, *arguments: str) -> int:
    path = tmp_path / "reports.json"
    path.write_text(reports if isinstance(reports, str) else json.dumps(reports))
    return resources.main([str(path), "--committed", str(tmp_path / "committed.json"), *arguments])


def test_a_change_is_deliberate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, [row()], "--update") == 0
    assert run(tmp_path, [row()]) == 0
    assert run(tmp_path, [row(registers=40)]) == 1
    told = capsys.readouterr()
    assert f"RESOURCES: {KEY}: registers 32 -> 40" in told.err
    assert "make resources" in told.out
    assert run(tmp_path, [row(registers=40)], "--update") == 0
    assert run(tmp_path, [row(registers=40)]) == 0


def test_another_compiler_is_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, [row()], "--update") == 0
    monkeypatch.setattr(resources, "made_with", lambda: {"nvidia-cutlass-dsl": "9.9", "cuda": 14})
    assert run(tmp_path, [row(registers=40)]) == 0
    assert "not compared" in capsys.readouterr().out


def test_counts_are_needed_for_an_update(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, [row(instructions={})], "--update") == 2
    assert "no disassembler" in capsys.readouterr().err
    assert not (tmp_path / "committed.json").exists()


@pytest.mark.parametrize("reports", ["no JSON", [{"kernel": "hc_gate"}]])
def test_what_cannot_be_read(tmp_path: Path, reports: object) -> None:
    assert run(tmp_path, reports) == 2


def test_the_committed_file_has_every_kernel_and_no_spill() -> None:
    committed = json.loads(resources.COMMITTED.read_text())["kernels"]
    built = [
        {"target": c.key.target, "kernel": c.kernel, "module": c.key.module, "params": c.key.params}
        for c in precompile.registered(tuple(targets.TARGETS), sample=True)
    ]
    numbers = {**dict.fromkeys(resources.NUMBERS, 0), "instructions": {}}
    assert set(committed) == set(resources.table([b | numbers for b in built])), "make resources"
    assert not [key for key, used in committed.items() if used["spill_bytes"] or used["stack"]]
    assert all(used["instructions"]["total"] for used in committed.values())
