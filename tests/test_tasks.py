"""The two loops, their readers, checkpoints and results; on generated data, and on real data where it is."""

import gzip
import json
import math
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

import featherbed as fb
from featherbed.apps.language.data import columns
from featherbed.apps.language.model import LSTMModel
from featherbed.apps.language.settings import LanguageSettings
from featherbed.apps.language.train import FitOptions, perplexity, train_model
from featherbed.apps.pipeline import Checkpoints, Result, finite
from featherbed.apps.recommender import model as ratings
from featherbed.io.opening import find_data
from featherbed.io.records import Ratings, make_ratings, read_movielens
from featherbed.io.texts import Corpus, read_corpus, read_ptb

SMALL = make_ratings(300, 200, 12_000, groups=4, dim=4, seed=1)


def factor_model(spec="dense", seed=0, biases="none"):
    generator = torch.Generator().manual_seed(seed)
    users, items = (
        fb.make_table(spec, n, 6, generator=generator) for n in (SMALL.num_users, SMALL.num_items)
    )
    with torch.no_grad():
        for name, parameter in (*users.named_parameters(), *items.named_parameters()):
            if name.split(".")[0] in ("rows", "scale", "atoms"):
                parameter.mul_(0.5)  # rows half as long as fresh ones: scores of ordinary size
    return ratings.MatrixFactorization(users, items, mean=float(SMALL.values.mean()), biases=biases)


def fit(model, **settings):
    parts = SMALL.split(0)
    keywords = {"epochs": 4, "batch": 256, "progress": False} | settings
    return ratings.fit_model(
        model, fb.Yogi(model.parameters(), lr=0.03), parts[0], parts[1], **keywords
    )


@pytest.mark.parametrize(
    "spec",
    ["dense", "anchor:anchors=4", "quantized:bits=4", "hashed:buckets=50", "selected:keep=150"],
)
def test_ratings_learn(spec):
    model = factor_model(spec)
    result = fit(model, epochs=30, patience=8)
    assert result.metrics["train"]["mse"] < 0.9 * float(SMALL.split(0)[0].values.var())
    assert [row["epoch"] for row in result.history] == list(range(len(result.history)))
    best = min(row["validation_mse"] for row in result.history)
    assert result.metrics["validation"]["mse"] == pytest.approx(best)
    assert result.sizes["users"]["training"] > result.sizes["users"]["file"] / 2


def test_ratings_reproduce_and_depend_on_the_seed():
    ends = [fit(factor_model(), seed=seed).metrics["validation"]["mse"] for seed in (0, 0, 1)]
    assert ends[0] == ends[1]
    assert ends[0] != ends[2]


def test_biases_and_mean_enter_the_score():
    model = factor_model(biases="apart")
    users, items = torch.tensor([1]), torch.tensor([2])
    before = model(users, items)
    with torch.no_grad():
        model.user_bias[1] += 1.0
        model.item_bias[2] += 0.5
        model.mean += 0.25
    assert float((model(users, items) - before).detach()) == pytest.approx(1.75, abs=1e-5)


def test_biases_in_the_first_column_are_added_and_not_multiplied():
    model = factor_model(biases="column")
    users, items = torch.tensor([1, 5]), torch.tensor([2, 0])
    left, right = model.users.weight[users].detach(), model.items.weight[items].detach()
    wanted = model.mean + left[:, 0] + right[:, 0] + (left * right)[:, 1:].sum(1)
    assert torch.allclose(model(users, items).detach(), wanted, atol=1e-6)
    with pytest.raises(fb.ArgumentError, match="biases='rows': use one of none, column, apart"):
        factor_model(biases="rows")


def test_early_stopping_waits_for_patience():
    model = factor_model()
    with torch.no_grad():
        model.mean.fill_(float(SMALL.values.mean()))
    optimizer = torch.optim.SGD(
        model.parameters(), lr=1e-12
    )  # never better than the first epoch by more than dust
    parts = SMALL.split(0)
    frozen = [p.requires_grad_(False) for p in model.parameters()]
    assert frozen
    model.users.weight.requires_grad_(True)
    result = ratings.fit_model(
        model, optimizer, parts[0], parts[1], epochs=30, batch=4096, patience=2, progress=False
    )
    worse = [row["validation_mse"] for row in result.history]
    assert len(result.history) == int(np.argmin(worse)) + 3


def test_resumed_ratings_end_as_uninterrupted_ones(tmp_path):
    whole = fit(factor_model(), epochs=5, checkpoints=Checkpoints(tmp_path / "whole"))
    checkpoints = Checkpoints(tmp_path / "parts", keep=1)
    fit(factor_model(), epochs=2, checkpoints=checkpoints)
    second = factor_model(seed=9)  # what it holds is replaced by the checkpoint
    resumed = fit(second, epochs=5, checkpoints=checkpoints)
    assert [row["validation_mse"] for row in resumed.history] == [
        row["validation_mse"] for row in whole.history
    ]
    assert len(list((tmp_path / "parts").iterdir())) == 1


def test_interrupted_training_keeps_the_best_model(monkeypatch):
    calls = []
    real = ratings.mean_squared_error

    def interrupt(model, data):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(model, data)

    monkeypatch.setattr(ratings, "mean_squared_error", interrupt)
    model = factor_model()
    result = fit(model, epochs=10)
    assert result.interrupted
    assert len(result.history) == 2
    assert result.metrics["validation"]["mse"] == pytest.approx(
        min(r["validation_mse"] for r in result.history)
    )


def test_checkpoints_keep_the_last_and_write_whole_files(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    model = torch.nn.Linear(2, 1)
    generator = torch.Generator().manual_seed(4)
    for step in range(5):
        checkpoints.save(step, model=model, generators={"order": generator}, note="n")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000003.pt", "step-00000004.pt"]
    expected = torch.rand(3, generator=generator)
    other = torch.Generator()
    assert checkpoints.restore(model=model, generators={"order": other}) == {
        "step": 4,
        "extra": {"note": "n"},
    }
    assert torch.equal(torch.rand(3, generator=other), expected)
    with pytest.raises(fb.DataError, match="no checkpoint"):
        Checkpoints(tmp_path / "empty").restore(model=model)
    with pytest.raises(fb.ArgumentError, match="keep=0"):
        Checkpoints(tmp_path, keep=0)


def test_results_are_json_even_when_a_run_diverged(tmp_path):
    Result("lm", {"lr": 1.0}, 3, metrics={"test": {"perplexity": math.inf}}).write(
        tmp_path / "r.json"
    )
    read = json.loads((tmp_path / "r.json").read_text())
    assert read["metrics"]["test"]["perplexity"] == "inf"
    assert read["versions"]["featherbed"] == fb.__version__
    assert read["seed"] == 3
    assert finite([math.nan, 1.0]) == ["nan", 1.0]


def tiny_corpus():
    rng = np.random.default_rng(0)
    chain = np.cumsum(rng.integers(1, 3, size=6000)) % 12  # the next word is one or two further on
    counts = np.bincount(chain, minlength=12)
    return Corpus(tuple(map(str, range(12))), counts, chain[:4000], chain[4000:5000], chain[5000:])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("spec", ["dense", "anchor:anchors=6"])
def test_language_model_learns_a_chain(spec, tied, tmp_path):
    corpus = tiny_corpus()
    torch.manual_seed(0)
    model = LSTMModel(fb.make_table(spec, 12, 16), hidden=16, tied=tied, dropout=0.0)
    before = perplexity(model, corpus.validation)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    values = {"table.dim": 16, "training.epochs": 8, "optimizer.clip": 1.0}
    settings, options = (
        LanguageSettings.from_values(values),
        FitOptions(0, Checkpoints(tmp_path), False),
    )
    result = train_model(model, optimizer, corpus, settings, options)
    after = perplexity(model, corpus.validation)
    assert after == pytest.approx(min(row["validation_perplexity"] for row in result.history))
    assert before > 8
    assert after < 3.5  # two next words are possible: 2 is the best there is
    assert result.history[0]["tokens_per_second"] > 0
    again = train_model(model, optimizer, corpus, settings, options)
    assert again.history == result.history  # nothing left to do: the finished run is only read back


def test_language_model_refuses_what_cannot_be_tied():
    with pytest.raises(fb.ArgumentError, match="hidden=16"):
        LSTMModel(fb.DenseTable(12, 16), hidden=8)
    with pytest.raises(fb.ArgumentError, match="too few"):
        columns(np.arange(5), 4)


def test_readers_name_file_and_line(tmp_path):
    (tmp_path / "ratings.dat").write_text("1::10::5::0\n2::10::4::0\nx::::\n")
    with pytest.raises(fb.DataError, match="line 3"):
        read_movielens(tmp_path)
    (tmp_path / "ratings.dat").write_text("")
    with pytest.raises(fb.DataError, match="no ratings"):
        read_movielens(tmp_path)
    with pytest.raises(fb.DataError, match="no such file"):
        read_movielens(tmp_path / "nowhere")
    (tmp_path / "words.txt").write_bytes(b"caf\xe9\n")
    with pytest.raises(fb.DataError, match="not UTF-8"):
        read_corpus([tmp_path / "words.txt"] * 3)
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"a b c d\n" * 100)[:-9])
    with pytest.raises(fb.DataError, match="gzip"):
        read_corpus([tmp_path / "cut.txt"] * 3)


def test_readers_number_ids_from_zero(tmp_path):
    with gzip.open(tmp_path / "ratings.dat.gz", "wt") as file:
        file.write("7::30::5::0\n2::10::4::0\n7::10::1::0\n")
    read = read_movielens(tmp_path)
    assert (read.users.tolist(), read.items.tolist()) == ([1, 0, 1], [1, 0, 0])
    assert (read.user_keys, read.item_keys) == (("2", "7"), ("10", "30"))
    (tmp_path / "t.txt").write_text("a b a\nc\n")
    (tmp_path / "v.txt").write_text("a z\n")
    corpus = read_corpus([tmp_path / "t.txt", tmp_path / "v.txt", tmp_path / "v.txt"])
    assert corpus.words == ("a", "<eos>", "b", "c", "<unk>")
    assert corpus.validation.tolist() == [0, 4, 1]


def test_splits_are_disjoint_and_complete():
    parts = SMALL.split(3, validation=0.2, test=0.1)
    assert isinstance(parts[0], Ratings)
    assert [len(p) for p in parts] == pytest.approx(
        [0.7 * len(SMALL), 0.2 * len(SMALL), 0.1 * len(SMALL)], abs=1
    )
    pairs = np.concatenate([p.users * SMALL.num_items + p.items for p in parts])
    assert len(np.unique(pairs)) == len(SMALL)


def test_data_is_found_by_the_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("FEATHERBED_DATA", str(tmp_path))
    (tmp_path / "ptb").mkdir()
    assert find_data("ptb") == tmp_path / "ptb"
    with pytest.raises(fb.DataError, match="FEATHERBED_DATA"):
        find_data("ml-1m")


def test_movielens_counts(data):
    read = read_movielens(data / "ml-1m")
    assert (len(read), read.num_users, read.num_items) == (1_000_209, 6_040, 3_706)


def test_penn_treebank_counts(data):
    corpus = read_ptb(data / "ptb")
    assert [len(part) for part in (corpus.train, corpus.validation, corpus.test)] == [
        929_589,
        73_760,
        82_430,
    ]
    assert len(corpus.words) == 10_000


KILLED = """
import sys, time, torch, featherbed as fb
from featherbed.apps.pipeline import Checkpoints

folder, steps, most = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)
table = fb.AnchorTable(300, 6, anchors=20, slots=3, scan_every=3, generator=generator)
optimizer = fb.Yogi(table.parameters(), penalties={table.transform: fb.NonNegativeL1(1e-4)})
checkpoints, first = Checkpoints(folder), 0
if checkpoints.latest() is not None:
    first = checkpoints.restore(model=table, optimizer=optimizer, generators={"ids": generator})["step"]
for step in range(first, steps):
    print(step, flush=True)
    if step - first == most:
        time.sleep(600)  # whoever kills it may be late
    ids = (torch.rand(40, generator=generator).pow(3) * 300).long()
    optimizer.zero_grad()
    (table(ids) - torch.randn(40, 6, generator=generator)).square().mean().backward()
    optimizer.step()
    if (step + 1) % 10 == 0:
        checkpoints.save(step + 1, model=table, optimizer=optimizer, generators={"ids": generator})
fb.save(table, folder + "/table.safetensors")
"""


def test_killed_at_any_moment_and_resumed_a_run_ends_with_the_same_bytes(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(KILLED)

    def start(folder, most=200):
        command = [sys.executable, str(script), str(folder), "200", str(most)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    with start(whole) as process:
        process.communicate(timeout=300)
    moments, firsts = random.Random(0), []
    for _ in range(3):
        count = moments.randrange(11, 60)
        with start(killed, count + 5) as process:
            firsts.append(int(process.stdout.readline()))
            for _ in range(count):
                process.stdout.readline()
            process.kill()
            process.communicate(timeout=300)
    assert not (killed / "table.safetensors").exists()
    with start(killed) as process:
        firsts.append(int(process.communicate(timeout=300)[0].split()[0]))
    assert sorted(set(firsts)) == firsts, "every run must have gone on from a later checkpoint"
    assert (killed / "table.safetensors").read_bytes() == (whole / "table.safetensors").read_bytes()


def test_cleared_checkpoints_leave_nothing(tmp_path):
    checkpoints = Checkpoints(tmp_path / "run")
    checkpoints.clear()
    checkpoints.save(3, model=torch.nn.Linear(2, 1))
    checkpoints.clear()
    assert checkpoints.latest() is None
    assert not (tmp_path / "run").exists()
