"""Stores that others see late: what a missing fence lets happen does happen under some seed, and what the memory model forbids
under none."""

from __future__ import annotations

import pytest
import torch

import emulator
from tests.emulator.asm import kernel, run
from tests.emulator.test_faults import Rewrite, drop
from tests.emulator.world import world

SEEDS = range(200)
ONE_THREAD = {"grid": (2,), "block": (1,)}
# CTA 0 writes at %d1, CTA 1 what it sees to %d2
TWO_CTAS = "mov.u32 %r3, %ctaid.x; setp.ne.u32 %p1, %r3, 0; @%p1 bra READ;"
RELAXED = "relaxed.gpu.global"


def seen(
    body: str, words: int = 2, schedule: str = "adversarial", seeds: range = SEEDS, **launch: object
) -> set[tuple[int, ...]]:
    """Every result under the seeds. A finding is an error."""
    results = set()
    for seed in seeds:
        memory, out = torch.zeros(64, dtype=torch.int32), torch.zeros(words, dtype=torch.int32)
        assert run(body, memory, out, schedule=schedule, seed=seed, launch={**ONE_THREAD, **launch}) == []
        results.add(tuple(out.tolist()))
    return results


def message(between: str = "", store: str = f"st.{RELAXED}.b32", more: str = "") -> str:
    """A word, then a flag 128 bytes behind it; the other CTA waits for the flag and reads the word."""
    return (
        f"{TWO_CTAS} st.{RELAXED}.b32 [%d1], 7; {between} {store} [%d1+128], 1; {more} ret;"
        f"READ: ld.{RELAXED}.b32 %r4, [%d1+128]; setp.ne.u32 %p2, %r4, 1; @%p2 bra READ; fence.acq_rel.gpu;"
        f"ld.{RELAXED}.b32 %r5, [%d1]; st.global.b32 [%d2], %r5;"
    )


ORDERED = {
    "fence": message("fence.acq_rel.gpu;"),
    "release-fence": message("fence.release.gpu;"),
    "sc-fence": message("fence.sc.sys;"),
    "membar": message("membar.gl;"),
    "release": message(store="st.release.gpu.global.b32"),
    "atomic-release": message(store="red.release.gpu.global.max.u32"),
    "fence-behind-a-barrier": message("bar.sync 0; fence.acq_rel.gpu;"),
    "exit-behind-a-fence": message("fence.acq_rel.gpu;", more="st.relaxed.gpu.global.b32 [%d1+64], 3;"),
}  # fmt: skip


def test_a_missing_fence_shows_the_flag_before_the_word() -> None:
    assert seen(message(), 1) == {(0,), (7,)}


def test_an_acquiring_fence_holds_no_store_back() -> None:
    assert seen(message("fence.acquire.gpu;"), 1) == {(0,), (7,)}


def test_a_barrier_of_the_cta_orders_for_the_cta_only() -> None:
    """Warp 1 of CTA 0 writes the word, warp 0 the flag behind a barrier: as a grid-wide barrier does. A fence of warp 0 covers both."""
    body = (
        "mov.u32 %r3, %ctaid.x; setp.ne.u32 %p1, %r3, 0; @%p1 bra READ; setp.ne.u32 %p2, %r1, 32; @%p2 bra MEET;"
        f"st.{RELAXED}.b32 [%d1], 7; MEET: bar.sync 0; setp.ne.u32 %p2, %r1, 0; @%p2 bra END; FENCE st.{RELAXED}.b32 [%d1+128], 1; bra END;"
        f"READ: setp.ne.u32 %p2, %r1, 0; @%p2 bra END; SPIN: ld.{RELAXED}.b32 %r4, [%d1+128]; setp.ne.u32 %p2, %r4, 1; @%p2 bra SPIN;"
        f"fence.acq_rel.gpu; ld.{RELAXED}.b32 %r5, [%d1]; st.global.b32 [%d2], %r5; END:"
    )
    assert seen(body.replace("FENCE", ""), 1, block=(64,)) == {(0,), (7,)}
    assert seen(body.replace("FENCE", "fence.acq_rel.cta;"), 1, block=(64,)) == {(0,), (7,)}
    assert seen(body.replace("FENCE", "fence.acq_rel.gpu;"), 1, block=(64,)) == {(7,)}


def test_an_atomic_overtakes_a_store_that_no_fence_holds() -> None:
    assert seen(message(store="red.relaxed.gpu.global.add.u32"), 1) == {(0,), (7,)}


@pytest.mark.parametrize("name", ORDERED)
def test_what_is_ordered_is_seen_in_order(name: str) -> None:
    assert seen(ORDERED[name], 1) == {(7,)}


@pytest.mark.parametrize("schedule", ["round_robin", "random"])
def test_other_schedules_show_stores_at_once(schedule: str) -> None:
    assert seen(message(), 1, schedule, range(20)) == {(7,)}


def test_a_word_before_and_one_after_a_fence_keep_their_order_past_the_end_of_the_thread() -> None:
    """The thread has ended when its stores leave: the flag still releases what its fence covers."""
    body = message("st.global.b32 [%d1+64], 5; fence.acq_rel.gpu;")
    body += "ld.global.b32 %r6, [%d1+64]; st.global.b32 [%d2+4], %r6;"
    assert seen(body) == {(7, 5)}


def test_stores_to_one_place_are_seen_in_order() -> None:
    body = (
        f"{TWO_CTAS} st.{RELAXED}.b32 [%d1], 1; st.{RELAXED}.b32 [%d1], 2; st.{RELAXED}.b32 [%d1], 3; ret;"
        f"READ: mov.u32 %r4, 0; mov.u32 %r6, 0; LOOP: ld.{RELAXED}.b32 %r5, [%d1]; setp.ge.u32 %p2, %r5, %r4; @%p2 bra UP;"
        "add.u32 %r6, %r6, 1; UP: mov.u32 %r4, %r5; setp.ne.u32 %p3, %r5, 3; @%p3 bra LOOP; st.global.v2.b32 [%d2], {%r5, %r6};"
    )
    assert seen(body) == {(3, 0)}


def test_a_thread_sees_its_own_stores() -> None:
    body = (
        f"mov.u32 %r3, %ctaid.x; mul.wide.u32 %d3, %r3, 4; add.s64 %d4, %d1, %d3; add.s64 %d5, %d2, %d3; st.{RELAXED}.b32 [%d4], 4;"
        f"st.{RELAXED}.b32 [%d4+64], 5; ld.{RELAXED}.b32 %r4, [%d4]; ld.{RELAXED}.b32 %r5, [%d4+64]; add.u32 %r4, %r4, %r5;"
        f"atom.add.relaxed.gpu.global.u32 %r6, [%d4], 1; add.u32 %r4, %r4, %r6; ld.{RELAXED}.b32 %r6, [%d4];"
        "add.u32 %r4, %r4, %r6; st.global.b32 [%d5], %r4;"
    )
    assert seen(body) == {(18, 18)}


# each CTA writes one word, then reads the other's
BOTH = (
    "mov.u32 %r3, %ctaid.x; mul.wide.u32 %d3, %r3, 128; add.s64 %d4, %d1, %d3; xor.b32 %r4, %r3, 1; mul.wide.u32 %d5, %r4, 128;"
    f"add.s64 %d5, %d1, %d5; mul.wide.u32 %d6, %r3, 4; add.s64 %d6, %d2, %d6; st.{RELAXED}.b32 [%d4], 1; fence.sc.gpu;"
    f"ld.{RELAXED}.b32 %r5, [%d5]; st.global.b32 [%d6], %r5;"
)


def test_two_that_write_and_then_look_may_both_look_too_early() -> None:
    assert (0, 0) not in seen(BOTH)
    assert (0, 0) in seen(BOTH.replace("fence.sc.gpu;", ""))


def test_a_vector_comes_in_pieces_and_a_wide_word_whole() -> None:
    body = (
        f"{TWO_CTAS} st.{RELAXED}.v2.b32 [%d1], {{1, 1}}; ret;"
        f"READ: ld.{RELAXED}.v2.b32 {{%r4, %r5}}, [%d1]; add.u32 %r6, %r4, %r5; setp.eq.u32 %p2, %r6, 0; @%p2 bra READ;"
        "st.global.v2.b32 [%d2], {%r4, %r5};"
    )
    assert {(0, 1), (1, 0), (1, 1)} == seen(body)
    whole = body.replace(
        f"st.{RELAXED}.v2.b32 [%d1], {{1, 1}}", f"mov.u64 %d5, 0x100000001; st.{RELAXED}.b64 [%d1], %d5"
    )
    assert seen(whole) == {(1, 1)}


def test_shared_memory_too() -> None:
    """Warp 0 writes a word and a flag in shared memory, warp 1 waits for the flag."""
    body = (
        "setp.eq.u32 %p1, %r1, 0; @%p1 st.volatile.shared.v2.b32 [%r2], {%r1, %r1}; bar.sync 0; setp.ge.u32 %p1, %r1, 32; @%p1 bra READ;"
        "setp.ne.u32 %p3, %r1, 0; @%p3 bra END; st.volatile.shared.b32 [%r2], 7; FENCE st.volatile.shared.b32 [%r2+4], 1; bra END;"
        "READ: setp.ne.u32 %p3, %r1, 32; @%p3 bra END; SPIN: ld.volatile.shared.b32 %r4, [%r2+4]; setp.ne.u32 %p2, %r4, 1; @%p2 bra SPIN;"
        "fence.acq_rel.cta; ld.volatile.shared.b32 %r5, [%r2]; st.global.b32 [%d1], %r5; END:"
    )
    for fence, results in (("", {0, 7}), ("fence.acq_rel.cta;", {7})):
        got = set()
        for seed in SEEDS:
            out = torch.zeros(1, dtype=torch.int32)
            options = {"schedule": "adversarial", "seed": seed}
            assert run(body.replace("FENCE", fence), out, shared=64, launch={"block": (64,)}, **options) == []
            got.add(int(out))
        assert got == results


def test_the_end_of_a_grid_orders_for_its_stream_only() -> None:
    """A grid writes a word; the next one of its stream, a flag, with or without a release; another stream waits for the flag."""
    first = kernel(f"st.{RELAXED}.b32 [%d1], 7;")
    read = (
        f"READ: ld.{RELAXED}.b32 %r4, [%d1+128]; setp.ne.u32 %p2, %r4, 1; @%p2 bra READ; fence.acq_rel.gpu;"
        f"ld.{RELAXED}.b32 %r5, [%d1]; st.global.b32 [%d2], %r5;"
    )
    for release, results in (("", {(0, 7), (7, 7)}), ("fence.release.gpu;", {(7, 7)})):
        flag = kernel(f"{release} st.{RELAXED}.b32 [%d1+128], 1;")
        after = kernel(f"ld.{RELAXED}.b32 %r5, [%d1]; st.global.b32 [%d2+4], %r5;")
        got = set()
        for seed in SEEDS:
            memory, out = torch.zeros(64, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
            with emulator.device("sm_90a", schedule="adversarial", seed=seed) as device, device.together():
                for stream, text in ((0, first), (0, flag), (0, after), (1, kernel(read))):
                    with device.stream(stream):
                        device.launch(text, [memory, out], block=(1,))
            got.add(tuple(out.tolist()))
        assert got == results


def test_more_stores_than_may_be_under_way() -> None:
    """Vectors of which one element arrives because there is no room, while the others are being written."""
    body = (
        "mov.u32 %r9, 0; mul.wide.u32 %d3, %r1, 32; add.s64 %d3, %d1, %d3; LOOP: st.global.v8.b32 [%d3], {%r1, %r1, %r1, %r1, %r1, %r1, %r1, %r1};"
        "add.s64 %d3, %d3, 2048; add.u32 %r9, %r9, 1; setp.lt.u32 %p1, %r9, 4; @%p1 bra LOOP;"
    )
    for seed in range(20):
        memory = torch.full((2056,), -1, dtype=torch.int32)
        given = memory[-memory.data_ptr() % 32 // 4 :][:2048]
        assert run(body, given, launch={"block": (64,)}, schedule="adversarial", seed=seed) == []
        assert given.tolist() == [i // 8 % 64 for i in range(2048)]


def test_everything_has_arrived_when_the_launch_returns() -> None:
    body = f"mul.wide.u32 %d3, %r1, 4; add.s64 %d3, %d1, %d3; st.{RELAXED}.b32 [%d3], %r1; st.global.b32 [%d3+256], %r1;"
    for seed in range(50):
        memory = torch.full((128,), -1, dtype=torch.int32)
        assert run(body, memory, launch={"block": (64,)}, schedule="adversarial", seed=seed) == []
        assert memory.tolist() == [*range(64), *range(64)]


def wrong(seed: int, rewrite: Rewrite | None) -> bool:
    """Whether rounds of the collective go wrong under a seed. A finding is an error."""
    with world("sm_90a", 2, schedule="adversarial", seed=seed, rewrite=rewrite, brief=True) as w:
        done = w.rounds(seed, 5)
        bad = not all(torch.equal(out, want) for outs, want in done for out in outs)
        return bad or any(bool(r.buffer.any()) or bool(r.record.any()) for r in w.ranks)


def test_the_collective_needs_the_release_before_its_pushes() -> None:
    """Without it a marker may be restored after the next payload has come, which is lost: no race, a wrong result."""
    without = drop(r"fence\.release\.sys")
    assert any(wrong(seed, without) for seed in range(60))
    assert not any(wrong(seed, None) for seed in range(15))
