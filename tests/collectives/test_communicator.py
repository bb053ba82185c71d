"""The communicator's surface: arguments are refused before anything happens, errors, life and death."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

from collectives import communicator, launch
from collectives.communicator import Communicator
from collectives.errors import CollectiveError, CollectiveTimeout
from collectives.launch import FORMS, Form, Plain
from cute_kernels.moe import config
from tests.collectives.virtual import PLACES, World, draw, moe_inputs, rank_sum, same_bits, world

GOOD = dict(hidden=2560, max_tokens=32, top_k=10)
place = pytest.mark.parametrize("place", PLACES)


@pytest.mark.parametrize(
    ("n", "change", "message"),
    [
        (3, {}, r"world size: got 3, allowed 2, 4, 8"),
        (1, {}, r"world size: got 1, allowed"),
        (2, {"hidden": 12}, r"hidden: got 12, allowed a multiple of 8 from 8 to 32768"),
        (2, {"hidden": 32776}, r"hidden: got 32776"),
        (2, {"hidden": True}, r"hidden: got True"),
        (2, {"hidden": 64.0}, r"hidden: got 64.0, allowed a multiple of 8 from 8 to 32768, an int$"),
        (2, {"max_tokens": 0}, r"max_tokens: got 0, allowed an integer from 1 to 32"),
        (2, {"max_tokens": 33}, r"max_tokens: got 33"),
        (2, {"top_k": 0}, r"top_k: got 0"),
        (2, {"top_k": 33}, r"top_k: got 33"),
        (2, {"timeout_s": 0}, r"timeout_s: got 0, allowed a number above 0"),
        (2, {"timeout_s": float("inf")}, r"timeout_s: got inf, allowed a finite number"),
        (2, {"timeout_s": "1"}, r"timeout_s: got '1', allowed a finite number, an int or a float$"),
        (2, {"timeout_s": 10**400}, r"timeout_s: got an integer of 1329 bits, allowed a finite number"),
        (2, {"timeout_s": 1e12}, r"timeout_s: got 1000000000000.0, allowed a number above 0, at most 1e\+09"),
        (2, {"hidden": 32768, "top_k": 28}, r"top_k: got 28, allowed at most 27 with hidden = 32768"),
        (2, {"forms": None}, r"forms: got None, allowed a sequence of Form"),
        (2, {"forms": ("gated",)}, r"forms: got \('gated',\), allowed a sequence of Form"),
        (2.0, {}, r"world size: got 2.0, allowed 2, 4, 8"),
    ],
)
def test_sizes_are_checked(n: int, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Communicator.local_world(n, "cpu", **{**GOOD, **change})


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("meta", "device: got meta, allowed cpu or cuda"),
        ("bogus", "device: got 'bogus', allowed cpu or cuda"),
        ("cuda:99", "device: got cuda:99, allowed one of this process's .* CUDA devices, or cpu"),
    ],
)
def test_other_devices_are_refused(device: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Communicator.local_world(2, device, **GOOD)


def test_the_cpu_has_no_index() -> None:
    comm = Communicator.local_world(2, "cpu:0", **GOOD)[0]
    assert comm.all_reduce(torch.empty(0, 2560).bfloat16()).shape == (0, 2560)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 2}, "rank: got 2, allowed an integer from 0 to 1"),
        ({"rank": "0"}, "rank: got '0'"),
        ({"world_size": 3}, "world size: got 3"),
        ({"hidden": 12}, "hidden: got 12"),
        ({"meeting_s": float("nan")}, "meeting_s: got nan, allowed a finite number"),
        ({"meeting_s": -1}, "meeting_s: got -1, allowed a number above 0"),
        ({"store": None}, "store: got None, allowed a torch.distributed.Store"),
        ({"store": "127.0.0.1"}, "store: got a str, allowed a torch.distributed.Store"),
        ({"device": "meta"}, "device: got meta"),
        ({"name": 3}, "name: got 3, allowed a printable string"),
        ({"name": "\ud800"}, r"name: got '\\ud800', allowed a printable string"),
    ],
)
def test_arguments_are_checked_before_ranks_meet(change: dict[str, Any], message: str) -> None:
    store = HashStore()
    given = {"store": store, "rank": 0, "world_size": 2, "meeting_s": 5.0, **GOOD, **change}
    with pytest.raises(ValueError, match=f"Communicator: {message}"):
        Communicator.from_store(**given)
    assert store.num_keys() == 0


def test_loopback_is_for_gpus() -> None:
    with pytest.raises(ValueError, match="device: got cpu, allowed a CUDA device"):
        Communicator.loopback(4, "cpu", **GOOD)


def shrunk(x: Tensor) -> Tensor:
    """A copy whose storage was cut under it."""
    copy = x.clone()
    copy.untyped_storage().resize_(16)
    return copy


def refused(call: Any, message: str, w: World) -> None:
    before = [w.rounds(rank, channel)[:3] for rank in range(2) for channel in ("plain", "moe")]
    with pytest.raises(ValueError, match=message):
        call()
    assert [w.rounds(rank, channel)[:3] for rank in range(2) for channel in ("plain", "moe")] == before
    assert w.full_words() == 0


@place
def test_arguments_of_the_plain_sum(place: str) -> None:
    w = world(2, place)
    comm, x = w.ranks[0], w.put([torch.ones(3, 2560).bfloat16()])[0]
    base = w.put([torch.ones(3 * 2560 + 8).bfloat16()])[0]
    for bad, message in (
        (None, r"all_reduce: x: got None, allowed a torch.Tensor"),
        (x[:, :8], r"x: got shape \(3, 8\), allowed \(T, H\) with H = 2560"),
        (x[0], r"x: got shape \(2560,\)"),
        (x.float(), r"x: got dtype torch.float32, allowed torch.bfloat16 or torch.float16"),
        (x.to("meta"), r"x: got device meta"),
        (x.expand(2, 3, 2560)[:, 0], r"x: got strides"),
        (base[1 : 1 + 2560].view(1, 2560), r"x: got an address 2 bytes past a multiple of 16"),
        (x.to_sparse(), r"x: got layout torch.sparse_coo, allowed a dense torch.Tensor"),
        (torch._neg_view(x), r"x: got a view that its memory does not hold"),
        (shrunk(x), r"x: got a storage of 16 bytes, allowed one that holds the tensor's 15360"),
    ):
        refused(lambda bad=bad: comm.all_reduce(bad), message, w)
    for out, message in (
        (x[:1].clone(), r"out: got shape \(1, 2560\), allowed \(3, 2560\)"),
        (x.half(), r"out: got dtype torch.float16, allowed torch.bfloat16"),
        (
            base[: 3 * 2560].view(3, 2560),
            r"out: got memory that overlaps x, allowed no overlap with x unless",
        ),
    ):
        source = base[8 : 8 + 3 * 2560].view(3, 2560) if "overlaps" in message else x
        refused(lambda out=out, source=source: comm.all_reduce(source, out=out), message, w)
    refused(lambda: comm.all_reduce(x, norm_weight=x), r"norm_weight: got shape", w)
    refused(lambda: comm.all_reduce(x, eps=[1.0]), r"eps: got \[1.0\], allowed a finite number", w)
    refused(lambda: comm.all_reduce(x, eps=torch.ones(())), r"eps: got a Tensor, allowed a finite number", w)
    refused(lambda: comm.all_reduce(x, eps=-1.0), r"eps: got -1.0, allowed a finite number of at least 0", w)


@place
def test_arguments_of_the_fused_sum(place: str) -> None:
    w = world(2, place)
    comm = w.ranks[0]
    good = w.put(moe_inputs(3, Form(), torch.Generator().manual_seed(0)))
    names = ("expert_out", "permuted_idx", "expert_weights", "shared_out", "shared_gate")
    for name, bad, message in (
        ("expert_out", good[0].half(), r"expert_out: got dtype torch.float16, allowed torch.bfloat16"),
        ("expert_out", good[0][:, :2552], r"expert_out: got shape \(60, 2552\)"),
        ("permuted_idx", good[1].long(), r"permuted_idx: got dtype torch.int64, allowed torch.int32"),
        ("permuted_idx", good[1][:20], r"permuted_idx: got shape \(20,\), allowed \(T\*K,\) with T = 3"),
        ("expert_weights", good[2].half(), r"expert_weights: got dtype torch.float16, allowed torch.float32"),
        (
            "expert_weights",
            good[2][:, :9],
            r"expert_weights: got shape \(3, 9\), allowed \(T, K\) with K = 10",
        ),
        ("shared_out", good[3][:2], r"shared_out: got shape \(2, 2560\)"),
        ("shared_out", None, r"shared_gate: got a tensor, allowed None where shared_out is None"),
        ("shared_gate", good[4].bfloat16(), r"shared_gate: got dtype torch.bfloat16, allowed torch.float32"),
        ("norm_weight", good[3], r"norm_weight: got shape \(3, 2560\), allowed \(H,\) with H = 2560"),
        ("eps", float("nan"), r"eps: got nan"),
        ("weight_offset", None, r"weight_offset: got None"),
        ("routing_complete", 1, r"routing_complete: got 1, allowed True or False"),
        (
            "out",
            good[0][:3],
            r"out: got memory that overlaps expert_out, allowed no overlap with expert_out$",
        ),
    ):
        given = {**dict(zip(names, good, strict=True)), name: bad}
        refused(lambda given=given: comm.moe_finalize_all_reduce(**given), message, w)


@place
def test_an_accepted_call_is_known_by_its_tensors_traits(place: str) -> None:
    """A second call at the same address with another shape, dtype or layout is looked at again."""
    w = world(2, place)
    x = w.put([torch.ones(4, 2560).bfloat16() for _ in range(2)])
    w.run(lambda comm: comm.all_reduce(x[comm.rank]))
    comm = w.ranks[0]
    refused(lambda: comm.all_reduce(x[0].view(2, 5120)), r"x: got shape \(2, 5120\)", w)
    refused(lambda: comm.all_reduce(x[0].view(torch.int16)), r"x: got dtype torch.int16", w)
    refused(lambda: comm.all_reduce(x[0].view(2560, 4).t()), r"x: got strides \(1, 4\)", w)
    refused(lambda: comm.all_reduce(torch._neg_view(x[0])), r"x: got a view that its memory does not", w)


@place
def test_autograd_takes_no_part(place: str) -> None:
    """A parameter as a weight, a leaf as `out`: taken as their values, also where gradients are recorded."""
    w = world(4, place)
    x = w.put([torch.full((1, 2560), 2.0).bfloat16() for _ in range(4)])
    gain = [torch.nn.Parameter(g) for g in w.put([torch.ones(2560).bfloat16()] * 4)]
    outs = [torch.nn.Parameter(torch.zeros_like(one)) for one in x]
    w.run(lambda comm: comm.all_reduce(x[comm.rank], out=outs[comm.rank], norm_weight=gain[comm.rank]))
    assert all(out.is_leaf and bool((out == 1).all()) for out in outs)


def test_pieces_are_copied_before_the_first_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `routing_complete` a kernel reads its routing while its predecessor, a copy say, may still run."""
    w = World(2, "cpu", max_tokens=3, hidden=64, top_k=3)
    events: list[str] = []
    for name, owner in (("_aligned", communicator), ("fused", w.ranks[0].engine)):
        real = getattr(owner, name)

        def noted(*args: Any, real: Any = real, name: str = name) -> Any:
            result = real(*args)
            if name == "fused" or result is not args[0]:
                events.append(name)
            return result

        monkeypatch.setattr(owner, name, noted)
    try:
        inputs = w.put([torch.ones(8, 64).bfloat16(), torch.zeros(15).int(), torch.ones(5, 3)])
        w.run(lambda comm: comm.moe_finalize_all_reduce(*inputs, routing_complete=True))
        copies = [at for at, name in enumerate(events) if name == "_aligned"]
        assert copies  # 3 rows of 3 slots end between multiples of 16 bytes
        assert max(copies) < events.index("fused")
    finally:
        w.ranks[0].close()


def test_a_call_of_many_rounds_waits_once_for_a_rank_that_is_gone() -> None:
    w = World(2, "cpu", max_tokens=1, timeout_s=0.2)
    start = time.monotonic()
    with pytest.raises(CollectiveTimeout, match="rank 1 did not arrive in round 0"):
        w.ranks[0].all_reduce(torch.ones(8, 2560).bfloat16())
    assert time.monotonic() - start < 0.8  # not 8 times the bound
    assert w.full_words() == 2 * 1280  # the first round's push, and no other


@place
def test_no_rows_are_no_round(place: str) -> None:
    w = world(2, place)
    before = w.rounds(0, "plain")
    empty = w.put([torch.empty(0, 2560).bfloat16()])[0]
    assert w.ranks[0].all_reduce(empty).shape == (0, 2560)  # alone: nobody is waited for
    inputs = w.put(moe_inputs(0, Form(), torch.Generator().manual_seed(0)))
    assert w.ranks[0].moe_finalize_all_reduce(*inputs).shape == (0, 2560)
    assert w.rounds(0, "plain") == before


@place
def test_closing_is_final_and_idempotent(place: str) -> None:
    w = World(2, place, forms=())
    x = w.put([torch.ones(1, 2560).bfloat16()])[0]
    with w.ranks[0] as comm:
        assert comm.explain() == "transport local"
    for _ in range(2):
        w.ranks[1].close()
    for call in (comm.check, comm.reset, lambda: comm.all_reduce(x)):
        with pytest.raises(CollectiveError, match="rank 0: the communicator is closed"):
            call()


@place
def test_a_width_without_a_norm_epilogue_gets_the_norm_apart(place: str) -> None:
    if place == "cpu":
        w = World(2, place, hidden=8192)
    else:
        w = World(2, place, hidden=16384, forms=(Form("fp32", "none"),))
    try:
        random, hidden = torch.Generator().manual_seed(9), w.ranks[0].hidden
        x = [draw("normal", (2, hidden), random) for _ in range(2)]
        gain = draw("normal", (hidden,), random)
        there, (weight,) = w.put(x), w.put([gain])
        results = w.run(lambda comm: comm.all_reduce(there[comm.rank], norm_weight=weight, weight_offset=1.0))
        plain = rank_sum(x).float()
        exact = plain * torch.rsqrt(plain.square().mean(-1, keepdim=True) + 1e-6) * (gain.float() + 1.0)
        assert same_bits(results[0], results[1])
        assert torch.allclose(results[0].float(), exact, rtol=2**-7, atol=1e-6)
    finally:
        w.ranks[0].close()


class TestForms:
    def test_are_checked(self) -> None:
        with pytest.raises(ValueError, match="Form: weight_dtype: got 'fp16', allowed fp32, bf16"):
            Form("fp16")
        with pytest.raises(ValueError, match="Form: shared: got 'yes', allowed gated, plain, none"):
            Form(shared="yes")

    def test_cover_every_call_that_promises_nothing(self) -> None:
        assert len(FORMS) == len(set(FORMS)) == 12
        assert not any(form.routing_complete for form in FORMS)

    @pytest.mark.parametrize("target", ["sm_90a", "sm_100a", "sm_103a"])
    def test_an_ahead_of_time_build_holds_every_call(self, target: str) -> None:
        built = [(op, params) for op, _, params in launch.variants(target, 2560, 10, Form())]
        for n in config.WORLDS:
            for form in FORMS:
                for complete in (False, True):
                    asked = Form(form.weight_dtype, form.shared, form.norm, complete)
                    assert ("moe_finalize_all_reduce", asked.params(n, 2560, 10)) in built
            for dtype in ("bf16", "fp16"):
                for norm in (False, True):
                    assert ("all_reduce", Plain(dtype, norm).params(n, 2560, 10)) in built
        assert len(built) == 3 * (24 + 4)

    def test_a_sample_has_every_world_and_every_form(self) -> None:
        built = [params for _, _, params in launch.variants("sm_90a", 2560, 10, Form(), sample=True)]
        assert {p["world"] for p in built} == set(config.WORLDS)
        assert {(p["weight_dtype"], p["shared"], p["gated"]) for p in built if p["top_k"]} == {
            (w, s != "none", s == "gated") for w in ("fp32", "bf16") for s in ("gated", "plain", "none")
        }
        assert {p["norm"] for p in built} == {p.get("prefetch", False) for p in built} == {False, True}

    def test_sizes_without_a_kernel_have_no_variants(self) -> None:
        assert list(launch.variants("sm_90a", 2564, 10, Form())) == []
        assert list(launch.variants("sm_90a", 2560, 33, Form())) == []
        assert list(launch.variants("sm_90a", 32768, 28, Form())) == []
        assert not any(p["norm"] for _, _, p in launch.variants("sm_90a", 8192, 10, Form()))
