"""``transformers`` models with packed tables: ``save_pretrained`` and ``from_pretrained``.

The bytes of a table are one tensor of the checkpoint; ``quantization_config`` in config.json names
its module and the heads tied to it. Importing this module registers the format with
``transformers``; no remote code is involved. config.json is checked before a model is created.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from featherbed.errors import (
    ArgumentError,
    DataError,
    FeatherbedError,
    FormatError,
    MissingExtra,
)
from featherbed.interop.embedding import PackedEmbedding
from featherbed.interop.rest import RESTS, Int8Linear, as_stored, is_linear, replace_module
from featherbed.interop.swap import SharedWeight, is_pretrained, packed_places, replace_weight
from featherbed.io.vectors import safetensors_header
from featherbed.packed.schema import MOST_DIM, MOST_ROWS, FieldReader

try:
    import transformers
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin
except ModuleNotFoundError:
    raise MissingExtra("transformers", "hf", "models of the transformers library") from None

METHOD = "featherbed"
MAX_CONFIG = 1 << 24  # bytes of config.json
MAX_BYTES = 1 << 44  # bytes of a packed table
MAX_LABELS = 1 << 20
MAX_LAYERS = 1000  # unless the checkpoint has more tensors


def first_line(error: BaseException) -> str:
    """Return type and message of another library's exception in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {(lines or ['no message'])[0][:300]}"


@contextmanager
def token_ids_alone(model: nn.Module) -> Iterator[None]:
    """Raise one error for whatever a model raises that needs more than token ids."""
    try:
        yield
    except FeatherbedError:
        raise
    except Exception as error:
        raise ArgumentError(
            f"{type(model).__name__} does not run on token ids alone: {first_line(error)}"
        ) from None


def check_config(path: Path) -> None:
    """Refuse a config.json that is no object, or whose model would exceed memory or time."""
    file = path / "config.json"
    for member in path.iterdir():
        if member.exists() and not (member.is_file() or member.is_dir()):
            raise DataError(f"{member} is a pipe or a device: remove it, or fetch the folder again")
    try:
        size = file.stat().st_size
        if size > MAX_CONFIG:
            raise DataError(f"{file} has {size:,} bytes, the maximum is {MAX_CONFIG:,}")
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}): fetch it again") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, FeatherbedError):
            raise
        raise DataError(f"{file} is not JSON: {first_line(error)[:100]}") from None
    if not isinstance(config, dict):
        raise DataError(f"{file} must hold an object, it holds {type(config).__name__}")
    most = max(MAX_LAYERS, sum(1 for _ in stored_names(path)))
    for name, value in numbers_in(config):
        bound = MAX_LABELS if name == "num_labels" else most if "layer" in name else math.inf
        if value > bound:
            raise DataError(f"{file}: {name}={str(value)[:40]}: at most {bound:,} here")


def numbers_in(config: dict[str, Any]) -> Iterable[tuple[str, float]]:
    """Yield names and values of the numbers in a config, including nested ones."""
    remaining: list[Any] = [config]
    while remaining:
        for name, value in remaining.pop().items():
            if isinstance(value, dict):
                remaining.append(value)
            elif isinstance(value, int | float):
                yield name, value


def stored_names(path: Path) -> Iterable[str]:
    """Yield the names of the tensors in a checkpoint, after checking its files."""
    for file in sorted(path.glob("model*.safetensors")):
        yield from safetensors_header(file)[0]


def check_tables(given: Any) -> dict[str, dict[str, Any]]:
    """Return the packed tables described in config.json after checking every field.

    >>> check_tables({"wte": {"rows": 9}})
    Traceback (most recent call last):
    featherbed.errors.FormatError: quantization_config.tables.wte lacks the field 'dim'
    """
    if not isinstance(given, dict):
        raise FormatError(f"quantization_config.tables must be an object, got {str(given)[:40]}")
    found: dict[str, dict[str, Any]] = {}
    for name, fields in given.items():
        reader = FieldReader(fields, f"quantization_config.tables.{str(name)[:100]}")
        rows = reader.integer("rows", 1, MOST_ROWS)
        found[name] = {
            "rows": rows,
            "dim": reader.integer("dim", 1, MOST_DIM),
            "padding": None
            if reader.raw("padding") is None
            else reader.integer("padding", 0, rows - 1),
            "scale": _check_scale(reader.where, reader.raw("scale")),
            "bytes": reader.integer("bytes", 8, MAX_BYTES),
            "twins": _check_twins(reader),
            "heads": _check_heads(reader),
        }
    return found


def _check_twins(reader: FieldReader) -> dict[str, float]:
    """Return names and scales of the embeddings that share a table."""
    twins = reader.raw("twins")
    if not isinstance(twins, dict):
        raise FormatError(f"{reader.where}.twins must be an object, got {str(twins)[:40]}")
    return {name: _check_scale(f"{reader.where}.twins", one) for name, one in twins.items()}


def _check_heads(reader: FieldReader) -> list[str]:
    """Return the names of the heads tied to a table."""
    heads = reader.raw("heads")
    if not isinstance(heads, list) or not all(isinstance(one, str) for one in heads):
        raise FormatError(f"{reader.where}.heads must be a list of names, got {str(heads)[:40]}")
    return heads


def _check_scale(where: str, value: Any) -> float:
    """Return a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
        raise FormatError(f"{where}.scale must be a finite number, got {str(value)[:40]}")
    return float(value)


def check_stored(tables: dict[str, dict[str, Any]], files: Any) -> None:
    """Refuse tables whose bytes are not in the checkpoint, before memory is allocated."""
    if not isinstance(files, list | tuple):
        return
    sizes: dict[str, list[int]] = {}
    for file in files:
        header, _ = safetensors_header(Path(file))
        packed = (name for name in header if name.endswith("packed"))
        sizes |= {name: header[name]["shape"] for name in packed if header[name]["dtype"] == "U8"}
    for name, table in tables.items():
        found = [size for key, size in sizes.items() if f"{name}.packed".endswith(key)]
        found += [size for key, size in sizes.items() if key.endswith(f"{name}.packed")]
        if [table["bytes"]] not in found:
            raise FormatError(
                f"the checkpoint has no tensor {name}.packed of {table['bytes']:,} bytes, "
                "which config.json describes"
            )


@register_quantization_config(METHOD)
class FeatherbedConfig(QuantizationConfigMixin):
    """The packed tables in config.json: module, rows, width, bytes, twins and heads of each.

    ``rest`` is the type in which the other weights are stored.
    """

    def __init__(
        self,
        tables: dict[str, dict[str, Any]] | None = None,
        quant_method: str = METHOD,
        rest: str = "float32",
        **_: Any,
    ) -> None:
        self.quant_method: Any = quant_method
        self.tables = check_tables({} if tables is None else tables)
        if rest not in RESTS:
            raise FormatError(
                f"quantization_config.rest must be one of {', '.join(RESTS)}, got {str(rest)[:40]}"
            )
        self.rest = rest


@register_quantizer(METHOD)
class FeatherbedQuantizer(HfQuantizer):
    """Creates the modules of packed tables before a checkpoint is loaded."""

    requires_calibration = True  # tables are in the checkpoint, or made by fb.compress_model

    def _process_model_before_weight_loading(self, model: nn.Module, **context: Any) -> None:
        config: Any = self.quantization_config
        places = {name: find_place(model, name, table) for name, table in config.tables.items()}
        files = context.get("checkpoint_files")
        check_stored(config.tables, files)
        if config.rest == "int8":
            replace_linear(model, files)
        for name, place in places.items():
            replace_weight(model, place, PackedEmbedding.empty(config.tables[name]))
        config.tables = describe_tables(model)  # its heads may differ from those of the saved model
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
                found, expected = (" x ".join(map(str, size)) for size in (one.shape, shape))
                raise FormatError(f"the tensor {name!r} is {found}, the model's is {expected}")
        for _name, module, _twins, _heads in packed_places(model):
            if not module.packed.is_meta:
                module.table  # noqa: B018 - reads the header
        share_quantizer(model, self)

    def get_state_dict_and_metadata(
        self, model: nn.Module
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the state to save, with an empty tensor for every packed weight.

        A ``transformers`` without this module would initialize missing tensors at random with a
        warning, but refuses tensors of another shape.
        """
        state = model.state_dict()
        if getattr(self.quantization_config, "rest", "float32") != "float32":
            state = {name: as_stored(name, tensor) for name, tensor in state.items()}
        return {**state, **{key: torch.empty(0) for key in marker_keys(model)}}, {}

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        """Packed tables can be saved."""
        return True

    @property
    def is_trainable(self) -> bool:
        """All weights but the packed rows are trainable; ``fb.tune_model`` trains those."""
        return True


def find_place(model: nn.Module, name: str, metadata: dict[str, Any]) -> SharedWeight:
    """Return the modules that config.json names for a table; raise if the model lacks one.

    The model may be of another class than the saved one: the body alone, or with another head.
    """
    modules: dict[str, Any] = dict(model.named_modules(remove_duplicate=False))
    known: Any = model

    def find(one: str) -> str | None:
        return next((name for name in possible_names(model, one) if name in modules), None)

    own = find(name)
    if own is None:
        raise DataError(
            f"config.json names {name!r}, which {type(model).__name__} does not have: "
            "is it of another model?"
        )
    twins = {find(one): scale for one, scale in metadata["twins"].items()}
    scales = {one: scale for one, scale in twins.items() if one is not None}
    heads = {one: modules[one] for one in map(find, metadata["heads"]) if one is not None}
    if type(model).__name__ not in (known.config.architectures or []):
        tied = [
            target.removesuffix(".weight")
            for target, source in known.all_tied_weights_keys.items()
            if source == f"{own}.weight"
        ]
        heads |= {one: modules[one] for one in tied if isinstance(modules[one], nn.Linear)}
    embeddings = {one: modules[one] for one in (own, *scales)}
    for one, module in (*embeddings.items(), *heads.items()):
        check_module(one, module, nn.Linear if one in heads else nn.Embedding, metadata)
    return SharedWeight(embeddings, heads, {own: metadata["scale"], **scales})


def possible_names(model: nn.Module, name: str) -> list[str]:
    """Return the names a module or tensor may have in a model with or without a head."""
    prefix = f"{model.base_model_prefix}."
    return [name, prefix + name, name.removeprefix(prefix)]


def renamed(model: Any, keys: Iterable[str]) -> dict[str, str]:
    """Return tensors of a checkpoint with the names to which ``transformers`` changes them.

    >>> config = transformers.GPTNeoXConfig(hidden_size=8, num_attention_heads=2)
    >>> with torch.device("meta"):
    ...     model = transformers.GPTNeoXForCausalLM(config)
    >>> renamed(model, ["embed_out.weight"])
    {'embed_out.weight': 'lm_head.weight'}
    """
    found = {key: key for key in keys}
    for change in get_model_conversion_mapping(cast(Any, model)):
        if isinstance(change, WeightRenaming):
            found = {key: change.rename_source_key(name)[0] for key, name in found.items()}
    return found


def replace_linear(model: nn.Module, files: Any) -> None:
    """Replace the linear layers whose weights are int8 in the checkpoint by empty ones."""
    known: Any = model
    modules, own = dict(model.named_modules()), type(model).__name__ in known.config.architectures
    for file in files if isinstance(files, list | tuple) else []:
        header, _ = safetensors_header(Path(file))
        stored = [key for key in header if key.endswith(".levels")]
        for key, loaded in renamed(model, stored).items():
            base, layer = key.removesuffix(".levels"), loaded.removesuffix(".levels")
            name = next((name for name in possible_names(model, layer) if name in modules), None)
            if name is None or not is_linear(modules[name]):
                if own:
                    raise FormatError(f"{type(model).__name__} has no linear layer for {key}")
                continue  # of a head that this model does not have
            new = Int8Linear.of(modules[name])
            if header[key]["dtype"] != "I8" or header[key]["shape"] != list(new.levels.shape):
                found = f"{header[key]['dtype']} {header[key]['shape']}"[:60]
                raise FormatError(f"{key} is {found}, the model wants I8 {list(new.levels.shape)}")
            if f"{base}.scales" not in header:
                raise FormatError(f"the checkpoint has {key}, but not {base}.scales")
            replace_module(model, name, new)


def check_module(
    name: str, module: nn.Module, kind: type[nn.Module], metadata: dict[str, Any]
) -> None:
    """Refuse a module that a packed table cannot replace."""
    shape = tuple(getattr(module, "weight", torch.empty(0)).shape)
    rows, dim = metadata["rows"], metadata["dim"]
    if not isinstance(module, kind) or shape != (rows, dim):
        found = f"{type(module).__name__} {' x '.join(map(str, shape))}"
        raise FormatError(
            f"config.json names {name!r} for a table of {rows} x {dim}, the model has {found} there"
        )


def marker_keys(model: nn.Module) -> list[str]:
    """Return the names under which packed weights would be saved if they were dense.

    >>> marker_keys(nn.Linear(2, 2))
    []
    """
    places = packed_places(model)
    return [f"{one}.weight" for name, _, twins, heads in places for one in (name, *twins, *heads)]


def describe_tables(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the description of a model's packed tables for config.json."""
    return {
        name: module.metadata() | {"twins": twins, "heads": heads}
        for name, module, twins, heads in packed_places(model)
    }


def mark(model: nn.Module, rest: str | None = None) -> None:
    """Register the packed tables of a model with ``transformers``, so that it can be saved."""
    known: Any = model
    before = getattr(known.config, "quantization_config", None)
    kept: str = getattr(before, "rest", "float32")
    config = FeatherbedConfig(describe_tables(model), rest=rest or kept)
    known.config.quantization_config = config
    known.hf_quantizer = FeatherbedQuantizer(config, pre_quantized=True)
    known.is_quantized, known.quantization_method = True, METHOD
    share_quantizer(model, known.hf_quantizer)
    untie(model)


def share_quantizer(model: nn.Module, quantizer: FeatherbedQuantizer) -> None:
    """Give the quantizer to the models within a model, which may be saved alone."""
    for part in model.modules():
        if is_pretrained(part):
            part.hf_quantizer = quantizer  # type: ignore[assignment]


def untie(model: nn.Module) -> None:
    """Remove ties kept by packed tables from the list by which ``transformers`` ties weights."""
    parts: list[Any] = [module for module in model.modules() if is_pretrained(module)]
    for part in parts:
        if isinstance(part._tied_weights_keys, dict):
            names = {name for name, _ in part.named_parameters(remove_duplicate=False)}
            ties = part._tied_weights_keys.items()
            part._tied_weights_keys = {key: one for key, one in ties if {key, one} <= names}
    for part in parts:  # only now, since a model asks its parts
        part.all_tied_weights_keys = part.get_expanded_tied_weights_keys(all_submodels=True)


def load_model(folder: str | Path, **settings: Any) -> Any:
    """Return the ``transformers`` model of a folder, by the class that saved it.

    ``settings`` are passed to ``from_pretrained``. ``AutoModel.from_pretrained`` and others do the
    same once ``featherbed.interop.pretrained`` is imported.

    >>> import torch, transformers, featherbed as fb
    >>> sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> config = transformers.BertConfig(vocab_size=500, **sizes)
    >>> model, folder = transformers.BertModel(config).eval(), getfixture("tmp_path") / "bert"
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
            f"{path} holds no config.json: give a folder that save_pretrained or "
            "`featherbed compress` wrote"
        )
    kind = model_class(path, read_config(path))
    try:
        return kind.from_pretrained(path, **settings)
    except FeatherbedError as error:
        raise type(error)(f"{path}: {str(error)[:500]}") from None
    except Exception as error:  # transformers raises nearly anything for a damaged folder
        raise DataError(
            f"{path} cannot be loaded as {kind.__name__}: {first_line(error)}"
        ) from error


def model_class(path: Path, config: Any) -> Any:
    """Return the model class that a config names; raise if this ``transformers`` lacks it."""
    names = getattr(config, "architectures", None) or []
    base = transformers.PreTrainedModel
    for name in names if isinstance(names, list | tuple) else []:
        try:
            found = getattr(transformers, name, None)
        except Exception:  # a dependency of the class is not installed
            continue
        if isinstance(found, type) and issubclass(found, base) and found is not base:
            return found
    raise ArgumentError(
        f"{path}: config.json names the architectures {str(names)[:200]}, none of which is a model "
        "of this transformers: update it"
    )


def read_config(path: Path) -> Any:
    """Return the config of a folder; nothing in the folder is executed."""
    check_config(path)
    try:
        return transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    except FeatherbedError as error:
        raise type(error)(f"{path}: config.json: {str(error)[:500]}") from None
    except Exception as error:  # transformers raises nearly anything for a damaged config
        raise DataError(f"{path}: config.json: {first_line(error)}") from None
