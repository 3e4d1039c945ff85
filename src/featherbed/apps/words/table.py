"""Word tables: a table over a vocabulary, its penalties, and the schedulers of its training."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from featherbed.anchors import HalfNormal
from featherbed.apps.results import Result
from featherbed.apps.training import PenaltyFreeze
from featherbed.apps.words.selection import Lexicon, WordAnchors, require, select_words
from featherbed.apps.words.settings import WordTableSettings
from featherbed.errors import ArgumentError
from featherbed.graphs import Graph, wordnet
from featherbed.optim import L1, Budget, GroupL1, NonNegativeL1, Penalty
from featherbed.sharing import SSE
from featherbed.tables import Table
from featherbed.tables.spec import make_table, parse_spec

LASSO_END = 0.6  # fraction of the steps after which a group lasso removes no more rows


M = TypeVar("M", bound=nn.Module)


class WordTable(NamedTuple):
    """A table of words, the module a model calls (with SSE if used), its penalties and notes."""

    table: Table
    module: nn.Module
    penalties: dict[nn.Parameter, Penalty]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class FittedText(Generic[M]):
    """A trained model, its word table, and the record of its training."""

    model: M
    words: WordTable
    result: Result

    @property
    def history(self) -> list[dict[str, Any]]:
        """One row of numbers per epoch."""
        return self.result.history

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended training early."""
        return self.result.interrupted

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes about the word table."""
        return self.words.notes


def build_word_table(
    settings: WordTableSettings, lexicon: Lexicon, seed: int, *, sparse: bool = False
) -> WordTable:
    """Build a table over the words of a lexicon.

    ``sparse``: wide rows (of a dense table, or code logits) have sparse gradients, for optimizers
    of this library.

    >>> lexicon = Lexicon(("<pad>", "<unk>", "good", "bad"), np.array([0, 0, 5, 9]), padding_idx=0)
    >>> settings = WordTableSettings(spec="anchor:anchors=1", dim=8, selection="frequency")
    >>> build_word_table(settings, lexicon, seed=0).notes
    ('anchors: bad',)
    """
    generator = torch.Generator().manual_seed(seed)
    method, keywords = parse_spec(settings.spec)
    notes: list[str] = []
    extra: dict[str, Any] = {"padding_idx": lexicon.padding_idx, "generator": generator}
    accepted = inspect.signature(method.__init__).parameters
    if "samples" in accepted and "samples" not in keywords:
        samples = int(lexicon.counts.sum()) if lexicon.samples is None else lexicon.samples
        extra["samples"] = max(1, samples)
    if "std" in accepted and "std" not in keywords:
        extra["std"] = settings.init_std
    if "counts" in accepted:
        scores = _row_scores(settings, keywords, lexicon, generator, notes)
        extra["counts"] = torch.from_numpy(scores)
    if sparse and "sparse" in accepted and "sparse" not in keywords and not method.has_anchors:
        extra["sparse"] = True
    if method.has_anchors:
        extra |= _anchor_init(settings, method, keywords, lexicon, generator, notes)
    table = make_table(settings.spec, len(lexicon.words), settings.dim, **extra)
    if not method.has_anchors or settings.row_std is not None:
        table.scale_initial_rows(settings.row_std or settings.init_std)
    penalties = _penalties(settings, table, lexicon, notes)
    module: nn.Module = SSE(table, settings.sse, generator=generator) if settings.sse else table
    return WordTable(table, module, penalties, tuple(notes))


def table_schedulers(settings: WordTableSettings, words: WordTable, steps: int) -> list[Any]:
    """Return the objects stepped after the optimizer, over ``steps`` steps, for the table.

    They are a budget of nonzero weights, the end of a group lasso, or the table's own schedulers.

    >>> lexicon = Lexicon(("a", "b"), np.array([1, 1]))
    >>> settings = WordTableSettings(spec="anchor:anchors=2", dim=4, nonzeros=3)
    >>> len(table_schedulers(settings, build_word_table(settings, lexicon, seed=0), steps=10))
    1
    """
    if settings.nonzeros is not None:
        return [Budget(words.penalties, settings.nonzeros, steps=steps)]
    if settings.is_group_lasso:
        return [PenaltyFreeze(words.penalties, round(LASSO_END * steps))]
    return words.table.schedulers(steps)


def _row_scores(
    settings: WordTableSettings,
    keywords: dict[str, Any],
    lexicon: Lexicon,
    generator: torch.Generator,
    notes: list[str],
) -> NDArray[np.int64]:  # -> [V]
    """Return the scores by which a table keeps words: counts, or the order of a selection."""
    if settings.selection in (None, "frequency") or "keep" not in keywords:
        return np.asarray(lexicon.counts, dtype=np.int64)
    count = int(keywords["keep"])
    ids, _ = select_words(str(settings.selection), lexicon, count, settings.dim, generator)
    scores = np.zeros(len(lexicon.words), dtype=np.int64)
    scores[ids.numpy()] = np.arange(len(ids), 0, -1)
    notes.append(f"kept by {settings.selection}: {lexicon.show(ids)}")
    return scores


def _anchor_init(
    settings: WordTableSettings,
    method: type[Table],
    keywords: dict[str, Any],
    lexicon: Lexicon,
    generator: torch.Generator,
    notes: list[str],
) -> dict[str, Any]:
    """Return the constructor keywords that initialize the anchors."""
    if "init" in keywords or "inits" in keywords or "anchors" not in keywords:
        return {}
    selection = settings.selection or ("random" if settings.domain else None)
    if selection is None or (selection == "random" and not settings.domain):
        return method.init_settings([HalfNormal(settings.init_std)])
    sizes = list(method.anchor_sizes(keywords))
    ids, rows = select_words(selection, lexicon, sum(sizes), settings.dim, generator)
    notes.append(f"anchors: {lexicon.show(ids)}")
    atoms = [None] * len(sizes) if rows is None else torch.split(rows, sizes)
    return method.init_settings(
        [
            WordAnchors(part, start, settings.init_std)
            for part, start in zip(torch.split(ids, sizes), atoms, strict=True)
        ]
    )


def _penalties(
    settings: WordTableSettings, table: Table, lexicon: Lexicon, notes: list[str]
) -> dict[nn.Parameter, Penalty]:
    """Return the penalties of a table; weights between related words are exempt."""
    if settings.is_group_lasso:
        return {parameter: GroupL1(settings.lam) for parameter in table.penalized_rows}
    if lexicon.padding_idx is not None:
        with torch.no_grad():
            for parameter in table.penalized:
                parameter[lexicon.padding_idx] = 0.0
    if not table.nonnegative:
        if settings.domain:
            raise ArgumentError(
                f"domain={', '.join(settings.domain)} exempts weights from a non-negative "
                "penalty: leave nonnegative=false out"
            )
        return {parameter: L1(settings.lam) for parameter in table.penalized}
    exempt = None
    if settings.domain:
        exempt = table.related(_domain_graph(settings, lexicon))
        notes.append(
            f"related by {' and '.join(settings.domain)}: {len(exempt):,} of "
            f"{exempt.rows * exempt.anchors:,} weights"
        )
    return {parameter: NonNegativeL1(settings.lam, exempt) for parameter in table.penalized}


def _domain_graph(settings: WordTableSettings, lexicon: Lexicon) -> Graph:
    """Return the relations between words, of all domains together."""
    graphs: list[Graph] = []
    if "wordnet" in settings.domain:
        graphs.append(wordnet(list(lexicon.words)))
    if "cooccurrence" in settings.domain:
        related = require("cooccurrence", "co-occurrence counts", lexicon.related)
        graphs.append(related())
    return graphs[0] if len(graphs) == 1 else graphs[0] | graphs[1]
