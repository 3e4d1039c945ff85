"""Ratings out of files: forms, columns, keys, bad lines, duplicates, long files, titles."""

import bz2
import gzip
import json
import lzma
import os
import random
import tracemalloc
import uuid

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import featherbed as fb
from featherbed.errors import ArgumentError, DataError
from featherbed.io import opening
from featherbed.io.opening import find_data
from featherbed.io.records import columns, is_stored, read_movielens, read_ratings, read_titles
from featherbed.packed.keys import IntegerKeys, Keys, TextKeys, crc32

ROWS = [("7", "a", 4.5, 100), ("12", "b", 3.0, 200), ("7", "b", 1.0, 50), ("-3", "c", 5.0, 75)]
PLAIN = "user,item,rating,timestamp\n" + "".join(f"{u},{i},{r},{t}\n" for u, i, r, t in ROWS)


def triples(ratings):
    """Return the ratings as (user, item, rating) by key."""
    users, items = (
        [keys[at] for at in ids]
        for keys, ids in ((ratings.user_keys, ratings.users), (ratings.item_keys, ratings.items))
    )
    return list(zip(users, items, ratings.values.tolist(), strict=True))


WANTED = [(u, i, r) for u, i, r, _ in ROWS]


def write(tmp_path, text, name="ratings.csv"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def read(tmp_path, text, name="ratings.csv", **settings):
    return read_ratings(write(tmp_path, text, name), **settings)


FORMS = {
    "plain": PLAIN,
    "no end": PLAIN.rstrip("\n"),
    "bom": "\ufeff" + PLAIN,
    "crlf": PLAIN.replace("\n", "\r\n"),
    "cr": PLAIN.replace("\n", "\r"),
    "blank lines": "\n" + PLAIN.replace("\n", "\n\n") + "   \n\n",
    "semicolon": PLAIN.replace(",", ";"),
    "decimal comma": PLAIN.replace(",", ";").replace(".", ","),
    "pipe": PLAIN.replace(",", "|"),
    "tab": PLAIN.replace(",", "\t"),
    "blanks": PLAIN.replace(",", "   "),
    "colons": PLAIN.replace(",", "::"),
    "quoted": "\n".join(
        ",".join(f'"{cell}"' for cell in line.split(",")) for line in PLAIN.split()
    ),
    "blank before quotes": "\n".join(
        ", ".join(f'"{cell}"' for cell in line.split(",")) for line in PLAIN.split()
    ),
    "trailing": PLAIN.replace("\n", ",\n"),
    "trailing without a name": PLAIN.replace("\n", ",\n").replace("timestamp,", "timestamp"),
    "padded": PLAIN.replace(",", " , "),
    "header": PLAIN.replace(
        "user,item,rating,timestamp", ' User ID , Movie Id,RATING,"unixReviewTime"'
    ),
    "no header": PLAIN.split("\n", 1)[1],
    "colons without header": PLAIN.split("\n", 1)[1].replace(",", "::"),
    "json": "\n".join(
        json.dumps({"user_id": int(u), "item": i, "note": {"x": [1]}, "stars": r, "date": t})
        for u, i, r, t in ROWS
    ),
    "json texts": "\n\n".join(
        json.dumps({"user_id": u, "item": i, "stars": str(r), "date": str(t)})
        for u, i, r, t in ROWS
    ),
    "dates": PLAIN.replace(",100", ",1970-01-01T00:01:40Z")
    .replace(",200", ",1970-01-01 00:03:20")
    .replace(",50\n", ",1970-01-01T00:00:50.5+00:00\n")
    .replace(",75\n", ",75.25\n"),
    "other columns": "".join(
        f'"x, ""y""\nz",{line}\n' if n else f"text,{line}\n" for n, line in enumerate(PLAIN.split())
    ),
    "stray quotes": "".join(
        f'{line},5" pipe\n' if n else f"{line},text\n" for n, line in enumerate(PLAIN.split())
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_reads_the_same(tmp_path, form):
    reading = read(tmp_path, FORMS[form], "ratings.txt")
    assert triples(reading.ratings) == WANTED
    assert reading.ratings.times.tolist() == [100, 200, 50, 75]
    assert list(reading.ratings.user_keys) == ["-3", "7", "12"]
    assert reading.counts == {
        "lines": 4,
        "kept": 4,
        "missing": 0,
        "unparsable": 0,
        "duplicates": 0,
    }
    assert (reading.ratings.users.dtype, reading.ratings.values.dtype) == (np.int32, np.float32)


def zstd(data):
    return pa.compress(data, "zstd", asbytes=True)


@pytest.mark.parametrize(
    "pack", [gzip.compress, bz2.compress, lzma.compress, zstd], ids=["gzip", "bzip2", "xz", "zstd"]
)
def test_packed_files(tmp_path, pack):
    assert triples(read(tmp_path, pack(PLAIN.encode()), "anything").ratings) == WANTED


def test_a_gzip_file_of_two_parts_is_read_to_its_end(tmp_path):
    half = PLAIN.index("7,b")
    data = gzip.compress(PLAIN[:half].encode()) + gzip.compress(PLAIN[half:].encode())
    assert triples(read(tmp_path, data).ratings) == WANTED


def test_parquet_of_many_types(tmp_path):
    keys = [uuid.UUID(int=n) for n in (3, 1, 3, 2)]
    columns = {
        "user": pa.array([7.0, 12.0, 7.0, -3.0]),
        "item": pa.array(["a", "b", "b", "c"]).dictionary_encode(),
        "rating": pa.array([4.5, 3, 1, 5], pa.float32()),
        "time": pa.array([100, 200, 50, 75], pa.timestamp("s", "UTC")),
        "uuid": pa.array([key.bytes for key in keys], pa.binary(16)),
        "big": pa.array([2**64 - 1, 1, 2, 3], pa.uint64()),
    }
    path = tmp_path / "ratings.parquet"
    pq.write_table(pa.table(columns), path)
    reading = read_ratings(path)
    assert triples(reading.ratings) == WANTED
    assert reading.ratings.times.tolist() == [100, 200, 50, 75]
    other = read_ratings(path, user="uuid", item="big").ratings
    assert triples(other)[:2] == [
        (str(keys[0]), "18446744073709551615", 4.5),
        (str(keys[1]), "1", 3.0),
    ]


ODD = {
    "list": pa.array([[1], [2], [3]]),
    "struct": pa.array([{"x": 1}, {"x": 2}, {"x": 3}]),
    "map": pa.array([[("a", 1)]] * 3, pa.map_(pa.string(), pa.int32())),
    "decimal256": pa.array([1, 2, 3], pa.decimal256(50, 2)),
    "duration": pa.array([1, 2, 3], pa.duration("s")),
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("role", ["user", "rating", "time"])
def test_parquet_columns_of_odd_types_are_refused(tmp_path, kind, role):
    columns = {
        "user": [1, 2, 3],
        "item": [1, 2, 3],
        "rating": [1, 2, 3],
        "time": [1, 2, 3],
        role: ODD[kind],
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(
        DataError, match=rf"a.parquet: column '{role}' for the {role} is of the type {kind}"
    ):
        read_ratings(tmp_path / "a.parquet", **{role: role})


def test_parquet_cells_that_are_no_text_or_no_rating(tmp_path):
    columns = {
        "user": pa.array([b"\xc3\xa9", b"\xff", None, b"b"]),
        "item": [1, 2, 3, 4],
        "rating": pa.array(["1", "2", "3", "4.5"]).dictionary_encode(),
        "day": pa.array([1, 2, 3, 4], pa.date32()),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    reading = read_ratings(tmp_path / "a.parquet")
    assert triples(reading.ratings) == [("é", "1", 1.0), ("b", "4", 4.5)]
    assert (reading.counts["unparsable"], reading.counts["missing"]) == (1, 1)
    with pytest.raises(DataError, match="row 2: bytes that are not UTF-8"):
        read_ratings(tmp_path / "a.parquet", strict=True)
    with pytest.raises(DataError, match="no usable line among 4"):
        read_ratings(tmp_path / "a.parquet", rating="day", time="item", item="user", user="rating")


def test_movielens_reads_as_its_own_reader_does():
    try:
        folder = find_data("ml-1m")
    except DataError as error:
        pytest.skip(str(error))
    reading, wanted = read_ratings(folder / "ratings.dat"), read_movielens(folder)
    for name in ("users", "items", "values"):
        assert np.array_equal(getattr(reading.ratings, name), getattr(wanted, name))
    assert tuple(reading.ratings.user_keys) == wanted.user_keys
    assert reading.columns == {"user": "1", "item": "2", "rating": "3", "time": "4"}
    titles = read_titles(folder / "movies.dat", reading.ratings.item_keys)
    assert titles.names[0] == "Toy Story (1995)"
    assert titles.groups[0] == ("Animation", "Children's", "Comedy")
    assert titles.count == len(titles.names)


def test_keys_keep_their_text(tmp_path):
    names = [
        "007",
        "7",
        "+7",
        "-0",
        "0",
        "99999999999999999999",
        "漢字",
        "a b",
        'say "x"',
        "x,y",
        "7.0",
        "é",
    ]
    text = "user,item,rating\n" + "".join(
        '"{}",i{},{}\n'.format(n.replace('"', '""'), k % 3, k) for k, n in enumerate(names)
    )
    ratings = read(tmp_path, text).ratings
    assert [ratings.user_keys[at] for at in ratings.users] == names
    assert list(ratings.user_keys) == sorted(names, key=str.encode)
    index = Keys.of(ratings.user_keys)
    assert index.find(names).tolist() == ratings.users.tolist()


def test_quotation_marks_after_backslashes(tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "BLOCK", 60)
    monkeypatch.setattr(columns, "PIECE", 30)
    names = ['"x"', '"y', "C:\\", "a b", "plain", "z"]
    cells = [name if name == "C:\\" else name.replace('"', '\\"') for name in names]
    body = "".join(
        f'"{user}";"{cell}";"{n}"\r\n' for n, cell in enumerate(cells) for user in (1, 2)
    )
    found = read(tmp_path, '"User-ID";"ISBN";"Book-Rating"\r\n' + body).ratings
    assert triples(found) == [
        (user, name, float(n)) for n, name in enumerate(names) for user in ("1", "2")
    ]


def test_the_order_of_lines_does_not_matter(tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "BLOCK", 64)
    rng = random.Random(0)
    body = [
        f"{rng.choice(['x', ''])}{u},{i},{u % 5}.5,{u * 100 + i}"
        for u in range(40)
        for i in range(0, 400, 37)
    ]
    found = []
    for order in range(3):
        rng.shuffle(body)
        reading = read(
            tmp_path, "user,item,rating,time\n" + "\n".join(body), max_rows=10 if order else 10**6
        )
        found.append((sorted(triples(reading.ratings)), list(reading.ratings.user_keys)))
        assert reading.ratings.values.tolist() == [float(line.split(",")[2]) for line in body]
        assert is_stored(reading.ratings.users) == bool(order)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("quotes", [False, True])
def test_lines_are_named_over_many_blocks(tmp_path, monkeypatch, quotes):
    monkeypatch.setattr(opening, "BLOCK", 100)
    cell = '"two\nlines"' if quotes else "text"
    body = [f"{n},{n % 7},3,{cell}" for n in range(50)]
    body[33] = "33,5,bad,text"
    text = "user,item,rating,text\n" + "\n".join(body)
    path = write(tmp_path, text)
    reading = read_ratings(path)
    assert (reading.counts["unparsable"], reading.counts["kept"]) == (1, 49)
    line = 2 + (66 if quotes else 33)
    with pytest.raises(DataError, match=rf"ratings.csv, line {line}: rating 'bad' is not a number"):
        read_ratings(path, strict=True)


@pytest.mark.parametrize("block", [1 << 26, 3000])
@pytest.mark.parametrize("stray", [(2500,), (2500, 4000), (1,), (0, 2, 4999)])
def test_marks_that_are_not_closed_swallow_no_lines(tmp_path, monkeypatch, block, stray):
    monkeypatch.setattr(opening, "BLOCK", block)
    body = [
        f'u{n % 50},"i{n}",{n % 5}' if n % 9 == 0 else f"u{n % 50},i{n},{n % 5}"
        for n in range(5000)
    ]
    for at in stray:
        body[at] = f'u9,"i{at},3'
    path = write(tmp_path, "user,item,rating\n" + "\n".join(body))
    reading = read_ratings(path)
    counts = reading.counts
    assert (counts["lines"], counts["kept"], counts["unparsable"]) == (
        5000,
        5000 - len(stray),
        len(stray),
    )
    assert not any("\n" in key or '"' in key for key in reading.ratings.item_keys)
    with pytest.raises(DataError, match=rf"line {stray[0] + 2}: a quotation mark is not closed"):
        read_ratings(path, strict=True)


TEXTS = {
    "two lines": ('"two\nlines"', 2),
    "a blank line": ('"two\n\nlines, ""so"" to speak"', 3),
    "numbers": ('"1,2,3\n4\n5,6,7,8,9"', 3),
    "a stray mark": ('"not closed', 1),
    "another": ('"said "so" he\nsaid', 2),
}


@pytest.mark.parametrize("block", [1 << 26, 100])
@pytest.mark.parametrize("case", TEXTS)
def test_texts_of_several_lines(tmp_path, monkeypatch, block, case):
    monkeypatch.setattr(opening, "BLOCK", block)
    text, height = TEXTS[case]
    body = [f"u{n},i{n % 7},{n % 5},{text if n % 4 == 1 else 'text'}" for n in range(40)]
    path = write(tmp_path, "user,item,rating,review\n" + "\n".join([*body, "u,i,x,last"]))
    reading = read_ratings(path)
    assert triples(reading.ratings) == [(f"u{n}", f"i{n % 7}", float(n % 5)) for n in range(40)]
    odd = 10 if case == "another" else 0
    assert (reading.counts["lines"], reading.counts["missing"], reading.counts["unparsable"]) == (
        41 + odd,
        odd,
        1,
    )
    with pytest.raises(
        DataError, match=rf"line {4 if odd else 32 + 10 * height}: (no item|rating 'x')"
    ):
        read_ratings(path, strict=True)


def test_one_stray_mark_between_tabs_leaves_the_others_as_they_are(tmp_path):
    body = "".join(f'"u{n}"\ti{n}\t3\n' for n in range(40))
    reading = read(tmp_path, body + 'u9\t"i9\t3\n' + "v\tw\t4\n")
    assert {"u1", "v"} <= set(reading.ratings.user_keys)
    assert (reading.counts["kept"], reading.counts["unparsable"]) == (41, 1)


def test_a_cell_that_is_used_lies_on_one_line(tmp_path):
    path = write(tmp_path, 'user,item,rating\na,"b\nc",3\nd,e,4\nf,g,5\n')
    reading = read_ratings(path)
    assert triples(reading.ratings) == [("d", "e", 4.0), ("f", "g", 5.0)]
    assert (reading.counts["lines"], reading.counts["unparsable"], reading.counts["missing"]) == (
        4,
        1,
        1,
    )


BAD = {
    "no rating": ("u,i,\n", "missing", "no rating"),
    "null": ("u,i,NULL\n", "missing", "rating|value"),
    "no user": (",i,3\n", "missing", "no user"),
    "blank item": ("u,  ,3\n", "missing", "no item"),
    "short": ("u,i\n", "missing", "no rating"),
    "only delimiters": (",,\n", "missing", "no user"),
    "word": ("u,i,good\n", "unparsable", "rating 'good' is not a number"),
    "long": ("u,i,3,4\n", "unparsable", "cut into the columns"),
}
ABSURD = ("NaN", "-inf", "1e39", "1e26", "-1000001")


@pytest.mark.parametrize("case", BAD)
def test_bad_lines_are_counted_or_refused(tmp_path, case):
    line, reason, message = BAD[case]
    path = write(tmp_path, "user,item,rating\n7,a,4.5\n\n" + line + "8,b,3\n")
    reading = read_ratings(path)
    assert reading.counts["lines"] == 3
    assert reading.counts["kept"] == 2
    assert reading.counts[reason] == 1
    assert any(reason in note for note in reading.notes)
    assert list(reading.ratings.user_keys) == ["7", "8"]
    with pytest.raises(DataError, match=rf"line 4: .*({message})"):
        read_ratings(path, strict=True)


@pytest.mark.parametrize("rating", ABSURD)
@pytest.mark.parametrize("strict", [False, True])
def test_absurd_ratings_are_refused_with_their_line(tmp_path, rating, strict):
    path = write(tmp_path, f"user,item,rating\n7,a,1000000\n\nu,i,{rating}\n8,b,3\n")
    with pytest.raises(
        DataError, match=f"line 4: rating '{rating}' is not a number from -1,000,000 to 1,000,000"
    ):
        read_ratings(path, strict=strict)


def test_json_keys_keep_their_text(tmp_path):
    keys = [
        "18446744073709551616",
        "9007199254740993",
        '"007"',
        "7",
        "7.0",
        "2.5",
        '" a"',
        "-1",
        "1e-7",
        "1e22",
        '"[x]"',
    ]
    text = "".join(
        f'{{"user": {key}, "item": {n % 2}, "rating": {n}}}\n' for n, key in enumerate(keys)
    )
    for lines_ in (text, text + "{broken\n"):
        ratings = read(tmp_path, lines_, "a.jsonl", duplicates="keep").ratings
        found = [ratings.user_keys[at] for at in ratings.users]
        assert found[:6] == ["18446744073709551616", "9007199254740993", "007", "7", "7", "2.5"]
        assert found[6:] == [" a", "-1", "0.0000001", "1" + "0" * 22, "[x]"]


def test_lists_and_objects_are_no_json_keys(tmp_path):
    rows = [
        {"user": {"é": [1]}, "item": 1},
        {"user": 2, "item": ["a"]},
        {"user": "[1]", "item": 2},
        {"user": 2, "item": 3},
    ]
    path = write(
        tmp_path, "".join(json.dumps(row | {"rating": 3}) + "\n" for row in rows), "a.jsonl"
    )
    reading = read_ratings(path)
    assert triples(reading.ratings) == [("[1]", "2", 3.0), ("2", "3", 3.0)]
    assert (reading.counts["lines"], reading.counts["unparsable"]) == (4, 2)
    with pytest.raises(DataError, match="line 1: a list or an object is no key"):
        read_ratings(path, strict=True)


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_blanks_around_keys_belong_to_them(tmp_path, kind):
    frame = pl.DataFrame(
        {"user": ["a", "a ", " a", " ", "7 "], "item": [1, 2, 1, 2, 1], "rating": [1, 2, 3, 4, 5]}
    )
    path = tmp_path / "a"
    (frame.write_ndjson if kind == "json" else frame.write_parquet)(path)
    reading = read_ratings(path)
    assert list(reading.ratings.user_keys) == [" a", "7 ", "a", "a "]
    assert reading.counts["missing"] == 1


def test_a_time_that_json_lines_have_late_is_noted(tmp_path, monkeypatch):
    early = "".join(f'{{"user": {n}, "item": {n % 7}, "rating": {n % 5}}}\n' for n in range(300))
    late = early.replace("}", ', "timestamp": 5}')
    reading = read(tmp_path, early + late[: late.index("\n") + 1], "a.jsonl", duplicates="keep")
    assert reading.ratings.times is None
    assert (
        "'timestamp' was not used as the time: few of the first lines have it" in reading.notes[0]
    )
    assert (
        read(tmp_path, early + late, "a.jsonl", time="timestamp").ratings.times.tolist()
        == [5] * 300
    )
    reading = read(tmp_path, early * 120 + late, "a.jsonl", duplicates="keep")
    assert "'timestamp' was not read: no line of the first megabyte has it" in reading.notes[-1]
    assert reading.counts["kept"] == 300 * 121


def test_brackets_in_keys_are_no_json(tmp_path):
    assert triples(read(tmp_path, "{a},[b],3\n[c],{d},4\n").ratings) == [
        ("{a}", "[b]", 3.0),
        ("[c]", "{d}", 4.0),
    ]


def test_bad_json_lines_and_rows(tmp_path):
    bad = ["{broken", "[1]", '{"user":3}']
    text = "\n".join(['{"user":1,"item":1,"rating":5}', "", *bad, '{"user":2,"item":2,"rating":4}'])
    path = write(tmp_path, text, "a.jsonl")
    counts = read_ratings(path).counts
    assert counts == {
        "lines": 5,
        "kept": 2,
        "missing": 1,
        "unparsable": 2,
        "duplicates": 0,
    }
    with pytest.raises(DataError, match=r"line 3: it is no JSON"):
        read_ratings(path, strict=True)
    pq.write_table(
        pa.table({"user": [1, 2, 3], "item": [1, 2, 3], "score": [1.0, None, 2.0]}),
        tmp_path / "a.parquet",
    )
    assert read_ratings(tmp_path / "a.parquet").counts["missing"] == 1
    with pytest.raises(DataError, match="row 2: no rating"):
        read_ratings(tmp_path / "a.parquet", strict=True)


def test_bad_times_are_skipped_and_a_column_of_them_is_not_a_time(tmp_path):
    reading = read(tmp_path, PLAIN + "9,a,3,\n9,b,3,yesterday\n")
    assert (reading.counts["missing"], reading.counts["unparsable"]) == (1, 1)
    reading = read(tmp_path, "user,item,rating,time\n1,2,3,noon\n2,3,4,dusk\n")
    assert reading.ratings.times is None
    assert "time" not in reading.columns
    assert "not used as the time" in reading.notes[0]


def test_ratings_outside_a_declared_range_are_refused(tmp_path):
    path = write(tmp_path, PLAIN)
    with pytest.raises(DataError, match=r"line 4: rating 1 is outside the range 2 to 5"):
        read_ratings(path, low=2, high=5)
    assert read_ratings(path, low=1, high=5).counts["kept"] == 4
    with pytest.raises(ArgumentError, match="low must not be above"):
        read_ratings(path, low=5, high=1)


@pytest.mark.parametrize(("policy", "value"), [("last", 2.0), ("first", 4.0), ("mean", 3.0)])
@pytest.mark.parametrize("timed", [False, True])
def test_duplicates(tmp_path, policy, value, timed):
    body = ["1,1,4,10", "2,2,5,11", "1,1,3,12", "1,1,2,13"]
    if timed:
        body = [body[3], body[1], body[0], body[2]]
    columns = 4 if timed else 3
    text = "\n".join(
        ",".join(line.split(",")[:columns]) for line in ["user,item,rating,time", *body]
    )
    reading = read(tmp_path, text, duplicates=policy)
    assert {(u, i): v for u, i, v in triples(reading.ratings)} == {
        ("1", "1"): value,
        ("2", "2"): 5.0,
    }
    assert reading.counts["duplicates"] == 2
    assert any("rated before" in note for note in reading.notes)
    assert len(read(tmp_path, text, duplicates="keep").ratings) == 4
    with pytest.raises(DataError, match="user '1' and item '1' are rated more than once"):
        read(tmp_path, text, duplicates="refuse")
    stored = read(tmp_path, text, duplicates=policy, max_rows=1).ratings
    assert is_stored(stored.values)
    assert triples(stored) == triples(reading.ratings)


def test_columns_given_by_name_and_number(tmp_path):
    text = "a,b,c,user_id,item_id\n1,2,3,x,y\n4,5,6,z,w\n"
    with pytest.raises(
        DataError,
        match=r"no column for rating; its columns are 'a', 'b', 'c', 'user_id'.*rating=NAME",
    ):
        read(tmp_path, text)
    assert triples(read(tmp_path, text, rating="C").ratings) == [("x", "y", 3.0), ("z", "w", 6.0)]
    reading = read(tmp_path, text, user=2, item="1", rating="3")
    assert reading.columns == {"user": "b", "item": "a", "rating": "c"}
    with pytest.raises(DataError, match="no column 'stars' for rating"):
        read(tmp_path, text, rating="stars")
    with pytest.raises(DataError, match="given for"):
        read(tmp_path, text, user="a", rating="a")
    with pytest.raises(
        DataError, match="'user_id' and 'userId' may both hold the user: name one with user=NAME"
    ):
        read(tmp_path, "user_id,userId,item,rating\n1,2,3,4\n2,3,4,5\n")
    with pytest.raises(DataError, match="header names 3 columns, but the lines have 4"):
        read(tmp_path, "user,item,rating\nr1,1,2,3\nr2,2,3,4\n")


REFUSED = {
    "empty": (b"", "is empty"),
    "only blanks": (b"\n \n\n", "is empty"),
    "header only": (b"user,item,rating\n", "no usable line among 0"),
    "nothing usable": (
        b"user,item,rating\n1,2,x\n2,3,\n",
        r"no usable line among 2 \(1 missing, 1 unparsable\)",
    ),
    "one user": (b"user,item,rating\n1,2,3\n1,3,4\n", "one user only, '1'"),
    "one item": (b"user,item,rating\n1,2,3\n2,2,4\n", "one item only, '2'"),
    "zero bytes": (bytes(range(256)) * 4, "zero bytes"),
    "noise": (
        random.Random(1).randbytes(5000).replace(b"\0", b"x").replace(b"\n", b"y"),
        "no columns|UTF-8|cut|usable",
    ),
    "utf-16": (PLAIN.encode("utf-16"), "UTF-16"),
    "latin-1": (PLAIN.encode() + "é,a,3,1\n".encode("latin-1"), "line 6: not UTF-8 text"),
    "truncated": (gzip.compress(PLAIN.encode() * 50)[:-20], "not a complete gzip file"),
    "broken": (gzip.compress(os.urandom(1000))[:15] + b"x" * 50, "not a complete gzip file"),
    "truncated zstd": (zstd(random.Random(0).randbytes(3000).hex().encode())[:-40], "zstd"),
    "truncated xz": (lzma.compress(PLAIN.encode() * 50)[:-40], "xz|empty"),
    "no columns": (b"one\ntwo\nthree\n", "no columns"),
    "two columns": (b"1,2\n3,4\n", "no column for rating.*ranking"),
    "zip": (b"PK\x03\x04" + b"x" * 20, "zip"),
    "parquet": (b"PAR1" + b"x" * 50, "not a readable Parquet"),
    "json array": (b'[\n{"user": 1,\n"item": 2}]\n', "not JSON lines"),
    "json on one line": (b'[{"user": 1, "item": 2, "rating": 3}]', "not JSON lines"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_cannot_be_read(tmp_path, case):
    data, message = REFUSED[case]
    with pytest.raises(DataError, match=message) as found:
        read(tmp_path, data, "bad.csv")
    assert "\n" not in str(found.value)


def test_paths_that_cannot_be_read(tmp_path):
    with pytest.raises(DataError, match="is a folder"):
        read_ratings(tmp_path)
    with pytest.raises(DataError, match="no such file"):
        read_ratings(tmp_path / "nothing.csv")
    with pytest.raises(ArgumentError, match="duplicates='all'"):
        read(tmp_path, PLAIN, duplicates="all")


def test_other_encodings_and_constant_ratings(tmp_path):
    text = "user,item,rating\né,a,3\nb,ü,3\n"
    reading = read(tmp_path, text.encode("latin-1"), encoding="latin-1")
    assert triples(reading.ratings) == [("é", "a", 3.0), ("b", "ü", 3.0)]
    assert any("every rating is 3" in note for note in reading.notes)
    assert triples(read(tmp_path, text.encode("latin-1").replace(b",", b"::")).ratings)[0][0] == "é"


def test_progress_ends_at_the_size_of_the_file(tmp_path):
    told = []
    path = write(tmp_path, PLAIN)
    read_ratings(path, progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (path.stat().st_size, path.stat().st_size)


def test_nothing_is_left_in_the_workplace(tmp_path):
    reading = read(tmp_path, PLAIN, workplace=tmp_path / "work", max_rows=1)
    assert is_stored(reading.ratings.times)
    assert not list((tmp_path / "work").iterdir())


def test_keys_of_arrays_are_those_of_strings(tmp_path):
    numbers = np.array([5, -17, 0, 2**63 - 1, -(2**63)])
    texts = ["", "é漢", "x" * 200, "7", "b"]
    for stored, plain in (
        (IntegerKeys(numbers), list(map(str, numbers))),
        (TextKeys.of(texts), texts),
    ):
        one, other = Keys.of(stored), Keys.of(plain)
        for name, array in one.arrays.items():
            assert array.dtype == other.arrays[name].dtype
            assert np.array_equal(array, other.arrays[name])
        one.check()
        assert list(stored[1:3]) == plain[1:3]
        assert stored[-1] == plain[-1]
        assert list(stored.take(np.array([4, 0]))) == [plain[4], plain[0]]
    assert len(crc32(*TextKeys.of([]).utf8())) == 0
    with pytest.raises(ArgumentError, match="key '5' is given to more than one row"):
        Keys.of(IntegerKeys(np.array([1, 5, 5])))
    table = fb.DenseTable(5, 3)
    fb.save(table, tmp_path / "a.safetensors", keys=IntegerKeys(numbers))
    assert fb.load(tmp_path / "a.safetensors").keys.find(["-17"]).tolist() == [1]


def test_keys_taken_need_little_more_than_their_text():
    count = 400_000
    texts = np.frombuffer(random.Random(0).randbytes(36 * count), np.uint8) & 0x3F | 0x40
    keys = TextKeys(texts, np.arange(1, count + 1) * 36)
    order = np.random.default_rng(0).permutation(count)
    tracemalloc.start()
    taken = keys.take(order)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.array_equal(taken.text.reshape(count, 36), texts.reshape(count, 36)[order])
    assert peak < 3 * len(texts)
    few = TextKeys.of(["a", "", "ccc"])
    assert list(few.take(np.array([-1, 0, 1, -3]))) == ["ccc", "a", "", "a"]
    assert list(few.take(np.array([True, False, True]))) == ["a", "ccc"]
    assert list(few[:0]) == []


@pytest.mark.parametrize(
    "numbers", [np.array([1, 2**63], np.uint64), np.array([1.0, 2.5]), np.array([True]), ["7"]]
)
def test_integer_keys_are_integers(numbers):
    with pytest.raises(ArgumentError, match="use TextKeys"):
        IntegerKeys(numbers)


def test_small_integers_are_integer_keys():
    assert list(IntegerKeys(np.array([7, 2**63 - 1], np.uint64))) == ["7", "9223372036854775807"]
    assert len(IntegerKeys(np.array([]))) == 0


def test_titles_of_several_lines(tmp_path):
    titles = read_titles(
        write(tmp_path, 'key,title\n1,"Heat\n(1995)"\n2,"Sabrina\n3,Casino\n'), ["1", "2", "3"]
    )
    assert titles.names == ["Heat (1995)", '"Sabrina', "Casino"]


TITLES = {
    "movies.dat": "1::Caf\xe9 (1995)::Drama|Comedy\n2::Heat: Part 2::Action\n9::None::X\n".encode(
        "latin-1"
    ),
    "movies.csv": 'movieId,title,genres\n1,Café (1995),Drama|Comedy\n2,"Heat: Part 2",Action\n9,None,X\n'.encode(),
    "movies.jsonl": b'{"asin": 1, "title": "Caf\\u00e9 (1995)", "category": ["Drama", "Comedy"]}\n'
    b'{"asin": "2", "title": "Heat: Part 2", "category": "Action"}\n',
}


@pytest.mark.parametrize("name", TITLES)
def test_titles(tmp_path, name):
    titles = read_titles(write(tmp_path, TITLES[name], name), ["1", "2", "3"])
    assert titles.names == ["Café (1995)", "Heat: Part 2", None]
    assert titles.groups == [("Drama", "Comedy"), ("Action",), ()]
    assert titles.count == 2


def test_titles_of_parquet_and_without_groups(tmp_path):
    frame = pl.DataFrame({"key": [7, 8], "name": ["x", "y"], "tags": [["a", "b"], None]})
    frame.write_parquet(tmp_path / "t.parquet")
    titles = read_titles(tmp_path / "t.parquet", IntegerKeys(np.array([8, 7])))
    assert (titles.names, titles.groups) == (["y", "x"], [(), ("a", "b")])
    assert read_titles(write(tmp_path, "7\tx\n8\ty\n", "t.tsv"), ["8"]).groups is None
    with pytest.raises(DataError, match="none of the 1 items"):
        read_titles(tmp_path / "t.tsv", ["9"])
    with pytest.raises(DataError, match="no column for title"):
        read_titles(write(tmp_path, "movieId,year\n1,1990\n", "u.csv"), ["1"])


def test_doubled_marks_after_a_blank_are_part_of_a_key(tmp_path):
    text = 'user,item,rating\n"a, ""b""", "",3\n"a, ""b""", "x",3\n"c","x, ""y""",4\n'
    reading = read(tmp_path, text)
    assert list(reading.ratings.user_keys) == ['a, "b"', "c"]
    assert list(reading.ratings.item_keys) == ["x", 'x, "y"']


def test_a_file_without_a_usable_line_names_the_first_problem(tmp_path):
    with pytest.raises(DataError, match=r"2 unparsable\), line 2: rating 'good' is not a number"):
        read(tmp_path, "user,item,rating\na,b,good\na,c,bad\n")
