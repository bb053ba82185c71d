"""Barriers, mbarriers, fences, and what the lanes of a warp do together."""

from __future__ import annotations

from emulator.ptx.ir import Imm, Ins, Not, Operand, Pair, Sink
from emulator.translate.context import Context

_ALL = 0xFFFFFFFF


def lower(ins: Ins, ctx: Context) -> bool:
    """Emits a synchronising instruction; False if it is none."""
    handler = _HANDLERS.get(ins.parts[0])
    if ins.opcode.startswith("match.any.sync"):
        handler = _match
    if handler is None:
        return False
    handler(ins, ctx)
    return True


def may_wait(ins: Ins) -> bool:
    """Whether a warp may have to wait at this instruction (it then begins a block), or others see what it
    does."""
    parts = ins.parts
    if parts[0] in (
        "bar",
        "barrier",
        "shfl",
        "vote",
        "redux",
        "elect",
        "match",
        "mbarrier",
        "griddepcontrol",
        "nanosleep",
    ):
        return True
    return parts[0] in ("fence", "membar") or "sync" in parts or "aligned" in parts


def converge(ins: Ins, ctx: Context) -> None:
    """Before a .sync instruction: its members have to be here."""
    parts = ins.parts
    if parts[0] in ("bar", "barrier"):
        if parts[1] == "warp":
            _members(ctx, ins.operands[0])
        elif parts[1] != "cluster" or "aligned" in parts:
            ctx.blocking("emu_converge(w, 0, 1)")
    elif parts[0] in ("shfl", "vote", "redux", "match", "elect") and "sync" in parts:
        _members(ctx, ins.operands[-1])
    elif "sync" in parts or "aligned" in parts:
        ctx.blocking("emu_converge(w, 0, 1)")


def _members(ctx: Context, op: Operand) -> None:
    if isinstance(op, Imm):
        ctx.blocking(f"emu_converge(w, 0x{op.value & _ALL:x}u, 0)")
    else:
        ctx.blocking(f"emu_converge(w, {ctx.u32(op)}[__builtin_ctz(w->active)], 2)")


def _uniform(ctx: Context, op: Operand) -> str:
    """C: an operand that has to be the same in all lanes, as one number."""
    if isinstance(op, Imm):
        return f"{op.value & _ALL}u"
    return f"{ctx.u32(op)}[__builtin_ctz({ctx.mask})]"


def _bar(ins: Ins, ctx: Context) -> None:
    parts = [p for p in ins.parts[1:] if p not in ("aligned", "cta")]
    if parts[0] == "warp":
        return
    if parts[0] == "cluster":
        if parts[1] == "arrive":
            ctx.emit(f"emu_cluster_arrive(w, {ctx.mask}, {int('relaxed' in parts)});")
        else:
            ctx.blocking(f"emu_cluster_wait(w, {ctx.mask})")
        return
    operands = list(ins.operands)
    if parts[0] == "red":
        d, bar, *rest, p = operands
        negated = isinstance(p, Not)
        inner = p.operand if isinstance(p, Not) else p
        threads = _uniform(ctx, rest[0]) if rest else "0"
        bits = f"emu_bits({ctx.u32(inner)})"
        op = {"popc": "RED_POPC", "and": "RED_AND", "or": "RED_OR"}[parts[1]]
        bits = f"~{bits}" if negated else bits
        ctx.blocking(
            f"emu_bar_red(w, {ctx.mask}, {_uniform(ctx, bar)}, {threads}, {op}, {bits}, {ctx.out32(d)})"
        )
        return
    number = _uniform(ctx, operands[0])
    threads = _uniform(ctx, operands[1]) if len(operands) > 1 else "0"
    if parts[0] == "sync":
        ctx.blocking(f"emu_bar_sync(w, {ctx.mask}, {number}, {threads})")
    elif parts[0] == "arrive":
        ctx.emit(f"emu_bar_arrive(w, {ctx.mask}, {number}, {threads});")
    else:
        raise ctx.error("unknown form")


def _fence(ins: Ins, ctx: Context) -> None:
    parts = ins.parts[1:]
    if ins.parts[0] == "membar" and parts[0] != "proxy":
        ctx.emit(f"emu_fence(w, {dict(cta='SCOPE_CTA', gl='SCOPE_GPU', sys='SCOPE_SYS')[parts[0]]}, 3);")
    elif parts[0] == "proxy":
        if parts[1].startswith("async"):
            ctx.emit("emu_fence_proxy(w);")
        elif parts[1] not in ("alias", "tensormap::generic"):
            raise ctx.error("unknown proxy")
    elif parts[0] == "mbarrier_init":
        ctx.emit("emu_fence(w, SCOPE_CLUSTER, FENCE_RELEASE);")
    else:
        scope = next((s for s in ("cta", "cluster", "gpu", "sys") if s in parts), None)
        known = {"sc", "acq_rel", "acquire", "release", scope}
        known |= {"sync_restrict::shared::cluster", "sync_restrict::shared::cta"}
        if scope is None or set(parts) - known:
            raise ctx.error("unknown fence")
        sides = [f"FENCE_{s.upper()}" for s in ("acquire", "release") if s in parts] or ["3"]
        ctx.emit(f"emu_fence(w, SCOPE_{scope.upper()}, {sides[0]});")


def _mbarrier(ins: Ins, ctx: Context) -> None:
    parts = ins.parts[1:]
    op = parts[0]
    mask = ctx.mask
    relaxed = int("relaxed" in parts)
    if op in ("init", "inval", "expect_tx"):
        base, offset = ctx.address_parts(ins.operands[0], 32)
        if op == "inval":
            ctx.emit(f"emu_mbar_inval(w, {mask}, {base}, {offset}ll);")
        else:
            ctx.emit(f"emu_mbar_{op}(w, {mask}, {base}, {offset}ll, {ctx.u32(ins.operands[1])});")
        return
    if op in ("arrive", "arrive_drop"):
        operands = list(ins.operands)
        state = "0"
        if len(operands) > 1 and not _is_address(operands[0]):
            state = ctx.out64(operands.pop(0))
            state = "0" if state.startswith("(uint64_t *)0") else state
        expect = "0"
        base, offset = ctx.address_parts(operands[0], 32)
        value = ctx.u32(operands[1]) if len(operands) > 1 else "0"
        if "expect_tx" in parts:
            expect, value = value, "0"
        if "noComplete" in parts:
            raise ctx.error("noComplete is not emulated")
        ctx.emit(
            f"emu_mbar_arrive(w, {mask}, {base}, {offset}ll, {expect}, {value}, {state},"
            f" {int(op != 'arrive')}, {relaxed});"
        )
        return
    if op in ("try_wait", "test_wait"):
        d, address, phase = ins.operands[:3]
        base, offset = ctx.address_parts(address, 32)
        parity = "0" if "parity" not in parts else ctx.u32(phase)
        state = "0" if "parity" in parts else ctx.u64(phase)
        block = int(op == "try_wait")
        out = ctx.out32(d) if not isinstance(d, Sink) else None
        if out is None:
            raise ctx.error("a wait whose result is dropped")
        ctx.blocking(
            f"emu_mbar_wait(w, {mask}, {base}, {offset}ll, {parity}, {state}, {block}, {relaxed}, {out})"
        )
        return
    if op == "pending_count":
        raise ctx.error("not emulated")
    raise ctx.error("unknown form")


def _is_address(op: Operand) -> bool:
    return type(op).__name__ == "Mem"


def _shfl(ins: Ins, ctx: Context) -> None:
    kind = {"idx": 0, "up": 1, "down": 2, "bfly": 3}.get(ins.parts[2])
    if ins.parts[1] != "sync" or kind is None:
        raise ctx.error("unknown form")
    d, a, b, c = ins.operands[:4]
    valid = "0"
    if isinstance(d, Pair):
        valid = "0" if isinstance(d.second, Sink) else ctx.out32(d.second)
        d = d.first
    out = "0" if isinstance(d, Sink) else ctx.out32(d)
    ctx.emit(f"emu_shuffle(w, {ctx.mask}, {kind}, {out}, {valid}, {ctx.u32(a)}, {ctx.u32(b)}, {ctx.u32(c)});")


def _vote(ins: Ins, ctx: Context) -> None:
    d, a = ins.operands[:2]
    negate = int(isinstance(a, Not))
    inner = a.operand if isinstance(a, Not) else a
    if ins.parts[1] != "sync":
        raise ctx.error("unknown form")
    if isinstance(inner, Imm):
        source = ctx.temporary()
        ctx.emit(f"uint32_t {source}[32]; L {source}[i] = {'~0u' if inner.value else '0u'};")
    else:
        source = ctx.u32(inner)
    ctx.emit(f"emu_vote(w, {ctx.mask}, VOTE_{ins.parts[2].upper()}, {ctx.out32(d)}, {source}, {negate});")


def _redux(ins: Ins, ctx: Context) -> None:
    op, kind = ins.parts[2], ins.parts[-1]
    d, a = ins.operands[:2]
    source = ctx.u32(a)
    if kind == "f32":
        if "abs" in ins.parts:
            raise ctx.error("not emulated")
        code = f"REDUX_{op.upper()}_F" + ("_NAN" if "NaN" in ins.parts else "")
    elif op in ("min", "max"):
        code = f"REDUX_{op.upper()}_{'S' if kind[0] == 's' else 'U'}"
    else:
        code = f"REDUX_{op.upper()}"
    ctx.emit(f"emu_redux(w, {ctx.mask}, {code}, {ctx.out32(d)}, {source});")


def _elect(ins: Ins, ctx: Context) -> None:
    d, members = ins.operands
    if not isinstance(d, Pair):
        raise ctx.error("unknown form")
    leader = "0" if isinstance(d.first, Sink) else ctx.out32(d.first)
    ctx.emit(f"emu_elect(w, {ctx.mask}, {ctx.u32(members)}, {leader}, {ctx.out32(d.second)});")


def _match(ins: Ins, ctx: Context) -> None:
    if ins.parts[-1] != "b32":
        raise ctx.error("unknown form")
    ctx.emit(f"emu_match_any(w, {ctx.mask}, {ctx.out32(ins.operands[0])}, {ctx.u32(ins.operands[1])});")


def _griddepcontrol(ins: Ins, ctx: Context) -> None:
    name = {"wait": "emu_dependency_wait", "launch_dependents": "emu_launch_dependents"}.get(ins.parts[1])
    if name is None:
        raise ctx.error("unknown form")
    ctx.emit(f"{name}(w, {ctx.mask});")


def _nanosleep(ins: Ins, ctx: Context) -> None:
    ctx.emit("emu_time(w);")


def _setmaxnreg(ins: Ins, ctx: Context) -> None:
    count = ctx.imm(ins.operands[0])
    if not 24 <= count <= 256 or count % 8:
        raise ctx.error(f"setmaxnreg to {count}, allowed multiples of 8 from 24 to 256")


def _activemask(ins: Ins, ctx: Context) -> None:
    ctx.put(ins.operands[0], ctx.mask)


_HANDLERS = {
    "bar": _bar,
    "barrier": _bar,
    "fence": _fence,
    "membar": _fence,
    "mbarrier": _mbarrier,
    "shfl": _shfl,
    "vote": _vote,
    "redux": _redux,
    "elect": _elect,
    "griddepcontrol": _griddepcontrol,
    "nanosleep": _nanosleep,
    "setmaxnreg": _setmaxnreg,
    "activemask": _activemask,
}
