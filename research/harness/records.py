"""Result files of papers: one for each row and seed, written once and never edited."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from featherbed.errors import ArgumentError, DataError
from featherbed.packed.writing import replacing
from featherbed.papers.settings import Row
from featherbed.tasks.results import finite
from featherbed.version import __version__

Record = dict[str, Any]
NEEDED = ("paper", "row", "seed", "settings", "measures", "history", "details", "seconds")


@dataclass(frozen=True)
class Bar:
    """How a run shows that it moves on: the name of its progress bar, and whether there is one."""

    name: str = ""
    shown: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a run found: its measures, the numbers of its epochs, and what else a page shows of it."""

    measures: dict[str, float]
    history: list[dict[str, Any]] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)


def record_path(folder: Path, row: Row, seed: int) -> Path:
    """Return where the result of a row and a seed lies."""
    return folder / row.home / f"{row.name}-seed-{seed}.json"


def write_record(path: Path, row: Row, seed: int, outcome: Outcome, seconds: float) -> None:
    """Write what a run was asked, what it found and by what versions, in one step."""
    record = {
        "paper": row.home,
        "row": row.name,
        "seed": seed,
        "settings": row.settings,
        "measures": outcome.measures,
        "seconds": round(seconds, 2),
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
        "details": outcome.details,
        "history": outcome.history,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        replacing(path) as descriptor,
        os.fdopen(os.dup(descriptor), "w", encoding="utf-8") as file,
    ):
        file.write(_laid_out(finite(record)) + "\n")


def _laid_out(record: Mapping[str, Any]) -> str:
    """Return JSON with a line for each entry, and one for each epoch of the history."""
    lines = [
        f" {json.dumps(key)}: {json.dumps(value)}"
        for key, value in record.items()
        if key != "history"
    ]
    epochs = ",\n".join(f"  {json.dumps(row)}" for row in record["history"])
    return "{\n" + ",\n".join([*lines, ' "history": [\n' + epochs + "\n ]"]) + "\n}"


def read_record(path: Path, row: Row) -> Record:
    """Read a result; one that was made with other settings than the row's is refused."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is no result: {error}; move it away to run it again") from None
    missing = (
        [key for key in NEEDED if key not in record] if isinstance(record, dict) else list(NEEDED)
    )
    if missing:
        raise DataError(
            f"{path} is no result: it lacks {', '.join(missing)}; move it away to run it again"
        )
    wanted = json.loads(json.dumps(row.settings))
    if record["settings"] != wanted:
        changed = sorted(
            key
            for key in {*wanted, *record["settings"]}
            if wanted.get(key) != record["settings"].get(key)
        )
        raise ArgumentError(
            f"{path} was made with other settings ({', '.join(changed)}): give another --out, or move it away to run it again"
        )
    return dict(record)
