"""What a parsed PTX module is made of."""

from __future__ import annotations

from dataclasses import dataclass, field

WIDTHS = {"pred": 32, "b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16}
WIDTHS |= {"b32": 32, "u32": 32, "s32": 32, "f32": 32, "f16x2": 32, "bf16x2": 32, "tf32": 32}
WIDTHS |= {"b64": 64, "u64": 64, "s64": 64, "f64": 64, "f32x2": 64, "b128": 128}


@dataclass(frozen=True)
class Reg:
    """A register, by its name made unique over scopes."""

    name: str


@dataclass(frozen=True)
class Imm:
    """An immediate: its bits as an integer; `real` for one that was written as 0f or 0d."""

    value: int
    text: str = ""
    real: bool = False


@dataclass(frozen=True)
class Sym:
    """A shared variable, parameter or label, by name."""

    name: str


@dataclass(frozen=True)
class Special:
    """A special register such as %tid.x."""

    name: str


@dataclass(frozen=True)
class Sink:
    """The operand `_`."""


@dataclass(frozen=True)
class Vec:
    """{a, b, ...}"""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Mem:
    """[base + offset], or a tensor's [base, {coords}]."""

    base: Operand
    offset: int = 0
    coords: tuple[Operand, ...] | None = None


@dataclass(frozen=True)
class Pair:
    """a|b: two destinations."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Not:
    """!p"""

    operand: Operand


Operand = Reg | Imm | Sym | Special | Sink | Vec | Mem | Pair | Not


@dataclass
class Ins:
    """One instruction. `guard` is (predicate, negated); `source` the file and line of .loc, if any."""

    opcode: str
    operands: list[Operand]
    line: int
    guard: tuple[Reg, bool] | None = None
    source: tuple[int, int] | None = None

    @property
    def parts(self) -> list[str]:
        """The opcode's dotted parts."""
        return self.opcode.split(".")


@dataclass(frozen=True)
class Label:
    name: str


@dataclass(frozen=True)
class Param:
    """A kernel parameter and where it lies in the parameter bytes."""

    name: str
    align: int
    size: int
    offset: int


@dataclass
class Entry:
    """A kernel."""

    name: str
    line: int
    params: list[Param] = field(default_factory=list)
    registers: dict[str, str] = field(default_factory=dict)  # name -> type
    body: list[Ins | Label] = field(default_factory=list)
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)
    shared: dict[str, tuple[int, int]] = field(
        default_factory=dict
    )  # name -> (alignment, bytes; 0 if dynamic)

    @property
    def param_bytes(self) -> int:
        last = self.params[-1] if self.params else None
        return last.offset + last.size if last else 0


@dataclass
class Module:
    """A PTX text."""

    text: str
    target: str = ""
    version: str = ""
    entries: dict[str, Entry] = field(default_factory=dict)
    files: dict[int, str] = field(default_factory=dict)
    shared: dict[str, tuple[int, int]] = field(default_factory=dict)
