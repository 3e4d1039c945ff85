"""Tokenizers; labeled texts (CSV, TSV, JSON lines, fastText), plain text for language models."""

from __future__ import annotations

import csv
import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import ArgumentError, DataError, FormatError, MissingExtra
from featherbed.io.opening import (
    find_file,
    json_text,
    list_names,
    locate_column,
    match_names,
    parse_object,
    read_text,
)
from featherbed.packed.keys import Keys, Vocabulary

PAD, UNKNOWN, END = "<pad>", "<unk>", "<eos>"
PAD_ID, UNKNOWN_ID = 0, 1
MAX_LENGTH = 100  # default number of words per text

_WORD = re.compile(r"n't\b|'(?:s|m|d|ll|re|ve)\b|[^\W_]+|[(),!?'`\"@]")
_LETTERS = 8  # characters per word, more than most words have
_UNSAFE = 4  # words before a cut that may differ from those of the whole text
_ANY = re.compile(r"[^\W_]|[(),!?'’`\"@]")


def tokenize(text: str, limit: int | None = None) -> list[str]:
    """Split a text into lower-case words and marks, at most ``limit`` of them.

    Contractions are split: "don't" becomes "do" and "n't", "it's" becomes "it" and "'s".

    >>> tokenize("Don't panic: it's only AG-News (2005)!")
    ['do', "n't", 'panic', 'it', "'s", 'only', 'ag', 'news', '(', '2005', ')', '!']
    """
    if limit is not None and len(text) > _LETTERS * limit:
        words = tokenize(text[: _LETTERS * limit])
        if len(words) > limit + _UNSAFE:
            return words[:limit]
    if not text.isascii():
        text = unicodedata.normalize("NFC", text).replace("’", "'")
    return _WORD.findall(text.lower().replace("n't", " n't"))[:limit]


def has_words(text: str) -> bool:
    """Return whether ``tokenize`` finds any word or mark in a text.

    >>> has_words("..."), has_words("a...")
    (False, True)
    """
    return _ANY.search(text) is not None


class TextEncoder(Protocol):
    """Converts a text to ids, at most ``length`` of them."""

    length: int

    def tokens(self, text: str) -> list[str]:
        """Return the tokens of a text."""

    def ids(self, text: str) -> NDArray[np.int64]:
        """Return the ids of ``tokens(text)``."""


class WordEncoder:
    """Encodes the first ``length`` words of a text by a vocabulary; unknown words have id 1.

    ``ids_of`` maps words to ids: a dictionary, a vocabulary, or the keys of a packed table.

    >>> encoder = WordEncoder({"<pad>": 0, "<unk>": 1, "good": 2}, length=3)
    >>> encoder.ids("Good, GOOD film").tolist(), encoder.tokens("Good, GOOD film")
    ([2, 1, 2], ['good', ',', 'good'])
    """

    def __init__(
        self, ids_of: Mapping[str, int] | Keys | Vocabulary, length: int = MAX_LENGTH
    ) -> None:
        self.length = check_length(length)
        self._ids_of = ids_of

    def tokens(self, text: str) -> list[str]:
        """Return the first ``length`` words of a text."""
        return tokenize(text, self.length)

    def ids(self, text: str) -> NDArray[np.int64]:
        """Return the ids of the first ``length`` words of a text."""
        words = self.tokens(text)
        if isinstance(self._ids_of, Mapping):
            rows = (self._ids_of.get(word, UNKNOWN_ID) for word in words)
            return np.fromiter(rows, dtype=np.int64, count=len(words))
        found = self._ids_of.ids(words)
        return np.where(found < 0, UNKNOWN_ID, found)


class SubwordEncoder:
    """Encodes the first ``length`` subwords of a text by a tokenizer of the ``tokenizers`` package.

    ``tokenizer`` is its JSON text.
    """

    def __init__(self, tokenizer: str, length: int = MAX_LENGTH) -> None:
        self.length = check_length(length)
        self.tokenizer = open_tokenizer(tokenizer)

    def _encode(self, text: str) -> Any:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def tokens(self, text: str) -> list[str]:
        """Return the first ``length`` subwords of a text."""
        tokens: list[str] = self._encode(text).tokens[: self.length]
        return tokens

    def ids(self, text: str) -> NDArray[np.int64]:
        """Return the ids of the first ``length`` subwords of a text."""
        return np.array(self._encode(text).ids[: self.length], dtype=np.int64)


def open_tokenizer(text: str, *, own: bool = True) -> Any:
    """Return the tokenizer that a JSON text describes, without padding and truncation.

    One of our ``own`` has the tokens of padding and of unknown words in front.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise MissingExtra("tokenizers", "text", "splitting words into subwords") from None
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the package raises nothing narrower
        raise FormatError(f"the tokenizer cannot be read: {str(error)[:100]}") from None
    ids = [tokenizer.token_to_id(token) for token in (PAD, UNKNOWN)]
    if own and ids != [PAD_ID, UNKNOWN_ID]:
        raise FormatError(
            f"the tokenizer must have {PAD} as token {PAD_ID} and {UNKNOWN} as token {UNKNOWN_ID}"
        )
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def check_length(length: int) -> int:
    """Return the maximum number of words per text, an integer of at least 1."""
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise ArgumentError(f"length={length!r}: give a whole number of at least 1")
    return length


def build_vocabulary(
    tokens: Sequence[str], *, min_count: int = 1, max_words: int | None = None
) -> tuple[tuple[str, ...], NDArray[np.int32]]:  # -> V, [N]
    """Return the vocabulary of a list of tokens, and the id of each token.

    The vocabulary is ``<pad>``, ``<unk>``, then words by decreasing count, ties in alphabetical
    order; words rarer than ``min_count`` or beyond ``max_words`` are unknown.

    >>> words, ids = build_vocabulary(["a", "b", "b", "c"], max_words=4)
    >>> words, ids.tolist()
    (('<pad>', '<unk>', 'b', 'a'), [3, 2, 2, 1])
    """
    found = Vocabulary.count([tokens], min_count=min_count, most=max_words, special=(PAD, UNKNOWN))
    return tuple(found), found.ids(tokens, default=UNKNOWN_ID).astype(np.int32)


def train_subwords(texts: Sequence[str], size: int, length: int = MAX_LENGTH) -> str:
    """Train byte-pair encoding (Sennrich et al. 2016) with at most ``size`` subwords.

    Subwords are numbered by decreasing count in the first ``length`` subwords of the texts; "▁" is
    the space before a word. Returns the JSON text of the tokenizer.
    """
    try:
        from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    except ImportError:
        raise MissingExtra("tokenizers", "text", "splitting words into subwords") from None

    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation()]
    )
    special, alphabet = [PAD, UNKNOWN], max(size // 2, 1)
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, limit_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer, length=len(texts))
    encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    flat = chain.from_iterable(item.ids[:length] for item in encoded)
    ids = np.fromiter(flat, dtype=np.int64)
    counts = np.bincount(ids, minlength=tokenizer.get_vocab_size()).tolist()
    description = json.loads(tokenizer.to_str())
    id_of: dict[str, int] = description["model"]["vocab"]
    subwords = sorted(set(id_of) - set(special), key=lambda word: (-counts[id_of[word]], word))
    description["model"]["vocab"] = {
        word: number for number, word in enumerate([*special, *subwords])
    }
    return json.dumps(description, ensure_ascii=False)


def subwords_of(tokenizer: str) -> tuple[str, ...]:
    """Return the subwords of a tokenizer, given as JSON text, in the order of their ids."""
    id_of: dict[str, int] = json.loads(tokenizer)["model"]["vocab"]
    return tuple(sorted(id_of, key=id_of.__getitem__))


# Column names in lower case, letters and digits only; the first group with a match decides.
LABELS = (
    "label labels",
    "class classname category target sentiment topic intent polarity",
    "stars rating score y gold",
)
TEXTS = (
    "text texts",
    "sentence review content body document message tweet comment question",
    "description abstract",
    "title",
)
TITLES = "title subject headline summary"
FASTTEXT = "__label__"
_PAIRED = re.compile(r'"(?:[^"]|"")*"')
Row = tuple[int, str, str]  # line, label, text
Column = str | int | None


@dataclass(frozen=True)
class Corpus:
    """A text as word ids: three parts over one vocabulary, the most frequent word first."""

    words: tuple[str, ...]  # V
    counts: NDArray[np.int64]  # [V], in the training part
    train: NDArray[np.int64]
    validation: NDArray[np.int64]
    test: NDArray[np.int64]

    @property
    def lines(self) -> list[str]:
        """The number of words, for the user."""
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        counts = ", ".join(f"{len(ids):,} {name}" for name, ids in parts.items())
        return [f"{counts} words, {len(self.words):,} different"]


def read_corpus(
    paths: Sequence[str | Path],
    *,
    tokenizer: Callable[[str], list[str]] = str.split,
    validation: float = 0.1,
    test: float = 0.1,
    min_count: int = 1,
    max_words: int | None = None,
    encoding: str | None = None,
) -> Corpus:
    """Read plain text, one sentence per line; ``<eos>`` ends a line, ``<unk>`` is an unknown word.

    Args:
        paths: the training, validation and test files, or one file whose last lines are held out.
        tokenizer: splits a line into words, by default at whitespace.
        validation: the fraction of the lines of a single file used for validation.
        test: the fraction of the lines of a single file used for testing.
        min_count: words with a lower count are unknown.
        max_words: maximum size of the vocabulary, ``<unk>`` and ``<eos>`` included.
        encoding: the encoding of the files, by default UTF-8.

    >>> path = getfixture("tmp_path") / "all.txt"
    >>> _ = path.write_text("the cat sat\\n" * 10)
    >>> corpus = read_corpus([path])
    >>> corpus.words, len(corpus.train), len(corpus.validation), len(corpus.test)
    (('the', 'cat', 'sat', '<eos>', '<unk>'), 32, 4, 4)
    """
    if len(paths) not in (1, 3):
        raise ArgumentError(
            f"{len(paths)} files: give one, or three for training, validation and test"
        )
    if min(validation, test) <= 0 or validation + test >= 1:
        raise ArgumentError(f"{validation=}, {test=}: give fractions above 0 with a sum below 1")
    if min_count < 1 or (max_words is not None and max_words < 4):
        raise ArgumentError(f"{min_count=}, {max_words=}: give at least 1, and at least 4 words")
    files = [find_file(path) for path in paths]
    parts = [read_text(file, encoding).removesuffix("\n").split("\n") for file in files]
    for file, part in zip(files, parts, strict=True):
        if part == [""]:
            raise DataError(f"{file} is empty: give text, one sentence per line")
    if len(parts) == 1:
        parts = _split_lines(files[0], parts[0], validation, test)
    tokens = [[word for line in part for word in (*tokenizer(line), END)] for part in parts]
    for file, words in zip(files * (4 - len(files)), tokens, strict=False):
        if set(words) == {END}:
            raise DataError(f"{file} holds no words: give text, one sentence per line")
    counts = _count(tokens[0], min_count, max_words)
    if len(counts) < 4:
        raise DataError(
            f"{files[0]} holds fewer than two different words: a vocabulary needs two or more"
        )
    vocabulary = tuple(word for word, _ in counts.most_common())
    id_of = {word: number for number, word in enumerate(vocabulary)}
    unknown = id_of[UNKNOWN]
    ids = [np.array([id_of.get(w, unknown) for w in words], dtype=np.int64) for words in tokens]
    return Corpus(vocabulary, np.array([counts[word] for word in vocabulary]), *ids)


def _split_lines(file: Path, lines: list[str], validation: float, test: float) -> list[list[str]]:
    second = len(lines) - max(1, round(test * len(lines)))
    first = second - max(1, round(validation * len(lines)))
    if first < 1:
        raise DataError(
            f"{file} has {len(lines)} lines: give three or more, since some are held out, or "
            "three files"
        )
    return [lines[:first], lines[first:second], lines[second:]]


def _count(tokens: Sequence[str], min_count: int, max_words: int | None) -> Counter[str]:
    """Count words; rare ones count as unknown."""
    counts = Counter({UNKNOWN: 0})
    counts.update(tokens)
    special = (UNKNOWN, END)
    frequent = [
        word for word, count in counts.most_common() if count >= min_count and word not in special
    ]
    kept = {*special, *(frequent if max_words is None else frequent[: max_words - 2])}
    for word in [word for word in counts if word not in kept]:
        counts[UNKNOWN] += counts.pop(word)
    return counts


def read_ptb(folder: str | Path) -> Corpus:
    """Read the Penn Treebank as prepared by Mikolov: ``ptb.{train,valid,test}.txt``."""
    return read_corpus([Path(folder) / f"ptb.{part}.txt" for part in ("train", "valid", "test")])


@dataclass(frozen=True)
class LabeledTexts:
    """Texts and the class of each; ``path`` and ``lines`` are their origin, for messages.

    >>> texts = LabeledTexts(["a good film", "a bad one"], np.array([1, 0]), ("bad", "good"))
    >>> len(texts), texts.classes[texts.labels[0]]
    (2, 'good')
    """

    texts: Sequence[str]
    labels: NDArray[np.int64]  # [n]
    classes: tuple[str, ...]
    notes: tuple[str, ...] = ()
    path: str = ""
    lines: NDArray[np.int64] | None = field(default=None, repr=False)  # [n]

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, index: NDArray[np.int64]) -> LabeledTexts:
        """Return the texts at ``index``."""
        lines = index + 1 if self.lines is None else self.lines[index]
        texts = [self.texts[at] for at in index.tolist()]
        return replace(self, texts=texts, labels=self.labels[index], lines=lines)

    def origin(self, at: int) -> str:
        """Return where a text came from, for a message."""
        number = at + 1 if self.lines is None else self.lines[at]
        return f"{self.path}, line {number}" if self.path else f"text {number}"


def read_texts(
    path: str | Path,
    *,
    label: Column = None,
    text: Column = None,
    classes: Sequence[str] | None = None,
    header: bool | None = None,
    encoding: str | None = None,
    skip_empty: bool = False,
) -> LabeledTexts:
    """Read labeled texts from CSV, TSV, JSON lines or fastText files, compressed or not.

    Args:
        path: the file; its format is detected from its content.
        label: the column of the labels, by name or by number from 1; detected if None.
        text: the column of the texts, or several such as "2,3", joined by spaces; detected if None.
        classes: the accepted classes, in order; by default those of the file, sorted.
        header: whether the first line names the columns; detected if None.
        encoding: the encoding of the file, by default UTF-8.
        skip_empty: leave out texts without a word and note their number; by default an error.

    >>> path = getfixture("tmp_path") / "reviews.csv"
    >>> _ = path.write_text("label,text\\npos,a good film\\nneg,a bad one\\n")
    >>> texts = read_texts(path)
    >>> texts.classes, texts.labels.tolist(), texts.texts[0]
    (('neg', 'pos'), [1, 0], 'a good film')
    """
    file = find_file(path)
    content = read_text(file, encoding)
    first = content.lstrip().partition("\n")[0]
    if not first:
        raise DataError(f"{file} is empty: give a file of labels and texts")
    if ".json" in file.name or parse_object(first) is not None:
        rows, notes = _json(file, content, label, text)
    elif first.startswith(FASTTEXT):
        rows, notes = _fasttext(file, content), ["fastText format: labels follow __label__"]
    else:
        rows, notes = _delimited(file, content, label, text, header)
    return _encode_labels(file, rows, notes, classes, skip_empty)


def _json(path: Path, content: str, label: Column, text: Column) -> tuple[Iterable[Row], list[str]]:
    rows: list[Row] = []
    names, place, places = list[str](), 0, list[int]()
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            found = parse_object(line)
            if found is None:
                form = 'one object per line, such as {"label": "pos", "text": "..."}'
                raise DataError(f"{path}, line {number}: found {line.strip()[:40]!r}: write {form}")
            if not names:
                names = list(found)
                place, places = _columns(path, names, label, text)
            cells = [found.get(names[at]) for at in (place, *places)]
            if any(isinstance(cell, list | dict) for cell in cells):
                raise DataError(
                    f"{path}, line {number}: a list or an object as label or text: give a string"
                )
            first, *rest = (json_text(cell) or "" for cell in cells)
            rows.append((number, first, " ".join(filter(None, rest))))
    return rows, [_describe(names, place, places)]


def _fasttext(path: Path, content: str) -> Iterator[Row]:
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            first, *rest = line.split(maxsplit=1)
            if not first.startswith(FASTTEXT) or "".join(rest).startswith(FASTTEXT):
                raise DataError(
                    f"{path}, line {number}: found {line[:40]!r}: write one {FASTTEXT} and a text "
                    "per line"
                )
            yield number, first.removeprefix(FASTTEXT), "".join(rest)


def _delimited(
    path: Path, content: str, label: Column, text: Column, header: bool | None
) -> tuple[Iterable[Row], list[str]]:
    lines = _split(path, content)
    first = lines[0][1]
    for number, cells in lines:
        if len(cells) != len(first) or len(cells) < 2:
            found = (
                f"{len(cells)} columns, {len(first)} in the first line"
                if len(first) > 1
                else f"one column, {cells[0][:40]!r}"
            )
            raise DataError(
                f"{path}, line {number}: {found}: give label and text, and quote texts that "
                "contain the delimiter"
            )
    named = any(
        not part.strip().isdigit()
        for given in (label, text)
        if given is not None
        for part in str(given).split(",")
    )
    usual = match_names(LABELS, first) and match_names(TEXTS, first)
    if header or (header is None and (named or usual)):
        place, places = _columns(path, first, label, text)
        notes, lines = [_describe(first, place, places)], lines[1:]
    else:
        place, places = _unnamed(path, lines, label, text)
        notes = [f"no header: {_describe(range(1, len(first) + 1), place, places)}"]
        often = Counter(cells[place] for _, cells in lines)
        if (
            header is None
            and often.pop(first[place]) == 1
            and len(often) > 1
            and min(often.values()) > 1
        ):
            notes = [
                f"the first line is taken as a header: its label {first[place][:40]!r} occurs "
                "nowhere else",
                *notes,
            ]
            lines = lines[1:]
    return (
        (number, cells[place], " ".join(cells[at] for at in places if cells[at]))
        for number, cells in lines
    ), notes


def _split(path: Path, content: str) -> list[tuple[int, list[str]]]:
    """Return the line number and the cells of each record of delimited text."""
    first = re.sub(r'"(?:[^"]|"")*("|$)', "", content.lstrip("\n").partition("\n")[0])
    mark = "\t" if "\t" in first else max(",;|", key=first.count)
    lines = [
        (number, line.split("\t"))
        for number, line in enumerate(content.split("\n"), 1)
        if line.strip()
    ]
    if mark == "\t" and len({len(cells) for _, cells in lines}) == 1:
        quoted = [cell for _, cells in lines for cell in cells if cell.startswith('"')]
        if not quoted or not all(_PAIRED.fullmatch(cell) for cell in quoted):
            return lines
    csv.field_size_limit(1 << 30)
    reader, begin, found = (
        csv.reader(StringIO(content, newline=""), delimiter=mark, strict=True),
        1,
        [],
    )
    try:
        for cells in reader:
            if len(cells) > 1 or "".join(cells).strip():
                found.append((begin, cells))
            begin = reader.line_num + 1
    except csv.Error as error:
        if mark == "\t":
            return lines
        raise DataError(
            f"{path}, line {begin}: {error}: double the quotation marks inside a quoted text"
        ) from None
    return found


def _columns(
    path: Path, names: Sequence[str], label: Column, text: Column
) -> tuple[int, list[int]]:
    """Return the index of the label column and those of the text columns."""
    place = next(iter(match_names(LABELS, names)), None)
    if label is not None:
        place = locate_column("label", label, names, str(path))
    if text is not None:
        places = [locate_column("text", part, names, str(path)) for part in str(text).split(",")]
    else:
        body = match_names(TEXTS, names)[:1]
        titles = match_names([TITLES], names)[:1]
        places = [*(at for at in titles if at not in body), *body] if body else []
    if place is None or not places:
        missing, option = ("labels", "--label") if place is None else ("texts", "--text")
        raise DataError(
            f"{path}: no column for the {missing}; its columns are {list_names(names)}: "
            f"name it with {option}"
        )
    if place in places:
        raise DataError(
            f"{path}: column {names[place]!r} is given for label and text: name different ones"
        )
    return place, places


def _unnamed(
    path: Path, lines: Sequence[tuple[int, list[str]]], label: Column, text: Column
) -> tuple[int, list[int]]:
    """Return the label column and the text columns of a file without header."""
    names = [str(at + 1) for at in range(len(lines[0][1]))]
    if label is None:
        taken, few = str(text).split(","), max(2, len(lines) // 2)
        ends = [name for name in (names[0], names[-1]) if name not in taken]
        label = next(
            (name for name in ends if len({cells[int(name) - 1] for _, cells in lines[1:]}) <= few),
            None,
        )
    if label is None:
        raise DataError(
            f"{path}: no header, and neither first nor last column looks like labels: "
            "give --label and --text"
        )
    rest = ",".join(name for name in names if name != str(label).strip())
    return _columns(path, names, label, rest if text is None else text)


def _describe(names: Sequence[object], place: int, places: Sequence[int]) -> str:
    return f"label = {names[place]}, text = {' and '.join(str(names[at]) for at in places)}"


def _encode_labels(
    path: Path, rows: Iterable[Row], notes: list[str], known: Sequence[str] | None, skip_empty: bool
) -> LabeledTexts:
    lines, labels, texts = _check_rows(path, rows, notes, skip_empty)
    classes = tuple(sorted(set(labels), key=_order) if known is None else known)
    if len(classes) < 2:
        raise DataError(
            f"{path}: all {len(texts):,} texts have the label {labels[0][:60]!r}: "
            "two classes or more are needed"
        )
    number_of = {name: number for number, name in enumerate(classes)}
    for line, label in zip(lines, labels, strict=True):
        if label not in number_of:
            raise DataError(
                f"{path}, line {line}: unknown label {label[:60]!r}, known are "
                f"{list_names([name[:40] for name in classes])}: correct it or leave the line out"
            )
    numbers = np.array([number_of[label] for label in labels], dtype=np.int64)
    origin = np.array(lines, dtype=np.int64)
    return LabeledTexts(texts, numbers, classes, tuple(notes), str(path), origin)


def _check_rows(
    path: Path, rows: Iterable[Row], notes: list[str], skip_empty: bool
) -> tuple[list[int], list[str], list[str]]:
    """Return lines, labels and texts; missing labels raise, and so do empty texts by default."""
    lines, labels, texts, empty = list[int](), list[str](), list[str](), list[int]()
    for number, label, text in rows:
        if not label.strip():
            raise DataError(
                f"{path}, line {number}: the label is missing: give one, or leave the line out"
            )
        if not has_words(text):
            empty.append(number)
            continue
        lines.append(number)
        labels.append(label.strip())
        texts.append(text)
    if empty and not skip_empty:
        raise DataError(
            f"{path}, line {empty[0]}: a text without a word ({len(empty):,} in all): leave such "
            "lines out, or skip them with --set data.skip_empty=true"
        )
    if empty:
        notes.append(
            f"{len(empty):,} texts without a word were left out, the first on line {empty[0]}"
        )
    if not texts:
        raise DataError(f"{path} holds no texts: give a file of labels and texts")
    return lines, labels, texts


def _order(name: str) -> tuple[float, str]:
    """Sort numbers as numbers, before words."""
    try:
        return (float(name), name) if math.isfinite(float(name)) else (math.inf, name)
    except ValueError:
        return math.inf, name
