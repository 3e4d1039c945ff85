"""The pages of text models and the look inside: counted right, and nothing in them can act as markup."""

import copy
import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

import featherbed as fb
from featherbed.apps.classifier.train import prediction_insight
from featherbed.apps.language.train import loss_bands
from featherbed.errors import ArgumentError
from featherbed.report import texts as insights
from featherbed.report.texts import language_page, row_kind, text_page, word_insight

HOSTILE = "<script>alert(1)</script><img src=x onerror='alert(1)'>\"&amp;</style></title>"
WORDS = ["<pad>", "<unk>", *(f"word{chr(97 + n // 26)}{chr(97 + n % 26)}" for n in range(98))]
COUNTS = np.concatenate([[0, 7], 2000 // np.arange(1, 99)])


def anchored(seed=0, rows=100, anchors=4):
    table = fb.AnchorTable(
        rows, 6, anchors=anchors, padding_idx=0, generator=torch.Generator().manual_seed(seed)
    )
    with torch.no_grad():
        table.transform.mul_(
            torch.rand(rows, anchors, generator=torch.Generator().manual_seed(seed)) < 0.5
        )
    return table, table.pack()


@pytest.fixture(scope="module")
def found():
    return word_insight(anchored()[1], WORDS, COUNTS, anchor_ids=[2, 3, 4, -1])


@pytest.fixture
def report(found):
    told = prediction_insight(
        [0, 0, 1, 1],
        [0, 1, 1, 0],
        [3, 12, 14, 200],
        ["sport", "trade"],
        ["a", "b", "c", "d"],
        [0.9, 0.7, 0.8, 0.95],
    )
    return {
        "name": "news.csv",
        "metrics": {
            "train": {"accuracy": 0.95},
            "validation": {"accuracy": 0.9},
            "test": {"accuracy": 0.912},
        }
        | {"stored": {"accuracy": 0.911}, "baselines": {"always the first class": 0.25}},
        "sizes": {
            "file": 1_000_000,
            "parts": {"table": 600_000, "keys": 400_000},
            "float32": 40_000_000,
            "float16": 20_000_000,
        }
        | {"parameters": 1000, "dense_parameters": 50_000},
        "history": [
            {
                "epoch": n,
                "train_accuracy": 0.5 + n / 10,
                "validation_accuracy": 0.6,
                "parameters": 9 - n,
            }
            for n in range(3)
        ],
        "model": {"kind": "bag", "table": "anchor:anchors=4", "words": 100, "dim": 6},
        "classes": ["sport", "trade"],
        **told,
        "part": "validation",
        "insight": found,
        "input": {"texts": 4000},
        "input_notes": ["3 texts were cut."],
        "settings": {"lr": 0.01},
        "notes": ["Stopped early."],
        "command": "featherbed train text news.csv --out DIR",
        "seconds": 12.34,
        "version": "0.6.0",
        "interrupted": True,
    }


def read(page):
    return re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL)


def rows_of(page, title):
    rows = re.findall(
        r"<tr>(.*?)</tr>", read(page).split(f"<h2>{title}</h2>")[1].split("</table>")[0]
    )
    return [
        [
            re.sub(r"<small>.*?</small>|<[^>]*>", "", cell)
            for cell in re.findall(r"<t[hd].*?</t[hd]>", row)
        ]
        for row in rows
    ]


def drawn(page, name):
    place = re.search(rf'Plotly\.newPlot\(\s*"{name}",\s*', page)
    return json.JSONDecoder().raw_decode(page, place.end())[0]


def language(report):
    own = {part: {"perplexity": 90.0 + n} for n, part in enumerate(("test", "validation", "train"))}
    return {
        key: value
        for key, value in report.items()
        if key not in ("classes", "confusion", "lengths", "wrong", "history")
    } | {
        "metrics": own | {"baselines": {"frequencies alone": 700.0}},
        "history": [
            {"epoch": n, "train_perplexity": 900.0 / (n + 1), "validation_perplexity": 500.0}
            for n in range(3)
        ],
        "bands": loss_bands([1.0, 2.0, 3.0], [2, 2, 50], COUNTS),
        "speed": {"this model": 5000.0, "plain rows": 5200.0},
        "continuations": [{"start": "the stock", "text": "fell by N points"}],
    }


def test_the_page_of_a_classifier(report):
    page = text_page(report)
    text = read(page)
    assert (
        "A text classifier with test accuracy 91.20 %, 1.00 MB in total: 40.0 times smaller than with float32 rows, 20.0"
        in text
    )
    assert "of 100 words, width 6, is <b>anchor:anchors=4</b> in a <b>bag</b> model" in text
    assert (
        "1,000 parameters, 50.0 times fewer than the 50,000" in text
        and "Training was interrupted" in text
    )
    assert rows_of(page, "Quality")[1:3] == [
        ["test", "91.20 %"],
        ["test, from the stored files", "91.10 %"],
    ]
    assert ["with float16 rows", "20.0 MB", "20.0 times as large"] in rows_of(page, "Size")
    assert rows_of(page, "Confusion matrix")[1:] == [["sport", "1", "1"], ["trade", "1", "1"]]
    assert rows_of(page, "Accuracy by class")[1] == ["sport", "2", "50.00 %", "50.00 %"]
    assert ["10 to 19", "2", "50.00 %"] in rows_of(page, "Accuracy by text length")
    assert [row[:2] for row in rows_of(page, "Most confident errors")[1:]] == [
        ["trade", "sport"],
        ["sport", "trade"],
    ]
    assert drawn(page, "curve0")[0]["y"] == pytest.approx([0.5, 0.6, 0.7]) and drawn(
        page, "curve3"
    )[0]["y"] == [9, 8, 7]
    for said in (
        "3 texts were cut.",
        "Stopped early.",
        "--out DIR</code>",
        "Made by featherbed 0.6.0 in 12.3 s.",
    ):
        assert said in text


def test_many_classes_are_told_by_pairs(report):
    counts = np.eye(40, dtype=int) * 9
    counts[7, 3] = 5
    page = text_page(
        report | {"classes": [f"c{n}" for n in range(40)], "confusion": counts.tolist()}
    )
    assert rows_of(page, "Most frequent confusions")[1:] == [["c7", "5", "c3"]]
    assert (
        len(rows_of(page, "Accuracy by class")) == 31
        and rows_of(page, "Accuracy by class")[1][0] == "c7"
    )


def test_the_page_of_a_language_model(report):
    page = language_page(language(report))
    text = read(page)
    assert "A language model with test perplexity 90.00, 1.00 MB in total" in text
    assert "<b>the stock</b> fell by N points" in text and "classified" not in text
    assert ["this model", "5,000"] in rows_of(page, "Training speed")
    assert rows_of(page, "Perplexity by frequency")[-1] == ["1,000 and more", "66.7 %", "4.5"]
    assert drawn(page, "curve2")[0]["y"] == [900, 450, 300]


def test_the_look_inside_is_shown(report, found):
    for page in (text_page(report), language_page(language(report))):
        shown = rows_of(page, "Anchors")[1:]
        assert [row[0] for row in shown] == [
            one["word"] or str(one["anchor"]) for one in found["anchors"]["shown"]
        ]
        assert shown[0][2] == ", ".join(
            one["word"] for one in found["anchors"]["shown"][0]["special"]
        )
        assert f"{found['pairs'][0]['word']} – " in read(page)
        assert len(rows_of(page, "Nearest words")) == len(found["neighbors"]) + 1 == 13
        assert f"{found['zero']['rows']:,} words have a row of zeros" in read(page)


def hostile(value):
    if isinstance(value, dict):
        return {key: hostile(child) for key, child in value.items()}
    if isinstance(value, list):
        return [hostile(child) for child in value]
    return HOSTILE if isinstance(value, str) else value


@pytest.mark.parametrize("kind", ["text", "language"])
def test_nothing_in_a_report_is_markup(report, kind):
    make, given = (text_page, report) if kind == "text" else (language_page, language(report))
    harmless, hurt = make(given), hostile(copy.deepcopy(given))
    hurt["settings"] = hurt["input"] = {HOSTILE: HOSTILE}
    hurt["sizes"]["parts"] = {HOSTILE: 600_000}
    hurt["metrics"]["baselines"] = {HOSTILE: 0.5}
    hurt["speed"] = {HOSTILE: 5.0}
    page = make(hurt)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert (
        "<script>alert" not in page and "<img" not in read(page) and "</style></title>" not in page
    )
    assert page.count("<script") == harmless.count("<script") and page.count(
        "</script"
    ) == harmless.count("</script")


def test_what_is_not_there_is_left_out(report):
    for make in (text_page, language_page):
        page = make(
            {
                "name": "a",
                "metrics": {"test": {"accuracy": float("nan")}},
                "sizes": {},
                "insight": None,
                "history": None,
            }
        )
        assert len(page) < 10_000 and "<h2>" not in page, "no section, no plotly"
        with pytest.raises(ArgumentError, match="a report without sizes: give the whole report"):
            make({"name": "a", "metrics": {}})
    for key in report.keys() - {"name", "metrics", "sizes"}:
        less = {name: value for name, value in report.items() if name != key}
        assert "<h2>Quality</h2>" in text_page(less), key


def test_bands_add_up():
    table, packed = anchored()
    found = word_insight(packed, WORDS, COUNTS)
    weights = table.transform.detach().numpy()
    assert sum(band["words"] for band in found["bands"]) == 99 and sum(
        b["share"] for b in found["bands"]
    ) == pytest.approx(1)
    (some,) = [band for band in found["bands"] if band["name"] == "30 to 99"]
    inside = (COUNTS >= 30) & (COUNTS < 100)
    assert some["cost"] == pytest.approx(np.count_nonzero(weights[inside], axis=1).mean())
    assert some["zero"] == pytest.approx((~weights[inside].any(1)).mean())
    empty = ~weights.any(1)
    empty[:2] = False
    assert found["zero"]["rows"] == empty.sum() > 0
    assert {one["word"] for one in found["zero"]["examples"]} <= {
        WORDS[i] for i in np.flatnonzero(empty)
    }
    assert found == json.loads(json.dumps(found))


def test_words_of_anchors(monkeypatch):
    table, packed = anchored(1)
    weights, norms = (
        np.abs(table.transform.detach().numpy()),
        table.atoms.detach().norm(dim=1).numpy(),
    )
    size = weights * norms
    score = weights * size / np.maximum(size.sum(1, keepdims=True), 1e-20)
    weights[0] = score[0] = 0
    weights[[2, 3], [0, 1]] = score[[2, 3], [0, 1]] = 0
    found = word_insight(packed, WORDS, COUNTS, anchor_ids=[2, 3, -1, -1])
    assert {one["word"] for one in found["anchors"]["shown"][:2]} == {WORDS[2], WORDS[3]}, (
        "anchors that are words come first"
    )
    for one in found["anchors"]["shown"]:
        k = one["anchor"]
        assert [top["word"] for top in one["top"]] == [
            WORDS[i] for i in np.argsort(-weights[:, k], kind="stable")[:8]
        ]
        assert [top["word"] for top in one["special"]] == [
            WORDS[i] for i in np.argsort(-score[:, k], kind="stable")[:8]
        ]
    best = np.unravel_index(weights.argmax(), weights.shape)
    assert (found["pairs"][0]["word"], found["pairs"][0]["anchor"]) == (WORDS[best[0]], best[1])
    monkeypatch.setattr("featherbed.packed.inspect.HELD", 50)
    monkeypatch.setattr(insights, "BLOCK", 7)
    assert word_insight(packed, WORDS, COUNTS, anchor_ids=[2, 3, -1, -1]) == found, "in blocks too"


def test_tables_of_codes(report):
    table = fb.ProductTable(100, 8, parts=4, choices=8, generator=torch.Generator().manual_seed(0))
    packed = table.pack()
    found = word_insight(packed, WORDS, COUNTS)
    assert found["kind"] == "codes" and "anchors" not in found
    codes, told = packed.codes_of(np.arange(100)), found["codes"]
    assert (told["parts"], told["choices"], told["distinct"]) == (
        4,
        8,
        len(np.unique(codes, axis=0)),
    )
    assert told["used"] == np.mean([len(np.unique(codes[:, part])) / 8 for part in range(4)])
    first, ids = told["shared"][0], {word: n for n, word in enumerate(WORDS)}
    for other in first["others"]:
        assert other["same"] == np.sum(codes[ids[first["word"]]] == codes[ids[other["word"]]])
    assert (
        rows_of(text_page(report | {"insight": found}), "Words with similar codes")[1][0]
        == first["word"]
    )


def test_tables_that_keep_some_words(report):
    packed = fb.SelectedTable(100, 4, keep=20, counts=torch.from_numpy(COUNTS)).pack()
    found = word_insight(packed, WORDS, COUNTS)
    kept = np.argsort(-COUNTS, kind="stable")[:20]
    assert found["kind"] == "kept"
    assert sum(band["kept"] * band["words"] for band in found["bands"]) == pytest.approx(20)
    for band in found["bands"]:
        assert set(band["kept_words"]) <= {WORDS[i] for i in kept} and not set(
            band["dropped_words"]
        ) & {WORDS[i] for i in kept}
    assert "<h2>Words that share a row</h2>" in text_page(report | {"insight": found})


def test_plain_rows_have_neighbours():
    rows = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
    rows[9] = 2 * rows[2]
    found = word_insight(fb.DenseTable.from_dense(rows).pack(), WORDS, COUNTS)
    assert found["kind"] == "rows" and found["zero"]["rows"] == 0
    assert (
        found["neighbors"][0]["word"] == WORDS[2]
        and found["neighbors"][0]["nearest"][0]["word"] == WORDS[9]
    )
    assert found["neighbors"][0]["nearest"][0]["cosine"] == pytest.approx(1)
    assert row_kind(fb.LowRankTable(9, 4, rank=2).pack()) == "rows"


def test_function_words_and_markers_are_no_neighbours():
    words = ["<unk>", "that", "12", "stock", "bonds"]
    found = word_insight(fb.DenseTable(5, 4).pack(), words, [90, 80, 70, 60, 50])
    assert [one["word"] for one in found["neighbors"]] == words[1:], (
        "too few telling words: all but the marker"
    )
    many = ["that", "with", *WORDS[2:]]
    shown = word_insight(fb.DenseTable(100, 4).pack(), many, np.arange(1000, 900, -1))["neighbors"]
    assert shown[0]["word"] == WORDS[2]


def test_what_does_not_fit_is_refused():
    with pytest.raises(ArgumentError, match="99 words and counts of shape"):
        word_insight(anchored()[1], WORDS[1:], COUNTS)
    with pytest.raises(ArgumentError, match="give one id for each of the 4 anchors"):
        word_insight(anchored()[1], WORDS, COUNTS, anchor_ids=[1, 2])


def test_losses_by_band():
    bands = loss_bands([1.0, 3.0, 2.0], [2, 2, 99], COUNTS)
    assert [(band["tokens"], band["name"]) for band in bands] == [
        (1, "10 to 29"),
        (2, "1,000 and more"),
    ]
    assert [band["perplexity"] for band in bands] == pytest.approx([np.exp(2), np.exp(2)])


def test_the_page_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; import featherbed.report.texts\n"
    code += "print('plotly' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
