"""Hot rows and a coded tail, as one table."""

import numpy as np
import pytest
import torch

import featherbed as fb
from featherbed import testing
from featherbed.tables.banded import BandedTable
from featherbed.tables.spec import make_table
from featherbed.tables.table import auxiliary_loss, split_codes

TAILS = [
    "anchor:anchors=5",
    "anchor:anchors=9,slots=3",
    "hashed:buckets=6",
    "hashed:buckets=6,values=learnt",
    "remainder:divisor=7",
    "quantized:bits=4,scales=column",
    "product:choices=4,parts=4",
    "kd:choices=4,parts=5",
    "mixed:dims=[8,2],blocks=[10,32]",
]


@pytest.mark.parametrize("tail", TAILS)
def test_conformance(tail):
    ids = torch.tensor([3, 44, 17, 0, 21, 30, 5, 49])
    testing.check_table(lambda **kw: BandedTable(50, 8, hot=ids, tail=tail, **kw))


@pytest.mark.parametrize(
    "head", ["quantized:bits=8", "hashed:buckets=9,values=learnt", "anchor:anchors=4"]
)
def test_heads(head):
    testing.check_packed(
        lambda **kw: BandedTable(50, 8, hot=9, head=head, tail="lowrank:rank=2", **kw)
    )


def test_the_most_frequent_are_hot():
    counts = torch.arange(30) * 11 % 30
    table = BandedTable(30, 4, hot=5, counts=counts, tail="lowrank:rank=2")
    assert set(torch.flatten((~table.cold).nonzero()).tolist()) == set(
        counts.argsort(descending=True)[:5].tolist()
    )
    hot = table.weight.detach()[~table.cold]
    torch.testing.assert_close(hot, table.head_table.weight.detach())
    assert int(torch.linalg.matrix_rank(table.weight.detach()[table.cold])) == 2


def test_packs_into_two_bands():
    table = BandedTable(400, 8, hot=[5, 300, 17], tail="anchor:anchors=4")
    packed = table.pack()
    assert [band.rows for band in packed.bands] == [3, 397]
    np.testing.assert_allclose(packed[:], table.weight.detach().numpy(), rtol=1e-5, atol=1e-6)
    assert table.parameter_count() == 3 * 8 + 397 * 4 + 4 * 8


def test_penalties_and_budgets_reach_the_tail():
    torch.manual_seed(0)
    table = BandedTable(60, 8, hot=10, tail="anchor:anchors=6")
    target = torch.randn(60, 8)
    transform = table.tail_table.transform
    optimizer = fb.Yogi(table.parameters(), 1e-2, penalties={transform: fb.NonNegativeL1(0.5)})
    before = float((table.weight.detach() - target).square().mean())
    for _ in range(100):
        optimizer.zero_grad()
        (table(torch.arange(60)) - target).square().sum(1).mean().backward()
        optimizer.step()
    assert bool((transform >= 0).all())
    assert int(torch.count_nonzero(transform)) < transform.numel()
    assert float((table.weight.detach() - target).square().mean()) < before


def test_losses_and_codes_of_the_tail_are_counted_once():
    table = BandedTable(60, 8, hot=10, tail="product:choices=4,parts=4,variant=centroid").train()
    inner = table.tail_table
    ids = torch.tensor([30, 31, 32])
    table(torch.cat([ids, torch.tensor([1, 2])]))
    mine = float(auxiliary_loss(table).detach())
    inner.training_rows(ids - 10)
    assert mine == pytest.approx(float(auxiliary_loss(inner).detach()), rel=1e-5)
    assert table.code_bits() == inner.code_bits()
    kd = BandedTable(60, 8, hot=10, tail="kd:choices=4,parts=5")
    assert len(split_codes(kd)[0]) == len(kd.tail_table.code_parameters())


def test_spec_with_a_spec_inside():
    table = make_table("banded:hot=6,head='quantized:bits=8',tail='anchor:anchors=3'", 20, 8)
    assert isinstance(table, BandedTable)
    assert isinstance(table.head_table, fb.QuantizedTable)
    assert table.tail_table.anchors == 3
    assert repr(table.described()).count("anchor:anchors=3") == 1


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"hot": 0}, "from 1 to 9"),
        ({"hot": 10}, "from 1 to 9"),
        ({"hot": "five"}, "how many"),
        ({"hot": [1, 1]}, "different"),
        ({"hot": [1, 10]}, "ids go from 0 to 9"),
        ({"hot": [0.5]}, "whole numbers"),
        ({"hot": 3, "tail": "selected:keep=2"}, "hot rows of its own"),
        ({"hot": 3, "tail": "nothing"}, "is no table"),
        ({"hot": 3, "counts": torch.ones(3)}, "one for each of the 10"),
    ],
)
def test_refusals(settings, said):
    with pytest.raises(fb.ArgumentError, match=said):
        BandedTable(10, 8, **settings)


def test_a_head_of_several_bands_is_refused_when_packed():
    table = BandedTable(20, 8, hot=8, head="mixed:dims=[8,2],blocks=[4,4]", tail="lowrank:rank=2")
    with pytest.raises(fb.NotPackable, match="packs into 2 bands"):
        table.pack()
