"""Choosing anchors: every choice against an independent calculation, identity rows, starts that matter, bad input."""

import csv
import gzip
import itertools
import math
import re
from collections import Counter

import numpy as np
import pytest
import torch

import featherbed as fb
from featherbed.anchors.clusters import (
    Coreset,
    FrequencyThenClusters,
    KMeansPlusPlus,
    lightweight,
    more_seeds,
)
from featherbed.anchors.objects import Frequency, TfIdf
from featherbed.anchors.random import RandomBasis
from featherbed.anchors.selection import BagClassifier, GroupLasso, VocabularyDropout, kl
from featherbed.errors import ArgumentError, DataError, MissingExtra
from featherbed.io.opening import find_data

sparse = pytest.importorskip("scipy.sparse")
pytest.importorskip("sklearn")


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def chosen(init, objects, count, seed=0):
    return init.choose(objects, count, seeded(seed)).tolist()


# planted data ---------------------------------------------------------------------------------------------------------------


def clusters(seed=0):
    """Five clusters far apart; the last has two objects, and is the farthest."""
    rng = np.random.default_rng(seed)
    cluster = np.repeat(np.arange(5), [100, 100, 60, 38, 2])
    centres = np.array([[0, 0, 0], [20, 0, 0], [0, 20, 0], [0, 0, 20], [30, 30, 30]])
    counts = np.where(cluster == 4, 1, 50) + rng.integers(0, 10, len(cluster))
    return cluster, centres[cluster] + rng.normal(0, 0.3, (len(cluster), 3)), counts


def labelled(seed=0, documents=400):
    """Three classes, two telling words each (ids 54 to 59); the 54 noise words are more frequent."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(3, size=documents)
    told = [54 + 2 * label + rng.integers(2, size=rng.integers(0, 3)) for label in labels]
    return [np.r_[rng.integers(54, size=30), words] for words in told], labels


TELLING = set(range(54, 60))


def choosers():
    """Every chooser of objects, for 60 of them."""
    documents, labels = labelled()
    features = np.random.default_rng(1).normal(size=(60, 8))
    counts = np.bincount(np.concatenate(documents), minlength=60)
    return [
        Frequency(counts),
        TfIdf(documents),
        KMeansPlusPlus(features),
        FrequencyThenClusters(counts, features),
        Coreset(features, size=40),
        GroupLasso(documents, labels, steps=8),
        VocabularyDropout(documents, labels, steps=8),
    ]


every = pytest.mark.parametrize("init", choosers(), ids=lambda init: type(init).__name__)


# all of them ----------------------------------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("settings", [{}, {"slots": 3}, {"dtype": torch.float64}], ids=str)
def test_anchor_objects_start_as_themselves(init, settings):
    table = fb.AnchorTable(60, 8, anchors=6, init=init, generator=seeded(), **settings)
    assert len(set(table.anchor_ids.tolist())) == 6
    torch.testing.assert_close(table(table.anchor_ids), table.atoms)
    if not settings:
        assert torch.equal(table.transform[table.anchor_ids], torch.eye(6))
    assert not (table.atoms == 0).all(dim=1).any()


@every
def test_the_same_seed_is_the_same_start(init):
    one, two = (fb.AnchorTable(60, 8, anchors=6, init=init, generator=seeded(3)) for _ in range(2))
    assert torch.equal(one.anchor_ids, two.anchor_ids)
    assert torch.equal(one.atoms, two.atoms)
    assert torch.equal(one.transform, two.transform)


@pytest.mark.parametrize("which", [2, 3, 4])
def test_other_seeds_choose_other_objects(which):
    init = choosers()[which]
    assert len({tuple(chosen(init, 60, 6, seed)) for seed in range(5)}) > 1


@every
def test_all_objects_may_be_anchors_and_no_more(init):
    if isinstance(init, Coreset):
        init = Coreset(init.features)  # a sample of 40 would not do
    assert sorted(chosen(init, 60, 60)) == list(range(60))
    with pytest.raises(ArgumentError, match=r"anchors=61: there are only 60 objects"):
        fb.AnchorTable(60, 8, anchors=61, init=init)


@every
def test_tables_of_another_size_are_refused(init):
    with pytest.raises(ArgumentError, match=r"59|0 to 58"):
        fb.AnchorTable(59, 8, anchors=3, init=init)


def test_every_start_changes_a_short_training():
    target = torch.randn(60, 8, generator=seeded(9))
    losses = {}
    for init in [fb.HalfNormal(), fb.Xavier(), RandomBasis(), *choosers()]:
        table = fb.AnchorTable(60, 8, anchors=6, init=init, generator=seeded())
        optimizer = fb.Yogi(table.parameters(), lr=0.05)
        for _ in range(10):
            optimizer.zero_grad()
            loss = (table(torch.arange(60)) - target).square().mean()
            loss.backward()
            optimizer.step()
        losses[type(init).__name__] = float(loss.detach())
    values = sorted(losses.values())
    assert min(b - a for a, b in itertools.pairwise(values)) > 1e-5, losses


def test_they_say_how_they_were_made():
    found = [repr(init) for init in choosers()]
    assert found == [
        "Frequency(counts)",
        "TfIdf(documents)",
        "KMeansPlusPlus(features)",
        "FrequencyThenClusters(counts, features)",
        "Coreset(features, size=40)",
        "GroupLasso(documents, labels, steps=8)",
        "VocabularyDropout(documents, labels, steps=8)",
    ]
    assert repr(Frequency([1], transform_std=0.5)) == "Frequency(counts, transform_std=0.5)"


def test_the_spread_of_other_rows_is_a_setting():
    table = fb.AnchorTable(
        5000, 4, anchors=2, init=Frequency(np.arange(5000), transform_std=0.7), generator=seeded()
    )
    assert float(table.transform.detach()[:4998].square().mean().sqrt()) == pytest.approx(
        0.7, rel=0.05
    )


# frequency and TF-IDF -------------------------------------------------------------------------------------------------------


def test_frequency_takes_the_lower_of_equals():
    assert chosen(Frequency([1, 5, 0, 5, 1, 0]), 6, 5) == [1, 3, 0, 4, 2]


def test_tfidf_is_the_formula():
    rng = np.random.default_rng(0)
    documents = [
        rng.integers(12, size=rng.integers(0, 15)) for _ in range(30)
    ]  # some empty, word 12 in none
    scores = np.zeros(13)
    for document in documents:
        counts = np.bincount(document, minlength=13)
        weights = np.zeros(13)
        for word in range(13):
            holders = sum(word in other for other in documents)
            weights[word] = counts[word] * (1 + math.log((1 + 30) / (1 + holders)))
        scores += weights / max(np.linalg.norm(weights), 1e-30)
    expected = np.argsort(-scores, kind="stable").tolist()
    assert any(len(document) == 0 for document in documents)
    assert chosen(TfIdf(documents), 13, 13) == expected
    counts = np.stack([np.bincount(document, minlength=13) for document in documents])
    for kind in (sparse.csr_matrix, sparse.csr_array, sparse.coo_array, sparse.csc_matrix):
        assert chosen(TfIdf(kind(counts)), 13, 13) == expected
    assert chosen(TfIdf([torch.as_tensor(document) for document in documents]), 13, 13) == expected


def test_tfidf_leaves_what_it_is_given():
    counts = sparse.csr_matrix(np.array([[2, 1, 0], [2, 0, 3]]))
    counts.data[1] = 0
    chosen(TfIdf(counts), 3, 2)
    assert counts.nnz == 4
    assert counts.data.tolist() == [2, 0, 2, 3]


# k-means++ ------------------------------------------------------------------------------------------------------------------

LINE = np.array([[0.0], [1.0], [3.0], [7.0]])


def pair_law(first):
    """P(first, second) of k-means++ on four points."""
    away = (LINE - LINE.T) ** 2
    return first[:, None] * away / away.sum(axis=1, keepdims=True)


def chi_square(found, expected):
    there = expected > 0
    assert not found[~there].any()
    return float(((found - expected)[there] ** 2 / expected[there]).sum())


@pytest.mark.parametrize(
    ("init", "draws"),
    [
        (KMeansPlusPlus(LINE, trials=1), 1500),
        (FrequencyThenClusters([1] * 4, LINE, frequent=0), 1500),
    ],
    ids=["scikit-learn", "continued"],
)
def test_two_seeds_follow_the_law(init, draws):
    found = np.zeros((4, 4))
    generator = seeded(1)
    for _ in range(draws):
        found[tuple(init.choose(4, 2, generator).tolist())] += 1
    assert (
        chi_square(found, draws * pair_law(np.full(4, 0.25))) < 31.3
    )  # 11 degrees of freedom, 99.9 %


@pytest.mark.parametrize(
    "features",
    [LINE, LINE.astype(np.float32), sparse.csr_matrix(LINE)],
    ids=["f64", "f32", "sparse"],
)
def test_seeds_continue_from_given_centres(features):
    rng, found = np.random.default_rng(5), np.zeros(4)
    for _ in range(600):
        ids = more_seeds(features, np.array([2, 0]), 3, rng)
        assert ids[:2].tolist() == [2, 0]
        found[ids[2]] += 1
    nearest = np.array([0, 1, 0, 16])  # squared distance to the nearer of 0 and 3
    assert chi_square(found, 600 * nearest / nearest.sum()) < 10.8  # 1 degree of freedom, 99.9 %


@pytest.mark.parametrize("seed", range(3))
def test_clustering_finds_the_rare_cluster_that_frequency_misses(seed):
    cluster, features, counts = clusters()
    coreset = Coreset(features)
    for init in (KMeansPlusPlus(features), KMeansPlusPlus(sparse.csr_matrix(features)), coreset):
        assert set(cluster[chosen(init, 300, 5, seed)]) == set(range(5))
    assert 4 not in cluster[chosen(Frequency(counts), 300, 5)]
    both = chosen(FrequencyThenClusters(counts, features, frequent=0.4), 300, 6, seed)
    assert both[:2] == chosen(Frequency(counts), 300, 2)
    assert 4 in cluster[both]
    assert set(coreset.points.tolist()) >= set(chosen(coreset, 300, 5, seed))


def test_atoms_start_at_features_of_their_width():
    cluster, features, counts = clusters()
    features[cluster == 4] = 0
    for given in (features, torch.tensor(features), sparse.csr_matrix(features), features.tolist()):
        for init in (KMeansPlusPlus(given), FrequencyThenClusters(counts, given), Coreset(given)):
            table = fb.AnchorTable(
                300, 3, anchors=6, init=init, generator=seeded(), dtype=torch.float64
            )
            ids = table.anchor_ids.numpy()
            known = features[ids].any(axis=1)
            np.testing.assert_array_equal(table.atoms[known].detach().numpy(), features[ids][known])
            assert table.atoms.abs().sum(dim=1).min() > 0  # of zero features nothing is known
    wide = fb.AnchorTable(300, 4, anchors=6, init=KMeansPlusPlus(features), generator=seeded())
    assert float(wide.atoms.detach().abs().max()) < 5  # random: no feature of 20 came in


# coreset --------------------------------------------------------------------------------------------------------------------


def test_coreset_draws_by_importance_and_its_cost_is_unbiased():
    _, features, _ = clusters()
    mean = features.mean(axis=0)
    away = ((features - mean) ** 2).sum(axis=1)
    chance = 0.5 / 300 + 0.5 * away / away.sum()
    centres = np.array([[0.0, 5, 5], [30, 30, 30]])

    def cost(rows, weights):
        return float((weights * ((rows[:, None] - centres) ** 2).sum(axis=2).min(axis=1)).sum())

    rng, draws, size = np.random.default_rng(0), 600, 50
    costs, totals, times = [], [], np.zeros(300)
    for number in range(draws):
        given = features if number % 2 else sparse.csr_matrix(features)
        points, weights = lightweight(given, size, rng)
        times[points] += np.rint(weights * size * chance[points])
        costs.append(cost(features[points], weights))
        totals.append(weights.sum())
    for found, truth in ((costs, cost(features, np.ones(300))), (totals, 300)):
        assert abs(np.mean(found) - truth) < 4 * np.std(found) / math.sqrt(draws)
    assert times.sum() == draws * size  # weights are exactly times / (size q)
    assert chi_square(times, draws * size * chance) < 299 + 3.1 * math.sqrt(2 * 299)


def test_a_coreset_of_all_objects_is_all_objects():
    init = Coreset(LINE, size=4)
    assert sorted(chosen(init, 4, 4)) == [0, 1, 2, 3]
    assert init.weights.tolist() == [1, 1, 1, 1]


def test_weights_of_the_coreset_matter_to_the_seeds():
    rng = np.random.default_rng(0)
    features = np.concatenate([rng.normal(0, 0.1, (900, 2)), rng.normal(5, 0.1, (100, 2))])
    first = [chosen(Coreset(features, size=200), 1000, 1, seed)[0] >= 900 for seed in range(300)]
    assert np.mean(first) == pytest.approx(
        0.1, abs=0.06
    )  # of the draws, unweighted, about a half lie there


# basis ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("anchors", [3, 8, 19])
def test_random_basis_is_orthonormal_in_blocks(anchors, dtype):
    table = fb.AnchorTable(
        50, 8, anchors=anchors, init=RandomBasis(scale=2.0), generator=seeded(), dtype=dtype
    )
    for block in table.atoms.double().split(8):
        torch.testing.assert_close(
            block @ block.T, 4 * torch.eye(len(block)).double(), atol=0.08, rtol=0
        )
    assert table.anchor_ids is None
    assert float(table.transform.detach().min()) >= 0


def test_random_basis_settings():
    assert RandomBasis(scale=0.5) == RandomBasis(0.5)
    for bad in ({"scale": 0}, {"scale": True}, {"scale": math.nan}, {"transform_std": -1.0}):
        with pytest.raises(ArgumentError, match="give a number above 0"):
            RandomBasis(**bad)


# vocabulary selection -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_selection_keeps_telling_words_and_drops_noise(seed):
    documents, labels = labelled(seed)
    counts = np.bincount(np.concatenate(documents), minlength=60)
    assert not TELLING & set(chosen(Frequency(counts), 60, 6))
    lasso, dropout = (
        GroupLasso(documents, labels, strength=0.3),
        VocabularyDropout(documents, labels),
    )
    assert set(chosen(lasso, 60, 6)) == TELLING
    assert lasso.survivors == 6
    assert torch.count_nonzero(lasso.embeddings[:54]) == 0
    assert set(chosen(dropout, 60, 6)) == TELLING
    assert 6 <= dropout.survivors <= 12
    assert dropout.survivors == int((dropout.log_alpha < 3).sum())


def test_group_lasso_is_at_its_minimum():
    documents, labels = labelled()
    init = GroupLasso(documents, labels, strength=0.1, steps=800)
    counts = np.stack([np.bincount(d, minlength=60) for d in documents]).astype(float)
    bags = counts / np.linalg.norm(counts, axis=1, keepdims=True)
    truth = np.eye(3)[labels]
    lam = 0.1 * np.linalg.norm(bags.T @ (truth.mean(axis=0) - truth), axis=1).max()
    classifier = BagClassifier(sparse.csr_array(counts), labels, 3, 0)
    lengths, survivors = init.train(classifier)
    rows, bias = (
        classifier.rows.detach().double().numpy(),
        classifier.bias.detach().double().numpy(),
    )
    scores = np.exp(bags @ rows + bias)
    slope = bags.T @ (
        scores / scores.sum(axis=1, keepdims=True) - truth
    )  # of the cross-entropy, by hand
    alive = lengths.numpy() > 0
    assert 6 <= survivors == alive.sum() < 60
    assert (np.linalg.norm(slope[~alive], axis=1) <= lam * 1.001).all()
    pull = -lam * rows[alive] / np.linalg.norm(rows[alive], axis=1, keepdims=True)
    np.testing.assert_allclose(slope[alive], pull, atol=0.01 * lam)


def test_kl_is_near_the_integral():
    noise = (np.arange(200_000) + 0.5) / 1e4 - 10  # midpoints
    density = 1e-4 * np.exp(-(noise**2) / 2) / math.sqrt(2 * math.pi)
    log_alpha = np.linspace(-6, 8, 15)
    spread = np.exp(log_alpha / 2)[:, None]
    mean_log = (density * np.log(np.abs(1 + spread * noise))).sum(axis=1)
    limit = (
        np.euler_gamma + math.log(2)
    ) / 2  # -E log|N(0, 1)|: the divergence goes to 0 as alpha grows
    found = kl(torch.tensor(log_alpha)).numpy()
    np.testing.assert_allclose(found, mean_log - log_alpha / 2 + limit, atol=0.02)


def test_atoms_start_at_the_trained_embeddings():
    documents, labels = labelled()
    for init in (
        GroupLasso(documents, labels, strength=0.3),
        VocabularyDropout(documents, labels, steps=50),
    ):
        table = fb.AnchorTable(60, 7, anchors=6, init=init, generator=seeded())
        trained, atoms = init.embeddings[table.anchor_ids], table.atoms.detach()
        scale = trained.norm(dim=1).mean()
        torch.testing.assert_close(
            atoms @ atoms.T, trained @ trained.T / scale**2
        )  # a rotation, mean length 1
        narrow = fb.AnchorTable(60, 2, anchors=6, init=init, generator=seeded())
        assert torch.isfinite(narrow.atoms).all()


def test_dropped_words_follow_when_survivors_are_too_few():
    documents, labels = labelled()
    init = GroupLasso(documents, labels, strength=1.0)
    holders = np.array([sum(word in document for document in documents) for word in range(60)])
    assert chosen(init, 60, 5) == np.argsort(-holders, kind="stable")[:5].tolist()
    assert init.survivors == 0
    table = fb.AnchorTable(60, 4, anchors=5, init=init)
    assert (table.atoms != 0).all()


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, sparse.csr_matrix])
def test_documents_and_labels_of_any_kind(kind):
    documents, labels = labelled(documents=60)
    documents[3] = np.empty(0, dtype=np.int64)
    expected = chosen(GroupLasso(documents, labels, steps=8), 60, 6)
    if kind is sparse.csr_matrix:
        documents = kind(np.stack([np.bincount(d, minlength=60) for d in documents]))
        labels = np.array(["bad", "fine", "good"])[labels]
    else:
        documents, labels = [kind(d) for d in documents], kind(labels)
    assert chosen(GroupLasso(documents, labels, steps=8), 60, 6) == expected


def news(name, count, vocabulary=None):
    """Documents and labels of AG-News, over the words seen at least three times."""
    try:
        folder = find_data("ag-news")
    except DataError as error:
        pytest.skip(str(error))
    with gzip.open(folder / name, "rt", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    rows = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))[:count]]
    texts = [re.findall(r"[a-z0-9']+", f"{title} {text}".lower()) for _, title, text in rows]
    if vocabulary is None:
        common = Counter(word for text in texts for word in text).most_common()
        vocabulary = {word: number for number, (word, times) in enumerate(common) if times >= 3}
    documents = [
        np.array([vocabulary[w] for w in text if w in vocabulary], dtype=np.int64) for text in texts
    ]
    return documents, np.array([int(row[0]) for row in rows]), vocabulary


def test_selection_on_news_keeps_words_a_linear_classifier_needs():
    from sklearn.linear_model import RidgeClassifier

    train, labels, vocabulary = news("train_subset.csv.gz", 2000)
    test, truth, _ = news("test.csv.gz", 2000, vocabulary)
    words = len(vocabulary)

    def bags(documents):
        seen = np.zeros((len(documents), words))
        for row, document in zip(seen, documents, strict=True):
            row[document] = 1
        return seen

    seen, unseen = bags(train), bags(test)

    def accuracy(ids):
        return RidgeClassifier(alpha=10).fit(seen[:, ids], labels).score(unseen[:, ids], truth)

    frequent = accuracy(chosen(Frequency(seen.sum(axis=0)), words, 80))
    for init in (GroupLasso(train, labels, steps=100), VocabularyDropout(train, labels, steps=150)):
        ids = chosen(init, words, 80)
        assert accuracy(ids) > frequent + 0.07
        assert init.survivors < words / 3
        assert {vocabulary[word] for word in ("game", "iraq", "company", "software")} <= set(ids)


# bad input ------------------------------------------------------------------------------------------------------------------

FEATURES = np.arange(12.0).reshape(6, 2)
DOCUMENTS = [[0, 1], [2, 3], [4, 5, 5]]


def with_value(value):
    spoilt = FEATURES.copy()
    spoilt[2, 1] = value
    return spoilt


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Frequency([1, 2, 3]), "counts have shape"),
        (lambda: Frequency([1, 2, 3, 4, 5, math.nan]), "counts hold NaN"),
        (lambda: Frequency([1, 2, 3, 4, 5, -1]), "negative"),
        (lambda: Frequency("abcdef"), "counts are str"),
        (lambda: Frequency(None), "counts are NoneType"),
        (lambda: Frequency([1] * 6, transform_std=0), "transform_std=0"),
        (lambda: TfIdf([[0, 6]]), "document 0 holds ids from 0 to 6: they are 0 to 5"),
        (lambda: TfIdf([[0], [-1]]), "document 1 holds ids from -1"),
        (lambda: TfIdf([[0.5]]), "document 0 is float64"),
        (lambda: TfIdf([[[0, 1], [1, 2]]]), "document 0 is int64 of shape"),
        (lambda: TfIdf([[0, [1, 2]]]), "different lengths"),
        (lambda: TfIdf([[True, False]]), "document 0 is bool"),
        (lambda: TfIdf([]), "none of the 0 documents"),
        (lambda: TfIdf([[], []]), "none of the 2 documents"),
        (lambda: TfIdf(np.ones((3, 6))), "documents are ndarray"),
        (lambda: TfIdf("a text"), "documents are str"),
        (lambda: TfIdf(7), "documents are int"),
        (lambda: TfIdf(sparse.csr_matrix(np.ones((3, 5)))), r"documents have shape \(3, 5\)"),
        (lambda: TfIdf(sparse.csr_matrix(np.full((3, 6), -1.0))), "negative counts"),
        (lambda: TfIdf(sparse.csr_matrix(np.full((3, 6), math.nan))), "documents hold NaN"),
        (lambda: TfIdf(sparse.csr_matrix((3, 6))), "none of the 3 documents"),
        (lambda: KMeansPlusPlus(FEATURES[:5]), r"features have shape \(5, 2\)"),
        (lambda: KMeansPlusPlus(FEATURES[:, 0]), r"features have shape \(6,\)"),
        (lambda: KMeansPlusPlus(FEATURES[:, :0]), r"features have shape \(6, 0\)"),
        (lambda: KMeansPlusPlus([[1], [1, 2]]), "different lengths"),
        (lambda: KMeansPlusPlus(np.full((6, 2), "a")), "features are <U1"),
        (lambda: KMeansPlusPlus(with_value(math.nan)), "NaN"),
        (lambda: KMeansPlusPlus(sparse.csr_matrix(with_value(math.inf))), "infinity"),
        (lambda: KMeansPlusPlus(with_value(1e200)), "overflow"),
        (lambda: KMeansPlusPlus(with_value(1e20).astype(np.float32)), "overflow"),
        (lambda: KMeansPlusPlus(FEATURES, trials=0), "trials=0"),
        (lambda: KMeansPlusPlus(FEATURES, trials=True), "trials=True"),
        (lambda: KMeansPlusPlus(np.ones((6, 2))), "features tell only 1 anchors apart, of 3"),
        (lambda: KMeansPlusPlus(FEATURES // 6), "features tell only 2 anchors apart, of 3"),
        (lambda: KMeansPlusPlus(sparse.csr_matrix(FEATURES // 6)), "features tell only"),
        (
            lambda: FrequencyThenClusters([1] * 6, np.ones((6, 2))),
            "features tell only 2 anchors apart, of 3",
        ),
        (lambda: FrequencyThenClusters([1] * 5, FEATURES), "counts have shape"),
        (lambda: FrequencyThenClusters([1] * 6, FEATURES[1:]), "features have shape"),
        (lambda: FrequencyThenClusters([1] * 6, FEATURES, frequent=1.5), "frequent=1.5"),
        (lambda: FrequencyThenClusters([1] * 6, FEATURES, frequent=True), "frequent=True"),
        (lambda: Coreset(FEATURES, size=0), "size=0"),
        (lambda: Coreset(FEATURES, size=2), "size=2: the coreset holds"),
        (lambda: Coreset(np.ones((6, 2)), size=5), "features tell only 1 anchors apart"),
        (
            lambda: GroupLasso(DOCUMENTS, [0, 1]),
            r"labels have shape \(2,\); give one for each of the 3 documents",
        ),
        (lambda: GroupLasso(DOCUMENTS, [0, 0, 0]), "one class"),
        (lambda: GroupLasso(DOCUMENTS, [0, 1, math.nan]), "labels hold NaN"),
        (lambda: GroupLasso(DOCUMENTS, [0, 1, 1], strength=0), "strength=0"),
        (lambda: GroupLasso(DOCUMENTS, [0, 1, 1], steps=1.5), "steps=1.5"),
        (lambda: VocabularyDropout(DOCUMENTS, [0, 1, 1, 0]), "labels have shape"),
        (lambda: VocabularyDropout([[], [], []], [0, 1, 1]), "none of the 3 documents"),
        (lambda: VocabularyDropout(DOCUMENTS, [0, 1, 1], strength=True), "strength=True"),
    ],
)
def test_bad_input_has_one_clear_error(make, message):
    with pytest.raises(ArgumentError, match=message):
        fb.AnchorTable(6, 4, anchors=3, init=make(), generator=seeded())


def test_frequent_objects_may_look_alike():
    features = np.concatenate([np.zeros((3, 2)), [[1, 0], [0, 1], [1, 1]]])
    found = chosen(FrequencyThenClusters([9, 9, 9, 1, 1, 1], features), 6, 6)
    assert found[:3] == [0, 1, 2]
    assert sorted(found) == list(range(6))


def test_without_scikit_learn_the_error_tells_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sklearn.cluster", None)
    with pytest.raises(MissingExtra, match=r'pip install "featherbed\[train\]"'):
        chosen(KMeansPlusPlus(FEATURES), 6, 2)
