"""Small valid calls of every operator, by argument name, and a stand-in for compiled kernels.

The stand-in makes the CuTe path of the dispatcher run on CPU tensors: the device reports a target, and what
the JIT hands out records its calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bindings import ops, reference
from bindings.checks import extent_bytes, held
from bindings.registry import IMPLEMENTATIONS, OPS, Kernel, ModelConfig
from cute_kernels.gdn.config import value_tile_for

SMALL = ModelConfig(hidden=64, streams=4, low_rank=16, top_k=3, key_heads=2, value_heads=4, head_dim=64)
ROWS = 3

Call = dict[str, Any]

KERNELS = [op for op in OPS if isinstance(IMPLEMENTATIONS[op][0], Kernel)]

WORKSPACES = ["hc_mix"]
"""Kernels that also take a workspace, last."""

VECTORED = [op for op in KERNELS if op != "hc_mix"]
"""Kernels with a variant for every vector width."""

PARAMS: dict[str, dict[str, Any]] = {
    "grouped_gemma_rmsnorm": {"dtype": "bf16", "width": 256, "group_size": 64},
    "hc_gate": {"dtype": "bf16", "width": 256, "streams": 4},
    "hc_apply": {"dtype": "bf16", "hidden": 64, "streams": 4},
    "hc_apply_norm": {"dtype": "bf16", "hidden": 64, "streams": 4},
    "hc_boundary": {"dtype": "bf16", "hidden": 64, "streams": 4},
    "hc_mix": {"dtype": "bf16", "hidden": 64, "streams": 4, "low_rank": 16, "bucket": 8}
    | {"launch": "cooperative"},
    "shared_gate": {"dtype": "bf16", "hidden": 64},
    "moe_finalize": {"hidden": 64, "top_k": 3, "weight_dtype": "fp32", "shared": True, "gated": True},
    "gdn_packed_decode": {
        "dtype": "bf16",
        "state_dtype": "fp32",
        "bias_dtype": "fp32",
        "index_dtype": "int32",
        "key_heads": 2,
        "value_heads": 4,
        "head_dim": 64,
        "value_tile": value_tile_for(3, 4),
    },
}


def make(op: str, rows: int = ROWS, config: ModelConfig = SMALL, device: str = "cpu") -> Call:
    """Arguments of a valid call by name, scalars included; deterministic values."""
    generator = torch.Generator().manual_seed(len(op) * 1000 + rows)
    operator = OPS[op]
    arguments = operator.new_call(config, rows, "cpu")
    call: Call = {}
    for name, tensor in zip(operator.inputs, arguments.inputs, strict=True):
        if tensor is None:
            call[name] = None
        elif tensor.dtype.is_floating_point:
            call[name] = torch.randn(tensor.shape, generator=generator).to(tensor.dtype).to(device)
        elif name == "state_indices":
            call[name] = torch.zeros(
                tensor.shape, dtype=tensor.dtype, device=device
            )  # all rows but the first pad
            call[name][1:] = -1
        else:
            high = max(1, rows * config.top_k)
            call[name] = torch.randint(0, high, tensor.shape, generator=generator).to(tensor.dtype).to(device)
    return call | dict(zip(operator.scalars, arguments.scalars, strict=True))


def outs_of(op: str, call: Call) -> dict[str, Tensor]:
    """Outputs for a call, by argument name, full of a value that no result has."""
    operator = OPS[op]
    examined = operator.examine(operator.bind((), call))
    return {
        o.name: torch.full(o.shape, 1234.0, dtype=o.dtype, device=examined.device) for o in examined.outputs
    }


def run(op: str, call: Mapping[str, Any], **outs: Any) -> tuple[Tensor, ...]:
    """Calls the public function; its results as a tuple."""
    results = getattr(ops, op)(**call, **outs)
    return results if isinstance(results, tuple) else (results,)


def tensors(call: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors among a call's arguments."""
    return {name: value for name, value in call.items() if isinstance(value, Tensor)}


def written(op: str) -> tuple[str, ...]:
    """Names of what a call writes: its outputs and what it mutates."""
    return (*OPS[op].outs, *OPS[op].mutates)


def _readable(t: Tensor) -> bool:
    return not torch._is_zerotensor(t) and held(t, t.data_ptr(), extent_bytes(t))


@contextmanager
def untouched(*groups: Mapping[str, Any]) -> Iterator[None]:
    """Asserts that no tensor of the groups changes inside; those whose memory is gone cannot be read."""
    seen = [
        (n, t)
        for g in groups
        for n, t in tensors(g).items()
        if t.layout is torch.strided and not t.is_meta and _readable(t)
    ]
    before = [t.clone() for _, t in seen]
    yield
    for (name, tensor), copy in zip(seen, before, strict=True):
        assert torch.equal(tensor.nan_to_num(7.0), copy.nan_to_num(7.0)), f"{name} was written"


def run_reference(op: str, call: Call) -> tuple[Tensor, ...]:
    """Results of the torch reference, which leaves the call's state alone."""
    copies = {n: v.clone() if n == "state" else v for n, v in call.items()}
    results = getattr(reference, op)(**copies)
    return results if isinstance(results, tuple) else (results,)


def aligned_at(t: Tensor, past: int, of: int = 32) -> Tensor:
    """A copy of `t` with its strides, whose base address is `past` bytes past a multiple of `of`."""
    nbytes = extent_bytes(t)
    buffer = torch.zeros(nbytes + of, dtype=torch.uint8)
    start = (past - buffer.data_ptr()) % of
    return buffer[start : start + nbytes].view(t.dtype).as_strided(t.shape, t.stride()).copy_(t)


@dataclass
class Compiled:
    """What the stand-in JIT returns: a function that records how it was called."""

    module: str
    target: str
    params: dict[str, Any]
    log: list[Compiled]
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def __call__(self, *args: Any) -> None:
        self.calls.append(args)
        self.log.append(self)


class Jit:
    """The stand-in. requested: compiled functions in the order of requests, called: in the order of calls;
    one object a parameter set."""

    def __init__(self, target: str) -> None:
        self.target: str | None = target
        self.requested: list[Compiled] = []
        self.called: list[Compiled] = []
        self._made: dict[str, Compiled] = {}
        self._lock = threading.Lock()

    def target_of(self, device: torch.device) -> str | None:
        """What every device is taken for."""
        return self.target

    def get(self, module: str, target: str, params: Mapping[str, Any]) -> Callable[..., Any]:
        """Stands in for `bindings.jit.get`."""
        with self._lock:
            key = repr((module, target, sorted(params.items())))
            compiled = self._made.setdefault(key, Compiled(module, target, dict(params), self.called))
            self.requested.append(compiled)
        return compiled

    @property
    def last(self) -> Compiled:
        """The compiled function that was called last."""
        return self.called[-1]

    @property
    def launches(self) -> int:
        """Calls of compiled functions so far."""
        return len(self.called)
