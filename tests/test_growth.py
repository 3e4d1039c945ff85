"""Anchors that come and go: tables, what optimizers keep for them, and the rules that decide."""

import copy
import io
import itertools
import math
import pickle

import numpy as np
import pytest
import torch

import featherbed as fb
from featherbed.optim.row_optimizer import kept_for, owners, resize
from featherbed.tables.growing import GradientMoment, departures

PRICE = {"lambda1": 0.5, "lambda2": 0.25}  # an anchor costs 1/4: objectives are exact in binary
CHEAP = {"lambda1": 1e-3, "lambda2": 1e-6}
ROWS, WIDTH = 30, 6


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def make(anchors=4, rows=ROWS, width=WIDTH, seed=0, **settings):
    settings = {"init": fb.HalfNormal(0.3), "dtype": torch.float64, **settings}
    return fb.GrowingAnchorTable(rows, width, anchors=anchors, generator=seeded(seed), **settings)


def yogi(*tables, lam=1e-3):
    parameters = [p for table in tables for p in table.parameters()]
    return fb.Yogi(
        parameters, lr=0.02, penalties={table.transform: fb.NonNegativeL1(lam) for table in tables}
    )


def adam(*tables, lam=1e-3):
    inner = torch.optim.Adam([p for table in tables for p in table.parameters()], lr=0.02)
    return fb.Proximal(inner, {table.transform: fb.NonNegativeL1(lam) for table in tables})


CASES = [(yogi, False), (yogi, True), (adam, False)]
NAMES = ["yogi", "yogi-sparse", "adam"]


def train(tables, optimizer, steps, seed=0):
    """Pull random rows of the tables to random places."""
    for step in range(steps):
        generator = seeded(1000 * seed + step)
        optimizer.zero_grad()
        loss = 0.0
        for table in [tables] if isinstance(tables, torch.nn.Module) else tables:
            ids = torch.randint(table.num_embeddings, (8,), generator=generator)
            target = torch.randn(8, table.embedding_dim, generator=generator, dtype=torch.float64)
            loss = loss + (table(ids) - target).square().sum()
        loss.backward()
        optimizer.step()


def snapshot(table, optimizer=None):
    """Everything of a table and of what an optimizer keeps for it, copied."""
    found = {"transform": table.transform.detach().clone(), "atoms": table.atoms.detach().clone()}
    for name in ("transform", "atoms"):
        for key, value in kept_for(getattr(table, name), optimizer).items():
            found[f"{name}.{key}"] = value.clone()
    return found


def same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def objectives(growth, table, targets):
    """Step through objectives that are exactly the targets, for a table without weights; return the decisions and K's."""
    share = PRICE["lambda1"] - PRICE["lambda2"]
    found = [
        growth.step(lambda target=target: target - share * table.anchor_count) for target in targets
    ]
    assert [one.objective for one in found] == list(targets)
    return [one.decision for one in found], [one.anchors for one in found]


def empty(anchors, **settings):
    table = make(anchors, **settings)
    with torch.no_grad():
        table.transform.zero_()
    return table


# --- the objective ---


@pytest.mark.parametrize("rule", ["trial", "trend"])
def test_the_objective_is_loss_plus_weights_plus_anchors_over_all_tables(rule):
    tables = [make(5, rows=30), make(5, rows=17, width=3, seed=1)]
    with torch.no_grad():
        tables[0].transform[3:20, 1] = 0.0
        tables[1].transform[:, 4] = 0.0
    growth = fb.Growth(tables, None, lambda1=0.03, lambda2=0.002, rule=rule)
    found = growth.step(lambda: 1.25)
    nonzeros = sum(int((np.asarray(table.transform.detach()) != 0).sum()) for table in tables)
    assert nonzeros == 30 * 5 - 17 + 17 * 4 == found.nonzeros == growth.nonzeros()
    assert found.objective == pytest.approx(
        1.25 + 0.002 * nonzeros + (0.03 - 0.002) * (5 + 5), abs=1e-12
    )
    assert (found.anchors, found.loss, growth.history) == (5, 1.25, [found])


# --- the paper's rule ---


TRENDS = {
    "falls, ties, rises": (
        {"window": 3, "anchors": 4},
        [3, 2, 1, 1, 2, 2, 1.5, 1.75],
        "keep keep grow grow shrink shrink grow keep",
        [4, 4, 4, 5, 6, 5, 4, 5],
    ),
    "all equal grows": (
        {"window": 3, "anchors": 4},
        [1, 1, 1, 1],
        "keep keep grow grow",
        [4, 4, 4, 5],
    ),
    "window 2": ({"window": 2, "anchors": 4}, [2, 1, 3, 2], "keep grow shrink grow", [4, 4, 5, 4]),
    "window 4": ({"window": 4, "anchors": 4}, [4, 3, 2, 1], "keep keep keep grow", [4, 4, 4, 4]),
    "up and down keeps": (
        {"window": 3, "anchors": 4},
        [2, 1, 2, 1, 2],
        "keep keep keep keep keep",
        [4] * 5,
    ),
    "at least one": (
        {"window": 2, "anchors": 2},
        [1, 2, 3, 4],
        "keep shrink keep keep",
        [2, 2, 1, 1],
    ),
    "at most max": (
        {"window": 2, "anchors": 4, "max_anchors": 5},
        [4, 3, 2, 1],
        "keep grow keep keep",
        [4, 4, 5, 5],
    ),
    "equal at the most shrinks": (
        {"window": 2, "anchors": 4, "max_anchors": 4},
        [1, 1, 1],
        "keep shrink grow",
        [4, 4, 3],
    ),
    "several at a time": (
        {"window": 2, "anchors": 4, "max_anchors": 8, "delta": 3},
        [4, 3, 2, 5, 6, 7, 8],
        "keep grow grow shrink shrink shrink keep",
        [4, 4, 7, 8, 5, 2, 1],
    ),
}


@pytest.mark.parametrize("name", TRENDS)
def test_the_trend_rule_decides(name):
    given, targets, decisions, counts = TRENDS[name]
    settings = dict(given)
    table = empty(settings.pop("anchors"), max_anchors=settings.pop("max_anchors", 100))
    growth = fb.Growth(table, None, rule="trend", **PRICE, **settings)
    assert objectives(growth, table, targets) == (decisions.split(), counts)


def test_the_trend_rule_agrees_with_its_words_on_random_sequences():
    draw = np.random.default_rng(0)
    for window, delta in itertools.product((2, 3, 4), (1, 2)):
        table = empty(3, max_anchors=6)
        growth = fb.Growth(table, None, window=window, delta=delta, rule="trend", **PRICE)
        targets = [*draw.integers(1, 4, size=60).astype(float)]
        decisions, counts = objectives(growth, table, targets)
        anchors = 3
        for at, (decision, count) in enumerate(zip(decisions, counts, strict=True)):
            assert count == anchors
            recent, expected = targets[max(0, at + 1 - window) : at + 1], "keep"
            if len(recent) == window and sorted(recent, reverse=True) == recent and anchors < 6:
                expected, anchors = "grow", min(6, anchors + delta)
            elif len(recent) == window and sorted(recent) == recent and anchors > 1:
                expected, anchors = "shrink", max(1, anchors - delta)
            assert decision == expected


def test_the_trend_rule_takes_a_number_and_the_trial_rule_a_function():
    table = make()
    growth = fb.Growth(table, None, rule="trend", **PRICE)
    losses = (1.5, torch.tensor(1.5), np.float32(1.5), lambda: 1.5)
    assert [growth.step(loss).loss for loss in losses] == [1.5] * 4
    with pytest.raises(fb.ArgumentError, match="give a function that returns the validation loss"):
        fb.Growth(table, None, **PRICE).step(1.5)


# --- when a change takes place ---


def shown(table):
    """K as everything shows it."""
    packed = table.pack()
    counts = {
        len(table.state_dict()["atoms"]),
        table.state_dict()["transform"].shape[1],
        table.anchors,
    }
    counts |= {packed.bands[0].dictionary.shape[0], table.anchor_count}
    weights = int(torch.count_nonzero(table.transform))
    assert table.parameter_count() == weights + table.anchor_count * table.embedding_dim
    np.testing.assert_allclose(packed[np.arange(ROWS)], table.weight.detach().numpy(), atol=1e-6)
    (count,) = counts
    return count


@pytest.mark.parametrize(("targets", "after"), [([3, 2, 1], 5), ([1, 2, 3], 3)])
def test_a_change_comes_with_the_next_lookup_in_training(targets, after):
    table = make(4)
    growth = fb.Growth(table, None, rule="trend", **CHEAP)
    ids = torch.arange(5)
    for loss in targets:
        growth.step(loss)
        assert shown(table) == 4
    table.eval()
    assert table(ids).shape == (5, WIDTH)
    assert table.weight.shape == (ROWS, WIDTH)
    assert shown(table) == growth.anchor_count == 4
    table.train()
    assert shown(table) == 4
    table(ids)
    assert shown(table) == growth.anchor_count == after
    table(ids)
    assert shown(table) == after


def test_a_bag_in_training_makes_the_change_too():
    table = make(4)
    growth = fb.Growth(table, None, rule="trend", **CHEAP)
    for loss in (3, 2, 1):
        growth.step(loss)
    table.bag(torch.tensor([[1, 2], [3, 4]])).sum().backward()
    assert table.anchor_count == 5


def test_a_change_that_nothing_was_trained_after_is_made_by_the_next_step():
    table = make(4)
    growth = fb.Growth(table, None, rule="trend", **CHEAP)
    assert [growth.step(loss).anchors for loss in (4, 3, 2, 1)] == [4, 4, 4, 5]


@pytest.mark.parametrize(("kind", "sparse"), CASES, ids=NAMES)
def test_a_loss_of_the_last_step_may_still_be_held(kind, sparse):
    table = make(4, sparse=sparse)
    optimizer = kind(table)
    growth = fb.Growth(table, optimizer, rule="trend", window=2, **CHEAP)
    held = []
    for value in (5.0, 4.0, 3.0, 4.0, 5.0, 6.0):
        optimizer.zero_grad()
        loss = table(torch.arange(5)).square().sum()
        loss.backward()
        optimizer.step()
        held.append(loss)  # its graph lives, with the shapes it had
        growth.step(value)
    assert [found.anchors for found in growth.history] == [4, 4, 5, 6, 5, 4]


# --- anchors that leave and come back ---


@pytest.mark.parametrize(("kind", "sparse"), CASES, ids=NAMES)
@pytest.mark.parametrize("nth", [0, 2, 4])
def test_an_anchor_that_comes_back_at_once_is_as_if_it_had_never_left(kind, sparse, nth):
    table = make(5, sparse=sparse)
    optimizer = kind(table)
    train(table, optimizer, 25)
    parameters, before, rows = (
        [*table.parameters()],
        snapshot(table, optimizer),
        table.weight.detach().clone(),
    )
    assert len(before) == 6  # two parameters with a momentum and a scale each
    leaving = departures(table)[nth]
    leaving.leave(optimizer)
    assert snapshot(table, optimizer)["transform"].shape == (ROWS, 4)
    assert {len(kept) for kept in kept_for(table.atoms, optimizer).values()} == {4}
    leaving.come_back(optimizer)
    same(before, snapshot(table, optimizer))
    assert torch.equal(rows, table.weight)
    assert all(one is other for one, other in zip(parameters, table.parameters(), strict=True))


@pytest.mark.parametrize(("kind", "sparse"), CASES, ids=NAMES)
def test_steps_leave_an_anchor_alone_that_has_left(kind, sparse):
    table = make(5, sparse=sparse)
    optimizer = kind(table)
    train(table, optimizer, 25)
    before, leaving = snapshot(table, optimizer), departures(table)[1]
    place, heir = leaving.place, leaving.heir
    leaving.leave(optimizer)
    train(table, optimizer, 10, seed=1)
    trained = table.transform.detach().clone()
    leaving.come_back(optimizer)
    after = snapshot(table, optimizer)
    others = [k for k in range(5) if k != place]
    for name, value in before.items():
        axis = 1 if name.startswith("transform") else 0
        assert torch.equal(value.select(axis, place), after[name].select(axis, place)), name
        assert not torch.equal(value, after[name]), name
    less = (trained[:, others.index(heir)] - leaving.share * before["transform"][:, place]).clamp(
        min=0
    )
    torch.testing.assert_close(after["transform"][:, heir], less, rtol=0, atol=1e-12)
    rest = [k for k in others if k != heir]
    assert torch.equal(after["transform"][:, rest], trained[:, [others.index(k) for k in rest]])


def brute_force(table):
    """For each anchor the least cost over heirs and shares, from the rows themselves."""
    transform, atoms = (np.asarray(part.detach()) for part in (table.transform, table.atoms))
    found = {}
    for k, j in itertools.permutations(range(len(atoms)), 2):
        share = float(np.linalg.lstsq(atoms[j][:, None], atoms[k], rcond=None)[0][0])
        share = max(0.0, share) if table.nonnegative else share
        moved = transform.copy()
        moved[:, j] += share * moved[:, k]
        moved[:, k] = 0.0
        cost = float(((moved @ atoms - transform @ atoms) ** 2).sum())
        if k not in found or cost < found[k][0]:
            found[k] = cost, j, share
    return found


@pytest.mark.parametrize("nonnegative", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_anchors_leave_in_the_order_of_what_they_cost(nonnegative, seed):
    table = make(6, seed=seed, nonnegative=nonnegative)
    with torch.no_grad():
        table.transform[:, 2] = 0.0  # costs nothing
    expected = brute_force(table)
    found = departures(table)
    assert [one.place for one in found] == sorted(expected, key=lambda k: expected[k][0])
    assert found[0].place == 2
    for one in found[1:]:
        assert (one.heir, one.share) == (
            expected[one.place][1],
            pytest.approx(expected[one.place][2], abs=1e-9),
        )


def test_a_duplicate_costs_nothing_and_its_heir_takes_its_weights():
    table = make(4)
    with torch.no_grad():
        table.atoms[3] = 2.0 * table.atoms[1]
    before, rows = table.transform.detach().clone(), table.weight.detach().clone()
    first, second, *_ = departures(table)
    assert (first.place, first.heir, first.share) == (1, 3, pytest.approx(0.5))
    assert (second.place, second.heir, second.share) == (3, 1, pytest.approx(2.0))
    first.leave(None)
    torch.testing.assert_close(table.weight.detach(), rows, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        table.transform[:, 2].detach(), before[:, 3] + 0.5 * before[:, 1], rtol=0, atol=1e-12
    )
    assert table.anchor_count == 3


def test_opposite_anchors_are_heirs_only_where_weights_may_be_negative():
    for nonnegative in (True, False):
        table = make(2, width=2, nonnegative=nonnegative)
        with torch.no_grad():
            table.atoms.copy_(torch.tensor([[1.0, 1.0], [-2.0, -2.0]]))
        rows = table.weight.detach().clone()
        first = departures(table)[0]
        first.leave(None)
        assert first.share == (
            0.0 if nonnegative else pytest.approx(-0.5 if first.place == 0 else -2.0)
        )
        assert torch.allclose(table.weight, rows) == (not nonnegative)
    assert departures(make(1)) == []


# --- anchors that come ---


@pytest.mark.parametrize("sparse", [False, True])
def test_a_new_anchor_starts_where_the_gradients_of_the_rows_ask_for_it(sparse):
    table = make(4, sparse=sparse)
    growth = fb.Growth(table, None, delta=2, rule="trend", **CHEAP)
    gradients = [
        torch.randn(7, WIDTH, generator=seeded(n), dtype=torch.float64) + 0.3 for n in range(3)
    ]
    for gradient in gradients:
        (table(torch.arange(7)) * gradient).sum().backward()  # the rows' gradient is exactly this
    with torch.no_grad():
        (table(torch.arange(7)) * 100.0).sum()  # nothing is learnt from it
    for loss in (3, 2, 1):
        growth.step(loss)
    rows, lengths = table.weight.detach().clone(), table.atoms.detach().norm(dim=1)
    table(torch.arange(3))
    moment, mean = np.zeros((WIDTH, WIDTH)), np.zeros(WIDTH)
    for gradient in gradients:
        each = gradient.numpy()
        moment = 0.8 * moment + sum(np.outer(row, row) for row in each)
        mean = 0.8 * mean + each.sum(0)
    values, vectors = np.linalg.eigh(moment)
    assert values[-1] > values[-2] > values[-3]
    new = table.atoms.detach().numpy()[4:]
    for atom, vector in zip(new, (vectors[:, -1], vectors[:, -2]), strict=True):
        assert abs(atom @ vector) == pytest.approx(np.linalg.norm(atom), rel=1e-9)
        assert np.linalg.norm(atom) == pytest.approx(float(lengths.median()), rel=1e-9)
        assert atom @ mean < 0  # a weight above zero moves the rows against their mean gradient
    assert not table.transform[:, 4:].any()
    torch.testing.assert_close(table.weight.detach(), rows, rtol=0, atol=1e-12)


def test_gradients_that_are_no_numbers_are_not_learnt_from():
    table = make(4)
    gradients = GradientMoment(table)
    (table(torch.arange(3)) * 2.0).sum().backward()
    before = gradients.moment.clone()
    for bad in (math.inf, math.nan):
        (table(torch.arange(3)) * bad).sum().backward()
    assert torch.equal(gradients.moment, before)
    assert bool(gradients.directions(WIDTH + 2).isfinite().all())


@pytest.mark.parametrize(("kind", "sparse"), CASES, ids=NAMES)
def test_scales_of_new_anchors_are_the_mean_of_the_others_and_momenta_zero(kind, sparse):
    table = make(4, sparse=sparse)
    optimizer = kind(table)
    train(table, optimizer, 20)
    before = snapshot(table, optimizer)
    table.add_anchors(torch.ones(2, WIDTH), optimizer=optimizer)
    after = snapshot(table, optimizer)
    momentum, scale = ("m", "v") if kind is yogi else ("exp_avg", "exp_avg_sq")
    for side, axis in (("transform", 1), ("atoms", 0)):
        assert bool((before[f"{side}.{momentum}"] < 0).any())
        for name, old in before.items():
            if name.startswith(side):
                assert torch.equal(after[name].narrow(axis, 0, 4), old), name
        assert not after[f"{side}.{momentum}"].narrow(axis, 4, 2).any()
        mean = (
            before[f"{side}.{scale}"]
            .mean(axis, keepdim=True)
            .expand_as(after[f"{side}.{scale}"].narrow(axis, 4, 2))
        )
        torch.testing.assert_close(
            after[f"{side}.{scale}"].narrow(axis, 4, 2), mean, rtol=0, atol=0
        )
    train(table, optimizer, 5, seed=1)
    assert table.transform[:, 4:].any()


# --- trials ---


def run(growth, tables, evaluate, epochs):
    for _ in range(epochs):
        sum(table(torch.arange(5)).square().sum() for table in tables).backward()
        growth.step(evaluate)
        yield growth.history[-1]


@pytest.mark.parametrize("start", [3, 12])
@pytest.mark.parametrize("delta", [1, 2])
def test_trials_end_at_the_least_objective_and_stay(start, delta):
    table = make(start)
    growth = fb.Growth(table, None, delta=delta, **CHEAP)
    seen = []
    for _ in run(growth, [table], lambda: 0.1 * abs(table.anchor_count - 7), 40):
        table(torch.arange(2))  # what is due takes place
        seen.append(table.anchor_count)
    assert [found.anchors for found in growth.history[15:]] == [7] * 25  # what is saved
    assert all(abs(count - 7) <= delta for count in seen[15:])  # what is tried
    assert {*seen[15:]} > {7}  # it goes on trying


@pytest.mark.parametrize(("slope", "end"), [(0.1, 1), (-0.1, 6)])
def test_trials_stay_within_one_and_the_most(slope, end):
    table = make(4, max_anchors=6)
    growth = fb.Growth(table, None, delta=2, **CHEAP)
    for _ in run(growth, [table], lambda: slope * table.anchor_count, 15):
        pass
    assert [found.anchors for found in growth.history[8:]] == [end] * 7


@pytest.mark.parametrize(("kind", "sparse"), CASES, ids=NAMES)
def test_what_raised_the_objective_is_undone(kind, sparse):
    table = make(5, sparse=sparse)
    optimizer = kind(table)
    growth = fb.Growth(table, optimizer, **CHEAP)
    decisions = []
    for epoch in range(12):
        train(table, optimizer, 3, seed=epoch)
        before, due = snapshot(table, optimizer), table.anchor_count - 5
        decisions.append(growth.step(lambda: 1.0 + abs(table.anchor_count - 5)).decision)
        after = snapshot(table, optimizer)
        assert table.anchor_count == 5
        if due > 0:  # the new one is gone, the others are as they were trained
            same(
                {k: v.narrow(1 if k.startswith("t") else 0, 0, 5) for k, v in before.items()}, after
            )
        elif due == 0:  # absences were measured, and nothing is changed by that
            same(before, after)
    assert decisions.count("undo") >= 4
    assert {*decisions} == {"keep", "undo"}


def test_an_anchor_that_only_costs_is_taken_out_where_learning_is_slow():
    table = make(3)
    with torch.no_grad():
        table.atoms[2] = table.atoms[0]
    target = table.weight.detach().clone()
    growth = fb.Growth(table, None, **CHEAP)
    found = [growth.step(lambda: (table.weight - target).square().mean()) for _ in range(2)]
    assert [(one.anchors, one.decision) for one in found] == [(3, "keep"), (2, "shrink")]
    assert found[1].objective == pytest.approx(
        found[0].objective - 1e-6 * (ROWS - 1) - 1e-3, abs=1e-12
    )


def test_an_evaluation_that_fails_leaves_the_table_as_it_was():
    table = make(5)
    growth, calls = fb.Growth(table, None, **CHEAP), itertools.count(1)
    before = snapshot(table)

    def evaluate(fails):
        if next(calls) in fails:
            raise KeyboardInterrupt
        return 1.0 + abs(table.anchor_count - 5)

    growth.step(lambda: evaluate({0}))
    with pytest.raises(KeyboardInterrupt):
        growth.step(lambda: evaluate({3}))  # while an anchor is out
    same(before, snapshot(table))
    growth.step(lambda: evaluate({0}))
    table(torch.arange(3))
    with_new, calls = snapshot(table), itertools.count(1)
    assert table.anchor_count == 6
    with pytest.raises(KeyboardInterrupt):
        growth.step(lambda: evaluate({2}))  # while the new one is out
    same(with_new, snapshot(table))


def test_tied_tables_change_together():
    tables = [make(3), make(3, rows=17, width=4, seed=1)]
    optimizer = yogi(*tables)
    growth = fb.Growth(tables, optimizer, **CHEAP)
    counts = []
    for epoch in range(25):
        train(tables if epoch % 2 else tables[::-1], optimizer, 2, seed=epoch)
        counts.append([table.anchor_count for table in tables])
        growth.step(
            lambda: 0.1 * abs(tables[0].anchor_count - 6) + 0.1 * abs(tables[1].anchor_count - 6)
        )
        counts.append([table.anchor_count for table in tables])
    assert all(one == other for one, other in counts)
    assert counts[-1] == [6, 6]
    assert {one for one, _ in counts} == {3, 4, 5, 6, 7}


def test_one_lookup_changes_all_tied_tables():
    tables = [make(3), make(3, rows=17, width=4, seed=1)]
    growth = fb.Growth(tables, None, rule="trend", **CHEAP)
    for loss in (3, 2, 1):
        growth.step(loss)
    tables[1](torch.arange(3))
    assert [table.anchor_count for table in tables] == [4, 4]


@pytest.mark.parametrize("rule", ["trial", "trend"])
def test_row_sparse_gradients_grow_as_dense_ones_do(rule):
    tables = [make(4, sparse=sparse, rows=60, max_anchors=7) for sparse in (False, True)]
    optimizers = [yogi(table) for table in tables]
    growths = [
        fb.Growth(t, o, rule=rule, window=2, **CHEAP)
        for t, o in zip(tables, optimizers, strict=True)
    ]
    seen = set()
    for epoch, best in enumerate([7] * 8 + [3] * 12 + [6] * 6):
        for table, optimizer, growth in zip(tables, optimizers, growths, strict=True):
            train(table, optimizer, 4, seed=epoch)
            growth.step(lambda table=table, best=best: 0.1 * abs(table.anchor_count - best))
        assert tables[0].anchor_count == tables[1].anchor_count
        torch.testing.assert_close(
            tables[0].weight.detach(), tables[1].weight.detach(), rtol=0, atol=1e-6
        )
        torch.testing.assert_close(
            tables[0].transform.detach(), tables[1].transform.detach(), rtol=0, atol=1e-6
        )
        seen.add(tables[0].anchor_count)
    assert len(seen) >= 3
    assert [one.decision for one in growths[0].history] == [
        one.decision for one in growths[1].history
    ]


# --- starting over ---


def restarting(better, **settings):
    """Train where neither way helps, until the tables have started over and been judged."""
    table = make(4, **settings)
    optimizer = yogi(table)
    growth = fb.Growth(table, optimizer, restarts=1, generator=seeded(3), window=2, **CHEAP)
    loss, over = 1.0, None
    for epoch in range(30):
        train(table, optimizer, 3, seed=epoch)
        if growth._before and over is None:
            over, loss = table.atoms.detach().clone(), 1.0 + (-0.5 if better else 0.5)
        trained = snapshot(table, optimizer)
        decision = growth.step(lambda: loss + abs(table.anchor_count - 4)).decision  # noqa: B023
        if growth._due == 1 << 30:
            before = snapshot(table, optimizer)
        if over is not None and decision in ("restart", "undo"):
            return table, optimizer, growth, before, trained
    raise AssertionError([one.decision for one in growth.history])


@pytest.mark.parametrize("sparse", [False, True])
def test_starting_over_is_kept_where_it_is_better(sparse):
    table, optimizer, growth, before, trained = restarting(True, sparse=sparse)
    assert growth.history[-1].decision == "restart"
    assert growth.history[-1].loss == 0.5
    assert growth.restarts == 0
    same(trained, snapshot(table, optimizer))
    assert not torch.equal(before["transform"], trained["transform"])


@pytest.mark.parametrize("sparse", [False, True])
def test_starting_over_is_taken_back_where_it_is_worse(sparse):
    table, optimizer, growth, before, trained = restarting(False, sparse=sparse)
    assert growth.history[-1].decision == "undo"
    assert not torch.equal(before["transform"], trained["transform"])
    same(before, snapshot(table, optimizer))
    train(table, optimizer, 3)


@pytest.mark.parametrize(("kind", "sparse"), CASES, ids=NAMES)
def test_starting_over_keeps_directions_and_nothing_else(kind, sparse):
    table = make(5, sparse=sparse)
    optimizer = kind(table)
    train(table, optimizer, 20)
    before = snapshot(table, optimizer)
    kept = table.start_over(optimizer, seeded(1))
    assert not kept_for(table.transform, optimizer)
    assert not kept_for(table.atoms, optimizer)
    cosines = torch.nn.functional.cosine_similarity(before["atoms"], table.atoms.detach())
    torch.testing.assert_close(cosines, torch.ones(5, dtype=torch.float64))
    fresh = make(5, seed=1)
    torch.testing.assert_close(table.transform.detach(), fresh.transform.detach())
    torch.testing.assert_close(table.atoms.detach().norm(dim=1), fresh.atoms.detach().norm(dim=1))
    train(table, optimizer, 3, seed=2)
    table.take_back(kept, optimizer)
    same(before, snapshot(table, optimizer))


# --- rows that arrive meanwhile ---


@pytest.mark.parametrize(("kind", "sparse"), CASES, ids=NAMES)
def test_anchors_come_back_to_a_table_that_has_got_more_rows(kind, sparse):
    table = make(4, sparse=sparse)
    optimizer = kind(table)
    arrivals = fb.Arrivals([table], optimizer, keys=range(1, ROWS))
    train(table, optimizer, 10)
    before, leaving = snapshot(table, optimizer), departures(table)[0]
    leaving.leave(optimizer)
    arrivals.admit(["new", "newer"])
    train(table, optimizer, 3, seed=1)
    leaving.come_back(optimizer)
    assert table.transform.shape == (ROWS + 2, 4)
    assert torch.equal(
        table.transform[:ROWS, leaving.place].detach(), before["transform"][:, leaving.place]
    )
    assert not table.transform[ROWS:, leaving.place].any()
    train(table, optimizer, 3, seed=2)
    before, kept = snapshot(table, optimizer), table.start_over(optimizer, seeded(1))
    train(table, optimizer, 3, seed=3)
    arrivals.admit(["newest"])
    train(table, optimizer, 3, seed=4)
    table.take_back(kept, optimizer)
    after = snapshot(table, optimizer)
    same(before, {k: v[: ROWS + 2] if k.startswith("t") else v for k, v in after.items()})
    assert {len(v) for k, v in after.items() if k.startswith("t")} == {ROWS + 3}
    train(table, optimizer, 3, seed=5)


# --- checkpoints and copies ---


def learn(table, optimizer, growth, epochs):
    for epoch in epochs:
        train(table, optimizer, 3, seed=epoch)
        best = 7 if epoch < 8 else 4
        loss = 0.1 * abs(table.anchor_count - best)
        growth.step(
            lambda best=best, loss=loss: (
                loss if growth.rule == "trend" else 0.1 * abs(table.anchor_count - best)
            )
        )


@pytest.mark.parametrize("rule", ["trial", "trend"])
@pytest.mark.parametrize(("kind", "sparse"), CASES, ids=NAMES)
def test_growth_goes_on_from_a_checkpoint_bit_for_bit(kind, sparse, rule):
    table = make(5, sparse=sparse, max_anchors=7)
    optimizer, generator, files, ends = kind(table), seeded(9), {}, 24
    growth = fb.Growth(
        table, optimizer, rule=rule, window=2, restarts=2, generator=generator, **CHEAP
    )
    for epoch in range(ends):
        learn(table, optimizer, growth, [epoch])
        files[epoch] = io.BytesIO()
        parts = {"model": table, "optimizer": optimizer, "growth": growth}
        state = {name: part.state_dict() for name, part in parts.items()}
        torch.save({**state, "random": generator.get_state()}, files[epoch])
    assert len({one.anchors for one in growth.history}) >= 3
    for epoch in range(0, ends, 4):
        files[epoch].seek(0)
        state = torch.load(files[epoch], weights_only=True)
        other = make(3, seed=8, sparse=sparse, max_anchors=7)
        twin, drawn = kind(other), seeded(1)
        again = fb.Growth(other, twin, rule=rule, window=2, restarts=2, generator=drawn, **CHEAP)
        drawn.set_state(state["random"])
        other.load_state_dict(state["model"])
        twin.load_state_dict(state["optimizer"])
        again.load_state_dict(state["growth"])
        learn(other, twin, again, range(epoch + 1, ends))
        assert again.history == growth.history
        same(snapshot(other, twin), snapshot(table, optimizer))


def test_a_state_does_not_change_with_what_it_was_taken_of():
    table = make(4)
    optimizer = yogi(table)
    growth = fb.Growth(table, optimizer, rule="trend", window=2, **CHEAP)
    train(table, optimizer, 2)
    for loss in (3.0, 2.0):
        growth.step(loss)
    state = growth.state_dict()
    before = copy.deepcopy(state)
    other = fb.Growth(make(4), None, rule="trend", window=2, **CHEAP)
    other.load_state_dict(state)
    for one, loss in itertools.product((growth, other), (1.0, 2.0, 3.0)):
        one.tables[0](torch.arange(4)).square().sum().backward()
        one.step(loss)
    for (moment, mean), (old, older) in zip(
        state.pop("moments"), before.pop("moments"), strict=True
    ):
        assert torch.equal(moment, old)
        assert torch.equal(mean, older)
    assert state == before


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("anchors", [1, 4, 9])
def test_a_table_takes_in_a_state_of_another_number_of_anchors(anchors, sparse):
    source, table = make(anchors, seed=5, sparse=sparse), make(4, sparse=sparse, max_anchors=9)
    optimizer = yogi(table)
    train(table, optimizer, 3)
    held = torch.nn.Sequential(table)
    held.load_state_dict(torch.nn.Sequential(source).state_dict())
    assert (table.anchor_count, table.anchors) == (anchors, anchors)
    assert torch.equal(table.weight, source.weight)
    train(table, optimizer, 3)
    train(source, yogi(source), 1)
    with pytest.raises(fb.ArgumentError, match="10 anchors: there may be at most max_anchors=9"):
        table.load_state_dict(make(10).state_dict())
    assert table.anchor_count == anchors


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(
    "how",
    [copy.deepcopy, lambda table: pickle.loads(pickle.dumps(table))],
    ids=["deepcopy", "pickle"],
)
def test_copies_are_tables_of_their_own(how, sparse):
    table = make(4, sparse=sparse)
    optimizer = yogi(table)
    growth = fb.Growth(table, optimizer, rule="trend", window=2, **CHEAP)
    train(table, optimizer, 3)
    for loss in (2.0, 1.0):
        growth.step(loss)
    other = how(table)
    assert torch.equal(other.weight, table.weight)
    assert other.on_training is other.on_gradient is None  # no growth comes along
    moment = growth.state_dict()["moments"][0][0]
    train(other, yogi(other), 2)
    assert (other.anchor_count, table.anchor_count) == (4, 4)
    assert torch.equal(growth.state_dict()["moments"][0][0], moment)
    train(table, optimizer, 1)
    assert (other.anchor_count, table.anchor_count) == (4, 5)


# --- parameters that change their shape ---


def test_owners_are_found_inside_each_other():
    table, other = make(4), make(4, seed=1)
    wrapped, plain = adam(table), yogi(other)
    both = fb.Several(wrapped, plain)
    assert owners(None) == []
    assert owners(both) == [both, wrapped, wrapped.optimizer, plain]
    train([table, other], both, 4)
    assert {*kept_for(table.transform, both)} == {"exp_avg", "exp_avg_sq"}
    assert {*kept_for(other.transform, both)} == {"m", "v"}
    before = snapshot(other, both)
    leaving = departures(other)[0]
    leaving.leave(both)
    assert plain.state[other.transform]["v"].shape == (ROWS, 3)
    leaving.come_back(both)
    same(before, snapshot(other, both))
    train([table, other], both, 2)


@pytest.mark.parametrize("wrapped", [False, True])
def test_resize_keeps_the_parameter_and_fills_as_fresh_state_is_filled(wrapped):
    table = make(4)
    optimizer = fb.Yogi(table.parameters(), initial_accumulator=0.125)
    optimizer = (
        fb.Proximal(optimizer, {table.transform: fb.NonNegativeL1(0.0)}) if wrapped else optimizer
    )
    train(table, optimizer, 3)
    parameter, before = table.atoms, snapshot(table, optimizer)
    resize(parameter, lambda old, fill: torch.cat([old, old.new_full((1, WIDTH), fill)]), optimizer)
    assert table.atoms is parameter
    assert parameter.grad is None
    kept = kept_for(parameter, optimizer)
    for found, old, fill in (
        (parameter, "atoms", 0.0),
        (kept["m"], "atoms.m", 0.0),
        (kept["v"], "atoms.v", 0.125),
    ):
        assert torch.equal(found[:4], before[old])
        assert bool((found[4] == fill).all())


def test_entries_that_are_held_at_zero_stay_with_their_anchors():
    table = make(4)
    penalty = fb.NonNegativeL1(1e-3)
    optimizer = fb.Yogi(table.parameters(), penalties={table.transform: penalty})
    with torch.no_grad():
        table.transform[:10, 1] = 0.0
    penalty.freeze(table.transform)
    table.take_anchors([0], optimizer)
    table.add_anchors(torch.ones(1, WIDTH), optimizer=optimizer)
    train(table, optimizer, 5)
    assert not table.transform[:10, 0].any()
    assert table.transform[:, 3].any()


# --- what is refused ---


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lambda1": 1e-5, "lambda2": 1e-5}, "lambda1 > lambda2 > 0"),
        ({"lambda1": 1e-6, "lambda2": 1e-5}, "lambda1 > lambda2 > 0"),
        ({"lambda2": 0.0}, "lambda1 > lambda2 > 0"),
        ({"lambda1": math.nan}, "lambda1 > lambda2 > 0"),
        ({"lambda1": True}, "lambda1 > lambda2 > 0"),
        ({"delta": 0}, "delta=0: give a whole number of at least 1"),
        ({"delta": 1.5}, "delta=1.5"),
        ({"delta": True}, "delta=True"),
        ({"window": 0}, "window=0: give a whole number of at least 1"),
        ({"rule": "guess"}, "rule='guess': use one of trial, trend"),
        ({"rule": None}, "rule=None"),
        ({"restarts": -1}, "restarts=-1: give a whole number of at least 0"),
        ({"restarts": True}, "restarts=True"),
    ],
)
def test_bad_settings_are_refused(settings, words):
    with pytest.raises(fb.ArgumentError, match=words):
        fb.Growth(make(), None, **{**PRICE, **settings})


def test_bad_tables_are_refused():
    table = make(4)
    for tables in (
        [],
        None,
        3,
        torch.nn.Embedding(3, 2),
        [fb.AnchorTable(9, 4, anchors=2)],
        [table, None],
    ):
        with pytest.raises(fb.ArgumentError, match=r"one or several fb\.GrowingAnchorTable"):
            fb.Growth(tables, None, **PRICE)
    with pytest.raises(fb.ArgumentError, match=r"as many anchors each, not \[4, 5\]"):
        fb.Growth([table, make(5)], None, **PRICE)
    with pytest.raises(fb.ArgumentError, match="given twice"):
        fb.Growth([table, table], None, **PRICE)


@pytest.mark.parametrize("loss", [math.nan, math.inf, None, "1", True, [1.0, 2.0], torch.ones(2)])
def test_a_loss_that_is_no_number_is_refused(loss):
    table = make()
    for rule in ("trend", "trial"):
        growth = fb.Growth(table, None, rule=rule, **PRICE)
        with pytest.raises(fb.ArgumentError, match="the validation loss is"):
            growth.step(lambda: loss)
        assert growth.history == []
    with pytest.raises(fb.ArgumentError, match="empty"):
        growth.step(lambda: math.nan)


def test_bad_anchors_are_refused():
    for given, words in (
        ({"anchors": 0}, "anchors=0"),
        ({"anchors": 5, "max_anchors": 4}, "anchors=5: there may be at most max_anchors=4"),
        ({"max_anchors": 0}, "max_anchors=0"),
        ({"anchors": 2.0}, "anchors=2.0"),
    ):
        with pytest.raises(fb.ArgumentError, match=words):
            fb.GrowingAnchorTable(10, 4, **given)
    table = make(4, max_anchors=5)
    before = snapshot(table)
    for atoms, columns in (
        (torch.ones(1, 5), None),
        (torch.ones(6), None),
        (torch.ones(1, 6), torch.ones(ROWS)),
        (torch.ones(1, 6), torch.ones(ROWS, 2)),
        (torch.ones(1, 6), torch.ones(ROWS + 1, 1)),
        (torch.ones(2, 6), None),
    ):
        with pytest.raises(fb.ArgumentError):
            table.add_anchors(atoms, columns)
        same(before, snapshot(table))
    for places in ([], [4], [-1], [0, 1, 2, 3]):
        with pytest.raises(fb.ArgumentError, match="at least one stays"):
            table.take_anchors(places)
        same(before, snapshot(table))


# --- a planted number of anchors ---


def planted(rows=2000, width=12, anchors=8):
    generator = seeded(0)
    atoms = torch.randn(anchors, width, generator=generator) / width**0.5
    chosen = torch.rand(rows, anchors, generator=generator).argsort(1)[:, :2]
    weights = torch.zeros(rows, anchors).scatter_(
        1, chosen, 0.5 + torch.rand(rows, 2, generator=generator)
    )
    exact = weights @ atoms
    return exact + 0.01 * exact.std() * torch.randn(rows, width, generator=generator)


@pytest.mark.parametrize("start", [3, 16])
def test_trials_find_the_planted_number_of_anchors(start):
    rows = planted()
    table = fb.GrowingAnchorTable(
        2000, 12, anchors=start, init=fb.HalfNormal(0.3), generator=seeded(1)
    )
    optimizer = fb.Yogi(
        table.parameters(), lr=0.02, penalties={table.transform: fb.NonNegativeL1(3e-4)}
    )
    growth, order = fb.Growth(table, optimizer, lambda1=3e-2, lambda2=1e-5), seeded(2)

    def evaluate():
        with torch.no_grad():
            return (table.weight - rows).square().sum(1).mean()

    for _ in range(40):
        for ids in torch.cat([torch.randperm(2000, generator=order) for _ in range(4)]).split(200):
            optimizer.zero_grad()
            (table(ids) - rows[ids]).square().sum(1).mean().backward()
            optimizer.step()
        growth.step(evaluate)
    assert 6 <= growth.history[-1].anchors <= 10
    assert growth.history[-1].loss < 0.1 * float(rows.square().sum(1).mean())
    assert max(found.anchors for found in growth.history) <= 30


def test_growing_tables_are_refused_where_they_cannot_be():
    table, other = (fb.GrowingAnchorTable(9, 4, anchors=2) for _ in range(2))
    with pytest.raises(fb.ArgumentError, match="change, so they represent no objects"):
        table.related(fb.Graph.from_edges(9, [[0, 1]]))
    with pytest.raises(fb.ArgumentError, match="does not hold"):
        fb.Growth([table, other], fb.Yogi(table.parameters()), lambda1=1.0, lambda2=0.1)


def test_a_state_brings_its_anchor_objects():
    known = fb.AnchorTable(9, 4, anchors=2, init=fb.Frequency(range(9)))
    blank = fb.AnchorTable(9, 4, anchors=2)
    blank.load_state_dict(known.state_dict())
    assert blank.anchor_ids.tolist() == [8, 7]
    torch.testing.assert_close(blank.weight, known.weight)
