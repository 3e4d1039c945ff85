"""Sampled losses: samplers that know their expected counts, and losses that come near the full softmax."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import featherbed as fb
from featherbed.losses import Sampler, samplers, tied_cross_entropy
from featherbed.tables.spec import METHODS, method_name

SAMPLERS = [fb.LogUniform, fb.Uniform]
LOSSES = [fb.SampledSoftmax, fb.NCE]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def batch(table, *shape, seed=0, dtype=torch.float64):
    hidden = torch.randn(*shape, table.embedding_dim, generator=seeded(seed), dtype=dtype)
    return hidden.requires_grad_(), torch.randint(
        table.num_embeddings, shape, generator=seeded(seed + 1)
    )


def dense(rows=40, width=6):
    return fb.DenseTable(rows, width, generator=seeded(5), dtype=torch.float64)


class Given(Sampler):
    """Ids from a list, over and over, each taken to be equally likely."""

    def __init__(self, rows, ids, replace=False):
        super().__init__(rows, replace=replace)
        self.ids, self.place = torch.tensor(ids), 0

    def pick(self, count):
        self.place += count
        return self.ids[torch.arange(self.place - count, self.place) % len(self.ids)]

    def probability(self, ids):
        return torch.full(ids.shape, 1 / self.rows, dtype=torch.float64)


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("rows", [1, 7, 5000])
def test_probabilities_sum_to_one(kind, rows):
    p = kind(rows).probability(torch.arange(rows))
    assert float(p.sum()) == pytest.approx(1)
    assert bool((p.diff() <= 0).all())


def test_log_uniform_is_its_formula():
    p = fb.LogUniform(9).probability(torch.tensor([0, 3, 8]))
    assert p.tolist() == pytest.approx(
        [math.log((k + 2) / (k + 1)) / math.log(10) for k in (0, 3, 8)]
    )


@pytest.mark.parametrize("kind", SAMPLERS)
def test_drawn_frequencies_match(kind):
    sampler, count = kind(20, replace=True, generator=seeded()), 200_000
    ids, tries = sampler.draw(count)
    assert tries == count
    expected = sampler.log_expected(torch.arange(20), tries).exp()
    torch.testing.assert_close(expected, count * sampler.probability(torch.arange(20)))
    assert bool(((torch.bincount(ids, minlength=20) - expected).abs() < 5 * expected.sqrt()).all())


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("replace", [False, True])
def test_a_draw_costs_nothing_in_rows(kind, replace):
    ids, _ = kind(10**15, replace=replace, generator=seeded()).draw(2000)
    assert ids.dtype == torch.int64
    assert 0 <= int(ids.min()) <= int(ids.max()) < 10**15
    assert replace or len(ids.unique()) == 2000


@pytest.mark.parametrize("most", [3, 1 << 20])
@pytest.mark.parametrize("count", range(1, 6))
def test_distinct_ids_are_those_of_one_draw_after_another(count, most, monkeypatch):
    monkeypatch.setattr(samplers, "MOST_AT_ONCE", most)
    stream = [4, 2, 4, 4, 2, 7, 0, 7, 7, 2, 4, 5]
    found, tries = [], 0
    while len(found) < count:
        if stream[tries] not in found:
            found.append(stream[tries])
        tries += 1
    ids, counted = Given(8, stream).draw(count)
    assert ids.tolist() == found
    assert counted == tries


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize(("rows", "count"), [(30, 10), (200, 40)])
def test_expected_counts_of_distinct_ids(kind, rows, count):
    sampler, runs = kind(rows, generator=seeded()), 3000
    seen, expected = torch.zeros(rows, dtype=torch.float64), torch.zeros(rows, dtype=torch.float64)
    for _ in range(runs):
        ids, tries = sampler.draw(count)
        assert len(ids.unique()) == count
        seen[ids] += 1
        expected += sampler.log_expected(torch.arange(rows), tries).exp()
    assert (
        float((seen - expected).abs().max()) / runs < 0.04
    )  # five times a coin's error, and the formula is no equality
    assert float(expected.sum()) / runs == pytest.approx(count, rel=0.01)


@pytest.mark.parametrize("kind", SAMPLERS)
def test_all_rows_are_expected_once(kind):
    ids, tries = kind(12).draw(12)
    assert sorted(ids.tolist()) == list(range(12))
    assert torch.equal(kind(12).log_expected(ids, tries), torch.zeros(12, dtype=torch.float64))


@pytest.mark.parametrize("kind", SAMPLERS)
def test_one_row(kind):
    ids, tries = kind(1, replace=True).draw(3)
    assert ids.tolist() == [0, 0, 0]
    torch.testing.assert_close(
        kind(1, replace=True).log_expected(ids, tries).exp(), torch.full((3,), 3.0).double()
    )


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_all_samples_are_the_full_softmax(kind, biased):
    table = dense()
    bias = (
        nn.Parameter(torch.randn(40, generator=seeded(3), dtype=torch.float64)) if biased else None
    )
    loss = fb.SampledSoftmax(table, 40, kind(40), bias=bias)
    hidden, targets = batch(table, 3, 5)
    scores = hidden.flatten(0, 1) @ table.weight.T
    full = F.cross_entropy(scores if bias is None else scores + bias, targets.flatten())
    sampled = loss(hidden, targets)
    torch.testing.assert_close(sampled, full)
    wanted = [hidden, *loss.parameters()]
    for mine, theirs in zip(
        torch.autograd.grad(sampled, wanted), torch.autograd.grad(full, wanted), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("kind", LOSSES)
def test_evaluation_is_the_full_softmax(kind):
    table = dense()
    bias = nn.Parameter(torch.randn(40, generator=seeded(3), dtype=torch.float64))
    hidden, targets = batch(table, 4, 2)
    full = F.cross_entropy((hidden @ table.weight.T + bias).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(kind(table, 5, bias=bias).eval()(hidden, targets), full)


@pytest.mark.parametrize(("replace", "sizes"), [(False, (5, 20, 38)), (True, (5, 50, 1000))])
def test_gradient_comes_near_the_full_one(replace, sizes):
    table = dense()
    hidden, targets = batch(table, 24)
    full = torch.autograd.grad(F.cross_entropy(hidden @ table.weight.T, targets), table.weight)[0]
    distances = []
    for samples in sizes:
        sampler = fb.LogUniform(40, replace=replace, generator=seeded())
        loss = fb.SampledSoftmax(table, samples, sampler, remove_accidental=not replace)
        total = sum(torch.autograd.grad(loss(hidden, targets), table.weight)[0] for _ in range(400))
        distances.append(float((total / 400 - full).norm() / full.norm()))
    assert distances[0] > 1.5 * distances[1] > 3 * distances[2]
    assert distances[2] < 0.06


def test_accidental_hits_are_left_out():
    table = dense()
    hidden, targets = batch(table, 2)
    first = fb.SampledSoftmax(table, 2, Given(40, [int(targets[0]), 11]))
    scores = first.candidates(hidden, targets)
    assert scores.hits.tolist() == [[True, False], [False, False]]
    alone = torch.stack([scores.true[0], scores.noise[0, 1]])
    torch.testing.assert_close(first.position_losses(scores)[0], -alone.log_softmax(0)[0])
    kept = fb.SampledSoftmax(table, 2, first.sampler, remove_accidental=False)
    assert kept.position_losses(scores)[0] > first.position_losses(scores)[0]


def test_nothing_but_hits_is_no_loss_and_no_gradient():
    table = dense()
    hidden = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    loss = fb.SampledSoftmax(table, 1, Given(40, [7]))(hidden, torch.full((3,), 7))
    loss.backward()
    assert float(loss.detach()) == 0
    assert not hidden.grad.any()
    assert not table.weight.grad.any()


def test_nce_keeps_accidental_hits():
    table = dense()
    hidden, _ = batch(table, 1)
    loss = fb.NCE(table, 1, Given(40, [7], replace=True))(hidden, torch.tensor([7]))
    logit = (hidden @ table.weight[7])[0] - math.log(1 / 40)  # k p = 1 / 40
    torch.testing.assert_close(loss, F.softplus(-logit) + F.softplus(logit))


SHARES = torch.tensor([0.4, 0.22, 0.15, 0.1, 0.06, 0.04, 0.02, 0.01])


def learnt(make, steps=400):  # -> scores [V] of a model that sees ids only, drawn by SHARES
    table, draws = fb.DenseTable.from_dense(torch.zeros(8, 1)), seeded(1)
    loss = make(table)
    optimizer = torch.optim.Adam(loss.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, steps)
    for _ in range(steps):
        targets = torch.multinomial(SHARES, 512, replacement=True, generator=draws)
        optimizer.zero_grad()
        loss(torch.ones(512, 1), targets).backward()
        optimizer.step()
        schedule.step()
    return table.weight.detach()[:, 0]


@pytest.mark.parametrize("sampler", [None, fb.Uniform(8, replace=True, generator=seeded(2))])
def test_the_optimum_of_nce_is_the_log_probability(sampler):
    torch.manual_seed(0)  # of the sampler that the loss makes for itself
    scores = learnt(lambda table: fb.NCE(table, 32, sampler))
    torch.testing.assert_close(scores.softmax(0), SHARES, atol=0.025, rtol=0)
    assert float(scores.exp().sum()) == pytest.approx(1, abs=0.08)  # it normalises itself


@pytest.mark.parametrize(("replace", "samples"), [(True, 32), (False, 7)])
def test_the_optimum_of_sampled_softmax_is_the_distribution(replace, samples):
    sampler = fb.LogUniform(8, replace=replace, generator=seeded(2))
    scores = learnt(
        lambda table: fb.SampledSoftmax(table, samples, sampler, remove_accidental=not replace)
    )
    torch.testing.assert_close(scores.softmax(0), SHARES, atol=0.03, rtol=0)


def test_hits_left_out_of_repeated_samples_would_favour_frequent_ids():  # which is why that is refused
    def refused(table):
        loss = fb.SampledSoftmax(
            table, 32, fb.LogUniform(8, replace=True, generator=seeded(2)), remove_accidental=False
        )
        loss.remove_accidental = True
        return loss

    assert float(learnt(refused).softmax(0)[0]) > float(SHARES[0]) + 0.1


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("kind", LOSSES)
def test_a_generator_decides_the_loss(kind, replace):
    table = dense()
    hidden, targets = batch(table, 7)

    def made(seed):
        sampler = fb.LogUniform(40, replace=replace, generator=seeded(seed))
        rest = {"remove_accidental": False} if kind is fb.SampledSoftmax else {}
        return kind(table, 9, sampler, **rest)

    loss, before = made(3), torch.get_rng_state()
    state = loss.sampler.generator.get_state()
    first, second = loss(hidden, targets), loss(hidden, targets)
    assert first != second
    assert first == made(3)(hidden, targets) != made(4)(hidden, targets)
    loss.sampler.generator.set_state(state)  # as a checkpoint would
    assert first == loss(hidden, targets)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("kind", LOSSES)
def test_copies_go_on_from_the_same_state(kind):
    table = dense()
    loss = kind(
        table,
        9,
        fb.Uniform(40, replace=kind is fb.NCE, generator=seeded()),
        bias=nn.Parameter(torch.zeros(40)),
    )
    hidden, targets = batch(table, 7)
    copies = [copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))]
    first, second, third = (each(hidden, targets) for each in (loss, *copies))
    assert first == second == third
    assert "samples=9, sampler=Uniform(40" in repr(loss)


@pytest.mark.parametrize("kind", LOSSES)
def test_shapes_of_hidden(kind):
    table = dense()
    hidden, targets = batch(table, 2, 3, 4)
    found = []
    for shape in ((24,), (6, 4), (2, 3, 4)):
        loss = kind(table, 9, fb.LogUniform(40, replace=kind is fb.NCE, generator=seeded()))
        found.append(loss(hidden.reshape(*shape, 6), targets.reshape(shape)))
        assert found[-1].shape == ()
    assert found[0] == found[1] == found[2]
    assert kind(table, 9)(hidden[0, 0, 0], targets[0, 0, 0].int()).isfinite()


@pytest.mark.parametrize("kind", LOSSES)
def test_a_step_looks_up_once_and_only_what_it_needs(kind):
    table, looked = dense(), []
    table.register_forward_hook(lambda _, ids, rows: looked.append(ids[0]))
    hidden, targets = batch(table, 5)
    kind(table, 4)(hidden, targets).backward()
    assert [len(ids) for ids in looked] == [9]
    touched = table.weight.grad.any(1).nonzero()[:, 0].tolist()
    assert set(targets.tolist()) <= set(touched) <= set(looked[0].tolist())


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("method", METHODS, ids=method_name)
def test_every_table(method, kind, autocast):
    table = method(50, 8, generator=seeded(), padding_idx=0, **method.example)
    loss = kind(table, 12, bias=nn.Parameter(torch.zeros(50)))
    hidden, targets = batch(table, 4, 3, dtype=torch.float32)
    for mode in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            value = loss.train(mode)(hidden * 1.0, targets)
        loss.zero_grad()
        value.backward()
        assert value.isfinite()
        assert value.dtype == torch.float32
        gradients = [p.grad for p in loss.parameters() if p.grad is not None]
        assert len(gradients) > 1
        assert all(bool(g.to_dense().isfinite().all()) for g in gradients)
    assert hidden.grad.isfinite().all()


@pytest.mark.parametrize("kind", LOSSES)
def test_half_precision_comes_near(kind):
    table = fb.DenseTable(40, 6, generator=seeded(5))
    hidden, targets = batch(table, 30, dtype=torch.float32)
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        loss = kind(table, 20, fb.LogUniform(40, replace=kind is fb.NCE, generator=seeded()))
        losses.append(loss(hidden.to(dtype), targets))
    assert losses[1].dtype == torch.float32
    torch.testing.assert_close(losses[1], losses[0], rtol=0.01, atol=0)


TABLE = fb.DenseTable(10, 4)
WITH = fb.SampledSoftmax(TABLE, 3)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: fb.LogUniform(0), "rows=0"),
        (lambda: fb.Uniform(4, replace=1), "replace=1"),
        (lambda: fb.Uniform(4, generator=17), "generator=17: give a torch.Generator"),
        (lambda: fb.Uniform(4).draw(0), "samples=0"),
        (lambda: fb.Uniform(4).draw(5), "only 4 distinct ids"),
        (lambda: fb.SampledSoftmax(TABLE, 0), "samples=0"),
        (lambda: fb.NCE(TABLE, 2.5), "samples=2.5"),
        (lambda: fb.SampledSoftmax(TABLE, 11), "samples=11: there are only 10 distinct ids"),
        (lambda: fb.NCE(TABLE, 11, fb.Uniform(10)), "samples=11: there are only 10 distinct ids"),
        (lambda: fb.NCE(TABLE, 3, fb.Uniform(9)), "9 ids, the table has 10 rows"),
        (
            lambda: fb.NCE(TABLE, 3, "uniform"),
            r"sampler='uniform': give an object such as fb.LogUniform\(10\)",
        ),
        (
            lambda: fb.SampledSoftmax(TABLE, 3, fb.Uniform(10, replace=True)),
            "remove_accidental=False, or a sampler with",
        ),
        (lambda: fb.SampledSoftmax(nn.Embedding(10, 4), 3), "table is of type Embedding"),
        (lambda: fb.NCE(TABLE, 3, bias=nn.Parameter(torch.zeros(9))), r"got shape \(9,\)"),
        (lambda: fb.NCE(TABLE, 3, bias=torch.zeros(10)), "got Tensor"),
        (
            lambda: WITH(torch.ones(2, 4), torch.zeros(3).long()),
            r"targets have shape \(3,\).*shape \(2,\)",
        ),
        (lambda: WITH(torch.ones(2, 4), torch.zeros(2, 1).long()), r"targets have shape \(2, 1\)"),
        (
            lambda: WITH(torch.ones(2, 5), torch.zeros(2).long()),
            r"hidden has shape \(2, 5\), the rows have width 4",
        ),
        (lambda: WITH(torch.tensor(1.0), torch.tensor(0)), r"hidden has shape \(\)"),
        (lambda: WITH(torch.ones(2, 4).long(), torch.zeros(2).long()), "dtype torch.int64"),
        (lambda: WITH(torch.ones(0, 4), torch.zeros(0).long()), "empty"),
    ],
)
def test_bad_input_is_named(make, named):
    with pytest.raises(fb.ArgumentError, match=named):
        make()


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize(
    ("targets", "named"),
    [([0, 10], "id 10"), ([-100, 0], "id -100"), ([0.0, 1.0], "float32"), ([True, False], "bool")],
)
def test_bad_targets_are_the_tables_error(targets, named, mode):
    with pytest.raises(fb.IdError, match=named):
        fb.NCE(TABLE, 3).train(mode)(torch.ones(2, 4), torch.tensor(targets))


@pytest.mark.parametrize("kind", [fb.NonNegativeL1, fb.L1])
@pytest.mark.parametrize("tied", [False, True])
def test_rows_the_prox_would_set_back_may_be_left_out(kind, tied):
    def learn(whole):
        generator = torch.Generator().manual_seed(0)
        table = fb.AnchorTable(
            60,
            6,
            anchors=5,
            sparse=True,
            nonnegative=kind is fb.NonNegativeL1,
            dtype=torch.float64,
            generator=generator,
        )
        with torch.no_grad():
            table.transform[10:] = 0
        penalty, left = kind(0.06), 0
        loss = fb.FullSoftmax(table, penalty)
        optimizer = fb.SGD(table.parameters(), lr=0.5, penalties={table.transform: penalty})
        for _ in range(200):
            hidden = torch.randn(7, 6, dtype=torch.float64, generator=generator)
            targets = torch.randint(30, (7,), generator=generator)
            inputs = torch.randint(60, (7,), generator=generator)
            optimizer.zero_grad()
            seen = hidden + table(inputs) if tied else hidden
            if whole:
                torch.nn.functional.cross_entropy(table.logits(seen), targets).backward()
            else:
                loss(seen, targets, inputs=inputs if tied else None).backward()
            left += loss.left_out
            optimizer.step()
        return table, left

    (some, left), (every, _) = learn(whole=False), learn(whole=True)
    torch.testing.assert_close(some.transform, every.transform, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(some.atoms, every.atoms, rtol=1e-9, atol=1e-12)
    assert torch.equal(some.transform == 0, every.transform == 0)
    assert left > 200 * 10, "rows must have been spared"
    assert bool((some.transform[10:] != 0).any()), "some zero rows must have come to life"


def test_the_full_softmax_refuses_what_it_cannot_spare():
    sparse = fb.AnchorTable(10, 4, anchors=3, sparse=True)
    for table, penalty, named in (
        (fb.AnchorTable(10, 4, anchors=3), fb.L1(1.0), "sparse=True"),
        (fb.AnchorTable(10, 4, anchors=3, slots=2), fb.L1(1.0), "without slots"),
        (sparse, fb.GroupL1(1.0), "penalty="),
    ):
        with pytest.raises(fb.ArgumentError, match=named):
            fb.FullSoftmax(table, penalty)
    with pytest.raises(fb.ArgumentError, match="width 4"):
        fb.FullSoftmax(sparse, fb.L1(1.0))(torch.ones(2, 3), torch.tensor([1, 2]))


def whole(hidden, weight, bias, targets):
    """The same loss with all logits at once."""
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    return F.cross_entropy(logits, targets)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("block", [1, 100, 10_000])
def test_the_tied_loss_in_blocks_is_the_whole_one(monkeypatch, block, biased):
    monkeypatch.setattr("featherbed.losses.full.BLOCK", block)
    made = seeded(3)
    parts = [
        torch.randn(*shape, generator=made, dtype=torch.float64).requires_grad_()
        for shape in ((9, 4), (31, 4), (31,))
    ]
    hidden, weight, bias = parts[0], parts[1], parts[2] if biased else None
    targets = torch.randint(31, (9,), generator=made)
    given = parts if biased else parts[:2]
    losses = [loss(hidden, weight, bias, targets) for loss in (tied_cross_entropy, whole)]
    torch.testing.assert_close(*losses)
    ours, theirs = (torch.autograd.grad(2.5 * loss, given) for loss in losses)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_the_tied_loss_goes_on_into_a_compact_table():
    table = fb.LowRankTable(40, 6, rank=2, generator=seeded(5), dtype=torch.float64)
    hidden, targets = batch(table, 12)
    slopes = [
        torch.autograd.grad(loss(hidden, table.weight, None, targets), [*table.parameters()])
        for loss in (tied_cross_entropy, whole)
    ]
    for one, other in zip(*slopes, strict=True):
        torch.testing.assert_close(one, other)


def test_large_scores_and_rounded_products():
    hidden, weight = torch.full((3, 2), 1000.0), torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
    assert float(tied_cross_entropy(hidden, weight, None, torch.tensor([0, 0, 0]))) == 0
    table = dense()
    hidden, targets = batch(table, 50)
    hidden = hidden.detach()
    weight = table.weight.detach()
    rounded = tied_cross_entropy(hidden.float(), weight.float(), None, targets, torch.bfloat16)
    assert float(rounded) == pytest.approx(float(whole(hidden, weight, None, targets)), rel=0.01)


@pytest.mark.parametrize(
    ("hidden", "weight", "bias", "targets", "message"),
    [
        (
            torch.zeros(2, 3),
            torch.zeros(5, 4),
            None,
            torch.zeros(2, dtype=torch.int64),
            r"give \[n, d\]",
        ),
        (
            torch.zeros(2, 3),
            torch.zeros(5, 3),
            None,
            torch.zeros(3, dtype=torch.int64),
            r"give \[n, d\]",
        ),
        (
            torch.zeros(0, 3),
            torch.zeros(5, 3),
            None,
            torch.zeros(0, dtype=torch.int64),
            "no positions",
        ),
        (
            torch.zeros(2, 3),
            torch.zeros(5, 3),
            torch.zeros(4),
            torch.zeros(2, dtype=torch.int64),
            "one number for each of 5",
        ),
        (torch.zeros(2, 3), torch.zeros(5, 3), None, torch.tensor([0, 5]), "5"),
    ],
)
def test_bad_input_of_the_tied_loss(hidden, weight, bias, targets, message):
    with pytest.raises(fb.FeatherbedError, match=message):
        tied_cross_entropy(hidden, weight, bias, targets)
