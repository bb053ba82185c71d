"""Ground truth that this project did not write: kernels of the published quack-kernels wheel beside torch."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIRST = {
    "sm_90a": ["rmsnorm", "gemm_wgmma"],
    "sm_100a": ["softmax", "gemm_tcgen05"],
}

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("quack") is None, reason="needs quack-kernels, of the extra `test`"
)


def expected(line: dict, finding: str) -> bool:
    """The wheel's tcgen05 GEMMs use what tcgen05.ld loads without tcgen05.wait::ld in between. By the ISA that is
    undefined; in machine code the registers' dependencies keep it right."""
    return line["case"].startswith("gemm_tcgen05") and "has not loaded until tcgen05.wait::ld" in finding


def check(target: str, names: list[str]) -> None:
    command = [sys.executable, "-m", "tests.emulator.published", target, *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {line["case"] for line in lines} >= set(names)
    for line in lines:
        assert "error" not in line, line
        assert line["distance"] <= 1, line
        assert [f for f in line["findings"] if not expected(line, f)] == [], line


@pytest.mark.parametrize("target", FIRST)
def test_norm_softmax_and_gemm(target):
    check(target, FIRST[target])


@pytest.mark.nightly
@pytest.mark.parametrize("target", FIRST)
def test_every_case(target):
    check(target, [])
