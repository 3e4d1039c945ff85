"""Least squares for ``from_dense``: factors and shared rows fitted to a matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from featherbed.codecs.codec import CodecJob
from featherbed.codecs.linear import factorize
from featherbed.codecs.rows import LONGEST, WeightedRows
from featherbed.codecs.sparse import SparseFit
from featherbed.errors import ArgumentError, MissingExtra
from featherbed.tables.rows import to_numpy

Floats = NDArray[np.float64]
SAMPLE = 20_000  # rows anchors are learned from
FAINT = 1e-6  # minimum weight of a row relative to the mean: values are divided by its root


def row_weights(weights: Any, matrix: Tensor, name: str = "weights") -> Floats | None:  # [V]
    """Return checked weights of rows with mean 1, None if none are given.

    >>> row_weights(torch.tensor([3.0, 1.0]), torch.ones(2, 3)).tolist()
    [1.5, 0.5]
    """
    if weights is None:
        return None
    given = torch.as_tensor(weights).detach().double().cpu().numpy()
    bad = not np.isfinite(given).all() or (given < 0).any() or not (given > 0).any()
    if given.shape != (len(matrix),) or bad:
        raise ArgumentError(
            f"{name} of shape {given.shape}: give {len(matrix)} finite numbers of at least 0, one "
            "for each row, and one above 0"
        )
    scaled: Floats = given / given.mean()
    return scaled


def codec_job(
    matrix: Tensor,  # [V, d]
    weights: Tensor | None,  # [V]
    purpose: str,
    packages: Sequence[str] = ("faiss", "scipy"),
) -> CodecJob:
    """Return the input of a codec: rows and the weights of their errors."""
    for package in packages:
        if find_spec(package) is None:
            raise MissingExtra(package, "compress", purpose)
    dense = np.ascontiguousarray(to_numpy(matrix), dtype=np.float32)
    rows = WeightedRows(dense, row_weights(weights, matrix))
    lengths = np.sqrt(np.einsum("vd,vd->v", dense, dense, dtype=np.float64))
    if lengths.max() > LONGEST:
        worst = int(lengths.argmax())
        raise ArgumentError(
            f"row {worst} is {lengths[worst]:.0e} long, codes are learned of at most "
            f"{LONGEST:.0e}: scale it down"
        )
    return CodecJob(rows, rows.weights, np.random.default_rng(0))


def low_rank(
    matrix: Tensor, rank: int, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:  # [V, d], [V] -> [V, r], [r, d]
    """Return values and atoms of the linear codec (``featherbed.codecs.linear.factorize``).

    >>> values, atoms = low_rank(torch.ones(4, 3), 2)
    >>> torch.allclose(values @ atoms, torch.ones(4, 3))
    True
    """
    dense = matrix.detach().double().cpu().numpy()
    values, atoms = factorize(dense, rank, row_weights(weights, matrix))
    return torch.from_numpy(values).to(matrix), torch.from_numpy(atoms).to(matrix)


def nonnegative_factors(
    matrix: Tensor, rank: int, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:  # [V, d], [V] -> [V, K], [K, d]
    """Return nonnegative values and atoms that minimize Σ_i w_i ||x_i - t_i A||².

    >>> values, atoms = nonnegative_factors(torch.eye(3), 3, torch.ones(3))
    >>> bool((values >= 0).all())
    True
    """
    given = row_weights(weights, matrix)
    if given is None:
        return semi_nonnegative(matrix, rank)
    root = torch.from_numpy(np.sqrt(np.maximum(given, FAINT)))[:, None].to(matrix)
    values, atoms = semi_nonnegative(matrix * root, rank)
    return values / root, atoms


def semi_nonnegative(
    matrix: Tensor, rank: int, rounds: int = 100
) -> tuple[Tensor, Tensor]:  # [V, d] -> [V, K], [K, d]
    """Semi-nonnegative matrix factorization (Ding, Li and Jordan 2010).

    Alternates least-squares atoms with multiplicative updates of the values, starting from rows
    that are far apart.

    >>> values, atoms = semi_nonnegative(torch.eye(3), 3)
    >>> bool((values >= 0).all()), float((values @ atoms - torch.eye(3)).abs().max()) < 0.05
    (True, True)
    """
    wide = matrix if matrix.dtype == torch.float64 else matrix.float()
    sample = wide
    if len(wide) > SAMPLE:
        order = torch.randperm(len(wide), generator=torch.Generator().manual_seed(0))
        sample = wide[order[:SAMPLE].to(wide.device)]
    picks = _far_apart(sample, rank)
    nearest = torch.cdist(sample, sample[picks]).argmin(dim=1)
    values = torch.nn.functional.one_hot(nearest, rank).to(wide.dtype) + 0.2
    ridge = 1e-6 * torch.eye(rank, dtype=wide.dtype, device=wide.device)
    atoms = sample[picks]
    for _ in range(rounds):
        gram = values.T @ values
        gram = gram + ridge * gram.diagonal().mean().clamp(min=1e-6)
        atoms = torch.linalg.solve(gram, values.T @ sample)
        values = _closer(values, sample, atoms)
    if len(sample) < len(wide):
        values = wide.new_full((len(wide), rank), float(values.mean()) + 1e-6)
        for _ in range(rounds // 2):
            values = _closer(values, wide, atoms)
    return values.to(matrix.dtype), atoms.to(matrix.dtype)


def sparse_codes(
    matrix: Tensor, anchors: int, count: int, nonnegative: bool, weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:  # [V, d], [V] -> [V, s], [V, s], [K, d]
    """Return ``count`` atoms of each row, their values, and the atoms, by the sparse codec.

    Atoms are as long as rows are on average.

    >>> support, values, atoms = sparse_codes(torch.eye(3), 3, 1, True)
    >>> torch.allclose(values * atoms[support[:, 0]], torch.eye(3), atol=1e-4)
    True
    """
    size = float(matrix.abs().max()) or 1.0  # squares stay within float32
    job = codec_job(matrix / size, weights, "AnchorTable.from_dense with slots", ("scipy",))
    method = "anchors" if nonnegative else "pursuit"
    fit = SparseFit(job, method, anchors=anchors, codes=count, start="rows")
    chosen, values = fit.all_codes()
    length = float((matrix / size).square().mean().sqrt()) or 1.0
    found = torch.from_numpy(values) / length, torch.from_numpy(fit.coder.atoms) * length * size
    support = torch.from_numpy(chosen.astype(np.int64)).to(matrix.device)
    return support, found[0].to(matrix), found[1].to(matrix)


def _closer(values: Tensor, matrix: Tensor, atoms: Tensor) -> Tensor:
    """Return nonnegative values after one multiplicative update."""
    target, gram = matrix @ atoms.T, atoms @ atoms.T
    up = target.clamp(min=0) + values @ (-gram).clamp(min=0)
    down = (-target).clamp(min=0) + values @ gram.clamp(min=0)
    return values * torch.sqrt((up + 1e-12) / (down + 1e-12))


def _far_apart(matrix: Tensor, count: int) -> Tensor:  # [V, d] -> [count]
    """Select rows one by one, each the farthest from the previous ones; deterministic."""
    distance = matrix.norm(dim=1)
    chosen: list[int] = []
    for _ in range(count):
        pick = int(distance.argmax())
        chosen.append(pick)
        new = (matrix - matrix[pick]).norm(dim=1)
        distance = new if len(chosen) == 1 else torch.minimum(distance, new)
    return torch.tensor(chosen, device=matrix.device)


def shared_atoms(
    matrix: Tensor,  # [V, d]
    indices: Tensor | None,  # [V, s]
    atoms: int,
    skip: int | None = None,
    weights: Tensor | None = None,  # [V]
    rounds: int = 30,
) -> Tensor:  # [K, d]
    """Return atoms whose sums fit the rows (except ``skip``) best, by conjugate gradients.

    >>> shared_atoms(torch.tensor([[1.0], [3.0]]), torch.tensor([[0], [0]]), 1)
    tensor([[2.]])
    """
    assert indices is not None
    wide, given = matrix.double(), row_weights(weights, matrix)
    share = wide.new_ones(len(wide)) if given is None else torch.from_numpy(given).to(wide)
    share = share[:, None]
    if skip is not None:
        others = torch.arange(len(matrix), device=matrix.device) != skip
        wide, indices, share = wide[others], indices[others], share[others]
    flat = indices.reshape(-1)

    def scatter(rows: Tensor) -> Tensor:  # H^T W rows
        repeated = (share * rows).repeat_interleave(indices.shape[1], 0)
        return wide.new_zeros(atoms, rows.shape[1]).index_add_(0, flat, repeated)

    solution = wide.new_zeros(atoms, matrix.shape[1])
    residual = scatter(wide)
    direction, energy = residual.clone(), residual.square().sum(0)
    for _ in range(rounds):
        image = scatter(direction[indices].sum(1))
        step = energy / (direction * image).sum(0).clamp(min=1e-300)
        solution += step * direction
        residual -= step * image
        fresh = residual.square().sum(0)
        direction = residual + (fresh / energy.clamp(min=1e-300)) * direction
        energy = fresh
        if float(energy.max()) < 1e-20:
            break
    return solution.to(matrix.dtype)


def quotient_remainder(
    matrix: Tensor, divisor: int, rounds: int = 20, weights: Tensor | None = None
) -> Tensor:  # [V, d], [V] -> [quotients + divisor, d]
    """Return Q and R, stacked, with Q[i // divisor] * R[i mod divisor] near row i.

    >>> quotient_remainder(torch.full((6, 1), 4.0), 3).prod(0).round()
    tensor([32.])
    """
    wide = matrix.double()
    quotients = -(-len(matrix) // divisor)
    grid = wide.new_zeros(quotients * divisor, matrix.shape[1])
    seen = grid.new_zeros(quotients * divisor, 1)
    given = row_weights(weights, matrix)
    grid[: len(matrix)] = wide
    seen[: len(matrix)] = 1.0 if given is None else torch.from_numpy(given)[:, None].to(wide)
    grid, seen = grid.reshape(quotients, divisor, -1), seen.reshape(quotients, divisor, 1)
    # in each column, the fullest quotient of most energy
    strongest = (grid.square().sum(1) * seen.all(1)).argmax(0)
    right = grid[strongest, :, torch.arange(matrix.shape[1])].T.clone()  # [divisor, d]
    left = grid.new_zeros(quotients, matrix.shape[1])
    for _ in range(rounds):
        left = (seen * grid * right).sum(1) / (seen * right.square()).sum(1).clamp(min=1e-12)
        energy = (seen * left[:, None].square()).sum(0).clamp(min=1e-12)
        right = (seen * grid * left[:, None]).sum(0) / energy
    balance = ((right.square().mean(0) + 1e-12) / (left.square().mean(0) + 1e-12)) ** 0.25
    return torch.cat([left * balance, right / balance]).to(matrix.dtype)


def share_of_unit_rows(parts: int) -> float:
    """Return the standard deviation of atoms whose sums of ``parts`` have unit variance."""
    return 1.0 / math.sqrt(parts)


def rounded_rows(rows: Tensor, scale: Tensor, top: Tensor | int) -> Tensor:  # [..., d]
    """Return scale (q - top/2), q = round(rows/scale + top/2) from 0 to top, straight through.

    Gradients pass the rounding and, to rows, also the clipping: a clipped element finds its way
    back.

    >>> rounded_rows(torch.tensor([0.3, -9.0]), torch.tensor(1.0), 3)
    tensor([ 0.5000, -1.5000])
    """
    exact = _clipped(rows / scale + top / 2, top)
    levels = exact + (torch.round(exact) - exact).detach()
    outside = ((rows / scale).abs() > top / 2) & (torch.as_tensor(top) > 0)
    return scale * (levels - top / 2) + torch.where(outside, rows - rows.detach(), 0.0)


def _clipped(levels: Tensor, top: Tensor | int) -> Tensor:
    low = torch.clamp(levels, min=0)
    return torch.minimum(low, top) if isinstance(top, Tensor) else torch.clamp(low, max=top)


def levels_of(rows: Tensor, scale: Tensor, top: Tensor | int) -> NDArray[np.uint8]:  # [V, d]
    """Return the levels q of ``rounded_rows``, or raise an error if there are none."""
    if not bool(torch.isfinite(rows).all() and torch.isfinite(scale).all()):
        raise ArgumentError(
            "the table holds NaN or infinite rows, which have no levels: training has diverged"
        )
    levels = _clipped(torch.round(rows / scale + top / 2), top)
    found: NDArray[np.uint8] = levels.detach().to(torch.uint8).cpu().numpy()
    return found
