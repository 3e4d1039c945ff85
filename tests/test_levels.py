"""Bits by popularity and levels fitted to ratings: bits against every other choice, levels against rounding, bytes kept to."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

import featherbed as fb
from featherbed.apps.recommender.data import make_split, sort_by_frequency
from featherbed.apps.recommender.graded import (
    allocate_sides,
    fit_graded,
    fit_levels,
    fit_posterior,
    grade_moments,
    grade_sizes,
    round_posterior,
    squared_error,
)
from featherbed.codecs.graded import LEFT
from featherbed.errors import ArgumentError
from featherbed.io.records import Ratings, make_ratings, read_movielens
from featherbed.kernels.threads import set_threads
from featherbed.packed.inspect import file_size

SPLIT = sort_by_frequency(make_split(make_ratings(600, 300, 40_000, groups=6, dim=4, seed=1)))
POSTERIOR = fit_posterior(SPLIT.train, 6, validation=SPLIT.validation)
COUNTS = (
    np.bincount(SPLIT.train.users, minlength=600),
    np.bincount(SPLIT.train.items, minlength=300),
)


def rows_of(packed):
    return packed[np.arange(packed.rows)]


def added_error(spreads, bits):
    kept = [(spread * (1 - LEFT[side])).sum(0) for spread, side in zip(spreads, bits, strict=True)]
    whole = [spread.sum(0) for spread in spreads]
    return sum(whole[s][0] - kept[s][0] for s in (0, 1)) + np.sum(
        (whole[0] * whole[1] - kept[0] * kept[1])[1:]
    )


def test_grades_cut_rows_by_popularity():
    counts = np.sort(np.random.default_rng(0).zipf(1.5, 1000))[::-1]
    for grades in (1, 2, 5, 16):
        rows = grade_sizes(counts, grades)
        assert sum(rows) == 1000
        assert 1 <= len(rows) <= grades
        assert min(rows) >= 1
    assert rows[0] < rows[-1]
    assert grade_sizes(np.zeros(3, int), 16) == [1, 1, 1]
    parts = grade_moments(POSTERIOR.users, COUNTS[0], grade_sizes(COUNTS[0], 4))
    np.testing.assert_allclose(parts.sum(0), COUNTS[0] @ POSTERIOR.users**2 / COUNTS[0].sum())


@pytest.mark.parametrize("budget", [24, 40, 64])
def test_bits_are_nearly_the_best_there_are(budget):
    spreads, rows = (np.array([[0.5, 0.4], [0.3, 0.05]]), np.array([[0.8, 0.6]])), ([4, 8], [6])
    bits, error = allocate_sides(spreads, rows, budget, scale_bits=0)
    assert error == pytest.approx(added_error(spreads, bits))
    lengths = np.array([4, 4, 8, 8, 6, 6])
    best = np.inf
    for chosen in product(range(6), repeat=6):
        widths = np.array(chosen)
        if widths @ lengths <= budget:
            best = min(
                best, added_error(spreads, (widths[:4].reshape(2, 2), widths[4:].reshape(1, 2)))
            )
    assert error <= best * 1.25
    assert sum(side.astype(int).sum(1) @ n for side, n in zip(bits, rows, strict=True)) <= budget


def test_bits_that_save_nothing_are_not_spent():
    spreads = np.array([[1.0, 0.5, 0.0]]), np.array([[1.0, 0.5, 1e-9]])
    bits, _ = allocate_sides(spreads, ([5], [5]), 10**6, min_gain=1e-6)
    assert [side[0, 2] for side in bits] == [0, 0]
    assert bits[0][0, 0] == 8
    bits, error = allocate_sides(spreads, ([5], [5]), 0)
    assert not bits[0].any()
    assert error == pytest.approx(2.25)


def test_levels_are_what_the_file_gives_back():
    users, items, expected = round_posterior(POSTERIOR, COUNTS, 2500)
    for side, matrix in ((users, POSTERIOR.users), (items, POSTERIOR.items)):
        np.testing.assert_allclose(rows_of(side.pack()), side.dense(), atol=1e-6)
        assert np.mean((side.dense() - matrix) ** 2) < np.mean(matrix**2)
    assert 0 < expected < 1


def test_levels_end_where_no_single_move_helps():
    """With sure rows on the other side the fit is plain least squares: checked on every neighbor of every level."""
    sure = replace(
        POSTERIOR,
        user_covariances=POSTERIOR.user_covariances * 0,
        item_covariances=POSTERIOR.item_covariances * 0,
    )
    users, items, _ = round_posterior(sure, COUNTS, 2500)
    fitted, _, _ = fit_levels(
        SPLIT.train, sure, users, replace(items, levels=items.levels.copy()), sweeps=1
    )
    moved = replace(fitted, scales=users.scales)  # the scales the levels were chosen by
    other, matrix = items.dense(), moved.dense()
    for user in (0, 7, 300, 599):
        here = SPLIT.train.users == user
        features, target = (
            other[SPLIT.train.items[here]].copy(),
            SPLIT.train.values[here] - sure.mean,
        )
        target, features[:, 0] = target - features[:, 0], 1.0

        def cost(row, features=features, target=target):
            return np.sum((target - features @ row) ** 2) + np.sum(
                sure.noise / sure.user_prior * row**2
            )

        grade = moved.grades[user]
        for k in np.flatnonzero(moved.bits[grade]):
            for step in (-1, 1):
                if 0 <= int(moved.levels[user, k]) + step < 1 << int(moved.bits[grade, k]):
                    tried = matrix[user].copy()
                    tried[k] += step * moved.scales[grade, k]
                    assert cost(tried) >= cost(matrix[user]) - 1e-9


def test_fitting_beats_rounding_and_keeps_the_best():
    users, items, _ = round_posterior(POSTERIOR, COUNTS, 2200)
    *fitted, errors = fit_levels(SPLIT.train, POSTERIOR, users, items, validation=SPLIT.validation)
    assert min(errors) < errors[0]
    rows = [side.dense() for side in fitted]
    assert squared_error(POSTERIOR.mean, *rows, SPLIT.validation) == pytest.approx(min(errors))
    *_, without = fit_levels(SPLIT.train, POSTERIOR, users, items, sweeps=2)
    assert without[2] < without[0], "without validation the training error is told"


def test_threads_make_no_difference():
    users, items, _ = round_posterior(POSTERIOR, COUNTS, 2200)
    found = []
    for threads in (1, 3):
        try:
            set_threads(threads)
            found.append(fit_levels(SPLIT.train, POSTERIOR, users, items, sweeps=2))
        finally:
            set_threads(None)
    np.testing.assert_array_equal(found[0][0].levels, found[1][0].levels)
    np.testing.assert_array_equal(found[0][1].scales, found[1][1].scales)


@pytest.mark.parametrize("budget", [950, 1100, 1777, 3000, 10**6])
def test_the_budget_holds_to_the_byte(tmp_path, budget):
    users, items, mean, notes = fit_graded(SPLIT.train, SPLIT.validation, dim=6, budget=budget)
    size = 0
    for name, packed in (("users", users), ("items", items)):
        fb.save(packed, tmp_path / name)
        fb.check(tmp_path / name)
        size += (tmp_path / name).stat().st_size
    assert size == notes["bytes"] == file_size(users) + file_size(items) <= budget
    assert notes["validation"] == pytest.approx(
        squared_error(mean, rows_of(users), rows_of(items), SPLIT.validation), rel=1e-4
    )
    if budget == 10**6:
        assert size < 12_000, "bytes that would be of no use are not taken"
        assert notes["validation"] < 1.01 * notes["dense"]


def test_more_bytes_less_error():
    errors = [
        fit_graded(SPLIT.train, SPLIT.validation, dim=6, budget=budget)[3]["validation"]
        for budget in (1100, 1800, 4000)
    ]
    assert errors[0] > errors[1] > errors[2]


@pytest.mark.parametrize("dim", [1, 2, 16, 64])
def test_few_rows_and_any_width(dim):
    few = sort_by_frequency(make_split(make_ratings(10, 10, 80, groups=2, dim=2)))
    users, items, mean, notes = fit_graded(few.train, few.validation, dim=dim, budget=2000)
    assert (users.rows, users.dim, items.rows) == (10, dim, 10)
    assert notes["bytes"] <= 2000
    assert np.isfinite(rows_of(users)).all()
    assert np.isfinite(mean)


@pytest.mark.parametrize(("factor", "shift"), [(1e-4, 0.0), (1e5, -3e5), (20.0, 0.0)])
def test_any_scale_of_ratings(factor, shift):
    scaled = [
        replace(part, values=(part.values * factor + shift).astype(np.float32))
        for part in (SPLIT.train, SPLIT.validation)
    ]
    notes = fit_graded(*scaled, dim=6, budget=2500)[3]
    assert notes["bytes"] <= 2500
    plain = fit_graded(SPLIT.train, SPLIT.validation, dim=6, budget=2500)[3]
    assert notes["validation"] < 1.2 * plain["validation"] * factor**2


def test_without_validation_and_with_progress():
    seen = []
    nothing = SPLIT.validation.take(np.arange(0))
    *_, notes = fit_graded(
        SPLIT.train, nothing, dim=4, budget=2000, progress=lambda what, error: seen.append(what)
    )
    assert notes["validation"] is notes["dense"] is None
    assert set(seen) == {"rows", "levels"}


def test_refusals():
    with pytest.raises(
        ArgumentError, match=r"budget=300: the headers of the two files alone take \d+ bytes"
    ):
        fit_graded(SPLIT.train, SPLIT.validation, budget=300)
    train = SPLIT.train
    turned = Ratings(599 - train.users, train.items, train.values, train.user_keys, train.item_keys)
    with pytest.raises(ArgumentError, match="by_frequency"):
        fit_graded(turned, SPLIT.validation, budget=3000)


def test_fewer_bytes_than_int4_rows_on_movielens(data):
    ratings = read_movielens(data / "ml-1m")
    split = sort_by_frequency(
        make_split(ratings.take(np.flatnonzero(ratings.users < 1000)), seed=0)
    )
    dense = fit_posterior(split.train, 4, validation=split.validation)
    int4 = [
        fb.QuantizedTable.from_dense(torch.tensor(x), bits=4, scales="column").pack()
        for x in (dense.users, dense.items)
    ]
    size = sum(map(file_size, int4))
    *tables, mean, notes = fit_graded(split.train, split.validation, dim=8, budget=size)
    assert notes["bytes"] <= size
    ours, theirs = (
        squared_error(m, *map(rows_of, pair), split.validation)
        for m, pair in ((mean, tables), (dense.mean, int4))
    )
    assert ours < theirs - 0.005
