"""Many ratings: through the command, and at the size of Amazon's data in passes over a stream.

    python benchmarks/ratings_scale.py [--ratings 50000000] [--users 10000000] [--items 1000000]
    python benchmarks/ratings_scale.py --amazon [--share 0.02] [--kill 90] [--folder DIR]

The first writes a file once (about 27 bytes a rating) and runs `featherbed train ratings` on it:
one epoch of plain rows, d = 16, every stage of the command included. It prints seconds, ratings a
second and memory.

The second has 43.5 million users, 15.2 million items and 233 million ratings (or a share of each),
which are never stored: a chunk of them is drawn from its number, from planted factors. Stages:
passes of plain rows (``StreamedFactorization``), passes of ANT with slots, errors on held-out
ratings, files, checksums. After every pass the state is written, and a run that was killed
continues from there: the same command again, with the same bytes at the end. ``--kill N`` kills
the run by SIGKILL after N seconds, once, and continues it. Rates are of whole passes, ratings are
drawn meanwhile; ``seconds`` are of the whole run, with what was lost by the kill, ``stages`` those
of the process that finished a stage.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # idle threads must not occupy a core

import numpy as np
import polars as pl
import torch
import torch.nn.functional as F

import featherbed as fb
from featherbed.apps.recommender.model import MatrixFactorization, mean_squared_error
from featherbed.apps.recommender.stream import StreamedFactorization
from featherbed.apps.recommender.train import pack_rows
from featherbed.io.records import Ratings
from featherbed.progress import show_progress

RESULTS = Path(__file__).parent / "results"
BLOCK = 5_000_000


def generate(path, ratings, users, items, seed=0):
    """Write `user,item,rating,timestamp`: every user and item occurs, popularity of items is Zipf's, tastes are planted."""
    rng = np.random.default_rng(seed)
    weights = 1.0 / np.arange(1, items + 1) ** 0.8
    edges = np.cumsum(weights / weights.sum())
    names = rng.permutation(items)
    level = (
        rng.normal(0, 0.4, users).astype(np.float32),
        rng.normal(0, 0.4, items).astype(np.float32),
    )
    taste = rng.integers(0, 8, users, dtype=np.uint8), rng.integers(0, 8, items, dtype=np.uint8)
    with path.open("wb") as file:
        for start in range(0, ratings, BLOCK):
            count = min(BLOCK, ratings - start)
            who = rng.integers(users, size=count)
            what = names[np.searchsorted(edges, rng.random(count)).clip(max=items - 1)]
            who[: max(0, min(count, users - start))] = np.arange(
                start, max(start, min(users, start + count))
            )
            last = ratings - start - items  # the last ratings name every item once
            if last < count:
                first = max(0, last)
                what[first:] = np.arange(items)[first - last : count - last]
            liked = np.where(taste[0][who] == taste[1][what], 0.8, -0.1)
            values = 3.5 + level[0][who] + level[1][what] + liked + rng.normal(0, 0.6, count)
            stars = np.clip(np.round(values * 2) / 2, 0.5, 5.0)
            times = 1_000_000_000 + np.arange(start, start + count)
            frame = pl.DataFrame(
                {
                    "userId": who * 3 + 7,
                    "movieId": what * 2 + 1,
                    "rating": stars,
                    "timestamp": times,
                }
            )
            frame.write_csv(file, include_header=start == 0)


# at the size of Amazon's data: Ni, Li and McAuley 2019, as Liang et al. 2021 use it
AMAZON = {"users": 43_531_850, "items": 15_167_257, "ratings": 233_055_327}
CHUNK, SEGMENT = 1 << 20, 16  # ratings drawn at once; chunks trained between two looks at the clock
PLAIN, ANT = 3, 2  # passes
DIM, ANCHORS, SLOTS, BATCH, LAM, LR = 16, 256, 4, 1 << 18, 2e-6, 0.05
HELD = 2  # chunks to measure errors on
ROWS = 1 << 22  # packed at once
FIGURES = "figures.json"
HASH = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)


def planted(ids, salt):
    """Return four numbers in [-1, 1) for each id, [n, 4]: a bias and three factors."""
    x = (ids.astype(np.uint64) + np.uint64(salt)) * HASH[0]
    x ^= x >> np.uint64(31)
    x *= HASH[1]
    x ^= x >> np.uint64(29)
    return x.view(np.uint16).reshape(-1, 4).astype(np.float32) / np.float32(32768) - 1


def chunk_of(number, size):
    """Draw chunk ``number``: ids in falling order of popularity, ratings of planted factors."""
    rng = np.random.default_rng([17, number])
    drawn = rng.random((2, CHUNK), dtype=np.float32)
    users = (drawn[0] ** np.float32(1.5) * size["users"]).astype(np.int32)
    items = (drawn[1] ** np.float32(3.0) * size["items"]).astype(np.int32)
    users, items = users.clip(max=size["users"] - 1), items.clip(max=size["items"] - 1)
    left, right = planted(users, 1), planted(items, 1 << 40)
    values = np.einsum("nk,nk->n", left[:, 1:], right[:, 1:])
    values += np.float32(0.5) * (left[:, 0] + right[:, 0]) + np.float32(3.5)
    values += np.float32(0.5) * rng.standard_normal(CHUNK, dtype=np.float32)
    return users, items, np.clip(values, 1, 5, out=values)


def ratings_of(numbers, size):
    """Return the ratings of chunks."""
    if not numbers:
        return None
    parts = zip(*(chunk_of(number, size) for number in numbers), strict=True)
    columns = [np.concatenate(part) for part in parts]
    return Ratings(*columns, range(size["users"]), range(size["items"]))


def segments(size):
    """Yield the ratings of a pass, and the share of it before them; the next are drawn meanwhile."""
    chunks = range(-(-size["ratings"] // CHUNK))
    with ThreadPoolExecutor(1) as drawing:
        waiting = drawing.submit(ratings_of, chunks[:SEGMENT], size)
        for start in chunks[::SEGMENT]:
            ready = waiting
            waiting = drawing.submit(ratings_of, chunks[start + SEGMENT :][:SEGMENT], size)
            yield ready.result(), start / len(chunks)


class Plain:
    """Plain rows, one rating at a time."""

    name, passes = "plain rows", PLAIN

    def __init__(self, size):
        self.model = StreamedFactorization(size["users"], size["items"], DIM, mean=3.5)

    def state(self):
        model = self.model
        kept = {"users": model.users, "items": model.items, "user_counts": model.user_counts}
        return kept | {"item_counts": model.item_counts}, {"epochs": model.epochs}

    def restore(self, arrays, numbers):
        for name, array in arrays.items():
            getattr(self.model, name)[...] = array
        self.model.epochs = numbers["epochs"]

    def train(self, ratings, done):
        self.model.train_epoch(ratings, 1 - done)

    def error(self, ratings):
        return self.model.error(ratings)

    def files(self):
        for side in ("users", "items"):
            yield f"plain-{side}", pack_rows(getattr(self.model, side), "float16")


class Slots:
    """ANT with slots: Adagrad, rows that catch up, scans for better anchors."""

    name, passes = "ANT with slots", ANT

    def __init__(self, size):
        seeds = torch.Generator().manual_seed(0)
        how = {"anchors": ANCHORS, "slots": SLOTS, "generator": seeds, "init": fb.HalfNormal(0.1)}
        tables = [fb.AnchorTable(size[side], DIM, **how) for side in ("users", "items")]
        self.model = MatrixFactorization(*tables, mean=3.5, biases="column")
        penalties = {table.transform: fb.NonNegativeL1(LAM) for table in tables}
        self.optimizer = fb.Adagrad(self.model.parameters(), lr=LR, penalties=penalties)

    def state(self):
        self.optimizer.settle()
        found, steps = dict(self.model.state_dict()), {}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                if key == "step":
                    steps[name] = value
                else:
                    found[f"{name}.{key}"] = value
        return {name: value.numpy() for name, value in found.items()}, steps

    def restore(self, arrays, numbers):
        own = dict(self.model.state_dict())
        for name, parameter in self.model.named_parameters():
            group = self.optimizer.param_groups[0]
            state = self.optimizer._state_of(parameter, group)
            state["step"] = numbers[name]
            own |= {f"{name}.{key}": state[key] for key in self.optimizer.holds}
        for name, array in arrays.items():
            own[name].numpy()[...] = array
        self.optimizer._bind_all()

    def train(self, ratings, done):
        for group in self.optimizer.param_groups:
            group["lr"] = LR * max(0.05, 1 - done)
        for start in range(0, len(ratings), BATCH):
            part = slice(start, start + BATCH)
            users, items = (
                torch.from_numpy(ids[part].astype(np.int64))
                for ids in (ratings.users, ratings.items)
            )
            self.optimizer.zero_grad()
            scores = self.model(users, items)
            F.mse_loss(scores, torch.from_numpy(ratings.values[part])).backward()
            self.optimizer.step()

    def error(self, ratings):
        return mean_squared_error(self.model, ratings, BATCH)

    def files(self):
        for side, table in zip(("users", "items"), self.model.tables, strict=True):
            for start in range(0, table.num_embeddings, ROWS):
                part = table.part(start, min(start + ROWS, table.num_embeddings))
                yield f"slots-{side}-{start // ROWS:03d}", part.pack("float16", layout="fixed")


def write_state(folder, arrays, numbers):
    """Write arrays and numbers as one folder that appears when all of it is written."""
    draft = folder.with_name(folder.name + ".draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    for name, array in arrays.items():
        np.save(draft / f"{name}.npy", array)
    (draft / "numbers.json").write_text(json.dumps(numbers))
    shutil.rmtree(folder, ignore_errors=True)
    draft.rename(folder)


def read_state(folder):
    """Return what ``write_state`` wrote, None if there is nothing."""
    if not folder.is_dir():
        return None
    arrays = {path.stem: np.load(path, mmap_mode="r") for path in folder.glob("*.npy")}
    return arrays, json.loads((folder / "numbers.json").read_text())


def write_figures(folder, figures):
    """Write the figures so far, in one step."""
    draft = folder / "draft.json"
    draft.write_text(json.dumps(figures))
    draft.replace(folder / FIGURES)


def trained(kind, size, folder, figures, shown):
    """Return a trained model: from its last state, or from the start."""
    model, key = kind(size), kind.name.replace(" ", "-")
    rates, first = figures.setdefault(f"{key}_ratings_a_second", []), 0
    for number in range(kind.passes, 0, -1):  # a state replaces the one before it
        saved = read_state(folder / f"{key}-{number}")
        if saved is not None:
            model.restore(*saved)
            first = number
            break
    del rates[first:]
    shown.update(advance=-(-size["ratings"] // CHUNK) * CHUNK * first)
    for number in range(first, kind.passes):
        begun, count = time.perf_counter(), 0
        for ratings, share in segments(size):
            model.train(ratings, (number + share) / kind.passes)
            count += len(ratings)
            shown.update(advance=len(ratings), description=kind.name)
        rates.append(count / (time.perf_counter() - begun))
        write_state(folder / f"{key}-{number + 1}", *model.state())
        write_figures(folder, figures)
        shutil.rmtree(folder / f"{key}-{number}", ignore_errors=True)
    return model


def stages(size, folder, quiet=False):
    """Run all stages, or those that are left; return the figures, which are written too."""
    kept = folder / FIGURES
    figures = json.loads(kept.read_text()) if kept.exists() else {"stages": {}}
    held = ratings_of(range(1 << 30, (1 << 30) + HELD), size)  # chunks of no pass
    figures["mse_of_the_mean"] = float(np.var(held.values))
    total = -(-size["ratings"] // CHUNK) * CHUNK * (PLAIN + ANT)
    with show_progress("passes", total, shown=not quiet) as shown:
        for kind in (Plain, Slots):
            if f"{kind.__name__}_mse" in figures:
                continue
            begun = time.perf_counter()
            model = trained(kind, size, folder, figures, shown)
            error = model.error(held)
            for name, packed in model.files():
                fb.save(packed, folder / f"{name}.safetensors")
            del model
            figures[f"{kind.__name__}_mse"] = error
            figures["stages"][kind.name] = time.perf_counter() - begun
            write_figures(folder, figures)
    digest, begun = hashlib.sha256(), time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    figures["sha256"] = digest.hexdigest()
    figures["stages"]["checksums"] = time.perf_counter() - begun
    write_figures(folder, figures)
    return figures


def amazon(given):
    """Run the stages in a process of their own, which may be killed once; keep the figures."""
    size = {name: max(BATCH, int(given.share * count)) for name, count in AMAZON.items()}
    folder = given.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    begun, spawn, killed = time.perf_counter(), multiprocessing.get_context("spawn"), None
    for patience in (given.kill, None):
        worker = spawn.Process(target=stages, args=(size, folder), daemon=True)
        worker.start()
        worker.join(patience)
        if worker.is_alive():
            worker.kill()  # SIGKILL
            worker.join()
            killed = given.kill
            print(f"killed after {killed:g} s: {sorted(path.name for path in folder.iterdir())}")
            continue
        break
    if worker.exitcode:
        sys.exit(worker.exitcode)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = size | json.loads((folder / FIGURES).read_text()) | {
        "killed_after": killed,
        "seconds": time.perf_counter() - begun,
        "cpu_seconds": used.ru_utime + used.ru_stime,
        "peak_bytes": used.ru_maxrss * 1024,
        "cores": os.cpu_count(),
    }  # fmt: skip
    print(json.dumps(found, indent=1))
    if given.share == 1.0:
        name = "ratings_amazon.json" if killed is None else "ratings_amazon_killed.json"
        (RESULTS / name).write_text(json.dumps(found, indent=1) + "\n")
    if given.folder is None:
        shutil.rmtree(folder)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ratings", type=int, default=50_000_000)
    parser.add_argument("--users", type=int, default=10_000_000)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--amazon", action="store_true")
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--kill", type=float)
    given = parser.parse_args()
    if given.amazon:
        amazon(given)
        return
    folder = given.folder or Path(tempfile.mkdtemp())
    source, out = folder / "ratings.csv", folder / "out"
    if not source.exists():
        generate(source, given.ratings, given.users, given.items)
    shutil.rmtree(out, ignore_errors=True)
    command = [
        sys.executable,
        "-m",
        "featherbed.cli",
        "train",
        "ratings",
        str(source),
        "--users",
        "dense",
        "--items",
        "dense",
    ]
    begun = time.perf_counter()
    log = subprocess.run(
        [*command, "--set", "training.epochs=1", "--out", str(out), "--quiet"],
        check=True,
        capture_output=True,
        text=True,
    )
    seconds = time.perf_counter() - begun
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    metrics = json.loads((out / "metrics.json").read_text())
    found = {
        "ratings": given.ratings,
        "users": metrics["sizes"]["users"]["float32"] // 64,
        "items": metrics["sizes"]["items"]["float32"] // 64,
        "bytes": source.stat().st_size,
        "seconds": seconds,
        "ratings_a_second": given.ratings / seconds,
        "peak_bytes": peak,
        "test_mse": metrics["test"]["mse"],
        "stages": metrics.get("stages"),
        "cores": os.cpu_count(),
    }
    lines = [
        f"{name:18} {value:,.4g}" if isinstance(value, float) else f"{name:18} {value}"
        for name, value in found.items()
    ]
    print("\n".join(lines), log.stdout, log.stderr, sep="\n")
    if given.ratings == 50_000_000:
        (RESULTS / "ratings_scale.json").write_text(json.dumps(found, indent=1) + "\n")
        (RESULTS / "ratings_scale.txt").write_text("\n".join(lines) + "\n")
    if given.folder is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
