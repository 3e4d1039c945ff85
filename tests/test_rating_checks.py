"""Ratings that look like counts are remarked on, those of usual scales are not; equal ones are refused."""

import numpy as np
import pytest

from featherbed.apps.recommender.data import check_ratings, note_counts
from featherbed.errors import DataError
from featherbed.io.records import Ratings

RNG = np.random.default_rng(0)


def ratings(values):
    ids, keys = np.arange(len(values)), [str(i) for i in range(len(values))]
    return Ratings(ids, ids, np.asarray(values, np.float32), keys, keys)


SCALES = {
    "stars": RNG.integers(1, 6, 500),
    "half stars": RNG.integers(1, 11, 500) / 2,
    "out of ten": RNG.integers(1, 11, 500),
    "percent": RNG.integers(0, 101, 500),
    "jokes": RNG.uniform(-10, 10, 500),
    "mostly low percent": np.append(RNG.integers(0, 40, 400), 100),
}
COUNTS = {
    "plays": np.ceil(RNG.pareto(1.0, 500)),
    "clicks": RNG.geometric(0.6, 5000) + (RNG.random(5000) < 0.01) * 50,
}


@pytest.mark.parametrize("name", SCALES)
def test_ratings_of_usual_scales_pass(name):
    assert note_counts(ratings(SCALES[name])) == []
    check_ratings(ratings(SCALES[name]))


@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_remarked_on(name):
    (note,) = note_counts(ratings(COUNTS[name]))
    assert note.startswith("the ratings look like counts (whole numbers from 1 to ")
    assert "popularity" in note


def test_equal_ratings_are_refused_and_one_other_is_enough():
    with pytest.raises(DataError, match=r"every rating is 1, .* need ranking"):
        check_ratings(ratings([1, 1, 1]))
    check_ratings(ratings([1, 1, 2]))
