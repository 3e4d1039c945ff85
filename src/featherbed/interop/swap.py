"""``fb.compress_model``: replace the embeddings of a model by packed tables, keeping ties."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from featherbed.codecs.codec import ProgressCallback, no_progress
from featherbed.codecs.compress import compress
from featherbed.codecs.target import Target
from featherbed.errors import ArgumentError, DataError
from featherbed.interop.embedding import PackedEmbedding, PackedHead, PackedTwin
from featherbed.interop.rest import Int8Linear, check_rest, is_linear, replace_module, shrink_rest
from featherbed.packed.file import from_bytes
from featherbed.packed.table import PackedTable

MIN_ROWS = 256  # smaller embeddings of plain modules are not compressed by default
Where = Callable[[str, nn.Module], bool]


@dataclass(frozen=True)
class SharedWeight:
    """A weight [V, d] and the modules that hold it: embeddings and tied linear heads."""

    embeddings: dict[str, nn.Embedding]
    heads: dict[str, nn.Linear]
    scales: dict[str, float]  # by which each embedding multiplies its rows

    @property
    def name(self) -> str:
        """Name of the first embedding."""
        return next(iter(self.embeddings))

    @property
    def weight(self) -> Tensor:
        """The weight."""
        return next(iter(self.embeddings.values())).weight


@dataclass(frozen=True)
class CompressedWeight:
    """A compressed weight: its modules, bytes before and after, and the packed table."""

    name: str
    also: tuple[str, ...]  # other embeddings with the same weight
    heads: tuple[str, ...]
    before: int
    after: int
    table: PackedTable

    def __str__(self) -> str:
        tied = ", ".join((*self.also, *self.heads))
        method = self.table.made_by.get("method", "table") + (f", tied to {tied}" if tied else "")
        return (
            f"{self.name}: {len(self.table):,} x {self.table.dim}, "
            f"{self.before:,} -> {self.after:,} bytes ({method})"
        )


def compress_model(
    model: nn.Module,
    *,
    ratio: float | None = None,
    budget: int | str | None = None,
    quality: str | None = None,
    method: str = "auto",
    measure: str = "error",
    weights: Any = None,
    rest: str = "float32",
    where: Where | None = None,
    generator: Any = None,
    effort: str = "normal",
    minutes: float | None = None,
    tell: ProgressCallback = no_progress,
) -> list[CompressedWeight]:
    """Compress the token table of a model in place; return the compressed weights, largest first.

    Linear heads with the same weight stay tied and compute logits through the codes. Other weights
    change only if ``rest`` says so, and an error leaves the model unchanged. ``save_pretrained``
    and ``from_pretrained`` work as before once ``featherbed.interop.pretrained`` is imported, as
    this function and ``fb.load_model`` do.

    Args:
        model: a ``transformers`` model, whose input embeddings are compressed, or any module, of
            which every nn.Embedding with at least 256 rows is.
        ratio, budget, quality, method, generator, effort, minutes, tell: see ``fb.compress``;
            for each table.
        measure: "error" or "recall", by which methods are compared.
        weights: frequency of each token, for all tables or by name of the embedding.
        rest: type in which all other weights are stored, "float32" (unchanged), "float16" or "int8"
            (linear layers; the others float16). They are computed with in float32.
        where: selects embeddings: ``where(name, module)``.

    >>> model = nn.Sequential(nn.Embedding(1000, 16), nn.Linear(16, 2))
    >>> [str(one) for one in compress_model(model, ratio=4, method="int4")]
    ['0: 1,000 x 16, 64,000 -> 10,648 bytes (int4)']
    >>> model(torch.tensor([3, 17])).shape
    torch.Size([2, 2])
    """
    Target.of(budget, ratio, quality, 4, measure)
    check_rest(rest)
    places = sorted(find_weights(model, where), key=lambda place: -place.weight.numel())
    names = [place.name for place in places]
    by_name = isinstance(weights, Mapping)
    for name in sorted(set(weights) - set(names)) if by_name else []:
        raise ArgumentError(f"weights are given for {name!r}: compressed are {', '.join(names)}")
    tables = []
    for number, place in enumerate(places):

        def tell_part(text: str, share: float, number: int = number) -> None:
            tell(f"{names[number]}: {text}", (number + share) / len(names))

        rows = weight_array(place.weight)
        try:
            table = compress(
                rows,
                ratio=ratio,
                budget=budget,
                quality=quality,
                method=method,
                measure=measure,
                weights=weights.get(place.name) if by_name else weights,
                padding_idx=padding_of(place, rows),
                generator=generator,
                effort=effort,
                minutes=minutes,
                name=place.name,
                tell=tell_part,
            )
        except (ArgumentError, DataError) as error:
            raise type(error)(f"{place.name}: {error}") from None
        tables.append(table)
    # only now, so that an error above leaves the model unchanged
    found = [swap(model, place, table) for place, table in zip(places, tables, strict=True)]
    shrink_rest(model, rest)
    if is_pretrained(model):
        from featherbed.interop.pretrained import mark

        mark(model, rest)
    return found


def weight_array(weight: Tensor) -> Any:
    """Return a weight as a numpy array."""
    if weight.is_meta:
        raise ArgumentError(
            "the weight is on the meta device and has no rows: load the model first"
        )
    plain = weight.detach().cpu()
    return plain.numpy() if plain.dtype in (torch.float32, torch.float16) else plain.float().numpy()


def padding_of(place: SharedWeight, rows: Any) -> int | None:  # rows [V, d]
    """Return the padding id of the embeddings if they agree and its row is zero."""
    paddings = {module.padding_idx for module in place.embeddings.values()} - {None}
    (padding,) = paddings if len(paddings) == 1 else (None,)
    return padding if padding is not None and not rows[padding : padding + 1].any() else None


def is_pretrained(model: nn.Module) -> bool:
    """Whether a model belongs to the ``transformers`` library, without importing it."""
    return any(
        one.__module__.startswith("transformers.") and one.__name__ == "PreTrainedModel"
        for one in type(model).__mro__
    )


def find_weights(model: nn.Module, where: Where | None) -> list[SharedWeight]:
    """Return the weights to compress, each once; raise if there are none."""
    if isinstance(model, nn.Embedding):
        raise ArgumentError(
            "the model is itself an embedding: use fb.compress(model, ratio=...) instead"
        )
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"got {type(model).__name__}: give a torch module, or a folder to `featherbed compress`"
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    embeddings = {name: one for name, one in modules.items() if isinstance(one, nn.Embedding)}
    selected = selection(model, where)
    places: dict[int, SharedWeight] = {}
    for name, module in embeddings.items():
        if selected(name, module) and id(module.weight) not in places:
            places[id(module.weight)] = shared_weight(modules, module)
    if not places:
        raise ArgumentError(explain_empty(model, embeddings))
    return list(places.values())


def selection(model: nn.Module, where: Where | None) -> Where:
    """Return the function that selects embeddings."""
    if where is not None:
        return where
    if not is_pretrained(model):
        return lambda _, one: isinstance(one, nn.Embedding) and one.num_embeddings >= MIN_ROWS
    try:
        own = model.get_input_embeddings()  # type: ignore[operator]
    except (NotImplementedError, AttributeError):
        raise ArgumentError(
            f"{type(model).__name__} does not say which its input embeddings are: load it "
            "and choose by fb.compress_model(model, where=lambda name, module: ...)"
        ) from None
    weight = getattr(own, "weight", None)
    return lambda _, module: weight is not None and getattr(module, "weight", None) is weight


def explain_empty(model: nn.Module, embeddings: Mapping[str, nn.Module]) -> str:
    """Return the message for a model in which no embedding is selected."""
    kind = type(model).__name__
    if any(isinstance(module, PackedEmbedding) for module in model.modules()):
        return f"{kind} has its embeddings compressed already"
    if not embeddings:
        return f"{kind} has no nn.Embedding: nothing to compress"
    listed = ", ".join(
        f"{name} ({module.num_embeddings:,} x {module.embedding_dim})"
        for name, module in embeddings.items()
    )
    return (
        f"{kind} has no embedding that was chosen: it has {listed[:300]}; "
        "choose by where=(name, module)"
    )


def shared_weight(modules: Mapping[str, nn.Module], first: nn.Embedding) -> SharedWeight:
    """Return all modules that hold the weight of an embedding; raise if one cannot be replaced."""
    weight, embeddings, heads = first.weight, {}, {}
    for name, module in modules.items():
        for key, parameter in module.named_parameters(recurse=False):
            if parameter is not weight:
                if shares_memory(parameter, weight):
                    raise ArgumentError(
                        f"{name}.{key} {tuple(parameter.shape)} shares memory with the embedding "
                        f"{tuple(weight.shape)} but is not the same weight: untie them first"
                    )
            elif isinstance(module, nn.Embedding):
                embeddings[name] = module
            elif isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
                heads[name] = module
            else:
                raise ArgumentError(
                    f"the embedding's weight is also {name}.{key} of a {type(module).__name__}, "
                    "which is neither an embedding nor a linear head: untie them first, "
                    "or leave it out by where="
                )
    if not embeddings:
        raise ArgumentError(
            f"the rows of a {type(first).__name__} are computed from other parameters: "
            "make its weight a plain one first"
        )
    scales = {name: scale_of(name, module) for name, module in embeddings.items()}
    return SharedWeight(embeddings, heads, scales)


def shares_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two parameters use the same storage."""
    if one.is_meta or other.is_meta or one.device != other.device:
        return False
    same = one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    return same and one.numel() > 0


def scale_of(name: str, module: nn.Embedding) -> float:
    """Return the factor by which an embedding multiplies its rows; refuse any other change."""
    if module.max_norm is not None:
        raise ArgumentError(
            f"{name} has max_norm, which rewrites rows: a packed table cannot; "
            "leave it out by where="
        )
    if type(module).forward is nn.Embedding.forward:
        return 1.0
    scale = getattr(module, "scalar_embed_scale", getattr(module, "embed_scale", None))
    known = isinstance(scale, int | float) or (isinstance(scale, Tensor) and not scale.is_meta)
    factor = float(scale) if known and scale is not None else 1.0
    if not module.weight.is_meta:
        ids = torch.arange(min(8, module.num_embeddings), device=module.weight.device)
        with torch.no_grad(), contextlib.suppress(TypeError, RuntimeError, NotImplementedError):
            rows, expected = module(ids), module.weight[ids].float() * factor
            if isinstance(rows, Tensor) and torch.allclose(rows.float(), expected, rtol=1e-2):
                return factor
    elif hasattr(module, "embed_scale"):
        return factor
    raise ArgumentError(
        f"{name} is a {type(module).__name__}, which does more than look rows up: "
        "this architecture is not known; leave it out by where="
    )


def swap(model: nn.Module, place: SharedWeight, table: PackedTable) -> CompressedWeight:
    """Replace a weight by a packed table."""
    weight = place.weight
    new = PackedEmbedding(table, scale=place.scales[place.name], dtype=weight.dtype)
    new = new.to(weight.device)
    replace_weight(model, place, new)
    name, *others = place.embeddings
    return CompressedWeight(
        name, tuple(others), tuple(place.heads), weight.nbytes, new.packed.numel(), table
    )


def replace_weight(model: nn.Module, place: SharedWeight, new: nn.Module) -> None:
    """Replace the first embedding of a weight by ``new``, and tie the other modules to it."""
    tied: dict[int, nn.Module] = {}
    for name, module in (*place.embeddings.items(), *place.heads.items()):
        replacement = new if name == place.name else tied.get(id(module))
        if replacement is None:
            replacement = (
                PackedHead(new, module.bias)
                if isinstance(module, nn.Linear)
                else PackedTwin(new, place.scales[name])
            )
            tied[id(module)] = replacement
        replacement.train(module.training)
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, replacement)


def packed_places(
    model: nn.Module,
) -> list[tuple[str, PackedEmbedding, dict[str, float], list[str]]]:
    """Return every packed table: its name, the module, its twins with scales, and its heads."""
    modules = list(model.named_modules(remove_duplicate=False))
    places: dict[int, tuple[str, PackedEmbedding, dict[str, float], list[str]]] = {}
    for name, module in modules:
        if isinstance(module, PackedEmbedding):
            places.setdefault(id(module), (name, module, {}, []))
    for name, module in modules:
        if isinstance(module, PackedTwin) and id(module.embedding) in places:
            places[id(module.embedding)][2][name] = module.scale
        elif isinstance(module, PackedHead) and id(module.embedding) in places:
            places[id(module.embedding)][3].append(name)
    return list(places.values())


def restore_model(model: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """Load a state dict with packed tables into a new model of the same architecture; return it.

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
    for name in [key.removesuffix(".levels") for key in state if key.endswith(".levels")]:
        if is_linear(model.get_submodule(name)):
            replace_module(model, name, Int8Linear.of(model.get_submodule(name)))
    for name in stored:
        modules = dict(model.named_modules(remove_duplicate=False))
        module = modules.get(name)
        if isinstance(module, PackedEmbedding):
            continue
        if not isinstance(module, nn.Embedding):
            raise ArgumentError(
                f"the state has a packed table at {name!r}, where the model has "
                f"{type(module).__name__}: create the model that was saved"
            )
        table = from_bytes(state[f"{name}.packed"].cpu().numpy())
        swap(model, shared_weight(modules, module), table)
    model.load_state_dict(dict(state))
    return model
