"""Control instructions that are no branches: cluster launch control, hints to the hardware."""

from __future__ import annotations

from emulator.ptx.ir import Ins, Mem
from emulator.translate.context import Context


def may_wait(ins: Ins) -> bool:
    """Whether a warp may have to wait here."""
    return ins.parts[0] in (
        "tcgen05",
        "wgmma",
        "ldmatrix",
        "stmatrix",
        "movmatrix",
        "mma",
    ) or ins.opcode.startswith(("cp.async.bulk.wait_group", "cp.async.wait"))


def lower(ins: Ins, ctx: Context) -> bool:
    """Emits the instruction; False if it is none of these."""
    parts = ins.parts
    if parts[0] == "clusterlaunchcontrol":
        _launch_control(ins, ctx)
    elif parts[0] == "prefetch" or parts[0] == "discard":
        ctx.emit("/* a hint */")
    elif parts[0] == "pmevent" or parts[0] == "nop":
        pass
    elif parts[0] == "brkpt":
        ctx.error("a breakpoint")
    else:
        return False
    return True


def _launch_control(ins: Ins, ctx: Context) -> None:
    parts = ins.parts
    if parts[1] == "try_cancel":
        to, mbar = ins.operands[:2]
        if not isinstance(to, Mem) or not isinstance(mbar, Mem):
            ctx.error("unknown form")
        a, a_offset = ctx.address_parts(to, 32)
        b, b_offset = ctx.address_parts(mbar, 32)
        everyone = int(any(p.startswith("multicast") for p in parts))
        ctx.emit(f"emu_try_cancel(w, {ctx.mask}, {a}, {a_offset}ll, {b}, {b_offset}ll, {everyone});")
        return
    d, source = ins.operands
    lo, hi = ctx.halves(source)
    if parts[2] == "is_canceled":
        ctx.put(d, f"{lo}[i] & 1 ? ~0u : 0u")
    elif parts[2].startswith("get_first_ctaid"):
        items = ctx.items(d)
        axes = (
            ["xyz".index(parts[2][-1])] if len(items) == 1 and "::" in parts[2] else list(range(len(items)))
        )
        for axis, item in zip(axes, items, strict=True):
            ctx.put(
                item,
                [
                    f"(uint32_t)({lo}[i] >> 32)",
                    f"(uint32_t){hi}[i]",
                    f"(uint32_t)({hi}[i] >> 32)",
                    "0u",
                ][axis],
            )
    else:
        ctx.error("unknown form")
