"""Stochastic shared embeddings in expectation: the exact effect of replacing ids at random.

The loss of a sample with id j becomes Σ_k p(j -> k) loss(E[k], y). Wu et al. 2019; without a V x V
matrix.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from featherbed.checks import check_integer, check_number, is_number
from featherbed.errors import ArgumentError

if TYPE_CHECKING:
    from featherbed.graphs.relation import Relation

Array = NDArray[np.float64]
BLOCK = 65_536  # samples at a time


class Transition:
    """The law of ``fb.SSE`` as the matrix P of p(j -> k), stored as three vectors and neighbor
    lists.

        p(j -> k) = own_j [k = j] + near_j [k ~ j] + every_j,   q_j = p / (rho n_j + N - 1 - n_j)
        own_j = 1 - p - q_j,  near_j = (rho - 1) q_j,  every_j = q_j

    for an id with n_j neighbors among the N ids that are not excluded. Without a graph q = p / (N -
    1): SSE-SE. The arguments are those of ``fb.SSE`` and ``fb.share``. Wu et al. 2019.

    Args:
        rows: number of ids V.
        p: probability of replacement.
        include_self: the old id is among the candidates: q_j = p / (rho n_j + N - n_j), own_j = 1 -
            p.
        mixture: with probability 1/rho any id, else a neighbor or the id itself.

    >>> Transition(3, p=0.4).matrix
    array([[0.6, 0.2, 0.2],
           [0.2, 0.6, 0.2],
           [0.2, 0.2, 0.6]])
    >>> Transition(3, p=0.4).expected([0.0, 3.0, 6.0])
    array([1.8, 3. , 4.2])
    """

    def __init__(
        self,
        rows: int,
        p: float,
        *,
        graph: Relation | None = None,
        rho: float = 1.0,
        exclude: Iterable[int] = (),
        include_self: bool = False,
        mixture: bool = False,
    ) -> None:
        self.rows, self.p = check_integer("rows", rows), share_of_one("p", p)
        if not is_number(rho) or rho <= 0:
            raise ArgumentError(
                f"rho={rho!r}: a neighbor is rho times as likely as another id; give a number "
                "above 0"
            )
        if mixture and (graph is None or rho < 1):
            raise ArgumentError(
                "mixture=True draws a neighbor with probability 1 - 1/rho: give a graph and rho "
                "of at least 1"
            )
        if graph is not None and graph.objects != self.rows:
            raise ArgumentError(
                f"the graph is over {graph.objects} objects, there are {self.rows} ids"
            )
        self.free = np.ones(self.rows)
        self.free[ids_of("exclude", list(exclude), self.rows)] = 0.0
        total, count, self.neighbors = float(self.free.sum()), np.zeros(self.rows), None  # N, n_j
        if graph is not None:
            weighted = graph.matrix.astype(np.float64).multiply(self.free[None, :])
            self.neighbors = weighted.tocsr()
            count = self.neighbors @ self.free
        changes = self.free * self.p if total > 1 else np.zeros(self.rows)
        if mixture:
            self.every, self.near = changes / (rho * total), changes * (1 - 1 / rho) / (count + 1)
            self.own = 1 - changes + self.near
        else:
            others = total if include_self else total - 1
            self.every = changes / np.where(changes > 0, rho * count + others - count, 1.0)
            self.near = (rho - 1) * self.every
            self.own = 1 - changes - (0.0 if include_self else 1.0) * self.every

    def expected(self, values: ArrayLike) -> Array:  # [V, ...] -> [V, ...]
        """Return P values: for every id j, Σ_k p(j -> k) values[k]."""
        given = numbers("values", values)
        if given.ndim == 0 or len(given) != self.rows:
            raise ArgumentError(
                f"values of shape {given.shape} for {self.rows} ids: give one row for each id"
            )
        flat = given.reshape(self.rows, -1)
        found = self.own[:, None] * flat + self.every[:, None] * (self.free @ flat)
        if self.neighbors is not None:
            found += self.near[:, None] * (self.neighbors @ flat)
        return found.reshape(given.shape)

    def average(self, ids: ArrayLike, losses: ArrayLike) -> Array:  # [n], [n, V] -> [n]
        """Return Σ_k p(j_i -> k) losses[i, k], for losses that depend on the id in any way."""
        places, given = ids_of("ids", ids, self.rows), numbers("losses", losses)
        if places.ndim != 1 or given.shape != (len(places), self.rows):
            raise ArgumentError(
                f"ids {places.shape}, losses {given.shape}: give ids [n] and the losses [n, "
                f"{self.rows}] of all"
            )
        kept = self.own[places] * given[np.arange(len(places)), places]
        found: Array = kept + self.every[places] * (given @ self.free)
        if self.neighbors is not None:
            near = np.asarray(self.neighbors[places].multiply(given).sum(axis=1)).ravel()
            found += self.near[places] * near
        return found

    @property
    def matrix(self) -> Array:  # [V, V]
        """P as a dense matrix, for small tables."""
        return self.expected(np.eye(self.rows))


class Factors:
    """Fixed factors of a matrix factorization, and its exact expected squared losses with shared
    ids.

        Σ_k Σ_l p(j -> k) p(i -> l) (y - u_k · v_l)²
          = y² - 2 y ū_j · v̄_i + <Σ_k p(j -> k) u_k u_kᵀ, Σ_l p(i -> l) v_l v_lᵀ>

    with means ū_j and v̄_i. Without a graph only the sums of u, u uᵀ, v and v vᵀ are needed; a
    graph adds sums over neighbor lists. The cost per sample is O(d²), independent of the number of
    users and items. A bias is a column whose partner is 1.

    Args:
        users, items: U [users, d] and V [items, d].
        biases: of users and of items, [users] and [items], added to the score.
        mean: added to the score.

    >>> model = Factors(users=[[1.0], [2.0]], items=[[1.0], [3.0]])
    >>> model.losses([0], [0], [2.0])
    array([1.])
    >>> law = Transition(2, p=0.5)
    >>> model.losses([0], [0], [2.0], law, law)  # (1 + 0 + 1 + 16) / 4
    array([4.5])
    """

    def __init__(
        self,
        users: ArrayLike,
        items: ArrayLike,
        *,
        biases: tuple[ArrayLike, ArrayLike] | None = None,
        mean: float = 0.0,
    ) -> None:
        left, right = numbers("users", users), numbers("items", items)
        matrices = left.ndim == right.ndim == 2 and left.size and right.size
        if not matrices or left.shape[1] != right.shape[1]:
            raise ArgumentError(
                f"users {left.shape} and items {right.shape}: give two matrices of one width, "
                "[rows, d]"
            )
        self.users, self.items, self.mean = left, right, check_number("mean", mean)
        if biases is not None:
            given = [numbers("biases", side) for side in biases]
            shapes = [side.shape for side in given]
            if shapes != [(len(left),), (len(right),)]:
                raise ArgumentError(
                    f"biases of shapes {shapes}: give a pair, one for each user and one for each "
                    "item"
                )
            self.users = np.column_stack([left, given[0], np.ones(len(left))])
            self.items = np.column_stack([right, np.ones(len(right)), given[1]])

    def losses(
        self,
        users: ArrayLike,
        items: ArrayLike,
        ratings: ArrayLike,
        share_users: Transition | None = None,
        share_items: Transition | None = None,
    ) -> Array:  # [n], [n], [n] -> [n]
        """Return the expected squared loss of each sample; a side without a law is not shared."""
        j, i = ids_of("users", users, len(self.users)), ids_of("items", items, len(self.items))
        y = numbers("ratings", ratings) - self.mean
        if not (j.ndim == 1 and j.shape == i.shape == y.shape):
            raise ArgumentError(
                f"users {j.shape}, items {i.shape}, ratings {y.shape}: give one of each for a "
                "sample, [n]"
            )
        of_users, of_items = (
            law or Transition(len(rows), 0.0)
            for law, rows in ((share_users, self.users), (share_items, self.items))
        )
        for name, law, rows in (("users", of_users, self.users), ("items", of_items, self.items)):
            if law.rows != len(rows):
                raise ArgumentError(
                    f"share_{name} is over {law.rows} ids, there are {len(rows)} {name}"
                )
        found = y * (
            y - 2 * dots(of_users.expected(self.users), j, of_items.expected(self.items), i)
        )
        for a in range(self.users.shape[1]):  # row a of u uᵀ, from the diagonal on
            left, right = (e[:, a:] * e[:, a : a + 1] for e in (self.users, self.items))
            left[:, 1:] *= 2  # the matrix is symmetric
            found += dots(of_users.expected(left), j, of_items.expected(right), i)
        return np.maximum(found, 0.0)  # below 0 by rounding only


def label_smoothing(p: float, classes: int, *, include_self: bool = False) -> float:
    """Return the label smoothing eps that equals sharing targets (SSE-SE) in expectation.

        (1 - p) (-log P_y) + p / (V - 1) Σ_{k != y} (-log P_k)
          = (1 - eps) (-log P_y) + eps / V Σ_k (-log P_k)

    with eps = p V / (V - 1). The right-hand side is torch's ``cross_entropy(label_smoothing=eps)``.
    If the old class is among the candidates, eps is p itself. Beyond p = (V - 1) / V, where targets
    are uniform, eps is above 1 and torch has no such smoothing.

    >>> label_smoothing(0.25, classes=5), label_smoothing(0.25, classes=5, include_self=True)
    (0.3125, 0.25)
    """
    p, classes = share_of_one("p", p), check_integer("classes", classes, 2)
    return p if include_self else p * classes / (classes - 1)


def target_losses(
    logits: ArrayLike, targets: ArrayLike, share: Transition
) -> Array:  # [n, V], [n] -> [n]
    """Return expected cross-entropies over shared targets: Σ_k p(y -> k) (-log softmax(logits)_k).

    >>> target_losses([[0.0, 0.0]], [1], Transition(2, p=0.3)).round(4)
    array([0.6931])
    """
    given = numbers("logits", logits)
    if given.ndim != 2 or given.shape[1] != share.rows:
        raise ArgumentError(
            f"logits of shape {given.shape}: give one row a sample of the {share.rows} classes, "
            "[n, V]"
        )
    shifted = given - given.max(axis=1, keepdims=True)
    return share.average(targets, np.log(np.exp(shifted).sum(axis=1, keepdims=True)) - shifted)


def rademacher_draws(
    losses: ArrayLike, draws: int, *, generator: np.random.Generator
) -> Array:  # [n, ...] -> [draws, ...]
    """Draw signs σ in {-1, +1}ⁿ; return |Σ_i σ_i losses[i]| / n per draw (Wu et al. 2019, figure
    5).

    For one Θ, without a supremum. Columns of losses use the same signs. The mean is about sqrt(2/π)
    ||losses|| / n.

    >>> found = rademacher_draws(np.ones(10_000), 1000, generator=np.random.default_rng(0))
    >>> found.shape, round(float(found.mean() * 100), 1)  # sqrt(2/π) = 0.8
    ((1000,), 0.8)
    """
    given, draws = numbers("losses", losses), check_integer("draws", draws)
    if given.ndim == 0 or not given.size:
        raise ArgumentError(
            f"losses of shape {given.shape}: give at least one, a row for each sample"
        )
    flat = given.reshape(len(given), -1)
    found = np.zeros((draws, flat.shape[1]))
    for start in range(0, len(flat), BLOCK):
        part = flat[start : start + BLOCK]
        for first in range(0, draws, 64):
            some = min(64, draws - first)
            drawn = np.frombuffer(generator.bytes(some * -(-len(part) // 8)), np.uint8)
            bits = np.unpackbits(drawn.reshape(some, -1), axis=1)
            found[first : first + some] += (2.0 * bits[:, : len(part)] - 1.0) @ part
    return np.abs(found).reshape(draws, *given.shape[1:]) / len(given)


def bias_term(
    shared: ArrayLike,
    plain: ArrayLike,
    *,
    weights: ArrayLike | None = None,
    samples: int | None = None,
) -> float:
    """Return B(Θ) = |E Σ_i Σ_k p(j_i -> k) (loss(E[k], y_i) - loss(E[j_i], y_i))| for one Θ.

    Theorem 2 of Wu et al. 2019, where B is the maximum over all Θ. The expectation is over the
    given cases, uniform or by ``weights``; n ``samples`` are drawn from them, by default the number
    of cases.

    Args:
        shared, plain: the losses of the cases with and without sharing (``Factors.losses``,
            ``Transition.average``).

    >>> bias_term(shared=[2.0, 5.0], plain=[1.0, 1.0])
    5.0
    >>> bias_term(shared=[2.0, 5.0], plain=[1.0, 1.0], weights=[0.75, 0.25], samples=100)
    175.0
    """
    first, second = numbers("shared", shared), numbers("plain", plain)
    if first.ndim != 1 or not len(first) or first.shape != second.shape:
        raise ArgumentError(
            f"shared {first.shape} and plain {second.shape}: give the losses of the same cases, [m]"
        )
    count = len(first) if samples is None else check_integer("samples", samples)
    share = np.full(len(first), 1 / len(first)) if weights is None else numbers("weights", weights)
    proper = share.shape == first.shape and not (share < 0).any()
    if not proper or not math.isclose(share.sum(), 1.0, abs_tol=1e-6):
        raise ArgumentError(
            "weights are the cases' probabilities: give one of at least 0 for each, with a sum of 1"
        )
    return float(count * abs(share @ (first - second)))


def excess_risk_bound(
    bias: float,
    complexity_loss: float,
    complexity_noise: float,
    *,
    u: float,
    samples: int,
    width: float,
) -> tuple[float, float]:
    """Theorem 2 of Wu et al. 2019: a bound on the excess risk, and the probability of exceeding it.

        P{ R(Θ̂) - R(Θ*) > 2 B + 4 (ρ_L + ρ_e) + sqrt(n) u }  <=  exp(-u² / (2 w²))

    Risks, B and ρ are sums over n samples; Θ̂ minimizes the empirical SSE risk, Θ* the risk. By
    McDiarmid's inequality: one sample changes the difference of two SSE risks by at most 2 w.

    Args:
        bias: B, the largest ``bias_term`` over all Θ.
        complexity_loss: ρ_L, E sup |Σ_i σ_i Σ_k p(j_i -> k) L(E[k])| with L the mean of the loss
            over labels.
        complexity_noise: ρ_e, the same with loss - L.
        u: a number of at least 0: larger values are safer and looser.
        width: w, the range of the loss: b for losses in [0, b], 2 b for losses in [-b, b].

    >>> excess_risk_bound(1.0, 2.0, 3.0, u=2.0, samples=100, width=1.0)
    (42.0, 0.1353352832366127)
    """
    given = {"bias": bias, "complexity_loss": complexity_loss, "u": u}
    for name, value in {**given, "complexity_noise": complexity_noise}.items():
        check_number(name, value, minimum=0)
    check_number("width", width, above=0)
    root = math.sqrt(check_integer("samples", samples))
    excess = 2 * bias + 4 * (complexity_loss + complexity_noise) + root * u
    return excess, math.exp(-((u / width) ** 2) / 2)


def dots(
    left: Array, rows: NDArray[np.int64], right: Array, columns: NDArray[np.int64]
) -> Array:  # -> [n]
    """Return left[rows] · right[columns] row by row."""
    found = np.empty(len(rows))
    for part in (slice(start, start + BLOCK) for start in range(0, len(rows), BLOCK)):
        np.einsum("nd,nd->n", left[rows[part]], right[columns[part]], out=found[part])
    return found


def share_of_one(name: str, value: float) -> float:
    """Return a probability, or raise an error."""
    if not is_number(value) or not 0 <= value <= 1:
        raise ArgumentError(f"{name}={value!r}: a probability is a number from 0 to 1")
    return float(value)


def numbers(name: str, values: ArrayLike) -> Array:
    """Return finite numbers as float64, or raise an error."""
    try:
        found = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise ArgumentError(
            f"{name} are no array of numbers: give a list or array, rows of one length"
        ) from None
    if not np.isfinite(found).all():
        raise ArgumentError(f"{name} hold NaN or infinity: give finite numbers")
    return found


def ids_of(name: str, ids: ArrayLike, rows: int) -> NDArray[np.int64]:
    """Return integer ids in 0..rows - 1, or raise an error."""
    try:
        found = np.asarray(ids)
    except ValueError:
        raise ArgumentError(
            f"{name} are lists of different lengths: give one list of ids"
        ) from None
    if found.size and found.dtype.kind not in "iu":
        raise ArgumentError(
            f"{name} of type {found.dtype}: give whole numbers, ids from 0 to {rows - 1}"
        )
    if found.size and (found.min() < 0 or found.max() >= rows):
        raise ArgumentError(
            f"{name} from {found.min()} to {found.max()}: ids go from 0 to {rows - 1}"
        )
    return found.astype(np.int64)
