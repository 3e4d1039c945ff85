"""Applications stand on public names; every public list is true; files and folders are documented."""

import ast
import collections
import importlib
import inspect
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer

import featherbed as fb
from featherbed.lazy import listed_names

SOURCE = Path(fb.__file__).parent
ROOT = Path(__file__).parent.parent
MOST_KEYWORDS, MOST_OPTIONS = 9, 14
UNCOUNTED = {"self", "padding_idx", "generator", "dtype", "device"}
PACKAGES = sorted(path.parent for path in SOURCE.rglob("__init__.py"))
LAZY = [path.parent for path in sorted(SOURCE.rglob("__init__.pyi"))]


def package_name(folder: Path) -> str:
    return ".".join(("featherbed", *folder.relative_to(SOURCE).parts))


def trees(folder: Path):
    for path in sorted(folder.rglob("*.py")):
        yield path, ast.parse(path.read_text())


@pytest.mark.parametrize("folder", LAZY, ids=package_name)
def test_public_lists_are_true(folder):
    name = package_name(folder)
    if name == "featherbed.interop.torchrec" and find_spec("torchrec") is None:
        pytest.skip("TorchRec is not installed: pip install --no-deps torchrec==1.8.0")
    package, listed = importlib.import_module(name), list(listed_names(name))
    assert len({public for public, _ in listed}) == len(listed), "a name is listed twice"
    assert package.__all__ == sorted(public for public, _ in listed) == dir(package)
    modules = {path.stem for path in folder.iterdir()}
    for public, home in listed:
        assert public not in modules or home == name, f"a module of {name} is called {public} too"
        assert hasattr(package, public), f"{home} has no {public}"


def public_names(module: str) -> set[str]:
    """Names that applications may import from ``module``; none from a module inside a package."""
    path = SOURCE.joinpath(*module.split(".")[1:])
    if path.is_dir():
        inside = {entry.stem for entry in path.iterdir() if (entry / "__init__.py").exists()}
        return {*importlib.import_module(module).__all__, *inside}
    if path.parent == SOURCE:  # errors, settings, progress ...
        return {name for name in vars(importlib.import_module(module)) if name[0] != "_"} | {
            "__version__"
        }
    return set()


@pytest.mark.parametrize("path", sorted((SOURCE / "apps").rglob("*.py")), ids=lambda p: p.name)
def test_applications_import_public_names(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not [alias.name for alias in node.names if alias.name.startswith("featherbed.")]
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("featherbed"):
            own = node.module.startswith("featherbed.apps")
            private = {alias.name for alias in node.names} - (
                set() if own else public_names(node.module)
            )
            assert own or not private, f"{private} of {node.module} not in a package's __all__"


def test_class_names_are_unique():
    classes = collections.defaultdict(list)
    for path, tree in trees(SOURCE):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(str(path.relative_to(SOURCE)))
    assert not {name: places for name, places in classes.items() if len(places) > 1}


def test_constructors_have_few_keywords():
    found = {}
    for path, tree in trees(SOURCE):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                arguments = {arg.arg for arg in (*node.args.args, *node.args.kwonlyargs)}
                if len(arguments - UNCOUNTED - {"num_embeddings", "embedding_dim"}) > MOST_KEYWORDS:
                    found[f"{path.relative_to(SOURCE)}:{node.lineno}"] = sorted(arguments)
    for name in fb.__all__:
        if inspect.isclass(kind := getattr(fb, name)) and issubclass(kind, fb.Table):
            keywords = set(inspect.signature(kind).parameters) - UNCOUNTED
            if len(keywords - {"num_embeddings", "embedding_dim"}) > MOST_KEYWORDS:
                found[name] = sorted(keywords)
    assert not found


def commands(group, name=()):
    for word, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*name, word))
    if not hasattr(group, "commands"):
        yield " ".join(name), group


def test_commands_have_few_options():
    from featherbed.cli import app

    found = {
        name: [option.name for option in command.params if option.param_type_name == "option"]
        for name, command in commands(typer.main.get_command(app))
    }
    assert len(found) > 10
    assert not {
        name: options
        for name, options in found.items()
        if len([option for option in options if option != "help"]) > MOST_OPTIONS
    }


SERVERS = [path for path in sorted(SOURCE.rglob("serve.py")) if "apps" in path.parts]


@pytest.mark.parametrize("path", SERVERS, ids=lambda path: path.parent.name)
def test_serving_modules_need_no_torch(path):
    module = ".".join(("featherbed", *path.relative_to(SOURCE).with_suffix("").parts))
    code = f"import sys; sys.modules['torch'] = None; import {module}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", ["docs/idea.md", "CONTRIBUTING.md"])
def test_pages_name_every_folder(page):
    text = (ROOT / page).read_text()
    rooms = [folder.name for folder in PACKAGES if folder.parent == SOURCE]
    assert not [room for room in rooms if f"{room}/" not in text]
    if page == "docs/idea.md":
        applications = [folder.name for folder in PACKAGES if folder.parent.name == "apps"]
        assert not [name for name in applications if f"{name}/" not in text]
