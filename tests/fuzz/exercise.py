"""One file, used in every way on both engines: the same rows, or errors of featherbed's own."""

import contextlib
import ctypes
import mmap
import os
import tempfile
import warnings
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from featherbed.errors import FeatherbedError, FormatError
from featherbed.packed import inspect as anchor_weights
from featherbed.packed import inspect as report
from featherbed.packed.disk import open_rows
from featherbed.packed.engine import VARIABLE
from featherbed.packed.file import check, from_bytes, load, to_bytes
from fuzz.mutate import mutant
from fuzz.workers import describe

RELATIVE = 1e-5
ALL_ROWS = 1 << 17  # numbers gathered on the way to all rows of a table that is used whole
ROUNDING = 1e-6  # of the terms of a score, which may cancel
ALWAYS = (
    "row",
    "few",
    "rows",
    "iteration",
    "bag",
    "weighted bag",
    "disk",
    "ids",
    "ids one by one",
    "keys",
    "by key",
    "logits",
    "dot",
    "cosine",
)
REFUSED = object()


@dataclass
class Scores:
    """Scores, and the sizes of the terms that they are sums of."""

    values: np.ndarray
    terms: np.ndarray | float


class Guarded:
    """Memory before an unreadable page: a read beyond the end of a file kills the process."""

    def __init__(self, size=1 << 22):
        self.size = size
        self.region = mmap.mmap(-1, size + mmap.PAGESIZE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.region))
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_void_p(address + size), mmap.PAGESIZE, 0):
            raise OSError(ctypes.get_errno(), "mprotect")

    def hold(self, data):
        """Return the bytes, the last of which is the last before the unreadable page."""
        if len(data) > self.size:
            return memoryview(data)
        begin = self.size - len(data)
        self.region[begin : self.size] = data
        return memoryview(self.region)[begin : self.size]


_guarded = None


def exercise_number(number, folder, seed):
    """Make the mutant of this number and use it; return whether it opened, and the findings."""
    data, _ = mutant(sources(folder), seed, number)
    return exercise(data)


_sources = {}


def sources(folder):
    """Return the bytes of the corpus by name."""
    if folder not in _sources:
        paths = sorted(Path(folder).glob("*.safetensors"))
        _sources[folder] = {path.stem: path.read_bytes() for path in paths}
    return _sources[folder]


def exercise(data):
    """Use the bytes of a file in every way; return (whether it opened, the findings in words)."""
    global _guarded
    _guarded = _guarded or Guarded()
    with (
        tempfile.NamedTemporaryFile(prefix="fuzz-", dir=_memory()) as file,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        file.write(data)
        file.flush()
        path = Path(file.name)
        findings = []
        numpy_table = _opened("load", partial(load, path), findings)
        numba_table = _opened("from_bytes", partial(from_bytes, _guarded.hold(data)), findings)
        if (numpy_table is REFUSED) != (numba_table is REFUSED):
            findings.append("disagreement: load and from_bytes")
        if numpy_table is REFUSED or numba_table is REFUSED or findings:
            return numpy_table is not REFUSED, findings
        sound = _run("check", partial(check, path), findings) is not REFUSED
        _run("report", lambda: report.as_text(report.report(path)).encode(), findings)
        _run("again", lambda: to_bytes(from_bytes(to_bytes(numpy_table))) and None, findings)
        found = {}
        for engine, table in (("numpy", numpy_table), ("numba", numba_table)):
            with _engine(engine):
                found[engine] = {
                    name: _run(f"{engine} {name}", use, findings) for name, use in uses(table, path)
                }
        for name, one in found["numpy"].items():
            difference = differing(one, found["numba"][name])
            if sound and one is REFUSED and name in ALWAYS:
                difference = "refused, though check accepts the file"
            if difference:
                findings.append(f"disagreement: {name}: {difference}")
        return True, findings


@contextlib.contextmanager
def _engine(name):
    """Look rows up by numpy or numba, within it."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = name
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before


def _memory():
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _opened(name, use, findings):
    found = _run(name, use, findings)
    return REFUSED if found is None else found


def _run(name, use, findings):
    """Return the result of a use, or REFUSED; an exception of somebody else's is a finding."""
    try:
        with np.errstate(all="ignore"):
            return use()
    except FeatherbedError as error:
        unnamed = isinstance(error, FormatError) and not str(error)
        return findings.append(f"exception: {name}: no message") if unnamed else REFUSED
    except Exception as error:
        findings.append(f"exception: {name}: {describe(error)}")
        return REFUSED


def uses(table, path):
    """Yield the ways to use a table by name."""
    rows, few = table.rows, np.unique(np.linspace(0, table.rows - 1, 9).astype(np.int64))
    work = max(table.dim, *(band.gathered for band in table.bands))
    ids = np.concatenate([few, few[::-1], few[:1]])
    query = np.cos(np.arange(table.dim, dtype=np.float32))
    small = rows * work <= ALL_ROWS
    some = np.arange(rows) if small else ids
    yield "repr", lambda: repr(table) and None
    yield "row", lambda: table[rows - 1]
    yield "one by one", lambda: np.stack([table[id_] for id_ in few.tolist()])
    yield "few", lambda: table[ids.reshape(1, -1)]
    yield "rows", lambda: table[some]
    yield "iteration", lambda: np.stack(list(islice(table, 3)))
    yield "bag", lambda: table.bag(np.stack([ids, ids[::-1]]), mode="mean")
    weights = np.linspace(-1, 1, len(ids)).astype(np.float32)
    yield "weighted bag", lambda: table.bag(ids, [0, 0, len(ids) // 2], weights)
    yield "disk", lambda: open_rows(path)[ids]
    yield "codes", lambda: table.codes_of(ids)
    yield from key_uses(table, small)
    if small:
        yield from score_uses(table, query)
        yield "near codes", lambda: table.near_codes(table.codes_of(0), 4)
        yield "rows with", lambda: table.rows_with(table.codes_of(rows - 1)[:1])
        yield "recall", lambda: table.code_recall(few, 2)
        yield "pairs", lambda: np.array([e.weight for e in anchor_weights.largest_pairs(table, 4)])
        yield (
            "objects",
            lambda: np.array([e.weight for e in anchor_weights.objects_of(table, 0, 4)]),
        )
        yield "zero rows", lambda: anchor_weights.zero_rows(table).ids
        yield "clusters", lambda: anchor_weights.clusters_of(table)
        yield (
            "anchors",
            lambda: (
                anchor_weights.anchors_text(anchor_weights.anchors_report(table)).encode() and None
            ),
        )


def score_uses(table, query):
    """Yield the ways to score all rows of a table."""

    def terms():  # the sizes of the terms that each score adds up
        spread = np.abs(table[:]) @ np.abs(query)
        return np.where(np.isfinite(spread), spread, 0)

    several = np.stack([query, -query, 0 * query])
    yield "logits", lambda: Scores(table.logits(query), terms())
    yield "several logits", lambda: Scores(table.logits(several), terms())
    yield "dot", lambda: Scores(table.search(query, 5)[1], terms().max())
    yield "cosine", lambda: Scores(table.search(several[:2], 3, metric="cosine")[1], 1.0)


def key_uses(table, small):
    """Yield the ways to use the keys of a table."""
    keys = table.keys
    yield "unknown key", lambda: table["no such key"]
    if keys is not None:
        words = ["no such key", *map(str, range(-9, 99, 9)), "t49725", "t53292", "k1", ""]
        yield "ids", lambda: table.ids(words)
        yield "ids one by one", lambda: np.array([table.ids(word) for word in words])
        yield "get", lambda: table.get(words, default="mean") if small else None
    if keys is not None and keys.form != "hashed":
        yield "keys", lambda: len(keys[0] + keys[len(keys) - 1])
        yield "by key", lambda: table[[keys[0], keys[len(keys) // 2]]]
        yield "first key", lambda: table[str(keys[0])] if keys[0] in table else None


def differing(one, other):
    """Say how the results of the two engines differ; None if they agree."""
    if one is REFUSED or other is REFUSED or one is None or other is None:
        return None if one is other else f"{_kind(one)} with numpy, {_kind(other)} with numba"
    slack = ROUNDING * one.terms if isinstance(one, Scores) else 0.0
    for a, b in zip(_arrays(one), _arrays(other), strict=True):
        if a.shape != b.shape:
            return f"shapes {a.shape} and {b.shape}"
        with np.errstate(all="ignore"):
            wide, also = a.astype(np.float64), b.astype(np.float64)
            size = np.maximum(np.abs(wide), np.abs(also))
            near = np.isfinite(size) & (np.abs(wide - also) <= RELATIVE * size + slack)
        wrong = ~(near | (wide == also) | (np.isnan(wide) & np.isnan(also)))
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            return f"{wide[at]} with numpy, {also[at]} with numba at {at}, {wrong.sum()} in all"
    return None


def _kind(result):
    return "refused" if result is REFUSED else "accepted"


def _arrays(result):
    if isinstance(result, Scores):
        return [result.values]
    return [np.asarray(part) for part in (result if isinstance(result, tuple) else (result,))]
