"""Click models over collections of compact tables, at equal bytes."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from research.harness.report import markdown, mean_text, records_of

STUDIES = {name: f"clicks/{name}" for name in ("large", "generated", "criteo", "criteo-epoch")}


def blocks() -> dict[str, list[str]]:
    """Return the tables of the README."""
    return {name: _table(study) for name, study in STUDIES.items()}


def _table(study: str) -> list[str]:
    rows, found = [], records_of(study)
    for name, records in found.items():
        measures = [record["measures"] for record in records]
        bytes_, ratio = (
            sum(m[key] for m in measures) / len(measures) for key in ("bytes", "ratio")
        )
        model, _, method = name.partition("-")
        cells = [mean_text([m[key] for m in measures], 4) for key in ("auc", "log_loss")]
        method = method.replace("-", " ").replace("quotient remainder", "quotient-remainder")
        budget = found.get(f"{model}-budget-once", found.get(f"{model}-budget", []))
        more = _more(records, budget)
        rows.append((model, method, *cells, more, f"{bytes_ / 1000:,.1f}", f"{ratio:.1f}"))
    head = ["model", "tables", "test AUC", "test log loss", "more than the budget's"]
    return markdown([*head, "file (KB)", "times fewer bytes"], rows)


def _more(records: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> str:
    """Return how much higher the log loss is than that of other records, on the same test rows.

    ± is the standard error over blocks of consecutive test rows. Seeds are averaged block by block:
    on Criteo's sample they share their test rows, so three seeds are no three samples.
    """
    beside = {other["seed"]: other["details"].get("losses", []) for other in others}
    seeds = [
        [mine - other for mine, other in zip(own, beside.get(record["seed"], []), strict=False)]
        for record in records
        if (own := record["details"].get("losses"))
    ]
    more = [statistics.fmean(block) for block in zip(*filter(None, seeds), strict=True)]
    if not more or records is others:
        return ""
    error = statistics.stdev(more) / math.sqrt(len(more))
    return f"{statistics.fmean(more):.4f} ± {error:.4f}"
