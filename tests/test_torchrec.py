"""Tables divided among processes train, resume and pack as in one process.

One group of 2 and one of 4 processes run all cases, since starting them takes longer than the
cases; tests look at what the cases return.
"""

import importlib.util
import logging
import os
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import featherbed as fb

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchrec") is None or not dist.is_available(),
    reason="TorchRec is not installed: pip install --no-deps torchrec==1.8.0",
)
ROWS, DIM, BATCH, STEPS, MORE = 101, 8, 32, 50, 10
TABLES = {
    "anchor": lambda **how: fb.AnchorTable(ROWS, DIM, anchors=5, sparse=True, **how),
    "slots": lambda **how: fb.AnchorTable(ROWS, DIM, anchors=20, slots=3, scan_every=4, **how),
    "lowrank": lambda **how: fb.LowRankTable(ROWS, DIM, rank=3, sparse=True, **how),
    "kd": lambda **how: fb.KDTable(ROWS, DIM, choices=4, parts=3, sparse=True, **how),
    "dense": lambda **how: fb.DenseTable(ROWS, DIM, sparse=True, padding_idx=70, **how),
    "dpq": lambda **how: fb.ProductTable(ROWS, DIM, choices=4, parts=4, sparse=True, **how),
    "int4": lambda **how: fb.QuantizedTable(ROWS, DIM, bits=4, sparse=True, **how),
    "growing": lambda **how: fb.GrowingAnchorTable(ROWS, DIM, anchors=4, sparse=True, **how),
}


class Scorer(nn.Module):
    def __init__(self, kind, scan_every=None):
        super().__init__()
        self.items = TABLES[kind](generator=torch.Generator().manual_seed(0))
        if scan_every:
            self.items._slots.every = scan_every
        torch.manual_seed(3)
        self.top = nn.Linear(DIM, 1)

    def forward(self, ids):
        return self.top(torch.tanh(self.items(ids)))[:, 0]


def batch_of(step):
    """Head-heavy ids with duplicates; every seventh step touches the first quarter of rows only."""
    generator = torch.Generator().manual_seed(100 + step)
    ids = (torch.rand(BATCH, generator=generator) ** 3 * ROWS).long()
    return ids % 25 if step % 7 == 0 else ids, torch.randn(BATCH, generator=generator)


def optimizer_of(model, table):
    penalties = {p: fb.NonNegativeL1(3e-3) for p in table.penalized}
    return fb.Yogi(model.parameters(), lr=0.02, penalties=penalties)


def train(model, optimizer, steps, rank=0, world=1, after=None):
    size = BATCH // world
    for step in steps:
        ids, target = batch_of(step)
        mine = slice(rank * size, (rank + 1) * size)
        optimizer.zero_grad()
        (model(ids[mine]) - target[mine]).square().mean().backward()
        optimizer.step()
        if after is not None:
            after()


def learned(kind, steps=STEPS, **settings):
    """Return a model trained in one process, and its optimizer."""
    model = Scorer(kind, **settings)
    optimizer = optimizer_of(model, model.items)
    train(model, optimizer, range(steps))
    return model, optimizer


def local_state(model):
    """Return (first row or None, tensor) by the plain names of a model."""
    from featherbed.interop.torchrec.checkpoint import model_entries

    found = {}
    for name, value in model_entries(model).items():
        parts = value.local_shards() if hasattr(value, "local_shards") else None
        if parts is None:
            found[name.removeprefix("model.")] = None, value.clone()
        elif parts:
            start = parts[0].metadata.shard_offsets[0]
            found[name.removeprefix("model.")] = start, parts[0].tensor.clone()
    return found


def difference(found, expected):
    """Return the largest difference between what processes hold and a state of one process."""
    largest = 0.0
    for state in found:
        for name, (start, value) in state.items():
            whole = expected[name]
            own = whole if start is None else whole[start : start + len(value)]
            if value.numel():
                largest = max(largest, float((value.double() - own.double()).abs().max()))
    return largest


# what the processes run: a case takes the rank, the number of processes and a folder


def run_equal(rank, world, _, kind, how):
    model = fb.distributed.shard(Scorer(kind), **how)
    train(model, optimizer_of(model, model.module.items), range(STEPS), rank, world)
    return local_state(model)


def run_without_factor(rank, world, folder):
    from featherbed.interop.torchrec import kernels

    kept = kernels.gradient_share
    kernels.gradient_share = lambda _, world: 1 / world
    try:
        return run_equal(rank, world, folder, "anchor", {"sharding": "row_wise"})
    finally:
        kernels.gradient_share = kept


def run_without_settling(rank, world, _):
    model = fb.distributed.shard(Scorer("anchor"), sharding="row_wise")
    train(model, optimizer_of(model, model.module.items), range(STEPS), rank, world)
    place = model.module.items.place
    return {"items.transform": (place.start, place.table._parameters["transform"].data.clone())}


def bag_models():
    torch.manual_seed(5)
    plain = nn.EmbeddingBag(ROWS, DIM, mode="mean", padding_idx=3)
    slots = fb.Bag(TABLES["slots"](generator=torch.Generator().manual_seed(0)))
    anchors = fb.Bag(TABLES["anchor"](generator=torch.Generator().manual_seed(0)), mode="mean")
    return nn.ModuleList([plain, slots, anchors, nn.Linear(DIM, 1)])


def bags_of(step):
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 4, (BATCH,), generator=generator)
    ids = torch.randint(ROWS, (int(lengths.sum()),), generator=generator)
    return ids, lengths, torch.rand(len(ids), generator=generator)


def score_bags(models, ids, lengths, weights):
    mean, slots, anchors, top = models
    offsets = lengths.cumsum(0) - lengths
    bags = mean(ids, offsets) + slots(ids, offsets, weights) + anchors(ids, offsets)
    return top(bags).square().mean() if len(lengths) else top(bags).sum()


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.models = bag_models()

    def forward(self, *given):
        return score_bags(self.models, *given)


def train_bags(model, rank=0, world=1, steps=12):
    optimizer = fb.SGD(model.parameters(), lr=0.1, momentum=0.9)
    size = BATCH // world
    for step in range(steps):
        ids, lengths, weights = bags_of(step)
        first, last = (int(lengths[: r * size].sum()) for r in (rank, rank + 1))
        mine = lengths[rank * size : (rank + 1) * size]
        optimizer.zero_grad()
        model(ids[first:last], mine, weights[first:last]).backward()
        optimizer.step()


def run_bags(rank, world, _, how):
    model = fb.distributed.shard(Bags(), **how)
    train_bags(model, rank, world)
    return local_state(model)


def run_empty(rank, world, _):
    """A batch of no bag and of no id in one process is an answer for the others."""
    model = fb.distributed.shard(Bags(), sharding="row_wise")
    ids, lengths, weights = bags_of(0)
    given = (ids, lengths, weights) if rank else (ids[:0], lengths[:0], weights[:0])
    loss = model(*given)
    loss.backward()
    table = fb.distributed.shard(Scorer("anchor"), sharding="row_wise")
    rows = table.module.items(ids if rank else ids[:0])
    rows.sum().backward()
    strided = table.module.items(torch.arange(12)[::3])
    return {"loss": float(loss), "rows": tuple(rows.shape), "ids": len(ids), "strided": strided}


def error_of(action):
    try:
        action()
    except fb.FeatherbedError as error:
        return type(error).__name__, str(error)
    return None


def run_errors(rank, world, folder):
    found = {}
    model = fb.distributed.shard(Scorer("anchor"), sharding="row_wise")
    items = model.module.items
    optimizer = optimizer_of(model, items)
    before = local_state(model)
    model(torch.tensor([90, 91])).sum().backward()
    if rank == world - 1:  # the owner of these rows sees the NaN, the others do not
        items.transform.grad._values()[0, 0] = torch.nan
    found["nan"] = error_of(optimizer.step)
    after = local_state(model)
    found["changed"] = [n for n, (_, v) in after.items() if not torch.equal(v, before[n][1])]
    optimizer.zero_grad()
    wrong = torch.tensor([ROWS if rank == 0 else 1])
    found["id"] = error_of(lambda: model(wrong))
    few = nn.Sequential(fb.AnchorTable(world - 1, DIM, anchors=2))
    found["few"] = error_of(lambda: fb.distributed.shard(few))
    found["other"] = error_of(
        lambda: fb.distributed.load_checkpoint(
            fb.distributed.shard(Scorer("lowrank")), f"{folder}/anchor"
        )
    )
    found["none"] = error_of(lambda: fb.distributed.shard(nn.Sequential(nn.Linear(2, 2))))
    hashed = nn.Sequential(fb.HashedTable(ROWS, DIM, buckets=9), fb.DenseTable(ROWS, DIM))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        fb.distributed.shard(hashed)
    found["whole"] = [str(w.message) for w in heard if w.category is fb.FeatherbedWarning]
    return found


def run_save(rank, world, folder, kind):
    model = fb.distributed.shard(Scorer(kind), sharding="row_wise")
    optimizer = optimizer_of(model, model.module.items)
    train(model, optimizer, range(STEPS), rank, world)
    fb.distributed.save_checkpoint(model, f"{folder}/{kind}", optimizer, {"step": STEPS})


def run_resume(rank, world, folder, kind):
    model = fb.distributed.shard(Scorer(kind), sharding="row_wise")
    optimizer = optimizer_of(model, model.module.items)
    extra = fb.distributed.load_checkpoint(model, f"{folder}/{kind}-1", optimizer)
    train(model, optimizer, range(extra["step"], extra["step"] + MORE), rank, world)
    return local_state(model)


def run_pack(rank, world, folder, kind, sharding):
    model = fb.distributed.shard(Scorer(kind), sharding=sharding)
    train(model, optimizer_of(model, model.module.items), range(8), rank, world)
    fb.distributed.save_checkpoint(model, f"{folder}/pack-{kind}-{sharding}")
    for values, layout in (("float32", "auto"), ("int8", "fixed"), ("float16", "ragged")):
        packed = fb.distributed.pack(model.module.items, values, layout=layout)
        assert (packed is None) == (rank > 0)
        if packed is not None:
            fb.save(packed, f"{folder}/{kind}-{sharding}-{values}.safetensors")


def run_budget(rank, world, _, how):
    model = fb.distributed.shard(Scorer("anchor"), **how)
    optimizer = optimizer_of(model, model.module.items)
    penalties = fb_penalties(optimizer)
    budget = fb.Budget(penalties, 150, steps=STEPS, every=5, group=dist.group.WORLD)
    train(model, optimizer, range(STEPS), rank, world, budget.step)
    return {"count": budget.count, "state": local_state(model)}


def fb_penalties(optimizer):
    return dict(optimizer.penalties)


def refit(model, optimizer, items, rank=0, world=1):
    """Train with a penalty, then train on without it while zeros stay zero."""
    train(model, optimizer, range(STEPS), rank, world)
    for parameter, penalty in fb_penalties(optimizer).items():
        penalty.freeze(parameter)
    train(model, optimizer, range(STEPS, STEPS + MORE), rank, world)
    return torch.count_nonzero(items.transform)


def run_refit(rank, world, _, how):
    model = fb.distributed.shard(Scorer("anchor"), **how)
    items = model.module.items
    nonzeros = refit(model, optimizer_of(model, items), items, rank, world)
    return {"nonzeros": int(nonzeros), "state": local_state(model)}


def run_growth(rank, world, _):
    model = fb.distributed.shard(Scorer("growing"), sharding="row_wise")
    items = model.module.items
    optimizer = optimizer_of(model, items)
    return grow(model, items.shard, optimizer, rank, world) | {"state": local_state(model)}


def grow(model, table, optimizer, rank=0, world=1):
    growth = fb.Growth([table], optimizer, lambda1=1e-4, lambda2=1e-6, window=2)
    size = BATCH // world
    ids, target = batch_of(999)
    mine = slice(rank * size, (rank + 1) * size)

    @torch.no_grad()
    def evaluate():
        return float((model(ids[mine]) - target[mine]).square().mean())

    for epoch in range(8):
        train(model, optimizer, range(5 * epoch, 5 * epoch + 5), rank, world)
        growth.step(evaluate)
    return {"history": [(one.decision, one.anchors, one.nonzeros) for one in growth.history]}


def run_memory(rank, world, _):
    """A table on the meta device: no process ever holds more than its part."""
    with torch.device("meta"):
        model = nn.Sequential(fb.AnchorTable(20_001, DIM, anchors=32, sparse=True))
    model = fb.distributed.shard(model, sharding="row_wise")
    optimizer = fb.Yogi(model.parameters())
    model(torch.arange(rank, 20_001, 7)[:2800]).square().sum().backward()
    optimizer.step()
    held = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
    rows = model.module[0].shard.transform
    return {"bytes": sum(t.nbytes for t in held if isinstance(t, torch.Tensor)),
            "std": float(rows.detach().std()), "first": float(rows[0, 0])}  # fmt: skip


def collections(bags):
    import torchrec

    from featherbed.interop.torchrec.collections import (
        CompactEmbeddingBagCollection,
        CompactEmbeddingCollection,
    )

    kind = torchrec.EmbeddingBagConfig if bags else torchrec.EmbeddingConfig
    names = {"a": ["user", "friend"], "b": ["item"]}
    configs = [
        kind(name=name, num_embeddings=ROWS, embedding_dim=DIM, feature_names=features)
        for name, features in names.items()
    ]
    seeds = (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2))
    tables = {
        "a": TABLES["slots"](generator=seeds[0]),
        "b": TABLES["lowrank"](generator=seeds[1]),
    }
    made = CompactEmbeddingBagCollection if bags else CompactEmbeddingCollection
    return made(configs, tables)


class Existing(nn.Module):
    """A model of TorchRec, whose collection was replaced."""

    def __init__(self, bags):
        super().__init__()
        self.bags, self.collection = bags, collections(bags)

    def forward(self, features):
        found = self.collection(features)
        if self.bags:
            return torch.cat([found[k] for k in ("user", "friend", "item")], 1).square().mean()
        return sum(found[k].values().square().sum() for k in ("user", "friend", "item")) / 10


def features_of(step, rank, world):
    from torchrec import KeyedJaggedTensor

    generator = torch.Generator().manual_seed(step)
    size, keys = 8 // world, ["item", "user", "friend"]
    lengths = torch.randint(0, 3, (len(keys), 8), generator=generator)
    ids = [torch.randint(ROWS, (n, 8), generator=generator) for n in (3, 3, 3)]
    mine = slice(rank * size, (rank + 1) * size)
    values = [ids[k][: int(lengths[k, b]), b] for k in range(len(keys)) for b in range(8)[mine]]
    return KeyedJaggedTensor(keys, torch.cat(values), lengths=lengths[:, mine].reshape(-1))


def run_collections(rank, world, folder, bags, sharding):
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints

    from featherbed.interop.torchrec.collections import (
        CompactBagCollectionSharder,
        CompactCollectionSharder,
    )

    sharders = [CompactCollectionSharder(), CompactBagCollectionSharder()]
    kinds = ParameterConstraints(sharding_types=[sharding])
    planner = EmbeddingShardingPlanner(
        topology=Topology(world, "cpu"), constraints={"a": kinds, "b": kinds}
    )
    model = Existing(bags)
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    model = DistributedModelParallel(model, plan=plan, sharders=sharders)
    optimizer = fb.Adagrad(model.parameters(), lr=0.1)
    losses = []
    for step in range(10):
        optimizer.zero_grad()
        loss = model(features_of(step, rank, world))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    fb.distributed.save_checkpoint(model, f"{folder}/collection-{bags}-{sharding}", optimizer)
    return {"losses": losses, "state": local_state(model)}


def ratings_file(folder):
    from featherbed.io.records import make_ratings

    path = folder / "ratings.csv"
    if not path.exists():
        ratings = make_ratings(60, 50, 1500, groups=4, dim=4, seed=1)
        triples = zip(ratings.users, ratings.items, ratings.values, strict=True)
        lines = ["user,item,rating", *(f"u{u},i{i},{r:.1f}" for u, i, r in triples)]
        path.write_text("\n".join(lines))
    return path


RATINGS = {
    "table.users": "anchor:anchors=4", "table.items": "anchor:anchors=4", "table.dim": 4,
    "training.epochs": 3, "training.batch": 301, "anchors.nonzeros": 300,
}  # fmt: skip


def run_ratings(rank, world, folder):
    """As torchrun does it: the number of processes is in the environment."""
    from featherbed.apps.recommender import train_recommender

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    try:
        path = ratings_file(Path(folder))
        graded = error_of(
            lambda: train_recommender(path, f"{folder}/graded", {}, progress=False)
        ) if rank else None  # fmt: skip
        outcome = train_recommender(path, f"{folder}/recommender", RATINGS, progress=False)
    finally:
        del os.environ["RANK"], os.environ["WORLD_SIZE"]
    return {"graded": graded, "metrics": outcome.metrics, "summary": outcome.summary}


EQUAL = ("anchor", "slots", "lowrank", "kd", "dense")
PACKED = ("anchor", "slots", "lowrank", "kd", "dense", "dpq", "int4")
CASES = {
    2: {
        **{f"{k} rows": (run_equal, k, {"sharding": "row_wise"}) for k in EQUAL},
        "slots tables": (run_equal, "slots", {"sharding": "table_wise"}),
        **{f"{k} codes": (run_equal, k, {"wire": "codes"}) for k in ("anchor", "lowrank")},
        "without factor": (run_without_factor,),
        "without settling": (run_without_settling,),
        "bags rows": (run_bags, {"sharding": "row_wise"}),
        "bags tables": (run_bags, {"sharding": "table_wise"}),
        "bags codes": (run_bags, {"wire": "codes"}),
        "empty": (run_empty,),
        "save anchor": (run_save, "anchor"),
        "save slots": (run_save, "slots"),
        "errors": (run_errors,),
        **{f"pack {k}": (run_pack, k, "row_wise") for k in PACKED},
        "pack tables": (run_pack, "slots", "table_wise"),
        "budget": (run_budget, {"sharding": "row_wise"}),
        "budget tables": (run_budget, {"sharding": "table_wise"}),
        "refit": (run_refit, {"sharding": "row_wise"}),
        "growth": (run_growth,),
        "memory": (run_memory,),
        "ratings": (run_ratings,),
        **{
            f"collection {bags} {how}": (run_collections, bags, how)
            for bags in (False, True)
            for how in ("row_wise", "table_wise")
        },
    },
    4: {
        **{f"{k} rows": (run_equal, k, {"sharding": "row_wise"}) for k in EQUAL},
        "anchor codes": (run_equal, "anchor", {"wire": "codes"}),
        "bags rows": (run_bags, {"sharding": "row_wise"}),
        "resume anchor": (run_resume, "anchor"),
        "resume slots": (run_resume, "slots"),
    },
}


def work(rank, world, folder):
    os.environ["FEATHERBED_KERNELS"] = "numpy"  # compiled loops are tested elsewhere, and take long
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting-{world}", rank=rank, world_size=world
    )
    results = {}
    for name, (run, *rest) in CASES[world].items():
        if any(word in name for word in os.environ.get("TORCHREC_CASES", name).split(",")):
            results[name] = run(rank, world, folder, *rest)
    torch.save(results, f"{folder}/results-{world}-{rank}")
    dist.barrier()  # nobody leaves while another still talks to it
    dist.destroy_process_group()


def results_of(world, folder):
    mp.spawn(work, (world, str(folder)), nprocs=world)
    each = [torch.load(f"{folder}/results-{world}-{rank}") for rank in range(world)]
    return {name: [one[name] for one in each] for name in each[0]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("torchrec")


@pytest.fixture(scope="module")
def two(folder):
    return results_of(2, folder)


@pytest.fixture(scope="module")
def resumed(two, folder):
    """Continue the checkpoints of two processes in a plain model, and save again for four."""
    found = {}
    for kind in ("anchor", "slots"):
        model = Scorer(kind)
        optimizer = optimizer_of(model, model.items)
        extra = fb.distributed.load_checkpoint(model, folder / kind, optimizer)
        assert extra == {"step": STEPS}
        train(model, optimizer, range(STEPS, STEPS + MORE))
        extra = {"step": STEPS + MORE}
        fb.distributed.save_checkpoint(model, folder / f"{kind}-1", optimizer, extra)
        found[kind] = model.state_dict()
    return found


@pytest.fixture(scope="module")
def four(resumed, folder):
    return results_of(4, folder)


@pytest.mark.parametrize("case", [name for name in CASES[2] if name.split()[0] in TABLES], ids=str)
def test_two_processes_are_one(two, case):
    expected = learned(case.split()[0])[0].state_dict()
    assert difference(two[case], expected) < 1e-5


@pytest.mark.parametrize("case", [name for name in CASES[4] if name.split()[0] in TABLES], ids=str)
def test_four_processes_are_one(four, case):
    expected = learned(case.split()[0])[0].state_dict()
    assert difference(four[case], expected) < 1e-5


def test_controls_differ(two):
    """Without the factor of gradients, or without settling, the comparison must fail."""
    expected = learned("anchor")[0].state_dict()
    assert difference(two["without factor"], expected) > 1e-4
    assert difference(two["without settling"], expected) > 1e-4


def test_a_wrong_scan_changes_the_support(two):
    start, right = Scorer("slots").items.support, learned("slots")[0].items.support
    wrong = learned("slots", scan_every=5)[0].items.support
    assert (right != start).sum() > 20
    assert (right != wrong).sum() > 20
    state = [{"s": one["items.support"]} for one in two["slots rows"]]
    assert difference(state, {"s": right}) == 0


@pytest.mark.parametrize("case", ["bags rows", "bags tables", "bags codes"])
def test_bags_are_those_of_one_process(two, four, case):
    model = Bags()
    train_bags(model)
    expected = {name.replace(".table.", "."): v for name, v in model.state_dict().items()}
    assert difference(two[case], expected) < 1e-5
    if case in four:
        assert difference(four[case], expected) < 1e-5


def test_an_empty_batch_in_one_process(two):
    first, second = two["empty"]
    assert first["rows"] == (0, DIM) and second["rows"] == (second["ids"], DIM)
    expected = Scorer("anchor").items(torch.tensor([0, 3, 6, 9]))
    for found in (first, second):
        torch.testing.assert_close(found["strided"], expected)


def test_an_error_of_one_process_is_raised_in_all(two):
    for found in two["errors"]:
        kind, text = found["nan"]
        assert kind == "ArgumentError" and "NaN" in text
        assert found["changed"] == []
        assert found["id"] == (
            "IdError",
            f"id {ROWS} of feature 'ids': ids go from 0 to {ROWS - 1}",
        )
        assert "rows and there are 2 processes" in found["few"][1]
        assert found["other"][0] == "DataError" and "another model" in found["other"][1]
        assert "no table that can be divided" in found["none"][1]
        assert len(found["whole"]) == 1 and "HashedTable" in found["whole"][0]
        assert all("\n" not in found[name][1] for name in ("nan", "id", "few", "other", "none"))


@pytest.mark.parametrize("kind", ["anchor", "slots"])
def test_checkpoints_go_from_two_to_one_to_four(resumed, four, kind):
    expected = learned(kind, STEPS + MORE)[0].state_dict()
    one = {name: (None, value) for name, value in resumed[kind].items()}
    assert difference([one], expected) < 1e-5
    expected = learned(kind, STEPS + 2 * MORE)[0].state_dict()
    assert difference(four[f"resume {kind}"], expected) < 1e-5


@pytest.mark.parametrize(
    ("kind", "sharding"), [*((kind, "row_wise") for kind in PACKED), ("slots", "table_wise")]
)
def test_packed_shards_are_the_packed_table(two, folder, kind, sharding, tmp_path):
    model = Scorer(kind)
    fb.distributed.load_checkpoint(model, folder / f"pack-{kind}-{sharding}")
    for values, layout in (("float32", "auto"), ("int8", "fixed"), ("float16", "ragged")):
        fb.save(model.items.pack(values, layout=layout), tmp_path / "one")
        found = (folder / f"{kind}-{sharding}-{values}.safetensors").read_bytes()
        assert found == (tmp_path / "one").read_bytes()


def test_budgets_count_all_processes(two):
    model = Scorer("anchor")
    optimizer = optimizer_of(model, model.items)
    budget = fb.Budget(fb_penalties(optimizer), 150, steps=STEPS, every=5)
    train(model, optimizer, range(STEPS), after=budget.step)
    for case in ("budget", "budget tables"):
        assert {found["count"] for found in two[case]} == {budget.count}
        states = [found["state"] for found in two[case]]
        assert difference(states, model.state_dict()) < 1e-5


def test_zeros_stay_zero_in_a_refit(two):
    model = Scorer("anchor")
    nonzeros = int(refit(model, optimizer_of(model, model.items), model.items))
    assert 0 < nonzeros < model.items.transform.numel()
    assert sum(found["nonzeros"] for found in two["refit"]) == nonzeros
    assert difference([found["state"] for found in two["refit"]], model.state_dict()) < 1e-5


def test_growth_decides_alike(two):
    model = Scorer("growing")
    found = grow(model, model.items, optimizer_of(model, model.items))
    assert len({anchors for _, anchors, _ in found["history"]}) > 1
    assert all(one["history"] == found["history"] for one in two["growth"])
    assert difference([one["state"] for one in two["growth"]], model.state_dict()) < 1e-4


def test_a_process_holds_half(two):
    model = nn.Sequential(fb.AnchorTable(20_001, DIM, anchors=32, sparse=True))
    optimizer = fb.Yogi(model.parameters())
    model(torch.arange(9)).sum().backward()
    optimizer.step()
    held = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
    whole = sum(t.nbytes for t in held if isinstance(t, torch.Tensor))
    for found in two["memory"]:
        assert 0.45 * whole < found["bytes"] < 0.55 * whole
        assert found["std"] > 0
    assert two["memory"][0]["first"] != two["memory"][1]["first"], "each draws rows of its own"


@pytest.mark.parametrize("sharding", ["row_wise", "table_wise"])
@pytest.mark.parametrize("bags", [False, True])
def test_collections_replace_those_of_torchrec(two, folder, bags, sharding):
    """Two features read one table, and it scans twice: losses, rows and files are those of
    one process."""
    model, case = Existing(bags), f"collection {bags} {sharding}"
    optimizer = fb.Adagrad(model.parameters(), lr=0.1)
    expected = []
    for step in range(10):
        optimizer.zero_grad()
        halves = [model(features_of(step, rank, 2)) for rank in range(2)]
        (sum(halves) / 2).backward()
        optimizer.step()
        expected.append([float(half.detach()) for half in halves])
    found = [*zip(*(one["losses"] for one in two[case]), strict=True)]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-6)
    optimizer.settle()
    assert difference([one["state"] for one in two[case]], model.state_dict()) < 1e-5
    plain = Existing(bags)
    fb.distributed.load_checkpoint(plain, folder / f"collection-{bags}-{sharding}")
    stored = {name: (None, value) for name, value in plain.state_dict().items()}
    assert difference([stored], model.state_dict()) < 1e-5


def test_ratings_are_trained_by_two_processes_as_by_one(two, folder, tmp_path):
    from featherbed.apps.recommender import train_recommender

    first, second = two["ratings"]
    assert "fitted in one process" in second["graded"][1]
    assert second["summary"] == [] and second["metrics"] == {}
    path = ratings_file(folder)
    expected = train_recommender(path, tmp_path / "one", RATINGS, progress=False).metrics
    for part in ("train", "validation", "test"):
        assert first["metrics"][part] == pytest.approx(expected[part], rel=1e-4)
    assert first["metrics"]["nonzeros"] == expected["nonzeros"] <= 300
    files = {file.name for file in (tmp_path / "one").iterdir()}
    assert {file.name for file in (folder / "recommender").iterdir()} == files


def test_a_model_of_one_process_keeps_its_checkpoint(tmp_path):
    model, optimizer = learned("anchor", 5)
    fb.distributed.save_checkpoint(model, tmp_path / "c", optimizer)
    with pytest.raises(fb.DataError, match="another model"):
        fb.distributed.load_checkpoint(Scorer("lowrank"), tmp_path / "c")
    with pytest.raises(fb.MissingFileError, match="no checkpoint"):
        fb.distributed.load_checkpoint(model, tmp_path / "d")
    with pytest.raises(fb.ArgumentError, match="init_process_group"):
        fb.distributed.shard(model)
    with pytest.raises(fb.ArgumentError, match=r"table\.pack"):
        fb.distributed.pack(model.items)


def test_damaged_and_unread_checkpoints_are_one_line(tmp_path):
    model, optimizer = learned("anchor", 5)
    place = tmp_path / "c"
    fb.distributed.save_checkpoint(model, place, optimizer)
    other = Scorer("anchor")
    with pytest.raises(fb.DataError, match="this optimizer would not read: give one"):
        fb.distributed.load_checkpoint(other, place, torch.optim.Adam(other.parameters()))
    assert fb.distributed.load_checkpoint(other, place) == {}
    part = next(place.glob("*.distcp"))
    part.write_bytes(part.read_bytes()[:-1000])
    with pytest.raises(fb.DataError, match=r"c is damaged, .*: resume from another") as found:
        fb.distributed.load_checkpoint(model, place, optimizer)
    assert "\n" not in str(found.value)
    (place / ".metadata").write_bytes(b"abc")
    with pytest.raises(fb.DataError, match=r"c is damaged: its \.metadata cannot be read"):
        fb.distributed.load_checkpoint(model, place, optimizer)
    (tmp_path / "file").touch()
    with pytest.raises(fb.DataError, match="the checkpoint cannot be written: "):
        fb.distributed.save_checkpoint(model, tmp_path / "file", optimizer)


def test_models_that_cannot_be_divided(tmp_path, caplog):
    meeting = f"file://{tmp_path / 'meeting'}"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    try:
        with pytest.raises(fb.ArgumentError, match="the model is str: give a module"):
            fb.distributed.shard("model")
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            model = fb.distributed.shard(nn.Sequential(fb.DenseTable(9, 4), nn.Linear(4, 1)))
        assert [str(one.message)[:200] for one in heard if "torchrec" in one.filename] == []
        loud = [one for one in caplog.records if one.levelno >= logging.WARNING]
        assert [one.getMessage()[:200] for one in loud if "torchrec" in one.pathname] == []
        with pytest.raises(fb.ArgumentError, match="divided already: shard it once"):
            fb.distributed.shard(model)
        for ids in (torch.tensor([1.5]), torch.tensor([True])):
            with pytest.raises(fb.IdError, match=r"ids have dtype .*whole numbers"):
                model(ids)
    finally:
        torch.distributed.destroy_process_group()


def test_without_torchrec_one_line_says_what_to_install():
    import subprocess
    import sys

    code = (
        "import sys, torch, featherbed as fb\n"
        "assert 'torchrec' not in sys.modules\n"
        "sys.modules['torchrec'] = None\n"
        "for name in ('CompactEmbeddingCollection', 'shard'):\n"
        "    try: getattr(fb.distributed, name)(torch.nn.Linear(1, 1))\n"
        "    except fb.MissingExtra as error: print(error)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = found.stdout.splitlines()
    assert len(lines) == 2
    assert all("featherbed[distributed]" in line and "--no-deps torchrec" in line for line in lines)
