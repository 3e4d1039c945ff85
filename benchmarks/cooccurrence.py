"""Relations from a text: what counting pairs costs, and how many pairs a filter keeps.

    python benchmarks/cooccurrence.py all [--tokens N] [--folder DATA]    or one part: stream, ptb

``stream`` counts the pairs of a generated text (Zipf, 50,000 words, window 10), each contender in a process of its own, whose
largest resident memory (imports and the text included) is what the system reports at its end. ``ptb`` counts the training part
of the Penn Treebank where DATA (or $FEATHERBED_DATA) holds it. Results go to benchmarks/results/cooccurrence.json and
cooccurrence.txt, each part replacing what it wrote before.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import scipy

import featherbed as fb
from featherbed.graphs import cooccurrence, cooccurrence_counts

RESULTS = Path(__file__).parent / "results"
WORDS, WINDOW, BLOCK = 50_000, 10, 100_000
CONTENDERS = (
    "min_count=5",
    "min_count=5, pmi=1",
    "min_count=5, top=10",
    "counts of all pairs",
    "counts, min_count=5",
)


def text(tokens):
    """Pieces of a text whose word k has a frequency proportional to 1 / k."""
    rng = np.random.default_rng(0)
    upto = np.cumsum(1 / np.arange(1, WORDS + 1))
    for start in range(0, tokens, BLOCK):
        yield np.searchsorted(upto / upto[-1], rng.random(min(BLOCK, tokens - start))).clip(
            max=WORDS - 1
        )


def measure(name, tokens):
    """Run one contender here and print what it took, as JSON."""
    given = np.concatenate(list(text(tokens)))
    start, worked = time.perf_counter(), time.process_time()
    if name.startswith("counts"):
        kept = (
            cooccurrence_counts(
                given, WORDS, window=WINDOW, min_count=5 if "min_count" in name else 1
            ).nnz
            // 2
        )
    else:
        settings = {"pmi": 1.0} if "pmi" in name else {"top": 10} if "top" in name else {}
        kept = cooccurrence(given, WORDS, window=WINDOW, **settings).edges
    spent, worked = time.perf_counter() - start, time.process_time() - worked
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    print(
        json.dumps(
            {"seconds": spent, "processor_seconds": worked, "peak_bytes": peak, "pairs": kept}
        )
    )


def stream(line, figures, tokens):
    line(f"{tokens:,} tokens, Zipf, {WORDS:,} words, window {WINDOW}; one process each, one thread")
    line(f"{'':<28}{'seconds':>9}{'of processor':>14}{'peak MB':>9}{'pairs':>13}")
    for name in CONTENDERS:
        command = [sys.executable, __file__, "measure", "--name", name, "--tokens", str(tokens)]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        found = figures[name] = json.loads(done.stdout)
        line(
            f"{name:<28}{found['seconds']:>9.1f}{found['processor_seconds']:>14.1f}"
            f"{found['peak_bytes'] / 1e6:>9.0f}{found['pairs']:>13,}"
        )


def ptb(line, figures, folder):
    from featherbed.io.texts import read_ptb

    corpus = read_ptb(folder / "ptb")
    objects = len(corpus.words)  # most frequent first
    every, anchors = objects * (objects - 1) / 2, (100, 500, 1000)
    line(
        f"Penn Treebank, training part: {len(corpus.train):,} tokens, {objects:,} words, window {WINDOW}, one text"
    )
    line(
        f"{'':<30}{'pairs':>11}{'of all':>9}{'words with':>12}   of (word, anchor), K most frequent words as anchors"
    )
    line(
        f"{'':<30}{'':>11}{'pairs':>9}{'neighbours':>12}"
        + "".join(f"{f'K = {count:,}':>12}" for count in anchors)
    )

    def row(name, matrix):
        share, linked = matrix.nnz / 2 / every, float((np.diff(matrix.indptr) > 0).mean())
        shares = [matrix[:, :count].nnz / (objects * count) for count in anchors]
        figures[name] = {
            "pairs": matrix.nnz // 2,
            "share": share,
            "linked": linked,
            "anchors": dict(zip(anchors, shares, strict=True)),
        }
        line(
            f"{name:<30}{matrix.nnz // 2:>11,}{share:>9.2%}{linked:>12.1%}"
            + "".join(f"{part:>12.1%}" for part in shares)
        )

    for least in (1, 2, 3, 5, 10, 20):
        row(
            f"min_count={least}",
            cooccurrence_counts(corpus.train, objects, window=WINDOW, min_count=least).astype(bool),
        )
    for settings in ({"pmi": 0.0}, {"pmi": 1.0}, {"top": 10}, {"top": 10, "by": "count"}):
        name = ", ".join(f"{key}={value}" for key, value in ({"min_count": 5} | settings).items())
        row(name, cooccurrence(corpus.train, objects, window=WINDOW, **settings).matrix)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["stream", "ptb", "all", "measure"])
    parser.add_argument("--name", choices=CONTENDERS, help="the contender of part measure")
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument(
        "--folder", type=Path, default=Path(os.environ.get("FEATHERBED_DATA", "../shared/data"))
    )
    given = parser.parse_args()
    if given.part == "measure":
        measure(given.name, given.tokens)
        return
    stored = RESULTS / "cooccurrence.json"
    results = json.loads(stored.read_text()) if stored.exists() else {}
    parts = {
        "stream": lambda line, figures: stream(line, figures, given.tokens),
        "ptb": lambda line, figures: ptb(line, figures, given.folder),
    }
    for name, run in parts.items():
        if given.part in (name, "all"):
            lines, figures = [], {}

            def line(text, lines=lines):
                print(text, flush=True)
                lines.append(text)

            line(
                f"featherbed {fb.__version__}, numpy {np.__version__}, scipy {scipy.__version__}, {platform.machine()}, "
                f"{os.cpu_count()} cores"
            )
            run(line, figures)
            results[name] = {"figures": figures, "text": lines}
            stored.write_text(json.dumps(results, indent=1) + "\n")
    (RESULTS / "cooccurrence.txt").write_text(
        "\n\n".join("\n".join(results[n]["text"]) for n in parts if n in results) + "\n"
    )


if __name__ == "__main__":
    main()
