"""A kernel module that uses as many registers and as much shared memory as it is told: with enough values
it spills."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

THREADS = 1024  # leaves 64 registers to a thread


class Resources:
    """`values` values of a thread are live at once; shared memory as given, in bytes."""

    def __init__(self, values: int, static: int, dynamic: int):
        self.values, self.static, self.dynamic = values, static, dynamic

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
        self.kernel(x, out).launch(grid=(x.shape[0], 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, out: cute.Tensor):
        row, tid = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        values = [x[row, tid + THREADS * i] for i in range(self.values)]
        total = Float32(0.0)
        for i in cutlass.range_constexpr(self.values):
            total = total + values[i]
        if const_expr(self.dynamic > 0):
            scratch = SmemAllocator().allocate_tensor(Float32, cute.make_layout((self.dynamic // 4,)), 16)
            scratch[tid % (self.dynamic // 4)] = total
            cute.arch.sync_threads()
            total = scratch[0]
        if const_expr(self.static > 0):
            cute.arch.inline_ptx(
                f"{{ .shared .align 4 .b8 kept[{self.static}]; .reg .u32 at;"
                " mov.u32 at, kept; st.shared.u32 [at], {$r0}; }",
                read_only_args=[Int32(tid)],
            )
        for i in cutlass.range_constexpr(self.values):
            out[row, tid + THREADS * i] = values[i] * total


def build(target: str, *, values: int, static: int = 0, dynamic: int = 0):
    """Run-time arguments: x and out [T, 1024 * values], both fp32."""
    rows, width = cute.sym_int(), THREADS * values
    tensors = [
        make_fake_tensor(Float32, (rows, width), stride=(width, 1), assumed_align=16) for _ in range(2)
    ]
    return Resources(values, static, dynamic), (*tensors, make_fake_stream(use_tvm_ffi_env_stream=True))
