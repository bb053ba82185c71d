"""What is timed: pieces of work with the model's shapes, seeded inputs, our calls for them, and the check
of a result.

A piece is an operator, or `hc_gate_apply_norm`: the gate and the apply+norm behind one block, which other
implementations split differently. A result is judged against float64 (bindings.oracle) by the contract's
tolerance, on rows spread over the call; of every row it must be finite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bindings import oracle, reference, tolerance
from bindings.registry import ModelConfig
from bindings.tolerance import Exact

Results = Mapping[str, Tensor]
"""Results by name: those of `oracle.RESULTS`, or for gate partials the name and `.sum`: [T, S, C] whose
splits are not the contract's, or [T, C], of which the sum over the splits is compared."""

MODEL = ModelConfig()
EPS = 1e-6
CHECKED_ROWS = 4


class Check(NamedTuple):
    """A comparison with the exact result: the worst error as a fraction of what is allowed."""

    ok: bool
    worst: float
    detail: str


@dataclass(frozen=True)
class Case:
    """One piece of work.

    args: contract arguments by name. outs: tensors for our calls to write. bytes: the least it must move
    through device memory, each input read once and each output written once. reset: puts back what a call
    changes, or None. exact: exact results on the given rows, given the results that were got (a norm reads
    the combined rows that were made).
    """

    op: str
    rows: int
    args: dict[str, Any]
    outs: dict[str, Tensor]
    bytes: int
    exact: Callable[[list[int], Results], dict[str, Exact]]
    reset: Callable[[], None] | None = None
    extra: dict[str, Tensor] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return next(iter(self.outs.values())).device

    def checked_rows(self) -> list[int]:
        """The rows that are compared: at most CHECKED_ROWS, the first and the last among them."""
        if self.rows <= CHECKED_ROWS:
            return list(range(self.rows))
        return sorted({round(i * (self.rows - 1) / (CHECKED_ROWS - 1)) for i in range(CHECKED_ROWS)})

    def check(
        self,
        results: Results,
        allowance: float = 1.0,
        exact: Callable[[list[int], Results], dict[str, Exact]] | None = None,
    ) -> Check:
        """Compares `results` with the exact ones; each error may be `allowance` times the contract's
        tolerance.

        exact: another definition of exact, for work that differs from the contract by design. The
        contract's fractions of bit-equal elements are asked of an allowance of 1 alone.
        """
        rows = self.checked_rows()
        expected = (exact or self.exact)(rows, results)
        worst, details = 0.0, []
        for name, got in results.items():
            if name not in expected:
                details.append(f"{name}: no exact result of that name")
                continue
            if not torch.isfinite(got).all():
                details.append(f"{name}: not finite everywhere")
            # a pool's rows are slots, and the exact function picked those of the checked rows
            at = self.args["state_indices"][rows].long() if name.endswith(".state") else rows
            some = got[at]
            if name.endswith(".sum") and some.dim() == 3:
                some = some.sum(1)
            verdict = tolerance.check(name.removesuffix(".sum"), some, expected[name])
            share = verdict.max_err / verdict.tolerance if verdict.max_err else 0.0
            worst = max(worst, share)
            if share > allowance or (allowance == 1.0 and not verdict.ok):
                details.append(f"{name}: {verdict.detail or verdict}")
        missing = set(result_names(self.op)) - {name.removesuffix(".sum") for name in results}
        details += [f"{name}: not among the results" for name in sorted(missing)]
        return Check(not details, worst, "; ".join(details))

    def poison(self, results: Results) -> None:
        """Makes results unusable before a replay, so that what it does not write is seen. A state is an
        input too: it is reset instead."""
        for name, result in results.items():
            if not name.endswith(".state"):
                result.fill_(float("nan"))
        if self.reset is not None:
            self.reset()


class Inputs:
    """Seeded random tensors on a device. shuffle: GDN rows take slots in random order, not in their own."""

    def __init__(self, device: torch.device, seed: int = 0, *, shuffle: bool = False) -> None:
        self.device, self.shuffle = device, shuffle
        self.generator = torch.Generator(device=device).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype = MODEL.dtype) -> Tensor:
        values = torch.empty(shape, dtype=torch.float32, device=self.device)
        return values.normal_(generator=self.generator).mul_(scale).to(dtype)

    def uniform(self, *shape: int, low: float, high: float, dtype: torch.dtype = torch.float32) -> Tensor:
        values = torch.empty(shape, dtype=torch.float32, device=self.device)
        return values.uniform_(low, high, generator=self.generator).to(dtype)

    def order(self, count: int) -> Tensor:
        """A permutation of range(count)."""
        return torch.randperm(count, device=self.device, generator=self.generator)

    def slots(self, count: int) -> Tensor:
        """The slots of a pool in the order in which rows take them."""
        return self.order(count) if self.shuffle else torch.arange(count, device=self.device)

    def empty(self, *shape: int, dtype: torch.dtype = MODEL.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)


def _size(*values: Any) -> int:
    """Bytes of the tensors among `values`."""
    return sum(v.numel() * v.element_size() for v in values if isinstance(v, Tensor))


def _by_row(op: str, args: dict[str, Any], row_args: tuple[str, ...]) -> Callable[..., dict[str, Exact]]:
    """The oracle on some rows, for an operator whose rows are independent and whose `row_args` are indexed
    by row."""

    def exact(rows: list[int], results: Results) -> dict[str, Exact]:
        some = {name: value[rows] if name in row_args else value for name, value in args.items()}
        return oracle.exact(op, some)

    return exact


def norm(T: int, draw: Inputs) -> Case:
    args = {
        "x": draw.normal(T, MODEL.width, scale=2.0),
        "weight": draw.normal(MODEL.width, scale=0.2),
        "eps": EPS,
        "group_size": MODEL.hidden,
    }
    out = draw.empty(T, MODEL.width)
    op = "grouped_gemma_rmsnorm"
    bytes_ = _size(*args.values(), out)
    return Case(op, T, args, {"out": out}, bytes_, _by_row(op, args, ("x",)))


def gate(T: int, draw: Inputs) -> Case:
    args = {
        "normed": draw.normal(T, MODEL.width),
        "inject_weight": draw.normal(MODEL.streams, MODEL.width, scale=0.02),
    }
    out = draw.empty(T, reference.SPLITS, MODEL.streams, dtype=torch.float32)
    whole = _by_row("hc_gate", args, ("normed",))

    def exact(rows: list[int], results: Results) -> dict[str, Exact]:
        partials = whole(rows, results)["hc_gate"]
        return {"hc_gate": partials, "hc_gate.sum": Exact(partials.value.sum(1))}

    return Case("hc_gate", T, args, {"out": out}, _size(*args.values(), out), exact)


def _block_args(T: int, draw: Inputs) -> dict[str, Any]:
    return {
        "block": draw.normal(T, MODEL.hidden),
        "residual": draw.normal(T, MODEL.width, scale=2.0),
        "partials": draw.normal(T, reference.SPLITS, MODEL.streams, dtype=torch.float32),
    }


def apply(T: int, draw: Inputs) -> Case:
    args = _block_args(T, draw)
    out = draw.empty(T, MODEL.width)
    bytes_ = _size(*args.values(), out)
    return Case("hc_apply", T, args, {"out": out}, bytes_, _by_row("hc_apply", args, tuple(args)))


def _pair(T: int, draw: Inputs) -> dict[str, Tensor]:
    return {name: draw.empty(T, MODEL.width) for name in ("combined_out", "normed_out")}


def _apply_norm_exact(
    rows: list[int], results: Results, args: dict[str, Any], partials: Tensor
) -> dict[str, Exact]:
    """`partials` are those of the rows alone."""
    some = {name: args[name][rows] for name in ("block", "residual")}
    combined = results["hc_apply_norm.combined"][rows]
    rest = {"norm_weight": args["norm_weight"], "eps": args["eps"], "combined": combined}
    return oracle.exact("hc_apply_norm", {**some, "partials": partials, **rest})


def apply_norm(T: int, draw: Inputs) -> Case:
    args = {**_block_args(T, draw), "norm_weight": draw.normal(MODEL.width, scale=0.2), "eps": EPS}
    outs = _pair(T, draw)
    return Case(
        "hc_apply_norm",
        T,
        args,
        outs,
        _size(*args.values(), *outs.values()),
        lambda rows, results: _apply_norm_exact(rows, results, args, args["partials"][rows]),
    )


def boundary(T: int, draw: Inputs) -> Case:
    """A block's write, and the gate of the read that follows."""
    args = {
        **_block_args(T, draw),
        "norm_weight": draw.normal(MODEL.width, scale=0.2),
        "inject_weight": draw.normal(MODEL.streams, MODEL.width, scale=0.02),
        "eps": EPS,
    }
    outs = {
        **_pair(T, draw),
        "partials_out": draw.empty(T, reference.SPLITS, MODEL.streams, dtype=torch.float32),
    }

    def exact(rows: list[int], results: Results) -> dict[str, Exact]:
        some = {name: args[name][rows] for name in ("block", "residual", "partials")}
        fed = {name: results[f"hc_boundary.{name}"][rows] for name in ("combined", "normed")}
        found = oracle.exact("hc_boundary", {**args, **some, **fed})
        found["hc_boundary.partials.sum"] = Exact(found["hc_boundary.partials"].value.sum(1))
        return found

    return Case("hc_boundary", T, args, outs, _size(*args.values(), *outs.values()), exact)


def gate_apply_norm(T: int, draw: Inputs) -> Case:
    """A block's write, from the normed row and the block's output to the next residual and its norm: the
    gate, then apply+norm. `partials` is what the gate hands on."""
    args = {
        **gate(T, draw).args,
        "block": draw.normal(T, MODEL.hidden),
        "residual": draw.normal(T, MODEL.width, scale=2.0),
        "norm_weight": draw.normal(MODEL.width, scale=0.2),
        "eps": EPS,
    }
    outs = _pair(T, draw)
    partials = draw.empty(T, reference.SPLITS, MODEL.streams, dtype=torch.float32)

    def exact(rows: list[int], results: Results) -> dict[str, Exact]:
        gates = reference.hc_gate(args["normed"][rows], args["inject_weight"])
        return _apply_norm_exact(rows, results, args, gates)

    return Case(
        "hc_gate_apply_norm",
        T,
        args,
        outs,
        _size(*args.values(), *outs.values()),
        exact,
        extra={"partials": partials},
    )


def mix(T: int, draw: Inputs) -> Case:
    args = {
        "normed": draw.normal(T, MODEL.width),
        "w_down": draw.normal(MODEL.low_rank, MODEL.width, scale=0.02),
        "w_up": draw.normal(MODEL.width, MODEL.low_rank, scale=0.1),
        "streams": MODEL.streams,
    }
    out = draw.empty(T, MODEL.hidden)
    bytes_ = _size(*args.values(), out)
    return Case("hc_mix", T, args, {"out": out}, bytes_, _by_row("hc_mix", args, ("normed",)))


def shared_gate(T: int, draw: Inputs) -> Case:
    args = {"x": draw.normal(T, MODEL.hidden), "weight": draw.normal(MODEL.hidden, scale=0.02)}
    out = draw.empty(T, dtype=torch.float32)
    bytes_ = _size(*args.values(), out)
    return Case("shared_gate", T, args, {"out": out}, bytes_, _by_row("shared_gate", args, ("x",)))


def finalize(T: int, draw: Inputs) -> Case:
    """Rows of expert output lie scattered among as many that no slot names."""
    slots = T * MODEL.top_k
    weights = draw.uniform(T, MODEL.top_k, low=0.1, high=1.0)
    args = {
        "expert_out": draw.normal(2 * slots, MODEL.hidden),
        "permuted_idx": draw.order(2 * slots)[:slots].to(torch.int32),
        "expert_weights": weights / weights.sum(1, keepdim=True),
        "shared_out": draw.normal(T, MODEL.hidden),
        "shared_gate": draw.uniform(T, low=0.1, high=0.9),
    }
    out = draw.empty(T, MODEL.hidden)
    read = [value for name, value in args.items() if name != "expert_out"]
    bytes_ = _size(args["expert_out"]) // 2 + _size(*read, out)

    def exact(rows: list[int], results: Results) -> dict[str, Exact]:
        some = {name: value if name == "expert_out" else value[rows] for name, value in args.items()}
        some["permuted_idx"] = args["permuted_idx"].view(T, MODEL.top_k)[rows].flatten()
        return oracle.exact("moe_finalize", some)

    return Case("moe_finalize", T, args, {"out": out}, bytes_, exact)


def gdn_rows(args: dict[str, Any], initial: Tensor, rows: list[int]) -> dict[str, Any]:
    """The arguments of a GDN call on some of its rows alone, with a pool of just their states before the
    call."""
    some = {name: args[name][rows] for name in ("mixed_qkv", "a", "b")}
    return {
        **some,
        "A_log": args["A_log"],
        "dt_bias": args["dt_bias"],
        "state": initial[args["state_indices"][rows].long()],
        "state_indices": torch.arange(len(rows)),
    }


def gdn(B: int, draw: Inputs) -> Case:
    """Decays lie near 1, as a trained model's do, so that a state repeatedly updated keeps its magnitude."""
    heads, dim = MODEL.value_heads, MODEL.head_dim
    width = (2 * MODEL.key_heads + heads) * dim
    slots = B + 1  # a pool is never exactly full
    args = {
        "mixed_qkv": draw.normal(B, width),
        "a": draw.normal(B, heads),
        "b": draw.normal(B, heads),
        "A_log": draw.uniform(heads, low=0.0, high=1.5),
        "dt_bias": draw.uniform(heads, low=-7.0, high=-4.0),
        "state": draw.normal(slots, heads, dim, dim, scale=0.3, dtype=MODEL.state_dtype),
        "state_indices": draw.slots(slots)[:B].to(MODEL.index_dtype),
    }
    out = draw.empty(B, 1, heads, dim)
    initial = args["state"].clone()
    moved = 2 * B * heads * dim * dim * initial.element_size()
    small = [value for name, value in args.items() if name != "state"]

    def exact(rows: list[int], results: Results) -> dict[str, Exact]:
        return oracle.exact("gdn_packed_decode", gdn_rows(args, initial, rows))

    return Case(
        "gdn_packed_decode",
        B,
        args,
        {"out": out},
        moved + _size(*small, out),
        exact,
        reset=lambda: _copy(args["state"], initial),
        extra={"initial": initial},
    )


def _copy(to: Tensor, source: Tensor) -> None:
    to.copy_(source)


CASES: dict[str, Callable[[int, Inputs], Case]] = {
    "hc_gate": gate,
    "hc_apply_norm": apply_norm,
    "hc_gate_apply_norm": gate_apply_norm,
    "hc_boundary": boundary,
    "gdn_packed_decode": gdn,
    "grouped_gemma_rmsnorm": norm,
    "shared_gate": shared_gate,
    "hc_apply": apply,
    "moe_finalize": finalize,
    "hc_mix": mix,
}
"""Every piece of work by name, in the order in which a run takes them."""


def make(op: str, rows: int, device: torch.device, *, shuffle: bool = False) -> Case:
    """The case of `op` with `rows` rows, at least 1. Equal arguments give equal inputs on one kind of
    device. shuffle: as `Inputs`."""
    if rows < 1:
        raise ValueError(f"rows: got {rows}, at least 1")
    return CASES[op](rows, Inputs(device, shuffle=shuffle))


def result_names(op: str) -> tuple[str, ...]:
    """Names of a piece's results; the gate and apply+norm gives what its apply+norm gives."""
    return oracle.RESULTS["hc_apply_norm" if op == "hc_gate_apply_norm" else op]


def call_results(case: Case, returned: Any) -> Results:
    """The results of one of our calls by name, from what the public function returned."""
    values = returned if isinstance(returned, tuple) else (returned,)
    if case.op == "gdn_packed_decode":
        values = (*values, case.args["state"])
    return dict(zip(result_names(case.op), values, strict=True))
