"""Labelled texts as word ids: vocabulary and counts of the training part, three parts over it, stored under a checksum.

Ids: 0 is ``<pad>``, 1 ``<unk>``, the others follow by falling count in the training part.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from featherbed.errors import ArgumentError, DataError, FormatError
from featherbed.graphs import Graph, cooccurrence
from featherbed.serve.arrays import read_arrays, write_arrays
from featherbed.serve.words import (
    LENGTH,
    UNKNOWN_ID,
    checked_length,
    learn_subwords,
    open_tokenizer,
    pieces_of,
    tokenize,
    vocabulary,
)
from featherbed.tasks.texts import Texts

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Documents:
    """Texts as ids, one after the other: text i is ``ids[offsets[i]:offsets[i + 1]]``, of class ``labels[i]``.

    >>> documents = Documents(np.array([2, 3, 2], np.int32), np.array([0, 2, 3]), np.array([0, 1]))
    >>> len(documents), documents.lengths.tolist(), documents.padded(np.array([1, 0]), least=1, slack=1).tolist()
    (2, [2, 1], [[2, 0, 0], [2, 3, 0]])
    """

    ids: NDArray[np.int32]  # [N]
    offsets: Ids  # [n + 1]
    labels: Ids  # [n]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def lengths(self) -> Ids:  # [n]
        """How many words each text has."""
        return np.diff(self.offsets)

    def take(self, index: Ids) -> Documents:
        """Return the texts at ``index``, in that order."""
        flat, lengths = self._places(index)
        return Documents(self.ids[flat], np.append(0, np.cumsum(lengths)), self.labels[index])

    def bags(self, index: Ids) -> tuple[Ids, Ids]:  # -> [N], [B]
        """Return the ids of the texts at ``index`` one after the other, and where each begins: nn.EmbeddingBag's input."""
        flat, lengths = self._places(index)
        return self.ids[flat].astype(np.int64), np.cumsum(lengths) - lengths

    def padded(
        self, index: Ids, least: int = 5, slack: int = 5, length: int = LENGTH
    ) -> Ids:  # -> [B, L]
        """Return the texts at ``index`` side by side, filled up with 0 to L = min(length, longest + slack), L >= least."""
        flat, lengths = self._places(index)
        width = max(least, min(length, int(lengths.max(initial=0)) + slack))
        there = np.arange(max(width, int(lengths.max(initial=0)))) < lengths[:, None]
        made = np.zeros(there.shape, dtype=np.int64)
        made[there] = self.ids[flat]
        return made[:, :width]

    def counts(self, words: int) -> csr_array:  # -> int [n, words]
        """Return how often each word occurs in each text."""
        rows = np.repeat(np.arange(len(self)), self.lengths)
        ones = np.ones(len(self.ids), dtype=np.int64)
        return csr_array((ones, (rows, self.ids)), shape=(len(self), words))

    def _places(self, index: Ids) -> tuple[Ids, Ids]:
        """Return the places in ``ids`` of the texts at ``index``, and the texts' lengths."""
        starts, lengths = self.offsets[index], self.offsets[index + 1] - self.offsets[index]
        before = np.cumsum(lengths) - lengths
        return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum())), lengths


@dataclass(frozen=True)
class Prepared:
    """What training on texts needs.

    ``held`` are the places of the validation texts among the training texts given; ``tokenizer`` is the JSON text of a
    sub-word tokenizer; ``checksum`` is that of the texts and settings all was made from.
    """

    words: tuple[str, ...]  # V
    counts: Ids  # [V], in the training part
    train: Documents
    validation: Documents
    test: Documents | None
    classes: tuple[str, ...]
    length: int
    tokenizer: str | None
    notes: tuple[str, ...]
    checksum: str
    held: Ids = field(default_factory=lambda: np.zeros(0, dtype=np.int64))


def prepare(
    train: Texts,
    test: Texts | None = None,
    *,
    length: int = LENGTH,
    validation: float = 0.15,
    min_count: int = 1,
    most: int | None = None,
    subwords: int | None = None,
    seed: int = 0,
    long: str = "cut",
    cache: str | Path | None = None,
) -> Prepared:
    """Split the training texts, learn the vocabulary of the larger part and turn all texts into ids.

    Args:
        train: the training texts, of which a share becomes the validation part.
        test: the test texts, with the same classes.
        length: texts are cut after so many words; words beyond it are not counted either.
        validation: the share of the training texts held out, drawn by ``seed``.
        min_count: rarer words are unknown.
        most: the largest size of the vocabulary, ``<pad>`` and ``<unk>`` included; the most frequent words stay.
        subwords: the size of a vocabulary of pieces of words, learnt on the training part; None means whole words.
        long: what becomes of longer texts: "cut", or "error".
        cache: a folder where the result is kept and looked for under a checksum of the texts and settings.

    >>> texts = Texts(["good film", "bad film", "good", "bad"], np.array([1, 0, 1, 0]), ("-", "+"))
    >>> prepared = prepare(texts, validation=0.25)
    >>> prepared.words[:2], len(prepared.train), len(prepared.validation)
    (('<pad>', '<unk>'), 3, 1)
    """
    _check(train, test, validation, min_count, most, subwords, long)
    checksum = _checksum(
        train, test, [checked_length(length), validation, min_count, most, subwords, seed, long]
    )
    file = None if cache is None else Path(cache) / f"texts-{checksum[:32]}.safetensors"
    made = None if file is None else _stored_prepared(file, checksum)
    if made is None:
        order = np.random.default_rng(seed).permutation(len(train))
        share = min(len(train) - 1, max(1, round(validation * len(train))))
        held, kept = np.sort(order[:share]), np.sort(order[share:])
        tokenizer = (
            None
            if subwords is None
            else learn_subwords([train.texts[at] for at in kept.tolist()], subwords, length)
        )
        cut = _Cutter(tokenizer, length, long)
        tokens, lengths = cut(train, kept)
        words, ids = (
            vocabulary(tokens, min_count=min_count, most=most)
            if tokenizer is None
            else (pieces_of(tokenizer), tokens)
        )
        if len(words) < 4:
            found = f"{len(words) - 2} different words (min_count={min_count}, most={most})"
            raise DataError(
                f"{train.path or 'train'}: the training part has {found}: a vocabulary needs two or more"
            )
        own, counts = (
            _documents(ids, lengths, train.labels[kept]),
            np.bincount(ids, minlength=len(words)),
        )
        other = cut.encoded(train, held, words)
        last = None if test is None else cut.encoded(test, np.arange(len(test)), words)
        made = Prepared(
            words,
            counts,
            own,
            other,
            last,
            train.names,
            length,
            tokenizer,
            cut.notes(),
            checksum,
            held,
        )
        if file is not None:
            _store_prepared(file, made)
    return replace(
        made, notes=tuple(dict.fromkeys((*train.notes, *(test.notes if test else ()), *made.notes)))
    )


class _Cutter:
    """Cuts texts into words, or into the ids of pieces, and counts what was too long."""

    def __init__(self, tokenizer: str | None, length: int, long: str) -> None:
        self.length, self.long = length, long
        self._pieces = None if tokenizer is None else open_tokenizer(tokenizer)
        self._cut = self._texts = 0

    def __call__(self, texts: Texts, index: Ids) -> tuple[list[Any], Ids]:
        """Return the words or ids of the texts at ``index`` one after the other, and how many each has."""
        chosen = [texts.texts[at] for at in index.tolist()]
        if self._pieces is None:
            found: list[list[Any]] = [tokenize(text, self.length + 1) for text in chosen]
        else:
            found = [
                item.ids
                for item in self._pieces.encode_batch_fast(chosen, add_special_tokens=False)
            ]
        sizes = np.fromiter(map(len, found), dtype=np.int64, count=len(found))
        if len(sizes) and not sizes.all():
            raise DataError(
                f"{texts.where(int(index[sizes.argmin()]))}: the text holds no word: leave it out"
            )
        over = np.flatnonzero(sizes > self.length)
        if len(over) and self.long == "error":
            at = int(over[0])
            size = sizes[at] if self._pieces else len(tokenize(chosen[at]))
            place = texts.where(int(index[at]))
            raise DataError(
                f"{place}: a text of {size:,} words, the limit is {self.length:,}: give a larger length, or cut"
            )
        self._cut, self._texts = self._cut + len(over), self._texts + len(sizes)
        return list(chain.from_iterable(words[: self.length] for words in found)), np.minimum(
            sizes, self.length
        )

    def encoded(self, texts: Texts, index: Ids, words: Sequence[str]) -> Documents:
        """Return the texts at ``index`` over a vocabulary."""
        tokens, lengths = self(texts, index)
        if self._pieces is None:
            id_of = {word: number for number, word in enumerate(words)}
            tokens = [id_of.get(word, UNKNOWN_ID) for word in tokens]
        return _documents(tokens, lengths, texts.labels[index])

    def notes(self) -> tuple[str, ...]:
        """Say how many texts were cut."""
        return (
            (
                f"{self._cut:,} of {self._texts:,} texts were cut to their first {self.length:,} words",
            )
            if self._cut
            else ()
        )


def cooccurring(
    given: Prepared | Documents | NDArray[np.integer],
    objects: int | None = None,
    *,
    window: int = 10,
    least: int = 5,
    cache: str | Path | None = None,
) -> Graph:
    """Relate words that meet ``least`` times or more within ``window`` places of the training texts (graphs.cooccurrence).

    Args:
        given: prepared texts, or documents, or one long text of ids.
        objects: the size of the vocabulary, where ``given`` does not say.
        cache: a folder where the pairs are kept and looked for under a checksum of the ids and settings.

    >>> ids = np.array([2, 3, 2, 3, 2, 4])
    >>> cooccurring(ids, 5, window=1, least=2).pairs()
    array([[2, 3]])
    """
    if isinstance(given, Prepared):
        objects, given = len(given.words), given.train
    if objects is None:
        raise ArgumentError("objects=None: give the size of the vocabulary")
    flat, cuts = (
        (given.ids, given.offsets)
        if isinstance(given, Documents)
        else (given, np.zeros(0, np.int64))
    )
    checksum = _digest(
        json.dumps([objects, window, least]), {"ids": flat.astype(np.int64), "cuts": cuts}
    ).hex()
    file = None if cache is None else Path(cache) / f"cooccurrence-{checksum[:32]}.safetensors"
    if (
        file is not None
        and (found := _stored(file, "cooccurrence", checksum, {"pairs": "U32"})) is not None
    ):
        return Graph.from_edges(objects, found["pairs"].reshape(-1, 2).astype(np.int64))
    graph = cooccurrence(
        np.split(flat, cuts[1:-1]) if len(cuts) else flat, objects, window=window, min_count=least
    )
    if file is not None:
        _store(
            file, "cooccurrence", checksum, {"pairs": graph.pairs().astype(np.uint32).reshape(-1)}
        )
    return graph


def _check(
    train: Texts,
    test: Texts | None,
    validation: float,
    least: int,
    most: int | None,
    size: int | None,
    long: str,
) -> None:
    if not 0 < validation < 1 or least < 1:
        raise ArgumentError(
            f"validation={validation}, min_count={least}: give a share between 0 and 1, and a count from 1 on"
        )
    for name, value in (("most", most), ("subwords", size)):
        if value is not None and value < 4:
            raise ArgumentError(
                f"{name}={value}: give 4 words or more (<pad> and <unk> are two of them)"
            )
    if size is not None and (most is not None or least > 1):
        raise ArgumentError(
            f"subwords={size} is a size of the vocabulary itself: leave min_count and most out"
        )
    if long not in ("cut", "error"):
        raise ArgumentError(f"long={long!r}: give 'cut' or 'error'")
    if len(train) < 2:
        raise DataError(
            f"{train.path or 'train'} holds {len(train)} text: give two or more, one of them is held out"
        )
    if test is not None and test.names != train.names:
        raise ArgumentError("the test texts have other classes: read them with names=train.names")


def _checksum(train: Texts, test: Texts | None, settings: Sequence[Any]) -> str:
    made = hashlib.sha256(json.dumps([_VERSION, *settings]).encode())
    for part in (train, test):
        made.update(
            b"-"
            if part is None
            else json.dumps([len(part), part.names]).encode() + part.labels.tobytes()
        )
        for text in () if part is None else part.texts:
            raw = text.encode("utf-8", "surrogatepass")
            made.update(len(raw).to_bytes(8, "little") + raw)
    return made.hexdigest()


def _documents(
    ids: Sequence[int] | NDArray[np.integer], lengths: NDArray[np.integer], labels: Ids
) -> Documents:
    return Documents(
        np.asarray(ids, dtype=np.int32), np.append(0, np.cumsum(lengths, dtype=np.int64)), labels
    )


_VERSION = 1  # of the tokenizer and of all else that makes ids from texts
_ARRAYS = {
    "about": "U8",
    "counts": "U32",
    "held": "U32",
    "ids": "U32",
    "lengths": "U32",
    "labels": "U32",
}
_ABOUT = ("words", "classes", "length", "tokenizer", "notes")


def _store_prepared(file: Path, made: Prepared) -> None:
    parts = [part for part in (made.train, made.validation, made.test) if part is not None]
    about = json.dumps(
        {name: getattr(made, name) for name in _ABOUT} | {"sizes": [len(part) for part in parts]}
    )
    joined = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in ("ids", "lengths", "labels")
    }
    arrays = {
        name: array.astype(np.uint32)
        for name, array in (joined | {"counts": made.counts, "held": made.held}).items()
    }
    _store(
        file, "texts", made.checksum, arrays | {"about": np.frombuffer(about.encode(), np.uint8)}
    )


def _stored_prepared(file: Path, checksum: str) -> Prepared | None:
    found = _stored(file, "texts", checksum, _ARRAYS)
    if found is None:
        return None
    about = json.loads(found["about"].tobytes())
    whole = _documents(found["ids"], found["lengths"], found["labels"].astype(np.int64))
    parts = [
        whole.take(np.arange(begin, end))
        for begin, end in pairwise(np.cumsum([0, *about.pop("sizes")]).tolist())
    ]
    made: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in about.items()
    }
    made |= {
        "train": parts[0],
        "validation": parts[1],
        "test": parts[2] if parts[2:] else None,
        "checksum": checksum,
    }
    return Prepared(
        counts=found["counts"].astype(np.int64), held=found["held"].astype(np.int64), **made
    )


def _store(file: Path, kind: str, checksum: str, arrays: Mapping[str, NDArray[Any]]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_arrays(
            file, kind, {**arrays, "digest": np.frombuffer(_digest(checksum, arrays), np.uint8)}
        )
    except OSError as error:
        raise ArgumentError(
            f"cache={str(file.parent)!r}: cannot be written to: {error.strerror}"
        ) from None


def _stored(
    file: Path, kind: str, checksum: str, kinds: Mapping[str, str]
) -> dict[str, NDArray[Any]] | None:
    """Return the arrays of a stored file, None if there is none or it is not, to the bit, what was written."""
    try:
        found = read_arrays(
            file, kind, {name: (form,) for name, form in (*kinds.items(), ("digest", "U8"))}
        )
    except (OSError, FormatError):
        return None
    digest = found.pop("digest").tobytes()
    return found if digest == _digest(checksum, found) else None


def _digest(checksum: str, arrays: Mapping[str, NDArray[Any]]) -> bytes:
    made = hashlib.sha256(checksum.encode())
    for name in sorted(arrays):
        made.update(
            f"{name} {len(arrays[name])} ".encode() + np.ascontiguousarray(arrays[name]).tobytes()
        )
    return made.digest()
