"""The store of compiled kernels: whole entries or none, whatever happens to the files, the processes and
the directory."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bindings import cache, store
from bindings.errors import CacheWarning
from bindings.store import LIBRARY, MANIFEST, OBJECT, DamagedEntryError, Key, Store, manifest_of

KEY = Key.of("cute_kernels.hyper.gate", "sm_90a", {"width": 64, "dtype": "bf16"})
OTHER = Key.of("cute_kernels.hyper.gate", "sm_90a", {"width": 128, "dtype": "bf16"})
CONTENT = {OBJECT: b"object " * 500, LIBRARY: b"library " * 700}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cache.AOT_VARIABLE, raising=False)
    monkeypatch.delenv(cache.CACHE_VARIABLE, raising=False)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    path.mkdir(mode=0o700)
    return path


def put(root: Path, key: Key = KEY, content: dict[str, bytes] = CONTENT) -> store.Entry:
    return Store(root).put(key.name(), manifest_of(key, "identity", "sources", {}, content), content)


def in_child(action: Callable[[], None]) -> int:
    """Runs `action` in a forked process; its wait status."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


class TestKey:
    def test_order_of_parameters_does_not_count(self) -> None:
        assert Key.of(KEY.module, KEY.target, {"dtype": "bf16", "width": 64}) == KEY
        assert KEY.name() == Key.of(KEY.module, KEY.target, {"dtype": "bf16", "width": 64}).name()

    @pytest.mark.parametrize(
        "other",
        [
            Key.of(KEY.module, "sm_100a", KEY.params),
            Key.of("cute_kernels.hyper.norm", KEY.target, KEY.params),
            Key.of(KEY.module, KEY.target, {**KEY.params, "width": 65}),
            Key.of(KEY.module, KEY.target, {**KEY.params, "width": "64"}),
            Key.of(KEY.module, KEY.target, {"dtype": "bf16"}),
        ],
        ids=["target", "module", "value", "type", "fewer"],
    )
    def test_everything_else_counts(self, other: Key) -> None:
        assert other != KEY
        assert other.name() != KEY.name()

    def test_one_is_not_true(self) -> None:
        one, true = (Key.of("m", "sm_90a", {"p": p}) for p in (1, True))
        assert one != true
        assert one.name() != true.name()
        assert true.params == {"p": True}

    def test_parameters_are_strings_integers_and_booleans(self) -> None:
        with pytest.raises(TypeError, match=r"m: parameter eps: got 0\.5, allowed a str, an int or a bool"):
            Key.of("m", "sm_90a", {"eps": 0.5})  # type: ignore[dict-item]

    def test_reads_as_kernel_target_and_parameters(self) -> None:
        assert str(KEY) == "hyper.gate for sm_90a (dtype=bf16, width=64)"
        assert KEY.name().startswith("hyper.gate-sm_90a-")
        assert store.is_entry_name(KEY.name())


class TestEntries:
    def test_what_was_put_is_found(self, root: Path) -> None:
        put(root)
        entry = Store(root).find(KEY.name(), KEY)
        assert entry is not None
        assert entry.key == KEY
        assert {name: entry.read(name) for name in CONTENT} == CONTENT
        assert Path(entry.path(OBJECT)).read_bytes() == CONTENT[OBJECT]
        assert entry.size == sum(map(len, CONTENT.values()))
        assert (entry.has(LIBRARY), entry.has("kernel.ptx")) == (True, False)
        assert sorted(p.name for p in root.iterdir()) == [KEY.name()]

    def test_what_was_not_put_is_not(self, root: Path) -> None:
        put(root)
        assert Store(root).find(OTHER.name(), OTHER) is None
        assert Store(root / "nowhere").find(KEY.name(), KEY) is None

    def test_a_later_entry_replaces_an_earlier_one(self, root: Path) -> None:
        put(root)
        put(root, content={OBJECT: b"new"})
        entry = Store(root).find(KEY.name(), KEY)
        assert entry is not None
        assert (entry.read(OBJECT), entry.has(LIBRARY)) == (b"new", False)
        assert sorted(p.name for p in (root / KEY.name()).iterdir()) == [OBJECT, MANIFEST]

    def test_entries_are_private_unless_made_for_others(self, root: Path) -> None:
        put(root)
        assert stat.S_IMODE((root / KEY.name()).stat().st_mode) == 0o700
        shared = Store(root, private=False)
        shared.put(OTHER.name(), manifest_of(OTHER, "", "", {}, CONTENT), CONTENT)
        assert stat.S_IMODE((root / OTHER.name()).stat().st_mode) == 0o755
        assert stat.S_IMODE((root / OTHER.name() / LIBRARY).stat().st_mode) == 0o644

    def test_in_memory(self) -> None:
        entry = store.Entry(manifest_of(KEY, "", "", {}, CONTENT), None, CONTENT)
        paths = [entry.path(name) for name in CONTENT for _ in range(2)]
        assert len(set(paths)) == 4, "a number in use is never reused: the loader knows libraries by it"
        assert [Path(p).read_bytes() for p in paths] == [CONTENT[n] for n in CONTENT for _ in range(2)]

    def test_notes(self, root: Path) -> None:
        entry = put(root)
        assert Store.noted(entry, "note.json") == {}
        Store.note(entry, "note.json", {"a": 1})
        assert Store.noted(entry, "note.json") == {"a": 1}
        for text in ("{", "[" * 200_000):
            (root / KEY.name() / "note.json").write_text(text)
            assert Store.noted(entry, "note.json") == {}
        replace_by_fifo(root / KEY.name() / "note.json")
        assert Store.noted(entry, "note.json") == {}
        assert Store(root).find(KEY.name(), KEY) is not None, "notes are no part of the entry"
        in_memory = store.Entry(entry.manifest, None, CONTENT)
        Store.note(in_memory, "note.json", {"a": 1})
        assert Store.noted(in_memory, "note.json") == {}


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def replace_directory(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
    path.write_bytes(b"not a directory")


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def reseal(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes a manifest and seals it again."""
    content = json.loads((directory / MANIFEST).read_text())
    del content["seal"]
    change(content)
    seal = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (directory / MANIFEST).write_text(json.dumps({**content, "seal": seal}))


DAMAGE: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "truncated object": (lambda d: os.truncate(d / OBJECT, 1000), OBJECT, "1000 bytes, should be 3500"),
    "empty library": (lambda d: os.truncate(d / LIBRARY, 0), LIBRARY, "0 bytes, should be 5600"),
    "object with a flipped bit": (lambda d: flip_bit(d / OBJECT), OBJECT, "sha256"),
    "library with a flipped bit": (lambda d: flip_bit(d / LIBRARY), LIBRARY, "sha256"),
    "missing object": (lambda d: (d / OBJECT).unlink(), OBJECT, "No such file"),
    "missing manifest": (lambda d: (d / MANIFEST).unlink(), MANIFEST, "No such file"),
    "truncated manifest": (lambda d: os.truncate(d / MANIFEST, 100), MANIFEST, "no JSON object"),
    "empty manifest": (lambda d: os.truncate(d / MANIFEST, 0), MANIFEST, "no JSON object"),
    "manifest of another format": (lambda d: (d / MANIFEST).write_text("{}"), MANIFEST, "not a manifest"),
    "list for a manifest": (lambda d: (d / MANIFEST).write_text("[]"), MANIFEST, "no JSON object"),
    "binary manifest": (lambda d: (d / MANIFEST).write_bytes(b"\xff" * 99), MANIFEST, "no JSON object"),
    "edited manifest": (
        lambda d: (d / MANIFEST).write_text((d / MANIFEST).read_text().replace("sm_90a", "sm_100a")),
        MANIFEST,
        "altered",
    ),
    "deep manifest": (lambda d: (d / MANIFEST).write_text("[" * 200_000), MANIFEST, "no JSON object"),
    "deep manifest, whole": (
        lambda d: (d / MANIFEST).write_text('{"a":' * 200_000 + "1" + "}" * 200_000),
        MANIFEST,
        "no JSON object",
    ),
    "FIFO for a manifest": (lambda d: replace_by_fifo(d / MANIFEST), MANIFEST, "not a regular file"),
    "FIFO for a library": (lambda d: replace_by_fifo(d / LIBRARY), LIBRARY, "not a regular file"),
    "directory for a library": (
        lambda d: ((d / LIBRARY).unlink(), (d / LIBRARY).mkdir()),
        LIBRARY,
        "not a regular file",
    ),
    "manifest that others can write": (
        lambda d: (d / MANIFEST).chmod(0o666),
        MANIFEST,
        "can be written by everyone: refused",
    ),
    "library that others can write": (
        lambda d: (d / LIBRARY).chmod(0o646),
        LIBRARY,
        "can be written by everyone: refused",
    ),
    "file for a directory": (replace_directory, MANIFEST, "Not a directory"),
}


@pytest.mark.parametrize(("damage", "file", "reason"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_noticed_named_and_healed(
    root: Path, damage: Callable[[Path], object], file: str, reason: str
) -> None:
    put(root)
    damage(root / KEY.name())
    with pytest.raises(DamagedEntryError, match=reason) as caught:
        Store(root).find(KEY.name(), KEY)
    assert caught.value.path == root / KEY.name() / file
    put(root)
    entry = Store(root).find(KEY.name(), KEY)
    assert entry is not None
    assert entry.read(LIBRARY) == CONTENT[LIBRARY]
    assert sorted(p.name for p in root.iterdir()) == [KEY.name()]


@pytest.mark.parametrize("position", [0.0, 0.2, 0.4, 0.6, 0.8, 0.999])
def test_any_flipped_bit_of_a_manifest_is_noticed(root: Path, position: float) -> None:
    put(root)
    path = root / KEY.name() / MANIFEST
    data = bytearray(path.read_bytes())
    data[int(position * (len(data) - 1))] ^= 0x01
    path.write_bytes(data)
    with pytest.raises(DamagedEntryError):
        Store(root).find(KEY.name(), KEY)


def test_an_entry_of_another_kernel_is_refused(root: Path) -> None:
    put(root, OTHER)
    (root / OTHER.name()).rename(root / KEY.name())
    with pytest.raises(DamagedEntryError, match=r"describes hyper\.gate .*width=128.*, not .*width=64"):
        Store(root).find(KEY.name(), KEY)


def test_everything_is_on_disk_before_it_has_its_name(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    fsync, rename = os.fsync, os.rename

    def synced(descriptor: int) -> None:
        steps.append("sync " + os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def renamed(a: Path, b: Path) -> None:
        steps.append("rename")
        rename(a, b)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    put(root)
    *files, directory, name, parent = steps
    assert set(files) == {f"sync {LIBRARY}", f"sync {OBJECT}", f"sync {MANIFEST}"}
    assert directory.startswith("sync .tmp-")
    assert (name, parent) == ("rename", f"sync {root.name}")


class TestKilledWriter:
    """A writer dies by SIGKILL at its n-th step, for every n."""

    STEPS = ("fsync", "rename", "mkdir", "chmod", "fchmod")

    def kill_at(self, root: Path, n: int) -> bool:
        """Whether the writer was killed, and not done before."""

        def write() -> None:
            left = [n]

            def counted(real: Callable[..., object]) -> Callable[..., object]:
                def step(*args: object, **kwargs: object) -> object:
                    left[0] -= 1
                    if left[0] < 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return real(*args, **kwargs)

                return step

            for name in self.STEPS:
                setattr(os, name, counted(getattr(os, name)))
            put(root)

        status = in_child(write)
        assert status in (0, signal.SIGKILL)
        return status != 0

    @pytest.mark.parametrize("before", ["nothing", "damaged", "whole"])
    def test_leaves_an_entry_or_none(self, tmp_path: Path, before: str) -> None:
        found = []
        for n in range(40):
            root = tmp_path / str(n)
            root.mkdir()
            if before != "nothing":
                put(root, content={OBJECT: b"earlier"})
            if before == "damaged":
                flip_bit(root / KEY.name() / OBJECT)
            killed = self.kill_at(root, n)
            try:
                entry = Store(root).find(KEY.name(), KEY)
            except DamagedEntryError:
                assert before == "damaged", "a write that failed never damages"
                found.append("damaged")
            else:
                found.append("none" if entry is None else "new" if entry.has(LIBRARY) else "earlier")
            put(root)
            assert Store(root).find(KEY.name(), KEY) is not None, "and is in nobody's way"
            if not killed:
                break
        else:
            raise AssertionError("more steps than tried")
        assert found[-1] == "new"
        assert {"nothing": "none", "damaged": "damaged", "whole": "earlier"}[before] in found
        assert n >= 6, "files, directories and renames all count as steps"

    def test_leftovers_are_swept_by_a_later_writer(self, root: Path) -> None:
        assert self.kill_at(root, 3)
        (leftover,) = Store(root).leftovers()
        put(root)
        assert Store(root).leftovers() == [leftover], "it may be at work"
        os.utime(root / leftover, (0, time.time() - store.STALE_S - 60))
        put(root)
        assert Store(root).leftovers() == []


class TestLock:
    @pytest.fixture
    def holder(self, root: Path) -> Iterator[int]:
        """A process that holds the lock of KEY."""
        ready, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            with Store(root).lock(KEY.name()) as held:
                os.write(tell, b"y" if held else b"n")
                time.sleep(60)
            os._exit(0)
        os.close(tell)
        assert os.read(ready, 1) == b"y"
        os.close(ready)
        yield pid
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    def test_waits_says_so_and_not_for_ever(
        self, root: Path, holder: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(store, "LOCK_NOTICE_S", 0.05)
        monkeypatch.setattr(store, "LOCK_LIMIT_S", 0.3)
        start = time.monotonic()
        with pytest.warns(CacheWarning, match=f"held by process {holder} for"):  # noqa: SIM117
            with Store(root).lock(KEY.name(), KEY) as held:
                assert not held
        assert 0.3 < time.monotonic() - start < 30
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        assert f"waiting for process {holder}, which builds {KEY}" in record.getMessage()

    def test_another_entry_is_free(self, root: Path, holder: int) -> None:
        with Store(root).lock(OTHER.name()) as held:
            assert held

    def test_is_released_by_death(self, root: Path, holder: int) -> None:
        took: list[bool] = []

        def take() -> None:
            with Store(root).lock(KEY.name()) as held:
                took.append(held)

        waiter = threading.Thread(target=take)
        waiter.start()
        time.sleep(0.1)
        assert took == []
        os.kill(holder, signal.SIGKILL)
        waiter.join(30)
        assert took == [True]

    def test_threads_exclude_each_other(self, root: Path) -> None:
        inside, most = [0], [0]

        def work() -> None:
            with Store(root).lock(KEY.name()) as held:
                assert held
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                time.sleep(0.01)
                inside[0] -= 1

        threads = [threading.Thread(target=work) for _ in range(6)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert most == [1]

    def test_a_lock_file_that_was_removed_is_no_lock(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Between opening and locking, a `--clear` removes it: others would see, and take, a new one."""
        path, real, calls = root / ".locks" / KEY.name(), fcntl.flock, []

        def flock(descriptor: int, operation: int) -> None:
            if not calls:
                path.unlink()
            calls.append(operation)
            real(descriptor, operation)

        monkeypatch.setattr(fcntl, "flock", flock)
        with Store(root).lock(KEY.name()) as held:
            assert held
            with open(path) as other, pytest.raises(BlockingIOError):
                real(other, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def test_is_not_to_be_had_where_nothing_can_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with Store(tmp_path / "file").lock(KEY.name()) as held:
            assert not held


def test_the_manifest_says_what_the_entry_is(root: Path) -> None:
    content = {OBJECT: b"o"}
    toolchain = {"machine": "x86_64", "packages": {}}
    manifest = manifest_of(KEY, "identity", "sources", toolchain, content, symbol="s", cudart=None)
    Store(root).put(KEY.name(), manifest, content)
    written = json.loads((root / KEY.name() / MANIFEST).read_text())
    assert written.pop("seal")
    assert written == manifest
    assert written["files"] == {OBJECT: {"bytes": 1, "sha256": written["files"][OBJECT]["sha256"]}}
    assert abs(written["created"] - time.time()) < 60
