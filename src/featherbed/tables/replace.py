"""replace_embeddings: replace the embedding modules of a model by compact tables."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, overload

from torch import Tensor, nn

from featherbed.errors import ArgumentError, FeatherbedWarning
from featherbed.optim.lazy.rows import SparseGradient
from featherbed.tables.bag import Bag
from featherbed.tables.collection import Collection
from featherbed.tables.sizes import Sizes
from featherbed.tables.spec import parse_spec, table_from_dense
from featherbed.tables.table import Table

Embedding = nn.Embedding | nn.EmbeddingBag
Spec = str | Callable[[Tensor, int | None], Table]
Where = Callable[[str, nn.Module], bool]
HEADER = 1024  # bytes, about, of the header of a packed file: few rows are no loss for it


@dataclass(frozen=True)
class Swap:
    """One replaced module: its name in the model, bytes before, sizes after."""

    name: str
    before: int
    after: Sizes
    table: Table

    def __str__(self) -> str:
        rows, dim = self.table.num_embeddings, self.table.embedding_dim
        sizes = f"{self.before:,} -> {self.after.file:,} bytes"
        return f"{self.name}: {rows:,} x {dim}, {sizes} ({type(self.table).__name__})"


@overload
def replace_embeddings(
    model: nn.Module, spec: Spec, where: Where | None = None, *, collect: Literal[False] = False
) -> list[Swap]: ...


@overload
def replace_embeddings(
    model: nn.Module, spec: Spec, where: Where | None = None, *, collect: Literal[True]
) -> Collection: ...


def replace_embeddings(
    model: nn.Module, spec: Spec, where: Where | None = None, *, collect: bool = False
) -> list[Swap] | Collection:
    """Replace nn.Embedding and nn.EmbeddingBag modules in place; return a list of the swaps.

    ``spec`` is a short spec (see ``featherbed.tables.spec``) or a callable from the old weight [V,
    d] and padding_idx to a table. New tables are fitted to the old rows and keep padding_idx and
    dtype; shared embeddings stay shared, and a weight tied to another module raises an error.
    ``where(name, module)`` selects modules, all by default. ``collect``: return an
    ``fb.Collection`` of the new tables instead, a column for each module by its name, which stores
    all of them in one file. A ``FeatherbedWarning`` names tables whose file is larger than the
    weight they replace.

    >>> import torch, featherbed as fb
    >>> model = nn.Sequential(nn.Embedding(1000, 16), nn.Linear(16, 2))
    >>> [swap.name for swap in fb.replace_embeddings(model, "anchor:anchors=8")]
    ['0']
    >>> model(torch.tensor([3, 17])).shape
    torch.Size([2, 2])
    >>> model = nn.ModuleDict({"user": nn.Embedding(90, 8), "item": nn.Embedding(50, 8)})
    >>> fb.replace_embeddings(model, "quantized:bits=4", collect=True)
    Collection(2 columns, 140 rows: user 90 x 8, item 50 x 8)
    """
    if isinstance(model, Embedding):
        raise ArgumentError(
            "the model is itself an embedding: make the table with from_dense(module.weight, ...) "
            "instead"
        )
    if isinstance(spec, str):
        parse_spec(spec)
    chosen = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, Embedding)
        and not isinstance(module, SparseGradient)
        and name
        and (where is None or where(name, module))
    }
    for name, module in chosen.items():
        _refuse(name, module, model)
    # one for each weight (and padding): what was shared stays shared
    tables: dict[tuple[int, int | None], Swap] = {}
    new: dict[int, nn.Module] = {}
    for name, module in chosen.items():
        weight = (id(module.weight), module.padding_idx)
        if weight not in tables:
            tables[weight] = _make(name, module, spec)
        new.setdefault(id(module), _dressed(module, tables[weight].table))
    for name, module in chosen.items():  # only now: an error above leaves the model as it was
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, new[id(module)])
    for swap in tables.values():
        _warn_if_larger(swap)
    if not collect:
        return list(tables.values())
    if not chosen:
        raise ArgumentError("the model has no embeddings to collect: look at where=")
    weights = {name: (id(module.weight), module.padding_idx) for name, module in chosen.items()}
    return Collection.from_tables({name: tables[own].table for name, own in weights.items()})


def _warn_if_larger(swap: Swap) -> None:
    if swap.after.file > swap.before + HEADER:
        warnings.warn(
            f"{swap.name}: the table takes {swap.after.file:,} bytes, more than the "
            f"{swap.before:,} of the dense weight it replaces ({type(swap.table).__name__}): give "
            f"it fewer parameters, or leave {swap.name} out by where=",
            FeatherbedWarning,
            stacklevel=3,
        )


def _refuse(name: str, module: nn.Module, model: nn.Module) -> None:
    if getattr(module, "max_norm", None) is not None:
        raise ArgumentError(
            f"{name} has max_norm, which rewrites rows in place: compact tables cannot; leave it "
            "out by where="
        )
    if isinstance(module, nn.EmbeddingBag) and module.mode == "max":
        raise ArgumentError(
            f"{name} pools by max, which compact tables do not offer: leave it out by where="
        )
    if module.weight.is_meta:
        raise ArgumentError(
            f"{name} is on the meta device and has no rows to start from: load the model first, "
            "then replace"
        )
    for other, holder in model.named_modules():
        tied = any(parameter is module.weight for parameter in holder.parameters(recurse=False))
        if tied and not isinstance(holder, Embedding):
            raise ArgumentError(
                f"the weight of {name} is also that of {other}, and a compact table would untie "
                f"them: untie them first, score with table.logits(hidden) in place of {other}, or "
                f"leave {name} out by where="
            )


def _make(name: str, module: Embedding, spec: Spec) -> Swap:
    weight, padding = module.weight.detach(), module.padding_idx
    try:
        fitted = partial(table_from_dense, spec) if isinstance(spec, str) else spec
        table = fitted(weight, padding)
    except ArgumentError as error:
        raise ArgumentError(f"{name}: {error}") from None
    made = (table.num_embeddings, table.embedding_dim)
    if made != tuple(weight.shape):
        raise ArgumentError(
            f"{name}: the callable made a table of {made}, the module has {tuple(weight.shape)}"
        )
    table.requires_grad_(module.weight.requires_grad)
    table.train(module.training)
    return Swap(name, weight.nbytes, table.sizes(), table)


def _dressed(module: Embedding, table: Table) -> nn.Module:
    """Return the replacement of a module: the table, or a bag over it."""
    if isinstance(module, nn.EmbeddingBag):
        return Bag(table, module.mode, module.include_last_offset)
    return table
