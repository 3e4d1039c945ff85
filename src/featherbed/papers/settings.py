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

TASKS = ("ratings", "online", "factors", "ranking")
PLOTS = ("front", "objective", "grid", "convergence", "stream", "none")
NEEDED = ("title", "paper", "task", "data", "measures")
TOP = {*NEEDED, "seeds", "about", "differences", "compared", "plot", "settings", "quick", "rows", "with"}
ROW = {"name", "label", "published", "reported", "settings", "runs"}


@dataclass(frozen=True)
class Row:
    """One line of a published table, or one run of ours beside it: its settings, and the number that was published.

    ``home`` is the paper in whose folder its results lie; ``reported`` marks numbers known from other sources, not read in the
    paper itself. A row that does not ``run`` is there for its published number.
    """

    name: str
    label: str
    home: str
    settings: dict[str, Any]
    published: dict[str, float] = field(default_factory=dict)
    reported: bool = False
    runs: bool = True


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

    def chosen(self, names: list[str]) -> Paper:
        """Return the paper with these rows only; all if none is named."""
        known = [row.name for row in self.rows]
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ArgumentError(f"{self.name} has no row {', '.join(unknown)}: its rows are {', '.join(known)}")
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
    return [folder for folder in files("featherbed.papers").iterdir() if folder.is_dir() and folder.name != "__pycache__"]


def read_paper(name: str, quick: bool = False) -> Paper:
    """Read the settings of a paper; ``quick``: with what its file changes for a look that takes seconds."""
    known = paper_names()
    if name not in known:
        raise ArgumentError(f"no paper {name!r}: there are {', '.join(known)}")
    group, _, rest = name.partition("/")
    text = files("featherbed.papers").joinpath(group, f"{rest}.toml").read_text(encoding="utf-8")
    try:
        return parse_paper(name, tomllib.loads(text), quick)
    except tomllib.TOMLDecodeError as error:
        raise ArgumentError(f"{name}.toml is not TOML: {error}") from None


def parse_paper(name: str, file: Mapping[str, Any], quick: bool = False) -> Paper:
    """Check what a settings file holds, and make a paper of it.

    ``with`` names another paper whose rows come first: their results are shared, and lie in its folder.
    """
    _known(name, file, TOP)
    missing = [key for key in NEEDED if key not in file]
    if missing:
        raise ArgumentError(f"{name}: {', '.join(missing)} missing from the settings file")
    _one_of(name, "task", file["task"], TASKS)
    _one_of(name, "plot", file.get("plot", "none"), PLOTS)
    common, small = dict(file.get("settings", {})), dict(file.get("quick", {})) if quick else {}
    rows = [] if "with" not in file else list(read_paper(file["with"], quick).rows)
    rows += [_row(name, row, common, small) for row in file.get("rows", [])]
    names = [row.name for row in rows]
    if not rows or len(set(names)) < len(names):
        raise ArgumentError(f"{name}: give at least one row, each with a name of its own, not {', '.join(names) or 'none'}")
    seeds = tuple(file.get("seeds", (0, 1, 2)))
    return Paper(
        name,
        file["title"],
        file["paper"],
        file["task"],
        file["data"],
        file.get("about", ""),
        tuple(file.get("differences", ())),
        tuple(file["measures"]),
        () if quick else tuple(file.get("compared", file["measures"])),
        file.get("plot", "none"),
        checked_seeds(seeds[:1] if quick else seeds),
        tuple(rows),
    )


def _row(paper: str, row: Mapping[str, Any], common: Mapping[str, Any], small: Mapping[str, Any]) -> Row:
    name = row.get("name", "")
    where = f"{paper}, row {name or '?'}"
    _known(where, row, ROW)
    if not name or not all(letter.isascii() and (letter.isalnum() or letter in "-.") for letter in name):
        raise ArgumentError(f"{where}: a row has a name of letters, digits, dots and hyphens")
    published = {key: float(value) for key, value in row.get("published", {}).items()}
    if not all(math.isfinite(value) for value in published.values()):
        raise ArgumentError(f"{where}: published numbers are finite")
    settings = {**common, **row.get("settings", {})}
    settings |= {key: value for key, value in small.items() if key in settings}
    flags = bool(row.get("reported", False)), bool(row.get("runs", True))
    return Row(name, row.get("label", name), paper, settings, published, *flags)


def checked_seeds(seeds: tuple[int, ...]) -> tuple[int, ...]:
    """Return seeds that are different whole numbers of at least 0, or say what was given."""
    good = all(isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0 for seed in seeds)
    if not seeds or not good or len(set(seeds)) < len(seeds):
        raise ArgumentError(f"seeds {', '.join(map(str, seeds)) or 'none'}: give different whole numbers of at least 0")
    return seeds


def _known(where: str, given: Mapping[str, Any], allowed: set[str]) -> None:
    unknown = sorted(set(given) - allowed)
    if unknown:
        raise ArgumentError(f"{where}: unknown {', '.join(unknown)}; known are {', '.join(sorted(allowed))}")


def _one_of(where: str, what: str, given: str, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise ArgumentError(f"{where}: {what}={given!r}, use one of {', '.join(allowed)}")
