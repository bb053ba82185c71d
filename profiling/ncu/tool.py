"""How a family is profiled: finds ncu, runs it over `profiling.once`, exports the report and its CSV, says
what matters."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bindings.targets import TARGETS, target_of
from profiling import host
from profiling.console import write
from profiling.ncu import parse

FAMILIES = {
    "hyper": ("hc_gate", "hc_apply", "hc_apply_norm", "hc_boundary", "grouped_gemma_rmsnorm"),
    "mix": ("hc_mix",),
    "gdn": ("gdn_packed_decode",),
    "moe": ("shared_gate", "moe_finalize"),
    "collective": ("moe_finalize_all_reduce",),
}
"""Operators by family; a new operator is added to one."""

SECTIONS = (
    "SpeedOfLight",
    "MemoryWorkloadAnalysis",
    "Occupancy",
    "LaunchStats",
    "SourceCounters",
    "WarpStateStats",
)
METRICS = ("gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum", "lts__t_bytes.sum")
CONTROL = ("--cache-control", "all", "--clock-control", "none", "--replay-mode", "kernel")
DEFAULT_OUT = Path("profiling/results/raw/ncu")
SECONDS = 240

NO_PERMISSION = """\
profiling.ncu: this user may not read the GPU's performance counters (ERR_NVGPUCTRPERM); nothing was profiled.
  Run as root, or let the administrator of the host open them to all users:
    echo 'options nvidia NVreg_RestrictProfilingToAdminUsers=0' > /etc/modprobe.d/nvidia-profiling.conf
  and reload the driver.
  In a container also add the capability SYS_ADMIN. `python -m profiling.bench` needs no counters."""


class RefusedError(Exception):
    """Nothing can be profiled here; the message says why and what to do."""


@dataclass(frozen=True)
class Options:
    """Of one run. out: the folder that reports are written to, which is made. rows: of every call."""

    out: Path
    rows: int
    ncu: str | None


def find_ncu(given: str | None = None) -> Path:
    """The profiler: `given`, else NCU, PATH, CUDA_HOME, or the usual folders, newest first.

    Raises RefusedError where there is none."""
    asked = given or os.environ.get("NCU")
    if asked:
        found = shutil.which(asked)
        if found is None:
            raise RefusedError(f"profiling.ncu: {asked} cannot be run")
        return Path(found)
    folders = [Path(os.environ[name]) / "bin" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    candidates = [Path(found)] if (found := shutil.which("ncu")) else []
    candidates += [folder / "ncu" for folder in folders]
    candidates += sorted(Path("/opt/nvidia/nsight-compute").glob("*/ncu"), reverse=True)
    candidates += sorted(Path("/usr/local").glob("cuda*/bin/ncu"), reverse=True)
    for candidate in candidates:
        if os.access(candidate, os.X_OK):
            return candidate
    raise RefusedError(
        "profiling.ncu: Nsight Compute (ncu) is not on this host's PATH or in its usual folders; install it "
        "with the CUDA toolkit, or name it: --ncu EXE or NCU=EXE"
    )


def command(ncu: Path, family: str, options: Options) -> list[str]:
    """The profiling run of a family: the report and what was called are left in `options.out`."""
    sections = [word for section in SECTIONS for word in ("--section", section)]
    once = ["-m", "profiling.once", "--ops", ",".join(FAMILIES[family]), "--rows", str(options.rows)]
    return [
        str(ncu),
        *("--profile-from-start", "off", *CONTROL, "--target-processes", "application-only"),
        *sections,
        *(
            "--metrics",
            ",".join(METRICS),
            "--force-overwrite",
            "--export",
            str(options.out / f"{family}.ncu-rep"),
        ),
        *(sys.executable, *once, "--json", str(options.out / f"{family}.json")),
    ]


def refusal(output: str) -> str | None:
    """Why ncu profiled nothing, from what it printed; None where it says nothing of the kind."""
    if "ERR_NVGPUCTRPERM" in output:
        return NO_PERMISSION
    if "no CUDA device of a supported target" in output:
        return "profiling.ncu: no CUDA device of a supported target; nothing was profiled"
    return None


def without_gpu() -> str | None:
    """Why there is nothing to profile on this host; None where there is."""
    if not torch.cuda.is_available():
        return "profiling.ncu: torch sees no CUDA device; nothing was profiled"
    if target_of(torch.device("cuda", torch.cuda.current_device())) is None:
        return f"profiling.ncu: {torch.cuda.get_device_name()} is none of {', '.join(TARGETS)}"
    return None


def profile(family: str, options: Options) -> list[parse.Kernel]:
    """Profiles a family, leaving FAMILY.ncu-rep, FAMILY.csv and FAMILY.json in the folder; what matters of
    each kernel.

    Raises RefusedError, or RuntimeError with the last lines of what failed."""
    ncu = find_ncu(options.ncu)
    options.out.mkdir(parents=True, exist_ok=True)
    ran = _run(command(ncu, family, options))
    if (why := refusal(ran)) is not None:
        raise RefusedError(why)
    report = options.out / f"{family}.ncu-rep"
    if not report.exists():
        raise RuntimeError(f"ncu left no report of {family}:\n" + "\n".join(ran.splitlines()[-15:]))
    text = _run([str(ncu), "--import", str(report), "--csv", "--page", "raw"])
    table = options.out / f"{family}.csv"
    table.write_text(text[text.index('"ID"') :] if '"ID"' in text else text)
    try:
        return parse.read(table, options.out / f"{family}.json")
    except ValueError as error:
        said = [line for line in ran.splitlines() if line.startswith(("==WARNING==", "==ERROR=="))]
        raise RuntimeError("\n".join([str(error), *said[-8:]])) from error


def _run(words: Sequence[str]) -> str:
    try:
        ran = subprocess.run(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{Path(words[0]).name}: stopped after {SECONDS} s") from error
    return ran.stdout


def main(families: Sequence[str], arguments: Sequence[str] | None = None, *, name: str) -> int:
    """The command line of every script here. Exit codes: 0; 1 if a family failed; 2 if nothing can be
    profiled here."""
    parser = argparse.ArgumentParser(
        prog=f"python -m profiling.ncu.{name}",
        description=f"Profiles one warm launch of {', '.join(o for f in families for o in FAMILIES[f])}.",
    )
    parser.add_argument(
        "--out", type=Path, default=DEFAULT_OUT, help=f"folder for reports and CSV files ({DEFAULT_OUT})"
    )
    parser.add_argument("--rows", type=int, default=1, help="rows of every call (1)")
    parser.add_argument(
        "--ncu", metavar="EXE", help="the profiler (NCU, else what PATH or the usual folders hold)"
    )
    given = parser.parse_args(arguments)
    if given.rows < 1:
        parser.error(f"--rows: got {given.rows}, at least 1")
    options = Options(given.out, given.rows, given.ncu)
    if (why := without_gpu()) is not None:
        print(why, file=sys.stderr)
        return 2
    failed, kernels = False, []
    for number, family in enumerate(families, 1):
        print(f"[{number}/{len(families)}] {family}: {', '.join(FAMILIES[family])}", flush=True)
        try:
            kernels += profile(family, options)
        except RefusedError as why:
            print(why, file=sys.stderr)
            return 2
        except (RuntimeError, ValueError) as error:
            failed = True
            print(f"FAILED {family}: {error}", file=sys.stderr)
    control = f"one warm launch each, {' '.join(CONTROL)}"
    print(f"\n{control}\n{parse.table(kernels)}\nreports in {given.out}")
    record = {
        "kind": "ncu",
        "command": host.command(f"profiling.ncu.{name}", sys.argv[1:] if arguments is None else arguments),
        "date": host.today(),
        "host": host.describe(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "control": control,
        "kernels": [kernel.to_json() for kernel in kernels],
    }
    write(given.out / "ncu.json", record)
    return 1 if failed else 0
