"""The packed form of a divided table: processes send packed rows, never dense ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from featherbed.errors import ArgumentError
from featherbed.packed.band import Band, join_bands
from featherbed.packed.table import PackedTable


def pack(
    table: Any,
    values: str = "float32",
    dictionary: str = "float32",
    layout: str = "auto",
) -> PackedTable | None:
    """Return the packed form of a divided table in the first process, None in the others.

    All processes call it; each sends its rows in packed form, so that neither the rows [V, d] nor
    the weights [V, K] are ever dense. The result equals, byte for byte, that of the whole table:

        packed = fb.distributed.pack(model.module.items)
        if packed is not None:
            fb.save(packed, "items.safetensors")

    ``table``: what stands for a table in a model divided by ``fb.distributed.shard``. The other
    arguments are those of ``Table.pack``.
    """
    place = getattr(table, "place", None)
    if place is None:
        raise ArgumentError(
            f"{type(table).__name__} is no divided table: in one process use table.pack(), after "
            "fb.distributed.shard one of fb.distributed.divided_tables(model)"
        )
    own, rank = place.table, dist.get_rank(place.group)
    band, made_by = None, None
    if own is not None:
        how = ("float32", "ragged") if own.sparse_codes else (values, layout)
        with torch.no_grad():
            (band,) = own.bands(how[0], dictionary, how[1])
        made_by = own.described() | {"padding_idx": place.padding_idx}
    owners = [one.placement.rank() for one in place.plan if one.shard_sizes[0]]
    parts: list[Band] = []
    for owner in owners:  # one after the other: the first process holds what it has joined so far
        sent: list[Any] = [(band, made_by)]
        if owner == rank != 0:
            dist.send_object_list(sent, group=place.group, group_dst=0)
        elif rank == 0 and owner != 0:
            dist.recv_object_list(sent, group=place.group, group_src=owner)
        if rank == 0:
            part, made_by = sent[0]
            parts.append(part)
    if rank:
        return None
    whole = join_bands(parts, layout, values)
    return PackedTable([whole], place.dim, padding_idx=place.padding_idx, made_by=made_by)
