"""Every table through the conformance suite, and what each promises beyond it."""

import copy
import inspect
import pickle
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import featherbed as fb
from featherbed import testing
from featherbed.tables import Codes
from featherbed.tables.spec import METHODS, method_name

COUNTS = torch.arange(600) % 97
VARIANTS = {
    "anchor signed": lambda **kw: fb.AnchorTable(50, 8, anchors=5, nonnegative=False, **kw),
    "anchor xavier": lambda **kw: fb.AnchorTable(50, 8, anchors=12, init=fb.Xavier(), **kw),
    "anchor sparse": lambda **kw: fb.AnchorTable(50, 8, anchors=5, sparse=True, **kw),
    "anchor slots": lambda **kw: fb.AnchorTable(50, 8, anchors=9, slots=3, **kw),
    "anchor slots signed": lambda **kw: fb.AnchorTable(
        50, 8, anchors=300, slots=2, nonnegative=False, **kw
    ),
    "dense sparse": lambda **kw: fb.DenseTable(50, 8, sparse=True, **kw),
    "lowrank sparse": lambda **kw: fb.LowRankTable(50, 8, rank=3, sparse=True, **kw),
    "hashed sparse": lambda **kw: fb.HashedTable(
        50, 8, buckets=6, values="learnt", sparse=True, **kw
    ),
    "kd sparse": lambda **kw: fb.KDTable(50, 8, choices=4, parts=5, sparse=True, **kw),
    "product sparse": lambda **kw: fb.ProductTable(50, 8, choices=4, parts=4, sparse=True, **kw),
    "quantized sparse": lambda **kw: fb.QuantizedTable(50, 8, bits=4, sparse=True, **kw),
    "hashed learnt": lambda **kw: fb.HashedTable(50, 8, buckets=6, hashes=3, values="learnt", **kw),
    "hashed one": lambda **kw: fb.HashedTable(50, 8, buckets=6, hashes=1, **kw),
    "remainder sum": lambda **kw: fb.RemainderTable(50, 8, divisor=7, combine="sum", **kw),
    "selected hashed": lambda **kw: fb.SelectedTable(600, 8, keep=70, rest=4, counts=COUNTS, **kw),
    "selected all": lambda **kw: fb.SelectedTable(50, 8, keep=50, **kw),
    "quantized column": lambda **kw: fb.QuantizedTable(50, 8, bits=3, scales="column", **kw),
    "quantized 2": lambda **kw: fb.QuantizedTable(50, 7, bits=2, **kw),
    "quantized 8": lambda **kw: fb.QuantizedTable(50, 8, **kw),
}
for method in METHODS:
    VARIANTS[method_name(method)] = lambda method=method, **kw: method(
        50, 8, **method.example, **kw
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_conformance(name):
    if name == "selected all":  # every row is kept, so counts play no part
        testing.check_packed(VARIANTS[name])
        return
    testing.check_table(VARIANTS[name])


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("name", [*map(method_name, METHODS), "anchor sparse", "anchor slots"])
def test_compiled(name):
    testing.check_compiled(VARIANTS[name])


def test_every_method_is_public_and_listed():
    listed = {name: getattr(fb.tables, name) for name in fb.tables.__all__}
    found = {
        name
        for name, public in listed.items()
        if inspect.isclass(public) and issubclass(public, fb.Table) and public is not fb.Table
    }
    assert found == {method.__name__ for method in METHODS}
    assert found <= set(fb.__all__)


def test_conformance_sees_a_wrong_gradient():
    class Wrong(fb.DenseTable):
        def lookup(self, ids):
            return 2 * super().lookup(ids) - super().lookup(ids).detach()

    with pytest.raises(AssertionError, match="gradient of weight"):
        testing.check_gradients(lambda **kw: Wrong(50, 8, **kw))


def test_conformance_sees_a_missing_id_check():
    class Wrong(fb.DenseTable):
        def forward(self, ids):
            return self.lookup(ids.long().clamp(0, self.num_embeddings - 1))

    with pytest.raises(AssertionError, match="accepted"):
        testing.check_bad_ids(lambda **kw: Wrong(50, 8, **kw))


def test_conformance_sees_a_size_that_lies():
    class Wrong(fb.DenseTable):
        def sizes(self, optimizer=None):
            true = super().sizes(optimizer)
            return fb.Sizes(
                true.file - 1, true.resident, true.training, true.parameters, true.dense
            )

    with pytest.raises(AssertionError, match="the file has"):
        testing.check_sizes(lambda **kw: Wrong(50, 8, **kw))


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: fb.DenseTable(0, 4), "num_embeddings=0"),
        (lambda: fb.DenseTable(4, -1), "embedding_dim=-1"),
        (lambda: fb.DenseTable(4, 4, padding_idx=4), "padding_idx=4"),
        (lambda: fb.AnchorTable(4, 4, anchors=0), "anchors=0"),
        (lambda: fb.LowRankTable(4, 4, rank=1.5), "rank=1.5"),
        (lambda: fb.HashedTable(4, 4, buckets=2, values="some"), "values='some'"),
        (lambda: fb.HashedTable(4, 4, buckets=2, seed=-1), "seed=-1"),
        (lambda: fb.RemainderTable(4, 4, divisor=2, combine="max"), "combine='max'"),
        (lambda: fb.SelectedTable(4, 4, keep=5), "keep=5"),
        (lambda: fb.SelectedTable(4, 4, keep=2, counts=torch.ones(3)), r"\(3,\)"),
        (lambda: fb.QuantizedTable(4, 4, bits=5), "bits=5"),
        (lambda: fb.QuantizedTable(4, 4, scales="none"), "scales='none'"),
        (lambda: fb.DenseTable(4, 4).logits(torch.ones(3)), "width 3"),
        (lambda: fb.DenseTable(4, 4).bag(torch.ones(2, 2).long(), mode="max"), "mode='max'"),
        (lambda: fb.DenseTable(4, 4).bag(torch.ones(2).long()), "1-D"),
        (lambda: fb.DenseTable(4, 4).bag(torch.ones(2).long(), torch.tensor([1])), "start at 0"),
        (
            lambda: fb.DenseTable(4, 4).bag(torch.ones(2).long(), torch.tensor([0, 3])),
            "at most at 2",
        ),
        (lambda: fb.Bag(fb.DenseTable(4, 4), mode="max"), "mode='max'"),
        (lambda: fb.Bag(fb.DenseTable(4, 4), max_norm=1.0), "max_norm"),
        (lambda: fb.DenseTable(4, 4).pack(dictionary="int7"), "int7"),
        (lambda: fb.AnchorTable(4, 4, anchors=2).pack(layout="round"), "layout='round'"),
    ],
)
def test_bad_settings_are_named(make, named):
    with pytest.raises(fb.ArgumentError, match=named):
        make()


def test_dense_table_loads_an_embedding_of_torch():
    embedding = torch.nn.Embedding(10, 4, padding_idx=0)
    table = fb.DenseTable(10, 4, padding_idx=0)
    table.load_state_dict(embedding.state_dict())
    assert torch.equal(table(torch.arange(10)), embedding(torch.arange(10)))


def test_bag_module_equals_torch():
    theirs = torch.nn.EmbeddingBag(20, 4, mode="mean", include_last_offset=True, padding_idx=3)
    ours = fb.Bag(
        fb.DenseTable.from_dense(theirs.weight.detach(), padding_idx=3),
        "mean",
        include_last_offset=True,
    )
    ids, offsets = torch.tensor([1, 3, 3, 7, 9]), torch.tensor([0, 2, 2, 5])
    torch.testing.assert_close(ours(ids, offsets), theirs(ids, offsets))


def test_fits_are_as_near_as_the_method_can_be(tensors):
    matrix = torch.randn(60, 3, generator=tensors) @ torch.randn(3, 8, generator=tensors)
    exact = fb.LowRankTable.from_dense(matrix, rank=3)
    torch.testing.assert_close(exact.weight, matrix, atol=1e-4, rtol=1e-4)
    positive = torch.rand(60, 3, generator=tensors) @ torch.randn(3, 8, generator=tensors)
    anchors = fb.AnchorTable.from_dense(positive, anchors=3)
    assert bool((anchors.transform >= 0).all())
    assert float((anchors.weight.detach() - positive).norm() / positive.norm()) < 0.1
    product = fb.RemainderTable(60, 8, divisor=7, generator=tensors).weight.detach()
    torch.testing.assert_close(
        fb.RemainderTable.from_dense(product, divisor=7).weight, product, atol=1e-4, rtol=1e-3
    )
    wide = torch.randn(60, 8, generator=tensors)
    kept = fb.SelectedTable.from_dense(wide, keep=20).weight
    torch.testing.assert_close(kept[:20], wide[:20])
    torch.testing.assert_close(kept[30], wide[20:].mean(0))


def test_pursued_anchors_are_near_rows_of_few_anchors():
    draw = torch.Generator().manual_seed(0)
    atoms = torch.randn(40, 24, generator=draw)
    values = torch.rand(2000, 4, generator=draw) + 0.2
    chosen = torch.stack([torch.randperm(40, generator=draw)[:4] for _ in range(2000)])
    rows = (values[:, :, None] * atoms[chosen]).sum(1)
    table = fb.AnchorTable.from_dense(rows, anchors=60, slots=6)
    assert bool((table.transform >= 0).all())
    assert float((table.weight.detach() - rows).square().sum() / rows.square().sum()) < 0.1
    signed = fb.AnchorTable.from_dense(rows, anchors=60, slots=6, nonnegative=False)
    assert float((signed.weight.detach() - rows).square().sum() / rows.square().sum()) < 0.1


@pytest.mark.parametrize(
    "make",
    [
        lambda: fb.AnchorTable(400, 12, anchors=8, slots=3),
        lambda: fb.AnchorTable(400, 12, anchors=5),
        lambda: fb.AnchorTable(400, 12, anchors=5, nonnegative=False),
        lambda: fb.LowRankTable(400, 12, rank=3),
        lambda: fb.KDTable(400, 12, choices=8, parts=3),
        lambda: fb.KDTable(400, 12, choices=8, parts=3, composer=fb.Composer(shared=True)),
        lambda: fb.ProductTable(400, 12, choices=8, parts=3),
        lambda: fb.ProductTable(400, 12, choices=8, parts=3, shared=True),
        lambda: fb.ProductTable(400, 12, choices=8, parts=3, additive=True),
        lambda: fb.GradedTable(400, 12, bits=2, grades=4),
        lambda: fb.HashedTable(400, 12, buckets=60),
        lambda: fb.RemainderTable(400, 12, divisor=40),
        lambda: fb.RemainderTable(400, 12, divisor=40, combine="sum"),
        lambda: fb.SelectedTable(400, 12, keep=10, rest=5),
        lambda: fb.MixtureTable(400, 12, anchors=4, sets=2),
        lambda: fb.MixtureTable(400, 12, anchors=4, sets=2, combine="linear"),
        lambda: fb.MixedTable(400, 12, dims=(6, 3), blocks=(20, 380)),
        lambda: fb.BandedTable(400, 12, hot=5, tail="lowrank:rank=3"),
    ],
)
def test_weighed_rows_are_fitted_better(make):
    rows = torch.randn(400, 12, generator=torch.Generator().manual_seed(0))
    weights = torch.cat([torch.full((50,), 100.0), torch.full((350,), 0.5)])
    errors = []
    for given in (None, weights):
        table = make()
        with torch.no_grad():
            table.fit_dense(rows, given)
        errors.append((table.weight.detach() - rows).square().sum(1))
    even, weighed = errors
    assert weighed[:50].mean() < even[:50].mean()
    assert (weights * weighed).sum() < (weights * even).sum()
    for wrong in (weights[:5], -weights, weights * torch.nan, torch.zeros(400)):
        with torch.no_grad(), pytest.raises(fb.ArgumentError, match="one for each row"):
            make().fit_dense(rows, wrong)


def test_weights_choose_the_scales_of_columns():
    rows = torch.randn(400, 1, generator=torch.Generator().manual_seed(0))
    rows[0] = 20.0
    weights = torch.ones(400)
    weights[0] = 1000.0
    even, weighed = (fb.QuantizedTable(400, 1, bits=2, scales="column") for _ in range(2))
    with torch.no_grad():
        even.fit_dense(rows)
        weighed.fit_dense(rows, weights)
    assert (weighed.weight[0] - 20.0).abs() < (even.weight[0] - 20.0).abs()


@pytest.mark.parametrize("make", [fb.DenseTable, fb.VariationalTable, fb.QuantizedTable])
def test_rows_that_are_kept_whatever_their_weights(make):
    rows = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    table, other = make(20, 4).eval(), make(20, 4).eval()
    with torch.no_grad():
        table.fit_dense(rows)
        other.fit_dense(rows, torch.arange(20.0))
        with pytest.raises(fb.ArgumentError, match="one for each row"):
            table.fit_dense(rows, torch.ones(3))
    assert torch.equal(table.weight, other.weight)


def test_a_table_that_cannot_weigh_rows_says_so():
    table = fb.TensorTrainTable(20, 4, rank=2)
    assert not table.weighs_rows
    with torch.no_grad(), pytest.raises(fb.ArgumentError, match="leave weights out"):
        table.fit_dense(torch.ones(20, 4), torch.ones(20))


def test_anchors_that_are_fitted_stand_for_no_objects():
    table = fb.AnchorTable.from_dense(
        torch.randn(50, 4), anchors=5, slots=2, init=fb.Frequency(torch.arange(50))
    )
    assert table.anchor_ids is None


def test_hashed_fit_is_the_least_squares_solution(tensors):
    matrix = torch.randn(200, 5, generator=tensors, dtype=torch.float64)
    table = fb.HashedTable.from_dense(matrix, buckets=30)
    indices = table.codes(torch.arange(200)).indices
    design = torch.zeros(200, 30, dtype=torch.float64).scatter_add_(
        1, indices, torch.ones(200, 2, dtype=torch.float64)
    )
    best = torch.linalg.lstsq(design, matrix, driver="gelsd").solution
    torch.testing.assert_close(table.weight, design @ best, atol=1e-6, rtol=1e-6)


def test_low_bit_rows_lose_less_with_more_bits(tensors):
    matrix = torch.randn(300, 16, generator=tensors)
    errors = [
        float((fb.QuantizedTable.from_dense(matrix, bits=b).weight.detach() - matrix).norm())
        for b in (8, 4, 3, 2)
    ]
    assert errors == sorted(errors)
    assert errors[0] / float(matrix.norm()) < 0.01
    assert (
        errors[3] / float(matrix.norm())
    ) ** 2 < 0.14  # the best four-level rounding of a Gaussian leaves 0.119


def test_low_bit_rows_train(tensors):
    target = torch.randn(40, 6, generator=tensors)
    table = fb.QuantizedTable(40, 6, bits=2, scales="column", generator=tensors)
    optimizer = torch.optim.Adam(table.parameters(), lr=0.02)
    before = float((table.weight.detach() - target).square().mean())
    for _ in range(600):
        optimizer.zero_grad()
        (table(torch.arange(40)) - target).square().mean().backward()
        optimizer.step()
    assert float((table.weight.detach() - target).square().mean()) < 0.25 * before
    assert all(len(column.unique()) <= 4 for column in table.weight.T)


def test_logits_in_blocks_equal_logits_at_once(monkeypatch, tensors):
    table = fb.RemainderTable(100, 8, divisor=10, generator=tensors)
    hidden = torch.randn(4, 8, generator=tensors, requires_grad=True)
    whole = table.logits(hidden)
    expected = torch.autograd.grad(whole.square().sum(), [hidden, table.atoms])
    monkeypatch.setattr("featherbed.tables.table.BLOCK_ELEMENTS", 64)
    blocks = table.logits(hidden)
    torch.testing.assert_close(blocks, whole)
    for mine, theirs in zip(
        torch.autograd.grad(blocks.square().sum(), [hidden, table.atoms]), expected, strict=True
    ):
        torch.testing.assert_close(mine, theirs)


def test_logits_never_hold_the_dense_table(monkeypatch, tensors):
    monkeypatch.setattr("featherbed.tables.table.BLOCK_ELEMENTS", 80)
    asked = []

    class Spy(fb.RemainderTable):
        def lookup(self, ids):
            asked.append(ids.numel())
            return super().lookup(ids)

    table = Spy(1000, 8, divisor=30, generator=tensors)
    table.logits(torch.randn(20, 8, generator=tensors)).sum().backward()
    assert max(asked) == 10
    assert sum(asked) == 2000  # once forward, once more for the backward pass: no block was kept


def test_hashing_is_the_same_in_numpy_and_torch_beyond_32_bits():
    from featherbed.hashing import hash_codes, hash_ids

    ids = np.array([0, 1, 2**31 - 1, 2**31, 2**40 + 7, 2**62])
    for seed in (0, 7, 2**32 - 1):
        assert (
            hash_ids(ids, seed, 1009).tolist()
            == hash_ids(torch.from_numpy(ids), seed, 1009).tolist()
        )
    spread = np.bincount(hash_ids(np.arange(100_000), 1, 100), minlength=100)
    assert abs(spread - 1000).max() < 200  # six standard deviations
    first, second = hash_codes(np.arange(100_000), seed=0, hashes=2, buckets=100)
    assert (
        abs(float(np.mean(first == second)) - 0.01) < 0.003
    )  # independent functions meet by chance only


def test_remainder_uses_whole_numbers_only():
    table = fb.RemainderTable(2**33, 1, divisor=2**32, device="meta")
    codes = table.codes(torch.tensor([2**33 - 1, 2**32, 2**32 - 1]))
    assert codes.indices.tolist() == [[1, 2 + 2**32 - 1], [1, 2], [0, 2 + 2**32 - 1]]


CHANGES = {
    fb.AnchorTable: [
        {"anchors": 6},
        {"slots": 2},
        {"nonnegative": False},
        {"padding_idx": 1},
        {"init": fb.Xavier()},
    ],
    fb.BandedTable: [
        *(
            {"hot": 9},
            {"head": "quantized:bits=2"},
            {"tail": "lowrank:rank=4"},
            {"counts": torch.arange(50)},
        ),
        {"padding_idx": 1},
    ],
    fb.DenseTable: [{"padding_idx": 1}],
    fb.GradedTable: [{"bits": 2}, {"grades": 2}, {"counts": torch.arange(50)}, {"padding_idx": 1}],
    fb.MixedTable: [
        {"dims": (8, 2)},
        {"blocks": (10, 40)},
        {"counts": torch.arange(50)},
        {"padding_idx": 1},
    ],
    fb.GrowingAnchorTable: [
        {"anchors": 6},
        {"nonnegative": False},
        {"padding_idx": 1},
        {"init": fb.Xavier()},
    ],
    fb.MixtureTable: [
        *(
            {"anchors": 6},
            {"anchors": 4, "sets": 3},
            {"combine": "linear"},
            {"inits": fb.Xavier()},
            {"nonnegative": False},
        ),
        {"padding_idx": 1},
    ],
    fb.HashedTable: [{"buckets": 9}, {"hashes": 3}, {"seed": 3}, {"padding_idx": 1}],
    fb.KDTable: [
        *(
            {"choices": 3},
            {"parts": 4},
            {"composer": "mlp"},
            {"composer": fb.Composer(code_dim=5)},
            {"composer": fb.Composer(pool="sum")},
            {"composer": fb.Composer(shared=True)},
            {"composer": fb.Composer(output_norm=True)},
            {"padding_idx": 1},
        ),
        *(
            {"relax": fb.Softmax()},
            {"guide": fb.Online()},
            {"relax": fb.StraightThrough(logit_norm=False)},
            {"unique": True},
        ),
    ],
    fb.LowRankTable: [{"rank": 5}, {"padding_idx": 1}],
    fb.ProductTable: [
        *(
            {"choices": 3},
            {"parts": 2},
            {"variant": "centroid"},
            {"shared": True},
            {"additive": True},
            {"padding_idx": 1},
        ),
        {"variant": fb.Matching(query_dim=5)},
        {"variant": fb.Matching(temperature=0.5)},
        {"variant": fb.Matching(normalize=False)},
    ],
    fb.QuantizedTable: [{"bits": 2}, {"scales": "column"}, {"padding_idx": 1}],
    fb.RemainderTable: [{"divisor": 5}, {"combine": "sum"}, {"padding_idx": 1}],
    fb.SelectedTable: [{"keep": 9}, {"rest": 3}, {"counts": torch.arange(50)}, {"padding_idx": 1}],
    fb.TensorTrainTable: [
        {"rank": 2},
        {"shape": (5, 5, 2)},
        {"dims": (1, 2, 4)},
        {"std": 0.5},
        {"padding_idx": 1},
    ],
    fb.VariationalTable: [
        *(
            {"noise": "weight"},
            {"kl": 9.0},
            {"samples": 5},
            {"threshold": -9.0},
            {"start": 0.0},
            {"padding_idx": 1},
        ),
    ],
}


@pytest.mark.parametrize("method", METHODS, ids=method_name)
def test_every_setting_changes_the_rows(method):
    def rows(**settings):
        merged = method.example | settings
        table = method(50, 8, generator=torch.Generator().manual_seed(0), **merged)
        before = table.eval().weight.detach().clone()
        table.train()
        optimizer = torch.optim.SGD(table.parameters(), lr=3.0)
        torch.manual_seed(0)
        for _ in range(3):  # settings that matter in training only show after a few steps
            optimizer.zero_grad()
            (table(torch.arange(50)).square().mean() + fb.auxiliary_loss(table)).backward()
            optimizer.step()
        return torch.cat([before, table.eval().weight.detach()])

    covered = {"self", "num_embeddings", "embedding_dim", "generator", "dtype", "device"}
    for change in CHANGES[method]:
        assert not torch.equal(rows(), rows(**change)), change
        covered |= set(change)
    if method is fb.HashedTable:  # learnt weights start at one: the setting adds a parameter
        assert dict(method(50, 8, buckets=6, values="learnt").named_parameters()).keys() == {
            "atoms",
            "weights",
        }
        covered.add("values")
    if method is fb.GrowingAnchorTable:  # a limit that these few anchors are far from
        covered.add("max_anchors")
    if (
        "sparse" in inspect.signature(method.__init__).parameters
    ):  # the same rows, gradients of another kind
        learnt = {"values": "learnt"} if method is fb.HashedTable else {}
        for sparse in (False, True):
            table = method(50, 8, **method.example, **learnt, sparse=sparse)
            table(torch.arange(3)).square().sum().backward()
            assert (
                any(p.grad is not None and p.grad.is_sparse for p in table.parameters()) == sparse
            )
        covered.add("sparse")
    if method is fb.AnchorTable:
        covered.add("scan_every")  # in test_rows: when anchors come in
    if method is fb.ProductTable:
        pulled = fb.Matching("centroid", commitment=0.5)
        assert not torch.equal(rows(variant="centroid"), rows(variant=pulled))
    assert covered == set(inspect.signature(method.__init__).parameters)


def test_init_settings_change_something():
    def table(init):
        return fb.AnchorTable(
            50, 8, anchors=4, init=init, generator=torch.Generator().manual_seed(0)
        ).weight

    assert not torch.equal(table(fb.HalfNormal()), table(fb.HalfNormal(transform_std=0.5)))
    assert not torch.equal(table(fb.Xavier()), table(fb.Xavier(gain=2.0)))


def test_what_is_no_tensor_of_ids_is_refused():
    for ids in ([1, 2], 3, np.array([3])):
        with pytest.raises(fb.IdError, match=r"torch\.as_tensor"):
            fb.DenseTable(10, 4)(ids)


def test_the_hash_functions_belong_to_the_state():
    one, other = (fb.HashedTable(50, 4, buckets=5, seed=seed) for seed in (1, 2))
    with pytest.raises((fb.ArgumentError, RuntimeError), match="seed=1"):
        other.load_state_dict(one.state_dict())


def test_diverged_rows_are_not_stored_as_numbers():
    table = fb.QuantizedTable(20, 6, bits=4)
    with torch.no_grad():
        table.rows[3, 2] = float("nan")
    with pytest.raises(fb.ArgumentError, match="diverged"):
        table.pack()
    large = (
        torch.randn(20, 6, generator=torch.Generator().manual_seed(0)).clamp(-2, 2) * 3e4
    ).half()
    with pytest.raises(fb.ArgumentError, match=r"dtype=torch\.float32"):
        fb.AnchorTable.from_dense(large, anchors=3)
    with pytest.raises(fb.ArgumentError, match="NaN"):
        fb.SelectedTable(3, 2, keep=1, counts=torch.tensor([1.0, float("nan"), 2.0]))


def test_anchors_of_many_rows_are_fitted_from_a_sample(monkeypatch, tensors):
    monkeypatch.setattr("featherbed.tables.fitting.SAMPLE", 200)
    matrix = torch.rand(1500, 4, generator=tensors) @ torch.randn(4, 8, generator=tensors)
    table = fb.AnchorTable.from_dense(matrix, anchors=6)
    assert float((table.weight.detach() - matrix).norm() / matrix.norm()) < 0.15


def test_a_dense_table_keeps_its_padding_row_as_nn_embedding_does(tmp_path):
    matrix = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    embedding = torch.nn.Embedding.from_pretrained(matrix, freeze=False, padding_idx=1)
    table = fb.DenseTable.from_pretrained(matrix, freeze=False, padding_idx=1)
    ids, hidden = torch.tensor([[1, 2], [1, 1]]), torch.ones(2, 3)
    for one, other in (
        (table(ids), embedding(ids)),
        (table.logits(hidden), hidden @ embedding.weight.T),
        (table.bag(ids), F.embedding_bag(ids, embedding.weight, mode="sum", padding_idx=1)),
    ):
        torch.testing.assert_close(one, other)
    table(ids).sum().backward()
    embedding(ids).sum().backward()
    assert torch.equal(table.weight.grad, embedding.weight.grad)
    with pytest.raises(fb.ArgumentError, match="padding row 1 is not zero"):
        table.pack()
    table.weight.data[1] = 0
    assert not table.pack()[1].any()


def test_a_compact_table_says_that_its_padding_row_is_zero():
    matrix = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    with pytest.warns(fb.FeatherbedWarning, match="row 2 .* padding"):
        table = fb.LowRankTable.from_dense(matrix, rank=2, padding_idx=2)
    assert not table(torch.tensor([2])).any()


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("slots", [None, 3])
def test_rows_that_lag_behind_are_exported_and_vmapped_as_they_are_looked_up(slots, strict):
    def train():
        generator = torch.Generator().manual_seed(0)
        init = fb.HalfNormal(0.3)
        table = fb.AnchorTable(
            30, 4, anchors=5, sparse=True, slots=slots, init=init, generator=generator
        )
        penalty = {table.transform: fb.NonNegativeL1(0.01)}
        optimizer = fb.Yogi(table.parameters(), lr=0.05, penalties=penalty)
        for ids in torch.randint(30, (20, 6), generator=generator):
            optimizer.zero_grad()
            table(ids).square().sum().backward()
            optimizer.step()
        optimizer.zero_grad()
        return table, optimizer  # the rows that other batches stepped lag behind while it lives

    ids = torch.arange(30)
    expected = train()[0](ids).detach()
    table, optimizer = train()
    assert not torch.allclose(table._parameters["transform"], train()[0].transform)
    program = torch.export.export(table.eval(), (ids,), strict=strict)
    torch.testing.assert_close(program.module()(ids), expected)
    table, optimizer = train()
    torch.testing.assert_close(torch.func.vmap(table)(ids.reshape(5, 6)).reshape(30, 4), expected)
    assert optimizer.state


def test_states_go_to_nn_embedding_and_back():
    embedding, table = torch.nn.Embedding(5, 3), fb.DenseTable(5, 3, sparse=True)
    table.load_state_dict(embedding.state_dict())
    assert torch.equal(table.weight, embedding.weight)
    again = torch.nn.Embedding(5, 3)
    again.load_state_dict(fb.DenseTable.from_dense(embedding.weight.detach() + 1).state_dict())
    assert torch.equal(again.weight, embedding.weight + 1)


@pytest.mark.parametrize(
    ("table", "old"),
    [
        (lambda: fb.DenseTable(9, 4), {"weight": "rows.weight"}),
        (lambda: fb.AnchorTable(9, 4, anchors=3), {"transform": "transform.weight"}),
        (lambda: fb.QuantizedTable(9, 4), {"rows": "rows.weight", "scale": "scale.weight"}),
        (lambda: fb.KDTable(9, 4, choices=2, parts=3), {"code_logits": "code_logits.weight"}),
        (lambda: fb.LowRankTable(9, 4, rank=2), {"coefficients": "values.weight"}),
        (
            lambda: fb.ProductTable(9, 4, choices=2, parts=2),
            {"queries": "queries.weight", "atoms": "values", "key_vectors": "keys"},
        ),
    ],
)
def test_states_of_earlier_versions_load(table, old):
    saved, fresh = table(), nn.Sequential(table())
    state = {f"0.{old.get(name, name)}": value for name, value in saved.state_dict().items()}
    fresh.load_state_dict(state)
    assert torch.equal(fresh[0].eval().weight, saved.eval().weight)


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.__setitem__(3, 0),
        lambda weight: weight.data.__setitem__(3, 0),
        lambda weight: nn.init.normal_(weight),
        lambda weight: weight.mul_(2),
        lambda weight: weight.data.copy_(weight),
    ],
)
def test_writing_to_a_computed_weight_is_an_error(write):
    table = fb.AnchorTable(10, 4, anchors=3)
    with torch.no_grad(), pytest.raises(fb.ArgumentError, match="computed from its parameters"):
        write(table.weight)
    plain = pickle.loads(pickle.dumps(table.weight.detach())), copy.deepcopy(table.weight)
    assert all(type(one) is torch.Tensor for one in (*plain, table.weight + 1, table.weight[3]))
    (gradient,) = torch.autograd.grad(table.weight.sum(), table.atoms)
    assert gradient.any()


def test_computed_weights_are_saved_as_tensors(tmp_path):
    table = fb.AnchorTable(10, 4, anchors=3)
    torch.save(table.weight, tmp_path / "rows.pt")
    assert torch.equal(torch.load(tmp_path / "rows.pt", weights_only=True), table.weight)


def test_logits_take_the_dtype_of_the_hidden_vectors():
    for method in METHODS:
        table = method(50, 8, **method.example)
        assert table.logits(torch.ones(2, 8, dtype=torch.float64)).dtype == torch.float64


def test_an_infinite_weight_on_padding_counts_for_nothing():
    table = fb.AnchorTable(10, 4, anchors=3, padding_idx=2)
    pooled = table.bag(torch.tensor([2, 3]), torch.tensor([0]), torch.tensor([float("inf"), 1.0]))
    torch.testing.assert_close(pooled[0], table(torch.tensor(3)))


def test_anchors_see_every_kind_of_row_even_if_rows_repeat(monkeypatch, tensors):
    monkeypatch.setattr("featherbed.tables.fitting.SAMPLE", 200)
    matrix = torch.randn(3, 4, generator=tensors).repeat(200, 1)
    table = fb.AnchorTable.from_dense(matrix, anchors=6)
    assert float((table.weight.detach() - matrix).norm() / matrix.norm()) < 0.2


def test_a_method_without_a_packed_form_says_so(tmp_path):
    class Loose(fb.Table):
        def __init__(self):
            super().__init__(5, 3)
            self.seed = torch.nn.Parameter(torch.ones(3))

        def codes(self, ids):
            return Codes(None, torch.sin(self.seed * ids[..., None]), None)

    table = Loose()
    assert table(torch.tensor([1, 2])).shape == (2, 3)
    with pytest.raises(fb.NotPackable, match="Loose has no packed form"):
        fb.save(table, tmp_path / "t")
    assert not list(tmp_path.iterdir())
