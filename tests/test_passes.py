"""Passes over ratings, a rating at a time: what a step does, what is learnt, that nothing depends on threads."""

from dataclasses import replace

import numpy as np
import pytest

import featherbed as fb
from featherbed.apps.recommender import stream as passes_file
from featherbed.apps.recommender.stream import StreamedFactorization, StreamSettings
from featherbed.io.records import Ratings, make_ratings, read_movielens
from featherbed.kernels.threads import set_threads

SMALL = make_ratings(300, 200, 12_000, groups=4, dim=4, seed=1)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(passes_file, "BLOCK", 1500)


def ratings_of(users, items, values):
    users, items = np.asarray(users, dtype=np.int64), np.asarray(items, dtype=np.int64)
    return Ratings(users, items, np.asarray(values, dtype=np.float32), range(50), range(50))


@pytest.mark.parametrize("biases", ["none", "column"])
@pytest.mark.parametrize("dim", [1, 5, 16])
def test_a_step_is_the_one_that_is_written(dim, biases):
    settings = StreamSettings(lr=0.2, weight_decay=0.1, falloff=0.5, init=0.7)
    passes = StreamedFactorization(50, 50, dim, mean=3.0, biases=biases, settings=settings)
    left, right = passes.users[7].astype(np.float64), passes.items[3].astype(np.float64)
    one = ratings_of([7], [3], [5.0])
    for seen in range(3):  # each in a pass of its own
        add_left, add_right = left.copy(), right.copy()
        if biases == "column":
            score = 3.0 + left[0] + right[0] + left[1:] @ right[1:]
            add_left[0] = add_right[0] = 1.0
        else:
            score = 3.0 + left @ right
        step = 0.2 / np.sqrt(1 + 0.5 * seen)
        left, right = (
            left - step * ((score - 5) * add_right + 0.1 * left),
            right - step * ((score - 5) * add_left + 0.1 * right),
        )
        assert passes.train_epoch(one) == pytest.approx((score - 5) ** 2, rel=1e-4, abs=1e-6)
    assert passes.users[7] == pytest.approx(left, abs=1e-5)
    assert passes.items[3] == pytest.approx(right, abs=1e-5)
    assert (
        passes.user_counts[7],
        passes.user_counts.sum(),
        passes.item_counts[3],
        passes.epochs,
    ) == (3, 3, 3, 3)
    untouched = StreamedFactorization(50, 50, dim, biases=biases, settings=StreamSettings(init=0.7))
    assert np.array_equal(np.delete(passes.users, 7, axis=0), np.delete(untouched.users, 7, axis=0))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_every_rating_is_seen_once_a_pass(kind):
    data = Ratings(
        SMALL.users.astype(kind),
        SMALL.items.astype(kind),
        SMALL.values,
        SMALL.user_keys,
        SMALL.item_keys,
    )
    passes = StreamedFactorization(300, 200, 8, mean=3.0)
    passes.train_epoch(data)
    passes.train_epoch(data)
    assert np.array_equal(passes.user_counts, 2 * np.bincount(SMALL.users, minlength=300))
    assert np.array_equal(passes.item_counts, 2 * np.bincount(SMALL.items, minlength=200))


@pytest.mark.parametrize("biases", ["none", "column"])
def test_error_is_that_of_the_rows(biases):
    passes = StreamedFactorization(
        300, 200, 6, mean=3.3, biases=biases, settings=StreamSettings(init=0.5)
    )
    left, right = (
        rows.astype(np.float64) for rows in (passes.users[SMALL.users], passes.items[SMALL.items])
    )
    first = left[:, 0] + right[:, 0] if biases == "column" else left[:, 0] * right[:, 0]
    off = 3.3 + first + (left * right)[:, 1:].sum(1) - SMALL.values
    assert passes.error(SMALL) == pytest.approx(float(np.square(off).mean()), rel=1e-5)


def test_passes_learn():
    train, validation, _ = SMALL.split(0)
    passes = StreamedFactorization(300, 200, 8, mean=float(train.values.mean()))
    errors = [passes.train_epoch(train, 1 - number / 12) for number in range(12)]
    assert errors[-1] < 0.5 * errors[0]
    assert passes.error(validation) < 0.6 * float(validation.values.var())


@pytest.mark.usefixtures("small_blocks")
def test_neither_threads_nor_a_second_time_change_the_rows():
    ends = []
    try:
        for threads, seed in ((1, 0), (2, 0), (2, 0), (1, 1)):
            set_threads(threads)
            passes = StreamedFactorization(300, 200, 8, mean=3.0, seed=seed)
            losses = [passes.train_epoch(SMALL) for _ in range(3)]
            ends.append((losses, passes.users, passes.items))
    finally:
        set_threads(None)
    for losses, users, items in ends[1:3]:
        assert losses == ends[0][0]
        assert np.array_equal(users, ends[0][1])
        assert np.array_equal(items, ends[0][2])
    assert not np.array_equal(ends[3][1], ends[0][1])


def test_ratings_may_lie_in_files(tmp_path):
    held = []
    for name, array in (("users", SMALL.users), ("items", SMALL.items), ("values", SMALL.values)):
        kind = np.float32 if name == "values" else np.int32
        array.astype(kind).tofile(tmp_path / name)
        held.append(np.memmap(tmp_path / name, dtype=kind, mode="r"))
    mapped = Ratings(*held, SMALL.user_keys, SMALL.item_keys)
    ends = []
    for data in (SMALL, mapped):
        passes = StreamedFactorization(300, 200, 8, mean=3.0)
        ends.append((passes.train_epoch(data), passes.error(data)))
    assert ends[0] == ends[1]


def test_a_scale_of_zero_teaches_nothing():
    passes = StreamedFactorization(300, 200, 8, mean=3.0)
    before = passes.users.copy()
    passes.train_epoch(SMALL, 0.0)
    assert np.array_equal(before, passes.users)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_users": 0}, "num_users=0"),
        ({"dim": 200}, "dim=200: streamed rows have at most 128"),
        ({"biases": "apart"}, "biases='apart': use none or column"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(fb.ArgumentError, match=message):
        StreamedFactorization(**({"num_users": 5, "num_items": 5, "dim": 4} | settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"lr": -1.0}, "lr=-1.0"), ({"weight_decay": float("nan")}, "weight_decay=nan")],
)
def test_step_sizes_that_cannot_be(settings, message):
    with pytest.raises(fb.ArgumentError, match=message):
        StreamSettings(**settings)


def test_data_that_cannot_be():
    passes = StreamedFactorization(10, 50, 4)
    with pytest.raises(fb.IdError, match="user 10 has no row: ids go from 0 to 9"):
        passes.train_epoch(ratings_of([3, 10], [1, 2], [1.0, 2.0]))
    with pytest.raises(fb.IdError, match="item -1 has no row"):
        passes.error(ratings_of([3], [-1], [1.0]))
    with pytest.raises(fb.ArgumentError, match="no ratings to train on"):
        passes.train_epoch(ratings_of([], [], []))
    with pytest.raises(fb.ArgumentError, match="no ratings to measure"):
        passes.error(ratings_of([], [], []))
    with pytest.raises(fb.ArgumentError, match="are all ratings finite"):
        passes.train_epoch(ratings_of([3], [1], [np.nan]))


def test_movielens_in_fifteen_passes(data):
    train, validation, _ = read_movielens(data / "ml-1m").split(0)
    passes = StreamedFactorization(
        train.num_users, train.num_items, 16, mean=float(train.values.mean())
    )
    for number in range(15):
        passes.train_epoch(train, 1 - number / 15)
    assert passes.error(validation) < 0.735


@pytest.mark.parametrize("biases", ["column", "none"])
def test_the_scale_of_ratings_does_not_matter_where_the_unit_follows_it(biases):
    ratings = make_ratings(300, 200, 12_000, groups=4, dim=4, seed=1)
    wide = replace(ratings, values=ratings.values * 64)
    ends = []
    for part, unit in ((ratings, 1.0), (wide, 64.0)):
        passes = StreamedFactorization(
            300, 200, 8, mean=float(part.values.mean()), biases=biases, unit=unit
        )
        for _ in range(4):
            passes.train_epoch(part)
        before = passes.error(part)
        passes.fold()
        assert passes.error(part) == pytest.approx(before, rel=1e-5)
        ends.append(before / unit**2)
    assert ends[0] == pytest.approx(ends[1], rel=1e-4)
    with pytest.raises(fb.ArgumentError, match="unit=0"):
        StreamedFactorization(3, 3, 2, unit=0)
