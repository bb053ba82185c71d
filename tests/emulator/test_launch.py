"""From a DSL compilation to a launch in the machine: whoever imported what first, plain or by TVM-FFI."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import emulator
from emulator import build
from tests.emulator.asm import kernel

cutlass = pytest.importorskip("cutlass")
import cutlass.cute as cute  # noqa: E402
from cutlass.cute.runtime import from_dlpack, make_fake_tensor  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


@cute.kernel
def add_kernel(x: cute.Tensor, y: cute.Tensor, n: cutlass.Int32):
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    i = cta * 32 + tid
    if i < n:
        y[i] = y[i] + x[i]


@cute.jit
def add(x: cute.Tensor, y: cute.Tensor, n: cutlass.Int32):
    add_kernel(x, y, n).launch(grid=((n + 31) // 32, 1, 1), block=(32, 1, 1))


def compiled(options: str = "") -> Callable[..., Any]:
    fake = [make_fake_tensor(cutlass.Float32, (cute.sym_int(),), stride=(1,), assumed_align=16) for _ in "xy"]
    return cute.compile(add, *fake, cutlass.Int32(1), **({"options": options} if options else {}))


def arguments(options: str, *tensors: torch.Tensor) -> list[Any]:
    return list(tensors) if "tvm" in options else [from_dlpack(t) for t in tensors]


@pytest.mark.parametrize("options", ["", "--enable-tvm-ffi"])
@pytest.mark.parametrize("target", ["sm_90a", "sm_100a", "sm_103a"])
def test_a_compiled_function_runs_on_cpu_tensors(target: str, options: str) -> None:
    x, y = torch.arange(70, dtype=torch.float32), torch.ones(70)
    with emulator.device(target) as device:
        function = compiled(options)
        function(*arguments(options, x, y), 70)
        assert torch.equal(y, torch.arange(70) + 1.0)
        assert device.launches[0].store_bytes == 280
    with emulator.device(target):  # it outlives the device that it was compiled on
        function(*arguments(options, x, y), 70)
    assert torch.equal(y, 2 * torch.arange(70) + 1.0)


@pytest.mark.parametrize("options", ["", "--enable-tvm-ffi"])
def test_a_finding_is_raised_by_the_call_and_names_the_argument(options: str) -> None:
    x, y = torch.zeros(64), torch.zeros(96)
    with emulator.device("sm_100a"):
        function = compiled(options)
        with pytest.raises(
            emulator.FindingsError, match=r"bounds: reads 4 bytes at argument 0 \+256, which has 256"
        ):
            function(*arguments(options, x, y), 96)
        function(*arguments(options, x, y), 64)


def test_a_function_compiled_outside_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    function = compiled()
    with (
        emulator.device("sm_90a"),
        pytest.raises(emulator.EmulatorError, match=r"compiled outside emulator\.device"),
    ):
        function(from_dlpack(torch.zeros(4)), from_dlpack(torch.zeros(4)), 4)


def test_the_settings_of_the_dsl_come_back() -> None:
    from cutlass.cutlass_dsl import CuTeDSL

    envar = CuTeDSL._get_dsl().envar
    names = ("shared_libs", "_arch", "keep_ptx", "keep_cubin", "dump_dir")
    before = [getattr(envar, n) for n in names], os.environ.get("CUTE_DSL_LIBS")
    with emulator.device("sm_103a"):
        assert envar.arch == "sm_103a"
    assert ([getattr(envar, n) for n in names], os.environ.get("CUTE_DSL_LIBS")) == before


def test_nothing_is_dumped_where_one_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither while a device is open nor by what the DSL compiles after it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")

    @cute.jit
    def host(x: cutlass.Int32):
        cute.printf("{}", x)

    for options in ("", "--enable-tvm-ffi"):
        with emulator.device("sm_90a"):
            compiled(options)
        compiled(options)
        cute.compile(host, cutlass.Int32(1))
        host(1)
    assert list(tmp_path.iterdir()) == []


def test_host_code_that_ran_before_makes_no_difference(tmp_path: Path) -> None:
    """The runtime library of the DSL is in the process already when the emulator comes."""
    program = f"""
    import sys; sys.path.insert(0, {str(ROOT)!r})
    import cutlass, cutlass.cute as cute, torch

    @cute.jit
    def host(x: cutlass.Int32):
        cute.printf("{{}}", x)

    if __name__ == "__main__":
        host(3)
        from tests.emulator import test_launch as t
        t.test_a_compiled_function_runs_on_cpu_tensors("sm_90a", "--enable-tvm-ffi")
        t.test_a_compiled_function_runs_on_cpu_tensors("sm_90a", "")
        print("right")
    """
    path = tmp_path / "order.py"
    path.write_text(textwrap.dedent(program))
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.split()) == ["3", "right"]  # two buffers, flushed in either order


def test_one_device_at_a_time() -> None:
    with emulator.device("sm_90a") as device:
        assert emulator.current() is device
        with pytest.raises(emulator.EmulatorError, match="open already"), emulator.device("sm_90a"):
            pass
    assert emulator.current() is None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(target="sm_80"), "target: got 'sm_80', allowed sm_90a"),
        (dict(schedule="fair"), "schedule: got 'fair', allowed round_robin"),
        (dict(on_finding="ignore"), "on_finding: got 'ignore', allowed raise, keep"),
        (dict(resident=0), "resident: got 0, allowed at least 1"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(emulator.EmulatorError, match=text), emulator.device(**options):
        pass


def test_without_a_c_compiler_the_error_says_what_is_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FLASHNEXT_EMULATOR_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    build.compiler.cache_clear()
    try:
        with pytest.raises(emulator.EmulatorError, match="needs a C compiler: set CC"):
            build.library("nothing", ["int f;"], (), "")
    finally:
        build.compiler.cache_clear()


def test_a_cluster_exchanges_through_distributed_shared_memory() -> None:
    body = """
    mov.u32 %r3, %cluster_ctarank; mov.u32 %r4, %cluster_nctarank; add.u32 %r5, %r3, 1; rem.u32 %r5, %r5, %r4;
    shl.b32 %r6, %r1, 2; add.s32 %r6, %r2, %r6; mapa.shared::cluster.u32 %r7, %r6, %r5;
    mad.lo.s32 %r8, %r3, 100, %r1; st.shared::cluster.b32 [%r7], %r8;
    barrier.cluster.arrive.release; barrier.cluster.wait.acquire;
    ld.shared.b32 %r9, [%r6]; mov.u32 %r10, %ctaid.x; mad.lo.s32 %r11, %r10, 32, %r1; mul.wide.u32 %d3, %r11, 4;
    add.s64 %d3, %d1, %d3; st.global.b32 [%d3], %r9;
    """
    out = torch.zeros(8, 32, dtype=torch.int32)
    with emulator.device("sm_90a") as device:
        device.launch(kernel(body, 1, shared=128), [out], grid=(8,), cluster=(4,))
    want = [[(cta % 4 - 1) % 4 * 100 + lane for lane in range(32)] for cta in range(8)]
    assert out.tolist() == want


def test_special_registers_of_a_three_dimensional_launch() -> None:
    names = (
        "tid.x",
        "tid.y",
        "tid.z",
        "ctaid.x",
        "ctaid.y",
        "ctaid.z",
        "ntid.y",
        "nctaid.z",
        "laneid",
        "warpid",
    )
    body = "mov.u32 %r3, %ctaid.z; mov.u32 %r4, %nctaid.y; mad.lo.s32 %r3, %r3, %r4, 0; mov.u32 %r4, %ctaid.y; add.s32 %r3, %r3, %r4;"
    body += "mov.u32 %r4, %nctaid.x; mul.lo.s32 %r3, %r3, %r4; mov.u32 %r4, %ctaid.x; add.s32 %r3, %r3, %r4; mul.lo.s32 %r3, %r3, 48;"
    body += "mov.u32 %r4, %tid.z; mad.lo.s32 %r5, %r4, 3, 0; mov.u32 %r4, %tid.y; add.s32 %r5, %r5, %r4; mul.lo.s32 %r5, %r5, 8;"
    body += f"add.s32 %r5, %r5, %r1; add.s32 %r3, %r3, %r5; mul.lo.s32 %r3, %r3, {4 * len(names)}; cvt.u64.u32 %d3, %r3; add.s64 %d3, %d1, %d3;"
    body += "".join(f"mov.u32 %r6, %{n}; st.global.b32 [%d3+{4 * i}], %r6;" for i, n in enumerate(names))
    grid, block = (2, 3, 2), (8, 3, 2)
    out = torch.zeros(12 * 48, len(names), dtype=torch.int32)
    with emulator.device("sm_90a") as device:
        device.launch(kernel(body, 1), [out], grid=grid, block=block)
    for row, got in enumerate(out.tolist()):
        cta, t = divmod(row, 48)
        where = [t % 8, t // 8 % 3, t // 24, cta % 2, cta // 2 % 3, cta // 6]
        assert got == [*where, 3, 2, t % 32, t // 32]


def test_the_example_of_the_manual_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "emulator.md").read_text(), re.DOTALL)
    (tmp_path / "example.py").write_text(example)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "example.py")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "store_bytes=4000" in done.stdout


def test_a_device_that_nobody_refers_to_frees_its_machine() -> None:
    made = emulator.open_device("sm_90a")
    free = made._machine._free
    assert free.alive
    del made
    gc.collect()
    assert not free.alive


def test_a_closed_device_says_so() -> None:
    made = emulator.open_device("sm_90a")
    made.close()
    made.close()
    with made.active(), pytest.raises(emulator.EmulatorError, match="the emulated device is closed"):
        made.launch(kernel("", 1), [torch.zeros(1)])


def test_a_device_remembers_so_many_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["emulator.device"], "KEPT", 3)
    bad = kernel("ld.global.b32 %r3, [%d1+400];", 1)
    with emulator.device("sm_90a", on_finding="keep") as device:
        for threads in range(1, 6):
            device.launch(bad, [torch.zeros(1)], block=(threads,))
        assert [launch.load_bytes for launch in device.launches] == [12, 16, 20]
        assert [finding.count for finding in device.findings] == [3, 4, 5]


def test_traffic_counts_a_sector_once() -> None:
    """Two CTAs read the same 128 bytes twice, and write 64 each; an atomic is a write."""
    body = (
        "mul.wide.u32 %d3, %r1, 4; add.s64 %d4, %d1, %d3; ld.global.b32 %r3, [%d4]; ld.global.b32 %r4, [%d4];"
        "mov.u32 %r5, %ctaid.x; mul.wide.u32 %d5, %r5, 64; add.s64 %d5, %d2, %d5; setp.gt.u32 %p1, %r1, 15; @%p1 bra END;"
        "add.s64 %d5, %d5, %d3; st.global.b32 [%d5], %r3; red.global.add.u32 [%d5], 1; END:"
    )
    x, out = torch.zeros(40, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    x, out = (t[-t.data_ptr() % 32 // 4 :] for t in (x, out))  # sectors begin where these do
    with emulator.device("sm_90a") as device:
        device.name(x, "x")
        device.name(out, "out")
        device.launch(kernel(body), [x, out], grid=(2,))
        (counted,) = device.launches
    assert (counted.load_sectors, counted.unique_load_sectors) == (2 * 2 * 4, 4)
    assert (counted.store_sectors, counted.unique_store_sectors) == (2 * 2 * 2, 4)
    assert counted.tensors == {
        "x": emulator.Traffic(512, 4, 0, 0),
        "out": emulator.Traffic(0, 0, 256, 4),
    }
