"""Objects that occur near each other: words of a text, items of a session."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from featherbed.checks import check_choice, check_integer, is_number
from featherbed.errors import ArgumentError
from featherbed.graphs.checks import as_array, object_ids
from featherbed.graphs.graph import Graph

CHUNK = 1 << 16  # tokens paired at a time
BLOCK = 1 << 23  # pairs sorted at a time; at least 2 CHUNK
Array = NDArray[Any]


def cooccurrence(
    tokens: Array | Iterable[Any],
    objects: int,
    *,
    window: int = 10,
    min_count: int = 5,
    pmi: float | None = None,
    top: int | None = None,
    by: Literal["pmi", "count"] = "pmi",
) -> Graph:
    """Relate objects that occur within ``window`` places of each other often enough.

    n_ij is the number of places at most ``window`` apart that hold i and j
    (``cooccurrence_counts``), n_i = Σ_j n_ij and N = Σ_i n_i. With PMI(i, j) = ln(n_ij N / (n_i
    n_j)) (Church and Hanks 1990, here over pairs, not single words) i and j are related if n_ij >=
    ``min_count``, PMI(i, j) >= ``pmi`` where that is given, and, where ``top`` is given, j is among
    the ``top`` best of those left to i, or i among the best of those left to j: an object may have
    more than ``top`` neighbors.

    Liang et al. (2021) take a window of 10. In a long text most pairs of common words meet once by
    chance, hence ``min_count``; 1 is refused unless ``pmi`` or ``top`` choose. Every count is
    exact, and memory is that of ``cooccurrence_counts`` before the matrix is made.

    Args:
        tokens: ids [n], or an iterable of such arrays (sentences, files, sessions); windows stay
            inside each array.
        objects: how many objects there are; ids are 0..objects - 1.
        window: the largest distance that counts; neighboring places are 1 apart.
        by: the order of ``top``, "pmi" or "count"; ties go to the lower id.

    >>> cooccurrence(np.array([0, 1, 2, 0, 1, 3, 0, 1]), objects=4, window=1, min_count=2).pairs()
    array([[0, 1]])
    """
    objects, window, min_count = _checked(objects, window, min_count)
    if pmi is not None and not is_number(pmi):
        raise ArgumentError(
            f"pmi={pmi!r}: give a finite number (0 keeps pairs at least as frequent as by "
            "chance) or None"
        )
    if top is not None:
        top = check_integer("top", top, 1)
    check_choice("by", by, ("pmi", "count"))
    if min_count == 1 and pmi is None and top is None:
        raise ArgumentError(
            "min_count=1 would relate everything that ever met: give a min_count of at least 2, or "
            "pmi, or top; cooccurrence_counts returns the counts of all pairs"
        )
    keys, counts = _count(tokens, objects, window)
    often = counts >= min_count
    total = _marginals(keys, counts, objects) if pmi is not None or top is not None else None
    low, high, counts = *_ends(keys[often], objects), counts[often]
    del keys, often
    if total is not None:
        scores = np.log(counts * total.sum() / (total[low] * total[high]))
        keep = np.ones(len(low), dtype=bool) if pmi is None else scores >= pmi
        low, high, scores = low[keep], high[keep], (scores if by == "pmi" else counts)[keep]
        if top is not None:
            keep = _best(low, high, scores, top)
            low, high = low[keep], high[keep]
    return Graph.from_edges(objects, np.stack([low, high], axis=1))


def cooccurrence_counts(
    tokens: Array | Iterable[Any], objects: int, *, window: int = 10, min_count: int = 1
) -> csr_array:  # -> int [objects, objects]
    """Count co-occurrences within ``window`` positions: n_ij = |{(s, t): s < t <= s + window}|.

    {x_s, x_t} = {i, j} with i != j; the matrix is symmetric with an empty diagonal. Pairs are
    sorted and counted in blocks and merged, so memory grows with the number of distinct pairs and
    not with the length of the text: 8 bytes per pair (12 with more than 65,536 objects), twice as
    much while a block is merged, about 32 while the matrix is built.

    Args:
        tokens: ids [n], or an iterable of such arrays (sentences, files, sessions); windows do not
            cross arrays.
        objects: number of objects; ids are 0..objects - 1.
        window: maximum distance; adjacent positions have distance 1.
        min_count: omit rarer pairs from the matrix, after exact counting.

    >>> cooccurrence_counts([[0, 1, 0], [2, 1]], objects=3, window=1).toarray()
    array([[0, 2, 0],
           [2, 0, 1],
           [0, 1, 0]], dtype=int32)
    """
    objects, window, min_count = _checked(objects, window, min_count)
    keys, counts = _count(tokens, objects, window)
    if min_count > 1:
        often = counts >= min_count
        keys, counts = keys[often], counts[often]
    kind = np.int32 if max(2 * len(keys), objects) < 1 << 31 else np.int64
    starts = np.searchsorted(keys, np.arange(objects, dtype=keys.dtype) * keys.dtype.type(objects))
    starts = np.append(starts, len(keys)).astype(kind)
    columns = (keys % keys.dtype.type(objects)).astype(kind)
    del keys
    upper = csr_array((counts, columns, starts), shape=(objects, objects))
    return upper + upper.T.tocsr()


def _checked(objects: int, window: int, min_count: int) -> tuple[int, int, int]:
    return (
        check_integer("objects", objects, 1),
        check_integer("window", window, 1),
        check_integer("min_count", min_count, 1),
    )


def _count(tokens: Array | Iterable[Any], objects: int, window: int) -> tuple[Array, Array]:
    """Return the distinct pairs i < j as sorted keys i * objects + j, and their counts."""
    kind = np.uint32 if objects <= 1 << 16 else np.uint64
    keys, counts = np.empty(0, dtype=kind), np.empty(0, dtype=np.int32)
    block, filled, seen = np.empty(BLOCK, dtype=kind), 0, 0
    for fresh in _pairs(_chunks(tokens, objects), kind(objects), window):
        if filled + len(fresh) > BLOCK:
            keys, counts = _merge(keys, counts, block[:filled], seen)
            filled = 0
        block[filled : filled + len(fresh)] = fresh
        filled += len(fresh)
        seen += len(fresh)
    return _merge(keys, counts, block[:filled], seen)


def _chunks(tokens: Array | Iterable[Any], objects: int) -> Iterator[tuple[Array, Array]]:
    """Yield the ids, CHUNK to 2 CHUNK at a time, and the index of the array of each."""
    if isinstance(tokens, str) or not isinstance(tokens, Iterable):
        raise ArgumentError(
            f"tokens are {type(tokens).__name__}: give an array of ids, or an iterable of such "
            "arrays"
        )
    pieces: list[Array] = []
    numbers: list[int] = []
    size = 0
    for number, given in enumerate([tokens] if isinstance(tokens, np.ndarray) else tokens):
        text = as_array("tokens", given)
        if text.ndim != 1:
            raise ArgumentError(
                f"tokens hold an array of shape {text.shape}: give ids [n], or an iterable of such "
                "arrays"
            )
        for start in range(0, len(text), CHUNK):
            pieces.append(object_ids("tokens", text[start : start + CHUNK], objects))
            numbers.append(number)
            size += len(pieces[-1])
            if size >= CHUNK:
                yield np.concatenate(pieces), np.repeat(numbers, [len(piece) for piece in pieces])
                pieces, numbers, size = [], [], 0
    if pieces:
        yield np.concatenate(pieces), np.repeat(numbers, [len(piece) for piece in pieces])


def _pairs(chunks: Iterator[tuple[Array, Array]], objects: Any, window: int) -> Iterator[Array]:
    """Yield the keys of pairs of different objects within ``window``, at most 2 CHUNK at a time."""
    ids, text = np.empty(0, dtype=objects.dtype), np.empty(0, dtype=np.int64)
    for fresh, fresh_text in chunks:
        known = len(ids)  # the end of a text that goes on: not paired again with itself
        ids = np.concatenate([ids, fresh.astype(objects.dtype)])
        text = np.concatenate([text, fresh_text])
        longest = int(np.bincount(text - text[0]).max())
        for distance in range(1, min(window, longest - 1) + 1):
            start, stop = max(known, distance), len(ids) - distance
            left, right = ids[start - distance : stop], ids[start:]
            count = (left != right) & (text[start - distance : stop] == text[start:])
            yield (np.minimum(left, right) * objects + np.maximum(left, right))[count]
        keep = max(len(ids) - window, int(np.searchsorted(text, text[-1])))
        ids, text = ids[keep:], text[keep:]


def _merge(keys: Array, counts: Array, block: Array, seen: int) -> tuple[Array, Array]:
    """Sort a block in place, count its runs and merge them with earlier counts, bounded by
    ``seen``.
    """
    block.sort()
    first = np.flatnonzero(np.diff(block, prepend=~block[:1]))  # the first key starts a run too
    found, runs = block[first], np.diff(first, append=len(block))
    if seen >= 1 << 31:
        counts = counts.astype(np.int64, copy=False)
    at = np.searchsorted(keys, found)
    known = at < len(keys)
    known[known] = keys[at[known]] == found[known]
    counts[at[known]] += runs[known].astype(counts.dtype)
    at = at[~known]
    return np.insert(keys, at, found[~known]), np.insert(counts, at, runs[~known])


def _ends(keys: Array, objects: int) -> tuple[Array, Array]:
    low, high = np.divmod(keys, keys.dtype.type(objects))
    return low.astype(np.int64), high.astype(np.int64)


def _marginals(keys: Array, counts: Array, objects: int) -> NDArray[np.float64]:  # -> [objects]
    """n_i = Σ_j n_ij, in blocks of as many pairs as objects."""
    total, step = np.zeros(objects), max(objects, CHUNK)
    for start in range(0, len(keys), step):
        here = slice(start, start + step)
        for end in _ends(keys[here], objects):
            total += np.bincount(end, weights=counts[here], minlength=objects)
    return total


def _best(low: Array, high: Array, scores: Array, top: int) -> NDArray[np.bool_]:
    """Return which pairs are among the ``top`` highest of either end."""
    own, other = np.concatenate([low, high]), np.concatenate([high, low])
    order = np.lexsort((other, -np.concatenate([scores, scores]), own))
    sorted_own = own[order]
    rank = np.arange(len(own)) - np.searchsorted(sorted_own, sorted_own)
    keep = np.zeros(len(low), dtype=bool)
    keep[order[rank < top] % max(len(low), 1)] = True
    return keep
