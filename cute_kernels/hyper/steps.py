"""The steps HC kernels compose, each written once: fused and separate kernels give the same bits."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32
from cutlass.memory import SmemAllocator

from cute_kernels.device import vector
from cute_kernels.device.math import fma, rsqrt, sigmoid
from cute_kernels.device.reduce import cta_sum
from cute_kernels.device.span import Span

SPLITS = 8
MAX_THREADS = 512


def stream_gate(partials: cute.Tensor, t, c, streams: int) -> Float32:
    """a[t, c] = 2 * sigmoid(sum over s of partials[t, s, c] / C), summed s = 0..7, by every thread."""
    row = vector.row_of(partials, t, SPLITS * streams, 16)
    logit = row[c]
    for s in range(1, SPLITS):
        logit = logit + row[s * streams + c]
    # multiplying by 1 / C is exact where C is a power of two; elsewhere a correctly rounded division
    mean = logit * (1.0 / streams) if streams & (streams - 1) == 0 else logit / Float32(streams)
    return Float32(2.0) * sigmoid(mean)


def combine(gate: Float32, block: cute.Tensor, residual: cute.Tensor, dtype) -> cute.Tensor:
    """act(fma(gate, block, residual)) element by element: one rounding, at the conversion."""
    b, r = block.load().to(Float32), residual.load().to(Float32)
    wide = cute.make_rmem_tensor(residual.layout, Float32)
    for i in range(cute.size(residual)):
        wide[i] = fma(gate, b[i], r[i])
    out = cute.make_rmem_tensor(residual.layout, dtype)
    out.store(wide.load().to(dtype))
    return out


def gemma_rmsnorm(x: cute.Tensor, weight: cute.Tensor, eps: Float32, span: Span, dtype) -> cute.Tensor:
    """act(x * rsqrt(mean(x^2) + eps) * (1 + weight)) over the CTA's span: one rounding, at the conversion."""
    xf, wf = x.load().to(Float32), weight.load().to(Float32)
    square = Float32(0.0)
    for i in range(span.elems * span.passes):
        square = fma(xf[i], xf[i], square)
    scratch = SmemAllocator().allocate_tensor(Float32, cute.make_layout((span.warps,)), 16)
    total = cta_sum(square, scratch, span.warps)
    r = rsqrt(fma(total, 1.0 / span.extent, eps))
    out = cute.make_rmem_tensor(x.layout, dtype)
    out.store((xf * r * (wf + 1.0)).to(dtype))
    return out
