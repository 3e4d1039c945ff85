"""Measures: nested metrics of training loops as flat numbers, one name for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAMES = {
    "validation_mse": "validation",
    "validation_rmse": "validation",
    "epochs_best": "epochs",
    "seconds_epoch": "epoch_seconds",
    "before_last_tenth": "before_last",
    "most": "largest_change",
}
BARE = ("test", "sizes", "codes")  # parts whose measures need no prefix


def flattened(metrics: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, Any]]:
    """Return nested metrics as flat measures, and all that is no number as details.

    A measure of the test part keeps its bare name, and so does one that only validation has.

    >>> flattened({"test": {"mse": 0.7}, "validation": {"mse": 0.8}, "method": "int4"})
    ({'mse': 0.7, 'validation': 0.8}, {'method': 'int4'})
    """
    measures: dict[str, float] = {}
    details: dict[str, Any] = {}
    test = metrics.get("test", {})
    for part, found in metrics.items():
        inner = found if isinstance(found, dict) else {part: found}
        for key, value in inner.items():
            bare = part in BARE or not isinstance(found, dict)
            bare = bare or (part == "validation" and key not in test and key != "mse")
            name = key if bare else f"{part}_{key}"
            name = NAMES.get(name, name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                measures[name] = float(value)
            else:
                details[name] = value
    return measures, details


def table_sizes(sizes: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return parameters and file bytes, summed over the tables of a model.

    >>> table_sizes({"users": {"parameters": 8, "file": 60}, "items": {"parameters": 4, "file": 40}})
    {'parameters': 12.0, 'bytes': 100.0}
    """
    if not sizes:
        return {}
    return {
        "parameters": float(sum(side["parameters"] for side in sizes.values())),
        "bytes": float(sum(side["file"] for side in sizes.values())),
    }
