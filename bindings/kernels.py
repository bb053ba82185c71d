"""Every implementation: which operator it serves, by which device module, when, and how it is specialised.

A kernel is one entry of the table. `params` are the constexpr parameters that its `build` takes, apart from
`vec_bytes`, which follows from the alignment of the tensors in `vectors`. Entries of one operator are tried
in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bindings import contracts as contracts  # declares the operators that implementations are registered for
from bindings import gemm_mix, mix, targets, two_launch_boundary
from bindings.registry import (
    DTYPE_NAMES,
    IMPLEMENTATIONS,
    Call,
    Composite,
    Guard,
    Implementation,
    Kernel,
    ModelConfig,
    register,
)
from collectives.launch import Form
from collectives.launch import variants as collective_variants
from cute_kernels.gdn.config import VALUE_TILES, value_tile_for

MAX_STREAMS = 8
MAX_SPAN = 16384  # elements that one CTA holds in registers
MAX_ROW = 65536  # elements of a row that several CTAs share
BOUNDARY_SPAN, BOUNDARY_ROW = 4096, 16384  # one vector a thread, of the stream and of a gate's split
MAX_TOP_K = 32
HEAD_DIMS = (64, 128)
MAX_GRID = 2**31 - 1


def activations(name: str) -> Guard:
    """The activation dtype is one that kernels are written for."""
    return Guard(
        f"dtype of {name} is bf16 or fp16",
        lambda c: c.dtype(name) in ("bf16", "fp16"),
        lambda c: c.dtype(name),
    )


def dtype_is(name: str, dtype: str) -> Guard:
    """A dtype is the one that the kernel is written for."""
    return Guard(f"dtype of {name} is {dtype}", lambda c: c.dtype(name) == dtype, lambda c: c.dtype(name))


def multiple(symbol: str, of: int) -> Guard:
    """An extent is a multiple of a number."""
    return Guard(f"{symbol} is a multiple of {of}", lambda c: c[symbol] % of == 0, lambda c: c[symbol])


def at_most(symbol: str, limit: int) -> Guard:
    """An extent is bounded."""
    return Guard(f"{symbol} is at most {limit}", lambda c: c[symbol] <= limit, lambda c: c[symbol])


def outer_stride(name: str) -> Guard:
    """Rows (slots) start at multiples of 16 bytes, so that vectors can be loaded from each."""

    def stride_bytes(call: Call) -> int:
        t = call.tensors[name]
        return t.stride(0) * t.element_size() if t.shape[0] > 1 else 0

    return Guard(
        f"outer stride of {name} is a multiple of 16 bytes", lambda c: stride_bytes(c) % 16 == 0, stride_bytes
    )


TABLE: tuple[Implementation, ...] = (
    Kernel(
        op="grouped_gemma_rmsnorm",
        module="cute_kernels.hyper.norm",
        params=lambda c: {"dtype": c.dtype("x"), "width": c["W"], "group_size": c["G"]},
        vectors=("x", "weight", "out"),
        guards=(
            activations("x"),
            multiple("G", 8),
            at_most("G", MAX_SPAN),
            Guard(
                "a row has at most 65535 groups",
                lambda c: c["W"] // c["G"] <= 65535,
                lambda c: c["W"] // c["G"],
            ),
        ),
    ),
    Kernel(
        op="hc_gate",
        module="cute_kernels.hyper.gate",
        params=lambda c: {"dtype": c.dtype("normed"), "width": c["W"], "streams": c["C"]},
        vectors=("normed", "inject_weight"),
        guards=(activations("normed"), multiple("W", 64), at_most("W", MAX_ROW), at_most("C", MAX_STREAMS)),
    ),
    Kernel(
        op="hc_apply",
        module="cute_kernels.hyper.apply",
        params=lambda c: {"dtype": c.dtype("block"), "hidden": c["H"], "streams": c["C"]},
        vectors=("block", "residual", "out"),
        guards=(activations("block"), multiple("H", 8), at_most("H", MAX_SPAN), at_most("C", MAX_STREAMS)),
    ),
    Kernel(
        op="hc_apply_norm",
        module="cute_kernels.hyper.apply_norm",
        params=lambda c: {"dtype": c.dtype("block"), "hidden": c["H"], "streams": c["C"]},
        vectors=("block", "residual", "norm_weight", "combined_out", "normed_out"),
        guards=(activations("block"), multiple("H", 8), at_most("H", MAX_SPAN), at_most("C", MAX_STREAMS)),
    ),
    Kernel(
        op="hc_boundary",
        module="cute_kernels.hyper.boundary",
        params=lambda c: {"dtype": c.dtype("block"), "hidden": c["H"], "streams": c["C"]},
        vectors=("block", "residual", "norm_weight", "inject_weight", "combined_out", "normed_out"),
        guards=(
            activations("block"),
            multiple("H", 8),
            Guard("C divides 8", lambda c: 8 % c["C"] == 0, lambda c: c["C"]),
            at_most("H", BOUNDARY_SPAN),
            at_most("W", BOUNDARY_ROW),
        ),
    ),
    Composite(
        op="hc_boundary",
        path="apply_norm, then gate",
        run=two_launch_boundary.hc_boundary,
        guards=(
            activations("block"),
            multiple("H", 8),
            multiple("W", 64),
            at_most("H", MAX_SPAN),
            at_most("W", MAX_ROW),
            at_most("C", MAX_STREAMS),
        ),
    ),
    mix.MixKernel(
        op="hc_mix",
        module="cute_kernels.hyper.mix",
        params=mix.params,
        vectors=(),
        guards=(activations("normed"), *mix.SHAPE_GUARDS, *mix.RESIDENCE_GUARDS),
    ),
    mix.MixKernel(
        op="hc_mix",
        module="cute_kernels.hyper.mix",
        params=mix.params,
        vectors=(),
        guards=(activations("normed"), *mix.SHAPE_GUARDS, mix.CLUSTER_GUARD),
        launch="split",
    ),
    Composite(op="hc_mix", path="gemm", run=gemm_mix.hc_mix, guards=(activations("normed"),)),
    Kernel(
        op="shared_gate",
        module="cute_kernels.moe.shared_gate",
        params=lambda c: {"dtype": c.dtype("x"), "hidden": c["H"]},
        vectors=("x", "weight"),
        guards=(activations("x"), multiple("H", 8), at_most("H", MAX_SPAN)),
    ),
    Kernel(
        op="moe_finalize",
        module="cute_kernels.moe.finalize",
        params=lambda c: {
            "hidden": c["H"],
            "top_k": c["K"],
            "weight_dtype": c.dtype("expert_weights"),
            "shared": c.has("shared_out"),
            "gated": c.has("shared_gate"),
        },
        vectors=("expert_out", "shared_out", "out"),
        guards=(
            dtype_is("expert_out", "bf16"),
            multiple("H", 8),
            at_most("H", MAX_ROW),
            at_most("K", MAX_TOP_K),
        ),
    ),
    Kernel(
        op="gdn_packed_decode",
        module="cute_kernels.gdn.packed_decode",
        params=lambda c: {
            "dtype": c.dtype("mixed_qkv"),
            "state_dtype": c.dtype("state"),
            "bias_dtype": c.dtype("dt_bias"),
            "index_dtype": c.dtype("state_indices"),
            "key_heads": c["Hk"],
            "value_heads": c["Hv"],
            "head_dim": c["D"],
            "value_tile": value_tile_for(c["B"], c["Hv"]),
        },
        vectors=("mixed_qkv", "state"),
        tuning={"value_tile": VALUE_TILES},
        guards=(
            activations("mixed_qkv"),
            Guard("D is 64 or 128", lambda c: c["D"] in HEAD_DIMS, lambda c: c["D"]),
            Guard(
                "Hv is a multiple of Hk",
                lambda c: c["Hv"] % c["Hk"] == 0,
                lambda c: f"Hv = {c['Hv']}, Hk = {c['Hk']}",
            ),
            outer_stride("mixed_qkv"),
            outer_stride("state"),
            Guard(
                f"B*Hv*D / {min(VALUE_TILES)} CTAs fit a grid",
                lambda c: c["B"] * c["Hv"] * c["D"] // min(VALUE_TILES) <= MAX_GRID,
                lambda c: c["B"] * c["Hv"] * c["D"] // min(VALUE_TILES),
            ),
        ),
    ),
)

for _implementation in TABLE:
    register(_implementation)


def precompile_configs(
    target: str, model: ModelConfig | None = None, *, sample: bool = False
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(operator, device module, constexpr parameters) of all that an ahead-of-time build for `target` holds.

    A model's shapes (by default the default model's) in every dtype combination of the contract, with every
    tuning value, and the 16-byte variants that a target with wider vectors falls back to; and the kernels of
    the collectives for every number of ranks. sample: the last two for the model's own dtypes alone, which is
    every kernel but not every combination."""
    if target not in targets.TARGETS:
        raise ValueError(f"target: got {target!r}, allowed {', '.join(targets.TARGETS)}")
    for op, implementations in IMPLEMENTATIONS.items():
        for implementation in implementations:
            if isinstance(implementation, Kernel):
                for params in implementation.variants(target, model, sample=sample):
                    yield op, implementation.module, params
    model = model or ModelConfig()
    own = Form(DTYPE_NAMES[model.expert_weight_dtype], model.shared)
    yield from collective_variants(target, model.hidden, model.top_k, own, sample=sample)
