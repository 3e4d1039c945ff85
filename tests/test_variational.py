"""Variational dropout: the divergence against its integral, noise, pruning, and what is stored."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import featherbed as fb
from featherbed import testing
from featherbed.tables.variational import LOUDEST, STARTS, divergence

NOISES = tuple(STARTS)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def pruned(noise, rows=300, dim=8, **settings):
    """Return a table of which a part is pruned, in evaluation mode."""
    table = fb.VariationalTable(rows, dim, noise=noise, generator=seeded(), **settings).eval()
    with torch.no_grad():
        if noise == "row":
            table.log_alpha.uniform_(0, 6, generator=seeded(1))
        else:
            table.log_variance.uniform_(-8, 8, generator=seeded(1))
        if noise == "both":
            table.gates.normal_(generator=seeded(2))
            table.gate_log_variance.uniform_(-8, 8, generator=seeded(3))
    return table


@pytest.mark.parametrize("noise", NOISES)
def test_conformance(noise):
    testing.check_table(lambda **kw: fb.make_table(f"variational:noise={noise}", 50, 8, **kw))


@pytest.mark.parametrize("noise", NOISES)
def test_conformance_of_a_pruned_table(noise):
    for check in (
        testing.check_forward,
        testing.check_gradients,
        testing.check_bags,
        testing.check_logits,
    ):
        check(lambda **kw: _pruned_double(noise, **kw))


def _pruned_double(noise, generator=None, **settings):
    return pruned(noise, rows=50, **settings)


def test_the_divergence_is_that_of_the_log_uniform_prior():
    # KL(N(θ, α θ²) | log-uniform) = E log|ε| - log(α) / 2 + constant, ε ~ N(1, α); the constant makes it 0 as α grows
    grid = (np.arange(2_000_000) + 0.5) / 2_000_000 * 20 - 10
    density = np.exp(-(grid**2) / 2) / math.sqrt(2 * math.pi) * (20 / 2_000_000)

    def exact(log_alpha):
        spread = math.exp(log_alpha / 2)
        return float((density * np.log(np.abs(1 + spread * grid))).sum()) - log_alpha / 2

    at = [-6.0, -3.0, -1.0, 0.0, 1.0, 3.0, 6.0]
    limit = exact(20.0)
    expected = [exact(log_alpha) - limit for log_alpha in at]
    found = divergence(torch.tensor(at, dtype=torch.float64)).tolist()
    np.testing.assert_allclose(found, expected, atol=0.02)
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize("noise", NOISES)
def test_what_is_added_to_the_loss(noise):
    table = pruned(noise, kl=2.0, samples=500).train()
    parts = table._log_alphas(slice(None))
    total = sum(float(divergence(part.detach()).sum()) for part in parts)
    assert float(table.auxiliary().detach()) == pytest.approx(2.0 * total / 500, rel=1e-5)
    table.warm(0.25)
    assert float(fb.auxiliary_loss(table).detach()) == pytest.approx(0.5 * total / 500, rel=1e-5)
    table.warm(0)
    assert table.auxiliary() is None
    table.warm(1)
    assert table.eval().auxiliary() is None


@pytest.mark.parametrize("noise", NOISES)
def test_gradients_of_draws_and_divergence(noise):
    table = fb.VariationalTable(
        6,
        3,
        noise=noise,
        samples=10,
        start=0.5,
        padding_idx=2,
        dtype=torch.float64,
        generator=seeded(),
    )
    names, held = zip(*table.named_parameters(), strict=True)
    ids = torch.tensor([0, 5, 5, 2, 1])

    def loss(*parameters):
        torch.manual_seed(3)
        swapped = dict(zip(names, parameters, strict=True))
        with torch.random.fork_rng(devices=[]):
            rows = torch.func.functional_call(table, swapped, (ids,))
        with torch.nn.utils.stateless._reparametrize_module(table, swapped):
            return rows.sin().sum() + table.auxiliary()

    assert torch.autograd.gradcheck(loss, tuple(p.detach().clone().requires_grad_() for p in held))


def test_noise_has_the_moments_it_says():
    ids = torch.full((40_000,), 1)
    row = fb.VariationalTable(3, 2, noise="row", start=-1.0, generator=seeded())
    mean, found = row.rows.detach()[1], row(ids).detach()
    torch.testing.assert_close(found.mean(0), mean, rtol=0.02, atol=0.02)
    torch.testing.assert_close(found.std(0), mean.abs() * math.exp(-0.5), rtol=0.03, atol=0.01)
    assert torch.allclose(found[:, 0] / mean[0], found[:, 1] / mean[1], atol=1e-4), (
        "one draw for a whole row"
    )
    weight = fb.VariationalTable(3, 2, noise="weight", start=-1.0, generator=seeded())
    found, spread = weight(ids).detach(), weight.log_variance.detach()[1].mul(0.5).exp()
    torch.testing.assert_close(found.std(0), spread, rtol=0.03, atol=0.01)
    assert abs(float(torch.corrcoef(found.T)[0, 1])) < 0.03, "a draw for every entry"
    both = fb.VariationalTable(3, 2, noise="both", start=-1.0, generator=seeded())
    mean, theirs, gate = both.rows.detach()[1], both.log_variance.detach()[1].exp(), math.exp(-1.0)
    expected = (
        theirs * (1 + gate) + mean.square() * gate
    ).sqrt()  # of a product of independent draws
    torch.testing.assert_close(both(ids).detach().std(0), expected, rtol=0.05, atol=0.01)


def test_noise_is_bounded_but_its_gradient_is_not_cut():
    table = fb.VariationalTable(3, 2, start=30.0, threshold=40.0, generator=seeded())
    rows = table(torch.full((1000,), 1))
    assert float(rows.detach().abs().max()) < 6 * math.exp(LOUDEST / 2) * float(
        table.rows.detach().abs().max()
    )
    rows.sum().backward()
    assert float(table.log_alpha.grad[1].abs()) > 0


@pytest.mark.parametrize("noise", NOISES)
def test_training_draws_anew_and_evaluation_does_not(noise):
    table = pruned(noise, padding_idx=4).train()
    ids = torch.arange(20)
    assert not torch.equal(table(ids), table(ids))
    assert not table(ids)[4].any()
    assert not table.weight[4].any()
    assert not torch.equal(table.logits(torch.ones(1, 8)), table.logits(torch.ones(1, 8)))
    torch.manual_seed(5)
    drawn = table.weight
    torch.manual_seed(5)
    torch.testing.assert_close(table.logits(torch.ones(1, 8)), torch.ones(1, 8) @ drawn.T)
    assert torch.equal(table.eval()(ids), table(ids))
    with pytest.raises(fb.ArgumentError, match="width 3"):
        table.train().logits(torch.ones(3))


@pytest.mark.parametrize("noise", NOISES)
def test_packed_rows_are_those_of_evaluation_bit_for_bit(noise):
    table = pruned(noise, padding_idx=5)
    dense = table.weight.detach().numpy()
    kept = np.flatnonzero(dense.any(axis=1))
    assert 0 < len(kept) < 300
    assert table.kept().tolist() == kept.tolist()
    assert table.parameter_count() == (len(kept) * 8 if noise == "row" else np.count_nonzero(dense))
    for layout in ("auto", "all", "ragged", "fixed"):
        assert np.array_equal(table.pack(layout=layout)[np.arange(300)], dense), layout
    with pytest.raises(fb.ArgumentError, match="layout='round'"):
        table.pack(layout="round")


def test_the_smaller_of_rows_and_entries_is_stored():
    table = fb.VariationalTable(2000, 32, noise="weight", generator=seeded()).eval()
    sizes = {layout: table.pack(layout=layout).nbytes for layout in ("auto", "all", "ragged")}
    assert sizes["auto"] == sizes["all"] < sizes["ragged"]
    with torch.no_grad():
        table.log_variance[torch.rand(2000, 32, generator=seeded()) < 0.9] = 20.0
    sizes = {layout: table.pack(layout=layout).nbytes for layout in ("auto", "all", "ragged")}
    assert sizes["auto"] == sizes["ragged"] < 0.3 * sizes["all"]


@pytest.mark.parametrize("noise", NOISES)
def test_a_table_of_which_nothing_is_left(noise, tmp_path):
    table = fb.VariationalTable(50, 4, noise=noise, threshold=-20.0).eval()
    assert not table(torch.arange(50)).any()
    assert table.parameter_count() == 0
    fb.save(table, tmp_path / "empty.safetensors")
    assert not fb.load(tmp_path / "empty.safetensors")[np.arange(50)].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_keep_leaves_as_many_rows_as_asked(dtype):
    table = fb.VariationalTable(40, 4, padding_idx=0, dtype=dtype).eval()
    with torch.no_grad():
        table.log_alpha[:, 0] = torch.linspace(-2, 7, 40, dtype=torch.float64).flip(0).to(dtype)
        table.log_alpha[0] = -9.0  # padding takes no place
    for count in (1, 13, 39):
        table.keep(count)
        assert table.kept().tolist() == list(range(40 - count, 40))
    twin = fb.VariationalTable(40, 4, padding_idx=0, dtype=dtype).eval()
    twin.load_state_dict(table.state_dict())
    assert torch.equal(twin.weight, table.weight), "the threshold belongs to the state"
    with pytest.raises(fb.ArgumentError, match="only 39 rows"):
        table.keep(40)
    with pytest.raises(fb.ArgumentError, match="noise='row'"):
        fb.VariationalTable(4, 2, noise="weight").keep(2)


def trained(noise, optimizer, **settings):
    """Train a classifier of bags in which words 0 to 3 of 40 tell the class, one of them in each document."""
    torch.manual_seed(0)
    random, count = seeded(), 1000
    labels = torch.randint(2, (count,), generator=random)
    documents = torch.randint(4, 40, (count, 8), generator=random)
    documents[:, 0] = 2 * labels + torch.randint(2, (count,), generator=random)
    table = fb.VariationalTable(40, 8, noise=noise, samples=count, generator=random, **settings)
    model = nn.ModuleDict({"table": table, "output": nn.Linear(8, 2)})
    stepper = optimizer(model.parameters(), lr=0.05)
    for _ in range(300):
        batch = torch.randint(count, (128,), generator=random)
        loss = F.cross_entropy(model["output"](table(documents[batch]).mean(1)), labels[batch])
        stepper.zero_grad()
        (loss + fb.auxiliary_loss(model)).backward()
        stepper.step()
    model.eval()
    if noise == "row":
        table.keep(4)
    right = model["output"](table(documents).mean(1)).argmax(1) == labels
    return table, float(right.float().mean())


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, fb.Yogi])
@pytest.mark.parametrize("noise", NOISES)
def test_words_that_matter_are_kept(noise, optimizer):
    table, accuracy = trained(noise, optimizer)
    kept = table.kept().tolist()
    assert kept[:4] == [0, 1, 2, 3]
    assert len(kept) <= (
        8 if (noise, optimizer) == ("weight", fb.Yogi) else 4
    )  # there 300 steps do not prune all others
    assert accuracy > 0.99
    if noise == "row":
        told, others = table.log_alpha.detach()[:4], table.log_alpha.detach()[4:]
        assert float(told.max()) < 0 < float(others.min())


def test_more_weight_prunes_more():
    mild, strong = (
        trained("weight", torch.optim.Adam, kl=kl)[0].parameter_count() for kl in (0.1, 3.0)
    )
    assert strong < mild


def test_plain_descent_works():
    table = fb.VariationalTable(20, 4, samples=100, generator=seeded())
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    before = table.auxiliary().detach()
    for _ in range(20):
        optimizer.zero_grad()
        (table(torch.arange(5)).square().mean() + fb.auxiliary_loss(table)).backward()
        optimizer.step()
    assert bool(torch.isfinite(table.rows).all())
    assert float(table.auxiliary().detach()) < float(before) + 0.1


@pytest.mark.parametrize("padding", [None, 1])
def test_rows_that_group_lasso_left_are_stored_alone(padding):
    dense = fb.DenseTable(400, 8, padding_idx=padding, generator=seeded())
    penalty = fb.GroupL1(2.0)
    with torch.no_grad():
        dense.weight.copy_(penalty.prox(dense.weight, 1.0))
    left = int(dense.weight.any(1).sum())
    assert 0 < left < 400
    selected = fb.selected_rows(dense)
    assert selected.keep == left
    assert torch.equal(selected.weight, dense.weight)
    assert selected.sizes().file < dense.sizes().file
    assert not fb.selected_rows(fb.DenseTable.from_dense(torch.zeros(5, 3))).weight.any()
    with pytest.raises(fb.ArgumentError, match="takes a DenseTable"):
        fb.selected_rows(fb.LowRankTable(5, 3, rank=1))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"noise": "word"}, "noise='word'"),
        ({"kl": -1.0}, "kl=-1.0"),
        ({"samples": 0}, "samples=0"),
        ({"threshold": math.nan}, "threshold=nan"),
        ({"start": "low"}, "start='low'"),
    ],
)
def test_bad_settings_are_named(settings, named):
    with pytest.raises(fb.ArgumentError, match=named):
        fb.VariationalTable(5, 4, **settings)


def test_a_share_is_a_number():
    with pytest.raises(fb.ArgumentError, match="share=-1"):
        fb.VariationalTable(5, 4).warm(-1)
