"""Compilation of loops: without the GIL, cached on disk if a folder is writable."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from numba import njit
from numba.core.caching import IndexDataCacheFile
from numba.core.ccallback import CFunc
from numba.core.sigutils import normalize_signature

from featherbed.files import exclusive

F = TypeVar("F", bound=Callable[..., Any])


class CacheFiles(IndexDataCacheFile):  # type: ignore[misc]
    """The cache files of one function, safe for several processes at a time.

    numba numbers data files by an index that it reads, changes and writes without a lock, and
    writes the index first: two processes with a cold cache can store different code under one
    number, and each loads the code of the other. Here a data file is named after the key of its
    code and written before the index names it, both under a lock.
    """

    def __init__(self, folder: str, base: str, stamp: Any) -> None:
        super().__init__(cache_path=folder, filename_base=f"{base}.keyed", source_stamp=stamp)
        self.folder, self.base = Path(folder), f"{base}.keyed"

    def save(self, key: Any, data: Any) -> None:
        """Store the code of a key; remove data files that the index no longer names."""
        digest = hashlib.sha256(self._dump((self._source_stamp, key))).hexdigest()[:24]
        name = f"{self.base}.{digest}.nbc"
        with exclusive(self.folder / "featherbed.lock"):  # or another process would remove the data
            self._save_data(name, data)
            known = {**self._load_index(), key: name}
            self._save_index(known)
            for path in self.folder.glob(f"{glob.escape(self.base)}.*.nbc"):
                if path.name not in known.values():
                    path.unlink(missing_ok=True)

    def load(self, key: Any) -> Any:
        """Return the code of a key; None if there is none, or it cannot be read."""
        try:
            return super().load(key)
        except Exception:  # a damaged file: the function is compiled again
            return None

    def _load_index(self) -> dict[Any, str]:
        try:
            found: dict[Any, str] = super()._load_index()
        except Exception:  # a damaged index is an empty one
            return {}
        return found


def guarded(function: Any) -> Any:
    """Give a function that numba caches on disk cache files that several processes may share."""
    cache = function._cache
    files = cache._cache_file
    cache._cache_file = CacheFiles(
        files._cache_path, files._index_name.removesuffix(".nbi"), files._source_stamp
    )
    return function


def _compile(function: F, **options: bool) -> F:
    try:
        made: F = guarded(njit(nogil=True, cache=True, **options)(function))
    except RuntimeError:  # no folder to cache in
        made = njit(nogil=True, **options)(function)
    return made


def compiled(function: F) -> F:
    """Compile a function that other compiled functions call."""
    return _compile(function)


def fast(function: F) -> F:
    """Compile a function of finite numbers whose sums may be reordered."""
    return _compile(function, fastmath=True)


class Job:
    """A function ``f(block, start, stop)`` that any thread can run without the GIL.

    It returns 1 on success. It is compiled on first use: a look-up waits for its own loop only.
    """

    def __init__(self, function: Callable[[Any, Any, Any], Any]) -> None:
        self.function = function

    @cached_property
    def address(self) -> int:
        """The address of the compiled code."""
        made: Any = CFunc(
            self.function, normalize_signature("int64(int64, int64, int64)"), locals={}, options={}
        )
        try:
            made.enable_caching()
            guarded(made)
        except RuntimeError:  # no folder to cache in
            pass
        made.compile()
        _kept.append(made)
        return int(made.address)


_kept: list[Any] = []  # a job's machine code lives as long as the object that made it
