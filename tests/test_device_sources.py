"""Every registered kernel, compiled for every target: what the machine code must and must not contain."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

import pytest

from bindings import elf, jit, precompile, sass, targets
from bindings.precompile import Config, Result
from bindings.registry import IMPLEMENTATIONS, Kernel
from bindings.store import OBJECT
from cute_kernels.gdn.config import VALUE_TILES, value_tile_for

pytestmark = pytest.mark.skipif(sass.nvdisasm() is None, reason="needs nvdisasm")

CONFIGS = precompile.registered(targets.TARGETS, sample=True)
KERNELS = sorted({c.kernel for c in CONFIGS})
COLLECTIVES = {"all_reduce", "moe_finalize_all_reduce"}  # no operators: no contract, no alignment variants
BLACKWELL = [t for t in targets.TARGETS if targets.vector_bytes(t) == 32]


MAX_SMEM = 227 * 1024
"""Shared memory that a CTA may ask for on all three targets, bytes."""


@dataclass(frozen=True)
class Accesses:
    """How a kernel moves its bulk. loads, stores: by vectors. copies: by cp.async, which moves 16 bytes at
    the most. weights: loads some that no predecessor writes."""

    loads: bool = True
    stores: bool = True
    copies: bool = False
    weights: bool = True


ACCESSES = {
    "grouped_gemma_rmsnorm": Accesses(),
    "hc_gate": Accesses(stores=False),
    "hc_apply": Accesses(weights=False),
    "hc_apply_norm": Accesses(),
    "hc_boundary": Accesses(),
    "shared_gate": Accesses(stores=False),
    "moe_finalize": Accesses(loads=False, copies=True, weights=False),
    "gdn_packed_decode": Accesses(),
}


@pytest.fixture(scope="module")
def results() -> dict[Config, Result]:
    """All of them, from the cache where it holds them."""
    built = precompile.build_all(CONFIGS, None, jobs=min(2, os.cpu_count() or 1))
    return {r.config: r for r in built}


def reports(results: dict[Config, Result], kernel: str, target: str) -> list[tuple[Config, sass.Report]]:
    found = [
        (c, r.report)
        for c, r in results.items()
        if (c.kernel, c.key.target) == (kernel, target) and r.report is not None
    ]
    assert found, f"{kernel} has no configuration for {target}, or none compiled"
    return found


def widths(report: sass.Report, instruction: str) -> dict[int, int]:
    """How many accesses of an instruction there are, by width in bits."""
    prefix = instruction + "."
    return {
        int(n.removeprefix(prefix)): count for n, count in report.instructions.items() if n.startswith(prefix)
    }


def test_everything_compiles_and_passes_the_check(results: dict[Config, Result]) -> None:
    assert [f"{r.config.key}: {r.error}" for r in results.values() if r.error] == []
    bad = {str(c.key): r.report.problems for c, r in results.items() if r.report and r.report.problems}
    assert bad == {}


def test_every_kernel_is_there_for_every_target() -> None:
    registered = {k.op for ks in IMPLEMENTATIONS.values() for k in ks if isinstance(k, Kernel)} | COLLECTIVES
    assert set(KERNELS) == registered
    for target in targets.TARGETS:
        assert {c.kernel for c in CONFIGS if c.key.target == target} == registered
    assert len({c.key for c in CONFIGS}) == len(CONFIGS)


@pytest.mark.parametrize("target", targets.TARGETS)
@pytest.mark.parametrize("kernel", KERNELS)
class TestEveryKernel:
    def test_no_local_memory(self, results: dict[Config, Result], kernel: str, target: str) -> None:
        for config, report in reports(results, kernel, target):
            assert report.stack == report.spill_bytes == 0, config
            assert not widths(report, "LDL"), config
            assert not widths(report, "STL"), config

    def test_both_halves_of_dependent_launch(
        self, results: dict[Config, Result], kernel: str, target: str
    ) -> None:
        for config, report in reports(results, kernel, target):
            assert report.instructions.get("PREEXIT"), config
            assert report.instructions.get("ACQBULK"), config

    def test_no_atomics(self, results: dict[Config, Result], kernel: str, target: str) -> None:
        for config, report in reports(results, kernel, target):
            found = {n: report.instructions.get(n, 0) for n in ("ATOM", "ATOMG", "ATOMS", "RED", "REDG")}
            if kernel == "hc_mix" and target in BLACKWELL:
                kernels = 2 if config.key.params["launch"] == "split" else 1
                assert found.pop("ATOMS") == 4 * kernels, config  # the books of tcgen05.alloc and dealloc
            assert not any(found.values()), config

    def test_no_access_is_wider_than_the_variant_says(
        self, results: dict[Config, Result], kernel: str, target: str
    ) -> None:
        variants = set()
        for config, report in reports(results, kernel, target):
            bits = int(config.key.params.get("vec_bytes", 16)) * 8
            variants.add(bits)
            assert max([*widths(report, "LDG"), *widths(report, "STG")]) <= bits, config
        wide = target in BLACKWELL and kernel not in COLLECTIVES and kernel != "hc_mix"
        assert variants == ({128, 256} if wide else {128})

    def test_the_launch_is_known(self, results: dict[Config, Result], kernel: str, target: str) -> None:
        for config, report in reports(results, kernel, target):
            assert report.dynamic_smem is not None, config
            assert report.dynamic_smem <= MAX_SMEM, config
            assert report.threads > 0, config


@pytest.mark.parametrize("target", targets.TARGETS)
@pytest.mark.parametrize("kernel", sorted(ACCESSES))
class TestAccesses:
    def test_are_as_wide_as_the_variant_says(
        self, results: dict[Config, Result], kernel: str, target: str
    ) -> None:
        expected = ACCESSES[kernel]
        for config, report in reports(results, kernel, target):
            bits = int(config.key.params["vec_bytes"]) * 8
            loads, stores, copies = (widths(report, i) for i in ("LDG", "STG", "LDGSTS"))
            assert (bits in loads, bits in stores) == (expected.loads, expected.stores), config
            assert list(copies) == ([128] if expected.copies else []), config

    def test_weights_are_loaded_before_the_dependency_wait_and_nothing_is_stored(
        self, results: dict[Config, Result], kernel: str, target: str
    ) -> None:
        tool = sass.nvdisasm()
        assert tool is not None
        for config, _ in reports(results, kernel, target):
            entry = jit.prepare(config.key.module, target, config.key.params)
            (binary,) = elf.cubins(entry.read(OBJECT))
            (code,) = [s.data for s in elf.Elf(binary).sections if s.name.startswith(".text.")]
            before, wait, after = sass.disassemble(code, target, tool).partition("ACQBULK")
            assert wait, config
            assert bool(re.search(r"\bLDG\b", before)) == ACCESSES[kernel].weights, config
            assert re.search(r"\bLDG\b", after), config
            assert not re.search(r"\bSTG\b", before), config


@pytest.mark.parametrize("target", BLACKWELL)
def test_gdn_at_one_row_uses_at_most_80_registers(results: dict[Config, Result], target: str) -> None:
    found = {
        (c.key.params["state_dtype"], c.key.params["vec_bytes"]): report.registers
        for c, report in reports(results, "gdn_packed_decode", target)
        if c.key.params["value_tile"] == value_tile_for(1, int(c.key.params["value_heads"]))
    }
    assert {("fp32", 32), ("bf16", 32)} <= set(found)
    assert max(found.values()) <= 80


@pytest.mark.parametrize("target", targets.TARGETS)
def test_every_gdn_tile_is_built(target: str) -> None:
    tiles = {
        c.key.params["value_tile"]
        for c in CONFIGS
        if (c.kernel, c.key.target) == ("gdn_packed_decode", target)
    }
    assert tiles == set(VALUE_TILES)
