"""Plain text for language models: the files of each part, statistics, text in columns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from torch import Tensor

from featherbed.apps.words import Lexicon
from featherbed.errors import ArgumentError
from featherbed.graphs import Graph, cooccurrence_counts
from featherbed.io.texts import END, UNKNOWN, Corpus

WINDOW = 10  # distance of words that co-occur
LENGTH_STD, MIN_LENGTH = 5.0, 5  # of random lengths, as in Merity et al. 2017
PROMPTS, PROMPT_WORDS = 3, 4  # continued in the report, words of each


def order_by_role(paths: Sequence[str | Path]) -> list[Path]:
    """Return three files in the order train, validation, test if their names tell the role.

    >>> paths = order_by_role(["ptb.test.txt", "ptb.train.txt", "ptb.valid.txt"])
    >>> [path.name for path in paths]
    ['ptb.train.txt', 'ptb.valid.txt', 'ptb.test.txt']
    """
    files = [Path(path) for path in paths]
    roles = (("train",), ("valid", "dev"), ("test",))
    found = [
        [path for path in files if any(word in path.name.lower() for word in words)]
        for words in roles
    ]
    is_clear = len(files) == 3 and all(len(some) == 1 for some in found)
    return [some[0] for some in found] if is_clear else files


def corpus_lexicon(corpus: Corpus, min_cooccurrence: int = 5) -> Lexicon:
    """Return the statistics of the training text for the selection of words; lines are documents.

    >>> text = np.array([0, 0, 1, 0])
    >>> corpus = Corpus(("a", "<eos>"), np.array([3, 1]), text, text[:1], text[:1])
    >>> corpus_lexicon(corpus).documents().toarray()
    array([[2, 1],
           [1, 0]])
    """

    def cooccurrence() -> csr_array:
        return cooccurrence_counts(corpus.train, len(corpus.words), window=WINDOW)

    return Lexicon(
        corpus.words,
        corpus.counts,
        documents=lambda: _line_counts(corpus),
        cooccurrence=cooccurrence,
        related=lambda: Graph(cooccurrence() >= min_cooccurrence),
        samples=len(corpus.train),
    )


def _line_counts(corpus: Corpus) -> csr_array:  # -> int64 [lines, V]
    end = corpus.words.index(END) if END in corpus.words else -1
    line = np.concatenate([[0], np.cumsum(corpus.train == end)[:-1]])
    ones = np.ones(len(corpus.train), dtype=np.int64)
    return csr_array((ones, (line, corpus.train)), shape=(int(line[-1]) + 1, len(corpus.words)))


def default_prompts(corpus: Corpus) -> list[str]:
    """Return the first words of some lines of the validation text."""
    text = " ".join(corpus.words[at] for at in corpus.validation[:2000].tolist())
    starts = [" ".join(line.split()[:PROMPT_WORDS]) for line in text.split(END)]
    prompts = [
        start for start in starts if len(start.split()) == PROMPT_WORDS and UNKNOWN not in start
    ]
    return prompts[:PROMPTS] or [""]


def columns(ids: NDArray[np.int64], count: int) -> Tensor:  # [N] -> [N // count, count]
    """Split a text into ``count`` columns that are read in parallel."""
    length = len(ids) // count
    if length < 2:
        raise ArgumentError(f"{len(ids)} words are too few for {count} columns")
    return torch.from_numpy(ids[: length * count].reshape(count, length).T.copy())


def segments(count: int, length: int, seed: Sequence[int] | None = None) -> list[tuple[int, int]]:
    """Split ``count`` positions into segments of ``length``; with ``seed``, of random length.

    As Merity et al. 2017: N(length, 5²), or N(length / 2, 5²) once in twenty, at least 5.

    >>> segments(10, 4)
    [(0, 4), (4, 8), (8, 10)]
    """
    rng = None if seed is None else np.random.default_rng(seed)
    cuts = [0]
    while cuts[-1] < count:
        size = length
        if rng is not None:
            mean = length if rng.random() < 0.95 else length / 2
            size = max(MIN_LENGTH, int(rng.normal(mean, LENGTH_STD)))
        cuts.append(min(count, cuts[-1] + size))
    return list(pairwise(cuts))
