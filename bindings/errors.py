"""The errors and warnings that the package raises on purpose. Messages name what was given and what is
allowed."""

from __future__ import annotations


class InvalidArgument(ValueError):  # noqa: N818
    """An argument breaks its operator's contract, or a setting has no such value. Nothing was launched."""


class BackendUnavailable(RuntimeError):  # noqa: N818
    """A forced backend cannot serve the call; the message names the guard that failed. Nothing falls back
    silently."""


class WarmupRequired(RuntimeError):  # noqa: N818
    """A first use inside CUDA-graph capture would have to compile or load; `bindings.warmup` does that
    before."""


class CacheError(RuntimeError):
    """A compiled kernel that had to be present, in an ahead-of-time directory say, is missing or does not
    fit."""


class HandoffTimeout(RuntimeError):  # noqa: N818
    """CTAs of an earlier launch on the device, eager or of a graph, waited for another one's values for so
    long that they gave up; results since then may hold NaNs. Raised by the next call of the kernel there,
    which launches nothing, or by `bindings.check`. Outside a CUDA-graph capture all is as new then."""


class FlashnextWarning(UserWarning):
    """Base of the package's warnings."""


class CacheWarning(FlashnextWarning):
    """The artifact cache works, but not as asked: an unwritable directory, a torn or foreign file rebuilt."""
