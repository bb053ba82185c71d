"""The golden data (tests/golden/inputs.py says what it holds) against every backend."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bindings import oracle, tolerance
from bindings.tolerance import Exact
from tests.golden import inputs as golden_inputs
from tests.harness import Backend, Placement, assert_same_bits, call

HC = {"hc1": (1, torch.bfloat16), "hc2": (2, torch.bfloat16), "hc4": (4, torch.bfloat16)}
HC |= {"hc2.fp16": (2, torch.float16)}
hc_data = pytest.mark.parametrize("data", HC)


@functools.cache
def golden() -> dict[str, np.ndarray]:
    """Every array of golden.npz, by name."""
    with np.load(Path(__file__).parent.parent / "golden" / "golden.npz") as file:
        return dict(file)


@functools.cache
def hc(data: str) -> dict[str, Tensor]:
    T, dtype = HC[data]
    return {name: value.to(dtype) for name, value in golden_inputs.hc(T).items()}


def check(result: str, got: Tensor, name: str, terms: Any = None) -> None:
    verdict = tolerance.check(result, got, Exact(golden()[name].astype(np.float64), terms))
    assert verdict.ok, f"{name}: {verdict}"


def run(op: str, backend: Backend, **inputs: Any) -> tuple[Tensor, ...]:
    """One call between guard bands; results on the CPU."""
    placed = Placement(op, inputs, backend.device)
    results = call(op, placed.arguments, backend, placed.outputs())
    placed.check()
    return tuple(result.cpu() for result in results)


def boundary(data: str) -> dict[str, Tensor]:
    """Arguments of hc_apply for the golden combined rows: the golden logits in split 0."""
    inputs = hc(data)
    logits = torch.from_numpy(golden()[f"{data}.gate_logits"]).float()
    partials = torch.zeros(logits.shape[0], 8, logits.shape[1])
    partials[:, 0] = logits
    return {"block": inputs["block"], "residual": inputs["residual"], "partials": partials}


@hc_data
def test_hc_gate(data: str, backend: Backend) -> None:
    inputs = hc(data)
    (partials,) = run("hc_gate", backend, normed=inputs["normed"], inject_weight=inputs["inject_weight"])
    check("hc_gate", partials.double().sum(1).float(), f"{data}.gate_logits")


@hc_data
def test_hc_apply(data: str, backend: Backend) -> None:
    inputs = boundary(data)
    (combined,) = run("hc_apply", backend, **inputs)
    check("hc_apply", combined, f"{data}.combined", oracle.hc_apply(**inputs).terms)


@hc_data
def test_hc_apply_norm(data: str, backend: Backend) -> None:
    """The golden norm is that of the golden rows rounded; a value near a tie may round the other way, and its
    norm is then another value's. Few are."""
    inputs = boundary(data)
    combined, normed = run("hc_apply_norm", backend, **inputs, norm_weight=hc(data)["norm_weight"])
    check("hc_apply_norm.combined", combined, f"{data}.combined", oracle.hc_apply(**inputs).terms)
    name, exact = f"{data}.normed_next", golden()[f"{data}.normed_next"].astype(np.float64)
    expected = tolerance.rounded(golden()[f"{data}.combined"].astype(np.float64), combined.dtype)
    same = tolerance.to_numpy(combined) == expected
    assert same.mean() > 0.999, f"{data}.combined: {1 - same.mean():.2%} of the values rounded the other way"
    verdict = tolerance.check("hc_apply_norm.normed", normed[torch.from_numpy(same)], Exact(exact[same]))
    assert verdict.ok, f"{name}: {verdict}"


@hc_data
def test_norm(data: str, backend: Backend) -> None:
    inputs = hc(data)
    weight = inputs["norm_weight"]
    (normed,) = run("grouped_gemma_rmsnorm", backend, x=inputs["residual"], weight=weight)
    check("grouped_gemma_rmsnorm", normed, f"{data}.norm")
    rounded = tolerance.rounded(golden()[f"{data}.combined"].astype(np.float64), weight.dtype)
    combined = torch.from_numpy(rounded).to(weight.dtype)
    (normed,) = run("grouped_gemma_rmsnorm", backend, x=combined, weight=weight)
    check("grouped_gemma_rmsnorm", normed, f"{data}.normed_next")


@hc_data
def test_hc_mix(data: str, backend: Backend) -> None:
    names = ("normed", "w_down", "w_up")
    (mixed,) = run("hc_mix", backend, **{name: hc(data)[name] for name in names})
    check("hc_mix", mixed, f"{data}.mix")


@hc_data
def test_shared_gate(data: str, backend: Backend) -> None:
    inputs = hc(data)
    (gate,) = run("shared_gate", backend, x=inputs["block"], weight=inputs["gate_weight"])
    check("shared_gate", gate, f"{data}.shared_gate")


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("T", [1, 3])
def test_moe_finalize(T: int, rank: int, backend: Backend) -> None:
    inputs, name = golden_inputs.moe(T, rank), f"moe{T}.rank{rank}"
    (out,) = run("moe_finalize", backend, **inputs)
    check("moe_finalize", out, name, oracle.moe_finalize(**inputs).terms)
    bits = torch.from_numpy(golden()[f"{name}.bits"].view(np.int16)).view(torch.bfloat16)
    assert_same_bits(out, bits, f"{name}.bits")


@pytest.mark.parametrize("B", [1, 3])
def test_gdn_packed_decode(B: int, backend: Backend) -> None:
    inputs, name = golden_inputs.gdn(B), f"gdn{B}"
    out, state = run("gdn_packed_decode", backend, **inputs)
    check("gdn_packed_decode", out, f"{name}.out")
    touched = [index for index in inputs["state_indices"].tolist() if index >= 0]
    check("gdn_packed_decode.state", state[touched][:, :, ::16, ::8], f"{name}.state_rows")
    sums = torch.stack([state.double().sum(), state.double().square().sum()])
    np.testing.assert_allclose(sums.numpy(), golden()[f"{name}.state_sum"], rtol=1e-6)


def test_oracle_agrees() -> None:
    """The float64 oracle and the golden data are two computations of one thing."""

    def close(exact: Exact, name: str, **tolerances: float) -> None:
        expected = golden()[name]
        # golden.npz holds 16-bit results' exact values as float32
        allowed = {"rtol": 1e-12 if expected.dtype == np.float64 else 2.0**-24, "atol": 1e-12} | tolerances
        np.testing.assert_allclose(exact.value, expected, err_msg=name, **allowed)

    for data in HC:
        inputs = hc(data)
        logits = oracle.hc_gate(inputs["normed"], inputs["inject_weight"]).value.sum(1)
        close(Exact(logits), f"{data}.gate_logits")
        close(oracle.hc_apply(**boundary(data)), f"{data}.combined", atol=1e-7)
        close(oracle.hc_mix(inputs["normed"], inputs["w_down"], inputs["w_up"]), f"{data}.mix")
        close(oracle.grouped_gemma_rmsnorm(inputs["residual"], inputs["norm_weight"]), f"{data}.norm")
        close(oracle.shared_gate(inputs["block"], inputs["gate_weight"]), f"{data}.shared_gate")
    for B in (1, 3):
        inputs = golden_inputs.gdn(B)
        out, state = oracle.gdn_packed_decode(**inputs)
        close(out, f"gdn{B}.out")
        touched = [index for index in inputs["state_indices"].tolist() if index >= 0]
        close(Exact(state.value[touched][:, :, ::16, ::8]), f"gdn{B}.state_rows")
