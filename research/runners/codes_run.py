"""Run the runs of a settings file, one result file for each: python experiments/kd/run.py ptb.toml [run ...] [--words N]

Runs that have a result file are left alone; stopped ones go on from their last epoch. The run a guided one is guided by must
have its result first.
"""

import argparse
import dataclasses
import sys
import tomllib
from pathlib import Path

import torch

import featherbed as fb
from featherbed.tables.spec import parse_spec
from featherbed.tasks import lm
from featherbed.tasks.checkpoints import Checkpoints
from featherbed.tasks.data import find_data, read_ptb

HERE = Path(__file__).parent


def make(settings, rows, generator, runs):
    """Return the table of a run, its rows of the spread asked for, its guide the dense table of another run."""
    method, given = parse_spec(settings["table"])
    if "guide" in settings:
        path = runs / f"{settings['guide']}.safetensors"
        if not path.exists():
            raise SystemExit(f"run {settings['guide']!r} first: its table guides this one")
        matrix = torch.from_numpy(fb.load(path)[range(rows)])
        weights = {
            name: settings["guide_weight"] / ratio
            for name, ratio in (("weight", 1), ("reconstruct", 10), ("agree", 100))
        }
        given["guide"] = fb.Pretrained(matrix, autoencode=settings["autoencode"], **weights)
    table = method(rows, settings["dim"], generator=generator, **given)
    with torch.no_grad():
        (table.weight if method is fb.DenseTable else table.atoms).mul_(settings["init_std"])
    return table


def optimizer_of(model, settings):
    codes, others = fb.split_codes(model)
    step = torch.optim.SGD(others, lr=settings["lr"])
    return (
        step
        if not codes
        else fb.Several(step, torch.optim.SparseAdam(codes, lr=settings["code_lr"]))
    )


def run(name, settings, runs, words):
    corpus = read_ptb(find_data(settings["data"]))
    if words:
        cut = {part: getattr(corpus, part)[:words] for part in ("train", "validation", "test")}
        corpus = dataclasses.replace(corpus, **cut)
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(settings["seed"])
    table = make(settings, len(corpus.words), generator, runs)
    torch.manual_seed(settings["seed"])
    model = lm.LanguageModel(
        table, hidden=settings["dim"], tied=settings["tied"], dropout=settings["dropout"]
    )
    loop = {key: settings[key] for key in ("epochs", "batch", "length", "clip", "seed")}
    checkpoints = Checkpoints(runs / name)
    result = lm.train(
        model,
        optimizer_of(model, settings),
        corpus,
        checkpoints=checkpoints,
        settings=settings,
        name=name,
        **loop,
    )
    result.metrics["test"] = {"perplexity": lm.perplexity(model, corpus.test)}
    if isinstance(table, fb.KDTable):
        health = table.health()
        result.metrics["codes"] = {
            "utilisation": health.utilisation,
            "duplicates": health.duplicates,
        }
        result.metrics["codes"]["entropy"] = sum(health.entropy) / len(health.entropy)
    fb.save(table.eval(), runs / f"{name}.safetensors")
    return result


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("settings")
    parser.add_argument("only", nargs="*")
    parser.add_argument(
        "--words", type=int, help="only so many words of every part: to see that it runs"
    )
    parser.add_argument("--epochs", type=int, help="other than the settings say")
    parser.add_argument("--out", type=Path, default=HERE)
    given = parser.parse_args()
    file = tomllib.loads((HERE / given.settings).read_text())
    stem = Path(given.settings).stem
    common = {key: value for key, value in file.items() if not isinstance(value, dict)}
    runs = given.out / "runs" / stem
    runs.mkdir(parents=True, exist_ok=True)
    for name, own in file["runs"].items():
        target = given.out / "results" / f"{stem}-{name}.json"
        if target.exists() or (given.only and name not in given.only):
            continue
        settings = {**common, **file["defaults"], **own} | (
            {"epochs": given.epochs} if given.epochs else {}
        )
        result = run(name, settings, runs, given.words or settings.get("words"))
        if result.interrupted:
            sys.exit(f"{target.stem}: interrupted; run again to go on")
        target.parent.mkdir(exist_ok=True)
        result.write(target)
        print(f"{target.stem}: {result.metrics}, {result.seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
