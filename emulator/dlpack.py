"""CPU tensors presented as CUDA ones, for functions that TVM-FFI calls."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_CUDA = 2


class _AsCuda:
    """A tensor's DLPack capsule with its device type set to CUDA."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack__(self, **_: Any) -> Any:
        capsule = self._tensor.detach().__dlpack__()
        # DLManagedTensor begins with its DLTensor: data, then the device's type and index
        ctypes.c_int32.from_address(_pointer(capsule, b"dltensor") + 8).value = _CUDA
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_CUDA, 0)


def as_cuda(argument: Any) -> Any:
    """A torch CPU tensor as a tvm_ffi tensor that says it is on CUDA device 0; anything else as it is."""
    torch = sys.modules.get("torch")  # whoever passes a tensor has imported it
    if torch is None or not isinstance(argument, torch.Tensor) or argument.device.type != "cpu":
        return argument
    import tvm_ffi

    return tvm_ffi.from_dlpack(_AsCuda(argument))
