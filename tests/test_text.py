"""Classifiers of texts: exact against plain convolutions, learning with every table, resumed and repeated runs."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import featherbed as fb
from featherbed.apps.classifier.data import ClassifierSettings, Documents, prepare, text_lexicon
from featherbed.apps.classifier.model import BagOfWords, TextCNN
from featherbed.apps.classifier.train import accuracy, fit_classifier, predict, sample_batches
from featherbed.apps.pipeline import Checkpoints
from featherbed.io.texts import LabeledTexts

COMMON = [f"common{n}" for n in range(30)]
TELLING = [[f"kind{c}word{n}" for n in range(6)] for c in range(3)]


def planted_texts(count=400, seed=0):
    """Texts of common words, two of which are replaced by words that tell the class."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(3, size=count)
    texts = []
    for label in labels:
        words = list(rng.choice(COMMON, size=rng.integers(4, 13)))
        words[1], words[-2] = rng.choice(TELLING[label], size=2)
        texts.append(" ".join(words))
    return LabeledTexts(texts, labels, ("a", "b", "c"))


PLANTED = prepare(planted_texts())
SMALL = {
    "epochs": 12,
    "batch": 32,
    "lr": 0.02,
    "channels": 8,
    "widths": (2, 3),
    "dropout": 0.1,
    "patience": 12,
}


NAMES = {line.name.rpartition(".")[2]: line.name for line in ClassifierSettings.describe()}


def settings_of(words=None, model="cnn", **given):
    """Settings by their last names; ``words`` are those of the table."""
    values = {f"table.{name}": value for name, value in (words or {}).items()}
    values |= {NAMES[name]: value for name, value in given.items()}
    return ClassifierSettings.from_values({"table.spec": "dense", "model.kind": model} | values)


def fit(data=PLANTED, seed=0, checkpoints=None, words=None, **given):
    settings = settings_of({"dim": 12} | (words or {}), **(SMALL | given))
    return fit_classifier(settings, data, seed=seed, progress=False, checkpoints=checkpoints)


def plain_cnn(model, ids):
    """Return the logits by torch's convolutions over whole rows."""
    rows = model.words(ids).transpose(1, 2)
    found = torch.cat([F.relu(window(rows)).amax(2) for window in model.windows], 1)
    return model.output(model.dropout(found))


@pytest.mark.parametrize(
    "spec",
    [
        "dense",
        "anchor:anchors=4",
        "anchor:anchors=6,slots=2",
        "mixture:anchors=3",
        "lowrank:rank=3",
        "hashed:buckets=20",
        "selected:keep=9",
    ],
)
def test_the_cnn_is_a_plain_cnn(spec, tensors):
    table = fb.make_table(spec, 60, 8, padding_idx=0, generator=tensors)
    model = TextCNN(table, 3, channels=5).eval()
    ids = torch.randint(1, 60, (9, 14), generator=tensors)
    ids[3:, 9:] = 0
    ours = model(ids)
    ours.square().sum().backward()
    mine = {
        name: p.grad.to_dense() if p.grad.is_sparse else p.grad.clone()
        for name, p in model.named_parameters()
    }
    model.zero_grad()
    plain = plain_cnn(model, ids)
    plain.square().sum().backward()
    assert torch.allclose(ours, plain, atol=1e-5)
    for name, parameter in model.named_parameters():
        theirs = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
        assert torch.allclose(mine[name], theirs, atol=1e-4), name


def test_padding_to_the_longest_text_is_padding_to_the_limit(tensors):
    model = TextCNN(fb.DenseTable(50, 6, padding_idx=0, generator=tensors), 4, channels=7).eval()
    with torch.no_grad():
        for window in model.windows:
            window.bias.add_(1.0)  # the window of padding alone is often the strongest
    lengths = np.arange(1, 101)
    ids = np.concatenate([np.random.default_rng(n).integers(1, 50, n) for n in lengths]).astype(
        np.int32
    )
    documents = Documents(ids, np.append(0, np.cumsum(lengths)), np.zeros(100, dtype=np.int64))
    full = torch.zeros(100, 100, dtype=torch.int64)
    for row, n in enumerate(lengths):
        full[row, :n] = torch.from_numpy(
            ids[documents.offsets[row] : documents.offsets[row + 1]].astype(np.int64)
        )
    with torch.no_grad():
        whole = plain_cnn(model, full)
        for row in range(100):
            alone = model.logits(documents, np.array([row]), 100)
            assert torch.allclose(alone[0], whole[row], atol=1e-5), lengths[row]
        together = model.logits(documents, np.array([2, 50, 30]), 100)
        assert torch.allclose(together, whole[[2, 50, 30]], atol=1e-5)


def test_a_text_shorter_than_a_window(tensors):
    model = TextCNN(fb.DenseTable(20, 6, padding_idx=0, generator=tensors), 2, channels=3).eval()
    assert torch.allclose(model(torch.tensor([[4]])), model(torch.tensor([[4, 0, 0, 0, 0]])))


@pytest.mark.parametrize("hidden", [None, 5])
def test_a_bag_is_the_mean_of_its_rows(hidden, tensors):
    table = fb.AnchorTable(30, 6, anchors=4, padding_idx=0, generator=tensors)
    model = BagOfWords(table, 3, hidden=hidden).eval()
    ids = torch.tensor([[3, 4, 4, 0], [5, 0, 0, 0]])
    mean = torch.stack([table(torch.tensor([3, 4, 4])).mean(0), table(torch.tensor([5])).mean(0)])
    expected = model.output(model.hidden(mean))
    assert torch.allclose(model(ids), expected, atol=1e-6)
    assert torch.allclose(
        model.pooled(torch.tensor([3, 4, 4, 5]), torch.tensor([0, 3])), expected, atol=1e-6
    )


@pytest.mark.parametrize("model", ["cnn", "bag"])
@pytest.mark.parametrize(
    "words",
    [
        {},
        {"sse": 0.05},
        {"spec": "anchor:anchors=4"},
        {"spec": "anchor:anchors=6,slots=3", "selection": "frequency"},
        {
            "spec": "anchor:anchors=4",
            "selection": "tfidf",
            "domain": ("cooccurrence",),
            "lam": 1e-3,
        },
        {"spec": "mixture:anchors=[3,3]", "selection": "random", "domain": ("cooccurrence",)},
        {"spec": "selected:keep=20", "selection": "lasso"},
        {"spec": "kd:choices=4,parts=6"},
        {"spec": "product:choices=4,parts=4"},
        {"spec": "hashed:buckets=30"},
    ],
    ids=lambda words: words.get("spec", "dense"),
)
def test_every_table_learns(model, words):
    fitted = fit(
        model=model, words=words, optimizer="yogi" if "slots" in words.get("spec", "") else "adam"
    )
    assert fitted.result.metrics["validation"]["accuracy"] > 0.8
    assert (
        accuracy(fitted.model, PLANTED.validation)
        == fitted.result.metrics["validation"]["accuracy"]
    )
    best = max(row["validation_accuracy"] for row in fitted.result.history)
    assert fitted.result.metrics["validation"]["accuracy"] == pytest.approx(best)
    table = fitted.words.table
    assert table.pruned_parameter_count() == table.parameter_count()


def test_a_budget_of_weights_is_kept():
    fitted = fit(
        words={"spec": "anchor:anchors=4", "selection": "frequency", "nonzeros": 60, "lam": 1e-4}
    )
    assert int(torch.count_nonzero(fitted.words.table.transform)) <= 60
    assert fitted.result.metrics["validation"]["accuracy"] > 0.8


def test_group_lasso_empties_rows_and_trains_the_others_on():
    fitted = fit(words={"selection": "lasso", "lam": 2.0, "init_std": 0.05})
    rows = fitted.words.table.weight.detach()
    kept = int(rows.any(1).sum())
    assert 3 <= kept < 40
    assert fitted.words.table.pruned_parameter_count() == (kept + 1) * 12  # with the padding
    assert fitted.result.metrics["validation"]["accuracy"] > 0.8


@pytest.mark.parametrize("noise", ["row", "weight", "both"])
def test_variational_tables_learn_and_drop(noise):
    fitted = fit(words={"spec": f"variational:noise={noise}"}, epochs=20)
    assert fitted.result.metrics["validation"]["accuracy"] > 0.8
    assert fitted.words.table.share == 1.0
    assert fitted.words.table.pruned_parameter_count() < len(PLANTED.vocabulary.words) * 12


def test_a_tensor_train_learns_and_has_no_file():
    fitted = fit(words={"spec": "tensortrain:rank=4"})
    assert fitted.result.metrics["validation"]["accuracy"] > 0.8
    table = fitted.words.table
    assert table.pruned_parameter_count() == table.parameter_count()


def test_runs_repeat_and_depend_on_the_seed():
    ends = [fit(epochs=2, seed=seed).words.table.weight for seed in (0, 0, 1)]
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


@pytest.mark.parametrize(
    "words",
    [
        {"spec": "anchor:anchors=4", "selection": "frequency", "nonzeros": 60},
        {"sse": 0.1},
        {"spec": "kd:choices=4,parts=4"},
    ],
)
def test_a_stopped_run_goes_on_as_if_it_had_not_been(words, tmp_path, monkeypatch):
    settings = {"epochs": 4, "cosine": True, "words": words}
    whole = fit(**settings)
    stop = Checkpoints(tmp_path)
    saved = stop.save

    def save_and_stop(step, **state):
        saved(step, **state)
        if step == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(stop, "save", save_and_stop)
    assert fit(**settings, checkpoints=stop).result.interrupted
    resumed = fit(**settings, checkpoints=Checkpoints(tmp_path))
    assert len(resumed.result.history) == 4
    assert resumed.result.metrics == whole.result.metrics
    assert torch.equal(resumed.words.table.weight, whole.words.table.weight)


def test_batches_hold_every_text_once_and_differ():
    def drawn(seed, by_length):
        return list(
            sample_batches(PLANTED.train, 16, torch.Generator().manual_seed(seed), by_length)
        )

    for by_length in (True, False):
        assert sorted(np.concatenate(drawn(0, by_length))) == list(range(len(PLANTED.train)))
        assert not np.array_equal(
            np.concatenate(drawn(0, by_length)), np.concatenate(drawn(1, by_length))
        )
    widths = [np.ptp(PLANTED.train.lengths[index]) for index in drawn(0, True)]
    assert np.mean(widths) < np.mean(
        [np.ptp(PLANTED.train.lengths[index]) for index in drawn(0, False)]
    )


def test_predictions_do_not_depend_on_the_order_of_texts():
    fitted = fit(epochs=2)
    order = np.random.default_rng(0).permutation(len(PLANTED.validation))
    there = predict(fitted.model, PLANTED.validation.take(order))
    assert np.array_equal(there, predict(fitted.model, PLANTED.validation)[order])


def test_the_lexicon_is_of_the_training_part():
    lexicon = text_lexicon(PLANTED, 5)
    assert lexicon.documents().shape == (len(PLANTED.train), len(PLANTED.vocabulary.words))
    assert np.array_equal(
        np.asarray(lexicon.documents().sum(axis=0)).reshape(-1), PLANTED.vocabulary.counts
    )
    near = lexicon.cooccurrence()
    first = PLANTED.train.ids[: PLANTED.train.offsets[1]]
    assert first[0] == first[1] or near[first[0], first[1]] > 0
    assert lexicon.samples == len(PLANTED.train)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "tree"}, "use one of cnn, bag"),
        ({"optimizer": "sgd"}, "use one of adam, yogi"),
        ({"epochs": 0}, "epochs=0"),
        ({"batch": 1.5}, "batch=1.5"),
        ({"lr": 0.0}, "lr=0.0"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"hidden": 5}, "the cnn has no hidden layer"),
        ({"decay": 0.1, "optimizer": "yogi"}, "yogi has no weight decay"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(fb.ArgumentError, match=message):
        settings_of(**settings)


def test_bad_shapes_of_classifiers_are_refused():
    table = fb.DenseTable(5, 4)
    with pytest.raises(fb.ArgumentError, match="widths"):
        TextCNN(table, 2, widths=())
    with pytest.raises(fb.ArgumentError, match="hidden=0"):
        BagOfWords(table, 2, hidden=0)


def test_settings_are_recorded():
    fitted = fit(epochs=1)
    assert fitted.result.settings == settings_of({"dim": 12}, **(SMALL | {"epochs": 1})).values()
    assert fitted.result.settings["table.dim"] == 12
