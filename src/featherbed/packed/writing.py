"""Files that are whole or not there: what is written takes a name only once all of it is written."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

_OWN_FILES = "/proc/self/fd"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[int]:
    """Yield a file descriptor; on success what was written becomes ``path`` in one step, otherwise nothing is left.

    Where the system has nameless files (Linux), a process killed while writing leaves nothing behind either; killed in the
    moment between naming the file and moving it, the whole file under a name that ends in ``.tmp``.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: name a file in it")
    folder = path.parent
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    nameless = _nameless(folder)
    name: str | None = None
    descriptor = nameless
    if descriptor is None:
        name = str(folder / f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
        descriptor = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
    try:
        yield descriptor
        os.fsync(descriptor)
        if nameless is not None:
            name = _give_name(descriptor, folder, path.name)
        assert name is not None
        Path(name).replace(path)
        name = None
        _sync_folder(folder)
    finally:
        os.close(descriptor)
        if name is not None:
            Path(name).unlink(missing_ok=True)


def _nameless(folder: Path) -> int | None:
    if not Path(_OWN_FILES).is_dir():
        return None
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o666)
    except (AttributeError, OSError):
        return None


def _give_name(descriptor: int, folder: Path, name: str) -> str:
    temporary = str(folder / f".{name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    handle = os.open(_OWN_FILES, os.O_RDONLY)
    try:  # the folder's descriptor makes Python call linkat, which follows the link to the nameless file
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
