"""Whether two arms compute the same step: layer by layer on the same inputs, then the whole step on the
same routing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from profiling.step.model import Arm, Routing, StepModel

LAYER_TOLERANCE = 0.03
"""Of a layer: RMS difference of the arms' updates of the residual, as a share of the update's RMS. Two bf16
chains of some ten roundings each, of which those before the experts are amplified by them, differ by about
a hundredth."""

STATE_TOLERANCE = 0.03
STEP_TOLERANCE = 0.15
"""Of the whole step's output, where the layers' differences have added up."""


@dataclass(frozen=True)
class Difference:
    """The worst layer's difference, that of the recurrent states, and that of the whole step; as shares of
    an RMS. rerouted: layers in which the arms' own routers chose other experts, of which nothing is asked."""

    layer: float
    at: int
    state: float
    step: float
    rerouted: int

    @property
    def failures(self) -> list[str]:
        found = []
        for what, got, allowed in (
            (f"layer {self.at}", self.layer, LAYER_TOLERANCE),
            ("recurrent states", self.state, STATE_TOLERANCE),
            ("step", self.step, STEP_TOLERANCE),
        ):
            if not got <= allowed:  # NaN fails
                found.append(f"{what}: the arms differ by {got:.3g} of the RMS, allowed {allowed}")
        return found

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "allowed": {"layer": LAYER_TOLERANCE, "state": STATE_TOLERANCE, "step": STEP_TOLERANCE},
        }


def share(got: Tensor, expected: Tensor, scale: Tensor | None = None) -> float:
    """RMS of a difference over that of `scale`, or of what was expected."""
    difference = (got.double() - expected.double()).square().mean()
    return float((difference / (expected if scale is None else scale).double().square().mean()).sqrt())


def compare(
    model: StepModel, first: Arm, second: Arm, progress: Callable[[], None] | None = None
) -> Difference:
    """Runs both arms eagerly, from the model's initial state, which they leave as it was."""
    layers: list[tuple[Tensor, Tensor]] = []
    routings: list[Routing] = []
    states = model.state.clone()

    def seen(before: Tensor, after: Tensor) -> None:
        layers.append((before.clone(), after.clone()))
        if progress is not None:
            progress()

    whole = model.step(first, states, seen=seen, chosen=routings.append)
    held = model.state.clone()
    worst, at = 0.0, 0
    own: list[Routing] = []
    for number, (before, after) in enumerate(layers):
        state = model.layer(second, number, second.start(before), held, routings[number], own.append)
        got = share(second.residual(state), after, after.double() - before.double())
        if not got <= worst:  # NaN is worse than any
            worst, at = got, number
        if progress is not None:
            progress()
    recurrent = [(held.gdn[i], states.gdn[i]) for i in held.gdn] + [
        (held.conv[i], states.conv[i]) for i in held.conv
    ]
    changed = max((share(mine, theirs) for mine, theirs in recurrent), default=0.0)
    again = model.step(second, model.state.clone(), routings)
    rerouted = sum(set(a[0].tolist()) != set(b[0].tolist()) for a, b in zip(own, routings, strict=True))
    return Difference(worst, at, changed, share(again, whole), rerouted)


def settle() -> None:
    """Waits for the device, so that an error of it is raised where it was made."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
