"""Loads, stores, atomics and asynchronous copies that lanes make on their own."""

from __future__ import annotations

from emulator.ptx.ir import WIDTHS, Imm, Ins, Mem, Operand, Reg, Sink, Sym
from emulator.translate.context import Context

_SCOPES = {"cta": "SCOPE_CTA", "cluster": "SCOPE_CLUSTER", "gpu": "SCOPE_GPU", "sys": "SCOPE_SYS"}
_SEMS = {"weak": "SEM_WEAK", "volatile": "SEM_VOLATILE", "relaxed": "SEM_RELAXED", "acquire": "SEM_ACQUIRE"}
_SEMS |= {"release": "SEM_RELEASE", "acq_rel": "SEM_ACQ_REL"}
_SPACES = {
    "global": "SPACE_GLOBAL",
    "shared": "SPACE_SHARED",
    "shared::cta": "SPACE_SHARED",
    "shared::cluster": "SPACE_SHARED",
}
# hints that change nothing that a program could see
_HINTS = {
    "ca",
    "cg",
    "cs",
    "lu",
    "cv",
    "wb",
    "wt",
    "nc",
    "unified",
    "L1::evict_normal",
    "L1::evict_unchanged",
    "L1::evict_first",
}
_HINTS |= {
    "L1::evict_last",
    "L1::no_allocate",
    "L2::cache_hint",
    "L2::64B",
    "L2::128B",
    "L2::256B",
    "L2::evict_last",
}
_HINTS |= {"L2::evict_normal", "L2::evict_first", "mmio"}
_EXTEND = {"s8": "EXTEND_S8", "s16": "EXTEND_S16", "s32": "EXTEND_S32"}
_ATOMS = {
    ("add", "f32"): "ATOM_ADD_F32",
    ("add", "f64"): "ATOM_ADD_F64",
    ("and", ""): "ATOM_AND",
    ("or", ""): "ATOM_OR",
    ("xor", ""): "ATOM_XOR",
    ("exch", ""): "ATOM_EXCH",
    ("cas", ""): "ATOM_CAS",
    ("inc", ""): "ATOM_INC",
    ("dec", ""): "ATOM_DEC",
    ("add", ""): "ATOM_ADD",
}


def lower(ins: Ins, ctx: Context) -> bool:
    """Emits a memory instruction; False if it is none."""
    handler = _HANDLERS.get(ins.parts[0])
    if ins.opcode.startswith("cp.async."):
        handler = _cp_async
    elif ins.opcode.startswith("st.async"):
        handler = _st_async
    if handler is None:
        return False
    handler(ins, ctx)
    return True


def is_strong(ins: Ins) -> bool:
    """Whether others may wait for, or be told by, this access: the warp may be interrupted before it."""
    return ins.parts[0] in ("atom", "red") or (
        ins.parts[0] in ("ld", "st") and bool({"volatile", "relaxed", "acquire", "release"} & set(ins.parts))
    )


def _qualifiers(ins: Ins, ctx: Context, extra: set[str] = frozenset()) -> tuple[str, str, str, int]:  # type: ignore[assignment]
    space, sem, scope, count = "SPACE_GENERIC", None, "SCOPE_SYS", 1
    for part in ins.parts[1:-1]:
        if part in _SPACES:
            space = _SPACES[part]
        elif part in _SEMS:
            sem = _SEMS[part]
        elif part in _SCOPES:
            scope = _SCOPES[part]
        elif part in ("v2", "v4", "v8"):
            count = int(part[1:])
        elif part not in _HINTS and part not in extra:
            raise ctx.error(f"unknown qualifier .{part}")
    return space, sem or "SEM_WEAK", scope, count


def _access(
    ctx: Context,
    space: str,
    kind: str,
    count: int,
    sem: str,
    scope: str,
    registers: list[Operand],
    load: bool,
) -> str:
    if len(registers) != count:
        raise ctx.error(f"{len(registers)} registers for a vector of {count}")
    wide = sum(1 << k for k, r in enumerate(registers) if ctx.width(r) == 64)
    if not load and any(isinstance(r, Imm) for r in registers) and WIDTHS[kind] == 64:
        wide |= sum(1 << k for k, r in enumerate(registers) if isinstance(r, Imm))
    name = ctx.temporary("a")
    ctx.emit(
        f"static const emu_access {name} = {{{space}, {WIDTHS[kind] // 8}, {count},"
        f" {_EXTEND.get(kind, 'EXTEND_ZERO')}, {sem}, {scope}, {wide}}};"
    )
    return name


def _out(ctx: Context, registers: list[Operand]) -> str:
    name = ctx.temporary("o")
    places = ", ".join("0" if isinstance(r, Sink) else ctx.reg(r) for r in registers)
    ctx.emit(f"void *const {name}[] = {{{places}}};")
    return name


def _in(ctx: Context, registers: list[Operand], kind: str) -> str:
    parts = []
    for r in registers:
        if isinstance(r, Reg):
            parts.append(ctx.reg(r))
        else:
            parts.append(ctx.u64(r) if WIDTHS[kind] == 64 else ctx.u32(r))
    name = ctx.temporary("v")
    ctx.emit(f"const void *const {name}[] = {{{', '.join(parts)}}};")
    return name


def _base(ctx: Context, op: Operand, shared: bool) -> tuple[str, int]:
    """64-bit lanes of a base: shared addresses are 32 bits, whatever register holds them."""
    if not isinstance(op, Mem):
        raise ctx.error(f"an address is needed, got {op}")
    base = op.base
    if (isinstance(base, Reg) and ctx.width(base) != 64) or (shared and isinstance(base, Sym)):
        name = ctx.temporary()
        ctx.emit(f"uint64_t {name}[32]; L {name}[i] = (uint64_t)({ctx.val(base)});")
        return name, op.offset
    return ctx.u64(base), op.offset


def _load(ins: Ins, ctx: Context) -> None:
    kind = ins.parts[-1]
    if kind not in WIDTHS:
        raise ctx.error(f"unknown type .{kind}")
    d, address = ins.operands[:2]
    if len(ins.operands) > 2 and "L2::cache_hint" not in ins.parts:
        raise ctx.error("unknown form")
    registers = ctx.items(d)
    if kind == "b128":
        raise ctx.error("128-bit loads are not emulated")
    if any(p.startswith("param") for p in ins.parts):
        _load_param(ins, ctx, registers, address, kind)
        return
    space, sem, scope, count = _qualifiers(ins, ctx)
    name = _access(ctx, space, kind, count, sem, scope, registers, True)
    base, offset = _base(ctx, address, space == "SPACE_SHARED")
    ctx.emit(f"emu_load(w, {ctx.mask}, &{name}, {base}, {offset}ll, {_out(ctx, registers)});")


def _load_param(ins: Ins, ctx: Context, registers: list[Operand], address: Operand, kind: str) -> None:
    count = next((int(p[1:]) for p in ins.parts if p in ("v2", "v4", "v8")), 1)
    if not isinstance(address, Mem) or len(registers) != count:
        raise ctx.error("unknown form")
    wide = sum(1 << k for k, r in enumerate(registers) if ctx.width(r) == 64)
    param = next(
        (p for p in ctx.entry.params if isinstance(address.base, Sym) and p.name == address.base.name), None
    )
    if param is None:
        name = ctx.temporary("a")
        ctx.emit(
            f"static const emu_access {name} = {{SPACE_GENERIC, {WIDTHS[kind] // 8}, {count},"
            f" {_EXTEND.get(kind, 'EXTEND_ZERO')}, SEM_WEAK, SCOPE_CTA, {wide}}};"
        )
        base, offset = _base(ctx, address, False)
        ctx.emit(f"emu_load(w, {ctx.mask}, &{name}, {base}, {offset}ll, {_out(ctx, registers)});")
        return
    ctx.emit(
        f"emu_load_param(w, {ctx.mask}, {param.offset + address.offset}u, {WIDTHS[kind] // 8}, {count},"
        f" {_EXTEND.get(kind, 'EXTEND_ZERO')}, {wide}, {_out(ctx, registers)});"
    )


def _store(ins: Ins, ctx: Context) -> None:
    kind = ins.parts[-1]
    if kind not in WIDTHS or kind == "b128":
        raise ctx.error(f"unknown type .{kind}")
    address, source = ins.operands[:2]
    registers = ctx.items(source)
    space, sem, scope, count = _qualifiers(ins, ctx)
    values = _in(ctx, registers, kind)
    name = _access(ctx, space, kind, count, sem, scope, registers, False)
    base, offset = _base(ctx, address, space == "SPACE_SHARED")
    ctx.emit(f"emu_store(w, {ctx.mask}, &{name}, {base}, {offset}ll, {values});")


def _atomic(ins: Ins, ctx: Context) -> None:
    kind = ins.parts[-1]
    names = {name for name, _ in _ATOMS} | {"min", "max"}
    op = next((p for p in ins.parts[1:] if p in names), None)
    if op is None or kind not in WIDTHS or "noftz" in ins.parts:
        raise ctx.error("unknown form")
    if op in ("min", "max"):
        if kind in ("f32", "f64", "f16", "bf16"):
            raise ctx.error("floating-point minimum and maximum are not emulated")
        code = f"ATOM_{op.upper()}_{'S' if kind[0] == 's' else 'U'}"
    elif kind[0] == "f" or kind.startswith("bf"):
        code = _ATOMS.get((op, kind), "") if op == "add" else _ATOMS[(op, "")]
        if not code:
            raise ctx.error("unknown type")
    else:
        code = _ATOMS[(op, "")]
    space, sem, scope, _ = _qualifiers(ins, ctx, {op})
    if sem == "SEM_WEAK":
        sem = "SEM_RELAXED"
    if not any(p in _SCOPES for p in ins.parts):
        scope = "SCOPE_GPU"
    result = ins.operands[0] if ins.parts[0] == "atom" else None
    address, b, *more = ins.operands[1:] if result is not None else ins.operands
    is64 = WIDTHS[kind] == 64
    values = (
        [ctx.u64(x) if is64 else ctx.u32(x) for x in (b, *more[:1])]
        if op == "cas"
        else [ctx.u64(b) if is64 else ctx.u32(b)]
    )
    name = ctx.temporary("a")
    ctx.emit(
        f"static const emu_access {name} = {{{space}, {WIDTHS[kind] // 8}, 1, EXTEND_ZERO, {sem}, {scope},"
        f" {3 if is64 else 0}}};"
    )
    base, offset = _base(ctx, address, space == "SPACE_SHARED")
    out = "0" if result is None or isinstance(result, Sink) else ctx.reg(result)
    ctx.emit(
        f"emu_atomic(w, {ctx.mask}, &{name}, {code}, {base}, {offset}ll, {values[0]}, "
        f"{values[1] if len(values) > 1 else '0'}, {out});"
    )


def _cp_async(ins: Ins, ctx: Context) -> None:
    rest = ins.parts[2:]
    if rest[0] == "commit_group":
        ctx.emit("emu_async_commit(w, EMU_Q_CP_ASYNC);")
    elif rest[0] in ("wait_group", "wait_all"):
        if rest[0] == "wait_all":
            ctx.emit("emu_async_commit(w, EMU_Q_CP_ASYNC);")
        ctx.emit(f"emu_async_wait(w, EMU_Q_CP_ASYNC, {ctx.imm(ins.operands[0]) if ins.operands else 0});")
    elif rest[:2] == ["mbarrier", "arrive"]:
        base, offset = ctx.address_parts(ins.operands[0], 32)
        ctx.emit(f"emu_cp_async_mbar_arrive(w, {ctx.mask}, {base}, {offset}ll, {int('noinc' in rest)});")
    elif rest[0] in ("ca", "cg"):
        unknown = set(rest[1:]) - {"shared", "shared::cta", "global"} - _HINTS
        if unknown:
            raise ctx.error(f"unknown qualifier .{unknown.pop()}")
        to, frm, size, *more = ins.operands
        if "L2::cache_hint" in rest:
            more = more[:-1]
        count = ctx.imm(size)
        if count not in (4, 8, 16) or (rest[0] == "cg" and count != 16):
            raise ctx.error(f"{count} bytes")
        a, a_offset = ctx.address_parts(to, 32)
        b, b_offset = ctx.address_parts(frm, 64)
        source = ctx.u32(more[0]) if more else "0"
        ctx.emit(f"emu_cp_async(w, {ctx.mask}, {a}, {a_offset}ll, {b}, {b_offset}ll, {count}, {source});")
    else:
        raise ctx.error("unknown form")


def _st_async(ins: Ins, ctx: Context) -> None:
    kind = ins.parts[-1]
    if not {"shared::cluster", "mbarrier::complete_tx::bytes"} <= set(ins.parts) or kind not in WIDTHS:
        raise ctx.error("unknown form")
    address, source, mbar = ins.operands
    registers = ctx.items(source)
    values = _in(ctx, registers, kind)
    wide = sum(
        1 << k
        for k, r in enumerate(registers)
        if ctx.width(r) == 64 or (isinstance(r, Imm) and WIDTHS[kind] == 64)
    )
    a, a_offset = ctx.address_parts(address, 32)
    b, b_offset = ctx.address_parts(mbar, 32)
    ctx.emit(
        f"emu_st_async(w, {ctx.mask}, {a}, {a_offset}ll, {b}, {b_offset}ll, {WIDTHS[kind] // 8},"
        f" {len(registers)}, {wide}, {values});"
    )


def _prefetch(ins: Ins, ctx: Context) -> None:
    ctx.emit("/* prefetch */")


def _mapa(ins: Ins, ctx: Context) -> None:
    d, a, rank = ins.operands
    if ins.parts[-1] == "u64":
        if any(p.startswith("shared") for p in ins.parts):
            raise ctx.error("unknown form")
        ctx.put(d, f"emu_map_rank(w, (uint32_t)({ctx.val(a, 64)}), {ctx.val(rank)}) | EMU_GENERIC_SHARED", 64)
        return
    ctx.put(d, f"emu_map_rank(w, {ctx.val(a)}, {ctx.val(rank)})")


def _getctarank(ins: Ins, ctx: Context) -> None:
    d, a = ins.operands
    ctx.put(d, f"(uint32_t)({ctx.val(a, 64 if ins.parts[-1] == 'u64' else 32)}) >> 24 & 0xffu")


_HANDLERS = {
    "ld": _load,
    "ldu": _load,
    "st": _store,
    "atom": _atomic,
    "red": _atomic,
    "prefetch": _prefetch,
    "prefetchu": _prefetch,
    "applypriority": _prefetch,
    "mapa": _mapa,
    "getctarank": _getctarank,
}
