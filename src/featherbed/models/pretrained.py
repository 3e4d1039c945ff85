"""``transformers`` models with packed tables: saved by ``save_pretrained``, read by ``from_pretrained``, without remote code.

The bytes of a table are one tensor of the checkpoint; ``quantization_config`` in config.json says which module it belongs to
and which heads are tied to it. Importing this module tells ``transformers`` how to read that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from featherbed.errors import ArgumentError, DataError, MissingExtra
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
        self.tables = dict(tables or {})


@register_quantizer(METHOD)
class FeatherbedQuantizer(HfQuantizer):
    """Makes the places for packed tables before a checkpoint is read."""

    requires_calibration = (
        True  # a checkpoint has the tables already, or fb.compress_model makes them
    )

    def _process_model_before_weight_loading(self, model: nn.Module, **_: Any) -> None:
        known: Any = self.quantization_config
        for name, about in known.tables.items():
            put(model, named_place(model, name, about), PackedEmbedding.empty(about))
        known.tables = tables_of(
            model
        )  # of the model this is, which may have other heads than the one that was saved
        untie(model)

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
    return Place(
        {one: every[one] for one in (own, *scales)}, heads, {own: about["scale"], **scales}
    )


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
    untie(model)


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
    return class_of(path, read_config(path)).from_pretrained(path, **settings)


def class_of(path: Path, config: Any) -> Any:
    """Return the class that a config names, or say that this ``transformers`` does not have it."""
    names = config.architectures or []
    found = next(
        (getattr(transformers, name) for name in names if hasattr(transformers, name)), None
    )
    if found is None:
        raise ArgumentError(
            f"{path}: config.json names the architectures {names}, none of which this transformers has"
        )
    return found


def read_config(path: Path) -> Any:
    """Return the config of a folder, or say that its architecture is unknown; nothing of the folder is executed."""
    try:
        return transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as error:
        raise DataError(f"{path}: {str(error).splitlines()[0][:300]}") from None
