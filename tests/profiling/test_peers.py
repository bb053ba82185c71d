"""Peers: how they are found, and that each one's arguments and results are mapped to the contract."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bindings import reference
from profiling import cases, peers
from profiling.peers import (
    flashinfer_gdn,
    sglang_gdn,
    sglang_hc,
    sglang_mix,
    torch_collectives,
    torch_compiled,
    torch_eager,
)

CPU = torch.device("cpu")
EAGER = {peer.op: peer for peer in torch_eager.peers()}


def modules(monkeypatch: pytest.MonkeyPatch, path: str, **functions: Any) -> None:
    """Makes `path` importable, with these functions."""
    parts = path.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        if end == len(parts) or name not in sys.modules:
            module = types.ModuleType(name)
            module.__path__ = []  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, name, module)
    for name, function in functions.items():
        setattr(sys.modules[path], name, function)


def test_plugins_are_the_modules_of_the_package() -> None:
    assert [name.rsplit(".", 1)[1] for name in peers.plugins()] == [
        "flashinfer_gdn",
        "sglang_gdn",
        "sglang_hc",
        "sglang_mix",
        "torch_collectives",
        "torch_compiled",
        "torch_eager",
    ]


def test_absent_packages_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("sglang", "flashinfer", "triton"):
        monkeypatch.setitem(sys.modules, package, None)
    found = peers.discover()
    absent = {
        "sglang": (sglang_hc, sglang_gdn, sglang_mix),
        "flashinfer": (flashinfer_gdn,),
        "triton": (torch_compiled,),
        "torchrun": (torch_collectives,),
    }
    assert set(found.missing) == {module.PACKAGE for modules in absent.values() for module in modules}
    for name, named in absent.items():
        assert all(name in found.missing[module.PACKAGE] for module in named)
    assert {peer.name for peer in found.peers} == {"torch eager"}
    assert [peer.op for peer in found.of("hc_mix")] == ["hc_mix"]


def test_a_package_that_breaks_on_import_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[peers.Peer]:
        raise RuntimeError("no driver")

    monkeypatch.setattr(sglang_hc, "peers", broken)
    found = peers.discover(["profiling.peers.sglang_hc", "profiling.peers.torch_eager"])
    assert found.missing == {sglang_hc.PACKAGE: "RuntimeError: no driver"}
    assert len(found.peers) == len(EAGER)


def test_torch_has_every_piece() -> None:
    assert set(EAGER) == set(cases.CASES)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("op", list(cases.CASES))
def test_torch_eager_computes_the_contract(op: str, rows: int) -> None:
    case = cases.make(op, rows, CPU)
    peer = EAGER[op]
    call = peer.prepare(case)
    case.poison(call())
    check = case.check(call(), peer.allowance)
    assert check.ok, check.detail


def test_torch_eager_drops_slots() -> None:
    case = cases.make("moe_finalize", 2, CPU)
    case.args["permuted_idx"][3] = -1
    case.args["permuted_idx"][12] = case.args["expert_out"].shape[0]
    assert case.check(EAGER["moe_finalize"].prepare(case)(), 4.0).ok


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[Any, ...]]]:
    """Stand-ins with the published functions' names and arguments; what they were called with."""
    calls: dict[str, list[tuple[Any, ...]]] = {}

    def record(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls.setdefault(function.__name__, []).append(args)
            return function(*args)

        return call

    @record
    def hc_combine_gate(normed: Tensor, weight: Tensor) -> Tensor:
        # splits of interleaved vectors, as published: other partial sums, the same total
        vectors = normed.float().unflatten(1, (5, 8, 256)).transpose(1, 2).flatten(2)
        weights = weight.float().unflatten(1, (5, 8, 256)).transpose(1, 2).flatten(2)
        return torch.einsum("tsk,csk->tsc", vectors, weights)

    @record
    def hc_combine_apply(block: Tensor, residual: Tensor, partials: Tensor) -> Tensor:
        return reference.hc_apply(block, residual, partials)

    @record
    def hc_combine_apply_norm(
        block: Tensor, residual: Tensor, partials: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return reference.hc_apply_norm(block, residual, partials, weight, eps)

    @record
    def hc_combine_split(
        block: Tensor,
        residual: Tensor,
        normed: Tensor,
        weight: Tensor,
        hc_count: int,
        hidden: int,
        out: Tensor | None = None,
    ) -> Tensor:
        assert (hc_count, hidden) == (4, 2560)
        assert out is not None
        return out.copy_(reference.hc_apply(block, residual, reference.hc_gate(normed, weight)))

    @record
    def grouped_gemma_rmsnorm(
        x: Tensor, weight: Tensor, group_size: int, eps: float = 1e-6, out: Tensor | None = None
    ) -> Tensor:
        assert out is not None
        return out.copy_(reference.grouped_gemma_rmsnorm(x, weight, eps, group_size))

    @record
    def fused_hc_mix(normed: Tensor, down: Tensor, up: Tensor, hc: int, hs: int) -> Tensor:
        assert (hc, hs) == (4, 2560)
        return reference.hc_mix(normed, down, up, hc)

    ops = "sglang.kernels.ops"
    modules(
        monkeypatch,
        f"{ops}.elementwise.hc_combine_decode",
        hc_combine_gate=hc_combine_gate,
        hc_combine_apply=hc_combine_apply,
        hc_combine_apply_norm=hc_combine_apply_norm,
    )
    modules(monkeypatch, f"{ops}.elementwise.hc_combine", hc_combine_split=hc_combine_split)
    modules(
        monkeypatch,
        f"{ops}.layernorm.grouped_gemma_rmsnorm",
        grouped_gemma_rmsnorm=grouped_gemma_rmsnorm,
    )
    modules(monkeypatch, f"{ops}.gemm.hc_mix", fused_hc_mix=fused_hc_mix)
    return calls


def test_sglang_hyper_connections(sglang: dict[str, list[tuple[Any, ...]]]) -> None:
    published = [*sglang_hc.peers(), *sglang_mix.peers()]
    assert {peer.op for peer in published} == set(cases.CASES) - {
        "shared_gate",
        "moe_finalize",
        "gdn_packed_decode",
    }
    for peer in published:
        case = cases.make(peer.op, 2, CPU)
        call = peer.prepare(case)
        case.poison(call())
        check = case.check(call(), peer.allowance)
        assert check.ok, f"{peer.name}: {check.detail}"
    assert set(sglang) == {
        "hc_combine_gate",
        "hc_combine_apply",
        "hc_combine_apply_norm",
        "hc_combine_split",
        "grouped_gemma_rmsnorm",
        "fused_hc_mix",
    }


@pytest.mark.usefixtures("sglang")
@pytest.mark.parametrize(
    ("name", "rows", "taken"),
    [
        ("sglang hc_combine_apply_norm", 4, True),
        ("sglang hc_combine_apply_norm", 5, False),
        ("sglang gate + apply_norm", 5, False),
        ("sglang hc_combine_split + norm", 5, True),
        ("sglang Triton hc_mix", 16, True),
        ("sglang Triton hc_mix", 17, False),
    ],
)
def test_sglang_limits(name: str, rows: int, taken: bool) -> None:
    peer = next(peer for peer in (*sglang_hc.peers(), *sglang_mix.peers()) if peer.name == name)
    reason = peer.refuses(cases.make(peer.op, rows, CPU))
    assert (reason is None) == taken


class FakeTriton:
    """A kernel that takes the published one's keyword arguments and does its work from their meaning."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []
        self.launched: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.grids.append(grid)
        return self.launch

    def launch(self, **given: Any) -> None:
        self.launched.append(given)
        qkv, state, index = given["mixed_qkv"], given["h0"], given["ssm_state_indices"].long()
        assert given["ht"] is state
        H, HV, D = given["H"], given["HV"], given["K"]
        q, k, v = (part.reshape(len(qkv), -1, D) for part in qkv.float().split([H * D, H * D, HV * D], dim=1))
        beta = torch.sigmoid(given["b"].float()).to(given["b"].dtype).float()
        decay = reference.gdn_decay(given["a"], given["A_log"], given["dt_bias"])
        out, new = reference.gdn_step(q, k, v, decay, beta, state[index], given["scale"])
        given["o"].copy_(out.unsqueeze(1))
        state[index] = new


@pytest.fixture
def triton_kernel(monkeypatch: pytest.MonkeyPatch) -> FakeTriton:
    kernel = FakeTriton()
    modules(
        monkeypatch,
        "sglang.kernels.ops.attention.fla.fused_recurrent",
        fused_recurrent_gated_delta_rule_packed_decode_kernel=kernel,
    )
    return kernel


def test_sglang_gdn(triton_kernel: FakeTriton) -> None:
    case = cases.make("gdn_packed_decode", 3, CPU)
    for peer, tile in zip(sglang_gdn.peers(), sglang_gdn.TILES, strict=True):
        assert peer.name == f"sglang Triton GDN, tile {tile}"
        call = peer.prepare(case)
        case.poison(call())
        results = call()
        assert peer.exact is not None
        check = case.check(results, peer.allowance, peer.exact(case))
        assert check.ok, check.detail
        assert triton_kernel.grids[-1] == (128 // tile, 3 * 12)
        given = triton_kernel.launched[-1]
        assert (given["BV"], given["BK"], given["V"], given["H"]) == (tile, 128, 128, 4)
        assert given["stride_init_state_token"] == 12 * 128 * 128
        assert (given["stride_mixed_qkv_tok"], given["stride_a_tok"]) == (2560, 12)


@pytest.mark.usefixtures("triton_kernel")
def test_sglang_gdn_is_judged_by_its_own_beta() -> None:
    """Its rounded sigmoid(b) is outside the contract's tolerance, and within that of its own definition."""
    case = cases.make("gdn_packed_decode", 3, CPU)
    peer = sglang_gdn.peers()[0]
    call = peer.prepare(case)
    case.poison(call())
    assert not case.check(call()).ok


@pytest.mark.parametrize("op", list(cases.CASES))
def test_torch_compiled_computes_the_contract(op: str) -> None:
    """Traced whole, and run by the tracer's own backend: a compiler for the CPU need not be here."""
    case = cases.make(op, 2, CPU)
    peer = next(peer for peer in torch_compiled.peers(backend="eager") if peer.op == op)
    call = peer.prepare(case)
    case.poison(call())
    check = case.check(call(), peer.allowance)
    assert check.ok, check.detail
    assert peer.name == "torch.compile"


def test_flashinfer_gdn(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[dict[str, Any]] = []

    def gated_delta_rule_decode_pretranspose(**given: Any) -> tuple[Tensor, Tensor]:
        called.append(given)
        pool, index = given["initial_state"], given["initial_state_indices"].long()
        q, k, v, a, b = (given[name].squeeze(1) for name in ("q", "k", "v", "a", "b"))
        decay = reference.gdn_decay(a, given["A_log"], given["dt_bias"])
        q, k, v = q.float(), k.float(), v.float()
        out, new = reference.gdn_step(q, k, v, decay, torch.sigmoid(b.float()), pool[index], given["scale"])
        given["output"].copy_(out.unsqueeze(1))
        pool[index] = new
        return given["output"], pool

    modules(
        monkeypatch,
        "flashinfer.gdn_decode",
        gated_delta_rule_decode_pretranspose=gated_delta_rule_decode_pretranspose,
    )
    case = cases.make("gdn_packed_decode", 3, CPU)
    (peer,) = flashinfer_gdn.peers()
    assert peer.refuses(case) is None
    call = peer.prepare(case)
    case.poison(call())
    check = case.check(call(), peer.allowance)
    assert check.ok, check.detail
    given = called[-1]
    assert given["state"] is None
    assert given["use_qk_l2norm"] is True
    assert [tuple(given[n].shape) for n in ("q", "k", "v")] == [
        (3, 1, 4, 128),
        (3, 1, 4, 128),
        (3, 1, 12, 128),
    ]
    assert tuple(given["a"].shape) == (3, 1, 12)


def test_flashinfer_refuses_other_heads() -> None:
    case = cases.make("gdn_packed_decode", 1, CPU)
    case.args["state"] = case.args["state"][..., :64]
    assert flashinfer_gdn.refuses(case) == "takes a head dimension of 128, not 64"
    case.args["state"] = torch.zeros(1, 12, 128, 128, dtype=torch.float16)
    assert flashinfer_gdn.refuses(case) == "takes no torch.float16 state"


class TestCollectives:
    """The mapping of torch's all-reduces, in a world whose other rank holds the same row."""

    @pytest.fixture
    def world(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        used: list[str] = []
        group = types.SimpleNamespace(group_name="0")
        distributed = torch_collectives.distributed

        def all_reduce(tensor: Tensor) -> None:
            used.append("nccl")
            tensor.mul_(2)

        def kernel(name: str) -> Callable[[Tensor, str, str], Tensor]:
            def reduce(tensor: Tensor, op: str, group_name: str) -> Tensor:
                assert (op, group_name) == ("sum", "0")
                used.append(name)
                return tensor.mul_(2) if name.endswith("_") else tensor * 2

            return reduce

        monkeypatch.setattr(distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
        monkeypatch.setattr(distributed, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
        monkeypatch.setattr(distributed, "group", types.SimpleNamespace(WORLD=group))
        monkeypatch.setattr(distributed, "all_reduce", all_reduce)
        names = ("one_shot_all_reduce", "two_shot_all_reduce_")
        monkeypatch.setattr(torch.ops, "symm_mem", types.SimpleNamespace(**{n: kernel(n) for n in names}))
        memory = types.ModuleType("torch.distributed._symmetric_memory")
        memory.empty = torch.empty  # type: ignore[attr-defined]
        memory.rendezvous = lambda tensor, name: used.append(f"rendezvous {name}")  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "torch.distributed._symmetric_memory", memory)
        monkeypatch.setattr(distributed, "_symmetric_memory", memory, raising=False)
        return used

    def test_each_adds_up_what_is_in_its_memory(self, world: list[str]) -> None:
        x = torch.randn(2, 2560, generator=torch.Generator().manual_seed(3)).bfloat16()
        for reducer in torch_collectives.reducers():
            held, call = reducer.take(x)
            for _ in range(2):
                held.copy_(x)
                assert torch.equal(call(), 2 * x)
                assert torch.equal(held, 2 * x if reducer.in_place else x)
        assert set(world) == {"nccl", "rendezvous 0", "one_shot_all_reduce", "two_shot_all_reduce_"}

    @pytest.mark.usefixtures("world")
    def test_they_are_found(self) -> None:
        found = peers.discover(["profiling.peers.torch_collectives"])
        assert (found.peers, found.missing) == ((), {})
        assert [reducer.name for reducer in found.reducers] == [
            "NCCL all_reduce",
            "torch one_shot_all_reduce",
            "torch two_shot_all_reduce",
        ]

    @pytest.mark.usefixtures("world")
    def test_one_shot_is_for_small_rows(self) -> None:
        assert torch_collectives.small(torch.zeros(2, 2560, dtype=torch.bfloat16)) is None
        large = torch.zeros(256, 2560, dtype=torch.bfloat16)
        assert torch_collectives.small(large) == "takes at most 524288 bytes"

    @pytest.mark.usefixtures("world")
    @pytest.mark.parametrize(
        ("name", "value", "reason"),
        [
            ("is_initialized", False, "torchrun"),
            ("get_world_size", 1, "one rank"),
            ("get_backend_config", "cpu:gloo", "backend is cpu:gloo"),
        ],
    )
    def test_refuses_without_ranks(
        self, monkeypatch: pytest.MonkeyPatch, name: str, value: object, reason: str
    ) -> None:
        monkeypatch.setattr(torch_collectives.distributed, name, lambda: value)
        with pytest.raises(RuntimeError, match=reason):
            torch_collectives.reducers()
