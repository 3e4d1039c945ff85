"""Factors of implicit feedback by the ALS of the ``implicit`` package, tuned on held-out events.

Alternating least squares (Hu, Koren and Volinsky 2008) depends on its settings more than on
anything else: on confidence, regularization and width (Rendle et al. 2021, "Revisiting the
performance of iALS on item recommendation benchmarks"). They are searched by the NDCG@10 of full
rankings: one after the other in steps of 4, then of 2. Few events make one held-out part a matter
of luck, so that small data are divided several times.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.apps.recommender.closed import COUNTS, Confidence, Doubles, solve_implicit
from featherbed.apps.recommender.ranking import Interactions, ranking_metrics
from featherbed.errors import DataError
from featherbed.io.records import Ratings
from featherbed.kernels import thread_count

Floats = NDArray[np.float32]
Settings = tuple[Confidence, int]  # and the width
Progress = Callable[[dict[str, Any]], None]
TUNING_ITERATIONS = 10
START = Confidence(alpha=4.0, regularization=10.0)
DEFAULT = Confidence(alpha=1.0, regularization=0.01)  # of the implicit package
STEPS = (4.0, 2.0)  # factors by which alpha and regularization are changed
DIMS = (8, 16, 32, 64, 128)
START_DIM = 64
SHARPNESS = (0.0, 0.2)  # tried with every fit
MORE = (0.05, 0.1, 0.15, 0.3, 0.5, 1.0)  # tried with the best settings
MAX_FITS = 30
MIN_WORK = 5_000_000  # numbers of events times width for more than one thread
FEW, FOLDS = 50_000, 4  # events below which there are more held-out parts, and how many
SCORES = 400_000_000  # maximum number of scores of one measurement of a setting


@dataclass(frozen=True)
class CountedEvents:
    """Pairs of users and items with counts, as a sparse matrix, and as lists of items.

    >>> keys, values = ("u", "v"), np.array([1, 5], np.float32)
    >>> events = CountedEvents.of(Ratings(np.array([0, 1]), np.array([1, 0]), values, keys, keys))
    >>> events.matrix(Confidence(2.0, 1.0)).toarray().tolist()
    [[0.0, 2.0], [10.0, 0.0]]
    """

    lists: Interactions
    counts: NDArray[np.float32]  # [pairs], in the order of ``lists``

    @classmethod
    def of(cls, *parts: Ratings) -> CountedEvents:
        """Collect the events of one or more parts of the same data."""
        columns = ([getattr(part, name) for part in parts] for name in ("users", "items", "values"))
        users, items, values = map(np.concatenate, columns)
        order = np.lexsort((items, users))
        starts = np.zeros(parts[0].num_users + 1, dtype=np.int64)
        np.cumsum(np.bincount(users, minlength=len(starts) - 1), out=starts[1:])
        items = items[order].astype(np.int64)
        return cls(Interactions(starts, items, parts[0].num_items), values[order])

    def union(self, other: CountedEvents) -> CountedEvents:
        """Return the events of both, which have no pair in common."""
        lists = self.lists.union(other.lists)
        users, items = (
            np.concatenate([getattr(one.lists, name) for one in (self, other)])
            for name in ("users", "items")
        )
        counts = np.concatenate([self.counts, other.counts])
        return CountedEvents(lists, counts[np.lexsort((items, users))])

    @property
    def popularity(self) -> NDArray[np.int64]:  # [items]
        """Number of users of each item."""
        return np.bincount(self.lists.items, minlength=self.lists.num_items)

    @property
    def activity(self) -> NDArray[np.int64]:  # [users]
        """Number of items of each user."""
        return np.diff(self.lists.starts)

    def matrix(self, confidence: Confidence) -> Any:
        """Return the confidence of all pairs as a sparse matrix [users, items]."""
        from scipy.sparse import csr_matrix

        weights = confidence.weights(self.counts).astype(np.float32)
        shape = self.lists.num_users, self.lists.num_items
        return csr_matrix((weights, self.lists.items, self.lists.starts), shape=shape)

    def divide(self, rng: np.random.Generator, share: float) -> tuple[CountedEvents, Interactions]:
        """Hold out a share of the events at random, of users with at least two."""
        users = self.lists.users
        held = (rng.random(len(users)) < share) & (self.activity[users] > 1)
        first = np.zeros(len(users), dtype=bool)
        begins = self.lists.starts[:-1][self.activity > 0]
        first[begins + (rng.random(len(begins)) * self.activity[self.activity > 0]).astype(int)] = (
            True
        )
        held &= ~first  # one event of each user stays
        return self._select(~held), self._select(held).lists

    def without(self, users: NDArray[np.int64]) -> CountedEvents:
        """Return the events of all other users; the others keep their ids."""
        return self._select(~np.isin(self.lists.users, users))

    def _select(self, mask: NDArray[np.bool_]) -> CountedEvents:
        counts = np.bincount(self.lists.users[mask], minlength=self.lists.num_users)
        starts = np.concatenate([[0], np.cumsum(counts)])
        lists = Interactions(starts, self.lists.items[mask], self.lists.num_items)
        return CountedEvents(lists, self.counts[mask])


def fit_als(
    events: CountedEvents, confidence: Confidence, dim: int, *, iterations: int = 15, seed: int = 0
) -> tuple[Floats, Floats]:  # [users, d], [items, d]
    """Fit float32 rows by ALS; columns are rotated to fall in variance, which changes no score."""
    kind = import_module("implicit.cpu.als").AlternatingLeastSquares
    # threads of BLAS and of implicit hinder each other
    with _controller().limit(limits=1, user_api="blas"):
        model = kind(
            factors=dim,
            regularization=confidence.regularization,
            alpha=1.0,  # in the matrix already
            iterations=iterations,
            random_state=seed,
            num_threads=_threads(dim * len(events.lists)),
        )
        try:
            model.fit(events.matrix(confidence), show_progress=False)
        except import_module("implicit.recommender_base").ModelFitError as error:
            raise DataError(f"ALS found no finite factors: {error}") from None
    users, items = model.user_factors.astype(np.float64), model.item_factors.astype(np.float64)
    if not (np.isfinite(users).all() and np.isfinite(items).all()):
        raise DataError("ALS found no finite factors: are the counts very large?")
    rotation = np.linalg.eigh(users.T @ users + items.T @ items)[1][:, ::-1]
    return (users @ rotation).astype(np.float32), (items @ rotation).astype(np.float32)


@cache
def _controller() -> Any:
    """Return the control of the threads of loaded libraries, which takes long to be made."""
    return import_module("threadpoolctl").ThreadpoolController()


def _threads(work: int) -> int:
    """Return the threads of ALS, which OMP_NUM_THREADS limits; they hinder each other in small
    fits."""
    limit = os.environ.get("OMP_NUM_THREADS", "")
    most = int(limit) if limit.isdigit() and int(limit) else thread_count()
    return 1 if work < MIN_WORK else most


class AlsSearch:
    """Search of confidence, regularization, width and sharpness by held-out NDCG@10.

    Args:
        train: the events to learn from.
        held_out: the events that are ranked.
        seed: random seed of ALS and of more divisions of small data.
        progress: called with the settings and the NDCG@10 of each fit.
        stopped: once it returns true, the best settings so far are kept.
    """

    def __init__(
        self,
        train: CountedEvents,
        held_out: CountedEvents,
        *,
        seed: int = 0,
        progress: Progress | None = None,
        stopped: Callable[[], bool] = bool,
    ) -> None:
        self.seed, self.progress, self.stopped = seed, progress, stopped
        self.folds = [(train, held_out.lists)]
        rng = np.random.default_rng(seed)
        if len(train.lists) < FEW:
            whole = train.union(held_out)
            share = max(0.05, min(0.3, len(held_out.lists) / len(whole.lists)))
            self.folds += [whole.divide(rng, share) for _ in range(FOLDS)]
        self.folds = [(one, held) for one, held in self.folds if len(held)]
        most = max(20, SCORES // (train.lists.num_items * len(SHARPNESS)))
        self.users = [some_users(held, most, rng) for _, held in self.folds]
        self.sharpness: Sequence[float] = SHARPNESS
        self.found: dict[Settings, dict[float, float]] = {}

    def measure(self, confidence: Confidence, dim: int) -> float:
        """Return the mean NDCG@10 over the held-out parts, with the best sharpness."""
        place = (replace(confidence, sharpness=0.0), dim)
        if place not in self.found:
            self.found[place] = self._measure(*place, self.sharpness)
            if self.progress is not None:
                best = max(self.found[place].values())
                note = {"alpha": confidence.alpha, "regularization": confidence.regularization}
                self.progress(note | {"dim": dim, "validation": best})
        return max(self.found[place].values())

    def _measure(
        self, confidence: Confidence, dim: int, sharpness: Sequence[float]
    ) -> dict[float, float]:
        totals = dict.fromkeys(sharpness, 0.0)
        for (events, held), users in zip(self.folds, self.users, strict=True):
            try:
                left, right = fit_als(
                    events, confidence, dim, iterations=TUNING_ITERATIONS, seed=self.seed
                )
            except DataError:  # such as confidences too large for float32
                return dict.fromkeys(sharpness, -1.0)
            gram = right.astype(np.float64).T @ right
            for one in sharpness:
                weights = replace(confidence, sharpness=one).column_weights(gram)
                rows = left[users] * weights.astype(np.float32)
                found = ranking_metrics(rows, right, events.lists, held, users=users)
                totals[one] += found["ndcg@10"] / len(self.folds)
        return totals

    def run(self, fixed: dict[str, Any], dim: int | None) -> Settings:
        """Return the best settings; those in ``fixed``, and ``dim`` if given, stay as they are."""
        events = self.folds[0][0]
        sharpness = fixed.get("sharpness")
        if sharpness is not None:
            self.sharpness, fixed = (sharpness,), fixed | {"sharpness": 0.0}
        fits = [
            one for one in DIMS if 2 * one <= min(events.lists.num_users, events.lists.num_items)
        ]
        width = dim or min(START_DIM, max(fits, default=DIMS[0]))
        kinds = COUNTS if float(np.ptp(events.counts)) > 0 else ("binary",)
        starts = [replace(START, counts=kind) for kind in kinds] + [
            replace(DEFAULT, counts=kinds[0])
        ]
        best = self._best([(replace(one, **fixed), width) for one in starts])
        for step in STEPS:
            best = self._walk(best, step, fixed)
        if dim is None:
            best = self._width(best, fits or [DIMS[0]])
            best = self._walk(best, STEPS[-1], fixed)
        found = self.found[best]
        if sharpness is None and not self.stopped():
            found |= self._measure(*best, MORE)
        return replace(best[0], sharpness=max(found, key=lambda one: found[one])), best[1]

    def popularity(self) -> float:
        """Return the mean NDCG@10 of the order by popularity."""
        total = 0.0
        for (events, held), users in zip(self.folds, self.users, strict=True):
            columns = events.popularity.astype(np.float32)[:, None]
            rows = np.ones((len(users), 1), np.float32)
            total += ranking_metrics(rows, columns, events.lists, held, users=users)["ndcg@10"]
        return total / len(self.folds)

    def plain(self, dim: int) -> Confidence:
        """Return the settings of the highest NDCG@10 without sharpness at a width."""
        at = {
            one: found.get(0.0, max(found.values()))
            for (one, width), found in self.found.items()
            if width == dim
        }
        return max(at, key=lambda one: at[one])

    def _best(self, candidates: Sequence[Settings]) -> Settings:
        if self.stopped():
            known = [one for one in candidates if one in self.found]
            candidates = known or candidates[:1]
        return max(candidates, key=lambda one: self.measure(*one))

    def _walk(self, best: Settings, step: float, fixed: dict[str, Any]) -> Settings:
        """Multiply and divide alpha and regularization by ``step`` while that is better."""
        names = [name for name in ("regularization", "alpha") if name not in fixed]
        moved = True
        while moved and len(self.found) < MAX_FITS:
            moved = False
            for name in names:
                confidence, dim = best
                around = (
                    replace(confidence, **{name: getattr(confidence, name) * factor})
                    for factor in (step, 1 / step)
                )
                other = self._best([best, *((one, dim) for one in around)])
                moved, best = moved or other != best, other
        return best

    def _width(self, best: Settings, fits: list[int]) -> Settings:
        """Halve, then double the width while that is better."""
        for direction in (-1, 1):
            while best[1] in fits:
                place = fits.index(best[1]) + direction
                if not 0 <= place < len(fits):
                    break
                wider = replace(best[0], regularization=best[0].regularization * 2.0**direction)
                found = self._best([best, (best[0], fits[place]), (wider, fits[place])])
                if found == best:
                    break
                best = found
        return best


def some_users(held: Interactions, most: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return the users with held-out events, a sample if there are more than ``most``."""
    users = np.flatnonzero(np.diff(held.starts))
    return users if len(users) <= most else np.sort(rng.choice(users, most, replace=False))


def refit_users(
    events: CountedEvents, items: Doubles, confidence: Confidence, users: Iterable[int]
) -> Doubles:  # [items, d] -> [users, d]
    """Return rows of users in closed form from rows of items, as they are stored."""
    gram = items.T @ items
    rows = []
    for user in users:
        own = slice(events.lists.starts[user], events.lists.starts[user + 1])
        weights = confidence.weights(events.counts[own])
        chosen = items[events.lists.items[own]]
        rows.append(solve_implicit(gram, chosen, weights, confidence.regularization))
    return confidence.finish(np.stack(rows), gram)
