"""The compiled kernels: system-scope accesses where the protocol has them, and the fences between them."""

from __future__ import annotations

import re

import pytest

from bindings import elf, jit, sass, targets
from bindings.store import OBJECT
from collectives.launch import MODULE, Form, Plain
from cute_kernels.moe import config

pytestmark = pytest.mark.skipif(sass.nvdisasm() is None, reason="needs nvdisasm")

STRONG = r"{}\.E\.128\.STRONG\.SYS"
KINDS = (Plain(), Form(), Form(norm=True))


def code_of(target: str, params: dict[str, object]) -> str:
    tool = sass.nvdisasm()
    assert tool is not None
    entry = jit.prepare(MODULE, target, params)  # type: ignore[arg-type]
    (binary,) = elf.cubins(entry.read(OBJECT))
    (code,) = [s.data for s in elf.Elf(binary).sections if s.name.startswith(".text.")]
    return sass.disassemble(code, target, tool)


@pytest.mark.parametrize("target", targets.TARGETS)
@pytest.mark.parametrize("world", config.WORLDS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_accesses_and_fences(target: str, world: int, kind: Plain | Form) -> None:
    code = code_of(target, kind.params(world, 2560, 10))
    vectors = config.elements(target, 2560) // 8
    stores = [m.start() for m in re.finditer(STRONG.format("STG"), code)]
    loads = [m.start() for m in re.finditer(STRONG.format("LDG"), code)]
    # a push to every peer and a marker to every slot; one wait that looks at every slot
    assert (len(stores), len(loads)) == (2 * world * vectors, world * vectors)
    pushes, markers = stores[: world * vectors], stores[world * vectors :]
    assert max(pushes) < min(loads) <= max(loads) < min(markers)
    # release: between the dependency wait and the first push; acquire: between the last look and the markers
    wait = code.index("ACQBULK")
    release, acquire = code.index("MEMBAR.ALL.SYS"), code.index("CCTL.IVALL", max(loads))
    assert wait < release < min(pushes)
    assert max(loads) < acquire < min(markers)
    # dependents start after the wait: earlier, their CTAs could hold room that a peer on this GPU needs
    assert max(loads) < code.index("PREEXIT")
    # nothing of the protocol is touched before the dependency wait
    assert not re.search(r"STRONG|\bSTG\b|MEMBAR", code[:wait])


@pytest.mark.parametrize("complete", [False, True])
def test_routing_is_loaded_before_the_dependency_wait_only_where_the_caller_promises(complete: bool) -> None:
    code = code_of("sm_90a", Form(routing_complete=complete).params(4, 2560, 10))
    before = code[: code.index("ACQBULK")]
    assert len(re.findall(r"\bLDG\b", before)) == (20 if complete else 0)


def test_the_norm_weight_is_loaded_before_the_dependency_wait() -> None:
    code = code_of("sm_90a", Form(norm=True).params(4, 2560, 10))
    assert len(re.findall(r"\bLDG\.E\.128\b", code[: code.index("ACQBULK")])) == 1
