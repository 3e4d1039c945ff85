"""Records: one result file for each row and seed, written once and never edited."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from featherbed.apps.pipeline import Checkpoints, Result, finite, made_by, open_checkpoints
from featherbed.errors import ArgumentError, DataError
from featherbed.files import replacing
from research.harness.legacy import converted, is_legacy
from research.harness.measures import flattened, table_sizes
from research.harness.settings import RESULTS, WORK, Row

Record = dict[str, Any]
NEEDED = ("paper", "row", "seed", "settings", "measures", "history", "details", "seconds")


@dataclass(frozen=True)
class Run:
    """One run: the title of its progress bar and whether it is shown, its row, and its folders.

    ``work`` is for checkpoints and trained models; ``results`` holds the records of the
    experiment, among them those of other rows.
    """

    title: str = ""
    shown: bool = False
    row: str = ""
    work: Path = WORK
    results: Path = RESULTS

    def checkpoints(self, settings: Mapping[str, Any], seed: int) -> Checkpoints:
        """Return the checkpoints of this row; those of other settings are removed."""
        folder = self.work / f"{self.row}-seed-{seed}"
        given = {"settings": dict(settings), "seed": seed}
        try:
            return open_checkpoints(folder, given, resume=True)
        except ArgumentError:
            return open_checkpoints(folder, given, resume=False)

    def say(self, text: str) -> None:
        """Print a line, unless the run is quiet."""
        if self.shown:
            sys.stdout.write(text + "\n")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run: its measures, a history (one entry per epoch), and other details."""

    measures: dict[str, float]
    history: list[dict[str, Any]] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)


def outcome_of(result: Result) -> Outcome:
    """Return the outcome of a training loop; an interrupted loop interrupts the experiment."""
    if result.interrupted:
        raise KeyboardInterrupt
    measures, details = flattened(result.metrics)
    measures |= table_sizes(result.sizes)
    return Outcome(measures, [dict(row) for row in result.history], details)


def record_path(folder: Path, row: Row, seed: int) -> Path:
    """Return the path of the record of a row and a seed."""
    return folder / row.home / f"{row.name}-seed-{seed}.json"


def write_record(path: Path, row: Row, seed: int, outcome: Outcome, seconds: float) -> None:
    """Write the record of a run, atomically: settings, outcome, versions, machine."""
    record = {
        "paper": row.home,
        "row": row.name,
        "seed": seed,
        "settings": row.settings,
        "measures": outcome.measures,
        "seconds": round(seconds, 2),
        **made_by(),
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


def load_record(path: Path) -> Record:
    """Read a record; one from before the common format is converted."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is no result: {error}; move it away to run it again") from None
    if isinstance(record, dict) and is_legacy(record):
        return converted(record)
    missing = (
        [key for key in NEEDED if key not in record] if isinstance(record, dict) else list(NEEDED)
    )
    if missing:
        raise DataError(
            f"{path} is no result: it lacks {', '.join(missing)}; move it away to run it again"
        )
    return dict(record)


def read_record(path: Path, row: Row) -> Record:
    """Read the record of a row; one made with other settings than the row's is refused.

    The settings of records from before the common format are not compared.
    """
    record = load_record(path)
    wanted = json.loads(json.dumps(row.settings))
    if not record.get("converted") and record["settings"] != wanted:
        keys = {*wanted, *record["settings"]}
        changed = sorted(key for key in keys if wanted.get(key) != record["settings"].get(key))
        raise ArgumentError(
            f"{path} was made with other settings ({', '.join(changed)}): "
            "give another --out, or move it away to run it again"
        )
    return record
