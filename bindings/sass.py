"""What a compiled kernel uses: registers, stack, spills, shared memory, and its notable instructions.

Resources are read from the CUDA binary itself. Instructions come from NVIDIA's disassembler:
`FLASHNEXT_NVDISASM`, else the `nvidia-cuda-nvdisasm` package, else an installed toolkit. Without one,
resources alone are reported.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import itertools
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bindings.elf import Elf, cubins

NVDISASM_VARIABLE = "FLASHNEXT_NVDISASM"

RESERVED_SMEM = 1024
"""Bytes at the start of a CTA's shared memory that the system keeps, from SM90 on; sections count them,
kernels do not."""

# Attributes of .nv.info that are used here; the format byte says how their value is stored.
_FORMAT_BYTE, _FORMAT_HALF, _FORMAT_SIZED = 2, 3, 4
_FRAME_SIZE, _MIN_STACK_SIZE, _REGISTERS = 0x11, 0x12, 0x2F
_MAX_THREADS, _REQUIRED_THREADS = 0x05, 0x10

# Instructions that are always counted, by the first part of their mnemonic. Memory accesses carry their
# width in bits.
MEMORY = ("LDG", "STG", "LD", "ST", "LDS", "STS", "LDL", "STL", "LDGSTS")
NOTABLE = {
    "TMA and bulk copies": ("UTMALDG", "UTMASTG", "UTMAREDG", "UBLKCP", "UBLKRED"),
    "tensor cores": ("UTCHMMA", "UTCQMMA", "UTCIMMA", "HGMMA", "QGMMA", "IGMMA", "HMMA", "QMMA", "IMMA"),
    "tensor memory": ("LDTM", "STTM", "UTCCP", "UTCBAR"),
    "across lanes": ("REDUX", "SHFL", "VOTE", "MATCH"),
    "barriers": ("BAR", "SYNCS", "DEPBAR", "MEMBAR", "FENCE", "UCGABAR_ARV", "UCGABAR_WAIT"),
    "atomics": ("ATOM", "ATOMG", "ATOMS", "RED", "REDG"),
    "dependent launch": ("ACQBULK", "PREEXIT"),
    "matrix fragments": ("LDSM", "STSM", "MOVM"),
}
_NOTABLE = frozenset(name for group in NOTABLE.values() for name in group)

INSTRUCTION_BYTES = 16

_INSTRUCTION = re.compile(
    r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*(?:\.\w+)*)", re.MULTILINE
)
_WIDTH = re.compile(r"\.(?:[US](8|16)|(32|64|96|128|256))(?=\.|$)")


class DisassemblyError(RuntimeError):
    """The disassembler is there and failed."""


@dataclass(frozen=True)
class Report:
    """A kernel's use of resources; for a binary with several kernels, the most of any and the sum of
    instructions.

    registers: a thread's. stack: bytes of local memory a thread's frame takes, spills included.
    spill_bytes: bytes that the instructions which store to local memory write, each counted once; device
    code here indexes no local arrays, so that is what the assembler reports as spill stores. None without a
    disassembler, unless the frame is empty. threads: of a CTA, 0 if left open. dynamic_smem: None if
    decided at run time. instructions: by mnemonic and width in bits, "total" included; empty without a
    disassembler.
    """

    registers: int
    stack: int
    spill_bytes: int | None
    threads: int
    static_smem: int
    dynamic_smem: int | None
    instructions: Mapping[str, int]

    @property
    def smem(self) -> int:
        """Shared memory of a CTA in bytes, as far as it is known before the launch."""
        return self.static_smem + (self.dynamic_smem or 0)

    @property
    def problems(self) -> list[str]:
        """What `--check` rejects."""
        found = []
        if self.spill_bytes is None or self.spill_bytes:
            found.append("spills" if self.spill_bytes is None else f"spills {self.spill_bytes} bytes")
        if self.stack:
            found.append(f"uses {self.stack} bytes of stack")
        return found

    def as_json(self) -> dict[str, Any]:
        """The fields, with `smem`."""
        return {**asdict(self), "instructions": dict(self.instructions), "smem": self.smem}

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> Report:
        """The report whose `as_json` this is."""
        return Report(**{name: value for name, value in fields.items() if name != "smem"})


def reports(objects: Sequence[tuple[bytes, str, int | None]]) -> list[Report]:
    """The reports of host objects or libraries: (contents, target, dynamic shared memory) each.

    The disassembler takes far longer to start than to work, so it is called once a target. Raises ElfError
    for bytes that are no ELF file, ValueError for an object without a kernel, DisassemblyError."""
    found = [[_kernels(binary) for binary in cubins(data)] for data, _, _ in objects]
    if not all(any(binaries) for binaries in found):
        raise ValueError("the object holds no kernel")
    counts: list[Counter[str]] = [Counter() for _ in objects]
    tool = nvdisasm()
    if tool is not None:
        for target in dict.fromkeys(target for _, target, _ in objects):
            code = [
                (i, kernel.code)
                for i, kernels in enumerate(found)
                if objects[i][1] == target
                for binary in kernels
                for kernel in binary
            ]
            for (i, _), counted in zip(code, _count_all([c for _, c in code], target, tool), strict=True):
                counts[i] += counted
    made = []
    for (_, _, dynamic_smem), binaries, counted in zip(objects, found, counts, strict=True):
        kernels = [kernel for binary in binaries for kernel in binary]
        stack = max(k.stack for k in kernels)
        spills = sum(int(name[4:]) // 8 * n for name, n in counted.items() if name.startswith("STL."))
        made.append(
            Report(
                registers=max(k.registers for k in kernels),
                stack=stack,
                spill_bytes=spills if counted or not stack else None,
                threads=max(k.threads for k in kernels),
                static_smem=max(k.smem for k in kernels),
                dynamic_smem=dynamic_smem,
                instructions=dict(sorted(counted.items())),
            )
        )
    return made


@dataclass
class _Kernel:
    """A kernel of a CUDA binary."""

    name: str
    code: bytes
    registers: int = 0
    stack: int = 0
    threads: int = 0
    smem: int = 0


def _kernels(binary: bytes) -> list[_Kernel]:
    elf = Elf(binary)
    names = [s.name for s in elf.symbols(".symtab")]
    prefix = ".text."
    kernels = {
        s.name[len(prefix) :]: _Kernel(s.name[len(prefix) :], s.data)
        for s in elf.sections
        if s.name.startswith(prefix)
    }
    general = elf.section(".nv.info")
    for attribute, value in _attributes(general.data if general else b""):
        if attribute in (_FRAME_SIZE, _MIN_STACK_SIZE, _REGISTERS) and len(value) >= 8:
            symbol, amount = struct.unpack_from("<II", value)
            kernel = kernels.get(names[symbol] if symbol < len(names) else "")
            if kernel is not None and attribute == _REGISTERS:
                kernel.registers = amount
            elif kernel is not None:
                kernel.stack = max(kernel.stack, amount)
    for name, kernel in kernels.items():
        own = elf.section(f".nv.info.{name}")
        for attribute, value in _attributes(own.data if own else b""):
            if attribute in (_MAX_THREADS, _REQUIRED_THREADS) and len(value) >= 12:
                x, y, z = struct.unpack_from("<III", value)
                kernel.threads = x * y * z
        shared = elf.section(f".nv.shared.{name}")
        if shared is not None:
            kernel.smem = max(shared.size - RESERVED_SMEM, 0)
    return list(kernels.values())


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(info):
        form, attribute, half = struct.unpack_from("<BBH", info, at)
        size = half if form == _FORMAT_SIZED else 0
        if form == _FORMAT_SIZED:
            yield attribute, info[at + 4 : at + 4 + size]
        elif form in (_FORMAT_BYTE, _FORMAT_HALF):
            yield attribute, info[at + 2 : at + 4]
        at += 4 + size


def nvdisasm() -> str | None:
    """The disassembler, or None where there is none. Raises DisassemblyError if FLASHNEXT_NVDISASM names no
    program."""
    named = os.environ.get(NVDISASM_VARIABLE)
    if named:
        found = shutil.which(named)
        if found is None:
            raise DisassemblyError(f"{NVDISASM_VARIABLE}={named}: no such program")
        return found
    return _installed()


@functools.cache
def _installed() -> str | None:
    candidates: list[Path] = []
    try:
        files = importlib.metadata.files("nvidia-cuda-nvdisasm") or []
        candidates += [Path(str(f.locate())) for f in files if f.name == "nvdisasm"]
    except importlib.metadata.PackageNotFoundError:
        pass
    candidates += [Path(p) for p in (shutil.which("nvdisasm"), "/usr/local/cuda/bin/nvdisasm") if p]
    return next((str(p) for p in candidates if os.access(p, os.X_OK)), None)


@functools.cache
def tool_identity() -> str:
    """Digest of what a report depends on besides the object: the disassembler, and this file."""
    tool = nvdisasm()
    digest = hashlib.sha256(Path(__file__).read_bytes())
    if tool is not None:
        facts = os.stat(tool)
        digest.update(f"{tool} {facts.st_size} {facts.st_mtime_ns}".encode())
    return digest.hexdigest()


def _count_all(codes: Sequence[bytes], target: str, tool: str) -> list[Counter[str]]:
    """Counts the notable instructions of each piece of code, and all of them as "total". Raises
    DisassemblyError."""
    text = disassemble(b"".join(codes), target, tool)
    counts: list[Counter[str]] = [Counter() for _ in codes]
    ends = list(itertools.accumulate(len(code) for code in codes))
    piece = lines = 0
    for found in _INSTRUCTION.finditer(text):
        offset, mnemonic = int(found[1], 16), found[2]
        while piece < len(ends) and offset >= ends[piece]:
            piece += 1
        if piece == len(ends):
            break
        lines += 1
        name = mnemonic.partition(".")[0]
        counts[piece]["total"] += 1
        if name in MEMORY:
            counts[piece][f"{name}.{_width(mnemonic)}"] += 1
        elif name in _NOTABLE:
            counts[piece][name] += 1
    if ends and lines != ends[-1] // INSTRUCTION_BYTES:
        raise DisassemblyError(f"{tool}: {lines} instructions in its output, {ends[-1]} bytes of code given")
    return counts


def disassemble(code: bytes, target: str, tool: str) -> str:
    """The instructions in a piece of machine code for a target, as text. Raises DisassemblyError."""
    with tempfile.NamedTemporaryFile(prefix="flashnext-", suffix=".bin") as file:
        file.write(code)
        file.flush()
        command = [tool, "-b", target.replace("sm_", "SM"), file.name]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DisassemblyError(f"{tool}: {error}") from None
    if done.returncode:
        raise DisassemblyError(f"{tool} exited with status {done.returncode}: {done.stderr.strip()[:500]}")
    return done.stdout


def _width(mnemonic: str) -> int:
    """The width in bits of a memory access: the last one named (`LDG.E.ENL2.256`), else 32."""
    widths = _WIDTH.findall(mnemonic)
    return int(widths[-1][0] or widths[-1][1]) if widths else 32
