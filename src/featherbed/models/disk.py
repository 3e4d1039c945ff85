"""DiskRows: a packed file in the place of nn.Embedding, for n-gram and per-layer tables larger than memory."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from featherbed.errors import ArgumentError, IdError
from featherbed.packed.disk import open_rows
from featherbed.packed.table import PackedTable, as_ids

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class DiskRows(nn.Module):
    """The rows of a packed file, read from disk by ids of any shape; ``prefetch`` reads those of the next batch meanwhile.

    No row stays in memory: a call holds what it returns and the stored bytes of these rows. There are no parameters, nothing is
    added to a state dict, and gradients end here. Copies, pickles and worker processes open the file again by its path.
    ``ahead``: how many prefetched batches are held before they are asked for; with more, the oldest is dropped.

    >>> import featherbed as fb
    >>> path = getfixture("tmp_path") / "ngrams.safetensors"
    >>> _ = fb.save(fb.QuantizedTable.from_dense(torch.eye(4), bits=8), path)
    >>> rows = DiskRows(path)
    >>> rows.prefetch(torch.tensor([[2, 0]]))
    >>> rows(torch.tensor([[2, 0]])).shape, rows
    (torch.Size([1, 2, 4]), DiskRows(4, 4, 'ngrams.safetensors'))
    """

    def __init__(
        self, path: str | Path, *, dtype: torch.dtype = torch.float32, ahead: int = 2
    ) -> None:
        super().__init__()
        if dtype not in DTYPES:
            raise ArgumentError(
                f"dtype={dtype}: rows are {', '.join(str(d).removeprefix('torch.') for d in DTYPES)}"
            )
        if isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 1:
            raise ArgumentError(f"ahead={ahead!r}: give a whole number of at least 1")
        self.path, self.dtype, self.ahead = Path(path).absolute(), dtype, ahead
        self._open()

    def _open(self) -> None:
        self.packed: PackedTable = open_rows(self.path)
        self._background = Background(self.ahead)
        self.number = next(_NUMBERS)
        _OPEN[self.number] = self

    @property
    def num_embeddings(self) -> int:
        """Rows of the table."""
        return self.packed.rows

    @property
    def embedding_dim(self) -> int:
        """Width of a row."""
        return self.packed.dim

    @property
    def padding_idx(self) -> int | None:
        """The id whose row is zero."""
        return self.packed.padding_idx

    def forward(self, ids: Tensor) -> Tensor:  # integer [...] -> [..., d]
        """Return the rows of ids, on their device; those that were prefetched are waited for and used."""
        if (
            not torch.compiler.is_compiling()
        ):  # the first call of an operator of ours loads 70 MB of torch's compiler
            return self.fetched(ids)
        rows: Tensor = disk_rows(ids, self.number, self.embedding_dim, self.dtype)
        return rows

    def prefetch(self, ids: Tensor) -> None:  # integer [...]
        """Start reading the rows of ids in the background, for the next ``forward`` of the same ids."""
        self._here().start(self._wanted(ids), self._read)

    def bag(
        self,
        ids: Tensor,  # integer [N] with offsets, or [B, n]
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
        *,
        mode: str = "sum",
        include_last_offset: bool = False,
    ) -> Tensor:  # [B, d]
        """Pool rows into bags as nn.EmbeddingBag does: Σ_i w_i row(i), or the mean; padding ids do not count."""
        if per_sample_weights is not None and per_sample_weights.requires_grad:
            raise ArgumentError(
                "per_sample_weights ask for a gradient, which does not pass here: weigh and sum forward(ids)"
            )
        checked = self._wanted(ids).reshape(ids.shape).numpy()
        starts = None if offsets is None else offsets.cpu().numpy()
        weights = None if per_sample_weights is None else per_sample_weights.float().cpu().numpy()
        pooled = self.packed.bag(
            checked, starts, weights, mode=mode, include_last_offset=include_last_offset
        )
        return torch.from_numpy(pooled).to(device=ids.device, dtype=self.dtype)

    def _wanted(self, ids: Tensor) -> Tensor:  # -> int64 [n] on the processor
        if not isinstance(ids, Tensor):
            raise IdError(
                f"ids are a tensor of whole numbers, got {type(ids).__name__}: use torch.as_tensor(ids)"
            )
        if ids.dtype.is_floating_point or ids.dtype.is_complex:
            raise IdError(
                f"ids have dtype {ids.dtype}; a table takes integer ids: convert with ids.long()"
            )
        return torch.from_numpy(as_ids(ids.detach().cpu().numpy(), self.num_embeddings).reshape(-1))

    def fetched(self, ids: Tensor) -> Tensor:  # integer [...] -> [..., d]
        """Return the rows of ids: those being read ahead, or read now."""
        wanted = self._wanted(ids)
        found = self._here().taken(wanted)
        rows = self._read(wanted) if found is None else found.result()
        return rows.reshape(*ids.shape, self.embedding_dim).to(ids.device)

    def _read(self, ids: Tensor) -> Tensor:  # int64 [n] -> [n, d]
        return torch.from_numpy(self.packed[ids.numpy()]).to(self.dtype)

    def _here(self) -> Background:
        """Return the background of this process: a fork has none of its parent's threads."""
        if self._background.process != os.getpid():
            self._background = Background(self.ahead)
        return self._background

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: part
            for name, part in self.__dict__.items()
            if name not in ("packed", "_background", "number")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._open()

    def extra_repr(self) -> str:
        """Show the table and its file."""
        dtype = "" if self.dtype == torch.float32 else f", dtype={self.dtype}"
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.path.name!r}{dtype}"


_NUMBERS = itertools.count()
_OPEN: weakref.WeakValueDictionary[int, DiskRows] = weakref.WeakValueDictionary()


@torch.library.custom_op("featherbed::disk_rows", mutates_args=())
def disk_rows(ids: Tensor, number: int, width: int, dtype: torch.dtype) -> Tensor:  # noqa: ARG001 - width, dtype: see below
    """Return the rows of ids in the open table of this number: one operator, so that a compiled model may hold it.

    >>> import featherbed as fb
    >>> path = getfixture("tmp_path") / "rows.safetensors"
    >>> _ = fb.save(fb.DenseTable(5, 4), path)
    >>> rows = DiskRows(path)
    >>> disk_rows(torch.tensor([[0, 4]]), rows.number, 4, torch.float32).shape
    torch.Size([1, 2, 4])
    """
    return _OPEN[number].fetched(ids)


@disk_rows.register_fake
def _(ids: Tensor, number: int, width: int, dtype: torch.dtype) -> Tensor:  # noqa: ARG001
    return ids.new_empty((*ids.shape, width), dtype=dtype)


class Background:
    """Batches being read ahead, by their ids."""

    def __init__(self, ahead: int) -> None:
        self.process, self.ahead = os.getpid(), ahead
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._batches: OrderedDict[bytes, Future[Tensor]] = OrderedDict()

    def start(self, ids: Tensor, read: Callable[[Tensor], Tensor]) -> None:
        """Begin to read a batch, unless that was done already; drop the oldest if there are too many."""
        key = ids.numpy().tobytes()
        with self._lock:
            if key in self._batches:
                return
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self.ahead, thread_name_prefix="featherbed-rows")
            while len(self._batches) >= self.ahead:
                self._batches.popitem(last=False)[1].cancel()
            self._batches[key] = self._threads.submit(read, ids)

    def taken(self, ids: Tensor) -> Future[Tensor] | None:
        """Hand over a batch that was begun, or None."""
        if not self._batches:
            return None
        with self._lock:
            return self._batches.pop(ids.numpy().tobytes(), None)
