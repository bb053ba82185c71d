"""How a case runs on a backend: its tensors placed between guard bands, the call, what must not have changed,
and the comparison with the exact results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import bindings
from bindings import oracle, tolerance
from tests.draw import Inputs

MARGIN = 1024
"""Bytes of guard band at least, on either side of every tensor. They hold 0xFF: NaN to whom reads floats, -1
integers."""

IN_PLACE = {
    "grouped_gemma_rmsnorm": ("out", "x"),
    "hc_apply": ("out", "residual"),
    "hc_apply_norm": ("combined_out", "residual"),
    "moe_finalize": ("out", "shared_out"),
}
"""By operator, the output that may be an input's memory, and that input."""

ELEMENT_ALIGNED = ("a", "b", "A_log", "dt_bias", "state_indices")
"""Tensors that are read element by element and need no more than their element's alignment."""

Outputs = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Backend:
    """An implementation and the device to run it on."""

    name: str
    device: str

    def __str__(self) -> str:
        return f"{self.name}-{torch.device(self.device).type}"


def outputs(op: str, inputs: Mapping[str, Any]) -> Outputs:
    """Shape and dtype of every `out` argument of a call, by name: the contract's word, not the
    implementation's."""
    if op == "grouped_gemma_rmsnorm":
        return {"out": (tuple(inputs["x"].shape), inputs["x"].dtype)}
    if op == "hc_gate":
        (T, _), (C, _) = inputs["normed"].shape, inputs["inject_weight"].shape
        return {"out": ((T, 8, C), torch.float32)}
    if op == "hc_apply":
        return {"out": (tuple(inputs["residual"].shape), inputs["residual"].dtype)}
    if op == "hc_apply_norm":
        like = (tuple(inputs["residual"].shape), inputs["residual"].dtype)
        return {"combined_out": like, "normed_out": like}
    if op == "hc_boundary":
        like = (tuple(inputs["residual"].shape), inputs["residual"].dtype)
        partials = (tuple(inputs["partials"].shape), torch.float32)
        return {"combined_out": like, "normed_out": like, "partials_out": partials}
    if op == "hc_mix":
        T, W = inputs["normed"].shape
        return {"out": ((T, W // inputs.get("streams", 4)), inputs["normed"].dtype)}
    if op == "shared_gate":
        return {"out": ((inputs["x"].shape[0],), torch.float32)}
    if op == "moe_finalize":
        shape = (inputs["expert_weights"].shape[0], inputs["expert_out"].shape[1])
        return {"out": (shape, torch.bfloat16)}
    assert op == "gdn_packed_decode"
    _, Hv, D, _ = inputs["state"].shape
    return {"out": ((inputs["mixed_qkv"].shape[0], 1, Hv, D), inputs["mixed_qkv"].dtype)}


def same_bits(a: Tensor, b: Tensor) -> Tensor:
    """Elementwise: equal bits, or both NaN (whose payload is no part of a contract)."""
    assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
    if not a.is_floating_point():
        return a == b
    bits = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return (a.contiguous().view(bits) == b.contiguous().view(bits)) | (a.isnan() & b.isnan())


def assert_same_bits(a: Tensor, b: Tensor, what: str) -> None:
    same = same_bits(a, b)
    if not same.all():
        at = tuple(int(i) for i in (~same).nonzero()[0])
        wrong = same.numel() - int(same.sum())
        values = f"{a[at].item()} and {b[at].item()}"
        raise AssertionError(f"{what}: {wrong} of {same.numel()} elements differ, first at {at}: {values}")


class Guarded:
    """A tensor of given layout inside a larger buffer whose every other byte is 0xFF."""

    def __init__(self, values: Tensor, device: str, past: int) -> None:
        """past: bytes that the base address lies past a multiple of 64."""
        steps = zip(values.shape, values.stride(), strict=True)
        extent = (sum((size - 1) * stride for size, stride in steps) + 1) * values.element_size()
        nbytes = 2 * MARGIN + 64 + (extent if values.numel() else 0)
        self.buffer = torch.full((nbytes,), 0xFF, dtype=torch.uint8, device=device)
        self.start = MARGIN + (past - self.buffer.data_ptr() - MARGIN) % 64
        self.shape, self.stride, self.dtype = values.shape, values.stride(), values.dtype
        self.tensor = self._inside(self.buffer)
        self.tensor.copy_(values)
        self.before = self.buffer.clone()

    def _inside(self, buffer: Tensor) -> Tensor:
        whole = buffer[self.start : self.start + (buffer.numel() - self.start) // 8 * 8].view(self.dtype)
        return whole.as_strided(self.shape, self.stride)

    def rewrite(self, values: Tensor) -> None:
        """Puts other values into the tensor."""
        self.tensor.copy_(values)
        self.before = self.buffer.clone()

    def original(self) -> Tensor:
        """The values it was made with."""
        return self._inside(self.before)

    def check(self, name: str, written: bool) -> None:
        """That no byte changed, or if `written` none outside the tensor's elements."""
        expected = self.before
        if written:
            expected = expected.clone()
            self._inside(expected).copy_(self.tensor)
        changed = (self.buffer != expected).nonzero().flatten()
        if changed.numel():
            where = "outside its elements" if written else "though it is an input"
            first, last = int(changed[0]) - self.start, int(changed[-1]) - self.start
            raise AssertionError(f"{name} was written {where}: bytes {first} to {last} from its base address")


class Placement:
    """A call's tensors on a device, each guarded. `shifted`: at base addresses that are as little aligned as
    allowed."""

    def __init__(self, op: str, inputs: Inputs, device: str, shifted: bool = False) -> None:
        self.op, self.device, self.past = op, device, 16 if shifted else 0
        self.guards: dict[str, Guarded] = {}
        self.written: set[str] = {"state"} if op == "gdn_packed_decode" else set()
        self.arguments: Inputs = {}
        for name, value in inputs.items():
            if isinstance(value, Tensor):
                past = self.past + (value.element_size() if shifted and name in ELEMENT_ALIGNED else 0)
                self.guards[name] = Guarded(value, device, past)
                self.arguments[name] = self.guards[name].tensor
            else:
                self.arguments[name] = value

    def outputs(self) -> dict[str, Tensor]:
        """Output tensors full of NaN."""
        made = {}
        for name, (shape, dtype) in outputs(self.op, self.arguments).items():
            self.guards[name] = Guarded(torch.full(shape, float("nan"), dtype=dtype), self.device, self.past)
            self.written.add(name)
            made[name] = self.guards[name].tensor
        return made

    def rewrite(self, inputs: Inputs) -> None:
        """Other values for the same call; outputs, if any, are full of NaN again."""
        for name, guard in self.guards.items():
            values = inputs.get(name)
            guard.rewrite(torch.tensor(float("nan")) if values is None else values)

    def check(self) -> None:
        """That the call wrote nothing but its results: no guard band, no gap, no input, no slot that no row
        names."""
        for name, guard in self.guards.items():
            guard.check(name, name in self.written)
        if "state" in self.written:
            state, index = self.guards["state"], self.arguments["state_indices"].cpu().long()
            untouched = torch.ones(state.shape[0], dtype=torch.bool)
            untouched[index[(index >= 0) & (index < state.shape[0])]] = False
            kept, now = state.original().cpu()[untouched], state.tensor.cpu()[untouched]
            assert torch.equal(kept.view(torch.uint8), now.view(torch.uint8)), (
                "a slot that no row names changed"
            )


def call(
    op: str, arguments: Inputs, backend: Backend, outs: Mapping[str, Tensor] | None = None
) -> tuple[Tensor, ...]:
    """One call of the public operator; its results in the order of `oracle.RESULTS`, an updated state
    included."""
    with bindings.backend(backend.name):
        returned = getattr(bindings.ops, op)(**arguments, **(outs or {}))
    results = returned if isinstance(returned, tuple) else (returned,)
    if outs is None:
        for result, (shape, dtype) in zip(results, outputs(op, arguments).values(), strict=True):
            assert (tuple(result.shape), result.dtype) == (shape, dtype)
            assert result.device.type == torch.device(backend.device).type
            assert result.is_contiguous()
    else:
        assert all(a is b for a, b in zip(results, outs.values(), strict=True)), "out is returned"
    return (*results, arguments["state"]) if op == "gdn_packed_decode" else results


def judge(op: str, inputs: Inputs, results: tuple[Tensor, ...]) -> None:
    """Compares the results of a call on `inputs` (CPU tensors as they were before it) with the exact ones."""
    given = oracle.fed(op, inputs, dict(zip(oracle.RESULTS[op], results, strict=True)))
    verdicts = [
        tolerance.check(name, got, exact)
        for (name, exact), got in zip(oracle.exact(op, given).items(), results, strict=True)
    ]
    assert all(v.ok for v in verdicts), "\n".join(str(v) for v in verdicts)
