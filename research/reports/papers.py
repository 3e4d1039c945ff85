"""The published tables and figures, ours beside them."""

from collections.abc import Iterator

from research.harness.run import Results, read_results
from research.harness.settings import RESULTS, paper_names, read_experiment
from research.harness.summary import as_markdown


def blocks() -> dict[str, list[str]]:
    """Return the sections of all papers that have results."""
    return {"papers": "\n".join(sections()).split("\n")[:-1]}


def sections() -> Iterator[str]:
    """Yield a section for each paper."""
    for name in paper_names():
        paper = read_experiment(name)
        found = read_results(paper, RESULTS)
        if not found.records:
            continue
        seeds = sorted({seed for records in found.records.values() for seed in records})
        listed = ", ".join(map(str, seeds))
        yield f"## {paper.title}\n\n`make paper NAME={name}`, seeds {listed}\n"
        yield as_markdown(Results(paper, found.records)) + "\n"
        yield from clusters(found)


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
