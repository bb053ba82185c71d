"""The compiler seam: what identifies a build, and from a kernel module to a host object.

Nothing here imports the DSL before the first compilation. Its tracer keeps state of the whole process and
is not safe to enter from two threads, so compilations of a process take turns.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bindings.errors import CacheError

PACKAGES = frozenset({"cutlass", "cuda", "tvm_ffi", "nvidia_cutlass_dsl"})
"""Import packages that a compilation takes; without one of them there is no compiler."""

SYMBOL = "flashnext_kernel"
"""The exported function of every object; objects are never linked together."""

DEVICE_PACKAGE = "cute_kernels"

DISTRIBUTIONS = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
    "apache-tvm-ffi",
)

# Environment variables of the DSL that say where things are put or what is printed, not what is generated.
_HARMLESS = ("CACHE", "DISABLE_FILE_CACHING", "DUMP", "KEEP", "LIBS", "LOG", "NO_CACHE", "PRINT", "SHOW")

# The host half of an object is compiled for the CPU that compiles it unless told otherwise. A cache may be
# shared by hosts, and an ahead-of-time build is made for others, so it is told: the architecture's
# baseline.
_BASELINES = {
    "x86_64": ("x86-64", ("+cx8", "+fxsr", "+mmx", "+sse", "+sse2", "+x87")),
    "aarch64": ("generic", ("+neon",)),
}

_lock = threading.RLock()


@dataclass(frozen=True)
class Compiled:
    """A host object that holds a kernel's code and launches it.

    dynamic_smem: bytes of shared memory that a launch asks for, None if that is decided at run time."""

    object: bytes
    dynamic_smem: int | None


@functools.cache
def toolchain() -> Mapping[str, Any]:
    """What, besides sources and parameters, decides an object's bytes. None stands for what is not
    installed."""
    return {
        "packages": {name: _version(name) for name in DISTRIBUTIONS},
        "flavour": flavour(),
        "machine": platform.machine(),
        "baseline": _BASELINES.get(platform.machine(), (platform.processor() or platform.node(),))[0],
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith("CUTE_DSL_") and not name.removeprefix("CUTE_DSL_").startswith(_HARMLESS)
        },
    }


def available() -> bool:
    """Whether the compiler is installed. It may still fail to load."""
    return toolchain()["packages"]["nvidia-cutlass-dsl"] is not None


@functools.cache
def flavour() -> int | None:
    """The CUDA major version of the DSL build that a compilation uses: the DSL takes the newest one that is
    installed and that the driver, if there is one, can run. None if the DSL is not installed."""
    names = [p.name[2:] for d in package_directories("nvidia_cutlass_dsl") for p in d.glob("cu[0-9]*")]
    majors = [int(name) for name in names if name.isdigit()]
    version = ctypes.c_int(0)
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        failed = 1
    return max((m for m in majors if failed or m <= version.value // 1000), default=None)


def package_directories(name: str) -> list[Path]:
    """Where a package is installed, without importing it: several places for one in parts, or none."""
    try:
        spec = importlib.util.find_spec(name)
    except ImportError:  # something forbids the import
        return []
    return [Path(p) for p in spec.submodule_search_locations or ()] if spec else []


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def sources(module: str) -> str:
    """Digest of the device sources that a kernel module may draw on: all of `cute_kernels`, and for a
    module outside it all of its own top-level package. Nothing is imported. Raises ModuleNotFoundError for
    an unknown package."""
    digest = hashlib.sha256()
    for package in sorted({DEVICE_PACKAGE, module.partition(".")[0]}):
        spec = importlib.util.find_spec(package)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        roots = [Path(r) for r in spec.submodule_search_locations or ()]
        files = [(p.relative_to(r).as_posix(), p) for r in roots for p in r.rglob("*.py")]
        if not roots and spec.origin:
            files = [(Path(spec.origin).name, Path(spec.origin))]
        for name, path in sorted(files):
            digest.update(f"{package}/{name}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def compile_kernel(module: str, target: str, params: Mapping[str, Any]) -> Compiled:
    """Compiles the kernel that `module.build(target, **params)` describes. Needs the DSL, no GPU.

    Raises ImportError without the DSL or the module, CacheError where temporary files cannot be written, and
    whatever `build` or the DSL raises."""
    with _lock:
        import cutlass.cute as cute

        entry, fake_args = importlib.import_module(module).build(target, **params)
        # without an engine: it would link an object of its own in memory, and what runs is the stored one
        compiled = cute.compile(
            entry, *fake_args, options=f"--enable-tvm-ffi --gpu-arch {target}", no_jit_engine=True
        )
        text = str(compiled.ir_module)
        _target_baseline(compiled.ir_module)
        try:
            with tempfile.TemporaryDirectory(prefix="flashnext-compile-") as directory:
                path = Path(directory) / "kernel.o"
                compiled.export_to_c(str(path), function_name=SYMBOL)
                return Compiled(path.read_bytes(), _dynamic_smem(text))
        except OSError as error:
            raise CacheError(f"{module}: cannot write temporary files (TMPDIR): {error}") from error


def load_object(path: str) -> Callable[..., Any]:
    """The function of an object file, linked in memory by the DSL. Raises ImportError without the DSL."""
    with _lock:
        import cutlass.cute as cute

        module = cute.runtime.load_module(path, enable_tvm_ffi=True)
        function: Callable[..., Any] = module[SYMBOL]
        return function


def _target_baseline(module: Any) -> None:
    """Marks the host functions of an IR module to be compiled for the architecture's baseline."""
    if platform.machine() not in _BASELINES:
        return
    from cutlass._mlir import ir

    cpu, features = _BASELINES[platform.machine()]
    with module.context:
        quoted = ", ".join(f'"{f}"' for f in features)
        attributes = {
            "target_cpu": ir.StringAttr.get(cpu),
            "target_features": ir.Attribute.parse(f"#llvm.target_features<[{quoted}]>"),
        }

        def mark(op: Any) -> Any:
            if op.name == "llvm.func" and any(len(region.blocks) for region in op.regions):
                for name, value in attributes.items():
                    op.attributes[name] = value
            return ir.WalkResult.ADVANCE

        module.operation.walk(mark)


_LAUNCH_CONFIG = r"!llvm\.struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>"
_SMEM_FIELD = re.compile(
    r"^\s*(%\S+) = llvm\.getelementptr %\S+\[0, 2\] : \(!llvm\.ptr\) -> !llvm\.ptr, " + _LAUNCH_CONFIG,
    re.MULTILINE,
)


def _dynamic_smem(ir_text: str) -> int | None:
    """The most shared memory that a launch in the lowered host code asks for; None unless all are
    constants."""
    most = 0
    for field in _SMEM_FIELD.finditer(ir_text):
        rest = ir_text[field.end() :]
        store = re.search(rf"llvm\.store (%\S+), {re.escape(field[1])} :", rest)
        function = ir_text.rfind("llvm.func ", 0, field.start())  # "llvm.func<" is a type
        constant = store and re.search(
            rf"^\s*{re.escape(store[1])} = llvm\.mlir\.constant\((\d+) : i64\)",
            ir_text[function : field.end()],
            re.MULTILINE,
        )
        if not constant:
            return None
        most = max(most, int(constant[1]))
    return most


def identity(module: str, target: str, params_text: str) -> str:
    """Digest of everything that a compiled kernel depends on; `params_text` is a canonical rendering of its
    parameters."""
    whole = {
        "module": module,
        "target": target,
        "params": params_text,
        "sources": sources(module),
        "toolchain": toolchain(),
    }
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()
