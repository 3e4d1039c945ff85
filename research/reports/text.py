"""Texts: classifiers and language models on compact tables."""

import statistics
from pathlib import Path

import matplotlib.pyplot as plt

from research.harness.records import Record
from research.harness.report import markdown, mean_text, records_of

Runs = dict[str, list[Record]]


def blocks() -> dict[str, list[str]]:
    """Return the tables of the README."""
    return {
        "agnews": agnews_table(by_name(records_of("text/agnews"))),
        "imdb": imdb_lines(records_of("text/imdb")),
        "ptb": ptb_table(records_of("text/ptb")),
    }


def by_name(runs: Runs) -> Runs:
    """Return runs in the order of their file names."""
    return {name: runs[name] for name in sorted(runs, key=lambda name: f"{name}-seed")}


def values(records: list[Record], name: str) -> list[float]:
    """Return a measure of all seeds."""
    return [float(record["measures"][name]) for record in records]


def agnews_table(runs: Runs) -> list[str]:
    """Return accuracies and sizes of stored classifiers."""
    rows = []
    for name, records in runs.items():
        sizes = {
            key: statistics.mean(values(records, key))
            for key in ("parameters", "dense_parameters", "whole")
        }
        rows.append(
            (
                name,
                len(records),
                mean_text(values(records, "accuracy"), 2, 100),
                mean_text(values(records, "validation_accuracy"), 2, 100),
                f"{sizes['parameters']:,.0f}",
                f"{sizes['dense_parameters'] / sizes['parameters']:.1f}",
                f"{sizes['whole']:,.0f}",
            )
        )
    head = ["run", "seeds", "test accuracy %", "validation %", "table parameters", "fewer"]
    return markdown([*head, "whole model, bytes"], rows)


def imdb_lines(runs: Runs) -> list[str]:
    """Return the effect of sharing, seed by seed."""
    plain, shared = (
        {record["seed"]: float(record["measures"]["accuracy"]) for record in runs[name]}
        for name in ("plain", "sse")
    )
    both = sorted(set(plain) & set(shared))
    effect = mean_text([shared[seed] - plain[seed] for seed in both], 2, 100)
    without, with_it = (mean_text([one[s] for s in both], 2, 100) for one in (plain, shared))
    return [
        f"Bag, d = 64, {len(both)} seeds: {without} % without SSE-SE,",
        f"{with_it} % with it.",
        f"The effect, seed by seed: **{effect} points**.",
    ]


def ptb_table(runs: Runs) -> list[str]:
    """Return perplexities and sizes of language models, the lowest perplexity first."""
    base, rows = runs["dense"][0]["measures"]["perplexity"], []
    for name, records in sorted(runs.items(), key=lambda one: one[1][0]["measures"]["perplexity"]):
        found = records[0]["measures"]
        fewer = found.get("times") or found["dense_parameters"] / found["parameters"]
        rows.append(
            (
                name,
                f"{found['perplexity']:.1f}",
                f"{found['perplexity'] / base - 1:+.1%}",
                f"{found['validation_perplexity']:.1f}",
                f"{found['parameters']:,.0f}",
                f"{fewer:.1f}",
                f"{found['bytes']:,.0f}" if "bytes" in found else "no packed form",
            )
        )
    head = ["run", "test perplexity", "to dense", "validation", "parameters", "fewer"]
    return markdown([*head, "bytes (float16)"], rows)


def pictures(folder: Path) -> None:
    """Draw accuracy against the bytes of the whole model."""
    figure, axes = plt.subplots(figsize=(6, 3.6))
    for name, records in by_name(records_of("text/agnews")).items():
        accuracies = [100 * value for value in values(records, "accuracy")]
        axes.plot(values(records, "whole"), accuracies, "o", label=name)
    axes.set_xscale("log")
    axes.set_xlabel("bytes of the whole model")
    axes.set_ylabel("test accuracy, %")
    axes.legend()
    figure.tight_layout()
    figure.savefig(folder / "agnews.svg", metadata={"Date": None})
