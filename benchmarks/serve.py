"""Throughput and latency of the HTTP server, side by side with bare FastAPI endpoints.

    python benchmarks/serve.py [--seconds 5] [--rounds 3] [--soak 600]

Needs ``wrk``. All traffic stays on this machine. One worker each; the server and the bare endpoints
are asked in turns, and medians over rounds are compared. ``--soak`` asks random good and bad requests
for a while, compares every answer with numpy while files are replaced every 5 seconds, and watches
memory and file handles.
"""

import argparse
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import torch

import featherbed as fb

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
POST = """
wrk.method = "POST"
wrk.body = '{body}'
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """A server process, ready to answer."""

    def __init__(self, *command, ready):
        self.port = free_port()
        words = [word.format(port=self.port) for word in command]
        self.process = subprocess.Popen(words, stderr=subprocess.DEVNULL)
        self.url = f"http://127.0.0.1:{self.port}"
        for _ in range(1200):
            try:
                if httpx.get(self.url + ready).status_code < 500:
                    return
            except httpx.TransportError:
                time.sleep(0.1)
        raise RuntimeError(f"{words} did not start")

    def resident(self):
        """Return private and mapped resident bytes."""
        text = Path(f"/proc/{self.process.pid}/smaps_rollup").read_text()
        found = {name: int(size) * 1024 for name, size in re.findall(r"(\w+):\s+(\d+) kB", text)}
        return found["Rss"]

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


def paced_latency(server, share, peak, seconds):
    """Return median and p99 (ms) of requests sent at a share of the peak rate, by 8 connections."""
    rate, latencies, lock = share * peak, [], threading.Lock()
    rng = np.random.default_rng(0)
    bodies = [json.dumps({"ids": rng.integers(0, ROWS, BATCH).tolist()}) for _ in range(200)]
    workers = 8

    def ask(number):
        found = []
        with httpx.Client(base_url=server.url) as client:
            begin = time.perf_counter()
            for turn in range(int(rate * seconds / workers)):
                due = begin + (turn * workers + number) / rate
                time.sleep(max(0, due - time.perf_counter()))
                start = time.perf_counter()
                client.post(
                    "/items/rows",
                    content=bodies[turn % len(bodies)],
                    headers={"accept": "application/x-npy"},
                )
                found.append(time.perf_counter() - start)
        with lock:
            latencies.extend(found)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {
        "p50": round(1e3 * float(np.median(latencies)), 3),
        "p99": round(1e3 * float(np.percentile(latencies, 99)), 3),
        "requests": len(latencies),
    }


def soak(folder, seconds):
    """Ask random good and bad requests while files are replaced; return what was found."""
    path, keys = folder / "soak.safetensors", [f"w{number}" for number in range(2_000)]
    rng = np.random.default_rng(0)
    tables = [
        fb.DenseTable.from_dense(torch.from_numpy(rng.normal(size=(2_000, 16)).astype("f4")))
        for _ in range(2)
    ]
    packed = [fb.save(table, path, keys=keys) for table in tables]
    rows = [table[np.arange(2_000)] for table in packed]
    command = [
        sys.executable,
        "-m",
        "featherbed.cli",
        "serve",
        str(path),
        "--port",
        "{port}",
        "--watch",
    ]
    server = Server(*command, ready="/ready")
    found = {"answers": 0, "refused": 0, "wrong": 0, "errors_5xx": 0, "dropped": 0, "replaced": 0}
    stop, lock = time.monotonic() + seconds, threading.Lock()
    bad = [
        b"{",
        b"[]",
        b'{"ids":[-1]}',
        b'{"ids":[1.5]}',
        b'{"ids":[1e99]}',
        b"[" * 5_000,
        b'{"k":1}',
    ]

    def ask(seed):
        mine, counts = np.random.default_rng(seed), dict.fromkeys(found, 0)
        with httpx.Client(base_url=server.url, timeout=60) as client:
            while time.monotonic() < stop:
                ids = mine.integers(0, 2_000, int(mine.integers(1, 200)))
                kind = int(mine.integers(0, 4))
                try:
                    if kind == 0:
                        content = bad[int(mine.integers(0, len(bad)))]
                        status = client.post("/soak/rows", content=content).status_code
                        counts["refused"] += 400 <= status < 500
                        counts["wrong"] += status < 400
                        counts["errors_5xx"] += status >= 500
                        continue
                    if kind == 1:
                        body = {"vector": rows[0][int(ids[0])].tolist(), "k": 5, "metric": "dot"}
                        answer = client.post("/soak/search", json=body)
                        expected = [
                            table.search(rows[0][int(ids[0])], 5)[0].tolist() for table in packed
                        ]
                        right = answer.is_success and answer.json()["ids"] in expected
                    else:
                        field = (
                            {"ids": ids.tolist()} if kind == 2 else {"keys": [keys[i] for i in ids]}
                        )
                        answer = client.post("/soak/rows", json=field)
                        got = np.array(answer.json()["rows"], "f4") if answer.is_success else None
                        right = got is not None and any((got == one[ids]).all() for one in rows)
                except httpx.TransportError:
                    counts["dropped"] += 1
                    continue
                counts["errors_5xx"] += answer.status_code >= 500
                counts["answers"] += right
                counts["wrong"] += not right
        with lock:
            for name, count in counts.items():
                found[name] += int(count)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(min(20, seconds / 4))
    memory, handles = [server.resident()], [server.handles()]
    while time.monotonic() < stop:
        time.sleep(5)
        packed[found["replaced"] % 2].save(path)
        found["replaced"] += 1
        memory.append(server.resident())
        handles.append(server.handles())
    for thread in threads:
        thread.join()
    server.stop()
    third = max(1, len(memory) // 3)
    return found | {
        "seconds": seconds,
        "resident_first_third": int(np.mean(memory[:third])),
        "resident_last_third": int(np.mean(memory[-third:])),
        "handles_first_third": float(np.mean(handles[:third])),
        "handles_last_third": float(np.mean(handles[-third:])),
    }


def measure(folder, seconds, rounds):
    torch.manual_seed(0)
    path = folder / "items.safetensors"
    fb.save(fb.ProductTable(ROWS, DIM, parts=8, choices=256), path)
    words = folder / "words.safetensors"
    fb.save(fb.DenseTable(100_000, DIM), words)
    (folder / "bare.py").write_text(BARE.format(batch=BATCH, dim=DIM))
    options = ["--port", "{port}", "--no-access-log", "--log-level", "warning", "--app-dir"]
    bare = Server(
        sys.executable, "-m", "uvicorn", "bare:app", *options, str(folder), ready="/openapi.json"
    )
    paths = [str(path), str(words)]
    server = Server(
        sys.executable, "-m", "featherbed.cli", "serve", *paths, "--port", "{port}", ready="/ready"
    )
    before = server.resident()
    npy = IDS.format(accept="application/x-npy", batch=BATCH, last=ROWS - 1)
    as_json = IDS.format(accept="application/json", batch=BATCH, last=ROWS - 1)
    vector = json.dumps({"vector": [0.5] * DIM, "k": 10})
    pairs = {
        "rows .npy": (server.url + "/items/rows", npy),
        "bare bytes": (bare.url + "/npy", npy),
        "rows JSON": (server.url + "/items/rows", as_json),
        "bare orjson": (bare.url + "/json", as_json),
    }
    found = median_rates(pairs, seconds, rounds)
    paced = paced_latency(server, 0.7, found["rows .npy"]["requests_per_second"], seconds)
    last = {"search 100,000": (server.url + "/words/search", POST.format(body=vector))}
    found |= median_rates(last, seconds, rounds)  # apart: requests left behind cost the next one
    rate = {name: one["requests_per_second"] for name, one in found.items()}
    result = {
        "rates": found,
        "npy_to_bare": round(rate["rows .npy"] / rate["bare bytes"], 3),
        "json_to_bare": round(rate["rows JSON"] / rate["bare orjson"], 3),
        "rows .npy at 70 % of the peak": paced,
        "resident_bytes": {"start": before, "after": server.resident()},
        "file_bytes": path.stat().st_size + words.stat().st_size,
    }
    server.stop()
    bare.stop()
    return result


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--soak", type=int, default=0)
    arguments = parser.parse_args()
    if shutil.which("wrk") is None:
        sys.exit("wrk is not installed: apt-get install wrk")
    with tempfile.TemporaryDirectory() as name:
        result = {
            "cores": os.cpu_count(),
            **measure(Path(name), arguments.seconds, arguments.rounds),
        }
        if arguments.soak:
            result["soak"] = soak(Path(name), arguments.soak)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
