"""The served files: packed tables and model folders, each under its name, replaced when they
change."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from featherbed.apps.classifier.serve import Classifier
from featherbed.apps.language.serve import LanguageModel
from featherbed.apps.recommender.serve import Recommender
from featherbed.apps.sequences.serve import SequenceRecommender
from featherbed.errors import ArgumentError, FeatherbedError, FormatError, MissingFileError
from featherbed.io.texts import tokenize
from featherbed.packed import Keys, PackedTable, load, metadata_of, open_file
from featherbed.packed.collection import read_collection
from featherbed.server.explore import explore_data

RESERVED = frozenset(
    {"tables", "health", "ready", "metrics", "v1", "openapi.json", "page", "static"}
)
WARM_ROWS = 8_192  # enough for compiled loops to be used
ATTEMPTS = 5  # at a folder whose files change while they are opened
Signature = tuple[tuple[str, int, int, int], ...]


def open_encoder(folder: Path) -> Any:
    """Open a static encoder, whose codecs no other model needs."""
    from featherbed.interop.encoder import Encoder

    return Encoder(folder)


FOLDERS: dict[str, tuple[str, Callable[[Path], Any], str]] = {  # description: kind, open, table
    "recommender.json": ("recommender", Recommender.open, "items"),
    "sequences.json": ("sequence model", SequenceRecommender.open, "items"),
    "classifier.json": ("classifier", Classifier.open, "table"),
    "language.json": ("language model", LanguageModel.open, "table"),
    "tokenizer.json": ("static encoder", open_encoder, "table"),
}


@dataclass(frozen=True)
class ServedModel:
    """An opened table or model; requests that began with it also end with it."""

    name: str
    kind: str  # table, collection, or one of FOLDERS
    path: Path
    model: Any
    table: PackedTable | None  # rows of items or words; a collection has columns instead
    signature: Signature

    @classmethod
    def open(cls, name: str, path: Path) -> ServedModel:
        """Open a packed file, or the folder of a model; errors name the path."""
        for _ in range(ATTEMPTS):
            before = file_signature(path)
            try:
                kind, model, table = _open(path)
            except FeatherbedError:
                if file_signature(path) == before:
                    raise
                continue
            if file_signature(path) == before:
                for part in model.tables if table is None else [table]:
                    warm_up(part)
                return cls(name, kind, path, model, table, before)
        raise FormatError(f"{path} changes while it is read: replace files in one step")

    def describe(self) -> dict[str, Any]:
        """Return name, kind, shape, method and bytes; of a collection, those of its columns."""
        table, named = self.table, {"name": self.name, "kind": self.kind}
        if table is None:
            columns = [
                {"name": c.name, "rows": c.rows, "dim": dim, "keys": c.keys is not None}
                for c, dim in zip(self.model.columns, self.model.dims, strict=True)
            ]
            rows, dim = sum(c["rows"] for c in columns), sum(self.model.dims)
            return named | {
                "rows": rows,
                "dim": dim,
                "bytes": self.model.nbytes,
                "columns": columns,
            }
        return named | {
            "rows": table.rows,
            "dim": table.dim,
            "method": table.made_by.get("method") or table.made_by.get("table"),
            "bytes": table.nbytes,
            "keys": table.keys is not None,
        }

    @property
    def rows_table(self) -> PackedTable:
        """The table of anything but a collection."""
        assert self.table is not None, "a collection has no single table"
        return self.table

    @cached_property
    def points(self) -> bytes:
        """The data of the page as JSON, computed when it is first asked for."""
        counts = self.model.popularity() if self.kind == "recommender" else None
        titles = getattr(self.model, "titles", None)
        return orjson.dumps(explore_data(self.rows_table, counts=counts, titles=titles))

    def text_ids(self, text: str) -> list[int]:
        """Return the ids of the known words of a text, in order."""
        if self.kind == "static encoder":
            ids: list[int] = self.model.token_ids([text])[0]
            return ids
        if self.kind == "classifier":
            return [int(id_) for id_ in self.model.encoder.ids(text)]
        if self.kind == "language model":
            words = self.model.vocabulary.find
        elif self.table is None or self.table.keys is None:
            raise ArgumentError(f"{self.name} has no keys, so texts have no rows: send token ids")
        else:
            words = self._key_id
        found = (words(word) for word in tokenize(text))
        return [id_ for id_ in found if id_ is not None]

    def _key_id(self, word: str) -> int | None:
        return int(self.rows_table.ids_of(word)) if word in self.rows_table else None


def file_signature(path: Path) -> Signature:
    """Return name, inode, size and time of a file, or of every file of a folder."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    found = []
    for file in files:
        try:
            stat = file.stat()
        except FileNotFoundError:  # replaced at this moment
            continue
        found.append((file.name, stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return tuple(found)


def _open(path: Path) -> tuple[str, Any, PackedTable | None]:
    if not path.is_dir():
        found = open_file(path)
        metadata = metadata_of(found[0])
        if isinstance(metadata, dict) and isinstance(metadata.get("columns"), list):
            return "collection", read_collection(*found), None
        table = load(path)
        return "table", table, table
    for description, (kind, open_folder, attribute) in FOLDERS.items():
        if (path / description).exists():
            model = open_folder(path)
            return kind, model, with_words(getattr(model, attribute), model)
    raise MissingFileError(
        f"{path} holds no model: the folder of a recommender, sequence model, classifier, "
        f"language model or static encoder has one of {', '.join(FOLDERS)}"
    )


def with_words(table: PackedTable, model: Any) -> PackedTable:
    """Return a table with the words or tokens of its model as keys, if it has none of its own."""
    if table.keys is not None:
        return table
    if (vocabulary := getattr(model, "vocabulary", None)) is not None:
        return table.replace(keys=Keys.of(vocabulary.keys))
    tokenizer = getattr(getattr(model, "encoder", model), "tokenizer", None)
    if tokenizer is None:
        return table
    tokens = map(tokenizer.id_to_token, range(table.rows))
    names = (f"[row {id_}]" if token is None else token for id_, token in enumerate(tokens))
    return table.replace(keys=Keys.of(names))


def warm_up(table: PackedTable) -> None:
    """Look up and search once, so that no request waits for compiled loops."""
    table[np.arange(min(table.rows, WARM_ROWS))]
    table.search(np.zeros(table.dim, np.float32), 1)


class Catalog:
    """Served models by name; ``refresh`` reopens those whose files were replaced.

    >>> import featherbed as fb
    >>> path = getfixture("tmp_path") / "items.safetensors"
    >>> _ = fb.save(fb.DenseTable(5, 4), path)
    >>> catalog = Catalog([str(path)])
    >>> catalog["items"].describe()["rows"], catalog.refresh()
    (5, {})
    """

    def __init__(self, paths: Sequence[str]) -> None:
        """Open every path; ``NAME=PATH`` gives a name, the default is the file's own."""
        if not paths:
            raise ArgumentError("nothing to serve: give packed files or model folders")
        self.models: dict[str, ServedModel] = {}
        self.refused: dict[str, Signature] = {}  # replacements that could not be opened
        for path in paths:
            name, place = served_name(path)
            if name in self.models:
                raise ArgumentError(
                    f"{path} and {self.models[name].path} are both called {name!r}: "
                    "write NAME=PATH for one of them"
                )
            self.models[name] = ServedModel.open(name, place)

    def __getitem__(self, name: str) -> ServedModel:
        return self.models[name]

    def __contains__(self, name: object) -> bool:
        return name in self.models

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(list(self.models.values()))

    def refresh(self) -> dict[str, str]:
        """Reopen replaced files and return a line for each; a file that fails keeps its old
        model, and is tried again when it changes."""
        lines = {}
        for model in self:
            signature = file_signature(model.path)
            if signature in (model.signature, (), self.refused.get(model.name)):
                continue
            try:
                self.models[model.name] = ServedModel.open(model.name, model.path)
                lines[model.name] = f"{model.name}: reloaded {model.path}"
            except (FeatherbedError, OSError) as error:
                self.refused[model.name] = signature
                lines[model.name] = f"{model.name}: the old model is still served, {error}"
        return lines


def served_name(path: str) -> tuple[str, Path]:
    """Return the name a path is served under, and the path.

    >>> served_name("words=models/glove.safetensors")
    ('words', PosixPath('models/glove.safetensors'))
    >>> served_name("tables.st")
    Traceback (most recent call last):
    featherbed.errors.ArgumentError: 'tables' is an endpoint of the server: write NAME=tables.st
    """
    name, equals, place = path.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z0-9._-]+", name):
        name, place = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(path).resolve().stem), path
    if name in RESERVED or name in ("", ".", ".."):
        raise ArgumentError(f"{name!r} is an endpoint of the server: write NAME={place}")
    return name, Path(place)
