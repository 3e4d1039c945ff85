"""Relations between objects, against brute force, hand-made files and known facts."""

import gzip
import math
import pickle
import tarfile
import zipfile
from collections import Counter, defaultdict
from importlib import import_module
from itertools import combinations

import numpy as np
import pytest
from scipy.sparse import csr_array

from featherbed.errors import ArgumentError, DataError
from featherbed.graphs import Graph, cooccurrence, cooccurrence_counts, edge_file, shared_attributes, wordnet
from featherbed.tasks.data import read_movielens

counting = import_module("featherbed.graphs.cooccurrence")  # the package's attribute of that name is the function


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
        assert [graph.neighbours(i).tolist() for i in range(objects)] == [near[i] for i in range(objects)]
        assert graph.degrees.tolist() == [len(near[i]) for i in range(objects)]
        dense = graph.matrix.toarray()
        assert dense.dtype == bool
        assert np.array_equal(dense, dense.T)
        assert not dense.diagonal().any()
        assert edges(Graph(graph.matrix)) == edges(pickle.loads(pickle.dumps(graph))) == expected


def test_union():
    rng = np.random.default_rng(1)
    (first, some), (second, others) = (random_edges(rng, 12, 15) for _ in range(2))
    assert edges(Graph.from_edges(12, first) | Graph.from_edges(12, second)) == some | others
    with pytest.raises(ArgumentError, match="over 12 objects, the other over 13"):
        Graph.from_edges(12, first) | Graph.from_edges(13, second)
    with pytest.raises(TypeError):
        Graph.from_edges(12, first) | {(0, 1)}


def test_a_matrix_may_hold_weights_zeros_and_a_diagonal():
    matrix = csr_array(([2.0, 0.5, 0.0, 0.0, 7.0], ([0, 1, 1, 2, 2], [1, 0, 2, 1, 2])), shape=(3, 3))
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
    ],
)
def test_pairs_that_are_none(pairs, objects, message):
    with pytest.raises(ArgumentError, match=message):
        Graph.from_edges(objects, pairs)


def test_matrices_that_are_no_relation():
    for matrix in (np.eye(2), csr_array((2, 3)), [[0, 1]], None):
        with pytest.raises(ArgumentError, match="square sparse matrix"):
            Graph(matrix)
    with pytest.raises(ArgumentError, match="not symmetric"):
        Graph(csr_array(([1], ([0], [1])), shape=(2, 2)))


@pytest.mark.parametrize("i", [-1, 3, 0.0, True, "a", [0]])
def test_neighbours_of_nobody(i):
    with pytest.raises(ArgumentError, match="give the id of one of the 3 objects"):
        Graph.from_edges(3, [[0, 1]]).neighbours(i)


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
    assert sum((n - mean) ** 2 / mean for n in found.values()) < len(left) - 1 + 5 * math.sqrt(2 * len(left))  # chi squared


def test_non_edges_follow_their_seed_and_find_the_last_free_pair():
    graph = Graph.from_edges(50, [[0, 1], [1, 2]])
    assert np.array_equal(graph.non_edges(20, 3), graph.non_edges(20, np.random.default_rng(3)))
    assert not np.array_equal(graph.non_edges(20, 3), graph.non_edges(20, 4))
    full = csr_array(1 - np.eye(300))
    assert set(map(tuple, Graph(full - _pair(300, 7, 190)).non_edges(100, 0).tolist())) == {(7, 190)}
    for complete in (Graph(full), Graph.from_edges(1, [])):
        with pytest.raises(ArgumentError, match="is complete"):
            complete.non_edges(1, 0)
    for seed in (None, True, 0.5, "a"):
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
    assert np.array_equal(counts[: len(expected), : len(expected)].toarray(), brute_counts([one], len(expected), window))
    some = cooccurrence_counts(one, objects, window=window, min_count=3)
    assert np.array_equal(some.data, counts.data[counts.data >= 3])
    assert (some != counts.multiply(counts >= 3)).nnz == 0


def test_high_ids_and_unsigned_ones():
    top = (1 << 20) - 1
    counts = cooccurrence_counts([np.array([top, 0], dtype=np.uint64), np.array([0, top], dtype=np.int32)], top + 1)
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
    above = sets("dog/animal", "Dog/animal", "hot dog/animal", "lassie/dog", "lassie/Dog", "lassie/hot dog")
    actions = sets("heat/change", "warm/change")
    assert named(wordnet(WORDS, tiny, ["synonyms"]), WORDS) == synonyms
    assert named(wordnet(WORDS, tiny, ["antonyms"]), WORDS) == antonyms
    assert named(wordnet(WORDS, tiny, ["hypernyms"]), WORDS) == above | actions
    # this small net points down only once, and not from "change": each direction is read for itself
    assert named(wordnet(WORDS, tiny, ["hyponyms"]), WORDS) == sets("dog/animal", "Dog/animal", "hot dog/animal")
    everything = wordnet(WORDS, tiny)
    assert named(everything, WORDS) == synonyms | antonyms | above | actions
    assert everything.objects == len(WORDS)
    assert len(everything.neighbours(WORDS.index("nowhere"))) == 0


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
    for line in ("garbage", "00000100 05 n zz dog 0 000 | x", "00000100 05 n 01 dog 0 003 @ 00000200 n 0000 | x"):
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
    words = ["hot", "cold", "dog", "canine", "domestic_animal", "car", "automobile", "Barack Obama", "einstein", "physicist"]
    words += ["tree", "green", "good", "bad", "walk", "animal", "quickly", "slowly", "zzyzx"]
    archive = data / "wordnet"
    assert named(wordnet(words, archive, ["antonyms"]), words) == sets("hot/cold", "good/bad", "quickly/slowly")
    assert named(wordnet(words, archive, ["synonyms"]), words) == sets("car/automobile")
    above = sets("dog/canine", "dog/domestic_animal", "einstein/physicist", "animal/domestic_animal")
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
    lines = ["# a comment", f"u1{separator}u3", "", f"u3{separator}u1", f"u2{separator}u9", f"u2{separator}u3"]
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
    for settings in ({"relations": "Synonym"}, {"relations": []}, {"min_weight": math.nan}, {"min_weight": True}):
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
    for most in (2, 3, 4, 100):
        expected = {pair for held in holders.values() if len(held) <= most for pair in combinations(sorted(held), 2)}
        assert edges(shared_attributes((ids, values), 30, most=most)) == expected
        names = [f"v{value}" for value in values]
        assert edges(shared_attributes((ids.tolist(), names), 30, most=most)) == expected


def test_one_value_for_each_object():
    assert edges(shared_attributes(np.array([1.0, np.nan, np.nan, 1.0]), 4)) == {(0, 3)}
    assert edges(shared_attributes([np.nan, "a", np.nan, "a", None, None, 3], 7)) == {(1, 3)}
    assert edges(shared_attributes(np.array(["a", "b", "a"]), 3)) == {(0, 2)}
    assert edges(shared_attributes([None, None], 2)) == set()
    assert edges(shared_attributes(([], []), 3)) == set()


@pytest.mark.parametrize(
    ("attributes", "settings", "message"),
    [
        (["a", "b"], {}, r"shape \(2,\), the ids of their objects \(3,\)"),
        (([0, 1], ["a"]), {}, r"shape \(1,\), the ids of their objects \(2,\)"),
        (("a", "b", "c"), {}, "a tuple of 3 attributes"),
        (([0, 3], ["a", "b"]), {}, "ids name object 3"),
        (([0.5], ["a"]), {}, "type float64"),
        ([["a"], ["b", "c"], []], {}, "values that can be looked up"),
        (["a", "b", "a"], {"most": 1}, "most=1"),
    ],
)
def test_attributes_that_cannot_work(attributes, settings, message):
    with pytest.raises(ArgumentError, match=message):
        shared_attributes(attributes, 3, **settings)


def test_movies_that_share_an_actor(data):
    place = {key: number for number, key in enumerate(read_movielens(data / "ml-1m").item_keys)}
    with gzip.open(data / "kg-ml-1m" / "movie_actor.tsv.gz", "rt", encoding="utf-8") as file:
        rows = [line.rstrip("\n").split("\t") for line in file][1:]
    rows = [(place[movie], actor) for movie, actor in rows if movie in place]
    graph = shared_attributes(tuple(map(list, zip(*rows, strict=True))), len(place))
    assert graph.objects == 3706
    assert graph.edges == 26_286
    assert (graph.degrees > 0).sum() == 3304
