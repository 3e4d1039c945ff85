"""Ways of training a large softmax: all words, sampled words, noise-contrastive estimation.

Settings: ``softmax`` (full, sampled or nce), ``samples`` (words drawn for each step), ``table`` (a
spec), ``dim``, ``layers``, ``dropout``, ``lr`` (AdamW, along half a cosine) and those of the loop.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import featherbed as fb
from featherbed.apps.language.model import AllRows, Losses, LSTMModel, State
from featherbed.apps.language.train import cosine_span, perplexity
from featherbed.errors import ArgumentError
from featherbed.io.texts import Corpus
from research.harness.records import Outcome, Run, outcome_of
from research.runners.language import shortened
from research.runners.tables import train_lstm

WAYS = ("full", "sampled", "nce")


class NCEModel(LSTMModel):
    """An LSTM trained by noise-contrastive estimation; biases start at -log V (Mnih and Teh 2012).

    >>> model = NCEModel(fb.DenseTable(50, 8), hidden=8, samples=5)
    >>> ids = torch.zeros(3, 2, dtype=torch.int64)
    >>> float(model.losses(ids, ids).cross_entropy) > 0
    True
    """

    def __init__(self, words: Any, **rest: Any) -> None:
        super().__init__(words, **rest)
        torch.nn.init.constant_(self.bias, -math.log(len(self.bias)))

    def losses(
        self,
        ids: Tensor,
        targets: Tensor,
        state: State | None = None,
        all_rows: AllRows | None = None,
    ) -> Losses:  # int64 [T, B] twice
        """Return the loss of telling the targets from noise, in evaluation the cross-entropy."""
        if not self.training:
            return super().losses(ids, targets, state, all_rows)
        assert self.samples is not None
        output = self.run(self.input_rows(ids), state)
        noise = fb.NCE(self.output_table, self.samples, bias=self.bias)
        loss: Tensor = noise(output.hidden, targets)
        return Losses(loss, loss, output.state)


def run_softmax(settings: Mapping[str, Any], seed: int, source: Corpus, run: Run) -> Outcome:
    """Train a language model; measure its full perplexity on the test part once, and its speed."""
    way = settings["softmax"]
    if way not in WAYS:
        raise ArgumentError(f"softmax={way!r}: use one of {', '.join(WAYS)}")
    corpus = shortened(source, settings["cut"]) if "cut" in settings else source
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(seed)
    table = fb.make_table(
        settings["table"], len(corpus.words), settings["dim"], generator=generator
    )
    table.scale_initial_rows(settings["init_std"])
    torch.manual_seed(seed)
    samples = None if way == "full" else min(settings["samples"], len(corpus.words))
    kind = NCEModel if way == "nce" else LSTMModel
    model = kind(
        table,
        hidden=settings["dim"],
        layers=settings["layers"],
        samples=samples,
        dropout=settings["dropout"],
    )
    optimizer = fb.AdamW(model.parameters(), settings["lr"], weight_decay=0.0)
    span = (0, settings["epochs"])
    steps = len(corpus.train) // (settings["batch"] * settings["length"])
    schedule = cosine_span(span, settings["epochs"], max(1, steps) * settings["epochs"])
    result = train_lstm(model, optimizer, corpus, settings, seed, run, schedule)
    result.metrics["test"] = {"perplexity": perplexity(model, corpus.test)}
    outcome = outcome_of(result)
    speeds = [row["tokens_per_second"] for row in outcome.history]
    outcome.measures["tokens_per_second"] = statistics.median(speeds)
    return outcome
