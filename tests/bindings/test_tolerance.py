"""The comparison itself: what passes, and above all what does not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bindings import oracle, tolerance
from bindings.tolerance import Exact, Verdict, check, rounded, spacing, to_numpy
from tests.cases import named

Round = Callable[[torch.Tensor], torch.Tensor]

halves = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def every(dtype: torch.dtype) -> torch.Tensor:
    """Every value of a 16-bit dtype, in the order of its bits."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def up(x: torch.Tensor, steps: int = 1) -> torch.Tensor:
    """The values `steps` further from zero."""
    return (x.view(torch.int16) + steps).view(x.dtype)


@halves
def test_spacing_is_the_distance_to_the_next_value(dtype: torch.dtype) -> None:
    x = every(dtype)
    x = x[x.abs() < torch.finfo(dtype).max]
    np.testing.assert_array_equal(np.abs(to_numpy(up(x)) - to_numpy(x)), spacing(to_numpy(x), dtype))
    top = np.array([np.inf, np.nan, 1e300, torch.finfo(dtype).max])
    np.testing.assert_array_equal(spacing(top, dtype), spacing(top[3:], dtype)[0])


@halves
def test_rounding_keeps_values_and_splits_at_midpoints(dtype: torch.dtype) -> None:
    x = every(dtype)
    np.testing.assert_array_equal(rounded(to_numpy(x), dtype), to_numpy(x))
    x = x[x.isfinite() & (x.view(torch.int16) >= 0)]
    low = to_numpy(x)
    half = spacing(low, dtype) / 2
    high = np.append(low[1:], np.inf)
    even = (x.view(torch.int16) % 2 == 0).numpy()
    middle = low + half
    np.testing.assert_array_equal(rounded(np.nextafter(middle, 0), dtype), low)
    np.testing.assert_array_equal(rounded(middle, dtype), np.where(even, low, high))
    np.testing.assert_array_equal(rounded(np.nextafter(middle, np.inf), dtype), high)
    np.testing.assert_array_equal(rounded(-middle, dtype), -np.where(even, low, high))


@given(st.lists(st.floats(width=64), min_size=1, max_size=50))
def test_rounding_to_fp32_is_numpys(values: list[float]) -> None:
    y = np.array(values)
    with np.errstate(over="ignore"):
        expected = y.astype(np.float32).astype(np.float64)
    np.testing.assert_array_equal(rounded(y, torch.float32), expected)


@halves
@pytest.mark.parametrize(
    ("result", "ulps"),
    [("hc_apply", 0), ("moe_finalize", 0), ("grouped_gemma_rmsnorm", 1), ("gdn_packed_decode", 1)],
)
def test_how_far_a_result_may_be(result: str, ulps: int, dtype: torch.dtype) -> None:
    """In ulps from the correctly rounded one, where the exact result is representable and where it is a
    midpoint."""
    x = torch.rand(1000, generator=torch.Generator().manual_seed(0)).to(dtype) + 1
    y = to_numpy(x)
    exact = Exact(y, np.abs(y))
    assert check(result, up(x, ulps), exact).ok
    assert not check(result, up(x, ulps + 1), exact).ok
    middle = Exact(y + spacing(y, dtype) / 2, np.abs(y))
    assert check(result, x, middle).ok
    assert check(result, up(x), middle).ok
    assert not check(result, up(x, -ulps - 1), middle).ok
    one_wrong = x.clone()
    one_wrong[77] = up(x, ulps + 1)[77]
    verdict = check(result, one_wrong, exact)
    assert not verdict.ok
    assert "1 of 1000" in str(verdict)
    assert "(77,)" in str(verdict)
    assert verdict.max_err > verdict.tolerance


def test_slack_follows_the_terms() -> None:
    """Near cancellation an error of the terms' size counts, not of the result's."""
    y = np.array([2.0**-20])
    off = torch.tensor([2.0**-20 + 2.0**-22], dtype=torch.bfloat16)
    assert not check("hc_apply", off, Exact(y, np.array([2.0**-20]))).ok
    assert check("hc_apply", off, Exact(y, np.array([2.0]))).ok


@pytest.mark.parametrize(("result", "fraction"), [("hc_gate", 2e-6), ("gdn_packed_decode.state", 5e-6)])
def test_fp32_is_measured_by_the_largest_magnitude(result: str, fraction: float) -> None:
    y = np.array([1.0, -100.0, np.inf, np.nan])
    x = torch.tensor(y).float()
    off = x.clone()
    off[0] += 100 * fraction * 0.9
    assert check(result, off, Exact(y)).ok
    off[0] += 100 * fraction * 0.3
    assert not check(result, off, Exact(y)).ok
    zero = torch.zeros(3)
    assert check(result, zero, Exact(np.zeros(3))).ok
    assert not check(result, zero + 1e-30, Exact(np.zeros(3))).ok


@pytest.mark.parametrize("result", sorted(tolerance.RULES))
def test_nan_and_infinities(result: str) -> None:
    inf, nan = float("inf"), float("nan")
    dtype = torch.float32 if result in ("hc_gate", "shared_gate") else torch.float16
    for exact, got, ok in [
        (nan, nan, True), (nan, 1.0, False), (nan, inf, False), (1.0, nan, False), (inf, inf, True),
        (inf, -inf, False), (inf, nan, False), (inf, 6e4, False), (-inf, -inf, True), (1.0, inf, False),
    ]:  # fmt: skip
        y = np.array([[exact, 1.0]])
        verdict = check(result, torch.tensor([[got, 1.0]], dtype=dtype), Exact(y, np.abs(y)))
        assert verdict.ok == ok, f"exact {exact}, got {got}: {verdict}"
        assert verdict.ok or verdict.max_err == inf


@halves
def test_overflow_is_rounding(dtype: torch.dtype) -> None:
    """Infinity starts half a spacing beyond the largest finite value, give or take the slack."""
    top = torch.finfo(dtype).max
    largest, infinite = torch.tensor([top], dtype=dtype), torch.tensor([float("inf")], dtype=dtype)
    half = spacing(np.array([top]), dtype) / 2
    slack = 2.0**-21 * top
    for sign in (1, -1):
        for past, finite_ok, infinite_ok in [
            (half - 4 * slack, True, False), (half - slack / 2, True, True), (half + slack / 2, True, True),
            (half + 4 * slack, False, True), (top, False, True),
        ]:  # fmt: skip
            exact = Exact(sign * (top + past) * np.ones(1), np.array([top]))
            assert check("hc_apply", sign * largest, exact).ok == finite_ok
            assert check("hc_apply", sign * infinite, exact).ok == infinite_ok
            assert not check("hc_apply", -sign * infinite, exact).ok


def test_another_shape_fails() -> None:
    assert not check("hc_gate", torch.zeros(2, 8, 4), Exact(np.zeros((2, 8, 3)))).ok
    assert check("hc_gate", torch.zeros(0, 8, 4), Exact(np.zeros((0, 8, 4)))).ok


@pytest.mark.parametrize("name", ["T33-bf16-model", "T32-fp16-model"])
def test_a_wrong_rounding_point_in_hc_mix_fails_both_conditions(name: str) -> None:
    inputs = named("hc_mix", name).inputs()
    exact, dtype = oracle.hc_mix(**inputs), inputs["normed"].dtype
    normed, w_down, w_up = (inputs[n].double() for n in ("normed", "w_down", "w_up"))

    def act(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype).double()

    def keep(x: torch.Tensor) -> torch.Tensor:
        return x

    def mixed(z_as: Round = keep, t_as: Round = act, m_as: Round = keep, product_as: Round = keep) -> Verdict:
        z = z_as(normed @ w_down.T / 4)
        t = t_as(z * torch.sigmoid(z))
        products = product_as(m_as(torch.sigmoid(t @ w_up.T)) * normed)
        return check("hc_mix", products.view(normed.shape[0], 4, -1).mean(1).to(dtype), exact)

    right = mixed()
    assert right.ok
    assert right.equal > 0.999
    wrong = [mixed(z_as=act), mixed(m_as=act), mixed(product_as=act)]
    if dtype == torch.bfloat16:  # an unrounded t is not far enough from one rounded to fp16
        wrong.append(mixed(t_as=keep))
    for verdict in wrong:
        assert verdict.equal < tolerance.RULES["hc_mix"].equal[dtype]
        assert verdict.max_err > verdict.tolerance
        assert "outside" in verdict.detail
        assert "required" in verdict.detail
