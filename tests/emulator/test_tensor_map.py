"""Tensor maps, and tensor and bulk copies through them, against NumPy slices."""

import ctypes
import itertools

import numpy as np
import pytest

from tests.emulator.probe import NONE, SW32, SW64, SW128, Machine, library, ptr, text

DTYPES = {np.uint8: 0, np.uint16: 1, np.uint32: 2, np.int32: 3, np.uint64: 4, np.float16: 6, np.float32: 7}
SHARED = 0x4000


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy whose first byte is a multiple of 64."""
    raw = np.zeros(array.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    out = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    out[...] = array
    return out


def tensor_map(array, box, swizzle=0, fill_nan=0, atomicity=0, element_strides=None, **bits):
    """The 128 bytes for a NumPy array whose last axis is dimension 0, written from the table of fields."""
    rank = array.ndim
    assert array.strides[-1] == array.itemsize
    word = 1 << 1 | (rank - 1) << 4 | bits.get("format", DTYPES[array.dtype.type]) << 7 | swizzle << 13
    word |= (
        fill_nan << 15
        | 1 << 18
        | atomicity << 19
        | bits.get("interleave", 0) << 11
        | bits.get("tf32", 0) << 16
    )
    words = np.zeros(32, np.uint32)
    words[:2] = np.array([bits.get("address", array.ctypes.data)], np.uint64).view(np.uint32)
    words[2] = word if bits.get("marker", 1) else word & ~2
    for i, stride in enumerate(array.strides[-2::-1]):
        words[3 + i] = stride >> 4 & 0xFFFFFFFF
        words[7] |= stride >> 36 << 4 * i
    for i, size in enumerate(array.shape[::-1]):
        words[8 + i] = size - 1
    for i, stride in enumerate(element_strides or ()):
        words[13] |= stride - 1 << 3 * i
    out = aligned(words)
    for i, size in enumerate(box):
        out.view(np.uint8)[0x37 + i] = size - 1
    return out


def coordinates(machine, at):
    return machine.vector(np.repeat(np.array(at, np.int32)[:, None], 32, axis=1).view(np.uint32))


def load(machine, array, box, at, to=SHARED, groups=1, multicast=None, mbarrier=0x400, **flags):
    tmap = tensor_map(array, box, **flags)
    machine.kept.append(tmap)
    library().emu_tma_load(
        *(
            machine.warp(0),
            1,
            array.ndim,
            groups,
            machine.lanes(to),
            machine.lanes(tmap.ctypes.data, wide=True),
        ),
        *(coordinates(machine, at), machine.lanes(mbarrier)),
        machine.lanes(multicast) if multicast is not None else None,
    )


def sliced(array, box, at, fill):
    """The box as NumPy cuts it out, filled where it leaves the array; axes in array order."""
    out = np.full(box[::-1], fill, array.dtype)
    for index in np.ndindex(*out.shape):
        where = tuple(a + i for a, i in zip(at[::-1], index, strict=True))
        if all(0 <= w < n for w, n in zip(where, array.shape, strict=True)):
            out[index] = array[where]
    return out


def unswizzled(window, start, count, mode):
    """`count` bytes from `start` as they would lie without swizzle."""
    at = [library().swizzle(mode, start + i, 0) for i in range(count)]
    return window[at]


CASES = [
    pytest.param(np.uint16, (300,), (64,), id="1d"),
    pytest.param(np.uint8, (40, 64), (32, 9), id="2d"),
    pytest.param(np.float32, (5, 7, 24), (8, 3, 2), id="3d"),
    pytest.param(np.uint64, (3, 4, 5, 6), (2, 3, 2, 2), id="4d"),
    pytest.param(np.float16, (2, 3, 4, 5, 16), (8, 2, 3, 2, 2), id="5d"),
]


@pytest.mark.parametrize(("dtype", "shape", "box"), CASES)
@pytest.mark.parametrize("corner", ["inside", "low", "high", "outside"])
def test_load_and_store_are_slices(dtype, shape, box, corner):
    machine = Machine()
    rng = np.random.default_rng(len(shape))
    array = aligned(rng.integers(1, 100, shape).astype(dtype))
    sizes = shape[::-1]
    at = {
        "inside": [max(0, n - b) // 2 for n, b in zip(sizes, box, strict=True)],
        "low": [-1] * len(box),
        "high": [n - b + 1 for n, b in zip(sizes, box, strict=True)],
        "outside": [*sizes[:-1], -box[-1]],
    }[corner]
    load(machine, array, box, at)
    expected = sliced(array, box, at, 0)
    window = machine.window(0)
    found = window[SHARED : SHARED + expected.nbytes].view(dtype).reshape(expected.shape)
    assert (found == expected).all()
    assert library().machine_transactions(0) == expected.nbytes
    # ... and back into an empty array: only what lies inside
    target = aligned(np.zeros_like(array))
    tmap = tensor_map(target, box)
    library().emu_tma_store(
        *(
            machine.warp(0),
            1,
            len(box),
            0,
            machine.lanes(tmap.ctypes.data, wide=True),
            coordinates(machine, at),
        ),
        machine.lanes(SHARED),
    )
    inside = np.zeros(shape, bool)
    inside[tuple(slice(max(0, a), max(0, a + b)) for a, b in zip(at[::-1], box[::-1], strict=True))] = True
    assert (target == np.where(inside, array, 0)).all()
    assert machine.findings() == ""


@pytest.mark.parametrize("mode", [NONE, SW32, SW64, SW128])
@pytest.mark.parametrize("start", [SHARED, SHARED + 128, SHARED + 640])
def test_swizzled_boxes(mode, start):
    machine = Machine()
    array = aligned(np.random.default_rng(0).integers(0, 1 << 16, (40, 96)).astype(np.uint16))
    box = ({NONE: 32, SW32: 16, SW64: 32, SW128: 64}[mode], 24)
    load(machine, array, box, (8, 3), to=start, swizzle=mode)
    expected = sliced(array, box, (8, 3), 0)
    found = (
        unswizzled(machine.window(0), start, expected.nbytes, mode).view(np.uint16).reshape(expected.shape)
    )
    assert (found == expected).all()
    target = aligned(np.zeros_like(array))
    tmap = tensor_map(target, box, swizzle=mode)
    library().emu_tma_store(
        *(machine.warp(0), 1, 2, 0, machine.lanes(tmap.ctypes.data, wide=True), coordinates(machine, (8, 3))),
        machine.lanes(start),
    )
    assert (target[3:27, 8 : 8 + box[0]] == expected).all()
    assert target.astype(np.int64).sum() == expected.astype(np.int64).sum()
    assert machine.findings() == ""


@pytest.mark.parametrize(("atomicity", "mask", "shift"), [(0, 7, 4), (1, 3, 5), (3, 1, 6)])
def test_atoms_of_the_128_byte_swizzle(atomicity, mask, shift):
    machine = Machine()
    array = aligned(np.arange(16 * 128).astype(np.uint8).reshape(16, 128))
    array[:] = np.arange(128)
    load(machine, array, (128, 16), (0, 0), swizzle=3, atomicity=atomicity)
    window = machine.window(0)[SHARED : SHARED + 2048].reshape(16, 128)
    for row, byte in itertools.product(range(16), range(128)):
        assert window[row, byte] == byte ^ (row & mask) << shift


def test_out_of_bounds_can_become_nan():
    machine = Machine()
    array = aligned(np.ones((4, 8), np.float32))
    load(machine, array, (8, 4), (4, 2), fill_nan=1)
    found = machine.window(0)[SHARED : SHARED + 128].view(np.float32).reshape(4, 8)
    assert (found[:2, :4] == 1).all()
    assert np.isnan(found[2:]).all()
    assert np.isnan(found[:, 4:]).all()


def test_element_strides_skip():
    machine = Machine()
    array = aligned(np.arange(16 * 8).astype(np.uint16).reshape(16, 8))
    load(machine, array, (8, 8), (0, 1), element_strides=(1, 3))
    found = machine.window(0)[SHARED : SHARED + 48].view(np.uint16).reshape(3, 8)
    assert (found == array[1:9:3]).all()
    assert library().machine_transactions(0) == 48


def test_strides_beyond_32_bits_are_kept():
    view = np.lib.stride_tricks.as_strided(np.zeros(16, np.uint16), (2, 3, 16), (5 << 36, 32, 2))
    fields = (ctypes.c_int64 * 24)()
    assert text(library().map_fields(ptr(tensor_map(view, (16, 1, 1), address=1 << 40)), fields)) is None
    assert list(fields)[:5] == [1 << 40, 3, 2, 0, 0]
    assert list(fields)[5:10] == [16, 3, 2, 1, 1]
    assert list(fields)[10:12] == [32, 5 << 36]
    assert list(fields)[14:19] == [16, 1, 1, 1, 1]


@pytest.mark.parametrize("groups", [1, 2])
def test_multicast_writes_and_signals_every_cta(groups):
    """With a pair, the signal goes to the CTA of the pair that the barrier's address names."""
    machine = Machine()
    array = aligned(np.arange(64).astype(np.uint32).reshape(2, 32))
    load(machine, array, (32, 2), (0, 0), groups=groups, multicast=3, mbarrier=0x400)
    for rank in range(2):
        assert (machine.window(rank)[SHARED : SHARED + 256].view(np.uint32) == np.arange(64)).all()
    signals = [library().machine_transactions(rank) for rank in range(2)]
    assert signals == ([256, 256] if groups == 1 else [512, 0])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"marker": 0}, "no tensor map"),
        ({"interleave": 1}, "interleaved"),
        ({"format": 11}, "sub-byte"),
        ({"tf32": 1}, "tf32"),
        ({"swizzle": 1}, "exceeds the swizzle span"),
        ({"swizzle": 3}, "shorter than the swizzle span"),
        ({"atomicity": 2, "swizzle": 3}, "8-byte flips"),
        ({"atomicity": 1}, "needs the 128-byte swizzle"),
        ({"address": 8}, "not a multiple of 16"),
        ({"element_strides": (2, 1)}, "dimension 0"),
        ({"box": (4, 8)}, "not a multiple of 16 bytes"),
    ],
)
def test_maps_that_cannot_be_are_refused(flags, message):
    machine = Machine()
    array = aligned(np.zeros((16, 32), np.uint16))
    flags = dict(flags)
    load(machine, array, flags.pop("box", (32, 8)), (0, 0), **flags)
    assert message in machine.findings()
    assert library().machine_transactions(0) == 0


def test_rank_and_alignment_are_checked():
    machine = Machine()
    array = aligned(np.zeros((16, 32), np.uint16))
    load(machine, array, (32, 8), (0, 0), to=SHARED + 16)
    assert "a tensor copy's shared memory" in machine.findings()
    tmap = tensor_map(array, (32, 8))
    library().emu_tma_prefetch(machine.warp(0), 1, 3, machine.lanes(tmap.ctypes.data, wide=True), None)
    assert "a 3d copy with a tensor map of rank 2" in machine.findings()


@pytest.mark.parametrize("dtype", [np.uint32, np.int32, np.uint64, np.float16, np.float32])
@pytest.mark.parametrize("reduction", ["add", "min", "max", "and", "or", "xor"])
def test_reducing_stores(dtype, reduction):
    machine = Machine()
    rng = np.random.default_rng(0)
    array, other = (aligned(rng.integers(1, 50, (4, 16)).astype(dtype)) for _ in range(2))
    machine.window(0)[SHARED : SHARED + other.nbytes] = other.view(np.uint8).ravel()
    before, code = array.copy(), 1 + ["add", "min", "max", "and", "or", "xor"].index(reduction)
    tmap = tensor_map(array, (16, 4))
    library().emu_tma_store(
        *(
            machine.warp(0),
            1,
            2,
            code,
            machine.lanes(tmap.ctypes.data, wide=True),
            coordinates(machine, (0, 0)),
        ),
        machine.lanes(SHARED),
    )
    if reduction in ("and", "or", "xor") and dtype in (np.float16, np.float32):
        assert "not defined" in machine.findings()
        return
    if dtype == np.float32 and reduction != "add":
        assert "not defined" in machine.findings()
        return
    operation = {"add": np.add, "min": np.minimum, "max": np.maximum}
    operation |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
    assert (array == operation[reduction](before, other)).all()
    assert machine.findings() == ""


def test_a_store_by_lanes_that_agree_is_executed_once():
    """A reduction by as many lanes adds as often."""
    machine = Machine()
    array = aligned(np.zeros((4, 16), np.float32))
    machine.window(0)[SHARED : SHARED + 256].view(np.float32)[:] = 1
    kept = tensor_map(array, (16, 4))
    tmap = machine.lanes(kept.ctypes.data, wide=True)
    at = [np.zeros(32, np.uint32), np.zeros(32, np.uint32)]
    at[1][7] = 2
    where = (ctypes.c_void_p * 2)(*(a.ctypes.data for a in at))
    library().machine_stored()
    library().emu_tma_store(machine.warp(0), 0xFFFFFFFF, 2, 0, tmap, where, machine.lanes(SHARED))
    assert library().machine_stored() == array.nbytes + array.nbytes // 2  # lane 7's box leaves the tensor
    array[:] = 0
    at[1][7] = 0
    library().emu_tma_store(machine.warp(0), 0xF, 2, 1, tmap, where, machine.lanes(SHARED))
    assert (array == 4).all()
    assert machine.findings() == ""


def test_bulk_copies():
    machine = Machine()
    data = aligned(np.arange(64).astype(np.uint32))
    lib, warp, size = library(), machine.warp(0), machine.lanes(256)
    source = machine.lanes(data.ctypes.data, wide=True)
    lib.emu_bulk_load(warp, 1, machine.lanes(SHARED), source, size, machine.lanes(0x400), None)
    lib.emu_bulk_load(
        warp, 1, machine.lanes(SHARED + 512), source, size, machine.lanes(0x400), machine.lanes(3)
    )
    lib.emu_bulk_dsmem(
        warp, 1, machine.lanes(1 << 24 | SHARED), machine.lanes(SHARED), size, machine.lanes(1 << 24 | 0x400)
    )
    assert [lib.machine_transactions(rank) for rank in range(2)] == [512, 512]
    for rank, at in ((0, 0), (0, 512), (1, 512), (1, 0)):
        assert (machine.window(rank)[SHARED + at : SHARED + at + 256].view(np.uint32) == data).all()
    target = aligned(np.full(64, 7, np.uint32))
    to, shared = machine.lanes(target.ctypes.data, wide=True), machine.lanes(SHARED)
    lib.emu_bulk_store(warp, 1, to, shared, size, 1, 0)
    assert (target == data + 7).all()
    lib.emu_bulk_store(warp, 1, to, shared, size, 0, 0)
    assert (target == data).all()
    assert machine.findings() == ""
    lib.emu_bulk_store(warp, 1, to, shared, machine.lanes(8), 0, 0)
    assert "multiple of 16" in machine.findings()
