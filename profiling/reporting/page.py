"""The report as one HTML page that needs nothing else: pictures are part of it."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiling.acceptance import UNFUSED
from profiling.reporting import data
from profiling.step import families

STYLE = """
:root { color-scheme: light; --ink: #1f2933; --soft: #52606d; --line: #d5dae0; --ours: #0b6e4f; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1120px; padding: 24px 20px 60px; color: var(--ink); background: #fff;
  font: 16px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 4px; line-height: 1.2; }
h2 { font-size: 1.15rem; margin: 40px 0 8px; }
p.host, figcaption, .note { color: var(--soft); font-size: .85rem; }
p.host { margin: 0 0 20px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); gap: 12px; }
.tile { border: 1px solid var(--line); border-radius: 10px; padding: 12px 16px; }
.tile b { display: block; font-size: 1.7rem; line-height: 1.25; color: var(--ours); }
.tile span { font-size: .88rem; color: var(--soft); }
figure { margin: 12px 0 0; }
.wide { overflow-x: auto; }
.wide img { display: block; width: 100%; min-width: 560px; height: auto; }
table { border-collapse: collapse; font-size: .77rem; width: 100%; }
th, td { text-align: right; padding: 3px 7px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th { color: var(--soft); font-weight: 600; }
td.bad { color: #b42318; font-weight: 600; }
code { font-size: .85em; overflow-wrap: anywhere; }
details { margin-top: 8px; } summary { cursor: pointer; color: var(--soft); font-size: .88rem; }
@media (max-width: 600px) { body { padding: 16px 14px 40px; } h1 { font-size: 1.4rem; } }
"""


@dataclass(frozen=True)
class Picture:
    """A PNG beside the page, which says where its numbers are from, and what it shows, in a sentence."""

    path: Path
    caption: str


def escape(text: object) -> str:
    return html.escape(str(text))


def figure(picture: Picture) -> str:
    encoded = base64.b64encode(picture.path.read_bytes()).decode()
    caption = escape(picture.caption)
    return (
        f'<figure><div class="wide"><img alt="{caption}" src="data:image/png;base64,{encoded}"></div>'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def grid(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table; a cell "FAIL" stands out."""
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(
        "<tr>"
        + "".join(f"<td{' class=bad' if str(c).startswith('FAIL') else ''}>{escape(c)}</td>" for c in row)
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'


def tiles(results: data.Results) -> str:
    """The numbers to take away, a tile each."""
    made = []
    for record in data.steps(results.decode_step):
        ratio = record["ratio"]["median"]
        layers, fused = record["shape"]["layers"], record["arms"]["fused"]["cold"]["median"] / 1e3
        unfused = record["arms"]["unfused"]["cold"]["median"] / 1e3
        ranks = f" on {n} ranks" if (n := data.ranks_of(record)) > 1 else ""
        text = f"decode step of {layers} layers{ranks}: "
        text += f"{unfused:.2f} ms in separate launches, {fused:.2f} ms fused"
        made.append((f"{ratio:.2f}\u00d7", text))
    judged = data.judgements((*results.bench, *results.collective, *results.ranks))
    best: dict[str, tuple[float, str]] = {}  # one a piece of work: of one row, beside what others published
    for j in judged:
        others = not j["against"].startswith(("ours", "torch eager"))
        met = j["ratio"] and j["rows"] == 1 and j["metric"] == "cold" and j["verdict"] == "PASS" and others
        if met and j["ratio"] > max(1 + (j["noise"] or 0), best.get(j["op"], (0.0, ""))[0]):
            best[j["op"]] = j["ratio"], f"{j['op']}, one row{j['where']}, beside {j['against']}"
    for ratio, text in sorted(best.values(), reverse=True)[:2]:
        made.append((f"{ratio:.2f}\u00d7", text))
    counted = [j for j in judged if j["verdict"] in ("PASS", "FAIL")]
    if counted:
        passed = sum(j["verdict"] == "PASS" for j in counted)
        made.append((f"{passed} of {len(counted)}", "of what is asked of the kernels is met in these runs"))
    items = "".join(f'<div class="tile"><b>{escape(a)}</b><span>{escape(b)}</span></div>' for a, b in made)
    return f'<div class="tiles">{items}</div>' if made else ""


def acceptance(records: Sequence[data.Record]) -> str:
    """What is asked of the kernels, the latest judgement of each item."""
    rows = []
    for j in data.judgements(records):
        mine = "" if j["us"] is None else f"{j['us']:.2f}"
        theirs = "" if j["against_us"] is None else f"{j['against_us']:.2f}"
        ratio = "" if j["ratio"] is None else f"{j['ratio']:.3f}"
        sign = "\u2264" if j["metric"] == "host" else "\u2265"
        bound = "" if j["bound"] is None else f"{sign} {j['bound']:.3g}"
        noise = "" if j["noise"] is None else f"{j['noise']:.1%}"
        item = f"{j['op']}, {j['rows']}{j['where']}" + (
            "" if j["version"] == "ours" else f" [{j['version']}]"
        )
        verdict = j["verdict"] + (" ~" if j["note"].startswith("within noise") else "")
        rows.append((item, j["metric"], verdict, mine, j["against"], theirs, ratio, bound, noise))
    table = grid(("work, rows", "metric", "verdict", "us", "against", "us", "ratio", "asked", "noise"), rows)
    sources = "<br>".join(f"<code>{escape(data.source(record))}</code>" for record in records)
    return table + f'<p class="note">~ within noise of what is asked.<br>{sources}</p>'


def ranks(record: data.Record) -> str:
    """Every run of several ranks beside the fastest of what it is held against, and the link."""
    rows = []
    for _, run in data.runs([record]):
        cells: list[str] = []
        for metric in ("cold", "hot"):
            mine = next((b for b in data.versions_of_ranks(run, metric) if b.ours), None)
            other = data.replaced(run, metric)
            cells.append("" if mine is None else f"{mine.median:.2f}")
            if other is None:
                cells += ["", "", ""]
                continue
            ratio = "" if mine is None else f"{other.median / mine.median:.2f}"
            cells += [other.name.removeprefix(UNFUSED), f"{other.median:.2f}", ratio]
        rows.append((run["op"], run["rows"], *cells))
    side = ("us", "fastest, with", "us", "of medians")
    table = grid(("work", "rows", "cold: " + side[0], *side[1:], "hot: " + side[0], *side[1:]), rows)
    link = record.get("link")
    way = f"One way over the link, by ping-pong: {link['one_way_us']:.2f} us. " if link else ""
    sentence = (
        f"{way}Times of the slowest rank. For the fused operator: finalize, gate-add, and that all-reduce."
    )
    source = f"<code>{escape(data.source(record))}</code>"
    return table + f'<p class="note">{escape(sentence)}<br>{source}</p>'


def step_table(record: data.Record) -> str:
    """Busy time by family, both arms."""
    traces = [record["arms"][name]["trace"] for name in ("unfused", "fused")]
    if not all(traces):
        return ""
    tables = [{row["family"]: row for row in trace["families"]} for trace in traces]
    rows = []
    for name in families.NAMES:
        cells = [table.get(name) for table in tables]
        if any(cells):
            rows.append(
                (name, *(v for c in cells for v in ((c["launches"], f"{c['us']:.1f}") if c else ("", ""))))
            )
    rows.append(("nothing ran", *(v for trace in traces for v in ("", f"{trace['idle_us']:.1f}"))))
    return grid(("kernel family", "launches unfused", "us", "launches fused", "us"), rows)


def resources(table: data.Record) -> str:
    """Registers, shared memory and instructions by operator and target."""
    by_operator = data.resources_by_operator(table)
    targets = sorted(
        {target for cells in by_operator.values() for target in cells}, key=lambda t: (len(t), t)
    )

    def span(pair: tuple[int, int]) -> str:
        return str(pair[0]) if pair[0] == pair[1] else f"{pair[0]}\u2013{pair[1]}"

    rows = []
    for op, cells in by_operator.items():
        for target in targets:
            if (cell := cells.get(target)) is not None:
                numbers = (span(cell[n]) for n in ("registers", "smem", "spills", "instructions"))
                rows.append((op, target, cell["variants"][1], *numbers))
    head = (
        "operator",
        "target",
        "variants",
        "registers",
        "shared memory, bytes",
        "spills, bytes",
        "instructions",
    )
    return grid(head, rows)


def ncu(record: data.Record) -> str:
    rows = []
    for k in record["kernels"]:
        least = k["minimum"]
        rows.append(
            (
                *(k["op"], f"{k['us']:.2f}", f"{k['dram_bytes'] / 1e3:.0f}", f"{k['l2_bytes'] / 1e3:.0f}"),
                *(
                    "" if least is None else f"{least / 1e3:.0f}",
                    k["registers"],
                    f"{k['occupancy']:.0f} %",
                    k["stall"],
                ),
            )
        )
    head = ("operator", "us", "DRAM KB", "L2 KB", "contract KB", "registers", "warps active", "top stall")
    return grid(head, rows)


def counters(record: data.Record) -> str:
    """What the emulator counted, an operator and target a row."""
    names = list(dict.fromkeys(name for k in record["kernels"] for name in k["counters"]))
    rows = (
        (
            k["op"],
            k["target"],
            k["bytes"],
            *((k["counters"].get(n, "") for n in names) if not k["error"] else ("FAIL",)),
        )
        for k in record["kernels"]
    )
    return grid(("operator", "target", "contract's bytes", *(name.replace("_", " ") for name in names)), rows)


def page(results: data.Results, pictures: Sequence[Picture]) -> str:
    """The whole page."""
    first = results.records[0]
    timed = [r for r in results.records if r["host"].get("gpu")]
    hosts = list(dict.fromkeys(f"{r['host']['gpu']}, {r['date']}" for r in timed))
    title = f"flashnext-kernels on {first['host'].get('gpu') or 'no GPU'}"
    parts = [f"<h1>{escape(title)}</h1>", f'<p class="host">{escape("; ".join(hosts))}</p>', tiles(results)]
    parts += [figure(picture) for picture in pictures]
    for record in results.ranks[-1:]:
        parts += [f"<h2>Across {data.ranks_of(record)} ranks, a GPU each</h2>", ranks(record)]
    for record in data.steps(results.decode_step):
        if table := step_table(record):
            among = f", {n} ranks" if (n := data.ranks_of(record)) > 1 else ""
            parts += [f"<h2>Where the decode step's time goes{among}</h2>", table]
    timed_records = (*results.bench, *results.collective, *results.ranks)
    judged = [record for record in timed_records if record["acceptance"]]
    if judged:
        parts += ["<h2>What is asked, and what was measured</h2>", acceptance(judged)]
    for record in results.ncu[-1:]:
        note = f'<p class="note">{escape(record["control"])}; <code>{escape(data.source(record))}</code></p>'
        parts += ["<h2>Nsight Compute, one warm launch each</h2>", ncu(record), note]
    if results.resources:
        parts += ["<h2>What the compiled kernels use, per target</h2>", resources(results.resources)]
    for record in results.counters[-1:]:
        note = f'<p class="note"><code>{escape(data.source(record))}</code></p>'
        parts += [
            "<h2>Counted by the emulator, for targets without a device here</h2>",
            counters(record),
            note,
        ]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{STYLE}</style></head>'
        f"<body>\n{body}\n</body></html>\n"
    )
