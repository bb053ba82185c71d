"""What an operator is and what can serve it.

An `Op` is a contract (contracts.py) and the reference function of the same name; a `Kernel` or `Composite` is
an implementation, registered by one entry in kernels.py. Everything else (schemas, dispatch, explain,
warm-up, ahead-of-time builds) reads these two tables.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from bindings import reference, targets
from bindings.checks import ADDRESS_MODULUS, Checker, Output, Pair
from bindings.errors import InvalidArgument

DTYPE_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "int32",
    torch.int64: "int64",
}

_SCHEMA_TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "float": "float",
    "float | None": "float?",
    "int": "int",
}


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and dtypes of a model's decode step on one rank; the defaults are Qwen3.8-Flash-Next at TP4.

    dt_bias_dtype: None is the activations'. shared: "gated", "plain" or "none", how the shared expert enters.
    """

    hidden: int = 2560
    streams: int = 4
    low_rank: int = 320
    top_k: int = 10
    key_heads: int = 4
    value_heads: int = 12
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    expert_weight_dtype: torch.dtype = torch.float32
    shared: str = "gated"
    state_dtype: torch.dtype = torch.float32
    index_dtype: torch.dtype = torch.int32
    dt_bias_dtype: torch.dtype | None = torch.float32

    @property
    def width(self) -> int:
        """Width of the residual: streams * hidden."""
        return self.streams * self.hidden


Sample = Mapping[str, Any]
"""A call's arguments: `(shape, dtype)` for a tensor, None for an absent one, a number for a scalar."""


@dataclass(frozen=True)
class Op:
    """An operator: its contract and what follows from the contract's signature.

    contract: checks a call through a `Checker`. sample: a call with a model's shapes. outs: the `out`
    arguments. mutates: inputs that are updated. in_place: (out, input) pairs that may be the same memory.
    axes: the fields of `ModelConfig` on which compiled variants depend, and their values.
    """

    name: str
    contract: Callable[..., None]
    sample: Callable[[ModelConfig, int], Sample]
    outs: tuple[str, ...]
    mutates: tuple[str, ...] = ()
    in_place: tuple[tuple[str, str], ...] = ()
    axes: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    @cached_property
    def _parameters(self) -> tuple[inspect.Parameter, ...]:
        return tuple(inspect.signature(self.contract).parameters.values())[1:]  # without the checker

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of the tensor arguments; in every signature they precede the scalars."""
        return tuple(p.name for p in self._parameters if p.annotation.startswith("Tensor"))

    @cached_property
    def scalars(self) -> tuple[str, ...]:
        """Names of the other arguments."""
        return tuple(p.name for p in self._parameters if not p.annotation.startswith("Tensor"))

    @cached_property
    def defaults(self) -> tuple[Any, ...]:
        """Defaults of the trailing arguments that have one."""
        return tuple(p.default for p in self._parameters if p.default is not p.empty)

    @cached_property
    def signature(self) -> inspect.Signature:
        """Of the public function: the contract's arguments, and keyword-only outputs."""
        kinds = inspect.Parameter
        outs = [kinds(n, kinds.KEYWORD_ONLY, default=None, annotation="Tensor | None") for n in self.outs]
        return inspect.Signature([*self._parameters, *outs])

    @property
    def reference(self) -> Callable[..., Any]:
        """The torch reference: functional, arguments as the contract's."""
        function: Callable[..., Any] = getattr(reference, self.name)
        return function

    def schemas(self) -> tuple[str, str]:
        """The torch schemas of the functional overload and of `.out`."""
        marks = dict(zip((*self.mutates, *self.outs), "abcd", strict=False))

        def declare(p: inspect.Parameter) -> str:
            kind = _SCHEMA_TYPES[p.annotation]
            kind = f"Tensor({marks[p.name]}!)" if p.name in marks else kind
            return f"{kind} {p.name}" + ("" if p.default is p.empty else f"={p.default}")

        args = ", ".join(declare(p) for p in self._parameters)
        outs = ", ".join(f"Tensor({marks[n]}!) {n}" for n in self.outs)
        returns = "Tensor" if len(self.outs) == 1 else f"({', '.join(['Tensor'] * len(self.outs))})"
        return f"{self.name}({args}) -> {returns}", f"{self.name}.out({args}, *, {outs}) -> ()"

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
        """Splits a public call's arguments; TypeError where they do not fit the signature."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        outs = tuple(given[n] for n in self.outs)
        return Arguments(
            tuple(given[n] for n in self.inputs),
            tuple(given[n] for n in self.scalars),
            outs if any(o is not None for o in outs) else (),
        )

    def examine(self, arguments: Arguments, *, concrete: bool = True) -> Call:
        """Checks a call against the contract; InvalidArgument names the first breach. Allocates nothing."""
        check = Checker(self.name, dict(zip(self.outs, arguments.outs, strict=False)), concrete)
        self.contract(check, *arguments.inputs, *arguments.scalars)
        pairs: tuple[Pair, ...] = ()
        if concrete:
            written = (*self.mutates, *(n for n in self.outs if n in check.tensors))
            pairs = tuple(check.pairs(written, self.in_place))
        scalars = tuple(
            value if value is None or isinstance(value, (int, float)) else float(value)
            for value in arguments.scalars
        )
        return Call(
            self, check.tensors, check.dims, tuple(check.outputs), pairs, scalars, check.kernel_scalars
        )

    def new_call(self, config: ModelConfig, rows: int, device: torch.device | str) -> Arguments:
        """A call of `sample`'s shapes with uninitialised tensors on `device` ("meta": without memory)."""
        sample = self.sample(config, rows)

        def tensor(name: str) -> Tensor | None:
            entry = sample.get(name)
            return None if entry is None else torch.empty(entry[0], dtype=entry[1], device=device)

        scalars = tuple(sample.get(p.name, p.default) for p in self._parameters if p.name in self.scalars)
        return Arguments(tuple(tensor(n) for n in self.inputs), scalars, ())


@dataclass(frozen=True)
class Arguments:
    """A call's arguments: tensors (None where absent), scalars, outputs (empty in the functional form)."""

    inputs: tuple[Any, ...]
    scalars: tuple[Any, ...]
    outs: tuple[Any, ...]


@dataclass(frozen=True)
class Call:
    """A call that passed its contract: what guards and constexpr choices may look at.

    tensors: those present, inputs and given outputs. dims: extents by the contract's symbols. scalars: the
    contract's; kernel_scalars: the run-time ones that a compiled kernel takes after its tensors. placed: the
    device that the tensors, meta ones, stand for some on.
    """

    op: Op
    tensors: Mapping[str, Tensor]
    dims: Mapping[str, int]
    outputs: tuple[Output, ...]
    pairs: tuple[Pair, ...]
    scalars: tuple[Any, ...]
    kernel_scalars: tuple[float, ...]
    placed: torch.device | None = None

    def __getitem__(self, symbol: str) -> int:
        return self.dims[symbol]

    @property
    def device(self) -> torch.device:
        """The one device of all tensors, or `placed`."""
        return self.placed or next(iter(self.tensors.values())).device

    @property
    def rows(self) -> int:
        """T, or B: the number of rows."""
        return self.dims["B"] if "B" in self.dims else self.dims["T"]

    def dtype(self, name: str) -> str:
        """The name of a tensor's dtype as kernels spell it."""
        return DTYPE_NAMES[self.tensors[name].dtype]

    def has(self, name: str) -> bool:
        """Whether an optional tensor is present."""
        return name in self.tensors

    def aligned(self, names: Sequence[str]) -> bool:
        """Whether base addresses and outer strides of the named tensors (those present) are multiples of 32
        bytes.

        Outputs yet to be allocated are: their rows are as wide as those of an input, and torch aligns
        more."""
        return all(
            t.data_ptr() % ADDRESS_MODULUS == 0
            and all(
                s * t.element_size() % ADDRESS_MODULUS == 0
                for size, s in zip(t.shape[:-1], t.stride()[:-1], strict=True)
                if size != 1
            )
            for t in (self.tensors[n] for n in names if n in self.tensors)
        )


@dataclass(frozen=True)
class Guard:
    """A condition that an implementation puts on a call. got: what the call has, for messages."""

    description: str
    holds: Callable[[Call], bool]
    got: Callable[[Call], Any]


class NotGranted(RuntimeError):  # noqa: N818
    """Raised by a launch function that the device does not grant its launch. Nothing was launched, and from
    here on a guard of the implementation says so: the call is to be resolved again."""

    def __init__(self) -> None:
        super().__init__("the device does not grant this launch; resolved again, the call gets another one")


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """Something that serves an operator on the "cute" backend."""

    op: str
    guards: tuple[Guard, ...] = ()

    @property
    def launches(self) -> int | None:
        """The kernels of this project that one call launches; None for a path of library calls."""
        return None

    @property
    def name(self) -> str:
        """What `explain` calls it."""
        raise NotImplementedError

    def specialise(self, call: Call, target: str) -> dict[str, Any]:
        """The constexpr parameters of a call."""
        raise NotImplementedError

    def load(self, target: str, params: Mapping[str, Any]) -> Callable[..., Any]:
        """The launch function: tensors (None where absent), outputs, then `kernel_scalars`. It may raise
        NotGranted."""
        raise NotImplementedError

    def rows_to_load(self, rows: int) -> int:
        """The rows of a call that leaves nothing to be loaded for a call of `rows` rows."""
        return rows


@dataclass(frozen=True, kw_only=True)
class Kernel(Implementation):
    """A compiled device kernel.

    module: has `build(target, **params)`. params: constexpr parameters of a call, without `vec_bytes`.
    vectors: the tensors that it accesses by vectors. tuning: parameters that may take other values than
    `params` chooses, with the same results.
    """

    module: str
    params: Callable[[Call], dict[str, Any]]
    vectors: tuple[str, ...]
    tuning: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.module

    @property
    def launches(self) -> int | None:
        return 1

    def specialise(self, call: Call, target: str) -> dict[str, Any]:
        widest = targets.vector_bytes(target)
        return {**self.params(call), "vec_bytes": widest if call.aligned(self.vectors) else 16}

    def load(self, target: str, params: Mapping[str, Any]) -> Callable[..., Any]:
        from bindings import emulated, jit

        return (emulated.get if emulated.serving() else jit.get)(self.module, target, params)

    def rows_to_load(self, rows: int) -> int:
        return 0  # the compiled function loads its module whatever the rows, and launches nothing for none

    def variants(
        self, target: str, model: ModelConfig | None = None, *, sample: bool = False
    ) -> Iterator[dict[str, Any]]:
        """Every combination of the operator's axes, tuning values and access widths: all that calls of the
        model can ask for. sample: tuning values and 16-byte accesses for the model's own dtypes alone."""
        op, model = OPS[self.op], model or ModelConfig()
        seen: list[dict[str, Any]] = []

        def of(config: ModelConfig) -> dict[str, Any]:
            return self.specialise(op.examine(op.new_call(config, 1, "meta"), concrete=False), target)

        own = of(model)
        for values in itertools.product(*op.axes.values()):
            params = of(replace(model, **dict(zip(op.axes, values, strict=True))))
            tuned = itertools.product(*self.tuning.values())
            for chosen in tuned if params == own or not sample else ():
                for vec_bytes in (params["vec_bytes"], 16):
                    seen.append(
                        {**params, **dict(zip(self.tuning, chosen, strict=True)), "vec_bytes": vec_bytes}
                    )
            seen.append(params)
        return iter({tuple(params.items()): params for params in seen}.values())


@dataclass(frozen=True, kw_only=True)
class Composite(Implementation):
    """A path made of library calls, which nothing has to compile. run: as a kernel's launch function."""

    path: str
    run: Callable[..., Any]

    @property
    def name(self) -> str:
        return self.path

    def specialise(self, call: Call, target: str) -> dict[str, Any]:
        return {}

    def load(self, target: str, params: Mapping[str, Any]) -> Callable[..., Any]:
        return self.run


OPS: dict[str, Op] = {}
"""Every operator by name, in the order of contracts.py."""

IMPLEMENTATIONS: dict[str, list[Implementation]] = {}
"""Per operator, in order of preference: the first whose guards all hold serves the call."""


def contract(
    *,
    outs: tuple[str, ...],
    sample: Callable[[ModelConfig, int], Sample],
    mutates: tuple[str, ...] = (),
    in_place: tuple[tuple[str, str], ...] = (),
    axes: Mapping[str, Sequence[Any]] | None = None,
) -> Callable[[Callable[..., None]], Op]:
    """Declares an operator: decorates its contract, whose name and annotated arguments are the operator's."""

    def declare(function: Callable[..., None]) -> Op:
        axes_ = dict(axes or {})
        unknown = set(axes_) - {f.name for f in fields(ModelConfig)}
        if unknown:
            raise ValueError(
                f"{function.__name__}: no such field of ModelConfig: {', '.join(sorted(unknown))}"
            )
        op = Op(function.__name__, function, sample, outs, mutates, in_place, axes_)
        OPS[op.name] = op
        return op

    return declare


def register(implementation: Implementation) -> None:
    """Adds an implementation behind those that its operator already has."""
    IMPLEMENTATIONS.setdefault(OPS[implementation.op].name, []).append(implementation)


def op_named(op: str | Callable[..., Any]) -> Op:
    """The operator of a name or of a function of `bindings.ops`."""
    name = op if isinstance(op, str) else getattr(op, "__name__", repr(op))
    if name not in OPS:
        raise InvalidArgument(f"op: got {name!r}, allowed {', '.join(OPS)}")
    return OPS[name]
