"""A file of columns, and the role of each column: named by the caller or guessed by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from featherbed.errors import DataError

if TYPE_CHECKING:
    import polars as pl

BROKEN = "broken"  # the name of the column that marks lines broken as a whole
UNCLOSED, NO_OBJECT = "a quotation mark is not closed", "it is no JSON object"
NESTED, NO_TEXT = "a list or an object is no key", "bytes that are not UTF-8"
FAULTS = (UNCLOSED, NO_OBJECT, NESTED, NO_TEXT)  # texts of that column
SAMPLE = 200  # lines inspected before reading

# Common names without case, blanks and punctuation. The first group with a match decides; two
# matches in one group are ambiguous.
COMMON_NAMES: dict[str, tuple[str, ...]] = {
    "user": (
        "userid users userkey uid useridx useruuid",
        "memberid customerid custid clientid reviewerid accountid personid buyerid viewerid "
        "visitorid profileid raterid",
        "user username usr member customer cust client reviewer account person buyer viewer rater "
        "reader authorid userno",
        "u reviewername profilename author",
    ),
    "item": (
        "itemid items itemkey iid itemidx itemuuid",
        "movieid filmid productid asin isbn isbn13 isbn10 bookid songid trackid artistid showid "
        "animeid gameid appid jokeid businessid restaurantid recipeid courseid articleid newsid "
        "videoid postid sku skuid goodsid contentid beerid mid",
        "item movie film product book song track artist show anime game app joke business "
        "restaurant recipe course article itemno tconst imdbid tmdbid docid documentid placeid "
        "venueid eventid wineid",
        "i parentasin itemname productname movietitle booktitle title name",
    ),
    "rating": (
        "rating ratings userrating",
        "score stars star starrating overall ratingvalue reviewrating reviewoverall reviewscore "
        "bookrating movierating value grade rate userscore",
        "r label target preference",
    ),
    "time": (
        "timestamp time unixreviewtime unixtime unixtimestamp ts epoch ratingtime ratingtimestamp "
        "timestampms",
        "date datetime reviewdate ratingdate createdat created createdtime createddate reviewtime "
        "updatedat dateadded day t",
    ),
    "key": (
        "itemid movieid bookid productid asin isbn songid trackid artistid businessid gameid appid "
        "animeid iid",
        "id key item",
    ),
    "title": (
        "title titles name",
        "movietitle booktitle productname producttitle itemname itemtitle songtitle trackname "
        "label",
    ),
    "group": ("genres genre groups group", "categories category tags tag type"),
}


@dataclass(frozen=True)
class Block:
    """Some lines of a file: cells, the line number of a row, and the rows that are blank lines."""

    frame: pl.DataFrame
    line: Callable[[int], int]
    blanks: Callable[[], list[int]] = list


@dataclass
class Columns:
    """A file of columns: names, a sample of the cells (None where missing), and its blocks.

    Every block is a polars frame of the wanted columns, named "0", "1", ..., as text where the file
    is text, and a column that marks broken lines. ``odd`` holds the types of columns that are
    neither numbers nor text nor dates; ``later`` collects, while blocks are read, names that are
    not among the columns.
    """

    path: Path
    kind: str
    names: list[str]
    sample: list[list[str | None]]
    blocks: Callable[[Sequence[int]], Iterator[Block]]
    header: bool = True
    delimiter: str = ""
    odd: dict[int, str] = field(default_factory=dict)
    later: set[str] = field(default_factory=set)

    @property
    def unit(self) -> str:
        """The word for one record in messages."""
        return "row" if self.kind == "Parquet" else "line"

    def refuse_odd(self, roles: Mapping[str, int]) -> None:
        """Refuse columns of lists, objects and the like where numbers or text are required."""
        for role, place in roles.items():
            if place in self.odd:
                raise DataError(
                    f"{self.path}: column {self.names[place]!r} for the {role} is of the type "
                    f"{self.odd[place]}: name one of numbers or text"
                )


def normalize_name(name: str) -> str:
    """Return a name without case, blanks and punctuation.

    >>> normalize_name(" User_ID ")
    'userid'
    """
    return "".join(letter for letter in name.lower() if letter.isalnum())


def is_common(name: str) -> bool:
    """Whether columns of rating files often have this name."""
    return any(
        normalize_name(name) in group.split()
        for role in ("user", "item", "rating", "time")
        for group in COMMON_NAMES[role]
    )


def locate_column(role: str, wanted: str | int, names: Sequence[str], where: str) -> int:
    """Return the place of a column given by its name, else by its number from 1."""
    text = str(wanted).strip()
    for exact in (True, False):
        found = [
            place
            for place, name in enumerate(names)
            if (name == text if exact else name.lower() == text.lower())
        ]
        if len(found) == 1:
            return found[0]
        if found:
            raise DataError(
                f"{where}: {len(found)} columns are named {text!r}: "
                f"give {role} by number, 1 to {len(names)}"
            )
    if text.isascii() and text.isdigit() and 1 <= int(text) <= len(names):
        return int(text) - 1
    raise DataError(
        f"{where} has no column {text!r} for {role}; its columns are {list_names(names)}"
    )


def guess_column(
    role: str, names: Sequence[str], where: str, exclude: Sequence[int] = ()
) -> int | None:
    """Return the place of the column with a common name for a role, None if there is none.

    >>> guess_column("user", ["asin", "reviewerID", "overall"], "a.csv")
    1
    """
    for group in COMMON_NAMES[role]:
        found = [
            place
            for place, name in enumerate(names)
            if place not in exclude and normalize_name(name) in group.split()
        ]
        if len(found) > 1:
            several = " and ".join(repr(names[place]) for place in found)
            raise DataError(
                f"{where}: {several} may both hold the {role}: name one with {role}=NAME"
                f" (command line: --set columns.{role}=NAME)"
            )
        if found:
            return found[0]
    return None


def find_columns(
    names: Sequence[str],
    given: Mapping[str, str | int | None],
    required: Sequence[str],
    where: str,
    *,
    header: bool,
) -> dict[str, int]:
    """Return role -> place for the roles in ``given``; without a header they come in that order."""
    roles = {
        role: locate_column(role, wanted, names, where)
        for role, wanted in given.items()
        if wanted is not None
    }
    for place, role in enumerate(given):
        if role in roles:
            continue
        if header:
            found = guess_column(role, names, where, list(roles.values()))
        else:
            found = place if place < len(names) and place not in roles.values() else None
        if found is not None:
            roles[role] = found
    missing = [role for role in required if role not in roles]
    if missing:
        example = f"{missing[0]}=NAME (command line: --set columns.{missing[0]}=NAME)"
        if missing == ["rating"]:
            example += "; clicks or purchases without ratings are a task for ranking"
        raise DataError(
            f"{where}: no column for {' and '.join(missing)}; its columns are {list_names(names)}: "
            f"name it with {example}"
        )
    double = [role for role in roles if list(roles.values()).count(roles[role]) > 1]
    if double:
        raise DataError(
            f"{where}: column {names[roles[double[0]]]!r} is given for {' and '.join(double)}: "
            "name different ones"
        )
    return {role: roles[role] for role in given if role in roles}


def list_names(names: Sequence[str]) -> str:
    """Return the names of columns for a message, at most 20."""
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return ", ".join(repr(name) for name in names[:20]) + more
