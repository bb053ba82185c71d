"""`python -m profiling.resources REPORTS.json`: whether the compiled kernels use what is committed that
they use.

    python -m bindings.precompile --targets ... --out DIR --sample --json REPORTS.json
    python -m profiling.resources REPORTS.json              compares; exit code 1 if anything differs
    python -m profiling.resources REPORTS.json --update     takes the reports over into the committed file

`make check` does the first two, `make resources` the first and the last. Registers, spills, stack, shared
memory and instruction counts of every kernel and target are compared exactly: the compiler is pinned, so a
difference is a change of the device code, and it is to be deliberate. Reports of another compiler are not
compared, and that is said. Exit code 2 for files that cannot be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bindings import compiler

COMMITTED = Path(__file__).with_name("resources.json")
NUMBERS = ("registers", "spill_bytes", "stack", "smem")
Table = dict[str, dict[str, Any]]
"""Numbers by kernel: "target operator module params"."""


def made_with() -> dict[str, Any]:
    """What decides the numbers besides the sources: the compiler's version and its CUDA flavour."""
    chain = compiler.toolchain()
    return {"nvidia-cutlass-dsl": chain["packages"]["nvidia-cutlass-dsl"], "cuda": chain["flavour"]}


def table(reports: Sequence[Mapping[str, Any]]) -> Table:
    """The numbers of `precompile --json`'s reports; of instructions those counted, {} without a
    disassembler."""
    found = {}
    for row in reports:
        params = ",".join(f"{name}={value}" for name, value in sorted(row["params"].items()))
        key = f"{row['target']} {row['kernel']} {row['module']} {params}"
        numbers = {name: row[name] for name in NUMBERS}
        found[key] = {**numbers, "instructions": dict(sorted(row["instructions"].items()))}
    return dict(sorted(found.items()))


def differences(committed: Table, found: Table) -> list[str]:
    """What differs, a line each: kernels that are new or gone, and numbers that changed. Where a side
    counted no instructions they are not compared, nor spills that only counting tells."""
    lines = []
    for key in sorted({*committed, *found}):
        if key not in found:
            lines.append(f"{key}: is no longer built")
        elif key not in committed:
            lines.append(f"{key}: is new")
        else:
            changed = [f"{name} {was} -> {now}" for name, was, now in _changes(committed[key], found[key])]
            lines += [f"{key}: {', '.join(changed)}"] if changed else []
    return lines


def _changes(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    pairs = [(name, was[name], now[name]) for name in NUMBERS]
    before, after = was["instructions"], now["instructions"]
    if before and after:
        names = sorted({*before, *after}, key=lambda name: (name != "total", name))
        pairs += [(name, before.get(name, 0), after.get(name, 0)) for name in names]
    else:
        pairs = [pair for pair in pairs if pair[0] != "spill_bytes" or None not in pair]
    return [pair for pair in pairs if pair[1] != pair[2]]


def write(path: Path, found: Table) -> None:
    """The committed file: a kernel a line, so that a change of one is a line of a diff."""
    rows = ",\n".join(f"  {json.dumps(key)}: {json.dumps(numbers)}" for key, numbers in found.items())
    path.write_text(f'{{"made_with": {json.dumps(made_with())}, "kernels": {{\n{rows}\n}}}}\n')


def main(arguments: Sequence[str] | None = None) -> int:
    """Compares or updates; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m profiling.resources", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("reports", type=Path, metavar="REPORTS.json")
    parser.add_argument("--update", action="store_true", help="take the reports over into the committed file")
    parser.add_argument("--committed", type=Path, default=COMMITTED, metavar="FILE", help="that file")
    options = parser.parse_args(arguments)
    try:
        found = table(json.loads(options.reports.read_text()))
        if options.update:
            if bare := sum(not numbers["instructions"] for numbers in found.values()):
                print(
                    f"resources: {bare} kernels have no instruction counts: no disassembler", file=sys.stderr
                )
                return 2
            write(options.committed, found)
            print(f"resources: {len(found)} kernels written to {options.committed.name}")
            return 0
        committed = json.loads(options.committed.read_text())
        if committed["made_with"] != made_with():
            print(f"resources: not compared: committed with {committed['made_with']}, here {made_with()}")
            return 0
        lines = differences(committed["kernels"], found)
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"resources: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    for line in lines:
        print(f"RESOURCES: {line}", file=sys.stderr)
    if lines:
        name = options.committed.name
        print(f"resources: {len(lines)} kernels differ from {name}; if that is meant: make resources")
        return 1
    print(f"resources: {len(found)} kernels as in {options.committed.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
