"""`python -m profiling.decode_step`: one rank's whole decode step, once with separate launches and once
with this package's kernels.

    python -m profiling.decode_step [--layers 48] [--experts 512] [--context 8192] [--seed 0]
                                    [--gate boundary|beside] [--json FILE] [--blocks 7] [--samples 31]
                                    [--quick] [--no-trace]

Both arms (step/arms.py) have the same weights, inputs and frame (step/frame.py); all-reduces run over the
loopback transport of `collectives`. They are compared layer by layer, each is captured as one CUDA graph, its
launches are counted, and the graphs are timed side by side by the protocol of protocol.py, the fused one
twice for the noise floor. Started by torchrun (2, 4 or 8 processes), the processes are the ranks, one a GPU,
with the same weights; a sample is that of the slowest (world.py), and the first one speaks. Exit code: 1 if
the arms differ, a count is not as expected, or a whole step is less than 1.15 times as fast fused; 2 where it
cannot run: no GPU of a supported target, not enough memory.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

import bindings
from bindings import files
from bindings.targets import TARGETS, target_of
from profiling import host, peers, protocol, stats, world
from profiling.bench import QUICK
from profiling.console import phase, say, write
from profiling.decode import is_gdn
from profiling.graphs import count_by_kernel
from profiling.step import arms, compare, families
from profiling.step.model import Shape, State, StepModel

SCHEMA = 1
TARGET = 1.15
RANKS = 4
FUSED, AGAIN, UNFUSED = "fused", "fused, again", "unfused"
SPARE_BYTES = 4 << 30
"""Beside the weights: states of both arms, the flushed buffer, graphs, the context."""

BOUNDARY, GDN = ("hc_apply_norm", "hc_boundary"), ("gdn_packed_decode",)
FINALIZE, REDUCED = "moe_finalize", "finalize_all_reduce"
"""Kernels of ours that carry out what is counted. A plain all-reduce is the reducing kernel without its
finalize."""


def communicator(device: torch.device, shape: Shape) -> arms.Alone | arms.Communicator:
    """This rank's end among torchrun's processes; without them, one of RANKS whose peers are itself. None,
    which is said, where its memory cannot be had."""
    from collectives.communicator import Communicator
    from collectives.errors import CollectiveError
    from collectives.launch import Form

    model, size = shape.model, world.size()
    sizes: dict[str, Any] = {"hidden": model.hidden, "max_tokens": 1, "top_k": model.top_k}
    sizes["forms"] = (Form(),)  # gated, fp32 weights: what a step calls
    try:
        if size > 1:
            comm = Communicator.from_process_group(**sizes, device=device)
            return arms.Communicator(
                comm, f"collectives, {size} ranks, {comm.explain().splitlines()[0]}", size
            )
        comm = Communicator.loopback(RANKS, device, **sizes)
    except CollectiveError as error:
        if size > 1:
            raise
        say(f"no loopback ({error}): all-reduces are left out of both arms")
        return arms.Alone()
    return arms.Communicator(comm, f"collectives, loopback of {RANKS} ranks", RANKS)


def counts(
    fused: Sequence[str] | None, unfused: Sequence[str] | None, comm: arms.Alone | arms.Communicator
) -> dict[str, int] | None:
    """Launches of what is fused, from the kernels of both captured steps; None where the driver does not
    tell them.

    What reduces in the unfused step is plain all-reduces: a reducing kernel that it does not have is a
    tail."""
    if fused is None or unfused is None:
        return None
    named = count_by_kernel(fused, (*BOUNDARY, *GDN, FINALIZE))
    tail = named[FINALIZE]
    if comm.fuses:
        plain = set(unfused)
        tail = count_by_kernel((name for name in fused if name not in plain), (REDUCED,))[REDUCED]
    return {"boundary": sum(named[n] for n in BOUNDARY), "tail": tail, "gdn": sum(named[n] for n in GDN)}


class Captured:
    """An arm's step as one graph, with a state of its own that replays advance."""

    def __init__(self, model: StepModel, arm: arms.Fused | arms.Unfused) -> None:
        self.state: State = model.state.clone()
        self.graph = protocol.capture(lambda: model.step(arm, self.state))
        self.state.copy_(model.state)


def measure(
    model: StepModel,
    comm: arms.Alone | arms.Communicator,
    options: argparse.Namespace,
    group: world.World | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Compares, captures, counts, times and traces; the record and what failed. group: the ranks whose step
    it is, of which the slowest's time counts; None: this one alone."""
    found = peers.discover()
    for package, reason in found.missing.items():
        say(f"no {package}: {reason}")
    fused, unfused = arms.Fused(comm, options.gate), arms.Unfused(comm, found, model.shape.model)
    with phase("arms against each other, layer by layer", 2 * model.shape.layers) as tick:
        difference = compare.compare(model, unfused, fused, tick)
        compare.settle()
    shares = f"worst layer {difference.layer:.2%}, states {difference.state:.2%}, step {difference.step:.2%}"
    say(f"    of the RMS: {shares}")
    failures = difference.failures
    captured: dict[str, Captured] = {}
    with phase("capture", 3) as tick:
        for name, arm in ((FUSED, fused), (AGAIN, fused), (UNFUSED, unfused)):
            captured[name] = Captured(model, arm)
            tick()
    failures += repeats(model, fused, captured[FUSED])
    device = protocol.CudaDevice() if group is None else group.device
    graphs: dict[str, protocol.Graph] = {name: c.graph for name, c in captured.items()}
    settings = options.settings
    with phase(f"cold {settings.blocks} x {settings.samples}", settings.blocks) as tick:
        samples = protocol.cold(device, graphs, settings, None, tick)
    if group is not None:
        samples = group.slowest(samples)
    record: dict[str, Any] = {
        "arms": {name: about(captured[name], samples[name]) for name in captured},
        "served_by": {FUSED: fused.describe(), UNFUSED: unfused.describe()},
        "difference": difference.to_json(),
        "by_rank": {} if group is None else {"cold": group.by_rank},
        "noise": stats.noise(samples[FUSED], samples[AGAIN]),
        "settings": {**asdict(settings), "flush_bytes": device.flush_bytes},
    }
    launched = counts(captured[FUSED].graph.kernels, captured[UNFUSED].graph.kernels, comm)
    expected = model.expected()
    record["launches"] = {"expected": expected, "got": launched}
    if launched is None:
        failures.append("launches: the driver does not tell the graph's kernels")
    elif launched != expected:
        failures.append(f"launches: got {launched}, expected {expected}")
    ratio = stats.summarise(stats.flat(stats.ratios(samples[UNFUSED], samples[FUSED])))
    record["ratio"] = ratio.to_json()
    if not options.no_trace:
        with phase("trace of a replay", 2) as tick:
            for name in (FUSED, UNFUSED):
                record["arms"][name]["trace"] = traced(captured[name], model.shape.layers, group)
                tick()
    return record, failures


def about(captured: Captured, blocks: list[list[float]]) -> dict[str, Any]:
    """Times and kernels of one arm. Times are of whole steps, caches flushed before each."""
    kernels = captured.graph.kernels
    rounded = [[round(sample, 3) for sample in block] for block in blocks]
    return {
        "cold": {**stats.summarise(stats.flat(blocks)).to_json(), "samples": rounded},
        "kernels": None if kernels is None else len(kernels),
        "by_family": None if kernels is None else dict(Counter(map(families.family, kernels))),
        "trace": None,
    }


def repeats(model: StepModel, arm: arms.Fused, captured: Captured) -> list[str]:
    """Whether a replay of the fused step gives the bits of the eager one, states included."""
    held = model.state.clone()
    eager = model.step(arm, held).clone()
    captured.state.copy_(model.state)
    captured.graph.replay()
    torch.cuda.synchronize()
    same = torch.equal(captured.graph.result, eager)
    same &= all(torch.equal(a, b) for a, b in zip(captured.state.tensors(), held.tensors(), strict=True))
    return [] if same else ["fused: a replay differs from the eager step"]


def traced(captured: Captured, layers: int, group: world.World | None = None) -> dict[str, Any] | None:
    """The table by family of one replay, and the spans of four layers in its middle for a timeline. Ranks
    are lined up before it, or the first all-reduce would wait for another's profiler."""

    def replay() -> None:
        if group is not None:
            group.line_up()
        captured.graph.replay()

    try:
        spans = families.trace(replay)
    except Exception as error:  # a picture beside the timing: whatever the profiler does, the timing stands
        say(f" no trace: {error}", end="")
        return None
    length = max(s.end for s in spans)
    middle = layers // 2 // 4 * 4
    start, end = length * middle / layers, length * min(middle + 4, layers) / layers
    shown = [
        [s.start, round(s.end - s.start, 3), families.NAMES.index(s.family)]
        for s in spans
        if s.start >= start and s.end <= end
    ]
    return {
        "us": round(length, 2),
        "idle_us": families.idle(spans),
        "families": families.table(spans),
        "names": list(families.NAMES),
        "spans": shown,
        "shown": f"about layers {middle} to {min(middle + 4, layers) - 1}",
    }


def report(record: dict[str, Any]) -> str:
    """The record as text."""
    lines = ["", f"{'':<14}{'us':>10}  {'p10-p90':<19}{'kernels':>8}"]
    for name, arm in record["arms"].items():
        cold = arm["cold"]
        span = f"{cold['p10']:>8.1f}-{cold['p90']:<10.1f}"
        lines.append(f"{name:<14}{cold['median']:>10.1f}  {span}{arm['kernels'] or '?':>8}")
    ratio = record["ratio"]
    span = f"{ratio['p10']:.3f}-{ratio['p90']:.3f}"
    lines.append(
        f"fused is {ratio['median']:.3f} times as fast ({span}), A/A noise floor {record['noise']:.2%}"
    )
    lines.append(f"launches {record['launches']['got']}, expected {record['launches']['expected']}")
    traces = {name: record["arms"][name]["trace"] for name in (UNFUSED, FUSED)}
    if all(traces.values()):
        rows = {name: {r["family"]: r for r in trace["families"]} for name, trace in traces.items()}
        lines += ["", f"{'family, us busy (launches)':<28}{UNFUSED:>18}{FUSED:>18}"]
        for name in families.NAMES:
            cells = [rows[arm].get(name) for arm in (UNFUSED, FUSED)]
            if any(cells):
                shown = ("-" if c is None else f"{c['us']:.1f} ({c['launches']})" for c in cells)
                lines.append(f"{name:<28}" + "".join(f"{cell:>18}" for cell in shown))
        lines.append(
            f"{'nothing ran':<28}" + "".join(f"{traces[a]['idle_us']:>18.1f}" for a in (UNFUSED, FUSED))
        )
    return "\n".join(lines)


def run(options: argparse.Namespace, group: world.World | None = None) -> int:
    """The step; its exit code. group: as `measure`; what is said and written is the first rank's."""
    device = torch.device("cuda", torch.cuda.current_device())
    shape = Shape(layers=options.layers, experts=options.experts, context=options.context)
    about_host = host.describe(device)
    say(f"{about_host['gpu']}, {about_host['nvml']}, {about_host['versions']}")
    free, _ = torch.cuda.mem_get_info(device)
    short = None
    if shape.bytes + SPARE_BYTES > free:
        short = (
            f"{shape.layers} layers of {shape.experts} experts need {shape.bytes / 1e9:.0f} GB, "
            f"{free / 1e9:.0f} GB are free; --layers or --experts shrink it"
        )
    first = group is None or group.rank == 0
    if (short := short if group is None else group.agreed(short)) is not None:
        if first:
            print(f"profiling.decode_step: {short}", file=sys.stderr)
        return 2
    layers = f"{shape.layers} layers, {shape.gdn_layers} of GDN"
    say(f"step: {layers}, {shape.experts} experts, context {shape.context}")
    comm = communicator(device, shape)
    with phase(f"weights, {shape.bytes / 1e9:.0f} GB"):
        model = StepModel(shape, device, options.seed, comm.added)
    record, failures = measure(model, comm, options, group)
    whole = (shape.layers, shape.experts, shape.context) == (Shape.layers, Shape.experts, Shape.context)
    if whole and record["ratio"]["median"] < TARGET:
        failures.append(f"ratio: {record['ratio']['median']:.3f}, asked for is {TARGET}")
    if group is not None:
        everyone = group.meet(failures, "failures")
        failures = [f"rank {rank}: {one}" for rank, found in enumerate(everyone) for one in found]
    result = {
        "schema": SCHEMA,
        "kind": "decode_step",
        "command": options.command,
        "date": host.today(),
        "host": {**about_host, "nvml_after": host.clocks(device)},
        "shape": {
            "layers": shape.layers,
            "gdn_layers": sum(is_gdn(i) for i in range(shape.layers)),
            "experts": shape.experts,
            "context": shape.context,
            "seed": options.seed,
            "gate": options.gate,
            "ranks": world.size(),
        },
        "target": TARGET if whole else None,
        **record,
        "failures": failures,
    }
    say(report(record))
    if options.json and first:
        write(options.json, result)
    for failure in failures:
        say(f"FAILED {failure}")
    return 1 if failures else 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command-line options."""
    defaults, whole = protocol.Settings(), Shape()
    parser = argparse.ArgumentParser(
        prog="python -m profiling.decode_step", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--layers", type=int, default=whole.layers, help=f"layers ({whole.layers})")
    parser.add_argument(
        "--experts", type=int, default=whole.experts, help=f"routed experts ({whole.experts})"
    )
    parser.add_argument(
        "--context", type=int, default=whole.context, help=f"tokens attended to ({whole.context})"
    )
    parser.add_argument(
        "--gate",
        choices=arms.GATES,
        default=arms.GATES[0],
        help=f"the fused arm's gate: in the boundary's launch, or beside the block ({arms.GATES[0]})",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and inputs (0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything, raw samples too")
    parser.add_argument("--blocks", type=int, help=f"blocks of samples ({defaults.blocks})")
    parser.add_argument("--samples", type=int, help=f"samples a block ({defaults.samples})")
    parser.add_argument(
        "--quick", action="store_true", help="few samples: for trying things, not for publishing"
    )
    parser.add_argument("--no-trace", action="store_true", help="leave the table by kernel family out")
    options = parser.parse_args(arguments)
    for name, least, most in (
        ("layers", 1, 4 * whole.layers),
        ("experts", whole.model.top_k, 4096),
        ("context", 1, 1 << 20),
    ):
        if not least <= (got := getattr(options, name)) <= most:
            parser.error(f"--{name}: got {got}, allowed {least} to {most}")
    if options.experts & (options.experts - 1):
        parser.error(
            f"--experts: got {options.experts}, allowed powers of two, which the router's kernel asks for"
        )
    if options.json and (obstacle := files.obstacle(options.json)):
        parser.error(f"--json: {options.json}: {obstacle}")
    chosen = {k: v for k, v in QUICK.items() if k in ("blocks", "samples")} if options.quick else {}
    chosen |= {n: v for n in ("blocks", "samples") if (v := getattr(options, n)) is not None}
    try:
        options.settings = replace(defaults, **chosen)
    except ValueError as error:
        parser.error(str(error))
    options.command = host.command("profiling.decode_step", arguments)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the step on command-line arguments and returns its exit code."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    if world.size() > 1 and (why := world.obstacle()) is not None:
        if world.speaks():
            print(f"profiling.decode_step: {why}; nothing was timed", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("profiling.decode_step: torch sees no CUDA device; nothing was timed", file=sys.stderr)
        return 2
    if target_of(torch.device("cuda", torch.cuda.current_device())) is None:
        name = torch.cuda.get_device_name()
        print(f"profiling.decode_step: {name} is none of {', '.join(TARGETS)}", file=sys.stderr)
        return 2
    # forced: a call that the kernels cannot serve must be an error, not a timing of the reference
    with torch.inference_mode(), bindings.backend("cute"), world.joined() as first, world.quiet(not first):
        if world.size() == 1:
            return run(options)
        with world.meeting(torch.device("cuda", torch.cuda.current_device())) as (group, _):
            return run(options, group)


if __name__ == "__main__":
    sys.exit(main())
