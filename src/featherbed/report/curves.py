"""Pictures of quality against bytes, as SVG that needs no library to draw and none to look at."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from featherbed.report.page import COLORS, as_html

Point = tuple[float, float]  # bytes, quality
WIDTH, HEIGHT = 310, 260  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 46, 44  # margins inside a panel
LEGEND, COLUMNS = 22, 2  # height of a line of the legend, names in it for each panel
TICKS, GAP = 5, 0.16  # values on the vertical axis, gap between sizes as a share of the other


@dataclass(frozen=True)
class CurvePanel:
    """A panel of a picture: ``lines`` holds points (bytes, quality) by name; bytes are on a log
    axis."""

    title: str
    quality: str  # title of the vertical axis
    lines: Mapping[str, Sequence[Point]]


def draw_curves(panels: Sequence[CurvePanel]) -> str:
    """Return an SVG picture of panels side by side; a name has the same color in all of them.

    >>> panel = CurvePanel("words", "recall", {"ours": [(1000, 0.5), (2000, 0.7)]})
    >>> picture = draw_curves([panel])
    >>> picture.startswith("<svg"), picture.count("<circle"), ">ours</text>" in picture
    (True, 3, True)
    """
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    color = {name: COLORS[number % len(COLORS)] for number, name in enumerate(names)}
    width = WIDTH * len(panels)
    columns = max(1, COLUMNS * len(panels))
    height = HEIGHT + LEGEND * math.ceil(len(names) / columns) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="system-ui, sans-serif" font-size="12" fill="#1d2329">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for number, panel in enumerate(panels):
        parts += [f'<g transform="translate({WIDTH * number} 0)">', *_panel(panel, color), "</g>"]
    for number, name in enumerate(names):
        x = LEFT + (number % columns) * (width - LEFT) / columns
        y = HEIGHT + LEGEND * (number // columns) + 12
        parts.append(f'<circle cx="{x:.0f}" cy="{y - 4}" r="5" fill="{color[name]}"/>')
        parts.append(f'<text x="{x + 10:.0f}" y="{y}">{as_html(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: CurvePanel, color: Mapping[str, str]) -> list[str]:
    points = [point for line in panel.lines.values() for point in line]
    low, high = _bounds([math.log(size) for size, _ in points], 0.06)
    bottom, top = _bounds([quality for _, quality in points], 0.08)

    def x(size: float) -> float:
        return LEFT + (math.log(size) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(quality: float) -> float:
        return HEIGHT - BOTTOM - (quality - bottom) / (top - bottom) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<text x="{LEFT}" y="20" font-size="14" font-weight="600">{as_html(panel.title)}</text>'
    ]
    parts.append(f'<text x="{LEFT}" y="37" fill="#5b6671">{as_html(panel.quality)}</text>')
    parts.append(
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end" fill="#5b6671">'
        "bytes of the files (log)</text>"
    )
    parts += [
        f'<path d="M{LEFT} {y(tick):.1f}H{WIDTH - RIGHT}" stroke="#dfe3e8"/>'
        f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>'
        for tick in _ticks(bottom, top)
    ]
    parts += [
        f'<path d="M{x(size):.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#eef1f4"/>'
        f'<text x="{x(size):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">'
        f"{_short(size)}</text>"
        for size in _sizes(math.exp(low), math.exp(high))
    ]
    for name, line in reversed(list(panel.lines.items())):  # the first one lies on top
        places = [(x(size), y(quality)) for size, quality in sorted(line)]
        path = "L".join(f"{a:.1f} {b:.1f}" for a, b in places)
        titles = [f"{name}: {quality:.4f} in {size:,.0f} bytes" for size, quality in sorted(line)]
        parts.append(f'<path d="M{path}" fill="none" stroke="{color[name]}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4" fill="{color[name]}">'
            f"<title>{as_html(title)}</title></circle>"
            for (a, b), title in zip(places, titles, strict=True)
        ]
    return parts


def _bounds(values: Sequence[float], margin: float) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = margin * ((high - low) or abs(high) or 1.0)
    return low - room, high + room


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers between two limits.

    >>> _ticks(0.11, 0.32)
    [0.15, 0.2, 0.25, 0.3]
    """
    raw = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    first = math.ceil(low / step)
    return [round(step * number, 10) for number in range(first, math.floor(high / step) + 1)]


def _sizes(low: float, high: float) -> list[float]:
    """Return sizes between two limits: 1, 2 and 5 times powers of ten, or fewer if they crowd.

    >>> _sizes(900, 21_000), _sizes(900, 210_000)
    ([1000, 2000, 5000, 10000, 20000], [1000, 3000, 10000, 30000, 100000])
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    smallest = (high / low) ** GAP  # ratio of sizes whose labels do not touch
    factors = (1, 2, 5) if smallest < 2 else (1, 3) if smallest < 3 else (1,)
    sizes = [factor * 10**power for power in powers for factor in factors]
    return [size for size in sizes if low <= size <= high]


def _short(size: float) -> str:
    """Return a round size as a label.

    >>> _short(500), _short(20_000), _short(5e6)
    ('500 B', '20 KB', '5 MB')
    """
    for unit, name in ((1e6, "MB"), (1e3, "KB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size:g} B"
