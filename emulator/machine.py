"""The machine's C interface, and translated kernels as functions of it."""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

from emulator import build
from emulator.counters import NAMES, Traffic
from emulator.errors import EmulatorError, UnknownInstructionError
from emulator.memory import Region
from emulator.ptx.parser import parse
from emulator.translate.emit import Translated, translate, version

_COMMON = ("-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
_OPTIONS = ("-O1", "-ftree-vectorize", *_COMMON)
_BRIEF = ("-O0", *_COMMON)  # a fifth of the build time, twenty times the run time
INTERRUPTED = ctypes.CFUNCTYPE(ctypes.c_int)


class Record(ctypes.Structure):
    """emu_finding_record"""

    _fields_ = (
        ("category", ctypes.c_uint32),
        ("line", ctypes.c_uint32),
        ("lane", ctypes.c_uint32),
        ("warp", ctypes.c_uint32),
        ("cta", ctypes.c_uint32 * 3),
        ("grid", ctypes.c_uint32),
        ("count", ctypes.c_uint32),
        ("text", ctypes.c_char * 400),
    )


@functools.cache
def library() -> ctypes.CDLL:
    """The machine, its symbols visible to translated kernels."""
    lib = ctypes.CDLL(str(build.machine_library()), mode=ctypes.RTLD_GLOBAL)
    u32, u64, ptr = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p
    for name, result, *arguments in (
        ("emu_machine_new", ptr),
        ("emu_machine_free", None, ptr),
        ("emu_machine_configure", None, ptr, u32, u32, u64, u32, u32, u32, INTERRUPTED),
        ("emu_machine_memory", None, ptr, u32, ptr, ptr, ptr, ptr, ptr),
        ("emu_machine_grid", u32, ptr, ptr, ctypes.c_char_p, ptr, ptr),
        ("emu_machine_run", ctypes.c_int, ptr),
        ("emu_machine_reset", None, ptr),
        ("emu_machine_drain", None, ptr),
        ("emu_machine_counters", None, ptr, u32, ptr),
        ("emu_machine_traffic", None, ptr, u32, ptr),
        ("emu_machine_findings", u32, ptr),
        ("emu_machine_finding", ctypes.POINTER(Record), ptr, u32),
        ("emu_machine_fatal", ctypes.c_char_p, ptr),
    ):
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


@dataclass(frozen=True)
class Kernel:
    """A translated entry, loaded."""

    translated: Translated
    address: int
    ptx: tuple[str, ...]  # lines


@functools.lru_cache(maxsize=512)
def kernels(ptx: str, brief: bool = False) -> dict[str, Kernel]:
    """Every entry of a PTX text, translated and loaded. brief: it will not run for long, so building it
    should not take long. Raises UnknownInstructionError at what is not known."""
    library()
    module = parse(ptx)
    if module.version and not module.entries:
        raise UnknownInstructionError("the PTX has no entry")
    out = {}
    for entry in module.entries.values():
        translated = translate(module, entry)
        identity = f"{version()}{build.sources_digest()}{translated.source}"
        path = build.library("kernel", [translated.source], _BRIEF if brief else _OPTIONS, identity)
        loaded = ctypes.CDLL(str(path))
        address = ctypes.cast(loaded.kernel, ctypes.c_void_p).value
        assert address is not None
        _loaded.append(loaded)
        out[entry.name] = Kernel(translated, address, tuple(ptx.splitlines()))
    return out


_loaded: list[ctypes.CDLL] = []  # never unloaded: `kernels` hands out their addresses


class Machine:
    """One emulated device's state: what stays from launch to launch."""

    def __init__(self) -> None:
        self._lib = library()
        self._machine: int = self._lib.emu_machine_new()
        self._free = weakref.finalize(self, self._lib.emu_machine_free, self._machine)
        self._kept: list[Any] = []

    def close(self) -> None:
        """Frees it; otherwise that happens when nobody refers to it any more."""
        self._free()

    @property
    def _at(self) -> int:
        if not self._free.alive:
            raise EmulatorError("the emulated device is closed")
        return self._machine

    def configure(
        self,
        *,
        checks: int,
        policy: int,
        seed: int,
        resident: int,
        sms: int,
        stop_at_first: bool,
        interrupted: Any,
    ) -> None:
        self._kept = [interrupted]
        self._lib.emu_machine_configure(
            self._at, checks, policy, seed, resident, sms, int(stop_at_first), interrupted
        )

    def memory(self, regions: Sequence[Region]) -> None:
        """The memory of the next batch: sorted, disjoint."""
        n = len(regions)
        lo = (ctypes.c_uint64 * n)(*(r.lo for r in regions))
        hi = (ctypes.c_uint64 * n)(*(r.hi for r in regions))
        flags = (ctypes.c_uint32 * n)(*(r.flags for r in regions))
        written = (ctypes.c_void_p * n)(
            *(r.written.ctypes.data if r.written is not None else None for r in regions)
        )
        names = (ctypes.c_char_p * n)(*(r.name.encode() for r in regions))
        self._lib.emu_machine_memory(self._at, n, lo, hi, flags, written, names)

    def grid(self, kernel: Kernel, integers: Sequence[int], params: Any) -> int:
        """Adds a grid to the batch; `integers` as emu_machine_grid says."""
        values = (ctypes.c_uint32 * len(integers))(*integers)
        name = kernel.translated.name.encode()
        return self._lib.emu_machine_grid(self._at, kernel.address, name, values, ctypes.addressof(params))

    def run(self) -> None:
        """Runs the batch to its end. Raises EmulatorError if it had to be abandoned."""
        if self._lib.emu_machine_run(self._at) == 2:
            text = self._lib.emu_machine_fatal(self._at).decode()
            if text == "interrupted":
                raise KeyboardInterrupt
            raise EmulatorError(text)

    def records(self) -> list[Record]:
        count = self._lib.emu_machine_findings(self._at)
        return [
            Record.from_buffer_copy(self._lib.emu_machine_finding(self._at, i).contents) for i in range(count)
        ]

    def counters(self, grid: int) -> dict[str, int]:
        out = (ctypes.c_uint64 * len(NAMES))()
        self._lib.emu_machine_counters(self._at, grid, out)
        return dict(zip(NAMES, out, strict=True))

    def traffic(self, grid: int, regions: Sequence[Region]) -> dict[str, Traffic]:
        """What a grid moved from and to each region that it touched, by name."""
        out = (ctypes.c_uint64 * (4 * len(regions)))()
        self._lib.emu_machine_traffic(self._at, grid, out)
        moved: dict[str, Traffic] = {}
        for i, region in enumerate(regions):
            values = out[4 * i : 4 * i + 4]
            if any(values):
                before = moved.get(region.name, Traffic(0, 0, 0, 0))
                moved[region.name] = Traffic(*(a + b for a, b in zip(values, astuple(before), strict=True)))
        return moved

    def reset(self) -> None:
        """Forgets the batch."""
        self._lib.emu_machine_reset(self._at)

    def drain(self) -> None:
        """Later launches depend on none of the earlier."""
        self._lib.emu_machine_drain(self._at)
