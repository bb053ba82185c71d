"""GDN decode over many steps: what one step's tolerance allows must not add up."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from bindings import oracle, reference
from bindings.tolerance import largest_magnitude, spacing, to_numpy
from tests.draw import BF16, FP32, Draw, Inputs, gdn
from tests.harness import Backend, Placement, call, judge

STEPS = 64

DRIFT = 2e-5
"""Of the largest magnitude, after any number of steps: four times what one step may err by."""


def steps(state_dtype: torch.dtype, decay: str) -> Iterator[Inputs]:
    """Arguments of every step of two sequences; the state is only right in the first."""
    draw = Draw(f"rollout-{decay}")
    inputs = gdn(draw, 2, BF16, Hk=2, Hv=4, state_dtype=state_dtype)
    inputs["state"] = draw.uniform(*inputs["state"].shape, scale=0.5, dtype=state_dtype)
    inputs["state_indices"] = torch.tensor([1, 3], dtype=torch.int32)
    if decay == "slow":
        inputs["dt_bias"] -= 22  # decays within 1e-4 of 1 too: what is in the state stays there
    for _ in range(STEPS):
        fresh = {
            name: draw.uniform(*inputs[name].shape, scale=scale, dtype=BF16)
            for name, scale in (("mixed_qkv", 2), ("a", 3), ("b", 3))
        }
        yield inputs | fresh


def drift(got: Tensor, exact: Tensor) -> float:
    """Largest error beyond the spacing of a 16-bit result, as a fraction of the largest magnitude."""
    y = to_numpy(exact)
    error = abs(to_numpy(got) - y)
    if got.dtype != FP32:
        error = error - spacing(y, got.dtype)
    return float(error.max() / largest_magnitude(y))


Step = Callable[[Inputs], Tensor]


def rollout(step: Step, device: str, decay: str) -> float:
    """Worst drift of results and state from float64, both left to themselves."""
    worst = 0.0
    state, exact_state = torch.empty(0), torch.empty(0)
    for i, inputs in enumerate(steps(FP32, decay)):
        if i == 0:
            state, exact_state = inputs["state"].to(device, copy=True), inputs["state"].double()
        exact_out, exact_pool = oracle.gdn_packed_decode(**inputs | {"state": exact_state})
        exact_state = torch.from_numpy(exact_pool.value)
        out = step({name: x.to(device) for name, x in inputs.items()} | {"state": state})
        worst = max(worst, drift(out, torch.from_numpy(exact_out.value)), drift(state, exact_state))
    return worst


@pytest.mark.parametrize("decay", ["slow", "mixed"])
def test_fp32_state_does_not_drift(decay: str, backend: Backend) -> None:
    assert rollout(lambda x: call("gdn_packed_decode", x, backend)[0], backend.device, decay) <= DRIFT


def test_a_rounded_beta_would_drift() -> None:
    """The bound is one that an implementation which rounds beta to 16 bits does not keep."""

    def step(inputs: Inputs) -> Tensor:
        beta = torch.sigmoid(inputs["b"].float()).to(BF16).float()
        return reference.gdn_packed_decode(**inputs | {"b": torch.logit(beta)})

    assert rollout(step, "cpu", "slow") > 10 * DRIFT


def test_bf16_state_steps_exactly(backend: Backend) -> None:
    """A bf16 state is rounded every step, so it is no approximation of a float64 rollout; each step is exact
    from where the last one left it."""
    state: Tensor | None = None
    for inputs in steps(BF16, "mixed"):
        if state is not None:
            inputs["state"] = state
        placed = Placement("gdn_packed_decode", inputs, backend.device)
        results = call("gdn_packed_decode", placed.arguments, backend)
        placed.check()
        judge("gdn_packed_decode", inputs, results)
        state = results[1].cpu()
