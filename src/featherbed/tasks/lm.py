"""Language models: a word LSTM over any table, with the softmax tied to it or not."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from featherbed.errors import ArgumentError
from featherbed.optim import clip_grad_norm_
from featherbed.tables.model import auxiliary_loss, split_codes
from featherbed.tables.table import Table
from featherbed.tasks.checkpoints import Checkpoints
from featherbed.tasks.data import Corpus
from featherbed.tasks.progress import training_bar
from featherbed.tasks.results import Result
from featherbed.tasks.training import Training

State = tuple[Tensor, Tensor]


class LanguageModel(nn.Module):
    """words -> table -> LSTM -> logits over the words, through the same table (tied) or a matrix of its own.

    >>> import featherbed as fb
    >>> model = LanguageModel(fb.AnchorTable(100, 16, anchors=8), hidden=16)
    >>> model(torch.zeros(5, 2, dtype=torch.int64))[0].shape
    torch.Size([5, 2, 100])
    """

    def __init__(self, words: Table, *, hidden: int = 200, layers: int = 2, tied: bool = True, dropout: float = 0.2) -> None:
        super().__init__()
        if tied and hidden != words.embedding_dim:
            raise ArgumentError(f"a tied softmax needs hidden={words.embedding_dim}, the table's width; got hidden={hidden}")
        self.words = words
        self.lstm = nn.LSTM(words.embedding_dim, hidden, layers, dropout=dropout if layers > 1 else 0.0)
        self.dropout = nn.Dropout(dropout)
        self.output = None if tied else nn.Linear(hidden, words.num_embeddings, bias=False)
        self.bias = nn.Parameter(torch.zeros(words.num_embeddings))

    def forward(self, ids: Tensor, state: State | None = None) -> tuple[Tensor, State]:  # int64 [T, B] -> [T, B, V]
        """Return the logits of the next word at every place, and the LSTM's state after the last."""
        hidden, state = self.lstm(self.dropout(self.words(ids)), state)
        hidden = self.dropout(hidden)
        logits = self.words.logits(hidden) if self.output is None else self.output(hidden)
        return logits + self.bias, state


def columns(ids: NDArray[np.int64], count: int) -> Tensor:  # [N] -> [N // count, count]
    """Cut a text into ``count`` columns that are read side by side."""
    length = len(ids) // count
    if length < 2:
        raise ArgumentError(f"{len(ids)} words are too few for {count} columns")
    return torch.from_numpy(ids[: length * count].reshape(count, length).T.copy())


def detached(state: State | None) -> State | None:
    """Cut the state off from the graph that made it."""
    return None if state is None else (state[0].detach(), state[1].detach())


def exp(loss: float) -> float:
    """Return e^loss, short of overflow: a diverging run has a large perplexity, not a crash."""
    return math.exp(min(loss, 700.0))


@torch.no_grad()
def perplexity(model: LanguageModel, ids: NDArray[np.int64], batch: int = 10, length: int = 70) -> float:
    """Return exp(mean cross-entropy) of a text."""
    model.eval()
    text, state = columns(ids, batch), None
    total, count = 0.0, 0
    for start in range(0, len(text) - 1, length):
        target = text[start + 1 : start + 1 + length]
        logits, state = model(text[start : start + len(target)], state)
        total += float(F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum"))
        count += target.numel()
    return exp(total / count)


def train_epoch(
    model: LanguageModel,
    optimizer: torch.optim.Optimizer,
    text: Tensor,  # int64 [N, columns]
    length: int,
    clip: float,
    report: Callable[[float, int], None],
) -> tuple[float, int]:
    """Read the text once, ``length`` words at a time; return perplexity and number of words. ``report`` sees each step."""
    model.train()
    clipped = split_codes(model)[1]
    total, count, state = 0.0, 0, None
    for place in range(0, len(text) - 1, length):
        target = text[place + 1 : place + 1 + length]
        optimizer.zero_grad()
        logits, state = model(text[place : place + len(target)], detached(state))
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        (loss + auxiliary_loss(model)).backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(clipped, clip)
        optimizer.step()
        total, count = total + float(loss.detach()) * target.numel(), count + target.numel()
        report(exp(total / count), count)
    return exp(total / count), count


def train(
    model: LanguageModel,
    optimizer: torch.optim.Optimizer,
    corpus: Corpus,
    *,
    epochs: int = 10,
    batch: int = 20,
    length: int = 35,
    clip: float = 0.25,
    patience: int = 3,
    seed: int = 0,
    checkpoints: Checkpoints | None = None,
    settings: dict[str, Any] | None = None,
    progress: bool = True,
    name: str = "lm",
) -> Result:
    """Fit the model by truncated back-propagation; stop ``patience`` epochs after the best validation perplexity.

    The best parameters are left in the model. With ``checkpoints`` every epoch is saved and a stopped run goes on from the
    last; Ctrl-C ends training early with the best model so far.
    """
    torch.manual_seed(seed)  # dropout draws from torch's own generator
    text = columns(corpus.train, batch)
    steps = math.ceil((len(text) - 1) / length)
    loop = {"epochs": epochs, "batch": batch, "length": length, "clip": clip, "patience": patience}
    result = Result(name, {**loop, **(settings or {})}, seed)
    training = Training(result, model, optimizer, metric="validation_perplexity", patience=patience, checkpoints=checkpoints)
    with training, training_bar(progress) as bar:
        task = bar.add_task(name, total=epochs * steps, completed=training.first * steps, note="")
        for epoch in training.epochs(epochs):
            begun = time.perf_counter()

            def report(train_perplexity: float, count: int, epoch: int = epoch, begun: float = begun) -> None:
                rate = count / (time.perf_counter() - begun)
                bar.update(task, advance=1, note=f"epoch {epoch}, train {train_perplexity:.1f}, {rate:,.0f} tokens/s")

            train_perplexity, count = train_epoch(model, optimizer, text, length, clip, report)
            row = {"epoch": epoch, "train_perplexity": train_perplexity, "seconds": time.perf_counter() - begun}
            row["tokens_per_second"] = count / row["seconds"]
            row["validation_perplexity"] = perplexity(model, corpus.validation)
            row["parameters"] = model.words.parameter_count()
            training.record(row)
    result.metrics["validation"] = {"perplexity": perplexity(model, corpus.validation)}
    result.sizes = {"words": asdict(model.words.sizes(optimizer))}
    return result
