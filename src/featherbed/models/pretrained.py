"""``transformers`` models with packed tables: saved by ``save_pretrained``, read by ``from_pretrained``, without remote code.

The bytes of a table are one tensor of the checkpoint; ``quantization_config`` in config.json says which module it belongs to
and which heads are tied to it. Importing this module tells ``transformers`` how to read that.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from featherbed.errors import (
    ArgumentError,
    DataError,
    FeatherbedError,
    FormatError,
    MissingExtra,
)
from featherbed.models.config import check_config, check_stored, checked_tables, first_line
from featherbed.models.embedding import PackedEmbedding
from featherbed.models.swap import Place, is_pretrained, packed_places, put

try:
    import transformers
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin
except ModuleNotFoundError:
    raise MissingExtra("transformers", "hf", "models of the transformers library") from None

METHOD = "featherbed"


@register_quantization_config(METHOD)
class FeatherbedConfig(QuantizationConfigMixin):
    """What config.json says of packed tables: of each its module, rows, width, bytes, twins and heads."""

    def __init__(
        self, tables: dict[str, dict[str, Any]] | None = None, quant_method: str = METHOD, **_: Any
    ) -> None:
        self.quant_method: Any = quant_method
        self.tables = checked_tables({} if tables is None else tables)


@register_quantizer(METHOD)
class FeatherbedQuantizer(HfQuantizer):
    """Makes the places for packed tables before a checkpoint is read."""

    requires_calibration = (
        True  # a checkpoint has the tables already, or fb.compress_model makes them
    )

    def _process_model_before_weight_loading(self, model: nn.Module, **about: Any) -> None:
        known: Any = self.quantization_config
        places = {name: named_place(model, name, table) for name, table in known.tables.items()}
        check_stored(known.tables, about.get("checkpoint_files"))
        for name, place in places.items():
            put(model, place, PackedEmbedding.empty(known.tables[name]))
        known.tables = tables_of(
            model
        )  # of the model this is, which may have other heads than the one that was saved
        untie(model)
        self._shapes = {name: one.shape for name, one in model.state_dict().items()}
        part: Any = model
        part._keys_to_ignore_on_load_unexpected = {
            *(part._keys_to_ignore_on_load_unexpected or ()),
            *(rf"(^|\.){re.escape(key)}$" for key in marker_keys(model)),
        }

    def _process_model_after_weight_loading(self, model: nn.Module, **_: Any) -> None:
        """Refuse weights of other shapes than the model's, and bytes that are no packed table."""
        for name, one in model.state_dict().items():
            shape = self._shapes.get(name, one.shape)
            if one.shape != shape:
                found, wanted = (" x ".join(map(str, size)) for size in (one.shape, shape))
                raise FormatError(f"the tensor {name!r} is {found}, the model's is {wanted}")
        for _name, module, _twins, _heads in packed_places(model):
            if not module.packed.is_meta:
                module.table  # noqa: B018 - reads the header
        share_quantizer(model, self)

    def get_state_dict_and_metadata(
        self, model: nn.Module
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the state to be saved, with an empty tensor under every name of a packed weight.

        A ``transformers`` that does not know packed tables would take random rows for a missing
        tensor, and warn; it refuses a tensor of another shape.
        """
        return {**model.state_dict(), **{key: torch.empty(0) for key in marker_keys(model)}}, {}

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        """Packed tables are saved as they are."""
        return True

    @property
    def is_trainable(self) -> bool:
        """All but the rows learns; ``fb.tune_model`` lets these learn too."""
        return True


def named_place(model: nn.Module, name: str, about: dict[str, Any]) -> Place:
    """Return the modules of a model that config.json names, or say which of them it does not have.

    The model may be of another class than the one that was saved: the body alone, or the body under another head.
    """
    every: dict[str, Any] = dict(model.named_modules(remove_duplicate=False))
    known: Any = model
    prefix = f"{known.base_model_prefix}."
    own, *others = (
        next(
            (found for found in (one, prefix + one, one.removeprefix(prefix)) if found in every),
            None,
        )
        for one in (name, *about["twins"], *about["heads"])
    )
    if own is None:
        raise DataError(
            f"config.json names {name!r}, which {type(model).__name__} does not have: is it of another model?"
        )
    scales = {
        one: scale
        for one, scale in zip(others, about["twins"].values(), strict=False)
        if one is not None
    }
    heads = {one: every[one] for one in others[len(about["twins"]) :] if one is not None}
    if type(model).__name__ not in (known.config.architectures or []):
        tied = [
            target.removesuffix(".weight")
            for target, source in known.all_tied_weights_keys.items()
            if source == f"{own}.weight"
        ]
        heads |= {one: every[one] for one in tied if isinstance(every[one], nn.Linear)}
    embeddings = {one: every[one] for one in (own, *scales)}
    for one, module in (*embeddings.items(), *heads.items()):
        check_module(one, module, nn.Linear if one in heads else nn.Embedding, about)
    return Place(embeddings, heads, {own: about["scale"], **scales})


def check_module(
    name: str, module: nn.Module, kind: type[nn.Module], about: dict[str, Any]
) -> None:
    """Refuse a module that a packed table cannot stand for."""
    shape, wanted = (
        tuple(getattr(module, "weight", torch.empty(0)).shape),
        (about["rows"], about["dim"]),
    )
    if not isinstance(module, kind) or shape != wanted:
        found = f"{type(module).__name__} {' x '.join(map(str, shape))}"
        raise FormatError(
            f"config.json names {name!r} for a table of {wanted[0]} x {wanted[1]}, the model has {found} there"
        )


def marker_keys(model: nn.Module) -> list[str]:
    """Return the names under which the weights of packed tables would be saved if they were dense.

    >>> marker_keys(nn.Linear(2, 2))
    []
    """
    places = packed_places(model)
    return [f"{one}.weight" for name, _, twins, heads in places for one in (name, *twins, *heads)]


def tables_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return what config.json says of a model's packed tables."""
    return {
        name: module.about() | {"twins": twins, "heads": heads}
        for name, module, twins, heads in packed_places(model)
    }


def mark(model: nn.Module) -> None:
    """Tell a compressed model what it is, so that it saves itself as such."""
    known: Any = model
    config = FeatherbedConfig(tables_of(model))
    known.config.quantization_config = config
    known.hf_quantizer = FeatherbedQuantizer(config, pre_quantized=True)
    known.is_quantized, known.quantization_method = True, METHOD
    share_quantizer(model, known.hf_quantizer)
    untie(model)


def share_quantizer(model: nn.Module, quantizer: FeatherbedQuantizer) -> None:
    """Give models within a model the quantizer, so that a body saved alone is marked too."""
    for part in model.modules():
        if is_pretrained(part):
            part.hf_quantizer = quantizer  # type: ignore[assignment]


def untie(model: nn.Module) -> None:
    """Take the ties that codes keep off the list by which ``transformers`` ties weights; it would make dense ones again."""
    parts: list[Any] = [module for module in model.modules() if is_pretrained(module)]
    for part in parts:
        if isinstance(part._tied_weights_keys, dict):
            part._tied_weights_keys = left(part._tied_weights_keys, part)
    for part in parts:  # only now: a model asks its parts
        part.all_tied_weights_keys = part.get_expanded_tied_weights_keys(all_submodels=True)


def left(keys: dict[str, str], module: nn.Module) -> dict[str, str]:
    """Return the ties whose both ends are still parameters of a module."""
    names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return {
        target: source for target, source in keys.items() if target in names and source in names
    }


def load_model(folder: str | Path, **settings: Any) -> Any:
    """Return the ``transformers`` model of a folder, by the class that saved it; settings go to its ``from_pretrained``.

    ``AutoModel.from_pretrained`` and its like do the same once ``featherbed.models.pretrained`` is imported.

    >>> import torch, transformers, featherbed as fb
    >>> settings = transformers.BertConfig(vocab_size=500, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    >>> model, folder = transformers.BertModel(settings).eval(), getfixture("tmp_path") / "bert"
    >>> [one.name for one in fb.compress_model(model, ratio=4, method="int4")]
    ['embeddings.word_embeddings']
    >>> model.save_pretrained(folder)
    >>> ids = torch.tensor([[3, 17]])
    >>> torch.equal(load_model(folder).eval()(ids)[0], model(ids)[0])
    True
    """
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise DataError(
            f"{path} holds no config.json: give a folder that save_pretrained or `featherbed compress` wrote"
        )
    kind = class_of(path, read_config(path))
    try:
        return kind.from_pretrained(path, **settings)
    except FeatherbedError as error:
        raise type(error)(f"{path}: {str(error)[:500]}") from None
    except Exception as error:  # a damaged folder makes transformers raise nearly anything
        raise DataError(
            f"{path} cannot be loaded as {kind.__name__}: {first_line(error)}"
        ) from error


def class_of(path: Path, config: Any) -> Any:
    """Return the model class that a config names, or say that this ``transformers`` does not have it."""
    names = getattr(config, "architectures", None) or []
    for name in names if isinstance(names, list | tuple) else []:
        try:
            found = getattr(transformers, name, None)
        except Exception:  # it imports a module that cannot be imported here
            continue
        model = transformers.PreTrainedModel
        if isinstance(found, type) and issubclass(found, model) and found is not model:
            return found
    raise ArgumentError(
        f"{path}: config.json names the architectures {str(names)[:200]}, none of which is a model of this transformers"
    )


def read_config(path: Path) -> Any:
    """Return the config of a folder, or say why there is none; nothing of the folder is executed."""
    check_config(path)
    try:
        return transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    except FeatherbedError as error:
        raise type(error)(f"{path}: config.json: {str(error)[:500]}") from None
    except Exception as error:  # a damaged config makes transformers raise nearly anything
        raise DataError(f"{path}: config.json: {first_line(error)}") from None
