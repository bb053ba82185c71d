"""`make demo`: one decode step of a TP4 rank with the model's shapes, checked against float64.

    python -m profiling.demo [--layers N] [--tokens T] [--seed S] [--device auto|cpu|cuda] [--backend B]
    [--boundary separate|fused] [--json FILE]

Runs the chain of `profiling.decode` on the GPU if there is one and on the CPU otherwise. Of every operator,
calls spread over the step are judged on their actual inputs. On a GPU the step is captured as a CUDA graph,
the graph's kernels are counted, and its replay has to repeat the eager step bit for bit. Exit code: 1 if any
of that fails or FILE cannot be written in the end, 2 if the step cannot run as asked.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import bindings
from bindings import compiler, emulated, files, link
from bindings.dispatch import BACKENDS, ENVIRONMENT, selected
from bindings.errors import BackendUnavailable
from bindings.tolerance import Verdict
from profiling import host, protocol
from profiling.decode import BOUNDARIES, LAYERS, DecodeChain
from profiling.graphs import count_by_kernel, kernel_names
from profiling.observe import OPS, Call, spread, watch

LAYERS_ON_CPU = 8
MAX_LAYERS = 4 * LAYERS
"""Every layer has weights of its own: these take 5 GB."""

SEEDS = range(-(2**63), 2**64)
"""What torch.Generator takes."""

STAND_INS = (
    "  of this package's operators; attention, experts, projections and embedding are pointwise stand-ins, "
    "so this is no model's latency"
)
CHECKED_CALLS = 4
EAGER_STEPS, REPLAYS = {"cpu": 3, "cuda": 20}, 50


@dataclass
class OpReport:
    """What the demo says of one operator."""

    backend: str
    implementation: str
    launches: int | None
    target: str | None
    calls: int
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def worst(self) -> Verdict:
        """The comparison that came closest to failing, or that failed."""
        return max(
            self.verdicts, key=lambda v: (not v.ok, v.max_err / v.tolerance if v.tolerance else v.max_err)
        )

    @property
    def ok(self) -> bool:
        return all(verdict.ok for verdict in self.verdicts)

    def to_json(self) -> dict[str, Any]:
        worst = self.worst
        return {
            "backend": self.backend,
            "target": self.target,
            "max_err": worst.max_err if math.isfinite(worst.max_err) else None,
            "tolerance": worst.tolerance,
            "ok": self.ok,
            "calls": self.calls,
            "results_checked": len(self.verdicts),
        }


@contextlib.contextmanager
def stage(text: str) -> Iterator[None]:
    """Says what is being done, then how long it took; progress dots go between."""
    print(f"{text} ", end="", flush=True)
    start = time.perf_counter()
    yield
    print(f" {time.perf_counter() - start:.1f} s", flush=True)


def dot(_: object = None) -> None:
    print(".", end="", flush=True)


def explain(calls: Sequence[Call], counts: Counter[str]) -> dict[str, OpReport]:
    """Which implementation each operator's calls got."""
    reports = {}
    for call in calls:
        if call.op not in reports:
            plan = bindings.explain(call.op, **call.inputs)
            assert plan.backend is not None, plan.reason
            assert plan.implementation is not None
            reports[call.op] = OpReport(
                plan.backend, plan.implementation, plan.launches, plan.target, counts[call.op]
            )
    return {op: reports[op] for op in OPS if op in reports}


def table(reports: dict[str, OpReport]) -> str:
    """The operators, one a line."""
    columns = "{:<22} {:<10} {:<8} {:>5} {:>8} {:>9} {:>9}  {}"
    lines = [columns.format("operator", "backend", "target", "calls", "results", "error", "tolerance", "")]
    for op, report in reports.items():
        worst, checked = report.worst, len(report.verdicts)
        numbers = f"{worst.max_err:.2e}", f"{worst.tolerance:.2e}", "ok" if report.ok else "FAILED"
        lines.append(
            columns.format(op, report.backend, report.target or "-", report.calls, checked, *numbers)
        )
        lines += [f"    {verdict}" for verdict in report.verdicts if not verdict.ok]
    return "\n".join(line.rstrip() for line in lines)


def eager_ms(chain: DecodeChain) -> float:
    """Median wall-clock time of a step, the device's work included."""
    times = []
    for _ in range(EAGER_STEPS[chain.device.type]):
        start = time.perf_counter()
        chain.step()
        if chain.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    """Median time of a replay between two events on its stream."""
    times: list[float] = []
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(REPLAYS):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


@dataclass
class Captured:
    """A step as a CUDA graph: operators called in its capture, its kernels by operator, and what is wrong."""

    launches: Counter[str]
    kernels: Counter[str] | None
    graph_ms: float
    failures: list[str]


def capture(chain: DecodeChain, eager: list[torch.Tensor], reports: dict[str, OpReport]) -> Captured:
    """Captures the step, replays it against the outcome of the eager one, counts its kernels and times it."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    torch.cuda.synchronize()
    with watch() as seen, protocol.no_collection(), torch.cuda.graph(graph):
        x = chain.step()
    graph.instantiate()
    failures = []
    chain.reset()
    graph.replay()
    if not all(torch.equal(a, b) for a, b in zip(eager, chain.outcome(x), strict=True)):
        failures.append("graph: a replay differs from the eager step")
    kernels = None
    try:
        kernels = count_by_kernel(kernel_names(graph), seen.counts)
    except (ImportError, RuntimeError) as error:
        print(f"the graph's kernels could not be counted: {error}")
    else:
        for op, report in reports.items():
            if report.launches is None:
                continue  # hc_mix by GEMMs, the reference: no kernel has the operator's name
            expected = report.launches * seen.counts[op]
            if kernels[op] != expected:
                failures.append(f"graph: {kernels[op]} kernels of {op}, expected {expected}")
    return Captured(seen.counts, kernels, replay_ms(graph), failures)


def emulated_layers(options: argparse.Namespace) -> list[str]:
    """Runs layers of a chain of their own through the kernels themselves, in the emulator, every call
    checked as it runs and judged; what is wrong."""
    name = emulated.target()
    print(f"the kernels as compiled for {name}, in the emulator, each launch checked as it runs:")
    chain = DecodeChain(options.emulate, options.tokens, seed=options.seed, boundary=options.boundary)
    calls = {op: tuple(range(count)) for op, count in chain.expected_calls().items()}
    with bindings.backend("emulator"):
        with stage(f"{options.emulate} layer(s), compiled, translated and run"), watch(calls) as seen:
            chain.step(progress=dot)
        reports = explain(seen.calls, seen.counts)
    for call in seen.calls:
        reports[call.op].verdicts += call.verdicts()
    print(f"\n{table({op: report for op, report in reports.items() if seen.counts[op]})}\n")
    return [f"emulated {op}: out of tolerance" for op, report in reports.items() if not report.ok]


def emulates(options: argparse.Namespace) -> bool:
    """Whether a plain `make demo` shows the kernels too: without a GPU, where the compilers are there. Where
    one is missing, says so."""
    plain = options.device == "cpu" and options.layers is None and options.backend is None
    if not plain or selected().backend != "auto":
        return False
    missing = [] if compiler.available() else ["nvidia-cutlass-dsl"]
    missing += [] if link.compiler() else ["a C compiler (CC, else cc, gcc or clang)"]
    if missing:
        print(f"no layer runs through the emulated kernels: that needs {' and '.join(missing)}")
    return not missing


def run(options: argparse.Namespace) -> int:
    """The demo itself; its exit code."""
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    about = host.describe(device)
    print(f"host: {about['gpu'] or 'no GPU'}, {about['system']} {about['machine']}, {about['cpus']} CPUs")
    print("      " + ", ".join(f"{name} {version}" for name, version in about["versions"].items()))
    print(f"step: {options.layers} layers, {options.tokens} token(s), bf16, a TP4 rank, seed {options.seed}")

    with stage("weights, a set for each boundary"):
        chain = DecodeChain(options.layers, options.tokens, device, options.seed, boundary=options.boundary)
    expected = chain.expected_calls()
    if device.type == "cuda":
        print("kernels, compiled or loaded:")
        warm = bindings.WarmupConfig(model=chain.config, batch_sizes=(options.tokens,), devices=(device,))
        bindings.warmup(warm, progress=lambda line: print(f"  {line}", flush=True))
    with stage("first step"):
        chain.step(progress=dot)
        chain.reset()
    with stage("checked step"), watch({op: spread(expected[op], CHECKED_CALLS) for op in OPS}) as seen:
        eager = chain.outcome(chain.step(progress=dot))
    reports = explain(seen.calls, seen.counts)
    with stage(f"against float64, up to {CHECKED_CALLS} calls of each operator"):
        for call in seen.calls:
            reports[call.op].verdicts += call.verdicts()
            dot()
    print(f"\n{table(reports)}")
    print("error: of the result closest to its tolerance; rounding costs half a unit in the last place\n")
    failures = [f"{op}: out of tolerance" for op, report in reports.items() if not report.ok]

    if options.emulate:
        failures += emulated_layers(options)
    latency: dict[str, float | None] = {"eager_ms": eager_ms(chain), "graph_ms": None}
    captured = capture(chain, eager, reports) if device.type == "cuda" else None
    launches, kernels = seen.counts, None
    if captured is not None:
        launches, kernels = captured.launches, captured.kernels
        latency["graph_ms"] = captured.graph_ms
        failures += captured.failures
    if dict(launches) != {op: count for op, count in expected.items() if count}:
        failures.append(f"launches: got {dict(launches)}, expected {expected}")
    what = "step (operator calls)" if captured is None else "captured step"
    print(f"launches of one {what}: {', '.join(f'{launches[op]} {op}' for op in expected if expected[op])}")
    if kernels is not None:
        print(f"  in the graph, by kernel: {dict(kernels)}, {kernels.total()} in all")
    print("latency: " + ", ".join(f"{way[:-3]} {ms:.3f} ms" for way, ms in latency.items() if ms is not None))
    print(STAND_INS)

    if options.json:
        result = {
            "host": about,
            "layers": options.layers,
            "tokens": options.tokens,
            "seed": options.seed,
            "boundary": options.boundary,
            "launches": {op: launches[op] for op in expected},
            "graph_kernels": kernels,
            "ops": {op: report.to_json() for op, report in reports.items()},
            "latency": latency,
            "failures": failures,
        }
        try:
            options.json.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
            print(f"wrote {options.json}")
        except OSError as error:
            failures.append(f"--json: {options.json}: {error.strerror}")
    for failure in failures:
        print(f"FAILED {failure}")
    print("FAILED" if failures else "ok")
    return 1 if failures else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Command-line options, with the defaults that depend on the device."""
    parser = argparse.ArgumentParser(
        prog="python -m profiling.demo", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--layers", type=int, help=f"layers (48 on a GPU, {LAYERS_ON_CPU} on a CPU)")
    parser.add_argument("--tokens", type=int, default=1, help="rows of the step (1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and inputs (0)")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to run (auto)"
    )
    parser.add_argument("--backend", choices=BACKENDS, help="force one backend for every operator")
    parser.add_argument(
        "--boundary",
        choices=BOUNDARIES,
        default=BOUNDARIES[0],
        help="separate: a write prepares the next norm (hc_apply_norm), and the gate runs beside the block; "
        "fused: it prepares the next gate too (hc_boundary)",
    )
    parser.add_argument(
        "--emulate",
        type=int,
        metavar="N",
        help="layers to run through the emulated kernels as well (1 on a CPU if nothing else is asked for, "
        "else 0)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was printed as JSON")
    options = parser.parse_args(arguments)
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device")
    if options.emulate is None:
        options.emulate = int(emulates(options))
    if not 0 <= options.emulate <= MAX_LAYERS:
        parser.error(f"--emulate: got {options.emulate}, allowed 0 to {MAX_LAYERS}")
    if options.layers is None:
        options.layers = LAYERS if options.device == "cuda" else LAYERS_ON_CPU
    if not 1 <= options.layers <= MAX_LAYERS:
        parser.error(f"--layers: got {options.layers}, allowed 1 to {MAX_LAYERS}")
    if options.tokens < 1:
        parser.error(f"--tokens: got {options.tokens}, allowed integers >= 1")
    if options.seed not in SEEDS:
        parser.error(f"--seed: got {options.seed}, allowed -2**63 to 2**64 - 1")
    if options.backend is None and selected().backend not in BACKENDS:
        parser.error(f"{ENVIRONMENT}: got {selected().backend!r}, allowed {', '.join(BACKENDS)}")
    obstacle = files.obstacle(options.json) if options.json is not None else None
    if obstacle:
        parser.error(f"--json: {options.json}: {obstacle}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demo on command-line arguments and returns its exit code."""
    options = parse(arguments)
    try:
        with (
            torch.inference_mode(),
            bindings.backend(options.backend) if options.backend else contextlib.nullcontext(),
        ):
            return run(options)
    except BackendUnavailable as error:
        print(f"\n{error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
