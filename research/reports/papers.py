"""Write README.md from the results beside it: python experiments/papers/report.py [--check]

Results come from `featherbed paper NAME --out experiments/papers/results`; pages are not kept here.
"""

import sys
from pathlib import Path

from featherbed.papers.run import Results, read_results
from featherbed.papers.settings import paper_names, read_paper
from featherbed.papers.summary import as_markdown

HERE = Path(__file__).parent
HEAD = """# Published tables and figures, and ours

Made by `featherbed paper NAME --out experiments/papers/results` ([what it does](../../docs/papers.md)); `report.py` wrote this
page from the result files, one for each row and seed. Settings were chosen on validation parts, each run read its test part
once, at its end. Seconds are of a busy machine, one thread.
"""


def sections():
    yield HEAD
    for name in paper_names():
        paper = read_paper(name)
        found = read_results(paper, HERE / "results")
        if not found.records:
            continue
        seeds = sorted({seed for records in found.records.values() for seed in records})
        yield f"## {paper.title}\n\n`featherbed paper {name}`, seeds {', '.join(map(str, seeds))}\n"
        yield as_markdown(Results(paper, found.records)) + "\n"
        yield from clusters(found)


def clusters(found):
    """Yield the first films of each anchor of the first run."""
    for row in found.paper.rows:
        records = found.records.get(row.name, {})
        anchors = records[min(records)]["details"].get("clusters", []) if records else []
        if anchors:
            yield f"The first films of each anchor, {row.label}, seed {min(records)}:\n"
            yield "| main genre | its share | films |\n|---|---|---|"
            for one in sorted(anchors, key=lambda anchor: -anchor["films"]):
                films = ", ".join(film["title"] for film in one["first"][:5])
                yield f"| {one['genre']} | {one['inside']:,} of {one['films']:,} | {films} |"
            yield ""


def main():
    text = "\n".join(sections())
    target = HERE / "README.md"
    if "--check" in sys.argv:
        sys.exit(
            0
            if target.read_text() == text
            else "README.md is not what the results say: run report.py"
        )
    target.write_text(text)


if __name__ == "__main__":
    main()
