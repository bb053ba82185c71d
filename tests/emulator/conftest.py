"""The emulator is built by a C compiler: without one its tests skip, but for the one of what is said then."""

from __future__ import annotations

import pytest

from bindings import link

NEEDS_NONE = "test_without_a_c_compiler"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if link.compiler() is None:
        for item in items:
            if "tests/emulator/" in item.path.as_posix() and NEEDS_NONE not in item.nodeid:
                item.add_marker(pytest.mark.skip(reason="needs a C compiler"))
