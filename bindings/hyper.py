"""Hyper-connections between layers: `HCState`, what travels, and `HyperConnection`, its reader and writer.

A layer boundary is one read and one write around a block::

    state = HCState.start(residual)                      # [T, C*H]
    x, state = connection.read(state)                    # [T, H], and the gate starts beside the block
    state = connection.write(block(x), state, next_norm=following)
    ...
    x = final.final_read(state)                          # the last mixer reads and never writes

`write` without `next_norm` leaves no prepared norm: use it where anything else changes the residual before
the next read (an embedding that is added, a pipeline cut), and `HCState.with_residual` for that change.

With `next_inject=following.inject_weight` beside `next_norm`, one launch (`hc_boundary`) prepares the next
gate as well: the read that follows then launches none and uses no second stream. The bits are the same.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bindings import ops
from bindings.checks import ACT, integer, real
from bindings.dispatch import capturing
from bindings.errors import InvalidArgument
from bindings.reference import SPLITS

GATE_STREAMS = ("side", "main")


@dataclass(frozen=True, eq=False)
class _Origin:
    """What a prepared norm was prepared from and for; how a state notices that it outlived either. inject:
    the weight that a prepared gate was made with."""

    residual: Tensor
    version: int | None
    connection: HyperConnection | None
    inject: Tensor | None = None


@dataclass(frozen=True, eq=False)
class HCState:
    """What travels between layers. Immutable: every step returns a new state.

    residual: [T, C*H] bf16 or fp16. normed: its grouped norm, same shape and dtype, or None (the next read
    normalises). gate_partials: [T, S, C] fp32 between a read and its write, else None. gate_event: the end of
    the gate on its own stream; None when the gate ran on the current one. next_partials: [T, S, C] fp32, the
    gate of the next read, where the write prepared it with the norm, else None.

    A norm belongs to one residual: `dataclasses.replace` with another residual is refused, and so is the use
    of a state whose residual was changed in place. `with_residual` is the way to change it.
    """

    residual: Tensor
    normed: Tensor | None = None
    gate_partials: Tensor | None = None
    gate_event: torch.cuda.Event | None = None
    next_partials: Tensor | None = None
    _origin: _Origin | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        _check_tensor("residual", self.residual)
        if self.residual.dim() != 2:
            raise InvalidArgument(f"residual: got shape {list(self.residual.shape)}, allowed [T, C*H]")
        if self.normed is None:
            if self.gate_partials is not None or self.gate_event is not None:
                raise InvalidArgument("gate_partials: given without normed, which they are computed from")
            if self.next_partials is not None:
                raise InvalidArgument("next_partials: given without normed, which they are computed from")
            return
        _check_like("normed", self.normed, self.residual, self.residual.shape)
        if self.gate_partials is not None:
            self._check_partials("gate_partials", self.gate_partials)
            if self.next_partials is not None:
                raise InvalidArgument(
                    "next_partials: given with gate_partials, those of a read to be written"
                )
        elif self.gate_event is not None:
            raise InvalidArgument("gate_event: given without gate_partials")
        elif self.next_partials is not None:
            self._check_partials("next_partials", self.next_partials)
        if self._origin is None:
            origin = _Origin(self.residual, _version(self.residual), None)
            object.__setattr__(self, "_origin", origin)
        elif not torch.compiler.is_compiling() and self._origin.residual is not self.residual:
            raise InvalidArgument("residual: normed was prepared from another residual; use with_residual")

    def _check_partials(self, name: str, partials: Tensor) -> None:
        rows = self.residual.shape[0]
        _check_tensor(name, partials)
        if partials.dim() != 3 or partials.shape[:2] != (rows, SPLITS):
            raise InvalidArgument(f"{name}: got shape {list(partials.shape)}, allowed [{rows}, {SPLITS}, C]")
        if partials.dtype != torch.float32 or partials.device != self.residual.device:
            raise InvalidArgument(
                f"{name}: got {partials.dtype} on {partials.device}, "
                f"allowed torch.float32 on {self.residual.device}"
            )

    @classmethod
    def start(cls, residual: Tensor) -> HCState:
        """The state of a fresh residual [T, C*H], nothing prepared. How to make one is the model's affair."""
        return cls(residual)

    def with_residual(self, residual: Tensor) -> HCState:
        """The state after any update of the residual other than a write: what was prepared from the old one
        is dropped.

        residual: [T, C*H], of the same shape, dtype and device.
        """
        if self.gate_partials is not None:
            raise InvalidArgument("residual: changed between a read and its write; write the state first")
        _check_like("residual", residual, self.residual, self.residual.shape)
        return HCState(residual)

    def to_wire(self) -> Tensor:
        """What crosses a pipeline boundary: the residual alone, [T, C*H]. Refused between read and write."""
        if self.gate_partials is not None:
            raise InvalidArgument("state: cannot cross a pipeline boundary between a read and its write")
        return self.residual

    @classmethod
    def from_wire(cls, residual: Tensor) -> HCState:
        """The state on arrival: the residual [T, C*H] and nothing prepared, so the first read normalises."""
        return cls(residual)


@dataclass(frozen=True, eq=False)
class HyperConnection:
    """The weights of one HC boundary and its read and write. Inference only: no gradients flow.

    norm_weight: [C*H]. inject_weight: [C, C*H], None for a connection that never writes (the final mixer).
    w_down: [R, C*H]. w_up: [C*H, R]. All bf16 or fp16, of one dtype, on one device. streams: C. gate_stream:
    "side" runs the gate on a stream of its own while the block computes (CUDA only), "main" on the current
    one.

    The weights are read before a kernel waits for its predecessor (programmatic dependent launch, PDL): none
    may be written by the kernel directly before the call that reads it, nor by one that only operators of
    this package separate from it; any ordinary kernel in between, an event wait or a synchronisation makes it
    safe. A foreign kernel that uses PDL but skips its own wait breaks the chain for these kernels too.
    `write` reads its next_inject and the norm weight of its next_norm.

    The side stream is shared by the connections of a device. So while a CUDA graph is being captured on a
    device, no other thread may read on it.
    """

    norm_weight: Tensor
    inject_weight: Tensor | None
    w_down: Tensor
    w_up: Tensor
    eps: float = 1e-6
    streams: int = 4
    gate_stream: str = "side"

    def __post_init__(self) -> None:
        if self.gate_stream not in GATE_STREAMS:
            raise InvalidArgument(
                f"gate_stream: got {self.gate_stream!r}, allowed one of {', '.join(GATE_STREAMS)}"
            )
        _check_tensor("norm_weight", self.norm_weight)
        if self.norm_weight.dtype not in ACT:
            raise InvalidArgument(
                f"norm_weight: got {self.norm_weight.dtype}, allowed {' or '.join(map(str, ACT))}"
            )
        if self.norm_weight.dim() != 1:
            raise InvalidArgument(f"norm_weight: got shape {list(self.norm_weight.shape)}, allowed [C*H]")
        if real("HyperConnection", "eps", self.eps) < 0:
            raise InvalidArgument(f"eps: got {self.eps!r}, allowed a finite number >= 0")
        width = self.norm_weight.shape[0]
        integer("HyperConnection", "streams", self.streams)
        if self.streams < 1 or width % self.streams:
            raise InvalidArgument(f"streams: got {self.streams}, allowed a divisor of the width {width}")
        _check_tensor("w_down", self.w_down)
        if self.w_down.dim() != 2:
            raise InvalidArgument(f"w_down: got shape {list(self.w_down.shape)}, allowed [R, {width}]")
        rank = self.w_down.shape[0]
        _check_like("w_down", self.w_down, self.norm_weight, (rank, width))
        _check_like("w_up", self.w_up, self.norm_weight, (width, rank))
        if self.inject_weight is not None:
            _check_like("inject_weight", self.inject_weight, self.norm_weight, (self.streams, width))
        if self.gate_stream == "side" and self.norm_weight.device.type == "cuda":
            _gates.prepare(self.norm_weight.device)

    @property
    def hidden(self) -> int:
        """H, the width of what a block reads and writes."""
        return self.norm_weight.shape[0] // self.streams

    def read(self, state: HCState) -> tuple[Tensor, HCState]:
        """The block's input x [T, H], and the state to write with.

        x is the mix of the normed residual, which is normalised here unless the state brings it. The gate
        starts on its stream before the mix, and `write` waits for it; a state that brings it (next_partials)
        spares it.
        """
        if self.inject_weight is None:
            raise InvalidArgument("inject_weight: this connection has none, so it can only final_read")
        normed = self._normed(state)
        if state.next_partials is None:
            partials, event = self._gate(normed, self.inject_weight)
        else:
            partials, event = self._prepared(state, state.next_partials), None
        x = ops.hc_mix(normed, self.w_down, self.w_up, streams=self.streams)
        origin = _Origin(state.residual, _version(state.residual), self)
        return x, HCState(state.residual, normed, partials, event, _origin=origin)

    def write(
        self,
        block_out: Tensor,
        state: HCState,
        next_norm: HyperConnection | Tensor | None = None,
        next_inject: Tensor | None = None,
    ) -> HCState:
        """Adds the block's output to the streams through the gate, and prepares the next read's norm on the
        way.

        block_out: [T, H]. state: what this connection's `read` returned. next_norm: the connection that reads
        next, of as many streams, or its norm weight [C*H] (then with this connection's eps); None where
        something else updates the residual first. next_inject: the inject weight [C, C*H] of the connection
        that reads next, with next_norm only; its gate is then prepared in the same launch.
        """
        self._check_state(state)
        if state.gate_partials is None:
            raise InvalidArgument("state: has no gate partials; write takes the state that read returned")
        if state.gate_partials.shape[2] != self.streams:
            raise InvalidArgument(
                f"state.gate_partials: got {state.gate_partials.shape[2]} streams, allowed {self.streams}"
            )
        _check_like("block_out", block_out, state.residual, (state.residual.shape[0], self.hidden))
        following: HyperConnection | None = None
        weight: Tensor | None
        if not isinstance(next_norm, HyperConnection):
            weight, eps = next_norm, self.eps
        else:
            following, weight, eps = next_norm, next_norm.norm_weight, next_norm.eps
            if following.streams != self.streams:  # its norm's groups are not this one's streams
                raise InvalidArgument(f"next_norm: got {following.streams} streams, allowed {self.streams}")
        if weight is not None:
            _check_like("next_norm", weight, state.residual, tuple(self.norm_weight.shape))
        if next_inject is not None:
            self._check_inject(next_inject, weight, following)
        if state.gate_event is not None:
            _gates.join(state.gate_event, state.residual.device)
        if weight is None:
            return HCState(ops.hc_apply(block_out, state.residual, state.gate_partials))
        boundary = (block_out, state.residual, state.gate_partials, weight)
        if next_inject is None:
            combined, normed = ops.hc_apply_norm(*boundary, eps)
            return HCState(combined, normed, _origin=_Origin(combined, _version(combined), following))
        combined, normed, partials = ops.hc_boundary(*boundary, next_inject, eps)
        origin = _Origin(combined, _version(combined), following, next_inject)
        return HCState(combined, normed, next_partials=partials, _origin=origin)

    def final_read(self, state: HCState) -> Tensor:
        """The final mixer: x [T, H] from the residual, and no gate, since nothing is written after it."""
        return ops.hc_mix(self._normed(state), self.w_down, self.w_up, streams=self.streams)

    def _normed(self, state: HCState) -> Tensor:
        self._check_state(state)
        if state.gate_partials is not None:
            raise InvalidArgument("state: was read already; write it before the next read")
        if state.normed is not None:
            return state.normed
        return ops.grouped_gemma_rmsnorm(state.residual, self.norm_weight, self.eps, group_size=self.hidden)

    def _check_inject(
        self, inject: Tensor, norm_weight: Tensor | None, following: HyperConnection | None
    ) -> None:
        if norm_weight is None:
            raise InvalidArgument("next_inject: given without next_norm, whose result its gate reads")
        _check_like("next_inject", inject, norm_weight, (self.streams, *self.norm_weight.shape))
        if torch.compiler.is_compiling() or following is None:
            return
        if following.inject_weight is not inject:
            raise InvalidArgument("next_inject: got another tensor than next_norm's own inject_weight")

    def _prepared(self, state: HCState, partials: Tensor) -> Tensor:
        """The gate partials that a state brings, if they are this connection's."""
        if partials.shape[2] != self.streams:
            raise InvalidArgument(
                f"state.next_partials: got {partials.shape[2]} streams, allowed {self.streams}"
            )
        origin = state._origin
        if origin is None or torch.compiler.is_compiling():
            return partials
        if origin.inject is not None and origin.inject is not self.inject_weight:
            raise InvalidArgument("state: its gate was prepared with another inject weight")
        return partials

    def _gate(self, normed: Tensor, inject_weight: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        # A compiled region stays on one stream, and no rows are no work to hide.
        aside = (
            self.gate_stream == "side"
            and normed.device.type == "cuda"
            and normed.shape[0] > 0
            and not torch.compiler.is_compiling()
        )
        return _gates.launch(normed, inject_weight) if aside else (ops.hc_gate(normed, inject_weight), None)

    def _check_state(self, state: HCState) -> None:
        if not isinstance(state, HCState):
            raise InvalidArgument(f"state: got a {type(state).__name__}, allowed an HCState")
        width = self.norm_weight.shape[0]
        _check_like("state.residual", state.residual, self.norm_weight, (state.residual.shape[0], width))
        origin = state._origin
        if origin is None or torch.compiler.is_compiling():
            return
        if origin.connection is not None and origin.connection is not self:
            raise InvalidArgument("state: was prepared for another HyperConnection")
        version = _version(state.residual)
        if None not in (version, origin.version) and version != origin.version:
            raise InvalidArgument(
                "state.residual: changed in place after its norm was prepared; use with_residual"
            )


@dataclass(frozen=True, eq=False)
class _Pending:
    """A gate that no write has joined yet, and the tensors that it still uses."""

    event: torch.cuda.Event
    main: torch.cuda.Stream
    captured: bool
    tensors: tuple[Tensor, Tensor]


class _GateStreams:
    """One side stream a device, and the lifetime of what is used on it.

    A gate's tensors belong to the stream that reads the state. Once that stream has joined the gate, its own
    order protects their memory. Until then they are held here, even if the caller drops the state. A gate
    that is never joined by a write is joined by the next eager read on the same stream; inside a capture,
    where its event may belong to a capture that failed and cannot be waited for, its tensors are held until
    the next eager read.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._pending: dict[int, list[_Pending]] = {}

    def prepare(self, device: torch.device) -> torch.cuda.Stream:
        """The device's stream, made at the first call: before a capture, which should not have to."""
        index = _index(device)
        with self._lock:
            if index not in self._streams:
                self._streams[index] = torch.cuda.Stream(device=index)
                self._pending[index] = []
            return self._streams[index]

    def launch(self, normed: Tensor, inject_weight: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        """Runs the gate on the side stream behind what the current stream has queued: partials and end."""
        index = _index(normed.device)
        side, main = self.prepare(normed.device), torch.cuda.current_stream(index)
        captured = capturing(normed.device)
        if not captured:
            self._settle(index, main)
        rows, streams = normed.shape[0], inject_weight.shape[0]
        partials = torch.empty((rows, SPLITS, streams), dtype=torch.float32, device=normed.device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            ops.hc_gate(normed, inject_weight, out=partials)
            event = side.record_event()
        with self._lock:
            self._pending[index].append(_Pending(event, main, captured, (normed, partials)))
        return partials, event

    def join(self, event: torch.cuda.Event, device: torch.device) -> None:
        """Makes the current stream wait for a gate."""
        index = _index(device)
        stream = torch.cuda.current_stream(index)
        stream.wait_event(event)
        with self._lock:
            held = self._pending.get(index, [])
            gate = next((gate for gate in held if gate.event is event), None)
            if gate is None:
                return
            if gate.main != stream:
                if gate.captured:
                    return
                for tensor in gate.tensors:
                    tensor.record_stream(stream)
            held.remove(gate)

    def _settle(self, index: int, main: torch.cuda.Stream) -> None:
        with self._lock:
            held = self._pending[index]
            for gate in held:
                if gate.main == main and not gate.captured:
                    main.wait_event(gate.event)
            held[:] = [gate for gate in held if gate.main != main and not gate.captured]


_gates = _GateStreams()


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _version(tensor: Tensor) -> int | None:
    """How often a tensor was changed in place; None where that is not tracked."""
    if torch.compiler.is_compiling() or tensor.is_inference():
        return None
    return tensor._version


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise InvalidArgument(f"{name}: got a {type(value).__name__}, allowed a torch.Tensor")


def _check_like(name: str, tensor: Tensor, like: Tensor, shape: tuple[int, ...]) -> None:
    _check_tensor(name, tensor)
    if tuple(tensor.shape) != tuple(shape):
        raise InvalidArgument(f"{name}: got shape {list(tensor.shape)}, allowed {list(shape)}")
    if tensor.dtype != like.dtype:
        raise InvalidArgument(f"{name}: got {tensor.dtype}, allowed {like.dtype}")
    if tensor.device != like.device:
        raise InvalidArgument(f"{name}: on {tensor.device}, allowed {like.device}")
