"""Bregman divergences of labels, the origin of squared error and cross-entropy."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import ArrayLike, NDArray

from featherbed.checks import check_integer
from featherbed.errors import ArgumentError

Array = NDArray[np.float64]
NEAR = 1e-5  # by which probabilities may miss their sum of 1: float32 softmaxes do


class Bregman(ABC):
    """D(x, y) = φ(x) - φ(y) - <∇φ(y), x - y> for a strictly convex φ.

    Each exponential family p has one: p(x | mean y) = exp(-D(x, y)) b(x), so maximizing the
    likelihood is minimizing D (Banerjee et al. 2005; Liang et al. 2021, appendix C, equation 22 and
    theorem 1). Points are vectors along the last axis.

    >>> Gaussian().divergence([1.0, 2.0], [0.0, 0.0])
    array(2.5)
    """

    @abstractmethod
    def points(self, values: ArrayLike) -> Array:  # [..., d]
        """Return points of φ's domain as float64, or raise an error."""

    @abstractmethod
    def generating(self, x: ArrayLike) -> Array:  # [..., d] -> [...]
        """Return φ(x)."""

    @abstractmethod
    def gradient(self, x: ArrayLike) -> Array:  # [..., d] -> [..., d]
        """Return ∇φ(x)."""

    @abstractmethod
    def log_base(self, x: ArrayLike) -> Array:  # [..., d] -> [...]
        """Return log b(x), the part of the likelihood without parameters."""

    @abstractmethod
    def loss(self, x: ArrayLike, y: ArrayLike) -> Array:  # [..., d] -> [...]
        """Return the usual loss: D times a constant, plus a function of the labels x."""

    def pair(self, x: ArrayLike, y: ArrayLike) -> tuple[Array, Array]:
        """Return checked labels and predictions of equal width."""
        labels, predictions = self.points(x), self.points(y)
        if labels.shape[-1] != predictions.shape[-1]:
            raise ArgumentError(
                f"labels {labels.shape} and predictions {predictions.shape} differ in width: their "
                "last axes must agree"
            )
        return labels, predictions

    def divergence(self, x: ArrayLike, y: ArrayLike) -> Array:  # [..., d] -> [...]
        """Return D(x, y) by definition."""
        labels, predictions = self.pair(x, y)
        slope = np.sum(self.gradient(predictions) * (labels - predictions), axis=-1)
        return np.asarray(self.generating(labels) - self.generating(predictions) - slope)

    def log_density(self, x: ArrayLike, mean: ArrayLike) -> Array:  # [..., d] -> [...]
        """Return log p(x | mean) = log b(x) - D(x, mean)."""
        return np.asarray(self.log_base(x) - self.divergence(x, mean))


class Gaussian(Bregman):
    """Labels with Gaussian noise of variance 1: φ(x) = 1/2 ||x||², D = 1/2 ||x - y||².

    b = (2π)^(-d/2). Liang et al. 2021, equations 23 to 27. The mean squared error, also a mean over
    the d columns, is 2/d D.

    >>> Gaussian().divergence([1.0, 2.0], [0.0, 0.0]), Gaussian().loss([1.0, 2.0], [0.0, 0.0])
    (array(2.5), array(2.5))
    >>> Gaussian().divergence([3.0], [0.0]), Gaussian().loss([3.0], [0.0])
    (array(4.5), array(9.))
    """

    def points(self, values: ArrayLike) -> Array:
        """Return finite vectors."""
        return vectors(values)

    def generating(self, x: ArrayLike) -> Array:
        """1/2 ||x||²."""
        return np.asarray(0.5 * np.sum(np.square(self.points(x)), axis=-1))

    def gradient(self, x: ArrayLike) -> Array:
        """Return x."""
        return self.points(x)

    def log_base(self, x: ArrayLike) -> Array:
        """-d/2 log 2π."""
        points = self.points(x)
        return np.full(points.shape[:-1], -0.5 * points.shape[-1] * math.log(2 * math.pi))

    def divergence(self, x: ArrayLike, y: ArrayLike) -> Array:
        """1/2 ||x - y||², also exact for large vectors."""
        labels, predictions = self.pair(x, y)
        return np.asarray(0.5 * np.sum(np.square(labels - predictions), axis=-1))

    def loss(self, x: ArrayLike, y: ArrayLike) -> Array:
        """Return the mean squared error: 2/d D."""
        return np.asarray(2.0 / self.points(x).shape[-1] * self.divergence(x, y))


class Multinomial(Bregman):
    """Counts x of N draws among d classes with expected counts y: D = Σ x log(x/y).

    φ(x) = Σ x log(x/N), and D is N times the Kullback-Leibler divergence of x/N from y/N; b(x) = Π
    x^x / N^N · N! / Π x!. Liang et al. 2021, equations 28 to 31. With ``trials=1``, the default, x
    and y are probabilities: a label x (one-hot or soft) and a prediction y. The cross-entropy is D
    - φ(x), D plus the entropy of the labels; for one-hot labels it equals D.

    >>> labels, predictions = [[0.0, 1.0], [0.5, 0.5]], [[0.5, 0.5], [0.5, 0.5]]
    >>> Multinomial().divergence(labels, predictions).round(4)
    array([0.6931, 0.    ])
    >>> Multinomial().loss(labels, predictions).round(4)
    array([0.6931, 0.6931])
    """

    def __init__(self, trials: int = 1) -> None:
        self.trials: int = check_integer("trials", trials)

    def __repr__(self) -> str:
        return f"Multinomial(trials={self.trials})"

    def points(self, values: ArrayLike) -> Array:
        """Return nonnegative vectors with sum N."""
        points = vectors(values)
        totals = points.sum(axis=-1)
        if (points < 0).any():
            raise ArgumentError(
                f"{float(points.min())!r} among the probabilities (or counts): give numbers of at "
                "least 0"
            )
        wrong = np.abs(totals - self.trials) > NEAR * self.trials
        if wrong.any():
            raise ArgumentError(
                f"probabilities (or counts) that sum to {float(totals[wrong].flat[0]):g}: along "
                "the last axis they must sum to "
                f"{self.trials}; give a softmax, not its logits, and trials=N for counts"
            )
        return points

    def generating(self, x: ArrayLike) -> Array:
        """Σ x log(x/N)."""
        points = self.points(x)
        return np.asarray(np.sum(times_log(points, points / self.trials), axis=-1))

    def gradient(self, x: ArrayLike) -> Array:
        """log(x/N) + 1."""
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(self.points(x) / self.trials) + 1.0)

    def log_base(self, x: ArrayLike) -> Array:
        """Σ x log x - N log N + log N! - Σ log x!."""
        points = self.points(x)
        factorials = np.vectorize(math.lgamma, otypes=[float])(points + 1.0).sum(axis=-1)
        return np.asarray(self.generating(points) + math.lgamma(self.trials + 1.0) - factorials)

    def divergence(self, x: ArrayLike, y: ArrayLike) -> Array:
        """Σ x log(x/y) - x + y (the last two cancel); infinite if y excludes a class of x."""
        labels, predictions = self.pair(x, y)
        with np.errstate(divide="ignore", invalid="ignore"):  # 0/0 is left out by times_log
            ratio = times_log(labels, labels / predictions)
        total: Array = np.sum(ratio - labels + predictions, axis=-1)
        return np.maximum(total, 0.0)  # below 0 by rounding only

    def loss(self, x: ArrayLike, y: ArrayLike) -> Array:
        """Return the cross-entropy, -Σ x log(y/N) = D - φ(x)."""
        labels, predictions = self.pair(x, y)
        return np.asarray(-np.sum(times_log(labels, predictions / self.trials), axis=-1))


def vectors(values: ArrayLike) -> Array:
    """Return finite numbers [..., d] as float64."""
    try:
        points = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise ArgumentError(
            "labels and predictions are arrays of numbers [..., d]; these are none"
        ) from None
    if points.ndim == 0 or not points.shape[-1] or not np.isfinite(points).all():
        raise ArgumentError(
            "labels and predictions are finite vectors [..., d] with d of at least 1; got shape "
            f"{points.shape}"
        )
    return points


def times_log(x: Array, y: Array) -> Array:
    """Return x log y, with 0 log y = 0 for every y.

    >>> times_log(np.array([0.0, 2.0]), np.array([0.0, 1.0]))
    array([0., 0.])
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(x > 0, x * np.log(y), 0.0)
