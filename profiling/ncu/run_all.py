"""`python -m profiling.ncu.run_all`: Nsight Compute on every kernel family, one after another."""

import sys

from profiling.ncu import tool

if __name__ == "__main__":
    sys.exit(tool.main(list(tool.FAMILIES), name="run_all"))
