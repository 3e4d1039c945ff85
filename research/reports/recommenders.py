"""Ways to a small recommender, side by side."""

import statistics
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

from research.harness.records import Record, load_record
from research.harness.report import markdown
from research.harness.settings import RESULTS, read_experiment
from research.runners.recommenders import PLAIN, SLACK, front, read_trials, stored_lines

NAMES = {
    **{f"dense-{dim}": f"dense rows by gradients, d = {dim}" for dim in (2, 4, 8, 16)},
    "bayes": "dense rows in closed form, d = 2 to 16",
    "low-bit": "low-bit rows, trained as stored",
    "hash": "hashed rows",
    "quotient-remainder": "quotient-remainder",
    "low-rank": "low rank",
    "mixed": "mixed dimensions",
    "selected": "frequency selection",
    "dpq": "product codes (DPQ)",
    "sparse-cbow": "Sparse CBOW: l1 on the rows, subgradient",
    "slimming": "slimming: small weights of the rows pruned",
    "slimming-anchors": "slimming on 8 to 16 anchors",
    "ant": "ANT",
    "nbant": "NBANT",
    "online-nbant": "online NBANT, one pass",
    "ant-refit": "ANT with a budget and refit",
    "hot-tail": "hot rows, coded tail",
    "graded": "graded rows",
}
Trials = Mapping[str, Record]
Lines = list[dict[str, Any]]  # one stored form, of every seed
Finals = Mapping[tuple[str, str], Lines]  # by trial and kind


def blocks(results: Path = RESULTS / "recommenders") -> dict[str, list[str]]:
    """Return the tables of the README."""
    experiment = read_experiment("recommenders/final")
    trials, finals = read_trials(results / "search"), runs_of(results / "final")
    found = {"trials": trials_text(trials).split("\n")}
    for budget in experiment.rows[0].settings["budgets"]:
        lines = budget_lines(finals, budget, len(experiment.seeds))
        found[f"{budget // 1000}kb"] = [*lines]
    return found | {size: front_table(trials, size) for size in ("bytes", "parameters")}


def pictures(folder: Path) -> None:
    """Draw the fronts."""
    results = RESULTS / "recommenders"
    trials, finals = read_trials(results / "search"), runs_of(results / "final")
    labels = {
        "bytes": "bytes of both files, without keys",
        "parameters": "parameters, as the papers count",
    }
    for size, label in labels.items():
        picture(trials, finals, size, folder / f"{size}.svg", label)


def trials_text(trials: Trials) -> str:
    """Return the number of trials of each method, and the time they took."""
    counts = Counter(found["details"]["method"] for found in trials.values())
    hours = sum(found["seconds"] for found in trials.values()) / 3600
    run = ", ".join(f"{name} {number}" for name, number in sorted(counts.items()))
    text = f"Trials run: {run} ({hours:.1f} hours of one thread of a busy machine)."
    return textwrap.fill(text, 128, break_long_words=False, break_on_hyphens=False)


def runs_of(folder: Path) -> Finals:
    """Return the stored forms of the final runs by trial and kind, with method and settings."""
    found: dict[tuple[str, str], Lines] = defaultdict(list)
    for path in sorted(folder.glob("*.json")):
        record = load_record(path)
        trial = path.stem.rpartition("-seed-")[0]
        details = record["details"]
        own = {"method": details["method"], "settings": details["chosen"], "trial": trial}
        for line in details["stored"]:
            found[trial, line["kind"]].append({**line, **own, "seed": record["seed"]})
    return found


def best_within(finals: Finals, budget: int, method: str, seeds: int) -> Lines | None:
    """Return the best stored form of a method by validation, its mean bytes within a budget."""
    fitting = [
        lines
        for lines in finals.values()
        if lines[0]["method"] == method
        and len(lines) == seeds
        and mean(lines, "bytes") <= SLACK * budget
    ]
    return min(fitting, key=lambda lines: mean(lines, "validation")) if fitting else None


def mean(lines: Lines, name: str) -> float:
    """Return the mean of a number over seeds."""
    return statistics.fmean(line[name] for line in lines)


def deviation(lines: Lines, name: str) -> float:
    """Return the standard deviation of a number over seeds."""
    return statistics.stdev([line[name] for line in lines]) if len(lines) > 1 else 0.0


def shown(value: object) -> str:
    """Return a setting as text."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def budget_lines(finals: Finals, budget: int, seeds: int) -> Iterator[str]:
    """Yield the table of one budget, the best first."""
    found = {method: best_within(finals, budget, method, seeds) for method in NAMES}
    ranked = sorted(
        (lines for lines in found.values() if lines), key=lambda lines: mean(lines, "test")
    )
    rows = []
    for lines in ranked:
        first = lines[0]
        settings = ", ".join(f"{key} {shown(value)}" for key, value in first["settings"].items())
        rows.append(
            (
                NAMES[first["method"]],
                f"{mean(lines, 'test'):.4f} ± {deviation(lines, 'test'):.4f}",
                f"{mean(lines, 'validation'):.4f}",
                f"{mean(lines, 'bytes'):,.0f}",
                f"{mean(lines, 'parameters'):,.0f}",
                first["kind"],
                settings,
            )
        )
    head = ["method", "test MSE", "validation", "bytes", "parameters", "stored as", "settings"]
    yield from markdown(head, rows)
    missing = [NAMES[method] for method, best in found.items() if not best]
    if missing:
        yield ""
        yield f"Nothing that small was found or run of: {'; '.join(missing)}."
    yield ""
    yield verdict(ranked)


def verdict(ranked: list[Lines]) -> str:
    """Say who has the lowest error, and how it compares with the best plain rows."""
    if not ranked:
        return "No final runs yet."
    winner = ranked[0]
    plain = next((lines for lines in ranked if lines[0]["method"] in PLAIN), None)
    text = f"Lowest error here: **{NAMES[winner[0]['method']]}**, {mean(winner, 'test'):.4f}."
    if plain is None or plain is winner:
        return text
    less = mean(plain, "test") - mean(winner, "test")
    return f"{text} The best plain rows ({NAMES[plain[0]['method']]}) have {mean(plain, 'test'):.4f}, {less:.4f} more."


def picture(trials: Trials, finals: Finals, size: str, path: Path, label: str) -> None:
    """Draw all stored forms of the search in grey, their front, and the test errors of the final runs."""
    mpl.rcParams["svg.hashsalt"] = "featherbed"
    figure, axes = plt.subplots(figsize=(11, 5.5))
    lines = [line for line in stored_lines(trials) if line[2]["validation"] < 1.0]
    axes.scatter(
        [line[2][size] for line in lines],
        [line[2]["validation"] for line in lines],
        s=5,
        color="0.8",
    )
    edge = front(lines, size)
    axes.step(
        [line[2][size] for line in edge],
        [line[2]["validation"] for line in edge],
        "k-",
        where="post",
        linewidth=0.8,
    )
    colours, shapes = mpl.colormaps["tab20"], "os^D"
    for number, (method, name) in enumerate(NAMES.items()):
        own = [runs for runs in finals.values() if runs[0]["method"] == method]
        if own:
            points = sorted((mean(runs, size), mean(runs, "test")) for runs in own)
            axes.plot(
                *zip(*points, strict=True),
                marker=shapes[number // 6],
                color=colours(number % 20),
                markersize=4,
                linewidth=0.7,
                label=name,
            )
    axes.set(
        xscale="log",
        xlabel=label,
        ylabel="MSE (grey and front: validation; coloured: test)",
        ylim=(0.68, 0.9),
    )
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def front_table(trials: Trials, size: str) -> list[str]:
    """Return the front of the search."""
    rows = [
        (f"{line[size]:,}", f"{line['validation']:.4f}", NAMES[method], line["kind"])
        for _, method, line in front(stored_lines(trials), size)
    ]
    return markdown([size, "validation MSE", "method", "stored as"], rows)
