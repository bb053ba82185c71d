"""`python -m profiling.ncu.gdn`: Nsight Compute on packed GDN decode."""

import sys

from profiling.ncu import tool

if __name__ == "__main__":
    sys.exit(tool.main(["gdn"], name="gdn"))
