"""Settings files: one TOML file for each experiment, its rows, and the numbers that were published."""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from featherbed.errors import ArgumentError
from research.harness.tasks import TASKS

ROOT = Path(__file__).resolve().parent.parent
PAPERS, STUDIES = ROOT / "papers", ROOT / "studies"
RESULTS = ROOT / "results"  # records, kept in the repository
WORK = ROOT / "runs"  # quick runs, pages, checkpoints and trained models, not kept

PLOTS = ("front", "objective", "grid", "convergence", "stream", "none")
NEEDED = ("title", "task", "measures")
TOP = {
    *NEEDED,
    "paper",
    "data",
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
    "seeds",
    "each",
    "settings",
    "sizes",
    "quick",
    "runs",
    "replaced",
}
SIZES = ("small", "full")  # the first one an experiment has is the default
QUICK = "quick"  # on generated data, in seconds: every experiment has it
SIZE = {"seeds", "differences", "compared", "settings"}


@dataclass(frozen=True)
class Row:
    """One line of a table: its settings, and the number that was published.

    ``home`` is the folder of its results, relative to the folder of all results. ``reported``
    marks published numbers that were read elsewhere than in the paper. A row that does not
    ``run`` is listed for its published number only. ``data`` and ``seeds`` default to those of
    the experiment; ``beside`` names the row its first measure is compared with. ``replaced`` says
    why another row took the place of this one: its records are shown, and it is not run again.
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
    seeds: tuple[int, ...] = ()
    replaced: str = ""


@dataclass(frozen=True)
class Experiment:
    """A published table or figure, or a study of our own: settings, data, rows, protocol.

    >>> experiment = read_experiment("ant/table14")
    >>> experiment.task, experiment.seeds, experiment.rows[0].published["mse"]
    ('ratings', (0, 1, 2), 0.771)
    """

    name: str
    title: str
    paper: str  # the reference; empty for a study of our own
    task: str
    data: str
    about: str
    differences: tuple[str, ...]
    measures: tuple[str, ...]
    compared: tuple[str, ...]  # measures whose difference to the published number is meaningful
    plot: str
    seeds: tuple[int, ...]
    rows: tuple[Row, ...]
    size: str = ""  # of an experiment that has several sizes
    sizes: tuple[str, ...] = ()

    @property
    def home(self) -> str:
        """The folder of its own results, relative to the folder of all results."""
        return f"{self.name}/{self.size}" if self.size else self.name

    def chosen(self, names: list[str]) -> Experiment:
        """Return the experiment with these rows only; with all rows if none is named."""
        known = [row.name for row in self.rows]
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ArgumentError(
                f"{self.name} has no row {', '.join(unknown)}: its rows are {', '.join(known)}"
            )
        return replace(self, rows=tuple(row for row in self.rows if not names or row.name in names))


def experiment_names() -> list[str]:
    """Return the names of all experiments, those of papers first.

    >>> "sse/table1" in experiment_names()
    True
    """
    return [*paper_names(), *names_in(STUDIES)]


def paper_names() -> list[str]:
    """Return the names of the published tables and figures."""
    return names_in(PAPERS)


def names_in(root: Path) -> list[str]:
    """Return the names of the experiments below a folder."""
    return sorted(f"{path.parent.name}/{path.stem}" for path in root.glob("*/*.toml"))


def read_experiment(name: str, quick: bool = False, size: str | None = None) -> Experiment:
    """Read the settings of an experiment; ``quick`` applies its changes for a run of seconds.

    >>> read_experiment("ant/table1").size, read_experiment("ant/table1", size="full").home
    ('small', 'ant/table1/full')
    """
    known = experiment_names()
    if name not in known:
        raise ArgumentError(f"no experiment {name!r}: there are {', '.join(known)}")
    path = next(root / f"{name}.toml" for root in (PAPERS, STUDIES) if name in names_in(root))
    try:
        return parse_experiment(name, tomllib.loads(path.read_text("utf-8")), quick, size)
    except tomllib.TOMLDecodeError as error:
        raise ArgumentError(f"{name}.toml is not TOML: {error}") from None


def parse_experiment(
    name: str, file: Mapping[str, Any], quick: bool = False, size: str | None = None
) -> Experiment:
    """Check the contents of a settings file and return its experiment.

    ``with`` names other experiments whose rows come first: their results are shared, and stay in
    their folders. ``sizes`` change the settings; the default is the first size of the file, which
    is also that of a quick run.
    """
    _check_keys(name, file, TOP)
    missing = [key for key in NEEDED if key not in file]
    if missing:
        raise ArgumentError(f"{name}: {', '.join(missing)} missing from the settings file")
    _one_of(name, "task", file["task"], tuple(TASKS))
    _one_of(name, "plot", file.get("plot", "none"), PLOTS)
    sizes = tuple(one for one in SIZES if one in file.get("sizes", {}))
    size = _size(name, file, sizes, None if quick else size)
    own = file["sizes"][size] if size else {}
    home = f"{name}/{size}" if size and not quick else name
    rows = [
        row for other in _others(file) for row in read_experiment(other, quick, size or None).rows
    ]
    for given in file.get("rows", []):
        rows += [_row(name, row, file, size, quick, home) for row in expanded(given)]
    names = [row.name for row in rows]
    if (not rows and not TASKS[file["task"]].plan) or len(set(names)) < len(names):
        raise ArgumentError(
            f"{name}: give at least one row, each with a name of its own, "
            f"not {', '.join(names) or 'none'}"
        )
    seeds = tuple(own.get("seeds", file.get("seeds", (0, 1, 2))))
    return Experiment(
        name,
        file["title"],
        file.get("paper", ""),
        file["task"],
        file.get("data", ""),
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


def _size(name: str, file: Mapping[str, Any], sizes: tuple[str, ...], given: str | None) -> str:
    """Return the size to run, "" for an experiment of one size only."""
    for one, changes in file.get("sizes", {}).items():
        _one_of(name, "size", one, SIZES)
        _check_keys(f"{name}, size {one}", changes, SIZE)
    if given is not None and given not in sizes:
        raise ArgumentError(
            f"{name} comes in {' and '.join(sizes) or 'one size only'}: "
            f"size {given!r} is none of its sizes"
        )
    return given or (sizes[0] if sizes else "")


def expanded(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row for every combination of the lists in ``each``, named after its values.

    >>> [row["name"] for row in expanded({"name": "k-{anchors}", "each": {"anchors": [5, 10]}})]
    ['k-5', 'k-10']
    """
    each = row.get("each", {})
    for values in itertools.product(*each.values()):
        own = dict(zip(each, values, strict=True))
        found = {key: value for key, value in row.items() if key != "each"}
        if own:
            found["name"] = str(row.get("name", "")).format(**own)
            found["settings"] = {**own, **row.get("settings", {})}
        yield found


def _row(
    experiment: str,
    row: Mapping[str, Any],
    file: Mapping[str, Any],
    size: str,
    quick: bool,
    home: str,
) -> Row:
    name = row.get("name", "")
    where = f"{experiment}, row {name or '?'}"
    _check_keys(where, row, ROW)
    if not name or not all(
        letter.isascii() and (letter.isalnum() or letter in "-.") for letter in name
    ):
        raise ArgumentError(f"{where}: a row has a name of letters, digits, dots and hyphens")
    published = {key: float(value) for key, value in row.get("published", {}).items()}
    if not all(math.isfinite(value) for value in published.values()):
        raise ArgumentError(f"{where}: published numbers are finite")
    seeds = checked_seeds(tuple(row["seeds"])) if "seeds" in row and not quick else ()
    return Row(
        name,
        row.get("label", name),
        home,
        _row_settings(where, row, file, size, quick),
        published,
        bool(row.get("reported", False)),
        bool(row.get("runs", True)),
        row.get("data", file.get("data", "")),
        row.get("beside", ""),
        seeds,
        row.get("replaced", ""),
    )


def _row_settings(
    where: str, row: Mapping[str, Any], file: Mapping[str, Any], size: str, quick: bool
) -> dict[str, Any]:
    """Return the settings of a row: those of the file, its size, the row, and a quick run."""
    for one in row.get("sizes", {}):
        _one_of(where, "size", one, tuple(file.get("sizes", {})))
    settings = changed(
        file.get("settings", {}), file.get("sizes", {}).get(size, {}).get("settings", {})
    )
    settings = changed(
        changed(settings, row.get("settings", {})), row.get("sizes", {}).get(size, {})
    )
    if not quick:
        return settings
    return changed(changed(settings, file.get("quick", {}), known_only=True), row.get("quick", {}))


def changed(
    settings: Mapping[str, Any], changes: Mapping[str, Any], known_only: bool = False
) -> dict[str, Any]:
    """Return settings with changes, also inside tables; ``known_only``: to existing settings only.

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
    """Return the seeds if they are different whole numbers of at least 0; raise otherwise."""
    good = all(isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0 for seed in seeds)
    if not seeds or not good or len(set(seeds)) < len(seeds):
        raise ArgumentError(
            f"seeds {', '.join(map(str, seeds)) or 'none'}: "
            "give different whole numbers of at least 0"
        )
    return seeds


def _check_keys(where: str, given: Mapping[str, Any], allowed: set[str]) -> None:
    unknown = sorted(set(given) - allowed)
    if unknown:
        raise ArgumentError(
            f"{where}: unknown {', '.join(unknown)}; known are {', '.join(sorted(allowed))}"
        )


def _one_of(where: str, what: str, given: str, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise ArgumentError(f"{where}: {what}={given!r}, use one of {', '.join(allowed)}")
