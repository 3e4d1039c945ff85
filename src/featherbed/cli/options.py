"""Options that several commands share, and the list of a command's settings."""

from __future__ import annotations

import json
import shlex
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from featherbed.errors import ArgumentError

if TYPE_CHECKING:
    from featherbed.settings import Settings

Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change a setting, such as training.lr=0.01; repeat for more."),
]
Recipe = Annotated[
    Path | None, typer.Option("--recipe", help="Read settings from a TOML file.", metavar="FILE")
]
Out = Annotated[Path, typer.Option("--out", help="Folder to write.", metavar="DIR")]
Seed = Annotated[int, typer.Option("--seed", help="Random seed.", min=0)]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue from the last checkpoint in the folder.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the model in the folder.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]

SETTINGS = {  # command: module and class of its settings, imported when needed
    "train ratings": ("featherbed.apps.recommender", "RecommenderSettings"),
    "train ranking": ("featherbed.apps.recommender", "RankingSettings"),
    "train text": ("featherbed.apps.classifier", "ClassifierSettings"),
    "train sequences": ("featherbed.apps.sequences", "SequenceSettings"),
    "train lm": ("featherbed.apps.language", "LanguageSettings"),
    "update": ("featherbed.apps.recommender", "UpdateSettings"),
}


def log_line(line: str) -> None:
    """Print a line for the user on standard error."""
    typer.echo(line, err=True)


def command_line() -> str:
    """Return the command as it was typed."""
    return shlex.join(["featherbed", *sys.argv[1:]])


def run_options(seed: int, resume: bool, overwrite: bool, quiet: bool) -> dict[str, Any]:
    """Return the keywords that all training functions take (see ``RunOptions``)."""
    shared = {"seed": seed, "resume": resume, "overwrite": overwrite, "progress": not quiet}
    return {**shared, "log": log_line, "command": command_line()}


def settings_of(command: str) -> type[Settings]:
    """Return the class of a command's settings."""
    if command not in SETTINGS:
        known = ", ".join(f"'{name}'" for name in SETTINGS)
        raise ArgumentError(f"{command!r} has no settings: use one of {known}")
    module, name = SETTINGS[command]
    found: type[Settings] = getattr(import_module(module), name)
    return found


def show_settings(command: str, *, as_json: bool = False) -> str:
    """Return every setting of a command with its default and help, one section per group."""
    lines = settings_of(command).describe()
    if as_json:
        return json.dumps([line._asdict() for line in lines], indent=1, default=str)
    width = min(44, max(len(f"{line.name} = {_shown(line.default)}") for line in lines))
    shown, section = list[str](), ""
    for line in lines:
        here = line.name.rpartition(".")[0]
        if here != section and shown:
            shown.append("")
        section = here
        text = line.help
        if line.choices is not None:
            text += f" One of: {', '.join(map(str, line.choices))}."
        shown.append(f"{f'{line.name} = {_shown(line.default)}':<{width}}  {text}")
    return "\n".join(shown)


def _shown(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
