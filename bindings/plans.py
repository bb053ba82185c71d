"""Plans: what a call resolved to, kept under everything that the resolution looked at.

A repeated call must cost little more than its launch, so it skips validation and choice when a plan fits. A
plan fits a call with the same backend selection and scalars, tensors of the same type, dtype, device, shape,
strides and autograd state (`matcher`), and the same base addresses modulo 32. What then still depends on the
addresses is whether memory overlaps; a plan remembers the address tuples that passed, so buffers in steady
use are checked once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bindings.checks import ADDRESS_MODULUS, extent_bytes, held

PLANS = 64
"""Plans kept for one form of an operator, the most recently used first. The layers of one step use one or
two; passing over a plan costs about a hundredth of making one."""

ADDRESSES = 256
"""Address tuples that one plan remembers; all are forgotten when there are more."""

Matcher = Callable[..., bool]

data_ptr = Tensor.data_ptr


def python_matcher(tensors: Sequence[Tensor]) -> Matcher:
    """Whether later tensors are like these. The portable form."""
    types, traits = tuple(map(type, tensors)), tuple(map(_traits, tensors))
    state = _dispatch_state()

    def matches(*tensors: Tensor) -> bool:
        return (
            tuple(map(type, tensors)) == types
            and _dispatch_state() == state
            and tuple(map(_traits, tensors)) == traits
        )

    return matches


def _traits(t: Tensor) -> tuple[Any, ...]:
    keys = torch._C._dispatch_keys(t).raw_repr()
    return keys, t.shape, t.stride(), t.dtype, t.device, t.requires_grad


def _dispatch_state() -> tuple[int, int]:
    """Which dispatch keys modes, tracers and transforms have switched on and off in this thread."""
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    return included.raw_repr(), excluded.raw_repr()


def native_matcher(tensors: Sequence[Tensor]) -> Matcher:
    """The same by the C++ check that torch.compile guards its graphs with: one call, five to ten times as
    fast.

    Like the portable form it compares dispatch keys, so a call under vmap, a tracer or a dispatch mode never
    matches a plan made outside; nor does an inference tensor, a negated view or a zero tensor match a plain
    one. The check ends the process at a nested tensor of torch's own type (layout strided), which has no
    shape: asking each tensor for that would double the cost of a match, so only a first call refuses them."""
    # The check never holds where one object is passed twice, as an update in place does: it gets each once.
    first = [next(i for i, other in enumerate(tensors) if other is t) for t in tensors]
    unique = sorted(set(first))
    sizes: Any = [list(tensors[i].shape) for i in unique]
    strides: Any = [list(tensors[i].stride()) for i in unique]
    check = torch._C._dynamo.guards.TensorGuards(
        *[tensors[i] for i in unique], dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
    ).check
    if len(unique) == len(tensors):
        return check
    repeats = [(i, j) for i, j in enumerate(first) if i != j]

    def matches(*tensors: Tensor) -> bool:
        for i, j in repeats:
            if tensors[i] is not tensors[j]:
                return False
        return check(*[tensors[i] for i in unique])

    return matches


def _choose_matcher() -> Callable[[Sequence[Tensor]], Matcher]:
    """`native_matcher` if this torch has the check and it tells what it must tell apart; it is no public
    interface."""
    a = torch.empty((2, 8), device="cpu", dtype=torch.float32)
    others = (
        a.to(torch.float16),
        torch.empty((3, 8), device="cpu", dtype=torch.float32),
        torch.empty((8, 2), device="cpu", dtype=torch.float32).t(),
        torch.empty((2, 8), device="meta", dtype=torch.float32),
        torch.empty((2, 8), device="cpu", dtype=torch.float32, requires_grad=True),
        torch.nn.Parameter(a, requires_grad=False),
    )
    try:
        matches, twice = native_matcher((a, a.clone())), native_matcher((a, a))
        sound = matches(a, a.clone()) and twice(a, a) and not any(matches(a, other) for other in others)
    except Exception:
        return python_matcher
    return native_matcher if sound else python_matcher


matcher = _choose_matcher()


class Plan:
    """One resolved call. run: takes the call's tensors and returns its results.

    Scalars are compared as numbers, so 0.0 and -0.0 share a plan: they give equal results, in which the signs
    of zeros may differ."""

    __slots__ = ("extents", "low", "matches", "pairs", "run", "scalars", "selection", "vetted")

    def __init__(
        self,
        run: Callable[..., Any],
        tensors: Sequence[Tensor],
        scalars: tuple[Any, ...],
        selection: object,
        pairs: Sequence[tuple[int, int, int, int, bool]],
    ):
        """pairs: (written, other, lowest, highest, in_place), of positions in `tensors` and of the distances
        between their addresses, both exclusive, at which they overlap."""
        self.run, self.scalars, self.selection, self.pairs = run, scalars, selection, tuple(pairs)
        self.matches = matcher(tensors)
        self.extents = tuple(map(extent_bytes, tensors))
        pointers = tuple(map(data_ptr, tensors))
        self.low = tuple([p % ADDRESS_MODULUS for p in pointers])
        self.vetted = {pointers}

    def vet(self, pointers: tuple[int, ...], tensors: Sequence[Tensor]) -> bool:
        """Whether tensors that match, at these addresses, are aligned as the plan's, have their memory and
        overlap nowhere; remembers it if so, and does not look again: a storage that is shrunk later, at an
        address that was remembered, is not seen."""
        if tuple([p % ADDRESS_MODULUS for p in pointers]) != self.low:
            return False
        for written, other, lowest, highest, in_place in self.pairs:
            distance = pointers[other] - pointers[written]
            if lowest < distance < highest and not (in_place and distance == 0):
                return False
        if not all(map(held, tensors, pointers, self.extents)):
            return False
        if len(self.vetted) >= ADDRESSES:
            self.vetted.clear()
        self.vetted.add(pointers)
        return True


class PlanCache:
    """The plans of one form of an operator. Threads may race: a lost update costs one resolution, no more."""

    __slots__ = ("plans",)

    def __init__(self) -> None:
        self.plans: tuple[Plan, ...] = ()

    def use(self, plan: Plan) -> None:
        """Puts a plan, new or old, in front."""
        self.plans = (plan, *[p for p in self.plans if p is not plan][: PLANS - 1])

    def drop(self, plan: Plan) -> None:
        """Forgets a plan."""
        self.plans = tuple([p for p in self.plans if p is not plan])

    def clear(self) -> None:
        """Forgets all plans."""
        self.plans = ()
