"""Kernels on demand, on a GPU: every way of loading one runs it, on every device, stream and thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bindings import jit, link
from bindings.store import LIBRARY, OBJECT, Entry, Store
from bindings.targets import target_of
from tests.bindings import toys
from tests.bindings.test_ahead_of_time import WITHOUT_DSL

pytestmark = pytest.mark.gpu


@pytest.fixture
def target() -> str:
    found = target_of(torch.device("cuda:0"))
    if found is None:
        pytest.skip("this GPU is none of the targets")
    return found


def check(function: Callable[..., object], addend: int, device: str = "cuda:0", rows: int = 1000) -> None:
    """Runs the toy on a device and compares."""
    x = torch.arange(rows, dtype=torch.int32).to(device)
    out = torch.full_like(x, -1)
    torch.cuda.synchronize(device)
    function(x, out)
    torch.cuda.synchronize(device)
    assert torch.equal(out.cpu(), torch.arange(rows, dtype=torch.int32) + addend)


@pytest.mark.parametrize("way", ["library", "object", "library in memory", "object in memory"])
def test_every_way_of_loading(
    cache_root: Path, target: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = jit.prepare(toys.ADD, target, {"addend": 3})
    file = LIBRARY if way.startswith("library") else OBJECT
    if not entry.has(file):
        pytest.skip("no C compiler here to make a library with")
    if file == OBJECT:
        monkeypatch.setattr(link, "load_cudart", lambda major: "not wanted")
    else:
        major = link.cudart_major()
        assert major is not None
        assert link.load_cudart(major) is None, "torch brings it"
    if way.endswith("memory"):
        entry = Entry(entry.manifest, None, {f: entry.read(f) for f in entry.manifest["files"]})
    function = jit.load(entry)
    check(function, 3)
    check(function, 3, rows=0)


def test_streams_and_graphs(cache_root: Path, target: str) -> None:
    function = jit.get(toys.ADD, target, {"addend": 2})
    x = torch.zeros(64, dtype=torch.int32).to("cuda:0")
    out = torch.zeros_like(x)
    function(x[:0], out[:0])  # loads the module: a capture must not
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function(x, out)
    for value in (5, 6):
        x.fill_(value)
        graph.replay()
        assert out.eq(value + 2).all()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x.fill_(7)
        function(x, out)
    torch.cuda.current_stream().wait_stream(stream)
    assert out.eq(9).all()


def test_threads_at_the_first_call(cache_root: Path, target: str) -> None:
    results: list[Tensor] = []
    barrier = threading.Barrier(4)

    def work(value: int) -> None:
        x = torch.full((256,), value, dtype=torch.int32).to("cuda:0")
        out = torch.zeros_like(x)
        torch.cuda.synchronize()
        barrier.wait()
        with torch.cuda.stream(torch.cuda.Stream()):
            jit.get(toys.ADD, target, {"addend": 1})(x, out)
            torch.cuda.current_stream().synchronize()
        results.append(out.cpu() - value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert [r.eq(1).all().item() for r in results] == [True] * 4


@pytest.mark.multi_gpu
def test_two_devices_of_one_process(cache_root: Path, target: str) -> None:
    function = jit.get(toys.ADD, target, {"addend": 4})
    for device in ("cuda:0", "cuda:1", "cuda:0"):
        check(function, 4, device)
        assert torch.cuda.current_device() == 0


def test_without_the_compiler(cache_root: Path, target: str, tmp_path: Path) -> None:
    entry = jit.prepare(toys.ADD, target, {"addend": 5})
    if not entry.has(LIBRARY):
        pytest.skip("no C compiler here to make a library with")
    out = tmp_path / "aot"
    out.mkdir()
    content = {f: entry.read(f) for f in entry.manifest["files"]}
    Store(out, private=False).put(entry.key.name(), entry.manifest, content)
    code = (
        WITHOUT_DSL
        + f"""
    import torch
    from bindings import jit
    x = torch.arange(10, dtype=torch.int32).to("cuda:0")
    out = torch.zeros_like(x)
    jit.get("{toys.ADD}", "{target}", {{"addend": 5}})(x, out)
    print((out - x).unique().tolist(), "cutlass" in sys.modules)
    """
    )
    done = toys.python(code, FLASHNEXT_AOT_DIR=str(out))
    assert (done.returncode, done.stdout) == (0, "[5] False\n"), done.stderr
