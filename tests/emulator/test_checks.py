"""Each check finds what it is for in the smallest kernel that has it, says where, and is silent about the kernel put right."""

from __future__ import annotations

import pytest
import torch

import emulator
from tests.emulator.asm import checks, kernel, run

TWO_WARPS = {"block": (64,)}


def words(n: int = 64) -> torch.Tensor:
    return torch.arange(n, dtype=torch.int32)


# name: (wrong body, what is put right by str.replace pairs, check, shared bytes, launch)
CASES: dict[str, tuple[str, list[tuple[str, str]], str, int, dict[str, object]]] = {
    "global-bounds": (
        "mul.wide.u32 %d3, %r1, 4; add.s64 %d3, %d1, %d3; ld.global.b32 %r3, [%d3+132];",
        [("+132", "+128")],
        "bounds",
        0,
        {},
    ),
    "shared-bounds": (
        "shl.b32 %r3, %r1, 2; add.s32 %r3, %r2, %r3; st.shared.b32 [%r3+4], %r1;",
        [("+4]", "]")],
        "bounds",
        128,
        {},
    ),
    "shared-of-no-cta": (
        "mov.u32 %r4, 1; mapa.shared::cluster.u32 %r3, %r2, %r4; st.shared::cluster.b32 [%r3], %r4;",
        [("mov.u32 %r4, 1;", "mov.u32 %r4, 0;")],
        "bounds",
        128,
        {},
    ),
    "alignment": (
        "mul.wide.u32 %d3, %r1, 4; add.s64 %d3, %d1, %d3; ld.global.v2.b32 {%r3, %r4}, [%d3];",
        [("mul.wide.u32 %d3, %r1, 4", "mul.wide.u32 %d3, %r1, 8")],
        "alignment",
        0,
        {},
    ),
    "uninitialized-shared": (
        "shl.b32 %r3, %r1, 2; add.s32 %r3, %r2, %r3; ld.shared.b32 %r4, [%r3];",
        [("ld.shared", "st.shared.b32 [%r3], %r1; ld.shared")],
        "uninitialized",
        128,
        {},
    ),
    "uninitialized-register": (
        "setp.eq.s32 %p1, %r1, 3; @%p1 bra SKIP; mov.u32 %r5, 1; SKIP: add.s32 %r6, %r5, 1; st.global.b32 [%d1], %r6;",
        [("setp", "mov.u32 %r5, 0; setp"), ("st.global.b32 [%d1], %r6;", "")],
        "uninitialized",
        0,
        {},
    ),
    "race-between-warps": (
        "shl.b32 %r3, %r1, 2; add.s32 %r3, %r2, %r3; st.shared.b32 [%r3], %r1;"
        "xor.b32 %r4, %r1, 32; shl.b32 %r4, %r4, 2; add.s32 %r4, %r2, %r4; ld.shared.b32 %r5, [%r4];",
        [("xor.b32 %r4", "bar.sync 0; xor.b32 %r4")],
        "race",
        256,
        TWO_WARPS,
    ),
    "race-write-after-read": (
        "shl.b32 %r3, %r1, 2; add.s32 %r3, %r2, %r3; st.shared.b32 [%r3], %r1; bar.sync 0;"
        "xor.b32 %r4, %r1, 32; shl.b32 %r4, %r4, 2; add.s32 %r4, %r2, %r4; ld.shared.b32 %r5, [%r4];"
        "st.shared.b32 [%r3], %r5;",
        [("ld.shared.b32 %r5, [%r4];", "ld.shared.b32 %r5, [%r4]; bar.sync 0;")],
        "race",
        256,
        TWO_WARPS,
    ),
    "race-between-lanes": (
        "shl.b32 %r3, %r1, 2; add.s32 %r3, %r2, %r3; st.shared.b32 [%r3], %r1;"
        "xor.b32 %r4, %r1, 1; shl.b32 %r4, %r4, 2; add.s32 %r4, %r2, %r4; ld.shared.b32 %r5, [%r4];",
        [("xor.b32 %r4", "bar.warp.sync -1; xor.b32 %r4")],
        "race",
        256,
        {},
    ),
    "race-between-ctas": (
        "mov.u32 %r3, %ctaid.x; st.global.b32 [%d1], %r3;",
        [("st.global.b32 [%d1], %r3", "atom.global.add.u32 %r4, [%d1], %r3")],
        "race",
        0,
        {"grid": (2,)},
    ),
    "race-flag-without-fence": (
        # CTA 0 writes data, then a flag; CTA 1 polls the flag, then reads the data
        "mov.u32 %r3, %ctaid.x; setp.ne.u32 %p1, %r3, 0; @%p1 bra READ;"
        "st.global.b32 [%d1], 7; st.relaxed.gpu.global.b32 [%d1+128], 1; ret;"
        "READ: ld.relaxed.gpu.global.b32 %r4, [%d1+128]; setp.ne.u32 %p2, %r4, 1; @%p2 bra READ;"
        "ld.global.b32 %r5, [%d1];",
        [("st.relaxed.gpu", "st.release.gpu"), ("ld.relaxed.gpu", "ld.acquire.gpu")],
        "race",
        0,
        {"grid": (2,), "block": (1,)},
    ),
    "race-fence-of-too-small-a-scope": (
        "mov.u32 %r3, %ctaid.x; setp.ne.u32 %p1, %r3, 0; @%p1 bra READ;"
        "st.global.b32 [%d1], 7; st.release.cta.global.b32 [%d1+128], 1; ret;"
        "READ: ld.acquire.gpu.global.b32 %r4, [%d1+128]; setp.ne.u32 %p2, %r4, 1; @%p2 bra READ;"
        "ld.global.b32 %r5, [%d1];",
        [("st.release.cta", "st.release.gpu")],
        "race",
        0,
        {"grid": (2,), "block": (1,)},
    ),
    "cp-async-without-wait": (
        "shl.b32 %r3, %r1, 4; add.s32 %r3, %r2, %r3; mul.wide.u32 %d3, %r1, 4; and.b64 %d3, %d3, 0x70; add.s64 %d3, %d1, %d3;"
        "cp.async.cg.shared.global [%r3], [%d3], 16; cp.async.commit_group; ld.shared.b32 %r4, [%r3];",
        [("cp.async.commit_group;", "cp.async.commit_group; cp.async.wait_group 0;")],
        "race",
        512,
        {},
    ),
    "bulk-copy-without-proxy-fence": (
        "shl.b32 %r3, %r1, 2; add.s32 %r3, %r2, %r3; st.shared.b32 [%r3], %r1; bar.sync 0; setp.ne.u32 %p1, %r1, 0; @%p1 bra END;"
        "cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r2], 128; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; END:",
        [("bar.sync 0;", "fence.proxy.async.shared::cta; bar.sync 0;")],
        "proxy",
        128,
        {},
    ),
    "bulk-copy-not-waited-for": (
        "setp.ne.u32 %p1, %r1, 0; @%p1 bra END; mbarrier.init.shared.b64 [%r2], 1; fence.proxy.async.shared::cta;"
        "mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 64;"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2+128], [%d1], 64, [%r2];"
        "ld.shared.b32 %r3, [%r2+128];"
        "W: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0; @!%p2 bra W; END:",
        [("ld.shared.b32 %r3, [%r2+128];", ""), ("END:", "ld.shared.b32 %r3, [%r2+128]; END:")],
        "race",
        256,
        {},
    ),
    "mbarrier-not-initialised": (
        "setp.ne.u32 %p1, %r1, 0; @%p1 bra END; mbarrier.arrive.shared.b64 _, [%r2]; END:",
        [("mbarrier.arrive", "mbarrier.init.shared.b64 [%r2], 1; mbarrier.arrive")],
        "mbarrier",
        128,
        {},
    ),
    "mbarrier-transactions-outstanding": (
        "setp.ne.u32 %p1, %r1, 0; @%p1 bra END; mbarrier.init.shared.b64 [%r2], 1; mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 16; END:",
        [(", 16;", ", 0;")],
        "mbarrier",
        128,
        {},
    ),
    "wrong-parity": (
        "setp.ne.u32 %p1, %r1, 0; @%p1 bra INIT; mbarrier.init.shared.b64 [%r2], 64; INIT: bar.sync 0;"
        "mbarrier.arrive.shared.b64 _, [%r2]; mov.u32 %r3, 1; setp.lt.u32 %p3, %r1, 64; @%p3 mov.u32 %r3, 0; xor.b32 %r3, %r3, 1;"
        "W: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0; @!%p2 bra W;"
        "V: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], %r3; @!%p2 bra V;",
        [("xor.b32 %r3, %r3, 1;", "")],
        "deadlock",
        128,
        TWO_WARPS,
    ),
    "barrier-not-met": (
        "setp.lt.u32 %p1, %r1, 32; @%p1 bra END; bar.sync 1, 64; END:",
        [("@%p1 bra END;", "")],
        "deadlock",
        0,
        TWO_WARPS,
    ),
    "barrier-in-half-a-warp": (
        "setp.lt.u32 %p1, %r1, 16; @%p1 bra SPIN; bar.sync 0; bra END; SPIN: ld.volatile.global.b32 %r3, [%d1];"
        "setp.eq.u32 %p2, %r3, 0; @%p2 bra SPIN; END:",
        [("setp.lt.u32 %p1, %r1, 16", "setp.lt.u32 %p1, %r1, 0")],
        "deadlock",
        0,
        {},
    ),
    "wait-for-an-absent-lane": (
        "setp.lt.u32 %p1, %r1, 16; @%p1 bra SPIN; shfl.sync.idx.b32 %r4, %r1, 0, 31, -1; bra END;"
        "SPIN: ld.volatile.global.b32 %r3, [%d1]; setp.eq.u32 %p2, %r3, 0; @%p2 bra SPIN; END:",
        [("setp.lt.u32 %p1, %r1, 16", "setp.lt.u32 %p1, %r1, 0")],
        "deadlock",
        0,
        {},
    ),
    "shuffle-from-a-lane-that-takes-no-part": (
        "setp.ge.u32 %p1, %r1, 16; @%p1 bra END; shfl.sync.idx.b32 %r4, %r1, 20, 31, 0xffff; END:",
        [(", 20,", ", 2,")],
        "barrier",
        0,
        {},
    ),
    "cluster-wait-without-arrival": (
        "barrier.cluster.wait;",
        [("barrier.cluster.wait", "barrier.cluster.arrive; barrier.cluster.wait")],
        "barrier",
        0,
        {"grid": (2,), "cluster": (2,)},
    ),
    "peer-has-ended": (
        "mov.u32 %r4, %cluster_ctarank; setp.ne.u32 %p1, %r4, 0; @%p1 bra END;"
        "P: ld.volatile.global.b32 %r6, [%d1+4]; setp.ne.u32 %p2, %r6, 1; @%p2 bra P; nanosleep.u32 100;"
        "mapa.shared::cluster.u32 %r3, %r2, 1; mov.u32 %r7, 0;"
        "D: add.u32 %r7, %r7, 1; setp.lt.u32 %p3, %r7, 2000; @%p3 bra D; st.shared::cluster.b32 [%r3], %r4; END:",
        [
            (
                "st.shared::cluster.b32 [%r3], %r4; END:",
                "st.shared::cluster.b32 [%r3], %r4; END: barrier.cluster.arrive; barrier.cluster.wait;",
            )
        ],
        "bounds",
        128,
        {"grid": (2,), "cluster": (2,), "block": (1,)},
    ),
    "bulk-store-not-waited-for": (
        "setp.ne.u32 %p1, %r1, 0; @%p1 bra END; st.shared.b32 [%r2], 0; st.shared.v2.b32 [%r2+8], {%r1, %r1}; st.shared.b32 [%r2+4], 0;"
        "fence.proxy.async.shared::cta; cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r2], 16; cp.async.bulk.commit_group; END:",
        [("commit_group; END:", "commit_group; cp.async.bulk.wait_group.read 0; END:")],
        "async",
        128,
        {},
    ),
    "elementwise-output-read-before-written": (
        "ld.global.b32 %r3, [%d2];",
        [("ld.global.b32", "st.global.b32 [%d2], 1; ld.global.b32")],
        "uninitialized",
        0,
        {"block": (1,)},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_fault_is_found_by_its_check(name: str) -> None:
    body, _, check, shared, launch = CASES[name]
    out = words()
    found = run(body, words(), out, shared=shared, launch=launch, uninitialized=(out,))
    assert check in checks(found), found
    first = next(f for f in found if f.check == check)
    assert first.kernel == "k"
    assert first.ptx_line > 0
    assert first.ptx


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_put_right_has_no_finding(name: str) -> None:
    body, changes, _, shared, launch = CASES[name]
    for old, new in changes:
        assert old in body
        body = body.replace(old, new)
    given = words()
    given[0] = given[1] = 1
    assert run(body, given, words(), shared=shared, launch=launch) == []


# lane 16 k + r names row r of matrix k, 16 bytes a row; warp 0 writes the rows of the lanes below %r9
LDMATRIX = (
    "shl.b32 %r3, %r1, 4; add.s32 %r3, %r2, %r3; mov.u32 %r9, ROWS; setp.ge.u32 %p1, %r1, %r9; @%p1 bra LOAD;"
    "st.shared.v4.b32 [%r3], {%r1, %r1, %r1, %r1}; LOAD: BARRIER setp.lt.u32 %p2, %r1, 32; @%p2 bra END;"
    "and.b32 %r4, %r1, 31; shl.b32 %r4, %r4, 4; add.s32 %r4, %r2, %r4;"
    "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r5, %r6}, [%r4]; setp.ne.u32 %p3, %r1, 32; @%p3 bra END;"
    "st.global.v2.b32 [%d1], {%r5, %r6}; END:"
)


@pytest.mark.parametrize(
    ("rows", "barrier", "check"),
    [
        (16, "bar.sync 0;", None),
        (8, "bar.sync 0;", None),
        (0, "bar.sync 0;", "uninitialized"),
        (16, "", "race"),
    ],
)
def test_a_matrix_of_rows_that_the_kernel_does_not_have_reads_as_nan(
    rows: int, barrier: str, check: str | None
) -> None:
    """A second matrix that nobody wrote is no finding; one that another warp writes without an order is, and so is the first."""
    out = torch.zeros(2, dtype=torch.int32)
    body = LDMATRIX.replace("ROWS", str(rows)).replace("BARRIER", barrier)
    found = run(body, out, shared=512, launch=TWO_WARPS)
    if check:
        assert check in checks(found)
    else:
        assert found == []
        assert out.tolist() == [0, 8 if rows == 16 else 0x7FFF7FFF]


def test_a_finding_names_the_tensor_the_thread_and_the_line() -> None:
    body = "setp.ne.u32 %p1, %r1, 37; @%p1 bra END; ld.global.b32 %r3, [%d1+400]; END:"
    with emulator.device("sm_90a", on_finding="keep") as device:
        tensor = words()
        device.name(tensor, "weights")
        device.launch(kernel(body, 1), [tensor], grid=(3,), block=(64,))
    (found,) = device.findings
    assert (found.check, found.thread, found.warp, found.count) == ("bounds", 37, 1, 3)
    assert "weights" in found.message
    assert "+400" in found.message
    assert kernel(body, 1).splitlines()[found.ptx_line - 1] == body


def test_source_lines_come_from_loc() -> None:
    ptx = kernel(".loc 1 42 7\nld.global.b32 %r3, [%d1+400];", 1)
    ptx = ptx.replace(".address_size 64", '.address_size 64\n.file 1 "/src/kernel.py"')
    with emulator.device("sm_90a", on_finding="keep") as device:
        device.launch(ptx, [words()])
    assert device.findings[0].source == ("/src/kernel.py", 42)


def test_shared_memory_over_the_limit_is_refused() -> None:
    with (
        emulator.device("sm_90a") as device,
        pytest.raises(emulator.FindingsError, match=r"limit: .*232449 bytes"),
    ):
        device.launch(kernel("", 1), [words()], shared=232449)


def test_checks_can_be_chosen() -> None:
    body = CASES["race-between-warps"][0]
    assert run(body, words(), words(), shared=256, launch=TWO_WARPS, checks=("bounds",)) == []
    assert run(body, words(), words(), shared=256, launch=TWO_WARPS, checks=False) == []
    with pytest.raises(emulator.EmulatorError, match="checks: got 'speed'"):
        run(body, words(), words(), shared=256, checks=("speed",))


FIRST = "griddepcontrol.launch_dependents; st.global.b32 [%d1], 5;"
SECOND = "ld.global.b32 %r3, [%d1]; griddepcontrol.wait; st.global.b32 [%d2], %r3;"


def dependent(second: str) -> set[str]:
    a, b = words(), words()
    with emulator.device("sm_90a", on_finding="keep") as device:
        device.launch(kernel(FIRST), [a, b], block=(1,))
        device.launch(kernel(second), [a, b], block=(1,), dependent=True)
    return checks(device.findings)


def test_reading_a_predecessors_output_before_the_wait() -> None:
    assert dependent(SECOND) == {"pdl"}
    assert dependent(SECOND.replace("[%d1];", "[%d1+4];")) == set()
    right = SECOND.replace("griddepcontrol.wait; ", "").replace(
        "ld.global", "griddepcontrol.wait; ld.global", 1
    )
    assert dependent(right) == set()


def together(*bodies: str, streams: tuple[int, ...] = (), grid: int = 1) -> set[str]:
    """Dependent launches of one batch, on one stream or as told. grid: CTAs of all but the first and the
    last."""
    a, b = words(), words()
    with emulator.device("sm_90a", on_finding="keep") as device:
        with device.together():
            for i, body in enumerate(bodies):
                with device.stream(streams[i] if streams else 0):
                    ctas = grid if 0 < i < len(bodies) - 1 else 1
                    device.launch(kernel(body), [a, b], grid=(ctas,), block=(1,), dependent=True)
        return checks(device.findings)


def test_launches_of_one_batch_depend_on_each_other_too() -> None:
    wait = "griddepcontrol.wait;"
    first, read = f"{wait} {FIRST}", "ld.global.b32 %r3, [%d1];"
    done = "griddepcontrol.launch_dependents;"
    assert together(first, read) == {"pdl"}
    assert together(first, f"{wait} {read}") == set()
    assert together(first.replace(done, ""), read) == set()  # it begins when the first has ended
    assert together(first, f"{wait} {done}", read) == set()  # the first is complete when the third begins
    assert together(first, f"{done} {wait}", read) == {"pdl"}  # let go of before that
    assert together(first, *[f"{done} {wait}"] * 3, read) == {"pdl"}
    assert together(first, f"{done} {wait}", wait, read) == set()  # it begins when the one before has ended
    assert together(first, "mov.u32 %r3, 0;", read) == {"pdl"}  # and that waited for nobody
    once = "mov.u32 %r3, %ctaid.x; setp.eq.u32 %p1, %r3, 0; @%p1 griddepcontrol.launch_dependents;"
    assert together(first, f"{once} {wait}", read, grid=2) == set()  # the other CTA lets go at its end
    assert together(first, done, read) == {"pdl"}
    assert together(f"{wait} {done} {read}", "st.global.b32 [%d1], 1;") == {"pdl"}
    assert together(first, read, streams=(0, 1)) == {"race"}


@pytest.mark.parametrize(
    ("between", "found"),
    [
        ("griddepcontrol.launch_dependents; griddepcontrol.wait;", {"pdl"}),
        ("griddepcontrol.wait; griddepcontrol.launch_dependents;", set()),
        ("griddepcontrol.wait;", set()),
    ],
)
def test_the_launch_before_the_last(between: str, found: set[str]) -> None:
    """What is between lets go of the last one before or behind its own wait for the first."""
    a, b, c = words(), words(), words()
    with emulator.device("sm_90a", on_finding="keep") as device:
        device.launch(kernel(FIRST), [a, b], block=(1,))
        device.launch(kernel(between), [c, c], block=(1,), dependent=True)
        device.launch(kernel(SECOND), [a, c], block=(1,), dependent=True)
    assert checks(device.findings) == found


@pytest.mark.parametrize(
    ("last", "found"),
    [
        ("griddepcontrol.launch_dependents; griddepcontrol.wait;", {"pdl"}),
        ("griddepcontrol.wait; griddepcontrol.launch_dependents;", set()),
    ],
)
def test_a_launch_behind_a_batch(last: str, found: set[str]) -> None:
    """It may begin beside those of the batch that the last one of their stream did not wait for."""
    a, b, c = words(), words(), words()
    with emulator.device("sm_90a", on_finding="keep") as device:
        with device.together():
            device.launch(kernel(FIRST), [a, b], block=(1,))
            device.launch(kernel(last), [c, c], block=(1,), dependent=True)
        device.launch(kernel(SECOND), [a, c], block=(1,), dependent=True)
    assert checks(device.findings) == found


def test_a_drained_stream_has_no_predecessor() -> None:
    a, b = words(), words()
    with emulator.device("sm_90a") as device:
        device.launch(kernel(FIRST), [a, b], block=(1,))
        device.synchronize()
        device.launch(kernel(SECOND), [a, b], block=(1,), dependent=True)


def test_a_predecessor_whose_kernel_skipped_the_wait_still_counts() -> None:
    a, b, c = words(), words(), words()
    with emulator.device("sm_90a", on_finding="keep") as device:
        device.launch(kernel(FIRST), [a, b], block=(1,))
        device.launch(
            kernel("griddepcontrol.launch_dependents; st.global.b32 [%d2], 1;"),
            [c, b],
            block=(1,),
            dependent=True,
        )
        device.launch(kernel(SECOND), [a, c], block=(1,), dependent=True)
    assert checks(device.findings) == {"pdl"}
