"""Variational Bayes: against equations written out in full, what turning leaves alone, how well it predicts."""

from dataclasses import replace

import numpy as np
import pytest

from featherbed.apps.recommender.graded import (
    Posterior,
    balance,
    feature_moments,
    fit_posterior,
    group_ratings,
    solve_side,
    squared_error,
)
from featherbed.errors import ArgumentError
from featherbed.io.records import Ratings, make_ratings
from featherbed.kernels.threads import set_threads

PLANTED = make_ratings(300, 200, 12_000, groups=6, dim=4, seed=1)


def some_posterior(users=30, items=20, dim=4, seed=0):
    rng = np.random.default_rng(seed)

    def side(count):
        roots = rng.normal(0, 0.3, (count, dim, dim))
        whole = roots @ roots.transpose(0, 2, 1) + 0.01 * np.eye(dim)
        i, j = np.tril_indices(dim)
        return rng.normal(size=(count, dim)) + 0.5, np.ascontiguousarray(whole[:, i, j])

    (u, cu), (v, cv) = side(users), side(items)
    return Posterior(3.5, u, v, cu, cv, 0.7, np.ones(dim), np.ones(dim))


def whole(triangles, dim):
    i, j = np.tril_indices(dim)
    out = np.zeros((len(triangles), dim, dim))
    out[:, i, j] = out[:, j, i] = triangles
    return out


def test_rows_solve_their_normal_equations():
    known, dim, noise, prior = some_posterior(), 4, 0.6, np.array([0.5, 1.0, 2.0, 0.1])
    rng = np.random.default_rng(3)
    pairs = rng.permutation(30 * 20)[:150]
    ratings = Ratings(
        pairs // 20, pairs % 20, rng.normal(0, 1, 150).astype(np.float32), range(31), range(20)
    )
    means, covariances, error = solve_side(
        group_ratings(ratings)[0], known.items, known.item_covariances, prior, noise
    )
    sigma, expected = whole(known.item_covariances, dim), 0.0
    for user in range(31):
        here = np.flatnonzero(ratings.users == user)
        system, right, rest = np.zeros((dim, dim)), np.zeros(dim), 0.0
        for at in here:
            y, cov, r = (
                known.items[ratings.items[at]],
                sigma[ratings.items[at]].copy(),
                float(ratings.values[at]),
            )
            feature = np.array([1.0, *y[1:]])
            uncertain = cov.copy()
            uncertain[0] = uncertain[:, 0] = 0.0
            system += np.outer(feature, feature) + uncertain
            right += feature * (r - y[0]) - np.array([0.0, *cov[1:, 0]])
            rest += (r - y[0]) ** 2 + cov[0, 0]
        inverse = np.linalg.inv(system / noise + np.diag(1 / prior))
        mean = inverse @ right / noise
        np.testing.assert_allclose(means[user], mean, atol=1e-9)
        np.testing.assert_allclose(whole(covariances[user : user + 1], dim)[0], inverse, atol=1e-9)
        expected += rest - 2 * mean @ right + np.sum(system * (np.outer(mean, mean) + inverse))
    assert error == pytest.approx(expected)
    assert not means[30].any(), "a row without ratings has the prior's mean"


def test_moments_are_those_of_draws():
    known, rng = some_posterior(items=1), np.random.default_rng(0)
    draws = rng.multivariate_normal(known.items[0], whole(known.item_covariances, 4)[0], 400_000)
    features = np.column_stack([np.ones(len(draws)), draws[:, 1:]])
    second, cross = feature_moments(known.items, known.item_covariances)
    i, j = np.tril_indices(4)
    np.testing.assert_allclose(second[0], (features.T @ features / len(draws))[i, j], atol=0.02)
    np.testing.assert_allclose(cross[0, 1:], (features.T @ draws[:, 0] / len(draws))[1:], atol=0.02)
    assert cross[0, 0] == pytest.approx(np.mean(draws[:, 0] ** 2), abs=0.02)


@pytest.mark.parametrize("dim", [1, 2, 4])
def test_balanced_changes_columns_not_predictions(dim):
    known, rng = some_posterior(dim=dim), np.random.default_rng(1)
    weights = rng.uniform(0.5, 3, 30), rng.uniform(0.5, 3, 20)
    turned = balance(known, *weights)
    users, items = (ids.ravel() for ids in np.indices((30, 20)))
    np.testing.assert_allclose(turned.predict(users, items), known.predict(users, items), atol=1e-9)
    sides = (turned.users, turned.user_covariances), (turned.items, turned.item_covariances)
    found = []
    for (rows, covariances), weight in zip(sides, weights, strict=True):
        np.testing.assert_allclose(weight @ rows[:, 1:], 0, atol=1e-9)
        second = (rows.T * weight) @ rows + np.einsum("n,nij->ij", weight, whole(covariances, dim))
        found.append(second[1:, 1:] / weight.sum())
    np.testing.assert_allclose(found[0], found[1], atol=1e-6)
    np.testing.assert_allclose(found[0], np.diag(np.diag(found[0])), atol=1e-6)
    assert (np.diff(np.diag(found[0])) <= 1e-9).all(), "columns come in falling order"


def test_balanced_keeps_columns_nobody_uses():
    known = some_posterior()
    known.users[:, 2] = 0.0
    known.user_covariances[:] = 0.0
    turned = balance(known, np.ones(30), np.ones(20))
    pairs = np.arange(20), np.arange(20)
    np.testing.assert_allclose(turned.predict(*pairs), known.predict(*pairs), atol=1e-6)


def test_it_learns_planted_structure():
    train, validation, test = PLANTED.split(0)
    biases, factors = (
        fit_posterior(train, dim, validation=validation).error(test) for dim in (1, 6)
    )
    assert factors < 0.9 * biases < 0.9 * test.values.var()
    assert factors < 0.4**2 * 1.35, "the planted noise has a deviation of 0.4"


def test_the_kept_round_is_the_best_one():
    train, validation, _ = PLANTED.split(0)
    seen = []
    best = fit_posterior(
        train,
        8,
        iterations=40,
        validation=validation,
        progress=lambda what, error: seen.append((what, error)),
    )
    assert {what for what, _ in seen} == {"rows"}
    assert best.error(validation) == pytest.approx(min(error for _, error in seen))


def test_seeds_and_threads():
    try:
        set_threads(1)
        one, other = (fit_posterior(PLANTED, 4, iterations=3, seed=seed) for seed in (0, 1))
        set_threads(3)
        again = fit_posterior(PLANTED, 4, iterations=3, seed=0)
    finally:
        set_threads(None)
    np.testing.assert_array_equal(one.users, again.users)
    assert not np.allclose(one.users, other.users)


@pytest.mark.parametrize("factor", [1e-3, 1e4])
def test_any_scale_of_ratings(factor):
    scaled = replace(PLANTED, values=(PLANTED.values * factor - 7 * factor).astype(np.float32))
    plain, other = (
        fit_posterior(ratings, 4, iterations=6).error(ratings) for ratings in (PLANTED, scaled)
    )
    assert other == pytest.approx(plain * factor**2, rel=1e-2)


def test_extreme_ratings():
    same = Ratings(
        np.array([0, 1, 1]), np.array([0, 0, 1]), np.full(3, 4, np.float32), range(3), range(2)
    )
    np.testing.assert_allclose(
        fit_posterior(same, 3, iterations=5).predict(np.array([0, 2]), np.array([1, 1])),
        4.0,
        atol=1e-3,
    )
    single = Ratings(np.array([0]), np.array([0]), np.array([2], np.float32), range(1), range(1))
    assert np.isfinite(fit_posterior(single, 2).predict(np.array([0]), np.array([0]))).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dim": 0}, "at least 1"),
        ({"iterations": 0}, "at least 1"),
        ({"train": PLANTED.take(np.arange(0))}, "no ratings to train on"),
        ({"train": replace(PLANTED, values=np.full(len(PLANTED), np.nan, np.float32))}, "NaN"),
        (
            {"train": replace(PLANTED, user_keys=range(3_000_000))},
            "3,000,200 rows of width 16 and .* train plain rows",
        ),
    ],
)
def test_refusals(change, words):
    with pytest.raises(ArgumentError, match=words):
        fit_posterior(**({"train": PLANTED, "dim": 16} | change))
    with pytest.raises(ArgumentError, match="no ratings to measure"):
        squared_error(0.0, np.ones((1, 1)), np.ones((1, 1)), PLANTED.take(np.arange(0)))
