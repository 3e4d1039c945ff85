"""Titles of items and their groups (genres, categories)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from featherbed.errors import DataError
from featherbed.io.records.cells import parse_keys
from featherbed.io.records.columns import find_columns
from featherbed.io.records.files import open_columns


@dataclass(frozen=True)
class ItemTitles:
    """The title of every item by id, None if unknown; ``groups`` likewise, None without groups.

    >>> ItemTitles(["Heat", None], [("Action",), ()]).count
    1
    """

    names: list[str | None]
    groups: list[tuple[str, ...]] | None

    @property
    def count(self) -> int:
        """Number of items with a title."""
        return sum(name is not None for name in self.names)


def read_titles(
    path: str | Path,
    item_keys: Sequence[str],
    *,
    key: str | int | None = None,
    title: str | int | None = None,
    group: str | int | None = None,
    encoding: str | None = None,
) -> ItemTitles:
    """Read titles of items from any file format of ``read_ratings``, such as ``movies.dat``.

    Without a header the columns are key, title and group. Groups are separated by ``|``. Text that
    is not UTF-8 is read as ISO-8859-1. Keys that are not among ``item_keys`` are ignored.

    >>> path = getfixture("tmp_path") / "movies.dat"
    >>> _ = path.write_text("1::Heat (1995)::Action|Crime\\n2::Sabrina (1995)::Comedy\\n")
    >>> read_titles(path, ["2", "3"])
    ItemTitles(names=['Sabrina (1995)', None], groups=[('Comedy',), ()])
    """
    import polars as pl

    file = open_columns(path, encoding=encoding, min_columns=2, lenient=True)
    given = {"key": key, "title": title, "group": group}
    roles = find_columns(file.names, given, ("key", "title"), str(file.path), header=file.header)
    if not file.header and group is None and len(file.names) != 3:
        roles.pop("group", None)
    file.refuse_odd({role: place for role, place in roles.items() if role != "group"})
    id_of = {name: place for place, name in enumerate(item_keys)}
    names: list[str | None] = [None] * len(id_of)
    groups: list[tuple[str, ...]] = [()] * len(id_of)
    for block in file.blocks(list(roles.values())):
        keys = parse_keys(block.frame["0"], strip=file.kind == "text").cast(pl.String)
        texts = block.frame["1"].cast(pl.String, strict=False).str.strip_chars()
        grouped = block.frame["2"].to_list() if "group" in roles else [None] * len(keys)
        for name, text, group_text in zip(keys, texts, grouped, strict=True):
            place = id_of.get(name or "")
            if place is not None and text:
                names[place] = text
                groups[place] = _parse_groups(group_text)
    titles = ItemTitles(names, groups if "group" in roles else None)
    if not titles.count:
        known = ", ".join(repr(item_keys[place]) for place in range(min(3, len(item_keys))))
        raise DataError(
            f"{file.path}: none of the {len(item_keys):,} items (such as {known}) has its key in "
            f"column {file.names[roles['key']]!r}"
        )
    return titles


def _parse_groups(cell: Any) -> tuple[str, ...]:
    """Return the groups of a text such as ``Action|Crime`` or of a list."""
    if isinstance(cell, str) and cell.startswith("["):
        try:
            cell = json.loads(cell)
        except ValueError:
            cell = cell.strip("[]").replace("'", "").replace(", ", "|")
    parts = cell.split("|") if isinstance(cell, str) else cell or ()
    return tuple(text for part in parts if (text := str(part).strip()))
