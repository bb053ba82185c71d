"""How a result is compared with the exact one: the tolerances of the contract, and formats in float64.

With y the exact result before its last rounding and u(y) the spacing of the result's dtype at y, a 16-bit
result x passes when |x - y| <= u(y)/2 + slack, the slack depending on the operator; an fp32 result when |x -
y| is within a fraction of the array's largest magnitude. NaN passes only for NaN, an infinity only where y is
that infinity or rounds to it within the slack. "Largest magnitude" looks at finite values only.

Everything is numpy float64 on the CPU and holds for any dtype in `FORMATS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

F64 = NDArray[np.float64]


class Exact(NamedTuple):
    """An operator's exact result before its last rounding."""

    value: F64
    terms: F64 | None = None
    """Sum of the magnitudes of the terms added last, for results whose slack refers to it."""
    ties: F64 | None = None
    """What the result may move by where an earlier rounding lies within fp32 error of a tie: neither side is
    wrong."""


class Format(NamedTuple):
    """A binary floating-point format: significand bits with the hidden one, exponents of its normal range."""

    precision: int
    min_exponent: int
    max_exponent: int

    @property
    def largest(self) -> float:
        """The largest finite value."""
        return float((2.0 - 2.0 ** (1 - self.precision)) * 2.0**self.max_exponent)


FORMATS = {
    torch.bfloat16: Format(8, -126, 127),
    torch.float16: Format(11, -14, 15),
    torch.float32: Format(24, -126, 127),
}


def spacing(y: F64, dtype: torch.dtype) -> F64:
    """u(y): the distance between neighbours of dtype in y's binade; the subnormal one near 0, the top one
    beyond the largest finite value. NaN and infinities get the top one."""
    fmt = FORMATS[dtype]
    _, exponent = np.frexp(y)  # |y| = m * 2**exponent, 0.5 <= m < 1
    exponent = np.where(
        np.isfinite(y) & (y != 0), exponent - 1, np.where(y == 0, fmt.min_exponent, fmt.max_exponent)
    )
    result: F64 = np.ldexp(1.0, np.clip(exponent, fmt.min_exponent, fmt.max_exponent) + 1 - fmt.precision)
    return result


def rounded(y: F64, dtype: torch.dtype) -> F64:
    """y rounded once to nearest even in dtype, overflow to infinity included."""
    fmt = FORMATS[dtype]
    step = spacing(y, dtype)
    with np.errstate(invalid="ignore"):
        result = np.rint(y / step) * step
    return np.where(np.abs(result) > fmt.largest, np.copysign(np.inf, result), result)


def to_numpy(x: torch.Tensor) -> F64:
    """Any tensor's values in float64 on the CPU (exact for every dtype here)."""
    values: F64 = x.detach().to("cpu", torch.float64).numpy()
    return values


def largest_magnitude(y: F64, axis: int | None = None) -> F64:
    """Largest finite |y|, over all or along an axis that is kept; 0 where there is none."""
    finite = np.where(np.isfinite(y), np.abs(y), 0.0)
    return np.asarray(finite.max(axis=axis, keepdims=axis is not None, initial=0.0))


@dataclass(frozen=True)
class Verdict:
    """Outcome of a comparison. `max_err` and `tolerance` are those of the element that comes closest to
    failing, or fails worst, so `max_err <= tolerance` says whether every element passed."""

    result: str
    ok: bool
    max_err: float
    tolerance: float
    equal: float
    """Fraction of elements equal to the correctly rounded exact result."""
    detail: str = ""

    def __str__(self) -> str:
        word = "ok" if self.ok else "FAILED"
        text = (
            f"{self.result}: {word}, error {self.max_err:.3g} of {self.tolerance:.3g}, equal {self.equal:.2%}"
        )
        return f"{text}; {self.detail}" if self.detail else text


class Rule(NamedTuple):
    """slack(exact, u, dtype) of a result, added to u/2 when 16-bit, and by dtype the least fraction of
    elements that must equal the rounded y."""

    slack: Callable[[Exact, F64, torch.dtype], F64 | float]
    equal: Mapping[torch.dtype, float] = MappingProxyType({})


def _sum_slack(exact: Exact, u: F64, dtype: torch.dtype) -> F64:
    assert exact.terms is not None, "this result's tolerance needs the magnitudes of its terms"
    return 2.0**-21 * np.where(np.isfinite(exact.terms), exact.terms, 0.0)


def _half_ulp_slack(exact: Exact, u: F64, dtype: torch.dtype) -> F64:
    return u / 2


def _mix_slack(exact: Exact, u: F64, dtype: torch.dtype) -> F64:
    slack = (1.5e-4 if dtype == torch.bfloat16 else 8e-5) * largest_magnitude(exact.value, axis=-1)
    return slack if exact.ties is None else slack + exact.ties


def _gdn_out_slack(exact: Exact, u: F64, dtype: torch.dtype) -> F64:
    return u / 2 + 1e-6 * largest_magnitude(exact.value)


def _relative_slack(fraction: float) -> Callable[[Exact, F64, torch.dtype], F64]:
    return lambda exact, u, dtype: fraction * largest_magnitude(exact.value)


RULES = {
    "grouped_gemma_rmsnorm": Rule(_half_ulp_slack),
    "hc_gate": Rule(_relative_slack(2e-6)),
    "hc_apply": Rule(_sum_slack),
    "hc_apply_norm.combined": Rule(_sum_slack),
    "hc_apply_norm.normed": Rule(_half_ulp_slack),
    "hc_boundary.combined": Rule(_sum_slack),
    "hc_boundary.normed": Rule(_half_ulp_slack),
    "hc_boundary.partials": Rule(_relative_slack(2e-6)),
    "hc_mix": Rule(_mix_slack, {torch.bfloat16: 0.90, torch.float16: 0.80}),
    "shared_gate": Rule(_relative_slack(2e-6)),
    "moe_finalize": Rule(_sum_slack),
    "gdn_packed_decode": Rule(_gdn_out_slack),
    # A bf16 state: half its spacing on top, like every 16-bit result.
    "gdn_packed_decode.state": Rule(_relative_slack(5e-6)),
}
"""Rule by result. An operator's only or first result has the operator's name, or `operator.result`."""


def check(result: str, got: torch.Tensor, exact: Exact) -> Verdict:
    """Compares a result, on any device and of the operator's dtype, with the exact one by its rule."""
    rule = RULES[result]
    dtype = got.dtype
    y, x = exact.value, to_numpy(got)
    if x.shape != y.shape:
        return Verdict(result, False, np.inf, 0.0, 0.0, f"shape {x.shape}, expected {y.shape}")
    u = spacing(y, dtype)
    slack = rule.slack(exact, u, dtype)
    tolerance = np.broadcast_to(slack if dtype == torch.float32 else u / 2 + slack, y.shape)

    with np.errstate(invalid="ignore"):
        error = np.abs(x - y)
        # An infinity may stand for a finite y that is at most the slack short of what rounds to it.
        fmt = FORMATS[dtype]
        overflow = fmt.largest + np.ldexp(1.0, fmt.max_exponent - fmt.precision)
        short = overflow - y * np.sign(x)
        error = np.where(np.isinf(x) & np.isfinite(y), np.where(short <= slack, 0.0, np.inf), error)
        error = np.where(np.isnan(x) | ~np.isfinite(y), np.inf, error)
        error = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0.0, error)
        target = rounded(y, dtype)
        same = (x == target) | (np.isnan(x) & np.isnan(target))
    equal = float(same.mean()) if same.size else 1.0

    if y.size == 0:
        return Verdict(result, True, 0.0, 0.0, equal)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(error == 0, 0.0, error / tolerance)
    worst = np.unravel_index(int(np.argmax(ratio)), y.shape)
    failed = int((error > tolerance).sum())
    details = []
    if failed:
        at = tuple(int(i) for i in worst)
        details.append(f"{failed} of {y.size} outside, worst at {at}: got {x[worst]!r}, exact {y[worst]!r}")
    least = rule.equal.get(dtype, 0.0)
    if equal < least:
        details.append(f"equal to the rounded exact result in {equal:.2%}, at least {least:.0%} required")
    return Verdict(
        result, not details, float(error[worst]), float(tolerance[worst]), equal, "; ".join(details)
    )
