"""The files that record a run: metrics as JSON, the history as Parquet, the page as HTML."""

from __future__ import annotations

import json
import math
import os
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from featherbed.packed.writing import replacing
from featherbed.version import __version__


@dataclass
class Result:
    """A finished (or interrupted) run.

    >>> Result("ratings", {"dim": 16}, seed=0).interrupted
    False
    """

    task: str
    settings: dict[str, Any]
    seed: int
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    sizes: dict[str, dict[str, Any]] = field(default_factory=dict)
    history: list[dict[str, float]] = field(default_factory=list)
    seconds: float = 0.0
    interrupted: bool = False

    def write(self, path: str | Path) -> None:
        """Write the result, with the versions it was made by, atomically."""
        write_json(path, {**asdict(self), **made_by()})


def made_by() -> dict[str, Any]:
    """Return the versions and the machine of this run."""
    return {
        "versions": {
            "featherbed": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        "machine": {
            "python": platform.python_version(),
            "processor": platform.machine(),
            "threads": torch.get_num_threads(),
        },
    }


def write_json(path: str | Path, value: Any) -> None:
    """Write a value as JSON, atomically."""
    write_text(path, json.dumps(finite(value), indent=1, default=str) + "\n")


def write_text(path: str | Path, text: str) -> None:
    """Write text as UTF-8, atomically."""
    with (
        replacing(Path(path)) as descriptor,
        os.fdopen(os.dup(descriptor), "w", encoding="utf-8") as file,
    ):
        file.write(text)


def write_history(path: Path, history: list[dict[str, float]]) -> None:
    """Write one row per epoch as Parquet, atomically."""
    import polars as pl

    with replacing(path) as descriptor, os.fdopen(os.dup(descriptor), "wb") as file:
        pl.DataFrame(history, infer_schema_length=None).write_parquet(file)


def finite(value: Any) -> Any:
    """Return the value with NaN and infinity as text, since JSON has no such numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return value
