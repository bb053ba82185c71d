"""Faults put into small tcgen05 and wgmma kernels: each is found, by the check that it is a fault of."""

from __future__ import annotations

import pytest
import torch

from tests.emulator.asm import checks, run

ZEROS16 = ", ".join(["%r4"] * 16)

# A (128 x 16 bf16) lies at offset 0, B (16 x 16) at 4096, an mbarrier at 5120, the tensor memory's address at
# 5136: no swizzle, 128 bytes between columns of core matrices, 256 between their rows. Four warps.
FILL = """
mov.u32 %r4, 0; shl.b32 %r3, %r1, 4; add.s32 %r3, %r2, %r3;
st.shared.v4.b32 [%r3], {%r4, %r4, %r4, %r4}; st.shared.v4.b32 [%r3+2048], {%r4, %r4, %r4, %r4};
setp.ge.u32 %p1, %r1, 32; setp.ne.u32 %p2, %r1, 0;
@%p1 bra FILLED; st.shared.v4.b32 [%r3+4096], {%r4, %r4, %r4, %r4}; FILLED:
fence.proxy.async.shared::cta;
shr.u32 %r6, %r2, 4; and.b32 %r6, %r6, 0x3fff; cvt.u64.u32 %d5, %r6;
"""
TCGEN05 = (
    FILL
    + f"""
@%p1 bra REST; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2+5136], 32; REST:
@%p2 bra NOINIT; mbarrier.init.shared.b64 [%r2+5120], 1; NOINIT:
bar.sync 0;
ld.shared.b32 %r5, [%r2+5136];
shr.u32 %r9, %r1, 5; shl.b32 %r9, %r9, 21; add.s32 %r9, %r9, %r5;
tcgen05.st.sync.aligned.32x32b.x16.b32 [%r9], {{{ZEROS16}}};
tcgen05.wait::st.sync.aligned;
tcgen05.fence::before_thread_sync;
bar.sync 1;
@%p2 bra ISSUED;
or.b64 %d5, %d5, {8 << 16 | 16 << 32 | 1 << 46}; add.s64 %d6, %d5, 256;
mov.u32 %r8, {1 << 4 | 1 << 7 | 1 << 10 | 2 << 17 | 8 << 24}; setp.eq.u32 %p3, %r2, %r2;
tcgen05.mma.cta_group::1.kind::f16 [%r5], %d5, %d6, %r8, %p3;
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r2+5120];
ISSUED:
W: mbarrier.try_wait.parity.shared.b64 %p4, [%r2+5120], 0; @!%p4 bra W;
tcgen05.fence::after_thread_sync;
tcgen05.ld.sync.aligned.32x32b.x2.b32 {{%r10, %r11}}, [%r9];
tcgen05.wait::ld.sync.aligned;
add.u32 %r12, %r10, %r11;
bar.sync 2;
@%p1 bra END; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 32; END:
"""
)
WGMMA = (
    FILL
    + f"""
or.b64 %d5, %d5, {8 << 16 | 16 << 32}; add.s64 %d6, %d5, 256;
mov.u32 %r10, %r4; mov.u32 %r11, %r4; mov.u32 %r12, %r4; mov.u32 %r13, %r4; setp.ne.u32 %p3, %r2, %r2;
bar.sync 0;
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%r10, %r11, %r12, %r13}}, %d5, %d6, %p3, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
bar.sync 1;
st.shared.v4.b32 [%r3], {{%r10, %r11, %r12, %r13}};
"""
)
COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r2+5120];"
ALLOC = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2+5136], 32;"
DEALLOC = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 32;"
STORE = f"tcgen05.st.sync.aligned.32x32b.x16.b32 [%r9], {{{ZEROS16}}};"
WAIT = "W: mbarrier.try_wait.parity.shared.b64 %p4, [%r2+5120], 0; @!%p4 bra W;"

# name: (right kernel, what replaces what, check; several where the schedule decides which sees it first)
FAULTS = {
    "proxy-fence-missing": (TCGEN05, ("fence.proxy.async.shared::cta;", ""), "proxy"),
    "barrier-before-the-mma-missing": (TCGEN05, ("bar.sync 1;", ""), "uninitialized race async"),
    "st-not-waited-for": (TCGEN05, ("tcgen05.wait::st.sync.aligned;", ""), "race"),
    "mma-not-waited-for": (TCGEN05, (WAIT, ""), "async"),
    "wrong-parity": (TCGEN05, ("[%r2+5120], 0;", "[%r2+5120], 1;"), "async race"),
    "ld-not-waited-for": (TCGEN05, ("tcgen05.wait::ld.sync.aligned;", ""), "async"),
    "commit-missing": (TCGEN05, (COMMIT, ""), "deadlock"),
    "commit-to-another-barrier": (TCGEN05, (COMMIT, COMMIT.replace("5120", "5128")), "mbarrier"),
    "not-freed": (TCGEN05, (DEALLOC, ""), "tmem"),
    "freed-twice": (TCGEN05, (DEALLOC, DEALLOC + DEALLOC), "tmem"),
    "freed-too-early": (TCGEN05, ("bar.sync 2;", ""), "tmem race"),
    "part-freed": (TCGEN05, (DEALLOC, DEALLOC.replace(", 32", ", 16")), "tmem"),
    "not-allocated": (
        TCGEN05,
        (ALLOC, "st.shared.b32 [%r2+5136], %r4;"),
        "tmem",
    ),
    "odd-allocation": (TCGEN05, ("[%r2+5136], 32;", "[%r2+5136], 48;"), "operand"),
    "beyond-the-allocation": (TCGEN05, ("{%r10, %r11}, [%r9]", "{%r10, %r11}, [%r9+31]"), "tmem"),
    "accumulates-on-nothing": (TCGEN05, (STORE, ""), "uninitialized"),
    "lanes-of-another-warp": (TCGEN05, ("shl.b32 %r9, %r9, 21;", "shl.b32 %r9, %r9, 20;"), "tmem"),
    "descriptor-of-wgmma": (
        TCGEN05,
        (f"{8 << 16 | 16 << 32 | 1 << 46}", f"{8 << 16 | 16 << 32}"),
        "descriptor",
    ),
    "operand-never-written": (TCGEN05, ("add.s64 %d6, %d5, 256;", "add.s64 %d6, %d5, 384;"), "uninitialized"),
    "wgmma-proxy-fence-missing": (WGMMA, ("fence.proxy.async.shared::cta;", ""), "proxy"),
    "wgmma-barrier-missing": (WGMMA, ("bar.sync 0;", ""), "race"),
    "wgmma-not-waited-for": (WGMMA, ("wgmma.wait_group.sync.aligned 0;", ""), "async"),
    "wgmma-result-read-too-early": (
        WGMMA,
        ("wgmma.commit_group", "add.u32 %r20, %r13, 0; wgmma.commit_group"),
        "async",
    ),
    "wgmma-result-overwritten": (
        WGMMA,
        ("wgmma.commit_group", "mov.u32 %r13, 0; wgmma.commit_group"),
        "async",
    ),
    "wgmma-result-copied-and-read": (
        WGMMA,
        ("wgmma.commit_group", "mov.u32 %r20, %r13; add.u32 %r21, %r20, 0; wgmma.commit_group"),
        "async",
    ),
    "wgmma-not-committed": (WGMMA, ("wgmma.commit_group.sync.aligned;", ""), "race"),
    "wgmma-pending-group": (WGMMA, ("wait_group.sync.aligned 0", "wait_group.sync.aligned 1"), "race"),
    "wgmma-descriptors-differ": (
        WGMMA,
        ("cvt.u64.u32 %d5, %r6;", "add.u32 %r6, %r6, %r1; cvt.u64.u32 %d5, %r6;"),
        "descriptor",
    ),
}
INSTRUCTION = 1 << 4 | 1 << 7 | 1 << 10 | 2 << 17 | 8 << 24
FAULTS["instruction-of-a-wrong-shape"] = (
    TCGEN05,
    (f"{INSTRUCTION}", f"{INSTRUCTION | 1 << 23}"),
    "descriptor",
)


def found(body: str) -> list:
    target = "sm_100a" if "tcgen05" in body else "sm_90a"
    data = torch.zeros(64, dtype=torch.int32)
    return run(body, data, shared=8192, target=target, launch={"block": (128,)})


@pytest.mark.parametrize("body", [TCGEN05, WGMMA], ids=["tcgen05", "wgmma"])
def test_the_kernels_are_right(body):
    assert found(body) == []


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_by_its_check(name):
    body, (old, new), check = FAULTS[name]
    assert old in body
    findings = found(body.replace(old, new, 1))
    assert checks(findings) & set(check.split()), findings
