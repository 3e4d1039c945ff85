"""Labelled texts out of CSV, TSV, JSON lines or fastText files, and plain text for language models; every line is judged."""

from __future__ import annotations

import csv
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import ArgumentError, DataError
from featherbed.serve.words import has_words, read_text
from featherbed.tasks.data import Corpus
from featherbed.tasks.lines import found_file
from featherbed.tasks.roles import given_column, plain, shown

# Names without case, blanks and signs; the first group that finds a column decides.
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
TITLES = ("title", "subject", "headline", "summary")
FASTTEXT = "__label__"
_PAIRED = re.compile(r'"(?:[^"]|"")*"')
Row = tuple[int, str, str]  # line, label, text
Column = str | int | None


@dataclass(frozen=True)
class Texts:
    """Texts and the number of each one's class; ``path`` and ``lines`` say where they came from.

    >>> texts = Texts(["a good film", "a bad one"], np.array([1, 0]), ("bad", "good"))
    >>> len(texts), texts.names[texts.labels[0]]
    (2, 'good')
    """

    texts: Sequence[str]
    labels: NDArray[np.int64]  # [n]
    names: tuple[str, ...]
    notes: tuple[str, ...] = ()
    path: str = ""
    lines: NDArray[np.int64] | None = field(default=None, repr=False)  # [n]

    def __len__(self) -> int:
        return len(self.texts)

    def where(self, at: int) -> str:
        """Return the place of a text for a message."""
        return f"text {at + 1}" if self.lines is None else f"{self.path}, line {self.lines[at]}"


def read_texts(
    path: str | Path,
    *,
    label: Column = None,
    text: Column = None,
    names: Sequence[str] | None = None,
    header: bool | None = None,
    encoding: str | None = None,
    strict: bool = True,
) -> Texts:
    """Read labelled texts from CSV, TSV, JSON lines or fastText's form, packed by gzip, bzip2, xz or not.

    Args:
        path: the file; its form is found by looking at it.
        label: the column of the labels, by name or by number from 1; guessed if None.
        text: the column of the texts, or several such as "2,3", which are joined by a blank; guessed if None.
        names: the classes there may be, in order; those of the file, sorted, if None.
        header: whether the first line names the columns; guessed if None.
        encoding: of the file; None means UTF-8.
        strict: refuse a text without a word; if not, such texts are left out and counted in ``notes``.

    >>> path = getfixture("tmp_path") / "reviews.csv"
    >>> _ = path.write_text("label,text\\npos,a good film\\nneg,a bad one\\n")
    >>> texts = read_texts(path)
    >>> texts.names, texts.labels.tolist(), texts.texts[0]
    (('neg', 'pos'), [1, 0], 'a good film')
    """
    file = found_file(path)
    content = read_text(file, encoding)
    first = content.lstrip().partition("\n")[0]
    if not first:
        raise DataError(f"{file} is empty: give a file of labels and texts")
    if ".json" in file.name or _object(first) is not None:
        rows, notes = _json(file, content, label, text)
    elif first.startswith(FASTTEXT):
        rows, notes = _fasttext(file, content), ["labels after __label__, as fastText writes them"]
    else:
        rows, notes = _delimited(file, content, label, text, header)
    return _labelled(file, rows, notes, names, strict)


def _json(path: Path, content: str, label: Column, text: Column) -> tuple[Iterable[Row], list[str]]:
    rows: list[Row] = []
    names, place, places = list[str](), 0, list[int]()
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            found = _object(line)
            if found is None:
                form = 'one object a line, such as {"label": "pos", "text": "..."}'
                raise DataError(f"{path}, line {number}: found {line.strip()[:40]!r}: write {form}")
            if not names:
                names = list(found)
                place, places = _columns(path, names, label, text)
            cells = [found.get(names[at]) for at in (place, *places)]
            if any(isinstance(cell, list | dict) for cell in cells):
                raise DataError(
                    f"{path}, line {number}: a list or an object in place of label or text: give a string"
                )
            rows.append((number, _cell(cells[0]), " ".join(filter(None, map(_cell, cells[1:])))))
    return rows, [_said(names, place, places)]


def _object(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _cell(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value)


def _fasttext(path: Path, content: str) -> Iterator[Row]:
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            first, *rest = line.split(maxsplit=1)
            if not first.startswith(FASTTEXT) or "".join(rest).startswith(FASTTEXT):
                raise DataError(
                    f"{path}, line {number}: found {line[:40]!r}: write one {FASTTEXT} and a text a line"
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
                f"{path}, line {number}: {found}: give label and text, and quote texts that hold the delimiter"
            )
    named = any(
        not part.strip().isdigit()
        for given in (label, text)
        if given is not None
        for part in str(given).split(",")
    )
    usual = _guessed(LABELS, first) is not None and _guessed(TEXTS, first) is not None
    if header or (header is None and (named or usual)):
        place, places = _columns(path, first, label, text)
        notes, lines = [_said(first, place, places)], lines[1:]
    else:
        place, places = _unnamed(path, lines, label, text)
        notes = [f"no header: {_said(range(1, len(first) + 1), place, places)}"]
        often = Counter(cells[place] for _, cells in lines)
        if (
            header is None
            and often.pop(first[place]) == 1
            and len(often) > 1
            and min(often.values()) > 1
        ):
            notes = [
                f"the first line was taken for a header: its label {first[place][:40]!r} stands nowhere else",
                *notes,
            ]
            lines = lines[1:]
    return (
        (number, cells[place], " ".join(cells[at] for at in places if cells[at]))
        for number, cells in lines
    ), notes


def _split(path: Path, content: str) -> list[tuple[int, list[str]]]:
    """Return the lines of delimited text, with the number each begins on and its cells."""
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


def _guessed(groups: Sequence[str], names: Sequence[str]) -> int | None:
    return next(
        (at for group in groups for at, name in enumerate(names) if plain(name) in group.split()),
        None,
    )


def _columns(
    path: Path, names: Sequence[str], label: Column, text: Column
) -> tuple[int, list[int]]:
    """Return the places of the label and of the texts among named columns."""
    place = (
        _guessed(LABELS, names) if label is None else given_column("label", label, names, str(path))
    )
    if text is not None:
        places = [given_column("text", part, names, str(path)) for part in str(text).split(",")]
    else:
        body = _guessed(TEXTS, names)
        titles = [at for at, name in enumerate(names) if plain(name) in TITLES]
        places = [] if body is None else [*(at for at in titles[:1] if at != body), body]
    if place is None or not places:
        missing, option = ("labels", "--label") if place is None else ("texts", "--text")
        raise DataError(
            f"{path}: no column for the {missing}; its columns are {shown(names)}: name it by {option}"
        )
    if place in places:
        raise DataError(
            f"{path}: column {names[place]!r} is given for label and text: name different ones"
        )
    return place, places


def _unnamed(
    path: Path, lines: Sequence[tuple[int, list[str]]], label: Column, text: Column
) -> tuple[int, list[int]]:
    """Return the places of the label and of the texts where columns have numbers only."""
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
            f"{path}: no header, and neither first nor last column looks like labels: give --label and --text"
        )
    rest = ",".join(name for name in names if name != str(label).strip())
    return _columns(path, names, label, rest if text is None else text)


def _said(names: Sequence[object], place: int, places: Sequence[int]) -> str:
    return f"label = {names[place]}, text = {' and '.join(str(names[at]) for at in places)}"


def _labelled(
    path: Path, rows: Iterable[Row], notes: list[str], names: Sequence[str] | None, strict: bool
) -> Texts:
    kept, empty = list[Row](), list[int]()
    for number, label, text in rows:
        if not label.strip():
            raise DataError(
                f"{path}, line {number}: the label is missing: give one, or leave the line out"
            )
        if has_words(text):
            kept.append((number, label.strip(), text))
        else:
            empty.append(number)
    if empty and strict:
        found = f"a text without a word ({len(empty):,} in all)"
        raise DataError(
            f"{path}, line {empty[0]}: {found}: leave such lines out, or skip them (strict=False, --skip-empty)"
        )
    if empty:
        notes = [
            *notes,
            f"{len(empty):,} texts without a word were left out, the first on line {empty[0]}",
        ]
    if not kept:
        raise DataError(f"{path} holds no texts: give a file of labels and texts")
    lines, labels, texts = zip(*kept, strict=True)
    classes = tuple(sorted(set(labels), key=_order) if names is None else names)
    if len(classes) < 2:
        raise DataError(
            f"{path}: all {len(texts):,} texts have the label {labels[0][:60]!r}: two classes or more are needed"
        )
    number_of = {name: number for number, name in enumerate(classes)}
    for line, label in zip(lines, labels, strict=True):
        if label not in number_of:
            known = shown([name[:40] for name in classes])
            raise DataError(
                f"{path}, line {line}: unknown label {label[:60]!r}, known are {known}: correct it or leave it out"
            )
    numbers = np.array([number_of[label] for label in labels], dtype=np.int64)
    return Texts(texts, numbers, classes, tuple(notes), str(path), np.array(lines, dtype=np.int64))


def _order(name: str) -> tuple[float, str]:
    """Sort numbers as numbers, before words."""
    try:
        return (float(name), name) if math.isfinite(float(name)) else (math.inf, name)
    except ValueError:
        return math.inf, name


def read_sentences(
    paths: Sequence[str | Path],
    *,
    cut: Callable[[str], list[str]] = str.split,
    validation: float = 0.1,
    test: float = 0.1,
    min_count: int = 1,
    most: int | None = None,
    encoding: str | None = None,
) -> Corpus:
    """Read plain text for a language model, a sentence a line; ``<eos>`` ends a line, ``<unk>`` is unknown.

    Args:
        paths: the training, validation and test files; of one file the last lines are held out.
        cut: how a line becomes words: between blanks, or by ``featherbed.serve.words.tokenize``.
        validation: the share of the lines of a single file that is the validation part; ``test`` likewise.
        min_count: rarer words are unknown.
        most: the largest size of the vocabulary, ``<unk>`` and ``<eos>`` included.

    >>> path = getfixture("tmp_path") / "all.txt"
    >>> _ = path.write_text("the cat sat\\n" * 10)
    >>> corpus = read_sentences([path])
    >>> corpus.words, len(corpus.train), len(corpus.validation), len(corpus.test)
    (('the', 'cat', 'sat', '<eos>', '<unk>'), 32, 4, 4)
    """
    if len(paths) not in (1, 3):
        raise ArgumentError(
            f"{len(paths)} files: give one, or three for training, validation and test"
        )
    if (
        min(validation, test) <= 0
        or validation + test >= 1
        or min_count < 1
        or (most is not None and most < 4)
    ):
        raise ArgumentError(
            f"{validation=}, {test=}, {min_count=}, {most=}: shares below 1, counts from 1, sizes from 4 on"
        )
    files = [found_file(path) for path in paths]
    parts = [read_text(file, encoding).removesuffix("\n").split("\n") for file in files]
    for file, part in zip(files, parts, strict=True):
        if part == [""]:
            raise DataError(f"{file} is empty: give text, a sentence a line")
    if len(parts) == 1:
        size = len(parts[0])
        cuts = [
            size - max(1, round(test * size)) - max(1, round(validation * size)),
            size - max(1, round(test * size)),
        ]
        if cuts[0] < 1:
            raise DataError(
                f"{files[0]} has {size} lines: give three or more, some are held out, or three files"
            )
        parts = [parts[0][: cuts[0]], parts[0][cuts[0] : cuts[1]], parts[0][cuts[1] :]]
    flat = [[word for line in part for word in (*cut(line), "<eos>")] for part in parts]
    for file, words in zip(files * (4 - len(files)), flat, strict=False):
        if set(words) == {"<eos>"}:
            raise DataError(f"{file} holds no words: give text, a sentence a line")
    often = Counter({"<unk>": 0})
    often.update(flat[0])
    special = ("<unk>", "<eos>")
    common = [
        word for word, count in often.most_common() if count >= min_count and word not in special
    ]
    kept = {*special, *(common if most is None else common[: most - 2])}
    for word in [word for word in often if word not in kept]:
        often["<unk>"] += often.pop(word)
    if len(often) < 4:
        raise DataError(
            f"{files[0]} holds fewer than two different words: a vocabulary needs two or more"
        )
    found = tuple(word for word, _ in often.most_common())
    id_of = {word: number for number, word in enumerate(found)}
    ids = [
        np.array([id_of.get(word, id_of["<unk>"]) for word in words], dtype=np.int64)
        for words in flat
    ]
    return Corpus(found, np.array([often[word] for word in found]), *ids)
