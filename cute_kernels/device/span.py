"""Who owns what when one CTA works on a span of contiguous elements. Plain Python, used while tracing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """`extent` elements over `threads` threads.

    Vector v = pass * threads + thread holds elements [v * elems, (v + 1) * elems). A vector is 32 bytes of
    16-bit elements on targets with 32-byte accesses and 16 bytes on SM90. It does not depend on a call's
    alignment, so neither does the order of any sum.
    """

    extent: int
    elems: int
    threads: int

    @staticmethod
    def of(target: str, extent: int, max_threads: int) -> Span:
        """The span of `extent` 16-bit elements (a multiple of 8) for at most `max_threads` threads."""
        elems = 8 if target == "sm_90a" or extent % 16 else 16
        return Span(extent, elems, min(max_threads, -(-extent // (32 * elems)) * 32))

    @property
    def vecs(self) -> int:
        """Vectors in the span."""
        return self.extent // self.elems

    @property
    def passes(self) -> int:
        """Vectors a thread owns, at most."""
        return -(-self.vecs // self.threads)

    @property
    def warps(self) -> int:
        return self.threads // 32

    @property
    def exact(self) -> bool:
        """Every thread owns exactly `passes` vectors: no bounds checks."""
        return self.threads * self.passes == self.vecs
