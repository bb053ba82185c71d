"""The collective's bench: what it compares is what it says, and its judgement follows its targets."""

from __future__ import annotations

import pytest
import torch

from bindings import reference
from profiling import acceptance, collective
from profiling.acceptance import AGAIN, EMPTY, OURS
from profiling.collective import ADDCMUL, GATED, OP, UNBOUNDED

CPU = torch.device("cpu")


def test_the_expected_bits_are_the_sum_of_equal_terms() -> None:
    case = collective.make_case(2, CPU)
    local = reference.moe_finalize(**case.args).float()
    want = (((0.0 + local) + local) + local) + local
    assert torch.equal(collective.expected(case, 4), want.bfloat16())
    ungated = collective.expected(case, 2, gated=False)
    routed = [case.args[n] for n in ("expert_out", "permuted_idx", "expert_weights")]
    assert torch.equal(ungated, (reference.moe_finalize(*routed).float() * 2).bfloat16())


def test_other_bits_are_wrong() -> None:
    want = collective.expected(collective.make_case(1, CPU), 4)
    assert collective.bits_of(want)(want.clone()).ok
    off = want.clone()
    off.view(torch.int16)[0, 5] += 1
    check = collective.bits_of(want)(off)
    assert not check.ok
    assert check.detail.startswith("1 of 2560")
    assert collective.near(want)(off).ok
    assert not collective.near(want)(off + 1).ok


def test_options() -> None:
    options = collective.parse(["--ranks", "2,8", "--rows", "1,32", "--blocks", "3"])
    assert (options.ranks, options.rows, options.settings.blocks) == ((2, 8), (1, 32), 3)
    assert options.command == "python -m profiling.collective --ranks 2,8 --rows 1,32 --blocks 3"
    for bad in (["--ranks", "3"], ["--rows", "33"], ["--rows", "0"], ["--blocks", "0"]):
        with pytest.raises(SystemExit) as caught:
            collective.parse(bad)
        assert caught.value.code == 2


@pytest.mark.parametrize(
    ("gated_us", "addcmul_us", "unbounded_us", "failed"),
    [
        (6.1, 7.6, 4.95, []),
        (5.9, 7.6, 4.95, [GATED]),
        (6.1, 7.4, 4.95, [ADDCMUL]),
        (6.1, 7.6, 4.8, [UNBOUNDED]),
    ],
)
def test_judgement(gated_us: float, addcmul_us: float, unbounded_us: float, failed: list[str]) -> None:
    times = {OURS: 5.0, AGAIN: 5.0, GATED: gated_us, ADDCMUL: addcmul_us, UNBOUNDED: unbounded_us, EMPTY: 3.0}

    def version(name: str, us: float) -> dict[str, object]:
        timing = {"median": us, "p10": us, "p90": us, "samples": [[us] * 3]}
        return {"name": name, "bytes": 1, "error": None, "cold": timing, "hot": timing}

    run = {"op": OP, "rows": 1, "error": None, "noise": {}, "versions": [version(*t) for t in times.items()]}
    judged = acceptance.judge_run(run, collective.TARGETS)
    assert len(judged) == len(collective.TARGETS)
    assert [j.against for j in judged if j.verdict == "FAIL"] == failed * 2  # cold, hot
    assert [j.verdict for j in judged if j.against == EMPTY] == ["-", "-"]


def test_without_a_gpu_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert collective.main([]) == 2
    assert "no GPU" in capsys.readouterr().out


@pytest.mark.gpu
def test_a_quick_run_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    collective.main(["--blocks", "1", "--samples", "3"])
    printed = capsys.readouterr().out
    assert "FAILED" not in printed
    assert GATED in printed
