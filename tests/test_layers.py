"""Layers: imports go down only, torch stays above, the public list is true."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import featherbed as fb

SOURCE = Path(fb.__file__).parent
# from the bottom up: a module imports from lower layers, and sideways only what SIDEWAYS names
LAYERS = [
    ["version", "errors", "files"],
    ["checks", "lazy"],
    ["progress", "settings", "compose", "hashing"],
    ["kernels"],
    ["packed"],
    ["graphs"],
    ["theory"],
    ["report"],
    ["codecs"],
    ["ops"],
    ["optim", "anchors"],
    ["tables", "sharing", "losses"],
    ["interop", "io", "testing"],
    ["apps"],
    ["server"],
    ["cli"],
    ["__main__"],
]
SIDEWAYS = {("anchors", "optim"), ("losses", "tables"), ("interop", "io")}
HEIGHT = {name: height for height, names in enumerate(LAYERS) for name in names}
WITHOUT_TORCH = (
    "version",
    "errors",
    "progress",
    "settings",
    "files",
    "compose",
    "hashing",
    "kernels",
    "packed",
    "codecs",
    "report",
    "cli",
    "theory",
    "graphs",
    "__init__",
)


def modules():
    return sorted(SOURCE.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path, inside_functions: bool):
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if inside_functions else tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "featherbed":
            yield from (f"featherbed.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_down(path):
    here = room(path)
    if here == "__init__":
        return
    assert here in HEIGHT, f"{path.name} belongs to no layer: add its room to LAYERS"
    for name in imports(path, inside_functions=True):
        parts = name.split(".")
        if parts[0] == "featherbed" and len(parts) > 1 and parts[1] in HEIGHT and parts[1] != here:
            assert (here, parts[1]) in SIDEWAYS or HEIGHT[parts[1]] < HEIGHT[here], (
                f"{here} must not import {name}: it stands above or beside"
            )


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_torch_stays_above(path):
    if room(path) in WITHOUT_TORCH or (SOURCE / "interop/onnx") in path.parents:
        fit_with_torch = path.relative_to(SOURCE) == Path("codecs/kd.py")
        assert not [
            name
            for name in imports(path, inside_functions=not fit_with_torch)
            if name.split(".")[0] == "torch"
        ]


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_functions_stay_readable(path):
    text = path.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 140, f"{node.name} is too long to read at once"


def test_no_import_cycles():
    edges = {}
    for path in modules():
        name = ".".join(
            ("featherbed", *path.relative_to(SOURCE).with_suffix("").parts)
        ).removesuffix(".__init__")
        edges[name] = {
            n for n in imports(path, inside_functions=False) if n.startswith("featherbed.")
        }
    seen, stack = set(), []

    def visit(name):
        assert name not in stack, f"import circle: {' -> '.join([*stack, name])}"
        if name in seen or name not in edges:
            return
        stack.append(name)
        for other in sorted(edges[name]):
            visit(other)
        stack.pop()
        seen.add(name)

    for name in edges:
        visit(name)


def test_import_is_light():
    code = "import sys, featherbed; print([m for m in ('torch', 'numba', 'numpy', 'rich') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_public_names_exist_are_sorted_and_documented():
    names = [name for name in fb.__all__ if name != "__version__"]
    assert names == sorted(names)
    assert dir(fb) == sorted(fb.__all__)
    for name in names:
        public = getattr(fb, name)
        assert inspect.getdoc(public), f"{name} has no docstring"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = fb.nothing


def test_public_examples_are_there():
    callables = [
        n
        for n in fb.__all__
        if n != "__version__"
        and not inspect.ismodule(public := getattr(fb, n))
        and not issubclass_of_error(public)
    ]
    missing = [name for name in callables if ">>>" not in (inspect.getdoc(getattr(fb, name)) or "")]
    assert not missing, f"no executed example in the docstring of {missing}"


def issubclass_of_error(thing):
    return inspect.isclass(thing) and issubclass(thing, Exception)


def test_without_torch_the_error_tells_what_to_install():
    code = (
        "import sys, featherbed; sys.modules['torch'] = None\n"
        "try: featherbed.AnchorTable\nexcept ImportError as error: print(error)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 'pip install "featherbed[train]"' in found.stdout
