"""Every codec by its name."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from featherbed.codecs.additive import AdditiveCodec, LayeredCodec
from featherbed.codecs.clusters import ClusterCodec
from featherbed.codecs.codec import Codec, Settings
from featherbed.codecs.hot import HotCodec
from featherbed.codecs.integer import IntegerCodec
from featherbed.codecs.kd import KDCodec
from featherbed.codecs.linear import LowRankCodec
from featherbed.codecs.norms import NormsCodec
from featherbed.codecs.product import ProductCodec
from featherbed.codecs.sparse import SparseCodec
from featherbed.errors import ArgumentError
from featherbed.settings import split_spec

CODECS: dict[str, Codec] = {
    method.name: method
    for method in (
        *(IntegerCodec(kind) for kind in ("int8", "int4", "int3", "int2")),
        LowRankCodec(),
        ProductCodec("pq"),
        ProductCodec("opq"),
        AdditiveCodec("rq"),
        AdditiveCodec("lsq"),
        LayeredCodec(),
        KDCodec(),
        *(SparseCodec(name) for name in ("ksvd", "hash", "hash+ksvd", "anchors")),
        ClusterCodec(),
    )
}
WRAPPABLE = ("pq", "opq", "rq", "lsq", "layered", "kd", "ksvd", "clusters")


def codec_of(spec: str) -> tuple[Codec, Settings]:
    """Return the codec and settings of a spec: "rq", "rq:codes=8,bits=8", "opq+norms", "hot+rq".

    A codec that is not listed above is looked for in the module of its name, in the tuple
    ``CODECS``.

    >>> method, settings = codec_of("hash:anchors=500,codes=10")
    >>> method.name, settings
    ('hash', {'anchors': 500, 'codes': 10})
    """
    name, settings = split_spec(spec, label="method")
    if name not in CODECS and name.isidentifier() and find_spec(f"featherbed.codecs.{name}"):
        found = getattr(import_module(f"featherbed.codecs.{name}"), "CODECS", ())
        CODECS.update({codec.name: codec for codec in found})
    if name in CODECS:
        method = CODECS[name]
    elif name.endswith("+norms") and name.removesuffix("+norms") in WRAPPABLE:
        method = NormsCodec(CODECS[name.removesuffix("+norms")])
    elif name.startswith("hot+") and name.removeprefix("hot+") in WRAPPABLE:
        method = HotCodec(CODECS[name.removeprefix("hot+")])
    else:
        raise ArgumentError(
            f"method={spec!r}: use auto, {', '.join(CODECS)}; or one of {', '.join(WRAPPABLE)} "
            "with separate norms (pq+norms) or after hot rows (hot+layered)"
        )
    return method, settings
