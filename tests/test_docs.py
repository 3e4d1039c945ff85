"""What the documentation shows is executed: Python blocks, featherbed commands, docstring examples."""

import doctest
import importlib
import pkgutil
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

import featherbed as fb
from featherbed.cli import app
from featherbed.tables.spec import BEHAVIORS, METHODS, method_name

ROOT = Path(__file__).parent.parent
OUTSIDE = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES = sorted([*OUTSIDE, *(ROOT / "docs").rglob("*.md")])
MODULES = sorted(m.name for m in pkgutil.walk_packages(fb.__path__, "featherbed."))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for kind, block in re.findall(
        r"```(python|console)\n(.*?)```", page.read_text(), flags=re.DOTALL
    ):
        if kind == "python":
            exec(compile(block, str(page), "exec"), names)
            continue
        for line in block.splitlines():
            if line.startswith("$ featherbed ") and "demo" not in line:
                result = CliRunner().invoke(app, shlex.split(line)[2:])
                assert result.exit_code == 0, (line, result.output, result.exception)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), (
                f"{page.name} links to {target}, which is not there"
            )


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_prose_has_at_most_100_columns(page):
    prose = "".join(page.read_text(encoding="utf-8").split("```")[::2])
    lines = [line for line in prose.splitlines() if not line.startswith(("|", "    "))]
    assert not [line for line in lines if len(line) > 100]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name, getfixture):
    if name.startswith("featherbed.interop.torchrec.") and find_spec("torchrec") is None:
        pytest.skip("TorchRec is not installed: pip install --no-deps torchrec==1.8.0")
    module = importlib.import_module(name)
    result = doctest.testmod(
        module, extraglobs={"getfixture": getfixture}, optionflags=doctest.NORMALIZE_WHITESPACE
    )
    assert result.failed == 0


@pytest.fixture
def getfixture(request):
    return request.getfixturevalue


def test_figures_of_the_demo_are_those_of_one_run():
    """README shows a table and a picture of the demo: of the same run, and of this version."""
    text = (ROOT / "README.md").read_text()
    table = text.split("<!-- demo:begin -->")[1].split("<!-- demo:end -->")[0]
    picture = (ROOT / "docs" / "assets" / "quality.svg").read_text()
    drawn = {
        (f"{float(figure):.3f}", size)
        for figure, size in re.findall(r": ([\d.]+) in ([\d,]+) bytes</title>", picture)
    }
    shown = re.findall(r"(0\.\d{3})[^;|]*?\((?:[^()]*, )??([\d,]{6,})(?: bytes)?\)", table)
    assert len(shown) == table.count(" 0.")
    assert not set(shown) - drawn
    from featherbed.apps.demo import RATIO, VECTORS, make_vectors

    packed = fb.compress(make_vectors(VECTORS), ratio=RATIO, effort="quick", generator=0)
    recall = re.search(r"recall@10 \| ([\d.]+)", table)[1]
    assert float(recall) == pytest.approx(packed.report.quality["recall"], abs=0.003)


HEADINGS = ["What", "Formula", "When", "Example", "Size", "Reference"]


@pytest.mark.parametrize("method", METHODS, ids=method_name)
def test_every_table_has_its_page(method):
    text = (ROOT / "docs" / "tables" / f"{method_name(method)}.md").read_text()
    assert re.findall(r"^## (.+)$", text, flags=re.MULTILINE) == HEADINGS
    assert f"fb.{method.__name__}" in text


def test_the_grammar_names_every_behaviour():
    text = (ROOT / "docs" / "training.md").read_text()
    assert not [name for name in BEHAVIORS if name not in text]


def test_every_public_name_is_in_the_docs():
    pages = "".join(page.read_text() for page in [*PAGES, ROOT / "CHANGELOG.md"])
    hidden = {
        "FeatherbedError",
        "MissingExtra",
        "NotPackable",
        "DataError",
        "IdError",
        "UnknownKeyError",
        "ArgumentError",
    }
    missing = [n for n in fb.__all__ if n not in pages and n not in hidden and n != "__version__"]
    assert not missing


def test_every_command_is_in_the_docs():
    pages = "".join(page.read_text() for page in PAGES)
    for command in app.registered_commands:
        assert f"featherbed {command.name or command.callback.__name__}" in pages
