"""Kernels on a host that never compiles: what it gets, what it is told, and that they run there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bindings import cache, compiler, jit, link
from bindings.errors import CacheError, CacheWarning
from bindings.store import LIBRARY, OBJECT, Key, Store
from tests.bindings import standin_cudart, toys
from tests.bindings.test_store import reseal

TOY = toys.ADD
needs_cc = pytest.mark.skipif(link.compiler() is None, reason="needs a C compiler")


class TestAheadOfTime:
    @pytest.fixture
    def aot(self, builds: list[Key], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A directory with one kernel, addend = 1."""
        path = tmp_path / "aot"
        path.mkdir()
        entry = jit.prepare(TOY, "sm_90a", {"addend": 1})
        builds.clear()
        content = {file: entry.read(file) for file in entry.manifest["files"]}
        Store(path, private=False).put(entry.key.name(), entry.manifest, content)
        monkeypatch.setenv(cache.AOT_VARIABLE, str(path))
        monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path / "empty"))
        return path

    def test_serves_without_a_compiler_and_without_a_cache(
        self, aot: Path, builds: list[Key], no_compiler: None, tmp_path: Path
    ) -> None:
        assert jit.prepare(TOY, "sm_90a", {"addend": 1}).path(OBJECT).startswith(str(aot))
        assert callable(jit.get(TOY, "sm_90a", {"addend": 1}))
        assert builds == []
        assert not (tmp_path / "empty").exists()

    def test_another_version_of_the_compiler_does_not_count(
        self, aot: Path, monkeypatch: pytest.MonkeyPatch, builds: list[Key]
    ) -> None:
        packages = {**compiler.toolchain()["packages"], "nvidia-cutlass-dsl": "9.9"}
        toolchain = {**compiler.toolchain(), "packages": packages}
        monkeypatch.setattr(compiler, "toolchain", lambda: toolchain)
        jit.prepare(TOY, "sm_90a", {"addend": 1})
        assert builds == []

    def test_what_it_lacks_is_an_error_without_a_compiler(self, aot: Path, no_compiler: None) -> None:
        with pytest.raises(CacheError) as caught:
            jit.get(TOY, "sm_100a", {"addend": 2})
        for part in (
            str(aot),
            "toy_kernels.add",
            "sm_100a",
            "addend=2",
            "is not there",
            "bindings.precompile",
        ):
            assert part in str(caught.value)

    def test_what_it_lacks_is_compiled_with_one_and_said_so(self, aot: Path, builds: list[Key]) -> None:
        with pytest.warns(CacheWarning, match="sm_100a .* is not there: using the cache and the compiler"):
            jit.get(TOY, "sm_100a", {"addend": 1})
        assert len(builds) == 1

    @pytest.mark.parametrize("case", ["sources", "machine", "FFI", "damage"])
    def test_what_does_not_fit_is_refused(
        self, aot: Path, no_compiler: None, monkeypatch: pytest.MonkeyPatch, case: str
    ) -> None:
        if case == "sources":
            monkeypatch.setattr(compiler, "sources", lambda module: "others")
            reason = "was built from other device sources than those installed"
        elif case == "damage":
            os.truncate(toys.entry_directory(aot) / OBJECT, 10)
            reason = "kernel.o: 10 bytes, should be"
        else:
            here = compiler.toolchain()
            packages = {**here["packages"], **({"apache-tvm-ffi": "0.2.0"} if case == "FFI" else {})}
            other = {**here, "packages": packages, **({"machine": "aarch64"} if case == "machine" else {})}
            monkeypatch.setattr(compiler, "toolchain", lambda: other)
            reason = {"machine": "hosts, this one is aarch64", "FFI": "installed is 0.2.0"}[case]
        with pytest.raises(CacheError, match=reason):
            jit.get(TOY, "sm_90a", {"addend": 1})

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (lambda m: m.pop("sources"), "is damaged: .*incomplete, or of wrong types: sources"),
            (lambda m: m.pop("toolchain"), "is damaged: .*incomplete, or of wrong types: toolchain"),
            (lambda m: m["toolchain"].pop("machine"), "does not say what it was built with"),
            (lambda m: m["toolchain"].pop("packages"), "does not say what it was built with"),
            (lambda m: m["toolchain"].update(packages=[]), "does not say what it was built with"),
            (lambda m: m["toolchain"]["packages"].clear(), "does not say what it was built with"),
        ],
    )
    def test_a_sealed_manifest_without_keys_is_refused(
        self, aot: Path, no_compiler: None, change: Callable[[dict[str, Any]], object], reason: str
    ) -> None:
        reseal(toys.entry_directory(aot), change)
        with pytest.raises(CacheError, match=reason):
            jit.get(TOY, "sm_90a", {"addend": 1})

    def test_an_entry_that_others_can_write_is_refused(self, aot: Path, no_compiler: None) -> None:
        toys.entry_directory(aot).chmod(0o777)
        with pytest.raises(CacheError, match="can be written by everyone: refused"):
            jit.get(TOY, "sm_90a", {"addend": 1})

    def test_no_compiler_and_no_directory(self, cache_root: Path, no_compiler: None) -> None:
        with pytest.raises(CacheError, match=f"no compiler here .*{cache.AOT_VARIABLE}"):
            jit.get(TOY, "sm_90a", {"addend": 1})


# As on a host that never had the DSL: importing it fails, and no package metadata speaks of it.
WITHOUT_DSL = """
    import importlib.metadata, json, sys

    class Hidden:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in ("cutlass", "nvidia_cutlass_dsl", "iket"):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Hidden())
    real = importlib.metadata.version
    def version(name):
        if name.startswith("nvidia-cutlass-dsl"):
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)
    importlib.metadata.version = version
"""

LAUNCH = (
    WITHOUT_DSL
    + """
    import torch
    from bindings import jit
    from tests.bindings.standin_cudart import Standin, on_cuda

    cudart = Standin(sys.argv[1])
    resources = jit.get("toy_kernels.resources", "sm_90a", {"values": 8, "dynamic": 2048})
    x = on_cuda(torch.zeros(3, 8192))
    resources(x, x)
    found = [[cudart.last("grid"), cudart.last("block"), cudart.smem, cudart.loads, cudart.launches]]

    add = jit.get("toy_kernels.add", "sm_90a", {"addend": 1})
    none, five = (on_cuda(torch.zeros(n, dtype=torch.int32)) for n in (0, 5))
    add(none, none)
    found.append([cudart.loads, cudart.launches])
    add(five, five)
    add(five, five)
    found.append([cudart.last("grid"), cudart.last("block"), cudart.smem, cudart.loads, cudart.launches])
    for arguments in ((five, none), (torch.zeros(5, dtype=torch.int32),) * 2, (five,)):
        try:
            add(*arguments)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    cudart.fail_launches(209)
    try:
        add(five, five)
    except Exception as error:
        found.append(f"{type(error).__name__}: {error}")
    found.append("cutlass" in sys.modules)
    print(json.dumps(found))
"""
)


@needs_cc
def test_a_host_without_the_compiler_loads_and_launches(cache_root: Path, tmp_path: Path) -> None:
    """Shared libraries of an ahead-of-time directory, in a process that cannot import the DSL: they load,
    check their arguments, launch what the host code says through the CUDA runtime's interface, and report
    its errors."""
    aot = tmp_path / "aot"
    aot.mkdir()
    entry = None
    for module, params in (
        (TOY, {"addend": 1}),
        (toys.RESOURCES, {"values": 8, "dynamic": 2048}),
    ):
        entry = jit.prepare(module, "sm_90a", params)
        content = {file: entry.read(file) for file in (OBJECT, LIBRARY)}
        Store(aot, private=False).put(entry.key.name(), entry.manifest, content)
    assert entry is not None
    assert entry.manifest["dynamic_smem"] == 2048
    standin = standin_cudart.build(tmp_path, entry.read(LIBRARY), entry.manifest["cudart"])
    done = toys.python(LAUNCH, str(standin), FLASHNEXT_AOT_DIR=str(aot), FLASHNEXT_CACHE_DIR="/dev/null")
    assert done.returncode == 0, done.stderr
    resources, no_rows, rows, shape, device, few, failed, dsl = json.loads(done.stdout.splitlines()[-1])
    assert resources == [[3, 1, 1], [1024, 1, 1], 2048, 1, 1]
    assert no_rows == [2, 1], "a call without rows loads the module and launches nothing"
    assert rows == [[5, 1, 1], [32, 1, 1], 0, 2, 3]
    assert shape.startswith("ValueError: Mismatched")
    assert device.startswith("ValueError: Mismatched")
    assert few.startswith("TypeError: Expects 2 parameters")
    assert failed == "RuntimeError: CUDA error 209, cudaErrorOfTheStandIn: as asked for"
    assert dsl is False


@needs_cc
def test_a_host_without_the_compiler_needs_libraries(cache_root: Path, tmp_path: Path) -> None:
    """Objects alone do not do there, and the error says so."""
    aot = tmp_path / "aot"
    aot.mkdir()
    entry = jit.prepare(TOY, "sm_90a", {"addend": 1})
    manifest = {**entry.manifest, "files": {OBJECT: entry.manifest["files"][OBJECT]}}
    Store(aot, private=False).put(entry.key.name(), manifest, {OBJECT: entry.read(OBJECT)})
    code = (
        WITHOUT_DSL
        + f"""
    from bindings import jit
    jit.get("{TOY}", "sm_90a", {{"addend": 1}})
    """
    )
    done = toys.python(code, FLASHNEXT_AOT_DIR=str(aot))
    assert done.returncode == 1
    assert "CacheError: toy_kernels.add for sm_90a (addend=1) cannot be loaded" in done.stderr
    assert "it holds no shared library" in done.stderr
