"""Tables of words: every choice of words, every domain, what is penalised, and what bad settings are told."""

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array

import featherbed as fb
from featherbed.apps.words import (
    Lexicon,
    WordTableSettings,
    build_word_table,
    glove_vectors,
    select_words,
)

WORDS = (
    "<pad>",
    "<unk>",
    "the",
    "good",
    "bad",
    "film",
    "car",
    "auto",
    "vehicle",
    "tree",
    "oak",
    "green",
)
COUNTS = np.array([0, 0, 50, 20, 18, 15, 6, 5, 4, 3, 2, 1])
DOCUMENTS = [
    [2, 3, 5],
    [2, 4, 5],
    [2, 3, 6],
    [2, 4, 7],
    [2, 3, 8, 9],
    [2, 4, 10, 11],
] * 5  # 3 and 4 tell the class


def lexicon(min_cooccurrence=5, **changes):
    counts = np.zeros((len(DOCUMENTS), len(WORDS)), dtype=np.int64)
    for row, document in enumerate(DOCUMENTS):
        counts[row, document] += 1
    near = counts.T @ counts
    np.fill_diagonal(near, 0)
    settings = {
        "documents": lambda: csr_array(counts),
        "labels": np.arange(len(DOCUMENTS)) % 2,
        "cooccurrence": lambda: csr_array(near),
        "related": lambda: fb.Graph(csr_array(near) >= min_cooccurrence),
        "padding_idx": 0,
    }
    return Lexicon(WORDS, COUNTS, **(settings | changes))


def write_glove(folder):
    (folder / "glove").mkdir()
    rng = np.random.default_rng(0)
    np.savez(
        folder / "glove" / "glove.6B.50d.top60k.npz",
        words=np.array("\n".join(WORDS[2:]).encode()),
        vectors=rng.normal(size=(len(WORDS) - 2, 50)).astype(np.float32),
    )


def write_wordnet(folder):
    (folder / "wordnet").mkdir()
    for name in ("data.noun", "data.verb", "data.adj", "data.adv"):
        (folder / "wordnet" / name).write_text("")
    lines = [
        "01 05 n 02 car 0 auto 0 001 @ 02 n 0000 | it has a motor",
        "02 05 n 01 vehicle 0 000 | it moves",
    ]
    (folder / "wordnet" / "data.noun").write_text("\n".join(lines))


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """GloVe and WordNet, as small as can be, and no other."""
    for variable in ("WNSEARCHDIR", "WNHOME", "NLTK_DATA"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("FEATHERBED_DATA", str(tmp_path))
    write_glove(tmp_path)
    write_wordnet(tmp_path)


BY = [
    "random",
    "frequency",
    "tfidf",
    "kmeans-glove",
    "kmeans-cooccurrence",
    "coreset",
    "frequency-clusters",
    "lasso",
    "vvd",
]


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("spec", ["anchor:anchors=3", "mixture:anchors=[2,1]", "selected:keep=3"])
def test_every_choice_makes_a_table(by, spec, sources):
    words = WordTableSettings(
        spec=spec,
        dim=8,
        selection=by,
        domain=() if spec.startswith("selected") else ("cooccurrence",),
    )
    made, again, other = (build_word_table(words, lexicon(), seed) for seed in (0, 0, 1))
    assert torch.equal(made.table.weight, again.table.weight)
    assert not torch.equal(made.table.weight, other.table.weight)
    assert torch.equal(made.table(torch.tensor([0])), torch.zeros(1, 8))
    if spec.startswith("selected"):
        chosen = torch.nonzero(made.table.index < 3)[:, 0]
    else:
        ids = made.table.anchor_ids
        chosen = ids if isinstance(ids, torch.Tensor) else torch.cat(ids)
        assert list(made.penalties) == [made.table.transform]
    assert len(torch.unique(chosen)) == 3
    assert 0 not in chosen
    if by == "frequency":
        assert sorted(chosen.tolist()) == [2, 3, 4]
    if by in ("lasso", "vvd"):
        assert {3, 4} <= set(chosen.tolist())


def test_choices_without_anchors_that_are_words():
    made = build_word_table(WordTableSettings(spec="anchor:anchors=3", dim=8), lexicon(), 0)
    assert made.table.anchor_ids is None
    assert made.notes == ()
    kept = build_word_table(WordTableSettings(spec="selected:keep=2", dim=8), lexicon(), 0).table
    assert torch.nonzero(kept.index < 2)[:, 0].tolist() == [2, 3]


def test_domains_relate_words_to_anchors(sources):
    def exempt(*domain, minimum=5):
        settings = WordTableSettings(
            spec="anchor:anchors=9", dim=8, selection="frequency", domain=domain, lam=0.1
        )
        words = build_word_table(settings, lexicon(minimum), 0)
        (penalty,) = words.penalties.values()
        rows, columns = penalty.exempt.places(None)
        anchors = words.table.anchor_ids
        return {
            (WORDS[i], WORDS[anchors[k]])
            for i, k in zip(rows.tolist(), columns.tolist(), strict=True)
        }

    car = {"car", "auto", "vehicle"}
    assert exempt("wordnet") == {(a, b) for a in car for b in car if a != b}
    near = exempt("cooccurrence")
    assert ("film", "good") in near
    assert ("good", "bad") not in near
    assert exempt("wordnet", "cooccurrence") == exempt("wordnet") | near
    assert exempt("cooccurrence", minimum=11) < near


def test_a_domain_of_a_mixture_spares_its_weights(sources):
    words = WordTableSettings(
        spec="mixture:anchors=[3,2]",
        dim=8,
        selection="frequency",
        domain=("cooccurrence",),
        lam=1.0,
    )
    made = build_word_table(words, lexicon(), 0)
    (parameter, penalty), *_ = made.penalties.items()
    anchors = torch.cat(made.table.anchor_ids)
    near = lexicon().cooccurrence().toarray() >= 5
    shrunk = penalty.prox(torch.full_like(parameter, 0.5), 1.0)
    assert np.array_equal(shrunk.numpy() > 0, near[:, anchors.numpy()])


def test_related_words_are_those_of_the_graph():
    graph = fb.Graph.from_edges(len(WORDS), [[2, 11]])
    settings = WordTableSettings(
        spec="anchor:anchors=2", dim=8, selection="frequency", domain=("cooccurrence",)
    )
    words = build_word_table(settings, lexicon(related=lambda: graph), 0)
    (penalty,) = words.penalties.values()
    assert [part.tolist() for part in penalty.exempt.places(None)] == [[11], [0]]
    clusters = WordTableSettings(spec="anchor:anchors=2", dim=8, selection="kmeans-cooccurrence")
    counts = lexicon(cooccurrence=lambda: graph.matrix.astype(np.int64))
    assert sorted(build_word_table(clusters, counts, 0).table.anchor_ids.tolist()) == [2, 11]


@pytest.mark.parametrize(
    "spec",
    [
        "dense",
        "lowrank:rank=3",
        "hashed:buckets=5",
        "remainder:divisor=4",
        "selected:keep=5",
        "kd:choices=4,parts=3",
        "product:choices=4,parts=4",
        "product:choices=4,parts=4,variant=centroid",
        "mixed:dims=[64,8]",
    ],
)
def test_rows_start_with_the_spread_asked_for(spec):
    table = build_word_table(
        WordTableSettings(spec=spec, dim=64, init_std=0.03), lexicon(padding_idx=None), 0
    ).table.eval()
    assert float(table.weight.detach().std()) == pytest.approx(0.03, rel=0.01)


@pytest.mark.parametrize(
    "spec", ["anchor:anchors=4", "anchor:anchors=8,slots=3", "mixture:anchors=3,sets=2"]
)
@pytest.mark.parametrize("by", [None, "frequency"])
def test_anchors_are_scaled_for_rows_of_the_spread_asked_for(spec, by):
    table = build_word_table(
        WordTableSettings(spec=spec, dim=64, selection=by, init_std=0.2, row_std=0.03),
        lexicon(padding_idx=None),
        0,
    ).table.eval()
    assert float(table.weight.detach().std()) == pytest.approx(0.03, rel=1e-3)


def test_rows_that_do_not_depend_on_a_dictionary_are_left_as_they_are():
    table = fb.KDTable(12, 8, choices=4, parts=3, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        table.atoms.zero_()
    table.scale_initial_rows(0.5)
    assert torch.count_nonzero(table.atoms) == 0
    assert table.training


def test_what_is_penalised():
    lasso = build_word_table(WordTableSettings(selection="lasso", lam=0.1, dim=8), lexicon(), 0)
    assert isinstance(lasso.penalties[lasso.table.weight], fb.GroupL1)
    signed = build_word_table(
        WordTableSettings(spec="anchor:anchors=3,nonnegative=false", dim=8, lam=0.1), lexicon(), 0
    )
    assert type(signed.penalties[signed.table.transform]) is fb.L1
    assert (
        build_word_table(WordTableSettings(spec="hashed:buckets=4", dim=8), lexicon(), 0).penalties
        == {}
    )
    anchors = build_word_table(WordTableSettings(spec="anchor:anchors=3", dim=8), lexicon(), 0)
    assert anchors.penalties[anchors.table.transform].lam == 0
    assert torch.count_nonzero(anchors.table.transform[0]) == 0  # the padding costs no weight


def test_sharing_and_row_sparse_gradients():
    made = build_word_table(WordTableSettings(dim=8, sse=0.2), lexicon(), 0, sparse=True)
    assert isinstance(made.module, fb.SSE)
    assert made.module.table is made.table
    assert made.table.sparse
    assert not build_word_table(WordTableSettings(dim=8), lexicon(), 0).table.sparse
    assert not build_word_table(
        WordTableSettings(spec="anchor:anchors=3", dim=8), lexicon(), 0, sparse=True
    ).table.sparse


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"selection": "length"}, "use one of random, frequency"),
        (
            {"spec": "anchor:anchors=3", "domain": ("thesaurus",)},
            "use one of wordnet, cooccurrence",
        ),
        ({"dim": 0}, "dim=0"),
        ({"init_std": 0.0}, "init_std=0.0"),
        ({"spec": "anchor:anchors=3", "row_std": -1.0}, "row_std=-1.0"),
        ({"row_std": 0.1}, "row_std=0.1: 'dense' has no anchors"),
        ({"nonzeros": 5}, "has no anchors"),
        ({"domain": ("wordnet",)}, "domain=wordnet: 'dense' has no anchors"),
        ({"lam": 0.1}, "'dense' has no penalized weights"),
        ({"spec": "hashed:buckets=4", "selection": "frequency"}, "selects no words"),
        ({"spec": "anchor:slots=2", "selection": "frequency"}, "number of anchors open"),
        (
            {"spec": "anchor:anchors=3,init=xavier", "selection": "frequency"},
            "initializes anchors too",
        ),
        ({"selection": "lasso"}, "needs lam"),
        ({"spec": "nothing"}, "is no table"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(fb.ArgumentError, match=message):
        WordTableSettings(**settings)


def test_what_a_text_cannot_tell_is_said():
    bare = Lexicon(WORDS, COUNTS, padding_idx=0)
    for by, missing in (
        ("tfidf", "documents"),
        ("lasso", "documents"),
        ("kmeans-cooccurrence", "co-occurrence counts"),
    ):
        with pytest.raises(fb.ArgumentError, match=f"needs {missing}"):
            build_word_table(
                WordTableSettings(spec="anchor:anchors=2", dim=8, selection=by), bare, 0
            )
    with pytest.raises(fb.ArgumentError, match="needs labels"):
        build_word_table(
            WordTableSettings(spec="anchor:anchors=2", dim=8, selection="vvd"),
            lexicon(labels=None),
            0,
        )
    with pytest.raises(fb.ArgumentError, match="the vocabulary has 11"):
        build_word_table(
            WordTableSettings(spec="anchor:anchors=12", dim=8, selection="frequency"), bare, 0
        )
    with pytest.raises(fb.ArgumentError, match="a non-negative penalty"):
        words = WordTableSettings(
            spec="anchor:anchors=2,nonnegative=false",
            dim=8,
            selection="frequency",
            domain=("cooccurrence",),
        )
        build_word_table(words, lexicon(), 0)


def test_glove_knows_some_words(sources, tmp_path):
    ids, vectors = glove_vectors(("<pad>", "zzz", "Film", "Ġtree"))
    assert ids.tolist() == [2, 3]
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1)
    few = Lexicon(("<pad>", "zzz", "film"), np.array([0, 3, 2]), padding_idx=0)
    with pytest.raises(fb.ArgumentError, match="only 1 words have the statistics"):
        select_words("kmeans-glove", few, 2, 8, torch.Generator().manual_seed(0))
    (tmp_path / "glove" / "glove.6B.50d.top60k.npz").write_bytes(b"nothing")
    with pytest.raises(fb.DataError, match="cannot be read as GloVe"):
        glove_vectors(WORDS)


def test_glove_and_wordnet_as_they_are(data, monkeypatch):
    if not (data / "glove").is_dir() or not (data / "wordnet").is_dir():
        pytest.skip("no GloVe vectors or WordNet in the data folder")
    monkeypatch.setenv("FEATHERBED_DATA", str(data))
    words = WordTableSettings(
        spec="anchor:anchors=4", dim=50, selection="kmeans-glove", domain=("wordnet",), lam=1e-5
    )
    made = build_word_table(words, lexicon(), 0)
    assert made.notes[0].startswith("anchors: ")
    assert "related by wordnet" in made.notes[1]
    assert torch.allclose(
        made.table.atoms.norm(dim=1), torch.ones(4), atol=1e-5
    )  # atoms start at vectors as wide
