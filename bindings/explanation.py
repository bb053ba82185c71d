"""`explain`: which implementation a call would get, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bindings import dispatch
from bindings.registry import op_named


@dataclass(frozen=True)
class Explanation:
    """The answer of `explain`; `str()` of it is for people.

    backend: "cute", "reference" or "emulator", or None where the call would raise BackendUnavailable.
    implementation: the device module, with ", two launches" where one call takes these, "gemm" for a path
    of BLAS calls, "reference", or None. launches: the kernels of a call that are the module's, None for a
    path of library calls. target: what the device compiles for, None without one. params: the kernel's
    constexpr parameters. guards: every condition that was looked at, in order. ready: no compilation or
    load is due.
    """

    op: str
    backend: str | None
    implementation: str | None
    launches: int | None
    target: str | None
    reason: str
    guards: tuple[dispatch.Verdict, ...]
    params: Mapping[str, Any]
    ready: bool

    def __str__(self) -> str:
        serves = "BackendUnavailable" if self.backend is None else f"{self.backend} ({self.implementation})"
        if self.backend == "reference":
            serves = "the torch reference"
        lines = [
            f"{self.op}: {serves}" + (f" on {self.target}" if self.target else ""),
            f"  why: {self.reason}",
        ]
        if self.params:
            lines.append("  compiled for: " + ", ".join(f"{k}={v}" for k, v in self.params.items()))
        if self.backend == "cute":
            lines.append(f"  ready: {'yes' if self.ready else 'no, the first call compiles or loads it'}")
        lines += [f"  [{'ok' if v.ok else 'NO'}] {v.implementation}: {v}" for v in self.guards]
        return "\n".join(lines)


def explain(op: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Which implementation `op(*args, **kwargs)` would get here and now, and why; nothing is compiled or
    launched.

    op: an operator's name or the function of `bindings.ops`. The arguments are the operator's, validated as
    by the call itself: InvalidArgument if they break its contract.
    """
    operator = op_named(op)
    call = operator.examine(operator.bind(args, kwargs))
    resolution = dispatch.resolve(call, dispatch.selected())
    name = resolution.backend and (
        resolution.implementation.name if resolution.implementation is not None else "reference"
    )
    reason = resolution.reason
    if call.rows == 0 and resolution.backend is not None:
        reason += "; no rows: nothing is launched"
    return Explanation(
        operator.name,
        resolution.backend,
        name,
        None if resolution.implementation is None else resolution.implementation.launches,
        resolution.target,
        reason,
        resolution.verdicts,
        dict(resolution.params),
        dispatch.is_ready(resolution, call.device) or call.rows == 0,
    )
