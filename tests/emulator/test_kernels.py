"""This project's kernels in the emulator, all checks on: the shared table of cases, reduced here and whole at night."""

from __future__ import annotations

import time

import pytest
import torch

import bindings
from bindings import emulated, explain, ops
from bindings.errors import BackendUnavailable, InvalidArgument
from tests import draw, harness
from tests.cases import CASES, Case, named

CPU = harness.Backend("emulator", "cpu")
TARGETS = ("sm_90a", "sm_100a", "sm_103a")
OPERATORS = tuple(dict.fromkeys(c.op for c in CASES))


def reduced(target: str) -> list[Case]:
    """Three small rows of every operator; on one target also none, and values that are odd."""
    names = {"T3-bf16-small"}
    if target == "sm_100a":
        names |= {"T0-bf16-small", "bf16-nan", "bf16-outliers"}
    return [c for c in CASES if c.name in names and c.kernel]


def check(case: Case, target: str, shifted: bool = False, **options: object) -> None:
    inputs = case.inputs()
    placed = harness.Placement(case.op, inputs, "cpu", shifted)
    outs = placed.outputs()
    with emulated.options(target=target, **options):
        harness.judge(case.op, inputs, harness.call(case.op, placed.arguments, CPU, outs))
    placed.check()


@pytest.mark.parametrize(
    ("target", "case"),
    [pytest.param(t, c, id=f"{t}-{c.id}") for t in TARGETS for c in reduced(t)],
)
def test_a_kernel_meets_its_contract(target: str, case: Case) -> None:
    check(case, target, brief=True)


@pytest.mark.parametrize("schedule", ["random", "adversarial"])
@pytest.mark.parametrize("op", OPERATORS)
def test_other_schedules_give_the_same_results(op: str, schedule: str) -> None:
    check(named(op, "T3-bf16-small"), "sm_100a", schedule=schedule, seed=1, brief=True)


@pytest.mark.parametrize("hidden", [72, 520])
@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_in_place_with_threads_that_own_nothing(target: str, hidden: int) -> None:
    """Each element of an output that may be an input's memory is read by the thread that writes it alone."""
    given = draw.apply_norm(draw.Draw("in place"), 2, torch.bfloat16, hidden, 4)
    weight, eps = given["norm_weight"], given["eps"]
    combined, both, x = (given["residual"].clone() for _ in range(3))
    normed = torch.full_like(x, float("nan"))
    with emulated.options(target=target), bindings.backend("emulator"):
        apart = ops.hc_apply_norm(**given)
        x_normed = ops.grouped_gemma_rmsnorm(x, weight, eps, hidden)
        ops.hc_apply(given["block"], combined, given["partials"], out=combined)
        ops.hc_apply_norm(**{**given, "residual": both}, combined_out=both, normed_out=normed)
        ops.grouped_gemma_rmsnorm(x, weight, eps, hidden, out=x)
    harness.judge("hc_apply_norm", given, apart)
    for found, expected in ((combined, apart[0]), (both, apart[0]), (normed, apart[1]), (x, x_normed)):
        harness.assert_same_bits(found, expected, "in place")


def test_a_subclass_of_tensor_is_a_tensor() -> None:
    given = draw.gate(draw.Draw("subclass"), 1, torch.bfloat16, 64, 4)
    kind = type("Own", (torch.Tensor,), {})
    own = {name: value.as_subclass(kind) for name, value in given.items()}
    with bindings.backend("emulator"):
        harness.assert_same_bits(ops.hc_gate(**own), ops.hc_gate(**given), "partials")


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", OPERATORS)
def test_the_whole_table(target: str, op: str) -> None:
    failed = []
    for case in (c for c in CASES if c.op == op and c.kernel):
        for shifted in (False, True):
            try:
                check(case, target, shifted)
            except BackendUnavailable:  # outside the guards GEMMs serve, or two kernels
                assert op in ("hc_mix", "hc_boundary")
            except Exception as error:
                failed.append(f"{case.id}{' shifted' if shifted else ''}: {error}")
    assert not failed, "\n".join(failed)


def test_the_reduced_table_has_every_operator_on_every_target() -> None:
    for target in TARGETS:
        assert {c.op for c in reduced(target)} == set(OPERATORS)


def test_real_shapes_run_within_their_times() -> None:
    """One token, all checks on, once the kernels are translated; three times what a quiet machine takes."""
    for (op, name), seconds in {
        ("hc_apply_norm", "T1-bf16-model"): 0.5,
        ("gdn_packed_decode", "T1-bf16-model"): 2.0,
        ("hc_mix", "T1-bf16-model"): 20.0,
    }.items():
        case = named(op, name)
        arguments = case.inputs()
        with emulated.options(target="sm_100a"), bindings.backend("emulator"):
            getattr(ops, op)(**arguments)
            start = time.perf_counter()
            getattr(ops, op)(**arguments)
            took = time.perf_counter() - start
            check(case, "sm_100a")
        assert took < seconds, op


def test_the_backend_says_what_it_serves() -> None:
    x, weight = torch.randn(2, 256).bfloat16(), torch.randn(256).bfloat16()
    with bindings.backend("emulator"), emulated.options(target="sm_90a"):
        told = str(explain("shared_gate", x, weight))
        assert "emulator" in told
        with pytest.raises(BackendUnavailable, match="T is at most 32: got 33"):
            ops.hc_mix(
                torch.zeros(33, 256).bfloat16(),
                torch.zeros(32, 256).bfloat16(),
                torch.zeros(256, 32).bfloat16(),
            )


def test_options_are_lists_too() -> None:
    with emulated.options(checks=["race", "bounds"]):
        first = emulated.device()
    with emulated.options(checks=("race", "bounds")):
        assert emulated.device() is first
    assert emulated.device() is not first


def test_an_unknown_target_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHNEXT_TARGET", "sm_80")
    with bindings.backend("emulator"), pytest.raises(InvalidArgument, match="FLASHNEXT_TARGET: got 'sm_80'"):
        ops.shared_gate(torch.zeros(1, 64).bfloat16(), torch.zeros(64).bfloat16())


@pytest.mark.parametrize("target", TARGETS)
def test_weights_are_read_once(target: str) -> None:
    """The counters of hc_mix: every weight byte once, by bytes and by different sectors."""
    arguments = named("hc_mix", "T1-bf16-model").inputs()
    brief = target != "sm_100a"  # which the test before has built
    with emulated.options(target=target, brief=brief), bindings.backend("emulator"):
        ops.hc_mix(**arguments)
        counters = emulated.device().launches[-1]
    for name in ("w_down", "w_up"):
        weight, moved = arguments[name].numel() * 2, counters.tensors[name]
        assert moved.read_bytes == weight
        assert moved.read_sectors * 32 == weight
    weights = sum(arguments[n].numel() * 2 for n in ("w_down", "w_up"))
    assert weights <= counters.tma_load_bytes <= weights + 148 * arguments["normed"].numel() * 2
    assert weights <= counters.unique_load_sectors * 32 <= weights + 2**16
