"""Ranking: BPR with shared embeddings."""

import statistics

from research.harness.report import markdown, mean_text, records_of
from research.harness.settings import read_experiment

NAME = "ranking/ml1m"
MEASURES = ("p@1", "p@5", "p@10", "ndcg@10", "recall@10")


def blocks() -> dict[str, list[str]]:
    """Return the table of the README, and the gain by sharing."""
    runs, rows = records_of(NAME), []
    published = {row.name: row.published for row in read_experiment(NAME).rows}
    for name, records in runs.items():
        cells = [mean_text([one["measures"][key] for one in records], 4) for key in MEASURES]
        known = " ".join(f"{value:.4f}" for value in published[name].values())
        seconds = statistics.fmean(one["seconds"] for one in records)
        rows.append((name, *cells, known, f"{seconds:.0f}"))
    head = ["run", "P@1", "P@5", "P@10", "NDCG@10", "recall@10", "published P@1/5/10", "seconds"]
    plain, shared = ([r["measures"]["ndcg@10"] for r in runs[n]] for n in ("bpr", "sse-se"))
    gain = mean_text([b - a for a, b in zip(plain, shared, strict=True)], 4)
    sign = "" if gain.startswith("-") else "+"
    return {
        "ml1m": markdown(head, rows),
        "gain": [f"Sharing gains {sign}{gain} NDCG@10 (seeds in pairs)."],
    }
