"""Packed tables in place of a model's embedding and of the head tied to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from featherbed.errors import ArgumentError, FormatError, IdError
from featherbed.ops import check_ids
from featherbed.packed.file import from_bytes, to_bytes
from featherbed.packed.table import PackedTable

BLOCK = 1 << 22  # elements of rows that are reconstructed at once
FEW = 64  # hidden states scored through the codes; for more, dense blocks of rows are faster


class PackedEmbedding(nn.Module):
    """Rows of a packed table with the call of nn.Embedding; one buffer holds the packed file.

    Rows are not trained (``fb.tune_model`` trains their dictionaries). ``scale`` multiplies rows
    but not logits, as the embeddings of some models do.

    >>> import featherbed as fb
    >>> matrix = np.random.default_rng(0).standard_normal((600, 16))
    >>> table = PackedEmbedding(fb.compress(matrix, ratio=3, method="int4"))
    >>> table(torch.tensor([[3, 17]])).shape, table.logits(torch.ones(16)).shape
    (torch.Size([1, 2, 16]), torch.Size([600]))
    """

    packed: Tensor  # uint8 [bytes]
    like: Tensor  # empty, with the dtype of rows

    def __init__(
        self, table: PackedTable, *, scale: float = 1.0, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        data = torch.frombuffer(bytearray(to_bytes(table)), dtype=torch.uint8)
        self._initialize((len(table), table.dim, table.padding_idx), data, scale, dtype)

    def _initialize(
        self,
        shape: tuple[int, int, int | None],  # rows, columns, padding id
        data: Tensor,
        scale: float,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.num_embeddings, self.embedding_dim, self.padding_idx = shape
        self.scale = float(scale)
        self.register_buffer("packed", data)
        self.register_buffer("like", torch.empty(0, dtype=dtype), persistent=False)
        self._cache: tuple[tuple[int, int], PackedTable] | None = None

    @classmethod
    def empty(
        cls, metadata: dict[str, Any], device: torch.device | str | None = None
    ) -> PackedEmbedding:
        """Return an embedding of the given ``metadata`` whose bytes a state dict will provide."""
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        data = torch.zeros(metadata["bytes"], dtype=torch.uint8, device=device)
        shape = (metadata["rows"], metadata["dim"], metadata["padding"])
        self._initialize(shape, data, metadata["scale"])
        return self

    def metadata(self) -> dict[str, Any]:
        """Return the fields from which ``empty`` creates the same embedding without its bytes."""
        return {
            "rows": self.num_embeddings,
            "dim": self.embedding_dim,
            "padding": self.padding_idx,
            "scale": self.scale,
            "bytes": self.packed.numel(),
        }

    @property
    def table(self) -> PackedTable:
        """The packed table in the buffer, for numpy look-ups, search and ``save``."""
        version = 0 if self.packed.is_inference() else self.packed._version
        key = (self.packed.data_ptr(), version)
        if self._cache is None or self._cache[0] != key:
            if self.packed.is_meta:
                raise ArgumentError(
                    "the table is on the meta device and has no bytes: "
                    "load the model's weights first"
                )
            data = self.packed.detach().cpu().numpy()
            table = from_bytes(data if data.ctypes.data % 8 == 0 else data.copy())
            if (len(table), table.dim) != (self.num_embeddings, self.embedding_dim):
                raise FormatError(
                    f"the bytes hold {table!r}, the model wants "
                    f"{self.num_embeddings} x {self.embedding_dim}"
                )
            self._cache = (key, table)
        return self._cache[1]

    def replace(self, data: Tensor) -> None:  # uint8 [bytes]
        """Replace the bytes by those of another table of the same shape."""
        self.register_buffer("packed", data)
        self._cache = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the cache out of copies and pickles."""
        return self.__dict__ | {"_cache": None}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of rows; ``model.to(torch.bfloat16)`` changes it."""
        return self.like.dtype

    def forward(self, ids: Tensor) -> Tensor:  # integer [...] -> [..., d]
        """Return the rows of ids."""
        return self.rows(ids, self.scale)

    def rows(self, ids: Tensor, scale: float) -> Tensor:  # integer [...] -> [..., d]
        """Return the rows of ids times ``scale``."""
        if not isinstance(ids, Tensor):
            raise IdError(
                f"ids must be a tensor of integers, got {type(ids).__name__}: "
                "use torch.as_tensor(ids)"
            )
        checked = check_ids(ids, self.num_embeddings)
        rows = torch.from_numpy(self.table[checked.cpu().numpy()]).to(ids.device)
        return (rows if scale == 1 else rows * scale).to(self.dtype)

    def logits(self, hidden: Tensor) -> Tensor:  # [..., d] -> [..., V]
        """Return h E^T: through the codes for few states, by blocks of dense rows for many."""
        if hidden.shape[-1] != self.embedding_dim:
            raise ArgumentError(
                f"hidden states have shape {tuple(hidden.shape)}: give [..., {self.embedding_dim}]"
            )
        flat = hidden.reshape(-1, self.embedding_dim)
        scores: Tensor = _PackedLogits.apply(flat, self)  # type: ignore[no-untyped-call]
        return scores.reshape(*hidden.shape[:-1], self.num_embeddings)

    def blocks(self, like: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield first id and dense rows [n, d], with the device and dtype of ``like``."""
        step = max(1, BLOCK // self.embedding_dim)
        for start in range(0, self.num_embeddings, step):
            rows = self.table.block(start, min(start + step, self.num_embeddings))
            yield start, torch.from_numpy(np.ascontiguousarray(rows)).to(like.device, like.dtype)

    @property
    def weight(self) -> Tensor:  # [V, d]
        """The dense rows, computed on each access."""
        return torch.cat([rows for _, rows in self.blocks(self.like)])

    def extra_repr(self) -> str:
        """Return rows, columns and bytes."""
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.packed.numel():,} bytes"


class _PackedLogits(torch.autograd.Function):
    """h E^T for fixed rows E; the gradient of h is g E."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, table: PackedEmbedding) -> Tensor:  # [n, d] -> [n, V]
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
        (gradient,) = gradients
        total = gradient.new_zeros(len(gradient), ctx.table.embedding_dim)
        for start, rows in ctx.table.blocks(gradient):
            total.addmm_(gradient[:, start : start + len(rows)], rows)
        return total, None


class TiedModule(nn.Module):
    """A module that uses the rows of an embedding elsewhere in the model."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.tie(embedding)

    def tie(self, embedding: nn.Module) -> None:
        """Use the rows of this embedding."""
        self._tied = (embedding,)  # a tuple, so that it is not registered as a child

    @property
    def embedding(self) -> Any:
        """The embedding."""
        return self._tied[0]

    @property
    def weight(self) -> Tensor:  # [V, d]
        """The rows of the embedding, computed on each access."""
        rows: Tensor = self.embedding.weight
        return rows


class PackedTwin(TiedModule):
    """A second embedding with the rows of another, such as that of a decoder."""

    def __init__(self, embedding: nn.Module, scale: float = 1.0) -> None:
        super().__init__(embedding)
        self.scale = float(scale)

    @property
    def num_embeddings(self) -> int:
        """Number of rows."""
        return int(self.embedding.num_embeddings)

    @property
    def embedding_dim(self) -> int:
        """Row width."""
        return int(self.embedding.embedding_dim)

    @property
    def padding_idx(self) -> Any:
        """Id of the row of zeros, or None."""
        return self.embedding.padding_idx

    def forward(self, ids: Tensor) -> Tensor:  # integer [...] -> [..., d]
        """Return the rows of ids."""
        rows: Tensor = self.embedding.rows(ids, self.scale)
        return rows


class PackedHead(TiedModule):
    """The output layer tied to a packed embedding: logits = h E^T + b. Only the bias is its own.

    >>> import featherbed as fb
    >>> matrix = np.random.default_rng(0).standard_normal((600, 16))
    >>> table = PackedEmbedding(fb.compress(matrix, ratio=3, method="int4"))
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
        """Return the logits of hidden states."""
        scores: Tensor = self.embedding.logits(hidden)
        return scores if self.bias is None else scores + self.bias

    def extra_repr(self) -> str:
        """Return the shape."""
        return f"{self.in_features}, {self.out_features}, tied, bias={self.bias is not None}"
