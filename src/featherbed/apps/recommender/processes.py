"""Training on several processes that torchrun has started: each has a share of batches and rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from featherbed.apps.pipeline import rank, world_size
from featherbed.errors import ArgumentError

PATIENCE = timedelta(hours=12)  # processes wait for each other while one reads a large file


def share() -> slice:
    """Return the share of this process in a batch.

    >>> list(range(8))[share()]
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    return slice(rank(), None, world_size())


@contextmanager
def joined() -> Iterator[None]:
    """Join the processes of torchrun for a block."""
    import torch.distributed as dist

    if world_size() == 1 or dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", timeout=PATIENCE)
    try:
        yield
        dist.barrier()  # nobody leaves while another still talks to it
    finally:
        dist.destroy_process_group()


def divide(model: Any) -> Any:
    """Divide the tables of a model by rows; return what is called in its place, None for one
    process."""
    if world_size() == 1:
        return None
    from featherbed.interop.torchrec import divided_tables, shard

    found = shard(model, sharding="row_wise")
    if len(divided_tables(found)) < len(model.tables):
        raise ArgumentError(
            "several processes train tables whose rows can be divided, such as anchor, lowrank, kd "
            "or dense, on both sides: start one process for these settings"
        )
    return found


def everywhere(number: float) -> float:
    """Return the sum of a number over all processes."""
    if world_size() == 1:
        return number
    import torch

    total = torch.tensor(number, dtype=torch.float64)
    torch.distributed.all_reduce(total)
    return float(total)
