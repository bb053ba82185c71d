"""`python -m profiling.bench`: times the kernels by the protocol of protocol.py, beside floors and
published kernels.

    python -m profiling.bench [--ops A,B] [--rows 1,4] [--peers] [--without torch.compile] [--json FILE]
                              [--gdn-tiles 8,16,32] [--blocks 7] [--samples 31] [--quick] [--no-host]
    torchrun --nproc-per-node N -m profiling.bench [--ops all_reduce,moe_finalize_all_reduce] [--peers] ...
    python -m profiling.bench --counters [--targets sm_90a,sm_100a] [--ops ...] [--rows ...] [--json FILE]

A run is one piece of work with one number of rows (cases.py). Every version of it is captured, replayed into
poisoned outputs and checked against float64 before it is timed. Ours is timed against itself first: what two
captures of one call differ by is printed and is the noise floor, under which nothing is claimed ("~" in the
tables). Then all versions are interleaved: ours twice, an empty kernel, what the piece has as a floor, and
with --peers the published kernels and torch. The last lines judge the runs by acceptance.py. Exit code: 1 if
an item fails or a version of ours is wrong, 2 without a GPU of a supported target.

What ranks do together is timed with real ones, a process and a GPU each, which torchrun starts: ranks.py.
Rank 0 speaks and writes.

With --counters nothing is timed and no GPU is needed: the emulator runs every operator once for every target
and counts (counters.py).
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bindings
from bindings.targets import TARGETS as COMPILE_TARGETS
from bindings.targets import target_of
from profiling import acceptance, cases, counters, floors, host, ours, peers, protocol, stats, world
from profiling.acceptance import AGAIN, COPY, COPY_SAME, EMPTY, GEMMS, OURS, READ, SEPARATE
from profiling.cases import Case, Check
from profiling.console import no_file, phase, say, write

SCHEMA = 1
DEFAULT_ROWS = {"gdn_packed_decode": (1, 64, 256), "hc_mix": (1, 4, 8, 16, 32)}
COPY_FROM_ROWS = 64
QUICK = {"blocks": 2, "samples": 11, "host_blocks": 5}


@dataclass
class Version:
    """One thing that is timed. make: compiles, allocates, and gives the call that is captured. check:
    judges what a replay wrote, given the call's result; None for what has no result. results: names the
    tensors in the call's result, which are poisoned before the replay. bytes: what it must move."""

    name: str
    make: Callable[[], Callable[[], Any]]
    bytes: int
    check: Callable[[Any], Check] | None = None
    results: Callable[[Any], Mapping[str, Tensor]] | None = None
    error: str | None = None
    worst: float | None = None
    kernels: list[str] | None = None
    call: Callable[[], Any] | None = field(default=None, repr=False)
    graph: protocol.Graph | None = field(default=None, repr=False)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "bytes": self.bytes,
            "error": self.error,
            "worst_error_of_allowed": self.worst,
            "kernels": self.kernels,
            "cold": None,
            "hot": None,
        }


def versions_of(case: Case, found: peers.Found | None, tiles: Sequence[int]) -> Iterator[Version]:
    """Everything that a run of `case` times, ours first."""

    def results(returned: Any) -> Mapping[str, Tensor]:
        return cases.call_results(case, returned)

    def mine(name: str, make: Callable[[], Callable[[], Any]]) -> Version:
        return Version(name, make, case.bytes, lambda returned: case.check(results(returned)), results)

    yield mine(OURS, partial(ours.graph_call, case))
    yield mine(AGAIN, partial(ours.graph_call, case))
    if case.op == "gdn_packed_decode":
        for tile in tiles:
            yield mine(f"tile {tile}", partial(ours.tile_call, case, tile))
    if case.op == "hc_boundary":
        yield mine(SEPARATE, partial(ours.separate_call, case))
    yield Version(EMPTY, partial(floors.empty, case.device), 0)
    if case.op == "shared_gate":
        x, weight = case.args["x"], case.args["weight"]
        for ctas, threads in floors.READ_SHAPES:
            make = partial(floors.read, x, weight, ctas, threads)
            check = partial(floors.check_read, x, weight, ctas, threads)
            yield Version(f"{READ} {ctas}x{threads}", make, case.bytes, check)
    if case.op == "hc_mix":
        weights = torch.cat([case.args["w_down"], case.args["w_up"].view_as(case.args["w_down"])])
        for ctas, threads in floors.READ_SHAPES[:2]:
            make = partial(floors.read, weights, weights[0], ctas, threads)
            check = partial(floors.check_read, weights, weights[0], ctas, threads)
            yield Version(f"{READ} {ctas}x{threads}", make, case.bytes, check)
        yield Version(
            GEMMS, partial(floors.products, *(case.args[n] for n in ("normed", "w_down", "w_up"))), 0
        )
    if case.op == "gdn_packed_decode" and case.rows >= COPY_FROM_ROWS:
        state = case.rows * case.args["state"][0].numel() * case.args["state"].element_size()
        for name, count in ((COPY, floors.COPY_BYTES), (COPY_SAME, state)):
            yield Version(name, partial(floors.copy, count, case.device), 2 * count)
    for peer in found.of(case.op) if found else ():
        if reason := peer.refuses(case):
            say(f" {peer.name} {reason} ", end="")
            continue
        judge = partial(case.check, allowance=peer.allowance, exact=peer.exact(case) if peer.exact else None)
        yield Version(peer.name, partial(peer.prepare, case), case.bytes, judge, lambda returned: returned)


def capture(device: protocol.Device, case: Case, version: Version) -> None:
    """Captures a version and checks what a replay of it leaves in poisoned outputs. What goes wrong is the
    version's error; a failing device is raised."""
    try:
        version.call = version.make()
        version.graph = device.capture(version.call)
        version.kernels = version.graph.kernels
        if version.results is not None:
            case.poison(version.results(version.graph.result))
        version.graph.replay()
        device.synchronize()
        if version.check is not None:
            check = version.check(version.graph.result)
            version.worst = check.worst if math.isfinite(check.worst) else None
            version.error = None if check.ok else f"wrong result: {check.detail}"
    except Exception as error:
        version.error = f"{type(error).__name__}: {error}"
        device.synchronize()  # an error of the device is final, and raised here


def note(record: dict[str, Any], versions: Sequence[Version]) -> None:
    """Enters captured versions into the record of a run, and says what went wrong."""
    record["versions"] = [version.to_json() for version in versions]
    for version in versions:
        if version.error:
            say(f"  {version.name}: {version.error}")


def measure(
    device: protocol.Device,
    case: Case,
    run: dict[str, Any],
    versions: Sequence[Version],
    settings: protocol.Settings,
    merge: Callable[[str, protocol.Samples], protocol.Samples] = lambda metric, samples: samples,
) -> None:
    """Times the versions that are right into `run`: first ours against itself, then all, cold and hot.

    merge: makes of the samples of a metric ("again", "cold", "hot") those that are kept. The noise floor of a
    metric is the larger of two: of that first run, and of our two captures among all."""
    entries = {entry["name"]: entry for entry in run["versions"]}
    taken: protocol.Samples
    good = [v for v in versions if v.error is None]
    graphs: dict[str, protocol.Graph] = {v.name: v.graph for v in good if v.graph is not None}
    if {OURS, AGAIN} <= set(graphs):
        same = {name: graphs[name] for name in (OURS, AGAIN)}
        with phase("A/A", settings.blocks) as tick:
            taken = merge("again", protocol.cold(device, same, settings, case.reset, tick))
        run["noise"]["cold"] = stats.noise(taken[OURS], taken[AGAIN])
        say(f"    noise floor, the same call captured twice: {run['noise']['cold']:.2%}")
        run["again"] = {"cold": {name: _timing(blocks) for name, blocks in taken.items()}}
    with phase(f"cold {settings.blocks} x {settings.samples}", settings.blocks) as tick:
        taken = merge("cold", protocol.cold(device, graphs, settings, case.reset, tick))
        for name, blocks in taken.items():
            entries[name]["cold"] = _timing(blocks)
    with phase("hot", settings.blocks) as tick:
        counts = {name: settings.hot_count(entries[name]["cold"]["median"]) for name in graphs}
        repeated: dict[str, protocol.Graph] = {
            v.name: device.capture(v.call, counts[v.name])
            for v in good
            if v.call is not None and counts.get(v.name) and v.name not in (COPY, COPY_SAME)
        }
        if repeated:
            taken = merge("hot", protocol.hot(device, repeated, counts, settings, case.reset, tick))
            for name, blocks in taken.items():
                entries[name]["hot"] = {**_timing(blocks), "calls": counts[name]}
    pair = entries.get(OURS, {}), entries.get(AGAIN, {})
    for metric in ("cold", "hot"):
        if all(entry.get(metric) for entry in pair):
            among = stats.noise(*(entry[metric]["samples"] for entry in pair))
            run["noise"][metric] = max(among, run["noise"].get(metric, 0.0))


def measure_host(
    device: protocol.Device, case: Case, run: dict[str, Any], settings: protocol.Settings
) -> None:
    """Times eager calls, ours in every form, into `run`."""
    calls = ours.eager_calls(case)
    if not calls:
        return
    calls["launch function"] = ours.compiled_call(case)
    with phase(f"host {settings.host_blocks} x {settings.host_calls}", settings.host_blocks) as tick:
        times = protocol.host(device, calls, settings, tick)
    run["host"] = {name: _timing(blocks) for name, blocks in times.items()}


def _timing(blocks: list[list[float]]) -> dict[str, Any]:
    samples = [[round(sample, 4) for sample in block] for block in blocks]
    return {**stats.summarise(stats.flat(blocks)).to_json(), "samples": samples}


def run_case(
    device: protocol.Device, op: str, rows: int, found: peers.Found | None, options: argparse.Namespace
) -> dict[str, Any]:
    """One run: its record, with `error` set where it broke off."""
    run: dict[str, Any] = {
        "op": op,
        "rows": rows,
        "bytes": None,
        "served_by": None,
        "versions": [],
        "noise": {},
        "again": {},
        "host": {},
        "error": None,
    }
    settings = options.settings
    try:
        with phase("inputs, capture, check") as tick:
            case = cases.make(op, rows, device.device, shuffle=options.shuffle_slots)
            run |= {"bytes": case.bytes, "served_by": ours.served_by(case)}
            versions = []
            for version in versions_of(case, found, options.gdn_tiles):
                capture(device, case, version)
                versions.append(version)
                tick()
        note(run, versions)
        measure(device, case, run, versions, settings)
        if not options.no_host and OURS in {v.name for v in versions if not v.error}:
            measure_host(device, case, run, settings)
    except Exception:
        run["error"] = traceback.format_exc()
        say(f"\n{run['error']}")
    return run


def compared(run: Mapping[str, Any], mine: Mapping[str, Any], version: Mapping[str, Any]) -> str:
    """Median of the ratios to ours, taken pair by pair; "~" before one that is within the noise floor."""
    pairs = stats.ratios(version["cold"]["samples"], mine["cold"]["samples"])
    ratio = stats.summarise(stats.flat(pairs)).median
    noise = run["noise"].get("cold")
    return f"{'~' if noise is not None and abs(ratio - 1) <= noise else ''}{ratio:.3f}"


def run_table(run: Mapping[str, Any]) -> str:
    """A run's medians as text."""
    rows = [("", "cold us", "p10-p90", "hot us", "x ours", "GB/s")]
    mine = next((v for v in run["versions"] if v["name"] == OURS and v["cold"]), None)
    for v in run["versions"]:
        cold, hot = v["cold"], v["hot"]
        if cold is None:
            continue
        relative = compared(run, mine, v) if mine else ""
        rate = f"{v['bytes'] / cold['median'] / 1e3:.0f}" if v["bytes"] else ""
        span = f"{cold['p10']:.2f}-{cold['p90']:.2f}"
        rows.append(
            (v["name"], f"{cold['median']:.2f}", span, f"{hot['median']:.2f}" if hot else "", relative, rate)
        )
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    lines = [
        "    "
        + "  ".join(
            c.ljust(w) if not i else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    if run["noise"]:
        lines.append(
            "    A/A noise floor: "
            + ", ".join(f"{metric} {value:.2%}" for metric, value in run["noise"].items())
        )
    for name, call in run["host"].items():
        lines.append(f"    host, {name}: {call['median']:.2f} us ({call['p10']:.2f}-{call['p90']:.2f})")
    return "\n".join(lines)


def plan(options: argparse.Namespace) -> list[tuple[str, int]]:
    """The runs that were asked for."""
    return [(op, rows) for op in options.ops for rows in options.rows or DEFAULT_ROWS.get(op, (1,))]


def bench(options: argparse.Namespace, device: protocol.Device) -> int:
    """Takes the runs and judges them; the exit code."""
    start = time.perf_counter()
    about = host.describe(device.device)
    found = peers.discover() if options.peers else None
    if found is not None:
        found = found._replace(peers=tuple(p for p in found.peers if not p.name.startswith(options.without)))
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": "bench",
        "command": options.command,
        "date": host.today(),
        "host": about,
        "settings": {**asdict(options.settings), "flush_bytes": device.flush_bytes},
        "missing_peers": found.missing if found else {},
        "runs": [],
        "acceptance": [],
    }
    say(f"{about['gpu']}, {about['nvml']}, {about['versions']}")
    for package, reason in record["missing_peers"].items():
        say(f"no {package}: {reason}")
    runs = plan(options)
    judgements: list[acceptance.Judgement] = []
    for number, (op, rows) in enumerate(runs, 1):
        say(f"[{number}/{len(runs)}] {op}, {rows} row(s), {time.perf_counter() - start:.0f} s so far")
        run = run_case(device, op, rows, found, options)
        say(run_table(run))
        record["runs"].append(run)
        judgements += acceptance.judge_run(run)
        record["acceptance"] = [j.to_json() for j in judgements]
        record["seconds"] = round(time.perf_counter() - start, 1)
        record["host"]["nvml_after"] = host.clocks(device.device)
        if options.json:
            write(options.json, record)
        torch.cuda.empty_cache()
    wrong = [f"{r['op']} {r['rows']}" for r in record["runs"] if r["error"] or _ours_wrong(r)]
    say(f"\n{acceptance.table(judgements)}\n{record['seconds']:.0f} s")
    for what in wrong:
        say(f"FAILED {what}")
    return 1 if wrong or any(j.verdict == "FAIL" for j in judgements) else 0


def _ours_wrong(run: Mapping[str, Any]) -> bool:
    return any(
        v["error"] and (v["name"] in (OURS, AGAIN) or v["name"].startswith("tile ")) for v in run["versions"]
    )


def count(options: argparse.Namespace) -> int:
    """Runs the operators in the emulator and counts; the exit code."""
    runs = [(op, rows) for op in options.ops if op in counters.OPS for rows in options.rows or (1,)]
    record = counters.run(runs, options.targets, options.command)
    if options.json:
        write(options.json, record)
    return int(counters.failed(record))


def _numbers(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise argparse.ArgumentTypeError(f"got {text}, allowed positive integers, separated by commas")
    return tuple(map(int, words))


def _ops(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    known = (*cases.CASES, *world.RANKED)
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(known)}")
    if len({name in world.RANKED for name in names}) > 1:
        raise argparse.ArgumentTypeError(
            f"{', '.join(world.RANKED)} are work of several ranks, the others of one: one kind a run"
        )
    return names


def _targets(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in COMPILE_TARGETS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(COMPILE_TARGETS)}")
    return names


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command-line options."""
    defaults = protocol.Settings()
    parser = argparse.ArgumentParser(
        prog="python -m profiling.bench", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument(
        "--ops",
        type=_ops,
        help=f"of {', '.join(cases.CASES)} (all); under torchrun of {', '.join(world.RANKED)} (both)",
    )
    rows = "rows of every op (1; GDN 1,64,256; hc_mix 1,4,8,16,32; of several ranks 1,2,4,8,32)"
    parser.add_argument("--rows", type=_numbers, help=rows)
    parser.add_argument("--peers", action="store_true", help="also time published kernels and torch")
    parser.add_argument(
        "--without",
        type=lambda text: tuple(text.split(",")),
        default=(),
        metavar="NAME,...",
        help="leave out peers whose name starts so (torch.compile takes seconds a piece)",
    )
    parser.add_argument(
        "--counters", action="store_true", help="time nothing: run in the emulator, without a GPU, and count"
    )
    parser.add_argument(
        "--targets",
        type=_targets,
        default=tuple(COMPILE_TARGETS),
        help=f"of {', '.join(COMPILE_TARGETS)} (all), for --counters",
    )
    parser.add_argument(
        "--gdn-tiles", type=_numbers, default=(), help="also time our GDN with these value tiles"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything, raw samples too")
    parser.add_argument("--blocks", type=int, help=f"blocks of samples ({defaults.blocks})")
    parser.add_argument("--samples", type=int, help=f"samples a block ({defaults.samples})")
    parser.add_argument(
        "--quick", action="store_true", help="few samples: for trying things, not for publishing"
    )
    parser.add_argument("--no-host", action="store_true", help="leave the eager host cost out")
    parser.add_argument(
        "--shuffle-slots",
        action="store_true",
        help="GDN rows take pool slots in random order: every kernel is some 3 %% slower on many rows",
    )
    options = parser.parse_args(arguments)
    asked = options.ops
    if asked is None:
        options.ops = world.RANKED if world.size() > 1 and not options.counters else tuple(cases.CASES)
    options.ranked = options.ops[0] in world.RANKED
    if options.counters and asked is not None and (other := [op for op in asked if op not in counters.OPS]):
        parser.error(f"--counters: got {', '.join(other)}, allowed {', '.join(counters.OPS)}")
    if options.ranked and options.rows and max(options.rows) > world.MAX_ROWS:
        parser.error(f"--rows: got {max(options.rows)}, allowed 1 to {world.MAX_ROWS} of several ranks")
    if options.json and (why := no_file(options.json)):
        parser.error(f"--json: {why}")
    chosen = dict(QUICK) if options.quick else {}
    chosen |= {n: v for n in ("blocks", "samples") if (v := getattr(options, n)) is not None}
    try:
        options.settings = replace(defaults, **chosen)
    except ValueError as error:
        parser.error(str(error))
    options.command = host.command("profiling.bench", arguments)
    return options


def _other_ranks(options: argparse.Namespace) -> str:
    ops, sizes = ",".join(world.RANKED), ", ".join(map(str, world.SIZES))
    if not options.ranked:
        return f"under torchrun the work is that of several ranks: --ops {ops}"
    return (
        f"{', '.join(options.ops)}: work of several ranks, a GPU each: torchrun --nproc-per-node N -m "
        f"profiling.bench --ops {ops}, N of {sizes}; python -m profiling.collective times one over loopback"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark on command-line arguments and returns its exit code."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    if options.counters:
        return count(options)
    if options.ranked != (world.size() > 1):
        print(f"profiling.bench: {_other_ranks(options)}", file=sys.stderr)
        return 2
    if options.ranked:
        from profiling import ranks

        return ranks.main(options)
    if not torch.cuda.is_available():
        print(
            "profiling.bench: torch sees no CUDA device; nothing was timed (--counters needs none)",
            file=sys.stderr,
        )
        return 2
    if target_of(torch.device("cuda", torch.cuda.current_device())) is None:
        targets = ", ".join(COMPILE_TARGETS)
        print(f"profiling.bench: {torch.cuda.get_device_name()} is none of {targets}", file=sys.stderr)
        return 2
    # forced: a call that the kernels cannot serve must be an error, not a timing of the reference
    with torch.inference_mode(), bindings.backend("cute"):
        return bench(options, protocol.CudaDevice())


if __name__ == "__main__":
    sys.exit(main())
