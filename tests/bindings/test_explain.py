"""Guards and `explain`: which implementation a call gets, guard by guard."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bindings import BackendUnavailable, InvalidArgument, backend, dispatch, explain, ops
from bindings.registry import IMPLEMENTATIONS, OPS, ModelConfig
from tests.bindings.calls import PARAMS, SMALL, Call, Jit, make, outs_of, run, run_reference

GUARDED: list[tuple[str, str, str]] = [
    ("hc_gate", "C is at most 8", "got 9"),
    ("hc_apply", "H is a multiple of 8", "got 12"),
    ("hc_apply", "H is at most 16384", "got 16392"),
    ("hc_apply", "C is at most 8", "got 9"),
    ("hc_apply_norm", "H is a multiple of 8", "got 12"),
    ("hc_apply_norm", "H is at most 16384", "got 16392"),
    ("hc_apply_norm", "C is at most 8", "got 9"),
    ("grouped_gemma_rmsnorm", "G is at most 16384", "got 16392"),
    ("grouped_gemma_rmsnorm", "a row has at most 65535 groups", "got 65536"),
    ("hc_gate", "W is at most 65536", "got 65600"),
    ("shared_gate", "H is a multiple of 8", "got 12"),
    ("shared_gate", "H is at most 16384", "got 16392"),
    ("moe_finalize", "H is a multiple of 8", "got 12"),
    ("moe_finalize", "H is at most 65536", "got 65544"),
    ("moe_finalize", "K is at most 32", "got 33"),
    ("gdn_packed_decode", "D is 64 or 128", "got 32"),
    ("gdn_packed_decode", "outer stride of mixed_qkv is a multiple of 16 bytes", "got 1026"),
    ("gdn_packed_decode", "outer stride of state is a multiple of 16 bytes", "got 65540"),
]


# hc_boundary has a second path: (H, C) outside one guard of the first one, or of both.
BOUNDARY: dict[str, tuple[int, int]] = {
    "C divides 8": (64, 3),
    "H is at most 4096": (4160, 1),
    "W is at most 16384": (2112, 8),
    "H is a multiple of 8": (12, 16),
    "H is at most 16384": (16448, 1),
    "W is at most 65536": (8256, 8),
    "C is at most 8": (64, 9),
}


def unguarded(op: str, guard: str) -> Call:
    """A valid call outside one guard."""
    if op == "gdn_packed_decode":
        call = make(op, config=replace(SMALL, head_dim=32) if guard.startswith("D") else SMALL)
        if "mixed_qkv" in guard:
            room = torch.zeros(3, 513, dtype=torch.bfloat16)
            call["mixed_qkv"] = room[:, :512].copy_(call["mixed_qkv"])
        if "state" in guard:
            call["state"] = torch.zeros(2, 4 * 64 * 64 + 1)[:, : 4 * 64 * 64].view(2, 4, 64, 64)
        return call
    if guard.endswith("groups"):
        return make(op, 1, replace(SMALL, hidden=8, streams=65536))
    if guard.startswith("W"):
        return make(op, 1, replace(SMALL, hidden=65600, streams=1))
    if guard == "H is at most 65536":
        return make(op, 1, replace(SMALL, hidden=65544))
    if guard.startswith("H is a"):
        return make(op, config=replace(SMALL, hidden=12 if "multiple" in guard else 16392))
    if guard.startswith("G"):
        return make(op, 1, replace(SMALL, hidden=16392, streams=1))
    if guard.startswith("K"):
        return make(op, config=replace(SMALL, top_k=33))
    return make(op, config=replace(SMALL, streams=9))


@pytest.mark.parametrize(("op", "guard", "got"), GUARDED)
def test_guard(op: str, guard: str, got: str, compiled: Jit) -> None:
    """Outside a guard, auto is the reference and says which guard; a forced kernel is an error that says so
    too."""
    call = unguarded(op, guard)
    (expected, *_) = run_reference(op, call)
    answer = explain(op, **call)
    assert answer.backend == "reference"
    assert answer.implementation == "reference"
    assert answer.reason == f"auto: {guard}: {got}"
    assert [v.guard for v in answer.guards if not v.ok] == [guard]
    assert torch.equal(run(op, call)[0], expected)
    assert compiled.requested == []

    call = unguarded(op, guard)
    outs = outs_of(op, call)
    with backend("cute"):
        assert explain(op, **call).backend is None
        for given in ({}, outs):
            with pytest.raises(BackendUnavailable, match=rf"^{op}: backend 'cute', .*: {guard}: {got}$"):
                run(op, call, **given)
    assert all((t == 1234.0).all() for t in outs.values())
    assert compiled.requested == []


def test_every_guard_is_tried() -> None:
    """By GUARDED, by the device tests, by test_mix.py, or because validation already refuses what it
    refuses."""
    by_validation = {
        "dtype of",  # activations are bf16 or fp16
        "W is a multiple of 64",
        "G is a multiple of 8",
        "Hv is a multiple of Hk",
    }
    tried = {(op, guard) for op, guard, _ in GUARDED} | {("hc_boundary", guard) for guard in BOUNDARY}
    for op, implementations in IMPLEMENTATIONS.items():
        for guard in (g for i in implementations for g in i.guards):
            known = op == "hc_mix" or any(guard.description.startswith(v) for v in by_validation)
            assert known or (op, guard.description) in tried or "fit a grid" in guard.description, (
                guard.description
            )


def test_boundary_guards() -> None:
    op = OPS["hc_boundary"]
    for guard in (g for i in IMPLEMENTATIONS[op.name] for g in i.guards if g.description in BOUNDARY):
        for (hidden, streams), holds in ((BOUNDARY[guard.description], False), ((64, 4), True)):
            config = replace(SMALL, hidden=hidden, streams=streams)
            call = op.examine(op.new_call(config, 1, "meta"), concrete=False)
            assert guard.holds(call) == holds, guard.description


@pytest.mark.parametrize("guard", ["C divides 8", "H is at most 4096", "W is at most 16384"])
def test_boundary_by_two_kernels(guard: str, compiled: Jit) -> None:
    """Outside the fused kernel's guards, the kernels of its halves: apply+norm, then the gate of its
    result."""
    hidden, streams = BOUNDARY[guard]
    call = make("hc_boundary", 1, replace(SMALL, hidden=hidden, streams=streams))
    outs = outs_of("hc_boundary", call)
    answer = explain("hc_boundary", **call)
    assert (answer.backend, answer.implementation) == ("cute", "apply_norm, then gate")
    assert [v.guard for v in answer.guards if not v.ok] == [guard]
    with backend("cute"):
        ops.hc_boundary(**call, **outs)
    apply_norm, gate = compiled.called
    assert [c.module for c in (apply_norm, gate)] == [
        f"cute_kernels.hyper.{n}" for n in ("apply_norm", "gate")
    ]
    assert apply_norm.calls[0][4] is outs["combined_out"]
    assert gate.calls[0][0] is apply_norm.calls[0][5] is outs["normed_out"]
    assert gate.calls[0][2] is outs["partials_out"]


def test_grid_guard() -> None:
    """Too many rows to allocate: asked on tensors without memory."""
    op = OPS["gdn_packed_decode"]
    (grid,) = [g for g in IMPLEMENTATIONS[op.name][0].guards if "fit a grid" in g.description]
    for rows, holds in ((11_000_000, True), (12_000_000, False)):
        call = op.examine(op.new_call(ModelConfig(), rows, "meta"), concrete=False)
        assert grid.holds(call) == holds


def test_explain_lists_every_guard(compiled: Jit) -> None:
    """For a name or a function, positional or keyword arguments, with outputs; nothing is compiled or
    launched."""
    call = make("hc_apply_norm")
    answer = explain("hc_apply_norm", **call)
    assert answer == explain(ops.hc_apply_norm, *call.values())
    assert answer == explain(ops.hc_apply_norm, **call, **outs_of("hc_apply_norm", call))
    assert (answer.op, answer.backend, answer.target) == ("hc_apply_norm", "cute", "sm_90a")
    assert answer.implementation == "cute_kernels.hyper.apply_norm"
    assert answer.params == PARAMS["hc_apply_norm"] | {"vec_bytes": 16}
    assert answer.reason == "auto: every guard holds"
    assert [(v.guard, v.ok, v.got) for v in answer.guards] == [
        ("target is one of sm_90a, sm_100a, sm_103a", True, "sm_90a"),
        ("dtype of block is bf16 or fp16", True, "bf16"),
        ("H is a multiple of 8", True, "64"),
        ("H is at most 16384", True, "64"),
        ("C is at most 8", True, "4"),
    ]
    assert not answer.ready
    assert compiled.requested == []
    ops.hc_apply_norm(**call)
    assert explain("hc_apply_norm", **call).ready


def test_explain_text(compiled: Jit) -> None:
    compiled.target = "sm_100a"
    call = make("hc_apply", config=replace(SMALL, hidden=12))
    with backend("cute"):
        text = str(explain("hc_apply", **call))
    assert text == (
        "hc_apply: BackendUnavailable on sm_100a\n"
        "  why: backend 'cute', asked for by bindings.backend('cute'), cannot serve this call: "
        "H is a multiple of 8: got 12\n"
        "  [ok] cute_kernels.hyper.apply: target is one of sm_90a, sm_100a, sm_103a: got sm_100a\n"
        "  [ok] cute_kernels.hyper.apply: dtype of block is bf16 or fp16: got bf16\n"
        "  [NO] cute_kernels.hyper.apply: H is a multiple of 8: got 12\n"
        "  [ok] cute_kernels.hyper.apply: H is at most 16384: got 12\n"
        "  [ok] cute_kernels.hyper.apply: C is at most 8: got 4"
    )
    text = str(explain("hc_gate", **make("hc_gate")))
    assert text.startswith(
        "hc_gate: cute (cute_kernels.hyper.gate) on sm_100a\n  why: auto: every guard holds\n"
    )
    assert "  compiled for: dtype=bf16, width=256, streams=4, vec_bytes=32\n" in text
    assert "  ready: no, the first call compiles or loads it\n" in text


def test_explain_of_no_operator() -> None:
    for wrong in ("hc_gat", print, 3):
        with pytest.raises(InvalidArgument, match=r"^op: got .*, allowed grouped_gemma_rmsnorm, hc_gate, "):
            explain(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="missing a required argument: 'inject_weight'"):
        explain("hc_gate", torch.zeros(1))


def test_explain_of_a_gpu_without_kernels(compiled: Jit, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled.target = None
    monkeypatch.setattr(dispatch, "_device_name", lambda device: "sm_80")
    answer = explain("hc_gate", **make("hc_gate"))
    assert answer.reason == "auto: target is one of sm_90a, sm_100a, sm_103a: got sm_80"
