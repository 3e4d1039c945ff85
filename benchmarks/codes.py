"""Look-up and search on codes, side by side with faiss, torch and numpy on the same rows:

    python benchmarks/codes.py all [--rows N] [--folder DATA]    or one part: lookup, search, recall, glove

Prints ratios of medians measured in one run; absolute times are those of this machine at this moment. Results go to
benchmarks/results/codes.json and codes.txt, each part replacing what it wrote before. Recall of Hamming search is of codes
learnt by faiss: of generated rows, and of the GloVe vectors where DATA (or $FEATHERBED_DATA) holds them.
"""

import argparse
import json
import os
import platform
from pathlib import Path

import faiss
import numpy as np
import torch
from timing import race

import featherbed as fb
from featherbed.kernels.threads import set_threads
from featherbed.packed.band import Affine, Band, Fixed
from featherbed.packed.matrix import Matrix
from featherbed.packed.table import PackedTable

RESULTS = Path(__file__).parent / "results"
RNG = np.random.default_rng(0)
START = RNG.bit_generator.state
DIM, PARTS, CHOICES, BATCH, K = 128, 16, 256, 8192, 10


class Page:
    """What one part prints and measures."""

    def __init__(self):
        self.lines, self.figures = [], {}

    def line(self, text=""):
        print(text, flush=True)
        self.lines.append(text)


def normal(*shape):
    return RNG.standard_normal(shape, dtype=np.float32)


def side_by_side(codes, atoms, parts=True):
    """The packed table of product-quantisation codes [V, s] over atoms [s * K, d / s] (or [K, d / s], shared)."""
    fixed = Fixed.encode(codes, None, len(atoms) // (codes.shape[1] if parts else 1), parts=parts)
    return PackedTable(
        [Band(len(codes), fixed, None, Matrix.encode(atoms, "float32"), "concat")],
        codes.shape[1] * atoms.shape[1],
    )


def layered(rows):
    """Additive codes, blocks over a shared dictionary, and a rotation: what compress calls layered."""
    first, second = (
        Fixed.encode(RNG.integers(256, size=(rows, 8)), None, 256, parts=parts)
        for parts in (True, False)
    )
    blocks = Band(rows, second, None, Matrix.encode(normal(256, DIM // 8), "int8"), "concat")
    affine = Affine(Matrix.encode(normal(DIM, DIM), "float16"), normal(DIM))
    atoms = Matrix.encode(normal(8 * 256, DIM), "int8")
    return PackedTable([Band(rows, first, None, atoms, affine=affine, plus=blocks)], DIM)


def use(threads):
    torch.set_num_threads(threads)
    faiss.omp_set_num_threads(threads)
    set_threads(threads)


def lookup(page, rows):
    """Rows of ids from 16 codes of a byte each: ours, faiss's decoder on the gathered codes, and dense float32 rows."""
    codes = RNG.integers(CHOICES, size=(rows, PARTS)).astype(np.uint8)
    atoms = normal(PARTS * CHOICES, DIM // PARTS)
    packed, shared = side_by_side(codes, atoms), side_by_side(codes, atoms[:CHOICES], parts=False)
    quantiser = faiss.ProductQuantizer(DIM, PARTS, 8)
    faiss.copy_array_to_vector(atoms.reshape(-1), quantiser.centroids)
    dense = packed[:]
    assert np.array_equal(quantiser.decode(codes[:BATCH]), dense[:BATCH])
    tensor = torch.from_numpy(dense)
    contenders = {
        "packed": lambda ids: packed[ids],
        "packed, one dictionary": lambda ids: shared[ids],
        "faiss decode": lambda ids: quantiser.decode(codes[ids]),
        "torch dense": lambda ids: torch.nn.functional.embedding(torch.from_numpy(ids), tensor),
        "numpy dense": lambda ids: dense[ids],
    }
    batches = [RNG.integers(rows, size=BATCH) for _ in range(200)]
    page.line(
        f"look-up, V = {rows:,}, d = {DIM}, {PARTS} parts x {CHOICES} choices, batch {BATCH:,}, uniform ids"
    )
    page.line(f"{'threads':>8}  {'':<24}{'ns/row':>8}{'packed is faster by':>21}")
    for threads in sorted({1, os.cpu_count()}):
        use(threads)
        times = race(contenders, batches, bursts=11)
        for name, spent in times.items():
            gain = spent / times["packed"]
            page.line(f"{threads:>8}  {name:<24}{spent / BATCH:>8.1f}{gain:>20.2f}x")
            page.figures[f"{name}, threads={threads}"] = {
                "ns": spent / BATCH,
                "packed_faster": gain,
            }


def dense_top(dense, query):
    scores = dense @ query
    best = np.argpartition(-scores, K)[:K]
    return best[np.argsort(-scores[best])]


def search(page, rows):
    """The ten best of all rows for one query, and the ten nearest codes."""
    codes = RNG.integers(CHOICES, size=(rows, PARTS)).astype(np.uint8)
    atoms = normal(PARTS * CHOICES, DIM // PARTS)
    packed, layers = side_by_side(codes, atoms), layered(rows)
    dense = packed[:]
    tensor = torch.from_numpy(dense)
    index = faiss.IndexPQ(DIM, PARTS, 8, faiss.METRIC_INNER_PRODUCT)
    faiss.copy_array_to_vector(atoms.reshape(-1), index.pq.centroids)
    index.is_trained = True
    index.add_sa_codes(codes)
    queries = [(normal(DIM), codes[RNG.integers(rows)].astype(np.int64)) for _ in range(100)]
    assert packed.search(queries[0][0], K)[0].tolist() == dense_top(dense, queries[0][0]).tolist()
    contenders = {
        "packed.search": lambda pair: packed.search(pair[0], K),
        "packed.logits": lambda pair: packed.logits(pair[0]),
        "packed.near_codes": lambda pair: packed.near_codes(pair[1], K),
        "layered.search": lambda pair: layers.search(pair[0], K),
        "faiss IndexPQ": lambda pair: index.search(pair[0][None], K),
        "numpy dense + argpartition": lambda pair: dense_top(dense, pair[0]),
        "torch dense + topk": lambda pair: torch.topk(
            torch.mv(tensor, torch.from_numpy(pair[0])), K
        ),
    }
    page.line(f"best {K} of one query, V = {rows:,}, d = {DIM}, {PARTS} parts x {CHOICES} choices")
    page.line(f"{'threads':>8}  {'':<28}{'ms':>8}{'packed.search is faster by':>28}")
    for threads in sorted({1, os.cpu_count()}):
        use(threads)
        times = race(contenders, queries, bursts=9, burst=4)
        for name, spent in times.items():
            gain = spent / times["packed.search"]
            page.line(f"{threads:>8}  {name:<28}{spent / 1e6:>8.2f}{gain:>27.2f}x")
            page.figures[f"{name}, threads={threads}"] = {
                "ms": spent / 1e6,
                "packed_search_faster": gain,
            }


def generated(rows=50_000, dim=64, groups=500):
    """Rows around centres, columns of falling weight: neighbours mean something, as in learnt vectors."""
    weights = (np.arange(1, dim + 1) ** -0.5).astype(np.float32)
    return (
        normal(groups, dim)[RNG.integers(groups, size=rows)] + 0.7 * normal(rows, dim)
    ) * weights


def learnt(rows, parts, bits, how):
    """A table of codes faiss learns: side by side (pq) or summed stage by stage (rq)."""
    dim = rows.shape[1]
    quantiser = (
        faiss.ProductQuantizer(dim, parts, bits)
        if how == "pq"
        else faiss.ResidualQuantizer(dim, parts, bits)
    )
    sample = rows[RNG.permutation(len(rows))[:10_000]]
    quantiser.train(sample)
    packed = np.concatenate(
        [quantiser.compute_codes(rows[i : i + 10_000]) for i in range(0, len(rows), 10_000)]
    )
    fields = np.unpackbits(packed, axis=1, bitorder="little")[:, : parts * bits].reshape(
        len(rows), parts, bits
    )
    codes = (fields.astype(np.int64) << np.arange(bits)).sum(-1)
    if how == "pq":
        return side_by_side(
            codes, faiss.vector_to_array(quantiser.centroids).reshape(parts << bits, dim // parts)
        )
    atoms = Matrix.encode(
        faiss.vector_to_array(quantiser.codebooks).reshape(parts << bits, dim), "float32"
    )
    return PackedTable(
        [Band(len(rows), Fixed.encode(codes, None, 1 << bits, parts=True), None, atoms)], dim
    )


def shares(rows, packed, ids):
    """Of the ten nearest original rows by cosine, the share that search and Hamming search on the codes find."""
    unit = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    scores = unit[ids] @ unit.T
    scores[np.arange(len(ids)), ids] = -np.inf
    truth = np.argpartition(-scores, K, axis=1)[:, :K]
    exact = packed.search(packed[ids], K + 1, metric="cosine")[0]
    close = packed.near_codes(packed.codes_of(ids), K + 1)[0]
    return [
        float(
            np.mean(
                [
                    len(np.intersect1d(t, f[f != own][:K])) / K
                    for own, t, f in zip(ids, truth, found, strict=True)
                ]
            )
        )
        for found in (exact, close)
    ]


def recall(page, folder):
    """How much of exact search Hamming search on the codes finds."""
    sources = {"generated": (generated(), (16, 32))}
    vectors = folder / "glove" / "glove.6B.50d.top60k.npz"
    if vectors.exists():
        with np.load(vectors) as file:
            sources["GloVe"] = (np.ascontiguousarray(file["vectors"], dtype=np.float32), (10, 25))
    use(os.cpu_count())
    page.line(
        f"recall@{K} by cosine over 500 rows: Hamming search against exact search on the same rows (code_recall), and both"
    )
    page.line("against the neighbours in the original matrix")
    page.line(
        f"{'':<12}{'codes':<14}{'Hamming / exact':>16}{'Hamming / original':>20}{'exact / original':>18}"
    )
    for name, (rows, (few, many)) in sources.items():
        ids = RNG.permutation(len(rows))[:500]
        for how, parts, bits in (("pq", few, 8), ("pq", many, 4), ("pq", many, 8), ("rq", 8, 8)):
            packed = learnt(rows, parts, bits, how)
            share, (exact, close) = packed.code_recall(ids, K), shares(rows, packed, ids)
            label = f"{how} {parts} x {1 << bits}"
            page.line(f"{name:<12}{label:<14}{share:>16.3f}{close:>20.3f}{exact:>18.3f}")
            page.figures[f"{name} {label}"] = {
                "hamming_exact": share,
                "hamming_original": close,
                "exact_original": exact,
            }


def glove(page, folder):
    """KD codes of GloVe at the bytes of faiss OPQ 10 x 8: neighbours kept, and word similarities."""
    from featherbed.codecs.words import score_words

    with np.load(folder / "glove" / "glove.6B.50d.top60k.npz") as file:
        words, rows = (
            file["words"].item().decode().split("\n"),
            np.ascontiguousarray(file["vectors"], dtype=np.float32),
        )
    files = [
        folder / "word-similarity" / f"EN-{name}.txt"
        for name in ("WS-353-ALL", "MEN-TR-3k", "SIMLEX-999")
    ]
    ids = np.sort(np.random.default_rng(0).choice(20_000, 500, replace=False))
    known = nearest(rows, ids)
    budget = len(rows) * 10 + 2 * 256 * 50 + 2 * 50 * 50  # codes, float16 codebooks and rotation

    def report(label, back, size):
        kept = (
            float(
                np.mean(
                    [
                        len(np.intersect1d(a, b))
                        for a, b in zip(known, nearest(back, ids), strict=True)
                    ]
                )
            )
            / K
        )
        scores = [found["score"] for found in score_words(lambda i: back[i], words, files)]
        page.line(
            f"{label:<44}{size:>9,}{kept:>9.4f}" + "".join(f"{score:>9.3f}" for score in scores)
        )
        page.figures[label] = {"bytes": size, "recall": kept, "spearman": scores}

    page.line(f"{'':<44}{'bytes':>9}{'recall':>9}{'WS-353':>9}{'MEN':>9}{'SimLex':>9}")
    report("float32", rows, rows.nbytes)
    common = (
        np.arange(len(rows)) + 5000.0
    ) ** -0.5  # rows are sorted by use; a mild weight for the frequent ones
    tried = [("kd:parts=13,bits=6", unit(rows), None), ("kd:parts=13,bits=6", unit(rows), common)]
    tried += [("kd:parts=13,bits=6", rows, None), ("layered", unit(rows), common)]
    for seed in range(2):
        for label, source in (("raw", rows), ("unit", unit(rows))):
            report(f"OPQ 10 x 8, {label} rows, seed {seed}", turned(source, seed), budget)
        for method, source, weights in tried if seed == 0 else tried[:2]:
            table = fb.compress(
                source, budget=budget, method=method, weights=weights, generator=seed
            )
            label = f"{method}, {'raw' if source is rows else 'unit'}{'' if weights is None else ', weighted'}, seed {seed}"
            report(label, table[np.arange(len(rows))], table.report.data["chosen"]["bytes"])


def unit(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def nearest(rows, ids):
    scores = unit(rows)[ids] @ unit(rows).T
    scores[np.arange(len(ids)), ids] = -np.inf
    return np.argpartition(-scores, K, axis=1)[:, :K]


def turned(rows, seed):
    """Rows as faiss OPQ 10 x 8 keeps them: 25 iterations, float16 codebooks."""
    rotation = faiss.OPQMatrix(50, 10)
    rotation.niter, rotation.pq = 25, faiss.ProductQuantizer(50, 10, 8)
    rotation.pq.cp.seed += seed
    rotation.train(rows)
    inside = rotation.apply(rows)
    quantiser = faiss.ProductQuantizer(50, 10, 8)
    quantiser.cp.seed += seed
    quantiser.train(inside)
    codes = quantiser.compute_codes(inside)
    centroids = faiss.vector_to_array(quantiser.centroids).astype(np.float16).astype(np.float32)
    faiss.copy_array_to_vector(centroids, quantiser.centroids)
    return rotation.reverse_transform(quantiser.decode(codes))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["lookup", "search", "recall", "glove", "all"])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument(
        "--folder", type=Path, default=Path(os.environ.get("FEATHERBED_DATA", "../shared/data"))
    )
    given = parser.parse_args()
    stored = RESULTS / "codes.json"
    results = json.loads(stored.read_text()) if stored.exists() else {}
    parts = {
        "lookup": lambda page: lookup(page, given.rows),
        "search": lambda page: search(page, given.rows),
        "recall": lambda page: recall(page, given.folder),
        "glove": lambda page: glove(page, given.folder),
    }
    versions = f"featherbed {fb.__version__}, torch {torch.__version__}, faiss {faiss.__version__}"
    for name, run in parts.items():
        if given.part in (name, "all"):
            RNG.bit_generator.state = START  # a part alone gives what it gives among the others
            page = Page()
            page.line(f"{versions}, {platform.machine()}, {os.cpu_count()} cores")
            run(page)
            results[name] = {"figures": page.figures, "text": page.lines}
            stored.write_text(json.dumps(results, indent=1) + "\n")
    pages = ["\n".join(results[name]["text"]) for name in parts if name in results]
    (RESULTS / "codes.txt").write_text("\n\n".join(pages) + "\n")


if __name__ == "__main__":
    main()
