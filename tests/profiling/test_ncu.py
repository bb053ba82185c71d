"""Nsight Compute: CSV files captured on an H200, and the scripts that make them, with a stand-in for the
profiler."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest

from profiling import cases, once
from profiling.ncu import parse, tool

DATA = Path(__file__).with_name("data")


@pytest.fixture(autouse=True)
def as_if_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "without_gpu", lambda: None)


def read(family: str) -> list[parse.Kernel]:
    return parse.read(DATA / f"{family}.csv", DATA / f"{family}.json")


def test_a_launch_that_the_profiler_could_not_run() -> None:
    with pytest.raises(ValueError, match=r"unlaunched\.csv: the profiler could not run HcMix"):
        parse.read(DATA / "unlaunched.csv")


def test_a_captured_file() -> None:
    (kernel,) = read("gdn")
    assert kernel == parse.Kernel(
        op="gdn_packed_decode",
        rows=1,
        kernel="GdnPackedDecode",
        us=pytest.approx(3.808),
        dram_bytes=pytest.approx(801536.0),
        l2_bytes=pytest.approx(2772704.0),
        minimum=1581204,
        registers=56,
        occupancy=pytest.approx(11.747827),
        grid=48,
        block=256,
        stall="long_scoreboard",
        stall_warps=pytest.approx(2.413379),
        sm_percent=pytest.approx(kernel.sm_percent),
        memory_percent=pytest.approx(kernel.memory_percent),
    )
    assert 0 < kernel.sm_percent < 100
    assert 0 < kernel.memory_percent < 100


def test_several_kernels_in_the_order_of_their_calls() -> None:
    kernels = read("hyper")
    assert [(k.op, k.kernel) for k in kernels] == [
        ("hc_gate", "HcGate"),
        ("hc_apply", "HcApply"),
        ("hc_apply_norm", "HcApplyNorm"),
        ("grouped_gemma_rmsnorm", "GroupedGemmaRmsnorm"),
    ]
    assert [k.registers for k in kernels] == [32, 25, 32, 31]
    assert [k.minimum for k in kernels] == [
        cases.make(k.op, 1, cases.torch.device("cpu")).bytes for k in kernels
    ]
    assert all(2 < k.us < 5 for k in kernels)


def test_the_bytes_of_hc_mix_are_its_weights() -> None:
    (kernel,) = read("mix")
    assert (kernel.op, kernel.kernel, kernel.grid, kernel.block) == ("hc_mix", "HcMix", 120, 384)
    assert kernel.us == pytest.approx(7.712)
    assert kernel.minimum == 13_132_800
    assert kernel.minimum < kernel.dram_bytes < 1.01 * kernel.minimum


def test_issuing_is_no_stall(tmp_path: Path) -> None:
    text = (DATA / "gdn.csv").read_text()
    assert text.count('"0.999882"') == 1, "warps that were selected"
    (tmp_path / "gdn.csv").write_text(text.replace('"0.999882"', '"99"'))
    assert parse.read(tmp_path / "gdn.csv")[0].stall == "long_scoreboard"


def test_the_table() -> None:
    lines = parse.table(read("gdn")).splitlines()
    assert lines[0].split()[:4] == ["op", "kernel", "us", "DRAM"]
    assert lines[1].split() == [
        *("gdn_packed_decode", "GdnPackedDecode", "3.81", "802", "2773", "1581", "56", "12", "48", "256"),
        *("long_scoreboard", "2.4"),
    ]


def test_without_what_was_called(tmp_path: Path) -> None:
    shutil.copy(DATA / "gdn.csv", tmp_path)
    (kernel,) = parse.read(tmp_path / "gdn.csv", tmp_path / "gdn.json")
    assert (kernel.op, kernel.minimum) == ("", None)
    assert kernel.registers == 56


def test_a_call_of_several_launches(tmp_path: Path) -> None:
    called = tmp_path / "called.json"
    called.write_text(json.dumps([{"op": "hc_mix", "rows": 2, "launches": 4, "bytes": 7}]))
    kernels = parse.read(DATA / "hyper.csv", called)
    assert {(k.op, k.rows, k.minimum) for k in kernels} == {("hc_mix", 2, 7)}


def test_other_launches_than_were_called(tmp_path: Path) -> None:
    called = tmp_path / "called.json"
    called.write_text(json.dumps([{"op": "hc_gate", "rows": 1, "launches": 1, "bytes": 7}]))
    with pytest.raises(ValueError, match="4 launches were profiled, 1 were called"):
        parse.read(DATA / "hyper.csv", called)


@pytest.mark.parametrize("text", ["", "==ERROR== no kernels were profiled\n", '"ID","Kernel Name"\n"",""\n'])
def test_no_raw_page(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "f.csv"
    path.write_text(text)
    assert parse.main([str(path)]) == 1
    assert "f.csv: no kernels of a raw page" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        ("1,234.5", "byte", 1234.5),
        ("1.5", "Kbyte", 1500.0),
        ("2", "Mbyte", 2e6),
        ("3.25", "%", 3.25),
        ("7", "", 7.0),
    ],
)
def test_numbers(value: str, unit: str, expected: float) -> None:
    assert parse.number(value, unit) == expected


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("kernel_cutlass_kernel_cute_kernelshypergateHcGate_object_at__tensorptrbf16_0", "HcGate"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>(T1)", "splitKreduce_kernel"),
        ("nvjet_sm90_tss_128x8_64x12_4x1_v_bz_TNT", "nvjet_sm90_tss_128x8_64x12_4x1_v_bz_TNT"),
    ],
)
def test_names(name: str, short: str) -> None:
    assert parse.short_name(name) == short


def test_every_operator_has_a_family_and_every_family_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    in_families = [op for ops in tool.FAMILIES.values() for op in ops]
    assert sorted(in_families) == sorted(once.OPS)
    ran: list[tuple[list[str], str]] = []
    monkeypatch.setattr(tool, "main", lambda families, *, name: ran.append((families, name)))
    for script in (*tool.FAMILIES, "run_all"):
        with pytest.raises(SystemExit):
            runpy.run_module(f"profiling.ncu.{script}", run_name="__main__")
    assert ran == [*(([name], name) for name in tool.FAMILIES), (list(tool.FAMILIES), "run_all")]


STAND_IN = """\
#!{python}
import pathlib, sys
words = sys.argv[1:]
with open({log!r}, "a") as log:
    print(*words, file=log)
if "--import" in words:
    print("==PROF== connected")
    print(pathlib.Path({csv!r}).read_text(), end="")
elif {says!r}:
    print({says!r})
else:
    pathlib.Path(words[words.index("--export") + 1]).write_text("a report")
    pathlib.Path(words[words.index("--json") + 1]).write_text(pathlib.Path({called!r}).read_text())
"""


def stand_in(folder: Path, says: str = "", family: str = "gdn") -> Path:
    path = folder / "ncu"
    values = {
        "csv": str(DATA / f"{family}.csv"),
        "called": str(DATA / f"{family}.json"),
        "log": str(folder / "log"),
    }
    path.write_text(STAND_IN.format(python=sys.executable, says=says, **values))
    path.chmod(0o755)
    return path


def test_a_family(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ncu, out = stand_in(tmp_path), tmp_path / "out"
    assert tool.main(["gdn"], ["--ncu", str(ncu), "--out", str(out), "--rows", "1"], name="gdn") == 0
    profiled, exported = (tmp_path / "log").read_text().splitlines()
    assert f"-m profiling.once --ops gdn_packed_decode --rows 1 --json {out}/gdn.json" in profiled
    assert "--profile-from-start off --cache-control all --clock-control none" in profiled
    for section in tool.SECTIONS:
        assert f"--section {section}" in profiled
    assert exported == f"--import {out}/gdn.ncu-rep --csv --page raw"
    assert (out / "gdn.csv").read_text() == (DATA / "gdn.csv").read_text()
    record = json.loads((out / "ncu.json").read_text())
    assert record["kind"] == "ncu"
    assert "--cache-control all --clock-control none" in record["control"]
    assert [k["op"] for k in record["kernels"]] == ["gdn_packed_decode"]
    said = capsys.readouterr().out
    assert "GdnPackedDecode" in said
    assert "one warm launch each, --cache-control all" in said


def test_no_permission_is_said_politely(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ncu = stand_in(
        tmp_path, "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU"
    )
    assert tool.main(["gdn"], ["--ncu", str(ncu), "--out", str(tmp_path / "out")], name="gdn") == 2
    told = capsys.readouterr().err
    assert "may not read the GPU's performance counters" in told
    assert "NVreg_RestrictProfilingToAdminUsers=0" in told


@pytest.mark.parametrize("script", ["run_all", "hyper"])
def test_no_gpu_is_said_before_anything_runs(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [script, "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module(f"profiling.ncu.{script}", run_name="__main__")
    assert stop.value.code == 2
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "profiling.ncu: torch sees no CUDA device; nothing was profiled\n")
    assert not (tmp_path / "out").exists()


def test_no_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ncu = stand_in(tmp_path, "profiling.once: no CUDA device of a supported target")
    assert tool.main(["gdn"], ["--ncu", str(ncu), "--out", str(tmp_path / "out")], name="gdn") == 2
    assert "nothing was profiled" in capsys.readouterr().err


def test_a_family_that_fails_leaves_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ncu = stand_in(tmp_path, "Traceback: something broke")
    code = tool.main(["gdn", "mix"], ["--ncu", str(ncu), "--out", str(tmp_path / "out")], name="run_all")
    told = capsys.readouterr()
    assert code == 1
    assert [f"FAILED {family}: ncu left no report" in told.err for family in ("gdn", "mix")] == [True, True]
    assert "something broke" in told.err


def test_finding_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ncu = stand_in(tmp_path)
    monkeypatch.delenv("NCU", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert tool.find_ncu() == ncu
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    (tmp_path / "bin").mkdir()
    moved = ncu.rename(tmp_path / "bin" / "ncu")
    assert tool.find_ncu() == moved
    assert tool.find_ncu(str(moved)) == moved
    monkeypatch.setenv("NCU", "/no/such/ncu")
    assert tool.main(["gdn"], ["--out", str(tmp_path / "out")], name="gdn") == 2
    assert "/no/such/ncu cannot be run" in capsys.readouterr().err


def test_none_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCU", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tool.shutil, "which", lambda name: None)
    monkeypatch.setattr(tool.os, "access", lambda path, mode: False)
    with pytest.raises(tool.RefusedError, match="--ncu EXE or NCU=EXE"):
        tool.find_ncu()


def test_rows_are_positive(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tool.main(["gdn"], ["--rows", "0"], name="gdn")
    assert "--rows: got 0, at least 1" in capsys.readouterr().err
