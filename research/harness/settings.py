"""Settings files of papers: one TOML file for each published table or figure, its rows with the numbers that were published."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from featherbed.errors import ArgumentError

TASKS = ("ratings", "online", "factors", "ranking", "text", "language")
PLOTS = ("front", "objective", "grid", "convergence", "stream", "none")
NEEDED = ("title", "paper", "task", "data", "measures")
TOP = {
    *NEEDED,
    "seeds",
    "about",
    "differences",
    "compared",
    "plot",
    "settings",
    "sizes",
    "quick",
    "rows",
    "with",
}
ROW = {
    "name",
    "label",
    "data",
    "beside",
    "published",
    "reported",
    "settings",
    "sizes",
    "quick",
    "runs",
}
SIZES = ("small", "full")  # the first is what is run where nobody asks for another
SIZE = {"seeds", "differences", "compared", "settings"}


@dataclass(frozen=True)
class Row:
    """One line of a published table, or one run of ours beside it: its settings, and the number that was published.

    ``home`` is the folder its results lie in, that of a paper; ``reported`` marks numbers known from other sources, not read in
    the paper itself. A row that does not ``run`` is there for its published number. ``data`` are those of the paper unless the
    row has its own, and ``beside`` names the row that its first measure is compared with.
    """

    name: str
    label: str
    home: str
    settings: dict[str, Any]
    published: dict[str, float] = field(default_factory=dict)
    reported: bool = False
    runs: bool = True
    data: str = ""
    beside: str = ""


@dataclass(frozen=True)
class Paper:
    """A published table or figure: what to run on what, what was published, where our protocol differs.

    >>> paper = read_paper("ant/table14")
    >>> paper.task, paper.seeds, paper.rows[0].published["mse"]
    ('ratings', (0, 1, 2), 0.771)
    """

    name: str
    title: str
    paper: str
    task: str
    data: str
    about: str
    differences: tuple[str, ...]
    measures: tuple[str, ...]
    compared: tuple[str, ...]  # measures whose difference to the published number means something
    plot: str
    seeds: tuple[int, ...]
    rows: tuple[Row, ...]
    size: str = ""  # of a paper that comes in sizes
    sizes: tuple[str, ...] = ()

    @property
    def home(self) -> str:
        """The folder of its own results."""
        return f"{self.name}/{self.size}" if self.size else self.name

    def chosen(self, names: list[str]) -> Paper:
        """Return the paper with these rows only; all if none is named."""
        known = [row.name for row in self.rows]
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ArgumentError(
                f"{self.name} has no row {', '.join(unknown)}: its rows are {', '.join(known)}"
            )
        return replace(self, rows=tuple(row for row in self.rows if not names or row.name in names))


def paper_names() -> list[str]:
    """Return the names of all papers.

    >>> "sse/table1" in paper_names()
    True
    """
    return sorted(
        f"{folder.name}/{file.name.removesuffix('.toml')}"
        for folder in _folders()
        for file in folder.iterdir()
        if file.name.endswith(".toml")
    )


def _folders() -> list[Traversable]:
    return [
        folder
        for folder in files("featherbed.papers").iterdir()
        if folder.is_dir() and folder.name != "__pycache__"
    ]


def read_paper(name: str, quick: bool = False, size: str | None = None) -> Paper:
    """Read the settings of a paper; ``quick``: with what its file changes for a look that takes seconds.

    >>> read_paper("ant/table1").size, read_paper("ant/table1", size="full").home
    ('small', 'ant/table1/full')
    """
    known = paper_names()
    if name not in known:
        raise ArgumentError(f"no paper {name!r}: there are {', '.join(known)}")
    group, _, rest = name.partition("/")
    text = files("featherbed.papers").joinpath(group, f"{rest}.toml").read_text(encoding="utf-8")
    try:
        return parse_paper(name, tomllib.loads(text), quick, size)
    except tomllib.TOMLDecodeError as error:
        raise ArgumentError(f"{name}.toml is not TOML: {error}") from None


def parse_paper(
    name: str, file: Mapping[str, Any], quick: bool = False, size: str | None = None
) -> Paper:
    """Check what a settings file holds, and make a paper of it.

    ``with`` names other papers whose rows come first: their results are shared, and lie in their folders. ``sizes`` change the
    settings: the size that is asked for, else the first there is. A quick look is one at the first size.
    """
    _known(name, file, TOP)
    missing = [key for key in NEEDED if key not in file]
    if missing:
        raise ArgumentError(f"{name}: {', '.join(missing)} missing from the settings file")
    _one_of(name, "task", file["task"], TASKS)
    _one_of(name, "plot", file.get("plot", "none"), PLOTS)
    sizes = tuple(one for one in SIZES if one in file.get("sizes", {}))
    size = _size(name, file, sizes, None if quick else size)
    own = file["sizes"][size] if size else {}
    home = f"{name}/{size}" if size and not quick else name
    rows = [row for other in _others(file) for row in read_paper(other, quick, size or None).rows]
    rows += [_row(name, row, file, size, quick, home) for row in file.get("rows", [])]
    names = [row.name for row in rows]
    if not rows or len(set(names)) < len(names):
        raise ArgumentError(
            f"{name}: give at least one row, each with a name of its own, not {', '.join(names) or 'none'}"
        )
    seeds = tuple(own.get("seeds", file.get("seeds", (0, 1, 2))))
    return Paper(
        name,
        file["title"],
        file["paper"],
        file["task"],
        file["data"],
        file.get("about", ""),
        (*file.get("differences", ()), *own.get("differences", ())),
        tuple(file["measures"]),
        () if quick else tuple(own.get("compared", file.get("compared", file["measures"]))),
        file.get("plot", "none"),
        checked_seeds(seeds[:1] if quick else seeds),
        tuple(rows),
        "" if quick else size,
        sizes,
    )


def _others(file: Mapping[str, Any]) -> list[str]:
    given = file.get("with", [])
    return [given] if isinstance(given, str) else list(given)


def _size(name: str, file: Mapping[str, Any], sizes: tuple[str, ...], asked: str | None) -> str:
    """Return the size that is run, "" for a paper that comes in one size only."""
    for one, changes in file.get("sizes", {}).items():
        _one_of(name, "size", one, SIZES)
        _known(f"{name}, size {one}", changes, SIZE)
    if asked is not None and asked not in sizes:
        raise ArgumentError(
            f"{name} comes in {' and '.join(sizes) or 'one size only'}: size {asked!r} is none of its sizes"
        )
    return asked or (sizes[0] if sizes else "")


def _row(
    paper: str, row: Mapping[str, Any], file: Mapping[str, Any], size: str, quick: bool, home: str
) -> Row:
    name = row.get("name", "")
    where = f"{paper}, row {name or '?'}"
    _known(where, row, ROW)
    if not name or not all(
        letter.isascii() and (letter.isalnum() or letter in "-.") for letter in name
    ):
        raise ArgumentError(f"{where}: a row has a name of letters, digits, dots and hyphens")
    published = {key: float(value) for key, value in row.get("published", {}).items()}
    if not all(math.isfinite(value) for value in published.values()):
        raise ArgumentError(f"{where}: published numbers are finite")
    for one in row.get("sizes", {}):
        _one_of(where, "size", one, tuple(file.get("sizes", {})))
    settings = changed(
        file.get("settings", {}), file.get("sizes", {}).get(size, {}).get("settings", {})
    )
    settings = changed(
        changed(settings, row.get("settings", {})), row.get("sizes", {}).get(size, {})
    )
    if quick:
        settings = changed(
            changed(settings, file.get("quick", {}), known_only=True), row.get("quick", {})
        )
    flags = bool(row.get("reported", False)), bool(row.get("runs", True))
    found = row.get("label", name), home, settings, published, *flags
    return Row(name, *found, row.get("data", file["data"]), row.get("beside", ""))


def changed(
    settings: Mapping[str, Any], changes: Mapping[str, Any], known_only: bool = False
) -> dict[str, Any]:
    """Return settings with changes made to them, also inside tables; ``known_only``: to those that are there.

    >>> changed({"dim": 4, "words": {"spec": "dense", "by": "random"}}, {"words": {"by": "tfidf"}})
    {'dim': 4, 'words': {'spec': 'dense', 'by': 'tfidf'}}
    """
    found = dict(settings)
    for key, value in changes.items():
        if known_only and key not in settings:
            continue
        inside = isinstance(value, Mapping) and isinstance(settings.get(key), Mapping)
        found[key] = changed(settings[key], value, known_only) if inside else value
    return found


def checked_seeds(seeds: tuple[int, ...]) -> tuple[int, ...]:
    """Return seeds that are different whole numbers of at least 0, or say what was given."""
    good = all(isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0 for seed in seeds)
    if not seeds or not good or len(set(seeds)) < len(seeds):
        raise ArgumentError(
            f"seeds {', '.join(map(str, seeds)) or 'none'}: give different whole numbers of at least 0"
        )
    return seeds


def _known(where: str, given: Mapping[str, Any], allowed: set[str]) -> None:
    unknown = sorted(set(given) - allowed)
    if unknown:
        raise ArgumentError(
            f"{where}: unknown {', '.join(unknown)}; known are {', '.join(sorted(allowed))}"
        )


def _one_of(where: str, what: str, given: str, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise ArgumentError(f"{where}: {what}={given!r}, use one of {', '.join(allowed)}")
