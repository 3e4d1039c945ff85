"""Specs and replace_embeddings."""

import pytest
import torch
from torch import nn

import featherbed as fb
from featherbed.codecs.registry import codec_of
from featherbed.tables.spec import parse_spec


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(40, 8, padding_idx=0)
        self.bag = nn.EmbeddingBag(30, 8, mode="mean")
        self.again = self.words
        self.out = nn.Linear(8, 2)

    def forward(self, words, bag):
        return self.out(self.words(words).mean(1) + self.again(words).sum(1) + self.bag(bag))


@pytest.mark.parametrize(
    "spec",
    ["dense", "anchor:anchors=8", "lowrank:rank=3", "hashed:buckets=9,hashes=1,values=learnt", "remainder:divisor=6",
     "selected:keep=10,rest=2", "quantized:bits=4,scales=column", "anchor:anchors=4,init=xavier(gain=0.5),nonnegative=false"],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::featherbed.errors.FeatherbedWarning")  # 30 rows of width 8
def test_replace_runs_and_trains(spec):
    torch.manual_seed(0)
    model = Model()
    swaps = fb.replace_embeddings(model, spec)
    assert [swap.name for swap in swaps] == ["words", "bag"]
    assert model.again is model.words
    assert model.words.padding_idx == 0
    assert isinstance(model.bag, fb.Bag)
    assert swaps[0].before == 40 * 8 * 4
    assert str(swaps[0].after.file) in str(swaps[0]).replace(",", "")
    model(torch.randint(40, (3, 4)), torch.randint(30, (3, 5))).sum().backward()
    assert all(p.grad is not None for p in model.words.parameters())


def test_replace_starts_from_the_old_rows():
    model = Model()
    old = model(torch.arange(20).reshape(5, 4), torch.arange(20).reshape(5, 4))
    fb.replace_embeddings(model, "quantized:bits=8")
    new = model(torch.arange(20).reshape(5, 4), torch.arange(20).reshape(5, 4))
    torch.testing.assert_close(new, old, atol=0.05, rtol=0.05)


def test_replace_keeps_dtype_and_takes_where_and_callables():
    model = Model().double()
    swaps = fb.replace_embeddings(
        model, lambda weight, padding: fb.LowRankTable.from_dense(weight, rank=2, padding_idx=padding),
        where=lambda name, module: name == "words",
    )  # fmt: skip
    assert [swap.name for swap in swaps] == ["words"]
    assert model.words.dtype == torch.float64
    assert isinstance(model.bag, nn.EmbeddingBag)


def test_replace_refuses_what_it_cannot_do():
    with pytest.raises(fb.ArgumentError, match="max_norm"):
        fb.replace_embeddings(nn.Sequential(nn.Embedding(4, 2, max_norm=1.0)), "dense")
    with pytest.raises(fb.ArgumentError, match="pools by max"):
        fb.replace_embeddings(nn.Sequential(nn.EmbeddingBag(4, 2, mode="max")), "dense")
    with pytest.raises(fb.ArgumentError, match="itself an embedding"):
        fb.replace_embeddings(nn.Embedding(4, 2), "dense")
    with pytest.raises(fb.ArgumentError, match="the module has"):
        fb.replace_embeddings(nn.Sequential(nn.Embedding(4, 2)), lambda w, p: fb.DenseTable(5, 2))


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("anker:anchors=5", "anchor, banded, dense"),
        ("anchor:anchor=5", "takes anchors"),
        ("anchor", "needs anchors"),
        ("anchor:5", "keyword=value"),
        ("anchor:anchors=", "keyword=value"),
        ("anchor:anchors=5,init=xavire(gain=2)", "xavier"),
        ("anchor:anchors=5,init=xavier(gian=2)", "takes gain"),
        ("dense:)+(", "keyword=value"),
        ("dense:padding_idx=1)(padding_idx=2", "keyword=value"),
        ("dense:padding_idx=0)#", "keyword=value"),
        ("dense:padding_idx=abc", "padding_idx='abc'"),
        ("quantized:bits=4.0", "bits=4.0"),
        ("anchor:anchors=5,anchors=6", "twice"),
        ("anchor:anchors=5,init=nope", "init='nope'"),
        ("anchor:anchors=5,init=xavier(gain=abc)", "gain='abc'"),
        ("anchor:anchors=5,dtype=float16", "takes anchors"),
        ("anchor:anchors=5+5", "5 \\+ 5"),
        ("anchor:anchors=__import__('os')", "__import__"),
    ],
)
def test_bad_specs_say_what_is_accepted(spec, named):
    with pytest.raises(fb.ArgumentError, match=named):
        fb.make_table(spec, 10, 4)


def test_spec_values():
    settings = parse_spec(
        "anchor:anchors=5,nonnegative=false,padding_idx=none,init=halfnormal(transform_std=1e-2)"
    )[1]
    assert settings == {
        "anchors": 5,
        "nonnegative": False,
        "padding_idx": None,
        "init": fb.HalfNormal(0.01),
    }
    assert parse_spec("dense:padding_idx=-1")[1] == {"padding_idx": -1}


@pytest.mark.parametrize(
    ("settings", "named"),
    [("8", "keyword=value"), ("bits=", "keyword=value"), ("bits=8,bits=7", "twice"), ("bits=4+4", "4 \\+ 4")],
)  # fmt: skip
def test_tables_and_codecs_share_one_grammar(settings, named):
    for read, name in ((parse_spec, "quantized"), (codec_of, "rq")):
        assert read(f"{name}: bits=4")[1] == {"bits": 4}
        with pytest.raises(fb.ArgumentError, match=named):
            read(f"{name}:{settings}")


def test_replace_refuses_to_untie():
    model = Model()
    model.out = nn.Linear(8, 40, bias=False)
    model.out.weight = model.words.weight
    with pytest.raises(fb.ArgumentError, match="words is also that of out"):
        fb.replace_embeddings(model, "anchor:anchors=4")
    assert isinstance(model.words, nn.Embedding)


def test_replace_shares_what_shared_a_weight():
    model = nn.ModuleDict(
        {
            "a": nn.Embedding(20, 4),
            "b": nn.Embedding(20, 4),
            "c": nn.EmbeddingBag(20, 4, mode="sum"),
        }
    )
    model["b"].weight = model["c"].weight = model["a"].weight
    swaps = fb.replace_embeddings(model, "lowrank:rank=2")
    assert len(swaps) == 1
    assert model["a"] is model["b"] is model["c"].table


def test_replace_changes_all_or_nothing_and_names_the_module():
    model = nn.ModuleDict({"a": nn.Embedding(50, 8), "b": nn.Embedding(10, 8)})
    with pytest.raises(fb.ArgumentError, match="b: keep=20"):
        fb.replace_embeddings(model, "selected:keep=20")
    assert isinstance(model["a"], nn.Embedding)
    with pytest.raises(fb.ArgumentError, match="meta device"):
        fb.replace_embeddings(nn.Sequential(nn.Embedding(5, 2, device="meta")), "dense")
    with pytest.raises(fb.ArgumentError, match="is no table"):
        fb.replace_embeddings(nn.Sequential(nn.Linear(2, 2)), "blah")
    with torch.no_grad():
        model["a"].weight[3, 1] = float("nan")
    with pytest.raises(fb.ArgumentError, match="a: row 3 of the matrix"):
        fb.replace_embeddings(model, "quantized:bits=4")


def test_a_replaced_bag_can_be_saved(tmp_path):
    model = nn.Sequential(nn.EmbeddingBag(20, 4, mode="mean"))
    fb.replace_embeddings(model, "dense")
    fb.save(model[0], tmp_path / "t")
    assert len(fb.load(tmp_path / "t")) == 20
    with pytest.raises(fb.ArgumentError, match="Linear has no packed form"):
        fb.save(nn.Linear(2, 2), tmp_path / "l")


def test_a_larger_table_is_said():
    model = nn.Sequential(nn.Embedding(200, 8), nn.Embedding(5, 2))
    with pytest.warns(
        fb.FeatherbedWarning, match=r"0: the table takes [\d,]+ bytes, more than the 6,400"
    ):
        swaps = fb.replace_embeddings(model, "anchor:anchors=20", lambda name, _: name == "0")
    assert swaps[0].after.file > swaps[0].before
    assert isinstance(model[0], fb.AnchorTable)


def test_headers_of_few_rows_are_no_loss():
    fb.replace_embeddings(nn.Sequential(nn.Embedding(5, 2)), "dense")
