"""Files of stored models: a description, the packed word table, the other weights, the words.

The JSON description is removed first and written last: a folder without it holds no model. The
words are the keys of the packed table, or are listed in id order in ``words.txt.xz``, one per line:
keys take 19 bytes per word of English news and are memory-mapped, the list takes 3 and is read
whole.
"""

from __future__ import annotations

import json
import lzma
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import ArgumentError, FormatError, MissingFileError
from featherbed.files import write_file
from featherbed.packed import (
    ARRAYS_VERSION,
    FieldReader,
    Floats,
    Keys,
    Matrix,
    PackedTable,
    Vocabulary,
    load,
    read_arrays,
    write_arrays,
)
from featherbed.version import __version__

WORDS, MODEL = "words.safetensors", "model.safetensors"
LIST, TOKENIZER = "words.txt.xz", "tokenizer.json"
CLASSIFIER, LANGUAGE = "classifier.json", "language.json"
SEQUENCES = "sequences.json"
MARKERS = (CLASSIFIER, LANGUAGE, SEQUENCES, "recommender.json")  # one in every stored model
PRECISIONS = ("float32", "float16", "int8")
VOCABULARIES = ("keys", "list", "tokenizer")  # where words are stored
MAX_JSON = 1 << 24  # bytes, of a tokenizer too
MAX_LIST = 1 << 26  # bytes of words
MAX_MEMORY = 1 << 25  # bytes for decompression
_DICTIONARY = 1 << 23
_DTYPES = {"float32": ("F32",), "float16": ("F16",), "int8": ("U8",)}

Arrays = Mapping[str, NDArray[np.floating]]
Shapes = Mapping[str, tuple[int, ...]]


def encode_weights(arrays: Arrays, precision: str) -> dict[str, NDArray[Any]]:
    """Return the flat arrays that store matrices in a precision; vectors are float32.

    int8 matrices have a scale per row: x = scale * (code - 127.5).

    >>> sorted(encode_weights({"out": np.eye(2), "bias": np.zeros(2)}, "int8"))
    ['bias', 'out', 'out.scale']
    """
    if precision not in PRECISIONS:
        raise ArgumentError(f"weights={precision!r}: use one of {', '.join(PRECISIONS)}")
    stored: dict[str, NDArray[Any]] = {}
    for name, array in arrays.items():
        values = np.asarray(array, dtype=np.float32)
        if not np.isfinite(values).all():
            raise ArgumentError(
                f"the weights {name!r} hold values that are not finite: train again with a lower "
                "learning rate"
            )
        if values.ndim == 1:
            stored[name] = values
            continue
        matrix = Matrix.encode(values, precision, scale_kind="float16")
        stored[name] = matrix.data.reshape(-1)
        if matrix.scale is not None:
            stored[f"{name}.scale"] = matrix.scale
    return stored


def decode_weights(path: Path, shapes: Shapes, precision: str) -> dict[str, Floats]:
    """Read weights of known shapes as float32; anything else in the file is a FormatError."""
    expected: dict[str, tuple[str, ...]] = {}
    for name, shape in shapes.items():
        expected[name] = ("F32",) if len(shape) == 1 else _DTYPES[precision]
        if len(shape) == 2 and precision == "int8":
            expected[f"{name}.scale"] = ("F16", "F32")
    stored = read_arrays(path, "weights", expected)
    decoded: dict[str, Floats] = {}
    for name, shape in shapes.items():
        data, scale = stored[name], stored.get(f"{name}.scale")
        if len(data) != math.prod(shape) or (scale is not None and len(scale) != shape[0]):
            size = " x ".join(map(str, shape))
            raise FormatError(f"{path.name}: {name!r} must hold {size} numbers, it has {len(data)}")
        if len(shape) == 1:
            decoded[name] = data.astype(np.float32)
        else:
            matrix = Matrix(precision, (shape[0], shape[1]), data.reshape(shape), scale)
            decoded[name] = matrix.dense()
        if not np.isfinite(decoded[name]).all():
            raise FormatError(f"{path.name}: {name!r} holds values that are not finite")
    return decoded


def write_words(path: Path, words: Sequence[str]) -> None:
    """Write words in id order, one per line, compressed.

    >>> path = getfixture("tmp_path") / "words.txt.xz"
    >>> write_words(path, ["<pad>", "<unk>", "the"])
    >>> read_words(path, 3)
    ['<pad>', '<unk>', 'the']
    """
    preset = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}
    filters = [preset | {"dict_size": _DICTIONARY, "lc": 4, "pb": 0}]
    packed = lzma.compress(
        _join_words(words), format=lzma.FORMAT_XZ, check=lzma.CHECK_CRC32, filters=filters
    )
    write_file(path, packed)


def _join_words(words: Sequence[str]) -> bytes:
    """Return words as lines of UTF-8; raise ``ArgumentError`` for one that cannot be a line."""
    for word in words:
        if not word or "\n" in word:
            raise ArgumentError(
                f"the word {word!r} cannot be a line: words are not empty, without line breaks"
            )
    if len(set(words)) < len(words):
        raise ArgumentError(
            f"{len(words) - len(set(words))} words occur twice: every id has a word of its own"
        )
    try:
        raw = "\n".join(words).encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(f"a word cannot be written as UTF-8: {str(error)[:100]}") from None
    if len(raw) > MAX_LIST:
        raise ArgumentError(
            f"{len(words):,} words have {len(raw):,} bytes, the maximum is {MAX_LIST:,}: store "
            "them as keys"
        )
    return raw


def read_words(path: Path, count: int) -> list[str]:
    """Return the ``count`` words of a list; a truncated, too long or ambiguous list raises."""
    if not path.is_file():
        raise MissingFileError(f"{path}: no such file")
    decompressor = lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=MAX_MEMORY)
    try:
        with path.open("rb") as file:
            raw = decompressor.decompress(file.read(MAX_LIST), max_length=MAX_LIST + 1)
        if len(raw) > MAX_LIST or not decompressor.eof or decompressor.unused_data:
            raise FormatError(f"{path.name} is truncated, or holds more than {MAX_LIST:,} bytes")
        words = raw.decode().split("\n")
    except (lzma.LZMAError, UnicodeDecodeError) as error:
        raise FormatError(f"{path.name} is not a list of words: {str(error)[:100]}") from None
    if len(words) != count or len(set(words)) != count:
        raise FormatError(
            f"{path.name} holds {len(set(words)):,} different words on {len(words):,} lines, "
            f"not {count:,}"
        )
    return words


def check_words(table: PackedTable, words: Sequence[str] | None) -> Sequence[str] | Keys:
    """Return the words of a table to be stored: its keys, or a list of one word for each row."""
    if words is None:
        if table.keys is None:
            raise ArgumentError(
                "the table has no keys: give words=, one for each row, or save it with "
                "fb.save(..., keys=words)"
            )
        return table.keys
    if len(words) != table.rows:
        raise ArgumentError(f"{len(words):,} words for {table.rows:,} rows: give one for each")
    _join_words(words)
    return words


def write_bundle(
    folder: Path,
    name: str,
    description: dict[str, Any],
    table: PackedTable,
    words: Sequence[str] | None,
    weights: dict[str, NDArray[Any]],  # as encode_weights returns them
    tokenizer: str | None = None,
) -> None:
    """Write the files of a model; ``name`` is the file of its JSON description."""
    try:
        text = json.dumps(
            description | {"featherbed": __version__}, ensure_ascii=False, indent=1, allow_nan=False
        )
        if len(text) > MAX_JSON:
            raise ValueError(f"{len(text):,} characters are more than {MAX_JSON:,}")
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"about must be plain JSON: {str(error)[:100]}") from None
    folder.mkdir(parents=True, exist_ok=True)
    for old in (CLASSIFIER, LANGUAGE, LIST, TOKENIZER):
        (folder / old).unlink(missing_ok=True)
    keys = table.keys if words is None and tokenizer is None else None
    table.replace(keys=keys).save(folder / WORDS)
    if words is not None:
        write_words(folder / LIST, words)
    write_arrays(folder / MODEL, {"weights": ARRAYS_VERSION}, weights)
    for file, content in ((TOKENIZER, tokenizer), (name, text + "\n")):
        if content is not None:
            write_file(folder / file, content)


def read_description(folder: Path, name: str, kind: str, version: int, command: str) -> FieldReader:
    """Return the JSON description of the model in a folder, its version checked.

    ``kind`` and ``command`` name the model and the command that writes one, for errors.
    """
    path = folder / name
    if not folder.is_dir():
        raise MissingFileError(
            f"{folder}: no such folder" if not folder.exists() else f"{folder} is not a folder"
        )
    if not path.is_file():
        raise MissingFileError(f"{folder} holds no {kind} ({name} is missing): {command}")
    try:
        found = FieldReader(json.loads(read_limited(path)), name)
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{name} is not JSON: {str(error)[:100]}") from None
    given = found.raw(name.removesuffix(".json"))
    if isinstance(given, bool) or given != version:
        raise FormatError(
            f"{name}: version {str(given)[:40]} is not known here, this featherbed reads version "
            f"{version}"
        )
    if not isinstance(found.raw("about"), dict):
        raise FormatError(
            f"{name}.about must be an object, got {type(found.raw('about')).__name__}"
        )
    return found


def read_limited(path: Path) -> str:
    """Return a text file of limited size."""
    if path.stat().st_size > MAX_JSON:
        raise FormatError(
            f"{path.name} has {path.stat().st_size:,} bytes, the maximum is {MAX_JSON:,}"
        )
    return path.read_bytes().decode("utf-8")


def read_table(
    folder: Path, rows: int, dim: int, vocabulary: str
) -> tuple[PackedTable, Vocabulary | None]:
    """Open the word table and its vocabulary, stored as one of ``VOCABULARIES``."""
    try:
        table = load(folder / WORDS)
    except FormatError as error:
        raise FormatError(f"{WORDS}: {error}") from None
    if (table.rows, table.dim, table.keys is not None) != (rows, dim, vocabulary == "keys"):
        keys = "without" if table.keys is None else "with"
        raise FormatError(
            f"{WORDS} holds {table.rows} x {table.dim} {keys} keys, the model has {rows} words of "
            f"width {dim}"
        )
    if vocabulary == "list":
        return table, Vocabulary(read_words(folder / LIST, rows))
    return table, None if table.keys is None else Vocabulary(table.keys)


def read_sizes(
    description: FieldReader, name: str, maximum: int, count: int = 64
) -> tuple[int, ...]:
    """Return a list of at most ``count`` integers from 1 to ``maximum`` in a description."""
    value = description.raw(name)
    if (
        not isinstance(value, list)
        or len(value) > count
        or any(
            isinstance(x, bool) or not isinstance(x, int) or not 1 <= x <= maximum for x in value
        )
    ):
        raise FormatError(
            f"{description.where}.{name} must be a list of whole numbers from 1 to {maximum}, "
            f"got {str(value)[:40]}"
        )
    return tuple(value)


def stored_bytes(folder: str | Path) -> int:
    """Return the bytes of all files of a stored model: table, words, weights, description.

    >>> stored_bytes(getfixture("tmp_path"))
    0
    """
    names = (CLASSIFIER, LANGUAGE, WORDS, LIST, MODEL, TOKENIZER)
    paths = [Path(folder) / name for name in names]
    return sum(path.stat().st_size for path in paths if path.is_file())
