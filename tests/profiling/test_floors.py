"""The yardsticks: what the reading kernel leaves, and that it is compiled for every target with its loads
in place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from bindings.targets import TARGETS, vector_bytes
from profiling import floors


def test_fold_of_known_words() -> None:
    words = torch.arange(32, dtype=torch.int32)
    x, zero = words.view(1, 32).view(torch.bfloat16), torch.zeros(32, dtype=torch.int32).view(torch.bfloat16)
    assert floors.folded(x, zero, stride=8, words=4) == 0 + 1 + 2 + 3
    assert floors.folded(x, zero, stride=3, words=4) == sum(range(4)) + sum(range(12, 16)) + sum(
        range(24, 28)
    )
    assert floors.folded(x, x[0], stride=1, words=4) == 0


def test_fold_wraps_as_32_bit_words_do() -> None:
    x = torch.full((1, 4), 2**31 - 1, dtype=torch.int32).view(torch.bfloat16)
    zero = torch.zeros(4, dtype=torch.int32).view(torch.bfloat16)
    assert floors.folded(x, zero, stride=1, words=4) == -4


def test_copy() -> None:
    to = floors.copy(1 << 12, torch.device("cpu"))()
    assert to.numel() * to.element_size() == 1 << 12
    assert to.count_nonzero() > to.numel() // 2


def test_needs_a_target() -> None:
    with pytest.raises(ValueError, match="device: got cpu"):
        floors.empty(torch.device("cpu"))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("ctas", "threads"), floors.READ_SHAPES)
def test_read_is_compiled_with_all_its_loads(target: str, ctas: int, threads: int, tmp_path: Path) -> None:
    cute = pytest.importorskip("cutlass.cute", reason="the compiler is not installed")
    from profiling import floor_kernels

    vec_bytes = vector_bytes(target)
    entry, arguments = floor_kernels.build(
        target, kind="read", words=1280, ctas=ctas, threads=threads, vec_bytes=vec_bytes
    )
    options = f"--enable-tvm-ffi --gpu-arch {target} --keep-ptx --dump-dir {tmp_path}"
    cute.compile(entry, *arguments, options=options)
    (file,) = tmp_path.glob("*.ptx")
    ptx = file.read_text()
    passes = -(-1280 * 4 // (vec_bytes * ctas * threads))
    loads = [int(count) * int(bits) // 8 for count, bits in re.findall(r"ld\.global\.v(\d)\.b(\d+)", ptx)]
    assert loads == [vec_bytes] * (2 * passes)
    assert ptx.count("st.global") == 1
    assert ptx.count("griddepcontrol.wait") == 1


@pytest.mark.parametrize("target", TARGETS)
def test_empty_is_compiled(target: str) -> None:
    pytest.importorskip("cutlass.cute", reason="the compiler is not installed")
    assert callable(floors.compiled(target, kind="empty"))


@pytest.mark.parametrize("params", [{"kind": "other"}, {"kind": "read"}, {"kind": "read", "words": 1282}])
def test_kinds(params: dict[str, object]) -> None:
    pytest.importorskip("cutlass.cute", reason="the compiler is not installed")
    from profiling import floor_kernels

    with pytest.raises(ValueError, match="kind, words"):
        floor_kernels.build("sm_90a", **params)  # type: ignore[arg-type]


def test_products_are_the_two_gemms_of_a_mix() -> None:
    x, down, up = (torch.randn(shape) for shape in ((2, 32), (8, 32), (32, 8)))
    first, second = floors.products(x, down, up)()
    torch.testing.assert_close(first, x @ down.t())
    torch.testing.assert_close(second, x[:, :8] @ up.t())
