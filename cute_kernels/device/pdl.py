"""Programmatic dependent launch (PDL), the two halves every kernel here uses, in this order.

`release_dependents()` lets the next kernel of the stream start its prologue; it may stand first, because
the next kernel reads nothing of ours before its own `await_predecessors()`. `await_predecessors()` returns
when every preceding grid has completed and its writes are visible. Completion is not transitive: a kernel
that skipped the wait could finish before its predecessor, and its successor would then see the predecessor
unfinished. So every thread of every CTA waits, idle ones too.
"""

from __future__ import annotations

import cutlass.cute as cute


def release_dependents() -> None:
    """griddepcontrol.launch_dependents."""
    cute.arch.griddepcontrol_launch_dependents()


def await_predecessors() -> None:
    """griddepcontrol.wait."""
    cute.arch.griddepcontrol_wait()
