"""Write README.md and the pictures beside this file from the result files: python experiments/sse/report.py"""

import json
import math
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

HERE = Path(__file__).parent
METHODS = ("sgd", "dropout", "sse-se", "sse-graph", "als-laplacian")


def results(name):
    """Return the results of a settings file: {(model, dim, method): result}."""
    found = {}
    for path in sorted((HERE / "results").glob(f"{name}-*.json")):
        run = json.loads(path.read_text())
        own = run["settings"]
        found[own["model"], own["dim"], own["method"]] = run
    return found


def chosen(run):
    """Return the rows of the chosen settings, by seed."""
    own = {key: value for key, value in run["metrics"]["validation"].items() if key != "rmse"}
    rows = [row for row in run["history"] if all(row[key] == value for key, value in own.items())]
    return {row["run_seed"]: row for row in rows}, own


def compared(run, plain):
    """Return the mean difference of test errors to plain SGD on the same seeds, and its standard error."""
    mine, base = chosen(run)[0], chosen(plain)[0]
    gaps = np.array([mine[seed]["test"] - base[seed]["test"] for seed in mine if seed in base])
    return gaps.mean(), gaps.std(ddof=1) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan


def lines_of(runs):
    yield "| model | d | method | chosen settings | test RMSE | to SGD (standard error) | best epoch | ms an epoch |"
    yield "|---|---|---|---|---|---|---|---|"
    for model, dim in sorted(
        {(m, d) for m, d, _ in runs},
        key=lambda pair: (-len(pair[0]) if pair[0] != "plain" else -9, pair[1]),
    ):
        for method in METHODS:
            run = runs.get((model, dim, method))
            if run is None:
                continue
            rows, own = chosen(run)
            gap = ""
            if method != "sgd" and (model, dim, "sgd") in runs:
                gap = "{:+.4f} ({:.4f})".format(*compared(run, runs[model, dim, "sgd"]))
            test = np.mean([row["test"] for row in rows.values()])
            epoch = np.mean([row["epoch"] for row in rows.values()])
            pace = 1000 * np.median([row["seconds"] for row in rows.values()])
            settings = ", ".join(f"{key} {value}" for key, value in own.items())
            yield f"| {model} | {dim} | {method} | {settings} | {test:.4f} | {gap} | {epoch:.0f} | {pace:.0f} |"


def dims_picture(runs):
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
    figure.savefig(HERE / "dims.svg")


def main():
    few, dims, split, douban = (results(name) for name in ("few", "dims", "split", "douban"))
    lines = ["# Stochastic shared embeddings", ""]
    lines += [
        "`python experiments/sse/run.py few.toml` (`dims.toml`, `split.toml`, `douban.toml`), `figure3.py`, `rademacher.py`."
    ]
    lines += [
        "Stochastic gradient descent one rating at a time, learning rate 0.01, as the paper has it; settings are chosen on the"
    ]
    lines += [
        "validation part, by the mean of two seeds, and all seeds are then run with them. Differences are paired by seed.",
        "",
    ]
    lines += ["Seconds are of a busy machine.", ""]
    lines += [
        "## MovieLens-1M, users with fewer than 60 ratings",
        "",
        "Random 80/10/10; users related by age group, movies by a shared",
    ]
    lines += [
        "actor. Published (RMSE): SGD-MF 1.0984, graph Laplacian + ALS-MF 1.0464, SSE-Graph + SGD-MF 1.0145; protocol and graph"
    ]
    lines += ["differ (all of IMDb's cast there, the top-billed here).", "", *lines_of(few), ""]
    if dims:
        dims_picture(dims)
        lines += [
            "## Against the dimension",
            "",
            "The plain model, the same users.",
            "",
            *lines_of(dims),
            "",
            "![dims](dims.svg)",
            "",
        ]
    if split:
        lines += [
            "## The authors' split",
            "",
            "1,496 users with 200 ratings each; a tenth of them validates.",
            "",
            *lines_of(split),
            "",
        ]
    if douban:
        lines += ["## Douban with its graph of users", "", *lines_of(douban), ""]
    figure = HERE / "results" / "figure3.json"
    if figure.exists():
        found = json.loads(figure.read_text())["metrics"]
        lines += [
            "## Figure 3: movies in three dimensions",
            "",
            "Mean distances, in units of the mean distance from the centre.",
        ]
        lines += [
            "`python experiments/sse/figure3.py page.html` makes the page on which the clouds can be turned.",
            "",
        ]
        columns = list(next(iter(found.values())))
        lines += ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
        lines += [
            f"| {name} | " + " | ".join(f"{row[column]:.3f}" for column in columns) + " |"
            for name, row in found.items()
        ]
        lines += ["", "![figure 3](figure3.png)", ""]
    lines += [
        "## Figure 5: signs drawn for shared losses",
        "",
        (HERE / "rademacher.md").read_text().strip(),
        "",
    ]
    (HERE / "README.md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
