"""Anchor & Transform: every row is a sparse, non-negative mixture of a few anchors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from featherbed.anchors.random import AnchorInit, HalfNormal
from featherbed.checks import check_integer
from featherbed.errors import ArgumentError
from featherbed.optim.exempt import Exempt
from featherbed.optim.lazy import RowParameter
from featherbed.optim.lazy.operators import slot_rows
from featherbed.optim.lazy.slots import Slots
from featherbed.packed.band import Band, Entries
from featherbed.packed.matrix import Matrix
from featherbed.tables.codes import Codes
from featherbed.tables.computed import is_transformed
from featherbed.tables.fitting import low_rank, nonnegative_factors, sparse_codes
from featherbed.tables.rows import empty_parameter, encode, to_numpy
from featherbed.tables.table import Table

if TYPE_CHECKING:
    from featherbed.graphs.relation import Relation

BLOCK = 1 << 20  # rows started at once
ANCHORS = 256  # by default, with slots: their numbers are a byte each in the file


class AnchorTable(Table):
    """E = T A: a sparse transform T [V, K] over K anchors A [K, d].

    Liang et al. 2021 (ANT), equation 1: minimize task loss + lambda ||T||_1 over T >= 0. The
    optimizer applies the penalty: ``fb.Yogi(parameters, penalties={table.transform:
    fb.NonNegativeL1(lam)})``. ``nonnegative`` affects the initialization of the transform and its
    fit by ``from_dense``.

    Args:
        anchors: number of anchors K; with ``slots`` it may be left out: 256, at most V.
        sparse: gradients of the transform contain the rows of the batch only (appendix H); with an
            optimizer of this library the cost of a step depends on these rows only, and the result
            equals that of dense gradients.
        slots: maximum number of (anchor, weight) pairs per row: ``transform`` is [V, slots] and
            ``support`` holds the anchor of each slot. Training memory is O(V slots), independent of
            K. Implies ``sparse``.
        scan_every: number of steps between scans (with slots) that score the anchors a row lacks;
            the best one replaces the weakest.
        init: initialization of atoms and transform: random (``fb.HalfNormal``, ``fb.Xavier``), or
            with objects as anchors (``fb.Frequency`` ...); their ids are ``anchor_ids``, and each
            of them initially has weight 1 for itself.

    >>> import torch
    >>> table = AnchorTable(1000, 16, anchors=8)
    >>> table.transform.shape, table.atoms.shape, table(torch.tensor([3])).shape
    (torch.Size([1000, 8]), torch.Size([8, 16]), torch.Size([1, 16]))
    >>> AnchorTable(1000, 16, anchors=500, slots=4).transform.shape
    torch.Size([1000, 4])
    """

    example: ClassVar[dict[str, Any]] = {"anchors": 5}
    has_anchors: ClassVar[bool] = True
    sparse_codes: ClassVar[bool] = True
    row_tensors = ("transform", "support")
    transform = RowParameter()  # [V, K], [V, s] with slots
    support: Tensor | None
    anchor_ids: Tensor | None

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        anchors: int | None = None,
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
        if anchors is None:
            if slots is None:
                raise ArgumentError(
                    "an anchor table needs anchors=...: give anchors=50, or slots=8 (256 anchors)"
                )
            anchors = max(check_integer("slots", slots), min(ANCHORS, self.num_embeddings))
        self.anchors, self.nonnegative = check_integer("anchors", anchors), bool(nonnegative)
        self.scan_every = check_integer("scan_every", scan_every)
        self.slots = None if slots is None else check_integer("slots", slots)
        if self.slots is not None and self.slots > self.anchors:
            raise ArgumentError(
                f"slots={slots}: a row cannot hold more than the {anchors} anchors; leave slots "
                "out to keep all"
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
        """Initialize anchors and weights by ``init``; with slots, rows get random anchors."""
        ids = self.init.fill(self.atoms, self.transform, self.nonnegative, generator)
        if self.support is not None:
            rows, slots = self.support.shape
            self.support.copy_(random_support(rows, slots, self.anchors, generator))
        if ids is not None:
            start_as_themselves(ids, self.transform, self.support)
        self.anchor_ids = None if ids is None else ids.to(self.device)

    def _track(self, name: str) -> None:
        super()._track(name)
        if name == "transform" and self._slots is not None:
            self._lazy[name].slots = self._slots

    @property
    def slot_group(self) -> Any:
        """Process group whose rows are scored together: set it with DDP and slots."""
        return None if self._slots is None else self._slots.group

    @slot_group.setter
    def slot_group(self, group: Any) -> None:
        if self._slots is None:
            raise ArgumentError("slot_group is for tables with slots")
        self._slots.group = group

    def related(self, graph: Relation) -> Exempt:
        """Return the (object, anchor) entries related by ``graph``, for ``fb.NonNegativeL1``."""
        return related_entries(self, graph)

    @property
    def anchor_count(self) -> int:
        """Number of anchors."""
        return len(self.atoms)

    @property
    def penalized(self) -> tuple[nn.Parameter, ...]:
        """The transform."""
        return (self.transform,)

    @property
    def weighted_codes(self) -> bool:
        """True without slots."""
        return self.support is None

    @property
    def factors(self) -> tuple[nn.Parameter, nn.Parameter | None] | None:
        """(transform, atoms) without slots."""
        plain = self.support is None and "factors" in vars(type(self))
        return (self.transform, self.atoms) if plain else None

    def anchor_objects(self) -> Tensor | None:  # int64 [K]
        """Return ``anchor_ids``."""
        return self.anchor_ids

    @classmethod
    def anchor_sizes(cls, settings: Mapping[str, Any]) -> tuple[int, ...]:
        """Return (anchors,)."""
        return (int(settings["anchors"]),)

    @classmethod
    def init_settings(cls, inits: Sequence[AnchorInit]) -> dict[str, Any]:
        """Return ``init``."""
        return {"init": inits[0]}

    def codes(self, ids: Tensor) -> Codes:
        """All anchors weighted by the row of the transform; with slots, those of the support."""
        indices = None if self.support is None else self.support[ids].long()
        return Codes(indices, self.row_values("transform", ids), self.atoms)

    def lookup(self, ids: Tensor) -> Tensor:
        """Compose rows; with slots, once for every distinct id."""
        rows = self._fused(ids.reshape(-1))
        return super().lookup(ids) if rows is None else rows.reshape(*ids.shape, self.embedding_dim)

    def pooled(self, ids: Tensor, owner: Tensor, bags: int, weights: Tensor | None) -> Tensor:
        """Sum rows into bags; with slots, without composing the rows of all ids first."""
        rows = self._fused(ids, owner, weights, bags)
        return super().pooled(ids, owner, bags, weights) if rows is None else rows

    def _fused(
        self, ids: Tensor, owner: Tensor | None = None, weights: Tensor | None = None, bags: int = 0
    ) -> Tensor | None:
        """Return rows or bags from the fused operator, None where it cannot be used."""
        stored, atoms = self._parameters.get("transform"), self._parameters.get("atoms")
        own = isinstance(stored, nn.Parameter) and isinstance(atoms, nn.Parameter)
        if self.support is None or not own or is_transformed(ids):
            return None
        padding = -1 if self.padding_idx is None else self.padding_idx
        how = (padding, self._row_numbers["transform"])
        rows: Tensor = slot_rows(stored, self.support, atoms, ids, owner, weights, bags, *how)[0]
        return rows

    def bands(self, values: str, dictionary: str, layout: str) -> list[Band]:
        """Sparse codes over the anchors, in the given or the smallest layout."""
        support = None if self.support is None else self.support.cpu().numpy()
        entries = Entries.of(to_numpy(self.transform), support, self.anchors)
        codes, left = entries.layout(layout, values)
        matrix = None if left is None else Matrix.encode(left, values)
        return [Band(self.num_embeddings, codes, matrix, encode(self.atoms, dictionary))]

    def parameter_count(self) -> int:
        """nnz(T) + K d, as in the paper's tables."""
        return int(torch.count_nonzero(self.transform)) + self.atoms.numel()

    def fit_dense(self, matrix: Tensor, weights: Tensor | None = None) -> None:  # [V, d], [V]
        """Fit T A to the matrix by weighted least squares: Σ_i w_i ||x_i - t_i A||².

        Semi-nonnegative factorization, or truncated SVD if T may be negative; with slots, matching
        pursuit over a learned dictionary. ``anchor_ids`` are reset, since anchors are fitted too.

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


def related_entries(table: Any, graph: Relation) -> Exempt:
    """Return the (object, anchor) entries of a table's transform related by ``graph``."""
    anchors = table.anchor_objects()
    if anchors is None:
        raise ArgumentError(
            "the anchors of this table represent no objects, so no graph relates to them: choose "
            "objects as anchors, for example init=fb.Frequency(counts)"
        )
    if not hasattr(graph, "objects") or not hasattr(graph, "matrix"):
        raise ArgumentError(
            f"got {type(graph).__name__}: give a graph, such as fb.Graph.from_edges(V, pairs)"
        )
    if graph.objects != table.num_embeddings:
        raise ArgumentError(
            f"the graph is over {graph.objects} objects, the table has {table.num_embeddings}"
        )
    entries = graph.matrix[:, anchors.cpu().numpy()].tocoo()
    pairs = [torch.from_numpy(part.astype("int64")) for part in (entries.row, entries.col)]
    return Exempt(table, torch.stack(pairs, dim=1), len(anchors))


def start_as_themselves(
    ids: Tensor, transform: Tensor, support: Tensor | None
) -> None:  # [K], [V, K] or [V, s], [V, s]
    """Give objects that are anchors weight 1 for themselves and 0 for other anchors, in place."""
    places = torch.arange(len(ids))
    transform[ids] = 0.0
    if support is None:
        transform[ids, places] = 1.0
        return
    own = support[ids].long()
    # where the anchor is among them already, it changes places
    own = torch.where(own == places[:, None], own[:, :1], own)
    own[:, 0] = places
    support[ids] = own.to(support.dtype)
    transform[ids, 0] = 1.0


def support_dtype(anchors: int) -> torch.dtype:
    """Return the smallest integer type that can hold every anchor index."""
    return torch.uint8 if anchors <= 256 else torch.int16 if anchors <= 32768 else torch.int32


def random_support(
    rows: int, slots: int, anchors: int, generator: torch.Generator | None
) -> Tensor:  # -> int [V, s]
    """Return distinct random anchors for every row: a random start and a random coprime stride.

    >>> random_support(3, 4, 4, None).sort().values
    tensor([[0, 1, 2, 3],
            [0, 1, 2, 3],
            [0, 1, 2, 3]], dtype=torch.uint8)
    """
    coprime = [n for n in range(1, max(2, anchors)) if math.gcd(n, anchors) == 1]
    strides = torch.tensor(coprime, dtype=torch.int32)
    kind = support_dtype(anchors)
    support = torch.empty(rows, slots, dtype=kind)
    for start in range(0, rows, BLOCK):
        count = min(BLOCK, rows - start)
        first = torch.randint(anchors, (count, 1), generator=generator)
        stride = strides[torch.randint(len(strides), (count, 1), generator=generator)]
        support[start : start + count] = ((first + stride * torch.arange(slots)) % anchors).to(kind)
    return support
