"""``fb.compress_folder``: compress a saved model from disk, without creating it in memory.

Files are streamed from one folder to the other; the table's tensor is replaced by packed bytes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from featherbed.codecs.codec import ProgressCallback, no_progress
from featherbed.codecs.compress import compress
from featherbed.codecs.target import Target
from featherbed.errors import ArgumentError, DataError
from featherbed.files import remove_stale, temporary_folder
from featherbed.interop.pretrained import METHOD, model_class, read_config
from featherbed.interop.swap import CompressedWeight, SharedWeight, find_weights, padding_of
from featherbed.io.vectors import read_safetensors, safetensors_header
from featherbed.packed.file import to_bytes

BLOCK = 1 << 24  # bytes copied at once
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
    generator: Any = None,
    effort: str = "normal",
    minutes: float | None = None,
    tell: ProgressCallback = no_progress,
) -> list[CompressedWeight]:
    """Compress the token table of a saved ``transformers`` model into a new folder.

    The table is memory-mapped; the other tensors are copied in blocks. ``fb.load_model(out)``
    equals the result of ``fb.compress_model`` on the loaded model. Nothing in the folder is
    executed, and an error leaves no partial folder. For the arguments see ``fb.compress_model``.

    >>> import transformers
    >>> sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> folder = getfixture("tmp_path")
    >>> config = transformers.BertConfig(vocab_size=500, **sizes)
    >>> transformers.BertModel(config).save_pretrained(folder / "bert")
    >>> (result,) = compress_folder(folder / "bert", folder / "small", ratio=4, method="int4")
    >>> result.before / result.after > 4
    True
    """
    Target.of(budget, ratio, quality, 4, measure)
    source, target = Path(folder), Path(out)
    if target.exists():
        raise ArgumentError(f"{target} exists: name a folder that does not")
    if not target.parent.is_dir():
        raise ArgumentError(f"{target} cannot be written: name a folder in one that exists")
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
    keys = tensors_of(checkpoint, place, model.base_model_prefix)
    matrix = read_table(checkpoint, keys, tuple(place.weight.shape))
    table = compress(
        matrix,
        ratio=ratio,
        budget=budget,
        quality=quality,
        method=method,
        measure=measure,
        weights=weights,
        padding_idx=padding_of(place, matrix),
        generator=generator,
        effort=effort,
        minutes=minutes,
        name=place.name,
        tell=tell,
    )
    data = to_bytes(table)
    name, *others = place.embeddings
    metadata: dict[str, Any] = {
        "rows": len(table),
        "dim": table.dim,
        "padding": table.padding_idx,
        "scale": place.scales[name],
        "bytes": len(data),
        "twins": {other: place.scales[other] for other in others},
        "heads": list(place.heads),
    }
    stored, _ = safetensors_header(source / checkpoint.file_of[keys[0]])
    begin, end = stored[keys[0]]["data_offsets"]
    remove_stale(target.parent)
    with temporary_folder(target.parent) as workplace:
        new = workplace / "new"
        new.mkdir()
        write_folder(checkpoint, members, new, keys, data, {name: metadata})
        new.rename(target)
    heads = tuple(place.heads)
    return [CompressedWeight(name, tuple(others), heads, end - begin, len(data), table)]


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


def tensors_of(checkpoint: Checkpoint, place: SharedWeight, prefix: str) -> list[str]:
    """Return the names of the tensors that hold a weight, the embedding's first."""
    found = []
    for name in (*place.embeddings, *place.heads):
        plain = name.removeprefix(f"{prefix}.")
        known = [
            key
            for key in (f"{name}.weight", f"{plain}.weight", f"{prefix}.{name}.weight")
            if key in checkpoint.file_of
        ]
        found += [key for key in known if key not in found]
    if not found:
        raise DataError(
            f"{checkpoint.folder}: no tensor of the checkpoint is {place.name}.weight, "
            "the model's token table"
        )
    return found


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


def write_folder(
    checkpoint: Checkpoint,
    members: list[Path],
    out: Path,
    keys: list[str],
    data: bytes,
    tables: Mapping[str, Any],
) -> None:
    """Write the new folder: packed bytes instead of the table, with matching config and index.

    An empty tensor takes the name of each tensor that was left out and of each module tied to the
    table: its shape stops a ``transformers`` that does not know packed tables.
    """
    own = {*checkpoint.files, INDEX, "config.json"}
    for path in members:
        if str(path) not in own:  # such as the pooling of a sentence encoder
            (out / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(checkpoint.folder / path, out / path)
    packed = keys[0].removesuffix("weight") + "packed"
    home = checkpoint.file_of[keys[0]]
    (metadata,) = tables.values()
    tied = [f"{name}.weight" for name in (*metadata["twins"], *metadata["heads"])]
    markers = dict.fromkeys([*keys, *(key for key in tied if key not in keys)], home)
    for name in checkpoint.files:
        added = {packed: data, **dict.fromkeys(markers, b"")} if name == home else {}
        rewrite(checkpoint.folder / name, out / name, set(keys), added)
    config = json.loads((checkpoint.folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": METHOD, "tables": dict(tables)}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if checkpoint.index is not None:
        places = {key: name for key, name in checkpoint.file_of.items() if key not in keys}
        places |= {packed: home, **markers}
        total = sum((out / name).stat().st_size for name in checkpoint.files)
        index = {
            "metadata": checkpoint.index.get("metadata", {}) | {"total_size": total},
            "weight_map": dict(sorted(places.items())),
        }
        (out / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def rewrite(source: Path, target: Path, dropped: set[str], added: Mapping[str, bytes]) -> None:
    """Copy a safetensors file in blocks without some tensors, and append tensors of bytes.

    An added tensor without bytes is an empty float32 tensor.
    """
    header, start = safetensors_header(source)
    with source.open("rb") as file, target.open("wb") as new:
        entries: dict[str, Any] = {"__metadata__": header.get("__metadata__", {"format": "pt"})}
        kept = [
            (name, one)
            for name, one in header.items()
            if name != "__metadata__" and name not in dropped
        ]
        kept.sort(key=lambda pair: pair[1]["data_offsets"][0])
        offset = 0
        for name, one in kept:
            size = one["data_offsets"][1] - one["data_offsets"][0]
            entries[name] = {**one, "data_offsets": [offset, offset + size]}
            offset += size
        for name, data in added.items():
            entries[name] = {
                "dtype": "U8" if data else "F32",
                "shape": [len(data)],
                "data_offsets": [offset, offset + len(data)],
            }
            offset += len(data)
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        new.write(len(text).to_bytes(8, "little") + text)
        for name, one in kept:
            copy(file, new, start + one["data_offsets"][0], start + one["data_offsets"][1], name)
        for data in added.values():
            new.write(data)


def copy(file: BinaryIO, new: BinaryIO, begin: int, end: int, name: str) -> None:
    """Copy bytes in blocks."""
    file.seek(begin)
    remaining = end - begin
    while remaining:
        block = file.read(min(BLOCK, remaining))
        if not block:
            raise DataError(f"the checkpoint is cut short within {name}: fetch it again")
        new.write(block)
        remaining -= len(block)
