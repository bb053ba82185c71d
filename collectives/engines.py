"""What carries a communicator's rounds: kernels on a GPU, or the host protocol over memory of CPU processes.

An engine has two channels that share nothing: "plain" for the general all-reduce, "moe" for the decode path.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from collectives import launch
from collectives.channel import DeviceChannel, Record
from collectives.errors import CollectiveError
from collectives.host_push import Expired, HostChannel, rmsnorm
from collectives.launch import Form, Plain
from collectives.layout import Layout
from cute_kernels.moe import config

CHANNELS = ("plain", "moe")

Norm = tuple[Tensor, float, float]
"""Weight, eps, weight offset."""

RESIDENT_THREADS = 40960
"""Where ranks share a GPU, all CTAs of a round have to be resident, since each waits for the others': this
many threads are half of what 132 SMs hold at the registers of the largest kernel."""


class Engine(ABC):
    """Runs rounds; arguments are checked before."""

    rows_at_once: int
    """Rows of one round at most."""

    @abstractmethod
    def sum(self, x: Tensor, norm: Norm | None, out: Tensor) -> None:
        """The sum of all ranks' x [T, H], normalised if asked for, into out."""

    @abstractmethod
    def fused(self, form: Form, tensors: Sequence[Tensor | None], norm: Norm | None, out: Tensor) -> None:
        """Finalize, sum, norm. tensors: expert_out, permuted_idx, expert_weights, shared_out, shared_gate."""

    @abstractmethod
    def expired(self) -> tuple[list[int], int] | None:
        """The missing ranks and the round of a wait that expired, else None. Does not wait for the device."""

    @abstractmethod
    def quiesce(self) -> None:
        """Waits until no round of this rank is under way; bounded, as every round is."""

    @abstractmethod
    def clear(self) -> None:
        """Everything as new: slots empty, counters 0. With all ranks quiet."""


class DeviceEngine(Engine):
    """By compiled kernels, on the current stream of `device`."""

    def __init__(
        self,
        layout: Layout,
        rank: int,
        top_k: int,
        device: torch.device,
        buffers: dict[str, tuple[Tensor, Tensor]],
        timeout_s: float,
        sharing: int,
        provider: launch.Provider | None,
    ):
        """buffers: per channel, this rank's memory and the addresses of all ranks'. sharing: ranks on this
        device."""
        target = launch.resolve(launch.TARGET_OF)(device)
        if target is None:
            raise CollectiveError(f"device: got {device}, allowed a GPU that kernels are built for")
        self.layout, self.top_k, self.device, self.target = layout, top_k, device, target
        self._provider = provider or launch.resolve(launch.PROVIDER)
        self.record = Record(layout.world_size, device)
        self.channels = {
            name: DeviceChannel(layout, rank, *buffers[name], self.record, target, timeout_s)
            for name in CHANNELS
        }
        self._kernels: dict[Form | Plain, Callable[..., None]] = {}
        self._norm_fits = config.norm_fits(target, layout.hidden)
        row = 2 * config.parts(target, layout.hidden) * config.threads(target, layout.hidden)
        room = layout.max_tokens if sharing == 1 else RESIDENT_THREADS // (row * sharing)
        self.rows_at_once = max(1, min(layout.max_tokens, room))

    def load(self, forms: Iterable[Form]) -> None:
        """Compiles if need be, and loads, the bf16 sum and the fused kernels of `forms`; if a form has a
        norm, the sum with a norm as well."""
        wanted: list[Form | Plain] = [Plain(), *forms]
        if any(form.norm for form in wanted):
            wanted.append(Plain(norm=True))
        for form in wanted:
            if not form.norm or self._norm_fits:
                self._kernel(form)
        if not self._norm_fits:  # torch's kernels for it are loaded now as well
            out = torch.zeros(1, self.layout.hidden, dtype=torch.bfloat16, device=self.device)
            out.copy_(rmsnorm(out, out[0], 1e-6, 0.0))
        torch.cuda.synchronize(self.device)

    def sum(self, x: Tensor, norm: Norm | None, out: Tensor) -> None:
        dtype = "bf16" if x.dtype is torch.bfloat16 else "fp16"
        tensors = (x, None, None, None, None)
        if norm is None or not self._norm_fits:
            self.channels["plain"].launch(self._kernel(Plain(dtype)), (*tensors, None), out)
            if norm is not None:
                out.copy_(rmsnorm(out, *norm))
        else:
            weight, eps, offset = norm
            self.channels["plain"].launch(
                self._kernel(Plain(dtype, True)), (*tensors, weight), out, eps, offset
            )

    def fused(self, form: Form, tensors: Sequence[Tensor | None], norm: Norm | None, out: Tensor) -> None:
        channel = self.channels["moe"]
        if norm is None:
            channel.launch(self._kernel(form), (*tensors, None), out)
        elif self._norm_fits:
            channel.launch(self._kernel(form), (*tensors, norm[0]), out, norm[1], norm[2])
        else:
            channel.launch(self._kernel(replace(form, norm=False)), (*tensors, None), out)
            out.copy_(rmsnorm(out, *norm))

    def expired(self) -> tuple[list[int], int] | None:
        return self.record.read() if self.record.expired else None

    def quiesce(self) -> None:
        torch.cuda.synchronize(self.device)

    def clear(self) -> None:
        with torch.cuda.device(self.device):
            self.record.clear()
            for channel in self.channels.values():
                channel.clear()
            torch.cuda.synchronize(self.device)

    def _kernel(self, form: Form | Plain) -> Callable[..., None]:
        kernel = self._kernels.get(form)
        if kernel is None:
            kernel = self._kernels[form] = self._loaded(form)
        return kernel

    def _loaded(self, form: Form | Plain) -> Callable[..., None]:
        with torch.cuda.device(self.device):
            if torch.cuda.is_current_stream_capturing():
                raise CollectiveError(
                    f"first use of {form} inside a CUDA-graph capture, where it cannot be loaded: name it in "
                    "`forms` at construction, or call it before"
                )
            params = form.params(self.layout.world_size, self.layout.hidden, self.top_k)
            kernel = self._provider(launch.MODULE, self.target, params)
            channel = self.channels["plain" if isinstance(form, Plain) else "moe"]
            channel.launch(kernel, *self._no_rows(form))
        return kernel

    def _no_rows(self, form: Form | Plain) -> tuple[list[Tensor | None], Tensor]:
        """A call of no rows: it loads the module and launches nothing."""
        dtype = torch.float16 if isinstance(form, Plain) and form.dtype == "fp16" else torch.bfloat16

        def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=self.device)

        out = empty(0, self.layout.hidden)
        norm_weight = empty(self.layout.hidden) if form.norm else None
        if isinstance(form, Plain):
            return [out, None, None, None, None, norm_weight], out
        weights = torch.float32 if form.weight_dtype == "fp32" else torch.bfloat16
        return [
            out,
            empty(0, dtype=torch.int32),
            empty(0, self.top_k, dtype=weights),
            None if form.shared == "none" else out,
            empty(0, dtype=torch.float32) if form.shared == "gated" else None,
            norm_weight,
        ], out


class HostEngine(Engine):
    """By the host protocol and the torch reference, on CPU tensors; a call returns when its round is over."""

    def __init__(
        self, layout: Layout, rank: int, views: dict[str, Callable[[int], Tensor]], timeout_s: float
    ):
        self.channels = {name: HostChannel(layout, rank, views[name], timeout_s) for name in CHANNELS}
        self.rows_at_once = layout.max_tokens
        self._views = views
        self._failure: tuple[list[int], int] | None = None
        self._finalize: Callable[..., Tensor] = launch.resolve(launch.FINALIZE)

    def sum(self, x: Tensor, norm: Norm | None, out: Tensor) -> None:
        self._exchange("plain", x, norm, out)

    def fused(self, form: Form, tensors: Sequence[Tensor | None], norm: Norm | None, out: Tensor) -> None:
        self._exchange("moe", self._finalize(*tensors), norm, out)

    def _exchange(self, channel: str, x: Tensor, norm: Norm | None, out: Tensor) -> None:
        if self._failure is not None:
            return  # as a kernel that finds the poison flag: no push, no wait
        try:
            total = self.channels[channel].exchange(x)
        except Expired as expired:
            self._failure = (expired.missing, expired.epoch)
            return
        out.copy_(total if norm is None else rmsnorm(total, *norm))

    def expired(self) -> tuple[list[int], int] | None:
        return self._failure

    def quiesce(self) -> None:
        pass

    def clear(self) -> None:
        for name, channel in self.channels.items():
            channel.map(self._views[name])
            channel.clear()
        self._failure = None
