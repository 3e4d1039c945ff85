"""Language models: a word LSTM over any table, and the loop that trains any word model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from featherbed.errors import ArgumentError, NotPackable
from featherbed.optim import clip_grad_norm_
from featherbed.optim.averaged import Averaged
from featherbed.progress import show_progress
from featherbed.tables.model import auxiliary_loss, split_codes
from featherbed.tables.sizes import measure
from featherbed.tasks.checkpoints import Checkpoints
from featherbed.tasks.data import Corpus
from featherbed.tasks.results import Result
from featherbed.tasks.training import Training
from featherbed.tasks.word_model import Cell, Read, State, WordModel

SPREAD, LEAST = 5.0, 5  # of random lengths, as in Merity et al. 2017


class LanguageModel(WordModel):
    """words -> table -> LSTM -> logits over the words, through the same table (tied) or a matrix of its own.

    >>> import featherbed as fb
    >>> model = LanguageModel(fb.AnchorTable(100, 16, anchors=8), hidden=16)
    >>> model(torch.zeros(5, 2, dtype=torch.int64))[0].shape
    torch.Size([5, 2, 100])
    """

    def __init__(
        self,
        words: nn.Module,
        *,
        hidden: int = 200,
        layers: int = 2,
        tied: bool = True,
        dropout: float = 0.2,
        samples: int | None = None,
        drop_words: float = 0.0,
    ) -> None:
        super().__init__(words, width=hidden, tied=tied, samples=samples, drop_words=drop_words)
        self.lstm = nn.LSTM(
            self.table.embedding_dim, hidden, layers, dropout=dropout if layers > 1 else 0.0
        )
        self.dropout = nn.Dropout(dropout)

    def read(self, rows: Tensor, state: State | None) -> Read:
        """Dropout, LSTM, dropout."""
        hidden, state = self.lstm(self.dropout(rows), state)
        return Read(self.dropout(hidden), state)

    def cells(self) -> list[Cell]:
        """Return the weights of the layers."""
        return [cast(Cell, tuple(layer)) for layer in self.lstm.all_weights]


def columns(ids: NDArray[np.int64], count: int) -> Tensor:  # [N] -> [N // count, count]
    """Cut a text into ``count`` columns that are read side by side."""
    length = len(ids) // count
    if length < 2:
        raise ArgumentError(f"{len(ids)} words are too few for {count} columns")
    return torch.from_numpy(ids[: length * count].reshape(count, length).T.copy())


def detached(state: State | None) -> State | None:
    """Cut the state off from the graph that made it."""
    if state is None:
        return None
    return tuple(detached(part) if isinstance(part, tuple) else part.detach() for part in state)


def exp(loss: float) -> float:
    """Return e^loss, short of overflow: a diverging run has a large perplexity, not a crash."""
    return math.exp(min(loss, 700.0))


@torch.no_grad()
def perplexity(
    model: WordModel, ids: NDArray[np.int64], batch: int = 10, length: int = 70
) -> float:
    """Return exp(mean cross-entropy) of a text, over all words."""
    model.eval()
    text, state = columns(ids, batch), None
    everything = model.all_rows()
    total, count = 0.0, 0
    for start in range(0, len(text) - 1, length):
        target = text[start + 1 : start + 1 + length]
        found = model.losses(text[start : start + len(target)], target, state, everything)
        state, total, count = (
            found.state,
            total + float(found.plain) * target.numel(),
            count + target.numel(),
        )
    return exp(total / count)


def segments(count: int, length: int, draw: Sequence[int] | None = None) -> list[tuple[int, int]]:
    """Cut ``count`` places that have a next one into pieces of ``length``; with ``draw``, numbers that seed it, at random.

    As Merity et al. 2017: N(length, 5²), or N(length / 2, 5²) once in twenty, at least 5.

    >>> segments(10, 4)
    [(0, 4), (4, 8), (8, 10)]
    """
    rng = None if draw is None else np.random.default_rng(draw)
    cuts = [0]
    while cuts[-1] < count:
        taken = length
        if rng is not None:
            taken = max(
                LEAST, int(rng.normal(length if rng.random() < 0.95 else length / 2, SPREAD))
            )
        cuts.append(min(count, cuts[-1] + taken))
    return list(pairwise(cuts))


def train_epoch(
    model: WordModel,
    optimizer: torch.optim.Optimizer,
    text: Tensor,  # int64 [N, columns]
    cuts: Sequence[tuple[int, int]],
    clip: float,
    before: Callable[[int, int], None],
    after: Callable[[float, int], None],
) -> tuple[float, int]:
    """Read the text once, a piece at a time; return perplexity and number of words. ``before`` and ``after`` see each step."""
    model.train()
    clipped = split_codes(model)[1]
    total, count, state = 0.0, 0, None
    for start, stop in cuts:
        target = text[start + 1 : stop + 1]
        before(start, stop)
        optimizer.zero_grad()
        found = model.losses(text[start:stop], target, detached(state))
        (found.whole + auxiliary_loss(model)).backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(clipped, clip)
        optimizer.step()
        state, total, count = (
            found.state,
            total + float(found.plain.detach()) * target.numel(),
            count + target.numel(),
        )
        after(exp(total / count), count)
    return exp(total / count), count


def train(
    model: WordModel,
    optimizer: torch.optim.Optimizer,
    corpus: Corpus,
    *,
    epochs: int = 10,
    batch: int = 20,
    length: int = 35,
    clip: float = 0.25,
    patience: int = 3,
    seed: int = 0,
    random_length: bool = False,
    rate: Callable[[float], float] | None = None,
    schedulers: Sequence[Any] = (),
    checkpoints: Checkpoints | None = None,
    settings: dict[str, Any] | None = None,
    progress: bool = True,
    name: str = "lm",
) -> Result:
    """Fit the model by truncated back-propagation; stop ``patience`` epochs after the best validation perplexity.

    ``rate`` gives the share of the learning rate at a place of training, from 0 to 1; with ``random_length`` it is besides
    proportional to the length of a piece. ``schedulers`` step with the optimizer. Under ``fb.Averaged`` the averages are
    validated. The best parameters are left in the model. With ``checkpoints`` every epoch is saved and a stopped run goes on
    from the last; Ctrl-C ends training early with the best model so far.
    """
    torch.manual_seed(seed)  # dropout draws from torch's own generator
    text = columns(corpus.train, batch)
    cuts = [
        segments(len(text) - 1, length, (seed, epoch) if random_length else None)
        for epoch in range(epochs)
    ]
    ends = np.cumsum([0, *map(len, cuts)]).tolist()
    loop = {"epochs": epochs, "batch": batch, "length": length, "clip": clip, "patience": patience}
    result = Result(name, {**loop, **(settings or {})}, seed)
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    training = Training(
        result,
        model,
        optimizer,
        metric="validation_perplexity",
        patience=patience,
        checkpoints=checkpoints,
        stepped=schedulers,
    )
    display = show_progress(
        name, ends[-1], completed=ends[min(training.first, epochs)], shown=progress
    )
    with training, display as shown:
        for epoch in training.epochs(epochs):
            begun = time.perf_counter()

            def before(start: int, stop: int, epoch: int = epoch) -> None:
                share = 1.0 if rate is None else rate((epoch + start / len(text)) / epochs)
                share *= (stop - start) / length if random_length else 1.0
                for group in optimizer.param_groups:
                    group["lr"] = group["initial_lr"] * share

            def after(
                train_perplexity: float, count: int, epoch: int = epoch, begun: float = begun
            ) -> None:
                for scheduler in schedulers:
                    scheduler.step()
                speed = count / (time.perf_counter() - begun)
                shown.update(
                    advance=1,
                    note=f"epoch {epoch}, train {train_perplexity:.1f}, {speed:,.0f} tokens/s",
                )

            train_perplexity, count = train_epoch(
                model, optimizer, text, cuts[epoch], clip, before, after
            )
            row = {
                "epoch": epoch,
                "train_perplexity": train_perplexity,
                "seconds": time.perf_counter() - begun,
            }
            row["tokens_per_second"] = count / row["seconds"]
            with averages(optimizer):
                row["validation_perplexity"] = perplexity(model, corpus.validation)
                if isinstance(optimizer, Averaged):
                    optimizer.observe(row["validation_perplexity"])
                row["parameters"] = model.table.parameter_count()
                training.record(row)
    result.metrics["validation"] = {"perplexity": perplexity(model, corpus.validation)}
    result.sizes = {"words": sizes_of(model, optimizer)}
    return result


def averages(optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
    """Return a block in which parameters are their averages, where an optimizer makes these."""
    return optimizer.swapped() if isinstance(optimizer, Averaged) else nullcontext()


def sizes_of(model: WordModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the sizes of the words' table; of one that has no packed form, those that do not need it."""
    try:
        return asdict(model.table.sizes(optimizer))
    except NotPackable:
        dense = model.table.num_embeddings * model.table.embedding_dim * 4
        known = {
            "training": measure(model.table, optimizer),
            "parameters": model.table.parameter_count(),
        }
        return {"file": None, "resident": None, **known, "dense": dense, "code_bits": None}
