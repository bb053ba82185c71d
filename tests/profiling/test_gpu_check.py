"""The script that a GPU host runs, with a stand-in for Python: stages, logs, limits, exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "profiling" / "gpu_check.sh"

STANDIN = f"""#!/bin/sh
case "$*" in
  *profiling.summarise*) exec {sys.executable} "$@" ;;
  *profiling.bench*) echo "$*"; [ "$BENCH" = hangs ] && exec sleep 30; exit 0 ;;
  *"-m pytest -m gpu "*)
    echo "$FLASHNEXT_CACHE_DIR"; echo "== $TESTS in 1.0s =="; case "$TESTS" in *failed*) exit 1 ;; esac ;;
  *"-m pytest"*) echo "8 passed in 1.0s" ;;
  *) echo "$*"; exit 0 ;;
esac
"""

SANITIZER = """#!/bin/sh
echo "$*"
echo "8 passed in 1.0s"
echo "========= ERROR SUMMARY: $FOUND errors"
[ "$FOUND" = 0 ]
"""


def check(tmp_path: Path, *stages: str, **environment: str) -> subprocess.CompletedProcess[str]:
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    for name, text in (("standin", STANDIN), ("compute-sanitizer", SANITIZER)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    given = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHON": str(tools / "standin"),
        "RESULTS_DIR": str(tmp_path / "results"),
        "FLASHNEXT_CACHE_DIR": str(tmp_path / "cache"),
        "TESTS": "3 passed",
        "BENCH": "ends",
        "FOUND": "0",
        **environment,
    }
    return subprocess.run(
        ["bash", str(SCRIPT), *stages], env=given, capture_output=True, text=True, cwd=tmp_path
    )


def stages(tmp_path: Path) -> list[list[str]]:
    return [line.split("\t") for line in (tmp_path / "results" / "stages.tsv").read_text().splitlines()]


def test_default_stages(tmp_path: Path) -> None:
    done = check(tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line[:2] for line in stages(tmp_path)] == [["tests", "0"], ["bench", "0"], ["demo", "0"]]
    assert f"--peers --json {tmp_path}/results/bench.json" in (tmp_path / "results" / "bench.log").read_text()
    assert str(tmp_path / "cache") in (tmp_path / "results" / "tests.log").read_text()
    assert "| tests | ok | 3 passed |" in (tmp_path / "results" / "summary.md").read_text()
    assert done.stdout.rstrip().endswith((tmp_path / "results" / "summary.md").read_text().rstrip())


def test_a_failing_stage_fails_and_the_others_run(tmp_path: Path) -> None:
    done = check(tmp_path, "tests", "demo", TESTS="1 failed, 2 passed")
    assert done.returncode == 1
    assert [line[:2] for line in stages(tmp_path)] == [["tests", "1"], ["demo", "0"]]
    assert "== tests: FAILED (exit code 1)" in done.stdout


def test_skipping_everything_is_no_pass(tmp_path: Path) -> None:
    done = check(tmp_path, "tests", TESTS="3 skipped")
    assert done.returncode == 1
    assert "== tests: FAILED (3 skipped)" in done.stdout
    assert "== tests: ok" not in done.stdout
    assert "| tests | FAILED | 3 skipped |" in (tmp_path / "results" / "summary.md").read_text()


def test_a_stage_is_stopped_at_its_limit(tmp_path: Path) -> None:
    done = check(tmp_path, "bench", BENCH="hangs", LIMIT_BENCH="1")
    assert done.returncode == 1
    assert stages(tmp_path) == [["bench", "124", stages(tmp_path)[0][2], "1"]]
    assert int(stages(tmp_path)[0][2]) < 15
    assert "stopped at its limit of 1 s" in done.stdout


def test_a_stage_run_again_replaces_its_outcome(tmp_path: Path) -> None:
    assert check(tmp_path, "tests", "demo", TESTS="1 failed").returncode == 1
    assert check(tmp_path, "tests").returncode == 0
    assert [line[:2] for line in stages(tmp_path)] == [["demo", "0"], ["tests", "0"]]


@pytest.mark.parametrize(("found", "code"), [("0", 0), ("2", 1)])
def test_sanitizers(tmp_path: Path, found: str, code: int) -> None:
    done = check(tmp_path, "sanitize", FOUND=found)
    assert done.returncode == code
    assert [line[0] for line in stages(tmp_path)] == ["memcheck", "racecheck", "initcheck"]
    for tool, marks in (
        ("racecheck", "gpu and sanitizer"),
        ("initcheck", "gpu and sanitizer and not concurrent"),
    ):
        log = (tmp_path / "results" / f"{tool}.log").read_text()
        assert f"--tool {tool} --report-api-errors no --error-exitcode 86" in log
        assert f"-m {marks} -q" in log


def test_ncu(tmp_path: Path) -> None:
    assert check(tmp_path, "ncu", NCU_ARGS="--rows 4").returncode == 0
    log = (tmp_path / "results" / "ncu.log").read_text()
    assert log.rstrip().endswith(f"-m profiling.ncu.run_all --out {tmp_path}/results/ncu --rows 4")


def test_collective(tmp_path: Path) -> None:
    assert check(tmp_path, "collective").returncode == 0
    log = (tmp_path / "results" / "collective.log").read_text()
    assert log.rstrip().endswith(f"-m profiling.collective --json {tmp_path}/results/collective.json")


def test_ranks(tmp_path: Path) -> None:
    assert check(tmp_path, "ranks", RANKS="2", RANKS_ARGS="--rows 1").returncode == 0
    log = (tmp_path / "results" / "ranks.log").read_text()
    assert log.startswith("-m torch.distributed.run --nproc-per-node 2 -m profiling.bench --ops all_reduce,")
    assert log.rstrip().endswith(f"--peers --json {tmp_path}/results/ranks.json --rows 1")


def test_step(tmp_path: Path) -> None:
    assert check(tmp_path, "step", STEP_ARGS="--layers 8").returncode == 0
    log = (tmp_path / "results" / "step.log").read_text()
    assert log.rstrip().endswith(
        f"-m profiling.decode_step --json {tmp_path}/results/decode_step.json --layers 8"
    )


def test_unknown_stage(tmp_path: Path) -> None:
    done = check(tmp_path, "tests", "nothing")
    assert done.returncode == 2
    assert "nothing: no such stage" in done.stderr
    assert not (tmp_path / "results" / "stages.tsv").exists(), "asked about before anything runs"


def test_tools_that_are_not_there(tmp_path: Path) -> None:
    done = check(tmp_path, "memcheck", "demo", COMPUTE_SANITIZER="")
    assert done.returncode == 1
    assert "compute-sanitizer is not on this host" in done.stderr
    assert [line[:2] for line in stages(tmp_path)] == [["memcheck", "127"], ["demo", "0"]]
