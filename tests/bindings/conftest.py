"""The stand-in for compiled kernels, as a fixture."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bindings import dispatch, gemm_mix, jit, targets
from tests.bindings.calls import Jit


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
