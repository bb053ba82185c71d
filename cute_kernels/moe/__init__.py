"""Mixture-of-experts kernels: FP32 shared-expert gate, rank-local finalize."""
