"""Between 16-bit elements and fp32, two elements at a time: one instruction rounds a pair.

Left to the compiler, values that are stored and also used on are rounded one by one. Written like this,
hc_apply_norm was 6 % and hc_boundary 5 % faster hot on an H200; cold there was no difference.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32


def widen(frag: cute.Tensor) -> list:
    """The elements of a register fragment in fp32, exactly. 16-bit, an even number."""
    size = cute.size(frag)
    if frag.element_type is not cutlass.BFloat16:
        wide = frag.load().to(Float32)
        return [wide[i] for i in range(size)]
    # a bf16 value is the upper half of the same fp32 value
    pairs, wide = cute.recast_tensor(frag, Int32), cute.make_rmem_tensor((size,), Float32)
    words = cute.recast_tensor(wide, Int32)
    for i in range(size // 2):
        words[2 * i] = pairs[i] << 16
        words[2 * i + 1] = pairs[i] & Int32(-0x10000)
    return [wide[i] for i in range(size)]


def narrow(values: list, frag: cute.Tensor) -> None:
    """Rounds fp32 values to nearest even into a 16-bit register fragment of as many elements."""
    kind = "bf16x2" if frag.element_type is cutlass.BFloat16 else "f16x2"
    pairs = cute.recast_tensor(frag, Int32)
    for i in range(len(values) // 2):
        pairs[i] = cute.arch.inline_ptx(
            f"cvt.rn.{kind}.f32 {{$w0}}, {{$r0}}, {{$r1}};",
            write_only_types=[Int32],
            read_only_args=[values[2 * i + 1], values[2 * i]],
        )
