"""A trained language model, read from its folder: text goes on, texts are measured, with numpy alone.

    i, f, g, o = x W_in^T + h W_hid^T + b,    c' = sigmoid(f) c + sigmoid(i) tanh(g),    h' = sigmoid(o) tanh(c')

layer upon layer (Hochreiter and Schmidhuber 1997, torch's order of gates), then logits h' . row(w) + b_w over all words w: the
rows of the packed table where the softmax is tied to it, those of a matrix where it is not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from featherbed.errors import ArgumentError, FormatError
from featherbed.packed.engine import WORTH
from featherbed.packed.file import check as check_table
from featherbed.packed.matrix import Floats
from featherbed.packed.parts import MOST_DIM, MOST_ROWS
from featherbed.packed.search import Scorer, score_block
from featherbed.packed.table import PackedTable, as_ids
from featherbed.serve.bundle import (
    KINDS,
    LANGUAGE,
    MODEL,
    WORDS,
    Vocabulary,
    decode_weights,
    encode_weights,
    read_said,
    read_table,
    sizes_of,
    vocabulary_of,
    write_bundle,
)
from featherbed.serve.words import PAD, UNKNOWN

VERSION = 1
END = "<eos>"
MOST_LAYERS, MOST_WORDS = 16, 100_000
FEW = 1 << 16  # words that are scored sooner by numpy than the compiled loops are loaded
HELD = 1 << 22  # logits held at once

Ids = NDArray[np.int64]
State = list[tuple[Floats, Floats]]  # of each layer, h and c, [B, hidden]


class Shape(NamedTuple):
    """What a language model is made of: the widths of its layers, and whether its softmax is tied to the table."""

    words: int
    dim: int
    hidden: tuple[int, ...]
    tied: bool

    def arrays(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights by name.

        >>> Shape(9, 4, (6, 4), tied=True).arrays()["layer1.input"]
        (16, 6)
        """
        found: dict[str, tuple[int, ...]] = {"bias": (self.words,)}
        for number, (given, made) in enumerate(pairwise((self.dim, *self.hidden))):
            found |= {
                f"layer{number}.input": (4 * made, given),
                f"layer{number}.hidden": (4 * made, made),
            }
            found[f"layer{number}.bias"] = (4 * made,)
        return found if self.tied else found | {"output": (self.words, self.hidden[-1])}


class LanguageServer:
    """What ``featherbed train lm`` leaves in a folder, ready to go on with a text.

    >>> import featherbed as fb
    >>> rng = np.random.default_rng(0)
    >>> words = ["the", "<eos>", "<unk>", "cat", "sat"]
    >>> cell = rng.normal(size=(16, 4)), rng.normal(size=(16, 4)), np.zeros(16), np.zeros(16)
    >>> folder = getfixture("tmp_path") / "lm"
    >>> write_language(folder, fb.DenseTable.from_dense(rng.normal(size=(5, 4))).pack(), [cell], np.zeros(5), words=words)
    >>> server = LanguageServer.open(folder)
    >>> server.continue_text("the cat", words=3, seed=1) == server.continue_text("the cat", words=3, seed=1)
    True
    >>> 1 < server.perplexity([0, 3, 4, 1] * 5, batch=2) < 1000
    True
    """

    def __init__(
        self,
        table: PackedTable,
        weights: Mapping[str, Floats],
        shape: Shape,
        vocabulary: Vocabulary,
        about: dict[str, Any],
    ) -> None:
        self.table, self.weights, self.shape = table, weights, shape
        self.vocabulary, self.about = vocabulary, about

    @classmethod
    def open(cls, folder: str | Path) -> LanguageServer:
        """Open a folder; a file that is missing, broken or of another model is an error that names it."""
        folder = Path(folder)
        said = read_said(
            folder, LANGUAGE, "language model", VERSION, "featherbed train lm FILES --out DIR"
        )
        shape = Shape(
            said.whole("words", 2, MOST_ROWS),
            said.whole("dim", 1, MOST_DIM),
            sizes_of(said, "hidden", MOST_DIM, MOST_LAYERS),
            said.flag("tied"),
        )
        _check_shape(shape, FormatError)
        table, vocabulary = read_table(
            folder, shape.words, shape.dim, said.choice("vocabulary", ("keys", "list"))
        )
        assert vocabulary is not None
        weights = decode_weights(folder / MODEL, shape.arrays(), said.choice("weights", KINDS))
        return cls(table, weights, shape, vocabulary, said.raw("about"))

    def __repr__(self) -> str:
        layers = " x ".join(map(str, self.shape.hidden))
        return f"LanguageServer({self.shape.words:,} words, layers {layers}, {'' if self.shape.tied else 'not '}tied)"

    def continue_text(
        self, text: str, words: int = 30, seed: int = 0, temperature: float = 0.8
    ) -> str:
        """Return a text with so many words more, each drawn with p(w) ~ exp(logit_w / temperature); at 0 the best is taken.

        Words stand between blanks; the end of a sentence is a line break. Unknown words and padding are never drawn.
        """
        if isinstance(words, bool) or not 0 <= words <= MOST_WORDS:
            raise ArgumentError(f"words={words!r}: ask for 0 to {MOST_WORDS:,} words")
        if not (math.isfinite(temperature) and temperature >= 0):
            raise ArgumentError(
                f"temperature={temperature!r}: give a number from 0 (the best word) up, such as 0.8"
            )
        ids, rng = self.encode(text), np.random.default_rng(seed)
        end, state, hidden = (
            self.vocabulary.find(END),
            self.start(1),
            np.zeros((1, self.shape.hidden[-1]), np.float32),
        )
        for id_ in ids if end is None else [end, *ids]:
            hidden = self.step(np.array([id_]), state)
        out = [
            found for word in (PAD, UNKNOWN) if (found := self.vocabulary.find(word)) is not None
        ]
        drawn = []
        for _ in range(words):
            logits = self.logits(hidden)[0].astype(np.float64)
            if len(out) < len(logits):
                logits[out] = -np.inf
            drawn.append(_draw(logits, temperature, rng))
            hidden = self.step(np.array(drawn[-1:]), state)
        return _joined(text, [self.vocabulary.words[id_] for id_ in drawn])

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text's words; one that is not known as written is looked for in small letters."""
        found, unknown = [], self.vocabulary.find(UNKNOWN)
        for word in text.split():
            id_ = self._id(word)
            id_ = unknown if id_ is None else id_
            if id_ is None:
                raise ArgumentError(
                    f"the word {word[:40]!r} is not known, and the model has no {UNKNOWN}: leave it out"
                )
            found.append(id_)
        return found

    def unknown(self, text: str) -> list[str]:
        """Return the words of a text that the model does not know, each once."""
        return [word for word in dict.fromkeys(text.split()) if self._id(word) is None]

    def _id(self, word: str) -> int | None:
        found = self.vocabulary.find(word)
        return self.vocabulary.find(word.lower()) if found is None else found

    def perplexity(self, ids: ArrayLike, batch: int = 10) -> float:  # [N]
        """Return exp(mean cross-entropy) of a text of word ids, read in ``batch`` columns side by side, as in training."""
        flat = as_ids(ids, self.table.rows).reshape(-1)
        if batch < 1 or len(flat) // batch < 2:
            raise ArgumentError(
                f"{len(flat)} words are too few for {batch} columns: give at least {2 * max(1, batch)}"
            )
        text = flat[: len(flat) // batch * batch].reshape(batch, -1).T  # [T, batch]
        state, step = self.start(batch), max(1, HELD // (batch * self.shape.words))
        total = 0.0
        for begin in range(0, len(text) - 1, step):
            target = text[begin + 1 : begin + 1 + step]
            hidden = np.concatenate(
                [self.step(row, state) for row in text[begin : begin + len(target)]]
            )
            total += _entropy(self.logits(hidden), target.reshape(-1))
        return math.exp(min(total / (batch * (len(text) - 1)), 700.0))

    def start(self, batch: int) -> State:
        """Return the state before the first word."""
        return [
            (np.zeros((batch, size), np.float32), np.zeros((batch, size), np.float32))
            for size in self.shape.hidden
        ]

    def step(self, ids: Ids, state: State) -> Floats:  # [B] -> [B, hidden]
        """Read one word of each column: change the state, return what the last layer says."""
        x = self.table[ids]
        for number, (h, c) in enumerate(state):
            gates = (
                x @ self.weights[f"layer{number}.input"].T
                + h @ self.weights[f"layer{number}.hidden"].T
            )
            i, f, g, o = np.split(gates + self.weights[f"layer{number}.bias"], 4, axis=1)
            c = _sigmoid(f) * c + _sigmoid(i) * np.tanh(g)
            x = (_sigmoid(o) * np.tanh(c)).astype(np.float32)
            state[number] = (x, c.astype(np.float32))
        return x

    def logits(self, hidden: Floats) -> Floats:  # [n, hidden] -> [n, V]
        """Return the logits of every word; few words do not wait for a compiler to be loaded."""
        if not self.shape.tied:
            found: Floats = hidden @ self.weights["output"].T
        elif self.table.rows > FEW or len(hidden) > 1:
            found = self.table.logits(hidden)
        else:
            scorers = [Scorer(band, hidden) for band in self.table.bands]
            found = np.empty((1, self.table.rows), dtype=np.float32)
            for begin in range(0, self.table.rows, WORTH - 1):
                score_block(self.table, scorers, begin, found[:, begin : begin + WORTH - 1])
        scores = (found + self.weights["bias"]).astype(np.float32, copy=False)
        if not np.isfinite(scores).all():
            raise FormatError(
                f"a score is not a finite number: {WORDS} holds values that are none, train again"
            )
        return scores


def write_language(
    folder: str | Path,
    table: PackedTable,
    cells: Sequence[
        Sequence[ArrayLike]
    ],  # of each layer [4h, in], [4h, h], [4h], [4h]: what ``cells()`` of a model returns
    bias: ArrayLike,  # [V]
    *,
    output: ArrayLike | None = None,  # [V, h] where the softmax is not tied to the table
    words: Sequence[str] | None = None,  # one for each row; without it the table's keys
    weights: str = "float32",
    about: dict[str, Any] | None = None,
) -> None:
    """Write a language model into a folder, made where there is none; everything is checked before anything is written."""
    arrays: dict[str, NDArray[np.floating]] = {"bias": np.asarray(bias, dtype=np.float32)}
    hidden = []
    for number, (given, before, *biases) in enumerate(cells):
        arrays[f"layer{number}.input"] = np.asarray(given, dtype=np.float32)
        arrays[f"layer{number}.hidden"] = np.asarray(before, dtype=np.float32)
        arrays[f"layer{number}.bias"] = np.sum(
            [np.asarray(part, dtype=np.float32) for part in biases], axis=0
        )
        hidden.append(arrays[f"layer{number}.hidden"].shape[-1])
    if output is not None:
        arrays["output"] = np.asarray(output, dtype=np.float32)
    shape = Shape(table.rows, table.dim, tuple(hidden), output is None)
    _check_shape(shape, ArgumentError)
    sizes = {name: array.shape for name, array in arrays.items()}
    if sizes != shape.arrays():
        raise ArgumentError(
            f"a model of these sizes takes the arrays {shape.arrays()}, got {sizes}"[:1000]
        )
    vocabulary_of(table, words)
    said: dict[str, Any] = {
        "language": VERSION,
        "words": table.rows,
        "dim": table.dim,
        "hidden": hidden,
        "tied": shape.tied,
    }
    said |= {
        "weights": weights,
        "vocabulary": "keys" if words is None else "list",
        "about": about or {},
    }
    write_bundle(Path(folder), LANGUAGE, said, table, words, encode_weights(arrays, weights))


def check_language(folder: str | Path) -> LanguageServer:
    """Open a folder and read every byte of its table too. Raises FormatError.

    >>> check_language("nothing")
    Traceback (most recent call last):
    featherbed.errors.MissingFileError: nothing: no such folder
    """
    found = LanguageServer.open(folder)
    check_table(Path(folder) / WORDS)
    return found


def _check_shape(shape: Shape, kind: type[ArgumentError] | type[FormatError]) -> None:
    if not 1 <= len(shape.hidden) <= MOST_LAYERS or shape.words < 2:
        raise kind(
            f"{len(shape.hidden)} layers over {shape.words} words: give 1 to {MOST_LAYERS} layers, 2 words or more"
        )
    if shape.tied and shape.hidden[-1] != shape.dim:
        raise kind(
            f"a tied softmax needs a last layer of width {shape.dim}, the table's; it has {shape.hidden[-1]}"
        )


def _sigmoid(x: Floats) -> Floats:
    halves: Floats = np.float32(0.5) + np.float32(0.5) * np.tanh(np.float32(0.5) * x)
    return halves


def _entropy(logits: Floats, targets: Ids) -> float:  # [n, V], [n]
    """Return the summed cross-entropy."""
    top = logits.max(axis=1, keepdims=True)
    sums = np.exp(logits - top).sum(axis=1, dtype=np.float64)
    right = logits[np.arange(len(targets)), targets] - top[:, 0]
    return float((np.log(sums) - right).sum())


def _draw(logits: NDArray[np.float64], temperature: float, rng: np.random.Generator) -> int:
    if temperature == 0:
        return int(np.argmax(logits))
    with np.errstate(over="ignore"):  # a tiny temperature makes one word certain
        totals = np.cumsum(np.exp((logits - logits.max()) / temperature))
    return int(np.searchsorted(totals, rng.random() * totals[-1], side="right"))


def _joined(text: str, words: Sequence[str]) -> str:
    lines = " ".join([text.strip(), *words]).split(END)
    return "\n".join(line.strip() for line in lines).strip()
