"""Kernels of the published quack-kernels wheel, unmodified, in the emulator beside torch.

`python -m tests.emulator.published sm_90a [CASE ...]` prints a line of JSON a case: how far the result
is from torch in float64, in units of what rounding to bf16 allows, and the emulator's findings. Each target
has a process of its own, since the wheel reads QUACK_ARCH once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any

CASES: dict[str, Callable[..., list[tuple[Any, Any]]]] = {}
TARGETS: dict[str, tuple[str, ...]] = {}


def case(*targets: str) -> Callable:
    """Registers a case: a function of the emulated device and its target, to [(result, exact result)]."""

    def register(function: Callable) -> Callable:
        CASES[function.__name__] = function
        TARGETS[function.__name__] = targets or ("sm_90a", "sm_100a")
        return function

    return register


def import_quack() -> None:
    """The wheel imports Triton, for its autotuner alone, which nothing here uses: a name will do where there
    is none."""
    import torch

    try:
        import triton  # noqa: F401
    except ModuleNotFoundError:
        torch.compile(lambda x: x)  # torch looks for Triton once, and must not find the name
        names = {"triton": types.ModuleType("triton"), "triton.language": types.ModuleType("triton.language")}
        names["triton"].runtime = types.SimpleNamespace(cache=types.SimpleNamespace(FileCacheManager=object))
        names["triton"].jit = lambda function: function
        names["triton"].language = names["triton.language"]
        names["triton.language"].constexpr = int
        sys.modules.update(names)
        import quack  # noqa: F401

        for name in names:
            del sys.modules[name]


def normal(*shape: int, dtype: Any = None) -> Any:
    import torch

    return torch.randn(shape).to(dtype or torch.bfloat16)


@case()
def rmsnorm(device: Any, target: str) -> list:
    """Weight and residual; 2560 elements, four rows."""
    import torch
    from cutlass import BFloat16
    from quack.rmsnorm import _compile_rmsnorm_fwd

    n = 2560
    run = _compile_rmsnorm_fwd(
        BFloat16, BFloat16, BFloat16, BFloat16, None, BFloat16, n, True, False, False, False
    )
    x, weight, residual = normal(4, n), normal(n), normal(4, n)
    out, summed, rstd = torch.zeros_like(x), torch.zeros_like(x), torch.zeros(4)
    run(x, weight, None, residual, out, summed, rstd, None, 1e-6)
    exact = x.double() + residual.double()
    scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-6)
    return [(out, exact * scale * weight.double()), (summed, exact)]


@case()
def layernorm(device: Any, target: str) -> list:
    import torch
    from cutlass import BFloat16, Float32
    from quack.rmsnorm import _compile_rmsnorm_fwd

    n = 1024
    run = _compile_rmsnorm_fwd(BFloat16, BFloat16, None, Float32, Float32, None, n, False, False, True, False)
    x, weight, bias = normal(4, n), torch.randn(n), torch.randn(n)
    out = torch.zeros_like(x)
    run(x, weight, bias, None, out, None, None, None, 1e-6)
    return [(out, torch.nn.functional.layer_norm(x.double(), (n,), weight.double(), bias.double(), 1e-6))]


@case()
def rmsnorm_cluster(device: Any, target: str) -> list:
    """A row so wide that a cluster shares it: remote stores and barriers between CTAs."""
    import torch
    from cutlass import BFloat16
    from quack.rmsnorm import _compile_rmsnorm_fwd

    n = 32768
    run = _compile_rmsnorm_fwd(BFloat16, BFloat16, None, BFloat16, None, None, n, False, False, False, False)
    x, weight = normal(2, n), normal(n)
    out = torch.zeros_like(x)
    run(x, weight, None, None, out, None, None, None, 1e-6)
    scale = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6)
    return [(out, x.double() * scale * weight.double())]


@case()
def softmax(device: Any, target: str) -> list:
    import torch
    from cutlass import BFloat16
    from quack.softmax import Softmax

    x = normal(8, 1024)
    out = torch.zeros_like(x)
    Softmax.compile(BFloat16, BFloat16, 1024)(x, out)
    return [(out, torch.softmax(x.double(), -1))]


@case()
def softmax_backward(device: Any, target: str) -> list:
    import torch
    from cutlass import BFloat16
    from quack.softmax import SoftmaxBackward

    y, dy = torch.softmax(normal(8, 512).float(), -1).bfloat16(), normal(8, 512)
    dx = torch.zeros_like(y)
    SoftmaxBackward.compile(BFloat16, BFloat16, BFloat16, 512)(dy, y, dx)
    exact = y.double() * (dy.double() - (y.double() * dy.double()).sum(-1, keepdim=True))
    return [(dx, exact)]


@case()
def cross_entropy(device: Any, target: str) -> list:
    import torch
    from cutlass import BFloat16, Int64
    from quack.cross_entropy import CrossEntropy

    x, labels = normal(4, 2048), torch.tensor([3, 2047, 0, 99])
    loss, lse = torch.zeros(4), torch.zeros(4)
    run = CrossEntropy.compile(BFloat16, Int64, None, 2048, True, False, None, 1)
    run(x, labels, None, loss, lse, None, None, -100)
    exact = torch.nn.functional.cross_entropy(x.double(), labels, reduction="none")
    return [(loss.bfloat16(), exact), (lse.bfloat16(), torch.logsumexp(x.double(), -1))]


@case()
def topk(device: Any, target: str) -> list:
    import torch
    from cutlass import BFloat16
    from quack.topk import TopK

    x = torch.randperm(256).repeat(16, 2).bfloat16() / 64
    values, indices = torch.zeros(16, 16).bfloat16(), torch.zeros(16, 16, dtype=torch.int32)
    TopK.compile(BFloat16, 512, 16, False)(x, values, indices)
    return [(values, torch.topk(x.double(), 16).values), (x.gather(1, indices.long()), values.double())]


def gemm(
    device: Any,
    target: str,
    shape: tuple[int, int, int],
    tile: tuple[int, int],
    cluster: tuple[int, int] = (1, 1),
    majors: str = "kkn",
    pingpong: bool = False,
    dynamic: bool = False,
    dtype: Any = None,
    addend: bool = False,
) -> list:
    """D = A B^T (+ C), A [M, K], B [N, K]; majors: of A, B and D."""
    import quack.gemm as module
    import torch
    from cutlass import BFloat16
    from quack.gemm_tvm_ffi_utils import make_scheduler_args

    capacity = {"sm_90a": (9, 0), "sm_100a": (10, 0)}[target]
    kind = dtype or BFloat16
    run = module._compile_gemm(
        *(kind, kind, BFloat16, BFloat16 if addend else None, *majors, "n" if addend else None),
        *(tile, (*cluster, 1), pingpong, True, dynamic, None, None, 0, 0, 0, False, None),
        *(False, False, False, False, False, capacity, 0, 0, None),
    )
    m, n, k = shape
    storage = {"Float16": torch.float16, "TFloat32": torch.float32, "Float32": torch.float32}
    element = storage.get(kind.__name__, torch.bfloat16)

    def matrix(rows: int, columns: int, contiguous: bool) -> Any:
        out = normal(1, rows, columns, dtype=element)
        return out if contiguous else out.transpose(1, 2).contiguous().transpose(1, 2)

    a, b = matrix(m, k, majors[0] == "k"), matrix(n, k, majors[1] == "k")
    c = normal(1, m, n) if addend else None
    d = torch.zeros(1, m, n).bfloat16()
    d = d if majors[2] == "n" else d.transpose(1, 2).contiguous().transpose(1, 2)
    arguments = {"sm_90a": module.GemmDefaultSm90, "sm_100a": module.GemmDefaultSm100}[
        target
    ].EpilogueArguments
    epilogue = arguments(
        alpha=None,
        beta=None,
        mRowVecBroadcast=None,
        mColVecBroadcast=None,
        add_to_output=None,
        rounding_mode=None,
    )
    semaphore = torch.zeros(1, dtype=torch.int32) if dynamic and target == "sm_90a" else None
    if semaphore is not None:
        device.register(semaphore, "semaphore")  # goes by its address
    run(a, b, d, c, epilogue, make_scheduler_args(4, 8, semaphore), None, None, None)
    exact = a.double() @ b.double().transpose(1, 2)
    return [(d, exact + c.double() if c is not None else exact)]


@case("sm_90a")
def gemm_wgmma(device: Any, target: str) -> list:
    """Edges in M, N and K, which the copies fill and clip."""
    return gemm(device, target, (200, 136, 104), (128, 128))


@case("sm_90a")
def gemm_wgmma_multicast(device: Any, target: str) -> list:
    return gemm(device, target, (256, 256, 128), (128, 128), (2, 1))


@case("sm_90a")
def gemm_wgmma_mn_major(device: Any, target: str) -> list:
    """Both operands with M and N contiguous: transposed descriptors."""
    return gemm(device, target, (128, 128, 128), (128, 128), majors="mnn")


@case("sm_90a")
def gemm_wgmma_pingpong(device: Any, target: str) -> list:
    return gemm(device, target, (256, 128, 128), (64, 128), pingpong=True)


@case("sm_90a")
def gemm_wgmma_wide(device: Any, target: str) -> list:
    """N = 256 tiles, fp16, and an addend."""
    from cutlass import Float16

    return gemm(device, target, (128, 256, 64), (128, 256), (1, 2), dtype=Float16, addend=True)


@case("sm_100a")
def gemm_tcgen05(device: Any, target: str) -> list:
    """Edges in M, N and K, which the copies fill and clip."""
    return gemm(device, target, (200, 136, 104), (128, 128))


@case("sm_100a")
def gemm_tcgen05_pair(device: Any, target: str) -> list:
    """cta_group::2: two CTAs, one MMA of 256 rows."""
    return gemm(device, target, (256, 256, 128), (256, 128), (2, 1))


@case("sm_100a")
def gemm_tcgen05_multicast(device: Any, target: str) -> list:
    return gemm(device, target, (256, 256, 128), (128, 128), (2, 1))


@case("sm_100a")
def gemm_tcgen05_mn_major(device: Any, target: str) -> list:
    return gemm(device, target, (128, 128, 128), (128, 128), majors="mnn")


@case("sm_100a")
def gemm_tcgen05_addend(device: Any, target: str) -> list:
    """fp16 operands, and an addend."""
    from cutlass import Float16

    return gemm(device, target, (128, 192, 64), (128, 64), dtype=Float16, addend=True)


@case("sm_100a")
def gemm_tcgen05_dynamic(device: Any, target: str) -> list:
    """Tiles handed out by cluster launch control."""
    return gemm(device, target, (256, 256, 64), (128, 128), dynamic=True)


@case("sm_90a")
def gemm_wgmma_dynamic(device: Any, target: str) -> list:
    """Tiles handed out by a counter."""
    return gemm(device, target, (256, 256, 64), (128, 128), dynamic=True)


def distance(result: Any, exact: Any) -> float:
    """The largest error over what it may be: half a unit in the last place of bf16 at the exact value, plus
    fp32's own error of a sum, 2^-16 of the largest magnitude."""
    import torch

    exact = exact.double()
    ulp = torch.exp2(torch.floor(torch.log2(exact.abs().clamp_min(2.0**-126))) - 7)
    allowed = ulp / 2 + exact.abs().max() * 2.0**-16
    worst = ((result.double() - exact).abs() / allowed).max().item()
    return worst if torch.isfinite(result.float()).all() else float("inf")


def run_case(name: str, target: str) -> dict[str, Any]:
    """One case on a fresh emulated device."""
    import torch

    import emulator

    torch.manual_seed(len(name))
    with emulator.device(target, on_finding="keep", brief=True) as device:  # built in a hurry: each runs once
        try:
            found = CASES[name](device, target)
        except Exception as error:
            text = "".join(traceback.format_exception_only(error)).strip()
            return {"case": name, "target": target, "error": text[:2000]}
        worst = max(distance(result, exact) for result, exact in found)
        return {
            "case": name,
            "target": target,
            "distance": round(worst, 4),
            "findings": [str(f) for f in device.findings][:5],
        }


def main(target: str, names: list[str]) -> None:
    """Runs kernels of the published wheel in the emulator, prints how far they are from torch."""
    os.environ.update(QUACK_ARCH=target, CUTE_DSL_ARCH=target, QUACK_CACHE_ENABLED="0")
    import_quack()
    for name in names or [n for n in CASES if target in TARGETS[n]]:
        print(json.dumps(run_case(name, target)), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.emulator.published", description=main.__doc__)
    parser.add_argument("target", choices=sorted({t for of in TARGETS.values() for t in of}))
    parser.add_argument("case", nargs="*", help="of the target's, by default all")
    options = parser.parse_args()
    if unknown := [n for n in options.case if options.target not in TARGETS.get(n, ())]:
        known = ", ".join(n for n in CASES if options.target in TARGETS[n])
        parser.error(f"case: got {', '.join(unknown)}, allowed {known}")
    main(options.target, options.case)
