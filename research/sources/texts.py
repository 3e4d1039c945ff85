"""Texts that experiments run on: labelled texts and corpora for language models, or generated ones."""

from __future__ import annotations

import atexit
import csv
import gzip
import re
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.apps.classifier.data import TextData, TextVocabularySettings, prepare
from featherbed.errors import ArgumentError, DataError
from featherbed.io.opening import DATA_VARIABLE, find_data, read_text
from featherbed.io.texts import END, Corpus, LabeledTexts, read_corpus, read_ptb, read_texts

TEXTS = {  # folder: possible names of the training file; the test file is test.csv or test.tsv
    "ag-news": ("train.csv", "train_subset.csv"),
    "dbpedia": ("train.csv",),
    "sogou-news": ("train.csv",),
    "yelp-review": ("train.csv",),
    "imdb": ("train.tsv",),
    "sst2": ("train.tsv",),
}
TEST = ("test.csv", "test.tsv", "dev.tsv")  # the labels of SST-2's test part are not public
ENDINGS = ("", ".gz", ".xz", ".bz2")
BROWN = r"brown/c[a-r]\d\d"  # its documents, inside brown.zip
PROBE_TEXTS = 6_000
PROBE_COLUMNS = {"sst2": ("sentence", "label"), "imdb": ("text", "label")}
WIKI = tuple(f"wiki.{part}.tokens" for part in ("train", "valid", "test"))


@dataclass
class TextSource:
    """Labelled texts for training and testing; ``prepared`` splits them by a seed and turns them into ids.

    >>> source = open_texts("ag-news", quick=True)
    >>> prepared = source.prepared(0, length=20)
    >>> len(prepared.classes), len(prepared.test), source.prepared(0, length=20) is prepared
    (4, 120, True)
    """

    train: LabeledTexts
    test: LabeledTexts
    _last: tuple[Any, TextData | None] = field(default=(None, None), repr=False)

    def prepared(self, seed: int, **how: Any) -> TextData:
        """Return the parts of a seed; the last ones are kept, for rows are run seed after seed."""
        key, found = self._last
        wanted = (seed, tuple(sorted(how.items())))
        if found is None or key != wanted:
            rest = dict(how)
            parts = {"validation": rest.pop("validation")} if "validation" in rest else {}
            if "most" in rest:
                rest["max_words"] = rest.pop("most")
            vocabulary = TextVocabularySettings(**rest)
            found = prepare(self.train, self.test, vocabulary, seed=seed, **parts)
            self._last = wanted, found
        return found


def open_texts(name: str, data: str | Path | None = None, quick: bool = False) -> TextSource:
    """Return the labelled texts called ``name``, from below ``data`` or $FEATHERBED_DATA; ``quick``: generated ones."""
    if name not in TEXTS:
        raise ArgumentError(f"data={name!r}: texts are classified on {', '.join(TEXTS)}")
    if quick:
        return generated_texts()
    folder = folder_of(name, data, f"{TEXTS[name][0]} and test.csv (class, title, content)")
    train = read_texts(_file(folder, TEXTS[name]))
    return TextSource(train, read_texts(_file(folder, TEST), classes=train.classes))


@dataclass(frozen=True)
class TextFiles:
    """The training and the test file of labelled texts, for what reads files itself."""

    train: Path
    test: Path


def open_files(name: str, data: str | Path | None = None, quick: bool = False) -> TextFiles:
    """Return the files of the labelled texts called ``name``; ``quick``: generated ones.

    >>> open_files("ag-news", quick=True).train.name
    'train.csv'
    """
    if name not in TEXTS:
        raise ArgumentError(f"data={name!r}: texts are classified on {', '.join(TEXTS)}")
    if not quick:
        folder = folder_of(name, data, f"{TEXTS[name][0]} and test.csv (class, title, content)")
        return TextFiles(_file(folder, TEXTS[name]), _file(folder, TEST))
    place, source = Path(mkdtemp()), generated_texts()
    atexit.register(rmtree, place, ignore_errors=True)
    paths = place / "train.csv", place / "test.csv"
    for path, part in zip(paths, (source.train, source.test), strict=True):
        with path.open("w", newline="", encoding="utf-8") as file:
            rows = zip(part.labels.tolist(), part.texts, strict=True)
            writer = csv.writer(file, quoting=csv.QUOTE_ALL)
            writer.writerows([label + 1, "", text] for label, text in rows)
    return TextFiles(*paths)


def open_sentences(name: str, data: str | Path | None = None, quick: bool = False) -> list[str]:
    """Return the English sentences of Multi30k; ``quick``: generated ones."""
    if quick:
        return [*generated_texts().train.texts]
    with gzip.open(
        folder_of(name, data, "train.en.gz") / "train.en.gz", "rt", encoding="utf-8"
    ) as lines:
        return [line.strip() for line in lines]


@dataclass(frozen=True)
class StaticTests:
    """Tests of static encoders: word pairs with scores by set, and labelled texts by task."""

    words: dict[str, tuple[list[str], list[str], Any]]
    probes: dict[str, tuple[list[str], Any, list[str], Any]]


def open_static(name: str, data: str | Path | None = None, quick: bool = False) -> StaticTests:
    """Return word-similarity sets below ``name``, SST-2 (its dev sentences as test), part of IMDB.

    >>> sorted(open_static("words", quick=True).probes)
    ['imdb', 'sst2']
    """
    rng = np.random.default_rng(0)
    if quick:
        source = generated_texts()
        known = sorted({word for text in source.train.texts for word in text.split()})[:60]
        sets = {"pairs": (known[:30], known[30:60], rng.random(30))}
        part = (
            list(source.train.texts),
            source.train.labels,
            list(source.test.texts),
            source.test.labels,
        )
        return StaticTests(sets, {"sst2": part, "imdb": part})
    folder = folder_of(name, data, "EN-*.txt: two words and a score a line")
    sets = {}
    for path in sorted(folder.glob("EN-*.txt")):
        lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
        first, second, scores = zip(*(line for line in lines if len(line) == 3), strict=True)
        sets[path.stem] = (list(first), list(second), np.array(scores, dtype=float))
    probes = {}
    for task, files in (("sst2", ("train.tsv", "dev.tsv")), ("imdb", ("train.tsv", "test.tsv"))):
        place = folder_of(task, data, " and ".join(files))
        parts: list[Any] = []
        for number, file in enumerate(files):
            texts, labels = _labelled(_file(place, (file,)), PROBE_COLUMNS[task])
            drawn = rng.permutation(len(texts))[:PROBE_TEXTS]
            if task == "sst2" and number == 1:
                drawn = np.arange(len(texts))
            parts += [[texts[i] for i in drawn], labels[drawn]]
        probes[task] = (parts[0], parts[1], parts[2], parts[3])
    return StaticTests(sets, probes)


def _labelled(path: Path, columns: tuple[str, str]) -> tuple[list[str], NDArray[np.int64]]:
    """Return the texts and labels of a tab-separated file with a header."""
    header, *rows = (line.split("\t") for line in read_text(path).rstrip("\n").split("\n"))
    text, label = (header.index(column) for column in columns)
    return [row[text] for row in rows], np.array([int(row[label]) for row in rows])


def open_nothing(name: str, data: str | Path | None = None, quick: bool = False) -> None:
    """Return nothing: the runner makes its own data."""


def open_corpus(name: str, data: str | Path | None = None, quick: bool = False) -> Corpus:
    """Return the text for language models called ``name``; ``quick``: a generated one.

    >>> corpus = open_corpus("ptb", quick=True)
    >>> len(corpus.words), len(corpus.train)
    (602, 6000)
    """
    if name not in CORPORA:
        raise ArgumentError(f"data={name!r}: language models are trained on {', '.join(CORPORA)}")
    if quick:
        return generated_corpus()
    files = {"ptb": "ptb.*.txt", "brown": "brown.zip"}
    return CORPORA[name](folder_of(name, data, files.get(name, ", ".join(WIKI))))


def folder_of(name: str, data: str | Path | None, files: str) -> Path:
    """Return the folder of a data set, or say where to put which files."""
    try:
        if data is None:
            return find_data(name)
    except DataError as error:
        raise DataError(f"{error}; folder {name} holds {files}") from None
    if not (Path(data) / name).is_dir():
        raise DataError(
            f"{data} holds no folder {name} with {files}: give --data, or {DATA_VARIABLE}, the folder that holds it"
        )
    return Path(data) / name


def _file(folder: Path, names: tuple[str, ...]) -> Path:
    for name in names:
        for ending in ENDINGS:
            if (folder / (name + ending)).is_file():
                return folder / (name + ending)
    raise DataError(
        f"{folder} holds no {' or '.join(names)}, plain or compressed: put it there, class, title and content a line"
    )


def _wikitext(folder: Path) -> Corpus:
    train, validation, test = (folder / name for name in WIKI)
    return read_corpus([train, validation, test])


def read_brown(folder: Path) -> Corpus:
    """Return the Brown corpus with its whole vocabulary, case kept, the most frequent words first.

    Of ten documents the ninth validates and the tenth tests. Every line ends with ``<eos>``.
    """
    with zipfile.ZipFile(folder / "brown.zip") as archive:
        names = sorted(name for name in archive.namelist() if re.fullmatch(BROWN, name))
        texts = [archive.read(name).decode() for name in names]
    if not texts:
        raise DataError(f"{folder / 'brown.zip'} holds no documents called brown/ca01 and so on")
    parts: list[list[str]] = [[], [], []]
    for number, text in enumerate(texts):
        part = parts[max(0, number % 10 - 7)]
        for line in filter(None, map(str.split, text.splitlines())):
            part += [token.rpartition("/")[0] for token in line]
            part.append(END)
    counts, every = Counter(parts[0]), Counter(word for part in parts for word in part)
    words = sorted(every, key=lambda word: (-counts[word], -every[word], word))
    place = {word: number for number, word in enumerate(words)}
    ids = [np.array([place[word] for word in part], dtype=np.int64) for part in parts]
    return Corpus(tuple(words), np.bincount(ids[0], minlength=len(words)), *ids)


CORPORA: dict[str, Callable[[Path], Corpus]] = {
    "ptb": read_ptb,
    "brown": read_brown,
    "wikitext-2": _wikitext,
    "wikitext-103": _wikitext,
}


def generated_texts(
    train: int = 480, test: int = 120, classes: int = 4, own: int = 40, common: int = 60
) -> TextSource:
    """Return short texts, a third of whose words are of their class; frequencies of words fall as Zipf's law says."""
    rng = np.random.default_rng(0)

    def drawn(count: int, words: int) -> Any:
        chances = 1.0 / np.arange(1, words + 1)
        return rng.choice(words, size=count, p=chances / chances.sum())

    def part(count: int) -> LabeledTexts:
        labels = rng.integers(classes, size=count)
        texts = []
        for label in labels.tolist():
            length = int(rng.integers(8, 16))
            found = [f"word{word}" for word in drawn(length, common)]
            found += [f"topic{label}word{word}" for word in drawn(max(1, length // 2), own)]
            texts.append(" ".join(rng.permutation(found).tolist()))
        return LabeledTexts(
            texts, labels.astype(np.int64), tuple(f"class {label}" for label in range(classes))
        )

    return TextSource(part(train), part(test))


def generated_corpus(words: int = 600, count: int = 6000) -> Corpus:
    """Return a chain of words, each followed by one of four; ``<eos>`` and ``<unk>`` are there and never occur."""
    rng = np.random.default_rng(0)
    following = rng.integers(words, size=(words, 4))

    def chain(length: int) -> Any:
        picks, found = (
            rng.choice(4, size=length, p=(0.55, 0.25, 0.15, 0.05)),
            np.zeros(length, dtype=np.int64),
        )
        for place in range(1, length):
            found[place] = following[found[place - 1], picks[place]]
        return found

    parts = [chain(count), chain(count // 10), chain(count // 10)]
    names = (*(f"word{number}" for number in range(words)), "<eos>", "<unk>")
    return Corpus(names, np.bincount(parts[0], minlength=len(names)), *parts)
