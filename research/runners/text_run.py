"""Text runs: classifiers on AG-News and IMDB, language models on the Penn Treebank, as the settings file beside this says.

    python experiments/text/run.py agnews            # every run, every seed; what has a result is left alone
    python experiments/text/run.py ptb dense ant-500
    python experiments/text/run.py imdb --seeds 0,1

Every run reads its test part once and writes results/TASK-NAME-seed-N.json. `report.py` makes the page of them.
"""

import argparse
import json
import tempfile
import time
import tomllib
from dataclasses import asdict
from pathlib import Path

from featherbed.errors import NotPackable
from featherbed.packed.report import file_size
from featherbed.tasks.continuation import continuation
from featherbed.tasks.data import find_data, read_ptb
from featherbed.tasks.documents import prepare
from featherbed.tasks.language import fit_language
from featherbed.tasks.language_recipe import LanguageRecipe
from featherbed.tasks.lm import perplexity
from featherbed.tasks.results import made_by, write_json
from featherbed.tasks.text import TextRecipe, accuracy, fit_text
from featherbed.tasks.text_job import TextJob, train_text
from featherbed.tasks.texts import read_texts
from featherbed.tasks.word_tables import WordTable

HERE = Path(__file__).resolve().parent


def merged(common, own):
    """Return the settings of a run: what all have, and what it has of its own; tables in them are merged too."""
    found = dict(common)
    for key, value in own.items():
        found[key] = (
            {**found[key], **value}
            if isinstance(value, dict) and isinstance(found.get(key), dict)
            else value
        )
    return found


def agnews(settings, seed):
    """Train through the command's own path and store; accuracies are those of the files."""
    folder = find_data("ag-news")
    recipe = TextRecipe(words=WordTable(**settings["words"]), **settings["recipe"])
    with tempfile.TemporaryDirectory() as place:
        job = TextJob(
            folder / "train_subset.csv.gz",
            Path(place) / "out",
            recipe,
            test=folder / "test.csv.gz",
            stored=settings["stored"],
            preparing=settings["preparing"],
            seed=seed,
            progress=False,
        )
        outcome = train_text(job, print)
    return outcome.metrics, outcome.fitted.result.history


def imdb(settings, seed):
    """Train on the reviews as they are cut by the settings."""
    folder = find_data("imdb")
    train = read_texts(folder / "train.tsv.xz")
    test = read_texts(folder / "test.tsv.xz", names=train.names)
    prepared = prepare(train, test, seed=seed, **settings["preparing"])
    recipe = TextRecipe(words=WordTable(**settings["words"]), **settings["recipe"])
    fitted = fit_text(recipe, prepared, seed=seed, progress=False)
    found = {
        "test": {"accuracy": accuracy(fitted.model, prepared.test, prepared.length)},
        "validation": fitted.result.metrics["validation"],
        "words": len(prepared.words),
        "parameters": fitted.made.table.parameter_count(),
    }
    return found, fitted.result.history


def ptb(settings, seed):
    """Train a language model; what its table takes is counted, and packed where it can be."""
    corpus = read_ptb(find_data("ptb"))
    recipe = LanguageRecipe(words=WordTable(**settings["words"]), **settings["recipe"])
    fitted = fit_language(recipe, corpus, seed=seed, progress=False)
    table, model = fitted.made.table, fitted.model
    found = {
        "test": {"perplexity": perplexity(model, corpus.test)},
        "validation": {"perplexity": perplexity(model, corpus.validation)},
        "parameters": table.parameter_count(),
        "dense_parameters": table.num_embeddings * table.embedding_dim,
        "tokens_per_second": [row["tokens_per_second"] for row in fitted.result.history],
        "continuation": continuation(model, corpus.words, "the company said", 30, seed=seed),
        "notes": list(fitted.made.notes),
    }
    try:
        found["bytes"] = file_size(
            table.eval().pack(values="float16", dictionary="float16"), keys=False
        )
    except NotPackable:
        found["bytes"] = None
    return found, fitted.result.history


TASKS = {"agnews": agnews, "imdb": imdb, "ptb": ptb}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seeds")
    given = parser.parse_args()
    file = tomllib.loads((HERE / "settings.toml").read_text())[given.task]
    seeds = [int(seed) for seed in given.seeds.split(",")] if given.seeds else file["seeds"]
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    for seed in seeds:
        for name in given.names or file["runs"]:
            path = results / f"{given.task}-{name}-seed-{seed}.json"
            if path.exists():
                continue
            settings, begun = merged(file["common"], file["runs"][name]), time.perf_counter()
            metrics, history = TASKS[given.task](settings, seed)
            record = {
                "task": given.task,
                "run": name,
                "seed": seed,
                "settings": settings,
                "metrics": metrics,
            }
            record |= {
                "seconds": round(time.perf_counter() - begun, 1),
                **made_by(),
                "history": history,
            }
            write_json(path, json.loads(json.dumps(record, default=asdict)))
            print(name, seed, {key: metrics[key] for key in ("test", "validation")}, flush=True)


if __name__ == "__main__":
    main()
