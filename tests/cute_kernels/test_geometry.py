"""Launch geometry, in plain Python: who owns which element, and which GDN tiles exist."""

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cute_kernels.device.span import Span
from cute_kernels.gdn.config import ROWS_PER_WARP, VALUE_TILES, value_tile_for

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]
SPANS = given(
    target=st.sampled_from(["sm_90a", "sm_100a", "sm_103a"]),
    extent=st.integers(1, 2048).map(lambda n: 8 * n),
    max_threads=st.sampled_from([32, 256, 512]),
)


def owned(span: Span) -> list[int]:
    """Every element that some thread owns, thread by thread, with the bounds check that load_span makes."""
    vectors = [p * span.threads + t for t in range(span.threads) for p in range(span.passes)]
    return [v * span.elems + e for v in vectors if span.exact or v < span.vecs for e in range(span.elems)]


@SPANS
def test_a_span_owns_every_element_once(target: str, extent: int, max_threads: int) -> None:
    assert sorted(owned(Span.of(target, extent, max_threads))) == list(range(extent))


@SPANS
def test_a_span_is_whole_warps_within_its_limit(target: str, extent: int, max_threads: int) -> None:
    span = Span.of(target, extent, max_threads)
    assert span.threads % 32 == 0
    assert 32 <= span.threads <= max_threads
    assert span.warps * 32 == span.threads
    assert span.elems == (8 if target == "sm_90a" or extent % 16 else 16)


def test_the_models_stream_needs_no_bounds_check_on_sm90() -> None:
    assert Span.of("sm_90a", 2560, 512) == Span(extent=2560, elems=8, threads=320)
    assert Span.of("sm_90a", 2560, 512).exact


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("state_bytes", [2, 4])
@pytest.mark.parametrize("vector", [16, 32])
@pytest.mark.parametrize("tile", VALUE_TILES)
def test_a_warp_of_every_tile_covers_its_rows_in_whole_steps(
    tile: int, vector: int, state_bytes: int, dim: int
) -> None:
    elems = min(vector // state_bytes, dim // 8)
    lanes = dim // elems
    rows_per_step = 32 // lanes
    assert dim % tile == 0
    assert tile % ROWS_PER_WARP[tile] == 0
    assert ROWS_PER_WARP[tile] % rows_per_step == 0
    steps = ROWS_PER_WARP[tile] // rows_per_step
    assert lanes % steps == 0
    assert lanes // steps == 32 // ROWS_PER_WARP[tile]  # each row's total ends in one group of owners


@given(rows=st.integers(1, 1 << 20), heads=st.integers(1, 128))
def test_the_chosen_tile_exists_and_never_grows_with_the_batch(rows: int, heads: int) -> None:
    assert value_tile_for(rows, heads) in VALUE_TILES
    assert value_tile_for(2 * rows, heads) <= value_tile_for(rows, heads)


def kernel_files() -> list[Path]:
    return [p for p in sorted((ROOT / "cute_kernels").rglob("*.py")) if "@cute.kernel" in p.read_text()]


@pytest.mark.parametrize("path", kernel_files(), ids=lambda p: p.stem)
def test_every_kernel_waits_for_its_predecessors_in_every_thread(path: Path) -> None:
    """Wait and release stand at the kernel's top level, under no condition; no store precedes the wait. Two
    exceptions: where half of a CTA's threads poll, they release: the others would be ahead of the poll; and
    where a CTA allocates tensor memory it releases behind that, on other targets earlier."""
    by_target = [
        f"if const_expr({which}p.tensor_memory):\n    release_dependents()" for which in ("not ", "")
    ]
    kernels = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(d) == "cute.kernel" for d in node.decorator_list)
    ]
    assert kernels
    for kernel in kernels:
        top = [ast.unparse(statement) for statement in kernel.body]
        assert top.count("await_predecessors()") == 1
        if by_target[0] in top:  # one of the two is compiled
            assert [statement for statement in top if "release_dependents()" in statement] == by_target
        else:
            found = top.count("release_dependents()") + top.count("if exchanges:\n    release_dependents()")
            assert found == ast.unparse(kernel).count("release_dependents()") == 1
        before = top[: top.index("await_predecessors()")]
        assert not any("store" in statement or "out[" in statement for statement in before)
