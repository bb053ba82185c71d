"""What the kernels share: compile-time tensors, vector access, reductions, math, programmatic dependent launch."""
