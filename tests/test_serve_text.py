"""Stored text models: the answers of the trained ones without torch, sizes, damaged and hostile folders, the commands."""

import io
import json
import lzma
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import featherbed as fb
from featherbed.apps import bundle as bundles
from featherbed.apps.bundle import encode_weights, read_words, stored_bytes, write_words
from featherbed.apps.classifier import serve as classifiers
from featherbed.apps.classifier.model import BagOfWords, TextCNN
from featherbed.apps.classifier.serve import (
    Classifier,
    ClassProbability,
    check_classifier,
    write_classifier,
)
from featherbed.apps.language import serve as languages
from featherbed.apps.language.model import AWDLSTMModel, LSTMModel
from featherbed.apps.language.serve import LanguageModel, check_language, write_language
from featherbed.apps.language.train import perplexity
from featherbed.cli.models import classify, continue_text, format_classes
from featherbed.errors import ArgumentError, DataError, FormatError
from featherbed.packed.band import Band, Every
from featherbed.packed.file import write_arrays
from featherbed.packed.keys import Keys
from featherbed.packed.matrix import Matrix
from featherbed.packed.table import PackedTable

V, DIM, CLASSES, LENGTH = 60, 8, ("World", "Sports", "Sci/Tech"), 20
WORDS = ["<pad>", "<unk>", *(f"word{i}" for i in range(V - 2))]
SPECS = [
    "dense",
    "anchor:anchors=4",
    "anchor:anchors=6,slots=2",
    "quantized:bits=8",
    "product:parts=2,choices=8",
    "hashed:buckets=20",
]


def model_of(kind="cnn", spec="dense", seed=0, hidden=None):
    torch.manual_seed(seed)
    table = fb.make_table(
        spec, V, DIM, padding_idx=0, generator=torch.Generator().manual_seed(seed)
    )
    if kind == "cnn":
        model = TextCNN(table, len(CLASSES), widths=(2, 3, 5), channels=7)
    else:
        model = BagOfWords(table, len(CLASSES), dropout=0.1, hidden=hidden)
        for norm in (part for part in model.modules() if isinstance(part, nn.BatchNorm1d)):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
    for part in model.parameters():
        if part.ndim == 1:
            nn.init.normal_(part)
    return model.eval()


def store(model, folder, **more):
    settings = {"classes": CLASSES, "length": LENGTH, "words": WORDS, **more}
    kind, widths = ("cnn", model.widths) if isinstance(model, TextCNN) else ("bag", ())
    write_classifier(
        folder, model.words.pack(), model.arrays(), kind=kind, widths=widths, **settings
    )
    return folder


def documents(seed=0, lengths=range(1, LENGTH + 1)):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, V, size=length) for length in lengths]


def predicted(model, texts):
    padded = np.zeros((len(texts), LENGTH), dtype=np.int64)
    for row, text in zip(padded, texts, strict=True):
        row[: len(text)] = text[:LENGTH]
    with torch.no_grad():
        return model(torch.from_numpy(padded)).softmax(1).numpy()


def asked(classifier, texts):
    return classifier.probabilities(np.concatenate(texts), np.cumsum([0, *map(len, texts)]))


@pytest.fixture
def place(tmp_path):
    return store(model_of(), tmp_path)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("kind", "hidden"), [("cnn", None), ("bag", None), ("bag", 9)])
def test_probabilities_are_the_trained_models(kind, hidden, spec, tmp_path):
    model = model_of(kind, spec, hidden=hidden)
    classifier, texts = check_classifier(store(model, tmp_path)), documents()
    wanted = predicted(model, texts)
    assert np.abs(asked(classifier, texts) - wanted).max() < 1e-5
    assert np.ptp(wanted[:, 0]) > 1e-3, "texts are told apart"
    found = classifier.label_ids(np.concatenate(texts), np.cumsum([0, *map(len, texts)]))
    assert found.dtype == np.int64 and found.tolist() == wanted.argmax(1).tolist()


def test_padding_alone_is_a_window_where_the_text_leaves_room(tmp_path):
    model = model_of()
    with torch.no_grad():
        for window in model.windows:
            window.weight.copy_(-window.weight.abs())
            window.bias.fill_(1.0)
        model.words.weight.abs_()
    classifier, texts = (
        Classifier.open(store(model, tmp_path)),
        documents(lengths=[0, 1, *range(13, LENGTH + 1), LENGTH + 4]),
    )
    wanted = predicted(model, texts)
    assert np.abs(asked(classifier, texts) - wanted).max() < 1e-5
    strongest = [len(np.unique(wanted[i])) and wanted[i, 0] for i in (1, len(texts) - 2)]
    assert abs(strongest[0] - strongest[1]) > 1e-4, "a full text has no window of padding"


def test_blocks_of_documents_change_nothing(place, monkeypatch):
    texts = documents(lengths=[3, 20, 1, 7, 7, 40, 2])
    whole = asked(Classifier.open(place), texts)
    for held in (1, 9, 30):
        monkeypatch.setattr(classifiers, "BLOCK", held)
        assert np.allclose(asked(Classifier.open(place), texts), whole, atol=1e-6)
    assert asked(Classifier.open(place), [np.empty(0, np.int64)]).shape == (1, 3)
    assert Classifier.open(place).probabilities([], [0]).shape == (0, 3)


def test_texts_become_classes(place):
    classifier, model = Classifier.open(place), model_of()
    ids = np.array([2, 1, 12])
    found = classifier.classify("Word0 strange, WORD10".replace(",", ""))
    wanted = predicted(model, [ids])[0]
    assert [item.label for item in found] == [CLASSES[i] for i in np.argsort(-wanted)]
    assert np.allclose([item.probability for item in found], np.sort(wanted)[::-1], atol=1e-5)
    assert classifier.classify("word0 strange word10", k=1) == found[:1]
    many = classifier.classify_many(["word0 strange word10", "word5"], k=2)
    assert [len(row) for row in many] == [2, 2] and many[0][1].label == found[1].label
    assert abs(many[0][1].probability - found[1].probability) < 1e-6
    assert classifier.classify_many([]) == []
    assert classifier.unknown("word0 strange, word10 strange") == ["strange", ","]
    assert repr(classifier) == "Classifier(cnn, 60 words, classes World, Sports, Sci/Tech)"
    for empty in ("", "  ", "---"):
        with pytest.raises(ArgumentError, match="text 2 of 2 holds no word"):
            classifier.classify_many(["word1", empty])
    for k in (0, -1, True):
        with pytest.raises(ArgumentError, match="give at least 1"):
            classifier.classify("word1", k=k)


@pytest.mark.parametrize(("weights", "within"), [("float16", 2e-3), ("int8", 0.05)])
def test_smaller_weights_are_close_and_small(weights, within, tmp_path):
    torch.manual_seed(0)
    model = TextCNN(fb.DenseTable(V, 64, padding_idx=0), 3, channels=50).eval()
    exact = stored_bytes(store(model, tmp_path / "exact"))
    place = store(model, tmp_path / "small", weights=weights)
    texts = documents()
    assert 0 < np.abs(asked(Classifier.open(place), texts) - predicted(model, texts)).max() < within
    saved = exact - stored_bytes(place)
    filters = sum(part.weight.numel() for part in model.windows)
    assert saved > filters * (1.95 if weights == "float16" else 2.9)
    assert stored_bytes(place) == sum(path.stat().st_size for path in place.iterdir())


def test_words_as_keys_or_as_a_list(tmp_path):
    model = model_of()
    keyed = fb.save(model.words, tmp_path / "t.safetensors", keys=WORDS)
    common = {"kind": "cnn", "classes": CLASSES, "length": LENGTH, "widths": (2, 3, 5)}
    write_classifier(tmp_path / "keys", keyed, model.arrays(), **common)
    write_classifier(tmp_path / "list", keyed, model.arrays(), words=WORDS, **common)
    one, other = (Classifier.open(tmp_path / name) for name in ("keys", "list"))
    assert one.classify("word3 strange word9") == other.classify("word3 strange word9")
    assert one.unknown("word3 strange") == other.unknown("word3 strange") == ["strange"]
    assert fb.load(tmp_path / "keys" / "words.safetensors")["word3"].shape == (DIM,)
    assert not (tmp_path / "keys" / "words.txt.xz").exists()
    assert (
        lzma.decompress((tmp_path / "list" / "words.txt.xz").read_bytes()).decode().split("\n")
        == WORDS
    )
    write_classifier(tmp_path / "list", keyed, model.arrays(), **common)
    assert not (tmp_path / "list" / "words.txt.xz").exists(), "written again it forgets what it had"
    assert Classifier.open(tmp_path / "list").classify("word3") == one.classify("word3")


def test_pieces_of_words(tmp_path):
    pytest.importorskip("tokenizers")
    from featherbed.io.texts import train_subwords

    tokenizer = train_subwords([f"{word} other{i % 3}" for i, word in enumerate(WORDS[2:])], V)
    classifier = Classifier.open(store(model_of(), tmp_path, tokenizer=tokenizer, words=None))
    assert classifier.unknown("never seen") == [] and classifier.vocabulary is None
    ids = classifier.encoder.ids("word1 other2")
    assert len(ids) and np.allclose(
        classifier.classify("word1 other2", k=1)[0].probability, predicted(model_of(), [ids]).max()
    )
    whole = (tmp_path / "tokenizer.json").read_bytes()
    for broken in (b"{", b"", whole[: len(whole) // 3], b"\xff"):
        (tmp_path / "tokenizer.json").write_bytes(broken)
        with pytest.raises(FormatError, match="tokenizer"):
            Classifier.open(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        Classifier.open(tmp_path)
    large = train_subwords([f"{word} {word[::-1]}x{i}" for i, word in enumerate(WORDS)], 2 * V)
    with pytest.raises(ArgumentError, match=f"the table has {V} rows"):
        store(model_of(), tmp_path, tokenizer=large, words=None)


def bad_arguments():
    yield {"classes": ["one"]}, "2 to 65,536 different names"
    yield {"classes": ["a", "a", "b"]}, "different names"
    yield {"classes": ["a", "b"]}, "takes the arrays"
    yield {"length": 4}, "none above the length 4"
    yield {"length": 0}, "length=0"
    yield {"weights": "int2"}, "use one of float32, float16, int8"
    yield {"words": WORDS[:-1]}, "59 words for 60 rows"
    yield {"words": [*WORDS[:-1], "word0"]}, "1 words occur twice"
    yield {"words": [*WORDS[:-1], "a\nb"]}, "cannot be a line"
    yield {"words": [*WORDS[:-1], ""]}, "cannot be a line"
    yield {"words": [*WORDS[:-1], "\ud800"]}, "UTF-8"
    yield {"words": WORDS[::-1]}, "must be <pad> and <unk>"
    yield {"words": None}, "no keys"
    yield {"about": {"x": {1}}}, "about must be plain JSON"
    yield {"about": {"x": float("nan")}}, "about must be plain JSON"


@pytest.mark.parametrize(("given", "message"), list(bad_arguments()))
def test_a_refused_classifier_leaves_the_old_one(given, message, place):
    before = {path.name: path.read_bytes() for path in place.iterdir()}
    with pytest.raises(ArgumentError, match=message):
        store(model_of(), place, **given)
    assert {path.name: path.read_bytes() for path in place.iterdir()} == before


def test_models_that_do_not_fit_are_refused(tmp_path):
    arrays = {"layer0.weight": np.ones((2, 4)), "layer0.bias": np.zeros(2)}
    common = {"classes": ["a", "b"], "words": ["<pad>", "<unk>", "x"]}
    table = fb.DenseTable(3, 4, padding_idx=0).pack()
    for kind, more, message in (
        ("tree", {}, "use one of bag, cnn"),
        ("bag", {"widths": (3,)}, "a bag has no widths"),
        ("cnn", {}, "a cnn has widths"),
    ):
        with pytest.raises(ArgumentError, match=message):
            write_classifier(tmp_path / "x", table, arrays, kind=kind, **common, **more)
    with pytest.raises(ArgumentError, match="padding_idx=None"):
        write_classifier(tmp_path / "x", fb.DenseTable(3, 4).pack(), arrays, kind="bag", **common)
    with pytest.raises(ArgumentError, match="not finite"):
        write_classifier(
            tmp_path / "x", table, arrays | {"layer0.bias": [np.nan, 0]}, kind="bag", **common
        )
    assert not (tmp_path / "x").exists()


def test_a_write_that_ends_early_leaves_no_classifier(place, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    (place / "metrics.json").write_text("{}")
    monkeypatch.setattr(bundles, "write_arrays", full)
    with pytest.raises(OSError, match="No space"):
        store(model_of(), place)
    with pytest.raises(
        FileNotFoundError, match=r"holds no classifier \(classifier.json is missing\)"
    ):
        Classifier.open(place)
    assert (place / "metrics.json").read_text() == "{}"


@pytest.mark.parametrize(
    "name", ["words.safetensors", "model.safetensors", "words.txt.xz", "classifier.json"]
)
def test_missing_and_cut_files(name, place):
    whole = (place / name).read_bytes()
    for broken in (whole[: len(whole) // 2], b"", whole[:-1], b"x" * len(whole)):
        if name == "classifier.json" and broken == whole[:-1]:
            continue  # the line break at its end
        (place / name).write_bytes(broken)
        with pytest.raises(FormatError, match=name.replace(".", r"\.")) as caught:
            Classifier.open(place)
        assert "\n" not in str(caught.value)
    (place / name).unlink()
    with pytest.raises(FileNotFoundError, match=name.replace(".", r"\.")):
        Classifier.open(place)


@pytest.mark.parametrize(
    "change",
    [
        {"classifier": 2}, {"classifier": True}, {"kind": "bag"}, {"kind": "tree"}, {"kind": []}, {"classes": ["a"]},
        {"classes": "ab"}, {"classes": [1, 2, 3]}, {"classes": ["a", "a", "b"]}, {"classes": ["a", "b"]}, {"words": 61},
        {"words": 1.5}, {"dim": 9}, {"dim": 0}, {"length": 0}, {"length": 4}, {"length": 1 << 40}, {"norm": 1}, {"norm": True},
        {"widths": []}, {"widths": [2, 3]}, {"widths": [2, 2, 3, 5]}, {"widths": [10**9]}, {"widths": 3}, {"channels": 8},
        {"channels": -1}, {"channels": 1 << 50}, {"hidden": [4]}, {"hidden": [True]}, {"hidden": [0]}, {"weights": "int8"},
        {"weights": "float64"}, {"vocabulary": "keys"}, {"vocabulary": "tokenizer"}, {"vocabulary": 7}, {"about": []},
    ],
)  # fmt: skip
def test_lies_in_the_json(change, place):
    said = json.loads((place / "classifier.json").read_text())
    (place / "classifier.json").write_text(json.dumps(said | change))
    with pytest.raises((FormatError, FileNotFoundError)) as caught:
        Classifier.open(place)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    for name in change:
        (place / "classifier.json").write_text(
            json.dumps({key: value for key, value in said.items() if key != name})
        )
        with pytest.raises(FormatError, match=f"lacks the field '{name}'"):
            Classifier.open(place)


@pytest.mark.parametrize("text", ["[]", "null", "{", "\xff", '{"kind": ' + "[" * 5000, "1" * 6000])
def test_json_that_is_no_object(text, place):
    (place / "classifier.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(FormatError, match=r"classifier\.json"):
        Classifier.open(place)


def test_files_that_would_fill_the_memory(place, monkeypatch):
    good = (place / "words.txt.xz").read_bytes()
    monkeypatch.setattr(bundles, "MAX_LIST", 1 << 16)
    for content in (
        lzma.compress(b"\0" * (1 << 17), preset=0),
        good + b"more",
        good + bytes(1 << 16),
    ):
        (place / "words.txt.xz").write_bytes(content)
        with pytest.raises(FormatError, match=r"words\.txt\.xz is truncated, or holds more"):
            Classifier.open(place)
    (place / "words.txt.xz").write_bytes(
        lzma.compress(b"a\nb", preset=9)
    )  # its dictionary alone is above what is allowed
    with pytest.raises(FormatError, match=r"words\.txt\.xz"):
        Classifier.open(place)
    monkeypatch.setattr(bundles, "MAX_JSON", 10)
    with pytest.raises(FormatError, match="the maximum is 10"):
        Classifier.open(place)


@pytest.mark.parametrize("words", [WORDS[:-1], [*WORDS, "more"], [*WORDS[:-1], "word0"]])
def test_lists_of_other_words(words, place):
    (place / "words.txt.xz").write_bytes(lzma.compress("\n".join(words).encode(), preset=1))
    with pytest.raises(FormatError, match=r"words\.txt\.xz holds .* not 60"):
        Classifier.open(place)
    (place / "words.txt.xz").write_bytes(lzma.compress(b"\xff\xfe", preset=1))
    with pytest.raises(FormatError, match="is not a list of words"):
        Classifier.open(place)


def test_broken_weights_and_tables_of_another(place):
    arrays = encode_weights(model_of().arrays(), "float32")
    path = place / "model.safetensors"
    for change in (
        {"layer0.bias": arrays["layer0.bias"][:-1]},
        {"layer0.weight": arrays["layer0.weight"].astype(np.float16)},
        {"layer0.weight": np.full_like(arrays["layer0.weight"], np.nan)},
        {"more": arrays["layer0.bias"]},
        {"layer0.bias": arrays["layer0.bias"][None]},
    ):
        write_arrays(path, {"weights": 1}, arrays | change)
        with pytest.raises(FormatError, match=r"model\.safetensors"):
            Classifier.open(place)
    write_arrays(path, {"titles": 1}, arrays)
    with pytest.raises(FormatError, match="is not what this featherbed reads as 'weights'"):
        Classifier.open(place)
    write_arrays(path, {"weights": 1}, arrays)
    rows = np.full((V, DIM), np.nan, dtype=np.float32)
    PackedTable([Band(V, Every(), values=Matrix.encode(rows, "float32"))], DIM).save(
        place / "words.safetensors"
    )
    with pytest.raises(FormatError, match="a score is not finite"):
        Classifier.open(place).classify("word1")
    PackedTable(
        [Band(V, Every(), values=Matrix.encode(rows, "float32"))], DIM, keys=Keys.of(WORDS)
    ).save(place / "words.safetensors")
    with pytest.raises(FormatError, match="holds 60 x 8 with keys"):
        Classifier.open(place)


def test_a_list_of_words_is_small(tmp_path):
    words = sorted(
        {
            f"{a}{b}{c}"
            for a in ("re", "un", "out")
            for b in ("run", "play", "go")
            for c in ("s", "ing", "er")
        }
    )
    write_words(tmp_path / "w.xz", words)
    assert read_words(tmp_path / "w.xz", len(words)) == words
    with pytest.raises(FileNotFoundError):
        read_words(tmp_path / "nowhere", 3)


def language_of(spec="dense", tied=True, hidden=DIM, layers=2, seed=0):
    torch.manual_seed(seed)
    table = fb.make_table(spec, V, DIM, generator=torch.Generator().manual_seed(seed))
    model = LSTMModel(table, hidden=hidden, layers=layers, tied=tied)
    for part in model.parameters():
        if part is not getattr(table, "transform", None):
            with torch.no_grad():
                part.add_(torch.randn(part.shape) * 0.3)
    return model.eval()


def store_language(model, folder, **more):
    cells = [[part.detach().numpy() for part in cell] for cell in model.layer_weights()]
    output = None if model.output is None else model.output.weight.detach().numpy()
    settings = {"words": ["<eos>", "<unk>", *WORDS[2:]], "output": output, **more}
    write_language(folder, model.table.pack(), cells, model.bias.detach().numpy(), **settings)
    return folder


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(
    ("tied", "hidden", "layers"), [(True, DIM, 2), (False, 11, 1), (True, DIM, 3)]
)
def test_perplexities_are_the_trained_models(spec, tied, hidden, layers, tmp_path):
    model = language_of(spec, tied, hidden, layers)
    server = check_language(store_language(model, tmp_path))
    text = np.random.default_rng(1).integers(V, size=333)
    wanted = perplexity(model, text, batch=5)
    assert abs(server.perplexity(text, batch=5) / wanted - 1) < 1e-5 and wanted > 5
    ids = torch.tensor([[3], [9], [4]])
    with torch.no_grad():
        logits = model(ids)[0][:, 0].numpy()
    state = server.initial_state(1)
    for place, id_ in enumerate(ids[:, 0].tolist()):
        assert np.allclose(
            server.logits(server.step(np.array([id_]), state))[0], logits[place], atol=1e-5
        )


def test_awd_models_are_served_too(tmp_path):
    torch.manual_seed(0)
    model = AWDLSTMModel(fb.AnchorTable(V, DIM, anchors=4), hidden=13, layers=3).eval()
    text = np.random.default_rng(1).integers(V, size=200)
    server = LanguageModel.open(store_language(model, tmp_path))
    assert server.shape.hidden == (13, 13, DIM)
    assert abs(server.perplexity(text, batch=4) / perplexity(model, text, batch=4) - 1) < 1e-5


def test_blocks_of_words_change_no_perplexity(tmp_path, monkeypatch):
    server, text = LanguageModel.open(store_language(language_of(), tmp_path)), np.arange(120) % V
    whole, many = server.perplexity(text, batch=3), server.logits(np.ones((2, DIM), np.float32))[:1]
    monkeypatch.setattr(languages, "MAX_LOGITS", 1)
    assert abs(server.perplexity(text, batch=3) / whole - 1) < 1e-6
    monkeypatch.setattr(languages, "FEW_WORDS", 1)
    assert np.allclose(server.logits(np.ones((1, DIM), np.float32)), many, atol=1e-6)
    with pytest.raises(ArgumentError, match="too few for 70 columns"):
        server.perplexity(text, batch=70)


def test_texts_go_on(tmp_path):
    server = LanguageModel.open(store_language(language_of(), tmp_path))
    text = server.continue_text("Word3 strange", words=40, seed=3)
    assert (
        text
        == server.continue_text("Word3 strange", words=40, seed=3)
        != server.continue_text("Word3 strange", 40, seed=4)
    )
    assert text.startswith("Word3 strange ") and "<unk>" not in text and "<eos>" not in text
    many = server.continue_text("", words=900, seed=0, temperature=3.0)
    assert "\n" in many and set(many.split()) == set(WORDS[2:]), (
        "every word but the unknown one comes up"
    )
    assert server.continue_text("word1", words=5, seed=1, temperature=0) == server.continue_text(
        "word1", 5, 2, 0.0
    )
    assert server.continue_text("word1", words=5, temperature=1e-300).startswith("word1 ")
    assert server.continue_text("word1 word2", words=0) == "word1 word2" and server.unknown(
        "word3 odd Word3 odd"
    ) == ["odd"]
    for more in (
        {"words": -1},
        {"words": 10**9},
        {"temperature": -1.0},
        {"temperature": float("nan")},
    ):
        with pytest.raises(ArgumentError, match=next(iter(more))):
            server.continue_text("word1", **more)
    assert repr(server) == "LanguageModel(60 words, layers 8 x 8, tied)"


def test_words_follow_their_probabilities(tmp_path):
    bias = np.log(np.array([0.2, 0.2, 0.3, 0.3]))
    cell = np.zeros((8, 2)), np.zeros((8, 2)), np.zeros(8), np.zeros(8)
    write_language(
        tmp_path, fb.DenseTable(4, 2).pack(), [cell], bias, words=["<unk>", "a", "b", "c"]
    )
    words = (
        LanguageModel.open(tmp_path)
        .continue_text("a", words=1500, seed=0, temperature=1.0)
        .split()[1:]
    )
    assert np.allclose(
        [words.count(word) / 1500 for word in "abc"], [0.25, 0.375, 0.375], atol=0.05
    )
    alone = fb.DenseTable(2, 2).pack()
    write_language(tmp_path, alone, [cell], np.zeros(2), words=["a", "b"])
    with pytest.raises(ArgumentError, match="'ale' is not known"):
        LanguageModel.open(tmp_path).continue_text("ale")


@pytest.mark.parametrize("weights", ["float16", "int8"])
def test_smaller_language_models(weights, tmp_path):
    model, text = language_of(), np.random.default_rng(1).integers(V, size=200)
    server = LanguageModel.open(store_language(model, tmp_path, weights=weights))
    assert 0 < abs(server.perplexity(text) / perplexity(model, text) - 1) < 0.02


@pytest.mark.parametrize(
    "change",
    [
        {"language": 2}, {"words": 61}, {"dim": 9}, {"hidden": []}, {"hidden": [8]}, {"hidden": [8, 9]}, {"hidden": [10**12]},
        {"hidden": "8"}, {"tied": False}, {"tied": 1}, {"weights": "int8"}, {"vocabulary": "keys"},
        {"vocabulary": "tokenizer"}, {"about": None},
    ],
)  # fmt: skip
def test_lies_about_a_language_model(change, tmp_path):
    store_language(language_of(), tmp_path)
    said = json.loads((tmp_path / "language.json").read_text())
    (tmp_path / "language.json").write_text(json.dumps(said | change))
    with pytest.raises(FormatError) as caught:
        LanguageModel.open(tmp_path)
    assert "\n" not in str(caught.value)


def test_language_models_that_do_not_fit(tmp_path):
    cell = np.zeros((8, 2)), np.zeros((8, 2)), np.zeros(8), np.zeros(8)
    table = fb.DenseTable(3, 2).pack()
    for cells, bias, more, message in (
        ([], np.zeros(3), {}, "0 layers"),
        ([cell], np.zeros(4), {}, "takes the arrays"),
        ([cell], np.zeros(3), {"words": ["a"]}, "1 words for 3 rows"),
        ([cell], np.zeros(3), {"output": np.zeros((3, 5))}, "takes the arrays"),
        (
            [(np.zeros((12, 2)), np.zeros((12, 3)), np.zeros(12), np.zeros(12))],
            np.zeros(3),
            {},
            "a last layer of width 2",
        ),
    ):
        with pytest.raises(ArgumentError, match=message):
            write_language(tmp_path / "x", table, cells, bias, **{"words": ["a", "b", "c"], **more})
    assert not (tmp_path / "x").exists()


def test_a_folder_is_one_model(place):
    store_language(language_of(), place)
    with pytest.raises(FileNotFoundError, match="holds no classifier"):
        Classifier.open(place)
    store(model_of(), place)
    with pytest.raises(FileNotFoundError, match="holds no language model"):
        LanguageModel.open(place)
    for opener in (Classifier, LanguageModel):
        with pytest.raises(FileNotFoundError, match="no such folder"):
            opener.open(place / "nowhere")
        with pytest.raises(FileNotFoundError, match="is not a folder"):
            opener.open(place / "model.safetensors")


def test_classifying_from_the_command_line(place, capsys, monkeypatch, tmp_path):
    classify(place, "Word3 strange word9")
    out, err = capsys.readouterr()
    best = Classifier.open(place).classify("word3 strange word9")
    assert out.splitlines() == [f"{item.probability:.4f}  {item.label}" for item in best]
    assert err == "note: not known to the model: strange\n"
    classify(place, "word3", k=1, json=True)
    found = json.loads(capsys.readouterr().out)
    assert (
        found["text"] == "word3"
        and found["unknown"] == []
        and set(found["classes"][0]) == {"label", "probability"}
    )
    for text, file, k, message in (
        ("", None, None, "holds no word"), ("...", None, None, "holds no word"), (None, None, None, "give one text"),
        ("a", tmp_path, None, "give one text"), ("word3", None, 0, "at least 1"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=message):
            classify(place, text, k, file=file)
    lines = tmp_path / "lines.txt"
    lines.write_text("word3\r\nword9 word4\n...\nword5")
    with pytest.raises(
        DataError, match=r"lines\.txt, line 3: the text holds no word; 1 of 4 lines have no class"
    ):
        classify(place, None, file=lines)
    rows = capsys.readouterr().out.splitlines()
    assert (
        len(rows) == 4
        and rows[2] == ""
        and rows[0].split("\t")[0] == Classifier.open(place).classify("word3")[0].label
    )
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"word3\nword4\n")))
    classify(place, None, k=2, json=True, file=lines.with_name("-").relative_to(tmp_path))
    assert [len(json.loads(line)["classes"]) for line in capsys.readouterr().out.splitlines()] == [
        2,
        2,
    ]
    for content, message in (
        (b"word3\nw\xff\n", "line 2: byte 2 is not UTF-8"),
        (b"", "holds no text"),
    ):
        lines.write_bytes(content)
        with pytest.raises(DataError, match=message):
            classify(place, None, file=lines)


def test_going_on_from_the_command_line(tmp_path, capsys):
    store_language(language_of(), tmp_path)
    continue_text(tmp_path, "word3 strange", words=4, seed=1)
    out, err = capsys.readouterr()
    assert out.rstrip("\n") == LanguageModel.open(tmp_path).continue_text(
        "word3 strange", words=4, seed=1
    )
    assert err == "note: not known to the model: strange\n"
    continue_text(tmp_path, "word3", words=4, seed=1, json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["continued"].startswith("word3 ") and found["seed"] == 1 and found["unknown"] == []


def test_nothing_acts_on_the_terminal():
    text = format_classes([ClassProbability("a\x1b[2J", 0.7), ClassProbability("日\r\n本", 0.3)])
    assert all(line.isprintable() for line in text.split("\n")) and len(text.split("\n")) == 2


def test_serving_needs_neither_torch_nor_numba(place, tmp_path_factory):
    other = store_language(language_of(), tmp_path_factory.mktemp("lm"))
    code = (
        "import sys; sys.modules['torch'] = sys.modules['numba'] = None\n"
        "from featherbed.cli.models import classify, continue_text\n"
        "classify(sys.argv[1], 'word3', 1); continue_text(sys.argv[2], 'word3', 3)\n"
        "print([m for m in ('polars', 'pyarrow', 'plotly', 'scipy', 'tokenizers') if m in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(place), str(other)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.splitlines()[-1] == "[]"


def test_copied_folders_answer_the_same(place, tmp_path_factory):
    copy = shutil.copytree(place, tmp_path_factory.mktemp("copy") / "there")
    assert Classifier.open(copy).classify("word3 word4") == Classifier.open(place).classify(
        "word3 word4"
    )
