"""hc_mix on the host: guards, refusals of the cooperative launch, workspaces."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import bindings
from bindings import dispatch, emulated, explain, gemm_mix, mix, ops, reference, targets, workspace
from bindings.errors import FlashnextWarning, HandoffTimeout, InvalidArgument
from bindings.registry import IMPLEMENTATIONS, ModelConfig, NotGranted
from bindings.workspace import SPARES, OnDevice, Workspaces
from cute_kernels.hyper import mix_plan
from tests.bindings.calls import SMALL, Call, Jit, make

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")
GEOMETRY, (SMS, GRANTED) = mix.SHAPE_GUARDS[1], mix.RESIDENCE_GUARDS
ONE, TWO = "cute_kernels.hyper.mix", "cute_kernels.hyper.mix, two launches"


def failed(call: Call, served_by: str) -> list[tuple[str, str, str]]:
    answer = explain("hc_mix", **call)
    assert answer.implementation == served_by
    return [(v.implementation, v.guard, v.got) for v in answer.guards if not v.ok]


@pytest.mark.parametrize(
    ("rows", "changes", "guard", "got"),
    [
        (33, {}, "T is at most 32", "33"),
        (1, {"streams": 3}, GEOMETRY.description, "C = 3, H = 64, R = 16, but C must be one of 1, 2, 4, 8"),
        (1, {"hidden": 12}, GEOMETRY.description, "C = 4, H = 12, R = 16, but H must be a multiple of 8"),
        (1, {"low_rank": 24}, GEOMETRY.description, "C = 4, H = 64, R = 24, but R must be a multiple of 16"),
        (1, {"hidden": 8}, GEOMETRY.description, "C = 4, H = 8, R = 16, but C*H must be a multiple of 64"),
    ],
)
def test_guards(rows: int, changes: dict[str, int], guard: str, got: str, compiled: Jit) -> None:
    call = make("hc_mix", rows, replace(SMALL, **changes))
    assert failed(call, "gemm") == [(ONE, guard, got), (TWO, guard, got)]
    assert (ops.hc_mix(**call) == reference.hc_mix(**call)).float().mean() > 0.9
    assert compiled.requested == []


@pytest.mark.parametrize("target", targets.TARGETS)
def test_a_target_has_the_kernels_that_it_has_plans_for(target: str) -> None:
    """A shape whose widest bucket fits one target and not another."""
    shape, model = (2560, 4, 368), replace(ModelConfig(), low_rank=368)
    buckets = [b for b in mix_plan.BUCKETS if isinstance(mix_plan.plan(*shape, b, target), mix_plan.MixPlan)]
    assert buckets == [b for b in mix_plan.BUCKETS if b < 32 or target == "sm_90a"]
    kernels = [k for k in IMPLEMENTATIONS["hc_mix"] if isinstance(k, mix.MixKernel)]
    assert len(kernels) == 2
    for kernel in kernels:
        found = [v["bucket"] for v in kernel.variants(target, model) if v["dtype"] == "bf16"]
        assert found == buckets
    call = make("hc_mix", 32, model)
    with emulated.options(target=target), bindings.backend("emulator"):
        unmet = [v.got for v in explain("hc_mix", **call).guards if not v.ok]
    assert any("a CTA's share" in got for got in unmet) == (32 not in buckets)


def test_a_device_with_too_few_sms(compiled: Jit, monkeypatch: pytest.MonkeyPatch) -> None:
    grid, call = plan_of_the_call().grid, make("hc_mix")
    cluster = plan_of_the_call().cluster
    for here, served_by in ((grid, ONE), (grid - 1, TWO), (cluster, TWO), (cluster - 1, "gemm")):
        monkeypatch.setattr(mix, "_multiprocessors", lambda call, here=here: here)
        dispatch.clear_plans()
        missing = [(ONE, SMS.description, f"{here} SMs")] * (here < grid)
        missing += [(TWO, mix.CLUSTER_GUARD.description, f"{here} SMs")] * (here < cluster)
        assert failed(call, served_by) == missing
        if here < grid:
            ops.hc_mix(**call)
            assert compiled.last.params["launch"] == "split"


def plan_of_the_call() -> mix_plan.MixPlan:
    """Of `make("hc_mix")`, on SM90."""
    found = mix_plan.plan(64, 4, 16, 8, "sm_90a")
    assert isinstance(found, mix_plan.MixPlan)
    return found


def spaces_of(plan: mix_plan.MixPlan) -> Workspaces:
    return workspace.workspaces(CPU, plan, plan.workspace_words, record_word=plan.control + mix_plan.RECORD)


class Index(Tensor):
    """A CPU tensor that says that it is on device 0."""

    @staticmethod
    def of(t: Tensor) -> Tensor:
        return t.as_subclass(Index)

    def get_device(self) -> int:
        return 0

    @property
    def device(self) -> torch.device:
        return CPU


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch, compiled: Jit) -> Callable[..., Tensor]:
    """Launches a kernel twice by `mix.launcher` as on device 0, and returns the result, which starts as
    zeros."""
    monkeypatch.setattr(mix, "_refused", {})
    monkeypatch.setattr(mix, "forget_error", lambda index: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", lambda index: (7, index, 1), raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: None)

    def run(kernel: Callable[..., Any], capturing: bool = False, cooperative: bool = True) -> Tensor:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
        call = make("hc_mix")
        out = torch.zeros((3, 64), dtype=torch.bfloat16)
        function = mix.launcher(kernel, plan_of_the_call(), cooperative=cooperative)
        function(Index.of(call["normed"]), call["w_down"], call["w_up"], out, 4)
        function(Index.of(call["normed"]), call["w_down"], call["w_up"], out, 4)
        return out

    return run


def too_large(*args: Any) -> None:
    raise RuntimeError("CUDA error 720, cudaErrorCooperativeLaunchTooLarge: too many blocks")


def test_a_refused_launch_is_not_tried_again(
    launch: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor another dtype's of the plan; the two launches of the plan are."""
    tries: list[int] = []

    def refused(*args: Any) -> None:
        tries.append(1)
        too_large()

    with (
        pytest.warns(
            FlashnextWarning, match=r"^hc_mix on cuda:0: refused: the grid of hc_mix cannot be resident"
        ),
        pytest.raises(NotGranted),
    ):
        launch(refused)
    for capturing in (False, True):
        with pytest.raises(NotGranted):
            launch(refused, capturing)
    assert len(tries) == 1
    assert (launch(lambda *args: args[3].add_(1), cooperative=False) == 2).all()

    class On:
        type, index = "cuda", 0

    class Asked(dict[str, int]):
        device = On()

    def asked(rows: int) -> Any:
        return Asked(T=rows, W=256, C=4, R=16)

    monkeypatch.setattr(mix.targets, "target_of", lambda device: "sm_90a")
    assert not GRANTED.holds(asked(3))
    assert str(GRANTED.got(asked(3))).startswith("refused: ")
    assert GRANTED.holds(asked(9))  # of another bucket, so of another grid


@pytest.fixture
def refusing(compiled: Jit, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A device that does not grant one launch, though nothing says so before it is tried; what was launched,
    or tried. After the first try the guard says so. Calls are made with CPU tensors, which guards take for
    tensors of that device; those of meta tensors they see as they are."""
    tried: list[str] = []

    def here(call: Any) -> bool:
        return call.device.type in ("cpu", "cuda")

    def load(self: mix.MixKernel, target: str, params: Any) -> Callable[..., Any]:
        def launch(normed: Tensor, w_down: Tensor, w_up: Tensor, out: Tensor, streams: int) -> None:
            tried.append(self.launch)
            if self.launch == "cooperative":
                refused.append("refused: as the test has it")
                raise NotGranted
            out.copy_(reference.hc_mix(normed, w_down, w_up, streams))

        return launch

    monkeypatch.setattr(mix.MixKernel, "load", load)
    refused: list[str] = []
    monkeypatch.setattr(mix, "_refusal", lambda call: refused[0] if refused and here(call) else None)
    dispatch.clear_plans()
    return tried


def test_a_refused_call_is_served_by_two_launches(
    refusing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That call, one with a plan from before the refusal, and, since it is ready, one in a capture."""
    call = make("hc_mix")
    assert torch.equal(ops.hc_mix(**call), reference.hc_mix(**call))
    assert refusing == ["cooperative", "split"]
    answer = explain("hc_mix", **call)
    assert (answer.implementation, answer.launches, answer.ready) == (TWO, 2, True)
    monkeypatch.setattr(dispatch, "capturing", lambda device: True)
    ops.hc_mix(**call)
    more = make("hc_mix", 2)  # of the same bucket
    ops.hc_mix(**more)
    assert refusing == ["cooperative", "split", "split", "split"]


def test_a_plan_from_before_the_refusal_is_given_up(
    refusing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = mix.MixKernel.load
    with monkeypatch.context() as granting:
        granting.setattr(
            mix.MixKernel,
            "load",
            lambda self, *args: lambda *t: None if not refusing else served(self, *args)(*t),
        )
        call = make("hc_mix")
        ops.hc_mix(**call)
        assert refusing == []
        refusing.append("from here on")
        assert torch.equal(ops.hc_mix(**call), reference.hc_mix(**call))
        assert torch.equal(ops.hc_mix(**call), reference.hc_mix(**call))
    assert refusing[1:] == ["cooperative", "split", "split"]


def test_warmup_of_a_device_that_refuses(refusing: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a capture then finds is ready."""
    config = bindings.WarmupConfig(ops=("hc_mix",), batch_sizes=(1, 3), model=SMALL, devices=("cpu",))
    assert [entry.implementation for entry in bindings.warmup(config).entries] == [TWO]
    assert refusing == ["cooperative", "split"]
    monkeypatch.setattr(dispatch, "capturing", lambda device: True)
    ops.hc_mix(**make("hc_mix"))
    assert refusing == ["cooperative", "split", "split"]


def test_guards_of_a_warmup_see_its_device(compiled: Jit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls are of meta tensors."""
    seen: list[str] = []

    def sms(call: Any) -> int | None:
        seen.append(call.device.type)
        return plan_of_the_call().cluster if call.device.type == "cpu" else None

    monkeypatch.setattr(mix, "_multiprocessors", sms)
    config = bindings.WarmupConfig(ops=("hc_mix",), batch_sizes=(1,), model=SMALL, devices=("cpu",))
    assert [entry.implementation for entry in bindings.warmup(config).entries] == [TWO]
    assert compiled.last.params["launch"] == "split"
    assert set(seen) == {"cpu"}


def test_an_implementation_that_is_refused_twice_is_an_error(
    compiled: Jit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its guards should have said so."""

    def never(*args: Any) -> None:
        raise NotGranted

    monkeypatch.setattr(mix.MixKernel, "load", lambda self, target, params: never)
    dispatch.clear_plans()
    with pytest.raises(NotGranted, match="does not grant this launch"):
        ops.hc_mix(**make("hc_mix"))
    config = bindings.WarmupConfig(ops=("hc_mix",), batch_sizes=(1,), model=SMALL, devices=("cpu",))
    with pytest.raises(NotGranted):
        bindings.warmup(config)


def test_a_refusal_inside_a_capture_is_an_error(launch: Callable[..., Tensor]) -> None:
    with pytest.raises(RuntimeError, match=r"^hc_mix on cuda:0, inside a CUDA-graph capture: refused: "):
        launch(too_large, capturing=True)
    assert not any(mix._refused.values())


def test_other_errors_pass(launch: Callable[..., Tensor]) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("CUDA error 700")

    with pytest.raises(RuntimeError, match=r"^CUDA error 700$"):
        launch(broken)
    assert not any(mix._refused.values())


def test_an_emulated_launch_that_fails_leaves_no_epochs(compiled: Jit) -> None:
    """CTAs that ended counted it, others did not: the next launch starts from zeros."""
    found: list[bool] = []
    plan = plan_of_the_call()

    def kernel(*args: Any) -> None:
        found.append(bool(args[-1][: plan.control].any()))
        args[-1][: plan.control] = 7
        if len(found) == 1:
            raise KeyboardInterrupt

    call = make("hc_mix")
    function = mix.launcher(kernel, plan)
    arguments = call["normed"], call["w_down"], call["w_up"], torch.empty_like(call["normed"][:, :64]), 4
    with torch.inference_mode(), pytest.raises(KeyboardInterrupt):
        function(*arguments)
    for _ in range(2):
        function(*arguments)
    assert found == [False, False, True]
    spaces_of(plan).shared.renew()


@pytest.mark.parametrize("capturing", [False, True])
def test_a_wait_that_expired_is_an_error_of_the_next_call(
    capturing: bool, launch: Callable[..., Tensor]
) -> None:
    """It launches nothing; outside a capture the workspaces are as new then, so that the next call is
    served."""
    plan, given = plan_of_the_call(), list[Tensor]()
    spaces = spaces_of(plan)

    def kernel(*args: Any) -> None:
        given.append(args[-1])
        args[-1][: plan.control + 1] = 9  # epochs, and the poison
        ctypes.c_int32.from_address(int(args[-1][plan.control + mix_plan.RECORD])).value = 6

    try:
        with pytest.raises(HandoffTimeout, match=r"^hc_mix on cuda:0: .* CTA 5 .* launched nothing"):
            launch(kernel, capturing)
        assert len(given) == 1
        assert bool(given[0][: plan.control + 1].any()) is capturing
        assert bool(spaces.expired) is capturing
        if not capturing:
            launch(lambda *args: None)
    finally:
        spaces.shared.renew()
    assert spaces.expired == 0
    assert given[0][plan.control + mix_plan.RECORD] == spaces.shared.record.data_ptr()


@pytest.fixture
def expired(compiled: Jit) -> Iterator[Workspaces]:
    """Of the 16-row bucket, one of them poisoned, as if a wait had expired in it. Nothing says
    so but the device's record."""
    plan = mix_plan.plan(64, 4, 16, 16, "sm_90a")
    assert isinstance(plan, mix_plan.MixPlan)
    spaces = spaces_of(plan)
    spaces.of(0, False)[: plan.control + 1] = 9
    spaces.shared.value.value = 3
    yield spaces
    spaces.shared.renew()


def poisoned(spaces: Workspaces) -> bool:
    return bool(spaces.of(0, False)[: spaces.record_word].any())


def test_a_call_of_another_bucket_says_it_too(expired: Workspaces, launch: Callable[..., Tensor]) -> None:
    """And all buckets' workspaces are as new then."""
    given: list[Tensor] = []
    with pytest.raises(HandoffTimeout, match=r"CTA 2 for one.* launched nothing"):
        launch(lambda *args: given.append(args[-1]))
    assert given == []
    assert not poisoned(expired)
    launch(lambda *args: given.append(args[-1]))
    assert len(given) == 2


@pytest.mark.parametrize("device", [None, "cpu", CPU])
def test_check(
    device: torch.device | str | None, expired: Workspaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For who only replays graphs; where there is nothing to say nothing is waited for."""
    with pytest.raises(HandoffTimeout, match=r"^hc_mix on the emulated device: .* CTA 2 for one") as error:
        bindings.check(device)
    assert "launched nothing" not in str(error.value)
    assert str(error.value).endswith("itself. The workspaces are as new, and the next call is served")
    assert not poisoned(expired)
    with monkeypatch.context() as none:
        none.setattr(workspace.OnDevice, "renew", None)
        none.setattr(torch.cuda, "synchronize", None)
        for one in (device, "cuda:0", "cuda"):  # the latter ran nothing
            bindings.check(one)


@pytest.mark.parametrize("device", ["meta", "nowhere", 1.5, "cuda:99"])
def test_check_refuses_what_is_no_such_device(device: Any) -> None:
    with pytest.raises(
        InvalidArgument, match=r"^check: device: got .*, allowed a device of type cpu or cuda"
    ):
        bindings.check(device)


def test_two_threads_that_find_one_expired_wait(
    expired: Workspaces, launch: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first renews and raises; the other, which found the record too, waits for that and launches."""
    found, renewed, kernels = threading.Semaphore(0), list[int](), list[Tensor]()
    settle, renew = mix.settle, workspace.OnDevice.renew

    def settling(*args: Any) -> None:
        assert args[1].expired
        found.release()
        settle(*args)

    def renewing(shared: workspace.OnDevice) -> None:
        assert found.acquire(timeout=60)  # both threads have found the record
        assert found.acquire(timeout=60)
        time.sleep(0.05)
        renewed.append(1)
        renew(shared)

    monkeypatch.setattr(mix, "settle", settling)
    monkeypatch.setattr(workspace.OnDevice, "renew", renewing)
    results = list[str]()

    def call() -> None:
        try:
            launch(lambda *args: kernels.append(args[-1]))
            results.append("served")
        except HandoffTimeout:
            results.append("raised")

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    monkeypatch.undo()
    assert sorted(results) == ["raised", "served"]
    assert len(renewed) == 1
    assert len(kernels) == 2  # of one of them


def test_a_call_on_another_device_than_the_current_one(
    expired: Workspaces, launch: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture on the current device is none on the tensors': what has expired there is renewed."""
    current = [1]

    @contextlib.contextmanager
    def on(index: int) -> Iterator[None]:
        before, current[0] = current[0], index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[0] == 1)
    call, out = make("hc_mix"), torch.empty(3, 64, dtype=torch.bfloat16)
    function = mix.launcher(lambda *args: None, plan_of_the_call())
    arguments = Index.of(call["normed"]), call["w_down"], call["w_up"], out, 4
    with pytest.raises(HandoffTimeout, match=r"^hc_mix on cuda:0: .* the workspaces are as new"):
        function(*arguments)
    assert not poisoned(expired)
    function(*arguments)


def test_the_kernel_gets_a_workspace_of_its_stream(launch: Callable[..., Tensor]) -> None:
    given: list[Tensor] = []
    launch(lambda *args: given.append(args[-1]))
    assert given[0] is given[1]
    assert (given[0].shape, given[0].dtype) == ((16 + 16 + 8 * 8,), torch.int64)


def test_workspaces_of_streams_and_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """One a stream, one a stream of a capture, none given twice."""
    spaces = Workspaces(OnDevice(CPU), 32, record_word=3)
    number = 1
    monkeypatch.setattr(workspace, "capture_id", lambda stream: number)
    eager = [spaces.of(stream, False) for stream in (1, 2)]
    assert [spaces.of(stream, False) for stream in (1, 2)] == eager
    captured = [spaces.of(stream, True) for stream in (1, 2)]
    assert [spaces.of(stream, True) for stream in (1, 2)] == captured
    number = 2
    captured.append(spaces.of(1, True))
    everything = [*eager, *captured]
    assert len({t.data_ptr() for t in everything}) == len(everything) == 5
    address = [0, 0, 0, spaces.shared.record.data_ptr(), *[0] * 28]
    assert all(t.tolist() == address for t in everything)
    for t in everything:
        t.fill_(5)
    spaces.shared.renew()
    assert all(t.tolist() == address for t in everything)


def test_what_tells_streams_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own number, and the driver's for streams that torch did not make: their handles come again."""
    numbers = {0x1000: 5, 2: 6}

    def query(stream: Any, number: Any) -> int:
        number._obj.value = numbers[stream.value]
        return 0

    monkeypatch.setattr(workspace, "_stream_id", lambda: query)
    keys = [workspace.stream_key(stream) for stream in (0, 0x1000, 2, 33, 35)]
    assert keys == [0, -6, -7, 33, 35]
    numbers[0x1000] = 8  # destroyed, and another one made
    assert workspace.stream_key(0x1000) == -9
    monkeypatch.setattr(workspace, "_stream_id", lambda: lambda stream, number: 1)
    assert workspace.stream_key(0x1000) == 0x1000
    monkeypatch.setattr(workspace, "_stream_id", lambda: None)
    assert workspace.stream_key(0x1000) == 0x1000


def test_a_capture_that_finds_no_spare_or_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without spares the memory is the graph's; without a number every launch gets its own."""
    spaces = Workspaces(OnDevice(CPU), 32, record_word=None)
    monkeypatch.setattr(workspace, "capture_id", lambda stream: None)
    found = [spaces.of(1, True) for _ in range(3)]
    assert len({t.data_ptr() for t in found}) == 3
    assert [t.data_ptr() for t in spaces.kept] == [t.data_ptr() for t in found]
    assert not spaces.of(1, False).any()  # no record
    assert len(spaces.spare) == SPARES - 1
    taken = [spaces.of(1, True) for _ in range(SPARES)]
    assert spaces.spare == []
    assert len({t.data_ptr() for t in [*found, *taken]}) == 3 + SPARES
    spaces.of(1, False)  # as before a capture: there are some again
    assert len(spaces.spare) == SPARES


def test_capture_id_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "_capture_info", lambda: None)
    assert workspace.capture_id(0) is None

    def query(stream: Any, status: Any, number: Any, *rest: Any) -> int:
        status._obj.value, number._obj.value = int(stream.value == 5), 99
        return 0

    monkeypatch.setattr(workspace, "_capture_info", lambda: query)
    assert workspace.capture_id(5) == 99
    assert workspace.capture_id(6) is None


def test_the_gemm_path_is_the_last() -> None:
    *kernels, last = IMPLEMENTATIONS["hc_mix"]
    assert [*(k.name for k in kernels), last.name] == [ONE, TWO, "gemm"]
    assert gemm_mix.hc_mix in vars(last).values()
