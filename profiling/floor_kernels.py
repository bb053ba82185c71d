# mypy: ignore-errors
"""Yardsticks in device code: a kernel that does nothing, and one that only reads what another kernel reads.

They launch as the operators' kernels do (same call path, programmatic dependent launch), so a difference to
them is work.

    empty   one warp; releases its dependents, waits for its predecessors, ends.
    read    x [T, words] and weight [words], int32 words of any data: reads every row and, a row, the
            weight, and writes one value. Grid (T * ctas); a CTA takes the vectors cta * threads + thread,
            and those ctas * threads further on. No reduction across threads: a thread folds its words, and
            only the first one stores the result; the others would at a value that the data does not have,
            which keeps their loads.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.device import args, vector
from cute_kernels.device.pdl import await_predecessors, release_dependents

NEVER = 0x5A17C0DE


class Empty:
    """Run-time argument: out, any fp32 vector; it is not touched."""

    @cute.jit
    def __call__(self, out: cute.Tensor, stream: cuda.CUstream):
        self.kernel(out).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, out: cute.Tensor):
        release_dependents()
        await_predecessors()


class Read:
    """Run-time arguments: x [T, words], weight [words], out [1], all int32."""

    def __init__(self, words: int, ctas: int, threads: int, vec_bytes: int):
        self.words, self.ctas, self.threads, self.vec_bytes = words, ctas, threads, vec_bytes
        self.vec = vec_bytes // 4
        self.vecs = words // self.vec
        self.passes = -(-self.vecs // (ctas * threads))

    @cute.jit
    def __call__(self, x: cute.Tensor, weight: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
        rows = x.shape[0]
        if rows > 0:
            self.kernel(x, weight, out).launch(
                grid=(rows * self.ctas, 1, 1), block=(self.threads, 1, 1), stream=stream, use_pdl=True
            )

    @cute.kernel
    def kernel(self, x: cute.Tensor, weight: cute.Tensor, out: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        first = (cta % self.ctas) * self.threads + tid
        release_dependents()
        held_weight = self.load(vector.row_of(weight, 0, self.words, self.vec_bytes), first)
        await_predecessors()
        held = self.load(vector.row_of(x, cta // self.ctas, self.words, self.vec_bytes), first)

        folded = Int32(0)
        for p in cutlass.range_constexpr(self.passes):
            for i in cutlass.range_constexpr(self.vec):
                folded = folded + (held[i, p] ^ held_weight[i, p])
        if ((cta == 0) & (tid == 0)) | (folded == Int32(NEVER)):
            out[0] = folded

    @cute.jit
    def load(self, row: cute.Tensor, first):
        """A thread's vectors of a row; past its end, zeros."""
        held = cute.make_rmem_tensor((self.vec, self.passes), cutlass.Int32)
        for p in cutlass.range_constexpr(self.passes):
            at = p * self.ctas * self.threads + first
            if cutlass.const_expr(self.vecs % (self.ctas * self.threads) == 0):
                vector.load(held[None, p], row, at, self.vec_bytes)
            else:
                held[None, p].fill(0)
                if at < self.vecs:
                    vector.load(held[None, p], row, at, self.vec_bytes)
        return held


def build(target: str, *, kind: str, words: int = 0, ctas: int = 1, threads: int = 32, vec_bytes: int = 16):
    """The kernel of a kind, "empty" or "read"; words a multiple of vec_bytes / 4."""
    if kind == "empty":
        return Empty(), (args.dense("fp32", args.rows()), args.current_stream())
    if kind != "read" or words % (vec_bytes // 4) or not words:
        raise ValueError(
            f"kind, words: got {kind!r}, {words}; 'empty', or 'read' with a multiple of {vec_bytes // 4}"
        )
    return Read(words, ctas, threads, vec_bytes), (
        args.dense("int32", args.rows(), words, align=vec_bytes),
        args.dense("int32", words, align=vec_bytes),
        args.dense("int32", 1),
        args.current_stream(),
    )
