"""Makes a shared library of a kernel's object, so that loading it takes the dynamic loader alone.

The object calls three libraries: TVM-FFI, the CUDA runtime, and a thin host runtime of the DSL. The last is
linked in statically from the DSL's package, with the error functions that its archive lacks (`SHIM`), so a
host that loads the library needs TVM-FFI and `libcudart.so.N` only. Needed here: a C compiler driver with a
linker; no headers, no C library development files.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from bindings.compiler import flavour, package_directories
from bindings.elf import Elf, ElfError

SHIM = r"""
typedef void (*raise_fn)(const char *kind, const char **parts, int count);
extern const char *cudaGetErrorName(int);
extern const char *cudaGetErrorString(int);
extern int snprintf(char *, unsigned long, const char *, ...);

void CuteDSLRT_TVMFFISetRaisedCudaError(raise_fn raise, int code) {
  char text[64];
  if (!raise) return;
  snprintf(text, sizeof text, "CUDA error %d, ", code);
  const char *parts[4] = {text, cudaGetErrorName(code), ": ", cudaGetErrorString(code)};
  raise("RuntimeError", parts, 4);
}

void CuteDSLRT_TVMFFISetRaisedCudaLaunchError(
    raise_fn raise, int gx, int gy, int gz, int bx, int by, int bz, int threads, long long smem, int device,
    int max_threads, int max_bx, int max_by, int max_bz, int max_gx, int max_gy, int max_gz, int max_smem,
    int max_smem_optin, const char *violation, const char *file, int line, int column, int end_column) {
  char text[512];
  (void)column; (void)end_column;
  if (!raise) return;
  snprintf(text, sizeof text,
           "grid (%d, %d, %d), block (%d, %d, %d) of %d threads, %lld bytes of dynamic shared memory on "
           "device %d; its limits: grid (%d, %d, %d), block (%d, %d, %d) of %d threads, %d bytes, %d on "
           "request; launched at line %d of ",
           gx, gy, gz, bx, by, bz, threads, smem, device, max_gx, max_gy, max_gz, max_bx, max_by, max_bz,
           max_threads, max_smem, max_smem_optin, line);
  const char *parts[5] = {"CUDA launch refused (", violation ? violation : "unknown reason", "): ", text,
                          file ? file : "an unknown file"};
  raise("RuntimeError", parts, 5);
}
"""

_EXPORTS = "{ global: __tvm_ffi_*; local: *; };"

# What a library may leave for its host: the CUDA runtime, TVM-FFI, and these of the C library.
_LIBC = frozenset(
    [
        "abort",
        "calloc",
        "exit",
        "fprintf",
        "free",
        "malloc",
        "memcpy",
        "memmove",
        "memset",
        "printf",
        "puts",
        "snprintf",
        "stderr",
        "stdout",
        "strcmp",
        "strlen",
    ]
)


class LinkError(RuntimeError):
    """No library could be made; the object still loads through the DSL."""


def compiler() -> list[str] | None:
    """The command of the C compiler: $CC, or the first of cc, gcc, clang that is installed. None without
    one. Raises LinkError if $CC is no command line."""
    try:
        named = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise LinkError(f"CC={os.environ['CC']}: {error}") from None
    for command in (named, ["cc"], ["gcc"], ["clang"]):
        if command and shutil.which(command[0]):
            return command
    return None


def archive(cudart: int) -> Path | None:
    """The DSL's static host runtime for a major version of the CUDA runtime, or None where it is not
    installed."""
    inside = Path(f"cu{cudart}") / "lib" / "libcuda_dialect_runtime_static.a"
    return next(
        (d / inside for d in package_directories("nvidia_cutlass_dsl") if (d / inside).is_file()), None
    )


@functools.cache
def cudart_major() -> int | None:
    """The CUDA runtime that libraries are linked for: torch's, or for a CPU build of torch the DSL's."""
    import torch

    if torch.version.cuda:
        return int(torch.version.cuda.partition(".")[0])
    return flavour()


def possible() -> bool:
    """Whether a library can be made here, as far as can be told without trying."""
    major = cudart_major()
    try:
        command = compiler()
    except LinkError:
        return False
    return command is not None and major is not None and archive(major) is not None


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LinkError(f"{command[0]}: {error}") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise LinkError(f"{command[0]} exited with status {done.returncode}: " + " | ".join(lines[:4]))


_making_parts = threading.Lock()


def _parts(cc: tuple[str, ...], cudart: int) -> tempfile.TemporaryDirectory[str]:
    """What every link of this process takes: the shim, and an empty library that stands for the CUDA
    runtime, so that none need be installed here. Removed when the process ends."""
    with _making_parts:  # threads that came at once would each make them, and lose all but one's
        return _made_parts(cc, cudart)


@functools.cache
def _made_parts(cc: tuple[str, ...], cudart: int) -> tempfile.TemporaryDirectory[str]:
    directory = tempfile.TemporaryDirectory(prefix="flashnext-link-")
    at = Path(directory.name)
    (at / "shim.c").write_text(SHIM)
    (at / "exports").write_text(_EXPORTS)
    (at / "empty.c").write_text("")
    _run(
        [
            *cc,
            "-c",
            "-O2",
            "-fPIC",
            "-fno-stack-protector",
            "-w",
            "-o",
            str(at / "shim.o"),
            str(at / "shim.c"),
        ]
    )
    soname = f"libcudart.so.{cudart}"
    _run([*cc, "-shared", "-nostdlib", f"-Wl,-soname,{soname}", "-o", str(at / soname), str(at / "empty.c")])
    return directory


def library(object_: bytes, cudart: int) -> bytes:
    """The shared library of a kernel's object, for the CUDA runtime of a major version. Raises LinkError."""
    cc = compiler()
    if cc is None:
        raise LinkError("no C compiler found (looked for $CC, cc, gcc, clang)")
    runtime = archive(cudart)
    if runtime is None:
        raise LinkError(
            f"the DSL's host runtime for CUDA {cudart} is not installed: nvidia-cutlass-dsl[cu{cudart}]"
        )
    ffi = next((d / "lib" / "libtvm_ffi.so" for d in package_directories("tvm_ffi")), None)
    if ffi is None or not ffi.is_file():
        raise LinkError("apache-tvm-ffi is not installed")
    try:
        made = _link(cc, cudart, object_, runtime, ffi)
    except OSError as error:
        raise LinkError(f"cannot write temporary files: {error}") from None
    try:
        needed = undefined(made)
    except ElfError as error:
        raise LinkError(f"{cc[0]} made no library: {error}") from None
    left = [name for name in needed if not name.startswith(("cuda", "TVMFFI")) and name not in _LIBC]
    if left:
        raise LinkError(f"symbols that no library defines: {', '.join(left)}")
    return made


def _link(cc: list[str], cudart: int, object_: bytes, runtime: Path, ffi: Path) -> bytes:
    parts = Path(_parts(tuple(cc), cudart).name)
    with tempfile.TemporaryDirectory(prefix="flashnext-link-") as work:
        source, out = Path(work) / "kernel.o", Path(work) / "kernel.so"
        source.write_bytes(object_)
        _run(
            [
                *cc,
                "-shared",
                "-nostdlib",
                "-o",
                str(out),
                str(source),
                str(parts / "shim.o"),
                str(runtime),
                "-Wl,--no-as-needed",
                str(parts / f"libcudart.so.{cudart}"),
                str(ffi),
                f"-Wl,--version-script,{parts / 'exports'}",
                "-Wl,-z,now,-z,relro,-z,noexecstack,--build-id=none,--strip-all",
            ]
        )
        return out.read_bytes()


def undefined(library_: bytes) -> list[str]:
    """The symbols that a shared library's host has to define."""
    symbols = Elf(library_).symbols(".dynsym")
    return sorted({s.name for s in symbols if s.undefined and not s.weak and s.name})


@functools.cache
def load_cudart(major: int) -> str | None:
    """Loads `libcudart.so.<major>` so that libraries which need it find it; None if so, else why not.

    One that torch has loaded is used; else the system's, else that of an NVIDIA wheel."""
    soname = f"libcudart.so.{major}"
    try:
        ctypes.CDLL(soname)
    except OSError as error:
        reason = str(error)
    else:
        return None
    for root in map(Path, sys.path):
        for path in (
            root / "nvidia" / f"cu{major}" / "lib" / soname,
            root / "nvidia/cuda_runtime/lib" / soname,
        ):
            if path.is_file():
                try:
                    ctypes.CDLL(str(path))
                except OSError as error:
                    reason = str(error)
                else:
                    return None
    return reason
