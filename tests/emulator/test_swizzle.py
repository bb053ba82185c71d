"""The XOR swizzle of shared-memory addresses against the DSL's Swizzle functor."""

import pytest

from tests.emulator.probe import NONE, SW32, SW64, SW128, SW128_ATOM32, library, traced

FUNCTORS = {NONE: (0, 4, 3), SW32: (1, 4, 3), SW64: (2, 4, 3), SW128: (3, 4, 3), SW128_ATOM32: (2, 5, 2)}
SPAN = 2048  # bytes; every pattern repeats within 1024


@pytest.fixture(scope="module")
def expected():
    import cutlass.cute as cute

    def tables():
        linear = cute.make_layout(SPAN, stride=1)
        layouts = {
            mode: cute.make_composed_layout(cute.make_swizzle(*bms), 0, linear)
            for mode, bms in FUNCTORS.items()
        }
        return {mode: [cute.crd2idx(i, layout) for i in range(SPAN)] for mode, layout in layouts.items()}

    return traced(tables)


@pytest.mark.parametrize("mode", FUNCTORS)
def test_swizzle_is_the_functor_on_byte_addresses(expected, mode):
    assert [library().swizzle(mode, i, 0) for i in range(SPAN)] == expected[mode]


@pytest.mark.parametrize("mode", FUNCTORS)
@pytest.mark.parametrize("base", [1, 5])
def test_base_offset_shifts_the_pattern_by_rows(expected, mode, base):
    """A pattern that starts `base` rows of 128 bytes past a multiple of 1024 is the same pattern, moved."""
    moved = [library().swizzle(mode, i + base * 128, base) - base * 128 for i in range(1024)]
    assert moved == expected[mode][:1024]
