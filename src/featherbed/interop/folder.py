"""``fb.compress_folder``: compress a saved model from disk, without creating it in memory.

Files are streamed from one folder to the other; the table's tensor is replaced by packed bytes, and
the remaining weights are rounded on the way if asked for.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from safetensors import safe_open

from featherbed.checks import read_bytes
from featherbed.codecs.codec import ProgressCallback, no_progress
from featherbed.codecs.compress import compress
from featherbed.codecs.target import Target
from featherbed.errors import ArgumentError, DataError
from featherbed.files import remove_stale, temporary_folder
from featherbed.interop.embedding import PackedEmbedding
from featherbed.interop.pretrained import (
    METHOD,
    model_class,
    possible_names,
    read_config,
    renamed,
)
from featherbed.interop.rest import RESTS, as_stored, check_rest, linear_layers, round_int8
from featherbed.interop.swap import CompressedWeight, SharedWeight, find_weights, padding_of
from featherbed.io.vectors import read_safetensors, safetensors_header
from featherbed.packed.band import Band, Identity
from featherbed.packed.file import to_bytes
from featherbed.packed.matrix import Matrix
from featherbed.packed.table import PackedTable

BLOCK = 1 << 24  # bytes copied at once
SLACK = 64  # bytes by which headers may differ with the size of the table
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# files and folders with the dense model in other formats, which are not copied
OTHER_FILES = (".bin", ".h5", ".msgpack", ".pt", ".pth")
OTHER_FOLDERS = ("onnx", "openvino", "coreml", "gguf", "original")


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a folder: the file of each, and the index if there are several files."""

    folder: Path
    file_of: dict[str, str]
    index: dict[str, Any] | None

    @property
    def files(self) -> list[str]:
        """The files."""
        return sorted(set(self.file_of.values()))


@dataclass(frozen=True)
class ModelFolder:
    """The folder of a saved model: its files, tensors, token table and linear layers."""

    members: list[Path]
    checkpoint: Checkpoint
    place: SharedWeight
    keys: list[str]  # tensors that hold the table, the embedding's first
    matrix: Any  # the table, mapped
    linear: dict[str, bool]  # weights of linear layers -> whether they are [in, out]


def compress_folder(
    folder: str | Path,
    out: str | Path,
    *,
    ratio: float | None = None,
    budget: int | str | None = None,
    quality: str | None = None,
    method: str = "auto",
    measure: str = "error",
    weights: Any = None,
    rest: str = "float32",
    folder_budget: int | str | None = None,
    generator: Any = None,
    effort: str = "normal",
    minutes: float | None = None,
    tell: ProgressCallback = no_progress,
) -> list[CompressedWeight]:
    """Compress a saved ``transformers`` model into a new folder.

    The table is memory-mapped; the other tensors are copied in blocks, or rounded to ``rest`` one
    by one. ``fb.load_model(out)`` equals the result of ``fb.compress_model`` on the loaded model.
    Nothing in the folder is executed, and an error leaves no partial folder. For the arguments see
    ``fb.compress_model``. ``folder_budget``, instead of ``ratio``, ``budget``, ``quality`` and
    ``rest``, is the maximum size of the whole folder: of the types for the remaining weights, each
    with the table that then fits, the one with the lowest measured loss is kept.

    >>> import transformers
    >>> sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> folder = getfixture("tmp_path")
    >>> config = transformers.BertConfig(vocab_size=500, **sizes)
    >>> transformers.BertModel(config).save_pretrained(folder / "bert")
    >>> (result,) = compress_folder(folder / "bert", folder / "small", ratio=4, method="int4")
    >>> result.before / result.after > 4
    True
    """
    check_rest(rest)
    if folder_budget is None:
        Target.of(budget, ratio, quality, 4, measure)
    elif (budget, ratio, quality, rest) != (None, None, None, "float32"):
        raise ArgumentError(
            "folder_budget= was given with ratio=, budget=, quality= or rest=, which it replaces: "
            "leave those out"
        )
    source, target = Path(folder), Path(out)
    check_target(target)
    model = open_folder(source)
    settings: dict[str, Any] = {"method": method, "measure": measure, "weights": weights}
    settings |= {"padding_idx": padding_of(model.place, model.matrix), "name": model.place.name}
    settings |= {"generator": generator, "effort": effort, "minutes": minutes}
    remove_stale(target.parent)
    with temporary_folder(target.parent) as workplace:
        if folder_budget is None:
            settings |= {"ratio": ratio, "budget": budget, "quality": quality}
            table = compress(model.matrix, **settings, tell=tell)
            new, result = workplace / "new", write_folder(model, workplace / "new", table, rest)
        else:
            limit = read_bytes(folder_budget)
            new, result = divide_budget(model, workplace, limit, settings, tell)
        new.rename(target)
    return [result]


def check_target(target: Path) -> None:
    """Refuse to write over a folder, or into a missing one."""
    if target.exists():
        raise ArgumentError(f"{target} exists: name a folder that does not")
    if not target.parent.is_dir():
        raise ArgumentError(f"{target} cannot be written: name a folder in one that exists")


def open_folder(source: Path) -> ModelFolder:
    """Inspect the folder of a model; raise if it cannot be compressed."""
    if not source.is_dir():
        raise DataError(f"{source}: no such folder")
    members = read_members(source)
    config = read_config(source)
    if getattr(config, "quantization_config", None):
        raise ArgumentError(
            f"{source}: the model is quantized already, as its config.json says: "
            "start from the original"
        )
    checkpoint = read_checkpoint(source)
    model = skeleton(source, config)
    (place,) = find_weights(model, None)
    keys = tensors_of(checkpoint, place, model)
    matrix = read_table(checkpoint, keys, tuple(place.weight.shape))
    layers = {
        f"{known}.weight": not isinstance(module, torch.nn.Linear)
        for name, module in linear_layers(model)
        for known in possible_names(model, name)
        if name not in place.heads
    }
    loaded = renamed(model, checkpoint.file_of)
    linear = {key: layers[loaded[key]] for key in {*loaded} - {*keys} if loaded[key] in layers}
    return ModelFolder(members, checkpoint, place, keys, matrix, linear)


def divide_budget(
    model: ModelFolder, workplace: Path, limit: int, settings: dict[str, Any], tell: Any
) -> tuple[Path, CompressedWeight]:
    """Return the folder of at most ``limit`` bytes with the lowest loss, and its table."""
    from featherbed.interop.loss import measure_loss

    found: list[tuple[float, Path, CompressedWeight]] = []
    problem = "the table needs some as well"
    fixed = {rest: bytes_without_table(model, workplace / rest, rest) for rest in RESTS}
    for number, rest in enumerate(RESTS):

        def tell_part(text: str, share: float, number: int = number, rest: str = rest) -> None:
            tell(f"rest {rest}: {text}", (number + share) / len(RESTS))

        new = workplace / rest
        try:
            table = compress(model.matrix, budget=limit - fixed[rest], **settings, tell=tell_part)
        except ArgumentError as error:  # a budget too small for a table
            problem = f"{rest}: {error}" if limit > fixed[rest] else problem
            continue
        result = write_folder(model, new, table, rest)
        loss = measure_loss(model.checkpoint.folder, new)
        found.append((loss.value, new, result))
    if not found:
        raise ArgumentError(
            f"folder_budget={limit:,}: without its table the folder has at least "
            f"{min(fixed.values()):,} bytes (remaining weights in int8), and {problem}: give more"
        )
    _, new, result = min(found, key=lambda one: one[0])
    return new, result


def bytes_without_table(model: ModelFolder, out: Path, rest: str) -> int:
    """Return the bytes that the new folder has beside its table, found by writing it."""
    atoms = Matrix.encode(np.eye(2), "float32")
    stub = PackedTable([Band(2, Identity(), dictionary=atoms)], 2)
    result = write_folder(model, out, stub, rest)
    total = folder_bytes(out) - result.after + SLACK
    shutil.rmtree(out)
    return total


def describe_sizes(before: Path, after: Path, result: CompressedWeight) -> str:
    """Return the bytes of both folders: all files, the table, the remaining weights, the others."""
    columns = []
    for folder, table in ((before, result.before), (after, result.after)):
        files = read_members(folder)
        weights = [one for one in files if one.suffix == ".safetensors"]
        total, stored = (
            sum((folder / one).stat().st_size for one in some) for some in (files, weights)
        )
        columns.append((total, table, stored - table, total - stored))
    names = ("folder", "table", "remaining weights", "other files")
    parts = (
        f"{name} {first:,} -> {second:,}"
        for name, first, second in zip(names, *columns, strict=True)
    )
    return f"{', '.join(parts)} bytes: {columns[0][0] / columns[1][0]:.1f} times smaller"


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files of a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def read_members(folder: Path) -> list[Path]:
    """Return the files of a model's folder, relative to it, without the model in other formats.

    Links may lead to files of the folder, and from a snapshot of the Hugging Face cache to its
    ``blobs``; other links and links to folders are refused.
    """
    root = folder.resolve()
    found: list[Path] = []
    remaining = [folder]
    while remaining:
        here = remaining.pop()
        for path in sorted(here.iterdir()):
            if here == folder and is_other_format(path):
                continue
            check_link(path, root)
            if path.is_dir():
                remaining.append(path)
            elif path.is_file():
                found.append(path.relative_to(folder))
    return sorted(found)


def is_other_format(path: Path) -> bool:
    """Whether a path is the model in another format, or a hidden folder."""
    if path.is_file():
        return path.suffix in OTHER_FILES
    return path.name in OTHER_FOLDERS or path.name.startswith(".")


def check_link(path: Path, root: Path) -> None:
    """Refuse a symbolic link to a missing file, to a folder, or out of the folder ``root``."""
    if not path.is_symlink():
        return
    target = Path(os.path.realpath(path))
    inside = target.is_relative_to(root)
    cached = root.parent.name == "snapshots" and target.parent == root.parent.parent / "blobs"
    if not (target.is_file() and (inside or cached)):
        where = "a folder" if target.is_dir() else "outside the folder"
        where = where if target.exists() else "which does not exist"
        raise DataError(
            f"{path} is a symbolic link to {target}, {where}: replace it by a copy, or remove it"
        )


def read_checkpoint(folder: Path) -> Checkpoint:
    """Return the checkpoint of a folder; raise if it is not in safetensors files."""
    if (folder / INDEX).is_file():
        try:
            index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            file_of = {str(key): str(name) for key, name in index.get("weight_map", {}).items()}
        except (ValueError, AttributeError, RecursionError):
            raise DataError(
                f"{folder / INDEX} is no index of a checkpoint, or was cut short: fetch it again"
            ) from None
        outside = sorted(name for name in file_of.values() if Path(name).name != name)
        if outside:
            raise DataError(
                f"{folder}: {INDEX} names {outside[0]}, which is not in the folder itself"
            )
        missing = sorted({name for name in file_of.values() if not (folder / name).is_file()})
        if missing or not file_of:
            raise DataError(
                f"{folder}: {INDEX} names {', '.join(missing) or 'no files'}, "
                "which are not there: fetch them"
            )
        return Checkpoint(folder, file_of, index)
    if (folder / SINGLE).is_file():
        header, _ = safetensors_header(folder / SINGLE)
        header.pop("__metadata__", None)
        return Checkpoint(folder, dict.fromkeys(header, SINGLE), None)
    raise DataError(
        f"{folder} holds neither {SINGLE} nor {INDEX}: load the model and save it again by "
        "model.save_pretrained(folder)"
    )


def skeleton(folder: Path, config: Any) -> Any:
    """Return the model on the meta device: modules and ties without data."""
    with torch.device("meta"):
        return model_class(folder, config)(config)


def tensors_of(checkpoint: Checkpoint, place: SharedWeight, model: Any) -> list[str]:
    """Return the names of the tensors that hold a weight, the embedding's first."""
    names = [
        one for name in (*place.embeddings, *place.heads) for one in possible_names(model, name)
    ]
    found = dict.fromkeys(
        f"{name}.weight" for name in names if f"{name}.weight" in checkpoint.file_of
    )
    if not found:
        raise DataError(
            f"{checkpoint.folder}: no tensor of the checkpoint is {place.name}.weight, "
            "the model's token table"
        )
    return list(found)


def read_table(checkpoint: Checkpoint, keys: list[str], shape: tuple[int, ...]) -> Any:
    """Map the table; raise if it contradicts config.json in its shape or ties."""
    matrix, *others = (
        read_safetensors(checkpoint.folder / checkpoint.file_of[key], key).matrix for key in keys
    )
    if tuple(matrix.shape) != shape:
        found, said = (" x ".join(map(str, one)) for one in (matrix.shape, shape))
        raise DataError(f"{checkpoint.folder}: {keys[0]} is {found}, config.json says {said}")
    for key, other in zip(keys[1:], others, strict=True):
        step = max(1, BLOCK // (8 * shape[1]))
        if other.shape != matrix.shape or any(
            (matrix[at : at + step] != other[at : at + step]).any()
            for at in range(0, shape[0], step)
        ):
            raise DataError(
                f"{checkpoint.folder}: {key} differs from {keys[0]}, though config.json ties them: "
                "set tie_word_embeddings to false there"
            )
    return matrix


def write_folder(model: ModelFolder, out: Path, table: PackedTable, rest: str) -> CompressedWeight:
    """Write the new folder: packed bytes instead of the table, with matching config and index.

    An empty tensor takes the name of each tensor that was left out and of each module tied to the
    table: its shape stops a ``transformers`` that does not know packed tables.
    """
    checkpoint, place, keys = model.checkpoint, model.place, model.keys
    out.mkdir()
    own = {*checkpoint.files, INDEX, "config.json"}
    for path in model.members:
        if str(path) not in own:  # such as the pooling of a sentence encoder
            (out / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(checkpoint.folder / path, out / path)
    data, (name, *twins) = to_bytes(table), place.embeddings
    home = checkpoint.file_of[keys[0]]
    tied = [f"{one}.weight" for one in (*twins, *place.heads)]
    added = {keys[0].removesuffix("weight") + "packed": data}
    added |= dict.fromkeys([*keys, *(key for key in tied if key not in keys)], b"")
    places: dict[str, str] = {}
    for file in checkpoint.files:
        names = rewrite(model, file, out / file, added if file == home else {}, rest)
        places |= dict.fromkeys(names, file)
    metadata = PackedEmbedding(table, scale=place.scales[name]).metadata()
    metadata |= {"twins": {one: place.scales[one] for one in twins}, "heads": list(place.heads)}
    config = json.loads((checkpoint.folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": METHOD, "tables": {name: metadata}}
    if rest != "float32":
        config["quantization_config"]["rest"] = rest
        config.setdefault("dtype", config.get("torch_dtype", "float32"))  # not that of a tensor
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if checkpoint.index is not None:
        total = sum((out / file).stat().st_size for file in checkpoint.files)
        index = {
            "metadata": checkpoint.index.get("metadata", {}) | {"total_size": total},
            "weight_map": dict(sorted(places.items())),
        }
        (out / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    stored, _ = safetensors_header(checkpoint.folder / home)
    begin, end = stored[keys[0]]["data_offsets"]
    return CompressedWeight(name, tuple(twins), tuple(place.heads), end - begin, len(data), table)


def rewrite(
    model: ModelFolder, file: str, target: Path, added: Mapping[str, bytes], rest: str
) -> list[str]:
    """Write a file of the checkpoint without the table; return the names of its tensors.

    Tensors are copied in blocks, or rounded to ``rest`` and added one by one. An added tensor
    without bytes is an empty float32 tensor.
    """
    source = model.checkpoint.folder / file
    header, start = safetensors_header(source)
    metadata = header.pop("__metadata__", {"format": "pt"})
    with safe_open(source, framework="pt") as stored:

        def small(name: str) -> dict[str, torch.Tensor]:
            """Return what a rounded tensor is stored as."""
            tensor = stored.get_tensor(name)
            if rest == "float16" or name not in model.linear:
                return {name: as_stored(name, tensor)}
            levels, scales = round_int8(tensor.T if model.linear[name] else tensor)
            base = name.removesuffix("weight")
            return {f"{base}scales": scales, f"{base}levels": levels}

        # name -> dtype, shape, bytes, and how to write them
        parts: dict[str, tuple[str, list[int], int, Callable[[BinaryIO], None]]] = {}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            if name in model.keys:
                continue
            if rest == "float32" or (entry["dtype"] != "F32" and name not in model.linear):
                write = partial(copy, source, start + begin, start + end, name)
                parts[name] = (entry["dtype"], entry["shape"], end - begin, write)
                continue
            for key, tensor in small(name).items():

                def put(new: BinaryIO, name: str = name, key: str = key) -> None:
                    new.write(small(name)[key].contiguous().numpy().tobytes())

                kind = {torch.int8: "I8", torch.float16: "F16"}.get(tensor.dtype, "F32")
                parts[key] = (kind, list(tensor.shape), tensor.nbytes, put)
        for name, data in added.items():

            def put_bytes(new: BinaryIO, data: bytes = data) -> None:
                new.write(data)

            parts[name] = ("U8" if data else "F32", [len(data)], len(data), put_bytes)
        width = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2}  # for alignment
        order = sorted(parts, key=lambda name: -width.get(parts[name][0], 1))
        entries: dict[str, Any] = {"__metadata__": metadata}
        offset = 0
        for name in order:
            kind, shape, size, _ = parts[name]
            place = [offset, offset + size]
            entries[name] = {"dtype": kind, "shape": shape, "data_offsets": place}
            offset += size
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with target.open("wb") as new:
            new.write(len(text).to_bytes(8, "little") + text)
            for name in order:
                parts[name][3](new)
    return order


def copy(source: Path, begin: int, end: int, name: str, new: BinaryIO) -> None:
    """Copy bytes in blocks."""
    with source.open("rb") as file:
        file.seek(begin)
        remaining = end - begin
        while remaining:
            block = file.read(min(BLOCK, remaining))
            if not block:
                raise DataError(f"the checkpoint is cut short within {name}: fetch it again")
            new.write(block)
            remaining -= len(block)
