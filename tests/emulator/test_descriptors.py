"""Shared-memory matrix descriptors of wgmma and tcgen05 against canonical layouts that the DSL builds."""

import ctypes
import re
import tempfile

import numpy as np
import pytest

from tests.emulator.probe import (
    BF16,
    E4M3,
    F16,
    NONE,
    S32,
    SW32,
    SW64,
    SW128,
    SW128_ATOM32,
    TF32,
    descriptor,
    library,
    ptr,
    text,
    traced,
)

KINDS = {"INTER": NONE, "SW32": SW32, "SW64": SW64, "SW128": SW128, "SW128_32B": SW128_ATOM32}
ROW = {NONE: 16, SW32: 32, SW64: 64, SW128: 128, SW128_ATOM32: 128}  # bytes of a swizzle atom's row
START = 0x4C00  # a multiple of 1024
MN, K_BYTES = 128, 128  # a swizzle atom or more each way


def cases():
    for bits in (8, 16, 32):
        for kind in KINDS:
            for major in ("K", "MN"):
                if kind == "SW128_32B" and (major == "K" or bits != 32):
                    continue
                yield pytest.param(bits, kind, major, id=f"{bits}-{major}_{kind}")


CASES = list(cases())


@pytest.fixture(scope="module")
def layouts():
    """Per case: byte addresses [MN][K] of a tile's 16-byte pieces, and its leading and stride offsets."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.nvgpu import tcgen05

    types = {8: cutlass.Float8E4M3FN, 16: cutlass.BFloat16, 32: cutlass.TFloat32}

    def build():
        return {case.id: one(*case.values) for case in CASES}

    def one(bits, kind, major):
        mode, element, per = KINDS[kind], bits // 8, 128 // bits
        atom = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind[f"{major}_{kind}"], types[bits])
        tile = cute.tile_to_shape(atom, (MN, K_BYTES // element), (0, 1))
        # The layout counts elements; the swizzle applies to bytes, and repeats every 1024.
        swizzle = cute.make_composed_layout(tile.inner, 0, cute.make_layout(1024, stride=1))
        pattern = np.array([cute.crd2idx(16 * i, swizzle) for i in range(64)])

        def at(i, j):
            return cute.crd2idx((i, j), tile.outer) * element

        rows = range(0, MN, 1 if major == "K" else per)
        columns = range(0, K_BYTES // element, per if major == "K" else 1)
        address = np.array([[at(i, j) for j in columns] for i in rows])
        address = address - address % 1024 + pattern[address % 1024 // 16]
        if major == "K":
            return address, at(0, per), at(8, 0)  # between 16-byte columns; between groups of 8 rows
        across = at(ROW[mode] // element, 0)  # to the next atom along MN
        down = at(0, 4 if mode == SW128_ATOM32 else 8)  # to the next group of K
        return (address, down, across) if mode == NONE else (address, across, down)

    return traced(build)


@pytest.mark.parametrize("generation", [9, 10])
@pytest.mark.parametrize(("bits", "kind", "major"), CASES)
def test_pieces_of_every_k_step_lie_where_the_layout_says(layouts, generation, bits, kind, major):
    mode, element = KINDS[kind], bits // 8
    if generation == 9 and mode == SW128_ATOM32:
        pytest.skip("wgmma has no such mode")
    address, leading, stride = layouts[f"{bits}-{major}_{kind}"]
    out = np.zeros(4096, np.uint32)
    columns = 2 if major == "K" else 32 // element  # of `address` in one K step of 32 bytes
    for step in range(0, address.shape[1], columns):
        block = START + address[:, step : step + columns]
        bits64 = descriptor(generation, int(block[0, 0]), leading, stride, mode)
        for first, rows in ((0, MN), (48, 16)):  # all of it; one warp's share of 64 rows
            at = (
                slice(first, first + rows)
                if major == "K"
                else slice(first * element // 16, (first + rows) * element // 16)
            )
            expected = block[at] if major == "K" else block[at].T
            count = library().pieces(
                generation, bits64, int(major == "MN"), first, rows, 32 // element, element, ptr(out)
            )
            assert count == expected.size
            assert (out[:count].reshape(expected.shape) == expected).all(), (step, first)


def test_32_byte_atoms_have_groups_of_four_rows():
    """((8,m),(4,k)) : ((1,LBO),(8,SBO)), with groups far apart: 32 fp32 elements of MN, a step of K = 8."""
    out = np.zeros(64, np.uint32)
    bits = descriptor(10, START, 0x8000, 0x2000, SW128_ATOM32)
    assert library().pieces(10, bits, 1, 0, 32, 8, 4, ptr(out)) == 64
    rows = out.reshape(8, 8)
    for k in range(8):
        group = START + k // 4 * 0x2000 + k % 4 * 128
        assert rows[k].tolist() == [group + (16 * piece ^ (k % 4) << 5) for piece in range(8)]


@pytest.mark.parametrize("major", ["K", "MN"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("negate", [False, True])
def test_gather_is_the_matrix(layouts, major, transposed, negate):
    address, leading, stride = layouts[f"16-{major}_SW128"]
    rng = np.random.default_rng(1)
    window = rng.integers(0, 1 << 16, 1 << 17, np.uint16)
    pieces = START + (address[:, 2:4] if major == "K" else address[:, 16:32].T)
    matrix = (
        window[pieces[:, :, None] // 2 + np.arange(8)].reshape(pieces.shape[0], -1).astype(np.uint32) << 16
    )
    matrix = (matrix if major == "K" else matrix.T) ^ (0x80000000 if negate else 0)
    out = np.zeros((16, MN) if transposed else (MN, 16), np.float32)
    bits64 = descriptor(10, int(pieces[0, 0]), leading, stride, SW128)
    s_mn, s_k = (1, MN) if transposed else (16, 1)
    library().gather(
        10, bits64, ptr(window), int(major == "MN"), MN, 16, BF16, int(negate), ptr(out), s_mn, s_k
    )
    assert ((out.T if transposed else out).view(np.uint32) == matrix).all()


def test_fields_of_a_wgmma_descriptor():
    out = (ctypes.c_uint32 * 5)()
    for mode in (NONE, SW32, SW64, SW128):
        assert library().descriptor(9, descriptor(9, 0x12340, 0x2000, 0x400, mode, base=5), out) is None
        assert list(out) == [0x12340, 0x2000, 0x400, 5, mode]


@pytest.mark.parametrize(
    ("bits", "message"),
    [
        (1 << 46 | 3 << 61, "swizzle mode"),
        (1 << 46 | 5 << 61, "swizzle mode"),
        (2 << 61, "46-48"),
        (1 << 46 | 1 << 52, "bit 52"),
        (1 << 46 | 1 << 55, "53-60"),
    ],
)
def test_malformed_tcgen05_descriptors_are_refused(bits, message):
    error = text(library().descriptor(10, ctypes.c_uint64(bits), (ctypes.c_uint32 * 5)()))
    assert error is not None
    assert message in error


def instruction(d, a, b, m, n, **flags):
    """An instruction descriptor from the ISA's table."""
    bits = d << 4 | a << 7 | b << 10 | n // 8 << 17 | m // 16 << 24
    shifts = {
        "sparse": 2,
        "saturate": 3,
        "negate_a": 13,
        "negate_b": 14,
        "mn_a": 15,
        "mn_b": 16,
        "reserved": 23,
    }
    for name, value in flags.items():
        bits |= value << shifts[name]
    return bits


F16_KIND, TF32_KIND, F8_KIND, I8_KIND = range(4)


@pytest.mark.parametrize(
    ("bits", "kind", "groups", "expected"),
    [
        (instruction(1, 1, 1, 128, 32), F16_KIND, 1, [BF16, BF16, 7, 128, 32, 16, 0, 0, 0, 0]),
        (
            instruction(0, 0, 0, 64, 8, negate_b=1, mn_a=1),
            F16_KIND,
            1,
            [F16, F16, F16, 64, 8, 16, 0, 1, 1, 0],
        ),
        (instruction(1, 2, 2, 256, 256, mn_b=1), TF32_KIND, 2, [TF32, TF32, 7, 256, 256, 8, 0, 0, 0, 1]),
        (instruction(1, 0, 1, 128, 64, negate_a=1), F8_KIND, 2, [E4M3, E4M3 + 1, 7, 128, 64, 32, 1, 0, 0, 0]),
        (instruction(2, 1, 1, 64, 48), I8_KIND, 1, [5, 5, S32, 64, 48, 32, 0, 0, 0, 0]),
    ],
)
def test_fields_of_an_instruction_descriptor(bits, kind, groups, expected):
    out = (ctypes.c_int * 10)()
    assert text(library().instruction(bits, kind, groups, out)) is None
    assert list(out) == expected


@pytest.mark.parametrize(
    ("bits", "kind", "groups", "message"),
    [
        (instruction(1, 1, 1, 256, 32), F16_KIND, 1, "M must be"),
        (instruction(1, 1, 1, 64, 32), F16_KIND, 2, "M must be"),
        (instruction(1, 1, 1, 128, 264), F16_KIND, 1, "N is none"),
        (instruction(1, 1, 1, 128, 24), F16_KIND, 2, "N is none"),
        (instruction(1, 1, 1, 128, 32, sparse=1), F16_KIND, 1, "sparse"),
        (instruction(1, 1, 1, 128, 32, reserved=1), F16_KIND, 1, "reserved"),
        (instruction(1, 1, 1, 128, 32, saturate=1), F16_KIND, 1, "saturates"),
        (instruction(0, 1, 1, 128, 32), F16_KIND, 1, "needs f16"),
        (instruction(1, 2, 2, 128, 32), F16_KIND, 1, "kind::f16"),
        (instruction(1, 3, 0, 128, 32), F8_KIND, 1, "e4m3"),
        (instruction(1, 1, 1, 128, 32), I8_KIND, 1, "s32"),
        (instruction(2, 1, 1, 128, 40), I8_KIND, 1, "N is none"),
    ],
)
def test_impossible_instructions_are_refused(bits, kind, groups, message):
    error = text(library().instruction(bits, kind, groups, (ctypes.c_int * 10)()))
    assert error is not None
    assert message in error


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kind", ["f16", "tf32"])
def test_descriptors_that_the_dsl_encodes(groups, kind, tmp_path, monkeypatch):
    """The instruction descriptor and both operands' in the PTX of an MMA decode to what was asked for."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
    from cutlass.utils import blackwell_helpers

    group = tcgen05.CtaGroup.ONE if groups == 1 else tcgen05.CtaGroup.TWO
    m, n = 128 * groups, 128 * groups
    dtype, size, k = (cutlass.BFloat16, 2, 16) if kind == "f16" else (cutlass.TFloat32, 4, 8)
    offsets = {}

    @cute.kernel
    def kernel(mma: cute.TiledMma, a: cute.ComposedLayout, b: cute.ComposedLayout):
        storage = cutlass.memory.SmemAllocator()
        sa = storage.allocate_tensor(dtype, a.outer, 1024, swizzle=a.inner)
        sb = storage.allocate_tensor(dtype, b.outer, 1024, swizzle=b.inner)
        acc = mma.make_fragment_C(mma.partition_shape_C((m, n)))
        fa, fb = mma.make_fragment_A(sa), mma.make_fragment_B(sb)
        cute.gemm(mma, acc, fa[None, None, 0, 0], fb[None, None, 0, 0], acc)

    @cute.jit
    def host():
        majors = OperandMajorMode.K, OperandMajorMode.MN
        source = tcgen05.OperandSource.SMEM
        if cutlass.const_expr(kind == "f16"):
            op = tcgen05.MmaF16BF16Op(dtype, cutlass.Float32, (m, n, k), group, source, *majors)
        else:
            op = tcgen05.MmaTF32Op((m, n, k), group, source, *majors)
        mma = cute.make_tiled_mma(op)
        a = blackwell_helpers.make_smem_layout_a(mma, (m, n, 4 * k), dtype, 1)
        b = blackwell_helpers.make_smem_layout_b(mma, (m, n, 4 * k), dtype, 1)
        offsets["a stride"] = cute.crd2idx(((8, 0), 0, 0, 0), a.outer) * size
        offsets["b leading"] = cute.crd2idx(((128 // size, 0), 0, 0, 0), b.outer) * size
        offsets["b stride"] = cute.crd2idx(((0, 4 if kind == "tf32" else 8), 0, 0, 0), b.outer) * size
        offsets["b swizzle"] = str(b.inner)
        kernel(mma, a, b).launch(grid=(groups, 1, 1), block=(128, 1, 1), cluster=(groups, 1, 1))

    with tempfile.TemporaryDirectory() as dump:  # else it is dumped where one works
        ptx = cute.compile(host, options=f"--gpu-arch sm_100a --keep-ptx --dump-dir {dump}").__ptx__
    # The two negations are run-time fields of the DSL's atom: bits 13 and 14 by selp, the rest a constant.
    constants = [int(v) for line in re.findall(r"selp\.b32\s+\S+, (\d+), (\d+),", ptx) for v in line]
    base = min(v for v in constants if v > 1 << 24)
    assert sorted(constants) == sorted([base, base | 1 << 13, 1 << 14, 0])
    out = (ctypes.c_int * 10)()
    code = F16_KIND if kind == "f16" else TF32_KIND
    assert text(library().instruction(ctypes.c_uint32(base), code, groups, out)) is None
    fmt = BF16 if kind == "f16" else TF32
    assert list(out) == [fmt, fmt, 7, m, n, k, 0, 0, 0, 1]
    operands = re.search(r"tcgen05\.mma\.\S+ \[\S+\], (%rd\d+), (%rd\d+)", ptx)
    assert operands is not None
    fields = (ctypes.c_uint32 * 5)()
    found = []
    for register in operands.groups():
        constant = re.search(rf"or\.b64\s+{register}, \S+, (-?\d+);", ptx)
        assert constant is not None
        assert (
            text(library().descriptor(10, ctypes.c_uint64(int(constant.group(1)) & (1 << 64) - 1), fields))
            is None
        )
        found.append(list(fields))
    assert found[0][2:] == [offsets["a stride"], 0, SW128]
    mode = (
        SW128_ATOM32
        if offsets["b swizzle"].startswith("S<2,5,2>") or "2,3,2" in offsets["b swizzle"]
        else SW128
    )
    assert found[1][1:] == [offsets["b leading"], offsets["b stride"], 0, mode]
