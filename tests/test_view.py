"""The page and the lines of a compression: every figure is there, nothing in the report can act as markup."""

import copy
import json
import re
import subprocess
import sys

import pytest

from featherbed.errors import ArgumentError, MissingExtra
from featherbed.report.compression import _ticks, compression_page, compression_text
from featherbed.report.page import as_bytes

HOSTILE = "<script>alert(1)</script><img src=x onerror='alert(1)'>\"&amp;</style></title>"
POINTS = [
    ("quantized", {"bits": 2}, 760_000, 0.31, "sample"),
    ("quantized", {"bits": 2}, 760_016, 0.32, "full"),
    ("product", {"parts": 10, "bits": 8}, 651_200, 0.35, "sample"),
    ("residual", {"books": 9}, 597_812, 0.2131, "refined"),
]


@pytest.fixture
def report():
    chosen = {
        "method": "residual",
        "settings": {"books": 9},
        "bytes": 597_812,
        "ratio": 20.07,
        "ratio_float16": 10.04,
    }
    return {
        "input": {
            "name": "glove.npz",
            "rows": 60_000,
            "dim": 50,
            "dtype": "float16",
            "bytes_float32": 12_000_000,
        },
        "target": "ratio=20",
        "measure": "recall",
        "budget": 600_000,
        "chosen": chosen,
        "parts": {"scales": 11_732, "codes": 540_000, "dictionary": 46_080},
        "quality": {"error": 0.2131, "cosine": 0.886, "overlap": 0.9731, "recall": 0.5832},
        "bands": [
            {
                "name": "rows 0 to 999",
                "rows": 1000,
                "share": 0.612,
                "error": 0.18,
                "cosine": 0.91,
                "recall": 0.68,
            },
            {
                "name": "rows 1,000 to 59,999",
                "rows": 59_000,
                "share": 0.388,
                "error": 0.22,
                "cosine": 0.88,
                "recall": 0.571,
            },
        ],
        "curve": [
            {
                "method": m,
                "settings": s,
                "bytes": b,
                "error": e,
                "stage": g,
                "chosen": g == "refined",
            }
            for m, s, b, e, g in POINTS
        ],
        "words": [
            {
                "file": "ws353.txt",
                "kind": "similarity",
                "used": 349,
                "of": 353,
                "before": 0.5202,
                "after": 0.5013,
            },
            {
                "file": "questions.txt",
                "kind": "analogy",
                "used": 14_877,
                "of": 19_544,
                "before": 0.4969,
                "after": 0.391,
            },
        ],
        "seconds": 42.31,
        "command": "featherbed compress glove.npz --ratio 20",
        "version": "0.3.0",
    }


def without_plotly(page):
    """The page without scripts and style: what is read."""
    return re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL)


def figure(page):
    """Data and layout as plotly is given them."""
    found = re.search(r'Plotly\.newPlot\(\s*"curve",\s*', page)
    data, end = json.JSONDecoder().raw_decode(page, found.end())
    layout, _ = json.JSONDecoder().raw_decode(page, re.compile(r"\s*,\s*").match(page, end).end())
    return data, layout


def rows_of(page, title):
    """The cells of a section's table, without tags."""
    section = without_plotly(page).split(f"<h2>{title}</h2>")[1].split("</table>")[0]
    rows = re.findall(r"<tr>(.*?)</tr>", section)
    return [
        [
            re.sub(r"<small>.*?</small>|<[^>]*>", "", cell)
            for cell in re.findall(r"<t[hd].*?</t[hd]>", row)
        ]
        for row in rows
    ]


def test_the_page_says_it_all(report):
    page = compression_page(report)
    assert (
        "60,000 × 50: 12.0 MB → 598 KB, 20.1 times smaller; 58 % of the ten nearest neighbors preserved"
        in page
    )
    assert (
        "<b>ratio=20</b> (at most 600 KB). Chosen: <b>residual</b> with books=9, by error among 3 candidates"
        in page
    )
    assert "Against float16 rows it is 10.0 times smaller" in page
    assert "<pre><code>featherbed compress glove.npz --ratio 20</code></pre>" in page
    assert "Made by featherbed 0.3.0 in 42.3 s from float16." in page
    assert rows_of(page, "Quality")[1:] == [
        ["recall", "58.3 %"],
        ["error", "0.2131"],
        ["cosine", "0.8860"],
        ["overlap", "0.9731"],
    ]
    assert rows_of(page, "Size by part")[1:] == [
        ["codes", "540,000", "90.3 %"],
        ["dictionary", "46,080", "7.7 %"],
        ["scales", "11,732", "2.0 %"],
    ]
    assert "width:90.3%" in page
    assert rows_of(page, "Frequent and rare rows")[2] == [
        *("rows 1,000 to 59,999", "59,000", "38.8 %"),
        *("0.220", "0.880", "57.1 %"),
    ]
    assert rows_of(page, "Word vectors")[1:] == [
        ["ws353.txt", "349 of 353", "0.520", "0.501"],
        ["questions.txt", "14,877 of 19,544", "49.7 %", "39.1 %"],
    ]
    assert rows_of(page, "Candidates")[1] == [
        "residual chosen",
        "refined",
        "597,812",
        "0.2131",
    ]
    assert "Share of the ten nearest neighbors" in page and "weighted recall" not in page


def test_keys_are_part_of_the_file_and_counted_apart(report):
    report["chosen"]["keys"] = 520_000
    page, lines = compression_page(report), compression_text(report).splitlines()
    headline = "60,000 × 50 with keys: 12.5 MB → 1.12 MB, 11.2 times smaller; 58 % of ten"
    assert headline in page
    assert (
        "Keys take 520 KB. Without them it is 20.1 times smaller than float32 rows; against float16 rows it is 10.0 times smaller."
        in page
    )
    assert "Keys, the names of the rows, take another 520,000 bytes." in page
    assert (
        lines[1]
        == "60,000 x 50 with keys: 12.5 MB -> 1.12 MB, 11.2 times smaller; 58 % of ten neighbors preserved"
    )
    assert (
        lines[4]
        == "table       598 KB, 20.1 times smaller than float32 (12.0 MB), 10.0 times than float16; keys 520 KB"
    )


def test_weighted_figures_where_there_are_any(report):
    report["quality"] |= {"weighted_recall": 0.6512, "weighted_error": 0.1831}
    assert rows_of(compression_page(report), "Quality")[-2:] == [
        ["weighted recall", "65.1 %"],
        ["weighted error", "0.1831"],
    ]
    assert "weighted    recall 65.1 %, error 0.1831" in compression_text(report).splitlines()


def test_the_curve(report):
    data, layout = figure(compression_page(report))
    residual, product, quantized, ring = data
    assert [trace["name"] for trace in data] == ["residual", "product", "quantized", "chosen"]
    assert (quantized["x"], quantized["y"]) == ([760_000, 760_016], [0.31, 0.32])
    assert [symbol.endswith("-open") for symbol in quantized["marker"]["symbol"]] == [True, False]
    assert product["marker"]["symbol"][0].endswith("-open") and not residual["marker"]["symbol"][
        0
    ].endswith("-open")
    assert (ring["x"], ring["y"]) == ([597_812], [0.2131])
    assert product["hovertext"] == [
        "<b>product</b> parts=10, bits=8<br>651 KB, error 0.3500 (sample)"
    ]
    (line,) = layout["shapes"]
    assert line["x0"] == line["x1"] == 600_000 and line["name"] == "budget 600 KB"
    assert layout["xaxis"]["type"] == "log" and layout["yaxis"]["title"]["text"].startswith("error")
    low, high = layout["xaxis"]["range"]
    assert 10**low < 597_812 and 10**high > 760_016


def test_the_curve_of_errors_without_a_budget(report):
    report |= {"measure": "error", "budget": None, "target": "quality=error:0.25"}
    page = compression_page(report)
    data, layout = figure(page)
    assert (
        data[0]["y"] == [0.2131]
        and "shapes" not in layout
        and layout["yaxis"]["title"]["text"].startswith("error")
    )
    assert "at most" not in without_plotly(page)


def test_one_page_that_fetches_nothing(report):
    page = compression_page(report)
    assert page.count("Plotly.newPlot(") == 1 + page.split('<div id="curve"')[0].count(
        "Plotly.newPlot("
    )
    assert len(page) > 1_000_000, "plotly.js is not in the page"
    assert "default-src 'none'" in page.split("<body>")[0]
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=", page)


def hostile(value):
    """The same report with every text made hostile, those the page decides by excepted."""
    if isinstance(value, dict):
        return {key: child if key == "measure" else hostile(child) for key, child in value.items()}
    if isinstance(value, list):
        return [hostile(child) for child in value]
    return HOSTILE if isinstance(value, str) else value


def test_nothing_in_the_report_is_markup(report):
    harmless, hurt = compression_page(report), hostile(copy.deepcopy(report))
    for part in (hurt["chosen"], *hurt["curve"]):
        part["settings"] = {HOSTILE: HOSTILE}
    hurt["parts"] = {HOSTILE: 1000}
    page = compression_page(hurt)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert (
        "<script>alert" not in page
        and "<img" not in without_plotly(page)
        and "</style></title>" not in page
    )
    assert page.count("<script") == harmless.count("<script") and page.count(
        "</script"
    ) == harmless.count("</script")
    data, _ = figure(page)
    assert data[0]["name"].startswith("&lt;script&gt;") and "<img" not in data[0]["hovertext"][0]


def test_figures_that_are_not_there(report):
    report |= {
        "words": None,
        "bands": [],
        "curve": [],
        "command": "",
        "quality": {"recall": None, "error": float("nan")},
    }
    page = compression_page(report)
    assert (
        "12.0 MB → 598 KB, 20.1 times smaller</p>" in page
        and "as the only candidate. Against" in page
    )
    assert rows_of(page, "Quality")[1:] == [["recall", "–"], ["error", "–"]]
    for title in (
        "Candidates",
        "Frequent and rare rows",
        "Word vectors",
        "Command",
    ):
        assert title not in page
    assert len(page) < 10_000, "no plot, no plotly"
    assert "ratio=20; chosen as the only candidate in 42.3 s" in compression_text(report)
    assert "rows  " not in compression_text(report) and "command  " not in compression_text(report)


def test_figures_that_are_missing_in_places(report):
    report["curve"][0]["error"] = None
    report["bands"][0] |= {"share": None, "recall": None}
    report["words"][0]["after"] = float("nan")
    page = compression_page(report)
    assert figure(page)[0][2]["y"] == [None, 0.32]
    assert rows_of(page, "Frequent and rare rows")[1] == [
        "rows 0 to 999",
        "1,000",
        "–",
        "0.180",
        "0.910",
        "–",
    ]
    assert rows_of(page, "Word vectors")[1][-1] == "–"


@pytest.mark.parametrize("show", [compression_page, compression_text])
def test_what_is_no_report(report, show):
    with pytest.raises(ArgumentError, match="'loss': it is 'recall' or 'error'"):
        show(report | {"measure": "loss"})
    del report["curve"], report["parts"]
    with pytest.raises(ArgumentError, match="without parts, curve: give the whole report"):
        show(report)


def test_without_plotly_the_error_tells_what_to_install(report, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.io", None)
    with pytest.raises(MissingExtra, match=r'pip install "featherbed\[view\]"'):
        compression_page(report)
    assert compression_text(report)


def test_the_lines(report):
    assert compression_text(report).splitlines() == [
        "glove.npz (float16)",
        "60,000 x 50: 12.0 MB -> 598 KB, 20.1 times smaller; 58 % of the ten nearest neighbors preserved",
        "method      residual(books=9)",
        "target      ratio=20; chosen by error among 3 candidates in 42.3 s",
        "table       598 KB, 20.1 times smaller than float32 (12.0 MB), 10.0 times than float16",
        "quality     recall 58.3 %, error 0.2131, cosine 0.8860, overlap 0.9731",
        "bytes       codes 540 KB, dictionary 46.1 KB, 1 more",
        "rows                              share    error   cosine   recall",
        "  rows 0 to 999                  61.2 %    0.180    0.910   68.0 %",
        "  rows 1,000 to 59,999           38.8 %    0.220    0.880   57.1 %",
        "words                                       used   before    after",
        "  ws353.txt                           349 of 353    0.520    0.501",
        "  questions.txt                 14,877 of 19,544   49.7 %   39.1 %",
        "command     featherbed compress glove.npz --ratio 20",
    ]


def test_the_lines_stay_few_short_and_plain(report):
    report["input"]["name"] = "x" * 300 + "\x1b[2J\n"
    report["target"] = "\x1b]0;title\x07\r\n"
    report["bands"] *= 20
    report["words"] *= 20
    report["quality"] |= {"weighted_recall": 0.6512, "weighted_error": 0.1831}
    report["chosen"]["settings"] = {f"setting{n}": n for n in range(50)}
    lines = compression_text(report).split("\n")
    assert len(lines) <= 25 and max(map(len, lines)) <= 100
    assert all(line.isprintable() for line in lines)
    assert "  and 33 more" in lines and "  and 35 more" in lines
    report["command"] = "featherbed compress " + "long " * 30
    assert "featherbed compress" not in compression_text(report), (
        "a command cut short would be another command"
    )


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.00 KB"), (9994, "9.99 KB"), (9996, "10.0 KB"), (99_960, "100 KB"),
     (999_499, "999 KB"), (999_500, "1.00 MB"), (12_000_000, "12.0 MB"), (3.2e9, "3.20 GB"), (4e15, "4,000 TB")],
)  # fmt: skip
def test_sizes(size, text):
    assert as_bytes(size) == text


def test_ticks_are_round_and_few():
    assert _ticks(180_000, 2_100_000) == [2e5, 5e5, 1e6, 2e6]
    assert _ticks(900, 2_000_000) == [1e3, 1e4, 1e5, 1e6]
    assert len(_ticks(1, 1e13)) <= 6
    low, high = _ticks(597_812 / 1.15, 597_812 * 1.15)
    assert low < 597_812 < high


def test_the_room_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; import featherbed.report.compression; print('plotly' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
