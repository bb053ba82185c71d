"""The decode path: every guard on both sides, and one result on either path."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from collectives.communicator import Communicator
from collectives.decode_moe import DecodeMoE, DecodeMoEConfig, guards
from collectives.launch import Form
from tests.collectives.virtual import (
    HIDDEN,
    PLACES,
    World,
    draw,
    finalized,
    moe_inputs,
    same_bits,
    world,
)

ELIGIBLE = DecodeMoEConfig(capability=(9, 0))
place = pytest.mark.parametrize("place", PLACES)

# field, values with which the path is taken, values with which it is not
GUARDS: list[tuple[str, list[Any], list[Any]]] = [
    ("hidden", [2560], [2048, 5120]),
    ("experts", [512], [256, 513]),
    ("top_k", [10], [8, 11]),
    ("dtype", [torch.bfloat16], [torch.float16, torch.float32]),
    ("capability", [(9, 0), (10, 0), (10, 3)], [(8, 0), (8, 9), (12, 0), None]),
    ("tensor_parallel", [2, 4, 8], [1, 3, 16]),
    ("expert_parallel", [1], [2, 4]),
    ("attention_data_parallel", [1], [2]),
    ("lora", [False], [True]),
    ("speculative_decoding", [False], [True]),
    ("two_batch_overlap", [False], [True]),
    ("moe_context_parallel_all_gather", [False], [True]),
]


@pytest.mark.parametrize(("name", "good", "bad"), GUARDS, ids=[g[0] for g in GUARDS])
def test_every_guard_on_both_sides(name: str, good: list[Any], bad: list[Any]) -> None:
    cpu = torch.device("cpu")
    for value in good:
        assert all(g.holds for g in guards(replace(ELIGIBLE, **{name: value}), cpu)), value
    for value in bad:
        failed = [g for g in guards(replace(ELIGIBLE, **{name: value}), cpu) if not g.holds]
        assert [g.condition.split()[0] for g in failed] == [name], value
        assert failed[0].got == value


def test_every_field_has_a_guard() -> None:
    assert {f.name for f in fields(DecodeMoEConfig)} - {"max_tokens"} == {name for name, _, _ in GUARDS}
    assert len(guards(ELIGIBLE, torch.device("cpu"))) == len(GUARDS)


def test_the_capability_is_the_devices_unless_it_is_given() -> None:
    comm = world(4, "cpu").ranks[0]
    assert not DecodeMoE(comm, DecodeMoEConfig()).eligible
    assert DecodeMoE(comm, DecodeMoEConfig()).reason == "capability is 9.x or 10.x: got None"
    assert DecodeMoE(comm, ELIGIBLE).eligible


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 2048}, "config.hidden: got 2048, allowed 2560, the communicator's"),
        ({"top_k": 8}, "config.top_k: got 8, allowed 10, the communicator's"),
        ({"tensor_parallel": 2}, "config.tensor_parallel: got 2, allowed 4, the communicator's ranks"),
        ({"max_tokens": 0}, "config.max_tokens: got 0, allowed an integer from 1 to 32"),
        ({"max_tokens": 33}, "config.max_tokens: got 33"),
    ],
)
def test_a_config_that_is_not_the_communicators_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecodeMoE(world(4, "cpu").ranks[0], replace(ELIGIBLE, **change))


def test_what_depends_on_the_call() -> None:
    comm = world(4, "cpu").ranks[0]
    one, several = DecodeMoE(comm, ELIGIBLE), DecodeMoE(comm, replace(ELIGIBLE, max_tokens=8))
    x = torch.zeros(8, HIDDEN, dtype=torch.bfloat16)
    assert one.takes(x[:1]) == several.takes(x[:1]) == several.takes(x) == "fused"
    assert one.takes(x[:2]) == "tokens are 1 to 1: got 2"
    assert several.takes(x[:0]) == "tokens are 1 to 8: got 0"
    assert one.takes(x[:1].half()) == "dtype is torch.bfloat16: got torch.float16"


class Counted:
    """The operators that the general path calls, counted."""

    def __init__(self, comm: Communicator, monkeypatch: pytest.MonkeyPatch):
        self.calls: list[str] = []
        for name in ("all_reduce", "moe_finalize_all_reduce"):
            real = getattr(comm, name)

            def call(*args: Any, name: str = name, real: Any = real, **kwargs: Any) -> Tensor:
                self.calls.append(name)
                return real(*args, **kwargs)

            monkeypatch.setattr(comm, name, call)


@place
@pytest.mark.parametrize("shared", ["gated", "plain", "none"])
@pytest.mark.parametrize("norm", [False, True])
def test_either_path_gives_the_same_bits(
    place: str, shared: str, norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    w, random = world(4, place), torch.Generator().manual_seed(5)
    form = Form("bf16" if shared == "plain" else "fp32", shared)
    gain = draw("normal", (HIDDEN,), random) if norm else None
    gate_weight = draw("normal", (HIDDEN,), random) * 0.02 if shared == "gated" else None
    gain_there, gate_there = w.put([gain, gate_weight])
    options = {"gate_weight": gate_there, "norm_weight": gain_there, "weight_offset": 1.0}
    counted = [Counted(comm, monkeypatch) for comm in w.ranks]
    for rows in (1, 3, 40):  # taken by the path; more than it takes; more than a round takes
        inputs = [moe_inputs(rows, form, random) for _ in range(4)]
        x = w.put([draw("normal", (rows, HIDDEN), random)])[0]
        there = w.put(inputs)

        def call(config: DecodeMoEConfig, x: Tensor = x, there: Any = there) -> list[Tensor]:
            moes = [DecodeMoE(comm, config, **options) for comm in w.ranks]
            branch = [None if t[3] is None else (lambda _, t=t: t[3]) for t in there]
            return w.run(lambda comm: moes[comm.rank](x, lambda _: there[comm.rank][:3], branch[comm.rank]))

        fused, general = call(ELIGIBLE), call(replace(ELIGIBLE, lora=True))
        assert all(same_bits(result, general[0]) for result in (*fused, *general)), rows
        if not norm and shared != "gated":  # else the gate and the norm are compared by their own tests
            assert same_bits(general[0], finalized(inputs))
    first = "moe_finalize_all_reduce"
    assert [c.calls for c in counted] == [[first, *["all_reduce"] * 5]] * 4


@place
@pytest.mark.parametrize("shared", ["gated", "plain", "none"])
def test_fp16_gets_the_general_path(place: str, shared: str) -> None:
    """No operator finalizes fp16: the reference does, and the ranks' own sum the rest."""
    w, random = world(4, place), torch.Generator().manual_seed(6)
    x = w.put([draw("normal", (2, HIDDEN), random).half()])[0]
    gate_weight = w.put([draw("normal", (HIDDEN,), random).half() * 0.02])[0] if shared == "gated" else None
    inputs = [moe_inputs(2, Form("fp32", "none"), random) for _ in range(4)]
    rows = [one[0].half() for one in inputs]
    branch = [draw("normal", (2, HIDDEN), random).half() for _ in range(4)]
    there, rows_there, branch_there = w.put(inputs), w.put(rows), w.put(branch)
    moes = [DecodeMoE(comm, ELIGIBLE, gate_weight=gate_weight) for comm in w.ranks]
    assert moes[0].takes(x[:1]).startswith("dtype")
    results = w.run(
        lambda comm: moes[comm.rank](
            x,
            lambda _: (rows_there[comm.rank], *there[comm.rank][1:3]),
            None if shared == "none" else lambda _: branch_there[comm.rank],
        )
    )
    gate = torch.sigmoid(x.float() @ gate_weight.float()).cpu() if gate_weight is not None else None
    total = torch.zeros(2, HIDDEN, dtype=torch.float64)
    for one, expert_out, extra in zip(inputs, rows, branch, strict=True):
        for t in range(2):
            slots = [int(i) for i in one[1][t * 10 : t * 10 + 10]]
            kept = [k for k, i in enumerate(slots) if 0 <= i < len(expert_out)]
            total[t] += sum(expert_out[slots[k]].double() * one[2][t, k].double() for k in kept)
        if shared != "none":
            total += extra.double() * (1.0 if gate is None else gate[:, None].double())
    assert all(torch.equal(r, results[0]) and r.dtype is torch.float16 for r in results)
    assert torch.allclose(results[0].double(), total, rtol=2e-3, atol=2e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate_weight": torch.ones(1, HIDDEN).bfloat16()}, r"gate_weight: got shape \(1, 2560\)"),
        ({"norm_weight": torch.ones(HIDDEN)}, "norm_weight: got dtype torch.float32"),
        ({"eps": -1.0}, "eps: got -1.0"),
        ({"weight_offset": None}, "weight_offset: got None"),
        ({"routing_complete": 1}, "routing_complete: got 1, allowed True or False"),
    ],
)
def test_arguments_of_the_block_are_checked_at_construction(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"DecodeMoE: {message}"):
        DecodeMoE(world(4, "cpu").ranks[0], ELIGIBLE, **change)


@place
def test_arguments_of_a_call_are_checked(place: str) -> None:
    w = world(4, place)
    moe, good = DecodeMoE(w.ranks[0], ELIGIBLE), w.put(moe_inputs(1, Form(), torch.Generator()))
    x = w.put([torch.zeros(2, HIDDEN).bfloat16()])[0]
    before = w.rounds(0, "moe"), w.rounds(0, "plain")
    for call, message in (
        (lambda: moe(None, lambda _: good[:3]), "x: got None"),
        (lambda: moe(x[0], lambda _: good[:3]), r"x: got torch.bfloat16 \(2560,\)"),
        (lambda: moe(x.float(), lambda _: good[:3]), "x: got torch.float32"),
        (lambda: moe(x[:, :8], lambda _: good[:3]), r"x: got torch.bfloat16 \(2, 8\)"),
        (lambda: moe(x, lambda _: good[:3]), r"routed: got expert_weights of shape \(1, 10\) from it"),
        (lambda: moe(x[:1], lambda _: good[0]), "routed: got a Tensor from it"),
        (lambda: moe(x[:1], None), "routed: got None"),
        (lambda: moe(x[:1], lambda _: good[:3], x), "shared: got "),
        (lambda: moe(x[:1], lambda _: good[:3], lambda _: None), "shared: got a NoneType from it"),
        (lambda: moe(x[:1].half(), lambda _: good[:3]), "expert_out: got dtype torch.bfloat16, allowed"),
    ):
        with pytest.raises(ValueError, match=f"DecodeMoE: {message}"):
            call()
    assert (w.rounds(0, "moe"), w.rounds(0, "plain")) == before


@place
def test_an_error_in_a_branch_is_the_callers(place: str) -> None:
    w = World(2, place, forms=(Form(),))
    try:
        moe = DecodeMoE(w.ranks[0], replace(ELIGIBLE, tensor_parallel=2))
        x = w.put([torch.zeros(1, HIDDEN).bfloat16()])[0]

        def broken(_: Tensor) -> Any:
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            moe(x, routed=broken, shared=lambda x: x)
        assert w.rounds(0, "moe")[0] == 0
    finally:
        w.ranks[0].close()
