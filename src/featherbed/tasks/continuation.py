"""How a language model goes on from a beginning: words drawn one after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from featherbed.errors import ArgumentError
from featherbed.tasks.word_model import WordModel

END, UNKNOWN = "<eos>", "<unk>"
SPECIAL = ("<pad>", UNKNOWN)


@torch.no_grad()
def continuation(
    model: WordModel,
    words: Sequence[str],
    start: str,
    count: int = 30,
    *,
    seed: int = 0,
    temperature: float = 0.8,
) -> str:
    """Return ``count`` words that the model draws after ``start``, words between blanks; an end of line begins a new one.

    p ∝ exp(logit / temperature); temperature 0 takes the most likely word. ``<pad>`` and ``<unk>`` are never drawn.

    >>> import featherbed as fb
    >>> from featherbed.tasks.lm import LanguageModel
    >>> model = LanguageModel(fb.DenseTable(3, 4), hidden=4)
    >>> len(continuation(model, ("the", "cat", "<unk>"), "the", 5).split())
    5
    """
    if not math.isfinite(temperature) or temperature < 0:
        raise ArgumentError(f"temperature={temperature}: give a number of at least 0")
    if count < 1:
        raise ArgumentError(f"count={count}: give a whole number of at least 1")
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    barred = barred_words(words)
    ids = torch.from_numpy(word_ids(words, start))
    state, written, everything = None, [], model.all_rows()
    for _ in range(count):
        found = model.read(model.rows_of(ids[:, None], everything), state)
        assert everything is not None
        scores = everything.logits(found.hidden[-1, 0], model.bias)
        scores[barred] = -torch.inf
        if temperature:
            chances = ((scores - scores.max()).double() / temperature).softmax(0)
            ids = torch.multinomial(chances, 1, generator=generator)
        else:
            ids = scores.argmax()[None]
        state = found.state
        written.append(words[int(ids)])
    return " ".join(written).replace(f" {END} ", "\n").replace(END, "\n").strip(" ")


def barred_words(words: Sequence[str]) -> list[int]:
    """Return the ids that are never written: padding and unknown words, unless there is nothing else."""
    found = [at for at, word in enumerate(words) if word in SPECIAL]
    return found if len(found) < len(words) else []


def word_ids(words: Sequence[str], text: str) -> NDArray[np.int64]:  # -> [n], n at least 1
    """Return the ids of the words of a text; without any it begins after an end of line.

    >>> word_ids(("a", "<unk>", "<eos>"), "a b").tolist(), word_ids(("a", "<unk>", "<eos>"), "").tolist()
    ([0, 1], [2])
    """
    id_of = {word: number for number, word in enumerate(words)}
    unknown = id_of.get(UNKNOWN)
    found = [id_of.get(word, unknown) for word in text.split()] or [id_of.get(END, 0)]
    if None in found:
        missing = next(word for word in text.split() if word not in id_of)
        raise ArgumentError(
            f"{missing!r} is no word of this model, which has no {UNKNOWN}: use words it knows"
        )
    return np.array(found, dtype=np.int64)
