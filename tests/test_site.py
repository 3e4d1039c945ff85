"""The documentation site: every link, every public name, every command and setting; see `make docs`."""

import inspect
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

import featherbed as fb
from featherbed.cli.options import SETTINGS, settings_of

pytest.importorskip("mkdocs", reason='the site needs pip install "featherbed[docs]"')
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs" / "hooks"))
site, reference = import_module("site_pages"), import_module("reference")
from docstrings import fence_examples  # noqa: E402
from pymdownx.slugs import slugify  # noqa: E402

OUTSIDE = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
PAGES = sorted(
    [
        *(ROOT / name for name in OUTSIDE),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "research").rglob("README.md"),
    ]
)


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    text = site.outside_code(path.read_text(encoding="utf-8"), lambda part: part)
    headings = re.findall(r"^#+ (.+)$", "".join(site.FENCE.split(text)[::2]), flags=re.MULTILINE)
    slug = slugify(case="lower")
    return {
        slug(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", one).replace("`", ""), "-") for one in headings
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_anchors_lead_somewhere(page):
    """The site is built from these files: `make docs` checks the same of the pages it makes."""
    for part in site.FENCE.split(page.read_text(encoding="utf-8"))[::2]:
        for _, link, _ in site.LINK.findall(part):
            if "://" in link or link.startswith("mailto:"):
                continue
            name, _, fragment = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            assert target.exists(), f"{page.name} links to {link}, which is not there"
            assert target.is_relative_to(ROOT), f"{link} leaves the repository"
            if fragment and target.suffix == ".md":
                assert fragment in anchors(target), f"{page.name}: {link} names no heading"


def test_every_public_name_has_an_entry():
    found = reference.public_names()
    names = {name for room in found.values() for name in room}
    assert {f"fb.{name}" for name in fb.__all__} - names == {"fb.__version__"}
    homes = {home for room in found.values() for home in room.values()}
    shown = [getattr(import_module(h.rpartition(".")[0]), h.rpartition(".")[2]) for h in homes]
    for package in reference.packages():
        module = import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.ismodule(value):
                continue
            inside = package.split(".")[1] not in reference.ROOMS
            assert inside or any(value is one for one in shown) or f"{package}.{name}" in names
    text = "".join(page for _, _, page in reference.api_pages())
    assert not [name for name in names if f"{{#{name}}}" not in text]


def test_every_command_option_and_setting_is_listed():
    options, settings = reference.options_page(), reference.settings_page()
    found = dict(reference.commands())
    assert len(found) > 15
    for name, command in found.items():
        assert f"## featherbed {name}\n" in options
        for option in command.params:
            if option.param_type_name == "option" and "--help" not in option.opts:
                assert f"`{option.opts[0]}`" in options, (name, option.name)
    for command in SETTINGS:
        assert f"## featherbed {command}\n" in settings
        for line in settings_of(command).describe():
            assert f"| `{line.name}` |" in settings


def test_every_page_is_in_the_navigation():
    from mkdocs.config import load_config

    config = load_config(str(ROOT / "mkdocs.yml"), plugins=["search"])
    listed = set(re.findall(r"[\w/.-]+\.md", str(site.on_config(config).nav)))
    pages = {site.site_path(page) for page in PAGES}
    assert not pages - listed
    assert not [name for name in listed - pages if name not in site.generated()]


def test_paths_of_the_site():
    assert site.site_path(ROOT / "README.md") == "index.md"
    assert site.site_path(ROOT / "research" / "papers") == "research/papers/index.md"
    assert site.site_path(ROOT / "Makefile") == "files/Makefile.md"


def test_examples_of_docstrings_are_fenced():
    text = fence_examples("Add.\n\n>>> 1 + 1\n2\n\nMore.")
    assert text == "Add.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nMore."


def test_faults_of_a_built_site_are_found(tmp_path):
    (tmp_path / "index.html").write_text(
        '<a href="gone.html">a</a><a href="#no">b</a><script src="https://x.org/a.js"></script>'
    )
    found = "\n".join(site.faults(tmp_path))
    assert "gone.html leads nowhere" in found
    assert "#no names no place" in found
    assert "loaded from elsewhere" in found
    assert "no entry for fb.AnchorTable" in found
