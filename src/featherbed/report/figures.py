"""Formatting of numbers, sizes and settings, and escaping of text, for pages and terminals."""

from __future__ import annotations

import math
from html import escape
from typing import Any

NONE = "–"
SHARES = ("share", "recall", "weighted_recall", "analogy")  # shown as percentages


def as_html(value: object) -> str:
    """Escape a value for use between tags (never inside an attribute) and in plotly's texts."""
    return escape(str(value), quote=False)


def as_settings(point: dict[str, Any]) -> str:
    """Format settings as keyword arguments.

    >>> as_settings({"settings": {"codes": 8, "bits": 6}})
    'codes=8, bits=6'
    """
    return ", ".join(f"{name}={value}" for name, value in point["settings"].items())


def as_number(value: Any) -> float | None:
    """Return a finite number as a float, anything else as None."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def as_figure(name: str, value: float | None, digits: int | None = None) -> str:
    """Format a metric: shares in percent with one decimal, others with four; a dash for None."""
    if value is None or not math.isfinite(value):
        return NONE
    if name in SHARES:
        return f"{100 * value:.{0 if digits == 0 else 1}f} %"
    return f"{value:.{4 if digits is None else digits}f}"


def as_percent(value: float) -> str:
    """Format a share with two decimals.

    >>> as_percent(0.912)
    '91.20 %'
    """
    return f"{100 * value:.2f} %"


def as_count(value: int | None) -> str:
    """Format a count with thousands separators; a dash for None."""
    return NONE if value is None else f"{value:,}"


def as_bytes(size: float | None) -> str:
    """Format a size with three digits and decimal units; a dash for None.

    >>> as_bytes(597_812), as_bytes(12_000_000)
    ('598 KB', '12.0 MB')
    """
    if size is None:
        return NONE
    value, units = float(size), ["bytes", "KB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    digits = 0 if units[0] == "bytes" or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:,.{digits}f} {units[0]}"
