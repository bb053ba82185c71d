"""What only a GPU can show: graphs, launches, large pools, many rows, several devices."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from bindings import dispatch, kernels, oracle
from bindings.targets import target_of
from tests.cases import ROWS, named
from tests.draw import BF16, FP32, Draw, gdn
from tests.harness import Backend, Placement, assert_same_bits, call, judge

pytestmark = pytest.mark.gpu

OPS = sorted(oracle.ORACLES)
every_op = pytest.mark.parametrize("op", OPS)
CALLS = [(op, "bf16") for op in OPS] + [(op, "fp16") for op in OPS if op != "moe_finalize"]
every_call = pytest.mark.parametrize(("op", "dtype"), CALLS, ids=[f"{op}-{dtype}" for op, dtype in CALLS])


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raises where torch waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def kernel_launches(capture: Callable[[], object]) -> tuple[int, int]:
    """How many kernel nodes, and how many nodes of any kind, the graph of what `capture` launches has."""
    from cuda.bindings import runtime

    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*CUDA Graph is empty.*")
        with torch.cuda.graph(graph):
            capture()
    raw = runtime.cudaGraph_t(graph.raw_cuda_graph())
    error, _, count = runtime.cudaGraphGetNodes(raw)
    assert error == runtime.cudaError_t.cudaSuccess
    if count == 0:
        return 0, 0
    error, nodes, _ = runtime.cudaGraphGetNodes(raw, count)
    assert error == runtime.cudaError_t.cudaSuccess
    kinds = [runtime.cudaGraphNodeGetType(node)[1] for node in nodes]
    return kinds.count(runtime.cudaGraphNodeType.cudaGraphNodeTypeKernel), len(kinds)


@every_call
@pytest.mark.parametrize("shape", ["small", "model"])
def test_replay_with_changed_inputs(op: str, dtype: str, shape: str, gpu_backend: Backend) -> None:
    """One graph, five updates of its inputs: each replay's results are exact, and those of an eager call."""
    name = f"T3-{dtype}-{shape}"
    if (op, shape) == ("hc_mix", "model"):
        name = {"bf16": "T3-bf16-model", "fp16": "T2-fp16-model"}[dtype]
    case = named(op, name)
    placed = Placement(op, case.inputs(), gpu_backend.device)
    outs = placed.outputs()
    call(op, placed.arguments, gpu_backend, outs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call(op, placed.arguments, gpu_backend, outs)
    for update in range(1, 6):
        inputs = case.inputs(variant=update)
        placed.rewrite(inputs)
        graph.replay()
        placed.check()
        judge(op, inputs, results)
        eager = call(op, Placement(op, inputs, gpu_backend.device).arguments, gpu_backend)
        for replayed, direct in zip(results, eager, strict=True):
            assert_same_bits(replayed, direct, f"update {update}")


@every_call
def test_capture_of_the_functional_form(op: str, dtype: str, gpu_backend: Backend) -> None:
    """Results in the graph's own memory."""
    case = named(op, f"T3-{dtype}-small")
    placed = Placement(op, case.inputs(), gpu_backend.device)
    call(op, placed.arguments, gpu_backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call(op, placed.arguments, gpu_backend)
    inputs = case.inputs(variant=1)
    placed.rewrite(inputs)
    graph.replay()
    placed.check()
    judge(op, inputs, results)


@every_call
def test_never_waits(op: str, dtype: str, gpu_backend: Backend) -> None:
    """Neither with rows nor without."""
    for T in (3, 0):
        placed = Placement(op, named(op, f"T{T}-{dtype}-small").inputs(), gpu_backend.device)
        outs = placed.outputs()
        call(op, placed.arguments, gpu_backend, outs)
        torch.cuda.synchronize()
        with no_waiting():
            call(op, placed.arguments, gpu_backend, outs)
            call(op, placed.arguments, gpu_backend)


@every_call
def test_launches(op: str, dtype: str, gpu_backend: Backend) -> None:
    """Nothing at all without rows; else one kernel, if there is one for the operator."""
    for T in ROWS:
        placed = Placement(op, named(op, f"T{T}-{dtype}-small").inputs(), gpu_backend.device)
        outs = placed.outputs()
        call(op, placed.arguments, gpu_backend, outs)
        launched, nodes = kernel_launches(lambda p=placed, o=outs: call(op, p.arguments, gpu_backend, o))
        if T == 0:
            assert nodes == 0
        elif gpu_backend.name == "cute" and (op != "hc_mix" or T <= 32):
            assert (launched, nodes) == (1, 1)
        else:
            assert launched >= 1


@pytest.mark.parametrize(
    "name", ["T1-bf16-model", "T1-fp16-model", "T33-bf16-model", "T33-bf16-small", "T32-fp16-small"]
)
@pytest.mark.parametrize("state_dtype", [FP32, BF16], ids=str)
def test_value_tiles_give_the_same_bits(name: str, state_dtype: torch.dtype) -> None:
    backend = cute()
    inputs = named("gdn_packed_decode", name).inputs()
    inputs["state"] = inputs["state"].to(state_dtype)
    expected = call(
        "gdn_packed_decode", Placement("gdn_packed_decode", inputs, backend.device).arguments, backend
    )
    judge("gdn_packed_decode", inputs, expected)
    for tile in kernels.VALUE_TILES:
        for shifted in (False, True):
            placed = Placement("gdn_packed_decode", inputs, backend.device, shifted)
            outs = placed.outputs()
            with dispatch.force_value_tile(tile):
                results = call("gdn_packed_decode", placed.arguments, backend, outs)
            placed.check()
            for result, other in zip(results, expected, strict=True):
                assert_same_bits(result, other, f"value tile {tile}")


def cute() -> Backend:
    """The CuTe backend, or a skip where no kernels are built for this GPU."""
    if target_of(torch.device("cuda:0")) is None:
        pytest.skip(f"no kernels are built for sm_{torch.cuda.get_device_capability()}")
    return Backend("cute", "cuda:0")


@pytest.mark.parametrize("state_dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("gap", [0, 96])
def test_slots_beyond_two_to_the_31_elements(
    state_dtype: torch.dtype, gap: int, gpu_backend: Backend
) -> None:
    """In a pool of more than 2**31 elements, results and states are those of a small pool with the same
    slots, and no other byte of the pool changes."""
    Hv, D = 12, 128
    stride = Hv * D * D + gap
    N = 2**31 // stride + 9
    free, _ = torch.cuda.mem_get_info()
    needed = N * stride * torch.empty((), dtype=state_dtype).element_size() * 5 // 4 + 2**31
    if free < needed:
        pytest.skip(f"needs {needed / 2**30:.1f} GiB of GPU memory, {free / 2**30:.1f} GiB are free")
    draw = Draw("pool")
    inputs = gdn(draw, 5, BF16, state_dtype=state_dtype)
    small = inputs["state"] = draw.uniform(8, Hv, D, D, scale=0.5, dtype=state_dtype)
    # the last slot, those around element 2**31, the first, and one that does not exist
    used = torch.tensor([N - 1, 2**31 // stride, 2**31 // stride - 1, 0, N], dtype=torch.int32)
    inputs["state_indices"] = torch.tensor([0, 1, 2, 3, 8], dtype=torch.int32)
    expected = call(
        "gdn_packed_decode", Placement("gdn_packed_decode", inputs, gpu_backend.device).arguments, gpu_backend
    )
    judge("gdn_packed_decode", inputs, expected)

    bits = {FP32: torch.int32, BF16: torch.int16}[state_dtype]
    whole = torch.full((N, stride), -1, dtype=bits, device=gpu_backend.device)
    pool = whole[:, : Hv * D * D].view(state_dtype).unflatten(1, (Hv, D, D))
    live = used[:4].tolist()
    for slot, values in zip(live, small, strict=False):
        pool[slot].copy_(values)
    arguments = {
        n: x.to(gpu_backend.device) for n, x in inputs.items() if isinstance(x, Tensor) and n != "state"
    }
    arguments |= {"state": pool, "state_indices": used.to(gpu_backend.device)}
    out, _ = call("gdn_packed_decode", arguments, gpu_backend)
    assert_same_bits(out, expected[0], "result")
    for slot, values in zip(live, expected[1], strict=False):
        assert_same_bits(pool[slot], values, f"slot {slot}")
        pool[slot].view(bits).fill_(-1)
    for first in range(0, N, 512):
        assert (whole[first : first + 512] == -1).all(), f"slots {first} to {first + 511}: written"


MANY = 70_001
"""More rows than a grid's y and z dimensions have blocks."""


@every_op
def test_many_rows(op: str, gpu_backend: Backend) -> None:
    """70,001 rows that repeat four: so do the results."""
    inputs = named(op, "T4-bf16-small").inputs()
    if op == "gdn_packed_decode":
        inputs = gdn(Draw("many"), 4, BF16, Hk=1, Hv=1, D=64)
    four = call(op, Placement(op, inputs, gpu_backend.device).arguments, gpu_backend)
    by_row = {n for n, x in inputs.items() if isinstance(x, Tensor) and x.shape[:1] == (4,)}
    many: dict[str, Any] = {}
    for name, value in inputs.items():
        x = value.to(gpu_backend.device) if isinstance(value, Tensor) else value
        if name in by_row:
            x = x.repeat(MANY // 4 + 1, *(1,) * (x.dim() - 1))[:MANY]
        many[name] = x
    if op == "moe_finalize":
        slots = inputs["permuted_idx"].to(gpu_backend.device).view(4, -1)
        many["permuted_idx"] = slots.repeat(MANY // 4 + 1, 1)[:MANY].flatten()
    if op == "gdn_packed_decode":
        index = inputs["state_indices"].to(gpu_backend.device)
        held = (index >= 0) & (index < inputs["state"].shape[0])
        source = inputs["state"].to(gpu_backend.device)
        row = torch.arange(MANY, device=gpu_backend.device)
        slot = torch.where(held, index, 0)[row % 4].long()
        many["state"] = source[slot]  # a slot for every row
        many["state_indices"] = torch.where(held[row % 4], row, -1)
    results = call(op, many, gpu_backend)
    results = results[:1] if op == "gdn_packed_decode" else results
    for result, few in zip(results, four, strict=False):
        repeated = few.repeat(MANY // 4 + 1, *(1,) * (few.dim() - 1))[:MANY]
        if gpu_backend.name == "cute" and op != "hc_mix":
            assert_same_bits(result, repeated, "repeated rows")
        else:  # a BLAS may sum another number of rows in another order
            torch.testing.assert_close(result, repeated, rtol=2**-7, atol=1e-3, equal_nan=True)
    if op == "gdn_packed_decode":
        wanted = four[1][torch.where(held, index, 0).long()][row[-4:] % 4]
        last = many["state"][-4:]
        assert_same_bits(last[held[row[-4:] % 4]], wanted[held[row[-4:] % 4]], "state")


@pytest.mark.multi_gpu
@every_call
def test_another_device_than_the_current(op: str, dtype: str, gpu_backend: Backend) -> None:
    """A call runs where its tensors are, on that device's current stream, and leaves the current device
    alone."""
    inputs = named(op, f"T3-{dtype}-small").inputs()
    there = Backend(gpu_backend.name, "cuda:1")
    with torch.cuda.device(0):
        here = call(op, Placement(op, inputs, gpu_backend.device).arguments, gpu_backend)
        placed = Placement(op, inputs, there.device)
        outs = placed.outputs()
        stream = torch.cuda.Stream("cuda:1")
        stream.wait_stream(torch.cuda.current_stream("cuda:1"))
        with torch.cuda.stream(stream), torch.cuda.device(0):
            results = call(op, placed.arguments, there, outs)
            assert torch.cuda.current_device() == 0
        stream.synchronize()
    placed.check()
    judge(op, inputs, results)
    for first, second in zip(here, results, strict=True):
        assert_same_bits(first.cpu(), second.cpu(), "the same kernel on another device")
