"""The torch reference: properties that follow from the contract, beyond the table that tests/ops compares
with float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bindings import oracle, reference
from tests.cases import Case, cases
from tests.draw import BF16, FP16, FP32, Draw, finalize, gdn
from tests.harness import assert_same_bits, outputs, same_bits

dtypes = st.sampled_from([BF16, FP16])
rows = st.integers(0, 5)
streams = st.integers(1, 5)
seeds = st.integers(0, 2**31)


def run(op: str, inputs: dict[str, Any]) -> Any:
    return getattr(reference, op)(**inputs)


# --- hyper-connection operators
# ------------------------------------------------------------------------------------


@given(rows, streams, dtypes, seeds)
def test_zero_partials_open_the_gate_to_one(T: int, C: int, dtype: torch.dtype, seed: int) -> None:
    draw = Draw(str(seed))
    block, residual = draw.uniform(T, 16, dtype=dtype), draw.uniform(T, C * 16, dtype=dtype)
    partials = torch.zeros(T, 8, C)
    assert (reference.gate_from_partials(partials) == 1).all()
    added = block.float().repeat(1, C) + residual.float()
    assert_same_bits(reference.hc_apply(block, residual, partials), added.to(dtype), "block + residual")


def test_gate_saturates() -> None:
    partials = torch.tensor([1e4, -1e4, float("inf"), float("-inf"), float("nan")]).expand(1, 8, 5)
    gate = reference.gate_from_partials(partials)[0]
    assert gate[:4].tolist() == [2.0, 0.0, 2.0, 0.0]
    assert gate[4].isnan()


@given(streams, dtypes, st.integers(0, 7), seeds)
def test_a_split_is_a_contiguous_eighth(C: int, dtype: torch.dtype, split: int, seed: int) -> None:
    draw = Draw(str(seed))
    normed, weight = torch.zeros(2, 192, dtype=dtype), draw.uniform(C, 192, dtype=dtype)
    eighth = slice(split * 24, (split + 1) * 24)
    normed[:, eighth] = draw.uniform(2, 24, dtype=dtype)
    partials = reference.hc_gate(normed, weight)
    assert (partials[:, [s for s in range(8) if s != split]] == 0).all()
    exact = normed[:, eighth].double() @ weight[:, eighth].double().T
    assert_same_bits(partials[:, split].contiguous(), exact.float(), "the split's dot product")


@given(rows, dtypes, st.integers(-8, 8), seeds)
def test_norm_ignores_scale(T: int, dtype: torch.dtype, exponent: int, seed: int) -> None:
    """Of powers of two, without eps: not a bit changes."""
    draw = Draw(str(seed))
    x, weight = draw.uniform(T, 48, dtype=dtype), draw.uniform(48, dtype=dtype)
    x = torch.where(x.abs() < 2.0**-6, 0.5, x).to(dtype)  # none becomes subnormal
    normed = reference.grouped_gemma_rmsnorm(x, weight, eps=0.0, group_size=16)
    scaled = reference.grouped_gemma_rmsnorm(x * 2.0**exponent, weight, eps=0.0, group_size=16)
    assert_same_bits(normed, scaled, "norm of a scaled row")


@given(dtypes, seeds)
def test_norm_of_groups(dtype: torch.dtype, seed: int) -> None:
    """Each group alone; weight 0 gives a mean square of 1, weight -1 gives 0."""
    draw = Draw(str(seed))
    x, weight = draw.uniform(3, 64, dtype=dtype), draw.uniform(64, dtype=dtype)
    normed = reference.grouped_gemma_rmsnorm(x, weight, group_size=16)
    for g in range(4):
        group = slice(16 * g, 16 * (g + 1))
        alone = reference.grouped_gemma_rmsnorm(x[:, group].contiguous(), weight[group], group_size=16)
        assert_same_bits(normed[:, group], alone, f"group {g}")
    plain = reference.grouped_gemma_rmsnorm(x, torch.zeros_like(weight), group_size=16)
    mean_square = plain.float().view(3, 4, 16).square().mean(-1)
    torch.testing.assert_close(mean_square, torch.ones(3, 4), rtol=1e-2, atol=0)
    assert (reference.grouped_gemma_rmsnorm(x, torch.full_like(weight, -1), group_size=16) == 0).all()


@given(rows, streams, dtypes, seeds)
def test_mix_with_a_closed_bottleneck_is_half_the_mean(T: int, C: int, dtype: torch.dtype, seed: int) -> None:
    """With w_down zero, t is silu(0) = 0 and every mixing weight sigmoid(0)."""
    draw = Draw(str(seed))
    normed, w_up = draw.uniform(T, C * 8, dtype=dtype), draw.uniform(C * 8, 4, dtype=dtype)
    mixed = reference.hc_mix(normed, torch.zeros(4, C * 8, dtype=dtype), w_up, streams=C)
    mean = (normed.float().view(T, C, 8) * 0.5).mean(1)
    assert_same_bits(mixed, mean.to(dtype), "half the mean")


def test_shared_gate_is_never_rounded() -> None:
    draw = Draw("shared")
    x, weight = draw.uniform(64, 256, dtype=BF16), draw.uniform(256, scale=0.1, dtype=BF16)
    gate = reference.shared_gate(x, weight)
    assert gate.dtype == FP32
    assert (gate != gate.to(BF16)).float().mean() > 0.9
    assert (reference.shared_gate(x, torch.zeros_like(weight)) == 0.5).all()


# --- MoE finalize
# --------------------------------------------------------------------------------------------------

experts = st.sampled_from(["gated", "ungated", "alone"])
weight_dtypes = st.sampled_from([BF16, FP32])


@given(st.integers(1, 5), st.integers(1, 6), experts, weight_dtypes, seeds)
def test_what_a_dropped_slot_holds_does_not_matter(
    T: int, K: int, kind: str, weight: torch.dtype, seed: int
) -> None:
    """Neither which invalid index, nor its weight, nor how many dropped slots follow."""
    draw = Draw(str(seed))
    inputs = finalize(draw, T, H=16, K=K, weight_dtype=weight, experts=kind, drop=0.5)
    out = run("moe_finalize", inputs)
    assert not out.isnan().any()
    P, slots = inputs["expert_out"].shape[0], inputs["permuted_idx"].view(T, K)
    dropped = (slots < 0) | (slots >= P)
    others = torch.tensor([-1, P, -(2**31), 2**31 - 1], dtype=torch.int32)[
        draw.permutation(4 * T * K)[: T * K] % 4
    ]
    slots = torch.where(dropped, others.view(T, K), slots)
    weights = torch.where(dropped, draw.uniform(T, K, scale=9, dtype=weight), inputs["expert_weights"])
    padded = torch.full((T, 2), P, dtype=torch.int32)
    again = inputs | {
        "permuted_idx": torch.cat([slots, padded], 1).flatten(),
        "expert_weights": torch.cat([weights, torch.full((T, 2), float("inf"), dtype=weight)], 1),
    }
    assert_same_bits(run("moe_finalize", again), out, "other dropped slots")


@given(st.integers(1, 5), seeds)
def test_one_slot_of_weight_one_gathers(T: int, seed: int) -> None:
    draw = Draw(str(seed))
    expert_out = draw.uniform(7, 16, dtype=BF16)
    index = draw.permutation(7)[:T].to(torch.int32)
    out = reference.moe_finalize(expert_out, index, torch.ones(T, 1))
    assert_same_bits(out, expert_out[index], "gathered rows")


def test_both_roundings() -> None:
    """routed is rounded before the shared expert is added: 1 + 2**-8 is a tie and goes to 1, so that nothing
    is left."""
    expert_out = torch.tensor([[1.0], [2.0**-8]]).to(BF16)
    slots, weights = torch.tensor([0, 1], dtype=torch.int32), torch.ones(1, 2)
    minus_one, gate = torch.tensor([[-1.0]]).to(BF16), torch.ones(1)
    assert reference.moe_finalize(expert_out, slots, weights, minus_one, gate).item() == 0
    assert reference.moe_finalize(expert_out, slots, weights, minus_one).item() == 0
    assert reference.moe_finalize(expert_out, slots, weights).item() == 1


def test_slots_are_added_in_order() -> None:
    expert_out = torch.tensor([[2.0**30], [1.0], [-(2.0**30)]]).to(BF16)
    for order, total in (([0, 1, 2], 0.0), ([0, 2, 1], 1.0), ([2, 0, 1], 1.0), ([1, 0, 2], 0.0)):
        out = reference.moe_finalize(expert_out, torch.tensor(order, dtype=torch.int32), torch.ones(1, 3))
        assert out.item() == total


# --- GDN decode
# ----------------------------------------------------------------------------------------------------


def decode(inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Result and new state; the arguments stay as they are."""
    state = inputs["state"].clone()
    return run("gdn_packed_decode", inputs | {"state": state}), state


small = {"Hk": 2, "Hv": 4, "D": 8}


@given(st.integers(1, 6), dtypes, seeds)
def test_gdn_rows_and_slots_are_names(B: int, dtype: torch.dtype, seed: int) -> None:
    """Permuting rows, or slots with their indices, permutes results and states: not a bit changes."""
    draw = Draw(str(seed))
    inputs = gdn(draw, B, dtype, **small)
    out, state = decode(inputs)
    order = draw.permutation(B)
    by_row = {name: inputs[name][order] for name in ("mixed_qkv", "a", "b", "state_indices")}
    out_, state_ = decode(inputs | by_row)
    assert_same_bits(out_, out[order], "permuted rows")
    assert_same_bits(state_, state, "state of permuted rows")

    N = state.shape[0]
    place = draw.permutation(N)  # slot n moves to place[n]
    moved = torch.empty_like(inputs["state"])
    moved[place] = inputs["state"]
    index = inputs["state_indices"]
    valid = (index >= 0) & (index < N)
    renamed = torch.where(valid, place[torch.where(valid, index, 0).long()], index)  # an int64 one: no matter
    out_, state_ = decode(inputs | {"state": moved, "state_indices": renamed})
    assert_same_bits(out_, out, "renamed slots")
    assert_same_bits(state_[place], state, "renamed slots' state")


@given(dtypes, seeds)
def test_gdn_closed_gate_only_decays(dtype: torch.dtype, seed: int) -> None:
    inputs = gdn(Draw(str(seed)), 1, dtype, **small)
    inputs["b"] = torch.full_like(inputs["b"], float("-inf"))  # beta = 0
    _, state = decode(inputs)
    slot = int(inputs["state_indices"][0])
    decay = reference.gdn_decay(inputs["a"], inputs["A_log"], inputs["dt_bias"])[0]
    assert_same_bits(state[slot], inputs["state"][slot] * decay[:, None, None], "decayed state")


@given(dtypes, seeds)
def test_gdn_full_decay_forgets(dtype: torch.dtype, seed: int) -> None:
    """decay = 0: the state becomes beta v k^T, whatever finite it was."""
    draw = Draw(str(seed))
    inputs = gdn(draw, 1, dtype, **small)
    inputs["A_log"] = torch.full_like(inputs["A_log"], 80.0)
    other = inputs | {"state": draw.uniform(*inputs["state"].shape, scale=100)}
    (out, state), (out_, state_) = decode(inputs), decode(other)
    slot = int(inputs["state_indices"][0])
    assert_same_bits(out, out_, "result")
    assert_same_bits(state[slot], state_[slot], "state")
    assert (torch.linalg.matrix_rank(state[slot].double(), rtol=1e-5) == 1).all()


def test_gdn_value_heads_share_key_heads() -> None:
    """Value head h uses key head h // (Hv/Hk): with all else equal, the heads of one key head agree."""
    draw = Draw("heads")
    D = 8
    inputs = gdn(draw, 1, BF16, Hk=2, Hv=6, D=D)
    inputs["mixed_qkv"][:, 4 * D :] = inputs["mixed_qkv"][:, 4 * D : 5 * D].repeat(1, 6)
    for name in ("a", "b", "A_log", "dt_bias"):
        inputs[name] = inputs[name][..., :1].expand_as(inputs[name]).contiguous()
    inputs["state"] = inputs["state"][:, :1].expand_as(inputs["state"]).contiguous()
    out = decode(inputs)[0][0, 0]
    for head, key_head in enumerate((0, 0, 0, 1, 1, 1)):
        assert_same_bits(out[head], out[3 * key_head], f"value head {head}")
    assert not same_bits(out[0], out[3]).any()


def test_gdn_softplus_is_linear_above_twenty() -> None:
    x = torch.tensor([[19.9, 20.0, 20.0001, 21.0, 90.0, float("inf"), -90.0, 0.0]])
    A_log = torch.full((8,), -3.0)
    decay = reference.gdn_decay(torch.zeros(1, 8), A_log, x[0])
    softplus = torch.where(x <= 20, torch.log1p(torch.exp(x.double())), x.double())
    torch.testing.assert_close(
        decay.double(), torch.exp(-softplus * torch.exp(A_log.double())), rtol=2e-6, atol=0
    )
    assert decay[0, 5] == 0
    assert decay[0, 6] == 1


# --- where it runs
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases("gdn_packed_decode"), ids=lambda case: case.id)
def test_gdn_as_on_a_gpu(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does on a device that it must not wait for gives the same bits, and touches no more of the
    state."""
    out, state = decode(case.inputs())
    monkeypatch.setattr(reference, "_live_rows", reference._padded_live_rows)
    out_, state_ = decode(case.inputs())
    assert_same_bits(out_, out, "result")
    assert torch.equal(state_.contiguous().view(torch.uint8), state.contiguous().view(torch.uint8))


@pytest.mark.parametrize("op", sorted(oracle.ORACLES))
def test_nothing_depends_on_values(op: str) -> None:
    """On tensors without values it gives results of the right shape and dtype: so it never waits for a
    device."""
    for case in (c for c in cases(op, kind="random") if not c.name.endswith("-model")):
        inputs = {n: x.to("meta") if isinstance(x, Tensor) else x for n, x in case.inputs().items()}
        got = run(op, inputs)
        results = got if isinstance(got, tuple) else (got,)
        assert [(tuple(r.shape), r.dtype) for r in results] == list(outputs(op, inputs).values())
        assert all(r.is_contiguous() for r in results)


@pytest.mark.parametrize("op", sorted(oracle.ORACLES))
def test_results_are_fresh(op: str) -> None:
    """No result shares memory with an argument."""
    for case in cases(op, kind="random", sanitizer=True):
        inputs = case.inputs()
        got = run(op, inputs)
        results = got if isinstance(got, tuple) else (got,)
        arguments = {x.untyped_storage().data_ptr() for x in inputs.values() if isinstance(x, Tensor)}
        storages = [r.untyped_storage().data_ptr() for r in results]
        assert not arguments & set(storages)
        assert len(set(storages)) == len(storages)
