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
from profiling.peers import sglang_gdn, sglang_hc, sglang_mix, torch_eager

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
        "sglang_gdn",
        "sglang_hc",
        "sglang_mix",
        "torch_eager",
    ]


def test_absent_packages_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    found = peers.discover()
    assert set(found.missing) == {module.PACKAGE for module in (sglang_hc, sglang_gdn, sglang_mix)}
    assert all("sglang" in reason for reason in found.missing.values())
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
