"""Moves, packing and conversions, lane by lane."""

from __future__ import annotations

from emulator.ptx.ir import WIDTHS, Ins, Operand, Vec
from emulator.translate.alu import FLOATS, MODE, bits_of, float_in, float_out
from emulator.translate.context import Context

_ROUND = ("rn", "rz", "rm", "rp", "rna", "rni", "rzi", "rmi", "rpi")


def lower(ins: Ins, ctx: Context) -> bool:
    """Emits a move or a conversion; False if it is none."""
    handler = _HANDLERS.get(ins.parts[0])
    if handler is None:
        return False
    handler(ins, ctx)
    return True


def _mov(ins: Ins, ctx: Context) -> None:
    kind = ins.parts[-1]
    d, a = ins.operands
    if kind == "b128":
        if isinstance(d, Vec):
            for item, half in zip(d.items, ctx.halves(a), strict=True):
                ctx.put(item, f"{half}[i]", 64)
        elif isinstance(a, Vec):
            lo, hi = ctx.halves(d)
            for to, item in zip((lo, hi), a.items, strict=True):
                ctx.emit(f"L PUT64({to}, {ctx.lanes}, {ctx.val(item, 64)});")
        else:
            for to, half in zip(ctx.halves(d), ctx.halves(a), strict=True):
                ctx.emit(f"L PUT64({to}, {ctx.lanes}, {half}[i]);")
        return
    width = WIDTHS[kind]
    if isinstance(a, Vec):  # pack
        part = width // len(a.items)
        values = [ctx.val(x, bits_of(f"b{part}") if part >= 16 else 32) for x in a.items]
        cast = "uint64_t" if width == 64 else "uint32_t"
        mask = (1 << part) - 1
        ctx.put(
            d,
            " | ".join(f"(({cast})({v}) & 0x{mask:x}u) << {k * part}" for k, v in enumerate(values)),
            max(width, 32),
        )
    elif isinstance(d, Vec):  # unpack; the source may be one of the destinations
        part = width // len(d.items)
        name = ctx.temporary()
        cast = "uint64_t" if width == 64 else "uint32_t"
        ctx.emit(f"{cast} {name}[32]; L {name}[i] = {ctx.val(a, max(width, 32))};")
        mask = (1 << part) - 1
        for k, item in enumerate(d.items):
            ctx.put(item, f"(uint32_t)({name}[i] >> {k * part}) & 0x{mask:x}u")
    else:
        ctx.put(d, ctx.val(a, max(width, 32)), max(width, 32))


def _cvt(ins: Ins, ctx: Context) -> None:
    to, frm = ins.parts[-2], ins.parts[-1]
    mods = set(ins.parts[1:-2])
    d, *sources = ins.operands
    if to in ("f16x2", "bf16x2") and frm == "f32" and len(sources) == 2:
        if mods - {"rn", "relu", "rz"}:
            raise ctx.error("unknown form")
        suffix = "_rz" if "rz" in mods else ""
        hi, lo = (ctx.val(s) for s in sources)
        if "relu" in mods:
            lo, hi = (f"U(isa_relu(F({x})))" for x in (lo, hi))
        name = f"isa_{to[:-2]}{suffix}"
        ctx.put(d, f"{name}(F({lo})) | {name}(F({hi})) << 16")
        return
    unknown = mods - {"ftz", "sat", "satfinite", "relu", *_ROUND}
    known = [*FLOATS[:4], *(f"{s}{n}" for s in "us" for n in (8, 16, 32, 64))]
    if unknown or "satfinite" in mods or to not in known or frm not in known or len(sources) != 1:
        raise ctx.error("unknown conversion")
    a, mode = sources[0], next((MODE[m] for m in mods if m in MODE), None)
    if frm in FLOATS:
        x = float_in(ctx, a, frm, "ftz" in mods)
        if to in FLOATS:
            _cvt_float(ctx, d, to, frm, x, mods, mode)
            return
        if mode is None:
            raise ctx.error("a float-to-integer conversion without rounding")
        bits = int(to[1:])
        text = f"isa_to_{to[0]}((double){x}, {mode}, {bits})"
        text = (
            f"(uint64_t){text}"
            if bits == 64
            else f"(uint32_t){text}" + (f" & 0x{(1 << bits) - 1:x}u" if bits < 32 else "")
        )
        ctx.put(d, text, max(bits, 32))
        return
    width = int(frm[1:])
    source_bits = 64 if width == 64 else 32
    text = ctx.val(a, source_bits)
    text = f"({'int' if frm[0] == 's' else 'uint'}{width}_t)({text})"
    if to in FLOATS:
        if mode not in (0, None) and to != "f64":
            raise ctx.error("only round-to-nearest-even is emulated for this conversion")
        if to == "f64":
            ctx.put(d, f"DU((double){text})", 64)
        elif to == "f32":
            ctx.put(d, f"U((float){text})")
        else:
            ctx.put(d, f"isa_{to}(isa_odd_float((double){text}))")
        return
    bits = int(to[1:])
    if "sat" in mods:
        low = -(1 << (bits - 1)) if to[0] == "s" else 0
        high = (1 << (bits - 1)) - 1 if to[0] == "s" else (1 << bits) - 1
        wide = f"(__int128){text}"
        below, above = f"(__int128)({low}ll)", f"(__int128)({high}ull)"
        text = f"({wide} < {below} ? {below} : {wide} > {above} ? {above} : {wide})"
    if bits == 64:
        ctx.put(d, f"(uint64_t)(int64_t){text}" if frm[0] == "s" else f"(uint64_t){text}", 64)
    else:
        # a destination register wider than the type is sign- or zero-extended
        target = f"({'int' if to[0] == 's' else 'uint'}{bits}_t){text}"
        wide_register = ctx.width(d) == 64
        ctx.put(
            d,
            f"(uint64_t)(int64_t){target}" if wide_register else f"(uint32_t){target}",
            64 if wide_register else 32,
        )


def _cvt_float(ctx: Context, d: Operand, to: str, frm: str, x: str, mods: set[str], mode: int | None) -> None:
    if "relu" in mods:
        x = f"isa_relu({x})"
    integral = mods & {"rni", "rzi", "rmi", "rpi"}
    if to == "f64":
        ctx.put(d, f"DU((double)({x}))", 64)
    elif integral:
        if to != frm or to != "f32":
            raise ctx.error("unknown conversion")
        ctx.put(d, f"N((float)isa_rint({x}, {mode}))")
    elif to == "f32":
        if frm == "f64" and mode != 0:
            raise ctx.error("only round-to-nearest-even is emulated for this conversion")
        ctx.put(d, float_out(ctx, "f32", f"(float)({x})", "ftz" in mods, "sat" in mods))
    elif frm in ("f32", "f16", "bf16"):
        if mode == 1:
            ctx.put(d, f"isa_{to}_rz({x})")
        elif mode in (0, None):
            ctx.put(d, float_out(ctx, to, x, False, "sat" in mods))
        else:
            raise ctx.error("unknown rounding")
    else:
        ctx.put(d, f"isa_{to}(isa_odd_float({x}))")


def _cvta(ins: Ins, ctx: Context) -> None:
    d, a = ins.operands
    spaces = set(ins.parts[1:-1])
    bits = bits_of(ins.parts[-1])
    if bits != 64 or spaces - {"to", "shared", "shared::cluster", "shared::cta", "global", "param", "const"}:
        raise ctx.error("unknown form")
    text = ctx.val(a, 64)
    if spaces & {"shared", "shared::cluster", "shared::cta"}:
        text = (
            f"{text} & 0xffffffffull" if "to" in spaces else f"({text} & 0xffffffffull) | EMU_GENERIC_SHARED"
        )
    ctx.put(d, text, 64)


def _isspacep(ins: Ins, ctx: Context) -> None:
    d, a = ins.operands
    text = f"({ctx.val(a, 64)} & EMU_GENERIC_SHARED)"
    if ins.parts[1] == "global":
        text = f"!{text}"
    elif not ins.parts[1].startswith("shared"):
        raise ctx.error("unknown form")
    ctx.put(d, f"{text} ? ~0u : 0u")


def _testp(ins: Ins, ctx: Context) -> None:
    d, a = ins.operands
    x = f"F({ctx.val(a)})"
    table = {
        "finite": f"isfinite({x})",
        "infinite": f"isinf({x})",
        "number": f"!isnan({x})",
        "notanumber": f"isnan({x})",
        "normal": f"isnormal({x})",
        "subnormal": f"(fpclassify({x}) == FP_SUBNORMAL)",
    }
    if ins.parts[-1] != "f32" or ins.parts[1] not in table:
        raise ctx.error("unknown form")
    ctx.put(d, f"{table[ins.parts[1]]} ? ~0u : 0u")


def _copysign(ins: Ins, ctx: Context) -> None:
    d, a, b = ins.operands
    if ins.parts[-1] != "f32":
        raise ctx.error("unknown form")
    ctx.put(d, f"({ctx.val(a)} & 0x80000000u) | ({ctx.val(b)} & 0x7fffffffu)")


_HANDLERS = {
    "mov": _mov,
    "cvt": _cvt,
    "cvta": _cvta,
    "isspacep": _isspacep,
    "testp": _testp,
    "copysign": _copysign,
}
HANDLED = frozenset(_HANDLERS)
"""Opcodes that this module emits."""
