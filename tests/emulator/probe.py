"""The emulator's header-only C code under ctypes, and the DSL's layout algebra evaluated on the host."""

import ctypes
import os
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
HEADERS = HERE.parents[1] / "emulator" / "csrc" / "tensor"

F16, BF16, TF32, E4M3, E5M2, S8, U8, F32, S32 = range(9)
NONE, SW32, SW64, SW128, SW128_ATOM32 = range(5)

TEXT_RESULTS = ("descriptor", "instruction", "tmem_free", "copy_box", "map_fields", "machine_findings")
UNSIGNED = ("swizzle", "row_lane")


def compiler() -> str | None:
    """The C compiler that the probe is built with."""
    return next((c for c in (os.environ.get("CC"), "cc", "gcc", "clang") if c and shutil.which(c)), None)


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The probe, built afresh: it holds no state that a second process could want."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "probe.so"
        flags = [
            "-O2",
            "-march=native",
            "-ffp-contract=off",
            "-Wall",
            "-Werror",
            "-shared",
            "-fPIC",
            "-Wl,-Bsymbolic",  # the machine may be loaded in the same process, under the same names
            f"-I{HEADERS}",
        ]
        subprocess.run([compiler() or "cc", *flags, str(HERE / "probe.c"), "-o", str(out), "-lm"], check=True)
        lib = ctypes.CDLL(str(out))
    for name in TEXT_RESULTS:
        getattr(lib, name).restype = ctypes.c_char_p
    for name in UNSIGNED:
        getattr(lib, name).restype = ctypes.c_uint32
    return lib


def ptr(array: np.ndarray) -> ctypes.c_void_p:
    """The address of a contiguous array, as an argument."""
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)


def text(result: bytes | None) -> str | None:
    """A C error message as a string."""
    return result.decode() if result else None


def descriptor(generation, start, leading, stride, swizzle, base=0) -> ctypes.c_uint64:
    """A matrix descriptor put together from the ISA's table: wgmma (9) or tcgen05 (10)."""
    bits = (start >> 4 & 0x3FFF) | (leading >> 4) << 16 | (stride >> 4) << 32 | base << 49
    if generation == 9:
        bits |= {NONE: 0, SW128: 1, SW64: 2, SW32: 3}[swizzle] << 62
    else:
        bits |= 1 << 46 | {NONE: 0, SW128_ATOM32: 1, SW128: 2, SW64: 4, SW32: 6}[swizzle] << 61
    return ctypes.c_uint64(bits)


def traced(function, target: str = "sm_100a"):
    """What a Python function of the DSL's layout algebra returns when the DSL traces it for a target."""
    import cutlass.cute as cute

    result = []

    @cute.jit
    def host():
        result.append(function())

    cute.compile(host, options=f"--gpu-arch {target}")
    return result[0]


def bf16(values: np.ndarray) -> np.ndarray:
    """fp32 values to the bits of bf16, round to nearest even (finite values)."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


class Machine:
    """The units' stand-in machine, reset: a cluster of two CTAs of eight warps, without shadow state."""

    def __init__(self):
        lib = library()
        lib.machine_warp.restype = ctypes.c_void_p
        lib.machine_window.restype = ctypes.c_void_p
        lib.machine_reset()
        self.kept = []
        self.relaxed()
        self.unsettled(0, 0)

    def warp(self, index: int) -> ctypes.c_void_p:
        """Warp index % 8 of CTA index // 8."""
        return ctypes.c_void_p(library().machine_warp(index))

    def window(self, rank: int) -> np.ndarray:
        """A CTA's 256 KiB of shared memory."""
        return np.ctypeslib.as_array((ctypes.c_uint8 * 0x40000).from_address(library().machine_window(rank)))

    def findings(self) -> str:
        """All findings so far, a line each."""
        return library().machine_findings().decode()

    def unsettled(self, start: int, end: int) -> None:
        """From here on these bytes of CTA 0 count as unwritten, or written by what is not ordered before."""
        for name, value in (("unsettled_from", start), ("unsettled_to", end)):
            ctypes.c_uint32.in_dll(library(), name).value = value

    def strict(self) -> None:
        """From here on nothing that another agent did is ordered before an access."""
        ctypes.c_int.in_dll(library(), "relaxed_order").value = 0

    def relaxed(self) -> None:
        """From here on every agent is ordered after all others."""
        ctypes.c_int.in_dll(library(), "relaxed_order").value = 1

    def vector(self, registers: np.ndarray) -> ctypes.Array:
        """A vector operand: pointers to the rows of [register][lane]."""
        self.kept.append(registers)
        return (ctypes.c_void_p * len(registers))(*(row.ctypes.data for row in registers))

    def lanes(self, value: int, wide: bool = False) -> ctypes.c_void_p:
        """An operand that holds one value in all lanes."""
        self.kept.append(np.full(32, value, np.uint64 if wide else np.uint32))
        return ptr(self.kept[-1])
