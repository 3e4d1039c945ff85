"""Every method by its name."""

from __future__ import annotations

from featherbed.compression.clusters import Clusters
from featherbed.compression.kd import KDCodes
from featherbed.compression.layered import Layered
from featherbed.compression.method import Method, Settings
from featherbed.compression.plain import IntegerRows, LowRank
from featherbed.compression.product import Product
from featherbed.compression.residual import Additive
from featherbed.compression.sparse import Sparse
from featherbed.compression.wrapped import Apart, Hot
from featherbed.errors import ArgumentError

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        *(IntegerRows(kind) for kind in ("int8", "int4", "int3", "int2")),
        LowRank(),
        Product("pq"),
        Product("opq"),
        Additive("rq"),
        Additive("lsq"),
        Layered(),
        KDCodes(),
        *(Sparse(name) for name in ("ksvd", "hash", "hash+ksvd", "anchors")),
        Clusters(),
    )
}
CODED = ("pq", "opq", "rq", "lsq", "layered", "kd", "ksvd", "clusters")


def method_of(spec: str) -> tuple[Method, Settings]:
    """Read a method and its settings: "rq", "rq:codes=8,bits=8", "opq+norms", "hot+layered".

    >>> method, settings = method_of("hash:anchors=500,codes=10")
    >>> method.name, settings
    ('hash', {'anchors': 500, 'codes': 10})
    """
    if not isinstance(spec, str):
        raise ArgumentError(f"method={spec!r}: give the name of one, or auto")
    name, _, rest = spec.partition(":")
    if name in METHODS:
        method = METHODS[name]
    elif name.endswith("+norms") and name.removesuffix("+norms") in CODED:
        method = Apart(METHODS[name.removesuffix("+norms")])
    elif name.startswith("hot+") and name.removeprefix("hot+") in CODED:
        method = Hot(METHODS[name.removeprefix("hot+")])
    else:
        raise ArgumentError(
            f"method={spec!r}: use auto, {', '.join(METHODS)}; or one of {', '.join(CODED)} with lengths kept apart (pq+norms) "
            "or after hot rows (hot+layered)"
        )
    settings: Settings = {}
    for text in filter(None, rest.split(",")):
        name, value = _setting(spec, text)
        if name in settings:
            raise ArgumentError(f"method={spec!r} gives {name} twice")
        settings[name] = value
    return method, settings


def _setting(spec: str, text: str) -> tuple[str, int | str]:
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise ArgumentError(
            f"method={spec!r}: settings are written name=value and parted by commas, got {text!r}"
        )
    name, value = name.strip(), value.strip()
    return name, int(value) if value.removeprefix("-").isdecimal() else value
