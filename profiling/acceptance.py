"""What the kernels have to reach on one H200, as data, and the judgement of a result file by it.

Works on the JSON of `profiling.bench` alone, so a result can be judged again later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from profiling import stats

OURS = "ours"
AGAIN = "ours, again"
"""The same call captured a second time: what two identical versions differ by."""
EMPTY = "empty kernel"
READ = "read floor"
SEPARATE = "ours, apply+norm then gate"
"""What an hc_boundary does in one launch, in two."""
COPY = "copy, 4 GiB"
COPY_SAME = "copy, same bytes"
GEMMS = "two GEMMs alone"
UNFUSED = "finalize, gate-add, "
"""What the fused finalize and all-reduce replaces, with the all-reduce of the rest of the name."""
LINK = "link one way + moe_finalize alone"
"""The least that it can take: a sum of two measurements, hot."""

Run = Mapping[str, Any]


@dataclass(frozen=True)
class Target:
    """A bound on a ratio, or for host costs on microseconds.

    against: versions whose name starts so; the fastest of them counts. metric: "cold", "hot", "bandwidth"
    (bytes a second as a share of `against`'s, cold) or "host" (microseconds of the call named `version`).
    bound: the least ratio, for host the most microseconds; None: reported, not judged.
    """

    op: str
    rows: int
    metric: str
    against: str
    bound: float | None
    version: str = OURS


TARGETS = (
    Target("hc_gate", 1, "cold", "sglang hc_combine_gate", 1.0),
    Target("hc_apply_norm", 1, "cold", "sglang hc_combine_apply_norm", 1.05),
    Target("hc_gate_apply_norm", 1, "cold", "sglang hc_combine_split", 1.2),
    Target("hc_gate_apply_norm", 1, "hot", "sglang hc_combine_split", 1.2),
    Target("hc_boundary", 1, "cold", SEPARATE, 1.3),
    Target("hc_mix", 1, "cold", "sglang Triton hc_mix", 1.6),
    Target("hc_mix", 1, "hot", "sglang Triton hc_mix", 2.2),
    Target("hc_mix", 1, "cold", READ, None),
    Target("hc_mix", 4, "cold", "sglang Triton hc_mix", 1.6),
    Target("hc_mix", 8, "cold", "sglang Triton hc_mix", 1.6),
    Target("hc_mix", 16, "cold", "sglang Triton hc_mix", 1.6),
    Target("hc_mix", 32, "cold", "torch eager", 1.6),
    Target("hc_mix", 32, "cold", GEMMS, 1.0),
    Target("gdn_packed_decode", 1, "cold", "sglang Triton GDN", 1.05),
    Target("gdn_packed_decode", 1, "hot", "sglang Triton GDN", 1.05),
    Target("grouped_gemma_rmsnorm", 1, "cold", "sglang grouped norm", 1.05),
    Target("shared_gate", 1, "cold", READ, 1 / 1.10),
    Target("gdn_packed_decode", 64, "bandwidth", COPY, 0.85),
    Target("gdn_packed_decode", 64, "bandwidth", COPY, None, "sglang Triton GDN"),
    Target("gdn_packed_decode", 256, "bandwidth", COPY, 0.93),
    Target("gdn_packed_decode", 256, "bandwidth", COPY, None, "sglang Triton GDN"),
    Target("hc_gate", 1, "host", "", 12.0, "ops"),
    Target("hc_gate", 1, "host", "", 10.0, "ops, out="),
    Target("hc_apply_norm", 1, "host", "", 16.0, "ops"),
    Target("hc_apply_norm", 1, "host", "", 13.0, "ops, out="),
    Target("gdn_packed_decode", 1, "host", "", 16.0, "ops"),
    Target("gdn_packed_decode", 1, "host", "", 13.0, "ops, out="),
)


@dataclass(frozen=True)
class Judgement:
    """One line of the closing table. ratio is how many times as fast `version` is, or its share of the
    copy's bandwidth; of host costs there is none. noise: the run's A/A floor of that metric. verdict:
    "PASS", "FAIL", "-" (nothing was asked) or "MISSING" (there was nothing to compare with, `note` says
    what)."""

    op: str
    rows: int
    metric: str
    version: str
    against: str
    us: float | None
    against_us: float | None
    ratio: float | None
    p10: float | None
    p90: float | None
    bound: float | None
    noise: float | None
    verdict: str
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def versions(run: Run, prefix: str, metric: str) -> dict[str, Any]:
    """The versions of a run whose name is or starts with `prefix` and that have times of `metric`."""
    return {
        v["name"]: v for v in run["versions"] if v["name"].startswith(prefix) and v.get(metric) is not None
    }


def fastest(found: Mapping[str, Any], metric: str) -> str | None:
    """The name of the version with the least median, or None."""
    return min(found, key=lambda name: found[name][metric]["median"], default=None)


def one(run: Run, name: str, metric: str) -> str | None:
    """`name` itself if the run has times of it, else the fastest version whose name starts so."""
    found = versions(run, name, metric)
    return name if name in found else fastest(found, metric)


def judge_run(run: Run, targets: Sequence[Target] = TARGETS) -> list[Judgement]:
    """The judgements that concern one run; none where no target asks about it."""
    return [_judge(run, t) for t in targets if (t.op, t.rows) == (run["op"], run["rows"])]


def _judge(run: Run, target: Target) -> Judgement:
    def line(verdict: str, **values: Any) -> Judgement:
        fields = dict.fromkeys(("us", "against_us", "ratio", "p10", "p90", "noise"))
        given: dict[str, Any] = {"version": target.version, "against": target.against, **fields, **values}
        return Judgement(target.op, target.rows, target.metric, bound=target.bound, verdict=verdict, **given)

    if run.get("error"):
        return line("FAIL", note=f"the run failed: {run['error'].strip().splitlines()[-1]}")
    if target.metric == "host":
        call = run.get("host", {}).get(target.version)
        if call is None:
            return line("MISSING", note="no host costs in this run")
        median = call["median"]
        verdict = "PASS" if target.bound is not None and median <= target.bound else "FAIL"
        return line(verdict, us=median, p10=call["p10"], p90=call["p90"])

    metric = "hot" if target.metric == "hot" else "cold"
    mine, theirs = one(run, target.version, metric), one(run, target.against, metric)
    if mine is None:
        broken = next((v for v in run["versions"] if v["name"] == target.version and v.get("error")), None)
        if broken is not None:
            return line("FAIL", note=f"{target.version}: {broken['error']}")
        return line(
            "MISSING" if target.version != OURS else "FAIL", note=f"no {metric} times of {target.version}"
        )
    if theirs is None:
        return line("MISSING", note=f"no {metric} times of {target.against}")
    found = {v["name"]: v for v in run["versions"]}
    a, b = found[mine], found[theirs]
    pairs = stats.ratios(b[metric]["samples"], a[metric]["samples"])
    scale = a["bytes"] / b["bytes"] if target.metric == "bandwidth" else 1.0
    ratio = stats.summarise([pair * scale for pair in stats.flat(pairs)])
    noise = run.get("noise", {}).get(metric)
    verdict = "-" if target.bound is None else "PASS" if ratio.median >= target.bound else "FAIL"
    near = noise is not None and target.bound is not None and abs(ratio.median / target.bound - 1) <= noise
    return line(
        verdict,
        version=mine,
        against=theirs,
        us=a[metric]["median"],
        against_us=b[metric]["median"],
        ratio=ratio.median,
        p10=ratio.p10,
        p90=ratio.p90,
        noise=noise,
        note="within noise of the bound" if near else "",
    )


def table(judgements: Sequence[Judgement]) -> str:
    """The judgements as aligned text."""
    head = ("item", "metric", "us", "against", "us", "ratio", "p10-p90", "bound", "noise", "verdict")
    rows = [head, *(_cells(j) for j in judgements)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _cells(j: Judgement) -> tuple[str, ...]:
    def number(value: float | None, form: str = "{:.2f}") -> str:
        return "" if value is None else form.format(value)

    item = f"{j.op} {'B' if j.op.startswith('gdn') else 'T'}={j.rows}"
    item += "" if j.version == OURS else f" [{j.version}]"
    host = j.metric == "host"
    sign = "" if j.bound is None else "<= " if host else ">= "
    span = "" if j.p10 is None or j.p90 is None else f"{j.p10:.3g}-{j.p90:.3g}"
    return (
        item,
        j.metric,
        number(j.us),
        j.against,
        number(j.against_us),
        number(j.ratio, "{:.3f}"),
        span,
        sign + number(j.bound, "{:.3g}"),
        number(j.noise, "{:.1%}"),
        j.verdict + (f" ({j.note})" if j.note else ""),
    )
