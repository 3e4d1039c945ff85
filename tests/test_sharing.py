"""Ids replaced at random: the law against brute force, what reproduces it, and what it stands in front of."""

import copy
import math
import pickle
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from scipy.sparse import csr_array
from torch import nn
from torch.utils.data import DataLoader, Dataset

import featherbed as fb
from featherbed.sharing.law import Law, replaced
from featherbed.tables.spec import METHODS, method_name

V, TIMES = 11, 4000
UNLIKELY = 1e-5  # seeds are fixed: a test that holds once holds always
PAIRS = [(i, j) for i in range(V) for j in range(i)]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def graph_of(kind):
    if kind == "none":
        return None
    if kind == "directed":
        arcs = [(i, (i * k + 3) % V) for i in range(V) for k in range(i % 5)]
        return fb.Graph.from_edges(V, arcs, symmetric=False)
    least = {"degrees 0 to V-2": V, "degrees 1 to V-1": V - 1, "complete": 0, "empty": 3 * V}[kind]
    return fb.Graph.from_edges(V, [(i, j) for i, j in PAIRS if i + j >= least])


def reference(p, kind="none", rho=1.0, exclude=(), include_self=False, mixture=False):
    """The law as a V x V matrix, read off its definition entry by entry."""
    graph = graph_of(kind)
    near = np.zeros((V, V), bool) if graph is None else graph.matrix.toarray().astype(bool)
    free = [k for k in range(V) if k not in exclude]
    law = np.eye(V)
    for j in free:
        listed = [k for k in free if near[j, k]]
        weights = np.zeros(V)
        for k in free:
            if mixture:
                weights[k] = 1 / rho / len(free) + (1 - 1 / rho) * (k in [*listed, j]) / (
                    len(listed) + 1
                )
            elif k != j or include_self:
                weights[k] = (rho if near[j, k] else 1) / (1 + rho)
        law[j] = (1 - p) * law[j] + p * weights / weights.sum()
    return law


def check_counts(counts, law):
    """Compare counts [V, V] of old and new ids with the law: a chi-square test for each old id, and nothing impossible.

    Cells that are expected less than five times count with the likeliest: chi-square is no law for them.
    """
    assert not counts[law == 0].any()
    values = []
    for found, share in zip(counts, law, strict=True):
        expected = share * found.sum()
        rare = expected < 5
        cells = np.where(rare, expected.argmax(), np.arange(V))
        found, expected = (np.bincount(cells, weights, V)[~rare] for weights in (found, expected))
        if len(found) > 1:
            values.append(stats.chisquare(found, expected).pvalue)
    if values:
        assert min(values) > UNLIKELY, values
        assert stats.kstest(values, "uniform").pvalue > UNLIKELY, values


def counted(old, new):
    return np.bincount(old.reshape(-1) * V + new.reshape(-1), minlength=V * V).reshape(V, V)


GRAPHS = ["degrees 0 to V-2", "degrees 1 to V-1", "directed"]
LAWS = [
    {},
    {"exclude": [0]},
    {"exclude": [2, 3, 10]},
    {"include_self": True},
    {"include_self": True, "exclude": [4]},
    {"exclude": list(range(2, V))},
    *({"kind": kind, "rho": rho} for kind in GRAPHS for rho in (0.2, 1, 10.0, 500)),
    *({"kind": kind, "rho": 7.0, "exclude": [1, 9, 10]} for kind in GRAPHS),
    *({"kind": kind, "rho": 7.0, "include_self": True, "exclude": [9]} for kind in GRAPHS),
    *({"kind": kind, "rho": 3.0} for kind in ("complete", "empty")),
    *({"kind": kind, "rho": 1e308} for kind in ("complete", "degrees 0 to V-2")),
    {"kind": "directed", "rho": 1e-300},
    *({"kind": kind, "rho": 4.0, "mixture": True} for kind in [*GRAPHS, "empty"]),
    *({"kind": kind, "rho": 2, "mixture": True, "exclude": [0, 9]} for kind in GRAPHS),
    {"kind": "directed", "rho": 1.0, "mixture": True},
]


@pytest.mark.parametrize("p", [0.3, 1.0])
@pytest.mark.parametrize("settings", LAWS, ids=str)
def test_the_law(settings, p):
    law = reference(p, **settings)
    given = {**settings, "graph": graph_of(settings.get("kind", "none"))}
    given.pop("kind", None)
    ids = torch.arange(V).repeat(TIMES)
    found = fb.share(ids, V, p, **given, generator=seeded(3))
    check_counts(counted(ids.numpy(), found.numpy()), law)
    sse = fb.SSE(nn.Embedding(V, 2), p, **given, generator=seeded(4))
    calls = torch.stack([sse.share(ids[: V * 40]) for _ in range(TIMES // 80)])
    check_counts(counted(ids[: V * 40].repeat(TIMES // 80).numpy(), calls.numpy()), law)


@pytest.mark.parametrize("include_self", [False, True])
def test_every_number_stands_for_one_id(include_self):
    rng = np.random.default_rng(0)
    for _ in range(40):
        rows = int(rng.integers(2, 14))
        pairs = rng.integers(rows, size=(int(rng.integers(rows * rows)), 2))
        graph = fb.Graph.from_edges(rows, pairs, symmetric=bool(rng.integers(2)))
        exclude = rng.choice(rows, size=int(rng.integers(rows - 1)), replace=False).tolist()
        law = Law(rows, graph, exclude=exclude, include_self=include_self)
        for j in set(range(rows)) - set(exclude):
            near = {*graph.neighbors(j).tolist(), *exclude}
            far = [k for k in range(rows) if k not in near and (include_self or k != j)]
            ids = np.full(len(far), j)
            found = law._others(ids, np.full(len(far), 1 - 2**-53), np.arange(len(far)))
            assert sorted(found.tolist()) == far
            near = [k for k in graph.neighbors(j).tolist() if k not in exclude]
            found = law._others(np.full(len(near), j), np.zeros(len(near)), np.arange(len(near)))
            assert sorted(found.tolist()) == near


def test_the_closed_form():
    p, rho = 0.4, 6.0
    law = reference(p, "degrees 0 to V-2", rho)
    for j in range(V):
        q = (
            p / (rho * j + V - 1 - j) if j <= V // 2 else p / (rho * (j - 1) + V - j)
        )  # j + j >= V would be a loop
        expected = [1 - p if k == j else rho * q if j + k >= V else q for k in range(V)]
        assert law[j] == pytest.approx(expected)
    assert reference(p)[3] == pytest.approx([1 - p if k == 3 else p / (V - 1) for k in range(V)])


@pytest.mark.parametrize(
    "settings", [{}, {"kind": "degrees 0 to V-2", "rho": 5.0, "exclude": [1, 8]}], ids=str
)
def test_one_draw_for_each_id_of_a_batch(settings):
    given = {**settings, "graph": graph_of(settings.get("kind", "none"))}
    given.pop("kind", None)
    sse = fb.SSE(nn.Embedding(V, 2), 0.5, per="id", **given, generator=seeded())
    ids = torch.arange(V).repeat(3)
    calls = torch.stack([sse.share(ids) for _ in range(TIMES // 2)])
    assert torch.equal(calls[:, :V], calls[:, V : 2 * V])
    assert torch.equal(calls[:, :V], calls[:, 2 * V :])
    once = calls[:, :V]
    check_counts(
        counted(ids[:V].repeat(TIMES // 2).numpy(), once.numpy()), reference(0.5, **settings)
    )
    kept = (once != ids[:V]).numpy()
    assert stats.chi2_contingency(np.histogram2d(kept[:, 2], kept[:, 3], 2)[0]).pvalue > UNLIKELY, (
        "ids are drawn alone"
    )


def test_padding_neither_changes_nor_appears():
    table = nn.Embedding(V, 3, padding_idx=0)
    ids = torch.arange(V).repeat(2000)
    for graph in (None, graph_of("complete")):
        shared = fb.SSE(table, 1.0, graph=graph, rho=9.0, exclude={5}, generator=seeded()).share(
            ids
        )
        for special in (0, 5):
            assert torch.equal(shared == special, ids == special)
        assert ((shared != ids) == ((ids != 0) & (ids != 5))).all(), (
            "p = 1 replaces every id that may change"
        )


def test_a_table_of_one_free_id_has_no_other():
    ids = torch.tensor([0, 1, 1])
    assert torch.equal(fb.share(ids, 2, 1.0, exclude=[0]), ids)
    assert torch.equal(fb.share(ids[:1], 1, 1.0), ids[:1])
    assert torch.equal(fb.share(ids, 2, 1.0), torch.tensor([1, 0, 0]))


# --- how many, and which positions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "p"), [(40, 0.3), (40, 0.97), (2000, 0.002), (200, 0.05)])
def test_the_number_replaced_is_binomial(length, p):
    numbers = np.array([len(replaced(length, p, key=key * 7919)) for key in range(5000)])
    edges = np.unique(stats.binom.ppf(np.linspace(0.02, 0.98, 12), length, p))
    edges = edges[edges < length]
    expected = np.diff([0, *stats.binom.cdf(edges, length, p), 1]) * len(numbers)
    found = np.histogram(numbers, [-1, *(edges + 0.5), length + 1])[0]
    assert stats.chisquare(found, expected).pvalue > UNLIKELY


def test_positions_and_calls_are_independent():
    sse = fb.SSE(nn.Embedding(V, 1), 0.4, generator=seeded(2))
    ids = torch.full((400,), 6)
    calls = torch.stack([sse.share(ids) for _ in range(300)]).numpy()
    hit = (calls != 6).astype(int)
    for name, first, second in [
        ("neighboring positions", calls[:, :-1], calls[:, 1:]),
        ("positions two apart", calls[:, :-2], calls[:, 2:]),
        ("calls in a row", calls[:-1], calls[1:]),
        ("the next position of the next call", calls[:-1, :-1], calls[1:, 1:]),
    ]:
        assert stats.chi2_contingency(counted(first, second)).pvalue > UNLIKELY, name
    for axis in (0, 1):  # every position and every call alike
        sums = hit.sum(axis)
        expected = 0.4 * hit.shape[axis]
        value = ((sums - expected) ** 2 / (expected * 0.6)).sum()
        assert UNLIKELY < stats.chi2.sf(value, len(sums)) < 1 - UNLIKELY


def test_tables_draw_alone_from_one_generator():
    generator = seeded()
    users, items = (fb.SSE(nn.Embedding(V, 1), 0.5, generator=generator) for _ in range(2))
    ids = torch.full((20_000,), 4)
    both = counted(users.share(ids).numpy(), items.share(ids).numpy())
    assert stats.chi2_contingency(both).pvalue > UNLIKELY


@pytest.mark.parametrize("p", [5e-324, 1e-12, 1 - 1e-16, math.nextafter(1, 0)])
def test_rates_near_the_ends(p):
    changed = fb.share(torch.zeros(5000, dtype=torch.int64), V, p, generator=seeded()) != 0
    assert changed.all() if p > 0.5 else not changed.any()


# --- identity, seeds, state ----------------------------------------------------------------------------------------------


def test_no_sharing_is_the_identity():
    table = nn.Embedding(V, 3)
    ids = torch.randint(V, (50, 4), generator=seeded())
    sse = fb.SSE(table, 0.0)
    assert torch.equal(sse.share(ids), ids)
    assert torch.equal(sse(ids), table(ids))
    sse.p = 1.0
    assert not torch.equal(sse(ids), table(ids))
    sse.eval()
    assert sse.share(ids) is ids
    assert torch.equal(sse(ids), table(ids))
    assert int(sse.calls) == 3, "evaluation must not move the draws of training"
    assert torch.equal(fb.share(ids, V, 0.0), ids)


def test_ids_are_left_as_they_were():
    for ids in (torch.arange(V), torch.arange(V, dtype=torch.int32)):
        before = ids.clone()
        fb.share(ids, V, 1.0)
        fb.SSE(nn.Embedding(V, 1), 1.0)(ids)
        assert torch.equal(ids, before)


def test_a_seed_reproduces():
    ids = torch.randint(V, (300,), generator=seeded())

    def draws(seed):
        sse = fb.SSE(nn.Embedding(V, 1), 0.5, generator=seeded(seed))
        loop = seeded(seed)
        return torch.stack(
            [sse.share(ids) for _ in range(3)]
            + [fb.share(ids, V, 0.5, generator=loop) for _ in range(3)]
        )

    assert torch.equal(draws(1), draws(1))
    assert not torch.equal(draws(1), draws(2))
    rows = draws(1).tolist()
    assert len({tuple(row) for row in rows}) == 6, "every call draws anew"


def test_draws_belong_to_positions_not_to_memory():
    grid = torch.randint(V, (30, 20), generator=seeded())
    for ids in (grid, grid.T, grid[::2, ::3], grid.int().T, grid[0, 0], grid[:0]):
        shared = fb.share(ids, V, 0.5, generator=seeded(1))
        assert shared.shape == ids.shape
        assert shared.dtype == torch.int64
        assert torch.equal(shared, fb.share(ids.contiguous().clone(), V, 0.5, generator=seeded(1)))


def test_state_goes_on_where_it_stood():
    ids = torch.randint(V, (200,), generator=seeded())
    sse = fb.SSE(nn.Embedding(V, 1), 0.3, graph=graph_of("directed"), rho=4.0, generator=seeded(1))
    for _ in range(3):
        sse.share(ids)
    sse.p = 0.37
    state = pickle.loads(pickle.dumps(sse.state_dict()))
    other = fb.SSE(
        nn.Embedding(V, 1), 0.9, graph=graph_of("directed"), rho=4.0, generator=seeded(2)
    )
    other.load_state_dict(state)
    copies = [
        other,
        copy.deepcopy(sse),
        pickle.loads(pickle.dumps(sse)),
        copy.deepcopy(copy.deepcopy(sse)),
    ]
    assert copies[1].law.lists[1] is sse.law.lists[1], "a copy of a model must not copy the graph"
    assert len({one.number for one in [sse, *copies]}) == 5
    expected = [sse.share(ids) for _ in range(3)]
    for one in copies:
        assert one.p == 0.37
        assert all(torch.equal(one.share(ids), wanted) for wanted in expected)


def test_half_precision_leaves_p_alone():
    for kind in (torch.float16, torch.bfloat16, torch.float64):
        sse = fb.SSE(nn.Embedding(V, 4), 1e-9).to(kind)
        assert sse.p == 1e-9
        assert sse(torch.tensor([1])).dtype == kind


class Drawing(Dataset):
    """What each worker's own draws were."""

    def __init__(self, way):
        self.sse = fb.SSE(nn.Embedding(V, 1), 0.5, generator=seeded())
        self.generator, self.way = seeded(), way

    def __len__(self):
        return 4

    def __getitem__(self, place):
        ids = torch.zeros(100, dtype=torch.int64)
        return (
            self.sse.share(ids)
            if self.way == "module"
            else fb.share(ids, V, 0.5, generator=self.generator)
        )


@pytest.mark.parametrize("way", ["module", "function"])
def test_workers_and_epochs_draw_differently(way):
    def epochs():
        loader = DataLoader(Drawing(way), batch_size=1, num_workers=2, generator=seeded(5))
        return [tuple(batch[0].tolist()) for _ in range(2) for batch in loader]

    drawn = epochs()
    assert len(set(drawn)) == 8, "two workers, two epochs of two items each"
    assert drawn == epochs(), "the loader's generator reproduces them"


def test_processes_draw_differently(monkeypatch):
    ids = torch.zeros(200, dtype=torch.int64)
    sse = fb.SSE(nn.Embedding(V, 1), 0.5, generator=seeded())
    found = []
    for rank in (0, 1):
        monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
        monkeypatch.setattr("torch.distributed.get_rank", lambda rank=rank: rank)
        found += [copy.deepcopy(sse).share(ids), fb.share(ids, V, 0.5, generator=seeded())]
    assert not torch.equal(found[0], found[2])
    assert not torch.equal(found[1], found[3])


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("kind", ["none", "degrees 0 to V-2"])
def test_compiled_draws_are_the_same(kind):
    eager = fb.SSE(
        nn.Embedding(V, 2, padding_idx=0), 0.5, graph=graph_of(kind), rho=3.0, generator=seeded()
    )
    other = copy.deepcopy(eager)
    ids = torch.randint(V, (6, 40), generator=seeded())
    torch._dynamo.reset()
    compiled = torch.compile(other, fullgraph=True)
    for p in (0.5, 0.1, 0.9):
        eager.p = other.p = p
        with torch._dynamo.config.patch(
            error_on_recompile=p != 0.5
        ):  # a schedule of p must not compile anew
            for _ in range(2):
                assert torch.equal(compiled(ids), eager(ids))
    compiled(ids).sum().backward()
    eager(ids).sum().backward()
    torch.testing.assert_close(other.table.weight.grad, eager.table.weight.grad)
    with pytest.raises(fb.IdError, match="id 11"):
        compiled(ids + 1)


def test_the_operator_is_one():
    sse = fb.SSE(nn.Embedding(V, 2), 0.5, generator=seeded())
    for ids in (torch.arange(V), torch.arange(V).int().reshape(1, V).T):
        given = (ids, sse.rate, sse.seed, sse.calls, sse.number)
        torch.library.opcheck(torch.ops.featherbed.share_ids.default, given)


# --- in front of what ----------------------------------------------------------------------------------------------------


def twin(sse):
    """The ids the next call will draw."""
    return copy.deepcopy(sse).share


def test_replacement_rows_learn_and_no_others():
    sse = fb.SSE(nn.Embedding(1000, 3), 0.5, generator=seeded())
    ids = torch.arange(200)
    shared = twin(sse)(ids)
    sse(ids).sum().backward()
    expected = torch.zeros(1000).index_add_(0, shared, torch.ones(200))
    assert torch.equal(sse.weight.grad, expected[:, None].expand(-1, 3))
    assert not expected[:200].bool().all()


@pytest.mark.parametrize("method", METHODS, ids=method_name)
def test_in_front_of_every_table(method, tmp_path):
    table = method(50, 8, padding_idx=0, **method.example)
    sse = fb.SSE(table, 0.5, generator=seeded())
    table.eval()  # nothing else may be random
    ids = torch.randint(50, (6, 5), generator=seeded())
    shared = twin(sse)(ids)
    assert not torch.equal(shared, ids)
    assert torch.equal(shared == 0, ids == 0)
    torch.testing.assert_close(sse(ids), table(shared))
    shared = twin(sse)(ids)
    torch.testing.assert_close(sse.bag(ids), table.bag(shared))
    shared = twin(sse)(ids)
    torch.testing.assert_close(fb.Bag(sse, mode="mean")(ids), table.bag(shared, mode="mean"))
    hidden = torch.randn(3, 8, generator=seeded())
    torch.testing.assert_close(sse.logits(hidden), table.logits(hidden))
    assert (sse.num_embeddings, sse.embedding_dim, sse.padding_idx) == (50, 8, 0)
    if method.packable:
        fb.save(sse, tmp_path / "table.safetensors")
        assert len(fb.load(tmp_path / "table.safetensors")) == 50


@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
def test_in_front_of_bags(kind):
    table = nn.EmbeddingBag(V, 3, mode="sum", padding_idx=2)
    sse = fb.SSE(table, 0.6, generator=seeded())
    ids, offsets = (
        torch.randint(V, (30,), generator=seeded()).to(kind),
        torch.tensor([0, 4, 4, 17], dtype=kind),
    )
    weights = torch.randn(30, generator=seeded())
    shared = twin(sse)(ids)
    assert not torch.equal(shared, ids.long())
    assert torch.equal(
        sse(ids, offsets, per_sample_weights=weights),
        table(shared, offsets.long(), per_sample_weights=weights),
    )
    shared = twin(sse)(ids)
    assert torch.equal(sse(ids.view(5, 6)), table(shared.view(5, 6)))


def test_in_models():
    model = nn.ModuleDict(
        {"users": fb.SSE(nn.Embedding(V, 8), 0.5), "films": fb.SSE(nn.Embedding(V, 8), 0.25)}
    )
    fb.replace_embeddings(model, "anchor:anchors=3")
    assert isinstance(model["films"], fb.SSE)
    assert isinstance(model["films"].table, fb.AnchorTable)
    assert model["films"](torch.arange(V)).shape == (V, 8)
    assert sorted(name for name, _ in model.named_parameters()) == sorted(
        f"{side}.table.{name}"
        for side in ("users", "films")
        for name, _ in model["films"].table.named_parameters()
    )
    assert "p=0.25" in repr(model)
    assert "rho=3, neighbors=2" in repr(
        fb.SSE(nn.Embedding(4, 1), 0.1, graph=fb.Graph.from_edges(4, [[0, 1]]), rho=3.0)
    )


def test_what_neither_has_is_missing():
    sse = fb.SSE(nn.Embedding(V, 1), 0.5)
    assert not hasattr(sse, "nothing")
    with pytest.raises(AttributeError, match="nothing"):
        _ = sse.nothing


def test_lists_follow_what_is_excluded():
    graph, ids = graph_of("complete"), torch.zeros(3000, dtype=torch.int64)
    for exclude in ([3], [4], [3, 4], [], [3]):
        found = fb.share(ids, V, 1.0, graph=graph, rho=50.0, exclude=exclude, generator=seeded())
        assert set(found.tolist()) == set(range(1, V)) - set(exclude)


def test_a_stored_graph_is_as_good(tmp_path):
    graph = graph_of("degrees 0 to V-2")
    graph.save(tmp_path / "graph.safetensors")
    stored = fb.Graph.load(tmp_path / "graph.safetensors")
    ids = torch.arange(V).repeat(100)
    for exclude in ([], [4]):
        given = {"rho": 5.0, "exclude": exclude}
        found = [
            fb.share(ids, V, 0.7, graph=g, **given, generator=seeded()) for g in (graph, stored)
        ]
        assert torch.equal(*found)


# --- label smoothing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("include_self", [False, True])
def test_shared_targets_are_label_smoothing(include_self):
    p, logits = 0.2, torch.randn(V, V, dtype=torch.float64, generator=seeded())
    smoothing = p if include_self else p * V / (V - 1)
    law = torch.from_numpy(reference(p, include_self=include_self))
    targets = torch.arange(V)
    expected = F.cross_entropy(logits, targets, label_smoothing=smoothing, reduction="none")
    exact = -(law * logits.log_softmax(1)).sum(1)
    torch.testing.assert_close(exact, expected)

    many = targets.repeat(20_000)
    shared = fb.share(many, V, p, include_self=include_self, generator=seeded(1))
    losses = -logits.log_softmax(1)[many, shared].view(-1, V)
    error = losses.std(0) / len(losses) ** 0.5
    assert ((losses.mean(0) - expected).abs() < 4.5 * error).all()
    plain = F.cross_entropy(logits, targets, reduction="none")
    assert ((losses.mean(0) - plain).abs() > 10 * error).any(), "the test could not tell"


# --- p on a schedule -----------------------------------------------------------------------------------------------------


def test_p_on_a_schedule():
    first, second = (fb.SSE(nn.Embedding(V, 1), 0.9) for _ in range(2))
    penalty = fb.L1(3.0)
    schedule = fb.Schedule([first, second, penalty], {2: 0.0, 4: 0.1})
    seen = []
    for _ in range(6):
        assert first.p == second.p == penalty.lam
        seen.append(first.p)
        schedule.step()
    assert seen == pytest.approx([0, 0, 0, 0.05, 0.1, 0.1])
    again = fb.Schedule(second, {2: 0.0, 4: 0.1})
    assert second.p == 0
    again.load_state_dict(schedule.state_dict())
    assert second.p == 0.1
    with pytest.raises(fb.ArgumentError, match="from 0 to 1"):
        fb.Schedule(first, {0: 0.5, 9: 1.5})
    assert first.p == 0.1


# --- bad input -----------------------------------------------------------------------------------------------------------


class Foreign:
    """A relation that nobody checked."""

    objects = 3

    def __repr__(self):  # a test's name must not hold an address
        return "Foreign"

    def __init__(self, neighbor):
        self.matrix = csr_array(
            (np.ones(1, bool), np.array([1]), np.array([0, 1, 1, 1])), shape=(3, 3)
        )
        self.matrix.indices[0] = neighbor


@pytest.mark.parametrize(
    "p", [-0.1, 1.0001, 2, True, math.nan, math.inf, "0.1", None, torch.tensor(0.1)]
)
def test_bad_p(p):
    sse = fb.SSE(nn.Embedding(3, 1), 0.25)
    for call in (
        lambda: fb.SSE(nn.Embedding(3, 1), p),
        lambda: fb.share(torch.tensor([0]), 3, p),
        lambda: setattr(sse, "p", p),
    ):
        with pytest.raises(fb.ArgumentError, match=r"p=.*from 0 to 1"):
            call()
    assert sse.p == 0.25


@pytest.mark.parametrize(
    ("given", "named"),
    [
        *(({"rho": rho}, "rho=.*above 0") for rho in (0, -1, True, math.nan, math.inf, "2", None)),
        ({"graph": fb.Graph.from_edges(4, [[0, 1]])}, "over 4 objects, there are 3 ids"),
        ({"graph": fb.Graph.from_edges(2, [[0, 1]])}, "over 2 objects, there are 3 ids"),
        ({"graph": [[0, 1]]}, "graph is list: give a graph"),
        ({"graph": Foreign(3)}, "neighbor 3: ids go from 0 to 2"),
        ({"graph": Foreign(-1)}, "neighbor -1: ids go from 0 to 2"),
        ({"exclude": [3]}, r"exclude=\[3\]: ids go from 0 to 2"),
        ({"exclude": [-1]}, r"exclude=\[-1\]: ids go from 0 to 2"),
        ({"exclude": [True]}, r"exclude=\[True\]"),
        ({"exclude": [0.5]}, r"exclude=\[0.5\]: give a list of ids"),
        ({"exclude": 1}, "exclude=1: give a list of ids"),
        ({"exclude": "12"}, "exclude='12': give a list of ids"),
        ({"per": "batch"}, "per='batch': use one of occurrence, id"),
        ({"mixture": True}, "give a graph and rho of at least 1"),
        (
            {"mixture": True, "rho": 0.5, "graph": fb.Graph.from_edges(3, [[0, 1]])},
            "give a graph and rho of at least 1",
        ),
        ({"include_self": "no"}, "include_self='no': True or False"),
        ({"mixture": 1}, "mixture=1: True or False"),
    ],
    ids=str,
)
def test_bad_settings(given, named):
    for call in (
        lambda: fb.SSE(nn.Embedding(3, 1), 0.5, **given),
        lambda: fb.SSE(nn.Embedding(3, 1, padding_idx=0), 0.5, **given),
        lambda: fb.share(torch.tensor([0]), 3, 0.5, **given),
    ):
        with pytest.raises(fb.ArgumentError, match=named):
            call()


@pytest.mark.parametrize("table", [nn.Linear(3, 1), nn.Sequential(nn.Embedding(3, 1)), 5, None])
def test_modules_without_ids(table):
    with pytest.raises(
        fb.ArgumentError, match="has no num_embeddings: give a module that takes ids"
    ):
        fb.SSE(table, 0.1)


@pytest.mark.parametrize("rows", [0, -1, True, 2.0, None])
def test_bad_numbers_of_ids(rows):
    with pytest.raises(fb.ArgumentError, match=r"num_embeddings=.*at least 1"):
        fb.share(torch.tensor([0]), rows, 0.1)


@pytest.mark.parametrize(("ids", "named"), [([3], "id 3"), ([0, -1], "id -1"), ([0.5], "dtype")])
def test_bad_ids(ids, named):
    with pytest.raises(fb.IdError, match=named):
        fb.share(torch.tensor(ids), 3, 0.1)
    with pytest.raises(fb.IdError, match=named):
        fb.SSE(nn.Embedding(3, 1), 0.0)(torch.tensor(ids))


def test_numbers_of_numpy_are_numbers():
    shared = fb.share(
        torch.zeros(9, dtype=torch.int64),
        np.int64(V),
        np.float32(1),
        rho=np.int32(2),
        exclude=np.array([3]),
    )
    assert (shared != 0).all()
