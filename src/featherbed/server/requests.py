"""Bodies of requests: JSON objects read within limits; every refusal says what is accepted."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from starlette.requests import ClientDisconnect, Request

from featherbed.errors import FeatherbedError
from featherbed.packed import Floats, PackedTable
from featherbed.packed.collection import PackedCollection


@dataclass(frozen=True)
class Limits:
    """Limits of one request."""

    body: int = 8 << 20  # bytes
    batch: int = 65_536  # ids, keys or texts
    numbers: int = 1 << 22  # of an answer: ids times row width
    k: int = 1_000  # results of a search
    text: int = 100_000  # letters of one text
    words: int = 1_000  # words drawn by a language model
    seconds: float = 30.0  # until the body has arrived


class RequestError(FeatherbedError):
    """A request that cannot be answered: ``status`` and a message that names the remedy."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class RequestBody:
    """The JSON object of a request; names that are not in ``accepted`` are refused."""

    def __init__(self, fields: dict[str, Any], limits: Limits) -> None:
        self.fields, self.limits = fields, limits

    @classmethod
    async def read(cls, request: Request, accepted: Collection[str], limits: Limits) -> RequestBody:
        """Parse the body of a request."""
        try:
            fields = orjson.loads(await read_bytes(request))
        except orjson.JSONDecodeError as error:
            raise RequestError(400, f"the body is not JSON: {str(error)[:100]}") from None
        if not isinstance(fields, dict):
            raise RequestError(400, f"send a JSON object with {' or '.join(accepted)}")
        if unknown := fields.keys() - set(accepted):
            names = ", ".join(repr(name[:40]) for name in sorted(unknown)[:5])
            raise RequestError(400, f"{names}: unknown; a request has {', '.join(accepted)}")
        given = {name: value for name, value in fields.items() if value is not None}
        return cls(given, limits)

    def one_of(self, *names: str) -> str:
        """Return the one name among ``names`` that the request has."""
        given = [name for name in names if name in self.fields]
        if len(given) != 1:
            raise RequestError(400, f"give exactly one of {', '.join(names)}")
        return given[0]

    def string(self, name: str, default: str | None = None) -> str:
        """Return a text of at most ``limits.text`` letters."""
        value = self.fields.get(name, default)
        if not isinstance(value, str):
            raise RequestError(400, f"{name} must be a text")
        if len(value) > self.limits.text:
            raise RequestError(
                413, f"{name} has {len(value):,} letters: send at most {self.limits.text:,}"
            )
        return value

    def integer(self, name: str, default: int, least: int, most: int) -> int:
        """Return a whole number between ``least`` and ``most``, which also limits the default."""
        value = self.fields.get(name, min(default, most))
        if type(value) is not int or not least <= value <= most:
            raise RequestError(400, f"{name} must be a whole number from {least} to {most:,}")
        return value

    def number(self, name: str, default: float, least: float, most: float) -> float:
        """Return a number between ``least`` and ``most``."""
        value = self.fields.get(name, default)
        if type(value) not in (int, float) or not least <= value <= most:
            raise RequestError(400, f"{name} must be a number from {least} to {most}")
        return float(value)

    def flag(self, name: str) -> bool:
        """Return true or false, the default."""
        value = self.fields.get(name, False)
        if not isinstance(value, bool):
            raise RequestError(400, f"{name} must be true or false")
        return value

    def list_of(self, name: str, kind: type, most: int | None = None) -> list[Any]:
        """Return a list of texts or of whole numbers."""
        values, most = self.fields.get(name), most or self.limits.batch
        what = "texts" if kind is str else "whole numbers"
        if not isinstance(values, list) or not values:
            raise RequestError(400, f"{name} must be a list of {what}, one or more")
        if len(values) > most:
            raise RequestError(413, f"{name} has {len(values):,} entries: send at most {most:,}")
        if set(map(type, values)) != {kind}:
            raise RequestError(400, f"{name} must be a list of {what} only")
        return values

    def check_numbers(self, rows: int, dim: int) -> None:
        """Refuse a request whose answer would hold too many numbers."""
        if rows * dim > self.limits.numbers:
            most = max(1, self.limits.numbers // dim)
            raise RequestError(413, f"input has {rows:,} entries: send at most {most:,}")

    def ids(self, table: PackedTable) -> NDArray[np.int64]:
        """Return ``ids``, or the ids of ``keys``, whose rows fit into one answer."""
        most = max(1, min(self.limits.batch, self.limits.numbers // table.dim))
        if self.one_of("ids", "keys") == "keys":
            found = table.ids_of(self.list_of("keys", str, most))
            return np.asarray(found, dtype=np.int64)
        values = self.list_of("ids", int, most)
        return _whole(values)

    def batch(self, collection: PackedCollection) -> Floats:
        """Return rows of one ``column`` by ids or keys, or of all ``columns`` side by side."""
        if self.one_of("column", "columns") == "column":
            name = self.string("column")
            dim = collection.dims[collection.layout.number(name)]
            given = self.one_of("ids", "keys")
            most = max(1, min(self.limits.batch, self.limits.numbers // dim))
            values = self.list_of(given, int if given == "ids" else str, most)
            return collection.rows(name, _whole(values) if given == "ids" else values)
        columns = self.fields["columns"]
        if not isinstance(columns, dict) or len(self.fields) > 1:
            raise RequestError(
                400, "give columns alone: an object, a list of ids or keys by column"
            )
        collection.layout.check_names(columns)
        most = max(1, min(self.limits.batch, self.limits.numbers // sum(collection.dims)))
        lists = RequestBody(columns, self.limits)
        batch: dict[str, Any] = {}
        for name, entry in columns.items():
            texts = isinstance(entry, list) and bool(entry) and isinstance(entry[0], str)
            found = lists.list_of(name, str if texts else int, most)
            batch[name] = found if texts else _whole(found)
        return collection[batch]

    def vector(self, dim: int) -> NDArray[np.float32]:
        """Return ``vector``, finite numbers of a row's width."""
        values = self.fields["vector"]
        if (
            not isinstance(values, list)
            or len(values) != dim
            or not set(map(type, values)) <= {int, float}
        ):
            raise RequestError(400, f"vector must be a list of {dim} numbers")
        try:
            found = np.array(values, dtype=np.float64)
        except OverflowError:
            found = np.full(dim, np.inf)
        if not (np.abs(found) <= np.finfo(np.float32).max).all():
            raise RequestError(400, "vector holds a number beyond float32")
        return found.astype(np.float32)


async def read_bytes(request: Request) -> bytes:
    """Return the body of a request, for a third of the time of ``request.body()``."""
    receive, parts, more = request.receive, [], True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


def _whole(values: list[int]) -> NDArray[np.int64]:
    """Return whole numbers as an array; those beyond 64 bits are refused."""
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:
        raise RequestError(400, "an id is too large: ids are numbers of rows, from 0") from None
