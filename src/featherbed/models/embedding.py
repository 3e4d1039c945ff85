"""A packed table in the place of a model's embedding, and of the head that is tied to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from featherbed.errors import ArgumentError, FormatError, IdError
from featherbed.ops import check_ids
from featherbed.packed.file import from_bytes, to_bytes
from featherbed.packed.table import PackedTable

BLOCK = 1 << 22  # numbers of rows that are composed at once
FEW = 64  # states for which scores go through the codes; for more, composed rows are read more often than codes


class PackedEmbedding(nn.Module):
    """Rows of a packed table, called as nn.Embedding is; its bytes are one buffer of the model, as a packed file holds them.

    Rows do not learn (``fb.tune_model`` lets their dictionaries learn). ``scale`` multiplies rows, not scores, as embeddings
    of some models do.

    >>> import featherbed as fb
    >>> table = PackedEmbedding(fb.compress(np.random.default_rng(0).standard_normal((600, 16)), ratio=3, method="int4"))
    >>> table(torch.tensor([[3, 17]])).shape, table.logits(torch.ones(16)).shape
    (torch.Size([1, 2, 16]), torch.Size([600]))
    """

    packed: Tensor  # uint8 [bytes]
    like: Tensor  # empty, of the dtype that rows have

    def __init__(
        self, table: PackedTable, *, scale: float = 1.0, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        data = torch.frombuffer(bytearray(to_bytes(table)), dtype=torch.uint8)
        self._begin(len(table), table.dim, table.padding_idx, data, scale, dtype)

    def _begin(
        self,
        rows: int,
        dim: int,
        padding: int | None,
        data: Tensor,
        scale: float,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.num_embeddings, self.embedding_dim, self.padding_idx, self.scale = (
            rows,
            dim,
            padding,
            float(scale),
        )
        self.register_buffer("packed", data)
        self.register_buffer("like", torch.empty(0, dtype=dtype), persistent=False)
        self._read: tuple[tuple[int, int], PackedTable] | None = None

    @classmethod
    def empty(
        cls, about: dict[str, Any], device: torch.device | str | None = None
    ) -> PackedEmbedding:
        """Return one whose bytes are to come, by a state that is loaded, for what ``about`` says."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        data = torch.zeros(about["bytes"], dtype=torch.uint8, device=device)
        made._begin(about["rows"], about["dim"], about["padding"], data, about["scale"])
        return made

    def about(self) -> dict[str, Any]:
        """Return what another process must know before it reads the bytes."""
        known = {
            "rows": self.num_embeddings,
            "dim": self.embedding_dim,
            "padding": self.padding_idx,
        }
        return known | {"scale": self.scale, "bytes": self.packed.numel()}

    @property
    def table(self) -> PackedTable:
        """The packed table in the buffer: look-up and search with numpy, ``save`` for a file of its own."""
        place = (self.packed.data_ptr(), 0 if self.packed.is_inference() else self.packed._version)
        if self._read is None or self._read[0] != place:
            if self.packed.is_meta:
                raise ArgumentError(
                    "the table is on the meta device and has no bytes: load the model's weights first"
                )
            held = self.packed.detach().cpu().numpy()
            held = held if held.ctypes.data % 8 == 0 else held.copy()
            table = from_bytes(held)
            if (len(table), table.dim) != (self.num_embeddings, self.embedding_dim):
                raise FormatError(
                    f"the bytes hold {table!r}, the model wants {self.num_embeddings} x {self.embedding_dim}"
                )
            self._read = (place, table)
        return self._read[1]

    def replace(self, data: Tensor) -> None:  # uint8 [bytes]
        """Take the bytes of another table of as many rows and columns."""
        self.register_buffer("packed", data)
        self._read = None

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles read their own bytes."""
        return self.__dict__ | {"_read": None}

    @property
    def dtype(self) -> torch.dtype:
        """What rows are: ``model.to(torch.bfloat16)`` changes it."""
        return self.like.dtype

    def forward(self, ids: Tensor) -> Tensor:  # integer [...] -> [..., d]
        """Return the rows of ids."""
        return self.rows(ids, self.scale)

    def rows(self, ids: Tensor, scale: float) -> Tensor:  # integer [...] -> [..., d]
        """Return the rows of ids times ``scale``."""
        if not isinstance(ids, Tensor):
            raise IdError(
                f"ids are a tensor of whole numbers, got {type(ids).__name__}: use torch.as_tensor(ids)"
            )
        wanted = check_ids(ids, self.num_embeddings)
        rows = torch.from_numpy(self.table[wanted.cpu().numpy()]).to(ids.device)
        return (rows if scale == 1 else rows * scale).to(self.dtype)

    def logits(self, hidden: Tensor) -> Tensor:  # [..., d] -> [..., V]
        """Score hidden states by all rows: h E^T, through the codes for few states, by blocks of composed rows for many."""
        if hidden.shape[-1] != self.embedding_dim:
            raise ArgumentError(
                f"hidden states have shape {tuple(hidden.shape)}: give [..., {self.embedding_dim}]"
            )
        flat = hidden.reshape(-1, self.embedding_dim)
        scores: Tensor = Scores.apply(flat, self)  # type: ignore[no-untyped-call]
        return scores.reshape(*hidden.shape[:-1], self.num_embeddings)

    def blocks(self, like: Tensor) -> Any:
        """Yield first id and composed rows [n, d], of the device and kind of ``like``, over the whole table."""
        step = max(1, BLOCK // self.embedding_dim)
        for start in range(0, self.num_embeddings, step):
            rows = self.table.block(start, min(start + step, self.num_embeddings))
            yield start, torch.from_numpy(np.ascontiguousarray(rows)).to(like.device, like.dtype)

    @property
    def weight(self) -> Tensor:  # [V, d]
        """The dense rows, computed each time."""
        return torch.cat([rows for _, rows in self.blocks(self.like)])

    def extra_repr(self) -> str:
        """Show rows, width and bytes."""
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.packed.numel():,} bytes"


class Scores(torch.autograd.Function):
    """h E^T for rows E that do not learn; the gradient of h is g E."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, table: PackedEmbedding) -> Tensor:  # [n, d] -> [n, V]
        """Score."""
        ctx.table = table
        if len(hidden) <= FEW and hidden.device.type == "cpu":
            scores = table.table.logits(hidden.detach().float().numpy())
            return torch.from_numpy(np.ascontiguousarray(scores)).to(hidden.dtype)
        out = hidden.new_empty(len(hidden), table.num_embeddings)
        for start, rows in table.blocks(hidden):
            torch.mm(hidden, rows.T, out=out[:, start : start + len(rows)])
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Sum the rows by the gradients of their scores."""
        (gradient,) = gradients
        total = gradient.new_zeros(len(gradient), ctx.table.embedding_dim)
        for start, rows in ctx.table.blocks(gradient):
            total.addmm_(gradient[:, start : start + len(rows)], rows)
        return total, None


class Tied(nn.Module):
    """What uses the bytes of an embedding that stands elsewhere in the model."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self._tied = (embedding,)  # not a child: its bytes are the embedding's

    @property
    def embedding(self) -> Any:
        """The embedding."""
        return self._tied[0]

    @property
    def weight(self) -> Tensor:  # [V, d]
        """The rows of the embedding, computed each time."""
        rows: Tensor = self.embedding.weight
        return rows


class PackedTwin(Tied):
    """A second embedding that shares its rows with another, as those of an encoder and a decoder do."""

    def __init__(self, embedding: nn.Module, scale: float = 1.0) -> None:
        super().__init__(embedding)
        self.scale = float(scale)

    @property
    def num_embeddings(self) -> int:
        """Rows."""
        return int(self.embedding.num_embeddings)

    @property
    def embedding_dim(self) -> int:
        """Their width."""
        return int(self.embedding.embedding_dim)

    @property
    def padding_idx(self) -> Any:
        """The row of zeros, if there is one."""
        return self.embedding.padding_idx

    def forward(self, ids: Tensor) -> Tensor:  # integer [...] -> [..., d]
        """Return the rows of ids."""
        rows: Tensor = self.embedding.rows(ids, self.scale)
        return rows


class PackedHead(Tied):
    """The head that is tied to a compact embedding: logits = h E^T + b. It holds nothing but the bias.

    >>> import featherbed as fb
    >>> table = PackedEmbedding(fb.compress(np.random.default_rng(0).standard_normal((600, 16)), ratio=3, method="int4"))
    >>> PackedHead(table)(torch.ones(2, 16)).shape
    torch.Size([2, 600])
    """

    bias: nn.Parameter | None

    def __init__(self, embedding: nn.Module, bias: nn.Parameter | None = None) -> None:
        super().__init__(embedding)
        self.bias = bias
        self.in_features = int(embedding.embedding_dim)  # type: ignore[arg-type]
        self.out_features = int(embedding.num_embeddings)  # type: ignore[arg-type]

    def forward(self, hidden: Tensor) -> Tensor:  # [..., d] -> [..., V]
        """Score hidden states by all rows."""
        scores: Tensor = self.embedding.logits(hidden)
        return scores if self.bias is None else scores + self.bias

    def extra_repr(self) -> str:
        """Show what it scores by."""
        return f"{self.in_features}, {self.out_features}, tied, bias={self.bias is not None}"
