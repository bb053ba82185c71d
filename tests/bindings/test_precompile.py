"""The ahead-of-time build: what it prints, writes and rejects."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bindings import cache, compiler, jit, link, precompile, sass
from bindings.precompile import Config
from bindings.store import LIBRARY, OBJECT, Key, Store
from tests.bindings import toys

pytestmark = pytest.mark.filterwarnings("ignore:This static loop has")

needs_nvdisasm = pytest.mark.skipif(sass.nvdisasm() is None, reason="needs nvdisasm")


def add(addend: int, target: str = "sm_90a") -> Config:
    return Config("add", Key.of(toys.ADD, target, {"addend": addend}))


def resources(values: int, target: str = "sm_90a") -> Config:
    return Config("resources", Key.of(toys.RESOURCES, target, {"values": values}))


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def build(
    tmp_path: Path, shared_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    """Runs the command on the given configs, which stand for the registered ones: exit code, stdout,
    stderr."""
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(shared_cache))
    monkeypatch.delenv(cache.AOT_VARIABLE, raising=False)

    def run(configs: list[Config], *options: str) -> tuple[int, str, str]:
        monkeypatch.setattr(
            precompile,
            "registered",
            lambda targets, model, sample: [c for c in configs if c.key.target in targets],
        )
        code = precompile.main(["--out", str(tmp_path / "out"), "--jobs", "1", *options])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_builds_reports_and_fills_the_directory(build: Any, tmp_path: Path) -> None:
    configs = [add(1), add(2), add(1, "sm_100a"), resources(8, "sm_100a")]
    code, out, err = build(configs, "--check", "--json", str(tmp_path / "sub" / "report.json"))
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert [line for line in lines if line.startswith("[")] == [
        "[1/4] sm_90a add: ",
        "[3/4] sm_100a add: addend=1",
        "[4/4] sm_100a resources: values=8",
    ]
    assert sum(line.lstrip().startswith("addend=") for line in lines) == 2, "only what varies is repeated"
    assert "4 kernels in " in out
    assert "check: no spills, no stack" in out

    rows = json.loads((tmp_path / "sub" / "report.json").read_text())
    assert [(r["kernel"], r["target"], r["params"]) for r in rows] == [
        (c.kernel, c.key.target, c.key.params) for c in configs
    ]
    for row in rows:
        assert {"registers", "spill_bytes", "stack", "smem", "instructions", "threads"} <= set(row)
        assert (row["spill_bytes"], row["stack"]) == (0, 0)

    store = Store(tmp_path / "out")
    for config in configs:
        entry = store.find(config.key.name(), config.key)
        assert entry is not None
        assert entry.has(LIBRARY) == (link.compiler() is not None)


def test_the_directory_serves_without_the_compiler(
    build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build([add(1), add(1, "sm_100a")])[0] == 0
    monkeypatch.setenv(cache.AOT_VARIABLE, str(tmp_path / "out"))
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path / "unused"))
    monkeypatch.setattr(compiler, "available", lambda: False)
    monkeypatch.setattr(jit, "_functions", {})
    for target in ("sm_90a", "sm_100a"):
        assert callable(jit.get(toys.ADD, target, {"addend": 1}))
    assert not (tmp_path / "unused").exists()


def test_what_the_cache_holds_is_not_compiled_again(
    build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build([add(1)])[0] == 0
    shutil.rmtree(tmp_path / "out")

    def compile_kernel(*_: Any) -> None:
        raise AssertionError("compiled again")

    def disassemble(*_: Any) -> None:
        raise AssertionError("disassembled again")

    monkeypatch.setattr(compiler, "compile_kernel", compile_kernel)
    monkeypatch.setattr(sass, "disassemble", disassemble)
    code, out, _ = build([add(1)])
    assert code == 0
    assert "0 compiled, 1 from the cache" in out
    assert "[cached]" in out
    assert Store(tmp_path / "out").find(add(1).key.name(), add(1).key) is not None


@needs_nvdisasm
def test_check_rejects_spills_and_names_them(build: Any) -> None:
    configs = [add(1), resources(80), resources(8)]
    code, out, err = build(configs, "--check")
    assert code == 1
    assert "check: no spills" not in out
    (line,) = err.splitlines()
    assert line.startswith("CHECK: resources: toy_kernels.resources for sm_90a (values=80): spills ")
    assert "bytes of stack" in line
    assert build(configs)[0] == 0, "without --check it is only reported"


def test_check_finds_stack_without_a_disassembler(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass, "nvdisasm", lambda: None)
    sass.tool_identity.cache_clear()
    try:
        code, out, err = build([resources(80)], "--check")
    finally:
        sass.tool_identity.cache_clear()
    assert code == 1
    assert "no disassembler found (pip install nvidia-cuda-nvdisasm)" in out
    assert "bytes of stack" in err


def test_a_kernel_that_does_not_compile_does_not_stop_the_others(build: Any, tmp_path: Path) -> None:
    code, out, err = build([add(1), add(-1), add(2)], "--check", "--json", str(tmp_path / "r.json"))
    assert code == 1
    message = "ValueError: addend: got -1, allowed integers >= 0"
    assert f"FAILED: {message}" in out
    assert err == f"FAILED: add: toy_kernels.add for sm_90a (addend=-1): {message}\n"
    assert [r["params"]["addend"] for r in json.loads((tmp_path / "r.json").read_text())] == [1, 2]
    assert len(Store(tmp_path / "out").names()) == 2


def test_a_binary_that_cannot_be_read_does_not_stop_the_others(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = sass.cubins
    bad = compiler.compile_kernel(toys.ADD, "sm_90a", {"addend": 31}).object
    monkeypatch.setattr(sass, "cubins", lambda data: [] if data == bad else real(data))
    code, out, _ = build([add(31), add(32)])
    assert code == 1
    assert "FAILED: ValueError: the object holds no kernel" in out
    assert "1 kernels in" in out


def test_without_a_c_compiler_the_directory_holds_objects_and_says_so(
    build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "compiler", lambda: None)
    code, out, _ = build([add(41)])
    assert code == 0
    assert "no C compiler was found here" in out
    assert "need nvidia-cutlass-dsl to load them" in out
    entry = Store(tmp_path / "out").find(add(41).key.name())
    assert entry is not None
    assert (entry.has(OBJECT), entry.has(LIBRARY)) == (True, False)


@pytest.mark.skipif(link.compiler() is None, reason="needs a C compiler")
def test_what_was_cached_without_a_c_compiler_is_linked_with_one(
    build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(link, "compiler", lambda: None)
        build([add(42)])
    code, out, _ = build([add(42)])
    assert code == 0
    assert (
        "serves x86_64 hosts without nvidia-cutlass-dsl" in out or "hosts without nvidia-cutlass-dsl" in out
    )
    entry = Store(tmp_path / "out").find(add(42).key.name())
    assert entry is not None
    assert entry.has(LIBRARY)


def test_entries_of_other_sources_go_others_stay(
    build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build([add(1), add(2)])
    out = tmp_path / "out"
    stale = Store(out).find(add(2).key.name())
    assert stale is not None
    content = {file: stale.read(file) for file in stale.manifest["files"]}
    Store(out, private=False).put(add(2).key.name(), {**stale.manifest, "sources": "old"}, content)
    (out / "NOTES").write_text("mine")
    build([add(3)])
    assert sorted(Store(out).names()) == sorted(["NOTES", add(1).key.name(), add(3).key.name()])


def test_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes of their own: results in order, errors included, one cache."""
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path / "cache"))
    configs = [add(i) for i in range(51, 51 + precompile.CHUNK)] + [add(-1), add(60)]
    seen: list[Config] = []
    out = tmp_path / "out"
    out.mkdir()
    results = precompile.build_all(configs, out, 2, lambda r: seen.append(r.config))
    assert [r.config for r in results] == seen == configs
    assert [bool(r.error) for r in results] == [c == add(-1) for c in configs]
    assert all(r.compiled for r in results if not r.error)
    assert len(Store(tmp_path / "cache").names()) == len(Store(out).names()) == len(configs) - 1


def test_kernels_selects(build: Any) -> None:
    code, out, _ = build([add(1), resources(8)], "--kernels", "resources")
    assert code == 0
    assert "1 kernels in" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--targets", "sm_80"], "--targets: got 'sm_80', allowed sm_90a, sm_100a, sm_103a"),
        (["--targets", ""], "--targets: got '', allowed sm_90a, sm_100a, sm_103a"),
        (["--targets", ","], "--targets: got ',', allowed sm_90a, sm_100a, sm_103a"),
        (["--jobs", "0"], "--jobs: got 0, allowed integers >= 1"),
        (["--model", "hidden=0"], "--model: got 'hidden=0', allowed SIZE=N with SIZE of head_dim, hidden, "),
        (["--model", "dtype=2"], "--model: got 'dtype=2', allowed SIZE=N with SIZE of head_dim, hidden, "),
        (["--kernels", "nothing"], "--kernels: got 'nothing', allowed add"),
    ],
)
def test_wrong_use(build: Any, capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as caught:
        build([add(1)], *options)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_target_given_twice_is_built_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(precompile, "registered", lambda names, model, sample: asked.append(names) or [])
    monkeypatch.setattr(precompile, "run", lambda configs, options: 0)
    assert precompile.main(["--out", str(tmp_path), "--targets", "sm_100a, sm_90a,sm_100a"]) == 0
    assert asked == [["sm_100a", "sm_90a"]]


def test_a_report_that_cannot_be_written_is_known_before_the_work(
    build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precompile, "build_all", lambda *_: pytest.fail("worked"))
    (tmp_path / "file").write_text("mine")
    places = {
        tmp_path: "Is a directory",
        tmp_path / "file" / "r.json": "File exists",
        "/proc/r": "No such file",
    }
    for place, reason in places.items():
        code, out, err = build([add(1)], "--json", str(place))
        assert (code, out) == (2, "")
        assert reason in err
    assert (tmp_path / "file").read_text() == "mine"


def test_a_report_without_room_is_an_error_of_its_own(build: Any, tmp_path: Path) -> None:
    code, out, err = build([add(1)], "--json", "/dev/full")
    assert (code, err) == (1, "error: --json: /dev/full: No space left on device\n")
    assert "1 kernels in" in out


def test_a_directory_that_would_be_refused_is_not_said_to_serve(build: Any, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out").chmod(0o777)
    code, out, err = build([add(1)])
    assert code == 0
    assert cache.AOT_VARIABLE not in out
    assert err == (
        f"warning: {cache.AOT_VARIABLE}={tmp_path / 'out'} does not serve: "
        "can be written by everyone: refused (chmod go-w)\n"
    )
    (tmp_path / "out").chmod(0o755)
    assert f"{cache.AOT_VARIABLE}={tmp_path / 'out'}" in build([add(1)])[1]


def test_the_directory_serves_whatever_the_umask(build: Any, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert build([add(1)])[::2] == (0, "")
    finally:
        os.umask(before)
    assert not any(p.stat().st_mode & 0o022 for p in (tmp_path / "out", *(tmp_path / "out").glob("[!.]*/*")))


def test_a_compiler_command_that_is_none_is_said_so(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", '"unbalanced')
    code, out, _ = build([add(43)])
    assert code == 0
    assert 'CC="unbalanced: No closing quotation' in out


def test_no_directory_no_compiler_no_tool(
    build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").write_text("")
    assert build([add(1)])[0] == 2
    (tmp_path / "out").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "available", lambda: False)
        code, _, err = build([add(1)])
        assert code == 2
        assert "there is no compiler here: pip install" in err
    monkeypatch.setenv(sass.NVDISASM_VARIABLE, "/no/such/tool")
    code, _, err = build([add(1)])
    assert code == 2
    assert "/no/such/tool: no such program" in err


def test_help_needs_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bindings.precompile", "--help"],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    for option in ("--targets", "--out", "--check", "--json", "--jobs"):
        assert option in done.stdout
