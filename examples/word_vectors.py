"""GloVe vectors to a twentieth of their size, then served by numpy alone.

    python examples/word_vectors.py                       the vectors in $FEATHERBED_DATA/glove
    python examples/word_vectors.py glove.6B.50d.txt      your own: text, .bin, .npz, .npy, .safetensors, .parquet
    python examples/word_vectors.py --method layered      faster: no other method is tried

Writes glove.safetensors (the table), glove.html (its quality) and glove.json (the same as data) to --out.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np

import featherbed as fb
from featherbed.io.opening import find_data
from featherbed.io.vectors import read_matrix

SERVE = """
import sys

for name in ("torch", "numba", "faiss", "scipy"):
    sys.modules[name] = None  # not even if they were installed

import featherbed as fb

table = fb.load(sys.argv[1])
for word in sys.argv[2:]:
    row = table[word]
    ids, _ = table.search(row, k=6, metric="cosine")
    print(f"{word:<12}", ", ".join(table.keys[int(i)] for i in ids[1:]))
"""


def vectors(path, rows):
    """Return words and vectors of a file, or of the copy in the data folder."""
    if path is None:
        with np.load(find_data("glove") / "glove.6B.50d.top60k.npz") as file:
            return file["words"].item().decode().split("\n")[:rows], file["vectors"][:rows]
    source = read_matrix(path)
    if source.keys is None:
        raise SystemExit(
            f"{path} holds no words: give word2vec or GloVe text, .bin, or a file with keys"
        )
    return list(source.keys)[:rows], source.matrix[:rows]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("vectors", nargs="?", type=Path)
    parser.add_argument("--ratio", type=float, default=20)
    parser.add_argument("--method", default="auto")
    parser.add_argument("--rows", type=int, help="number of rows to read (default: all)")
    parser.add_argument("--out", type=Path, default=Path())
    given = parser.parse_args()

    words, matrix = vectors(given.vectors, given.rows)
    pairs = []
    if given.vectors is None:  # word similarities and analogies, scored before and after
        pairs = [
            find_data("word-similarity") / name
            for name in ("EN-WS-353-ALL.txt", "EN-MEN-TR-3k.txt", "EN-SIMLEX-999.txt")
        ]
    table = fb.compress(
        matrix, ratio=given.ratio, method=given.method, keys=words, words=pairs, name="GloVe"
    )
    print(table.report)
    table.save(given.out / "glove.safetensors")
    table.report.save(given.out / "glove.html")
    table.report.save(given.out / "glove.json")

    print("\nserved by numpy alone:")
    asked = [word for word in ("paris", "computer", "blue", "seven") if word in words]
    subprocess.run(
        [sys.executable, "-c", SERVE, given.out / "glove.safetensors", *asked], check=True
    )


if __name__ == "__main__":
    main()
