"""Sharing in expectation: closed forms against brute force over all pairs, drawing, and enumerated data sets."""

from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import featherbed as fb
from featherbed.errors import ArgumentError
from featherbed.theory.sharing import (
    Factors,
    Transition,
    bias_term,
    excess_risk_bound,
    label_smoothing,
    rademacher_draws,
    target_losses,
)


def graph_of(rows, seed, edges=20, symmetric=True):
    """A graph with an id without neighbors (the last) and one related to all others (the first) but it."""
    rng = np.random.default_rng(seed)
    some = rng.integers(rows - 1, size=(edges, 2))
    return fb.Graph.from_edges(
        rows, np.concatenate([some, [[0, k] for k in range(1, rows - 1)]]), symmetric=symmetric
    )


LAWS = {
    "se": {},
    "graph": {"graph": True, "rho": 5.0},
    "graph, shy": {"graph": True, "rho": 0.25},
    "graph, one way": {"graph": True, "rho": 5.0, "symmetric": False},
    "self": {"include_self": True},
    "graph, self": {"graph": True, "rho": 3.0, "include_self": True},
    "mixture": {"graph": True, "rho": 4.0, "mixture": True},
    "exclude": {"exclude": [0, 3]},
    "graph, exclude": {"graph": True, "rho": 5.0, "exclude": [0, 3]},
    "mixture, exclude": {"graph": True, "rho": 4.0, "mixture": True, "exclude": [2]},
    "graph, self, exclude": {"graph": True, "rho": 2.0, "include_self": True, "exclude": [1]},
}


def settings_of(name, rows, seed=0, edges=20):
    settings = dict(LAWS[name])
    if "graph" in settings:
        settings["graph"] = graph_of(rows, seed, edges, settings.pop("symmetric", True))
    return settings


def written_out(rows, p, graph=None, rho=1.0, exclude=(), include_self=False, mixture=False):
    """The law cell by cell, from its words: j stays with 1 - p, else a neighbor is rho times as likely as another id."""
    free = [k for k in range(rows) if k not in exclude]
    matrix = np.zeros((rows, rows))
    for j in range(rows):
        if j in exclude or len(free) < 2:
            matrix[j, j] = 1.0
            continue
        near = [] if graph is None else [k for k in graph.neighbors(j) if k in free]
        matrix[j, j] += 1 - p
        if mixture:
            for k in free:
                matrix[j, k] += p / rho / len(free)
            for k in [*near, j]:
                matrix[j, k] += p * (1 - 1 / rho) / (len(near) + 1)
            continue
        choices = [k for k in free if k != j or include_self]
        weights = np.array([rho if k in near else 1.0 for k in choices])
        matrix[j, choices] += p * weights / weights.sum()
    return matrix


# the law


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("name", LAWS)
def test_the_law_is_the_one_in_words(name, p):
    settings = settings_of(name, 9)
    law, told = Transition(9, p, **settings), written_out(9, p, **settings)
    np.testing.assert_allclose(law.matrix, told, atol=1e-14)
    np.testing.assert_allclose(law.matrix.sum(1), 1.0)
    assert (told.min() >= 0) and (p > 0 or (told == np.eye(9)).all())


@pytest.mark.parametrize("name", LAWS)
def test_expectations_are_products_with_the_matrix(name):
    rng = np.random.default_rng(1)
    settings = settings_of(name, 9)
    law, told = Transition(9, 0.4, **settings), written_out(9, 0.4, **settings)
    values, ids = rng.normal(size=(9, 3, 2)), rng.integers(9, size=20)
    np.testing.assert_allclose(
        law.expected(values), np.einsum("jk,kab->jab", told, values), atol=1e-13
    )
    np.testing.assert_allclose(law.expected(values[:, 0, 0]), told @ values[:, 0, 0], atol=1e-13)
    losses = rng.normal(size=(20, 9))
    np.testing.assert_allclose(law.average(ids, losses), (told[ids] * losses).sum(1), atol=1e-13)


@pytest.mark.parametrize("settings", [{}, {"include_self": True}, {"exclude": [0]}])
def test_one_id_alone_stays(settings):
    rows = 1 + len(settings.get("exclude", []))
    assert (Transition(rows, 0.7, **settings).matrix == np.eye(rows)).all()


@pytest.mark.parametrize("name", LAWS)
def test_drawing_follows_the_law(name):
    settings = settings_of(name, 9)
    law = Transition(9, 0.4, **settings).matrix
    draws = 20_000
    ids = torch.arange(9).repeat_interleave(draws)
    shared = fb.share(ids, 9, 0.4, generator=torch.Generator().manual_seed(3), **settings).reshape(
        9, draws
    )
    found = np.stack([np.bincount(row, minlength=9) for row in shared.numpy()]) / draws
    assert (np.abs(found - law) <= 4.5 * np.sqrt(law * (1 - law) / draws) + 1e-12).all()


# matrix factorisation


def problem(users=7, items=9, dim=3, n=30, seed=0, biases=False):
    rng = np.random.default_rng(seed)
    tables = rng.normal(size=(users, dim)), rng.normal(size=(items, dim))
    sides = (rng.normal(size=users), rng.normal(size=items)) if biases else None
    model = Factors(*tables, biases=sides, mean=0.8 if biases else 0.0)
    scores = tables[0] @ tables[1].T + (0.8 + sides[0][:, None] + sides[1] if biases else 0.0)
    return (
        model,
        scores,
        rng.integers(users, size=n),
        rng.integers(items, size=n),
        rng.normal(size=n),
    )


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("user_law", LAWS)
@pytest.mark.parametrize("item_law", ["se", "graph", "mixture, exclude"])
def test_losses_equal_the_sum_over_all_pairs(user_law, item_law, biases):
    model, scores, j, i, y = problem(biases=biases)
    ours, theirs = settings_of(user_law, 7, seed=1), settings_of(item_law, 9, seed=2)
    found = model.losses(j, i, y, Transition(7, 0.2, **ours), Transition(9, 0.6, **theirs))
    left, right = written_out(7, 0.2, **ours), written_out(9, 0.6, **theirs)
    for place in range(len(y)):
        pairs = np.outer(left[j[place]], right[i[place]]) * (y[place] - scores) ** 2
        assert found[place] == pytest.approx(pairs.sum(), rel=1e-12)


def test_sides_without_a_law_stay():
    model, scores, j, i, y = problem()
    np.testing.assert_allclose(model.losses(j, i, y), (y - scores[j, i]) ** 2, atol=1e-13)
    left = written_out(7, 0.3)
    told = [(left[a] * (c - scores[:, b]) ** 2).sum() for a, b, c in zip(j, i, y, strict=True)]
    np.testing.assert_allclose(model.losses(j, i, y, share_users=Transition(7, 0.3)), told)
    assert (model.losses(j, i, scores[j, i]) >= 0).all()
    assert model.losses([], [], []).shape == (0,)


def test_many_samples_are_cut_into_blocks():
    model, scores, j, i, y = problem(n=70_000)
    np.testing.assert_allclose(model.losses(j, i, y), (y - scores[j, i]) ** 2, atol=1e-12)


@pytest.mark.parametrize(
    "name", ["se", "graph", "self", "graph, self", "mixture", "graph, exclude"]
)
def test_drawing_has_these_losses_for_its_mean(name):
    users, items, n, draws = 300, 200, 1000, 600
    model, scores, j, i, y = problem(users, items, 8, n)
    ours, theirs = settings_of(name, users, 1, edges=2000), settings_of(name, items, 2, edges=1000)
    exact = model.losses(j, i, y, Transition(users, 0.3, **ours), Transition(items, 0.2, **theirs))
    generator = torch.Generator().manual_seed(5)
    rows = fb.share(torch.from_numpy(j).repeat(draws), users, 0.3, generator=generator, **ours)
    columns = fb.share(torch.from_numpy(i).repeat(draws), items, 0.2, generator=generator, **theirs)
    drawn = ((np.tile(y, draws) - scores[rows, columns]) ** 2).reshape(draws, n)
    error = drawn.std(0, ddof=1) / np.sqrt(draws)
    seen = error > 0  # excluded ids on both sides are not drawn at all
    z = (drawn.mean(0) - exact)[seen] / error[seen]
    assert abs(drawn.mean() - exact.mean()) < 4 * np.sqrt((error**2).sum()) / n
    assert 0.9 < np.sqrt((z**2).mean()) < 1.15
    np.testing.assert_allclose(drawn.mean(0)[~seen], exact[~seen])


# targets


@pytest.mark.parametrize("include_self", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.6])
def test_shared_targets_are_smoothed_labels(p, include_self, tensors):
    logits = 3 * torch.randn(50, 7, generator=tensors, dtype=torch.float64)
    targets = torch.randint(7, (50,), generator=tensors)
    eps = label_smoothing(p, 7, include_self=include_self)
    assert eps == pytest.approx(p if include_self else p * 7 / 6)
    found = target_losses(logits, targets, Transition(7, p, include_self=include_self))
    told = F.cross_entropy(logits, targets, label_smoothing=eps, reduction="none")
    np.testing.assert_allclose(found, told, rtol=1e-12)


def test_shared_targets_on_a_graph_and_large_logits():
    law = settings_of("graph", 7)
    logits = 1000 * np.random.default_rng(0).normal(size=(20, 7))
    targets = np.arange(20) % 7
    told = F.cross_entropy(
        torch.from_numpy(logits),
        torch.from_numpy(written_out(7, 0.3, **law)[targets]),
        reduction="none",
    )
    np.testing.assert_allclose(target_losses(logits, targets, Transition(7, 0.3, **law)), told)


# signs


def test_draws_of_signs_have_the_right_law():
    losses = np.array([[3.0, 1.0], [1.0, 1.0], [2.0, 1.0]])
    found = rademacher_draws(losses, 40_000, generator=np.random.default_rng(0))
    values, counts = np.unique(np.round(found[:, 0] * 3).astype(int), return_counts=True)
    assert values.tolist() == [0, 2, 4, 6]  # |±3 ±1 ±2|, each of the four as likely
    assert (np.abs(counts - 10_000) < 5 * np.sqrt(40_000 * 3 / 16)).all()
    assert set(np.round(found[:, 1] * 3).astype(int)) == {1, 3}
    again = rademacher_draws(losses, 40_000, generator=np.random.default_rng(0))
    assert (found == again).all()
    # both columns met the same signs: 3 + 1 + 2 and 1 + 1 + 1 are reached together
    assert ((found[:, 0] == 2) == (found[:, 1] == 1)).all()


def test_signs_of_many_samples_in_blocks():
    losses = np.random.default_rng(1).random(150_001)
    found = rademacher_draws(losses, 130, generator=np.random.default_rng(2)) * len(losses)
    told = np.linalg.norm(losses)  # the root mean square of Σ σ f
    assert np.sqrt((found**2).mean()) == pytest.approx(told, rel=4 / np.sqrt(2 * 130))


# theorems 1 and 2, everything enumerated: 3 ids, two labels, four Θ, all data sets of three samples


class Tiny:
    n = 3
    ids = (0, 0, 1, 1, 2, 2)
    chances = np.array([0.3, 0.2, 0.1, 0.15, 0.05, 0.2])  # of the six cases (id, label)

    def __init__(self, p, low, seed=0):
        rng = np.random.default_rng(seed)
        law = Transition(3, p)
        self.loss = rng.uniform(low, 1, size=(4, 6, 3))  # of Θ, a case, and the id looked up
        self.plain = self.loss[:, range(6), self.ids]
        self.shared = np.stack([law.average(self.ids, table) for table in self.loss])
        by_id = self.chances.reshape(3, 2) / self.chances.reshape(3, 2).sum(1, keepdims=True)
        mean = np.einsum("tjy,jy->tj", self.shared.reshape(4, 3, 2), by_id)
        self.parts = np.repeat(mean, 2, axis=1), self.shared - np.repeat(mean, 2, axis=1)  # L and e
        self.data = np.array(list(product(range(6), repeat=self.n)))
        self.weights = self.chances[self.data].prod(1)

    def complexity(self, part):
        signs = np.array(list(product([-1, 1], repeat=self.n)))
        sums = np.abs(np.einsum("sn,tdn->tds", signs, part[:, self.data])).max(0)
        return float(self.weights @ sums.mean(1))

    def bias(self):
        pairs = zip(self.shared, self.plain, strict=True)
        return max(bias_term(*pair, weights=self.chances, samples=self.n) for pair in pairs)


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_the_bias_term_by_enumeration(p):
    tiny = Tiny(p, low=-1.0)
    for theta in range(4):
        expected = 0.0
        for case, chance in enumerate(tiny.chances):
            row = written_out(3, p)[tiny.ids[case]]
            expected += chance * sum(
                row[k] * (tiny.loss[theta, case, k] - tiny.loss[theta, case, tiny.ids[case]])
                for k in range(3)
            )
        over_data = tiny.weights @ (tiny.shared - tiny.plain)[theta][tiny.data].sum(1)
        found = bias_term(tiny.shared[theta], tiny.plain[theta], weights=tiny.chances, samples=3)
        assert found == pytest.approx(abs(3 * expected), abs=1e-14)
        assert found == pytest.approx(abs(over_data), abs=1e-14)
    assert (tiny.bias() == 0) == (p == 0)


def test_the_bias_of_a_matrix_factorisation():
    model, scores, j, i, y = problem()
    shared = model.losses(j, i, y, Transition(7, 0.1), Transition(9, 0.2))
    left, right = written_out(7, 0.1), written_out(9, 0.2)
    told = sum(
        (np.outer(left[a], right[b]) * ((c - scores) ** 2 - (c - scores[a, b]) ** 2)).sum()
        for a, b, c in zip(j, i, y, strict=True)
    )
    assert bias_term(shared, model.losses(j, i, y)) == pytest.approx(abs(told))


@pytest.mark.parametrize(("low", "width"), [(0.0, 1.0), (-1.0, 2.0)])
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_the_theorems_hold_where_everything_can_be_counted(p, low, width, seed):
    tiny = Tiny(p, low, seed)
    sums = tiny.shared[:, tiny.data].sum(2)  # S_n of each Θ and data set
    mean = sums @ tiny.weights
    complexity = [tiny.complexity(part) for part in tiny.parts]
    assert tiny.weights @ np.abs(sums - mean[:, None]).max(0) <= 2 * sum(complexity)
    risk = tiny.n * tiny.plain @ tiny.chances
    excess = risk[sums.argmin(0)] - risk.min()
    for u in (0.0, 0.1, 0.5, 1.0, 2.0):
        bound, probability = excess_risk_bound(
            tiny.bias(), *complexity, u=u, samples=tiny.n, width=width
        )
        assert tiny.weights[excess > bound].sum() <= probability


@pytest.mark.parametrize("low", [0.0, -1.0])
def test_one_sample_moves_the_difference_of_risks_by_twice_the_width(low):
    """The step of the proof that sets the constant."""
    width = 1 - low
    table = np.array([[low, 1.0], [1.0, low]])  # Θ, case: nothing is shared
    moved = (table[0] - table[1])[1] - (table[0] - table[1])[0]
    assert moved == 2 * width
    _, probability = excess_risk_bound(0, 0, 0, u=1.5, samples=10, width=width)
    assert probability == pytest.approx(np.exp(-2 * 1.5**2 / moved**2))  # McDiarmid's inequality


# bad input

SMALL = Factors(np.ones((3, 2)), np.ones((4, 2)))
WRONG = {
    "rows=0": lambda: Transition(0, 0.1),
    "rows=True": lambda: Transition(True, 0.1),
    "p=1.5": lambda: Transition(3, 1.5),
    "p=-0.1": lambda: label_smoothing(-0.1, 5),
    "p=nan": lambda: Transition(3, float("nan")),
    "p=True": lambda: Transition(3, True),
    "rho=0": lambda: Transition(3, 0.1, rho=0),
    "over 9 objects": lambda: Transition(3, 0.1, graph=graph_of(9, 0)),
    "mixture=True": lambda: Transition(3, 0.1, mixture=True),
    "exclude": lambda: Transition(3, 0.1, exclude=[3]),
    "one row for each id": lambda: Transition(3, 0.1).expected(np.ones((4, 2))),
    "values hold NaN": lambda: Transition(3, 0.1).expected([1.0, np.nan, 2.0]),
    "values are no array": lambda: Transition(3, 0.1).expected([[1.0], [2.0, 3.0], [4.0]]),
    "losses of|the losses": lambda: Transition(3, 0.1).average([0, 1], np.ones((2, 4))),
    "ids of type float64": lambda: Transition(3, 0.1).average([0.5], np.ones((1, 3))),
    "ids of type bool": lambda: Transition(3, 0.1).average([True], np.ones((1, 3))),
    "different lengths": lambda: Transition(3, 0.1).average([[0], [1, 2]], np.ones((2, 3))),
    "of one width": lambda: Factors(np.ones((3, 2)), np.ones((3, 4))),
    "biases": lambda: Factors(np.ones((3, 2)), np.ones((4, 2)), biases=(np.ones(3), np.ones(3))),
    "give a pair": lambda: Factors(np.ones((3, 2)), np.ones((4, 2)), biases=(np.ones(3),)),
    "mean='high'": lambda: Factors(np.ones((3, 2)), np.ones((4, 2)), mean="high"),
    "one of each": lambda: SMALL.losses([0, 1], [0], [1.0]),
    "users from 3 to 3": lambda: SMALL.losses([3], [0], [1.0]),
    "items from -1 to 0": lambda: SMALL.losses([0, 0], [-1, 0], [1.0, 1.0]),
    "share_items is over 3 ids, there are 4 items": lambda: SMALL.losses(
        [0], [0], [1.0], share_items=Transition(3, 0.1)
    ),
    "classes=1": lambda: label_smoothing(0.1, 1),
    "logits of shape": lambda: target_losses(np.ones((2, 4)), [0, 1], Transition(3, 0.1)),
    "draws=0": lambda: rademacher_draws([1.0], 0, generator=np.random.default_rng(0)),
    "at least one": lambda: rademacher_draws([], 5, generator=np.random.default_rng(0)),
    "same cases": lambda: bias_term([1.0], [1.0, 2.0]),
    "weights": lambda: bias_term([1.0, 2.0], [1.0, 1.0], weights=[0.5, 0.6]),
    "samples=0": lambda: bias_term([1.0], [1.0], samples=0),
    "bias=-1": lambda: excess_risk_bound(-1, 0, 0, u=1, samples=1, width=1),
    "u=inf": lambda: excess_risk_bound(0, 0, 0, u=float("inf"), samples=1, width=1),
    "samples=2.5": lambda: excess_risk_bound(0, 0, 0, u=1, samples=2.5, width=1),
    "width=0": lambda: excess_risk_bound(0, 0, 0, u=1, samples=1, width=0),
}


@pytest.mark.parametrize("message", WRONG)
def test_bad_input_is_named(message):
    with pytest.raises(ArgumentError, match=message):
        WRONG[message]()
