"""Insight into a word table: the cost of rows by word frequency, anchors, codes, neighbors.

numpy alone, from the packed table that is served. Rows are counted in bands of word frequency, and
lists are short, so that the report of a million words is no longer than that of a thousand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from featherbed.errors import ArgumentError
from featherbed.packed import (
    NOTHING,
    Fixed,
    Hash,
    Identity,
    Ids,
    PackedTable,
    anchor_count,
    blocks,
    clusters_of,
    largest_pairs,
    objects_as_anchors,
    row_cost,
    strongest,
    weighted_band,
    zero_rows,
)
from featherbed.report import bin_edges, bin_name

Mask = NDArray[np.bool_]
Insight = dict[str, Any]

BLOCK = 1 << 16  # rows decoded at once
MAX_ANCHORS, TOP, MAX_PAIRS = 24, 8, 30  # anchors shown, words of each, largest weights
EXAMPLES, QUERIES, NEIGHBORS = 8, 12, 8  # words per band, words with neighbors, neighbors of each
MIN_COUNT, CANDIDATES = 5, 40  # neighbors have this count if enough of this many times more have
MAX_COMPARED = 200_000  # words whose codes are compared for equality
_FUNCTION = """about above after again against also always among another around because been before
being below between both could does doing down during each even every from further have having here
into itself just like made make many might more most much must never once only other over said same
says shall should since some still such than that their them themselves then there these they this
those through under until upon very were what when where which while whom whose will with within
without would your yours yourself"""
FUNCTION_WORDS = frozenset(_FUNCTION.split())


class _Words(NamedTuple):
    packed: PackedTable
    words: Sequence[str]  # [V]
    counts: NDArray[np.int64]  # [V]
    is_zero: Mask  # [V]: the row is zero
    is_word: Mask  # [V]: neither padding nor a marker such as <unk>


def word_insight(
    packed: PackedTable,
    words: Sequence[str],  # [V]
    counts: ArrayLike,  # int64 [V], in training
    anchor_ids: ArrayLike | None = None,  # [K]: the word of each anchor, -1 for none
) -> Insight:
    """Return the entries of a page about a word table, in plain JSON types.

    For every table: ``bands`` of frequency with the cost of rows and the fraction of zero rows, and
    the ``neighbours`` of some frequent words. For tables of weights: ``anchors`` and ``pairs``
    (Liang et al. 2021, table 5). For tables of codes: ``codes``. Words are special for anchor k if
    |T[i, k]| c[i, k] / Σ_j c[i, j] is large, with c[i, k] = |T[i, k]| ‖a_k‖.

    >>> import torch, featherbed as fb
    >>> table = fb.AnchorTable(4, 2, anchors=2)
    >>> with torch.no_grad():
    ...     _ = table.transform.copy_(torch.tensor([[1.0, 0], [2, 3], [0, 2], [0, 0]]))
    >>> words, counts = ["stock", "bonds", "august", "perl"], [90, 40, 30, 1]
    >>> found = word_insight(table.pack(), words, counts, anchor_ids=[0, -1])
    >>> found["kind"], [top["word"] for top in found["anchors"]["shown"][0]["top"]]
    ('weights', ['bonds'])
    >>> found["zero"]["examples"]
    [{'word': 'perl', 'count': 1}]
    """
    occurs, kind = np.asarray(counts), row_kind(packed)
    if len(words) != packed.rows or occurs.shape != (packed.rows,) or occurs.dtype.kind not in "iu":
        raise ArgumentError(
            f"{len(words)} words and counts of shape {occurs.shape}: give one of each for every of "
            f"the {packed.rows} rows"
        )
    is_word = np.array([not (len(w) > 2 and w[0] in "<[" and w[-1] in ">]") for w in words], bool)
    if packed.padding_idx is not None:
        is_word[packed.padding_idx] = False
    is_zero = _zero_rows(packed, kind) & is_word
    given = _Words(packed, words, occurs.astype(np.int64), is_zero, is_word)
    insight = {
        "table": str(packed.made_by.get("table", "table")),
        "kind": kind,
        "rows": packed.rows,
        "dim": packed.dim,
        "unit": "codes" if kind == "weights" else "bits",
        "bands": _frequency_bands(given, kind),
        "zero": _zero_insight(given),
        "neighbours": _neighbors(given),
    }
    if kind == "weights":
        total = anchor_count(packed)
        named = objects_as_anchors(np.full(total, -1) if anchor_ids is None else anchor_ids, total)
        insight |= {"anchors": _anchors(given, named), "pairs": _pairs(given, named)}
    elif kind == "codes":
        insight["codes"] = _codes(given)
    return insight


def row_kind(packed: PackedTable) -> str:
    """Return the kind of rows: "weights" over anchors, "codes", "kept" (others share rows), "rows".

    >>> import featherbed as fb
    >>> row_kind(fb.AnchorTable(9, 2, anchors=3).pack())
    'weights'
    >>> row_kind(fb.SelectedTable(9, 2, keep=4).pack())
    'kept'
    """
    layouts = [band.codes for band in packed.bands]
    try:
        weighted_band(packed)
    except ArgumentError:
        if len(layouts) == 2 and isinstance(layouts[0], Identity) and isinstance(layouts[1], Hash):
            return "kept"
        fixed = [codes.count for codes in layouts if isinstance(codes, Fixed)]
        return "codes" if len(fixed) == len(layouts) and len(set(fixed)) == 1 else "rows"
    return "rows" if "LowRank" in str(packed.made_by.get("table", "")) else "weights"


def _zero_rows(packed: PackedTable, kind: str) -> Mask:  # [V]
    """Return which rows are zero: without a weight, or without a nonzero number."""
    is_zero = np.zeros(packed.rows, dtype=bool)
    if kind == "weights":
        is_zero[zero_rows(packed).ids] = True
        return is_zero
    for start in range(0, packed.rows, BLOCK):
        rows = packed.block(start, min(start + BLOCK, packed.rows))
        is_zero[start : start + len(rows)] = np.abs(rows).max(1, initial=0) < NOTHING
    return is_zero


def _evenly(ids: Ids, count: int) -> Ids:
    """Return ``count`` of the ids at even distances."""
    if not len(ids):
        return ids
    return ids[np.unique(np.linspace(0, len(ids) - 1, min(len(ids), count)).astype(np.int64))]


def _examples(given: _Words, ids: Ids, count: int = EXAMPLES) -> list[int]:
    """Return examples among the ids, at even distances; alphabetic words if there are enough."""
    few = _evenly(ids[given.is_word[ids]], 40 * count)
    words = [given.words[i] for i in few.tolist()]
    alphabetic = few[np.array([len(word) > 2 and word.isalpha() for word in words], dtype=bool)]
    enough = len(alphabetic) >= min(count, len(few))
    examples: list[int] = _evenly(alphabetic if enough else few, count).tolist()
    return examples


def _zero_insight(given: _Words) -> Insight:
    """Return the number of zero rows, the fraction that occurs once, and examples."""
    ids = np.flatnonzero(given.is_zero)
    ids = ids[np.argsort(-given.counts[ids], kind="stable")]
    examples = _examples(given, ids, 2 * EXAMPLES)
    return {
        "rows": len(ids),
        "share": float(given.is_zero.mean()),
        "once": float(np.mean(given.counts[ids] == 1)) if len(ids) else None,
        "examples": [{"word": given.words[i], "count": int(given.counts[i])} for i in examples],
    }


def _frequency_bands(given: _Words, kind: str) -> list[Insight]:
    """Return the cost of rows and the zero or dropped rows by word frequency, rare words first."""
    packed, counts = given.packed, given.counts
    edges = bin_edges(int(counts.max(initial=0)))
    band_of = np.searchsorted(edges, counts, side="right") - 1
    band_of = np.where(given.is_word | (counts > 0), band_of, -1)
    members = packed.bands[0].members if kind == "kept" else None
    kept = None if members is None else members.split(np.arange(packed.rows))[0]
    starts = range(0, packed.rows, BLOCK)
    parts = (np.arange(start, min(start + BLOCK, packed.rows)) for start in starts)
    cost = np.concatenate([row_cost(packed, ids, kind == "weights") for ids in parts])
    bands = []
    for n in np.unique(band_of[band_of >= 0]).tolist():
        ids = np.flatnonzero(band_of == n)
        is_zero = given.is_zero[ids]
        band: Insight = {
            "name": bin_name(edges[n], (*edges, None)[n + 1]),
            "words": len(ids),
            "share": float(counts[ids].sum() / max(1, int(counts.sum()))),
            "cost": float(cost[ids].mean()),
            "zero": float(is_zero.mean()),
        }
        lists = {"zero_words": ids[is_zero], "other_words": ids[~is_zero]}
        if kept is not None:
            band["kept"] = float(kept[ids].mean())
            lists |= {"kept_words": ids[kept[ids]], "dropped_words": ids[~kept[ids]]}
        for name, some in lists.items():
            band[name] = [given.words[i] for i in _examples(given, some)]
        bands.append(band)
    return bands


def _is_content_word(word: str) -> bool:
    """Return whether a word has four letters or more and is no function word."""
    return len(word) > 3 and word.isalpha() and word.lower() not in FUNCTION_WORDS


def _frequent_words(given: _Words) -> list[int]:
    """Return the most frequent content words, or any words if there are too few."""
    order = np.argsort(-given.counts, kind="stable")[: 100 * QUERIES]
    usable = given.is_word & ~given.is_zero & (given.counts > 0)
    words: list[int] = order[usable[order]].tolist()
    content = [i for i in words if _is_content_word(given.words[i])]
    return (content if len(content) >= min(QUERIES, len(words)) else words)[:QUERIES]


def _nearest(given: _Words, word: int, ids: Ids, scores: NDArray[Any]) -> list[tuple[str, Any]]:
    """Return the first neighbors other than the word; of those with a minimum count if enough."""
    pairs = zip(ids.tolist(), scores.tolist(), strict=True)
    near = [pair for pair in pairs if given.is_word[pair[0]] and pair[0] != word]
    frequent = [pair for pair in near if given.counts[pair[0]] >= MIN_COUNT]
    shown = (frequent if len(frequent) >= NEIGHBORS else near)[:NEIGHBORS]
    return [(given.words[i], score) for i, score in shown]


def _neighbors(given: _Words) -> list[Insight]:
    """Return the nearest words, by cosine, of some frequent words."""
    if not (queries := _frequent_words(given)):
        return []
    count = min(given.packed.rows, CANDIDATES * NEIGHBORS)
    results = given.packed.search(given.packed[np.array(queries)], count, metric="cosine")
    return [
        {
            "word": given.words[i],
            "count": int(given.counts[i]),
            "nearest": [
                {"word": word, "cosine": score} for word, score in _nearest(given, i, *near)
            ],
        }
        for i, *near in zip(queries, *results, strict=True)
    ]


def _codes(given: _Words) -> Insight:
    """Return how evenly codes are used, exp(entropy) / choices, and words that share most codes."""
    packed, rows = given.packed, given.packed.rows
    parts = packed.codes_of([0]).shape[1]
    choices = max(
        band.codes.choices(band.atoms) for band in packed.bands if isinstance(band.codes, Fixed)
    )
    used = np.zeros((parts, choices), dtype=np.int64)
    for start in range(0, rows, BLOCK):
        codes = packed.codes_of(np.arange(start, min(start + BLOCK, rows)))
        used += np.stack([np.bincount(codes[:, part], minlength=choices) for part in range(parts)])
    share = used / rows
    entropy = -(share * np.log(np.where(share > 0, share, 1))).sum(1)
    compared = rows <= MAX_COMPARED
    distinct = len(np.unique(packed.codes_of(np.arange(rows)), axis=0)) if compared else None
    queries = _frequent_words(given) or [0]
    near = packed.near_codes(packed.codes_of(np.array(queries)), min(rows, CANDIDATES * NEIGHBORS))
    shared = []
    for i, *one in zip(queries, *near, strict=True):
        others = [{"word": w, "same": parts - off} for w, off in _nearest(given, i, *one)]
        shared.append({"word": given.words[i], "others": others})
    return {
        "parts": parts,
        "choices": choices,
        "used": float((used > 0).mean()),
        "even": float((np.exp(entropy) / choices).mean()),
        "distinct": distinct,
        "shared": shared,
    }


def _anchors(given: _Words, named: Ids) -> Insight:
    """Return the anchors that lead most words, content words first, and their top words."""
    owner = clusters_of(given.packed)
    leads = np.bincount(owner[owner >= 0], minlength=len(named))
    names = [given.words[i] if i >= 0 else None for i in named.tolist()]
    is_other = np.array([name is None or not _is_content_word(name) for name in names])
    shown = np.lexsort((-leads, is_other))[:MAX_ANCHORS]
    classes = np.full(len(named), -1)
    classes[shown] = np.arange(len(shown))
    tops: dict[int, list[Insight]] = {k: [] for k in shown.tolist()}
    for entry in strongest(given.packed, TOP, classes, named):
        tops[entry.anchor].append({"word": given.words[entry.id], "weight": entry.weight})
    special = _special_words(given, shown, named)
    anchors = [
        {"anchor": k, "word": names[k], "leads": int(leads[k]), "top": top, "special": special[k]}
        for k, top in tops.items()
        if top
    ]
    return {"total": len(named), "words": bool((named >= 0).any()), "shown": anchors}


def _special_words(given: _Words, shown: Ids, named: Ids) -> dict[int, list[Insight]]:
    """Return the words with the largest weight times the anchor's part of the row, per anchor."""
    atoms = weighted_band(given.packed).dictionary
    assert atoms is not None
    norms = np.linalg.norm(atoms.dense()[: len(named)], axis=1)
    best: dict[int, list[tuple[float, int, float]]] = {k: [] for k in shown.tolist()}
    for ids, indices, weights in blocks(given.packed):
        size = np.abs(weights) * norms[indices]
        score = np.abs(weights) * size / np.maximum(size.sum(1, keepdims=True), NOTHING)
        for k in best:
            at, slot = np.nonzero((indices == k) & (score > 0) & (ids != named[k])[:, None])
            order = np.argsort(-score[at, slot], kind="stable")[:TOP]
            at, slot = at[order], slot[order]
            columns = (-score[at, slot], ids[at], weights[at, slot])
            new = zip(*(column.tolist() for column in columns), strict=True)
            best[k] = sorted([*best[k], *new])[:TOP]
    return {
        k: [{"word": given.words[i], "weight": weight} for _, i, weight in entries]
        for k, entries in best.items()
    }


def _pairs(given: _Words, named: Ids) -> list[Insight]:
    """Return the largest weights, except those of an anchor for itself; ``of`` is its word."""
    names = [given.words[i] if i >= 0 else None for i in named.tolist()]
    entries = largest_pairs(given.packed, MAX_PAIRS, anchor_ids=named)
    return [
        {"word": given.words[e.id], "anchor": e.anchor, "of": names[e.anchor], "weight": e.weight}
        for e in entries
    ]
