"""fp32 math to the contracts' error, each function once: equal arguments give equal bits in every kernel.

A multiply-add that a contract names is written as `fma`. Inside exp, sigmoid and softplus the compiler may
fuse further.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32


def fma(a, b, c) -> Float32:
    """a * b + c with one rounding."""
    return cute.math.fma(Float32(a), Float32(b), Float32(c))


def exp(x: Float32) -> Float32:
    """e^x to 2 ulp over the whole range (the fast form loses |x| * 2^-24)."""
    return cute.math.exp(x)


def rcp(x: Float32) -> Float32:
    """1 / x to 1 ulp."""
    return cute.math.rcp(x, approx=True)


def sigmoid(x: Float32) -> Float32:
    """1 / (1 + e^-x) to 4 ulp above 2^-126 and 0 below; NaN for NaN."""
    return rcp(Float32(1.0) + exp(-x))


def rsqrt(x: Float32) -> Float32:
    """1 / sqrt(x) to 2 ulp."""
    return cute.math.rsqrt(x, approx=True)


def rsqrt_normal(x: Float32) -> Float32:
    """1 / sqrt(x) to 2 ulp for x that is no denormal, three instructions shorter."""
    return cute.math.rsqrt(x, approx=True, ftz=True)


def select(condition, a, b):
    """a where condition holds, else b; both are evaluated. The type is a's."""
    return type(a)(cutlass.select_(condition, a, type(a)(b)))


def softplus(x: Float32) -> Float32:
    """log(1 + e^x) for x <= 20, else x."""
    near = cute.math.log(Float32(1.0) + exp(x))
    return select(x > Float32(20.0), x, near)
