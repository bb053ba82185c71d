"""`python -m bindings.precompile`: compiles every kernel of the model for the targets, and says what each
one uses.

    python -m bindings.precompile --targets sm_90a,sm_100a,sm_103a --out DIR
                                  [--sample] [--model SIZE=N,...] [--check] [--json FILE] [--jobs N]
                                  [--kernels OP,...]

Needs no GPU. The directory then serves as a read-only store (`FLASHNEXT_AOT_DIR=DIR`) on hosts of the same
CPU architecture. Where a C compiler is found here, such a host needs torch, apache-tvm-ffi and the CUDA
runtime (which torch's CUDA builds bring), but no nvidia-cutlass-dsl. What the user's cache already holds is
not compiled again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from bindings import cache, compiler, files, jit, link, sass, targets
from bindings.errors import InvalidArgument
from bindings.registry import ModelConfig
from bindings.store import LIBRARY, OBJECT, DamagedEntryError, Entry, Key, Store, is_entry_name

NOTE = "sass.json"
"""Where a cache entry keeps its report."""

CHUNK = 6
"""Kernels that a process builds at a time: progress comes by so many, and the disassembler starts once for
them."""


@dataclass(frozen=True)
class Config:
    """One kernel to build. kernel: the operator that it serves."""

    kernel: str
    key: Key


@dataclass(frozen=True)
class Result:
    """What became of a config: a report, or an error. compiled: it was not in the cache. library: it can be
    loaded without the compiler."""

    config: Config
    report: sass.Report | None
    error: str
    seconds: float
    compiled: bool
    library: bool

    def row(self) -> dict[str, Any]:
        """The entry of `--json`."""
        assert self.report is not None
        key = self.config.key
        row = {"kernel": self.config.kernel, "target": key.target, "module": key.module, "params": key.params}
        return {**row, **self.report.as_json()}


def registered(
    target_names: Sequence[str], model: ModelConfig | None = None, *, sample: bool = False
) -> list[Config]:
    """Every registered kernel configuration of the targets, as `kernels.precompile_configs` gives them."""
    from bindings import kernels

    return [
        Config(op, Key.of(module, target, params))
        for target in target_names
        for op, module, params in kernels.precompile_configs(target, model, sample=sample)
    ]


def build(configs: Sequence[Config], out: Path | None) -> list[Result]:
    """Compiles kernels or takes them from the cache, puts them into `out`, and reports on them; errors are
    results."""
    entries: list[Entry | None] = []
    results: list[Result] = []
    for config in configs:
        start, entry, compiled, error = time.perf_counter(), None, False, ""
        try:
            entry, compiled = _obtain(config.key)
            if out is not None:
                _export(entry, Store(out, private=False))
        except Exception as failure:  # the other kernels are built all the same
            entry, error = None, f"{type(failure).__name__}: {failure}"
        entries.append(entry)
        library = entry is not None and entry.has(LIBRARY)
        results.append(Result(config, None, error, time.perf_counter() - start, compiled, library))
    reported = iter(_reports([e for e in entries if e is not None]))
    for i, entry in enumerate(entries):
        if entry is not None:
            report = next(reported)
            if isinstance(report, sass.Report):
                results[i] = replace(results[i], report=report)
            else:
                results[i] = replace(results[i], error=report)
    return results


def _obtain(key: Key) -> tuple[Entry, bool]:
    """The kernel, and whether it had to be compiled. One that was cached on a host without a C compiler is
    linked now."""
    store, name = cache.user_store(), key.name(compiler.identity(key.module, key.target, key.params_text))
    try:
        entry = store.find(name, key) if store else None
    except DamagedEntryError:
        entry = None  # `prepare` says so and builds it again
    if entry is not None and (entry.has(LIBRARY) or not link.possible()):
        return entry, False
    return jit.prepare(key.module, key.target, key.params, rebuild=entry is not None), True


def _is_known(config: Config) -> bool:
    """Whether building would be reading from the cache."""
    store, key = cache.user_store(), config.key
    try:
        entry = (
            store.find(key.name(compiler.identity(key.module, key.target, key.params_text)), key)
            if store
            else None
        )
    except DamagedEntryError:
        return False
    return entry is not None and Store.noted(entry, NOTE).get("made_by") == sass.tool_identity()


def _reports(entries: Sequence[Entry]) -> list[sass.Report | str]:
    """What is noted in the cache about each entry, else found out now; the error where that fails."""
    made_by = sass.tool_identity()
    reports: dict[int, sass.Report | str] = {}
    for i, entry in enumerate(entries):
        noted = Store.noted(entry, NOTE)
        if noted.get("made_by") == made_by and noted.get("identity") == entry.manifest["identity"]:
            reports[i] = sass.Report.from_json(noted["report"])
    missing = [i for i in range(len(entries)) if i not in reports]
    inputs = [
        (entries[i].read(OBJECT), entries[i].key.target, entries[i].manifest["dynamic_smem"]) for i in missing
    ]
    try:
        reports.update(zip(missing, sass.reports(inputs), strict=True))
    except (ValueError, sass.DisassemblyError):  # one of them: find out which
        for i, data in zip(missing, inputs, strict=True):
            try:
                reports[i] = sass.reports([data])[0]
            except (ValueError, sass.DisassemblyError) as failure:
                reports[i] = f"{type(failure).__name__}: {failure}"
    for i in missing:
        report = reports[i]
        if isinstance(report, sass.Report):
            note = {
                "made_by": made_by,
                "identity": entries[i].manifest["identity"],
                "report": report.as_json(),
            }
            Store.note(entries[i], NOTE, note)
    return [reports[i] for i in range(len(entries))]


def _export(entry: Entry, out: Store) -> None:
    name = entry.key.name()
    manifest = {k: v for k, v in entry.manifest.items() if k != "seal"}
    try:
        present = out.find(name, entry.key)
    except DamagedEntryError:
        present = None
    if (
        present is None
        or present.manifest["files"] != manifest["files"]
        or present.manifest["sources"] != manifest["sources"]
    ):
        out.put(name, manifest, {file: entry.read(file) for file in manifest["files"]})


def _prune(out: Store) -> int:
    """Removes entries that were built from other sources; returns how many."""
    stale = 0
    for name in out.names():
        try:
            entry = out.find(name)
            if entry is None or entry.manifest["sources"] == compiler.sources(entry.key.module):
                continue
        except DamagedEntryError:
            if not is_entry_name(name):
                continue
        except (ModuleNotFoundError, ValueError):  # of a module that is not, or cannot be, here
            pass
        out.remove(name)
        stale += 1
    return stale


def build_all(
    configs: Sequence[Config],
    out: Path | None,
    jobs: int = 1,
    progress: Callable[[Result], None] | None = None,
) -> list[Result]:
    """Builds all configs in `jobs` processes (in this one if 1); results in the order of `configs`.

    Raises BrokenProcessPool if a process dies."""
    chunks = [configs[i : i + CHUNK] for i in range(0, len(configs), CHUNK)]
    results = []
    with contextlib.ExitStack() as stack:
        run: Callable[..., Iterable[list[Result]]] = map
        if jobs > 1 and sum(not _is_known(c) for c in configs) > CHUNK:
            # spawned, not forked: the compiler and torch start threads
            context = multiprocessing.get_context("spawn")
            run = stack.enter_context(ProcessPoolExecutor(min(jobs, len(chunks)), mp_context=context)).map
        for built in run(build, chunks, [out] * len(chunks)):
            for result in built:
                results.append(result)
                if progress is not None:
                    progress(result)
    return results


class Printer:
    """Prints results as they come: a heading per target and kernel with the parameters that all of its
    variants share, then a line a variant."""

    def __init__(self, configs: Sequence[Config]):
        self.total, self.done, self.group = len(configs), 0, ""
        self.common: dict[tuple[str, str], dict[str, Any]] = {}
        for config in configs:
            params = config.key.params
            common = self.common.setdefault((config.key.target, config.kernel), dict(params))
            for name in [n for n, value in common.items() if params.get(n) != value]:
                del common[name]
        self.width = max((len(self._varying(c)) for c in configs), default=0)

    def _varying(self, config: Config) -> str:
        common = self.common[config.key.target, config.kernel]
        return " ".join(f"{k}={v}" for k, v in config.key.params.items() if k not in common)

    def __call__(self, result: Result) -> None:
        self.done += 1
        config, r = result.config, result.report
        group = f"{config.key.target} {config.kernel}"
        if group != self.group:
            self.group = group
            common = " ".join(f"{k}={v}" for k, v in self.common[config.key.target, config.kernel].items())
            print(f"[{self.done}/{self.total}] {group}: {common}")
        head = f"    {self._varying(config):<{self.width}}"
        if r is None:
            print(f"{head}  FAILED: {result.error}", flush=True)
            return
        spills = "?" if r.spill_bytes is None else r.spill_bytes
        smem = f"{r.static_smem}+{'?' if r.dynamic_smem is None else r.dynamic_smem}"
        numbers = f"{r.registers:3} regs {spills} spill {r.stack} stack {smem:>7} smem {r.threads:4} threads"
        shown = [f"{n} {name}" for name, n in r.instructions.items() if name != "total"]
        counts = f" | {r.instructions['total']:4} instr: {', '.join(shown)}" if r.instructions else ""
        flag = f" <-- {', '.join(r.problems)}" if r.problems else ""
        made = f"{result.seconds:.2f} s" if result.compiled else "cached"
        print(f"{head}  {numbers}{counts} [{made}]{flag}", flush=True)


def _host_needs(results: Sequence[Result], out: Path) -> str:
    machine, cudart = platform.machine(), link.cudart_major()
    ffi = compiler.toolchain()["packages"]["apache-tvm-ffi"]
    if results and all(r.library for r in results):
        return (
            f"{cache.AOT_VARIABLE}={out} serves {machine} hosts without nvidia-cutlass-dsl. They need torch "
            f"built for CUDA {cudart} (it brings libcudart.so.{cudart}) and apache-tvm-ffi {ffi}"
        )
    try:
        why = "no C compiler was found here" if link.compiler() is None else "some could not be linked"
    except link.LinkError as error:
        why = str(error)
    return (
        f"{cache.AOT_VARIABLE}={out} holds objects without shared libraries ({why}): {machine} hosts need "
        "nvidia-cutlass-dsl to load them, though nothing is compiled there"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Exit codes: 0 fine, 1 a kernel failed to build or fails `--check`, or the reports
    could not be written, 2 wrong use."""
    parser = argparse.ArgumentParser(
        prog="python -m bindings.precompile", description="Compiles every kernel of the model; needs no GPU."
    )
    parser.add_argument("--targets", default=",".join(targets.TARGETS), help="comma-separated (default: all)")
    parser.add_argument("--out", type=Path, required=True, help="directory to fill")
    parser.add_argument(
        "--sample", action="store_true", help="every kernel, but not every combination of dtypes and tuning"
    )
    parser.add_argument(
        "--model", default="", help="sizes other than the default model's: key_heads=8,value_heads=24"
    )
    parser.add_argument("--check", action="store_true", help="fail on any spill or use of stack")
    parser.add_argument("--json", type=Path, help="also write the reports to this file")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--kernels", default="", help="comma-separated operators (default: all)")
    options = parser.parse_args(argv)
    names = list(dict.fromkeys(t.strip() for t in options.targets.split(",") if t.strip()))
    if not names:
        parser.error(f"--targets: got {options.targets!r}, allowed {', '.join(targets.TARGETS)}")
    for target in names:
        if target not in targets.TARGETS:
            parser.error(f"--targets: got {target!r}, allowed {', '.join(targets.TARGETS)}")
    if options.jobs < 1:
        parser.error(f"--jobs: got {options.jobs}, allowed integers >= 1")
    try:
        configs = registered(names, _model(options.model), sample=options.sample)
    except InvalidArgument as error:
        parser.error(f"--model: {error}")
    wanted = [k.strip() for k in options.kernels.split(",") if k.strip()]
    known = {c.kernel for c in configs}
    for kernel in wanted:
        if kernel not in known:
            parser.error(f"--kernels: got {kernel!r}, allowed {', '.join(sorted(known))}")
    return run([c for c in configs if not wanted or c.kernel in wanted], options)


def _model(text: str) -> ModelConfig:
    """The default model with other sizes."""
    sizes = {f.name for f in fields(ModelConfig) if isinstance(f.default, int)}
    chosen: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, _, number = part.partition("=")
        if name not in sizes or not number.isdecimal() or int(number) < 1:
            raise InvalidArgument(f"got {part!r}, allowed SIZE=N with SIZE of {', '.join(sorted(sizes))}")
        chosen[name] = int(number)
    return replace(ModelConfig(), **chosen)


def run(configs: Sequence[Config], options: argparse.Namespace) -> int:
    """Builds, prints, writes, checks; the exit code."""
    out: Path = options.out.absolute()
    try:
        out.mkdir(mode=0o755, parents=True, exist_ok=True)  # whatever the umask: others must not write here
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            obstacle = files.obstacle(options.json)
            if obstacle:
                print(f"error: --json: {options.json}: {obstacle}", file=sys.stderr)
                return 2
        tool = sass.nvdisasm()
    except (OSError, sass.DisassemblyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not compiler.available():
        print("error: there is no compiler here: pip install 'nvidia-cutlass-dsl[cu13]'", file=sys.stderr)
        return 2
    if tool is None:
        print("note: no disassembler found (pip install nvidia-cuda-nvdisasm): no instruction counts")
    os.environ.pop(cache.AOT_VARIABLE, None)  # it may name `out`: what is built must not be taken from it
    start = time.perf_counter()
    try:
        results = build_all(configs, out, options.jobs, Printer(configs))
    except BrokenProcessPool:
        print("error: a compiling process died; --jobs 1 shows which kernel it was at", file=sys.stderr)
        return 1
    _prune(Store(out, private=False))
    failed = [r for r in results if r.report is None]
    reports = [r for r in results if r.report is not None]
    written = True
    if options.json:
        try:
            options.json.write_text(json.dumps([r.row() for r in reports], indent=1) + "\n")
        except OSError as error:
            written = False
            print(f"error: --json: {options.json}: {error.strerror}", file=sys.stderr)
    seconds = time.perf_counter() - start
    fresh = sum(r.compiled for r in results)
    print(
        f"{len(reports)} kernels in {seconds:.1f} s: {fresh} compiled, "
        f"{len(results) - fresh - len(failed)} from the cache"
    )
    for r in failed:
        print(f"FAILED: {r.config.kernel}: {r.config.key}: {r.error}", file=sys.stderr)
    refused = cache.aot_refusal(out)
    if refused is None:
        print(_host_needs(reports, out))
    else:
        print(f"warning: {cache.AOT_VARIABLE}={out} does not serve: {refused} (chmod go-w)", file=sys.stderr)
    bad = [(r, r.report.problems) for r in reports if r.report is not None and r.report.problems]
    if options.check:
        for r, problems in bad:
            print(f"CHECK: {r.config.kernel}: {r.config.key}: {', '.join(problems)}", file=sys.stderr)
        if not bad and not failed:
            print("check: no spills, no stack")
    return 1 if failed or not written or (options.check and bad) else 0


if __name__ == "__main__":
    sys.exit(main())
