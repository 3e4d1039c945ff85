"""Locks between processes, held on open files and released when the process ends, however it ends.

On systems without ``fcntl`` (Windows) nothing is locked: ``lock_now`` returns False and
``exclusive`` does not wait.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

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
