"""DiskRows: nn.Embedding over a packed file, for tables larger than memory."""

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

from featherbed.checks import check_integer
from featherbed.errors import ArgumentError, IdError
from featherbed.packed.disk import open_rows
from featherbed.packed.table import PackedTable, as_ids

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class DiskRows(nn.Module):
    """The rows of a packed file, read from disk on each call; ``prefetch`` reads in the background.

    No row stays in memory: a call holds its result and the stored bytes of these rows. The module
    has no parameters, adds nothing to a state dict, and gradients end here. Copies, pickles and
    worker processes reopen the file by its path.

    Args:
        path: the packed file.
        dtype: dtype of rows.
        ahead: number of prefetched batches held; with more, the oldest is dropped.

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
            names = ", ".join(str(known).removeprefix("torch.") for known in DTYPES)
            raise ArgumentError(f"dtype={dtype}: use one of {names}")
        self.path, self.dtype = Path(path).absolute(), dtype
        self.ahead = check_integer("ahead", ahead)
        self._open()

    def _open(self) -> None:
        self.packed: PackedTable = open_rows(self.path)
        self._prefetcher = Prefetcher(self.ahead)
        self.number = next(_NUMBERS)
        _OPEN[self.number] = self

    @property
    def num_embeddings(self) -> int:
        """Number of rows."""
        return self.packed.rows

    @property
    def embedding_dim(self) -> int:
        """Row width."""
        return self.packed.dim

    @property
    def padding_idx(self) -> int | None:
        """Id of the row of zeros, or None."""
        return self.packed.padding_idx

    def forward(self, ids: Tensor) -> Tensor:  # integer [...] -> [..., d]
        """Return the rows of ids on their device, waiting for prefetched ones."""
        # eager calls avoid the custom operator, whose first call loads 70 MB of torch's compiler
        if not torch.compiler.is_compiling():
            return self.fetch(ids)
        rows: Tensor = disk_rows(ids, self.number, self.embedding_dim, self.dtype)
        return rows

    def prefetch(self, ids: Tensor) -> None:  # integer [...]
        """Start reading the rows of ids in the background, for the next call with the same ids."""
        self._local_prefetcher().start(self._check(ids), self._read)

    def bag(
        self,
        ids: Tensor,  # integer [N] with offsets, or [B, n]
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
        *,
        mode: str = "sum",
        include_last_offset: bool = False,
    ) -> Tensor:  # [B, d]
        """Pool rows as nn.EmbeddingBag does: Σ_i w_i row(i), or the mean, without padding ids."""
        if per_sample_weights is not None and per_sample_weights.requires_grad:
            raise ArgumentError(
                "per_sample_weights require a gradient, which does not pass here: "
                "weight and sum forward(ids)"
            )
        checked = self._check(ids).reshape(ids.shape).numpy()
        starts = None if offsets is None else offsets.cpu().numpy()
        weights = None if per_sample_weights is None else per_sample_weights.float().cpu().numpy()
        pooled = self.packed.bag(
            checked, starts, weights, mode=mode, include_last_offset=include_last_offset
        )
        return torch.from_numpy(pooled).to(device=ids.device, dtype=self.dtype)

    def _check(self, ids: Tensor) -> Tensor:  # -> int64 [n] on the CPU
        if not isinstance(ids, Tensor):
            raise IdError(
                f"ids must be a tensor of integers, got {type(ids).__name__}: "
                "use torch.as_tensor(ids)"
            )
        if ids.dtype.is_floating_point or ids.dtype.is_complex:
            raise IdError(
                f"ids have dtype {ids.dtype}; a table takes integer ids: convert with ids.long()"
            )
        return torch.from_numpy(as_ids(ids.detach().cpu().numpy(), self.num_embeddings).reshape(-1))

    def fetch(self, ids: Tensor) -> Tensor:  # integer [...] -> [..., d]
        """Return the rows of ids, prefetched or read now."""
        flat = self._check(ids)
        future = self._local_prefetcher().pop(flat)
        rows = self._read(flat) if future is None else future.result()
        return rows.reshape(*ids.shape, self.embedding_dim).to(ids.device)

    def _read(self, ids: Tensor) -> Tensor:  # int64 [n] -> [n, d]
        return torch.from_numpy(self.packed[ids.numpy()]).to(self.dtype)

    def _local_prefetcher(self) -> Prefetcher:
        """Return the prefetcher of this process: a fork does not inherit threads."""
        if self._prefetcher.process != os.getpid():
            self._prefetcher = Prefetcher(self.ahead)
        return self._prefetcher

    def __getstate__(self) -> dict[str, Any]:
        reopened = ("packed", "_prefetcher", "number")
        return {name: part for name, part in self.__dict__.items() if name not in reopened}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._open()

    def extra_repr(self) -> str:
        """Return the shape and the file."""
        dtype = "" if self.dtype == torch.float32 else f", dtype={self.dtype}"
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.path.name!r}{dtype}"


_NUMBERS = itertools.count()
_OPEN: weakref.WeakValueDictionary[int, DiskRows] = weakref.WeakValueDictionary()


@torch.library.custom_op("featherbed::disk_rows", mutates_args=())
def disk_rows(ids: Tensor, number: int, width: int, dtype: torch.dtype) -> Tensor:  # noqa: ARG001
    """Return the rows of ids in the open table of this number, as one operator for torch.compile.

    >>> import featherbed as fb
    >>> path = getfixture("tmp_path") / "rows.safetensors"
    >>> _ = fb.save(fb.DenseTable(5, 4), path)
    >>> rows = DiskRows(path)
    >>> disk_rows(torch.tensor([[0, 4]]), rows.number, 4, torch.float32).shape
    torch.Size([1, 2, 4])
    """
    return _OPEN[number].fetch(ids)


@disk_rows.register_fake
def _(ids: Tensor, number: int, width: int, dtype: torch.dtype) -> Tensor:  # noqa: ARG001
    return ids.new_empty((*ids.shape, width), dtype=dtype)


class Prefetcher:
    """Batches being read in the background, by their ids."""

    def __init__(self, ahead: int) -> None:
        self.process, self.ahead = os.getpid(), ahead
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._batches: OrderedDict[bytes, Future[Tensor]] = OrderedDict()

    def start(self, ids: Tensor, read: Callable[[Tensor], Tensor]) -> None:
        """Start reading a batch unless it is being read; drop the oldest if there are too many."""
        key = ids.numpy().tobytes()
        with self._lock:
            if key in self._batches:
                return
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self.ahead, thread_name_prefix="featherbed-rows")
            while len(self._batches) >= self.ahead:
                self._batches.popitem(last=False)[1].cancel()
            self._batches[key] = self._threads.submit(read, ids)

    def pop(self, ids: Tensor) -> Future[Tensor] | None:
        """Return and forget the batch of these ids, or None."""
        if not self._batches:
            return None
        with self._lock:
            return self._batches.pop(ids.numpy().tobytes(), None)
