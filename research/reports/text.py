"""The page of the text runs: means over seeds with standard errors, and two drawings. `python experiments/text/report.py`."""

import json
import math
import statistics
from pathlib import Path

import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent


def records(task):
    """Return the results of a task by run, in the order of seeds."""
    found = {}
    for path in sorted((HERE / "results").glob(f"{task}-*-seed-*.json")):
        record = json.loads(path.read_text())
        found.setdefault(record["run"], []).append(record)
    return found


def mean(values):
    """Return the mean with its standard error, in percent."""
    values = [100 * value for value in values]
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return f"{statistics.mean(values):.2f}" + ("" if error is None else f" ± {error:.2f}")


def agnews():
    """Return the table of AG-News."""
    lines = [
        "| run | seeds | test accuracy % | validation % | table parameters | fewer | whole model, bytes |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for run, some in records("agnews").items():
        metrics = [record["metrics"] for record in some]
        sizes = [one["sizes"] for one in metrics]
        parameters = statistics.mean(size["parameters"] for size in sizes)
        fewer = statistics.mean(size["dense_parameters"] for size in sizes) / parameters
        whole = statistics.mean(size["whole"] for size in sizes)
        tests, valid = (
            [one[part]["accuracy"] for one in metrics] for part in ("test", "validation")
        )
        lines.append(
            f"| {run} | {len(some)} | {mean(tests)} | {mean(valid)} | {parameters:,.0f} | {fewer:.1f} | {whole:,.0f} |"
        )
    return lines


def imdb():
    """Return the effect of sharing, seed by seed."""
    found = records("imdb")
    plain, shared = (
        {r["seed"]: r["metrics"]["test"]["accuracy"] for r in found[run]}
        for run in ("plain", "sse")
    )
    both = sorted(set(plain) & set(shared))
    effect = mean([shared[seed] - plain[seed] for seed in both])
    return [
        f"Bag, d = 64, {len(both)} seeds: {mean([plain[s] for s in both])} % without SSE-SE,",
        f"{mean([shared[s] for s in both])} % with it.",
        f"The effect, seed by seed: **{effect} points**.",
    ]


def ptb():
    """Return the table of the Penn Treebank."""
    found = records("ptb")
    if "dense" not in found:
        return []
    base = found["dense"][0]["metrics"]["test"]["perplexity"]
    lines = [
        "| run | test perplexity | to dense | validation | parameters | fewer | bytes (float16) |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for run, some in sorted(
        found.items(), key=lambda item: item[1][0]["metrics"]["test"]["perplexity"]
    ):
        metrics = some[0]["metrics"]
        own = metrics["test"]["perplexity"]
        stored = "no packed form" if metrics["bytes"] is None else f"{metrics['bytes']:,}"
        fewer = metrics["dense_parameters"] / metrics["parameters"]
        lines.append(
            f"| {run} | {own:.1f} | {own / base - 1:+.1%} | {metrics['validation']['perplexity']:.1f} | "
            f"{metrics['parameters']:,} | {fewer:.1f} | {stored} |"
        )
    return lines


def drawn():
    """Draw accuracy against the bytes of the whole model."""
    figure, axes = plt.subplots(figsize=(6, 3.6))
    for run, some in records("agnews").items():
        sizes = [record["metrics"]["sizes"]["whole"] for record in some]
        tests = [100 * record["metrics"]["test"]["accuracy"] for record in some]
        axes.plot(sizes, tests, "o", label=run)
    axes.set_xscale("log")
    axes.set_xlabel("bytes of the whole model")
    axes.set_ylabel("test accuracy, %")
    axes.legend()
    figure.tight_layout()
    figure.savefig(HERE / "agnews.svg", metadata={"Date": None})


def main():
    drawn()
    text = (HERE / "README.md").read_text() if (HERE / "README.md").exists() else ""
    for name, lines in (("agnews", agnews()), ("imdb", imdb()), ("ptb", ptb())):
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        before, _, rest = text.partition(begin)
        text = before + begin + "\n" + "\n".join(lines) + "\n" + end + rest.partition(end)[2]
    (HERE / "README.md").write_text(text)


if __name__ == "__main__":
    main()
