"""Embedding matrices of numpy, safetensors, torch, word2vec, GloVe and Parquet files, mapped.

Data that cannot be mapped in place (text, compressed members, Parquet) is written block by block to
a nameless file in the temporary folder and mapped there; ``TMPDIR`` sets that folder.
"""

from __future__ import annotations

import codecs
import gzip
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from featherbed.errors import ArgumentError, DataError
from featherbed.io.vectors.arrays import read_npy, read_npz, read_safetensors, read_torch
from featherbed.io.vectors.reading import Matrixlike, Parts, opened
from featherbed.io.vectors.texts import SIZES, read_binary, read_parquet, read_text

ENDINGS = dict.fromkeys((".pt", ".pth", ".ckpt"), "torch") | {
    f".{kind}": kind for kind in ("npy", "npz", "safetensors", "parquet")
}
BEGINNINGS = {b"\x93NUMPY": "npy", b"PK\x03\x04": "zip", b"PAR1": "parquet", b"\x80": "torch"}
ACCEPTED = (
    ".npy, .npz, .safetensors, torch checkpoints, word2vec text and binary, GloVe text, .parquet"
)


@dataclass
class Source:
    """A matrix (V x d), the names of its rows if the file has them, and the name of the array."""

    matrix: Matrixlike
    keys: list[str] | None
    name: str


def read_matrix(path: str | Path, *, array: str | None = None) -> Source:
    """Open the embedding matrix of a file, memory-mapped.

    ``array`` names one if the file holds several. Text and word2vec files may be gzipped; of rows
    with the same key the first is kept; keys need not be UTF-8 (``\\xff``).

    >>> path = getfixture("tmp_path") / "glove.txt"
    >>> _ = path.write_text("the 0.5 1.0\\ncat 0.25 2.0\\n")
    >>> source = read_matrix(path)
    >>> source.matrix.shape, source.keys, source.matrix[1:2].tolist()
    ((2, 2), ['the', 'cat'], [[0.25, 2.0]])
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: name a file in it")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    if not path.stat().st_size:
        raise DataError(f"{path.name} is empty, perhaps a failed download: download it again")
    kind = _kind(path)
    if kind in ("npy", "text", "binary") and array is not None:
        raise ArgumentError(
            f"array={array!r} was given, but {path.name} holds one matrix without a name: "
            "leave it out"
        )
    return Source(*_READERS[kind](path, array))


def _kind(path: Path) -> str:
    """Return the format of a file by its extension, else by its first bytes."""
    if path.suffix.lower() in ENDINGS:
        return ENDINGS[path.suffix.lower()]
    with opened(path) as file:
        head, gzipped = file.read(1 << 16), isinstance(file, gzip.GzipFile)
    kinds = (kind for beginning, kind in BEGINNINGS.items() if head.startswith(beginning))
    kind = next(kinds, None)
    kind = "safetensors" if head[5:9] == b"\0\0\0{" else kind
    if kind and gzipped:
        raise DataError(
            f"{path.name} is a gzipped {kind} file, "
            "only text and word2vec files are read gzipped: unpack it first"
        )
    if kind == "zip":
        return "torch" if b"/data.pkl" in head else "npz"  # torch writes its pickle first
    sizes = re.match(SIZES, head)
    if not kind and sizes:
        first = head[sizes.end() :].partition(b" ")[2][: 4 * int(sizes[2])]  # if it were binary
        kind = "text" if _is_text(first) else "binary"
    if not kind and b"\0" in head:
        raise DataError(
            f"{path.name} has an unknown format (it begins with {head[:8]!r}): give {ACCEPTED}"
        )
    return kind or "text"


def _is_text(data: bytes) -> bool:
    """Return whether bytes are UTF-8 without control characters; the last one may be incomplete."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(data)
    except UnicodeDecodeError:
        return False
    return not re.search(r"[\x00-\x08\x0e-\x1f]", text)


_READERS: dict[str, Callable[[Path, str | None], Parts]] = {
    "npy": read_npy,
    "npz": read_npz,
    "safetensors": read_safetensors,
    "torch": read_torch,
    "text": read_text,
    "binary": read_binary,
    "parquet": read_parquet,
}
