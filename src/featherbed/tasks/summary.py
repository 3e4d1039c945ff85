"""The last lines of ``featherbed train ratings``: errors, sizes, warnings."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from featherbed.packed.report import compare_sizes

NO_FACTORS = (
    "stored no factors: the ratings do not support any within this budget; every user gets the "
    "same list, less the items rated in training (biases only)"
)


def summary_lines(metrics: dict[str, Any], out: Path) -> list[str]:
    """Return the lines; warnings come last.

    >>> metrics = {part: {"mse": 1.21} for part in ("test", "validation", "train")}
    >>> metrics |= {"baselines": {"biases": 1.1}, "factors": 3, "nonzeros": None}
    >>> metrics["sizes"] = {"file": 500, "keys": 300, "whole": 800}
    >>> metrics["sizes"] |= {"float32": 4000, "float32_whole": 4300}
    >>> print("\\n".join(summary_lines(metrics | {"interrupted": False}, Path("out"))))
    ... # doctest: +ELLIPSIS
    test MSE 1.2100 (RMSE 1.1000), validation 1.2100, train 1.2100; biases alone have 1.1000 on test
    800 bytes in all, 5.4 times smaller than 4,300 with float32 rows: tables 500, keys 300
    tables alone: 500 bytes, 8.0 times smaller than 4,000 as float32 rows
    out: ...
    worse than biases alone: test MSE 1.2100, where mean + bias of user + bias of item has 1.1000...
    """
    lines = [
        _error_line(metrics),
        *_size_lines(metrics),
        f"{out}: users.safetensors, items.safetensors, metrics.json, history.parquet, report.html",
        *warning_lines(metrics),
    ]
    if metrics["interrupted"]:
        more = "; --resume goes on" if (out / "checkpoints").is_dir() else ""
        state = (
            "this is the best epoch so far"
            if metrics["epochs"]
            else "not one epoch was finished, the rows are as far as they came"
        )
        lines.append(f"interrupted: {state}{more}")
    return lines


def warning_lines(metrics: dict[str, Any]) -> list[str]:
    """Say that a recommender stores no factors, or that it is worse than biases alone."""
    lines = [] if metrics["factors"] else [NO_FACTORS]
    error, baseline = metrics["test"]["mse"], metrics["baselines"]["biases"]
    if error > baseline:
        more = 100 * (error / baseline - 1) if baseline > 0 else math.inf
        advice = (
            "more ratings or a larger budget may help"
            if not metrics["factors"]
            else "try more ratings, a smaller --dim, or rows in levels (no --users, --items, "
            "--nonzeros, --auto)"
        )
        lines.append(
            f"worse than biases alone: test MSE {error:.4f}, where mean + bias of user + bias of "
            f"item has {baseline:.4f} ({more:.1f} % more): {advice}"
        )
    return lines


def _error_line(metrics: dict[str, Any]) -> str:
    test, baseline = metrics["test"]["mse"], metrics["baselines"]["biases"]
    return (
        f"test MSE {test:.4f} (RMSE {math.sqrt(test):.4f}), validation "
        f"{metrics['validation']['mse']:.4f}, train {metrics['train']['mse']:.4f}; "
        f"biases alone have {baseline:.4f} on test"
    )


def _size_lines(metrics: dict[str, Any]) -> list[str]:
    """Say how large all files that recommending needs are, by part, and the tables alone."""
    sizes = metrics["sizes"]
    parts = {"tables": "file", "keys": "keys", "rated items": "seen", "titles": "titles"}
    shown = {name: sizes[key] for name, key in parts.items() if sizes.get(key)}
    if other := sizes["whole"] - sum(shown.values()):
        shown["other"] = other
    listed = ", ".join(f"{name} {size:,}" for name, size in shown.items())
    whole = compare_sizes(sizes["whole"], sizes["float32_whole"])
    alone = compare_sizes(sizes["file"], sizes["float32"])
    weights = "" if metrics["nonzeros"] is None else f"; {metrics['nonzeros']:,} weights"
    return [
        f"{sizes['whole']:,} bytes in all, {whole} with float32 rows: {listed}",
        f"tables alone: {sizes['file']:,} bytes, {alone} as float32 rows{weights}",
    ]
