"""The page that logs are turned into."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from profiling import summarise
from profiling.ncu import parse
from profiling.summarise import Stage, findings, pytest_counts, read_stages, scrub

PYTEST = """
tests/ops/test_contract.py ........................................ [ 40%]
=================================== FAILURES ===================================
FAILED tests/ops/test_contract.py::test_results[cute-cuda-hc_gate-T1] - AssertionError: /root/x/y.py
=========================== short test summary info ============================
{}
"""

MEMCHECK = """========= COMPUTE-SANITIZER
........
8 passed, 1200 deselected in 41.20s
========= ERROR SUMMARY: {} errors
"""

RACECHECK = """========= COMPUTE-SANITIZER
8 passed, 1200 deselected, 1 warning in 61.20s
========= RACECHECK SUMMARY: {} hazards displayed ({} errors, 0 warnings)
"""

STEP = {
    "kind": "decode_step",
    "command": "python -m profiling.decode_step",
    "shape": {"layers": 48, "experts": 512, "context": 8192},
    "ratio": {"median": 1.2, "p10": 1.19, "p90": 1.21},
    "noise": 0.002,
    "launches": {"expected": {"tail": 48}, "got": {"tail": 48}},
    "failures": ["ratio: /root/x: 1.1"],
}


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ("=== 812 passed, 3 skipped, 1 warning in 41.23s ===", {"passed": 812, "skipped": 3, "warnings": 1}),
        ("812 passed, 40 deselected in 1.20s", {"passed": 812, "deselected": 40}),
        ("1 failed, 2 passed, 1 error in 0.5s", {"failed": 1, "passed": 2, "errors": 1}),
        ("==== 2 failed, 810 passed in 125.10s (0:02:05) ====", {"failed": 2, "passed": 810}),
        ("==== no tests ran in 0.01s ====", {}),
        ("killed", {}),
    ],
)
def test_pytest_counts(line: str, counts: dict[str, int]) -> None:
    assert pytest_counts(PYTEST.format(line)) == counts


@pytest.mark.parametrize(
    ("log", "found"),
    [
        (MEMCHECK.format(0), 0),
        (MEMCHECK.format(3), 3),
        (MEMCHECK.format(0) + MEMCHECK.format(2), 2),
        (RACECHECK.format(0, 0), 0),
        (RACECHECK.format(5, 5), 5),
        ("========= COMPUTE-SANITIZER\n", None),
    ],
)
def test_findings(log: str, found: int | None) -> None:
    assert findings(log) == found


@pytest.mark.parametrize(
    ("stage", "ok"),
    [
        (Stage("tests", 0, 1, 9, {"passed": 3}), True),
        (Stage("tests", 1, 1, 9, {"passed": 3}), False),
        (Stage("tests", 0, 1, 9, {"passed": 3, "failed": 1}), False),
        (Stage("tests", 0, 1, 9, {"skipped": 3}), False),
        (Stage("tests", 0, 1, 9, {}), False),
        (Stage("memcheck", 0, 1, 9, {"passed": 3}, findings=0), True),
        (Stage("memcheck", 0, 1, 9, {"passed": 3}, findings=1), False),
        (Stage("memcheck", 0, 1, 9, {"passed": 3}), False),
        (Stage("racecheck", 0, 1, 9, {}, findings=0), False),
        (Stage("bench", 0, 1, 9), True),
        (Stage("bench", 124, 9, 9), False),
    ],
)
def test_what_counts_as_passed(stage: Stage, ok: bool) -> None:
    assert stage.ok is ok


def test_outcomes_in_words() -> None:
    assert (
        Stage("tests", 124, 9, 9, {"passed": 3, "warnings": 2}).outcome
        == "3 passed, stopped at its limit of 9 s"
    )
    assert Stage("memcheck", 86, 9, 9, {}).outcome == "no summary of the tool, exit code 86"
    assert Stage("racecheck", 0, 9, 9, {"passed": 1}, findings=0).outcome == "1 passed, 0 findings"
    assert Stage("demo", 0, 9, 9).outcome == "done"


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("in /home/user/site/x.py:3", "in x.py:3"),
        ("RuntimeError: '/tmp/a/b' is gone", "RuntimeError: 'b' is gone"),
        ("tests/ops/test_x.py and 3/4 GB/s", "tests/ops/test_x.py and 3/4 GB/s"),
    ],
)
def test_scrub(text: str, clean: str) -> None:
    assert scrub(text) == clean


def timing(us: float) -> dict[str, Any]:
    return {"median": us, "p10": us - 0.1, "p90": us + 0.1, "count": 2, "samples": [[us, us]]}


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """A folder as gpu_check.sh leaves it."""
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "stages.tsv").write_text(
        "tests\t1\t100\t420\nmemcheck\t0\t50\t420\nbench\t0\t90\t420\ndemo\t0\t9\t180\n"
    )
    (folder / "tests.log").write_text(PYTEST.format("==== 1 failed, 9 passed in 3.0s ===="))
    (folder / "memcheck.log").write_text(MEMCHECK.format(0))
    (folder / "ncu").mkdir()
    data = Path(__file__).with_name("data")
    kernels = [kernel.to_json() for kernel in parse.read(data / "gdn.csv", data / "gdn.json")]
    ncu = {"kind": "ncu", "control": "one warm launch each", "kernels": kernels}
    (folder / "ncu" / "ncu.json").write_text(json.dumps(ncu))
    families = [{"family": "HC mix", "launches": 97, "us": 900.0, "alone_us": 900.0}]
    arms = {
        name: {"cold": timing(us), "kernels": 1241, "trace": {"families": families}}
        for name, us in (("fused", 2000.0), ("unfused", 2400.0))
    }
    (folder / "decode_step.json").write_text(json.dumps({**STEP, "arms": arms}))
    line = {
        "op": "hc_gate",
        "rows": 1,
        "metric": "cold",
        "version": "ours",
        "against": "sglang hc_combine_gate",
        "us": 4.1,
        "against_us": 4.4,
        "ratio": 1.073,
        "p10": 1.05,
        "p90": 1.09,
        "bound": 1.0,
        "noise": 0.004,
        "verdict": "PASS",
        "note": "",
    }
    run = {
        "op": "hc_gate",
        "rows": 1,
        "bytes": 1,
        "served_by": "cute sm_90a",
        "error": None,
        "noise": {"cold": 0.004},
        "versions": [
            {"name": "ours", "bytes": 1, "error": None, "cold": timing(4.1), "hot": timing(1.1)},
            {"name": "broken", "bytes": 1, "error": "OSError: /root/site/f.so", "cold": None, "hot": None},
        ],
        "host": {"ops": timing(9.5)},
    }
    bench = {
        "date": "2026-11-29",
        "command": "python -m profiling.bench --peers",
        "host": {"gpu": "NVIDIA H200", "versions": {"torch": "2.11.0"}, "nvml": {"driver": "580.1"}},
        "settings": {"blocks": 7, "samples": 31, "flush_bytes": 512 << 20},
        "missing_peers": {},
        "acceptance": [line],
        "runs": [run],
    }
    (folder / "bench.json").write_text(json.dumps(bench))
    fused = {key: run[key] for key in ("rows", "error", "noise", "versions")} | {
        "op": "all_reduce",
        "ranks": 4,
    }
    reduced = {key: bench[key] for key in ("date", "command", "host", "settings")}
    collective = {**reduced, "kind": "collective", "runs": [fused], "acceptance": []}
    (folder / "collective.json").write_text(json.dumps(collective))
    link = {"one_way_us": 0.71}
    several = {
        **reduced,
        "kind": "ranks",
        "ranks": 2,
        "transport": "cuda_ipc",
        "link": link,
        "acceptance": [],
    }
    (folder / "ranks.json").write_text(json.dumps({**several, "runs": [{**fused, "rows": 4, "ranks": 2}]}))
    op = {"backend": "cute", "target": "sm_90a", "max_err": 1e-3, "tolerance": 2e-3, "ok": True}
    demo = {
        "host": {"gpu": "NVIDIA H200", "system": "Linux-some-machine"},
        "layers": 48,
        "launches": {"hc_apply_norm": 95},
        "ops": {"hc_gate": op, "hc_mix": {**op, "max_err": None, "ok": False}},
        "latency": {"eager_ms": 9.5, "graph_ms": None},
    }
    (folder / "demo.json").write_text(json.dumps(demo))
    return folder


def test_page(logs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, data = tmp_path / "s.md", tmp_path / "s.json"
    assert summarise.main([str(logs), "--markdown", str(page), "--json", str(data)]) == 1
    text = page.read_text()
    assert capsys.readouterr().out == text
    for line in (
        "# Results on NVIDIA H200",
        "2026-11-29, driver 580.1, torch 2.11.0.",
        "| tests | FAILED | 1 failed, 9 passed, exit code 1 | 100 |",
        "| memcheck | ok | 8 passed, 1200 deselected, 0 findings | 50 |",
        "- FAILED tests/ops/test_contract.py::test_results[cute-cuda-hc_gate-T1]",
        "| hc_gate, 1 row | ours | 4.10 (4.00-4.20) | 1.10 |",
        "| hc_gate, 1 row | broken | OSError: f.so |  |",
        "| hc_gate | 1 | ops | 9.50 |",
        "Latency: eager_ms 9.500. Launches: {'hc_apply_norm': 95}.",
        "| hc_mix | cute | sm_90a | not finite | 2.00e-03 | FAILED |",
        "## Collective, one rank over loopback",
        "| all_reduce, 1 row | ours | 4.10 (4.00-4.20) | 1.10 |",
        "## 2 ranks, a GPU each; link one way 0.710 us",
        "| all_reduce, 4 rows | ours | 4.10 (4.00-4.20) | 1.10 |",
        "## Decode step, 48 layers, 512 experts, context 8192",
        "| fused | 2.000 | 1241 |",
        "| HC mix | 900 (97) | 900 (97) |",
        "- FAILED ratio: x: 1.1",
        "one warm launch each.",
    ):
        assert line in text.splitlines()
    assert "1.073" in text
    assert "GdnPackedDecode" in text
    for secret in ("/root", "127.0.0.1", "some-machine", str(tmp_path)):
        assert secret not in text
        assert secret not in data.read_text()
    summary = json.loads(data.read_text())
    assert "samples" not in summary["bench"]["runs"][0]["versions"][0]["cold"]
    assert summary["collective"]["kind"] == "collective"
    assert summary["collective"]["runs"][0]["ranks"] == 4
    assert (summary["ranks"]["kind"], summary["ranks"]["ranks"]) == ("ranks", 2)
    assert summary["decode_step"]["arms"]["fused"]["cold"] == {"median": 2000.0, "p10": 1999.9, "p90": 2000.1}
    assert [stage["ok"] for stage in summary["stages"]] == [False, True, True, True]


def test_all_passed(logs: Path) -> None:
    (logs / "stages.tsv").write_text("memcheck\t0\t50\t420\ndemo\t0\t9\t180\n")
    assert summarise.main([str(logs)]) == 0


def test_half_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert summarise.main([str(tmp_path)]) == 1, "no stage ran: nothing passed"
    (tmp_path / "stages.tsv").write_text("bench\t124\t420\t420\n")
    (tmp_path / "bench.json").write_text('{"schema": 1, "runs"')
    assert summarise.main([str(tmp_path)]) == 1
    assert "| bench | FAILED | stopped at its limit of 420 s | 420 |" in capsys.readouterr().out


def test_an_empty_folder(tmp_path: Path) -> None:
    assert read_stages(tmp_path) == []


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        summarise.main([str(tmp_path / "none")])
