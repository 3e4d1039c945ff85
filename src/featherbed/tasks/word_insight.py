"""What the report of a text model tells beyond its score: what its words are made of, and where it goes wrong.

numpy alone, from the packed table: of what will be served, not of what was trained. Everything is counted in bands of how often
words occur in training, and lists are short, so that a million words make no longer a report than a thousand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from featherbed.errors import ArgumentError
from featherbed.packed import inside
from featherbed.packed.codes import Fixed, Hash, Identity, Ids
from featherbed.packed.table import PackedTable
from featherbed.tasks.insight import _named, edges_of, row_cost

Mask = NDArray[np.bool_]
Found = dict[str, Any]

ROWS = 1 << 16  # rows looked at at once
ANCHORS, TOP, PAIRS = 24, 8, 30  # anchors shown, words of each, largest pairs
EXAMPLES, WORDS, NEAREST = 8, 12, 8  # of a band; words whose neighbours are shown, and how many
LEAST, WIDER = (
    5,
    40,
)  # neighbours occur at least so often, where there are enough among so many times more
COMPARED = 200_000  # words whose codes are told apart
LENGTHS = (0, 5, 10, 20, 30, 40, 60, 80, 100, 150, 200, 300, 500, 1000)
WRONG, CUT = 12, 300  # wrong answers shown, characters of each
_FUNCTION = """about above after again against also always among another around because been before being below between both
could does doing down during each even every from further have having here into itself just like made make many might more most
much must never once only other over said same says shall should since some still such than that their them themselves then
there these they this those through under until upon very were what when where which while whom whose will with within without
would your yours yourself"""
FUNCTION = frozenset(_FUNCTION.split())


class _Given(NamedTuple):
    packed: PackedTable
    words: Sequence[str]  # [V]
    counts: NDArray[np.int64]  # [V]
    empty: Mask  # [V]: the row is zero
    own: Mask  # [V]: no padding and no marker such as <unk>


def word_insight(
    packed: PackedTable,
    words: Sequence[str],  # [V]
    counts: ArrayLike,  # int64 [V]: how often each word occurs in training
    anchor_ids: ArrayLike | None = None,  # [K]: the word of each anchor, -1 where it is none
) -> Found:
    """Return what ``text_page`` and ``language_page`` show of a table of words, in plain JSON types.

    Of every table: ``bands`` of frequency with what a row costs and how many rows are zero, and the ``neighbours`` of some
    frequent words. Of tables of weights: ``anchors`` and ``pairs`` (Liang et al. 2021, table 5). Of tables of codes:
    ``codes``. A word is the more special for anchor k the larger a part of its row this anchor is:
    |T[i, k]| c[i, k] / Σ_j c[i, j] with c[i, k] = |T[i, k]| ‖a_k‖.

    >>> import torch, featherbed as fb
    >>> table = fb.AnchorTable(4, 2, anchors=2)
    >>> with torch.no_grad():
    ...     _ = table.transform.copy_(torch.tensor([[1.0, 0], [2, 3], [0, 2], [0, 0]]))
    >>> found = word_insight(table.pack(), ["stock", "bonds", "august", "perl"], [90, 40, 30, 1], anchor_ids=[0, -1])
    >>> found["kind"], [top["word"] for top in found["anchors"]["shown"][0]["top"]]
    ('weights', ['bonds'])
    >>> found["zero"]["examples"]
    [{'word': 'perl', 'count': 1}]
    """
    occurs, kind = np.asarray(counts), kind_of(packed)
    if len(words) != packed.rows or occurs.shape != (packed.rows,) or occurs.dtype.kind not in "iu":
        raise ArgumentError(
            f"{len(words)} words and counts of shape {occurs.shape}: give one of both for each of the {packed.rows} rows"
        )
    own = np.array([not (len(w) > 2 and w[0] in "<[" and w[-1] in ">]") for w in words], dtype=bool)
    if packed.padding_idx is not None:
        own[packed.padding_idx] = False
    given = _Given(packed, words, occurs.astype(np.int64), _empty(packed, kind) & own, own)
    found = {
        "table": str(packed.made_by.get("table", "table")),
        "kind": kind,
        "rows": packed.rows,
        "dim": packed.dim,
        "unit": "codes" if kind == "weights" else "bits",
        "bands": _bands(given, kind),
        "zero": _zero(given),
        "neighbours": _neighbours(given),
    }
    if kind == "weights":
        total = inside.anchor_count(packed)
        named = inside.objects_as_anchors(
            np.full(total, -1) if anchor_ids is None else anchor_ids, total
        )
        found |= {"anchors": _anchors(given, named), "pairs": _pairs(given, named)}
    elif kind == "codes":
        found["codes"] = _codes(given)
    return found


def kind_of(packed: PackedTable) -> str:
    """Return what rows are: "weights" over anchors, "codes", "kept" (rows for some words, shared for others), or "rows".

    >>> import featherbed as fb
    >>> [kind_of(fb.AnchorTable(9, 2, anchors=3).pack()), kind_of(fb.SelectedTable(9, 2, keep=4).pack())]
    ['weights', 'kept']
    """
    layouts = [band.codes for band in packed.bands]
    try:
        inside.weighted_band(packed)
    except ArgumentError:
        if len(layouts) == 2 and isinstance(layouts[0], Identity) and isinstance(layouts[1], Hash):
            return "kept"
        fixed = [codes.count for codes in layouts if isinstance(codes, Fixed)]
        return "codes" if len(fixed) == len(layouts) and len(set(fixed)) == 1 else "rows"
    return "rows" if "LowRank" in str(packed.made_by.get("table", "")) else "weights"


def _empty(packed: PackedTable, kind: str) -> Mask:  # [V]
    """Tell which rows are zero: without a weight, or without a number other than 0."""
    found = np.zeros(packed.rows, dtype=bool)
    if kind == "weights":
        found[inside.zero_rows(packed).ids] = True
        return found
    for start in range(0, packed.rows, ROWS):
        rows = packed.block(start, min(start + ROWS, packed.rows))
        found[start : start + len(rows)] = np.abs(rows).max(1, initial=0) < inside.NOTHING
    return found


def _spread(ids: Ids, count: int) -> Ids:
    """Return ``count`` of the ids, evenly spread."""
    return (
        ids[np.unique(np.linspace(0, len(ids) - 1, min(len(ids), count)).astype(np.int64))]
        if len(ids)
        else ids
    )


def _some(given: _Given, ids: Ids, count: int = EXAMPLES) -> list[int]:
    """Return some of the ids, spread evenly: of words of letters where there are enough."""
    few = _spread(ids[given.own[ids]], 40 * count)
    plain = np.array(
        [i for i in few.tolist() if len(given.words[i]) > 2 and given.words[i].isalpha()],
        dtype=np.int64,
    )
    chosen: list[int] = _spread(
        plain if len(plain) >= min(count, len(few)) else few, count
    ).tolist()
    return chosen


def _zero(given: _Given) -> Found:
    """Return how many rows are zero, the share of them that occurs once, and some, the most frequent first."""
    ids = np.flatnonzero(given.empty)
    ids = ids[np.argsort(-given.counts[ids], kind="stable")]
    return {
        "rows": len(ids),
        "share": float(given.empty.mean()),
        "once": float(np.mean(given.counts[ids] == 1)) if len(ids) else None,
        "examples": [
            {"word": given.words[i], "count": int(given.counts[i])}
            for i in _some(given, ids, 2 * EXAMPLES)
        ],
    }


def _bands(given: _Given, kind: str) -> list[Found]:
    """Return what rows cost, and which are zero or dropped, by how often their words occur; rare words first."""
    packed, counts = given.packed, given.counts
    edges = edges_of(int(counts.max(initial=0)))
    owner = np.where(given.own | (counts > 0), np.searchsorted(edges, counts, side="right") - 1, -1)
    members = packed.bands[0].members if kind == "kept" else None
    kept = None if members is None else members.split(np.arange(packed.rows))[0]
    blocks = (
        np.arange(start, min(start + ROWS, packed.rows)) for start in range(0, packed.rows, ROWS)
    )
    cost = np.concatenate([row_cost(packed, ids, kind == "weights") for ids in blocks])
    found = []
    for n in np.unique(owner[owner >= 0]).tolist():
        ids = np.flatnonzero(owner == n)
        zero = given.empty[ids]
        band = {
            "name": _named(edges[n], (*edges, None)[n + 1]),
            "words": len(ids),
            "share": float(counts[ids].sum() / max(1, int(counts.sum()))),
            "cost": float(cost[ids].mean()),
            "zero": float(zero.mean()),
        }
        lists = {"zero_words": ids[zero], "other_words": ids[~zero]}
        if kept is not None:
            band["kept"] = float(kept[ids].mean())
            lists |= {"kept_words": ids[kept[ids]], "dropped_words": ids[~kept[ids]]}
        found.append(
            band
            | {name: [given.words[i] for i in _some(given, some)] for name, some in lists.items()}
        )
    return found


def _telling(word: str) -> bool:
    """Whether a word says something by itself: four letters or more, no function word."""
    return len(word) > 3 and word.isalpha() and word.lower() not in FUNCTION


def _frequent(given: _Given) -> list[int]:
    """Return the most frequent words that say something (or any, in a language whose words are not told so)."""
    order = np.argsort(-given.counts, kind="stable")[: 100 * WORDS]
    here: list[int] = order[(given.own & ~given.empty & (given.counts > 0))[order]].tolist()
    telling = [i for i in here if _telling(given.words[i])]
    return (telling if len(telling) >= min(WORDS, len(here)) else here)[:WORDS]


def _nearest(given: _Given, word: int, ids: Ids, scores: NDArray[Any]) -> list[tuple[str, Any]]:
    """Return the first neighbours that are not the word itself: of those that occur some times where there are enough."""
    near = [
        pair
        for pair in zip(ids.tolist(), scores.tolist(), strict=True)
        if given.own[pair[0]] and pair[0] != word
    ]
    often = [pair for pair in near if given.counts[pair[0]] >= LEAST]
    return [
        (given.words[i], score) for i, score in (often if len(often) >= NEAREST else near)[:NEAREST]
    ]


def _neighbours(given: _Given) -> list[Found]:
    """Return the words whose rows are nearest, by cosine, to those of some frequent words."""
    if not (shown := _frequent(given)):
        return []
    found = given.packed.search(
        given.packed[np.array(shown)], min(given.packed.rows, WIDER * NEAREST), metric="cosine"
    )
    return [
        {"word": given.words[i], "count": int(given.counts[i])}
        | {
            "nearest": [
                {"word": word, "cosine": score} for word, score in _nearest(given, i, *near)
            ]
        }
        for i, *near in zip(shown, *found, strict=True)
    ]


def _codes(given: _Given) -> Found:
    """Return how evenly codes are used, exp(entropy) / choices, and the words that share most codes with frequent ones."""
    packed, rows = given.packed, given.packed.rows
    parts = packed.codes_of([0]).shape[1]
    choices = max(
        band.codes.choices(band.atoms) for band in packed.bands if isinstance(band.codes, Fixed)
    )
    used = np.zeros((parts, choices), dtype=np.int64)
    for start in range(0, rows, ROWS):
        codes = packed.codes_of(np.arange(start, min(start + ROWS, rows)))
        used += np.stack([np.bincount(codes[:, part], minlength=choices) for part in range(parts)])
    share = used / rows
    entropy = -(share * np.log(np.where(share > 0, share, 1))).sum(1)
    shown = _frequent(given) or [0]
    near = packed.near_codes(packed.codes_of(np.array(shown)), min(rows, WIDER * NEAREST))
    return {
        "parts": parts,
        "choices": choices,
        "used": float((used > 0).mean()),
        "even": float((np.exp(entropy) / choices).mean()),
        "distinct": len(np.unique(packed.codes_of(np.arange(rows)), axis=0))
        if rows <= COMPARED
        else None,
        "shared": [
            {
                "word": given.words[i],
                "others": [{"word": w, "same": parts - off} for w, off in _nearest(given, i, *one)],
            }
            for i, *one in zip(shown, *near, strict=True)
        ],
    }


def _anchors(given: _Given, named: Ids) -> Found:
    """Return the anchors that most words lean on, those that are telling words first, and the words they induce."""
    owner = inside.clusters_of(given.packed)
    leads = np.bincount(owner[owner >= 0], minlength=len(named))
    names = [given.words[i] if i >= 0 else None for i in named.tolist()]
    silent = np.array([name is None or not _telling(name) for name in names])
    shown = np.lexsort((-leads, silent))[:ANCHORS]
    classes = np.full(len(named), -1)
    classes[shown] = np.arange(len(shown))
    tops: dict[int, list[Found]] = {k: [] for k in shown.tolist()}
    for entry in inside.strongest(given.packed, TOP, classes, named):
        tops[entry.anchor].append({"word": given.words[entry.id], "weight": entry.weight})
    special = _special(given, shown, named)
    told = [
        {
            "anchor": k,
            "word": names[k],
            "leads": int(leads[k]),
            "top": tops[k],
            "special": special[k],
        }
        for k in tops
    ]
    return {
        "total": len(named),
        "words": bool((named >= 0).any()),
        "shown": [one for one in told if one["top"]],
    }


def _special(given: _Given, shown: Ids, named: Ids) -> dict[int, list[Found]]:
    """Return for each anchor the words with the largest weight times this anchor's part of the row."""
    atoms = inside.weighted_band(given.packed).dictionary
    assert atoms is not None
    norms = np.linalg.norm(atoms.dense()[: len(named)], axis=1)
    best: dict[int, list[tuple[float, int, float]]] = {k: [] for k in shown.tolist()}
    for ids, indices, weights in inside.blocks(given.packed):
        size = np.abs(weights) * norms[indices]
        score = np.abs(weights) * size / np.maximum(size.sum(1, keepdims=True), inside.NOTHING)
        for k in best:
            at, slot = np.nonzero((indices == k) & (score > 0) & (ids != named[k])[:, None])
            order = np.argsort(-score[at, slot], kind="stable")[:TOP]
            at, slot = at[order], slot[order]
            new = zip(
                (-score[at, slot]).tolist(),
                ids[at].tolist(),
                weights[at, slot].tolist(),
                strict=True,
            )
            best[k] = sorted([*best[k], *new])[:TOP]
    return {
        k: [{"word": given.words[i], "weight": weight} for _, i, weight in found]
        for k, found in best.items()
    }


def _pairs(given: _Given, named: Ids) -> list[Found]:
    """Return the largest weights but those of an anchor for itself; ``of`` is the anchor's word."""
    names = [given.words[i] if i >= 0 else None for i in named.tolist()]
    found = inside.largest_pairs(given.packed, PAIRS, anchor_ids=named)
    return [
        {"word": given.words[e.id], "anchor": e.anchor, "of": names[e.anchor], "weight": e.weight}
        for e in found
    ]


def answers(
    labels: ArrayLike,  # [n]: the true classes, and the answers
    given: ArrayLike,
    lengths: ArrayLike,  # [n]: words of each text
    classes: Sequence[str],
    texts: Sequence[str] = (),  # [n], with how sure each answer is, to show the surest wrong ones
    sure: ArrayLike = (),
) -> Found:
    """Return what ``text_page`` shows of answers: ``confusion``, ``lengths`` with the accuracy of each, ``wrong`` examples.

    >>> found = answers([0, 1, 1], [0, 1, 0], [3, 12, 4], ["bad", "good"], ["a b c", "...", "not bad at all"], [0.9, 0.6, 0.8])
    >>> found["confusion"], found["wrong"]
    ([[1, 0], [1, 1]], [{'text': 'not bad at all', 'true': 'good', 'given': 'bad', 'probability': 0.8}])
    """
    true, said, band = (
        np.asarray(labels),
        np.asarray(given),
        np.searchsorted(LENGTHS, lengths, side="right") - 1,
    )
    table = np.bincount(true * len(classes) + said, minlength=len(classes) ** 2).reshape(
        len(classes), -1
    )
    by_length = [
        (_named(LENGTHS[n], (*LENGTHS, None)[n + 1]), (true == said)[band == n])
        for n in np.unique(band).tolist()
    ]
    sureness = np.asarray(sure, dtype=np.float64)
    worst = (
        np.argsort(-np.where(true != said, sureness, -1), kind="stable")[:WRONG]
        if len(texts)
        else ()
    )
    pairs = [
        (int(i), {"true": classes[true[i]], "given": classes[said[i]]})
        for i in worst
        if true[i] != said[i]
    ]
    return {
        "confusion": table.tolist(),
        "lengths": [
            {"name": name, "texts": len(right), "accuracy": float(right.mean())}
            for name, right in by_length
        ],
        "wrong": [
            {"text": texts[i][:CUT]} | pair | {"probability": float(sureness[i])}
            for i, pair in pairs
        ],
    }


def loss_bands(
    losses: ArrayLike, targets: ArrayLike, counts: ArrayLike
) -> list[Found]:  # [n], [n], [V]
    """Return the perplexity exp(mean loss) of words by how often they occur in training; rare words first.

    >>> [(band["name"], band["perplexity"]) for band in loss_bands([0.0, 0.0, 0.0], [1, 1, 0], [2, 500])]
    [('1 to 2', 1.0), ('300 and more', 1.0)]
    """
    lost, occurs, edges = np.asarray(losses), np.asarray(counts), edges_of(int(np.max(counts)))
    band = np.searchsorted(edges, occurs[np.asarray(targets)], side="right") - 1
    parts = [
        (_named(edges[n], (*edges, None)[n + 1]), lost[band == n]) for n in np.unique(band).tolist()
    ]
    return [
        {
            "name": name,
            "tokens": len(part),
            "share": len(part) / len(lost),
            "perplexity": float(np.exp(min(part.mean(), 700))),
        }
        for name, part in parts
    ]
