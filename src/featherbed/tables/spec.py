"""Tables by short specs (``featherbed.settings`` defines the grammar)."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from featherbed import tables
from featherbed.anchors import HalfNormal, RandomBasis, Xavier
from featherbed.errors import ArgumentError
from featherbed.settings import split_spec
from featherbed.tables.kd import Composer
from featherbed.tables.parts.guides import Online
from featherbed.tables.parts.relaxations import Softmax, StraightThrough, Temperature
from featherbed.tables.product import Matching
from featherbed.tables.table import Table, keywords

METHODS: tuple[type[Table], ...] = tuple(  # every table class of the public list
    getattr(tables, name) for name in dir(tables) if name.endswith("Table") and name != "Table"
)
_RANDOM = (HalfNormal, Xavier, RandomBasis)
_CODED = (Softmax, StraightThrough, Temperature, Online, Composer, Matching)
BEHAVIORS: dict[str, Any] = {kind.__name__.lower(): kind for kind in (*_RANDOM, *_CODED)}


def method_name(method: type[Table]) -> str:
    """Return the spec's name of a table class.

    >>> from featherbed.tables import LowRankTable
    >>> method_name(LowRankTable)
    'lowrank'
    """
    return method.__name__.removesuffix("Table").lower()


def parse_spec(spec: str) -> tuple[type[Table], dict[str, Any]]:
    """Return the table class and the keywords of a spec.

    Fields of the small objects that a table takes may be given directly:
    ``kd:choices=8,parts=4,code_dim=16`` is ``KDTable(..., composer=fb.Composer(code_dim=16))``.

    >>> parse_spec("anchor:anchors=50,init=xavier(gain=0.5)")
    (<class 'featherbed.tables.anchor.AnchorTable'>, {'anchors': 50, 'init': Xavier(gain=0.5)})
    """
    name, settings = split_spec(spec, behaviors=BEHAVIORS)
    methods = {method_name(method): method for method in METHODS}
    method = methods.get(name.lower())
    if method is None:
        raise ArgumentError(
            f"{name!r} in spec {spec!r} is no table: use one of {', '.join(sorted(methods))}"
        )
    accepted = {name: str(given.annotation) for name, given in keywords(method).items()}
    fields = {
        field.name: (group, str(field.type))
        for group, default in method.groups.items()
        for field in dataclasses.fields(default)
        if field.name != "kind" and field.name not in accepted
    }
    accepted |= {keyword: kind for keyword, (_, kind) in fields.items()}
    for keyword, value in settings.items():
        if keyword not in accepted:
            raise ArgumentError(
                f"{keyword!r} in spec {spec!r} is no setting of {name}: it takes "
                f"{', '.join(accepted)}"
            )
        if accepted[keyword].startswith("bool") and not isinstance(value, bool | None):
            raise ArgumentError(f"{keyword}={value} in spec {spec!r}: write true or false")
    for keyword in [keyword for keyword in settings if keyword in fields]:
        group = fields[keyword][0]
        value = settings.get(group, method.groups[group])
        if isinstance(value, str):
            value = dataclasses.replace(method.groups[group], kind=value)
        settings[group] = dataclasses.replace(value, **{keyword: settings.pop(keyword)})
    return method, settings


def make_table(spec: str, num_embeddings: int, embedding_dim: int, **extra: Any) -> Table:
    """Create the table of a spec, with further keywords (padding_idx, generator, counts ...).

    >>> make_table("lowrank:rank=4", 1000, 16)
    LowRankTable(1000, 16, rank=4)
    """
    method, settings = _complete(spec, extra)
    return method(num_embeddings, embedding_dim, **settings)


def table_from_dense(
    spec: str, matrix: Tensor, padding_idx: int | None = None, **extra: Any
) -> Table:
    """Create the table of a spec, fitted to ``matrix``.

    >>> import torch
    >>> table_from_dense("quantized:bits=8", torch.eye(4))
    QuantizedTable(4, 4, bits=8, scales='row')
    """
    method, settings = _complete(spec, {"padding_idx": padding_idx, **extra})
    return method.from_dense(matrix, **settings)


def _complete(spec: str, extra: dict[str, Any]) -> tuple[type[Table], dict[str, Any]]:
    """Return the class and all keywords of a spec, or raise an error if one is missing."""
    method, settings = parse_spec(spec)
    settings |= extra
    for name, parameter in keywords(method).items():
        if parameter.default is parameter.empty and name not in settings:
            raise ArgumentError(
                f"spec {spec!r} needs {name}=...: for example {method_name(method)}:{name}=50"
            )
    return method, settings
