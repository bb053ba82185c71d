"""Device code in the CuTe Python DSL. No torch below this line; one kernel, one file.

A kernel module has `build(target, **params) -> (entry, fake_args)`: `entry` is the jitted host function
that launches the kernel, `fake_args` the tensors without data that it is compiled against. All params are
constexpr; rows are run-time values.
"""
