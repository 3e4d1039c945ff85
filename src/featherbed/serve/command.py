"""``featherbed recommend DIR --user KEY -k 10``: the best unseen items of a user, as lines or as JSON."""

from __future__ import annotations

from pathlib import Path

import typer

from featherbed.serve.recommender import Recommender, Scored


def run(folder: Path, user: str, k: int = 10, json: bool = False, all_items: bool = False) -> None:
    """Print the k best items for a user, with their scores; of those not rated in training unless ``all_items``."""
    recommender = Recommender.open(folder)
    found = recommender.recommend(user, k, unseen=not all_items)
    typer.echo(_as_json(found) if json else as_lines(found))
    if not recommender.factors:
        note = (
            "note: this recommender stores no factors, only biases: every user gets the same order"
        )
        typer.echo(note, err=True)
    if len(found) < k:
        kind = "items in all" if all_items else "items this user has not rated"
        typer.echo(f"note: there are only {len(found)} {kind}, {k} were asked for", err=True)


def as_lines(found: list[Scored]) -> str:
    """Lay recommendations out in columns; what could act on a terminal is shown as a question mark.

    >>> print(as_lines([Scored("318", 4.71, "The Shawshank Redemption"), Scored("50", 4.6, None)]))
    rank   score  key  title
       1   4.710  318  The Shawshank Redemption
       2   4.600  50
    """
    keys = [_plain(item.key) for item in found]
    width = max([3, *map(len, keys)])
    titled = any(item.title for item in found)
    lines = [f"rank {'score':>7}  {'key':<{width}}  {'title' if titled else ''}".rstrip()]
    for rank, (key, item) in enumerate(zip(keys, found, strict=True), 1):
        lines.append(
            f"{rank:>4} {item.score:>7.3f}  {key:<{width}}  {_plain(item.title or '')}".rstrip()
        )
    return "\n".join(lines)


def _plain(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _as_json(found: list[Scored]) -> str:
    from json import dumps

    rows = [{"rank": rank, **item._asdict()} for rank, item in enumerate(found, 1)]
    return dumps(rows, ensure_ascii=False, indent=1)
