"""The Indian Buffet Process: a prior over binary matrices with an unbounded number of columns.

Customers (the objects of a table) choose dishes (its anchors): z_nk = 1 if customer n has dish k.
In the limit of small label noise (small-variance asymptotics) the prior becomes a cost of weights
and anchors.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
from numpy.typing import ArrayLike, NDArray

from featherbed.checks import check_integer, check_number
from featherbed.errors import ArgumentError
from featherbed.theory.objective import check_lambdas, nbant_objective


def taken_dishes(selection: ArrayLike) -> NDArray[np.bool_]:  # [N, any] -> [N, K]
    """Return Z without empty columns.

    >>> taken_dishes([[1, 0, 0], [1, 0, 1]]).astype(int).tolist()
    [[1, 0], [1, 1]]
    """
    try:
        given = np.asarray(selection)
    except ValueError:
        wrong = "Z is a matrix [objects, anchors]; the rows given differ in length"
        raise ArgumentError(wrong) from None
    if given.ndim != 2 or not len(given):
        raise ArgumentError(
            f"Z has shape {given.shape}: give a matrix [objects, anchors] with at least one object"
        )
    if given.dtype != bool and not np.isin(given, (0, 1)).all():
        raise ArgumentError("Z holds other entries than 0 and 1: for a transform T give T != 0")
    taken = given.astype(bool)
    return np.asarray(taken[:, taken.any(axis=0)])


def left_ordered(selection: ArrayLike) -> NDArray[np.bool_]:  # [N, any] -> [N, K]
    """Return the left-ordered form of Z: columns sorted as binary numbers (first row on top),
    descending.

    Matrices that differ in the order of columns only have the same form; ``log_probability`` is
    that of all of them (Griffiths and Ghahramani 2011, section 2.2).

    >>> left_ordered([[0, 1], [1, 1]]).astype(int).tolist()
    [[1, 0], [1, 1]]
    """
    taken = taken_dishes(selection)
    return np.asarray(taken[:, np.lexsort(~taken[::-1])])


def _check(a: float, b: float, customers: int = 1) -> None:
    check_integer("customers", customers)
    check_number("a", a, above=0)
    check_number("b", b, above=0)


def sample_buffet(
    customers: int, a: float, b: float = 1.0, *, generator: np.random.Generator
) -> NDArray[np.bool_]:  # [N, K]
    """Draw Z from the Indian Buffet Process, with dishes in order of first choice.

    Customer n = 1, 2, ... takes each dish of m_k earlier customers with probability m_k / (b + n -
    1), then Poisson(a b / (b + n - 1)) new ones. b = 1 is the one-parameter process. Ghahramani,
    Griffiths and Sollich 2007; Liang et al. 2021, appendix A.

    Args:
        customers: number of customers N.
        a: expected number of dishes of a customer.
        b: larger values give less overlap and more dishes in total.

    >>> sample_buffet(4, a=2.0, b=1.0, generator=np.random.default_rng(0)).astype(int)
    array([[1, 1, 0, 0, 0, 0, 0],
           [1, 0, 1, 1, 1, 0, 0],
           [0, 0, 1, 0, 1, 1, 0],
           [0, 0, 1, 0, 1, 1, 1]])
    """
    _check(a, b, customers)
    takers = np.zeros(0, dtype=np.int64)  # m_k
    rows: list[NDArray[np.bool_]] = []
    for before in range(customers):
        old = generator.random(len(takers)) < takers / (b + before)
        new = generator.poisson(a * (b / (b + before)))
        rows.append(np.concatenate([old, np.ones(new, dtype=bool)]))
        takers = np.concatenate([takers + old, np.ones(new, dtype=np.int64)])
    matrix = np.zeros((customers, len(takers)), dtype=bool)
    for line, row in zip(matrix, rows, strict=True):
        line[: len(row)] = row
    return matrix


def expected_dishes(customers: int, a: float, b: float = 1.0) -> float:
    """Return E[K] = a Σ_{n=1..N} b / (b + n - 1); K is Poisson with this mean.

    >>> expected_dishes(3, a=2.0)  # 2 (1 + 1/2 + 1/3)
    3.6666666666666665
    """
    _check(a, b, customers)
    return float(a * np.sum(b / (b + np.arange(customers))))


def log_probability(selection: ArrayLike, a: float, b: float = 1.0) -> float:  # [N, K]
    """Return log p(Z) of the Indian Buffet Process, summed over all orders of the columns of Z.

        p(Z) = (ab)^K / Π_h K_h! exp(-ab H) Π_k Γ(m_k) Γ(N - m_k + b) / Γ(N + b)
        H = Σ_{n=1..N} 1 / (b + n - 1)

    Liang et al. 2021, equation 9, and with b = 1 equation 8. m_k customers have dish k; K_h of the
    K columns equal column h.

    >>> round(math.exp(log_probability([[1], [0]], a=1.0)), 4)  # e^-1.5 / 2
    0.1116
    """
    _check(a, b)
    return log_prior(selection, math.log(a), math.log(b))


def log_prior(selection: ArrayLike, log_a: float, log_b: float) -> float:  # [N, K]
    """Return ``log_probability`` for a = exp(log_a), b = exp(log_b), which may exceed the float
    range.

    >>> log_prior([[1, 0], [0, 1]], log_a=-2000.0, log_b=1000.0)
    -4000.0
    """
    taken = taken_dishes(selection)
    customers, dishes = taken.shape
    takers = taken.sum(axis=0)
    with np.errstate(divide="ignore"):  # log 0 = -inf, as logaddexp expects
        logs = np.logaddexp(log_b, np.log(np.arange(customers)[::-1]))  # log(b + N - j), j = 1 .. N
    expected = math.exp(log_a) * float(np.sum(np.exp(log_b - logs)))  # abH
    # Γ(N - m + b) / Γ(N + b) = Π_{j=1..m} 1 / (b + N - j); the Gamma functions themselves overflow,
    # and lose b beside N
    shares = sum(map(math.lgamma, takers.tolist())) - float(np.cumsum(logs)[takers - 1].sum())
    equal = Counter(column.tobytes() for column in taken.T).values()
    same = sum(math.lgamma(count + 1) for count in equal)
    return float(dishes * (log_a + log_b) - same - expected + shares)


def prior_cost(
    selection: ArrayLike, lambda1: float, lambda2: float, beta: float
) -> float:  # [V, K]
    """Return -log p(Z) / beta for a = exp(-beta lambda1), b = exp(beta lambda2), in log space.

    Liang et al. 2021, equations 12 and 15. It differs from ``limit_cost`` by (Σ_h log K_h! - Σ_k
    log Γ(m_k)) / beta and by terms that vanish like exp(-beta lambda2).

    >>> z = [[1, 1], [1, 0], [1, 0]]
    >>> costs = (prior_cost(z, lambda1=0.5, lambda2=0.1, beta=beta) for beta in (10, 100, 1e6))
    >>> [round(cost, 4) for cost in costs]
    [1.2739, 1.1931, 1.2]
    """
    check_lambdas(lambda1, lambda2)
    check_number("beta", beta, above=0)
    return -log_prior(selection, -beta * lambda1, beta * lambda2) / beta


def limit_cost(selection: ArrayLike, lambda1: float, lambda2: float) -> float:  # [V, K]
    """Return the limit of ``prior_cost`` for large beta: lambda2 ||Z||_0 + (lambda1 - lambda2) K.

    Liang et al. 2021, equations 15 to 18. K is the number of anchors in use.

    >>> z = [[1, 1], [1, 0], [1, 0]]  # 4 weights, 2 anchors
    >>> round(limit_cost(z, lambda1=0.5, lambda2=0.1), 4)
    1.2
    """
    taken = taken_dishes(selection)
    return nbant_objective(0.0, int(taken.sum()), taken.shape[1], lambda1, lambda2)
