"""What a compression did, in figures: for people (text, page) and for programs (JSON)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from featherbed.codecs.words import score_words
from featherbed.packed.writing import replacing
from featherbed.version import __version__
from featherbed.view.compression import compression_page, compression_text

if TYPE_CHECKING:
    from featherbed.codecs.auto import Entry, Trial
    from featherbed.codecs.target import Target
    from featherbed.packed.table import PackedTable


@dataclass
class Report:
    """The report of ``fb.compress``: ``print(table.report)``, ``table.report.save("report.html")``, or its ``data``."""

    data: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        table: PackedTable,
        trial: Trial,
        choice: Entry,
        target: Target,
        name: str,
        command: str,
        files: list[Path],
    ) -> Report:
        """Measure a table against the matrix it was made from."""
        rows, dense = trial.job.rows, table.rows * table.dim * 4
        every = table.sizes_by_part()
        parts = {part: size for part, size in every.items() if not part.startswith("keys.")}
        size = sum(parts.values())

        def rows_of(ids: Any) -> Any:
            return table[ids] / np.float32(trial.job.factor)

        quality = trial.judge(rows_of)
        bands = quality.pop("bands")
        return cls(
            {
                "input": {
                    "name": name,
                    "rows": table.rows,
                    "dim": table.dim,
                    "dtype": str(np.dtype(rows.matrix.dtype)),
                    "bytes_float32": dense,
                },
                "target": target.given,
                "measure": target.measure,
                "budget": target.budget,
                "chosen": {
                    "method": choice.candidate.method.name,
                    "settings": choice.candidate.settings,
                    "bytes": size,  # without keys
                    "keys": sum(every.values()) - size,
                    "ratio": dense / size,
                    "ratio_float16": dense / 2 / size,
                },
                "parts": parts,
                "quality": quality,
                "bands": bands,
                "curve": trial.curve,
                "words": _words(table, rows, rows_of, files),
                "command": command,
                "version": __version__,
            }
        )

    @property
    def quality(self) -> dict[str, float]:
        """Recall, error, cosine and eigenspace overlap of the table."""
        found: dict[str, float] = self.data["quality"]
        return found

    def __str__(self) -> str:
        return compression_text(self.data)

    def save(self, path: str | Path) -> None:
        """Write the report to ``path``, atomically: a page if its name ends with .html, JSON if with .json, else text."""
        path = Path(path)
        if path.suffix in (".html", ".htm"):
            text = compression_page(self.data)
        elif path.suffix == ".json":
            text = (
                json.dumps(_plain(self.data), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
            )
        else:
            text = str(self) + "\n"
        with (
            replacing(path) as descriptor,
            open(descriptor, "w", encoding="utf-8", closefd=False) as file,
        ):
            file.write(text)


def _words(
    table: PackedTable, rows: Any, rows_of: Any, files: list[Path]
) -> list[dict[str, Any]] | None:
    if not files or table.keys is None:
        return None
    keys = [table.keys[i] for i in range(table.rows)]
    before = score_words(rows.take, keys, files)
    after = score_words(rows_of, keys, files)
    return [
        {
            **{k: one[k] for k in ("file", "kind", "used", "of")},
            "before": one["score"],
            "after": two["score"],
        }
        for one, two in zip(before, after, strict=True)
    ]


def _plain(value: Any) -> Any:
    """Return JSON's own types; what is not a number becomes null."""
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not np.isfinite(value) else value
