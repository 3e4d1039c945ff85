"""Mixed dimensions: blocks by popularity, each with a width of its own."""

import numpy as np
import pytest
import torch

import featherbed as fb
from featherbed import testing
from featherbed.tables.mixed import MixedTable
from featherbed.tables.spec import make_table

COUNTS = torch.tensor([3, 50, 1, 9, 40, 2, 30, 8])


@pytest.mark.parametrize(
    "settings",
    [
        {"dims": (8, 3), "blocks": (20, 30)},
        {"dims": (6, 2, 1), "counts": torch.arange(50) % 17 + 1},
        {"dims": (4, 8), "blocks": (10, 40), "sparse": True},
        {"dims": (5,)},
    ],
)
def test_conformance(settings):
    testing.check_table(lambda **kw: MixedTable(50, 8, **settings, **kw))


def test_every_id_has_a_row_of_its_own():
    """The index of the often cited comparison collided across blocks."""
    table = MixedTable(60, 8, dims=[8, 4, 2], blocks=[7, 20, 33], counts=torch.arange(60) * 7 % 60)
    rows = table.weight.detach()
    assert len(torch.unique(rows, dim=0)) == 60
    taken = {(int(b), int(p)) for b, p in zip(table.block, table.place, strict=True)}
    assert len(taken) == 60
    for number, size in enumerate((7, 20, 33)):
        assert sorted(p for b, p in taken if b == number) == list(range(size))


def test_popular_ids_are_wide():
    table = MixedTable(8, 4, dims=[4, 2, 1], blocks=[2, 2, 4], counts=COUNTS)
    assert set(torch.flatten((table.block == 0).nonzero()).tolist()) == {1, 4}
    assert set(torch.flatten((table.block == 1).nonzero()).tolist()) == {6, 3}
    with torch.no_grad():
        narrow = table.weight[table.block == 2]
    assert int(torch.linalg.matrix_rank(narrow)) == 1
    assert table.parameter_count() == 2 * 4 + 2 * 2 + 2 * 4 + 4 * 1 + 1 * 4


def test_blocks_by_counts_have_equal_shares():
    counts = torch.tensor([1.0 / (i + 1) for i in range(1000)])
    table = MixedTable(1000, 16, dims=[16, 8, 4, 2], counts=counts)
    shares = [float(counts[table.block.cpu() == b].sum() / counts.sum()) for b in range(4)]
    assert all(abs(share - 0.25) < 0.05 for share in shares), shares
    assert list(table.blocks) == sorted(table.blocks)
    assert MixedTable(9, 4, dims=[4, 2, 1]).blocks == (3, 3, 3)
    assert MixedTable(4, 4, dims=[4, 2, 1], counts=torch.tensor([100, 0, 0, 0])).blocks == (1, 1, 2)


def test_training_moves_the_rows_looked_up_alone():
    table = MixedTable(40, 8, dims=[8, 2], blocks=[10, 30])
    table(torch.tensor([3, 25])).sum().backward()
    assert torch.flatten(table.tables[0].weight.grad.abs().sum(1).nonzero()).tolist() == [3]
    assert torch.flatten(table.tables[1].coefficients.grad.abs().sum(1).nonzero()).tolist() == [15]


def test_low_rank_blocks_are_fitted_exactly():
    torch.manual_seed(0)
    matrix = torch.cat([torch.randn(10, 8), torch.randn(30, 2) @ torch.randn(2, 8)])
    table = MixedTable.from_dense(matrix, dims=[8, 2], blocks=[10, 30])
    torch.testing.assert_close(table.weight, matrix, rtol=1e-4, atol=1e-4)
    packed = table.pack()
    assert [band.rows for band in packed.bands] == [10, 30]
    np.testing.assert_allclose(packed[:], matrix.numpy(), rtol=1e-4, atol=1e-4)
    small = table.pack("int4")  # 30 rows of a byte and two scales, where there were 30 of 8 bytes
    assert packed.nbytes - small.nbytes == 30 * 8 - (30 + 8)


def test_spec():
    table = make_table("mixed:dims=[8,2],blocks=[5,15]", 20, 8)
    assert isinstance(table, MixedTable)
    assert table.blocks == (5, 15)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dims": 4}, "width of each block"),
        ({"dims": []}, "width of each block"),
        ({"dims": [9, 2]}, "at most as wide"),
        ({"dims": [4, 0]}, "at least 1"),
        ({"dims": [4, 2], "blocks": [5, 6]}, "10 together"),
        ({"dims": [4, 2], "blocks": [10]}, "each of the 2 blocks"),
        ({"dims": [1] * 11}, "at least as many ids"),
        ({"dims": [4, 2], "counts": torch.ones(9)}, "one for each of the 10"),
        ({"dims": [4, 2], "counts": torch.full((10,), float("nan"))}, "NaN"),
    ],
)
def test_refusals(settings, said):
    with pytest.raises(fb.ArgumentError, match=said):
        MixedTable(10, 8, **settings)
