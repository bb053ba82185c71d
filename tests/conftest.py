"""Marks, and the backends that tests of the operators run on."""

from __future__ import annotations

import os

# Virtual ranks spin on streams of their own: two streams on one hardware queue would wait for each other.
# Read when CUDA starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import gc
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from bindings import emulated
from bindings import kernels as kernels  # fills the registry
from bindings.registry import IMPLEMENTATIONS, Kernel
from bindings.targets import target_of
from tests.harness import Backend
from tests.mps import mps as mps  # a fixture

torch.set_num_threads(
    1
)  # the tests' tensors are small, and their workers (or other processes) share the cores
settings.register_profile("tests", deadline=None, derandomize=True, max_examples=25, print_blob=True)
settings.load_profile("tests")


def _backends() -> list[object]:
    """The torch reference on the CPU; with a GPU also there, and the CuTe kernels where the GPU is one of
    their targets."""
    found = [pytest.param(Backend("reference", "cpu"), id="reference-cpu", marks=pytest.mark.cpu)]
    if torch.cuda.is_available():
        found.append(pytest.param(Backend("reference", "cuda:0"), id="reference-cuda", marks=pytest.mark.gpu))
        if target_of(torch.device("cuda:0")) is not None:
            found.append(pytest.param(Backend("cute", "cuda:0"), id="cute-cuda", marks=pytest.mark.gpu))
    return found


@pytest.fixture(params=_backends())
def backend(request: pytest.FixtureRequest) -> Backend:
    """Every backend that this machine can run."""
    chosen: Backend = request.param
    return chosen


@pytest.fixture(params=["reference", "cute"])
def gpu_backend(request: pytest.FixtureRequest) -> Backend:
    """Every backend on a GPU, for tests marked gpu."""
    device = torch.device("cuda:0")
    if request.param == "cute" and target_of(device) is None:
        pytest.skip(f"no kernels are built for sm_{torch.cuda.get_device_capability(device)}")
    return Backend(request.param, str(device))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="also what takes minutes: tests marked nightly")
    parser.addoption(
        "--emulator-checks", action="store_true", help="all checks of emulated kernels (as without this)"
    )
    parser.addoption(
        "--emulator-vital",
        action="store_true",
        help="of the checks of emulated kernels those alone that a run cannot go on without",
    )


@pytest.fixture(autouse=True, scope="session")
def _emulator_checks(request: pytest.FixtureRequest) -> Iterator[None]:
    option = request.config.getoption
    with emulated.options(checks=option("--emulator-checks") or not option("--emulator-vital")):
        yield


@pytest.fixture(autouse=True)
def _no_collection_on_a_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where graphs are captured the garbage collector waits for the end of the test: it may find a graph that
    an earlier test's exception held, and destroying that ends a capture that is under way."""
    on_gpu = any(request.node.get_closest_marker(name) for name in ("gpu", "multi_gpu"))
    enabled = gc.isenabled()
    if on_gpu:
        gc.disable()  # and no collection first, which would take a tenth of a second a test
    yield
    if enabled:
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`cpu` is what needs no GPU. `sanitizer` is for kernels of this project: not for torch's and the BLAS's,
    which the reference and the GEMM path run. Tests that need more GPUs than there are skip, and say so."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if item.get_closest_marker("nightly") and not item.config.getoption("--nightly"):
            item.add_marker(pytest.mark.skip(reason="takes minutes: runs with --nightly"))
        multi, single = item.get_closest_marker("multi_gpu"), item.get_closest_marker("gpu")
        if multi is None and single is None:
            item.add_marker(pytest.mark.cpu)
        parameters = (
            item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        )
        reference = getattr(parameters.get("backend"), "name", parameters.get("gpu_backend")) == "reference"
        served_by = IMPLEMENTATIONS.get(getattr(parameters.get("case"), "op", ""))
        if reference or (served_by and not any(isinstance(i, Kernel) for i in served_by)):
            item.own_markers = [mark for mark in item.own_markers if mark.name != "sanitizer"]
        needed = 2 if multi else 1 if single else 0
        if gpus < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), found {gpus}"))
