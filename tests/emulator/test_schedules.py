"""Interleavings: the collective as a world of ranks under many schedules, and threads that wait for each other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import emulator
from tests.emulator.asm import checks, kernel, run
from tests.emulator.world import world

ROOT = Path(__file__).resolve().parents[2]
SCHEDULE = ("random", "adversarial")


def rounds_under(seeds: range, n: int, target: str) -> None:
    """A round under each seed, then a second and a third on the same buffers: the marks of both phases are used again."""
    for seed in seeds:
        with world(target, n, schedule=SCHEDULE[seed % 2], seed=seed, norm=seed % 5 == 0) as w:
            for i, (outs, want) in enumerate(w.rounds(seed, 3)):
                for rank, out in enumerate(outs):
                    if w.norm:
                        assert torch.equal(out, outs[0]), (seed, i, rank)
                        assert out.isfinite().all()
                    else:
                        assert torch.equal(out, want), (seed, i, rank)
            assert not any(rank.buffer.any() for rank in w.ranks), "a marker was not restored"
            assert not any(rank.record.any() for rank in w.ranks)


@pytest.mark.parametrize("n", [2, 4])
def test_the_collective_under_fifty_schedules(n: int) -> None:
    rounds_under(range(50), n, "sm_100a")


@pytest.mark.parametrize("target", ["sm_90a", "sm_103a"])
def test_the_collective_on_another_target(target: str) -> None:
    rounds_under(range(4), 4, target)


@pytest.mark.nightly
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_the_collective_under_a_thousand_schedules(n: int, target: str) -> None:
    rounds_under(range(1000), n, target)


def test_a_rank_that_never_comes_ends_in_a_record_that_names_it() -> None:
    with world("sm_100a", 4) as w:
        given = w.inputs(0)
        outs = [torch.zeros(1, w.hidden, dtype=torch.bfloat16) for _ in range(4)]
        with w.device.together():
            for rank in (0, 1, 3):
                with w.device.stream(rank):
                    w.call(rank, given[rank], outs[rank], None, timeout=10**9)
        for rank in (0, 1, 3):
            assert w.ranks[rank].record[:6].tolist() == [1, 0, 0, 0, 1, 0]  # expired, round 0, rank 2 missing
            assert w.ranks[rank].poison[0] == 1


def test_four_processes_under_torchrun_run_the_real_kernel(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD_SIZE", "MASTER", "LOCAL_"))
    }
    done = subprocess.run(
        [*command, "-m", "tests.emulator.torchrun_worker", "3"],
        cwd=ROOT,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert sorted(re.findall(r"rank (\d): 3 of 3 rounds right, record \[0, 0\]", done.stdout)) == [
        "0",
        "1",
        "2",
        "3",
    ]


def result_under(seed: int, schedule: str) -> tuple[list[int], int]:
    """A kernel whose result depends on the interleaving: every warp of two CTAs takes a ticket."""
    out = torch.zeros(16, dtype=torch.int32)
    body = (
        "and.b32 %r3, %r1, 31; setp.ne.u32 %p1, %r3, 0; @%p1 bra END; mov.u32 %r9, %ctaid.x; shl.b32 %r9, %r9, 3;"
        "shr.u32 %r4, %r1, 5; add.u32 %r4, %r4, %r9; atom.global.add.u32 %r5, [%d2], 1;"
        "mul.wide.u32 %d3, %r4, 4; add.s64 %d3, %d1, %d3; st.global.b32 [%d3], %r5; END:"
    )
    count = torch.zeros(1, dtype=torch.int32)
    with emulator.device("sm_90a", schedule=schedule, seed=seed) as device:
        device.launch(kernel(body), [out, count], grid=(2,), block=(256,))
    return out.tolist(), int(count)


def test_a_seed_gives_one_interleaving_and_seeds_give_many() -> None:
    for schedule in emulator.SCHEDULES:
        assert result_under(3, schedule) == result_under(3, schedule)
    for schedule in SCHEDULE:
        seen = {tuple(result_under(seed, schedule)[0]) for seed in range(8)}
        assert len(seen) > 3
        assert all(sorted(order) == list(range(16)) for order in seen)


SPIN = "SPIN: ld.volatile.global.b32 %r3, [%d1]; setp.eq.u32 %p2, %r3, 0; @%p2 bra SPIN;"


@pytest.mark.parametrize("schedule", emulator.SCHEDULES)
@pytest.mark.parametrize("waits", ["setp.eq.u32", "setp.ne.u32"])
def test_a_spinning_lane_does_not_starve_its_mates(schedule: str, waits: str) -> None:
    """One lane releases the others, or the others the one: whichever stands first in the text."""
    body = f"{waits} %p1, %r1, 7; @%p1 bra SPIN; st.volatile.global.b32 [%d1], 1; bra END; {SPIN} END:"
    flag = torch.zeros(1, dtype=torch.int32)
    assert run(body, flag, schedule=schedule) == []
    assert int(flag) == 1
    after = f"{waits} %p1, %r1, 7; @!%p1 bra RELEASE; {SPIN} bra END; RELEASE: st.volatile.global.b32 [%d1], 1; END:"
    flag = torch.zeros(1, dtype=torch.int32)
    assert run(after, flag, schedule=schedule) == []


@pytest.mark.parametrize("schedule", emulator.SCHEDULES)
def test_ctas_that_wait_for_each_other_are_resident_together(schedule: str) -> None:
    """A grid barrier of 96 CTAs by an atomic counter, without a cooperative launch: they fit the device."""
    body = (
        "setp.ne.u32 %p1, %r1, 0; @%p1 bra END; atom.acq_rel.gpu.global.add.u32 %r5, [%d1], 1;"
        "SPIN: ld.acquire.gpu.global.b32 %r3, [%d1]; setp.lt.u32 %p2, %r3, 96; @%p2 bra SPIN; END:"
    )
    count = torch.zeros(1, dtype=torch.int32)
    assert run(body, count, launch={"grid": (96,)}, schedule=schedule, seed=1) == []
    assert int(count) == 96


def test_a_wait_that_nothing_ends_is_a_deadlock_that_says_who_waits() -> None:
    found = run(SPIN, torch.zeros(1, dtype=torch.int32), launch={"block": (1,)})
    assert checks(found) == {"deadlock"}
    found = run("bar.sync 3, 64;", torch.zeros(1, dtype=torch.int32))
    assert checks(found) == {"deadlock"}
    assert "bar.sync 3, where 1 of 2 warps are" in found[0].message


def test_a_cta_that_allocates_without_the_other_of_its_pair_waits_for_it() -> None:
    alone = (
        "mov.u32 %r4, %cluster_ctarank; setp.ne.u32 %p1, %r4, 0; @%p1 bra END;"
        "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r2], 32; END: barrier.cluster.arrive; barrier.cluster.wait;"
    )
    launch = {"grid": (2,), "cluster": (2,)}
    found = run(alone, torch.zeros(1), shared=64, target="sm_100a", launch=launch)
    told = " ".join(f.message for f in found if f.check == "deadlock")
    assert "the other CTA of the pair to execute tcgen05.alloc" in told
    assert "the cluster barrier, where 1 of 2 warps are" in told


def test_a_cooperative_grid_that_does_not_fit_is_refused() -> None:
    with (
        emulator.device("sm_90a") as device,
        pytest.raises(emulator.FindingsError, match="cooperative grid of 264"),
    ):
        device.launch(
            kernel("", 1), [torch.zeros(1)], grid=(264,), block=(1024,), shared=200000, cooperative=True
        )
