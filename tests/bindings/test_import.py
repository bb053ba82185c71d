"""`import bindings`: fast, and without a driver, a compiler, or a look at a GPU. Each case is a process of
its own."""

from __future__ import annotations

import subprocess
import sys

import pytest


def python(program: str) -> str:
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_time() -> None:
    """Under 0.3 s over torch: the best of three, since the machine may be busy."""
    program = "import time, torch; t = time.perf_counter(); import bindings; print(time.perf_counter() - t)"
    python(program)  # writes the byte code
    assert min(float(python(program)) for _ in range(3)) < 0.3


def test_what_stays_unloaded() -> None:
    """Neither the compiler, nor its runtime, nor the driver's bindings, nor torch's compiler."""
    heavy = ("cutlass", "tvm_ffi", "cuda", "pynvml", "triton", "sympy", "torch._dynamo", "torch._inductor")
    program = (
        "import sys, torch; before = set(sys.modules); import bindings\n"
        "new = set(sys.modules) - before\n"
        f"print([m for m in new if any(m == h or m.startswith(h + '.') for h in {heavy})])"
    )
    assert python(program) == "[]"


def test_no_driver_is_touched() -> None:
    """CUDA stays uninitialised, and calls on the CPU leave it so."""
    program = (
        "import ctypes, torch\n"
        "opened = []\n"
        "class Spy(ctypes.CDLL):\n"
        "    def __init__(self, name, *args, **kwargs):\n"
        "        opened.append(str(name)); super().__init__(name, *args, **kwargs)\n"
        "ctypes.CDLL = Spy\n"
        "import bindings\n"
        "t = torch.zeros(2, 64, dtype=torch.bfloat16)\n"
        "bindings.ops.shared_gate(t, t[0])\n"
        "bindings.explain('shared_gate', t, t[0])\n"
        "print(torch.cuda.is_initialized(), [o for o in opened if 'cuda' in o])"
    )
    assert python(program) == "False []"


@pytest.mark.parametrize(
    "name", ["bindings.ops", "bindings.hyper", "bindings.env", "bindings.dispatch", "bindings.kernels"]
)
def test_any_module_first(name: str) -> None:
    """No module depends on another having been imported before it."""
    assert (
        python(f"import {name}, torch; print(torch.ops.flashnext.hc_gate.default)")
        == "flashnext.hc_gate.default"
    )


def test_public_names() -> None:
    program = "import bindings; print([n for n in bindings.__all__ if not hasattr(bindings, n)])"
    assert python(program) == "[]"
    assert (
        python("import bindings; print(callable(bindings.warmup), callable(bindings.explain))") == "True True"
    )
