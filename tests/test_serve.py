"""A recommender from its folder: the scores of the trained model, the best unseen items, and files nobody should trust."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

import featherbed as fb
from featherbed.apps.recommender import serve as folders
from featherbed.apps.recommender import serve as recommenders
from featherbed.apps.recommender.model import MatrixFactorization
from featherbed.apps.recommender.serve import (
    Recommender,
    ScoredItem,
    check_recommender,
    collect_rated,
    write_recommender,
)
from featherbed.cli.models import format_items, recommend
from featherbed.errors import ArgumentError, FormatError, UnknownKeyError
from featherbed.packed.band import Band, Every
from featherbed.packed.file import read_arrays, write_arrays
from featherbed.packed.keys import Keys
from featherbed.packed.matrix import Matrix
from featherbed.packed.table import PackedTable

USERS, ITEMS, DIM = 40, 90, 6
USER_KEYS, ITEM_KEYS = [f"user{i}" for i in range(USERS)], [f"item{i}" for i in range(ITEMS)]
TITLES = [None if i % 7 == 0 else f"Title {i} é" for i in range(ITEMS)]
PAIRS = np.random.default_rng(0).integers((USERS, ITEMS), size=(700, 2))


def model_of(spec="dense", biases="column", seed=0):
    generator = torch.Generator().manual_seed(seed)
    users, items = (fb.make_table(spec, n, DIM, generator=generator) for n in (USERS, ITEMS))
    model = MatrixFactorization(users, items, mean=3.5, biases=biases)
    if biases == "apart":
        with torch.no_grad():
            model.user_bias.normal_(generator=generator)
            model.item_bias.normal_(generator=generator)
    return model


def store(model, folder, **more):
    tables = [
        fb.save(table, folder / f"{name}.packed", keys=keys)
        for table, name, keys in ((model.users, "u", USER_KEYS), (model.items, "i", ITEM_KEYS))
    ]
    apart = {}
    if model.biases == "apart":
        apart = {
            "user_bias": model.user_bias.detach().numpy(),
            "item_bias": model.item_bias.detach().numpy(),
        }
    settings = {
        "mean": 3.5,
        "biases": model.biases,
        "seen": collect_rated(*PAIRS.T, USERS, ITEMS),
        "titles": TITLES,
        **apart,
        **more,
    }
    write_recommender(folder, *tables, **settings)
    return folder


@pytest.fixture
def place(tmp_path):
    return store(model_of(), tmp_path)


def predicted(model, user):
    model.eval()
    with torch.no_grad():
        return model(torch.full((ITEMS,), user), torch.arange(ITEMS)).numpy()


@pytest.mark.parametrize("biases", ["none", "column", "apart"])
@pytest.mark.parametrize(
    "spec",
    [
        "dense",
        "anchor:anchors=4",
        "quantized:bits=4",
        "product:parts=2,choices=8",
        "hashed:buckets=20",
    ],
)
def test_scores_are_the_models_predictions(spec, biases, tmp_path):
    model = model_of(spec, biases)
    recommender = Recommender.open(store(model, tmp_path))
    for user in (0, 17, USERS - 1):
        wanted = predicted(model, user)
        assert np.allclose(recommender.score(f"user{user}", ITEM_KEYS), wanted, atol=2e-5)
        found = {
            item.key: item.score
            for item in recommender.recommend(f"user{user}", k=ITEMS, include_rated=True)
        }
        assert len(found) == ITEMS
        assert np.allclose([found[key] for key in ITEM_KEYS], wanted, atol=2e-5)


def test_the_best_items_not_rated_in_training(place):
    recommender, model = Recommender.open(place), model_of()
    for user in range(USERS):
        seen = set(PAIRS[PAIRS[:, 0] == user, 1].tolist())
        order = [
            i for i in np.argsort(-predicted(model, user), kind="stable").tolist() if i not in seen
        ]
        found = recommender.recommend(f"user{user}", k=8)
        assert [item.key for item in found] == [f"item{i}" for i in order[:8]]
        assert [item.title for item in found] == [TITLES[i] for i in order[:8]]
        assert [item.score for item in found] == sorted(
            (item.score for item in found), reverse=True
        )
        assert recommender.rated_items(user).tolist() == sorted(seen)
    assert recommender.recommend("user3", k=500) == recommender.recommend(
        "user3", k=ITEMS - len(recommender.rated_items(3))
    )


def test_many_items_go_the_other_way(place, monkeypatch):
    few = [
        Recommender.open(place).recommend("user5", k=9),
        Recommender.open(place).similar("item5", k=9),
    ]
    monkeypatch.setattr(recommenders, "FEW", 10)
    many = [
        Recommender.open(place).recommend("user5", k=9),
        Recommender.open(place).similar("item5", k=9),
    ]
    for one, other in zip(few, many, strict=True):
        assert [item.key for item in one] == [item.key for item in other]
        assert np.allclose([item.score for item in one], [item.score for item in other], atol=1e-5)


@pytest.mark.parametrize("biases", ["none", "column"])
def test_similar_items_by_cosine_without_the_biases(biases, tmp_path):
    model = model_of(biases=biases)
    rows = model.items.weight.detach().numpy()[:, int(biases == "column") :]
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    cosine = unit @ unit[30]
    cosine[30] = -np.inf
    best = np.argsort(-cosine)[:5]
    found = Recommender.open(store(model, tmp_path)).similar("item30", k=5)
    assert [item.key for item in found] == [f"item{i}" for i in best]
    assert np.allclose([item.score for item in found], cosine[best], atol=1e-5)


def test_equal_scores_go_by_id_and_the_padding_row_is_no_item(tmp_path):
    rows = np.ones((5, 2), dtype=np.float32)
    users = PackedTable(
        [Band(1, Every(), values=Matrix.encode(rows[:1], "float32"))], 2, keys=Keys.of(["ann"])
    )
    items = PackedTable(
        [Band(5, Every(), values=Matrix.encode(rows, "float32"))],
        2,
        padding_idx=1,
        keys=Keys.of("abcde"),
    )
    write_recommender(tmp_path, users, items, mean=0.0, biases="none", seen=([0, 1], [3]))
    recommender = Recommender.open(tmp_path)
    assert recommender.recommend("ann", k=9) == [
        ScoredItem("a", 2.0, None),
        ScoredItem("c", 2.0, None),
        ScoredItem("e", 2.0, None),
    ]
    assert [item.key for item in recommender.similar("a", k=9)] == ["c", "d", "e"]
    write_recommender(
        tmp_path, users, items, mean=0.0, biases="none", seen=([0, 5], [0, 1, 2, 3, 4])
    )
    assert Recommender.open(tmp_path).recommend("ann") == []


def test_unknown_keys_are_named_with_what_comes_near(place, monkeypatch):
    recommender = Recommender.open(place)
    for key, hint in (
        ("User7", "is it 'user7'"),
        (" user7 ", "is it 'user7'"),
        ("usr12", "'user12'"),
        ("zzz", "such as 'user0'"),
    ):
        with pytest.raises(UnknownKeyError, match=f"no user has the key {key!r}: .*{hint}"):
            recommender.recommend(key)
    with pytest.raises(UnknownKeyError, match="no item has the key 'usr'"):
        recommender.score("user1", ["item3", "usr"])
    monkeypatch.setattr(recommenders, "CLOSE", 10)
    with pytest.raises(UnknownKeyError, match="there are 40, such as 'user0', 'user1', 'user2'"):
        recommender.recommend("usr12")
    for k in (0, -1, 2.5, True):
        with pytest.raises(ArgumentError, match="of at least 1"):
            recommender.recommend("user1", k=k)
        with pytest.raises(ArgumentError, match="of at least 1"):
            recommender.similar("item1", k=k)


@pytest.mark.parametrize("held", [1 << 23, 50, 1])
def test_what_users_have_seen(held, monkeypatch):
    monkeypatch.setattr(folders, "PAIRS", held)
    offsets, items = collect_rated(
        PAIRS[:, 0].astype(np.int32), PAIRS[:, 1].astype(np.int32), USERS + 2, ITEMS
    )
    assert offsets.dtype == items.dtype == np.uint32 and len(offsets) == USERS + 3
    for user in range(USERS + 2):
        assert items[offsets[user] : offsets[user + 1]].tolist() == sorted(
            set(PAIRS[PAIRS[:, 0] == user, 1].tolist())
        )
    nothing = collect_rated(np.empty(0, np.int64), np.empty(0, np.int64), 2, 3)
    assert nothing[0].tolist() == [0, 0, 0] and len(nothing[1]) == 0


def bad_arguments():
    two = ([0, 1], [0])
    yield {"biases": "both"}, "use one of none, column, apart"
    yield {"mean": float("nan")}, "finite number"
    yield {"seen": two}, r"offsets of shape \(2,\)"
    yield {"seen": (np.zeros(USERS + 1), [4])}, "rise from 0 to the number of pairs, 1"
    yield {"seen": (np.append(np.zeros(USERS), 1), [ITEMS])}, f"ids go from 0 to {ITEMS - 1}"
    yield {"biases": "apart"}, r"user_bias has shape \(0,\)"
    yield {"user_bias": np.zeros(USERS)}, "go with biases='apart'"
    yield {"titles": ["one"]}, f"1 titles were given for {ITEMS} items"
    yield {"about": {"x": {1, 2}}}, "about must be plain JSON"
    yield {"about": {"x": float("inf")}}, "about must be plain JSON"


@pytest.mark.parametrize(("given", "message"), list(bad_arguments()))
def test_a_refused_recommender_leaves_the_old_one(given, message, place):
    before = {path.name: path.read_bytes() for path in place.iterdir()}
    with pytest.raises(ArgumentError, match=message):
        store(model_of(), place, **given)
    after = {path.name: path.read_bytes() for path in place.iterdir()}
    assert after == before


def test_tables_that_do_not_fit_are_refused(tmp_path):
    users, items = fb.DenseTable(2, 4), fb.DenseTable(3, 5)
    common = {"mean": 0.0, "biases": "none", "seen": ([0, 0, 0], [])}
    with pytest.raises(ArgumentError, match="users have width 4, items 5"):
        write_recommender(tmp_path, users.pack(), items.pack(), **common)
    with pytest.raises(ArgumentError, match="the table of users has no keys"):
        write_recommender(tmp_path, users.pack(), users.pack(), **common)
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_ends_early_leaves_no_recommender(place, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folders, "write_arrays", full)
    with pytest.raises(OSError, match="No space"):
        store(model_of(), place)
    with pytest.raises(
        FileNotFoundError, match=r"holds no recommender \(recommender.json is missing\)"
    ):
        Recommender.open(place)


def test_written_again_it_forgets_what_it_had(place):
    (place / "metrics.json").write_text("{}")
    store(model_of(biases="apart"), place)
    assert (place / "biases.safetensors").exists()
    tables = place / "users.safetensors", place / "items.safetensors"
    stamp = tables[0].stat().st_mtime_ns
    write_recommender(
        place, *tables, mean=0.0, biases="none", seen=collect_rated(*PAIRS.T, USERS, ITEMS)
    )
    assert tables[0].stat().st_mtime_ns == stamp, (
        "a file that is there already is not written again"
    )
    assert (
        not (place / "biases.safetensors").exists() and not (place / "titles.safetensors").exists()
    )
    assert (place / "metrics.json").read_text() == "{}"
    assert Recommender.open(place).recommend("user1")[0].title is None


@pytest.mark.parametrize(
    "name",
    [
        "users.safetensors",
        "items.safetensors",
        "seen.safetensors",
        "titles.safetensors",
        "recommender.json",
    ],
)
def test_missing_and_cut_files(name, place):
    whole = (place / name).read_bytes()
    (place / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FormatError):
        Recommender.open(place)
    (place / name).write_bytes(b"")
    with pytest.raises(FormatError):
        Recommender.open(place)
    (place / name).unlink()
    with pytest.raises(FileNotFoundError):
        Recommender.open(place)


@pytest.mark.parametrize(
    "change",
    [
        {"recommender": 2}, {"recommender": True}, {"recommender": "1"}, {"users": 41}, {"users": -1}, {"items": 1.5},
        {"dim": 7}, {"mean": "3"}, {"mean": None}, {"mean": 1e300}, {"mean": True}, {"biases": "both"}, {"biases": "apart"},
        {"biases": []}, {"seen": 3}, {"titles": "yes"}, {"about": []},
    ],
)  # fmt: skip
def test_lies_in_the_json(change, place):
    said = json.loads((place / "recommender.json").read_text())
    (place / "recommender.json").write_text(json.dumps(said | change))
    with pytest.raises((FormatError, FileNotFoundError)) as caught:
        Recommender.open(place)
    assert "\n" not in str(caught.value)
    for name in change:
        (place / "recommender.json").write_text(
            json.dumps({key: value for key, value in said.items() if key != name})
        )
        with pytest.raises(FormatError, match=f"lacks the field '{name}'"):
            Recommender.open(place)


@pytest.mark.parametrize("text", ["[]", "null", "{", "\xff", '{"mean": ' + "[" * 5000, "1" * 6000])
def test_json_that_is_no_object(text, place):
    (place / "recommender.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(FormatError, match=r"recommender\.json"):
        Recommender.open(place)


def test_broken_lists_of_what_was_seen(place):
    path = place / "seen.safetensors"
    good = read_arrays(path, "seen", {"offsets": ("U32",), "items": ("U32",)})
    offsets, items = good["offsets"].copy(), good["items"].copy()
    swapped = offsets.copy()
    swapped[3] = offsets[5]
    write_arrays(path, {"seen": 1}, {"offsets": swapped, "items": items})
    with pytest.raises(FormatError, match="offsets must rise"):
        check_recommender(place)
    swapped[3] = 1 << 31
    write_arrays(path, {"seen": 1}, {"offsets": swapped, "items": items})
    with pytest.raises(FormatError, match="the items of user 3 lie outside"):
        Recommender.open(place).recommend("user3")
    wrong = items.copy()
    wrong[offsets[4]] = ITEMS
    write_arrays(path, {"seen": 1}, {"offsets": offsets, "items": wrong})
    with pytest.raises(FormatError, match=f"user 4 has seen item {ITEMS}, there are {ITEMS}"):
        Recommender.open(place).recommend("user4")
    with pytest.raises(FormatError, match=f"names item {ITEMS}"):
        check_recommender(place)
    for arrays in (
        {"offsets": offsets[:-1], "items": items},
        {"offsets": offsets, "items": items[:-1]},
        {"offsets": offsets},
        {"offsets": offsets, "items": items.astype(np.float32)},
        {"offsets": offsets[None], "items": items},
    ):
        write_arrays(path, {"seen": 1}, arrays)
        with pytest.raises(FormatError, match=r"seen\.safetensors"):
            Recommender.open(place)
    write_arrays(path, {"titles": 1}, {"offsets": offsets, "items": items})
    with pytest.raises(FormatError, match="is not what this featherbed reads as 'seen'"):
        Recommender.open(place)
    write_arrays(path, {"seen": 1}, {"offsets": offsets, "items": items})
    assert (
        repr(check_recommender(place)) == f"Recommender({USERS} users, {ITEMS} items, width {DIM})"
    )


def test_broken_titles_and_tables_of_another(place, tmp_path_factory):
    path = place / "titles.safetensors"
    good = read_arrays(path, "titles", {"text": ("U8",), "ends": ("U32",)})
    text, ends = good["text"].copy(), good["ends"].copy()
    ends[20] += 10_000
    write_arrays(path, {"titles": 1}, {"text": text, "ends": ends})
    with pytest.raises(FormatError, match=r"the title of item 2[01] lies outside"):
        Recommender.open(place).recommend("user0", k=ITEMS, include_rated=True)
    shutil.copy(place / "items.safetensors", place / "users.safetensors")
    with pytest.raises(
        FormatError,
        match=f"users.safetensors holds {ITEMS} x {DIM} with keys, the recommender has {USERS}",
    ):
        Recommender.open(place)


def test_rows_that_are_no_numbers(place):
    rows = np.full((ITEMS, DIM), np.nan, dtype=np.float32)
    packed = PackedTable(
        [Band(ITEMS, Every(), values=Matrix.encode(rows, "float32"))], DIM, keys=Keys.of(ITEM_KEYS)
    )
    packed.save(place / "items.safetensors")
    with pytest.raises(FormatError, match="not a finite number"):
        Recommender.open(place).recommend("user0")


def test_no_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such folder"):
        Recommender.open(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        Recommender.open(tmp_path / "file")


def test_the_command(place, capsys):
    recommend(place, "user2", 3)
    out, err = capsys.readouterr()
    lines = out.splitlines()
    best = Recommender.open(place).recommend("user2", k=3)
    assert lines[0].split() == ["rank", "score", "key", "title"] and len(lines) == 4 and err == ""
    assert lines[1].split(maxsplit=3)[:3] == ["1", f"{best[0].score:.3f}", best[0].key]
    recommend(place, "user2", 200, json=True, all_items=True)
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert [row["rank"] for row in found] == list(range(1, ITEMS + 1)) and set(found[0]) == {
        "rank",
        "key",
        "score",
        "title",
    }
    assert err == f"note: there are only {ITEMS} items in all, 200 were requested\n"
    recommend(place, "user2", 200)
    assert "items this user has not rated, 200 were requested" in capsys.readouterr().err


def test_nothing_acts_on_the_terminal():
    text = format_items([ScoredItem("a\x1b[2J", 1.0, "b\r\n\x07c"), ScoredItem("日本", 0.5, None)])
    assert all(line.isprintable() for line in text.split("\n")) and len(text.split("\n")) == 3


def test_it_needs_neither_torch_nor_numba(place):
    code = (
        "import sys; sys.modules['torch'] = sys.modules['numba'] = None\n"
        "from pathlib import Path; from featherbed.cli.models import recommend\n"
        "recommend(Path(sys.argv[1]), 'user2', 3)\n"
        "print([m for m in ('polars', 'pyarrow', 'plotly', 'scipy') if m in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(place)], capture_output=True, text=True, check=True
    )
    assert len(found.stdout.splitlines()) == 5 and found.stdout.splitlines()[-1] == "[]"


def test_few_items_do_not_wait_for_a_compiler(tmp_path):
    code = (
        "import sys, numpy as np\n"
        "from featherbed.packed.band import Band; from featherbed.packed.band import Every\n"
        "from featherbed.packed.keys import Keys; from featherbed.packed.matrix import Matrix\n"
        "from featherbed.packed.table import PackedTable\n"
        "from featherbed.apps.recommender import Recommender, write_recommender\n"
        "rows = np.random.default_rng(0).normal(size=(5000, 4)).astype(np.float32)\n"
        "band = Band(5000, Every(), values=Matrix.encode(rows, 'int4', scales='column'))\n"
        "table = PackedTable([band], 4, keys=Keys.of(map(str, range(5000))))\n"
        "write_recommender(sys.argv[1], table, table, mean=0.0, biases='none', seen=(np.zeros(5001), []))\n"
        "opened = Recommender.open(sys.argv[1]); opened.recommend('7'); opened.similar('7'); print('numba' in sys.modules)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "False"
