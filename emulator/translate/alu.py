"""Arithmetic: every instruction that computes lane by lane, as a C expression of lane i."""

from __future__ import annotations

from emulator.ptx.ir import WIDTHS, Ins, Operand, Pair, Sink
from emulator.translate.context import Context

FLOATS = ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2", "f32x2")
MODE = {"rn": 0, "rni": 0, "rz": 1, "rzi": 1, "rm": 2, "rmi": 2, "rp": 3, "rpi": 3}


def lower(ins: Ins, ctx: Context) -> bool:
    """Emits an arithmetic instruction; False if it is none."""
    handler = _HANDLERS.get(ins.parts[0])
    if handler is None:
        return False
    handler(ins, ctx)
    return True


def _mods(ins: Ins, ctx: Context, allowed: tuple[str, ...]) -> set[str]:
    mods = set(ins.parts[1:-1])
    unknown = mods - set(allowed)
    if unknown:
        raise ctx.error(f"unknown modifier .{unknown.pop()}")
    return mods


def bits_of(kind: str) -> int:
    return max(WIDTHS[kind], 32)


# ---- floating point
def float_in(ctx: Context, op: Operand, kind: str, ftz: bool, half: int = 0) -> str:
    """A C float (double for f64) from an operand."""
    if kind == "f64":
        return f"DF({ctx.val(op, 64)})"
    if kind == "f32x2":
        text = ctx.val(op, 64)
        text = f"F(isa_{'hi' if half else 'lo'}({text}))"
        return f"Z({text})" if ftz else text
    text = ctx.val(op)
    if kind in ("f16", "f16x2"):
        return f"emu_from_f16((uint16_t)({text}{' >> 16' if half else ''}))"
    if kind in ("bf16", "bf16x2"):
        return f"emu_from_bf16((uint16_t)({text}{' >> 16' if half else ''}))"
    return f"Z(F({text}))" if ftz else f"F({text})"


def float_out(ctx: Context, kind: str, value: str, ftz: bool, sat: bool) -> str:
    """Bits of a C float result."""
    if kind == "f64":
        return f"DU({value})"
    if sat:
        value = f"F(isa_sat({value}))"
    if kind in ("f16", "f16x2"):
        return f"isa_f16({value})"
    if kind in ("bf16", "bf16x2"):
        return f"isa_bf16({value})"
    return f"N(Z({value}))" if ftz else f"N({value})"


def _arith(ins: Ins, ctx: Context) -> None:
    kind = ins.parts[-1]
    op = ins.parts[0]
    if kind not in FLOATS:
        return _integer(ins, ctx)
    mixed = None
    if ins.parts[-2] == "f32" and kind in ("f16", "bf16"):
        mixed, kind = kind, "f32"
    mods = set(ins.parts[1:-1]) - {"f32"}
    directed = next((MODE[m] for m in ("rz", "rm", "rp") if m in mods), 0) if kind in ("f32", "f32x2") else 0
    unknown = (
        mods
        - {"rn", "ftz", "sat", "NaN", "xorsign", "abs", "relu"}
        - ({"rz", "rm", "rp"} if directed else set())
    )
    if unknown or "xorsign" in mods or "relu" in mods:
        raise ctx.error(f"unknown modifiers {sorted(unknown | mods & {'xorsign', 'relu'})}")
    ftz, sat = "ftz" in mods, "sat" in mods
    d, *sources = ins.operands

    def one(half: int) -> str:
        kinds = [kind] * len(sources)
        if mixed:
            kinds = [mixed, "f32"] if op in ("add", "sub") else [mixed, mixed, "f32"]
        a = [float_in(ctx, s, k, ftz, half) for s, k in zip(sources, kinds, strict=True)]
        if op in ("max", "min"):
            suffix = "_nan" if "NaN" in mods else ""
            text = f"isa_{op}{suffix}({a[0]}, {a[1]})"
            if len(a) == 3:
                text = f"isa_{op}{suffix}(F({text}), {a[2]})"
            if kind == "f64":
                raise ctx.error("f64 is not emulated here")
            if kind in ("f16", "f16x2", "bf16", "bf16x2"):
                return f"isa_{'f16' if 'bf' not in kind else 'bf16'}(F({text}))"
            return text
        if op in ("fma", "mad"):
            if kind == "f64":
                return f"DU(fma({a[0]}, {a[1]}, {a[2]}))"
            if kind in ("f16", "f16x2") and not sat:
                return f"isa_fma16({a[0]}, {a[1]}, {a[2]})"
            if kind in ("bf16", "bf16x2") and not sat:
                return f"isa_fmab16({a[0]}, {a[1]}, {a[2]})"
            if directed:
                text = f"isa_directed(isa_odd_sum((double){a[0]} * {a[1]}, {a[2]}), {directed})"
                return float_out(ctx, kind, text, ftz, sat)
            return float_out(ctx, kind, f"fmaf({a[0]}, {a[1]}, {a[2]})", ftz, sat)
        if directed:
            text = (
                f"(double){a[0]} * {a[1]}"
                if op == "mul"
                else f"isa_odd_sum({a[0]}, {'-' if op == 'sub' else ''}{a[1]})"
            )
            return float_out(ctx, kind, f"isa_directed({text}, {directed})", ftz, sat)
        sign = {"add": "+", "sub": "-", "mul": "*"}[op]
        return float_out(ctx, kind, f"({a[0]} {sign} {a[1]})", ftz, sat)

    _per_half(ctx, d, kind, one)
    return None


def _per_half(ctx: Context, d: Operand, kind: str, one) -> None:  # type: ignore[no-untyped-def]
    if kind == "f32x2":
        ctx.put(d, f"isa_pair({one(0)}, {one(1)})", 64)
    elif kind in ("f16x2", "bf16x2"):
        ctx.put(d, f"(({one(0)}) & 0xffffu) | ({one(1)}) << 16")
    else:
        ctx.put(d, one(0), bits_of(kind))


def _unary_float(ins: Ins, ctx: Context) -> None:
    kind, op = ins.parts[-1], ins.parts[0]
    if kind not in FLOATS:
        return _integer(ins, ctx)
    mods = _mods(ins, ctx, ("ftz",))
    d, a = ins.operands
    if kind == "f64":
        text = ctx.val(a, 64)
        ctx.put(d, f"{text} ^ 1ull << 63" if op == "neg" else f"{text} & ~(1ull << 63)", 64)
    elif kind == "f32x2":
        raise ctx.error("not emulated")
    else:
        sign = {"f32": "0x80000000u", "f16": "0x8000u", "bf16": "0x8000u"}.get(kind, "0x80008000u")
        text = ctx.val(a)
        if "ftz" in mods and kind == "f32":
            text = f"U(Z(F({text})))"
        ctx.put(d, f"{text} ^ {sign}" if op == "neg" else f"{text} & ~{sign}")
    return None


def _approx(ins: Ins, ctx: Context) -> None:
    op, kind = ins.parts[0], ins.parts[-1]
    mods = set(ins.parts[1:-1])
    unknown = mods - {"approx", "ftz", "rn", "full"}
    if unknown or kind not in ("f32", "f16", "bf16", "f16x2", "bf16x2", "f64"):
        raise ctx.error("unknown form")
    ftz = "ftz" in mods or (kind in ("bf16", "bf16x2"))
    d, *sources = ins.operands
    if kind == "f64":
        a = f"DF({ctx.val(sources[0], 64)})"
        table = {"rcp": f"1.0 / {a}", "sqrt": f"sqrt({a})", "rsqrt": f"1.0 / sqrt({a})"}
        if op == "div":
            table["div"] = f"{a} / DF({ctx.val(sources[1], 64)})"
        if op not in table:
            raise ctx.error("unknown form")
        ctx.put(d, f"DU({table[op]})", 64)
        return

    def one(half: int) -> str:
        a = [float_in(ctx, s, kind, ftz and kind == "f32", half) for s in sources]
        if op == "div":
            text = f"({a[0]} / {a[1]})" if "rn" in mods else f"isa_divf({a[0]}, {a[1]})"
        elif op == "sqrt":
            text = f"sqrtf({a[0]})"
        elif op == "rcp" and "rn" in mods:
            text = f"(1.0f / {a[0]})"
        else:
            text = f"isa_{op}({a[0]})"
        return float_out(ctx, kind, text, ftz, False)

    _per_half(ctx, d, kind, one)


# ---- integers
def _signed(text: str, bits: int, narrow: bool = False) -> str:
    return (
        f"(int64_t)({text})"
        if bits == 64
        else f"(int32_t)(int16_t)({text})"
        if narrow
        else f"(int32_t)({text})"
    )


def _integer(ins: Ins, ctx: Context) -> None:
    op, kind = ins.parts[0], ins.parts[-1]
    mods = set(ins.parts[1:-1])
    if kind not in WIDTHS or WIDTHS[kind] == 128:
        raise ctx.error(f"unknown type .{kind}")
    unknown = (
        mods - {"lo", "hi", "wide", "sat"} if op in ("mul", "mad", "add", "sub", "mul24") else mods - set()
    )
    if unknown or "sat" in mods:
        raise ctx.error(f"unknown modifier .{(unknown or mods).pop()}")
    bits, narrow, signed = bits_of(kind), WIDTHS[kind] == 16, kind[0] == "s"
    if kind == "pred" or WIDTHS[kind] == 8:
        raise ctx.error("unknown type here")
    d, *sources = ins.operands
    a = [ctx.val(s, bits) for s in sources]
    wide = list(a)
    if narrow:
        wide = [f"(uint32_t){_signed(x, 32, True)}" if signed else f"({x} & 0xffffu)" for x in a]
    sa = [_signed(x, bits, narrow) for x in a]
    unsigned64 = [f"(uint64_t)(uint32_t)({x})" for x in wide]
    signed64 = [f"(int64_t)(int32_t)({x})" for x in wide]
    if op in ("mul", "mad", "mul24") and "wide" in mods:
        product = (
            f"(uint64_t)({signed64[0]} * {signed64[1]})" if signed else f"({unsigned64[0]} * {unsigned64[1]})"
        )
        if narrow:
            text = f"(uint32_t){product}" + (f" + {ctx.val(sources[2], 32)}" if op == "mad" else "")
            ctx.put(d, text, 32)
        else:
            ctx.put(d, product + (f" + {ctx.val(sources[2], 64)}" if op == "mad" else ""), 64)
        return
    if op in ("mul", "mad") and "hi" in mods:
        if bits == 64:
            text = f"isa_mulhi{'s' if signed else 'u'}64({a[0]}, {a[1]})"
        elif narrow:
            text = f"(uint32_t)(({wide[0]}) * ({wide[1]})) >> 16"
        else:
            text = (
                f"(uint32_t)(({signed64[0]} * {signed64[1]}) >> 32)"
                if signed
                else f"(uint32_t)(({unsigned64[0]} * {unsigned64[1]}) >> 32)"
            )
        ctx.put(d, text + (f" + {a[2]}" if op == "mad" else ""), bits)
        return
    u = "s" if signed else "u"
    if op in ("div", "rem"):
        text = f"isa_{op}{u}{bits}({wide[0]}, {wide[1]})"
    elif op in ("min", "max"):
        sign = "<" if op == "min" else ">"
        x, y = (sa[0], sa[1]) if signed else (wide[0], wide[1])
        text = f"({x} {sign} {y} ? {a[0]} : {a[1]})"
    elif op == "abs":
        text = f"({sa[0]} < 0 ? 0 - {a[0]} : {a[0]})"
    elif op == "neg":
        text = f"(0 - {a[0]})"
    elif op == "mad":
        text = f"{a[0]} * {a[1]} + {a[2]}"
    else:
        text = f"{a[0]} {dict(add='+', sub='-', mul='*')[op]} {a[1]}"
    ctx.put(d, text, bits)


def _logic(ins: Ins, ctx: Context) -> None:
    op, kind = ins.parts[0], ins.parts[-1]
    bits = bits_of(kind)
    d, *sources = ins.operands
    a = [ctx.val(s, bits) for s in sources]
    if kind == "pred":
        a = [x if not x.startswith("0x") else ("~0u" if int(x.rstrip("u"), 16) else "0u") for x in a]
    if op == "not":
        ctx.put(d, f"~{a[0]}", bits)
    elif op == "cnot":
        ctx.put(d, f"{a[0]} == 0", bits)
    elif op == "lop3":
        ctx.put(d, f"isa_lop3({a[0]}, {a[1]}, {a[2]}, {ctx.imm(sources[3]) & 255})")
    else:
        ctx.put(d, f"{a[0]} {dict(xor='^', **{'and': '&', 'or': '|'})[op]} {a[1]}", bits)


def _shift(ins: Ins, ctx: Context) -> None:
    op, kind = ins.parts[0], ins.parts[-1]
    d, a, n = ins.operands
    if op == "shf":
        direction, clamp = ins.parts[1], int(ins.parts[2] == "clamp")
        ctx.put(d, f"isa_shf_{direction}({ctx.val(a)}, {ctx.val(n)}, {ctx.val(ins.operands[3])}, {clamp})")
        return
    sign = "" if op == "shl" else ("s" if kind[0] == "s" else "u")
    ctx.put(d, f"isa_{op}{sign}{WIDTHS[kind]}({ctx.val(a, bits_of(kind))}, {ctx.val(n)})", bits_of(kind))


def _shift_any(ins: Ins, ctx: Context) -> None:
    if ins.parts[0] == "shf":
        d, a, b, n = ins.operands
        direction, clamp = ins.parts[1], int(ins.parts[2] == "clamp")
        ctx.put(d, f"isa_shf_{direction}({ctx.val(a)}, {ctx.val(b)}, {ctx.val(n)}, {clamp})")
    else:
        _shift(ins, ctx)


def _bit_ops(ins: Ins, ctx: Context) -> None:
    op, kind = ins.parts[0], ins.parts[-1]
    bits = bits_of(kind)
    d, *sources = ins.operands
    a = [ctx.val(sources[0], bits)] + [
        ctx.val(s, bits if op == "bfi" and k == 0 else 32) for k, s in enumerate(sources[1:])
    ]
    signed = kind[0] == "s"
    if op == "popc":
        ctx.put(d, f"(uint32_t)__builtin_popcount{'ll' if bits == 64 else ''}({a[0]})")
    elif op == "clz":
        ctx.put(d, f"isa_clz{bits}({a[0]})")
    elif bits == 64 or set(ins.parts[1:-1]) - set():
        raise ctx.error("not emulated")
    elif op == "brev":
        ctx.put(d, f"isa_brev32({a[0]})")
    elif op == "bfind":
        ctx.put(d, f"isa_bfind{'s' if signed else 'u'}32({a[0]})")
    elif op == "bfe":
        ctx.put(d, f"isa_bfe{'s' if signed else 'u'}32({a[0]}, {a[1]}, {a[2]})")
    elif op == "bfi":
        ctx.put(d, f"isa_bfi32({a[0]}, {a[1]}, {a[2]}, {a[3]})")
    else:
        ctx.put(d, f"isa_prmt({a[0]}, {a[1]}, {a[2]})")


# ---- comparisons and selection
_INTEGER = {
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "lo": "<",
    "ls": "<=",
    "hi": ">",
    "hs": ">=",
}
_FLOAT = {"eq": "==", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def _compare(ctx: Context, compare: str, kind: str, ftz: bool, a: Operand, b: Operand, half: int = 0) -> str:
    if kind in FLOATS:
        x, y = float_in(ctx, a, kind, ftz, half), float_in(ctx, b, kind, ftz, half)
        unordered = f"(isnan({x}) || isnan({y}))"
        if compare == "num":
            return f"!{unordered}"
        if compare == "nan":
            return unordered
        if compare == "ne":
            return f"({x} < {y} || {x} > {y})"
        if compare in _FLOAT:
            return f"({x} {_FLOAT[compare]} {y})"
        if compare[:-1] == "ne":
            return f"!({x} == {y})"
        if compare[-1] == "u" and compare[:-1] in _FLOAT:
            return f"({unordered} || {x} {_FLOAT[compare[:-1]]} {y})"
        raise ctx.error(f"unknown comparison .{compare}")
    if compare not in _INTEGER or kind not in WIDTHS:
        raise ctx.error(f"unknown comparison .{compare}.{kind}")
    bits = bits_of(kind)
    x, y = ctx.val(a, bits), ctx.val(b, bits)
    if WIDTHS[kind] == 16:
        x, y = (f"(int16_t)({v})" if kind[0] == "s" else f"(uint16_t)({v})" for v in (x, y))
    elif kind[0] == "s":
        x, y = _signed(x, bits), _signed(y, bits)
    return f"({x} {_INTEGER[compare]} {y})"


def _setp(ins: Ins, ctx: Context) -> None:
    kind, compare = ins.parts[-1], ins.parts[1]
    rest = [m for m in ins.parts[2:-1] if m != "ftz"]
    d, a, b, *more = ins.operands
    if kind in ("f16x2", "bf16x2", "f32x2") or any(m not in ("and", "or", "xor") for m in rest):
        raise ctx.error("unknown form")
    text = _compare(ctx, compare, kind, "ftz" in ins.parts, a, b)
    first, second = (d.first, d.second) if isinstance(d, Pair) else (d, None)
    other = None
    if rest:
        c = f"(({ctx.val(more[0])}) != 0)"
        sign = {"and": "&", "or": "|", "xor": "^"}[rest[0]]
        other = f"({text} ? 0 : 1) {sign} {c}"
        text = f"({text} ? 1 : 0) {sign} {c}"
    if second is not None and not isinstance(second, Sink):
        # both results, then both writes: a source predicate may be a destination
        name = ctx.temporary()
        ctx.emit(f"uint32_t {name}[32]; L {name}[i] = ({other or f'!{text}'}) ? ~0u : 0u;")
        ctx.put(first, f"({text}) ? ~0u : 0u")
        ctx.put(second, f"{name}[i]")
    else:
        ctx.put(first, f"({text}) ? ~0u : 0u")


def _set(ins: Ins, ctx: Context) -> None:
    out, kind, compare = ins.parts[-2], ins.parts[-1], ins.parts[1]
    d, a, b = ins.operands
    if set(ins.parts[2:-2]) - {"ftz"}:
        raise ctx.error("unknown form")
    text = _compare(ctx, compare, kind, "ftz" in ins.parts, a, b)
    ctx.put(d, f"{text} ? {'0x3f800000u' if out == 'f32' else '~0u'} : 0u")


def _selp(ins: Ins, ctx: Context) -> None:
    bits = bits_of(ins.parts[-1])
    d, a, b, p = ins.operands
    ctx.put(d, f"{ctx.val(p)} ? {ctx.val(a, bits)} : {ctx.val(b, bits)}", bits)


_HANDLERS = {
    **dict.fromkeys(("add", "sub", "mul", "mad", "fma", "max", "min"), _arith),
    **dict.fromkeys(("neg", "abs"), _unary_float),
    **dict.fromkeys(("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh"), _approx),
    "div": lambda ins, ctx: (_approx if ins.parts[-1] in FLOATS else _integer)(ins, ctx),
    "rem": _integer,
    **dict.fromkeys(("and", "or", "xor", "not", "cnot", "lop3"), _logic),
    **dict.fromkeys(("shl", "shr", "shf"), _shift_any),
    **dict.fromkeys(("popc", "clz", "brev", "bfind", "bfe", "bfi", "prmt"), _bit_ops),
    "setp": _setp,
    "set": _set,
    "selp": _selp,
}
HANDLED = frozenset(_HANDLERS)
"""Opcodes that this module emits."""
