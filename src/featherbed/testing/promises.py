"""The promises of a table: rows, gradients, bags, logits, packed form, sizes and capabilities."""

from __future__ import annotations

import copy
import pickle
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from featherbed.errors import ArgumentError, FeatherbedError, NotPackable
from featherbed.optim import AdamW
from featherbed.packed.file import check, load, save
from featherbed.tables.model import auxiliary_loss
from featherbed.tables.table import Table
from featherbed.testing.oracle import (
    SEED,
    Make,
    assert_same,
    gradients_of,
    oracle,
    random_like,
    seeded,
    some_ids,
)


def check_forward(make: Make) -> None:
    """Forward equals the dense oracle for ids of any shape and integer type."""
    table = seeded(make)
    dense = oracle(table)
    torch.testing.assert_close(table.weight, dense)
    for shape in ((), (7,), (3, 4), (2, 3, 5), (0,), (4, 0)):
        ids = some_ids(table, *shape)
        expected = dense[ids.reshape(-1)].reshape(*shape, table.embedding_dim)
        torch.testing.assert_close(table(ids), expected)
        torch.testing.assert_close(table(ids.int()), expected)


def check_gradients(make: Make) -> None:
    """Every parameter's gradient equals the oracle's, repeated ids included."""
    for padding in (None, 2):
        table = seeded(make, padding_idx=padding)
        ids = some_ids(table, 6, 9)
        assert_same(table, table(ids), F.embedding(ids, oracle(table)), "forward")


def check_bags(make: Make) -> None:
    """Bags equal F.embedding_bag of the oracle: sum, mean, offsets, 2-D, weights, padding, empty
    bags.
    """
    for padding in (None, 2):
        table = seeded(make, padding_idx=padding)
        ids, offsets = some_ids(table, 11), torch.tensor([0, 4, 4, 9])
        weights = torch.rand(
            11, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
        ).requires_grad_()
        last = torch.cat([offsets, torch.tensor([11])])
        for mode in ("sum", "mean"):
            settings: dict[str, Any] = {"mode": mode}
            expect: dict[str, Any] = {"mode": mode, "padding_idx": padding}
            dense = F.embedding_bag(ids, oracle(table), offsets, **expect)
            assert_same(table, table.bag(ids, offsets, **settings), dense, f"bag {mode}")
            assert_same(
                table,
                table.bag(ids, last, include_last_offset=True, **settings),
                dense,
                f"bag {mode}, last offset",
            )
            flat = some_ids(table, 4, 5)
            assert_same(
                table,
                table.bag(flat, **settings),
                F.embedding_bag(flat, oracle(table), **expect),
                f"2-D bag {mode}",
            )
        dense = F.embedding_bag(
            ids, oracle(table), offsets, mode="sum", per_sample_weights=weights, padding_idx=padding
        )
        assert_same(table, table.bag(ids, offsets, weights), dense, "weighted bag", (weights,))
        assert table.bag(ids[:0], torch.tensor([0, 0])).shape == (2, table.embedding_dim), (
            "bags of nothing are zero"
        )


def check_logits(make: Make) -> None:
    """Logits equal hidden @ weight.T with all gradients, for few and for many hidden vectors."""
    for padding in (None, 2):
        table = seeded(make, padding_idx=padding)
        for shape in ((), (3,), (2, 2), (table.embedding_dim + 5,)):
            hidden = random_like(
                torch.empty(*shape, table.embedding_dim, dtype=torch.float64)
            ).requires_grad_()
            assert_same(
                table,
                table.logits(hidden),
                hidden @ oracle(table).T,
                f"logits of {shape}",
                (hidden,),
            )


def check_padding(make: Make) -> None:
    """The padding row is zero, also for a negative padding_idx, and has no gradient."""
    for given, meant in ((0, 0), (2, 2), (-1, -1)):
        table = seeded(make, padding_idx=given)
        meant %= table.num_embeddings
        assert table.padding_idx == meant
        rows = table(torch.tensor([meant, meant]))
        assert not rows.any(), "the padding row must be zero"
        assert not any(g.any() for g in gradients_of(table, rows)), (
            "the padding row must give no gradient"
        )


def check_dtypes(make: Make) -> None:
    """Parameters and rows have the given dtype; autocast gives finite rows."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        table = seeded(make, dtype=dtype)
        assert table(some_ids(table, 5)).dtype == dtype == table.dtype
    table = seeded(make, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rows = table(some_ids(table, 5))
        rows.float().sum().backward()
    torch.testing.assert_close(rows.float(), table(some_ids(table, 5)), rtol=0.05, atol=0.05)


def check_bad_ids(make: Make) -> None:
    """Ids that are out of range or no integers raise an error with the id and the range."""
    table = seeded(make)
    most = table.num_embeddings - 1
    for ids, named in (([0, most + 1], most + 1), ([-1], -1), ([0.5], "float")):
        for call in (table, lambda x: table.bag(x, torch.tensor([0]))):
            try:
                call(torch.tensor(ids))
            except IndexError as error:
                assert isinstance(error, FeatherbedError), error
                assert str(named) in str(error), error
                assert str(most) in str(error), error
            else:
                raise AssertionError(f"ids {ids} were accepted")


def check_seed(make: Make) -> None:
    """Equal seeds give equal tables, others different ones; initial rows have an ordinary scale."""
    other = make(generator=torch.Generator().manual_seed(SEED + 1), dtype=torch.float64)
    assert torch.equal(seeded(make).weight, seeded(make).weight), "a seed must reproduce the table"
    assert not torch.equal(seeded(make).weight, other.weight), (
        "another seed must give another table"
    )
    assert 1e-3 < float(other.weight.detach().abs().mean()) < 10, (
        "fresh rows must be neither dust nor boulders"
    )


def check_copies(make: Make) -> None:
    """state_dict, deepcopy and pickle round trips keep every row; eval mode is deterministic."""
    table = seeded(make, padding_idx=1)
    fresh = make(padding_idx=1, dtype=torch.float64).eval()
    fresh.load_state_dict(table.state_dict())
    for twin in (fresh, copy.deepcopy(table), pickle.loads(pickle.dumps(table)), table.eval()):
        assert torch.equal(twin(some_ids(table, 20)), table(some_ids(table, 20)))


def check_sizes(make: Make) -> None:
    """The sizes are those of the written file and of the tensors in memory."""
    table = seeded(make, dtype=torch.float32).train()
    optimizer = AdamW(table.parameters())
    (table(some_ids(table, 9)).sum() + auxiliary_loss(table)).backward()
    optimizer.step()
    sizes = table.sizes(optimizer)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.safetensors"
        if table.packable:
            save(table, path)
            stored = path.stat().st_size
            assert sizes.file == stored, f"sizes say {sizes.file} bytes, the file has {stored}"
    held = sum(p.nbytes for p in table.parameters())
    dense = sum(p.nbytes for p in table.parameters() if p.grad is None or not p.grad.is_sparse)
    assert sizes.training is not None
    assert sizes.training >= 3 * held + dense, (
        "training holds parameters, gradients and both of Adam's moments"
    )
    assert table.sizes().training is None
    assert 0 < sizes.parameters <= sum(p.numel() for p in table.parameters())
    assert sizes.dense == table.num_embeddings * table.embedding_dim * 4


def check_packed(make: Make) -> None:
    """Packed, saved and loaded rows, bags, logits and searches equal the table's, or packing
    raises.
    """
    if not seeded(make).packable:
        _refuses_to_pack(seeded(make))
        return
    for padding in (None, 2):
        table = seeded(make, dtype=torch.float32, padding_idx=padding).eval()
        dense = table.weight.detach().numpy()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "table.safetensors"
            save(table, path)
            check(path)
            packed = load(path)
            assert len(packed) == table.num_embeddings
            assert packed.dim == table.embedding_dim
            np.testing.assert_allclose(packed[np.arange(len(packed))], dense, rtol=1e-5, atol=1e-6)
            queries = random_like(torch.empty(3, packed.dim)).numpy()
            np.testing.assert_allclose(
                packed.logits(queries), queries @ dense.T, rtol=1e-4, atol=1e-5
            )
            ids, offsets = some_ids(table, 11), torch.tensor([0, 4, 4, 9])
            for mode in ("sum", "mean"):
                pooled = table.bag(ids, offsets, mode=mode).detach().numpy()
                mine = packed.bag(ids.numpy(), offsets.numpy(), mode=mode)
                np.testing.assert_allclose(mine, pooled, rtol=1e-4, atol=1e-5)
            scores = packed.search(queries, k=5)[1]
            expected = -np.sort(-(queries @ dense.T), axis=1)[:, :5]
            np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-5)


def _refuses_to_pack(table: Table) -> None:
    try:
        table.pack()
    except NotPackable as error:
        assert type(table).__name__ in str(error), error
        return
    raise AssertionError(f"{type(table).__name__} says packable = False and packs")


def check_fit(make: Make) -> None:
    """from_dense of a table's own rows is at least as close to them as a fresh table."""
    table = seeded(make)
    target = table.weight.detach()
    settings = table.settings() | {"padding_idx": None}
    fitted = type(table).from_dense(target, **settings)
    fresh = make(generator=torch.Generator().manual_seed(SEED + 1), dtype=torch.float64)
    error, start = ((t.weight - target).square().sum() for t in (fitted, fresh))
    assert error <= start, "from_dense must come nearer to the matrix than a random table"
    try:
        type(table).from_dense(target[0], **settings)
    except ArgumentError:
        return
    raise AssertionError("from_dense must refuse what is no matrix")


def check_capabilities(make: Make) -> None:
    """The capabilities of a table agree with its parameters, its rows and each other."""
    table = seeded(make)
    owned = {id(parameter) for parameter in table.parameters()}
    named = [
        *table.penalized,
        *table.penalized_rows,
        *(p for p in table.factors or () if p is not None),
    ]
    assert all(id(parameter) in owned for parameter in named), "a capability names other parameters"
    ids = torch.arange(table.num_embeddings)
    codes = table.codes(ids)
    if table.weighted_codes:
        assert codes.indices is None
        assert codes.values is not None
        assert codes.dictionary is not None
        torch.testing.assert_close(codes.values @ codes.dictionary, table.weight)
    if table.factors is not None:
        rows, atoms = table.factors
        torch.testing.assert_close(rows if atoms is None else rows @ atoms, table.weight)
    assert table.has_anchors == (table.anchor_count > 0)
    assert table.has_anchors or not (table.sparse_codes or table.grows or table.penalized)
    assert table.pruned_parameter_count() <= table.parameter_count()
    if table.packable:
        torch.testing.assert_close(table.pruned().weight, table.weight)
    for scheduler in table.schedulers(4):
        for _ in range(4):
            scheduler.step()
        assert scheduler.reached
        scheduler.load_state_dict(scheduler.state_dict())
    before = float(table.weight.detach().std())
    table.scale_initial_rows(0.5 * before)
    after = float(table.weight.detach().std())
    assert 0.4 < after / before < 1.05, (
        f"scale_initial_rows changed the standard deviation from {before:.3g} to {after:.3g}"
    )
