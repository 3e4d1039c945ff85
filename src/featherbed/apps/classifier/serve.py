"""Stored text classifiers: classes and probabilities of texts, with numpy alone.

    bag   x = mean of the rows of the words; with a norm relu(scale * x + shift)
    cnn   x = for each width w relu(b + max_t Σ_{j < w} W_j row(t + j)), over the padded text
    then  L_n relu( ... relu(L_1 x + b_1) ... ) + b_n

A window of padding alone gives b, as in training, if the text leaves room for it. The table stays
packed: only the rows of a text's words are composed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from featherbed.apps.bundle import (
    CLASSIFIER,
    MODEL,
    PRECISIONS,
    TOKENIZER,
    VOCABULARIES,
    WORDS,
    Arrays,
    check_words,
    decode_weights,
    encode_weights,
    read_description,
    read_limited,
    read_sizes,
    read_table,
    write_bundle,
)
from featherbed.errors import ArgumentError, FormatError, MissingFileError
from featherbed.io.texts import (
    PAD,
    UNKNOWN,
    SubwordEncoder,
    TextEncoder,
    WordEncoder,
    open_tokenizer,
)
from featherbed.packed import MOST_DIM, MOST_ROWS, PackedTable, Vocabulary, as_ids, bag_starts
from featherbed.packed import check as check_table

VERSION = 1
KINDS = ("bag", "cnn")
MAX_CLASSES, MAX_WIDTH, MAX_LENGTH = 1 << 16, 64, 1 << 20
BLOCK = 1 << 14  # words whose rows are in memory at once

Ids = NDArray[np.int64]
InputError = type[ArgumentError] | type[FormatError]


class ClassProbability(NamedTuple):
    """A class and its probability."""

    label: str
    probability: float


class ClassifierShape(NamedTuple):
    """The sizes of a network: ``widths`` and ``channels`` of a cnn, ``norm`` of a bag."""

    kind: str
    dim: int
    classes: int
    length: int
    norm: bool = False
    widths: tuple[int, ...] = ()
    channels: int = 0
    hidden: tuple[int, ...] = ()  # widths of the layers before the last

    def arrays(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights by name.

        >>> ClassifierShape("bag", 8, 4, 100).arrays()
        {'layer0.weight': (4, 8), 'layer0.bias': (4,)}
        >>> shape = ClassifierShape("cnn", 8, 4, 100, widths=(3, 5), channels=10)
        >>> list(shape.arrays().values())
        [(10, 24), (10,), (10, 40), (10,), (4, 20), (4,)]
        """
        shapes: dict[str, tuple[int, ...]] = {}
        for width in self.widths:
            shapes[f"width{width}.weight"] = (self.channels, width * self.dim)
            shapes[f"width{width}.bias"] = (self.channels,)
        if self.norm:
            shapes |= {"norm.scale": (self.dim,), "norm.shift": (self.dim,)}
        first = len(self.widths) * self.channels if self.kind == "cnn" else self.dim
        for number, (inputs, outputs) in enumerate(pairwise((first, *self.hidden, self.classes))):
            shapes |= {
                f"layer{number}.weight": (outputs, inputs),
                f"layer{number}.bias": (outputs,),
            }
        return shapes

    def check(self, error: InputError) -> None:
        """Raise ``error`` for sizes that do not go together."""
        if self.kind not in KINDS:
            raise error(f"kind={self.kind!r}: use one of {', '.join(KINDS)}")
        if not 1 <= self.length <= MAX_LENGTH:
            raise error(
                f"length={self.length}: give a whole number of words from 1 to {MAX_LENGTH:,}"
            )
        if self.kind == "bag" and (self.widths or self.channels):
            raise error("a bag has no widths and no channels: they belong to a cnn")
        if self.kind == "cnn" and (self.norm or not self.widths or not self.channels):
            raise error("a cnn has widths and channels, and no norm: that belongs to a bag")
        if len(set(self.widths)) < len(self.widths) or any(
            not 1 <= width <= self.length for width in self.widths
        ):
            raise error(
                f"widths={list(self.widths)}: give different numbers of words, none above the "
                f"length {self.length}"
            )


class Classifier:
    """A classifier written by ``featherbed train text``, opened from its folder.

    >>> import featherbed as fb
    >>> rows = np.array([[0, 0], [0, 0], [1, 0], [0, 1]], dtype=np.float32)
    >>> words = ["<pad>", "<unk>", "goal", "profit"]
    >>> layer = {"layer0.weight": np.eye(2), "layer0.bias": np.zeros(2)}
    >>> folder = getfixture("tmp_path") / "news"
    >>> table = fb.DenseTable.from_dense(rows, padding_idx=0).pack()
    >>> classes = ["Sports", "Business"]
    >>> write_classifier(folder, table, layer, kind="bag", classes=classes, words=words)
    >>> classifier = Classifier.open(folder)
    >>> [(item.label, round(item.probability, 3)) for item in classifier.classify("Goal!")]
    [('Sports', 0.622), ('Business', 0.378)]
    """

    def __init__(
        self,
        table: PackedTable,
        weights: Arrays,
        shape: ClassifierShape,
        classes: Sequence[str],
        encoder: TextEncoder,
        vocabulary: Vocabulary | None,
        about: dict[str, Any],
    ) -> None:
        self.table, self.weights, self.shape, self.classes = table, weights, shape, tuple(classes)
        self.encoder, self.vocabulary, self.about = encoder, vocabulary, about

    @classmethod
    def open(cls, folder: str | Path) -> Classifier:
        """Open a folder; a missing or broken file, or one of another classifier, raises an
        error."""
        folder = Path(folder)
        found = read_description(
            folder, CLASSIFIER, "classifier", VERSION, "featherbed train text FILE --out DIR"
        )
        classes = _read_classes(found.raw("classes"))
        shape = ClassifierShape(
            found.choice("kind", KINDS),
            found.integer("dim", 1, MOST_DIM),
            len(classes),
            found.integer("length", 1, MAX_LENGTH),
            found.flag("norm"),
            read_sizes(found, "widths", MAX_WIDTH, 16),
            found.integer("channels", 0, MOST_DIM),
            read_sizes(found, "hidden", MOST_DIM, 16),
        )
        shape.check(FormatError)
        rows, stored = (
            found.integer("words", 2, MOST_ROWS),
            found.choice("vocabulary", VOCABULARIES),
        )
        table, vocabulary = read_table(folder, rows, shape.dim, stored)
        weights = decode_weights(
            folder / MODEL, shape.arrays(), found.choice("weights", PRECISIONS)
        )
        encoder: TextEncoder
        if vocabulary is None:
            encoder = _open_subwords(folder / TOKENIZER, table.rows, shape.length)
        else:
            encoder = WordEncoder(vocabulary, shape.length)
        return cls(table, weights, shape, classes, encoder, vocabulary, found.raw("about"))

    def __repr__(self) -> str:
        classes = ", ".join(self.classes)[:100]
        return f"Classifier({self.shape.kind}, {self.table.rows:,} words, classes {classes})"

    def classify(self, text: str, k: int | None = None) -> list[ClassProbability]:
        """Return the k most probable classes of a text, by default all, in decreasing order."""
        return self.classify_many([text], k)[0]

    def classify_many(
        self, texts: Sequence[str], k: int | None = None
    ) -> list[list[ClassProbability]]:
        """Return the classes of several texts; a text without a word raises ``ArgumentError``."""
        if k is not None and (isinstance(k, bool) or k < 1):
            raise ArgumentError(f"k={k!r}: give at least 1, or None for all classes")
        encoded = [self.encoder.ids(text) for text in texts]
        for number, ids in enumerate(encoded):
            if not len(ids):
                raise ArgumentError(
                    f"text {number + 1} of {len(texts)} holds no word ({texts[number][:40]!r}): "
                    "give some text"
                )
        if not encoded:
            return []
        offsets = np.cumsum([0, *map(len, encoded)])
        return [self._rank(row, k) for row in self.probabilities(np.concatenate(encoded), offsets)]

    def word_effects(self, text: str, most: int = 200) -> list[tuple[str, float]]:
        """Return each of the first ``most`` words of a text and its contribution to the answer.

        That is p(class | text) - p(class | text without the word), for the text's own class.
        """
        words, ids = self.encoder.tokens(text)[:most], self.encoder.ids(text)[:most]
        if not len(ids):
            raise ArgumentError(f"{text[:40]!r} holds no word: give some text")
        if len(ids) == 1:  # nothing to compare with
            return [(words[0], 0.0)]
        shorter = [np.delete(ids, at) for at in range(len(ids))]
        offsets = np.cumsum([0, len(ids), *map(len, shorter)])
        found = self.probabilities(np.concatenate([ids, *shorter]), offsets)
        best = int(found[0].argmax())
        return list(zip(words, (found[0, best] - found[1:, best]).tolist(), strict=True))

    def unknown(self, text: str) -> list[str]:
        """Return the unknown words of a text, each once; subwords are always known."""
        if self.vocabulary is None:
            return []
        words = dict.fromkeys(self.encoder.tokens(text))
        return [word for word in words if self.vocabulary.find(word) is None]

    def probabilities(
        self, ids: ArrayLike, offsets: ArrayLike
    ) -> NDArray[np.float64]:  # [N], [n + 1] -> [n, classes]
        """Return class probabilities; document i is ids[offsets[i]:offsets[i + 1]]."""
        flat = as_ids(ids, self.table.rows)
        starts = bag_starts(flat, offsets, include_last=True)
        blocks = [self._logits(flat, starts[a : b + 1]) for a, b in _blocks(starts)]
        logits = np.concatenate([np.empty((0, self.shape.classes)), *blocks])
        if not np.isfinite(logits).all():
            raise FormatError(f"a score is not finite: {WORDS} holds such values, train again")
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        probabilities: NDArray[np.float64] = powers / powers.sum(axis=1, keepdims=True)
        return probabilities

    def label_ids(self, ids: ArrayLike, offsets: ArrayLike) -> Ids:  # [N], [n + 1] -> [n]
        """Return the number of the most probable class of each document."""
        labels: Ids = np.argmax(self.probabilities(ids, offsets), axis=1).astype(np.int64)
        return labels

    def _rank(self, probabilities: NDArray[np.float64], k: int | None) -> list[ClassProbability]:
        order = np.argsort(-probabilities, kind="stable")[:k].tolist()
        return [ClassProbability(self.classes[i], float(probabilities[i])) for i in order]

    def _logits(self, ids: Ids, starts: Ids) -> NDArray[np.float64]:  # [n + 1] -> [n, classes]
        ends = np.minimum(starts[1:], starts[:-1] + self.shape.length)
        texts = [ids[start:end] for start, end in zip(starts[:-1].tolist(), ends, strict=True)]
        x = self._windows(texts) if self.shape.kind == "cnn" else self._means(texts)
        last = len(self.shape.hidden)
        for number in range(last + 1):
            x = x @ self.weights[f"layer{number}.weight"].T + self.weights[f"layer{number}.bias"]
            x = x if number == last else np.maximum(x, 0)
        return x.astype(np.float64)

    def _means(self, texts: list[Ids]) -> NDArray[Any]:  # -> [n, d]
        offsets = np.cumsum([0, *map(len, texts)])
        x = self.table.bag(np.concatenate(texts), offsets, mode="mean", include_last_offset=True)
        if not self.shape.norm:
            return x
        scaled: NDArray[Any] = x * self.weights["norm.scale"] + self.weights["norm.shift"]
        positive: NDArray[Any] = np.maximum(scaled, 0)
        return positive

    def _windows(self, texts: list[Ids]) -> NDArray[Any]:  # -> [n, widths * channels]
        """Convolve all texts at once; zero rows after each keep windows within it."""
        shape, dim, widest = self.shape, self.shape.dim, max(self.shape.widths)
        lengths = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
        ends = np.cumsum(lengths + widest)
        starts, count = ends - lengths - widest, int(ends[-1])
        rows = np.zeros((count + widest, dim), dtype=np.float32)
        shift = np.repeat(starts - np.cumsum(lengths) + lengths, lengths)
        rows[np.arange(int(lengths.sum())) + shift] = self.table[np.concatenate(texts)]
        features = []
        for width in shape.widths:
            weight = self.weights[f"width{width}.weight"]
            sums = np.zeros((count, shape.channels), dtype=np.float32)
            for at in range(width):
                sums += rows[at : at + count] @ weight[:, at * dim : (at + 1) * dim].T
            # the last window starts at the end of the text and contains only padding
            last = starts + np.minimum(lengths, shape.length - width)
            bounds = np.stack([starts, last + 1], axis=1).reshape(-1)
            best = np.maximum.reduceat(sums, bounds, axis=0)[::2]
            features.append(np.maximum(best + self.weights[f"width{width}.bias"], 0))
        return np.concatenate(features, axis=1)


def write_classifier(
    folder: str | Path,
    table: PackedTable,
    arrays: Arrays,  # named and shaped as ``ClassifierShape.arrays`` says
    *,
    kind: str,
    classes: Iterable[str],
    length: int = 100,
    widths: Sequence[int] = (),  # of a cnn
    words: Sequence[str] | None = None,  # one for each row, by default the table's keys
    tokenizer: str | None = None,  # JSON text of a subword tokenizer
    weights: str = "float32",
    about: dict[str, Any] | None = None,
) -> None:
    """Write a classifier into a folder; everything is checked before anything is written.

    Filters are [channels, width * d], the d weights of the first word first. Other files in the
    folder stay.
    """
    names, shapes = tuple(classes), {name: np.shape(array) for name, array in arrays.items()}
    _check_classes(names, ArgumentError)
    layers = sum(name.startswith("layer") and name.endswith(".weight") for name in arrays)
    shape = ClassifierShape(
        kind,
        table.dim,
        len(names),
        length,
        "norm.scale" in arrays,
        tuple(widths),
        shapes.get(f"width{widths[0]}.weight", (0,))[0] if widths else 0,
        tuple(shapes.get(f"layer{number}.weight", (0,))[0] for number in range(layers - 1)),
    )
    shape.check(ArgumentError)
    if shapes != shape.arrays():
        raise ArgumentError(
            f"a {kind} of these sizes takes the arrays {shape.arrays()}, got {shapes}"[:1000]
        )
    if tokenizer is None:
        known = check_words(table, words)
        if table.rows < 2 or (known[0], known[1]) != (PAD, UNKNOWN):
            raise ArgumentError(
                f"words 0 and 1 must be {PAD} and {UNKNOWN}, as prepare() numbers them"
            )
    else:
        words = None
        _check_tokens(tokenizer, table.rows, ArgumentError)
    if table.padding_idx != 0:
        raise ArgumentError(
            f"the table has padding_idx={table.padding_idx}: row 0 must be the padding row"
        )
    stored = "tokenizer" if tokenizer is not None else "keys" if words is None else "list"
    description = {
        "classifier": VERSION,
        "kind": kind,
        "classes": names,
        "words": table.rows,
        "dim": table.dim,
        "length": length,
        "norm": shape.norm,
        "widths": shape.widths,
        "channels": shape.channels,
        "hidden": shape.hidden,
        "weights": weights,
        "vocabulary": stored,
        "about": about or {},
    }
    encoded = encode_weights(arrays, weights)
    write_bundle(Path(folder), CLASSIFIER, description, table, words, encoded, tokenizer)


def check_classifier(folder: str | Path) -> Classifier:
    """Open a folder and read every byte of its table too. Raises FormatError.

    >>> check_classifier("nothing")
    Traceback (most recent call last):
    featherbed.errors.MissingFileError: nothing: no such folder
    """
    classifier = Classifier.open(folder)
    check_table(Path(folder) / WORDS)
    return classifier


def _open_subwords(path: Path, rows: int, length: int) -> SubwordEncoder:
    """Return the encoder of a stored tokenizer, whose tokens are all rows of the table."""
    if not path.is_file():
        raise MissingFileError(f"{path}: no such file")
    try:
        text = read_limited(path)
    except UnicodeDecodeError as error:
        raise FormatError(f"{path.name} is not UTF-8: {str(error)[:100]}") from None
    _check_tokens(text, rows, FormatError)
    return SubwordEncoder(text, length)


def _check_tokens(text: str, rows: int, error: InputError) -> None:
    last = max(open_tokenizer(text).get_vocab().values())
    if last >= rows:
        raise error(
            f"the tokenizer has a token {last}, the table has {rows:,} rows: they must come from "
            "one training run"
        )


def _read_classes(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise FormatError(f"{CLASSIFIER}.classes must be a list of names, got {str(value)[:40]}")
    _check_classes(value, FormatError)
    return tuple(value)


def _check_classes(names: Sequence[str], error: InputError) -> None:
    if not 2 <= len(names) <= MAX_CLASSES or len(set(names)) < len(names):
        raise error(
            f"classes are {str(list(names))[:60]}: give 2 to {MAX_CLASSES:,} different names"
        )


def _blocks(starts: Ids) -> Iterator[tuple[int, int]]:  # [n + 1]
    """Yield ranges of documents with about ``BLOCK`` words."""
    low, count = 0, len(starts) - 1
    while low < count:
        high = int(np.searchsorted(starts, starts[low] + BLOCK, side="right")) - 1
        high = min(count, max(low + 1, high), low + BLOCK)
        yield low, high
        low = high
