"""How matrix and copy instructions become unit calls, and which forms are refused."""

import re

import pytest

from emulator.ptx.ir import Ins
from emulator.ptx.parser import parse
from emulator.translate import matrix

HEADER = """.version 9.0
.target sm_100a
.address_size 64
.visible .entry k() {
.reg .pred %p<4>;
.reg .b16 %h<4>;
.reg .b32 %r<512>;
.reg .b64 %d<8>;
"""


class RefusedError(Exception):
    pass


class Context:
    """Names operands instead of emitting C."""

    mask = "m"

    def __init__(self):
        self.lines = []

    def emit(self, line):
        self.lines.append(line)

    blocking = emit

    def u32(self, operand):
        return re.sub(r"\W", "", getattr(operand, "name", str(getattr(operand, "value", operand))))

    u64 = out32 = out64 = u32

    def address32(self, operand):
        return f"at_{self.u32(operand.base)}"

    address64 = address32

    def imm(self, operand):
        return operand.value if operand.value < 1 << 63 else operand.value - (1 << 64)

    def error(self, text):
        raise RefusedError(text)


def lowered(line: str) -> list[str]:
    (entry,) = parse(HEADER + line + "\n}\n").entries.values()
    (instruction,) = [i for i in entry.body if isinstance(i, Ins)]
    context = Context()
    assert matrix.lower(instruction, context)
    return context.lines


def registers(first: int, count: int) -> str:
    return "{" + ", ".join(f"%r{first + i}" for i in range(count)) + "}"


def arrays(kind: str, first: int, count: int) -> str:
    return f"(emu_{kind}32[]){{" + ", ".join(f"r{first + i}" for i in range(count)) + "}"


FOUR = arrays("out", 0, 4)
IN4 = arrays("in", 4, 4)


@pytest.mark.parametrize(
    ("line", "call"),
    [
        (
            "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%r0, %r1, %r2, %r3}, [%r9+16];",
            f"emu_ldmatrix(w, m, 4, 1, {FOUR}, at_r9);",
        ),
        (
            "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r9], {%r4};",
            f"emu_stmatrix(w, m, 1, 0, {arrays('in', 4, 1)}, at_r9);",
        ),
        (
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%r0, %r1, %r2, %r3}, {%r4, %r5, %r6, %r7}, {%r8, %r9}, {%r10, %r11, %r12, %r13};",
            f"emu_mma_sync(w, m, 16, 8, 16, EMU_BF16, EMU_BF16, EMU_F32, EMU_F32, 0, {FOUR}, {IN4}, "
            f"{arrays('in', 8, 2)}, {arrays('in', 10, 4)});",
        ),
        (
            f"wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {registers(0, 8)}, %d0, %d1, %p0, 1, "
            "-1, 0, 1;",
            f"emu_wgmma(w, m, 16, 16, EMU_F16, EMU_F16, EMU_F32, 0, {arrays('out', 0, 8)}, d0, 0, d1, "
            "p0, 0, 1, 0, 1);",
        ),
        (
            f"wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {registers(0, 4)}, "
            f"{registers(4, 4)}, %d1, %p0, 1, 1;",
            f"emu_wgmma(w, m, 8, 8, EMU_TF32, EMU_TF32, EMU_F32, 0, {FOUR}, 0, {IN4}, d1, p0, 0, 0, 0, 0);",
        ),
        ("wgmma.wait_group.sync.aligned 3;", "emu_wgmma_wait(w, m, 3);"),
        (
            "tcgen05.mma.cta_group::1.kind::tf32 [%r0], [%r1], %d1, %r2, %p1;",
            "emu_tcgen05_mma(w, m, 1, EMU_KIND_TF32, at_r0, 0, at_r1, d1, r2, 0, p1, 0);",
        ),
        (
            f"tcgen05.mma.cta_group::2.kind::f16 [%r0], %d0, %d1, %r2, {registers(8, 8)}, %p1, 5;",
            f"emu_tcgen05_mma(w, m, 2, EMU_KIND_F16, at_r0, d0, 0, d1, r2, {arrays('in', 8, 8)}, p1, 5);",
        ),
        (
            "tcgen05.ld.sync.aligned.16x32bx2.x2.pack::16b.b32 {%r0, %r1}, [%r9], 24;",
            f"emu_tcgen05_ld(w, m, EMU_LD_16X32BX2, 2, 1, {arrays('out', 0, 2)}, at_r9, 24);",
        ),
        (
            "tcgen05.st.sync.aligned.16x256b.x1.b32 [%r9], {%r4, %r5, %r6, %r7};",
            f"emu_tcgen05_st(w, m, EMU_LD_16X256B, 1, 0, {IN4}, at_r9, 0);",
        ),
        (
            "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster"
            ".b64 [%r1], %h0;",
            "emu_tcgen05_commit(w, m, 2, at_r1, h0);",
        ),
        (
            "tcgen05.cp.cta_group::1.64x128b.warpx2::01_23 [%r0], %d0;",
            "emu_tcgen05_cp(w, m, 1, EMU_CP_64X128B_01_23, at_r0, d0);",
        ),
        (
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
            ".multicast::cluster"
            ".L2::cache_hint.cta_group::2 [%r0], [%d0, {%r1, %r2}], [%r3], %h0, %d1;",
            "emu_tma_load(w, m, 2, 2, at_r0, at_d0, (emu_in32[]){r1, r2}, at_r3, h0);",
        ),
        (
            "cp.reduce.async.bulk.tensor.1d.global.shared::cta.max.tile.bulk_group [%d0, {%r1}], [%r0];",
            "emu_tma_store(w, m, 1, EMU_REDUCE_MAX, at_d0, (emu_in32[]){r1}, at_r0);",
        ),
        (
            "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r0], [%r1], "
            "%r2, [%r3];",
            "emu_bulk_dsmem(w, m, at_r0, at_r1, r2, at_r3);",
        ),
        (
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.bf16 [%d0], [%r1], %r2;",
            "emu_bulk_store(w, m, at_d0, at_r1, r2, EMU_REDUCE_ADD, EMU_R_BF16);",
        ),
        ("cp.async.bulk.wait_group.read 1;", "emu_bulk_wait(w, m, 1);"),
    ],
)
def test_calls(line, call):
    assert lowered(line) == [call]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r0, %r1}, [%r2];", "shape"),
        (
            "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%r0}, {%r1}, {%r2}, {%r3};",
            "the shape .m8n8k4 is not known",
        ),
        (
            "mma.sync.aligned.m16n8k16.row.col.f16.bf16.bf16.f32 {%r0}, {%r1}, {%r2}, {%r3};",
            "a .f16 accumulator is not known for .bf16",
        ),
        (
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r0}, {%r1}, {%r2}, {%r3};",
            "1 registers where 4 were expected",
        ),
        (
            "wgmma.mma_async.sync.aligned.m64n12k16.f32.bf16.bf16 {%r0}, %d0, %d1, %p0, 1, 1, 0, 0;",
            "the shape .m64n12k16",
        ),
        (
            f"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {registers(0, 4)}, %d0, %d1, %p0, "
            "2, 1, 0, 0;",
            "imm-scale is 1 or -1",
        ),
        (
            "tcgen05.mma.cta_group::1.kind::mxf4 [%r0], %d0, %d1, %r2, %p1;",
            "the kind kind::mxf4 is not known",
        ),
        (
            "tcgen05.mma.cta_group::1.kind::f16.block_scale [%r0], %d0, %d1, %r2, %p1;",
            "the qualifier .block_scale is not known",
        ),
        ("tcgen05.mma.cta_group::1.kind::i8 [%r0], %d0, %d1, %r2, %p1, 3;", "scale-input-d"),
        ("tcgen05.ld.red.sync.aligned.32x32b.x2.min.f32 {%r0, %r1}, %r3, [%r2];", "this form is not known"),
        ("tcgen05.cp.cta_group::1.4x256b [%r0], %d0;", "this shape is not known"),
        (
            "cp.async.bulk.tensor.3d.shared::cta.global.im2col.mbarrier::complete_tx::bytes "
            "[%r0], [%d0, {%r1, %r2, %r3}], [%r4], {%h0};",
            "im2col",
        ),
        (
            "cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r0], "
            "[%d0, {%r1}], [%r4];",
            "1 coordinates for 3 dimensions",
        ),
        ("cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%d0], [%r1], %r2, %h0;", "cp_mask"),
    ],
)
def test_unknown_forms_are_refused(line, message):
    with pytest.raises(RefusedError, match=re.escape(message)):
        lowered(line)


@pytest.mark.parametrize(
    "opcode", ["tcgen05.shift.cta_group::1.down [%r0];", "wmma.load.a.sync.aligned [%r0];"]
)
def test_other_instructions_are_left_to_others(opcode):
    (entry,) = parse(HEADER + opcode + "\n}\n").entries.values()
    (instruction,) = [i for i in entry.body if isinstance(i, Ins)]
    assert not matrix.lower(instruction, Context())
