"""Result files for the report, and what their pictures are drawn from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from profiling.acceptance import AGAIN, COPY, EMPTY, GEMMS, OURS, READ, UNFUSED
from profiling.cases import CASES

KINDS = ("bench", "collective", "ranks", "decode_step", "ncu", "counters")
TORCH = ("torch eager", "torch.compile")
NOT_PEERS = (OURS, AGAIN, EMPTY, "tile ", READ, "copy,", GEMMS)
"""Names of versions that are not by others start so."""

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Results:
    """The records of all files by kind, each list in the order of the files; resources: the committed
    table."""

    bench: list[Record] = field(default_factory=list)
    collective: list[Record] = field(default_factory=list)
    ranks: list[Record] = field(default_factory=list)
    decode_step: list[Record] = field(default_factory=list)
    ncu: list[Record] = field(default_factory=list)
    counters: list[Record] = field(default_factory=list)
    resources: Record = field(default_factory=dict)

    @property
    def records(self) -> list[Record]:
        return [*self.bench, *self.collective, *self.ranks, *self.decode_step, *self.ncu, *self.counters]


def unwrap(record: Any) -> list[Record]:
    """The results in a file: itself, or those that a summary of profiling.summarise holds; none where it is
    neither."""
    if not isinstance(record, dict):
        return []
    inside = [record.get(kind) for kind in KINDS] if "stages" in record else [record]
    found = [{"kind": "bench", **r} if "runs" in r else r for r in inside if isinstance(r, dict)]
    return [r for r in found if r.get("kind") in KINDS]


def check(path: Path, records: Sequence[Record], fields: Sequence[str]) -> None:
    """ValueError where a run lacks one of the fields: a file of another program may have the outline of
    ours."""
    for run in (run for record in records for run in record.get("runs", ())):
        missing = [name for name in fields if not isinstance(run, dict) or name not in run]
        if missing:
            raise ValueError(f"{path}: a run in it has no {missing[0]}: no result of a command of profiling")


def load(paths: Sequence[Path], resources: Path) -> Results:
    """Reads result files; ValueError names one that is none."""
    found: dict[str, list[Record]] = {kind: [] for kind in KINDS}
    for path in paths:
        try:
            record = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
        inside = unwrap(record)
        if not inside:
            raise ValueError(f"{path}: no result of a command of profiling")
        check(path, inside, ("op", "rows", "error", "versions"))
        for one in inside:
            found[one["kind"]].append(one)
    table = json.loads(resources.read_text())["kernels"] if resources.exists() else {}
    return Results(**found, resources=table)


def source(record: Record) -> str:
    """Where, when and how a record was made: every picture says it."""
    host = record["host"]
    driver = host.get("nvml", {}).get("driver")
    versions = host.get("versions", {})
    ranks = ranks_of(record)
    parts = [
        (f"{ranks} x " if ranks > 1 else "") + (host.get("gpu") or "no GPU"),
        f"driver {driver}" if driver else "",
        f"torch {versions.get('torch')}",
    ]
    return f"{', '.join(p for p in parts if p)}; {record['date']}; {record['command']}"


def ranks_of(record: Record) -> int:
    """How many processes with a GPU each made a record."""
    given = record.get("shape", {}) if record["kind"] == "decode_step" else record
    return int(given.get("ranks", 1))


def steps(records: Sequence[Record]) -> list[Record]:
    """The latest decode step of each number of ranks, one rank first."""
    latest = {ranks_of(record): record for record in records}
    return [latest[ranks] for ranks in sorted(latest)]


@dataclass(frozen=True)
class Bar:
    """One version's cold time in a run, microseconds."""

    name: str
    median: float
    p10: float
    p90: float
    ours: bool = False


def bars(run: Record) -> list[Bar]:
    """Ours, the fastest published version, and torch's: at most one a kind, those that were timed."""
    timed = {v["name"]: v["cold"] for v in run["versions"] if v["cold"]}
    published = [n for n in timed if not n.startswith((*NOT_PEERS, *TORCH))]
    best = min(published, key=lambda name: timed[name]["median"], default=None)
    torch = next((name for name in reversed(TORCH) if name in timed), None)
    chosen = [name for name in (OURS, best, torch) if name is not None and name in timed]
    return [Bar(n, timed[n]["median"], timed[n]["p10"], timed[n]["p90"], ours=n == OURS) for n in chosen]


def versions_of_ranks(run: Record, metric: str) -> list[Bar]:
    """Every version of a run of several ranks, ours first and once; what is no version of it left out."""
    timed = [(v["name"], v[metric]) for v in run["versions"] if v.get(metric) and v["name"] != AGAIN]
    return [
        Bar(name, t["median"], t["p10"], t["p90"], ours=name == OURS) for name, t in timed if name != EMPTY
    ]


def replaced(run: Record, metric: str) -> Bar | None:
    """The fastest of what a run of several ranks is held against: for the fused operator the sequences that
    it replaces, else other all-reduces."""
    found = versions_of_ranks(run, metric)
    sequences = [bar for bar in found if bar.name.startswith(UNFUSED)]
    return min(sequences or [bar for bar in found if not bar.ours], key=lambda bar: bar.median, default=None)


def runs(records: Iterable[Record], rows: int | None = None) -> list[tuple[Record, Record]]:
    """(record, run) of every run that went well, in the order of the cases, other work after them; of two
    of the same work the later counts."""
    found: dict[tuple[str, int], tuple[Record, Record]] = {}
    for record in records:
        for run in record["runs"]:
            if run["error"] is None and (rows is None or run["rows"] == rows):
                found[run["op"], run["rows"]] = (record, run)
    at = {name: i for i, name in enumerate(dict.fromkeys((*CASES, *(op for op, _ in found))))}
    return [found[key] for key in sorted(found, key=lambda k: (at[k[0]], k[1]))]


def judgements(records: Iterable[Record]) -> list[Record]:
    """What was judged, and `where` if ranks did it; of two judgements of one item the later counts, whichever
    tile or shape it was against."""
    found: dict[tuple[Any, ...], Record] = {}
    for record in records:
        for j in record["acceptance"]:
            against = re.sub(r"(, tile \d+| \d+x\d+)$", "", j["against"])
            where = {"collective": " over loopback", "ranks": f" on {ranks_of(record)} ranks"}
            at = where.get(record["kind"], "")
            found[j["op"], j["rows"], j["metric"], j["version"], against, at] = {**j, "where": at}
    return list(found.values())


@dataclass(frozen=True)
class Floor:
    """What a time is made of: launch (an empty kernel), the contract's bytes at the bandwidth of a large
    copy, the rest."""

    op: str
    rows: int
    launch: float
    traffic: float
    total: float

    @property
    def rest(self) -> float:
        return max(0.0, self.total - self.launch - self.traffic)


def bandwidth(records: Iterable[Record]) -> float | None:
    """Bytes a microsecond of the 4 GiB copy, the most of any run; None where none was timed."""
    rates = [
        v["bytes"] / v["cold"]["median"]
        for record in records
        for run in record["runs"]
        for v in run["versions"]
        if v["name"] == COPY and v["cold"] and "bytes" in v
    ]
    return max(rates, default=None)


def floors(records: Sequence[Record]) -> list[Floor]:
    """The floor of every run that timed an empty kernel; none without the bandwidth of a copy."""
    rate = bandwidth(records)
    found = []
    for _, run in runs(records) if rate else ():
        timed = {v["name"]: v for v in run["versions"] if v["cold"] and "bytes" in v}
        if OURS in timed and EMPTY in timed and rate:
            launch, total = timed[EMPTY]["cold"]["median"], timed[OURS]["cold"]["median"]
            found.append(Floor(run["op"], run["rows"], launch, timed[OURS]["bytes"] / rate, total))
    return found


def scaling(records: Iterable[Record]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """By operator timed with several numbers of rows: by kind of version, (rows, microseconds). Published:
    the fastest."""
    found: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for _, run in runs(records):
        for bar in bars(run):
            kind = "ours" if bar.ours else bar.name if bar.name in TORCH else "best published"
            found.setdefault(run["op"], {}).setdefault(kind, []).append((run["rows"], bar.median))
    return {op: kinds for op, kinds in found.items() if len(kinds.get("ours", ())) > 1}


def resources_by_operator(
    table: Mapping[str, Mapping[str, Any]],
) -> dict[str, dict[str, dict[str, tuple[int, int]]]]:
    """By operator and target: the least and the most registers, shared memory, spills, instructions of its
    kernels."""
    found: dict[str, dict[str, dict[str, tuple[int, int]]]] = {}
    for key, numbers in table.items():
        target, op = key.split(" ")[:2]
        cell = found.setdefault(op, {}).setdefault(target, {})
        values = {
            "registers": numbers["registers"],
            "smem": numbers["smem"],
            "spills": numbers["spill_bytes"] or 0,
            "instructions": numbers["instructions"].get("total", 0),
            "variants": 1,
        }
        for name, value in values.items():
            low, high = cell.get(name, (value, 0 if name == "variants" else value))
            cell[name] = (low, high + value) if name == "variants" else (min(low, value), max(high, value))
    return found
