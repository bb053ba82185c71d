"""What a run found wrong."""

from __future__ import annotations

from dataclasses import dataclass

from emulator.errors import EmulatorError

CATEGORIES = (
    "bounds",
    "alignment",
    "uninitialized",
    "race",
    "proxy",
    "mbarrier",
    "barrier",
    "tmem",
    "deadlock",
    "pdl",
    "limit",
    "descriptor",
    "operand",
    "async",
)
"""Names of the checks, in the order of emu_category in csrc/machine.h."""


@dataclass(frozen=True)
class Finding:
    """One thing that a kernel did wrong at one place.

    check: one of CATEGORIES. thread: in its CTA, None for a whole warp's. count: how often it was met."""

    check: str
    message: str
    kernel: str
    ptx_line: int
    ptx: str
    warp: int
    thread: int | None
    cta: tuple[int, int, int]
    source: tuple[str, int] | None
    count: int
    rank: int | None = None

    def __str__(self) -> str:
        who = f"warp {self.warp}" if self.thread is None else f"thread {self.thread}"
        where = f"PTX line {self.ptx_line}"
        if self.ptx:
            where += f" `{self.ptx}`"
        if self.source:
            where += f" ({self.source[0]}:{self.source[1]})"
        rank = "" if self.rank is None else f"rank {self.rank}, "
        times = "" if self.count == 1 else f" [{self.count} times]"
        place = f"{rank}CTA {self.cta}, {who}, {where}, kernel {_short(self.kernel)}{times}"
        return f"{self.check}: {self.message}; {place}"


class FindingsError(EmulatorError):
    """A launch had findings; `findings` holds them."""

    def __init__(self, findings: list[Finding]) -> None:
        self.findings = findings
        shown = "\n".join(f"  {f}" for f in findings[:8])
        more = f"\n  and {len(findings) - 8} more" if len(findings) > 8 else ""
        super().__init__(f"{len(findings)} finding{'s' if len(findings) > 1 else ''}:\n{shown}{more}")


def _short(name: str) -> str:
    return name if len(name) <= 72 else name[:69] + "..."
