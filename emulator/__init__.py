"""Runs kernels that the CuTe DSL compiled for SM90 and SM100 on the CPU, and checks them as they run; see
docs/emulator.md."""

from emulator.counters import Counters, Traffic
from emulator.device import SCHEDULES, Device, current, device, open_device
from emulator.errors import EmulatorError, UnknownInstructionError
from emulator.findings import CATEGORIES, Finding, FindingsError

__all__ = [
    "CATEGORIES",
    "SCHEDULES",
    "Counters",
    "Device",
    "EmulatorError",
    "Finding",
    "FindingsError",
    "Traffic",
    "UnknownInstructionError",
    "current",
    "device",
    "open_device",
]
