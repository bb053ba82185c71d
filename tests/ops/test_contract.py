"""Every case of the table on every backend: results against the exact ones, and what a call must leave
alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import bindings
from bindings.registry import IMPLEMENTATIONS, Kernel
from tests.cases import Case, cases, named
from tests.harness import IN_PLACE, Backend, Placement, assert_same_bits, call, judge


def table(*ops: str, **attributes: object) -> list[object]:
    return [
        pytest.param(case, id=case.id, marks=[pytest.mark.sanitizer] if case.sanitizer else [])
        for case in cases(*ops, **attributes)
    ]


def skip_unguarded(case: Case, backend: Backend) -> bool:
    return backend.name == "cute" and not case.kernel


def by_kernel(case: Case, backend: Backend, placed: Placement) -> bool:
    """Whether a compiled kernel serves the case, and not library calls."""
    with bindings.backend(backend.name):
        served_by = bindings.explain(case.op, **placed.arguments).implementation
    return served_by in {k.name for k in IMPLEMENTATIONS[case.op] if isinstance(k, Kernel)}


@pytest.mark.parametrize("case", table())
def test_results(case: Case, backend: Backend) -> None:
    """Within tolerance of the exact result, from outputs full of NaN; only results are written; and the same
    bits when called again in the functional form, on tensors that are only as aligned as they must be."""
    inputs = case.inputs()
    placed = Placement(case.op, inputs, backend.device)
    outs = placed.outputs()
    if skip_unguarded(case, backend):
        with pytest.raises(bindings.BackendUnavailable):
            call(case.op, placed.arguments, backend, outs)
        placed.check()
        assert all(out.isnan().all() for out in outs.values())
        return
    results = call(case.op, placed.arguments, backend, outs)
    placed.check()
    judge(case.op, inputs, results)

    # A BLAS chooses its kernel, and with it the order of its sums, by alignment too.
    blas = case.op == "hc_mix" and backend.device != "cpu" and not by_kernel(case, backend, placed)
    again = Placement(case.op, inputs, backend.device, shifted=not blas)
    repeated = call(case.op, again.arguments, backend)
    again.check()
    for first, second in zip(results, repeated, strict=True):
        assert_same_bits(first, second, "second run")


@pytest.mark.parametrize("case", table("hc_apply_norm"))
def test_fused_is_unfused(case: Case, backend: Backend) -> None:
    """hc_apply_norm is hc_apply and grouped_gemma_rmsnorm, bit for bit."""
    for shifted in (False, True):
        arguments = Placement(case.op, case.inputs(), backend.device, shifted).arguments
        combined, normed = call(case.op, arguments, backend)
        boundary = {name: arguments[name] for name in ("block", "residual", "partials")}
        (applied,) = call("hc_apply", boundary, backend)
        norm = {
            "x": applied,
            "weight": arguments["norm_weight"],
            "eps": arguments["eps"],
            "group_size": arguments["block"].shape[1],
        }
        (alone,) = call("grouped_gemma_rmsnorm", norm, backend)
        assert_same_bits(combined, applied, "combined")
        assert_same_bits(normed, alone, "normed")


@pytest.mark.parametrize("case", table("hc_boundary"))
def test_boundary_is_unfused(case: Case, backend: Backend) -> None:
    """hc_boundary is hc_apply_norm and hc_gate, bit for bit."""
    for shifted in (False, True):
        arguments = Placement(case.op, case.inputs(), backend.device, shifted).arguments
        combined, normed, partials = call(case.op, arguments, backend)
        inject_weight = arguments.pop("inject_weight")
        alone = call("hc_apply_norm", arguments, backend)
        (gate,) = call("hc_gate", {"normed": alone[1], "inject_weight": inject_weight}, backend)
        assert_same_bits(combined, alone[0], "combined")
        assert_same_bits(normed, alone[1], "normed")
        assert_same_bits(partials, gate, "partials")


def in_place() -> list[object]:
    """The cases with an input whose memory an output may be: not moe_finalize without a shared expert."""
    return [p for op in IN_PLACE for p in table(op) if "experts=alone" not in str(p.id)]


@pytest.mark.parametrize("case", in_place())
def test_in_place(case: Case, backend: Backend) -> None:
    """Where an output may be an input's memory, the result is the same, and only that input changes."""
    written, overwritten = IN_PLACE[case.op]
    inputs = case.inputs()
    expected = call(case.op, Placement(case.op, inputs, backend.device).arguments, backend)
    placed = Placement(case.op, inputs, backend.device)
    outs = placed.outputs()
    outs[written] = placed.arguments[overwritten]
    placed.written.add(overwritten)
    results = call(case.op, placed.arguments, backend, outs)
    placed.check()
    for first, second in zip(expected, results, strict=True):
        assert_same_bits(first, second, "in place")


def _take(x: Tensor, rows: Tensor) -> Tensor:
    return x.index_select(0, rows.to(x.device))


@pytest.mark.parametrize(
    "op",
    [
        "grouped_gemma_rmsnorm",
        "hc_gate",
        "hc_apply",
        "hc_apply_norm",
        "hc_boundary",
        "shared_gate",
        "gdn_packed_decode",
    ],
)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_row_does_not_depend_on_the_others(op: str, dtype: str, backend: Backend) -> None:
    """Permuting the rows permutes the results, and a row alone gives its result in the batch: bit for bit."""
    inputs = named(op, f"T33-{dtype}-small").inputs()
    by_row = {
        name
        for name, value in inputs.items()
        if isinstance(value, Tensor) and value.shape[:1] == (33,)
    }  # fmt: skip
    whole = call(op, Placement(op, inputs, backend.device).arguments, backend)
    order = torch.randperm(33, generator=torch.Generator().manual_seed(1))
    for rows in (order, order[:1], order[:3]):
        picked = {name: _take(value, rows) if name in by_row else value for name, value in inputs.items()}
        part = call(op, Placement(op, picked, backend.device).arguments, backend)
        for all_rows, some in zip(whole[: len(part) - (op == "gdn_packed_decode")], part, strict=False):
            assert_same_bits(_take(all_rows, rows), some, f"rows {rows.tolist()[:3]}")
