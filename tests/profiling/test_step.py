"""The decode step on the CPU, small: its frame, its arms against each other, its counts; and its command
line."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import bindings
from bindings import ops
from profiling import decode_step, peers, protocol, world
from profiling.observe import watch
from profiling.step import arms, compare, families, frame
from profiling.step.families import Span
from profiling.step.model import Shape, StepModel

CPU = torch.device("cpu")
TINY = bindings.ModelConfig(hidden=256, low_rank=32, key_heads=2, value_heads=4, head_dim=64)
SMALL = Shape(layers=4, experts=16, context=40, expert_width=32, attention_dim=64, rotary=16, model=TINY)


@pytest.fixture(autouse=True)
def reference() -> Iterator[None]:
    with torch.inference_mode(), bindings.backend("reference"):
        yield


@pytest.fixture(scope="module")
def model() -> StepModel:
    return StepModel(SMALL, CPU)


@pytest.fixture(scope="module")
def found() -> peers.Found:
    return peers.discover(["profiling.peers.torch_eager"])


def unfused(found: peers.Found, comm: arms.Alone | None = None) -> arms.Unfused:
    return arms.Unfused(comm or arms.Alone(), found, SMALL.model)


class Doubling(arms.Alone):
    """An all-reduce over two ranks with the same part, as loopback has."""

    added = 2

    def all_reduce(self, x: Tensor) -> Tensor:
        return x * 2


# The frame


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * scale).bfloat16()


def test_convolution() -> None:
    x, state, weight = normal(1, 8), normal(3, 8), normal(4, 8)
    taps = torch.cat([state, x])
    expected = functional.conv1d(taps.t()[None].float(), weight.t()[:, None].float(), groups=8)
    got = frame.conv_update(x, state, weight)
    assert torch.equal(got, functional.silu(expected).view(1, 8).bfloat16())
    assert torch.equal(state, taps[1:])


def test_gated_norm() -> None:
    x, z, weight = normal(1, 16), normal(1, 16), normal(8)
    heads = x.float().view(2, 8)
    normed = heads / (heads.square().mean(1, keepdim=True) + 1e-6).sqrt() * weight.float()
    expected = (normed.flatten() * functional.silu(z.float()).flatten()).bfloat16()
    torch.testing.assert_close(frame.gated_norm(x, z, weight)[0], expected)


def test_router() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    ids, weights = frame.route(logits, 2)
    assert ids.tolist() == [1, 3, 4], "the last is the shared expert"
    torch.testing.assert_close(weights, torch.softmax(torch.tensor([[3.0, 2.0]]), 1))


def test_experts() -> None:
    x, up, down = normal(1, 8), normal(3, 8, 8), normal(3, 8, 4)
    got = frame.experts(x, torch.tensor([2, 0], dtype=torch.int32), up, down)
    for row, expert in zip(got, (2, 0), strict=True):
        gate, value = (up[expert].float() @ x[0].float()).chunk(2)
        inner = (functional.silu(gate) * value).bfloat16().float()
        torch.testing.assert_close(row, (down[expert].float() @ inner).bfloat16())


def test_attention() -> None:
    heads, dim, length = 2, 8, 5
    row, ones = normal(1, (2 * heads + 2) * dim), torch.ones(dim)
    keys, values = normal(length, dim), normal(length, dim)
    before = keys.clone()
    still = torch.zeros(2)  # turned by nothing
    got = frame.attend(row, ones, ones, still, keys, values, length - 1)
    q, gate, k, v = row[0].split([heads * dim, heads * dim, dim, dim])

    def unit(t: Tensor) -> Tensor:
        return (t.float() / (t.float().square().mean(-1, keepdim=True) + 1e-6).sqrt()).bfloat16()

    assert torch.equal(keys[:-1], before[:-1])
    torch.testing.assert_close(keys[-1], unit(k))
    assert torch.equal(values[-1], v)
    query = unit(q.view(heads, dim)).float()
    attended = functional.scaled_dot_product_attention(query[:, None], keys.float(), values.float())[:, 0]
    expected = (attended * torch.sigmoid(gate.float().view(heads, dim))).view(1, -1).bfloat16()
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)


def test_rotation_keeps_length_and_depends_on_the_angle() -> None:
    x, ones = normal(3, 8), torch.ones(8)
    still, turned = (frame._turned(x, ones, torch.full((2,), a)).float() for a in (0.0, 1.0))
    torch.testing.assert_close(turned.norm(dim=1), still.norm(dim=1), rtol=1e-2, atol=1e-2)
    assert torch.equal(turned[:, 4:], still[:, 4:])
    assert not torch.allclose(turned[:, :4], still[:, :4], atol=0.1)


# The arms


def test_the_arms_agree(model: StepModel, found: peers.Found) -> None:
    ticks: list[None] = []
    before = [t.clone() for t in model.state.tensors()]
    difference = compare.compare(model, unfused(found), arms.Fused(arms.Alone()), lambda: ticks.append(None))
    assert difference.failures == []
    assert difference.layer < 0.02
    assert len(ticks) == 2 * SMALL.layers
    assert all(torch.equal(a, b) for a, b in zip(before, model.state.tensors(), strict=True))


def test_the_gate_may_be_part_of_the_boundary(model: StepModel) -> None:
    one, other = (model.step(arms.Fused(arms.Alone(), gate), model.state.clone()) for gate in arms.GATES)
    assert torch.equal(one, other)


def test_all_reduces_are_part_of_both_arms(found: peers.Found) -> None:
    model = StepModel(SMALL, CPU, added=2)
    difference = compare.compare(model, unfused(found, Doubling()), Reducing(Doubling()))
    assert difference.failures == []


class Reducing(arms.Fused):
    """A fused tail that is not fused, for want of a device."""

    def tail(self, *args: Tensor) -> Tensor:
        return self.comm.all_reduce(super().tail(*args))


class WrongGate(arms.Fused):
    def tail(self, x: Tensor, *args: Tensor) -> Tensor:
        *rest, gate_weight = args
        return super().tail(x, *rest, gate_weight * 1.5)


class WrongDecay(arms.Fused):
    def gdn(self, *args: Any) -> Tensor:
        out = super().gdn(*args)
        args[4].mul_(1.05)
        return out


class WrongEmbedding(arms.Fused):
    def final(self, *args: Any) -> Tensor:
        return super().final(*args) * 1.3


@pytest.mark.parametrize(
    ("wrong", "where"), [(WrongGate, "layer"), (WrongDecay, "recurrent states"), (WrongEmbedding, "step")]
)
def test_an_arm_that_is_wrong_is_found(
    model: StepModel, found: peers.Found, wrong: type[arms.Fused], where: str
) -> None:
    failures = compare.compare(model, unfused(found), wrong(arms.Alone())).failures
    assert any(failure.startswith(where) for failure in failures)


def test_nan_is_a_difference() -> None:
    nan = float("nan")
    assert len(compare.Difference(nan, 0, nan, nan, 0).failures) == 3


@pytest.mark.parametrize("gate", arms.GATES)
@pytest.mark.parametrize("layers", [1, 2, 5])
def test_operators_of_a_step(layers: int, gate: str) -> None:
    model = StepModel(replace(SMALL, layers=layers), CPU)
    with watch() as seen:
        model.step(arms.Fused(arms.Alone(), gate), model.state.clone())
    expected = model.expected()
    assert seen.counts["hc_apply_norm"] + seen.counts["hc_boundary"] == expected["boundary"]
    assert (seen.counts["hc_boundary"] > 0) == (gate == "boundary")
    assert seen.counts["moe_finalize"] == expected["tail"] == layers
    assert seen.counts["gdn_packed_decode"] == expected["gdn"]
    assert seen.counts["hc_apply"] == int(layers > 1), "the embedding keeps one write apart"


def test_the_whole_step_has_the_launches_of_the_model() -> None:
    whole = Shape()
    assert (whole.layers, whole.experts, whole.context, whole.gdn_layers) == (48, 512, 8192, 36)
    assert 60e9 < whole.bytes < 70e9
    expected = StepModel.expected(type("Model", (), {"shape": whole})())  # type: ignore[arg-type]
    assert expected == {"boundary": 95, "tail": 48, "gdn": 36}


def test_the_unfused_arm_says_what_serves_it(found: peers.Found) -> None:
    told = unfused(found).describe()
    assert told["hc_mix"] == "torch eager", "nothing published is here"
    assert "moe_finalize without shared" in told["tail"]
    offered = peers.Found((*found.peers, peers.Peer("sglang Triton hc_mix", "hc_mix", lambda case: dict)), {})
    assert unfused(offered).describe()["hc_mix"] == "sglang Triton hc_mix"


def test_the_same_seed_gives_the_same_step() -> None:
    first, second = (StepModel(replace(SMALL, layers=1), CPU, seed=3) for _ in range(2))
    arm = arms.Fused(arms.Alone())
    assert torch.equal(first.step(arm, first.state), second.step(arm, second.state))


# Kernels of a replay


def test_families() -> None:
    for name, expected in {
        "kernel_cutlass_HcMix_object_at__": "HC mix",
        "_hc_mix_persistent_kernel": "HC mix",
        "kernel_cutlass_HcGate_object_at__": "HC gate",
        "kernel_cutlass_HcApplyNorm_object_at__": "HC boundary",
        "kernel_cutlass_HcBoundary_object_at__": "HC boundary",
        "kernel_cutlass_FinalizeAllReduce_object_at__": "expert tail, all-reduce",
        "fused_recurrent_gated_delta_rule_packed_decode_kernel": "GDN",
        "step_expert_up": "experts",
        "step_attend_join": "attention",
        "nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT": "projections",
        "void at::native::vectorized_elementwise_kernel<4>": "elementwise, copies",
    }.items():
        assert families.family(name) == expected, name


SPANS = [
    Span("step_expert_up", 0.0, 4.0),
    Span("HcGate_object", 3.0, 5.0),
    Span("step_expert_down", 6.0, 7.5),
    Span("a copy", 6.5, 7.0),
]


@pytest.mark.parametrize(
    ("name", "before"),
    [
        ("Memset (Device)", True),
        ("kernel_cutlass_kernel_profilinglink_kernelsLineUp_object_at__0", True),
        ("spin_kernel(long)", True),
        ("kernel_cutlass_kernel_HcMix_object_at__0", False),
    ],
)
def test_what_stands_before_a_step_is_no_part_of_it(name: str, before: bool) -> None:
    assert families._before(name) is before


def test_table_by_family() -> None:
    rows = {row["family"]: row for row in families.table(SPANS)}
    assert rows["experts"] == {"family": "experts", "launches": 2, "us": 5.5, "alone_us": 4.0}
    assert rows["HC gate"] == {"family": "HC gate", "launches": 1, "us": 2.0, "alone_us": 1.0}
    assert rows[families.OTHER]["alone_us"] == 0.0
    assert next(iter(rows)) == "experts"
    assert families.idle(SPANS) == 1.0
    assert families.idle(SPANS[::-1]) == 1.0


def test_counting_launches() -> None:
    fused = ["HcApplyNorm_object"] * 3 + ["HcBoundary_object", "GdnPackedDecode_object"]
    fused += ["FinalizeAllReduce_object_at__plain"] * 2 + ["FinalizeAllReduce_object_at__experts"] * 2
    plain = ["FinalizeAllReduce_object_at__plain"] * 4
    comm = arms.Communicator(None, "", 4)
    assert decode_step.counts(fused, plain, comm) == {"boundary": 4, "tail": 2, "gdn": 1}
    assert decode_step.counts([*fused, "MoeFinalize_object"], plain, arms.Alone())["tail"] == 1  # type: ignore[index]
    assert decode_step.counts(None, plain, comm) is None


# The command line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "0"], "--layers: got 0, allowed 1 to 192"),
        (["--experts", "9"], "--experts: got 9, allowed 10 to"),
        (["--experts", "24"], "--experts: got 24, allowed powers of two"),
        (["--context", "0"], "--context: got 0"),
        (["--samples", "0"], "samples: got 0"),
        (["--gate", "off"], "--gate"),
        (["--json", "/no/such/folder/f.json"], "--json: /no/such/folder/f.json: No such file"),
    ],
)
def test_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        decode_step.parse(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_no_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert decode_step.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_more_ranks_than_devices(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert decode_step.main([]) == 2
    assert "4 ranks need a GPU each, 1 here" in capsys.readouterr().err


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A step on the CPU as if it were the GPU: graphs are calls, times are told by what a graph launches."""
    told: dict[str, Any] = {"free": 200e9, "kernels": {}, "us": {}}
    names = iter((decode_step.FUSED, decode_step.AGAIN, decode_step.UNFUSED))

    class Graph:
        def __init__(self, call: Any) -> None:
            self.name, self.call = next(names), call
            self.result = call()
            self.kernels = told["kernels"].get(self.name)

        def replay(self) -> None:
            self.result.copy_(self.call())

    class Device:
        flush_bytes = 512 << 20

    def cold(
        device: object, graphs: Any, settings: Any, prepare: Any, progress: Any
    ) -> dict[str, list[list[float]]]:
        return {name: [[told["us"][name]] * settings.samples] * settings.blocks for name in graphs}

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (told["free"], told["free"]))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: None)
    monkeypatch.setattr(torch, "device", lambda *args: CPU)
    monkeypatch.setattr(protocol, "capture", Graph)
    monkeypatch.setattr(protocol, "CudaDevice", Device)
    monkeypatch.setattr(protocol, "cold", cold)
    monkeypatch.setattr(peers, "discover", lambda: peers.Found(tuple(TORCH), {"sglang": "is not here"}))
    monkeypatch.setattr(decode_step, "communicator", lambda device, shape: arms.Alone())
    monkeypatch.setattr(families, "trace", lambda replay: (replay(), SPANS)[1])
    told["us"] = {"fused": 1000.0, "fused, again": 1010.0, "unfused": 1200.0}
    fused = Counter({"HcApplyNorm_object": 3, "MoeFinalize_object": 2, "GdnPackedDecode_object": 2})
    told["kernels"] = {name: list(fused.elements()) for name in ("fused", "fused, again", "unfused")}
    return told


TORCH = peers.discover(["profiling.peers.torch_eager"]).peers


def run(tmp_path: Path, *arguments: str, group: world.World | None = None) -> tuple[int, dict[str, Any]]:
    path = tmp_path / "step.json"
    size = ("--layers", "2", "--experts", "16", "--context", "40", "--blocks", "2", "--samples", "3")
    code = decode_step.run(decode_step.parse([*size, *arguments, "--json", str(path)]), group)
    return code, json.loads(path.read_text()) if path.exists() else {}


def test_record(device: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, record = run(tmp_path)
    assert code == 0, capsys.readouterr().out
    assert record["kind"] == "decode_step"
    assert record["ratio"]["median"] == pytest.approx(1.2)
    assert record["noise"] == pytest.approx(1 - 1000 / 1010)
    assert record["launches"]["got"] == record["launches"]["expected"] == {"boundary": 3, "tail": 2, "gdn": 2}
    assert record["arms"]["unfused"]["cold"]["samples"] == [[1200.0] * 3] * 2
    assert record["arms"]["fused"]["kernels"] == 7
    assert record["shape"] == {
        "layers": 2,
        "gdn_layers": 2,
        "experts": 16,
        "context": 40,
        "seed": 0,
        "gate": arms.GATES[0],
        "ranks": 1,
    }
    trace = record["arms"]["fused"]["trace"]
    assert (trace["us"], trace["idle_us"]) == (7.5, 1.0)
    assert record["served_by"]["unfused"]["hc_mix"] == "torch eager"
    said = capsys.readouterr().out
    assert "fused is 1.200 times as fast" in said
    assert "experts" in said


def test_a_missing_launch_fails(
    device: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device["kernels"]["fused"].remove("GdnPackedDecode_object")
    code, record = run(tmp_path)
    assert code == 1
    assert "launches: got {'boundary': 3, 'tail': 2, 'gdn': 1}" in record["failures"][0]
    assert "FAILED launches" in capsys.readouterr().out


def test_kernels_that_are_not_told_fail(device: dict[str, Any], tmp_path: Path) -> None:
    device["kernels"] = {}
    assert run(tmp_path)[1]["failures"] == ["launches: the driver does not tell the graph's kernels"]


def test_a_whole_step_is_held_to_the_target(
    device: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("layers", 2), ("experts", 16), ("context", 40)):
        monkeypatch.setattr(Shape, name, value)
    assert run(tmp_path)[1]["target"] == 1.15


@pytest.mark.parametrize(("unfused_us", "code"), [(1149.0, 1), (1151.0, 0)])
def test_the_target(
    device: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unfused_us: float, code: int
) -> None:
    for name, value in (("layers", 2), ("experts", 16), ("context", 40)):
        monkeypatch.setattr(Shape, name, value)
    device["us"]["unfused"] = unfused_us
    assert run(tmp_path)[0] == code


def test_a_small_step_is_not(device: dict[str, Any], tmp_path: Path) -> None:
    device["us"]["unfused"] = 900.0
    code, record = run(tmp_path)
    assert (code, record["target"]) == (0, None)


def test_memory_is_asked_for_first(
    device: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device["free"] = 1e9
    code, record = run(tmp_path)
    assert (code, record) == (2, {})
    assert "--layers or --experts shrink it" in capsys.readouterr().err


def among(rank: int, theirs: Callable[[Any, str], Any], lined: list[int] | None = None) -> world.World:
    """A rank of two, the other of which brings what `theirs` makes of what this one brings."""
    lined = [] if lined is None else lined

    def meet(value: Any, what: str) -> list[Any]:
        other = theirs(value, what)
        return [value, other] if rank == 0 else [other, value]

    return world.World(rank, 2, meet, protocol.CudaDevice(), lambda: lined.append(rank))


@pytest.mark.parametrize("rank", [0, 1])
def test_among_ranks_the_slowest_counts_and_the_first_writes(
    device: dict[str, Any], tmp_path: Path, rank: int
) -> None:
    def theirs(value: Any, what: str) -> Any:
        if what == "samples":
            return {name: [[us + 100 for us in block] for block in blocks] for name, blocks in value.items()}
        return ["a count is wrong"] if what == "failures" else value

    lined: list[int] = []
    code, record = run(tmp_path, group=among(rank, theirs, lined))
    assert lined == [rank] * 2, "before each traced replay"
    assert code == 1, "what fails on another rank fails here"
    assert bool(record) == (rank == 0)
    if record:
        assert record["arms"]["fused"]["cold"]["median"] == 1100.0
        assert record["by_rank"]["cold"]["unfused"] == [1200.0, 1300.0]
        assert record["failures"] == ["rank 1: a count is wrong"]


def test_one_rank_without_memory_stops_all(
    device: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, group=among(0, lambda value, what: "too little"))[0] == 2
    assert "rank 1: too little" in capsys.readouterr().err


def test_a_replay_that_differs_fails(
    device: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finalize = ops.moe_finalize
    monkeypatch.setattr(decode_step.Captured, "__init__", spoilt(decode_step.Captured.__init__))
    assert run(tmp_path)[1]["failures"] == ["fused: a replay differs from the eager step"]
    assert ops.moe_finalize is finalize


def spoilt(make: Any) -> Any:
    def init(self: Any, model: StepModel, arm: Any) -> None:
        make(self, model, arm)
        call = self.graph.call
        self.graph.call = lambda: call() + 1

    return init
