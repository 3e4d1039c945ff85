"""Stored language models: continuation and perplexity of texts, with numpy alone.

    i, f, g, o = x W_in^T + h W_hid^T + b,    c' = sigmoid(f) c + sigmoid(i) tanh(g),
    h' = sigmoid(o) tanh(c')

layer by layer (Hochreiter and Schmidhuber 1997, torch's order of gates), then logits
h' . row(w) + b_w over all words w, with the rows of the packed table if the softmax is tied to it,
otherwise with those of a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from featherbed.apps.bundle import (
    LANGUAGE,
    MODEL,
    PRECISIONS,
    WORDS,
    check_words,
    decode_weights,
    encode_weights,
    read_description,
    read_sizes,
    read_table,
    write_bundle,
)
from featherbed.errors import ArgumentError, FormatError
from featherbed.io.texts import END, PAD, UNKNOWN
from featherbed.packed import (
    MOST_DIM,
    MOST_ROWS,
    Floats,
    PackedTable,
    Vocabulary,
    as_ids,
    as_loaded,
    sigmoid,
)
from featherbed.packed import check as check_table

VERSION = 1
MAX_LAYERS, MAX_WORDS = 16, 100_000
FEW_WORDS = 1 << 16  # words that numpy scores before compiled loops are loaded
MAX_LOGITS = 1 << 22  # logits in memory at once

Ids = NDArray[np.int64]
State = list[tuple[Floats, Floats]]  # of each layer, h and c, [B, hidden]


class LanguageShape(NamedTuple):
    """The sizes of a language model: vocabulary, row width, widths of its layers."""

    words: int
    dim: int
    hidden: tuple[int, ...]
    tied: bool

    def arrays(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights by name.

        >>> LanguageShape(9, 4, (6, 4), tied=True).arrays()["layer1.input"]
        (16, 6)
        """
        shapes: dict[str, tuple[int, ...]] = {"bias": (self.words,)}
        for number, (inputs, outputs) in enumerate(pairwise((self.dim, *self.hidden))):
            shapes[f"layer{number}.input"] = (4 * outputs, inputs)
            shapes[f"layer{number}.hidden"] = (4 * outputs, outputs)
            shapes[f"layer{number}.bias"] = (4 * outputs,)
        return shapes if self.tied else shapes | {"output": (self.words, self.hidden[-1])}

    def check(self, error: type[ArgumentError] | type[FormatError]) -> None:
        """Raise ``error`` for sizes that do not go together."""
        if not 1 <= len(self.hidden) <= MAX_LAYERS or self.words < 2:
            raise error(
                f"{len(self.hidden)} layers over {self.words} words: give 1 to {MAX_LAYERS} "
                "layers, 2 words or more"
            )
        if self.tied and self.hidden[-1] != self.dim:
            raise error(
                f"a tied softmax needs a last layer of width {self.dim}, the table's; it has "
                f"{self.hidden[-1]}"
            )


class LanguageModel:
    """A language model written by ``featherbed train lm``, opened from its folder.

    >>> import featherbed as fb
    >>> rng = np.random.default_rng(0)
    >>> words = ["the", "<eos>", "<unk>", "cat", "sat"]
    >>> layer = rng.normal(size=(16, 4)), rng.normal(size=(16, 4)), np.zeros(16), np.zeros(16)
    >>> folder = getfixture("tmp_path") / "lm"
    >>> table = fb.DenseTable.from_dense(rng.normal(size=(5, 4))).pack()
    >>> write_language(folder, table, [layer], np.zeros(5), words=words)
    >>> model = LanguageModel.open(folder)
    >>> model.continue_text("the cat", words=3, seed=1) == model.continue_text(
    ...     "the cat", words=3, seed=1)
    True
    >>> 1 < model.perplexity([0, 3, 4, 1] * 5, batch=2) < 1000
    True
    """

    def __init__(
        self,
        table: PackedTable,
        weights: Mapping[str, Floats],
        shape: LanguageShape,
        vocabulary: Vocabulary,
        about: dict[str, Any],
    ) -> None:
        self.table, self.weights, self.shape = table, weights, shape
        self.vocabulary, self.about = vocabulary, about

    @classmethod
    def open(cls, folder: str | Path) -> LanguageModel:
        """Open a folder; a file that is missing, broken or of another model raises an error."""
        folder = Path(folder)
        found = read_description(
            folder, LANGUAGE, "language model", VERSION, "featherbed train lm FILES --out DIR"
        )
        shape = LanguageShape(
            found.integer("words", 2, MOST_ROWS),
            found.integer("dim", 1, MOST_DIM),
            read_sizes(found, "hidden", MOST_DIM, MAX_LAYERS),
            found.flag("tied"),
        )
        shape.check(FormatError)
        stored = found.choice("vocabulary", ("keys", "list"))
        table, vocabulary = read_table(folder, shape.words, shape.dim, stored)
        assert vocabulary is not None
        weights = decode_weights(
            folder / MODEL, shape.arrays(), found.choice("weights", PRECISIONS)
        )
        return cls(table, weights, shape, vocabulary, found.raw("about"))

    def __repr__(self) -> str:
        layers, tied = " x ".join(map(str, self.shape.hidden)), "" if self.shape.tied else "not "
        return f"LanguageModel({self.shape.words:,} words, layers {layers}, {tied}tied)"

    def continue_text(
        self, text: str, words: int = 30, seed: int = 0, temperature: float = 0.8
    ) -> str:
        """Return a text continued by a number of words, drawn as ``generate`` does.

        Words are separated by spaces, sentences by line breaks.
        """
        return join_words([text.strip(), *self.generate(text, words, seed, temperature)])

    def generate(
        self, text: str, words: int = 30, seed: int = 0, temperature: float = 0.8
    ) -> list[str]:
        """Return words drawn after a text with p(w) ~ exp(logit_w / temperature).

        A temperature of 0 takes the most likely word. Unknown words and padding are never drawn.
        """
        if isinstance(words, bool) or not 0 <= words <= MAX_WORDS:
            raise ArgumentError(f"words={words!r}: give a number from 0 to {MAX_WORDS:,}")
        if not (math.isfinite(temperature) and temperature >= 0):
            raise ArgumentError(
                f"temperature={temperature!r}: give a number of at least 0 (the most likely word), "
                "such as 0.8"
            )
        ids, rng = self.encode(text), np.random.default_rng(seed)
        end, state = self.vocabulary.find(END), self.initial_state(1)
        hidden = np.zeros((1, self.shape.hidden[-1]), np.float32)
        for id_ in ids if end is None else [end, *ids]:
            hidden = self.step(np.array([id_]), state)
        special = [self.vocabulary.find(word) for word in (PAD, UNKNOWN)]
        excluded = [id_ for id_ in special if id_ is not None]
        drawn: list[int] = []
        for _ in range(words):
            logits = self.logits(hidden)[0].astype(np.float64)
            if len(excluded) < len(logits):
                logits[excluded] = -np.inf
            drawn.append(_draw(logits, temperature, rng))
            hidden = self.step(np.array(drawn[-1:]), state)
        return [self.vocabulary.keys[id_] for id_ in drawn]

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text's words; words not known as written are tried in lower case."""
        ids, unknown = [], self.vocabulary.find(UNKNOWN)
        for word in text.split():
            id_ = self._find(word)
            id_ = unknown if id_ is None else id_
            if id_ is None:
                raise ArgumentError(
                    f"the word {word[:40]!r} is not known, and the model has no {UNKNOWN}: leave "
                    "it out"
                )
            ids.append(id_)
        return ids

    def unknown(self, text: str) -> list[str]:
        """Return the distinct out-of-vocabulary words of a text."""
        return [word for word in dict.fromkeys(text.split()) if self._find(word) is None]

    def _find(self, word: str) -> int | None:
        id_ = self.vocabulary.find(word)
        return self.vocabulary.find(word.lower()) if id_ is None else id_

    def perplexity(self, ids: ArrayLike, batch: int = 10) -> float:  # [N]
        """Return exp(mean cross-entropy) of a text, read in ``batch`` columns as in training."""
        losses, _ = self.losses(ids, batch)
        return math.exp(min(float(losses.mean()), 700.0))

    def losses(self, ids: ArrayLike, batch: int = 10) -> tuple[NDArray[np.float64], Ids]:
        """Return the cross-entropy [n] of the predicted words of a text [N], and the words [n]."""
        flat = as_ids(ids, self.table.rows).reshape(-1)
        if batch < 1 or len(flat) // batch < 2:
            raise ArgumentError(
                f"{len(flat)} words are too few for {batch} columns: give at least "
                f"{2 * max(1, batch)}"
            )
        text = flat[: len(flat) // batch * batch].reshape(batch, -1).T  # [T, batch]
        state, step = self.initial_state(batch), max(1, MAX_LOGITS // (batch * self.shape.words))
        losses, targets = [], []
        for begin in range(0, len(text) - 1, step):
            target = text[begin + 1 : begin + 1 + step]
            inputs = text[begin : begin + len(target)]
            hidden = np.concatenate([self.step(row, state) for row in inputs])
            targets.append(target.reshape(-1))
            losses.append(_cross_entropy(self.logits(hidden), targets[-1]))
        return np.concatenate(losses), np.concatenate(targets)

    def initial_state(self, batch: int) -> State:
        """Return the state before the first word."""
        return [
            (np.zeros((batch, size), np.float32), np.zeros((batch, size), np.float32))
            for size in self.shape.hidden
        ]

    def step(self, ids: Ids, state: State) -> Floats:  # [B] -> [B, hidden]
        """Read one word of each column: update the state, return the output of the last layer."""
        x = self.table[ids]
        for number, (h, c) in enumerate(state):
            name = f"layer{number}"
            gates = x @ self.weights[f"{name}.input"].T + h @ self.weights[f"{name}.hidden"].T
            i, f, g, o = np.split(gates + self.weights[f"{name}.bias"], 4, axis=1)
            c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
            x = (sigmoid(o) * np.tanh(c)).astype(np.float32)
            state[number] = (x, c.astype(np.float32))
        return x

    def logits(self, hidden: Floats) -> Floats:  # [n, hidden] -> [n, V]
        """Return the logits of every word; with few words, without loading compiled loops."""
        if not self.shape.tied:
            products: Floats = hidden @ self.weights["output"].T
        else:
            few = self.table.rows <= FEW_WORDS and len(hidden) == 1
            with as_loaded() if few else nullcontext():
                products = self.table.logits(hidden)
        logits = (products + self.weights["bias"]).astype(np.float32, copy=False)
        if not np.isfinite(logits).all():
            raise FormatError(f"a score is not finite: {WORDS} holds such values, train again")
        return logits


def write_language(
    folder: str | Path,
    table: PackedTable,
    layers: Sequence[Sequence[ArrayLike]],  # of each layer [4h, in], [4h, h], [4h], [4h]
    bias: ArrayLike,  # [V]
    *,
    output: ArrayLike | None = None,  # [V, h] if the softmax is not tied to the table
    words: Sequence[str] | None = None,  # one for each row, by default the table's keys
    weights: str = "float32",
    about: dict[str, Any] | None = None,
) -> None:
    """Write a language model into a folder; everything is checked before anything is written."""
    arrays: dict[str, NDArray[np.floating]] = {"bias": np.asarray(bias, dtype=np.float32)}
    hidden = []
    for number, (inputs, recurrent, *biases) in enumerate(layers):
        arrays[f"layer{number}.input"] = np.asarray(inputs, dtype=np.float32)
        arrays[f"layer{number}.hidden"] = np.asarray(recurrent, dtype=np.float32)
        parts = [np.asarray(part, dtype=np.float32) for part in biases]
        arrays[f"layer{number}.bias"] = np.sum(parts, axis=0)
        hidden.append(arrays[f"layer{number}.hidden"].shape[-1])
    if output is not None:
        arrays["output"] = np.asarray(output, dtype=np.float32)
    shape = LanguageShape(table.rows, table.dim, tuple(hidden), output is None)
    shape.check(ArgumentError)
    shapes = {name: array.shape for name, array in arrays.items()}
    if shapes != shape.arrays():
        raise ArgumentError(
            f"a model of these sizes takes the arrays {shape.arrays()}, got {shapes}"[:1000]
        )
    check_words(table, words)
    description = {
        "language": VERSION,
        "words": table.rows,
        "dim": table.dim,
        "hidden": hidden,
        "tied": shape.tied,
        "weights": weights,
        "vocabulary": "keys" if words is None else "list",
        "about": about or {},
    }
    encoded = encode_weights(arrays, weights)
    write_bundle(Path(folder), LANGUAGE, description, table, words, encoded)


def check_language(folder: str | Path) -> LanguageModel:
    """Open a folder and read every byte of its table too. Raises FormatError.

    >>> check_language("nothing")
    Traceback (most recent call last):
    featherbed.errors.MissingFileError: nothing: no such folder
    """
    model = LanguageModel.open(folder)
    check_table(Path(folder) / WORDS)
    return model


def join_words(words: Sequence[str]) -> str:
    """Return words separated by spaces, with line breaks for ends of sentences.

    >>> join_words(["the", "end", "<eos>", "a"])
    'the end\\na'
    """
    lines = " ".join(words).split(END)
    return "\n".join(line.strip() for line in lines).strip()


def _cross_entropy(logits: Floats, targets: Ids) -> NDArray[np.float64]:  # [n, V], [n] -> [n]
    top = logits.max(axis=1, keepdims=True)
    sums = np.exp(logits - top).sum(axis=1, dtype=np.float64)
    losses: NDArray[np.float64] = np.log(sums) - (
        logits[np.arange(len(targets)), targets] - top[:, 0]
    )
    return losses


def _draw(logits: NDArray[np.float64], temperature: float, rng: np.random.Generator) -> int:
    if temperature == 0:
        return int(np.argmax(logits))
    with np.errstate(over="ignore"):  # a tiny temperature makes one word certain
        totals = np.cumsum(np.exp((logits - logits.max()) / temperature))
    return int(np.searchsorted(totals, rng.random() * totals[-1], side="right"))
