"""Dispatch: what reaches the compiled kernels, and which backend serves."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import bindings
from bindings import (
    BackendUnavailable,
    InvalidArgument,
    WarmupRequired,
    backend,
    dispatch,
    explain,
    ops,
    reference,
)
from bindings.registry import IMPLEMENTATIONS, OPS, Kernel, ModelConfig
from cute_kernels.gdn.config import VALUE_TILES, value_tile_for
from tests.bindings.calls import (
    KERNELS,
    PARAMS,
    SMALL,
    VECTORED,
    WORKSPACES,
    Jit,
    aligned_at,
    make,
    outs_of,
    run,
    run_reference,
    tensors,
)

SCALARS = {
    "grouped_gemma_rmsnorm": (1e-6,),
    "hc_apply_norm": (1e-6,),
    "hc_boundary": (1e-6,),
    "gdn_packed_decode": (0.125,),
}


def same_arguments(given: tuple[Any, ...], expected: list[Any]) -> bool:
    return len(given) == len(expected) and all(
        g is e if isinstance(e, Tensor) or e is None else g == e for g, e in zip(given, expected, strict=True)
    )


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a", "sm_103a"])
@pytest.mark.parametrize("op", KERNELS)
def test_what_a_kernel_gets(op: str, target: str, compiled: Jit) -> None:
    """The module and constexpr parameters of the JIT; inputs, outputs and scalars in the kernel's order;
    results as allocated."""
    compiled.target = target
    call = make(op)
    outs = outs_of(op, call)
    results = run(op, call, **outs)
    assert [r is o for r, o in zip(results, outs.values(), strict=True)] == [True] * len(outs)
    kernel = compiled.last
    assert kernel.module == IMPLEMENTATIONS[op][0].name
    assert kernel.target == target
    width = {"vec_bytes": 16 if target == "sm_90a" else 32} if op in VECTORED else {}
    assert kernel.params == PARAMS[op] | width
    if op in WORKSPACES:
        assert kernel.calls[0][-1].dtype is torch.int64
        assert kernel.calls[0][-1].count_nonzero() == 1  # the address of its record
    inputs, scalars = [call[n] for n in OPS[op].inputs], list(SCALARS.get(op, ()))
    workspace = kernel.calls[0][-1:] if op in WORKSPACES else ()
    assert same_arguments(kernel.calls[0], [*inputs, *outs.values(), *scalars, *workspace])
    assert all(type(value) is float for value in kernel.calls[0] if not isinstance(value, Tensor))

    results = run(op, call)
    assert same_arguments(kernel.calls[1], [*inputs, *results, *scalars, *workspace])  # the stream's own
    for result, out in zip(results, outs.values(), strict=True):
        assert (result.shape, result.dtype, result.stride()) == (out.shape, out.dtype, out.stride())
        assert result.data_ptr() % 16 == 0
        assert result.untyped_storage().nbytes() == out.untyped_storage().nbytes()
    assert run(op, call)[0].data_ptr() != results[0].data_ptr()


@pytest.mark.parametrize("out", [True, False])
@pytest.mark.parametrize("form", ["gated", "plain", "none"])
def test_absent_arguments_are_none(form: str, out: bool, compiled: Jit) -> None:
    call = make("moe_finalize", config=replace(SMALL, shared=form))
    outs = outs_of("moe_finalize", call) if out else {}
    for _ in range(2):
        (result,) = run("moe_finalize", call, **outs)
        inputs = [call[n] for n in OPS["moe_finalize"].inputs]
        assert same_arguments(compiled.last.calls[-1], [*inputs, result])
    assert (compiled.last.params["shared"], compiled.last.params["gated"]) == {
        "gated": (True, True),
        "plain": (True, False),
        "none": (False, False),
    }[form]


def test_default_and_explicit_scale(compiled: Jit) -> None:
    call = make("gdn_packed_decode")
    for scale, expected in ((None, 0.125), (0.5, 0.5), (2, 2.0), (None, 0.125)):
        ops.gdn_packed_decode(**(call | {"scale": scale}))
        assert compiled.last.calls[-1][-1] == expected
    assert len(compiled.requested) == 3


def wider(t: Tensor) -> Tensor:
    """`t` with a longer row stride: a multiple of 16 bytes, not of 32."""
    room = torch.zeros((t.shape[0], t.shape[1] + 8), dtype=t.dtype)
    room[:, : t.shape[1]] = t
    return room[:, : t.shape[1]]


@pytest.mark.parametrize("op", VECTORED)
def test_vector_width_follows_alignment(op: str, compiled: Jit) -> None:
    """One tensor that only starts at a multiple of 16 bytes takes the 16-byte variant, and only if it is
    accessed by vectors."""
    compiled.target = "sm_100a"
    call = make(op)
    outs = outs_of(op, call)
    everything = call | outs
    kernel = IMPLEMENTATIONS[op][0]
    assert isinstance(kernel, Kernel)

    def width(changed: dict[str, Any]) -> int:
        run(op, {n: changed[n] for n in call}, **{n: changed[n] for n in outs})
        return int(compiled.last.params["vec_bytes"])

    aligned = {n: aligned_at(v, 0) if isinstance(v, Tensor) else v for n, v in everything.items()}
    assert width(aligned) == 32
    for name in tensors(everything):
        expected = 16 if name in kernel.vectors else 32
        assert width(aligned | {name: aligned_at(everything[name], 16)}) == expected
        assert width(aligned) == 32
    if op == "gdn_packed_decode":
        assert width(aligned | {"mixed_qkv": aligned_at(wider(call["mixed_qkv"]), 0)}) == 16


def test_strides_of_single_rows_mean_nothing(compiled: Jit) -> None:
    """Neither to the vector width nor to a guard."""
    compiled.target = "sm_100a"
    call = make("gdn_packed_decode", 1)
    width = call["mixed_qkv"].shape[1]
    room = aligned_at(torch.zeros(2, width + 1, dtype=torch.bfloat16), 0)
    call["mixed_qkv"] = room[:1, :width]
    call["state"] = aligned_at(torch.zeros(2, 4 * 64 * 64 + 1), 0)[:1, : 4 * 64 * 64].view(1, 4, 64, 64)
    ops.gdn_packed_decode(**call)
    assert compiled.last.params["vec_bytes"] == 32


def test_narrow_rows_take_narrow_vectors(compiled: Jit) -> None:
    """Rows of 48 bytes: every other one starts at an odd multiple of 16."""
    compiled.target = "sm_100a"
    ops.shared_gate(torch.zeros(4, 24, dtype=torch.bfloat16), torch.zeros(24, dtype=torch.bfloat16))
    assert compiled.last.params["vec_bytes"] == 16


# Backends


@pytest.mark.parametrize("op", OPS)
def test_cpu_has_no_kernels(op: str) -> None:
    """On the CPU auto is the reference, and forcing kernels is an error that names the target guard."""
    call = make(op)
    answer = explain(op, **call)
    assert (answer.backend, answer.implementation, answer.target) == ("reference", "reference", None)
    assert answer.reason == "auto: target is one of sm_90a, sm_100a, sm_103a: got cpu"
    assert answer.ready
    outs = outs_of(op, call)
    with backend("cute"):
        for given in ({}, outs):
            with pytest.raises(
                BackendUnavailable, match=r"target is one of sm_90a, sm_100a, sm_103a: got cpu$"
            ):
                run(op, call, **given)
        with pytest.raises(BackendUnavailable):
            getattr(torch.ops.flashnext, op)(*[call[n] for n in (*OPS[op].inputs, *OPS[op].scalars)])
    assert all((t == 1234.0).all() for t in outs.values())


def test_forced_backends(compiled: Jit) -> None:
    call = make("hc_gate")
    expected = reference.hc_gate(**call)
    with backend("reference"):
        answer = explain("hc_gate", **call)
        assert (answer.backend, answer.reason) == ("reference", "asked for by bindings.backend('reference')")
        assert answer.guards == ()
        assert torch.equal(ops.hc_gate(**call), expected)
        assert compiled.launches == 0
        with backend("cute"):
            ops.hc_gate(**call)
            assert compiled.launches == 1
            assert explain("hc_gate", **call).reason == "asked for by bindings.backend('cute')"
            with backend("auto"):
                ops.hc_gate(**call)
                assert compiled.launches == 2
        assert torch.equal(ops.hc_gate(**call), expected)
    ops.hc_gate(**call)
    assert compiled.launches == 3


def test_backend_is_restored_after_an_error(compiled: Jit) -> None:
    with pytest.raises(KeyError), backend("reference"):
        raise KeyError
    assert explain("hc_gate", **make("hc_gate")).backend == "cute"


def test_unknown_backend() -> None:
    with (
        pytest.raises(
            InvalidArgument, match=r"^backend: got 'triton', allowed auto, cute, emulator, reference$"
        ),
        backend("triton"),
    ):
        pass


def test_backend_belongs_to_its_thread(compiled: Jit) -> None:
    """A context of one thread is none of another's."""
    call = make("hc_gate")
    inside, done = threading.Event(), threading.Event()
    seen: list[str | None] = []

    def other() -> None:
        inside.wait(10)
        seen.append(explain("hc_gate", **call).backend)
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with backend("reference"):
        inside.set()
        assert done.wait(10)
        assert explain("hc_gate", **call).backend == "reference"
    thread.join()
    assert seen == ["cute"]


def environment(value: str, code: str) -> subprocess.CompletedProcess[str]:
    program = f"import os; os.environ['FLASHNEXT_BACKEND'] = {value!r}\nimport torch, bindings\n" + code
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


CALL = "t = torch.zeros(1, 64, dtype=torch.bfloat16)\n"


def test_backend_of_the_environment() -> None:
    code = CALL + "e = bindings.explain('shared_gate', t, t[0]); print(e.backend, '|', e.reason)\n"
    code += "with bindings.backend('auto'): print(bindings.explain('shared_gate', t, t[0]).reason)"
    result = environment("reference", code)
    forced, auto = result.stdout.splitlines()
    assert forced == "reference | asked for by FLASHNEXT_BACKEND=reference"
    assert auto.startswith("auto: target is one of")


def test_invalid_backend_of_the_environment() -> None:
    """Importing works; the first use says what is wrong."""
    result = environment("cuda", CALL + "print('imported')\nbindings.ops.shared_gate(t, t[0])")
    assert result.stdout == "imported\n"
    assert (
        "InvalidArgument: FLASHNEXT_BACKEND: got 'cuda', allowed auto, cute, emulator, reference"
        in result.stderr
    )


# No rows


@pytest.mark.parametrize("capturing", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_no_rows(op: str, capturing: bool, compiled: Jit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty results of the right shape and dtype; nothing compiled, loaded or launched, inside a capture
    either."""
    monkeypatch.setattr(dispatch, "capturing", lambda device: capturing)
    call = make(op, 0)
    outs = outs_of(op, call)
    state = make(op, 0).get("state", torch.empty(0))
    for _ in range(2):
        results = run(op, call)
        assert [(r.shape, r.dtype) for r in results] == [(o.shape, o.dtype) for o in outs.values()]
        assert all(r.numel() == 0 for r in results)
        assert run(op, call, **outs)[0] is outs[OPS[op].outs[0]]
        through = getattr(torch.ops.flashnext, op)(*[call[n] for n in (*OPS[op].inputs, *OPS[op].scalars)])
        assert (through[0] if isinstance(through, tuple) else through).shape == results[0].shape
    assert compiled.requested == []
    assert torch.equal(call.get("state", torch.empty(0)), state)
    answer = explain(op, **call)
    assert answer.backend == "cute"
    assert answer.ready
    assert answer.reason.endswith("; no rows: nothing is launched")


# Capture


@pytest.mark.parametrize("out", [True, False])
@pytest.mark.parametrize("op", OPS)
def test_first_use_inside_a_capture(
    op: str, out: bool, compiled: Jit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused, with the remedy, until the same parameters ran before; then other shapes of theirs are welcome
    too."""
    call, more = make(op), make(op, 4)
    outs, more_outs = (outs_of(op, call), outs_of(op, more)) if out else ({}, {})
    state = call.get("state", torch.empty(0)).clone()
    captured = True
    monkeypatch.setattr(dispatch, "capturing", lambda device: captured)
    for _ in range(2):
        with pytest.raises(
            WarmupRequired, match=rf"^{op}: first use of .* for sm_90a on cpu .*bindings\.warmup\("
        ):
            run(op, call, **outs)
    assert compiled.requested == []
    assert all((t == 1234.0).all() for t in outs.values())
    assert torch.equal(call.get("state", torch.empty(0)), state)
    captured = False
    run(op, call, **outs)
    captured = True
    run(op, call, **outs)
    run(op, more, **more_outs)
    fp16 = replace(SMALL, dtype=torch.float16, expert_weight_dtype=torch.bfloat16)
    with pytest.raises(WarmupRequired):
        run(op, make(op, config=fp16))


def test_calls_without_rows_warm_nothing_up(compiled: Jit, monkeypatch: pytest.MonkeyPatch) -> None:
    ops.hc_gate(**make("hc_gate", 0))
    monkeypatch.setattr(dispatch, "capturing", lambda device: True)
    with pytest.raises(WarmupRequired):
        ops.hc_gate(**make("hc_gate"))


def test_readiness_is_per_device(compiled: Jit) -> None:
    """Code loaded on one device is not on another, nor is another variant of it."""
    call = OPS["hc_gate"].examine(OPS["hc_gate"].bind((), make("hc_gate")))
    resolution = dispatch.resolve(call, dispatch.selected())
    devices = [torch.device("cuda", index) for index in range(2)]
    dispatch.mark_ready(resolution, devices[0])
    assert [dispatch.is_ready(resolution, device) for device in devices] == [True, False]
    other = replace(resolution, params={**resolution.params, "vec_bytes": 32})
    assert not dispatch.is_ready(other, devices[0])
    assert not dispatch.is_ready(replace(resolution, target="sm_100a"), devices[0])


def test_tensors_that_require_a_gradient(compiled: Jit, monkeypatch: pytest.MonkeyPatch) -> None:
    """They reach the kernel as they are or, where DLPack would refuse them, detached; results carry no
    gradient."""
    call = make("hc_gate")
    call["inject_weight"] = torch.nn.Parameter(call["inject_weight"])
    for takes, same in ((True, True), (False, False)):
        dispatch.clear_plans()
        monkeypatch.setattr(dispatch, "_takes_gradients", lambda takes=takes: takes)
        assert not ops.hc_gate(**call).requires_grad
        weight = compiled.last.calls[-1][1]
        assert (weight is call["inject_weight"]) == same
        assert weight.data_ptr() == call["inject_weight"].data_ptr()
        assert weight.requires_grad == same


def test_reference_needs_no_warmup(compiled: Jit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "capturing", lambda device: True)
    with backend("reference"):
        ops.hc_gate(**make("hc_gate"))


def test_failed_first_call_leaves_no_plan(compiled: Jit, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that raised counts for nothing: neither as a plan nor as warmed up."""
    call = make("hc_gate")

    class BrokenError(RuntimeError):
        pass

    def broken(*args: Any) -> None:
        raise BrokenError

    monkeypatch.setattr(bindings.jit, "get", lambda *args: broken)
    for _ in range(2):
        with pytest.raises(BrokenError):
            ops.hc_gate(**call)
    assert not explain("hc_gate", **call).ready
    monkeypatch.setattr(bindings.jit, "get", compiled.get)
    ops.hc_gate(**call)
    assert compiled.launches == 1


# Tuning


def test_value_tile_follows_the_batch(compiled: Jit) -> None:
    config = ModelConfig(hidden=64)
    for rows in (1, 2, 3, 8, 9, 32, 33, 100):
        ops.gdn_packed_decode(**make("gdn_packed_decode", rows, config))
        assert compiled.last.params["value_tile"] == value_tile_for(rows, 12)


def test_override_of_what_a_path_does_not_have(compiled: Jit) -> None:
    with dispatch.override("hc_mix", vec_bytes=16):
        assert explain("hc_mix", **make("hc_mix")).params == PARAMS["hc_mix"]
        assert explain("hc_mix", **make("hc_mix", 33)).params == {}


@pytest.mark.parametrize(
    ("op", "params"),
    [
        ("gdn_packed_decode", {"value_tyle": 8}),
        ("gdn_packed_decode", {"value_tile": 4}),
        ("hc_gate", {"width": 64}),
        ("hc_gate", {"vec_bytes": 32}),
    ],
)
def test_only_what_changes_no_result_is_overridden(op: str, params: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument, match=f"^override of {op}: got "), dispatch.override(op, **params):
        pass


def test_forced_value_tile(compiled: Jit) -> None:
    call = make("gdn_packed_decode")

    def tile() -> int:
        ops.gdn_packed_decode(**call)
        return int(compiled.last.params["value_tile"])

    default = tile()
    for value in VALUE_TILES:
        with dispatch.force_value_tile(value):
            assert tile() == value
            assert explain("gdn_packed_decode", **call).params["value_tile"] == value
            with dispatch.force_value_tile(VALUE_TILES[0]), backend("cute"):
                assert tile() == VALUE_TILES[0]
            assert tile() == value
            ops.hc_gate(**make("hc_gate"))
            assert "value_tile" not in compiled.last.params
    assert tile() == default
    with pytest.raises(InvalidArgument, match=r"^value_tile: got 5, allowed "):
        dispatch.force_value_tile(5)


# hc_mix: buckets, and the BLAS path


@pytest.mark.parametrize(("rows", "bucket"), [(1, 8), (8, 8), (9, 16), (17, 32), (32, 32)])
def test_mix_takes_the_bucket_of_its_rows(rows: int, bucket: int, compiled: Jit) -> None:
    ops.hc_mix(**make("hc_mix", rows))
    assert compiled.last.params == PARAMS["hc_mix"] | {"bucket": bucket}


@pytest.mark.parametrize(("rows", "config"), [(33, SMALL), (40, SMALL), (3, replace(SMALL, low_rank=24))])
def test_mix_by_gemms(rows: int, config: ModelConfig, compiled: Jit) -> None:
    """What the kernel does not take, too many rows or a shape without a plan: the same rounding points, so
    nearly the same bits."""
    call = make("hc_mix", rows, config)
    answer = explain("hc_mix", **call)
    assert (answer.backend, answer.implementation, answer.params) == ("cute", "gemm", {})
    expected = reference.hc_mix(**call)
    result = ops.hc_mix(**call)
    out = torch.empty_like(result)
    assert ops.hc_mix(**call, out=out) is out
    assert torch.equal(out, result)
    assert compiled.launches == 0
    assert (result == expected).float().mean() > 0.9
    assert torch.allclose(result.float(), expected.float(), rtol=2**-7, atol=1e-6)
    weights = call | {n: torch.nn.Parameter(call[n]) for n in ("w_down", "w_up")}
    assert not ops.hc_mix(**weights).requires_grad


# Threads and devices


@pytest.mark.multi_gpu
def test_two_devices_in_one_process() -> None:
    """Each call runs on its tensors' device, whatever the current one is, by code loaded for that device."""
    torch.cuda.set_device(0)
    for op in KERNELS:
        expected = run_reference(op, make(op))
        for device in ("cuda:0", "cuda:1", "cuda:0", "cuda:1"):
            results = run(op, make(op, device=device))
            assert torch.cuda.current_device() == 0
            for got, want in zip(results, expected, strict=True):
                assert got.device == torch.device(device)
                assert torch.allclose(got.float().cpu(), want.float(), rtol=2**-6, atol=1e-2)


@pytest.mark.gpu
def test_capture_without_warmup_is_refused() -> None:
    """A real capture survives the refusal, holds nothing, and succeeds once the operator has run."""
    if dispatch.targets.target_of(torch.device("cuda:0")) is None:
        pytest.skip("the GPU is none of the kernels' targets")
    config = replace(SMALL, hidden=192)  # of no other test: not warmed up yet
    call = make("hc_apply", config=config, device="cuda:0")
    out = torch.empty_like(call["residual"])
    empty = make("hc_apply", 0, config, "cuda:0")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert ops.hc_apply(**empty).shape == (0, config.width)
        with pytest.raises(WarmupRequired):
            ops.hc_apply(**call, out=out)
        out.zero_()
    ops.hc_apply(**call, out=out)
    expected = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.hc_apply(**call, out=out)
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)
