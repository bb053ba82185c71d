"""What the kernels do, counted by the emulator, for targets without a device here.

    python -m profiling.counters [OP...] [--target sm_100a] [--rows 1,4] [--json FILE]

Every operator is called once on the CPU for each target and judged against float64. Counted are warp
instructions, bytes that move to and from global memory beside those that the contract has it move (contract),
those of them that bulk and tensor copies read (tma), 32-byte sectors that warps touch, instruction by
instruction, the different ones of a launch that anything touches, copies too (unique: times 32, what a launch
moves that finds nothing in L2 and keeps all), bank conflicts, waits at barriers, and matrix operations. The
emulator also checks each launch as it runs; what it finds is an error here. Times are not what it tells. Exit
code: 1 if an operator failed.
`profiling.bench --counters` is the same.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import bindings
from bindings.targets import TARGETS
from profiling import cases, host, ours
from profiling.console import no_file, phase, say, write

SCHEMA = 1
OPS = tuple(name for name in cases.CASES if name != "hc_gate_apply_norm")
"""Every operator of the cases; the piece left out is two of them."""

COUNTERS = {
    "instructions": "instructions",
    "read_bytes": "read_bytes",
    "tma_read_bytes": "tma_load_bytes",
    "read_sectors": "load_sectors",
    "unique_read_sectors": "unique_load_sectors",
    "written_bytes": "written_bytes",
    "written_sectors": "store_sectors",
    "unique_written_sectors": "unique_store_sectors",
    "bank_conflicts": "bank_conflicts",
    "barrier_waits": "barrier_waits",
    "matrix_flops": "matrix_flops",
}
"""Their names in the record, and on a launch."""


def count(op: str, rows: int, target: str) -> dict[str, Any]:
    """One operator on one emulated target: an entry of the record, `error` set where it cannot run or is
    wrong."""
    from bindings import emulated

    entry: dict[str, Any] = {"op": op, "rows": rows, "target": target, "bytes": 0, "launches": 0}
    entry |= {"counters": {}, "error": None}
    try:
        case = cases.make(op, rows, torch.device("cpu"))
        entry["bytes"] = case.bytes
        with emulated.options(target=target), bindings.backend("emulator"):
            emulated.device().launches.clear()
            results = cases.call_results(case, ours.graph_call(case)())
            launches = list(emulated.device().launches)
        check = case.check(results)
        entry |= {"launches": len(launches), "counters": total(launches)}
        entry["error"] = None if check.ok else f"wrong result: {check.detail}"
    except Exception as error:  # the other kernels are counted all the same
        entry["error"] = f"{type(error).__name__}: {error}"
    return entry


def total(launches: Sequence[Any]) -> dict[str, int]:
    """The counters of a call's launches, added up, by name."""
    return {name: sum(getattr(launch, of) for launch in launches) for name, of in COUNTERS.items()}


def run(runs: Sequence[tuple[str, int]], targets: Sequence[str], command: str) -> dict[str, Any]:
    """Counts every (operator, rows) on every target; the record."""
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": "counters",
        "command": command,
        "date": host.today(),
        "host": host.describe(torch.device("cpu")),
        "kernels": [],
    }
    for target in targets:
        with phase(f"{target}, emulated", len(runs)) as tick, torch.inference_mode():
            for op, rows in runs:
                record["kernels"].append(count(op, rows, target))
                tick()
    say(table(record["kernels"]))
    return record


def table(kernels: Sequence[dict[str, Any]]) -> str:
    """The counters as aligned text."""
    names = list(dict.fromkeys(name for k in kernels for name in k["counters"]))
    rows = [("op", "rows", "target", "launches", "contract", *names)]
    for k in kernels:
        head = (k["op"], str(k["rows"]), k["target"], str(k["launches"]), str(k["bytes"]))
        if k["error"]:
            rows.append((*head, "", *("",) * (len(names) - 1))[: len(rows[0])])
        else:
            rows.append((*head, *(str(k["counters"].get(name, "")) for name in names)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    failed = [
        f"FAILED {k['op']}, {k['rows']}, {k['target']}: {k['error'].rstrip()}" for k in kernels if k["error"]
    ]
    return "\n".join([*lines, *failed])


def failed(record: dict[str, Any]) -> bool:
    """Whether an operator of the record could not run or was wrong."""
    return any(kernel["error"] for kernel in record["kernels"])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m profiling.counters", description="Counts what kernels do, in the emulator."
    )
    parser.add_argument("ops", nargs="*", metavar="OP", help=f"of {', '.join(OPS)} (all)")
    parser.add_argument("--target", action="append", choices=TARGETS, help="may be repeated (all)")
    parser.add_argument("--rows", default="1", help="row counts of every operator (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record")
    options = parser.parse_args(argv)
    if unknown := [op for op in options.ops if op not in OPS]:
        parser.error(f"OP: got {', '.join(unknown)}, allowed {', '.join(OPS)}")
    try:
        rows = [int(n) for n in options.rows.split(",")]
    except ValueError:
        rows = [0]
    if min(rows) < 1:
        parser.error(f"--rows: got {options.rows}, allowed positive integers, separated by commas")
    if options.json and (why := no_file(options.json)):
        parser.error(f"--json: {why}")
    command = shlex.join(["python", "-m", "profiling.counters", *(sys.argv[1:] if argv is None else argv)])
    runs = [(op, n) for op in options.ops or OPS for n in rows]
    record = run(runs, options.target or TARGETS, command)
    if options.json:
        write(options.json, record, indent=1)
    return int(failed(record))


if __name__ == "__main__":
    sys.exit(main())
