"""The table a short spec names (``featherbed.specs`` holds the grammar)."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from featherbed.anchors import HalfNormal, RandomBasis, Xavier
from featherbed.errors import ArgumentError
from featherbed.specs import split_spec
from featherbed.tables import METHODS, Table
from featherbed.tables.guide import Online
from featherbed.tables.relax import Softmax, StraightThrough, Temperature

_KINDS: tuple[Any, ...] = (
    HalfNormal,
    Xavier,
    RandomBasis,
    Softmax,
    StraightThrough,
    Temperature,
    Online,
)
BEHAVIOURS: dict[str, Any] = {kind.__name__.lower(): kind for kind in _KINDS}


def method_name(method: type[Table]) -> str:
    """Return the spec's name of a table class.

    >>> from featherbed.tables import LowRankTable
    >>> method_name(LowRankTable)
    'lowrank'
    """
    return method.__name__.removesuffix("Table").lower()


def parse_spec(spec: str) -> tuple[type[Table], dict[str, Any]]:
    """Read a spec into a table class and its keywords.

    >>> parse_spec("anchor:anchors=50,init=xavier(gain=0.5)")
    (<class 'featherbed.tables.anchor.AnchorTable'>, {'anchors': 50, 'init': Xavier(gain=0.5)})
    """
    name, settings = split_spec(spec, behaviours=BEHAVIOURS)
    methods = {method_name(method): method for method in METHODS}
    method = methods.get(name.lower())
    if method is None:
        raise ArgumentError(
            f"{name!r} in spec {spec!r} is no table: use one of {', '.join(sorted(methods))}"
        )
    unwritable = (
        "self",
        "num_embeddings",
        "embedding_dim",
        "generator",
        "dtype",
        "device",
        "counts",
    )
    parameters = inspect.signature(method.__init__).parameters
    accepted = [name for name in parameters if name not in unwritable]
    for keyword, value in settings.items():
        if keyword not in accepted:
            raise ArgumentError(
                f"{keyword!r} in spec {spec!r} is no setting of {name}: it takes {', '.join(accepted)}"
            )
        if str(parameters[keyword].annotation).startswith("bool") and not isinstance(
            value, bool | None
        ):
            raise ArgumentError(f"{keyword}={value} in spec {spec!r}: write true or false")
    return method, settings


def make_table(spec: str, num_embeddings: int, embedding_dim: int, **extra: Any) -> Table:
    """Make the table a spec names; ``extra`` are further keywords (padding_idx, generator, counts ...).

    >>> make_table("lowrank:rank=4", 1000, 16)
    LowRankTable(1000, 16, rank=4)
    """
    method, settings = parse_spec(spec)
    return _call(method, spec, num_embeddings, embedding_dim, {**settings, **extra})


def table_from_dense(spec: str, matrix: Tensor, **extra: Any) -> Table:
    """Make the table a spec names, near ``matrix``."""
    method, settings = parse_spec(spec)
    _missing(method, spec, {**settings, **extra})
    return method.from_dense(matrix, **{**settings, **extra})


def _call(method: type[Table], spec: str, rows: int, dim: int, settings: dict[str, Any]) -> Table:
    _missing(method, spec, settings)
    return method(rows, dim, **settings)


def _missing(method: type[Table], spec: str, settings: dict[str, Any]) -> None:
    for name, parameter in inspect.signature(method.__init__).parameters.items():
        needed = parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty
        if needed and name not in settings:
            raise ArgumentError(
                f"spec {spec!r} needs {name}=...: for example {method_name(method)}:{name}=50"
            )
