"""Fuzz the packed form: python tests/fuzz/run.py --files 50000 --seed 0 --jobs 2

Mutated files of every table and layout are opened and used on both engines in worker processes. A crash,
a hang, an exception that is not featherbed's own and a disagreement between the engines are findings:
each file is kept in ``--out`` with a line that says why. The exit code is 1 if there is any.
"""

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from fuzz.exercise import exercise, exercise_number, sources
from fuzz.mutate import mutant
from fuzz.workers import run_cases

SECONDS = 10.0
MEMORY = 2 << 30
EVERY = 15.0  # seconds between two lines of progress
KINDS = ("crash", "hang", "exception", "disagreement")


def fuzz(folder, numbers, seed, jobs, out, tell=lambda text: None):
    """Use the mutants of these numbers; return the number of files opened, refused and found."""
    counts, started, told = Counter(), time.monotonic(), time.monotonic()
    work = partial(exercise_number, folder=str(folder), seed=seed)
    for outcome in run_cases(numbers, work, jobs, SECONDS, MEMORY):
        counts["files"] += 1
        opened, reasons = outcome.result or (True, [])
        if outcome.kind != "done":
            kind = "exception" if outcome.kind == "error" else outcome.kind
            reasons = [f"{kind}: {outcome.detail}"]
        counts["opened" if opened else "refused"] += 1
        counts.update({reason.partition(":")[0] for reason in reasons})
        if reasons:
            keep(folder, outcome.case, seed, out, reasons)
            tell(f"file {outcome.case}: {reasons[0][:160]}")
        now = time.monotonic()
        if now - told >= EVERY:
            told = now
            left = (len(numbers) - counts["files"]) * (now - started) / counts["files"]
            tell(
                f"{counts['files']:,} of {len(numbers):,} files, {line(counts)}, {left:.0f} s left"
            )
    return counts


def line(counts):
    """Return the findings so far in words."""
    return ", ".join(f"{counts[kind]:,} {kind}" for kind in ("opened", "refused", *KINDS))


def keep(folder, number, seed, out, reasons):
    """Keep a file with the reason it was kept for."""
    data, changes = mutant(sources(str(folder)), seed, number)
    out.mkdir(parents=True, exist_ok=True)
    name = f"{reasons[0].partition(':')[0]}-{seed}-{number}.safetensors"
    (out / name).write_bytes(data)
    with (out / "reasons.txt").open("a") as file:
        file.write(f"{name}\t{reasons[0]}\t{changes}\n")


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--files", type=int, default=50_000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--jobs", type=int, default=2)
    options.add_argument("--corpus", type=Path, help="a folder of sound files; made if not given")
    options.add_argument("--out", type=Path, default=Path("fuzz-findings"))
    options.add_argument("--again", type=Path, help="use one kept file again, in this process")
    given = options.parse_args()
    if given.again:
        print(*exercise(given.again.read_bytes()), sep="\n")
        return 0
    os.environ.setdefault("FEATHERBED_THREADS", "2")
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.corpus or Path(scratch)
        if given.corpus is None:
            from fuzz.corpus import write_corpus

            print("making the corpus (one to two minutes)", flush=True)
            paths = write_corpus(folder)
            print(f"{len(paths)} files in {time.monotonic() - start:.0f} s", flush=True)
        counts = fuzz(
            folder,
            range(given.files),
            given.seed,
            given.jobs,
            given.out,
            partial(print, flush=True),
        )
    seconds = time.monotonic() - start
    found = sum(counts[kind] for kind in KINDS)
    print(f"files {counts['files']:,}, opened {counts['opened']:,}, refused {counts['refused']:,}, "
          f"crashes {counts['crash']}, hangs {counts['hang']}, other exceptions {counts['exception']}, "
          f"disagreements {counts['disagreement']}, seconds {seconds:.0f}")  # fmt: skip
    if found:
        print(f"the {found} findings are in {given.out}: reasons.txt says why")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
