"""The report: what its pictures are drawn from, and the page made of the committed results, opened in a
browser."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from profiling import report
from profiling.acceptance import AGAIN, COPY, COPY_SAME, EMPTY, GEMMS, OURS, SEPARATE
from profiling.cases import CASES
from profiling.ncu import parse
from profiling.reporting import data, page

RESULTS = Path(report.__file__).with_name("results")
COMMITTED = sorted(RESULTS.glob("*.json"))

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib: the extra `profiling`"
)
BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))),
    None,
)
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="needs Chromium (chromium, chromium-browser or google-chrome on PATH)"
)


def timing(median: float) -> dict[str, float]:
    return {"median": median, "p10": median - 0.2, "p90": median + 0.3}


def run(op: str, rows: int = 1, nbytes: int = 1000, error: str | None = None, **us: float) -> dict[str, Any]:
    """A run whose versions take what is said; underscores in names are spaces."""
    versions = [
        {"name": name.replace("_", " "), "bytes": nbytes, "cold": timing(t)} for name, t in us.items()
    ]
    return {"op": op, "rows": rows, "error": error, "versions": versions, "noise": {}, "host": {}}


def bench(*runs: dict[str, Any], **about: Any) -> dict[str, Any]:
    host = {"gpu": "A GPU", "nvml": {"driver": "580"}, "versions": {"torch": "2.11"}}
    record = {"kind": "bench", "date": "2026-11-29", "command": "python -m profiling.bench", "host": host}
    return {**record, "runs": list(runs), "acceptance": [], **about}


def test_every_picture_says_host_date_and_command() -> None:
    assert data.source(bench()) == "A GPU, driver 580, torch 2.11; 2026-11-29; python -m profiling.bench"


def test_bars_are_ours_the_fastest_published_and_torch() -> None:
    one = run("hc_gate", ours=4.0, slow_peer=6.0, fast_peer=5.0, torch_eager=30.0)
    yardsticks = (AGAIN, EMPTY, "read floor 1x320", "tile 8", COPY, COPY_SAME, GEMMS, SEPARATE)
    one["versions"] += run("hc_gate", **dict.fromkeys(yardsticks, 1.0))["versions"]
    one["versions"].append({"name": "broken", "bytes": 1, "cold": None})
    bars = data.bars(one)
    assert [(b.name, b.ours) for b in bars] == [("ours", True), ("fast peer", False), ("torch eager", False)]
    assert (bars[0].median, bars[0].p10, bars[0].p90) == (4.0, 3.8, 4.3)
    one["versions"] += run("hc_gate", **{"torch.compile": 9.0})["versions"]
    assert data.bars(one)[-1].name == "torch.compile", "compiled where there is both"


def test_runs_are_in_the_order_of_the_cases_and_the_later_counts() -> None:
    first = bench(
        run("hc_mix", ours=9.0), run("hc_gate", 4, ours=5.0), run("hc_apply", error="gone", ours=1.0)
    )
    second = bench(run("hc_mix", ours=8.0), run("hc_gate", ours=4.0))
    found = [(r["op"], r["rows"], data.bars(r)[0].median) for _, r in data.runs([first, second])]
    assert found == [("hc_gate", 1, 4.0), ("hc_gate", 4, 5.0), ("hc_mix", 1, 8.0)]
    assert [r["op"] for _, r in data.runs([first, second], 4)] == ["hc_gate"]


def test_of_two_judgements_the_later_counts() -> None:
    def judged(against: str, ratio: float, op: str = "gdn_packed_decode") -> dict[str, Any]:
        return {"op": op, "rows": 1, "metric": "cold", "version": "ours", "against": against, "ratio": ratio}

    first = bench(
        acceptance=[judged("sglang Triton GDN, tile 4", 0.9), judged("read floor 1x320", 0.8, "shared_gate")]
    )
    second = bench(
        acceptance=[judged("sglang Triton GDN, tile 8", 1.1), judged("read floor 5x64", 0.7, "shared_gate")]
    )
    third = bench(
        acceptance=[
            judged("finalize, all_reduce", 2.0, "r"),
            judged("finalize, addcmul, all_reduce", 3.0, "r"),
        ]
    )
    assert [j["ratio"] for j in data.judgements([first, second, third])] == [1.1, 0.7, 2.0, 3.0]


def test_tiles_are_of_one_row_beside_what_others_published() -> None:
    def judged(against: str, ratio: float, rows: int = 1, op: str = "hc_mix") -> dict[str, Any]:
        return {
            "op": op,
            "rows": rows,
            "metric": "cold",
            "version": OURS,
            "against": against,
            "us": 1.0,
            "against_us": ratio,
            "ratio": ratio,
            "bound": 1.0,
            "noise": 0.01,
            "verdict": "PASS",
            "note": "",
        }

    items = [judged("Triton", 1.7), judged("Triton", 1.9, rows=16), judged("torch eager", 2.5)]
    items += [judged("Triton", 1.2, op="gdn_packed_decode"), judged(SEPARATE, 3.0, op="hc_boundary")]
    text = page.tiles(data.Results(bench=[bench(acceptance=items)]))
    assert re.findall(r"<b>(.*?)</b><span>(\w+)", text) == [
        ("1.70\u00d7", "hc_mix"),
        ("1.20\u00d7", "gdn_packed_decode"),
        ("5 of 5", "of"),
    ]


def test_floors() -> None:
    copied = run("gdn_packed_decode", 64, nbytes=8000, ours=30.0, **{EMPTY: 3.0, COPY: 2.0})
    copied["versions"][-1]["bytes"] = 8000  # 4000 bytes a microsecond
    (floor,) = data.floors([bench(copied)])
    assert (floor.launch, floor.traffic, floor.total, floor.rest) == (3.0, 2.0, 30.0, 25.0)
    older = run("hc_gate", ours=4.0, **{EMPTY: 3.0})
    for version in older["versions"]:
        del version["bytes"]  # as summaries once were
    assert len(data.floors([bench(copied, older)])) == 1
    assert data.Floor("op", 1, 3.0, 2.0, 4.5).rest == 0.0, "faster than its floor: no bar of negative length"
    assert data.floors([bench(run("hc_gate", ours=4.0, **{EMPTY: 3.0}))]) == [], (
        "without a copy there is none"
    )


def test_scaling() -> None:
    runs = [run("hc_gate", rows, ours=4.0 + rows, a_peer=5.0, torch_eager=9.0) for rows in (4, 1)]
    found = data.scaling([bench(*runs, run("hc_mix", ours=9.0))])
    assert list(found) == ["hc_gate"], "one number of rows is no line"
    assert found["hc_gate"]["ours"] == [(1, 5.0), (4, 8.0)]
    assert set(found["hc_gate"]) == {"ours", "best published", "torch eager"}


def test_resources_by_operator() -> None:
    row = {"registers": 32, "smem": 80, "spill_bytes": 0, "instructions": {"total": 100}}
    table = {
        "sm_90a hc_gate m a=1": row,
        "sm_90a hc_gate m a=2": row | {"registers": 40, "instructions": {"total": 90}},
        "sm_100a hc_gate m a=1": row,
    }
    cells = data.resources_by_operator(table)["hc_gate"]
    assert cells["sm_90a"]["registers"] == (32, 40)
    assert cells["sm_90a"]["instructions"] == (90, 100)
    assert (cells["sm_90a"]["variants"][1], cells["sm_100a"]["variants"][1]) == (2, 1)


def test_summaries_and_results_are_taken_apart() -> None:
    one = bench()
    step = {"kind": "decode_step"}
    assert data.unwrap(one) == [one]
    assert data.unwrap({"stages": [], "bench": one, "decode_step": step, "ncu": None}) == [one, step]
    assert data.unwrap({"stages": [], "bench": {"runs": []}, "ncu": []}) == [{"kind": "bench", "runs": []}]
    assert data.unwrap({"layers": 48}) == []
    assert data.unwrap([]) == []


def test_what_is_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: the extra `profiling`")
    path = tmp_path / "f.json"
    foreign = '{"kind": "bench", "host": {}, "runs": [{"op": "hc_gate", "rows": 1}]}'
    for text, message in (
        ("{}", "no result of a command"),
        ("no JSON", "Expecting value"),
        (foreign, "a run in it has no error: no result of"),
    ):
        path.write_text(text)
        assert report.main([str(path), "-o", str(tmp_path / "out")]) == 2
        assert message in capsys.readouterr().err
    assert report.main([str(tmp_path / "none.json"), "-o", str(tmp_path / "out")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None)
    assert report.main(["f.json", "-o", "out"]) == 2
    assert "pip install -e '.[profiling]'" in capsys.readouterr().err


def test_text_is_escaped() -> None:
    record = bench(acceptance=[], command="<script>alert(1)</script>")
    assert "<script>" not in page.page(data.Results(bench=[record]), [])
    assert "&lt;b&gt;" in page.grid(("a",), [("<b>",)])


def test_nsight_compute_and_the_emulator_are_on_the_page() -> None:
    captured = Path(__file__).with_name("data")
    kernels = [k.to_json() for k in parse.read(captured / "gdn.csv", captured / "gdn.json")]
    host = bench()["host"]
    about = {"date": "2026-11-29", "command": "a command", "host": host}
    ncu = {"kind": "ncu", "control": "one warm launch each", "kernels": kernels, **about}
    counted = {
        "op": "hc_mix",
        "target": "sm_100a",
        "bytes": 7,
        "error": None,
        "counters": {"matrix_flops": 42},
    }
    broken = counted | {"target": "sm_103a", "error": "gone", "counters": {}}
    emulated = {"kind": "counters", "kernels": [counted, broken], **about}
    text = page.page(data.Results(ncu=[ncu], counters=[emulated]), [])
    assert "<td>gdn_packed_decode</td><td>3.81</td><td>802</td><td>2773</td><td>1581</td><td>56</td>" in text
    assert "one warm launch each" in text
    assert "<td>hc_mix</td><td>sm_100a</td><td>7</td><td>42</td>" in text
    assert "<td>hc_mix</td><td>sm_103a</td><td>7</td><td class=bad>FAIL</td>" in text


RANKED = ("all_reduce", "moe_finalize_all_reduce")
SEQUENCES = {
    "ours": (6.0, 3.0),
    "ours, again": (6.0, 3.0),
    "moe_finalize, all_reduce": (9.0, 4.0),
    "finalize, gate-add, NCCL all_reduce": (20.0, 15.0),
    "finalize, gate-add, torch one_shot_all_reduce": (16.0, 9.0),
    "empty kernel": (3.0, 0.5),
    "link one way + moe_finalize alone": (None, 2.5),
}


def ranked(*rows: int) -> dict[str, Any]:
    """A result of two ranks."""

    def one(op: str, rows: int, versions: dict[str, tuple[float | None, float]]) -> dict[str, Any]:
        listed = [
            {"name": n, "bytes": 1, "error": None, "cold": cold and timing(cold), "hot": timing(hot)}
            for n, (cold, hot) in versions.items()
        ]
        return {"op": op, "rows": rows, "ranks": 2, "error": None, "versions": listed, "noise": {}}

    sums = {"ours": (5.0, 2.0), "NCCL all_reduce": (15.0, 10.0)}
    made = [one(op, r, v) for op, v in zip(RANKED, (sums, SEQUENCES), strict=True) for r in rows]
    command = "torchrun --nproc-per-node 2 -m profiling.bench"
    return bench(*made, kind="ranks", ranks=2, command=command, link={"one_way_us": 0.8})


def test_several_ranks_beside_what_they_replace() -> None:
    record = ranked(4, 1)
    assert data.source(record).startswith("2 x A GPU, driver 580")
    runs = [run for _, run in data.runs([record])]
    assert [(run["op"], run["rows"]) for run in runs] == [(op, rows) for op in RANKED for rows in (1, 4)]
    names = [bar.name for bar in data.versions_of_ranks(runs[2], "cold")]
    assert names == [name for name, (cold, _) in SEQUENCES.items() if cold and "again" not in name][:-1]
    assert data.replaced(runs[0], "hot").name == "NCCL all_reduce"
    assert data.replaced(runs[2], "hot").median == 9.0, "not the sum of measurements, which is less"
    text = page.page(data.Results(ranks=[record]), [])
    assert "Across 2 ranks, a GPU each" in text
    one_shot = "torch one_shot_all_reduce"
    cells = (
        "moe_finalize_all_reduce",
        1,
        "6.00",
        one_shot,
        "16.00",
        "2.67",
        "3.00",
        one_shot,
        "9.00",
        "3.00",
    )
    assert "".join(f"<td>{cell}</td>" for cell in cells) in text
    assert "by ping-pong: 0.80 us" in text


def test_decode_steps_of_one_and_of_several_ranks_stand_side_by_side() -> None:
    def step(ranks: int, us: float) -> dict[str, Any]:
        arms = {name: {"cold": timing(us), "trace": None} for name in ("fused", "unfused")}
        shape = {"layers": 48, "ranks": ranks}
        return bench(kind="decode_step", shape=shape, arms=arms, ratio={"median": 1.5})

    steps = [step(2, 9.0), step(1, 3.0), step(2, 5.0)]
    assert [(data.ranks_of(s), s["arms"]["fused"]["cold"]["median"]) for s in data.steps(steps)] == [
        (1, 3.0),
        (2, 5.0),
    ]
    text = page.tiles(data.Results(decode_step=steps))
    assert "decode step of 48 layers: 0.00 ms" in text
    assert "decode step of 48 layers on 2 ranks: " in text


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of the committed results, of two ranks, and of every operator with a floor."""
    folder = tmp_path_factory.mktemp("report")
    floor = {"ours": 5.0, EMPTY: 3.0, COPY: 2.0, GEMMS: 4.0, "a peer": 6.0, "torch eager": 60.0}
    others = {
        "ranks": ranked(1, 2),
        "all": bench(*(run(op, rows, **floor) for op in CASES for rows in (1, 8))),
    }
    for name, record in others.items():
        (folder / f"{name}.json").write_text(json.dumps(record))
    more = [str(folder / f"{name}.json") for name in others]
    assert report.main([*map(str, COMMITTED), *more, "-o", str(folder)]) == 0
    return folder


@needs_matplotlib
def test_the_page_of_the_committed_results(made: Path) -> None:
    assert COMMITTED
    text = (made / "index.html").read_text()
    pictures = sorted(path.stem for path in made.glob("*.png"))
    assert {"latency", "ranks", "floors", "scaling", "decode_step"} <= set(pictures)
    assert text.count("data:image/png;base64,") == len(pictures)
    assert not re.search(r"""(?:src|href)=["'](?!data:)""", text), "nothing is fetched"
    for path in made.glob("*.png"):
        assert path.stat().st_size > 10_000
    assert OURS in text or "hc_gate" in text
    assert "NVIDIA H200" in text


@needs_matplotlib
@needs_browser
@pytest.mark.parametrize("width", [1200, 400])
def test_it_opens_in_a_browser(made: Path, tmp_path: Path, width: int) -> None:
    """Chromium loads it without a word on its console, every picture has a size, and nothing is wider than
    the window."""
    probe = tmp_path / "index.html"
    script = """<script>
    addEventListener("load", () => setTimeout(() => {
      const told = {
        pictures: [...document.images].map(i => i.complete && i.naturalWidth),
        overflow: document.documentElement.scrollWidth - innerWidth,
      };
      document.title = JSON.stringify(told);
    }, 0));
    addEventListener("error", e => console.error("page error: " + e.message), true);
    </script>"""
    probe.write_text((made / "index.html").read_text().replace("<title>", f"{script}<title>"))
    command = [
        *(str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},1000"),
        *("--enable-logging=stderr", "--virtual-time-budget=5000", f"--user-data-dir={tmp_path / 'profile'}"),
        *("--dump-dom", probe.as_uri()),
    ]
    ran = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    title = re.search(r"<title>(\{.*?\})</title>", ran.stdout)
    assert title, ran.stderr[-2000:]
    told = json.loads(title[1].replace("&quot;", '"'))
    assert told["pictures"]
    assert all(told["pictures"])
    assert told["overflow"] <= 0
    assert "CONSOLE" not in ran.stderr, ran.stderr
