"""Atomic writing, and locks between processes.

A file or folder takes its name only once all of it is written. Temporary files and folders are
called ``.featherbed-...`` and are locked by the process that writes them, so that those left
behind by a killed process can be told apart and removed. Locks are held on open files and released
when the process ends, however it ends; on systems without ``fcntl`` (Windows) nothing is locked:
``lock_now`` returns False and ``exclusive`` does not wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

PREFIX = ".featherbed-"
SUFFIX = ".tmp"
TEMPORARY = re.compile(r"\.featherbed-[a-z0-9_]{8,12}\.tmp")
_OWN_FILES = "/proc/self/fd"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[int]:
    """Yield a file descriptor; on success its content becomes ``path`` in one step.

    On failure nothing is left. An existing file keeps its mode; of a symbolic link the target is
    written. Where the system has nameless files (Linux), a process killed while writing leaves
    nothing behind; killed between naming the file and moving it, it leaves the complete file under
    a temporary name.
    """
    target = _target(path)
    folder, mode = target.parent, _mode_of(target)
    nameless = _nameless(folder)
    name: str | None = None
    descriptor = nameless
    if descriptor is None:
        name = _temporary_name(folder)
        descriptor = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode or 0o666)
    try:
        lock_now(descriptor)
        if mode is not None and hasattr(os, "fchmod"):
            os.fchmod(descriptor, mode)
        yield descriptor
        os.fsync(descriptor)
        if nameless is not None:
            name = _give_name(descriptor, folder)
        assert name is not None
        Path(name).replace(target)
        name = None
        _sync_folder(folder)
    except OSError as error:
        if error.filename is None and error.errno is not None:  # such as a full disk
            error.filename = str(path)
        raise
    finally:
        os.close(descriptor)
        if name is not None:
            Path(name).unlink(missing_ok=True)


@contextlib.contextmanager
def replacing_file(path: str | Path) -> Iterator[BinaryIO]:
    """Yield a binary file; on success its content becomes ``path`` in one step (``replacing``)."""
    with replacing(Path(path)) as descriptor, os.fdopen(os.dup(descriptor), "wb") as file:
        yield file


def write_file(path: str | Path, content: str | bytes) -> None:
    """Write a file atomically; text is UTF-8.

    >>> path = getfixture("tmp_path") / "note.txt"
    >>> write_file(path, "tea")
    >>> path.read_bytes()
    b'tea'
    """
    with replacing_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """Yield a new folder in ``parent``, locked by this process and removed at the end."""
    while True:
        folder = Path(tempfile.mkdtemp(SUFFIX, PREFIX, parent))
        lock = _lock_folder(folder)
        if folder.is_dir():  # else another process removed it as stale before it was locked
            break
        if lock is not None:
            os.close(lock)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def replace_folder(new: Path, folder: Path) -> None:
    """Put the folder ``new`` in the place of ``folder`` and remove the old one.

    On Linux the two are exchanged in one step; elsewhere there is a moment between two renames.

    >>> root = getfixture("tmp_path") / "root"
    >>> _ = [(root / name).mkdir(parents=True) for name in ("new", "old")]
    >>> _ = (root / "new" / "file").write_text("1")
    >>> replace_folder(root / "new", root / "old")
    >>> [path.name for path in root.iterdir()]
    ['old']
    """
    old = folder.resolve()
    if not _exchange(new, old):
        aside = new.with_name(f"{new.name}-old")
        old.replace(aside)
        try:
            new.replace(old)
        except OSError:
            aside.replace(old)
            raise
        new = aside
    _sync_folder(old.parent)
    shutil.rmtree(new)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; return False where the system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(
        rename is not None
        and rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0
    )


def remove_stale(folder: Path) -> None:
    """Remove temporary files and folders that killed processes left in ``folder``.

    Those of running processes are locked and stay. Where nothing can be locked, nothing is removed.

    >>> folder = getfixture("tmp_path") / "stale"
    >>> folder.mkdir()
    >>> (folder / ".featherbed-0123456789ab.tmp").touch()
    >>> remove_stale(folder)
    >>> list(folder.iterdir())
    []
    """
    with contextlib.suppress(OSError):
        for path in folder.glob(f"{PREFIX}*{SUFFIX}"):
            if TEMPORARY.fullmatch(path.name) and not path.is_symlink():
                _remove_unlocked(path)


def _remove_unlocked(path: Path) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            if lock_now(descriptor):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        finally:
            os.close(descriptor)


def _lock_folder(folder: Path) -> int | None:
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    lock_now(descriptor)
    return descriptor


def _target(path: Path) -> Path:
    """Return the file to write, links followed; raise if ``path`` cannot be written."""
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    if target.is_symlink():
        raise FileExistsError(f"{path} is a symbolic link that leads to itself: remove it")
    if target.is_dir():
        raise IsADirectoryError(f"{path} is a folder: name a file in it")
    if target.exists() and not target.is_file():
        raise FileExistsError(f"{path} is a device or pipe, which cannot be replaced: name a file")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target.parent}: no such folder")
    return target


def _mode_of(path: Path) -> int | None:
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return None


def _nameless(folder: Path) -> int | None:
    if not Path(_OWN_FILES).is_dir():
        return None
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o666)
    except (AttributeError, OSError):
        return None


def _temporary_name(folder: Path) -> str:
    return str(folder / f"{PREFIX}{secrets.token_hex(6)}{SUFFIX}")


def _give_name(descriptor: int, folder: Path) -> str:
    temporary = _temporary_name(folder)
    handle = os.open(_OWN_FILES, os.O_RDONLY)
    try:  # with src_dir_fd Python calls linkat, which follows the link to the nameless file
        os.link(str(descriptor), temporary, src_dir_fd=handle, follow_symlinks=True)
    finally:
        os.close(handle)
    return temporary


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]


def lock_now(descriptor: int) -> bool:
    """Lock an open file or folder exclusively; return False if that is not possible at once."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # another process holds it, or the file system has no locks
        return False
    return True


@contextlib.contextmanager
def exclusive(path: Path, seconds: float = 10.0) -> Iterator[None]:
    """Hold an exclusive lock on the file ``path``, created if missing, waiting for it first.

    Where the file cannot be created or locked, or another process holds the lock for longer than
    ``seconds``, the block runs without a lock: use it where that costs time but is not wrong.

    >>> with exclusive(getfixture("tmp_path") / "lock"):
    ...     pass
    """
    descriptor = None
    if fcntl is not None:
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
    if descriptor is None:
        yield
        return
    try:
        end = time.monotonic() + seconds
        while not lock_now(descriptor) and time.monotonic() < end:
            time.sleep(0.01)
        yield
    finally:
        unlock(descriptor)
        os.close(descriptor)


def unlock(descriptor: int) -> None:
    """Release a lock, also for processes that were forked while it was held."""
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
