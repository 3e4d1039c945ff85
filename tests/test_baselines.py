"""The baseline of biases: shrinkages chosen on validation ratings, blocks, the page."""

import numpy as np
import pytest

from featherbed.apps.recommender import graded as baselines
from featherbed.apps.recommender.data import make_split
from featherbed.apps.recommender.graded import (
    fit_biases,
    fit_validated_biases,
)
from featherbed.apps.recommender.train import describe_recommender, pack_rows
from featherbed.errors import ArgumentError
from featherbed.io.records import Ratings


def biased_ratings(count, noise, users=400, items=300, seed=0):
    """Ratings that are a mean, biases and noise."""
    rng = np.random.default_rng(seed)
    who, what = rng.integers(users, size=count), rng.integers(items, size=count)
    values = 3 + 0.5 * rng.normal(size=users)[who] + 0.2 * rng.normal(size=items)[what]
    values = (values + noise * rng.normal(size=count)).astype(np.float32)
    return Ratings(who, what, values, tuple("u" * users), tuple("i" * items))


def test_planted_biases_are_found(monkeypatch):
    train, validation, test = biased_ratings(30_000, 0.0).split(0)
    fitted = fit_validated_biases(train, validation)
    assert fitted.error(test) < 0.01 * test.values.var()
    monkeypatch.setattr(baselines, "BIAS_BLOCK", 999)
    assert fit_validated_biases(train, validation).error(test) == pytest.approx(fitted.error(test))


def test_noisy_sparse_ratings_take_more_shrinkage_than_the_default():
    train, validation, test = biased_ratings(3000, 1.5).split(0)
    fitted = fit_validated_biases(train, validation)
    fixed = fit_biases(train, (5.0, 5.0), sweeps=3)
    assert max(fitted.shrinkage) > 5
    assert fitted.error(validation) < fixed.error(validation)
    assert fitted.error(test) < 0.99 * fixed.error(test)


def test_the_two_sides_have_shrinkages_of_their_own():
    train, validation, _ = biased_ratings(20_000, 1.5).split(0)
    users, items = fit_validated_biases(train, validation).shrinkage
    assert items > users  # the biases of items vary less


def test_long_files_choose_shrinkages_on_some_users(monkeypatch):
    train, validation, test = biased_ratings(6000, 1.0).split(0)
    whole = fit_validated_biases(train, validation).error(test)
    monkeypatch.setattr(baselines, "SEARCHED", 1000)
    assert fit_validated_biases(train, validation).error(test) == pytest.approx(whole, rel=0.05)


def test_constant_ratings_and_no_validation():
    same = Ratings(
        np.array([0, 1]), np.array([0, 0]), np.array([4, 4], np.float32), ("a", "b"), ("c",)
    )
    fitted = fit_validated_biases(same, same.take(np.zeros(0, np.int64)))
    assert fitted.shrinkage == (5.0, 5.0)
    assert fitted.predict(same.users, same.items).tolist() == [4.0, 4.0]
    with pytest.raises(ArgumentError, match="no ratings"):
        fit_biases(same.take(np.zeros(0, np.int64)), (1.0, 1.0))


def test_the_page_shows_the_validated_baseline():
    split = make_split(biased_ratings(3000, 1.5))
    fitted = fit_validated_biases(split.train, split.validation)
    users, items = (pack_rows(np.zeros((n, 2), np.float32)) for n in (400, 300))
    found = describe_recommender(users, items, split, np.full(len(split.test), fitted.mean))
    assert found["baselines"]["biases"] == pytest.approx(fitted.error(split.test))
    assert found["baselines"]["shrinkage"] == list(fitted.shrinkage)
