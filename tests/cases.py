"""The one table of cases that drives every backend; tests/draw.py draws their arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from tests import draw as d
from tests.draw import BF16, FP16, FP32, Draw, Inputs

DTYPES = {"bf16": BF16, "fp16": FP16}
ROWS = (0, 1, 2, 3, 4, 5, 8, 32, 33, 257)

Shape = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One call of one operator."""

    op: str
    name: str
    make: Callable[[Draw], Inputs]
    kind: str = "random"
    kernel: bool = True
    """Within the guards of the operator's CuTe kernel; forcing that backend elsewhere is an error."""
    sanitizer: bool = False
    """Small and quick: one of the subset that runs under compute-sanitizer."""

    @property
    def id(self) -> str:
        return f"{self.op}-{self.name}"

    def inputs(self, variant: int = 0) -> Inputs:
        """Fresh arguments on the CPU, by name; equal on every call, but for the values with another
        variant."""
        draw = Draw(f"{self.id}/{variant}")
        inputs = self.make(draw)
        d.KINDS[self.kind](draw, self.op, inputs)
        return inputs


@dataclass(frozen=True)
class Plan:
    """What the table holds for one operator.

    small: the shape that takes every number of rows and every kind of data. model: rows of the model's shape,
    by dtype; these are also the operator's dtypes. shapes: others, with three rows unless they say how many.
    kinds: changes of `small` for kinds of data that only some operators know. unguarded: shapes outside the
    CuTe kernel's guards.
    """

    op: str
    make: Callable[..., Inputs]
    small: Shape
    model: dict[str, tuple[int, ...]]
    shapes: tuple[Shape, ...]
    kinds: dict[str, Shape] = field(default_factory=dict)
    unguarded: tuple[Shape, ...] = ()

    def cases(self) -> Iterator[Case]:
        for label, model_rows in self.model.items():
            make = partial(self.make, dtype=DTYPES[label])
            small = partial(make, **self.small)
            for T in ROWS:
                yield Case(self.op, f"T{T}-{label}-small", partial(small, T=T), sanitizer=T in (1, 3))
            for T in model_rows:
                yield Case(self.op, f"T{T}-{label}-model", partial(make, T=T), sanitizer=T == 1)
            for kernel, shapes in ((True, self.shapes), (False, self.unguarded)):
                for shape in shapes:
                    made = partial(make, **{"T": 3, **shape})
                    yield Case(self.op, f"{label}-{_name(shape)}", made, kernel=kernel)
            for kind in ("outliers", "zeros", "negative_zeros", "nan", "nan_weight", "inf"):
                yield Case(self.op, f"{label}-{kind}", partial(small, T=3), kind)
            for kind, change in self.kinds.items():
                yield Case(self.op, f"{label}-{kind}", partial(small, T=3, **change), kind)


def _name(shape: Shape) -> str:
    return "-".join(f"{key}={str(value).removeprefix('torch.')}" for key, value in shape.items())


BOTH = {"bf16": (1, 2, 3, 4, 5, 8, 33), "fp16": (1, 3, 8, 32)}

HC_SHAPES: tuple[Shape, ...] = (
    dict(H=8, C=1),
    dict(H=16, C=8),
    dict(H=64, C=2),
    dict(H=1032, C=5),
    dict(H=5120, C=4),
    dict(H=16384, C=1),
)

HEADS = dict(Hk=1, Hv=2, D=64)
GAPS = dict(qkv_gap=64, head_gap=3, slot_gap=96, index_step=2)

PLANS = (
    Plan(
        "grouped_gemma_rmsnorm",
        d.norm,
        small=dict(groups=3, group_size=200),
        model=BOTH,
        shapes=(
            dict(groups=1, group_size=8),
            dict(groups=5, group_size=40),
            dict(groups=2, group_size=64),
            dict(groups=40, group_size=16),
            dict(groups=1, group_size=1032),
            dict(groups=2, group_size=5120),
            dict(groups=1, group_size=16384),
            dict(groups=2, group_size=64, eps=0.5),
        ),
        kinds=dict(overflow={}),
    ),
    Plan(
        "hc_gate",
        d.gate,
        small=dict(W=576, C=3),
        model=BOTH,
        shapes=(
            dict(W=64, C=1),
            dict(W=64, C=8),
            dict(W=128, C=2),
            dict(W=1024, C=5),
            dict(W=2560, C=1),
            dict(W=20480, C=8),
            dict(W=5120, C=4, T=64),
        ),
    ),
    Plan(
        "hc_apply",
        d.apply,
        small=dict(H=200, C=3),
        model=BOTH,
        shapes=HC_SHAPES,
        kinds=dict(overflow={}, order={}),
    ),
    Plan(
        "hc_apply_norm",
        d.apply_norm,
        small=dict(H=200, C=3),
        model=BOTH,
        shapes=(*HC_SHAPES, dict(H=64, C=4, eps=0.5)),
        kinds=dict(overflow={}, order={}),
    ),
    Plan(
        "hc_boundary",
        d.boundary,
        small=dict(H=192, C=2),
        model=BOTH,
        shapes=(
            dict(H=64, C=1),
            dict(H=8, C=8),
            dict(H=200, C=8),
            dict(H=1040, C=4),
            dict(H=4096, C=1),
            dict(H=4096, C=4),
            dict(H=2048, C=8),
            dict(H=64, C=4, eps=0.5),
            # By the two kernels of its halves: streams that splits straddle, wide rows.
            dict(H=64, C=3),
            dict(H=5120, C=4),
        ),
        kinds=dict(overflow={}, order={}),
    ),
    Plan(
        "hc_mix",
        d.mix,
        small=dict(H=64, C=4, R=32),
        model={"bf16": (1, 3, 8, 9, 16, 32, 33), "fp16": (2, 12, 32)},
        shapes=(
            dict(H=128, C=1, R=16),
            dict(H=256, C=2, R=80),
            dict(H=512, C=8, R=64),
            dict(H=1088, C=8, R=208, T=5),
            dict(H=640, C=4, R=320, T=17),
            # By GEMMs: no plan.
            dict(H=40, C=3, R=24),
            dict(H=128, C=1, R=8),
            dict(H=256, C=2, R=72),
        ),
    ),
    Plan(
        "shared_gate",
        d.shared,
        small=dict(H=200),
        model=BOTH,
        shapes=(dict(H=8), dict(H=64), dict(H=1032), dict(H=5120), dict(H=16384)),
    ),
    Plan(
        "moe_finalize",
        d.finalize,
        small=dict(H=200, K=3),
        model={"bf16": (1, 2, 3, 4, 5, 8, 33)},
        shapes=(
            dict(weight_dtype=FP32),
            dict(experts="ungated"),
            dict(experts="alone"),
            dict(H=264, experts="gated", weight_dtype=FP32),
            dict(H=264, experts="ungated", weight_dtype=FP32),
            dict(H=264, experts="alone", weight_dtype=FP32, T=33),
            dict(H=8, K=1),
            dict(H=64, K=32),
            dict(H=5120, K=8),
            dict(H=136, K=2, drop=0.0),
            dict(H=136, K=4, drop=1.0),
            dict(H=136, K=4, drop=1.0, experts="alone"),
            dict(H=136, K=4, P=0),
            dict(H=136, K=4, P=1),
            dict(H=136, K=4, P=7, T=33),
        ),
        kinds=dict(overflow=dict(drop=0.0), order=dict(drop=0.0)),
    ),
    Plan(
        "gdn_packed_decode",
        d.gdn,
        small=HEADS,
        model={"bf16": (1, 2, 3, 5, 8, 33), "fp16": (1, 3)},
        shapes=(
            dict(Hk=1, Hv=1, D=64),
            dict(Hk=2, Hv=2, D=64),
            dict(Hk=2, Hv=8, D=64),
            dict(Hk=3, Hv=3, D=128),
            dict(Hk=2, Hv=10, D=128),
            HEADS | dict(index_dtype=torch.int64, T=8),
            HEADS | dict(state_dtype=BF16, T=8),
            HEADS | dict(bias_dtype=None),
            HEADS | dict(scale=0.3),
            HEADS | dict(live=False),
            HEADS | GAPS | dict(T=8),
            HEADS | GAPS | dict(T=5, D=128, state_dtype=BF16, index_dtype=torch.int64, bias_dtype=None),
            GAPS | dict(T=4, index_dtype=torch.int64),
            dict(T=4, state_dtype=BF16),
        ),
        kinds=dict(overflow=dict(scale=4.0)),
        # Rows and slots that do not start on 16 bytes.
        unguarded=(HEADS | dict(qkv_gap=1), HEADS | dict(slot_gap=2)),
    ),
)

CASES = tuple(case for plan in PLANS for case in plan.cases())


def named(op: str, name: str) -> Case:
    """The one case of that name."""
    (case,) = (case for case in CASES if (case.op, case.name) == (op, name))
    return case


def cases(*ops: str, **attributes: object) -> list[Case]:
    """Cases of these operators (of all, without any) with these attributes."""
    chosen = (case for case in CASES if not ops or case.op in ops)
    return [case for case in chosen if all(getattr(case, key) == value for key, value in attributes.items())]
