"""Puts the stand-in library and the emulator's target where the DSL keeps its settings, and takes them
away again."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from emulator import build, capture
from emulator.errors import EmulatorError

ATTRIBUTES = 192
_LOAD = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p)
_KERNEL = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_uint64, ctypes.c_char_p)
_LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.POINTER(ctypes.c_void_p))


class Hooks(ctypes.Structure):
    """emu_hooks of csrc/host/intercept.c"""

    _fields_ = (
        ("load", _LOAD),
        ("kernel", _KERNEL),
        ("launch", _LAUNCH),
        ("attributes", ctypes.c_int * ATTRIBUTES),
        ("devices", ctypes.c_int),
        ("device", ctypes.c_int),
        ("raise_", ctypes.c_void_p),
    )


@functools.cache
def stand_in() -> ctypes.CDLL:
    """The stand-in for the DSL's CUDA runtime library; host code that the DSL compiles finds the same copy
    by its path."""
    lib = ctypes.CDLL(str(build.intercept_library()))
    lib.emu_set_hooks.argtypes = [ctypes.c_void_p]
    return lib


def make_hooks(load: Callable[..., int], kernel: Callable[..., int], launch: Callable[..., int]) -> Hooks:
    """Hooks that call Python. The functions must not raise."""
    hooks = Hooks(_LOAD(load), _KERNEL(kernel), _LAUNCH(launch))
    hooks.attributes[:] = [-1] * ATTRIBUTES
    hooks.devices = 1
    with contextlib.suppress(ImportError, OSError, AttributeError):
        from tvm_ffi import libinfo

        function = ctypes.CDLL(libinfo.find_libtvm_ffi()).TVMFFIErrorSetRaisedFromCStr
        hooks.raise_ = ctypes.cast(function, ctypes.c_void_p).value
    return hooks


def set_hooks(hooks: Hooks | None) -> None:
    stand_in().emu_set_hooks(ctypes.addressof(hooks) if hooks is not None else None)


@contextlib.contextmanager
def settings(target: str) -> Iterator[None]:
    """While open, the DSL compiles for `target`, keeps PTX and cubin, and links host code against the
    stand-in."""
    from cutlass.base_dsl.dsl import DSLSingletonMeta
    from cutlass.cutlass_dsl import CuTeDSL

    stand_in()
    CuTeDSL._get_dsl()
    real = os.environ.get("CUTE_DSL_LIBS") or next(
        (d.envar.shared_libs for d in DSLSingletonMeta._instances.values() if d.envar.shared_libs), ""
    )
    libraries = os.pathsep.join([str(build.intercept_library()), *filter(None, real.split(os.pathsep))])
    with contextlib.ExitStack() as stack:
        dump = stack.enter_context(tempfile.TemporaryDirectory(prefix="emulator-ptx-"))
        wanted = {
            "shared_libs": libraries,
            "_arch": target,
            "keep_ptx": True,
            "keep_cubin": True,
            "dump_dir": dump,
        }
        for dsl in list(DSLSingletonMeta._instances.values()):
            stack.callback(_restore, dsl.envar, {name: getattr(dsl.envar, name) for name in wanted})
            for name, value in wanted.items():
                setattr(dsl.envar, name, value)
        for name, value in (("CUTE_DSL_LIBS", libraries), ("CUTE_DSL_ARCH", target)):
            stack.callback(_restore_environment, name, os.environ.get(name))
            os.environ[name] = value
        stack.enter_context(_lending_options())
        stack.enter_context(_redirecting())
        yield


@contextlib.contextmanager
def _lending_options() -> Iterator[None]:
    """While open, compile options take the settings as ever; after it they are what they were. They live
    as long as `cute.compile` does, and would have later compilations keep files too."""
    from cutlass.base_dsl.compiler import CompileOptions, KeepCUBIN, KeepPTX

    original = CompileOptions.apply_envar_settings
    touched: dict[int, tuple[Any, dict[Any, Any]]] = {}

    @functools.wraps(original)
    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = {kind: copy.copy(self.options[kind]) for kind in (KeepPTX, KeepCUBIN)}
        touched.setdefault(id(self), (self, before))
        return original(self, *args, **kwargs)

    CompileOptions.apply_envar_settings = apply
    try:
        yield
    finally:
        CompileOptions.apply_envar_settings = original
        for options, before in touched.values():
            options.options.update(before)


@contextlib.contextmanager
def _redirecting() -> Iterator[None]:
    """While open, compiled host code calls `emu_f` where it would call the runtime's f. By another name,
    since symbols of whatever the process loaded first come before those of a library that is asked for
    later."""
    from cutlass.base_dsl.compiler import Compiler

    original = Compiler.compile

    @functools.wraps(original)
    def compile_and_redirect(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = original(self, *args, **kwargs)
        _redirect(module)
        return module

    Compiler.compile = compile_and_redirect
    try:
        yield
    finally:
        Compiler.compile = original


def _redirect(module: Any) -> None:
    from cutlass._mlir import ir

    library = stand_in()

    def ours(name: str) -> str | None:
        return f"emu_{name}" if hasattr(library, f"emu_{name}") else None

    def rename(op: Any) -> Any:
        for attribute, kind in (("sym_name", "func"), ("callee", "call"), ("global_name", "addressof")):
            if op.name.rpartition(".")[2] != kind or attribute not in op.attributes:
                continue
            old = op.attributes[attribute]
            new = ours(old.value)
            if new is not None:
                is_name = attribute == "sym_name"
                op.attributes[attribute] = (
                    ir.StringAttr.get(new) if is_name else ir.FlatSymbolRefAttr.get(new)
                )
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(rename)


def _restore(target: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(target, name, value)


def _restore_environment(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


@contextlib.contextmanager
def calls(
    note: Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, ...]],
    pending: Callable[[], BaseException | None],
) -> Iterator[None]:
    """While open, calls of compiled functions are announced: `note(args, kwargs)` sees what they are given
    and returns the arguments to go on with; an exception that `pending` holds afterwards is what the call
    raises."""
    from cutlass.base_dsl.jit_executor import ExecutionArgs, JitExecutor
    from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction

    with contextlib.ExitStack() as stack:

        def patch(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
            if name not in vars(owner):
                return
            original = vars(owner)[name]
            setattr(owner, name, make(original))
            stack.callback(setattr, owner, name, original)

        def generate(original: Any) -> Any:
            @functools.wraps(original)
            def wrapped(self: Any, args: Any, kwargs: Any) -> Any:
                note(tuple(args), dict(kwargs))
                return original(self, args, kwargs)

            return wrapped

        def run(original: Any) -> Any:
            @functools.wraps(original)
            def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
                return _raising(pending, original, self, *args, **kwargs)

            return wrapped

        def call(original: Any) -> Any:
            @functools.wraps(original)
            def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
                _refuse_foreign(self)
                return _raising(pending, original, self, *args, **kwargs)

            return wrapped

        def ffi_call(original: Any) -> Any:
            @functools.wraps(original)
            def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
                _refuse_foreign(self)
                return _raising(pending, original, self, *note(args, kwargs), **kwargs)

            return wrapped

        patch(ExecutionArgs, "generate_execution_args", generate)
        patch(JitExecutor, "run_compiled_program", run)
        patch(CudaDialectJitCompiledFunction, "__call__", call)
        patch(CudaDialectJitCompiledFunction, "num_devices", lambda _: property(lambda self: 1))
        with contextlib.suppress(ImportError):
            from cutlass.cutlass_dsl import tvm_ffi_provider

            patch(tvm_ffi_provider.TVMFFIJitCompiledFunction, "__call__", ffi_call)
            patch(tvm_ffi_provider.TVMFFIJitCompiledFunctionWithKwargs, "__call__", ffi_call)
        yield


def _refuse_foreign(function: Any) -> None:
    if getattr(function, "has_gpu_module", True) and not capture.captured(
        getattr(function, "artifacts", None)
    ):
        raise EmulatorError(
            "this function was compiled outside emulator.device(...): compile it inside, so that its PTX "
            "is known"
        )


def _raising(pending: Callable[[], BaseException | None], function: Any, *args: Any, **kwargs: Any) -> Any:
    """The call's result; if the emulator has an exception to tell, that one instead of what the host code
    made of it."""
    try:
        result = function(*args, **kwargs)
    except Exception as error:
        told = pending()
        if told is None:
            raise
        raise told from error
    told = pending()
    if told is not None:
        raise told
    return result
