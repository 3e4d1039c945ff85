"""Run the runs of a settings file, one result file for each: python experiments/foundation/run.py ml1m.toml [run ...]

Runs that have a result file are left alone; stopped ones go on from their last epoch.
"""

import sys
import tomllib
from pathlib import Path

import torch

import featherbed as fb
from featherbed.tasks import lm, ratings
from featherbed.tasks.checkpoints import Checkpoints
from featherbed.tasks.data import find_data, read_movielens, read_ptb

HERE = Path(__file__).parent


def make(settings, rows, dim, generator):
    table = fb.make_table(settings["table"], rows, dim, generator=generator)
    if "init_std" in settings:
        with torch.no_grad():
            table.weight.mul_(settings["init_std"])
    return table


def optimizer_of(model, tables, settings):
    lam, lr = settings.get("lam"), settings["lr"]
    penalties = {} if lam is None else {table.transform: fb.NonNegativeL1(lam) for table in tables}
    if settings["optimizer"] == "adam":
        return fb.Proximal(torch.optim.Adam(model.parameters(), lr=lr), penalties)
    rule = settings.get("prox", "preconditioned")
    return fb.Yogi(
        model.parameters(),
        lr,
        weight_decay=settings.get("weight_decay", 0.0),
        penalties=penalties,
        prox=rule,
    )


def run_ratings(name, settings, checkpoints):
    data = read_movielens(find_data(settings["data"]))
    train, validation, test = data.split(settings["seed"])
    torch.set_num_threads(1)  # batches of a thousand small rows gain nothing by a second thread
    generator = torch.Generator().manual_seed(settings["seed"])
    users, items = (
        make(settings, n, settings["dim"], generator) for n in (data.num_users, data.num_items)
    )
    mean = float(train.values.mean()) if settings["mean"] else 0.0
    model = ratings.MatrixFactorization(
        users, items, mean=mean, biases="apart" if settings["biases"] else "none"
    )
    loop = {key: settings[key] for key in ("epochs", "batch", "seed")}
    optimizer = optimizer_of(model, (users, items), settings)
    result = ratings.train(
        model,
        optimizer,
        train,
        validation,
        checkpoints=checkpoints,
        settings=settings,
        name=name,
        **loop,
    )
    result.metrics["test"] = {"mse": ratings.mean_squared_error(model, test)}
    return result


def run_lm(name, settings, checkpoints):
    corpus = read_ptb(find_data(settings["data"]))
    generator = torch.Generator().manual_seed(settings["seed"])
    table = make(settings, len(corpus.words), settings["dim"], generator)
    torch.manual_seed(settings["seed"])
    model = lm.LanguageModel(table, hidden=settings["dim"])
    optimizer = optimizer_of(model, (table,), settings)
    loop = {key: settings[key] for key in ("epochs", "batch", "length", "seed")}
    before = lm.perplexity(model, corpus.validation)
    result = lm.train(
        model, optimizer, corpus, checkpoints=checkpoints, settings=settings, name=name, **loop
    )
    result.metrics["untrained"] = {"perplexity": before}
    result.metrics["test"] = {"perplexity": lm.perplexity(model, corpus.test)}
    return result


def main():
    path = HERE / sys.argv[1]
    file = tomllib.loads(path.read_text())
    common = {key: value for key, value in file.items() if not isinstance(value, dict)}
    for name, own in file["runs"].items():
        target = HERE / "results" / f"{path.stem}-{name}.json"
        if target.exists() or (len(sys.argv) > 2 and name not in sys.argv[2:]):
            continue
        settings = {**common, **file["defaults"], **own}
        run = {"ratings": run_ratings, "lm": run_lm}[common["task"]]
        result = run(f"{path.stem}-{name}", settings, Checkpoints(HERE / "runs" / target.stem))
        if result.interrupted:
            print(f"{target.stem}: interrupted; run again to go on")
            return
        result.write(target)
        print(f"{target.stem}: {result.metrics}, {result.seconds:.0f} s, {result.history[-1]}")


if __name__ == "__main__":
    main()
