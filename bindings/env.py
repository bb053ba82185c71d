"""`python -m bindings.env`: what a bug report needs. Needs torch, which the package imports; what else cannot
be found out says why, and the exit code is 0.

It names no machine, user or device serial; paths under the home directory are shown with `~`.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

PACKAGES = (
    "flashnext-kernels",
    "torch",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "cuda-python",
    "cuda-bindings",
    "nvidia-ml-py",
    "nvidia-cuda-nvdisasm",
    "nvshmem4py-cu13",
    "triton",
    "numpy",
)

PREFIXES = ("FLASHNEXT_", "CUTE_DSL_", "CUDA_", "NVIDIA_TF32_OVERRIDE", "PYTORCH_", "TORCH_")

Lines = Iterator[tuple[str, str]]


def _python() -> Lines:
    yield "python", f"{platform.python_implementation()} {platform.python_version()}"
    libc = " ".join(filter(None, platform.libc_ver()))
    yield "platform", ", ".join(filter(None, (platform.system(), platform.machine(), libc)))


def _packages() -> Lines:
    for name in PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            yield name, "not installed"


def _torch() -> Lines:
    import torch

    yield "torch built for", f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    yield "torch sees", f"{torch.cuda.device_count()} CUDA device(s)"


def _driver() -> Lines:
    import pynvml

    pynvml.nvmlInit()
    try:
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        yield (
            "driver",
            f"{pynvml.nvmlSystemGetDriverVersion()}, CUDA up to {cuda // 1000}.{cuda % 1000 // 10}",
        )
    finally:
        pynvml.nvmlShutdown()


def _gpus() -> Lines:
    import torch

    from bindings import targets

    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        target = targets.target_of(torch.device("cuda", index)) or "none: the reference serves it"
        yield (
            f"cuda:{index}",
            f"{device.name}, sm_{device.major}{device.minor}, {device.multi_processor_count} SMs, "
            f"{device.total_memory / 2**30:.0f} GiB, target {target}",
        )


def _bindings() -> Lines:
    from bindings import dispatch, plans

    selection = dispatch.selected()
    wrong = f": none of {', '.join(dispatch.BACKENDS)}, so every call is refused"
    known = selection.backend in dispatch.BACKENDS
    yield "backend", f"{selection.backend} ({selection.origin}){'' if known else wrong}"
    yield "plan matcher", plans.matcher.__name__


def _cache() -> Lines:
    from bindings import cache

    for name, value in cache.state().items():
        yield name, _without_home(str(value))


def _variables() -> Lines:
    for name in sorted(os.environ):
        if name.startswith(PREFIXES) and "TOKEN" not in name and "KEY" not in name:
            # devices may be named by serial: CUDA_VISIBLE_DEVICES=GPU-8932f937-...
            value = re.sub(r"\b(GPU|MIG)-[0-9A-Za-z/-]+", r"\1-(serial)", os.environ[name])
            yield name, _without_home(value)


def _without_home(text: str) -> str:
    home = str(Path.home())
    return text.replace(home, "~") if home not in ("", "/") else text


SECTIONS: tuple[tuple[str, Callable[[], Lines]], ...] = (
    ("Python", _python),
    ("Packages", _packages),
    ("Torch", _torch),
    ("Driver", _driver),
    ("GPUs", _gpus),
    ("Bindings", _bindings),
    ("Artifact cache", _cache),
    ("Environment", _variables),
)


def report() -> str:
    """The whole report as text."""
    lines = []
    for title, section in SECTIONS:
        lines.append(title)
        found = 0
        try:
            for name, value in section():
                lines.append(f"  {name}: {value}")
                found += 1
        except Exception as error:  # a broken driver or package is what the report is for
            lines.append(f"  unavailable: {type(error).__name__}: {_without_home(str(error))}")
            found += 1
        if not found:
            lines.append("  none")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the report."""
    argparse.ArgumentParser(
        prog="python -m bindings.env",
        description="Prints what a bug report needs: versions, devices, backend, cache, environment.",
    ).parse_args(arguments)
    print(report())
    return 0


if __name__ == "__main__":
    sys.exit(main())
