"""PTX of what the DSL compiles, kept by the digest of its cubin, so that a launch can be paired with its
text."""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from emulator.errors import EmulatorError

_FATBIN = 0xBA55ED50
_MARK = "_emulator_captured"
_ptx_of_cubin: dict[
    str, str
] = {}  # owner: this module; a compiled function outlives the device it was compiled on


def cubin_of_image(address: int) -> bytes:
    """The cubin inside the fatbin (or the cubin itself) that host code hands to the runtime's load call."""
    import ctypes

    head = ctypes.string_at(address, 16)
    if struct.unpack_from("<I", head)[0] == _FATBIN:
        entry = ctypes.string_at(address + 16, 16)
        header, size = struct.unpack_from("<I", entry, 4)[0], struct.unpack_from("<Q", entry, 8)[0]
        return ctypes.string_at(address + 16 + header, size)
    if head[:4] == b"\x7fELF":
        header = ctypes.string_at(address, 64)
        phoff, shoff = struct.unpack_from("<QQ", header, 32)
        phentsize, phnum, shentsize, shnum = struct.unpack_from("<HHHH", header, 54)
        return ctypes.string_at(address, max(phoff + phentsize * phnum, shoff + shentsize * shnum))
    raise EmulatorError(
        f"the image that host code loads is neither a fatbin nor a cubin (it begins {head[:4]!r})"
    )


def digest(cubin: bytes) -> str:
    return hashlib.sha256(cubin).hexdigest()


def ptx_for(cubin: bytes) -> str | None:
    """The PTX that was captured when this cubin was compiled."""
    return _ptx_of_cubin.get(digest(cubin))


def remember(cubin: bytes, ptx: str) -> None:
    """Pairs a cubin with its PTX."""
    _ptx_of_cubin[digest(cubin)] = ptx


def captured(artifacts: Any) -> bool:
    """Whether a compiled function's artifacts are of a compilation that was captured here: its host code then
    calls the stand-in. The same kernel compiled elsewhere has the same cubin."""
    return bool(getattr(artifacts, _MARK, False))


@contextmanager
def capturing() -> Iterator[None]:
    """While open, every compilation that keeps its PTX and cubin is remembered."""
    from cutlass.base_dsl.jit_executor import JitFunctionArtifacts

    original = JitFunctionArtifacts.__post_init__

    @functools.wraps(original)
    def post_init(self: Any) -> None:
        original(self)
        ptx, cubin = self.PTX, self.CUBIN
        if isinstance(ptx, bytes):
            ptx = ptx.decode()
        if isinstance(ptx, str) and ".version" in ptx and isinstance(cubin, bytes):
            remember(cubin, ptx)
            setattr(self, _MARK, True)

    JitFunctionArtifacts.__post_init__ = post_init
    try:
        yield
    finally:
        JitFunctionArtifacts.__post_init__ = original
