"""Tensor trains: rows against the full tensor, TT-SVD, shapes, and what is refused."""

import pytest
import torch

import featherbed as fb
from featherbed import testing

WITHOUT_A_FILE = (
    testing.check_forward,
    testing.check_gradients,
    testing.check_bags,
    testing.check_logits,
    testing.check_padding,
    testing.check_dtypes,
    testing.check_bad_ids,
    testing.check_seed,
    testing.check_copies,
    testing.check_fit,
)
MAKES = {
    "example": lambda **kw: fb.TensorTrainTable(50, 8, rank=3, **kw),
    "two cores": lambda **kw: fb.TensorTrainTable(50, 8, rank=2, shape=(10, 5), dims=(2, 4), **kw),
    "four cores": lambda **kw: fb.TensorTrainTable(50, 8, rank=4, shape=(3, 3, 2, 3), **kw),
    "spec": lambda **kw: fb.make_table("tensortrain:rank=8", 50, 8, **kw),
}


@pytest.mark.parametrize("check", WITHOUT_A_FILE, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", MAKES)
def test_conformance(name, check):
    check(MAKES[name])


def test_rows_are_those_of_the_full_tensor(tensors):
    table = fb.TensorTrainTable(
        57, 24, rank=5, shape=(3, 4, 5), dims=(2, 3, 4), generator=tensors, dtype=torch.float64
    )
    one, two, three = (
        core.detach().reshape(n, left, m, right)
        for core, n, m, left, right in zip(
            table.cores, table.shape, table.dims, table.ranks, table.ranks[1:], strict=False
        )
    )
    full = torch.einsum("axbr,crds,eshx->acebdh", one, two, three).reshape(60, 24)[:57]
    torch.testing.assert_close(table.weight, full)
    few, many = torch.tensor([56, 0, 13]), torch.arange(57)
    torch.testing.assert_close(table(few), full[few])  # digit by digit
    torch.testing.assert_close(table(many), full)  # all but the last digit at once


def test_both_ways_of_looking_up_give_the_same_gradients(tensors):
    table = fb.TensorTrainTable(
        60, 8, rank=3, shape=(3, 4, 5), generator=tensors, dtype=torch.float64, padding_idx=7
    )
    ids = torch.randint(60, (40,), generator=tensors)
    ids[0] = 7
    slopes = torch.randn(40, 8, dtype=torch.float64, generator=tensors)
    whole = torch.autograd.grad(table(ids), table.cores, slopes)
    pieces = [
        torch.autograd.grad(table(ids[at : at + 1]), table.cores, slopes[at : at + 1])
        for at in range(40)
    ]
    for k, gradient in enumerate(whole):
        torch.testing.assert_close(gradient, sum(piece[k] for piece in pieces))


@pytest.mark.parametrize("std", [1.0, 0.1])
def test_fresh_rows_have_the_spread_asked_for(std, tensors):
    table = fb.TensorTrainTable(1000, 64, rank=16, std=std, generator=tensors)
    assert 0.8 * std < float(table.weight.detach().std()) < 1.25 * std


@pytest.mark.parametrize("rows", [60, 57])
def test_tt_svd_finds_a_train_again(rows, tensors):
    table = fb.TensorTrainTable(
        rows, 24, rank=3, shape=(3, 4, 5), dims=(2, 3, 4), generator=tensors, dtype=torch.float64
    )
    target = table.weight.detach()
    again = fb.TensorTrainTable.from_dense(target, rank=3, shape=(3, 4, 5), dims=(2, 3, 4))
    exact = rows == 60  # otherwise the ids beyond V are filled in by rounds
    assert float((again.weight.detach() - target).norm() / target.norm()) < (
        1e-6 if exact else 1e-2
    )
    rms = [float(core.detach().square().mean().sqrt()) for core in again.cores]
    assert max(rms) < 1.001 * min(rms), "the cores must be of one size"


def test_a_full_rank_holds_any_matrix_and_zeros(tensors):
    matrix = torch.randn(60, 24, generator=tensors, dtype=torch.float64)
    settings = {"rank": 1000, "shape": (3, 4, 5), "dims": (2, 3, 4)}
    table = fb.TensorTrainTable.from_dense(matrix, **settings)
    assert table.ranks == (1, 6, 20, 1)
    torch.testing.assert_close(table.weight, matrix)
    assert not fb.TensorTrainTable.from_dense(torch.zeros(60, 24), **settings).weight.any()


def test_a_truncated_fit_is_near_the_best(tensors):
    matrix = torch.randn(60, 24, generator=tensors, dtype=torch.float64)
    table = fb.TensorTrainTable.from_dense(matrix, rank=4, shape=(3, 4, 5), dims=(2, 3, 4))
    tensor = matrix.reshape(3, 4, 5, 2, 3, 4).permute(0, 3, 1, 4, 2, 5)
    tails = [torch.linalg.svdvals(tensor.reshape(n, -1))[4:].square().sum() for n in (6, 72)]
    error = float((table.weight.detach() - matrix).square().sum())
    assert error <= float(sum(tails)) * (1 + 1e-9)  # Oseledets 2011, theorem 2.2


def test_it_learns(tensors):
    table = fb.TensorTrainTable(200, 8, rank=4, generator=tensors)
    goal = fb.TensorTrainTable(200, 8, rank=2, generator=tensors).weight.detach()
    optimizer = fb.AdamW(table.parameters(), lr=0.03)
    losses = []
    for _ in range(150):
        ids = torch.randint(200, (64,), generator=tensors)
        loss = (table(ids) - goal[ids]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-10:]) < 0.3 * sum(losses[:10])


def test_it_has_sizes_but_no_packed_form(tmp_path):
    table = fb.TensorTrainTable(1000, 64, rank=4)
    assert table.parameter_count() == sum(core.numel() for core in table.parameters())
    assert table.sizes().file == 4 * table.parameter_count()
    optimizer = fb.AdamW(table.parameters())
    (table(torch.tensor([1])).sum()).backward()
    optimizer.step()
    assert table.sizes(optimizer).training >= 16 * table.parameter_count()
    with pytest.raises(fb.NotPackable, match="products of matrices"):
        fb.save(table, tmp_path / "table.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"rank": 0}, "rank=0"),
        ({"shape": (3, 4)}, "holds 12 ids"),
        ({"shape": (50,)}, "at least two"),
        ({"shape": 50}, "at least two"),
        ({"shape": (5, 0)}, "shape=0"),
        ({"dims": (2, 2, 3)}, "the product 12"),
        ({"shape": (10, 5), "dims": (2, 2, 2)}, "differ in length"),
        ({"std": 0}, "std=0"),
    ],
)
def test_bad_settings_are_named(settings, named):
    with pytest.raises(fb.ArgumentError, match=named):
        fb.TensorTrainTable(50, 8, **settings)
