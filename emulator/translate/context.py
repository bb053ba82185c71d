"""What lowering needs of the kernel being translated: where operands are, where lines of C go."""

from __future__ import annotations

from typing import Any

from emulator.errors import UnknownInstructionError
from emulator.ptx.ir import WIDTHS, Entry, Imm, Ins, Mem, Not, Operand, Reg, Sink, Special, Sym, Vec

_KINDS = "TID LANE LANEMASK LANEMASK_GE NTID CTAID NCTAID CLUSTERID NCLUSTERID CLUSTER_CTAID CLUSTER_NCTAID"
_KINDS += " CLUSTER_CTARANK CLUSTER_NCTARANK IS_EXPLICIT WARP NWARP SM NSM DYNAMIC_SMEM TOTAL_SMEM CLOCK"
_KIND = {name: i for i, name in enumerate(_KINDS.split())}
_XYZ = {
    "tid": "TID",
    "ntid": "NTID",
    "ctaid": "CTAID",
    "nctaid": "NCTAID",
    "clusterid": "CLUSTERID",
    "nclusterid": "NCLUSTERID",
    "cluster_ctaid": "CLUSTER_CTAID",
    "cluster_nctaid": "CLUSTER_NCTAID",
}
SPECIALS = {
    "%laneid": _KIND["LANE"] * 4,
    "%lanemask_eq": _KIND["LANEMASK"] * 4,
    "%lanemask_lt": _KIND["LANEMASK"] * 4 + 1,
    "%lanemask_le": _KIND["LANEMASK"] * 4 + 2,
    "%lanemask_gt": _KIND["LANEMASK"] * 4 + 3,
    "%lanemask_ge": _KIND["LANEMASK_GE"] * 4,
    "%cluster_ctarank": _KIND["CLUSTER_CTARANK"] * 4,
    "%cluster_nctarank": _KIND["CLUSTER_NCTARANK"] * 4,
    "%is_explicit_cluster": _KIND["IS_EXPLICIT"] * 4,
    "%warpid": _KIND["WARP"] * 4,
    "%nwarpid": _KIND["NWARP"] * 4,
    "%smid": _KIND["SM"] * 4,
    "%nsmid": _KIND["NSM"] * 4,
    "%dynamic_smem_size": _KIND["DYNAMIC_SMEM"] * 4,
    "%total_smem_size": _KIND["TOTAL_SMEM"] * 4,
    "%clock": _KIND["CLOCK"] * 4,
} | {f"%{k}.{d}": _KIND[v] * 4 + i for k, v in _XYZ.items() for i, d in enumerate("xyz")}
TIMES = ("%globaltimer", "%clock64", "%globaltimer_lo")
SHARED_BASE = 0x400


class Context:
    """One entry's translation: registers get places, lines of C pile up."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.lines: list[str] = []
        self.ins: Ins = Ins("", [], 0)
        self.mask = "mask"  # C: bits of the lanes that act
        self.lanes = "M"  # C: the same, a word a lane
        self.watched: frozenset[str] = frozenset()  # registers that wgmma works on
        self.place: dict[str, str] = {}
        self.narrow: set[str] = set()
        self.n32 = self.n64 = 0
        for name, kind in entry.registers.items():
            width = WIDTHS[kind]
            if width == 128:
                self.place[name + "#lo"], self.place[name + "#hi"] = self._new64(), self._new64()
            elif width == 64:
                self.place[name] = self._new64()
            else:
                self.place[name] = f"(R+{32 * self.n32})"
                self.n32 += 1
                if width == 16:
                    self.narrow.add(name)
        self.temporaries = 0
        self.shared: dict[str, int] = {}
        at = SHARED_BASE
        for name, (align, size) in sorted(entry.shared.items(), key=lambda item: item[1][1] == 0):
            at = -(-at // align) * align
            self.shared[name] = at
            at += size
        self.static_shared = at - SHARED_BASE

    def _new64(self) -> str:
        self.n64 += 1
        return f"(D+{32 * (self.n64 - 1)})"

    # ---- lines
    def emit(self, text: str) -> None:
        """A line of C."""
        self.lines.append(text)

    def error(self, text: str) -> Any:
        """Raises UnknownInstructionError, naming the PTX line."""
        raise UnknownInstructionError(
            f"PTX line {self.ins.line}: {text}: {self.ins.opcode} (kernel {self.entry.name[:80]})"
        )

    def temporary(self, prefix: str = "t") -> str:
        self.temporaries += 1
        return f"{prefix}{self.temporaries}"

    def blocking(self, call: str) -> None:
        """A call that returns 1 if the warp has to wait; the block begins with it and is executed anew."""
        self.emit(f"if ({call}) goto dispatch;")

    # ---- operands
    def width(self, op: Operand) -> int | None:
        """Bits of a register; None for what has no width of its own."""
        return WIDTHS[self.entry.registers[op.name]] if isinstance(op, Reg) else None

    def reg(self, op: Operand) -> str:
        """C: the array of a register's lanes."""
        if not isinstance(op, Reg):
            raise self.error(f"a register is needed, got {op}")
        place = self.place.get(op.name)
        if place is None:
            raise self.error(f"a 128-bit register does not fit here: {op.name}")
        return place

    def halves(self, op: Operand) -> tuple[str, str]:
        """C: the arrays of a 128-bit register's halves."""
        if not isinstance(op, Reg) or op.name + "#lo" not in self.place:
            raise self.error(f"a 128-bit register is needed, got {op}")
        return self.place[op.name + "#lo"], self.place[op.name + "#hi"]

    def imm(self, op: Operand) -> int:
        """The value of an immediate."""
        if not isinstance(op, Imm):
            raise self.error(f"an immediate is needed, got {op}")
        return op.value

    def val(self, op: Operand, bits: int = 32) -> str:
        """C: an operand's bits in lane i, as uint32_t or, of 64 bits, uint64_t."""
        if isinstance(op, Reg):
            return f"{self.reg(op)}[i]"
        if isinstance(op, Not):
            return f"(~{self.val(op.operand, bits)})"
        if isinstance(op, Imm):
            value = op.value
            if op.real:
                if op.text[1] in "dD" and bits == 32:
                    raise self.error("a double immediate where 32 bits are needed")
                if op.text[1] in "fF" and bits == 64:
                    raise self.error("a float immediate where 64 bits are needed")
            return f"0x{value & ((1 << bits) - 1):x}" + ("ull" if bits == 64 else "u")
        if isinstance(op, Special):
            return self._special(op, bits)
        if isinstance(op, Sym):
            return self._symbol(op, bits)
        raise self.error(f"unsupported operand {op}")

    def _special(self, op: Special, bits: int) -> str:
        if op.name in TIMES:
            name = self.temporary()
            self.emit(f"uint64_t {name} = emu_time(w);")
            return name
        which = SPECIALS.get(op.name)
        if which is None:
            raise self.error(f"unknown special register {op.name}")
        name = self.temporary()
        self.emit(f"uint32_t {name}[32]; emu_special(w, {which}, {name});")
        return f"{name}[i]" if bits == 32 else f"(uint64_t){name}[i]"

    def _symbol(self, op: Sym, bits: int) -> str:
        if op.name in self.shared:
            text = f"(shared_base + {self.shared[op.name]}u)"
            return text if bits == 32 else f"(uint64_t){text}"
        for param in self.entry.params:
            if param.name == op.name:
                if bits != 64:
                    raise self.error("the 32-bit address of a parameter")
                return f"((uint64_t)(uintptr_t)w->params + {param.offset}u)"
        raise self.error(f"unknown symbol {op.name}")

    def u32(self, op: Operand) -> str:
        """C: an operand's 32 lanes as `const uint32_t *`."""
        if isinstance(op, Reg) and self.width(op) != 64:
            return self.reg(op)
        value = self.val(op, 64 if self.width(op) == 64 else 32)
        name = self.temporary()
        self.emit(f"uint32_t {name}[32]; L {name}[i] = (uint32_t)({value});")
        return name

    def u64(self, op: Operand) -> str:
        """C: an operand's 32 lanes as `const uint64_t *`."""
        if isinstance(op, Reg) and self.width(op) == 64:
            return self.reg(op)
        value = self.val(op, 32 if isinstance(op, Reg) else 64)
        name = self.temporary()
        self.emit(f"uint64_t {name}[32]; L {name}[i] = {value};")
        return name

    def out32(self, op: Operand) -> str:
        """C: a 32-bit (or narrower) destination's lanes; only those in the mask may be written."""
        return "(uint32_t *)0" if isinstance(op, Sink) else self.reg(op)

    def out64(self, op: Operand) -> str:
        """C: a 64-bit destination's lanes."""
        return "(uint64_t *)0" if isinstance(op, Sink) else self.reg(op)

    def address64(self, op: Operand) -> str:
        """C: the 32 lanes of an address, `const uint64_t *`, offset included."""
        base, offset = self.address_parts(op, 64)
        return self._sum(base, offset, "uint64_t")

    def address32(self, op: Operand) -> str:
        """C: the 32 lanes of a shared address, `const uint32_t *`, offset included."""
        base, offset = self.address_parts(op, 32)
        return self._sum(base, offset, "uint32_t")

    def _sum(self, base: str, offset: int, kind: str) -> str:
        if not offset:
            return base
        name = self.temporary()
        self.emit(f"{kind} {name}[32]; L {name}[i] = {base}[i] + ({offset}ll);")
        return name

    def address_parts(self, op: Operand, bits: int) -> tuple[str, int]:
        """C: the lanes of an address's base, and its constant offset."""
        if not isinstance(op, Mem):
            op = Mem(op)
        return (self.u64(op.base) if bits == 64 else self.u32(op.base)), op.offset

    def put(self, op: Operand, value: str, bits: int = 32) -> None:
        """Assigns lane by lane, where the mask is set."""
        if isinstance(op, Sink):
            return
        if bits == 64:
            self.emit(f"L PUT64({self.reg(op)}, {self.lanes}, {value});")
        else:
            if isinstance(op, Reg) and op.name in self.narrow:
                value = f"({value}) & 0xffffu"
            self.emit(f"L PUT({self.reg(op)}, {self.lanes}, {value});")

    def items(self, op: Operand) -> list[Operand]:
        """The parts of a vector operand; a scalar is a vector of one."""
        return list(op.items) if isinstance(op, Vec) else [op]
