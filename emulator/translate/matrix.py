"""Matrix and tensor-memory instructions to calls of the tensor units (csrc/tensor/units.h).

`lower` takes bulk copies (copies.py) as well."""

from __future__ import annotations

import re
from typing import Any

from emulator.ptx.ir import Entry, Ins, Mem, Reg, Vec
from emulator.translate import copies
from emulator.translate.operands import call, expect, inputs, items, known, outputs, registers

FORMATS = {
    "f16": "EMU_F16",
    "bf16": "EMU_BF16",
    "tf32": "EMU_TF32",
    "e4m3": "EMU_E4M3",
    "e5m2": "EMU_E5M2",
    "s8": "EMU_S8",
    "u8": "EMU_U8",
    "f32": "EMU_F32",
    "s32": "EMU_S32",
}
BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
# mma.sync m, n, k in bytes of K a row: what each operand width allows.
MMA_SHAPES = {
    2: {"m16n8k8", "m16n8k16"},
    4: {"m16n8k4", "m16n8k8"},
    1: {"m16n8k16", "m16n8k32"},
}
LD_SHAPES = {
    "32x32b": "EMU_LD_32X32B",
    "16x64b": "EMU_LD_16X64B",
    "16x128b": "EMU_LD_16X128B",
    "16x256b": "EMU_LD_16X256B",
    "16x32bx2": "EMU_LD_16X32BX2",
}
LD_REGISTERS = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}
CP_SHAPES = {
    ("128x256b", None): "EMU_CP_128X256B",
    ("128x128b", None): "EMU_CP_128X128B",
    ("64x128b", "warpx2::02_13"): "EMU_CP_64X128B_02_13",
    ("64x128b", "warpx2::01_23"): "EMU_CP_64X128B_01_23",
    ("32x128b", "warpx4"): "EMU_CP_32X128B",
}
KINDS = {
    "kind::f16": "EMU_KIND_F16",
    "kind::tf32": "EMU_KIND_TF32",
    "kind::f8f6f4": "EMU_KIND_F8F6F4",
    "kind::i8": "EMU_KIND_I8",
}


def lower(ins: Ins, ctx: Any) -> bool:
    """Emits the call of one instruction; False if it is of none of these families. Unknown forms end in
    ctx.error."""
    parts = ins.parts
    for prefix, handler in (*HANDLERS, *copies.HANDLERS):
        if parts[: len(prefix)] == list(prefix):
            handler(ins, parts, ctx)
            return True
    return False


# ---- warp matrices


def _ldmatrix(ins: Ins, parts: list[str], ctx: Any) -> None:
    store = parts[0] == "stmatrix"
    if parts[1:4] != ["sync", "aligned", "m8n8"] or parts[4] not in ("x1", "x2", "x4") or parts[-1] != "b16":
        ctx.error("this shape is not known")
    count, rest = int(parts[4][1:]), parts[5:-1]
    transposed = int("trans" in rest)
    known(ctx, rest, {"trans", "shared", "shared::cta"})
    expect(ctx, ins.operands, 2)
    address, vector = ins.operands if store else reversed(ins.operands)
    regs = registers(ctx, vector, count)
    vectors = inputs(regs, ctx) if store else outputs(regs, ctx)
    call(ctx, f"emu_{parts[0]}", count, transposed, vectors, ctx.address32(address))


def _movmatrix(ins: Ins, parts: list[str], ctx: Any) -> None:
    if parts[1:] != ["sync", "aligned", "m8n8", "trans", "b16"]:
        ctx.error("this shape is not known")
    out, source = ins.operands
    call(ctx, "emu_movmatrix", ctx.out32(out), ctx.u32(source))


def watched(entry: Entry) -> frozenset[str]:
    """Registers that some wgmma or tcgen05.ld of an entry works on, and copies of them."""
    names: set[str] = set()
    for ins in entry.body:
        if isinstance(ins, Ins) and _starts_flight(ins):
            for op in ins.operands[:2]:
                names |= {item.name for item in items(op) if isinstance(op, Vec) and isinstance(item, Reg)}
    moves = [defs_uses_of_mov(ins) for ins in entry.body if isinstance(ins, Ins) and ins.parts[0] == "mov"]
    size = 0
    while names and size != len(names):
        size = len(names)
        for to, source in moves:
            if names & set(source):
                names |= set(to)
    return frozenset(names)


def defs_uses_of_mov(ins: Ins) -> tuple[list[str], list[str]]:
    """Names of the registers that a mov writes and reads."""
    to, source = ([item.name for item in items(op) if isinstance(item, Reg)] for op in ins.operands)
    return to, source


def _starts_flight(ins: Ins) -> bool:
    return ins.parts[:2] in (["wgmma", "mma_async"], ["tcgen05", "ld"])


def in_flight(ins: Ins, defs: list[Reg], uses: list[Reg], names: frozenset[str], ctx: Any) -> None:
    """Emits the question whether an instruction touches a register before what works on it is waited for."""
    if _starts_flight(ins):
        defs = []  # wgmma may add to its own accumulator, ld load anew
    reads, writes = [r for r in uses if r.name in names], [r for r in defs if r.name in names]
    if not reads and not writes:
        return
    if ins.parts[0] == "mov" and uses and all(r.name in ctx.place for r in (*defs, *uses)):
        to, source = (", ".join(ctx.reg(r) for r in side) for side in (defs, uses))
        lists = f"(const void *[]){{{to}, 0}}, (const void *[]){{{source}, 0}}"
        ctx.emit(f"  if (emu_flight_any(w)) emu_flight_moved(w, {lists});")
        return
    asked = "".join(
        f' emu_flight_touched(w, {ctx.reg(r)}, "{r.name.split("@")[0]}", {int(write)});'
        for registers_, write in ((reads, False), (writes, True))
        for r in dict.fromkeys(registers_)
    )
    ctx.emit(f"  if (emu_flight_any(w)) {{ w->line = {ins.line};{asked} }}")


def _shape(ctx: Any, text: str) -> tuple[int, int, int]:
    match = re.fullmatch(r"m(\d+)n(\d+)k(\d+)", text)
    if not match:
        ctx.error(f"{text} is no shape")
        raise AssertionError
    m, n, k = map(int, match.groups())
    return m, n, k


def _accumulated(ctx: Any, dtype: str, atype: str, btype: str) -> None:
    """The types of D that a pair of operand types allows."""
    if atype not in BYTES or btype not in BYTES or BYTES[atype] != BYTES[btype]:
        ctx.error(f"operands .{atype} and .{btype} are not known together")
    integer = atype in ("s8", "u8")
    if integer != (btype in ("s8", "u8")) or (BYTES[atype] > 1 and atype != btype):
        ctx.error(f"operands .{atype} and .{btype} do not go together")
    allowed = {"s32"} if integer else {"f32"} if atype in ("bf16", "tf32") else {"f32", "f16"}
    if dtype not in allowed:
        ctx.error(f"a .{dtype} accumulator is not known for .{atype}")


def _accumulator_registers(dtype: str, rows: int, n: int) -> int:
    return rows * n // 32 // (2 if dtype == "f16" else 1)


def _mma(ins: Ins, parts: list[str], ctx: Any) -> None:
    if parts[1:3] != ["sync", "aligned"] or parts[4:6] != ["row", "col"]:
        ctx.error("only mma.sync.aligned of .row.col is known")
    m, n, k = _shape(ctx, parts[3])
    *rest, dtype, atype, btype, ctype = parts[6:]
    known(ctx, rest, {"satfinite"})
    _accumulated(ctx, dtype, atype, btype)
    if ctype not in ("f32", "f16", "s32") or (ctype == "s32") != (dtype == "s32"):
        ctx.error(f"a .{ctype} addend is not known")
    if parts[3] not in MMA_SHAPES[BYTES[atype]]:
        ctx.error(f"the shape .{parts[3]} is not known for .{atype}")
    if rest and dtype != "s32":
        ctx.error(".satfinite needs integers")
    expect(ctx, ins.operands, 4)
    d, a, b, c = ins.operands
    size = BYTES[atype]
    vectors = (
        outputs(registers(ctx, d, _accumulator_registers(dtype, m, n)), ctx),
        inputs(registers(ctx, a, m * k * size // 128), ctx),
        inputs(registers(ctx, b, n * k * size // 128), ctx),
        inputs(registers(ctx, c, _accumulator_registers(ctype, m, n)), ctx),
    )
    formats = ", ".join(FORMATS[f] for f in (atype, btype, dtype, ctype))
    call(ctx, "emu_mma_sync", m, n, k, formats, len(rest), ", ".join(vectors))


# ---- wgmma


def _wgmma(ins: Ins, parts: list[str], ctx: Any) -> None:
    if parts[2:4] != ["sync", "aligned"]:
        ctx.error("only .sync.aligned is known")
    m, n, k = _shape(ctx, parts[4])
    dtype, atype, btype, *rest = parts[5:]
    known(ctx, rest, {"satfinite"})
    _accumulated(ctx, dtype, atype, btype)
    size, integer = BYTES[atype], dtype == "s32"
    if m != 64 or n % 8 or not 8 <= n <= 256 or k * size != 32:
        ctx.error(f"the shape .{parts[4]} is not known for .{atype}")
    if integer and n > 32 and n % 16:
        ctx.error(f"the shape .{parts[4]} is not known for .{atype}")
    if rest and not integer:
        ctx.error(".satfinite needs integers")
    d, a, b, scale_d, *immediates = ins.operands
    from_registers = isinstance(a, Vec)
    scales, transposes = 0 if integer else 2, (1 if from_registers else 2) if size == 2 else 0
    expect(ctx, immediates, scales + transposes)
    values = [ctx.imm(op) for op in immediates]
    if any(v not in (1, -1) for v in values[:scales]) or any(v not in (0, 1) for v in values[scales:]):
        ctx.error("imm-scale is 1 or -1, imm-trans 0 or 1")
    negate_a, negate_b = (int(v == -1) for v in values[:2]) if scales else (0, 0)
    mn_a, mn_b = ([0, *values[scales:]] if from_registers else values[scales:]) if transposes else (0, 0)
    if from_registers:
        left = f"0, {inputs(registers(ctx, a, 16 * k * size // 128), ctx)}"
    else:
        left = f"{ctx.u64(a)}, 0"
    out = outputs(registers(ctx, d, _accumulator_registers(dtype, 16, n)), ctx)
    formats = ", ".join(FORMATS[f] for f in (atype, btype, dtype))
    call(
        ctx,
        "emu_wgmma",
        n,
        k,
        formats,
        len(rest),
        out,
        left,
        ctx.u64(b),
        ctx.u32(scale_d),
        negate_a,
        negate_b,
        mn_a,
        mn_b,
    )


def _wgmma_fence(ins: Ins, parts: list[str], ctx: Any) -> None:
    known(ctx, parts[2:], {"sync", "aligned"})


def _wgmma_commit(ins: Ins, parts: list[str], ctx: Any) -> None:
    call(ctx, "emu_wgmma_commit")


def _wgmma_wait(ins: Ins, parts: list[str], ctx: Any) -> None:
    call(ctx, "emu_wgmma_wait", ctx.imm(ins.operands[0]))


# ---- tcgen05


def _groups(ctx: Any, parts: list[str]) -> int:
    found = [p for p in parts if p.startswith("cta_group::")]
    if found not in (["cta_group::1"], ["cta_group::2"]):
        ctx.error("one .cta_group::1 or .cta_group::2 is needed")
    return int(found[0][-1])


def _tcgen05_alloc(ins: Ins, parts: list[str], ctx: Any) -> None:
    known(ctx, parts[2:], {"cta_group::1", "cta_group::2", "sync", "aligned", "shared::cta", "b32"})
    to, columns = ins.operands
    ctx.blocking(
        f"emu_tcgen05_alloc(w, {ctx.mask}, {_groups(ctx, parts)}, {ctx.address32(to)}, {ctx.u32(columns)})"
    )


def _tcgen05_dealloc(ins: Ins, parts: list[str], ctx: Any) -> None:
    known(ctx, parts[2:], {"cta_group::1", "cta_group::2", "sync", "aligned", "b32"})
    address, columns = ins.operands
    call(ctx, "emu_tcgen05_dealloc", _groups(ctx, parts), ctx.u32(address), ctx.u32(columns))


def _tcgen05_relinquish(ins: Ins, parts: list[str], ctx: Any) -> None:
    known(ctx, parts[2:], {"cta_group::1", "cta_group::2", "sync", "aligned"})
    call(ctx, "emu_tcgen05_relinquish", _groups(ctx, parts))


def _tcgen05_mma(ins: Ins, parts: list[str], ctx: Any) -> None:
    groups = _groups(ctx, parts)
    kinds = [p for p in parts if p.startswith("kind::")]
    if len(kinds) != 1 or kinds[0] not in KINDS:
        ctx.error(f"the kind {'.'.join(kinds)} is not known")
    collectors = {f"collector::a::{use}" for use in ("fill", "use", "lastuse", "discard")}
    known(ctx, parts[2:], {"cta_group::1", "cta_group::2", *KINDS, *collectors})
    d, a, b, instruction, *rest = ins.operands
    disabled = "0"
    if rest and isinstance(rest[0], Vec):
        disabled = inputs(registers(ctx, rest.pop(0), 4 * groups), ctx)
    if len(rest) not in (1, 2):
        ctx.error("enable-input-d, and at most a scale, were expected")
    scale = ctx.imm(rest[1]) if len(rest) == 2 else 0
    if not 0 <= scale <= 15 or (scale and kinds[0] not in ("kind::f16", "kind::tf32")):
        ctx.error("scale-input-d is 0 to 15, for kinds f16 and tf32")
    left = f"0, {ctx.address32(a)}" if isinstance(a, Mem) else f"{ctx.u64(a)}, 0"
    call(
        ctx,
        "emu_tcgen05_mma",
        groups,
        KINDS[kinds[0]],
        ctx.address32(d),
        left,
        ctx.u64(b),
        ctx.u32(instruction),
        disabled,
        ctx.u32(rest[0]),
        scale,
    )


def _tcgen05_commit(ins: Ins, parts: list[str], ctx: Any) -> None:
    allowed = {
        "cta_group::1",
        "cta_group::2",
        "mbarrier::arrive::one",
        "shared::cluster",
        "multicast::cluster",
        "b64",
    }
    known(ctx, parts[2:], allowed)
    multicast = "multicast::cluster" in parts
    expect(ctx, ins.operands, 1 + multicast)
    mask = ctx.u32(ins.operands[1]) if multicast else "0"
    call(ctx, "emu_tcgen05_commit", _groups(ctx, parts), ctx.address32(ins.operands[0]), mask)


def _tcgen05_ld(ins: Ins, parts: list[str], ctx: Any) -> None:
    store = parts[1] == "st"
    packing = "unpack::16b" if store else "pack::16b"
    if parts[2:4] != ["sync", "aligned"] or parts[4] not in LD_SHAPES or parts[-1] != "b32":
        ctx.error("this form is not known")
    rest = parts[6:-1]
    known(ctx, rest, {packing})
    shape, num = parts[4], int(parts[5][1:])
    operands = list(ins.operands)
    vector, address = (operands.pop(-1), operands.pop(0)) if store else (operands.pop(0), operands.pop(0))
    expect(ctx, operands, int(shape == "16x32bx2"))
    split = ctx.imm(operands[0]) if operands else 0
    regs = registers(ctx, vector, LD_REGISTERS[shape] * num)
    if len(regs) > 128:
        ctx.error("more than 128 registers")
    vectors = inputs(regs, ctx) if store else outputs(regs, ctx)
    call(
        ctx,
        f"emu_tcgen05_{parts[1]}",
        LD_SHAPES[shape],
        num,
        len(rest),
        vectors,
        ctx.address32(address),
        split,
    )


def _tcgen05_wait(ins: Ins, parts: list[str], ctx: Any) -> None:
    call(ctx, f"emu_tcgen05_wait_{parts[1][-2:]}")


def _tcgen05_fence(ins: Ins, parts: list[str], ctx: Any) -> None:
    """Orders tcgen05 operations around a synchronisation; the units act at once and in order."""


def _tcgen05_cp(ins: Ins, parts: list[str], ctx: Any) -> None:
    multicast = next((p for p in parts if p.startswith("warpx")), None)
    shape = CP_SHAPES.get((parts[3], multicast))
    if shape is None:
        ctx.error("this shape is not known")
        raise AssertionError
    known(ctx, parts[4:], {multicast or ""})
    address, descriptor = ins.operands
    call(ctx, "emu_tcgen05_cp", _groups(ctx, parts), shape, ctx.address32(address), ctx.u64(descriptor))


# The first match counts.
HANDLERS = [
    (("ldmatrix",), _ldmatrix),
    (("stmatrix",), _ldmatrix),
    (("movmatrix",), _movmatrix),
    (("mma",), _mma),
    (("wgmma", "mma_async"), _wgmma),
    (("wgmma", "fence"), _wgmma_fence),
    (("wgmma", "commit_group"), _wgmma_commit),
    (("wgmma", "wait_group"), _wgmma_wait),
    (("tcgen05", "alloc"), _tcgen05_alloc),
    (("tcgen05", "dealloc"), _tcgen05_dealloc),
    (("tcgen05", "relinquish_alloc_permit"), _tcgen05_relinquish),
    (("tcgen05", "mma"), _tcgen05_mma),
    (("tcgen05", "commit"), _tcgen05_commit),
    (("tcgen05", "ld"), _tcgen05_ld),
    (("tcgen05", "st"), _tcgen05_ld),
    (("tcgen05", "wait::ld"), _tcgen05_wait),
    (("tcgen05", "wait::st"), _tcgen05_wait),
    (("tcgen05", "fence::before_thread_sync"), _tcgen05_fence),
    (("tcgen05", "fence::after_thread_sync"), _tcgen05_fence),
    (("tcgen05", "cp"), _tcgen05_cp),
]
