"""`python -m profiling.ncu.collective`: Nsight Compute on the fused finalize and all-reduce."""

import sys

from profiling.ncu import tool

if __name__ == "__main__":
    sys.exit(tool.main(["collective"], name="collective"))
