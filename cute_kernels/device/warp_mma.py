"""mma.sync and ldmatrix, as PTX has them: fragments are lists of 32-bit registers."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32


def ldmatrix4(address: Int32) -> tuple:
    """Four 8x8 matrices of 16-bit elements from shared memory; lane l gives row l % 8 of matrix l // 8."""
    return cute.arch.inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[address],
    )


def mma16816(acc: list, a, b, dtype) -> list:
    """acc[16x8] + a[16x16] b[16x8], fp32 accumulators."""
    kind = "bf16" if dtype is cutlass.BFloat16 else "f16"
    return list(
        cute.arch.inline_ptx(
            f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
            "{{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, "
            "{{$r6}, {$r7}, {$r8}, {$r9}};",
            write_only_types=[Float32] * 4,
            read_only_args=[*a, *b, *acc],
        )
    )
