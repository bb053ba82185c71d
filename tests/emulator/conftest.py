"""The emulator is built by a C compiler: without one its tests say so, but for those of what needs none."""

from __future__ import annotations

import pytest

from bindings import link

NEEDS_NONE = ("test_swizzle", "test_without_a_c_compiler")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if link.compiler() is None:
        for item in items:
            if "tests/emulator/" in item.path.as_posix() and not any(n in item.nodeid for n in NEEDS_NONE):
                item.add_marker(pytest.mark.skip(reason="needs a C compiler"))
