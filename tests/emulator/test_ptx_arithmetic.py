"""Arithmetic against the ISA's text: every value computed again by numpy, torch or exact rationals."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch

import emulator
from tests.emulator.asm import kernel, run

LANES = 32
EDGE32 = np.array(
    [0, 1, 2, 31, 32, 33, 255, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF, 0xDEADBEEF], np.uint64
)


def values(bits: int, seed: int) -> np.ndarray:
    """32 lanes of integers: edges, then random ones."""
    rng = np.random.default_rng(seed)
    edges = EDGE32 if bits == 32 else np.concatenate([EDGE32[:6], EDGE32 << 32 | EDGE32[::-1]])[:16]
    rest = rng.integers(0, 1 << bits, LANES - len(edges), dtype=np.uint64)
    return rng.permutation(np.concatenate([edges, rest]))


def evaluate(
    instruction: str, a: np.ndarray, b: np.ndarray, c: np.ndarray, *, bits: int, out_bits: int
) -> np.ndarray:
    """The instruction's destination in every lane. It may use A, B, C (sources) and O."""
    size, reg = bits // 8, {32: "%r", 64: "%d"}
    names = {letter: f"{reg[bits]}{10 + i}" for i, letter in enumerate("ABC")} | {"O": f"{reg[out_bits]}20"}
    body = "mul.wide.u32 %d30, %r1, 8; add.s64 %d31, %d1, %d30;\n"
    for i, letter in enumerate("ABC"):
        body += f"ld.global.b{bits} {names[letter]}, [%d31+{i * 8 * LANES}];\n"
    text = instruction
    for letter, name in names.items():
        text = text.replace(f"<{letter}>", name)
    body += f"{text}\nadd.s64 %d32, %d2, %d30; st.global.b{out_bits} [%d32], {names['O']};"
    given = np.zeros((3, LANES), np.uint64)
    for i, x in enumerate((a, b, c)):
        given[i] = x
    out = np.zeros(LANES, np.uint64)
    assert size in (4, 8)
    assert run(body, given, out) == []
    return out


def signed(x: int, bits: int) -> int:
    return x - (1 << bits) if x >> (bits - 1) & 1 else x


def clamp_shift(x: int, n: int, bits: int) -> int:
    return x << n & (1 << bits) - 1 if n < bits else 0


M32 = (1 << 32) - 1
INTEGER: dict[str, Callable[[int, int, int], int]] = {
    "add.s32 <O>, <A>, <B>;": lambda a, b, c: a + b,
    "sub.u32 <O>, <A>, <B>;": lambda a, b, c: a - b,
    "mul.lo.s32 <O>, <A>, <B>;": lambda a, b, c: a * b,
    "mul.hi.u32 <O>, <A>, <B>;": lambda a, b, c: a * b >> 32,
    "mul.hi.s32 <O>, <A>, <B>;": lambda a, b, c: signed(a, 32) * signed(b, 32) >> 32,
    "mad.lo.s32 <O>, <A>, <B>, <C>;": lambda a, b, c: a * b + c,
    "div.u32 <O>, <A>, 7;": lambda a, b, c: a // 7,
    "div.s32 <O>, <A>, 7;": lambda a, b, c: int(math.copysign(abs(signed(a, 32)) // 7, signed(a, 32))),
    "rem.u32 <O>, <A>, 7;": lambda a, b, c: a % 7,
    "rem.s32 <O>, <A>, 7;": lambda a, b, c: int(math.fmod(signed(a, 32), 7)),
    "min.s32 <O>, <A>, <B>;": lambda a, b, c: min(signed(a, 32), signed(b, 32)),
    "max.u32 <O>, <A>, <B>;": lambda a, b, c: max(a, b),
    "abs.s32 <O>, <A>;": lambda a, b, c: abs(signed(a, 32)),
    "neg.s32 <O>, <A>;": lambda a, b, c: -a,
    "and.b32 <O>, <A>, <B>;": lambda a, b, c: a & b,
    "or.b32 <O>, <A>, <B>;": lambda a, b, c: a | b,
    "xor.b32 <O>, <A>, <B>;": lambda a, b, c: a ^ b,
    "not.b32 <O>, <A>;": lambda a, b, c: ~a,
    "lop3.b32 <O>, <A>, <B>, <C>, 0xe8;": lambda a, b, c: (a & b) | (a & c) | (b & c),
    "shl.b32 <O>, <A>, <B>;": lambda a, b, c: clamp_shift(a, b, 32),
    "shr.u32 <O>, <A>, <B>;": lambda a, b, c: a >> min(b, 32),
    "shr.s32 <O>, <A>, <B>;": lambda a, b, c: signed(a, 32) >> min(b, 31),
    "shf.l.wrap.b32 <O>, <A>, <B>, <C>;": lambda a, b, c: ((b << 32 | a) << (c & 31)) >> 32,
    "shf.r.clamp.b32 <O>, <A>, <B>, <C>;": lambda a, b, c: (b << 32 | a) >> min(c, 32),
    "popc.b32 <O>, <A>;": lambda a, b, c: a.bit_count(),
    "clz.b32 <O>, <A>;": lambda a, b, c: 32 - a.bit_length(),
    "brev.b32 <O>, <A>;": lambda a, b, c: int(f"{a:032b}"[::-1], 2),
    "bfind.u32 <O>, <A>;": lambda a, b, c: a.bit_length() - 1,
    "bfe.u32 <O>, <A>, 5, 11;": lambda a, b, c: a >> 5 & 0x7FF,
    "bfe.s32 <O>, <A>, 5, 11;": lambda a, b, c: signed(a >> 5 & 0x7FF, 11),
    "bfi.b32 <O>, <A>, <B>, 5, 11;": lambda a, b, c: b & ~(0x7FF << 5) | (a & 0x7FF) << 5,
    "prmt.b32 <O>, <A>, <B>, 0x7041;": lambda a, b, c: int.from_bytes(
        bytes(((b << 32 | a) >> 8 * s) & 255 for s in (1, 4, 0, 7)), "little"
    ),
    "setp.lt.s32 %p1, <A>, <B>; selp.b32 <O>, <A>, <C>, %p1;": (
        lambda a, b, c: a if signed(a, 32) < signed(b, 32) else c
    ),
    "setp.hs.u32 %p1|%p2, <A>, <B>; selp.b32 <O>, 1, 0, %p2;": lambda a, b, c: int(a < b),
    "setp.gt.and.u32 %p3, <B>, <C>, 1; setp.lt.or.u32 %p1, <A>, <B>, %p3; selp.b32 <O>, 1, 0, %p1;": (
        lambda a, b, c: int(a < b or b > c)
    ),
    "cvt.u16.u32 %h1, <A>; cvt.s32.s16 <O>, %h1;": lambda a, b, c: signed(a & 0xFFFF, 16),
    "cvt.s8.s32 <O>, <A>;": lambda a, b, c: signed(a & 0xFF, 8),
    "cvt.sat.s16.s32 <O>, <A>;": lambda a, b, c: min(max(signed(a, 32), -32768), 32767),
    "mov.b32 {%h1, %h2}, <A>; mov.b32 <O>, {%h2, %h1};": lambda a, b, c: a >> 16 | a << 16,
    "mov.b32 {%h1, %h2}, <A>; shl.b16 %h1, %h1, 3; mov.b32 <O>, {%h1, %h2};": lambda a, b, c: (
        a & ~0xFFFF | a << 3 & 0xFFFF
    ),
}


@pytest.mark.parametrize("instruction", INTEGER)
def test_integer_instructions_of_32_bits(instruction: str) -> None:
    a, b, c = (values(32, s) for s in range(3))
    if "<B>;" in instruction and instruction.startswith(("shl", "shr")):
        b = b % 40
    if instruction.startswith("shf"):
        c = c % 40
    got = evaluate(instruction, a, b, c, bits=32, out_bits=32)
    want = [INTEGER[instruction](int(x), int(y), int(z)) & M32 for x, y, z in zip(a, b, c, strict=True)]
    assert got.tolist() == want


M64 = (1 << 64) - 1
WIDE: dict[str, Callable[[int, int, int], int]] = {
    "add.s64 <O>, <A>, <B>;": lambda a, b, c: a + b,
    "mul.lo.s64 <O>, <A>, <B>;": lambda a, b, c: a * b,
    "mul.hi.u64 <O>, <A>, <B>;": lambda a, b, c: a * b >> 64,
    "mad.lo.s64 <O>, <A>, <B>, <C>;": lambda a, b, c: a * b + c,
    "or.b64 <O>, <A>, <B>;": lambda a, b, c: a | b,
    "shl.b64 <O>, <A>, 13;": lambda a, b, c: a << 13,
    "shr.s64 <O>, <A>, 13;": lambda a, b, c: signed(a, 64) >> 13,
    "mov.b64 {%r5, %r6}, <A>; mov.b64 <O>, {%r6, %r5};": lambda a, b, c: a >> 32 | a << 32,
    "cvt.u32.u64 %r5, <A>; cvt.s64.s32 <O>, %r5;": lambda a, b, c: signed(a & M32, 32),
    "cvt.u32.u64 %r5, <A>; mul.wide.s32 <O>, %r5, -7;": lambda a, b, c: signed(a & M32, 32) * -7,
    "mov.b128 %q1, {<A>, <B>}; mov.b128 {%d21, <O>}, %q1;": lambda a, b, c: b,
    "setp.lt.s64 %p1, <A>, <B>; selp.b64 <O>, <A>, <C>, %p1;": lambda a, b, c: (
        a if signed(a, 64) < signed(b, 64) else c
    ),
    "div.u64 <O>, <A>, 10;": lambda a, b, c: a // 10,
    "popc.b64 %r5, <A>; cvt.u64.u32 <O>, %r5;": lambda a, b, c: a.bit_count(),
}


@pytest.mark.parametrize("instruction", WIDE)
def test_integer_instructions_of_64_bits(instruction: str) -> None:
    a, b, c = (values(64, s) for s in range(3))
    got = evaluate(instruction, a, b, c, bits=64, out_bits=64)
    want = [WIDE[instruction](int(x), int(y), int(z)) & M64 for x, y, z in zip(a, b, c, strict=True)]
    assert got.tolist() == want


def floats(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    edges = np.array(
        [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 3.4e38, 1.1754944e-38, 65504.0],
        np.float32,
    )
    rest = rng.normal(size=LANES - len(edges)).astype(np.float32) * np.float32(10.0) ** rng.integers(
        -6, 6, LANES - len(edges)
    )
    return rng.permutation(np.concatenate([edges, rest.astype(np.float32)]))


def bits_of(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32).view(np.uint32).astype(np.uint64)


def exact_fma(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    if not all(map(np.isfinite, (a, b, c))):
        with np.errstate(all="ignore"):
            return np.float32(np.float64(a) * np.float64(b) + np.float64(c))
    return nearest(
        Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)),
        np.float64(a) * np.float64(b) + np.float64(c),
    )


def nearest(exact: Fraction, like: np.float64) -> np.float32:
    """The float32 nearest to a rational, ties to even."""
    if exact == 0:
        return np.float32(like)
    with np.errstate(all="ignore"):
        guess = np.float32(float(exact))
    if not np.isfinite(guess):
        return guess
    candidates = {guess, np.nextafter(guess, np.float32(np.inf)), np.nextafter(guess, np.float32(-np.inf))}
    finite = [x for x in candidates if np.isfinite(x)]
    return min(
        finite, key=lambda x: (abs(Fraction(float(x)) - exact), int(np.float32(x).view(np.uint32)) & 1)
    )


def ftz(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x).astype(np.float32)


def numpy_max(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.where(
        np.isnan(a),
        b,
        np.where(np.isnan(b), a, np.where(a == b, np.where(np.signbit(a), b, a), np.maximum(a, b))),
    )


FLOAT: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]] = {
    "add.f32 <O>, <A>, <B>;": lambda a, b, c: a + b,
    "sub.rn.f32 <O>, <A>, <B>;": lambda a, b, c: a - b,
    "mul.f32 <O>, <A>, <B>;": lambda a, b, c: a * b,
    "mul.ftz.f32 <O>, <A>, <B>;": lambda a, b, c: ftz(ftz(a) * ftz(b)),
    "fma.rn.f32 <O>, <A>, <B>, <C>;": lambda a, b, c: np.array(
        [exact_fma(*x) for x in zip(a, b, c, strict=True)], np.float32
    ),
    "div.rn.f32 <O>, <A>, <B>;": lambda a, b, c: a / b,
    "sqrt.rn.f32 <O>, <A>;": lambda a, b, c: np.sqrt(a),
    "rcp.rn.f32 <O>, <A>;": lambda a, b, c: np.float32(1) / a,
    "neg.f32 <O>, <A>;": lambda a, b, c: -a,
    "abs.f32 <O>, <A>;": lambda a, b, c: np.abs(a),
    "max.f32 <O>, <A>, <B>;": lambda a, b, c: numpy_max(a, b),
    "min.f32 <O>, <A>, <B>;": lambda a, b, c: -numpy_max(-a, -b),
    "max.NaN.f32 <O>, <A>, <B>;": lambda a, b, c: np.where(
        np.isnan(a) | np.isnan(b), np.float32(np.nan), numpy_max(a, b)
    ),
    "max.NaN.f32 <O>, <A>, <B>, <C>;": lambda a, b, c: np.where(
        np.isnan(a) | np.isnan(b) | np.isnan(c), np.float32(np.nan), numpy_max(numpy_max(a, b), c)
    ),
    "add.sat.f32 <O>, <A>, <B>;": lambda a, b, c: (
        np.where(np.isnan(a + b), np.float32(0), np.clip(a + b, 0, 1)) + np.float32(0)
    ),
    "setp.neu.f32 %p1, <A>, <B>; selp.f32 <O>, <A>, <C>, %p1;": lambda a, b, c: np.where(a != b, a, c),
    "setp.ne.f32 %p1, <A>, <B>; selp.f32 <O>, <A>, <C>, %p1;": lambda a, b, c: np.where(
        (a < b) | (a > b), a, c
    ),
    "setp.ltu.f32 %p1, <A>, <B>; selp.f32 <O>, <A>, <C>, %p1;": lambda a, b, c: np.where(~(a >= b), a, c),
    "setp.num.f32 %p1, <A>, <B>; selp.f32 <O>, <A>, <C>, %p1;": lambda a, b, c: np.where(
        np.isnan(a) | np.isnan(b), c, a
    ),
    "mov.b64 %d20, {<A>, <B>}; mov.b64 %d21, {<C>, <A>}; add.rn.f32x2 %d22, %d20, %d21; mov.b64 {%r30, <O>}, %d22;": (
        lambda a, b, c: b + a
    ),
    "mov.b64 %d20, {<A>, <B>}; mov.b64 %d21, {<C>, <A>}; fma.rn.f32x2 %d22, %d20, %d21, %d20; mov.b64 {<O>, %r30}, %d22;": (
        lambda a, b, c: np.array([exact_fma(*x) for x in zip(a, c, a, strict=True)], np.float32)
    ),
}


@pytest.mark.parametrize("instruction", FLOAT)
def test_float_instructions(instruction: str) -> None:
    a, b, c = (floats(s) for s in range(3))
    got = (
        evaluate(instruction, *map(bits_of, (a, b, c)), bits=32, out_bits=32)
        .astype(np.uint32)
        .view(np.float32)
    )
    with np.errstate(all="ignore"):
        want = FLOAT[instruction](a, b, c).astype(np.float32)
    same = (got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))
    assert same.all(), [(a[i], b[i], c[i], got[i], want[i]) for i in np.flatnonzero(~same)]


@pytest.mark.parametrize(("mode", "ordered"), [("rm", np.less_equal), ("rp", np.greater_equal)])
def test_directed_fma_brackets_the_exact_result(mode: str, ordered: Callable[[float, float], bool]) -> None:
    rng = np.random.default_rng(5)
    a, b, c = (rng.normal(size=LANES).astype(np.float32) for _ in range(3))
    got = evaluate(f"fma.{mode}.f32 <O>, <A>, <B>, <C>;", *map(bits_of, (a, b, c)), bits=32, out_bits=32)
    down = got.astype(np.uint32).view(np.float32)
    for x, y, z, r in zip(a, b, c, down, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        other = np.nextafter(r, np.float32(np.inf if mode == "rm" else -np.inf))
        assert ordered(Fraction(float(r)), exact)
        assert not ordered(Fraction(float(other)), exact)


def half_cases(dtype: torch.dtype) -> torch.Tensor:
    bits = torch.randint(
        -32768, 32767, (LANES,), generator=torch.Generator().manual_seed(3), dtype=torch.int16
    )
    return bits.view(dtype)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_conversions_of_16_bit_floats_round_as_torch_does(name: str, dtype: torch.dtype) -> None:
    x = torch.from_numpy(
        np.concatenate(
            [
                floats(0)[:16],
                np.float32([1 + 2.0**-9, 1 + 3 * 2.0**-9, 65519, 65520, 6e-8, 2.9e-8] + [0.1] * 10),
            ]
        )
    )
    y = torch.from_numpy(floats(2))
    a, b = (bits_of(v.numpy()) for v in (x, y))
    got = evaluate(f"cvt.rn.{name}x2.f32 <O>, <B>, <A>;", a, b, b, bits=32, out_bits=32).astype(np.uint32)
    lo = torch.from_numpy((got & 0xFFFF).astype(np.uint16).view(np.int16)).view(dtype)
    hi = torch.from_numpy((got >> 16).astype(np.uint16).view(np.int16)).view(dtype)
    for part, source in ((lo, x), (hi, y)):
        want = source.to(dtype)
        assert ((part.view(torch.int16) == want.view(torch.int16)) | (part.isnan() & want.isnan())).all()
    wide = evaluate(
        f"cvt.u16.u32 %h1, <A>; cvt.f32.{name} <O>, %h1;", got.astype(np.uint64), b, b, bits=32, out_bits=32
    )
    assert np.array_equal(wide.astype(np.uint32).view(np.float32), lo.float().numpy(), equal_nan=True)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
@pytest.mark.parametrize("op", ["add", "mul", "fma"])
def test_packed_16_bit_arithmetic_rounds_once(name: str, dtype: torch.dtype, op: str) -> None:
    rng = torch.Generator().manual_seed(7)
    a, b, c = (torch.randn(LANES, generator=rng).to(dtype) for _ in range(3))
    words = [x.view(torch.int16).numpy().view(np.uint16).astype(np.uint64) * 0x10001 for x in (a, b, c)]
    text = f"{op}.rn.{name}x2 <O>, <A>, <B>{', <C>' if op == 'fma' else ''};"
    got = evaluate(text, *words, bits=32, out_bits=32).astype(np.uint32)
    x, y, z = (v.double() for v in (a, b, c))
    exact = {"add": x + y, "mul": x * y, "fma": x * y + z}[op]  # exact in double for these magnitudes
    want = exact.to(dtype)
    for part in (got & 0xFFFF, got >> 16):
        assert torch.equal(torch.from_numpy(part.astype(np.uint16).view(np.int16)), want.view(torch.int16))


@pytest.mark.parametrize("kind", ["u32", "s32"])
@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
def test_conversions_to_integers_saturate(kind: str, mode: str) -> None:
    x = np.concatenate(
        [
            floats(1)[:20],
            np.float32(
                [0.5, 1.5, 2.5, -0.5, -1.5, 2147483648, 4294967296, -2147483904, -1, 4294967040, 7, 8]
            ),
        ]
    )
    got = evaluate(
        f"cvt.{mode}.{kind}.f32 <O>, <A>;", bits_of(x), bits_of(x), bits_of(x), bits=32, out_bits=32
    )
    low, high = (0, M32) if kind == "u32" else (-(1 << 31), (1 << 31) - 1)
    rounding = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode]
    want = [0 if np.isnan(v) else int(min(max(float(rounding(np.float64(v))), low), high)) & M32 for v in x]
    assert got.tolist() == want


BOUNDS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], float]] = {
    "ex2.approx.ftz.f32": (np.exp2, 2.0**-22),
    "lg2.approx.f32": (np.log2, 2.0**-22),
    "rcp.approx.f32": (lambda x: 1 / x, 2.0**-23),
    "rsqrt.approx.f32": (lambda x: 1 / np.sqrt(x), 2.0**-22.9),
    "sqrt.approx.f32": (np.sqrt, 2.0**-23),
    "tanh.approx.f32": (np.tanh, 2.0**-11),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_approximations_stay_inside_the_bounds_of_the_isa(name: str) -> None:
    x = np.abs(np.random.default_rng(2).normal(size=LANES)).astype(np.float32) * 20 + np.float32(0.01)
    function, bound = BOUNDS[name]
    got = evaluate(f"{name} <O>, <A>;", bits_of(x), bits_of(x), bits_of(x), bits=32, out_bits=32)
    exact = function(x.astype(np.float64))
    error = np.abs(got.astype(np.uint32).view(np.float32) - exact)
    assert (error <= np.maximum(bound * np.abs(exact), bound if name.startswith("lg2") else 0)).all()


def test_an_unknown_instruction_is_an_error_with_its_line() -> None:
    ptx = kernel("add.s32 %r3, %r1, 1;\nfrobnicate.b32 %r3, %r1;", 1)
    line = ptx[: ptx.index("frobnicate")].count("\n") + 1
    with (
        emulator.device("sm_90a") as device,
        pytest.raises(emulator.UnknownInstructionError, match=f"PTX line {line}: .*frobnicate"),
    ):
        device.launch(ptx, [np.zeros(4, np.int32)])


@pytest.mark.parametrize(
    "body", ["add.s32.quick %r3, %r1, 1;", "ld.global.b32.odd %r3, [%d1];", "mov.u32 %r3, %nothing;"]
)
def test_an_unknown_modifier_is_an_error(body: str) -> None:
    with emulator.device("sm_90a") as device, pytest.raises(emulator.EmulatorError, match="PTX line"):
        device.launch(kernel(body, 1), [np.zeros(4, np.int32)])
