"""Labelled texts out of files: forms, columns, bad input, words and pieces, documents, what is stored."""

import bz2
import gzip
import json
import lzma
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from featherbed.apps.classifier import data as made
from featherbed.apps.classifier.data import Documents, TextVocabularySettings, cooccurrence_graph
from featherbed.errors import ArgumentError, DataError, FormatError
from featherbed.io.texts import (
    LabeledTexts,
    SubwordEncoder,
    WordEncoder,
    build_vocabulary,
    open_tokenizer,
    read_corpus,
    read_ptb,
    read_texts,
    subwords_of,
    tokenize,
    train_subwords,
)
from featherbed.io.texts.reading import has_words
from featherbed.packed.keys import Keys


def prepare(train, test=None, **given):
    """Prepare texts; settings of the vocabulary are given by name."""
    own = {key: given.pop(key) for key in ("validation", "seed", "cache") if key in given}
    return made.prepare(train, test, TextVocabularySettings(**given), **own)


ROWS = [
    ("pos", "A good film, really"),
    ("neg", 'Bad "film"'),
    ("pos", "good good"),
    ("neg", "I don't like it"),
]


def write(tmp_path, content, name="texts.csv"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read(tmp_path, content, name="texts.csv", **settings):
    return read_texts(write(tmp_path, content, name), **settings)


def quoted(text):
    return '"' + text.replace('"', '""') + '"'


CSV = "".join(f"{label},{quoted(text)}\n" for label, text in ROWS)
TSV = "".join(f"{label}\t{text}\n" for label, text in ROWS)
JSON = "".join(json.dumps({"text": text, "label": label}) + "\n" for label, text in ROWS)
FORMS = {
    "csv with a header": ("label,text\n" + CSV, "a.csv"),
    "csv without": (CSV, "a.csv"),
    "crlf": (("Label,Text\n" + CSV).replace("\n", "\r\n"), "a.csv"),
    "bom": ("\ufefflabel,text\n" + CSV, "a.csv"),
    "blank lines": ("\n\nlabel,text\n" + CSV.replace("\n", "\n\n"), "a.csv"),
    "semicolons": ("category;content\n" + CSV.replace(",", ";").replace("film;", "film,"), "a.csv"),
    "tsv, quotes as letters": ("label\ttext\n" + TSV, "a.tsv"),
    "tsv, last column": (
        "sentence\tlabel\n" + "".join(f"{text}\t{label}\n" for label, text in ROWS),
        "a.tsv",
    ),
    "tsv without a header, last column": (
        "".join(f"{text}\t{label}\n" for label, text in ROWS),
        "a.txt",
    ),
    "tsv, quoted": (
        "label\ttext\n" + "".join(f"{label}\t{quoted(text)}\n" for label, text in ROWS),
        "a.tsv",
    ),
    "json": (JSON, "a.jsonl"),
    "json by its look": (JSON, "a.txt"),
    "fasttext": ("".join(f"__label__{label} {text}\n" for label, text in ROWS), "a.txt"),
    "gzip": (gzip.compress(CSV.encode()), "a.csv.gz"),
    "xz": (lzma.compress(CSV.encode()), "a.csv.xz"),
    "bzip2, misnamed": (bz2.compress(CSV.encode()), "a.csv"),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form, tmp_path):
    texts = read(tmp_path, *FORMS[form])
    assert list(zip([texts.classes[at] for at in texts.labels], texts.texts, strict=True)) == ROWS
    assert texts.classes == ("neg", "pos")
    assert len(texts.notes) == 1


def test_columns_by_name_and_number(tmp_path):
    content = "id,title,body,kind\n1,One,first text,b\n2,,second text,a\n"
    texts = read(tmp_path, content, label="kind", text="title,body")
    assert list(texts.texts) == ["One first text", "second text"]
    assert texts.lines.tolist() == [2, 3]
    assert list(read(tmp_path, content, label=4, text="3", header=True).texts) == [
        "first text",
        "second text",
    ]
    assert list(read(tmp_path, "1,One,first\n2,,second\n").texts) == ["One first", "second"]
    assert read(tmp_path, "1,a b\n2,c d\n", label="1", text="2").classes == ("1", "2")


def test_title_and_body_are_joined(tmp_path):
    assert read(tmp_path, "label,title,description\n1,Head,tail\n2,x,y\n").texts[0] == "Head tail"


def test_a_header_of_unusual_names_is_seen(tmp_path):
    texts = read(tmp_path, "ton,avis\n" + "bon,tres bien\nmal,trop long\n" * 2)
    assert texts.classes == ("bon", "mal")
    assert "taken as a header" in texts.notes[0]
    assert read(
        tmp_path, "ton,avis\n" + "bon,tres bien\nmal,trop long\n" * 2, header=False
    ).classes == ("bon", "mal", "ton")


def test_classes_are_sorted_and_can_be_given(tmp_path):
    content = "".join(f"{label},some text {label}\n" for label in (10, 9, 1, 10, 9, 1))
    texts = read(tmp_path, content)
    assert texts.classes == ("1", "9", "10")
    assert read(tmp_path, content, classes=("10", "9", "1")).labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert read(tmp_path, "9,only one class here\n", classes=texts.classes).labels.tolist() == [1]
    with pytest.raises(DataError, match=r"line 1: unknown label '11', known are '1', '9', '10'"):
        read(tmp_path, "11,text\n9,text\n", classes=texts.classes)


def test_a_cell_may_go_over_lines(tmp_path):
    texts = read(tmp_path, 'label,text\na,"one\ntwo"\nb,three\n')
    assert texts.texts[0] == "one\ntwo"
    assert texts.lines.tolist() == [2, 4]
    assert read(tmp_path, 'label\ttext\na\t"one\ntwo"\nb\tthree\n', "a.tsv").texts[0] == "one\ntwo"


def test_json_values(tmp_path):
    content = (
        '{"text": "a", "label": 1.0}\n{"text": "b", "label": 0}\n{"label": true, "text": "c"}\n'
    )
    assert read(tmp_path, content).classes == ("0", "1", "true")


BAD = {
    "empty": ("", "is empty"),
    "blank": (" \n\n", "is empty"),
    "header only": ("label,text\n", "holds no texts"),
    "one class": ("a,x y\na,z\n", "all 2 texts have the label 'a'"),
    "one column": ("hello\nworld\n", "line 1: one column, 'hello'"),
    "label missing": ("label,text\na,x\n,y\n", "line 3: the label is missing"),
    "json label missing": (
        '{"text": "x", "label": "a"}\n{"text": "y"}\n',
        "line 2: the label is missing",
    ),
    "no label column": ('{"text": "x"}\n', "no column for the labels; its columns are 'text'"),
    "empty text": ("label,text\na,x\nb,...\nb,\n", r"line 3: a text without a word \(2 in all\)"),
    "ragged": ("label,text\na,x\nb,y, z\n", "line 3: 3 columns, 2 in the first line"),
    "unclosed": ('label,text\na,x\nb,"y\nc,z\n', "line 3: unexpected end of data"),
    "quote inside": ('label,text\na,"x" y\nb,y\n', "line 2: .*double the quotation marks"),
    "undecodable": (
        b"label,text\na,caf\xe9\n",
        r"line 2: byte 0xe9 at offset 16 is not UTF-8 text: give --set data.encoding",
    ),
    "zero byte": (b"label,text\na,x\nb,\0\n", "line 3: a zero byte"),
    "utf-16": (
        "label,text\na,x\n".encode("utf-16"),
        "UTF-16 text: give --set data.encoding=utf-16",
    ),
    "zip": (b"PK\x03\x04\0\0", "zip archive: unpack it"),
    "png": (b"\x89PNG\r\n\x1a\n\0\0", "line 1: byte 0x89 at offset 0"),
    "cut gzip": (gzip.compress(CSV.encode())[:-12], "is not a complete"),
    "cut xz": (lzma.compress(CSV.encode())[:-20], "is not a complete"),
    "broken gzip": (gzip.compress(CSV.encode())[:20] + b"\xff" * 40, "is not a complete"),
    "json list": (
        '{"text": "x", "label": "a"}\n["y", "b"]\n',
        r"line 2: found .*write one object per line",
    ),
    "json nested": ('{"text": ["x"], "label": "a"}\n', "line 1: a list or an object"),
    "fasttext": ("__label__a __label__b x\n", "line 1: found .*write one __label__"),
    "no labels": (
        "".join(f"text {n},other {n}\n" for n in range(9)),
        "neither first nor last column looks like labels",
    ),
}


@pytest.mark.parametrize("fault", BAD)
def test_bad_input(fault, tmp_path):
    content, said = BAD[fault]
    with pytest.raises(DataError, match=said) as caught:
        read(tmp_path, content)
    assert "texts.csv" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_wrong_columns(tmp_path):
    with pytest.raises(
        DataError, match="no column 'kind' for label; its columns are 'label', 'text'"
    ):
        read(tmp_path, "label,text\na,x\nb,y\n", label="kind")
    with pytest.raises(DataError, match="given for label and text"):
        read(tmp_path, "label,text\na,x\nb,y\n", label="text", text="text")
    with pytest.raises(DataError, match=r"no column for the texts.*--text"):
        read(tmp_path, "label,stuff\na,x\nb,y\n", header=True)
    with pytest.raises(DataError, match="no such file"):
        read_texts(tmp_path / "none.csv")


def test_encoding_is_an_option(tmp_path):
    content = "label,text\na,café\nb,x\n"
    assert read(tmp_path, content.encode("latin-1"), encoding="latin-1").texts[0] == "café"
    assert read(tmp_path, content.encode("utf-16"), encoding="utf-16").texts[0] == "café"
    with pytest.raises(ArgumentError, match="'none' is not known"):
        read(tmp_path, content, encoding="none")


def test_empty_texts_are_skipped_when_asked(tmp_path):
    texts = read(tmp_path, "label,text\na,x\nb,...\nb,y\n", skip_empty=True)
    assert list(texts.texts) == ["x", "y"]
    assert texts.lines.tolist() == [2, 4]
    assert "1 texts without a word were left out, the first on line 3" in texts.notes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('He said: "It\'s fine"!', ["he", "said", '"', "it", "'s", "fine", '"', "!"]),
        ("can't won't DON'T", ["ca", "n't", "wo", "n't", "do", "n't"]),
        (
            "we'll they're I've I'd I'm",
            ["we", "'ll", "they", "'re", "i", "'ve", "i", "'d", "i", "'m"],
        ),
        ("state-of-the-art, e.g. $3.50", ["state", "of", "the", "art", ",", "e", "g", "3", "50"]),
        ("a_b <br /> me@home.org", ["a", "b", "br", "me", "@", "home", "org"]),
        ("’tis don’t", ["'", "tis", "do", "n't"]),
        ("Cafe\u0301 Straße", ["café", "straße"]),
        ("... -- %", []),
    ],
)
def test_words(text, words):
    assert tokenize(text) == words
    assert has_words(text) == bool(words)


@given(st.text(alphabet="aN'tΣé.e\u0301 ’(s", max_size=200), st.integers(1, 12))
def test_the_beginning_of_a_text_is_cut_as_the_whole(text, most):
    assert tokenize(text, most) == tokenize(text)[:most]
    assert has_words(text) == bool(tokenize(text))


@given(
    st.lists(
        st.lists(st.sampled_from(["red", "blue", "n't", "'", "'s", "("]), min_size=1, max_size=8),
        min_size=2,
        max_size=8,
    )
)
def test_encoding_what_was_decoded_agrees(lines):
    words, ids = build_vocabulary([word for line in lines for word in line])
    encoder = WordEncoder({word: number for number, word in enumerate(words)}, length=50)
    assert [words[at] for at in ids] == [word for line in lines for word in line]
    for line in lines:
        read_again = encoder.ids(" ".join(line))
        assert encoder.ids(" ".join(words[at] for at in read_again)).tolist() == read_again.tolist()
        assert 1 not in read_again or "'" in line or "n't" in line


def test_encoders():
    words = ("<pad>", "<unk>", "good", "film")
    for ids_of in ({word: at for at, word in enumerate(words)}, Keys.of(words)):
        encoder = WordEncoder(ids_of, length=3)
        assert encoder.ids("A GOOD film, <pad> good").tolist() == [1, 2, 3]
        assert encoder.ids("").tolist() == []
        assert encoder.ids("good").dtype == np.int64
    with pytest.raises(ArgumentError, match="length=0"):
        WordEncoder({}, 0)


SENTENCES = [
    f"the {colour} {thing} is {n}"
    for n, colour in enumerate(("red", "green", "blue"))
    for thing in ("house", "horse")
]


def some_texts(count=60, seed=0):
    rng = np.random.default_rng(seed)
    texts = [" ".join(rng.choice(SENTENCES, size=rng.integers(1, 4))) for _ in range(count)]
    return LabeledTexts(
        texts,
        rng.integers(2, size=count),
        ("no", "yes"),
        lines=np.arange(1, count + 1),
        path="some.csv",
    )


def test_prepared_parts():
    texts, test = some_texts(), some_texts(20, seed=1)
    prepared = prepare(texts, test)
    assert (len(prepared.train), len(prepared.validation), len(prepared.test)) == (51, 9, 20)
    assert prepared.vocabulary.words[:2] == ("<pad>", "<unk>")
    assert (
        prepared.vocabulary.counts.tolist()
        == np.bincount(prepared.train.ids, minlength=len(prepared.vocabulary.words)).tolist()
    )
    assert np.all(np.diff(prepared.vocabulary.counts[2:]) <= 0)
    kept = np.setdiff1d(np.arange(60), prepared.validation_index)
    counted = Counter(word for at in kept for word in tokenize(texts.texts[at]))
    assert (
        dict(
            zip(prepared.vocabulary.words[2:], prepared.vocabulary.counts[2:].tolist(), strict=True)
        )
        == counted
    )
    encoder = WordEncoder(
        {word: at for at, word in enumerate(prepared.vocabulary.words)}, prepared.vocabulary.length
    )
    for part, source, index in (
        (prepared.train, texts, kept),
        (prepared.validation, texts, prepared.validation_index),
    ):
        assert part.labels.tolist() == source.labels[index].tolist()
        for at, place in enumerate(index):
            assert (
                part.take(np.array([at])).ids.tolist() == encoder.ids(source.texts[place]).tolist()
            )


def test_ids_are_stable_and_the_split_goes_by_the_seed():
    texts = some_texts()
    one, same, other = (prepare(texts, seed=seed) for seed in (3, 3, 4))
    assert np.array_equal(one.train.ids, same.train.ids)
    assert one.checksum == same.checksum != other.checksum
    assert not np.array_equal(one.validation_index, other.validation_index)


def test_the_vocabulary_can_be_bounded():
    texts = some_texts()
    whole = prepare(texts)
    fewer = prepare(texts, max_words=6)
    assert fewer.vocabulary.words == whole.vocabulary.words[:6]
    assert fewer.vocabulary.counts[1] == whole.vocabulary.counts[6:].sum()
    rare = int(whole.vocabulary.counts[-1])
    common = prepare(texts, min_count=rare + 1)
    assert common.vocabulary.words == tuple(
        word
        for at, word in enumerate(whole.vocabulary.words)
        if at < 2 or whole.vocabulary.counts[at] > rare
    )


def test_texts_are_cut_or_refused():
    texts = some_texts()
    prepared = prepare(texts, length=6)
    long = sum(len(tokenize(text)) > 6 for text in texts.texts)
    assert prepared.train.lengths.max() == 6
    assert prepared.notes == (f"{long} of 60 texts were cut to their first 6 words",)
    with pytest.raises(
        DataError, match=r"some.csv, line \d+: a text of 1[05] words, the limit is 6"
    ):
        prepare(texts, length=6, long="error")


def test_settings_that_cannot_work():
    texts = some_texts()
    two = LabeledTexts(["word", "word", "word"], np.array([0, 1, 0]), ("a", "b"))
    with pytest.raises(DataError, match="has 1 different words"):
        prepare(two)
    with pytest.raises(DataError, match="text 3: the text holds no word"):
        prepare(LabeledTexts(["a b", "c d", "..."], np.array([0, 1, 0]), ("a", "b")))
    with pytest.raises(DataError, match="holds 1 text"):
        prepare(LabeledTexts(["a b"], np.array([0]), ("a", "b")))
    with pytest.raises(ArgumentError, match="other classes"):
        prepare(texts, two)
    for wrong in (
        {"validation": 1.0},
        {"min_count": 0},
        {"max_words": 3},
        {"long": "wrap"},
        {"length": 0},
        {"subwords": 9, "max_words": 9},
    ):
        with pytest.raises(ArgumentError, match=next(iter(wrong))):
            prepare(texts, **wrong)


def test_documents():
    documents = Documents(
        np.array([2, 3, 2, 4, 4, 4], np.int32), np.array([0, 2, 3, 6]), np.array([0, 1, 0])
    )
    index = np.array([2, 0])
    assert documents.take(index).ids.tolist() == [4, 4, 4, 2, 3]
    ids, offsets = documents.bags(index)
    assert (ids.tolist(), offsets.tolist()) == ([4, 4, 4, 2, 3], [0, 3])
    assert documents.padded(index, extra=1).tolist() == [[4, 4, 4, 0, 0], [2, 3, 0, 0, 0]]
    assert documents.padded(index, minimum=1, length=2).tolist() == [[4, 4], [2, 3]]
    assert documents.padded(index).shape == (2, 8)
    assert documents.counts(5).toarray().tolist() == [
        [0, 0, 1, 1, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 0, 0, 3],
    ]
    assert len(documents.take(np.zeros(0, np.int64))) == 0


def same(one, other):
    assert (one.vocabulary.words, one.classes, one.vocabulary.length, one.vocabulary.tokenizer) == (
        other.vocabulary.words,
        other.classes,
        other.vocabulary.length,
        other.vocabulary.tokenizer,
    )
    assert (one.notes, one.checksum) == (other.notes, other.checksum)
    assert one.vocabulary.counts.tolist() == other.vocabulary.counts.tolist()
    assert one.validation_index.tolist() == other.validation_index.tolist()
    for part in ("train", "validation", "test"):
        ours, theirs = getattr(one, part), getattr(other, part)
        assert (ours is None) == (theirs is None)
        for name in ("ids", "offsets", "labels") if ours is not None else ():
            assert np.array_equal(getattr(ours, name), getattr(theirs, name))
            assert getattr(ours, name).dtype == getattr(theirs, name).dtype
    return True


@pytest.mark.parametrize("test", [None, some_texts(20, seed=1)])
def test_what_was_stored_is_the_same(test, tmp_path, monkeypatch):
    fresh = prepare(some_texts(), test, cache=tmp_path / "new")
    monkeypatch.setattr(made, "build_vocabulary", None)  # nothing is counted again
    assert same(prepare(some_texts(), test, cache=tmp_path / "new"), fresh)
    with pytest.raises(TypeError):
        prepare(some_texts(), test, cache=tmp_path / "new", length=9)


def related(data, **given):
    return cooccurrence_graph(data.train, len(data.vocabulary.words), **given)


def test_damaged_files_are_made_again(tmp_path):
    fresh = prepare(some_texts(), cache=tmp_path)
    graph = related(fresh, min_count=3, cache=tmp_path)
    for path in sorted(tmp_path.iterdir()):
        whole = path.read_bytes()
        damaged = bytearray(whole)
        damaged[-70] ^= 1
        for content in (whole[:-1], b"", bytes(damaged), b"\xff" * 64):
            path.write_bytes(content)
            assert same(prepare(some_texts(), cache=tmp_path), fresh)
            assert np.array_equal(
                related(fresh, min_count=3, cache=tmp_path).pairs(), graph.pairs()
            )
            assert path.read_bytes() == whole


def test_a_folder_that_cannot_be_made(tmp_path):
    path = write(tmp_path, "no folder")
    with pytest.raises(ArgumentError, match="cannot be written to"):
        prepare(some_texts(), cache=path)


def test_cooccurrence_stays_inside_texts(tmp_path, monkeypatch):
    prepared = prepare(some_texts())
    graph = related(prepared, window=2, min_count=4, cache=tmp_path)
    pairs = Counter()
    for at in range(len(prepared.train)):
        ids = prepared.train.take(np.array([at])).ids.tolist()
        pairs.update(
            (min(one, other), max(one, other))
            for n, one in enumerate(ids)
            for other in ids[n + 1 : n + 3]
            if one != other
        )
    assert {tuple(pair) for pair in graph.pairs().tolist()} == {
        pair for pair, count in pairs.items() if count >= 4
    }
    monkeypatch.setattr(made, "cooccurrence", None)
    assert np.array_equal(
        related(prepared, window=2, min_count=4, cache=tmp_path).pairs(), graph.pairs()
    )


def test_subwords(tmp_path):
    texts, test = some_texts(), some_texts(20, seed=1)
    prepared = prepare(texts, test, subwords=40, cache=tmp_path)
    assert len(prepared.vocabulary.words) <= 40
    assert prepared.vocabulary.words[:2] == ("<pad>", "<unk>")
    assert prepared.vocabulary.words == subwords_of(prepared.vocabulary.tokenizer)
    assert np.all(np.diff(prepared.vocabulary.counts[2:]) <= 0)
    encoder = SubwordEncoder(prepared.vocabulary.tokenizer, prepared.vocabulary.length)
    for at, place in enumerate(prepared.validation_index):
        ids = encoder.ids(texts.texts[place])
        assert prepared.validation.take(np.array([at])).ids.tolist() == ids.tolist()
        assert (
            "".join(prepared.vocabulary.words[n] for n in ids).replace("▁", " ").strip()
            == texts.texts[place]
        )
        assert encoder.tokens(texts.texts[place]) == [prepared.vocabulary.words[n] for n in ids]
    assert 1 in encoder.ids("Ωmega").tolist()
    assert same(prepare(texts, test, subwords=40, cache=tmp_path), prepared)
    assert train_subwords(texts.texts, 40) == train_subwords(texts.texts, 40)


def test_tokenizers_of_others_are_refused():
    with pytest.raises(FormatError, match="cannot be read"):
        open_tokenizer("{}")
    strange = json.loads(train_subwords(SENTENCES, 40))
    strange["model"]["vocab"] |= {"<pad>": 1, "<unk>": 0}
    strange["added_tokens"] = []
    with pytest.raises(FormatError, match="<pad> as token 0"):
        open_tokenizer(json.dumps(strange))


def test_sentences(tmp_path):
    path = write(tmp_path, "".join(f"the cat sat {n % 3} .\n" for n in range(20)), "all.txt")
    corpus = read_corpus([path])
    assert (len(corpus.train), len(corpus.validation), len(corpus.test)) == (96, 12, 12)
    assert corpus.counts.tolist() == np.bincount(corpus.train, minlength=len(corpus.words)).tolist()
    fewer = read_corpus([path], max_words=5, tokenizer=tokenize)
    assert set(fewer.words) == {"<eos>", "<unk>", "the", "cat", "sat"}
    assert fewer.counts[fewer.words.index("<unk>")] == 16
    with pytest.raises(ArgumentError, match="2 files"):
        read_corpus([path, path])
    with pytest.raises(DataError, match="fewer than two different words"):
        read_corpus([write(tmp_path, "a\n" * 9, "one.txt")])
    with pytest.raises(DataError, match=r"none\.txt holds no words"):
        read_corpus([path, write(tmp_path, "\n\n", "none.txt"), path])
    with pytest.raises(DataError, match="byte 0xff at offset 0"):
        read_corpus([write(tmp_path, b"\xff\n", "bytes.txt")])


def test_penn_treebank_reads_as_its_own_reader_does(data):
    paths = [data / "ptb" / f"ptb.{part}.txt" for part in ("train", "valid", "test")]
    corpus, wanted = read_corpus(paths), read_ptb(data / "ptb")
    assert corpus.words == wanted.words
    for name in ("counts", "train", "validation", "test"):
        assert np.array_equal(getattr(corpus, name), getattr(wanted, name))


@pytest.mark.parametrize(
    ("names", "rows", "classes"),
    [
        (("ag-news/train_subset.csv.gz", "ag-news/test.csv.gz"), (43_378, 7_600), 4),
        (("sst2/train.tsv.gz", "sst2/dev.tsv.gz"), (67_349, 872), 2),
        (("imdb/train.tsv.xz", "imdb/test.tsv.xz"), (25_000, 25_000), 2),
    ],
)
def test_published_sets(data, names, rows, classes):
    train = read_texts(data / names[0])
    test = read_texts(data / names[1], classes=train.classes)
    assert (len(train), len(test), len(train.classes)) == (*rows, classes)
    assert min(np.bincount(train.labels)) > 10_000
    few = LabeledTexts(
        train.texts[:2000] + train.texts[-2000:],
        np.append(train.labels[:2000], train.labels[-2000:]),
        train.classes,
    )
    assert len(prepare(few).train) == 3400
