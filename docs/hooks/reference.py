"""Reference pages, written from the code: every public name, command, option and setting."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

import featherbed as fb
from featherbed.cli import app
from featherbed.cli.options import SETTINGS, settings_of
from featherbed.lazy import listed_names

SOURCE = Path(fb.__file__).parent
ROOMS = {  # folder of the package: title of its page, from what is used first to the inside
    "tables": "Tables",
    "optim": "Optimizers and penalties",
    "codecs": "Compression",
    "packed": "Files, look-ups and search",
    "interop": "Models of other libraries",
    "anchors": "Initial anchors",
    "sharing": "Shared rows",
    "losses": "Losses",
    "graphs": "Relations",
    "apps": "Applications",
    "io": "Readers",
    "report": "Reports",
    "server": "Server",
    "theory": "Theory",
    "testing": "Tests of tables",
    "errors": "Errors",
    "kernels": "Compiled loops",
}

ROOMS_OF_MODULES = ("featherbed.testing", "featherbed.theory")  # public as modules
MOST_OF_A_VALUE = 60  # characters of a constant's value that are shown


def public_names() -> dict[str, dict[str, str]]:
    """Return {room: {public name: where it is defined}}, `fb` names before those of packages."""
    found: dict[str, dict[str, str]] = {room: {} for room in ROOMS}
    homes = dict(listed_names("featherbed"))
    for name in sorted(set(fb.__all__) - {"__version__"}, key=str.lower):
        value = getattr(fb, name)
        home = (
            value.__name__ if inspect.ismodule(value) else f"{_module(value, homes[name])}.{name}"
        )
        found[home.split(".")[1]][f"fb.{name}"] = home
    shown = {home for names in found.values() for home in names.values()}
    for package in packages():
        module = import_module(package)
        listed = dict(listed_names(package))
        for name in module.__all__:
            value = getattr(module, name)
            home = f"{_module(value, listed.get(name, package))}.{name}"
            room = package.split(".")[1]
            if home not in shown and room in found and not inspect.ismodule(value):
                found[room][f"{package}.{name}"] = home
                shown.add(home)
    return found


def packages() -> Iterator[str]:
    """Yield the packages inside featherbed that have a public list."""
    for path in sorted(SOURCE.rglob("__init__.py")):
        parts = path.parent.relative_to(SOURCE).parts
        name = ".".join(("featherbed", *parts))
        if parts and hasattr(import_module(name), "__all__"):
            yield name


def _module(value: Any, listed: str) -> str:
    module = getattr(value, "__module__", None)
    known = isinstance(module, str) and module.startswith("featherbed")
    return str(module) if known and (inspect.isclass(value) or callable(value)) else listed


def api_pages() -> Iterator[tuple[str, str, str]]:
    """Yield (path, title, Markdown) of the pages of the Python reference."""
    for room, names in public_names().items():
        if not names:
            continue
        short = [name for name in names if name.startswith("fb.")]
        lines = [f"# {ROOMS[room]}", ""]
        lines += _entries({name: names[name] for name in short})
        if others := {name: home for name, home in names.items() if name not in short}:
            if short:
                lines += ["## Names of packages", "", "Imported from the package named.", ""]
            lines += _entries(others)
        yield f"reference/api/{room}.md", ROOMS[room], "\n".join(lines)


def _entries(names: dict[str, str]) -> list[str]:
    lines = []
    for name, home in names.items():
        package, _, short = home.rpartition(".")
        value = None if home in ROOMS_OF_MODULES else getattr(import_module(package), short)
        if value is not None and not callable(value):
            kind, text = type(value).__name__, repr(value)
            text = text if len(text) <= MOST_OF_A_VALUE else f"{text[:MOST_OF_A_VALUE]} ..."
            lines += [f"## `{short}` {{#{name}}}", "", f"A {kind} of `{package}`: `{text}`", ""]
            continue
        lines += [
            f"[](){{#{name}}}",
            "",
            f"::: {home}",
            "    options:",
            f"      heading: {name}",
            f"      toc_label: {name.rpartition('.')[2]}",
            "",
        ]
    return lines


def commands() -> Iterator[tuple[str, Any]]:
    """Yield (name, click command) of every command."""

    def walk(group: Any, words: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        for word, command in group.commands.items():
            if hasattr(command, "commands"):
                yield from walk(command, (*words, word))
            else:
                yield " ".join((*words, word)), command

    yield from walk(typer.main.get_command(app), ())


def options_page() -> str:
    """Return the page of all options, as `--help` prints them."""
    lines = ["# Options of every command", "", "Written from the commands themselves.", ""]
    for name, command in commands():
        context = command.make_context(name, [], resilient_parsing=True)
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        options = [p for p in command.params if p.param_type_name == "option"]
        usage = " ".join(["featherbed", name, *command.collect_usage_pieces(context)])
        lines += [f"## featherbed {name}", "", command.help or "", ""]
        lines += ["```text", usage, "```", "", "| option | default | meaning |", "|---|---|---|"]
        for one in arguments:
            lines.append(f"| `{one.metavar or one.name.upper()}` | | {_cell(one.help)} |")
        for one in options:
            if "--help" in one.opts:
                continue
            names = ", ".join(f"`{word}`" for word in (*one.opts, *one.secondary_opts))
            lines.append(f"| {names} | {_shown(one.default)} | {_cell(one.help)} |")
        lines.append("")
    return "\n".join(lines)


def settings_page() -> str:
    """Return the page of all settings, as `featherbed settings COMMAND` lists them."""
    lines = ["# Settings of every command", ""]
    lines += ["For `--set NAME=VALUE` and [recipes](../commands.md#settings), read from the code."]
    for command in SETTINGS:
        lines += ["", f"## featherbed {command}", ""]
        lines += ["| setting | default | meaning |", "|---|---|---|"]
        for line in settings_of(command).describe():
            text = line.help
            if line.choices is not None:
                text += f" One of: {', '.join(f'`{choice}`' for choice in line.choices)}."
            lines.append(f"| `{line.name}` | {_shown(line.default)} | {_cell(text)} |")
    return "\n".join([*lines, ""])


def _cell(text: str | None) -> str:
    return (text or "").replace("|", "\\|").replace("\n", " ")


def _shown(value: Any) -> str:
    if value is None or value is False or value == "" or callable(value):
        return ""
    return f"`{_cell(str(value))}`"
