"""Models of the papers: readers of graphs and tagged texts, searches by codes, tagging; runs and bad input."""

import gzip
import io
import pickle
import tarfile
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch

from featherbed.errors import ArgumentError, DataError
from research.harness import command
from research.harness.records import Run
from research.harness.settings import read_experiment
from research.models.gcn import GraphNetwork, make_table, propagation, run_gcn
from research.models.hashes import answers, by_codes, exact, measured
from research.models.tagging import (
    Tagger,
    batch_of,
    batches,
    coded,
    entity_graph,
    may_follow,
    opened_encoder,
    run_tagging,
    tags_of,
)
from research.sources.citations import generated_graph, open_planetoid, read_planetoid
from research.sources.neighbors import open_rows
from research.sources.tagging import entities_of, generated_sentences, open_tagged

pytest.importorskip("torchcrf")
pytest.importorskip("seqeval")
GCN = {"graph": "cora", "features": False, "table": "dense", "dim": 8, "hidden": 8, "dropout": 0.5}


# graphs


def planetoid_files(name="toy", nodes=30, words=12):
    """The files of a graph as Planetoid's programs write them: the first 4 nodes train, the last 10 test."""
    from scipy.sparse import csr_matrix

    rng = np.random.default_rng(0)
    hot = np.eye(2)[np.arange(nodes) % 2]
    features = csr_matrix((rng.random((nodes, words)) < 0.4).astype(np.float32))
    test = rng.permutation(np.arange(20, nodes))
    neighbors = {i: [(i + 2) % nodes, i] for i in range(nodes)}
    parts = {
        "x": features[:4],
        "y": hot[:4],
        "allx": features[:20],
        "ally": hot[:20],
        "tx": features[test],
        "ty": hot[test],
        "graph": neighbors,
    }
    files = {kind: pickle.dumps(value, protocol=2) for kind, value in parts.items()}
    files["test.index"] = "\n".join(map(str, test)).encode()
    return {f"ind.{name}.{kind}": content for kind, content in files.items()}, features, hot


def written(folder, files, packed=False):
    folder.mkdir(exist_ok=True)
    if packed:
        with tarfile.open(folder / "ind.toy.tar.gz", "w:gz") as archive:
            for name, content in files.items():
                member = tarfile.TarInfo(f"data/{name}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    else:
        for name, content in files.items():
            (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("packed", [False, True])
def test_any_planetoid_folder_is_read(tmp_path, packed):
    files, features, hot = planetoid_files()
    graph = read_planetoid(written(tmp_path / "planetoid", files, packed), "toy")
    assert graph.labels.tolist() == hot.argmax(1).tolist()
    assert (graph.nodes, graph.train.tolist(), graph.test.tolist()) == (
        30,
        [0, 1, 2, 3],
        [*range(20, 30)],
    )
    assert len(graph.arcs) == 60
    assert (graph.arcs[:, 0] != graph.arcs[:, 1]).all()
    bags = features.toarray()
    bags = bags / np.maximum(bags.sum(1, keepdims=True), 1e-12)
    assert np.allclose(graph.features.toarray(), bags)


def test_a_graph_without_features_trains_learned_rows_only(tmp_path):
    files, *_ = planetoid_files()
    del files["ind.toy.allx"]
    folder = written(tmp_path / "planetoid", files)
    graph = read_planetoid(folder, "toy")
    assert graph.features is None
    make_table(graph, GCN, 0)
    with pytest.raises(DataError, match=r"holds no ind\.toy\.allx: rows with features need it"):
        make_table(graph, {**GCN, "features": True}, 0)


def test_bad_graphs_are_one_message(tmp_path):
    files, *_ = planetoid_files()
    folder = written(tmp_path / "planetoid", files)
    with pytest.raises(DataError, match=r"holds no ind\.cora\.y.*graphs it has files of are toy"):
        read_planetoid(folder, "cora")
    with pytest.raises(DataError, match="holds no folder planetoid with ind"):
        open_planetoid("planetoid", tmp_path / "elsewhere")
    for kind, content, message in (
        ("graph", pickle.dumps({0: [99]}), "cannot be read|names nodes|do not belong"),
        ("ally", pickle.dumps(Counter(), protocol=2), r"asks for collections\.Counter"),
        ("ty", b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.", r"asks for os\.system"),
        ("y", b"no pickle", "cannot be read"),
        ("test.index", b"3\nfour\n", "cannot be read"),
    ):
        broken = written(tmp_path / kind, {**files, f"ind.toy.{kind}": content})
        with pytest.raises(DataError, match=message):
            read_planetoid(broken, "toy")
    (tmp_path / "archive").mkdir()
    (tmp_path / "archive" / "ind.toy.tar.gz").write_bytes(b"no archive")
    with pytest.raises(DataError, match="is no archive"):
        read_planetoid(tmp_path / "archive", "toy")


def test_real_graphs(data):
    source = open_planetoid("planetoid", data)
    cora, pubmed = source.graph("cora"), source.graph("pubmed")
    assert (cora.nodes, len(cora.arcs) // 2, cora.features.shape[1]) == (2708, 5278, 1433)
    assert [len(part) for part in (cora.train, cora.validation, cora.test)] == [140, 500, 1000]
    assert (pubmed.nodes, len(pubmed.arcs) // 2, pubmed.labels.max()) == (19717, 44324, 2)
    assert "ind.pubmed.allx" in pubmed.absent


def test_the_network_equals_dense_algebra():
    graph = generated_graph()
    for features in (False, True):
        settings = {**GCN, "features": features}
        model = GraphNetwork(make_table(graph, settings, 0), graph, settings).eval()
        rows, spread = model.rows(), propagation(graph).to_dense()
        inputs = (
            torch.from_numpy(graph.features.toarray()) @ rows if features else model.first(rows)
        )
        scores = spread @ model.last((spread @ inputs).relu())
        assert torch.allclose(model(rows), scores, atol=1e-5)
    degrees = np.bincount(graph.arcs[:, 0], minlength=graph.nodes) + 1
    i, j = graph.arcs[0]
    assert float(spread[i, j]) == pytest.approx(1 / np.sqrt(degrees[i] * degrees[j]))


def test_shared_nodes_and_guides_train():
    source = open_planetoid("planetoid", quick=True)
    more = {"lr": 0.01, "code_lr": 0.1, "weight_decay": 5e-4, "epochs": 8, "patience": 8}
    for row in (
        {"p": 0.2, "rho": 10.0},
        {"table": "kd:choices=4,parts=3", "after": "guide", "guide": {"weight": 10.0}},
        {"table": "kd:choices=4,parts=3", "after": "fit"},
    ):
        outcome = run_gcn({**GCN, **more, **row}, 0, source, Run())
        assert 0 <= outcome.measures["accuracy"] <= 1
        assert outcome.history


# codes as hashes


def test_answers_leave_the_query_out_and_are_counted():
    rows = (
        np.eye(4, dtype=np.float32)[[0, 0, 1, 2, 3]]
        + np.float32(0.01) * np.arange(5, dtype=np.float32)[:, None]
    )
    queries = np.array([0, 3])
    found = answers(exact(rows), queries, 2)
    assert found.shape == (2, 2)
    assert (found != queries[:, None]).all()
    assert found[0, 0] == 1
    wide = np.arange(1, 101)[None, :]
    measures, curves = measured(wide, np.array([[1, 2, 3, 4, 5, 50, 60, 70, 200, 300]]), "x")
    assert measures == {"x_precision": 0.5, "x_recall": 0.8}
    assert curves["depths"] == [1, 2, 5, 10, 20, 50, 100]


def test_table_look_up_is_the_cosine_of_composed_rows():
    import featherbed as fb

    table = fb.KDTable(60, 8, choices=4, parts=3).eval()
    searches = by_codes(table.pack(), None)
    dense = table.weight.detach().numpy()
    some = np.array([3, 7])
    unit = dense / np.linalg.norm(dense, axis=1, keepdims=True)
    found = searches["lookup"](some, 5)
    scores = np.take_along_axis(unit[some] @ unit.T, found, 1)
    assert np.allclose(scores, -np.sort(-(unit[some] @ unit.T), axis=1)[:, :5], atol=1e-5)
    codes = table.codes_of().numpy()
    apart = (codes[some][:, None] != codes[None]).sum(2)
    near = np.take_along_axis(apart, searches["hamming"](some, 5), 1)
    assert near.tolist() == np.sort(apart, axis=1)[:, :5].tolist()


def test_bad_vectors_are_one_message(tmp_path):
    with pytest.raises(ArgumentError, match="neighbors are searched in glove, ml-1m"):
        open_rows("word2vec", quick=True)
    (tmp_path / "glove").mkdir()
    with pytest.raises(DataError, match="holds no glove"):
        open_rows("glove", tmp_path)
    (tmp_path / "glove" / "glove.6B.50d.top60k.npz").write_bytes(b"x")
    with pytest.raises(DataError, match="holds no array 'vectors'"):
        open_rows("glove", tmp_path)


# named entities


def test_iob1_is_read_and_both_schemes_keep_the_entities():
    tags = ["I-PER", "I-PER", "B-PER", "O", "I-LOC", "I-ORG", "B-MISC", "I-MISC"]
    entities = entities_of(tags)
    assert entities == ((0, 2, "PER"), (2, 3, "PER"), (4, 5, "LOC"), (5, 6, "ORG"), (6, 8, "MISC"))
    for sentence in generated_sentences().train[:20]:
        assert entities_of(sentence.tags()) == sentence.entities
        for scheme in ("iob2", "iobes"):
            own = ["O", *sentence.tags(scheme), "O"]
            assert all(may_follow(a, b, scheme) for a, b in pairwise(own))
            assert {*own} <= {*tags_of(scheme)}


def test_real_sentences(data):
    source = open_tagged("conll2003", data)
    assert [len(part) for part in (source.train, source.validation, source.test)] == [
        14041,
        3250,
        3453,
    ]
    count = Counter(kind for one in source.test for *_, kind in one.entities)
    assert count == {"LOC": 1668, "ORG": 1661, "PER": 1617, "MISC": 702}


def test_bad_tagged_files_are_one_message(tmp_path):
    folder = tmp_path / "conll2003"
    with pytest.raises(DataError, match="holds no folder conll2003 with "):
        open_tagged("conll2003", tmp_path)
    folder.mkdir()
    with pytest.raises(DataError, match=r"holds no eng\.train, plain or as \.gz, but nothing"):
        open_tagged("conll2003", tmp_path)
    for text, message in (
        ("EU NNP I-NP I-ORG\nrejects VBZ\n", r"line 2: 'rejects VBZ' is no word"),
        ("EU NNP I-NP X-ORG\n", "line 1"),
        ("EU NNP I-NP I-CITY\n", "one of PER, LOC, ORG, MISC"),
        ("-DOCSTART- -X- O O\n\n", "holds no sentences"),
    ):
        (folder / "eng.train").write_text(text)
        with pytest.raises(DataError, match=message):
            open_tagged("conll2003", tmp_path)
    (folder / "eng.train").unlink()
    (folder / "eng.train.gz").write_bytes(gzip.compress(b"EU NNP I-NP I-ORG\n")[:-4])
    with pytest.raises(DataError):
        open_tagged("conll2003", tmp_path)


def small_tagger(scheme="iobes"):
    source = generated_sentences()
    encoder, tokens = opened_encoder({"encoder": "small"}, source)
    model = Tagger(encoder, scheme, True, 0.1).eval()
    return source, tokens, model, [coded(one, tokens, scheme) for one in source.train]


def test_padding_changes_no_tag_and_tags_are_well_formed():
    source, _, model, numbers = small_tagger()
    together = model.tags(batch_of(numbers[:16]))
    alone = [model.tags(batch_of([one]))[0] for one in numbers[:16]]
    assert together == alone
    for sentence, tags in zip(source.train, together, strict=False):
        assert len(tags) == len(sentence.words)
        own = ["O", *tags, "O"]
        assert all(may_follow(a, b, "iob2") for a, b in pairwise(own))


def test_batches_hold_every_sentence_once():
    *_, numbers = small_tagger()
    found = [one for part in batches(numbers, 10, torch.Generator().manual_seed(0)) for one in part]
    assert sorted(map(id, found)) == sorted(map(id, numbers))


def test_edges_connect_first_pieces_of_one_type():
    source, tokens, *_ = small_tagger()
    graph = entity_graph(source.train, tokens, 0)
    kinds = {}
    for sentence in source.train:
        for start, stop, kind in sentence.entities:
            for word in sentence.words[start:stop]:
                pieces = tokens.encode([word], is_pretokenized=True).tokens
                kinds.setdefault(pieces[1], set()).add(kind)
    names = {tokens.token_to_id(piece): own for piece, own in kinds.items()}
    assert all(names[piece] for piece in np.flatnonzero(graph.degrees))
    for a, b in graph.pairs().tolist():
        assert names[a] == names[b]


def test_a_stopped_run_goes_on(tmp_path, monkeypatch):
    import research.models.tagging as tagging

    settings = read_experiment("sse/entities", quick=True).chosen(["se-2"]).rows[0].settings
    source = open_tagged("conll2003", quick=True)
    whole = run_tagging(settings, 0, source, Run(work=tmp_path / "a"))
    monkeypatch.setattr(tagging, "EVERY", 5)
    loss, calls = Tagger.loss, []

    def stops(self, batch):
        calls.append(1)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return loss(self, batch)

    monkeypatch.setattr(Tagger, "loss", stops)
    with pytest.raises(KeyboardInterrupt):
        run_tagging(settings, 0, source, Run(work=tmp_path / "b"))
    again = run_tagging(settings, 0, source, Run(work=tmp_path / "b"))
    assert len(calls) == 8 + 12 - 5
    assert again.measures == whole.measures


def test_a_missing_package_or_folder_ends_with_one_line(tmp_path, capsys):
    for name in ("kd/gcn", "sse/entities"):
        with pytest.raises(SystemExit) as end:
            command.main(
                ["run", name, "--data", str(tmp_path), "--out", str(tmp_path / "o"), "--quiet"]
            )
        assert end.value.code == 2
        error = capsys.readouterr().err
        assert error.startswith("Error: ")
        assert error.count("\n") == 1
