"""`python -m profiling.report RESULT.json... -o DIR`: results as one page that is read in a minute.

    python -m profiling.report profiling/results/*.json -o report/

Takes files of `profiling.bench` (of several ranks too), `profiling.decode_step` and `profiling.ncu`, draws
PNGs into DIR and writes DIR/index.html, which holds them too and needs nothing else. The table of resources
is the committed one. Needs matplotlib (the extra `profiling`). Exit code 2 for files that cannot be used.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from profiling.reporting import data, figures, page
from profiling.resources import COMMITTED

LONG = "gdn_packed_decode"
"""With many rows it moves enough to be held against the bandwidth."""


def draw(results: data.Results, folder: Path) -> list[page.Picture]:
    """Every picture that the results have the numbers for, written into the folder."""
    drawn: list[page.Picture] = []

    def add(name: str, figure: object, caption: str, records: Sequence[data.Record]) -> None:
        sources = [data.source(record) for record in records]
        path = folder / f"{name}.png"
        figures.save(figure, path, sources)  # type: ignore[arg-type]  # a Figure, whose package may be absent
        drawn.append(page.Picture(path, caption))

    scaled = data.scaling(results.bench)
    for record in data.steps(results.decode_step):
        if all(record["arms"][name]["trace"] for name in ("fused", "unfused")):
            ranks = data.ranks_of(record)
            among = f" on {ranks} ranks" if ranks > 1 else ""
            caption = (
                f"A rank's decode step{among}, separate launches and fused: four layers, and all by kernel "
                "family."
            )
            name = "decode_step" + (f"_{ranks}_ranks" if ranks > 1 else "")
            add(name, figures.step(record), caption, [record])
    for record in results.ranks[-1:]:
        if any(run["error"] is None for run in record["runs"]):
            caption = (
                f"What {data.ranks_of(record)} ranks do together, a GPU each: ours, others' all-reduces, and "
                "the launches that the fused kernel replaces."
            )
            add("ranks", figures.ranks(record), caption, [record])
    if any(data.bars(run) for _, run in data.runs(results.bench, 1)):
        records = [record for record, _ in data.runs(results.bench, 1)]
        caption = "Cold latency of one token's call, beside the fastest published kernel and torch."
        add("latency", figures.latency(results.bench), caption, records)
    floors = [f for f in data.floors(results.bench) if f.rows == 1 or f.op not in scaled or f.op == LONG]
    if floors:
        caption = (
            "How far each operator is from launching nothing and moving only what its contract has it move."
        )
        add("floors", figures.floors(floors), caption, results.bench)
    if scaled:
        caption = "Cold latency by number of rows."
        add("scaling", figures.scaling(scaled), caption, results.bench)
    return drawn


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the report; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m profiling.report", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT.json")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="DIR", help="folder for the report")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("matplotlib") is None:
        print("profiling.report: needs matplotlib: pip install -e '.[profiling]'", file=sys.stderr)
        return 2
    try:
        results = data.load(options.results, COMMITTED)
        options.out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        print(f"profiling.report: {error}", file=sys.stderr)
        return 2
    pictures = draw(results, options.out)
    (options.out / "index.html").write_text(page.page(results, pictures))
    print(f"{len(pictures)} pictures, index.html in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
