"""The float64 oracle's own arithmetic, where it is not plain float64."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from bindings import oracle, reference

fp32 = st.floats(width=32, allow_nan=False, allow_infinity=False)

# 1 + 2**-23 plus just under half a unit: float64 rounds the sum to the midpoint, which then goes the wrong
# way.
HAZARD = (2.0**-24 * (1 + 2.0**-15), 1 - 2.0**-15, 1 + 2.0**-23)


def nearest_fp32(x: Fraction) -> float:
    """x rounded to the nearest fp32, ties to even, by exact arithmetic."""
    if x == 0:
        return 0.0
    exponent = 0
    while abs(x) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while abs(x) < Fraction(2) ** exponent:
        exponent -= 1
    step = Fraction(2) ** (max(exponent, -126) - 23)
    value = round(x / step) * step  # Fraction rounds half to even
    return float(value) if abs(value) < Fraction(2) ** 128 else (np.inf if value > 0 else -np.inf)


@given(fp32, fp32, fp32)
@example(*HAZARD)
@example(3e38, 2.0, -3e38)
@example(1e-30, 1e-20, 1e-45)
def test_fma32_rounds_once(a: float, b: float, c: float) -> None:
    got = oracle.fma32(np.array([a]), np.array([b]), np.array([c]))[0]
    assert got == nearest_fp32(Fraction(a) * Fraction(b) + Fraction(c))


def test_what_the_references_fma_may_differ_by() -> None:
    a, b, c = (torch.tensor([x]) for x in HAZARD)
    exact = oracle.fma32(*(np.array([x]) for x in HAZARD))
    assert exact == 1 + 2.0**-23
    assert reference.fma(a, b, c).item() == 1 + 2.0**-22  # one fp32 ulp, as its docstring says


def test_the_references_fma_rounds_once_elsewhere() -> None:
    """On a million operands as the operators have them: 16-bit times fp32, plus fp32."""
    generator = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(2**20, generator=generator) for _ in range(3))
    a = a.bfloat16()
    exact = oracle.fma32(*(x.double().numpy() for x in (a, b, c)))
    assert (reference.fma(a, b, c).double().numpy() != exact).sum() <= 1
    assert ((a.float() * b + c).double().numpy() != exact).mean() > 0.1, "nor is it a multiply and an add"


def test_gate_adds_in_order() -> None:
    partials = torch.tensor([1e8, 3.0, -1e8, 0.0, 0.0, 0.0, 0.0, 0.5]).view(1, 8, 1)
    total = np.float32(1e8) + np.float32(3.0) - np.float32(1e8) + np.float32(0.5)
    assert total != 3.5
    np.testing.assert_allclose(oracle.gate(partials), 2 / (1 + np.exp(-np.float64(total))), rtol=1e-15)
    torch.testing.assert_close(
        reference.gate_from_partials(partials), torch.tensor([[2 / (1 + np.exp(-total))]]), rtol=1e-6, atol=0
    )
    assert partials[0, 0, 0] == 1e8, "the oracle does not add in place"


def test_state_is_left_alone() -> None:
    D = 64
    inputs = dict(
        mixed_qkv=torch.ones(1, 3 * D).bfloat16(),
        a=torch.zeros(1, 1).bfloat16(),
        b=torch.zeros(1, 1).bfloat16(),
        A_log=torch.zeros(1),
        dt_bias=torch.zeros(1),
        state=torch.ones(2, 1, D, D, dtype=torch.float64),
        state_indices=torch.tensor([1]),
    )
    _, pool = oracle.gdn_packed_decode(**inputs)
    assert (inputs["state"] == 1).all()
    assert (pool.value[0] == 1).all()
    assert (pool.value[1] != 1).all()
