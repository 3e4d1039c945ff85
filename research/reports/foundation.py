"""Foundation runs: dense rows and anchors, ratings and words."""

from pathlib import Path

import matplotlib.pyplot as plt

from research.harness.records import Record
from research.harness.report import markdown, single_records

Runs = dict[str, Record]
PAPER = {
    "MF": (155.2, 0.771),
    "ANT 120/8": (59.4, 0.772),
    "ANT 15/15": (29.2, 0.786),
    "ANT 5/10": (10.8, 0.836),
}


def blocks() -> dict[str, list[str]]:
    """Return the tables of the README."""
    return {
        "ml1m": ratings_table(single_records("foundation/ml1m")),
        "ptb": words_table(single_records("foundation/ptb")),
    }


def pictures(folder: Path) -> None:
    """Draw the picture of the README."""
    error_picture(folder, single_records("foundation/ml1m"))


def ratings_table(runs: Runs) -> list[str]:
    """Return errors and sizes on MovieLens."""
    rows = []
    for name, run in runs.items():
        found = run["measures"]
        sizes = f"{found['parameters']:,.0f}", f"{found['bytes'] / 1000:,.0f} KB"
        rows.append(
            (name, f"{found['mse']:.4f}", *sizes, len(run["history"]), f"{run['seconds']:.0f}")
        )
    head = ["run", "test MSE", "parameters", "file (exact float32)", "epochs", "seconds"]
    return markdown(head, rows)


def words_table(runs: Runs) -> list[str]:
    """Return perplexities and speed on the Penn Treebank."""
    names = ("untrained_perplexity", "validation_perplexity", "perplexity")
    rows = []
    for name, run in runs.items():
        found = run["measures"]
        speed = f"{run['history'][-1]['tokens_per_second']:,.0f}"
        values = (f"{found[key]:,.1f}" for key in names)
        rows.append((name, *values, speed, f"{found['parameters']:,.0f}"))
    return markdown(["run", "untrained", "validation", "test", "tokens/s", "parameters"], rows)


def error_picture(folder: Path, runs: Runs) -> None:
    """Draw the test error against the number of parameters."""
    figure, axes = plt.subplots(figsize=(6, 4))
    for number, (name, run) in enumerate(runs.items()):
        point = (run["measures"]["parameters"] / 1000, run["measures"]["mse"])
        axes.scatter(*point, color="tab:blue")
        place = (4, 4) if number % 2 == 0 else (-4, -12)
        axes.annotate(
            name,
            point,
            fontsize=8,
            xytext=place,
            textcoords="offset points",
            ha="left" if number % 2 == 0 else "right",
        )
    for name, (kilo, error) in PAPER.items():
        axes.scatter(kilo, error, color="tab:gray", marker="x")
        axes.annotate(
            f"paper: {name}",
            (kilo, error),
            fontsize=7,
            color="tab:gray",
            xytext=(4, -9),
            textcoords="offset points",
        )
    axes.set(
        xscale="log",
        xlabel="thousand parameters, nnz(T) + K d",
        ylabel="test MSE",
        title="MovieLens-1M, random 80/10/10, d = 16, one seed",
    )
    axes.set_xlim(8, 400)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(folder / "mse.svg", metadata={"Date": None})
