"""Nsight Compute, one script a kernel family: `python -m profiling.ncu.FAMILY`, or `run_all` for every one
of them.

    python -m profiling.ncu.run_all [--out DIR] [--rows N] [--ncu EXE]
    python -m profiling.ncu.gdn ...            hyper, mix, gdn, moe, collective
    python -m profiling.ncu.parse CSV...       what matters, from the CSV files of earlier runs

Every operator is compiled, called twice, and then called once between profiler start and stop: exactly that
warm launch is profiled. `--cache-control all`: caches are flushed before each pass over the kernel, so its
inputs come from device memory. `--clock-control none`: clocks are left as they are, so durations agree with
the benchmark's and drift as its do.
"""
