"""Scores of word vectors on similarity and analogy files."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import ArgumentError, DataError

COMMON = 30_000  # most frequent keys, among which analogies are answered
READ = 4096  # rows fetched at once
BATCH = 256  # analogies answered at once

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
RowsOf = Callable[[Ids], Any]


def read_pairs(path: str | Path) -> list[tuple[str, str, float]]:
    """Return the pairs of a similarity file: ``word1 word2 score``, separated by space or commas.

    Blank lines and lines that begin with # are skipped.

    >>> path = getfixture("tmp_path") / "pairs.txt"
    >>> _ = path.write_text("# by people\\ntiger\\tcat\\t7.35\\nbook,paper,7.46\\n")
    >>> read_pairs(path)
    [('tiger', 'cat', 7.35), ('book', 'paper', 7.46)]
    """
    pairs = []
    for number, line in _lines(path):
        fields = _fields(line)
        score = _number(fields[-1])
        if len(fields) != 3 or not all(fields) or score is None:
            raise DataError(
                f"{path}, line {number} is {line!r}: "
                "a similarity file has two words and a finite score a line"
            )
        pairs.append((fields[0], fields[1], score))
    return pairs


def read_analogies(path: str | Path) -> list[tuple[str, str, str, str]]:
    """Return the questions "a is to b as c is to d" of an analogy file.

    A line has four words; sections begin with ":". Blank lines and lines that begin with # are
    skipped. The format is that of Mikolov et al., "Efficient estimation of word representations in
    vector space", 2013 (questions-words.txt).

    >>> path = getfixture("tmp_path") / "questions.txt"
    >>> _ = path.write_text(": capitals\\nAthens Greece Oslo Norway\\n")
    >>> read_analogies(path)
    [('Athens', 'Greece', 'Oslo', 'Norway')]
    """
    questions = []
    for number, line in _lines(path):
        if line.startswith(":"):
            continue
        fields = line.split()
        if len(fields) != 4:
            raise DataError(
                f"{path}, line {number} is {line!r}: "
                "an analogy file has four words a line, or ':' and a section"
            )
        questions.append((fields[0], fields[1], fields[2], fields[3]))
    return questions


def score_words(
    rows_of: RowsOf, keys: Sequence[str], files: Iterable[str | Path]
) -> list[dict[str, Any]]:
    """Return the score of word vectors on each similarity or analogy file.

    ``rows_of(ids [B]) -> [B, d]`` returns rows (``matrix.__getitem__``, or that of a packed table),
    ``keys`` are their words, most frequent first. A word that is not among the keys is looked up in
    lower case; a line with an unknown word is ignored.

    - similarity: Spearman's rank correlation of the given scores with the cosines of the rows; ties
      share their average rank
    - analogy: share of questions for which ``d = argmax_x cos(x, b - a + c)`` over unit rows x
      other than a, b, c (3CosAdd; Levy and Goldberg, "Linguistic regularities in sparse and
      explicit word representations", 2014), all within the first 30,000 keys, as is usual

    The score is NaN if it is undefined: no line was used, or all values are equal.

    >>> path = getfixture("tmp_path") / "pairs.txt"
    >>> _ = path.write_text("cat dog 9\\ncat Car 2\\ndog car 3\\ncat unicorn 5\\n")
    >>> rows = np.array([[1, 0], [0.8, 0.6], [0, 1]], np.float32)
    >>> score_words(rows.__getitem__, ["cat", "dog", "car"], [path])
    [{'file': 'pairs.txt', 'kind': 'similarity', 'used': 3, 'of': 4, 'score': 1.0}]
    """
    found = []
    for path in files:
        if is_analogies(path):
            kind, (used, total, score) = "analogy", _analogies(rows_of, keys, read_analogies(path))
        else:
            kind, (used, total, score) = "similarity", _similarity(rows_of, keys, read_pairs(path))
        scored = {"used": used, "of": total, "score": score}
        found.append({"file": Path(path).name, "kind": kind, **scored})
    return found


def is_analogies(path: str | Path) -> bool:
    """Return whether the first line is a section or four words, none of them a number.

    >>> path = getfixture("tmp_path") / "questions.txt"
    >>> _ = path.write_text("Athens Greece Oslo Norway\\n")
    >>> is_analogies(path)
    True
    """
    line = next(_lines(path))[1]
    fields = line.split()
    words = all(_number(field) is None for field in fields)
    return line.startswith(":") or (len(fields) == 4 and words)


def spearman(left: Sequence[float] | NDArray[Any], right: Sequence[float] | NDArray[Any]) -> float:
    """Return Spearman's rank correlation; NaN if one side is constant or empty.

    >>> spearman([1, 2, 3, 4], [10, 30, 20, 40])
    0.8
    """
    if len(left) != len(right):
        raise ArgumentError(
            f"{len(left)} values against {len(right)}: a correlation needs as many on both sides"
        )
    if not len(left):
        return math.nan
    ranks = (_ranks(np.asarray(left)), _ranks(np.asarray(right)))
    first, second = (one - one.mean() for one in ranks)
    length = math.sqrt(float(first @ first) * float(second @ second))
    return float(first @ second) / length if length else math.nan


def _ranks(values: NDArray[Any]) -> NDArray[np.float64]:
    """Return the rank of each value from 1; equal values share the average of their places."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    average: NDArray[np.float64] = (last - (counts - 1) / 2)[place]
    return average


def _similarity(
    rows_of: RowsOf, keys: Sequence[str], pairs: list[tuple[str, str, float]]
) -> tuple[int, int, float]:
    """Return pairs used, pairs in all, and Spearman's correlation of scores and cosines."""
    wanted = {form for one, two, _ in pairs for word in (one, two) for form in (word, word.lower())}
    index = _index(keys, wanted)
    found = [(_find(one, index), _find(two, index), score) for one, two, score in pairs]
    used = [(one, two, score) for one, two, score in found if one is not None and two is not None]
    if not used:
        return 0, len(pairs), math.nan
    ids = np.array([(one, two) for one, two, _ in used], np.int64)
    rows, place = _unit_rows_once(rows_of, ids)
    cosines = np.einsum("nd,nd->n", rows[place[:, 0]], rows[place[:, 1]], dtype=np.float64)
    cosines = np.round(cosines, 6)  # beyond is noise of float32, which would break ties
    return len(used), len(pairs), spearman([score for _, _, score in used], cosines)


def _analogies(
    rows_of: RowsOf, keys: Sequence[str], questions: list[tuple[str, str, str, str]]
) -> tuple[int, int, float]:
    """Return questions used, questions in all, and the share answered by the right word."""
    common = keys[:COMMON]
    wanted = {form for question in questions for word in question for form in (word, word.lower())}
    index = _index(common, wanted)
    found = [[_find(word, index) for word in question] for question in questions]
    known = np.array([ids for ids in found if None not in ids], np.int64).reshape(-1, 4)
    if not len(known):
        return 0, len(questions), math.nan
    rows = _unit_rows(rows_of, np.arange(len(common)))
    right = 0
    for start in range(0, len(known), BATCH):
        given, answers = known[start : start + BATCH, :3], known[start : start + BATCH, 3]
        a, b, c = (rows[given[:, column]] for column in range(3))
        scores = (b - a + c) @ rows.T
        np.put_along_axis(scores, given, -np.inf, axis=1)
        possible = (given != answers[:, None]).all(axis=1)  # excluded answers cannot be found
        right += int(np.count_nonzero((scores.argmax(axis=1) == answers) & possible))
    return len(known), len(questions), right / len(known)


def _index(keys: Sequence[str], wanted: set[str]) -> dict[str, int]:
    """Return the id of each wanted word; the first of equal keys counts."""
    index: dict[str, int] = {}
    for number, key in enumerate(keys):
        if key in wanted:
            index.setdefault(key, number)
    return index


def _find(word: str, index: dict[str, int]) -> int | None:
    """Return the id of a word, or of the word in lower case, or None."""
    return index.get(word, index.get(word.lower()))


def _unit_rows_once(rows_of: RowsOf, ids: Ids) -> tuple[Floats, Ids]:
    """Return the unit rows of all distinct ids, and the index of each id's row."""
    distinct, place = np.unique(ids, return_inverse=True)
    return _unit_rows(rows_of, distinct), place.reshape(ids.shape)


def _unit_rows(rows_of: RowsOf, ids: Ids) -> Floats:
    """Return the rows of ids divided by their length, fetched in blocks; a row of zeros stays."""
    blocks = []
    for start in range(0, len(ids), READ):
        block = ids[start : start + READ]
        rows = np.asarray(rows_of(block), np.float64)  # squares of large float32 would overflow
        if rows.ndim != 2 or len(rows) != len(block):
            raise ArgumentError(
                f"rows_of returned shape {rows.shape} for {len(block)} ids: "
                f"it must return [{len(block)}, d]"
            )
        length = np.sqrt(np.square(rows).sum(axis=1, keepdims=True))
        if not np.isfinite(length).all():
            raise ArgumentError(
                "rows_of returned values that are not finite, which have no cosine: "
                "correct these rows first"
            )
        blocks.append((rows / np.where(length == 0, 1, length)).astype(np.float32))
    return np.concatenate(blocks)


def _lines(path: str | Path) -> Iterator[tuple[int, str]]:
    """Yield number and text of the lines that are not blank or comments; refuse a file of none."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} cannot be read as UTF-8 text ({error}): give a similarity or an analogy file"
        ) from None
    lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), 1)]
    lines = [(number, line) for number, line in lines if line and not line.startswith("#")]
    if not lines:
        raise DataError(f"{path} has no lines of data: give a similarity or an analogy file")
    yield from lines


def _fields(line: str) -> list[str]:
    """Return the fields of a line, separated by commas, or else by space."""
    return [field.strip() for field in line.split(",")] if "," in line else re.split(r"\s+", line)


def _number(text: str) -> float | None:
    """Return the finite number a field holds, or None."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
