"""N ranks in one process: every rank's result against the reference's bits, on the CPU and on one GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bindings import ops
from collectives.errors import CollectiveTimeout, CommunicatorPoisoned
from collectives.host_push import rmsnorm
from collectives.launch import Form
from tests.collectives.virtual import (
    FORMS,
    HIDDEN,
    KINDS,
    MAX_TOKENS,
    PLACES,
    World,
    draw,
    finalized,
    moe_inputs,
    rank_sum,
    same_bits,
    world,
)
from tests.golden import inputs as golden_inputs
from tests.ops.test_golden import golden

WORLDS = (2, 4, 8)

place = pytest.mark.parametrize("place", PLACES)
ranks = pytest.mark.parametrize("n", WORLDS)


def generator(*seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash(seed) % 2**31)


@place
@ranks
@pytest.mark.parametrize("kind", KINDS)
def test_all_reduce_has_the_contracts_bits(n: int, place: str, kind: str) -> None:
    w, random = world(n, place), generator(n, KINDS.index(kind))
    for rows in (1, 3, MAX_TOKENS, MAX_TOKENS + 5, 0):
        x = [draw(kind, (rows, HIDDEN), random) for _ in range(n)]
        placed = w.put(x)
        results = w.run(lambda comm, placed=placed: comm.all_reduce(placed[comm.rank]))
        assert all(same_bits(result, rank_sum(x)) for result in results), rows
    assert w.full_words() == 0


@place
@pytest.mark.parametrize("kind", ["normal", "bits"])
def test_all_reduce_of_fp16(place: str, kind: str) -> None:
    w, random = world(4, place), generator(1)
    x = [draw(kind, (3, HIDDEN), random).view(torch.float16) for _ in range(4)]
    placed = w.put(x)
    results = w.run(lambda comm: comm.all_reduce(placed[comm.rank]))
    assert all(same_bits(result, rank_sum(x)) for result in results)


@place
@pytest.mark.parametrize(
    ("n", "form"),
    [(2, FORMS[0]), *((4, form) for form in FORMS), (8, FORMS[0])],
    ids=lambda v: str(v) if isinstance(v, int) else f"{v.weight_dtype}-{v.shared}{'-norm' * v.norm}",
)
def test_fused_has_the_bits_of_the_unfused_sequence(n: int, place: str, form: Form) -> None:
    w, random = world(n, place), generator(n, FORMS.index(form))
    gain = torch.randn(HIDDEN, generator=random).bfloat16() if form.norm else None
    (gain_there,) = w.put([gain])
    for rows, kind, dropped in (
        (1, "normal", 0.2),
        (3, "bits", 0.2),
        (MAX_TOKENS, "normal", 0.0),
        (2, "halves", 0.5),
        (1, "normal", 1.0),
        (MAX_TOKENS + 1, "normal", 0.3),
    ):
        inputs = [moe_inputs(rows, form, random, kind, dropped) for _ in range(n)]
        placed = w.put(inputs)
        results = w.run(
            lambda comm, placed=placed: comm.moe_finalize_all_reduce(
                *placed[comm.rank], norm_weight=gain_there, eps=1e-5, weight_offset=1.0
            )
        )
        want = finalized(inputs)
        if form.norm and w.on_gpu:  # the norm kernel's bits: same sums in the same order
            want = ops.grouped_gemma_rmsnorm(want.to(place), gain_there, 1e-5, HIDDEN).cpu()
        elif gain is not None:
            want = rmsnorm(want, gain, 1e-5, 1.0)
        assert all(same_bits(result, want) for result in results), (rows, kind, dropped)
    assert w.full_words() == 0


@pytest.mark.sanitizer
@pytest.mark.concurrent
@place
def test_norm_of_the_plain_sum_is_that_of_the_fused_one(place: str) -> None:
    w, random = world(4, place), generator(2)
    form = Form(norm=True)
    inputs = [moe_inputs(3, form, random) for _ in range(4)]
    gain = torch.randn(HIDDEN, generator=random).bfloat16()
    placed, (gain_there,) = w.put(inputs), w.put([gain])
    fused = w.run(lambda comm: comm.moe_finalize_all_reduce(*placed[comm.rank], norm_weight=gain_there))

    def apart(comm):  # type: ignore[no-untyped-def]
        return comm.all_reduce(ops.moe_finalize(*placed[comm.rank]), norm_weight=gain_there)

    separate = w.run(apart)
    exact = rmsnorm(finalized(inputs), gain, 1e-6, 0.0)
    assert all(same_bits(a, fused[0]) for a in (*fused, *separate))
    # weight_offset is 0 here: an offset of 1 would be far off
    assert torch.allclose(fused[0].float(), exact.float(), rtol=2**-7, atol=1e-6)


@pytest.mark.sanitizer
@pytest.mark.concurrent
@place
@pytest.mark.parametrize("rows", [1, 3])
def test_golden(place: str, rows: int) -> None:
    w = world(4, place)
    data = [golden_inputs.moe(rows, rank) for rank in range(4)]
    placed = [dict(zip(one, w.put(list(one.values())), strict=True)) for one in data]
    fused = w.run(lambda comm: comm.moe_finalize_all_reduce(**placed[comm.rank]))
    bits = [
        torch.from_numpy(golden()[f"moe{rows}.rank{rank}.bits"].view(np.int16)).view(torch.bfloat16)
        for rank in range(4)
    ]
    there = w.put(bits)
    plain = w.run(lambda comm: comm.all_reduce(there[comm.rank]))
    want = torch.from_numpy(golden()[f"moe{rows}.sum"].view(np.int16)).view(torch.bfloat16)
    assert all(same_bits(result, want) for result in (*fused, *plain))


@place
def test_in_place(place: str) -> None:
    w, random = world(2, place), generator(3)
    x = [draw("normal", (3, HIDDEN), random) for _ in range(2)]
    placed = w.put([t.clone() for t in x])
    results = w.run(lambda comm: comm.all_reduce(placed[comm.rank], out=placed[comm.rank]))
    assert all(same_bits(result, rank_sum(x)) for result in results)
    inputs = [moe_inputs(3, Form(), random) for _ in range(2)]
    there = w.put([[t if t is None else t.clone() for t in one] for one in inputs])
    results = w.run(lambda comm: comm.moe_finalize_all_reduce(*there[comm.rank], out=there[comm.rank][3]))
    assert all(same_bits(result, finalized(inputs)) for result in results)


@pytest.mark.sanitizer
@pytest.mark.concurrent
@place
def test_counters_pass_two_to_the_32(place: str) -> None:
    w, random = World(2, place, forms=()), generator(4)
    try:
        w.start_rounds_at(2**32 - 3)
        for turn, rows in enumerate((4, 4, 2, 4, 3, 4)):  # rows 2 and 3 pass later than rows 0 and 1
            x = [draw("normal", (rows, HIDDEN), random) for _ in range(2)]
            placed = w.put(x)
            results = w.run(lambda comm, placed=placed: comm.all_reduce(placed[comm.rank]))
            assert all(same_bits(result, rank_sum(x)) for result in results), turn
        assert w.rounds(0, "plain")[:5] == [3, 3, 2, 1, 2**32 - 3]
        assert w.rounds(1, "plain") == w.rounds(0, "plain")
        assert w.full_words() == 0
    finally:
        w.ranks[0].close()


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["cuda:0"])
def test_both_channels_are_under_way_at_once(place: str) -> None:
    """Rank 0 enters the general sum first, rank 1 the decode path: with one buffer each would wait for the
    other."""
    w, random = world(2, place), generator(5)
    x = w.put([draw("normal", (2, HIDDEN), random) for _ in range(2)])
    inputs = w.put([moe_inputs(2, Form(), random) for _ in range(2)])
    second = [torch.cuda.Stream(w.device) for _ in range(2)]
    w.synchronize()
    results: list[list[torch.Tensor]] = [[], []]
    calls = (
        lambda r: w.ranks[r].all_reduce(x[r]),
        lambda r: w.ranks[r].moe_finalize_all_reduce(*inputs[r]),
    )
    for rank, order in ((0, (0, 1)), (1, (1, 0))):
        for which in order:
            with torch.cuda.stream(w.streams[rank] if which == 0 else second[rank]):
                results[which].append(calls[which](rank))
    w.synchronize()
    for rank in range(2):
        w.ranks[rank].check()
    assert same_bits(results[0][0].cpu(), rank_sum([t.cpu() for t in x]))
    assert same_bits(results[1][0].cpu(), finalized([[t.cpu() for t in one] for one in inputs]))


@place
def test_a_rank_that_never_comes(place: str) -> None:
    w, random = World(4, place, timeout_s=0.2, forms=()), generator(6)
    try:
        x = w.put([draw("normal", (2, HIDDEN), random) for _ in range(4)])
        w.run(lambda comm: comm.all_reduce(x[comm.rank]))
        w.enqueue(lambda comm: comm.all_reduce(x[comm.rank]), ranks=(0, 3))
        w.synchronize()
        for rank in (0, 3):
            comm = w.ranks[rank]
            if w.on_gpu:
                with pytest.raises(CollectiveTimeout) as caught:
                    comm.check()
                failure = caught.value
            else:  # the call itself raised it
                assert comm._failure is not None
                failure = comm._failure
            assert (failure.rank, failure.missing, failure.epoch) == (rank, [1, 2], 1)
            for call in (comm.check, lambda comm=comm: comm.all_reduce(x[0])):
                with pytest.raises(CommunicatorPoisoned, match=r"ranks 1 and 2 did not arrive in round 1"):
                    call()
        w.ranks[1].check()
        w.ranks[2].reset()
        for _ in range(3):
            results = w.run(lambda comm: comm.all_reduce(x[comm.rank]))
            assert all(same_bits(r, rank_sum([t.cpu() for t in x])) for r in results)
        w.ranks[0].reset()  # nobody has failed: nothing is undone
        assert w.rounds(0, "plain")[:2] == [3, 3]
    finally:
        w.ranks[0].close()
