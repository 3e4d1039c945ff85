"""How a report writes what it holds: sizes, shares and other figures, settings, and any text as harmless HTML."""

from __future__ import annotations

import math
from html import escape
from typing import Any

NONE = "–"
SHARES = ("share", "recall", "weighted_recall", "analogy")  # figures shown as percentages


def as_html(value: object) -> str:
    """Return any value as HTML that shows it, between tags (no attribute holds one); plotly reads its texts the same way."""
    return escape(str(value), quote=False)


def as_settings(point: dict[str, Any]) -> str:
    """Return settings as they are written in a call.

    >>> as_settings({"settings": {"codes": 8, "bits": 6}})
    'codes=8, bits=6'
    """
    return ", ".join(f"{name}={value}" for name, value in point["settings"].items())


def as_figure(name: str, value: float | None, digits: int | None = None) -> str:
    """Return a figure by its name: shares as percentages (one digit), the others as they are (four); a dash for none."""
    if value is None or not math.isfinite(value):
        return NONE
    if name in SHARES:
        return f"{100 * value:.{0 if digits == 0 else 1}f} %"
    return f"{value:.{4 if digits is None else digits}f}"


def as_bytes(size: float) -> str:
    """Return a size in three digits and units of a thousand.

    >>> as_bytes(597_812), as_bytes(12_000_000)
    ('598 KB', '12.0 MB')
    """
    value, units = float(size), ["bytes", "KB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    digits = 0 if units[0] == "bytes" or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:,.{digits}f} {units[0]}"
