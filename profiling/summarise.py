"""`python -m profiling.summarise LOGDIR`: what profiling/gpu_check.sh left in LOGDIR, as one short page.

    python -m profiling.summarise LOGDIR [--markdown FILE] [--json FILE]
    python -m profiling.summarise LOGDIR --stage NAME     one stage's outcome in a line instead

Reads stages.tsv and the stages' logs and result files; whatever is absent is left out. The page names the
GPU and never the machine: no host name, no absolute path. Prints the page; exit code 1 if a stage failed or
a log does not say that it passed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from profiling import acceptance
from profiling.ncu import parse
from profiling.step.families import NAMES

SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")

_COUNTS = re.compile(r"(\d+) (passed|failed|skipped|deselected|xfailed|xpassed|errors?|warnings?)\b")
_SUMMARY = re.compile(
    r"=+ (?P<counts>.*\b(?:passed|failed|error|errors|skipped|no tests ran)\b.*) in [\d.]+s"
)
_QUIET_SUMMARY = re.compile(
    r"^(?P<counts>(?:\d+ \w+, )*\d+ (?:passed|failed|skipped|errors?|deselected|warnings?)) in [\d.]+s"
)
_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/\S+)")
_ERRORS = re.compile(r"ERROR SUMMARY: (\d+) errors?")
_HAZARDS = re.compile(r"RACECHECK SUMMARY: (\d+) hazards?")
_PATH = re.compile(r"(?<![\w.])/(?:[^\s/:'\"]+/)+")


@dataclass
class Stage:
    """One stage: how it ended, and what its log says. findings: what a sanitizer found, None for other
    stages and where it never said."""

    name: str
    rc: int
    seconds: int
    limit: int
    counts: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    findings: int | None = None

    @property
    def ok(self) -> bool:
        """Exit code 0, no failing test, some test run where it is a test stage, a sanitizer's word that it
        found nothing."""
        tested = self.name in ("tests", *SANITIZERS)
        clean = self.name not in SANITIZERS or self.findings == 0
        ran = not tested or self.counts.get("passed", 0) > 0
        bad = self.counts.get("failed", 0) + self.counts.get("errors", 0)
        return self.rc == 0 and clean and ran and not bad

    @property
    def outcome(self) -> str:
        """In words."""
        parts = [f"{count} {what}" for what, count in self.counts.items() if what != "warnings"]
        if self.name in SANITIZERS:
            parts.append("no summary of the tool" if self.findings is None else f"{self.findings} findings")
        if self.rc in (124, 137) and self.seconds >= self.limit:
            parts.append(f"stopped at its limit of {self.limit} s")
        elif self.rc:
            parts.append(f"exit code {self.rc}")
        return ", ".join(parts) or "done"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


def scrub(text: str) -> str:
    """Text without the folders of absolute paths."""
    return _PATH.sub("", text)


def pytest_counts(log: str) -> dict[str, int]:
    """Outcomes and their numbers, of the last closing line of pytest in a log; empty where there is none."""
    for line in reversed(log.splitlines()):
        match = _SUMMARY.search(line) or _QUIET_SUMMARY.match(line)
        if match:
            singular = {"error": "errors", "warning": "warnings"}
            return {singular.get(what, what): int(n) for n, what in _COUNTS.findall(match["counts"])}
    return {}


def findings(log: str) -> int | None:
    """What compute-sanitizer says that it found, over all of its summaries; None where it never said."""
    numbers = [int(n) for pattern in (_ERRORS, _HAZARDS) for n in pattern.findall(log)]
    return sum(numbers) if numbers else None


def read_stages(folder: Path) -> list[Stage]:
    """The stages that were run, in order, with what their logs say."""
    table = folder / "stages.tsv"
    stages = []
    for line in table.read_text().splitlines() if table.exists() else ():
        name, rc, seconds, limit = line.split("\t")
        stage = Stage(name, int(rc), int(seconds), int(limit))
        log = folder / f"{name}.log"
        text = log.read_text(errors="replace") if log.exists() else ""
        if name in ("tests", *SANITIZERS):
            stage.counts = pytest_counts(text)
            stage.failures = sorted({m[1] for line in text.splitlines() if (m := _FAILED.match(line))})
        if name in SANITIZERS:
            stage.findings = findings(text)
        stages.append(stage)
    return stages


def read_json(path: Path) -> dict[str, Any] | None:
    """A result file, or None where there is none or it is not whole."""
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return content


def condense(bench: Mapping[str, Any]) -> dict[str, Any]:
    """A benchmark's result without its raw samples."""
    runs = []
    for run in bench["runs"]:
        versions = [
            {
                "name": v["name"],
                "bytes": v["bytes"],
                "error": v["error"] and scrub(v["error"]),
                **{metric: _numbers(v[metric]) for metric in ("cold", "hot")},
            }
            for v in run["versions"]
        ]
        runs.append(
            {
                **{key: run[key] for key in ("op", "rows", "ranks", "served_by") if key in run},
                "error": run["error"] and scrub(run["error"].strip().splitlines()[-1]),
                "noise": run["noise"],
                "versions": versions,
                "host": {name: _numbers(call) for name, call in run.get("host", {}).items()},
            }
        )
    kept = (
        "date",
        "command",
        "host",
        "settings",
        "missing_peers",
        "acceptance",
        "ranks",
        "transport",
        "link",
    )
    return {"kind": bench.get("kind", "bench"), **{k: bench[k] for k in kept if k in bench}, "runs": runs}


def condense_step(step: Mapping[str, Any]) -> dict[str, Any]:
    """A decode step's result without its raw samples."""
    arms = {name: {**arm, "cold": _numbers(arm["cold"])} for name, arm in step["arms"].items()}
    return {**step, "arms": arms, "failures": [scrub(failure) for failure in step["failures"]]}


def _numbers(timing: Mapping[str, Any] | None) -> dict[str, float] | None:
    return {key: round(timing[key], 3) for key in ("median", "p10", "p90")} if timing else None


def summarise(folder: Path) -> dict[str, Any]:
    """All that LOGDIR holds, as data."""
    bench, demo = read_json(folder / "bench.json"), read_json(folder / "demo.json")
    step, ncu = read_json(folder / "decode_step.json"), read_json(folder / "ncu" / "ncu.json")
    collective, counters = read_json(folder / "collective.json"), read_json(folder / "counters.json")
    ranks = read_json(folder / "ranks.json")
    hosts = [(record or {}).get("host") or {} for record in (bench, demo, ranks, step, collective)]
    gpu = next((host["gpu"] for host in hosts if host.get("gpu")), None)
    kept = ("layers", "tokens", "launches", "graph_kernels", "ops", "latency", "failures")
    return {
        "gpu": gpu or "unknown GPU",
        "stages": [stage.to_json() | {"outcome": stage.outcome} for stage in read_stages(folder)],
        "bench": condense(bench) if bench else None,
        "demo": {key: demo[key] for key in kept if key in demo} if demo else None,
        "collective": {**condense(collective), "kind": "collective"} if collective else None,
        "ranks": condense(ranks) if ranks else None,
        "counters": counters,
        "decode_step": condense_step(step) if step else None,
        "ncu": ncu,
    }


def _grid(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", f"|{'|'.join([' --- '] * len(head))}|"]
    return [*lines, *(f"| {' | '.join(str(cell) for cell in row)} |" for row in rows), ""]


def markdown(summary: Mapping[str, Any]) -> str:
    """The page."""
    lines = [f"# Results on {summary['gpu']}", ""]
    bench, demo = summary["bench"], summary["demo"]
    if bench:
        host = bench["host"]
        versions = ", ".join(f"{name} {version}" for name, version in host["versions"].items())
        lines += [f"{bench['date']}, driver {host.get('nvml', {}).get('driver', 'unknown')}, {versions}.", ""]
    if summary["stages"]:
        cells = [
            (s["name"], "ok" if s["ok"] else "FAILED", s["outcome"], s["seconds"]) for s in summary["stages"]
        ]
        lines += ["## Stages", "", *_grid(("stage", "", "outcome", "s"), cells)]
        lines += [f"- FAILED {test}" for s in summary["stages"] for test in s["failures"]]
        lines += [""] if any(s["failures"] for s in summary["stages"]) else []
    if bench:
        lines += _bench_lines(bench)
    if demo:
        lines += _demo_lines(demo)
    if summary["collective"]:
        lines += _bench_lines(summary["collective"], "Collective, one rank over loopback")
    if summary["ranks"]:
        link = summary["ranks"]["link"]["one_way_us"]
        title = f"{summary['ranks']['ranks']} ranks, a GPU each; link one way {link:.3f} us"
        lines += _bench_lines(summary["ranks"], title)
    if summary["decode_step"]:
        lines += _step_lines(summary["decode_step"])
    if summary["ncu"]:
        kernels = [parse.Kernel(**kernel) for kernel in summary["ncu"]["kernels"]]
        lines += [
            "## Nsight Compute",
            "",
            f"{summary['ncu']['control']}.",
            "",
            "```",
            parse.table(kernels),
            "```",
        ]
    return "\n".join(lines).rstrip() + "\n"


def _bench_lines(bench: Mapping[str, Any], title: str = "Benchmark") -> list[str]:
    settings = bench["settings"]
    lines = [
        f"## {title}",
        "",
        f"`{bench['command']}`: {settings['blocks']} blocks of {settings['samples']} samples, versions "
        f"interleaved, {settings['flush_bytes'] >> 20} MiB written before every cold sample.",
        "",
    ]
    judged = [acceptance.Judgement(**entry) for entry in bench["acceptance"]]
    if judged:
        lines += ["```", acceptance.table(judged), "```", ""]
    rows = []
    for run in bench["runs"]:
        name = f"{run['op']}, {run['rows']} row{'s' if run['rows'] > 1 else ''}"
        if run["error"]:
            rows.append((name, "", run["error"], ""))
        for v in run["versions"]:
            cold = v["cold"]
            span = f"{cold['median']:.2f} ({cold['p10']:.2f}-{cold['p90']:.2f})" if cold else v["error"] or ""
            rows.append((name, v["name"], span, f"{v['hot']['median']:.2f}" if v["hot"] else ""))
    lines += _grid(("work", "version", "cold us (p10-p90)", "hot us"), rows)
    calls = [
        (run["op"], run["rows"], name, f"{call['median']:.2f}")
        for run in bench["runs"]
        for name, call in run["host"].items()
    ]
    return [*lines, *(_grid(("eager call", "rows", "form", "host us"), calls) if calls else [])]


def _step_lines(step: Mapping[str, Any]) -> list[str]:
    shape, ratio, launches = step["shape"], step["ratio"], step["launches"]
    lines = [
        f"## Decode step, {shape['layers']} layers, {shape['experts']} experts, context {shape['context']}",
        "",
        f"`{step['command']}`: fused is {ratio['median']:.3f} times as fast "
        f"({ratio['p10']:.3f}-{ratio['p90']:.3f}), noise {step['noise']:.1%}. "
        f"Launches {launches['got']}, expected {launches['expected']}.",
        "",
        *(f"- FAILED {failure}" for failure in step["failures"]),
        "",
    ]
    arms = step["arms"]
    cells = [(n, f"{a['cold']['median'] / 1e3:.3f}", a["kernels"] or "?") for n, a in arms.items()]
    lines += _grid(("arm", "ms", "kernels"), cells)
    traces = [arms[name]["trace"] for name in ("unfused", "fused")]
    if all(traces):
        tables = [{row["family"]: row for row in trace["families"]} for trace in traces]
        rows = []
        for family in NAMES:
            found = [table.get(family) for table in tables]
            if any(found):
                rows.append((family, *(f"{r['us']:.0f} ({r['launches']})" if r else "" for r in found)))
        lines += _grid(("us busy (launches)", "unfused", "fused"), rows)
    return lines


def _demo_lines(demo: Mapping[str, Any]) -> list[str]:
    latency = ", ".join(f"{name} {value:.3f}" for name, value in demo["latency"].items() if value is not None)
    lines = [
        f"## Demo, {demo['layers']} layers",
        "",
        f"Latency: {latency}. Launches: {demo['launches']}.",
        "",
    ]
    ops = []
    for name, op in demo["ops"].items():
        error = "not finite" if op["max_err"] is None else f"{op['max_err']:.2e}"
        verdict = "ok" if op["ok"] else "FAILED"
        ops.append((name, op["backend"], op["target"], error, f"{op['tolerance']:.2e}", verdict))
    return [*lines, *_grid(("operator", "backend", "target", "error", "tolerance", ""), ops)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the page; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m profiling.summarise", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("folder", type=Path, metavar="LOGDIR")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the page there too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the same as data")
    parser.add_argument("--stage", metavar="NAME", help="print this stage's outcome alone; 1 if it failed")
    options = parser.parse_args(arguments)
    if not options.folder.is_dir():
        parser.error(f"{options.folder}: no such folder")
    if options.stage:
        stage = next((s for s in read_stages(options.folder) if s.name == options.stage), None)
        if stage is None:
            parser.error(f"--stage: got {options.stage!r}, which has not run")
        print(stage.outcome)
        return 0 if stage.ok else 1
    summary = summarise(options.folder)
    page = markdown(summary)
    print(page, end="")
    if options.markdown:
        options.markdown.write_text(page)
    if options.json:
        options.json.write_text(json.dumps(summary, indent=1) + "\n")
    return 0 if summary["stages"] and all(stage["ok"] for stage in summary["stages"]) else 1


if __name__ == "__main__":
    sys.exit(main())
