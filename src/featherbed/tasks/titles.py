"""Titles of items, and the groups (genres, categories) they belong to, for people to read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featherbed.errors import DataError
from featherbed.tasks.columns import keys, open_columns, refuse_odd
from featherbed.tasks.roles import find_columns

if TYPE_CHECKING:
    import polars as pl


@dataclass(frozen=True)
class Titles:
    """The title of every item by id, None where there is none; ``groups`` likewise, or None if the file has no groups.

    >>> Titles(["Heat", None], [("Action",), ()]).found
    1
    """

    names: list[str | None]
    groups: list[tuple[str, ...]] | None

    @property
    def found(self) -> int:
        """How many items have a title."""
        return sum(name is not None for name in self.names)


def read_titles(
    path: str | Path,
    item_keys: Sequence[str],
    *,
    key: str | int | None = None,
    title: str | int | None = None,
    group: str | int | None = None,
    encoding: str | None = None,
) -> Titles:
    """Read the titles of items from a file of the forms ``read_ratings`` reads, such as MovieLens' ``movies.dat``.

    Without a header the columns are key, title and group. Groups stand between ``|``. Text that is not UTF-8 is read as
    ISO-8859-1. Keys that are not among ``item_keys`` are passed over.

    >>> path = getfixture("tmp_path") / "movies.dat"
    >>> _ = path.write_text("1::Heat (1995)::Action|Crime\\n2::Sabrina (1995)::Comedy\\n")
    >>> read_titles(path, ["2", "3"])
    Titles(names=['Sabrina (1995)', None], groups=[('Comedy',), ()])
    """
    file = open_columns(path, encoding=encoding, least=2, lenient=True)
    given = {"key": key, "title": title, "group": group}
    roles = find_columns(file.names, given, ("key", "title"), str(file.path), header=file.header)
    if not file.header and group is None and len(file.names) != 3:
        roles.pop("group", None)
    refuse_odd(file, {role: place for role, place in roles.items() if role != "group"})
    id_of = {name: place for place, name in enumerate(item_keys)}
    names: list[str | None] = [None] * len(id_of)
    groups: list[tuple[str, ...]] = [()] * len(id_of)
    for block in file.blocks(list(roles.values())):
        for name, text, group_text in _rows(block.frame, "group" in roles, file.kind == "text"):
            place = id_of.get(name or "")
            if place is not None and text:
                names[place] = text
                groups[place] = _groups(group_text)
    titles = Titles(names, groups if "group" in roles else None)
    if not titles.found:
        known = ", ".join(repr(item_keys[place]) for place in range(min(3, len(item_keys))))
        column = file.names[roles["key"]]
        raise DataError(
            f"{file.path}: none of the {len(item_keys):,} items (such as {known}) has its key in column {column!r}"
        )
    return titles


def _rows(
    frame: pl.DataFrame, grouped: bool, strip: bool
) -> Iterator[tuple[str | None, str | None, Any]]:
    import polars as pl

    names = keys(frame["0"], strip=strip).cast(pl.String).to_list()
    texts = frame["1"].cast(pl.String, strict=False).str.strip_chars().to_list()
    yield from zip(
        names, texts, frame["2"].to_list() if grouped else [None] * len(texts), strict=True
    )


def _groups(given: Any) -> tuple[str, ...]:
    """Return groups out of a text such as ``Action|Crime`` or a list."""
    if isinstance(given, str) and given.startswith("["):
        try:
            given = json.loads(given)
        except ValueError:
            given = given.strip("[]").replace("'", "").replace(", ", "|")
    parts = given.split("|") if isinstance(given, str) else given or ()
    return tuple(text for part in parts if (text := str(part).strip()))
