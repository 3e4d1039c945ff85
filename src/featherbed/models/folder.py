"""A folder that ``save_pretrained`` wrote, compressed from disk: the model is never made, the table never read whole.

Shards stream from one folder to the other; the table's tensor is left out and its packed bytes are put in.
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
from safetensors import SafetensorError, safe_open

from featherbed.codecs.codec import Tell, quiet
from featherbed.codecs.target import Target
from featherbed.compression.run import compress
from featherbed.errors import ArgumentError, DataError
from featherbed.io.vectors.arrays import read_safetensors
from featherbed.models.pretrained import METHOD, class_of, read_config
from featherbed.models.swap import Place, Swapped, found_places, padding_of
from featherbed.packed.file import to_bytes
from featherbed.packed.writing import remove_stale, temporary_folder

BLOCK = 1 << 24  # bytes copied at once
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DENSE = (
    ".bin",
    ".h5",
    ".msgpack",
    ".pt",
    ".pth",
)  # the same model in other formats, with the table as it was: not copied
OTHER_FORMS = (
    "onnx",
    "openvino",
    "coreml",
    "gguf",
    "original",
)  # folders of the whole model in another form: neither
ELEMENT = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a folder: the file each is in, and the index where there are several files."""

    folder: Path
    file_of: dict[str, str]
    index: dict[str, Any] | None

    @property
    def files(self) -> list[str]:
        """The files, each once."""
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
    tell: Tell = quiet,
) -> list[Swapped]:
    """Compress the token table of a saved ``transformers`` model into a new folder, from disk; return what was done.

    The table is mapped, not read; the other tensors are copied in blocks. What ``fb.load_model(out)`` makes is what
    ``fb.compress_model`` would have made of the loaded model. Nothing of the folder is executed, and a folder half-written is
    never left.

    >>> import transformers
    >>> settings = transformers.BertConfig(vocab_size=500, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    >>> folder = getfixture("tmp_path")
    >>> transformers.BertModel(settings).save_pretrained(folder / "bert")
    >>> (done,) = compress_folder(folder / "bert", folder / "small", ratio=4, method="int4")
    >>> done.before / done.after > 4
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
            f"{source}: the model is quantised already, as its config.json says: start from the original"
        )
    checkpoint = read_checkpoint(source)
    model = skeleton(source, config)
    (place,) = found_places(model, None)
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
        name=place.name,
        tell=tell,
    )
    data = to_bytes(table)
    names = list(place.embeddings)
    about: dict[str, Any] = {
        "rows": len(table),
        "dim": table.dim,
        "padding": table.padding_idx,
        "scale": place.scales[names[0]],
        "bytes": len(data),
    }
    about |= {"twins": {name: place.scales[name] for name in names[1:]}, "heads": list(place.heads)}
    before = matrix.shape[0] * matrix.shape[1] * tensor_width(checkpoint, keys[0])
    remove_stale(target.parent)
    with temporary_folder(target.parent) as workplace:
        made = workplace / "made"
        made.mkdir()
        write_folder(checkpoint, members, made, keys, data, {names[0]: about})
        made.rename(target)
    return [Swapped(names[0], tuple(names[1:]), tuple(place.heads), before, len(data), table)]


def read_members(folder: Path) -> list[Path]:
    """Return the files of a model's folder, relative to it, without copies of the model in other forms.

    Links may lead to files of the folder, and from a snapshot of a Hugging Face cache to its
    ``blobs``; any other link, and any link to a folder, is refused.
    """
    root = folder.resolve()
    found: list[Path] = []
    left = [folder]
    while left:
        here = left.pop()
        for path in sorted(here.iterdir()):
            if here == folder and is_other_form(path):
                continue
            check_link(path, root)
            if path.is_dir():
                left.append(path)
            elif path.is_file():
                found.append(path.relative_to(folder))
    return sorted(found)


def is_other_form(path: Path) -> bool:
    """Whether a member of a model's folder is the model in another form, or a hidden folder."""
    if path.is_file():
        return path.suffix in DENSE
    return path.name in OTHER_FORMS or path.name.startswith(".")


def check_link(path: Path, root: Path) -> None:
    """Refuse a symbolic link that leads out of the folder ``root``, nowhere, or to a folder."""
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
    """Return where the tensors of a folder are, or say that they are in no file that can be streamed."""
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
                f"{folder}: {INDEX} names {', '.join(missing) or 'no files'}, which are not there: fetch them"
            )
        return Checkpoint(folder, file_of, index)
    if (folder / SINGLE).is_file():
        with (folder / SINGLE).open("rb") as file:
            header, _ = read_header(folder / SINGLE, file)
        return Checkpoint(
            folder, dict.fromkeys((name for name in header if name != "__metadata__"), SINGLE), None
        )
    raise DataError(
        f"{folder} holds neither {SINGLE} nor {INDEX}: load the model and save it anew by model.save_pretrained(folder)"
    )


def skeleton(folder: Path, config: Any) -> Any:
    """Return the model on the meta device: its modules and ties without any numbers."""
    with torch.device("meta"):
        return class_of(folder, config)(config)


def tensors_of(checkpoint: Checkpoint, place: Place, prefix: str) -> list[str]:
    """Return the tensors of a checkpoint that hold a place's weight, the embedding's own first."""
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
            f"{checkpoint.folder}: no tensor of the checkpoint is {place.name}.weight, the model's token table"
        )
    return found


def read_table(checkpoint: Checkpoint, keys: list[str], shape: tuple[int, ...]) -> Any:
    """Map the table, or say that it is not the one the config speaks of, or that a head said to be tied to it is another."""
    matrix, *others = (
        read_safetensors(checkpoint.folder / checkpoint.file_of[key], key)[0] for key in keys
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


def tensor_width(checkpoint: Checkpoint, key: str) -> int:
    """Return the bytes of one number of a tensor."""
    path = checkpoint.folder / checkpoint.file_of[key]
    with path.open("rb") as file:
        return ELEMENT.get(read_header(path, file)[0][key]["dtype"], 4)


def write_folder(
    checkpoint: Checkpoint,
    members: list[Path],
    out: Path,
    keys: list[str],
    data: bytes,
    tables: Mapping[str, Any],
) -> None:
    """Write the folder anew: all files, the table's bytes in the place of its tensors, config and index to fit.

    A tensor of no elements stays under the name of each tensor left out, and under the names of
    modules tied to the table: its shape stops a ``transformers`` that does not know packed tables.
    """
    own = {*checkpoint.files, INDEX, "config.json"}
    for path in members:
        if str(path) not in own:  # such as the pooling of a sentence encoder
            (out / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(checkpoint.folder / path, out / path)
    packed = keys[0].removesuffix("weight") + "packed"
    home = checkpoint.file_of[keys[0]]
    (about,) = tables.values()
    tied = [f"{name}.weight" for name in (*about["twins"], *about["heads"])]
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
        about = checkpoint.index.get("metadata", {}) | {"total_size": total}
        (out / INDEX).write_text(
            json.dumps({"metadata": about, "weight_map": dict(sorted(places.items()))}, indent=2)
            + "\n"
        )


def read_header(path: Path, file: BinaryIO) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file and where its tensors begin."""
    length = int.from_bytes(file.read(8), "little")
    try:
        with safe_open(path, framework="numpy"):  # checks names, types, shapes and offsets
            header: dict[str, Any] = json.loads(file.read(length))
    except (SafetensorError, ValueError, RecursionError):
        raise DataError(
            f"{path} is no safetensors file, or was cut short: fetch it again"
        ) from None
    return header, 8 + length


def rewrite(source: Path, target: Path, dropped: set[str], added: Mapping[str, bytes]) -> None:
    """Copy a safetensors file without some tensors, in blocks, and add tensors of bytes at its end.

    A tensor without bytes is an empty one of float32.
    """
    with source.open("rb") as file, target.open("wb") as new:
        header, start = read_header(source, file)
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
    left = end - begin
    while left:
        block = file.read(min(BLOCK, left))
        if not block:
            raise DataError(f"the checkpoint is cut short within {name}: fetch it again")
        new.write(block)
        left -= len(block)
