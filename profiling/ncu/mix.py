"""`python -m profiling.ncu.mix`: Nsight Compute on the mix of the residual streams."""

import sys

from profiling.ncu import tool

if __name__ == "__main__":
    sys.exit(tool.main(["mix"], name="mix"))
