"""The judgement of results with known times."""

from __future__ import annotations

from typing import Any

import pytest

from profiling import acceptance
from profiling.acceptance import AGAIN, OURS, Target, judge_run


def version(name: str, cold: float | None, hot: float | None = None, bytes_: int = 100) -> dict[str, Any]:
    def timing(us: float | None) -> dict[str, Any] | None:
        return us and {"median": us, "p10": us, "p90": us, "samples": [[us, us], [us, us]]}

    return {"name": name, "bytes": bytes_, "error": None, "cold": timing(cold), "hot": timing(hot)}


def run(op: str, rows: int, *versions: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "op": op,
        "rows": rows,
        "versions": list(versions),
        "noise": {},
        "host": {},
        "error": None,
        **more,
    }


def one(record: dict[str, Any], target: Target) -> acceptance.Judgement:
    (judgement,) = judge_run(record, [target])
    return judgement


GATE = Target("hc_gate", 1, "cold", "sglang hc_combine_gate", 1.0)


@pytest.mark.parametrize(("peer", "verdict"), [(4.4, "PASS"), (4.0, "PASS"), (3.99, "FAIL")])
def test_a_peer(peer: float, verdict: str) -> None:
    line = one(run("hc_gate", 1, version(OURS, 4.0), version("sglang hc_combine_gate", peer)), GATE)
    assert line.verdict == verdict
    assert line.ratio == pytest.approx(peer / 4.0)
    assert (line.us, line.against_us) == (4.0, peer)


def test_the_fastest_of_several_counts() -> None:
    target = Target("gdn_packed_decode", 1, "hot", "sglang Triton GDN", 1.05)
    record = run(
        "gdn_packed_decode",
        1,
        version(OURS, 5.0, 2.0),
        version("sglang Triton GDN, tile 4", 9.0, 2.2),
        version("sglang Triton GDN, tile 32", 4.0, 4.0),
    )
    line = one(record, target)
    assert (line.against, line.verdict) == ("sglang Triton GDN, tile 4", "PASS")


def test_ours_is_not_its_twin() -> None:
    record = run(
        "hc_gate", 1, version(AGAIN, 3.0), version(OURS, 5.0), version("sglang hc_combine_gate", 4.0)
    )
    line = one(record, GATE)
    assert (line.version, line.us, line.verdict) == (OURS, 5.0, "FAIL")


def test_ratios_are_of_pairs() -> None:
    """Medians 10 and 10, yet ours is faster in every pair."""
    a, b = version(OURS, 10.0), version("sglang hc_combine_gate", 10.0)
    a["cold"]["samples"], b["cold"]["samples"] = [[5.0, 10.0, 20.0]], [[6.0, 12.0, 24.0]]
    assert one(run("hc_gate", 1, a, b), GATE).ratio == pytest.approx(1.2)


@pytest.mark.parametrize(("us", "verdict"), [(20.0, "PASS"), (23.5, "PASS"), (24.0, "FAIL")])
def test_bandwidth(us: float, verdict: str) -> None:
    target = Target("gdn_packed_decode", 64, "bandwidth", "copy, 4 GiB", 0.85)
    copied = version("copy, 4 GiB", 2000.0, bytes_=10**8)  # 50 kB/us
    line = one(run("gdn_packed_decode", 64, version(OURS, us, bytes_=10**6), copied), target)
    assert line.ratio == pytest.approx(20.0 / us)
    assert line.verdict == verdict


def test_unjudged_lines_are_reported() -> None:
    target = Target("gdn_packed_decode", 64, "bandwidth", "copy, 4 GiB", None, "sglang Triton GDN")
    copied = version("copy, 4 GiB", 2000.0, bytes_=10**8)
    peer = version("sglang Triton GDN, tile 8", 25.0, bytes_=10**6)
    line = one(run("gdn_packed_decode", 64, copied, peer), target)
    assert (line.verdict, line.version) == ("-", "sglang Triton GDN, tile 8")
    assert line.ratio == pytest.approx(0.8)
    assert one(run("gdn_packed_decode", 64, copied), target).verdict == "MISSING"


@pytest.mark.parametrize(("us", "verdict"), [(9.0, "PASS"), (12.0, "PASS"), (12.1, "FAIL")])
def test_host(us: float, verdict: str) -> None:
    target = Target("hc_gate", 1, "host", "", 12.0, "ops")
    costs = {"ops": {"median": us, "p10": us, "p90": us}}
    line = one(run("hc_gate", 1, version(OURS, 1.0), host=costs), target)
    assert (line.verdict, line.us, line.ratio) == (verdict, us, None)
    assert one(run("hc_gate", 1, version(OURS, 1.0)), target).verdict == "MISSING"


def test_missing_and_broken() -> None:
    line = one(run("hc_gate", 1, version(OURS, 4.0)), GATE)
    assert (line.verdict, line.note) == ("MISSING", "no cold times of sglang hc_combine_gate")
    wrong = {**version(OURS, None), "error": "wrong result"}
    line = one(run("hc_gate", 1, wrong, version("sglang hc_combine_gate", 4.0)), GATE)
    assert (line.verdict, line.note) == ("FAIL", "ours: wrong result")
    line = one(run("hc_gate", 1, error="Traceback\n  ...\nRuntimeError: gone\n"), GATE)
    assert (line.verdict, line.note) == ("FAIL", "the run failed: RuntimeError: gone")


def test_within_noise() -> None:
    peer = version("sglang hc_combine_gate", 4.02)
    line = one(run("hc_gate", 1, version(OURS, 4.0), peer, noise={"cold": 0.01}), GATE)
    assert (line.verdict, line.noise, line.note) == ("PASS", 0.01, "within noise of the bound")
    clear = one(run("hc_gate", 1, version(OURS, 4.0), peer, noise={"cold": 0.001}), GATE)
    assert clear.note == ""


def test_other_work_is_not_judged() -> None:
    assert judge_run(run("hc_gate", 4, version(OURS, 4.0)), [GATE]) == []


def test_what_is_asked() -> None:
    """The list, in its own words."""
    judged = [t for t in acceptance.TARGETS if t.bound is not None]
    mix = [(t.rows, t.metric, t.against, t.bound) for t in judged if t.op == "hc_mix"]
    assert mix == [
        (1, "cold", "sglang Triton hc_mix", 1.6),
        (1, "hot", "sglang Triton hc_mix", 2.2),
        (4, "cold", "sglang Triton hc_mix", 1.6),
        (8, "cold", "sglang Triton hc_mix", 1.6),
        (16, "cold", "sglang Triton hc_mix", 1.6),
        (32, "cold", "torch eager", 1.6),
        (32, "cold", acceptance.GEMMS, 1.0),
    ]
    asked = {(t.op, t.rows, t.metric, t.version): t.bound for t in judged if t.op != "hc_mix"}
    assert asked == {
        ("hc_gate", 1, "cold", OURS): 1.0,
        ("hc_apply_norm", 1, "cold", OURS): 1.05,
        ("hc_gate_apply_norm", 1, "cold", OURS): 1.2,
        ("hc_gate_apply_norm", 1, "hot", OURS): 1.2,
        ("hc_boundary", 1, "cold", OURS): 1.3,
        ("gdn_packed_decode", 1, "cold", OURS): 1.05,
        ("gdn_packed_decode", 1, "hot", OURS): 1.05,
        ("grouped_gemma_rmsnorm", 1, "cold", OURS): 1.05,
        ("shared_gate", 1, "cold", OURS): pytest.approx(1 / 1.1),
        ("gdn_packed_decode", 64, "bandwidth", OURS): 0.85,
        ("gdn_packed_decode", 256, "bandwidth", OURS): 0.93,
        ("hc_gate", 1, "host", "ops"): 12.0,
        ("hc_gate", 1, "host", "ops, out="): 10.0,
        ("hc_apply_norm", 1, "host", "ops"): 16.0,
        ("hc_apply_norm", 1, "host", "ops, out="): 13.0,
        ("gdn_packed_decode", 1, "host", "ops"): 16.0,
        ("gdn_packed_decode", 1, "host", "ops, out="): 13.0,
    }


def test_table_is_aligned() -> None:
    lines = [
        one(run("hc_gate", 1, version(OURS, 4.0), version("sglang hc_combine_gate", 4.4)), GATE),
        one(run("hc_gate", 1, version(OURS, 4.0)), GATE),
    ]
    head, first, second = acceptance.table(lines).splitlines()
    at = head.index("verdict")
    assert first[at:] == "PASS"
    assert second[at:].startswith("MISSING")
    assert first.startswith("hc_gate T=1")
