"""Compiled kernels on demand: `get(module, target, params)` returns the launch function, and keeps it.

The first call of a kernel takes the first of: the ahead-of-time directory, the user's cache, a compilation
whose result goes into the cache. What is then loaded is always the stored file, so a cold start runs what a
warm one will. A kernel depends on its module, target and constexpr parameters only; one function serves
every device of its target.

Loading takes the dynamic loader alone where the entry holds a shared library and the CUDA runtime that it
was linked for is here; else the DSL links the object in memory. With CUTE_DSL_LIBS set (a stand-in for the
DSL's host runtime) it is always the latter.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from bindings import cache, compiler, link
from bindings.errors import CacheError, CacheWarning
from bindings.store import LIBRARY, OBJECT, DamagedEntryError, Entry, Key, Store, manifest_of

Params = Mapping[str, str | int | bool]

log = logging.getLogger(__name__)

_functions: dict[Key, Callable[..., Any]] = {}
_locks: dict[Key, threading.Lock] = {}
_guard = threading.Lock()  # of _locks


def get(module: str, target: str, params: Params) -> Callable[..., Any]:
    """The launch function of a kernel, compiled and loaded if need be.

    module: import path of a kernel module. target: "sm_90a", ... params: constexpr parameters of its
    `build`. The function takes CUDA tensors (None where a parameter says that one is absent), then scalars,
    and launches on torch's current stream of their device. Threads that ask at the same time compile once.

    Raises CacheError if the kernel is neither stored nor can be compiled here, and what the compiler
    raises.
    """
    key = Key.of(module, target, params)
    function = _functions.get(key)
    if function is not None:
        return function
    with _guard:
        lock = _locks.setdefault(key, threading.Lock())
    with lock:
        function = _functions.get(key)
        if function is None:
            function = _functions[key] = load(prepare(module, target, params))
    return function


def is_loaded(module: str, target: str, params: Params) -> bool:
    """Whether `get` would return at once: neither compile nor load."""
    return Key.of(module, target, params) in _functions


def prepare(module: str, target: str, params: Params, *, rebuild: bool = False) -> Entry:
    """The stored kernel, compiled if need be (or in any case); nothing is loaded. Raises as `get`."""
    key = Key.of(module, target, params)
    return (None if rebuild else _ahead_of_time(key)) or _from_cache(key, rebuild)


def _ahead_of_time(key: Key) -> Entry | None:
    """The kernel of the ahead-of-time directory; None if there is no such directory, or none that fits but
    a compiler."""
    store = cache.aot_store()
    if store is None:
        return None
    try:
        entry = store.find(key.name(), key)
        if entry is None:
            reason = "is not there"
        elif entry.manifest["sources"] != compiler.sources(key.module):
            reason = "was built from other device sources than those installed"
        elif unlike := _unlike(entry.manifest["toolchain"]):
            reason = unlike
        else:
            return entry
    except DamagedEntryError as damage:
        reason = f"is damaged: {damage}"
    message = f"{cache.AOT_VARIABLE}={store.root}: {key} {reason}"
    if not compiler.available():
        raise CacheError(
            f"{message}, and there is no compiler here to build it (nvidia-cutlass-dsl). "
            "Build the directory again with python -m bindings.precompile"
        )
    warnings.warn(f"{message}: using the cache and the compiler instead", CacheWarning, stacklevel=4)
    return None


def _unlike(toolchain: Mapping[str, Any]) -> str:
    """Why code that was built with a toolchain does not run on this host, or nothing."""
    here, packages = compiler.toolchain(), toolchain.get("packages")
    if "machine" not in toolchain or not isinstance(packages, Mapping) or "apache-tvm-ffi" not in packages:
        return "does not say what it was built with"
    if toolchain["machine"] != here["machine"]:
        return f"was built for {toolchain['machine']} hosts, this one is {here['machine']}"
    built, present = (str(t["packages"]["apache-tvm-ffi"]) for t in (toolchain, here))
    if built.split(".")[:2] != present.split(".")[:2]:
        return f"was built for apache-tvm-ffi {built}, installed is {present}"
    return ""


def _from_cache(key: Key, rebuild: bool) -> Entry:
    if not compiler.available():
        raise CacheError(
            f"{key}: no compiler here (nvidia-cutlass-dsl), and {cache.AOT_VARIABLE} names no directory of "
            "compiled kernels"
        )
    identity = compiler.identity(key.module, key.target, key.params_text)
    store = cache.user_store()
    if store is None:
        return _build(key, identity, None)
    name = key.name(identity)
    try:
        entry = store.find(name, key)
    except DamagedEntryError:
        entry = None  # looked at again under the lock, where no writer is at work
    if entry is not None and not rebuild:
        return entry
    with store.lock(name, key):
        try:
            entry = None if rebuild else store.find(name, key)
        except DamagedEntryError as damage:
            warnings.warn(f"artifact cache: {damage}; {key} is built again", CacheWarning, stacklevel=4)
            entry = None
        return entry or _build(key, identity, store)


_unwritable: set[str] = set()


def _build(key: Key, identity: str, store: Store | None) -> Entry:
    """Compiles, links and stores a kernel; keeps it in memory where it cannot be stored."""
    start = time.perf_counter()
    try:
        compiled = compiler.compile_kernel(key.module, key.target, key.params)
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in compiler.PACKAGES:
            raise
        raise CacheError(f"{key}: the compiler (nvidia-cutlass-dsl) cannot be loaded: {error}") from error
    content = {OBJECT: compiled.object}
    cudart = link.cudart_major()
    try:
        if cudart is None:
            raise link.LinkError("there is no CUDA runtime to link for")
        content[LIBRARY] = link.library(compiled.object, cudart)
    except link.LinkError as error:
        log.info("%s: no shared library: %s", key, error)
    manifest = manifest_of(
        key,
        identity,
        compiler.sources(key.module),
        compiler.toolchain(),
        content,
        symbol=compiler.SYMBOL,
        cudart=cudart if LIBRARY in content else None,
        dynamic_smem=compiled.dynamic_smem,
    )
    log.info("compiled %s in %.2f s", key, time.perf_counter() - start)
    if store is not None:
        try:
            return store.put(key.name(identity), manifest, content)
        except OSError as error:
            if str(store.root) not in _unwritable:
                _unwritable.add(str(store.root))
                warnings.warn(
                    f"artifact cache {store.root} cannot be written: {error}. Kernels are compiled again in "
                    "every process",
                    CacheWarning,
                    stacklevel=5,
                )
    return Entry(manifest, None, content)


def load(entry: Entry) -> Callable[..., Any]:
    """Loads a stored kernel and returns its launch function. Raises CacheError if that is not possible
    here."""
    why = "it holds no shared library"
    if entry.has(LIBRARY):
        why = _unloadable(entry)
        if not why:
            import tvm_ffi

            path = entry.path(LIBRARY)
            try:
                function: Callable[..., Any] = tvm_ffi.load_module(path)[entry.manifest["symbol"]]
                return function
            except (RuntimeError, AttributeError) as error:
                why = f"{path}: {error}"
    log.info("%s: linked in memory by the DSL: %s", entry.key, why)
    try:
        return compiler.load_object(entry.path(OBJECT))
    except ImportError as error:
        raise CacheError(
            f"{entry.key} cannot be loaded: {why}, and the DSL (nvidia-cutlass-dsl), which could link its "
            f"object, cannot be imported: {error}"
        ) from error


def _unloadable(entry: Entry) -> str:
    """Why the entry's shared library cannot be loaded in this process, or nothing."""
    if os.environ.get("CUTE_DSL_LIBS"):
        return "CUTE_DSL_LIBS is set"
    cudart = entry.manifest["cudart"]
    return link.load_cudart(cudart) or ""
