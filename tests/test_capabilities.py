"""Training loops ask tables what they can do; nobody checks their type."""

import re
from pathlib import Path

import pytest
import torch

import featherbed as fb
from featherbed.tables.spec import parse_spec

ROOT = Path(__file__).parent.parent
SPECS = {
    "anchor": "anchor:anchors=5",
    "slots": "anchor:anchors=5,slots=2",
    "growing": "growinganchor:anchors=5",
    "mixture": "mixture:anchors=3",
    "dense": "dense",
    "lowrank": "lowrank:rank=3",
    "selected": "selected:keep=7",
    "variational": "variational",
    "quantized": "quantized",
    "banded": "banded:hot=7,tail=lowrank:rank=3",
    "kd": "kd:choices=4,parts=3",
    "product": "product:choices=4,parts=4",
    "centroid": "product:choices=4,parts=4,variant=centroid",
    "tensortrain": "tensortrain:rank=3",
}


def made(name, **extra):
    spec = SPECS[name] if name != "banded" else "banded:hot=7"
    return fb.make_table(spec, 60, 8, generator=torch.Generator().manual_seed(0), **extra)


@pytest.mark.parametrize(
    ("capability", "names"),
    [
        ("has_anchors", {"anchor", "slots", "growing", "mixture"}),
        ("sparse_codes", {"anchor", "slots", "growing"}),
        ("grows", {"growing"}),
        ("is_dense", {"dense"}),
        ("selects_rows", {"selected"}),
    ],
)
def test_a_spec_answers_before_a_table_exists(capability, names):
    specs = {name: spec for name, spec in SPECS.items() if name != "banded"}
    assert {
        name for name, spec in specs.items() if getattr(parse_spec(spec)[0], capability)
    } == names


def test_penalized_parameters():
    for name in ("anchor", "slots", "growing", "mixture"):
        table = made(name)
        assert [*map(id, table.penalized)] == [id(table.transform)]
        assert table.nonnegative
        assert table.anchor_count == len(table.atoms)
    dense = made("dense")
    assert [*map(id, dense.penalized_rows)] == [id(dense.weight)]
    assert not dense.penalized
    assert not made("lowrank").penalized


def test_factors_are_the_rows():
    for name in ("anchor", "growing", "dense"):
        rows, atoms = made(name).factors
        assert rows.shape[0] == 60
        assert (atoms is None) == (name == "dense")
    assert made("slots").factors is None
    assert made("mixture").factors is None

    class Doubled(fb.AnchorTable):
        def lookup(self, ids):
            return 2 * super().lookup(ids)

    assert Doubled(60, 8, anchors=5).factors is None


@pytest.mark.parametrize("name", SPECS)
def test_every_table_scales_its_initial_rows(name):
    table = made(name).eval()
    before = float(table.weight.detach().std())
    assert before > 0.1
    table.scale_initial_rows(0.02)
    assert float(table.weight.detach().std()) == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("name", ["product", "centroid"])
def test_scaling_keeps_the_codes_and_takes_the_queries_along(name):
    table = made(name).eval()
    codes, queries = table.codes_of(), table.queries.detach().clone()
    factor = 0.02 / float(table.weight.detach().std())
    table.scale_initial_rows(0.02)
    assert torch.equal(table.codes_of(), codes)
    torch.testing.assert_close(table.queries.detach(), factor * queries)


def test_the_divergence_of_a_variational_table_is_warmed_up():
    table = made("variational")
    (warmup,) = table.schedulers(10)
    assert table.share == 0
    for _ in range(5):
        assert not warmup.reached
        warmup.step()
    assert warmup.reached
    assert table.share == 1
    assert made("dense").schedulers(10) == []


def test_emptied_rows_are_pruned():
    table = made("dense", padding_idx=0)
    assert table.pruned() is table
    with torch.no_grad():
        table.weight[10:] = 0
    assert table.pruned_parameter_count() == 10 * 8
    pruned = table.pruned()
    assert pruned.keep == 9
    torch.testing.assert_close(pruned.weight, table.weight.detach())


def test_the_objects_of_anchors_over_all_sets():
    counts = torch.arange(60).flip(0)
    anchors = fb.AnchorTable(60, 8, anchors=2, init=fb.Frequency(counts))
    assert anchors.anchor_objects().tolist() == [0, 1]
    mixture = fb.MixtureTable(60, 8, anchors=2, inits=fb.Frequency(counts))
    assert mixture.anchor_objects().tolist() == [0, 1, 0, 1]
    assert made("mixture").anchor_objects() is None
    assert made("dense").anchor_objects() is None
    graph = fb.Graph.from_edges(60, [(5, 0), (7, 1)])
    assert len(anchors.related(graph)) == 2
    assert len(mixture.related(graph)) == 4
    with pytest.raises(fb.ArgumentError, match="no anchors that a graph"):
        made("dense").related(graph)
    with pytest.raises(fb.ArgumentError, match="over 5 objects"):
        mixture.related(fb.Graph.from_edges(5, [(1, 2)]))


def test_settings_for_a_number_of_parameters():
    kind, settings = parse_spec("lowrank")
    rank = kind.settings_for(640, 60, 8, settings)["rank"]
    assert fb.LowRankTable(60, 8, rank=rank).parameter_count() == pytest.approx(640, rel=0.1)
    keep = fb.SelectedTable.settings_for(80, 60, 8, {"rest": 2})["keep"]
    assert fb.SelectedTable(60, 8, keep=keep, rest=2).parameter_count() == 80
    assert fb.DenseTable.settings_for(80, 60, 8, {}) is None


def test_no_module_outside_of_tables_checks_the_type_of_a_table():
    pattern = re.compile(r"(isinstance\([^)]*|issubclass\([^)]*)\b(\w+Table)\b")
    found = []
    for folder in (ROOT / "src/featherbed", ROOT / "research/runners"):
        for path in sorted(folder.rglob("*.py")):
            if path.is_relative_to(ROOT / "src/featherbed/tables"):
                continue
            found += [
                f"{path.relative_to(ROOT)}: {match.group(0)}"
                for match in pattern.finditer(path.read_text())
                if match.group(2) != "PackedTable"
            ]
    assert not found
