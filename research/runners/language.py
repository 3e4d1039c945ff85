"""Rows that are language models, trained as ``featherbed train lm`` trains them.

Settings have the short names of ``LANGUAGE_NAMES``, with a table ``words`` as for texts; ``times``
as for texts; ``cut``: the number of words of the training text that are read; ``lambda2``: the price
of a weight in NBANT's objective; ``post``, such as ``hash:anchors=500``: how dense rows are
compressed after training; and ``packed``, such as ``float16``: the type of the stored values, for
the bytes of the whole file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from featherbed.apps.language.settings import LanguageSettings
from featherbed.apps.language.train import fit_language, perplexity
from featherbed.codecs.compress import compress
from featherbed.errors import ArgumentError
from featherbed.io.texts import Corpus
from featherbed.packed.inspect import file_size
from featherbed.tables import Table
from featherbed.theory.objective import nbant_objective
from research.harness.records import Outcome, Run
from research.runners.text import named_values, table_sizes

OWN = ("cut", "lambda2", "post", "packed")
LANGUAGE_NAMES = {
    "model": "model.kind",
    **{
        name: f"model.{name}"
        for name in ("hidden", "layers", "tied", "softmax", "samples", "precision")
    },
    **{
        name: f"training.{name}"
        for name in ("epochs", "dense_epochs", "batch", "length", "random_length", "patience")
    },
    "optimizer": "optimizer.kind",
    "weights_lr": "optimizer.transform_lr",
    **{
        name: f"optimizer.{name}"
        for name in ("lr", "code_lr", "cosine", "decay", "clip", "averaging")
    },
    "dropout": "dropout.output",
    **{f"drop_{name}": f"dropout.{name}" for name in ("words", "input", "layers", "weights")},
    "ar": "dropout.ar",
    "tar": "dropout.tar",
}
ROOM = (
    1 << 20
)  # bytes beyond those of plain rows: settings, not bytes, say how small a compressed table is
MEASURED = (("perplexity", "test"), ("validation_perplexity", "validation"))
PRICES = {"2e-5": 2e-5, "1e-4": 1e-4, "1e-1": 1e-1}  # lambda1 of table 15


def run_language(settings: Mapping[str, Any], seed: int, source: Corpus, run: Run) -> Outcome:
    """Train a language model, measure its perplexity on the test part once, the size of its table and its objective."""
    own = {key: settings[key] for key in OWN if key in settings}
    asked = {key: value for key, value in settings.items() if key != "times" or "post" not in own}
    chosen = language_settings(asked, len(source.words))
    corpus = shortened(source, own["cut"]) if "cut" in own else source
    fitted = fit_language(chosen, corpus, seed=seed, progress=run.shown, name=run.title)
    if fitted.interrupted:
        raise KeyboardInterrupt
    table = fitted.words.table
    sizes = (
        compressed(table, own["post"], settings["times"], seed)
        if "post" in own
        else table_sizes(table)
    )
    measures = {name: perplexity(fitted.model, getattr(corpus, part)) for name, part in MEASURED}
    measures |= sizes
    if "packed" in own and "bytes" in sizes:
        kind = own["packed"]
        measures["bytes"] = file_size(table.eval().pack(values=kind, dictionary=kind), keys=False)
    if table.sparse_codes:
        measures |= objectives(table, measures["perplexity"], own.get("lambda2"))
    details = {
        "words": len(corpus.words),
        "tokens": len(corpus.train),
        "notes": [*fitted.notes],
    }
    return Outcome(measures, [dict(row) for row in fitted.history], details)


def language_settings(settings: Mapping[str, Any], rows: int) -> LanguageSettings:
    """Return the settings of a row, for a table of ``rows`` rows."""
    values = named_values(settings, rows, LANGUAGE_NAMES, "corpus.min_cooccurrence", OWN)
    return LanguageSettings.from_values({"table.dim": 200, "model.hidden": 200} | values)


def objectives(table: Table, test: float, lambda2: float | None) -> dict[str, float]:
    """Return how many weights and anchors there are, and the objective of a test perplexity at each price of an anchor."""
    anchors = table.anchor_count
    weights = sum(int(torch.count_nonzero(weights)) for weights in table.penalized)
    found = {"nonzeros": float(weights), "word_anchors": float(anchors)}
    if lambda2 is None:
        return found
    return found | {
        f"objective_{name}": nbant_objective(math.log(test), weights, anchors, price, lambda2)
        for name, price in PRICES.items()
    }


def compressed(table: Table, method: str, times: float, seed: int) -> dict[str, float]:
    """Compress the rows of a trained table in place to about ``times`` fewer parameters, and return its sizes.

    A row becomes so many atoms, each times a value, as fit the size: parameters are K d + V s.
    """
    if not table.is_dense:
        raise ArgumentError(f"post={method!r} compresses plain rows: give words the spec 'dense'")
    rows, dim = table.num_embeddings, table.embedding_dim
    atoms = int(method.partition("anchors=")[2].partition(",")[0] or 0)
    codes = round((rows * dim / times - atoms * dim) / rows)
    if atoms < 1 or codes < 1:
        raise ArgumentError(
            f"post={method!r}, times={times}: give the number of anchors, few enough to leave codes for rows"
        )
    exact = f"{method},codes={codes},values=int8,kind=float16"
    packed = compress(
        table.weight.detach().numpy(), budget=4 * rows * dim + ROOM, method=exact, generator=seed
    )
    with torch.no_grad():
        table.weight.copy_(torch.from_numpy(packed[np.arange(rows)]))
    parameters, size = atoms * dim + rows * codes, sum(packed.sizes_by_part().values())
    dense = rows * dim
    return {
        "parameters": float(parameters),
        "times": dense / parameters,
        "bytes": float(size),
        "ratio": 4 * dense / size,
    }


def shortened(corpus: Corpus, count: int) -> Corpus:
    """Return the corpus with the first ``count`` words of its training text, over the same vocabulary.

    >>> corpus = Corpus(("a", "b"), np.array([2, 1]), np.array([0, 0, 1]), np.array([0]), np.array([1]))
    >>> shortened(corpus, 2).counts.tolist()
    [2, 0]
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ArgumentError(
            f"cut={count!r}: give the number of words of the training text that are read, at least 1"
        )
    train = corpus.train[:count]
    return replace(corpus, train=train, counts=np.bincount(train, minlength=len(corpus.words)))
