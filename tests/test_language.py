"""Language models over any table: exact losses, every kind of dropout, averages, resuming, continuations."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import featherbed as fb
from featherbed.apps import pipeline as training
from featherbed.apps.language import train as fitting
from featherbed.apps.language.data import columns, corpus_lexicon, segments
from featherbed.apps.language.model import AllRows, AWDLSTMModel, LSTMModel, locked_dropout
from featherbed.apps.language.settings import DropoutSettings, LanguageSettings
from featherbed.apps.language.train import LanguageRun, fit_language, perplexity
from featherbed.apps.pipeline import Checkpoints, RunOptions
from featherbed.apps.words import build_word_table
from featherbed.io.texts import Corpus
from featherbed.optim import Averaged, penalties_of

WORDS = 12
SPECS = [
    "dense",
    "anchor:anchors=4",
    "anchor:anchors=10,slots=3",
    "lowrank:rank=3",
    "hashed:buckets=7",
    "selected:keep=5",
]


def chain(count=5000):
    """A text in which the next word is one or two further on: its perplexity is 2."""
    steps = np.cumsum(np.random.default_rng(0).integers(1, 3, size=count)) % WORDS
    names = ("<eos>", "<unk>", *map(str, range(WORDS - 2)))
    cut = [int(0.6 * count), int(0.8 * count)]
    return Corpus(names, np.bincount(steps, minlength=WORDS), *np.split(steps, cut))


NAMES = {
    "model": "model.kind",
    "optimizer": "optimizer.kind",
    "dropout": "dropout.output",
    **{f"drop_{name}": f"dropout.{name}" for name in ("words", "input", "layers", "weights")},
    **{name: f"dropout.{name}" for name in ("ar", "tar")},
    **{name: f"model.{name}" for name in ("hidden", "layers", "tied", "softmax", "samples")},
}


def recipe(spec="dense", **given):
    """Settings by their last names."""
    known = [line.name for line in LanguageSettings.describe()]
    names = {name.rpartition(".")[2]: name for name in known if not name.startswith("dropout.")}
    small = {"layers": 1, "epochs": 3, "batch": 10, "length": 12, "dropout": 0.0, "lr": 0.02}
    values = {**small, "clip": 1.0, "init_std": 0.3, **given}
    values = {(names | NAMES)[name]: value for name, value in values.items()}
    return LanguageSettings.from_values({"table.spec": spec, "table.dim": 16, **values})


def fit(asked, corpus=None, **given):
    return fit_language(asked, chain() if corpus is None else corpus, progress=False, **given)


def text(rows=7, wide=3, seed=0):
    return torch.randint(WORDS, (rows, wide), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("spec", [*SPECS, "mixture:anchors=3,sets=2", "kd:choices=4,parts=3"])
def test_tied_tables_have_the_loss_and_gradients_of_dense_rows(spec):
    torch.manual_seed(0)
    model = LSTMModel(fb.make_table(spec, WORDS, 16), hidden=16, dropout=0.0)
    nn.init.normal_(model.bias)
    if spec.startswith("kd"):
        model.eval()  # in training its inputs are relaxed
    ids, targets = text(), text(seed=1)
    rows = model.table.weight.detach().clone().requires_grad_()
    hidden, _ = model.lstm(F.embedding(ids, rows))
    wanted = F.cross_entropy(F.linear(hidden, rows, model.bias).flatten(0, 1), targets.flatten())
    by_rows, bias, *inner = torch.autograd.grad(
        wanted, [rows, model.bias, *model.lstm.parameters()]
    )
    held = [p for p in model.table.parameters() if p.requires_grad]
    through = torch.autograd.grad(model.table.weight, held, by_rows, allow_unused=True)
    found = model.losses(ids, targets)
    found.total.backward()
    assert float(found.cross_entropy.detach()) == pytest.approx(float(wanted.detach()), abs=1e-5)
    for own, oracle in zip([model.bias, *model.lstm.parameters()], [bias, *inner], strict=True):
        assert torch.allclose(own.grad, oracle, atol=1e-5)
    for own, oracle in zip(held, through, strict=True):
        if oracle is not None:
            assert torch.allclose(own.grad.to_dense(), oracle.to_dense(), atol=1e-5)


def test_logits_go_through_fewer_atoms_than_columns():
    shapes = {spec: AllRows.of(fb.make_table(spec, WORDS, 16)).values.shape for spec in SPECS}
    assert shapes["anchor:anchors=4"] == (WORDS, 4)
    assert shapes["lowrank:rank=3"] == (WORDS, 3)
    assert {
        shapes[spec] for spec in ("dense", "anchor:anchors=10,slots=3", "hashed:buckets=7")
    } == {(WORDS, 16)}
    table = fb.make_table("anchor:anchors=4", WORDS, 16)
    hidden = torch.randn(5, 16)
    assert torch.allclose(
        AllRows.of(table).logits(hidden, torch.zeros(WORDS)), table.logits(hidden), atol=1e-5
    )


@pytest.mark.parametrize("model", ["lstm", "awd"])
def test_losses_are_those_of_the_logits(model):
    torch.manual_seed(0)
    kind = LSTMModel if model == "lstm" else AWDLSTMModel
    net = kind(fb.AnchorTable(WORDS, 8, anchors=3), hidden=8, layers=2).eval()
    ids, targets = text(), text(seed=1)
    logits, _ = net(ids)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert torch.allclose(net.losses(ids, targets).total, expected, atol=1e-6)
    first, state = net(ids[:3])
    second, _ = net(ids[3:], state)
    assert torch.allclose(torch.cat([first, second]), logits, atol=1e-5)


def test_locked_dropout_is_the_same_at_all_places_and_keeps_the_mean():
    torch.manual_seed(0)
    out = locked_dropout(torch.ones(6, 40, 50), 0.25, True)
    assert torch.equal(out, out[:1].expand_as(out))
    assert not torch.equal(out[0, 0], out[0, 1])
    assert float(out.mean()) == pytest.approx(1.0, abs=0.05)
    rows = torch.randn(3, 2, 5)
    assert locked_dropout(rows, 0.5, False) is rows


@pytest.mark.parametrize("spec", ["dense", "anchor:anchors=10,slots=3"])
def test_words_are_dropped_everywhere_or_nowhere(spec):
    torch.manual_seed(0)
    model = LSTMModel(fb.make_table(spec, WORDS, 16), hidden=16, word_dropout=0.5)
    ids = torch.arange(WORDS).repeat(4, 1)
    rows = model.input_rows(ids, model.all_rows())
    gone = (rows == 0).all(-1)
    assert torch.equal(gone, gone[:1].expand_as(gone))
    assert 0 < int(gone[0].sum()) < WORDS
    assert torch.allclose(rows[~gone], 2 * model.table.weight[ids][~gone], atol=1e-5)
    assert torch.allclose(model.eval().input_rows(ids), model.table.weight[ids], atol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_shared_ids_are_replaced_in_training_only(tied):
    shared = fb.SSE(
        fb.DenseTable.from_dense(torch.eye(WORDS)),
        p=1.0,
        generator=torch.Generator().manual_seed(0),
    )
    model = LSTMModel(shared, hidden=WORDS, tied=tied)
    ids = text()
    rows = model.input_rows(ids, model.all_rows())
    assert torch.equal(rows.sum(-1), torch.ones(ids.shape))
    assert not (rows.argmax(-1) == ids).any()
    assert torch.equal(model.eval().input_rows(ids, model.all_rows()).argmax(-1), ids)


def test_weight_drop_leaves_out_weights_and_only_in_training():
    off = DropoutSettings(output=0.0, words=0.0, input=0.0, layers=0.0, weights=0.5)
    torch.manual_seed(0)
    model = AWDLSTMModel(fb.DenseTable(WORDS, 8), hidden=10, layers=2, dropout=off)
    ids = text()
    assert not torch.equal(model(ids)[0], model(ids)[0])
    kept = [p.detach().clone() for p in model.parameters()]
    model.losses(ids, ids).total.backward()
    shares = [float((layer.weight_hh_l0.grad == 0).double().mean()) for layer in model.layers]
    assert all(0.3 < share < 0.7 for share in shares)
    assert all(torch.equal(a, b) for a, b in zip(kept, model.parameters(), strict=True))
    model.eval()
    rows = model.table(ids)
    for layer in model.layers:
        rows, _ = layer(rows)
    assert torch.allclose(model(ids)[0], F.linear(rows, model.table.weight, model.bias), atol=1e-5)


def test_activations_and_their_changes_are_penalised():
    names = ("output", "words", "input", "layers", "weights")
    off = DropoutSettings(**dict.fromkeys(names, 0.0), ar=2.0, tar=3.0)
    torch.manual_seed(0)
    model = AWDLSTMModel(fb.DenseTable(WORDS, 8), hidden=10, layers=2, dropout=off)
    rows = model.table(text())
    found = model.run(rows, None)
    hidden = found.hidden
    wanted = 2 * hidden.square().mean() + 3 * (hidden[1:] - hidden[:-1]).square().mean()
    assert torch.allclose(found.penalty, wanted)
    losses = model.losses(text(), text(seed=1))
    assert torch.allclose(losses.total - losses.cross_entropy, wanted, atol=1e-6)
    assert model.eval().run(rows, None).penalty == 0.0


def test_perplexity_of_a_known_chain_is_two():
    """Rows and net that know the chain: the hidden vector of word w is twice as near to w + 1 and w + 2 as to any other."""

    class Known(LSTMModel):
        def run(self, rows, state):
            found = super().run(rows, state)
            return found._replace(hidden=50 * (rows.roll(1, -1) + rows.roll(2, -1)))

    table = fb.DenseTable.from_dense(torch.eye(WORDS))
    model = Known(table, hidden=WORDS, layers=1, dropout=0.0)
    assert perplexity(model, chain().validation) == pytest.approx(2.0, abs=1e-4)
    even = LSTMModel(fb.DenseTable.from_dense(torch.zeros(WORDS, 4)), hidden=4)
    assert perplexity(even, chain().validation) == pytest.approx(WORDS, abs=1e-3)


@pytest.mark.parametrize("spec", [*SPECS, "kd:choices=8,parts=4"])
def test_recipes_learn_a_chain(spec):
    fitted = fit(recipe(spec, epochs=5))
    history = fitted.result.history
    assert fitted.result.metrics["validation"]["perplexity"] < (
        6 if spec[:2] in ("ha", "se", "kd") else 3
    )
    assert history[0]["tokens_per_second"] > 0
    assert fitted.result.metrics["validation"]["perplexity"] == pytest.approx(
        min(row["validation_perplexity"] for row in history), rel=1e-5
    )
    assert history[-1]["parameters"] == fitted.words.table.parameter_count()


@pytest.mark.parametrize("tied", [True, False])
def test_a_sampled_softmax_learns_and_is_measured_over_all_words(tied):
    fitted = fit(recipe("anchor:anchors=6", softmax="sampled", samples=5, tied=tied, epochs=5))
    assert fitted.model.samples == 5
    assert fitted.model.train().all_rows() is None
    assert fitted.model.eval().all_rows() is not None
    assert fitted.result.metrics["validation"]["perplexity"] < 3.5


@pytest.mark.parametrize("optimizer", ["yogi", "sgd", "ntasgd"])
def test_awd_models_learn_by_every_rule(optimizer):
    rate = {"yogi": 0.03, "sgd": 3.0, "ntasgd": 3.0}[optimizer]
    asked = recipe(
        "anchor:anchors=6", model="awd", layers=2, optimizer=optimizer, lr=rate, random_length=True, epochs=6, averaging=1,
        drop_input=0.0, drop_layers=0.0, drop_weights=0.1, ar=0.1, tar=0.1,
    )  # fmt: skip
    assert fit(asked).result.metrics["validation"]["perplexity"] < 4


@pytest.mark.parametrize(
    "spec", ["anchor:anchors=6", "anchor:anchors=6,slots=3", "mixture:anchors=3,sets=2"]
)
def test_weights_of_anchors_have_a_rate_of_their_own(spec):
    ends = {}
    for rate in (None, 1e-9):
        fitted = fit(recipe(spec, transform_lr=rate, cosine=False, epochs=1))
        begun = build_word_table(recipe(spec).table, corpus_lexicon(chain()), 0).table
        ends[rate] = [
            float((getattr(fitted.words.table, name) - getattr(begun, name)).abs().max().detach())
            for name in ("transform", "atoms")
        ]
        assert sum(len(group["params"]) for group in fitted.optimizer.param_groups) == len(
            list(fitted.model.parameters())
        )
    assert ends[1e-9][0] < 1e-3 < ends[None][0]  # weights stay where they began, all else is learnt
    assert ends[1e-9][1] > 1e-3


def test_a_budget_of_weights_is_kept():
    fitted = fit(recipe("anchor:anchors=6", nonzeros=30, lam=1e-5, epochs=4))
    assert int(torch.count_nonzero(fitted.words.table.transform)) <= 30
    assert fitted.result.metrics["validation"]["perplexity"] == pytest.approx(
        perplexity(fitted.model, chain().validation)
    )


@pytest.mark.parametrize(
    "given",
    [
        {"spec": "anchor:anchors=10,slots=3", "lam": 1e-5, "dropout": 0.2, "sse": 0.1},
        {
            "spec": "anchor:anchors=6",
            "model": "awd",
            "layers": 2,
            "random_length": True,
            "nonzeros": 40,
        },
        {
            "spec": "anchor:anchors=10,slots=3",
            "optimizer": "ntasgd",
            "lr": 3.0,
            "lam": 1e-5,
            "patience": 9,
        },
    ],
    ids=["slots", "awd", "averaged"],
)
def test_resumed_training_ends_as_uninterrupted(given, tmp_path, monkeypatch):
    given = {"epochs": 4, **given}
    small = chain(2000)
    monkeypatch.setattr(
        Averaged, "observe", lambda self, value: self.start()
    )  # after the first epoch, whatever the value
    whole = fit(recipe(**given), small, checkpoints=Checkpoints(tmp_path / "whole"))
    calls, record = [], training.Training.record

    def interrupted(self, row):
        record(self, row)
        calls.append(row)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(training.Training, "record", interrupted)
        first = fit(recipe(**given), small, checkpoints=Checkpoints(tmp_path / "parts"))
    assert first.result.interrupted
    assert len(first.result.history) == 2
    second = fit(recipe(**given), small, checkpoints=Checkpoints(tmp_path / "parts"))
    if given.get("optimizer") == "ntasgd":
        assert whole.optimizer.count == second.optimizer.count > first.optimizer.count > 0
    names = ("train_perplexity", "validation_perplexity", "parameters")
    for a, b in zip(whole.result.history, second.result.history, strict=True):
        assert [a[name] for name in names] == [b[name] for name in names]
    for a, b in zip(
        whole.model.state_dict().values(), second.model.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "spec", ["anchor:anchors=10,slots=3", "anchor:anchors=6", "lowrank:rank=6", "hashed:buckets=9"]
)
def test_tables_are_fitted_to_plain_rows_after_the_first_epochs(spec):
    found = fit(recipe(spec, epochs=4, dense_epochs=2))
    plain = fit(recipe(epochs=4))
    names = ("train_perplexity", "validation_perplexity")
    for own, row in zip(found.result.history[:2], plain.result.history[:2], strict=True):
        assert [own[name] for name in names] == [row[name] for name in names], (
            "the first epochs are those of plain rows"
        )
    assert [row["epoch"] for row in found.result.history] == [0, 1, 2, 3]
    assert type(found.words.table) is type(fb.make_table(spec, WORDS, 16))
    assert found.result.history[-1]["parameters"] == found.words.table.parameter_count()
    assert perplexity(found.model, chain().test) < 6, "of 12 words, 2 of which are possible"
    assert "fitted to dense rows after 2 epochs" in found.notes[-1]


def test_a_fit_starts_where_plain_rows_end(monkeypatch):
    started = []
    real = fitting.fit_table

    def kept(first, asked, corpus, seed):
        made, model = real(first, asked, corpus, seed)
        started.append(
            (perplexity(first.model, corpus.validation), perplexity(model, corpus.validation))
        )
        return made, model

    monkeypatch.setattr(fitting, "fit_table", kept)
    fit(recipe("anchor:anchors=12,slots=8", epochs=3, dense_epochs=2))
    ((before, after),) = started
    assert after == pytest.approx(before, rel=0.1), "12 anchors and 8 weights hold 12 rows"


@pytest.mark.parametrize("epoch", [1, 3])  # of plain rows, of the table
def test_a_fit_to_plain_rows_is_resumed_in_either_stage(epoch, tmp_path, monkeypatch):
    asked, small = recipe("anchor:anchors=6,slots=3", epochs=4, dense_epochs=2), chain(2000)
    whole = fit(asked, small)
    calls, record = [], training.Training.record

    def interrupted(self, row):
        record(self, row)
        calls.append(row)
        if len(calls) == epoch:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(training.Training, "record", interrupted)
        first = fit(asked, small, checkpoints=Checkpoints(tmp_path / "parts"))
    assert first.result.interrupted
    assert first.words.table.slots == 3, "an interrupted run leaves the table that was asked for"
    assert len(first.result.history) == epoch
    second = fit(asked, small, checkpoints=Checkpoints(tmp_path / "parts"))
    assert not second.result.interrupted
    for a, b in zip(
        whole.model.state_dict().values(), second.model.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b)
    Checkpoints(tmp_path / "parts").clear()
    assert not (tmp_path / "parts").exists()


@pytest.mark.parametrize(
    ("spec", "given", "message"),
    [
        ("anchor:anchors=4", {"dense_epochs": 3}, "give a whole number from 0 to 2"),
        ("anchor:anchors=4", {"dense_epochs": -1}, "give a whole number of at least 0"),
        ("dense", {"dense_epochs": 1}, "all epochs of 'dense' train dense rows"),
        (
            "anchor:anchors=4",
            {"dense_epochs": 1, "selection": "frequency"},
            "correspond to no words",
        ),
    ],
)
def test_what_cannot_be_fitted_to_plain_rows(spec, given, message):
    with pytest.raises(fb.ArgumentError, match=message):
        recipe(spec, **given)


def test_seeds_decide():
    ends = [
        fit(recipe("anchor:anchors=6", epochs=1, dropout=0.2), seed=seed).result.history[0]
        for seed in (0, 0, 1)
    ]
    found = [row["validation_perplexity"] for row in ends]
    assert found[0] == found[1] != found[2]


def test_averages_are_means_of_the_iterates():
    torch.manual_seed(0)
    table = fb.AnchorTable(20, 6, anchors=5, slots=2, scan_every=2)
    penalties = {table.transform: fb.NonNegativeL1(0.3)}
    averaged = Averaged(fb.SGD(table.parameters(), lr=0.1, penalties=penalties))
    assert penalties_of(averaged).keys() == penalties.keys()
    seen = []
    for step in range(8):
        if step == 3:
            averaged.start()
            support = table.support.clone()
        averaged.zero_grad()
        (table(torch.arange(step, step + 6)) - 1).square().sum().backward()
        averaged.step()
        if step >= 3:
            seen.append([table.transform.detach().clone(), table.atoms.detach().clone()])
    assert torch.equal(table.support, support), "rows change their anchors no longer"
    transforms, atoms = (torch.stack(parts) for parts in zip(*seen, strict=True))
    sparse = (transforms[-1] == 0) & (transforms.mean(0) != 0)
    assert sparse.any(), "the case that a mean is not as sparse as the last iterate must occur"
    with averaged.swapped():
        assert torch.allclose(table.atoms, atoms.mean(0), atol=1e-6)
        assert torch.allclose(
            table.transform, torch.where(transforms[-1] == 0, 0.0, transforms.mean(0)), atol=1e-6
        )
        with pytest.raises(fb.ArgumentError, match="leave the block"):
            averaged.step()
        stored = copy.deepcopy((table.state_dict(), averaged.state_dict()))
    assert torch.equal(table.transform, transforms[-1])
    other = fb.AnchorTable(20, 6, anchors=5, slots=2, scan_every=2)
    again = Averaged(
        fb.SGD(other.parameters(), lr=0.1, penalties={other.transform: fb.NonNegativeL1(0.3)})
    )
    other.load_state_dict(stored[0])
    again.load_state_dict(stored[1])
    assert torch.equal(other.transform, transforms[-1])
    assert again.count == 5
    assert all(torch.equal(a, b) for a, b in zip(again.means, averaged.means, strict=True))


def test_averaging_starts_when_validation_no_longer_falls():
    averaged = Averaged(fb.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), patience=2)
    values = [
        9.0,
        8.0,
        7.0,
        8.5,
        7.5,
        7.4,
    ]  # 7.4 is the first above the lowest of those more than two epochs old
    assert [averaged.observe(value) for value in values] == [False] * 5 + [True]
    with averaged.swapped():
        assert averaged.last is None  # no step yet, so nothing to swap
    with pytest.raises(fb.ArgumentError, match="give an optimizer"):
        Averaged("sgd")
    with pytest.raises(fb.ArgumentError, match="patience=-1"):
        Averaged(fb.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), patience=-1)


def test_pieces_cover_the_text_once():
    for draw in (None, (0, 0), (0, 1)):
        cuts = segments(1000, 35, draw)
        assert (cuts[0][0], cuts[-1][1]) == (0, 1000)
        assert all(a[1] == b[0] for a, b in itertools.pairwise(cuts))
    assert segments(1000, 35, (0, 0)) == segments(1000, 35, (0, 0)) != segments(1000, 35, (0, 1))
    assert min(stop - start for start, stop in segments(5000, 6, (1,))[:-1]) >= 5


def test_lines_are_documents_and_near_words_are_counted():
    corpus = chain()
    lexicon = corpus_lexicon(corpus)
    counts = lexicon.documents()
    assert counts.shape == (int((corpus.train[:-1] == 0).sum()) + 1, WORDS)
    assert np.array_equal(
        np.asarray(counts.sum(0)).ravel(), np.bincount(corpus.train, minlength=WORDS)
    )
    near = lexicon.cooccurrence().toarray()
    assert np.array_equal(near, near.T)
    asked = recipe(
        "anchor:anchors=4", selection="tfidf", domain=("cooccurrence",), lam=1e-4, epochs=1
    )
    assert "related by cooccurrence" in " ".join(fit(asked).notes)


def served(fitted, words, folder):
    """The stored model of a run."""
    corpus = chain()
    run = LanguageRun([folder / "none.txt"], recipe(), folder / "out", RunOptions())
    corpus = Corpus(words, corpus.counts, corpus.train, corpus.validation, corpus.test)
    return run.write(folder / "model", fitted.words.table.pack(), "float32", corpus, fitted)


def test_continuations_follow_the_chain_and_never_write_unknown_words(tmp_path):
    fitted = fit(recipe(epochs=5))
    model = served(fitted, tuple(map(str, range(WORDS))), tmp_path)
    found = [4, *map(int, model.generate("3 4", 40, seed=1))]
    steps = [(b - a) % WORDS for a, b in itertools.pairwise(found)]
    assert sum(step in (1, 2) for step in steps) >= 36
    texts = [model.generate("3", 20, seed=seed) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    likely = [model.generate("3", 20, seed=seed, temperature=0) for seed in (0, 1)]
    assert likely[0] == likely[1]
    named = served(fitted, chain().words, tmp_path).continue_text("unheard of", 200)
    assert "<unk>" not in named
    assert "<eos>" not in named
    assert "\n" in named


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": "gru"}, "model.kind=gru: use one of lstm, awd"),
        ({"softmax": "half"}, "softmax=half: use one of full, sampled"),
        ({"optimizer": "adam"}, "optimizer.kind=adam: use one of adamw"),
        ({"hidden": 8}, "a tied lstm has the width of rows"),
        ({"epochs": 0}, "epochs=0"),
        ({"lr": math.inf}, "lr=inf"),
        (
            {"spec": "anchor:anchors=6", "transform_lr": 0.0},
            "transform_lr=0.0: give a number above 0",
        ),
        ({"transform_lr": 0.01}, "'dense' has no anchors"),
    ],
)
def test_recipes_say_what_is_wrong(given, said):
    with pytest.raises(fb.ArgumentError, match=said):
        recipe(**given)


def test_models_say_what_is_wrong():
    table = fb.DenseTable(WORDS, 8)
    with pytest.raises(fb.ArgumentError, match=r"word_dropout=1.0: give a fraction"):
        LSTMModel(table, hidden=8, word_dropout=1.0)
    with pytest.raises(fb.ArgumentError, match="samples=13: give from 1 to 12"):
        LSTMModel(table, hidden=8, samples=13)
    with pytest.raises(fb.ArgumentError, match="layers=0"):
        AWDLSTMModel(table, layers=0)
    model = LSTMModel(table, hidden=8)
    with pytest.raises(IndexError):
        model(torch.tensor([[WORDS]]))
    with pytest.raises(fb.ArgumentError, match="too few"):
        columns(np.arange(5), 4)
