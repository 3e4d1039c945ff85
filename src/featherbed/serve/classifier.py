"""A trained text classifier, read from its folder: classes and probabilities of texts, with numpy alone.

The table stays packed: only the rows of a text's words are composed. ``serve.network`` says what is computed with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from featherbed.errors import ArgumentError, FormatError, MissingFileError
from featherbed.packed.bag import bag_starts
from featherbed.packed.file import check as check_table
from featherbed.packed.parts import MOST_DIM, MOST_ROWS
from featherbed.packed.table import PackedTable, as_ids
from featherbed.serve.bundle import (
    CLASSIFIER,
    KEPT,
    KINDS,
    MODEL,
    TOKENIZER,
    WORDS,
    Arrays,
    Vocabulary,
    decode_weights,
    encode_weights,
    read_said,
    read_table,
    read_text,
    sizes_of,
    vocabulary_of,
    write_bundle,
)
from featherbed.serve.network import MODELS, MOST_LENGTH, MOST_WIDTH, Shape, check_shape, scores
from featherbed.serve.words import (
    PAD,
    UNKNOWN,
    Encoder,
    SubwordEncoder,
    WordEncoder,
    open_tokenizer,
)

VERSION = 1
MOST_CLASSES = 1 << 16
HELD = 1 << 14  # words whose rows are held at once

Ids = NDArray[np.int64]


class Scored(NamedTuple):
    """A class and how probable it is."""

    label: str
    probability: float


class Classifier:
    """What ``featherbed train text`` leaves in a folder, ready to answer.

    >>> import featherbed as fb
    >>> rows = np.array([[0, 0], [0, 0], [1, 0], [0, 1]], dtype=np.float32)
    >>> words = ["<pad>", "<unk>", "goal", "profit"]
    >>> layer = {"layer0.weight": np.eye(2), "layer0.bias": np.zeros(2)}
    >>> folder = getfixture("tmp_path") / "news"
    >>> table = fb.DenseTable.from_dense(rows, padding_idx=0).pack()
    >>> write_classifier(folder, table, layer, kind="bag", classes=["Sports", "Business"], words=words)
    >>> classifier = Classifier.open(folder)
    >>> [(item.label, round(item.probability, 3)) for item in classifier.classify("Goal!")]
    [('Sports', 0.622), ('Business', 0.378)]
    """

    def __init__(
        self,
        table: PackedTable,
        weights: Arrays,
        shape: Shape,
        classes: Sequence[str],
        encoder: Encoder,
        vocabulary: Vocabulary | None,
        about: dict[str, Any],
    ) -> None:
        self.table, self.weights, self.shape, self.classes = table, weights, shape, tuple(classes)
        self.encoder, self.vocabulary, self.about = encoder, vocabulary, about

    @classmethod
    def open(cls, folder: str | Path) -> Classifier:
        """Open a folder; a file that is missing, broken or of another classifier is an error that names it."""
        folder = Path(folder)
        said = read_said(
            folder, CLASSIFIER, "classifier", VERSION, "featherbed train text FILE --out DIR"
        )
        classes = _names(said.raw("classes"))
        kind, widths = said.choice("kind", MODELS), sizes_of(said, "widths", MOST_WIDTH, 16)
        shape = Shape(
            kind,
            said.whole("dim", 1, MOST_DIM),
            len(classes),
            said.whole("length", 1, MOST_LENGTH),
            said.flag("norm"),
            widths,
            said.whole("channels", 0, MOST_DIM),
            sizes_of(said, "hidden", MOST_DIM, 16),
        )
        check_shape(shape, FormatError)
        table, vocabulary = read_table(
            folder, said.whole("words", 2, MOST_ROWS), shape.dim, said.choice("vocabulary", KEPT)
        )
        weights = decode_weights(folder / MODEL, shape.arrays(), said.choice("weights", KINDS))
        encoder: Encoder
        if vocabulary is None:
            encoder = _pieces(folder / TOKENIZER, table.rows, shape.length)
        else:
            encoder = WordEncoder(vocabulary.ids_of, shape.length)
        return cls(table, weights, shape, classes, encoder, vocabulary, said.raw("about"))

    def __repr__(self) -> str:
        return f"Classifier({self.shape.kind}, {self.table.rows:,} words, classes {', '.join(self.classes)[:100]})"

    def classify(self, text: str, k: int | None = None) -> list[Scored]:
        """Return the classes of a text with their probabilities, the most probable first: the k best, or all."""
        return self.classify_many([text], k)[0]

    def classify_many(self, texts: Sequence[str], k: int | None = None) -> list[list[Scored]]:
        """Return the classes of several texts; a text without a word is refused."""
        if k is not None and (isinstance(k, bool) or k < 1):
            raise ArgumentError(f"k={k!r}: ask for at least one class, or for all by leaving k out")
        encoded = [self.encoder.ids(text) for text in texts]
        for number, ids in enumerate(encoded):
            if not len(ids):
                raise ArgumentError(
                    f"text {number + 1} of {len(texts)} holds no word ({texts[number][:40]!r}): give some text"
                )
        if not encoded:
            return []
        offsets = np.cumsum([0, *map(len, encoded)])
        return [
            self._ranked(row, k) for row in self.probabilities(np.concatenate(encoded), offsets)
        ]

    def unknown(self, text: str) -> list[str]:
        """Return the words of a text that the classifier does not know, each once; pieces of words are always known."""
        if self.vocabulary is None:
            return []
        return [
            word
            for word in dict.fromkeys(self.encoder.tokens(text))
            if self.vocabulary.find(word) is None
        ]

    def probabilities(
        self, ids: ArrayLike, offsets: ArrayLike
    ) -> NDArray[np.float64]:  # [N], [n + 1] -> [n, classes]
        """Return the probability of each class for documents of word ids; document i is ids[offsets[i]:offsets[i + 1]]."""
        flat = as_ids(ids, self.table.rows)
        starts = bag_starts(flat, offsets, include_last=True)
        found = [self._scores(flat, starts[a : b + 1]) for a, b in _blocks(starts)]
        logits = np.concatenate([np.empty((0, self.shape.classes)), *found])
        if not np.isfinite(logits).all():
            raise FormatError(
                f"a score is not a finite number: {WORDS} holds values that are none, train again"
            )
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares: NDArray[np.float64] = powers / powers.sum(axis=1, keepdims=True)
        return shares

    def label_ids(self, ids: ArrayLike, offsets: ArrayLike) -> Ids:  # [N], [n + 1] -> [n]
        """Return the number of the most probable class of each document: what a stored model is measured by."""
        found: Ids = np.argmax(self.probabilities(ids, offsets), axis=1).astype(np.int64)
        return found

    def _ranked(self, probabilities: NDArray[np.float64], k: int | None) -> list[Scored]:
        order = np.argsort(-probabilities, kind="stable")[:k].tolist()
        return [Scored(self.classes[i], float(probabilities[i])) for i in order]

    def _scores(self, ids: Ids, starts: Ids) -> NDArray[np.float64]:  # [n + 1] -> [n, classes]
        ends = np.minimum(starts[1:], starts[:-1] + self.shape.length)
        parts = [
            ids[start:end] for start, end in zip(starts[:-1].tolist(), ends.tolist(), strict=True)
        ]
        return scores(self.table, self.weights, self.shape, parts)


def write_classifier(
    folder: str | Path,
    table: PackedTable,
    arrays: Arrays,  # named and shaped as ``Shape.arrays`` says
    *,
    kind: str,
    classes: Iterable[str],
    length: int = 100,
    widths: Sequence[int] = (),  # of a cnn
    words: Sequence[str] | None = None,  # one for each row; without it the table's keys
    tokenizer: str | None = None,  # JSON of a tokenizer of pieces of words
    weights: str = "float32",
    about: dict[str, Any] | None = None,
) -> None:
    """Write a classifier into a folder, made where there is none; other files in it are left alone.

    Filters are [channels, width * d], the first word's d weights first. Everything is checked before anything is written.
    """
    names, sizes = tuple(classes), {name: np.shape(array) for name, array in arrays.items()}
    _check_classes(names, ArgumentError)
    layers = sum(name.startswith("layer") and name.endswith(".weight") for name in arrays)
    shape = Shape(
        kind,
        table.dim,
        len(names),
        length,
        "norm.scale" in arrays,
        tuple(widths),
        sizes.get(f"width{widths[0]}.weight", (0,))[0] if widths else 0,
        tuple(sizes.get(f"layer{number}.weight", (0,))[0] for number in range(layers - 1)),
    )
    check_shape(shape, ArgumentError)
    if sizes != shape.arrays():
        raise ArgumentError(
            f"a {kind} of these sizes takes the arrays {shape.arrays()}, got {sizes}"[:1000]
        )
    if tokenizer is None:
        known = vocabulary_of(table, words).words
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
    kept = "tokenizer" if tokenizer is not None else "keys" if words is None else "list"
    said: dict[str, Any] = {
        "classifier": VERSION,
        "kind": kind,
        "classes": names,
        "words": table.rows,
        "dim": table.dim,
    }
    said |= {
        "length": length,
        "norm": shape.norm,
        "widths": shape.widths,
        "channels": shape.channels,
        "hidden": shape.hidden,
    }
    said |= {"weights": weights, "vocabulary": kept, "about": about or {}}
    write_bundle(
        Path(folder), CLASSIFIER, said, table, words, encode_weights(arrays, weights), tokenizer
    )


def check_classifier(folder: str | Path) -> Classifier:
    """Open a folder and read every byte of its table too. Raises FormatError.

    >>> check_classifier("nothing")
    Traceback (most recent call last):
    featherbed.errors.MissingFileError: nothing: no such folder
    """
    found = Classifier.open(folder)
    check_table(Path(folder) / WORDS)
    return found


def _pieces(path: Path, rows: int, length: int) -> SubwordEncoder:
    """Return the encoder of a stored tokenizer, none of whose tokens lies beyond the table."""
    if not path.is_file():
        raise MissingFileError(f"{path}: no such file")
    try:
        text = read_text(path)
    except UnicodeDecodeError as error:
        raise FormatError(f"{path.name} is not UTF-8: {str(error)[:100]}") from None
    _check_tokens(text, rows, FormatError)
    return SubwordEncoder(text, length)


def _check_tokens(text: str, rows: int, kind: type[ArgumentError] | type[FormatError]) -> None:
    last = max(open_tokenizer(text).get_vocab().values())
    if last >= rows:
        raise kind(
            f"the tokenizer has a token {last}, the table has {rows:,} rows: they must come from one training run"
        )


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise FormatError(f"{CLASSIFIER}.classes must be a list of names, got {str(value)[:40]}")
    _check_classes(value, FormatError)
    return tuple(value)


def _check_classes(names: Sequence[str], kind: type[ArgumentError] | type[FormatError]) -> None:
    if not 2 <= len(names) <= MOST_CLASSES or len(set(names)) < len(names):
        raise kind(
            f"classes are {str(list(names))[:60]}: give 2 to {MOST_CLASSES:,} different names"
        )


def _blocks(starts: Ids) -> Iterator[tuple[int, int]]:  # [n + 1]
    """Yield ranges of documents that hold about as many words as are taken at once."""
    low, count = 0, len(starts) - 1
    while low < count:
        high = int(np.searchsorted(starts, starts[low] + HELD, side="right")) - 1
        high = min(count, max(low + 1, high), low + HELD)
        yield low, high
        low = high
