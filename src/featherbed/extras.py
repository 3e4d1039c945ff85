"""Optional dependencies, looked for before work starts: nobody trains for minutes to learn that plotly is missing."""

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
NAMES = {"sklearn": "scikit-learn"}  # of packages whose module has another name


def require(purpose: str, *packages: Packages) -> None:
    """Raise ``MissingExtra``, with the command that installs all of them, unless every module is installed.

    >>> require("reading", {"text": ["json"]})
    >>> require("featherbed fly", {"wings": ["icarus"], "text": ["json", "daedalus"]})
    Traceback (most recent call last):
    featherbed.errors.MissingExtra: featherbed fly needs icarus and daedalus: pip install "featherbed[wings,text]"
    """
    missing: dict[str, list[str]] = {}
    for extra, modules in ((extra, part[extra]) for part in packages for extra in part):
        absent = [NAMES.get(module, module) for module in modules if find_spec(module) is None]
        missing[extra] = [*missing.get(extra, []), *absent]
    extras = [extra for extra, absent in missing.items() if absent]
    if extras:
        listed = dict.fromkeys(name for absent in missing.values() for name in absent)
        raise MissingExtra(" and ".join(listed), ",".join(extras), purpose)
