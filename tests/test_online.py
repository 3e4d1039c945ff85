"""Ids that arrive, and streams that are seen once."""

import gzip
import itertools

import numpy as np
import pytest
import torch

import featherbed as fb
from featherbed.apps.recommender.online import train_online
from featherbed.io.records import stream_ratings


def growing(rows=1, **settings):
    generator = torch.Generator().manual_seed(0)
    return fb.GrowingAnchorTable(
        rows, 6, anchors=4, init=fb.HalfNormal(0.3), generator=generator, **settings
    )


def penalised(table, kind=fb.Yogi, **settings):
    return kind(
        table.parameters(), lr=0.05, penalties={table.transform: fb.NonNegativeL1(1e-4)}, **settings
    )


def test_keys_get_rows_when_they_are_first_seen():
    table = growing()
    arrivals = fb.Arrivals([table])
    assert arrivals.ids(["a"]).tolist() == [0]
    assert arrivals.admit(["b", "a", "b"]).tolist() == [1, 2, 1]
    assert arrivals.admit(np.array(["a", "c"])).tolist() == [2, 3]
    assert arrivals.ids(["c", "nobody"]).tolist() == [3, 0]
    assert (len(arrivals), arrivals.keys, table.num_embeddings) == (3, ["b", "a", "c"], 4)
    assert table.transform.shape == (4, 4)


def test_a_new_row_is_the_row_of_the_unseen():
    table = growing()
    arrivals = fb.Arrivals([table])
    before = table(torch.tensor([0])).detach()
    torch.testing.assert_close(table(arrivals.admit(["a"])), before)
    with torch.no_grad():
        table.transform[1] = 5.0
    arrivals.admit([f"x{i}" for i in range(20)])
    arrivals.refresh()
    torch.testing.assert_close(table.transform[0], table.transform[1:].mean(0))


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("make", ["yogi", "proximal"])
def test_arriving_changes_nothing_for_the_rows_that_are_there(sparse, make):
    if make == "proximal" and sparse:
        pytest.skip("Proximal(Adam) takes dense gradients")
    outcomes = []
    for early in (True, False):  # all keys from the beginning, or some of them in the middle
        table = growing(dtype=torch.float64, sparse=sparse)
        arrivals = fb.Arrivals([table], None, ())
        if make == "yogi":
            optimizer = penalised(table)
        else:
            adam = torch.optim.Adam(table.parameters(), lr=0.05)
            optimizer = fb.Proximal(adam, {table.transform: fb.NonNegativeL1(1e-3)})
        arrivals.optimizer = optimizer
        arrivals.admit(range(10 if early else 5))
        with torch.no_grad():
            table.transform[1:6] = torch.arange(20, dtype=torch.float64).reshape(5, 4) / 20
        for step in range(30):
            if step == 15:
                arrivals.admit(range(10))
            optimizer.zero_grad()
            (table(arrivals.ids([step % 5, (step + 2) % 5])) - 1).square().sum().backward()
            optimizer.step()
        outcomes.append(table.weight[1:6].detach())
    torch.testing.assert_close(*outcomes)


def test_slots_and_plain_parameters_grow_too():
    table = fb.AnchorTable(1, 6, anchors=9, slots=3, generator=torch.Generator().manual_seed(0))
    bias = torch.nn.Parameter(torch.zeros(1))
    optimizer = fb.Yogi([*table.parameters(), bias], lr=0.05)
    arrivals = fb.Arrivals([table, bias], optimizer)
    for step in range(13):
        ids = arrivals.admit(range(step, step + 3))
        losses = []
        for _ in range(60):
            optimizer.zero_grad()
            loss = (table(ids).sum(1) + bias[ids] - 1).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < 0.1 * losses[0] or losses[-1] < 0.01
    assert (
        table.transform.shape == (16, 3) and table.support.shape == (16, 3) and bias.shape == (16,)
    )
    assert bool((table.support.sort(1).values.diff(dim=1) > 0).all()), (
        "an anchor stands twice in a row"
    )
    packed = table.pack()
    np.testing.assert_allclose(
        packed[[0, 14]], table(torch.tensor([0, 14])).detach().numpy(), rtol=1e-5, atol=1e-6
    )


def test_storage_is_not_copied_for_every_key():
    table = growing()
    arrivals = fb.Arrivals([table])
    places = {(arrivals.admit([key]), table.transform.data_ptr())[1] for key in range(2000)}
    assert len(places) < 60


def test_what_cannot_grow_is_refused():
    counts = [3, 2, 1]
    words = fb.AnchorTable(3, 4, anchors=2, init=fb.Frequency(counts))
    graph = fb.Graph.from_edges(3, [[0, 2]])
    optimizer = fb.Yogi(
        words.parameters(),
        penalties={words.transform: fb.NonNegativeL1(1e-3, exempt=words.related(graph))},
    )
    with pytest.raises(fb.ArgumentError, match="exempts entries"):
        fb.Arrivals([words], optimizer, ["a", "b"]).admit(["c"])
    with pytest.raises(fb.ArgumentError, match="row 0 for unseen"):
        fb.Arrivals([growing(5)])
    with pytest.raises(fb.ArgumentError, match="cannot grow"):
        fb.Arrivals([fb.DenseTable(1, 4)])
    with pytest.raises(fb.ArgumentError, match="twice"):
        fb.Arrivals([growing(3)], None, ["a", "a"])


def test_a_stream_is_learnt_batch_by_batch_and_held_no_longer():
    table = growing()
    optimizer = penalised(table)
    arrivals = fb.Arrivals([table], optimizer)
    growth = fb.Growth([table], optimizer, lambda1=1e-2, lambda2=1e-5)
    rng = np.random.default_rng(0)
    target = torch.from_numpy(rng.normal(size=(40, 2)) @ rng.normal(size=(2, 6))).float()
    drawn = 0

    def endless():
        nonlocal drawn
        while True:
            drawn += 1
            yield rng.integers(0, min(40, 5 + drawn), 16)

    def loss(keys, ids):
        return (table(ids) - target[torch.from_numpy(keys)]).square().sum(1).mean()

    found = list(
        itertools.islice(
            train_online(
                endless(),
                lambda keys: loss(keys, arrivals.admit(keys)),
                lambda keys: loss(keys, arrivals.ids(keys)),
                optimizer,
                growth=growth,
                every=5,
                ahead=3,
                steps=50,
            ),
            60,
        )
    )
    assert drawn <= 60 + 3 + 1, "batches were held that nobody asked for"
    assert len(arrivals) == 40
    assert len(growth.history) == 12
    assert found[-1]["anchors"] == growth.history[-1].anchors
    late, early = (
        np.mean([f["before"] for f in found[-10:]]),
        np.mean([f["before"] for f in found[:10]]),
    )
    assert late < 0.3 * early
    assert np.mean([f["after"] for f in found]) < 0.5 * np.mean([f["before"] for f in found])
    assert max(f["steps"] for f in found) <= 50 and min(f["steps"] for f in found) < 50


def test_streams_that_are_nothing_are_refused():
    with pytest.raises(fb.ArgumentError, match="no batch"):
        next(train_online([], None, None, None))
    with pytest.raises(fb.ArgumentError, match="at least 1"):
        next(train_online([1], None, None, None, steps=0))


def test_ratings_are_read_as_they_are_asked_for(tmp_path):
    lines = [f"{n % 7}::{n}::{n % 5 + 1}::0\n" for n in range(2500)]
    path = tmp_path / "ratings.dat.gz"
    with gzip.open(path, "wt") as file:
        file.writelines([*lines, "broken line\n"])
    stream = stream_ratings(tmp_path / "ratings.dat", batch=1000)
    users, items, values = next(stream)
    assert (len(users), users[8], items[999], values[4]) == (1000, "1", "999", 5.0)
    assert len(next(stream)[0]) == 1000
    with pytest.raises(fb.DataError, match="line 2501"):
        next(stream)
    with pytest.raises(fb.ArgumentError, match="batch=0"):
        next(stream_ratings(path, batch=0))


def test_sharing_follows_the_rows_that_arrive():
    table = growing()
    shared = fb.SSE(table, p=1.0, generator=torch.Generator().manual_seed(0))
    arrivals = fb.Arrivals([table], fb.Yogi(shared.parameters()))
    ids = arrivals.admit(range(30))
    found = shared.share(ids)
    assert shared(ids).shape == (30, 6) and bool((found != ids).all()) and int(found.max()) > 1
    related = fb.SSE(growing(), p=0.5, graph=fb.Graph.from_edges(1, []))
    fb.Arrivals([related.table]).admit(["a"])
    with pytest.raises(fb.ArgumentError, match="the graph is over 1"):
        related(torch.tensor([1]))
    with pytest.raises(fb.IdError, match="got list"):
        shared([1, 2])
