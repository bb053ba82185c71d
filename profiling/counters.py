"""`python -m profiling.bench --counters`: what the kernels do, counted by the emulator, for targets without
a device here.

Every operator is called once on the CPU for each target and judged against float64. Counted are warp
instructions, bytes that move to and from global memory beside those that the contract has it move, bank
conflicts, waits at barriers, and matrix operations. The emulator also checks each launch as it runs; what
it finds is an error here. Times are not what it tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import bindings
from profiling import cases, host, ours
from profiling.console import phase, say

SCHEMA = 1
OPS = tuple(name for name in cases.CASES if name != "hc_gate_apply_norm")
"""Every operator of the cases; the piece left out is two of them."""


def count(op: str, rows: int, target: str) -> dict[str, Any]:
    """One operator on one emulated target: an entry of the record, `error` set where it cannot run or is
    wrong."""
    from bindings import emulated

    case = cases.make(op, rows, torch.device("cpu"))
    entry: dict[str, Any] = {"op": op, "rows": rows, "target": target, "bytes": case.bytes, "launches": 0}
    entry |= {"counters": {}, "error": None}
    try:
        with emulated.options(target=target), bindings.backend("emulator"):
            seen = len(emulated.device().launches)
            results = cases.call_results(case, ours.graph_call(case)())
            launches = emulated.device().launches[seen:]
        check = case.check(results)
        entry |= {"launches": len(launches), "counters": total(launches)}
        entry["error"] = None if check.ok else f"wrong result: {check.detail}"
    except Exception as error:  # the other kernels are counted all the same
        entry["error"] = f"{type(error).__name__}: {error}"
    return entry


def total(launches: Sequence[Any]) -> dict[str, int]:
    """The counters of a call's launches, added up, by name."""
    names = ("instructions", "read_bytes", "written_bytes", "bank_conflicts", "barrier_waits", "matrix_flops")
    return {name: sum(getattr(launch, name) for launch in launches) for name in names}


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
