"""Tensor train: a row is a product of small matrices, selected by the digits of its id."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featherbed.checks import check_integer, is_number
from featherbed.codecs.principal import row_directions
from featherbed.errors import ArgumentError, NotPackable
from featherbed.packed.band import Band
from featherbed.tables.codes import Codes
from featherbed.tables.rows import empty_parameter
from featherbed.tables.sizes import Sizes, measure
from featherbed.tables.table import Table

CORES = 3
FILLINGS = 10  # rounds in which a fit fills the places of ids beyond V for the next


class TensorTrainTable(Table):
    """row(i)[j_1, ..., j_c] = G_1[i_1, j_1] ... G_c[i_c, j_c], matrices r_(k-1) x r_k.

    ``shape`` gives the bases of the digits i_1, ..., i_c of an id (the last changes fastest),
    ``dims`` those of the columns. Khrulkov et al. 2019, "Tensorized embedding layers for efficient
    model compression", equation 3; Yin et al. 2021 (TT-Rec). Cores are shared: the gradient of an
    id affects all ids with a common digit. A tensor train has no packed form.

    Args:
        rank: r_1 = ... = r_(c-1), less where the shape does not allow it; r_0 = r_c = 1.
        shape: n_1, ..., n_c with a product of at least V; three nearly equal numbers by default.
        dims: m_1, ..., m_c with product d; the most nearly equal factors of d by default.
        std: standard deviation of the entries of initial rows.

    >>> import torch
    >>> table = TensorTrainTable(10_000, 200, rank=8)
    >>> table.shape, table.dims, table.parameter_count()
    ((22, 22, 21), (5, 5, 8), 9264)
    >>> table(torch.tensor([3, 17])).shape
    torch.Size([2, 200])
    """

    example: ClassVar[dict[str, Any]] = {"rank": 3}
    packable: ClassVar[bool] = False
    weighs_rows: ClassVar[bool] = False

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        rank: int = 16,
        shape: Sequence[int] | None = None,
        dims: Sequence[int] | None = None,
        std: float = 1.0,
        padding_idx: int | None = None,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx)
        self.rank, self.std = check_integer("rank", rank), std
        if not is_number(std, 0) or std == 0:
            raise ArgumentError(
                f"std={std!r}: give the standard deviation of initial rows, above 0"
            )
        self.shape, self.dims = _factors(self.num_embeddings, self.embedding_dim, shape, dims)
        self.ranks = _ranks(self.rank, self.shape, self.dims)  # r_0, ..., r_c
        sizes = zip(self.shape, self.ranks, self.dims, self.ranks[1:], strict=False)
        for k, (n, left, m, right) in enumerate(sizes):
            core = empty_parameter((n, left * m * right), dtype, device)
            self.register_parameter(f"core{k}", core)
        self.initialize(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw cores such that the entries of rows have the standard deviation ``std``."""
        std = (self.std / math.sqrt(math.prod(self.ranks))) ** (1 / len(self.shape))
        for core in self.cores:
            core.normal_(0.0, std, generator=generator)

    @torch.no_grad()
    def scale_initial_rows(self, std: float) -> None:
        """Scale all cores alike, unless they were initialized for this standard deviation."""
        if std == self.std:
            return
        factor = (std / float(self.dense_rows().std())) ** (1 / len(self.shape))
        for core in self.cores:
            core.mul_(factor)

    @property
    def cores(self) -> list[nn.Parameter]:
        """The parameters core0, core1, ..., [n_k, r_(k-1) m_k r_k]."""
        return [getattr(self, f"core{k}") for k in range(len(self.shape))]

    def _digits(self, ids: Tensor) -> list[Tensor]:  # [...] -> c times [...]
        digits = []
        for base in reversed(self.shape):
            digits.append(ids % base)
            ids = torch.div(ids, base, rounding_mode="floor")
        return digits[::-1]

    def codes(self, ids: Tensor) -> Codes:
        """The values are the row: the product of the matrices of the id's digits."""
        flat = ids.reshape(-1)
        rows, width = None, 1
        for k, (digit, core) in enumerate(zip(self._digits(flat), self.cores, strict=True)):
            left, right = self.ranks[k], self.ranks[k + 1]
            chosen = F.embedding(digit, core).reshape(-1, left, self.dims[k] * right)
            rows, width = chosen if rows is None else rows @ chosen, width * self.dims[k]
            rows = rows.reshape(-1, width, right)  # [B, m_1 ... m_k, r_k]
        assert rows is not None
        return Codes(None, rows.reshape(*ids.shape, self.embedding_dim), None)

    def lookup(self, ids: Tensor) -> Tensor:
        """Multiply matrices; for many ids, first all cores but the last for all digits."""
        if torch.compiler.is_compiling() or ids.numel() < math.prod(self.shape[:-1]):
            return super().lookup(ids)
        flat, last, (width, rank) = ids.reshape(-1), self.shape[-1], (self.dims[-1], self.ranks[-2])
        first = torch.div(flat, last, rounding_mode="floor")
        before = F.embedding(first, self._products(len(self.shape) - 1))
        chosen = F.embedding(flat % last, self.cores[-1]).reshape(-1, rank, width)
        rows = before.reshape(-1, self.embedding_dim // width, rank) @ chosen
        return self.mask_padding(ids, rows.reshape(*ids.shape, self.embedding_dim))

    def dense_rows(self) -> Tensor:  # [V, d]
        """Compute all rows at once."""
        rows = self._products(len(self.shape))[: self.num_embeddings]
        return self.mask_padding(self.all_ids(), rows)

    def _products(self, count: int) -> Tensor:  # [n_1 ... n_k, m_1 ... m_k r_k], k = count
        """Multiply the first cores for all combinations of digits."""
        cores = self.cores
        rows: Tensor = cores[0]
        ids, columns = self.shape[0], self.dims[0]
        for k in range(1, count):
            n, m, left, right = self.shape[k], self.dims[k], self.ranks[k], self.ranks[k + 1]
            core = cores[k].reshape(n, left, m * right).transpose(0, 1).reshape(left, n * m * right)
            rows = rows.reshape(ids * columns, left) @ core
            rows = rows.reshape(ids, columns, n, m * right).transpose(1, 2)
            ids, columns = ids * n, columns * m
        return rows.reshape(ids, columns * self.ranks[count])

    def bands(self, values: str, dictionary: str, layout: str) -> list[Band]:
        """Raise an error: packed tables cannot multiply matrices."""
        raise NotPackable(
            "TensorTrainTable has no packed form, since its rows are products of matrices: keep "
            "state_dict(), or store its rows, "
            "fb.DenseTable.from_dense(table.weight.detach()).pack()"
        )

    def sizes(self, optimizer: torch.optim.Optimizer | None = None) -> Sizes:
        """Return the four sizes; without a file, file and resident are the cores in float32."""
        count = self.parameter_count()
        training = None if optimizer is None else measure(self, optimizer)
        dense = self.num_embeddings * self.embedding_dim * 4
        return Sizes(4 * count, 4 * count, training, count, dense)

    def parameter_count(self) -> int:
        """Σ_k n_k m_k r_(k-1) r_k."""
        return sum(core.numel() for core in self.cores)

    def fit_dense(self, matrix: Tensor, weights: Tensor | None = None) -> None:  # [V, d], [V]
        """TT-SVD (Oseledets 2011): error at most sqrt(c - 1) times the optimum.

        Rows cannot be weighted: a tensor train splits all of them at once.
        """
        if weights is not None:
            raise ArgumentError(
                "TensorTrainTable.fit_dense cannot weigh rows: leave weights out, or take a table "
                "with weighs_rows, such as fb.LowRankTable"
            )
        full = matrix.new_zeros(math.prod(self.shape), self.embedding_dim, dtype=torch.float64)
        full[: len(matrix)] = matrix
        for _ in range(1 if len(full) == len(matrix) else FILLINGS):
            self._split(full)
            full[len(matrix) :] = self._products(len(self.shape))[len(matrix) :]

    def _split(self, full: Tensor) -> None:  # [n_1 ... n_c, d]
        """Set the cores by successive truncated SVDs."""
        count = len(self.shape)
        order = [axis for k in range(count) for axis in (k, count + k)]
        rest = full.reshape(*self.shape, *self.dims).permute(order)  # [n_1, m_1, n_2, m_2, ...]
        found = []
        for k in range(count - 1):
            rest = rest.reshape(self.ranks[k] * self.shape[k] * self.dims[k], -1)
            found_rows = row_directions(rest.T.cpu().numpy(), self.ranks[k + 1])
            basis = torch.from_numpy(found_rows).T.to(rest)
            rest = basis.T @ rest
            found.append(basis)
        parts = zip([*found, rest], self.shape, self.ranks, self.dims, self.ranks[1:], strict=False)
        cores = [
            part.reshape(left, n, m * right).transpose(0, 1) for part, n, left, m, right in parts
        ]
        sizes = [float(core.square().mean().sqrt()) for core in cores]
        even = math.prod(sizes) ** (1 / count)  # 0 for a matrix of zeros
        for core, held, size in zip(cores, self.cores, sizes, strict=True):
            held.copy_((core * (even / size if size else 0.0)).reshape(held.shape))


def _factors(
    rows: int, width: int, shape: Sequence[int] | None, dims: Sequence[int] | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    for name, given in (("shape", shape), ("dims", dims)):
        listed = isinstance(given, Sequence) and not isinstance(given, str)
        if given is not None and (not listed or len(given) < 2):
            raise ArgumentError(
                f"{name}={given!r}: give at least two whole numbers, or leave it out"
            )
    cores = len(shape if shape is not None else dims if dims is not None else range(CORES))
    shape = balanced(rows, cores) if shape is None else shape
    dims = factored(width, cores) if dims is None else dims
    ids = tuple(check_integer("shape", n) for n in shape)
    columns = tuple(check_integer("dims", m) for m in dims)
    if math.prod(ids) < rows:
        raise ArgumentError(
            f"shape={ids} holds {math.prod(ids)} ids: its product must be {rows} or more"
        )
    if math.prod(columns) != width:
        product = f"dims={columns} have the product {math.prod(columns)}"
        raise ArgumentError(f"{product}: it must be the row width, {width}")
    if len(ids) != len(columns):
        raise ArgumentError(
            f"shape={ids} and dims={columns} differ in length: give as many of one as of the other"
        )
    return ids, columns


def _ranks(rank: int, shape: Sequence[int], dims: Sequence[int]) -> tuple[int, ...]:
    """Return r_0, ..., r_c: the given rank, limited by the sizes to the left and right."""
    sides = [n * m for n, m in zip(shape, dims, strict=True)]
    inner = (min(rank, math.prod(sides[:k]), math.prod(sides[k:])) for k in range(1, len(sides)))
    return (1, *inner, 1)


def balanced(count: int, parts: int) -> tuple[int, ...]:
    """Return nearly equal integers with a product of at least ``count``.

    >>> balanced(10_000, 3), balanced(50, 3), balanced(1, 2)
    ((22, 22, 21), (4, 4, 4), (1, 1))
    """
    found, left = [], count
    for remaining in range(parts, 0, -1):
        found.append(max(1, math.ceil(round(left ** (1 / remaining), 9))))
        left = math.ceil(left / found[-1])
    return tuple(found)


def factored(count: int, parts: int) -> tuple[int, ...]:
    """Return factors of ``count`` with the smallest sum, in increasing order.

    >>> factored(200, 3), factored(256, 3), factored(7, 3)
    ((5, 5, 8), (4, 8, 8), (1, 1, 7))
    """
    if parts == 1:
        return (count,)
    first = (f for f in range(1, math.isqrt(count) + 1) if count % f == 0)
    tries = [tuple(sorted((f, *factored(count // f, parts - 1)))) for f in first]
    return min(tries, key=lambda factors: (sum(factors), factors))
