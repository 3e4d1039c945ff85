"""Throughput, latency and memory of the HTTP server, side by side with bare FastAPI endpoints.

    python benchmarks/serve.py [soak hostile memory rates page] [--seconds 3] [--rounds 7]

Needs ``wrk``, Chromium and Linux. All traffic stays on this machine. The parts, in this order, of
which those that were measured replace those of the record:

soak: the server is saturated with good and bad requests while files are replaced every 5 seconds;
every answer is compared with numpy, memory and file handles are watched. hostile: requests that
must each be refused. memory: a worker that has served rows, with numba and without. rates: the
server and the bare endpoints are asked in turns, medians over rounds, then at a constant 70 % of
their rates. page: the page in headless Chromium without a graphics card, and an offline page.

For rates and latency the servers have core 1 and the load generator core 0, each with real-time
priority (SCHED_FIFO) where the user may set it, so that other programs do not interrupt them.
A core that is busy all the time then loses 50 ms of every second (the kernel's limit for real-time
programs), which shows in the p99 at the peak, not at 70 % of it.
"""

import argparse
import contextlib
import gc
import io
import json
import os
import platform
import re
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import httpx
import numpy as np
import orjson
import torch

import featherbed as fb
from featherbed.server.explore import offline_page, plotly_script

RESULTS = Path(__file__).parent / "results" / "serve.json"
ROWS, DIM, BATCH = 1_000_000, 64, 64
BARE = """
import orjson, numpy as np
from fastapi import FastAPI
from starlette.responses import Response
app = FastAPI()
rows = np.random.default_rng(0).normal(size=({batch}, {dim})).astype("f4")
content, numbers = rows.tobytes() + bytes(128), {{"rows": rows.tolist()}}
@app.post("/npy")
async def npy() -> Response:
    return Response(content)
@app.post("/json")
async def json() -> Response:
    return Response(orjson.dumps(numbers), media_type="application/json")
"""
IDS = """
math.randomseed(os.time())
wrk.method = "POST"
wrk.headers["accept"] = "{accept}"
request = function()
  local ids = {{}}
  for i = 1, {batch} do ids[i] = math.random(0, {last}) end
  return wrk.format(nil, nil, nil, '{{"ids":[' .. table.concat(ids, ",") .. "]}}")
end
"""
USERS = """
wrk.method = "POST"
request = function() return wrk.format(nil, nil, nil, string.format('{body}', math.random(1, 6040))) end
"""
POST = """
wrk.method = "POST"
wrk.body = '{body}'
"""


def may_have_priority():
    """Return whether processes may be given real-time priority."""
    command = ["chrt", "-f", "1", "true"]
    return shutil.which("chrt") is not None and subprocess.run(command, check=False).returncode == 0


def on_core(core):
    """Return the beginning of a command that runs on one core, before all other programs."""
    priority = ["chrt", "-f", "1"] if may_have_priority() else []
    return [*priority, "taskset", "-c", str(core)]


@contextlib.contextmanager
def generator_core():
    """Run this process on core 0, before all other programs."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {0})
    if may_have_priority():
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    gc.collect()
    gc.disable()  # the load generator must not stall
    yield
    gc.enable()
    if may_have_priority():
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    os.sched_setaffinity(0, cores)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """A server process, ready to answer."""

    def __init__(self, *command, ready, **environment):
        self.port = free_port()
        words = [word.format(port=self.port) for word in command]
        self.process = subprocess.Popen(
            words, stderr=subprocess.DEVNULL, env={**os.environ, **environment}
        )
        self.url = f"http://127.0.0.1:{self.port}"
        for _ in range(1200):
            try:
                if httpx.get(self.url + ready).status_code < 500:
                    return
            except httpx.TransportError:
                time.sleep(0.1)
        raise RuntimeError(f"{words} did not start")

    def resident(self, name="Rss"):
        """Return resident bytes, or another sum of the kernel's list of mappings."""
        text = Path(f"/proc/{self.process.pid}/smaps_rollup").read_text()
        return 1024 * int(re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE).group(1))

    def cpu_seconds(self):
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def handles(self):
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)


def wrk(url, script, seconds, connections=16):
    """Return requests per second and the latency percentiles in milliseconds."""
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as file:
        file.write(script)
        file.flush()
        command = [
            *on_core(0),
            "wrk",
            "-t1",
            f"-c{connections}",
            f"-d{seconds}s",
            "--latency",
            "-s",
            file.name,
            url,
        ]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if re.search(r"Non-2xx", text):
        raise RuntimeError(text)
    units = {"us": 1e-3, "ms": 1.0, "s": 1e3}
    latency = {
        f"p{share}": float(value) * units[unit]
        for share, value, unit in re.findall(r"(50|99)%\s+([\d.]+)(us|ms|s)", text)
    }
    return float(re.search(r"Requests/sec:\s+([\d.]+)", text).group(1)), latency


def median_rates(pairs, seconds, rounds):
    """Ask several (url, script) in turns; return the median rate and latency of each."""
    rates, latencies = {name: [] for name in pairs}, {name: [] for name in pairs}
    for url, script in pairs.values():
        wrk(url, script, 1)
    for _ in range(rounds):
        for name, (url, script) in pairs.items():
            rate, latency = wrk(url, script, seconds)
            rates[name].append(rate)
            latencies[name].append(latency)
    return {
        name: {
            "requests_per_second": round(statistics.median(rates[name])),
            **{
                key: round(statistics.median(one[key] for one in latencies[name]), 3)
                for key in ("p50", "p99")
            },
        }
        for name in pairs
    }


def request_bytes(path, body, accept="application/json"):
    """Return a POST request as bytes."""
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\naccept: {accept}\r\ncontent-length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


class Connection:
    """A kept-alive connection that sends bytes: cheap enough to saturate a server from Python."""

    def __init__(self, port, timeout=600):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.pending, self.head_size = b"", 0

    def send(self, content):
        self.socket.sendall(content)

    def receive_size(self):
        """Return the number of bytes of the next answer, its head included."""
        _, body = self.receive()
        return len(body) + self.head_size

    def receive(self):
        """Return status and body of the next answer; ConnectionError once the server has closed."""
        while (end := self.pending.find(b"\r\n\r\n")) < 0:
            self._more()
        head, self.head_size = self.pending[:end], end + 4
        size = int(re.search(rb"(?i)content-length: (\d+)", head).group(1))
        while len(self.pending) < end + 4 + size:
            self._more()
        body, self.pending = self.pending[end + 4 : end + 4 + size], self.pending[end + 4 + size :]
        return int(head[9:12]), body

    def ask(self, content):
        self.send(content)
        return self.receive()

    def _more(self):
        found = self.socket.recv(1 << 18)
        if not found:
            raise ConnectionError("closed by the server")
        self.pending += found

    def close(self):
        self.socket.close()


def paced_latency(server, path, rate, seconds, connections):
    """Return median and p99 (ms) of requests sent at a constant rate.

    ``from_due`` counts from the moment a request was due, so that a stall delays every request that
    falls into it; ``from_sent`` from the moment it was sent, as wrk and oha do.
    """
    rng, clock = np.random.default_rng(0), time.perf_counter
    bodies = (json.dumps({"ids": rng.integers(0, ROWS, BATCH).tolist()}) for _ in range(500))
    contents = [request_bytes(path, body.encode(), "application/x-npy") for body in bodies]
    opened = [Connection(server.port) for _ in range(connections)]
    for connection in opened:
        connection.send(contents[0])
        size = connection.receive_size()  # of every answer, so that the loop parses nothing
    idle, buffer = [connection.socket for connection in opened], bytearray(1 << 18)
    total, sent, answered = int(rate * seconds), 0, 0
    latencies, busy, missing = np.empty((2, total)), {}, {}
    with generator_core():
        begin = clock() + 0.01
        while answered < total:
            while idle and sent < total and begin + sent / rate <= clock():
                one = idle.pop()
                busy[one], missing[one] = (begin + sent / rate, clock()), size
                one.send(contents[sent % len(contents)])
                sent += 1
            wait = begin + sent / rate - clock() if idle and sent < total else 0.01
            for one in select.select(list(busy), (), (), max(0, wait))[0]:
                missing[one] -= one.recv_into(buffer)
                if missing[one] == 0:
                    now, (due, left) = clock(), busy.pop(one)
                    latencies[:, answered] = now - due, now - left
                    answered += 1
                    idle.append(one)
    for connection in opened:
        connection.close()
    quantiles = np.percentile(1e3 * latencies, (50, 99), axis=1).T
    return dict(zip(("from_due", "from_sent"), quantiles, strict=True))


def compare_latency(pairs, seconds, rounds):
    """Ask servers in turns at 70 % of their peaks; return medians over the rounds."""
    found = {}
    for connections in (2, 16):
        runs = {name: [] for name in pairs}
        for _ in range(rounds):
            for name, (server, path, peak) in pairs.items():
                time.sleep(0.5)  # what the last one left is done
                runs[name].append(paced_latency(server, path, 0.7 * peak, seconds, connections))
        for name, some in runs.items():
            one = {"requests_per_second": round(0.7 * pairs[name][2])}
            for key in ("from_due", "from_sent"):
                median, tail = np.median([run[key] for run in some], axis=0)
                ratios = [float(run[key][1] / run[key][0]) for run in some]
                one[key] = {
                    "p50": round(float(median), 3),
                    "p99": round(float(tail), 3),
                    "ratio": round(statistics.median(ratios), 2),
                    "ratio of each round": [round(ratio, 2) for ratio in ratios],
                }
            found[f"{name}, {connections} connections"] = one
    return found


def serve(*paths, options=(), prefix=(), **environment):
    """Start ``featherbed serve``."""
    command = [*prefix, sys.executable, "-m", "featherbed.cli", "serve", *map(str, paths)]
    return Server(*command, "--port", "{port}", *options, ready="/ready", **environment)


BAD = (
    b"{",
    b"[]",
    b'{"ids":[-1]}',
    b'{"ids":[1.5]}',
    b'{"ids":[1e99]}',
    b"[" * 5_000,
    b'{"k":1}',
    b'{"keys":["no such key"]}',
)


def random_requests(rng, rows, packed, keys, count=100):
    """Return requests, each with the answers that are right: one for each version of the file."""
    found = []
    for _ in range(count):
        ids = rng.integers(0, len(keys), int(rng.integers(1, 200)))
        kind = int(rng.integers(0, 5))
        if kind == 0:
            found.append((request_bytes("/soak/rows", BAD[int(rng.integers(len(BAD)))]), None))
        elif kind == 1:
            query = rows[int(rng.integers(2))][ids[0]]
            body = {"vector": query.tolist(), "k": 5, "metric": "dot"}
            near = [table.search(query, 5) for table in packed]
            expected = [
                {"ids": ids.tolist(), "scores": scores, "keys": [keys[id_] for id_ in ids]}
                for ids, scores in near
            ]
            content = request_bytes("/soak/search", json.dumps(body).encode())
            found.append((content, [as_json(one) for one in expected]))
        elif kind == 2:
            content = json.dumps({"ids": ids.tolist()}).encode()
            expected = []
            for matrix in rows:
                file = io.BytesIO()
                np.save(file, matrix[ids])
                expected.append(file.getvalue())
            found.append((request_bytes("/soak/rows", content, "application/x-npy"), expected))
        else:
            body = {"ids": ids.tolist()} if kind == 3 else {"keys": [keys[id_] for id_ in ids]}
            expected = [as_json({"rows": matrix[ids]}) for matrix in rows]
            found.append((request_bytes("/soak/rows", json.dumps(body).encode()), expected))
    return found


def as_json(content):
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


def soak(folder, seconds):
    """Saturate the server with good and bad requests while files are replaced; count the answers.

    The bytes of every answer are compared with those computed from the matrices of both versions.
    """
    path, keys = folder / "soak.safetensors", [f"w{number}" for number in range(2_000)]
    rng = np.random.default_rng(0)
    rows = [rng.normal(size=(2_000, 16)).astype("f4") for _ in range(2)]
    packed = [
        fb.save(fb.DenseTable.from_dense(torch.from_numpy(matrix)), path, keys=keys)
        for matrix in rows
    ]
    server = serve(path, options=["--watch"])
    found = {"right": 0, "refused": 0, "wrong": 0, "status_5xx": 0, "dropped": 0, "replaced": 0}
    stop, lock = threading.Event(), threading.Lock()

    def ask(seed):
        mine, counts = np.random.default_rng(seed), dict.fromkeys(found, 0)
        connection = Connection(server.port)
        while not stop.is_set():
            requests = random_requests(mine, rows, packed, keys)
            for number in mine.integers(0, len(requests), 2_000):
                content, expected = requests[number]
                try:
                    status, body = connection.ask(content)
                except OSError:
                    counts["dropped"] += 1
                    connection = Connection(server.port)
                    continue
                if status >= 500:
                    counts["status_5xx"] += 1
                elif expected is None and status >= 400:
                    counts["refused"] += 1
                else:
                    counts["right" if status == 200 and body in (expected or ()) else "wrong"] += 1
        with lock:
            for name, count in counts.items():
                found[name] += count

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(20)  # compiled loops and caches are there
    memory, handles, used = [server.resident()], [server.handles()], server.cpu_seconds()
    begin = time.monotonic()
    for _ in range(seconds // 5):  # slept, so that minutes in which everything was paused count not
        time.sleep(5)
        packed[found["replaced"] % 2].save(path)
        found["replaced"] += 1
        memory.append(server.resident())
        handles.append(server.handles())
    share = (server.cpu_seconds() - used) / (time.monotonic() - begin)
    stop.set()
    for thread in threads:
        thread.join()
    server.stop()
    third = max(1, len(memory) // 3)
    return found | {
        "seconds": seconds,
        "server_cpu_share": round(share, 3),
        "resident_first_third": int(np.mean(memory[:third])),
        "resident_last_third": int(np.mean(memory[-third:])),
        "handles_first_third": float(np.mean(handles[:third])),
        "handles_last_third": float(np.mean(handles[-third:])),
    }


HOSTILE_VALUES = (
    *(b"-1", b"1e400", b"-1e400", b"NaN", b"Infinity", b"null", b"true", b"{}", b"[]", b'""'),
    *(b"9" * 400, b"1e-400", b"1.5", b"18446744073709551615", b"-9223372036854775809"),
    *(b"[" * 20_000, b"[" * 900 + b"]" * 900, b'{"a":' * 900 + b"1" + b"}" * 900, b'"\\ud800"'),
    *(b"[[1]]", b"[null]", b"[NaN]", b"[1e400]", b'["\\u0000"]', b'[{"item":1}]', b'"\xff\xfe"'),
    *(b"[" + b"0," * 70_000 + b"0]", b'"' + b"a" * 200_000 + b'"', b'[["a"]]', b"[-1]"),
)
HOSTILE_NAMES = (
    *("..", "../..", "..%2f..%2fetc%2fpasswd", "%2e%2e%2fsecret", "/etc/passwd", "%00", "items%00"),
    *("C:%5c", "items/../items", "~root", "%ff%fe", "a" * 5_000, "items;ls", "*", "static/../.."),
)
FIELDS = (
    *("/items/rows ids", "/items/rows keys", "/items/search id", "/items/search vector"),
    *("/items/search k", "/items/search metric", "/items/recommend user", "/items/inspect id"),
    *("/films/recommend history", "/films/recommend user", "/films/recommend k"),
    *("/items/classify text", "/v1/embeddings input", "/v1/embeddings model", "/items/rows other"),
)


def hostile_requests(rng, count):
    """Return kinds and bytes of requests that no server should answer with 200 or 5xx."""
    found = []
    for _ in range(count):
        kind = int(rng.integers(0, 10))
        path, field = FIELDS[int(rng.integers(len(FIELDS)))].split()
        value = HOSTILE_VALUES[int(rng.integers(len(HOSTILE_VALUES)))]
        if kind < 6:
            body = b'{"' + field.encode() + b'":' + value + b"}"
            found.append(("value", request_bytes(path, body)))
        elif kind == 6:
            name = HOSTILE_NAMES[int(rng.integers(len(HOSTILE_NAMES)))]
            found.append(("name", request_bytes(f"/{name}/rows", b'{"ids":[1]}')))
        elif kind == 7:  # a body that is announced and does not arrive
            content = request_bytes(path, b'{"ids":[1]}' + b" " * 1_000)
            found.append(("slow", content[: -int(rng.integers(1, 1_000))]))
        elif kind == 8:
            sizes = (b"99999999999", b"-1", b"abc", b"1" * 40, b"8388609")
            size = sizes[int(rng.integers(len(sizes)))]
            head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: ".encode()
            found.append(("length", head + size + b"\r\n\r\n{}"))
        else:
            found.append(("noise", rng.bytes(int(rng.integers(1, 2_000))) + b"\r\n\r\n"))
    return found


def hostile(server, count, seed=0):
    """Send hostile requests by 16 connections at once; return their outcomes by kind and status.

    Every one must end with a 4xx status or a closed connection.
    """
    before, outcomes = server.resident(), Counter()
    peak = before

    def send(request):
        kind, content = request
        connection = Connection(server.port, timeout=60)
        try:
            connection.send(content)
            status = str(connection.ask(b"")[0])
        except TimeoutError:
            status = "no answer"
        except OSError:
            status = "closed"
        connection.close()
        return f"{kind} {status}"

    with ThreadPoolExecutor(16) as pool:
        for number, outcome in enumerate(
            pool.map(send, hostile_requests(np.random.default_rng(seed), count))
        ):
            outcomes[outcome] += 1
            if number % 50 == 0:
                peak = max(peak, server.resident())
    alive = server.process.poll() is None and httpx.get(server.url + "/ready").status_code == 200
    right = sum(n for name, n in outcomes.items() if re.search(r"4\d\d$|closed$", name))
    return {
        "requests": count,
        "status_4xx_or_closed": right,
        "outcomes": dict(sorted(outcomes.items())),
        "resident_before": before,
        "resident_peak": peak,
        "resident_after": server.resident(),
        "still_running": alive,
    }


def read_data(name):
    """Return a file of the data folder, None where it is absent."""
    path = Path(os.environ.get("FEATHERBED_DATA", "data")) / name
    return path if path.exists() else None


def write_files(folder):
    """Write a coded table, a dense one of 100,000 rows and a recommender of MovieLens-1M.

    Files that the folder holds already are used again.
    """
    torch.manual_seed(0)
    paths = [folder / "items.safetensors", folder / "words.safetensors"]
    if not paths[0].exists():
        fb.save(fb.ProductTable(ROWS, DIM, parts=8, choices=256), paths[0])
    if not paths[1].exists():
        fb.save(fb.DenseTable(100_000, DIM), paths[1])
    if (folder / "films").exists():
        paths.append(folder / "films")
    elif (ratings := read_data("ml-1m/ratings.dat.gz")) is not None:
        command = ["train", "ratings", str(ratings), "--out", str(folder / "films")]
        command += ["--users", "dense", "--items", "dense", "--set", "training.epochs=1"]
        subprocess.run(
            [sys.executable, "-m", "featherbed.cli", *command],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        paths.append(folder / "films")
    return paths


def measure_memory(path):
    """Return resident bytes of a worker that has served rows, with numba and without."""
    found = {"file": path.stat().st_size}
    rng = np.random.default_rng(0)
    for name, kernels in (("without numba", "numpy"), ("with numba", "auto")):
        server = serve(path, FEATHERBED_KERNELS=kernels)
        connection = Connection(server.port)
        for _ in range(2_000):
            ids = json.dumps({"ids": rng.integers(0, ROWS, BATCH).tolist()}).encode()
            connection.ask(request_bytes("/items/rows", ids, "application/x-npy"))
        resident = server.resident()
        found[name] = {
            "resident": resident,
            "beside the file": resident - found["file"],
            "private": server.resident("Anonymous"),
        }
        connection.close()
        server.stop()
    return found


def measure_rates(paths, folder, seconds, rounds):
    """Return rates beside bare endpoints, and latencies at 70 % of them."""
    (folder / "bare.py").write_text(BARE.format(batch=BATCH, dim=DIM))
    options = ["--port", "{port}", "--no-access-log", "--log-level", "warning", "--app-dir"]
    command = [*on_core(1), sys.executable, "-m", "uvicorn", "bare:app", *options, str(folder)]
    bare = Server(*command, ready="/openapi.json")
    server = serve(*paths, options=["--watch"], prefix=on_core(1))
    npy = IDS.format(accept="application/x-npy", batch=BATCH, last=ROWS - 1)
    as_json = IDS.format(accept="application/json", batch=BATCH, last=ROWS - 1)
    pairs = {
        "rows .npy": (server.url + "/items/rows", npy),
        "bare bytes": (bare.url + "/npy", npy),
        "rows JSON": (server.url + "/items/rows", as_json),
        "bare orjson": (bare.url + "/json", as_json),
    }
    found = median_rates(pairs, seconds, rounds)
    peaks = {
        "rows .npy": (server, "/items/rows", found["rows .npy"]["requests_per_second"]),
        "bare bytes": (bare, "/npy", found["bare bytes"]["requests_per_second"]),
    }
    latency = compare_latency(peaks, seconds, rounds)
    vector = json.dumps({"vector": [0.5] * DIM, "k": 10})
    others = {"search 100,000": (server.url + "/words/search", POST.format(body=vector))}
    if len(paths) > 2:
        users = USERS.format(body='{"user":"%d"}')
        others["recommend MovieLens-1M"] = (server.url + "/films/recommend", users)
    found |= median_rates(others, seconds, rounds)  # apart: requests left behind cost the next one
    server.stop()
    bare.stop()
    rate = {name: one["requests_per_second"] for name, one in found.items()}
    return {
        "rates": found,
        "npy_to_bare": round(rate["rows .npy"] / rate["bare bytes"], 3),
        "json_to_bare": round(rate["rows JSON"] / rate["bare orjson"], 3),
        "at 70 % of the peak": latency,
    }


FRAMES = """() => { window.frames = [];
  const note = (now) => { frames.push(now); requestAnimationFrame(note); };
  requestAnimationFrame(note); }"""
PAINTED = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


def measure_page(folder, rounds):
    """Return how long 100,000 points take to appear and to be panned, and bytes of 30,000."""
    from playwright.sync_api import sync_playwright

    names = [f"word{number}" for number in range(100_000)]
    large, small = folder / "large.safetensors", folder / "small.safetensors"
    torch.manual_seed(0)
    fb.save(fb.DenseTable(len(names), DIM), large, keys=names)
    fb.save(fb.ProductTable(30_000, DIM, parts=8, choices=256), small, keys=names[:30_000])
    server = serve(large)
    begin = time.perf_counter()
    size = len(httpx.get(server.url + "/large/points", timeout=300).content)
    projected = time.perf_counter() - begin
    shown, panned, released = [], [], []
    with sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-gpu", "--use-gl=swiftshader"]
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=[*options, "--ignore-gpu-blocklist"]
        )
        for _ in range(rounds):
            page = browser.new_page(viewport={"width": 1280, "height": 800})
            begin = time.perf_counter()
            page.goto(server.url)
            page.wait_for_selector("body[data-ready]", timeout=60_000)
            page.evaluate(PAINTED)
            shown.append(time.perf_counter() - begin)
            page.mouse.move(400, 400)
            page.mouse.down()
            page.evaluate(FRAMES)
            page.mouse.move(560, 480, steps=60)
            panned += np.diff(page.evaluate("frames")).tolist()
            begin = time.perf_counter()
            page.mouse.up()
            page.evaluate(PAINTED)
            released.append(time.perf_counter() - begin)
            page.close()
        browser.close()
    server.stop()
    pages = offline_page("small", fb.load(small)), plotly_script()
    return {
        "points": len(names),
        "projection_seconds": round(projected, 2),
        "points_bytes": size,
        "shown_seconds": [round(one, 2) for one in shown],
        "pan_frame_ms": {
            "p50": round(float(np.percentile(panned, 50)), 1),
            "p99": round(float(np.percentile(panned, 99)), 1),
            "frames": len(panned),
        },
        "drawn_again_seconds": [round(one, 2) for one in released],
        "offline_rows": 30_000,
        "offline_bytes_beside_plotly": len(pages[0].encode()) - len(pages[1].encode()),
    }


def describe_run(seconds, rounds):
    """Return the conditions of a run."""
    names = ("featherbed", "fastapi", "uvicorn", "numpy", "numba", "orjson", "plotly")
    return {
        "load_average": round(os.getloadavg()[0], 1),
        "cores": os.cpu_count(),
        "placed": "servers on core 1, load generator on core 0",
        "scheduling": "SCHED_FIFO" if may_have_priority() else "normal",
        "seconds": seconds,
        "rounds": rounds,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in names},
    }


PARTS = ("soak", "hostile", "memory", "rates", "page")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}, default all")
    parser.add_argument("--seconds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--soak", type=int, default=600, help="seconds")
    parser.add_argument("--files", type=Path, help="folder that keeps the tables that are served")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"{', '.join(unknown)}: use {', '.join(PARTS)}")
    if shutil.which("wrk") is None:
        sys.exit("wrk is not installed: apt-get install wrk")
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.files or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        paths = write_files(folder)

        def refused():
            server = serve(*paths, options=["--timeout", "2"])
            found = hostile(server, 2_000)
            server.stop()
            return found

        measures = {
            "soak": lambda: soak(folder, arguments.soak),
            "hostile": refused,
            "memory": lambda: measure_memory(paths[0]),
            "rates": lambda: measure_rates(paths, folder, arguments.seconds, arguments.rounds),
            "page": lambda: measure_page(folder, arguments.rounds),
        }
        for part in arguments.parts or PARTS:
            run = describe_run(arguments.seconds, arguments.rounds)
            found = {"run": run, **measures[part]()}
            print(json.dumps({part: found}, indent=1), flush=True)
            record = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
            kept = {name: record[name] for name in PARTS if name in record}
            RESULTS.write_text(json.dumps(kept | {part: found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
