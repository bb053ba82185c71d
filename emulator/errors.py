"""What the emulator raises."""

from __future__ import annotations


class EmulatorError(RuntimeError):
    """The emulator cannot do what was asked: nothing was run, or a run was abandoned."""


class UnknownInstructionError(EmulatorError):
    """A PTX instruction, operand or directive that the emulator does not know; names the line."""
