"""Write README.md and the two pictures beside this file from the result files: python experiments/kd/report.py"""

import json
import tomllib
from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt

HERE = Path(__file__).parent
PUBLISHED = {
    "cr": 90.61,
    "cr-ste": 90.15,
    "cr-ste-temperature": 89.55,
    "cr-ste-entropy": 89.03,
    "cr-ste-entropy-pdg": 83.71,
    "cr-ste-entropy-pdg-auto": 83.11,
}


def results(name):
    """Return the results of a settings file, in its order; runs without one are left out."""
    runs = tomllib.loads((HERE / f"{name}.toml").read_text())["runs"]
    paths = {run: HERE / "results" / f"{name}-{run}.json" for run in runs}
    return {run: json.loads(path.read_text()) for run, path in paths.items() if path.exists()}


def table(runs):
    lines = [
        "| run | validation | test | published (medium) | bytes | codes in use, bits, duplicates | epochs | seconds |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    for name, run in runs.items():
        codes = run["metrics"].get("codes")
        health = (
            ""
            if codes is None
            else f"{codes['utilisation']:.0%}, {codes['entropy']:.2f}, {codes['duplicates']}"
        )
        cells = (
            f"{run['metrics']['validation']['perplexity']:.1f}",
            f"{run['metrics']['test']['perplexity']:.1f}",
            PUBLISHED.get(name, ""),
            f"{run['sizes']['words']['file']:,}",
            health,
            len(run["history"]),
            f"{run['seconds']:.0f}",
        )
        lines.append(f"| {name} | " + " | ".join(map(str, cells)) + " |")
    return lines


def bars(runs):
    figure, axes = plt.subplots(figsize=(7, 3.5))
    names = [name for name in runs if name in PUBLISHED]
    values = [runs[name]["metrics"]["test"]["perplexity"] for name in names]
    axes.barh(names, values, color="tab:blue")
    for place, (name, value) in enumerate(zip(names, values, strict=True)):
        axes.annotate(
            f"{value:.1f}  (published {PUBLISHED[name]})",
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
    figure.savefig(HERE / "table1.svg", metadata={"Date": None})


def curves(runs):
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
            [run["metrics"]["test"]["perplexity"] for _, run in points],
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
    figure.savefig(HERE / "dims.svg", metadata={"Date": None})


def reading(found):
    """Say which of the supplement's steps help here, where their runs are there."""
    steps = list(PUBLISHED)
    lines = ["| step | here | published |", "|---|---|---|"]
    for before, after in pairwise(steps):
        if before in found and after in found:
            here, there = found[after] / found[before] - 1, PUBLISHED[after] / PUBLISHED[before] - 1
            lines.append(f"| {before} -> {after} | {here:+.1%} | {there:+.1%} |")
    return [*lines, ""]


def main():
    tricks, dims, tied = results("ptb"), results("dims"), results("tied")
    lines = ["# KD codes on the Penn Treebank", ""]
    if PUBLISHED.keys() & tricks.keys():
        bars(tricks)
        lines += [
            "`python experiments/kd/run.py ptb.toml` runs the six lines of table 1 of the supplement to Chen, Min and Sun 2018",
            "(and the full table) for two epochs each, about a quarter of an hour on two busy cores. Published",
            "figures are those of the medium model (650 x 2) after 35 epochs: order and gaps may be compared, levels not.",
            "",
            *table(tricks),
            "",
            "![table 1](table1.svg)",
            "",
            *reading({name: run["metrics"]["test"]["perplexity"] for name, run in tricks.items()}),
        ]
    if dims:
        curves(dims)
        lines += [
            "`python experiments/kd/run.py dims.toml`: figure 1, perplexity against the code dimension, one epoch of 300,000",
            "words.",
            "",
            *table(dims),
            "",
        ]
        lines += ["![figure 1](dims.svg)", ""]
    if tied:
        lines += [
            "`python experiments/kd/run.py tied.toml`: the softmax tied to the table, one epoch of 300,000 words.",
            "",
            *table(tied),
            "",
        ]
    (HERE / "README.md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
