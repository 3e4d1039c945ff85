"""Short specs, one grammar for tables and codecs: ``anchor:anchors=50,init=xavier(gain=0.5)``.

spec      = name [":" setting {"," setting}]
setting   = keyword "=" value
value     = number | true | false | none | word | "text" | behaviour | "[" value {"," value} "]"
behaviour = name ["(" [setting {"," setting}] ")"]

A table is named by its class without "Table" (``fb.make_table``), a codec by its name
(``fb.compress``); the behaviours are objects a table takes as settings, codecs take none.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from typing import Any

from featherbed.errors import ArgumentError

_WORDS = {"true": True, "false": False, "none": None}


def split_spec(
    spec: str, label: str = "spec", behaviours: Mapping[str, Any] | None = None
) -> tuple[str, dict[str, Any]]:
    """Return the name and the settings of a spec; ``label`` names the spec in errors.

    >>> split_spec("rq:codes=8,kind=int8")
    ('rq', {'codes': 8, 'kind': 'int8'})
    """
    if not isinstance(spec, str):
        raise ArgumentError(f"{label} {spec!r}: give a name, or a name with settings (name:a=1)")
    name, _, rest = spec.partition(":")
    message = f"{label} {spec!r}: write settings as keyword=value, separated by commas"
    try:
        call = ast.parse(f"f({rest})", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ArgumentError(message) from None
    whole = (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.end_col_offset == len(f"f({rest})".encode())
    )
    if not isinstance(call, ast.Call) or not whole or "#" in rest:
        raise ArgumentError(message)
    return name.strip(), _Reader(f"{label} {spec!r}", behaviours or {}).settings(call)


class _Reader:
    """Reads the values of a spec; ``where`` names the spec in errors."""

    def __init__(self, where: str, behaviours: Mapping[str, Any]) -> None:
        self.where, self.behaviours = where, behaviours

    def settings(self, call: ast.Call) -> dict[str, Any]:
        """Return the settings between two parentheses."""
        if call.args or any(keyword.arg is None for keyword in call.keywords):
            raise ArgumentError(f"{self.where}: write every setting as keyword=value")
        names = [str(keyword.arg) for keyword in call.keywords]
        if len(set(names)) < len(names):
            raise ArgumentError(f"{self.where} gives a setting twice")
        return {str(keyword.arg): self._value(keyword.value) for keyword in call.keywords}

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int() | float() | str()):
                return node.value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float())):
                return -node.operand.value  # type: ignore[attr-defined]
            case ast.Name(id=word) if word.lower() in _WORDS:
                return _WORDS[word.lower()]
            case ast.Name(id=word):
                known = self.behaviours.get(word.lower())
                return word if known is None else known()
            case ast.Constant(value=None | bool()):
                return node.value
            case ast.List(elts=parts):
                return tuple(self._value(part) for part in parts)
            case ast.Call(func=ast.Name(id=word)) if self.behaviours:
                return self._behaviour(word, node)
        raise ArgumentError(
            f"{ast.unparse(node)!r} in {self.where}: a value is a number, a word, a list "
            "or a behaviour"
        )

    def _behaviour(self, word: str, call: ast.Call) -> Any:
        known = self.behaviours.get(word.lower())
        if known is None:
            accepted = ", ".join(sorted(self.behaviours))
            raise ArgumentError(f"{word!r} in {self.where} is not known: use one of {accepted}")
        settings = self.settings(call)
        try:
            return known(**settings)
        except TypeError:
            accepted = ", ".join(inspect.signature(known).parameters)
            raise ArgumentError(f"{word} in {self.where} takes {accepted}") from None
