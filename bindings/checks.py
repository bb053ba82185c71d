"""Argument checks. A contract (contracts.py) calls a `Checker` argument by argument; the first breach raises.

Messages have one form: `hc_gate: inject_weight: got shape (4, 1024), allowed (C, W) with W = 10240`.

The same contract serves real tensors and fake ones. A fake tensor has sizes (perhaps symbolic), a dtype, a
device and strides, but no address: `concrete=False` leaves alignment and overlap out.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from bindings.errors import InvalidArgument
from collectives.checks import finite, shown

ACT = (torch.bfloat16, torch.float16)
FP32 = (torch.float32,)

ALIGNMENT = 16
"""Bytes that the base address of a tensor is a multiple of, where kernels access it by vectors."""

ADDRESS_MODULUS = 32
"""Of an address, checks and choices see the remainder by this, and whether ranges overlap; nothing else."""

DEVICES = ("cpu", "cuda")

# Extents that may be 0: rows, pool slots, expert rows. All others are at least 1.
_MAY_BE_EMPTY = frozenset({"T", "B", "N", "P", "T*K"})


def real(op: str, name: str, value: Any) -> float:
    """`value` as a float, or InvalidArgument: a finite real number, no bool and no tensor."""
    found = finite(value)
    if found is None:
        raise InvalidArgument(f"{op}: {name}: got {shown(value)}, allowed a finite number")
    return found


def integer(op: str, name: str, value: Any) -> int:
    """`value` as an int, or InvalidArgument: an integer, no bool and no tensor."""
    if not isinstance(value, (bool, Tensor)) and hasattr(type(value), "__index__"):
        return operator.index(value)
    raise InvalidArgument(f"{op}: {name}: got {shown(value)}, allowed an integer")


def extent_bytes(t: Tensor) -> int:
    """Bytes from a tensor's base address to the end of its last element; 0 if it has no elements."""
    if t.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return (last + 1) * t.element_size()


def held(t: Tensor, pointer: int, nbytes: int) -> bool:
    """Whether a tensor's storage holds `nbytes` bytes from `pointer` on: not where it was freed or shrunk
    under the tensor."""
    storage = t.untyped_storage()
    return nbytes == 0 or pointer + nbytes <= storage.data_ptr() + storage.nbytes()


@dataclass(frozen=True)
class Output:
    """One result: its `out` argument's name, shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Pair:
    """A written tensor and another one, which must not overlap: both by name, their extents in bytes, and
    whether being exactly the same memory is allowed (an in-place update that is exact)."""

    written: str
    other: str
    written_bytes: int
    other_bytes: int
    in_place: bool

    def conflict(self, distance: int) -> bool:
        """Whether they overlap where they must not. distance: the other's base address minus the written
        one's."""
        overlap = -self.other_bytes < distance < self.written_bytes
        return overlap and not (self.in_place and distance == 0)


@dataclass
class Checker:
    """The checks of one call, and what they learn: extents by symbol, outputs, run-time scalars.

    given: the tensors passed as outputs, by name, None for a missing one; empty in the functional form.
    """

    op: str
    given: Mapping[str, Any]
    concrete: bool = True
    dims: dict[str, int] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    outputs: list[Output] = field(default_factory=list)
    kernel_scalars: tuple[float, ...] = ()

    def fail(self, name: str, got: str, allowed: str) -> NoReturn:
        """Raises: argument `name` is `got`, which is not what is `allowed`."""
        raise InvalidArgument(f"{self.op}: {name}: got {got}, allowed {allowed}")

    def require(self, holds: bool, name: str, got: str, allowed: str) -> None:
        """Raises unless `holds`."""
        if not holds:
            self.fail(name, got, allowed)

    def tensor(
        self,
        name: str,
        value: Any,
        shape: Sequence[str | int],
        dtypes: Sequence[torch.dtype],
        *,
        dense_from: int = 0,
        align: int | None = ALIGNMENT,
    ) -> tuple[int, ...]:
        """One tensor argument; returns its shape.

        shape: a symbol binds its extent at first sight and must equal it from then on; a number must be met.
        dense_from: the first dimension from which the layout is dense; outer ones may have any stride. align:
        of the base address, in bytes; None for an element's size, where nothing is accessed by vectors.
        """
        if not isinstance(value, Tensor):
            self.fail(name, _type_name(value), "a torch.Tensor")
        if value.is_nested:  # it has no shape
            self.fail(name, "a nested tensor", "a torch.Tensor that is none")
        self._device(name, value)
        self._shape(name, value, shape)
        if value.dtype not in dtypes:
            self.fail(name, f"dtype {value.dtype}", " or ".join(str(d) for d in dtypes))
        self._layout(name, value, dense_from)
        align = value.element_size() if align is None else align
        if self.concrete:
            self._memory(name, value)
        past = value.data_ptr() % align if self.concrete else 0
        if past:
            self.fail(
                name, f"a base address {past} bytes past a multiple of {align}", f"multiples of {align}"
            )
        self.tensors[name] = value
        return tuple(value.shape)

    def output(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Declares an output; where the caller passes a tensor for it, checks that it fits."""
        self.outputs.append(Output(name, shape, dtype))
        if not self.given:
            return
        if self.given[name] is None:
            given = [n for n, out in self.given.items() if out is not None]
            verb = "is" if len(given) == 1 else "are"
            self.fail(name, "None", f"a torch.Tensor, since {', '.join(given)} {verb} given")
        self.tensor(name, self.given[name], shape, (dtype,))

    def real(self, name: str, value: Any, at_least: float | None = None) -> float:
        """A finite float argument, with a bound if any."""
        if not self.concrete and isinstance(value, torch.SymFloat):
            return value  # type: ignore[return-value]  # traced: its value is not known
        number = real(self.op, name, value)
        if at_least is not None and number < at_least:
            self.fail(name, repr(value), f"a finite number >= {at_least:g}")
        return number

    def divisor(self, name: str, value: Any, of: str, multiple_of: int = 1) -> int:
        """A positive integer argument that divides extent `of` and is a multiple of `multiple_of`."""
        number: int = value if isinstance(value, torch.SymInt) else integer(self.op, name, value)  # type: ignore[assignment]
        extent = self.dims[of]
        if number < 1 or number % multiple_of or extent % number:
            kind = f"a positive multiple of {multiple_of}" if multiple_of > 1 else "a positive integer"
            self.fail(name, str(number), f"{kind} that divides {of} = {extent}")
        return number

    def pairs(self, written: Sequence[str], in_place: Sequence[tuple[str, str]]) -> list[Pair]:
        """Every pair of a written tensor and another argument; raises if one conflicts now."""
        extents = {name: extent_bytes(t) for name, t in self.tensors.items()}
        names = list(self.tensors)
        found: list[Pair] = []
        for first in written:
            for other in names:
                if other == first or (other in written and names.index(other) > names.index(first)):
                    continue  # a pair of two written ones once, under the later
                pair = Pair(first, other, extents[first], extents[other], (first, other) in in_place)
                if pair.conflict(self.tensors[other].data_ptr() - self.tensors[first].data_ptr()):
                    same = " unless it is exactly the same memory" if pair.in_place else ""
                    self.fail(first, f"memory that overlaps {other}", f"no overlap with {other}{same}")
                found.append(pair)
        return found

    def _device(self, name: str, value: Tensor) -> None:
        if not self.tensors:
            kind = value.device.type
            if kind not in DEVICES and (self.concrete or kind != "meta"):
                self.fail(name, f"device {value.device}", " or ".join(DEVICES))
            return
        first, other = next(iter(self.tensors.items()))
        if value.device != other.device:
            self.fail(name, f"device {value.device}", f"{other.device}, the device of {first}")

    def _memory(self, name: str, value: Tensor) -> None:
        """Raises unless the tensor's elements are what its memory holds."""
        if value.is_neg() or value.is_conj():
            self.fail(name, "a lazily negated or conjugated view", "a tensor whose memory holds its values")
        if torch._is_zerotensor(value):
            self.fail(name, "a zero tensor without memory", "a tensor whose memory holds its values")
        nbytes = extent_bytes(value)
        if not held(value, value.data_ptr(), nbytes):
            got = f"a storage of {value.untyped_storage().nbytes()} bytes"
            self.fail(name, got, f"one that holds the tensor's {nbytes}")

    def _shape(self, name: str, value: Tensor, shape: Sequence[str | int]) -> None:
        fits = value.dim() == len(shape)
        fresh: dict[str, int] = {}
        for size, want in zip(value.shape, shape, strict=False):
            if not fits:
                break
            if isinstance(want, str):
                if want in self.dims or want in fresh:
                    want = self.dims.get(want, fresh.get(want, 0))
                else:
                    fresh[want] = size
                    fits = want in _MAY_BE_EMPTY or size >= 1
                    continue
            fits = size == want
        if not fits:
            known = {s: self.dims[s] for s in shape if isinstance(s, str) and s in self.dims}
            terms = [f"{s} = {extent}" for s, extent in known.items()]
            terms += [
                f"{s} >= 1"
                for s in dict.fromkeys(shape)
                if isinstance(s, str) and s not in {*known, *_MAY_BE_EMPTY}
            ]
            allowed = _tuple(shape) + (f" with {', '.join(terms)}" if terms else "")
            self.fail(name, f"shape {_tuple(value.shape)}", allowed)
        self.dims.update(fresh)

    def _layout(self, name: str, value: Tensor, dense_from: int) -> None:
        if value.layout is not torch.strided:
            self.fail(name, f"layout {value.layout}", "torch.strided")
        if dense_from == 0:
            if not value.is_contiguous():
                self.fail(name, f"strides {tuple(value.stride())}", "a contiguous tensor")
            return
        step: int = 1
        for dim in range(value.dim() - 1, dense_from - 1, -1):
            if value.shape[dim] != 1 and value.stride(dim) != step:
                inner = (
                    "a contiguous last dimension"
                    if dense_from == value.dim() - 1
                    else "dense inner dimensions"
                )
                self.fail(name, f"strides {tuple(value.stride())}", inner)
            step *= value.shape[dim]


def _tuple(items: Sequence[str | int]) -> str:
    return f"({', '.join(str(i) for i in items)}{',' if len(items) == 1 else ''})"


def _type_name(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__module__}.{type(value).__qualname__}"
