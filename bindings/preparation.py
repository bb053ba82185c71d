"""`warmup`: compiles and loads what a model's decode steps need, before a CUDA-graph capture can no longer do
it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NoReturn

import torch

from bindings import dispatch
from bindings.checks import DEVICES, integer
from bindings.errors import BackendUnavailable, InvalidArgument, WarmupRequired
from bindings.registry import OPS, ModelConfig, Op, op_named

SHARED = OPS["moe_finalize"].axes["shared"]


@dataclass(frozen=True)
class WarmupConfig:
    """What to prepare. model: shapes and dtypes. ops: names, or None for every operator. batch_sizes: rows of
    the steps to come (kernels depend on them only where a tile is chosen by them). devices: None is the
    current CUDA device, if there is one. unaligned: also the variants for tensors that start at odd multiples
    of 16 bytes.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    ops: tuple[str, ...] | None = None
    batch_sizes: tuple[int, ...] = (1,)
    devices: tuple[torch.device | str, ...] | None = None
    unaligned: bool = False


@dataclass(frozen=True)
class Prepared:
    """One implementation on one device. seconds: what compiling and loading took; next to nothing where it
    had run before, or where there is nothing to prepare (backend "reference")."""

    op: str
    device: torch.device
    backend: str | None
    implementation: str
    target: str | None
    params: Mapping[str, Any]
    seconds: float

    def __str__(self) -> str:
        params = ", ".join(f"{k}={v}" for k, v in self.params.items())
        detail = f" for {self.target} ({params})" if params else ""
        return f"{self.op} on {self.device}: {self.implementation}{detail}, {self.seconds:.2f} s"


@dataclass(frozen=True)
class WarmupReport:
    """What `warmup` prepared, in order."""

    entries: tuple[Prepared, ...]

    @property
    def seconds(self) -> float:
        """The time that it all took."""
        return sum(e.seconds for e in self.entries)

    def __str__(self) -> str:
        return "\n".join([*map(str, self.entries), f"{len(self.entries)} prepared in {self.seconds:.2f} s"])


def warmup(
    config: WarmupConfig | None = None, *, progress: Callable[[str], None] | None = None
) -> WarmupReport:
    """Compiles and loads, on every device of `config`, what its calls would get under the current backend
    selection.

    Call it before a CUDA-graph capture, with the shapes and dtypes to be captured. progress: called with a
    line per implementation, such as `print`. Raises InvalidArgument for a config that no call can
    have, BackendUnavailable if a forced backend cannot serve one of the calls, WarmupRequired inside a
    capture.
    """
    config = WarmupConfig() if config is None else config
    _check(config)
    operators = list(OPS.values()) if config.ops is None else [op_named(name) for name in config.ops]
    entries: list[Prepared] = []
    for device in _devices(config):
        if dispatch.capturing(device):
            raise WarmupRequired(f"warmup: {device} is inside a CUDA-graph capture, allowed only before it")
        for op in operators:
            for entry in _prepare(op, config, device):
                entries.append(entry)
                if progress is not None:
                    progress(str(entry))
    return WarmupReport(tuple(entries))


def _devices(config: WarmupConfig) -> list[torch.device]:
    if config.devices is None:
        return [torch.device("cuda", torch.cuda.current_device())] if torch.cuda.is_available() else []
    found = [_device(d) for d in config.devices]
    return [
        torch.device("cuda", torch.cuda.current_device()) if d.type == "cuda" and d.index is None else d
        for d in found
    ]


def _fail(name: str, value: object, allowed: str) -> NoReturn:
    raise InvalidArgument(f"warmup: {name}: got {value!r}, allowed {allowed}")


def _device(value: Any) -> torch.device:
    kinds = " or ".join(DEVICES)
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError):
        _fail("devices", value, f"devices of {kinds}")
    if device.type not in DEVICES:
        _fail("devices", value, f"devices of {kinds}")
    return device


def _check(config: WarmupConfig) -> None:
    """Raises InvalidArgument for what no contract would see, or would blame on something else."""
    if not isinstance(config, WarmupConfig):
        _fail("config", config, "a WarmupConfig")
    for name in ("ops", "batch_sizes", "devices"):
        value = getattr(config, name)
        if isinstance(value, str) or not isinstance(value, (Collection, type(None))):
            _fail(name, value, "a tuple")
    if config.batch_sizes is None:
        _fail("batch_sizes", None, "a tuple")
    for rows in config.batch_sizes:
        if integer("warmup", "batch_sizes", rows) < 1:
            _fail("batch_sizes", rows, "integers >= 1")
    model = config.model
    if not isinstance(model, ModelConfig):
        _fail("model", model, "a ModelConfig")
    for f in fields(ModelConfig):
        value, default = getattr(model, f.name), f.default
        if f.name == "shared":
            if value not in SHARED:
                _fail("model.shared", value, ", ".join(SHARED))
        elif isinstance(default, int):
            if integer("warmup", f"model.{f.name}", value) < 1:
                _fail(f"model.{f.name}", value, "an integer >= 1")
        elif not isinstance(value, torch.dtype) and not (f.name == "dt_bias_dtype" and value is None):
            _fail(f"model.{f.name}", value, "a torch.dtype")


def _prepare(op: Op, config: WarmupConfig, device: torch.device) -> Iterator[Prepared]:
    done: list[tuple[Mapping[str, Any], int]] = []

    def resolve(rows: int, params: Mapping[str, Any]) -> dispatch.Resolution:
        call = op.examine(op.new_call(config.model, rows, "meta"), concrete=False)
        with dispatch.override(op.name, **params):
            resolution = dispatch.resolve(call, dispatch.selected(), device)
        if resolution.backend is None:
            raise BackendUnavailable(f"{op.name}: {resolution.reason}")
        return resolution

    def load(rows: int, resolution: dispatch.Resolution) -> Prepared | None:
        implementation = resolution.implementation
        loading = rows if implementation is None else implementation.rows_to_load(rows)
        if (resolution.params, loading) in done:
            return None
        prepared = _load(op, config.model, resolution, loading, device)
        done.append((resolution.params, loading))
        return prepared

    for rows in config.batch_sizes:
        for params in ({}, {"vec_bytes": 16}) if config.unaligned else ({},):
            _, prepared = dispatch.until_granted(partial(resolve, rows, params), partial(load, rows))
            if prepared is not None:
                yield prepared


def _load(
    op: Op, model: ModelConfig, resolution: dispatch.Resolution, rows: int, device: torch.device
) -> Prepared:
    """Runs what was resolved on `rows` rows, unless it is the reference or a kernel that has run before."""
    start = time.perf_counter()
    name = "reference" if resolution.implementation is None else resolution.implementation.name
    if resolution.implementation is not None and (rows or not dispatch.is_ready(resolution, device)):
        launch = dispatch.launcher(op, resolution, device)
        arguments = op.new_call(model, rows, device)
        call = op.examine(arguments)
        outs = [torch.empty(o.shape, dtype=o.dtype, device=device) for o in call.outputs]
        launch(*arguments.inputs, *outs, *call.kernel_scalars)
        dispatch.mark_ready(resolution, device)
    elapsed = time.perf_counter() - start
    return Prepared(
        op.name, device, resolution.backend, name, resolution.target, dict(resolution.params), elapsed
    )
