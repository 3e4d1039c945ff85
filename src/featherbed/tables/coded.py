"""CodedTable, the base of tables with learned codes: D parts with one of K choices each."""

from __future__ import annotations

import heapq
import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from featherbed.checks import check_integer, is_number
from featherbed.errors import ArgumentError, IdError
from featherbed.ops import check_ids
from featherbed.tables.table import Table

BLOCK = 1 << 24  # responses held at once when the codes of all rows are taken
NEAR = 0.02  # standard deviation of a revived choice around its source, relative to all choices


@dataclass(frozen=True)
class CodeHealth:
    """Statistics on the use of codes.

    ``used``: number of choices in use, per part; ``entropy``: entropy of the choices in bits, per
    part (at most log2 K); ``duplicates``: number of rows with the same code as an earlier row.
    """

    used: tuple[int, ...]
    entropy: tuple[float, ...]
    duplicates: int
    choices: int

    @property
    def utilization(self) -> float:
        """Share of all choices in use."""
        return sum(self.used) / (len(self.used) * self.choices)

    def __str__(self) -> str:
        bits = sum(self.entropy) / len(self.entropy)
        return (
            f"{self.utilization:.1%} of the choices in use, {bits:.2f} of "
            f"{math.log2(self.choices):.2f} bits a part, {self.duplicates} duplicate codes"
        )


class CodedTable(Table):
    """A table whose rows have codes c in {0 .. K-1}^D: the largest response of each part.

    A method defines the responses and the rows of codes; health and repair of codes follow.
    """

    parts: int
    choices: int
    unique: bool
    shared: bool

    def __init__(
        self,
        rows: int,
        dim: int,
        parts: int,
        choices: int,
        padding_idx: int | None,
        sparse: bool,
        unique: bool = False,
    ) -> None:
        super().__init__(rows, dim, padding_idx, sparse)
        self.parts, self.choices = check_integer("parts", parts), check_integer("choices", choices)
        self.unique = bool(unique)
        if self.choices < 2:
            raise ArgumentError(f"choices={choices}: a part chooses among at least 2")
        # the power itself may have a million digits
        few = self.parts * math.log2(self.choices) < math.log2(rows) + 1
        if self.unique and few and self.choices**self.parts < rows:
            raise ArgumentError(
                f"unique codes of {rows:,} rows need choices ** parts >= {rows:,}: {self.choices} "
                f"** {self.parts} is {self.choices**self.parts:,}; take more parts or choices"
            )
        self._loss: Tensor | None = None  # terms of the rows looked up since the last `auxiliary`

    @abstractmethod
    def responses(self, ids: Tensor) -> Tensor:  # [n] -> [n, D, K]
        """Return the responses in float32 or wider, normalized as in evaluation."""

    @abstractmethod
    def assign(self, ids: Tensor, codes: Tensor) -> None:  # [n], [n, D]
        """Assign codes to rows: they become the largest responses."""

    @abstractmethod
    def choice_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the choices, [D * K, .] each: code vectors, values, keys."""

    @torch.no_grad()
    def codes_of(self, ids: Tensor | list[int] | None = None) -> Tensor:  # [...] -> int64 [..., D]
        """Return the codes of ids (all rows by default), always in float32 or wider.

        >>> import featherbed as fb
        >>> fb.KDTable(100, 8, choices=4, parts=6).codes_of(torch.tensor([3, 17])).shape
        torch.Size([2, 6])
        """
        wanted = self.all_ids() if ids is None else check_ids(_as_ids(ids), self.num_embeddings)
        flat = wanted.reshape(-1)
        if torch.compiler.is_compiling():  # a graph has no loop over a number of blocks
            return self.responses(flat).argmax(-1).reshape(*wanted.shape, self.parts)
        step = max(1, BLOCK // (self.parts * self.choices))
        blocks = [self.responses(flat[s : s + step]).argmax(-1) for s in range(0, len(flat), step)]
        found = torch.cat(blocks) if blocks else flat.new_zeros(0, self.parts)
        return found.reshape(*wanted.shape, self.parts)

    def rows_with(self, code: Tensor | list[int]) -> Tensor:  # [n], n <= D -> ids
        """Return the ids whose code starts with ``code`` (a semantic id or its prefix)."""
        wanted = _as_ids(code).to(self.device).reshape(-1)
        if not 1 <= len(wanted) <= self.parts:
            raise ArgumentError(
                f"a code of this table has {self.parts} parts, a prefix at least 1: got "
                f"{len(wanted)}"
            )
        fits = 0 <= wanted.min() <= wanted.max() < self.choices
        if wanted.is_floating_point() or not fits:
            raise ArgumentError(
                f"code {wanted.tolist()} is not in this table: codes are whole numbers from 0 to "
                f"{self.choices - 1}"
            )
        return (self.codes_of()[:, : len(wanted)] == wanted).all(1).nonzero()[:, 0]

    def code_bits(self) -> float:
        """Return N D log2 K, the bits of all codes as in the papers."""
        return self.num_embeddings * self.parts * math.log2(self.choices)

    def health(self) -> CodeHealth:
        """Count used choices, their entropy and duplicate codes."""
        codes = self.codes_of()
        counts = torch.stack([torch.bincount(column, minlength=self.choices) for column in codes.T])
        share = counts.double() / len(codes)
        entropy = -(share * share.clamp(min=1e-30).log2()).sum(1)
        distinct = len(torch.unique(codes, dim=0))
        used = tuple(int(n) for n in (counts > 0).sum(1))
        return CodeHealth(used, tuple(entropy.tolist()), len(codes) - distinct, self.choices)

    @torch.no_grad()
    def revive(self, generator: torch.Generator | None = None) -> int:
        """Turn unused choices into noisy copies of popular ones, with half of their rows each.

        Returns the number of revived choices; choices that parts share are not copied.
        """
        codes, revived = self.codes_of(), 0
        for part in range(self.parts):
            counts = torch.bincount(codes[:, part], minlength=self.choices)
            for dead in (counts == 0).nonzero()[:, 0].tolist():
                largest = int(counts.argmax())
                rows = (codes[:, part] == largest).nonzero()[:, 0]
                if len(rows) < 2:
                    break
                half = torch.randperm(len(rows), generator=generator)[: len(rows) // 2]
                moved = rows[half.to(rows.device)]
                for stored in [] if self.shared else self.choice_parameters():
                    copied = stored[part * self.choices + largest]
                    noise = torch.randn(copied.shape, generator=generator, dtype=copied.dtype)
                    noise = NEAR * stored.std() * noise.to(copied.device)
                    stored[part * self.choices + dead] = copied + noise
                codes[moved, part] = dead
                counts[largest] -= len(moved)
                counts[dead] = len(moved)
                revived += 1
        if revived:
            self.assign(self.all_ids(), codes)
        return revived

    @torch.no_grad()
    def balance(self, slack: float = 0.0) -> None:
        """Limit every choice to (1 + slack) V / K rows, at the smallest loss of response."""
        if not is_number(slack, 0):
            given = f"slack={slack!r}: by which share choices may be fuller than even"
            raise ArgumentError(f"{given}, a number of at least 0")
        room = math.ceil(self.num_embeddings / self.choices * (1 + slack))
        responses = self.responses(self.all_ids()).unbind(1)
        self.assign(self.all_ids(), torch.stack([balanced(part, room) for part in responses], 1))

    @torch.no_grad()
    def make_unique(self) -> int:
        """Give rows with duplicate codes unique ones, changing few parts of low response."""
        ids, codes = self.all_ids(), self.codes_of()
        taken: set[tuple[int, ...]] = set()
        again: list[int] = []
        for row, code in enumerate(map(tuple, codes.tolist())):
            if code in taken:
                again.append(row)
            taken.add(code)
        for row in again:
            fresh = free_code(self.responses(ids[row : row + 1])[0], taken)
            taken.add(fresh)
            codes[row] = torch.tensor(fresh, device=codes.device)
        if again:
            self.assign(ids[again], codes[again])
        return len(again)

    def auxiliary(self) -> Tensor | None:
        """Return the loss terms of relaxation and guide for rows since the last call."""
        total, self._loss = self._loss, None
        return total

    def add_loss(self, term: Tensor) -> None:
        """Add a term to the next ``auxiliary`` loss."""
        self._loss = term if self._loss is None else self._loss + term

    def __getstate__(self) -> dict[str, Any]:
        """Return a state without loss terms."""
        return {**super().__getstate__(), "_loss": None}


def _as_ids(given: Any) -> Tensor:
    """Return ids or codes as a tensor, or raise an error."""
    try:
        return torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        raise IdError(
            f"ids and codes are whole numbers, got {type(given).__name__} {str(given)[:40]!r}"
        ) from None


def free_code(responses: Tensor, taken: set[tuple[int, ...]]) -> tuple[int, ...]:  # [D, K]
    """Return the unused code of the largest total response, by best-first search.

    >>> free_code(torch.tensor([[2.0, 1.0], [5.0, 1.0]]), {(0, 0)})
    (1, 0)
    """
    values, order = responses.double().sort(dim=1, descending=True)
    loss, names = (values[:, :1] - values).tolist(), order.tolist()
    start = (0,) * len(names)
    heap, seen = [(0.0, start)], {start}
    while heap:
        cost, ranks = heapq.heappop(heap)
        code = tuple(names[part][rank] for part, rank in enumerate(ranks))
        if code not in taken:
            return code
        for part, rank in enumerate(ranks):
            if rank + 1 < len(names[part]):
                near = (*ranks[:part], rank + 1, *ranks[part + 1 :])
                if near not in seen:
                    seen.add(near)
                    heapq.heappush(heap, (cost - loss[part][rank] + loss[part][rank + 1], near))
    raise ArgumentError("there are no more codes than rows: take more parts or choices")


def balanced(responses: Tensor, room: int) -> Tensor:  # [V, K] -> [V]
    """Return choices with at most ``room`` rows each; rows that lose least take another one.

    >>> balanced(torch.tensor([[3.0, 0.0], [2.0, 0.0], [1.0, 0.9]]), room=2).tolist()
    [0, 0, 1]
    """
    left = responses.clone()
    chosen = left.argmax(1)
    while True:
        counts = torch.bincount(chosen, minlength=left.shape[1])
        full = (counts > room).nonzero()[:, 0]
        if not len(full):
            return chosen
        own_choice = torch.nn.functional.one_hot(chosen, left.shape[1]).bool()
        left[~own_choice & (counts >= room)] = -math.inf
        for choice in full.tolist():
            rows = (chosen == choice).nonzero()[:, 0]
            own = left[rows, choice].clone()
            others = left[rows].clone()
            others[:, choice] = -math.inf
            best = others.max(1)
            leave = (own - best.values).argsort()[: int(counts[choice]) - room]
            chosen[rows[leave]] = best.indices[leave]
            left[rows[leave], choice] = -math.inf
