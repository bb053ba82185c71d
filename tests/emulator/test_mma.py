"""Number formats, the dense product, and the fragments and units of mma.sync, ldmatrix and stmatrix."""

import numpy as np
import pytest
import torch

from tests.emulator.probe import BF16, E4M3, E5M2, F16, F32, S8, S32, TF32, U8, Machine, library, ptr, traced

EVERY_F16 = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)


def unpacked(fmt, source):
    out = np.zeros(source.size, np.float32)
    library().unpack(fmt, ptr(source), source.size, ptr(out))
    return out


@pytest.mark.parametrize(
    ("fmt", "source", "dtype"),
    [
        (F16, EVERY_F16, torch.float16),
        (BF16, EVERY_F16, torch.bfloat16),
        (E4M3, np.arange(256, dtype=np.uint8), torch.float8_e4m3fn),
        (E5M2, np.arange(256, dtype=np.uint8), torch.float8_e5m2),
        (S8, np.arange(256, dtype=np.uint8), torch.int8),
        (U8, np.arange(256, dtype=np.uint8), torch.uint8),
    ],
)
def test_every_value_of_a_format_converts_as_torch_does(fmt, source, dtype):
    signed = source.view({1: np.int8, 2: np.int16}[source.itemsize])
    expected = torch.from_numpy(signed.copy()).view(dtype).float().numpy()
    assert np.array_equal(unpacked(fmt, source), expected, equal_nan=True)
    assert (np.signbit(unpacked(fmt, source)) == np.signbit(expected)).all()


def test_tf32_ignores_the_low_13_bits():
    bits = np.array([0x3F801FFF, 0xC0490FDB, 0x7F7FFFFF], np.uint32)
    assert (unpacked(TF32, bits).view(np.uint32) == (bits & 0xFFFFE000)).all()


def test_rounding_to_f16_is_to_nearest_even():
    exact = EVERY_F16.view(np.float16).astype(np.float32)
    finite = np.sort(exact[np.isfinite(exact)])
    middle = (finite[:-1].astype(np.float64) + finite[1:]) / 2
    values = np.concatenate([finite, middle, np.nextafter(middle.astype(np.float32), np.float32(np.inf))])
    values = np.concatenate([values, [65519.99, 65520, 1e30, -1e30, np.inf, -np.inf]]).astype(np.float32)
    out = np.zeros(values.size, np.uint16)
    library().to_f16(ptr(values), values.size, ptr(out))
    assert (out == torch.from_numpy(values).half().view(torch.int16).numpy().view(np.uint16)).all()
    library().to_f16(ptr(np.array([np.nan], np.float32)), 1, ptr(out))
    assert out[0] == 0x7FFF


@pytest.mark.parametrize(("m", "n", "k"), [(16, 8, 16), (3, 232, 32), (1, 256, 8)])
def test_product_adds_in_order_of_k(m, n, k):
    rng = np.random.default_rng(m)
    a, b, d = (rng.standard_normal(s).astype(np.float32) for s in ((m, k), (k, n), (m, n)))
    a, b = a.astype(np.float16).astype(np.float32), b.astype(np.float16).astype(np.float32)
    expected = d.copy()
    for i in range(k):  # products of halves are exact in fp32, so adding them is the fused operation
        expected += a[:, i : i + 1] * b[i]
    library().product(ptr(d), ptr(a), ptr(b), m, n, k)
    assert (d == expected).all()


@pytest.mark.parametrize("saturate", [0, 1])
def test_integer_product_wraps_or_saturates(saturate):
    a, b = np.full((1, 32), -128, np.float32), np.full((32, 8), 127, np.float32)
    d = np.full((1, 8), -(2**31) + 5, np.int32)
    library().product_s32(ptr(d), ptr(a), ptr(b), 1, 8, 32, saturate)
    exact = -(2**31) + 5 - 32 * 128 * 127
    assert (d == (-(2**31) if saturate else exact + 2**32)).all()


def mma_layouts():
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.nvgpu import warp

    def tables(op, m, n, k):
        mma = cute.make_tiled_mma(op)
        out = []
        for tv, rows in ((mma.tv_layout_A, m), (mma.tv_layout_B, n), (mma.tv_layout_C, m)):
            values = cute.size(tv) // 32
            at = [[cute.crd2idx((t, v), tv) for v in range(values)] for t in range(32)]
            out.append(
                (np.array(at) % rows, np.array(at) // rows)
            )  # (M|N, K) or (M, N); the first is fastest
        return out

    def build():
        return {
            k: tables(warp.MmaF16BF16Op(cutlass.BFloat16, cutlass.Float32, (16, 8, k)), 16, 8, k)
            for k in (8, 16)
        }

    return traced(build)


@pytest.fixture(scope="module")
def layouts():
    return mma_layouts()


def packed(matrix, rows, columns):
    """Registers [i][lane] of 16-bit elements, two a register, from the positions of each lane's values."""
    values = matrix[rows, columns]  # [lane][value]
    pairs = values.reshape(32, -1, 2).astype(np.uint32)
    return np.ascontiguousarray((pairs[:, :, 0] | pairs[:, :, 1] << 16).T)


@pytest.mark.parametrize("k", [8, 16])
def test_mma_fragments_are_the_layouts_of_the_dsl(layouts, k):
    rng = np.random.default_rng(k)
    (ra, ca), (rb, cb), (rc, cc) = layouts[k]
    a, b = (rng.integers(0, 1 << 15, shape).astype(np.uint16) for shape in ((16, k), (8, k)))
    regs = np.zeros((8, 32), np.uint32)
    regs[: k // 4] = packed(a, ra, ca)
    out = np.zeros((16, k), np.float32)
    library().fragment_a(ptr(regs), BF16, 16, k, ptr(out))
    assert (out.view(np.uint32) == a.astype(np.uint32) << 16).all()
    regs[: k // 8] = packed(b, rb, cb)
    out = np.zeros((k, 8), np.float32)
    library().fragment_b(ptr(regs), BF16, k, ptr(out))
    assert (out.view(np.uint32) == (b.astype(np.uint32) << 16).T).all()
    c = rng.integers(0, 1 << 32, (16, 8), np.uint64).astype(np.uint32)
    regs = np.zeros((128, 32), np.uint32)
    library().fragment_c32(ptr(regs), 16, 8, ptr(c), 1)
    assert (c[rc, cc] == regs[:4].T).all()
    back = np.zeros_like(c)
    library().fragment_c32(ptr(regs), 16, 8, ptr(back), 0)
    assert (back == c).all()


FORMS = [
    pytest.param(F16, F32, 16, 16, id="f16-f32"),
    pytest.param(F16, F16, 16, 8, id="f16-f16"),
    pytest.param(BF16, F32, 16, 16, id="bf16"),
    pytest.param(TF32, F32, 16, 8, id="tf32"),
    pytest.param(TF32, F32, 16, 4, id="tf32-k4"),
    pytest.param(S8, S32, 16, 32, id="s8"),
    pytest.param(U8, S32, 16, 16, id="u8-k16"),
    pytest.param(E4M3, F32, 16, 32, id="e4m3"),
]


def operand_bits(rng, fmt, shape):
    """Random elements as raw words of the format, and their values."""
    values = rng.integers(-8, 8, shape).astype(np.float32) / (1 if fmt in (S8, U8) else 4)
    if fmt == U8:
        values = np.abs(values)
    dtype = {F16: torch.float16, BF16: torch.bfloat16, TF32: torch.float32, E4M3: torch.float8_e4m3fn}
    dtype |= {S8: torch.int8, U8: torch.uint8}
    tensor = torch.from_numpy(values).to(dtype[fmt])
    size = tensor.element_size()
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[size]
    return tensor.view(raw).numpy().view(f"u{size}"), tensor.float().numpy()


def isa_registers(raw, side, k):
    """A (16 x K) or B (8 x K) in registers, from the formulas of the ISA: row = lane / 4 + 8 i, 4 bytes at
    byte 4 (lane % 4) + 16 j of K; A's registers run over i first."""
    data = np.ascontiguousarray(raw).view(np.uint8).reshape(raw.shape[0], -1)
    halves = 2 if side == "a" else 1
    regs = np.zeros((8, 32), np.uint32)
    for lane in range(32):
        for j in range(data.shape[1] // 16):
            for i in range(halves):
                at = 16 * j + 4 * (lane % 4)
                regs[i + halves * j, lane] = data[lane // 4 + 8 * i, at : at + 4].view(np.uint32)[0]
    return regs


@pytest.mark.parametrize(("fmt", "dtype", "m", "k"), FORMS)
def test_mma_sync_is_the_matrix_product(fmt, dtype, m, k):
    rng = np.random.default_rng(3)
    machine = Machine()
    (a_raw, a), (b_raw, b) = operand_bits(rng, fmt, (m, k)), operand_bits(rng, fmt, (8, k))
    c = rng.integers(-8, 8, (m, 8)).astype(np.float32)
    expected = a @ b.T + c  # small integers over 16: exact in every accumulator
    addend = c.astype(np.int32).view(np.uint32) if dtype == S32 else c.view(np.uint32)
    c_regs = np.zeros((128, 32), np.uint32)
    if dtype == F16:
        library().fragment_c16(ptr(c_regs), m, 8, ptr(c), 1)
    else:
        library().fragment_c32(ptr(c_regs), m, 8, ptr(addend), 1)
    d_regs = np.zeros((128, 32), np.uint32)
    arrays = [
        machine.vector(r)
        for r in (d_regs, isa_registers(a_raw, "a", k), isa_registers(b_raw, "b", k), c_regs)
    ]
    library().emu_mma_sync(machine.warp(0), 0xFFFFFFFF, m, 8, k, fmt, fmt, dtype, dtype, 0, *arrays)
    assert machine.findings() == ""
    out = np.zeros((m, 8), np.uint32)
    if dtype == F16:
        library().fragment_c16(ptr(d_regs), m, 8, ptr(out), 0)
    else:
        library().fragment_c32(ptr(d_regs), m, 8, ptr(out), 0)
    result = out.view(np.int32).astype(np.float32) if dtype == S32 else out.view(np.float32)
    assert (result == expected).all()


@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_and_stmatrix_move_rows(count, transposed):
    machine = Machine()
    window = machine.window(0)
    rng = np.random.default_rng(count)
    address = (0x400 + 16 * rng.permutation(64)[:32]).astype(np.uint32)
    rows = rng.integers(0, 1 << 16, (32, 8)).astype(np.uint16)
    for lane in range(8 * count):
        window[address[lane] : address[lane] + 16] = rows[lane].view(np.uint8)
    out = np.zeros((4, 32), np.uint32)
    library().emu_ldmatrix(machine.warp(0), 0xFFFFFFFF, count, transposed, machine.vector(out), ptr(address))
    for matrix in range(count):
        block = rows[8 * matrix : 8 * matrix + 8]
        block = block.T if transposed else block
        for lane in range(32):
            low, high = block[lane // 4, 2 * (lane % 4)], block[lane // 4, 2 * (lane % 4) + 1]
            assert out[matrix, lane] == int(low) | int(high) << 16
    before = window.copy()
    window[:] = 0
    library().emu_stmatrix(machine.warp(0), 0xFFFFFFFF, count, transposed, machine.vector(out), ptr(address))
    assert (window == before).all()
    assert machine.findings() == ""


def test_rows_that_are_not_settled_read_as_nan():
    machine = Machine()
    machine.window(0)[0x400:0x480] = 1
    machine.unsettled(0x430, 0x1000)
    out, address = np.zeros((1, 32), np.uint32), np.arange(0x400, 0x600, 16, dtype=np.uint32)
    library().emu_ldmatrix(machine.warp(0), 0xFFFFFFFF, 1, 0, machine.vector(out), ptr(address))
    assert (out[0, :12] == 0x01010101).all()
    assert (out[0, 12:] == 0x7FFF7FFF).all()
    assert machine.findings() == ""


def test_movmatrix_transposes():
    machine = Machine()
    matrix = np.arange(64, dtype=np.uint16).reshape(8, 8)
    source, out = np.zeros(32, np.uint32), np.zeros(32, np.uint32)
    library().matrix8(ptr(matrix), ptr(source), 0, 0)
    library().emu_movmatrix(machine.warp(0), 0xFFFFFFFF, ptr(out), ptr(source))
    back = np.zeros((8, 8), np.uint16)
    library().matrix8(ptr(back), ptr(out), 0, 1)
    assert (back == matrix.T).all()


def test_a_partial_warp_and_a_misaligned_row_are_findings():
    machine = Machine()
    out, address = np.zeros((4, 32), np.uint32), np.full(32, 0x408, np.uint32)
    library().emu_ldmatrix(machine.warp(0), 0x0000FFFF, 1, 0, machine.vector(out), ptr(address))
    assert "needs all 32 threads" in machine.findings()
    machine = Machine()
    library().emu_ldmatrix(machine.warp(0), 0xFFFFFFFF, 1, 0, machine.vector(out), ptr(address))
    assert "an ldmatrix row" in machine.findings()
