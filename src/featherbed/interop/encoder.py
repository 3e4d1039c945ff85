"""Static sentence encoders: the vector of a text is the mean of the rows of its tokens.

A folder holds tokenizer.json, config.json and model.safetensors, which is a packed table or the
arrays of model2vec (``embeddings``, and for some ``weights`` and ``mapping``). Encoding needs numpy
and tokenizers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.codecs.blocks import compress_blocks
from featherbed.codecs.codec import ProgressCallback, no_progress
from featherbed.codecs.compress import compress
from featherbed.codecs.rows import WeightedRows
from featherbed.codecs.target import Target
from featherbed.errors import ArgumentError, DataError, FormatError
from featherbed.files import remove_stale, temporary_folder
from featherbed.io.texts import open_tokenizer
from featherbed.io.vectors import safetensors_header
from featherbed.packed.band import Band, Hash, Identity, Members
from featherbed.packed.file import load, save
from featherbed.packed.matrix import Matrix
from featherbed.packed.table import PackedTable

KIND = "featherbed-static"  # model_type of config.json
KINDS = (KIND, "model2vec")
MAX_LENGTH = 512  # tokens of a text that count
BATCH = 1024  # texts encoded at once
ZEROS = 1200  # bytes of a band of zeros besides its bitmap, at most


class Encoder:
    """Encodes texts by a static encoder: mean of the rows of their tokens, of length 1.

    ``folder`` was written by ``fb.distill_model``, by ``featherbed compress``, or by model2vec.
    Texts without a known token have a vector of zeros.

    >>> from tokenizers import Tokenizer, models, pre_tokenizers
    >>> tokenizer = Tokenizer(models.WordLevel({"good": 0, "film": 1, "[UNK]": 2}, "[UNK]"))
    >>> tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    >>> folder = getfixture("tmp_path") / "static"
    >>> _ = write_encoder(folder, np.eye(3), tokenizer.to_str())
    >>> Encoder(folder).encode(["good film", "a film"]).astype(float).round(2).tolist()
    [[0.71, 0.71, 0.0], [0.0, 1.0, 0.0]]
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.config = read_static_config(self.folder)
        self.tokenizer = open_tokenizer(read_tokenizer(self.folder), own=False)
        self.table = read_table(self.folder)
        unknown = json.loads(self.tokenizer.to_str())["model"].get("unk_token")
        self._unknown = self.tokenizer.token_to_id(unknown) if unknown else None
        last = max(self.tokenizer.get_vocab().values())
        if last >= len(self.table):
            raise FormatError(
                f"{self.folder}: the tokenizer has token {last}, the table {len(self.table)} rows"
            )

    @property
    def dim(self) -> int:
        """Width of the vectors."""
        return self.table.dim

    def encode(self, texts: str | Sequence[str]) -> NDArray[np.float32]:  # -> [n, d], or [d]
        """Return the vectors of texts, or of one text."""
        if isinstance(texts, str):
            vector: NDArray[np.float32] = self.encode([texts])[0]
            return vector
        if not isinstance(texts, Sequence | np.ndarray) or isinstance(texts, bytes):
            raise ArgumentError(f"texts={texts!r:.40}: give a string or a list of strings")
        parts = [np.zeros((0, self.dim), dtype=np.float32)]
        parts += [
            self._encode(texts[start : start + BATCH]) for start in range(0, len(texts), BATCH)
        ]
        return np.concatenate(parts)

    def _encode(self, texts: Sequence[str]) -> NDArray[np.float32]:  # -> [n, d]
        return self.mean_rows(self.token_ids(texts))

    def token_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of the known tokens of every text."""
        most = self.config.get("max_length", MAX_LENGTH)
        try:
            found = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError:  # of tokenizers, for bytes, numbers and halves of surrogate pairs
            wrong = next(one for one in texts if not is_text(one))
            raise ArgumentError(f"{wrong!r:.40} is no text: give strings of Unicode") from None
        return [[one for one in text.ids[:most] if one != self._unknown] for text in found]

    def mean_rows(self, ids: Sequence[Sequence[int]]) -> NDArray[np.float32]:  # -> [n, d]
        """Return the means of the rows of tokens, of length 1 unless config.json says otherwise."""
        starts = np.cumsum([0, *map(len, ids)])[:-1]
        flat = np.array([one for text in ids for one in text], dtype=np.int64)
        rows = self.table.bag(flat, starts, None, mode="mean").astype(np.float32, copy=False)
        if not self.config.get("normalize", True):
            return rows
        norms = np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
        return np.asarray(rows / norms, dtype=np.float32)


def is_text(text: Any) -> bool:
    """Whether an object is a string that can be encoded as UTF-8."""
    try:
        return isinstance(text, str) and text.encode() is not None
    except UnicodeEncodeError:
        return False


def is_static(folder: Path) -> bool:
    """Whether a folder holds a static encoder, of featherbed or of model2vec."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    if not isinstance(config, dict):
        return False
    if "model_type" in config:
        return config["model_type"] in KINDS
    file = folder / "model.safetensors"  # model2vec names its type in distilled models only
    return file.is_file() and "embeddings" in safetensors_header(file)[0]


def read_static_config(folder: Path) -> dict[str, Any]:
    """Return config.json of a static encoder."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    if not is_static(folder):
        raise DataError(
            f"{folder} holds no static encoder: give a folder that `featherbed distill` or "
            "model2vec wrote"
        )
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    most = config.get("max_length", MAX_LENGTH)
    if isinstance(most, bool) or not isinstance(most, int | None) or (most or 1) < 1:
        raise FormatError(f"{folder}: config.json: max_length={most!r} is no number of tokens")
    return config


def read_tokenizer(folder: Path) -> str:
    """Return the text of tokenizer.json."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise DataError(f"{folder} holds no tokenizer.json: fetch it again")
    return file.read_text(encoding="utf-8")


def read_table(folder: Path) -> PackedTable:
    """Return the table of a static encoder; arrays of model2vec become rows times their weights."""
    file = folder / "model.safetensors"
    if not file.is_file():
        raise DataError(f"{folder} holds no model.safetensors: fetch it again")
    header, _ = safetensors_header(file)
    if "featherbed" in (header.get("__metadata__") or {}):
        return load(file)
    return exact_table(dense_rows(folder))


def exact_table(rows: NDArray[np.float32]) -> PackedTable:  # [V, d]
    """Return a table of float32 rows."""
    atoms = Matrix.encode(rows, "float32")
    return PackedTable([Band(len(rows), Identity(), dictionary=atoms)], rows.shape[1])


def dense_rows(folder: Path) -> NDArray[np.float32]:  # -> [V, d]
    """Return the rows of a model2vec folder, one for each token."""
    from safetensors.numpy import load_file

    arrays = load_file(folder / "model.safetensors")
    if arrays.get("embeddings", np.zeros(0)).ndim != 2:
        names = ", ".join(arrays)[:100]
        raise DataError(f"{folder}: model.safetensors holds {names}: a matrix embeddings is needed")
    rows: NDArray[np.float32] = arrays["embeddings"].astype(np.float32)
    try:
        rows = rows[arrays["mapping"]] if "mapping" in arrays else rows
        return rows * arrays["weights"][:, None].astype(np.float32) if "weights" in arrays else rows
    except (IndexError, ValueError):
        raise DataError(f"{folder}: embeddings, weights and mapping do not fit together") from None


def write_encoder(
    out: Path,
    rows: NDArray[Any],
    tokenizer: str,
    config: dict[str, Any] | None = None,
    **settings: Any,
) -> PackedTable:
    """Write a static encoder of dense rows to a new folder; return its table.

    ``settings`` are those of ``fb.compress``; without any, rows are float32. The method int8 has a
    scale per row and writes the arrays of model2vec, which reads them; others write a packed table.
    """
    if out.exists() or not out.parent.is_dir():
        raise ArgumentError(f"{out} cannot be written: name a new folder in one that exists")
    rows = np.asarray(rows, dtype=np.float32)
    table = compress_used(rows, **settings) if settings else exact_table(rows)
    readable = settings.get("method") in ("int8", "float32") or not settings
    fields: dict[str, Any] = {"normalize": True, "max_length": MAX_LENGTH, "hidden_dim": table.dim}
    fields = fields | (config or {}) | {"model_type": "model2vec" if readable else KIND}
    remove_stale(out.parent)
    with temporary_folder(out.parent) as workplace:
        new = workplace / "new"
        new.mkdir()
        if readable:
            _write_model2vec(new, rows, int8=bool(settings))
            fields["embedding_dtype"] = "int8" if settings else "float32"
        else:
            save(table, new / "model.safetensors")
        (new / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
        (new / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
        new.rename(out)
    return table


def compress_used(
    rows: NDArray[np.float32],  # [V, d]
    *,
    ratio: float | None = None,
    budget: int | str | None = None,
    quality: str | None = None,
    weights: Any = None,
    method: str = "auto",
    **settings: Any,
) -> PackedTable:
    """Return a compressed table in which rows of zeros (unused tokens) take one bit each.

    ``method="blocks"`` is that of ``compress_blocks``, which turns the rows; for the others see
    ``fb.compress``.

    >>> rows = np.random.default_rng(0).standard_normal((2000, 16)).astype(np.float32)
    >>> rows[100:1100] = 0
    >>> table = compress_used(rows, ratio=10, method="int4")
    >>> len(table), bool(table[[100, 1099]].any()), table.nbytes <= rows.nbytes / 10
    (2000, False, True)
    """
    used = rows.any(axis=1)
    unused = Members.of(np.flatnonzero(~used), len(rows))
    limit = Target.of(budget, ratio, quality, rows.nbytes).budget
    reserve = unused.bitmap.nbytes + unused.totals.nbytes + ZEROS
    shares = None if weights is None else WeightedRows(rows, weights).weights
    if method != "blocks" and limit is not None and (~used).mean() * limit < reserve:
        # few rows of zeros: methods are compared by an error that those have too
        aim: dict[str, Any] = {"ratio": ratio, "budget": budget, "method": method}
        aim |= {"measure": "recall" if used.all() else "error"}
        return compress(rows, **aim, weights=shares, **settings)
    limit = limit if limit is None or used.all() else limit - reserve
    shares = None if shares is None else shares[used]
    if method == "blocks":
        if limit is None:
            raise ArgumentError("blocks: give a ratio or a budget instead of a quality")
        given = {name: settings[name] for name in ("generator", "tell") if name in settings}
        table = compress_blocks(rows[used], limit, shares, **given)
    else:
        aim = {"budget": limit, "quality": quality, "method": method}
        table = compress(rows[used], **aim, weights=shares, **settings)
    if used.all():
        return table
    zero = Matrix.encode(np.zeros((1, table.dim)), "float16")
    band = Band(int((~used).sum()), Hash(0, 1), dictionary=zero, members=unused)
    # bands hold positions among the rows that no earlier band holds: the others stay as they are
    whole = PackedTable([band, *table.bands], table.dim, made_by=table.made_by)
    whole.report = table.report
    return whole


def _write_model2vec(folder: Path, rows: NDArray[np.float32], *, int8: bool) -> None:
    from safetensors.numpy import save_file

    arrays: dict[str, NDArray[Any]] = {"embeddings": rows}
    if int8:
        scales = np.abs(rows).max(axis=1) / 127
        levels = np.rint(rows / np.where(scales > 0, scales, 1)[:, None]).astype(np.int8)
        arrays = {"embeddings": levels, "weights": scales.astype(np.float32)}
    save_file(arrays, folder / "model.safetensors")


def compress_encoder(
    folder: str | Path, out: str | Path, *, tell: ProgressCallback = no_progress, **settings: Any
) -> PackedTable:
    """Compress a static encoder, such as a model2vec folder, into a new folder.

    ``settings`` are those of ``fb.compress``. With the method int8 the result is read by model2vec
    as well, otherwise by ``fb.Encoder``.
    """
    source, target = Path(folder), Path(out)
    config = read_static_config(source)
    header, _ = safetensors_header(source / "model.safetensors")
    if "featherbed" in (header.get("__metadata__") or {}):
        raise ArgumentError(f"{source} is compressed already: start from the original")
    table = write_encoder(
        target, dense_rows(source), read_tokenizer(source), config, **settings, tell=tell
    )
    for name in ("README.md", "modules.json"):
        if (source / name).is_file() and config.get("model_type") != KIND:
            shutil.copyfile(source / name, target / name)
    return table
