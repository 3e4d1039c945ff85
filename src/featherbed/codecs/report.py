"""The report of a compression: for people (text, page) and for programs (JSON)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from featherbed.codecs.words import score_words
from featherbed.report.compression import compression_page, compression_text
from featherbed.report.page import write_report
from featherbed.version import __version__

if TYPE_CHECKING:
    from featherbed.codecs.target import Target
    from featherbed.codecs.trial import MeasuredCandidate, Trial
    from featherbed.packed.table import PackedTable


@dataclass
class CompressionReport:
    """The report of ``fb.compress``: print it, ``save("report.html")``, or use its ``data``."""

    data: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        table: PackedTable,
        trial: Trial,
        choice: MeasuredCandidate,
        target: Target,
        name: str,
        command: str,
        files: list[Path],
    ) -> CompressionReport:
        """Measure a table against the matrix it was compressed from."""
        rows, dense = trial.job.rows, table.rows * table.dim * 4
        sizes = table.sizes_by_part()
        parts = {part: size for part, size in sizes.items() if not part.startswith("keys.")}
        size = sum(parts.values())

        quality = trial.quality(table)
        bands = quality.pop("bands")
        choice.point["recall"] = quality.get("weighted_recall", quality["recall"])
        source = {"name": name, "rows": table.rows, "dim": table.dim}
        source |= {"dtype": str(np.dtype(rows.matrix.dtype)), "bytes_float32": dense}
        chosen = {
            "method": choice.candidate.method.name,
            "settings": choice.candidate.settings,
            "bytes": size,  # without keys
            "keys": sum(sizes.values()) - size,
            "ratio": dense / size,
            "ratio_float16": dense / 2 / size,
        }
        return cls(
            {
                "input": source,
                "target": target.given,
                "measure": target.measure,
                "budget": target.budget,
                "chosen": chosen,
                "parts": parts,
                "quality": quality,
                "bands": bands,
                "curve": trial.curve,
                "words": _word_scores(table, rows, files),
                "command": command,
                "version": __version__,
            }
        )

    @property
    def quality(self) -> dict[str, float]:
        """Recall, error, cosine and eigenspace overlap of the table."""
        quality: dict[str, float] = self.data["quality"]
        return quality

    def __str__(self) -> str:
        return compression_text(self.data)

    def save(self, path: str | Path) -> None:
        """Write the report atomically: HTML for .html, JSON for .json, text for .txt."""
        write_report(path, self.data, compression_page, compression_text)


def _word_scores(table: PackedTable, rows: Any, files: list[Path]) -> list[dict[str, Any]] | None:
    """Return the scores of word files before and after compression."""
    if not files or table.keys is None:
        return None
    keys = list(table.keys)
    pairs = zip(
        score_words(rows.take, keys, files),
        score_words(table.__getitem__, keys, files),
        strict=True,
    )
    return [
        {name: before[name] for name in ("file", "kind", "used", "of")}
        | {"before": before["score"], "after": after["score"]}
        for before, after in pairs
    ]
