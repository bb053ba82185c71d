"""The little of ELF that kernels need: sections, symbols, and the CUDA code inside a host object."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

FATBIN_MAGIC = struct.pack("<I", 0xBA55ED50)

_CUBIN_KIND = 2
_SHT_NOBITS = 8
_SHN_UNDEF = 0
_EM_CUDA = 190


class ElfError(ValueError):
    """The bytes are no ELF file of the kind that was expected."""


@dataclass(frozen=True)
class Section:
    """One section. data: empty for sections without contents in the file; size: in memory."""

    name: str
    kind: int
    size: int
    align: int
    link: int
    entry_size: int
    data: bytes


@dataclass(frozen=True)
class Symbol:
    """One symbol. weak: need not be found at load time."""

    name: str
    undefined: bool
    weak: bool


class Elf:
    """A 64-bit little-endian ELF file, read."""

    def __init__(self, data: bytes):
        if data[:4] != b"\x7fELF" or len(data) < 64 or data[4:6] != b"\x02\x01":
            raise ElfError("not a 64-bit little-endian ELF file")
        self.machine: int = struct.unpack_from("<H", data, 18)[0]
        (table,) = struct.unpack_from("<Q", data, 40)
        entry, count, names = struct.unpack_from("<HHH", data, 58)
        if table + entry * count > len(data) or names >= max(count, 1):
            raise ElfError(f"section table ends at byte {table + entry * count} of {len(data)}")
        headers = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * entry) for i in range(count)]
        strings = self._contents(data, headers[names]) if headers else b""
        self.sections = [
            Section(_string(strings, h[0]), h[1], h[5], h[8], h[6], h[9], self._contents(data, h))
            for h in headers
        ]

    @staticmethod
    def _contents(data: bytes, header: tuple[int, ...]) -> bytes:
        kind, offset, size = header[1], header[4], header[5]
        if kind == _SHT_NOBITS:
            return b""
        if offset + size > len(data):
            raise ElfError(f"a section ends at byte {offset + size} of {len(data)}")
        return data[offset : offset + size]

    def section(self, name: str) -> Section | None:
        """The section of a name, or None."""
        return next((s for s in self.sections if s.name == name), None)

    def symbols(self, table: str) -> list[Symbol]:
        """The symbols of the table of a name (".symtab", ".dynsym"), in its order; none without it."""
        found = self.section(table)
        if found is None:
            return []
        strings = self.sections[found.link].data
        symbols = []
        for name, info, _, index, _, _ in struct.iter_unpack("<IBBHQQ", found.data):
            symbols.append(Symbol(_string(strings, name), index == _SHN_UNDEF, info >> 4 == 2))
        return symbols


def _string(table: bytes, offset: int) -> str:
    return table[offset : table.index(b"\0", offset)].decode("utf-8", "replace")


def cubins(data: bytes) -> list[bytes]:
    """The CUDA binaries in a host object or library, in order: the payloads of the fat binaries it embeds."""
    return list(_cubins(data))


def _cubins(data: bytes) -> Iterator[bytes]:
    start = data.find(FATBIN_MAGIC)
    while start >= 0:
        _, header, size = struct.unpack_from("<HHQ", data, start + 4)
        at, end = start + header, start + header + size
        if end > len(data):
            raise ElfError(f"a fat binary ends at byte {end} of {len(data)}")
        while at < end:
            kind, _, entry_header, entry_size = struct.unpack_from("<HHIQ", data, at)
            if entry_header == 0:
                raise ElfError(f"a fat binary entry at byte {at} has no header")
            payload = data[at + entry_header : at + entry_header + entry_size]
            if kind == _CUBIN_KIND:
                if Elf(payload).machine != _EM_CUDA:
                    raise ElfError(f"the payload at byte {at} is no CUDA binary")
                yield payload
            at += entry_header + entry_size
        start = data.find(FATBIN_MAGIC, end)
