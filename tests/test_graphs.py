"""Relations between objects, against brute force, hand-made files and known facts."""

import copy
import gzip
import json
import math
import pickle
import sys
import tarfile
import tracemalloc
import zipfile
from collections import Counter, defaultdict
from importlib import import_module
from itertools import combinations

import numpy as np
import pytest
from scipy.sparse import csr_array

import featherbed as fb
from featherbed.errors import ArgumentError, DataError, FormatError, MissingExtra
from featherbed.graphs import (
    Graph,
    cooccurrence,
    cooccurrence_counts,
    edge_file,
    lists,
    sources,
    wordnet,
)
from featherbed.io.opening import read_lines
from featherbed.io.records import read_movielens

counting = import_module(
    "featherbed.graphs.cooccurrence"
)  # the package's attribute of that name is the function


def edges(graph):
    return {tuple(pair) for pair in graph.pairs().tolist()}


# --- Graph


def random_edges(rng, objects, count):
    pairs = rng.integers(objects, size=(count, 2))
    return pairs, {(min(i, j), max(i, j)) for i, j in pairs.tolist() if i != j}


def test_a_graph_is_its_set_of_pairs():
    rng = np.random.default_rng(0)
    for objects, count in ((1, 3), (2, 0), (7, 12), (40, 200)):
        pairs, expected = random_edges(rng, objects, count)
        graph = Graph.from_edges(objects, pairs)
        assert edges(graph) == expected
        assert graph.edges == len(expected)
        assert graph.objects == objects
        assert repr(graph) == f"Graph(objects={objects}, edges={len(expected)})"
        assert graph.pairs().dtype == np.int64
        assert graph.pairs().tolist() == sorted(map(list, expected))
        near = defaultdict(list)
        for i, j in sorted([*expected, *((j, i) for i, j in expected)]):
            near[i].append(j)
        assert [graph.neighbors(i).tolist() for i in range(objects)] == [
            near[i] for i in range(objects)
        ]
        assert graph.degrees.tolist() == [len(near[i]) for i in range(objects)]
        dense = graph.matrix.toarray()
        assert dense.dtype == bool
        assert np.array_equal(dense, dense.T)
        assert not dense.diagonal().any()
        assert graph.symmetric
        assert edges(Graph(graph.matrix)) == edges(pickle.loads(pickle.dumps(graph))) == expected


@pytest.fixture(params=[1 << 20, 7, 1])
def small_blocks(request, monkeypatch):
    monkeypatch.setattr(lists, "BLOCK", request.param)


@pytest.mark.usefixtures("small_blocks")
def test_a_directed_graph_is_its_set_of_arcs():
    rng = np.random.default_rng(3)
    for objects, count in ((1, 3), (2, 0), (7, 12), (40, 200)):
        pairs = rng.integers(objects, size=(count, 2))
        expected = sorted({(i, j) for i, j in pairs.tolist() if i != j})
        graph = Graph.from_edges(objects, pairs.astype(np.int32), symmetric=False)
        if graph.symmetric:
            assert {(j, i) for i, j in expected} == set(expected)
            continue
        assert (objects, count) in ((7, 12), (40, 200))
        assert repr(graph) == f"Graph(objects={objects}, edges={len(expected)}, symmetric=False)"
        assert graph.pairs().tolist() == [list(arc) for arc in expected]
        near = [[j for i, j in expected if i == own] for own in range(objects)]
        assert [graph.neighbors(i).tolist() for i in range(objects)] == near
        assert graph.degrees.tolist() == [len(found) for found in near]
        for other in (
            Graph(graph.matrix),
            Graph(graph.matrix.tocsc()),
            pickle.loads(pickle.dumps(graph)),
            copy.deepcopy(graph),
        ):
            assert not other.symmetric
            assert other.pairs().tolist() == graph.pairs().tolist()
        mirrored = Graph(graph.matrix.T)
        assert (graph | mirrored).symmetric
        assert edges(graph | mirrored) == {(min(arc), max(arc)) for arc in expected}
        drawn = set(map(tuple, graph.non_edges(20_000, 0).tolist()))
        assert drawn == set(combinations(range(objects), 2)) - edges(graph | mirrored)


def test_symmetric_says_what_the_relation_is_and_not_how_it_was_made():
    assert Graph.from_edges(3, [[0, 1], [1, 0]], symmetric=False).symmetric
    assert Graph.from_edges(3, [[0, 1], [1, 0]], symmetric=False).edges == 1
    circle = Graph.from_edges(
        3, [[0, 1], [1, 2], [2, 0]], symmetric=False
    )  # as many arcs in as out, everywhere
    assert not circle.symmetric
    assert circle.edges == 3
    assert circle.neighbors(2).tolist() == [0]


@pytest.mark.usefixtures("small_blocks")
def test_lists_and_symmetry_against_dense_matrices():
    rng = np.random.default_rng(4)
    for _ in range(30):
        dense = rng.random((6, 6)) < 0.3
        if rng.random() < 0.5:
            dense |= dense.T
        graph = Graph(csr_array(dense))
        np.fill_diagonal(dense, False)
        assert np.array_equal(graph.matrix.toarray(), dense)
        assert graph.symmetric == np.array_equal(dense, dense.T)
        assert graph.matrix.indices.dtype == graph.matrix.indptr.dtype == np.int32


def test_memory_of_many_pairs(monkeypatch):
    monkeypatch.setattr(lists, "BLOCK", 1 << 14)
    pairs = np.random.default_rng(0).integers(50_000, size=(1_000_000, 2))
    tracemalloc.start()
    graph = Graph.from_edges(50_000, pairs)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert graph.edges > 990_000
    assert kept < 8.8 * len(pairs)
    assert peak < 25 * len(pairs) + 64 * lists.BLOCK


# --- the degree cap


def greedy(order, most):
    """Taken one by one as long as both ends have room."""
    degrees, kept = Counter(), set()
    for i, j in order:
        if degrees[i] < most and degrees[j] < most:
            degrees.update((i, j))
            kept.add((i, j))
    return kept


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("most", [1, 2, 3, 8])
def test_a_cap_leaves_no_room(most):
    rng = np.random.default_rng(most)
    pairs, expected = random_edges(rng, 30, 150)
    graph = Graph.from_edges(30, pairs, most=most)
    kept = edges(graph)
    assert graph.symmetric
    assert kept <= expected
    assert graph.degrees.max() <= most
    full = set(np.flatnonzero(graph.degrees == most).tolist())
    assert all(i in full or j in full for i, j in expected - kept)
    assert (
        edges(Graph.from_edges(30, pairs[::-1, ::-1], most=most)) == kept
    )  # whatever the order of pairs
    assert edges(Graph.from_edges(30, pairs).capped(most, seed=1)) != kept
    assert Graph.from_edges(30, pairs).capped(100).edges == len(expected)
    order = rng.permutation(sorted(expected))
    keep = lists.within(most, 30, *order.T, np.arange(len(order)))
    assert set(map(tuple, order[keep].tolist())) == greedy(list(map(tuple, order.tolist())), most)


def test_a_cap_of_arcs_keeps_some_of_each_object():
    pairs = np.random.default_rng(0).integers(20, size=(200, 2))
    whole = Graph.from_edges(20, pairs, symmetric=False)
    graph = Graph.from_edges(20, pairs, symmetric=False, most=3)
    assert graph.degrees.tolist() == np.minimum(whole.degrees, 3).tolist()
    assert set(map(tuple, graph.pairs().tolist())) <= set(map(tuple, whole.pairs().tolist()))
    both = Graph.from_edges(20, pairs[:60])
    every = np.concatenate([both.pairs(), both.pairs()[:, ::-1]])
    for few in (
        both.capped(2, symmetric=False),
        Graph.from_edges(20, every, symmetric=False, most=2),
    ):
        assert not few.symmetric
        assert few.degrees.tolist() == np.minimum(both.degrees, 2).tolist()
        assert {(min(arc), max(arc)) for arc in few.pairs().tolist()} <= edges(both)


def test_which_neighbours_stay_is_even():
    star = Graph.from_edges(11, [[0, i] for i in range(1, 11)])
    rng = np.random.default_rng(0)
    found = Counter(int(i) for _ in range(2000) for i in star.capped(2, seed=rng).neighbors(0))
    assert sorted(found) == list(range(1, 11))
    assert sum((n - 400) ** 2 / 400 for n in found.values()) < 9 + 5 * math.sqrt(18)  # chi squared


def test_union():
    rng = np.random.default_rng(1)
    (first, some), (second, others) = (random_edges(rng, 12, 15) for _ in range(2))
    assert edges(Graph.from_edges(12, first) | Graph.from_edges(12, second)) == some | others
    with pytest.raises(ArgumentError, match="over 12 objects, the other over 13"):
        Graph.from_edges(12, first) | Graph.from_edges(13, second)
    with pytest.raises(TypeError):
        Graph.from_edges(12, first) | {(0, 1)}


def test_a_matrix_may_hold_weights_zeros_and_a_diagonal():
    matrix = csr_array(
        ([2.0, 0.5, 0.0, 0.0, 7.0], ([0, 1, 1, 2, 2], [1, 0, 2, 1, 2])), shape=(3, 3)
    )
    assert edges(Graph(matrix)) == {(0, 1)}
    twice = csr_array((np.ones(4), np.array([1, 1, 0, 0]), np.array([0, 2, 4])), shape=(2, 2))
    assert Graph(twice).edges == 1


def test_a_graph_does_not_change():
    graph = Graph.from_edges(2, [[0, 1]])
    with pytest.raises(AttributeError):
        graph.matrix = None


@pytest.mark.parametrize(
    ("pairs", "objects", "message"),
    [
        ([[0, 3]], 3, "name object 3: there are 3 objects, with ids 0..2"),
        ([[0, -1]], 3, "name object -1"),
        ([[0.0, 1.0]], 3, "type float64: give whole numbers"),
        ([[True, False]], 3, "type bool"),
        ([0, 1], 3, r"shape \(2,\)"),
        ([[0, 1, 2]], 3, r"shape \(1, 3\)"),
        ([[0, 1], [2]], 3, "different lengths"),
        ([[0, 1]], 0, "objects=0"),
        ([[0, 1]], True, "objects=True"),
        ([[0, 1]], 2.0, "objects=2.0"),
        ([[0, 1]], 1 << 31, "at most 2,147,483,647 objects"),
    ],
)
def test_pairs_that_are_none(pairs, objects, message):
    with pytest.raises(ArgumentError, match=message):
        Graph.from_edges(objects, pairs)


def test_matrices_that_are_no_relation():
    for matrix in (np.eye(2), csr_array((2, 3)), [[0, 1]], None):
        with pytest.raises(ArgumentError, match="square sparse matrix"):
            Graph(matrix)
    with pytest.raises(ArgumentError, match="objects=0"):
        Graph(csr_array((0, 0)))


def test_settings_of_edges_that_cannot_work():
    for settings in (
        {"most": 0},
        {"most": True},
        {"most": 2.0},
        {"symmetric": 1},
        {"most": 1, "seed": None},
    ):
        with pytest.raises(ArgumentError, match=next(reversed(settings))):
            Graph.from_edges(3, [[0, 1]], **settings)


@pytest.mark.parametrize("i", [-1, 3, 0.0, True, "a", [0]])
def test_neighbours_of_nobody(i):
    with pytest.raises(ArgumentError, match="give the id of one of the 3 objects"):
        Graph.from_edges(3, [[0, 1]]).neighbors(i)


@pytest.mark.parametrize("count", [0, 3, 12])
def test_non_edges_are_all_the_others_equally_often(count):
    rng = np.random.default_rng(count)
    pairs, taken = random_edges(rng, 7, count)
    drawn = Graph.from_edges(7, pairs).non_edges(40_000, rng)
    assert drawn.shape == (40_000, 2)
    assert drawn.dtype == np.int64
    found = Counter(map(tuple, drawn.tolist()))
    left = set(combinations(range(7), 2)) - taken
    assert set(found) == left
    mean = 40_000 / len(left)
    assert sum((n - mean) ** 2 / mean for n in found.values()) < len(left) - 1 + 5 * math.sqrt(
        2 * len(left)
    )  # chi squared


def test_non_edges_follow_their_seed_and_find_the_last_free_pair():
    graph = Graph.from_edges(50, [[0, 1], [1, 2]])
    assert np.array_equal(graph.non_edges(20, 3), graph.non_edges(20, np.random.default_rng(3)))
    assert not np.array_equal(graph.non_edges(20, 3), graph.non_edges(20, 4))
    full = csr_array(1 - np.eye(300))
    assert set(map(tuple, Graph(full - _pair(300, 7, 190)).non_edges(100, 0).tolist())) == {
        (7, 190)
    }
    for complete in (Graph(full), Graph.from_edges(1, [])):
        with pytest.raises(ArgumentError, match="is complete"):
            complete.non_edges(1, 0)
    for seed in (None, True, 0.5, "a", -1):
        with pytest.raises(ArgumentError, match="seed="):
            graph.non_edges(1, seed)
    with pytest.raises(ArgumentError, match="count=-1"):
        graph.non_edges(-1, 0)
    assert graph.non_edges(0, 0).shape == (0, 2)


def _pair(objects, i, j):
    return csr_array(([1.0, 1.0], ([i, j], [j, i])), shape=(objects, objects))


# --- co-occurrence


def brute_counts(texts, objects, window):
    counts = np.zeros((objects, objects), dtype=np.int64)
    for text in texts:
        for s in range(len(text)):
            for t in range(s + 1, min(s + window, len(text) - 1) + 1):
                if text[s] != text[t]:
                    counts[text[s], text[t]] += 1
                    counts[text[t], text[s]] += 1
    return counts


@pytest.fixture(params=[None, (8, 32), (3, 6)], ids=["whole", "pieces", "tiny pieces"])
def pieces(request, monkeypatch):
    """Chunks and blocks so small that texts are cut and merged many times."""
    if request.param:
        monkeypatch.setattr(counting, "CHUNK", request.param[0])
        monkeypatch.setattr(counting, "BLOCK", request.param[1])


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("window", [1, 2, 5, 10, 1000])
@pytest.mark.parametrize("objects", [1, 3, 20, 70_000])
def test_counts_are_exact(window, objects):
    rng = np.random.default_rng(window)
    lengths = [0, 1, 2, 30, 0, 7, 61]
    texts = [rng.zipf(1.5, size=length) % min(objects, 20) for length in lengths]
    expected = brute_counts(texts, min(objects, 20), window)
    found = cooccurrence_counts((text for text in texts), objects, window=window)
    assert found.shape == (objects, objects)
    assert np.array_equal(found[: len(expected), : len(expected)].toarray(), expected)
    assert found.nnz == np.count_nonzero(expected)
    one = np.concatenate(texts)
    counts = cooccurrence_counts(one.astype(np.uint16), objects, window=window)
    assert np.array_equal(
        counts[: len(expected), : len(expected)].toarray(),
        brute_counts([one], len(expected), window),
    )
    some = cooccurrence_counts(one, objects, window=window, min_count=3)
    assert np.array_equal(some.data, counts.data[counts.data >= 3])
    assert (some != counts.multiply(counts >= 3)).nnz == 0


def test_high_ids_and_unsigned_ones():
    top = (1 << 20) - 1
    counts = cooccurrence_counts(
        [np.array([top, 0], dtype=np.uint64), np.array([0, top], dtype=np.int32)], top + 1
    )
    assert counts[0, top] == counts[top, 0] == 2
    assert counts.nnz == 2
    assert cooccurrence_counts(np.array([65535, 65534, 65535]), 65536, window=2)[65534, 65535] == 2


def brute_graph(counts, min_count, pmi, top, by):
    marginal = counts.sum(1)
    total = marginal.sum()
    score = {}
    for i, j in combinations(range(len(counts)), 2):
        if counts[i, j] >= min_count:
            value = math.log(counts[i, j] * total / (marginal[i] * marginal[j]))
            if pmi is None or value >= pmi:
                score[i, j] = score[j, i] = value if by == "pmi" else counts[i, j]
    if top is None:
        return {(i, j) for i, j in score if i < j}
    kept = set()
    for i in range(len(counts)):
        best = sorted((j for a, j in score if a == i), key=lambda j, i=i: (-score[i, j], j))[:top]
        kept |= {(min(i, j), max(i, j)) for j in best}
    return kept


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize(
    "settings",
    [{}, {"min_count": 2}, {"pmi": 0.0}, {"min_count": 1, "pmi": -0.317}, {"min_count": 2, "pmi": 0.2, "top": 2}]
    + [{"min_count": 1, "top": 3, "by": by} for by in ("pmi", "count")] + [{"top": 1, "by": "count"}, {"min_count": 400}],
    ids=str,
)  # fmt: skip
def test_filters_against_brute_force(settings):
    rng = np.random.default_rng(5)
    text = rng.zipf(1.3, size=400) % 25
    expected = {"min_count": 5, "pmi": None, "top": None, "by": "pmi"} | settings
    graph = cooccurrence(text, 25, window=3, **settings)
    assert edges(graph) == brute_graph(brute_counts([text], 25, 3), **expected)


def test_windows_stay_inside_each_array():
    assert cooccurrence([[0, 1], [2, 3]] * 5, 4).pairs().tolist() == [[0, 1], [2, 3]]
    assert cooccurrence(np.array([0, 1, 2, 3] * 5), 4).edges == 6


def test_counts_past_31_bits():
    keys, counts = np.array([5], dtype=np.uint32), np.array([2**31 - 1], dtype=np.int32)
    _, more = counting._merge(keys, counts, np.array([5, 5, 9], dtype=np.uint32), seen=2**31 + 2)
    assert more.tolist() == [2**31 + 1, 1]


@pytest.mark.parametrize(
    ("tokens", "settings", "message"),
    [
        (np.array([0, 5]), {}, "tokens name object 5"),
        ([[0, 1], [-1]], {}, "tokens name object -1"),
        (np.array([0.0, 1.0]), {}, "type float64"),
        (np.array([True]), {}, "type bool"),
        (np.zeros((2, 2), int), {}, r"shape \(2, 2\)"),
        ([0, 1], {}, r"shape \(\)"),
        ("text", {}, "tokens are str"),
        (5, {}, "tokens are int"),
        (np.array([0]), {"window": 0}, "window=0"),
        (np.array([0]), {"window": True}, "window=True"),
        (np.array([0]), {"min_count": 0}, "min_count=0"),
        (np.array([0]), {"min_count": 1}, "would relate everything that ever met"),
        (np.array([0]), {"pmi": math.nan}, "pmi=nan"),
        (np.array([0]), {"pmi": "1"}, "pmi='1'"),
        (np.array([0]), {"top": 0}, "top=0"),
        (np.array([0]), {"top": 3, "by": "size"}, "by='size'"),
    ],
)
def test_cooccurrence_says_what_is_wrong(tokens, settings, message):
    with pytest.raises(ArgumentError, match=message):
        cooccurrence(tokens, 5, **settings)


# --- WordNet

LICENCE = "  1 This line stands for the licence.  \n"
SYNSETS = {
    "data.noun": [
        "00000100 05 n 02 dog 0 Hot_Dog 0 002 @ 00000200 n 0000 #m 00000300 n 0000 | a friend | of man",
        "00000200 05 n 01 animal 0 001 ~ 00000100 n 0000 | moves",
        "00000300 05 n 01 pack 0 000 | many",
        "00000400 18 n 01 Lassie 0 001 @i 00000100 n 0000 | an instance",
    ],
    "data.verb": ["00000100 30 v 02 heat 0 warm 1 002 ! 00000500 v 0101 @ 00000700 v 0000 02 + 02 00 + 08 01 | make hot",
                  "00000500 30 v 02 cool 0 chill 0 001 ! 00000100 v 0101 00 | make cold",
                  "00000700 30 v 01 change 0 000 00 | alter"],
    "data.adj": ["00000100 00 a 01 galore(ip) 0 002 & 00000200 a 0000 ! 00000200 a 0101 | many",
                 "00000200 00 s 01 ample 0 000 | x"],
    "data.adv": [],
}  # fmt: skip
WORDS = [
    "dog",
    "hot dog",
    "animal",
    "pack",
    "lassie",
    "warm",
    "heat",
    "cool",
    "chill",
    "galore",
    "ample",
    "nowhere",
    "change",
    "Dog",
]


@pytest.fixture
def tiny(tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    for name, lines in SYNSETS.items():
        (folder / name).write_text(LICENCE + "".join(f"{line}  \n" for line in lines))
    return folder


def named(graph, words):
    return {frozenset((words[i], words[j])) for i, j in graph.pairs().tolist()}


def sets(*pairs):
    return {frozenset(pair.split("/")) for pair in pairs}


def test_each_relation_of_a_small_wordnet(tiny):
    synonyms = sets("dog/hot dog", "dog/Dog", "Dog/hot dog", "warm/heat", "cool/chill")
    antonyms = sets("heat/cool", "ample/galore")
    above = sets(
        "dog/animal", "Dog/animal", "hot dog/animal", "lassie/dog", "lassie/Dog", "lassie/hot dog"
    )
    actions = sets("heat/change", "warm/change")
    assert named(wordnet(WORDS, tiny, ["synonyms"]), WORDS) == synonyms
    assert named(wordnet(WORDS, tiny, ["antonyms"]), WORDS) == antonyms
    assert named(wordnet(WORDS, tiny, ["hypernyms"]), WORDS) == above | actions
    # this small net points down only once, and not from "change": each direction is read for itself
    assert named(wordnet(WORDS, tiny, ["hyponyms"]), WORDS) == sets(
        "dog/animal", "Dog/animal", "hot dog/animal"
    )
    everything = wordnet(WORDS, tiny)
    assert named(everything, WORDS) == synonyms | antonyms | above | actions
    assert everything.objects == len(WORDS)
    assert len(everything.neighbors(WORDS.index("nowhere"))) == 0


def test_wordnet_is_found_in_folders_and_archives(tiny, tmp_path, monkeypatch):
    expected = named(wordnet(WORDS, tiny), WORDS)
    home = tmp_path / "home" / "corpora"
    home.mkdir(parents=True)
    with tarfile.open(tmp_path / "wordnet-x.tar.xz", "w:xz") as tar:
        tar.add(tiny, "dict")
    with zipfile.ZipFile(home / "wordnet.zip", "w") as packed:
        for name in SYNSETS:
            packed.write(tiny / name, f"wordnet/{name}")
    for place in (tmp_path / "wordnet-x.tar.xz", tmp_path, home / "wordnet.zip", home / "wordnet"):
        assert named(wordnet(WORDS, place), WORDS) == expected
    for variable in ("WNSEARCHDIR", "WNHOME", "FEATHERBED_DATA", "NLTK_DATA"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    (tmp_path / "place").mkdir()
    tiny.rename(tmp_path / "place" / "dict")
    for variable, value in (
        ("WNSEARCHDIR", "place/dict"),
        ("WNHOME", "place"),
        ("FEATHERBED_DATA", "."),
        ("NLTK_DATA", "home"),
    ):
        with monkeypatch.context() as here:
            here.setenv(variable, str(tmp_path / value))
            if variable == "FEATHERBED_DATA":
                (tmp_path / "wordnet").symlink_to(tmp_path / "place" / "dict")
            assert named(wordnet(WORDS), WORDS) == expected
    with pytest.raises(DataError, match=r"not found: no data\.noun.*nothing"):
        wordnet(WORDS, tmp_path / "nothing")


def test_broken_wordnet_files(tiny, tmp_path):
    with tarfile.open(tmp_path / "few.tar", "w") as tar:
        tar.add(tiny / "data.noun", "data.noun")
    with pytest.raises(DataError, match=r"holds no data\.verb, data\.adj, data\.adv"):
        wordnet(WORDS, tmp_path / "few.tar")
    for line in (
        "garbage",
        "00000100 05 n zz dog 0 000 | x",
        "00000100 05 n 01 dog 0 003 @ 00000200 n 0000 | x",
    ):
        (tiny / "data.adv").write_text(f"{LICENCE}{line}\n")
        with pytest.raises(DataError, match=r"data\.adv, line 2 is no WordNet synset"):
            wordnet(WORDS, tiny)
    (tiny / "data.adv").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="cannot be read as WordNet"):
        wordnet(WORDS, tiny)


@pytest.mark.parametrize(
    ("words", "relations", "message"),
    [
        (["a"], ["friends"], "give some of synonyms, antonyms"),
        (["a"], "synonyms", "relations='synonyms'"),
        (["a"], [], "relations="),
        ([], ["synonyms"], "empty"),
        ("dog", ["synonyms"], "give a list of names"),
        (["a", 3], ["synonyms"], "name 1 is 3"),
    ],
)
def test_wordnet_says_what_is_wrong(tiny, words, relations, message):
    with pytest.raises(ArgumentError, match=message):
        wordnet(words, tiny, relations)


def test_known_facts_of_wordnet(data):
    words = [
        "hot",
        "cold",
        "dog",
        "canine",
        "domestic_animal",
        "car",
        "automobile",
        "Barack Obama",
        "einstein",
        "physicist",
    ]
    words += ["tree", "green", "good", "bad", "walk", "animal", "quickly", "slowly", "zzyzx"]
    archive = data / "wordnet"
    assert named(wordnet(words, archive, ["antonyms"]), words) == sets(
        "hot/cold", "good/bad", "quickly/slowly"
    )
    assert named(wordnet(words, archive, ["synonyms"]), words) == sets("car/automobile")
    above = sets(
        "dog/canine", "dog/domestic_animal", "einstein/physicist", "animal/domestic_animal"
    )
    above |= sets("tree/dog")  # to tree an animal is to dog it up a tree
    assert named(wordnet(words, archive, ["hypernyms"]), words) == above
    assert named(wordnet(words, archive, ["hyponyms"]), words) == above


# --- edge files

CONCEPTNET = """\
/a/1\t/r/Antonym\t/c/en/hot/a\t/c/en/cold/a/wn\t{"dataset": "d", "weight": 2.0}
/a/2\t/r/RelatedTo\t/c/en/hot_dog\t/c/en/hot\t{"weight": 0.5}
/a/3\t/r/RelatedTo\t/c/fr/hot\t/c/en/dog\t{"weight": 9.0}
/a/4\t/r/ExternalURL\t/c/en/dog\thttp://example.org/dog\t{"weight": 1.0}
/a/5\t/r/RelatedTo\t/c/en/dog\t/c/en/wolf\t{"weight": 1.0}
/a/6\t/r/RelatedTo\t/c/en/dog\t/c/en/dog\t{"weight": 1.0}
"""
KEYS = ["hot", "cold", "Hot dog", "dog"]


def test_conceptnet(tmp_path):
    path = tmp_path / "assertions.csv.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write(CONCEPTNET)
    missing = Counter()
    assert edges(edge_file(path, KEYS, unknown=missing)) == {(0, 1), (0, 2)}
    assert missing == Counter({"wolf": 1})
    assert edges(edge_file(path, KEYS, relations=["Antonym"])) == {(0, 1)}
    assert edges(edge_file(path, KEYS, min_weight=1.0)) == {(0, 1)}
    assert edges(edge_file(path, KEYS, language=None)) == {(0, 1), (0, 2), (0, 3)}
    assert edges(edge_file(path, KEYS, language="fr")) == set()


@pytest.mark.parametrize("separator", ["\t", ",", " ", "   ", ", "])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_two_columns(tmp_path, separator, end):
    path = tmp_path / "edges.txt"
    lines = [
        "# a comment",
        f"u1{separator}u3",
        "",
        f"u3{separator}u1",
        f"u2{separator}u9",
        f"u2{separator}u3",
    ]
    path.write_bytes(end.join(lines).encode())
    missing = Counter()
    graph = edge_file(path, ["u1", "u2", "u3", "U1"], unknown=missing)
    assert edges(graph) == {(0, 2), (1, 2)}
    assert graph.objects == 4
    assert missing == Counter({"u9": 1})


@pytest.mark.parametrize(
    ("text", "settings", "number"),
    [
        ("a b\n\na b c\n", {}, 3),
        ("a\tb\na b\n", {}, 2),
        ("a,b\na\n", {}, 2),
        ("lonely\n", {}, 1),
        (CONCEPTNET + "/a/7\t/r/IsA\t/c/en/a\n", {}, 7),
        (CONCEPTNET + "/a/7\tIsA\t/c/en/a\t/c/en/b\t{}\n", {}, 7),
        (CONCEPTNET + "/a/7\t/r/IsA\t/c/en\t/c/en/b\t{}\n", {}, 7),
        (CONCEPTNET + "/a/7\t/r/IsA\t/c/en/a\t/c/en/b\t{}\n", {"min_weight": 1}, 7),
        (CONCEPTNET + "/a/7\t/r/IsA\t/c/en/a\t/c/en/b\tweight\n", {"min_weight": 1}, 7),
    ],
)
def test_a_bad_line_is_named(tmp_path, text, settings, number):
    path = tmp_path / "edges"
    path.write_text(text)
    with pytest.raises(DataError, match=f"line {number}: expected"):
        edge_file(path, ["a", "b"], **settings)


def test_files_and_settings_that_cannot_work(tmp_path):
    path = tmp_path / "edges"
    path.write_text("a b\n")
    for settings in ({"relations": ["Synonym"]}, {"min_weight": 1.0}):
        with pytest.raises(ArgumentError, match="has two columns"):
            edge_file(path, ["a"], **settings)
    for settings in (
        {"relations": "Synonym"},
        {"relations": []},
        {"min_weight": math.nan},
        {"min_weight": True},
    ):
        with pytest.raises(ArgumentError, match=r"relations=|min_weight="):
            edge_file(path, ["a"], **settings)
    with pytest.raises(DataError, match="cannot be read"):
        edge_file(tmp_path / "nothing", ["a"])
    path.write_text("\n# nothing\n")
    with pytest.raises(DataError, match="holds no edges"):
        edge_file(path, ["a"])
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"a b\n" * 1000)[:30])
    with pytest.raises(DataError, match="cannot be read"):
        edge_file(tmp_path / "cut.gz", ["a"])
    path.write_bytes(b"a \xff\n")
    with pytest.raises(DataError, match="cannot be read"):
        edge_file(path, ["a"])


# --- shared attributes


def test_shared_attributes_against_brute_force():
    rng = np.random.default_rng(2)
    ids, values = rng.integers(30, size=90), rng.integers(25, size=90)
    holders = defaultdict(set)
    for i, value in zip(ids.tolist(), values.tolist(), strict=True):
        holders[value].add(i)
    assert max(map(len, holders.values())) > 4
    for largest in (2, 3, 4, 100, None):
        held = [some for some in holders.values() if len(some) <= (largest or 30)]
        expected = {pair for some in held for pair in combinations(sorted(some), 2)}
        assert edges(Graph.from_attributes(30, (ids, values), largest=largest)) == expected
        names = [f"v{value}" for value in values]
        assert edges(Graph.from_attributes(30, (ids.tolist(), names), largest=largest)) == expected
        for most in (1, 2, 3, 5):
            graph = Graph.from_attributes(30, (ids, values), largest=largest, most=most)
            assert edges(graph) <= expected
            assert graph.degrees.max() <= most
            assert edges(
                Graph.from_attributes(30, (ids, values), largest=largest, most=most)
            ) == edges(graph)
    assert edges(Graph.from_attributes(30, (ids, values), most=2, seed=1)) != edges(
        Graph.from_attributes(30, (ids, values), most=2)
    )


def test_one_value_for_each_object():
    assert edges(Graph.from_attributes(4, np.array([1.0, np.nan, np.nan, 1.0]))) == {(0, 3)}
    assert edges(Graph.from_attributes(7, [np.nan, "a", np.nan, "a", None, None, 3])) == {(1, 3)}
    assert edges(Graph.from_attributes(3, np.array(["a", "b", "a"]))) == {(0, 2)}
    assert edges(Graph.from_attributes(2, [None, None])) == set()
    assert edges(Graph.from_attributes(3, ([], []))) == set()
    assert Graph.from_attributes(9, ["a"] * 9).edges == 36
    assert Graph.from_attributes(8, ["a"] * 8).edges == 28


@pytest.mark.parametrize("most", [1, 2, 3, 4, 7])
def test_common_values_with_a_cap(most):
    types = ["person"] * 40 + ["place"] * 5 + [None] * 3
    graph = Graph.from_attributes(48, types, most=most)
    assert graph.symmetric
    kinds = {(types[i], types[j]) for i, j in edges(graph)}
    assert kinds == {("person", "person"), ("place", "place")}
    assert graph.degrees[:40].max() <= most
    if most % 2 == 0:
        assert (graph.degrees[:40] == most).all()
    if most >= 4:
        assert (graph.degrees[40:45] == 4).all()
    assert not graph.degrees[45:].any()
    far = {abs(i - j) for i, j in edges(graph) if j < 40}
    assert max(far) > 15  # drawn from all holders, not from those next to each other


def test_pairs_beyond_memory_are_never_made():
    with pytest.raises(
        ArgumentError,
        match=r"relate 5,000,000,000 pairs \(one is shared by 100,000 objects\).*give largest=",
    ):
        Graph.from_attributes(100_000, ["token"] * 100_000)
    assert Graph.from_attributes(100_000, ["token"] * 100_000, most=6).edges == 300_000


@pytest.mark.parametrize(
    ("attributes", "settings", "message"),
    [
        (["a", "b"], {}, r"shape \(2,\), the ids of their objects \(3,\)"),
        (([0, 1], ["a"]), {}, r"shape \(1,\), the ids of their objects \(2,\)"),
        (("a", "b", "c"), {}, "a tuple of 3 attributes"),
        (([0, 3], ["a", "b"]), {}, "ids name object 3"),
        (([0.5], ["a"]), {}, "type float64"),
        ([["a"], ["b", "c"], []], {}, "values that can be looked up"),
        (["a", "b", "a"], {"largest": 1}, "largest=1"),
        (["a", "b", "a"], {"most": 0}, "most=0"),
        (["a", "b", "a"], {"seed": 1.0}, "seed=1.0"),
    ],
)
def test_attributes_that_cannot_work(attributes, settings, message):
    with pytest.raises(ArgumentError, match=message):
        Graph.from_attributes(3, attributes, **settings)


def test_movies_that_share_an_actor(data):
    place = {key: number for number, key in enumerate(read_movielens(data / "ml-1m").item_keys)}
    rows = [
        line.rstrip("\n").split("\t") for line in read_lines(data / "kg-ml-1m" / "movie_actor.tsv")
    ][1:]
    rows = [(place[movie], actor) for movie, actor in rows if movie in place]
    cast = tuple(map(list, zip(*rows, strict=True)))
    graph = Graph.from_attributes(len(place), cast)
    assert graph.objects == 3706
    assert graph.edges == 26_286
    assert (graph.degrees > 0).sum() == 3304
    actors = defaultdict(set)
    for movie, actor in rows:
        actors[movie].add(actor)
    for movie in range(0, 3706, 200):
        assert graph.neighbors(movie).tolist() == [
            i for i in range(3706) if i != movie and actors[movie] & actors[i]
        ]
    few = Graph.from_attributes(len(place), cast, most=10)
    assert few.degrees.max() == 10
    assert edges(few) < edges(graph)


def test_users_of_an_age_group(data):
    ages = [line.split("::")[2] for line in read_lines(data / "ml-1m" / "users.dat")]
    graph = Graph.from_attributes(len(ages), ages)
    groups = Counter(ages)
    assert len(groups) == 7
    assert graph.degrees.tolist() == [groups[age] - 1 for age in ages]
    assert graph.edges == sum(math.comb(n, 2) for n in groups.values())
    few = Graph.from_attributes(len(ages), ages, most=50)
    assert set(few.degrees.tolist()) == {50}
    first = np.array(ages)[few.pairs()]
    assert (first[:, 0] == first[:, 1]).all()


# --- nearest vectors


def brute_nearest(vectors, k, metric):
    vectors = np.asarray(vectors, dtype=np.float64)
    if metric == "cosine":
        vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    far = ((vectors[:, None] - vectors[None]) ** 2).sum(-1)
    np.fill_diagonal(far, np.inf)
    return [np.argsort(row, kind="stable")[:k].tolist() for row in far], far


@pytest.mark.parametrize("metric", ["cosine", "l2"])
@pytest.mark.parametrize("k", [1, 3, 10, 59])
@pytest.mark.parametrize("block", [1, 400, 1 << 22])
def test_nearest_against_brute_force(metric, k, block, monkeypatch):
    monkeypatch.setattr(sources, "NUMBERS", block)
    rng = np.random.default_rng(k)
    vectors = rng.standard_normal((60, 5)) * rng.uniform(0.1, 10, size=(60, 1))
    expected, far = brute_nearest(vectors, k, metric)
    arcs = Graph.nearest(vectors, k, metric=metric, symmetric=False)
    assert [arcs.neighbors(i).tolist() for i in range(60)] == [sorted(row) for row in expected]
    graph = Graph.nearest(vectors, k, metric=metric)
    pairs = {(min(i, j), max(i, j)) for i, row in enumerate(expected) for j in row}
    assert graph.symmetric
    assert edges(graph) == pairs
    order = sorted(pairs, key=lambda pair: far[pair])
    for most in (1, 2, 4):
        assert edges(Graph.nearest(vectors, k, metric=metric, most=most)) == greedy(order, most)
        few = Graph.nearest(vectors, k, metric=metric, symmetric=False, most=most)
        assert [few.neighbors(i).tolist() for i in range(60)] == [
            sorted(row[:most]) for row in expected
        ]


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30, 1e200])
def test_nearest_far_from_zero_and_of_any_size(scale):
    vectors = np.random.default_rng(0).standard_normal((40, 4))
    expected, _ = brute_nearest(vectors, 3, "l2")
    graph = Graph.nearest((vectors + 1e6) * scale, 3, metric="l2", symmetric=False)
    assert [graph.neighbors(i).tolist() for i in range(40)] == [sorted(row) for row in expected]
    expected, _ = brute_nearest(vectors, 3, "cosine")
    graph = Graph.nearest(vectors * scale, 3, symmetric=False)
    assert [graph.neighbors(i).tolist() for i in range(40)] == [sorted(row) for row in expected]


def test_nearest_of_vectors_that_are_alike():
    graph = Graph.nearest(np.ones((50, 3)), 4, symmetric=False)
    assert set(graph.degrees.tolist()) == {4}
    assert Graph.nearest(np.zeros((5, 2)), 4, metric="l2").edges == 10
    assert Graph.nearest(
        np.array([[1, 0], [2, 0], [1, 3]], dtype=np.int8), 1, symmetric=False
    ).pairs().tolist()[0] == [0, 1]


def test_nearest_among_many_by_cells(monkeypatch, tmp_path):
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((60, 16))
    vectors = (centres[rng.integers(60, size=3000)] + 0.3 * rng.standard_normal((3000, 16))).astype(
        np.float16
    )
    exact = Graph.nearest(vectors, 5, symmetric=False)
    monkeypatch.setattr(sources, "EXACT", 2999)
    np.save(tmp_path / "vectors.npy", vectors)
    cells = Graph.nearest(np.load(tmp_path / "vectors.npy", mmap_mode="r"), 5, symmetric=False)
    same = exact.matrix.multiply(cells.matrix).nnz / exact.matrix.nnz
    assert same > 0.98
    assert cells.degrees.max() == 5
    monkeypatch.setattr(sources, "PROBES", 1)
    few = Graph.nearest(vectors, 5, symmetric=False)
    assert exact.matrix.multiply(few.matrix).nnz / exact.matrix.nnz < same


@pytest.mark.parametrize(
    ("vectors", "k", "settings", "message"),
    [
        ([[1.0, 2.0], [0.0, 0.0], [1.0, 1.0]], 1, {}, "vector 1 is zero and has no angle"),
        ([[1.0, 2.0], [1.0, 1.0], [1.0, np.nan]], 1, {}, "vector 2 holds NaN or infinity"),
        ([[1.0, 2.0], [1.0, np.inf]], 1, {"metric": "l2"}, "vector 1 holds NaN or infinity"),
        ([[1.0, 2.0], [1.0, 1.0]], 2, {}, "k=2: 2 vectors were given, so there are 1 others"),
        ([[1.0, 2.0], [1.0, 1.0]], 0, {}, "k=0"),
        ([[1.0, 2.0], [1.0, 1.0]], 1, {"metric": "dot"}, "metric='dot': use one of cosine, l2"),
        ([[1.0, 2.0], [1.0, 1.0]], 1, {"most": 0}, "most=0"),
        ([[1.0, 2.0], [1.0, 1.0]], 1, {"symmetric": None}, "symmetric=None"),
        ([1.0, 2.0], 1, {}, r"float64 of shape \(2,\)"),
        ([[True], [False]], 1, {}, "vectors are bool"),
        ([["a"], ["b"]], 1, {}, "vectors are <U1"),
        ([[1.0], [1.0, 2.0]], 1, {}, "different lengths"),
        (np.empty((3, 0)), 1, {}, r"shape \(3, 0\)"),
    ],
)
def test_vectors_that_cannot_work(vectors, k, settings, message):
    with pytest.raises(ArgumentError, match=message):
        Graph.nearest(vectors, k, **settings)


def test_nearest_without_faiss(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(
        MissingExtra, match=r'Graph.nearest needs faiss: pip install "featherbed\[compress\]"'
    ):
        Graph.nearest(np.eye(3), 1)


# --- files


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("mmap", [True, False])
def test_a_graph_comes_back_from_its_file(tmp_path, symmetric, mmap):
    rng = np.random.default_rng(0)
    for objects, count in ((1, 0), (5, 0), (7, 12), (40, 200)):
        graph = Graph.from_edges(
            objects, rng.integers(objects, size=(count, 2)), symmetric=symmetric
        )
        path = tmp_path / "graph.safetensors"
        graph.save(path)
        found = Graph.load(str(path), mmap=mmap)
        assert repr(found) == repr(graph)
        assert found.symmetric == graph.symmetric
        for loaded in (
            found,
            pickle.loads(pickle.dumps(found)),
            copy.deepcopy(found),
            Graph(found.matrix),
        ):
            assert np.array_equal(loaded.matrix.indptr, graph.matrix.indptr)
            assert np.array_equal(loaded.matrix.indices, graph.matrix.indices)
            assert loaded.matrix.indices.dtype == np.int32
            assert np.array_equal(loaded.matrix.toarray(), graph.matrix.toarray())
        assert (found | graph).edges == graph.edges
        if count:
            assert found.matrix.indices.flags.writeable != mmap
        found.save(path)  # over the file it is mapped from
        assert repr(Graph.load(path)) == repr(graph)
    assert [file.name for file in tmp_path.iterdir()] == ["graph.safetensors"]


def test_a_loaded_graph_is_no_copy(tmp_path, monkeypatch):
    monkeypatch.setattr(lists, "BLOCK", 1 << 14)
    path = tmp_path / "graph.safetensors"
    pairs = np.random.default_rng(0).integers(20_000, size=(2_000_000, 2))
    graph = Graph.from_edges(20_000, pairs)
    graph.save(path)
    size = path.stat().st_size
    assert size == pytest.approx(8 * graph.edges + 4 * 20_001, abs=500)
    Graph.load(path)
    tracemalloc.start()
    loaded = Graph.load(path)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert loaded.edges == graph.edges
    assert kept < 200_000  # at most the starts
    assert peak < size / 20


def write_container(path, arrays, about=None):
    """A safetensors file made by hand; starts and neighbors come as lists or arrays."""
    header, data = (
        {"__metadata__": {"format": "featherbed", "featherbed": json.dumps(about or {"graph": 1})}},
        b"",
    )
    for name, array in arrays.items():
        array = np.asarray(array)
        kind = {"u": "U", "i": "I", "f": "F"}[array.dtype.kind] + str(8 * array.itemsize)
        header[name] = {
            "dtype": kind,
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + array.nbytes],
        }
        data += array.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def u32(*values):
    return np.array(values, dtype=np.int64).astype(np.uint32)


@pytest.mark.parametrize(
    ("starts", "neighbors", "message"),
    [
        (
            u32(0, 1, 2, 2),
            u32(1, 3),
            "object 1 has the neighbor 3: neighbors are others of the 3 objects",
        ),
        (u32(0, 1, 2, 2), u32(1, -1), "object 1 has the neighbor -1"),
        (u32(0, 1, 2, 2), u32(1, 1), "object 1 has the neighbor 1: neighbors are others"),
        (u32(0, 2, 3, 4), u32(2, 1, 0, 0), "the neighbors of object 0 are not sorted, each once"),
        (u32(0, 2, 3, 4), u32(1, 1, 0, 0), "the neighbors of object 0 are not sorted"),
        (u32(0, 2, 1, 2), u32(1, 0), "object 1 has a negative number of neighbors"),
        (u32(0, -1, 1, 2), u32(1, 0), "object 0 has a negative number of neighbors"),
        (u32(1, 1, 2, 2), u32(1, 0), "starts go from 1 to 2"),
        (
            u32(0, 1, 2, 3),
            u32(1, 0),
            "starts go from 0 to 3, not from 0 to the number of neighbors, 2",
        ),
        (u32(0), u32(), "with V from 1"),
        (u32([0, 1], [1, 2]), u32(1, 0), "must be flat, of U32 or U64"),
        (u32(0, 1, 2), u32([1], [0]), "must be flat, of U32 or U64"),
        (u32(0, 1, 2).astype(np.int32), u32(1, 0), "must be flat, of U32 or U64"),
        (u32(0, 1), u32(1, 0).astype(np.uint64), "are of one type"),
        (u32(0, 1, 2).astype(np.float32), u32(1, 0), "must be flat, of U32 or U64"),
    ],
)
def test_broken_lists_are_refused(tmp_path, starts, neighbors, message):
    write_container(tmp_path / "graph", {"starts": starts, "neighbours": neighbors})
    with pytest.raises(FormatError, match=message):
        Graph.load(tmp_path / "graph")


def test_files_that_hold_no_graph(tmp_path):
    path = tmp_path / "graph"
    right = {"starts": u32(0, 1, 2), "neighbours": u32(1, 0)}
    write_container(path, right)
    assert Graph.load(path).pairs().tolist() == [[0, 1]]
    write_container(path, {name: array.astype(np.uint64) for name, array in right.items()})
    assert Graph.load(path).pairs().tolist() == [[0, 1]]
    for arrays in ({"starts": u32(0, 0)}, right | {"more": u32(1)}):
        write_container(path, arrays)
        with pytest.raises(FormatError, match="must hold the arrays starts and neighbors"):
            Graph.load(path)
    for about in ({"graph": 2}, {"version": 1}, [1]):
        write_container(path, right, about)
        with pytest.raises(FormatError, match="is not what this featherbed reads as 'graph'"):
            Graph.load(path)
    write_container(path, right)
    whole = path.read_bytes()
    for cut in (0, 4, 20, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(FormatError, match="graph is no"):
            Graph.load(path)
    path.write_bytes(whole + b"more")
    with pytest.raises(FormatError, match="graph is not a valid safetensors file"):
        Graph.load(path)
    with pytest.raises(FileNotFoundError):
        Graph.load(tmp_path / "nothing")
    with pytest.raises(IsADirectoryError):
        Graph.load(tmp_path)
    with pytest.raises(ArgumentError, match="mmap='r'"):
        write_container(path, right)
        Graph.load(path, mmap="r")
    with pytest.raises(FormatError):
        fb.load(path)
    fb.save(fb.DenseTable(2, 2), path)
    with pytest.raises(FormatError, match="is not what this featherbed reads as 'graph'"):
        Graph.load(path)
