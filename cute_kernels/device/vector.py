"""Vector access to global memory: a thread moves contiguous elements in accesses of `vec_bytes` bytes.

span.py says who owns what (and so the order of every sum); `vec_bytes` only says in how many accesses it is
moved. A base that is 16-byte but not 32-byte aligned therefore changes no result bit.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int64, const_expr
from cutlass.cute.nvgpu import CopyG2ROp, CopyR2GOp

from cute_kernels.device.span import Span


def row_of(tensor: cute.Tensor, row, width: int, align: int) -> cute.Tensor:
    """Row `row` of a dense [rows, width] tensor as (width,), offset in 64 bits: row * width passes 2^31."""
    return row_at(tensor, Int64(row) * width, width, align * 8 // tensor.element_type.width)


def row_at(tensor: cute.Tensor, offset: Int64, width: int, divisor: int) -> cute.Tensor:
    """(width,) elements from `offset`, a 64-bit element count known to be a multiple of `divisor`."""
    if divisor > 1:
        offset = cute.assume(offset, divby=divisor)
    return cute.make_tensor(tensor.iterator + offset, cute.make_layout((width,)))


def load(frag: cute.Tensor, row: cute.Tensor, index, vec_bytes: int) -> None:
    """Vector `index` of `row` into registers; the vector is as long as `frag`."""
    dtype, elems = row.element_type, cute.size(frag)
    vec = min(elems, vec_bytes * 8 // dtype.width)
    atom = cute.make_copy_atom(CopyG2ROp(), dtype, num_bits_per_copy=vec * dtype.width)
    tile = cute.local_tile(row, (elems,), (index,))
    cute.copy(atom, cute.zipped_divide(tile, (vec,)), cute.zipped_divide(frag, (vec,)))


def store(frag: cute.Tensor, row: cute.Tensor, index, vec_bytes: int) -> None:
    """Registers to vector `index` of `row`."""
    dtype, elems = row.element_type, cute.size(frag)
    vec = min(elems, vec_bytes * 8 // dtype.width)
    atom = cute.make_copy_atom(CopyR2GOp(), dtype, num_bits_per_copy=vec * dtype.width)
    tile = cute.local_tile(row, (elems,), (index,))
    cute.copy(atom, cute.zipped_divide(frag, (vec,)), cute.zipped_divide(tile, (vec,)))


def span_fragment(span: Span, dtype) -> cute.Tensor:
    """Registers for what a thread owns of a span: (elems, passes)."""
    return cute.make_rmem_tensor((span.elems, span.passes), dtype)


@cute.jit
def load_span(frag: cute.Tensor, row: cute.Tensor, part, thread, span: Constexpr, vec_bytes: Constexpr):
    """A thread's share of the part-th span of `row`; past its end, zeros (they add nothing to a sum)."""
    for p in cutlass.range_constexpr(span.passes):
        vec = p * span.threads + thread
        if const_expr(span.exact):
            load(frag[None, p], row, part * span.vecs + vec, vec_bytes)
        else:
            frag[None, p].fill(0)
            if vec < span.vecs:
                load(frag[None, p], row, part * span.vecs + vec, vec_bytes)


@cute.jit
def store_span(frag: cute.Tensor, row: cute.Tensor, part, thread, span: Constexpr, vec_bytes: Constexpr):
    """A thread's share of the part-th span of `row`, from registers; past its end nothing is written."""
    for p in cutlass.range_constexpr(span.passes):
        vec = p * span.threads + thread
        if const_expr(span.exact):
            store(frag[None, p], row, part * span.vecs + vec, vec_bytes)
        else:
            if vec < span.vecs:
                store(frag[None, p], row, part * span.vecs + vec, vec_bytes)
