"""The page of an experiment: summary, plot, clusters where there are some, protocol, settings."""

from __future__ import annotations

from featherbed.report.page import as_html, page, table
from featherbed.version import __version__
from research.harness.plots import drawing
from research.harness.run import Results
from research.harness.settings import Experiment
from research.harness.summary import HIGHER, MEASURES, NONE, Line, notes, summarise


def summary_page(results: Results) -> str:
    """Return one HTML page of what came out; it holds all it needs and fetches nothing, and every text is shown as text."""
    paper = results.experiment
    lines = summarise(results)
    sections = [
        f"<p class=lead>{as_html(_headline(results))}</p><p class=soft>{as_html(paper.paper)}</p>",
        _table(lines),
        drawing(results),
        _clusters(results),
        "<h2>How it was measured</h2><ul>"
        + "".join(f"<li>{as_html(note)}</li>" for note in notes(results))
        + "</ul>",
        _settings(results),
        f"<h2>How to repeat it</h2><pre><code>make paper {as_html(_variables(paper))}</code></pre>"
        f"<footer>Made by featherbed {as_html(__version__)}; every run has a record, which is never edited.</footer>",
    ]
    return page(as_html(paper.title), as_html(paper.title), sections)


def _variables(paper: Experiment) -> str:
    return f"NAME={paper.name}" + (f" SIZE={paper.size}" if paper.size else "")


def _table(lines: list[Line]) -> str:
    """Return the summary with a column for each measure, the published number below ours."""
    head = ["row", *(MEASURES[figure.name][0] for figure in lines[0].figures), "seeds", "seconds"]
    rows = []
    for line in lines:
        found = [as_html(line.label)]
        for figure in line.figures:
            beside = (
                []
                if figure.published is None
                else [f"published {figure.published_text}{'*' if line.reported else ''}"]
            )
            beside += [] if figure.difference is None else [figure.difference_text]
            found.append(
                as_html(figure.text)
                + (f"<small>{as_html(', '.join(beside))}</small>" if beside else "")
            )
        rows.append(
            (*found, str(line.seeds), NONE if line.seconds is None else f"{line.seconds:,.0f}")
        )
    return table("What came out", map(as_html, head), rows)


def _headline(results: Results) -> str:
    """Say how many runs there are, and how many rows reach the published number of the first measure."""
    lines = [line for line in summarise(results) if line.seeds]
    runs = sum(line.seeds for line in lines)
    text = f"{runs} run{'' if runs == 1 else 's'} of {len(lines)} rows"
    firsts = [line.figures[0] for line in lines if line.figures]
    compared = [figure for figure in firsts if figure.difference is not None]
    if not compared:
        return text + "."
    higher = compared[0].name in HIGHER
    good = sum((figure.difference or 0.0) * (-1 if higher else 1) <= 0 for figure in compared)
    return f"{text}; {good} of {len(compared)} at or {'above' if higher else 'below'} the published number."


def _clusters(results: Results) -> str:
    """Return the films that the anchors of the first run of each row induce most."""
    parts = []
    for row in results.experiment.rows:
        records = results.records.get(row.name, {})
        found = records[min(records)]["details"].get("clusters", []) if records else []
        rows = []
        for one in found:
            names = ", ".join(film["title"] for film in one["first"])
            share = f"{one['inside']:,} of {one['films']:,}"
            rows.append((f"{as_html(one['genre'])}<small>{as_html(names)}</small>", share))
        note = "The first films of each anchor, the one of the largest weight first; how many of its films are of the genre."
        parts.append(table(f"Clusters of {as_html(row.label)}", ("genre", "films"), rows, note))
    return "".join(parts)


def _settings(results: Results) -> str:
    rows = []
    for row in results.experiment.rows:
        if row.runs:
            settings = ", ".join(f"{key} = {value}" for key, value in row.settings.items())
            rows.append(
                (f"{as_html(row.label)}<small>{as_html(settings)}</small>", as_html(row.name))
            )
    every = table("", ("row", "name"), rows)
    return f"<h2>Settings</h2><details><summary>Settings of every row</summary>{every}</details>"
