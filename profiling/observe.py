"""Watching the operators of a running model: how often each is called, and whether sampled calls are right.

A watched call is judged on the very tensors that it got: its inputs go to the float64 oracle, its results are
compared by the contract's tolerance.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bindings import ops, oracle, tolerance

OPS: tuple[str, ...] = tuple(oracle.ORACLES)

_PARAMETERS = {op: tuple(inspect.signature(call).parameters) for op, call in oracle.ORACLES.items()}


@dataclass(frozen=True)
class Call:
    """One call of an operator: its arguments by name, as they were before it, and its results by name."""

    op: str
    inputs: dict[str, Any]
    results: dict[str, Tensor]

    def verdicts(self) -> list[tolerance.Verdict]:
        """The comparison of each result with the exact one. Waits for the device."""
        exact = oracle.exact(self.op, oracle.fed(self.op, self.inputs, self.results))
        return [tolerance.check(name, got, exact[name]) for name, got in self.results.items()]


class Observer:
    """What was seen: `counts` of calls by operator, and the `calls` that were kept."""

    def __init__(self, keep: Mapping[str, Iterable[int]]) -> None:
        self.counts: Counter[str] = Counter()
        self.calls: list[Call] = []
        self._keep = {op: frozenset(indices) for op, indices in keep.items()}

    def wrap(self, op: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The operator, watched."""

        def watched(*args: Any, **options: Any) -> Any:
            kept = self.counts[op] in self._keep.get(op, ())
            self.counts[op] += 1
            if not kept:
                return call(*args, **options)
            inputs = {
                **dict(zip(_PARAMETERS[op], args, strict=False)),
                **{name: value for name, value in options.items() if name in _PARAMETERS[op]},
            }
            if op == "gdn_packed_decode":
                inputs["state"] = (after := inputs["state"]).clone()
            got = call(*args, **options)
            results = got if isinstance(got, tuple) else (got,)
            if op == "gdn_packed_decode":
                results = (*results, after.clone())
            self.calls.append(Call(op, inputs, dict(zip(oracle.RESULTS[op], results, strict=True))))
            return got

        return watched


@contextmanager
def watch(keep: Mapping[str, Iterable[int]] | None = None) -> Iterator[Observer]:
    """Watches `bindings.ops` in this process: counts every call, keeps those whose index in `keep` is named.

    Operators called through `torch.ops` or inside a compiled region are not seen.
    """
    observer = Observer(keep or {})
    before = {op: getattr(ops, op) for op in OPS}
    for op, call in before.items():
        setattr(ops, op, observer.wrap(op, call))
    try:
        yield observer
    finally:
        for op, call in before.items():
            setattr(ops, op, call)


def spread(total: int, count: int) -> tuple[int, ...]:
    """At most `count` indices spread over range(total), its first and last among them."""
    if total <= count:
        return tuple(range(total))
    if count == 1:
        return (0,)
    return tuple(sorted({round(i * (total - 1) / (count - 1)) for i in range(count)}))
