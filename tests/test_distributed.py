"""Two processes with half a batch each are one process with all of it."""

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

import featherbed as fb

ROWS, DIM, STEPS = 40, 5, 12


class Model(nn.Module):
    def __init__(self, settings):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = fb.AnchorTable(
            ROWS, DIM, dtype=torch.float64, generator=generator, init=fb.HalfNormal(0.3), **settings
        )
        self.bias = nn.Parameter(torch.zeros(DIM, dtype=torch.float64))

    def forward(self, ids):
        return self.table(ids) + self.bias


def learn(model, rank=0, world=1, table=None):
    table = model.table if table is None else table
    optimizer = fb.Yogi(
        model.parameters(), lr=0.02, penalties={table.transform: fb.NonNegativeL1(1e-3)}
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        ids = torch.randint(ROWS, (8,), generator=generator)
        target = torch.randn(8, DIM, dtype=torch.float64, generator=generator)
        mine = slice(rank * 8 // world, (rank + 1) * 8 // world)
        optimizer.zero_grad()
        (model(ids[mine]) - target[mine]).square().sum(1).mean().backward()
        optimizer.step()
    return table


def join(rank, meeting):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=2
    )


def worker(rank, meeting, settings, results):
    join(rank, meeting)
    model = Model(settings)
    if model.table.slots is not None:
        model.table.slot_group = torch.distributed.group.WORLD
    table = learn(nn.parallel.DistributedDataParallel(model), rank, 2, model.table)
    results[rank] = {name: value.tolist() for name, value in table.state_dict().items()}
    torch.distributed.barrier()  # neither leaves while the other still talks to it
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch was built without distributed"
)
@pytest.mark.parametrize(
    "settings",
    [{"anchors": 4, "sparse": True}, {"anchors": 9, "slots": 3, "scan_every": 2}],
    ids=str,
)
def test_two_processes_are_one(settings, tmp_path):
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(worker, (tmp_path / "meeting", settings, results), nprocs=2)
        found = [results[rank] for rank in range(2)]
    assert found[0] == found[1], "both processes must hold the same table, bit for bit"
    alone = learn(Model(settings)).state_dict()
    for name, value in alone.items():
        torch.testing.assert_close(
            torch.tensor(found[0][name], dtype=value.dtype), value, rtol=1e-9, atol=1e-10
        )


def test_slots_in_two_processes_without_a_group_say_what_to_do(monkeypatch):
    model = Model({"anchors": 9, "slots": 3, "scan_every": 1})
    optimizer = fb.Yogi(model.parameters())
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model(torch.tensor([1, 2])).sum().backward()
    held = model.table._parameters["transform"]
    ones = torch.ones(1, 3, dtype=torch.float64)
    held.grad = held.grad + torch.sparse_coo_tensor(
        torch.tensor([[7]]), ones, held.shape, check_invariants=True
    )
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    with pytest.raises(
        fb.ArgumentError, match="slot_group"
    ):  # as if another process had seen row 7
        optimizer.step()


def share(model, batches, optimizer):
    """Train on squares of the rows that shared ids name; return those ids."""
    seen = []
    sse = getattr(model, "module", model)
    hook = sse.table.register_forward_pre_hook(lambda _, given: seen.append(given[0].tolist()))
    for ids in batches:
        optimizer.zero_grad()
        model(ids).square().sum(1).mean().backward()
        optimizer.step()
    hook.remove()
    return seen


def sharing(rank):  # every process has a seed of its own until the first one's is broadcast
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(rank)
    return fb.SSE(
        nn.Embedding(ROWS, DIM, sparse=True, dtype=torch.float64), 0.5, generator=generator
    )


def sharing_worker(rank, meeting, results):
    join(rank, meeting)
    sse = sharing(rank)
    model = nn.parallel.DistributedDataParallel(sse)
    seen = share(model, [torch.arange(8)] * STEPS, torch.optim.SGD(model.parameters(), lr=0.1))
    results[rank] = {
        "ids": seen,
        **{name: value.tolist() for name, value in sse.state_dict().items()},
    }
    torch.distributed.barrier()  # neither leaves while the other still talks to it
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch was built without distributed"
)
def test_two_processes_share_ids_differently(tmp_path):
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(sharing_worker, (tmp_path / "meeting", results), nprocs=2)
        found = [results[rank] for rank in range(2)]
    ids = [one.pop("ids") for one in found]
    assert found[0] == found[1], (
        "both processes must hold the same table and the same state of draws"
    )
    assert all(first != second for first, second in zip(*ids, strict=True))
    assert found[0]["calls"] == STEPS
    alone = sharing(0)
    assert found[0]["seed"] == int(alone.seed)
    assert (
        share(alone, [torch.arange(8)] * STEPS, torch.optim.SGD(alone.parameters(), lr=0.1))
        == ids[0]
    )
    table = sharing(0).eval()  # one process with the ids of both
    share(
        table,
        [torch.tensor(a + b) for a, b in zip(*ids, strict=True)],
        torch.optim.SGD(table.parameters(), lr=0.1),
    )
    torch.testing.assert_close(
        torch.tensor(found[0]["table.weight"], dtype=torch.float64), table.weight.detach()
    )
