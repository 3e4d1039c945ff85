"""Checks of arguments, with one message each, and of optional packages, before work starts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from numbers import Integral, Real
from typing import Any

from featherbed.errors import ArgumentError, MissingExtra

Packages = Mapping[str, Sequence[str]]  # extra -> modules of it that are needed

TRAINING: Packages = {
    "train": ("torch", "numba", "polars", "pyarrow", "scipy"),
    "view": ("plotly",),
}
COMPRESSING: Packages = {"compress": ("faiss", "numba", "scipy", "threadpoolctl")}
SERVING: Packages = {"serve": ("fastapi", "uvicorn", "orjson", "prometheus_client")}
NAMES = {
    "prometheus_client": "prometheus-client",
    "sklearn": "scikit-learn",
}  # of packages whose module has another name


UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}


def is_integer(value: Any, minimum: float = -math.inf, maximum: float = math.inf) -> bool:
    """Whether a value is an integer (of Python or numpy, not a bool) within limits.

    >>> is_integer(3), is_integer(3.0), is_integer(True), is_integer(0, minimum=1)
    (True, False, False, False)
    """
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    return whole and minimum <= int(value) <= maximum


def is_number(value: Any, minimum: float = -math.inf, maximum: float = math.inf) -> bool:
    """Whether a value is a finite real number (not a bool) within limits.

    >>> is_number(0.5), is_number(math.nan), is_number("1"), is_number(-1, minimum=0)
    (True, False, False, False)
    """
    real = isinstance(value, Real) and not isinstance(value, bool)
    return real and math.isfinite(value) and minimum <= float(value) <= maximum


def check_integer(name: str, value: Any, minimum: int = 1, maximum: int | None = None) -> int:
    """Return an integer within limits.

    >>> check_integer("steps", 0)
    Traceback (most recent call last):
    featherbed.errors.ArgumentError: steps=0: give a whole number of at least 1
    """
    if not is_integer(value, minimum, math.inf if maximum is None else maximum):
        limits = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum:,}"
        raise ArgumentError(f"{name}={value!r}: give a whole number {limits}")
    return int(value)


def check_number(
    name: str, value: Any, *, minimum: float | None = None, above: float | None = None
) -> float:
    """Return a finite number, at least ``minimum`` and greater than ``above``.

    >>> check_number("lr", -1, above=0)
    Traceback (most recent call last):
    featherbed.errors.ArgumentError: lr=-1: give a number above 0
    """
    low = -math.inf if minimum is None else minimum
    if not is_number(value, low) or (above is not None and value <= above):
        limits = "a finite number"
        if above is not None or minimum is not None:
            limits = (
                f"a number above {above:g}"
                if above is not None
                else f"a number of at least {low:g}"
            )
        raise ArgumentError(f"{name}={value!r}: give {limits}")
    return float(value)


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """Return one of the given words.

    >>> check_choice("mode", "max", ("sum", "mean"))
    Traceback (most recent call last):
    featherbed.errors.ArgumentError: mode='max': use one of sum, mean
    """
    if value not in choices:
        raise ArgumentError(f"{name}={value!r}: use one of {', '.join(choices)}")
    return str(value)


def require(purpose: str, *packages: Packages) -> None:
    """Raise ``MissingExtra``, with the command that installs all, unless every module is there.

    >>> require("reading", {"text": ["json"]})
    >>> require("flight", {"air": ["sky"], "text": ["json", "wings"]})
    Traceback (most recent call last):
    featherbed.errors.MissingExtra: flight needs sky and wings: pip install "featherbed[air,text]"
    """
    missing: dict[str, list[str]] = {}
    for extra, modules in ((extra, part[extra]) for part in packages for extra in part):
        absent = [NAMES.get(module, module) for module in modules if find_spec(module) is None]
        missing[extra] = [*missing.get(extra, []), *absent]
    extras = [extra for extra, absent in missing.items() if absent]
    if extras:
        listed = dict.fromkeys(name for absent in missing.values() for name in absent)
        raise MissingExtra(" and ".join(listed), ",".join(extras), purpose)


def read_bytes(text: int | str) -> int:
    """Return a number of bytes, which may be given with a unit.

    >>> read_bytes("600KB"), read_bytes("1.5 MiB"), read_bytes(4096)
    (600000, 1572864, 4096)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([A-Za-z]*)\s*", str(text))
    if isinstance(text, bool) or match is None or match[2].upper() not in UNITS:
        raise ArgumentError(
            f'budget={text!r}: give bytes, such as 600000, "600KB", "1.5MB" or "2MiB"'
        )
    size = int(float(match[1]) * UNITS[match[2].upper()])
    if size < 1:
        raise ArgumentError(f"budget={text!r}: a table needs at least one byte")
    return size
