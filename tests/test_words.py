"""Word vectors on similarity and analogy files: hand-made cases with known answers, then the real files."""

import math

import numpy as np
import pytest

from featherbed.codecs import words
from featherbed.codecs.words import (
    is_analogies,
    read_analogies,
    read_pairs,
    score_words,
    spearman,
)
from featherbed.errors import ArgumentError, DataError


@pytest.fixture
def write(tmp_path):
    def made(text, name="words.txt"):
        path = tmp_path / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return made


def test_pairs_in_every_spelling(write):
    path = write(
        "\ufeff# made by hand\r\n\r\ntiger\tcat\t7.35\r\nbook paper  7.46\nold, new ,1e-1\n  # said nobody\n"
    )
    assert read_pairs(path) == [
        ("tiger", "cat", 7.35),
        ("book", "paper", 7.46),
        ("old", "new", 0.1),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "tiger cat",
        "tiger cat high",
        "tiger cat 7 8",
        "tiger,,7",
        "tiger cat nan",
        "tiger",
        "a,b,7,35",
    ],
)
def test_a_bad_pair_is_named_by_its_line(write, line):
    with pytest.raises(DataError, match=r"words\.txt, line 3 is .*two words and a finite score"):
        read_pairs(write(f"# two\ntiger cat 7\n{line}\n"))


def test_analogies(write):
    path = write(
        ": capitals\nAthens Greece Oslo Norway\n\n# more\n: plurals\r\ncat cats dog dogs\r\n"
    )
    assert read_analogies(path) == [
        ("Athens", "Greece", "Oslo", "Norway"),
        ("cat", "cats", "dog", "dogs"),
    ]
    with pytest.raises(
        DataError, match="line 2 is 'one two three': an analogy file has four words"
    ):
        read_analogies(write(": capitals\none two three\n"))


@pytest.mark.parametrize("read", [read_pairs, read_analogies, is_analogies])
def test_files_that_cannot_be_read(write, tmp_path, read):
    for path in (tmp_path / "absent.txt", tmp_path, write(b"\xff\xfe\x00caf\xe9", "bytes.txt")):
        with pytest.raises(DataError, match="cannot be read as UTF-8 text"):
            read(path)
    with pytest.raises(DataError, match="has no lines of data"):
        read(write("# nothing\n\n"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (": x\n", True),
        ("a b c d\n", True),
        ("a b 1\n", False),
        ("# :\na,b,2\n", False),
        ("a b 3 noun\n", False),
    ],
)
def test_kinds_are_told_apart(write, text, expected):
    assert is_analogies(write(text)) is expected


def test_spearman_by_hand():
    assert spearman([1, 2, 3], [5, 7, 9]) == 1
    assert spearman([1, 2, 3], [9, 7, 5]) == -1
    # ranks 1, 2.5, 2.5, 4 against 1, 3, 2, 4: centred products 2.25 + 0 + 0 + 2.25, squares 4.5 and 5
    assert spearman([1, 2, 2, 3], [1, 3, 2, 4]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert math.isnan(spearman([1, 1], [1, 2]))
    assert math.isnan(spearman([], []))
    with pytest.raises(ArgumentError, match="2 values against 3"):
        spearman([1, 2], [1, 2, 3])


def test_spearman_is_scipys():
    stats = pytest.importorskip("scipy.stats")
    generator = np.random.default_rng(0)
    left, right = generator.integers(0, 9, 200), generator.integers(0, 30, 200)
    assert spearman(left, right) == pytest.approx(stats.spearmanr(left, right).statistic, abs=1e-12)


KEYS = ["east", "north", "west", "NorthEast", "nil"]
ROWS = np.array([[2, 0], [0, 3], [-1, 0], [0.5, 0.5], [0, 0]], np.float32)


def test_similarity_by_hand(write):
    # cosines: east-northeast .71 (Northeast is found only as it is spelt), east-north 0, east-west -1, north-west 0
    path = write(
        "East NorthEast 9\nEAST north 8\neast west 1\nnorth west 3\neast northeast 4\neast up 5\n"
    )
    (found,) = score_words(ROWS.__getitem__, KEYS, [path])
    score = found.pop("score")
    assert found == {"file": "words.txt", "kind": "similarity", "used": 4, "of": 6}
    # ranks 4, 3, 1, 2 against 4, 2.5, 1, 2.5: centred products 2.25 + 0 + 2.25 + 0, squares 5 and 4.5
    assert score == pytest.approx(4.5 / math.sqrt(5 * 4.5))


def test_the_length_of_rows_does_not_matter(write):
    path = write("east NorthEast 9\neast north 8\neast west 1\n")
    lengths = np.array([[1e30], [1e-20], [7], [3e37], [1]], np.float32)
    assert score_words((ROWS * lengths).__getitem__, KEYS, [path])[0]["score"] == 1


def test_no_score_without_words(write):
    files = [
        write("up down 1\n", "pairs"),
        write("up down left right\n", "questions"),
        write("east north 1\neast nil 2\n", "ties"),
    ]
    scores = score_words(ROWS.__getitem__, KEYS, files)
    assert [(found["used"], found["of"]) for found in scores] == [(0, 1), (0, 1), (2, 2)]
    assert all(math.isnan(found["score"]) for found in scores)


ROYAL = ["man", "woman", "king", "queen", "apple"]
ROYAL_ROWS = np.array([[1, 0, 0.2], [0, 1, 0.2], [1, 0, 2], [0, 1, 2], [-1, -1, 0]], np.float32)


def test_analogies_by_hand(write):
    path = write(
        ": family\nman woman king queen\nMan Woman King Apple\nman woman king king\nman woman king pear\n"
    )
    assert score_words(ROYAL_ROWS.__getitem__, ROYAL, [path]) == [
        {"file": "words.txt", "kind": "analogy", "used": 3, "of": 4, "score": 1 / 3}
    ]


def test_the_given_words_are_excluded(write):
    # b - a + c is nearest to c itself, as often with word vectors; the answer must be another word
    rows = np.array([[1, 0], [1, 0.01], [0, 1], [0.6, 0.8]], np.float32)
    found = score_words(rows.__getitem__, ["a", "b", "c", "d"], [write("a b c d\na b c c\n")])
    assert found[0]["score"] == 0.5
    nothing_left = score_words(rows.__getitem__, ["a", "b", "c"], [write("a b c a\n")])
    assert nothing_left[0]["score"] == 0


def test_analogies_stay_within_the_common_keys(write, monkeypatch):
    monkeypatch.setattr(words, "COMMON", 4)
    path = write("man woman king queen\nman woman king apple\n")
    assert score_words(ROYAL_ROWS.__getitem__, ROYAL, [path])[0] == {
        "file": "words.txt", "kind": "analogy", "used": 1, "of": 2, "score": 1.0
    }  # fmt: skip


def test_blocks_do_not_matter(write, monkeypatch):
    generator = np.random.default_rng(1)
    keys = [f"w{n}" for n in range(40)]
    rows = generator.normal(size=(40, 3)).astype(np.float32)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    lines, right = [": all"], 0
    for _ in range(60):
        a, b, c, d = generator.choice(40, 4, replace=False)
        order = [
            n for n in np.argsort(-(unit @ (unit[b] - unit[a] + unit[c]))) if n not in (a, b, c)
        ]
        d = order[0] if generator.random() < 0.5 else d
        right += order[0] == d
        lines.append(" ".join(keys[n] for n in (a, b, c, d)))
    path = write("\n".join(lines))
    monkeypatch.setattr(words, "READ", 7)
    monkeypatch.setattr(words, "BATCH", 11)
    assert score_words(rows.__getitem__, keys, [path])[0]["score"] == pytest.approx(right / 60)


def test_the_first_of_equal_keys_counts(write):
    rows = np.array([[1, 0], [0, 1], [0.9, 0.1], [0, 1]], np.float32)
    path = write("a b 1\na c 2\n")
    assert score_words(rows.__getitem__, ["a", "b", "c", "a"], [path])[0]["score"] == 1


def test_rows_that_cannot_be(write):
    path = write("east north 1\neast west 2\n")
    with pytest.raises(ArgumentError, match="not finite"):
        score_words((ROWS * np.float32("nan")).__getitem__, KEYS, [path])
    with pytest.raises(ArgumentError, match=r"returned shape \(3,\) for 3 ids"):
        score_words(lambda ids: ROWS[ids, 0], KEYS, [path])


def test_real_files(data):
    names = [
        "glove/glove.6B.50d.top60k.npz",
        "word-similarity/EN-WS-353-ALL.txt",
        "word-similarity/questions-words.txt",
    ]
    glove, pairs, questions = (data / name for name in names)
    for path in (glove, pairs, questions):
        if not path.exists():
            pytest.skip(f"no {path.name} in the data folder")
    with np.load(glove) as arrays:
        keys, rows = arrays["words"].item().decode().split("\n"), arrays["vectors"]
    similarity, analogy = score_words(rows.__getitem__, keys, [pairs, questions])
    assert (similarity["used"], similarity["of"]) == (349, 353)
    assert similarity["score"] == pytest.approx(0.520, abs=0.002)
    assert analogy["of"] == 19_544 and analogy["used"] > 14_000
    assert analogy["score"] == pytest.approx(0.497, abs=0.005)
