"""Where the time of a replay goes: its kernels by family, from the profiler's trace of one replay."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

# (family, what a kernel's name holds, in lower case); the first that fits. Ours are named after the class
# that they were traced from: hc_apply_norm is HcApplyNorm_object.
FAMILIES = (
    ("HC mix", ("hc_mix", "hcmix")),
    ("HC gate", ("hcgate", "hc_combine_gate", "hccombinegate")),
    ("HC boundary", ("hcapply", "hcboundary", "hc_combine", "hccombine", "groupedgemma", "grouped_gemma")),
    ("GDN", ("gdnpackeddecode", "gated_delta_rule", "packeddecode")),
    ("expert tail, all-reduce", ("moefinalize", "sharedgate", "allreduce", "all_reduce", "oneshot")),
    ("experts", ("step_expert",)),
    ("attention", ("step_attend", "step_qk_norm")),
    ("router, conv, gated norm", ("step_route", "step_conv", "step_gated_norm")),
    ("projections", ("gemv", "gemm", "nvjet", "splitk", "cutlass", "dot_kernel", "reduce_1block")),
)
OTHER = "elementwise, copies"
NAMES = (*(name for name, _ in FAMILIES), OTHER)


def family(kernel: str) -> str:
    """The family of a kernel, by its name."""
    lower = kernel.lower()
    return next((name for name, marks in FAMILIES if any(mark in lower for mark in marks)), OTHER)


@dataclass(frozen=True)
class Span:
    """One kernel of a replay: microseconds from the first one's start."""

    name: str
    start: float
    end: float

    @property
    def family(self) -> str:
        return family(self.name)


def trace(replay: Callable[[], None]) -> list[Span]:
    """The kernels of one replay in the order of their starts, as CUPTI saw them; each is a little slower
    than untraced.

    RuntimeError where the profiler sees none."""
    from torch.profiler import ProfilerActivity, profile

    replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        replay()
        torch.cuda.synchronize()
    events: Iterable[Any] = profiler.events() or ()
    device = [e for e in events if "cuda" in str(e.device_type).lower() and not _before(e.name)]
    spans = sorted(
        (Span(e.name, e.time_range.start, e.time_range.end) for e in device), key=lambda s: s.start
    )
    if not spans:
        raise RuntimeError("the profiler saw no kernel of the replay")
    first = spans[0].start
    return [Span(s.name, round(s.start - first, 3), round(s.end - first, 3)) for s in spans]


def _before(name: str) -> bool:
    """Whether an event is no part of a step: a fill, or what lines ranks up before one (world.py)."""
    return name.startswith("Memset") or any(mark in name for mark in ("LineUp_object", "spin_kernel"))


def table(spans: Iterable[Span]) -> list[dict[str, Any]]:
    """Launches and busy microseconds by family, the most first. alone: the part in which nothing else ran;
    what runs side by side is busy in both families."""
    ordered = list(spans)
    busy = dict.fromkeys(NAMES, 0.0)
    alone, count = dict(busy), dict.fromkeys(NAMES, 0)
    for span in ordered:
        busy[span.family] += span.end - span.start
        count[span.family] += 1
    edges = sorted([(s.start, 1, s.family) for s in ordered] + [(s.end, -1, s.family) for s in ordered])
    running: dict[str, int] = {}
    last = edges[0][0] if edges else 0.0
    for time, step, name in edges:
        if len(running) == 1:
            alone[next(iter(running))] += time - last
        last = time
        running[name] = running.get(name, 0) + step
        if not running[name]:
            del running[name]
    rows = [
        {
            "family": name,
            "launches": count[name],
            "us": round(busy[name], 2),
            "alone_us": round(alone[name], 2),
        }
        for name in NAMES
        if count[name]
    ]
    return sorted(rows, key=lambda row: -row["us"])


def idle(spans: Iterable[Span]) -> float:
    """Microseconds between the first start and the last end in which no kernel ran."""
    gap, end = 0.0, None
    for span in sorted(spans, key=lambda s: s.start):
        if end is not None and span.start > end:
            gap += span.start - end
        end = span.end if end is None else max(end, span.end)
    return round(gap, 2)
