"""The checks that stand before every timing: they pass what is right and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import bindings
from profiling import cases, ours
from profiling.cases import CASES, Case

CPU = torch.device("cpu")
OPS = list(CASES)


def run(case: Case) -> dict[str, Tensor]:
    with bindings.backend("reference"):
        return dict(cases.call_results(case, ours.graph_call(case)()))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("op", OPS)
def test_right_results_pass(op: str, rows: int) -> None:
    check = cases.make(op, rows, CPU)
    results = run(check)
    assert tuple(results) == cases.result_names(op)
    verdict = check.check(results)
    assert verdict.ok, verdict.detail
    assert 0 <= verdict.worst <= 1


def spoilt(result: Tensor, at: int) -> Tensor:
    """`result` with one element of row `at` off by more than any tolerance of its dtype."""
    wrong = result.clone()
    element = wrong[at].flatten()[0]
    flat = wrong[at].view(-1)
    flat[0] = element + 128 * torch.finfo(result.dtype).eps * result.abs().max()
    return wrong


@pytest.mark.parametrize(("op", "name"), [(op, name) for op in OPS for name in cases.result_names(op)])
def test_a_wrong_element_fails(op: str, name: str) -> None:
    case = cases.make(op, 2, CPU)
    results = run(case)
    at = int(case.args["state_indices"][1]) if name.endswith(".state") else 1
    verdict = case.check({**results, name: spoilt(results[name], at)})
    assert not verdict.ok
    assert name in verdict.detail


@pytest.mark.parametrize("op", OPS)
def test_unwritten_and_missing_results_fail(op: str) -> None:
    case = cases.make(op, 2, CPU)
    results = run(case)
    name = next(iter(results))
    holed = results[name].clone()
    holed.view(-1)[-1] = float("nan")
    assert not case.check({**results, name: holed}).ok
    rest = {other: value for other, value in results.items() if other != name}
    if not name.endswith(".combined"):  # what its norm is judged by
        assert not case.check(rest).ok
    assert "no exact result" in case.check({**results, "other": results[name]}).detail


def test_every_row_must_be_finite_also_those_not_compared() -> None:
    case = cases.make("shared_gate", 9, CPU)
    assert case.checked_rows() == [0, 3, 5, 8]
    results = run(case)
    results["shared_gate"][1] = float("nan")
    assert "not finite" in case.check(results).detail


def test_allowance_widens_the_tolerance() -> None:
    case = cases.make("grouped_gemma_rmsnorm", 1, CPU)
    results = run(case)
    worst = case.check(results).worst
    name = "grouped_gemma_rmsnorm"
    x = results[name].clone()
    x[0, 7] = x[0, 7] * (1 + 2**-7)  # the next bf16 value but one at most
    off = case.check({name: x})
    assert worst < 1 < off.worst < 4
    assert not off.ok
    assert case.check({name: x}, allowance=4.0).ok


@pytest.mark.parametrize("shape", ["partials", "logits"])
def test_gate_by_the_sum_over_other_splits(shape: str) -> None:
    case = cases.make("hc_gate", 2, CPU)
    partials = run(case)["hc_gate"]
    other = partials.flip(1) if shape == "partials" else partials.sum(1)
    assert case.check({"hc_gate.sum": other}).ok
    assert not case.check({"hc_gate.sum": other * 1.001}).ok
    if shape == "partials":
        assert not case.check({"hc_gate": other}).ok, "the contract's own splits are compared one by one"


def test_poison_and_reset() -> None:
    case = cases.make("gdn_packed_decode", 2, CPU)
    initial = case.args["state"].clone()
    first = {name: value.clone() for name, value in run(case).items()}
    assert not torch.equal(case.args["state"], initial)
    again = run(case)
    assert not case.check(again).ok, "a second update is another result"
    case.poison(again)
    assert again["gdn_packed_decode"].isnan().all()
    assert torch.equal(case.args["state"], initial)
    repeated = run(case)
    assert all(torch.equal(repeated[name], first[name]) for name in first)


@pytest.mark.parametrize(
    ("op", "rows", "count"),
    [
        ("hc_gate", 1, 2 * 10240 * 5 + 4 * 32),
        ("hc_apply_norm", 2, 2 * 2 * 2560 + 3 * 2 * 2 * 10240 + 2 * 4 * 32 + 2 * 10240),
        ("shared_gate", 1, 2 * 2 * 2560 + 4),
        ("gdn_packed_decode", 64, 2 * 64 * 12 * 128 * 128 * 4 + 64 * (2 * (2560 + 24 + 1536) + 4) + 96),
        ("moe_finalize", 1, 10 * (2 * 2560 + 8) + 4 * 2560 + 4),
    ],
)
def test_bytes(op: str, rows: int, count: int) -> None:
    assert cases.make(op, rows, CPU).bytes == count


def test_inputs_are_seeded() -> None:
    one, two = (cases.make("hc_gate", 2, CPU) for _ in range(2))
    assert all(torch.equal(one.args[name], two.args[name]) for name in one.args)
    with pytest.raises(ValueError, match="rows: got 0"):
        cases.make("hc_gate", 0, CPU)


def test_a_state_keeps_its_magnitude() -> None:
    """Hundreds of updates, as a timing makes, leave numbers of the size that they began with."""
    case = cases.make("gdn_packed_decode", 1, CPU)
    before = case.args["state"].std()
    for _ in range(100):
        run(case)
    assert 0.01 < case.args["state"][case.args["state_indices"].long()].std() / before < 100


@pytest.mark.parametrize("op", [op for op in OPS if op != "hc_gate_apply_norm"])
def test_eager_calls_agree(op: str) -> None:
    """Every form of the eager call computes the same."""
    case = cases.make(op, 2, CPU)
    with bindings.backend("reference"):
        want = run(case)
        forms = ours.eager_calls(case)
        assert list(forms) == ["ops", "ops, out=", "torch.ops", "torch.ops .out"]
        for name, call in forms.items():
            case.poison(want)
            returned = call()
            if name == "torch.ops .out":
                assert returned is None
                returned = tuple(case.outs.values()) if len(case.outs) > 1 else case.outs["out"]
            check = case.check(cases.call_results(case, returned))
            assert check.ok, f"{name}: {check.detail}"
