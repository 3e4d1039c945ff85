"""Mixtures of anchors: several sets of them, each with its own start and size, summed after a softmax or as they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from featherbed.anchors.random import AnchorInit, HalfNormal
from featherbed.errors import ArgumentError
from featherbed.optim.lazy import RowParameter
from featherbed.packed.band import Band
from featherbed.packed.codes import sparse_layout
from featherbed.packed.matrix import Floats, Matrix
from featherbed.tables.anchor import start_as_themselves
from featherbed.tables.codes import Codes
from featherbed.tables.fitting import low_rank, nonnegative_factors, row_weights
from featherbed.tables.table import Table, empty_parameter, positive, to_numpy

BLOCK = 1 << 16  # rows weighed at once in float64
OWN_SHARE = 0.9  # of an object that is an anchor, in its own row of a softmax
MARGIN = 1.25  # how much larger than need be the simplex around fitted rows is


class MixtureTable(Table):
    """E = Σ_m softmax(T_m) A_m: M sets of anchors A_m [K_m, d], each under its own sparse transform T_m [V, K_m].

    Liang et al. 2021 (ANT), appendix E and figure 5; the softmax runs over each row of T_m. A zero of T_m does not switch an
    anchor off: it weighs e^0 = 1 before the softmax divides, so a row of zeros is the mean of the anchors. ``"linear"`` is the
    plain sum Σ_m T_m A_m, which equals one ``fb.AnchorTable`` over all sets side by side.

    The sets stand side by side in one ``transform`` [V, Σ K_m] and one ``atoms`` [Σ K_m, d], with bounds ``set_sizes``:
    ``fb.Yogi(parameters, penalties={table.transform: fb.NonNegativeL1(lam)})`` makes them all sparse.

    Args:
        anchors: K of every set, or one size for each.
        sets: M; 2 unless ``anchors`` names sizes.
        combine: "softmax" or "linear".
        inits: how the sets start: one object such as ``fb.HalfNormal()`` or ``fb.Frequency(counts)`` for all, or one for each.
            Objects that are anchors (``anchor_ids``, for each set) start with 9/10 of that set's softmax on themselves, or with
            the weight 1 of a linear sum.
        nonnegative: whether transforms start, and are fitted, at 0 and above.
        sparse: gradients of the transform hold the rows of the batch only, for optimizers of this library.

    >>> table = MixtureTable(1000, 16, anchors=(8, 5))
    >>> table.transform.shape, table.atoms.shape, table.sets, table(torch.tensor([3])).shape
    (torch.Size([1000, 13]), torch.Size([13, 16]), 2, torch.Size([1, 16]))
    """

    example: ClassVar[dict[str, Any]] = {"anchors": (3, 4)}
    transform = RowParameter()  # [V, Σ K_m]

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
        self.sets, self.anchors = (
            len(self.set_sizes),
            anchors if isinstance(anchors, int) else self.set_sizes,
        )
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
        """Initialize every set of anchors and its weights as its ``init`` says."""
        transform = self.transform
        blocks = zip(
            self.inits, self._by_set(self.atoms, 0), self._by_set(transform, 1), strict=True
        )
        for number, (init, atoms, block) in enumerate(blocks):
            ids = init.fill(atoms, block, self.nonnegative, generator)
            if ids is not None:
                start_as_themselves(ids, block, None)
                block[ids] *= own_weight(len(atoms)) if self.combine == "softmax" else 1.0
            setattr(self, f"anchor_ids_{number}", None if ids is None else ids.to(self.device))

    @property
    def anchor_ids(self) -> tuple[Tensor | None, ...]:
        """For each set the objects that are its anchors [K_m], or None."""
        return tuple(getattr(self, f"anchor_ids_{number}") for number in range(self.sets))

    def _by_set(self, tensor: Tensor, dim: int) -> tuple[Tensor, ...]:
        return torch.split(tensor, list(self.set_sizes), dim)

    def codes(self, ids: Tensor) -> Codes:
        """Every anchor of every set, weighted by the softmax of its set's row, or by the row itself."""
        weights: Tensor = self.row_values("transform", ids)  # [..., Σ K_m]
        if self.combine == "softmax":
            weights = torch.cat([part.softmax(-1) for part in self._by_set(weights, -1)], -1)
        return Codes(None, weights, self.atoms)

    def bands(self, values: str, dictionary: str, layout: str) -> list[Band]:
        """Sparse codes over the anchors; under a softmax also over the sum of each set's anchors, which stand last."""
        weights, atoms = to_numpy(self.transform), to_numpy(self.atoms)
        if self.combine == "softmax":
            weights = sparse_softmax(weights, self.set_sizes)
            sums = np.add.reduceat(atoms.astype(np.float64), starts_of(self.set_sizes))
            atoms = np.concatenate([atoms, sums.astype(np.float32)])
        codes, left = sparse_layout(weights, layout, values)
        matrix = None if left is None else Matrix.encode(left, values)
        return [Band(self.num_embeddings, codes, matrix, Matrix.encode(atoms, dictionary))]

    def parameter_count(self) -> int:
        """nnz(T) + Σ K_m d, as the paper's tables count."""
        return int(torch.count_nonzero(self.transform)) + self.atoms.numel()

    def fit_dense(self, matrix: Tensor, weights: Tensor | None = None) -> None:  # [V, d], [V]
        """Fit the sets: for a linear sum as ``AnchorTable`` does, under a softmax by principal components.

        A softmax over K anchors reaches every point inside the simplex they span, so sets of K_m anchors that enclose the rows
        give exactly the best mean and Σ (K_m - 1) components. Weights are dense: sparsity comes from training with a penalty.
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
    """Return the size of every set, or say what is wrong with what was given.

    >>> sizes_of(10, 3), sizes_of([4, 6], None)
    ((10, 10, 10), (4, 6))
    """
    if isinstance(anchors, str) or not isinstance(anchors, Sequence):
        return (positive("anchors", anchors),) * (2 if sets is None else positive("sets", sets))  # type: ignore[arg-type]
    sizes = tuple(positive("anchors", size) for size in anchors)
    if not sizes or (sets is not None and positive("sets", sets) != len(sizes)):
        raise ArgumentError(
            f"anchors={anchors!r}, sets={sets!r}: give one size for every set, or one number for all"
        )
    return sizes


def inits_of(inits: Any, sets: int) -> tuple[AnchorInit, ...]:
    """Return the start of every set, or say what is wrong with what was given."""
    one = inits is None or hasattr(inits, "fill")
    if not one and (not isinstance(inits, Sequence) or len(inits) != sets):
        raise ArgumentError(
            f"inits={inits!r}: give one object such as fb.HalfNormal() for all {sets} sets, or one for each"
        )
    found = tuple(
        HalfNormal() if init is None else init for init in ((inits,) * sets if one else inits)
    )
    for init in found:
        if not hasattr(init, "fill"):
            raise ArgumentError(
                f"inits hold {init!r}: give objects such as fb.HalfNormal() or fb.Frequency(counts)"
            )
    return found


def starts_of(sizes: Sequence[int]) -> list[int]:
    """Return where each set begins."""
    return [sum(sizes[:number]) for number in range(len(sizes))]


def own_weight(anchors: int) -> float:
    """Return the t that gives one anchor OWN_SHARE of a softmax whose other entries are 0: e^t / (e^t + K - 1)."""
    return math.log(max(1, anchors - 1) * OWN_SHARE / (1 - OWN_SHARE))


def sparse_softmax(
    transform: NDArray[np.floating], sizes: Sequence[int]
) -> Floats:  # [V, Σ K_m] -> [V, Σ K_m + M]
    """Return softmax weights that are 0 where the transform is: over the anchors, then over the sum of each set's anchors.

    row = Σ_k (e^t_k - 1) / Z a_k + 1 / Z Σ_k a_k with Z = Σ_k e^t_k, where only the non-zero t_k count in the first sum; a set
    without a zero in its row has its smallest t in place of the 0. All exponents are taken below the row's greatest.

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
    """Return positive weights that sum to 1, and the K corners of a simplex, with weights @ corners = points.

    The corners are the columns of Helmert's matrix H (H H^T = 1, H 1 = 0), stretched: w = 1/K + H^T x / r is above 0 for r > K
    max(-H^T x), and then w (r H^T) = x.

    >>> weights, corners = enclosing_simplex(torch.tensor([[1.0, 2.0], [-3.0, 0.0]]))
    >>> bool((weights > 0).all()), torch.allclose(weights @ corners, torch.tensor([[1.0, 2.0], [-3.0, 0.0]]), atol=1e-5)
    (True, True)
    """
    count = points.shape[1] + 1
    helmert = points.new_ones(count - 1, count).tril()
    helmert.diagonal(1).copy_(-torch.arange(1.0, count))
    helmert /= helmert.norm(dim=1, keepdim=True)
    spread = (
        points.abs().amax(0).clamp(min=1e-30)
    )  # each coordinate is brought to one scale, and back in the corners
    across = points / spread @ helmert
    radius = MARGIN * count * (-across).amax().clamp(min=1e-3) if count > 1 else 1.0
    return 1 / count + across / radius, radius * helmert.T * spread
