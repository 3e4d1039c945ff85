"""New users and items of stored recommenders in closed form; other rows keep their bits."""

import numpy as np
import pytest

import featherbed as fb
from featherbed.apps.recommender import (
    Recommender,
    train_ranking,
    train_recommender,
    update_recommender,
    write_recommender,
)
from featherbed.files import replace_folder
from featherbed.packed import Band, Every, Identity, Matrix, PackedTable, edit_rows, file_size
from tests.test_train_ranking import FIXED, events, lines_of


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A ranking and a model of ratings, trained on users 0 to 79 and items 0 to 54."""
    folder = tmp_path_factory.mktemp("update")
    known = {(u, i): n for (u, i), n in events().items() if u < 80 and i < 55}
    (folder / "plays.csv").write_text(lines_of(known))
    train_ranking(folder / "plays.csv", folder / "ranking", FIXED, progress=False)
    (folder / "ratings.csv").write_text(lines_of(known, "user,item,rating,time"))
    train_recommender(folder / "ratings.csv", folder / "ratings", {"table.dim": 4}, progress=False)
    return folder


def copy(folders, tmp_path, name):
    import shutil

    shutil.copytree(folders / name, tmp_path / name)
    return tmp_path / name


NEW = "user,item,plays\nu80,i3,2\nu80,i6,1\nu80,new,1\nu81,new,3\nu81,i9,1\nu7,i12,1\nu7,new,1\n"


@pytest.mark.parametrize("name", ["ranking", "ratings"])
def test_users_and_items_are_added_and_all_other_rows_stay(folders, tmp_path, name):
    folder = copy(folders, tmp_path, name)
    before = Recommender.open(folder)
    (tmp_path / "new.csv").write_text(
        NEW.replace("plays", "plays" if name == "ranking" else "rating")
    )
    found = update_recommender(folder, tmp_path / "new.csv")
    assert (found.users_added, found.items_added, found.users_estimated) == (2, 1, 1)
    after = Recommender.open(folder)
    same = np.delete(np.arange(before.about.users), int(before.users.ids_of("u7")))
    np.testing.assert_array_equal(after.users[same], before.users[same])
    np.testing.assert_array_equal(after.items[: before.about.items], before.items[:])
    assert np.any(after.users["u7"] != before.users["u7"])
    assert type(after.users.bands[0].values) is type(before.users.bands[0].values)
    assert after.users.rows == before.users.rows + 2 and "new" in after.items
    listed = {one.key for one in after.recommend("u80", after.about.items)}
    assert not {"i3", "i6", "new"} & listed
    seen = after.rated_items(int(after.users.ids_of("u7")))
    old = before.rated_items(int(before.users.ids_of("u7")))
    assert {*old.tolist(), int(after.items.ids_of("new"))} <= {*seen.tolist()}
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        path.name for path in (folders / name).iterdir()
    )
    again = update_recommender(folder, tmp_path / "new.csv")
    assert (again.users_added, again.items_added, again.users_estimated) == (0, 0, 3)


def test_a_new_user_has_the_row_that_folding_in_gives(folders, tmp_path):
    folder = copy(folders, tmp_path, "ranking")
    before = Recommender.open(folder)
    (tmp_path / "new.csv").write_text("user,item,plays\nzoe,i3,2\nzoe,i6,1\nzoe,i0,4\n")
    update_recommender(folder, tmp_path / "new.csv")
    row = before.fold_in([("i3", 2.0), ("i6", 1.0), ("i0", 4.0)])
    stored = Recommender.open(folder).users["zoe"]
    assert row @ stored / np.linalg.norm(stored) > 0.97


def test_a_new_item_is_near_the_items_of_its_users(folders, tmp_path):
    """An item chosen by users of one group is like the items of this group."""
    folder = copy(folders, tmp_path, "ranking")
    lines = [f"u{user},fresh,1" for user in range(0, 60, 3)]  # users of group 0
    (tmp_path / "new.csv").write_text("\n".join(["user,item,plays", *lines]))
    update_recommender(folder, tmp_path / "new.csv")
    model = Recommender.open(folder)
    near = [one.key for one in model.similar("fresh", 5)]
    assert sum(int(key[1:]) % 3 == 0 for key in near) >= 3, near


def test_old_ratings_count_in_a_new_estimate(folders, tmp_path):
    """Ratings one after the other give the row of all of them together (no rounding here)."""
    rng = np.random.default_rng(0)
    rows, films = rng.normal(size=(50, 3)), rng.normal(size=(30, 3))
    tables = [
        fb.save(fb.DenseTable.from_dense(part), tmp_path / f"{name}.safetensors", keys=keys)
        for name, part, keys in (
            ("u", rows, [f"u{i}" for i in range(50)]),
            ("i", films, [f"i{i}" for i in range(30)]),
        )
    ]
    seen = np.zeros(51, np.int64), np.empty(0, np.int64)
    write_recommender(
        tmp_path / "r", *tables, mean=3.0, biases="column", seen=seen, about={"test_mse": 0.5}
    )
    model = Recommender.open(tmp_path / "r")
    first, second = [("i0", 5.0), ("i4", 1.0)], [("i9", 4.0)]
    ids = np.array([0, 4, 9])
    all_rows = model.items[ids].astype(np.float64)
    whole = model.row_of_ratings(all_rows, np.array([5.0, 1.0, 4.0]))
    row = model.row_of_ratings(all_rows[:2], np.array([5.0, 1.0]))
    later = model.row_of_ratings(all_rows[2:], np.array([4.0]), (row, ids[:2]))
    np.testing.assert_allclose(later, whole, atol=1e-9)
    np.testing.assert_allclose(model.fold_in(first + second), whole, atol=1e-5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("user,item,plays\na,i3,-1\n", "count -1 is below 0"),
        ("user,plays\na,1\n", "no column for item"),
        ("", "empty|no usable"),
        ("user,item,plays\na,i3,0\n", "no events are left"),
    ],
)
def test_refused_files_change_nothing(folders, tmp_path, content, message):
    folder = copy(folders, tmp_path, "ranking")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (tmp_path / "new.csv").write_text(content)
    with pytest.raises(fb.FeatherbedError, match=message):
        update_recommender(folder, tmp_path / "new.csv")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.csv", "ranking"]


def test_a_folder_of_another_kind_is_refused(tmp_path):
    (tmp_path / "new.csv").write_text("user,item\na,b\n")
    (tmp_path / "other").mkdir()
    with pytest.raises(fb.FeatherbedError, match="holds no recommender"):
        update_recommender(tmp_path / "other", tmp_path / "new.csv")


@pytest.mark.parametrize("kind", ["float32", "float16", "int8", "int4"])
@pytest.mark.parametrize("scales", ["row", "column"])
def test_plain_rows_are_replaced_and_added(kind, scales):
    rng = np.random.default_rng(0)
    matrix, new = rng.normal(size=(20, 6)).astype(np.float32), rng.normal(size=(3, 6))
    new = new.astype(np.float32).clip(-1, 1)
    stored = Matrix.encode(matrix, kind, scales)
    for codes, name in ((Every(), "values"), (Identity(), "dictionary")):
        table = PackedTable([Band(20, codes, **{name: stored})], 6)
        edited = edit_rows(table, np.array([4]), new[:1], new[1:])
        rest = np.delete(np.arange(20), 4)
        np.testing.assert_array_equal(edited[rest], table[rest])
        wide = {"float32": 0, "float16": 1e-3, "int8": 0.05, "int4": 0.4}[kind]
        np.testing.assert_allclose(edited[[4, 20, 21]], new, atol=wide + 1e-7)


def test_rows_are_added_to_codes_but_not_replaced(tmp_path):
    import torch

    table = fb.ProductTable.from_dense(torch.randn(60, 8), parts=2, choices=8).pack()
    new = np.random.default_rng(0).normal(size=(2, 8)).astype(np.float32)
    once = edit_rows(table, np.empty(0, int), np.empty((0, 8)), new)
    twice = edit_rows(once, np.array([61]), new[:1], new[:1])
    np.testing.assert_array_equal(twice[:60], table[:])
    np.testing.assert_allclose(twice[60:], new[[0, 0, 0]], atol=0.05)
    assert len(twice.bands) == len(table.bands) + 1 and file_size(twice) > 0
    path = twice.save(tmp_path / "t.safetensors")
    np.testing.assert_array_equal(fb.load(path or tmp_path / "t.safetensors")[:], twice[:])
    with pytest.raises(fb.ArgumentError, match="codes of shared atoms"):
        edit_rows(table, np.array([3]), new[:1], np.empty((0, 8)))


def test_graded_rows_take_more_rows_in_one_grade():
    table = fb.GradedTable(40, 5, bits=3, grades=3).pack()
    rows = np.tanh(np.random.default_rng(0).normal(size=(2, 5))).astype(np.float32)
    once = edit_rows(table, np.array([7]), rows[:1], rows)
    twice = edit_rows(once, np.empty(0, int), np.empty((0, 5)), rows)
    keep = np.delete(np.arange(40), 7)
    np.testing.assert_array_equal(twice[keep], table[keep])
    assert len(twice.bands[0].values.grades) <= len(table.bands[0].values.grades) + 1
    assert len(twice) == 44


def test_a_folder_is_replaced_in_one_step(tmp_path):
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    replace_folder(tmp_path / "new", tmp_path / "old")
    assert (tmp_path / "old" / "file").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_new_users_of_new_items_alone_are_left_out(folders, tmp_path):
    folder = copy(folders, tmp_path, "ranking")
    lines = ["user,item", "ann,tea", "bob,rum", "bob,i3", "u1,ale", "eve,rum"]
    (tmp_path / "new.csv").write_text("\n".join(lines))
    update = update_recommender(folder, tmp_path / "new.csv")
    assert (update.users_added, update.items_added) == (2, 2)  # bob, eve; rum, ale
    assert update.lines[0].startswith("1 events of new users with new items alone") and (
        "'ann'" in update.lines[0]
    )
    (tmp_path / "new.csv").write_text("user,item\nann,tea\n")
    with pytest.raises(fb.DataError, match="give an event of a known user or item"):
        update_recommender(folder, tmp_path / "new.csv")
