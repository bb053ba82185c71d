"""hc_mix where CTAs wait for each other: every row count, launches that follow and overlap, what the
workspace held before, a CTA that is missing, a grid that does not fit."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bindings
from bindings import dispatch, mix, ops, workspace
from bindings.errors import FlashnextWarning, HandoffTimeout
from bindings.targets import target_of
from cute_kernels.hyper import mix_plan
from profiling.graphs import count_by_kernel, kernel_names
from tests.draw import Draw
from tests.draw import mix as drawn
from tests.harness import assert_same_bits, judge

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda:0")
MODEL = dict(H=2560, C=4, R=320)
ONE, TWO = "cute_kernels.hyper.mix", "cute_kernels.hyper.mix, two launches"


@pytest.fixture(autouse=True)
def cute() -> Iterator[None]:
    """The kernel, and nothing else, serves; a new process has no workspaces."""
    if target_of(DEVICE) is None:
        pytest.skip("no kernels are built for this device")
    with bindings.backend("cute"):
        yield
    torch.cuda.synchronize()


def inputs(T: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> dict[str, Tensor]:
    made = drawn(Draw(f"mix {seed}"), T=T, dtype=dtype, **MODEL)
    return {name: v.to(DEVICE) if isinstance(v, Tensor) else v for name, v in made.items()}


def on_cpu(args: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: v.cpu() if isinstance(v, Tensor) else v for name, v in args.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_row_count(dtype: torch.dtype) -> None:
    """1 to 33 rows of one input, buckets in turn; 33 are GEMMs."""
    whole = inputs(33, dtype)
    for T in range(1, 34):
        args = {**whole, "normed": whole["normed"][:T].contiguous()}
        served = bindings.explain("hc_mix", **args)
        assert served.implementation == (ONE if T <= 32 else "gemm")
        judge("hc_mix", on_cpu(args), (ops.hc_mix(**args),))


@pytest.mark.parametrize("T", [1, 8, 16, 32])
def test_launches_that_follow_each_other_give_the_same_bits(T: int) -> None:
    """Every launch starts before the one before it is done."""
    args = inputs(T)
    expected = ops.hc_mix(**args)
    outs = [torch.full_like(expected, float("nan")) for _ in range(200)]
    torch.cuda.synchronize()
    for out in outs:
        ops.hc_mix(**args, out=out)
    for i, out in enumerate(outs):
        assert_same_bits(out, expected, f"launch {i}")


@pytest.mark.sanitizer
@pytest.mark.parametrize("T", [1, 11, 32])
def test_under_a_sanitizer(T: int) -> None:
    """Few launches of the model's shape, so that a sanitizer is done in time."""
    args = inputs(T)
    first, second = ops.hc_mix(**args), ops.hc_mix(**args)
    judge("hc_mix", on_cpu(args), (first,))
    assert_same_bits(second, first, "second run")


@pytest.mark.parametrize("T", [3, 32])
def test_two_streams_and_graphs_at_once(T: int) -> None:
    """Eager calls on two streams, beside the replays of two graphs on two more: none shares a workspace with
    another, and all give the same bits."""
    args = [inputs(T, seed=i) for i in range(4)]
    expected = [ops.hc_mix(**a) for a in args]
    outs = [torch.full_like(e, float("nan")) for e in expected]
    streams = [torch.cuda.Stream() for _ in range(4)]
    graphs = []
    for i in (2, 3):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=streams[i]):
            for _ in range(10):
                ops.hc_mix(**args[i], out=outs[i])
        graphs.append(graph)
    torch.cuda.synchronize()
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                if i < 2:
                    for _ in range(5):
                        ops.hc_mix(**args[i], out=outs[i])
                else:
                    graphs[i - 2].replay()
    torch.cuda.synchronize()
    for i, (out, wanted) in enumerate(zip(outs, expected, strict=True)):
        assert_same_bits(out, wanted, f"stream {i}")


def test_streams_within_a_graph() -> None:
    """Two branches of one graph may run at once, so they have workspaces of their own."""
    args = [inputs(1, seed=i) for i in range(2)]
    expected = [ops.hc_mix(**a) for a in args]
    outs = [torch.full_like(e, float("nan")) for e in expected]
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        for _ in range(5):
            ops.hc_mix(**args[0], out=outs[0])
            with torch.cuda.stream(side):
                ops.hc_mix(**args[1], out=outs[1])
        main.wait_stream(side)
    for _ in range(10):
        graph.replay()
    for i, (out, wanted) in enumerate(zip(outs, expected, strict=True)):
        assert_same_bits(out, wanted, f"branch {i}")


def test_a_graph_that_finds_no_spare_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """It then sets memory of its own to zero in every replay."""
    args = inputs(2)
    expected, out = ops.hc_mix(**args), None
    for spaces in workspace._all.values():
        monkeypatch.setattr(spaces, "spare", [])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            out = ops.hc_mix(**args)
    assert out is not None
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert_same_bits(out, expected, "replay")


@pytest.mark.parametrize("epoch", [1, 12345, 2**31 - 2, 2**32 - 3])
def test_what_the_workspace_held_does_not_matter(epoch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Payloads of NaNs under the last epoch, and an epoch that wraps."""
    args = inputs(5)
    expected = ops.hc_mix(**args)
    words = workspaces(5).of(key(), False).view(torch.int32)
    signed = epoch - 2**32 if epoch >= 2**31 else epoch
    handed = words[2 * plan(5).header_words :]
    handed[0::2], handed[1::2] = -1, signed  # payload, epoch
    epochs = words[: plan(5).grid]
    epochs.fill_(signed)
    torch.cuda.synchronize()
    for i in range(5):
        assert_same_bits(ops.hc_mix(**args), expected, f"launch {i}")
    assert {e % 2**32 for e in epochs.tolist()} == {(epoch + 5) % 2**32}


def workspaces(T: int) -> workspace.Workspaces:
    """Those of the bucket of T rows."""
    word = plan(T).control + mix_plan.RECORD
    return workspace.workspaces(DEVICE, plan(T), plan(T).workspace_words, record_word=word)


def key() -> int:
    """Of the current stream."""
    return workspace.stream_key(torch.cuda.current_stream().stream_id)


@contextlib.contextmanager
def broken_off(held: Tensor, T: int) -> Iterator[None]:
    """Within the context, until something renews it, a CTA has counted another number of launches than all
    others, as if it were late for ever, and the others wait 20 ms for it."""
    held[plan(T).control + mix_plan.LIMIT] = 20_000_000
    held.view(torch.int32)[0] += 1000
    torch.cuda.synchronize()
    try:
        yield
    finally:
        torch.cuda.synchronize()
        workspaces(T).shared.renew()


@pytest.mark.parametrize("T", [1, 16, 32])
def test_a_wait_for_a_cta_that_never_publishes(T: int) -> None:
    """Every CTA leaves, the rows whose inner activations were missing are NaNs, the next call says why, and
    the one after it is right."""
    args = inputs(T)
    expected = ops.hc_mix(**args)
    with broken_off(workspaces(T).of(key(), False), T):
        lost = ops.hc_mix(**args)
        torch.cuda.synchronize()
        assert lost[0].isnan().all()
        with pytest.raises(HandoffTimeout, match=r"^hc_mix on cuda:0: .* launched nothing; the workspaces"):
            ops.hc_mix(**args)
        for _ in range(3):
            assert_same_bits(ops.hc_mix(**args), expected, "after it")


@pytest.mark.parametrize("by", ["check", "call", "call of another bucket"])
def test_a_wait_that_expires_within_a_graph(by: str) -> None:
    """Later replays leave at once; the next call outside it, or a check, says why, and replays are right
    again."""
    args, more = inputs(2), inputs(12)
    expected, out = ops.hc_mix(**args), torch.empty_like(inputs(2)["normed"][:, :2560])
    expected_of_more = ops.hc_mix(**more)
    before = set(workspaces(2).captured)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(50):
            ops.hc_mix(**args, out=out)
    (used,) = set(workspaces(2).captured) - before
    bindings.check(DEVICE)
    with broken_off(workspaces(2).captured[used], 2):
        start = time.perf_counter()
        for _ in range(2):
            graph.replay()
        torch.cuda.synchronize()
        assert time.perf_counter() - start < 0.5  # not a hundred times 20 ms
        assert out[0].isnan().all()
        looks = {"check": bindings.check, "call": partial(ops.hc_mix, **args)}
        look = looks.get(by, partial(ops.hc_mix, **more))
        with pytest.raises(HandoffTimeout, match=r"^hc_mix on cuda:0: .*he workspaces are as new"):
            look()
        bindings.check(DEVICE)
        graph.replay()
        assert_same_bits(out, expected, "after it")
        assert_same_bits(ops.hc_mix(**more), expected_of_more, "of another bucket")


def test_a_green_context() -> None:
    """A part of the SMs, too small for the grid: two launches serve, of the same bits, and nothing hangs."""
    driver = pytest.importorskip("cuda.bindings.driver")

    def call(name: str, *arguments: Any) -> Any:
        """What a driver function returns; skips where there is no such function, or it is not supported."""
        function = getattr(driver, name, None)
        if function is None:
            pytest.skip(f"cuda.bindings has no {name}")
        try:
            error, *values = function(*arguments)
        except RuntimeError as missing:
            if "not found" not in str(missing):
                raise
            pytest.skip(f"the driver has no {name}: {missing}")
        if error == driver.CUresult.CUDA_ERROR_NOT_SUPPORTED:
            pytest.skip(f"{name}: {error}")
        assert error == driver.CUresult.CUDA_SUCCESS, f"{name}: {error}"
        return values[0] if len(values) == 1 else values

    args = inputs(12)
    expected = ops.hc_mix(**args)  # loads the kernel
    device = call("cuDeviceGet", DEVICE.index)
    whole = call("cuDeviceGetDevResource", device, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)
    parts, _, _ = call("cuDevSmResourceSplitByCount", 1, whole, 0, 32)
    few = call("cuDevResourceGenerateDesc", parts, 1)
    with contextlib.ExitStack() as after:
        flag = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        context = call("cuGreenCtxCreate", few, device, flag)
        after.callback(driver.cuGreenCtxDestroy, context)
        kind = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        stream = call("cuGreenCtxStreamCreate", context, kind, 0)
        after.callback(driver.cuStreamDestroy, stream)
        after.callback(workspaces(12).shared.renew)
        after.callback(torch.cuda.synchronize)
        after.callback(dispatch.clear_plans)  # which remember the refusal too
        after.callback(mix._refused[plan(12)].clear)
        with torch.cuda.stream(torch.cuda.ExternalStream(int(stream))):
            workspaces(12).of(key(), False)[plan(12).control + mix_plan.LIMIT] = 10**9
            torch.cuda.synchronize()
            with pytest.warns(FlashnextWarning, match="cannot be resident at once"):
                results = [ops.hc_mix(**args)]
            results += [ops.hc_mix(**args) for _ in range(20)]
        torch.cuda.synchronize()
        for result in results:
            assert_same_bits(result, expected, "in the green context")
        assert not workspaces(12).expired
    assert bindings.explain("hc_mix", **args).implementation == ONE
    assert_same_bits(ops.hc_mix(**args), expected, "on the whole device")


CLIENT = """
import os, sys, time
import torch
import bindings
from bindings import ops
from tests.harness import judge
from tests.ops.test_mix import inputs, on_cpu
calls = [inputs(T) for T in (1, 12, 32)]
first = [ops.hc_mix(**args) for args in calls]
for args, result in zip(calls, first):
    judge("hc_mix", on_cpu(args), (result,))
torch.cuda.synchronize()
open(sys.argv[1], "w").close()
end = time.monotonic() + 60
while not os.path.exists(sys.argv[2]):
    assert time.monotonic() < end, "the other client does not come"
    time.sleep(0.001)
start = time.monotonic()
while time.monotonic() < start + 1.5:
    for args, expected in zip(calls, first):
        results = [ops.hc_mix(**args) for _ in range(50)]
        assert all(torch.equal(result, expected) for result in results)
print("from", start, "to", time.monotonic())
bindings.check()
for args in calls:
    print("served by", bindings.explain("hc_mix", **args).implementation)
"""


@pytest.mark.parametrize(("percentage", "serves"), [(100, ONE), (40, TWO)], ids=["whole", "part"])
def test_shares_of_the_multi_process_service(
    mps: Callable[[], dict[str, str]], tmp_path: Path, percentage: int, serves: str
) -> None:
    """Two clients of CUDA's multi-process service, which launch for a second at the same time. With all SMs
    each: one launch. With a part of them, too small for its grid: two. Results are right, and nothing hangs,
    either way."""
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))
    share = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percentage), "PYTHONPATH": path}
    environment, here = {**os.environ, **mps(), **share}, [str(tmp_path / name) for name in "ab"]
    with contextlib.ExitStack() as running:
        clients = []
        for own, other in (here, here[::-1]):
            words = [sys.executable, "-c", CLIENT, own, other]
            client = subprocess.Popen(
                words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            running.callback(client.wait)
            running.callback(client.kill)
            clients.append(client)
        spans = []
        outputs = [client.communicate(timeout=120)[0] for client in clients]
        for client, said in zip(clients, outputs, strict=True):
            assert client.returncode == 0, "\n---\n".join(text[-4000:] for text in outputs)
            assert re.findall(r"^served by (.+)$", said, re.M) == [serves] * 3, said[-4000:]
            spans += [tuple(map(float, span)) for span in re.findall(r"^from (\S+) to (\S+)$", said, re.M)]
        (start, end), (other_start, other_end) = spans
        assert min(end, other_end) - max(start, other_start) > 1


def force(launches: int, args: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of these arguments take one launch, or two."""
    sms = {1: 132, 2: 16}[launches]
    monkeypatch.setattr(mix, "_multiprocessors", lambda call: sms)
    dispatch.clear_plans()  # which were made on the other device
    assert bindings.explain("hc_mix", **args).launches == launches


@pytest.mark.parametrize("launches", [1, 2])
@pytest.mark.parametrize("T", [1, 8, 16, 32])
def test_inputs_may_come_from_the_kernel_directly_before(
    T: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`normed` and `w_up` made anew, in the same memory, by a kernel that lets the next begin at once."""
    args = inputs(T)
    before = [args[name].clone() for name in ("normed", "w_up")]
    made = []
    for name, group in (("normed", 2560), ("w_up", 320)):
        weight = torch.zeros(args[name].shape[1], dtype=torch.bfloat16, device=DEVICE)
        for i in range(8):
            x = Draw(f"{name} {i}").uniform(*args[name].shape, dtype=torch.bfloat16).to(DEVICE)
            made.append((args[name], partial(ops.grouped_gemma_rmsnorm, x, weight, 1e-6, group)))

    expected = []
    for memory, make in made:
        memory.copy_(make())  # not by a kernel of ours: nothing begins before it is done
        expected.append(ops.hc_mix(**args))
    outs = [torch.empty_like(result) for result in expected]

    def run() -> None:
        for (memory, make), out in zip(made, outs, strict=True):
            make(out=memory)
            ops.hc_mix(**args, out=out)

    force(launches, args, monkeypatch)
    graph = torch.cuda.CUDAGraph()
    run()
    with torch.cuda.graph(graph):
        run()
    for go in (run, graph.replay, graph.replay):
        for memory, old in zip((args["normed"], args["w_up"]), before, strict=True):
            memory.copy_(old)
        for out in outs:
            out.fill_(float("nan"))
        go()
        for i, (out, wanted) in enumerate(zip(outs, expected, strict=True)):
            assert_same_bits(out, wanted, f"call {i}")


@pytest.mark.sanitizer
@pytest.mark.parametrize("T", [1, 12, 32])
def test_two_launches_have_the_bits_of_one(T: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of both kinds in turn, on one workspace, and a replayed graph of two launches."""
    args = inputs(T)
    expected = ops.hc_mix(**args)
    for i in range(6):
        force(1 + i % 2, args, monkeypatch)
        result = torch.full_like(expected, float("nan"))
        ops.hc_mix(**args, out=result)
        assert_same_bits(result, expected, f"call {i}")
    force(2, args, monkeypatch)
    out = torch.full_like(expected, float("nan"))
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        ops.hc_mix(**args, out=out)
    graph.instantiate()
    monkeypatch.undo()
    dispatch.clear_plans()
    for seed in (0, 1):
        more = inputs(T, seed=seed)
        for name, tensor in args.items():
            if isinstance(tensor, Tensor):
                tensor.copy_(more[name])
        out.fill_(float("nan"))
        graph.replay()
        assert_same_bits(out, ops.hc_mix(**more), f"replay {seed}")
    try:
        names = kernel_names(graph)
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"the bits are right; the driver does not tell a graph's kernels: {error}")
    assert count_by_kernel(names, ["hc_mix"]) == {"hc_mix": 2}


def plan(T: int) -> mix_plan.MixPlan:
    target = target_of(DEVICE)
    assert target is not None
    found = mix_plan.plan(2560, 4, 320, mix_plan.bucket_of(T), target)
    assert isinstance(found, mix_plan.MixPlan)
    return found


def test_a_grid_that_is_not_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    """More CTAs than can be resident: the launch is refused, two launches give the result, nothing hangs, and
    no error is left behind for whoever asks next."""
    args = inputs(4)
    args["w_down"] = args["w_down"].repeat(2, 1)[:608].contiguous()
    args["w_up"] = args["w_up"].repeat(1, 2)[:, :608].contiguous()
    resident = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    monkeypatch.setattr(mix_plan, "CTAS", 4 * resident)
    monkeypatch.setattr(mix, "_multiprocessors", lambda call: None)
    monkeypatch.setattr(mix, "_refused", {})
    mix_plan.plan.cache_clear()
    try:
        assert bindings.explain("hc_mix", **args).implementation == ONE
        with pytest.warns(FlashnextWarning, match="cannot be resident at once"):
            result = ops.hc_mix(**args)
        judge("hc_mix", on_cpu(args), (result,))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            judge("hc_mix", on_cpu(args), (ops.hc_mix(**args),))
        assert bindings.explain("hc_mix", **args).implementation == TWO
        torch.cuda.synchronize()
        assert torch.ones(4, device=DEVICE).sum().item() == 4
    finally:
        mix_plan.plan.cache_clear()
