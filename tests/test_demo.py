"""The demo: what it prints and writes, that it fails when an operator is wrong, and what it is made of."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bindings import ops
from profiling import demo, graphs, observe
from profiling.decode import LAYERS, DecodeChain

pytestmark = pytest.mark.cpu

DEMO = ("--device", "cpu", "--layers", "2")


def test_writes_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "demo.json"
    assert demo.main([*DEMO, "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert result["layers"] == 2
    assert result["launches"] == {
        "grouped_gemma_rmsnorm": 2,
        "hc_gate": 4,
        "hc_mix": 5,
        "hc_apply": 1,
        "hc_apply_norm": 3,
        "hc_boundary": 0,
        "gdn_packed_decode": 2,
        "shared_gate": 2,
        "moe_finalize": 2,
    }
    assert set(result["ops"]) == set(observe.OPS) - {"hc_boundary"}
    for op, report in result["ops"].items():
        assert report["backend"] == "reference", op
        assert report["target"] is None, op
        assert report["ok"] is True, op
        assert 0 <= report["max_err"] <= report["tolerance"], op
        assert report["results_checked"] > 0, op
    assert result["latency"]["eager_ms"] > 0
    assert result["latency"]["graph_ms"] is None
    assert result["host"]["gpu"] is None
    assert result["failures"] == []
    printed = capsys.readouterr().out
    assert printed.endswith("ok\n")
    assert all(op in printed for op in result["ops"])


def test_a_fused_boundary_takes_the_gate_along(tmp_path: Path) -> None:
    """Fewer launches, and the same bits."""
    path = tmp_path / "demo.json"
    assert demo.main([*DEMO, "--boundary", "fused", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert result["launches"] == {
        "grouped_gemma_rmsnorm": 2,
        "hc_gate": 2,
        "hc_mix": 5,
        "hc_apply": 1,
        "hc_apply_norm": 1,
        "hc_boundary": 2,
        "gdn_packed_decode": 2,
        "shared_gate": 2,
        "moe_finalize": 2,
    }
    assert set(result["ops"]) == set(observe.OPS)
    assert result["failures"] == []
    chains = [DecodeChain(2, tokens=2, boundary=boundary) for boundary in ("separate", "fused")]
    separate, fused = (chain.outcome(chain.step()) for chain in chains)
    assert all(torch.equal(a, b) for a, b in zip(separate, fused, strict=True))


def _off(tensor: torch.Tensor, by: float) -> torch.Tensor:
    return tensor + tensor.abs().max() * by


CORRUPT: dict[str, Callable[[Any], Any]] = {
    "hc_gate": lambda got: _off(got, 1e-5),
    "hc_mix": lambda got: _off(got, 1e-2),
    "hc_apply": lambda got: _off(got, 1e-2),
    "hc_apply_norm": lambda got: (got[0], _off(got[1], 1e-2)),
    "hc_boundary": lambda got: (*got[:2], _off(got[2], 1e-5)),
    "grouped_gemma_rmsnorm": lambda got: _off(got, 1e-2),
    "shared_gate": lambda got: _off(got, 1e-5),
    "moe_finalize": lambda got: _off(got, 1e-2),
    "gdn_packed_decode": lambda got: _off(got, 1e-2),
}


@pytest.mark.parametrize("op", observe.OPS)
def test_a_wrong_operator_fails_it(
    op: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = getattr(ops, op)

    @functools.wraps(right)
    def wrong(*args: Any, **options: Any) -> Any:
        out = options.get("out")
        got = CORRUPT[op](right(*args, **options))
        return got if out is None else out.copy_(got)

    monkeypatch.setattr(ops, op, wrong)
    path = tmp_path / "demo.json"
    boundary = ("--boundary", "fused") if op == "hc_boundary" else ()
    assert demo.main([*DEMO, *boundary, "--json", str(path)]) == 1
    result = json.loads(path.read_text())
    assert [name for name, report in result["ops"].items() if not report["ok"]] == [op]
    assert result["failures"] == [f"{op}: out of tolerance"]
    assert f"FAILED {op}: out of tolerance" in capsys.readouterr().out


def test_a_wrong_recurrent_state_fails_it(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ops.gdn_packed_decode

    def wrong(*args: Any, **options: Any) -> Any:
        got = right(*args, **options)
        args[5].mul_(1.001)
        return got

    monkeypatch.setattr(ops, "gdn_packed_decode", wrong)
    assert demo.main(list(DEMO)) == 1


def test_a_missing_launch_fails_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = DecodeChain.expected_calls
    monkeypatch.setattr(DecodeChain, "expected_calls", lambda chain: {**expected(chain), "hc_apply_norm": 4})
    assert demo.main(list(DEMO)) == 1
    assert "FAILED launches" in capsys.readouterr().out


def test_a_backend_that_cannot_serve_is_an_error_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main([*DEMO, "--backend", "cute"]) == 2
    assert "cute" in capsys.readouterr().err


@pytest.fixture
def no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "run", lambda options: pytest.fail("it ran"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "0"], "--layers: got 0, allowed 1 to 192"),
        (["--layers", "193"], "--layers: got 193, allowed 1 to 192"),
        (["--tokens", "0"], "--tokens: got 0, allowed integers >= 1"),
        (["--seed", str(2**64)], f"--seed: got {2**64}, allowed -2**63 to 2**64 - 1"),
        (["--seed", str(-(2**63) - 1)], f"--seed: got {-(2**63) - 1}, allowed -2**63 to 2**64 - 1"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--json", "/"], "--json: /: Is a directory"),
        (["--json", "/no/such/demo.json"], "--json: /no/such/demo.json: No such file or directory"),
        (["--json", "/proc/demo.json"], "--json: /proc/demo.json: No such file or directory"),
        (["--nope"], "unrecognized arguments: --nope"),
    ],
)
def test_refuses_arguments_that_make_no_sense(
    no_run: None, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        demo.main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_the_seeds_are_the_generator_s() -> None:
    for seed in (demo.SEEDS[0], demo.SEEDS[-1]):
        torch.Generator().manual_seed(seed)
    for seed in (demo.SEEDS.start - 1, demo.SEEDS.stop):
        with pytest.raises((RuntimeError, ValueError, OverflowError)):
            torch.Generator().manual_seed(seed)


def test_asking_whether_a_file_can_be_written_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("old")
    for name in ("old.json", "new.json"):
        demo.parse([*DEMO, "--json", str(tmp_path / name)])
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"old.json": "old"}


def test_no_room_for_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--device", "cpu", "--layers", "1", "--json", "/dev/full"]) == 1
    out = capsys.readouterr().out
    assert "FAILED --json: /dev/full: No space left on device\n" in out
    assert "wrote" not in out


def test_an_unknown_backend_in_the_environment_is_wrong_use() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "profiling.demo", *DEMO],
        cwd=Path(__file__).resolve().parents[1],
        env={**os.environ, "FLASHNEXT_BACKEND": "nope"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "FLASHNEXT_BACKEND: got 'nope', allowed auto, cute, emulator, reference" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_model_s_step_has_the_published_launches() -> None:
    chain = DecodeChain.__new__(DecodeChain)  # counts follow from the layers alone: no weights are needed
    chain.layers, chain.boundary = LAYERS, "separate"
    chain.gdn = {layer: None for layer in range(LAYERS) if layer % 4 != 3}
    calls = chain.expected_calls()
    assert calls["hc_apply_norm"] == 95
    assert calls["hc_apply_norm"] + calls["hc_apply"] == 96
    assert calls["gdn_packed_decode"] == 36
    assert calls["moe_finalize"] == 48
    assert calls["hc_mix"] == calls["hc_gate"] + 1 == 97
    chain.boundary = "fused"
    fused = chain.expected_calls()
    assert fused["hc_boundary"] + fused["hc_apply_norm"] == 95
    assert fused["hc_boundary"] + fused["hc_gate"] == 96
    assert fused["hc_boundary"] == 94


def test_a_chain_repeats_itself_and_depends_on_its_seed() -> None:
    chain, same, other = (DecodeChain(1, tokens=2, seed=seed) for seed in (3, 3, 4))
    first = chain.outcome(chain.step())
    assert all(torch.equal(a, b) for a, b in zip(first, same.outcome(same.step()), strict=True))
    second = chain.outcome(chain.step())
    assert not torch.equal(first[1], second[1])  # the recurrent state went on
    chain.reset()
    assert all(torch.equal(a, b) for a, b in zip(first, chain.outcome(chain.step()), strict=True))
    assert not torch.equal(first[0], other.step())


def test_the_embedding_enters_before_layer_1() -> None:
    for layers, enters in ((1, False), (2, True)):
        chain = DecodeChain(layers)
        x = chain.step()
        chain.reset()
        chain.embedding.zero_()
        assert torch.equal(x, chain.step()) != enters


@pytest.mark.parametrize(
    ("total", "count", "expected"),
    [(0, 4, ()), (1, 4, (0,)), (4, 4, (0, 1, 2, 3)), (97, 4, (0, 32, 64, 96)), (95, 1, (0,)), (5, 2, (0, 4))],
)
def test_spread(total: int, count: int, expected: tuple[int, ...]) -> None:
    assert observe.spread(total, count) == expected


def test_watch_counts_keeps_and_lets_go() -> None:
    before = ops.shared_gate
    x = torch.ones(2, 64, dtype=torch.bfloat16)
    with observe.watch({"shared_gate": [1]}) as seen:
        ops.shared_gate(x, x[0])
        ops.shared_gate(2 * x, weight=x[0])
    assert ops.shared_gate is before
    assert seen.counts == {"shared_gate": 2}
    (call,) = seen.calls
    assert set(call.inputs) == {"x", "weight"}
    assert torch.equal(call.inputs["x"], 2 * x)
    assert all(verdict.ok for verdict in call.verdicts())


def test_kernels_are_told_apart_by_their_compiled_names() -> None:
    def compiled(module: str, name: str) -> str:
        return f"kernel_cutlass_kernel_cute_kernels{module}{name}_object_at__tensorptrbf16gmemalign16_0"

    names = [
        compiled("hyperapply", "HcApply"),
        *[compiled("hyperapply_norm", "HcApplyNorm")] * 3,
        compiled("gdnpacked_decode", "GdnPackedDecode"),
        "_ZN2at6native29vectorized_elementwise_kernelILi4E",
    ]
    counts = graphs.count_by_kernel(names, observe.OPS)
    assert counts == {"hc_apply": 1, "hc_apply_norm": 3, "gdn_packed_decode": 1, "other": 1}
