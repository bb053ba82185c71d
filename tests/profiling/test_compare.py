"""Two result files against each other: what counts as a change, and the exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from profiling import compare


def timing(median: float) -> dict[str, Any]:
    return {"median": median, "p10": median * 0.98, "p90": median * 1.03, "count": 1, "samples": [[median]]}


def bench(
    ours: float, peer: float = 5.0, empty: float = 3.0, noise: float = 0.01, **host: float
) -> dict[str, Any]:
    versions = {"ours": ours, "ours, again": ours * 1.2, "empty kernel": empty, "a peer": peer}
    return {
        "kind": "bench",
        "host": {"gpu": "A GPU", "nvml": {"driver": "1"}, "versions": {"torch": "2"}},
        "runs": [
            {
                "op": "hc_gate",
                "rows": 1,
                "noise": {"cold": noise},
                "versions": [{"name": n, "cold": timing(t), "hot": None} for n, t in versions.items()],
                "host": {name.replace("_", " "): timing(value) for name, value in host.items()},
            }
        ],
    }


def step(fused: float, unfused: float, noise: float = 0.005, layers: int = 48) -> dict[str, Any]:
    arms = {"fused": fused, "fused, again": fused, "unfused": unfused}
    return {
        "kind": "decode_step",
        "host": {"gpu": "A GPU"},
        "shape": {"layers": layers},
        "noise": noise,
        "arms": {name: {"cold": timing(value)} for name, value in arms.items()},
    }


def run(tmp_path: Path, old: object, new: object, *arguments: str) -> int:
    paths = [tmp_path / "old.json", tmp_path / "new.json"]
    for path, record in zip(paths, (old, new), strict=True):
        path.write_text(record if isinstance(record, str) else json.dumps(record))
    return compare.main([*map(str, paths), *arguments])


@pytest.mark.parametrize(
    ("new", "code", "verdict"),
    [
        (bench(4.0), 0, "same"),
        (bench(4.07), 0, "same"),
        (bench(4.2), 1, "slower"),
        (bench(3.7), 0, "faster"),
        (bench(4.2, noise=0.06), 0, "same"),
        (bench(4.8, peer=6.0, empty=3.6), 0, "same"),
        (bench(4.8, peer=5.0, empty=3.0), 1, "slower"),
        (bench(4.0, peer=4.0, empty=2.4), 1, "slower"),
    ],
    ids=["same", "under 2 %", "slower", "faster", "noise", "all drifted", "alone", "did not drift"],
)
def test_what_counts(
    tmp_path: Path, new: object, code: int, verdict: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, bench(4.0), new, "--all") == code
    assert capsys.readouterr().out.splitlines()[1].split()[-1] == verdict


def test_the_numbers() -> None:
    (change,) = compare.changes([bench(4.0)], [bench(4.8, peer=5.5, empty=3.3)], 0.02)
    assert (change.old, change.new, change.drift) == (4.0, 4.8, pytest.approx(1.1))
    assert change.factor == pytest.approx(4.8 / 4.0 / 1.1)
    assert change.noise == 0.02


def test_what_is_gone_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = bench(4.0)
    broken["runs"][0]["versions"][0]["cold"] = None
    assert run(tmp_path, bench(4.0), broken) == 1
    assert "gone" in capsys.readouterr().out


def test_runs_of_one_file_alone_are_no_change(tmp_path: Path) -> None:
    old, new = bench(4.0), bench(4.0)
    more = bench(9.0)["runs"][0] | {"rows": 64}
    old["runs"].append(more)
    assert run(tmp_path, old, new) == 0
    assert run(tmp_path, new, old) == 0


def test_host_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = bench(4.0, ops=8.0, torch_ops=10.0)
    assert run(tmp_path, old, bench(4.0, ops=8.2, torch_ops=10.0)) == 0, "within the 90th percentile"
    assert run(tmp_path, old, bench(4.0, ops=8.5, torch_ops=10.0)) == 1
    assert run(tmp_path, old, bench(4.0)) == 0, "--no-host"
    assert run(tmp_path, old, bench(4.0, ops=8.0)) == 1
    assert "host, torch ops" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("new", "code"),
    [
        (step(2.0, 2.4), 0),
        (step(2.1, 2.4), 1),
        (step(2.2, 2.64), 0),
        (step(2.0, 2.2), 1),
        (step(2.1, 2.4, noise=0.06), 0),
    ],
    ids=["same", "slower", "drift", "drifted away", "noise"],
)
def test_decode_steps(tmp_path: Path, new: object, code: int) -> None:
    assert run(tmp_path, step(2.0, 2.4), new) == code


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("no JSON", bench(4.0), "Expecting value"),
        (bench(4.0), {"kind": "ncu", "kernels": []}, "no times in it"),
        ({"kind": "bench", "runs": [{}], "host": {}}, bench(4.0), "a run in it has no op: no result of"),
        (bench(4.0), step(2.0, 2.4), "nothing of ours is in both"),
        (step(2.0, 2.4), step(2.0, 2.4, layers=8), "the steps differ"),
        ({"kind": "bench", "runs": [], "host": {}}, bench(4.0), "nothing of ours is in both"),
    ],
)
def test_what_cannot_be_compared(
    tmp_path: Path, old: object, new: object, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, old, new) == 2
    assert message in capsys.readouterr().err


def test_summaries_are_taken(tmp_path: Path) -> None:
    def summary(ours: float, fused: float) -> dict[str, Any]:
        return {"stages": [], "bench": bench(ours), "decode_step": step(fused, 2.4), "ncu": None}

    assert run(tmp_path, summary(4.0, 2.0), summary(4.0, 2.0)) == 0
    assert run(tmp_path, summary(4.0, 2.0), summary(4.2, 2.0)) == 1
    assert run(tmp_path, summary(4.0, 2.0), summary(4.0, 2.2)) == 1


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main([str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_other_hosts_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = bench(4.0)
    new["host"] = {"gpu": "Another", "nvml": {"driver": "1"}, "versions": {"torch": "2"}}
    assert run(tmp_path, bench(4.0), new) == 0
    assert "hosts: gpu A GPU -> Another\n" in capsys.readouterr().out


def test_real_ranks_are_compared_with_real_ranks(tmp_path: Path) -> None:
    """The same work of one rank over loopback, in the same file, is another thing."""

    def both(loopback: float, real: float) -> dict[str, Any]:
        made = {
            "collective": {**bench(loopback), "kind": "collective"},
            "ranks": {**bench(real), "kind": "ranks"},
        }
        return {"stages": [], **made}

    assert run(tmp_path, both(4.0, 7.0), both(4.0, 7.0)) == 0
    assert run(tmp_path, both(4.0, 7.0), both(4.0, 7.5)) == 1
    assert run(tmp_path, both(4.0, 7.0), both(4.3, 7.0)) == 1
