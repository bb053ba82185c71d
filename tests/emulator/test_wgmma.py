"""wgmma: its register fragments against the DSL's layouts, and the unit against matrix products."""

import numpy as np
import pytest

from tests.emulator.probe import (
    BF16,
    E4M3,
    F16,
    F32,
    NONE,
    S8,
    S32,
    SW32,
    SW64,
    SW128,
    TF32,
    Machine,
    descriptor,
    library,
    ptr,
    traced,
)
from tests.emulator.test_mma import operand_bits

START_A, START_B = 0x2000, 0x10000
WIDTH = {NONE: 16, SW32: 32, SW64: 64, SW128: 128}


@pytest.fixture(scope="module")
def layouts():
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

    def build():
        op = warpgroup.MmaF16BF16Op(
            cutlass.BFloat16,
            cutlass.Float32,
            (64, 24, 16),
            warpgroup.OperandSource.RMEM,
            OperandMajorMode.K,
            OperandMajorMode.K,
        )
        mma = cute.make_tiled_mma(op)
        out = []
        for tv in (mma.tv_layout_A, mma.tv_layout_C):
            values = cute.size(tv) // 128
            out.append(np.array([[cute.crd2idx((t, v), tv) for v in range(values)] for t in range(128)]))
        return out

    return traced(build, "sm_90a")


def test_accumulator_and_register_operand_are_the_layouts_of_the_dsl(layouts):
    """Warp w of a warpgroup holds rows 16 w to 16 w + 15 exactly as mma.sync would."""
    a_at, c_at = layouts
    rng = np.random.default_rng(0)
    a = rng.integers(0, 1 << 15, (64, 16)).astype(np.uint16)
    c = rng.integers(0, 1 << 32, (64, 24), np.uint64).astype(np.uint32)
    a_values, c_values = a[a_at % 64, a_at // 64], c[c_at % 64, c_at // 64]
    for warp in range(4):
        lanes = slice(32 * warp, 32 * warp + 32)
        pairs = a_values[lanes].reshape(32, -1, 2).astype(np.uint32)
        regs = np.zeros((8, 32), np.uint32)
        regs[:4] = (pairs[:, :, 0] | pairs[:, :, 1] << 16).T
        out = np.zeros((16, 16), np.float32)
        library().fragment_a(ptr(regs), BF16, 16, 16, ptr(out))
        assert (out.view(np.uint32) >> 16 == a[16 * warp : 16 * warp + 16]).all()
        regs = np.zeros((128, 32), np.uint32)
        library().fragment_c32(ptr(regs), 16, 24, ptr(np.ascontiguousarray(c[16 * warp : 16 * warp + 16])), 1)
        assert (c_values[lanes] == regs[:12].T).all()


def swizzled(mode, address):
    return library().swizzle(mode, int(address), 0)


def place(window, start, raw, mode, mn_major):
    """Puts an operand [MN][K] of raw words into shared memory, as `mode` lays it out; its descriptor."""
    data = np.ascontiguousarray(raw)
    size, width = data.itemsize, WIDTH[mode]
    mn, k = data.shape
    if not mn_major:
        leading, stride = (mn * 16, 128) if mode == NONE else (0, 8 * width)
    elif mode == NONE:
        leading, stride = mn * size // 16 * 128, 128
    else:
        leading, stride = 8 * width, -(-mn * size // width) * 8 * width
    for i in range(mn):
        for j in range(k):
            if not mn_major:
                byte = j * size
                row = i % 8 * width + i // 8 * stride
                at = row + (byte // 16 * leading + byte % 16 if mode == NONE else byte)
            else:
                byte = i * size
                across = (
                    byte // 16 * stride + byte % 16
                    if mode == NONE
                    else byte // width * leading + byte % width
                )
                at = across + j % 8 * width + j // 8 * (leading if mode == NONE else stride)
            at = swizzled(mode, start + at)
            window[at : at + size] = data[i, j : j + 1].view(np.uint8)
    return descriptor(9, start, leading, stride, mode)


def run(machine, n, k, fmt, dtype, d, a, b, scale=1, negate=(0, 0), major=(0, 0), warps=range(4)):
    """One wgmma by the four warps of CTA 0; `d` is [64][n] words of the accumulator (fp32 values for f16)."""
    for warp in warps:
        rows = slice(16 * warp, 16 * warp + 16)
        regs, dense = np.zeros((128, 32), np.uint32), np.ascontiguousarray(d[rows])
        fragment = library().fragment_c16 if dtype == F16 else library().fragment_c32
        fragment(ptr(regs), 16, n, ptr(dense), 1)
        out = machine.vector(regs)
        left = (a, None) if not isinstance(a, list) else (None, machine.vector(a[warp]))
        library().emu_wgmma(
            *(machine.warp(warp), 0xFFFFFFFF, n, k, fmt, fmt, dtype, 0, out, *left, b, machine.lanes(scale)),
            *(*negate, *major),
        )
        fragment(ptr(regs), 16, n, ptr(dense), 0)
        d[rows] = dense


@pytest.mark.parametrize("n", [8, 96, 256])
@pytest.mark.parametrize("mode", [NONE, SW32, SW64, SW128])
@pytest.mark.parametrize("major", [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_product_from_shared_memory(n, mode, major):
    if n == 8 and major[1] and mode != NONE:
        pytest.skip("a tile narrower than the swizzle")
    rng = np.random.default_rng(n)
    machine = Machine()
    (a_raw, a), (b_raw, b) = operand_bits(rng, BF16, (64, 16)), operand_bits(rng, BF16, (n, 16))
    window = machine.window(0)
    da = place(window, START_A, a_raw, mode, major[0]).value
    db = place(window, START_B, b_raw, mode, major[1]).value
    d = rng.integers(-9, 9, (64, n)).astype(np.float32)
    expected = a @ b.T + d
    run(machine, n, 16, BF16, F32, d, machine.lanes(da, wide=True), machine.lanes(db, wide=True), major=major)
    assert machine.findings() == ""
    assert (d == expected).all()


@pytest.mark.parametrize(
    ("fmt", "dtype", "k"), [(F16, F32, 16), (F16, F16, 16), (TF32, F32, 8), (S8, S32, 32), (E4M3, F32, 32)]
)
@pytest.mark.parametrize("scale", [0, 1])
def test_kinds_and_accumulators(fmt, dtype, k, scale):
    rng = np.random.default_rng(k)
    machine = Machine()
    (a_raw, a), (b_raw, b) = operand_bits(rng, fmt, (64, k)), operand_bits(rng, fmt, (32, k))
    window = machine.window(0)
    da, db = (place(window, s, raw, SW128, 0).value for s, raw in ((START_A, a_raw), (START_B, b_raw)))
    c = rng.integers(-9, 9, (64, 32)).astype(np.float32)
    d = c.astype(np.int32) if dtype == S32 else c.copy()
    run(
        machine, 32, k, fmt, dtype, d, machine.lanes(da, wide=True), machine.lanes(db, wide=True), scale=scale
    )
    assert machine.findings() == ""
    assert (d == a @ b.T + (c if scale else 0)).all()


@pytest.mark.parametrize("negate", [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_operand_a_from_registers_and_signs(negate):
    rng = np.random.default_rng(5)
    machine = Machine()
    (a_raw, a), (b_raw, b) = operand_bits(rng, BF16, (64, 16)), operand_bits(rng, BF16, (16, 16))
    db = place(machine.window(0), START_B, b_raw, SW32, 0).value
    registers = []
    for warp in range(4):
        regs = np.zeros((4, 32), np.uint32)
        block = np.ascontiguousarray(a_raw[16 * warp : 16 * warp + 16]).view(np.uint32)  # pairs along K
        for lane in range(32):
            for r in range(4):
                regs[r, lane] = block[lane // 4 + 8 * (r % 2), lane % 4 + 4 * (r // 2)]
        registers.append(regs)
    d = np.zeros((64, 16), np.float32)
    run(machine, 16, 16, BF16, F32, d, registers, machine.lanes(db, wide=True), negate=negate)
    assert (d == a @ b.T * (-1) ** sum(negate)).all()


def test_an_operand_outside_the_window_is_a_finding_and_counts_as_zeros():
    machine = Machine()
    beyond = descriptor(9, 0x3FFF0, 0, 1024, SW128).value
    d = np.zeros((64, 8), np.float32)
    run(machine, 8, 16, BF16, F32, d, *(machine.lanes(beyond, wide=True) for _ in range(2)), warps=[3])
    assert "reaches shared offset" in machine.findings()
    assert (d == 0).all()


def test_descriptors_that_differ_between_lanes_are_a_finding():
    machine = Machine()
    lanes = np.full(32, descriptor(9, START_B, 0, 1024, SW128).value, np.uint64)
    lanes[7] += 1
    d = np.zeros((64, 8), np.float32)
    run(machine, 8, 16, BF16, F32, d, machine.lanes(int(lanes[0]), wide=True), ptr(lanes), warps=[0])
    assert "differ between lanes 0 and 7" in machine.findings()


def test_rows_that_are_not_settled_become_nan_in_the_product():
    """Rows of A from 5 on, or of B from 8 on, lie behind what was written; the rest of the product stands."""
    rng = np.random.default_rng(1)
    machine = Machine()
    (a_raw, a), (b_raw, b) = operand_bits(rng, BF16, (64, 16)), operand_bits(rng, BF16, (16, 16))
    window = machine.window(0)
    da, db = (place(window, s, raw, SW128, 0).value for s, raw in ((START_A, a_raw), (START_B, b_raw)))
    operands = [machine.lanes(desc, wide=True) for desc in (da, db)]
    for low, high, bad in (
        (START_A + 5 * 128, START_A + 8192, np.s_[5:, :]),
        (START_B + 1024, START_B + 4096, np.s_[:, 8:]),
    ):
        machine.unsettled(low, high)
        d = np.zeros((64, 16), np.float32)
        run(machine, 16, 16, BF16, F32, d, *operands)
        expected = a @ b.T
        expected[bad] = np.nan
        assert np.array_equal(d, expected, equal_nan=True)
    assert machine.findings() == ""
