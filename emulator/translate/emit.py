"""A parsed entry to C: one function that runs a warp until it ends, blocks or has spent its slice."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from emulator.ptx.cfg import Block, blocks_of
from emulator.ptx.ir import Entry, Ins, Mem, Module, Not, Operand, Pair, Reg, Vec
from emulator.translate import alu, control, matrix, memory, moves, sync
from emulator.translate.context import Context

_HEAD = """\
#include "machine.h"
#include "kernel.h"
#include "isa.h"
#include "tensor/units.h"
#define L for (int i = 0; i < 32; i++)
#define PUT(r, m, v) (r)[i] = (m[i] & (uint32_t)(v)) | (~m[i] & (r)[i])
#define WIDE(m) (uint64_t)(int64_t)(int32_t)(m)
#define PUT64(r, m, v) (r)[i] = (WIDE(m[i]) & (uint64_t)(v)) | (WIDE(~m[i]) & (r)[i])
"""
# What has no destination although its first operand could be one.
_NO_RESULT = {
    "st",
    "red",
    "bar",
    "barrier",
    "fence",
    "membar",
    "prefetch",
    "prefetchu",
    "griddepcontrol",
    "nanosleep",
    "cp",
}
_NO_RESULT |= {"setmaxnreg", "wgmma", "stmatrix", "clusterlaunchcontrol", "discard", "applypriority"}


@dataclass(frozen=True)
class Translated:
    """C of one entry and what a launch of it needs to know."""

    name: str
    source: str
    register_bytes: int
    static_shared: int
    param_bytes: int
    params: tuple[tuple[int, int], ...]  # (offset, size)
    lines: dict[int, tuple[str, int]]  # PTX line -> source file and line
    required_threads: tuple[int, ...]
    most_threads: tuple[int, ...]


@cache
def version() -> str:
    """Digest of the translator's own sources."""
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parents[1]
    for path in sorted([*root.joinpath("translate").rglob("*.py"), *root.joinpath("ptx").rglob("*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def translate(module: Module, entry: Entry) -> Translated:
    """The C of an entry. Raises UnknownInstructionError, naming the PTX line, at what is not known."""
    ctx = Context(entry)
    ctx.watched = matrix.watched(entry)
    blocks = blocks_of(
        entry, lambda ins: sync.may_wait(ins) or memory.is_strong(ins) or control.may_wait(ins)
    )
    unsure = _unsure(blocks, entry)
    tracked = {name: k for k, name in enumerate(sorted(unsure))}
    body: list[str] = []
    for index, block in enumerate(blocks):
        ctx.lines = body
        _block(ctx, index, block, tracked)
    register_bytes = 256 * ctx.n64 + 128 * ctx.n32 + 4 * len(tracked)
    cases = "\n".join(f"    case {i}: goto B{i};" for i in range(len(blocks)))
    start = f"  if (!w->started) {{ w->started = 1; memset(A, 0, {4 * len(tracked)}); }}\n" if tracked else ""
    source = f"""{_HEAD}
int kernel(emu_warp *w) {{
  uint64_t *const restrict D = (uint64_t *)w->registers;
  uint32_t *const restrict R = (uint32_t *)(w->registers + {256 * ctx.n64});
  uint32_t *const A = R + {32 * ctx.n32};
  const uint32_t shared_base = w->cta->rank << EMU_SHARED_RANK_SHIFT;
  uint32_t M[32], mask, pc;
  (void)D; (void)R; (void)A; (void)shared_base;
{start}dispatch:
  pc = emu_begin(w);
  if (pc == ~0u) return emu_result(w);
  mask = w->active;
  memcpy(M, emu_active_lanes(w), sizeof M);
  switch (pc) {{
{cases}
  }}
  __builtin_unreachable();
{chr(10).join(body)}
}}
"""
    files = module.files
    lines = {
        item.line: (files[item.source[0]], item.source[1])
        for item in entry.body
        if isinstance(item, Ins) and item.source and item.source[0] in files and item.source[1]
    }
    return Translated(
        entry.name,
        source,
        register_bytes,
        ctx.static_shared,
        entry.param_bytes,
        tuple((p.offset, p.size) for p in entry.params),
        lines,
        entry.directives.get("reqntid", ()),
        entry.directives.get("maxntid", ()),
    )


def _block(ctx: Context, index: int, block: Block, tracked: dict[str, int]) -> None:
    ctx.emit(f"B{index}:;")
    ctx.mask, ctx.lanes = "mask", "M"
    if block.stop:
        ctx.emit(f"  if (emu_slice(w, {index})) goto dispatch;")
    count = len(block.body) + (block.end is not None)
    if count:
        ctx.emit(f"  emu_instructions(w, {count});")
    for ins in block.body:
        _instruction(ctx, ins, tracked)
    end = block.end
    if end is None or (end.parts[0] == "bra" and end.guard is None):
        to = block.target if end is not None else block.next
        if to is None:  # falls off the end
            ctx.emit(f"  emu_exit(w, mask, {index}); goto dispatch;")
        else:
            ctx.emit(f"  if (emu_jump(w, {to}, {int(to <= index)})) goto B{to}; goto dispatch;")
        return
    ctx.ins = end
    ctx.emit(f"  w->line = {end.line};")
    taken = "mask"
    if end.guard is not None:
        register, negated = end.guard
        _check(ctx, [register], tracked)
        taken = f"{'~' if negated else ''}emu_bits({ctx.reg(register)})"
    if end.parts[0] == "bra":
        ctx.emit(
            f"  switch (emu_branch(w, {taken}, {block.target}, {block.next}, {index})) {{"
            f" case 0: goto B{block.target}; case 1: goto B{block.next}; default: goto dispatch; }}"
        )
    elif end.parts[0] == "trap":
        ctx.emit(f'  if (({taken}) & mask) {{ emu_fatal(w, "the kernel executed trap"); return 1; }}')
        ctx.emit(
            f"  if (emu_jump(w, {block.next}, 0)) goto B{block.next}; goto dispatch;"
            if block.next is not None
            else "  return 1;"
        )
    else:
        ctx.emit(f"  emu_exit(w, {taken}, {block.next if block.next is not None else index}); goto dispatch;")


def _instruction(ctx: Context, ins: Ins, tracked: dict[str, int]) -> None:
    ctx.ins = ins
    quiet = ins.parts[0] in (alu.HANDLED | moves.HANDLED)
    ctx.emit("  {" + ("" if quiet else f" w->line = {ins.line};"))
    ctx.mask, ctx.lanes = "mask", "M"
    defs, uses = defs_uses(ins)
    if ins.guard is not None:
        register, negated = ins.guard
        _check(ctx, [register], tracked)
        sign = "~" if negated else ""
        ctx.emit(
            f"  uint32_t G[32]; L G[i] = M[i] & {sign}{ctx.reg(register)}[i]; uint32_t gm = emu_bits(G);"
        )
        ctx.emit("  if (gm) {")
        ctx.mask, ctx.lanes = "gm", "G"
    if ins.parts[0] != "mov":
        _check(ctx, uses, tracked, line=quiet)
    sync.converge(ins, ctx)
    matrix.in_flight(ins, defs, uses, ctx.watched, ctx)
    for family in (matrix, sync, control, memory, alu, moves):
        if family.lower(ins, ctx):
            break
    else:
        ctx.error("unknown instruction")
    for reg in defs:
        if reg.name in tracked:
            source = f"A[{tracked[reg.name]}] |= {ctx.mask};"
            if ins.parts[0] == "mov" and any(u.name in tracked for u in uses):  # a copy of nothing is nothing
                held = " & ".join(f"A[{tracked[u.name]}]" for u in uses if u.name in tracked)
                source = f"A[{tracked[reg.name]}] |= {ctx.mask} & {held};"
            ctx.emit("  " + source)
    if ins.guard is not None:
        ctx.emit("  }")
    ctx.emit("  }")


def _check(ctx: Context, uses: list[Reg], tracked: dict[str, int], line: bool = True) -> None:
    for reg in dict.fromkeys(uses):
        if reg.name in tracked:
            at = f"A[{tracked[reg.name]}]"
            name = reg.name.split("@")[0]
            ctx.emit(
                f"  if ({ctx.mask} & ~{at}) {{ w->line = {ctx.ins.line};"
                f' emu_unassigned(w, {ctx.mask} & ~{at}, "{name}"); {at} |= {ctx.mask}; }}'
            )


def _registers(op: Operand | None) -> list[Reg]:
    if isinstance(op, Reg):
        return [op]
    if isinstance(op, Not):
        return _registers(op.operand)
    if isinstance(op, Vec):
        return [r for item in op.items for r in _registers(item)]
    if isinstance(op, Mem):
        return _registers(op.base) + [r for c in op.coords or () for r in _registers(c)]
    if isinstance(op, Pair):
        return _registers(op.first) + _registers(op.second)
    return []


def defs_uses(ins: Ins) -> tuple[list[Reg], list[Reg]]:
    """Registers that an instruction writes and reads."""
    ops = ins.operands
    parts = ins.parts
    if parts[0] == "wgmma" and parts[1] == "mma_async":  # the accumulator is read only if scale-d is set
        return _registers(ops[0]), [r for op in ops[1:] for r in _registers(op)]
    none = parts[0] in _NO_RESULT or (parts[0] == "tcgen05" and parts[1] != "ld")
    if parts[0] in ("bar", "barrier") and "red" in parts:
        none = False
    if parts[0] == "clusterlaunchcontrol" and parts[1] == "query_cancel":
        none = False
    if parts[0] == "mbarrier":
        none = (
            not ops
            or isinstance(ops[0], Mem)
            or parts[1] not in ("arrive", "arrive_drop", "try_wait", "test_wait", "pending_count")
        )
    if none or not ops:
        return [], [r for op in ops for r in _registers(op)]
    return _registers(ops[0]), [r for op in ops[1:] for r in _registers(op)]


def _unsure(blocks: list[Block], entry: Entry) -> set[str]:
    """Registers that some path may read before writing: only those are watched as the kernel runs."""
    everything = frozenset(entry.registers)
    before: dict[int, frozenset[str]] = {0: frozenset()}
    work = [0]
    while work:
        i = work.pop()
        held = set(before[i])
        for ins in blocks[i].body:
            if ins.guard is None:
                held |= {r.name for r in defs_uses(ins)[0]}
        after = frozenset(held)
        for s in blocks[i].successors:
            joined = before.get(s, everything) & after
            if s not in before or joined != before[s]:
                before[s] = joined
                work.append(s)
    unsure: set[str] = set()
    for i, block in enumerate(blocks):
        held = set(before.get(i, everything))
        for ins in block.body:
            defs, uses = defs_uses(ins)
            reads = [*uses, *([ins.guard[0]] if ins.guard else [])]
            unsure |= {r.name for r in reads if r.name not in held and entry.registers.get(r.name) != "b128"}
            if ins.guard is None:
                held |= {r.name for r in defs}
        if block.end is not None and block.end.guard is not None and block.end.guard[0].name not in held:
            unsure.add(block.end.guard[0].name)
    return unsure
