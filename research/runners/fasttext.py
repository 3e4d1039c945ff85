"""fastText on the same AG-News rows: tuned on validation, made smaller than 1.6 MB, and read once on test.

    python experiments/text/fasttext.py            # tune: every setting on validation -> results/fasttext-tuning.json
    python experiments/text/fasttext.py --test     # the chosen one, three seeds, test read -> results/fasttext.json

Needs the fasttext package (`pip install fasttext-wheel`), which no part of featherbed and no test needs. Words are cut by
featherbed's tokenizer, texts after 100 words, and the validation part is that of `prepare(seed=0)`: what our own models get.
fastText has no early stopping, so that it could also train on the validation rows: both kinds are in the result.

To fastText the seeds 0 and 1 are one and the same (its generator takes 0 for 1), so seeds 0, 1, 2 are two different runs.
"""

import argparse
import itertools
import json
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from featherbed.serve.words import tokenize
from featherbed.tasks.data import find_data
from featherbed.tasks.documents import prepare
from featherbed.tasks.results import made_by, write_json
from featherbed.tasks.texts import read_texts

HERE = Path(__file__).resolve().parent
sys.path[:] = [
    place for place in sys.path if Path(place).resolve() != HERE
]  # this file has the name of the package
import fasttext as package  # noqa: E402

LENGTH, MOST_BYTES = 100, 1_600_000
FIXED = {"thread": 1, "minCount": 1, "bucket": 500_000, "verbose": 0}
LR, EPOCHS, NGRAMS, DIMS = (0.1, 0.25, 0.5), (5, 10, 20), (1, 2, 3), (10, 20, 50)
CUTOFFS, DSUB = (20_000, 40_000, 50_000, 75_000, 90_000, 100_000), 2
NAMES = ("lr", "epoch", "wordNgrams", "dim")


def lines(texts, index, path):
    """Write texts as fastText reads them."""
    with path.open("w", encoding="utf-8") as file:
        for at in index:
            file.write(
                f"__label__{texts.labels[at]} {' '.join(tokenize(texts.texts[at])[:LENGTH])}\n"
            )
    return path


def parts(folder, with_test):
    """Write the parts of AG-News to files; return them by name."""
    source = find_data("ag-news")
    texts = read_texts(source / "train_subset.csv.gz")
    held = prepare(texts, length=LENGTH, seed=0).held
    kept = sorted(set(range(len(texts))) - set(held.tolist()))
    files = {
        "train": lines(texts, kept, folder / "train.txt"),
        "validation": lines(texts, held.tolist(), folder / "validation.txt"),
        "all": lines(texts, range(len(texts)), folder / "all.txt"),
    }
    if with_test:
        test = read_texts(source / "test.csv.gz", names=texts.names)
        files["test"] = lines(test, range(len(test)), folder / "test.txt")
    return files


def trained(path, seed, **settings):
    begun = time.perf_counter()
    return package.train_supervised(
        str(path), seed=seed, **FIXED, **settings
    ), time.perf_counter() - begun


def smaller(model, path, settings, quantised, seed, folder):
    """Quantise a model; return it and the bytes of its file."""
    model.quantize(
        input=str(path),
        retrain=True,
        qnorm=True,
        thread=1,
        verbose=0,
        epoch=settings["epoch"],
        lr=settings["lr"],
        **quantised,
    )
    file = folder / f"{seed}.ftz"
    model.save_model(str(file))
    size = file.stat().st_size
    file.unlink()
    return model, size


def accuracy(model, path):
    count, precision, _ = model.test(str(path))
    return round(precision * count) / count


def grid():
    """Yield the settings of the first stage."""
    for lr, epoch, ngrams in itertools.product(LR, EPOCHS, NGRAMS):
        yield {"lr": lr, "epoch": epoch, "wordNgrams": ngrams, "dim": 10}


def known(rows, settings):
    """Whether a run with these settings is there already."""
    return any(all(row.get(name) == value for name, value in settings.items()) for row in rows)


def tune(out):
    """Choose learning rate, epochs and n-grams, then the width, then how it is made smaller, each by validation.

    Every run is kept at once: stopped, the search goes on where it was.
    """
    found = (
        json.loads(out.read_text())
        if out.exists()
        else {"fixed": FIXED, "full": [], "quantised": []}
    )
    full, small = found["full"], found["quantised"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = parts(folder, with_test=False)

        def keep(rows, row):
            rows.append(row)
            print(row, flush=True)
            write_json(out, found | {"fasttext": version("fasttext-wheel")} | made_by())

        def look(settings):
            if not known(full, settings):
                model, seconds = trained(files["train"], 0, **settings)
                keep(
                    full,
                    {
                        **settings,
                        "validation": accuracy(model, files["validation"]),
                        "seconds": round(seconds, 1),
                    },
                )

        for settings in grid():
            look(settings)
        best = max(full, key=lambda row: row["validation"])
        for dim in DIMS[1:]:
            look({**{name: best[name] for name in NAMES}, "dim": dim})
        ranked = sorted(full, key=lambda row: -row["validation"])
        pairs = next(row for row in ranked if row["wordNgrams"] == 2)
        for row in (*ranked[:2], pairs):
            settings = {name: row[name] for name in NAMES}
            for cutoff in CUTOFFS:
                how = {"cutoff": cutoff, "dsub": DSUB}
                if not known(small, settings | how):
                    model, _ = trained(files["train"], 0, **settings)
                    model, size = smaller(model, files["train"], settings, how, 0, folder)
                    keep(
                        small,
                        {
                            **settings,
                            **how,
                            "bytes": size,
                            "validation": accuracy(model, files["validation"]),
                        },
                    )
        found["best_full"] = ranked[0]
        found["chosen"] = max(
            (row for row in small if row["bytes"] <= MOST_BYTES),
            key=lambda row: (row["validation"], -row["bytes"]),
        )
        write_json(out, found | {"fasttext": version("fasttext-wheel")} | made_by())
    print("chosen:", found["chosen"])


def final(tuning, out, seeds):
    """Train the chosen setting with each seed on the training part and on all rows; read test once for each."""
    chosen = json.loads(tuning.read_text())["chosen"]
    settings = {name: chosen[name] for name in NAMES}
    quantised = {name: chosen[name] for name in ("cutoff", "dsub")}
    begun, rows = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = parts(folder, with_test=True)
        for rows_used, seed in itertools.product(("train", "all"), seeds):
            model, seconds = trained(files[rows_used], seed, **settings)
            row = {"rows": rows_used, "seed": seed, "seconds": round(seconds, 1)}
            row["full"] = {part: accuracy(model, files[part]) for part in ("validation", "test")}
            model, row["bytes"] = smaller(
                model, files[rows_used], settings, quantised, seed, folder
            )
            row["quantised"] = {
                part: accuracy(model, files[part]) for part in ("validation", "test")
            }
            if rows_used == "all":  # it has seen those rows
                del row["full"]["validation"], row["quantised"]["validation"]
            rows.append(row)
            print(row, flush=True)
    mean = {
        used: {
            kind: sum(row[kind]["test"] for row in rows if row["rows"] == used) / len(seeds)
            for kind in ("full", "quantised")
        }
        for used in ("train", "all")
    }
    found = {
        "settings": settings,
        "quantised": quantised,
        "fixed": FIXED,
        "runs": rows,
        "mean_test_accuracy": mean,
    }
    write_json(
        out,
        found
        | {"fasttext": version("fasttext-wheel"), "seconds": time.perf_counter() - begun}
        | made_by(),
    )
    print(mean)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--test", action="store_true", help="read the test part, with the setting chosen before"
    )
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.test:
        final(
            given.out / "fasttext-tuning.json",
            given.out / "fasttext.json",
            [int(seed) for seed in given.seeds.split(",")],
        )
    else:
        tune(given.out / "fasttext-tuning.json")
