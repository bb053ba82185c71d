"""cp.async: 16 bytes from global to shared memory, many in flight without holding registers."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32


def copy16_or_zero(dst: cute.Pointer, src: cute.Pointer, keep) -> None:
    """16 aligned bytes from `src` to shared `dst`; zeros, and nothing read, where `keep` is false."""
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
        read_only_args=[dst.toint(), src.toint(), Int32(keep) * 16],
    )


def wait_all() -> None:
    """This thread's copies have landed; other threads need a barrier as well."""
    cute.arch.cp_async_commit_group()
    cute.arch.cp_async_wait_group(0)
