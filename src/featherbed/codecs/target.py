"""The target of a compression: a number of bytes, a ratio, or a quality."""

from __future__ import annotations

from dataclasses import dataclass

from featherbed.checks import read_bytes
from featherbed.errors import ArgumentError

MEASURES = ("recall", "error")


@dataclass(frozen=True)
class Target:
    """A number of bytes, or a quality to reach with as few as possible.

    Codecs are compared by ``measure``.
    """

    given: str
    budget: int | None
    measure: str = "recall"
    floor: float | None = None

    @classmethod
    def of(
        cls,
        budget: int | str | None,
        ratio: float | None,
        quality: str | None,
        dense: int,
        measure: str = "recall",
    ) -> Target:
        """Return the target of exactly one of budget, ratio and quality.

        ``dense`` is the size of the matrix in float32 bytes. A quality names its measure; for the
        other two it is ``measure``.

        >>> Target.of(None, 20, None, 12_000_000)
        Target(given='ratio=20', budget=600000, measure='recall', floor=None)
        """
        given = {"budget": budget, "ratio": ratio, "quality": quality}
        named = [f"{name}={value}" for name, value in given.items() if value is not None]
        if len(named) != 1:
            raise ArgumentError(
                'give exactly one of budget ("600KB"), ratio (20) or quality ("recall:0.9"); '
                f"got {' and '.join(named) or 'none of them'}"
            )
        if measure not in MEASURES:
            raise ArgumentError(
                f"measure={measure!r}: methods are compared by {' or '.join(MEASURES)}"
            )
        if budget is not None:
            return cls(named[0], read_bytes(budget), measure)
        if ratio is not None:
            number = isinstance(ratio, int | float) and not isinstance(ratio, bool)
            if not number or not 1 <= ratio < float("inf"):
                raise ArgumentError(
                    f"ratio={ratio!r}: give the ratio against float32, a number of at least 1"
                )
            return cls(named[0], int(dense / ratio), measure)
        measure, _, text = str(quality).partition(":")
        try:
            floor = float(text)
        except ValueError:
            floor = -1.0
        if measure not in MEASURES or not 0 < floor < 1:
            raise ArgumentError(
                f'quality={quality!r}: write "recall:0.9" (at least) or "error:0.1" (at most), '
                "between 0 and 1"
            )
        return cls(named[0], None, measure, floor)

    def reached(self, found: float) -> bool:
        """Return whether a measured quality reaches the target."""
        if self.floor is None:
            return True
        return found >= self.floor if self.measure == "recall" else found <= self.floor
