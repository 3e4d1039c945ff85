"""Anchor & Transform: every row is a sparse, non-negative mixture of a few anchors."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from featherbed.anchors.random import AnchorInit, HalfNormal
from featherbed.errors import ArgumentError
from featherbed.optim.exempt import Exempt
from featherbed.optim.lazy import RowParameter
from featherbed.optim.lazy.operators import slot_rows
from featherbed.optim.lazy.slots import Slots
from featherbed.packed.band import Band
from featherbed.packed.codes import sparse_layout
from featherbed.packed.matrix import Matrix
from featherbed.tables.codes import Codes
from featherbed.tables.computed import is_transformed
from featherbed.tables.fitting import low_rank, nonnegative_factors, sparse_codes
from featherbed.tables.table import Table, empty_parameter, positive, to_numpy

BLOCK = 1 << 20  # rows started at once


class Graph(Protocol):
    """Relations between objects: featherbed.graphs.Graph, or what has a sparse matrix [V, V] of them."""

    @property
    def objects(self) -> int:
        """V."""

    @property
    def matrix(self) -> Any:
        """scipy.sparse CSR [V, V]."""


class AnchorTable(Table):
    """E = T A: a sparse transform T [V, K] over K anchors A [K, d].

    Liang et al. 2021 (ANT), equation 1: minimise task loss + lambda ||T||_1 over T >= 0. The penalty is the optimizer's
    business: ``fb.Yogi(parameters, penalties={table.transform: fb.NonNegativeL1(lam)})``. ``nonnegative`` decides how the
    transform starts and how ``from_dense`` fits it.

    Args:
        anchors: K.
        sparse: gradients of the transform hold the rows of the batch only (their appendix H); with an optimizer of this
            library a step then costs in those rows, and gives what dense gradients give.
        slots: keep at most so many (anchor, weight) pairs a row: ``transform`` is [V, slots], ``support`` says which anchors.
            Training memory is O(V slots), whatever K. Implies ``sparse``.
        scan_every: how often the anchors a row lacks are scored (with slots); the best come in for the weakest.
        init: how atoms and transform start: at random (``fb.HalfNormal``, ``fb.Xavier``), or with objects as anchors
            (``fb.Frequency`` and its like); these are then the table's ``anchor_ids``, and each starts as itself.

    >>> import torch
    >>> table = AnchorTable(1000, 16, anchors=8)
    >>> table.transform.shape, table.atoms.shape, table(torch.tensor([3])).shape
    (torch.Size([1000, 8]), torch.Size([8, 16]), torch.Size([1, 16]))
    >>> AnchorTable(1000, 16, anchors=500, slots=4).transform.shape
    torch.Size([1000, 4])
    """

    example: ClassVar[dict[str, Any]] = {"anchors": 5}
    transform = RowParameter()  # [V, K], [V, s] with slots
    support: Tensor | None
    anchor_ids: Tensor | None

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        anchors: int,
        nonnegative: bool = True,
        sparse: bool = False,
        slots: int | None = None,
        scan_every: int = 16,
        padding_idx: int | None = None,
        init: AnchorInit | None = None,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, sparse or slots is not None)
        self.anchors, self.scan_every = (
            positive("anchors", anchors),
            positive("scan_every", scan_every),
        )
        self.nonnegative, self.slots = (
            bool(nonnegative),
            None if slots is None else positive("slots", slots),
        )
        if self.slots is not None and self.slots > self.anchors:
            raise ArgumentError(
                f"slots={slots}: a row cannot hold more than the {anchors} anchors; leave slots out to keep all"
            )
        if init is not None and not hasattr(init, "fill"):
            raise ArgumentError(
                f"init={init!r}: give an object such as fb.HalfNormal() or fb.Frequency(counts)"
            )
        self.init: AnchorInit = HalfNormal() if init is None else init
        width = self.anchors if self.slots is None else self.slots
        self.atoms = empty_parameter((anchors, embedding_dim), dtype, device)  # [K, d]
        self._slots = None if self.slots is None else Slots(self, self.scan_every)
        self.add_rows("transform", width, dtype, device)
        support = None
        if self.slots is not None:
            shape = (self.num_embeddings, self.slots)
            support = torch.empty(shape, dtype=support_dtype(self.anchors), device=device)
        self.register_buffer("support", support)  # [V, s]
        self.register_buffer("anchor_ids", None)  # [K]
        self.initialize(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initialize anchors and weights as ``init`` says; with slots every row gets random anchors."""
        transform = self.transform
        ids = self.init.fill(self.atoms, transform, self.nonnegative, generator)
        if self.support is not None and self.slots is not None:
            rows = (self.num_embeddings, self.slots, self.anchors)
            self.support.copy_(random_support(*rows, generator))
        if ids is not None:
            start_as_themselves(ids, transform, self.support)
        self.anchor_ids = None if ids is None else ids.to(self.device)

    def _track(self, name: str) -> None:
        super()._track(name)
        if name == "transform" and self._slots is not None:
            self._lazy[name].slots = self._slots

    @property
    def slot_group(self) -> Any:
        """The process group whose rows are scored together: set it with DistributedDataParallel and slots."""
        return None if self._slots is None else self._slots.group

    @slot_group.setter
    def slot_group(self, group: Any) -> None:
        if self._slots is None:
            raise ArgumentError("slot_group is for tables with slots")
        self._slots.group = group

    def related(self, graph: Graph) -> Exempt:
        """Return the (object, anchor) entries whose object and anchor object ``graph`` relates, for ``fb.NonNegativeL1``."""
        if self.anchor_ids is None:
            raise ArgumentError(
                "the anchors of this table stand for no objects, so nothing relates to them: choose objects as anchors, "
                "for example init=fb.Frequency(counts)"
            )
        if not hasattr(graph, "objects") or not hasattr(graph, "matrix"):
            raise ArgumentError(
                f"got {type(graph).__name__}: give a graph, such as fb.Graph.from_edges(V, pairs)"
            )
        if graph.objects != self.num_embeddings:
            raise ArgumentError(
                f"the graph is over {graph.objects} objects, the table has {self.num_embeddings}"
            )
        entries = graph.matrix[:, self.anchor_ids.cpu().numpy()].tocoo()
        pairs = torch.stack(
            [torch.from_numpy(part.astype("int64")) for part in (entries.row, entries.col)], dim=1
        )
        return Exempt(self, pairs, self.anchors)

    def codes(self, ids: Tensor) -> Codes:
        """Every anchor, weighted by the row of the transform; with slots those of the support."""
        indices = None if self.support is None else self.support[ids].long()
        return Codes(indices, self.row_values("transform", ids), self.atoms)

    def lookup(self, ids: Tensor) -> Tensor:
        """Compose rows; with slots every distinct id once."""
        rows = self._fused(ids.reshape(-1), None, None, 0)
        return super().lookup(ids) if rows is None else rows.reshape(*ids.shape, self.embedding_dim)

    def pooled(self, ids: Tensor, owner: Tensor, bags: int, weights: Tensor | None) -> Tensor:
        """Sum rows into bags; with slots without composing the rows of all ids first."""
        rows = self._fused(ids, owner, weights, bags)
        return super().pooled(ids, owner, bags, weights) if rows is None else rows

    def _fused(
        self, ids: Tensor, owner: Tensor | None, weights: Tensor | None, bags: int
    ) -> Tensor | None:
        """Return rows or bags by one operator, where it can serve: with slots, and the parameters themselves in place."""
        stored, atoms = self._parameters.get("transform"), self._parameters.get("atoms")
        own = isinstance(stored, nn.Parameter) and isinstance(atoms, nn.Parameter)
        if self.support is None or not own or is_transformed(ids):
            return None
        padding = -1 if self.padding_idx is None else self.padding_idx
        number = self._row_numbers["transform"]
        rows: Tensor = slot_rows(
            stored, self.support, atoms, ids, owner, weights, bags, padding, number
        )[0]
        return rows

    def bands(self, values: str, dictionary: str, layout: str) -> list[Band]:
        """Sparse codes over the anchors, in the layout asked for or the smallest."""
        support = None if self.support is None else self.support.cpu().numpy()
        codes, left = sparse_layout(to_numpy(self.transform), layout, values, support, self.anchors)
        matrix = None if left is None else Matrix.encode(left, values)
        return [
            Band(
                self.num_embeddings, codes, matrix, Matrix.encode(to_numpy(self.atoms), dictionary)
            )
        ]

    def parameter_count(self) -> int:
        """nnz(T) + K d, as the paper's tables count."""
        return int(torch.count_nonzero(self.transform)) + self.atoms.numel()

    def fit_dense(self, matrix: Tensor, weights: Tensor | None = None) -> None:  # [V, d], [V]
        """Fit T A to the matrix, errors of rows weighed by ``weights``: Σ_i w_i ||x_i - t_i A||².

        Semi-non-negative factorisation, or truncated SVD where T may be negative; with slots matching pursuit over a
        dictionary learnt with it. What anchors stood for before is forgotten: they are fitted too.

        >>> table = AnchorTable(500, 8, anchors=40, slots=4)
        >>> rows = torch.randn(500, 8, generator=torch.Generator().manual_seed(0))
        >>> with torch.no_grad(): table.fit_dense(rows, weights=torch.linspace(1, 9, 500))
        >>> bool((table.weight - rows).square().mean() < 0.3)
        True
        """
        if self.support is None:
            fit = nonnegative_factors if self.nonnegative else low_rank
            transform, atoms = fit(matrix, self.anchors, weights)
        else:
            support, transform, atoms = sparse_codes(
                matrix, self.anchors, self.transform.shape[1], self.nonnegative, weights
            )
            self.support.copy_(support)
        self.atoms.copy_(atoms)
        self.anchor_ids = None
        self.transform.copy_(transform)


def start_as_themselves(
    ids: Tensor, transform: Tensor, support: Tensor | None
) -> None:  # [K], [V, K] or [V, s], [V, s]
    """Give the rows of objects that are anchors the weight 1 for themselves and 0 for the others, in place."""
    places = torch.arange(len(ids))
    transform[ids] = 0.0
    if support is None:
        transform[ids, places] = 1.0
        return
    own = support[ids].long()
    own = torch.where(
        own == places[:, None], own[:, :1], own
    )  # where the anchor is among them already, it changes places
    own[:, 0] = places
    support[ids] = own.to(support.dtype)
    transform[ids, 0] = 1.0


def support_dtype(anchors: int) -> torch.dtype:
    """Return the smallest integer type that can name every anchor."""
    return torch.uint8 if anchors <= 256 else torch.int16 if anchors <= 32768 else torch.int32


def random_support(
    rows: int, slots: int, anchors: int, generator: torch.Generator | None
) -> Tensor:  # -> int [V, s]
    """Return distinct anchors for every row: a random first one, then a random stride that meets every anchor once.

    >>> random_support(3, 4, 4, None).sort().values
    tensor([[0, 1, 2, 3],
            [0, 1, 2, 3],
            [0, 1, 2, 3]], dtype=torch.uint8)
    """
    strides = torch.tensor(
        [n for n in range(1, max(2, anchors)) if math.gcd(n, anchors) == 1], dtype=torch.int32
    )
    kind = support_dtype(anchors)
    support = torch.empty(rows, slots, dtype=kind)
    for start in range(0, rows, BLOCK):
        count = min(BLOCK, rows - start)
        first = torch.randint(anchors, (count, 1), generator=generator)
        stride = strides[torch.randint(len(strides), (count, 1), generator=generator)]
        support[start : start + count] = ((first + stride * torch.arange(slots)) % anchors).to(kind)
    return support
