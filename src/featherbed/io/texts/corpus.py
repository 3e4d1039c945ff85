"""Plain text for language models, as word ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import ArgumentError, DataError
from featherbed.io.opening import find_file
from featherbed.io.texts.files import read_text
from featherbed.io.texts.tokenizer import END, UNKNOWN


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
