"""Records from before the common format, converted as they are read; the files stay as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from research.harness.measures import flattened, table_sizes

MARKS = ("metrics", "stored", "chosen", "runs")  # keys that only older records have
REST = ("versions", "machine", "history", "settings", "seed", "seconds", "metrics")


def is_legacy(record: Mapping[str, Any]) -> bool:
    """Return whether a record is of an older form.

    >>> is_legacy({"metrics": {}}), is_legacy({"measures": {}})
    (True, False)
    """
    return "measures" not in record and any(mark in record for mark in MARKS)


def converted(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return an older record in the common form.

    >>> old = {"metrics": {"test": {"mse": 0.7}, "validation": {"mse": 0.8}, "method": "int4"}}
    >>> new = converted(old)
    >>> new["measures"], new["details"]
    ({'mse': 0.7, 'validation': 0.8}, {'method': 'int4'})
    """
    measures, details = flattened(record.get("metrics", {}))
    measures |= table_sizes(record.get("sizes", {}))
    if str(record.get("task", "")).startswith("sse ") and "test" in record["metrics"]:
        own = record["metrics"]["validation"]
        details["chosen"] = {key: value for key, value in own.items() if key != "rmse"}
    if "stored" in record:
        details["chosen"] = record["settings"]
    if "method_method" in details:
        details["table_method"] = details["method_method"]
    details |= {key: value for key, value in record.items() if key not in REST}
    return {
        "converted": True,
        "seed": record.get("seed", 0),
        "settings": record.get("settings", {}),
        "measures": measures,
        "history": record.get("history", []),
        "details": details,
        "seconds": record.get("seconds", 0.0),
    }
