"""From a kernel module to an object, and from that to a shared library."""

from __future__ import annotations

import errno
import tempfile

import pytest

from bindings import compiler, link
from bindings.errors import CacheError
from tests.bindings import toys

TOY = toys.ADD
needs_cc = pytest.mark.skipif(link.compiler() is None, reason="needs a C compiler")


def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """No temporary directory can be made."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", refuse)


def test_no_room_for_the_object(monkeypatch: pytest.MonkeyPatch) -> None:
    no_room(monkeypatch)
    with pytest.raises(CacheError, match=r"add: cannot write temporary files \(TMPDIR\): .*No space left"):
        compiler.compile_kernel(TOY, "sm_90a", {"addend": 1})


class TestLink:
    def test_leaves_the_runtime_and_the_ffi_to_the_host(self, toy: compiler.Compiled) -> None:
        if link.compiler() is None:
            with pytest.raises(link.LinkError, match="no C compiler"):
                link.library(toy.object, 13)
            return
        wanted = link.undefined(link.library(toy.object, 13))
        assert "cudaLaunchKernelExC" in wanted
        assert "TVMFFIEnvGetStream" in wanted
        assert not [name for name in wanted if name.startswith(("_cu", "CuteDSLRT"))]

    @pytest.mark.parametrize(
        ("cc", "cudart", "reason"),
        [
            ("/bin/false", 13, "exited with status 1"),
            ("/no/such/cc", 13, "no C compiler"),
            ('"unbalanced', 13, 'CC="unbalanced: No closing quotation'),
            (None, 99, "CUDA 99"),
        ],
    )
    def test_failures_say_why(
        self,
        toy: compiler.Compiled,
        monkeypatch: pytest.MonkeyPatch,
        cc: str | None,
        cudart: int,
        reason: str,
    ) -> None:
        if cc is None:
            monkeypatch.setattr(link, "compiler", lambda: ["cc"])
        elif "no/such" in cc:
            monkeypatch.setenv("PATH", "/no/such")
            monkeypatch.setenv("CC", cc)
        else:
            monkeypatch.setenv("CC", cc)
        with pytest.raises(link.LinkError, match=reason):
            link.library(toy.object, cudart)

    @needs_cc
    def test_a_symbol_that_nothing_defines_is_noticed(
        self, toy: compiler.Compiled, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        renamed = toy.object.replace(b"cuda_dialect_init_library_once", b"cuda_dialect_init_library_twic")
        assert renamed != toy.object
        with pytest.raises(link.LinkError, match="symbols that no library defines"):
            link.library(renamed.replace(b"_cudaGetDevice\0", b"_noneGetDevice\0"), 13)

    @needs_cc
    def test_no_room_for_temporary_files(
        self, toy: compiler.Compiled, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        no_room(monkeypatch)
        with pytest.raises(link.LinkError, match=r"cannot write temporary files: .*No space left"):
            link.library(toy.object, 13)

    @needs_cc
    def test_what_the_compiler_made_is_looked_at(
        self, toy: compiler.Compiled, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(link, "_link", lambda *_: b"no library")
        with pytest.raises(link.LinkError, match="made no library"):
            link.library(toy.object, 13)

    def test_a_command_that_is_none_makes_no_library_possible(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CC", '"unbalanced')
        assert not link.possible()

    def test_a_runtime_that_is_not_here_says_so(self) -> None:
        reason = link.load_cudart(99)
        assert reason is not None
        assert "libcudart.so.99" in reason


def test_host_code_is_for_the_baseline_of_the_architecture(toy: compiler.Compiled) -> None:
    """An object may be loaded by another host than the one that compiled it: no instruction of its host
    half needs more than the architecture's baseline. Vector-extension prefixes would show here as many EVEX
    or VEX bytes."""
    if compiler.toolchain()["machine"] != "x86_64":
        pytest.skip("looks at x86-64 code")
    from bindings.elf import Elf

    code = b"".join(s.data for s in Elf(toy.object).sections if s.name in (".text", ".ltext"))
    assert len(code) > 1000
    # zmm/ymm moves of the native build: 62 f1 7c 48, 62 d1 7c 48, c5 fc 11, c5 f8 77 (vzeroupper)
    for pattern in (b"\x62\xf1\x7c\x48", b"\x62\xd1\x7c\x48", b"\xc5\xfc\x11", b"\xc5\xf8\x77"):
        assert pattern not in code


def test_compilation_is_reproducible(toy: compiler.Compiled) -> None:
    again = compiler.compile_kernel(TOY, "sm_90a", {"addend": 1})
    assert again == toy
