"""Where kernels are kept: which directories are used, which are refused, and the command for it."""

from __future__ import annotations

import os
import pwd
import stat
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from bindings import cache, store
from bindings.errors import CacheError, CacheWarning
from bindings.store import LIBRARY, MANIFEST, OBJECT, Store, manifest_of
from tests.bindings.test_store import CONTENT, KEY, OTHER, flip_bit, in_child, put, reseal


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cache.AOT_VARIABLE, raising=False)
    monkeypatch.delenv(cache.CACHE_VARIABLE, raising=False)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    path.mkdir(mode=0o700)
    return path


class TestUserStore:
    def test_is_made_private(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path / "a" / "b"))
        found = cache.user_store()
        assert found is not None
        assert found.root == tmp_path / "a" / "b"
        assert stat.S_IMODE(found.root.stat().st_mode) == 0o700

    @pytest.mark.parametrize(
        ("xdg", "expected"),
        [("{tmp}/xdg", "xdg/flashnext"), ("", ".cache/flashnext"), ("rel", ".cache/flashnext")],
    )
    def test_default(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, xdg: str, expected: str) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("XDG_CACHE_HOME", xdg.format(tmp=tmp_path))
        assert cache.cache_directory() == tmp_path / expected

    def test_home_in_the_variable(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv(cache.CACHE_VARIABLE, "~/kernels")
        assert cache.cache_directory() == tmp_path / "kernels"

    @pytest.mark.parametrize("home", ["", "relative", None])
    def test_without_a_home_in_the_environment(
        self, monkeypatch: pytest.MonkeyPatch, home: str | None
    ) -> None:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.delenv("HOME", raising=False)
        if home is not None:
            monkeypatch.setenv("HOME", home)
        own = Path(pwd.getpwuid(os.getuid()).pw_dir)
        assert cache.cache_directory() == own / ".cache" / "flashnext"
        monkeypatch.setenv(cache.CACHE_VARIABLE, "~/kernels")
        assert cache.cache_directory() == own / "kernels"

        def unknown(uid: int) -> None:
            raise KeyError(uid)

        monkeypatch.setattr(pwd, "getpwuid", unknown)
        with pytest.warns(CacheWarning, match="the user has no home directory"):
            assert cache.user_store() is None
        monkeypatch.setenv(cache.AOT_VARIABLE, "~/kernels")
        with pytest.raises(
            CacheError, match=f"{cache.AOT_VARIABLE}=~/kernels: the user has no home directory"
        ):
            cache.aot_store()

    def refused(self, root: Path, monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
        """The store is not used, and one warning says why, however often it is asked for."""
        monkeypatch.setenv(cache.CACHE_VARIABLE, str(root))
        with pytest.warns(CacheWarning, match=reason) as caught:
            assert [cache.user_store() for _ in range(3)] == [None] * 3
        assert len(caught) == 1
        assert str(root) in str(caught[0].message)
        assert cache.CACHE_VARIABLE in str(caught[0].message)

    def test_a_file_in_its_place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "file").write_text("")
        self.refused(tmp_path / "file", monkeypatch, "not a directory")

    def test_nowhere_to_make_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "file").write_text("")
        self.refused(tmp_path / "file" / "store", monkeypatch, "File exists: .*file'")

    def test_writable_by_everyone(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        root.chmod(0o777)
        self.refused(root, monkeypatch, "can be written by everyone: refused")

    def test_writable_by_a_group(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        root.chmod(0o770)
        monkeypatch.setattr(store, "_is_private_group", lambda user, group: False)
        self.refused(root, monkeypatch, r"can be written by group \d+: refused")

    def test_of_another_user(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: root.stat().st_uid + 1)
        self.refused(root, monkeypatch, r"belongs to user \d+, not to user \d+: refused")

    def test_read_only(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """Not even root escapes the permissions here: it becomes someone else to write."""
        root = tmp_path / "store"
        root.mkdir(mode=0o700)
        put(root)
        root.chmod(0o500)
        if os.geteuid() != 0:
            with pytest.raises(PermissionError):
                put(root, OTHER)
            with Store(root).lock(KEY.name()) as held:
                assert not held
            return

        def as_nobody() -> None:
            for path in (root, *root.rglob("*")):
                os.chown(path, 65534, 65534)
            os.chdir(root)  # the way there may be closed to others
            os.setegid(65534)
            os.seteuid(65534)
            here = Store(Path("."))
            assert here.find(KEY.name(), KEY) is not None
            with here.lock(KEY.name()) as held:
                assert not held
            try:
                here.put(OTHER.name(), manifest_of(OTHER, "", "", {}, CONTENT), CONTENT)
            except PermissionError:
                return
            raise AssertionError("wrote into a read-only directory")

        assert in_child(as_nobody) == 0
        assert Store(root).names() == [KEY.name()]


class TestAheadOfTimeStore:
    def test_is_what_the_variable_names(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert cache.aot_store() is None
        monkeypatch.setenv(cache.AOT_VARIABLE, str(root))
        found = cache.aot_store()
        assert found is not None
        assert found.root == root

    @pytest.mark.parametrize(
        ("prepare", "reason"),
        [
            (lambda r: r.rmdir(), "No such file or directory"),
            (lambda r: (r.rmdir(), r.write_text("")), "not a directory"),
            (lambda r: r.chmod(0o777), "can be written by everyone: refused"),
            (lambda r: r.chmod(0o775), r"can be written by group \d+: refused"),
        ],
        ids=["missing", "file", "writable by everyone", "writable by a group"],
    )
    def test_must_be_there_and_safe(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, prepare: Callable[[Path], object], reason: str
    ) -> None:
        monkeypatch.setattr(store, "_is_private_group", lambda user, group: False)
        prepare(root)
        monkeypatch.setenv(cache.AOT_VARIABLE, str(root))
        for _ in range(2):
            with pytest.raises(CacheError, match=f"{cache.AOT_VARIABLE}={root}: {reason}"):
                cache.aot_store()


class TestCommandLine:
    def test_list(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        put(root)
        put(root, OTHER, {OBJECT: b"x" * 2048})
        assert cache.main(["--list", "--dir", str(root)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split() == ["kernel", "target", "parameters", "size", "age", "file"]
        assert sorted(lines[1:3]) == sorted(
            [line for line in lines if "dtype=bf16 width=64" in line or "dtype=bf16 width=128" in line]
        )
        row = next(line for line in lines if "width=64" in line)
        assert row.split()[:2] == ["hyper.gate", "sm_90a"]
        assert row.endswith(str(root / KEY.name() / LIBRARY))
        assert next(line for line in lines if "width=128" in line).endswith(str(root / OTHER.name() / OBJECT))
        assert lines[-1] == f"{root}: 2 kernels, 11 KiB"

    def test_list_names_what_is_damaged_or_foreign(
        self, root: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        put(root)
        flip_bit(root / KEY.name() / OBJECT)
        (root / "README").write_text("mine")
        assert cache.main(["--list", "--dir", str(root)]) == 1
        out = capsys.readouterr().out
        assert f"damaged or foreign: {root / KEY.name() / OBJECT}: altered" in out
        assert f"damaged or foreign: {root / 'README' / MANIFEST}: Not a directory" in out
        assert f"{root}: 0 kernels, 0 KiB, 2 damaged or foreign" in out

    def test_list_survives_sealed_nonsense(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        put(root)
        reseal(root / KEY.name(), lambda m: m.pop("created"))
        assert cache.main(["--list", "--dir", str(root)]) == 1
        out = capsys.readouterr().out
        path = root / KEY.name() / MANIFEST
        assert f"damaged or foreign: {path}: incomplete, or of wrong types: created" in out

    def test_clear_removes_the_store_s_own(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        put(root)
        put(root, OTHER)
        flip_bit(root / OTHER.name() / MANIFEST)
        (root / ".tmp-left").mkdir()
        (root / "README").write_text("mine")
        assert cache.main(["--clear", "--dir", str(root)]) == 0
        assert [p.name for p in root.iterdir() if p.name != ".locks"] == ["README"]
        assert list((root / ".locks").iterdir()) == []
        out = capsys.readouterr().out
        assert f"left alone, not the cache's: {root / 'README'}" in out
        assert f"{root}: removed 2 kernels" in out
        put(root)
        assert Store(root).find(KEY.name(), KEY) is not None

    def test_what_cannot_be_removed_is_named(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        put(root)

        def refuse(*args: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(os, "rename", refuse)
        assert cache.main(["--clear", "--dir", str(root)]) == 1
        captured = capsys.readouterr()
        assert f"not removed: {root / KEY.name()}: Permission denied" in captured.err
        assert "removed 0 kernels, could not remove 1" in captured.out

    def test_the_user_s_store_is_the_default(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv(cache.CACHE_VARIABLE, str(root / "none"))
        assert cache.main(["--list"]) == 0
        assert capsys.readouterr().out == f"{root / 'none'}: nothing stored\n"
        put(root)
        monkeypatch.setenv(cache.CACHE_VARIABLE, str(root))
        assert cache.main(["--list"]) == 0
        assert "width=64" in capsys.readouterr().out

    def test_a_directory_that_is_none(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cache.main(["--list", "--dir", str(tmp_path / "nowhere")]) == 2
        assert "nowhere" in capsys.readouterr().err

    @pytest.mark.parametrize("argv", [[], ["--list", "--clear"], ["--what"]])
    def test_wrong_use(self, argv: list[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            cache.main(argv)
        assert caught.value.code == 2


def test_state_is_what_a_bug_report_wants(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(root))
    put(root)
    assert cache.state() == {"directory": str(root), "contents": "1 kernels, 9 KiB"}
    flip_bit(root / KEY.name() / OBJECT)
    monkeypatch.setenv(cache.AOT_VARIABLE, str(root / "nowhere"))
    state = cache.state()
    assert state["contents"] == "0 kernels, 0 KiB, 1 damaged or foreign"
    assert state["ahead of time"].startswith("unusable: ")
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(root / "new"))
    assert cache.state()["contents"] == "none yet"
    assert not (root / "new").exists(), "asking makes nothing"


def test_no_warning_where_all_is_well(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(root))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = cache.user_store()
        assert found is not None
        with found.lock(KEY.name()) as held:
            assert held
        put(root)
