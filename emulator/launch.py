"""What a launch call says: the bytes of cudaLaunchConfig_t and of the arguments."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from emulator.errors import EmulatorError
from emulator.findings import Finding
from emulator.machine import Kernel
from emulator.targets import Target

_COOPERATIVE, _CLUSTER, _DEPENDENT, _PREFERRED_CLUSTER = 2, 4, 6, 11
_IGNORED = {3, 9, 12, 13, 14, 15}  # synchronisation policy, priority, ... : nothing that a kernel could see


@dataclass(frozen=True)
class Config:
    """Grid, block and cluster extents; bytes of dynamic shared memory; launch attributes."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared: int
    cooperative: bool
    dependent: bool


def three(extents: Sequence[int]) -> tuple[int, int, int]:
    """Up to three extents, ones where none are given."""
    x, y, z = (*extents, 1, 1, 1)[:3]
    return x, y, z


def read_config(address: int) -> Config:
    """Raises EmulatorError for an attribute that is not known."""
    gx, gy, gz, bx, by, bz, shared, _, attributes, count = struct.unpack(
        "<6IQQQI", ctypes.string_at(address, 52)
    )
    cluster, cooperative, dependent = (1, 1, 1), False, False
    for i in range(count):
        at = attributes + 72 * i
        kind = struct.unpack("<i", ctypes.string_at(at, 4))[0]
        value = ctypes.string_at(at + 8, 12)
        if kind == _CLUSTER:
            x, y, z = struct.unpack("<3I", value)
            cluster = (x or 1, y or 1, z or 1)
        elif kind == _COOPERATIVE:
            cooperative = struct.unpack_from("<i", value)[0] != 0
        elif kind == _DEPENDENT:
            dependent = struct.unpack_from("<i", value)[0] != 0
        elif kind != _PREFERRED_CLUSTER and kind not in _IGNORED:
            raise EmulatorError(f"launch attribute {kind} is not emulated")
    return Config((gx, gy, gz), (bx, by, bz), cluster, shared, cooperative, dependent)


def read_params(kernel: Kernel, arguments: Any) -> ctypes.Array[ctypes.c_char]:
    """The kernel's parameter bytes, copied from where the arguments point."""
    return pack_params(
        kernel, [ctypes.string_at(arguments[i], size) for i, (_, size) in enumerate(kernel.translated.params)]
    )


def pack_params(kernel: Kernel, values: Sequence[bytes]) -> ctypes.Array[ctypes.c_char]:
    """The kernel's parameter bytes from those of each parameter."""
    whole = bytearray(kernel.translated.param_bytes)
    for value, (offset, size) in zip(values, kernel.translated.params, strict=True):
        whole[offset : offset + size] = value
    # the machine reads tensor maps here: 64-byte alignment, as the device's parameter bank gives
    buffer = ctypes.create_string_buffer(len(whole) + 64)
    start = -ctypes.addressof(buffer) % 64
    aligned = (ctypes.c_char * max(len(whole), 1)).from_buffer(buffer, start)
    ctypes.memmove(aligned, bytes(whole), len(whole))
    return aligned


def refuse(config: Config, kernel: Kernel, target: Target) -> Finding | None:
    """A launch that a device would refuse."""
    t = kernel.translated
    threads = config.block[0] * config.block[1] * config.block[2]
    size = config.cluster[0] * config.cluster[1] * config.cluster[2]
    why = None
    if t.static_shared + config.shared > target.shared_limit:
        shared = t.static_shared + config.shared
        why = f"{shared} bytes of shared memory; {target.name} has {target.shared_limit} a CTA"
    elif threads > 1024 or threads == 0:
        why = f"{threads} threads a CTA, allowed 1 to 1024"
    elif t.required_threads and threads != _product(t.required_threads):
        why = f"{threads} threads a CTA; the kernel was compiled for {_product(t.required_threads)}"
    elif t.most_threads and threads > _product(t.most_threads):
        why = f"{threads} threads a CTA; the kernel was compiled for at most {_product(t.most_threads)}"
    elif size > 16:
        why = f"a cluster of {size} CTAs, allowed 16"
    elif any(g % c for g, c in zip(config.grid, config.cluster, strict=True)) or 0 in config.grid:
        why = f"a grid of {config.grid} CTAs in clusters of {config.cluster}"
    elif config.cooperative and _product(config.grid) > target.sms * _ctas_an_sm(config, kernel, target):
        ctas = _product(config.grid)
        why = f"a cooperative grid of {ctas} CTAs, which {target.sms} SMs cannot hold at a time"
    if why is None:
        return None
    return Finding("limit", f"the launch asks for {why}", t.name, 0, "", 0, None, (0, 0, 0), None, 1)


def _ctas_an_sm(config: Config, kernel: Kernel, target: Target) -> int:
    shared = kernel.translated.static_shared + config.shared + 1024
    return max(1, min(2048 // _product(config.block), (target.shared_limit + 1024) // shared, 32))


def resident_limit(config: Config, kernel: Kernel, target: Target) -> int:
    """Most clusters that the device holds at a time."""
    return max(1, target.sms * _ctas_an_sm(config, kernel, target) // _product(config.cluster))


def integers(config: Config, kernel: Kernel, target: Target, stream: int) -> list[int]:
    """As emu_machine_grid takes them."""
    t = kernel.translated
    return [
        *config.grid,
        *config.block,
        *config.cluster,
        t.static_shared + config.shared,
        config.shared,
        t.register_bytes,
        int(config.cooperative),
        int(config.dependent),
        t.param_bytes,
        resident_limit(config, kernel, target),
        stream,
    ]


def _product(values: Sequence[int]) -> int:
    out = 1
    for value in values:
        out *= value
    return out
