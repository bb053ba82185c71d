"""What tests share: stand-ins for compiled kernels, and for the compiler."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bindings import cache, compiler, dispatch, gemm_mix, jit, targets
from bindings.store import Key
from tests.bindings import toys
from tests.bindings.calls import Jit


@pytest.fixture(scope="module")
def toy() -> compiler.Compiled:
    """A compiled kernel."""
    return compiler.compile_kernel(toys.ADD, "sm_90a", {"addend": 1})


@pytest.fixture
def cache_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, of a process that has loaded nothing."""
    monkeypatch.setattr(jit, "_functions", {})
    monkeypatch.setattr(jit, "_unwritable", set())
    monkeypatch.delenv(cache.AOT_VARIABLE, raising=False)
    monkeypatch.delenv("CUTE_DSL_LIBS", raising=False)
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def builds(cache_root: Path, toy: compiler.Compiled, monkeypatch: pytest.MonkeyPatch) -> list[Key]:
    """The compiler gives the toy for everything, at once, and here is what it was asked for."""
    asked: list[Key] = []

    def compile_kernel(module: str, target: str, params: dict[str, str | int | bool]) -> compiler.Compiled:
        asked.append(Key.of(module, target, params))
        return toy

    monkeypatch.setattr(compiler, "compile_kernel", compile_kernel)
    return asked


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The DSL is not installed."""
    packages = {**compiler.toolchain()["packages"], "nvidia-cutlass-dsl": None}
    toolchain = {**compiler.toolchain(), "packages": packages}
    monkeypatch.setattr(compiler, "toolchain", lambda: toolchain)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Jit]:
    """Devices are an SM90 target (`.target` changes that) and the JIT is the stand-in; plans and readiness
    start empty."""
    stand_in = Jit("sm_90a")
    monkeypatch.setattr(targets, "target_of", stand_in.target_of)
    monkeypatch.setattr(jit, "get", stand_in.get)
    monkeypatch.setattr(
        gemm_mix, "matmul_fp32", lambda x, weight: x.float() @ weight.float().t()
    )  # CUDA's, on CPUs
    monkeypatch.setattr(dispatch, "_ready", set())
    dispatch.clear_plans()
    yield stand_in
    dispatch.clear_plans()
