"""``fb.compress_model``: the embeddings of any model become packed tables, and heads that are tied to them stay tied."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from featherbed.codecs.codec import Tell, quiet
from featherbed.codecs.target import Target
from featherbed.compression.run import compress
from featherbed.errors import ArgumentError, DataError
from featherbed.models.embedding import PackedEmbedding, PackedHead, PackedTwin
from featherbed.packed.file import from_bytes
from featherbed.packed.table import PackedTable

LEAST = 256  # rows: smaller embeddings of plain modules are left alone unless asked for
Where = Callable[[str, nn.Module], bool]


@dataclass(frozen=True)
class Place:
    """One weight [V, d] of a model, and the modules that hold it: embeddings, and the linear heads tied to them."""

    embeddings: dict[str, nn.Embedding]
    heads: dict[str, nn.Linear]
    scales: dict[str, float]  # by which each embedding multiplies its rows

    @property
    def name(self) -> str:
        """The first embedding's name."""
        return next(iter(self.embeddings))

    @property
    def weight(self) -> Tensor:
        """The weight they share."""
        return next(iter(self.embeddings.values())).weight


@dataclass(frozen=True)
class Swapped:
    """One compressed weight: where it was, which heads are tied to it, bytes before and after, and the table."""

    name: str
    also: tuple[str, ...]
    heads: tuple[str, ...]
    before: int
    after: int
    table: PackedTable

    def __str__(self) -> str:
        tied = (
            f", tied to {', '.join((*self.also, *self.heads))}" if self.also or self.heads else ""
        )
        what = self.table.made_by.get("method", "table")
        return f"{self.name}: {len(self.table):,} x {self.table.dim}, {self.before:,} -> {self.after:,} bytes ({what}{tied})"


def compress_model(
    model: nn.Module,
    *,
    ratio: float | None = None,
    budget: int | str | None = None,
    quality: str | None = None,
    method: str = "auto",
    measure: str = "error",
    weights: Any = None,
    where: Where | None = None,
    generator: Any = None,
    tell: Tell = quiet,
) -> list[Swapped]:
    """Compress the token table of a model in place (``fb.compress``); return what was done, largest table first.

    Of a ``transformers`` model its input embeddings, of any other module every nn.Embedding of at least 256 rows, or those
    ``where(name, module)`` chooses. A linear head that holds the same weight stays tied: it scores through the codes. Nothing
    else changes; an error leaves the model as it was. ``save_pretrained`` and ``from_pretrained`` work as before where
    ``featherbed.models.pretrained`` has been imported, as this and ``fb.load_model`` do.

    ``ratio``, ``budget`` and ``quality`` are for each table, of float32 rows; methods are compared by the error of rows, which
    a model multiplies on, or with ``measure="recall"`` by the neighbours they keep; ``weights`` says how often tokens are used:
    an array for all, or a mapping from names of embeddings.

    >>> model = nn.Sequential(nn.Embedding(1000, 16), nn.Linear(16, 2))
    >>> [str(one) for one in compress_model(model, ratio=4, method="int4")]
    ['0: 1,000 x 16, 64,000 -> 10,648 bytes (int4)']
    >>> model(torch.tensor([3, 17])).shape
    torch.Size([2, 2])
    """
    Target.of(budget, ratio, quality, 4, measure)
    places = sorted(found_places(model, where), key=lambda place: -place.weight.numel())
    unknown = (
        sorted(set(weights) - {place.name for place in places})
        if isinstance(weights, Mapping)
        else []
    )
    if unknown:
        raise ArgumentError(
            f"weights are given for {unknown[0]!r}: compressed are {', '.join(one.name for one in places)}"
        )
    made: list[tuple[Place, PackedTable]] = []
    for number, place in enumerate(places):

        def told(what: str, share: float, number: int = number) -> None:
            tell(f"{places[number].name}: {what}", (number + share) / len(places))

        used = weights.get(place.name) if isinstance(weights, Mapping) else weights
        rows = rows_of(place.weight)
        try:
            table = compress(
                rows,
                ratio=ratio,
                budget=budget,
                quality=quality,
                method=method,
                measure=measure,
                weights=used,
                padding_idx=padding_of(place, rows),
                generator=generator,
                name=place.name,
                tell=told,
            )
        except (ArgumentError, DataError) as error:
            raise type(error)(f"{place.name}: {error}") from None
        made.append((place, table))
    found = [
        swap(model, place, table) for place, table in made
    ]  # only now: an error above leaves the model as it was
    if is_pretrained(model):
        from featherbed.models.pretrained import mark

        mark(model)
    return found


def rows_of(weight: Tensor) -> Any:
    """Return a weight as a matrix that numpy knows."""
    if weight.is_meta:
        raise ArgumentError(
            "the weight is on the meta device and has no rows: load the model first"
        )
    plain = weight.detach().cpu()
    return plain.numpy() if plain.dtype in (torch.float32, torch.float16) else plain.float().numpy()


def padding_of(place: Place, rows: Any) -> int | None:  # rows [V, d]
    """Return the padding row of the embeddings that have one, where it is zero."""
    paddings = {module.padding_idx for module in place.embeddings.values()} - {None}
    (padding,) = paddings if len(paddings) == 1 else (None,)
    return padding if padding is not None and not rows[padding : padding + 1].any() else None


def is_pretrained(model: nn.Module) -> bool:
    """Whether a model is one of the ``transformers`` library, without importing it."""
    return any(
        one.__module__.startswith("transformers.") and one.__name__ == "PreTrainedModel"
        for one in type(model).__mro__
    )


def found_places(model: nn.Module, where: Where | None) -> list[Place]:
    """Return the weights to compress, each once, or say why there are none."""
    if isinstance(model, nn.Embedding):
        raise ArgumentError(
            "the model is itself an embedding: use fb.compress(model, ratio=...) instead"
        )
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"got {type(model).__name__}: give a torch module, or a folder to `featherbed compress`"
        )
    every = dict(model.named_modules(remove_duplicate=False))
    embeddings = {
        name: module for name, module in every.items() if isinstance(module, nn.Embedding)
    }
    chosen = {
        name: module for name, module in embeddings.items() if wanted(model, where)(name, module)
    }
    if not chosen:
        raise ArgumentError(nothing_chosen(model, embeddings))
    places: dict[int, Place] = {}
    for module in chosen.values():
        if id(module.weight) not in places:
            places[id(module.weight)] = place_of(every, module)
    return list(places.values())


def wanted(model: nn.Module, where: Where | None) -> Where:
    """Return which embeddings are compressed."""
    if where is not None:
        return where
    if not is_pretrained(model):
        return lambda _, module: isinstance(module, nn.Embedding) and module.num_embeddings >= LEAST
    try:
        own = model.get_input_embeddings()  # type: ignore[operator]
    except (NotImplementedError, AttributeError):
        kind = type(model).__name__
        raise ArgumentError(
            f"{kind} does not say which its input embeddings are: choose by where=(name, module)"
        ) from None
    weight = getattr(own, "weight", None)
    return lambda _, module: weight is not None and getattr(module, "weight", None) is weight


def nothing_chosen(model: nn.Module, embeddings: Mapping[str, nn.Module]) -> str:
    """Say what there is in place of what was asked for."""
    kind = type(model).__name__
    if any(isinstance(module, PackedEmbedding) for module in model.modules()):
        return f"{kind} has its embeddings compressed already"
    if not embeddings:
        return f"{kind} has no nn.Embedding: nothing to compress"
    listed = ", ".join(
        f"{name} ({module.num_embeddings:,} x {module.embedding_dim})"
        for name, module in embeddings.items()
    )
    return f"{kind} has no embedding that was chosen: it has {listed[:300]}; choose by where=(name, module)"


def place_of(every: Mapping[str, nn.Module], first: nn.Embedding) -> Place:
    """Return all modules that hold a weight, or say which of them cannot be kept."""
    weight, embeddings, heads = first.weight, {}, {}
    for name, module in every.items():
        for key, parameter in module.named_parameters(recurse=False):
            if parameter is not weight:
                if shares_memory(parameter, weight):
                    raise ArgumentError(
                        f"{name}.{key} {tuple(parameter.shape)} shares memory with the embedding {tuple(weight.shape)} but is "
                        "not the same weight: untie them first"
                    )
            elif isinstance(module, nn.Embedding):
                embeddings[name] = module
            elif isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
                heads[name] = module
            else:
                raise ArgumentError(
                    f"the embedding's weight is also {name}.{key} of a {type(module).__name__}, which is neither an embedding "
                    "nor a linear head: untie them first, or leave it out by where="
                )
    if not embeddings:
        raise ArgumentError(
            f"the rows of a {type(first).__name__} are computed from other parameters: make its weight a plain one first"
        )
    return Place(
        embeddings, heads, {name: scale_of(name, module) for name, module in embeddings.items()}
    )


def shares_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two parameters lie in the same memory."""
    if one.is_meta or other.is_meta or one.device != other.device:
        return False
    return (
        one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() and one.numel() > 0
    )


def scale_of(name: str, module: nn.Embedding) -> float:
    """Return by what an embedding multiplies its rows; refuse one that does more to them."""
    if module.max_norm is not None:
        raise ArgumentError(
            f"{name} has max_norm, which rewrites rows: a packed table cannot; leave it out by where="
        )
    if type(module).forward is nn.Embedding.forward:
        return 1.0
    scale = getattr(module, "scalar_embed_scale", getattr(module, "embed_scale", None))
    scale = (
        float(scale)
        if isinstance(scale, int | float) or (isinstance(scale, Tensor) and not scale.is_meta)
        else 1.0
    )
    if not module.weight.is_meta:
        ids = torch.arange(min(8, module.num_embeddings), device=module.weight.device)
        with torch.no_grad(), contextlib.suppress(TypeError, RuntimeError, NotImplementedError):
            rows = module(ids)
            if isinstance(rows, Tensor) and torch.allclose(
                rows.float(), module.weight[ids].float() * scale, rtol=1e-2
            ):
                return scale
    elif hasattr(module, "embed_scale"):
        return scale
    raise ArgumentError(
        f"{name} is a {type(module).__name__}, which does more than look rows up: this architecture is not known; leave it out "
        "by where="
    )


def swap(model: nn.Module, place: Place, table: PackedTable) -> Swapped:
    """Put a packed table where a weight was."""
    weight = place.weight
    new = PackedEmbedding(table, scale=place.scales[place.name], dtype=weight.dtype).to(
        weight.device
    )
    put(model, place, new)
    names = list(place.embeddings)
    return Swapped(
        names[0], tuple(names[1:]), tuple(place.heads), weight.nbytes, new.packed.numel(), table
    )


def put(model: nn.Module, place: Place, new: nn.Module) -> None:
    """Put an embedding in the place of the first that holds a weight; the others and the heads use it from there."""
    tied: dict[int, nn.Module] = {}
    for name, module in (*place.embeddings.items(), *place.heads.items()):
        replacement = new if name == place.name else tied.get(id(module))
        if replacement is None:
            replacement = tied_to(new, module, place.scales.get(name, 1.0))
            tied[id(module)] = replacement
        replacement.train(module.training)
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, replacement)


def tied_to(new: nn.Module, module: nn.Module, scale: float) -> nn.Module:
    """Return what stands for a module that shares its weight with the embedding ``new`` stands for."""
    return PackedHead(new, module.bias) if isinstance(module, nn.Linear) else PackedTwin(new, scale)


def packed_places(
    model: nn.Module,
) -> Iterator[tuple[str, PackedEmbedding, dict[str, float], list[str]]]:
    """Yield every packed table of a model: its name, itself, its twins with their scales, and the heads tied to it."""
    every = list(model.named_modules(remove_duplicate=False))
    names: dict[int, tuple[str, PackedEmbedding, dict[str, float], list[str]]] = {}
    for name, module in every:
        if isinstance(module, PackedEmbedding):
            names.setdefault(id(module), (name, module, {}, []))
    for name, module in every:
        if isinstance(module, PackedTwin) and id(module.embedding) in names:
            names[id(module.embedding)][2][name] = module.scale
        elif isinstance(module, PackedHead) and id(module.embedding) in names:
            names[id(module.embedding)][3].append(name)
    yield from names.values()


def restore_model(model: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """Put the packed tables of a state dict into a fresh model of the same kind, then load the state; return the model.

    >>> model, fresh = (nn.Sequential(nn.Embedding(1000, 16), nn.Linear(16, 2)) for _ in range(2))
    >>> _ = compress_model(model, ratio=4, method="int4")
    >>> ids = torch.tensor([3, 17])
    >>> torch.equal(restore_model(fresh, model.state_dict())(ids), model(ids))
    True
    """
    stored = [name.removesuffix(".packed") for name in state if name.endswith(".packed")]
    if not stored:
        raise ArgumentError(
            "the state holds no packed table: load it by model.load_state_dict(state)"
        )
    every = dict(model.named_modules(remove_duplicate=False))
    for name in stored:
        module = every.get(name)
        if isinstance(module, PackedEmbedding):
            continue
        if not isinstance(module, nn.Embedding):
            raise ArgumentError(
                f"the state has a packed table at {name!r}, where the model has {type(module).__name__}"
            )
        place = place_of(every, module)
        swap(model, place, from_bytes(state[f"{name}.packed"].cpu().numpy()))
        every = dict(model.named_modules(remove_duplicate=False))
    model.load_state_dict(dict(state))
    return model
