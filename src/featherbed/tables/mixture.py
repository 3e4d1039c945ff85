"""Mixtures of anchors: sets of anchors of different sizes, summed directly or after a softmax."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from featherbed.anchors.random import AnchorInit, HalfNormal
from featherbed.checks import check_integer
from featherbed.errors import ArgumentError
from featherbed.optim.exempt import Exempt
from featherbed.optim.lazy import RowParameter
from featherbed.packed.band import Band, Entries
from featherbed.packed.matrix import Floats, Matrix
from featherbed.tables.anchor import related_entries, start_as_themselves
from featherbed.tables.codes import Codes
from featherbed.tables.fitting import low_rank, nonnegative_factors, row_weights
from featherbed.tables.rows import empty_parameter, to_numpy
from featherbed.tables.table import Table

if TYPE_CHECKING:
    from featherbed.graphs.relation import Relation

BLOCK = 1 << 16  # rows weighed at once in float64
OWN_SHARE = 0.9  # of an object that is an anchor, in its own row of a softmax
MARGIN = 1.25  # how much larger than need be the simplex around fitted rows is


class MixtureTable(Table):
    """E = Σ_m softmax(T_m) A_m: M sets of anchors A_m [K_m, d] with sparse transforms T_m [V, K_m].

    Liang et al. 2021 (ANT), appendix E and figure 5; the softmax runs over each row of T_m. A zero
    of T_m does not remove an anchor: its weight is e^0 = 1 before normalization, so a row of zeros
    is the mean of the anchors. ``"linear"`` is the sum Σ_m T_m A_m, equal to one ``fb.AnchorTable``
    over all sets.

    All sets share one ``transform`` [V, Σ K_m] and one ``atoms`` [Σ K_m, d], split by
    ``set_sizes``: ``fb.Yogi(parameters, penalties={table.transform: fb.NonNegativeL1(lam)})``.

    Args:
        anchors: K of every set, or one size per set.
        sets: number of sets M; 2 unless ``anchors`` lists sizes.
        combine: "softmax" or "linear".
        inits: initialization, one object such as ``fb.HalfNormal()`` or ``fb.Frequency(counts)``
            for all sets, or one per set. Objects that are anchors (``anchor_ids``, per set)
            initially have 9/10 of the softmax of their set, or the weight 1 of a linear sum, on
            themselves.
        nonnegative: whether transforms are initialized and fitted at 0 and above.
        sparse: gradients of the transform contain the rows of the batch only, for optimizers of
            this library.

    >>> table = MixtureTable(1000, 16, anchors=(8, 5))
    >>> table.transform.shape, table.atoms.shape, table.sets, table(torch.tensor([3])).shape
    (torch.Size([1000, 13]), torch.Size([13, 16]), 2, torch.Size([1, 16]))
    """

    example: ClassVar[dict[str, Any]] = {"anchors": (3, 4)}
    has_anchors: ClassVar[bool] = True
    transform = RowParameter()  # [V, Σ K_m]
    support: ClassVar[None] = None

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        anchors: int | Sequence[int],
        sets: int | None = None,
        combine: str = "softmax",
        inits: AnchorInit | Sequence[AnchorInit] | None = None,
        nonnegative: bool = True,
        sparse: bool = False,
        padding_idx: int | None = None,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, sparse)
        self.set_sizes = sizes_of(anchors, sets)
        self.sets = len(self.set_sizes)
        self.anchors = anchors if isinstance(anchors, int) else self.set_sizes
        if combine not in ("softmax", "linear"):
            raise ArgumentError(f"combine={combine!r}: sets are combined by softmax or linear")
        self.combine, self.nonnegative = combine, bool(nonnegative)
        self.inits = inits_of(inits, self.sets)
        total = sum(self.set_sizes)
        self.atoms = empty_parameter((total, embedding_dim), dtype, device)  # [Σ K_m, d]
        self.add_rows("transform", total, dtype, device)
        for number in range(self.sets):
            self.register_buffer(f"anchor_ids_{number}", None)  # [K_m]
        self.initialize(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initialize every set of anchors and its weights by its ``init``."""
        blocks = zip(self._by_set(self.atoms, 0), self._by_set(self.transform, 1), strict=True)
        for number, (init, (atoms, block)) in enumerate(zip(self.inits, blocks, strict=True)):
            ids = init.fill(atoms, block, self.nonnegative, generator)
            if ids is not None:
                start_as_themselves(ids, block, None)
                block[ids] *= own_weight(len(atoms)) if self.combine == "softmax" else 1.0
            setattr(self, f"anchor_ids_{number}", None if ids is None else ids.to(self.device))

    @property
    def anchor_ids(self) -> tuple[Tensor | None, ...]:
        """The objects that are anchors [K_m], or None, for each set."""
        return tuple(getattr(self, f"anchor_ids_{number}") for number in range(self.sets))

    @property
    def anchor_count(self) -> int:
        """Number of anchors, over all sets."""
        return len(self.atoms)

    @property
    def penalized(self) -> tuple[nn.Parameter, ...]:
        """The transform."""
        return (self.transform,)

    @property
    def weighted_codes(self) -> bool:
        """True: every anchor of every set has a weight."""
        return True

    def anchor_objects(self) -> Tensor | None:  # int64 [Σ K_m]
        """Return the ``anchor_ids`` of all sets, one after the other."""
        parts = [ids for ids in self.anchor_ids if ids is not None]
        return torch.cat(parts) if len(parts) == self.sets else None

    def related(self, graph: Relation) -> Exempt:
        """Return the (object, anchor) entries, over all sets, that ``graph`` relates."""
        return related_entries(self, graph)

    @classmethod
    def anchor_sizes(cls, settings: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the size of every set."""
        return sizes_of(settings["anchors"], settings.get("sets"))

    @classmethod
    def init_settings(cls, inits: Sequence[AnchorInit]) -> dict[str, Any]:
        """Return ``inits``."""
        return {"inits": inits[0] if len(inits) == 1 else list(inits)}

    def _by_set(self, tensor: Tensor, dim: int) -> tuple[Tensor, ...]:
        return torch.split(tensor, list(self.set_sizes), dim)

    def codes(self, ids: Tensor) -> Codes:
        """All anchors of all sets, weighted by the row of the transform or its softmax."""
        weights: Tensor = self.row_values("transform", ids)  # [..., Σ K_m]
        if self.combine == "softmax":
            weights = torch.cat([part.softmax(-1) for part in self._by_set(weights, -1)], -1)
        return Codes(None, weights, self.atoms)

    def bands(self, values: str, dictionary: str, layout: str) -> list[Band]:
        """Sparse codes over the anchors and, with a softmax, the sum of each set's anchors."""
        weights, atoms = to_numpy(self.transform), to_numpy(self.atoms)
        if self.combine == "softmax":
            weights = sparse_softmax(weights, self.set_sizes)
            sums = np.add.reduceat(atoms.astype(np.float64), starts_of(self.set_sizes))
            atoms = np.concatenate([atoms, sums.astype(np.float32)])
        codes, left = Entries.of(weights).layout(layout, values)
        matrix = None if left is None else Matrix.encode(left, values)
        return [Band(self.num_embeddings, codes, matrix, Matrix.encode(atoms, dictionary))]

    def parameter_count(self) -> int:
        """nnz(T) + Σ K_m d, as the paper's tables count."""
        return int(torch.count_nonzero(self.transform)) + self.atoms.numel()

    def fit_dense(self, matrix: Tensor, weights: Tensor | None = None) -> None:  # [V, d], [V]
        """Fit the sets: a linear sum like ``AnchorTable``, a softmax by principal components.

        A softmax over K anchors reaches every point of the simplex they span, so sets of K_m
        anchors that enclose the rows represent the best mean and Σ (K_m - 1) components exactly.
        The weights are dense: sparsity comes from training with a penalty.
        """
        if self.combine == "linear":
            fit = nonnegative_factors if self.nonnegative else low_rank
            transform, atoms = fit(matrix, sum(self.set_sizes), weights)
            self.transform.copy_(transform)
            self.atoms.copy_(atoms)
            return
        given, wide = row_weights(weights, matrix), matrix.double()
        share = None if given is None else torch.from_numpy(given).to(wide)
        mean = wide.mean(0) if share is None else share @ wide / share.sum()
        values, directions = low_rank(wide - mean, sum(self.set_sizes) - self.sets, share)
        free = [size - 1 for size in self.set_sizes]
        blocks = zip(self._by_set(self.atoms, 0), self._by_set(self.transform, 1), strict=True)
        parts = zip(torch.split(values, free, 1), torch.split(directions, free), strict=True)
        for (atoms, transform), (points, axes) in zip(blocks, parts, strict=True):
            weights, corners = enclosing_simplex(points)
            atoms.copy_(corners @ axes + mean / self.sets)
            transform.copy_((weights / weights.amin(1, keepdim=True)).log())


def sizes_of(anchors: Any, sets: int | None) -> tuple[int, ...]:
    """Return the size of every set, or raise an error.

    >>> sizes_of(10, 3), sizes_of([4, 6], None)
    ((10, 10, 10), (4, 6))
    """
    if isinstance(anchors, str) or not isinstance(anchors, Sequence):
        count = 2 if sets is None else check_integer("sets", sets)
        return (check_integer("anchors", anchors),) * count
    sizes = tuple(check_integer("anchors", size) for size in anchors)
    if not sizes or (sets is not None and check_integer("sets", sets) != len(sizes)):
        given = f"anchors={anchors!r}, sets={sets!r}"
        raise ArgumentError(f"{given}: give one size for every set, or one number for all")
    return sizes


def inits_of(inits: Any, sets: int) -> tuple[AnchorInit, ...]:
    """Return the initialization of every set, or raise an error."""
    one = inits is None or hasattr(inits, "fill")
    if not one and (not isinstance(inits, Sequence) or len(inits) != sets):
        raise ArgumentError(
            f"inits={inits!r}: give one object such as fb.HalfNormal() for all {sets} sets, or one "
            "for each"
        )
    given = (inits,) * sets if one else inits
    found = tuple(HalfNormal() if init is None else init for init in given)
    for init in found:
        if not hasattr(init, "fill"):
            raise ArgumentError(
                f"inits hold {init!r}: give objects such as fb.HalfNormal() or fb.Frequency(counts)"
            )
    return found


def starts_of(sizes: Sequence[int]) -> list[int]:
    """Return the start index of each set."""
    return [sum(sizes[:number]) for number in range(len(sizes))]


def own_weight(anchors: int) -> float:
    """Return t such that e^t / (e^t + K - 1) = OWN_SHARE."""
    return math.log(max(1, anchors - 1) * OWN_SHARE / (1 - OWN_SHARE))


def sparse_softmax(
    transform: NDArray[np.floating], sizes: Sequence[int]
) -> Floats:  # [V, Σ K_m] -> [V, Σ K_m + M]
    """Return sparse softmax weights of the anchors, then of the sum of each set's anchors.

    row = Σ_k (e^t_k - 1) / Z a_k + 1 / Z Σ_k a_k with Z = Σ_k e^t_k, so zeros of t have no weight
    in the first sum; a set without a zero in its row uses its smallest t instead of 0. Exponents
    are relative to the largest of the row.

    >>> sparse_softmax(np.array([[0.0, 0.0, np.log(3.0)]]), [3]).round(2)
    array([[0. , 0. , 0.4, 0.2]], dtype=float32)
    """
    rows, total = transform.shape
    out = np.zeros((rows, total + len(sizes)), dtype=np.float32)
    for start in range(0, rows, BLOCK):
        block = slice(start, min(start + BLOCK, rows))
        for number, (first, size) in enumerate(zip(starts_of(sizes), sizes, strict=True)):
            t = transform[block, first : first + size].astype(np.float64)
            peak = t.max(1, keepdims=True)
            level = np.where((t == 0).any(1, keepdims=True), 0.0, t.min(1, keepdims=True))
            powers, base = np.exp(t - peak), np.exp(level - peak)
            parts = powers.sum(1, keepdims=True)
            out[block, first : first + size] = (powers - base) * (t != level) / parts
            out[block, total + number] = (base / parts)[:, 0]
    return out


def enclosing_simplex(points: Tensor) -> tuple[Tensor, Tensor]:  # [V, K - 1] -> [V, K], [K, K - 1]
    """Return positive weights with sum 1 and K corners, weights @ corners = points.

    The corners are the columns of Helmert's matrix H (H H^T = 1, H 1 = 0), scaled: w = 1/K + H^T x
    / r is positive for r > K max(-H^T x), and then w (r H^T) = x.

    >>> points = torch.tensor([[1.0, 2.0], [-3.0, 0.0]])
    >>> weights, corners = enclosing_simplex(points)
    >>> bool((weights > 0).all()), torch.allclose(weights @ corners, points, atol=1e-5)
    (True, True)
    """
    count = points.shape[1] + 1
    helmert = points.new_ones(count - 1, count).tril()
    helmert.diagonal(1).copy_(-torch.arange(1.0, count))
    helmert /= helmert.norm(dim=1, keepdim=True)
    # each coordinate is brought to one scale, and back in the corners
    scale = points.abs().amax(0).clamp(min=1e-30)
    across = points / scale @ helmert
    radius = MARGIN * count * (-across).amax().clamp(min=1e-3) if count > 1 else 1.0
    return 1 / count + across / radius, radius * helmert.T * scale
