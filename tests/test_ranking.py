import numpy as np
import pytest
import torch

import featherbed as fb
from featherbed.apps.recommender.ranking import (
    BPR,
    Interactions,
    ranking_metrics,
    sample_negatives,
    split_interactions,
    train_bpr,
)
from featherbed.io.opening import find_data
from featherbed.io.records import make_ratings, read_movielens
from featherbed.kernels.ranking import ranking_pass


def random_choices(users=30, items=40, count=300, seed=0):
    rng = np.random.default_rng(seed)
    return Interactions.of(
        rng.integers(users, size=count), rng.integers(items, size=count), users, items
    )


def slow_metrics(scores, train, held_out):
    """The same by sorting whole rankings, one user after the other."""
    found = {"ndcg@10": [], "recall@10": [], "p@1": [], "p@5": [], "p@10": []}
    for user in range(train.num_users):
        wanted = set(held_out[user].tolist())
        if not wanted:
            continue
        ranking = [
            i
            for i in np.argsort(-scores[user], kind="stable")
            if i not in set(train[user].tolist())
        ][:10]
        gains = [1 / np.log2(place + 2) for place in range(10)]
        got = sum(gains[place] for place, item in enumerate(ranking) if item in wanted)
        found["ndcg@10"].append(got / sum(gains[: len(wanted)]))
        found["recall@10"].append(len(wanted & set(ranking)) / min(10, len(wanted)))
        for k in (1, 5, 10):
            found[f"p@{k}"].append(len(wanted & set(ranking[:k])) / k)
    return {name: float(np.mean(values)) for name, values in found.items()}


def test_metrics_equal_whole_sorted_rankings():
    rng = np.random.default_rng(3)
    rows, columns = rng.normal(size=(30, 5)), rng.normal(size=(40, 5))
    train, held_out = random_choices(seed=1), random_choices(count=200, seed=2)
    only_new = ~np.isin(held_out.users * 40 + held_out.items, train.users * 40 + train.items)
    held_out = Interactions.of(held_out.users[only_new], held_out.items[only_new], 30, 40)
    wanted = slow_metrics(rows @ columns.T, train, held_out)
    assert ranking_metrics(rows, columns, train, held_out) == pytest.approx(wanted)


def test_metrics_refuse_what_does_not_fit():
    chosen = random_choices()
    with pytest.raises(fb.ArgumentError, match="do not fit 30 users and 40 items"):
        ranking_metrics(np.ones((3, 2)), np.ones((40, 2)), chosen, chosen)
    nothing = Interactions.of(np.zeros(0, int), np.zeros(0, int), 30, 40)
    with pytest.raises(fb.ArgumentError, match="nothing to measure"):
        ranking_metrics(np.ones((30, 2)), np.ones((40, 2)), chosen, nothing)


def test_a_compiled_step_is_a_gradient_step():
    rng = np.random.default_rng(0)
    rows, columns = (rng.normal(size=(n, 6)).astype(np.float32) for n in (5, 7))
    users, items = (fb.DenseTable.from_dense(torch.from_numpy(m.copy())) for m in (rows, columns))
    model, triples = BPR(users, items), [(1, 2, 3), (4, 0, 6), (1, 3, 2)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for triple in triples:
        optimizer.zero_grad()
        u, i, j = (torch.tensor([x]) for x in triple)
        loss = model(u, i, j)
        touched = users.weight[u], items.weight[i], items.weight[j]
        (loss + 0.5 * 0.05 * sum(row.square().sum() for row in touched)).backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    ids = np.array(triples).T.copy()
    mean = ranking_pass(rows, columns, ids[0], ids[1], ids[2], 0.1, 0.05)
    assert mean == pytest.approx(np.mean(losses), rel=1e-5)
    assert np.allclose(rows, users.weight.detach().numpy(), atol=1e-6)
    assert np.allclose(columns, items.weight.detach().numpy(), atol=1e-6)


def test_others_were_not_chosen_and_come_from_all_the_rest():
    train = random_choices()
    users = np.repeat(np.arange(30), 2000)
    others = sample_negatives(train, users, np.random.default_rng(0))
    for user in range(30):
        drawn = set(others[users == user].tolist())
        assert drawn == set(range(40)) - set(train[user].tolist())


def test_ranking_learns_planted_tastes_and_is_the_same_again():
    ratings = make_ratings(200, 100, 12_000, seed=1)
    liked = ratings.take(np.flatnonzero(ratings.values > 4))
    parts = split_interactions(liked, train=12, validation=2, minimum=16)
    runs = [
        train_bpr(parts[0], parts[1], dim=8, epochs=25, lr=0.1, seed=seed, progress=False)
        for seed in (0, 0, 1)
    ]
    found = [ranking_metrics(run.users, run.items, parts[0], parts[2])["ndcg@10"] for run in runs]
    rng = np.random.default_rng(0)
    chance = ranking_metrics(
        rng.normal(size=runs[0].users.shape),
        rng.normal(size=runs[0].items.shape),
        parts[0],
        parts[2],
    )
    assert found[0] > 2 * chance["ndcg@10"]
    assert np.array_equal(runs[0].items, runs[1].items)
    assert not np.array_equal(runs[0].items, runs[2].items)


def test_sharing_changes_training_and_spares_the_others():
    train = random_choices()
    plain, shared = (
        train_bpr(train, train, dim=4, epochs=1, p_users=p, p_items=p, progress=False)
        for p in (0.0, 0.5)
    )
    assert not np.array_equal(plain.users, shared.users)
    model = BPR(
        fb.SSE(fb.DenseTable(30, 4), 1.0),
        fb.SSE(items := fb.DenseTable(40, 4), 1.0),
        negatives=items,
    )
    assert len({id(p) for p in model.parameters()}) == 2
    model(torch.tensor([1]), torch.tensor([2]), torch.tensor([3])).backward()
    touched = items.weight.grad.abs().sum(1).nonzero().flatten().tolist()
    assert 3 in touched
    assert 2 not in touched


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"dim": 0}, "dim=0"), ({"epochs": 0}, "epochs=0"), ({"negatives": 0}, "negatives=0")],
)
def test_settings_are_checked(settings, message):
    train = random_choices()
    with pytest.raises(fb.ArgumentError, match=message):
        train_bpr(train, train, **settings, progress=False)


def test_choices_need_enough_ratings():
    ratings = make_ratings(50, 30, 500)
    with pytest.raises(fb.DataError, match="no user has 600 ratings"):
        split_interactions(ratings, minimum=600)
    with pytest.raises(fb.ArgumentError, match="each user needs pairs in all three parts"):
        split_interactions(ratings, train=10, validation=2, minimum=11)
    with pytest.raises(fb.DataError, match="holds no interaction"):
        empty = Interactions.of(np.zeros(0, int), np.zeros(0, int), 3, 3)
        train_bpr(empty, empty, progress=False)


def test_choices_of_movielens_are_as_many_as_published():
    try:
        ratings = read_movielens(find_data("ml-1m"))
    except fb.DataError as missing:
        pytest.skip(str(missing))
    train, validation, test = split_interactions(ratings)
    assert (train.num_users, len(train), len(validation) + len(test)) == (3938, 196_900, 727_153)
    assert not set((train.users * 3706 + train.items).tolist()) & set(
        (test.users * 3706 + test.items).tolist()
    )
