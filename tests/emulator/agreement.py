"""This project's sm_90a kernels on an H200 and in the emulator, on the same inputs.

    python -m tests.emulator.agreement record FILE [OP...]    on a GPU: runs the cases there and keeps the bits
    python -m tests.emulator.agreement [FILE]                 here: runs them in the emulator, prints what differs

Kernels without approximate instructions and without matrix instructions agree bit for bit. The ISA bounds ex2.approx.ftz by 2 ulp,
rcp.approx by 1 ulp and rsqrt.approx by a relative 2^-22.9; the emulator rounds the exact value once. What that may change is carried
through the kernel's arithmetic here, an operator at a time, every later rounding of fp32 included. A result of 16 bits may further
be the neighbour, where the two values lie on both sides of a tie: of all elements about as many as the bound makes likely.
"""

from __future__ import annotations

import hashlib
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bindings import emulated
from bindings.tolerance import spacing, to_numpy
from tests import harness
from tests.cases import named
from tests.draw import Inputs

RECORD = Path(__file__).with_name("h200.npz")
NAMES = ("T3-bf16-small", "T3-fp16-small", "bf16-outliers", "T1-bf16-model")
MORE = {"hc_mix": ("bf16-H=640-C=4-R=320-T=17", "fp16-H=640-C=4-R=320-T=17")}
SAMPLE = 4096
"""Of a recurrent state so many elements are kept; of everything else all."""

F64 = NDArray[np.float64]
ULP, HALF = 2.0**-23, 2.0**-24  # relative: neighbours in fp32, and one rounding
EX2, RCP, RSQRT = 2 * ULP + HALF, ULP + HALF, 2.0**-22.9 + HALF
EXP = EX2 + ULP  # the result is scaled
SIGMOID = EX2 + ULP + RCP  # 1 + e rounds in between
NORM = RSQRT + 2 * ULP  # two products
SUM = 16 * ULP  # a sum of fp32 whose terms differ, by the depth of its tree


def bits(x: Tensor) -> NDArray[Any]:
    return x.detach().cpu().contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32).numpy()


def kept(op: str, inputs: Inputs, results: tuple[Tensor, ...]) -> list[Tensor]:
    """The part of the results that is compared."""
    if op != "gdn_packed_decode":
        return list(results)
    index = inputs["state_indices"].cpu().long()
    held = index[(index >= 0) & (index < results[1].shape[0])]
    flat = results[1].cpu()[held].flatten()
    return [results[0], flat[:: max(1, flat.numel() // SAMPLE)]]


def digest(inputs: Inputs) -> bytes:
    """Of the inputs: the record's are drawn anew from their names."""
    h = hashlib.sha256()
    for _, value in sorted(inputs.items()):
        if isinstance(value, Tensor):
            h.update(value.contiguous().view(torch.uint8).numpy().tobytes())
    return h.digest()


def results(op: str, name: str, backend: harness.Backend) -> tuple[Inputs, list[Tensor]]:
    """A case's inputs and results."""
    inputs = named(op, name).inputs()
    placed = harness.Placement(op, inputs, backend.device)
    outs = placed.outputs()
    return inputs, [x.cpu() for x in kept(op, inputs, harness.call(op, placed.arguments, backend, outs))]


# --- what may differ -------------------------------------------------------------------------------------
# Each takes inputs, the device's and the emulator's results in float64, and gives for each result a bound of the
# difference before the last rounding.


def _none(inputs: Inputs, device: list[F64], here: list[F64]) -> list[F64]:
    return [np.zeros_like(x) for x in device]


def _norm(inputs: Inputs, device: list[F64], here: list[F64]) -> list[F64]:
    return [NORM * np.abs(device[0])]


def _apply(inputs: Inputs, device: list[F64], here: list[F64]) -> list[F64]:
    partials = to_numpy(inputs["partials"])
    T, _, C = partials.shape
    gate = 2 / (1 + np.exp(-partials.sum(axis=1) / C))
    term = gate[:, :, None] * to_numpy(inputs["block"])[:, None, :]
    return [SIGMOID * np.abs(term).reshape(T, -1) + ULP * np.abs(device[0])]


def _apply_norm(inputs: Inputs, device: list[F64], here: list[F64]) -> list[F64]:
    """The norm reads the rounded sums: where those differ, their share of the row's square and of the element too."""
    (first,) = _apply(inputs, device, here)
    C = inputs["partials"].shape[2]
    a, b, y = (x.reshape(x.shape[0], C, -1) for x in (device[0], here[0], device[1]))
    moved = np.abs(a - b)
    square = (np.abs(a) * moved).sum(-1, keepdims=True) / np.maximum((a * a).sum(-1, keepdims=True), 1e-30)
    any_moved = moved.any(-1, keepdims=True)
    direct = np.where(moved > 0, moved * np.abs(y) / np.maximum(np.abs(a), 1e-30), 0.0)
    return [
        first,
        (np.abs(y) * (NORM + any_moved * (2 * square + SUM)) + 2 * direct).reshape(device[1].shape),
    ]


def _boundary(inputs: Inputs, device: list[F64], here: list[F64]) -> list[F64]:
    first, second = _apply_norm(inputs, device, here)
    weight = np.abs(to_numpy(inputs["inject_weight"]))
    T, S, C = device[2].shape
    moved, size = np.abs(device[1] - here[1]), np.abs(device[1])
    split = [
        (x.reshape(T, S, 1, -1) * weight.reshape(C, S, -1).swapaxes(0, 1)).sum(-1) for x in (moved, size)
    ]
    return [first, second, split[0] + (split[0] > 0) * SUM * split[1]]


def _gate_of(inputs: Inputs, device: list[F64], here: list[F64]) -> list[F64]:
    return [SIGMOID * np.abs(device[0])]


def _mix(inputs: Inputs, device: list[F64], here: list[F64]) -> list[F64]:
    """Two sums of tensor cores, each within K * 2^-23 * sum |a*b|, carried on; and, much less, what the contract lets a result be
    off by."""
    x, down, up = (to_numpy(inputs[n]) for n in ("normed", "w_down", "w_up"))
    C = inputs.get("streams", 4)
    dtype = inputs["normed"].dtype
    z = x @ down.T / C
    with np.errstate(over="ignore"):
        inner = z / (1 + np.exp(-z))
    first = x.shape[1] * ULP * (np.abs(x) @ np.abs(down).T) / C
    moved = 1.1 * first + (SIGMOID + ULP) * np.abs(inner) + spacing(inner, dtype)
    second = moved @ np.abs(up).T + up.shape[1] * ULP * (np.abs(inner) @ np.abs(up).T)
    whole = sum(np.split((second / 4 + SIGMOID) * np.abs(x), C, axis=1)) / C
    least = (1.5e-4 if dtype == torch.bfloat16 else 8e-5) * np.abs(device[0]).max(axis=1, keepdims=True)
    return [np.minimum(whole, np.broadcast_to(least, whole.shape))]


def _gdn(inputs: Inputs, device: list[F64], here: list[F64]) -> list[F64]:
    qkv, pool = to_numpy(inputs["mixed_qkv"]), to_numpy(inputs["state"])
    slots, heads, dim, _ = pool.shape
    key_heads = (qkv.shape[1] // dim - heads) // 2
    x = to_numpy(inputs["a"]) + to_numpy(inputs["dt_bias"])
    rate = np.exp(to_numpy(inputs["A_log"]))
    with np.errstate(over="ignore"):
        soft = np.where(x > 20, x, np.log1p(np.exp(x)))
    g = rate * soft
    moved_g = rate * np.where(x > 20, 0, EXP + ULP + 2 * ULP * soft) + g * (EXP + ULP)
    decay, moved_decay = np.exp(-g), moved_g + EXP + 2 * ULP * g + ULP
    beta = 1 / (1 + np.exp(-to_numpy(inputs["b"])))
    out, state = np.zeros_like(device[0]), []
    for row, slot in enumerate(inputs["state_indices"].tolist()):
        if not 0 <= slot < slots:
            continue
        head = qkv[row].reshape(-1, dim)
        for h in range(heads):
            source = h * key_heads // heads
            q, k, v = head[source], head[key_heads + source], head[2 * key_heads + h]
            q = np.abs(q) / np.sqrt(q @ q + 1e-6) * inputs.get("scale", dim**-0.5)
            k = k / np.sqrt(k @ k + 1e-6)
            old = pool[slot, h] * decay[row, h]
            terms = np.abs(old) @ np.abs(k)
            seen = terms * (moved_decay[row, h] + RSQRT + 2 * ULP + SUM)
            left = v - old @ k
            new = left * beta[row, h]
            moved_new = beta[row, h] * (seen + ULP * np.abs(left)) + np.abs(new) * (SIGMOID + ULP)
            after = old + np.outer(new, k)
            moved = np.abs(old) * moved_decay[row, h] + np.outer(
                moved_new + np.abs(new) * (RSQRT + ULP), np.abs(k)
            )
            moved = moved + 2 * ULP * (np.abs(after) + np.abs(old))
            state.append(moved)
            out[row, 0, h] = moved @ q + (np.abs(after) @ q) * (RSQRT + 3 * ULP + SUM)
    flat = np.stack(state).ravel()
    return [out, flat[:: max(1, flat.size // SAMPLE)]]


@dataclass(frozen=True)
class Rule:
    """approximate: the approximate instructions of the kernel. matrix: it has matrix instructions. bound: see above."""

    approximate: frozenset[str]
    matrix: bool
    bound: Callable[[Inputs, list[F64], list[F64]], list[F64]]


def _rule(
    bound: Callable[[Inputs, list[F64], list[F64]], list[F64]], *approximate: str, matrix: bool = False
) -> Rule:
    return Rule(frozenset(approximate), matrix, bound)


RULES: Mapping[str, Rule] = {
    "hc_gate": _rule(_none),
    "moe_finalize": _rule(_none),
    "grouped_gemma_rmsnorm": _rule(_norm, "rsqrt"),
    "hc_apply": _rule(_apply, "ex2", "rcp"),
    "hc_apply_norm": _rule(_apply_norm, "ex2", "rcp", "rsqrt"),
    "hc_boundary": _rule(_boundary, "ex2", "rcp", "rsqrt"),
    "shared_gate": _rule(_gate_of, "ex2", "rcp"),
    "gdn_packed_decode": _rule(_gdn, "ex2", "rcp", "rsqrt"),
    "hc_mix": _rule(_mix, "ex2", "rcp", matrix=True),
}


def cases() -> list[tuple[str, str]]:
    """(operator, name) of every case; moe_finalize is bf16 only."""
    names = {op: [n for n in NAMES if op != "moe_finalize" or "fp16" not in n] for op in RULES}
    return [(op, n) for op in RULES for n in (*names[op], *MORE.get(op, ()))]


@dataclass(frozen=True)
class Difference:
    """Of one result: elements that differ, of how many, the largest difference and how far it uses its bound, and how many elements
    the bound makes likely to differ."""

    differ: int
    of: int
    largest: float
    used: float
    likely: float

    @property
    def ok(self) -> bool:
        return self.used <= 1 and self.differ <= self.likely


def compare(
    op: str, name: str, record: Mapping[str, NDArray[Any]], listen: Callable[[str], str] | None = None
) -> list[Difference]:
    """One case in the emulator against the record; `listen` is given the PTX and returns it. Raises
    ValueError if its inputs are others."""
    with emulated.options(target="sm_90a", brief=True, rewrite=listen):
        inputs, here = results(op, name, harness.Backend("emulator", "cpu"))
    if bytes(record[f"{op}|{name}|inputs"]) != digest(inputs):
        raise ValueError(f"{op}, {name}: the inputs are not those of the record")
    device = [
        torch.from_numpy(record[f"{op}|{name}|{i}"]).view(x.dtype).reshape(x.shape)
        for i, x in enumerate(here)
    ]
    bounds = RULES[op].bound(inputs, [to_numpy(x) for x in device], [to_numpy(x) for x in here])
    found = []
    for a, b, bound in zip(here, device, bounds, strict=True):
        differ = ~harness.same_bits(a, b).numpy()
        x, y = to_numpy(a), to_numpy(b)
        step = (
            spacing(np.maximum(np.abs(x), np.abs(y)), a.dtype) if a.element_size() == 2 else np.zeros(x.shape)
        )
        size = np.where(differ, np.abs(x - y), 0.0)
        allowed = np.where(bound > 0, bound + step, 0.0)
        with np.errstate(invalid="ignore", divide="ignore"):
            used = np.where(differ, np.where(allowed > 0, size / allowed, np.inf), 0.0)
            share = np.where(bound > 0, np.minimum(1.0, bound / step), 0.0)
        likely = 3 + 2 * float(share.sum()) if bound.any() else 0.0
        likely = likely if a.element_size() == 2 else float("inf")
        found.append(Difference(int(differ.sum()), differ.size, float(size.max()), float(used.max()), likely))
    return found


def record(path: Path, ops: Sequence[str] = ()) -> None:
    """Runs the cases (of some operators) on this machine's GPU and keeps the bits."""
    out: dict[str, NDArray[Any]] = {}
    for op, name in cases():
        if ops and op not in ops:
            continue
        inputs, found = results(op, name, harness.Backend("cute", "cuda:0"))
        for i, x in enumerate(found):
            out[f"{op}|{name}|{i}"] = bits(x)
        out[f"{op}|{name}|inputs"] = np.frombuffer(digest(inputs), np.uint8)
    np.savez_compressed(path, **out)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {path}, {path.stat().st_size} bytes")


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["record"] and len(arguments) > 1 and set(arguments[2:]) <= set(RULES):
        if not torch.cuda.is_available():
            print("agreement: torch sees no CUDA device; nothing was recorded", file=sys.stderr)
            return 2
        record(Path(arguments[1]), arguments[2:])
        return 0
    if len(arguments) > 1 or arguments[:1] == ["record"]:
        print(__doc__, file=sys.stderr)
        return 2
    given = Path(arguments[0]) if arguments else RECORD
    if not given.is_file() or not zipfile.is_zipfile(given):
        print(f"agreement: {given}: no record; `record FILE` on a GPU makes one", file=sys.stderr)
        return 2
    known, good = np.load(given), True
    if missing := [f"{op} {name}" for op, name in cases() if f"{op}|{name}|inputs" not in known]:
        print(f"agreement: {given}: nothing of {missing[0]} in it", file=sys.stderr)
        return 2
    for op, name in cases():
        for i, d in enumerate(compare(op, name, known)):
            told = (
                f"{d.differ} of {d.of} differ, by {d.largest:.3g}, {d.used:.2f} of the bound"
                if d.differ
                else f"{d.of} equal"
            )
            print(f"{op:22s} {name:25s} {i}  {told}{'' if d.ok else '  WRONG'}", flush=True)
            good &= d.ok
    return int(not good)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
