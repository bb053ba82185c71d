"""`python -m profiling.compare OLD.json NEW.json`: what changed between two result files by more than noise.

    python -m profiling.compare OLD.json NEW.json [--all] [--least 2]

Takes files of `profiling.bench` (of several ranks too), `profiling.collective`, `profiling.decode_step` or
`profiling.summarise`. Hosts drift: a change of ours is judged after division by the drift of the run, the
median change of what is not ours in it (an empty kernel, read and copy floors, peers; in a decode step the
unfused arm). It counts when it exceeds the noise floors of both files and --least percent. Exit code: 1 if
anything of ours is slower by that, or is no longer there; 2 for files that cannot be compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiling.acceptance import OURS
from profiling.reporting import data

KINDS = ("bench", "collective", "ranks", "decode_step")
OWN = (OURS, "moe_finalize", "all_reduce", "link one way + moe_finalize")
"""Versions that are this package's start so."""
FUSED, FUSED_AGAIN, UNFUSED = "fused", "fused, again", "unfused"


@dataclass(frozen=True)
class Change:
    """One time in both files, in microseconds. drift: by what factor the run's yardsticks changed. noise:
    the floor that a change must exceed. new is None where the time is gone."""

    item: str
    metric: str
    old: float
    new: float | None
    drift: float
    noise: float

    @property
    def factor(self) -> float | None:
        """New over old, drift taken out."""
        return None if self.new is None else self.new / self.old / self.drift

    @property
    def verdict(self) -> str:
        """ "slower", "faster", "same", or "gone"."""
        if self.factor is None:
            return "gone"
        if self.factor > 1 + self.noise:
            return "slower"
        return "faster" if 1 / self.factor > 1 + self.noise else "same"


def read(path: Path) -> list[data.Record]:
    """The results in a file; ValueError where there are none."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    results = [r for r in data.unwrap(record) if r["kind"] in KINDS]
    if not results:
        raise ValueError(f"{path}: no times in it")
    data.check(path, results, ("op", "rows", "versions"))
    return results


def changes(old: Sequence[data.Record], new: Sequence[data.Record], least: float) -> Iterator[Change]:
    """Every time of ours in both, and those of the old ones that are gone. ValueError for steps that
    differ."""
    runs = {_work(record, run): run for record in new for run in record.get("runs", ())}
    for record in old:
        for run in record.get("runs", ()):
            other = runs.get(_work(record, run))
            if other is not None:  # another choice of operators or rows is no change
                yield from _runs(run, other, least)
    for before in (r for r in old if r["kind"] == "decode_step"):
        for after in (r for r in new if r["kind"] == "decode_step"):
            yield from _steps(before, after, least)


def _work(record: Mapping[str, Any], run: Mapping[str, Any]) -> tuple[Any, ...]:
    """What is comparable: real ranks with real ranks, not with one over loopback."""
    return record["kind"], run["op"], run["rows"], run.get("ranks")


def _runs(old: Mapping[str, Any], new: Mapping[str, Any], least: float) -> Iterator[Change]:
    item = f"{old['op']}, {old['rows']} row{'s' if old['rows'] > 1 else ''}"
    for metric in ("cold", "hot"):
        before, after = _medians(old, metric), _medians(new, metric)
        yardsticks = [after[n] / before[n] for n in before if n in after and not n.startswith(OWN)]
        drift = statistics.median(yardsticks) if yardsticks else 1.0
        noise = max(least, old["noise"].get(metric, 0.0), new["noise"].get(metric, 0.0))
        if OURS in before:
            yield Change(item, metric, before[OURS], after.get(OURS), drift, noise)
    for name, call in old.get("host", {}).items():
        if new.get("host"):  # --no-host is no change
            gone = name not in new["host"]
            spread = max(_spread(call), 0.0 if gone else _spread(new["host"][name]), least)
            now = None if gone else new["host"][name]["median"]
            yield Change(item, f"host, {name}", call["median"], now, 1.0, spread)


def _medians(run: Mapping[str, Any], metric: str) -> dict[str, float]:
    return {v["name"]: v[metric]["median"] for v in run["versions"] if v.get(metric)}


def _spread(timing: Mapping[str, Any]) -> float:
    """Host costs have no A/A run: their floor is the distance of the 90th percentile from the median."""
    return float(timing["p90"] / timing["median"] - 1)


def _steps(old: Mapping[str, Any], new: Mapping[str, Any], least: float) -> Iterator[Change]:
    if old["shape"] != new["shape"]:
        raise ValueError(f"the steps differ: {old['shape']} and {new['shape']}")
    before, after = (
        {name: arm["cold"]["median"] for name, arm in record["arms"].items()} for record in (old, new)
    )
    drift = after[UNFUSED] / before[UNFUSED]
    yield Change(
        "decode step, fused",
        "cold",
        before[FUSED],
        after[FUSED],
        drift,
        max(least, old["noise"], new["noise"]),
    )


def table(found: Sequence[Change]) -> str:
    """The changes as aligned text."""
    rows = [("item", "metric", "old us", "new us", "drift", "change", "noise", "")]
    for c in found:
        new = "" if c.new is None else f"{c.new:.2f}"
        change = "" if c.factor is None else f"{c.factor - 1:+.1%}"
        rows.append(
            (
                c.item,
                c.metric,
                f"{c.old:.2f}",
                new,
                f"{c.drift - 1:+.1%}",
                change,
                f"{c.noise:.1%}",
                c.verdict,
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(8)]
    return "\n".join("  ".join(v.ljust(w) for v, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def hosts(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """How the hosts differ, in words; "" where they do not."""

    def told(record: Mapping[str, Any]) -> dict[str, Any]:
        host = record["host"]
        return {
            "gpu": host.get("gpu"),
            "driver": host.get("nvml", {}).get("driver"),
            **host.get("versions", {}),
        }

    a, b = told(old), told(new)
    return ", ".join(f"{k} {a.get(k)} -> {b.get(k)}" for k in {**a, **b} if a.get(k) != b.get(k))


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what changed; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m profiling.compare", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("old", type=Path, metavar="OLD.json")
    parser.add_argument("new", type=Path, metavar="NEW.json")
    parser.add_argument("--all", action="store_true", help="print what did not change, too")
    parser.add_argument(
        "--least", type=float, default=2.0, help="the least change that counts, in percent (2)"
    )
    options = parser.parse_args(arguments)
    if not 0 <= options.least < 100:
        parser.error(f"--least: got {options.least}, allowed 0 to 100")
    try:
        old, new = read(options.old), read(options.new)
        found = list(changes(old, new, options.least / 100))
    except ValueError as error:
        print(f"profiling.compare: {error}", file=sys.stderr)
        return 2
    if not found:
        print("profiling.compare: nothing of ours is in both files", file=sys.stderr)
        return 2
    if differs := hosts(old[0], new[0]):
        print(f"hosts: {differs}")
    shown = found if options.all else [c for c in found if c.verdict != "same"]
    if shown:
        print(table(shown))
    worse = sum(c.verdict in ("slower", "gone") for c in found)
    print(f"{len(found)} times: {worse} slower or gone, {sum(c.verdict == 'faster' for c in found)} faster")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
