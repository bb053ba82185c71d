"""The pictures of the report. Each takes what it draws and gives a figure; every one says host, date and
command."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiling.reporting import data

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS, PUBLISHED, TORCH, GREY, INK = "#0b6e4f", "#e08e45", "#9aa5b1", "#d5dae0", "#1f2933"
FAMILY_COLOURS = (
    "#0b6e4f",
    "#52b788",
    "#95d5b2",
    "#3a6ea5",
    "#e08e45",
    "#b5838d",
    "#6d597a",
    "#f2cc8f",
    "#9aa5b1",
    "#d5dae0",
)
CUT = 1.25
"""A bar longer than this many times the longest of ours and the published is cut off, and says its value."""


def new(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """A figure without a window, and its axes."""
    import matplotlib
    from matplotlib import pyplot

    matplotlib.use("Agg")
    pyplot.rcParams.update(
        {
            "font.size": 10,
            "axes.edgecolor": "#7b8794",
            "axes.labelcolor": INK,
            "text.color": INK,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlesize": 11,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "legend.frameon": False,
        }
    )
    return pyplot.subplots(rows, columns, figsize=(width, height), layout="constrained", **options)


def save(figure: Figure, path: Path, sources: Sequence[str]) -> None:
    """Writes the PNG, with where its numbers are from as its last lines."""
    from matplotlib import pyplot

    lines = [line for text in dict.fromkeys(sources) for line in textwrap.wrap(text, 118)]
    figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=7.5, color="#52606d")
    figure.savefig(path, dpi=160, facecolor="white", metadata={"Software": None})
    pyplot.close(figure)


def latency(records: Sequence[data.Record]) -> Figure:
    """One row: ours, the fastest published kernel and torch, with whiskers from the 10th to the 90th
    percentile."""
    runs = [(run, bars) for _, run in data.runs(records, 1) if (bars := data.bars(run)) and bars[0].ours]
    figure, axes = new(8.6, 1.1 + 0.78 * len(runs))
    mine = [bar.median for _, bars in runs for bar in bars if bar.name not in data.TORCH]
    limit = CUT * max(mine)
    ticks, names, y = [], [], 0.0
    for run, bars in runs:
        ticks.append(y + 0.27 * (len(bars) - 1) / 2)
        names.append(run["op"] + (", B = 1" if run["op"].startswith("gdn") else ""))
        for bar in bars:
            _bar(axes, y, bar, limit)
            y += 0.27
        y += 0.22
    axes.set_yticks(ticks, names)
    axes.set_ylim(y, -0.3)
    axes.set_xlim(0, limit * 1.22)
    cut = any(bar.median > limit for _, bars in runs for bar in bars)
    axes.set_xlabel(
        "microseconds, one call from cold caches; whiskers: 10th to 90th percentile"
        + ("\na broken bar is longer than drawn: its number tells" if cut else "")
    )
    axes.set_title("One token: ours beside the fastest published kernel and torch", pad=26)
    shown = {"ours": OURS, "fastest published": PUBLISHED, "torch.compile, else eager": TORCH}
    handles = [_patch(c, n) for n, c in shown.items()]
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=3,
        fontsize=8.5,
        borderaxespad=0.1,
    )
    return figure


def _bar(axes: Axes, y: float, bar: data.Bar, limit: float, colour: str | None = None) -> None:
    colour = colour or (OURS if bar.ours else TORCH if bar.name in data.TORCH else PUBLISHED)
    cut = bar.median > limit
    axes.barh(y, min(bar.median, limit), 0.24, color=colour)
    if cut:
        for at in (0.955, 0.97):
            x = [limit * at, limit * (at + 0.01)]
            axes.plot(x, [y + 0.14, y - 0.14], color="white", linewidth=1.6, solid_capstyle="butt")
    else:
        span = [[bar.median - bar.p10], [bar.p90 - bar.median]]
        axes.errorbar(bar.median, y, xerr=span, color=INK, linewidth=0.9, capsize=1.8)
    label = f"{bar.median:.1f}"
    at = limit if cut else max(bar.median, bar.p90)
    axes.text(at + limit * 0.012, y, label, va="center", fontsize=7.5)


def ranks(record: data.Record) -> Figure:
    """What several ranks do together, at the least number of rows: a line of panels an operator, cold and
    hot."""
    runs: dict[str, data.Record] = {}
    for _, run in data.runs([record]):  # by rows, ascending
        runs.setdefault(run["op"], run)
    bars = {op: {m: data.versions_of_ranks(run, m) for m in ("cold", "hot")} for op, run in runs.items()}
    names = {
        op: list(dict.fromkeys(b.name for found in by.values() for b in found)) for op, by in bars.items()
    }
    counts = [len(found) for found in names.values()]
    figure, panels = new(
        8.6, 1.5 + 0.27 * sum(counts) + 0.5 * len(counts), len(runs), 2, squeeze=False, height_ratios=counts
    )
    for line, (op, by_metric) in zip(panels, bars.items(), strict=True):
        for axes, (metric, found) in zip(line, by_metric.items(), strict=True):
            longest = max((max(bar.median, bar.p90) for bar in found), default=1.0)
            for bar in found:
                own = not bar.ours and bar.name.startswith(("moe_finalize", "all_reduce", "link"))
                _bar(axes, 0.3 * names[op].index(bar.name), bar, longest, "#95d5b2" if own else None)
            labels = names[op] if metric == "cold" else [""] * len(names[op])
            axes.set_yticks([0.3 * i for i in range(len(labels))], labels, fontsize=8)
            axes.set_ylim(0.3 * len(labels) - 0.12, -0.2)
            axes.set_xlim(0, longest * 1.2)
            axes.set_title(f"{op}, T = {runs[op]['rows']}, {metric}", fontsize=9)
            axes.tick_params(axis="x", labelsize=8)
    for axes in panels[-1]:
        axes.set_xlabel("us, slowest rank; whiskers: 10th to 90th percentile", fontsize=8)
    handles = [_patch(OURS, "ours"), _patch("#95d5b2", "ours, in several launches, and a part of it")]
    handles.append(_patch(PUBLISHED, "with an all-reduce of NCCL or torch"))
    figure.legend(handles=handles, loc="outside upper left", ncols=3, fontsize=8.5)
    return figure


def _patch(colour: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour, label=label)


def floors(found: Sequence[data.Floor]) -> Figure:
    """What one launch's time is made of: launching nothing, moving the contract's bytes, and the rest."""
    figure, axes = new(8.6, 1.2 + 0.34 * len(found))
    y = range(len(found))
    share = [f.total for f in found]
    parts = (
        ("an empty kernel", [f.launch / f.total for f in found], GREY),
        ("the contract's bytes at a large copy's bandwidth", [f.traffic / f.total for f in found], "#95d5b2"),
        ("the rest", [f.rest / f.total for f in found], OURS),
    )
    left = [0.0] * len(found)
    for label, values, colour in parts:
        axes.barh(y, values, 0.66, left=left, color=colour, label=label)
        left = [a + b for a, b in zip(left, values, strict=True)]
    for i, floor in enumerate(found):
        axes.text(
            1.01, i, f"{share[i]:.1f} us, floor {floor.launch + floor.traffic:.1f}", va="center", fontsize=8
        )
    axes.set_yticks(y, [f.op + (f", {f.rows} rows" if f.rows > 1 else "") for f in found])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.28)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    axes.set_title("Distance to the floor: what our cold time is made of", pad=24)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, fontsize=8.5, borderaxespad=0.1)
    return figure


def scaling(found: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]]) -> Figure:
    """Time by number of rows, one panel an operator."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    columns = min(3, len(found))
    lines = -(-len(found) // columns)
    figure, axes = new(8.6, 0.9 + 2.3 * lines, lines, columns, squeeze=False)
    styles = {"ours": (OURS, "o-"), "best published": (PUBLISHED, "s--")}
    for panel, (op, kinds) in zip(axes.flat, found.items(), strict=False):
        for kind, points in kinds.items():
            colour, style = styles.get(kind, (TORCH, "^:"))
            panel.plot(
                *zip(*points, strict=True), style, color=colour, label=kind, markersize=4, linewidth=1.4
            )
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        rows = sorted({rows for points in kinds.values() for rows, _ in points})
        panel.set_xticks(rows, [str(r) for r in rows])
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.yaxis.set_minor_formatter(NullFormatter())
        panel.set_title(op, fontsize=9)
        panel.grid(True, which="major", color=GREY, linewidth=0.5)
        panel.tick_params(labelsize=8)
        panel.set_xlabel("rows", fontsize=8)
        panel.set_ylabel("us, cold", fontsize=8)
    for panel in list(axes.flat)[len(found) :]:
        panel.set_visible(False)
    handles = [_patch(OURS, "ours"), _patch(PUBLISHED, "fastest published"), _patch(TORCH, "torch")]
    figure.legend(handles=handles, loc="outside upper right", ncols=3, fontsize=8.5)
    figure.suptitle("Time by number of rows", x=0.01, ha="left", fontweight="bold", fontsize=11)
    return figure


def step(record: data.Record) -> Figure:
    """A decode step: four layers of it as a timeline, and its busy time by kernel family."""
    arms = {name: record["arms"][name] for name in ("unfused", "fused")}
    traces = {name: arm["trace"] for name, arm in arms.items()}
    figure, (line, bar) = new(8.6, 5.6, 2, 1, height_ratios=[1, 1.25])
    names = traces["fused"]["names"]
    colours = dict(zip(range(len(names)), FAMILY_COLOURS, strict=False))
    for y, trace in enumerate(traces.values()):
        first = min(span[0] for span in trace["spans"])
        for start, length, family in trace["spans"]:
            line.barh(y, length, 0.62, left=start - first, color=colours[family])
    line.set_yticks(range(2), list(traces))
    line.invert_yaxis()
    line.set_xlabel("microseconds", fontsize=9)
    line.set_title(
        f"Timeline of {traces['fused']['shown'].removeprefix('about ')}, as the profiler saw one replay"
    )
    left = dict.fromkeys(traces, 0.0)
    for index, family in enumerate(names):
        values = []
        for trace in traces.values():
            row = next((r for r in trace["families"] if r["family"] == family), None)
            values.append(row["us"] if row else 0.0)
        if any(values):
            bar.barh(range(2), values, 0.6, left=list(left.values()), color=colours[index], label=family)
            for y, (name, value) in enumerate(zip(traces, values, strict=True)):
                if value > 0.045 * max(t["us"] for t in traces.values()):
                    light = index in (0, 3, 6)
                    at = left[name] + value / 2
                    bar.text(
                        at,
                        y,
                        f"{value:.0f}",
                        ha="center",
                        va="center",
                        fontsize=8,
                        color="white" if light else INK,
                    )
                left[name] += value
    labels = [f"{name}\n{arms[name]['cold']['median'] / 1e3:.3f} ms" for name in traces]
    bar.set_yticks(range(2), labels)
    bar.invert_yaxis()
    bar.set_xlabel(
        "microseconds busy, by kernel family; side by side, or started early and waiting, counts in both",
        fontsize=9,
    )
    ratio = record["ratio"]["median"]
    layers, count = record["shape"]["layers"], data.ranks_of(record)
    among = f", {count} ranks" if count > 1 else ""
    bar.set_title(f"Whole step, {layers} layers{among}: fused is {ratio:.2f} times as fast")
    bar.legend(loc="upper center", bbox_to_anchor=(0.5, -0.24), ncols=4, fontsize=8)
    return figure
