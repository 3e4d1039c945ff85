"""Rows that are language models, trained as ``featherbed train lm`` trains them.

Settings have the short names of ``LANGUAGE_NAMES``, with a table ``words`` as for texts; ``times``
as for texts; ``cut``: the number of words of the training text that are read; ``lambda2``: the price
of a weight in NBANT's objective; ``post``, such as ``hash:anchors=500``: how dense rows are
compressed after training; ``packed``, such as ``float16``: the type of the stored values, for the
bytes of the whole file; and ``forms``, a list of such types: the table is stored in each of them,
its perplexities and bytes are measured. ``pairs``: how many words of each anchor word, and how many
(word, anchor) pairs, are kept (table 5).

Runs that begin with epochs of dense rows (``dense_epochs``) and agree in all but their tables share
these epochs: the first of them trains and keeps them, the others continue from there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch

from featherbed.apps.language.model import RecurrentModel
from featherbed.apps.language.settings import LanguageSettings
from featherbed.apps.language.train import fit_language, perplexity
from featherbed.apps.pipeline import Checkpoints
from featherbed.codecs.compress import compress
from featherbed.errors import ArgumentError
from featherbed.io.texts import Corpus
from featherbed.packed.inspect import file_size
from featherbed.tables import DenseTable, Table
from featherbed.theory.objective import nbant_objective
from research.harness.records import Outcome, Run
from research.runners.text import named_values, table_sizes

OWN = ("cut", "lambda2", "post", "packed", "forms", "pairs")
TABLE_SETTINGS = ("words", "times", "weights_lr", *OWN)  # of a row's own table, not of its start
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
    checkpoints = SharedStart(run.checkpoints(settings, seed), start_folder(settings, seed, run))
    options: dict[str, Any] = {"seed": seed, "progress": run.shown, "name": run.title}
    fitted = fit_language(chosen, corpus, **options, checkpoints=checkpoints)
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
    for kind in own.get("forms", ()):
        measures |= stored_form(fitted.model, corpus, kind)
    if table.sparse_codes:
        measures |= objectives(table, measures["perplexity"], own.get("lambda2"))
    details: dict[str, Any] = {
        "words": len(corpus.words),
        "tokens": len(corpus.train),
        "notes": [*fitted.notes],
    }
    if "pairs" in own:
        details |= associations(table, corpus.words, own["pairs"])
    return Outcome(measures, [dict(row) for row in fitted.history], details)


class SharedStart(Checkpoints):
    """The checkpoints of a row, whose dense epochs are in a folder that rows share."""

    def __init__(self, own: Checkpoints, start: Path) -> None:
        super().__init__(own.folder)
        self.own, self.start = own, start

    def stage(self, name: str) -> Checkpoints:
        """Return the checkpoints of a stage."""
        return Checkpoints(self.start, keep=1) if name == "dense" else self.own.stage(name)

    def save(self, step: int, **state: Any) -> None:
        """Write the state after ``step`` steps, beside the settings of the row."""
        self.own.save(step, **state)


def start_folder(settings: Mapping[str, Any], seed: int, run: Run) -> Path:
    """Return the folder of the dense epochs that rows with such settings begin with."""
    words = {key: settings.get("words", {}).get(key) for key in ("dim", "start", "sse")}
    same = {key: value for key, value in settings.items() if key not in TABLE_SETTINGS}
    same |= {"words": words, "cut": settings.get("cut"), "seed": seed}
    digest = sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()
    return run.work / f"dense-start-{digest[:12]}"


@torch.no_grad()
def stored_form(model: RecurrentModel, corpus: Corpus, kind: str) -> dict[str, float]:
    """Return perplexities and file bytes of a model whose table is stored with values of a type.

    A dictionary of anchors is stored as float16 beside float16 weights, else as int8.
    """
    table, words = model.table.eval(), model.words
    types = {"dictionary": kind}
    if table.has_anchors:
        types = {"values": kind, "dictionary": "float16" if kind == "float16" else "int8"}
    packed = table.pack(**types)
    rows = torch.from_numpy(np.asarray(packed[np.arange(len(packed))], dtype=np.float32))
    model.words = DenseTable.from_dense(rows)
    found = {f"{kind}_{name}": perplexity(model, getattr(corpus, part)) for name, part in MEASURED}
    model.words = words
    return found | {f"{kind}_bytes": float(file_size(packed, keys=False))}


def associations(table: Table, words: Sequence[str], count: int) -> dict[str, Any]:
    """Return the words with the largest weights of each anchor word, and the largest pairs.

    >>> from featherbed.tables import AnchorTable
    >>> from featherbed.anchors import Frequency
    >>> table = AnchorTable(3, 2, anchors=1, init=Frequency([9, 5, 1]))
    >>> with torch.no_grad():
    ...     _ = table.transform.copy_(torch.tensor([[1.0], [0.5], [0.0]]))
    >>> associations(table, ["stock", "bonds", "the"], 2)
    {'anchors': {'stock': ['bonds']}, 'pairs': [['bonds', 'stock']]}
    """
    anchors = table.anchor_objects()
    if anchors is None:
        raise ArgumentError(
            "pairs: the anchors of this table are no words; give words by=frequency"
        )
    weights = table.penalized[0].detach().clone()
    weights[anchors] = 0.0
    best = torch.topk(weights, min(count, len(weights)), dim=0).indices.T.tolist()
    found = {
        words[anchor]: [words[i] for i in ids if weights[i, place] > 0]
        for place, (anchor, ids) in enumerate(zip(anchors.tolist(), best, strict=True))
    }
    flat = torch.topk(weights.flatten(), min(count, weights.numel())).indices.tolist()
    places = [divmod(at, weights.shape[1]) for at in flat if weights.flatten()[at] > 0]
    pairs = [[words[i], words[int(anchors[place])]] for i, place in places]
    return {"anchors": found, "pairs": pairs}


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
