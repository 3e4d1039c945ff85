"""replace_embeddings: swap the embedding modules of any model for compact tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from featherbed.errors import ArgumentError
from featherbed.tables.bag import Bag
from featherbed.tables.sizes import Sizes
from featherbed.tables.spec import table_from_dense
from featherbed.tables.table import Table

Embedding = nn.Embedding | nn.EmbeddingBag


@dataclass(frozen=True)
class Swap:
    """One replaced module: its name in the model, bytes before, sizes after."""

    name: str
    before: int
    after: Sizes
    table: Table

    def __str__(self) -> str:
        rows, dim = self.table.num_embeddings, self.table.embedding_dim
        return f"{self.name}: {rows:,} x {dim}, {self.before:,} -> {self.after.file:,} bytes ({type(self.table).__name__})"


def replace_embeddings(
    model: nn.Module,
    spec: str | Callable[[Tensor, int | None], Table],
    where: Callable[[str, nn.Module], bool] | None = None,
) -> list[Swap]:
    """Replace nn.Embedding and nn.EmbeddingBag modules in place; return what was swapped.

    ``spec`` is a short spec (see ``featherbed.tables.spec``) or a callable from the old weight [V, d] and padding_idx to a
    table. Rows start near the old ones, padding_idx and dtype are kept; a module used in several places stays shared.
    ``where(name, module)`` chooses modules; all by default.

    >>> import torch, featherbed as fb
    >>> model = nn.Sequential(nn.Embedding(1000, 16), nn.Linear(16, 2))
    >>> [swap.name for swap in fb.replace_embeddings(model, "anchor:anchors=8")]
    ['0']
    >>> model(torch.tensor([3, 17])).shape
    torch.Size([2, 2])
    """
    chosen = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, Embedding) and name and (where is None or where(name, module))
    }
    if isinstance(model, Embedding):
        raise ArgumentError("the model is itself an embedding: make the table with from_dense(module.weight, ...) instead")
    for name, module in chosen.items():
        _refuse(name, module)
    made: dict[int, tuple[nn.Module, Swap]] = {}
    for name, module in chosen.items():
        if id(module) not in made:
            made[id(module)] = _make(name, module, spec)
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, made[id(module)][0])
    return [swap for _, swap in made.values()]


def _refuse(name: str, module: nn.Module) -> None:
    if getattr(module, "max_norm", None) is not None:
        raise ArgumentError(f"{name} has max_norm, which rewrites rows in place: compact tables cannot; leave it out by where=")
    if isinstance(module, nn.EmbeddingBag) and module.mode == "max":
        raise ArgumentError(f"{name} pools by max, which compact tables do not offer: leave it out by where=")


def _make(name: str, module: nn.Module, spec: str | Callable[[Tensor, int | None], Table]) -> tuple[nn.Module, Swap]:
    assert isinstance(module, Embedding)
    weight, padding = module.weight.detach(), module.padding_idx
    table = table_from_dense(spec, weight, padding_idx=padding) if isinstance(spec, str) else spec(weight, padding)
    if (table.num_embeddings, table.embedding_dim) != tuple(weight.shape):
        made = (table.num_embeddings, table.embedding_dim)
        raise ArgumentError(f"{name}: the callable made a table of {made}, the module has {tuple(weight.shape)}")
    table.requires_grad_(module.weight.requires_grad)
    table.train(module.training)
    swap = Swap(name, weight.nbytes, table.sizes(), table)
    if isinstance(module, nn.EmbeddingBag):
        return Bag(table, module.mode, module.include_last_offset), swap
    return table, swap
