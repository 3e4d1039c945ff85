"""Penalties by the inequality that defines a prox; Proximal and Yogi against their definitions."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import featherbed as fb

PENALTIES = [fb.L1, fb.NonNegativeL1, fb.GroupL1]


def objective(penalty, z, x, step):
    return ((z - x).square() / (2 * step)).sum() + penalty.value(z)


@pytest.mark.parametrize("kind", PENALTIES)
@pytest.mark.parametrize("metric", ["scalar", "elementwise"])
@given(
    seed=st.integers(0, 10_000),
    lam=st.sampled_from([0.0, 0.01, 0.5, 3.0]),
    scale=st.sampled_from([0.1, 1.0, 10.0]),
)
@settings(max_examples=40, deadline=None)
def test_a_prox_beats_every_other_point(kind, metric, seed, lam, scale):
    generator = torch.Generator().manual_seed(seed)
    x = scale * torch.randn(5, 3, generator=generator, dtype=torch.float64)
    step = (
        0.3
        if metric == "scalar"
        else 0.05 + torch.rand(5, 3, generator=generator, dtype=torch.float64)
    )
    penalty = kind(lam)
    best = penalty.prox(x, step)
    least = objective(penalty, best, x, step)
    assert math.isfinite(least)
    for spread in (1e-4, 1e-2, 1.0):
        for _ in range(10):
            other = best + spread * torch.randn(5, 3, generator=generator, dtype=torch.float64)
            other = other.clamp(min=0) if kind is fb.NonNegativeL1 else other
            assert objective(penalty, other, x, step) >= least - 1e-9
    for other in (x.clamp(min=0), torch.zeros_like(x)):
        assert objective(penalty, other, x, step) >= least - 1e-9


def test_values():
    x = torch.tensor([[3.0, -4.0], [0.0, 1.0]])
    assert fb.L1(0.5).value(x) == 4.0
    assert fb.GroupL1(0.5).value(x) == 3.0
    assert fb.NonNegativeL1(0.5).value(x) == math.inf
    assert fb.NonNegativeL1(0.5).value(x.abs()) == 4.0
    assert (fb.NonNegativeL1(0.0).prox(x, 1.0) >= 0).all()


@pytest.mark.parametrize("lam", [-1.0, math.nan, math.inf, "1"])
@pytest.mark.parametrize("kind", PENALTIES)
def test_bad_weights_are_refused(kind, lam):
    with pytest.raises(fb.ArgumentError, match="lam="):
        kind(lam)
    penalty = kind(1.0)
    with pytest.raises(fb.ArgumentError, match="lam="):
        penalty.lam = lam


def make(seed=0):
    return fb.AnchorTable(30, 6, anchors=4, generator=torch.Generator().manual_seed(seed))


def loss_of(table, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(30, (12,), generator=generator)
    return (table(ids) - torch.randn(12, 6, generator=generator)).square().mean()


def run(table, optimizer, steps, scheduler=None, start=0):
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss_of(table, step).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def test_proximal_is_the_step_then_the_prox():
    ours, plain = make(), make()
    optimizer = fb.Proximal(
        torch.optim.SGD(ours.parameters(), lr=0.5), {ours.transform: fb.NonNegativeL1(0.01)}
    )
    sgd = torch.optim.SGD(plain.parameters(), lr=0.5)
    for step in range(20):
        run(ours, optimizer, 1, start=step)
        run(plain, sgd, 1, start=step)
        with torch.no_grad():
            plain.transform.copy_((plain.transform - 0.5 * 0.01).clamp(min=0))
    assert torch.equal(ours.transform, plain.transform)
    assert torch.equal(ours.atoms, plain.atoms)
    assert (ours.transform == 0).any()


def test_proximal_keeps_schedulers_and_state(tmp_path):
    table = make()
    optimizer = fb.Proximal(
        torch.optim.Adam(table.parameters(), lr=0.1), {table.transform: fb.NonNegativeL1(0.05)}
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    run(table, optimizer, 4, scheduler)
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert optimizer.optimizer.param_groups[0]["lr"] == 0.05
    torch.save(
        {"o": optimizer.state_dict(), "s": scheduler.state_dict(), "t": table.state_dict()},
        tmp_path / "c.pt",
    )
    saved = torch.load(tmp_path / "c.pt", weights_only=True)

    twin = make(1)
    again = fb.Proximal(
        torch.optim.Adam(twin.parameters(), lr=0.1), {twin.transform: fb.NonNegativeL1(0.05)}
    )
    schedule = torch.optim.lr_scheduler.StepLR(again, 3, gamma=0.5)
    twin.load_state_dict(saved["t"])
    again.load_state_dict(saved["o"])
    schedule.load_state_dict(saved["s"])
    run(table, optimizer, 5, scheduler, start=4)
    run(twin, again, 5, schedule, start=4)
    assert torch.equal(table.transform, twin.transform)


def test_proximal_takes_new_groups_and_closures():
    table, extra = make(), torch.nn.Parameter(torch.ones(2))
    optimizer = fb.Proximal(torch.optim.SGD([table.atoms], lr=0.1), {table.atoms: fb.L1(0.1)})
    optimizer.add_param_group({"params": [extra], "lr": 0.5})
    assert len(optimizer.optimizer.param_groups) == 2

    def closure():
        optimizer.zero_grad()
        loss = loss_of(table, 0) + extra.sum()
        loss.backward()
        return loss

    before = float(loss_of(table, 0).detach()) + 2.0
    assert float(optimizer.step(closure).detach()) == pytest.approx(before)
    assert extra.tolist() == [0.5, 0.5]


def test_gradient_scaling_skips_the_prox_too():
    table = make()
    optimizer = fb.Proximal(
        torch.optim.SGD(table.parameters(), lr=0.1), {table.transform: fb.NonNegativeL1(1.0)}
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = table.transform.detach().clone()
    scaler.scale(loss_of(table, 0) * math.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(table.transform, before)
    optimizer.zero_grad()
    scaler.scale(loss_of(table, 0)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert (table.transform < before).all()


def reference_yogi(p, grads, lr=1e-2, b1=0.9, b2=0.999, eps=1e-3, v0=1e-6, lam=0.0):
    m, v = torch.zeros_like(p), torch.full_like(p, v0)
    for t, g in enumerate(grads, 1):
        m = b1 * m + (1 - b1) * g
        v = v - (1 - b2) * torch.sign(v - g**2) * g**2
        s = lr * math.sqrt(1 - b2**t) / (1 - b1**t)
        p = p - s * m / (v.sqrt() + eps)
        if lam:
            threshold = lam * s / (v.sqrt() + eps)
            p = torch.where(p > threshold, p - threshold, 0)
    return p


@pytest.mark.parametrize("lam", [0.0, 0.02])
def test_yogi_is_its_definition(lam):
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(7, 3, generator=generator, dtype=torch.float64) for _ in range(50)]
    start = torch.rand(7, 3, generator=generator, dtype=torch.float64)
    p = torch.nn.Parameter(start.clone())
    optimizer = fb.Yogi([p], penalties={p: fb.NonNegativeL1(lam)} if lam else None)
    for g in grads:
        p.grad = g.clone()
        optimizer.step()
        assert torch.equal(p.grad, g)  # the caller's gradient is left alone
    torch.testing.assert_close(p.detach(), reference_yogi(start, grads, lam=lam))


def test_preconditioned_threshold_is_five_hundred_times_the_scalar_one_at_the_start():
    moved = {}
    for rule in ("preconditioned", "scalar"):
        p = torch.nn.Parameter(torch.ones(4))
        p.grad = torch.zeros(4)
        optimizer = fb.Yogi([p], lr=0.01, penalties={p: fb.NonNegativeL1(1e-3)}, prox=rule)
        for group in optimizer.param_groups:
            group["betas"] = (0.0, 0.0)  # no bias correction: the step is lr itself
        optimizer.step()
        moved[rule] = float(1 - p.detach()[0])
    assert moved["scalar"] == pytest.approx(1e-5, rel=0.01)
    assert moved["preconditioned"] / moved["scalar"] == pytest.approx(500, rel=0.01)


def test_yogi_settings_each_change_something():
    def end(**settings):
        table = make()
        penalised = settings.pop("lam", None)
        penalties = None if penalised is None else {table.transform: fb.NonNegativeL1(penalised)}
        run(table, fb.Yogi(table.parameters(), penalties=penalties, **settings), 5)
        return table.weight.detach()

    base = end()
    for change in (
        {"lr": 0.02}, {"betas": (0.8, 0.999)}, {"betas": (0.9, 0.9)}, {"eps": 1e-2}, {"initial_accumulator": 1e-3},
        {"weight_decay": 0.1}, {"lam": 1e-3},
    ):  # fmt: skip
        assert not torch.equal(base, end(**change)), change
    assert not torch.equal(end(lam=1e-3), end(lam=1e-3, prox="scalar"))


def test_yogi_resumes_bit_for_bit():
    table = make()
    optimizer = fb.Yogi(table.parameters(), penalties={table.transform: fb.NonNegativeL1(1e-3)})
    run(table, optimizer, 5)
    twin = make(1)
    twin.load_state_dict(copy.deepcopy(table.state_dict()))
    again = fb.Yogi(twin.parameters(), penalties={twin.transform: fb.NonNegativeL1(1e-3)})
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(table, optimizer, 5, start=5)
    run(twin, again, 5, start=5)
    assert torch.equal(table.weight, twin.weight)


@pytest.mark.parametrize(
    ("make_it", "named"),
    [
        (lambda t, o: fb.Yogi(t.parameters(), lr=-1), "lr=-1"),
        (lambda t, o: fb.Yogi(t.parameters(), eps=0), "eps=0"),
        (lambda t, o: fb.Yogi(t.parameters(), betas=(1.0, 0.9)), "betas="),
        (lambda t, o: fb.Yogi(t.parameters(), prox="exact"), "prox='exact'"),
        (lambda t, o: fb.Yogi([t.atoms], penalties={t.transform: fb.L1(1)}), "does not hold"),
        (lambda t, o: fb.Proximal(o, {o: fb.L1(1)}), "given for parameters"),
        (lambda t, o: fb.Proximal(o, [fb.L1(1)]), "is a dict"),
        (lambda t, o: fb.Proximal(o, {t.atoms: 0.1}), "parameters to penalties"),
    ],
)
def test_bad_optimizer_settings(make_it, named):
    table = make()
    with pytest.raises(fb.ArgumentError, match=named):
        make_it(table, torch.optim.SGD(table.parameters(), lr=0.1))


@pytest.mark.parametrize("wrap", ["yogi", "proximal"])
@pytest.mark.parametrize("copied", ["deepcopy", "pickle"])
def test_copied_optimizers_go_on_with_the_copied_parameters(wrap, copied):
    table = make()
    penalties = {table.transform: fb.NonNegativeL1(1e-2)}
    plain = torch.optim.SGD(table.parameters(), lr=0.1)
    optimizer = (
        fb.Yogi(table.parameters(), penalties=penalties)
        if wrap == "yogi"
        else fb.Proximal(plain, penalties)
    )
    run(table, optimizer, 3)
    pair = (table, optimizer)
    twin, again = copy.deepcopy(pair) if copied == "deepcopy" else pickle.loads(pickle.dumps(pair))
    run(table, optimizer, 3, start=3)
    assert not torch.equal(twin.transform, table.transform)
    run(twin, again, 3, start=3)
    assert torch.equal(twin.transform, table.transform)
    assert (
        list(again.penalties) == [twin.transform] or next(iter(again.penalties)) is twin.transform
    )


def test_numbers_of_numpy_are_numbers():
    assert fb.L1(np.float32(0.5)).lam == 0.5
    assert fb.DenseTable(np.int64(3), 2).num_embeddings == 3
