"""`python -m profiling.once`: every operator once, warm, between profiler start and stop, for `ncu
--profile-from-start off`.

    ncu --profile-from-start off --clock-control none ... python -m profiling.once [--ops A,B] [--rows N]

Everything is compiled, loaded and called before; then each call is one profiler range. Exit code 2 without
a GPU of a supported target.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

import bindings
from bindings.targets import target_of
from profiling import cases, ours


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes the calls; the exit code."""
    names = tuple(name for name in cases.CASES if name != "hc_boundary")
    parser = argparse.ArgumentParser(
        prog="python -m profiling.once", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--ops", default=",".join(names), help=f"of {', '.join(names)} (all)")
    parser.add_argument("--rows", type=int, default=1, help="rows of every call (1)")
    options = parser.parse_args(arguments)
    chosen = options.ops.split(",")
    if unknown := [name for name in chosen if name not in names]:
        parser.error(f"--ops: {', '.join(unknown)}: not among {', '.join(names)}")
    if options.rows < 1:
        parser.error("--rows: at least 1")
    if not torch.cuda.is_available() or target_of(torch.device("cuda", torch.cuda.current_device())) is None:
        print("profiling.once: no CUDA device of a supported target", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    with torch.inference_mode(), bindings.backend("cute"):
        calls = [(name, ours.graph_call(cases.make(name, options.rows, device))) for name in chosen]
        for _, call in calls:
            call()
            call()
        torch.cuda.synchronize()
        for name, call in calls:
            torch.cuda.profiler.start()
            call()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
            print(f"profiled {name}, {options.rows} row(s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
