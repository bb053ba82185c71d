"""Small PTX kernels written by hand, and their launch."""

from __future__ import annotations

from typing import Any

import emulator

REGISTERS = ".reg .pred %p<9>; .reg .b16 %h<9>; .reg .b32 %r<40>; .reg .b64 %d<40>; .reg .b128 %q<4>;"


def kernel(body: str, params: int = 2, shared: int = 0, target: str = "sm_90a") -> str:
    """A kernel `k` of `params` 64-bit parameters, loaded into %d1, %d2, ...; %r1 is %tid.x, %r2 the address of `shared` bytes."""
    names = ", ".join(f".param .u64 a{i}" for i in range(1, params + 1))
    loads = "\n".join(f"ld.param.u64 %d{i}, [a{i}];" for i in range(1, params + 1))
    smem = f".shared .align 1024 .b8 smem[{shared}];" if shared else ""
    address = "mov.u32 %r2, smem;" if shared else ""
    return f""".version 8.8
.target {target}
.address_size 64
.visible .entry k({names})
{{
{REGISTERS}
{smem}
{loads}
mov.u32 %r1, %tid.x;
{address}
{body}
ret;
}}
"""


def run(
    body: str,
    *arguments: Any,
    shared: int = 0,
    target: str = "sm_90a",
    launch: dict[str, Any] | None = None,
    uninitialized: tuple[Any, ...] = (),
    **options: Any,
) -> list[emulator.Finding]:
    """Findings of one launch of a kernel; the device keeps going after each."""
    with emulator.device(target, on_finding="keep", **options) as device:
        for tensor in uninitialized:
            device.uninitialized(tensor, "out")
        device.launch(kernel(body, len(arguments), shared, target), arguments, **(launch or {}))
        return device.findings


def checks(found: list[emulator.Finding]) -> set[str]:
    """Which checks the findings are of."""
    return {f.check for f in found}
