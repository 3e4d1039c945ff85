"""Whether this checkout gives the same results as another one: python benchmarks/same.py OTHER [part ...]

OTHER is the root of another checkout (``git worktree add ../before COMMIT``). Both run on this machine, since the last bits of
a fit depend on the processor: hashes are compared, not kept. Parts: names (public names), codecs (bytes of every method of
``compress``), tables (rows after a fit and after training), commands (metrics of small runs). Prints one line for each
difference and exits with code 1 if there is any.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
PARTS = ("names", "codecs", "tables", "commands")
CODECS = [
    "int8",
    "int4",
    "int3",
    "int2",
    "lowrank",
    "pq",
    "opq",
    "rq",
    "lsq",
    "layered",
    "kd",
    "ksvd",
    "hash",
    "hash+ksvd",
    "anchors",
    "clusters",
    "opq+norms",
    "hot+layered",
    "auto",
]
MAIN = "import sys; from featherbed.cli import main; sys.argv[0] = 'featherbed'; main()"


def digest(arrays):
    """Return a hash of arrays by name."""
    total = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        total.update(f"{name} {array.dtype} {array.shape}".encode())
        total.update(array.tobytes())
    return total.hexdigest()[:16]


def matrix(rows=1500, dim=16):
    """Return rows around 40 centres with a falling spectrum."""
    import numpy as np

    rng = np.random.default_rng(0)
    spectrum = 0.8 ** np.arange(dim)
    centres = rng.normal(size=(40, dim))
    found = (centres[rng.integers(40, size=rows)] + 0.5 * rng.normal(size=(rows, dim))) * spectrum
    return found.astype(np.float32)


def names():
    import featherbed as fb

    return dict.fromkeys(fb.__all__, "public")


def codecs():
    import numpy as np

    import featherbed as fb

    found, rows = {}, matrix()
    weights = 1 / np.arange(1, len(rows) + 1)
    for method in CODECS:
        settings = {"weights": weights} if method.startswith("hot") else {}
        ratio = {"int8": 3, "int4": 6, "hash": 6, "anchors": 6, "kd": 8}.get(method, 8)
        packed = fb.compress(rows, ratio=ratio, method=method, generator=0, **settings)
        stored = digest({name: np.asarray(a) for name, a in packed.arrays.items()})
        error, recall = quality(rows, packed[:])
        found[method] = f"{stored}, {packed.nbytes} bytes, error {error:.4f}, recall {recall:.4f}"
    return found


def quality(rows, stored):
    """Return the relative squared error of stored rows, and the recall of ten nearest rows."""
    import numpy as np

    nearest = []
    for one in (rows, stored):
        unit = one / np.linalg.norm(one, axis=1, keepdims=True).clip(1e-12)
        scores = unit @ unit.T
        np.fill_diagonal(scores, -2)
        nearest.append(np.argsort(-scores, axis=1, kind="stable")[:, :10])
    kept = [len(np.intersect1d(*pair)) for pair in zip(*nearest, strict=True)]
    return np.square(rows - stored).sum() / np.square(rows).sum(), np.mean(kept) / 10


def tables():
    import torch

    import featherbed as fb
    from featherbed.tables.spec import METHODS

    found, rows = {}, torch.from_numpy(matrix(50, 8))
    for method in METHODS.values() if isinstance(METHODS, dict) else METHODS:
        name = method.__name__
        generator = torch.Generator().manual_seed(0)
        table = method(50, 8, generator=generator, **method.example)
        torch.manual_seed(0)
        optimizer = fb.Yogi(table.parameters(), lr=0.02)
        for ids in torch.randint(50, (5, 32), generator=torch.Generator().manual_seed(1)):
            optimizer.zero_grad()
            (table(ids).square().mean() + fb.auxiliary_loss(table)).backward()
            optimizer.step()
        found[f"{name} trained"] = digest({"rows": table.eval().weight.detach().numpy()})
        torch.manual_seed(0)
        fitted = method.from_dense(
            rows, generator=torch.Generator().manual_seed(0), **method.example
        )
        found[f"{name} fitted"] = digest({"rows": fitted.eval().weight.detach().numpy()})
    return found


def ratings_file(folder):
    import numpy as np

    rng = np.random.default_rng(0)
    users, items = rng.normal(size=(80, 3)), rng.normal(size=(60, 3))
    pairs = rng.permutation(80 * 60)[:2400]
    lines = ["user,item,rating,time"]
    for number, pair in enumerate(pairs.tolist()):
        u, i = divmod(pair, 60)
        rating = np.clip(round(3 + 0.8 * float(users[u] @ items[i])), 1, 5)
        lines.append(f"u{u},i{i},{rating},{number}")
    path = Path(folder) / "ratings.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def text_files(folder):
    import numpy as np

    rng = np.random.default_rng(0)
    words = [f"w{n}" for n in range(60)]
    lines = ["label,text"]
    for number in range(400):
        label = number % 2
        chosen = rng.choice(60, size=8, p=None) // 2 + 30 * label * (rng.random(8) < 0.7)
        lines.append(f"{label},{' '.join(words[int(n)] for n in chosen)}")
    labelled, plain = Path(folder) / "texts.csv", Path(folder) / "lines.txt"
    labelled.write_text("\n".join(lines) + "\n")
    plain.write_text("\n".join(line.partition(",")[2] for line in lines[1:]) + "\n")
    return labelled, plain


def numbers(value, prefix=""):
    """Return all numbers of a nested value by path, times and bytes of files with paths left out."""
    if isinstance(value, dict):
        found = {}
        for key, part in value.items():
            if not any(
                word in str(key) for word in ("second", "time", "version", "stage", "memory")
            ):
                found |= numbers(part, f"{prefix}.{key}")
        return found
    if isinstance(value, list):
        return numbers(dict(enumerate(value)), prefix)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return {}
    return {prefix: f"{value:.6g}"}


def earlier(word):
    """Return the options that stood for a setting before there were any."""
    names = {"anchors.nonzeros": "--nonzeros", "training.epochs": "--epochs"}
    name, equals, value = word.partition("=")
    return f"{names[name]}\n{value}" if equals and name in names else word


def commands():
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        ratings, (labelled, plain) = ratings_file(folder), text_files(folder)
        runs = {
            "ratings": ["train", "ratings", str(ratings)],
            "ratings budget": ["train", "ratings", str(ratings), "--budget", "2KB"],
            "ratings nonzeros": [
                "train",
                "ratings",
                str(ratings),
                "--set",
                "anchors.nonzeros=400",
                "--set",
                "training.epochs=3",
            ],
            "ratings dense": [
                "train",
                "ratings",
                str(ratings),
                "--users",
                "dense",
                "--items",
                "dense",
            ],
            "text": ["train", "text", str(labelled), "--epochs", "2"],
            "lm": ["train", "lm", str(plain), "--epochs", "2"],
        }
        for name, arguments in runs.items():
            out = Path(folder) / name.replace(" ", "-")
            command = [sys.executable, "-c", MAIN, *arguments, "--out", str(out)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if "No such option" in done.stderr:  # a checkout before settings
                command = [part for part in map(earlier, command) if part != "--set"]
                command = [word for part in command for word in part.split("\n")]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                found[f"{name}.error"] = f"exit {done.returncode}: {done.stderr.strip()[-300:]}"
                continue
            metrics = json.loads((out / "metrics.json").read_text())
            found |= {f"{name}{path}": value for path, value in numbers(metrics).items()}
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other")
    parser.add_argument("parts", nargs="*", default=PARTS)
    parser.add_argument("--record", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.record:
        print(json.dumps({part: globals()[part]() for part in given.parts}))
        return
    results = []
    for root in (HERE.parent, Path(given.other)):
        environment = {**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(HERE / "same.py"), ".", *given.parts, "--record"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{root}: {done.stderr[-2000:]}")
        results.append(json.loads(done.stdout.splitlines()[-1]))
    here, other = results
    differences = 0
    for part in given.parts:
        for name in sorted({*here[part], *other[part]}):
            one, two = here[part].get(name, "absent"), other[part].get(name, "absent")
            if one != two:
                differences += 1
                print(f"{part}: {name}: {one} here, {two} there")
    print(f"{sum(len(here[part]) for part in given.parts)} results, {differences} differences")
    sys.exit(1 if differences else 0)


if __name__ == "__main__":
    main()
