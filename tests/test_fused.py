"""The compiled epochs of matrix factorisation take the steps of the reference loop."""

import copy

import numpy as np
import pytest
import torch

import featherbed as fb
from featherbed.apps.recommender import fused
from featherbed.apps.recommender import model as ratings
from featherbed.apps.recommender.model import MatrixFactorization
from featherbed.io.records import make_ratings
from featherbed.kernels.threads import set_threads
from featherbed.optim.exempt import Exempt

DATA = make_ratings(300, 200, 6000, groups=4, dim=4, seed=1)
TRIPLES = ratings.to_tensors(DATA)
BATCH = 200
STEPS = 2 * -(-len(DATA) // BATCH)  # of two epochs


def table(spec, rows, generator):
    made = fb.make_table(spec, rows, 6, generator=generator)
    with torch.no_grad():
        (made.weight if isinstance(made, fb.DenseTable) else made.atoms).mul_(0.4)
    return made


def model_of(
    users="anchor:anchors=6", items="anchor:anchors=6", biases="column", dtype=torch.float32
):
    generator = torch.Generator().manual_seed(0)
    tables = [table(spec, rows, generator) for spec, rows in ((users, 300), (items, 200))]
    return MatrixFactorization(*tables, mean=3.5, biases=biases).to(dtype)


def penalties_of(model, lam=1e-5, penalty=fb.NonNegativeL1):
    tables = [model.users, model.items]
    return {table.transform: penalty(lam) for table in tables if isinstance(table, fb.AnchorTable)}


def yogi(model, lam=1e-5, penalty=fb.NonNegativeL1, **settings):
    return fb.Yogi(
        model.parameters(), lr=0.02, penalties=penalties_of(model, lam, penalty), **settings
    )


def exempting(model):
    """Yogi with a third of the entries exempt, all of row 0 among them."""
    penalties = {}
    for table in (model.users, model.items):
        rows, anchors = table.transform.shape
        entries = torch.rand(rows, anchors, generator=torch.Generator().manual_seed(2)) < 0.3
        entries[0] = True
        penalties[table.transform] = fb.NonNegativeL1(
            1e-3, exempt=Exempt(table, entries.nonzero(), anchors)
        )
    return fb.Yogi(model.parameters(), lr=0.02, penalties=penalties)


def triples_for(model):
    users, items, values = TRIPLES
    return users, items, values.to(next(model.parameters()).dtype)


def run(model, optimizer, how, schedulers=(), generator=None):
    """Run an epoch for each letter: f(used) or p(lain)."""
    generator = generator or torch.Generator().manual_seed(5)
    losses = []
    for letter in how:
        if letter == "f":
            assert fused.supports(model, optimizer)
        epoch = fused.epoch if letter == "f" else ratings.plain_epoch
        losses.append(epoch(model, optimizer, triples_for(model), BATCH, generator, schedulers))
    return losses


def values_of(model):
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def apart(one, other):
    return float((values_of(one) - values_of(other)).abs().max())


def compare(
    make, optimizer_of, schedulers_of=lambda model, optimizer: (), how="ff", tolerance=2e-5
):
    """The compiled epochs and the reference in float32 against the reference in float64."""
    found = {}
    for name, letters, dtype in (
        ("exact", "pp", torch.float64),
        ("plain", "pp", torch.float32),
        ("fused", how, torch.float32),
    ):
        model = make(dtype)
        optimizer = optimizer_of(model)
        losses = run(model, optimizer, letters, schedulers_of(model, optimizer))
        found[name] = model, losses, optimizer
    exact, losses, _ = found["exact"]
    assert apart(found["fused"][0], exact) < max(tolerance, 4 * apart(found["plain"][0], exact))
    assert found["fused"][1] == pytest.approx(losses, rel=1e-5)
    assert losses[-1] < losses[0]
    return found


SIDES = {
    "anchors": ("anchor:anchors=6", "anchor:anchors=6"),
    "many anchors, dense": ("anchor:anchors=21", "dense"),
    "dense, growing": ("dense", "growinganchor:anchors=5"),
    "dense": ("dense", "dense"),
}


@pytest.mark.parametrize("biases", ["none", "column", "apart"])
@pytest.mark.parametrize("sides", SIDES)
def test_steps_are_those_of_the_reference(sides, biases):
    found = compare(lambda dtype: model_of(*SIDES[sides], biases, dtype), yogi)
    optimizer, exact = found["fused"][2], found["exact"][2]
    for group, other in zip(optimizer.param_groups, exact.param_groups, strict=True):
        for p, q in zip(group["params"], other["params"], strict=True):
            assert optimizer.state[p]["step"] == exact.state[q]["step"] == STEPS
            for name in ("m", "v"):
                assert torch.allclose(
                    optimizer.state[p][name].double(), exact.state[q][name], atol=1e-6
                )


def test_nothing_but_rounding_differs_from_the_reference_at_the_first_step():
    models = [model_of(), model_of()]
    for model, letter in zip(models, "fp", strict=True):
        one = (TRIPLES[0][:64], TRIPLES[1][:64], TRIPLES[2][:64])
        epoch = fused.epoch if letter == "f" else ratings.plain_epoch
        epoch(model, yogi(model), one, 64, torch.Generator().manual_seed(0))
    assert apart(models[0], model_of()) > 0
    assert apart(*models) < 1e-6


@pytest.mark.parametrize(
    "optimizer_of",
    [
        lambda model: yogi(model, lam=0.0),
        lambda model: yogi(model, lam=1e-3),
        lambda model: yogi(model, penalty=fb.L1, lam=1e-4),
        lambda model: yogi(model, prox="scalar", lam=1e-2),
        lambda model: yogi(model, weight_decay=0.01),
        lambda model: fb.AdamW(
            model.parameters(),
            lr=0.01,
            weight_decay=0.1,
            eps=1e-4,
            penalties=penalties_of(model, 1e-3),
        ),
        lambda model: fb.AdamW(model.parameters(), lr=0.01, weight_decay=0.0, eps=1e-4),
        exempting,
    ],
    ids=["lam 0", "lam 1e-3", "l1", "scalar", "decay", "adamw and prox", "adam", "exempt"],
)
def test_rules_and_penalties(optimizer_of):
    found = compare(lambda dtype: model_of(dtype=dtype), optimizer_of)
    fused_model, exact = found["fused"][0], found["exact"][0]
    zeros = [int((m.users.transform == 0).sum()) for m in (fused_model, exact)]
    assert zeros[0] == pytest.approx(zeros[1], abs=2)


def test_a_budget_projects_and_freezes():
    def budget(model, optimizer):
        return [fb.Budget(optimizer.penalties, nonzeros=900, steps=STEPS, every=5)]

    found = compare(lambda dtype: model_of(dtype=dtype), yogi, budget)
    model = found["fused"][0]
    counts = [
        int(torch.count_nonzero(m.users.transform) + torch.count_nonzero(m.items.transform))
        for m, *_ in found.values()
    ]
    assert counts == [counts[0]] * 3
    assert counts[0] <= 900
    assert found["fused"][2].penalties[model.users.transform].kept is not None


def test_schedules_of_rates_and_penalties_reach_the_steps():
    def schedules(model, optimizer):
        falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return [falling, fb.Schedule(list(optimizer.penalties.values()), {0: 0.0, STEPS: 1e-3})]

    found = compare(lambda dtype: model_of(dtype=dtype), yogi, schedules)
    assert found["fused"][2].param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-8)
    still = compare(lambda dtype: model_of(dtype=dtype), yogi)
    assert apart(still["fused"][0], found["fused"][0]) > 1e-2


def test_groups_have_rates_of_their_own():
    def grouped(model):
        rest = [*model.items.parameters()]
        return fb.Yogi(
            [{"params": [*model.users.parameters()], "lr": 0.001}, {"params": rest}], lr=0.03
        )

    compare(lambda dtype: model_of(dtype=dtype), grouped)


@pytest.mark.parametrize("how", ["fpf", "pff"])
def test_loops_may_take_turns(how):
    ends = []
    for letters in ("ppp", how):
        model = model_of(biases="apart")
        run(model, yogi(model), letters)
        ends.append(model)
    assert apart(*ends) < 2e-5


@pytest.mark.parametrize("letters", ["ff", "fp"])
def test_a_run_goes_on_from_its_state(letters):
    model, generator = model_of(), torch.Generator().manual_seed(5)
    optimizer = yogi(model)
    run(model, optimizer, "f", generator=generator)
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict(), generator.get_state()))
    run(model, optimizer, letters, generator=generator)
    other = model_of("anchor:anchors=6", "anchor:anchors=6")
    again = yogi(other)
    other.load_state_dict(kept[0])
    again.load_state_dict(kept[1])
    run(other, again, letters, generator=generator.set_state(kept[2]))
    assert torch.equal(values_of(model), values_of(other))


def test_threads_do_not_change_the_result():
    ends = []
    try:
        for threads in (1, 2):
            set_threads(threads)
            model = model_of("anchor:anchors=21", "dense", "apart")
            ends.append((run(model, yogi(model), "ff"), values_of(model)))
    finally:
        set_threads(None)
    assert ends[0][0] == ends[1][0]
    assert torch.equal(ends[0][1], ends[1][1])


def test_shared_ids_are_those_of_the_reference():
    def shared(dtype):
        model = model_of(dtype=dtype)
        model.users = fb.SSE(model.users, 0.3, generator=torch.Generator().manual_seed(1))
        return model

    def optimizer_of(model):
        return fb.Yogi(
            model.parameters(), lr=0.02, penalties={model.users.transform: fb.NonNegativeL1(1e-5)}
        )

    found = compare(shared, optimizer_of)
    assert int(found["fused"][0].users.calls) == STEPS
    plain = model_of()
    run(plain, optimizer_of(plain), "ff")
    assert apart(plain, found["fused"][0]) > 1e-2


def test_growth_sees_what_the_reference_shows_it():
    ends = []
    for letters in ("pppp", "ffff"):
        model = model_of("growinganchor:anchors=3", "growinganchor:anchors=3")
        optimizer = yogi(model)
        growth = fb.Growth(
            [model.users, model.items],
            optimizer,
            lambda1=1e-3,
            lambda2=1e-7,
            rule="trend",
            window=2,
        )
        generator, counts = torch.Generator().manual_seed(5), []
        for number, letter in enumerate(letters):
            run(model, optimizer, letter, generator=generator)
            growth.step(10.0 - number)
            counts.append(growth.anchor_count)
        moment = growth._moments[0].moment
        ends.append((counts, values_of(model), moment / moment.abs().max()))
    assert ends[0][0] == ends[1][0] == [3, 3, 4, 5]
    assert torch.allclose(ends[0][1], ends[1][1], atol=1e-4)
    assert torch.allclose(ends[0][2], ends[1][2], atol=1e-4)


class Stranger(MatrixFactorization):
    def forward(self, users, items):
        return super().forward(users, items) * 2


def watched(model):
    model.users.register_forward_hook(lambda *given: None)


def half_frozen(model):
    model.users.atoms.requires_grad_(False)


@pytest.mark.parametrize("change", [watched, half_frozen, lambda model: model.double()])
def test_what_does_not_fit_is_left_to_the_reference(change):
    model = model_of()
    optimizer = yogi(model)
    assert fused.supports(model, optimizer)
    change(model)
    assert not fused.supports(model, optimizer)


def test_other_tables_optimizers_and_penalties_do_not_fit(monkeypatch):
    model = model_of()
    assert not fused.supports(model, torch.optim.Adam(model.parameters()))
    assert not fused.supports(model, fb.Yogi(model.users.parameters()))
    assert not fused.supports(model, yogi(model, penalty=fb.GroupL1, prox="scalar"))
    for spec in ("anchor:anchors=6,slots=2", "anchor:anchors=6,sparse=true", "hashed:buckets=50"):
        generator = torch.Generator().manual_seed(0)
        other = MatrixFactorization(
            fb.make_table(spec, 300, 6, generator=generator), fb.DenseTable(200, 6)
        )
        assert not fused.supports(other, fb.Yogi(other.parameters()))
    optimizer = yogi(model)
    monkeypatch.setenv("FEATHERBED_KERNELS", "numpy")
    assert not fused.supports(model, optimizer)


def test_train_epoch_chooses(monkeypatch):
    taken = []
    monkeypatch.setattr(fused, "epoch", lambda *given: taken.append("fused") or 1.0)
    monkeypatch.setattr(ratings, "plain_epoch", lambda *given: taken.append("plain") or 1.0)
    for make in (MatrixFactorization, Stranger):
        model = make(fb.AnchorTable(300, 6, anchors=3), fb.DenseTable(200, 6))
        ratings.train_epoch(model, yogi(model), TRIPLES, BATCH, torch.Generator())
    assert taken == ["fused", "plain"]


def test_bad_ids_and_numbers_change_nothing():
    model = model_of()
    optimizer = yogi(model)
    before = values_of(model)
    with pytest.raises(fb.IdError, match="id 300 is not in this table: ids go from 0 to 299"):
        fused.epoch(model, optimizer, (TRIPLES[0] + 1, *TRIPLES[1:]), BATCH, torch.Generator())
    bad = TRIPLES[2].clone().fill_(np.nan)
    with pytest.raises(fb.ArgumentError, match="NaN or infinity; nothing was changed"):
        fused.epoch(model, optimizer, (*TRIPLES[:2], bad), BATCH, torch.Generator())
    assert torch.equal(before, values_of(model))
