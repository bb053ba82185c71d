"""tcgen05: tensor-memory layouts against the DSL's, and the units against matrix products."""

import ctypes

import numpy as np
import pytest

from tests.emulator.probe import (
    BF16,
    E4M3,
    F16,
    S8,
    SW128,
    TF32,
    Machine,
    descriptor,
    library,
    text,
    traced,
)
from tests.emulator.test_descriptors import F8_KIND, F16_KIND, I8_KIND, TF32_KIND, instruction
from tests.emulator.test_mma import operand_bits
from tests.emulator.test_wgmma import place

ALL = 0xFFFFFFFF
SHAPES = ["Ld32x32bOp", "Ld16x64bOp", "Ld16x128bOp", "Ld16x256bOp", "Ld16x32bx2Op"]
PER_COLUMN_PAIR = [1, 1, 2, 4, 1]  # registers per repetition


class Cells(ctypes.Structure):
    """The first fields of emu_tmem."""

    _fields_ = [("cell", ctypes.c_uint32 * (128 * 528)), ("written", ctypes.c_uint32 * (128 * 16))]


class Tmem:
    """A CTA's tensor memory: all of it allocated, as [lane][column] words."""

    def __init__(self, machine, rank):
        lib = library()
        lib.machine_tmem.restype = ctypes.c_void_p
        address = lib.machine_tmem(rank)
        self.cells = Cells.from_address(address)
        self.words = np.ctypeslib.as_array(self.cells.cell).reshape(128, 528)[:, :512]
        to = machine.lanes(rank << 24 | 0x400)
        assert lib.emu_tcgen05_alloc(machine.warp(8 * rank), ALL, 1, to, machine.lanes(512)) == 0

    def fill(self, words):
        """Sets everything, as written."""
        self.words[:] = words
        np.ctypeslib.as_array(self.cells.written)[:] = ALL


@pytest.fixture(scope="module")
def layouts():
    """Shape -> repetitions -> [thread][register] -> (row, column) of D; and D's addresses by its form."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

    def accumulator(m, n, groups):
        group = tcgen05.CtaGroup.ONE if groups == 1 else tcgen05.CtaGroup.TWO
        op = tcgen05.MmaF16BF16Op(
            cutlass.BFloat16,
            cutlass.Float32,
            (m, n, 16),
            group,
            tcgen05.OperandSource.SMEM,
            OperandMajorMode.K,
            OperandMajorMode.K,
        )
        mma = cute.make_tiled_mma(op)
        return mma.make_fragment_C(mma.partition_shape_C((m, n)))

    def load(shape, repeat):
        rows = 128 if shape == "Ld32x32bOp" else 64
        acc = accumulator(rows, 64, 1)
        atom = cute.make_copy_atom(
            getattr(tcgen05, shape)(tcgen05.Repetition(repeat), tcgen05.Pack.NONE), cutlass.Float32
        )
        copy = tcgen05.make_tmem_copy(atom, acc[(None, None), 0, 0])
        tv = copy.layout_dst_tv_tiled
        tiler_m, tiler_n = copy.tiler_mn
        height, values = cute.size(tiler_m), cute.size(tv) // 128

        def at(t, v):
            index = cute.crd2idx((t, v), tv)
            return cute.crd2idx(index % height, tiler_m), cute.crd2idx(index // height, tiler_n)

        return [[at(t, v) for v in range(values)] for t in range(128)]

    def addresses(m, n, groups):
        layout = accumulator(m, n, groups).layout
        rows = m // groups
        return np.array([[cute.crd2idx(((i, j), 0, 0), layout) for j in range(0, n, 8)] for i in range(rows)])

    def build():
        loads = {s: {r: load(s, r) for r in (1, 2, 4)} for s in SHAPES}
        accumulators = {c: addresses(*c) for c in ((128, 32, 1), (64, 32, 1), (128, 32, 2), (256, 32, 2))}
        return loads, accumulators

    return traced(build)


@pytest.mark.parametrize("repeat", [1, 2, 4])
@pytest.mark.parametrize("shape", range(5))
def test_ld_puts_cells_where_the_layouts_of_the_dsl_put_them(layouts, shape, repeat):
    expected = layouts[0][SHAPES[shape]][repeat]
    registers = PER_COLUMN_PAIR[shape] * repeat
    row, column = ctypes.c_int(), ctypes.c_int()
    for thread in range(128):
        assert len(expected[thread]) == registers
        for r in range(registers):
            # The DSL splits 16x32bx2 so that its second half continues the first.
            library().ld_cell(shape, r, thread % 32, repeat, ctypes.byref(row), ctypes.byref(column))
            height = 32 if shape == 0 else 16  # of a warp's share of the accumulator
            assert (thread // 32 * height + row.value, column.value) == expected[thread][r], (thread, r)


@pytest.mark.parametrize(("m", "groups"), [(128, 1), (64, 1), (128, 2), (256, 2)])
def test_accumulators_lie_where_the_layouts_of_the_dsl_put_them(layouts, m, groups):
    address = layouts[1][m, 32, groups]
    rows = m // groups
    split = rows == 64 and groups == 2
    for i in range(rows):
        for j, found in enumerate(address[i]):
            column = 8 * j
            lane = library().row_lane(rows, groups, 0, i) + (64 if split and column >= 16 else 0)
            assert found == lane << 16 | (column % 16 if split else column), (i, column)


@pytest.mark.parametrize("shape", range(5))
@pytest.mark.parametrize("num", [1, 4])
@pytest.mark.parametrize("pack", [0, 1])
def test_ld_and_st_are_inverse_and_touch_what_the_shape_says(shape, num, pack):
    machine = Machine()
    tmem, rng = Tmem(machine, 0), np.random.default_rng(shape)
    words = rng.integers(0, 1 << 16 if pack else 1 << 32, (128, 512), np.uint64).astype(np.uint32)
    tmem.fill(words)
    warp, split, per = 2, 24, 1 + pack
    registers, rows = PER_COLUMN_PAIR[shape] * num, 32 if shape == 0 else 16
    lane0 = 32 * warp + (32 - rows)
    address = machine.lanes(lane0 << 16 | 40)
    out = np.zeros((registers, 32), np.uint32)
    row, column = ctypes.c_int(), ctypes.c_int()
    w = machine.warp(warp)
    library().emu_tcgen05_ld(w, ALL, shape, num, pack, machine.vector(out), address, split)
    touched = np.zeros((128, 512), bool)
    for r in range(registers):
        for lane in range(32):
            library().ld_cell(shape, r, lane, 0, ctypes.byref(row), ctypes.byref(column))
            at = 40 + column.value * per + (split if shape == 4 and lane >= 16 else 0)
            cells = words[lane0 + row.value, at : at + per]
            touched[lane0 + row.value, at : at + per] = True
            assert out[r, lane] == (int(cells[0]) | int(cells[1]) << 16 if pack else cells[0])
    tmem.fill(0)
    library().emu_tcgen05_st(w, ALL, shape, num, pack, machine.vector(out), address, split)
    library().emu_tcgen05_wait_st(w, ALL)
    assert (tmem.words == np.where(touched, words, 0)).all()
    assert machine.findings() == ""


def product(groups, kind, fmt, m, n, *, d_format=1, enable=1, scale=0, disabled=None, a_tmem=False, **flags):
    """Runs one tcgen05.mma on random operands; returns (machine, expected D, D as found, its start)."""
    rng = np.random.default_rng(m + n)
    machine = Machine()
    k = {TF32: 8, F16: 16, BF16: 16}.get(fmt, 32)
    (a_raw, a), (b_raw, b) = operand_bits(rng, fmt, (m, k)), operand_bits(rng, fmt, (n, k))
    start = rng.integers(-8, 8, (m, n)).astype(np.float32)
    tmems = [Tmem(machine, rank) for rank in range(groups)]
    rows, columns, column = m // groups, n // groups, 32
    split = rows == 64 and groups == 2
    base = 16 if rows == 64 and groups == 1 else 0
    descriptors = []
    for rank, tmem in enumerate(tmems):
        window = machine.window(rank)
        da = place(window, 0x2000, a_raw[rank * rows : (rank + 1) * rows], SW128, flags.get("mn_a", 0)).value
        db = place(
            window, 0x10000, b_raw[rank * columns : (rank + 1) * columns], SW128, flags.get("mn_b", 0)
        ).value
        descriptors = [tcgen05_form(da), tcgen05_form(db)]
        tmem.fill(0xDEADBEEF)
        for i in range(rows):
            for half in range(2 if split else 1):
                lane = library().row_lane(rows, groups, base, i) + 64 * half
                part = start[rank * rows + i].reshape(2 if split else 1, -1)[half]
                tmem.words[lane, column : column + part.size] = words_of(part, d_format)
                if a_tmem:
                    raw = np.ascontiguousarray(a_raw[rank * rows + i]).view(np.uint32)
                    tmem.words[lane, 8 : 8 + raw.size] = raw
    bits = instruction(
        d_format, *({F16: (0, 0), BF16: (1, 1), TF32: (2, 2), E4M3: (0, 0), S8: (1, 1)}[fmt]), m, n, **flags
    )
    lanes = None
    if disabled is not None:
        lanes = machine.vector(np.repeat(np.array(disabled, np.uint32)[:, None], 32, axis=1))
    left = (
        (None, machine.lanes(base << 16 | 8)) if a_tmem else (machine.lanes(descriptors[0], wide=True), None)
    )
    library().emu_tcgen05_mma(
        *(machine.warp(1), 1 << 5, groups, kind, machine.lanes(base << 16 | column), *left),
        *(machine.lanes(descriptors[1], wide=True), machine.lanes(bits), lanes, machine.lanes(enable), scale),
    )
    found = np.zeros((m, n), np.float32)
    for rank, tmem in enumerate(tmems):
        for i in range(rows):
            parts = []
            for half in range(2 if split else 1):
                lane = library().row_lane(rows, groups, base, i) + 64 * half
                parts.append(tmem.words[lane, column : column + (n // 2 if split else n)])
            found[rank * rows + i] = values_of(np.concatenate(parts), d_format)
    sign = (-1) ** (flags.get("negate_a", 0) + flags.get("negate_b", 0))
    expected = sign * (a @ b.T) + (start * 2.0**-scale if enable else 0)
    return machine, expected.astype(np.float32), found, start


def tcgen05_form(wgmma_bits):
    """A 128-byte-swizzled wgmma descriptor, rewritten as one of tcgen05."""
    return wgmma_bits & ~(3 << 62) | 1 << 46 | 2 << 61


def words_of(values, d_format):
    if d_format == 2:
        return values.astype(np.int32).view(np.uint32)
    return values.astype(np.float16).view(np.uint16) if d_format == 0 else values.view(np.uint32)


def values_of(words, d_format):
    if d_format == 2:
        return words.view(np.int32).astype(np.float32)
    return (
        words.astype(np.uint16).view(np.float16).astype(np.float32)
        if d_format == 0
        else words.view(np.float32)
    )


@pytest.mark.parametrize(("groups", "m"), [(1, 64), (1, 128), (2, 128), (2, 256)])
@pytest.mark.parametrize("n", [32, 256])
@pytest.mark.parametrize("a_tmem", [False, True])
def test_product_in_every_data_path_layout(groups, m, n, a_tmem):
    machine, expected, found, _ = product(groups, F16_KIND, BF16, m, n, a_tmem=a_tmem)
    assert machine.findings() == ""
    assert (found == expected).all()


@pytest.mark.parametrize(
    ("kind", "fmt", "d_format"),
    [(F16_KIND, F16, 1), (F16_KIND, F16, 0), (TF32_KIND, TF32, 1), (F8_KIND, E4M3, 1), (I8_KIND, S8, 2)],
)
@pytest.mark.parametrize("enable", [0, 1])
def test_kinds_and_accumulators(kind, fmt, d_format, enable):
    machine, expected, found, _ = product(1, kind, fmt, 128, 32, d_format=d_format, enable=enable)
    assert machine.findings() == ""
    assert (found == expected).all()


@pytest.mark.parametrize(
    "flags", [{"negate_a": 1}, {"negate_b": 1}, {"mn_a": 1}, {"mn_b": 1}, {"mn_a": 1, "mn_b": 1}]
)
@pytest.mark.parametrize("groups", [1, 2])
def test_flags_of_the_instruction_descriptor(flags, groups):
    machine, expected, found, _ = product(groups, F16_KIND, BF16, 128 * groups, 128, **flags)
    assert machine.findings() == ""
    assert (found == expected).all()


def test_the_accumulator_is_scaled():
    _, expected, found, _ = product(1, F16_KIND, BF16, 128, 32, scale=3)
    assert (found == expected).all()


@pytest.mark.parametrize("groups", [1, 2])
def test_disabled_lanes_keep_what_they_held(groups):
    disabled = [0, 0x80000001, 0, 0, 0xFFFFFFFF, 0, 0, 2][: 4 * groups]
    _, expected, found, start = product(groups, F16_KIND, BF16, 128 * groups, 32, disabled=disabled)
    lanes = np.array([bool(disabled[i // 32] >> i % 32 & 1) for i in range(128 * groups)])
    assert (found[lanes] == start[lanes]).all()
    assert (found[~lanes] == expected[~lanes]).all()


def test_allocation():
    lib = library()
    lib.tmem_reset()
    assert [lib.tmem_allocate(n) for n in (64, 256, 32, 128)] == [0, 256, 64, 128]
    assert lib.tmem_allocate(64) == -1
    assert lib.tmem_allocate(32) == 96
    assert lib.tmem_owned(127, 0, 512)
    assert not lib.tmem_owned(128, 0, 1)
    assert not lib.tmem_owned(0, 500, 13)
    assert "was not allocated" in text(lib.tmem_free(32, 32))
    assert "is not that of the allocation" in text(lib.tmem_free(256, 128))
    assert lib.tmem_free(256, 256) is None
    assert not lib.tmem_owned(0, 200, 100)
    assert lib.tmem_allocate(512) == -1
    assert lib.tmem_allocations() == 4


def test_alloc_writes_the_address_waits_for_room_and_respects_the_permit():
    machine, lib = Machine(), library()
    warp, to = machine.warp(0), machine.lanes(0x410)
    for size, at in ((128, 0), (256, 256)):
        assert lib.emu_tcgen05_alloc(warp, ALL, 1, to, machine.lanes(size)) == 0
        assert machine.window(0)[0x410:0x414].view(np.uint32)[0] == at
    assert lib.emu_tcgen05_alloc(warp, ALL, 1, to, machine.lanes(256)) == 1
    assert lib.emu_tcgen05_alloc(warp, ALL, 1, to, machine.lanes(48)) == 0
    assert "must be 32, 64" in machine.findings()
    lib.emu_tcgen05_relinquish(warp, ALL, 1)
    assert lib.emu_tcgen05_alloc(warp, ALL, 1, to, machine.lanes(32)) == 0
    assert "relinquished" in machine.findings()
    lib.emu_tcgen05_dealloc(warp, ALL, 1, machine.lanes(128), machine.lanes(128))
    assert "was not allocated" in machine.findings()


def test_a_pair_allocates_together():
    """Neither CTA goes on before the other has executed its allocation; each has its own address then."""
    machine, lib = Machine(), library()
    first, second = machine.warp(0), machine.warp(8)

    def alloc(warp, rank):
        return lib.emu_tcgen05_alloc(warp, ALL, 2, machine.lanes(rank << 24 | 0x410), machine.lanes(64))

    assert alloc(first, 0) == 1
    assert alloc(first, 0) == 1
    assert alloc(second, 1) == 0
    assert alloc(first, 0) == 0
    assert alloc(second, 1) == 1
    assert alloc(first, 0) == 0
    assert [machine.window(rank)[0x410:0x414].view(np.uint32)[0] for rank in (0, 1)] == [64, 64]
    assert machine.findings() == ""


def test_memory_not_freed_is_reported_at_the_end():
    machine, lib = Machine(), library()
    lib.emu_tmem_new.restype = ctypes.c_void_p
    Tmem(machine, 0)
    other = ctypes.c_void_p(lib.emu_tmem_new(None))
    lib.emu_tmem_free(machine.warp(0), other)
    assert machine.findings() == ""
    kept = ctypes.c_void_p(lib.emu_tmem_new(None))
    lib.tmem_take(kept, 64)
    lib.emu_tmem_free(machine.warp(0), kept)
    assert "64 columns of tensor memory at column 0 not freed" in machine.findings()


def load(machine, warp, lane, column, num=1):
    out = np.zeros((num, 32), np.uint32)
    library().emu_tcgen05_ld(
        machine.warp(warp), ALL, 0, num, 0, machine.vector(out), machine.lanes(lane << 16 | column), 0
    )
    return machine.findings()


def test_what_ld_may_not_touch():
    machine = Machine()
    assert "not allocated" in load(machine, 0, 0, 0)
    machine = Machine()
    tmem = Tmem(machine, 0)
    assert "never written" in load(machine, 0, 0, 3)
    tmem.fill(1)
    machine.window(0)  # keep the machine alive
    before = machine.findings()
    assert "it may use lanes 32 to 63" in load(machine, 1, 0, 0)[len(before) :]
    before = machine.findings()
    assert "not allocated" in load(machine, 0, 0, 511, 2)[len(before) :]


def test_order_between_agents():
    """An mma's result that a warp reads without waiting, and a store that another warp reads too early."""
    machine, *_ = product(1, F16_KIND, BF16, 128, 32)
    assert machine.findings() == ""
    machine.strict()
    assert "an mma or cp that writes there is not ordered before it" in load(machine, 0, 0, 32)
    machine = Machine()
    Tmem(machine, 0).fill(0)
    registers = np.zeros((1, 32), np.uint32)
    at = machine.lanes(0)
    library().emu_tcgen05_st(machine.warp(0), ALL, 0, 1, 0, machine.vector(registers), at, 0)
    assert load(machine, 0, 0, 0) == ""
    machine.strict()
    assert "a tcgen05.st without its wait is not ordered" in load(machine, 4, 0, 0)
    machine.relaxed()
    before = machine.findings()
    library().emu_tcgen05_wait_st(machine.warp(0), ALL)
    assert load(machine, 4, 0, 0) == before


def test_accumulators_must_start_where_the_layout_does():
    machine = Machine()
    Tmem(machine, 0).fill(0)
    desc = machine.lanes(tcgen05_form(descriptor(9, 0x2000, 0, 1024, SW128).value), wide=True)
    for m, lane, message in ((128, 32, "starts at lane 0"), (64, 32, "starts at lane 0 or 16")):
        bits = machine.lanes(instruction(1, 1, 1, m, 32))
        library().emu_tcgen05_mma(
            *(machine.warp(0), 1, 1, F16_KIND, machine.lanes(lane << 16), desc, None, desc, bits, None),
            *(machine.lanes(1), 0),
        )
        assert message in machine.findings()


def test_commit_arrives_at_every_cta_of_the_mask():
    machine = Machine()
    library().emu_tcgen05_commit(machine.warp(0), 1, 1, machine.lanes(1 << 24 | 0x500), None)
    assert [library().machine_arrivals(i) for i in range(2)] == [0, 1]
    library().emu_tcgen05_commit(machine.warp(0), 1, 2, machine.lanes(0x500), machine.lanes(3))
    assert [library().machine_arrivals(i) for i in range(2)] == [1, 2]


@pytest.mark.parametrize(
    ("shape", "rows", "pieces"), [(0, 128, 2), (1, 128, 1), (2, 64, 1), (3, 64, 1), (4, 32, 1)]
)
@pytest.mark.parametrize("groups", [1, 2])
def test_cp_spreads_rows_over_lanes(shape, rows, pieces, groups):
    machine = Machine()
    rng = np.random.default_rng(shape)
    tmems = [Tmem(machine, rank) for rank in range(groups)]
    data = [rng.integers(0, 1 << 32, (rows, 4 * pieces), np.uint64).astype(np.uint32) for _ in tmems]
    leading, stride = rows * 16, 128
    for rank in range(groups):
        for row in range(rows):
            for p in range(pieces):
                at = 0x4000 + row * 16 + p * leading
                machine.window(rank)[at : at + 16] = data[rank][row, 4 * p : 4 * p + 4].view(np.uint8)
    desc = machine.lanes(descriptor(10, 0x4000, leading, stride, 0).value, wide=True)
    library().emu_tcgen05_cp(machine.warp(0), 1, groups, shape, machine.lanes(64), desc)
    assert machine.findings() == ""
    warps = {0: "0123", 1: "0123", 2: "0101", 3: "0011", 4: "0000"}[
        shape
    ]  # 32 rows of the source per 32 lanes
    source = [32 * int(warps[lane // 32]) + lane % 32 for lane in range(128)]
    for tmem, block in zip(tmems, data, strict=True):
        assert (tmem.words[:, 64 : 64 + 4 * pieces] == block[source]).all()
        assert (tmem.words[:, 64 + 4 * pieces] == 0).all()


def test_an_mma_of_128_by_32_by_16_takes_microseconds():
    import time

    machine = Machine()
    Tmem(machine, 0).fill(0)
    desc = machine.lanes(tcgen05_form(descriptor(9, 0x2000, 0, 1024, SW128).value), wide=True)
    d, one = machine.lanes(0), machine.lanes(1)
    bits = machine.lanes(instruction(1, 1, 1, 128, 32))
    call = (machine.warp(0), 1, 1, F16_KIND, d, desc, None, desc, bits, None, one, 0)
    best = 1.0
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(20):
            library().emu_tcgen05_mma(*call)
        best = min(best, (time.perf_counter() - start) / 20)
    assert best < 200e-6
