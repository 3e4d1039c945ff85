"""Static encoders: distilled, compressed, encoded by numpy, and model2vec's folders."""

import json
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

import featherbed as fb
from featherbed.cli import app
from featherbed.interop.encoder import Encoder, compress_encoder, write_encoder

tokenizers = pytest.importorskip("tokenizers", reason="pip install featherbed[text]")
WORDS = [f"w{number}" for number in range(400)]


def make_tokenizer(words=WORDS):
    ids = {word: number for number, word in enumerate(words)} | {"[UNK]": len(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, "[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return tokenizer


def make_rows():
    rng = np.random.default_rng(0)
    return (rng.standard_normal((401, 24)) * rng.uniform(0.2, 2, (401, 1))).astype(np.float32)


TEXTS = ["w1 w2 w3", "w7", "unknown words", "", "w9 unknown w9"]


def expected(rows):
    means = [rows[[1, 2, 3]].mean(0), rows[7], rows[0] * 0, rows[0] * 0, rows[9]]
    return np.array([row / max(np.linalg.norm(row), 1e-12) for row in means])


def test_vectors_are_means_of_rows(tmp_path):
    rows = make_rows()
    write_encoder(tmp_path / "dense", rows, make_tokenizer().to_str())
    encoder = Encoder(tmp_path / "dense")
    assert np.allclose(encoder.encode(TEXTS), expected(rows), atol=1e-6)
    assert np.allclose(encoder.encode("w7"), expected(rows)[1], atol=1e-6)
    assert encoder.encode([]).shape == (0, 24)
    many = encoder.encode(["w7", "w8"] * 1500)
    assert np.allclose(many[2998], expected(rows)[1], atol=1e-6)


def test_a_folder_is_served(tmp_path):
    pytest.importorskip("fastapi", reason="needs the extra serve")
    from featherbed.server.app import mean_rows
    from featherbed.server.catalog import ServedModel

    rows = make_rows()
    write_encoder(tmp_path / "dense", rows, make_tokenizer().to_str())
    model = ServedModel.open("dense", tmp_path / "dense")
    vectors, tokens = mean_rows(model, TEXTS[:2])
    assert np.allclose(vectors, expected(rows)[:2], atol=1e-6)
    assert tokens == 4
    assert (model.kind, model.table.name_of(7)) == ("static encoder", "w7")


def test_compressed_rows_keep_the_vectors(tmp_path):
    rows = make_rows()
    rows[40:60] = 0  # unused tokens
    table = write_encoder(
        tmp_path / "small", rows, make_tokenizer().to_str(), ratio=5, method="int4"
    )
    encoder = Encoder(tmp_path / "small")
    found = encoder.encode(TEXTS)
    assert table.nbytes * 5 < rows.nbytes
    kept = (found * expected(rows)).sum(1)[[0, 1, 4]]
    assert (kept > 0.98).all()
    assert (found[2:4] == 0).all()
    with pytest.raises(fb.ArgumentError, match="compressed already"):
        compress_encoder(tmp_path / "small", tmp_path / "again", ratio=5, method="int4")


def test_blocks_keep_inner_products_and_frequent_tokens_best(tmp_path):
    rng = np.random.default_rng(1)
    rows = (rng.standard_normal((3001, 32)) * np.linspace(2, 0.3, 32)).astype(np.float32)
    rows[40:400] = 0
    tokenizer = make_tokenizer([f"w{number}" for number in range(3000)]).to_str()
    aim = {"ratio": 10, "method": "blocks"}
    table = write_encoder(tmp_path / "small", rows, tokenizer, **aim, generator=3)
    assert (tmp_path / "small" / "model.safetensors").stat().st_size <= rows.nbytes / 10
    assert not table[[40, 399]].any()
    unit = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)
    found = table.block(0, 3001)
    found = found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-9)
    errors = np.abs(unit @ unit[2000:].T - found @ found[2000:].T).mean(1)
    assert errors[:40].mean() < 0.8 * errors[2000:].mean()
    assert errors[2000:].mean() < 0.1
    again = write_encoder(tmp_path / "again", rows, tokenizer, **aim, generator=3)
    assert np.array_equal(again.block(0, 3001), table.block(0, 3001))
    for change, message in (
        ({"ratio": 200}, "nothing fits"),
        ({"ratio": None, "quality": "error:0.2"}, "give a ratio or a budget"),
    ):
        with pytest.raises(fb.ArgumentError, match=message):
            write_encoder(tmp_path / "not", rows, tokenizer, **(aim | change))
    with pytest.raises(fb.ArgumentError, match="a multiple of 8"):
        write_encoder(tmp_path / "not", rows[:, :30], tokenizer, **aim)
    assert not (tmp_path / "not").exists()


def test_encoding_needs_neither_torch_nor_transformers(tmp_path):
    write_encoder(tmp_path / "s", make_rows(), make_tokenizer().to_str(), ratio=5, method="int4")
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        f"import featherbed as fb; print(fb.Encoder({str(tmp_path / 's')!r}).encode(['w1']).shape)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "(1, 24)", done.stderr


@pytest.mark.parametrize("config", [{"model_type": "model2vec"}, {}])
def test_model2vec_reads_int8_and_is_read(config, tmp_path):
    model2vec = pytest.importorskip("model2vec", reason="pip install model2vec")
    rows = make_rows()
    theirs = model2vec.StaticModel(rows, make_tokenizer(), config, True)
    theirs.save_pretrained(tmp_path / "theirs")
    assert np.allclose(Encoder(tmp_path / "theirs").encode(TEXTS), theirs.encode(TEXTS), atol=1e-6)
    given = ["compress", tmp_path / "theirs", "--out", tmp_path / "ours", "--ratio", 3]
    given += ["--method", "int8", "--quiet"]
    done = CliRunner().invoke(app, [str(one) for one in given])
    assert done.exit_code == 0, done.output
    again = model2vec.StaticModel.from_pretrained(tmp_path / "ours").encode(TEXTS)
    assert np.allclose(Encoder(tmp_path / "ours").encode(TEXTS), again, atol=1e-6)
    assert np.abs(again - theirs.encode(TEXTS)).max() < 0.01
    clusters = model2vec.StaticModel.from_pretrained(
        tmp_path / "theirs", vocabulary_quantization=20
    )
    clusters.save_pretrained(tmp_path / "clusters")
    found = Encoder(tmp_path / "clusters").encode(TEXTS)
    assert np.allclose(found, clusters.encode(TEXTS), atol=1e-5)


def test_frequent_tokens_weigh_less():
    pytest.importorskip("transformers")
    from featherbed.interop.distill import project, weight_by_rank

    rows = np.ones((100, 4), dtype=np.float32)
    used = np.arange(100) != 3
    weighted = weight_by_rank(rows, used)[:, 0]
    assert weighted[3] == 0
    assert (np.diff(weighted[used]) > 0).all()
    matrix = np.random.default_rng(0).standard_normal((50, 4)) * [1, 9, 3, 0.1]
    projected = project(matrix.astype(np.float32), np.ones(50, dtype=bool), 2)
    variance = np.sort(np.var(matrix, axis=0))[::-1]
    assert np.allclose(projected.var(axis=0), variance[:2], rtol=0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "holds no tokenizer.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "holds no model.safetensors"),
        (lambda folder: (folder / "config.json").write_text("[]"), "holds no static encoder"),
        (
            lambda folder: (folder / "tokenizer.json").write_text(
                make_tokenizer([f"v{n}" for n in range(900)]).to_str()
            ),
            "the tokenizer has token 900, the table 401 rows",
        ),
        (
            lambda folder: (folder / "config.json").write_text(
                json.dumps({"model_type": "featherbed-static", "max_length": "x"})
            ),
            "max_length='x' is no number",
        ),
    ],
)
def test_damaged_folders_are_one_error(change, message, tmp_path):
    folder = tmp_path / "static"
    write_encoder(folder, make_rows(), make_tokenizer().to_str())
    change(folder)
    with pytest.raises((fb.DataError, fb.FormatError), match=message) as error:
        Encoder(folder)
    assert "\n" not in str(error.value)


def test_what_is_no_text_is_one_error(tmp_path):
    write_encoder(tmp_path / "dense", make_rows(), make_tokenizer().to_str())
    encoder = Encoder(tmp_path / "dense")
    for texts, message in (
        (None, "give a string or a list"),
        (b"a", "give a string or a list"),
        (["w1", 5], "5 is no text"),
        (["\ud800"], "is no text"),
    ):
        with pytest.raises(fb.ArgumentError, match=message):
            encoder.encode(texts)
    command = [sys.executable, "-m", "featherbed", "encode", str(encoder.folder)]
    done = subprocess.run(command, input=b"w1\nw\xff\n", capture_output=True)
    assert done.returncode == 2
    assert done.stderr.decode() == "error: -, line 2: byte 2 is not UTF-8: convert the file first\n"


def test_models_that_need_more_than_tokens_are_not_distilled(tmp_path):
    transformers = pytest.importorskip("transformers", reason="pip install featherbed[hf]")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2}
    text, vision = {"vocab_size": 300, **sizes}, {"image_size": 8, "patch_size": 4, **sizes}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    transformers.CLIPModel(config).save_pretrained(tmp_path / "clip")
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    t5 = transformers.T5Model(transformers.T5Config(vocab_size=300, **sizes))
    t5.save_pretrained(tmp_path / "t5")
    for folder in (tmp_path / "clip", tmp_path / "t5"):
        make_tokenizer(WORDS[:299]).save(str(folder / "tokenizer.json"))
    with pytest.raises(fb.ArgumentError, match="CLIPModel does not run on token ids alone"):
        fb.distill_model(tmp_path / "clip", tmp_path / "static")
    table = fb.distill_model(
        tmp_path / "t5", tmp_path / "static", dim=8, ratio=2, method="int8"
    )  # by its encoder
    assert table.rows == 300
