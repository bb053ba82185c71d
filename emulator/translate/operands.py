"""Operands of unit calls: vectors of registers, counts and qualifiers."""

from __future__ import annotations

from typing import Any

from emulator.ptx.ir import Operand, Vec


def call(ctx: Any, unit: str, *arguments: str | int) -> None:
    """Emits the call of a unit with the warp, the mask and arguments."""
    ctx.emit(f"{unit}({', '.join(['w', ctx.mask, *map(str, arguments)])});")


def items(op: Operand) -> tuple[Operand, ...]:
    """The items of a vector operand, or the operand alone."""
    return op.items if isinstance(op, Vec) else (op,)


def inputs(ops: tuple[Operand, ...], ctx: Any) -> str:
    """A vector of sources, as an array of register arrays."""
    return "(emu_in32[]){" + ", ".join(ctx.u32(op) for op in ops) + "}"


def outputs(ops: tuple[Operand, ...], ctx: Any) -> str:
    """A vector of destinations, as an array of register arrays."""
    return "(emu_out32[]){" + ", ".join(ctx.out32(op) for op in ops) + "}"


def expect(ctx: Any, ops: list[Operand], count: int) -> None:
    """An instruction of this form has so many operands."""
    if len(ops) != count:
        ctx.error(f"{len(ops)} operands where {count} were expected")


def known(ctx: Any, rest: list[str], allowed: set[str]) -> None:
    """Every remaining qualifier must be one that changes nothing here."""
    for part in rest:
        if part not in allowed:
            ctx.error(f"the qualifier .{part} is not known")


def registers(ctx: Any, op: Operand, count: int) -> tuple[Operand, ...]:
    """The registers of a vector operand, of which there must be so many."""
    found = items(op)
    if len(found) != count:
        ctx.error(f"{len(found)} registers where {count} were expected")
    return found
