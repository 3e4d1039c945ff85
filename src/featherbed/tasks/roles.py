"""Which column holds what: given by name or number, else guessed from the names columns usually have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from featherbed.errors import DataError

# Names without case, blanks and signs; the first group that finds a column decides, two of one group are one too many.
USUAL: dict[str, tuple[str, ...]] = {
    "user": (
        "userid users userkey uid useridx useruuid",
        "memberid customerid custid clientid reviewerid accountid personid buyerid viewerid visitorid profileid raterid",
        "user username usr member customer cust client reviewer account person buyer viewer rater reader authorid userno",
        "u reviewername profilename author",
    ),
    "item": (
        "itemid items itemkey iid itemidx itemuuid",
        "movieid filmid productid asin isbn isbn13 isbn10 bookid songid trackid artistid showid animeid gameid appid jokeid "
        "businessid restaurantid recipeid courseid articleid newsid videoid postid sku skuid goodsid contentid beerid mid",
        "item movie film product book song track artist show anime game app joke business restaurant recipe course article "
        "itemno tconst imdbid tmdbid docid documentid placeid venueid eventid wineid",
        "i parentasin itemname productname movietitle booktitle title name",
    ),
    "rating": (
        "rating ratings userrating",
        "score stars star starrating overall ratingvalue reviewrating reviewoverall reviewscore bookrating movierating value "
        "grade rate userscore",
        "r label target preference",
    ),
    "time": (
        "timestamp time unixreviewtime unixtime unixtimestamp ts epoch ratingtime ratingtimestamp timestampms",
        "date datetime reviewdate ratingdate createdat created createdtime createddate reviewtime updatedat dateadded day t",
    ),
    "key": (
        "itemid movieid bookid productid asin isbn songid trackid artistid businessid gameid appid animeid iid",
        "id key item",
    ),
    "title": (
        "title titles name",
        "movietitle booktitle productname producttitle itemname itemtitle songtitle trackname label",
    ),
    "group": ("genres genre groups group", "categories category tags tag type"),
}


def plain(name: str) -> str:
    """Return a name without case, blanks and signs.

    >>> plain(" User_ID ")
    'userid'
    """
    return "".join(letter for letter in name.lower() if letter.isalnum())


def is_usual(name: str) -> bool:
    """Whether a column of ratings is usually named so."""
    return any(
        plain(name) in group.split()
        for role in ("user", "item", "rating", "time")
        for group in USUAL[role]
    )


def given_column(role: str, wanted: str | int, names: Sequence[str], where: str) -> int:
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
                f"{where}: {len(found)} columns are named {text!r}: give {role} by number, 1 to {len(names)}"
            )
    if text.isascii() and text.isdigit() and 1 <= int(text) <= len(names):
        return int(text) - 1
    raise DataError(f"{where} has no column {text!r} for {role}; its columns are {shown(names)}")


def guessed_column(
    role: str, names: Sequence[str], where: str, taken: Sequence[int] = ()
) -> int | None:
    """Return the place of the column that is usually named so, None if there is none.

    >>> guessed_column("user", ["asin", "reviewerID", "overall"], "a.csv")
    1
    """
    for group in USUAL[role]:
        found = [
            place
            for place, name in enumerate(names)
            if place not in taken and plain(name) in group.split()
        ]
        if len(found) > 1:
            several = " and ".join(repr(names[place]) for place in found)
            raise DataError(f"{where}: {several} may both hold the {role}: name one with --{role}")
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
    """Return role -> place; roles in ``given`` are those looked for; without a header they stand in that order."""
    roles: dict[str, int] = {}
    for role, wanted in given.items():
        if wanted is not None:
            roles[role] = given_column(role, wanted, names, where)
    for place, role in enumerate(given):
        if role in roles:
            continue
        if header:
            found = guessed_column(role, names, where, list(roles.values()))
        else:
            found = place if place < len(names) and place not in roles.values() else None
        if found is not None:
            roles[role] = found
    missing = [role for role in required if role not in roles]
    if missing:
        options = " ".join(f"--{role}" for role in given)
        if missing == ["rating"]:
            options += " (what was clicked or bought, without ratings, is a task for ranking)"
        raise DataError(
            f"{where}: no column for {' and '.join(missing)}; its columns are {shown(names)}: name them by {options}"
        )
    double = [role for role in roles if list(roles.values()).count(roles[role]) > 1]
    if double:
        raise DataError(
            f"{where}: column {names[roles[double[0]]]!r} is given for {' and '.join(double)}: name different ones"
        )
    return {role: roles[role] for role in given if role in roles}


def shown(names: Sequence[str]) -> str:
    """Return the names of columns for a message."""
    return ", ".join(repr(name) for name in names[:20]) + (
        f" and {len(names) - 20} more" if len(names) > 20 else ""
    )
