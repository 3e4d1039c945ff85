"""Settings: named values with a default, one line of help and limits, in groups.

An application declares its settings once, as frozen dataclasses. The command line
(``--set training.lr=0.01``), recipe files (TOML, one section per group) and Python callers share
the names, defaults and checks.

Short specs such as ``anchor:anchors=50,init=xavier(gain=0.5)`` have one grammar for tables and
codecs:

    spec      = name [":" setting {"," setting}]
    setting   = keyword "=" value
    value     = number | true | false | none | word | "text" | behavior | "[" value {"," value} "]"
    behavior = name ["(" [setting {"," setting}] ")"]

A table is named by its class without "Table" (``fb.make_table``), a codec by its name
(``fb.compress``); the behaviors are objects a table takes as settings, codecs take none.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import math
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from featherbed.errors import ArgumentError, DataError, IsFolderError, MissingFileError

S = TypeVar("S", bound="Settings")


class SettingLine(NamedTuple):
    """One setting, as ``featherbed settings`` lists it."""

    name: str
    default: Any
    help: str
    choices: tuple[Any, ...] | None


def setting(
    default: Any,
    description: str,
    *,
    choices: Sequence[Any] | None = None,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
) -> Any:
    """Declare one setting: a dataclass field with a default, one line of help and limits.

    Numbers must be finite, at least ``minimum``, greater than ``above`` and at most ``maximum``.
    """
    limits = {"choices": choices, "minimum": minimum, "above": above, "maximum": maximum}
    return dataclasses.field(default=default, metadata={"help": description, **limits})


def group(kind: type[S], **defaults: Any) -> S:
    """Declare a group of settings; ``defaults`` replace the defaults that ``kind`` itself has."""
    field: S = dataclasses.field(default_factory=functools.partial(kind, **defaults))
    return field


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Base class of settings: a frozen dataclass of ``setting()`` and ``group()`` fields.

    Names of settings within a group are dotted. Values are checked against their types and limits
    when the object is created; ``check`` adds the rules that involve several fields.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True, kw_only=True)
    ... class Training(Settings):
    ...     epochs: int = setting(10, "Maximum number of epochs.", minimum=1)
    ...     lr: float | None = setting(None, "Learning rate.", above=0)
    >>> @dataclass(frozen=True, kw_only=True)
    ... class Example(Settings):
    ...     dim: int = setting(16, "Row width.", minimum=1)
    ...     training: Training = group(Training, epochs=3)
    >>> Example.from_values({"training.lr": "0.1"}).values()
    {'dim': 16, 'training.epochs': 3, 'training.lr': 0.1}
    >>> Example.from_values({"lr": "0.1"})
    Traceback (most recent call last):
    featherbed.errors.ArgumentError: lr: no such setting; did you mean training.lr?
    """

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if "help" in field.metadata:
                value = _convert(field.name, getattr(self, field.name), _type_of(field))
                _check_limits(field.name, value, field.metadata)
                object.__setattr__(self, field.name, value)
        self.check()

    def check(self) -> None:
        """Raise ``ArgumentError`` if values do not go together; subclasses override it."""

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Self:
        """Create settings from dotted names; text is converted to the type of the setting."""
        known = {line.name for line in cls.describe()}
        for name in values:
            if name not in known:
                raise ArgumentError(f"{name}: no such setting; {_suggestion(name, known)}")
        return cls._build(values, "")

    @classmethod
    def read(
        cls, recipe: str | Path | None = None, assignments: Iterable[str] = (), **options: Any
    ) -> Self:
        """Create settings from a recipe file, ``name=value`` assignments and given values.

        Later sources replace earlier ones: the recipe, then assignments, then ``options``, whose
        names have a double underscore for the dot; None is ignored.
        """
        values = {} if recipe is None else read_recipe(recipe)
        for assignment in assignments:
            name, equals, value = assignment.partition("=")
            if not equals or not name.strip():
                raise ArgumentError(
                    f"--set {assignment}: give name=value, such as training.lr=0.01"
                )
            values[name.strip()] = value.strip()
        given = {name.replace("__", "."): value for name, value in options.items()}
        return cls.from_values(values | {k: v for k, v in given.items() if v is not None})

    @classmethod
    def _build(cls, values: Mapping[str, Any], prefix: str) -> Self:
        own: dict[str, Any] = {}
        defaults = cls._defaults()
        for field in dataclasses.fields(cls):
            name = prefix + field.name
            if "help" in field.metadata:
                if name in values:
                    with _named(prefix):
                        own[field.name] = _parse(field, values[name])
            elif below := {key: v for key, v in values.items() if key.startswith(f"{name}.")}:
                start: Settings = defaults[field.name]
                kept = {f"{name}.{key}": value for key, value in start.values().items()}
                own[field.name] = type(start)._build(kept | below, f"{name}.")
        with _named(prefix):
            return cls(**own)

    @classmethod
    def _defaults(cls) -> dict[str, Any]:
        return {
            field.name: field.default_factory()
            if field.default_factory is not dataclasses.MISSING
            else field.default
            for field in dataclasses.fields(cls)
        }

    def values(self) -> dict[str, Any]:
        """Return every setting by its dotted name."""
        found: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if "help" in field.metadata:
                found[field.name] = value
            else:
                found |= {f"{field.name}.{name}": inner for name, inner in value.values().items()}
        return found

    @classmethod
    def describe(cls) -> list[SettingLine]:
        """Return name, default, help and choices of every setting."""
        lines: list[SettingLine] = []
        defaults = cls._defaults()
        for field in dataclasses.fields(cls):
            default, metadata = defaults[field.name], field.metadata
            if "help" in metadata:
                choices = metadata["choices"]
                shown = None if choices is None else tuple(choices)
                lines.append(SettingLine(field.name, default, metadata["help"], shown))
                continue
            values = default.values()
            lines += [
                line._replace(name=f"{field.name}.{line.name}", default=values[line.name])
                for line in type(default).describe()
            ]
        return lines


def read_recipe(path: str | Path) -> dict[str, Any]:
    """Read a TOML file of settings; the names of its sections become prefixes.

    >>> path = getfixture("tmp_path") / "recipe.toml"
    >>> _ = path.write_text("dim = 8\\n[training]\\nlr = 0.1\\n")
    >>> read_recipe(path)
    {'dim': 8, 'training.lr': 0.1}
    """
    try:
        found = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MissingFileError(f"{path}: no such file; give a recipe in TOML") from None
    except IsADirectoryError:
        raise IsFolderError(f"{path} is a folder; give a recipe in TOML") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not a TOML file: {error}") from None
    return _flatten(found, "")


def _flatten(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= _flatten(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


class _named:  # noqa: N801 - used as a function
    """Put the name of a group in front of the messages of errors raised inside the block."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.prefix and type(error) is ArgumentError and "=" in str(error).split(":")[0]:
            error.args = (f"{self.prefix}{error}",)


def _type_of(field: dataclasses.Field[Any]) -> Any:
    """Return the type of a setting: int, float, bool, str, Path, a tuple of one of them, or
    None."""
    return _evaluate(field.type) if isinstance(field.type, str) else field.type


@functools.cache
def _evaluate(annotation: str) -> Any:
    return eval(annotation, {"Path": Path})  # an annotation of this package


def _suggestion(name: str, known: set[str]) -> str:
    last = name.rpartition(".")[2]
    same = sorted(other for other in known if other.rpartition(".")[2] == last)
    near = same or difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    if not near:
        return "`featherbed settings` lists those of a command"
    return f"did you mean {' or '.join(near)}?"


def _options(hint: Any) -> tuple[list[Any], bool]:
    """Return the types that a hint allows, None left out, and whether None is allowed."""
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    kinds = list(typing.get_args(hint)) if union else [hint]
    return [kind for kind in kinds if kind is not type(None)], type(None) in kinds


def _parse(field: dataclasses.Field[Any], value: Any) -> Any:
    """Convert text to the type of a setting; other values are returned as they are."""
    kinds, optional = _options(_type_of(field))
    if not isinstance(value, str):
        return value
    if optional and value.lower() == "none":
        return None
    for kind in kinds:
        parts = typing.get_args(kind)
        try:
            if typing.get_origin(kind) is tuple:
                convert = _FROM_TEXT[parts[0]]
                return tuple(convert(part.strip()) for part in value.split(",") if part.strip())
            return _FROM_TEXT[kind](value)
        except (ValueError, KeyError):
            continue
    raise ArgumentError(f"{field.name}={value}: give {_expected(kinds, optional)}")


def _to_bool(text: str) -> bool:
    return {"true": True, "false": False, "yes": True, "no": False}[text.lower()]


_FROM_TEXT: dict[Any, Callable[[str], Any]] = {
    int: int,
    float: float,
    bool: _to_bool,
    str: str,
    Path: Path,
}
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _expected(kinds: list[Any], optional: bool) -> str:
    words = [_WORDS.get(kind, "a path" if kind is Path else "a list") for kind in kinds]
    return " or ".join([*words, "none"] if optional else words)


def _convert(name: str, value: Any, hint: Any) -> Any:
    """Return the value in the type of its setting; raise if it has another type."""
    kinds, optional = _options(hint)
    if value is None and optional:
        return None
    for kind in kinds:
        if typing.get_origin(kind) is tuple:
            if isinstance(value, list | tuple):
                part = typing.get_args(kind)[0]
                return tuple(_convert(name, inner, part) for inner in value)
        elif kind is Path and isinstance(value, str):
            return Path(value)
        elif kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        elif isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
            return value
    raise ArgumentError(f"{name}={value!r}: give {_expected(kinds, optional)}")


def _check_limits(name: str, value: Any, limits: Mapping[str, Any]) -> None:
    if value is None:
        return
    for part in value if isinstance(value, tuple) else (value,):
        choices = limits["choices"]
        if choices is not None and part not in choices:
            known = ", ".join(map(str, choices))
            raise ArgumentError(f"{name}={part}: use one of {known}")
        if isinstance(part, bool) or not isinstance(part, int | float):
            continue
        if not (
            math.isfinite(part)
            and (limits["minimum"] is None or part >= limits["minimum"])
            and (limits["above"] is None or part > limits["above"])
            and (limits["maximum"] is None or part <= limits["maximum"])
        ):
            raise ArgumentError(f"{name}={part}: give {_range(part, limits)}")


def _range(value: float, limits: Mapping[str, Any]) -> str:
    words = {"minimum": "of at least", "above": "above", "maximum": "of at most"}
    parts = [f"{text} {limits[key]:g}" for key, text in words.items() if limits[key] is not None]
    kind = "a whole number" if isinstance(value, int) else "a number"
    return " ".join([kind, " and ".join(parts)]) if parts else "a finite number"


_CONSTANTS = {"true": True, "false": False, "none": None}


def split_spec(
    spec: str, label: str = "spec", behaviors: Mapping[str, Any] | None = None
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
    return name.strip(), _Reader(f"{label} {spec!r}", behaviors or {}).settings(call)


class _Reader:
    """Reads the values of a spec; ``where`` names the spec in errors."""

    def __init__(self, where: str, behaviors: Mapping[str, Any]) -> None:
        self.where, self.behaviors = where, behaviors

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
            case ast.Name(id=word) if word.lower() in _CONSTANTS:
                return _CONSTANTS[word.lower()]
            case ast.Name(id=word):
                known = self.behaviors.get(word.lower())
                return word if known is None else known()
            case ast.Constant(value=None | bool()):
                return node.value
            case ast.List(elts=parts):
                return tuple(self._value(part) for part in parts)
            case ast.Call(func=ast.Name(id=word)) if self.behaviors:
                return self._behavior(word, node)
        raise ArgumentError(
            f"{ast.unparse(node)!r} in {self.where}: a value is a number, a word, a list "
            "or a behavior"
        )

    def _behavior(self, word: str, call: ast.Call) -> Any:
        known = self.behaviors.get(word.lower())
        if known is None:
            accepted = ", ".join(sorted(self.behaviors))
            raise ArgumentError(f"{word!r} in {self.where} is not known: use one of {accepted}")
        settings = self.settings(call)
        try:
            return known(**settings)
        except TypeError:
            accepted = ", ".join(inspect.signature(known).parameters)
            raise ArgumentError(f"{word} in {self.where} takes {accepted}") from None
