"""A PTX program to C: one function an entry, run by the machine warp by warp."""
