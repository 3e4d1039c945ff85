"""Public names of a package, loaded on first use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

ROOT = __file__.removesuffix("lazy.py")


def attach(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of ``package``.

    The package's ``__init__.pyi`` is the one list of its names, read here and by type checkers: a
    line is ``from MODULE import NAME as NAME``, or ``from PACKAGE import *`` for every name that
    PACKAGE lists; with ``import PACKAGE as NAME`` the name is that of a whole package. Importing
    the package imports none of its modules. No name may be that of a module of the package: once
    imported, the module would stand in its place.

    >>> getattribute, _, names = attach("featherbed.packed")
    >>> "PackedTable" in names, getattribute("PackedTable").__module__
    (True, 'featherbed.packed.table')
    """
    modules = dict(listed_names(package))

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            if modules[name] == package:
                return import_module(f"{package}.{name}")
            if modules[name].startswith("package "):
                return import_module(modules[name].removeprefix("package "))
            return getattr(import_module(modules[name]), name)
        except ModuleNotFoundError as error:
            missing = str(error.name).partition(".")[0]
            extra = {"torch": "train", "torchrec": "distributed"}.get(missing)
            if extra is None:
                raise
            from featherbed.errors import MissingExtra

            raise MissingExtra(missing, extra, f"{package}.{name}") from None

    names = sorted(modules)
    return load, lambda: names, names


def listed_names(package: str) -> Iterator[tuple[str, str]]:
    """Yield (name, module) for every name that the list of ``package`` makes public."""
    folder = ROOT + package.removeprefix("featherbed").replace(".", "/").lstrip("/")
    try:
        lines = open(f"{folder}/__init__.pyi", encoding="utf-8")  # noqa: PTH123, SIM115 - pathlib takes 10 ms to import
    except FileNotFoundError:  # imported at once: the list is the import lines of the package
        lines = open(f"{folder}/__init__.py", encoding="utf-8")  # noqa: PTH123, SIM115
    home = ""
    with lines:
        for words in map(str.split, lines):
            if words[:1] == ["from"]:
                home = words[1]
            if words[:1] == ["from"] and words[-1] == "*":
                yield from listed_names(words[1])
            elif words[:1] == ["import"] and words[-2:-1] == ["as"]:
                yield words[-1], f"package {words[1]}"
            elif words[-2:-1] == ["as"]:
                yield words[-1].removesuffix(","), home
