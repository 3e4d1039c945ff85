"""Splits of ratings: exact, disjoint, complete; saved and used again."""

from collections import Counter

import numpy as np
import pytest

from featherbed.apps.recommender.data import (
    keep_known,
    load_split,
    make_split,
    ratings_checksum,
    save_split,
    sort_by_frequency,
)
from featherbed.errors import ArgumentError, DataError, FormatError
from featherbed.io.records import Ratings, is_stored, new_array
from featherbed.io.records import ratings as spool
from featherbed.packed.keys import IntegerKeys, TextKeys

RNG = np.random.default_rng(0)
COUNT = 3000


def some_ratings(stored=False, times=True):
    users = np.sort(RNG.integers(80, size=COUNT)).astype(np.int32)
    columns = [
        RNG.permutation(users),
        (RNG.beta(1, 4, size=COUNT) * 60).astype(np.int32),
        np.arange(COUNT).astype(np.float32),
        RNG.integers(500, size=COUNT),
    ]
    if stored:
        for place, column in enumerate(columns):
            columns[place] = new_array(COUNT, column.dtype, stored=True)
            columns[place][:] = column
    keys = (IntegerKeys(np.arange(80) * 3), TextKeys.of(f"item {n}" for n in range(60)))
    return Ratings(*columns[:3], *keys, columns[3] if times else None)


def lines(ratings):
    return ratings.values.astype(int).tolist()


def parts(split):
    return [lines(part) for part in (split.train, split.validation, split.test)]


@pytest.mark.parametrize("seed", [0, 5])
@pytest.mark.parametrize("stored", [False, True])
def test_random_is_that_of_the_ratings(seed, stored):
    ratings = some_ratings(stored)
    split = make_split(ratings, seed=seed, validation=0.2, test=0.05)
    for part, wanted in zip(
        (split.train, split.validation, split.test), ratings.split(seed, 0.2, 0.05), strict=True
    ):
        for name in ("users", "items", "values", "times"):
            assert np.array_equal(getattr(part, name), getattr(wanted, name))
        assert is_stored(part.users) == stored


@pytest.mark.parametrize("method", ["random", "time", "leave-out"])
def test_parts_are_disjoint_complete_and_in_the_order_of_lines(method):
    split = make_split(some_ratings(), method, leave=2)
    assert sorted(line for part in parts(split) for line in part) == list(range(COUNT))
    assert all(part == sorted(part) for part in parts(split))
    assert (split.method, split.seed) == (method, 0)


def test_by_time():
    ratings = some_ratings()
    split = make_split(ratings, "time", validation=0.1, test=0.2)
    order = np.argsort(ratings.times, kind="stable")
    wanted = np.split(order, [int(COUNT * 0.7), int(COUNT * 0.8)])
    assert parts(split)[1:] == [np.sort(part).tolist() for part in wanted[1:]]
    assert split.train.times.max() <= split.validation.times.min()
    assert split.validation.times.max() <= split.test.times.min()
    with pytest.raises(ArgumentError, match="no times"):
        make_split(some_ratings(times=False), "time")


@pytest.mark.parametrize("leave", [1, 3])
@pytest.mark.parametrize("few", [False, True])
def test_leaving_out_the_last_of_every_user(leave, few, monkeypatch):
    ratings = some_ratings()
    if few:
        monkeypatch.setattr(spool.group_by_user, "__defaults__", (500,))
    split = make_split(ratings, "leave-out", leave=leave)
    wanted = [], []
    for user in range(ratings.num_users):
        places = np.flatnonzero(ratings.users == user)
        places = places[np.argsort(ratings.times[places], kind="stable")].tolist()
        if len(places) > 2 * leave:
            wanted[0].extend(places[-2 * leave : -leave])
            wanted[1].extend(places[-leave:])
    assert parts(split)[1:] == [sorted(part) for part in wanted]


def test_leaving_out_without_times_is_drawn_by_the_seed():
    ratings = some_ratings(times=False)
    found = [parts(make_split(ratings, "leave-out", seed=seed)) for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2]
    users = Counter(ratings.users[found[0][2]].tolist())
    assert set(users.values()) == {1}
    assert len(users) == 80


def test_users_with_too_few_stay_in_training():
    ids = np.array([0, 0, 1, 1, 1])
    ratings = Ratings(
        ids, np.array([0, 1, 0, 1, 2]), np.arange(5, dtype=np.float32), ("u", "v"), tuple("abc")
    )
    split = make_split(ratings, "leave-out")
    assert [len(part) for part in parts(split)] == [3, 1, 1]
    assert {0, 1} <= set(parts(split)[0])
    with pytest.raises(DataError, match="too few for a leave-out split"):
        make_split(ratings, "leave-out", leave=2)


def test_seen_only(tmp_path):
    ratings = some_ratings()
    split = make_split(ratings, "time", validation=0.3, test=0.67)
    kept = keep_known(split)
    users, items = set(split.train.users.tolist()), set(split.train.items.tolist())
    for old, new in ((split.validation, kept.validation), (split.test, kept.test)):
        wanted = [
            line
            for line, u, i in zip(lines(old), old.users, old.items, strict=True)
            if u in users and i in items
        ]
        assert lines(new) == wanted
        assert 0 < len(new) < len(old)
    save_split(kept, tmp_path / "split")
    assert parts(load_split(tmp_path / "split", ratings)) == parts(kept)


@pytest.mark.parametrize("stored", [False, True])
def test_by_frequency(stored):
    split = make_split(some_ratings(stored))
    new = sort_by_frequency(split)
    for side in ("users", "items"):
        ids = getattr(new.train, side)
        totals = np.bincount(ids, minlength=80 if side == "users" else 60)
        assert np.all(np.diff(totals) <= 0)
        for name in ("train", "validation", "test"):
            old_part, new_part = getattr(split, name), getattr(new, name)
            old_keys, new_keys = (
                getattr(part, side[:-1] + "_keys") for part in (old_part, new_part)
            )
            assert [old_keys[at] for at in getattr(old_part, side)] == [
                new_keys[at] for at in getattr(new_part, side)
            ]
            assert sorted(old_keys) == sorted(new_keys)
    assert is_stored(new.train.users) == stored


def test_saved_splits(tmp_path):
    ratings = some_ratings()
    split = make_split(ratings, "leave-out", seed=7, leave=2)
    path = tmp_path / "split.safetensors"
    save_split(split, path)
    assert path.stat().st_size < COUNT / 4 + 600
    again = load_split(path, ratings)
    assert parts(again) == parts(split)
    assert (again.method, again.seed, again.checksum) == (
        split.method,
        7,
        ratings_checksum(ratings),
    )
    other = Ratings(
        ratings.users[::-1].copy(),
        ratings.items,
        ratings.values,
        ratings.user_keys,
        ratings.item_keys,
    )
    renamed = Ratings(
        ratings.users, ratings.items, ratings.values, IntegerKeys(np.arange(80)), ratings.item_keys
    )
    for wrong in (other, renamed, ratings.take(np.arange(COUNT - 1))):
        with pytest.raises(DataError, match="split of other ratings"):
            load_split(path, wrong)
    data = path.read_bytes()
    for broken in (b"", data[:40], data[:-5], data.replace(b"split 1", b"split 9"), b"\xff" * 100):
        path.write_bytes(broken)
        with pytest.raises(FormatError, match="is no split"):
            load_split(path, ratings)
    with pytest.raises(DataError, match="cannot be read"):
        load_split(tmp_path / "nothing", ratings)


def test_settings_that_cannot_work():
    ratings = some_ratings()
    for settings, message in (
        ({"method": "alphabet"}, "use one of"),
        ({"validation": 0.5, "test": 0.5}, "leave ratings"),
        ({"test": -0.1}, "fractions from 0"),
        ({"test": float("nan")}, "fractions from 0"),
        ({"method": "leave-out", "leave": 0}, "at least one"),
    ):
        with pytest.raises(ArgumentError, match=message):
            make_split(ratings, **settings)
    with pytest.raises(DataError, match="too few"):
        make_split(ratings.take(np.arange(3)))
