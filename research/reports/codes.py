"""KD codes on the Penn Treebank."""

from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt

from research.harness.records import Record
from research.harness.report import markdown, single_records
from research.harness.settings import read_experiment

Runs = dict[str, Record]


def blocks() -> dict[str, list[str]]:
    """Return the tables of the README."""
    steps = single_records("codes/ptb")
    return {
        "ptb": table(steps),
        "steps": steps_table(steps),
        "dims": table(single_records("codes/dims")),
        "tied": table(single_records("codes/tied")),
    }


def pictures(folder: Path) -> None:
    """Draw the pictures of the README."""
    bars(folder, single_records("codes/ptb"))
    curves(folder, single_records("codes/dims"))


def published_perplexities() -> dict[str, float]:
    """Return the published perplexity of each row that has one."""
    rows = read_experiment("codes/ptb").rows
    return {row.name: row.published["perplexity"] for row in rows if row.published}


def table(runs: Runs) -> list[str]:
    """Return perplexities, sizes and the health of the codes."""
    published, rows = published_perplexities(), []
    for name, run in runs.items():
        found = run["measures"]
        health = ""
        if "utilisation" in found:
            codes = found["utilisation"], found["entropy"], found["duplicates"]
            health = "{:.0%}, {:.2f}, {:.0f}".format(*codes)
        cells = (
            f"{found['validation_perplexity']:.1f}",
            f"{found['perplexity']:.1f}",
            published.get(name, ""),
            f"{found['bytes']:,.0f}",
            health,
            len(run["history"]),
            f"{run['seconds']:.0f}",
        )
        rows.append((name, *cells))
    head = ["run", "validation", "test", "published (medium)", "bytes"]
    return markdown([*head, "codes in use, bits, duplicates", "epochs", "seconds"], rows)


def steps_table(runs: Runs) -> list[str]:
    """Return the gain of each step of the supplement, here and as published."""
    published, rows = published_perplexities(), []
    found = {name: run["measures"]["perplexity"] for name, run in runs.items()}
    for before, after in pairwise(published):
        if before in found and after in found:
            here = found[after] / found[before] - 1
            there = published[after] / published[before] - 1
            rows.append((f"{before} -> {after}", f"{here:+.1%}", f"{there:+.1%}"))
    return markdown(["step", "here", "published"], rows)


def bars(folder: Path, runs: Runs) -> None:
    """Draw the steps of table 1."""
    figure, axes = plt.subplots(figsize=(7, 3.5))
    published = published_perplexities()
    names = [name for name in runs if name in published]
    values = [runs[name]["measures"]["perplexity"] for name in names]
    axes.barh(names, values, color="tab:blue")
    for place, (name, value) in enumerate(zip(names, values, strict=True)):
        axes.annotate(
            f"{value:.1f}  (published {published[name]})",
            (value, place),
            fontsize=8,
            va="center",
            xytext=(3, 0),
            textcoords="offset points",
        )
    axes.invert_yaxis()
    axes.set(xlabel="test perplexity", title="Penn Treebank, LSTM 200 x 2, K = D = 32, input coded")
    axes.set_xlim(0, max(values) * 1.5)
    figure.tight_layout()
    figure.savefig(folder / "table1.svg", metadata={"Date": None})


def curves(folder: Path, runs: Runs) -> None:
    """Draw the perplexity against the code dimension."""
    figure, axes = plt.subplots(figsize=(6, 4))
    for composer in ("linear", "recurrent"):
        points = sorted(
            (int(name.split("-")[1]), run)
            for name, run in runs.items()
            if name.startswith(composer)
        )
        dims = [dim for dim, _ in points]
        axes.plot(
            dims,
            [run["measures"]["perplexity"] for _, run in points],
            marker="o",
            label=composer,
        )
    axes.set(
        xscale="log",
        xlabel="code dimension d'",
        ylabel="test perplexity",
        title="Penn Treebank, one epoch of 300,000 words, K = D = 16",
    )
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(folder / "dims.svg", metadata={"Date": None})
