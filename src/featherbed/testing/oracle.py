"""The dense table that a table represents, and comparisons with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from featherbed.tables.table import Table

Make = Callable[..., Table]
SEED = 17


def seeded(make: Make, **settings: Any) -> Table:
    """Create a table from a fixed seed, in evaluation mode."""
    settings.setdefault("dtype", torch.float64)
    return make(generator=torch.Generator().manual_seed(SEED), **settings).eval()


def oracle(table: Table) -> Tensor:  # [V, d]
    """Return the dense table defined by the codes, with gradients to every parameter."""
    ids = torch.arange(table.num_embeddings)
    return table.mask_padding(ids, table.codes(ids).rows())


def some_ids(table: Table, *shape: int) -> Tensor:
    """Return seeded ids with repeats, including the first and the last id if possible."""
    ids = torch.randint(table.num_embeddings, shape, generator=torch.Generator().manual_seed(3))
    if ids.numel() > 2:
        ids.view(-1)[0], ids.view(-1)[1] = 0, table.num_embeddings - 1
    return ids


def random_like(rows: Tensor) -> Tensor:
    """Return seeded normal numbers of the shape of ``rows``."""
    return torch.randn(rows.shape, dtype=rows.dtype, generator=torch.Generator().manual_seed(5))


def gradients_of(
    table: Table, rows: Tensor, extra: tuple[Tensor, ...] = (), keep: bool = False
) -> list[Tensor]:
    """Return dense gradients of a seeded sum of ``rows``: of all parameters, then of ``extra``."""
    wanted = [*table.parameters(), *extra]
    found = torch.autograd.grad(
        rows, wanted, random_like(rows), allow_unused=True, retain_graph=keep
    )
    return [
        torch.zeros_like(w) if g is None else g.to_dense()
        for w, g in zip(wanted, found, strict=True)
    ]


def assert_same(
    table: Table, fast: Tensor, slow: Tensor, what: str, extra: tuple[Tensor, ...] = ()
) -> None:
    """Assert that two computations of rows agree, including all gradients."""
    torch.testing.assert_close(fast, slow, msg=lambda m: f"{what}: {m}")
    names = [name for name, _ in table.named_parameters()] + ["per_sample_weights"] * len(extra)
    pairs = zip(
        names,
        gradients_of(table, fast, extra),
        gradients_of(table, slow, extra, keep=True),
        strict=True,
    )
    for name, mine, dense in pairs:
        label = f"gradient of {name}, {what}"
        torch.testing.assert_close(mine, dense, msg=lambda m: f"{label}: {m}")  # noqa: B023 - called at once
