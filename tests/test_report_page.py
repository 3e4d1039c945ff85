"""The page of a recommender and the figures behind it: counted right, bounded, and nothing in them can act as markup."""

import copy
import json
import math
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import featherbed as fb
from featherbed.apps.recommender import describe_recommender
from featherbed.errors import ArgumentError, MissingExtra
from featherbed.io.records import ItemTitles, Ratings, make_ratings
from featherbed.packed.band import Band, Every
from featherbed.packed.inspect import row_cost
from featherbed.packed.keys import Keys
from featherbed.packed.matrix import Graded, Matrix
from featherbed.packed.table import PackedTable
from featherbed.report import ratings as insights
from featherbed.report.page import bin_edges, plot
from featherbed.report.ratings import ratings_page

HOSTILE = "<script>alert(1)</script><img src=x onerror='alert(1)'>\"&amp;</style></title>"
RATINGS = make_ratings(120, 80, 3000, groups=4, dim=4, seed=1)
PARTS = RATINGS.split(0)
SPLIT = SimpleNamespace(train=PARTS[0], validation=PARTS[1], test=PARTS[2], how="random", seed=0)
TITLES = [None if i == 3 else f"Film {i}" for i in range(80)]


def anchored(rows, seed=0, anchors=5, **storage):
    table = fb.AnchorTable(rows, 4, anchors=anchors, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        table.transform.mul_(
            torch.rand(rows, anchors, generator=torch.Generator().manual_seed(seed)) < 0.5
        )
    return table, table.pack(**storage)


@pytest.fixture
def found():
    guess = np.random.default_rng(0).uniform(1, 5, len(SPLIT.test)).astype(np.float32)
    return describe_recommender(
        anchored(120)[1],
        anchored(80, 1)[1],
        SPLIT,
        guess,
        ItemTitles(TITLES, [("a", "b") if i % 2 else "b" for i in range(80)]),
    )


@pytest.fixture
def report(found):
    sizes = {
        "file": 40_000,
        "resident": 39_000,
        "training": 300_000,
        "parameters": 9000,
        "float32": 200_000,
        "keys": 5000,
    }
    history = [
        {"epoch": n, "train_mse": 1.5 - n / 10, "validation_mse": 1.4 - n / 20, "nonzeros": 900 - n}
        for n in range(4)
    ]
    return {
        "name": "ratings.csv",
        "rows": {"users": 120, "items": 80},
        "model": {"dim": 4, "users": "anchor:anchors=5", "items": "anchor:anchors=5"},
        "metrics": {"train": {"mse": 0.5}, "validation": {"mse": 0.81}, "test": {"mse": 0.8}},
        "history": history,
        "sizes": {"users": sizes, "items": sizes | {"training": None}},
        "insight": found | {"baselines": {"mean": 1.6, "biases": 1.0}},
        "input": {
            "columns": {"user": "uid"},
            "counts": {"read": 3010, "kept": 3000, "duplicates": 10},
            "notes": ["A note."],
        },
        "split": {"how": "random", "train": 2400, "validation": 300, "test": 300},
        "settings": {"lr": 0.01, "epochs": 4, "lambda1": None},
        "notes": ["Stopped early."],
        "command": "featherbed train ratings ratings.csv --out DIR",
        "seconds": 12.34,
        "version": "0.5.0",
        "interrupted": True,
    }


def read(page):
    """The page without scripts and style."""
    return re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL)


def rows_of(page, title, number=0):
    section = read(page).split(f"<h2>{title}</h2>")[1].split("</table>")[number]
    rows = re.findall(r"<tr>(.*?)</tr>", section)
    return [
        [
            re.sub(r"<small>.*?</small>|<[^>]*>", "", cell)
            for cell in re.findall(r"<t[hd].*?</t[hd]>", row)
        ]
        for row in rows
    ]


def drawn(page, name):
    place = re.search(rf'Plotly\.newPlot\(\s*"{name}",\s*', page)
    data, _ = json.JSONDecoder().raw_decode(page, place.end())
    return data


def test_the_page_says_it_all(report):
    page = ratings_page(report)
    text = read(page)
    assert (
        "120 users and 80 items, rows of width 4: 90.0 KB in total, 410 KB with float32 rows, 4.6 times smaller"
        in text
    )
    assert "4.6 times smaller; test error 0.8000.</p>" in text
    assert "The tables alone take 80.0 KB, as float32 rows 400 KB, 5.0 times smaller." in text
    assert (
        "0.8000: 50.0 % less than the 1.6000 of always predicting the mean, and 20.0 % less than the 1.0000 of biases"
        in text
    )
    assert (
        "keys (the names of users and items) take 10.0 KB." in text
        and "Training was interrupted" in text
        and "Stopped early." in text
    )
    assert rows_of(page, "Quality")[1:3] == [
        ["test ratings", "0.8944", "0.8000"],
        ["validation ratings", "0.9000", "0.8100"],
    ]
    assert rows_of(page, "Size")[1:] == [
        ["users", "40.0 KB", "39.0 KB", "300 KB", "9,000"],
        ["items", "40.0 KB", "39.0 KB", "–", "9,000"],
        ["both", "80.0 KB", "78.0 KB", "–", "18,000"],
        ["float32 rows", "400 KB", "400 KB", "–", "100,000"],
        ["float16 rows", "200 KB", "200 KB", "–", "100,000"],
    ]
    assert rows_of(page, "Data")[1:4] == [
        ["column of users", "uid"],
        ["lines read", "3,010"],
        ["lines kept", "3,000"],
    ]
    assert ["duplicate pairs", "10"] in rows_of(
        page, "Data"
    ) and "<p class=soft>A note.</p>" in text
    assert "<td>0.01</td>" in text and "lambda1" not in text
    assert (
        "featherbed train ratings ratings.csv --out DIR</code>" in text
        and "Made by featherbed 0.5.0 in 12.3 s." in text
    )


def test_the_drawings(report, found):
    page = ratings_page(report)
    train, validation = drawn(page, "errors")
    assert train["x"] == [1, 2, 3, 4] and validation["y"] == pytest.approx([1.4, 1.35, 1.3, 1.25])
    assert drawn(page, "nonzeros")[0]["y"] == [900, 899, 898, 897]
    cloud, mean = drawn(page, "cost0")
    assert cloud["y"] == found["sides"]["users"]["points"]["cost"]
    assert mean["y"] == [one["mean"] for one in found["sides"]["users"]["bins"]]
    assert "Codes per row by popularity" in page


def test_anchors_with_titles(report, found):
    table = rows_of(ratings_page(report), "Anchors")
    shown = found["anchors"]["shown"]
    assert [row[0] for row in table[1:]] == [str(one["anchor"]) for one in shown]
    assert table[1][2] == "; ".join(top["name"] for top in shown[0]["top"])
    assert "of items are of the main group" in read(ratings_page(report))


def test_one_page_that_fetches_nothing(report):
    page = ratings_page(report)
    assert page.count('<div id="errors"') == 1 and page.count("<script>/**") == 1, (
        "plotly is there once"
    )
    assert "default-src 'none'" in page.split("<body>")[0]
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=", page)


def hostile(value):
    if isinstance(value, dict):
        return {key: child if key == "unit" else hostile(child) for key, child in value.items()}
    if isinstance(value, list):
        return [hostile(child) for child in value]
    return HOSTILE if isinstance(value, str) else value


def test_nothing_in_the_report_is_markup(report):
    harmless, hurt = ratings_page(report), hostile(copy.deepcopy(report))
    hurt["settings"] = {HOSTILE: HOSTILE}
    hurt["input"] = {"columns": {HOSTILE: HOSTILE}, "counts": {HOSTILE: 3}, "notes": [HOSTILE]}
    page = ratings_page(hurt)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert (
        "<script>alert" not in page and "<img" not in read(page) and "</style></title>" not in page
    )
    assert page.count("<script") == harmless.count("<script") and page.count(
        "</script"
    ) == harmless.count("</script")


def test_what_is_not_there_is_left_out(report):
    bare = {name: report[name] for name in ("name", "rows", "metrics", "history", "sizes")}
    page = ratings_page(
        bare | {"history": [], "metrics": {"test": {"mse": float("nan")}}, "sizes": {}}
    )
    assert "120 users and 80 items.</p>" in page and len(page) < 10_000, "no plot, no plotly"
    for title in (
        "Quality",
        "<h2>Size",
        "by epoch",
        "popularity",
        "Anchors",
        "Data",
        "Command",
        "settings",
    ):
        assert title not in read(page)
    for missing in ("history", "sizes"):
        with pytest.raises(
            ArgumentError, match=f"a report without {missing}: give the whole report"
        ):
            ratings_page({name: part for name, part in bare.items() if name != missing})
    assert "Size by epoch" not in ratings_page(
        report | {"history": [{"epoch": 0, "train_mse": 1.0}]}
    )


def test_sizes_of_both_together_may_be_given(report):
    sides = {side: {"file": 40_000, "resident": 39_000} for side in ("users", "items")}
    report["sizes"] = sides | {
        "file": 80_000,
        "training": 5_000_000,
        "parameters": 18_000,
        "float32": 400_000,
        "ratio": 5.0,
    }
    page = ratings_page(report)
    assert rows_of(page, "Size")[1:4] == [
        ["users", "40.0 KB", "39.0 KB", "–", "–"],
        ["items", "40.0 KB", "39.0 KB", "–", "–"],
        ["both", "80.0 KB", "78.0 KB", "5.00 MB", "18,000"],
    ]
    assert "80.0 KB in total, 400 KB with float32 rows, 5.0 times smaller" in page


def test_all_files_are_counted_and_warnings_are_shown(report):
    report["sizes"] |= {"whole": 200_000, "float32_whole": 520_000, "seen": 100_000, "titles": 9000}
    report["model"]["factors"] = 0
    report["warnings"] = ["stored no factors: a & b"]
    text = read(ratings_page(report))
    assert "biases only: no factors are stored: 200 KB in total, 520 KB with float32 rows" in text
    assert "rows of width" not in text
    assert "the items rated in training take 100 KB, the titles take 9.00 KB." in text
    assert "<b>Stored no factors: a &amp; b.</b>" in text


def test_worse_than_biases_is_said(report):
    report["insight"]["baselines"] = {"mean": 1.6, "biases": 0.5}
    assert "and 60.0 % more than the 0.5000 of biases" in ratings_page(report)


def test_a_long_history_is_thinned_out(report):
    report["history"] = [{"epoch": n, "validation_mse": 1.0} for n in range(20_001)]
    (line,) = drawn(ratings_page(report), "errors")
    assert len(line["x"]) <= 501 and line["x"][0] == 1 and line["x"][-1] == 20_001


def test_without_plotly_the_error_tells_what_to_install(report, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.io", None)
    with pytest.raises(MissingExtra, match=r'pip install "featherbed\[view\]"'):
        plot("x", [], {})


def test_the_room_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; import featherbed.report.ratings; print('plotly' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_errors_by_popularity_add_up(found):
    guess = np.random.default_rng(0).uniform(1, 5, len(SPLIT.test)).astype(np.float32)
    off = (guess - SPLIT.test.values.astype(np.float64)) ** 2
    assert found["test"] == pytest.approx(off.mean())
    mean = float(SPLIT.train.values.mean(dtype=np.float64))
    assert found["baselines"]["mean"] == pytest.approx(((SPLIT.test.values - mean) ** 2).mean())
    for side in ("users", "items"):
        counts = np.bincount(
            getattr(SPLIT.train, side),
            minlength=RATINGS.num_users if side == "users" else RATINGS.num_items,
        )
        bands = found["sides"][side]["bands"]
        assert sum(band["ratings"] for band in bands) == len(SPLIT.test)
        assert sum(band["mse"] * band["share"] for band in bands) == pytest.approx(off.mean())
        own = counts[getattr(SPLIT.test, side)]
        (some,) = [band for band in bands if band["name"].startswith("10 ")]
        assert some["name"] == ("10 to 29" if counts.max() >= 30 else "10 and more")
        inside = (own >= 10) & (own < 30)
        assert some["mse"] == pytest.approx(off[inside].mean()) and some["ratings"] == inside.sum()
        assert some["objects"] == np.count_nonzero((counts >= 10) & (counts < 30))


@pytest.mark.parametrize("layout", ["ragged", "fixed", "all"])
def test_codes_of_rows(layout):
    table, packed = anchored(120, layout=layout)
    wanted = np.count_nonzero(table.transform.detach().numpy(), axis=1)
    assert row_cost(packed, np.arange(120), coded=True).tolist() == wanted.tolist()
    assert row_cost(packed, np.array([7, 3]), coded=True).tolist() == wanted[[7, 3]].tolist()


def test_bits_of_rows():
    rows = np.random.default_rng(0).normal(size=(10, 4)).astype(np.float32)
    bits = np.array([[3, 2, 1, 0], [1, 0, 0, 0]], dtype=np.uint8)
    graded = PackedTable([Band(10, Every(), values=Graded.round(rows, bits, [4, 6]))], 4)
    assert row_cost(graded, np.arange(10), coded=False).tolist() == [6] * 4 + [1] * 6
    low = PackedTable([Band(10, Every(), values=Matrix.encode(rows, "int4"))], 4)
    assert set(row_cost(low, np.arange(10), coded=False).tolist()) == {
        16 + 8 * low.bands[0].values.scale.itemsize
    }
    column = PackedTable(
        [Band(10, Every(), values=Matrix.encode(rows, "int4", scales="column"))], 4
    )
    assert set(row_cost(column, np.arange(10), coded=False).tolist()) == {16}
    assert set(row_cost(fb.DenseTable(10, 4).pack(), np.arange(10), coded=False).tolist()) == {128}
    product = fb.ProductTable(10, 4, parts=2, choices=8).pack()
    assert set(row_cost(product, np.arange(10), coded=False).tolist()) == {6}
    table, packed = anchored(120, layout="ragged")
    codes = packed.bands[0].codes
    own = (
        np.count_nonzero(table.transform.detach().numpy(), axis=1) * (codes.index_bits + 32)
        + codes.count_bits
    )
    assert row_cost(packed, np.arange(120), coded=False).tolist() == own.tolist()


def test_the_cost_of_rows_is_counted_in_blocks(monkeypatch):
    packed, counts = anchored(120)[1], np.bincount(PARTS[0].users, minlength=120)
    whole = insights.describe_cost(packed, counts)
    monkeypatch.setattr(insights, "ROWS", 7)
    assert insights.describe_cost(packed, counts) == whole
    assert sum(one["rows"] for one in whole["bins"]) == 120
    cost = row_cost(packed, np.arange(120), coded=True)
    for one, following in zip(whole["bins"], [*whole["bins"][1:], {"low": math.inf}], strict=True):
        inside = (counts >= one["low"]) & (counts < following["low"])
        assert (one["least"], one["most"]) == (cost[inside].min(), cost[inside].max())
        assert one["mean"] == pytest.approx(cost[inside].mean())


def test_many_rows_make_no_long_report():
    rows = 300_000
    band = Band(
        rows,
        Every(),
        values=Matrix.encode(np.zeros((rows, 2), np.float32), "int8", scales="column"),
    )
    packed = PackedTable([band], 2)
    users = np.random.default_rng(0).integers(rows, size=1000)
    ratings = Ratings(users, users, np.ones(1000, np.float32), range(rows), range(rows))
    split = SimpleNamespace(train=ratings, validation=ratings, test=ratings)
    found = describe_recommender(packed, packed, split, np.zeros(1000))
    assert len(json.dumps(found)) < 40_000 and found["anchors"] is None
    assert found["sides"]["users"]["unit"] == "bits" and found["sides"]["users"]["mean"] == 16


def test_what_fits_no_test_part():
    with pytest.raises(
        ArgumentError, match=r"predictions have shape \(3,\): give one for each of the"
    ):
        describe_recommender(anchored(120)[1], anchored(80)[1], SPLIT, np.zeros(3))


def test_edges():
    assert (
        bin_edges(0) == [0]
        and bin_edges(1) == [0, 1]
        and bin_edges(2999) == [0, 1, 3, 10, 30, 100, 300, 1000]
    )
    assert bin_edges(20, (1, 2, 5)) == [0, 1, 2, 5, 10, 20]


def test_an_item_without_title_goes_by_its_key():
    table, packed = anchored(80, 1)
    named = PackedTable(
        packed.bands, 4, keys=Keys.of(f"k{i}" for i in range(80)), made_by=packed.made_by
    )
    names = {
        top["name"] for one in insights.describe_anchors(named, None)["shown"] for top in one["top"]
    }
    assert names and all(name.startswith("k") for name in names)
    titled = insights.describe_anchors(packed, ItemTitles(TITLES, None))
    weights = table.transform.detach().numpy()
    for one in titled["shown"]:
        best = np.argsort(-np.abs(weights[:, one["anchor"]]), kind="stable")[: len(one["top"])]
        assert [top["name"] for top in one["top"]] == [TITLES[i] or str(i) for i in best]
        assert one["leads"] == np.count_nonzero(
            (np.abs(weights).argmax(1) == one["anchor"]) & weights.any(1)
        )
