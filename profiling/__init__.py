"""Measuring and showing what the kernels do: the demo, the benchmarks, and what both are made of."""
