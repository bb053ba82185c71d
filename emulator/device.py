"""`with emulator.device("sm_100a"):` what the DSL compiles inside runs on the CPU, and is checked as it
runs."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from emulator import capture, dlpack, intercept
from emulator.counters import Counters
from emulator.errors import EmulatorError
from emulator.findings import CATEGORIES, Finding, FindingsError
from emulator.launch import Config, integers, pack_params, read_config, read_params, refuse, three
from emulator.machine import INTERRUPTED, Kernel, Machine, Record, kernels
from emulator.memory import FOREIGN, READ_ONLY, Region, disjoint, extent
from emulator.targets import Target, target_of

SCHEDULES = ("round_robin", "random", "adversarial")
KEPT = 4096
"""A device remembers the counters of so many launches and so many findings, the latest."""
_active: Device | None = None
_lock = threading.Lock()
# What host code holds handles of, device or no device: a compiled function loads its module once in its life.
_modules: list[str] = []
_kernels: list[tuple[int, str]] = []


@dataclasses.dataclass(frozen=True)
class _Launch:
    kernel: Kernel
    config: Config
    params: Any
    stream: int


class Device:
    """An emulated device; made by `device`.

    findings: of the launches so far. launches: their counters. Of both the latest KEPT; the lists are the
    caller's to clear."""

    def __init__(
        self,
        target: Target,
        checks: int,
        schedule: int,
        seed: int,
        keep_findings: bool,
        resident: int | None,
        rewrite: Callable[[str], str] | None = None,
        brief: bool = False,
    ) -> None:
        self.target = target
        self._rewrite, self._brief = rewrite, brief or rewrite is not None
        self.findings: list[Finding] = []
        self.launches: list[Counters] = []
        self._keep = keep_findings
        self._machine = Machine()
        self._interrupted = False
        self._machine.configure(
            checks=checks,
            policy=schedule,
            seed=seed,
            resident=resident or (4 if schedule == 0 else 2 + seed % 15),
            sms=target.sms,
            stop_at_first=False,
            interrupted=INTERRUPTED(self._poll),
        )
        self._registered: list[Region] = []
        self._names: dict[int, str] = {}
        self._call: list[Region] = []
        self._pending: BaseException | None = None
        self._batch: list[_Launch] | None = None
        self._stream = 0
        self._hooks = intercept.make_hooks(self._load, self._kernel, self._launch)
        for attribute, value in target.attributes().items():
            self._hooks.attributes[attribute] = value

    @contextlib.contextmanager
    def active(self) -> Iterator[Device]:
        """While open, what is compiled and called goes to this device. Raises EmulatorError if another is
        open."""
        global _active
        with _lock:
            if _active is not None:
                raise EmulatorError("an emulated device is open already; one at a time")
            _active = self
        try:
            with (
                capture.capturing(),
                intercept.settings(self.target.name),
                intercept.calls(self._note, self._take_pending),
            ):
                intercept.set_hooks(self._hooks)
                try:
                    yield self
                finally:
                    intercept.set_hooks(None)
            pending = self._take_pending()
            if pending is not None:
                raise pending
        finally:
            with _lock:
                _active = None

    def close(self) -> None:
        """Frees the machine."""
        self._machine.close()

    # ---- memory
    def name(self, tensor: Any, name: str) -> None:
        """What findings call a tensor."""
        span = extent(tensor)
        if span is not None:
            self._names[span[0]] = name

    def register(self, memory: Any, name: str, *, foreign: bool = False, read_only: bool = False) -> None:
        """Memory that launches may touch though no argument spans it: a tensor or array, or (address,
        bytes).

        foreign: other processes access it as well; it is then checked for bounds only, and waiting for it
        is no deadlock."""
        span = (memory[0], memory[0] + memory[1]) if isinstance(memory, tuple) else extent(memory)
        if span is None:
            raise EmulatorError(
                f"register: got {type(memory).__name__}, allowed: a tensor, an array, (address, bytes)"
            )
        flags = (FOREIGN if foreign else 0) | (READ_ONLY if read_only else 0)
        self._registered.append(Region(span[0], span[1], name, flags))

    def uninitialized(self, tensor: Any, name: str | None = None) -> None:
        """Nothing of this tensor is written yet: reading it before a kernel wrote it is a finding."""
        span = extent(tensor)
        if span is not None:
            label = name or self._names.get(span[0], "an output")
            self._registered.append(Region(*span, label, 0, np.zeros(span[1] - span[0], np.uint8)))

    def forget(self) -> None:
        """Drops what was registered, named and marked, as before memory is reused."""
        self._registered.clear()
        self._names.clear()

    def synchronize(self) -> None:
        """The stream has drained: the next launch depends on none before it."""
        self._machine.drain()

    @contextlib.contextmanager
    def stream(self, number: int) -> Iterator[None]:
        """Launches made inside belong to a stream: inside `together`, those of one stream run one after
        another."""
        before, self._stream = self._stream, number
        try:
            yield
        finally:
            self._stream = before

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Launches made inside run when it closes, those of different streams interleaved: the ranks of a
        world."""
        if self._batch is not None:
            raise EmulatorError("together: already open")
        self._batch = []
        self._call = []
        try:
            yield
            batch, self._batch = self._batch, None
            self._run(batch, self._call)
        finally:
            self._batch = None

    # ---- hooks: called from host code, so nothing may be raised here
    def _guarded(self, action: Any, failed: int) -> int:
        try:
            return action()
        except BaseException as error:
            self._pending = self._pending or error
            return failed

    def _load(self, image: int) -> int:
        def action() -> int:
            ptx = capture.ptx_for(capture.cubin_of_image(image))
            if ptx is None:
                raise EmulatorError(
                    "a kernel that was compiled outside emulator.device(...): compile it inside, so that its "
                    "PTX is known"
                )
            _modules.append(ptx)
            return len(_modules)

        return self._guarded(action, 0)

    def _kernel(self, module: int, name: bytes) -> int:
        def action() -> int:
            known = kernels(_modules[module - 1])
            if name.decode() not in known:
                raise EmulatorError(f"the module has no kernel {name.decode()!r}; it has {sorted(known)}")
            _kernels.append((module, name.decode()))
            return len(_kernels)

        return self._guarded(action, 0)

    def _launch(self, config_at: int, handle: int, arguments: Any) -> int:
        def action() -> int:
            module, name = _kernels[handle - 1]
            kernel = self._translated(_modules[module - 1])[name]
            self._start(kernel, read_config(config_at), read_params(kernel, arguments))
            return 0

        return self._guarded(action, 719)

    def _poll(self) -> int:
        """Called by the machine now and then: a signal's handler (of Ctrl-C, of a test's time limit) runs
        here and may raise."""
        try:
            for _ in range(2):
                pass
        except BaseException as error:
            self._pending = self._pending or error
            return 1
        return 0

    def launch(
        self,
        ptx: str,
        arguments: Sequence[Any],
        *,
        grid: tuple[int, ...] = (1,),
        block: tuple[int, ...] = (32,),
        cluster: tuple[int, ...] = (1,),
        shared: int = 0,
        cooperative: bool = False,
        dependent: bool = False,
        entry: str | None = None,
    ) -> None:
        """Launches an entry (the only one, unless named) of a PTX text, no DSL involved. arguments:
        tensors and arrays, whose addresses are passed, and integers. `dependent`: with programmatic
        dependent launch."""
        known = self._translated(ptx, brief=True)
        kernel = known[entry or next(iter(known))]
        if self._batch is None:
            self._call = []
        self._collect(tuple(arguments), "argument")
        values = []
        for argument, (_, size) in zip(arguments, kernel.translated.params, strict=True):
            span = extent(argument)
            values.append(
                int(span[0] if span else argument).to_bytes(size, "little", signed=not span and argument < 0)
            )
        extents = (three(grid), three(block), three(cluster))
        config = Config(*extents, shared=shared, cooperative=cooperative, dependent=dependent)
        self._start(kernel, config, pack_params(kernel, values))

    def _translated(self, ptx: str, brief: bool = False) -> dict[str, Kernel]:
        return kernels(ptx if self._rewrite is None else self._rewrite(ptx), brief or self._brief)

    def _start(self, kernel: Kernel, config: Config, params: Any) -> None:
        refused = refuse(config, kernel, self.target)
        if refused is not None:
            self.findings.append(refused)
            raise FindingsError([refused])
        if self._batch is not None:
            self._batch.append(_Launch(kernel, config, params, self._stream))
        else:
            self._run([_Launch(kernel, config, params, 0)], self._call)

    # ---- calls
    def _note(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        if self._batch is None:
            self._call = []
        self._collect(args, "argument")
        self._collect(kwargs, "argument")
        return tuple(dlpack.as_cuda(a) for a in args)

    def _collect(self, value: Any, name: str) -> None:
        span = extent(value)
        if span is not None:
            self._call.append(Region(*span, self._names.get(span[0], name)))
        elif isinstance(value, dict):
            for key, item in value.items():
                self._collect(item, str(key))
        elif isinstance(value, tuple | list):
            for i, item in enumerate(value):
                self._collect(item, f"{name} {i}")
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            for field in dataclasses.fields(value):
                self._collect(getattr(value, field.name, None), field.name)

    def _take_pending(self) -> BaseException | None:
        error, self._pending = self._pending, None
        return error

    # ---- runs
    def _run(self, batch: list[_Launch], call: list[Region]) -> None:
        if not batch:
            return
        regions = disjoint([dataclasses.replace(r) for r in (*call, *self._registered)])
        try:
            self._machine.memory(regions)
            for one in batch:
                numbers = integers(one.config, one.kernel, self.target, one.stream)
                self._machine.grid(one.kernel, numbers, one.params)
            self._machine.run()
            for i, one in enumerate(batch):
                moved = self._machine.traffic(i, regions)
                name = one.kernel.translated.name
                self.launches.append(Counters(name, **self._machine.counters(i), tensors=moved))
            found = [self._finding(r, batch) for r in self._machine.records()]
        finally:
            self._machine.reset()
        self._written_back(regions)
        self.findings += found
        del self.findings[:-KEPT], self.launches[:-KEPT]
        if found and not self._keep:
            raise FindingsError(found)

    def _written_back(self, regions: list[Region]) -> None:
        """What merged regions learned of initialised bytes goes back to the registered ones."""
        for region in regions:
            if region.written is None:
                continue
            for own in self._registered:
                if (
                    own.written is not None
                    and own.written is not region.written
                    and region.lo <= own.lo
                    and own.hi <= region.hi
                ):
                    own.written[:] = region.written[own.lo - region.lo : own.hi - region.lo]

    def _finding(self, r: Record, batch: list[_Launch]) -> Finding:
        kernel = batch[r.grid].kernel
        line = kernel.ptx[r.line - 1].strip() if 0 < r.line <= len(kernel.ptx) else ""
        return Finding(
            CATEGORIES[r.category],
            r.text.decode(errors="replace"),
            kernel.translated.name,
            r.line,
            line[:120],
            r.warp,
            None if r.lane == 0xFFFFFFFF else r.warp * 32 + r.lane,
            tuple(r.cta),
            kernel.translated.lines.get(r.line),
            r.count,
            batch[r.grid].stream if len(batch) > 1 else None,
        )


def checks_mask(checks: bool | Iterable[str]) -> int:
    """Which checks are on, as the machine takes it. Raises EmulatorError for a name that is none."""
    if isinstance(checks, bool):
        # without checks, what a run cannot go on from is still said
        return (
            (1 << len(CATEGORIES)) - 1
            if checks
            else sum(1 << CATEGORIES.index(c) for c in ("bounds", "deadlock", "limit"))
        )
    out = 0
    for name in checks:
        if name not in CATEGORIES:
            raise EmulatorError(f"checks: got {name!r}, allowed {', '.join(CATEGORIES)}")
        out |= 1 << CATEGORIES.index(name)
    return out


def open_device(
    target: str = "sm_100a",
    *,
    checks: bool | Iterable[str] = True,
    schedule: str = "round_robin",
    seed: int = 0,
    on_finding: str = "raise",
    resident: int | None = None,
    rewrite: Callable[[str], str] | None = None,
    brief: bool = False,
) -> Device:
    """A device, to be used with `active()` any number of times, then closed. Arguments as `device` takes
    them."""
    if schedule not in SCHEDULES:
        raise EmulatorError(f"schedule: got {schedule!r}, allowed {', '.join(SCHEDULES)}")
    if on_finding not in ("raise", "keep"):
        raise EmulatorError(f"on_finding: got {on_finding!r}, allowed raise, keep")
    if resident is not None and resident < 1:
        raise EmulatorError(f"resident: got {resident}, allowed at least 1")
    order = SCHEDULES.index(schedule)
    return Device(
        target_of(target), checks_mask(checks), order, seed, on_finding == "keep", resident, rewrite, brief
    )


@contextlib.contextmanager
def device(target: str = "sm_100a", **options: Any) -> Iterator[Device]:
    """Emulates a device: functions that the CuTe DSL compiles inside launch on the CPU, on CPU tensors.

    checks: all (True), none but the vital ones (False), or names from findings.CATEGORIES. schedule: how
    warps, CTAs and ranks are interleaved (SCHEDULES), by `seed`. on_finding: "raise" FindingsError from
    the call, or "keep" them in `findings`. resident: clusters of an ordinary grid that run at a time at
    first. rewrite: changes PTX before it is translated, for faults on purpose. brief: build kernels
    without optimising, for runs that are shorter than the build. Raises EmulatorError for a bad argument,
    without a C compiler, and if a device is open already."""
    made = open_device(target, **options)
    try:
        with made.active():
            yield made
    finally:
        made.close()


def current() -> Device | None:
    """The device that is open here."""
    return _active
