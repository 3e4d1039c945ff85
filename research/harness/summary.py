"""Summaries: means over seeds with their standard errors, beside the published numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from featherbed.errors import ArgumentError
from research.harness.run import Results
from research.harness.settings import Row

NONE = "–"
MEASURES = {  # name: (title, what one unit of it is, digits)
    "mse": ("test MSE", 1.0, 4),
    "rmse": ("test RMSE", 1.0, 4),
    "validation": ("validation error", 1.0, 4),
    "parameters": ("parameters (K)", 1000.0, 1),
    "nonzeros": ("non-zeros (K)", 1000.0, 1),
    "anchors": ("anchors a side", 1.0, 1),
    "user_anchors": ("user anchors", 1.0, 0),
    "item_anchors": ("item anchors", 1.0, 0),
    "most_anchors": ("most anchors on the way", 1.0, 1),
    "objective": ("objective (5)", 1.0, 4),
    "before": ("MSE before", 1.0, 4),
    "before_last": ("MSE before, last tenth", 1.0, 4),
    "epochs": ("epochs", 1.0, 1),
    "epoch_seconds": ("seconds an epoch", 1.0, 2),
    "train": ("training error", 1.0, 4),
    "purity": ("genre purity (%)", 0.01, 1),
    "purity_first": ("of the first films (%)", 0.01, 1),
    "baseline": ("one cluster (%)", 0.01, 1),
    "zero_rows": ("films with a zero row", 1.0, 1),
    "zero_share": ("zero rows (%)", 0.01, 2),
    "als_ndcg@10": ("float32 ALS", 1.0, 4),
    "popularity_ndcg@10": ("popularity", 1.0, 4),
    "default_ndcg@10": ("ALS, default settings", 1.0, 4),
    "of_default": ("of default ALS (%)", 0.01, 1),
    "of_popularity": ("of popularity (%)", 0.01, 1),
    "of_als": ("of float32 ALS (%)", 0.01, 1),
    "of_trained": ("of rows trained (%)", 0.01, 1),
    "trained_mse": ("MSE, trained", 1.0, 4),
    "folded_mse": ("MSE, folded in", 1.0, 4),
    "p@1": ("P@1", 1.0, 4),
    "p@5": ("P@5", 1.0, 4),
    "p@10": ("P@10", 1.0, 4),
    "ndcg@10": ("NDCG@10", 1.0, 4),
    "recall@10": ("Recall@10", 1.0, 4),
    "hit@10": ("Hit@10", 1.0, 4),
    "ndcg@10_of_100_sampled": ("NDCG@10 of 100 sampled", 1.0, 4),
    "hit@10_of_100_sampled": ("Hit@10 of 100 sampled", 1.0, 4),
    "stored_ndcg@10": ("NDCG@10, stored", 1.0, 4),
    "gap_ndcg": ("NDCG@10 against the row beside (%)", 0.01, 1),
    "accuracy": ("test accuracy (%)", 0.01, 2),
    "validation_accuracy": ("validation accuracy (%)", 0.01, 2),
    "gap_points": ("against dense (points)", 0.01, 2),
    "perplexity": ("test perplexity", 1.0, 1),
    "validation_perplexity": ("validation perplexity", 1.0, 1),
    "gap_percent": ("against dense (%)", 0.01, 1),
    "auc": ("test AUC", 1.0, 4),
    "bleu": ("BLEU", 1.0, 2),
    "validation_bleu": ("validation BLEU", 1.0, 2),
    "gap_bleu": ("against dense (BLEU)", 1.0, 2),
    "log_loss": ("test log loss", 1.0, 4),
    "tokens_per_second": ("words a second", 1.0, 0),
    "word_anchors": ("anchors", 1.0, 0),
    "times": ("times fewer parameters", 1.0, 1),
    "bytes": ("packed (KB)", 1000.0, 1),
    "ratio": ("times fewer bytes", 1.0, 1),
    "objective_2e-5": ("eq (36), λ1 = 2e-5", 1.0, 2),
    "objective_1e-4": ("eq (36), λ1 = 1e-4", 1.0, 2),
    "objective_1e-1": ("eq (36), λ1 = 0.1", 1.0, 2),
    "error": ("relative error (%)", 0.01, 2),
    "train_mse": ("training MSE", 1.0, 4),
    "untrained_perplexity": ("before training", 1.0, 1),
    "utilisation": ("codes in use (%)", 0.01, 0),
    "entropy": ("entropy of codes (bits)", 1.0, 2),
    "duplicates": ("duplicate codes", 1.0, 0),
    "whole": ("whole model (KB)", 1000.0, 1),
    "mean_change": ("mean change of cosine", 1.0, 5),
    "f1": ("test F1 (%)", 0.01, 2),
    "precision": ("precision (%)", 0.01, 2),
    "recall": ("recall (%)", 0.01, 2),
    "validation_f1": ("validation F1 (%)", 0.01, 2),
    "hamming_precision": ("Hamming: precision@10 (%)", 0.01, 1),
    "hamming_recall": ("10 in 100 (%)", 0.01, 1),
    "lookup_precision": ("look-up: precision@10 (%)", 0.01, 1),
    "lookup_recall": ("10 in 100 (%)", 0.01, 1),
    "asymmetric_precision": ("query's own vector: precision@10 (%)", 0.01, 1),
    "asymmetric_recall": ("10 in 100 (%)", 0.01, 1),
    "users_hamming_precision": ("other users, Hamming: precision@10 (%)", 0.01, 1),
    "users_hamming_recall": ("10 in 100 (%)", 0.01, 1),
    "users_lookup_precision": ("other users, look-up: precision@10 (%)", 0.01, 1),
    "users_lookup_recall": ("10 in 100 (%)", 0.01, 1),
    "largest_change": ("largest change", 1.0, 3),
    "against_torch": ("largest difference from torch", 1.0, 8),
    "slower": ("CPU time / float32 ONNX", 1.0, 2),
    "word_similarity": ("word similarity", 1.0, 4),
    "sst2": ("SST-2 (%)", 0.01, 2),
    "imdb": ("IMDB (%)", 0.01, 2),
}
HIGHER = ("purity", "p@1", "accuracy", "ndcg@10_of_100_sampled")  # the more the better
BESIDE: dict[
    str, tuple[str, Callable[[float, float], float]]
] = {  # of what, and how it stands to that of the row beside
    "gap_points": ("accuracy", lambda own, other: own - other),
    "gap_bleu": ("bleu", lambda own, other: own - other),
    "gap_percent": ("perplexity", lambda own, other: own / other - 1),
    "gap_ndcg": ("ndcg@10", lambda own, other: own / other - 1),
}


@dataclass(frozen=True)
class Figure:
    """A measure of a row: the mean over its seeds, its standard error (None with one seed), and what was published."""

    name: str
    mean: float | None
    error: float | None
    published: float | None
    compared: bool = True

    @property
    def difference(self) -> float | None:
        """Ours less the published one, where the two can be compared."""
        return (
            None
            if not self.compared or self.mean is None or self.published is None
            else self.mean - self.published
        )

    @property
    def text(self) -> str:
        """The mean ± its standard error, as it is printed."""
        unit, digits = MEASURES[self.name][1:]
        if self.mean is None:
            return NONE
        error = "" if self.error is None else f" ± {self.error / unit:.{digits}f}"
        return f"{self.mean / unit:,.{digits}f}{error}"

    @property
    def published_text(self) -> str:
        """The published number, as it is printed."""
        unit, digits = MEASURES[self.name][1:]
        return NONE if self.published is None else f"{self.published / unit:,.{digits}f}"

    @property
    def difference_text(self) -> str:
        """The difference with its sign."""
        unit, digits = MEASURES[self.name][1:]
        return NONE if self.difference is None else f"{self.difference / unit:+,.{digits}f}"


@dataclass(frozen=True)
class Line:
    """A row of the summary: its figures, of how many seeds, and how long a run took."""

    name: str
    label: str
    seeds: int
    figures: tuple[Figure, ...]
    seconds: float | None
    reported: bool


def mean_and_error(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the mean, and its standard error s / sqrt(n) with s² = Σ (x - mean)² / (n - 1); None where there is none.

    >>> mean_and_error([1.0, 3.0])
    (2.0, 1.0)
    >>> mean_and_error([1.0])
    (1.0, None)
    """
    if not values:
        return None, None
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, None
    return mean, math.sqrt(
        math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values)
    )


def summarise(results: Results) -> list[Line]:
    """Return a line for each row of an experiment, in its order."""
    paper = results.experiment
    unknown = [name for name in paper.measures if name not in MEASURES]
    if unknown:
        raise ArgumentError(
            f"{paper.name}: unknown measures {', '.join(unknown)}; known are {', '.join(MEASURES)}"
        )
    lines = []
    for row in paper.rows:
        records = [*results.records.get(row.name, {}).values()]
        figures = [_figure(results, row, name) for name in paper.measures]
        seconds = mean_and_error([record["seconds"] for record in records])[0]
        label = f"{row.label} (replaced)" if row.replaced else row.label
        lines.append(Line(row.name, label, len(records), tuple(figures), seconds, row.reported))
    return lines


def _figure(results: Results, row: Row, name: str) -> Figure:
    published, compared = row.published.get(name), name in results.experiment.compared
    values = values_of(results, row.name, name)
    if name in BESIDE:
        of, against = BESIDE[name]
        other = next((one for one in results.experiment.rows if one.name == row.beside), None)
        theirs = values_of(results, row.beside, of)
        values = {
            seed: against(value, theirs[seed])
            for seed, value in values_of(results, row.name, of).items()
            if seed in theirs
        }
        if other is not None and of in row.published and of in other.published:
            published = against(row.published[of], other.published[of])
    return Figure(name, *mean_and_error([*values.values()]), published, compared)


def values_of(results: Results, row: str, measure: str) -> dict[int, float]:
    """Return a measure of a row by seed, where it has been measured."""
    records = results.records.get(row, {})
    return {
        seed: float(record["measures"][measure])
        for seed, record in records.items()
        if measure in record["measures"]
    }


def heading(lines: Sequence[Line]) -> list[str]:
    """Return the heads of the columns; a measure that nobody published has no columns for it."""
    columns = ["row"]
    for place, name in enumerate(_names(lines)):
        columns.append(MEASURES[name][0])
        columns += [
            title
            for title, shown in zip(("published", "difference"), _beside(lines, place), strict=True)
            if shown
        ]
    return [*columns, "seeds", "seconds"]


def cells(line: Line, lines: Sequence[Line]) -> list[str]:
    """Return the cells of a line, as many as the heading has; a star marks numbers that are reported, not read."""
    found = [line.label]
    for place, figure in enumerate(line.figures):
        found.append(figure.text)
        star = "*" if line.reported and figure.published is not None else ""
        texts = figure.published_text + star, figure.difference_text
        found += [text for text, shown in zip(texts, _beside(lines, place), strict=True) if shown]
    return [*found, str(line.seeds), NONE if line.seconds is None else f"{line.seconds:,.0f}"]


def notes(results: Results) -> list[str]:
    """Return what a reader must know beside the table."""
    paper, missing = results.experiment, results.missing
    found = [paper.about] if paper.about else []
    found += [f"Protocol: {one}" for one in paper.differences]
    if any(row.reported for row in paper.rows):
        found.append("* reported: known from other sources, not read in the paper itself.")
    found.append(
        "Mean ± standard error over seeds; the difference is ours less the published number."
    )
    found += [f"Replaced: {row.label}: {row.replaced}." for row in paper.rows if row.replaced]
    if any(name in BESIDE and name != "gap_ndcg" for name in paper.measures):
        found.append(
            "Against dense: the difference to the plain rows of the same model, seed by seed."
        )
    found += [f"Not run, for want of data: {message}" for message in results.absent.values()]
    if missing:
        found.append(
            f"Not run yet: {_grouped(missing, sum(row.runs and not row.replaced for row in paper.rows))}."
        )
    return found


def as_markdown(results: Results) -> str:
    """Return the summary as a Markdown table with its notes."""
    lines = summarise(results)
    head = heading(lines)
    rows = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    rows += ["| " + " | ".join(cells(line, lines)) + " |" for line in lines]
    return "\n".join([*rows, "", *(f"- {note}" for note in notes(results))])


def _grouped(missing: Sequence[tuple[str, int]], rows: int) -> str:
    """Name rows and seeds, seed by seed.

    >>> _grouped([("a", 1), ("a", 2), ("b", 2)], rows=2)
    'a (seed 1), all rows (seed 2)'
    """
    seeds: dict[tuple[str, ...], list[str]] = {}
    for seed in sorted({seed for _, seed in missing}):
        names = tuple(name for name, at in missing if at == seed)
        seeds.setdefault(names, []).append(str(seed))
    return ", ".join(
        f"{'all rows' if len(names) == rows else ', '.join(names)} (seed{'s' if len(own) > 1 else ''} {', '.join(own)})"
        for names, own in seeds.items()
    )


def _beside(lines: Sequence[Line], place: int) -> tuple[bool, bool]:
    """Return whether a measure has a published number in some line, and whether it is compared with it."""
    published = [line.figures[place] for line in lines if line.figures[place].published is not None]
    return bool(published), any(figure.compared for figure in published)


def _names(lines: Sequence[Line]) -> list[str]:
    return [figure.name for figure in lines[0].figures]
