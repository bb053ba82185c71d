"""Faults put into this project's kernels on purpose: the emulator catches each, by the right check.

A fault is a change of the kernel's PTX: an instruction dropped, a constant off by one, a flag turned. Where no rule of the machine
is broken, only the answer is: the check is then "result", the comparison with the exact one. tests/emulator/test_tensor_faults.py
holds those of the copy and matrix units.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

import emulator
from bindings import emulated, ops
from tests import harness
from tests.cases import named
from tests.emulator.world import world

CPU = harness.Backend("emulator", "cpu")
Rewrite = Callable[[str], str]


def change(pattern: str, to: str = "", *, count: int = 0, at: int | None = None) -> Rewrite:
    """Replaces matches of a pattern in the PTX: all, the first `count`, or the one numbered `at` (from the end if negative)."""

    def rewrite(ptx: str) -> str:
        found = list(re.finditer(pattern, ptx, re.MULTILINE))
        assert found, f"nothing matches {pattern}"
        chosen = [found[at]] if at is not None else found[: count or None]
        for match in reversed(chosen):
            ptx = ptx[: match.start()] + match.expand(to) + ptx[match.end() :]
        return ptx

    return rewrite


def drop(opcode: str, **which: int) -> Rewrite:
    """Drops instructions of an opcode (a pattern)."""
    return change(rf"^\s*{opcode}\b[^;]*;", "", **which)


@dataclass(frozen=True)
class Fault:
    """case: (operator, name of a case). check: by which it is caught, several where it depends on the
    interleaving, or "result"."""

    what: str
    case: tuple[str, str]
    rewrite: Rewrite
    check: str
    target: str = "sm_100a"


def swizzled_otherwise(ptx: str) -> str:
    """The layout of a tcgen05 shared-memory descriptor, bits 61 to 63: 64 bytes instead of 128."""
    (found, *_) = (
        m for m in re.finditer(r"or\.b64\s+%rd\d+, %rd\d+, (\d{19});", ptx) if int(m[1]) >> 61 == 2
    )
    return ptx[: found.start(1)] + str(int(found[1]) + (2 << 61)) + ptx[found.end(1) :]


def counter_in_an_argument(ptx: str) -> str:
    """The number of the round comes with the launch, which is replayed, instead of from memory."""
    counted = re.findall(r"add\.s32\s+%r\d+, (%r\d+), 1;", ptx)[-1]
    return change(rf"ld\.global\.b32\s+{re.escape(counted)}, \[[^\]]*\];", f"mov.b32 {counted}, 0;")(ptx)


GATE, APPLY_NORM = ("hc_gate", "T1-bf16-model"), ("hc_apply_norm", "T1-bf16-model")
FINALIZE, GDN = ("moe_finalize", "T3-bf16-small"), ("gdn_packed_decode", "T3-bf16-small")
MIX, SHARED = ("hc_mix", "T3-bf16-small"), ("shared_gate", "T3-bf16-small")

FAULTS = (
    Fault("a CTA barrier dropped", GATE, drop(r"bar\.sync"), "race"),
    Fault("a CTA barrier dropped before a sum", APPLY_NORM, drop(r"bar\.sync"), "race"),
    Fault("a barrier that waits for one warp too many", GATE, change(r"bar\.sync\s+(\d+)(, \d+)?;", r"bar.sync \1, 1024;"), "deadlock"),
    Fault("a row's last load one vector too far", GATE, change(r"(ld\.global\.v\d\.b\d+\s+\{[^}]*\}, \[%rd\d+)\+61440\]", r"\1+81920]"), "bounds"),
    Fault("an output one element too far", SHARED, change(r"(st\.global\.b32\s+\[%rd\d+)\]", r"\1+4]"), "bounds"),
    Fault("an output off its alignment", SHARED, change(r"(st\.global\.b32\s+\[%rd\d+)\]", r"\1+2]"), "alignment"),
    Fault("cp.async without its wait", FINALIZE, drop(r"cp\.async\.wait_group"), "race"),
    Fault("cp.async without its commit", FINALIZE, drop(r"cp\.async\.commit_group"), "race"),
    Fault("a slot that is not asked for its bounds", GDN, change(r"or\.pred\s+(%p\d+), (%p\d+), (%p\d+);", r"setp.ne.u32 \1, 0, 0;", count=1), "bounds"),
    Fault("a partial sum left in the wrong lane", GDN, change(r"shfl\.sync\.bfly\.b32\s+(%r\d+), (%r\d+), 1,", r"shfl.sync.bfly.b32 \1, \2, 2,", at=0), "result"),
    Fault("an fma that subtracts", GDN, change(r"fma\.rn\.f32\s+(%r\d+), (%r\d+), (%r\d+), (%r\d+);", r"neg.f32 %r2, \2; fma.rn.f32 \1, %r2, \3, \4;", at=0), "result"),
    Fault("an mbarrier that expects 16 bytes too many", MIX, change(r"(mbarrier\.arrive\.expect_tx[^,]*, \[%r\d+\]), (%r\d+);", r"add.u32 \2, \2, 16; \1, \2;", at=-1), "deadlock"),
    Fault("an mbarrier that expects 16 bytes too few", MIX, change(r"(mbarrier\.arrive\.expect_tx[^,]*, \[%r\d+\]), (%r\d+);", r"sub.u32 \2, \2, 16; \1, \2;", at=-1), "deadlock mbarrier"),
    Fault("waits by the wrong parity", MIX, change(r"(mbarrier\.try_wait\.parity\.shared\.b64 \w+, \[%r\d+\]), 0,", r"\1, 1,"), "race"),
    Fault("an mbarrier for one arrival too many", MIX, change(r"(mbarrier\.init\.shared\.b64\s+\[%r\d+\]), (%r\d+);", r"add.u32 \2, \2, 1; \1, \2;", at=-1), "deadlock"),
    Fault("no wait for the peers before their memory is written", MIX, drop(r"barrier\.cluster\.wait"), "race"),
    Fault("the async proxy fence dropped", MIX, drop(r"fence\.proxy\.async"), "proxy"),
    Fault("tensor memory not freed", MIX, drop(r"tcgen05\.dealloc"), "tmem"),
    Fault("tensor memory freed before it is read", MIX, change(r"(tcgen05\.ld\.[^;]*;)", r"tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r13, %r184; \1", at=-1), "tmem"),
    Fault("a descriptor of another swizzle", MIX, swizzled_otherwise, "result"),
    Fault("a swizzle left out of an address", MIX, change(r"xor\.b32\s+(%r\d+), (%r\d+), %r\d+;\n", r"mov.b32 \1, \2;\n", at=0), "result", "sm_90a"),
    Fault("the wait for the MMA dropped", MIX, change(r"mbarrier\.try_wait\.parity\.shared\.b64 (\w+), \[%r\d+\], 0, \d+;", r"setp.eq.u32 \1, 0, 0;", at=-1), "async"),
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.what.replace(" ", "-"))
def test_a_fault_is_caught(fault: Fault) -> None:
    case = named(*fault.case)
    inputs = case.inputs()
    placed = harness.Placement(case.op, inputs, "cpu")
    outs = placed.outputs()
    with emulated.options(checks=True, target=fault.target, rewrite=fault.rewrite, on_finding="keep"):
        results = harness.call(case.op, placed.arguments, CPU, outs)
        found = {f.check for f in emulated.device().findings}
    if fault.check == "result":
        with pytest.raises(AssertionError):
            harness.judge(case.op, inputs, results)
        assert not found
    else:
        assert found & set(fault.check.split())


@pytest.mark.parametrize("case", sorted({f.case for f in FAULTS}), ids=lambda c: c[0])
def test_the_kernels_without_a_fault_have_no_finding(case: tuple[str, str]) -> None:
    chosen = named(*case)
    inputs = chosen.inputs()
    placed = harness.Placement(chosen.op, inputs, "cpu")
    outs = placed.outputs()
    with emulated.options(target="sm_100a"):
        harness.judge(chosen.op, inputs, harness.call(chosen.op, placed.arguments, CPU, outs))
    placed.check()


def test_a_kernel_that_reads_its_predecessors_output_too_early() -> None:
    """Dropping griddepcontrol.wait of the gate: it reads what the norm before it wrote."""
    x = torch.randn(1, 2560).bfloat16()
    weight, inject = torch.randn(2560).bfloat16(), torch.randn(4, 2560).bfloat16()

    def early(ptx: str) -> str:
        return drop(r"griddepcontrol\.wait")(ptx) if "hypergate" in ptx else ptx

    for rewrite, expected in ((None, set()), (early, {"pdl"})):
        with emulated.options(checks=True, target="sm_100a", rewrite=rewrite, on_finding="keep"):
            with harness.bindings.backend("emulator"):
                ops.hc_gate(ops.grouped_gemma_rmsnorm(x, weight, group_size=640), inject)
            assert {f.check for f in emulated.device().findings} == expected


PUSH = r"st\.relaxed\.sys\.global\.v4\.b32"
WORLD_FAULTS: dict[str, tuple[Rewrite, str]] = {
    "markers-not-restored": (drop(PUSH, at=-1), "result"),
    "round-counter-not-advanced": (
        change(r"add\.s32(\s+%r\d+, %r\d+), 1;", r"add.s32\1, 0;", at=-1),
        "result",
    ),
    "counter-in-an-argument": (counter_in_an_argument, "result"),
    "round-before-not-awaited": (drop(r"griddepcontrol\.wait"), "pdl"),
    "no-release-before-the-pushes": (drop(r"fence\.release\.sys"), "result"),
    "pushes-that-are-not-strong": (change(PUSH, "st.global.v4.b32"), "race"),
    "polls-that-are-not-strong": (change(r"ld\.relaxed\.sys\.global\.v4", "ld.global.v4"), "race"),
    "a-push-to-one-rank-only": (drop(PUSH, at=0), "result"),
}


@pytest.mark.parametrize("name", WORLD_FAULTS)
def test_a_fault_of_the_collective_is_caught(name: str) -> None:
    """By a check, or by a wrong sum, a marker left, or the record of an expired wait, under one of some schedules."""
    rewrite, check = WORLD_FAULTS[name]
    for seed in range(24):
        schedule = ("random", "adversarial")[seed % 2]
        with world("sm_100a", 2, schedule=schedule, seed=seed, rewrite=rewrite, on_finding="keep") as w:
            done = w.rounds(seed, 4)
            wrong = not all(torch.equal(out, want) for outs, want in done for out in outs)
            wrong |= any(bool(r.buffer.any()) or bool(r.record.any()) for r in w.ranks)
            found = {f.check for f in w.device.findings}
        if wrong if check == "result" else check in found:
            return
    pytest.fail(f"not caught: {name}")


def test_the_table_is_long_enough() -> None:
    assert len(FAULTS) + len(WORLD_FAULTS) >= 20
    assert {c for f in FAULTS for c in f.check.split()} <= {*emulator.CATEGORIES, "result"}
