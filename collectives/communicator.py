"""The communicator: N ranks, one-shot all-reduces, and an error instead of a hang when one of them dies.

    with Communicator.from_process_group(group, hidden=2560, max_tokens=32, top_k=10) as comm:
        y = comm.moe_finalize_all_reduce(expert_out, permuted_idx, expert_weights, shared_out, shared_gate)

Every rank makes the same calls with the same number of rows, in one order for `all_reduce` and in one order
for `moe_finalize_all_reduce`; the two have buffers of their own, so they may be under way on two streams at
once. The calls of one kind must follow one another on the device: one stream, or streams that wait for each
other.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from collectives import checks, launch
from collectives.engines import CHANNELS, Engine, Norm
from collectives.errors import CollectiveError, CollectiveTimeout, CommunicatorPoisoned, ranks_text
from collectives.heap import LocalHeap, SymmetricHeap
from collectives.launch import FORMS, Form
from collectives.layout import Layout
from collectives.rendezvous import TIMEOUT_S, Rendezvous, SoloRendezvous, StoreRendezvous, member_of
from collectives.transports.loopback import LoopbackTransport
from collectives.transports.select import select
from collectives.world import LOADED, Meeting, Start, World, checked, device_of, make_engine, seconds

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store

DEFAULT_TIMEOUT_S = 30.0

_MOE, _SUM = "moe_finalize_all_reduce", "all_reduce"


class Communicator:
    """One rank's end. Made by `from_process_group`, `from_store`, `local_world` or `loopback`.

    rank, world_size; device of all tensors; hidden, max_tokens, top_k as given; timeout_s: how long a rank
    waits for the others inside a round; side_stream: for work beside the current stream, None on the CPU. A
    call with more than max_tokens rows takes several rounds. Not thread-safe.
    """

    def __init__(
        self,
        engine: Engine,
        layout: Layout,
        rank: int,
        top_k: int,
        device: torch.device,
        timeout_s: float,
        owner: World,
    ):
        self.rank, self.world_size, self.device = rank, layout.world_size, device
        self.hidden, self.max_tokens, self.top_k = layout.hidden, layout.max_tokens, top_k
        self.timeout_s = timeout_s
        self.engine, self._world = engine, owner
        self.side_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._failure: CollectiveTimeout | None = None
        self._open = True
        self._calls = checks.Calls()

    @classmethod
    def from_process_group(
        cls,
        group: ProcessGroup | None = None,
        *,
        hidden: int,
        max_tokens: int,
        top_k: int,
        transport: str = "auto",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        device: torch.device | str | None = None,
        store: Store | None = None,
        name: str = "communicator",
        forms: Sequence[Form] = FORMS,
        provider: launch.Provider | None = None,
        meeting_s: float = TIMEOUT_S,
    ) -> Communicator:
        """The ranks of a process group (None: the default one), which need be of no backend in particular.
        Collective.

        hidden: a multiple of 8. max_tokens: 1 to 32. transport: see collectives.transports. device: by
        default the current CUDA device, where there is none the CPU. store: where survivors and restarted
        processes meet in `reset`; its server must outlive the ranks. name: the same on all ranks, another for
        each communicator of one store. forms: the fused kernels to load now, so that none is loaded while a
        peer waits; each takes about a second to compile, once. meeting_s: how long ranks wait for each other
        at every step of this.

        Raises ValueError for arguments, SymmetricMismatch where ranks differ, TransportUnavailable where none
        serves, RendezvousTimeout where ranks do not come.
        """
        if store is not None:
            checks.store("Communicator", store)
        if group is not None:
            checks.group("Communicator", group)
        # before anything reaches the store: a rank that asks for nonsense is not there for the others
        world_size = member_of(group)[2]
        layout, timeout_s = checked(world_size, hidden, max_tokens, top_k, timeout_s, forms, meeting_s, name)
        device = device_of(device)
        rendezvous = StoreRendezvous.of_group(group, meeting_s)
        return cls._connected(
            rendezvous,
            layout,
            top_k,
            transport,
            timeout_s,
            device,
            store,
            name,
            forms,
            provider,
            meeting_s,
        )

    @classmethod
    def from_store(
        cls,
        store: Store,
        rank: int,
        world_size: int,
        *,
        hidden: int,
        max_tokens: int,
        top_k: int,
        transport: str = "auto",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        device: torch.device | str | None = None,
        name: str = "communicator",
        forms: Sequence[Form] = FORMS,
        provider: launch.Provider | None = None,
        meeting_s: float = TIMEOUT_S,
    ) -> Communicator:
        """Ranks that meet at a store, without a process group: a restarted process meets the survivors'
        `reset` so. Arguments as `from_process_group`; meeting_s: how long ranks wait for each other at every
        step."""
        layout, timeout_s = checked(world_size, hidden, max_tokens, top_k, timeout_s, forms, meeting_s, name)
        checks.whole("Communicator", "rank", rank, 0, world_size - 1)
        checks.store("Communicator", store)
        device = device_of(device)
        rendezvous = StoreRendezvous.join(store, rank, world_size, meeting_s, name)
        return cls._connected(
            rendezvous,
            layout,
            top_k,
            transport,
            timeout_s,
            device,
            store,
            name,
            forms,
            provider,
            meeting_s,
        )

    @classmethod
    def local_world(
        cls,
        n: int,
        device: torch.device | str,
        *,
        hidden: int,
        max_tokens: int,
        top_k: int,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        forms: Sequence[Form] = FORMS,
        provider: launch.Provider | None = None,
    ) -> list[Communicator]:
        """N virtual ranks in this process, on one device. On a GPU each rank's calls go to a stream of its
        own, and CUDA_DEVICE_MAX_CONNECTIONS (set before CUDA starts) must be at least the number of streams
        in use, or one rank's launch may queue behind another's wait. On the CPU each rank is a thread of its
        own."""
        layout, timeout_s = checked(n, hidden, max_tokens, top_k, timeout_s, forms)
        heap = LocalHeap(n, device_of(device))
        buffers = {name: heap.allocate(layout.nbytes, name, torch.bfloat16) for name in CHANNELS}
        world = World(heap, None)
        for rank in range(n):
            own = {name: buffers[name][rank] for name in CHANNELS}
            engine = make_engine(layout, rank, top_k, heap.device, own, timeout_s, n, forms, provider)
            world.members.append(cls(engine, layout, rank, top_k, heap.device, timeout_s, world))
        return list(world.members)

    @classmethod
    def loopback(
        cls,
        n: int,
        device: torch.device | str,
        *,
        hidden: int,
        max_tokens: int,
        top_k: int,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        forms: Sequence[Form] = FORMS,
        provider: launch.Provider | None = None,
    ) -> Communicator:
        """Rank 0 of a world of N that is not there: its own pushes fill all of its slots. Sums N equal terms;
        for measuring one rank alone."""
        layout, timeout_s = checked(n, hidden, max_tokens, top_k, timeout_s, forms)
        if device_of(device).type != "cuda":
            checks.fail("Communicator", "device", device, "a CUDA device: the host protocol has no loopback")
        heap = SymmetricHeap(LoopbackTransport(device_of(device)), SoloRendezvous(0, n))
        buffers = {
            name: heap.allocate(layout.nbytes, name, torch.bfloat16, layout.slot_bytes) for name in CHANNELS
        }
        engine = make_engine(layout, 0, top_k, heap.device, buffers, timeout_s, 1, forms, provider)
        world = World(heap, None)
        world.members.append(cls(engine, layout, 0, top_k, heap.device, timeout_s, world))
        return world.members[0]

    @classmethod
    def _connected(
        cls,
        rendezvous: Rendezvous,
        layout: Layout,
        top_k: int,
        transport: str,
        timeout_s: float,
        device: torch.device,
        store: Store | None,
        name: str,
        forms: Sequence[Form],
        provider: launch.Provider | None,
        meeting_s: float,
    ) -> Communicator:
        chosen = select(transport, device, rendezvous, timeout_s=meeting_s)
        heap = SymmetricHeap(chosen.transport, rendezvous, timeout_s=meeting_s)
        try:
            start = Start.of(heap.device, layout, top_k)
            sharing = start.agree(rendezvous, meeting_s)  # first: sizes of one product would be mapped alike
            buffers = {
                name: heap.allocate(layout.nbytes, name, torch.bfloat16, layout.slot_bytes)
                for name in CHANNELS
            }
            engine = make_engine(
                layout, rendezvous.rank, top_k, heap.device, buffers, timeout_s, sharing, forms, provider
            )
            rendezvous.barrier(meeting_s, LOADED)  # none is loaded while a peer already waits
        except BaseException:
            heap.close(collective=False)
            raise
        world = World(heap, Meeting(rendezvous, store, name, transport, start, chosen.explain()))
        comm = cls(engine, layout, rendezvous.rank, top_k, heap.device, timeout_s, world)
        world.members.append(comm)
        return comm

    def all_reduce(
        self,
        x: Tensor,
        out: Tensor | None = None,
        *,
        norm_weight: Tensor | None = None,
        eps: float = 1e-6,
        weight_offset: float = 0.0,
    ) -> Tensor:
        """The sum over ranks of x [T, hidden] bf16 or fp16: in rank order in fp32 from +0.0, rounded once.
        out: like x, may be x itself. norm_weight [hidden]: the sum is normalised as by
        `moe_finalize_all_reduce`. T, dtype and norm are the same on every rank: where dtypes differ nothing
        tells, and the results are wrong.

        Raises ValueError for arguments, CollectiveTimeout or CommunicatorPoisoned as `check`. On a GPU the
        wait is on the device, so a timeout is raised by a later call.
        """
        self.check()
        key = (_SUM, _trait(x), _trait(norm_weight), _trait(out), _number(eps), _number(weight_offset))
        if self._calls.find(key) is None:
            of_x = f"(T, H) with H = {self.hidden}"
            checks.tensor(_SUM, "x", x, (None, self.hidden), checks.ACT, self.device, of_x)
            self._check_norm(_SUM, norm_weight, eps, weight_offset, x.dtype)
            if out is not None:
                self._check_out(_SUM, out, x.shape[0], x.dtype)
                checks.apart(_SUM, out, {"x": x, "norm_weight": norm_weight}, "x")
            self._calls.keep(key, True)
        norm: Norm | None = None if norm_weight is None else (_plain(norm_weight), eps, weight_offset)
        result = torch.empty_like(x) if out is None else out
        source, target = _plain(x), _plain(result)
        for at in self._pieces(x.shape[0]):
            self.engine.sum(source[at], norm, target[at])
        self._raise_if_expired()
        return result

    def moe_finalize_all_reduce(
        self,
        expert_out: Tensor,
        permuted_idx: Tensor,
        expert_weights: Tensor,
        shared_out: Tensor | None = None,
        shared_gate: Tensor | None = None,
        norm_weight: Tensor | None = None,
        eps: float = 1e-6,
        out: Tensor | None = None,
        *,
        weight_offset: float = 0.0,
        routing_complete: bool = False,
    ) -> Tensor:
        """The rank-local finalize, summed over ranks, in one kernel; optionally normalised.

        expert_out [P, H] bf16, permuted_idx [T*K] int32, expert_weights [T, K] bf16 or fp32, shared_out [T,
        H] bf16, shared_gate [T] fp32 (only with shared_out), norm_weight [H] bf16; out [T, H] bf16, may be
        shared_out. With a norm weight: bf16(s * rsqrt(mean(s^2) + eps) * (norm_weight + weight_offset)) of
        the rounded sum s. norm_weight is loaded before the kernel waits for its predecessor.

        routing_complete: permuted_idx and expert_weights are complete before the preceding kernel of the
        stream starts, so they too may be loaded before that wait. Raises as `all_reduce`.
        """
        self.check()
        tensors = (expert_out, permuted_idx, expert_weights, shared_out, shared_gate)
        key: tuple[Any, ...] = (_MOE, *map(_trait, tensors), _trait(norm_weight), _trait(out))
        key = (*key, _number(eps), _number(weight_offset), _number(routing_complete))
        form = self._calls.find(key)
        if form is None:
            form = self._check_moe(tensors, norm_weight, eps, out, weight_offset, routing_complete)
            self._calls.keep(key, form)
        norm: Norm | None = None if norm_weight is None else (_plain(norm_weight), eps, weight_offset)
        rows = expert_weights.shape[0]
        result = expert_out.new_empty(rows, self.hidden) if out is None else out
        target, given = _plain(result), [None if t is None else _plain(t) for t in tensors]
        if 0 < rows <= self.engine.rows_at_once:
            self.engine.fused(form, given, norm, target)
        else:
            # All copies before the first round: with `routing_complete` a round reads its own while the
            # kernel before it may still run.
            pieces = [(self._piece(given, at), target[at]) for at in self._pieces(rows)]
            for some, there in pieces:
                self.engine.fused(form, some, norm, there)
        self._raise_if_expired()
        return result

    def check(self) -> None:
        """Raises CollectiveTimeout if a wait has expired since the last call, CommunicatorPoisoned if one had
        before, CollectiveError if closed. Does not wait for the device."""
        if not self._open:
            raise CollectiveError(f"rank {self.rank}: the communicator is closed")
        if self._failure is not None:
            raise CommunicatorPoisoned(
                f"rank {self.rank}: {ranks_text(self._failure.missing)} did not arrive in round "
                f"{self._failure.epoch}; reset() makes the communicator usable again"
            ) from self._failure
        self._raise_if_expired()

    def reset(self, group: ProcessGroup | None = None, *, meeting_s: float = TIMEOUT_S) -> None:
        """Makes the communicator usable again, every slot empty and every counter 0. Collective.

        All ranks meet anew: those of `group` if one is given, else at the store given at construction, where
        a restarted process comes by `from_store`. Waits for this rank's kernels; every wait in them is
        bounded. Captured graphs stay valid. In a local world one rank's reset is that of all ranks, none of
        which may be in a call, and does nothing where no rank has failed.

        Raises ValueError for arguments, RendezvousTimeout naming the ranks that do not come within meeting_s;
        it may be called again.
        """
        if not self._open:
            raise CollectiveError(f"rank {self.rank}: the communicator is closed")
        seconds("reset", "meeting_s", meeting_s)
        if group is not None:
            checks.group("reset", group)
        self._world.reset(self, group, meeting_s)

    def explain(self) -> str:
        """Which transport the ranks use and why, for a person."""
        return self._world.explain()

    def close(self) -> None:
        """Gives the symmetric memory back. Collective, but waits only briefly for ranks that do not come. In
        a local world it closes all ranks."""
        self._world.close(collective=self._failure is None)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._world.close(collective=error is None and self._failure is None)

    def _raise_if_expired(self) -> None:
        found = self.engine.expired()
        if found is not None:
            self._failure = CollectiveTimeout(self.rank, *found)
            raise self._failure

    def _pieces(self, rows: int) -> list[slice]:
        step = self.engine.rows_at_once
        return [slice(at, min(at + step, rows)) for at in range(0, rows, step)]

    def _piece(self, tensors: Sequence[Tensor | None], at: slice) -> list[Tensor | None]:
        """The rows `at` of a fused call's tensors."""
        k = self.top_k
        rows = (slice(None), slice(at.start * k, at.stop * k), at, at, at)
        return [None if t is None else _aligned(t[some]) for t, some in zip(tensors, rows, strict=True)]

    def _check_out(self, op: str, out: Tensor, rows: int, dtype: torch.dtype) -> None:
        shape = (rows, self.hidden)
        checks.tensor(op, "out", out, shape, (dtype,), self.device, str(shape))

    def _check_norm(
        self, op: str, weight: Tensor | None, eps: float, weight_offset: float, dtype: torch.dtype
    ) -> None:
        if weight is not None:
            of_weight = f"(H,) with H = {self.hidden}"
            checks.tensor(op, "norm_weight", weight, (self.hidden,), (dtype,), self.device, of_weight)
        checks.scalar(op, "eps", eps, at_least=0.0)
        checks.scalar(op, "weight_offset", weight_offset)

    def _check_moe(
        self,
        tensors: tuple[Tensor | None, ...],
        norm_weight: Tensor | None,
        eps: float,
        out: Tensor | None,
        weight_offset: float,
        routing_complete: bool,
    ) -> Form:
        _, _, expert_weights, shared_out, shared_gate = tensors
        checks.finalize_inputs(_MOE, tensors, self.hidden, self.top_k, self.device, torch.bfloat16)
        assert expert_weights is not None
        rows = expert_weights.shape[0]
        self._check_norm(_MOE, norm_weight, eps, weight_offset, torch.bfloat16)
        if not isinstance(routing_complete, bool):
            checks.fail(_MOE, "routing_complete", repr(routing_complete), "True or False")
        if out is not None:
            self._check_out(_MOE, out, rows, torch.bfloat16)
            names = ("expert_out", "permuted_idx", "expert_weights", "shared_out", "shared_gate")
            others = dict(zip(names, tensors, strict=True))
            checks.apart(_MOE, out, {**others, "norm_weight": norm_weight}, "shared_out")
        shared = "none" if shared_out is None else "plain" if shared_gate is None else "gated"
        return Form(
            checks.WEIGHT_NAMES[expert_weights.dtype], shared, norm_weight is not None, routing_complete
        )


def _trait(t: Any) -> tuple[Any, ...] | None:
    if not isinstance(t, Tensor):
        return None if t is None else (type(t),)
    try:
        return t.shape, t.dtype, t.stride(), t.data_ptr(), t.device, t.is_neg()
    except RuntimeError:  # sparse, nested: refused later, by name
        return (type(t),)


def _number(value: Any) -> Any:
    """A scalar in the key of a call: what is none may not be hashable, and is refused later."""
    return (type(value), value if isinstance(value, (int, float)) else None)


def _plain(t: Tensor) -> Tensor:
    """Without autograd, which takes no part in a round."""
    return t.detach() if t.requires_grad else t


def _aligned(t: Tensor) -> Tensor:
    """A slice of rows may start anywhere; vector loads want 16 bytes."""
    return t if t.data_ptr() % checks.ALIGNMENT == 0 else t.clone()
