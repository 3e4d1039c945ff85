"""Least squares behind ``from_dense``: factors and shared rows that come near a given matrix."""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from featherbed.codecs.codec import CodecJob
from featherbed.codecs.pursuit import learn_sparse
from featherbed.codecs.rows import LONGEST, Rows
from featherbed.errors import ArgumentError, MissingExtra
from featherbed.tables.table import to_numpy

SAMPLE = 20_000  # rows anchors are learnt from
FAINT = 1e-6  # of the mean weight is the least that a row has: its values are divided by the root


def codec_job(
    matrix: Tensor, weights: Tensor | None, purpose: str, seed: int = 0
) -> CodecJob:  # [V, d], [V]
    """Return the input of a codec that learns codes: the rows, and how much the error of each counts."""
    for package in ("faiss", "scipy"):
        if find_spec(package) is None:
            raise MissingExtra(package, "compress", purpose)
    given = None if weights is None else to_numpy(weights)
    rows = Rows(np.ascontiguousarray(to_numpy(matrix), dtype=np.float32), given)
    lengths = np.sqrt(np.einsum("vd,vd->v", rows.matrix, rows.matrix, dtype=np.float64))
    if lengths.max() > LONGEST:
        worst = int(lengths.argmax())
        raise ArgumentError(
            f"row {worst} is {lengths[worst]:.0e} long, codes are learnt of at most {LONGEST:.0e}: "
            "scale it down"
        )
    return CodecJob(rows, rows.weights, np.random.default_rng(seed))


def scales_of(weights: Tensor | None, matrix: Tensor) -> Tensor | None:  # [V] -> [V, 1]
    """Return what rows are multiplied with so that a plain fit weighs them: the roots of their weights; none is 0.

    >>> scales_of(torch.tensor([4.0, 0.0]), torch.ones(2, 3)).shape
    torch.Size([2, 1])
    """
    if weights is None:
        return None
    bad = (
        not bool(torch.isfinite(weights).all())
        or bool((weights < 0).any())
        or not bool((weights > 0).any())
    )
    if weights.shape != matrix.shape[:1] or bad:
        raise ArgumentError(
            f"weights of shape {tuple(weights.shape)}: give {len(matrix)} finite numbers of at least 0, one for each row, "
            "and one above 0"
        )
    wide = weights.to(device=matrix.device, dtype=torch.float64)
    wide = wide / wide.mean()
    return wide.clamp(min=FAINT).sqrt()[:, None].to(matrix.dtype)


def low_rank(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:  # [V, d] -> [V, r], [r, d]
    """Return the truncated SVD as values and atoms, zero-filled where the matrix has fewer than ``rank`` directions.

    >>> values, atoms = low_rank(torch.ones(4, 3), 2)
    >>> torch.allclose(values @ atoms, torch.ones(4, 3))
    True
    """
    wide = matrix.double()
    left, sizes, right = torch.linalg.svd(wide, full_matrices=False)
    kept = min(rank, len(sizes))
    values = wide.new_zeros(len(matrix), rank)
    atoms = wide.new_zeros(rank, matrix.shape[1])
    values[:, :kept] = left[:, :kept] * sizes[:kept].sqrt()
    atoms[:kept] = right[:kept] * sizes[:kept].sqrt()[:, None]
    return values.to(matrix.dtype), atoms.to(matrix.dtype)


def semi_nonnegative(
    matrix: Tensor, rank: int, rounds: int = 100
) -> tuple[Tensor, Tensor]:  # [V, d] -> [V, K], [K, d]
    """Factor with non-negative values (Ding, Li and Jordan 2010, "Convex and semi-nonnegative matrix factorizations").

    Alternates the least-squares atoms with multiplicative updates of the values; starts from rows spread over the matrix.

    >>> values, atoms = semi_nonnegative(torch.eye(3), 3)
    >>> bool((values >= 0).all()), float((values @ atoms - torch.eye(3)).abs().max()) < 0.05
    (True, True)
    """
    wide = matrix if matrix.dtype == torch.float64 else matrix.float()
    sample = wide
    if len(wide) > SAMPLE:
        sample = wide[
            torch.randperm(len(wide), generator=torch.Generator().manual_seed(0))[:SAMPLE].to(
                wide.device
            )
        ]
    picks = _far_apart(sample, rank)
    nearest = torch.cdist(sample, sample[picks]).argmin(dim=1)
    values = torch.nn.functional.one_hot(nearest, rank).to(wide.dtype) + 0.2
    ridge = 1e-6 * torch.eye(rank, dtype=wide.dtype, device=wide.device)
    atoms = sample[picks]
    for _ in range(rounds):
        gram = values.T @ values
        atoms = torch.linalg.solve(
            gram + ridge * gram.diagonal().mean().clamp(min=1e-6), values.T @ sample
        )
        values = _closer(values, sample, atoms)
    if len(sample) < len(wide):
        values = torch.full(
            (len(wide), rank), float(values.mean()) + 1e-6, dtype=wide.dtype, device=wide.device
        )
        for _ in range(rounds // 2):
            values = _closer(values, wide, atoms)
    return values.to(matrix.dtype), atoms.to(matrix.dtype)


def pursued(
    matrix: Tensor, anchors: int, count: int, nonnegative: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``count`` atoms of each row and their values, and the atoms: [V, d] -> [V, s], [V, s], [K, d].

    Matching pursuit and least squares in turns (``featherbed.codecs.pursuit.learn_sparse``).

    >>> support, values, atoms = pursued(torch.eye(3), 3, 1, True)
    >>> torch.allclose(values * atoms[support[:, 0]], torch.eye(3), atol=1e-4)
    True
    """
    rows: Any = matrix.detach().to(device="cpu", dtype=torch.float32).numpy()
    size = float(np.abs(rows).max(initial=0.0)) or 1.0  # squares stay within float32
    atoms, chosen, values = learn_sparse(
        rows / np.float32(size), anchors, count, nonnegative=nonnegative
    )
    found = (
        torch.from_numpy(chosen.astype(np.int64)),
        torch.from_numpy(values),
        torch.from_numpy(atoms) * size,
    )
    support, weights, dictionary = (part.to(matrix.device) for part in found)
    return support, weights.to(matrix.dtype), dictionary.to(matrix.dtype)


def _closer(values: Tensor, matrix: Tensor, atoms: Tensor) -> Tensor:
    """Return values that come nearer to the matrix and stay non-negative: the multiplicative update."""
    target, gram = matrix @ atoms.T, atoms @ atoms.T
    up = target.clamp(min=0) + values @ (-gram).clamp(min=0)
    down = (-target).clamp(min=0) + values @ gram.clamp(min=0)
    return values * torch.sqrt((up + 1e-12) / (down + 1e-12))


def _far_apart(matrix: Tensor, count: int) -> Tensor:  # [V, d] -> [count]
    """Pick rows one by one, each the farthest from those before; deterministic."""
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
    indices: Tensor,  # [V, s]
    atoms: int,
    skip: int | None = None,
    rounds: int = 30,
) -> Tensor:  # [K, d]
    """Return the atoms whose sums come nearest to the rows (but one), by conjugate gradients on the normal equations.

    >>> shared_atoms(torch.tensor([[1.0], [3.0]]), torch.tensor([[0], [0]]), 1)
    tensor([[2.]])
    """
    wide = matrix.double()
    if skip is not None:
        others = torch.arange(len(matrix), device=matrix.device) != skip
        wide, indices = wide[others], indices[others]
    flat = indices.reshape(-1)

    def spread(rows: Tensor) -> Tensor:  # H^T rows
        repeated = rows[:, None, :].expand(-1, indices.shape[1], -1).reshape(-1, rows.shape[1])
        return wide.new_zeros(atoms, rows.shape[1]).index_add_(0, flat, repeated)

    solution = wide.new_zeros(atoms, matrix.shape[1])
    residual = spread(wide)
    direction, energy = residual.clone(), residual.square().sum(0)
    for _ in range(rounds):
        image = spread(direction[indices].sum(1))
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
    matrix: Tensor, divisor: int, rounds: int = 20
) -> Tensor:  # [V, d] -> [quotients + divisor, d]
    """Return Q over R with Q[i // divisor] * R[i mod divisor] near row i: in every column the best rank-one factors.

    >>> quotient_remainder(torch.full((6, 1), 4.0), 3).prod(0).round()
    tensor([32.])
    """
    wide = matrix.double()
    quotients = -(-len(matrix) // divisor)
    grid = wide.new_zeros(quotients * divisor, matrix.shape[1])
    seen = grid.new_zeros(quotients * divisor, 1)
    grid[: len(matrix)], seen[: len(matrix)] = wide, 1
    grid, seen = grid.reshape(quotients, divisor, -1), seen.reshape(quotients, divisor, 1)
    strongest = (grid.square().sum(1) * seen.all(1)).argmax(
        0
    )  # in each column, the fullest quotient of most energy
    right = grid[strongest, :, torch.arange(matrix.shape[1])].T.clone()  # [divisor, d]
    left = grid.new_zeros(quotients, matrix.shape[1])
    for _ in range(rounds):
        left = (grid * right).sum(1) / (seen * right.square()).sum(1).clamp(min=1e-12)
        right = (grid * left[:, None]).sum(0) / (seen * left[:, None].square()).sum(0).clamp(
            min=1e-12
        )
    balance = ((right.square().mean(0) + 1e-12) / (left.square().mean(0) + 1e-12)) ** 0.25
    return torch.cat([left * balance, right / balance]).to(matrix.dtype)


def share_of_unit_rows(parts: int) -> float:
    """Return the spread of atoms that gives sums of ``parts`` of them the unit variance nn.Embedding's rows have."""
    return 1.0 / math.sqrt(parts)
