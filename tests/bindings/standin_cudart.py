"""A stand-in for the CUDA runtime: kernels' shared libraries load and run against it without a driver, and
it notes their launches. Tensors stay in CPU memory and only say that they are on a CUDA device."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path
from typing import Any

from bindings import link

SOURCE = r"""
typedef struct {
  unsigned grid[3], block[3];
  unsigned long smem;
  void *stream, *attributes;
  unsigned n_attributes;
} config;
int loads, launches, launch_error;
unsigned last_grid[3], last_block[3];
unsigned long last_smem;

int cudaGetDeviceCount(int *n) { *n = 1; return 0; }
int cudaGetDevice(int *d) { *d = 0; return 0; }
int cudaSetDevice(int d) { return 0; }
int cudaDeviceGetAttribute(int *v, int a, int d) { *v = 232448; return 0; }
int cudaFuncSetAttribute(void *f, int a, int v) { return 0; }
int cudaKernelSetAttributeForDevice(void *k, int a, int v, int d) { return 0; }
int cudaLibraryLoadData(void **lib, const void *data, void *a, void *b, unsigned n, void *c, void *d,
                        unsigned m) {
  loads++; *lib = (void *)16; return 0;
}
int cudaLibraryGetKernel(void **k, void *lib, const char *name) { *k = (void *)32; return 0; }
int cudaLibraryUnload(void *lib) { return 0; }
static int kernel_attribute(int *v, int a, void *k, int d) { *v = 0; return 0; }
int cudaGetDriverEntryPointByVersion(const char *s, void **f, unsigned v, unsigned long long flags,
                                     int *status) {
  *f = (void *)kernel_attribute; if (status) *status = 0; return 0;
}
int cudaLaunchKernelExC(const config *c, const void *f, void **args) {
  for (int i = 0; i < 3; i++) { last_grid[i] = c->grid[i]; last_block[i] = c->block[i]; }
  last_smem = c->smem; launches++; return launch_error;
}
const char *cudaGetErrorName(int e) { return "cudaErrorOfTheStandIn"; }
const char *cudaGetErrorString(int e) { return "as asked for"; }
"""


def build(directory: Path, library: bytes, major: int = 13) -> Path:
    """Compiles the stand-in with everything that `library` wants of a CUDA runtime; what it has no meaning
    for fails."""
    source, out = directory / "cudart.c", directory / f"libcudart.so.{major}"
    named = set(re.findall(r"\b(cuda\w+)\(", SOURCE))
    missing = [n for n in link.undefined(library) if n.startswith("cuda") and n not in named]
    source.write_text(SOURCE + "".join(f"int {name}(void) {{ return 999; }}\n" for name in missing))
    command = link.compiler()
    assert command is not None
    options = ["-shared", "-fPIC", "-nostdlib", "-w", f"-Wl,-soname,{out.name}", "-o", str(out)]
    subprocess.run([*command, *options, str(source)], check=True)
    return out


class Standin:
    """The stand-in in this process. Load it before the first kernel, and where no other CUDA runtime is
    loaded."""

    def __init__(self, path: str):
        self._library = ctypes.CDLL(path)

    def __getattr__(self, name: str) -> int:
        return ctypes.c_int.in_dll(self._library, name).value

    def fail_launches(self, code: int) -> None:
        """Makes launches return an error code."""
        ctypes.c_int.in_dll(self._library, "launch_error").value = code

    def last(self, name: str) -> list[int]:
        """The last launch's "grid" or "block"."""
        return list((ctypes.c_uint * 3).in_dll(self._library, f"last_{name}"))

    @property
    def smem(self) -> int:
        """The dynamic shared memory that the last launch asked for."""
        return ctypes.c_ulong.in_dll(self._library, "last_smem").value


class OnCuda:
    """A CPU tensor that says it is on CUDA device 0 to whom asks through DLPack."""

    def __init__(self, tensor: Any):
        self._tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, **_: Any) -> Any:
        capsule = self._tensor.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        ctypes.c_int.from_address(pointer(capsule, b"dltensor") + 8).value = 2  # DLTensor.device.device_type
        return capsule


def on_cuda(tensor: Any) -> Any:
    """The tensor as a TVM-FFI tensor that claims to be on CUDA device 0."""
    import tvm_ffi

    return tvm_ffi.from_dlpack(OnCuda(tensor))
