"""Which host memory a launch may touch: tensors of its call, and what was registered by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

FOREIGN, READ_ONLY = 1, 2


@dataclass
class Region:
    """[lo, hi) of host memory under a name. written: a byte a byte, 0 where nothing was written yet; None:
    all is."""

    lo: int
    hi: int
    name: str
    flags: int = 0
    written: np.ndarray | None = None


def extent(argument: Any) -> tuple[int, int] | None:
    """[lo, hi) of the bytes that an array-like argument (torch, numpy, the DSL's or tvm_ffi's tensors)
    spans; None if it is none."""
    pointer = getattr(argument, "data_ptr", None)
    if pointer is not None and hasattr(argument, "element_size") and hasattr(argument, "stride"):  # torch
        return _span(pointer(), list(argument.shape), list(argument.stride()), argument.element_size())
    if isinstance(argument, np.ndarray):
        strides = [s // argument.itemsize for s in argument.strides]
        return _span(argument.ctypes.data, list(argument.shape), strides, argument.itemsize)
    if pointer is not None and hasattr(argument, "load_dltensor"):  # cutlass.cute.runtime
        bits = argument.element_type.width
        shape, stride = _flat(argument.shape), _flat(argument.stride)
        at = argument.data_ptr
        span = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1 if all(shape) else 0
        return (at, at + -(-span * bits // 8)) if span > 0 else None
    return None


def _flat(value: Any) -> list[int]:
    return [x for v in value for x in _flat(v)] if isinstance(value, tuple | list) else [int(value)]


def _span(at: int, shape: list[int], stride: list[int], size: int) -> tuple[int, int] | None:
    if not all(shape) or at == 0:
        return None
    low = sum((n - 1) * s for n, s in zip(shape, stride, strict=True) if s < 0)
    high = sum((n - 1) * s for n, s in zip(shape, stride, strict=True) if s > 0)
    return at + low * size, at + (high + 1) * size


def disjoint(regions: list[Region]) -> list[Region]:
    """Sorted by address; overlapping ones merged under both names."""
    out: list[Region] = []
    for region in sorted(regions, key=lambda r: (r.lo, -r.hi)):
        last = out[-1] if out else None
        if last is None or region.lo >= last.hi:
            out.append(Region(region.lo, region.hi, region.name, region.flags, region.written))
            continue
        names = last.name.split("|")
        last.name = last.name if region.name in names else f"{last.name}|{region.name}"
        last.flags &= region.flags | ~READ_ONLY
        last.flags |= region.flags & FOREIGN
        if last.written is not None or region.written is not None:
            hi = max(last.hi, region.hi)
            merged = np.ones(hi - last.lo, np.uint8)
            for part in (last, region):
                if part.written is not None:
                    merged[part.lo - last.lo : part.hi - last.lo] &= part.written
            last.written = merged
        last.hi = max(last.hi, region.hi)
    return out
