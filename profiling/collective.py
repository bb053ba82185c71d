"""`python -m profiling.collective`: the fused finalize and all-reduce of one rank, beside what it replaces.

    python -m profiling.collective [--ranks 4] [--rows 1] [--json FILE] [--blocks 7] [--samples 31]

Loopback: one rank whose pushes fill its own slots, so every instruction of a round is there and no peer and
no link is. What is compared is what stands before and after the exchange, not the exchange. All versions of a
run are interleaved and captured by the protocol of protocol.py, as in bench.py, and the bits of each are
checked first. Exit code: 1 if a version is wrong or a target is missed, 2 without a supported GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bindings import jit, ops, reference
from bindings.targets import target_of
from collectives import launch
from collectives.communicator import Communicator
from collectives.engines import DeviceEngine
from collectives.launch import Form
from profiling import acceptance, cases, floors, host, protocol
from profiling.acceptance import AGAIN, EMPTY, OURS, Target
from profiling.bench import SCHEMA, Version, capture, measure, run_table
from profiling.cases import Case, Check
from profiling.console import say, write

OP = "moe_finalize_all_reduce"
UNBOUNDED = "ours, no bound on the wait"
NORM = "ours, with the norm"
EARLY_ROUTING = "ours, routing loaded early"
GATED = "moe_finalize, all_reduce"
ADDCMUL = "moe_finalize, addcmul, all_reduce"
SUM, FINALIZE = "all_reduce alone", "moe_finalize alone"

TARGETS = tuple(
    Target(OP, 1, metric, against, bound)
    for metric in ("cold", "hot")
    for against, bound in ((GATED, 1.2), (ADDCMUL, 1.5), (UNBOUNDED, 1 / 1.02), (EMPTY, None))
)

Call = Callable[[], Any]


def make_case(rows: int, device: torch.device) -> Case:
    """The finalize's case, as the fused operator's."""
    return replace(cases.make("moe_finalize", rows, device), op=OP)


def expected(case: Case, ranks: int, *, gated: bool = True) -> Tensor:
    """The sum of `ranks` equal contributions, by the reference."""
    args = [case.args[n].cpu() for n in ("expert_out", "permuted_idx", "expert_weights")]
    shared = [case.args[n].cpu() for n in ("shared_out", "shared_gate")] if gated else []
    local = reference.moe_finalize(*args, *shared).float()
    total = torch.zeros_like(local)
    for _ in range(ranks):
        total = total + local
    return total.bfloat16()


def bits_of(want: Tensor) -> Callable[[Any], Check]:
    """Judges a result by its bits."""

    def check(returned: Any) -> Check:
        wrong = int((returned.cpu().view(torch.int16) != want.view(torch.int16)).sum())
        return Check(not wrong, float(bool(wrong)), f"{wrong} of {want.numel()} elements have other bits")

    return check


def near(want: Tensor) -> Callable[[Any], Check]:
    """Judges a result that rounds elsewhere by design: in all, three bf16 roundings more."""

    def check(returned: Any) -> Check:
        error = (returned.cpu().float() - want.float()).abs()
        worst = float((error / (2.0**-6 * want.float().abs().max())).max())
        return Check(worst <= 1, worst, f"error {float(error.max()):g}")

    return check


def versions_of(case: Case, ranks: int) -> Iterator[Version]:
    """Everything that a run times, ours first."""
    rows, device, hidden = case.rows, case.device, int(case.args["shared_out"].shape[1])
    top_k = int(case.args["expert_weights"].shape[1])
    forms = (Form(), Form(norm=True), Form(routing_complete=True))

    def comm() -> Communicator:
        # one a version: versions interleave, and each has slots and counters of its own
        return Communicator.loopback(
            ranks, device, hidden=hidden, max_tokens=rows, top_k=top_k, timeout_s=5.0, forms=forms
        )

    def empty() -> Tensor:
        return torch.empty(rows, hidden, dtype=torch.bfloat16, device=device)

    args, routed = case.args, tuple(case.args[n] for n in ("expert_out", "permuted_idx", "expert_weights"))
    shared = args["shared_out"]
    gate = args["shared_gate"].bfloat16().unsqueeze(1)

    def fused(**options: Any) -> Callable[[], Call]:
        def make() -> Call:
            mine, out = comm(), empty()
            return lambda: mine.moe_finalize_all_reduce(**args, **options, out=out)

        return make

    def unbounded() -> Call:
        mine, out = comm(), empty()
        engine = mine.engine
        assert isinstance(engine, DeviceEngine)
        params = {**Form().params(ranks, hidden, top_k), "bounded": False}
        kernel, channel = jit.get(launch.MODULE, engine.target, params), engine.channels["moe"]
        tensors = (*routed, shared, args["shared_gate"], None)

        def call() -> Tensor:
            channel.launch(kernel, tensors, out)
            return out

        return call

    def gated() -> Call:
        mine, local, out = comm(), empty(), empty()

        def call() -> Tensor:
            ops.moe_finalize(**args, out=local)
            return mine.all_reduce(local, out=out)

        return call

    def addcmul() -> Call:
        mine, local, summed, out = comm(), empty(), empty(), empty()

        def call() -> Tensor:
            ops.moe_finalize(*routed, out=local)
            torch.addcmul(local, shared, gate, out=summed)
            return mine.all_reduce(summed, out=out)

        return call

    def alone() -> Call:
        mine, out = comm(), empty()
        return lambda: mine.all_reduce(shared, out=out)

    def finalize() -> Call:
        out = empty()
        return lambda: ops.moe_finalize(**args, out=out)

    gain = torch.randn(hidden, generator=torch.Generator().manual_seed(1)).bfloat16()
    want = expected(case, ranks)
    normed = want.float() * torch.rsqrt(want.double().square().mean(1, keepdim=True) + 1e-6).float()
    exact, slots = bits_of(want), ranks * shared.numel() * 2

    def version(name: str, make: Callable[[], Call], check: Callable[[Any], Check] | None) -> Version:
        def results(returned: Any) -> Mapping[str, Tensor]:
            return {OP: returned}

        return Version(name, make, case.bytes + 2 * slots, check, results if check else None)

    yield version(OURS, fused(), exact)
    yield version(AGAIN, fused(), exact)
    yield version(UNBOUNDED, unbounded, exact)
    yield version(EARLY_ROUTING, fused(routing_complete=True), exact)
    yield version(NORM, fused(norm_weight=gain.to(device)), near((normed * gain.float()).bfloat16()))
    yield version(GATED, gated, exact)
    yield version(ADDCMUL, addcmul, near(want))
    yield version(SUM, alone, bits_of(_times(shared.cpu(), ranks)))
    yield version(FINALIZE, finalize, None)
    yield Version(EMPTY, lambda: floors.empty(device), 0)


def _times(x: Tensor, ranks: int) -> Tensor:
    total = torch.zeros(x.shape)
    for _ in range(ranks):
        total = total + x.float()
    return total.bfloat16()


def run(device: protocol.Device, ranks: int, rows: int, settings: protocol.Settings) -> dict[str, Any]:
    """One run: a record as bench.py's, with the number of ranks."""
    case = make_case(rows, device.device)
    versions = list(versions_of(case, ranks))
    for version in versions:
        capture(device, case, version)
        if version.error:
            say(f"  {version.name}: {version.error}")
    record: dict[str, Any] = {
        "op": OP,
        "rows": rows,
        "ranks": ranks,
        "bytes": case.bytes,
        "served_by": f"cute {target_of(device.device)}, loopback",
        "versions": [version.to_json() for version in versions],
        "noise": {},
        "again": {},
        "host": {},
        "error": None,
    }
    measure(device, case, record, versions, settings)
    return record


def bench(options: argparse.Namespace, device: protocol.Device) -> int:
    """Takes the runs and judges them; the exit code."""
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": "collective",
        "command": options.command,
        "date": host.today(),
        "host": host.describe(device.device),
        "settings": {**asdict(options.settings), "flush_bytes": device.flush_bytes},
        "runs": [],
        "acceptance": [],
    }
    judgements: list[acceptance.Judgement] = []
    for ranks in options.ranks:
        for rows in options.rows:
            say(f"{OP}, {ranks} ranks (loopback), {rows} row(s)")
            found = run(device, ranks, rows, options.settings)
            say(run_table(found))
            record["runs"].append(found)
            judgements += acceptance.judge_run(found, TARGETS)
            record["acceptance"] = [j.to_json() for j in judgements]
            if options.json:
                write(options.json, record)
    say(f"\n{acceptance.table(judgements)}")
    wrong = [f"{v['name']}: {v['error']}" for r in record["runs"] for v in r["versions"] if v["error"]]
    for what in wrong:
        say(f"FAILED {what}")
    return 1 if wrong or any(j.verdict == "FAIL" for j in judgements) else 0


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(int(word) for word in text.split(","))
    if any(number < 1 for number in numbers):
        raise ValueError
    return numbers


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command-line options."""
    defaults = protocol.Settings()
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m profiling.collective", description=summary)
    parser.add_argument("--ranks", type=_numbers, default=(4,), help="2, 4, 8 (4)")
    parser.add_argument("--rows", type=_numbers, default=(1,), help="rows, at most 32 (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything, raw samples too")
    parser.add_argument("--blocks", type=int, default=defaults.blocks, help=f"({defaults.blocks})")
    parser.add_argument("--samples", type=int, default=defaults.samples, help=f"({defaults.samples})")
    options = parser.parse_args(arguments)
    if not set(options.ranks) <= {2, 4, 8} or max(options.rows) > 32:
        parser.error(f"--ranks {options.ranks}, --rows {options.rows}: allowed 2, 4, 8 and at most 32")
    try:
        options.settings = replace(defaults, blocks=options.blocks, samples=options.samples)
    except ValueError as error:
        parser.error(str(error))
    options.command = " ".join(["python -m profiling.collective", *arguments])
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    if not torch.cuda.is_available() or target_of(torch.device("cuda")) is None:
        say("error: no GPU that kernels are built for")
        return 2
    return bench(options, protocol.CudaDevice())


if __name__ == "__main__":
    sys.exit(main())
