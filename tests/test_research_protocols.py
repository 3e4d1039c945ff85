"""The authors' protocols: summed losses, guides, literal anchors, Laplacians, lists, the queue."""

import json
import zipfile
from datetime import datetime, timedelta
from typing import ClassVar

import numpy as np
import pytest
import torch

import featherbed as fb
from featherbed.apps.language.data import columns
from featherbed.apps.language.model import LSTMModel
from featherbed.apps.language.train import train_epoch
from featherbed.apps.recommender.ranking import Interactions, ranking_pass
from featherbed.errors import ArgumentError
from featherbed.io.records import make_ratings
from featherbed.tables.table import auxiliary_loss
from research.harness import command, queue
from research.harness.records import Run, record_path
from research.harness.run import planned, read_results, run_experiment
from research.harness.settings import parse_experiment, read_experiment
from research.harness.summary import as_markdown
from research.runners import codes
from research.runners.factorization import laplacian_side
from research.runners.literal import fill_tables, make_tables, mixed_dims
from research.runners.rankers import dropout_pass, listwise_epochs, listwise_pass
from research.runners.softmax import NCEModel, run_softmax
from research.runners.terms import AnchorTermsTable
from research.sources.texts import open_corpus

SMALL = {
    "title": "a table",
    "paper": "somebody",
    "task": "factors",
    "data": "ml-1m-few",
    "measures": ["rmse"],
    "seeds": [0],
    "settings": {"model": "biases", "dim": 4, "lr": 0.02, "decay": 0.05, "epochs": 1},
}


def rows_of(changes):
    return [{"name": "new", "settings": {"patience": 1}}, {"name": "old", **changes}]


# a loss summed over time steps


@pytest.mark.parametrize("clip", [0.5, 1e6])
def test_a_summed_loss_is_the_sum_over_time_steps(clip):
    length, corpus = 7, open_corpus("ptb", quick=True)
    text = columns(corpus.train[:200], 4)
    settings = {
        "table": "kd:choices=4,parts=3,relax=straightthrough(entropy=2.0)",
        "dim": 8,
        "loss": "sum",
        "length": length,
        "init_std": 0.1,
    }

    def model():
        generator = torch.Generator().manual_seed(0)
        table = codes.make_coded(settings, len(corpus.words), generator, None, 0)
        torch.manual_seed(0)
        return LSTMModel(table, hidden=8, tied=False, dropout=0.0)

    ours, theirs = model(), model()
    optimizer = torch.optim.SGD(fb.split_codes(ours)[1], lr=0.3 * length)
    train_epoch(
        ours, optimizer, text, [(0, length)], clip / length, lambda *_: None, lambda *_: None
    )
    assert theirs.table.relax.entropy == pytest.approx(2.0 / length)
    parameters = fb.split_codes(theirs)[1]
    losses = theirs.losses(text[:length], text[1 : length + 1])
    (length * losses.cross_entropy + length * auxiliary_loss(theirs)).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, clip))
    assert (norm > clip) == (clip == 0.5)
    for mine, other in zip(fb.split_codes(ours)[1], parameters, strict=True):
        torch.testing.assert_close(mine, other - 0.3 * other.grad, atol=1e-5, rtol=1e-4)


def test_guide_weights_are_those_of_the_summed_loss(tmp_path):
    fb.save(fb.DenseTable(20, 8), codes.table_path(tmp_path, "full", 0))
    settings = {"table": "kd:choices=4,parts=3", "dim": 8, "length": 10, "init_std": 0.1}
    settings |= {"guide": "full", "autoencode": True, "guide_weights": [1000.0, 100.0, 10.0]}
    generator = torch.Generator().manual_seed(0)
    mean = codes.make_coded(settings, 20, generator, tmp_path, 0).guide
    summed = codes.make_coded(
        settings | {"loss": "sum", "encoder_norm": True}, 20, generator, tmp_path, 0
    )
    assert (mean.weight, mean.reconstruct, mean.agree) == (1000.0, 100.0, 10.0)
    assert (summed.guide.weight, summed.guide.agree) == (100.0, 1.0)
    assert mean.normalize is False
    assert summed.guidance.norm is not None
    with pytest.raises(ArgumentError, match="mean or sum"):
        codes.summed_steps({"loss": "total", "length": 3})


def test_the_logits_of_a_guides_encoder_are_normalized():
    matrix = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    seen = {}
    for normalize in (False, True):
        guide = fb.Pretrained(matrix, autoencode=True, normalize=normalize)
        generator = torch.Generator().manual_seed(1)
        table = fb.KDTable(40, 8, choices=4, parts=3, guide=guide, generator=generator)
        ids, logits = torch.arange(40), torch.zeros(40, 3, 4)

        def keep(own, normalize=normalize):
            seen[normalize] = own.detach()
            return torch.zeros(40, 8)

        table.guidance.loss(ids, torch.zeros(40, 8), logits, keep)
    flat = seen[True].reshape(-1, 4)
    torch.testing.assert_close(flat.mean(0), torch.zeros(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(flat.var(0, unbiased=False), torch.ones(4), atol=1e-3, rtol=0)
    assert float(seen[False].reshape(-1, 4).var(0).std()) > 1e-3


# anchors by the letter


def test_literal_weights_start_with_either_sign_and_lose_the_negative_half():
    table = fb.AnchorTable(300, 8, anchors=5)
    fill_tables(table, torch.Generator().manual_seed(0))
    assert float((table.transform < 0).float().mean()) == pytest.approx(0.5, abs=0.05)
    assert float(table.transform.detach().abs().max()) <= (6 / 305) ** 0.5
    penalties = {table.transform: fb.NonNegativeL1(1e-4)}
    optimizer = fb.Yogi(table.parameters(), 0.01, penalties=penalties)
    table(torch.arange(300)).sum().backward()
    optimizer.step()
    assert float(table.transform.detach().min()) == 0.0


def test_mixed_dimensions_follow_popularity():
    counts = np.array([100, 50, 50, *[10] * 10])
    assert mixed_dims(counts, width=16, blocks=3, alpha=0.0) == [16, 16, 16]
    falling = mixed_dims(counts, width=16, blocks=3, alpha=1.0)
    assert falling == sorted(falling, reverse=True)
    assert falling[0] == 16 > falling[-1]
    ratings = make_ratings(60, 40, 900)
    settings = {"mixed": {"width": 8, "blocks": 2, "alpha": 0.5}, "dim": 8}
    users, items = make_tables(settings, ratings, torch.Generator().manual_seed(0))
    assert (users.num_embeddings, items.num_embeddings) == (60, 40)
    popular = torch.from_numpy(np.bincount(ratings.users, minlength=60).argmax(keepdims=True))
    assert int(users.block[popular]) == 0


def test_published_sizes_of_table_14_are_settings_of_its_rows():
    rows = {row.name: row for row in read_experiment("ant/table14-literal").rows}
    assert len([name for name in rows if name.startswith("mixdim")]) == 6
    assert {row.settings["batch"] for row in rows.values()} == {32}
    rules = {row.settings["rule"] for row in rows.values() if "rule" in row.settings}
    assert rules == {"trend", "trial"}


def test_terms_of_anchors_are_those_of_the_library():
    table = AnchorTermsTable(30, 4, anchors=3, orthogonal=0.5)
    torch.testing.assert_close(table.auxiliary(), 0.5 * fb.orthogonality(table))
    torch.manual_seed(0)
    table = AnchorTermsTable(30, 4, anchors=3, negatives=2.0, pairs=50)
    torch.manual_seed(1)
    found = table.auxiliary()
    torch.manual_seed(1)
    pairs = torch.randint(30, (50, 2))
    torch.testing.assert_close(found, 2.0 * fb.negative_pairs(table, pairs) / 50)


# a graph's Laplacian, lists, dropout


def test_the_laplacian_term_is_minimized_row_by_row():
    from scipy.sparse import csr_array

    rng = np.random.default_rng(0)
    adjacency = np.triu(rng.random((12, 12)) < 0.3, 1)
    adjacency = (adjacency | adjacency.T).astype(float)
    own, other = rng.normal(size=(12, 3)), rng.normal(size=(9, 3)).astype(np.float32)
    ratings = csr_array(np.where(rng.random((12, 9)) < 0.4, rng.normal(size=(12, 9)), 0.0))
    laplacian = np.diag(adjacency.sum(1)) - adjacency
    decay, pull = 0.3, 0.2

    def objective(rows):
        errors = ratings.data - (rows @ other.T)[ratings.nonzero()]
        return (
            (errors**2).sum() + decay * (rows**2).sum() + pull * np.trace(rows.T @ laplacian @ rows)
        )

    values = [objective(own)]
    for _ in range(200):
        laplacian_side(own, other, ratings, decay, pull, csr_array(adjacency))
        values.append(objective(own))
    assert np.all(np.diff(values) <= 1e-9)
    system = np.kron(laplacian * pull + decay * np.eye(12), np.eye(3))
    target = np.zeros((12, 3))
    for i, j in zip(*ratings.nonzero(), strict=True):
        block = slice(3 * i, 3 * i + 3)
        system[block, block] += np.outer(other[j], other[j])
        target[i] += ratings[i, j] * other[j]
    exact = np.linalg.solve(system, target.reshape(-1)).reshape(12, 3)
    np.testing.assert_allclose(own, exact, atol=1e-5)


def test_a_listwise_step_follows_the_gradient():
    rng = np.random.default_rng(0)
    rows, columns_ = (rng.normal(size=(n, 4)).astype(np.float32) for n in (2, 7))
    lists, starts = np.array([3, 1, 0, 5, 6]), np.array([0, 5, 5])
    liked = np.array([2, 0])
    u, v = torch.tensor(rows, requires_grad=True), torch.tensor(columns_, requires_grad=True)
    scores = v[torch.from_numpy(lists)] @ u[0]
    loss = -sum(scores[j] - torch.logsumexp(scores[j:], 0) for j in range(2))
    loss.backward()
    before = rows.copy(), columns_.copy()
    mean = listwise_pass(rows, columns_, np.array([0, 1]), starts, lists, liked, 1e-3, 0.0)
    assert mean == pytest.approx(float(loss.detach()) / 2, rel=1e-5)
    np.testing.assert_allclose((before[0] - rows) / 1e-3, u.grad, atol=2e-3)
    np.testing.assert_allclose((before[1] - columns_) / 1e-3, v.grad, atol=2e-3)


def test_lists_begin_with_the_items_of_a_user():
    rng = np.random.default_rng(0)
    train = Interactions.of(rng.integers(8, size=40), rng.integers(30, size=40), 8, 30)
    rows, items = np.zeros((8, 2), np.float32), np.zeros((30, 2), np.float32)
    loss = listwise_epochs(train, 3, 0.0)(rows, items, 0.0, np.random.default_rng(1))
    sizes = np.diff(train.starts)
    uniform = [np.log(4 * n - j) for n in sizes for j in range(n)]  # of equal scores
    assert loss == pytest.approx(np.mean(uniform), rel=1e-6)


def test_a_pass_without_dropout_is_that_of_the_library():
    rng = np.random.default_rng(0)
    one = [rng.normal(size=(n, 5)).astype(np.float32) for n in (6, 9)]
    other = [part.copy() for part in one]
    users, liked = rng.integers(6, size=50), rng.integers(9, size=50)
    triple = users, liked, (liked + rng.integers(1, 9, size=50)) % 9
    dropout_pass(*one, *triple, 0.05, 0.01, 0.0, rng)
    ranking_pass(*other, *triple, 0.05, 0.01)
    for mine, theirs in zip(one, other, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


def test_swept_rows_say_what_was_chosen(tmp_path):
    paper = read_experiment("sse/table1", quick=True).chosen(["als-graph"])
    (record,) = run_experiment(paper, tmp_path, quick=True).records["als-graph"].values()
    assert record["details"]["chosen"] in (
        {"decay": 1.0, "pull": 0.01},
        {"decay": 1.0, "pull": 0.1},
    )
    paper = read_experiment("sse/table3", quick=True).chosen(["sql-rank"])
    (record,) = run_experiment(paper, tmp_path, quick=True).records["sql-rank"].values()
    assert record["details"]["chosen"]["lr"] in (0.01, 0.1)


# language models from one start


def test_rows_share_their_dense_epochs(tmp_path):
    for row in ("ant-500", "lowrank"):
        command.run("ant/ptb", tmp_path, size="quick", rows=row, quiet=True)
    folders = [path.name for path in (tmp_path / "ant" / "ptb").glob("dense-start-*")]
    assert len(folders) == 1
    one, two = (
        json.loads((tmp_path / "ant" / "ptb" / f"{row}-seed-0.json").read_text())
        for row in ("ant-500", "lowrank")
    )
    assert one["history"][0] == two["history"][0]  # trained once, its seconds included
    assert one["history"][1] != two["history"][1]
    measures = one["measures"]
    assert measures["int4_bytes"] < measures["int8_bytes"] < measures["float16_bytes"]
    assert measures["float16_perplexity"] == pytest.approx(measures["perplexity"], rel=1e-3)


# replaced rows, the queue


def test_replaced_rows_are_shown_and_not_run(tmp_path):
    before = parse_experiment(
        "test/small", {**SMALL, "rows": rows_of({"settings": {"patience": 2}})}
    )
    run_experiment(before, tmp_path, quick=True)
    changes = {"replaced": "its start was wrong", "settings": {"patience": 2}}
    after = parse_experiment("test/small", {**SMALL, "rows": rows_of(changes)})
    assert [row.name for row, _ in planned(after)] == ["new"]
    results = read_results(after, tmp_path)
    assert set(results.records) == {"new", "old"}
    text = as_markdown(results)
    assert "old (replaced)" in text
    assert "Replaced: old: its start was wrong." in text
    assert not results.missing


class FakeProcess:
    """A process that writes a record, fails, or never ends."""

    begun: ClassVar[list[list[str]]] = []

    def __init__(self, arguments, **_):
        self.begun.append(arguments)
        self.row = arguments[arguments.index("--rows") + 1]

    def wait(self, timeout=None):
        if self.row == "als" and timeout is not None:
            raise queue.subprocess.TimeoutExpired("als", timeout)
        if self.row == "sgd":
            self.path.write_text("{}")
        return 3 if self.row == "sse-se" else 0

    def terminate(self):
        self.row = "ended"


@pytest.fixture
def plan(tmp_path, monkeypatch):
    path = tmp_path / "queue.toml"
    rows = ("sgd", "sse-se", "als")
    entries = [
        f'[[runs]]\nname = "sse/table1"\nrows = ["{row}"]\nseeds = [5]\nhours = 0.5\n'
        for row in rows
    ]
    path.write_text("\n".join(entries))
    row = next(row for row in read_experiment("sse/table1").rows if row.name == "sgd")
    record = record_path(tmp_path, row, 5)
    record.parent.mkdir(parents=True)
    monkeypatch.setattr(FakeProcess, "path", record, raising=False)
    monkeypatch.setattr(FakeProcess, "begun", [])
    monkeypatch.setattr(queue.subprocess, "Popen", FakeProcess)
    before = queue.read_queue
    monkeypatch.setattr(queue, "read_queue", lambda path: before(path, tmp_path))
    return path


def test_the_queue_runs_what_has_no_record(plan, tmp_path):
    assert [line[:8] for line in queue.list_queue(plan)][-1] == "  1.50 c"
    log = tmp_path / "queue.log"
    assert queue.run_queue(plan, log=log) == 1
    text = log.read_text()
    assert "finished after" in text
    assert "failed, exit code 3" in text
    assert len(FakeProcess.begun) == 3
    assert FakeProcess.begun[0][-5:] == ["--rows", "sgd", "--seeds", "5", "--quiet"]
    queue.run_queue(plan, log=log)
    assert len(FakeProcess.begun) == 5  # the one with a record is left alone


def test_the_queue_stops_at_a_time(plan, tmp_path):
    log = tmp_path / "queue.log"
    queue.run_queue(plan, log=log, until=datetime.now() - timedelta(minutes=1))
    assert not FakeProcess.begun
    queue.run_queue(plan, log=log, until=datetime.now() + timedelta(hours=1))
    assert "stopped after" in log.read_text()
    with pytest.raises(SystemExit):
        command.main(["queue", "--until", "noon"])


def test_the_queue_in_the_repository_is_sound(capsys):
    command.main(["queue", "--list"])
    assert "core-hours in" in capsys.readouterr().out
    with pytest.raises(ArgumentError, match="an entry has a name"):
        [*queue._runs({"row": "x"}, queue.RESULTS)]


# corpora and softmaxes


def test_the_brown_corpus_is_read_with_its_whole_vocabulary(tmp_path):
    folder = tmp_path / "brown"
    folder.mkdir()
    with zipfile.ZipFile(folder / "brown.zip", "w") as archive:
        archive.writestr("brown/README", "no/document")
        for number in range(10):
            archive.writestr(
                f"brown/ca{number:02}", f"\n\tThe/at the/at a/b/nn w{number}/nn ./.\n\n"
            )
    corpus = open_corpus("brown", tmp_path)
    assert len(corpus.train) == 8 * 6
    assert (len(corpus.validation), len(corpus.test)) == (6, 6)
    assert {"The", "the", "a/b", "w8", "w9", "<eos>"} <= {*corpus.words}
    assert [*corpus.counts] == sorted(corpus.counts, reverse=True)
    assert corpus.counts[corpus.words.index("w9")] == 0
    assert corpus.words[corpus.test[3]] == "w9"


def test_nce_tells_words_from_noise_and_is_measured_by_the_full_softmax():
    torch.manual_seed(0)
    model = NCEModel(fb.DenseTable(40, 8), hidden=8, samples=10, dropout=0.0)
    assert float(model.bias[0].detach()) == pytest.approx(-np.log(40))
    ids = torch.randint(40, (6, 3))
    torch.manual_seed(1)
    found = model.losses(ids, ids).cross_entropy
    torch.manual_seed(1)
    hidden = model.run(model.input_rows(ids), None).hidden
    torch.testing.assert_close(found, fb.NCE(model.table, 10, bias=model.bias)(hidden, ids))
    model.eval()
    scores = model(ids)[0]
    full = torch.nn.functional.cross_entropy(scores.flatten(0, 1), ids.flatten())
    torch.testing.assert_close(model.losses(ids, ids).cross_entropy, full)
    with pytest.raises(ArgumentError, match="full, sampled, nce"):
        run_softmax({"softmax": "half"}, 0, open_corpus("ptb", quick=True), Run())
