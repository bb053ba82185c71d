"""Kernel modules for tests of the compiler, the cache and the reports. A package of its own, on the path by
`tests.bindings.toys`, since a kernel's sources are all of its top-level package."""
