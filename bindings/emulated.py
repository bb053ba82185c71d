"""The backend `emulator`: compiled kernels run on the CPU, on CPU tensors, and are checked as they run.

`FLASHNEXT_BACKEND=emulator` or `bindings.backend("emulator")` selects it, FLASHNEXT_TARGET (default
sm_100a) the target that kernels are compiled for. A finding of the emulator is an exception of the call.
docs/emulator.md has what is checked.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from torch import Tensor

from bindings import compiler, targets
from bindings.errors import InvalidArgument
from bindings.registry import Kernel, Op

if TYPE_CHECKING:
    import emulator

TARGET = "FLASHNEXT_TARGET"

_lock = threading.RLock()  # one emulated device at a time, and the DSL's tracer
_options: dict[str, Any] = {}
_opened: weakref.WeakSet[emulator.Device] = weakref.WeakSet()  # those of `_device` that are in use


def target() -> str:
    """The target that FLASHNEXT_TARGET names. Raises InvalidArgument for one that there is not."""
    name = _options.get("target") or os.environ.get(TARGET, "sm_100a")
    if name not in targets.TARGETS:
        raise InvalidArgument(f"{TARGET}: got {name!r}, allowed {', '.join(targets.TARGETS)}")
    return name


@contextlib.contextmanager
def options(**values: Any) -> Iterator[None]:
    """Within the context, emulated calls use these options of `emulator.open_device` (target, checks,
    schedule, seed, ...). At its end they have drained: no later call depends on them."""
    from bindings import dispatch

    global _options
    with _lock:
        before, _options = _options, {**_options, **values}
    dispatch.clear_plans()  # they hold the target
    try:
        yield
    finally:
        with _lock:
            _options = before
            for opened in tuple(_opened):
                opened.synchronize()
        dispatch.clear_plans()


@functools.lru_cache(maxsize=16)  # one that drops out is freed when nobody refers to it any more
def _device(name: str, given: tuple[tuple[str, Any], ...]) -> emulator.Device:
    import emulator

    opened = emulator.open_device(name, **dict(given))
    _opened.add(opened)
    return opened


def device() -> emulator.Device:
    """The device that emulated calls made here and now run on: its findings and the counters of its
    launches."""
    given = {k: v if isinstance(v, Hashable) else tuple(v) for k, v in _options.items() if k != "target"}
    return _device(target(), tuple(sorted(given.items())))


@functools.cache
def _compiled(module: str, name: str, params: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    """The launch function of a kernel, whose PTX the emulator knows. Called with a device open."""
    import cutlass.cute as cute

    entry, fake_args = importlib.import_module(module).build(name, **dict(params))
    function: Callable[..., Any] = cute.compile(
        entry, *fake_args, options=f"--enable-tvm-ffi --gpu-arch {name}"
    )
    return function


_serving: ContextVar[bool] = ContextVar("flashnext_emulated", default=False)


def serving() -> bool:
    """Whether a kernel that is loaded here and now is for the emulator."""
    return _serving.get()


def get(module: str, name: str, params: Mapping[str, Any]) -> Callable[..., Any]:
    """The launch function of a kernel on the emulated device: as `jit.get`, but takes CPU tensors."""
    frozen = tuple(sorted(params.items()))

    def run(*arguments: Any) -> None:
        with _lock, compiler._lock, device().active():
            _compiled(module, name, frozen)(*arguments)

    return run


def launcher(op: Op, kernel: Kernel, name: str, params: Mapping[str, Any]) -> Callable[..., Any]:
    """The launch function of an implementation on the emulated device: tensors (None where absent),
    outputs, then scalars."""
    token = _serving.set(True)
    try:
        run = kernel.load(name, params)
    finally:
        _serving.reset(token)
    names = (*op.inputs, *op.outs)

    def launch(*arguments: Any) -> None:
        with _lock:
            to = device()
            _describe(to, dict(zip(names, arguments, strict=False)), op)
            try:
                run(*arguments)
            finally:
                to.forget()

    return launch


def _describe(to: emulator.Device, tensors: Mapping[str, Any], op: Op) -> None:
    """Names the call's tensors, and marks outputs that are no input's memory as never written."""
    present = {name: t for name, t in tensors.items() if isinstance(t, Tensor)}
    given = {t.data_ptr() for name, t in present.items() if name not in op.outs}
    for name, tensor in present.items():
        to.name(tensor, name)
    for name in op.outs:
        if name in present and present[name].data_ptr() not in given:
            to.uninitialized(present[name], name)
