"""Anchors: planted rows, budgets, growth."""

from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt

from research.harness.records import Record
from research.harness.report import markdown, single_records

Runs = dict[str, Record]


def blocks() -> dict[str, list[str]]:
    """Return the tables of the README."""
    planted = single_records("anchors/planted")
    return {
        "planted": planted_table(planted),
        "growth": [*growth_lines(planted, grid_of(planted))],
        "ml1m": ratings_table(single_records("anchors/ml1m")),
        "online": online_table(single_records("anchors/online")),
    }


def pictures(folder: Path) -> None:
    """Draw the pictures of the README."""
    planted = single_records("anchors/planted")
    growth_picture(folder, planted, grid_of(planted))
    ratings_picture(folder, single_records("anchors/ml1m"))


def planted_table(runs: Runs) -> list[str]:
    """Return how well planted rows are found."""
    rows = []
    for name in ("prox", "refit", "refit-40", "budget-66000"):
        if name in runs:
            found = runs[name]["measures"]
            times = found["nonzeros"] / found["planted_nonzeros"]
            cells = f"{found['error']:.2%}", f"{found['nonzeros']:,.0f}", f"{times:.2f}"
            rows.append((name, *cells, f"{found['anchors']:.0f}"))
    return markdown(["run", "relative error", "non-zeros", "times the planted", "anchors"], rows)


def grid_of(runs: Runs) -> dict[int, float]:
    """Return the objective by the number of anchors."""
    grid = {int(name[2:]): run for name, run in runs.items() if name.startswith("k-")}
    return {k: objective_of(grid[k]) for k in sorted(grid)}


def objective_of(run: Record) -> float:
    """Return equation 5 of a run with a given number of anchors."""
    found, settings = run["measures"], run["settings"]
    price = settings["lambda1"] - settings["lambda2"]
    weights = settings["lambda2"] * found["nonzeros"]
    return float(found["loss"] + weights + price * found["anchors"])


def growth_lines(runs: Runs, grid: dict[int, float]) -> Iterator[str]:
    """Yield NBANT against the best of the grid, and the grid."""
    best = min(grid, key=lambda k: grid[k])
    rows = [(f"grid, K = {best}", str(best), f"{grid[best]:.3f} | |")]
    for name in ("growth-from-10", "growth-from-60", "trend-from-10", "trend-from-60"):
        if name in runs:
            found = runs[name]["measures"]
            over = f"{found['objective'] / grid[best] - 1:+.1%}"
            rows.append((name, f"{found['anchors']:.0f}", f"{found['objective']:.3f} | {over} |"))
    yield "| run | K | objective (5) | over the grid's best |"
    yield "|---|---|---|---|"
    yield from ("| " + " | ".join(row) for row in rows)
    yield ""
    yield "Grid: " + ", ".join(f"K = {k}: {value:.3f}" for k, value in grid.items()) + "."


def ratings_table(runs: Runs) -> list[str]:
    """Return the ways to a budget of non-zero weights, the lowest validation error first."""
    rows = []
    for name, run in sorted(runs.items(), key=lambda item: item[1]["measures"]["validation"]):
        found = run["measures"]
        count = f"{found['nonzeros']:,.0f}"
        if name == "growth":
            count += f" ({run['details']['anchors'][0]} anchors)"
        errors = f"{found['validation']:.4f}", f"{found['mse']:.4f}"
        rows.append((name, f"{run['settings']['lam']:g}", count, *errors, f"{run['seconds']:.0f}"))
    return markdown(["run", "lambda", "non-zeros", "validation MSE", "test MSE", "seconds"], rows)


def online_table(runs: Runs) -> list[str]:
    """Return the errors of online runs."""
    rows = []
    for name, run in runs.items():
        found = run["measures"]
        errors = (f"{found[key]:.4f}" for key in ("before", "before_last", "mse"))
        anchors = run["details"].get("anchors", [found.get("anchors")])[0]
        sizes = f"{found['nonzeros']:,.0f}", f"{anchors:.0f}"
        rows.append((name, *errors, *sizes, f"{run['seconds']:.0f}"))
    head = ["run", "before, all", "before, last tenth", "test MSE", "non-zeros", "anchors"]
    return markdown([*head, "seconds"], rows)


def growth_picture(folder: Path, runs: Runs, grid: dict[int, float]) -> None:
    """Draw the number of anchors by epoch, and the objective over it."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.5))
    for name, run in runs.items():
        if name.startswith(("growth", "trend")):
            style = "--" if name.startswith("trend") else "-"
            axes[0].plot([row["anchors"] for row in run["history"]], style, label=name)
    axes[0].axhline(30, color="grey", linewidth=0.5)
    axes[0].set(xlabel="epoch", ylabel="anchors")
    axes[0].legend(fontsize=7)
    axes[1].plot(list(grid), list(grid.values()), "o-", label="K given")
    for name, run in runs.items():
        if name.startswith("growth"):
            found = run["measures"]
            axes[1].plot(found["anchors"], found["objective"], "*", markersize=12, label=name)
    axes[1].set(xlabel="anchors", ylabel="objective (5)", yscale="log")
    axes[1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(folder / "growth.svg")


def ratings_picture(folder: Path, runs: Runs) -> None:
    """Draw the error against the number of non-zero weights."""
    figure, axes = plt.subplots(figsize=(6, 3.5))
    for name, run in runs.items():
        found = run["measures"]
        kind = name.split("-")[0]
        colour = {"prox": "tab:red", "penalty": "tab:orange", "projection": "tab:blue"}.get(
            kind, "tab:green"
        )
        axes.plot(found["nonzeros"], found["validation"], "o", color=colour)
        axes.annotate(
            name,
            (found["nonzeros"], found["validation"]),
            fontsize=6,
            xytext=(4, 2),
            textcoords="offset points",
        )
    axes.set(xlabel="non-zero weights", ylabel="validation MSE")
    figure.tight_layout()
    figure.savefig(folder / "ml1m.svg")
