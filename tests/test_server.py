"""The HTTP server as a process: answers equal numpy's, refusals name the remedy, files are replaced."""

import base64
import gzip
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import featherbed as fb
from featherbed.apps.classifier.serve import write_classifier
from featherbed.apps.language.serve import write_language
from featherbed.apps.recommender import write_recommender
from featherbed.apps.sequences import SequenceRecommender, SequenceShape, write_sequences

httpx = pytest.importorskip("httpx", reason="needs the extra dev")
pytest.importorskip("fastapi", reason="needs the extra serve")
explore = pytest.importorskip("featherbed.server.explore", reason="needs the extra serve")

WORDS = ["<pad>", "<unk>", "<eos>", "goal", "profit", "team", "bank"]


def write_words(folder, seed=0):
    rows = np.random.default_rng(seed).normal(size=(300, 8)).astype(np.float32)
    keys = [f"w{number}" for number in range(300)]
    return fb.save(
        fb.DenseTable.from_dense(torch.from_numpy(rows)), folder / "words.safetensors", keys=keys
    )


def write_models(folder):
    write_words(folder)
    rng = np.random.default_rng(1)
    fb.save(fb.ProductTable(5_000, 16, parts=4, choices=16), folder / "items.safetensors")
    users = fb.DenseTable.from_dense(torch.from_numpy(rng.normal(size=(4, 3)).astype("f4")))
    films = fb.DenseTable.from_dense(torch.from_numpy(rng.normal(size=(6, 3)).astype("f4")))
    (folder / "films").mkdir()
    packed = [
        fb.save(users, folder / "u.safetensors", keys=["ann", "bob", "eve", "kim"]),
        fb.save(films, folder / "i.safetensors", keys=list("abcdef")),
    ]
    write_recommender(
        folder / "films",
        *packed,
        seen=([0, 1, 1, 1, 1], [0]),
        mean=3.0,
        biases="column",
        titles=[f"Film {key}" for key in "abcdef"],
        about={"test_mse": 0.8},
    )
    sites = fb.Vocabulary.count([["a", "a", "b", "b", "c"]], min_count=2, shared=2)
    fb.Collection.from_spec({"site": (sites, 4, "dense"), "hour": (24, 3, "dense")}).save(
        folder / "clicks.safetensors"
    )
    rows = rng.normal(size=(len(WORDS), 4)).astype("f4")
    rows[0] = 0
    table = fb.DenseTable.from_dense(torch.from_numpy(rows), padding_idx=0).pack()
    layer = {"layer0.weight": rng.normal(size=(2, 4)), "layer0.bias": np.zeros(2)}
    write_classifier(
        folder / "news", table, layer, kind="bag", classes=["sport", "money"], words=WORDS
    )
    plain = fb.DenseTable.from_dense(torch.from_numpy(rows)).pack()
    gates = rng.normal(size=(16, 4)), rng.normal(size=(16, 4)), np.zeros(16), np.zeros(16)
    write_language(folder / "lm", plain, [gates], np.zeros(len(WORDS)), words=WORDS)
    shape = SequenceShape(items=6, dim=3, users=0, length=4, layers=1, heads=1, inner=3)
    drawn = {name: rng.normal(size=size) for name, size in shape.arrays().items()}
    named = films.pack().replace(keys=fb.Keys.of(list("abcdef")))
    write_sequences(folder / "plays", named, drawn, shape, repeats=False)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def started(*paths, options=(), **environment):
    port = free_port()
    code = "import sys; sys.modules['torch'] = None; from featherbed.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "serve", *map(str, paths), "--port", str(port), *options],
        stderr=subprocess.PIPE,
        env={**os.environ, **environment},
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            for _ in range(600):
                try:
                    if client.get("/ready").status_code == 200:
                        break
                except httpx.TransportError:
                    assert process.poll() is None, process.stderr.read().decode()
                    time.sleep(0.1)
            yield client, process
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) in (0, -signal.SIGTERM)
        process.stderr.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    write_models(folder)
    return folder


@pytest.fixture(scope="module")
def client(folder):
    paths = [folder / "words.safetensors", folder / "items.safetensors", folder / "films"]
    paths.append(folder / "clicks.safetensors")
    paths.append(folder / "plays")
    with started(*paths, folder / "news", f"lm={folder / 'lm'}") as (client, _):
        yield client


def test_lists_what_it_serves(client):
    tables = {table["name"]: table for table in client.get("/tables").json()["tables"]}
    assert {name: table["kind"] for name, table in tables.items()} == {
        "words": "table",
        "items": "table",
        "films": "recommender",
        "clicks": "collection",
        "plays": "sequence model",
        "news": "classifier",
        "lm": "language model",
    }
    assert tables["items"]["rows"] == 5_000
    assert tables["items"]["method"] == "ProductTable"
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/ready").json()["tables"] == list(tables)


def test_rows_equal_those_of_the_file(client, folder):
    packed = fb.load(folder / "items.safetensors")
    ids = [0, 17, 4_999, 17]
    rows = client.post("/items/rows", json={"ids": ids}).json()["rows"]
    np.testing.assert_array_equal(np.array(rows, dtype=np.float32), packed[ids])
    answer = client.post("/items/rows", json={"ids": ids}, headers={"accept": "application/x-npy"})
    np.testing.assert_array_equal(np.load(io.BytesIO(answer.content)), packed[ids])
    words = fb.load(folder / "words.safetensors")
    rows = client.post("/words/rows", json={"keys": ["w3", "w299"]}).json()["rows"]
    np.testing.assert_array_equal(np.array(rows, dtype=np.float32), words[["w3", "w299"]])
    many = np.arange(5_000).tolist()
    rows = client.post("/items/rows", json={"ids": many}).json()["rows"]
    np.testing.assert_array_equal(np.array(rows, dtype=np.float32), packed[many])


@pytest.mark.parametrize("metric", ["cosine", "dot"])
def test_search_equals_that_of_the_file(client, folder, metric):
    words = fb.load(folder / "words.safetensors")
    ids, scores = words.search(words["w7"], 6, metric=metric)
    keep = ids != 7
    answer = client.post("/words/search", json={"key": "w7", "k": 5, "metric": metric}).json()
    assert answer["ids"] == ids[keep][:5].tolist()
    assert answer["keys"] == [f"w{id_}" for id_ in answer["ids"]]
    np.testing.assert_allclose(answer["scores"], scores[keep][:5], rtol=1e-6)
    by_id = client.post("/words/search", json={"id": 7, "k": 5, "metric": metric}).json()
    assert by_id == answer
    vector = words["w7"].tolist()
    nearest = client.post("/words/search", json={"vector": vector, "k": 1000, "metric": metric})
    assert len(nearest.json()["ids"]) == 300
    assert "keys" not in client.post("/items/search", json={"id": 0}).json()


def test_recommendations(client, folder):
    recommender = fb.Recommender.open(folder / "films")
    items = client.post("/films/recommend", json={"user": "ann", "k": 3}).json()["items"]
    expected = [item._asdict() for item in recommender.recommend("ann", 3)]
    assert [item["key"] for item in items] == [item["key"] for item in expected]
    assert items[0]["title"] == expected[0]["title"]
    assert items[0]["score"] == pytest.approx(expected[0]["score"])
    rated = client.post("/films/recommend", json={"user": "ann", "include_rated": True}).json()
    assert len(rated["items"]) == 6


def test_a_history_is_folded_in(client, folder):
    recommender = fb.Recommender.open(folder / "films")
    history = ["a", {"item": "b", "rating": 2.0}, "unknown"]
    items = client.post("/films/recommend", json={"history": history, "k": 3}).json()["items"]
    expected = recommender.recommend_history([("a", None), ("b", 2.0), ("unknown", None)], 3)
    assert [item["key"] for item in items] == [item.key for item in expected]
    assert not {"a", "b"} & {item["key"] for item in items}
    np.testing.assert_allclose([i["score"] for i in items], [i.score for i in expected], rtol=1e-6)


def test_what_follows_a_history(client, folder):
    history = ["a", "b", "unknown"]
    answer = client.post("/plays/recommend", json={"history": history, "k": 3})
    expected = SequenceRecommender.open(folder / "plays").recommend_history(history, 3)
    assert [item["key"] for item in answer.json()["items"]] == [item.key for item in expected]
    body = {"history": history, "include_rated": True}
    assert len(client.post("/plays/recommend", json=body).json()["items"]) == 6
    for body in ({"history": ["unknown"]}, {"user": "ann"}, {"history": ["a"], "user": "ann"}):
        assert client.post("/plays/recommend", json=body).status_code in (400, 404)


def test_rows_of_a_collection(client, folder):
    packed = fb.PackedCollection.load(folder / "clicks.safetensors")
    listed = next(t for t in client.get("/tables").json()["tables"] if t["name"] == "clicks")
    assert [(c["name"], c["rows"], c["dim"], c["keys"]) for c in listed["columns"]] == [
        ("site", 4, 4, True),
        ("hour", 24, 3, False),
    ]
    for body, expected in (
        ({"column": "hour", "ids": [3, 23]}, packed.rows("hour", [3, 23])),
        ({"column": "site", "keys": ["b", "new"]}, packed.rows("site", ["b", "new"])),
        (
            {"columns": {"site": ["a", "new"], "hour": [0, 5]}},
            packed[{"site": ["a", "new"], "hour": [0, 5]}],
        ),
    ):
        rows = client.post("/clicks/rows", json=body).json()["rows"]
        np.testing.assert_array_equal(np.array(rows, dtype=np.float32), expected)
        answer = client.post("/clicks/rows", json=body, headers={"accept": "application/x-npy"})
        np.testing.assert_array_equal(np.load(io.BytesIO(answer.content)), expected)


def test_classes_and_continuations(client):
    one = client.post("/news/classify", json={"text": "goal team"}).json()["classes"]
    assert sum(entry["probability"] for entry in one) == pytest.approx(1)
    many = client.post("/news/classify", json={"texts": ["goal team", "bank"], "k": 1}).json()
    assert many["classes"][0][0]["label"] == one[0]["label"]
    assert many["classes"][0][0]["probability"] == pytest.approx(one[0]["probability"], rel=1e-5)
    assert len(many["classes"]) == 2
    assert client.post("/news/search", json={"key": "goal", "k": 9}).json()["keys"][-1] in WORDS
    body = {"text": "goal", "words": 4, "seed": 3}
    text = client.post("/lm/continue", json=body).json()["text"]
    assert text.startswith("goal")
    assert client.post("/lm/continue", json=body).json()["text"] == text


def test_embeddings_in_openai_format(client, folder):
    words = fb.load(folder / "words.safetensors")
    body = {"model": "words", "input": ["w1 W2 unknown", "w3"]}
    answer = client.post("/v1/embeddings", json=body).json()
    assert answer["object"] == "list"
    assert answer["usage"]["prompt_tokens"] == 3
    found = np.array(answer["data"][0]["embedding"], dtype=np.float32)
    np.testing.assert_allclose(found, words[["w1", "w2"]].mean(0), rtol=1e-6)
    packed = client.post("/v1/embeddings", json={**body, "encoding_format": "base64"}).json()
    decoded = np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), dtype=np.float32)
    np.testing.assert_array_equal(decoded, found)
    by_id = client.post("/v1/embeddings", json={"model": "words", "input": [[1, 2], [3]]}).json()
    np.testing.assert_allclose(by_id["data"][0]["embedding"], found, rtol=1e-6)
    absent = {**body, "encoding_format": None, "dimensions": None}  # as some clients send it
    again = client.post("/v1/embeddings", json=absent).json()
    assert again["data"][0]["embedding"] == answer["data"][0]["embedding"]
    news = client.post("/v1/embeddings", json={"model": "news", "input": "goal bank"})
    assert len(news.json()["data"][0]["embedding"]) == 4


REFUSED = {
    "not JSON": ("/items/rows", b"{", 400, "not JSON"),
    "no object": ("/items/rows", b"[1]", 400, "JSON object"),
    "deep": ("/items/rows", b"[" * 100_000, 400, "not JSON"),
    "nothing": ("/items/rows", b"{}", 400, "exactly one of ids, keys"),
    "both": ("/items/rows", {"ids": [1], "keys": ["a"]}, 400, "exactly one"),
    "unknown field": ("/items/rows", {"id": [1]}, 400, "unknown"),
    "empty": ("/items/rows", {"ids": []}, 400, "list of whole numbers"),
    "fraction": ("/items/rows", {"ids": [1, 1.5]}, 400, "whole numbers only"),
    "bool": ("/items/rows", {"ids": [1, True]}, 400, "whole numbers only"),
    "null": ("/items/rows", {"ids": [None]}, 400, "whole numbers only"),
    "nested": ("/items/rows", {"ids": [[1]]}, 400, "whole numbers only"),
    "beyond": ("/items/rows", {"ids": [5_000]}, 404, "ids go from 0 to 4999"),
    "negative": ("/items/rows", {"ids": [-1]}, 404, "ids go from 0 to 4999"),
    "beyond 64 bits": ("/items/rows", b'{"ids": [18446744073709551615]}', 400, "too large"),
    "beyond a float": ("/items/rows", b'{"ids": [1' + b"0" * 400 + b"]}", 400, ""),
    "NaN": ("/items/rows", b'{"ids": [NaN]}', 400, "not JSON"),
    "too many": ("/items/rows", {"ids": [1] * 70_000}, 413, "at most 65,536"),
    "no keys": ("/items/rows", {"keys": ["a"]}, 404, "without keys"),
    "unknown key": ("/words/rows", {"keys": ["w1", "zz"]}, 404, "zz"),
    "too large": ("/items/rows", b" " * (9 << 20), 413, "at most 8,388,608 bytes"),
    "k": ("/items/search", {"id": 1, "k": 10**9}, 400, "k must be"),
    "k zero": ("/items/search", {"id": 1, "k": 0}, 400, "k must be"),
    "metric": ("/items/search", {"id": 1, "metric": "l2"}, 400, "cosine or dot"),
    "vector": ("/items/search", {"vector": [1.0]}, 400, "16 numbers"),
    "vector of texts": ("/items/search", {"vector": ["a"] * 16}, 400, "16 numbers"),
    "huge vector": ("/items/search", {"vector": [1e300] * 16}, 400, "beyond float32"),
    "unknown user": ("/films/recommend", {"user": "zoe"}, 404, "zoe"),
    "user and history": ("/films/recommend", {"user": "ann", "history": ["a"]}, 400, "one of"),
    "bad history": ("/films/recommend", {"history": [{"item": 3}]}, 400, "entry of history"),
    "rating by another name": (
        "/films/recommend",
        {"history": [{"item": "a", "stars": 2}]},
        400,
        "entry of history",
    ),
    "no recommender": ("/items/recommend", {"user": "ann"}, 404, "not a recommender"),
    "no word": ("/news/classify", {"text": "  "}, 400, "no word"),
    "long text": ("/news/classify", {"text": "a" * 200_000}, 413, "at most 100,000"),
    "temperature": ("/lm/continue", {"text": "goal", "temperature": -1}, 400, "temperature"),
    "words": ("/lm/continue", {"text": "goal", "words": 10**7}, 400, "words must be"),
    "no column": ("/clicks/rows", {"ids": [1]}, 400, "exactly one of column, columns"),
    "unknown column": ("/clicks/rows", {"column": "x", "ids": [1]}, 400, "'site', 'hour'"),
    "beyond a column": ("/clicks/rows", {"column": "hour", "ids": [24]}, 404, "from 0 to 23"),
    "keys of no column": ("/clicks/rows", {"column": "hour", "keys": ["a"]}, 404, "no keys"),
    "missing column": ("/clicks/rows", {"columns": {"site": ["a"]}}, 400, "lacks the column"),
    "uneven columns": ("/clicks/rows", {"columns": {"site": ["a"], "hour": [1, 2]}}, 400, "shapes"),
    "columns as a list": ("/clicks/rows", {"columns": [1]}, 400, "an object"),
    "columns and ids": (
        "/clicks/rows",
        {"columns": {"site": ["a"], "hour": [1]}, "ids": [3]},
        400,
        "give columns alone",
    ),
    "an empty column": ("/clicks/rows", {"columns": {"site": [], "hour": [1]}}, 400, "one or more"),
    "huge id of a column": (
        "/clicks/rows",
        b'{"column":"hour","ids":[18446744073709551615]}',
        400,
        "too large",
    ),
    "search of a collection": ("/clicks/search", {"id": 1}, 404, "/clicks/rows"),
    "embeddings of a collection": (
        "/v1/embeddings",
        {"model": "clicks", "input": "a"},
        404,
        "rows",
    ),
    "no table": ("/nothing/rows", {"ids": [1]}, 404, "use one of words, items"),
    "traversal": ("/..%2f..%2fetc%2fpasswd/rows", {"ids": [1]}, 404, ""),
    "null byte": ("/%00/rows", {"ids": [1]}, 404, ""),
    "embeddings of ids": ("/v1/embeddings", {"model": "words", "input": [10**6]}, 404, "ids go"),
    "no known word": ("/v1/embeddings", {"model": "words", "input": ["zz"]}, 400, "no word of"),
    "embeddings without keys": ("/v1/embeddings", {"model": "items", "input": "a"}, 400, "no keys"),
}


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_bad_requests_are_told_what_is_accepted(client, case):
    path, body, status, message = REFUSED[case]
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = client.post(path, content=content)
    assert answer.status_code == status, answer.text
    assert message in answer.json()["error"]["message"]
    assert client.get("/health").status_code == 200


def test_other_methods_and_paths(client):
    answer = client.get("/items/rows")
    assert answer.status_code == 405
    assert answer.json()["error"]["message"] == "this endpoint takes POST"
    assert client.options("/health").json()["error"]["message"] == "this endpoint takes GET"
    for path in ("/", "/health", "/tables"):
        answer = client.head(path)
        assert (answer.status_code, answer.content) == (200, b"")
        assert int(answer.headers["content-length"]) == len(client.get(path).content)
    zipped = gzip.compress(b'{"ids": [1]}')
    answer = client.post("/items/rows", content=zipped, headers={"content-encoding": "gzip"})
    assert answer.status_code == 415
    assert "without a content-encoding" in answer.json()["error"]["message"]
    assert client.post("/items/nothing").status_code == 404
    assert client.get("/docs").status_code == 404
    assert "/{name}/rows" in client.get("/openapi.json").json()["paths"]
    assert (
        client.get("/tables", headers={"origin": "http://x"}).headers.get(
            "access-control-allow-origin"
        )
        is None
    )


def test_metrics_count_requests(client):
    client.post("/items/rows", json={"ids": [1]})
    text = client.get("/metrics").text
    assert 'featherbed_requests_total{endpoint="/{name}/rows",status="200"}' in text
    assert "process_resident_memory_bytes" in text


def test_slow_bodies_end(folder):
    with started(folder / "items.safetensors", options=["--timeout", "0.5"]) as (client, _):
        with socket.create_connection((client.base_url.host, client.base_url.port)) as raw:
            raw.sendall(b"POST /items/rows HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
            raw.settimeout(10)
            assert b"408" in raw.recv(1000).splitlines()[0]
        for head, status in ((b"", b"408"), (b"GET /he", b"408"), (b"a" * 70_000, b"431")):
            with socket.create_connection((client.base_url.host, client.base_url.port)) as raw:
                if head:
                    raw.sendall(b"GET /health HTTP/1.1\r\na: " + head)
                raw.settimeout(10)
                answer = raw.recv(1000)
                assert status in answer.splitlines()[0]
                assert b'"message":' in answer
        assert client.get("/health").status_code == 200


def test_a_token_and_origins(folder):
    options = ["--cors", "https://shop.example"]
    path = folder / "items.safetensors"
    with started(path, options=options, FEATHERBED_TOKEN="secret") as (client, _):
        assert client.get("/tables").status_code == 401
        assert client.get("/tables", headers={"authorization": "Bearer other"}).status_code == 401
        assert client.get("/").status_code == 200, "the page asks for the token"
        allowed = client.get(
            "/tables",
            headers={"authorization": "Bearer secret", "origin": "https://shop.example"},
        )
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://shop.example"


def test_replaced_files_are_picked_up_and_answers_are_never_mixed(tmp_path):
    tables = [write_words(tmp_path, seed) for seed in (0, 1)]
    expected = [table[np.arange(300)] for table in tables]
    path = tmp_path / "words.safetensors"
    tables[0].save(path)
    with started(path, options=["--watch"]) as (client, _):

        def ask(_):
            rows = client.post("/words/rows", json={"ids": list(range(300))})
            assert rows.status_code == 200
            found = np.array(rows.json()["rows"], dtype=np.float32)
            return [bool((found == rows_of).all()) for rows_of in expected]

        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(ask, range(50)))
            assert all(answer == [True, False] for answer in answers)
            tables[1].save(path)
            deadline = time.monotonic() + 20
            while not (answers := list(pool.map(ask, range(20))))[-1][1]:
                assert time.monotonic() < deadline
                assert all(sum(answer) == 1 for answer in answers)
            (tmp_path / "broken").write_bytes(b"broken")
            (tmp_path / "broken").replace(path)
            time.sleep(2.5)
            assert ask(0) == [False, True], "the last good file is still served"


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["nothing.safetensors"], "no such file"),
        (["."], "holds no model"),
        (["tables=words.safetensors"], "endpoint of the server"),
        (["words.safetensors", "words.safetensors"], "both called 'words'"),
        (["broken.safetensors"], "not a featherbed file"),
    ],
)
def test_bad_paths_end_with_one_line(tmp_path, paths, message):
    write_words(tmp_path)
    (tmp_path / "broken.safetensors").write_bytes(b"\xff" * 100)
    done = subprocess.run(
        [sys.executable, "-m", "featherbed.cli", "serve", *paths],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]


def test_limits_are_those_of_the_command(folder):
    options = ["--max-k", "3", "--max-batch", "2", "--max-body", "1000"]
    with started(folder / "words.safetensors", folder / "films", options=options) as (client, _):
        assert len(client.post("/words/search", json={"id": 1}).json()["ids"]) == 3
        assert len(client.post("/films/recommend", json={"history": ["a"]}).json()["items"]) == 3
        answer = client.post("/words/search", json={"id": 1, "k": 4})
        assert answer.json()["error"]["message"] == "k must be a whole number from 1 to 3"
        assert client.post("/words/rows", json={"ids": [1, 2, 3]}).status_code == 413
        assert client.post("/words/rows", json={"keys": ["w" * 1000]}).status_code == 413


@pytest.mark.parametrize("token", [b"", b" \n", b"one two", b"\xff\xfe", "schl\u00fcssel".encode()])
def test_a_file_without_a_token_serves_nobody(tmp_path, token):
    write_words(tmp_path)
    (tmp_path / "token").write_bytes(token)
    options = ["words.safetensors", "--token-file", "token", "--port", "0"]
    done = subprocess.run(
        [sys.executable, "-m", "featherbed.cli", "serve", *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: token holds no token: write one line")


def test_a_taken_port_ends_with_one_line(tmp_path):
    write_words(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "featherbed.cli", "serve", "words.safetensors", "--port", port],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1, port {port}" in done.stderr.splitlines()[-1]


def processes_below(pid):
    """Return a process and its children, as Linux lists them."""
    found, folder = [pid], Path(f"/proc/{pid}/task/{pid}/children")
    for child in folder.read_text().split() if folder.exists() else []:
        found += processes_below(int(child))
    return found


def test_several_workers_share_a_token_that_nobody_else_sees(folder, tmp_path):
    (tmp_path / "token").write_text("hidden-token")
    options = ["--workers", "2", "--token-file", str(tmp_path / "token")]
    with started(folder / "words.safetensors", options=options) as (client, process):
        headers = {"authorization": "Bearer hidden-token"}
        for _ in range(20):
            answer = client.post("/words/rows", json={"ids": [3]}, headers=headers)
            assert answer.status_code == 200
        assert client.post("/words/rows", json={"ids": [3]}).status_code == 401
        pids = processes_below(process.pid) if sys.platform == "linux" else []
        assert len(pids) >= 3 or sys.platform != "linux"
        for pid in pids:
            for name in ("cmdline", "environ"):
                assert b"hidden-token" not in Path(f"/proc/{pid}/{name}").read_bytes()
        process.send_signal(signal.SIGTERM)
        assert b"hidden-token" not in process.stderr.read()


def test_the_client_example(client, capsys):
    import runpy

    example = runpy.run_path("examples/http_client.py")
    example["main"](str(client.base_url), "words", "w3", "w4")
    shown = capsys.readouterr().out
    assert "2 rows of 8 numbers" in shown
    assert "w3 is near" in shown


def test_rows_are_inspected(client, folder):
    words = fb.load(folder / "words.safetensors")
    row = client.post("/words/inspect", json={"key": "w7"}).json()
    ids, _ = words.search(words["w7"], 9, metric="cosine")
    assert [other["id"] for other in row["neighbors"]] == [i for i in ids.tolist() if i != 7][:8]
    assert row["key"] == "w7"
    codes = client.post("/items/inspect", json={"id": 11}).json()["codes"]
    assert codes == fb.load(folder / "items.safetensors").codes_of([11])[0].tolist()


def test_words_that_move_a_class(client):
    found = client.post("/news/explain", json={"text": "goal bank"}).json()
    whole = found["classes"][0]
    for word, other in (("goal", "bank"), ("bank", "goal")):
        alone = client.post("/news/classify", json={"text": other}).json()["classes"]
        left = next(entry["probability"] for entry in alone if entry["label"] == whole["label"])
        effect = next(entry["effect"] for entry in found["words"] if entry["word"] == word)
        assert effect == pytest.approx(whole["probability"] - left, abs=1e-6)


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no Chromium on this machine")
    with sync_api.sync_playwright() as playwright:
        options = [
            "--no-sandbox",
            "--disable-gpu",
            "--use-gl=swiftshader",
            "--ignore-gpu-blocklist",
        ]
        browser = playwright.chromium.launch(executable_path=chromium, args=options)
        yield browser
        browser.close()


@contextmanager
def opened(browser, url, **settings):
    page, errors = browser.new_page(**settings), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
    page.goto(url)
    page.wait_for_selector("body[data-ready]", timeout=60_000)
    yield page
    assert not errors
    page.close()


def test_the_page_is_explored(client, browser):
    with opened(browser, str(client.base_url)) as page:
        page.fill("#find", "w7")
        page.keyboard.press("Enter")
        page.wait_for_function("document.querySelector('#detail h2')?.textContent === 'w7'")
        nearest = client.post("/words/inspect", json={"key": "w7"}).json()["neighbors"][0]["key"]
        page.click(f"#detail button:text-is('{nearest}')")
        page.wait_for_function(f"document.querySelector('#detail h2').textContent === '{nearest}'")
        box = page.locator("#plot .nsewdrag").first.bounding_box()
        point = page.evaluate(
            "() => { const f = document.querySelector('#plot')._fullLayout, d = data;"
            " const { x, y } = d;"
            " return [f.xaxis.l2p(x[5]), f.yaxis.l2p(y[5])]; }"
        )
        page.mouse.move(box["x"] + point[0], box["y"] + point[1])
        page.wait_for_timeout(300)
        page.mouse.click(box["x"] + point[0], box["y"] + point[1])
        page.wait_for_function(f"document.querySelector('#detail h2').textContent !== '{nearest}'")
        page.select_option("#table", "films")
        page.wait_for_selector("body[data-ready=films]")
        page.fill("#recommend", "ann")
        page.click("#ask button")
        page.wait_for_selector("#recommend-answer li")
        assert "Film" in page.inner_text("#recommend-answer")
        page.select_option("#table", "news")
        page.wait_for_selector("body[data-ready=news]")
        page.fill("#classify", "goal bank")
        page.click("#ask button")
        page.wait_for_selector("#classify-answer .word")
        assert "%" in page.inner_text("#classify-answer")


def test_the_page_asks_for_a_token(folder, browser):
    with started(folder / "words.safetensors", FEATHERBED_TOKEN="secret") as (client, _):
        page = browser.new_page()
        page.on("dialog", lambda dialog: dialog.accept("secret"))
        page.goto(str(client.base_url))
        page.wait_for_selector("body[data-ready=words]", timeout=60_000)
        page.close()


def test_the_page_says_that_plotly_is_missing(client, browser):
    page = browser.new_page()
    page.route("**/plotly.js", lambda route: route.fulfill(status=404))
    page.goto(str(client.base_url))
    page.wait_for_function("document.querySelector('#status').textContent.includes('[view]')")
    page.close()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("columns.csv", b"genre\n\xff\xfe\n"),
        ("columns.csv", b"genre,genre\n1,2\n"),
        ("columns.npz", b"no archive"),
        ("columns.npz", b"PK\x03\x04"),
        ("columns.npz", {"genre": np.float32(3)}),
        ("columns.npz", {"genre": np.ones((300, 2))}),
        ("columns.npz", {"genre": np.array([None] * 300)}),
        ("columns.npz", np.ones(300)),
    ],
)
def test_columns_that_cannot_be_read_are_refused(tmp_path, name, content):
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, dict):
        np.savez(path, **content)
    else:
        with path.open("wb") as file:
            np.save(file, content)
    with pytest.raises(
        fb.DataError, match=f"{name} (holds no columns: give|needs a header)"
    ) as got:
        explore.read_columns(path)
    assert "\n" not in str(got.value)


def test_columns_without_numbers_are_refused():
    table = fb.DenseTable(5, 4).pack()
    for value in (np.nan, np.inf, 1e300):
        column = np.full(5, value)
        with pytest.raises(fb.ArgumentError, match="sold holds no finite number"):
            explore.explore_data(table, columns={"sold": column})
        column[0] = 3
        data = explore.explore_data(table, columns={"sold": column})["columns"]["sold"]
        values = np.frombuffer(base64.b64decode(data["values"]), "<f4")
        np.testing.assert_array_equal(values, [3, *[np.nan] * 4])


def test_an_original_of_other_rows_is_refused():
    table = fb.DenseTable(5, 4).pack()
    for original, message in ((np.ones((4, 4)), "as many rows"), (np.full((5, 4), np.nan), "NaN")):
        with pytest.raises(fb.ArgumentError, match=message):
            explore.offline_page("items", table, original=original)


def test_the_offline_page(folder, tmp_path, browser):
    out = tmp_path / "page.html"
    rows = fb.load(folder / "items.safetensors")[:]
    np.save(tmp_path / "before.npy", rows + 0.1)
    (tmp_path / "columns.csv").write_text(
        "genre,sold\n" + "".join(f"g{i % 3},{i}\n" for i in range(5_000))
    )
    options = {"--out": out, "--original": tmp_path / "before.npy"}
    options["--columns"] = tmp_path / "columns.csv"
    words = [str(word) for option in options.items() for word in option]
    done = subprocess.run(
        [sys.executable, "-m", "featherbed.cli", "view", str(folder / "items.safetensors"), *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "http" not in done.stdout
    phone = {"viewport": {"width": 390, "height": 800}, "color_scheme": "dark"}
    with opened(browser, out.as_uri(), **phone) as page:
        assert {"genre", "sold", "first code"} <= set(page.inner_text("#color").split("\n"))
        page.fill("#find", "17")
        page.keyboard.press("Enter")
        page.wait_for_function("document.querySelector('#detail h2')?.textContent === 'row 17'")
        assert "Before compression" in page.inner_text("#detail")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
