"""Write README.md and the pictures beside this file from the result files: python experiments/ant/report.py"""

import json
from pathlib import Path

import matplotlib.pyplot as plt

HERE = Path(__file__).parent


def results(name):
    """Return the results of a settings file by run."""
    paths = sorted((HERE / "results").glob(f"{name}-*.json"))
    return {path.stem.removeprefix(f"{name}-"): json.loads(path.read_text()) for path in paths}


def planted_lines(runs):
    yield "| run | relative error | non-zeros | times the planted | anchors |"
    yield "|---|---|---|---|---|"
    for name in ("prox", "refit", "refit-40", "budget-66000"):
        if name in runs:
            found = runs[name]["metrics"]["validation"]
            times = found["nonzeros"] / found["planted_nonzeros"]
            yield f"| {name} | {found['error']:.2%} | {found['nonzeros']:,} | {times:.2f} | {found['anchors']} |"


def grid_of(runs):
    grid = {
        int(name.removeprefix("k-")): run["metrics"]["validation"]
        for name, run in runs.items()
        if name.startswith("k-")
    }
    return {k: objective_of(runs[f"k-{k}"], found) for k, found in sorted(grid.items())}


def objective_of(run, found):
    settings = run["settings"]
    price = settings["lambda1"] - settings["lambda2"]
    return found["loss"] + settings["lambda2"] * found["nonzeros"] + price * found["anchors"]


def growth_lines(runs, grid):
    best = min(grid, key=grid.get)
    yield "| run | K | objective (5) | over the grid's best |"
    yield "|---|---|---|---|"
    yield f"| grid, K = {best} | {best} | {grid[best]:.3f} | |"
    for name in ("growth-from-10", "growth-from-60", "trend-from-10", "trend-from-60"):
        if name in runs:
            found = runs[name]["metrics"]["validation"]
            over = found["objective"] / grid[best] - 1
            yield f"| {name} | {found['anchors']} | {found['objective']:.3f} | {over:+.1%} |"
    yield ""
    yield "Grid: " + ", ".join(f"K = {k}: {value:.3f}" for k, value in grid.items()) + "."


def growth_picture(runs, grid):
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
            found = run["metrics"]["validation"]
            axes[1].plot(found["anchors"], found["objective"], "*", markersize=12, label=name)
    axes[1].set(xlabel="anchors", ylabel="objective (5)", yscale="log")
    axes[1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(HERE / "growth.svg")


def ratings_lines(runs):
    yield "| run | lambda | non-zeros | validation MSE | test MSE | seconds |"
    yield "|---|---|---|---|---|---|"
    for name, run in sorted(runs.items(), key=lambda item: item[1]["metrics"]["validation"]["mse"]):
        found = run["metrics"]["validation"]
        shown = f"{found['nonzeros']:,}" + (
            f" ({found['anchors'][0]} anchors)" if name == "growth" else ""
        )
        test = run["metrics"]["test"]["mse"]
        cells = (
            f"{run['settings']['lam']:g}",
            shown,
            f"{found['mse']:.4f}",
            f"{test:.4f}",
            f"{run['seconds']:.0f}",
        )
        yield f"| {name} | " + " | ".join(cells) + " |"


def online_lines(runs):
    yield "| run | before, all | before, last tenth | test MSE | non-zeros | anchors | seconds |"
    yield "|---|---|---|---|---|---|---|"
    for name, run in runs.items():
        found, test = run["metrics"]["validation"], run["metrics"]["test"]["mse"]
        errors = (f"{found['before']:.4f}", f"{found['before_last_tenth']:.4f}", f"{test:.4f}")
        rest = (f"{found['nonzeros']:,}", found["anchors"][0], f"{run['seconds']:.0f}")
        yield f"| {name} | " + " | ".join(map(str, (*errors, *rest))) + " |"


def ratings_picture(runs):
    figure, axes = plt.subplots(figsize=(6, 3.5))
    for name, run in runs.items():
        found = run["metrics"]["validation"]
        kind = name.split("-")[0]
        colour = {"prox": "tab:red", "penalty": "tab:orange", "projection": "tab:blue"}.get(
            kind, "tab:green"
        )
        axes.plot(found["nonzeros"], found["mse"], "o", color=colour)
        axes.annotate(
            name,
            (found["nonzeros"], found["mse"]),
            fontsize=6,
            xytext=(4, 2),
            textcoords="offset points",
        )
    axes.set(xlabel="non-zero weights", ylabel="validation MSE")
    figure.tight_layout()
    figure.savefig(HERE / "ml1m.svg")


def main():
    planted, ml1m = results("planted"), results("ml1m")
    grid = grid_of(planted)
    growth_picture(planted, grid)
    ratings_picture(ml1m)
    lines = ["# Anchors: planted rows, budgets, growth", ""]
    lines += [
        "`python experiments/ant/run.py planted.toml` and `... ml1m.toml`; settings stand in these files.",
        "",
    ]
    lines += [
        "## Planted rows",
        "",
        "20,000 rows of width 32, each 3 of 30 planted anchors, seen with noise of 1 %; anchors and",
    ]
    lines += ["weights learnt from random starts, 100 epochs.", "", *planted_lines(planted), ""]
    lines += [
        "## NBANT on the same rows",
        "",
        "λ1 = 0.05, λ2 = 1e-5; 400 epochs, the same training for all; of a run with growth",
    ]
    lines += [
        "the epoch of the lowest objective counts.",
        "",
        *growth_lines(planted, grid),
        "",
        "![growth](growth.svg)",
        "",
    ]
    lines += [
        "## MovieLens-1M to 30,000 non-zeros",
        "",
        "15 anchors a side, d = 16, biases, Yogi 0.01, 30 epochs; the best epoch on the",
    ]
    lines += [
        "validation part (of those within the budget); the test part was read once for each run.",
        "",
    ]
    lines += [*ratings_lines(ml1m), "", "![MovieLens](ml1m.svg)", ""]
    lines += [
        "## Online",
        "",
        "One pass over the same training ratings, shuffled, 1,024 at a time; each batch trained for at most so many steps",
    ]
    lines += [
        "and then gone. `before` is the error of batches before anything was trained on them. Published (ML-25M): 0.875.",
        "",
    ]
    lines += [*online_lines(results("online")), ""]
    (HERE / "README.md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
