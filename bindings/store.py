"""A store of compiled kernels: a directory with a subdirectory an entry.

An entry is the host object `kernel.o`, the shared library `kernel.so` where one could be linked, and
`manifest.json`, which says what they are and holds their sha256 and its own. It is written whole or not at
all (temporary directory, fsync, rename), and read only if everything fits and nobody else can have put or
can change it: see `untrusted`. Writers of one entry take turns
by a file lock, which the kernel releases if its holder dies; readers take none.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import hashlib
import json
import logging
import os
import pwd
import re
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bindings.errors import CacheWarning

OBJECT, LIBRARY, MANIFEST = "kernel.o", "kernel.so", "manifest.json"

MAGIC, FORMAT = "flashnext-kernel", 1

LOCK_NOTICE_S = 5.0
LOCK_LIMIT_S = 300.0
"""How long to wait for another process that builds the same kernel before saying so, and before building it
as well."""

STALE_S = 3600.0
"""Age at which the temporary directory of a process that died is removed by the next writer."""

_LOCKS, _TEMPORARY = ".locks", ".tmp-"
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "module": str,
    "target": str,
    "params": str,
    "identity": str,
    "sources": str,
    "toolchain": dict,
    "created": int,
    "files": dict,
    "symbol": str,
    "cudart": (int, type(None)),
    "dynamic_smem": (int, type(None)),
}
_ENTRY_NAME = re.compile(r"-sm_\d+[a-z]?-[0-9a-f]{32}$")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Key:
    """A kernel as a caller names it. params_text: canonical JSON of the constexpr parameters, so that equal
    keys are equal kernels (1 and True are not)."""

    module: str
    target: str
    params_text: str

    @staticmethod
    def of(module: str, target: str, params: Mapping[str, str | int | bool]) -> Key:
        """Raises TypeError for a parameter that is no str, int or bool."""
        for name, value in params.items():
            if not isinstance(value, (str, int)):
                raise TypeError(f"{module}: parameter {name}: got {value!r}, allowed a str, an int or a bool")
        return Key(module, target, json.dumps(dict(params), sort_keys=True, separators=(",", ":")))

    @property
    def params(self) -> dict[str, str | int | bool]:
        """The constexpr parameters."""
        params: dict[str, str | int | bool] = json.loads(self.params_text)
        return params

    @property
    def kernel(self) -> str:
        """The module without the package that all kernels share."""
        return self.module.removeprefix("cute_kernels.")

    def name(self, digest: str = "") -> str:
        """The entry's name: readable, and unique through a digest; without one, through that of the key
        itself."""
        digest = (
            digest or hashlib.sha256(repr((self.module, self.target, self.params_text)).encode()).hexdigest()
        )
        return f"{self.kernel}-{self.target}-{digest[:32]}"

    def __str__(self) -> str:
        shown = ", ".join(f"{k}={v}" for k, v in self.params.items())
        return f"{self.kernel} for {self.target}" + (f" ({shown})" if shown else "")


class DamagedEntryError(Exception):
    """An entry that is torn, altered or something else's. path: the file to blame."""

    def __init__(self, path: Path, reason: str):
        super().__init__(f"{path}: {reason}")
        self.path, self.reason = path, reason


@dataclass(frozen=True)
class Entry:
    """A compiled kernel: its manifest, and its files, either in a directory or (where none can be written)
    in memory."""

    manifest: Mapping[str, Any]
    directory: Path | None = None
    content: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def key(self) -> Key:
        """The kernel that this is."""
        return Key(*(self.manifest[name] for name in ("module", "target", "params")))

    def has(self, file: str) -> bool:
        """Whether the entry holds a file of this name."""
        return file in self.manifest["files"]

    def read(self, file: str) -> bytes:
        """The contents of a file."""
        return self.content[file] if self.directory is None else (self.directory / file).read_bytes()

    def path(self, file: str) -> str:
        """A path that the file can be loaded from for as long as this process lives."""
        if self.directory is not None:
            return str(self.directory / file)
        return _memory_file(self.content[file])

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(f["bytes"] for f in self.manifest["files"].values())


def _memory_file(content: bytes) -> str:
    # The descriptor stays open: were its number used again, the dynamic loader would take the new file for
    # the old one.
    descriptor = os.memfd_create("flashnext-kernel", os.MFD_CLOEXEC)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    return f"/proc/self/fd/{descriptor}"


def manifest_of(
    key: Key,
    identity: str,
    sources: str,
    toolchain: Mapping[str, Any],
    content: Mapping[str, bytes],
    *,
    symbol: str = "",
    cudart: int | None = None,
    dynamic_smem: int | None = None,
) -> dict[str, Any]:
    """The manifest of an entry: what it is, what it was made from and with, and the digests of its files.

    symbol: the exported function. cudart: the major version that the library is linked for. dynamic_smem:
    bytes, None if decided at run time."""
    return {
        "magic": MAGIC,
        "format": FORMAT,
        "module": key.module,
        "target": key.target,
        "params": key.params_text,
        "identity": identity,
        "sources": sources,
        "toolchain": toolchain,
        "created": int(time.time()),
        "files": {
            name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name, data in content.items()
        },
        "symbol": symbol,
        "cudart": cudart,
        "dynamic_smem": dynamic_smem,
    }


def _seal(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def untrusted(facts: os.stat_result, owners: Collection[int] = ()) -> str | None:
    """Why code from a directory or file with these facts is not to be run, or None.

    It must belong to one of `owners` (default: this user and root) and be writable by its owner alone. A
    group that may write is let pass only if it is the owner's private one: their primary group, of their
    name, without other members. What cannot be looked up is not private."""
    if facts.st_uid not in (owners or (os.geteuid(), 0)):
        return f"belongs to user {facts.st_uid}, not to user {os.geteuid()}: refused"
    if facts.st_mode & stat.S_IWOTH:
        return "can be written by everyone: refused"
    if facts.st_mode & stat.S_IWGRP and not _is_private_group(facts.st_uid, facts.st_gid):
        return f"can be written by group {facts.st_gid}: refused"
    return None


def _is_private_group(user: int, group: int) -> bool:
    try:
        owner, members = pwd.getpwuid(user), grp.getgrgid(group)
    except KeyError:
        return False
    return (
        owner.pw_gid == group and members.gr_name == owner.pw_name and set(members.gr_mem) <= {owner.pw_name}
    )


def _read_regular(path: Path) -> tuple[bytes, os.stat_result]:
    """A file's contents and facts. Raises OSError, also for what is no regular file (a FIFO would block)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(), facts
    finally:
        os.close(descriptor)


def _read_trusted(path: Path) -> bytes:
    """The contents of a regular file that only its owner can change. Raises DamagedEntryError."""
    try:
        data, facts = _read_regular(path)
    except OSError as error:
        raise DamagedEntryError(path, error.strerror or str(error)) from None
    reason = untrusted(facts)
    if reason is not None:
        raise DamagedEntryError(path, reason)
    return data


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    """The manifest in a file's text, without its seal; every field is there and of its type. Raises
    DamagedEntryError."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise DamagedEntryError(path, "no JSON object")
    sealed = content.pop("seal", None)
    if content.get("magic") != MAGIC or content.get("format") != FORMAT:
        raise DamagedEntryError(path, "not a manifest of this format")
    try:
        if sealed != _seal(content):
            raise DamagedEntryError(path, "altered: its digest does not fit its contents")
        for name, kinds in _FIELDS.items():
            if name not in content or not isinstance(content[name], kinds):
                raise ValueError(name)
        if not 0 <= content["created"] < 2**63:
            raise ValueError("created")
        params = json.loads(content["params"])
        if not isinstance(params, dict) or Key.of("", "", params).params_text != content["params"]:
            raise ValueError("params")
        if OBJECT not in content["files"]:
            raise ValueError("files")
        for file, facts in content["files"].items():
            if file in ("", ".", "..") or set(file) & {"/", "\0"}:
                raise ValueError("files")
            if not isinstance(facts["bytes"], int) or not isinstance(facts["sha256"], str):
                raise ValueError("files")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise DamagedEntryError(path, f"incomplete, or of wrong types: {error}") from None
    return content


class Store:
    """A directory of entries. `private`: readable by its owner alone."""

    def __init__(self, root: Path, *, private: bool = True):
        self.root, self.private = root, private

    def find(self, name: str, key: Key | None = None) -> Entry | None:
        """The entry of a name, None if there is none. Raises DamagedEntryError if it is not whole, or not
        that of `key`, or others can write it."""
        directory = self.root / name
        path = directory / MANIFEST
        try:
            reason = untrusted(directory.stat())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DamagedEntryError(path, error.strerror or str(error)) from None
        if reason is not None:
            raise DamagedEntryError(directory, reason)
        content = _parse(path, _read_trusted(path))
        entry = Entry(content, directory)
        if key is not None and entry.key != key:
            raise DamagedEntryError(path, f"describes {entry.key}, not {key}")
        for file, facts in content["files"].items():
            data = _read_trusted(directory / file)
            if len(data) != facts["bytes"]:
                raise DamagedEntryError(directory / file, f"{len(data)} bytes, should be {facts['bytes']}")
            if hashlib.sha256(data).hexdigest() != facts["sha256"]:
                raise DamagedEntryError(directory / file, "altered: its sha256 does not fit the manifest")
        return entry

    def put(self, name: str, manifest: Mapping[str, Any], content: Mapping[str, bytes]) -> Entry:
        """Writes an entry whole, in place of what has its name. Raises OSError, and then has written
        nothing."""
        self.root.mkdir(mode=0o700 if self.private else 0o755, exist_ok=True)
        self._sweep()
        temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=self.root))
        try:
            for file, data in content.items():
                self._write(temporary / file, data)
            sealed = {**manifest, "seal": _seal(manifest)}
            self._write(temporary / MANIFEST, (json.dumps(sealed, indent=1, sort_keys=True) + "\n").encode())
            if not self.private:
                temporary.chmod(0o755)
            _sync_directory(temporary)
            self._install(temporary, self.root / name)
            _sync_directory(self.root)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return Entry(manifest, self.root / name)

    def _write(self, path: Path, data: bytes) -> None:
        with open(path, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), 0o600 if self.private else 0o644)

    def _install(self, temporary: Path, final: Path) -> None:
        for _ in range(8):
            try:
                os.rename(temporary, final)
                return
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
            # something is there: what is to be replaced, or the work of a process that took no lock
            aside = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=self.root))
            with contextlib.suppress(FileNotFoundError):
                os.rename(final, aside / "replaced")
            shutil.rmtree(aside, ignore_errors=True)
        raise OSError(errno.EBUSY, "is replaced by others again and again", str(final))

    def _sweep(self) -> None:
        for name in self.leftovers():
            with contextlib.suppress(OSError):
                if time.time() - (self.root / name).stat().st_mtime > STALE_S:
                    shutil.rmtree(self.root / name, ignore_errors=True)

    @contextlib.contextmanager
    def lock(self, name: str, what: object = "") -> Iterator[bool]:
        """Holds the entry's lock among processes; yields False where that cannot be had (a directory that
        cannot be written, a file system without locks, LOCK_LIMIT_S gone by): then the work may be done
        twice, never wrongly."""
        descriptor = self._acquire(name, what)
        try:
            yield descriptor is not None
        finally:
            if descriptor is not None:
                fcntl.flock(descriptor, fcntl.LOCK_UN)
                os.close(descriptor)

    def _acquire(self, name: str, what: object) -> int | None:
        start, noticed = time.monotonic(), False
        path = self.root / _LOCKS / name
        while True:
            try:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                log.debug("no lock for %s: %s", name, error)
                return None
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(descriptor, path):  # else a `--clear` removed it meanwhile: take the new one
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, f"{os.getpid()}\n".encode())
                    return descriptor
            except BlockingIOError:
                waited = time.monotonic() - start
                holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
                if waited > LOCK_LIMIT_S:
                    os.close(descriptor)
                    message = f"{path}: held by process {holder} for {waited:.0f} s: not waiting any longer"
                    warnings.warn(message, CacheWarning, stacklevel=2)
                    return None
                if waited > LOCK_NOTICE_S and not noticed:
                    noticed = True
                    log.warning(
                        "waiting for process %s, which builds %s (lock: %s)", holder, what or name, path
                    )
            except OSError as error:
                os.close(descriptor)
                log.debug("no lock for %s: %s", name, error)
                return None
            os.close(descriptor)
            time.sleep(0.02)

    @staticmethod
    def note(entry: Entry, file: str, content: Mapping[str, Any]) -> None:
        """Keeps something derived from an entry beside it; best effort, not covered by the manifest."""
        if entry.directory is None:
            return
        with contextlib.suppress(OSError):
            descriptor, temporary = tempfile.mkstemp(prefix=_TEMPORARY, dir=entry.directory)
            with open(descriptor, "w") as stream:
                json.dump(content, stream)
            os.replace(temporary, entry.directory / file)

    @staticmethod
    def noted(entry: Entry, file: str) -> dict[str, Any]:
        """What `note` kept, or an empty dictionary."""
        try:
            found = json.loads(_read_regular(entry.directory / file)[0]) if entry.directory else {}
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def names(self) -> list[str]:
        """The names of what looks like an entry, sorted: everything that is not the store's own."""
        return sorted(p.name for p in self.root.iterdir() if not p.name.startswith("."))

    def leftovers(self) -> list[str]:
        """The names of temporary directories, of processes that died or are at work."""
        return sorted(p.name for p in self.root.glob(_TEMPORARY + "*"))

    def remove(self, name: str) -> None:
        """Removes an entry, or leftovers of one. Those who loaded it keep it. Raises OSError."""
        with self.lock(name):
            path = self.root / name
            aside = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=self.root))
            try:
                os.rename(path, aside / "removed")  # at once, so that nobody finds half of it
            finally:
                shutil.rmtree(aside)
            with contextlib.suppress(FileNotFoundError):
                (self.root / _LOCKS / name).unlink()


def is_entry_name(name: str) -> bool:
    """Whether a file's name is that of an entry."""
    return _ENTRY_NAME.search(name) is not None


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
