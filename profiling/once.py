"""`python -m profiling.once`: every operator once, warm, between profiler start and stop, for `ncu
--profile-from-start off`.

    ncu --profile-from-start off --clock-control none ... \\
        python -m profiling.once [--ops A,B] [--rows N] [--json FILE]

Everything is compiled, loaded and called before; then each call is one profiler range. FILE gets what was
called: operator, rows, launches of a call, bytes of its contract. Exit code 2 without a GPU of a supported
target.

The kernel of hc_mix is launched without the cooperative attribute: with it ncu 2025.3 could neither replay it
(LaunchFailed) nor have the application repeat it. The machine code is the same; that all CTAs are resident,
which the attribute guarantees, here takes a device that nobody else uses, with an SM for each.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

import bindings
from bindings import kernels as kernels  # fills the registry
from bindings import mix, registry
from bindings.targets import target_of
from profiling import cases, collective, counters, ours, protocol

OPS = (*counters.OPS, collective.OP)
"""Every operator, the collective over loopback."""
RANKS = 4
MIX = next(k for k in registry.IMPLEMENTATIONS["hc_mix"] if isinstance(k, mix.MixKernel))
"""The entry of one cooperative launch."""


def piece(op: str, rows: int, device: torch.device) -> tuple[ours.Call, int]:
    """The call of an operator, and the bytes of its contract."""
    if op == collective.OP:
        version = next(collective.versions_of(collective.make_case(rows, device), RANKS))
        return version.make(), version.bytes
    case = cases.make(op, rows, device)
    one_launch = op == "hc_mix" and bindings.explain(op, **case.args).implementation == MIX.name
    return mix_call(case) if one_launch else ours.graph_call(case), case.bytes


def mix_call(case: cases.Case) -> ours.Call:
    """hc_mix by one launch that is not cooperative, on a device that has room for its grid."""
    op = registry.OPS[case.op]
    arguments = op.bind((), {**case.args, **case.outs})
    call = op.examine(arguments)
    target = target_of(call.device)
    assert target is not None
    unguarded = replace(MIX, launch="unguarded")
    launch = unguarded.load(target, unguarded.specialise(call, target))
    values = (*arguments.inputs, *arguments.outs, *call.kernel_scalars)
    return lambda: launch(*values)


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes the calls; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m profiling.once", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--ops", default=",".join(OPS), help=f"of {', '.join(OPS)} (all)")
    parser.add_argument("--rows", type=int, default=1, help="rows of every call (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was called")
    options = parser.parse_args(arguments)
    chosen = options.ops.split(",")
    if unknown := [name for name in chosen if name not in OPS]:
        parser.error(f"--ops: {', '.join(unknown)}: not among {', '.join(OPS)}")
    if options.rows < 1:
        parser.error("--rows: at least 1")
    if not torch.cuda.is_available() or target_of(torch.device("cuda", torch.cuda.current_device())) is None:
        print("profiling.once: no CUDA device of a supported target", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    with torch.inference_mode(), bindings.backend("cute"):
        calls = {name: piece(name, options.rows, device) for name in chosen}
        if options.json:
            called = []
            for name, (call, least) in calls.items():
                kernels = protocol.capture(call).kernels
                launches = 1 if kernels is None else len(kernels)
                called.append({"op": name, "rows": options.rows, "launches": launches, "bytes": least})
            options.json.write_text(json.dumps(called) + "\n")
        for call, _ in calls.values():
            call()
            call()
        torch.cuda.synchronize()
        for name, (call, _) in calls.items():
            torch.cuda.profiler.start()
            call()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
            print(f"profiled {name}, {options.rows} row(s)", flush=True)
        bindings.check(device)  # that no CTA of hc_mix waited in vain
    return 0


if __name__ == "__main__":
    sys.exit(main())
