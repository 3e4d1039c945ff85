"""Mixtures of anchors: the softmax over sparse rows against loops, the linear sum against one anchor table."""

import copy
import math

import numpy as np
import pytest
import torch

import featherbed as fb
from featherbed.errors import ArgumentError
from featherbed.packed.band import Ragged
from featherbed.tables import spec
from featherbed.tables.mixture import MixtureTable, enclosing_simplex, sparse_softmax


def made(rows=40, dim=6, **settings):
    settings.setdefault("anchors", (4, 3))
    return MixtureTable(rows, dim, generator=torch.Generator().manual_seed(1), **settings)


def sparsified(table, share=0.3, scale=3.0, seed=2):
    """Set most of the transform to zero, and the rest to something of the given size."""
    tensors = torch.Generator().manual_seed(seed)
    shape = table.transform.shape
    with torch.no_grad():
        drawn = torch.rand(shape, generator=tensors) * scale
        table.transform.copy_(
            torch.where(torch.rand(shape, generator=tensors) < share, drawn, torch.zeros(shape))
        )
    return table


def by_hand(transform, atoms, sizes):  # float64 [V, K], [K, d] -> [V, d]
    """The paper's sparse evaluation, entry by entry: only what is not zero is visited."""
    rows = np.zeros((len(transform), atoms.shape[1]))
    for i, row in enumerate(transform):
        first = 0
        for size in sizes:
            t, a = row[first : first + size], atoms[first : first + size]
            top, total = a.sum(0), float(size)
            for k in np.flatnonzero(t):
                top = top + (math.exp(t[k]) - 1) * a[k]
                total += math.exp(t[k]) - 1
            rows[i] += top / total
            first += size
    return rows


@pytest.mark.parametrize(
    "settings",
    [
        {"anchors": 5},
        {"anchors": (3, 4, 1), "sparse": True},
        {"anchors": 4, "combine": "linear"},
        {
            "anchors": (6, 2),
            "nonnegative": False,
            "inits": (fb.Xavier(), fb.Frequency(np.arange(50))),
        },
    ],
    ids=["softmax", "sparse", "linear", "objects"],
)
def test_it_is_a_table(settings):
    fb.testing.check_table(lambda **more: MixtureTable(50, 8, **settings, **more))


@pytest.mark.parametrize("sizes", [(4, 3), (5,), (2, 1, 6)])
def test_rows_are_the_softmax_over_sparse_rows(sizes):
    table = sparsified(made(anchors=sizes, dtype=torch.float64))
    expected = by_hand(table.transform.detach().numpy(), table.atoms.detach().numpy(), sizes)
    np.testing.assert_allclose(table.weight.detach().numpy(), expected, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(table.pack()[:], expected, rtol=1e-5, atol=1e-6)


def test_a_zero_weighs_one_and_a_row_of_zeros_is_the_mean():
    table = made()
    with torch.no_grad():
        table.transform[7] = 0
    expected = table.atoms[:4].mean(0) + table.atoms[4:].mean(0)
    torch.testing.assert_close(table(torch.tensor(7)), expected)
    gradient = torch.autograd.grad(table(torch.tensor(7)).sum(), table.transform)[0]
    centred = table.atoms[:4].sum(1) - table.atoms[:4].sum(1).mean()
    torch.testing.assert_close(gradient[7, :4], centred / 4, msg="zeros must be able to grow again")


def test_the_linear_sum_is_one_anchor_table():
    mixed = sparsified(made(anchors=(4, 3, 2), combine="linear"))
    one = fb.AnchorTable(40, 6, anchors=9)
    with torch.no_grad():
        one.atoms.copy_(mixed.atoms)
        one.transform.copy_(mixed.transform)
    ids = torch.tensor([3, 9, 3, 39])
    assert torch.equal(mixed(ids), one(ids))
    for mine, other in zip(
        torch.autograd.grad(mixed(ids).square().sum(), [mixed.transform, mixed.atoms]),
        torch.autograd.grad(one(ids).square().sum(), [one.transform, one.atoms]),
        strict=True,
    ):
        assert torch.equal(mine, other)
    assert mixed.parameter_count() == one.parameter_count()
    for settings in ({}, {"values": "int8", "dictionary": "float16"}, {"layout": "fixed"}):
        mine, other = mixed.pack(**settings).arrays, one.pack(**settings).arrays
        assert {name: array.tobytes() for name, array in mine.items()} == {
            n: a.tobytes() for n, a in other.items()
        }


@pytest.mark.parametrize("layout", ["auto", "ragged", "fixed", "all"])
@pytest.mark.parametrize("scale", [1e-6, 3.0, 88.8, 1000.0, -1000.0])
def test_packed_rows_are_stable_for_large_weights(scale, layout):
    table = sparsified(made(nonnegative=scale > 0), scale=scale)
    with torch.no_grad():
        table.transform[0] = scale * torch.arange(1, 8)  # sets without a zero
        table.transform[1] = scale
    dense = table.weight.detach().numpy()
    assert np.isfinite(dense).all()
    np.testing.assert_allclose(table.pack(layout=layout)[:], dense, rtol=1e-5, atol=1e-6)


def test_packed_codes_are_as_sparse_as_the_transform():
    table = sparsified(made(rows=500, anchors=(30, 20)), share=0.05)
    codes = table.pack(layout="ragged").bands[0].codes
    assert isinstance(codes, Ragged)
    assert codes.entries == int(torch.count_nonzero(table.transform)) + 2 * 500
    assert table.parameter_count() == int(torch.count_nonzero(table.transform)) + 50 * 6
    weights = sparse_softmax(table.transform.detach().numpy(), table.set_sizes)
    assert np.array_equal(weights[:, :50] == 0, table.transform.detach().numpy() == 0)
    assert 0 <= weights.min() <= weights.max() <= 1


def test_blocks_of_rows_make_no_difference(monkeypatch):
    transform = sparsified(made(anchors=(4, 3))).transform.detach().numpy()
    whole = sparse_softmax(transform, (4, 3))
    monkeypatch.setattr("featherbed.tables.mixture.BLOCK", 7)
    np.testing.assert_allclose(sparse_softmax(transform, (4, 3)), whole, rtol=1e-6)


def test_training_with_sparse_gradients_is_training_with_dense_ones():
    target = torch.randn(40, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    tables, losses = [], []
    for sparse in (False, True):
        table, order = made(dtype=torch.float64, sparse=sparse), torch.Generator().manual_seed(3)
        optimizer = fb.Yogi(
            table.parameters(), lr=0.05, penalties={table.transform: fb.NonNegativeL1(2e-3)}
        )
        for _ in range(60):
            ids = torch.randint(40, (16,), generator=order)
            optimizer.zero_grad()
            loss = (table(ids) - target[ids]).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        tables.append(table)
    dense, sparse = (table.transform.detach() for table in tables)
    torch.testing.assert_close(dense, sparse, rtol=1e-5, atol=1e-7)
    assert bool((dense >= 0).all())
    assert 0 < int((dense == 0).sum()) < dense.numel()
    assert np.mean(losses[50:60]) < 0.8 * losses[0]


def test_every_set_has_its_own_start():
    counts = np.random.default_rng(0).permutation(40)
    inits = (fb.HalfNormal(transform_std=2.0), fb.Frequency(counts, transform_std=0.01))
    table = made(anchors=(30, 5), inits=inits)
    first, second = table.transform.detach().split([30, 5], 1)
    assert 1.0 < first.abs().mean() < 2.2
    ids = table.anchor_ids[1]
    assert table.anchor_ids[0] is None
    assert ids.tolist() == np.argsort(-counts)[:5].tolist()
    shares = second.softmax(1)[ids]
    torch.testing.assert_close(shares.diagonal(), torch.full((5,), 0.9))
    others = np.setdiff1d(np.arange(40), ids.numpy())
    assert second[others].abs().max() < 0.05
    twin = made(anchors=(30, 5), inits=inits)
    twin.load_state_dict(table.state_dict())
    assert torch.equal(copy.deepcopy(twin).anchor_ids[1], ids)
    linear = made(anchors=(30, 5), inits=inits, combine="linear")
    assert torch.equal(linear.transform.detach()[ids, 30:], torch.eye(5))


def test_a_fit_under_the_softmax_is_the_best_there_is():
    tensors = torch.Generator().manual_seed(0)
    matrix = torch.randn(300, 4, generator=tensors) @ torch.randn(4, 12, generator=tensors)
    matrix += 0.3 * torch.randn(300, 12, generator=tensors) + 2.0
    spread = (matrix - matrix.mean(0)).square().sum()
    for sizes in ((3, 2), (5,), (4, 1, 3)):
        table = MixtureTable.from_dense(matrix, anchors=sizes)
        left = (
            torch.linalg.svdvals((matrix - matrix.mean(0)).double())[sum(sizes) - len(sizes) :]
            .square()
            .sum()
        )
        error = (table.weight - matrix).square().sum()
        torch.testing.assert_close(error.double(), left, rtol=1e-3, atol=1e-4)
        assert error < 0.8 * spread, "the mean row alone is farther"
        assert bool((table.transform >= 0).all())
    torch.testing.assert_close(
        MixtureTable.from_dense(matrix, anchors=7).weight, matrix, rtol=1e-3, atol=1e-3
    )
    lonely = MixtureTable.from_dense(matrix, anchors=1, sets=3)
    torch.testing.assert_close(lonely.weight, matrix.mean(0).expand(300, -1), rtol=1e-4, atol=1e-5)


def test_a_linear_fit_is_that_of_the_anchor_table():
    matrix = torch.randn(60, 8, generator=torch.Generator().manual_seed(0))
    for nonnegative in (True, False):
        mixed = MixtureTable.from_dense(
            matrix, anchors=(3, 2), combine="linear", nonnegative=nonnegative
        )
        assert torch.equal(
            mixed.weight,
            fb.AnchorTable.from_dense(matrix, anchors=5, nonnegative=nonnegative).weight,
        )


def test_fits_of_constant_rows_and_of_more_anchors_than_directions():
    same = torch.full((20, 3), 1.5)
    torch.testing.assert_close(MixtureTable.from_dense(same, anchors=4).weight, same)
    few = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        MixtureTable.from_dense(few, anchors=(9, 6)).weight, few, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_a_simplex_holds_its_points(count):
    points = torch.randn(
        50, count - 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    weights, corners = enclosing_simplex(points)
    assert corners.shape == (count, count - 1)
    assert bool((weights > 0).all())
    torch.testing.assert_close(weights.sum(1), torch.ones(50, dtype=torch.float64))
    torch.testing.assert_close(weights @ corners, points)


def test_a_spec_and_a_repr_make_it(monkeypatch):
    monkeypatch.setattr(spec, "METHODS", (*spec.METHODS, MixtureTable))
    table = spec.make_table(
        "mixture:sets=3,anchors=10,inits=xavier(gain=2.0),combine='softmax'", 100, 8
    )
    assert isinstance(table, MixtureTable)
    assert (table.set_sizes, table.inits[2].gain) == ((10, 10, 10), 2.0)
    again = eval(repr(table), {"MixtureTable": MixtureTable, "Xavier": fb.Xavier})
    assert again.set_sizes == table.set_sizes
    assert made().pack().made_by["anchors"] == "(4, 3)"
    assert made().pack().made_by["sets"] == 2
    with pytest.raises(ArgumentError, match="needs anchors="):
        spec.make_table("mixture:sets=3", 100, 8)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"anchors": 0}, "anchors=0"),
        ({"anchors": True}, "anchors=True"),
        ({"anchors": "many"}, "anchors='many'"),
        ({"anchors": (3, 0)}, "anchors=0"),
        ({"anchors": ()}, "one size for every set"),
        ({"anchors": (3, 4), "sets": 3}, "one size for every set"),
        ({"anchors": 3, "sets": 0}, "sets=0"),
        ({"anchors": 3, "sets": 1.5}, "sets=1.5"),
        ({"combine": "product"}, "softmax or linear"),
        ({"inits": (fb.HalfNormal(),)}, "for all 2 sets"),
        ({"inits": "xavier"}, "for all 2 sets"),
        ({"inits": (fb.HalfNormal(), "xavier")}, "fb.Frequency"),
        ({"anchors": (3, 50), "inits": fb.Frequency(np.arange(40))}, "only 40 objects"),
    ],
)
def test_bad_settings_are_named(settings, said):
    with pytest.raises(ArgumentError, match=said):
        made(**settings)
