"""The documentation site: pages from everywhere in the repository, and checks of what was built.

Links in Markdown lead to files of the repository, so that they work where the repository is read.
Here each of them gets its place on the site: pages and pictures as they are, any other file that a
page links to as a page that shows it.
"""

from __future__ import annotations

import ast
import html
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "docs" / "hooks")]

from reference import api_pages, options_page, public_names, settings_page  # noqa: E402

DOCS = ROOT / "docs"
MOVED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "examples": "examples.md",
    "research/results": "files/research/results.md",
}
PICTURES = (".svg", ".png")
LONGEST = 100_000  # characters of a file that is shown
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
FENCE = re.compile(r"(^```.*?^```$)", flags=re.DOTALL | re.MULTILINE)
SPEAKS = {".py": "python", ".toml": "toml", ".json": "json", ".yml": "yaml", ".yaml": "yaml"}

sources: dict[str, Path] = {}  # of the pages that are read from files outside of docs/


def site_path(path: Path) -> str:
    """Return where a file or folder of the repository is on the site.

    >>> site_path(ROOT / "docs" / "idea.md"), site_path(ROOT / "Makefile")
    ('idea.md', 'files/Makefile.md')
    """
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix()
    if name in MOVED:
        return MOVED[name]
    if (path / "README.md").is_file():
        path = path / "README.md"
    if path.name == "README.md":
        return (path.parent / "index.md").relative_to(ROOT).as_posix()
    return name if path.suffix in PICTURES or path.suffix == ".md" else f"files/{name}.md"


def links(text: str, path: Path) -> Iterator[Path]:
    """Yield the files and folders of the repository that a page links to."""
    for part in FENCE.split(text)[::2]:
        for found in LINK.finditer(part):
            if (target := _target(found[2], path)) is not None:
                yield target


def _target(link: str, path: Path) -> Path | None:
    """Return the file that a link of a page leads to; None if it stays or leaves the repository."""
    address = urlsplit(link)
    if address.scheme or not address.path:
        return None
    found = Path(os.path.normpath(path.parent / unquote(address.path)))
    return found if found.exists() and found.is_relative_to(ROOT) else None


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Complete the navigation: tables, the Python reference, research, pages nobody listed."""
    nav: Any = config.nav
    by_title = {title: part for entry in nav for title, part in entry.items()}
    tables = sorted(site_path(page) for page in (DOCS / "tables").glob("*.md"))
    by_title["Tables"].extend(tables)
    python = next(part["Python"] for part in by_title["Reference"] if "Python" in part)
    python.extend({title: path} for path, title, _ in api_pages())
    studies = sorted((ROOT / "research" / "studies").glob("*/README.md"))
    shown = [ROOT / "research" / "README.md", ROOT / "research" / "papers" / "README.md", *studies]
    by_title["Research"].extend(site_path(page) for page in shown)
    listed = set(re.findall(r"[\w/.-]+\.md", str(nav)))
    pages = sorted(site_path(page) for page in DOCS.rglob("*.md"))
    by_title["Guides"].extend(page for page in pages if page not in listed)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add generated pages, the pages outside of docs/, and the files that pages link to."""
    for path, text in generated().items():
        files.append(File.generated(config, path, content=text))
    given = [ROOT / name for name in MOVED if name.endswith(".md")]
    waiting = [*given, *sorted((ROOT / "research").rglob("README.md")), *sorted(DOCS.rglob("*.md"))]
    taken: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path in taken:
            continue
        taken.add(path)
        place = site_path(path)
        if path.suffix in PICTURES:
            if files.get_file_from_path(place) is None:
                files.append(File.generated(config, place, abs_src_path=str(path)))
            continue
        if path.is_dir() and (path / "README.md").is_file():
            path = path / "README.md"
        if path.suffix == ".md":
            waiting.extend(links(path.read_text(encoding="utf-8"), path))
        if files.get_file_from_path(place) is None:
            sources[place] = path
            shown = "NOT_IN_NAV" if place.startswith("files/") else "INCLUDED"
            level = InclusionLevel[shown]
            files.append(File.generated(config, place, content=_content(path), inclusion=level))
    return files


def generated() -> dict[str, str]:
    """Return the pages that are written from the code: {path: Markdown}."""
    pages = {path: text for path, _, text in api_pages()}
    pages["reference/options.md"] = options_page()
    pages["reference/settings.md"] = settings_page()
    pages["examples.md"] = examples_page()
    return pages


def examples_page() -> str:
    """Return the page of the examples, each with the output it had."""
    lines = ["# Examples", ""]
    lines += ["Complete programs, executed by the tests; each with the output of one run.", ""]
    for path in sorted((ROOT / "examples").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        title = (ast.get_docstring(ast.parse(text)) or path.stem).split("\n")[0].rstrip(".")
        output = path.parent / "output" / f"{path.stem}.txt"
        heading = path.stem.replace("_", " ").capitalize().replace("Http", "HTTP")
        lines += [f"## {heading}", "", f"{title}.", ""]
        if output.is_file():
            lines += ["```text", output.read_text(encoding="utf-8").rstrip(), "```", ""]
        lines += [f'??? example "`examples/{path.name}`"', ""]
        lines += [f"    {line}".rstrip() for line in ["```python", *text.splitlines(), "```"]]
        lines.append("")
    return "\n".join(lines)


def _content(path: Path) -> str:
    """Return a file as Markdown: pages as they are, folders as lists, other files as code."""
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8")
    title = f"---\nsearch:\n  exclude: true\n---\n\n# `{path.relative_to(ROOT)}`\n\n"
    if path.is_dir():
        return title + "\n".join(f"- `{entry.name}`" for entry in sorted(path.iterdir()))
    text = path.read_text(encoding="utf-8")
    cut = "" if len(text) <= LONGEST else f"\nThe first {LONGEST:,} of {len(text):,} characters.\n"
    code = text[:LONGEST].rstrip("\n")
    return f"{title}{cut}\n````{SPEAKS.get(path.suffix, 'text')}\n{code}\n````\n"


def on_page_markdown(markdown: str, page: Page, **kwargs: Any) -> str:  # noqa: ARG001
    """Lead every link to the place of its file on the site."""
    place = page.file.src_uri
    if place == "index.md":
        page.meta["hide"] = ["navigation"]  # it would hold one line
    path = sources.get(place, DOCS / place)
    if path.suffix != ".md":
        return markdown

    def lead(found: re.Match[str]) -> str:
        target = _target(found[2], path)
        if target is None:
            return found[0]
        relative = os.path.relpath(site_path(target), Path(place).parent)
        fragment = urlsplit(found[2]).fragment
        return f"{found[1]}{relative}{'#' if fragment else ''}{fragment}{found[3]}"

    return outside_code(markdown, lambda text: LINK.sub(lead, text))


def outside_code(markdown: str, change: Callable[[str], str]) -> str:
    """Return Markdown with ``change`` applied to everything but fenced code."""
    parts = FENCE.split(markdown)
    parts[::2] = map(change, parts[::2])
    return "".join(parts)


def on_page_content(html_text: str, page: Page, **kwargs: Any) -> str:  # noqa: ARG001
    """Link names such as `fb.AnchorTable` to their entries; the first one of each in a page."""
    if page.file.src_uri.startswith(("reference/", "files/", "changelog")):
        return html_text
    shown: set[str] = set()

    def lead(found: re.Match[str]) -> str:
        name = found["name"]
        if not name or name in shown or name not in PLACES:
            return found[0]
        shown.add(name)
        root = os.path.relpath(".", Path(page.file.dest_uri).parent)
        return f'<a class="name" href="{root}/{PLACES[name]}#{name}">{found[0]}</a>'

    return NAME.sub(lead, html_text)


# what is a link, a heading or a block of code already stays as it is
NAME = re.compile(
    r"<a\b.*?</a>|<h\d.*?</h\d>|<pre.*?</pre>|<code>(?P<name>fb\.\w+)(?=[\s(.<\[])[^<]*</code>",
    flags=re.DOTALL,
)
PLACES = {
    name: f"reference/api/{room}.html"
    for room, names in public_names().items()
    for name in names
    if name.startswith("fb.")
}


def on_post_build(config: MkDocsConfig) -> None:
    """Refuse a site with dead links, things loaded from elsewhere, or names without an entry."""
    found = list(faults(Path(config.site_dir)))
    if found:
        raise PluginError("\n".join(found))


def faults(site: Path) -> Iterator[str]:
    """Yield what is wrong in a built site, a line each."""
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    places = {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in pages.items()}
    for path, text in pages.items():
        here = path.relative_to(site)
        tags = r"<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=\"?(?:https?:)?//[^\s\">]*"
        for tag in re.findall(tags, text):
            if 'rel="canonical"' not in tag:
                yield f"{here}: {tag} is loaded from elsewhere"
        for link in re.findall(r"<a\b[^>]*?\bhref=\"([^\"]+)\"", text):
            address = urlsplit(html.unescape(link))
            if address.scheme or address.netloc or path.name == "404.html":
                continue
            target = Path(os.path.normpath(path.parent / unquote(address.path)))
            target = path if not address.path else target
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                yield f"{here}: {link} leads nowhere"
            elif address.fragment and target in places:
                fragment = unquote(address.fragment)
                if fragment not in places[target] and fragment != "__skip":
                    yield f"{here}: {link} names no place of its page"
    for name, page in PLACES.items():
        if name not in places.get(site / page, ()):
            yield f"{page}: no entry for {name}"
