"""The papers' mathematics: probabilities that add up, limits that are reached, and what anchor tables have as special cases."""

import json
import math
import subprocess
import sys
from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats

import featherbed as fb
from featherbed import theory
from featherbed.theory.buffet import log_prior, taken_dishes

PARAMETERS = [(0.7, 1.0), (0.5, 2.5), (1.2, 0.3)]


def random_selections(count, seed, objects=9, anchors=5):
    rng = np.random.default_rng(seed)
    return [rng.random((objects, anchors)) < rng.uniform(0.15, 0.8) for _ in range(count)]


def matrix_with(counts, customers):
    """The left-ordered matrix whose history h = 2^N - 1 .. 1 stands counts[h] times."""
    histories = list(product([1, 0], repeat=customers))[:-1]
    columns = [h for h, n in zip(histories, counts, strict=True) for _ in range(n)]
    return np.array(columns, dtype=int).reshape(-1, customers).T


def totals(parts, at_most):
    """All tuples of so many whole numbers with a sum of at most that."""
    if parts == 0:
        yield ()
        return
    for first in range(at_most + 1):
        for rest in totals(parts - 1, at_most - first):
            yield (first, *rest)


def told_by_customers(selection, a, b, late=0):
    """log p of a class by the story: customer after customer, then all orders in which dishes may have appeared."""
    taken = np.array(selection, dtype=bool)
    total = 0.0
    for n in range(len(taken)):
        before = taken[:n].sum(0)
        old = before > 0
        share = before[old] / (b + n + late)
        total += stats.bernoulli.logpmf(taken[n, old], share).sum()
        new = int((taken[n] & ~old).sum())
        total += stats.poisson.logpmf(new, a * b / (b + n + late)) + math.lgamma(new + 1)
    return total - sum(math.lgamma(n + 1) for n in Counter(map(tuple, taken.T.tolist())).values())


# the buffet


@pytest.mark.parametrize(("a", "b"), PARAMETERS)
@pytest.mark.parametrize(("customers", "most"), [(1, 12), (2, 12), (3, 8)])
def test_probabilities_add_up(customers, most, a, b):
    by_dishes = np.zeros(most + 1)
    for counts in totals(2**customers - 1, most):
        by_dishes[sum(counts)] += math.exp(
            theory.log_probability(matrix_with(counts, customers), a, b)
        )
    mean = theory.expected_dishes(customers, a, b)
    np.testing.assert_allclose(by_dishes, stats.poisson.pmf(np.arange(most + 1), mean), rtol=1e-10)
    assert by_dishes.sum() == pytest.approx(1.0, abs=2e-3)
    assert 1 - by_dishes.sum() == pytest.approx(stats.poisson.sf(most, mean), abs=1e-12)


@pytest.mark.parametrize(("a", "b"), PARAMETERS)
def test_the_probability_is_that_of_the_story(a, b):
    for selection in random_selections(20, seed=1, objects=6, anchors=4):
        kept = selection[:, selection.any(0)]
        assert theory.log_probability(kept, a, b) == pytest.approx(
            told_by_customers(kept, a, b), abs=1e-10
        )


def test_the_printed_denominator_is_one_too_many():
    """Appendix A prints m_k / (i + b): right if i counts the customers before, not from 1; b = 1 then gives m_k / i."""
    selection = np.array([[1, 1], [1, 0], [0, 1]])
    right = theory.log_probability(selection, 1.0, 1.0)
    assert told_by_customers(selection, 1.0, 1.0) == pytest.approx(right, abs=1e-12)
    assert abs(told_by_customers(selection, 1.0, 1.0, late=1) - right) > 0.5


def test_one_parameter_is_b_of_1():
    for selection in random_selections(10, seed=2):
        kept = selection[:, selection.any(0)]
        customers, dishes = kept.shape
        same = math.prod(math.factorial(n) for n in Counter(map(tuple, kept.T.tolist())).values())
        harmonic = sum(1 / j for j in range(1, customers + 1))
        shares = [
            math.factorial(customers - m) * math.factorial(m - 1) / math.factorial(customers)
            for m in kept.sum(0).tolist()
        ]
        printed = 1.7**dishes / same * math.exp(-1.7 * harmonic) * math.prod(shares)  # equation 8
        assert theory.log_probability(selection, 1.7) == pytest.approx(math.log(printed), rel=1e-12)


def test_columns_without_takers_and_their_order_do_not_matter():
    rng = np.random.default_rng(3)
    for selection in random_selections(10, seed=3):
        wide = np.concatenate([selection, np.zeros((len(selection), 3), dtype=bool)], axis=1)
        mixed = wide[:, rng.permutation(wide.shape[1])]
        assert theory.log_probability(mixed, 0.9, 2.0) == pytest.approx(
            theory.log_probability(selection, 0.9, 2.0)
        )
        np.testing.assert_array_equal(theory.left_ordered(mixed), theory.left_ordered(selection))
        numbers = [
            int("".join(map(str, column.astype(int))), 2) for column in theory.left_ordered(mixed).T
        ]
        assert numbers == sorted(numbers, reverse=True)
    assert theory.log_probability(np.zeros((4, 0)), 0.9, 2.0) == pytest.approx(
        -theory.expected_dishes(4, 0.9, 2.0)
    )


@pytest.mark.parametrize(("a", "b"), [(1.5, 1.0), (1.5, 0.4), (2.0, 4.0)])
def test_sampled_means(a, b):
    rng = np.random.default_rng(4)
    draws = [theory.sample_buffet(7, a, b, generator=rng) for _ in range(3000)]
    dishes = np.array([draw.shape[1] for draw in draws])
    expected = a * sum(b / (b + n - 1) for n in range(1, 8))
    assert theory.expected_dishes(7, a, b) == pytest.approx(expected)
    assert abs(dishes.mean() - expected) < 4 * math.sqrt(expected / 3000)  # K is Poisson
    for customer in range(7):
        own = np.mean([draw[customer].sum() for draw in draws])
        assert abs(own - a) < 4.5 * math.sqrt(a / 3000)  # and so is what a customer takes
    assert all(draw.any(0).all() for draw in draws)


@pytest.mark.parametrize(("a", "b"), [(1.0, 1.0), (0.8, 3.0)])
def test_sampled_frequencies_are_the_probabilities(a, b):
    rng, count = np.random.default_rng(5), 6000
    seen = Counter(
        theory.left_ordered(theory.sample_buffet(3, a, b, generator=rng)).tobytes()
        for _ in range(count)
    )
    observed, expected = [], []
    for counts in totals(7, 4):
        matrix = matrix_with(counts, 3)
        mean = count * math.exp(theory.log_probability(matrix, a, b))
        if mean >= 8:
            observed.append(seen[theory.left_ordered(matrix).tobytes()])
            expected.append(mean)
    assert len(expected) > 30
    rest = (count - sum(observed), count - sum(expected))
    assert stats.chisquare([*observed, rest[0]], [*expected, rest[1]]).pvalue > 1e-3


def test_a_generator_repeats_itself():
    draws = [
        theory.sample_buffet(20, 2.0, 1.5, generator=np.random.default_rng(6)) for _ in range(2)
    ]
    np.testing.assert_array_equal(*draws)


# the limit


def first_order(selection):
    """What is left of -log p(Z), after its limit times beta: Σ_h log K_h! - Σ_k log Γ(m_k)."""
    columns = Counter(map(tuple, selection[:, selection.any(0)].T.tolist()))
    return sum(math.lgamma(n + 1) - n * math.lgamma(sum(column)) for column, n in columns.items())


@pytest.mark.parametrize(("lambda1", "lambda2"), [(0.5, 0.1), (2.0, 1.9), (30.0, 0.05)])
def test_the_prior_approaches_its_limit_like_one_over_beta(lambda1, lambda2):
    for selection in random_selections(6, seed=7):
        takers = selection.sum(0)[selection.any(0)].tolist()
        limit = lambda2 * int(selection.sum()) + (lambda1 - lambda2) * len(takers)
        assert theory.limit_cost(selection, lambda1, lambda2) == pytest.approx(limit, rel=1e-12)
        betas = np.array([1e3, 1e4, 1e5, 1e6])  # exp(1e6 * 1.9) is no float
        gaps = np.array(
            [theory.prior_cost(selection, lambda1, lambda2, beta) - limit for beta in betas]
        )
        np.testing.assert_allclose(gaps * betas, first_order(selection), rtol=1e-4, atol=1e-4)
        assert abs(gaps[-1]) < 1e-4


def test_log_space_agrees_with_the_plain_formula():
    for selection in random_selections(6, seed=8):
        for beta in (0.1, 1.0, 5.0):
            plain = (
                -theory.log_probability(selection, math.exp(-beta * 0.7), math.exp(beta * 0.2))
                / beta
            )
            assert theory.prior_cost(selection, 0.7, 0.2, beta) == pytest.approx(plain, rel=1e-12)
            a, b = math.exp(-beta * 0.7), math.exp(beta * 0.2)
            story = told_by_customers(selection[:, selection.any(0)], a, b)
            assert log_prior(selection, -beta * 0.7, beta * 0.2) == pytest.approx(story, rel=1e-9)


def test_the_whole_joint_likelihood_approaches_the_objective():
    """Equations 10 to 21: labels of variance 1/beta, Z from the buffet, W exponential, A normal."""
    rng = np.random.default_rng(9)
    chosen = random_selections(1, seed=9, objects=12, anchors=4)[0]
    weights, anchors = rng.exponential(size=chosen.shape), rng.normal(size=(4, 3))
    predicted = (chosen * weights) @ anchors
    labels = predicted + rng.normal(size=predicted.shape)
    lambda1, lambda2 = 0.8, 0.3
    loss = theory.Gaussian().divergence(labels, predicted).sum()
    used = int(taken_dishes(chosen).shape[1])
    wanted = theory.nbant_objective(loss, int(chosen.sum()), used, lambda1, lambda2)
    others = stats.expon.logpdf(weights).sum() + stats.norm.logpdf(anchors).sum()
    left = first_order(chosen) - others
    for beta in (1e2, 1e4, 1e6):
        likelihood = stats.norm.logpdf(labels, predicted, 1 / math.sqrt(beta)).sum()
        prior = -beta * theory.prior_cost(chosen, lambda1, lambda2, beta)
        gap = -(likelihood + others + prior) / beta - wanted
        base = (
            labels.size / 2 * math.log(beta / (2 * math.pi))
        )  # log b(y): the slowest to go, log(beta) / beta
        assert gap == pytest.approx((left - base) / beta, rel=1e-5)
    assert abs(gap) < 1e-4 * wanted


# divergences


KINDS = [theory.Gaussian(), theory.Multinomial(), theory.Multinomial(trials=6)]
NAMES = ["gaussian", "multinomial", "counts"]


def points(kind, rng, count, width):
    if isinstance(kind, theory.Gaussian):
        return rng.normal(size=(count, width))
    return kind.trials * rng.dirichlet(np.ones(width), count)


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_divergences_by_their_definition(kind):
    rng = np.random.default_rng(10)
    x, y = points(kind, rng, 50, 4), points(kind, rng, 50, 4)
    np.testing.assert_allclose(
        kind.divergence(x, y), theory.Bregman.divergence(kind, x, y), atol=1e-10
    )
    assert (theory.Bregman.divergence(kind, x, y) > 1e-6).all()
    np.testing.assert_allclose(kind.divergence(x, x), 0.0, atol=1e-12)
    step = 1e-6 * (y - x)  # towards another point of the domain
    slope = (kind.generating(x + step) - kind.generating(x - step)) / 2e-6
    np.testing.assert_allclose((kind.gradient(x) * (y - x)).sum(-1), slope, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_the_mean_is_the_best_single_prediction(kind):
    rng = np.random.default_rng(11)
    labels, share = points(kind, rng, 30, 4), rng.dirichlet(np.ones(30))
    mean = share @ labels
    least = share @ kind.divergence(labels, mean)
    for other in points(kind, rng, 40, 4):
        cost = share @ kind.divergence(labels, other)
        assert cost > least
        assert cost - least == pytest.approx(kind.divergence(mean, other))  # by exactly that much


def test_gaussian_is_the_mean_squared_error():
    rng = np.random.default_rng(12)
    labels, predictions = rng.normal(size=(2, 20, 5))
    ours = theory.Gaussian()
    mse = F.mse_loss(torch.tensor(predictions), torch.tensor(labels)).item()
    assert ours.loss(labels, predictions).mean() == pytest.approx(mse, rel=1e-12)
    assert 2 / 5 * ours.divergence(labels, predictions).mean() == pytest.approx(mse, rel=1e-12)
    density = stats.norm.logpdf(labels, predictions).sum(-1)
    np.testing.assert_allclose(ours.log_density(labels, predictions), density, rtol=1e-12)


def test_multinomial_is_the_cross_entropy():
    generator = torch.Generator().manual_seed(13)
    logits = torch.randn(20, 5, generator=generator, dtype=torch.float64)
    targets = torch.randint(5, (20,), generator=generator)
    soft = torch.randn(20, 5, generator=generator, dtype=torch.float64).softmax(-1)
    predictions, ours = logits.softmax(-1).numpy(), theory.Multinomial()
    hard = F.one_hot(targets, 5).numpy()
    assert ours.divergence(hard, predictions).mean() == pytest.approx(
        F.cross_entropy(logits, targets).item(), rel=1e-12
    )
    crossed = F.cross_entropy(logits, soft).item()
    assert ours.loss(soft, predictions).mean() == pytest.approx(crossed, rel=1e-12)
    entropy = stats.entropy(soft.numpy(), axis=-1)
    assert (ours.divergence(soft, predictions) + entropy).mean() == pytest.approx(
        crossed, rel=1e-12
    )
    assert ours.divergence([1.0, 0.0], [0.0, 1.0]) == math.inf
    assert ours.divergence([0.0, 1.0], [0.0, 1.0]) == 0.0


def test_multinomial_counts_have_their_density():
    rng, ours = np.random.default_rng(14), theory.Multinomial(trials=9)
    shares = rng.dirichlet(np.ones(4), size=10)
    counts = np.array([rng.multinomial(9, share) for share in shares])
    density = [stats.multinomial.logpmf(x, 9, q) for x, q in zip(counts, shares, strict=True)]
    np.testing.assert_allclose(ours.log_density(counts, 9 * shares), density, rtol=1e-9)
    np.testing.assert_allclose(
        ours.loss(counts, 9 * shares), -(counts * np.log(shares)).sum(-1), rtol=1e-12
    )
    ahead, behind = ((9 * shares + h) * np.log(shares + h / 9) for h in (1e-6, -1e-6))
    np.testing.assert_allclose(
        ours.gradient(9 * shares), (ahead - behind) / 2e-6, rtol=1e-5
    )  # of Σ y log(y/N)


# the objective

# Liang et al. 2021, table 15: perplexity, nnz(T), anchors, lambda2, and equation 36 for three lambda1
TABLE_15 = [
    (77.7, 245_000, 2000, 1e-6, ("4.64", "4.80", "204.6")),
    (79.4, 214_000, 1000, 1e-6, ("4.61", "4.69", "104.6")),
    (84.5, 171_000, 500, 1e-6, ("4.62", "4.66", "54.6")),
    (106.6, 25_000, 100, 1e-5, ("4.92", "4.93", "14.9")),
]
LAMBDA1 = [2e-5, 1e-4, 1e-1]


def table_15(**lambda2):
    runs = [
        theory.Run(f"ANT {anchors}", math.log(ppl), nnz, anchors)
        for ppl, nnz, anchors, *_ in TABLE_15
    ]
    return theory.objective_table(
        runs, LAMBDA1, **(lambda2 or {"lambda2": [row[3] for row in TABLE_15]})
    )


def test_table_15_of_the_paper():
    table = table_15()
    for row, (ppl, nnz, anchors, lambda2, printed) in zip(table.values, TABLE_15, strict=True):
        for value, lambda1, text in zip(row, LAMBDA1, printed, strict=True):
            assert f"{value:.{len(text.partition('.')[2])}f}" == text
            assert value == theory.nbant_objective(math.log(ppl), nnz, anchors, lambda1, lambda2)
    assert table.best == (1, 2, 3)
    assert table_15(lambda2=1e-6).best == (1, 2, 3)  # one price for all selects the same models


def test_the_table_as_text_and_as_data():
    table = table_15()
    head, *lines = str(table).splitlines()
    assert head.split() == [
        "run",
        "anchors",
        "nnz(T)",
        "loss",
        "lambda2",
        "lambda1=2e-05",
        "lambda1=0.0001",
        "lambda1=0.1",
    ]
    assert lines[3].split() == [
        "ANT",
        "100",
        "100",
        "25,000",
        "4.6691",
        "1e-05",
        "4.9201",
        "4.9281",
        "14.918*",
    ]
    assert [line.count("*") for line in lines] == [0, 1, 1, 1]
    data = json.loads(json.dumps(table.data))
    assert data["best"] == ["ANT 1000", "ANT 500", "ANT 100"]
    assert data["lambda1"] == LAMBDA1
    row = data["runs"][1]
    assert row.pop("objective") == table.values[1].tolist()
    assert row == {
        "name": "ANT 1000",
        "loss": math.log(79.4),
        "nonzeros": 214_000,
        "anchors": 1000,
        "lambda2": 1e-6,
    }
    assert theory.objective_table(table.runs, 0.5, 0.1).values.shape == (4, 1)


# appendix I: what anchor tables have as special cases


def copied(parameter, values):
    with torch.no_grad():
        parameter.copy_(values)


def some_steps(tables, parameters, steps=5):
    """Train the sum of tables on one batch of a task in which all columns of a row matter to each other."""
    generator = torch.Generator().manual_seed(15)
    optimizer = torch.optim.Adam(parameters, lr=0.05)
    goal = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    head = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    ids = torch.randint(40, (12, 4), generator=generator)
    for _ in range(steps):
        optimizer.zero_grad()
        rows = sum(table(ids) for table in tables)
        (torch.tanh(rows.sum(1)) @ head - goal).square().mean().backward()
        optimizer.step()


def test_frequency_selection_is_an_anchor_table_with_a_fixed_identity():
    generator = torch.Generator().manual_seed(16)
    counts = torch.randperm(40, generator=generator)
    kept = fb.SelectedTable(40, 6, keep=10, counts=counts, dtype=torch.float64, generator=generator)
    anchored = fb.AnchorTable(
        40, 6, anchors=10, init=fb.Frequency(counts), dtype=torch.float64, generator=generator
    )
    others = counts < 30
    copied(anchored.transform, anchored.transform.masked_fill(others[:, None], 0.0))
    copied(anchored.atoms, kept.atoms[kept.index[anchored.anchor_ids]])
    copied(kept.atoms[-1], torch.zeros(6, dtype=torch.float64))
    kept.atoms.register_hook(
        lambda g: torch.cat([g[:-1], torch.zeros_like(g[-1:])])
    )  # what is not kept stays zero
    fixed, start = anchored.transform.detach().clone(), anchored.atoms.detach().clone()
    assert int(fixed.sum()) == 10
    torch.testing.assert_close(anchored.weight, kept.weight)
    some_steps([kept], [kept.atoms])
    some_steps([anchored], [anchored.atoms])
    torch.testing.assert_close(anchored.weight, kept.weight)
    assert not torch.equal(anchored.atoms, start)
    assert torch.equal(anchored.transform, fixed)
    assert not anchored.weight[others].any()
    assert anchored.weight[~others].any(1).all()


@pytest.mark.parametrize("together", [True, False])
def test_low_rank_is_sets_of_one_anchor_without_penalty(together):
    low = fb.LowRankTable(
        40, 6, rank=3, dtype=torch.float64, generator=torch.Generator().manual_seed(17)
    )
    where = {"nonnegative": False, "dtype": torch.float64}
    sets = (
        [fb.AnchorTable(40, 6, anchors=3, **where)]
        if together
        else [fb.AnchorTable(40, 6, anchors=1, **where) for _ in "abc"]
    )
    for part, (table, columns) in enumerate(
        zip(sets, low.coefficients.split(3 if together else 1, dim=1), strict=True)
    ):
        copied(table.transform, columns)
        copied(table.atoms, low.atoms if together else low.atoms[part : part + 1])
    torch.testing.assert_close(sum(table.weight for table in sets), low.weight)
    some_steps([low], low.parameters())
    some_steps(sets, [p for table in sets for p in table.parameters()])
    whole = sum(table.weight for table in sets)
    torch.testing.assert_close(whole, low.weight)
    assert torch.linalg.matrix_rank(whole) == 3


def code_sets(codes, vectors):
    """An anchor table for each part: its code vectors, chosen by a one-hot transform."""
    sets = []
    for part, code_vectors in enumerate(vectors):
        table = fb.AnchorTable(
            len(codes), code_vectors.shape[1], anchors=len(code_vectors), dtype=code_vectors.dtype
        )
        copied(table.atoms, code_vectors)
        copied(table.transform, F.one_hot(codes[:, part], len(code_vectors)))
        sets.append(table)
    return sets


def test_compositional_codes_are_sets_with_one_anchor_a_row():
    generator = torch.Generator().manual_seed(18)
    shape = {"choices": 4, "parts": 3, "dtype": torch.float64, "generator": generator}
    summed = fb.KDTable(
        40, 6, composer=fb.Composer(pool="sum"), relax=fb.StraightThrough(logit_norm=False), **shape
    ).eval()
    vectors = summed.dictionary.detach()
    sets = code_sets(summed.codes_of(), vectors)
    whole = sum(table.weight for table in sets)
    torch.testing.assert_close(whole, summed.weight)
    assert [table.parameter_count() for table in sets] == [40 + 4 * 6] * 3

    averaged = fb.ProductTable(40, 6, additive=True, **shape).eval()
    parts = averaged.atoms.detach().reshape(3, 4, 6) / 3
    torch.testing.assert_close(
        sum(table.weight for table in code_sets(averaged.codes_of(), parts)), averaged.weight
    )

    beside = fb.ProductTable(
        40, 6, **shape
    ).eval()  # side by side: code vectors with zeros in the other parts' columns
    padded = torch.zeros(3, 4, 3, 2, dtype=torch.float64)
    for part, own in enumerate(beside.atoms.detach().reshape(3, 4, 2)):
        padded[part, :, part] = own
    torch.testing.assert_close(
        sum(table.weight for table in code_sets(beside.codes_of(), padded.reshape(3, 4, 6))),
        beside.weight,
    )


def test_trained_with_one_free_entry_a_row_a_set_becomes_a_codebook():
    generator = torch.Generator().manual_seed(19)
    summed = fb.KDTable(
        40,
        6,
        choices=4,
        parts=3,
        composer=fb.Composer(pool="sum"),
        relax=fb.StraightThrough(logit_norm=False),
        dtype=torch.float64,
        generator=generator,
    ).eval()
    codes = summed.codes_of()
    sets = code_sets(codes, summed.dictionary.detach())
    for table in sets:
        copied(table.transform, 0.5 + torch.rand(40, 4, generator=generator, dtype=torch.float64))
    penalty, lr = fb.NonNegativeL1(1e6), 0.01
    goal = torch.randn(40, 6, generator=generator, dtype=torch.float64)
    for _ in range(10):
        sum((sum(table.weight for table in sets) - goal).square().mean(1)).backward()
        for part, table in enumerate(sets):
            penalised = 1 - F.one_hot(codes[:, part], 4)  # S(G): 0 where an entry is free
            with torch.no_grad():
                table.atoms -= lr * table.atoms.grad
                moved = table.transform - lr * table.transform.grad
                table.transform.copy_(penalty.prox(moved, lr * penalised))
            table.zero_grad()
    for part, table in enumerate(sets):
        assert ((table.transform > 0).sum(1) == 1).all()
        assert torch.equal(table.transform.argmax(1), codes[:, part])
        assert (
            table.transform.max(1).values.std() > 0.01
        )  # the penalty leaves a weight, which a code has not:
        copied(table.transform, (table.transform > 0).double())  # with it held to 1 ...
    for part, table in enumerate(sets):
        copied(summed.atoms[4 * part : 4 * part + 4], table.atoms)
    torch.testing.assert_close(
        sum(table.weight for table in sets), summed.weight
    )  # ... the set is a codebook


# bad input

Z = [[1, 0], [1, 1]]
RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("lambda1", "lambda2"),
    [(0.1, 0.1), (0.1, 0.2), (0.1, 0.0), (0.1, -0.1), (math.nan, 0.1), (True, 0.1)],
)
def test_lambdas_that_are_refused(lambda1, lambda2):
    calls = [
        lambda: theory.nbant_objective(1.0, 10, 2, lambda1, lambda2),
        lambda: theory.limit_cost(Z, lambda1, lambda2),
        lambda: theory.prior_cost(Z, lambda1, lambda2, beta=10.0),
        lambda: theory.objective_table([theory.Run("one", 1.0, 10, 2)], [lambda1], lambda2),
    ]
    for call in calls:
        with pytest.raises(fb.ArgumentError, match="lambda1 > lambda2 > 0"):
            call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.log_probability([[0.5, 1.0]], 1.0), "other entries than 0 and 1"),
        (lambda: theory.log_probability([[2, 1]], 1.0), "other entries than 0 and 1"),
        (lambda: theory.log_probability([[math.nan, 1]], 1.0), "other entries than 0 and 1"),
        (lambda: theory.limit_cost([["yes", "no"]], 0.2, 0.1), "other entries than 0 and 1"),
        (lambda: theory.log_probability([1, 0], 1.0), "shape"),
        (lambda: theory.log_probability(np.zeros((0, 3)), 1.0), "at least one object"),
        (lambda: theory.left_ordered([[1, 0], [1]]), "differ in length"),
        (lambda: theory.log_probability(Z, 0.0), "a=0.0"),
        (lambda: theory.log_probability(Z, 1.0, -1.0), "b=-1.0"),
        (lambda: theory.log_probability(Z, True), "a=True"),
        (lambda: theory.expected_dishes(3, math.inf), "a=inf"),
        (lambda: theory.expected_dishes(0, 1.0), "customers=0"),
        (lambda: theory.sample_buffet(2.5, 1.0, generator=RNG), "customers=2.5"),
        (lambda: theory.sample_buffet(True, 1.0, generator=RNG), "customers=True"),
        (lambda: theory.sample_buffet(3, 1.0, math.nan, generator=RNG), "b=nan"),
        (lambda: theory.prior_cost(Z, 0.2, 0.1, beta=0), "beta=0"),
        (lambda: theory.nbant_objective(math.nan, 1, 1, 0.2, 0.1), "loss=nan"),
        (lambda: theory.nbant_objective(1.0, -1, 1, 0.2, 0.1), "nonzeros=-1"),
        (lambda: theory.nbant_objective(1.0, 1, 1.5, 0.2, 0.1), "anchors=1.5"),
        (lambda: theory.objective_table([], [0.2], 0.1), "0 runs"),
        (lambda: theory.objective_table([theory.Run("one", 1.0, 1, 1)], [], 0.1), "0 lambda1"),
        (
            lambda: theory.objective_table([theory.Run("one", 1.0, 1, 1)], 0.2, [0.1, 0.1]),
            "2 lambda2 for 1 runs",
        ),
        (lambda: theory.objective_table([("one", 1.0, 1, 1)], 0.2, 0.1), "theory.Run"),
        (lambda: theory.Multinomial().divergence([0.5, 0.4], [0.5, 0.5]), "sum to 0.9"),
        (
            lambda: theory.Multinomial().loss([1.0, 0.0], [3.0, -2.0]),
            "-2.0 among the probabilities",
        ),
        (
            lambda: theory.Multinomial(trials=3).divergence([1, 0], [2, 1]),
            "sum to 1: along the last axis they must sum to 3",
        ),
        (lambda: theory.Multinomial(trials=0), "trials=0"),
        (lambda: theory.Gaussian().divergence([1.0, 2.0], [1.0]), "differ in width"),
        (lambda: theory.Gaussian().divergence([math.nan], [1.0]), "finite vectors"),
        (lambda: theory.Gaussian().divergence(1.0, [1.0]), "finite vectors"),
        (lambda: theory.Gaussian().divergence(["a"], [1.0]), "arrays of numbers"),
    ],
)
def test_bad_input_has_one_clear_error(call, message):
    with pytest.raises(fb.ArgumentError, match=message):
        call()


def test_theory_needs_numpy_only():
    code = "import sys; sys.modules['torch'] = sys.modules['scipy'] = None\nfrom featherbed import theory\n"
    code += "print(theory.limit_cost([[1, 0], [1, 1]], 2.0, 1.0))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "5.0"
