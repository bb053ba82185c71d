"""hc_mix by its kernel, in one cooperative launch or in two: how it is specialised, guarded and called.

The grid of the one launch must be resident as a whole. A device with too few SMs fails a guard; one that
has them but not for this process (MPS, a green context, another tenant) refuses the launch, and then two
launches, of the same bits, serve that call and, on that device, all later ones of its plan. CTAs wait for
each other no longer than `mix_plan.WAIT_NS`; a wait that expired is an error of the next call on that device,
or of `check`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bindings import emulated, targets, workspace
from bindings.errors import FlashnextWarning, HandoffTimeout, InvalidArgument
from bindings.registry import OPS, Call, Guard, Kernel, ModelConfig, NotGranted
from bindings.workspace import OnDevice, Workspaces, stream_key, workspaces
from cute_kernels.hyper import mix_plan

MAX_ROWS = mix_plan.BUCKETS[-1]

REFUSED = "refused: the grid of hc_mix cannot be resident at once (cooperative launch too large)"

_refused: dict[mix_plan.MixPlan, set[int]] = {}
"""By plan, the devices that refused its cooperative launch: what one bucket cannot have another may."""


def _plans(call: Call) -> list[mix_plan.MixPlan | str]:
    """The plan of every target that may run the call, or why it has none. What is on no GPU the emulator may
    run, as its target."""
    here = targets.target_of(call.device) if call.device.type == "cuda" else emulated.target()
    bucket = mix_plan.bucket_of(min(max(call["T"], 1), MAX_ROWS))
    shape = call["W"] // call["C"], call["C"], call["R"]
    return [mix_plan.plan(*shape, bucket, t) for t in ((here,) if here else targets.TARGETS)]


def _geometry(call: Call) -> str:
    shape = f"C = {call['C']}, H = {call['W'] // call['C']}, R = {call['R']}"
    reasons = [p for p in _plans(call) if isinstance(p, str)]
    return f"{shape}, but {reasons[0]}" if reasons else shape


def _multiprocessors(call: Call) -> int | None:
    if call.device.type != "cuda":
        return None
    return torch.cuda.get_device_properties(call.device).multi_processor_count


def _enough(call: Call, ctas: Callable[[mix_plan.MixPlan], int]) -> bool:
    """Whether the device has an SM for each of so many CTAs of the plan."""
    here = _multiprocessors(call)
    return here is None or all(isinstance(p, str) or ctas(p) <= here for p in _plans(call))


def _counted(call: Call) -> str:
    return "no CUDA device" if _multiprocessors(call) is None else f"{_multiprocessors(call)} SMs"


def _refusal(call: Call) -> str | None:
    if call.device.type != "cuda":
        return None
    refusals = (_refused.get(p, ()) for p in _plans(call) if not isinstance(p, str))
    return REFUSED if any(call.device.index in refusal for refusal in refusals) else None


SHAPE_GUARDS = (
    Guard(f"T is at most {MAX_ROWS}", lambda c: c["T"] <= MAX_ROWS, lambda c: c["T"]),
    Guard(
        "a geometry for C, H, R: C 1, 2, 4 or 8; H a multiple of 8, R of 16, C*H of 64; a CTA's weights fit",
        lambda c: not any(isinstance(p, str) for p in _plans(c)),
        _geometry,
    ),
)
CLUSTER_GUARD = Guard(
    "the device has an SM for each CTA of a cluster", lambda c: _enough(c, lambda p: p.cluster), _counted
)
RESIDENCE_GUARDS = (
    Guard("the device has an SM for each CTA", lambda c: _enough(c, lambda p: p.grid), _counted),
    Guard(
        "the device grants a cooperative launch",
        lambda c: _refusal(c) is None,
        lambda c: _refusal(c) or "no refusal so far",
    ),
)


@dataclass(frozen=True, kw_only=True)
class MixKernel(Kernel):
    """The mix kernel: a bucket of rows a variant, a workspace a stream. launch: of mix_plan.LAUNCHES."""

    launch: str = "cooperative"

    def __post_init__(self) -> None:
        if self.launch not in mix_plan.LAUNCHES:
            raise ValueError(f"launch: got {self.launch!r}, one of {', '.join(mix_plan.LAUNCHES)} is allowed")

    @property
    def name(self) -> str:
        suffix = {"cooperative": "", "unguarded": ", not cooperative", "split": ", two launches"}
        return self.module + suffix[self.launch]

    @property
    def launches(self) -> int | None:
        return 2 if self.launch == "split" else 1

    def specialise(self, call: Call, target: str) -> dict[str, Any]:
        return {**self.params(call), "launch": self.launch}

    def load(self, target: str, params: Mapping[str, Any]) -> Callable[..., Any]:
        kernel = super().load(target, params)
        plan = _plan_of(params, target)
        assert isinstance(plan, mix_plan.MixPlan)
        return launcher(kernel, plan, cooperative=self.launch == "cooperative")

    def rows_to_load(self, rows: int) -> int:
        return 1  # a launch makes the workspaces, and shows whether the grid is granted

    def variants(
        self, target: str, model: ModelConfig | None = None, *, sample: bool = False
    ) -> Iterator[dict[str, Any]]:
        """Every bucket in every dtype of the operator. sample: makes no difference."""
        op, model = OPS[self.op], model or ModelConfig()
        for dtype in op.axes["dtype"]:
            for rows in mix_plan.BUCKETS:
                arguments = op.new_call(replace(model, dtype=dtype), rows, "meta")
                found = self.specialise(op.examine(arguments, concrete=False), target)
                if isinstance(_plan_of(found, target), mix_plan.MixPlan):
                    yield found


def params(call: Call) -> dict[str, Any]:
    """The constexpr parameters of a call."""
    return {
        "dtype": call.dtype("normed"),
        "hidden": call["W"] // call["C"],
        "streams": call["C"],
        "low_rank": call["R"],
        "bucket": mix_plan.bucket_of(max(call["T"], 1)),
    }


def _plan_of(params: Mapping[str, Any], target: str) -> mix_plan.MixPlan | str:
    """The plan of constexpr parameters, or why there is none."""
    return mix_plan.plan(*(params[name] for name in ("hidden", "streams", "low_rank", "bucket")), target)


def launcher(
    kernel: Callable[..., Any], plan: mix_plan.MixPlan, *, cooperative: bool = True
) -> Callable[..., None]:
    """The launch function of hc_mix from that of the kernel compiled for a plan, which takes a workspace.
    cooperative: the device may refuse the plan's grid; once it has, no launch of the plan is tried there."""
    current_device = torch.cuda.current_device
    # not in a build without CUDA
    current_stream = getattr(torch._C, "_cuda_getCurrentStream", None)
    raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    is_capturing = torch.cuda.is_current_stream_capturing
    in_emulator = emulated.serving()
    known: dict[int, Workspaces] = {}
    refused = _refused.setdefault(plan, set())

    def launch(normed: Tensor, w_down: Tensor, w_up: Tensor, out: Tensor, streams: int) -> None:
        index = normed.get_device()
        if index >= 0 and index != current_device():
            with torch.cuda.device(index):
                launch(normed, w_down, w_up, out, streams)
            return
        capturing = index >= 0 and is_capturing()
        spaces = known.get(index)
        if spaces is None:
            record_word = plan.control + mix_plan.RECORD
            spaces = workspaces(normed.device, plan, plan.workspace_words, record_word=record_word)
            known[index] = spaces
        if cooperative and index in refused:
            raise NotGranted
        if spaces.expired:
            settle(index, spaces.shared, capturing, "This call launched nothing")
        if index < 0:  # an emulated device: one stream
            if in_emulator:
                emulated.device().register(spaces.shared.record, "the record of an expired wait")
            emulate(kernel, (normed, w_down, w_up, out), spaces)
            return
        assert current_stream is not None
        assert raw_stream is not None
        stream = raw_stream(index) if capturing else stream_key(current_stream(index)[0])
        try:
            kernel(normed, w_down, w_up, out, spaces.of(stream, capturing))
        except RuntimeError as error:
            if "CooperativeLaunchTooLarge" not in str(error):
                raise
            refuse(index, plan, error, capturing)
            raise NotGranted from error

    return launch


def emulate(kernel: Callable[..., Any], tensors: tuple[Tensor, ...], spaces: Workspaces) -> None:
    """Runs the kernel in the emulator. A launch that does not end well (a finding, an interruption) may leave
    CTAs in different epochs, with which no later one could end: the workspace then starts anew."""
    held = spaces.of(0, False)
    try:
        kernel(*tensors, held)
    except BaseException:
        spaces.shared.renew()
        raise


def check(device: torch.device | str | None = None) -> None:
    """Raises HandoffTimeout if in an earlier launch of `hc_mix` on the device CTAs waited in vain for others.

    For code that only replays graphs: an eager or captured call of `hc_mix` (up to 32 rows) looks by itself,
    a replay cannot. device: a CUDA device, or "cpu" for the emulated one; None: all that ran `hc_mix`. Where
    there is nothing to report it reads a word of host memory a device, and waits for nothing: what is still
    running may report later, so a replay is known to be good by a check after a synchronisation. Before it
    raises it waits for the device and makes the workspaces as new, so that later calls and replays are right
    again; no other thread may launch or replay `hc_mix` on the device meanwhile. Within a CUDA-graph capture
    of the calling thread it raises and changes nothing. Raises InvalidArgument for what is no such device.
    """
    for one in workspace.devices() if device is None else (_device(device),):
        shared = workspace.on_device(one)
        if shared is None or not shared.expired:
            continue
        if one.type != "cuda":
            settle(-1, shared, False)
        else:
            with torch.cuda.device(one):
                settle(one.index, shared, torch.cuda.is_current_stream_capturing())


def _device(value: torch.device | str) -> torch.device:
    allowed = "allowed a device of type cpu or cuda, or None"
    try:
        found = torch.device(value)
    except (RuntimeError, TypeError, ValueError):
        raise InvalidArgument(f"check: device: got {value!r}, {allowed}") from None
    if found.type not in ("cpu", "cuda"):
        raise InvalidArgument(f"check: device: got {value!r}, {allowed}")
    if found.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    current = torch.cuda.current_device() if count else 0
    found = torch.device("cuda", current) if found.index is None else found
    if found.index >= max(count, 1):
        raise InvalidArgument(f"check: device: got {value!r}, {allowed}; CUDA devices here: {count}")
    return found


def settle(index: int, shared: OnDevice, capturing: bool, launched: str = "") -> None:
    """Raises the error of a wait that expired on a device, the current one if it is a CUDA device; returns if
    another thread has settled it. All workspaces of the device are as new then, except within a capture,
    where nothing can be waited for. launched: what to say of the call that found it."""
    with shared.lock:
        missing = shared.expired - 1
        if missing < 0:
            return
        if not capturing:
            if index >= 0:
                torch.cuda.synchronize(index)
            shared.renew()
    where = "the emulated device" if index < 0 else f"cuda:{index}"
    after = (
        "inside a CUDA-graph capture nothing can be made as new; a call outside of it does that"
        if capturing
        else "the workspaces are as new, and the next call is served"
    )
    raise HandoffTimeout(
        f"hc_mix on {where}: in an earlier launch CTAs waited for what others, CTA {missing} for one, were "
        f"to hand them, and it did not come in {mix_plan.WAIT_NS / 1e9:.0f} s. Results since then may hold "
        "NaNs. Possible causes: a kernel of another package between two calls, launched with programmatic "
        "dependent launch, that skips its own wait; a captured graph that ran beside itself. "
        + (f"{launched}; {after}" if launched else after[0].upper() + after[1:])
    )


def refuse(index: int, plan: mix_plan.MixPlan, error: RuntimeError, capturing: bool) -> None:
    """Notes that a device does not grant the grid of a plan, and says so. Raises inside a capture, which the
    refusal has ended."""
    if capturing:
        raise RuntimeError(
            f"hc_mix on cuda:{index}, inside a CUDA-graph capture: {REFUSED}. Called once outside it, under "
            f"the same limits (MPS, green context) it takes two launches: {error}"
        )
    _refused.setdefault(plan, set()).add(index)
    forget_error(index)
    warnings.warn(
        f"hc_mix on cuda:{index}: {REFUSED}; from here on calls of its {plan.bucket}-row bucket take two "
        "launches",
        FlashnextWarning,
        stacklevel=3,
    )


def forget_error(index: int) -> None:
    """The CUDA runtime keeps the refusal for whoever asks next. torch asks after each launch of its own,
    reports it there, and it is gone."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=torch.device("cuda", index))
