"""Collections: columns equal tables of their own, in one call and in one file that numpy opens."""

import json
import subprocess
import sys
from pathlib import Path

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


def bags():
    return torch.tensor([3, 4, 6, 1]), torch.ones(4, 1).long()


def ones(collection):
    return {column.name: torch.ones(column.rows) for column in collection.layout.columns}


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


def test_slots_alone_are_a_spec():
    collection = made({"site": (5_000, 16, "anchor:slots=8"), "hour": (24, 16, "anchor:slots=8")})
    assert collection(torch.tensor([[4999, 23]])).shape == (1, 32)
    assert [(table.anchors, table.slots) for table in collection.tables] == [(256, 8)]
    assert fb.AnchorTable(3, 16, slots=8).anchors == 8


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
        (
            lambda c: c({n: torch.zeros(2 + (n == "app"), dtype=torch.int64) for n in SPECS}),
            "lengths site 2, size 2, app 3, last_site 2 .*: give a tensor",
        ),
        (lambda c: c({name: [1] for name in SPECS}), "lengths site -1, .*: give a tensor"),
        (lambda c: fb.save(c, "c.safetensors"), "Collection holds .*: store it with its own .save"),
        (lambda c: fb.save(c.pack(), "c.safetensors"), "PackedCollection has no packed form"),
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
        (lambda c: c.rows("site", [1]), "ids are list: give a tensor"),
        (lambda c: c.bag([1], torch.ones(4, 1).long()), "ids are list: give a tensor"),
        (lambda c: c.bag(bags()[0], torch.tensor([[3, 2, -1]] * 4)), "lengths hold -1"),
        (lambda c: c.bag(*bags(), torch.ones(3)), r"shape \(3,\): give \[4\], one for each id"),
        (lambda c: c.pack().bag(*bags(), [1, 2]), r"shape \(2,\): give \[4\]"),
        (lambda c: c.pack().bag(*bags(), list("abcd")), "per_sample_weights are no array"),
        (lambda c: c.compress("1KB", dict.fromkeys(SPECS, "x")), "importance of '.*' are no array"),
        (lambda c: c.pack()[[[1, 2, 3, 4], [1, 2]]], "ids are no array"),
        (lambda c: c.pack()[np.full((1, 4), 2**63 + 1, np.uint64)], "id 9223372036854775809 is"),
        (lambda c: c.save("c.safetensors", keys="spoken"), "keys='spoken'"),
        (lambda c: c.compress("1KB", None), "importance is NoneType: give a dictionary"),
        (lambda c: c.compress("1KB", {**ones(c), "x": torch.ones(2)}), "there is no column 'x'"),
        (lambda c: c.importance([1], lambda _: c(some_ids()).detach().sum()), "does not depend on"),
        (lambda c: c.importance([1], lambda _: 0.5), "loss of a batch is 0.5: return its mean"),
        (lambda c: c.importance([1], lambda _: c(some_ids()).sum(1)), "loss of a batch is tensor"),
        (lambda c: c.importance([1], lambda _: c(some_ids()).sum() / 0), "loss of a batch is"),
        (lambda _: fb.Collection.from_tables([fb.DenseTable(3, 4)]), "tables are list: give"),
        (lambda _: fb.Collection.from_tables({"a": nn.Embedding(3, 4)}), "'a' is Embedding: give"),
        (lambda _: made({"": (3, 4, "dense")}), "named '': give a text"),
        (lambda _: made({1: (3, 4, "dense")}), "named 1: give a text"),
        (lambda _: made({"a\nb": (3, 4, "dense")})(torch.tensor([[9]])), r"column 'a\\nb'"),
    ],
)
def test_bad_input_is_one_line(call, message):
    with pytest.raises(fb.FeatherbedError, match=message) as caught:
        call(made())
    assert "\n" not in str(caught.value)


def test_bytes_of_a_collection_are_opened(tmp_path):
    made().save(tmp_path / "c.safetensors")
    whole = (tmp_path / "c.safetensors").read_bytes()
    expected = fb.PackedCollection.load(tmp_path / "c.safetensors")[some_ids()]
    for given in (whole, bytearray(whole), memoryview(whole)):
        np.testing.assert_array_equal(fb.PackedCollection.load(given)[some_ids()], expected)
    for cut in (0, 7, 100, len(whole) - 1):
        with pytest.raises(fb.FormatError):
            fb.PackedCollection.load(whole[:cut])


def test_a_collection_is_no_table(tmp_path):
    made().save(tmp_path / "c.safetensors")
    with pytest.raises(fb.FormatError, match=r"fb\.PackedCollection\.load"):
        fb.load(tmp_path / "c.safetensors")
    fb.save(fb.DenseTable(5, 4), tmp_path / "t.safetensors")
    with pytest.raises(fb.FormatError, match=r"fb\.load"):
        fb.PackedCollection.load(tmp_path / "t.safetensors")


VOCABULARY = fb.Vocabulary(["a.org", "b.com", "c.net"], shared=2)
KEYED = {"site": (VOCABULARY, 4, "dense"), "hour": (24, 4, "dense"), "referrer": "site"}


@pytest.mark.parametrize("form", ["plain", "text", "hashed"])
def test_vocabularies_are_stored_with_their_columns(form, tmp_path):
    collection, path = made(KEYED), tmp_path / "keyed.safetensors"
    batch = {"site": ["c.net", "new.io"], "hour": [7, 0], "referrer": ["a.org", "c.net"]}
    ids = collection.ids(batch)
    assert ids[0].tolist() == [2, 7, 0]
    assert int(ids[1, 0]) in (3, 4)
    assert ids[1, 1:].tolist() == [0, 2]
    collection.save(path, keys=form)
    packed = fb.PackedCollection.load(path)
    packed.check()
    np.testing.assert_allclose(packed[batch], collection(ids).detach().numpy(), atol=1e-6)
    rows = packed.rows("site", ["new.io", "a.org"])
    np.testing.assert_allclose(rows, packed.rows("site", [int(ids[1, 0]), 0]))
    with pytest.raises(fb.UnknownKeyError, match="column 'hour' has no keys"):
        packed.rows("hour", ["noon"])


def test_keys_without_shared_rows_are_known_or_refused():
    specs = {"site": (fb.Vocabulary(["a", "b"]), 4, "dense")}
    with pytest.raises(fb.UnknownKeyError, match="column 'site' has no key 'c'"):
        made(specs).ids({"site": ["a", "c"]})


@pytest.mark.parametrize("mixed", [["a.org", 1], [1, "a.org"], ["a.org", None]])
def test_keys_and_ids_are_not_mixed(mixed):
    collection = made(KEYED)
    with pytest.raises(fb.ArgumentError, match=r"column 'site' got (1|None) among its keys"):
        collection.ids({"site": mixed, "hour": [0, 1], "referrer": [0, 1]})


def test_numbers_are_no_keys():
    users = fb.Vocabulary.count([[7, 1, 7]])  # rows of the keys "7" and "1"
    collection = made({"user": (users, 4, "dense"), "hour": (24, 4, "dense")})
    assert collection.ids({"user": ["1"], "hour": [3]}).tolist() == [[1, 3]]
    for given in ([1], np.array([1]), torch.tensor([1])):
        with pytest.raises(fb.ArgumentError, match=r"column 'user' has keys, .*got 1: give"):
            collection.ids({"user": given, "hour": [3]})
    assert collection.ids({"user": [], "hour": []}).shape == (0, 2)


def test_columns_with_padding_are_not_fused():
    collection = made(dict.fromkeys(("a", "b"), (9, 4, "dense:padding_idx=0")))
    assert not collection(torch.tensor([[0, 0]])).any()


def test_the_state_of_other_columns_is_refused():
    specs = {"a": (50, 4, "dense"), "b": (9, 4, "dense")}
    state = nn.ModuleDict({"tables": made(specs)}).state_dict()
    nn.ModuleDict({"tables": made(specs)}).load_state_dict(state)
    other = made({name: specs[name] for name in "ba"})
    with pytest.raises(RuntimeError, match=r"the state is of the columns {'a': "):
        nn.ModuleDict({"tables": other}).load_state_dict(state)


def test_a_vocabulary_of_another_table_is_refused():
    other = Column("site", 0, 0, 9, VOCABULARY)
    with pytest.raises(fb.ArgumentError, match="has 9 rows, its vocabulary 5"):
        fb.Collection([fb.DenseTable(9, 4)], [other])


def planted(counts=(400, 300, 20), seed=0):
    """A collection of plain rows and a task in which column 1 plays no part."""
    specs = {str(c): (n, 8, "dense") for c, n in enumerate(counts)}
    collection = made(specs)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack(
        [(torch.rand(4000, generator=generator) ** 3 * n).long() for n in counts], dim=1
    )
    with torch.no_grad():
        target = collection(ids)[:, :8] + collection(ids)[:, 16:]

    def loss(batch):
        rows = collection(ids[batch])
        return (rows[:, :8] + rows[:, 16:] - target[batch] - 0.1).square().sum(1).mean()

    return collection, ids, loss


def test_importance_is_the_mean_squared_gradient_of_a_sample():
    collection, ids, loss = planted()
    importance = collection.importance([torch.arange(100)], loss)
    assert not importance["1"].any()
    counts = torch.bincount(ids[:100, 0], minlength=400)
    expected = counts * (2 * 0.1) ** 2 / 100
    torch.testing.assert_close(importance["0"], expected.double(), rtol=1e-4, atol=1e-9)
    assert all(parameter.grad is None for parameter in collection.parameters())


def test_importance_of_bags_and_columns_is_that_of_their_rows():
    """One id a bag gives what a batch gives; a row that is in a bag twice has twice the gradient."""
    collection, ids, _ = planted()
    head = torch.linspace(-1, 1, 24)
    batch = ids[:40]

    def measured(look_up):
        return collection.importance([batch], lambda given: (look_up(given) @ head).tanh().mean())

    def bagged(given):
        lengths = torch.ones(3, len(given), dtype=torch.int64)
        return collection.bag(given.T.reshape(-1), lengths)

    def by_column(given):
        parts = [collection.rows(name, given[:, c]) for c, name in enumerate(collection.names)]
        return torch.cat(parts, dim=1)

    expected = measured(collection)
    for found in (measured(bagged), measured(by_column)):
        for name, part in expected.items():
            torch.testing.assert_close(found[name], part)
    once = collection.importance([0], lambda _: collection.rows("0", torch.tensor([[5]])).sum())
    twice = collection.importance([0], lambda _: collection.rows("0", torch.tensor([[5, 5]])).sum())
    torch.testing.assert_close(twice["0"], 4 * once["0"])
    several = torch.tensor([5, 5, 7]), torch.tensor([[3], [0], [0]])
    mean = collection.importance([0], lambda _: collection.bag(*several, mode="mean").sum())
    torch.testing.assert_close(mean["0"][[5, 7]], torch.tensor([4 / 9, 1 / 9]).double())
    assert all(parameter.grad is None for parameter in collection.parameters())


def test_a_shared_row_has_the_importance_of_each_of_its_columns_once():
    collection = made({"a": (9, 4, "dense"), "b": "a"})
    found = collection.importance([0], lambda _: collection(torch.tensor([[1, 2]])).sum())
    assert [part.nonzero().tolist() for part in found.values()] == [[[1]], [[2]]]


def test_importance_of_frozen_rows_is_measured_without_a_trace():
    collection, _, loss = planted()
    expected = collection.importance([torch.arange(100)], loss)
    collection.requires_grad_(False)
    with torch.no_grad():
        found = collection.importance([torch.arange(100)], loss)
    torch.testing.assert_close(found["0"], expected["0"])


@pytest.mark.parametrize("kind", ["html", "json", "txt"])
def test_the_report_of_a_budget_shows_curve_and_columns(kind, tmp_path):
    collection = made({"<script>": (400, 8, "dense"), "b": (320, 8, "dense"), "c": "b"})
    report = collection.compress("4KB", ones(collection)).report
    report.save(tmp_path / f"budget.{kind}")
    text = (tmp_path / f"budget.{kind}").read_text()
    assert ("<script>" in text) == (kind != "html")
    if kind == "json":
        found = json.loads(text)
        assert found["curve"] == [list(point) for point in report.curve]
        assert {one["name"]: one["bits"] for one in found["columns"]} == report.bits
    else:
        assert all(f"{loss:.6f}" in text for _, loss in report.curve)
        assert all(f"{bits:.2f}" in text for bits in report.bits.values())
        assert "3 columns: 23.0 KB" in text


def test_a_budget_goes_where_the_task_is_sensitive(tmp_path):
    collection, ids, loss = planted()
    importance = collection.importance(torch.arange(4000).split(500), loss)
    small = collection.compress("4KB", importance)
    small.save(tmp_path / "small.safetensors")
    size = (tmp_path / "small.safetensors").stat().st_size
    assert 3900 <= size == small.report.file <= 4000
    bits = small.report.bits
    assert bits["1"] == 0 < bits["0"] < bits["2"]
    even = {name: torch.ones_like(part) for name, part in importance.items()}

    def error(tables):
        rows, near = collection(ids).detach(), tables(ids).detach()
        both = rows[:, :8] + rows[:, 16:] - near[:, :8] - near[:, 16:]
        return float(both.square().sum(1).mean())

    assert error(small) < 0.5 * error(collection.compress("4KB", even))
    losses = [expected for _, expected in small.report.curve]
    assert losses == sorted(losses, reverse=True)
    packed = fb.PackedCollection.load(tmp_path / "small.safetensors")
    np.testing.assert_allclose(packed[ids[:50].numpy()], small(ids[:50]).detach(), atol=1e-6)


def test_compressed_columns_stay_shared_and_train_on():
    collection = made({"a": (90, 8, "dense"), "b": "a", "c": (40, 4, "dense")})
    importance = {name: torch.ones(rows) for name, rows in (("a", 90), ("b", 90), ("c", 40))}
    small = collection.compress(2500, importance)
    assert len(small.tables) == 2
    assert small.layout.columns[0].start == small.layout.columns[1].start
    optimizer = fb.AdamW(small.parameters(), lr=0.05)
    ids = torch.tensor([[3, 3, 1]])
    before = small(ids).detach()
    for _ in range(20):
        optimizer.zero_grad()
        small(ids).square().sum().backward()
        optimizer.step()
    assert small(ids).detach().square().sum() < before.square().sum()


@pytest.mark.parametrize(
    ("budget", "change", "message"),
    [
        (100, lambda _: None, "budget=100: the smallest file of these 3 columns has [0-9,]+ bytes"),
        ("4KB", lambda found: found.pop("1"), "importance lacks the column .1.: the columns are"),
        (
            "4KB",
            lambda found: found.update({"1": torch.ones(3)}),
            "importance of '1' has the shape",
        ),
        ("4KB", lambda found: found["1"].fill_(-1), "finite numbers of at least 0"),
        ("4KB", lambda found: [one.zero_() for one in found.values()], "importance is 0 in all"),
        ("four", lambda _: None, "budget='four'"),
    ],
)
def test_bad_budgets_are_one_line(budget, change, message):
    importance = {str(c): torch.ones(n) for c, n in enumerate((400, 300, 20))}
    change(importance)
    with pytest.raises(fb.ArgumentError, match=message):
        planted()[0].compress(budget, importance)


def test_the_golden_collection_gives_its_rows_for_ever():
    folder = Path(__file__).parent / "golden" / "collections"
    packed = fb.PackedCollection.load(folder / "columns.safetensors")
    packed.check()
    golden = json.loads((folder / "columns.json").read_text())
    np.testing.assert_allclose(packed[golden["batch"]], golden["rows"], rtol=1e-6, atol=1e-7)


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
    "an unknown field of a column": lambda m: m["columns"][0].update(more=True),
    "a table of more rows": lambda m: m["tables"][0].update(rows=58),
    "keys that are not there": lambda m: m["columns"][0].update(keys=True),
    "keys of no form": lambda m: m["columns"][0].update(keys={"form": "spoken"}),
    "keys of text": lambda m: m["columns"][0].update(keys="plain"),
    "more shared rows than rows": lambda m: m["columns"][0].update(
        keys={"form": "plain", "shared": 50}
    ),
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


def test_replaced_embeddings_are_collected(tmp_path):
    model = nn.ModuleDict({"user": nn.Embedding(30, 4), "item": nn.EmbeddingBag(20, 8)})
    model["buyer"] = nn.Embedding(30, 4)
    model["buyer"].weight = model["user"].weight
    collection = fb.replace_embeddings(model, "quantized:bits=8", collect=True)
    assert collection.names == ["user", "item", "buyer"]
    assert len(collection.tables) == 2
    with torch.no_grad():
        model["user"].rows.mul_(2)
    collection.save(tmp_path / "model.safetensors")
    rows = fb.PackedCollection.load(tmp_path / "model.safetensors").rows("buyer", [3])
    np.testing.assert_allclose(rows[0], model["user"](torch.tensor(3)).detach(), atol=1e-6)
    plain = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(fb.ArgumentError, match="no embeddings to collect"):
        fb.replace_embeddings(plain, "quantized:bits=8", collect=True)


def test_compiled_collections_check_ids():
    collection = made()
    compiled = torch.compile(collection, fullgraph=True, backend="eager")
    ids = some_ids()
    torch.testing.assert_close(compiled(ids), collection(ids))
    with pytest.raises(IndexError, match="column 'site'"):
        compiled(ids + 50)
