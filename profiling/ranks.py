"""The bench of what ranks do together, with real ranks: `profiling.bench` under torchrun.

    torchrun --nproc-per-node 4 -m profiling.bench --ops all_reduce,moe_finalize_all_reduce --peers --json F

world.py has how a sample of several ranks is taken. Beside our all-reduce stand NCCL's and those of torch's
symmetric memory; beside the fused kernel the sequences that it replaces: the finalize without the shared
expert, a multiply-add for the gated shared one, then each of those all-reduces. There the multiply-add writes
where the all-reduce reads, so nothing is copied in between, and what an all-reduce in place has changed is
put back outside the timed interval. Every rank has inputs of its own; every version is checked on every rank,
ours to the last bit.

The yardstick of the fused kernel is what cannot be left out: one way over the link, which a ping-pong between
two ranks measures in the same run, and the rank-local finalize. Both are hot times.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

import bindings
from bindings import ops, reference
from bindings.targets import target_of
from collectives.communicator import Communicator
from collectives.launch import Form
from profiling import acceptance, cases, floors, host, peers, stats, world
from profiling.acceptance import AGAIN, EMPTY, LINK, OURS, UNFUSED, Target
from profiling.bench import SCHEMA, Version, capture, measure, note, run_table
from profiling.cases import Case, Inputs
from profiling.collective import ADDCMUL, FINALIZE, GATED, OP, bits_of, near
from profiling.console import phase, say, write

SUM = "all_reduce"
ROWS = (1, 2, 4, 8, 32)

TARGETS = (
    *(Target(OP, 1, metric, UNFUSED, 1.5) for metric in ("cold", "hot")),
    Target(OP, 1, "hot", LINK, 1 / 1.3),
    *(Target(SUM, 1, metric, name, None) for metric in ("cold", "hot") for name in ("NCCL", "torch")),
)
CAPTURE_S, RUN_S = 120.0, 300.0

Call = Callable[[], Any]


class Ranked:
    """One piece of work of this rank: the case, what every rank's sum must be, and what a replay changes.

    Collective."""

    def __init__(self, op: str, rows: int, group: world.World) -> None:
        draw = Inputs(group.device.device, seed=group.rank)
        self.resets: list[Call] = []
        if op == OP:
            case = replace(cases.finalize(rows, draw), op=OP)
            local = reference.moe_finalize(**{n: t.cpu() for n, t in case.args.items()})
        else:
            x, out = draw.normal(rows, cases.MODEL.hidden), draw.empty(rows, cases.MODEL.hidden)
            nothing: dict[str, Any] = {}
            case = Case(SUM, rows, {"x": x}, {"out": out}, 2 * 2 * x.numel(), lambda rows, results: nothing)
            local = x.cpu()
        self.case = replace(case, reset=self.reset)
        total = torch.zeros(local.shape)
        for term in group.meet(local, "what every rank adds"):
            total += term.float()
        self.want = total.to(local.dtype)

    def reset(self) -> None:
        """Puts back what all-reduces in place have changed."""
        for restore in self.resets:
            restore()

    def empty(self) -> Tensor:
        return torch.empty(self.want.shape, dtype=self.want.dtype, device=self.case.device)


def versions_of(work: Ranked, comm: Communicator, found: Sequence[peers.Reducer]) -> Iterator[Version]:
    """Everything that a run times, ours first; the same on all ranks."""
    case, exact, close = work.case, bits_of(work.want), near(work.want)

    def version(name: str, make: Callable[[], Call], check: Callable[[Any], Any] | None) -> Version:
        def results(returned: Any) -> Mapping[str, Tensor]:
            return {case.op: returned}

        return Version(name, make, case.bytes, check, results if check else None)

    versions = _fused if case.op == OP else _summed
    for name, make, check in versions(work, comm, found):
        yield version(name, make, {"exact": exact, "close": close, "none": None}[check])
    if case.device.type == "cuda":
        yield Version(EMPTY, lambda: floors.empty(case.device), 0)


Made = tuple[str, Callable[[], Call], str]


def _summed(work: Ranked, comm: Communicator, found: Sequence[peers.Reducer]) -> Iterator[Made]:
    x = work.case.args["x"]

    def mine() -> Call:
        out = work.empty()
        return lambda: comm.all_reduce(x, out=out)

    def theirs(reducer: peers.Reducer) -> Callable[[], Call]:
        def make() -> Call:
            held, call = reducer.take(x)
            held.copy_(x)
            if reducer.in_place:
                work.resets.append(lambda: _copy(held, x))
            return call

        return make

    yield OURS, mine, "exact"
    yield AGAIN, mine, "exact"
    for reducer in found:
        if not _refused(reducer, x):
            yield reducer.name, theirs(reducer), "close"


def _fused(work: Ranked, comm: Communicator, found: Sequence[peers.Reducer]) -> Iterator[Made]:
    args = work.case.args
    routed = tuple(args[n] for n in ("expert_out", "permuted_idx", "expert_weights"))
    shared, gate = args["shared_out"], args["shared_gate"].to(work.want.dtype).unsqueeze(1)

    def mine() -> Call:
        out = work.empty()
        return lambda: comm.moe_finalize_all_reduce(**args, out=out)

    def alone() -> Call:
        out = work.empty()
        return lambda: ops.moe_finalize(**args, out=out)

    def gated() -> Call:
        local, out = work.empty(), work.empty()

        def call() -> Tensor:
            ops.moe_finalize(**args, out=local)
            return comm.all_reduce(local, out=out)

        return call

    def sequence(take: Callable[[Tensor], tuple[Tensor, Call]]) -> Callable[[], Call]:
        def make() -> Call:
            local, (held, reduce) = work.empty(), take(shared)

            def call() -> Any:
                ops.moe_finalize(*routed, out=local)
                torch.addcmul(local, shared, gate, out=held)
                return reduce()

            return call

        return make

    def own(like: Tensor) -> tuple[Tensor, Call]:
        held, out = torch.empty_like(like), torch.empty_like(like)
        return held, lambda: comm.all_reduce(held, out=out)

    yield OURS, mine, "exact"
    yield AGAIN, mine, "exact"
    yield GATED, gated, "exact"
    yield ADDCMUL, sequence(own), "close"
    for reducer in found:
        if not _refused(reducer, shared):
            yield UNFUSED + reducer.name, sequence(reducer.take), "close"
    yield FINALIZE, alone, "none"


def _refused(reducer: peers.Reducer, like: Tensor) -> bool:
    if reason := reducer.refuses(like):
        say(f" {reducer.name} {reason} ", end="")
    return reason is not None


def _copy(to: Tensor, source: Tensor) -> None:
    to.copy_(source)


def run(
    op: str,
    rows: int,
    group: world.World,
    comm: Communicator,
    found: Sequence[peers.Reducer],
    settings: Any,
    link: Mapping[str, Any],
) -> dict[str, Any]:
    """One run: a record as bench.py's, the same on all ranks. Collective."""
    record: dict[str, Any] = {
        "op": op,
        "rows": rows,
        "ranks": group.size,
        "bytes": None,
        "served_by": f"cute {target_of(group.device.device)}, {comm.explain().splitlines()[0]}",
        "versions": [],
        "noise": {},
        "by_rank": {},
        "host": {},
        "error": None,
    }
    versions: list[Version] = []
    with phase("inputs, capture, check") as tick:
        work = Ranked(op, rows, group)
        record["bytes"] = work.case.bytes
        for version in versions_of(work, comm, found):
            with world.bounded(CAPTURE_S, f"{op}, {rows} rows: capture of {version.name}"):
                capture(group.device, work.case, version)
                version.error = group.agreed(version.error)
            versions.append(version)
            tick()
    note(record, versions)

    def merge(metric: str, samples: Any) -> Any:
        merged = group.slowest(samples)
        record["by_rank"][metric] = group.by_rank
        return merged

    with world.bounded(RUN_S, f"{op}, {rows} rows: timing"):
        measure(group.device, work.case, record, versions, settings, merge)
    if op == OP:
        _add_floor(record, link["one_way_us"])
    return record


def _add_floor(record: dict[str, Any], one_way_us: float) -> None:
    """The yardstick, as a version that has hot times only."""
    alone = next((v for v in record["versions"] if v["name"] == FINALIZE and v["hot"]), None)
    if alone is None:
        return
    samples = [[round(s + one_way_us, 4) for s in block] for block in alone["hot"]["samples"]]
    hot = {**stats.summarise(stats.flat(samples)).to_json(), "samples": samples}
    record["versions"].append({**alone, "name": LINK, "cold": None, "hot": hot})


def bench(
    options: argparse.Namespace, group: world.World, comm: Communicator, link: Mapping[str, Any]
) -> tuple[dict[str, Any], int]:
    """Takes the runs and judges them; the record and the exit code, the same on all ranks. Collective."""
    start = time.perf_counter()
    device = group.device
    found = peers.discover(["profiling.peers.torch_collectives"]) if options.peers else None
    reducers = [r for r in (found.reducers if found else ()) if not r.name.startswith(options.without)]
    about = host.describe(device.device)
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": "ranks",
        "command": options.command,
        "date": host.today(),
        "host": about,
        "ranks": group.size,
        "transport": comm.explain(),
        "link": dict(link),
        "settings": {**asdict(options.settings), "flush_bytes": device.flush_bytes},
        "missing_peers": found.missing if found else {},
        "runs": [],
        "acceptance": [],
    }
    say(f"{group.size} ranks, {about['gpu']} each, {about['nvml']}, {about['versions']}")
    say(f"{comm.explain()}\nlink, one way: {link['one_way_us']:.3f} us")
    for package, reason in record["missing_peers"].items():
        say(f"no {package}: {reason}")
    runs = [(op, rows) for op in options.ops for rows in options.rows or ROWS]
    judgements: list[acceptance.Judgement] = []
    for number, (op, rows) in enumerate(runs, 1):
        say(f"[{number}/{len(runs)}] {op}, {rows} row(s), {time.perf_counter() - start:.0f} s so far")
        found_run = run(op, rows, group, comm, reducers, options.settings, link)
        say(run_table(found_run))
        for metric, medians in found_run["by_rank"].items():
            if OURS in medians and metric != "again":
                say(f"    ours by rank, {metric}: {', '.join(f'{us:.2f}' for us in medians[OURS])} us")
        record["runs"].append(found_run)
        judgements += acceptance.judge_run(found_run, TARGETS)
        record["acceptance"] = [j.to_json() for j in judgements]
        record["seconds"] = round(time.perf_counter() - start, 1)
        if options.json and group.rank == 0:
            write(options.json, record)
        gc.collect()  # graphs that hold another library's communicator go before it does
    wrong = [
        f"{r['op']} {r['rows']}, {v['name']}: {v['error']}"
        for r in record["runs"]
        for v in r["versions"]
        if v["error"] and v["name"] in (OURS, AGAIN)
    ]
    say(f"\n{acceptance.table(judgements)}\n{record['seconds']:.0f} s")
    for what in wrong:
        say(f"FAILED {what}")
    return record, 1 if wrong or any(j.verdict == "FAIL" for j in judgements) else 0


def main(options: argparse.Namespace) -> int:
    """The bench in one of torchrun's processes; its exit code."""
    if (why := world.obstacle()) is not None:
        if world.speaks():
            print(f"profiling.bench: {why}; nothing was timed", file=sys.stderr)
        return 2
    sizes: dict[str, Any] = {"hidden": cases.MODEL.hidden, "top_k": cases.MODEL.top_k}
    sizes |= {"max_tokens": world.MAX_ROWS, "forms": (Form(),)}  # gated, fp32 weights: what is timed
    # forced: a call that the kernels cannot serve must be an error, not a timing of the reference
    with torch.inference_mode(), bindings.backend("cute"), world.joined() as first, world.quiet(not first):
        device = torch.device("cuda", torch.cuda.current_device())
        with (
            Communicator.from_process_group(**sizes, device=device) as comm,
            world.meeting(device) as (group, link),
        ):
            return bench(options, group, comm, link)[1]
