"""Stochastic shared embeddings."""

import math
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from research.harness.records import Record
from research.harness.report import markdown, single_records
from research.harness.settings import read_experiment

METHODS = ("sgd", "dropout", "sse-se", "sse-graph", "als-laplacian")
SHOWN = (0.0, 0.01, 0.1, 0.3, 0.5, 1.0)  # probabilities
Runs = dict[tuple[str, int, str], Record]  # by model, dimension and method


def blocks() -> dict[str, list[str]]:
    """Return the tables of the README."""
    found = {name: table(runs_of(name)) for name in ("few", "dims", "split", "douban")}
    signs = single_records("sharing/rademacher")
    return found | {"figure3": clouds_table(), "rademacher": signs_table(signs)}


def pictures(folder: Path) -> None:
    """Draw the pictures of the README but figure 3, which is drawn as it is run."""
    dims_picture(folder, runs_of("dims"))
    sign_picture(folder, single_records("sharing/rademacher"))


def runs_of(name: str) -> Runs:
    """Return the records of a sweep by model, dimension and method."""
    rows = {row.name: row.settings for row in read_experiment(f"sharing/{name}").rows}
    return {
        (rows[row]["model"], rows[row]["dim"], rows[row]["method"]): record
        for row, record in single_records(f"sharing/{name}").items()
    }


def chosen(run: Record) -> dict[int, dict[str, Any]]:
    """Return the results of the chosen settings by seed."""
    own = run["details"]["chosen"]
    rows = [row for row in run["history"] if all(row[key] == value for key, value in own.items())]
    return {row["run_seed"]: row for row in rows}


def compared(run: Record, plain: Record) -> tuple[float, float]:
    """Return the mean difference of test errors to plain SGD by seed, and its standard error."""
    mine, base = chosen(run), chosen(plain)
    gaps = np.array([mine[seed]["test"] - base[seed]["test"] for seed in mine if seed in base])
    error = gaps.std(ddof=1) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan
    return float(gaps.mean()), float(error)


def table(runs: Runs) -> list[str]:
    """Return the errors of a sweep, plain models first."""
    order = {"plain": 0, "biases": 1, "mean": 2}
    rows = []
    for model, dim in sorted({(m, d) for m, d, _ in runs}, key=lambda one: (order[one[0]], one[1])):
        for method in METHODS:
            run = runs.get((model, dim, method))
            if run is None:
                continue
            found = [*chosen(run).values()]
            gap = ""
            if method != "sgd" and (model, dim, "sgd") in runs:
                gap = "{:+.4f} ({:.4f})".format(*compared(run, runs[model, dim, "sgd"]))
            settings = ", ".join(f"{k} {v}" for k, v in run["details"]["chosen"].items())
            test, epoch = (np.mean([row[key] for row in found]) for key in ("test", "epoch"))
            pace = 1000 * np.median([row["seconds"] for row in found])
            cells = f"{test:.4f}", gap, f"{epoch:.0f}", f"{pace:.0f}"
            rows.append((model, dim, method, settings, *cells))
    head = ["model", "d", "method", "chosen settings", "test RMSE", "to SGD (standard error)"]
    return markdown([*head, "best epoch", "ms an epoch"], rows)


def clouds_table() -> list[str]:
    """Return mean distances between movies."""
    found: dict[str, dict[str, float]] = {}
    for name, value in single_records("sharing/figure3")["movies"]["measures"].items():
        way, _, what = name.partition("_")
        found.setdefault(way, {})[what] = value
    columns = [*next(iter(found.values()))]
    rows = [(way, *(f"{one[column]:.3f}" for column in columns)) for way, one in found.items()]
    lines = markdown(["", *columns], rows)
    return [lines[0].replace("|  |", "| |"), *lines[1:]]


def signs_table(results: dict[str, Record]) -> list[str]:
    """Return the medians over draws of signs, in thousandths."""
    rows = []
    for name, result in results.items():
        by_p = {row["p"]: row for row in result["history"]}
        cells = [f"{1e3 * by_p[p]['median']:.3f}" for p in SHOWN]
        ends = by_p[0.0], by_p[1.0]
        cells += [" to ".join(f"{e[key]:.2f}" for e in ends) for key in ("loss", "spread")]
        rows.append((name, f"{result['measures']['train_mse']:.3f}", *cells))
    columns = [f"p = {p:g}" for p in SHOWN]
    return markdown(["factors", "train MSE", *columns, "mean loss, p = 0 to 1", "its spread"], rows)


def dims_picture(folder: Path, runs: Runs) -> None:
    """Draw the gain by sharing against the dimension."""
    dims = sorted(
        {
            dim
            for _, dim, method in runs
            if ("plain", dim, "sse-se") in runs and ("plain", dim, "sgd") in runs
        }
    )
    gains = [compared(runs["plain", dim, "sse-se"], runs["plain", dim, "sgd"]) for dim in dims]
    figure, axes = plt.subplots(figsize=(6, 3.5))
    axes.errorbar(
        dims, [-gain for gain, _ in gains], [error for _, error in gains], marker="o", capsize=3
    )
    axes.set(
        xscale="log",
        xlabel="dimension",
        ylabel="RMSE gained by SSE-SE",
        xticks=dims,
        xticklabels=dims,
    )
    axes.axhline(0, color="grey", linewidth=0.5)
    figure.tight_layout()
    figure.savefig(folder / "dims.svg")


def sign_picture(folder: Path, results: dict[str, Record]) -> None:
    """Draw the signs of each kind of factors by probability."""
    figure, axes = plt.subplots(1, len(results), figsize=(12, 3.2))
    keys = {"med": "median", "q1": "q25", "q3": "q75", "whislo": "q05", "whishi": "q95"}
    for axis, (name, result) in zip(axes, results.items(), strict=True):
        boxes = [{part: 1e3 * row[key] for part, key in keys.items()} for row in result["history"]]
        axis.bxp(boxes, showfliers=False)
        axis.plot(
            range(1, len(boxes) + 1),
            [1e3 * row["predicted"] for row in result["history"]],
            ".-",
            color="tab:blue",
        )
        axis.set_xticks(
            range(1, len(boxes) + 1),
            [f"{row['p']:g}" for row in result["history"]],
            fontsize=6,
            rotation=90,
        )
        axis.set(title=name, xlabel="SSE probability", ylim=(0, None))
    axes[0].set_ylabel("|Σ σ loss| / n, in thousandths")
    figure.tight_layout()
    figure.savefig(folder / "rademacher.svg")
