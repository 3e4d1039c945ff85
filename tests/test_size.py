"""Size control: entries a penalty spares, frozen supports, weights on a schedule, budgets, and loss terms for anchors."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import featherbed as fb
import featherbed.optim.lazy.native as native

V, K, D = 40, 6, 4
EVERYONE = torch.arange(V)
WIDE = torch.float64

MAKERS = {  # short memories: rows that catch up with spared entries go through every step that momentum matters
    "sgd": lambda p, pen: fb.SGD(p, lr=0.03, penalties=pen),
    "momentum": lambda p, pen: fb.SGD(p, lr=0.01, momentum=0.3, penalties=pen),
    "yogi": lambda p, pen: fb.Yogi(p, lr=0.02, betas=(0.2, 0.999), penalties=pen),
    "yogi-scalar": lambda p, pen: fb.Yogi(
        p, lr=0.02, betas=(0.3, 0.99), penalties=pen, prox="scalar"
    ),
}
LAM = {
    "sgd": 0.3,
    "momentum": 0.3,
    "yogi": 0.02,
    "yogi-scalar": 0.3,
}  # some entries die of it, others live


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def table_of_objects(seed=0, rows=V, anchors=K, dtype=WIDE, **settings):
    """Anchors that are objects, in no order."""
    counts = torch.rand(rows, generator=seeded(seed)).numpy()
    init = fb.Frequency(counts)
    return fb.AnchorTable(
        rows, D, anchors=anchors, init=init, dtype=dtype, generator=seeded(seed + 1), **settings
    )


def some_graph(rows=V, share=0.25, seed=5):
    generator = np.random.default_rng(seed)
    pairs = [(i, j) for i in range(rows) for j in range(i) if generator.random() < share]
    return fb.Graph.from_edges(rows, pairs)


def related_pairs(graph):
    return {tuple(pair) for pair in graph.pairs().tolist()} | {
        tuple(pair[::-1]) for pair in graph.pairs().tolist()
    }


def spared_in(table, graph):  # -> bool, as the transform
    """Entries whose object and anchor object are related, one after the other."""
    edges, objects = related_pairs(graph), table.anchor_ids.tolist()
    shape = table._parameters["transform"].shape
    found = torch.zeros(shape, dtype=torch.bool)
    for i in range(shape[0]):
        for j in range(shape[1]):
            k = j if table.support is None else int(table.support[i, j])
            found[i, j] = (i, objects[k]) in edges
    return found


def batches(steps, seed=0, rows=V, most=9):
    """Popular and rare ids, some twice in a batch, a few never; with targets."""
    generator = seeded(seed)
    for _ in range(steps):
        count = int(torch.randint(1, most, (), generator=generator))
        ids = (torch.rand(count, generator=generator).pow(3) * (rows - 4)).long()
        yield ids, torch.randn(count, D, dtype=WIDE, generator=generator) + 0.5


def train(table, optimizer, steps, seed=0, after=lambda t: None):
    for t, (ids, target) in enumerate(batches(steps, seed, table.num_embeddings)):
        optimizer.zero_grad()
        (table(ids) - target.to(table.dtype)).square().sum().backward()
        optimizer.step()
        after(t)


def full(table):  # -> [V, K]
    """The transform over all anchors, also of a table with slots."""
    if table.support is None:
        return table.transform.detach().clone()
    dense = torch.zeros(table.num_embeddings, table.anchors, dtype=table.dtype)
    return dense.scatter_add(1, table.support.long(), table.transform.detach())


# --- entries that are spared ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [None, 3, K])
@pytest.mark.parametrize("elementwise", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_the_prox_with_spared_entries_is_the_papers(slots, elementwise, seed):
    table, graph = table_of_objects(seed, slots=slots), some_graph(seed=seed)
    penalty = fb.NonNegativeL1(0.7, exempt=table.related(graph))
    spared = spared_in(table, graph)
    assert 0 < int(spared.sum()) < spared.numel()
    x = torch.randn(spared.shape, dtype=WIDE, generator=seeded(seed))
    step = torch.rand(spared.shape, dtype=WIDE, generator=seeded(seed + 9)) if elementwise else 0.4
    s = 1.0 - spared.double()
    wanted = ((x - 0.7 * step) * s + x * (1 - s)).clamp(min=0)
    before = x.clone()
    torch.testing.assert_close(penalty.prox(x, step), wanted, rtol=0, atol=1e-15)
    assert torch.equal(x, before), "a prox must not write into what it is given"
    ids = torch.tensor([7, 0, V - 1, 7, 20])  # some rows, in any order
    some = step[ids] if elementwise else step
    torch.testing.assert_close(penalty.prox(x[ids], some, ids), wanted[ids], rtol=0, atol=1e-15)
    at = table.related(graph).places(None)
    assert sorted(zip(*(part.tolist() for part in at), strict=True)) == [
        tuple(p) for p in spared.nonzero().tolist()
    ]
    torch.testing.assert_close(penalty.value(x.abs()), 0.7 * (x.abs() * s).sum())
    assert penalty.value(x) == math.inf


def test_single_entries_are_spared_as_whole_rows_are():
    table, graph = table_of_objects(), some_graph()
    penalty, spared = fb.NonNegativeL1(0.7, exempt=table.related(graph)), spared_in(table, graph)
    ids, atoms = (
        part.flatten() for part in torch.meshgrid(EVERYONE, torch.arange(K), indexing="ij")
    )
    x = torch.randn(V * K, dtype=WIDE, generator=seeded(2))
    found = penalty.first(x, 0.5, ids, atoms)
    assert torch.equal(found.view(V, K), penalty.prox(x.view(V, K), 0.5))
    assert torch.equal(table.related(graph).holds(ids, atoms).view(V, K), spared)


def least(penalty, x, step, point, allowed, generator):
    """Assert that no other point is better than ``point``; h is infinite where an entry is not ``allowed``."""

    def objective(z):
        return penalty.value(z) + ((z - x).square() / (2 * step)).sum()

    best = objective(point)
    assert math.isfinite(best)
    assert not bool(point[~allowed].any())
    for spread in (1e-3, 1e-1, 1.0):
        for _ in range(20):
            z = (point + spread * torch.randn(x.shape, dtype=WIDE, generator=generator)) * allowed
            z = z.clamp(min=0) if isinstance(penalty, fb.NonNegativeL1) else z
            assert best <= objective(z) + 1e-12
    assert best <= objective(torch.zeros_like(x)) + 1e-12
    assert best <= objective(x.clamp(min=0) * allowed) + 1e-12


@pytest.mark.parametrize("elementwise", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_no_point_beats_the_prox_with_spared_entries(elementwise, seed):
    table, graph = table_of_objects(seed), some_graph(seed=seed)
    penalty, generator = fb.NonNegativeL1(0.5, exempt=table.related(graph)), seeded(seed)
    x = torch.randn(V, K, dtype=WIDE, generator=generator)
    step = 0.05 + torch.rand(V, K, dtype=WIDE, generator=generator) if elementwise else 0.6
    least(penalty, x, step, penalty.prox(x, step), torch.ones(V, K, dtype=torch.bool), generator)


@pytest.mark.parametrize("kind", [fb.NonNegativeL1, fb.L1, fb.GroupL1])
@pytest.mark.parametrize("elementwise", [False, True])
@pytest.mark.parametrize("lam", [0.0, 0.5])
def test_no_point_beats_the_prox_of_a_frozen_penalty(kind, elementwise, lam):
    generator = seeded(3)
    weights = nn.Parameter(torch.randn(9, 5, dtype=WIDE, generator=generator).relu())
    penalty = kind(1.0)
    penalty.freeze(weights)
    assert penalty.lam == 0.0
    penalty.lam = lam  # as between two projections, where the entries are few and still shrink
    x = torch.randn(9, 5, dtype=WIDE, generator=generator)
    step = 0.05 + torch.rand(9, 5, dtype=WIDE, generator=generator) if elementwise else 0.6
    point = penalty.prox(x, step)
    least(penalty, x, step, point, weights.detach() != 0, generator)
    assert bool(point.any())
    ids = torch.tensor([4, 4, 0])
    torch.testing.assert_close(
        penalty.prox(x[ids], step[ids] if elementwise else step, ids), point[ids]
    )


@pytest.mark.parametrize("sparse", [False, True])
def test_a_spared_entry_lives_where_its_neighbours_die(sparse):
    table, graph = table_of_objects(sparse=sparse), some_graph()
    start, spared = full(table), spared_in(table, graph)
    penalty = fb.NonNegativeL1(2.0, exempt=table.related(graph))
    optimizer = fb.SGD(table.parameters(), lr=0.05, penalties={table.transform: penalty})
    train(table, optimizer, 150)
    end, unseen = full(table), torch.arange(V - 4, V)
    assert torch.equal(end[unseen][spared[unseen]], start[unseen][spared[unseen]])
    assert bool(start[unseen][spared[unseen]].any())
    assert not bool(end[unseen][~spared[unseen]].any())
    assert bool(start[unseen][~spared[unseen]].any())
    assert (
        end[spared].count_nonzero() / spared.sum()
        > 3 * end[~spared].count_nonzero() / (~spared).sum()
    )


# --- rows that catch up --------------------------------------------------------------------------------------------------


def moody(t):
    """A factor of the weight that changes all the time, sometimes faster than momentum does."""
    return 0.3 * (t % 7) if t % 100 < 50 else 0.05


def scenario(name, table, penalty, lam):
    def after(t):
        if name == "changing":
            penalty.lam = lam * moody(t)
        if name in ("freeze", "thaw") and t == 60:
            penalty.freeze(table.transform)
        if name == "thaw" and t == 90:
            penalty.keep(table.transform, None)
            penalty.lam = lam

    return after


CASES = [(rule, name, True) for rule in MAKERS for name in ("changing", "freeze")]
CASES += [
    ("sgd", "steady", True),
    ("yogi", "thaw", True),
    ("yogi", "thaw", False),
    ("momentum", "freeze", False),
]


@pytest.mark.parametrize(("rule", "name", "exempt"), CASES)
def test_lazy_is_eager_with_spared_and_frozen_entries(rule, name, exempt):
    graph, ends, behind = some_graph(), [], False
    for sparse in (True, False):
        table = table_of_objects(sparse=sparse)
        penalty = fb.NonNegativeL1(LAM[rule], exempt=table.related(graph) if exempt else None)
        optimizer = MAKERS[rule](table.parameters(), {table.transform: penalty})
        train(table, optimizer, 120, after=scenario(name, table, penalty, LAM[rule]))
        rows = table(EVERYONE).detach()  # as a look-up sees them
        stored = table._parameters["transform"].detach().clone()
        behind = behind or not torch.equal(stored, table.transform)
        ends.append((rows, full(table), table.atoms.detach()))
    for lazy, eager in zip(*ends, strict=True):
        torch.testing.assert_close(lazy, eager, rtol=0, atol=1e-6)
    assert torch.equal(ends[0][1] == 0, ends[1][1] == 0)
    assert bool((ends[0][1] == 0).any())
    assert bool((ends[0][1] != 0).any())
    assert behind or (name == "freeze" and rule == "sgd"), (
        "some rows must have been behind, or nothing was tested"
    )


@pytest.mark.parametrize("slots", [None, 3])
@pytest.mark.parametrize("rule", MAKERS)
def test_exempt_entries_stay_in_the_compiled_loops(rule, slots, monkeypatch):
    pytest.importorskip("numba")
    ends, calls = [], []
    update = native.update_rows
    monkeypatch.setattr(
        native, "update_rows", lambda *given: calls.append(given[0]) or update(*given)
    )
    for engine in ("numba", "numpy"):
        monkeypatch.setenv("FEATHERBED_KERNELS", engine)
        table = table_of_objects(sparse=True, slots=slots)
        penalty = fb.NonNegativeL1(LAM[rule], exempt=table.related(some_graph()))
        optimizer = MAKERS[rule](table.parameters(), {table.transform: penalty})
        train(table, optimizer, 120, after=scenario("freeze", table, penalty, LAM[rule]))
        assert len(calls) == 120, "of the first engine only"
        ends.append((table(EVERYONE).detach(), full(table), table.atoms.detach()))
    for compiled, plain in zip(*ends, strict=True):
        torch.testing.assert_close(compiled, plain, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("rule", "name", "dtype"),
    [
        ("sgd", "steady", WIDE),
        ("momentum", "freeze", WIDE),
        ("yogi", "freeze", WIDE),
        ("yogi", "freeze", torch.float32),
    ],
)
def test_as_many_slots_as_anchors_are_the_plain_table(rule, name, dtype):
    graph, ends = some_graph(), []
    for slots in (K, None):
        table = table_of_objects(slots=slots, dtype=dtype)
        if slots is None:
            with torch.no_grad():
                table.transform.copy_(ends[0][-1])
        start = full(table)
        penalty = fb.NonNegativeL1(LAM[rule], exempt=table.related(graph))
        optimizer = MAKERS[rule](table.parameters(), {table.transform: penalty})
        train(table, optimizer, 120, after=scenario(name, table, penalty, LAM[rule]))
        ends.append((full(table), table(EVERYONE).detach(), table.atoms.detach(), start))
    close = {"rtol": 0, "atol": 1e-6 if dtype == WIDE else 2e-3}
    for found, wanted in zip(*ends, strict=True):
        torch.testing.assert_close(found, wanted, **close)


def slots_by_hand(table, graph, lam, lr, steps, every):
    """Plain SGD on a table with slots: every row is shrunk at every step, entries are spared one by one."""
    edges, objects = related_pairs(graph) if graph else set(), table.anchor_ids.tolist()
    values, support = full_slots(table)
    atoms = table.atoms.detach().clone()
    moves = []

    def weight_of(i, k):
        return 0.0 if (i, objects[k]) in edges else lam

    for t, (ids, target) in enumerate(batches(steps), 1):
        held = values.clone().requires_grad_()
        learnt = atoms.clone().requires_grad_()
        rows = torch.einsum("ns,nsd->nd", held[ids], learnt[support[ids]])
        rows.retain_grad()
        (rows - target).square().sum().backward()
        values = values - lr * held.grad
        shrunk = [[lr * weight_of(i, k) for k in row] for i, row in enumerate(support.tolist())]
        values = (values - torch.tensor(shrunk, dtype=WIDE)).clamp(min=0)
        if t % every == 0:
            for i in ids.unique().tolist():
                asked = (rows.grad[ids == i].sum(0) @ atoms.T).tolist()
                lacking = [k for k in range(table.anchors) if k not in support[i].tolist()]
                best = min(lacking, key=lambda k: asked[k])
                first = max(-lr * asked[best] - lr * weight_of(i, best), 0.0)
                weak = int(values[i].argmin())
                if first > values[i, weak]:
                    values[i, weak], support[i, weak] = first, best
                    moves.append((i, best))
        atoms = atoms - lr * learnt.grad
    return values, support, moves


def full_slots(table):
    return table.transform.detach().clone(), table.support.long().clone()


@pytest.mark.parametrize("spare", [True, False])
def test_spared_pairs_are_spared_wherever_the_support_moves(spare):
    graph = some_graph() if spare else None
    table = table_of_objects(anchors=8, slots=3, scan_every=3)
    values, support, moves = slots_by_hand(table, graph, 1.0, 0.03, 200, 3)
    penalty = fb.NonNegativeL1(1.0, exempt=table.related(graph) if spare else None)
    optimizer = fb.SGD(table.parameters(), lr=0.03, penalties={table.transform: penalty})
    train(table, optimizer, 200)
    assert torch.equal(table.support.long(), support)
    torch.testing.assert_close(table.transform.detach(), values, rtol=0, atol=1e-9)
    assert len(moves) > 10
    if spare:
        related = related_pairs(graph)
        came = {(i, int(table.anchor_ids[k])) in related for i, k in moves}
        assert came == {True, False}, "pairs of both kinds must have come in"


@pytest.mark.parametrize(("rule", "dtype"), [("momentum", torch.float64), ("yogi", torch.float32)])
def test_a_frozen_support_stays(rule, dtype):
    table, graph = table_of_objects(anchors=8, slots=3, scan_every=2, dtype=dtype), some_graph()
    penalty = fb.NonNegativeL1(LAM[rule], exempt=table.related(graph))
    optimizer = MAKERS[rule](table.parameters(), {table.transform: penalty})
    first = table.support.clone()
    train(table, optimizer, 60)
    assert not torch.equal(table.support, first), "the support must move before it is frozen"
    penalty.freeze(table.transform)
    values, support = full_slots(table)
    train(table, optimizer, 60, seed=1)
    assert torch.equal(table.support.long(), support)
    assert bool((values == 0).any())
    assert not bool(table.transform[values == 0].any())
    assert not torch.equal(table.transform, values)


# --- what is refused, frozen and copied ----------------------------------------------------------------------------------


def test_related_refuses_what_it_cannot_relate():
    with pytest.raises(fb.ArgumentError, match="no objects"):
        fb.AnchorTable(V, D, anchors=K).related(some_graph())
    table = table_of_objects()
    with pytest.raises(fb.ArgumentError, match="over 39 objects, the table has 40"):
        table.related(some_graph(39))
    with pytest.raises(fb.ArgumentError, match="ndarray"):
        table.related(np.eye(V))
    for bad in (some_graph(), [[0, 1]], True):
        with pytest.raises(fb.ArgumentError, match="exempt="):
            fb.NonNegativeL1(1.0, exempt=bad)
    with pytest.raises(fb.ArgumentError, match="no objects"):
        fb.GrowingAnchorTable(V, D, anchors=K).related(some_graph())


def test_an_empty_graph_spares_nothing():
    table = table_of_objects()
    exempt = table.related(fb.Graph.from_edges(V, []))
    x = torch.randn(V, K, dtype=WIDE, generator=seeded(0))
    assert len(exempt) == 0
    assert torch.equal(
        fb.NonNegativeL1(0.3, exempt=exempt).prox(x, 1.0), fb.NonNegativeL1(0.3).prox(x, 1.0)
    )


def test_the_exempt_entries_of_another_table_are_refused():
    table, other = table_of_objects(), table_of_objects(3)
    penalties = {table.transform: fb.NonNegativeL1(1.0, exempt=other.related(some_graph()))}
    for make in (*MAKERS.values(), lambda p, pen: fb.Proximal(torch.optim.SGD(p, lr=0.1), pen)):
        with pytest.raises(fb.ArgumentError, match="another table"):
            make(table.parameters(), penalties)
    with pytest.raises(fb.ArgumentError, match="another table"):
        fb.SGD(
            table.parameters(),
            penalties={table.atoms: fb.NonNegativeL1(1.0, exempt=table.related(some_graph()))},
        )


@pytest.mark.parametrize("kind", [fb.NonNegativeL1, fb.L1])
def test_freezing_keeps_zeros_and_frees_the_rest(kind):
    weights = nn.Parameter(torch.tensor([[0.0, 2.0, 0.5], [0.0, 0.0, 1.0]]))
    penalty = kind(1.0)
    optimizer = fb.SGD([weights], lr=1.0, penalties={weights: penalty})
    penalty.freeze(weights)
    assert penalty.lam == 0.0
    for _ in range(3):
        weights.grad = -torch.ones(2, 3)
        optimizer.step()
    assert weights.tolist() == [[0.0, 5.0, 3.5], [0.0, 0.0, 4.0]]
    weights.grad = torch.full((2, 3), 4.0)
    optimizer.step()  # one entry is at zero, or below, now, but it was not when the others were frozen
    weights.grad = torch.full((2, 3), -4.0)
    optimizer.step()
    assert weights.tolist() == [
        [0.0, 5.0, 4.0 if kind is fb.NonNegativeL1 else 3.5],
        [0.0, 0.0, 4.0],
    ]
    penalty.keep(weights, None)
    weights.grad = -torch.ones(2, 3)
    optimizer.step()
    assert bool((weights > 0).all())


def test_what_cannot_be_kept_is_refused():
    weights, penalty = nn.Parameter(torch.ones(2, 3)), fb.NonNegativeL1(1.0)
    with pytest.raises(fb.ArgumentError, match=r"\(3, 2\)"):
        penalty.keep(weights, torch.ones(3, 2, dtype=torch.bool))
    assert penalty.kept is None
    other = nn.Parameter(torch.zeros(2, 3))
    fb.SGD([weights, other], penalties={weights: penalty, other: penalty})
    with pytest.raises(fb.ArgumentError, match="several parameters"):
        penalty.freeze(weights)
    assert penalty.kept is None
    assert penalty.lam == 1.0


@pytest.mark.parametrize("sparse", [False, True])
def test_any_torch_optimizer_spares_and_freezes(sparse):
    graph = some_graph()
    ours, plain = table_of_objects(sparse=sparse), table_of_objects(sparse=sparse)
    penalty, spared = fb.NonNegativeL1(0.5, exempt=ours.related(graph)), spared_in(plain, graph)

    def inner(table):
        if sparse:
            return torch.optim.SGD(table.parameters(), lr=0.02)
        return torch.optim.Adam(table.parameters(), lr=0.02)

    optimizer = fb.Proximal(inner(ours), {ours.transform: penalty})
    kept = None

    def by_hand(t):
        nonlocal kept
        with torch.no_grad():
            lam = 0.5 if kept is None else 0.0
            found = (plain.transform - 0.02 * lam * (~spared).double()).clamp(min=0)
            plain.transform.copy_(found if kept is None else found * kept)
        if t == 79:
            kept = plain.transform.detach() != 0

    train(plain, inner(plain), 140, after=by_hand)
    train(ours, optimizer, 140, after=lambda t: penalty.freeze(ours.transform) if t == 79 else None)
    assert torch.equal(ours.transform, plain.transform)
    assert torch.equal(ours.atoms, plain.atoms)
    assert not bool(kept.all())


def copied(how, *things):
    return copy.deepcopy(things) if how == "deepcopy" else pickle.loads(pickle.dumps(things))


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize(
    ("rule", "slots", "frozen"),
    [("momentum", None, False), ("yogi", 3, True), ("proximal", None, True)],
)
def test_copies_spare_and_freeze_too(rule, slots, frozen, how):
    table = table_of_objects(slots=slots, sparse=rule != "proximal", scan_every=4)
    penalty = fb.NonNegativeL1(LAM.get(rule, 0.3), exempt=table.related(some_graph()))
    penalties = {table.transform: penalty}
    if rule == "proximal":
        optimizer = fb.Proximal(
            torch.optim.SGD(table.parameters(), lr=0.02, momentum=0.9 if slots is None else 0),
            penalties,
        )
    else:
        optimizer = MAKERS[rule](table.parameters(), penalties)
    train(table, optimizer, 30)
    if frozen:
        penalty.freeze(table.transform)
        train(table, optimizer, 5, seed=2)
    twin, again = copied(how, table, optimizer)
    (parameter, moved), *_ = again.penalties.items()
    assert parameter is twin.transform
    assert moved.exempt.table is twin
    assert moved is not penalty
    before = full(table)
    train(twin, again, 25, seed=1)
    assert torch.equal(full(table), before), "the copy must not change the first"
    train(table, optimizer, 25, seed=1)
    assert torch.equal(full(table), full(twin))
    assert torch.equal(table(EVERYONE), twin(EVERYONE))
    alone = copied(how, optimizer)[0]  # with a table of its own
    assert [type(p) for p in alone.penalties.values()] == [fb.NonNegativeL1]


@pytest.mark.parametrize("exempt", [True, False])
def test_spared_entries_of_the_full_softmax(exempt):
    """Rows that the prox would set back may be left out, those with a spared entry not."""
    graph = some_graph(60, 0.06)

    def learn(whole):
        generator = seeded(0)
        table = table_of_objects(rows=60, anchors=5, sparse=True)
        with torch.no_grad():
            table.transform[10:] = 0
        penalty, left = fb.NonNegativeL1(0.06, exempt=table.related(graph) if exempt else None), 0
        loss = fb.FullSoftmax(table, penalty)
        optimizer = fb.SGD(table.parameters(), lr=0.5, penalties={table.transform: penalty})
        for _ in range(150):
            hidden = torch.randn(7, D, dtype=WIDE, generator=generator)
            targets = torch.randint(30, (7,), generator=generator)
            optimizer.zero_grad()
            if whole:
                nn.functional.cross_entropy(table.logits(hidden), targets).backward()
            else:
                loss(hidden, targets).backward()
            left += loss.left_out
            optimizer.step()
        return full(table), table.atoms.detach(), left

    some, every = learn(whole=False), learn(whole=True)
    torch.testing.assert_close(some[0], every[0], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(some[1], every[1], rtol=1e-9, atol=1e-12)
    assert torch.equal(some[0] == 0, every[0] == 0)
    assert some[2] > 150 * 5, "rows must have been spared"
    if exempt:
        spared = spared_in(table_of_objects(rows=60, anchors=5), graph)
        assert bool(some[0][10:][spared[10:]].any())


# --- weights on a schedule -----------------------------------------------------------------------------------------------


def test_a_schedule_is_linear_between_points_and_constant_outside():
    penalties = [fb.NonNegativeL1(7.0), fb.L1(3.0)]
    schedule = fb.Schedule(penalties, {8: 0.5, 3: 1.0, 4: 2.0})
    seen = []
    for _ in range(12):
        assert penalties[0].lam == penalties[1].lam
        seen.append(penalties[0].lam)
        schedule.step()
    wanted = [1.0, 1.0, 1.0, 1.0, 2.0, 1.625, 1.25, 0.875, 0.5, 0.5, 0.5, 0.5]
    assert seen == pytest.approx(wanted, abs=1e-15)
    one = fb.L1(0.0)
    fb.Schedule(one, {5: 0.25})
    assert one.lam == 0.25


def test_a_schedule_goes_on_where_it_stood():
    first, second = fb.L1(0.0), fb.L1(9.0)
    points = {0: 0.0, 10: 1.0}
    schedule, again = fb.Schedule(first, points), fb.Schedule(second, points)
    for _ in range(4):
        schedule.step()
    again.load_state_dict(pickle.loads(pickle.dumps(schedule.state_dict())))
    assert second.lam == first.lam == pytest.approx(0.4)
    schedule.step()
    again.step()
    assert second.lam == first.lam == pytest.approx(0.5)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("rule", ["sgd", "yogi"])
def test_a_schedule_reaches_the_optimizer(rule, sparse):
    points = {10: 0.0, 60: LAM[rule], 80: 3 * LAM[rule], 120: 0.1 * LAM[rule]}

    def learn(way):
        table = table_of_objects(sparse=sparse)
        penalty = fb.NonNegativeL1(0.0)
        optimizer = MAKERS[rule](table.parameters(), {table.transform: penalty})
        if way == "schedule":
            schedule = fb.Schedule(penalty, points)
            train(table, optimizer, 150, after=lambda t: schedule.step())
        elif way == "hand":
            known = sorted(points)

            def lam(t):
                if t <= known[0] or t >= known[-1]:
                    return points[known[0] if t <= known[0] else known[-1]]
                low = max(k for k in known if k <= t)
                high = min(k for k in known if k > t)
                return points[low] + (points[high] - points[low]) * (t - low) / (high - low)

            penalty.lam = lam(0)
            train(table, optimizer, 150, after=lambda t: setattr(penalty, "lam", lam(t + 1)))
        else:
            train(table, optimizer, 150)
        return full(table)

    found, wanted, without = learn("schedule"), learn("hand"), learn("none")
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    assert found.count_nonzero() < 0.9 * without.count_nonzero()


@pytest.mark.parametrize(
    ("penalties", "points", "named"),
    [
        ([], {0: 1.0}, "give a penalty"),
        ([fb.L1(1.0), 0.5], {0: 1.0}, "give a penalty"),
        (5, {0: 1.0}, "give a penalty"),
        (fb.L1(1.0), {}, "at least one point"),
        (fb.L1(1.0), [(0, 1.0)], "at least one point"),
        (fb.L1(1.0), {0.5: 1.0}, "whole numbers"),
        (fb.L1(1.0), {-1: 1.0}, "whole numbers"),
        (fb.L1(1.0), {True: 1.0}, "whole numbers"),
        (fb.L1(1.0), {"a": 1.0, 0: 2.0}, "whole numbers"),
        (fb.L1(1.0), {0: -1.0}, "finite numbers"),
        (fb.L1(1.0), {0: math.nan}, "finite numbers"),
        (fb.L1(1.0), {0: math.inf}, "finite numbers"),
        (fb.L1(1.0), {0: True}, "finite numbers"),
        (fb.L1(1.0), {0: "1"}, "finite numbers"),
        (fb.L1(1.0), {0: None}, "finite numbers"),
    ],
)
def test_bad_schedules_are_refused(penalties, points, named):
    with pytest.raises(fb.ArgumentError, match=named):
        fb.Schedule(penalties, points)


# --- budgets -------------------------------------------------------------------------------------------------------------


class Planted:
    """Two tables learn rows that few non-negative weights of planted anchors make."""

    def __init__(self, sparse=False, seed=0, lam=1e-4, exempt=False):
        generator = seeded(seed)
        self.tables, self.targets, self.penalties = [], [], {}
        for rows, each in ((V, 2), (25, 3)):
            table = table_of_objects(seed + rows, rows=rows, sparse=sparse, dtype=torch.float32)
            anchors = torch.randn(K, D, generator=generator)
            weights = torch.zeros(rows, K)
            chosen = torch.rand(rows, K, generator=generator).topk(each).indices
            weights.scatter_(1, chosen, 0.5 + torch.rand(rows, each, generator=generator))
            self.tables.append(table)
            self.targets.append(weights @ anchors)
            spared = table.related(some_graph(rows, 0.1)) if exempt else None
            self.penalties[table.transform] = fb.NonNegativeL1(lam, exempt=spared)
        parameters = [p for table in self.tables for p in table.parameters()]
        self.optimizer = fb.Yogi(parameters, lr=0.03, betas=(0.2, 0.999), penalties=self.penalties)

    def step(self, t):
        generator = seeded(1000 + t)
        self.optimizer.zero_grad()
        for table, target in zip(self.tables, self.targets, strict=True):
            ids = torch.randint(len(target), (20,), generator=generator)
            (table(ids) - target[ids]).square().sum(1).mean().backward()
        self.optimizer.step()

    @torch.no_grad()
    def loss(self):
        pairs = zip(self.tables, self.targets, strict=True)
        return sum(float((table.weight - target).square().mean()) for table, target in pairs)

    @property
    def nonzeros(self):
        return sum(int((table.transform.detach() != 0).sum()) for table in self.tables)


@pytest.mark.parametrize(
    ("how", "sparse", "exempt"),
    [
        ("projection", False, False),
        ("projection", True, True),
        ("penalty", False, True),
        ("penalty", True, False),
    ],
)
def test_a_budget_is_met_over_two_tables(how, sparse, exempt):
    task = Planted(sparse, exempt=exempt)
    budget = fb.Budget(task.penalties, nonzeros=150, steps=300, how=how, every=10)
    counts = {}  # after so many steps
    for t in range(300):
        task.step(t)
        budget.step()
        if t % 5 == 4:
            counts[t + 1] = budget.count
            assert counts[t + 1] == task.nonzeros, (
                "rows that are behind must be counted as they are"
            )
    refit = [count for steps, count in counts.items() if steps >= 240]
    assert counts[30] > 180
    assert counts[240] == 153, (
        "where the support is frozen it has what the budget allows, and 2 % more"
    )
    assert max(refit) <= 153
    assert refit[-1] <= 150, "at the end it has no more than the budget"
    assert min(refit) >= 140, "a few may be at zero, where weights are not negative, for a while"
    supports = [table.transform != 0 for table in task.tables]
    assert all(0 < int(s.sum()) < 150 for s in supports), "the tables share the budget"
    if how == "projection":
        begin, end = 60, 240
        for steps in range(begin, end, 10):
            left = 1 - (steps - begin) / (end - begin)
            assert counts[steps] <= 153 + (counts[begin] - 153) * left**3 + 1e-6
        late = [counts[steps] for steps in range(begin, end + 1, 10)]
        assert late == sorted(late, reverse=True), "the entries become fewer"
        assert late[0] > late[6] > late[-1]
    else:
        lams = [penalty.lam for penalty in task.penalties.values()]
        assert lams == [0.0, 0.0]


def test_the_largest_entries_stay():
    generator = seeded(4)
    weights = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((7, 5), (30,))]
    with torch.no_grad():
        weights[1][:9] = 0
    penalties = {w: fb.L1(0.0) for w in weights}
    budget = fb.Budget(penalties, nonzeros=11, steps=10, warmup=0.0, until=0.1)
    before = [w.detach().clone() for w in weights]
    flat = sorted(
        (
            (abs(x), place, at)
            for place, w in enumerate(before)
            for at, x in enumerate(w.flatten().tolist())
        )
    )
    wanted = [torch.zeros_like(w) for w in before]
    for _, place, at in flat[-11:]:
        wanted[place].view(-1)[at] = before[place].view(-1)[at]
    budget.step()
    assert all(torch.equal(w.detach(), x) for w, x in zip(weights, wanted, strict=True))
    assert budget.count == 11


def test_a_budget_that_is_met_already_changes_nothing():
    weights = nn.Parameter(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
    penalty = fb.NonNegativeL1(0.5)
    budget = fb.Budget({weights: penalty}, nonzeros=3, steps=2, until=1.0, warmup=0.0, every=1)
    budget.step()
    assert weights.tolist() == [[1.0, 0.0], [0.0, 2.0]]
    budget.step()
    assert weights.tolist() == [[1.0, 0.0], [0.0, 2.0]]
    assert penalty.prox(torch.full((2, 2), 3.0), 1.0).tolist() == [[3.0, 0.0], [0.0, 3.0]]


@pytest.mark.parametrize(
    ("how", "sparse", "stop"),
    [
        ("projection", True, 15),  # before, while and after entries become fewer
        ("projection", True, 65),
        ("projection", False, 130),
        ("penalty", True, 65),
    ],
)
def test_a_budget_resumes_to_the_same_bytes(how, sparse, stop, tmp_path):
    settings = {"nonzeros": 120, "steps": 140, "how": how, "every": 10}
    task = Planted(sparse)
    budget = fb.Budget(task.penalties, **settings)
    for t in range(140):
        if t == stop:
            tables = [table.state_dict() for table in task.tables]
            torch.save(
                (tables, task.optimizer.state_dict(), budget.state_dict()), tmp_path / "state.pt"
            )
        task.step(t)
        budget.step()
    tables, optimizer, held = torch.load(tmp_path / "state.pt", weights_only=True)
    again = Planted(sparse, seed=1)
    again.targets = task.targets
    after = fb.Budget(again.penalties, **settings)
    for table, state in zip(again.tables, tables, strict=True):
        table.load_state_dict(state)
    again.optimizer.load_state_dict(optimizer)
    after.load_state_dict(held)
    for t in range(stop, 140):
        again.step(t)
        after.step()
    for one, other in zip(task.tables, again.tables, strict=True):
        assert (
            one.transform.detach().numpy().tobytes() == other.transform.detach().numpy().tobytes()
        )
        assert one.atoms.detach().numpy().tobytes() == other.atoms.detach().numpy().tobytes()
    assert after.count == budget.count


def test_a_budget_over_slots():
    table = table_of_objects(anchors=8, slots=4, dtype=torch.float32)
    penalties = {table.transform: fb.NonNegativeL1(1e-3, exempt=table.related(some_graph()))}
    optimizer = fb.Yogi(table.parameters(), lr=0.01, betas=(0.2, 0.999), penalties=penalties)
    budget = fb.Budget(penalties, nonzeros=70, steps=120, every=5)
    train(table, optimizer, 120, after=lambda t: budget.step())
    assert 63 <= budget.count <= 70
    assert budget.count == int(full(table).count_nonzero())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"nonzeros": 0}, "nonzeros=0"),
        ({"nonzeros": -5}, "nonzeros=-5"),
        ({"nonzeros": True}, "nonzeros=True"),
        ({"nonzeros": 2.0}, "nonzeros=2.0"),
        ({"nonzeros": V * K + 1}, "only 240 entries"),
        ({"steps": 10.0}, "steps=10.0"),
        ({"steps": 0}, "steps=0"),
        ({"every": 0}, "every=0"),
        ({"every": 1.5}, "every=1.5"),
        ({"how": "magic"}, "use one of projection, penalty"),
        ({"warmup": 0.8}, "warmup=0.8"),
        ({"warmup": 0.9}, "warmup=0.9"),
        ({"warmup": -0.1}, "warmup=-0.1"),
        ({"warmup": False}, "warmup=False"),
        ({"until": 1.1}, "until=1.1"),
        ({"until": math.nan}, "until=nan"),
        ({"until": "1"}, "until='1'"),
        ({"penalties": {}}, "at least one"),
        ({"penalties": []}, "at least one"),
        ({"penalties": {nn.Parameter(torch.ones(9)): 0.5}}, "at least one"),
    ],
)
def test_bad_budgets_are_refused(change, named):
    penalties = {table_of_objects().transform: fb.NonNegativeL1(1e-3)}
    given = {"penalties": penalties, "nonzeros": 10, "steps": 100, **change}
    with pytest.raises(fb.ArgumentError, match=named):
        fb.Budget(given.pop("penalties"), **given)


def test_one_penalty_for_two_parameters_has_no_budget():
    penalty = fb.NonNegativeL1(1e-3)
    penalties = {nn.Parameter(torch.ones(4)): penalty, nn.Parameter(torch.ones(4)): penalty}
    with pytest.raises(fb.ArgumentError, match="several parameters"):
        fb.Budget(penalties, nonzeros=2, steps=10)


def test_a_refit_lowers_the_training_loss():
    def learn(refit):
        task = Planted(lam=2e-3)
        for t in range(300):
            if refit and t == 180:
                for parameter, penalty in task.penalties.items():
                    penalty.freeze(parameter)
                task.most = task.nonzeros
            task.step(t)
        return task

    plain, refitted = learn(refit=False), learn(refit=True)
    assert refitted.nonzeros <= refitted.most < (V + 25) * K
    assert refitted.loss() < 0.5 * plain.loss()


# --- loss terms ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [None, 2, K])
@pytest.mark.parametrize("sparse", [False, True])
def test_negative_pairs_are_what_rows_have_in_common(slots, sparse):
    table = table_of_objects(slots=slots, sparse=sparse, nonnegative=False)
    pairs = some_graph().non_edges(50, 0)
    rows = full(table).requires_grad_()
    wanted = sum(abs(rows[u, k]) * abs(rows[v, k]) for u, v in pairs.tolist() for k in range(K))
    wanted.backward()
    found = fb.negative_pairs(table, pairs)
    torch.testing.assert_close(found, wanted)
    assert bool(found > 0)
    found.backward()
    gradient = (
        table.transform.grad.to_dense() if table.transform.grad.is_sparse else table.transform.grad
    )
    dense = rows.grad if slots is None else rows.grad.gather(1, table.support.long())
    there = table.transform.detach() != 0  # elsewhere |x| has no derivative
    torch.testing.assert_close(gradient[there], dense[there])
    torch.testing.assert_close(fb.negative_pairs(table, pairs.tolist()), wanted)
    torch.testing.assert_close(fb.negative_pairs(table, torch.from_numpy(pairs).int()), wanted)
    assert fb.negative_pairs(table, pairs[:0]).item() == 0.0


def test_negative_pairs_push_rows_apart():
    def learn(weight):
        table, graph = table_of_objects(), some_graph()
        optimizer = fb.SGD(
            table.parameters(), lr=0.02, penalties={table.transform: fb.NonNegativeL1(0.0)}
        )
        pairs = graph.non_edges(200, 1)
        for ids, target in batches(150):
            optimizer.zero_grad()
            loss = (table(ids) - target).square().sum()
            (loss + weight * fb.negative_pairs(table, pairs)).backward()
            optimizer.step()
        return fb.negative_pairs(table, pairs).item()

    assert learn(0.1) < 0.2 * learn(0.0)


def test_orthogonality_is_the_sum_of_scores_between_anchors():
    table = table_of_objects()
    atoms = table.atoms.detach().tolist()
    wanted = sum(
        abs(sum(a * b for a, b in zip(atoms[i], atoms[j], strict=True)))
        for i in range(K)
        for j in range(K)
        if i != j
    )
    found = fb.orthogonality(table)
    assert found.item() == pytest.approx(wanted)
    found.backward()
    got, step = table.atoms.grad.clone(), 1e-6
    for at in ((0, 0), (3, 1), (5, 3)):
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                table.atoms[at] += sign * step
                ends.append(float(fb.orthogonality(table)))
                table.atoms[at] -= sign * step
        assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(float(got[at]), rel=1e-5)
    with torch.no_grad():
        table.atoms.zero_()
        table.atoms[:D] = 3 * torch.eye(D)
    assert fb.orthogonality(table).item() == 0.0


def test_loss_terms_refuse_what_they_cannot_take():
    table = table_of_objects()
    for bad in (fb.DenseTable(V, D), fb.LowRankTable(V, D, rank=2), nn.Embedding(V, D), None):
        with pytest.raises(fb.ArgumentError, match="table of anchors"):
            fb.negative_pairs(bad, [[0, 1]])
        with pytest.raises(fb.ArgumentError, match="table of anchors"):
            fb.orthogonality(bad)
    for pairs in ([0, 1], [[0, 1, 2]], [[[0, 1]]], [[0, 1], [2]], "ab", None, []):
        with pytest.raises(fb.ArgumentError, match="two ids"):
            fb.negative_pairs(table, pairs)
    for pairs, named in (
        ([[0, V]], "id 40"),
        ([[-1, 0]], "id -1"),
        ([[0.0, 1.0]], "float32"),
        ([[True, False]], "bool"),
    ):
        with pytest.raises(fb.IdError, match=named):
            fb.negative_pairs(table, pairs)
