"""Models of others: a packed table answers as its decoded rows would, ties stay, nothing but the table changes."""

import copy
import json
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import featherbed as fb
from featherbed.interop import embedding
from featherbed.interop.embedding import PackedEmbedding, PackedHead, PackedTwin
from featherbed.interop.swap import compress_model, restore_model

transformers = pytest.importorskip(
    "transformers", reason="models of the transformers library: pip install featherbed[hf]"
)

from featherbed.interop.pretrained import load_model  # noqa: E402

ROWS, DIM = 600, 16
TABLES = {
    "int4": (3, None),
    "opq": (5, None),
    "pq+norms": (4, None),
    "hot+pq": (4, "zipf"),
    "lowrank": (3, None),
}


@pytest.fixture(scope="module", autouse=True)
def no_progress_bars():
    transformers.utils.logging.disable_progress_bar()


def matrix(seed=0):
    rng = np.random.default_rng(seed)
    return (
        rng.standard_normal((30, DIM))[rng.integers(0, 30, ROWS)]
        + 0.4 * rng.standard_normal((ROWS, DIM))
    ).astype(np.float32)


def packed(method="int4", seed=0, **settings):
    ratio, weights = TABLES[method]
    return fb.compress(matrix(seed), ratio=ratio, method=method, weights=weights, **settings)


@pytest.fixture(scope="module", params=[*TABLES, "anchors"])
def table(request):
    return (
        fb.AnchorTable(ROWS, DIM, anchors=20).pack()
        if request.param == "anchors"
        else packed(request.param)
    )


@pytest.fixture(scope="module")
def plain():
    return packed()


def decoded(table):
    return torch.from_numpy(np.array(table[np.arange(len(table))]))


def shrink(model, **settings):
    return compress_model(model, **({"ratio": 3, "method": "int4"} | settings))


# One table against its decoded rows


@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3, 4)])
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_rows_are_those_of_a_dense_embedding(table, shape, scale):
    dense = nn.Embedding.from_pretrained(decoded(table))
    ids = torch.randint(ROWS, shape)
    for kind in (torch.int64, torch.int32):
        found = PackedEmbedding(table, scale=scale)(ids.to(kind))
        torch.testing.assert_close(found, dense(ids) * scale, rtol=1e-6, atol=1e-6)
    assert torch.equal(PackedEmbedding(table).weight, dense.weight)


@pytest.mark.parametrize(
    "shape", [(), (3,), (2, 40), (0,)]
)  # few go through the codes, 80 by composed rows
def test_scores_and_gradients_are_those_of_a_product(table, shape, monkeypatch):
    monkeypatch.setattr(embedding, "BLOCK", DIM * 250)  # three blocks
    hidden = torch.randn(*shape, DIM, requires_grad=True)
    asked = hidden.detach().clone().requires_grad_()
    wanted = asked @ decoded(table).T
    scores = PackedEmbedding(table).logits(hidden)
    weights = torch.randn_like(wanted)
    (wanted * weights).sum().backward()
    (scores * weights).sum().backward()
    torch.testing.assert_close(scores, wanted, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(hidden.grad, asked.grad, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("states", [3, 80])
def test_half_the_bits_of_states_and_rows(plain, states):
    head = PackedEmbedding(plain).to(torch.bfloat16)
    assert head.packed.dtype == torch.uint8
    assert torch.equal(head(torch.arange(9)), decoded(plain)[:9].bfloat16())
    hidden = torch.randn(states, DIM, dtype=torch.bfloat16, requires_grad=True)
    scores = head.logits(hidden)
    scores.float().sum().backward()
    assert scores.dtype == hidden.grad.dtype == torch.bfloat16
    torch.testing.assert_close(
        scores.float(), hidden.detach().float() @ decoded(plain).T, atol=0.2, rtol=0.02
    )


def test_the_padding_row_is_zero():
    rows = matrix()
    rows[7] = 0
    kept = PackedEmbedding(fb.compress(rows, ratio=3, method="int4", padding_idx=7))
    assert kept.padding_idx == 7
    assert not kept(torch.tensor(7)).any()
    assert kept(torch.tensor(8)).any()


def test_a_head_adds_its_bias_and_a_twin_its_scale(plain):
    kept, bias = PackedEmbedding(plain), nn.Parameter(torch.randn(ROWS))
    head, twin = PackedHead(kept, bias), PackedTwin(kept, scale=2)
    hidden, ids = torch.randn(2, 3, DIM), torch.randint(ROWS, (4,))
    torch.testing.assert_close(
        head(hidden), F.linear(hidden, decoded(plain), bias), atol=1e-4, rtol=1e-4
    )
    assert torch.equal(twin(ids), 2 * kept(ids))
    assert list(head.state_dict()) == ["bias"]
    assert not twin.state_dict()
    assert (twin.num_embeddings, twin.embedding_dim, twin.padding_idx) == (ROWS, DIM, None)
    assert (head.in_features, head.out_features) == (DIM, ROWS)
    assert torch.equal(head.weight, kept.weight)


def tied(bias=False):
    model = nn.ModuleDict(
        {"words": nn.Embedding(ROWS, DIM), "head": nn.Linear(DIM, ROWS, bias=bias)}
    )
    model["words"].weight.data = torch.from_numpy(matrix())
    model["head"].weight = model["words"].weight
    return model


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_bytes_of_their_own_and_keep_the_tie(copied):
    model = tied(bias=True)
    shrink(model)
    before = model["words"](torch.tensor([3]))
    other = copied(model)
    assert other["head"].embedding is other["words"] is not model["words"]
    assert torch.equal(other["words"](torch.tensor([3])), before)
    assert other["words"].packed.data_ptr() != model["words"].packed.data_ptr()


def test_new_bytes_give_new_rows():
    one, other = PackedEmbedding(packed(seed=0)), PackedEmbedding(packed(seed=1))
    assert not torch.equal(one(torch.arange(9)), other(torch.arange(9)))
    one.load_state_dict(other.state_dict())
    assert torch.equal(one(torch.arange(9)), other(torch.arange(9)))
    assert one.table.nbytes == other.table.nbytes


def test_bytes_that_are_no_table_are_refused(plain):
    about = PackedEmbedding(plain).metadata()
    with pytest.raises(fb.FormatError, match="not a valid safetensors file"):
        PackedEmbedding.empty(about)(torch.tensor([0]))
    wrong = PackedEmbedding.empty(about | {"rows": 10})
    wrong.load_state_dict(PackedEmbedding(plain).state_dict())
    with pytest.raises(fb.FormatError, match="the model wants 10 x 16"):
        wrong(torch.tensor([0]))


@pytest.mark.parametrize(
    "ids", [torch.tensor([1.5]), torch.tensor([ROWS]), torch.tensor([-1]), [1, 2]]
)
def test_ids_that_are_none(plain, ids):
    with pytest.raises(fb.IdError) as error:
        PackedEmbedding(plain)(ids)
    assert "\n" not in str(error.value)


def test_states_of_another_width(plain):
    with pytest.raises(fb.ArgumentError, match=r"shape \(2, 5\): give \[\.\.\., 16\]"):
        PackedEmbedding(plain).logits(torch.ones(2, 5))


def test_without_bytes_there_are_no_rows(plain):
    with pytest.raises(fb.ArgumentError, match="meta device"):
        PackedEmbedding(plain).to("meta")(torch.tensor([0], device="meta"))
    with pytest.raises(fb.ArgumentError, match="meta device"):
        shrink(tied().to("meta"))


# Models of the transformers library

SMALL = {"vocab_size": ROWS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LAYERS = {
    "hidden_size": DIM,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 8,
}
BART = {
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
}


def gpt2():
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**SMALL, n_embd=DIM, n_layer=1, n_head=2, n_positions=64)
    )


def bert(kind=transformers.BertForMaskedLM):
    return kind(transformers.BertConfig(**SMALL, **LAYERS, max_position_embeddings=64))


def t5():
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            **SMALL,
            d_model=DIM,
            d_kv=8,
            num_layers=1,
            num_heads=2,
            d_ff=32,
            decoder_start_token_id=0,
        )
    )


def bart():
    sizes = {
        "d_model": DIM,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
        "max_position_embeddings": 64,
    }
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            **SMALL, **BART, **sizes, scale_embedding=True, decoder_start_token_id=2
        )
    )


def llama(tie=True):
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMALL, **LAYERS, tie_word_embeddings=tie)
    )


def gemma3():
    return transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**SMALL, **LAYERS, num_key_value_heads=1)
    )


FAMILIES = {
    "gpt2": gpt2,
    "bert": bert,
    "bert-body": lambda: bert(transformers.BertModel),
    "t5": t5,
    "bart": bart,
    "llama": llama,
    "llama-untied": lambda: llama(tie=False),
    "gemma3": gemma3,
}
IDS = torch.randint(3, ROWS, (2, 7), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def answer(model):
    more = (
        {"decoder_input_ids": IDS}
        if isinstance(model, transformers.T5ForConditionalGeneration)
        else {}
    )
    return model.eval()(input_ids=IDS, **more)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_keeps_all_but_its_table(family, tmp_path):
    model = FAMILIES[family]()
    dense = copy.deepcopy(model)
    untied = {
        name
        for name, one in dense.named_parameters(remove_duplicate=False)
        if one is not dense.get_input_embeddings().weight
    }
    (found,) = shrink(model)
    assert isinstance(model.get_input_embeddings(), PackedEmbedding | PackedTwin)
    kept = dict(model.named_parameters(remove_duplicate=False))
    assert set(kept) == untied
    assert all(torch.equal(one, dense.get_parameter(name)) for name, one in kept.items())
    dense.get_input_embeddings().weight.data = decoded(found.table)
    dense.tie_weights()
    torch.testing.assert_close(answer(model), answer(dense), atol=1e-5, rtol=1e-4)

    model.save_pretrained(tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} <= {".json", ".safetensors"}
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["quantization_config"]["quant_method"] == "featherbed"
    assert "auto_map" not in stored
    again = type(model).from_pretrained(tmp_path)
    assert torch.equal(answer(again), answer(model))


def test_the_table_is_there_once():
    model = gpt2()
    dense = sum(one.nbytes for one in model.state_dict().values()) - model.lm_head.weight.nbytes
    (found,) = shrink(model)
    assert (found.name, found.heads) == ("transformer.wte", ("lm_head",))
    assert (
        sum(one.nbytes for one in model.state_dict().values()) == dense - found.before + found.after
    )
    assert found.before == ROWS * DIM * 4
    assert model.lm_head.embedding is model.transformer.wte
    model.tie_weights()
    assert model.lm_head.embedding is model.transformer.wte
    assert "tied to lm_head" in str(found)


@pytest.mark.parametrize("family", ["gpt2", "bart", "llama"])
def test_it_writes_on_as_the_decoded_model_does(family):
    model = FAMILIES[family]().eval()
    dense = copy.deepcopy(model)
    (found,) = shrink(model)
    dense.get_input_embeddings().weight.data = decoded(found.table)
    dense.tie_weights()
    written = [
        one.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=6, do_sample=False)
        for one in (model, dense)
    ]
    assert torch.equal(*written)
    assert written[0].shape[1] > 1


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    torch.manual_seed(0)
    model, folder = gpt2().eval(), tmp_path_factory.mktemp("models") / "gpt2"
    shrink(model)
    model.save_pretrained(folder)
    return model, folder


def test_the_automatic_classes_read_it(saved):
    model, folder = saved
    again = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(answer(again), answer(model))
    assert again.lm_head.embedding is again.transformer.wte
    body = transformers.AutoModel.from_pretrained(folder)
    assert torch.equal(answer(body), answer(model.transformer))


def test_a_body_is_read_under_other_heads(tmp_path):
    body = bert(transformers.BertModel)
    shrink(body)
    body.save_pretrained(tmp_path / "body")
    judge = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "body")
    assert torch.equal(answer(judge.bert), answer(body))
    judge.save_pretrained(tmp_path / "judge")
    assert torch.equal(answer(load_model(tmp_path / "judge")), answer(judge))
    guesser = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "body")
    assert guesser.cls.predictions.decoder.embedding is guesser.get_input_embeddings()


def test_a_loaded_model_is_saved_again(saved, tmp_path):
    model, folder = saved
    load_model(folder).save_pretrained(tmp_path)
    assert torch.equal(answer(load_model(tmp_path)), answer(model))
    assert (tmp_path / "model.safetensors").stat().st_size == (
        folder / "model.safetensors"
    ).stat().st_size


def test_it_is_loaded_in_fewer_bits(saved):
    model, folder = saved
    half = load_model(folder, dtype=torch.bfloat16)
    assert half.transformer.wte.dtype == answer(half).dtype == torch.bfloat16
    torch.testing.assert_close(answer(half).float(), answer(model), atol=0.05, rtol=0.05)


def test_all_but_the_table_learns(saved):
    model = load_model(saved[1]).train()
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert all(one.grad is not None and one.grad.any() for one in model.parameters())
    assert model.transformer.wte.packed.grad is None


def test_folders_that_are_none(tmp_path):
    with pytest.raises(fb.DataError, match=r"holds no config\.json"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "architectures": ["Nothing"]})
    )
    with pytest.raises(fb.ArgumentError, match="'Nothing'"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nothing"}))
    with pytest.raises(fb.DataError, match="nothing") as error:
        load_model(tmp_path)
    assert "\n" not in str(error.value)


def test_a_config_of_another_model(saved, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((saved[1] / name).read_bytes())
    stored = json.loads((tmp_path / "config.json").read_text())
    tables = stored["quantization_config"]["tables"]
    stored["quantization_config"]["tables"] = {"elsewhere": tables["transformer.wte"]}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(
        fb.DataError, match="names 'elsewhere', which GPT2LMHeadModel does not have"
    ):
        load_model(tmp_path)


# Plain modules


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(ROWS, DIM, padding_idx=0), nn.Embedding(40, DIM)
        self.items, self.again = nn.Embedding(2 * ROWS, DIM), nn.Embedding(ROWS, DIM)
        self.bag, self.norm = nn.EmbeddingBag(ROWS, DIM), nn.LayerNorm(DIM)
        self.again.weight = self.words.weight

    def forward(self, ids):
        rows = (
            self.words(ids)
            + self.places(ids % 40)
            + self.items(ids)
            + self.again(ids)
            + self.bag(ids[:, None])
        )
        return self.norm(rows)


def test_plain_modules_lose_their_large_embeddings_only():
    model = Several()
    others = {
        name: one.clone()
        for name, one in model.named_parameters()
        if name.startswith(("places", "bag", "norm"))
    }
    items, words = shrink(model)
    assert (items.name, words.name, words.also) == ("items", "words", ("again",))
    assert isinstance(model.again, PackedTwin)
    assert model.again.embedding is model.words
    assert model.words.padding_idx == 0
    assert {name for name, _ in model.named_parameters()} == set(others)
    assert all(torch.equal(one, model.get_parameter(name)) for name, one in others.items())
    ids = torch.arange(1, 9)
    dense = Several()
    dense.load_state_dict(others, strict=False)
    dense.words.weight.data, dense.items.weight.data = decoded(words.table), decoded(items.table)
    torch.testing.assert_close(model(ids), dense(ids))


def test_tables_are_chosen_by_where_and_restored():
    model = Several()
    (found,) = shrink(model, ratio=2.2, method="int8", where=lambda name, module: name == "items")
    assert found.name == "items"
    assert isinstance(model.words, nn.Embedding)
    fresh = restore_model(Several(), model.state_dict())
    ids = torch.arange(1, 9)
    assert torch.equal(fresh(ids), model(ids))
    assert torch.equal(
        restore_model(fresh, model.state_dict())(ids), model(ids)
    )  # of a model that is packed already


def test_ties_are_restored():
    model = tied(bias=True)
    shrink(model)
    fresh = restore_model(tied(bias=True), model.state_dict())
    assert fresh["head"].embedding is fresh["words"]
    hidden = torch.randn(2, DIM)
    assert torch.equal(fresh["head"](hidden), model["head"](hidden))


def test_weights_and_seeds_reach_the_tables():
    used = np.ones(ROWS)
    used[:50] = 1e4
    errors = []
    for weights in (None, {"words": used}):
        model = tied()
        (found,) = shrink(model, ratio=5, method="pq", weights=weights, generator=3)
        errors.append(
            float((decoded(found.table)[:50] - torch.from_numpy(matrix()[:50])).square().mean())
        )
    assert errors[1] < errors[0]


@pytest.mark.parametrize("method", ["int4", "opq", "layered"])
def test_tokens_that_were_never_used_may_be_zero(method):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(ROWS, DIM), nn.Linear(DIM, 2))
    model[0].weight.data[[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ROWS - 1]] = 0
    before = model[0].weight.detach().clone()
    (done,) = compress_model(model, ratio=3, method=method)
    after = model[0](torch.arange(ROWS)).detach()
    assert float((after - before).square().sum() / before.square().sum()) < 0.35
    assert float(after[0].norm()) < 0.5 * float(before[20:40].norm(dim=1).mean())
    assert np.isfinite(done.table.report.quality["error"])


def test_kinds_and_modes_stay():
    model = tied().to(torch.bfloat16).eval()
    shrink(model)
    assert model["words"](torch.tensor([1])).dtype == torch.bfloat16
    assert not any(module.training for module in model.modules())


# What cannot be done is said, and changes nothing


class Loud(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) + 1


class Doubled(nn.Linear):
    def forward(self, hidden):
        return 2 * super().forward(hidden)


def with_a_view():
    model = tied()
    model.register_parameter("part", nn.Parameter(model["words"].weight.data[:10]))
    return model


def with_another(kind):
    model = tied()
    model["other"] = kind
    kind.weight = model["words"].weight
    return model


def with_norm():
    model = nn.Sequential(nn.Embedding(ROWS, DIM))
    nn.utils.parametrizations.weight_norm(model[0])
    return model


def packed_already():
    model = tied()
    shrink(model)
    return model


REFUSED = {
    "no embeddings": (lambda: nn.Sequential(nn.Linear(4, 4)), {}, "has no nn.Embedding"),
    "small ones": (
        lambda: nn.Sequential(nn.Embedding(40, 4)),
        {},
        r"0 \(40 x 4\); choose by where=",
    ),
    "none chosen": (tied, {"where": lambda name, module: False}, r"words \(600 x 16\)"),
    "an embedding": (lambda: nn.Embedding(ROWS, DIM), {}, "itself an embedding"),
    "no module": (lambda: "model", {}, "got str"),
    "ratio": (tied, {"ratio": 0.5}, "ratio=0.5"),
    "two targets": (tied, {"budget": "3KB"}, "exactly one of"),
    "too small": (tied, {"ratio": 100}, "words: int4: nothing fits"),
    "method": (tied, {"method": "magic"}, "magic"),
    "a view": (with_a_view, {}, r"part \(10, 16\) shares memory with the embedding \(600, 16\)"),
    "a bag": (
        lambda: with_another(nn.EmbeddingBag(ROWS, DIM)),
        {},
        "other.weight of a EmbeddingBag",
    ),
    "a head of its own kind": (
        lambda: with_another(Doubled(DIM, ROWS, bias=False)),
        {},
        "other.weight of a Doubled",
    ),
    "an embedding of its own kind": (lambda: nn.Sequential(Loud(ROWS, DIM)), {}, "0 is a Loud"),
    "max_norm": (
        lambda: nn.Sequential(nn.Embedding(ROWS, DIM, max_norm=1.0)),
        {},
        "0 has max_norm",
    ),
    "computed rows": (with_norm, {}, "computed from other parameters"),
    "twice": (packed_already, {}, "compressed already"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_changes_nothing(case):
    make, settings, message = REFUSED[case]
    model = make()
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    state = (
        {name: (one.data_ptr(), one.clone()) for name, one in model.state_dict().items()}
        if modules
        else {}
    )
    with pytest.raises(fb.FeatherbedError, match=message) as error:
        shrink(model, **settings)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400
    assert [id(one) for one in modules] == ([id(one) for one in model.modules()] if modules else [])
    for name, (place, value) in state.items():
        assert model.state_dict()[name].data_ptr() == place
        assert torch.equal(model.state_dict()[name], value)


def test_an_error_at_the_second_table_leaves_the_first():
    model = nn.ModuleDict({"good": nn.Embedding(2 * ROWS, DIM), "bad": nn.Embedding(ROWS, DIM)})
    model["bad"].weight.data[3, 3] = float("nan")
    with pytest.raises(fb.FeatherbedError, match="bad: "):
        shrink(model)
    assert isinstance(model["good"], nn.Embedding)


def test_states_that_do_not_fit():
    with pytest.raises(fb.ArgumentError, match="holds no packed table"):
        restore_model(tied(), tied().state_dict())
    with pytest.raises(fb.ArgumentError, match="'words', where the model has NoneType"):
        restore_model(nn.Sequential(nn.Linear(2, 2)), packed_already().state_dict())
