"""The published tables and figures, ours beside them."""

from collections.abc import Iterator

from research.harness.report import markdown
from research.harness.run import Results, read_results
from research.harness.settings import RESULTS, paper_names, read_experiment
from research.harness.summary import as_markdown

FILES = (250, 500, 1000)  # KB, for which the best stored form is named


def blocks() -> dict[str, list[str]]:
    """Return the sections of all papers that have results."""
    return {"papers": "\n".join(sections()).split("\n")[:-1]}


def sections() -> Iterator[str]:
    """Yield a section for each paper."""
    for name in paper_names():
        paper = read_experiment(name)
        found = read_results(paper, RESULTS)
        own = {row.name for row in paper.rows if row.home == paper.home}
        if not found.records.keys() & (own or found.records.keys()):
            continue  # rows of other experiments alone are shown there
        seeds = sorted({seed for records in found.records.values() for seed in records})
        listed = ", ".join(map(str, seeds))
        yield f"## {paper.title}\n\n`make paper NAME={name}`, seeds {listed}\n"
        yield as_markdown(Results(paper, found.records)) + "\n"
        yield from clusters(found)
        yield from forms(found)


def clusters(found: Results) -> Iterator[str]:
    """Yield the first films of each anchor of the first run."""
    for row in found.experiment.rows:
        records = found.records.get(row.name, {})
        anchors = records[min(records)]["details"].get("clusters", []) if records else []
        if anchors:
            yield f"The first films of each anchor, {row.label}, seed {min(records)}:\n"
            yield "| main genre | its share | films |\n|---|---|---|"
            for one in sorted(anchors, key=lambda anchor: -int(anchor["films"])):
                films = ", ".join(film["title"] for film in one["first"][:5])
                yield f"| {one['genre']} | {one['inside']:,} of {one['films']:,} | {films} |"
            yield ""


def forms(found: Results) -> Iterator[str]:
    """Yield the stored forms of language models, and the best one for files of some sizes."""
    rows: list[tuple[float, float, float, str, str]] = []
    for row in found.experiment.rows:
        for record in found.records.get(row.name, {}).values():
            measures = record["measures"]
            kinds = [name.removesuffix("_bytes") for name in measures if name.endswith("_bytes")]
            rows += [
                (
                    measures[f"{kind}_bytes"],
                    measures[f"{kind}_validation_perplexity"],
                    measures[f"{kind}_perplexity"],
                    row.label,
                    kind,
                )
                for kind in kinds
            ]
    if not rows:
        return
    yield "Perplexity against the bytes of the stored file (without its words):\n"
    lines = [
        (label, kind, f"{size / 1000:,.0f}", f"{validation:.1f}", f"{test:.1f}")
        for size, validation, test, label, kind in sorted(rows)
    ]
    yield "\n".join(markdown(["row", "stored as", "KB", "validation", "test"], lines)) + "\n"
    for limit in FILES:
        fitting = [one for one in rows if one[0] <= 1000 * limit]
        if fitting:
            _, _, test, label, kind = min(fitting, key=lambda one: one[1])
            yield f"- Best in {limit:,} KB, by validation: {label}, {kind}: {test:.1f} on test."
        else:
            yield f"- Nothing here is stored in {limit:,} KB."
    yield ""
