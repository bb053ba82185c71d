"""The numbers that matter, from a raw-page CSV of Nsight Compute.

    python -m profiling.ncu.parse CSV...

A CSV has a row of metric names, a row of units, then a row a kernel. Beside FAMILY.csv stands FAMILY.json,
which `profiling.once` wrote: what was called, how many launches a call is, and the bytes that its contract
has it move.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Decimal prefixes, as the profiler scales its units.
_SCALES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "n": 1e-9, "u": 1e-6, "m": 1e-3}
_TIMES = {
    "ns": 1e-3,
    "nsecond": 1e-3,
    "us": 1.0,
    "usecond": 1.0,
    "ms": 1e3,
    "msecond": 1e3,
    "s": 1e6,
    "second": 1e6,
}
_STALL = re.compile(
    r"smsp__average_warps?_(?:issue_stalled|latency_issue_stalled)_(\w+?)(?:_per_issue_active)?\.ratio"
)


@dataclass(frozen=True)
class Kernel:
    """One profiled launch. op: the operator that it serves, "" where no FAMILY.json says. us: its duration
    alone, launch excluded. minimum: bytes that the contract has the whole call move. occupancy: warps
    active, % of what an SM holds. stall: what a warp waited for most, and the warps that did, on average,
    per issued instruction."""

    op: str
    rows: int
    kernel: str
    us: float
    dram_bytes: float
    l2_bytes: float
    minimum: int | None
    registers: int
    occupancy: float
    grid: int
    block: int
    stall: str
    stall_warps: float
    sm_percent: float
    memory_percent: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read(table: Path, called: Path | None = None) -> list[Kernel]:
    """The kernels of a CSV, with their operators where `called` exists.

    ValueError for a file that is no raw page, whose launches are not those that were called, or one of whose
    kernels the profiler saw but could not run."""
    rows = [row for row in csv.reader(table.read_text(errors="replace").splitlines()) if row]
    heads = [i for i, row in enumerate(rows) if "Kernel Name" in row and row[0] == "ID"]
    if not heads or len(rows) < heads[0] + 3:
        raise ValueError(f"{table.name}: no kernels of a raw page in it")
    head, units, *launches = rows[heads[0] :]
    launches = [row for row in launches if len(row) == len(head)]
    for row in launches:
        cells = dict(zip(head, row, strict=True))
        if cells.get("Grid Size") == "(0, 0, 0)":
            raise ValueError(f"{table.name}: the profiler could not run {short_name(cells['Kernel Name'])}")
    calls = _calls(called)
    if calls is not None and len(calls) != len(launches):
        raise ValueError(f"{table.name}: {len(launches)} launches were profiled, {len(calls)} were called")
    return [
        _kernel(dict(zip(head, zip(row, units, strict=True), strict=True)), calls[i] if calls else {})
        for i, row in enumerate(launches)
    ]


def _calls(path: Path | None) -> list[Mapping[str, Any]] | None:
    """What was called, an entry a launch."""
    if path is None or not path.exists():
        return None
    return [call for call in json.loads(path.read_text()) for _ in range(call["launches"])]


def _kernel(cells: Mapping[str, tuple[str, str]], call: Mapping[str, Any]) -> Kernel:
    stalls = {m[1]: number(*cell) for name, cell in cells.items() if (m := _STALL.fullmatch(name))}
    stalls.pop("selected", None)  # issuing is no stall
    stall = max(stalls, key=lambda reason: stalls[reason], default="")

    def of(metric: str) -> float:
        if metric not in cells:
            raise ValueError(f"{metric}: not among the profiled metrics")
        return number(*cells[metric])

    def times(metric: str) -> float:
        value, unit = cells[metric]
        return number(value) * _TIMES[unit]

    return Kernel(
        op=call.get("op", ""),
        rows=call.get("rows", 1),
        kernel=short_name(cells["Kernel Name"][0]),
        us=times("gpu__time_duration.sum"),
        dram_bytes=of("dram__bytes_read.sum") + of("dram__bytes_write.sum"),
        l2_bytes=of("lts__t_bytes.sum"),
        minimum=call.get("bytes"),
        registers=int(of("launch__registers_per_thread")),
        occupancy=of("sm__warps_active.avg.pct_of_peak_sustained_active"),
        grid=int(of("launch__grid_size")),
        block=int(of("launch__block_size")),
        stall=stall,
        stall_warps=stalls.get(stall, 0.0),
        sm_percent=of("sm__throughput.avg.pct_of_peak_sustained_elapsed"),
        memory_percent=of("gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed"),
    )


def number(value: str, unit: str = "") -> float:
    """A cell as a number: thousands separators dropped, and a unit of bytes with a decimal prefix
    multiplied out."""
    scaled = re.fullmatch(r"([KMGT]?)byte", unit)
    return float(value.replace(",", "")) * _SCALES[scaled[1] if scaled else ""]


def short_name(name: str) -> str:
    """The class that a compiled kernel was traced from, where its name tells; else the name without its
    namespaces and parameters, cut."""
    match = re.search(r"([A-Z]\w*?)_object_at", name)
    if match:
        return re.sub(r"^.*kernels?", "", match[1])
    plain = name.removeprefix("void ")
    head, _, parameters = plain.partition("<")
    inner = re.findall(r"(\w*(?:Functor|Op|_kernel|_impl)\w*)", parameters) if head.startswith("at::") else []
    return " ".join([head.rpartition("::")[2], *inner[:1]])[:40]


def table(kernels: Sequence[Kernel]) -> str:
    """The kernels as aligned text."""
    head = (
        "op",
        "kernel",
        "us",
        "DRAM KB",
        "L2 KB",
        "contract KB",
        "regs",
        "warps %",
        "grid",
        "block",
        "top stall",
    )
    rows = [head]
    for k in kernels:
        least = "" if k.minimum is None else f"{k.minimum / 1e3:.0f}"
        rows.append(
            (
                *(
                    k.op,
                    k.kernel,
                    f"{k.us:.2f}",
                    f"{k.dram_bytes / 1e3:.0f}",
                    f"{k.l2_bytes / 1e3:.0f}",
                    least,
                ),
                *(
                    str(k.registers),
                    f"{k.occupancy:.0f}",
                    str(k.grid),
                    str(k.block),
                    f"{k.stall} {k.stall_warps:.1f}",
                ),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the kernels of CSV files; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m profiling.ncu.parse", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("tables", type=Path, nargs="+", metavar="CSV")
    options = parser.parse_args(arguments)
    try:
        kernels = [k for path in options.tables for k in read(path, path.with_suffix(".json"))]
    except (OSError, ValueError) as error:
        print(f"profiling.ncu.parse: {error}", file=sys.stderr)
        return 1
    print(table(kernels))
    return 0


if __name__ == "__main__":
    sys.exit(main())
