"""`bindings.warmup`: what it compiles and loads, on which device, and that captures are fine afterwards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import bindings
from bindings import (
    BackendUnavailable,
    InvalidArgument,
    ModelConfig,
    WarmupConfig,
    WarmupRequired,
    backend,
    dispatch,
    gemm_mix,
    ops,
    targets,
)
from bindings.registry import IMPLEMENTATIONS, OPS, Kernel
from cute_kernels.gdn.config import VALUE_TILES, value_tile_for
from tests.bindings.calls import SMALL, WORKSPACES, Jit, make, outs_of, run

CPU = (torch.device("cpu"),)
KERNELS = [op for op in OPS if isinstance(IMPLEMENTATIONS[op][0], Kernel)]


@pytest.fixture
def gemms(monkeypatch: pytest.MonkeyPatch, compiled: Jit) -> list[int]:
    """Rows of every product that the BLAS path computes."""
    rows: list[int] = []
    product = gemm_mix.matmul_fp32

    def counted(x: Tensor, weight: Tensor) -> Tensor:
        rows.append(x.shape[0])
        return product(x, weight)

    monkeypatch.setattr(gemm_mix, "matmul_fp32", counted)
    return rows


def test_everything_is_loaded_once(compiled: Jit, gemms: list[int]) -> None:
    """Every operator's implementation runs once on no rows (one that needs a workspace on one), with fitting
    arguments."""
    report = bindings.warmup(WarmupConfig(SMALL, batch_sizes=(1, 3), devices=CPU))
    assert [e.op for e in report.entries].count("hc_mix") == 1
    assert {e.op for e in report.entries} == set(OPS)
    by_module = {c.module: c for c in compiled.requested}
    assert len(compiled.requested) == len(by_module) == len(KERNELS)
    for op in KERNELS:
        kernel = by_module[IMPLEMENTATIONS[op][0].name]
        (arguments,) = kernel.calls
        given = [a for a in arguments if isinstance(a, Tensor)]
        if op in WORKSPACES:
            assert given.pop().dtype is torch.int64
        call = make(op, int(op in WORKSPACES))
        expected = [v for n, v in call.items() if n in OPS[op].inputs and v is not None]
        expected += outs_of(op, call).values()
        assert [(t.shape, t.dtype) for t in given] == [(t.shape, t.dtype) for t in expected]
        assert [a for a in arguments if a is None] == []
    assert gemms == []
    bindings.warmup(WarmupConfig(SMALL, ops=("hc_mix",), batch_sizes=(33,), devices=CPU))
    assert gemms == [33, 33]


def test_captures_are_fine_afterwards(
    compiled: Jit, gemms: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every warmed-up operator, in both forms, with any batch size that shares its parameters; of no other
    dtype."""
    bindings.warmup(WarmupConfig(SMALL, batch_sizes=(1, 4), devices=CPU))
    monkeypatch.setattr(dispatch, "capturing", lambda device: True)
    for op in OPS:
        for rows in (1, 4):
            call = make(op, rows)
            run(op, call)
            run(op, call, **outs_of(op, call))
    with pytest.raises(WarmupRequired):
        run("hc_gate", make("hc_gate", config=replace(SMALL, dtype=torch.float16)))
    with pytest.raises(
        WarmupRequired, match=r"^warmup: cpu is inside a CUDA-graph capture, allowed only before"
    ):
        bindings.warmup(WarmupConfig(SMALL, devices=CPU, ops=("hc_gate",)))


def test_second_warmup_does_nothing(compiled: Jit, gemms: list[int]) -> None:
    config = WarmupConfig(SMALL, ops=("hc_gate", "shared_gate"), devices=CPU)
    bindings.warmup(config)
    report = bindings.warmup(config)
    assert [e.op for e in report.entries] == ["hc_gate", "shared_gate"]
    assert compiled.launches == 2


def test_calls_warm_up_too(compiled: Jit) -> None:
    ops.hc_gate(**make("hc_gate"))
    bindings.warmup(WarmupConfig(SMALL, ops=("hc_gate",), devices=CPU))
    assert compiled.launches == 1


def test_one_tile_a_batch_size(compiled: Jit) -> None:
    model = ModelConfig(hidden=64)
    sizes = (1, 2, 3, 8, 16, 64, 256)
    report = bindings.warmup(WarmupConfig(model, ops=("gdn_packed_decode",), batch_sizes=sizes, devices=CPU))
    expected = list(dict.fromkeys(value_tile_for(size, 12) for size in sizes))
    assert [e.params["value_tile"] for e in report.entries] == expected
    assert set(expected) <= set(VALUE_TILES)


def test_unaligned_variants(compiled: Jit) -> None:
    """Where vectors may be wider than 16 bytes there are two; elsewhere one serves both."""
    config = WarmupConfig(SMALL, ops=("hc_gate",), devices=CPU, unaligned=True)
    assert [e.params["vec_bytes"] for e in bindings.warmup(config).entries] == [16]
    compiled.target = "sm_100a"
    assert [e.params["vec_bytes"] for e in bindings.warmup(config).entries] == [32, 16]
    assert [e.params["vec_bytes"] for e in bindings.warmup(replace(config, unaligned=False)).entries] == [32]


def test_model_of_the_config(compiled: Jit) -> None:
    """Every field of the model reaches the parameters."""
    model = ModelConfig(
        hidden=128, streams=2, top_k=5, key_heads=1, value_heads=2, head_dim=64, dtype=torch.float16,
        expert_weight_dtype=torch.bfloat16, shared="plain", state_dtype=torch.bfloat16,
        index_dtype=torch.int64, dt_bias_dtype=None,
    )  # fmt: skip
    wanted = ("grouped_gemma_rmsnorm", "hc_gate", "moe_finalize", "gdn_packed_decode")
    norm, gate, finalize, gdn = bindings.warmup(WarmupConfig(model, ops=wanted, devices=CPU)).entries
    assert norm.params == {"dtype": "fp16", "width": 256, "group_size": 128, "vec_bytes": 16}
    assert gate.params == {"dtype": "fp16", "width": 256, "streams": 2, "vec_bytes": 16}
    assert finalize.params == {
        "hidden": 128, "top_k": 5, "weight_dtype": "bf16", "shared": True, "gated": False, "vec_bytes": 16,
    }  # fmt: skip
    assert gdn.params == {
        "dtype": "fp16", "state_dtype": "bf16", "bias_dtype": "fp16", "index_dtype": "int64", "key_heads": 1,
        "value_heads": 2, "head_dim": 64, "value_tile": value_tile_for(1, 2), "vec_bytes": 16,
    }  # fmt: skip


def test_report_and_progress(compiled: Jit) -> None:
    lines: list[str] = []
    report = bindings.warmup(WarmupConfig(SMALL, ops=("hc_gate",), devices=("cpu",)), progress=lines.append)
    (entry,) = report.entries
    assert (entry.op, entry.device, entry.backend, entry.target) == ("hc_gate", CPU[0], "cute", "sm_90a")
    assert entry.implementation == "cute_kernels.hyper.gate"
    assert 0 < entry.seconds == report.seconds
    assert lines == [str(entry)]
    assert str(entry).startswith(
        "hc_gate on cpu: cute_kernels.hyper.gate for sm_90a (dtype=bf16, width=256, streams=4, vec_bytes=16)"
    )
    assert str(report).splitlines()[1].startswith("1 prepared in ")


def test_nothing_to_prepare_for_the_reference() -> None:
    report = bindings.warmup(WarmupConfig(SMALL, devices=CPU))
    assert {(e.backend, e.implementation) for e in report.entries} == {("reference", "reference")}
    assert len(report.entries) == len(OPS)


def test_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current CUDA device; without one there is nothing to do."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bindings.warmup().entries == ()


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"ops": ("hc_gat",)}, InvalidArgument, "^op: got 'hc_gat', allowed grouped"),
        ({"batch_sizes": (0,)}, InvalidArgument, "^warmup: batch_sizes: got 0, allowed integers >= 1"),
        ({"batch_sizes": 1}, InvalidArgument, "^warmup: batch_sizes: got 1, allowed a tuple"),
        ({"batch_sizes": None}, InvalidArgument, "^warmup: batch_sizes: got None, allowed a tuple"),
        ({"ops": "hc_gate"}, InvalidArgument, "^warmup: ops: got 'hc_gate', allowed a tuple"),
        ({"devices": "cpu"}, InvalidArgument, "^warmup: devices: got 'cpu', allowed a tuple"),
        ({"devices": ("mps",)}, InvalidArgument, "^warmup: devices: got 'mps', allowed .* cpu or cuda"),
        ({"devices": ("meta",)}, InvalidArgument, "^warmup: devices: got 'meta', allowed .* cpu or cuda"),
        ({"devices": ("gpu",)}, InvalidArgument, "^warmup: devices: got 'gpu', allowed .* cpu or cuda"),
        ({"devices": (None,)}, InvalidArgument, "^warmup: devices: got None, allowed .* cpu or cuda"),
        ({"model": None}, InvalidArgument, "^warmup: model: got None, allowed a ModelConfig"),
        (
            {"model": replace(SMALL, shared="x")},
            InvalidArgument,
            "^warmup: model.shared: got 'x', allowed gated, plain, none",
        ),
        (
            {"model": replace(SMALL, hidden=-1)},
            InvalidArgument,
            "^warmup: model.hidden: got -1, allowed an integer >= 1",
        ),
        (
            {"model": replace(SMALL, top_k=1.5)},
            InvalidArgument,
            "^warmup: model.top_k: got 1.5, allowed an integer",
        ),
        (
            {"model": replace(SMALL, dtype="bf16")},
            InvalidArgument,
            "^warmup: model.dtype: got 'bf16', allowed a torch.dtype",
        ),
        ({"batch_sizes": (2.5,)}, InvalidArgument, "^warmup: batch_sizes: got 2.5, allowed an integer"),
        (
            {"model": replace(SMALL, hidden=100)},
            InvalidArgument,
            "^grouped_gemma_rmsnorm: group_size: got 100",
        ),
    ],
)
def test_invalid_config(change: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        bindings.warmup(replace(WarmupConfig(SMALL, devices=CPU), **change))


def test_forced_backend_that_cannot_serve(compiled: Jit) -> None:
    config = WarmupConfig(replace(SMALL, head_dim=32), ops=("gdn_packed_decode",), devices=CPU)
    with backend("cute"), pytest.raises(BackendUnavailable, match="D is 64 or 128: got 32"):
        bindings.warmup(config)
    (entry,) = bindings.warmup(config).entries
    assert entry.backend == "reference"
    assert compiled.requested == []


@pytest.mark.gpu
def test_warmup_before_a_real_capture() -> None:
    """All operators in one graph, captured without having been called, the BLAS path on a stream of its own
    included."""
    device = torch.device("cuda:0")
    if targets.target_of(device) is None:
        pytest.skip("the GPU is none of the kernels' targets")
    model = replace(SMALL, hidden=320, low_rank=24, head_dim=128)  # of no other test
    bindings.warmup(WarmupConfig(model, batch_sizes=(2,), devices=(device,)))
    calls = {op: make(op, 2, model, "cuda:0") for op in OPS}
    outs = {op: outs_of(op, call) for op, call in calls.items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for op, call in calls.items():
            run(op, call, **outs[op])
    fresh = {op: make(op, 2, model, "cuda:0") for op in OPS}
    expected = {op: run(op, call) for op, call in fresh.items()}
    graph.replay()
    for op in OPS:
        for got, want in zip(outs[op].values(), expected[op], strict=True):
            assert torch.equal(got, want), op
