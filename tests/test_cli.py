"""The command line: what it prints, and how it answers bad input."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import featherbed as fb
from featherbed.cli import app


def invoke(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def run(*words):
    """Run the program as a person does; return exit code, standard output and standard error."""
    found = subprocess.run(
        [sys.executable, "-m", "featherbed.cli", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
    )
    return found.returncode, found.stdout, found.stderr


@pytest.fixture
def words(tmp_path):
    table = fb.AnchorTable(30, 4, anchors=5, generator=torch.Generator().manual_seed(0))
    fb.save(table, tmp_path / "w.safetensors", keys=[*(f"word{i}" for i in range(29)), "7"])
    return tmp_path / "w.safetensors"


def test_lookup_by_id_and_key(words):
    packed = fb.load(words)
    shown = invoke("lookup", words, "3", "word4", "key:7", "--digits", "9").output.splitlines()
    assert [line.split("\t")[0] for line in shown] == ["3", "word4", "key:7"]
    rows = np.array(
        [[float(x) for x in line.split("\t")[1].split()] for line in shown], dtype=np.float32
    )
    np.testing.assert_allclose(rows, packed[[3, 4, 29]], rtol=1e-6)
    found = json.loads(invoke("lookup", words, "3", "--json").output)
    np.testing.assert_allclose(found["3"], packed[3], rtol=1e-6)


def test_search_leaves_the_row_itself_out(words):
    packed = fb.load(words)
    best = [
        line.split("\t") for line in invoke("search", words, "word4", "-k", "3").output.splitlines()
    ]
    ids, _ = packed.search(packed[4], 30, metric="cosine")
    expected = [int(i) for i in ids if i != 4][:3]
    assert [int(line[1]) for line in best] == expected
    assert [line[2] for line in best] == [packed.keys[i] for i in expected]
    dot = json.loads(invoke("search", words, "4", "-k", "2", "--metric", "dot", "--json").output)
    assert [set(row) for row in dot] == [{"id", "key", "score"}] * 2


def test_inspect_tells_every_byte(words):
    text = invoke("inspect", words).output
    assert "30 rows of width 4" in text
    assert "AnchorTable(anchors=5" in text
    found = json.loads(invoke("inspect", words, "--json").output)
    assert sum(found["parts"].values()) == found["bytes"]["file"] == words.stat().st_size
    assert found["bytes"]["keys"] == sum(
        n for name, n in found["parts"].items() if name.startswith("keys.")
    )


def test_inspect_draws_codes_per_row(tmp_path):
    table = fb.AnchorTable(100, 4, anchors=5)
    with torch.no_grad():
        table.transform[:, 2:] = 0
        table.transform[:40, 1:] = 0
    for layout in ("fixed", "ragged"):
        fb.save(table.pack(layout=layout), tmp_path / "t")
        band = json.loads(invoke("inspect", tmp_path / "t", "--json").output)["bands"][0]
        assert band["codes_per_row"] == {"1": 40, "2": 60}
        assert "█" in invoke("inspect", tmp_path / "t").output


def test_check_says_sound(words):
    assert "sound" in invoke("check", words).output


def test_bad_input_ends_with_one_line_and_exit_code_two(words, tmp_path):
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(words.read_bytes()[:-3])
    other = tmp_path / "text.txt"
    other.write_text("hello, I am no table at all")
    for arguments, named in (
        (["lookup", words, "30"], "ids go from 0 to 29"),
        (["lookup", words, "nobody"], "'nobody'"),
        (["lookup", tmp_path / "nowhere", "3"], "no such file"),
        (["lookup", tmp_path, "3"], "is a folder"),
        (["lookup", words, "9" * 30], "9" * 30),
        (["lookup", words, "²"], "no row has the key"),
        (["lookup", words, "-1"], "id -1 is not in this table"),
        (["check", broken], "safetensors"),
        (["inspect", other], "safetensors|header"),
        (["search", words, "3", "--metric", "manhattan"], "dot or cosine"),
        (["search", words, "3", "-k", "0"], "greater than or equal to 1"),
        (["lookup", words], "Missing argument"),
        (["fly"], "No such command"),
    ):
        code, out, err = run(*arguments)
        assert code == 2, (arguments, out, err)
        assert "Traceback" not in err
        assert any(part in err for part in named.split("|")), (arguments, err)


def test_lookup_imports_neither_torch_nor_numba(words):
    code = (
        "import sys\nfrom featherbed.cli import main\nsys.argv = ['featherbed', 'lookup', sys.argv[1], '3']\n"
        "try: main()\nexcept SystemExit: pass\nprint([m for m in ('torch', 'numba') if m in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(words)], capture_output=True, text=True, check=True
    )
    assert found.stdout.splitlines()[-1] == "[]"


def test_demo_without_torch_tells_what_to_install():
    code = "import sys; sys.modules['torch'] = None; sys.argv = ['featherbed', 'demo']; from featherbed.cli import main; main()"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert found.returncode == 2
    assert (
        found.stderr.strip()
        == 'error: featherbed demo needs torch: pip install "featherbed[train]"'
    )


def test_version():
    assert invoke("--version").output.strip() == f"featherbed {fb.__version__}"


def test_demo_compares_and_proves(tmp_path, monkeypatch):
    """All of it, with fewer data: who wins is not asserted, that it is computed and told is."""
    from featherbed.apps import demo

    small = {"USERS": 200, "ITEMS": 100, "RATINGS": 6000, "BUDGET": "3KB", "BUDGETS": ("2KB",)}
    small |= {"DIMS": (2, 8), "RATIOS": (), "INTEGERS": {"int2": 11}, "QUANTIZERS": ("opq",)}
    small |= {
        "VECTORS": 1500,
        "TRAIN": 3000,
        "TEST": 200,
        "ANCHORS": (8,),
        "EPOCHS": 1,
        "ADS": 300,
        "AD_DIMS": (2, 4),
    }
    for name, value in small.items():
        monkeypatch.setattr(demo, name, value)
    kept = tmp_path / "kept"
    done = invoke("demo", "--folder", kept, "--quiet")
    assert done.exit_code == 0, done.exception
    shown = " ".join(done.output.split())
    for line in (
        "3 of 3: an anchor table in a model",
        "every row is equal",
        "ns a row",
        f"server featherbed serve {kept / 'recommender'}",
    ):
        assert line in shown
    assert len(re.findall("(ahead of|level with|BEHIND) (int4|int2|float32|faiss)", shown)) == 8
    assert (kept / "quality.svg").read_text().count("<svg") == 1
    size = (kept / "vectors.safetensors").stat().st_size
    assert f" in {size:,} bytes</title>" in (kept / "quality.svg").read_text()
    for report in ("recommender/report.html", "vectors.html", "anchors.txt"):
        assert (kept / report).stat().st_size > 100
    assert not list(kept.rglob("*.safetensors.npy"))
    fb.check(kept / "ads.safetensors")
