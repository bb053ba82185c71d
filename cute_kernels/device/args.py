"""Compile-time arguments: dtype names, and tensors without data that fix static shapes and strides."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

DTYPES = {
    "bf16": cutlass.BFloat16,
    "fp16": cutlass.Float16,
    "fp32": cutlass.Float32,
    "int32": cutlass.Int32,
    "int64": cutlass.Int64,
}


def bits(dtype: str) -> int:
    """Width of a named dtype in bits."""
    return DTYPES[dtype].width


def dense(dtype: str, *shape, align: int = 16):
    """A dense row-major tensor of static extents, but for the outermost, which may be `rows()`."""
    stride = [1]
    for extent in reversed(shape[1:]):
        stride.insert(0, stride[0] * extent)
    return make_fake_tensor(DTYPES[dtype], shape, stride=tuple(stride), assumed_align=align)


def strided(dtype: str, shape, stride, align: int):
    """A tensor with explicit strides, any of which may be a run-time `cute.sym_int64(divisibility=...)`."""
    return make_fake_tensor(DTYPES[dtype], shape, stride=stride, assumed_align=align)


def rows():
    """A run-time row count; the same object in several shapes makes the call check that they agree."""
    return cute.sym_int()


def current_stream():
    """The stream argument: TVM-FFI passes the caller's current stream, so callers pass none."""
    return make_fake_stream(use_tvm_ffi_env_stream=True)
