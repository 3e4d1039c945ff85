"""Tuning: a compressed model comes nearer to the original, in the bytes it had, and all else stays as it was."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

import featherbed as fb
from featherbed.interop import tuning
from featherbed.interop.embedding import PackedEmbedding
from featherbed.interop.swap import compress_model
from featherbed.interop.tuning import Divergence, TrainableEmbedding, measure_model, tune_model

transformers = pytest.importorskip(
    "transformers", reason="models of the transformers library: pip install featherbed[hf]"
)

from featherbed.interop.pretrained import load_model  # noqa: E402

ROWS, DIM = 600, 32
SMALL = {"vocab_size": ROWS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


@pytest.fixture(scope="module", autouse=True)
def no_progress_bars():
    transformers.utils.logging.disable_progress_bar()


def gpt2():
    """Return one whose rows lie in groups, as those of trained models do, and are large enough to matter."""
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**SMALL, n_embd=DIM, n_layer=1, n_head=2, n_positions=32)
    )
    groups = torch.randn(20, DIM)[torch.randint(20, (ROWS,))]
    model.transformer.wte.weight.data = 0.5 * groups + 0.3 * torch.randn(ROWS, DIM)
    model.lm_head.weight = model.transformer.wte.weight
    return model


@pytest.fixture(scope="module")
def pair():
    """An original, and the same with a table 8 times smaller."""
    torch.manual_seed(0)
    original = gpt2()
    model = copy.deepcopy(original)
    compress_model(model, ratio=8, method="opq")
    return original, model


@pytest.fixture
def fresh(pair):
    original, model = (copy.deepcopy(one) for one in pair)
    return original, model


IDS = torch.randint(3, ROWS, (60, 12), generator=torch.Generator().manual_seed(0))
FEW = (
    IDS % 80 + 3
)  # of tokens that recur, so that what is learnt of some pieces is of use for others
QUICK = {"steps": 2, "batch": 2, "validation": IDS[:4]}


def state(model):
    return {name: one.detach().clone() for name, one in model.state_dict().items()}


def test_the_divergence_falls_and_the_bytes_stay(fresh, tmp_path):
    original, model = fresh
    model.transformer.drop.eval()  # a part in another mode than the whole
    model.transformer.h[0].requires_grad_(False)
    modes = [[module.training for module in one.modules()] for one in fresh]
    asked = [one.requires_grad for one in model.parameters()]
    before, teacher = state(model), state(original)
    told = []
    done = tune_model(
        model,
        original,
        IDS[:50],
        validation=IDS[50:],
        steps=60,
        lr=1e-2,
        tell=lambda what, share: told.append(share),
    )

    assert done.after.divergence < 0.8 * done.before.divergence
    assert done.original.divergence == pytest.approx(0, abs=1e-6)
    assert len(done.losses) == len(told) == 60
    assert told[-1] == 1
    after = state(model)
    assert set(after) == set(before)
    assert [name for name in before if not torch.equal(before[name], after[name])] == [
        "transformer.wte.packed"
    ]
    assert before["transformer.wte.packed"].shape == after["transformer.wte.packed"].shape
    assert all(torch.equal(one, original.state_dict()[name]) for name, one in teacher.items())
    assert [[module.training for module in one.modules()] for one in fresh] == modes
    assert [one.requires_grad for one in model.parameters()] == asked
    assert all(one.grad is None for one in model.parameters())
    assert model.lm_head.embedding is model.transformer.wte
    assert isinstance(model.transformer.wte, PackedEmbedding)

    model.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(load_model(tmp_path).eval()(IDS).logits, model.eval()(IDS).logits)


def test_measures_are_means_with_intervals(fresh):
    original, model = fresh
    found = measure_model(model, original, IDS, batch=7)
    with torch.no_grad():
        wanted, given = (one.eval()(IDS).logits.log_softmax(-1) for one in fresh)
    apart = (wanted.exp() * (wanted - given)).sum(-1).mean(1)
    cost = -given[:, :-1].gather(-1, IDS[:, 1:, None]).mean(1)[:, 0]
    assert found.divergence == pytest.approx(apart.mean().item(), rel=1e-4)
    assert found.divergence_error == pytest.approx(
        1.96 * apart.std().item() / math.sqrt(60), rel=1e-3
    )
    assert found.perplexity == pytest.approx(cost.mean().exp().item(), rel=1e-4)
    half = 1.96 * cost.std().item() / math.sqrt(60)
    assert math.log(found.perplexity_high / found.perplexity) == pytest.approx(half, rel=1e-3)
    assert math.log(found.perplexity / found.perplexity_low) == pytest.approx(half, rel=1e-3)
    assert found.divergence > 0
    assert f"perplexity {found.perplexity:.2f}" in str(found)


def test_dropout_takes_no_part(fresh):
    original, model = (one.train() for one in fresh)
    assert measure_model(model, original, IDS) == measure_model(model, original, IDS)
    exact = copy.deepcopy(original)
    compress_model(exact, ratio=2, method="int8")
    done = tune_model(exact, original, IDS, steps=1, lr=1e-9, validation=IDS[:4])
    assert done.losses[0] < 1e-2  # with dropout in either, far more
    assert original.training


def test_norms_learn_where_they_may(fresh):
    original, model = fresh
    before = state(model)
    tune_model(model, original, IDS, norms=True, lr=1e-2, **QUICK)
    changed = {
        name for name, one in model.state_dict().items() if not torch.equal(one, before[name])
    }
    assert "transformer.wte.packed" in changed
    assert changed - {"transformer.wte.packed"}
    assert all(".ln_" in name for name in changed - {"transformer.wte.packed"})


def test_what_brings_the_model_no_nearer_is_not_kept(fresh):
    original, model = fresh
    before = state(model)
    done = tune_model(model, original, FEW[:50], validation=FEW[50:], norms=True, steps=3, lr=5.0)
    assert not done.kept
    assert done.after == done.before
    assert "not kept" in str(done)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert torch.equal(
        model.transformer.wte.weight, PackedEmbedding(model.transformer.wte.table).weight
    )


def test_steps_are_a_share_of_an_array(pair):
    """A model whose rows are 128 times longer is tuned by the same rate."""
    ends = []
    for factor in (1.0, 128.0):
        original = nn.Sequential(nn.Embedding(ROWS, DIM), nn.Linear(DIM, 4, bias=False))
        original[0].weight.data = factor * pair[0].transformer.wte.weight.data
        original[1].weight.data = (
            torch.randn(4, DIM, generator=torch.Generator().manual_seed(1)) / factor
        )
        model = copy.deepcopy(original)
        compress_model(model, ratio=8, method="opq", generator=0)
        done = tune_model(model, original, FEW[:50], validation=FEW[50:], steps=20)
        ends.append(done.after.divergence / done.before.divergence)
    assert ends[0] == pytest.approx(ends[1], rel=0.05)
    assert ends[0] < 1


def test_draws_are_an_argument(pair):
    rows = []
    for seed in (0, 0, 1):
        model = copy.deepcopy(pair[1])
        tune_model(model, pair[0], IDS, generator=torch.Generator().manual_seed(seed), **QUICK)
        rows.append(model.transformer.wte.weight)
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])


@pytest.mark.parametrize("place", ["divergences", "store_trained", "measure_model"])
def test_an_error_on_the_way_leaves_a_model_that_works(fresh, place, monkeypatch):
    original, model = fresh
    modes = [[module.training for module in one.modules()] for one in fresh]
    before, calls, real = state(model), [], getattr(tuning, place)

    def breaks(*given):
        calls.append(1)
        if (
            len(calls) == {"divergences": 4, "store_trained": 1, "measure_model": 2}[place]
        ):  # the first calls measure
            raise RuntimeError("stopped")
        return real(*given)

    monkeypatch.setattr(tuning, place, breaks)
    with pytest.raises(RuntimeError, match="stopped"):
        tune_model(model, original, IDS, norms=True, **QUICK | {"steps": 9})
    assert isinstance(model.transformer.wte, PackedEmbedding)
    assert model.lm_head.embedding is model.transformer.wte
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert [[module.training for module in one.modules()] for one in fresh] == modes
    assert all(one.requires_grad for one in model.parameters())
    assert model(IDS).logits.isfinite().all()


def test_a_rate_that_is_too_high_is_said(fresh, monkeypatch):
    original, model = fresh
    before = state(model)
    monkeypatch.setattr(
        tuning, "divergences", lambda wanted, given: given.logits.mean(-1) * math.nan
    )
    with pytest.raises(fb.ArgumentError, match=r"the loss became nan at step 0: lower lr=0\.5"):
        tuning.distill(
            model,
            original,
            IDS,
            list(model.parameters()),
            torch.Generator(),
            steps=1,
            batch=2,
            lr=0.5,
            tell=print,
        )
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


def test_an_encoder_is_tuned_by_the_cosine_of_its_states():
    sizes = {
        "hidden_size": DIM,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    original = transformers.BertModel(
        transformers.BertConfig(**SMALL, **sizes, max_position_embeddings=32)
    )
    original.embeddings.word_embeddings.weight.data.copy_(torch.randn(ROWS, DIM))
    model = copy.deepcopy(original)
    compress_model(model, ratio=8, method="opq")
    done = tune_model(model, original, FEW[:50], validation=FEW[50:], steps=30, lr=3e-3)
    assert done.after.divergence < done.before.divergence
    assert done.before.perplexity is done.after.perplexity is None
    assert "perplexity" not in str(done)
    with torch.no_grad():
        states = [one.eval()(FEW[50:]).last_hidden_state for one in (original, model)]
    assert done.after.divergence == pytest.approx(
        1 - torch.cosine_similarity(*states, dim=-1).mean().item(), rel=1e-3
    )


class Plain(nn.Module):
    """A language model of nobody's library, with a head that is not tied."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(ROWS, DIM), nn.Linear(DIM, ROWS)

    def forward(self, ids):
        return self.head(torch.tanh(self.words(ids)))


def test_an_encoder_and_decoder_is_tuned_too():
    torch.manual_seed(0)
    sizes = {
        "d_model": DIM,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 1,
        "num_heads": 2,
        "decoder_start_token_id": 0,
    }
    original = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=ROWS, **sizes)
    ).eval()
    model = copy.deepcopy(original)
    compress_model(model, ratio=8, method="opq")
    done = tune_model(model, original, FEW[:50], validation=FEW[50:], steps=30, lr=1e-2)
    assert done.after.divergence < done.before.divergence
    assert done.after.perplexity is None, "what it reads is not what it is to write"


def test_plain_modules_are_tuned_too():
    original = Plain()
    model = copy.deepcopy(original)
    compress_model(model, ratio=8, method="opq")
    done = tune_model(model, original, FEW, steps=40, lr=1e-2)  # a tenth is held back
    assert done.after.divergence < done.before.divergence
    assert done.after.perplexity > 1


# What is learnt is what was packed


@pytest.mark.parametrize(
    ("method", "ratio", "weights"),
    [
        ("int4", 4, None),
        ("int8", 3, None),
        ("opq", 8, None),
        ("pq+norms", 8, None),
        ("hot+pq", 6, "zipf"),
        ("lowrank", 6, None),
    ],
)
def test_learning_starts_at_the_packed_rows(method, ratio, weights):
    matrix = np.random.default_rng(0).standard_normal((ROWS, DIM)).astype(np.float32)
    matrix[5] = 0
    table = fb.compress(matrix, ratio=ratio, method=method, weights=weights, padding_idx=5)
    packed = PackedEmbedding(table, scale=2.0)
    learnt = TrainableEmbedding(packed)
    ids, hidden = torch.tensor([[5, 599], [3, 3]]), torch.randn(3, DIM)
    torch.testing.assert_close(learnt(ids), packed(ids), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(learnt.weight, packed.weight, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(learnt.logits(hidden), packed.logits(hidden), atol=2e-4, rtol=1e-4)
    learnt(ids).square().sum().backward()
    assert any(one.grad is not None and one.grad.any() for one in learnt.parameters())
    again = learnt.pack()
    assert again.nbytes == table.nbytes
    np.testing.assert_allclose(again[np.arange(ROWS)], table[np.arange(ROWS)], atol=0.02)
    assert not again[5].any()


def test_rows_behind_a_cell_are_refused():
    table = fb.KDTable(300, 16, parts=4, choices=8, composer="mlp").pack()
    with pytest.raises(fb.ArgumentError, match="compress by another method"):
        TrainableEmbedding(PackedEmbedding(table))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 0}, "steps=0: give a whole number"),
        ({"batch": 1.5}, "batch=1.5: give a whole number"),
        ({"lr": math.nan}, "lr=nan: give a number above 0"),
        ({"ids": IDS[0]}, r"ids: got \(12,\); give token ids \[sequences, length\]"),
        ({"ids": IDS.float()}, "ids: got"),
        ({"ids": [[1, 2]]}, "ids: got list"),
        ({"ids": IDS[:, :1]}, "at least 2 long"),
        ({"ids": IDS[:5], "validation": None}, "5 sequences are too few"),
        ({"validation": IDS[0]}, "validation: got"),
        ({"original": None}, "original is the model itself"),
    ],
)
def test_what_cannot_be_tuned_changes_nothing(fresh, given, message):
    original, model = fresh
    before = state(model)
    settings = {"original": original, "ids": IDS, "steps": 2, "validation": IDS[:4]} | given
    settings["original"] = settings["original"] or model
    with pytest.raises(fb.FeatherbedError, match=message) as error:
        tune_model(model, **settings)
    assert "\n" not in str(error.value)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


def test_tokens_that_are_not_there(fresh):
    before = state(fresh[1])
    with pytest.raises(IndexError):
        tune_model(fresh[1], fresh[0], IDS + ROWS, steps=2, validation=IDS[:4])
    assert all(torch.equal(one, before[name]) for name, one in fresh[1].state_dict().items())


def test_a_model_that_was_never_compressed(pair):
    with pytest.raises(fb.ArgumentError, match="compress it first"):
        tune_model(copy.deepcopy(pair[0]), pair[0], IDS)


def test_one_piece_has_no_interval(pair):
    found = measure_model(pair[1], pair[0], IDS[:1])
    assert math.isnan(found.divergence_error)
    assert found.perplexity > 1
    assert str(Divergence(0.5, 0.1)) == "divergence 0.50000 ± 0.10000"
