"""What the store does not believe: sealed manifests that make no sense, and what others can write."""

from __future__ import annotations

import functools
import grp
import os
import pwd
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bindings import store
from bindings.store import MANIFEST, OBJECT, DamagedEntryError, Store, manifest_of
from tests.bindings.test_store import CONTENT, KEY, put, reseal


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    path.mkdir(mode=0o700)
    return path


FIELDS = ["module", "target", "params", "identity", "sources", "toolchain", "created", "files", "symbol"]


@pytest.mark.parametrize("field", [*FIELDS, "cudart", "dynamic_smem"])
@pytest.mark.parametrize("how", ["missing", "of another type"])
def test_a_sealed_manifest_has_every_field(root: Path, field: str, how: str) -> None:
    put(root)
    change: Callable[[dict[str, Any]], object] = lambda m: m.pop(field)  # noqa: E731
    if how != "missing":
        change = lambda m: m.update({field: 1.5})  # noqa: E731
    reseal(root / KEY.name(), change)
    with pytest.raises(DamagedEntryError, match=f"incomplete, or of wrong types: {field}") as caught:
        Store(root).find(KEY.name())
    assert caught.value.path == root / KEY.name() / MANIFEST


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.update(params="{"),
        lambda m: m.update(params="[" * 200_000),
        lambda m: m.update(params="[1]"),
        lambda m: m.update(params='{"a":0.5}'),
        lambda m: m.update(params='{"b": 1, "a": 2}'),
        lambda m: m.update(created=10**400),
        lambda m: m.update(files={}),
        lambda m: m["files"].update({OBJECT: 3}),
        lambda m: m["files"][OBJECT].pop("sha256"),
        lambda m: m["files"].update({"../kernel.o": m["files"][OBJECT]}),
        lambda m: m["files"].update({"a\0b": m["files"][OBJECT]}),
    ],
    ids=lambda _: "",
)
def test_a_sealed_manifest_makes_sense(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    put(root)
    reseal(root / KEY.name(), lambda m: None)
    assert Store(root).find(KEY.name(), KEY) is not None, "the seal is that of the store"
    reseal(root / KEY.name(), change)
    with pytest.raises(DamagedEntryError, match="incomplete, or of wrong types"):
        Store(root).find(KEY.name())


class TestTrust:
    def facts(self, mode: int, uid: int = 1234, gid: int = 1234) -> os.stat_result:
        return os.stat_result((stat.S_IFDIR | mode, 0, 0, 0, uid, gid, 0, 0, 0, 0))

    @pytest.fixture(autouse=True)
    def _users(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """User u is 1234, of the group u, 1234; group staff is 50, of u as well."""
        groups = {1234: ("u", []), 50: ("staff", ["u"])}
        users = {1234: ("u", 1234)}

        def getpwuid(uid: int) -> pwd.struct_passwd:
            name, gid = users[uid]
            return pwd.struct_passwd((name, "x", uid, gid, "", "/", "/bin/sh"))

        def getgrgid(gid: int) -> grp.struct_group:
            name, members = groups[gid]
            return grp.struct_group((name, "x", gid, members))

        monkeypatch.setattr(pwd, "getpwuid", getpwuid)
        monkeypatch.setattr(grp, "getgrgid", getgrgid)
        monkeypatch.setattr(os, "geteuid", lambda: 1234)
        self.groups, self.users = groups, users

    @pytest.mark.parametrize("mode", [0o700, 0o755, 0o1755])
    def test_own_and_root_s_are_trusted(self, mode: int) -> None:
        assert store.untrusted(self.facts(mode)) is None
        assert store.untrusted(self.facts(mode, 0, 0)) is None
        assert (
            store.untrusted(self.facts(mode, 0, 0), {1234}) == "belongs to user 0, not to user 1234: refused"
        )
        assert store.untrusted(self.facts(mode, 7)) == "belongs to user 7, not to user 1234: refused"

    @pytest.mark.parametrize("mode", [0o777, 0o702, 0o1777])
    def test_writable_by_everyone(self, mode: int) -> None:
        assert store.untrusted(self.facts(mode)) == "can be written by everyone: refused"

    def test_the_private_group_may_write(self) -> None:
        assert store.untrusted(self.facts(0o775)) is None

    def test_no_other_group_may(self) -> None:
        refused = "can be written by group {}: refused".format
        assert store.untrusted(self.facts(0o775, gid=50)) == refused(50)
        assert store.untrusted(self.facts(0o775, gid=99)) == refused(99), "an unknown one"
        assert store.untrusted(self.facts(0o775, 0, 0)) == refused(0), "of an unknown user"
        self.groups[1234] = ("u", ["u", "v"])
        assert store.untrusted(self.facts(0o775)) == refused(1234), "with other members"
        self.groups[1234] = ("users", [])
        assert store.untrusted(self.facts(0o775)) == refused(1234), "of another name"
        self.users[1234] = ("staff", 1234)
        assert store.untrusted(self.facts(0o775, gid=50)) == refused(50), "not the primary one"


def test_an_entry_s_directory_that_others_can_write_is_refused(root: Path) -> None:
    put(root)
    (root / KEY.name()).chmod(0o777)
    with pytest.raises(DamagedEntryError, match="can be written by everyone: refused") as caught:
        Store(root).find(KEY.name(), KEY)
    assert caught.value.path == root / KEY.name()
    put(root)
    assert Store(root).find(KEY.name(), KEY) is not None, "a new one takes its place"


def test_an_entry_of_another_user_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(root)
    owner = (root / KEY.name()).stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    monkeypatch.setattr(store, "untrusted", functools.partial(store.untrusted, owners={owner + 1}))
    with pytest.raises(DamagedEntryError, match=f"belongs to user {owner}, not to user {owner + 1}: refused"):
        Store(root).find(KEY.name(), KEY)


@pytest.mark.parametrize("private", [True, False])
def test_what_is_written_is_trusted_whatever_the_umask(tmp_path: Path, private: bool) -> None:
    before = os.umask(0)
    try:
        Store(tmp_path / "s", private=private).put(KEY.name(), manifest_of(KEY, "", "", {}, CONTENT), CONTENT)
    finally:
        os.umask(before)
    assert Store(tmp_path / "s").find(KEY.name(), KEY) is not None
    assert all(not p.stat().st_mode & 0o022 for p in (tmp_path / "s").rglob("*"))
