"""Every invalid argument of every operator: an InvalidArgument that names it, what it got and what is
allowed; nothing launched, nothing written. Each is tried on a fresh dispatcher and again behind a plan that a
valid call left."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bindings import InvalidArgument, backend, dispatch, explain, ops
from bindings.checks import extent_bytes
from bindings.registry import OPS
from tests.bindings.calls import (
    ROWS,
    SMALL,
    Call,
    Jit,
    aligned_at,
    make,
    outs_of,
    run,
    tensors,
    untouched,
    written,
)

# Read element by element: any alignment of their elements will do.
ELEMENT_ALIGNED = {"a", "b", "A_log", "dt_bias", "state_indices"}
# The outermost stride is free.
STRIDED = {"mixed_qkv", "a", "b", "state", "state_indices"}

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32

WRONG_DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "partials": (BF16, torch.float64),
    "expert_out": (F16, F32),
    "permuted_idx": (torch.int64, torch.int16, F32),
    "expert_weights": (F16, torch.float64),
    "shared_out": (F16, F32),
    "shared_gate": (BF16, torch.float64),
    "A_log": (BF16, torch.float64),
    "dt_bias": (F16, torch.float64),
    "state": (F16, torch.float64),
    "state_indices": (torch.int16, F32),
}
DEFAULT_WRONG_DTYPES = (F32, torch.float64, torch.int16)


@dataclass(frozen=True)
class Breach:
    """A change of a valid call that breaks its contract. blames: the argument that the message must name.
    needs_outs: only in the form with outputs. says: what the message must contain."""

    op: str
    change: str
    apply: Callable[[Call], None]
    blames: str
    says: str = ""
    needs_outs: bool = False

    @property
    def id(self) -> str:
        return f"{self.op}-{self.change}"


def sparse_rows(t: Tensor) -> Tensor:
    """A copy of `t` with a gap after every element of the last dimension."""
    wide = torch.zeros((*t.shape, 2), dtype=t.dtype)
    wide[..., 0] = t
    return wide[..., 0]


def freed(t: Tensor) -> Tensor:
    """A tensor like `t`, not at its storage's start, whose storage was freed."""
    view = aligned_at(t, 32, of=64)
    view.untyped_storage().resize_(0)
    return view


def shrunk(t: Tensor) -> Tensor:
    """A tensor like `t` whose storage has lost its last byte."""
    copy = t.clone()
    copy.untyped_storage().resize_(extent_bytes(copy) - 1)
    return copy


def set_to(name: str, value: Any) -> Callable[[Call], None]:
    return lambda call: call.__setitem__(name, value)


def mapped(name: str, function: Callable[[Tensor], Any]) -> Callable[[Call], None]:
    return lambda call: call.__setitem__(name, function(call[name]))


def tensor_breaches(op: str, name: str, t: Tensor, output: bool) -> Iterator[Breach]:
    """What is wrong for every tensor argument."""

    def breach(change: str, function: Callable[[Tensor], Any], says: str, blames: str = name) -> Breach:
        return Breach(op, f"{name}-{change}", mapped(name, function), blames, says, output)

    for value, got in ((3.0, "a builtins.float"), ([1.0], "a builtins.list"), ("cpu", "a builtins.str")):
        yield breach(f"is-{type(value).__name__}", lambda _, v=value: v, f"got {got}, allowed a torch.Tensor")
    yield breach("is-numpy", lambda t: t.float().numpy(), "got a numpy.ndarray, allowed a torch.Tensor")
    shape = re.escape(str(tuple(t.shape)))
    yield breach("rank-up", lambda t: t.unsqueeze(0), r"got shape \(1, ")
    yield breach("rank-down", lambda t: t[0], "got shape")
    yield breach("no-rank", lambda t: t.flatten()[0], r"got shape \(\)")
    wrong = WRONG_DTYPES.get(name, DEFAULT_WRONG_DTYPES) if not output else (torch.float64, torch.int16)
    for dtype in wrong:
        allowed = str(t.dtype) if output else ""
        says = f"got dtype {dtype}, allowed .*{allowed}"
        yield breach(f"dtype-{dtype}", lambda t, d=dtype: t.to(d), says)
    yield breach("freed", freed, r"got a storage of 0 bytes, allowed one that holds the tensor's \d+")
    yield breach("shrunk", shrunk, r"got a storage of \d+ bytes, allowed one that holds the tensor's \d+")
    if t.dtype.is_floating_point:
        yield breach("negated", lambda t: torch._neg_view(t.clone()), "got a lazily negated")
    yield breach("zero", lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype), "got a zero tensor")
    yield breach("sparse", lambda t: t.to_sparse(), "got layout torch.sparse_coo, allowed torch.strided")
    if t.dim() == 1 and name not in STRIDED:
        yield breach("strided", sparse_rows, r"got strides \(2,\), allowed a contiguous tensor")
    if t.dim() > 1:
        says = (
            "allowed a contiguous last dimension|allowed dense inner dimensions"
            if name in STRIDED
            else "allowed a cont"
        )
        yield breach("inner-stride", sparse_rows, says)
    if t.dim() > 1 and name not in STRIDED:
        yield breach(
            "outer-stride", lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]], "allowed a contiguous tensor"
        )
    if name not in ELEMENT_ALIGNED:
        for past in {t.element_size(), 8}:
            says = f"got a base address {past} bytes past a multiple of 16, allowed multiples of 16"
            yield breach(f"misaligned-{past}", lambda t, p=past: aligned_at(t, p, of=16), says)
    first = OPS[op].inputs[0]
    says = r"got device cpu, allowed meta|got device meta, allowed cpu"
    blames = OPS[op].inputs[1] if name == first else name
    yield breach("device", lambda t: t.to("meta"), says, blames)
    if output:
        for dim in range(t.dim()):
            yield breach(f"longer-{dim}", lambda t, d=dim: torch.cat([t, t], d), f"allowed {shape}")


def extent_breaches() -> Iterator[Breach]:
    """Extents that disagree, and what else contracts demand of sizes and scalars."""

    def grow(name: str, dim: int, by: int = 1) -> Callable[[Tensor], Tensor]:
        def grown(t: Tensor) -> Tensor:
            shape = list(t.shape)
            shape[dim] += by
            return torch.zeros(shape, dtype=t.dtype)

        return grown

    W, H, T = SMALL.width, SMALL.hidden, ROWS
    table: list[tuple[str, str, int, int, str, str]] = [
        # operator, argument, dimension, grown by, blamed, message
        ("grouped_gemma_rmsnorm", "weight", 0, 8, "weight", rf"allowed \(W,\) with W = {W}"),
        (
            "grouped_gemma_rmsnorm",
            "x",
            1,
            8,
            "weight",
            rf"got shape \({W},\), allowed \(W,\) with W = {W + 8}",
        ),
        ("hc_gate", "inject_weight", 1, 64, "inject_weight", rf"allowed \(C, W\) with W = {W}, C >= 1"),
        ("hc_gate", "normed", 1, 8, "normed", rf"got shape \({T}, {W + 8}\), allowed .* multiple of 64"),
        ("hc_apply", "residual", 0, 1, "residual", rf"allowed \(T, W\) with T = {T}"),
        ("hc_apply", "residual", 1, 8, "residual", rf"allowed \(T, C\*H\) with T = {T}, H = {H}"),
        ("hc_apply", "residual", 1, H, "partials", r"allowed \(T, 8, C\) with T = 3, C = 5"),
        ("hc_apply", "partials", 0, 1, "partials", rf"allowed \(T, 8, C\) with T = {T}"),
        ("hc_apply", "partials", 1, 1, "partials", r"got shape \(3, 9, 4\), allowed \(T, 8, C\)"),
        ("hc_apply", "partials", 2, 1, "partials", r"got shape \(3, 8, 5\)"),
        ("hc_apply_norm", "block", 0, 1, "residual", rf"allowed \(T, W\) with T = {T + 1}"),
        ("hc_apply_norm", "block", 1, 8, "residual", r"allowed \(T, C\*H\)"),
        ("hc_apply_norm", "partials", 1, -1, "partials", r"got shape \(3, 7, 4\)"),
        ("hc_apply_norm", "norm_weight", 0, 1, "norm_weight", rf"allowed \(W,\) with W = {W}"),
        ("hc_boundary", "norm_weight", 0, 1, "norm_weight", rf"allowed \(W,\) with W = {W}"),
        ("hc_boundary", "inject_weight", 0, 1, "inject_weight", r"got shape \(5, "),
        ("hc_boundary", "inject_weight", 1, 8, "inject_weight", rf"got shape \(4, {W + 8}\)"),
        ("hc_mix", "w_down", 1, 8, "w_down", rf"allowed \(R, W\) with W = {W}, R >= 1"),
        ("hc_mix", "w_up", 0, 8, "w_up", rf"allowed \(W, R\) with W = {W}, R = 16"),
        ("hc_mix", "w_up", 1, 8, "w_up", rf"got shape \({W}, 24\)"),
        ("hc_mix", "w_down", 0, -16, "w_down", r"got shape \(0, 256\)"),
        ("shared_gate", "weight", 0, 8, "weight", rf"allowed \(H,\) with H = {H}"),
        ("shared_gate", "x", 1, -H, "x", r"got shape \(3, 0\), allowed \(T, H\) with H >= 1"),
        (
            "moe_finalize",
            "permuted_idx",
            0,
            1,
            "permuted_idx",
            r"got shape \(10,\), allowed \(T\*K,\) with T = 3, K = 3",
        ),
        ("moe_finalize", "expert_weights", 1, 1, "permuted_idx", r"got shape \(9,\), allowed .* K = 4"),
        ("moe_finalize", "expert_weights", 1, -3, "expert_weights", r"got shape \(3, 0\)"),
        ("moe_finalize", "shared_out", 0, 1, "shared_out", rf"allowed \(T, H\) with T = 3, H = {H}"),
        ("moe_finalize", "shared_out", 1, 8, "shared_out", r"got shape \(3, 72\)"),
        ("moe_finalize", "shared_gate", 0, 1, "shared_gate", r"allowed \(T,\) with T = 3"),
        (
            "gdn_packed_decode",
            "mixed_qkv",
            1,
            8,
            "mixed_qkv",
            r"allowed \(B, 2\*Hk\*D \+ Hv\*D\) with Hv = 4, D = 64",
        ),
        ("gdn_packed_decode", "mixed_qkv", 1, 128, "mixed_qkv", "Hk a divisor of Hv"),  # Hk = 3
        ("gdn_packed_decode", "mixed_qkv", 1, -256, "mixed_qkv", "Hk a divisor of Hv"),  # Hk = 0
        ("gdn_packed_decode", "mixed_qkv", 0, 1, "a", r"allowed \(B, Hv\) with B = 4"),
        ("gdn_packed_decode", "a", 1, 1, "b", r"allowed \(B, Hv\) with B = 3, Hv = 5"),
        ("gdn_packed_decode", "b", 0, 1, "b", r"got shape \(4, 4\)"),
        ("gdn_packed_decode", "A_log", 0, 1, "A_log", r"allowed \(Hv,\) with Hv = 4"),
        ("gdn_packed_decode", "dt_bias", 0, -1, "dt_bias", r"allowed \(Hv,\) with Hv = 4"),
        ("gdn_packed_decode", "state", 1, 1, "state", r"allowed \(N, Hv, D, D\) with Hv = 4, D >= 1"),
        ("gdn_packed_decode", "state", 3, 1, "state", r"got shape \(1, 4, 64, 65\)"),
        ("gdn_packed_decode", "state_indices", 0, 1, "state_indices", r"allowed \(B,\) with B = 3"),
    ]
    for op, name, dim, by, blames, says in table:
        yield Breach(op, f"{name}-extent-{dim}{by:+d}", mapped(name, grow(name, dim, by)), blames, says)

    number, divisor = "allowed a finite number", "allowed a positive"
    scalars: list[tuple[str, str, Any, str]] = [
        *(
            (op, "eps", value, says)
            for op in ("grouped_gemma_rmsnorm", "hc_apply_norm", "hc_boundary")
            for value, says in (
                (-1e-6, "got -1e-06, allowed a finite number >= 0"),
                (float("nan"), number),
                (float("inf"), number),
                (10**400, "got an integer of 1329 bits, allowed a finite number"),
                (None, number),
                ("1e-6", number),
                (True, number),
                (torch.tensor(1e-6), "got a Tensor"),
            )
        ),
        *(
            ("grouped_gemma_rmsnorm", "group_size", value, says)
            for value, says in (
                (0, divisor),
                (-64, divisor),
                (100, "got 100, allowed a positive multiple of 8 that divides W = 256"),
                (96, "that divides W = 256"),
                (4, "multiple of 8"),
                (512, divisor),
                (64.0, "allowed an integer"),
                (None, "allowed an integer"),
                (True, "allowed an integer"),
                (torch.tensor(64), "allowed an integer"),
            )
        ),
        *(
            ("hc_mix", "streams", value, says)
            for value, says in (
                (0, divisor),
                (-4, divisor),
                (3, "got 3, allowed a positive integer that divides W = 256"),
                (4.0, "allowed an integer"),
                (None, "allowed an integer"),
            )
        ),
        *(
            ("gdn_packed_decode", "scale", value, number)
            for value in (float("nan"), float("-inf"), "1", True, torch.tensor(1.0))
        ),
    ]
    for op, name, value, says in scalars:
        yield Breach(op, f"{name}-{value!r}", set_to(name, value), name, re.escape(says))
    yield Breach(
        "moe_finalize",
        "gate-alone",
        set_to("shared_out", None),
        "shared_gate",
        "allowed None where shared_out",
    )
    pool = torch.zeros(1, 4, 64, 64).expand(3, 4, 64, 64)
    yield Breach(
        "gdn_packed_decode",
        "state-expanded",
        set_to("state", pool),
        "state",
        "allowed a slot stride of at least",
    )
    tight = torch.zeros(3 * 4 * 64 * 64).as_strided((3, 4, 64, 64), (64 * 64, 64 * 64, 64, 1))
    yield Breach(
        "gdn_packed_decode",
        "state-overlapping",
        set_to("state", tight),
        "state",
        r"at least Hv\*D\*D = 16384",
    )


def breaches() -> list[Breach]:
    found: list[Breach] = []
    for op, operator in OPS.items():
        call = make(op)
        required = [n for n in operator.inputs if operator.signature.parameters[n].default is not None]
        found += [
            Breach(op, f"{n}-is-None", set_to(n, None), n, "got None, allowed a torch.Tensor")
            for n in required
        ]
        for name, t in tensors(call).items():
            found += tensor_breaches(op, name, t, output=False)
        for name, t in outs_of(op, call).items():
            found += tensor_breaches(op, name, t, output=True)
    found += extent_breaches()
    return found


BREACHES = breaches()


def attempt(breach: Breach, call: Call, outs: dict[str, Any]) -> None:
    pattern = rf"^{breach.op}: {breach.blames}: got .+, allowed .+"
    with untouched(call, outs), pytest.raises(InvalidArgument, match=pattern) as error:
        run(breach.op, call, **outs)
    assert re.search(breach.says, str(error.value)), f"{error.value} does not say {breach.says}"


@pytest.mark.parametrize("breach", [pytest.param(b, id=b.id) for b in BREACHES])
def test_breach(breach: Breach, compiled: Jit) -> None:
    """With and without outputs, on the reference and on the kernel path, before and after a valid call."""
    spent: list[dict[str, Any]] = []
    for planned in (False, True):
        for name in ("reference", "cute"):
            for with_outs in (True,) if breach.needs_outs else (True, False):
                call = make(breach.op)
                outs: dict[str, Any] = dict(outs_of(breach.op, call)) if with_outs else {}
                dispatch.clear_plans()
                with backend(name):
                    if planned:
                        run(breach.op, call, **outs)
                        spent.append(outs)  # taken: a plan does not look again at an address it has vetted
                        outs = dict(outs_of(breach.op, call)) if with_outs else {}
                    launches = compiled.launches
                    everything = call | outs
                    breach.apply(everything)
                    call = {n: everything[n] for n in call}
                    outs = {n: everything[n] for n in outs}
                    attempt(breach, call, outs)
                    assert compiled.launches == launches


def test_table_is_complete() -> None:
    """Every argument of every operator is blamed by some breach."""
    blamed = {(b.op, b.blames) for b in BREACHES}
    for op, operator in OPS.items():
        for name in (*operator.inputs, *operator.scalars, *operator.outs):
            assert (op, name) in blamed, f"no breach of {op} blames {name}"


def test_explain_validates_as_the_call_does() -> None:
    for breach in BREACHES:
        if breach.change.endswith("-device"):
            continue  # calls with fake or meta tensors go to torch's dispatcher instead
        call = make(breach.op)
        everything = call | (dict(outs_of(breach.op, call)) if breach.needs_outs else {})
        breach.apply(everything)
        with pytest.raises(InvalidArgument, match=rf"^{breach.op}: {breach.blames}: "):
            explain(breach.op, **everything)


@pytest.mark.parametrize("op", OPS)
def test_nested_tensors(op: str, compiled: Jit) -> None:
    """Refused at a first call; behind a plan nothing looks for them (see `plans.native_matcher`)."""
    for name in (*tensors(make(op)), *OPS[op].outs):
        call = make(op)
        everything = call | dict(outs_of(op, call))
        everything[name] = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
        pattern = f"^{op}: {name}: got a nested tensor, allowed"
        for check in (getattr(ops, op), lambda _op=op, **all_: explain(_op, **all_)):
            with pytest.raises(InvalidArgument, match=pattern):
                check(**everything)
    assert compiled.launches == 0


def test_one_output_of_two() -> None:
    call = make("hc_apply_norm")
    outs = outs_of("hc_apply_norm", call)
    for missing, given in (("combined_out", "normed_out"), ("normed_out", "combined_out")):
        allowed = f"hc_apply_norm: {missing}: got None, allowed a torch.Tensor, since {given} is given"
        with untouched(call, outs), pytest.raises(InvalidArgument, match=allowed):
            ops.hc_apply_norm(**call, **{given: outs[given]})


@pytest.mark.parametrize("missing", OPS["hc_boundary"].outs)
def test_two_outputs_of_three(missing: str) -> None:
    call = make("hc_boundary")
    outs = {name: out for name, out in outs_of("hc_boundary", call).items() if name != missing}
    allowed = f"hc_boundary: {missing}: got None, allowed a torch.Tensor, since {', '.join(outs)} are given"
    with untouched(call, outs), pytest.raises(InvalidArgument, match=allowed):
        ops.hc_boundary(**call, **outs)
    (only, *_) = outs
    with pytest.raises(InvalidArgument, match=f"got None, allowed a torch.Tensor, since {only} is given"):
        ops.hc_boundary(**call, **{only: outs[only]})


def overlap_pairs() -> list[tuple[str, str, str]]:
    """(operator, written argument, other argument): every pair that must not overlap."""
    found = []
    for op in OPS:
        names = list(tensors(make(op))) + list(OPS[op].outs)
        for first in written(op):
            for other in names:
                if other != first and not (other in written(op) and names.index(other) > names.index(first)):
                    found.append((op, first, other))
    return found


def place(op: str, first: str, other: str, offset: int) -> tuple[Call, dict[str, Tensor], Tensor, Tensor]:
    """A valid call, but `other` starts `offset` bytes past the start of `first` in one buffer."""
    call = make(op)
    outs = outs_of(op, call)
    everything = call | outs
    a, b = everything[first], everything[other]
    room = extent_bytes(b) + 64
    buffer = torch.zeros(extent_bytes(a) + 2 * room, dtype=torch.uint8)
    origin = room // 16 * 16 - buffer.data_ptr() % 16 + 16

    def inside(t: Tensor, start: int) -> Tensor:
        return buffer[start : start + extent_bytes(t)].view(t.dtype).view(t.shape).copy_(t)

    everything[first], everything[other] = inside(a, origin), inside(b, origin + offset)
    outs = {n: everything[n] for n in outs}
    return {n: everything[n] for n in call}, outs, everything[first], everything[other]


@pytest.mark.parametrize(("op", "first", "other"), overlap_pairs())
@pytest.mark.parametrize("name", ["reference", "cute"])
def test_overlap(op: str, first: str, other: str, name: str, compiled: Jit) -> None:
    """Ranges may touch but not overlap; exactly the same memory is allowed where an update in place is."""
    call = make(op)
    outs = outs_of(op, call)
    a, b = extent_bytes((call | outs)[first]), extent_bytes((call | outs)[other])
    # the nearest aligned distances that just touch, the nearest that just overlap, the least ones, and none
    touching = {-(-a // 16) * 16: True, -(-(-b // 16) * 16): True}
    overlapping = {o: False for o in ((a - 1) // 16 * 16, -((b - 1) // 16 * 16), 16, -16) if -b < o < a}
    cases = touching | overlapping | {0: (first, other) in OPS[op].in_place}
    with backend(name):
        run(op, make(op), **outs_of(op, make(op)))  # leaves a plan that must not let an overlap through
        for offset, allowed in cases.items():
            call, outs, one, two = place(op, first, other, offset)
            assert two.data_ptr() - one.data_ptr() == offset
            if allowed:
                run(op, call, **outs)
                run(op, call, **outs)
            else:
                says = rf"^{op}: {first}: got memory that overlaps {other}, allowed no overlap with {other}"
                for _ in range(2):
                    with untouched(call, outs), pytest.raises(InvalidArgument, match=says):
                        run(op, call, **outs)


@pytest.mark.parametrize(("op", "out", "into"), [(op, *pair) for op in OPS for pair in OPS[op].in_place])
def test_update_in_place_is_exact(op: str, out: str, into: str) -> None:
    call = make(op)
    expected = run(op, call)
    outs = outs_of(op, call)
    outs[out] = call[into]
    results = run(op, call, **outs)
    assert results[OPS[op].outs.index(out)] is call[into]
    for result, want in zip(results, expected, strict=True):
        assert torch.equal(result, want)


def test_state_may_not_overlap_inputs_in_the_functional_form() -> None:
    """No output is given, but the state is written."""
    call, _, state, _ = place("gdn_packed_decode", "state", "mixed_qkv", 1024)
    says = "^gdn_packed_decode: state: got memory that overlaps mixed_qkv"
    with untouched(call), pytest.raises(InvalidArgument, match=says):
        ops.gdn_packed_decode(**call)
    assert state.data_ptr() < call["mixed_qkv"].data_ptr()


def test_strided_arguments_of_gdn() -> None:
    """The views that serving code has: slices of one projection, a padded pool, a column of indices. Same
    results."""
    call = make("gdn_packed_decode", rows=5)
    expected_state = call["state"].clone()
    expected = ops.gdn_packed_decode(**(call | {"state": expected_state}))

    def column(t: Tensor, width: int, start: int) -> Tensor:
        wide = torch.zeros((t.shape[0], width), dtype=t.dtype)
        wide[:, start : start + t.shape[1]] = t
        return wide[:, start : start + t.shape[1]]

    pool = torch.zeros(1, 4 * 64 * 64 + 160)
    state = pool[:, : 4 * 64 * 64].view(1, 4, 64, 64)
    state.copy_(call["state"])
    viewed = call | {
        "mixed_qkv": column(call["mixed_qkv"], 1024, 64),
        "a": column(call["a"], 11, 3),
        "b": column(call["b"], 9, 5),
        "A_log": torch.cat([torch.zeros(1), call["A_log"]])[1:],
        "dt_bias": torch.cat([torch.zeros(3), call["dt_bias"]])[3:],
        "state": state,
        "state_indices": torch.stack([call["state_indices"], call["state_indices"] + 7], 1)[:, 0],
    }
    assert torch.equal(ops.gdn_packed_decode(**viewed), expected)
    assert torch.equal(state, expected_state)


def test_strides_of_single_elements_mean_nothing() -> None:
    """One head: the last dimension of a and b, and the inner ones of the state, have one element and any
    stride."""
    config = replace(SMALL, key_heads=1, value_heads=1)
    call = make("gdn_packed_decode", config=config)
    expected = ops.gdn_packed_decode(**(call | {"state": call["state"].clone()}))
    call["a"] = call["a"].flatten().clone().as_strided((ROWS, 1), (1, 5))
    call["state"] = call["state"].flatten().clone().as_strided((1, 1, 64, 64), (7, 3, 64, 1))
    assert torch.equal(ops.gdn_packed_decode(**call), expected)


def test_scalars_of_other_types() -> None:
    """What converts exactly is taken: integers for floats, numpy numbers."""
    numpy = pytest.importorskip("numpy")
    call = make("grouped_gemma_rmsnorm") | {"eps": 1.0}
    expected = ops.grouped_gemma_rmsnorm(**call)
    for eps, group in ((1, 64), (numpy.float64(1), numpy.int64(64)), (numpy.float32(1), numpy.int32(64))):
        assert torch.equal(ops.grouped_gemma_rmsnorm(**(call | {"eps": eps, "group_size": group})), expected)


def test_dtypes_of_a_call_agree() -> None:
    chosen = ("grouped_gemma_rmsnorm", "hc_gate", "hc_apply", "hc_apply_norm", "hc_boundary", "hc_mix")
    for op in (*chosen, "shared_gate"):
        halves = make(op, config=replace(SMALL, dtype=F16))
        assert run(op, halves)
        first, *others = [n for n, t in tensors(halves).items() if t.dtype == F16]
        for name in others:
            mixed = halves | {name: halves[name].bfloat16()}
            with pytest.raises(
                InvalidArgument, match=f"^{op}: {name}: got dtype torch.bfloat16, allowed torch.float16$"
            ):
                run(op, mixed)
        assert halves[first].dtype == F16
