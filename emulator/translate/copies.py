"""Tensor and bulk copies to calls of the tensor units (csrc/tensor/units.h)."""

from __future__ import annotations

import re
from typing import Any

from emulator.ptx.ir import Imm, Ins, Mem, Operand
from emulator.translate.operands import call, expect, inputs, known

REDUCTIONS = {op: f"EMU_REDUCE_{op.upper()}" for op in ("add", "min", "max", "and", "or", "xor")}
REDUCED_TYPES = {t: f"EMU_R_{t.upper()}" for t in ("u32", "s32", "u64", "s64", "f16", "bf16", "f32", "f64")}
REDUCED_TYPES |= {"b32": "EMU_R_U32", "b64": "EMU_R_U64"}
HINTS = {"L2::cache_hint"}  # a last operand that only tells the cache something


def _without_hint(ins: Ins, parts: list[str]) -> list[Operand]:
    return list(ins.operands[:-1] if "L2::cache_hint" in parts else ins.operands)


def _tensor(ctx: Any, op: Operand, rank: int) -> tuple[str, str]:
    if not isinstance(op, Mem) or op.coords is None:
        ctx.error("a tensor operand [map, {coordinates}] was expected")
        raise AssertionError
    if len(op.coords) != rank:
        ctx.error(f"{len(op.coords)} coordinates for {rank} dimensions")
    return ctx.address64(op), inputs(op.coords, ctx)


def _values(ctx: Any, operands: list[Operand], kinds: str) -> list[str]:
    """Operands as a unit takes them, a letter each: g a global address, s a shared one, n a number."""
    take = {"g": ctx.address64, "s": ctx.address32, "n": ctx.u32}
    return [take[kind](op) for op, kind in zip(operands, kinds, strict=True)]


def _reduction(ctx: Any, parts: list[str]) -> str:
    found = next((p for p in parts if p in REDUCTIONS), None)
    if found is None:
        ctx.error("this reduction is not known")
        raise AssertionError
    return found


def _rank(ctx: Any, text: str) -> int:
    if not re.fullmatch(r"[1-5]d", text):
        ctx.error(f".{text} is no number of dimensions")
    return int(text[0])


def _tma(ins: Ins, parts: list[str], ctx: Any) -> None:
    if parts[5] == "global":
        _tma_out(ins, parts, ctx, _rank(ctx, parts[4]), "")
        return
    operands, rank = _without_hint(ins, parts), _rank(ctx, parts[4])
    allowed = {
        "global",
        "tile",
        "mbarrier::complete_tx::bytes",
        "multicast::cluster",
        "cta_group::1",
        "cta_group::2",
    }
    if parts[5] not in ("shared::cta", "shared::cluster"):
        ctx.error(f"a copy to .{parts[5]} is not known")
    known(ctx, parts[6:], allowed | HINTS)
    multicast = "multicast::cluster" in parts
    expect(ctx, operands, 3 + multicast)
    tensor, at = _tensor(ctx, operands[1], rank)
    mask = ctx.u32(operands[3]) if multicast else "0"
    groups = 2 if "cta_group::2" in parts else 1
    to, barrier = _values(ctx, [operands[0], operands[2]], "ss")
    call(ctx, "emu_tma_load", rank, groups, to, tensor, at, barrier, mask)


def _tma_out(ins: Ins, parts: list[str], ctx: Any, rank: int, reduction: str) -> None:
    operands = _without_hint(ins, parts)
    known(ctx, parts[6:], {"global", "shared::cta", "tile", "bulk_group", reduction, *HINTS})
    expect(ctx, operands, 2)
    tensor, at = _tensor(ctx, operands[0], rank)
    kind = REDUCTIONS.get(reduction, "EMU_REDUCE_NONE")
    call(ctx, "emu_tma_store", rank, kind, tensor, at, ctx.address32(operands[1]))


def _tma_prefetch(ins: Ins, parts: list[str], ctx: Any) -> None:
    operands, rank = _without_hint(ins, parts), _rank(ctx, parts[5])
    known(ctx, parts[6:], {"L2", "global", "tile", *HINTS})
    expect(ctx, operands, 1)
    tensor, at = _tensor(ctx, operands[0], rank)
    call(ctx, "emu_tma_prefetch", rank, tensor, at)


def _bulk_prefetch(ins: Ins, parts: list[str], ctx: Any) -> None:
    known(ctx, parts[4:], {"L2", "global", *HINTS})


def _tma_reduce(ins: Ins, parts: list[str], ctx: Any) -> None:
    _tma_out(ins, parts, ctx, _rank(ctx, parts[5]), _reduction(ctx, parts))


def _bulk(ins: Ins, parts: list[str], ctx: Any) -> None:
    operands = _without_hint(ins, parts)
    to, source = parts[3:5]
    if (to, source) == ("global", "shared::cta"):
        known(ctx, parts[5:], {"bulk_group", *HINTS})
        _bulk_out(ctx, operands, "EMU_REDUCE_NONE", "EMU_R_U32")
        return
    multicast = "multicast::cluster" in parts
    known(ctx, parts[5:], {"mbarrier::complete_tx::bytes", "multicast::cluster", *HINTS})
    expect(ctx, operands, 4 + multicast)
    if (to, source) == ("shared::cluster", "shared::cta") and not multicast:
        call(ctx, "emu_bulk_dsmem", *_values(ctx, operands, "ssns"))
    elif to in ("shared::cluster", "shared::cta") and source == "global":
        mask = ctx.u32(operands[4]) if multicast else "0"
        call(ctx, "emu_bulk_load", *_values(ctx, operands[:4], "sgns"), mask)
    else:
        ctx.error(f"a copy from .{source} to .{to} is not known")


def _bulk_out(ctx: Any, operands: list[Operand], reduction: str, kind: str) -> None:
    expect(ctx, operands, 3)
    call(ctx, "emu_bulk_store", *_values(ctx, operands, "gsn"), reduction, kind)


def _bulk_reduce(ins: Ins, parts: list[str], ctx: Any) -> None:
    reduction = _reduction(ctx, parts)
    if parts[4:6] != ["global", "shared::cta"] or parts[-1] not in REDUCED_TYPES:
        ctx.error("this reduction is not known")
    known(ctx, parts[6:-1], {"bulk_group", "noftz", reduction, *HINTS})
    _bulk_out(ctx, _without_hint(ins, parts), REDUCTIONS[reduction], REDUCED_TYPES[parts[-1]])


def _bulk_commit(ins: Ins, parts: list[str], ctx: Any) -> None:
    call(ctx, "emu_bulk_commit")


def _bulk_wait(ins: Ins, parts: list[str], ctx: Any) -> None:
    known(ctx, parts[4:], {"read"})
    if not isinstance(ins.operands[0], Imm):
        ctx.error("the number of groups must be a constant")
    call(ctx, "emu_bulk_wait", ctx.imm(ins.operands[0]))


# The first match counts.
HANDLERS = [
    (("cp", "async", "bulk", "commit_group"), _bulk_commit),
    (("cp", "async", "bulk", "wait_group"), _bulk_wait),
    (("cp", "async", "bulk", "prefetch", "tensor"), _tma_prefetch),
    (("cp", "async", "bulk", "prefetch"), _bulk_prefetch),
    (("cp", "async", "bulk", "tensor"), _tma),
    (("cp", "async", "bulk"), _bulk),
    (("cp", "reduce", "async", "bulk", "tensor"), _tma_reduce),
    (("cp", "reduce", "async", "bulk"), _bulk_reduce),
]
