"""Reports on compiled kernels: resources against kernels that use known ones, instructions against the
disassembler's own reading of the whole binary."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from bindings import compiler, elf, link, sass
from tests.bindings import toys

TARGETS = ("sm_90a", "sm_100a", "sm_103a")
VALUES = 80  # more than 64 registers hold

pytestmark = pytest.mark.filterwarnings("ignore:This static loop has")

needs_nvdisasm = pytest.mark.skipif(sass.nvdisasm() is None, reason="needs nvdisasm")

_compiled: dict[tuple[str, str, tuple[tuple[str, int], ...]], compiler.Compiled] = {}


def compiled(target: str, module: str = toys.RESOURCES, **params: int) -> compiler.Compiled:
    key = (module, target, tuple(sorted(params.items())))
    if key not in _compiled:
        _compiled[key] = compiler.compile_kernel(module, target, params)
    return _compiled[key]


def report(target: str, module: str = toys.RESOURCES, **params: int) -> sass.Report:
    found = compiled(target, module, **params)
    return sass.reports([(found.object, target, found.dynamic_smem)])[0]


class TestResources:
    @pytest.mark.parametrize("target", TARGETS)
    def test_a_kernel_that_fits(self, target: str) -> None:
        r = report(target, values=8)
        assert 8 < r.registers <= 64
        assert (r.stack, r.spill_bytes, r.static_smem, r.dynamic_smem, r.threads) == (0, 0, 0, 0, 1024)
        assert r.problems == []

    @needs_nvdisasm
    @pytest.mark.parametrize("target", TARGETS)
    def test_a_kernel_that_spills(self, target: str) -> None:
        r = report(target, values=VALUES)
        assert r.registers == 64
        assert r.spill_bytes is not None
        assert r.spill_bytes >= 4 * (VALUES - 64)
        assert r.stack > 0
        assert r.instructions["STL.32"] * 4 == r.spill_bytes
        assert r.problems == [f"spills {r.spill_bytes} bytes", f"uses {r.stack} bytes of stack"]

    @pytest.mark.parametrize(
        ("static", "dynamic"), [(512, 0), (0, 2048), (0, 4), (1024, 1024)], ids=["s", "d", "d4", "both"]
    )
    @pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
    def test_shared_memory(self, target: str, static: int, dynamic: int) -> None:
        r = report(target, values=2, static=static, dynamic=dynamic)
        assert (r.static_smem, r.dynamic_smem, r.smem) == (static, dynamic, static + dynamic)

    def test_unknown_dynamic_shared_memory(self) -> None:
        found = compiled("sm_90a", values=8)
        r = sass.reports([(found.object, "sm_90a", None)])[0]
        assert (r.dynamic_smem, r.smem) == (None, 0)

    @pytest.mark.skipif(link.compiler() is None, reason="needs a C compiler")
    def test_a_library_reads_as_its_object(self) -> None:
        found = compiled("sm_90a", values=8)
        library = link.library(found.object, 13)
        assert elf.cubins(library) == elf.cubins(found.object)

    def test_without_a_disassembler_resources_remain(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sass, "nvdisasm", lambda: None)
        fits, spills = report("sm_90a", values=8), report("sm_90a", values=VALUES)
        assert (fits.registers > 0, fits.instructions, fits.spill_bytes, fits.problems) == (True, {}, 0, [])
        assert spills.spill_bytes is None
        assert spills.problems == ["spills", f"uses {spills.stack} bytes of stack"]


@needs_nvdisasm
class TestInstructions:
    @pytest.mark.parametrize("target", TARGETS)
    def test_agree_with_the_disassembly_of_the_binary(self, target: str) -> None:
        """Several kernels at once, in machine code; here one by one, as the ELF files that they came in."""
        objects = [compiled(target, values=v).object for v in (8, VALUES)]
        objects.append(compiled(target, toys.ADD, addend=3).object)
        tool = sass.nvdisasm()
        for object_, r in zip(objects, sass.reports([(o, target, 0) for o in objects]), strict=True):
            (binary,) = elf.cubins(object_)
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                file.write(binary)
                file.flush()
                text = subprocess.run(
                    [str(tool), "-c", file.name], capture_output=True, text=True, check=True
                ).stdout
            lines = re.findall(r"^\s+/\*[0-9a-f]{4}\*/ +(.*?) *;", text, re.MULTILINE)
            names = Counter(re.sub(r"^@!?U?P\w+ +", "", line).split(" ")[0] for line in lines)
            assert r.instructions["total"] == len(lines)
            loads = sum(n for name, n in names.items() if name.split(".")[0] == "LDG")
            assert sum(n for name, n in r.instructions.items() if name.startswith("LDG.")) == loads
            assert r.instructions.get("STL.32", 0) == names["STL"]
            assert r.instructions.get("BAR", 0) == sum(n for m, n in names.items() if m.startswith("BAR."))

    def test_are_those_that_the_kernel_was_written_with(self) -> None:
        r = report("sm_90a", values=8, dynamic=2048)
        assert r.instructions["LDG.32"] == r.instructions["STG.32"] == 8
        assert r.instructions["BAR"] == 1

    @pytest.mark.parametrize(
        ("mnemonic", "width"),
        [
            ("LDG.E", 32),
            ("LDG.E.128", 128),
            ("LDG.E.ENL2.256", 256),
            ("LDG.E.64.CONSTANT", 64),
            ("LDG.E.U16", 16),
            ("LDG.E.S8", 8),
            ("STG.E.EF.128", 128),
            ("LDGSTS.E.BYPASS.128", 128),
            ("LDS.U.128", 128),
            ("STL.64", 64),
            ("LDG.E.LTC128B.64", 64),
        ],
    )
    def test_width(self, mnemonic: str, width: int) -> None:
        assert sass._width(mnemonic) == width

    def test_nothing_to_disassemble(self) -> None:
        assert sass.reports([]) == []

    def test_output_that_is_not_understood_is_an_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tool = tmp_path / "nvdisasm"
        tool.write_text("#!/bin/sh\necho 'something else'\n")
        tool.chmod(0o755)
        monkeypatch.setenv(sass.NVDISASM_VARIABLE, str(tool))
        with pytest.raises(
            sass.DisassemblyError, match=r"0 instructions in its output, .* bytes of code given"
        ):
            report("sm_90a", values=8)

    def test_a_tool_that_fails_says_why(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        tool = tmp_path / "nvdisasm"
        tool.write_text("#!/bin/sh\necho 'no such architecture' >&2\nexit 3\n")
        tool.chmod(0o755)
        monkeypatch.setenv(sass.NVDISASM_VARIABLE, str(tool))
        with pytest.raises(sass.DisassemblyError, match="exited with status 3: no such architecture"):
            report("sm_90a", values=8)
        monkeypatch.setenv(sass.NVDISASM_VARIABLE, str(tmp_path / "nowhere"))
        with pytest.raises(
            sass.DisassemblyError, match=rf"{sass.NVDISASM_VARIABLE}=.*nowhere: no such program"
        ):
            sass.nvdisasm()


class TestElf:
    @pytest.mark.parametrize("data", [b"", b"\x7fELF", b"MZ" * 100, b"\x7fELF\x01\x01" + bytes(100)])
    def test_what_is_no_elf_file(self, data: bytes) -> None:
        with pytest.raises(elf.ElfError):
            elf.Elf(data)

    def test_a_truncated_file(self) -> None:
        data = compiled("sm_90a", values=8).object
        with pytest.raises(elf.ElfError, match="ends at byte"):
            elf.Elf(data[: len(data) // 2])

    def test_an_object_without_a_kernel(self) -> None:
        assert elf.cubins(b"no kernel in here") == []
        with pytest.raises(ValueError, match="holds no kernel"):
            sass.reports([(b"no kernel in here", "sm_90a", 0)])

    def test_a_truncated_fat_binary(self) -> None:
        data = compiled("sm_90a", values=8).object
        with pytest.raises(elf.ElfError, match="a fat binary ends at byte"):
            elf.cubins(data[: data.index(elf.FATBIN_MAGIC) + 200])

    def test_symbols(self) -> None:
        symbols = {s.name: s for s in elf.Elf(compiled("sm_90a", values=8).object).symbols(".symtab")}
        assert not symbols[f"__tvm_ffi_{compiler.SYMBOL}"].undefined
        assert symbols["_cudaLaunchKernelEx"].undefined


def test_json_round_trip() -> None:
    r = report("sm_90a", values=8, dynamic=2048)
    assert sass.Report.from_json(r.as_json()) == r
    assert r.as_json()["smem"] == 2048
