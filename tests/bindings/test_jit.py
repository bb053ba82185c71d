"""Kernels on demand: what is compiled, when, how often, where it is kept, and that it then runs, without a
GPU."""

from __future__ import annotations

import json
import os
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bindings import compiler, jit, link, store
from bindings.errors import CacheWarning
from bindings.store import LIBRARY, MANIFEST, OBJECT, Entry, Key, Store
from tests.bindings import toys

ROOT = Path(__file__).resolve().parents[2]
TOY = toys.ADD
needs_cc = pytest.mark.skipif(link.compiler() is None, reason="needs a C compiler")


def fail_temporaries(cache_root: Path, monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    """Makes temporary directories in the cache, and only there, fail."""
    real = tempfile.mkdtemp

    def mkdtemp(*args: Any, **kwargs: Any) -> str:
        if kwargs.get("dir") == cache_root:
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)


class TestOnce:
    def test_first_call_compiles_later_ones_do_not(self, builds: list[Key]) -> None:
        first = jit.get(TOY, "sm_90a", {"addend": 1})
        assert jit.get(TOY, "sm_90a", {"addend": 1}) is first
        assert builds == [Key.of(TOY, "sm_90a", {"addend": 1})]

    def test_target_and_parameters_are_the_key(self, builds: list[Key]) -> None:
        functions = [
            jit.get(TOY, target, {"addend": addend}) for target in ("sm_90a", "sm_100a") for addend in (1, 2)
        ]
        assert len(builds) == len(set(builds)) == len(set(map(id, functions))) == 4

    def test_is_loaded(self, builds: list[Key]) -> None:
        assert not jit.is_loaded(TOY, "sm_90a", {"addend": 1})
        jit.prepare(TOY, "sm_90a", {"addend": 1})
        assert not jit.is_loaded(TOY, "sm_90a", {"addend": 1}), "stored is not loaded"
        jit.get(TOY, "sm_90a", {"addend": 1})
        assert jit.is_loaded(TOY, "sm_90a", {"addend": 1})
        assert not jit.is_loaded(TOY, "sm_90a", {"addend": 2})
        assert len(builds) == 1

    def test_threads_at_the_first_call(self, cache_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Two kernels, four threads each, all at once: each is compiled once, and compilations take turns
        (the DSL's tracer fails otherwise)."""
        calls: list[Key] = []
        real = compiler.compile_kernel

        def counted(module: str, target: str, params: dict[str, str | int | bool]) -> compiler.Compiled:
            calls.append(Key.of(module, target, params))
            return real(module, target, params)

        monkeypatch.setattr(compiler, "compile_kernel", counted)
        barrier = threading.Barrier(8)
        got: dict[int, list[object]] = {5: [], 6: []}

        def ask(addend: int) -> None:
            barrier.wait()
            got[addend].append(jit.get(TOY, "sm_90a", {"addend": addend}))

        threads = [threading.Thread(target=ask, args=(addend,)) for addend in (5, 6) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert sorted(k.params["addend"] for k in calls) == [5, 6]
        assert [len(found) for found in got.values()] == [4, 4]
        assert all(len(set(map(id, found))) == 1 for found in got.values())

    def test_an_error_of_the_kernel_is_the_caller_s_and_leaves_nothing(self, cache_root: Path) -> None:
        for _ in range(2):
            with pytest.raises(ValueError, match="addend: got -1, allowed integers >= 0"):
                jit.get(TOY, "sm_90a", {"addend": -1})
        assert Store(cache_root).names() == []
        with pytest.raises(ModuleNotFoundError, match="no_such_kernel"):
            jit.get("cute_kernels.no_such_kernel", "sm_90a", {})


class TestCache:
    def test_a_later_process_finds_what_an_earlier_one_compiled(
        self, builds: list[Key], cache_root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        jit.get(TOY, "sm_90a", {"addend": 1})
        monkeypatch.setattr(jit, "_functions", {})
        jit.get(TOY, "sm_90a", {"addend": 1})
        assert len(builds) == 1

    def test_what_is_cached_is_what_runs(
        self, builds: list[Key], cache_root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loaded: list[Entry] = []
        monkeypatch.setattr(jit, "load", lambda entry: loaded.append(entry))
        jit.get(TOY, "sm_90a", {"addend": 1})
        monkeypatch.setattr(jit, "_functions", {})
        jit.get(TOY, "sm_90a", {"addend": 1})
        cold, warm = (entry.path(OBJECT) for entry in loaded)
        assert cold == warm == str(toys.entry_directory(cache_root) / OBJECT)

    @pytest.mark.parametrize("file", [OBJECT, MANIFEST])
    def test_a_damaged_artifact_is_built_again_and_said_so(
        self, builds: list[Key], cache_root: Path, file: str
    ) -> None:
        jit.prepare(TOY, "sm_90a", {"addend": 1})
        path = toys.entry_directory(cache_root) / file
        os.truncate(path, 100)
        with pytest.warns(CacheWarning, match=f"{path}: .*toy_kernels.add for sm_90a .* is built again"):
            jit.prepare(TOY, "sm_90a", {"addend": 1})
        assert len(builds) == 2
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            jit.prepare(TOY, "sm_90a", {"addend": 1})
        assert len(builds) == 2

    @pytest.mark.parametrize(
        "change",
        [
            lambda t: {**t, "packages": {**t["packages"], "nvidia-cutlass-dsl": "4.8.2"}},
            lambda t: {**t, "packages": {**t["packages"], "nvidia-cutlass-dsl-libs-cu13": "4.8.2"}},
            lambda t: {**t, "packages": {**t["packages"], "apache-tvm-ffi": "0.1.16"}},
            lambda t: {**t, "flavour": 12},
            lambda t: {**t, "machine": "aarch64"},
            lambda t: {**t, "environment": {"CUTE_DSL_LINEINFO": "1"}},
        ],
        ids=["DSL", "DSL build", "FFI", "flavour", "machine", "setting"],
    )
    def test_another_toolchain_is_another_artifact(
        self,
        builds: list[Key],
        cache_root: Path,
        monkeypatch: pytest.MonkeyPatch,
        change: Callable[[dict[str, object]], dict[str, object]],
    ) -> None:
        jit.prepare(TOY, "sm_90a", {"addend": 1})
        toolchain = change(dict(compiler.toolchain()))
        monkeypatch.setattr(compiler, "toolchain", lambda: toolchain)
        jit.prepare(TOY, "sm_90a", {"addend": 1})
        assert len(builds) == 2
        assert len(Store(cache_root).names()) == 2

    def test_other_sources_are_another_artifact(
        self, builds: list[Key], cache_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        package = tmp_path / "some_kernels"
        package.mkdir()
        (package / "__init__.py").write_text("")
        (package / "part.py").write_text("A = 1\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        digests = []
        for text in ("A = 1\n", "A = 2\n", "A = 1\n"):
            (package / "part.py").write_text(text)
            compiler.sources.cache_clear()
            digests.append(compiler.sources("some_kernels.kernel"))
            jit.prepare("some_kernels.kernel", "sm_90a", {})
        compiler.sources.cache_clear()
        assert digests[0] == digests[2] != digests[1]
        assert len(builds) == len(Store(cache_root).names()) == 2
        assert compiler.sources("cute_kernels.hyper.gate") != digests[0]

    def test_settings_that_only_print_or_place_things_do_not_count(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("CUTE_DSL_KEEP", "CUTE_DSL_DUMP_DIR", "CUTE_DSL_LOG_LEVEL", "CUTE_DSL_LINEINFO"):
            monkeypatch.setenv(name, "1")
        found = compiler.toolchain.__wrapped__()["environment"]  # type: ignore[attr-defined]
        assert found == {"CUTE_DSL_LINEINFO": "1"}

    @pytest.mark.parametrize("how", ["no directory", "no space"])
    def test_works_in_memory_and_warns_once_where_nothing_can_be_written(
        self, builds: list[Key], cache_root: Path, monkeypatch: pytest.MonkeyPatch, how: str
    ) -> None:
        if how == "no directory":
            cache_root.write_text("")
        else:
            fail_temporaries(cache_root, monkeypatch, OSError(28, "No space left on device", str(cache_root)))
        with pytest.warns(CacheWarning, match=str(cache_root)) as caught:
            functions = [jit.get(TOY, "sm_90a", {"addend": addend}) for addend in (1, 2, 2)]
        assert len(caught) == 1
        assert all(map(callable, functions))
        assert len(builds) == 2
        assert jit.is_loaded(TOY, "sm_90a", {"addend": 2})

    def test_a_directory_that_can_only_be_read_still_serves(
        self, builds: list[Key], cache_root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        jit.prepare(TOY, "sm_90a", {"addend": 1})

        fail_temporaries(cache_root, monkeypatch, OSError(30, "Read-only file system", str(cache_root)))
        monkeypatch.setattr(Store, "_acquire", lambda *args: None)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            jit.prepare(TOY, "sm_90a", {"addend": 1})
        with pytest.warns(CacheWarning, match="cannot be written: .*Read-only file system"):
            jit.prepare(TOY, "sm_90a", {"addend": 2})
        assert len(builds) == 2

    def test_without_a_linker_the_object_is_cached(
        self, builds: list[Key], cache_root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(link, "compiler", lambda: None)
        entry = jit.prepare(TOY, "sm_90a", {"addend": 1})
        assert (entry.has(OBJECT), entry.has(LIBRARY)) == (True, False)
        assert callable(jit.get(TOY, "sm_90a", {"addend": 1}))


COLD_AND_WARM = """
    import json, sys, time
    from bindings import compiler, jit
    calls, real = [], compiler.compile_kernel
    compiler.compile_kernel = lambda *a: (calls.append(a), real(*a))[1]
    import torch
    seconds = []
    for addend in (1, 2, 3, 4):
        start = time.perf_counter()
        jit.get("toy_kernels.add", "sm_90a", {"addend": addend})
        seconds.append(time.perf_counter() - start)
    print(json.dumps({"compiled": len(calls), "seconds": seconds, "dsl": "cutlass" in sys.modules}))
"""


@needs_cc
def test_cold_and_warm_process(cache_root: Path) -> None:
    """Cold: under 3 s a kernel. Warm: nothing is compiled, and where the CUDA runtime is here the compiler
    is not even imported; under 50 ms a kernel. The machine may be busy, so the best of several counts."""
    runs = []
    for _ in range(2):
        done = toys.python(COLD_AND_WARM)
        assert done.returncode == 0, done.stderr
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    cold, warm = runs
    assert (cold["compiled"], warm["compiled"]) == (4, 0)
    assert min(cold["seconds"]) < 3.0
    assert min(warm["seconds"][1:]) < 0.05
    major = link.cudart_major()
    assert major is not None
    assert warm["dsl"] == (link.load_cudart(major) is not None)


EIGHT = """
    import os, sys
    from pathlib import Path
    from bindings import compiler, jit
    log, results = Path(sys.argv[1]), Path(sys.argv[2])
    real = compiler.compile_kernel
    def compile_kernel(*arguments):
        with open(log, "a") as stream:
            stream.write("compiled\\n")
        return real(*arguments)
    compiler.compile_kernel = compile_kernel
    go_read, go_write = os.pipe()
    children = []
    for i in range(8):
        child = os.fork()
        if child == 0:
            os.close(go_write)
            os.read(go_read, 1)  # returns in all of them when the parent closes its end
            try:
                assert callable(jit.get("toy_kernels.add", "sm_90a", {"addend": 7}))
                entry = jit.prepare("toy_kernels.add", "sm_90a", {"addend": 7})
                (results / str(i)).write_text(entry.path("kernel.o"))
            except BaseException:
                import traceback
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    os.close(go_write)
    print([os.waitpid(child, 0)[1] for child in children])
"""


def test_eight_processes_at_once_on_an_empty_directory(cache_root: Path, tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    done = toys.python(EIGHT, str(tmp_path / "log"), str(tmp_path / "results"))
    assert done.stdout == f"{[0] * 8}\n", done.stderr
    assert (tmp_path / "log").read_text() == "compiled\n", "one compiles, seven wait for it"
    results = {path.read_text() for path in (tmp_path / "results").iterdir()}
    assert results == {str(toys.entry_directory(cache_root) / OBJECT)}
    assert len(list((tmp_path / "results").iterdir())) == 8


def test_importing_loads_neither_the_compiler_nor_the_ffi() -> None:
    done = toys.python(
        "import sys; from bindings import jit, cache, sass, precompile\n"
        "print([m for m in ('cutlass', 'tvm_ffi') if m in sys.modules])"
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


class TestLoad:
    def test_the_dsl_links_the_object_where_the_library_cannot_be_loaded(
        self, builds: list[Key], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        paths: list[str] = []
        real = compiler.load_object
        monkeypatch.setattr(compiler, "load_object", lambda path: (paths.append(path), real(path))[1])
        monkeypatch.setattr(link, "load_cudart", lambda major: "not here")
        assert callable(jit.get(TOY, "sm_90a", {"addend": 1}))
        (path,) = paths
        assert path.endswith(OBJECT)

    @pytest.fixture
    def through_dsl(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        paths: list[str] = []
        monkeypatch.setattr(compiler, "load_object", lambda path: paths.append(path) or (lambda: None))
        return paths

    def test_a_stand_in_for_the_runtime_gets_the_object(
        self, builds: list[Key], monkeypatch: pytest.MonkeyPatch, through_dsl: list[str]
    ) -> None:
        monkeypatch.setenv("CUTE_DSL_LIBS", "/some/standin.so")
        jit.get(TOY, "sm_90a", {"addend": 1})
        assert len(through_dsl) == 1

    @needs_cc
    def test_a_library_that_the_loader_refuses_is_not_the_end(
        self, builds: list[Key], monkeypatch: pytest.MonkeyPatch, through_dsl: list[str]
    ) -> None:
        monkeypatch.setattr(link, "load_cudart", lambda major: None)
        monkeypatch.setattr(link, "library", lambda object_, cudart: b"no library")
        jit.get(TOY, "sm_90a", {"addend": 1})
        assert len(through_dsl) == 1

    def test_from_memory(self, toy: compiler.Compiled) -> None:
        content = {OBJECT: toy.object}
        key = Key.of(TOY, "sm_90a", {"addend": 1})
        manifest = store.manifest_of(key, "", "", {}, content, symbol=compiler.SYMBOL, cudart=None)
        assert callable(jit.load(Entry(manifest, None, content)))
