"""Row-sparse training: rows that catch up are the rows that were there at every step."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import featherbed as fb
import featherbed.optim.lazy.native as native
from featherbed.optim.lazy.history import History

V, K, D = 60, 6, 5


def pair(dtype, **settings):
    """A table with row-sparse gradients and its twin with dense ones."""
    made = [
        fb.AnchorTable(
            V,
            D,
            anchors=K,
            sparse=sparse,
            dtype=dtype,
            generator=torch.Generator().manual_seed(1),
            init=fb.HalfNormal(0.3),
            **settings,
        )
        for sparse in (True, False)
    ]
    assert torch.equal(made[0].transform, made[1].transform)
    return made


def batches(steps, seed=0, most=9):
    """Ids with duplicates, popular and rare ones, some never seen; now and then a batch of few."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        count = int(torch.randint(1, most, (), generator=generator))
        yield (torch.rand(count, generator=generator).pow(4) * (V - 5)).long()


def run(tables, optimizers, steps, schedule=lambda t: 1.0, lams=None, penalties=(), seed=0):
    generator = torch.Generator().manual_seed(seed + 100)
    base = [group["lr"] for group in optimizers[0].param_groups]
    for t, ids in enumerate(batches(steps, seed)):
        target = torch.randn(len(ids), D, dtype=torch.float64, generator=generator)
        for number, (table, optimizer) in enumerate(zip(tables, optimizers, strict=True)):
            for group, lr in zip(optimizer.param_groups, base, strict=True):
                group["lr"] = lr * schedule(t)
            if lams is not None:
                penalties[number].lam = lams(t)
            optimizer.zero_grad()
            (table(ids) - target.to(table.dtype)).square().sum().backward()
            optimizer.step()


MAKERS = {
    "sgd": lambda p, pen: fb.SGD(p, lr=0.02, penalties=pen),
    "momentum": lambda p, pen: fb.SGD(p, lr=0.01, momentum=0.9, penalties=pen),
    "yogi": lambda p, pen: fb.Yogi(p, lr=0.01, penalties=pen),
    "yogi-scalar": lambda p, pen: fb.Yogi(p, lr=0.01, penalties=pen, prox="scalar"),
}
PENALTIES = {"none": None, "nonnegative": fb.NonNegativeL1, "l1": fb.L1, "group": fb.GroupL1}


def falling(t):
    return 1.0 if t < 500 else 0.3 * (1 + math.sin(t / 50))


def moody(t):
    """A weight that changes all the time, also faster than momentum does."""
    return 0.02 * (t % 7) if t % 300 < 150 else 0.001


@pytest.mark.parametrize("kind", PENALTIES)
@pytest.mark.parametrize("rule", MAKERS)
@pytest.mark.parametrize("changing", [False, True], ids=["steady", "changing"])
def test_lazy_is_eager(rule, kind, changing):
    if (rule, kind) == ("yogi", "group"):
        pytest.skip("refused: see the test of bad input")
    tables = pair(torch.float64)
    made = [None if PENALTIES[kind] is None else PENALTIES[kind](0.003) for _ in tables]
    optimizers = [
        MAKERS[rule](t.parameters(), {} if penalty is None else {t.transform: penalty})
        for t, penalty in zip(tables, made, strict=True)
    ]
    steps = (
        {"sgd": 2000, "yogi": 2000}.get(rule, 500) if kind == "nonnegative" and changing else 150
    )
    run(
        tables,
        optimizers,
        steps,
        falling if changing else lambda t: 1.0,
        moody if changing and made[0] else None,
        made,
    )
    sparse, dense = tables
    everyone = torch.arange(V)
    torch.testing.assert_close(sparse(everyone), dense(everyone), rtol=0, atol=1e-5)
    before = sparse._parameters["transform"].clone()
    torch.testing.assert_close(sparse.transform, dense.transform, rtol=0, atol=1e-5)
    if moves(optimizers[0]) or made[0] is not None:
        assert not torch.equal(before, sparse.transform), (
            "some rows must have been behind, or nothing was tested"
        )
    if kind in ("nonnegative", "l1"):
        assert torch.equal(sparse.transform == 0, dense.transform == 0)
        assert kind == "l1" or bool((sparse.transform == 0).any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("kind", ["none", "nonnegative", "l1"])
@pytest.mark.parametrize("rule", [*MAKERS, "adamw", "adagrad"])
def test_compiled_loops_are_the_plain_ones(rule, kind, dtype, monkeypatch):
    """Every rule exists twice: in torch and in compiled loops."""

    def made():
        table = pair(dtype)[0]
        penalty = None if PENALTIES[kind] is None else PENALTIES[kind](0.003)
        makers = {
            **MAKERS,
            "adamw": lambda p, pen: fb.AdamW(p, lr=0.01, weight_decay=0.1, penalties=pen),
            "adagrad": lambda p, pen: fb.Adagrad(p, lr=0.05, penalties=pen),
        }
        return (
            table,
            makers[rule](table.parameters(), {} if penalty is None else {table.transform: penalty}),
            penalty,
        )

    quick, slow = made(), made()
    run([quick[0]], [quick[1]], 120, falling, moody if kind != "none" else None, [quick[2]])
    monkeypatch.setenv("FEATHERBED_KERNELS", "numpy")
    run([slow[0]], [slow[1]], 120, falling, moody if kind != "none" else None, [slow[2]])
    close = {"rtol": 2e-4, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 0, "atol": 1e-10}
    torch.testing.assert_close(quick[0].transform, slow[0].transform, **close)
    torch.testing.assert_close(quick[0].atoms, slow[0].atoms, **close)


def test_adamw_and_adagrad_are_torchs_with_dense_gradients():
    pairs = (
        (fb.AdamW, torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
        (fb.Adagrad, torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01}),
        (fb.SGD, torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
        (fb.SGD, torch.optim.SGD, {"lr": 0.01, "weight_decay": 0.1}),
    )
    for mine, theirs, settings in pairs:
        tables = [pair(torch.float64)[1] for _ in range(2)]
        run(
            tables,
            [mine(tables[0].parameters(), **settings), theirs(tables[1].parameters(), **settings)],
            100,
        )
        torch.testing.assert_close(tables[0].transform, tables[1].transform, rtol=1e-9, atol=1e-12)


def test_adamw_rests_moments_and_decays_every_row():
    table = fb.DenseTable(4, 3, sparse=True, dtype=torch.float64)
    start = table.weight.detach().clone()
    other = nn.Embedding(4, 3, sparse=True, _weight=start.clone())
    optimizer = fb.AdamW(table.parameters(), lr=0.01, weight_decay=0.5)
    theirs = torch.optim.SparseAdam(other.parameters(), lr=0.01)
    for _ in range(50):
        for module, step in ((table, optimizer), (other, theirs)):
            step.zero_grad()
            module(torch.tensor([1, 1, 2])).sum().backward()
            step.step()
    torch.testing.assert_close(table.weight[[0, 3]], start[[0, 3]] * (1 - 0.005) ** 50)
    optimizer = fb.AdamW(table.parameters(), lr=0.01, weight_decay=0.0)
    table.weight.data.copy_(start)
    for _ in range(50):
        optimizer.zero_grad()
        table(torch.tensor([1, 1, 2])).sum().backward()
        optimizer.step()
    torch.testing.assert_close(table.weight, other.weight)


def moves(optimizer):
    group = optimizer.param_groups[0]
    c = optimizer.coefficients(group, 1)
    return c.beta > 0 or c.decay != 1.0


def test_a_forward_pass_writes_nothing():
    table = pair(torch.float32)[0]
    optimizer = fb.Yogi(table.parameters(), penalties={table.transform: fb.NonNegativeL1(0.01)})
    run([table], [optimizer], 30)
    before = table._parameters["transform"].clone(), table._lazy["transform"].stamps.clone()
    seen = table(torch.arange(V))
    assert torch.equal(table._parameters["transform"], before[0])
    assert torch.equal(table._lazy["transform"].stamps, before[1])
    table.transform  # noqa: B018 - reading it settles
    assert not torch.equal(table._parameters["transform"], before[0])
    torch.testing.assert_close(seen, table(torch.arange(V)))
    torch.testing.assert_close(seen, table.weight)


def test_saved_and_resumed_bit_for_bit():
    def start():
        table = pair(torch.float32)[0]
        return table, fb.Yogi(
            table.parameters(), penalties={table.transform: fb.NonNegativeL1(0.01)}
        )

    table, optimizer = start()
    run([table], [optimizer], 50)
    saved = pickle.loads(pickle.dumps((table.state_dict(), optimizer.state_dict())))
    again, resumed = start()
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    copied, copied_optimizer = copy.deepcopy((table, optimizer))
    for one, step in ((table, optimizer), (again, resumed), (copied, copied_optimizer)):
        run([one], [step], 50, seed=7)
    for other in (again, copied):
        assert torch.equal(table.transform, other.transform)
        assert torch.equal(table.atoms, other.atoms)


def test_the_history_forgets_before_it_is_long(monkeypatch):
    monkeypatch.setattr("featherbed.optim.lazy.history.LONGEST", 40)
    tables = pair(torch.float64)
    optimizers = [
        fb.Yogi(t.parameters(), penalties={t.transform: fb.NonNegativeL1(0.003)}) for t in tables
    ]
    run(tables, optimizers, 200)
    assert len(tables[0]._lazy["transform"].history) < 40
    torch.testing.assert_close(tables[0].transform, tables[1].transform, rtol=0, atol=1e-5)


def test_a_dense_gradient_on_rows_that_are_behind():
    tables = pair(torch.float64)
    optimizers = [
        fb.Yogi(t.parameters(), penalties={t.transform: fb.NonNegativeL1(0.003)}) for t in tables
    ]
    run(tables, optimizers, 30)
    for table, optimizer in zip(tables, optimizers, strict=True):
        optimizer.zero_grad()
        (
            table(torch.tensor([1, 2])).sum() + table._parameters["transform"].square().sum() * 0
        ).backward()
        optimizer.step()
    run(tables, optimizers, 30, seed=3)
    torch.testing.assert_close(tables[0].transform, tables[1].transform, rtol=0, atol=1e-5)


def test_two_optimizers_after_each_other():
    tables = pair(torch.float64)
    for number, maker in enumerate((MAKERS["yogi"], MAKERS["momentum"])):
        run(
            tables,
            [maker(t.parameters(), {t.transform: fb.NonNegativeL1(0.003)}) for t in tables],
            60,
            seed=number,
        )
        if number == 0:
            tables[1].transform  # noqa: B018
    sparse, dense = tables
    torch.testing.assert_close(sparse.transform, dense.transform, rtol=0, atol=1e-5)


def test_history_in_closed_form():
    history = History(0.9)
    rng = np.random.default_rng(0)
    moves = rng.random(300)
    for move in moves:
        history.push(1.0, move, 0.1)
    assert history.reach > 150
    for place in (0, 5, 290, 299, 300):
        exact = sum(m * 0.9**k for k, m in enumerate(moves[place:], 1) if k <= history.reach)
        assert math.isclose(history.column("tail")[place], exact, rel_tol=1e-9, abs_tol=1e-12)
    assert math.isclose(history.column("debt")[300], 30.0)


def test_clipping_both_kinds():
    tables = pair(torch.float64)
    ids = torch.tensor([3, 3, 7, 3])
    norms = []
    for table in tables:
        (table(ids) * 10).square().sum().backward()
        norms.append(fb.clip_grad_norm_(table.parameters(), 1.0))
    torch.testing.assert_close(norms[0], norms[1])
    torch.testing.assert_close(tables[0].transform.grad.to_dense(), tables[1].transform.grad)
    reference = pair(torch.float64)[1]
    (reference(ids) * 10).square().sum().backward()
    torch.testing.assert_close(nn.utils.clip_grad_norm_(reference.parameters(), 1.0), norms[0])
    with pytest.raises(fb.ArgumentError, match="max_norm"):
        fb.clip_grad_norm_(tables[0].parameters(), -1.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("sparse", [True, False])
def test_bad_gradients_change_nothing(bad, sparse):
    table = pair(torch.float32)[0 if sparse else 1]
    for maker in (fb.Yogi, fb.AdamW, fb.Adagrad, fb.SGD):
        optimizer = maker(table.parameters())
        before = {name: value.clone() for name, value in table.state_dict().items()}
        table.zero_grad()
        (table(torch.tensor([1, 2, 3]))[1, 1] * bad).backward()
        with pytest.raises(fb.ArgumentError, match="NaN or infinity"):
            optimizer.step()
        assert all(torch.equal(value, before[name]) for name, value in table.state_dict().items())
        assert not optimizer.state[table.transform]


def test_a_large_gradient_is_not_infinite():
    table = pair(torch.float32)[0]
    optimizer = fb.SGD(table.parameters(), lr=1e-38)
    table(torch.tensor([1, 2, 3])).sum().backward()
    table._parameters["transform"].grad._values().fill_(3e38)
    optimizer.step()


def test_bad_input_is_one_clear_error():
    table, other = pair(torch.float32)
    with pytest.raises(fb.ArgumentError, match="does not hold"):
        fb.AdamW([table.atoms], penalties={table.transform: fb.L1(0.1)})
    with pytest.raises(
        fb.ArgumentError, match="slots=7: a row cannot hold more than the 6 anchors"
    ):
        fb.AnchorTable(10, 4, anchors=6, slots=7)
    plain = nn.Embedding(5, 3, sparse=True)
    optimizer = fb.Yogi(plain.parameters())
    plain(torch.tensor([1])).sum().backward()
    before = plain.weight.detach().clone()
    with pytest.raises(fb.ArgumentError, match=r"fb.DenseTable\(..., sparse=True\)"):
        optimizer.step()
    assert torch.equal(plain.weight, before)
    optimizer = fb.SGD(plain.parameters())
    optimizer.step()  # rows without a gradient do not move: nothing to catch up
    grouped = fb.Yogi(table.parameters(), penalties={table.transform: fb.GroupL1(0.1)})
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(fb.ArgumentError, match="prox='scalar'"):
        grouped.step()
    saved = fb.Yogi(other.parameters())
    other(torch.tensor([1])).sum().backward()
    saved.step()
    small = fb.AnchorTable(V - 1, D, anchors=K)
    resumed = fb.Yogi(small.parameters())
    with pytest.raises(fb.ArgumentError, match="of another size"):
        resumed.load_state_dict(saved.state_dict())
    assert not resumed.state


def test_ddp_is_told_which_parameter_has_sparse_gradients(monkeypatch):
    model = nn.Sequential(fb.AnchorTable(10, 4, anchors=3, sparse=True), nn.Linear(4, 2))
    assert not [m for m in model.modules() if isinstance(m, nn.Embedding)], "not outside of DDP"
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    told = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Embedding)]
    assert [(name, m.sparse) for name, m in told] == [("0", True)]
    assert [name for name, _ in told[0][1].named_parameters(recurse=False)] == ["transform"]
    names = [name for name, _ in model.named_parameters()]
    assert names == ["0.atoms", "0.transform", "1.weight", "1.bias"]
    assert dict(model.named_modules())["0"] is model[0]


def planted(seed=0, rows=400, anchors=16, dim=12):
    generator = torch.Generator().manual_seed(seed)
    atoms = torch.randn(anchors, dim, generator=generator) / dim**0.5
    support = torch.stack([torch.randperm(anchors, generator=generator)[:2] for _ in range(rows)])
    true = torch.zeros(rows, anchors).scatter_(
        1, support, 0.5 + torch.rand(rows, 2, generator=generator)
    )
    return atoms, true, generator


def learn_planted(every, steps=400, dtype=torch.float32, clip=None):
    atoms, true, generator = planted()
    target = (true @ atoms).to(dtype)
    table = fb.AnchorTable(
        len(true),
        12,
        anchors=16,
        slots=4,
        scan_every=every,
        init=fb.HalfNormal(0.1),
        generator=generator,
        dtype=dtype,
    )
    with torch.no_grad():
        table.atoms.copy_(atoms)
    table.atoms.requires_grad_(False)
    optimizer = fb.Yogi(
        [table._parameters["transform"]],
        lr=0.02,
        penalties={table.transform: fb.NonNegativeL1(1e-4)},
    )
    for _ in range(steps):
        ids = torch.randint(len(true), (200,), generator=generator)
        optimizer.zero_grad()
        (table(ids) - target[ids]).square().sum(1).mean().mul(4).backward()
        if clip is not None:
            fb.clip_grad_norm_(table.parameters(), clip)
        optimizer.step()
    dense = torch.zeros(true.shape).scatter_(
        1, table.support.long(), table.transform.detach().float()
    )
    return float(((dense > 0.05) & (true > 0)).sum() / (true > 0).sum()), table


def test_the_support_moves_to_where_it_is_needed():
    start = learn_planted(every=10**9)[0]
    assert start < 0.4
    for settings in ({}, {"dtype": torch.float64}, {"clip": 1.0}):
        found, table = learn_planted(every=4, **settings)
        assert found > 0.8, settings
        assert all(len(set(row.tolist())) == 4 for row in table.support), (
            "an anchor stands in a row only once"
        )


def test_a_newcomer_needs_a_gradient_that_beats_the_penalty():
    for lam, moves in ((1e-4, True), (1e3, False)):
        table = fb.AnchorTable(
            30, 6, anchors=12, slots=2, scan_every=1, generator=torch.Generator().manual_seed(0)
        )
        before = table.support.clone()
        optimizer = fb.SGD(
            table.parameters(), lr=0.1, penalties={table.transform: fb.NonNegativeL1(lam)}
        )
        for _ in range(3):
            optimizer.zero_grad()
            (table(torch.arange(30)) - 1.0).square().sum().backward()
            optimizer.step()
        assert torch.equal(table.support, before) == (not moves)


def test_scaled_gradients_let_the_same_anchors_in():
    def supports(scale):
        table = fb.AnchorTable(
            30, 6, anchors=12, slots=2, scan_every=2, generator=torch.Generator().manual_seed(0)
        )
        optimizer = fb.SGD(
            table.parameters(), lr=0.05, penalties={table.transform: fb.NonNegativeL1(0.3)}
        )
        for _ in range(6):
            optimizer.zero_grad()
            for part in torch.arange(30).split(15):  # gradients of two passes add up
                (scale * (table(part) - 1.0).square().sum()).backward()
            for parameter in table.parameters():  # what a gradient scaler does
                parameter.grad = parameter.grad / scale
            optimizer.step()
        return table.support

    assert torch.equal(supports(1.0), supports(1024.0))


def test_signed_slots_let_in_either_sign():
    table = fb.AnchorTable(
        30,
        6,
        anchors=12,
        slots=2,
        scan_every=1,
        nonnegative=False,
        generator=torch.Generator().manual_seed(0),
    )
    optimizer = fb.SGD(table.parameters(), lr=0.01, penalties={table.transform: fb.L1(1e-3)})
    for _ in range(60):
        optimizer.zero_grad()
        (table(torch.arange(30)) + 1.0).square().sum().backward()
        optimizer.step()
    assert bool((table.transform < 0).any())
    assert bool((table.transform > 0).any())


@pytest.mark.parametrize(("slots", "dim"), [(3, 5), (8, 64), (9, 40), (16, 7)])
@pytest.mark.parametrize("padding", [None, 4])
def test_compiled_slots_are_the_dense_table(slots, dim, padding):
    generator = torch.Generator().manual_seed(0)
    table = fb.AnchorTable(
        90,
        dim,
        anchors=20,
        slots=slots,
        padding_idx=padding,
        generator=generator,
        init=fb.HalfNormal(0.5),
    )
    dense = (
        torch.zeros(90, 20)
        .scatter_(1, table.support.long(), table.transform.detach())
        .requires_grad_()
    )
    atoms = table.atoms.detach().clone().requires_grad_()
    ids = (torch.rand(700, generator=generator).pow(3) * 90).long()
    offsets = torch.tensor([0, 3, 3, 200, 650])
    weights = torch.rand(700, generator=generator).requires_grad_()

    def compare(mine, whole, extra=()):
        torch.testing.assert_close(mine, whole, rtol=1e-4, atol=1e-5)
        gradient = torch.randn(mine.shape, generator=generator)
        found = torch.autograd.grad(
            mine, [table._parameters["transform"], table.atoms, *extra], gradient
        )
        expected = torch.autograd.grad(whole, [dense, atoms, *extra], gradient)
        of_slots = expected[0].gather(1, table.support.long())
        pairs = ((found[0].to_dense(), of_slots), *zip(found[1:], expected[1:], strict=True))
        for one, other in pairs:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)

    def rows():
        made = dense @ atoms
        return made if padding is None else made * (torch.arange(90) != padding)[:, None]

    compare(table(ids), rows()[ids])
    compare(table(ids.reshape(7, 100).T), rows()[ids.reshape(7, 100).T])
    for mode in ("sum", "mean"):
        whole = torch.nn.functional.embedding_bag(
            ids, rows(), offsets, mode=mode, padding_idx=padding
        )
        compare(table.bag(ids, offsets, mode=mode), whole)
    whole = torch.nn.functional.embedding_bag(
        ids, rows(), offsets, mode="sum", per_sample_weights=weights
    )
    compare(table.bag(ids, offsets, weights), whole, (weights,))
    assert table(ids[:0]).shape == (0, dim)


def test_the_same_threads_give_the_same_bytes_and_nan_is_seen():
    def learn():
        table = fb.AnchorTable(
            5000, 16, anchors=40, slots=8, scan_every=3, generator=torch.Generator().manual_seed(0)
        )
        optimizer = fb.Yogi(table.parameters(), penalties={table.transform: fb.NonNegativeL1(1e-5)})
        generator = torch.Generator().manual_seed(1)
        for _ in range(8):
            ids = (torch.rand(6000, generator=generator).pow(3) * 5000).long()
            optimizer.zero_grad()
            (table(ids) - 1.0).square().mean().backward()
            optimizer.step()
        return table

    one, other = learn(), learn()
    assert torch.equal(one.transform, other.transform)
    assert torch.equal(one.atoms, other.atoms)
    assert torch.equal(one.support, other.support)
    with torch.no_grad():
        one.atoms[3, 2] = float("nan")
    rows = one(torch.arange(5000))
    assert bool((rows[:, 2].isnan() == (one.support == 3).any(1)).all())
    rows.sum().backward()
    with pytest.raises(fb.ArgumentError, match="NaN"):
        fb.SGD(one.parameters()).step()


def drawn(table, optimizer, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        ids = torch.randint(len(table.weight), (5,), generator=generator)
        optimizer.zero_grad()
        table(ids).square().sum().backward()
        optimizer.step()


def twins(**settings):
    return [
        fb.DenseTable(
            30,
            4,
            sparse=sparse,
            dtype=torch.float64,
            generator=torch.Generator().manual_seed(0),
            **settings,
        )
        for sparse in (True, False)
    ]


@pytest.mark.parametrize(
    ("first", "then"), [(torch.float64, torch.float32), (torch.float32, torch.float64)]
)
@pytest.mark.parametrize("slots", [None, 2])
def test_rows_change_their_type_up_to_date(first, then, slots):
    table = fb.AnchorTable(
        40, 4, anchors=8, slots=slots, sparse=True, dtype=first, init=fb.HalfNormal(0.3)
    )
    optimizer = fb.Yogi(table.parameters())
    drawn(table, optimizer, 5)
    before = table(torch.arange(40)).detach()
    table.to(then)
    torch.testing.assert_close(table(torch.arange(40)), before.to(then), rtol=1e-5, atol=1e-6)
    drawn(table, optimizer, 5)
    assert bool(table.weight.isfinite().all())


def test_ids_nobody_checked_are_refused():
    table = twins()[0]
    drawn(table, fb.SGD(table.parameters(), lr=0.01, momentum=0.9), 5)
    for ids in ([30], [-1]):
        with pytest.raises(IndexError):
            table.lookup(torch.tensor(ids))


def test_two_optimizers_in_turn():
    tables = twins()
    pairs = [[fb.SGD(t.parameters(), lr=0.01, momentum=0.9) for _ in range(2)] for t in tables]
    for turn in range(4):
        for table, optimizers in zip(tables, pairs, strict=True):
            for number, optimizer in enumerate(optimizers):
                drawn(table, optimizer, 2, seed=2 * turn + number)
    # with dense gradients a momentum rests while the other optimizer steps; so it does here
    torch.testing.assert_close(tables[0].weight, tables[1].weight)


def test_settings_that_change_between_steps():
    def change(key, values, maker):
        tables = twins()
        optimizers = [maker(t.parameters()) for t in tables]
        for turn, value in enumerate(values):
            for table, optimizer in zip(tables, optimizers, strict=True):
                optimizer.param_groups[0][key] = value
                drawn(table, optimizer, 6, seed=turn)
        torch.testing.assert_close(tables[0].weight, tables[1].weight)

    change("eps", [1e-3, 1e-1, 1e-3], lambda p: fb.Yogi(p))
    change("momentum", [0.9, 0.0, 0.9, 0.5], lambda p: fb.SGD(p, lr=0.01))
    change("lr", [0.01, 0.0, 0.02], lambda p: fb.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1))


def test_a_learning_rate_of_zero_hides_nothing():
    tables = twins()
    for table in tables:
        table.weight.data.abs_()
        penalty = fb.NonNegativeL1(0.0)
        optimizer = fb.SGD(
            table.parameters(), lr=0.1, momentum=0.9, penalties={table.weight: penalty}
        )
        for row, lr, lam in ((0, 0.1, 0), (1, 0.1, 20), (1, 0.0, 20), (1, 0.1, 0), (1, 0.1, 0)):
            optimizer.param_groups[0]["lr"], penalty.lam = lr, lam
            optimizer.zero_grad()
            (-3.0 * table(torch.tensor([row])).sum()).backward()
            optimizer.step()
    torch.testing.assert_close(tables[0].weight, tables[1].weight)
    assert bool(tables[0].weight[0].any())


def test_tied_tables_and_assigned_states():
    one, other = twins()[0], twins()[0]
    other.weight = one.weight
    drawn(one, fb.SGD(one.parameters(), lr=0.01, momentum=0.9), 8)
    assert torch.equal(other(torch.arange(30)), one(torch.arange(30)))
    table = twins()[0]
    table.load_state_dict(twins()[1].state_dict(), assign=True)
    drawn(table, fb.Yogi(table.parameters()), 3)


def test_a_pass_without_a_step_does_not_stop_the_next():
    table = fb.AnchorTable(40, 4, anchors=8, slots=2, scan_every=1, init=fb.HalfNormal(0.3))
    optimizer = fb.Yogi(table.parameters())
    drawn(table, optimizer, 3)
    optimizer.zero_grad()
    (table(torch.tensor([1, 2])) * math.nan).sum().backward()
    with pytest.raises(fb.ArgumentError, match="NaN"):
        optimizer.step()
    drawn(table, optimizer, 3, seed=1)
    torch.autograd.grad(table(torch.tensor([5])).sum(), table.atoms)
    drawn(table, optimizer, 3, seed=2)
    optimizer.zero_grad()
    table(torch.empty(0, dtype=torch.int64)).sum().backward()
    table(torch.arange(3)).sum().backward()
    optimizer.step()
    table._parameters["transform"].requires_grad_(False)
    for _ in range(5):
        table(torch.arange(3)).sum().backward()
    assert len(table._slots.collected) <= 1


@pytest.mark.parametrize("kernels", ["numba", "numpy"])
def test_a_table_that_is_read_twice_in_a_step_scans_as_one_read_once(kernels, monkeypatch):
    """A tower over two features reads one table twice: the scan sees the gradients of both."""
    monkeypatch.setenv("FEATHERBED_KERNELS", kernels)

    def support(split):
        seeds = torch.Generator().manual_seed(0)
        table = fb.AnchorTable(40, 4, anchors=8, slots=2, scan_every=2, generator=seeds)
        optimizer = fb.Yogi(table.parameters(), lr=0.05)
        start = table.support.clone()
        for _ in range(8):
            ids = torch.randint(40, (12,), generator=seeds)
            wanted = torch.randn(12, 4, generator=seeds)
            parts = zip(ids.split(split), wanted.split(split), strict=True)
            optimizer.zero_grad()
            sum((table(some) - aim).square().sum() for some, aim in parts).backward()
            optimizer.step()
        assert (table.support != start).any()
        return table.support

    assert torch.equal(support(12), support(5))


def test_huge_pages_change_no_value():
    rows = torch.arange(native.LARGE).view(-1, 8)  # int64: eight times as large as needed
    parameter = nn.Parameter(rows.float())
    for tensor in (rows, parameter, rows[1:, :3], torch.empty(0), torch.empty(3, device="meta")):
        native.use_huge_pages(tensor)
    assert torch.equal(rows.flatten(), torch.arange(native.LARGE))
    assert torch.equal(parameter.detach(), rows.float())


def test_a_gradient_that_was_added_to_is_summed_again():
    def train(table, twice):
        optimizer = fb.SGD(table.parameters(), lr=1e-3)
        for ids in (torch.tensor([1, 2, 1]), torch.tensor([2, 3])):
            table(ids).square().sum().backward()
            if twice:
                table(ids.flip(0)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    ends = []
    for slots in (K, None):  # as many slots as anchors are the plain table
        table = fb.AnchorTable(V, D, anchors=K, slots=slots, sparse=True, dtype=torch.float64)
        with torch.no_grad():
            table.atoms.copy_(torch.arange(K * D).view(K, D) / 10)
            table.transform.fill_(0.1)
        for twice in (False, True):
            train(table, twice)
        ends.append(table(torch.arange(V)).detach())
    torch.testing.assert_close(*ends, rtol=0, atol=1e-9)
