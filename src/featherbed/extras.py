"""Optional dependencies: looked for before work starts, not after minutes of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from featherbed.errors import MissingExtra

Packages = Mapping[str, Sequence[str]]  # extra -> modules of it that are needed

TRAINING: Packages = {
    "train": ("torch", "numba", "polars", "pyarrow", "scipy"),
    "view": ("plotly",),
}
COMPRESSING: Packages = {"compress": ("faiss", "numba", "scipy")}
SERVING: Packages = {"serve": ("fastapi", "uvicorn", "orjson", "prometheus_client")}
NAMES = {
    "prometheus_client": "prometheus-client",
    "sklearn": "scikit-learn",
}  # of packages whose module has another name


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
