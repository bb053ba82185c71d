"""What the kernels share: compile-time tensors, vector access, reductions, math, dependent launch."""
