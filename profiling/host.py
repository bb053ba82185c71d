"""Where and with what a result was taken. Nothing that identifies a machine: no host name, no UUID, no
path."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from collections.abc import Sequence
from typing import Any

import torch

PACKAGES = (
    "torch",
    "triton",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "cuda-bindings",
    "nvidia-ml-py",
    "numpy",
    "sglang",
    "flashinfer-python",
    "nvidia-nccl-cu13",
)


def versions() -> dict[str, str]:
    """Installed versions of the packages that matter, those present as importable files only included."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["torch"] = torch.__version__  # with the build's suffix, which metadata may lack
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return found


def clocks(device: torch.device) -> dict[str, Any]:
    """Driver, clocks in MHz and power in W of a CUDA device as NVML reads them now; what cannot be read is
    left out. NVML counts devices on its own, so the device is found by its PCI address."""
    if device.type != "cuda":
        return {}
    index = torch.cuda.current_device() if device.index is None else device.index
    try:
        import pynvml
    except ImportError:
        return {}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    try:
        handle = _handle(pynvml, index)
        reads = {
            "driver": lambda: pynvml.nvmlSystemGetDriverVersion(),
            "sm_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
            "sm_max_mhz": lambda: pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM),
            "memory_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
            "power_limit_w": lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
            "temperature_c": lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
        }
        found: dict[str, Any] = {}
        for name, read in reads.items():
            try:
                value = read()
            except pynvml.NVMLError:
                continue
            found[name] = value.decode() if isinstance(value, bytes) else value
        return found
    except pynvml.NVMLError:
        return {}
    finally:
        pynvml.nvmlShutdown()


def _handle(pynvml: Any, index: int) -> Any:
    """NVML's handle of torch's device `index`; by position where this torch does not tell PCI addresses."""
    properties: Any = torch.cuda.get_device_properties(index)
    try:
        parts = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
    except AttributeError:
        return pynvml.nvmlDeviceGetHandleByIndex(index)
    return pynvml.nvmlDeviceGetHandleByPciBusId("{:08x}:{:02x}:{:02x}.0".format(*parts))


def describe(device: torch.device) -> dict[str, Any]:
    """The host and its device, for a result file."""
    about: dict[str, Any] = {
        "system": platform.system(),
        "machine": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "versions": versions(),
        "gpu": None,
        "nvml": {},
    }
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        properties = torch.cuda.get_device_properties(index)
        about |= {
            "gpu": properties.name,
            "capability": list(torch.cuda.get_device_capability(index)),
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": properties.L2_cache_size,
            "nvml": clocks(device),
        }
    return about


def command(module: str, arguments: Sequence[str]) -> str:
    """The command line, a path in it cut to its last part; under torchrun as it is started there."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    start = ["python -m"] if size == 1 else [f"torchrun --nproc-per-node {size} -m"]
    words = [os.path.basename(word) if os.path.isabs(word) else word for word in arguments]
    return " ".join([*start, module, *words])


def today() -> str:
    """The date, UTC."""
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()
