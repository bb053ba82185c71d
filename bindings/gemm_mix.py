"""hc_mix by two GEMMs of the BLAS, for any number of rows on a CUDA device.

Both products leave the GEMM in fp32, so the only roundings are the contract's two: the inner activation and
the result. The elementwise steps are torch's. A CUDA graph can capture it once the BLAS has its handle
(`bindings.warmup`).
"""

from __future__ import annotations

import torch
from torch import Tensor


def matmul_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """x[T, K] times the rows of weight[N, K], 16-bit operands, fp32 sums and result: [T, N]. CUDA only."""
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


@torch.inference_mode()  # out may be an inference tensor
def hc_mix(normed: Tensor, w_down: Tensor, w_up: Tensor, out: Tensor, streams: int) -> None:
    """Writes the mix of normed[T, C*H] into out[T, H]. w_down: [R, C*H], w_up: [C*H, R]; all bf16 or fp16."""
    rows, width = normed.shape
    inner = torch.nn.functional.silu(matmul_fp32(normed, w_down).div_(streams)).to(normed.dtype)
    mix = matmul_fp32(inner, w_up).sigmoid_().mul_(normed)
    out.copy_(mix.view(rows, streams, width // streams).mean(1))
