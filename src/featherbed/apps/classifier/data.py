"""Settings; labeled texts as word ids: a vocabulary, three parts over it, and a cache of both.

Id 0 is ``<pad>``, 1 is ``<unk>``, the others follow by decreasing count in the training part.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from featherbed.apps.words import Lexicon, StorageSettings, VocabularySettings, WordTableSettings
from featherbed.errors import ArgumentError, DataError
from featherbed.files import write_file
from featherbed.graphs import Graph, cooccurrence, cooccurrence_counts
from featherbed.io.texts import (
    MAX_LENGTH,
    PAD_ID,
    UNKNOWN_ID,
    LabeledTexts,
    build_vocabulary,
    open_tokenizer,
    subwords_of,
    tokenize,
    train_subwords,
)
from featherbed.settings import Settings, group, setting


@dataclass(frozen=True, kw_only=True)
class ClassifierDataSettings(Settings):
    """How labeled texts are read and split."""

    label: str | None = setting(None, "Column of labels, by name or number; detected by default.")
    text: str | None = setting(
        None, "Column of texts; several with commas are joined; detected by default."
    )
    skip_empty: bool = setting(False, "Leave out texts without a word; by default an error.")
    encoding: str | None = setting(None, "Encoding of the files, by default UTF-8.")
    validation: float = setting(
        0.15, "Fraction of the training texts used for validation.", above=0, maximum=0.9
    )
    cache: Path | None = setting(None, "Folder that keeps encoded texts and co-occurrence counts.")


@dataclass(frozen=True, kw_only=True)
class TextVocabularySettings(VocabularySettings):
    """How texts become ids."""

    length: int = setting(MAX_LENGTH, "Maximum number of words per text.", minimum=1)
    long: str = setting("cut", "Handling of longer texts.", choices=("cut", "error"))
    subwords: int | None = setting(
        None, "Train this number of subwords, used instead of words.", minimum=4
    )

    def check(self) -> None:
        """Raise ``ArgumentError`` if the vocabulary has two sizes."""
        if self.subwords is not None and (self.max_words is not None or self.min_count > 1):
            raise ArgumentError(
                f"subwords={self.subwords} is the size of the vocabulary: leave min_count and "
                "max_words out"
            )


@dataclass(frozen=True, kw_only=True)
class ClassifierModelSettings(Settings):
    """The network over the word table."""

    kind: str = setting(
        "cnn", "cnn: convolutions over words; bag: mean of a text's rows.", choices=("cnn", "bag")
    )
    channels: int = setting(100, "cnn: number of filters of each width.", minimum=1)
    widths: tuple[int, ...] = setting((3, 4, 5), "cnn: widths of the filters.", minimum=1)
    hidden: int | None = setting(None, "bag: width of a hidden layer.", minimum=1)
    dropout: float = setting(0.5, "Dropout before the last layer.", minimum=0, maximum=0.95)

    def check(self) -> None:
        """Raise ``ArgumentError`` for a layer that the network does not have."""
        if self.hidden is not None and self.kind != "bag":
            raise ArgumentError(
                f"hidden={self.hidden}: the {self.kind} has no hidden layer; use kind=bag, or "
                "leave hidden out"
            )
        if not self.widths:
            raise ArgumentError("widths=(): give at least one width")


@dataclass(frozen=True, kw_only=True)
class ClassifierTrainingSettings(Settings):
    """The training loop; the defaults are those of the CNN of Liang et al. (2021, Table 6)."""

    epochs: int = setting(20, "Maximum number of epochs.", minimum=1)
    batch: int = setting(256, "Number of texts per step.", minimum=1)
    lr: float = setting(5e-3, "Learning rate.", above=0)
    code_lr: float = setting(5e-3, "Learning rate of code logits (KD and DPQ tables).", above=0)
    optimizer: str = setting("adam", "Optimizer.", choices=("adam", "yogi"))
    decay: float = setting(
        0.0, "adam: decoupled weight decay of all but penalized weights.", minimum=0
    )
    cosine: bool = setting(
        False, "Warm the learning rate up over a tenth of the steps, then decay it to zero."
    )
    patience: int = setting(3, "Epochs without improvement before training stops.", minimum=1)

    def check(self) -> None:
        """Raise ``ArgumentError`` for weight decay with yogi."""
        if self.decay and self.optimizer == "yogi":
            raise ArgumentError(f"decay={self.decay:g}: yogi has no weight decay; use adam")


@dataclass(frozen=True, kw_only=True)
class ClassifierSettings(Settings):
    """All settings of a text classifier.

    >>> ClassifierSettings.from_values({"table.selection": "frequency"}).training.lr
    0.005
    """

    table: WordTableSettings = group(WordTableSettings, spec="anchor:anchors=10")
    model: ClassifierModelSettings = group(ClassifierModelSettings)
    training: ClassifierTrainingSettings = group(ClassifierTrainingSettings)
    vocabulary: TextVocabularySettings = group(TextVocabularySettings)
    data: ClassifierDataSettings = group(ClassifierDataSettings)
    storage: StorageSettings = group(StorageSettings)


WINDOW = 10  # distance of words that co-occur
CACHE_VERSION = 1  # of the tokenizer and all else that determines ids

Ids = NDArray[np.int64]
Arrays = dict[str, Any]  # numpy arrays by name
FIELDS = ("ids", "offsets", "labels")  # of documents


@dataclass(frozen=True)
class Documents:
    """Concatenated texts as ids: text i is ``ids[offsets[i]:offsets[i + 1]]``.

    >>> documents = Documents(np.array([2, 3, 2], np.int32), np.array([0, 2, 3]), np.array([0, 1]))
    >>> len(documents), documents.lengths.tolist()
    (2, [2, 1])
    >>> documents.padded(np.array([1, 0]), minimum=1, extra=1).tolist()
    [[2, 0, 0], [2, 3, 0]]
    """

    ids: NDArray[np.int32]  # [N]
    offsets: Ids  # [n + 1]
    labels: Ids  # [n]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def lengths(self) -> Ids:  # [n]
        """Number of words of each text."""
        return np.diff(self.offsets)

    def take(self, index: Ids) -> Documents:
        """Return the texts at ``index``, in that order."""
        flat, lengths = self._positions(index)
        return Documents(self.ids[flat], np.append(0, np.cumsum(lengths)), self.labels[index])

    def bags(self, index: Ids) -> tuple[Ids, Ids]:  # -> [N], [B]
        """Return the ids of the texts at ``index`` and their offsets, as nn.EmbeddingBag takes."""
        flat, lengths = self._positions(index)
        return self.ids[flat].astype(np.int64), np.cumsum(lengths) - lengths

    def padded(
        self, index: Ids, minimum: int = 5, extra: int = 5, length: int = MAX_LENGTH
    ) -> Ids:  # -> [B, L]
        """Return texts padded to L = max(minimum, min(length, longest + extra)) words."""
        flat, lengths = self._positions(index)
        longest = int(lengths.max(initial=0))
        width = max(minimum, min(length, longest + extra))
        is_word = np.arange(max(width, longest)) < lengths[:, None]
        rows = np.zeros(is_word.shape, dtype=np.int64)
        rows[is_word] = self.ids[flat]
        return rows[:, :width]

    def counts(self, words: int) -> csr_array:  # -> int [n, words]
        """Return the count of each word in each text."""
        rows = np.repeat(np.arange(len(self)), self.lengths)
        ones = np.ones(len(self.ids), dtype=np.int64)
        return csr_array((ones, (rows, self.ids)), shape=(len(self), words))

    def _positions(self, index: Ids) -> tuple[Ids, Ids]:
        """Return the positions in ``ids`` of the texts at ``index``, and their lengths."""
        starts, lengths = self.offsets[index], self.offsets[index + 1] - self.offsets[index]
        before = np.cumsum(lengths) - lengths
        return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum())), lengths


class TextVocabulary(NamedTuple):
    """The words of a classifier, their training counts, the JSON text of a subword tokenizer."""

    words: tuple[str, ...]  # V
    counts: Ids  # [V]
    length: int  # maximum number of words per text
    tokenizer: str | None = None


@dataclass(frozen=True)
class TextData:
    """Labeled texts, ready for training.

    ``validation_index`` are the positions of the validation texts among the training texts given;
    ``checksum`` is that of the texts and settings.
    """

    vocabulary: TextVocabulary
    train: Documents
    validation: Documents
    test: Documents | None
    classes: tuple[str, ...]
    notes: tuple[str, ...]
    checksum: str
    validation_index: Ids

    def to_arrays(self) -> Arrays:
        """Return everything but the checksum as arrays, for the cache."""
        vocabulary, parts = self.vocabulary, self.parts
        about: dict[str, Any] = {"parts": list(parts), "classes": self.classes}
        about |= {"notes": self.notes, "words": vocabulary.words, "length": vocabulary.length}
        about["tokenizer"] = vocabulary.tokenizer
        return {
            "about": np.frombuffer(json.dumps(about).encode(), np.uint8),
            "counts": vocabulary.counts,
            "validation_index": self.validation_index,
            **{f"{part}.{name}": getattr(parts[part], name) for part in parts for name in FIELDS},
        }

    @classmethod
    def from_arrays(cls, arrays: Arrays, checksum: str) -> TextData:
        """Return the data that ``to_arrays`` stored."""
        about = json.loads(arrays["about"].tobytes())
        words, counts = tuple(about["words"]), arrays["counts"]
        parts = {
            part: Documents(*(arrays[f"{part}.{name}"] for name in FIELDS))
            for part in about["parts"]
        }
        return cls(
            TextVocabulary(words, counts, about["length"], about["tokenizer"]),
            parts["train"],
            parts["validation"],
            parts.get("test"),
            tuple(about["classes"]),
            tuple(about["notes"]),
            checksum,
            arrays["validation_index"],
        )

    @property
    def parts(self) -> dict[str, Documents]:
        """The parts by name."""
        test = {} if self.test is None else {"test": self.test}
        return {"train": self.train, "validation": self.validation, **test}

    @property
    def lines(self) -> list[str]:
        """The number of texts, classes and words, and notes about reading."""
        counts = ", ".join(f"{len(part):,} {name}" for name, part in self.parts.items())
        words = f"{len(self.vocabulary.words):,} words"
        return [f"{counts} texts of {len(self.classes)} classes, {words}", *self.notes]


def prepare(
    train: LabeledTexts,
    test: LabeledTexts | None = None,
    settings: TextVocabularySettings | None = None,
    *,
    validation: float = 0.15,
    seed: int = 0,
    cache: str | Path | None = None,
) -> TextData:
    """Split the training texts, build the vocabulary of the larger part, encode all texts.

    Args:
        train: the training texts; a fraction ``validation``, drawn by ``seed``, is held out.
        test: the test texts, with the same classes.
        settings: the vocabulary and the maximum length of texts.
        cache: a folder that keeps the result under a checksum of the texts and settings.

    >>> texts = LabeledTexts(["good film", "bad film", "good", "bad"], np.array([1, 0, 1, 0]), "-+")
    >>> data = prepare(texts, validation=0.25)
    >>> data.vocabulary.words[:2], len(data.train), len(data.validation)
    (('<pad>', '<unk>'), 3, 1)
    """
    settings = settings or TextVocabularySettings()
    _check_texts(train, test, validation)
    checksum = _checksum(train, test, [asdict(settings), validation, seed])

    def encode() -> TextData:
        return _encode_all(train, test, settings, validation, seed, checksum)

    if cache is None:
        data = encode()
    else:
        arrays = _cached(cache, "texts", checksum, lambda: encode().to_arrays())
        data = TextData.from_arrays(arrays, checksum)
    notes = dict.fromkeys((*train.notes, *(test.notes if test else ()), *data.notes))
    return replace(data, notes=tuple(notes))


def _encode_all(
    train: LabeledTexts,
    test: LabeledTexts | None,
    settings: TextVocabularySettings,
    validation: float,
    seed: int,
    checksum: str,
) -> TextData:
    order = np.random.default_rng(seed).permutation(len(train))
    count = min(len(train) - 1, max(1, round(validation * len(train))))
    held_out, kept = train.take(np.sort(order[:count])), train.take(np.sort(order[count:]))
    tokenizer = None
    if settings.subwords is not None:
        tokenizer = train_subwords(kept.texts, settings.subwords, settings.length)
    tokens = _TokenCounter(tokenizer, settings)
    flat, lengths = tokens.split(kept)
    if tokenizer is None:
        words, ids = build_vocabulary(
            flat, min_count=settings.min_count, max_words=settings.max_words
        )
    else:
        words, ids = subwords_of(tokenizer), np.array(flat, dtype=np.int32)
    if len(words) < 4:
        raise DataError(
            f"{train.path or 'train'}: the training part has {len(words) - 2} different words "
            f"(min_count={settings.min_count}, max_words={settings.max_words}): a vocabulary "
            "needs two or more"
        )
    counts = np.bincount(ids, minlength=len(words))
    return TextData(
        TextVocabulary(words, counts, settings.length, tokenizer),
        _documents(ids, lengths, kept.labels),
        tokens.encode(held_out, words),
        None if test is None else tokens.encode(test, words),
        tuple(train.classes),
        tokens.notes(),
        checksum,
        np.sort(order[:count]),
    )


class _TokenCounter:
    """Tokenizes texts into words or subword ids, and counts truncated texts."""

    def __init__(self, tokenizer: str | None, settings: TextVocabularySettings) -> None:
        self.length, self.long = settings.length, settings.long
        self._subwords = None if tokenizer is None else open_tokenizer(tokenizer)
        self._cut = self._texts = 0

    def split(self, texts: LabeledTexts) -> tuple[list[Any], Ids]:
        """Return the concatenated words or ids of texts, and the number of each text."""
        if self._subwords is None:
            tokens: list[list[Any]] = [tokenize(text, self.length + 1) for text in texts.texts]
        else:
            batch = self._subwords.encode_batch_fast(texts.texts, add_special_tokens=False)
            tokens = [item.ids for item in batch]
        sizes = np.fromiter(map(len, tokens), dtype=np.int64, count=len(tokens))
        if len(sizes) and not sizes.all():
            raise DataError(
                f"{texts.origin(int(sizes.argmin()))}: the text holds no word: leave it out"
            )
        over = np.flatnonzero(sizes > self.length)
        if len(over) and self.long == "error":
            at = int(over[0])
            size = sizes[at] if self._subwords else len(tokenize(texts.texts[at]))
            raise DataError(
                f"{texts.origin(at)}: a text of {size:,} words, the limit is {self.length:,}: "
                "give a larger vocabulary.length, or vocabulary.long=cut"
            )
        self._cut, self._texts = self._cut + len(over), self._texts + len(sizes)
        flat = list(chain.from_iterable(words[: self.length] for words in tokens))
        return flat, np.minimum(sizes, self.length)

    def encode(self, texts: LabeledTexts, words: Sequence[str]) -> Documents:
        """Return texts as ids of a vocabulary."""
        tokens, lengths = self.split(texts)
        if self._subwords is None:
            id_of = {word: number for number, word in enumerate(words)}
            tokens = [id_of.get(word, UNKNOWN_ID) for word in tokens]
        return _documents(tokens, lengths, texts.labels)

    def notes(self) -> tuple[str, ...]:
        """Return a note about texts that were cut."""
        cut, limit = f"{self._cut:,} of {self._texts:,} texts", f"{self.length:,} words"
        return (f"{cut} were cut to their first {limit}",) if self._cut else ()


def text_lexicon(data: TextData, min_cooccurrence: int, cache: Path | None = None) -> Lexicon:
    """Return the statistics of the training part for the selection of words."""
    train, size = data.train, len(data.vocabulary.words)
    return Lexicon(
        data.vocabulary.words,
        data.vocabulary.counts,
        documents=lambda: train.counts(size),
        labels=train.labels,
        cooccurrence=lambda: cooccurrence_counts(
            np.split(train.ids, train.offsets[1:-1]), size, window=WINDOW
        ),
        related=lambda: cooccurrence_graph(train, size, min_count=min_cooccurrence, cache=cache),
        padding_idx=PAD_ID,
        samples=len(train),
    )


def cooccurrence_graph(
    documents: Documents,
    words: int,
    *,
    window: int = WINDOW,
    min_count: int = 5,
    cache: str | Path | None = None,
) -> Graph:
    """Relate words that co-occur ``min_count`` times or more within ``window`` words of a text.

    Args:
        documents: the texts.
        words: size of the vocabulary.
        cache: a folder that keeps the pairs under a checksum of the ids and settings.

    >>> documents = Documents(np.array([2, 3, 2, 3, 2, 4]), np.array([0, 6]), np.array([0]))
    >>> cooccurrence_graph(documents, 5, window=1, min_count=2).pairs()
    array([[2, 3]])
    """
    texts = np.split(documents.ids, documents.offsets[1:-1])
    if cache is None:
        return cooccurrence(texts, words, window=window, min_count=min_count)
    digest = hashlib.sha256(json.dumps([words, window, min_count]).encode())
    digest.update(documents.ids.astype(np.int64).tobytes() + documents.offsets.tobytes())

    def count() -> Arrays:
        return {"pairs": cooccurrence(texts, words, window=window, min_count=min_count).pairs()}

    pairs = _cached(cache, "cooccurrence", digest.hexdigest(), count)["pairs"]
    return Graph.from_edges(words, pairs)


def _check_texts(train: LabeledTexts, test: LabeledTexts | None, validation: float) -> None:
    if not 0 < validation < 1:
        raise ArgumentError(f"validation={validation}: give a fraction between 0 and 1")
    if len(train) < 2:
        raise DataError(
            f"{train.path or 'train'} holds {len(train)} text: give two or more, since some are "
            "held out"
        )
    if test is not None and test.classes != train.classes:
        raise ArgumentError(
            "the test texts have other classes: read them with classes=train.classes"
        )


def _documents(ids: Any, lengths: NDArray[np.integer], labels: Ids) -> Documents:
    offsets = np.append(0, np.cumsum(lengths, dtype=np.int64))
    return Documents(np.asarray(ids, dtype=np.int32), offsets, labels)


def _checksum(train: LabeledTexts, test: LabeledTexts | None, settings: Sequence[Any]) -> str:
    found = hashlib.sha256(json.dumps([CACHE_VERSION, *settings]).encode())
    for part in (train, test):
        if part is None:
            found.update(b"-")
            continue
        found.update(json.dumps([len(part), part.classes]).encode() + part.labels.tobytes())
        for text in part.texts:
            raw = text.encode("utf-8", "surrogatepass")
            found.update(len(raw).to_bytes(8, "little") + raw)
    return found.hexdigest()


def _cached(folder: str | Path, kind: str, checksum: str, compute: Callable[[], Arrays]) -> Arrays:
    """Return the arrays kept in a folder under a checksum; compute and keep them if need be.

    A file is the SHA-256 of its content, then the content, in numpy's ``.npz`` format.
    """
    file = Path(folder) / f"{kind}-{checksum[:32]}.cache"
    with suppress(OSError):
        stored = file.read_bytes()
        if stored[:32] == hashlib.sha256(checksum.encode() + stored[32:]).digest():
            with np.load(io.BytesIO(stored[32:]), allow_pickle=False) as arrays:
                return dict(arrays)
    found, buffer = compute(), io.BytesIO()
    np.savez(buffer, **found)
    content = buffer.getvalue()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, hashlib.sha256(checksum.encode() + content).digest() + content)
    except OSError as error:
        raise ArgumentError(
            f"cache={str(file.parent)!r}: cannot be written to: {error.strerror}"
        ) from None
    return found
