"""Short specs: ``anchor:anchors=50,init=xavier(gain=0.5)`` names a table and its settings.

spec      = method [":" setting {"," setting}]
method    = dense | anchor | growinganchor | mixture | mixed | banded | lowrank | hashed | kd | product | remainder |
            selected | quantized | graded | tensortrain | variational (class name without "Table")
setting   = keyword "=" value
value     = number | true | false | none | word | "text" | behaviour | "[" value {"," value} "]"
behaviour = name ["(" [setting {"," setting}] ")"]         (halfnormal, xavier, randombasis, softmax,
                                                                straightthrough, temperature, online)
"""

from __future__ import annotations

import ast
import inspect
from typing import Any

from torch import Tensor

from featherbed.anchors import HalfNormal, RandomBasis, Xavier
from featherbed.errors import ArgumentError
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
_WORDS = {"true": True, "false": False, "none": None}


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
    name, _, rest = spec.partition(":")
    methods = {method_name(method): method for method in METHODS}
    method = methods.get(name.strip().lower())
    if method is None:
        raise ArgumentError(
            f"{name!r} in spec {spec!r} is no table: use one of {', '.join(sorted(methods))}"
        )
    try:
        call = ast.parse(f"f({rest})", mode="eval").body
    except SyntaxError:
        raise ArgumentError(
            f"spec {spec!r}: write settings as keyword=value, separated by commas"
        ) from None
    whole = (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.end_col_offset == len(f"f({rest})".encode())
    )
    if not isinstance(call, ast.Call) or not whole or "#" in rest:
        raise ArgumentError(f"spec {spec!r}: write settings as keyword=value, separated by commas")
    settings = _keywords(call, spec)
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


def _keywords(call: ast.Call, spec: str) -> dict[str, Any]:
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        raise ArgumentError(f"spec {spec!r}: write every setting as keyword=value")
    names = [str(keyword.arg) for keyword in call.keywords]
    if len(set(names)) < len(names):
        raise ArgumentError(f"spec {spec!r} gives a setting twice")
    return {str(keyword.arg): _value(keyword.value, spec) for keyword in call.keywords}


def _value(node: ast.expr, spec: str) -> Any:
    match node:
        case ast.Constant(value=int() | float() | str()):
            return node.value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float())):
            return -node.operand.value  # type: ignore[attr-defined]
        case ast.Name(id=word) if word.lower() in _WORDS:
            return _WORDS[word.lower()]
        case ast.Name(id=word):
            return BEHAVIOURS[word.lower()]() if word.lower() in BEHAVIOURS else word
        case ast.Constant(value=None | bool()):
            return node.value
        case ast.List(elts=parts):
            return tuple(_value(part, spec) for part in parts)
        case ast.Call(func=ast.Name(id=word)):
            if word.lower() not in BEHAVIOURS:
                raise ArgumentError(
                    f"{word!r} in spec {spec!r} is not known: use one of {', '.join(sorted(BEHAVIOURS))}"
                )
            return _behaviour(word, _keywords(node, spec), spec)
    raise ArgumentError(
        f"{ast.unparse(node)!r} in spec {spec!r}: a value is a number, a word, a list or a behaviour"
    )


def _behaviour(word: str, settings: dict[str, Any], spec: str) -> Any:
    try:
        return BEHAVIOURS[word.lower()](**settings)
    except TypeError:
        accepted = ", ".join(inspect.signature(BEHAVIOURS[word.lower()]).parameters)
        raise ArgumentError(f"{word} in spec {spec!r} takes {accepted}") from None


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
