"""Checks of a call's arguments, before anything is launched or written.

Messages have the form of the operators': `all_reduce: x: got shape (1, 8), allowed (T, H) with H = 2560`.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

ALIGNMENT = 16
BF16 = (torch.bfloat16,)
ACT = (torch.bfloat16, torch.float16)
WEIGHT_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def fail(op: str, name: str, got: object, allowed: str) -> NoReturn:
    """Raises ValueError: argument `name` of `op` is `got`, not what is `allowed`."""
    raise ValueError(f"{op}: {name}: got {got}, allowed {allowed}")


def tensor(
    op: str,
    name: str,
    value: Any,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    letters: str,
) -> None:
    """One tensor: None in `shape` is any extent; `letters` says the shape in messages."""
    if not isinstance(value, Tensor):
        fail(op, name, "None" if value is None else f"a {type(value).__name__}", "a torch.Tensor")
    if value.is_nested or value.layout is not torch.strided:
        kind = "a nested tensor" if value.is_nested else f"layout {value.layout}"
        fail(op, name, kind, "a dense torch.Tensor")
    if value.device != device:
        fail(op, name, f"device {value.device}", f"{device}, the communicator's")
    got = tuple(value.shape)
    if len(got) != len(shape) or any(w is not None and g != w for g, w in zip(got, shape, strict=True)):
        fail(op, name, f"shape {got}", letters)
    if value.dtype not in dtypes:
        fail(op, name, f"dtype {value.dtype}", " or ".join(map(str, dtypes)))
    if not value.is_contiguous():
        fail(op, name, f"strides {tuple(value.stride())}", "a contiguous tensor")
    if value.is_neg() or value.is_conj() or torch._is_zerotensor(value):
        fail(op, name, "a view that its memory does not hold", "a tensor whose memory holds its values")
    nbytes, storage = value.numel() * value.element_size(), value.untyped_storage()
    if nbytes and value.data_ptr() + nbytes > storage.data_ptr() + storage.nbytes():
        fail(op, name, f"a storage of {storage.nbytes()} bytes", f"one that holds the tensor's {nbytes}")
    if past := value.data_ptr() % ALIGNMENT:
        fail(op, name, f"an address {past} bytes past a multiple of {ALIGNMENT}", f"multiples of {ALIGNMENT}")


def store(op: str, value: Any) -> None:
    """A store where processes meet."""
    from torch.distributed.distributed_c10d import Store  # not in a torch built without distributed

    if not isinstance(value, Store):
        got = "None" if value is None else f"a {type(value).__name__}"
        fail(op, "store", got, "a torch.distributed.Store, such as a TCPStore")


def group(op: str, value: Any) -> None:
    """A process group, of this process or not."""
    import torch.distributed as dist

    if not isinstance(value, dist.ProcessGroup) and value != dist.GroupMember.NON_GROUP_MEMBER:
        fail(op, "group", f"a {type(value).__name__}", "a torch.distributed.ProcessGroup or None")


def scalar(op: str, name: str, value: Any, at_least: float | None = None) -> float:
    """A finite real number, Python's own."""
    own = isinstance(value, (int, float))
    found = finite(value) if own else None
    if found is None or (at_least is not None and found < at_least):
        bound = "" if at_least is None else f" of at least {at_least:g}"
        fail(op, name, shown(value), f"a finite number{bound}{'' if own else ', an int or a float'}")
    return found


def whole(op: str, name: str, value: Any, least: int, most: int, multiple: int = 1) -> int:
    """An integer between two bounds, Python's own."""
    own = isinstance(value, int)
    if not own or isinstance(value, bool) or not least <= value <= most or value % multiple:
        of = f"a multiple of {multiple}" if multiple > 1 else "an integer"
        fail(op, name, shown(value), f"{of} from {least} to {most}{'' if own else ', an int'}")
    return int(value)


def finite(value: Any) -> float | None:
    """A real number as a float; None for what is none, for a bool or a tensor, and for what is not finite."""
    if isinstance(value, (bool, Tensor)) or not isinstance(value, numbers.Real):
        return None
    try:
        found = float(value)
    except OverflowError:  # an integer beyond all floats
        return None
    return found if math.isfinite(found) else None


def shown(value: Any) -> str:
    """A value in a message; a tensor by its type alone, since printing one may wait for its device, and a
    number of very many digits by its size."""
    if isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    if isinstance(value, int) and value.bit_length() > 1024:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)


def finalize_inputs(
    op: str, tensors: Sequence[Any], hidden: int, top_k: int, device: torch.device, act: torch.dtype
) -> None:
    """expert_out, permuted_idx, expert_weights, shared_out and shared_gate of one call; act: of the rows.

    The weights may be fp16 where the rows are."""
    expert_out, permuted_idx, expert_weights, shared_out, shared_gate = tensors
    rows_dtype, of_h = (act,), f"H = {hidden}"
    tensor(op, "expert_out", expert_out, (None, hidden), rows_dtype, device, f"(P, H) with {of_h}")
    weights = tuple(WEIGHT_NAMES) + ((act,) if act is torch.float16 else ())
    tensor(op, "expert_weights", expert_weights, (None, top_k), weights, device, f"(T, K) with K = {top_k}")
    rows = expert_weights.shape[0]
    of_t = f"with T = {rows} of expert_weights"
    slots = f"(T*K,) {of_t}, K = {top_k}"
    tensor(op, "permuted_idx", permuted_idx, (rows * top_k,), (torch.int32,), device, slots)
    if shared_out is not None:
        tensor(op, "shared_out", shared_out, (rows, hidden), rows_dtype, device, f"(T, H) {of_t}, {of_h}")
    if shared_gate is not None:
        if shared_out is None:
            fail(op, "shared_gate", "a tensor", "None where shared_out is None")
        tensor(op, "shared_gate", shared_gate, (rows,), (torch.float32,), device, f"(T,) {of_t}")


def apart(op: str, out: Tensor, others: dict[str, Tensor | None], in_place: str) -> None:
    """`out` overlaps none of the others, unless it is exactly the memory of the one named `in_place`."""
    low = out.data_ptr()
    high = low + out.numel() * out.element_size()
    for name, other in others.items():
        if other is None:
            continue
        start = other.data_ptr()
        if start < high and low < start + other.numel() * other.element_size():
            if name == in_place and start == low:
                continue
            same = " unless it is exactly the same memory" if name == in_place else ""
            fail(op, "out", f"memory that overlaps {name}", f"no overlap with {name}{same}")


class Calls:
    """Calls that passed: a call with the same shapes, dtypes and addresses is not checked again."""

    KEPT = 512

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Any] = {}

    def find(self, key: tuple[Any, ...]) -> Any:
        """What `keep` was given for the key, or None."""
        return self._known.get(key)

    def keep(self, key: tuple[Any, ...], value: Any) -> None:
        """Remembers a call that passed."""
        if len(self._known) >= self.KEPT:
            self._known.clear()
        self._known[key] = value
