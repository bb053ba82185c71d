"""One tensor-parallel rank's decode step, whole: weights, the frame around the kernels, and the two arms
that run it."""
