"""``fb.model_to_onnx``: a model with a packed table as one ONNX file, for runtimes without torch.

The body is exported by torch with rows as its input (``inputs_embeds``), with its weights as they
are stored; the graph of the table goes in front. A tied head multiplies by all rows of the same
table, so that its codes are stored once. The result is compared with torch before it is written.
"""

from __future__ import annotations

import inspect
import json
import logging
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from featherbed.codecs.codec import ProgressCallback, no_progress
from featherbed.errors import ArgumentError, DataError, MissingExtra
from featherbed.files import remove_stale, temporary_folder
from featherbed.interop.embedding import PackedEmbedding, PackedHead
from featherbed.interop.folder import check_target
from featherbed.interop.onnx.export import to_onnx
from featherbed.interop.pretrained import first_line, load_model, token_ids_alone
from featherbed.interop.rest import Int8Linear, fits_half, replace_module, shrink_rest
from featherbed.interop.swap import compress_model, packed_places

if TYPE_CHECKING:
    from onnx import ModelProto

OPSET = 20
WEIGHTS = ("float32", "float16", "int8", "dynamic")
TOLERANCE = 1e-3  # of an exported model against torch, relative to its largest output
SMALL = 256  # elements of an array that stays float32
FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "config.json")
EXAMPLE = '''"""Use the model beside this file: pip install onnxruntime tokenizers numpy."""

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

tokenizer = Tokenizer.from_file("tokenizer.json")
tokenizer.no_truncation()
tokenizer.enable_padding()
tokens = tokenizer.encode_batch(["A dog runs in the snow.", "The market is open."])
session = onnxruntime.InferenceSession("model.onnx")
inputs = {{
    "input_ids": np.array([one.ids for one in tokens]),
    "attention_mask": np.array([one.attention_mask for one in tokens]),
}}
({output},) = session.run(["{output}"], inputs)
print({output}.shape)
'''


@dataclass(frozen=True)
class Pooling:
    """How a sentence encoder makes one vector of the states of a text."""

    mode: str  # "mean", "cls" or "max"
    normalized: bool

    def apply(self, states: Tensor, mask: Tensor) -> Tensor:  # [B, n, d], [B, n] -> [B, d]
        """Return the vectors of texts."""
        kept = mask[..., None].to(states.dtype)
        if self.mode == "cls":
            rows = states[:, 0]
        elif self.mode == "max":
            rows = (states - (1 - kept) * 1e9).amax(1)
        else:
            rows = (states * kept).sum(1) / kept.sum(1).clamp(min=1e-9)
        return nn.functional.normalize(rows, dim=-1) if self.normalized else rows


def read_pooling(folder: Path) -> Pooling | None:
    """Return the pooling that modules.json of a sentence encoder describes, None without one."""
    if not (folder / "modules.json").is_file():
        return None
    try:
        modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
        kinds = [str(one["type"]).rpartition(".")[2] for one in modules]
        path = next(one["path"] for one in modules if str(one["type"]).endswith("Pooling"))
        config = json.loads((folder / path / "config.json").read_text(encoding="utf-8"))
        stored = [name for name, on in config.items() if name.startswith("pooling_mode_") and on]
        names = [name.split("_")[2] for name in stored] or [str(config.get("pooling_mode"))]
    except (OSError, ValueError, KeyError, TypeError, StopIteration, AttributeError):
        raise DataError(f"{folder}: modules.json or the pooling it names cannot be read") from None
    if len(names) != 1 or names[0] not in ("mean", "cls", "max") or "mean_sqrt" in str(stored):
        raise ArgumentError(f"{folder}: pooling by {names} is not known: use mean, cls or max")
    unknown = set(kinds) - {"Transformer", "Pooling", "Normalize"}
    if unknown:
        raise ArgumentError(f"{folder}: modules of type {', '.join(unknown)} cannot be exported")
    return Pooling(names[0], "Normalize" in kinds)


class ModelBody(nn.Module):
    """A model as a function of rows: of its tokens, and of the whole table for its tied heads."""

    def __init__(self, model: nn.Module, output: str, pooling: Pooling | None) -> None:
        super().__init__()
        self.model, self.output, self.pooling = model, output, pooling
        self._rows: list[Tensor] = []  # a list, which torch.export does not track
        for name, module in list(model.named_modules()):
            if isinstance(module, PackedHead):
                replace_module(model, name, RowsHead(self._rows, module.bias))

    def forward(
        self, inputs_embeds: Tensor, attention_mask: Tensor, rows: Tensor | None = None
    ) -> Tensor:
        """Return the output of the model."""
        if rows is not None:
            self._rows[:] = [rows]
        given = {"inputs_embeds": inputs_embeds, "attention_mask": attention_mask}
        found = self.model(**given, return_dict=True)
        states: Tensor = getattr(
            found, self.output if self.pooling is None else "last_hidden_state"
        )
        return states if self.pooling is None else self.pooling.apply(states, attention_mask)


class RowsHead(nn.Module):
    """The output layer tied to the rows that ``ModelBody`` was given: h E^T + b."""

    def __init__(self, rows: list[Tensor], bias: nn.Parameter | None) -> None:
        super().__init__()
        self.rows, self.bias = rows, bias

    def forward(self, hidden: Tensor) -> Tensor:  # [..., d] -> [..., V]
        """Return the logits of hidden states."""
        return nn.functional.linear(hidden, self.rows[0], self.bias)


def model_to_onnx(
    folder: str | Path,
    out: str | Path,
    *,
    ratio: float | None = None,
    budget: int | str | None = None,
    method: str = "auto",
    rest: str = "int8",
    generator: Any = None,
    tell: ProgressCallback = no_progress,
) -> Path:
    """Write a saved model as one ONNX file, with its tokenizer and an example; return its path.

    The model has the inputs ``input_ids`` and ``attention_mask`` (int64 [batch, length]); its
    output is ``sentence_embedding`` for sentence encoders (pooled and normalized as modules.json
    says), ``logits`` for models with a head, otherwise ``last_hidden_state``. It needs
    onnxruntime alone: neither torch nor featherbed.

    Args:
        folder: a compressed model, or an original one together with ``ratio`` or ``budget``.
        out: folder to write; it appears when it is complete, and outputs agree with torch.
        ratio, budget, method, generator, tell: see ``fb.compress``; for the token table.
        rest: type of the remaining weights: "float32", "float16", "int8" (weights alone; as fast as
            float32) or "dynamic" (int8 activations too: faster, less exact).

    >>> import onnxruntime, transformers
    >>> sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> folder = getfixture("tmp_path")
    >>> config = transformers.BertConfig(vocab_size=500, intermediate_size=32, **sizes)
    >>> transformers.BertModel(config).save_pretrained(folder / "bert")
    >>> path = model_to_onnx(folder / "bert", folder / "onnx", ratio=4, method="int4")
    >>> inputs = {"input_ids": np.array([[3, 17]]), "attention_mask": np.array([[1, 1]])}
    >>> onnxruntime.InferenceSession(path).run(None, inputs)[0].shape
    (1, 2, 16)
    """
    source, target = Path(folder), Path(out)
    for package in ("onnx", "onnxruntime", "onnxscript"):
        if find_spec(package) is None:
            raise MissingExtra(package, "onnx", "exporting a model to ONNX")
    if rest not in WEIGHTS:
        raise ArgumentError(f"rest={rest!r}: use one of {', '.join(WEIGHTS)}")
    check_target(target)
    # in float32 whatever the type of the checkpoint: ONNX has few operators for bfloat16
    model, pooling = load_model(source, dtype=torch.float32).eval(), read_pooling(source)
    if "decoder_input_ids" in inspect.signature(model.forward).parameters:
        raise ArgumentError(
            f"{type(model).__name__} has an encoder and a decoder: only models without a decoder "
            "of their own can be exported"
        )
    stored = getattr(getattr(model.config, "quantization_config", None), "rest", None)
    aim = {"ratio": ratio, "budget": budget, "method": method, "generator": generator}
    if stored is None:
        if ratio is None and budget is None:
            raise ArgumentError(f"{source} is not compressed: give ratio= or budget= as well")
        weights = "float32" if rest == "dynamic" else rest
        compress_model(model, **aim, rest=weights, tell=tell)
    elif ratio is not None or budget is not None:
        raise ArgumentError(f"{source} is compressed already: leave ratio= and budget= out")
    elif stored == "float32" and rest in ("float16", "int8"):
        shrink_rest(model, rest)
    tell("exporting the body", 1.0)
    proto = export_model(model, pooling, dynamic=rest == "dynamic")
    output = proto.graph.output[0].name
    remove_stale(target.parent)
    with temporary_folder(target.parent) as workplace:
        new = workplace / "new"
        new.mkdir()
        (new / "model.onnx").write_bytes(proto.SerializeToString())
        for name in FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, new / name)
        (new / "example.py").write_text(EXAMPLE.format(output=output))
        new.rename(target)
    return target / "model.onnx"


def export_model(
    model: Any, pooling: Pooling | None = None, *, dynamic: bool = False
) -> ModelProto:
    """Return a model with one packed table as an ONNX model, compared with torch."""
    places = packed_places(model)
    if len(places) != 1:
        raise ArgumentError(
            f"{type(model).__name__} has {len(places)} packed tables: only models with one token "
            "table can be exported"
        )
    ((_, embedding, _, heads),) = places
    ids, mask = sample_inputs(model, embedding)
    with torch.no_grad():
        output, expected = torch_output(model, ids, mask, pooling)
        body = export_body(model, embedding, output, pooling, bool(heads), dynamic)
    proto = stitch(body, embedding, output, bool(heads))
    check_export(proto, (ids, mask), expected, loose=dynamic)
    return proto


def torch_output(
    model: Any, ids: Tensor, mask: Tensor, pooling: Pooling | None
) -> tuple[str, Tensor]:
    """Return the output of a model by its token ids, as torch computes it, and its name."""
    with token_ids_alone(model):
        found = model(input_ids=ids, attention_mask=mask, return_dict=True)
    output = "logits" if "logits" in found and pooling is None else "last_hidden_state"
    if output not in found:
        raise ArgumentError(
            f"{type(model).__name__} returns {', '.join(found)}: logits or last_hidden_state is "
            "needed for ONNX"
        )
    if pooling is None:
        return output, found[output]
    return "sentence_embedding", pooling.apply(found[output], mask)


def longest_input(model: Any) -> int:
    """Return the number of tokens a model takes; some say -1 or nothing for any number."""
    longest = getattr(model.config, "max_position_embeddings", None) or 0
    return longest if longest > 0 else 1 << 20


def sample_inputs(model: Any, embedding: PackedEmbedding) -> tuple[Tensor, Tensor]:
    """Return random ids [2, n] and a mask by which the second text is shorter, then padding."""
    length = min(12, longest_input(model))
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(embedding.num_embeddings, (2, length), generator=draw)
    padding = max(getattr(model.config.get_text_config(), "pad_token_id", None) or 0, 0)
    ids[ids == padding] = (padding + 1) % embedding.num_embeddings
    mask = torch.ones_like(ids)
    ids[1, length // 2 :], mask[1, length // 2 :] = padding, 0
    return ids, mask


def export_body(
    model: Any,
    embedding: PackedEmbedding,
    output: str,
    pooling: Pooling | None,
    tied: bool,
    dynamic: bool,
) -> ModelProto:
    """Return the body of a model as an ONNX model of rows; small weights stay as they are
    stored."""
    ids, mask = sample_inputs(model, embedding)
    if dynamic:
        for name, module in list(model.named_modules()):
            if isinstance(module, Int8Linear):
                replace_module(model, name, as_linear(module))
    model.set_attn_implementation("eager")
    body = ModelBody(model, output, pooling)
    free = {0: torch.export.Dim("batch")}
    free[1] = torch.export.Dim("length", max=longest_input(model))
    inputs = {"inputs_embeds": embedding(ids).float(), "attention_mask": mask}
    shapes: dict[str, Any] = dict.fromkeys(inputs, free)
    if tied:
        inputs, shapes = inputs | {"rows": embedding.weight.float()}, shapes | {"rows": None}
    settings: dict[str, Any] = {"dynamo": True, "external_data": False, "verbose": False}
    settings |= {"opset_version": OPSET, "dynamic_shapes": tuple(shapes.values())}
    settings |= {"input_names": list(inputs), "output_names": [output]}
    try:
        with quiet_libraries():
            program = torch.onnx.export(body, tuple(inputs.values()), **settings)
            assert program is not None
            proto = quantize_dynamic(program.model_proto) if dynamic else program.model_proto
    except Exception as error:  # torch raises nearly anything for a model it cannot trace
        raise ArgumentError(
            f"{type(model).__name__} cannot be exported by torch.onnx.export: "
            f"{first_line(error.__cause__ or error)}"
        ) from None
    store_half(proto)
    return proto


def as_linear(module: Int8Linear) -> nn.Linear:
    """Return an int8 layer as a plain one."""
    linear = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
    linear.weight, linear.bias = nn.Parameter(module.weight), module.bias  # type: ignore[assignment]
    return linear


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence what torch and onnxscript print while they export."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def quantize_dynamic(proto: ModelProto) -> ModelProto:
    """Return a model whose products are of int8 weights and int8 activations."""
    import onnx
    from onnxruntime import quantization

    with tempfile.TemporaryDirectory() as folder:
        before, after = Path(folder) / "before.onnx", Path(folder) / "after.onnx"
        onnx.save(proto, before)
        quantization.quantize_dynamic(
            before,
            after,
            op_types_to_quantize=["MatMul"],
            per_channel=True,
            weight_type=quantization.QuantType.QInt8,
            extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},
        )
        return onnx.load(after)


def store_half(proto: ModelProto) -> None:
    """Store float32 arrays as float16 where that loses nothing, with an operator that casts
    them."""
    from onnx import TensorProto, helper, numpy_helper

    casts = []
    for at, tensor in enumerate(proto.graph.initializer):
        array = numpy_helper.to_array(tensor)
        if array.dtype != np.float32 or array.size < SMALL:
            continue
        if fits_half(torch.from_numpy(array.copy())):
            half = array.astype(np.float16)
            if np.array_equal(half.astype(np.float32), array):
                name, stored = tensor.name, f"{tensor.name}.half"
                proto.graph.initializer[at].CopyFrom(numpy_helper.from_array(half, stored))
                casts.append(helper.make_node("Cast", [stored], [name], to=TensorProto.FLOAT))
    nodes = [*casts, *proto.graph.node]
    for node in nodes:
        del node.metadata_props[:]  # the lines of Python it comes from
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)


def stitch(body: ModelProto, embedding: PackedEmbedding, output: str, tied: bool) -> ModelProto:
    """Return the model of ids: the graph of the table in front of the body."""
    import onnx
    from onnx import TensorProto, compose, helper

    table = compose.add_prefix(
        to_onnx(embedding.table, rank=1 if tied else 2, opset=OPSET), "table/"
    )
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "length"])
    mask = next(one for one in body.graph.input if one.name == "attention_mask")
    arrays, rows = list(table.graph.initializer), "table/rows"
    before, after = list[Any](), list[Any]()
    if tied:  # all rows, which onnxruntime computes once when it opens the model
        for name, value in (("first", 0), ("count", embedding.num_embeddings), ("step", 1)):
            arrays.append(helper.make_tensor(f"table/{name}", TensorProto.INT64, [], [value]))
        names = ["table/first", "table/count", "table/step"]
        before.append(helper.make_node("Range", names, ["table/ids"]))
        after.append(helper.make_node("Identity", [rows], ["rows"]))
        after.append(helper.make_node("Gather", [rows, "input_ids"], ["table/found"], axis=0))
        rows = "table/found"
    else:
        before.append(helper.make_node("Identity", ["input_ids"], ["table/ids"]))
    if embedding.scale != 1:
        arrays.append(helper.make_tensor("table/scale", TensorProto.FLOAT, [], [embedding.scale]))
        after.append(helper.make_node("Mul", [rows, "table/scale"], ["table/scaled"]))
        rows = "table/scaled"
    after.append(helper.make_node("Identity", [rows], ["inputs_embeds"]))
    graph = helper.make_graph(
        [*before, *table.graph.node, *after, *body.graph.node],
        "model",
        [ids, mask],
        [one for one in body.graph.output if one.name == output],
        [*arrays, *body.graph.initializer],
    )
    domains = {one.domain: one for one in (*table.opset_import, *body.opset_import)}
    model = helper.make_model(
        graph, opset_imports=list(domains.values()), producer_name="featherbed"
    )
    model.functions.extend(body.functions)
    model.ir_version = max(body.ir_version, table.ir_version)
    onnx.checker.check_model(model)
    return model


def check_export(
    proto: ModelProto, inputs: tuple[Tensor, Tensor], expected: Tensor, *, loose: bool
) -> None:
    """Refuse a model whose outputs differ from torch's."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    data = proto.SerializeToString()
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    names = ("input_ids", "attention_mask")
    given = {name: one.numpy() for name, one in zip(names, inputs, strict=True)}
    found = torch.from_numpy(session.run(None, given)[0])
    kept = inputs[1].bool() if expected.dim() == 3 else torch.ones(len(expected), dtype=torch.bool)
    found, expected = found[kept], expected[kept].float()
    limit = 0.5 if loose else TOLERANCE
    difference = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-9))
    if not difference <= limit:
        raise ArgumentError(
            f"the exported model differs from torch by {difference:.2g} of the largest output, "
            f"more than {limit}: this architecture cannot be exported"
        )
