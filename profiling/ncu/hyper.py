"""`python -m profiling.ncu.hyper`: Nsight Compute on the hyper-connection kernels: gate, apply, apply+norm,
boundary, norm."""

import sys

from profiling.ncu import tool

if __name__ == "__main__":
    sys.exit(tool.main(["hyper"], name="hyper"))
