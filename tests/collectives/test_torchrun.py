"""Four ranks, four processes: tests that torchrun runs in each of them, and tests that start torchrun.

    torchrun --nproc-per-node 4 -m pytest tests/collectives                 CPU: gloo, shared memory, host
    torchrun --nproc-per-node 4 -m pytest tests/collectives -m gpu          GPUs, shared if need be: CUDA IPC
    torchrun --nproc-per-node 4 -m pytest tests/collectives -m multi_gpu    a GPU a rank: CUDA IPC, NVSHMEM

Ranks run the same tests in the same order; what a test needs of the others it gathers over gloo.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bindings import ops
from collectives.communicator import Communicator
from collectives.errors import CollectiveTimeout, CommunicatorPoisoned, RendezvousTimeout, SymmetricMismatch
from collectives.transports import shm
from tests.collectives.conftest import UNDER_TORCHRUN, free_device_memory
from tests.collectives.processes import BF16, FP32, GPUS, HIDDEN, TOP_K, World, rank_sum
from tests.draw import Draw, finalize
from tests.golden import inputs as golden_inputs

ROOT = Path(__file__).resolve().parents[2]
ranked = pytest.mark.torchrun

CASES: dict[str, dict[str, Any]] = {
    "one-token": dict(T=1, weight_dtype=BF16),
    "one-token-fp32": dict(T=1, weight_dtype=FP32),
    "three-ungated": dict(T=3, weight_dtype=FP32, experts="ungated"),
    "three-ungated-bf16": dict(T=3, weight_dtype=BF16, experts="ungated"),
    "full-no-shared": dict(T=32, weight_dtype=FP32, experts="alone"),
    "full": dict(T=32, weight_dtype=FP32),
    "more-than-one-round": dict(T=37, weight_dtype=FP32),
    "no-tokens": dict(T=0, weight_dtype=FP32),
    "all-dropped": dict(T=3, weight_dtype=FP32, drop=1.0),
    "all-dropped-no-shared": dict(T=3, weight_dtype=FP32, experts="alone", drop=1.0),
    "norm": dict(T=1, weight_dtype=FP32, norm=True),
    "norm-full": dict(T=32, weight_dtype=FP32, norm=True),
}


@pytest.fixture(scope="module")
def comm(world: World) -> Iterator[Communicator]:
    with world.open("shared") as communicator:
        yield communicator


@ranked
def test_the_transport_is_chosen_and_explained(world: World, comm: Communicator) -> None:
    name = world.transport
    if name == "auto":
        name = "shm" if world.device == "cpu" else "cuda_ipc"
    assert f"transport {name} (asked for: {world.transport})" in comm.explain()
    assert (comm.rank, comm.world_size) == (world.rank, world.size)


@ranked
@pytest.mark.parametrize("case", CASES)
def test_fused_equals_unfused_on_every_rank(world: World, comm: Communicator, case: str) -> None:
    plan = dict(CASES[case])
    norm = plan.pop("norm", False)
    inputs = [finalize(Draw(f"{case} {rank}"), H=HIDDEN, K=TOP_K, **plan) for rank in range(world.size)]
    placed = [{name: world.put(value) for name, value in one.items()} for one in inputs]
    weight = world.put(Draw(case).uniform(HIDDEN, dtype=BF16)) if norm else None
    extra: dict[str, Any] = dict(norm_weight=weight, weight_offset=1.0, eps=1e-5) if norm else {}
    result = comm.moe_finalize_all_reduce(**placed[world.rank], **extra)
    world.settle(comm)
    local = [ops.moe_finalize(**one) for one in placed]
    if norm:  # the unfused sequence, which test_communicator holds to the contract
        expected = comm.all_reduce(local[world.rank], **extra)
        total = rank_sum(local).double()
        exact = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5) * (weight.double() + 1.0)
        torch.testing.assert_close(expected.double(), exact, rtol=2**-7, atol=1e-6)
    else:
        expected = rank_sum(local)
    world.settle(comm)
    world.same_everywhere(result, expected, case)


@ranked
@pytest.mark.parametrize("T", [1, 3])
def test_golden(world: World, comm: Communicator, T: int) -> None:
    if world.size != 4:
        pytest.skip(f"the golden data are of 4 ranks, these are {world.size}")
    golden = np.load(ROOT / "tests" / "golden" / "golden.npz")

    def bits(name: str) -> Tensor:
        return torch.from_numpy(golden[f"moe{T}.{name}"].view(np.int16)).view(BF16)

    total = comm.all_reduce(world.put(bits(f"rank{world.rank}.bits")))
    own = golden_inputs.moe(T, world.rank)
    fused = comm.moe_finalize_all_reduce(**{name: world.put(value) for name, value in own.items()})
    world.settle(comm)
    world.same_everywhere(total, bits("sum"), "golden sum of golden terms")
    world.same_everywhere(fused, bits("sum"), "golden sum of golden inputs")


SPECIAL = {
    "zeros": [0.0, 0.0],
    "negative-zeros": [-0.0, -0.0],
    "zeros-of-both-signs": [0.0, -0.0],
    "nan": [float("nan"), 1.0],
    "infinities": [float("inf"), 2.0],
    "infinities-that-cancel": [float("inf"), float("-inf")],
    "subnormals": [1e-40, -9.2e-41],
}


@ranked
@pytest.mark.parametrize("name", SPECIAL)
def test_special_values(world: World, comm: Communicator, name: str) -> None:
    """Even ranks hold the first value, odd ones the second, between ordinary numbers; a row holds nothing
    else."""

    def term(rank: int) -> Tensor:
        x = Draw(f"{name} {rank}").uniform(3, HIDDEN, dtype=BF16)
        x[:, ::3] = SPECIAL[name][rank % 2]
        x[1] = SPECIAL[name][rank % 2]
        return x

    terms = [term(rank) for rank in range(world.size)]
    result = comm.all_reduce(world.put(terms[world.rank]))
    world.settle(comm)
    world.same_everywhere(result, rank_sum(terms), name)
    if "zeros" in name:
        assert not result.cpu()[1].view(torch.int16).any()  # +0.0, whatever the terms' signs


@ranked
def test_a_thousand_rounds_with_skew(world: World, comm: Communicator) -> None:
    """Each rank dawdles at random, on the host and on the GPU; every result of every round is checked."""
    rounds, kinds = 1000, 16
    skew = random.Random(world.rank)
    terms = [
        [Draw(f"{i} {r}").uniform(1 + i % 3, HIDDEN, dtype=BF16) for r in range(world.size)]
        for i in range(kinds)
    ]
    own = [world.put(terms[i][world.rank]) for i in range(kinds)]
    expected = [world.put(rank_sum(terms[i])) for i in range(kinds)]
    wrong = torch.zeros((), dtype=torch.int64, device=world.device)
    for _ in range(rounds):
        i = _ % kinds
        if world.device == "cpu":
            if skew.random() < 0.1:
                time.sleep(skew.random() * 2e-3)
        elif skew.random() < 0.3:
            torch.cuda._sleep(skew.randrange(40_000))  # up to 20 us
        result = comm.all_reduce(own[i])
        wrong += (result.view(torch.int16) != expected[i].view(torch.int16)).sum()
    world.settle(comm)
    assert wrong.item() == 0


@ranked
@pytest.mark.parametrize("world", GPUS, indirect=True)
def test_captured_graphs_replay(world: World) -> None:
    """A graph of both operators on every rank: 1,000 replays with changed inputs, eager calls in between,
    and replays on another stream than the capture's."""
    with world.open("graph") as comm:
        inputs = [
            [
                finalize(Draw(f"graph {i} {r}"), 1, H=HIDDEN, K=TOP_K, weight_dtype=FP32)
                for r in range(world.size)
            ]
            for i in range(8)
        ]
        own = [{name: world.put(v) for name, v in one[world.rank].items()} for one in inputs]
        expected = []
        for one in inputs:
            once = rank_sum([ops.moe_finalize(**{n: world.put(v) for n, v in r.items()}) for r in one])
            expected.append((once, rank_sum([once] * world.size)))
        held = {name: value.clone() for name, value in own[0].items()}
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            a = comm.moe_finalize_all_reduce(**held)
            b = comm.all_reduce(a)
        wrong = torch.zeros((), dtype=torch.int64, device=world.device)
        other = torch.cuda.Stream()
        for n in range(1000):
            i = n % 8
            stream = other if n % 5 == 4 else torch.cuda.current_stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for name, value in own[i].items():
                    held[name].copy_(value)
                graph.replay()
                wrong += (a.view(torch.int16) != expected[i][0].view(torch.int16)).sum()
                wrong += (b.view(torch.int16) != expected[i][1].view(torch.int16)).sum()
            torch.cuda.current_stream().wait_stream(stream)
            if n % 7 == 0:
                eager = comm.moe_finalize_all_reduce(**own[i])
                wrong += (eager.view(torch.int16) != expected[i][0].view(torch.int16)).sum()
        world.settle(comm)
        assert wrong.item() == 0


@ranked
def test_both_operators_may_be_under_way_at_once(world: World, comm: Communicator) -> None:
    """Odd ranks call them in the other order: their buffers are separate. On the CPU a call returns when its
    round is over, so there the order has to be the same."""
    if world.device == "cpu":
        pytest.skip("on the CPU calls are synchronous")
    inputs = [finalize(Draw(f"both {r}"), 1, H=HIDDEN, K=TOP_K, weight_dtype=FP32) for r in range(world.size)]
    placed = [{name: world.put(value) for name, value in one.items()} for one in inputs]
    terms = [Draw(f"both x {r}").uniform(1, HIDDEN, dtype=BF16) for r in range(world.size)]
    x, other = world.put(terms[world.rank]), torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())

    def first() -> Tensor:
        return comm.moe_finalize_all_reduce(**placed[world.rank])

    def second() -> Tensor:
        with torch.cuda.stream(other):
            return comm.all_reduce(x)

    if world.rank % 2:
        total = second()
        fused = first()
    else:
        fused = first()
        total = second()
    world.settle(comm)
    world.same_everywhere(total, rank_sum(terms), "all_reduce")
    world.same_everywhere(fused, rank_sum([ops.moe_finalize(**one) for one in placed]), "fused")


@ranked
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (dict(hidden=1280), "hidden: rank 1 1280, the rest 2560"),
        (dict(max_tokens=8), "max_tokens: rank 1 8, the rest 32"),
        (dict(hidden=5120, max_tokens=16), "hidden: rank 1 5120, the rest 2560"),
        (dict(top_k=4), "top_k: rank 1 4, the rest 10"),
        (dict(transport="pigeon"), "requested: rank 1 'pigeon', the rest "),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_rank_that_asks_for_something_else(world: World, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(SymmetricMismatch) as caught:
        world.open("mismatch", forms=(), **(changed if world.rank == 1 else {}))
    told = world.gather((str(caught.value), caught.value.ranks))
    assert all(text == told[0][0] and said in text and ranks == [1] for text, ranks in told)


@ranked
def test_a_rank_that_failed_alone_meets_the_others_later(world: World) -> None:
    """By an argument, and by being too early: neither puts it out of step with the rest."""
    if world.rank == 1:
        with pytest.raises(ValueError, match="hidden: got 12"):
            world.open("alone", hidden=12)
    if world.rank == 0:
        with pytest.raises(RendezvousTimeout, match="process group"):
            world.open("alone", meeting_s=0.3)
    dist.barrier()
    x = [Draw(f"alone {rank}").uniform(1, HIDDEN, dtype=BF16) for rank in range(world.size)]
    for _ in range(2):
        with world.open("alone", forms=()) as comm:
            total = comm.all_reduce(world.put(x[world.rank]))
            world.settle(comm)
        world.same_everywhere(total, rank_sum(x), "after it")


@ranked
@pytest.mark.parametrize("means", ["store", "group"])
def test_a_rank_that_skips_a_round(world: World, means: str) -> None:
    """The others' waits expire and name it, calls are refused, and after a reset rounds are good."""
    if world.transport == "nvshmem":
        pytest.skip("NVSHMEM's set of processes is fixed: it has no reset")
    timeout_s, absent = 3.0 if world.device == "cpu" else 1.0, world.size - 1
    with world.open(f"skip by {means}", forms=(), timeout_s=timeout_s) as comm:
        x = [Draw(f"skip {r}").uniform(2, HIDDEN, dtype=BF16) for r in range(world.size)]
        own, expected = world.put(x[world.rank]), rank_sum(x)
        world.same_everywhere(comm.all_reduce(own), expected, "before")
        if world.rank != absent:
            start = time.monotonic()
            with pytest.raises(CollectiveTimeout) as caught:  # noqa: PT012 (a GPU says so later)
                comm.all_reduce(own)
                world.settle(comm)
            assert timeout_s * 0.9 < time.monotonic() - start < timeout_s + 8
            assert (caught.value.rank, caught.value.missing, caught.value.epoch) == (world.rank, [absent], 1)
            for call in (comm.check, lambda: comm.all_reduce(own)):
                with pytest.raises(CommunicatorPoisoned, match=rf"rank {absent} did not arrive in round 1"):
                    call()
        dist.barrier()
        comm.reset(None if means == "store" else dist.group.WORLD)
        for _ in range(100):
            result = comm.all_reduce(own)
        world.settle(comm)
        world.same_everywhere(result, expected, "after")


@ranked
def test_nothing_stays_behind(world: World) -> None:
    def held() -> tuple[object, ...]:
        gc.collect()  # what earlier tests' exceptions still hold
        maps = Path("/proc/self/maps").read_text().count("flashnext")
        mine = [p.name for p in shm.DIRECTORY.glob("flashnext-*") if f"-{os.getpid()}-" in p.name]
        if world.device != "cpu":
            torch.cuda.synchronize()
        dist.barrier()  # all are done with what they had
        free = 0 if world.device == "cpu" else free_device_memory()
        dist.barrier()
        return maps, mine, len(os.listdir("/proc/self/fd")), free

    def use() -> None:
        with world.open("leaks", forms=()) as comm:
            comm.all_reduce(world.put(torch.ones(1, HIDDEN, dtype=BF16)))
            world.settle(comm)

    use()
    before = held()
    for _ in range(3):
        use()
    assert held() == before


# --- under plain pytest: torchrun is started here


def torchrun(*arguments: str, environment: dict[str, str] | None = None, timeout_s: float = 170) -> str:
    """Runs four ranks; what they wrote. Fails with that if one fails or they do not end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command += arguments
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as agent:
        try:
            output, errors = agent.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            agent.terminate()  # which ends its ranks; killed, it would leave them behind
            output, errors = end(agent)
            errors += f"\nno end in {timeout_s:g} s"
    said = output + errors
    assert agent.returncode == 0, f"{said[:6000]}\n[...]\n{said[-6000:]}"
    return output


def end(agent: subprocess.Popen[str]) -> tuple[str, str]:
    """Ends torchrun's agent, whom it has asked to, and its ranks; what they wrote."""
    try:
        return agent.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        agent.kill()
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
        return agent.communicate(timeout=10)


TESTS = ("-m", "pytest", "tests/collectives", "-q", "-p", "no:cacheprovider")
TESTS += ("-o", "faulthandler_timeout=100", "-m")  # seconds of one test, then it says where it is


def passed_everywhere(output: str) -> None:
    counts = re.findall(r"(\d+) passed", output)  # four processes write into one stream
    assert len(counts) == 4, output[-4000:]
    assert len(set(counts)) == 1
    assert int(counts[0]) >= 20


@pytest.mark.skipif(UNDER_TORCHRUN, reason="starts torchrun itself")
class TestUnderTorchrun:
    @pytest.mark.cpu
    def test_cpu(self) -> None:
        passed_everywhere(torchrun(*TESTS, "cpu"))

    @pytest.mark.cpu
    def test_the_readme_example(self, tmp_path: Path) -> None:
        (example,) = re.findall(r"^```py\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
        script = tmp_path / "sum.py"
        script.write_text(example)
        output = torchrun(str(script), environment={"CUDA_VISIBLE_DEVICES": ""})
        assert output.count("transport shm (asked for: auto)") == 1
        assert output.count("10.0") == 1

    @pytest.mark.gpu
    def test_one_gpu(self) -> None:
        passed_everywhere(torchrun(*TESTS, "gpu"))

    @pytest.mark.gpu
    def test_one_gpu_with_mps(self, mps: Callable[[], dict[str, str]]) -> None:
        passed_everywhere(torchrun(*TESTS, "gpu", environment=mps()))
