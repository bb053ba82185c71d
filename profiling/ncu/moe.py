"""`python -m profiling.ncu.moe`: Nsight Compute on the tail of the experts: shared gate, finalize."""

import sys

from profiling.ncu import tool

if __name__ == "__main__":
    sys.exit(tool.main(["moe"], name="moe"))
