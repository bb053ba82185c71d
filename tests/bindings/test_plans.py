"""Plans: what a repeated call skips, and what it must not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from bindings import dispatch, ops, plans
from bindings.checks import Output
from bindings.registry import IMPLEMENTATIONS, OPS
from tests.bindings.calls import KERNELS, SMALL, Call, Jit, aligned_at, make, outs_of, run

CHANGES: dict[str, Callable[[Call], Call]] = {
    "rows": lambda call: make("grouped_gemma_rmsnorm", 4),
    "dtype": lambda call: make("grouped_gemma_rmsnorm", config=replace(SMALL, dtype=torch.float16)),
    "width": lambda call: make("grouped_gemma_rmsnorm", config=replace(SMALL, streams=2)),
    "eps": lambda call: call | {"eps": 1e-5},
    "group_size": lambda call: call | {"group_size": 32},
    "alignment": lambda call: call | {"x": aligned_at(call["x"], 16)},
    "parameter": lambda call: call | {"weight": torch.nn.Parameter(call["weight"])},
}


@pytest.mark.parametrize("matcher", ["native_matcher", "python_matcher"])
@pytest.mark.parametrize("change", CHANGES)
def test_plans_hold_what_they_were_made_for(
    change: str, matcher: str, compiled: Jit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same call again resolves nothing; a call that differs in anything that matters does, and both stay
    known."""
    monkeypatch.setattr(plans, "matcher", getattr(plans, matcher))
    call = make("grouped_gemma_rmsnorm")
    call["x"] = aligned_at(call["x"], 0)
    changed = CHANGES[change](call)
    for arguments, resolved in ((call, 1), (call, 1), (changed, 2), (changed, 2), (call, 2), (changed, 2)):
        ops.grouped_gemma_rmsnorm(**arguments)
        assert len(compiled.requested) == resolved
    assert compiled.launches == 6


def test_other_memory_of_the_same_shape_needs_no_new_plan(compiled: Jit) -> None:
    for _ in range(3):
        call = make("hc_apply_norm")
        ops.hc_apply_norm(**call, **outs_of("hc_apply_norm", call))
    assert len(compiled.requested) == 1


@pytest.mark.parametrize(("op", "out", "into"), [(op, *pair) for op in OPS for pair in OPS[op].in_place])
@pytest.mark.parametrize("matcher", ["native_matcher", "python_matcher"])
def test_update_in_place_has_a_plan(
    op: str, out: str, into: str, matcher: str, compiled: Jit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passing one tensor twice may take a plan of its own, but no more than one; nor does other tensor object
    for the same memory."""
    monkeypatch.setattr(plans, "matcher", getattr(plans, matcher))
    for kind in ("apart", "same", "same", "apart", "view", "same", "view"):
        call = make(op)
        outs = outs_of(op, call)
        if kind != "apart":
            outs[out] = call[into] if kind == "same" else call[into].view_as(call[into])
        run(op, call, **outs)
        assert compiled.last.calls[-1][len(OPS[op].inputs)].data_ptr() == outs[OPS[op].outs[0]].data_ptr()
    assert len(compiled.requested) <= 2


def test_plans_hold_no_memory() -> None:
    """What outputs are modelled on has their shape, dtype and device, and no storage."""
    template = dispatch._template(Output("out", (1000, 1000), torch.float16), torch.device("cpu"))
    assert template.untyped_storage().nbytes() == 0
    fresh = torch.empty_like(template)
    assert (fresh.shape, fresh.stride(), fresh.dtype) == ((1000, 1000), (1000, 1), torch.float16)
    assert fresh.untyped_storage().nbytes() == 2_000_000


def test_native_matcher_is_in_use() -> None:
    """This torch has the check that the fast path rests on. Where it has not, `python_matcher` serves, at a
    higher cost."""
    assert plans.matcher is plans.native_matcher


def test_matcher_is_checked_before_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch whose check is gone, fails or tells nothing apart gets the portable one."""

    def gone(tensors: Any) -> Any:
        raise AttributeError

    for broken in (gone, lambda tensors: lambda *t: True, lambda tensors: lambda *t: False):
        monkeypatch.setattr(plans, "native_matcher", broken)
        assert plans._choose_matcher() is plans.python_matcher


@pytest.mark.parametrize("matcher", [plans.native_matcher, plans.python_matcher])
def test_matcher_of_repeated_tensors(matcher: Callable[..., Callable[..., bool]]) -> None:
    a, b = torch.zeros(2, 8), torch.zeros(4)
    for pattern in ((0, 1, 0), (0, 0, 1), (1, 0, 0), (0, 0, 0), (0, 1, 0, 1, 1)):
        matches = matcher([(a, b)[i] for i in pattern])
        one, two = torch.zeros(2, 8), torch.zeros(4)
        assert matches(*[(one, two)[i] for i in pattern])
        for wrong in range(len(pattern)):
            values = [(one, two)[i] for i in pattern]
            values[wrong] = torch.zeros(3)
            assert not matches(*values)


@pytest.mark.parametrize("matcher", [plans.native_matcher, plans.python_matcher])
def test_matcher(matcher: Callable[..., Callable[..., bool]]) -> None:
    a, b = torch.zeros(2, 8), torch.zeros(4, dtype=torch.bfloat16)
    matches = matcher((a, b))
    assert matches(a, b)
    assert matches(torch.ones(2, 8), b.clone())
    for other in (
        torch.zeros(3, 8),
        torch.zeros(2, 8, 1),
        torch.zeros(2, 8, dtype=torch.float16),
        torch.zeros(8, 2).t(),
        torch.zeros(2, 16)[:, ::2],
        torch.zeros(2, 8, device="meta"),
        torch.zeros(2, 8, requires_grad=True),
        torch.zeros(2, 8).to_sparse(),
        torch.nn.Parameter(a),
        torch._neg_view(torch.zeros(2, 8)),
        torch._efficientzerotensor((2, 8)),
        torch.zeros(2, 8, dtype=torch.complex64).conj(),
        a.tolist(),
        None,
    ):
        assert not matches(other, b)
        assert not matches(b, other)


@pytest.mark.parametrize("matcher", [plans.native_matcher, plans.python_matcher])
def test_matcher_of_inference_tensors(matcher: Callable[..., Callable[..., bool]]) -> None:
    """Never taken for others, in either mode: what a plan does about version counters depends on it."""
    plain = torch.zeros(2, 8)
    with torch.inference_mode():
        inference = torch.zeros(2, 8)
    for mode in (False, True):
        with torch.inference_mode(mode):
            assert matcher((plain,))(plain)
            assert matcher((inference,))(inference)
            assert not matcher((plain,))(inference)
            assert not matcher((inference,))(plain)


def test_plans_are_bounded(compiled: Jit) -> None:
    """However many shapes and addresses a process sees; the plan in use survives."""
    weight = make("shared_gate")["weight"]
    steady = torch.zeros(1, 64, dtype=torch.bfloat16)
    for rows in range(2, plans.PLANS + 10):
        ops.shared_gate(torch.zeros(rows, 64, dtype=torch.bfloat16), weight)
        ops.shared_gate(steady, weight)
    assert len(compiled.requested) == plans.PLANS + 9
    assert max(len(cache.plans) for cache in dispatch._caches) == plans.PLANS
    buffer = torch.zeros(2 * plans.ADDRESSES, 64, dtype=torch.bfloat16)
    most = 0
    for row in range(2 * plans.ADDRESSES):
        ops.shared_gate(buffer[row : row + 1], weight)
        most = max(most, *(len(plan.vetted) for cache in dispatch._caches for plan in cache.plans))
    assert most == plans.ADDRESSES
    assert len(compiled.requested) == plans.PLANS + 9


def test_threads_at_the_first_call(compiled: Jit) -> None:
    """Many threads, every operator, all at once: each call reaches its kernel with its own tensors."""
    count = 8
    barrier = threading.Barrier(count)
    failures: list[BaseException] = []
    launched: list[dict[str, Call]] = [{op: make(op) for op in KERNELS} for _ in range(count)]

    def work(calls: dict[str, Call]) -> None:
        try:
            barrier.wait(30)
            for _ in range(20):
                for op, call in calls.items():
                    run(op, call)
        except BaseException as error:  # re-raised by the test's thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(calls,)) for calls in launched]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert compiled.launches == count * 20 * len(KERNELS)
    for op in KERNELS:
        kernels = {id(c): c for c in compiled.requested if c.module == IMPLEMENTATIONS[op][0].name}
        (kernel,) = kernels.values()
        firsts = [args[0].data_ptr() for args in kernel.calls]
        for calls in launched:
            assert firsts.count(calls[op][OPS[op].inputs[0]].data_ptr()) == 20
