"""The project's own promises: which package may import which, documents and commands that agree with code."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bindings.registry import OPS

if importlib.util.find_spec("tomllib"):
    import tomllib
else:  # Python 3.10
    tomllib = None

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[1]

# A module imports from its own level and those below it; of two prefixes, the longer one counts.
LEVELS = {
    "tests": 5,
    "profiling": 4,
    "bindings": 3,
    "collectives": 2,
    "cute_kernels": 1,
    "cute_kernels.device": 0,
    "emulator": -1,  # knows nothing of the kernels that it runs
}
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MAX_LINES = 700


def sources() -> list[Path]:
    return sorted(path for package in LEVELS if "." not in package for path in (ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[str]:
    """Absolute names of what a file imports, wherever in it."""
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def level(name: str) -> int | None:
    found = [prefix for prefix in LEVELS if name == prefix or name.startswith(prefix + ".")]
    return LEVELS[max(found, key=len)] if found else None


@pytest.mark.parametrize("path", sources(), ids=module_name)
def test_imports_run_one_way(path: Path) -> None:
    own = level(module_name(path))
    assert own is not None
    upward = [name for name in imports(path) if (other := level(name)) is not None and other > own]
    assert not upward


def test_the_import_check_sees_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "bindings" / "sub" / "module.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "import a.b\nfrom c import d as e\nfrom . import f\nfrom .g import h\nfrom ..i import j\n"
        "def late():\n    import profiling.demo\n"
    )
    assert set(imports(path)) == {
        "a.b",
        "c.d",
        "bindings.sub.f",
        "bindings.sub.g.h",
        "bindings.i.j",
        "profiling.demo",
    }
    assert level("cute_kernels.device.vector") == 0
    assert level("cute_kernels.devices") == 1
    assert level("torch") is None


def test_what_is_named_as_text_exists() -> None:
    """`collectives` takes from above it only what it names as text, module:attribute."""
    named = {
        node.value
        for path in (ROOT / "collectives").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"[\w.]+:\w+", node.value)
    }
    assert "bindings.jit:get" in named
    for name in named:
        module, _, attribute = name.partition(":")
        assert hasattr(importlib.import_module(module), attribute), name


def test_device_code_knows_no_torch() -> None:
    guilty = {
        module_name(path)
        for path in (ROOT / "cute_kernels").rglob("*.py")
        if any(name.split(".")[0] in ("torch", "numpy") for name in imports(path))
    }
    assert not guilty


def test_files_stay_short() -> None:
    long = {module_name(p): n for p in sources() if (n := len(p.read_text().splitlines())) > MAX_LINES}
    assert not long


def code_blocks(document: Path, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", document.read_text(), re.M | re.S)


@pytest.mark.parametrize("index", range(len(code_blocks(ROOT / "README.md"))))
def test_readme_examples_run(index: int, capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, object] = {"__name__": "readme"}
    exec(compile(code_blocks(ROOT / "README.md")[index], f"README example {index}", "exec"), namespace)
    results = [value for value in namespace.values() if isinstance(value, torch.Tensor)]
    assert results
    assert all(torch.isfinite(value.float()).all() for value in results)


def test_the_readme_example_says_what_serves_the_call(capsys: pytest.CaptureFixture[str]) -> None:
    exec(code_blocks(ROOT / "README.md")[0], {})
    assert "hc_apply_norm: " in capsys.readouterr().out


def commands(pattern: str) -> list[tuple[str, str]]:
    return [(d.name, m) for d in DOCUMENTS for m in re.findall(pattern, d.read_text())]


def test_documented_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    asked = commands(r"(?m)(?:^ {4}|`)make (?:[A-Z]+=\S* )*([a-z]+)\b")
    assert {name for _, name in asked} >= {"demo", "test", "lint"}
    assert not [found for found in asked if found[1] not in targets]


def test_documented_modules_can_be_run() -> None:
    for document, name in commands(r"python3? -m ([\w.]+)"):
        assert importlib.util.find_spec(name) is not None, f"{document}: {name}"


def test_documented_files_exist() -> None:
    links = commands(r"\]\(([^)#:]+)\)")
    paths = commands(r"`((?:[\w.]+/)+(?:\w+\.\w+)?)`")  # a folder, or a file with a suffix
    assert links
    assert paths
    for document, name in links + paths:
        places = ROOT / name, ROOT / "cute_kernels" / name
        built = name.startswith("build/")
        assert built or any(place.exists() for place in places), f"{document}: {name}"


def test_documented_names_exist() -> None:
    for document, dotted in commands(r"`((?:bindings|collectives|torch\.ops\.flashnext)\.\w+)\b(?!\.py|/)"):
        module, _, name = dotted.rpartition(".")
        if module == "torch.ops.flashnext":
            assert name in OPS, f"{document}: {dotted}"
        elif importlib.util.find_spec(dotted) is None:
            assert hasattr(importlib.import_module(module), name), f"{document}: {dotted}"


@pytest.mark.parametrize("document", ["README.md", "docs/numerics.md"])
def test_operator_tables_are_complete(document: str) -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / document).read_text(), re.M)
    assert {name for name in rows if name not in ("sm_90a", "sm_100a", "sm_103a")} == set(OPS)


def test_documented_environment_variables_exist() -> None:
    packages = ("bindings", "emulator")
    code = "".join(path.read_text() for name in packages for path in (ROOT / name).rglob("*.py"))
    for document, name in commands(r"\b(FLASHNEXT_[A-Z_]+)"):
        assert name in code, f"{document}: {name}"


@pytest.mark.skipif(tomllib is None, reason="tomllib is in the standard library from Python 3.11 on")
def test_what_compiles_kernels_is_pinned_alike_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = [requirement for requirement in project["dependencies"] if "==" in requirement]
    assert {pin.split("==")[0] for pin in pins} == {"nvidia-cutlass-dsl", "apache-tvm-ffi"}
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    assert not [pin for pin in pins if pin not in constraints]
    (cu13,) = project["optional-dependencies"]["cu13"]
    assert cu13.replace("[cu13]", "") in pins


@pytest.mark.parametrize(
    "name", ["Makefile", "pyproject.toml", "constraints.txt", ".ci/run", ".pre-commit-config.yaml"]
)
def test_no_package_index_is_named(name: str) -> None:
    assert not re.search(r"https?://|index-url|extra-index", (ROOT / name).read_text())


def test_ci_runs_the_one_command() -> None:
    path = ROOT / ".ci" / "run"
    assert os.access(path, os.X_OK)
    assert re.search(r"^exec make .*\btest\b", path.read_text(), re.M)
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0


class TestMakefile:
    """What make would do, without doing it: the recipes are printed, not run."""

    @staticmethod
    def dry_run(*arguments: str) -> str:
        environment = {
            k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "VENV", "PYTHON", "ARGS")
        }
        command = ["make", "-n", "--no-print-directory", "-C", str(ROOT), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    def test_passes_arguments_on(self, tmp_path: Path) -> None:
        printed = self.dry_run("demo", f"VENV={tmp_path}/env", "ARGS=--layers 2")
        assert f"{tmp_path}/env/bin/python -m profiling.demo --layers 2" in printed

    def test_makes_an_environment_where_there_is_none(self, tmp_path: Path) -> None:
        assert "-m pip install" in self.dry_run("demo", f"VENV={tmp_path}/env")

    def test_reuses_the_environment_until_its_sources_change(self, tmp_path: Path) -> None:
        stamp = tmp_path / ".installed"
        stamp.touch()
        assert "pip install" not in self.dry_run("demo", f"VENV={tmp_path}")
        os.utime(stamp, (0, 0))
        assert "pip install" in self.dry_run("demo", f"VENV={tmp_path}")

    def test_installs_nothing_without_an_environment(self) -> None:
        printed = self.dry_run("test", "VENV=", "PYTHON=somepython")
        assert "pip install" not in printed
        assert "somepython -m pytest" in printed

    def test_ends_with_pytest(self) -> None:
        lines = self.dry_run("test", "VENV=", "PYTHON=somepython", "ARGS=-k hyper").strip().splitlines()
        assert lines[-1].strip() == "somepython -m pytest $workers -k hyper"

    def test_clean_leaves_a_named_environment_alone(self, tmp_path: Path) -> None:
        assert str(tmp_path) not in self.dry_run("clean", f"VENV={tmp_path}").replace(str(ROOT), "")
