"""Collections: columns equal tables of their own, in one call and in one file that numpy opens."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import featherbed as fb
from featherbed.packed.collection import Column
from featherbed.packed.file import header_for

SPECS = {
    "site": (50, 4, "anchor:anchors=6,slots=2"),
    "size": (9, 8, "quantized:bits=4"),
    "app": (7, 4, "anchor:anchors=6,slots=2"),
    "last_site": "site",
}
COUNTS = (50, 9, 7, 50)


def made(specs=SPECS, **settings):
    return fb.Collection.from_spec(specs, generator=torch.Generator().manual_seed(0), **settings)


def some_ids(batch=6):
    generator = torch.Generator().manual_seed(1)
    return torch.stack([torch.randint(n, (batch,), generator=generator) for n in COUNTS], dim=1)


def test_rows_are_those_of_the_columns_side_by_side():
    collection, ids = made(), some_ids()
    assert len(collection.tables) == 2
    assert [column.start for column in collection.layout.columns] == [0, 0, 50, 0]
    rows = collection(ids)
    parts = [collection.rows(name, ids[:, c]) for c, name in enumerate(SPECS)]
    torch.testing.assert_close(rows, torch.cat(parts, dim=1))
    by_name = collection({name: ids[:, c] for c, name in enumerate(SPECS)})
    assert torch.equal(by_name, rows)
    assert torch.equal(rows[:, 16:][ids[:, 0] == ids[:, 3]], rows[:, :4][ids[:, 0] == ids[:, 3]])


def test_fused_columns_equal_tables_of_their_own():
    specs = {"a": (30, 4, "lowrank:rank=2"), "b": (20, 4, "lowrank:rank=2")}
    fused, apart = made(specs), made(specs, fuse=False)
    assert [len(c.tables) for c in (fused, apart)] == [1, 2]
    with torch.no_grad():
        for table, rows in zip(
            apart.tables, fused.tables[0].coefficients.split([30, 20]), strict=True
        ):
            table.coefficients.copy_(rows)
            table.atoms.copy_(fused.tables[0].atoms)
    ids = some_ids()[:, :2] % 20
    torch.testing.assert_close(fused(ids), apart(ids))
    fused(ids).square().sum().backward()
    apart(ids).square().sum().backward()
    gradients = torch.cat([table.coefficients.grad for table in apart.tables])
    torch.testing.assert_close(fused.tables[0].coefficients.grad, gradients)


def test_tables_whose_rows_differ_by_id_are_not_fused():
    specs = dict.fromkeys(("a", "b"), (40, 4, "graded:bits=2,grades=3"))
    assert len(made(specs).tables) == 2


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_equal_those_of_each_column(mode):
    collection = made()
    lengths = torch.tensor([[2, 1, 0], [0, 1, 1], [1, 0, 0], [1, 1, 1]])
    ids = torch.tensor([3, 4, 49, 8, 0, 6, 1, 2, 3])
    pooled, expected, start = collection.bag(ids, lengths, mode=mode), [], 0
    for name, counts in zip(SPECS, lengths, strict=True):
        own = ids[start : start + int(counts.sum())]
        start += len(own)
        rows = collection.rows(name, own)
        offsets = counts.cumsum(0) - counts
        weight = torch.arange(len(own))
        expected.append(nn.functional.embedding_bag(weight, rows, offsets, mode=mode))
    torch.testing.assert_close(pooled, torch.cat(expected, dim=1))
    packed = collection.pack().bag(ids.numpy(), lengths.numpy(), mode=mode)
    np.testing.assert_allclose(packed, pooled.detach().numpy(), atol=1e-6)


def test_training_moves_the_rows_of_a_batch_alone():
    collection = made()
    optimizer = fb.Yogi(collection.parameters(), lr=0.1)
    before = collection.rows("app", torch.arange(7)).detach()
    ids = some_ids()
    ids[:, 2] = 3
    atoms = collection.tables[0].atoms
    collection(ids).square().sum().backward()
    atoms.grad = None
    optimizer.step()
    fb.settle(collection)
    moved = (collection.rows("app", torch.arange(7)).detach() - before).abs().sum(1) > 0
    assert moved.nonzero()[:, 0].tolist() == [3]


def test_one_file_is_opened_without_torch(tmp_path):
    collection, ids, path = made(), some_ids(), tmp_path / "clicks.safetensors"
    collection.save(path)
    np.save(tmp_path / "ids.npy", ids.numpy())
    np.save(tmp_path / "rows.npy", collection(ids).detach().numpy())
    code = """
import sys; sys.modules["torch"] = None
import numpy as np, featherbed as fb
packed = fb.PackedCollection.load(sys.argv[1] + "/clicks.safetensors")
packed.check()
ids, rows = (np.load(sys.argv[1] + f"/{name}.npy") for name in ("ids", "rows"))
np.testing.assert_allclose(packed[ids], rows, atol=1e-6)
np.testing.assert_allclose(packed.rows("size", ids[:, 1]), rows[:, 4:12], atol=1e-6)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c(some_ids() + 50), "is not in the column 'site': its ids go from 0 to 49"),
        (lambda c: c(-1 - some_ids()), "id -.* is not in the column 'site'"),
        (lambda c: c(some_ids()[:, :3]), r"give a tensor \[B, 4\]"),
        (lambda c: c(some_ids().float()), "whole numbers"),
        (lambda c: c({"site": some_ids()[:, 0]}), "lacks the column 'size'"),
        (lambda c: c.rows("sites", torch.tensor([1])), "no column 'sites': the columns are 'site'"),
        (lambda c: c.bag(torch.tensor([1]), torch.tensor([[1]])), r"\[4, B\]"),
        (lambda c: c.bag(torch.tensor([1]), torch.ones(4, 1).long()), "add up to 4, there are 1"),
        (lambda c: c.pack()[np.full((1, 4), 9)], "id 9 is not in the column 'size'"),
        (lambda c: c.pack()[{"site": [1]}], "lacks the column 'size'"),
        (lambda _: fb.Collection.from_spec({}), "give {name: "),
        (lambda _: fb.Collection.from_spec({"a": (5, 4)}), "column 'a': give "),
        (lambda _: fb.Collection.from_spec({"a": "b"}), "column 'a' shares 'b'"),
        (lambda _: fb.Collection.from_spec({"a": (5, 4, "denes")}), "'denes' in spec"),
        (lambda c: fb.Collection(list(c.tables), [Column("a", 0, 50, 9)]), "lies outside"),
    ],
)
def test_bad_input_is_one_line(call, message):
    with pytest.raises(fb.FeatherbedError, match=message) as caught:
        call(made())
    assert "\n" not in str(caught.value)


def test_a_collection_is_no_table(tmp_path):
    made().save(tmp_path / "c.safetensors")
    with pytest.raises(fb.FormatError, match=r"fb\.PackedCollection\.load"):
        fb.load(tmp_path / "c.safetensors")
    fb.save(fb.DenseTable(5, 4), tmp_path / "t.safetensors")
    with pytest.raises(fb.FormatError, match=r"fb\.load"):
        fb.PackedCollection.load(tmp_path / "t.safetensors")


LIES = {
    "version": lambda m: m.update(version=4),
    "no tables": lambda m: m.update(tables=[]),
    "tables are no list": lambda m: m.update(tables={}),
    "columns are no list": lambda m: m.update(columns=3),
    "no columns": lambda m: m.update(columns=[]),
    "unknown field": lambda m: m.update(more=1),
    "more tables than columns": lambda m: m.update(tables=m["tables"] * 4),
    "a table is no object": lambda m: m["tables"].__setitem__(0, 7),
    "a column is no object": lambda m: m["columns"].__setitem__(0, None),
    "a column of another table": lambda m: m["columns"][0].update(table=9),
    "a column beyond its table": lambda m: m["columns"][0].update(start=50),
    "a column of too many rows": lambda m: m["columns"][0].update(rows=1 << 60),
    "a column of no rows": lambda m: m["columns"][0].update(rows=0),
    "a name that is none": lambda m: m["columns"][0].update(name=""),
    "a name twice": lambda m: m["columns"][0].update(name="size"),
    "a table no column uses": lambda m: m["columns"][1].update(table=0, rows=9),
    "an unknown field of a column": lambda m: m["columns"][0].update(keys=True),
    "a table of more rows": lambda m: m["tables"][0].update(rows=58),
}


@pytest.mark.parametrize("lie", LIES)
def test_hostile_files_are_refused(lie, tmp_path):
    packed = made().pack()
    metadata, arrays = json.loads(json.dumps(packed.metadata())), packed.arrays
    LIES[lie](metadata)
    body = b"".join(
        array.tobytes()
        for _, array in sorted(arrays.items(), key=lambda i: (-i[1].dtype.itemsize, i[0]))
    )
    path = tmp_path / "hostile.safetensors"
    path.write_bytes(header_for(metadata, arrays) + body)
    with pytest.raises(fb.FormatError):
        fb.PackedCollection.load(path)


@pytest.mark.parametrize("cut", [4, 100, -1])
def test_truncated_files_are_refused(cut, tmp_path):
    made().save(tmp_path / "c.safetensors")
    data = (tmp_path / "c.safetensors").read_bytes()
    (tmp_path / "c.safetensors").write_bytes(data[:cut])
    with pytest.raises(fb.FormatError):
        fb.PackedCollection.load(tmp_path / "c.safetensors")


def test_replaced_embeddings_become_a_collection(tmp_path):
    model = nn.ModuleDict({"user": nn.Embedding(30, 4), "item": nn.Embedding(20, 8)})
    swaps = fb.replace_embeddings(model, "quantized:bits=8")
    collection = fb.Collection.from_tables({swap.name: swap.table for swap in swaps})
    collection.save(tmp_path / "model.safetensors")
    packed = fb.PackedCollection.load(tmp_path / "model.safetensors")
    rows = packed[{"user": [3], "item": [19]}]
    np.testing.assert_allclose(rows[0, :4], model["user"](torch.tensor(3)).detach(), atol=1e-6)
    assert collection.names == ["user", "item"]


def test_compiled_collections_check_ids():
    collection = made()
    compiled = torch.compile(collection, fullgraph=True, backend="eager")
    ids = some_ids()
    torch.testing.assert_close(compiled(ids), collection(ids))
    with pytest.raises(IndexError, match="column 'site'"):
        compiled(ids + 50)
