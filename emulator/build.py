"""Shared libraries from C sources, built once by the system's compiler and kept by content.

The cache is `FLASHNEXT_EMULATOR_CACHE`, else `flashnext-emulator` in the user's cache directory. Entries
are named by a digest of everything that decides their bytes, and put in place by renaming, so any number
of processes may share it.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

from emulator.errors import EmulatorError

SOURCES = Path(__file__).resolve().parent / "csrc"


def cache_directory() -> Path:
    """Where built libraries are kept; made, for the user alone, if it is not there."""
    named = os.environ.get("FLASHNEXT_EMULATOR_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = Path(named) if named else base / "flashnext-emulator"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise EmulatorError(f"FLASHNEXT_EMULATOR_CACHE: cannot make {path}: {error}") from error
    return path


@functools.cache
def compiler() -> tuple[str, ...]:
    """The system's C compiler: CC, else cc, gcc or clang. Raises EmulatorError if there is none."""
    named = os.environ.get("CC", "").split()
    for command in (named, ["cc"], ["gcc"], ["clang"]):
        if command and shutil.which(command[0]):
            return tuple(command)
    raise EmulatorError("the emulator needs a C compiler: set CC, or install cc, gcc or clang")


@functools.cache
def _compiler_identity() -> str:
    text = subprocess.run([*compiler(), "--version"], capture_output=True, text=True).stdout
    # -march=native: what one CPU takes another may not
    flags = ""
    try:
        cpu = Path("/proc/cpuinfo").read_text()
        flags = next((line for line in cpu.splitlines() if line.startswith(("flags", "Features"))), "")
    except OSError:
        pass
    return f"{text.splitlines()[:1]}{platform.machine()}{flags}"


@functools.cache
def sources_digest(directory: Path = SOURCES) -> str:
    """Digest of every C source and header of a directory."""
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*.[ch]")):
        digest.update(path.relative_to(directory).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def library(name: str, sources: Iterable[str | Path], options: tuple[str, ...], identity: str) -> Path:
    """The shared library built from `sources` (paths, or C text), from the cache if it is there.

    identity: everything that decides the result besides options, compiler and machine."""
    key = hashlib.sha256(
        "\0".join((identity, *options, *compiler(), _compiler_identity())).encode()
    ).hexdigest()[:32]
    out = cache_directory() / f"{name}-{key}.so"
    if out.exists():
        return out
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=out.parent) as scratch:
        files = []
        for i, source in enumerate(sources):
            if isinstance(source, Path):
                files.append(source)
            else:
                files.append(Path(scratch) / f"{name}{i}.c")
                files[-1].write_text(source)
        built = Path(scratch) / out.name
        command = [
            *compiler(),
            "-shared",
            "-fPIC",
            "-std=gnu11",
            "-w",
            *options,
            "-I",
            str(SOURCES),
            "-o",
            str(built),
        ]
        done = subprocess.run([*command, *map(str, files), "-lm"], capture_output=True, text=True)
        if done.returncode:
            kept = out.with_suffix(".failed.c")
            if files:
                shutil.copyfile(files[0], kept)
            raise EmulatorError(
                f"{compiler()[0]} could not build {name} (source kept as {kept}):\n{done.stderr[-4000:]}"
            )
        os.replace(built, out)
    return out


def intercept_library() -> Path:
    """The stand-in for the DSL's CUDA runtime library."""
    source = SOURCES / "host" / "intercept.c"
    return library("intercept", [source], ("-O1",), source.read_text())


def machine_library() -> Path:
    """The machine: memory, scheduling, checks, and the tensor units."""
    files = [p for p in sorted(SOURCES.rglob("*.c")) if p.parent.name != "host"]
    return library("machine", files, ("-O2", "-march=native", "-ffp-contract=off", "-g"), sources_digest())
