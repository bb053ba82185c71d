"""Where compiled kernels are kept, and `python -m bindings.cache --list | --clear`.

The user's store is FLASHNEXT_CACHE_DIR, by default under the user's cache directory. FLASHNEXT_AOT_DIR
names a store that `python -m bindings.precompile` made; it is only read. Code is run from neither, nor from
a single entry of theirs, where somebody else can write: see `store.untrusted`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import pwd
import stat
import sys
import time
import warnings
from pathlib import Path

from bindings.errors import CacheError, CacheWarning
from bindings.store import LIBRARY, OBJECT, DamagedEntryError, Store, is_entry_name, untrusted

CACHE_VARIABLE = "FLASHNEXT_CACHE_DIR"
AOT_VARIABLE = "FLASHNEXT_AOT_DIR"


def cache_directory() -> Path:
    """Where the user's store is. Raises RuntimeError if the user has no home directory."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return _expanded(named)
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else _home() / ".cache") / "flashnext"


def _home() -> Path:
    """$HOME, or where that is unset, empty or relative, what the user database says."""
    home = os.environ.get("HOME", "")
    if not os.path.isabs(home):
        try:
            home = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:
            home = ""
    if not os.path.isabs(home):
        raise RuntimeError("the user has no home directory")
    return Path(home)


def _expanded(named: str) -> Path:
    """The absolute path of a setting. Raises RuntimeError for a home directory that there is not."""
    first, _, rest = named.partition("/")
    return _home() / rest.lstrip("/") if first == "~" else Path(named).expanduser().absolute()


def user_store() -> Store | None:
    """The user's store, made if need be; None, after a warning, where it cannot be used."""
    try:
        root = cache_directory()
    except RuntimeError as error:
        _warn(CACHE_VARIABLE, str(error))
        return None
    return _open(root)


@functools.cache  # so the warning comes once for a directory
def _open(root: Path) -> Store | None:
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            root.mkdir(mode=0o700)
        reason = _refusal(root, {os.geteuid()})
    except OSError as error:
        reason = str(error)
    if reason is None:
        return Store(root)
    _warn(root, reason)
    return None


def _warn(where: Path | str, reason: str) -> None:
    message = (
        f"artifact cache {where}: {reason}. Kernels are compiled again in every process; set "
        f"{CACHE_VARIABLE} to a directory of your own"
    )
    warnings.warn(message, CacheWarning, stacklevel=4)


def _refusal(root: Path, owners: set[int]) -> str | None:
    """Why code from this directory is not to be trusted, or None. Raises OSError if it is not there."""
    facts = root.stat()
    return untrusted(facts, owners) if stat.S_ISDIR(facts.st_mode) else "not a directory"


def aot_refusal(root: Path) -> str | None:
    """Why FLASHNEXT_AOT_DIR would refuse this directory, or None."""
    try:
        return _refusal(root, {os.geteuid(), 0})
    except OSError as error:
        return error.strerror or str(error)


def aot_store() -> Store | None:
    """The ahead-of-time store, or None if none is asked for. Raises CacheError if it is not there or not
    safe."""
    named = os.environ.get(AOT_VARIABLE)
    if not named:
        return None
    try:
        root = _expanded(named)
    except RuntimeError as error:
        raise CacheError(f"{AOT_VARIABLE}={named}: {error}") from None
    return _open_aot(root)


@functools.cache
def _open_aot(root: Path) -> Store:
    reason = aot_refusal(root)
    if reason is not None:
        raise CacheError(f"{AOT_VARIABLE}={root}: {reason}")
    return Store(root, private=False)


def state() -> dict[str, str]:
    """What a bug report says about the stores."""
    found: dict[str, str] = {}
    try:
        root = cache_directory()
        found["directory"] = str(root)
        found["contents"] = _summary(root) if root.exists() else "none yet"
        refused = _refusal(root, {os.geteuid()}) if root.exists() else None
        if refused is not None:
            found["contents"] = f"unusable: {refused}"
    except (OSError, RuntimeError) as error:
        found["contents"] = f"unusable: {error}"
    named = os.environ.get(AOT_VARIABLE)
    if named:
        try:
            store = aot_store()
            assert store is not None
            found["ahead of time"] = f"{store.root}: {_summary(store.root)}"
        except CacheError as error:
            found["ahead of time"] = f"unusable: {error}"
    return found


def _summary(root: Path) -> str:
    whole, size, bad = 0, 0, 0
    store = Store(root)
    for name in store.names():
        try:
            entry = store.find(name)
        except DamagedEntryError:
            bad += 1
        else:
            whole, size = whole + 1, size + (entry.size if entry else 0)
    return f"{whole} kernels, {_bytes(size)}" + (f", {bad} damaged or foreign" if bad else "")


def _bytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 1024:.0f} KiB"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def list_store(root: Path) -> int:
    """Prints a store's entries; 1 if some are damaged, else 0."""
    store, rows, bad = Store(root), [("kernel", "target", "parameters", "size", "age", "file")], []
    for name in store.names():
        try:
            entry = store.find(name)
        except DamagedEntryError as damage:
            bad.append(str(damage))
            continue
        if entry is not None:
            key = entry.key
            shown = " ".join(f"{k}={v}" for k, v in key.params.items())
            file = entry.path(LIBRARY if entry.has(LIBRARY) else OBJECT)
            age = _age(time.time() - entry.manifest["created"])
            rows.append((key.kernel, key.target, shown, _bytes(entry.size), age, file))
    if len(rows) > 1:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for message in bad:
        print(f"damaged or foreign: {message}")
    print(f"{root}: {_summary(root)}")
    return 1 if bad else 0


def clear_store(root: Path) -> int:
    """Removes a store's entries and leftovers; 1 if some could not be, else 0. What is not the store's
    stays."""
    store, removed, failed = Store(root), 0, 0
    for name in (*store.leftovers(), *store.names()):
        entry = is_entry_name(name)
        if not entry and not name.startswith("."):
            print(f"left alone, not the cache's: {root / name}")
            continue
        try:
            store.remove(name)
            removed += entry
        except OSError as error:
            failed += 1
            print(f"not removed: {root / name}: {error.strerror}", file=sys.stderr)
    print(f"{root}: removed {removed} kernels" + (f", could not remove {failed}" if failed else ""))
    return 1 if failed else 0


def main(argv: list[str] | None = None) -> int:
    """The command line. Exit codes: 0 fine, 1 something is damaged or could not be removed, 2 wrong use or
    no directory."""
    parser = argparse.ArgumentParser(
        prog="python -m bindings.cache", description="The store of compiled kernels."
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--list", action="store_true", help="print what is stored")
    action.add_argument("--clear", action="store_true", help="remove what is stored")
    parser.add_argument("--dir", type=Path, help=f"the store (default: {CACHE_VARIABLE}, or the user's)")
    options = parser.parse_args(argv)
    try:
        root: Path = options.dir.absolute() if options.dir else cache_directory()
        if not root.exists() and not options.dir:
            print(f"{root}: nothing stored")
            return 0
        code = list_store(root) if options.list else clear_store(root)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader, `head` say, had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
