"""Ranking: BPR with shared embeddings, stored rankings, counts, new users."""

import statistics

from research.harness.report import markdown, mean_text, records_of
from research.harness.settings import read_experiment

NAME, STORED, COUNTS, FOLDED = (
    f"ranking/{name}" for name in ("ml1m", "stored", "counts", "foldin")
)
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
        "stored": _stored(),
        "counts": _counted(),
        "foldin": _folded(),
        "ml1m": markdown(head, rows),
        "gain": [f"Sharing gains {sign}{gain} NDCG@10 (seeds in pairs)."],
    }


def _stored() -> list[str]:
    """Return the table of stored rankings beside float32 ALS and popularity."""
    rows = []
    for name, records in records_of(STORED).items():
        measures = [one["measures"] for one in records]
        cells = [
            mean_text([one[key] for one in measures], 4)
            for key in (
                "ndcg@10",
                "als_ndcg@10",
                "popularity_ndcg@10",
                "of_als",
                "folded",
                "trained",
            )
        ]
        size = statistics.fmean(one["bytes"] for one in measures)
        dense = statistics.fmean(one["float32_bytes"] for one in measures)
        rows.append((name, *cells, f"{size:,.0f}", f"{dense / size:.2f}", str(len(records))))
    head = [
        "run",
        "stored",
        "float32 ALS",
        "popularity",
        "of ALS",
        "folded in",
        "same users trained",
    ]
    return markdown([*head, "bytes", "times smaller", "seeds"], rows)


def _counted() -> list[str]:
    """Return the table of rankings with default settings, on files of counts, purchases, clicks."""
    rows, labels = [], {row.name: row.label for row in read_experiment(COUNTS).rows}
    keys = ("ndcg@10", "default_ndcg@10", "popularity_ndcg@10", "of_default", "of_popularity")
    for name, records in records_of(COUNTS).items():
        measures = [one["measures"] for one in records]
        cells = [mean_text([one[key] for one in measures], 4) for key in keys]
        sizes = (f"{measures[0][key]:,.0f}" for key in ("pairs", "items", "dim"))
        rows.append((labels[name], *sizes, *cells, str(len(records))))
    head = ["file", "pairs", "items", "d", "stored", "implicit, default", "popularity"]
    return markdown([*head, "of implicit", "of popularity", "seeds"], rows)


def _folded() -> list[str]:
    """Return the table of users folded into models of ratings."""
    rows = []
    for name, records in records_of(FOLDED).items():
        measures = [one["measures"] for one in records]
        keys = ("trained_mse", "folded_mse", "of_trained")
        cells = [mean_text([one[key] for one in measures], 4) for key in keys]
        rows.append((name, *cells, str(len(records))))
    return markdown(["run", "MSE, trained", "MSE, folded in", "of trained", "seeds"], rows)
