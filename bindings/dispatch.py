"""Dispatch: which implementation serves a call, and the shortest way to it.

`caller(op)` gives the function behind a public operator. A repeated call goes from a plan (plans.py) to the
launch; a new one is validated, its implementation chosen guard by guard, compiled or loaded if need be, and
made a plan of.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

from bindings import emulated, targets
from bindings import kernels as kernels  # fills the registry
from bindings.checks import Output
from bindings.errors import BackendUnavailable, InvalidArgument, WarmupRequired
from bindings.plans import Plan, PlanCache, data_ptr
from bindings.registry import (
    IMPLEMENTATIONS,
    OPS,
    Arguments,
    Call,
    Implementation,
    Kernel,
    NotGranted,
    Op,
)
from cute_kernels.gdn.config import VALUE_TILES

Answer = TypeVar("Answer")

BACKENDS = ("auto", "cute", "emulator", "reference")

ENVIRONMENT = "FLASHNEXT_BACKEND"


@dataclass(frozen=True)
class Selection:
    """What the caller asked for. origin: where the backend was asked for. overrides: (implementation's
    operator, parameter, value) of constexpr parameters that replace the chosen ones. Instances are interned:
    equal ones are identical."""

    backend: str
    origin: str
    overrides: tuple[tuple[str, str, Any], ...] = ()


_interned = functools.lru_cache(maxsize=256)(Selection)


def _from_environment() -> Selection:
    value = os.environ.get(ENVIRONMENT)
    return _interned("auto", "default") if value is None else _interned(value, f"{ENVIRONMENT}={value}")


_DEFAULT = _from_environment()

_selection: ContextVar[Selection] = ContextVar("flashnext_selection", default=_DEFAULT)


def selected() -> Selection:
    """What calls made here and now use."""
    return _selection.get()


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Within the context, and this thread or task only, calls use backend `name`: "auto", "cute",
    "emulator" or "reference".

    A backend that cannot serve a call is an error of that call (BackendUnavailable), never a fallback.
    """
    if name not in BACKENDS:
        raise InvalidArgument(f"backend: got {name!r}, allowed {', '.join(BACKENDS)}")
    current = _selection.get()
    token = _selection.set(_interned(name, f"bindings.backend({name!r})", current.overrides))
    try:
        yield
    finally:
        _selection.reset(token)


@contextlib.contextmanager
def override(op: str, **params: Any) -> Iterator[None]:
    """Within the context, tuning parameters of an operator's kernel are those given, which changes no result:
    for tests and measurements."""
    tunable = {k: v for i in IMPLEMENTATIONS[op] if isinstance(i, Kernel) for k, v in i.tuning.items()}
    tunable["vec_bytes"] = (16,)
    for name, value in params.items():
        if value not in tunable.get(name, ()):
            allowed = "; ".join(f"{k} of {', '.join(map(str, v))}" for k, v in tunable.items())
            raise InvalidArgument(f"override of {op}: got {name}={value!r}, allowed {allowed}")
    current = _selection.get()
    kept = tuple(
        o for o in current.overrides if (o[0], o[1]) not in {(OPS[op].name, name) for name in params}
    )
    added = tuple((op, name, value) for name, value in sorted(params.items()))
    token = _selection.set(_interned(current.backend, current.origin, kept + added))
    try:
        yield
    finally:
        _selection.reset(token)


def force_value_tile(tile: int) -> contextlib.AbstractContextManager[None]:
    """Within the context, GDN decode uses value tile `tile` whatever the batch. Every tile gives the same
    bits."""
    if tile not in VALUE_TILES:
        raise InvalidArgument(f"value_tile: got {tile!r}, allowed {', '.join(map(str, VALUE_TILES))}")
    return override("gdn_packed_decode", value_tile=tile)


@dataclass(frozen=True)
class Verdict:
    """One guard's answer for one call."""

    implementation: str
    guard: str
    ok: bool
    got: str

    def __str__(self) -> str:
        return f"{self.guard}: got {self.got}"


@dataclass(frozen=True)
class Resolution:
    """What serves a call. backend: None where the forced one cannot. implementation: None is the torch
    reference."""

    backend: str | None
    implementation: Implementation | None
    target: str | None
    params: Mapping[str, Any]
    verdicts: tuple[Verdict, ...]
    reason: str


def resolve(call: Call, selection: Selection, device: torch.device | None = None) -> Resolution:
    """Chooses the implementation of a valid call, on `device` if it is not the tensors'. Compiles and
    launches nothing."""
    wanted = selection.backend
    if wanted not in BACKENDS:
        raise InvalidArgument(f"{ENVIRONMENT}: got {wanted!r}, allowed {', '.join(BACKENDS)}")
    if wanted == "reference":
        return Resolution("reference", None, None, {}, (), f"asked for by {selection.origin}")
    call = call if device is None else replace(call, placed=device)
    device = call.device
    target = emulated.target() if wanted == "emulator" else targets.target_of(device)
    verdicts: list[Verdict] = []
    for implementation in IMPLEMENTATIONS.get(call.op.name, ()):
        own = _judge(implementation, call, target, device)
        if wanted == "emulator":
            own += _judge_emulated(implementation, device)
        verdicts += own
        if target is not None and all(v.ok for v in own):
            params = implementation.specialise(call, target)
            overrides = {name: value for op, name, value in selection.overrides if op == call.op.name}
            params.update((name, value) for name, value in overrides.items() if name in params)
            origin = "auto: every guard holds" if wanted == "auto" else f"asked for by {selection.origin}"
            served = "emulator" if wanted == "emulator" else "cute"
            return Resolution(served, implementation, target, params, tuple(verdicts), origin)
    failed = next((v for v in verdicts if not v.ok), None)
    why = f"no implementation is registered for {call.op.name}" if failed is None else str(failed)
    if wanted == "auto":
        return Resolution("reference", None, target, {}, tuple(verdicts), f"auto: {why}")
    reason = f"backend {wanted!r}, asked for by {selection.origin}, cannot serve this call: {why}"
    return Resolution(None, None, target, {}, tuple(verdicts), reason)


def until_granted(
    resolved: Callable[[], Resolution], attempt: Callable[[Resolution], Answer]
) -> tuple[Resolution, Answer]:
    """The first resolution, of those made anew after each refusal, that the device grants its launch, and
    what the attempt to launch it returned. An implementation that is refused twice raises NotGranted."""
    refused: list[Implementation | None] = []
    while True:
        resolution = resolved()
        try:
            return resolution, attempt(resolution)
        except NotGranted:
            if resolution.implementation in refused:
                raise
            refused.append(resolution.implementation)


def _judge(
    implementation: Implementation, call: Call, target: str | None, device: torch.device
) -> list[Verdict]:
    name = implementation.name
    got = target or _device_name(device)
    verdicts = [Verdict(name, f"target is one of {', '.join(targets.TARGETS)}", target is not None, got)]
    verdicts += [Verdict(name, g.description, g.holds(call), str(g.got(call))) for g in implementation.guards]
    return verdicts


def _judge_emulated(implementation: Implementation, device: torch.device) -> list[Verdict]:
    """What the emulator asks besides: a kernel to run, and memory that it can reach."""
    kernel = isinstance(implementation, Kernel)
    return [
        Verdict(implementation.name, "is a kernel", kernel, type(implementation).__name__.lower()),
        Verdict(implementation.name, "tensors are on the CPU", device.type == "cpu", device.type),
    ]


def _device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


# Implementations that ran at least once, so that their code is compiled and loaded: (name, target,
# parameters, device).
_ready: set[tuple[str, str, tuple[tuple[str, Any], ...], torch.device]] = set()


def _readiness(
    resolution: Resolution, device: torch.device
) -> tuple[str, str, tuple[tuple[str, Any], ...], torch.device]:
    assert resolution.implementation is not None
    assert resolution.target is not None
    return resolution.implementation.name, resolution.target, tuple(sorted(resolution.params.items())), device


def is_ready(resolution: Resolution, device: torch.device) -> bool:
    """Whether a call so resolved would neither compile nor load anything."""
    return resolution.implementation is None or _readiness(resolution, device) in _ready


def mark_ready(resolution: Resolution, device: torch.device) -> None:
    """Records that what a call resolved to has run on `device`."""
    if resolution.implementation is not None:
        _ready.add(_readiness(resolution, device))


def capturing(device: torch.device) -> bool:
    """Whether the current stream of `device` is captured into a CUDA graph."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def launcher(op: Op, resolution: Resolution, device: torch.device) -> Callable[..., Any]:
    """The launch function of a resolved call, compiled or loaded if need be. Raises WarmupRequired inside a
    capture that this would break."""
    implementation, target = resolution.implementation, resolution.target
    assert implementation is not None
    assert target is not None
    if not is_ready(resolution, device) and capturing(device):
        params = ", ".join(f"{k}={v}" for k, v in resolution.params.items())
        raise WarmupRequired(
            f"{op.name}: first use of {implementation.name} ({params}) for {target} on {device} inside a "
            "CUDA-graph capture, where it can be neither compiled nor loaded: before the capture, call "
            "bindings.warmup(bindings.WarmupConfig(...)) with these shapes and dtypes, or the operator itself"
        )
    if resolution.backend == "emulator":
        assert isinstance(implementation, Kernel)
        return emulated.launcher(op, implementation, target, resolution.params)
    return implementation.load(target, resolution.params)


_PLAIN = frozenset({Tensor, torch.nn.Parameter})


def _intercepted(tensors: Sequence[Any]) -> bool:
    """Whether something (a fake tensor, vmap, a dispatch mode, a tracer) must see the operator rather than
    its launch."""
    present = [t for t in tensors if isinstance(t, Tensor)]
    return bool(present) and (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or any(
            type(t) not in _PLAIN or t.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(t)
            for t in present
        )
    )


def caller(name: str, *, out: bool = False, absent: int = 0, direct: bool = True) -> Callable[..., Any]:
    """The function behind one form of an operator: `call(tensors, scalars)` with the present inputs, then,
    with `out`, the outputs. It returns the results, or with `out` nothing of meaning.

    absent: how many of the trailing inputs are None. direct: called by the user; else by torch's dispatcher,
    which has let everything that intercepts operators see the call already.
    """
    op = OPS[name]
    inputs = len(op.inputs) - absent
    cache = PlanCache()
    _caches.append(cache)
    selected = _selection.get

    def call(tensors: tuple[Any, ...], scalars: tuple[Any, ...] = ()) -> Any:
        selection = selected()
        known = cache.plans
        for plan in known:
            if plan.selection is selection and plan.scalars == scalars and plan.matches(*tensors):
                pointers = tuple(map(data_ptr, tensors))
                if pointers in plan.vetted or plan.vet(pointers, tensors):
                    if plan is not known[0]:
                        cache.use(plan)
                    try:
                        return plan.run(*tensors)
                    except NotGranted:
                        cache.drop(plan)
                        break
        return first(tensors, scalars, selection)

    def first(tensors: tuple[Any, ...], scalars: tuple[Any, ...], selection: Selection) -> Any:
        if direct and _intercepted(tensors):
            return _through_torch(op, tensors, scalars, inputs, absent)
        arguments = Arguments((*tensors[:inputs], *(None,) * absent), scalars, tensors[inputs:])
        checked = op.examine(arguments)

        def attempt(resolution: Resolution) -> tuple[Callable[..., Any], Any]:
            run = _runner(checked, resolution, absent, out)
            return run, run(*tensors)

        resolution, (run, result) = until_granted(lambda: resolve(checked, selection), attempt)
        if checked.rows:
            mark_ready(resolution, checked.device)
        position = {name: i for i, name in enumerate((*op.inputs[:inputs], *(op.outs if out else ())))}
        pairs = [
            (position[p.written], position[p.other], -p.other_bytes, p.written_bytes, p.in_place)
            for p in checked.pairs
        ]
        cache.use(Plan(run, tensors, scalars, selection, pairs))
        return result

    return call


def _through_torch(
    op: Op, tensors: tuple[Any, ...], scalars: tuple[Any, ...], inputs: int, absent: int
) -> Any:
    packet = getattr(torch.ops.flashnext, op.name)
    arguments = (*tensors[:inputs], *(None,) * absent, *scalars)
    if len(tensors) > inputs:
        return packet.out(*arguments, **dict(zip(op.outs, tensors[inputs:], strict=True)))
    return packet.default(*arguments)


def _runner(call: Call, resolution: Resolution, absent: int, out: bool) -> Callable[..., Any]:
    """What a plan runs: takes the present inputs, with `out` the outputs too, and returns the results (None
    with `out`)."""
    op, inputs = call.op, len(call.op.inputs) - absent
    if resolution.backend is None:
        raise BackendUnavailable(f"{op.name}: {resolution.reason}")
    written = [op.inputs.index(name) for name in op.mutates]
    if call.rows == 0:
        launch: Callable[..., Any] = _nothing
    elif resolution.implementation is None:
        return _reference_runner(call, absent, out)
    else:
        launch = launcher(op, resolution, call.device)
        if any(t.requires_grad for t in call.tensors.values()) and not _takes_gradients():
            launch = _with_detached(launch)
        launch = _with_absent(launch, inputs, absent)
        written += [inputs + i for i in range(len(op.outs))] if out else []
        names = (*op.inputs[:inputs], *op.outs)
        # inference tensors have no counter; plans never confuse them with others
        counted = [i for i in written if not call.tensors[names[i]].is_inference()]
        launch = _with_version(launch, call.kernel_scalars, counted)
    if out:
        return launch
    templates = tuple(_template(output, call.device) for output in call.outputs)
    return _OUTPUTS[len(templates)](launch, *templates)


def _takes_gradients() -> bool:
    """Whether compiled functions take tensors that require a gradient: not by way of `Tensor.__dlpack__`,
    which serves where torch is older than its exchange interface in C."""
    return hasattr(Tensor, "__dlpack_c_exchange_api__")


def _with_detached(launch: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: launch(*[a.detach() if isinstance(a, Tensor) else a for a in args])


def _with_version(
    launch: Callable[..., Any], scalars: tuple[Any, ...], written: list[int]
) -> Callable[..., Any]:
    """The launch function with its scalars, which then tells autograd of the tensors that were written behind
    its back."""
    if not written:
        return (lambda *tensors: launch(*tensors, *scalars)) if scalars else launch
    increment_version, pick = torch.autograd.graph.increment_version, itemgetter(*written)

    def launch_and_count(*tensors: Tensor) -> None:
        launch(*tensors, *scalars)
        increment_version(pick(tensors))

    return launch_and_count


def _one_output(launch: Callable[..., Any], template: Tensor) -> Callable[..., Tensor]:
    empty_like = torch.empty_like

    def run(*inputs: Tensor) -> Tensor:
        out = empty_like(template)
        launch(*inputs, out)
        return out

    return run


def _two_outputs(
    launch: Callable[..., Any], first: Tensor, second: Tensor
) -> Callable[..., tuple[Tensor, Tensor]]:
    empty_like = torch.empty_like

    def run(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        a, b = empty_like(first), empty_like(second)
        launch(*inputs, a, b)
        return a, b

    return run


def _three_outputs(
    launch: Callable[..., Any], first: Tensor, second: Tensor, third: Tensor
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    empty_like = torch.empty_like

    def run(*inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, b, c = empty_like(first), empty_like(second), empty_like(third)
        launch(*inputs, a, b, c)
        return a, b, c

    return run


# written out for each number of outputs: an eager call would pay for a loop
_OUTPUTS: Mapping[int, Callable[..., Any]] = {1: _one_output, 2: _two_outputs, 3: _three_outputs}


def _template(output: Output, device: torch.device) -> Tensor:
    """What `empty_like` makes an output from: a tensor without memory. Half as costly as shape, dtype and
    device each time."""
    template = torch.empty(output.shape, dtype=output.dtype, device=device)
    template.untyped_storage().resize_(0)
    return template


def _reference_runner(call: Call, absent: int, out: bool) -> Callable[..., Any]:
    function, scalars, inputs = call.op.reference, call.scalars, len(call.op.inputs) - absent
    nones = (None,) * absent
    templates = tuple(_template(output, call.device) for output in call.outputs)

    @torch.inference_mode()  # which may write to inference tensors, and counts writes to others
    def into(*tensors: Tensor) -> None:
        results = function(*tensors[:inputs], *nones, *scalars)
        results = results if len(templates) > 1 else (results,)
        for result, target in zip(results, tensors[inputs:], strict=True):
            target.copy_(result)

    def fresh(*tensors: Tensor) -> Any:
        results = tuple(torch.empty_like(t) for t in templates)
        into(*tensors, *results)
        return results if len(results) > 1 else results[0]

    return into if out else fresh


def _nothing(*tensors: Any) -> None:
    """The launch of a call without rows."""


def _with_absent(launch: Callable[..., Any], present: int, absent: int) -> Callable[..., Any]:
    """The launch function with Nones put where trailing inputs are absent."""
    if absent == 0:
        return launch
    nones = (None,) * absent
    return lambda *tensors: launch(*tensors[:present], *nones, *tensors[present:])


_caches: list[PlanCache] = []


def clear_plans() -> None:
    """Forgets every plan, so that the next call of each operator is validated and resolved anew."""
    for cache in _caches:
        cache.clear()
