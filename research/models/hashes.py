"""Codes as hashes: neighbors found by KD codes, against LSH, ITQ and exact search at equal bits.

Chen, Min and Sun 2018, supplement, "Hashing". Two searches know nothing but the codes of all rows,
the query's included: ``hamming`` counts different codes, ``lookup`` adds entries of a table of
products of code vectors, q(i) . r(j) / |r(j)| with rows q, r composed from codes. A third one,
``asymmetric``, compares the query's own vector with composed rows. Rows are in random order, so
that equal distances favor nobody.

Codes are ``fitted`` to vectors that were there before (faiss, or least squares), or ``learned`` by
gradients: those of words reconstruct the vectors; those of films are learned end to end, inside of
the model that predicts who likes what, and have never seen a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import faiss
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

import featherbed as fb
from featherbed.progress import show_progress
from featherbed.tables.spec import parse_spec, table_from_dense
from research.harness.records import Outcome, Run
from research.sources.neighbors import Rows, Vectors, unit

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
Search = Callable[[Ids, int], Ids]  # ids of queries, k -> the ids found, best first
NEAR = 10  # right answers of a query
DEPTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500)  # answers looked at
FEWEST = 30  # users of a part who like a film that is asked for


# ------------------------------------------------------------------------------ three searches


def exact(rows: Floats) -> Search:
    """Search by cosine."""
    index = faiss.IndexFlatIP(rows.shape[1])
    index.add(unit(rows))
    return lambda ids, k: np.asarray(index.search(unit(rows[ids]), k)[1])


def bits_of(rows: Floats, name: str) -> Search:
    """Search by the Hamming distance of the bits of an index of faiss."""
    index = faiss.index_factory(rows.shape[1], name)
    index.train(rows)
    index.add(rows)
    return lambda ids, k: np.asarray(index.search(rows[ids], k)[1])


def by_codes(packed: fb.PackedTable, rows: Floats | None) -> dict[str, Search]:
    """Return the searches of a packed table with codes; ``rows`` are the vectors of queries."""
    found: dict[str, Search] = {
        "hamming": lambda ids, k: packed.near_codes(packed.codes_of(ids), k)[0],
        "lookup": lambda ids, k: packed.search(packed[ids], k, metric="cosine")[0],
    }
    if rows is not None:
        found["asymmetric"] = lambda ids, k: packed.search(rows[ids], k, metric="cosine")[0]
    return found


# ---------------------------------------------------------------------------------- learned codes


def learned_words(
    rows: Floats, settings: Mapping[str, Any], seed: int, run: Run
) -> tuple[Any, list[dict[str, Any]]]:
    """Learn codes whose rows reconstruct the vectors: loss = mean |r(i) - v(i)|²."""
    table, (codes, others) = coded_table(rows.shape[0], rows.shape[1], settings, seed, rows)
    table.scale_initial_rows(float(rows.std()))
    optimizers: list[Any] = [
        torch.optim.SparseAdam(codes, lr=settings["code_lr"]),
        torch.optim.Adam(others, lr=settings["lr"]),
    ]
    right, batch = torch.from_numpy(rows), settings["batch"]
    generator = torch.Generator().manual_seed(seed)
    history: list[dict[str, Any]] = []
    epochs = settings["epochs"]
    with show_progress(run.title, epochs, shown=run.shown) as shown:
        for epoch in range(epochs):
            fall(optimizers, (settings["code_lr"], settings["lr"]), epoch / epochs)
            total = 0.0
            for ids in torch.split(torch.randperm(len(right), generator=generator), batch):
                loss = (table(ids) - right[ids]).square().sum(1).mean()
                step(optimizers, loss + fb.auxiliary_loss(table))
                total += float(loss.detach()) * len(ids)
            history.append({"epoch": epoch + 1, "train": total / len(right)})
            shown.update(advance=1, note=f"error {total / len(right):.3f}")
    return table.eval(), history


def learned_films(
    likes: Any, settings: Mapping[str, Any], seed: int, run: Run
) -> tuple[Any, list[dict[str, Any]]]:
    """Learn the rows of films by who likes them: loss = -Σ over likes ln softmax_i(u . r(i)).

    The table is that of the settings: dense rows, or codes that are learned end to end.
    """
    users, films = likes.shape
    table, (codes, others) = coded_table(films, settings["dim"], settings, seed)
    table.scale_initial_rows(settings["init_std"])
    generator = torch.Generator().manual_seed(seed)
    people = nn.Embedding(users, settings["dim"])
    nn.init.normal_(people.weight, std=settings["init_std"], generator=generator)
    groups: list[dict[str, Any]] = [{"params": [*others, *people.parameters()]}]
    groups += [{"params": codes, "lr": settings["code_lr"]}] if codes else []
    optimizer = torch.optim.Adam(groups, lr=settings["lr"])
    rates = tuple(group["lr"] for group in optimizer.param_groups)
    every, epochs = torch.arange(films), settings["epochs"]
    history: list[dict[str, Any]] = []
    with show_progress(run.title, epochs, shown=run.shown) as shown:
        for epoch in range(epochs):
            fall([optimizer], rates, epoch / epochs)
            total = 0.0
            for ids in torch.split(torch.randperm(users, generator=generator), settings["batch"]):
                liked = torch.from_numpy(likes[ids.numpy()].toarray())
                found = F.dropout(people(ids), settings["dropout"])
                scores = (found @ table(every).mT).log_softmax(1)
                loss = -(scores * liked).sum() / liked.sum()
                step([optimizer], loss + fb.auxiliary_loss(table))
                total += float(loss.detach()) * len(ids)
            history.append({"epoch": epoch + 1, "train": total / users})
            shown.update(advance=1, note=f"loss {total / users:.3f}")
    return table.eval(), history


def coded_table(
    rows: int, dim: int, settings: Mapping[str, Any], seed: int, vectors: Floats | None = None
) -> tuple[Any, Any]:
    """Return a table, and its parameters that choose codes and others; vectors may guide it."""
    method: Any
    method, given = parse_spec(settings["table"])
    if vectors is not None and "guide" in settings:
        given["guide"] = fb.Pretrained(torch.from_numpy(vectors), **settings["guide"])
    table = method(rows, dim, generator=torch.Generator().manual_seed(seed), **given)
    return table, fb.split_codes(table)


def fall(optimizers: list[Any], rates: tuple[float, ...], share: float) -> None:
    """Let learning rates fall to 0 in the last half of the training."""
    groups = [group for one in optimizers for group in one.param_groups]
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate * min(1.0, 2 * (1 - share))


def step(optimizers: list[Any], loss: Tensor) -> None:
    """Take a step of all optimizers."""
    for one in optimizers:
        one.zero_grad()
    torch.autograd.backward(loss)
    for one in optimizers:
        one.step()


# --------------------------------------------------------------------------------- the experiment


def answers(search: Search, queries: Ids, k: int) -> Ids:  # -> [queries, k]
    """Return the k nearest rows of each query but itself."""
    found = search(queries, k + 1)
    others = found != queries[:, None]
    others[others.all(1), -1] = False  # the query was not found: drop the last answer
    kept: Ids = found[others].reshape(len(queries), k)
    return kept


def measured(found: Ids, right: Ids, name: str) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Return precision after 10 answers and recall after 100, and both at all depths."""
    hits = (found[:, :, None] == right[:, None, :]).any(2).cumsum(1)
    depths = [k for k in DEPTHS if k <= found.shape[1]]
    precision = [float((hits[:, k - 1] / k).mean()) for k in depths]
    recall = [float((hits[:, k - 1] / right.shape[1]).mean()) for k in depths]
    at = {depth: place for place, depth in enumerate(depths)}
    measures = {
        f"{name}_precision": precision[at[10]],
        f"{name}_recall": recall[at[min(100, depths[-1])]],
    }
    return measures, {
        "depths": [float(k) for k in depths],
        "precision": precision,
        "recall": recall,
    }


def liked_together(likes: Any, order: Ids) -> tuple[Ids, Ids]:
    """Return films that some users like, and those most similar by the cosine of who likes them."""
    columns = likes[:, order]
    counts = np.asarray(columns.sum(axis=0))
    both = (columns.T @ columns).toarray()
    alike = both / np.sqrt(np.maximum(counts[:, None] * counts[None, :], 1))
    np.fill_diagonal(alike, -1)
    queries = np.flatnonzero(counts >= min(FEWEST, np.median(counts)))
    right = np.argsort(-alike[queries], axis=1, kind="stable")[:, :NEAR]
    return queries, right


def run_hashes(settings: Mapping[str, Any], seed: int, source: Rows, run: Run) -> Outcome:
    """Make the codes of a row of the table, search, and compare with the right answers.

    The right answers are the nearest vectors (``exact``); of films also what other users than
    those of the training like together (``users``).
    """
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    history: list[dict[str, Any]] = []
    right: dict[str, tuple[Ids, Ids]] = {}
    likes: Any = None
    if isinstance(source, Vectors):
        frequent = source.rows[: settings["words"]]
        rows: Floats = frequent[rng.permutation(len(frequent))]
    else:
        order = rng.permutation(source.matrix.shape[1])
        part = source.parts[1 if settings.get("validation") else 2]
        right["users"] = liked_together(part, order)
        likes = source.parts[0][:, order]
        dense, history = learned_films(likes, {**settings, "table": "dense"}, seed, run)
        rows = unit(dense.weight.detach().numpy())
    some = np.sort(rng.permutation(len(rows))[: settings["queries"]])
    right["exact"] = some, answers(exact(rows), some, NEAR)
    how, health = settings["how"], None
    if how == "exact":
        searches: dict[str, Search] = {"lookup": exact(rows)}
    elif how == "bits":
        searches = {"hamming": bits_of(rows, settings["index"])}
    else:
        own: Floats | None = rows
        if how == "fitted":
            draw = torch.Generator().manual_seed(seed)
            table: Any = table_from_dense(settings["table"], torch.from_numpy(rows), generator=draw)
        elif isinstance(source, Vectors):
            table, history = learned_words(rows, settings, seed, run)
        else:
            table, history = learned_films(likes, settings, seed, run)
            own = None  # its films never had vectors
        searches, health = by_codes(table.pack(), own), table.health()
    measures: dict[str, float] = {}
    curves: dict[str, dict[str, list[float]]] = {}
    deepest = min(DEPTHS[-1], len(rows) - 2)
    for kind, (queries, wanted) in right.items():
        for name, search in searches.items():
            title = name if kind == "exact" else f"{kind}_{name}"
            found = answers(search, queries, deepest)
            own_measures, curves[title] = measured(found, wanted, title)
            measures |= own_measures
    if health is not None:
        measures |= {"duplicates": float(health.duplicates), "utilisation": health.utilization}
    return Outcome(measures, history, {"curves": curves})
