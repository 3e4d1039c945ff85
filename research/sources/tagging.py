"""Sentences with named entities: CoNLL-2003 (Tjong Kim Sang and De Meulder 2003), and generated ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from featherbed.errors import DataError
from featherbed.io.opening import open_stream
from research.sources.texts import folder_of

PARTS = ("eng.train", "eng.testa", "eng.testb")  # training, validation, test
COLUMNS = 4  # word, part of speech, chunk, entity
TYPES = ("PER", "LOC", "ORG", "MISC")
Span = tuple[int, int, str]  # first word, word after the last, type


@dataclass(frozen=True)
class Sentence:
    """The words of a sentence and its entities."""

    words: tuple[str, ...]
    entities: tuple[Span, ...]

    def tags(self, scheme: str = "iob2") -> list[str]:
        """Return a tag for each word: IOB2, or IOBES, which marks ends and single words too.

        >>> Sentence(("New", "York", "beat", "Ajax"), ((0, 2, "LOC"), (3, 4, "ORG"))).tags("iobes")
        ['B-LOC', 'E-LOC', 'O', 'S-ORG']
        """
        found = ["O"] * len(self.words)
        for start, stop, kind in self.entities:
            found[start:stop] = [f"B-{kind}"] + [f"I-{kind}"] * (stop - start - 1)
            if scheme == "iobes":
                found[stop - 1] = f"{'E' if stop - start > 1 else 'S'}-{kind}"
        return found


@dataclass(frozen=True)
class Tagged:
    """Training, validation and test sentences."""

    train: list[Sentence]
    validation: list[Sentence]
    test: list[Sentence]


def entities_of(tags: list[str]) -> tuple[Span, ...]:
    """Return the entities of IOB1 or IOB2 tags.

    In IOB1, B- begins an entity only where one of the same type ends right before it.

    >>> entities_of(["I-PER", "I-PER", "B-PER", "I-LOC", "O"])
    ((0, 2, 'PER'), (2, 3, 'PER'), (3, 4, 'LOC'))
    """
    found: list[Span] = []
    for place, tag in enumerate(tags):
        mark, _, kind = tag.partition("-")
        if mark == "O":
            continue
        if mark == "I" and found and found[-1][1:] == (place, kind):
            found[-1] = found[-1][0], place + 1, kind
        else:
            found.append((place, place + 1, kind))
    return tuple(found)


def open_tagged(name: str, data: str | Path | None = None, quick: bool = False) -> Tagged:
    """Return the sentences of CoNLL-2003, from below ``data`` or $FEATHERBED_DATA; ``quick``: generated ones.

    >>> len(open_tagged("conll2003", quick=True).train)
    96
    """
    if quick:
        return generated_sentences()
    files = ", ".join(PARTS)
    folder = folder_of(name, data, f"{files} (word, part of speech, chunk and entity a line)")
    return Tagged(*(read_conll(folder, part) for part in PARTS))


def read_conll(folder: Path, name: str) -> list[Sentence]:
    """Return the sentences of a file of CoNLL-2003, plain or compressed; marks of documents are left out."""
    path = next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)
    if path is None:
        held = ", ".join(sorted(p.name for p in folder.iterdir())) or "nothing"
        raise DataError(f"{folder} holds no {name}, plain or as .gz, but {held}: put it there")
    with open_stream(path) as (stream, _):
        found = [*_sentences(path, stream.read().decode("utf-8", "replace").split("\n"))]
    if not found:
        raise DataError(f"{path} holds no sentences: one word a line, a blank line between two")
    return found


def _sentences(path: Path, lines: list[str]) -> Iterator[Sentence]:
    words: list[str] = []
    tags: list[str] = []
    for number, line in enumerate([*lines, ""], 1):
        cells = line.split()
        if cells and cells[0] != "-DOCSTART-":
            mark, _, kind = cells[-1].partition("-")
            if len(cells) != COLUMNS or not (cells[-1] == "O" or (mark in "BI" and kind in TYPES)):
                raise DataError(
                    f"{path}, line {number}: {line[:60]!r} is no word, part of speech, chunk and "
                    f"entity (O, or I- or B- and one of {', '.join(TYPES)})"
                )
            words.append(cells[0])
            tags.append(cells[-1])
        elif words:
            yield Sentence(tuple(words), entities_of(tags))
            words, tags = [], []


def generated_sentences(train: int = 96, others: int = 32) -> Tagged:
    """Return short sentences of made-up words; names of each type begin with one of two syllables of their own."""
    rng = np.random.default_rng(0)
    heads = dict(
        zip(TYPES, (("Par", "Pel"), ("Lok", "Lam"), ("Orn", "Oks"), ("Mis", "Mon")), strict=True)
    )

    def sentence() -> Sentence:
        words: list[str] = []
        entities: list[Span] = []
        for _ in range(int(rng.integers(2, 6))):
            words += [f"w{number}" for number in rng.integers(40, size=rng.integers(1, 4))]
            kind, length = str(rng.choice(TYPES)), int(rng.integers(1, 3))
            entities.append((len(words), len(words) + length, kind))
            words += [
                f"{heads[kind][number % 2]}{number}" for number in rng.integers(30, size=length)
            ]
        return Sentence(tuple(words), tuple(entities))

    return Tagged(*([sentence() for _ in range(count)] for count in (train, others, others)))
