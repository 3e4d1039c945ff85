"""Small-variance asymptotics: the cost of the prior on Z as the label noise goes to zero."""

from __future__ import annotations

from numpy.typing import ArrayLike

from featherbed.checks import check_number
from featherbed.theory.buffet import log_prior, taken_dishes
from featherbed.theory.objective import check_lambdas, nbant_objective


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
