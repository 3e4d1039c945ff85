"""Tables of words: a spec, which words are anchors or are kept, which weights are penalised. For text and language models."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from featherbed.anchors import HalfNormal
from featherbed.errors import ArgumentError
from featherbed.graphs import Graph, wordnet
from featherbed.optim import L1, GroupL1, NonNegativeL1
from featherbed.optim.exempt import Exempt
from featherbed.optim.penalties import Penalty
from featherbed.sharing.sse import SSE
from featherbed.tables import AnchorTable, DenseTable, MixtureTable, SelectedTable, Table
from featherbed.tables.mixture import sizes_of
from featherbed.tables.spec import make_table, parse_spec
from featherbed.tasks.word_choice import CHOICES, Chosen, Lexicon, choose_words, needed, shown

__all__ = ["Lexicon", "WordTable", "WordsMade", "make_word_table"]

DOMAINS = ("wordnet", "cooccurrence")
SAMPLE = 4096  # rows whose spread is measured


@dataclass(frozen=True)
class WordTable:
    """Which table words have: a spec, its width, the words that are its anchors or that it keeps, and its penalty.

    Args:
        spec: a table spec, such as ``dense``, ``anchor:anchors=10``, ``selected:keep=3000`` or ``kd:choices=32,parts=32``.
        dim: d.
        by: which words become anchors, or are kept by ``selected``: random, frequency, tfidf, kmeans-glove,
            kmeans-cooccurrence, frequency-clusters, lasso or vvd. None: anchors that stand for no word, the frequent words
            kept. ``lasso`` with the spec ``dense`` is the group lasso on rows, of weight ``lam``.
        domain: what relates words to anchor words, whose weights are then not penalised: wordnet, cooccurrence, or both.
        least: how often two words must occur near each other to count as related.
        lam: weight of the penalty on the weights of anchors.
        nonzeros: how many weights stay at the end of training (``fb.Budget``).
        sse: the probability that a word is replaced by another while training (``fb.SSE``).
        start: spread of the first rows; with anchors, of the first weights.
        spread: with anchors, that of the first rows: anchors are scaled so. None: anchors of unit length, in the mean.

    >>> WordTable("anchor:anchors=10", by="frequency", domain=("wordnet",)).has_weights
    True
    """

    spec: str = "dense"
    dim: int = 256
    by: str | None = None
    domain: tuple[str, ...] = ()
    least: int = 5
    lam: float = 0.0
    nonzeros: int | None = None
    sse: float = 0.0
    start: float = 0.1
    spread: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "domain", tuple(self.domain))
        if self.by is not None and self.by not in CHOICES:
            raise ArgumentError(f"by={self.by!r}: use one of {', '.join(CHOICES)}")
        unknown = [name for name in self.domain if name not in DOMAINS]
        if unknown:
            raise ArgumentError(f"domain={unknown[0]!r}: use {' or '.join(DOMAINS)}")
        for name, value in (("dim", self.dim), ("least", self.least)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ArgumentError(f"{name}={value!r}: give a whole number of at least 1")
        for name, given in (("start", self.start), ("spread", self.spread)):
            if given is not None and not (math.isfinite(given) and given > 0):
                raise ArgumentError(f"{name}={given}: give a number above 0")
        self._check_fit()

    def _check_fit(self) -> None:
        """Refuse settings that the table has no use for."""
        kind, settings = parse_spec(self.spec)
        if self.nonzeros is not None and not self.has_weights:
            raise ArgumentError(
                f"nonzeros={self.nonzeros}: {self.spec!r} has no anchors, so no weights to count"
            )
        if self.spread is not None and not self.has_weights:
            raise ArgumentError(
                f"spread={self.spread}: {self.spec!r} has no anchors; start is the spread of its rows"
            )
        if self.domain and not self.has_weights:
            raise ArgumentError(
                f"domain={', '.join(self.domain)}: {self.spec!r} has no anchors that words could relate to"
            )
        if self.lam and not (self.has_weights or self.lassoed):
            raise ArgumentError(
                f"lam={self.lam:g}: nothing of {self.spec!r} is penalised; by='lasso' penalises dense rows"
            )
        if self.by is not None and not (
            self.has_weights or issubclass(kind, SelectedTable) or self.lassoed
        ):
            raise ArgumentError(
                f"by={self.by!r}: {self.spec!r} chooses no words; anchor, mixture and selected do"
            )
        if self.by is not None and ("init" in settings or "inits" in settings):
            raise ArgumentError(
                f"by={self.by!r} and {self.spec!r} both say how anchors start: give one"
            )
        if self.lassoed and not self.lam > 0:
            raise ArgumentError(
                f"by='lasso' on dense rows takes lam, the weight of the penalty, above 0; got {self.lam:g}"
            )

    @property
    def has_weights(self) -> bool:
        """Whether words weigh anchors, which a penalty makes few."""
        return issubclass(parse_spec(self.spec)[0], AnchorTable | MixtureTable)

    @property
    def lassoed(self) -> bool:
        """Whether whole rows of a dense table are penalised."""
        return self.by == "lasso" and issubclass(parse_spec(self.spec)[0], DenseTable)


class WordsMade(NamedTuple):
    """A table, the module that shares its ids if asked to, the penalties for its optimizer, and what was chosen, in words."""

    table: Table
    module: nn.Module
    penalties: dict[nn.Parameter, Penalty]
    notes: tuple[str, ...]


def make_word_table(
    asked: WordTable, lexicon: Lexicon, seed: int, *, sparse: bool = False
) -> WordsMade:
    """Make the table that is asked for, over the words of a lexicon.

    ``sparse``: wide rows (those of a dense table, code logits) have gradients for the words of the batch only, for optimizers
    of this library.

    >>> lexicon = Lexicon(("<pad>", "<unk>", "good", "bad"), np.array([0, 0, 5, 9]), padding_idx=0)
    >>> made = make_word_table(WordTable("anchor:anchors=1", dim=8, by="frequency"), lexicon, seed=0)
    >>> made.notes
    ('anchors: bad',)
    """
    generator = torch.Generator().manual_seed(seed)
    kind, settings = parse_spec(asked.spec)
    notes: list[str] = []
    extra: dict[str, Any] = {"padding_idx": lexicon.padding_idx, "generator": generator}
    accepted = inspect.signature(kind.__init__).parameters
    if "samples" in accepted and "samples" not in settings:
        extra["samples"] = samples_of(lexicon)
    if "std" in accepted and "std" not in settings:
        extra["std"] = asked.start
    if "counts" in accepted:
        extra["counts"] = torch.from_numpy(kept_scores(asked, settings, lexicon, generator, notes))
    if sparse and "sparse" in accepted and "sparse" not in settings and not asked.has_weights:
        extra["sparse"] = True
    if asked.has_weights:
        extra |= starts(asked, kind, settings, lexicon, generator, notes)
    table = make_table(asked.spec, lexicon.size, asked.dim, **extra)
    if not asked.has_weights or asked.spread is not None:
        rescale(table, asked.start if asked.spread is None else asked.spread)
    penalties = penalties_of(asked, table, lexicon, notes)
    module: nn.Module = SSE(table, asked.sse, generator=generator) if asked.sse else table
    return WordsMade(table, module, penalties, tuple(notes))


def samples_of(lexicon: Lexicon) -> int:
    """Return how many training examples there are; words where that is all that is known."""
    known = (
        lexicon.samples
        if lexicon.labels is None or lexicon.samples is not None
        else len(lexicon.labels)
    )
    return max(1, int(lexicon.counts.sum()) if known is None else known)


def kept_scores(
    asked: WordTable,
    settings: dict[str, Any],
    lexicon: Lexicon,
    generator: torch.Generator,
    notes: list[str],
) -> NDArray[np.int64]:  # -> [V]
    """Return scores by which a table keeps words: counts, or the order in which they were chosen."""
    if asked.by in (None, "frequency") or "keep" not in settings:
        return np.asarray(lexicon.counts, dtype=np.int64)
    ids, _ = choose_words(str(asked.by), lexicon, int(settings["keep"]), asked.dim, generator)
    scores = np.zeros(lexicon.size, dtype=np.int64)
    scores[ids.numpy()] = np.arange(len(ids), 0, -1)
    notes.append(f"kept by {asked.by}: {shown(ids, lexicon)}")
    return scores


def starts(
    asked: WordTable,
    kind: type[Table],
    settings: dict[str, Any],
    lexicon: Lexicon,
    generator: torch.Generator,
    notes: list[str],
) -> dict[str, Any]:
    """Return how the anchors of a table start, as its constructor takes it."""
    mixed = issubclass(kind, MixtureTable)
    if "init" in settings or "inits" in settings or "anchors" not in settings:
        return {}
    by = asked.by or ("random" if asked.domain else None)
    if by is None or (by == "random" and not asked.domain):  # a random basis
        return {"inits" if mixed else "init": HalfNormal(asked.start)}
    sizes = (
        sizes_of(settings["anchors"], settings.get("sets"))
        if mixed
        else (int(settings["anchors"]),)
    )
    ids, known = choose_words(by, lexicon, sum(sizes), asked.dim, generator)
    notes.append(f"anchors: {shown(ids, lexicon)}")
    parts = torch.split(ids, list(sizes))
    atoms = [None] * len(sizes) if known is None else torch.split(known, list(sizes))
    chosen = [Chosen(part, rows, asked.start) for part, rows in zip(parts, atoms, strict=True)]
    return {"inits": chosen} if mixed else {"init": chosen[0]}


@torch.no_grad()
def rescale(table: Table, start: float) -> None:
    """Give rows the spread ``start``: the dictionary is scaled by what the rows' dependence on it (its degree) asks for."""
    rows, dictionary = getattr(table, "rows", None), getattr(table, "atoms", None)
    rows = table.weight if isinstance(table, DenseTable) else rows
    if isinstance(rows, Tensor):
        table.fit_dense(
            rows.detach() * (start / float(rows.std()))
        )  # what belongs to rows, such as their noise, follows
        return
    if not isinstance(dictionary, Tensor):
        return
    was = table.training
    table.eval()
    ids = torch.linspace(0, table.num_embeddings - 1, min(SAMPLE, table.num_embeddings)).long()
    before = float(table(ids).std())
    dictionary.mul_(0.5)
    after = float(table(ids).std())
    dictionary.mul_(2.0)
    degree = math.log2(before / after) if before > 0 and after > 0 else 0.0
    if degree > 0.5:  # rows that are normalised do not depend on it
        dictionary.mul_((start / before) ** (1 / degree))
    table.train(was)


def penalties_of(
    asked: WordTable, table: Table, lexicon: Lexicon, notes: list[str]
) -> dict[nn.Parameter, Penalty]:
    """Return the penalties of a table; what the domain relates is exempt from them."""
    if asked.lassoed and isinstance(table, DenseTable):
        return {table.weight: GroupL1(asked.lam)}
    if not isinstance(table, AnchorTable | MixtureTable):
        return {}
    if lexicon.padding_idx is not None:
        with torch.no_grad():
            table.transform[lexicon.padding_idx] = 0.0
    if not table.nonnegative:
        if asked.domain:
            raise ArgumentError(
                "a domain spares weights from a penalty that keeps them above 0: leave nonnegative=false out"
            )
        return {table.transform: L1(asked.lam)}
    exempt = None
    if asked.domain:
        exempt = related(table, domain_graph(asked, lexicon))
        notes.append(
            f"related by {' and '.join(asked.domain)}: {len(exempt):,} of {exempt.rows * exempt.anchors:,} weights"
        )
    return {table.transform: NonNegativeL1(asked.lam, exempt)}


@dataclass
class Whole:
    """A transform without slots, as exempt entries see it."""

    transform: Any
    support: None = None


def related(table: AnchorTable | MixtureTable, graph: Graph) -> Exempt:
    """Return the weights between words and the anchor words related to them, over all sets of a mixture."""
    if isinstance(table, AnchorTable):
        return table.related(graph)
    anchors = torch.cat([ids for ids in table.anchor_ids if ids is not None])
    entries = graph.matrix[:, anchors.cpu().numpy()].tocoo()
    pairs = torch.stack(
        [torch.from_numpy(part.astype(np.int64)) for part in (entries.row, entries.col)], dim=1
    )
    return Exempt(Whole(table.transform), pairs, len(anchors))


def domain_graph(asked: WordTable, lexicon: Lexicon) -> Graph:
    """Return who is related to whom, by all that is asked for together."""
    graphs: list[Graph] = []
    if "wordnet" in asked.domain:
        graphs.append(wordnet(list(lexicon.words)))
    if "cooccurrence" in asked.domain and lexicon.related is not None:
        graphs.append(lexicon.related(asked.least))
    elif "cooccurrence" in asked.domain:
        near = needed("cooccurrence", "co-occurrence counts", lexicon.cooccurrence)()
        graphs.append(near if isinstance(near, Graph) else Graph(near >= asked.least))
    return graphs[0] if len(graphs) == 1 else graphs[0] | graphs[1]
