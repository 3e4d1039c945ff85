"""Graded rows: low-bit rows with more bits for important rows and columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from featherbed.checks import check_integer, is_number
from featherbed.codecs.graded import fit_grades, grade_ends
from featherbed.errors import ArgumentError
from featherbed.optim.lazy import RowParameter
from featherbed.packed.band import Band, Every
from featherbed.packed.matrix import MOST_BITS, MOST_GRADES, Graded, graded_scales
from featherbed.tables.codes import Codes
from featherbed.tables.fitting import levels_of, rounded_rows, row_weights
from featherbed.tables.rows import empty_parameter, to_numpy
from featherbed.tables.table import Table


class GradedTable(Table):
    """row(i)_k = s (q - (2^b - 1)/2), with bits b and scale s per grade and column; 0 if b = 0.

    Ids are sorted by importance (the most popular first) into ``grades`` runs, each twice as long
    as the previous one, or of the lengths that ``grades`` lists. ``bits`` is the mean over all
    elements; grades and columns get bits by the squared error these save, with rows weighted by
    ``counts`` (number of occurrences) if given. Trained with straight-through rounding and learned
    scales like ``QuantizedTable``; the float ``rows`` exist in training only.
    ``pack(values="float16")`` halves the scales.

    >>> import torch
    >>> counts = 1000 / torch.arange(1, 1001)
    >>> table = GradedTable.from_dense(torch.randn(1000, 16), bits=2.5, grades=3, counts=counts)
    >>> int(table.widths[0].sum()) > int(table.widths[-1].sum()), table.sizes().ratio > 10
    (True, True)
    """

    example: ClassVar[dict[str, Any]] = {"bits": 3, "grades": 3}
    rows_alike: ClassVar[bool] = False
    rows = RowParameter()  # [V, d]

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        bits: float = 3,
        grades: int | Sequence[int] = 4,
        counts: Tensor | None = None,
        sparse: bool = False,
        padding_idx: int | None = None,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, sparse)
        if not is_number(bits, 0, MOST_BITS) or bits == 0:
            mean = "give the mean bits of an element"
            raise ArgumentError(f"bits={bits!r}: {mean}, more than 0 and at most {MOST_BITS}")
        self.bits, self.grades, self.counts = bits, checked_grades(grades, num_embeddings), counts
        self.add_rows("rows", embedding_dim, dtype, device)
        shape = (len(self.ends), embedding_dim)
        self.scale = empty_parameter(shape, dtype, device)  # [G, d]
        self.tops: Tensor  # [G, d], the highest level: 2^b - 1
        self.register_buffer("tops", torch.empty(shape, dtype=torch.uint8, device=device))
        self.initialize(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw rows from N(0, 1), allocate the bits and choose the scales."""
        self.rows.normal_(0.0, 1.0, generator=generator)
        self.fit_dense(self.rows.detach().clone())

    @property
    def ends(self) -> list[int]:
        """Number of rows up to the end of each grade, [G]."""
        if isinstance(self.grades, int):
            return grade_ends(self.num_embeddings, self.grades)
        return [int(end) for end in np.cumsum(self.grades)]

    def grade_of(self, ids: Tensor) -> Tensor:  # int64 [...] -> int64 [...]
        """Return the grade of each id."""
        ends = torch.tensor(self.ends[:-1], device=ids.device)
        return torch.bucketize(ids, ends, right=True)

    @property
    def widths(self) -> NDArray[np.uint8]:  # [G, d]
        """Bits of every grade and column."""
        widths: NDArray[np.uint8] = np.bitwise_count(self.tops.cpu().numpy())
        return widths

    @property
    def grade_rows(self) -> list[int]:
        """Number of rows of each grade."""
        return [int(rows) for rows in np.diff(self.ends, prepend=0)]

    def codes(self, ids: Tensor) -> Codes:
        """The values are the row: levels times scale, with straight-through rounding."""
        grade = self.grade_of(ids)
        rows = self.row_values("rows", ids)
        top = self.tops[grade].to(rows.dtype)
        return Codes(None, rounded_rows(rows, self.scale[grade], top), None)

    def bands(self, values: str, dictionary: str, layout: str) -> list[Band]:
        """One stream of levels, and the scales stored as ``values``."""
        grade = self.grade_of(self.all_ids())
        top = self.tops[grade].to(self.rows.dtype)
        levels = levels_of(self.rows, self.scale[grade], top)
        kind = "float16" if values == "float16" else "float32"
        stored = Graded.encode(levels, self.widths, self.grade_rows, to_numpy(self.scale), kind)
        return [Band(self.num_embeddings, Every(), stored)]

    def parameter_count(self) -> int:
        """Elements with bits, and their scales."""
        used = np.count_nonzero(self.widths, axis=1)
        return int(used @ (np.array(self.grade_rows) + 1))

    @torch.no_grad()
    def scale_initial_rows(self, std: float) -> None:
        """Scale the rows to the standard deviation ``std``; scales follow."""
        self.fit_dense(self.rows.detach() * (std / float(self.rows.std())))

    def fit_dense(self, matrix: Tensor, weights: Tensor | None = None) -> None:  # [V, d], [V]
        """Keep the matrix; choose bits and scales by squared error.

        Rows are weighted by ``weights``, by default by the table's ``counts``.
        """
        name, given = ("counts", self.counts) if weights is None else ("weights", weights)
        dense, checked = to_numpy(matrix), row_weights(given, matrix, name)
        self.set_bits(matrix, fit_grades(dense, self.grade_rows, self.bits, checked)[0])

    def set_bits(self, matrix: Tensor, widths: NDArray[np.uint8]) -> None:  # [V, d], [G, d]
        """Keep the matrix in the given bits; choose scales by squared error."""
        self.rows.copy_(matrix)
        scales = graded_scales(to_numpy(matrix), widths, self.grade_rows)
        self.tops.copy_(torch.from_numpy(((1 << widths.astype(np.int64)) - 1).astype(np.uint8)))
        self.scale.copy_(torch.from_numpy(scales))


def checked_grades(grades: int | Sequence[int], rows: int) -> int | tuple[int, ...]:
    """Return the number of grades, or the rows of each, or raise an error."""
    given = (grades,) if isinstance(grades, int | str) else tuple(grades)
    found = tuple(check_integer("grades", part) for part in given)
    if isinstance(grades, int):
        if grades > MOST_GRADES:
            raise ArgumentError(f"grades={grades!r}: {MOST_GRADES} is the most")
        return grades
    if not 1 <= len(found) <= MOST_GRADES or sum(found) != rows:
        raise ArgumentError(
            f"grades has {len(found)} grades of {sum(found)} rows: give 1 to {MOST_GRADES}, "
            f"{rows} rows together"
        )
    return found
