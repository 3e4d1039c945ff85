"""What the folders of stored text models share: weights of a chosen precision, the list of words, one file that says it all.

The JSON file is taken away first and written last: a folder without it is no model, whatever else it holds. The words are the
keys of the packed table, or stand in id order in ``words.txt.xz``, one a line: keys take 19 bytes a word of English news and
are mapped, the list takes 3 and is read whole.
"""

from __future__ import annotations

import json
import lzma
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import ArgumentError, FormatError, MissingFileError
from featherbed.packed.file import load
from featherbed.packed.keys import Keys
from featherbed.packed.matrix import Floats, Matrix
from featherbed.packed.parts import Reader
from featherbed.packed.table import PackedTable
from featherbed.packed.writing import replacing
from featherbed.serve.arrays import read_arrays, write_arrays
from featherbed.version import __version__

WORDS, MODEL, LIST, TOKENIZER = (
    "words.safetensors",
    "model.safetensors",
    "words.txt.xz",
    "tokenizer.json",
)
CLASSIFIER, LANGUAGE = "classifier.json", "language.json"
KINDS = ("float32", "float16", "int8")
KEPT = ("keys", "list", "tokenizer")  # where the words are
MOST_JSON = 1 << 24  # bytes, of a tokenizer too
MOST_LIST = 1 << 26  # bytes of words
MEMORY = 1 << 25  # bytes a decompressor may use
_DICTIONARY = 1 << 23
_STORED = {"float32": ("F32",), "float16": ("F16",), "int8": ("U8",)}

Arrays = Mapping[str, NDArray[np.floating]]
Shapes = Mapping[str, tuple[int, ...]]


def encode_weights(arrays: Arrays, kind: str) -> dict[str, NDArray[Any]]:
    """Return the flat arrays that store matrices as ``kind``, vectors as float32; levels have a scale for each row.

    x = scale * (level - 127.5)

    >>> sorted(encode_weights({"out": np.eye(2), "bias": np.zeros(2)}, "int8"))
    ['bias', 'out', 'out.scale']
    """
    if kind not in KINDS:
        raise ArgumentError(f"weights={kind!r}: use one of {', '.join(KINDS)}")
    stored: dict[str, NDArray[Any]] = {}
    for name, array in arrays.items():
        values = np.asarray(array, dtype=np.float32)
        if not np.isfinite(values).all():
            raise ArgumentError(
                f"the weights {name!r} hold values that are no finite numbers: train again with a lower rate"
            )
        if values.ndim == 1:
            stored[name] = values
            continue
        matrix = Matrix.encode(values, kind, scale_kind="float16")
        stored[name] = matrix.data.reshape(-1)
        if matrix.scale is not None:
            stored[f"{name}.scale"] = matrix.scale
    return stored


def decode_weights(path: Path, shapes: Shapes, kind: str) -> dict[str, Floats]:
    """Read weights of known shapes, stored as ``kind``, as float32; anything else in the file is a FormatError."""
    wanted: dict[str, tuple[str, ...]] = {}
    for name, shape in shapes.items():
        wanted[name] = ("F32",) if len(shape) == 1 else _STORED[kind]
        if len(shape) == 2 and kind == "int8":
            wanted[f"{name}.scale"] = ("F16", "F32")
    found = read_arrays(path, "weights", wanted)
    decoded: dict[str, Floats] = {}
    for name, shape in shapes.items():
        scale = found.get(f"{name}.scale")
        if len(found[name]) != math.prod(shape) or (scale is not None and len(scale) != shape[0]):
            raise FormatError(
                f"{path.name}: {name!r} must hold {' x '.join(map(str, shape))} numbers, it has {len(found[name])}"
            )
        if len(shape) == 1:
            decoded[name] = found[name].astype(np.float32)
        else:
            decoded[name] = Matrix(
                kind, (shape[0], shape[1]), found[name].reshape(shape), scale
            ).dense()
        if not np.isfinite(decoded[name]).all():
            raise FormatError(f"{path.name}: {name!r} holds values that are no finite numbers")
    return decoded


def write_words(path: Path, words: Sequence[str]) -> None:
    """Write words, one a line, in the order of their ids, compressed.

    >>> path = getfixture("tmp_path") / "words.txt.xz"
    >>> write_words(path, ["<pad>", "<unk>", "the"])
    >>> read_words(path, 3)
    ['<pad>', '<unk>', 'the']
    """
    raw = _joined(words)
    filters = [
        {
            "id": lzma.FILTER_LZMA2,
            "preset": 9 | lzma.PRESET_EXTREME,
            "dict_size": _DICTIONARY,
            "lc": 4,
            "pb": 0,
        }
    ]
    packed = lzma.compress(raw, format=lzma.FORMAT_XZ, check=lzma.CHECK_CRC32, filters=filters)
    with replacing(path) as descriptor, os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(packed)


def _joined(words: Sequence[str]) -> bytes:
    """Return words as lines of UTF-8, or say which of them cannot be one."""
    for word in words:
        if not word or "\n" in word:
            raise ArgumentError(
                f"the word {word!r} cannot stand on a line of its own: words are not empty, without line breaks"
            )
    if len(set(words)) < len(words):
        raise ArgumentError(
            f"{len(words) - len(set(words))} words stand twice: every id has a word of its own"
        )
    try:
        raw = "\n".join(words).encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(f"a word cannot be written as UTF-8: {str(error)[:100]}") from None
    if len(raw) > MOST_LIST:
        raise ArgumentError(
            f"{len(words):,} words have {len(raw):,} bytes, {MOST_LIST:,} is the most: store them as keys"
        )
    return raw


def read_words(path: Path, count: int) -> list[str]:
    """Return the ``count`` words of a list; a list that is cut, too long or doubled is a FormatError."""
    if not path.is_file():
        raise MissingFileError(f"{path}: no such file")
    decompressor = lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=MEMORY)
    try:
        with path.open("rb") as file:
            raw = decompressor.decompress(file.read(MOST_LIST), max_length=MOST_LIST + 1)
        if len(raw) > MOST_LIST or not decompressor.eof or decompressor.unused_data:
            raise FormatError(
                f"{path.name} is cut short, or holds more than a list of {MOST_LIST:,} bytes"
            )
        words = raw.decode().split("\n")
    except (lzma.LZMAError, UnicodeDecodeError) as error:
        raise FormatError(f"{path.name} is no list of words: {str(error)[:100]}") from None
    if len(words) != count or len(set(words)) != count:
        raise FormatError(
            f"{path.name} holds {len(set(words)):,} different words on {len(words):,} lines, not {count:,}"
        )
    return words


@dataclass(frozen=True)
class Vocabulary:
    """The words of a table: ``words`` by id, ``ids_of`` them; keys stay mapped, a list is held.

    >>> Vocabulary.of(["tea", "rum"]).find("rum"), Vocabulary.of(["tea", "rum"]).find("ale")
    (1, None)
    """

    words: Sequence[str] | Keys
    ids_of: dict[str, int] | Keys

    @classmethod
    def of(cls, words: Sequence[str] | Keys) -> Vocabulary:
        """Index a list of words; keys are indexed already."""
        return cls(
            words,
            words if isinstance(words, Keys) else {word: id_ for id_, word in enumerate(words)},
        )

    def find(self, word: str) -> int | None:
        """Return the id of a word, or None."""
        if not isinstance(self.ids_of, Keys):
            return self.ids_of.get(word)
        return int(self.ids_of.find([word])[0]) if self.ids_of.has(word) else None


def vocabulary_of(table: PackedTable, words: Sequence[str] | None) -> Vocabulary:
    """Return the words of a table to be written: its keys, or a list of one word for each row."""
    if words is None:
        if table.keys is None:
            raise ArgumentError(
                "the table has no keys: give words=, one for each row, or save it with fb.save(..., keys=words)"
            )
        return Vocabulary.of(table.keys)
    if len(words) != table.rows:
        raise ArgumentError(
            f"{len(words):,} words were given for {table.rows:,} rows: give one for each"
        )
    _joined(words)
    return Vocabulary.of(words)


def write_bundle(
    folder: Path,
    name: str,
    said: dict[str, Any],
    table: PackedTable,
    words: Sequence[str] | None,
    weights: dict[str, NDArray[Any]],  # what encode_weights returns
    tokenizer: str | None = None,
) -> None:
    """Write the files of a model into a folder, made where there is none; ``name`` is its JSON file, which says ``said``."""
    try:
        text = json.dumps(
            said | {"featherbed": __version__}, ensure_ascii=False, indent=1, allow_nan=False
        )
        if len(text) > MOST_JSON:
            raise ValueError(f"{len(text):,} letters are more than {MOST_JSON:,}")
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"about must be plain JSON: {str(error)[:100]}") from None
    folder.mkdir(parents=True, exist_ok=True)
    for old in (CLASSIFIER, LANGUAGE, LIST, TOKENIZER):
        (folder / old).unlink(missing_ok=True)
    keys = table.keys if words is None and tokenizer is None else None
    PackedTable(
        table.bands, table.dim, padding_idx=table.padding_idx, keys=keys, made_by=table.made_by
    ).save(folder / WORDS)
    if words is not None:
        write_words(folder / LIST, words)
    write_arrays(folder / MODEL, "weights", weights)
    for file, content in ((TOKENIZER, tokenizer), (name, text + "\n")):
        if content is not None:
            with (
                replacing(folder / file) as descriptor,
                os.fdopen(os.dup(descriptor), "w", encoding="utf-8") as opened,
            ):
                opened.write(content)


def read_said(folder: Path, name: str, what: str, version: int, hint: str) -> Reader:
    """Return what the JSON file of a folder says, its version checked, or say why there is none."""
    path = folder / name
    if not folder.is_dir():
        raise MissingFileError(
            f"{folder}: no such folder" if not folder.exists() else f"{folder} is no folder"
        )
    if not path.is_file():
        raise MissingFileError(f"{folder} holds no {what} ({name} is missing): {hint}")
    try:
        found = Reader(json.loads(read_text(path)), name)
    except (ValueError, RecursionError) as error:
        raise FormatError(
            str(error)
            if isinstance(error, FormatError)
            else f"{name} is not JSON: {str(error)[:100]}"
        ) from None
    given = found.raw(name.removesuffix(".json"))
    if isinstance(given, bool) or given != version:
        raise FormatError(
            f"{name}: version {str(given)[:40]} is not known here, this featherbed reads version {version}"
        )
    if not isinstance(found.raw("about"), dict):
        raise FormatError(
            f"{name}.about must be an object, got {type(found.raw('about')).__name__}"
        )
    return found


def read_text(path: Path) -> str:
    """Return a small text file, its size checked first."""
    if path.stat().st_size > MOST_JSON:
        raise FormatError(
            f"{path.name} has {path.stat().st_size:,} bytes, {MOST_JSON:,} is the most"
        )
    return path.read_bytes().decode("utf-8")


def read_table(
    folder: Path, rows: int, dim: int, kept: str
) -> tuple[PackedTable, Vocabulary | None]:
    """Open the table of words and its vocabulary, ``kept`` as "keys" of the table, in a "list", or by a "tokenizer"."""
    try:
        table = load(folder / WORDS)
    except FormatError as error:
        raise FormatError(f"{WORDS}: {error}") from None
    if (table.rows, table.dim, table.keys is not None) != (rows, dim, kept == "keys"):
        keys = "without" if table.keys is None else "with"
        raise FormatError(
            f"{WORDS} holds {table.rows} x {table.dim} {keys} keys, the model has {rows} words of width {dim}"
        )
    if kept == "list":
        return table, Vocabulary.of(read_words(folder / LIST, rows))
    return table, None if table.keys is None else Vocabulary.of(table.keys)


def sizes_of(listed: Reader, name: str, most: int, count: int = 64) -> tuple[int, ...]:
    """Return a list of whole numbers from 1 to ``most`` in a JSON file, at most ``count`` of them."""
    value = listed.raw(name)
    sound = isinstance(value, list) and len(value) <= count
    if not sound or any(
        isinstance(x, bool) or not isinstance(x, int) or not 1 <= x <= most for x in value
    ):
        raise FormatError(
            f"{listed.where}.{name} must be a list of whole numbers from 1 to {most}, got {str(value)[:40]}"
        )
    return tuple(value)


def bytes_of(folder: str | Path) -> int:
    """Return the bytes of all files that answering reads: table, words, weights, tokenizer, JSON.

    >>> bytes_of(getfixture("tmp_path"))
    0
    """
    names = (CLASSIFIER, LANGUAGE, WORDS, LIST, MODEL, TOKENIZER)
    return sum(
        (Path(folder) / name).stat().st_size for name in names if (Path(folder) / name).is_file()
    )
